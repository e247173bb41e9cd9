"""The training loop, from step 1 to the last line; the same for all kinds of parallelism."""

import argparse
import dataclasses
import gc
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from llm_demo.core.batch import Batch, answers_of, label_positions
from llm_demo.core.decoder import skeleton
from llm_demo.core.errors import Stopped, UserError, counted
from llm_demo.core.mesh import World
from llm_demo.core.optim import lr_at
from llm_demo.core.rows import Packs, collate, heldout_rows, micro_batches, token_counts
from llm_demo.data.labels import stop_tokens
from llm_demo.export import export
from llm_demo.job.adapters import factors_of
from llm_demo.job.args import Args
from llm_demo.job.checkpoint import TOKENS, Checkpoints
from llm_demo.job.clock import Clock
from llm_demo.job.costs import flops_of_slot, parameters_of
from llm_demo.job.dist import from_rank0
from llm_demo.job.files import finite, write_json
from llm_demo.job.folder import published
from llm_demo.job.generate import generate, prompts_of
from llm_demo.job.log import Log
from llm_demo.job.next_steps import next_steps
from llm_demo.job.plan import Plan, configuration_of
from llm_demo.job.progress import progress
from llm_demo.job.source import describe_model
from llm_demo.job.summary import COLUMNS, summarise

EVAL_BATCHES = 8  # an evaluation checks for a stop every 8 micro-batches of each rank

LOADED = "dry run: the model is loaded; trying a forward pass"


def prepare(
    args: Args, world: World, plan: Plan, log: Log, copies: bool = False
) -> tuple[Clock, Checkpoints] | None:
    """The clock and the checkpoints of a run, or None if it has nothing left to train; then do what
    it may have been killed before. copies: see Checkpoints."""
    steps = plan.horizon.max_steps
    lora = plan.compute.lora
    clock = Clock(args, world, log, steps, plan.compute.dtype)
    adapters = lora.facts() if lora else None
    checkpoints = Checkpoints(
        args,
        world,
        log,
        clock,
        plan.identity,
        steps,
        copies=copies,
        adapters=adapters,
        model=configuration_of(plan.source.config),
    )
    refuse_other_tokens(args, plan, checkpoints)
    log.resolved(resumed_step=checkpoints.first_step)
    if checkpoints.first_step == 0:
        log.resolved(random_weights=plan.source.weights is None)
    summary = log.folder / "summary.json"
    over = ends_early(args, [tuple(pair) for pair in checkpoints.facts.get("evals", [])])
    if checkpoints.first_step < steps and not over:
        return clock, checkpoints
    if (
        checkpoints.first_step == steps
        and checkpoints.own
        and not summary.exists()
        and plan.data.heldout
    ):
        if checkpoints.facts.get("unevaluated"):  # stopped during the last evaluation
            return clock, checkpoints
    if (first := checkpoints.first_step) > steps:
        log.say(
            f"nothing to train: {checkpoints.path} is of step {first}, beyond the run's "
            f"{counted(steps, 'step')}; to train on, set --max_steps above {first}"
        )
        return None
    why = "is of the last step" if first == steps else "has stopped early (--early_stopping)"
    log.say(f"nothing left to train: {checkpoints.path} {why}")
    if checkpoints.own and not args.dry_run:
        best = best_of(args, checkpoints.facts, checkpoints.path)
        export_last(args, world, log, best)
        if not summary.exists():
            clock.history.resume(checkpoints.facts)
            clock.history.records += log.open(clock.history.first_step)
            finish(world, log, clock, best)
    return None


def refuse_other_tokens(args: Args, plan: Plan, checkpoints: Checkpoints) -> None:
    """Raise UserError if a checkpoint of an earlier version, whose identity does not say what was
    learnt, had other tokens in its steps than this version reads in the same data."""
    facts = checkpoints.facts
    if not facts or TOKENS in facts.get("identity", {}) or args.resume_anyway:
        return
    if not 0 < (done := facts["step"]) <= checkpoints.max_steps:
        return
    steps = [token_counts(plan.data.train, plan.rows_of(n)) for n in range(done)]
    now = np.sum(steps, axis=0)
    before = np.array([facts["tokens"], facts["label_tokens"]])
    # the last step had fewer rows if the run was to end there
    if (before > now).any() or (before <= now - steps[-1]).any():
        raise UserError(
            f"{checkpoints.path} was trained on {before[0]:,} tokens ({before[1]:,} learnt) in its "
            f"steps; this version reads {now[0]:,} ({now[1]:,}) in the same data (docs/data.md); "
            "to continue anyway, add --resume_anyway"
        )


def check_disk(args: Args, plan: Plan, log: Log, checkpoints: Checkpoints) -> None:
    """Log what the run's checkpoints take. Raises UserError if the disk can't hold them. Rank 0."""
    config, lora = plan.source.config, plan.compute.lora
    trained = parameters_of(config)
    if lora:
        shapes = {n: tuple(p.shape) for n, p in skeleton(config, "sdpa").named_parameters()}
        trained = sum(map(math.prod, factors_of(lora.facts(), shapes).values()))
    size = 12 * trained  # fp32: masters and both moments
    saves = 1 + (checkpoints.max_steps - 1) // args.save_every if args.save_every else 1
    kept = args.keep_last + args.keep_best if args.keep_last else saves
    most = min(saves, kept + 1)  # the next one is complete before the oldest is removed
    there = len(published(checkpoints.folder))
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


def heldout_batches(
    packs: Packs, replica: int, replicas: int, micro: int, max_docs: int
) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(batch, index, targets, answers) of each micro-batch of this replica's held-out rows. See
    label_positions and answers_of; all are on the CPU."""
    rows = heldout_rows(packs, replicas, micro)
    for batch in micro_batches(packs, rows, replica, replicas, micro, max_docs):
        index, targets = label_positions(batch.labels)
        yield batch, index, targets, answers_of(index, batch.cu_seqlens)


def train(
    args: Args,
    world: World,
    plan: Plan,
    log: Log,
    clock: Clock,
    checkpoints: Checkpoints,
    step: Callable,
    evaluate: Callable,
    ask: Callable,
    state: Callable,
    facts: Callable,
) -> None:
    """Train from the checkpoint or the beginning to the end. Every rank calls.

    A script passes what depends on its kind of parallelism:
    step(rows, n_labels, lr): an optimizer step on `rows`, the row numbers of all replicas; -1
        stands for a row of padding. Returns this rank's share of the loss and the gradient norm,
        0-dim tensors on the device
    evaluate(packs, micro): loss.score summed over this rank's rows of `packs`, fp64 [2] on the
        device
    ask(batch, index): the likeliest next tokens, see generate.generate
    state(): {name: tensor} for a checkpoint; facts(): {"adam_steps", "loss_scale"} for it"""
    source, data, horizon, lora = plan.source, plan.data, plan.horizon, plan.compute.lora
    if args.save:
        from_rank0(world, lambda: check_disk(args, plan, log, checkpoints))
    if args.dry_run:
        log.say(LOADED)
        try_forward(args, plan, ask)
        log.say("dry run: everything is ready for step 1")
        return
    clock.begin()

    def evaluation(done: int) -> bool:
        """Whether the evaluation is complete. A stop ends it early, and nothing is logged."""
        micro = args.eval_batch_size or args.micro_batch_size
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        with progress(what="evaluating", total=len(data.heldout), unit="rows") as bar:
            for packs in parts_of(data.heldout, EVAL_BATCHES * world.size * micro):
                if checkpoints.stop_asked():
                    return False
                total += evaluate(packs, micro)
                bar.update(len(packs))
        dist.all_reduce(total)
        clock.log_eval(done, *heldout_score(data.heldout, total))
        return True

    if checkpoints.own:  # a stop then asks to be continued, as after every step
        checkpoints.begin()
    if data.heldout and (not checkpoints.path or checkpoints.facts.get("unevaluated")):
        if not evaluation(checkpoints.first_step):
            checkpoints.end_before_first_step()
    checkpoints.begin()  # a new run: until now a stop loses nothing
    if checkpoints.first_step == horizon.max_steps:
        with clock.comm.mute():
            clock.history.records += log.open(checkpoints.first_step)
    for n in range(checkpoints.first_step, horizon.max_steps):
        # rows and label count of the whole step over all ranks, known without communication
        rows = plan.rows_of(n)
        n_tokens, n_labels = token_counts(data.train, rows)
        lr = lr_at(n, horizon.lr, args.warmup_steps, horizon.max_steps, args.lr_scheduler)
        loss, norm = step(rows, n_labels, lr)
        if n == checkpoints.first_step:
            # All that exists now stays to the end. A full collection would go through it: 0.25 s,
            # now and then, while the other ranks wait.
            gc.collect()
            gc.freeze()
            if world.device.type == "cuda":  # what compiling has left
                torch.cuda.empty_cache()
        # the numbers are read a step later, so the host never waits for the device
        slots, attended = rows.size * data.train.seq_len, data.train.attended(rows)
        flops = slots * flops_of_slot(source.config, attended, lora and lora.active)
        clock.end_step(n + 1, n_tokens, n_labels, slots, flops, loss, norm, lr)
        if n == checkpoints.first_step and args.save and world.rank == 0:
            describe_model(source.folder, source.tokenizer, log.folder / "model", source.config)
        last = n + 1 == checkpoints.max_steps
        if data.heldout and (last or args.eval_every and (n + 1) % args.eval_every == 0):
            evaluated = evaluation(n + 1)
        else:
            evaluated = True
        if evaluated and not last and ends_early(args, clock.history.evals):
            last, checkpoints.max_steps = True, n + 1
            log.say(f"early stopping: {args.early_stopping} evaluations without a better one")
        try:
            checkpoints.after_step(n + 1, state, facts, unevaluated=not evaluated)
        except Stopped:
            log.close()
            raise
        if last:
            break

    checkpoints.finish()
    newest = checkpoints.folder / f"step_{checkpoints.max_steps:08d}"
    facts = {"evals": clock.history.evals}
    best = best_of(args, facts, newest)
    export_last(args, world, log, best)
    show_answers(args, plan, log, ask)
    finish(world, log, clock, best)


def ends_early(args: Args, evals: list[tuple[int, float]]) -> bool:
    """Whether --early_stopping ends a run with these evaluations: (step, held-out loss)."""
    losses = [loss if math.isfinite(loss) else math.inf for _, loss in evals]
    best = losses.index(min(losses)) if losses else 0
    return bool(args.early_stopping) and len(losses) - 1 - best >= args.early_stopping


def best_of(args: Args, facts: dict, newest: Path) -> Path:
    """The checkpoint to export: with --early_stopping the one with the lowest held-out loss."""
    evals = [(loss, step) for step, loss in facts.get("evals", []) if math.isfinite(loss)]
    best = newest.with_name(f"step_{min(evals)[1]:08d}") if evals else newest
    return best if args.early_stopping and best.is_dir() else newest


def try_forward(args: Args, plan: Plan, ask: Callable) -> None:
    """Run a dry run's only forward pass, not compiled, since a model may be refused only there."""
    rows = plan.rows_of(0)[: args.micro_batch_size]
    batch = collate(plan.data.train, rows, plan.data.max_docs)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        ask(batch, torch.zeros(args.micro_batch_size, dtype=torch.int64))


def parts_of(packs: Packs, rows: int) -> Iterator[Packs]:
    """`packs` in parts of at most `rows` rows, in order."""
    for begin in range(0, len(packs), rows):
        part = slice(begin, begin + rows)
        yield dataclasses.replace(
            packs,
            label_counts=packs.label_counts[part],
            token_counts=packs.token_counts[part],
            row_start=packs.row_start[begin : begin + rows + 1],
        )


def heldout_score(packs: Packs, total: torch.Tensor) -> tuple[float, int, int]:
    """(held-out loss, rows answered exactly, rows) from loss.score's sum over all held-out rows."""
    loss, wrong = total.tolist()
    rows = len(packs.row_docs)
    return loss / int(packs.label_counts.sum()), rows - round(wrong), rows


def export_last(args: Args, world: World, log: Log, checkpoint) -> None:
    """With --export: write the checkpoint as a Hugging Face folder, hf/ in the run's folder. Every
    rank calls; rank 0 writes, which may take an hour for a large model."""
    out = log.folder / "hf"

    def write() -> str:
        if out.exists():
            return f"--export {args.export}: {out} exists already and is left unchanged"
        return export(checkpoint, out, args.export)

    if args.export != "none":
        log.say(from_rank0(world, write, long=True))


@torch.no_grad()
def show_answers(args: Args, plan: Plan, log: Log, ask: Callable) -> None:
    """Print the model's answers to three prompts and the expected ones."""
    tokens, data, tokenizer = plan.sample_tokens, plan.data, plan.source.tokenizer
    if not tokens:
        return
    seq_len = data.train.seq_len
    pairs = prompts_of(data.heldout or data.train, 3, seq_len - min(tokens, seq_len // 2))
    shape, stop = (args.micro_batch_size, seq_len), set(stop_tokens(tokenizer))
    prompts = [prompt for prompt, _ in pairs]
    answers = generate(ask, prompts, shape, data.max_docs, tokens, stop)
    for (prompt, expected), answer in zip(pairs, answers, strict=True):
        text = [tokenizer.decode(t, skip_special_tokens=True) for t in (prompt, answer, expected)]
        log.say(
            "\nprompt   {}\nanswer   {}\nexpected {}".format(*(" ".join(t.split()) for t in text))
        )


def finish(world: World, log: Log, clock: Clock, best: Path) -> None:
    """Write summary.json, print the table row and the next commands, and close the log. best: the
    checkpoint to export."""
    seconds, profile, host = clock.stop()
    if world.rank != 0:
        return
    history = clock.history
    if not history.records:  # of a run that had ended before
        log.say("no summary.json: metrics.jsonl holds no step of this run any more")
        log.close()
        return
    summary = summarise(history, log.settings, seconds, clock.peak, profile, host)
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
    if lines := next_steps(log.folder, settings, summary["steps"], best):
        log.say("\n".join(["next steps:", *lines]))
    log.close()
