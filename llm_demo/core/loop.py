"""The training loop; the same for all kinds of parallelism."""

import dataclasses
import gc
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from llm_demo.core.optim import lr_at
from llm_demo.core.rows import (
    Batch,
    Rows,
    answers_of,
    heldout_rows,
    label_positions,
    micro_batches,
    token_counts,
)

EVAL_BATCHES = 8  # an evaluation checks for a stop every 8 micro-batches of each rank


def train(job, engine) -> None:
    """Train from the checkpoint or the beginning to the end. Every rank calls.

    engine: a script's class. It has what depends on the kind of parallelism:
        step(rows, n_labels, lr): an optimizer step on `rows`, the row numbers of all ranks; -1
            stands for a row of padding. Returns this rank's share of the loss and the gradient
            norm, 0-dim tensors on the device
        score(packs, micro): loss.score summed over this rank's rows of `packs`, fp64 [2] on the
            device
        more(): {name: tensor} of further numbers of a logged step
        state(): {name: tensor} for a checkpoint; facts(): {"adam_steps", "loss_scale"} for it
    job: args, world, plan, log, and three that do not know each other: timer (StepTimer), records
        (what is logged) and saver (checkpoints)."""
    args, plan, timer, records, saver = job.args, job.plan, job.timer, job.records, job.saver
    train_rows, first, end = plan.data.train, saver.first_step, plan.horizon.max_steps
    begin(job, engine)
    for n in range(first, end):
        # rows and label count of the whole step over all ranks, known without communication
        rows = plan.rows_of(n)
        n_tokens, n_labels = token_counts(train_rows, rows)
        lr = lr_at(n, plan.horizon.lr, plan.horizon.warmup_steps, end, args.lr_scheduler)
        loss, norm = engine.step(rows, n_labels, lr)
        if n == first:
            settle(job.world.device)
        slots = rows.size * train_rows.seq_len
        timer.count(tokens=n_tokens, labels=n_labels, slots=slots, flops=plan.flops_of(rows))
        read = None
        numbers = {"loss": loss, "norm": norm, "bad_steps": records.count_bad(loss, norm)}
        if records.logs(n + 1):
            read = timer.end(numbers, engine.more, first=n == first)
        with timer.mute():
            records.add(n + 1, n_tokens, n_labels, lr, read)
            if records.profile(n + 2):
                timer.restart()
        last, evaluated = n + 1 == end, True
        if plan.data.heldout and (last or args.eval_every and (n + 1) % args.eval_every == 0):
            evaluated = evaluate(job, engine, n + 1)
        if evaluated and not last and ends_early(args, records.history.evals):
            last = True
            job.log.say(f"early stopping: {args.early_stopping} evaluations without a better one")
        save(job, engine, n + 1, last, evaluated)
        if last:
            break
    saver.finish()


def begin(job, engine) -> None:
    """What comes before the first step: an evaluation if it is due."""
    timer, records, saver = job.timer, job.records, job.saver
    timer.begin()
    if saver.continues:  # from its own checkpoint, so a stop asks to be continued
        saver.listen()
    if job.plan.data.heldout and (not saver.path or saver.facts.get("unevaluated")):
        if not evaluate(job, engine, saver.first_step):
            raise saver.stopped(f"before step {saver.first_step + 1}")
    saver.listen()  # from here on a signal saves first
    with timer.mute():
        if saver.first_step == job.plan.horizon.max_steps:  # only the last evaluation was missing
            records.open()
        records.profile(saver.first_step + 1)
    timer.restart()


def settle(device: torch.device) -> None:
    """Exclude from garbage collection all that exists after the first step, because it stays to the
    end. A full collection would go through it: 0.25 s, now and then, while other ranks wait. Also
    free what compiling has left."""
    gc.collect()
    gc.freeze()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def save(job, engine, step: int, last: bool, evaluated: bool) -> None:
    """Save a checkpoint if one is due. Raises Stopped after it if a signal has asked for that.
    evaluated False: a stop has ended this step's evaluation early; it is repeated on resume."""
    args, timer, records, saver = job.args, job.timer, job.records, job.saver
    if not args.save:
        return
    with timer.mute():
        if step == saver.first_step + 1:
            saver.prepare_folder(engine.state, last)
        stop = saver.stop_asked()
    if stop or last or args.save_every and step % args.save_every == 0:
        records.flush()  # metrics.jsonl holds all steps up to this one
        facts = {**engine.facts(), **records.history.facts(step)}
        facts |= {} if evaluated else {"unevaluated": True}
        saver.save(step, engine.state(), facts, wait=stop or last)
        timer.restart()
    if stop and not (last and evaluated):
        job.log.close()
        raise saver.stopped(f"after step {step}, checkpoint saved")


def evaluate(job, engine, step: int) -> bool:
    """Log the held-out loss. Returns whether it is complete: a stop ends it early, and nothing is
    logged."""
    args, world, packs = job.args, job.world, job.plan.data.heldout
    micro = args.micro_batch_size
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    with job.log.progress(what="evaluating", total=len(packs), unit="rows") as bar:
        for part in parts_of(packs, EVAL_BATCHES * world.size * micro):
            with job.timer.mute():
                if job.saver.stop_asked():
                    return False
            total += engine.score(part, micro)
            bar.update(len(part))
    dist.all_reduce(total)
    loss, wrong = total.tolist()
    documents, labels = len(packs.row_docs), int(packs.label_counts.sum())
    job.records.add_eval(step, loss / labels, documents - round(wrong), documents)
    job.timer.restart()
    return True


def parts_of(packs: Rows, rows: int) -> Iterator[Rows]:
    """`packs` in parts of at most `rows` rows, in order."""
    for begin in range(0, len(packs), rows):
        part = slice(begin, begin + rows)
        yield dataclasses.replace(
            packs,
            label_counts=packs.label_counts[part],
            token_counts=packs.token_counts[part],
            row_start=packs.row_start[begin : begin + rows + 1],
        )


def heldout_batches(
    packs: Rows, dp_rank: int, dp_size: int, micro: int
) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(batch, index, targets, answers) of each micro-batch of this data-parallel rank's held-out
    rows. See label_positions and answers_of; all are on the CPU."""
    rows = heldout_rows(packs, dp_size, micro)
    for batch in micro_batches(packs, rows, dp_rank, dp_size, micro):
        index, targets = label_positions(batch.labels)
        yield batch, index, targets, answers_of(index, batch.cu_seqlens)


@torch.no_grad()
def score_rows(
    forward: Callable, packs: Rows, dp_rank: int, dp_size: int, micro: int
) -> torch.Tensor:
    """What an engine's `score` returns. forward(batch, index, targets, answers): loss.score of a
    micro-batch."""
    batches = heldout_batches(packs, dp_rank, dp_size, micro)
    return sum(forward(*batch).double() for batch in batches)


def ends_early(args, evals: list[tuple[int, float]]) -> bool:
    """Whether --early_stopping ends a run with these evaluations: (step, held-out loss)."""
    losses = [loss if math.isfinite(loss) else math.inf for _, loss in evals]
    best = losses.index(min(losses)) if losses else 0
    return bool(args.early_stopping) and len(losses) - 1 - best >= args.early_stopping
