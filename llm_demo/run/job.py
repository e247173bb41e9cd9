"""A run around its training: what is decided and checked before, what is written after."""

import argparse
import functools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from llm_demo.core.errors import UserError
from llm_demo.core.loop import ends_early, train
from llm_demo.core.mesh import World
from llm_demo.core.rows import IGNORE_INDEX, Batch, bounds_of, collate, position_ids
from llm_demo.core.timer import StepTimer
from llm_demo.data.labels import stop_tokens
from llm_demo.data.packs import prompts_of
from llm_demo.data.questions import question_reader
from llm_demo.flags.args import Args, DataArgs, names_of
from llm_demo.flags.parsing import flag_text
from llm_demo.machine.dist import from_rank0
from llm_demo.machine.files import finite, write_json
from llm_demo.machine.text import counted, module, resume, shown, users_folder
from llm_demo.model.costs import experts_of, parameters_of, state_bytes
from llm_demo.model.families import family_of, is_mixture
from llm_demo.model.model_folder import describe_model
from llm_demo.run.export_run import export, export_of
from llm_demo.run.folder import is_described, published
from llm_demo.run.log import Log
from llm_demo.run.plan import make_plan
from llm_demo.run.records import COLUMNS, Records, summarise
from llm_demo.run.saver import Saver

# Entries of a configuration that neither change what a model with given weights computes, nor
# which weights an untrained one starts with.
WITHOUT_EFFECT = re.compile(
    "_.*|.*_token_id|.*dtype|architectures|auto_map|id2label|label2id|max_position_embeddings"
    "|transformers_version|use_cache"
)
LOADED = "dry run: the model is loaded; trying a forward pass"


class Job:
    """What travels through a run together. script: its folder's name.

    plan: once `decide` has returned. timer, records, saver: once `open` has; they do not know each
    other."""

    def __init__(self, args: Args, world: World, script: str):
        self.args, self.world, self.log = args, world, Log(args, world, script)
        self.plan = self.timer = self.records = self.saver = None

    def decide(self, data_parallel: int, refuse: Callable) -> None:
        """See make_plan."""
        self.plan = make_plan(self.args, self.world, self.log, data_parallel, refuse)

    def planned(self) -> tuple:
        """What the estimates of memory depend on: (args, config, compute, training rows)."""
        plan = self.plan
        return self.args, plan.source.config, plan.compute, plan.data.train

    def open(self, copies: bool = False) -> bool:
        """Find the checkpoint to resume. Returns whether steps are left to train; if not, does what
        the run may have been killed before. copies: see Saver."""
        args, world, log, plan = self.args, self.world, self.log, self.plan
        lora, source, steps = plan.compute.lora, plan.source, plan.horizon.max_steps
        self.saver = saver = Saver(
            args, world, log, plan.identity, copies=copies,
            adapters=lora.facts() if lora else None, model=configuration_of(source.config),
            describe=functools.partial(
                describe_model, source.folder, source.tokenizer, log.folder / "model", source.config
            ),
        )  # fmt: skip
        self.timer = StepTimer(world, args.comm_timer)
        first = saver.first_step
        self.records = Records(args, world, log, first, steps, plan.compute.dtype)
        if saver.path:
            self.records.history.resume(saver.facts)
        log.resolved(resumed_step=first)
        if first == 0:
            log.resolved(random_weights=source.weights is None)
        over = ends_early(args, self.records.history.evals)
        if first < steps and not over:
            return True
        summary = log.folder / "summary.json"
        # stopped during the last evaluation
        late = saver.continues and plan.data.heldout and saver.facts.get("unevaluated")
        if first == steps and late and not summary.exists():
            return True
        if first > steps:
            log.say(
                f"nothing to train: {saver.path} is of step {first}, beyond the run's "
                f"{counted(steps, 'step')}; to train on, set --max_steps above {first}"
            )
            return False
        why = "is of the last step" if first == steps else "has stopped early (--early_stopping)"
        log.say(f"nothing left to train: {saver.path} {why}")
        if saver.continues and not args.dry_run:
            best = log.decided(best_of(args, self.records.history.evals, saver.path))
            ended = summary.exists()
            if not ended or not from_rank0(world, lambda: is_described(log.folder)):
                self.records.open()
            if args.save:
                from_rank0(world, saver.describe)  # someone may have deleted model/
            export_last(self, best)
            if not ended:
                finish(self, best)
        return False


def configuration_of(config) -> dict:
    """What a checkpoint keeps of a model's configuration, to recognise another one."""
    values = {k: v for k, v in config.to_dict().items() if not WITHOUT_EFFECT.fullmatch(k)}
    return json.loads(json.dumps(values, default=str))


def run(job: Job, engine) -> None:
    """Train, export, show answers. engine: see loop.train, with next_tokens as for generate."""
    args, log = job.args, job.log
    if args.save:
        from_rank0(job.world, lambda: check_disk(job))
    if args.dry_run:
        log.say(LOADED)
        batch = collate(job.plan.data.train, job.plan.rows_of(0)[: args.micro_batch_size])
        # not compiled: its only pass, since a model may be refused only there
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            engine.next_tokens(batch, torch.zeros(args.micro_batch_size, dtype=torch.int64))
        log.say("dry run: everything is ready for step 1")
        if command := without_dry_run(job.world):
            log.say(f"next step:\n  {'train:':<10}{command}")
        return
    train(job, engine)
    from_rank0(job.world, log.restore)
    history = job.records.history
    newest = job.saver.folder / f"step_{history.step:08d}"
    best = log.decided(best_of(args, history.evals, newest))
    export_last(job, best)
    show_answers(job, engine.next_tokens)
    finish(job, best)


def check_disk(job: Job) -> None:
    """Log what the run's checkpoints take. Raises UserError if the disk can't hold them. Rank 0."""
    args, log, config, lora = job.args, job.log, job.plan.source.config, job.plan.compute.lora
    trained = lora.parameters if lora else parameters_of(config)
    size = state_bytes(args) * trained
    saves = 1 + (job.plan.horizon.max_steps - 1) // args.save_every if args.save_every else 1
    kept = args.keep_last + bool(args.early_stopping) if args.keep_last else saves
    most = min(saves, kept + 1)  # the next one is complete before the oldest is removed
    there = len(published(job.saver.folder))
    above = next(p for p in (log.folder, *log.folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(above).free
    plan_of = f"about {size / 1e9:.3g} GB each, at most {most} at once"
    log.say(f"checkpoints: {plan_of}; {free / 1e9:,.0f} GB are free in {above}")
    if (needed := size * max(1, most - there)) > free:
        raise UserError(
            f"--output_dir {log.folder}: checkpoints take {plan_of}, {needed / 1e9:.3g} GB more "
            f"than now, but only {free / 1e9:.3g} GB are free: choose another disk, --keep_last 1, "
            "or --no_save"
        )


def best_of(args: Args, evals: list[tuple[int, float]], newest: Path) -> tuple[Path, list[str]]:
    """(the checkpoint to export, lines for the log): with --early_stopping the saved one with the
    lowest held-out loss."""
    losses = {step: loss for step, loss in evals if math.isfinite(loss)}
    saved = {int(path.name[-8:]): path for path in published(newest.parent)}
    measured = losses.keys() & saved.keys()
    if not (args.early_stopping and measured):
        return newest, []
    best = min(measured, key=lambda step: (losses[step], step))
    here = f"of the checkpoints in {newest.parent}, step {best}'s is the best ({losses[best]:.4f})"
    lines = []
    if 0 in losses and losses[best] >= losses[0]:
        lines.append(
            f"warning: training made the held-out loss no better than before it ({losses[0]:.4f}): "
            f"{here}"
        )
    lowest = min(losses, key=losses.get)
    if lowest and losses[lowest] < losses[best]:
        lines.append(
            f"warning: the checkpoint of step {lowest}, which has the lowest held-out loss "
            f"({losses[lowest]:.4f}), is gone: {here}"
        )
    return saved[best], lines


def refuse_experts(config) -> None:
    """Raise UserError if the model has experts, which DeepSpeed's engines do not train exactly."""
    if is_mixture(config):
        raise UserError(
            f"{config.model_type}: only fsdp/train_fsdp.py and fsdp_pp/train_fsdp_pp.py train "
            "models with experts"
        )


def check_experts(args, config) -> None:
    """Raise UserError for flags that this model has no use for, or that don't work with it."""
    name, experts = config.model_type, experts_of(config)
    flags = ("freeze_router", "router_bias_update", "router_aux_loss", "expert_parallel")
    if not is_mixture(config):
        for flag in flags:
            if getattr(args, flag):
                raise UserError(f"--{flag}: this model has no experts")
    elif args.router_aux_loss and family_of(config).experts.router_bias:
        raise UserError(f"--router_aux_loss: {name} balances its load by --router_bias_update")
    elif args.router_bias_update and not family_of(config).experts.router_bias:
        raise UserError(f"--router_bias_update: {name} has no bias for its experts")
    elif args.psgd_rank:
        raise UserError("--psgd_rank does not work with a mixture of experts")
    elif experts % (asked := args.expert_parallel or 1):
        raise UserError(f"--expert_parallel {asked} does not divide {experts}, the experts")


def export_last(job: Job, checkpoint: Path) -> None:
    """With --export: write the checkpoint as a Hugging Face folder, hf/ in the run's folder. Every
    rank calls; rank 0 writes, which may take an hour for a large model."""
    args, log = job.args, job.log
    out = log.folder / "hf"

    def write() -> str:
        if out.exists():
            return f"--export {args.export}: {out} exists already and is left unchanged"
        return export(checkpoint, out, args.export)

    if args.export != "none":
        log.say(from_rank0(job.world, write, long=True))


@torch.no_grad()
def show_answers(job: Job, next_tokens: Callable) -> None:
    """Print the model's answers to three prompts and the expected ones."""
    plan = job.plan
    tokens, data, tokenizer = plan.sample_tokens, plan.data, plan.source.tokenizer
    if not tokens:
        return
    seq_len = data.train.seq_len
    pairs = prompts_of(data.heldout or data.train, 3, seq_len - min(tokens, seq_len // 2))
    shape, stop = (job.args.micro_batch_size, seq_len), set(stop_tokens(tokenizer))
    prompts = [prompt for prompt, _ in pairs]
    answers = generate(next_tokens, prompts, shape, data.max_docs, tokens, stop)
    if pairs:
        job.log.say(f"\n{'held-out' if data.heldout else 'training'} documents:")
    question = question_reader(tokenizer)
    for (prompt, expected), answer in zip(pairs, answers, strict=True):
        text = [tokenizer.decode(t, skip_special_tokens=True) for t in (answer, expected)]
        text = [question(prompt), *text]
        job.log.say(
            "\nprompt   {}\nanswer   {}\nexpected {}".format(*(" ".join(t.split()) for t in text))
        )


def generate(
    ask: Callable, prompts: list[list[int]], shape: tuple[int, int], max_docs: int, tokens: int,
    stop: set[int],
) -> list[list[int]]:  # fmt: skip
    """Up to `tokens` more tokens for each prompt, greedily, ending at a token of `stop`: training's
    forward, without a cache, so that it works with any parallelism.

    ask(batch, index) -> int64 [B]: the most likely next tokens at the flat positions `index`, the
    same on every rank. shape (B, S) and max_docs: as in training, since a pipeline fixes them."""
    B, S = shape
    answers = []
    for first in range(0, len(prompts), B):
        rows = [list(p) for p in prompts[first : first + B]]
        growing = set(range(len(rows)))
        for _ in range(tokens):
            if not growing:
                break
            batch = _batch(rows, S, max_docs, B)
            index = torch.tensor([i * S + len(r) - 1 for i, r in enumerate(rows)])
            for i, token in enumerate(ask(batch, index).tolist()):
                if token in stop or len(rows[i]) == S:
                    growing.discard(i)
                elif i in growing:
                    rows[i].append(token)
        answers += rows
    return [row[len(prompt) :] for row, prompt in zip(answers, prompts, strict=True)]


def _batch(rows: list[list[int]], seq_len: int, max_docs: int, count: int) -> Batch:
    rows = rows + [[]] * (count - len(rows))
    ids = torch.tensor([row + [0] * (seq_len - len(row)) for row in rows])
    lengths = [[n for n in (len(row), seq_len - len(row)) if n] for row in rows]  # and of padding
    cu = torch.from_numpy(bounds_of(lengths, seq_len, max_docs))
    labels = torch.full_like(ids, IGNORE_INDEX)
    return Batch(ids, labels, position_ids(cu, (count, seq_len)), cu)


def finish(job: Job, best: Path) -> None:
    """Write summary.json, print the table row and the next commands, and close the log. best: the
    checkpoint to export."""
    log, history, seconds = job.log, job.records.history, job.timer.stop()
    profile, host = job.records.ended()
    if job.world.rank != 0:
        return
    if not history.records:  # of a run that had ended before
        log.say("no summary.json: metrics.jsonl holds no step of this run any more")
        log.close()
        return
    summary = summarise(history, log.settings, seconds, job.records.peak, profile, host)
    with log.writing():
        write_json(log.folder / "summary.json", finite(summary), indent=2)
    log.say(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    log.say(f"| {' | '.join(map(str, summary['row'].values()))} |")
    log.say("(comm_ms of the rank with most; toks/s counts every slot; peak memory of each rank)")
    if len(history.exact) > 1:
        before, after = history.exact[0][1], history.exact[-1][1]
        log.say(f"held-out rows answered exactly: {before:.1%} before, {after:.1%} after")
    log.say(f"run: {log.folder}")
    settings = argparse.Namespace(**log.settings)
    systems = job.plan.data.train.stats.systems
    system = systems[0] if len(systems) == 1 else ""
    if lines := next_steps(log.folder, settings, summary["steps"], best, system):
        log.say("\n".join(["next steps:", *lines]))
    log.close()


def without_dry_run(world: World) -> str:
    """This run's command without --dry_run. "" where the other nodes have commands of their own, or
    paths in it are relative to another folder."""
    if "NNODES" in os.environ or users_folder() != Path.cwd():
        return ""
    kept, before = [], ""
    for word in sys.argv[1:]:
        value = before in ("--dry_run", "--dry-run") and not word.startswith("--")
        if not value and not re.match("--(dry[_-]run|local_rank)(=|$)", word):
            kept.append(word)
        before = word
    count = f"NPROC_PER_NODE={world.local_size}"
    return f"{count} {module('launch', shown(Path(sys.argv[0])), *kept)}"


def next_steps(folder: Path, args: Args, steps: int, best: Path, system: str = "") -> list[str]:
    """Lines for the end of a run of `steps` optimizer steps, with only the commands that can work
    now, or after those above them. They work in the folder where the run was started. best: the
    checkpoint to export, which --early_stopping chooses. system: the system prompt of all rows."""
    lines, of = [], int(best.name.removeprefix("step_"))
    source = folder if of == steps else best
    if (folder / "checkpoints/latest").is_file():
        exported = export_of(folder / "hf", of)
        if not exported.exists():
            lines.append(("export", module("export", shown(source), shown(exported))))
        if getattr(args, "lora_rank", 0):  # hf/ holds adapters
            exported = export_of(folder / "merged", of)
            if not exported.exists():
                lines.append(("merge", module("export", shown(source), shown(exported), "--merge")))
        if (folder / "model/chat_template.jinja").is_file():  # a run's chat is of its newest
            asked = [f"--system={system}"] if system else []
            of_chat = shown(folder if of == steps else exported)
            lines.append(("chat", module("chat", of_chat, *asked)))
        lines.append(("evaluate", evaluate(exported, args)))
        if "NNODES" not in os.environ:  # else every node has its own command
            lines.append(("continue", resume(folder, "--max_steps", 2 * steps)))
    page = shown(folder / "report.html")
    lines.append(("report", module("report", shown(folder), "--out", page)))
    return [f"  {what + ':':<10}{line}" for what, line in lines]


def evaluate(exported: Path, args: Args) -> str:
    """The command to evaluate the exported model (and a base with weights) on held-out data, which
    is for the user to name where a run has none in a file."""
    base = args.model_name_or_path
    folder = Path(os.path.expanduser(base))
    trained = not folder.is_dir() or any(folder.glob("*.safetensors"))
    trained &= not args.tokenizer_name_or_path  # the base may have no tokenizer
    data = "FILE" if args.eval_json in ("auto", "none") else args.eval_json
    flags = ["--data", data]
    for name in names_of("evaluate"):
        value = getattr(args, name)
        if value != getattr(DataArgs, name):
            flags += [f"--{name}", flag_text(value)]
    return module("evaluate", "--models", *[base] * trained, shown(exported), *flags)
