"""Decide everything before the model exists: model, rows, horizon, compute.

Every script makes the same decisions from the same flags. A decision is (value, lines): what was
decided, and what the log says of it. `make_plan` makes them and prints their lines."""

import dataclasses
import functools
import math
import shlex
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from llm_demo.core.decoder import skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.core.rows import Documents, Rows, order_rows
from llm_demo.data.documents import LONGEST_DEFAULT
from llm_demo.data.packs import (
    CONTENT_OF,
    describe_example,
    load_rows,
    mix,
    refuse_unknown_tokens,
    shares_of_files,
    split_off,
)
from llm_demo.flags.args import MAX_STEPS, Args, names_of
from llm_demo.machine.device import dtype_name, prepare_device
from llm_demo.machine.dist import from_rank0, once_per_node, same_on_all_nodes
from llm_demo.machine.process import read_json
from llm_demo.machine.text import counted
from llm_demo.model.costs import Sizes, flops_of_slot, shares_of_heads, sizes_of
from llm_demo.model.families import without_dropout
from llm_demo.model.model_folder import Source, find_source
from llm_demo.model.source import position_limit, with_date
from llm_demo.model.weights_files import fingerprint, refuse_other_adapters
from llm_demo.run.checkpoint_files import checked_facts, compare_shapes, find_checkpoint, weights_of
from llm_demo.run.choices import Compute, decide_compute, decide_four_bits, refuse_flags
from llm_demo.run.folder import settings_to_resume
from llm_demo.run.inputs import Sources, sources_of
from llm_demo.run.log import Log

ABOUT_STEPS = 100  # what a run takes if no flag sets its length
LONG_ROW = 8192  # tokens of a row above which sample answers have to be asked for


class Model(NamedTuple):
    """What is trained."""

    source: Source
    lora: tuple | None  # an options.lora.Lora
    seq_len: int  # slots of a row; 0: to be derived from the data
    date: str | None  # that the chat template prints


class Data(NamedTuple):
    train: Rows
    heldout: Rows | None

    def packs(self) -> list[Rows]:
        return [rows for rows in (self.train, self.heldout) if rows]


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
    described: object  # the model's own configuration, of which source has what is trained
    sizes: Sizes  # of the model

    def flops_of(self, rows: np.ndarray) -> float:
        """Training FLOPs of a step on these rows."""
        lora, train = self.compute.lora, self.data.train
        active = lora and lora.active
        per_slot = flops_of_slot(self.sizes, train.attended(rows), active)
        return rows.size * train.seq_len * per_slot


def make_plan(args: Args, world: World, log: Log, data_parallel: int, refuse: Callable) -> Plan:
    """Decide what the flags leave open, and print it. Raises UserError on every rank.
    refuse(config): raises one for a model that the script can't train, before data is read, as is
    done for a --resume that names no checkpoint of this model."""
    log.say(f"command: {shlex.join([sys.executable, *sys.argv])}", shown="")  # the user knows it
    device, dtype = log.decided(prepare_device(args, world))
    sources = sources_of(args)
    same_on_all_nodes(world, same_flags(args, sources))
    earlier = from_rank0(world, lambda: settings_to_resume(args.resume, log.folder))
    named = None if args.resume == "auto" else args.resume
    checkpoint = find_checkpoint(named, log.folder, world, log.say, tensors=False)

    model = log.decided(read_model(args, world, dtype, earlier, refuse))
    if checkpoint:
        from_rank0(world, lambda: refuse_other_model(checkpoint, model.source.config, model.lora))
    train, heldout = log.decided(read_data(args, world, model, sources))
    usual = usual_lr(bool(model.source.weights), model.lora)
    horizon, train = log.decided(
        choose_horizon(args, data_parallel, train, sources.weights, usual, earlier)
    )
    rows_of = choose_order(args, horizon, train)
    data = with_max_docs(train, heldout)
    sample_tokens = args.sample_tokens
    if sample_tokens is None:  # a token takes a forward over all slots
        sample_tokens = 32 if train.seq_len <= LONG_ROW else 0
    config = without_dropout(model.source.config)
    source = model.source._replace(config=config)
    choose = functools.partial(decide_compute, args, device, dtype, config, data.packs())
    compute = log.decided(from_rank0(world, choose, long=True))  # all probes may take long
    compute = compute._replace(lora=model.lora)

    example = describe_example(train, source.tokenizer, int(rows_of(0)[0]))
    log.say(f"example, learnt tokens in ⟦⟧:\n{example}")
    is_on_hub = source.weights and not Path(args.model_name_or_path).is_dir()
    if model.date:
        log.resolved(date=model.date)
    log.resolved(
        dtype=dtype_name(dtype),
        base_model=args.model_name_or_path if is_on_hub else None,
        eval_json=sources.heldout,
        seq_len=train.seq_len,
        sample_tokens=sample_tokens,
        attn_impl=compute.attn_impl,
        compile=compute.compile,
        global_batch=horizon.global_batch,
        max_steps=horizon.max_steps,
        lr=horizon.lr,
        data_parallel=data_parallel,
        num_epochs=horizon.num_epochs,
        warmup_steps=horizon.warmup_steps,
        random_weights=earlier.get("random_weights"),  # of a run that is resumed, if known
    )
    identity = identity_of_rows(train.documents, sources.weights, args, horizon.global_batch)
    return Plan(
        source=source,
        data=data,
        compute=compute,
        horizon=horizon,
        rows_of=rows_of,
        identity=identity,
        sample_tokens=sample_tokens,
        described=model.source.config,
        sizes=sizes_of(config),
    )


def same_flags(args: Args, sources: Sources) -> dict:
    """What the flags of all nodes must agree on."""
    per_node = names_of("per_node")  # what is read there is compared instead
    flags = {f"--{name}": value for name, value in vars(args).items() if name not in per_node}
    flags["held-out data"] = "none" if sources.heldout == "none" else "given"
    if args.deepspeed_config:
        flags["content of --deepspeed_config"] = read_json(Path(args.deepspeed_config))
    return flags


def identity_of_rows(
    documents: Documents, weights: list[float] | None, args: Args, global_batch: int
) -> dict:
    """What the rows of each step depend on, by name. A run that is resumed compares it. weights: of
    the data files."""
    return {
        **documents.identity,
        "weights": weights,
        "eval_fraction": args.eval_fraction,
        "seed": args.seed,
        "rows of a step": global_batch,
        "shuffle": args.shuffle,
        "length_warmup": args.length_warmup,
    }


# ---------------------------------------------------------------- the model


def read_model(
    args: Args, world: World, dtype: torch.dtype, earlier: dict, refuse: Callable
) -> tuple[Model, list[str]]:
    """(what is trained, lines). earlier: settings of the run that is resumed. refuse: as of
    make_plan. Raises UserError for a model that these flags don't work with."""
    seq_len, lines = decide_seq_len(args.seq_len, earlier)
    source, more = find_source(args, world, seq_len)
    lines += more
    # the day that the run began
    day = from_rank0(world, lambda: earlier.get("date") or str(date.today()))
    tokenizer = with_date(source.tokenizer, day)
    if tokenizer is source.tokenizer:
        day = None
    else:
        lines.append(f"date: {day}, which the chat template prints: that of the run's first start")
        source = source._replace(tokenizer=tokenizer)
    refuse(source.config)
    shares_of_heads(source.config, args.sequence_parallel)  # refuses what does not divide
    refuse_flags(args, source.config, source.proof)
    decide_four_bits(args, source, world)
    lora = None
    if args.lora_rank:
        from llm_demo.model.adapters import decide_lora

        lora, more = decide_lora(args, world, source, dtype_name(dtype))
        lines += more
    return Model(source, lora, seq_len, day), lines


def decide_seq_len(asked: int, earlier: dict) -> tuple[int, list[str]]:
    """(slots of a row, 0: to be derived from the data; lines). A run that is resumed keeps its
    earlier value, so that its rows stay the same."""
    if asked or not earlier:
        return asked, []
    return earlier["seq_len"], [f"seq_len: {earlier['seq_len']} (from the resumed run)"]


def refuse_other_model(checkpoint: Path, config, lora: tuple | None) -> None:
    """Raise UserError if a checkpoint's weights are not those that this run trains."""
    adapters = lora and lora.facts()
    refuse_other_adapters(checkpoint, checked_facts(checkpoint).get("adapters"), adapters)
    shapes = {name: tuple(t.shape) for name, t in skeleton(config, "sdpa").state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    if lora:
        from llm_demo.options.lora import factors_of

        shapes = factors_of(adapters, shapes)
    compare_shapes(checkpoint, weights_of(checkpoint), shapes)


# ---------------------------------------------------------------- the rows


def read_data(
    args: Args, world: World, model: Model, sources: Sources
) -> tuple[tuple[Rows, Rows | None], list[str]]:
    """((training rows of one pass, held-out rows or None), lines), built once per node. Raises
    UserError for data that nodes or the model's embedding don't have, and for flags that need
    held-out data without it."""
    config = model.source.config
    limit = min(position_limit(config) or LONGEST_DEFAULT, LONGEST_DEFAULT)

    def load(names: str, split: str | None, **flags) -> tuple[Rows, list[str]]:
        flags = dataclasses.replace(args, **flags)
        tokenizer = model.source.tokenizer
        return once_per_node(world, lambda: load_rows(names, tokenizer, flags, split, limit))

    train, lines = load(sources.train, "train", seq_len=model.seq_len)
    if not model.seq_len:
        lines.append(f"seq_len: {train.seq_len} ({train.documents.stats.seq_len_why})")
    facts = train.documents.identity | {"weights": sources.weights}
    heldout = None
    if args.eval_fraction:
        train, heldout = split_off(train, args.eval_fraction, args.pack_sequences)
        n = counted(len(heldout.row_docs), "document")
        lines.append(
            f"held-out: {n} split off by --eval_fraction, the same in every run of this data"
        )
    elif sources.heldout == "none":
        lines.append(
            "held-out: none given, so no held-out loss; --eval_fraction 0.1 holds out a tenth"
        )
    else:
        heldout, more = load(sources.heldout, None, seq_len=train.seq_len, skip_bad_rows=None)
        lines += more + warn_of_learnt(train.documents, heldout.documents)
    if heldout:
        facts |= {f"held-out {k}": value for k, value in heldout.documents.identity.items()}
    elif args.early_stopping:
        raise UserError("--early_stopping needs held-out data: --eval_json or --eval_fraction")
    same_on_all_nodes(world, facts | {"model configuration": fingerprint(config)})
    refuse_unknown_tokens(Data(train, heldout).packs(), config.vocab_size)
    return (train, heldout), lines


def warn_of_learnt(train: Documents, heldout: Documents) -> list[str]:
    """A line for each held-out file that is also in the training data."""
    learnt = {text for name, text in train.identity.items() if name.startswith(CONTENT_OF)}
    return [
        f"warning: {file.path} is held out and also in the training data: its held-out loss and "
        "exact answers are those of examples that are learnt"
        for n, file in enumerate(heldout.stats.files, 1)
        if heldout.identity[f"{CONTENT_OF} {n}"] in learnt
    ]


def with_max_docs(train: Rows, heldout: Rows | None) -> Data:
    """Data whose rows all have room for the same number of documents, which fixes the shape of
    cu_seqlens."""
    max_docs = max(2, train.max_docs, heldout.max_docs if heldout else 0)
    train = dataclasses.replace(train, max_docs=max_docs)
    if heldout:
        heldout = dataclasses.replace(heldout, max_docs=max_docs)
    return Data(train, heldout)


# ---------------------------------------------------------------- the horizon


def usual_lr(trained: bool, lora: tuple | None) -> tuple[float, int]:
    """(learning rate, most passes over small data) that the flags leave open. trained: the model
    has weights.

    Adapters want ten times the rate of all weights: "LoRA Without Regret" (Schulman et al. 2025),
    and 2e-4 in "QLoRA" (Dettmers et al. 2023)."""
    if lora:
        return 2e-4, 10
    if trained:
        return 2e-5, 10
    return 1e-3, 100


def choose_horizon(
    args: Args,
    data_parallel: int,
    train: Rows,
    weights: list[float] | None,
    usual: tuple[float, int],
    earlier: dict,
) -> tuple[tuple[Horizon, Rows], list[str]]:
    """((rows of a step, number of steps and learning rate; the rows of all passes), lines). train:
    of one pass. weights: of the data files. usual: what usual_lr returns. earlier: settings of the
    run that is resumed."""
    global_batch = args.micro_batch_size * args.grad_accum_steps * data_parallel
    lines = [
        f"batch: {counted(args.micro_batch_size, 'row')} x {args.grad_accum_steps} accumulated x "
        f"{data_parallel} data-parallel = {counted(global_batch, 'row')} = "
        f"{global_batch * train.seq_len:,} token slots a step"
    ]
    n_rows = len(train)  # of a pass
    if weights:
        n_rows = len(mix(train, weights, args.seed, args.pack_sequences, epochs=1))
    epochs = args.num_epochs
    is_open = not args.max_steps and epochs is None
    if is_open:
        epochs = float(earlier.get("num_epochs") or 0)
    if is_open and not epochs:
        epochs = max(1, round(ABOUT_STEPS * global_batch / n_rows))
        most_passes = usual[1]
        epochs = min(most_passes, epochs)
        lines.append(
            f"passes over the data: {epochs}, for about {ABOUT_STEPS} steps (at most "
            f"{most_passes} passes; --num_epochs sets them)"
        )
    if weights:
        train = mix(
            train,
            weights,
            args.seed,
            args.pack_sequences,
            epochs=math.ceil(epochs or 1),
            n_rows=args.max_steps * global_batch,
        )
        lines += shares_of_files(train, weights)
    n_total, max_steps = None, args.max_steps
    if not max_steps:
        n_total = max(1, train.rows_in(epochs))
        max_steps = math.ceil(n_total / global_batch)
    if max_steps > MAX_STEPS:
        raise UserError(f"--num_epochs {epochs:g} takes {max_steps:,} steps: at most {MAX_STEPS:,}")
    lr = args.lr or usual[0]
    warmup = args.warmup_steps
    if warmup is None:
        warmup = earlier.get("warmup_steps", min(10, max_steps // 10))
    trained_rows = min(max_steps * global_batch, n_total or math.inf)
    passes = round(trained_rows / n_rows, 2)
    lines.append(
        f"steps: {max_steps} = {passes:g} passes over "
        f"{counted(n_rows, 'row')}; lr {lr:g}, {counted(warmup, 'step')} of warm-up, then "
        f"{args.lr_scheduler}"
    )
    if warmup >= max_steps:
        lines.append(
            f"warning: --warmup_steps {warmup} is not shorter than the run of "
            f"{counted(max_steps, 'step')}: the learning rate only rises; give a shorter warm-up"
        )
    horizon = Horizon(data_parallel, global_batch, max_steps, n_total, lr, epochs, warmup)
    return (horizon, train), lines


def choose_order(args: Args, horizon: Horizon, train: Rows) -> Callable:
    """step -> its rows. Raises UserError for a --length_warmup with steps that this run lacks or
    fills up with padding: the sorted rows would be others once the run is extended."""
    rows = horizon.n_total or horizon.max_steps * horizon.global_batch
    batch = horizon.global_batch
    full = min(horizon.max_steps, rows // batch)
    if args.length_warmup > full:
        raise UserError(
            f"--length_warmup {args.length_warmup} is longer than the run's "
            f"{counted(full, 'step')} of {counted(batch, 'row')}: give at most {full}"
        )
    return order_rows(
        train,
        args.seed,
        batch,
        horizon.n_total,
        shuffle=args.shuffle,
        length_warmup=args.length_warmup,
    )
