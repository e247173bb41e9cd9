"""Decides how long a run trains, on which rows in which order, and the size of its steps.

Decisions are (value, lines): what was decided, and what the log says of it."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from llm_demo.core.errors import UserError
from llm_demo.core.lora import Lora
from llm_demo.core.rows import Packs, order_rows
from llm_demo.data.packs import mix
from llm_demo.job.args import MAX_STEPS, Args
from llm_demo.job.text import counted

ABOUT_STEPS = 100  # what a run takes if no flag sets its length
FEW_STEPS = 30  # fewer learn little, so smaller steps are proposed


class Horizon(NamedTuple):
    """The length of the run and the size of its steps."""

    data_parallel: int  # ranks, or groups of ranks, that each train on rows of their own
    global_batch: int  # rows of an optimizer step
    max_steps: int
    n_total: int | None  # rows of the whole run, if num_epochs sets its length
    lr: float
    num_epochs: float | None  # None: max_steps sets the length
    warmup_steps: int


def usual_lr(trained: bool, lora: Lora | None) -> tuple[float, str, int]:
    """(the learning rate if the flags give none, what it is for, the most passes over small data).
    trained: the model has weights.

    Adapters want ten times that of all weights: "LoRA Without Regret" (Schulman et al. 2025), and
    2e-4 in "QLoRA" (Dettmers et al. 2023)."""
    if lora:
        return 2e-4, "adapters", 10
    return (2e-5, "trained weights", 10) if trained else (1e-3, "random weights", 100)


def decide_horizon(
    args: Args, data_parallel: int, train: Packs, usual: tuple, earlier: dict
) -> tuple[tuple[Horizon, Packs], list[str]]:
    """((rows of a step, number of steps and learning rate; the rows of all passes), lines). usual:
    from `usual_lr`; earlier: settings of the run that is resumed."""
    global_batch = args.micro_batch_size * args.grad_accum_steps * data_parallel
    lines = [
        f"batch: {counted(args.micro_batch_size, 'row')} x {args.grad_accum_steps} accumulated x "
        f"{data_parallel} data-parallel = {counted(global_batch, 'row')} = "
        f"{global_batch * train.seq_len:,} token slots a step"
    ]
    weights = train.stats.identity.get("weights")
    mixed = functools.partial(mix, train, weights, args.seed, args.pack_sequences)
    n_rows = len(mixed(1) if weights else train)  # of a pass
    epochs, chosen = args.num_epochs, not args.max_steps and args.num_epochs is None
    if chosen and not (epochs := float(earlier.get("num_epochs") or 0)):
        epochs = min(usual[2], max(1, round(ABOUT_STEPS * global_batch / n_rows)))
        lines.append(f"num_epochs: {epochs}, for about {ABOUT_STEPS} steps (from 1 to {usual[2]})")
    if weights:
        train = mixed(math.ceil(epochs or 1), args.max_steps * global_batch)
        lines += shares_of_files(train, weights)
    n_total = None if args.max_steps else max(1, train.rows_in(epochs))
    max_steps = args.max_steps or math.ceil(n_total / global_batch)
    if max_steps > MAX_STEPS:
        raise UserError(f"--num_epochs {epochs:g} takes {max_steps:,} steps: at most {MAX_STEPS:,}")
    if chosen and max_steps < FEW_STEPS:
        lines += smaller_steps(args, data_parallel, n_total, max_steps)
    lr, warmup = args.lr or usual[0], args.warmup_steps
    if warmup is None:
        warmup = earlier.get("warmup_steps", min(10, max_steps // 10))
    why = "" if args.lr else f" (the default for {usual[1]})"
    rows = min(max_steps * global_batch, n_total or math.inf)
    lines.append(
        f"steps: {max_steps} = {rows / n_rows:.2f} epochs of {counted(n_rows, 'row')}; "
        f"lr {lr:g}{why}, {counted(warmup, 'step')} of warm-up, then {args.lr_scheduler}"
    )
    if warmup >= max_steps:
        lines.append(
            f"warning: --warmup_steps {warmup} is not shorter than the run of "
            f"{counted(max_steps, 'step')}: the learning rate only rises, to "
            f"{lr * max_steps / warmup:.2g} in the last step; give a shorter warm-up"
        )
    horizon = Horizon(data_parallel, global_batch, max_steps, n_total, lr, epochs, warmup)
    return (horizon, train), lines


def shares_of_files(train: Packs, weights: list[float]) -> list[str]:
    """Lines on the documents of each file in the first pass of a mixture."""
    first, lines = train.doc_file[train.row_docs[: train.row_start[train.passes_at[1]]]], []
    for n, (file, weight) in enumerate(zip(train.stats.files, weights, strict=True)):
        documents = counted(int((first == n).sum()), "document")
        lines.append(f"data: {file.path}, weight {weight:g}: {documents} in the first pass")
    return lines


def smaller_steps(args: Args, data_parallel: int, n_total: int, max_steps: int) -> list[str]:
    """A line with a micro-batch size and accumulation that give about FEW_STEPS steps or more."""
    rows, micro, accum = n_total // (FEW_STEPS * data_parallel), 1, 1
    if getattr(args, "stages", 1) > 1:  # a pipeline needs many micro-batches
        accum = args.grad_accum_steps
    else:
        micro = min(args.micro_batch_size, max(1, rows))
        accum = max(1, rows // micro)
    steps = math.ceil(n_total / (micro * accum * data_parallel))
    line = f"steps: only {max_steps}; MICRO_BATCH_SIZE={micro} GRAD_ACCUM_STEPS={accum} makes "
    return [f"{line}them {steps}"] if steps > max_steps else []


def decide_order(args: Args, horizon: Horizon, train: Packs) -> tuple[Callable, list[str]]:
    """(step -> its rows, lines). Raises UserError for a --length_warmup with steps that this run
    lacks or fills up with padding: the sorted rows would be others once the run is extended."""
    first, full, lines = args.length_warmup, horizon.max_steps, []
    if horizon.n_total:
        full = min(full, horizon.n_total // horizon.global_batch)
    if first > full:
        raise UserError(
            f"--length_warmup {first} is longer than the run's {counted(full, 'step')} of "
            f"{counted(horizon.global_batch, 'row')}: give at most {full}"
        )
    if not args.shuffle:
        packed = "" if train.single else " by the first document of each (they are packed)"
        lines.append(f"rows: in file order{packed}, the same in every epoch (--no_shuffle)")
    if first:
        lines.append(f"rows: those of the first {first} steps in order of their longest document")
    rows_of = order_rows(
        train, args.seed, horizon.global_batch, horizon.n_total,
        shuffle=args.shuffle, length_warmup=first,
    )  # fmt: skip
    return rows_of, lines


def identity_of_rows(args: Args, horizon: Horizon, train: Packs) -> dict:
    """What the rows of a step depend on, by name."""
    return {
        **train.stats.identity, "seed": args.seed, "rows of a step": horizon.global_batch,
        "shuffle": args.shuffle, "length_warmup": args.length_warmup,
    }  # fmt: skip
