"""Decide everything before the model exists: model, data, kernels, steps, the rows of each.

Every script makes the same decisions from the same flags, and prints each with its reason:
decisions are (value, lines), what was decided and what the log says of it."""

import contextlib
import dataclasses
import functools
import json
import math
import shlex
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llm_demo.core.decoder import skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.lora import Lora
from llm_demo.core.mesh import World
from llm_demo.core.rows import Rows, order_rows
from llm_demo.data.build import LONGEST_DEFAULT
from llm_demo.data.packs import (
    describe_example,
    load_rows,
    mix,
    refuse_unknown_tokens,
    shares_of_files,
    split_off,
)
from llm_demo.data.sources import weighted
from llm_demo.flags.args import MAX_STEPS, Args, names_of
from llm_demo.machine.device import dtype_name, prepare_device
from llm_demo.machine.dist import from_rank0, once_per_node, same_on_all_nodes
from llm_demo.machine.process import regular
from llm_demo.machine.text import counted
from llm_demo.model.adapters import decide_lora, factors_of
from llm_demo.model.costs import flops_of_slot, heads_of, share_of_heads, sizes_of
from llm_demo.model.model_folder import Source, find_source
from llm_demo.model.positions import position_limit, window_of, without_window
from llm_demo.model.source import with_date
from llm_demo.model.weights_files import fingerprint, refuse_other_adapters
from llm_demo.run.checkpoint_files import checked_facts, compare_shapes, find_checkpoint, weights_of
from llm_demo.run.choices import Compute, decide_compute, decide_four_bits, refuse_flags
from llm_demo.run.folder import settings_of
from llm_demo.run.inputs import heldout_file
from llm_demo.run.log import Log

ABOUT_STEPS = 100  # what a run takes if no flag sets its length
FEW_STEPS = 30  # fewer learn little, so smaller steps are proposed
LONG_ROW = 8192  # tokens of a row above which sample answers have to be asked for


class Data(NamedTuple):
    train: Rows
    heldout: Rows | None
    max_docs: int  # of any row of train or heldout: fixes the shape of cu_seqlens

    def packs(self) -> list[Rows]:
        return [packs for packs in (self.train, self.heldout) if packs]


class Horizon(NamedTuple):
    """The length of the run and the size of its steps."""

    data_parallel: int  # ranks, or groups of ranks, that each train on rows of their own
    global_batch: int  # rows of an optimizer step
    max_steps: int
    n_total: int | None  # rows of the whole run, if num_epochs sets its length
    lr: float
    num_epochs: float | None  # None: max_steps sets the length
    warmup_steps: int


class Plan(NamedTuple):
    source: Source
    data: Data
    compute: Compute
    horizon: Horizon
    rows_of: Callable[[int], np.ndarray]  # step, from 0 -> its rows
    identity: dict  # name -> what the rows of a step depend on
    sample_tokens: int  # length of the sample answers at the end

    def flops_of(self, rows: np.ndarray) -> float:
        """Training FLOPs of a step on these rows."""
        lora, packs = self.compute.lora, self.data.train
        attended, active = packs.attended(rows), lora and lora.active
        sizes = sizes_of(self.source.config)
        return rows.size * packs.seq_len * flops_of_slot(sizes, attended, active)


def make_plan(args: Args, world: World, log: Log, data_parallel: int, refuse: Callable) -> Plan:
    """Decide what the flags leave open, and print it. Raises UserError on every rank.
    refuse(config): raises one for a model that the script can't train, before data is read, as is
    done for a --resume that names no checkpoint of this model."""
    say, tell = log.say, log.decided
    say(f"command: {shlex.join([sys.executable, *sys.argv])}", shown="")  # the user knows it
    device, dtype = tell(prepare_device(args, world))
    same_on_all_nodes(world, same_flags(args))
    earlier = from_rank0(world, lambda: settings_of(args.resume, log.folder))
    seq_len = tell(decide_seq_len(args.seq_len, earlier))
    named = None if args.resume == "auto" else args.resume
    checkpoint = find_checkpoint(named, log.folder, world, say, tensors=False)
    source = find_source(args, world, seq_len, say)
    source = set_date(source, earlier, world, log)
    refuse(source.config)
    share_of_heads(heads_of(source.config), args.sequence_parallel)  # refuses what does not divide
    refuse_flags(args, source.config)
    decide_four_bits(args, source, world)
    lora = tell(decide_lora(args, world, source, dtype_name(dtype)))
    if checkpoint:
        from_rank0(world, lambda: refuse_other_model(checkpoint, source.config, lora))
    limits = position_limit(source.config), window_of(source.config), LONGEST_DEFAULT
    limit = min(filter(None, limits))
    train, heldout, eval_json = load_data(args, world, source.tokenizer, say, limit, seq_len)
    usual = usual_lr(bool(source.weights), lora)
    horizon, train = tell(decide_horizon(args, data_parallel, train, usual, earlier))
    data = check_data(args, world, train, heldout, source.config)
    longest = max(packs.longest for packs in data.packs())
    config = without_window(source.config, longest)
    sample_tokens = tell(decide_answers(args.sample_tokens, source.config, data))
    source = source._replace(config=config)
    choose = functools.partial(decide_compute, args, device, dtype, source.config, data.packs())
    compute = tell(from_rank0(world, choose))._replace(lora=lora)
    rows_of = tell(decide_order(args, horizon, train))
    example = describe_example(train, source.tokenizer, int(rows_of(0)[0]))
    say(f"example, learnt tokens in ⟦⟧:\n{example}")
    hub = None if Path(args.model_name_or_path).is_dir() else args.model_name_or_path
    log.resolved(
        dtype=dtype_name(dtype), base_model=hub if source.weights else None,
        eval_json=eval_json, seq_len=train.seq_len, sample_tokens=sample_tokens,
        attn_impl=compute.attn_impl, compile=compute.compile, global_batch=horizon.global_batch,
        max_steps=horizon.max_steps, lr=horizon.lr, data_parallel=data_parallel,
        num_epochs=horizon.num_epochs, warmup_steps=horizon.warmup_steps,
        random_weights=earlier.get("random_weights"),  # of a run that is resumed, if known
    )  # fmt: skip
    identity = {
        **train.documents.identity, "seed": args.seed, "rows of a step": horizon.global_batch,
        "shuffle": args.shuffle, "length_warmup": args.length_warmup,
    }  # fmt: skip
    return Plan(source, data, compute, horizon, rows_of, identity, sample_tokens)


def same_flags(args: Args) -> dict:
    """What the flags of all nodes must agree on."""
    per_node = names_of("per_node")  # what is read there is compared instead
    flags = {f"--{name}": value for name, value in vars(args).items() if name not in per_node}
    flags["held-out data"] = "none" if heldout_file(args) == "none" else "given"
    if args.deepspeed_config:
        text = regular(Path(args.deepspeed_config)).read_text("utf-8")
        flags["content of --deepspeed_config"] = json.loads(text)
    return flags


def load_data(
    args: Args, world: World, tokenizer, say: Callable, limit=LONGEST_DEFAULT, seq_len=0
) -> tuple[Rows, Rows | None, str]:
    """(training rows, held-out rows or None, the held-out file or "none"), built once per node.

    seq_len 0: derived from the lengths of the training documents, at most `limit`."""
    eval_json = heldout_file(args)
    train_json, weights = weighted(args.train_json)

    def load(path: str, seq_len: int, split: str | None, skip: bool | None) -> Rows:
        flags = dataclasses.replace(args, seq_len=seq_len, skip_bad_rows=skip)
        rows, lines = once_per_node(
            world, lambda: load_rows(path, tokenizer, flags, split=split, limit=limit)
        )
        for line in lines:
            say(line)
        return rows

    asked = seq_len or args.seq_len
    train = load(train_json, asked, "train", args.skip_bad_rows)
    if not asked:
        say(f"seq_len: {train.seq_len} ({train.documents.stats.seq_len_why})")
    train.documents.identity.update(weights=weights, eval_fraction=args.eval_fraction)
    if args.eval_fraction:
        train, heldout = split_off(train, args.eval_fraction, args.pack_sequences)
        n = counted(len(heldout.row_docs), "document")
        say(f"held-out: {n} split off by --eval_fraction, the same in every run of this data")
        return train, heldout, "none"
    if eval_json == "none":
        say("held-out: none given, so no held-out loss; --eval_fraction 0.1 holds out a tenth")
        return train, None, eval_json
    heldout = load(eval_json, train.seq_len, None, None)
    learnt, asked = map(contents, (train, heldout))
    for path in sorted(path for path, content in asked.items() if content in learnt.values()):
        say(
            f"warning: {path} is held out and also in the training data: its held-out loss and "
            "exact answers are those of rows that are learnt"
        )
    return train, heldout, eval_json


def contents(packs: Rows) -> dict[str, str]:
    """The hash of each data file, by its path."""
    paths, identity = [f.path for f in packs.documents.stats.files], packs.documents.identity
    return {path: identity[f"content of data file {n}"] for n, path in enumerate(paths, 1)}


def check_data(args: Args, world: World, train: Rows, heldout: Rows | None, config) -> Data:
    """Raises UserError for data that nodes or the model's embedding don't have, and for flags that
    need held-out data without it."""
    if args.early_stopping and not heldout:
        raise UserError("--early_stopping needs held-out data: --eval_json or --eval_fraction")
    held = {f"held-out {k}": v for k, v in heldout.documents.identity.items()} if heldout else {}
    model = {"model configuration": fingerprint(config)}
    same_on_all_nodes(world, train.documents.identity | held | model)
    packs = [p for p in (train, heldout) if p]
    refuse_unknown_tokens(packs, config.vocab_size)
    max_docs = max(2, *(p.max_docs for p in packs))
    packs = (p and dataclasses.replace(p, max_docs=max_docs) for p in (train, heldout))
    return Data(*packs, max_docs)


def decide_answers(asked: int | None, config, data: Data) -> tuple[int, list[str]]:
    """(the length of sample answers, lines): prompt and answer fit into a sliding window."""
    n, lines, seq_len = asked, [], data.train.seq_len
    if n is None:
        n = 32 if seq_len <= LONG_ROW else 0
        if not n:
            lines = [
                f"answers: none, since each token would take a forward over {seq_len:,} slots; "
                "--sample_tokens asks for them"
            ]
    window, longest = window_of(config), max(p.longest for p in data.packs())
    if window and seq_len > window and longest + n > window:
        n = window - longest
        lines.append(f"answers: limited to {n} tokens by the sliding window of {window}")
    return n, lines


def refuse_other_model(checkpoint: Path, config, lora: Lora | None) -> None:
    """Raise UserError if a checkpoint's weights are not those that this run trains."""
    adapters = lora and lora.facts()
    refuse_other_adapters(checkpoint, checked_facts(checkpoint).get("adapters"), adapters)
    lm = skeleton(config, "sdpa")
    shapes = {name: tuple(t.shape) for name, t in lm.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    wanted = factors_of(adapters, shapes) if lora else shapes
    compare_shapes(checkpoint, weights_of(checkpoint), wanted)


def date_of(earlier: dict) -> str:
    """The day that a run began, YYYY-MM-DD: today if it is not resumed."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return str(date.fromisoformat(earlier["date"]))
    return str(date.today())


def set_date(source: Source, earlier: dict, world: World, log: Log) -> Source:
    """Let a chat template that prints today's date print that of the run's first start."""
    day = from_rank0(world, lambda: date_of(earlier))
    tokenizer = with_date(source.tokenizer, day)
    if tokenizer is not source.tokenizer:
        log.say(f"date: {day}, which the chat template prints: that of the run's first start")
        log.resolved(date=day)
    return source._replace(tokenizer=tokenizer)


def decide_seq_len(asked: int, earlier: dict) -> tuple[int, list[str]]:
    """(slots of a row, 0: to be derived from the data; lines). A run that is resumed keeps its
    earlier value, so that its rows stay the same."""
    if asked or not earlier:
        return asked, []
    return earlier["seq_len"], [f"seq_len: {earlier['seq_len']} (from the resumed run)"]


def usual_lr(trained: bool, lora: Lora | None) -> tuple[float, str, int]:
    """(the learning rate if the flags give none, what it is for, the most passes over small data).
    trained: the model has weights.

    Adapters want ten times that of all weights: "LoRA Without Regret" (Schulman et al. 2025), and
    2e-4 in "QLoRA" (Dettmers et al. 2023)."""
    if lora:
        return 2e-4, "adapters", 10
    return (2e-5, "trained weights", 10) if trained else (1e-3, "random weights", 100)


def decide_horizon(
    args: Args, data_parallel: int, train: Rows, usual: tuple, earlier: dict
) -> tuple[tuple[Horizon, Rows], list[str]]:
    """((rows of a step, number of steps and learning rate; the rows of all passes), lines). usual:
    from `usual_lr`; earlier: settings of the run that is resumed."""
    global_batch = args.micro_batch_size * args.grad_accum_steps * data_parallel
    lines = [
        f"batch: {counted(args.micro_batch_size, 'row')} x {args.grad_accum_steps} accumulated x "
        f"{data_parallel} data-parallel = {counted(global_batch, 'row')} = "
        f"{global_batch * train.seq_len:,} token slots a step"
    ]
    weights = train.documents.identity.get("weights")
    mixed = functools.partial(mix, train, weights, args.seed, args.pack_sequences)
    n_rows = len(mixed(1) if weights else train)  # of a pass
    epochs, chosen = args.num_epochs, not args.max_steps and args.num_epochs is None
    if chosen and not (epochs := float(earlier.get("num_epochs") or 0)):
        epochs = min(usual[2], max(1, round(ABOUT_STEPS * global_batch / n_rows)))
        lines.append(
            f"passes over the data: {epochs}, for about {ABOUT_STEPS} steps (at most {usual[2]} "
            "passes; --num_epochs sets them)"
        )
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
    passes = round(min(max_steps * global_batch, n_total or math.inf) / n_rows, 2)
    passes = f"{passes:g} {'pass' if passes == 1 else 'passes'}"
    lines.append(
        f"steps: {max_steps} = {passes} over {counted(n_rows, 'row')}; "
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


def smaller_steps(args: Args, data_parallel: int, n_total: int, max_steps: int) -> list[str]:
    """A line with a micro-batch size and accumulation that give about FEW_STEPS steps or more."""
    rows, micro, accum = n_total // (FEW_STEPS * data_parallel), 1, 1
    if args.stages > 1:  # a pipeline needs many micro-batches
        accum = args.grad_accum_steps
    else:
        micro = min(args.micro_batch_size, max(1, rows))
        accum = max(1, rows // micro)
    steps = math.ceil(n_total / (micro * accum * data_parallel))
    line = f"steps: only {max_steps}; MICRO_BATCH_SIZE={micro} GRAD_ACCUM_STEPS={accum} makes "
    return [f"{line}them {steps}"] if steps > max_steps else []


def decide_order(args: Args, horizon: Horizon, train: Rows) -> tuple[Callable, list[str]]:
    """(step -> its rows, lines). Raises UserError for a --length_warmup with steps that this run
    lacks or fills up with padding: the sorted rows would be others once the run is extended."""
    first, lines = args.length_warmup, []
    rows = horizon.n_total or horizon.max_steps * horizon.global_batch
    full = min(horizon.max_steps, rows // horizon.global_batch)
    if first > full:
        steps, step = counted(full, "step"), counted(horizon.global_batch, "row")
        longer = f"--length_warmup {first} is longer than the run's {steps} of {step}"
        raise UserError(f"{longer}: give at most {full}")
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
