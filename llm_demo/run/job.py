"""A run around its training: what is decided and checked before, what is written after."""

import argparse
import functools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from llm_demo.core.errors import UserError
from llm_demo.core.loop import ends_early, train
from llm_demo.core.mesh import World
from llm_demo.core.rows import collate
from llm_demo.core.timer import StepTimer
from llm_demo.flags.args import Args
from llm_demo.machine.dist import from_rank0
from llm_demo.machine.files import finite, write_json
from llm_demo.machine.text import counted
from llm_demo.model.costs import parameters_of, state_bytes
from llm_demo.model.model_folder import describe_model
from llm_demo.run.folder import published
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
        self._resume(copies)
        saver, steps = self.saver, self.plan.horizon.max_steps
        first, early = saver.first_step, ends_early(self.args, self.records.history.evals)
        if first < steps and not early:
            return True
        if first > steps:
            self.log.say(
                f"nothing to train: {saver.path} is of step {first}, beyond the run's "
                f"{counted(steps, 'step')}; to train on, set --max_steps above {first}"
            )
            return False
        ended = (self.log.folder / "summary.json").exists()
        unevaluated = saver.facts.get("unevaluated") and self.plan.data.heldout
        if first == steps and saver.continues and unevaluated and not ended:
            return True  # it was stopped during the last evaluation
        why = "is of the last step" if first == steps else "has stopped early (--early_stopping)"
        self.log.say(f"nothing left to train: {saver.path} {why}")
        if saver.continues and not self.args.dry_run:
            self._end_again(ended)
        return False

    def _resume(self, copies: bool) -> None:
        """Make timer, records and saver, which begin after the checkpoint, if there is one."""
        args, world, log, plan = self.args, self.world, self.log, self.plan
        lora, source = plan.compute.lora, plan.source
        self.saver = Saver(
            args,
            world,
            log,
            identity=plan.identity,
            copies=copies,
            adapters=lora.facts() if lora else None,
            model=configuration_of(source.config),
        )
        first, path = self.saver.first_step, self.saver.path
        self.saver.describe = functools.partial(
            describe_model,
            source.folder,
            source.tokenizer,
            folder=log.folder / "model",
            config=plan.described,
            name=args.model_name_or_path,
            weights=source.weights,
            earlier=path and path.parent.parent / "model",
        )
        self.timer = StepTimer(world, args.comm_timer)
        self.records = Records(
            args,
            world,
            log,
            first_step=first,
            max_steps=plan.horizon.max_steps,
            dtype=plan.compute.dtype,
        )
        if self.saver.path:
            self.records.history.resume(self.saver.facts)
        log.resolved(resumed_step=first)
        if first == 0:
            log.resolved(random_weights=source.weights is None)

    def _end_again(self, ended: bool) -> None:
        """Write what a run that was killed after its last step has not written."""
        saver, log = self.saver, self.log
        best = log.decided(best_of(self.args, self.records.history.evals, saver.path))
        if not ended:
            self.records.open()
        if self.args.save:
            from_rank0(self.world, saver.describe)  # someone may have deleted model/
        export_last(self, best)
        if not ended:
            end_run(self, best)


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
        return
    train(job, engine)
    history = job.records.history
    newest = job.saver.folder / f"step_{history.step:08d}"
    best = log.decided(best_of(args, history.evals, newest))
    export_last(job, best)
    if job.plan.sample_tokens:
        from llm_demo.run.answers import show_answers

        show_answers(job.plan, args.micro_batch_size, next_tokens=engine.next_tokens, log=log)
    end_run(job, best)


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
    needed = size * max(1, most - there)
    if needed > free:
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
    lines = []
    if losses[best] >= losses.get(0, math.inf):
        lines = ["warning: training made the held-out loss no better than before it"]
    return saved[best], lines


def export_last(job: Job, checkpoint: Path) -> None:
    """With --export: write the checkpoint as a Hugging Face folder, hf/ in the run's folder. Every
    rank calls; rank 0 writes, which may take an hour for a large model."""
    args, log = job.args, job.log
    out = log.folder / "hf"

    def write() -> str:
        if out.exists():
            return f"--export {args.export}: {out} exists already and is left unchanged"
        from llm_demo.run.export_run import export

        return export(checkpoint, out, args.export)

    if args.export != "none":
        log.say(from_rank0(job.world, write, long=True))


def end_run(job: Job, best: Path) -> None:
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
    summary = summarise(
        history,
        log.settings,
        seconds,
        peak_tflops=job.records.peak,
        profile=profile,
        host=host,
    )
    with log.writing():
        write_json(log.folder / "summary.json", finite(summary), indent=2)
    log.say(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    log.say(f"| {' | '.join(map(str, summary['row'].values()))} |")
    log.say(
        "(comm_ms of the rank with most; toks/s counts slots, padding included; peak memory of "
        "each rank)"
    )
    if len(history.exact) > 1:
        before, after = history.exact[0][1], history.exact[-1][1]
        log.say(f"held-out examples answered exactly: {before:.1%} before, {after:.1%} after")
    log.say(f"run: {log.folder}")
    settings = argparse.Namespace(**log.settings)
    systems = job.plan.data.train.documents.stats.systems
    system = systems[0] if len(systems) == 1 else ""
    from llm_demo.run.next_steps import next_steps

    lines = next_steps(log.folder, settings, summary["steps"], best, system)
    log.say("\n".join(["next steps:", *lines]))
    log.close()
