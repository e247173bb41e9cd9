"""Decide everything before the model exists: model, data, kernels, steps.

Every script makes the same decisions from the same flags, and prints each with its reason."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
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
from llm_demo.core.lora import Lora
from llm_demo.core.mesh import World
from llm_demo.core.rows import Packs
from llm_demo.data.choose import split_off
from llm_demo.data.packing import LONGEST_DEFAULT
from llm_demo.data.packs import describe_example, heldout_beside, load_packs, refuse_unknown_tokens
from llm_demo.data.sources import hub_parts, weighted
from llm_demo.job.args import Args
from llm_demo.job.checkpoint_files import (
    checked_facts,
    compare_shapes,
    find_checkpoint,
    weights_of,
)
from llm_demo.job.choices import (
    choose_attention,
    choose_compile,
    choose_product,
    why_not_compiled,
)
from llm_demo.job.costs import (
    Heads,
    flops_of_slot,
    heads_of,
    parameters_of,
    share_of_heads,
)
from llm_demo.job.device import (
    Device,
    drawn_on,
    dtype_name,
    limit_memory,
    pick_dtype,
    plan_for,
    this_device,
)
from llm_demo.job.dist import from_rank0, once_per_node, same_on_all_nodes
from llm_demo.job.folder import settings_of
from llm_demo.job.horizon import Horizon, decide_horizon, decide_order, identity_of_rows, usual_lr
from llm_demo.job.log import Log
from llm_demo.job.model_folder import Source, choose_lora, factors_of, find_source, short
from llm_demo.job.process import regular
from llm_demo.job.source import (
    fix_date,
    is_mixture,
    position_limit,
    window_of,
    without_window,
)
from llm_demo.job.text import counted
from llm_demo.job.weights_files import identity_of, refuse_other_adapters

# Flags that may differ between nodes: what is read there is compared instead.
PATHS = {
    "model_name_or_path", "tokenizer_name_or_path", "chat_template", "train_json", "eval_json",
    "output_dir", "deepspeed_config", "local_rank",
}  # fmt: skip

LONG_ROW = 8192  # tokens of a row above which sample answers have to be asked for


class Data(NamedTuple):
    train: Packs
    heldout: Packs | None
    max_docs: int  # of any row of train or heldout: fixes the shape of cu_seqlens

    def packs(self) -> list[Packs]:
        return [packs for packs in (self.train, self.heldout) if packs]


class Compute(NamedTuple):
    dtype: torch.dtype  # compute dtype; masters are fp32
    attn_impl: str
    compile: bool
    product: str = "looped"  # of experts, see core/experts.py
    lora: Lora | None = None  # adapters: the model itself is frozen
    attention_kept: int = 0  # the last blocks whose attention is not recomputed


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
        return rows.size * packs.seq_len * flops_of_slot(self.source.config, attended, active)


def make_plan(args: Args, world: World, log: Log, data_parallel: int, refuse: Callable) -> Plan:
    """Decide what the flags leave open, and print it. Raises UserError on every rank.
    refuse(config): raises one for a model that the script can't train, before data is read, as is
    done for a --resume that names no checkpoint of this model."""
    say, tell = log.say, functools.partial(told, log.say)
    say(f"command: {shlex.join([sys.executable, *sys.argv])}")
    device, dtype = tell(prepare_device(args, world))
    same_on_all_nodes(world, same_flags(args))
    earlier = from_rank0(world, lambda: settings_of(args.resume, log.folder))
    seq_len = tell(decide_seq_len(args.seq_len, earlier))
    named = None if args.resume == "auto" else args.resume
    checkpoint = find_checkpoint(named, log.folder, world, say, tensors=False)
    source = find_source(args, world, seq_len, say)
    set_date(source.tokenizer, earlier, world, log)
    refuse(source.config)
    heads_of_rank(args, source.config)  # refuses what does not divide them
    lora = tell(decide_lora(args, world, source, dtype_name(dtype)))
    if checkpoint:
        from_rank0(world, lambda: refuse_other_model(checkpoint, source.config, lora))
    limits = position_limit(source.config), window_of(source.config), LONGEST_DEFAULT
    limit = min(filter(None, limits))
    train, heldout, eval_json = load_data(args, world, source.tokenizer, say, limit, seq_len)
    usual = usual_lr(bool(source.weights), lora)
    horizon, train = tell(decide_horizon(args, data_parallel, train, usual, earlier))
    args.num_epochs, args.warmup_steps = horizon.num_epochs, horizon.warmup_steps  # loop's, too
    data = check_data(args, world, train, heldout, source.config)
    sample_tokens = tell(decide_answers(args.sample_tokens, source.config, data))
    compute = tell(decide_compute(args, world, device, dtype, source.config, data.packs()))
    rows_of = tell(decide_order(args, horizon, train))
    example = describe_example(train, source.tokenizer, int(rows_of(0)[0]))
    say(f"example, learnt tokens in ⟦⟧:\n{example}")
    hub = None if Path(args.model_name_or_path).is_dir() else args.model_name_or_path
    log.resolved(
        dtype=dtype_name(dtype), base_model=hub if source.weights else None,
        eval_json=eval_json, seq_len=train.seq_len, sample_tokens=sample_tokens,
        attn_impl=compute.attn_impl, compile=compute.compile, global_batch=horizon.global_batch,
        max_steps=horizon.max_steps, lr=horizon.lr, data_parallel=data_parallel,
        num_epochs=args.num_epochs, warmup_steps=args.warmup_steps,
        random_weights=earlier.get("random_weights"),  # of a run that is resumed, if known
    )  # fmt: skip
    compute, identity = compute._replace(lora=lora), identity_of_rows(args, horizon, train)
    return Plan(source, data, compute, horizon, rows_of, identity, sample_tokens)


def told(say: Callable, decision: tuple):
    """The value of a decision, whose lines are logged. decision: (value, lines)."""
    value, lines = decision
    for line in lines:
        say(line)
    return value


def prepare_device(args: Args, world: World) -> tuple[tuple[Device, torch.dtype], list[str]]:
    """((the device, planned for or real; the compute dtype), lines). Limits the GPU's memory."""
    plan_for(args.card)
    device, lines = this_device(world.device.index or 0), []
    if args.device_memory_gb:
        if not args.estimate:  # which is also for other machines
            limit_memory(world.device, args.device_memory_gb)
        lines.append(f"memory: at most {args.device_memory_gb:g} GB of each GPU")
    dtype, why = pick_dtype(args.dtype, device)
    lines += [
        f"device: {world.size} x {device}",
        f"dtype: {dtype_name(dtype)} ({why}); weights and optimizer states in fp32",
    ]
    return (device, dtype), lines


def same_flags(args: Args) -> dict:
    """What the flags of all nodes must agree on."""
    flags = {f"--{name}": value for name, value in vars(args).items() if name not in PATHS}
    flags["held-out data"] = "none" if heldout_file(args) == "none" else "given"
    if file := args.deepspeed_config:
        flags["content of --deepspeed_config"] = json.loads(regular(Path(file)).read_text())
    return flags


def heldout_file(args: Args) -> str:
    """The held-out file, or "none"."""
    if args.eval_fraction:
        return "none"
    if args.eval_json == "auto":
        return heldout_beside(weighted(args.train_json)[0]) or "none"
    return args.eval_json


def load_data(
    args: Args, world: World, tokenizer, say: Callable, limit=LONGEST_DEFAULT, seq_len=0
) -> tuple[Packs, Packs | None, str]:
    """(training rows, held-out rows or None, the held-out file or "none"), built once per node.

    seq_len 0: derived from the lengths of the training documents, at most `limit`."""
    eval_json = heldout_file(args)
    split = args.dataset_split or "train"
    train_json, weights = weighted(args.train_json, args.dataset_config, split)
    either = f"{train_json},{eval_json}"
    for name, named in (("dataset_config", either), ("dataset_split", train_json)):
        if getattr(args, name) and not any(hub_parts(part.strip()) for part in named.split(",")):
            raise UserError(
                f"--{name} {getattr(args, name)} applies only to hub datasets, and "
                f"--train_json {train_json} is not one"
            )

    def load(path: str, seq_len: int, split: str | None = None) -> Packs:
        flags = dataclasses.replace(args, seq_len=seq_len, dataset_split=split)
        return load_packs(path, tokenizer, flags, limit=limit, log=say)

    asked = seq_len or args.seq_len
    train = once_per_node(world, functools.partial(load, train_json, asked, split))
    if not asked:
        say(f"seq_len: {train.seq_len} ({train.stats.seq_len_why})")
    train.stats.identity |= {"weights": weights, "eval_fraction": args.eval_fraction}
    if args.eval_fraction:
        train, heldout = split_off(train, args.eval_fraction, args.pack_sequences)
        n = counted(len(heldout.row_docs), "document")
        say(f"held-out: {n} split off by --eval_fraction, the same in every run of this data")
        return train, heldout, "none"
    if eval_json == "none":
        say("held-out: none given, so no held-out loss; --eval_fraction 0.1 holds out a tenth")
        return train, None, eval_json
    heldout = once_per_node(world, functools.partial(load, eval_json, train.seq_len))
    learnt, asked = map(contents, (train, heldout))
    for path in sorted(path for path, content in asked.items() if content in learnt.values()):
        say(f"held-out: {path} is also in the training data, so its loss is not a held-out loss")
    return train, heldout, eval_json


def contents(packs: Packs) -> dict[str, str]:
    """The hash of each data file, by its path."""
    paths, identity = [f.path for f in packs.stats.files], packs.stats.identity
    return {path: identity[f"content of data file {n}"] for n, path in enumerate(paths, 1)}


def check_data(args: Args, world: World, train: Packs, heldout: Packs | None, config) -> Data:
    """Raises UserError for data that nodes or the model's embedding don't have, and for an early
    stop without held-out data."""
    if args.early_stopping and not heldout:
        raise UserError("--early_stopping needs held-out data: --eval_json or --eval_fraction")
    held = {f"held-out {k}": v for k, v in heldout.stats.identity.items()} if heldout else {}
    model = {"model configuration": fingerprint(config)}
    same_on_all_nodes(world, train.stats.identity | held | model)
    packs = [p for p in (train, heldout) if p]
    refuse_unknown_tokens(packs, config.vocab_size)
    return Data(train, heldout, max(2, *(p.max_docs for p in packs)))


def decide_answers(asked: int | None, config, data: Data) -> tuple[int, list[str]]:
    """(the length of sample answers, lines): prompt and answer fit into the model's sliding window.
    Turns the window off. Raises UserError if a document is longer than it."""
    n, lines, seq_len = asked, [], data.train.seq_len
    if n is None:
        n = 32 if seq_len <= LONG_ROW else 0
        if not n:
            lines = [
                f"answers: none, since each token would take a forward over {seq_len:,} slots; "
                "--sample_tokens asks for them"
            ]
    window, longest = window_of(config), max(p.longest for p in data.packs())
    without_window(config, longest)
    if window and seq_len > window and longest + n > window:
        n = window - longest
        lines.append(f"answers: limited to {n} tokens by the sliding window of {window}")
    return n, lines


def heads_of_rank(args: Args, config) -> Heads:
    return share_of_heads(heads_of(config), args.sequence_parallel)


def decide_compute(
    args: Args, world: World, device: Device, dtype: torch.dtype, config, packs: list[Packs]
) -> tuple[Compute, list[str]]:
    """(kernels of attention and experts, and whether to compile; lines), tested on rank 0."""
    single, heads = all(p.single for p in packs), heads_of_rank(args, config)
    longest = max((p.longest for p in packs), default=0)
    pick = functools.partial(
        choose_attention, args.attn_impl, device, dtype, heads, single, longest=longest
    )
    attn_impl, rejected = from_rank0(world, pick)
    lines = [f"attention: not {reason}" for reason in rejected]
    lines.append(f"attention: {attn_impl}" + " (as requested)" * (args.attn_impl != "auto"))
    product, problem = "looped", None
    if is_mixture(config):
        if args.activation_memory_budget < 1:
            raise UserError(
                "--activation_memory_budget may choose other experts in the backward: use "
                "--use_activation_checkpointing"
            )
        product, why = from_rank0(world, lambda: choose_product(config, device, dtype))
        lines.append(f"experts: {product} products ({why})")
        problem = why_not_compiled(product)
    pick = functools.partial(
        choose_compile, args.compile, device, attn_impl, problem=problem, dtype=dtype
    )
    compiled, why = from_rank0(world, pick)
    lines.append(f"compile: {'yes' if compiled else 'no'} ({why})")
    if args.activation_memory_budget < 1 and not compiled:
        raise UserError("--activation_memory_budget works on compiled blocks: add --compile")
    return Compute(dtype, attn_impl, compiled, product), lines


def fingerprint(config) -> str:
    """A digest of the model's configuration, wherever it was read from."""
    values = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


def decide_lora(
    args: Args, world: World, source: Source, dtype: str
) -> tuple[Lora | None, list[str]]:
    """(the adapters that the flags ask for, if this script has such flags, lines)."""
    if not args.lora_rank:
        return None, []
    if args.export != "none" and not importlib.util.find_spec("peft"):
        raise UserError("--export of adapters needs peft, which is not installed: run setup.sh")
    identify = functools.partial(
        identity_of, args.model_name_or_path, source.folder, source.weights, args.seed, drawn_on()
    )
    lora = choose_lora(args, source.config, from_rank0(world, identify))
    share = lora.parameters / parameters_of(source.config)
    line = (
        f"adapters: rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)} of each "
        f"block: {short(lora.parameters)} parameters in fp32, {share:.2%} of the model's, which is "
        f"frozen in {dtype}"
    )
    return lora, [line]


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


def set_date(tokenizer, earlier: dict, world: World, log: Log) -> None:
    """Let a chat template that prints today's date print that of the run's first start."""
    day = from_rank0(world, lambda: date_of(earlier))
    if fix_date(tokenizer, day):
        log.say(f"date: {day}, which the chat template prints: that of the run's first start")
        log.resolved(date=day)


def decide_seq_len(asked: int, earlier: dict) -> tuple[int, list[str]]:
    """(slots of a row, 0: to be derived from the data; lines). A run that is resumed keeps its
    earlier value, so that its rows stay the same."""
    if asked or not earlier:
        return asked, []
    return earlier["seq_len"], [f"seq_len: {earlier['seq_len']} (from the resumed run)"]
