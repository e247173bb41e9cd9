"""Decide everything before the model exists: model, data, kernels, steps.

Every script makes the same decisions from the same flags, and prints each with its reason."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import re
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
from llm_demo.core.rows import Packs, order_rows
from llm_demo.data.choose import mix, split_off
from llm_demo.data.packing import LONGEST_DEFAULT
from llm_demo.data.packs import describe_example, heldout_beside, load_packs, refuse_unknown_tokens
from llm_demo.data.sources import hub_parts, weighted
from llm_demo.job.adapters import choose_lora, factors_of, identity_of, refuse_other_adapters
from llm_demo.job.args import MAX_STEPS, Args
from llm_demo.job.attention_choice import choose_attention
from llm_demo.job.checkpoint_files import (
    checked_facts,
    compare_shapes,
    find_checkpoint,
    weights_of,
)
from llm_demo.job.compiling import choose_compile
from llm_demo.job.costs import (
    Heads,
    active_of,
    flops_of_slot,
    heads_of,
    parameters_of,
    share_of_heads,
)
from llm_demo.job.device import (
    DTYPES,
    Device,
    drawn_on,
    limit_memory,
    pick_dtype,
    plan_for,
    this_device,
)
from llm_demo.job.dist import from_rank0, once_per_node, same_on_all_nodes
from llm_demo.job.experts_choice import choose_product, why_not_compiled
from llm_demo.job.log import Log
from llm_demo.job.model_folder import open_model, try_describe
from llm_demo.job.parsing import MAX_INT
from llm_demo.job.process import read_text, regular
from llm_demo.job.reader import parse
from llm_demo.job.source import (
    find_model,
    fix_date,
    is_mixture,
    load_tokenizer,
    position_limit,
    window_of,
    without_window,
)
from llm_demo.job.text import counted
from llm_demo.job.weights_files import Weights

# Flags that may differ between nodes: what is read there is compared instead.
PATHS = {
    "model_name_or_path", "tokenizer_name_or_path", "chat_template", "train_json", "eval_json",
    "output_dir", "deepspeed_config", "local_rank",
}  # fmt: skip

ABOUT_STEPS = 100  # what a run takes if no flag sets its length
FEW_STEPS = 30  # fewer learn little, so smaller steps are proposed
LONG_ROW = 8192  # tokens of a row above which sample answers have to be asked for


class Source(NamedTuple):
    """The model's files and tokenizer."""

    folder: Path
    config: object  # from transformers
    weights: Weights | None  # None: random weights
    tokenizer: object


class Data(NamedTuple):
    train: Packs
    heldout: Packs | None
    max_docs: int  # of any row of train or heldout: fixes the shape of cu_seqlens


class Compute(NamedTuple):
    dtype: torch.dtype  # compute dtype; masters are fp32
    attn_impl: str
    compile: bool
    product: str = "looped"  # of experts, see model/experts.py
    lora: Lora | None = None  # adapters: the model itself is frozen
    attention_kept: int = 0  # the last blocks whose attention is not recomputed


class Horizon(NamedTuple):
    """The length of the run and the size of its steps."""

    data_parallel: int  # ranks, or groups of ranks, that each train on rows of their own
    global_batch: int  # rows of an optimizer step
    max_steps: int
    n_total: int | None  # rows of the whole run, if num_epochs sets its length
    lr: float


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
    say = log.say
    say(f"command: {shlex.join([sys.executable, *sys.argv])}")
    plan_for(args.card)
    device = this_device(world.device.index or 0)
    if args.device_memory_gb:
        if not args.estimate:  # which is also for other machines
            limit_memory(world.device, args.device_memory_gb)
        say(f"memory: at most {args.device_memory_gb:g} GB of each GPU")
    dtype, why = pick_dtype(args.dtype, device)
    dtype_name = next(name for name, d in DTYPES.items() if d == dtype)
    say(f"device: {world.size} x {device}")
    say(f"dtype: {dtype_name} ({why}); weights and optimizer states in fp32")

    flags = {f"--{name}": value for name, value in vars(args).items() if name not in PATHS}
    flags["held-out data"] = "none" if heldout_file(args) == "none" else "given"
    if file := args.deepspeed_config:
        flags["content of --deepspeed_config"] = json.loads(regular(Path(file)).read_text())
    same_on_all_nodes(world, flags)
    earlier = resumed_settings(args.resume, world, log.folder)
    seq_len = resumed_seq_len(args.seq_len, earlier, say)
    checkpoint = named_checkpoint(args.resume, world, log)
    source = find_source(args, world, seq_len, say)
    today = from_rank0(world, lambda: date_of(earlier))
    if fix_date(source.tokenizer, today):
        say(f"date: {today}, which the chat template prints: that of the run's first start")
        log.resolved(date=today)
    refuse(source.config)
    heads_of_rank(args, source.config)  # refuses what does not divide them
    lora = pick_lora(args, world, source, dtype_name, say)
    if checkpoint:
        from_rank0(world, lambda: refuse_other_model(checkpoint, source.config, lora))
    limit = min(
        filter(None, (position_limit(source.config), window_of(source.config), LONGEST_DEFAULT))
    )
    train, heldout, eval_json = load_data(args, world, source.tokenizer, say, limit, seq_len)
    if args.early_stopping and not heldout:
        raise UserError("--early_stopping needs held-out data: --eval_json or --eval_fraction")
    usual = usual_lr(bool(source.weights), lora)
    horizon, train = pick_horizon(args, data_parallel, train, usual, earlier, say)
    packs = [p for p in (train, heldout) if p]
    held = {f"held-out {k}": v for k, v in heldout.stats.identity.items()} if heldout else {}
    config = {"model configuration": fingerprint(source.config)}
    same_on_all_nodes(world, train.stats.identity | held | config)
    data = Data(train, heldout, max(2, *(p.max_docs for p in packs)))
    sample_tokens = args.sample_tokens
    if sample_tokens is None:
        sample_tokens = 32 if train.seq_len <= LONG_ROW else 0
        if not sample_tokens:
            say(
                f"answers: none, since each token would take a forward over {train.seq_len:,} "
                "slots; --sample_tokens asks for them"
            )
    sample_tokens = fit_window(source.config, sample_tokens, packs, say)
    refuse_unknown_tokens(packs, source.config.vocab_size)

    compute = pick_compute(args, world, device, dtype, source.config, packs, say)
    compute = compute._replace(lora=lora)
    rows_of = pick_order(args, horizon, train, say)
    example = describe_example(train, source.tokenizer, int(rows_of(0)[0]))
    say(f"example, learnt tokens in ⟦⟧:\n{example}")
    hub = None if Path(args.model_name_or_path).is_dir() else args.model_name_or_path
    log.resolved(
        dtype=dtype_name, base_model=hub if source.weights else None,
        eval_json=eval_json, seq_len=train.seq_len, sample_tokens=sample_tokens,
        attn_impl=compute.attn_impl, compile=compute.compile, global_batch=horizon.global_batch,
        max_steps=horizon.max_steps, lr=horizon.lr, data_parallel=data_parallel,
        num_epochs=args.num_epochs, warmup_steps=args.warmup_steps,
        random_weights=earlier.get("random_weights"),  # of a run that is resumed, if known
    )  # fmt: skip
    identity = {
        **train.stats.identity, "seed": args.seed, "rows of a step": horizon.global_batch,
        "shuffle": args.shuffle, "length_warmup": args.length_warmup,
    }  # fmt: skip
    return Plan(source, data, compute, horizon, rows_of, identity, sample_tokens)


def find_source(args: Args, world: World, seq_len: int, say: Callable) -> Source:
    """The model's folder (downloaded if necessary), configuration, weights and tokenizer."""
    folder = once_per_node(world, functools.partial(find_model, args.model_name_or_path))
    config, weights = open_model(folder, seq_len, say)
    origin = (
        f"weights of {folder}"
        if weights
        else f"no weights in {folder}: random ones, seed {args.seed}"
    )
    total, active = parameters_of(config), active_of(config)
    size = f"{short(total)} parameters, {short(active)} active, " if active < total else ""
    blocks = counted(config.num_hidden_layers, "block")
    say(f"model: {config.model_type}, {blocks}, {size}{origin}")
    if weights and (unused := [n + "*" * n.endswith(".") for n in weights.ignored]):
        more = f" and {len(unused) - 3:,} more" * (len(unused) > 3)
        say(
            f"weights: not used: {', '.join(unused[:3])}{more} (layers of multi-token prediction, "
            "rotary frequencies, what the index does not name)"
        )
    if seq_len > (limit := position_limit(config) or seq_len):
        config.max_position_embeddings = seq_len
        say(f"positions: up to {seq_len} instead of {limit}, since the weights are random")
    tokenizer = load_tokenizer(args.tokenizer_name_or_path or str(folder), args.chat_template)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, more than the model's {config.vocab_size}"
        )
    if args.save:
        for line in from_rank0(world, lambda: try_describe(folder, tokenizer, config)):
            say(f"export: {line}")
    return Source(folder, config, weights, tokenizer)


def short(n: int) -> str:
    if n < 1e6:
        return f"{n:,}"
    return f"{n / 1e9:.3g}B" if n >= 1e9 else f"{n / 1e6:.3g}M"


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


def fit_window(config, sample_tokens: int, packs: list[Packs], say: Callable) -> int:
    """Limit the length of answers, so that prompt and answer fit into the model's sliding window.
    Raises UserError if a document is longer than the window."""
    window, longest = window_of(config), max(p.longest for p in packs)
    without_window(config, longest)
    if window and packs[0].seq_len > window and longest + sample_tokens > window:
        sample_tokens = window - longest
        say(f"answers: limited to {sample_tokens} tokens by the sliding window of {window}")
    return sample_tokens


def heads_of_rank(args: Args, config) -> Heads:
    return share_of_heads(heads_of(config), args.sequence_parallel)


def pick_compute(
    args: Args,
    world: World,
    device: Device,
    dtype: torch.dtype,
    config,
    packs: list[Packs],
    say: Callable,
) -> Compute:
    """Choose the attention backend and compilation, tested on rank 0."""
    single, heads = all(p.single for p in packs), heads_of_rank(args, config)
    longest = max((p.longest for p in packs), default=0)
    pick = functools.partial(
        choose_attention, args.attn_impl, device, dtype, heads, single, longest=longest
    )
    attn_impl, rejected = from_rank0(world, pick)
    for reason in rejected:
        say(f"attention: not {reason}")
    say(f"attention: {attn_impl}" + (" (as requested)" if args.attn_impl != "auto" else ""))
    product, problem = "looped", None
    if is_mixture(config):
        if args.activation_memory_budget < 1:
            raise UserError(
                "--activation_memory_budget may choose other experts in the backward: use "
                "--use_activation_checkpointing"
            )
        product, why = from_rank0(world, lambda: choose_product(config, device, dtype))
        say(f"experts: {product} products ({why})")
        problem = why_not_compiled(product)
    pick = functools.partial(
        choose_compile, args.compile, device, attn_impl, problem=problem, dtype=dtype
    )
    compiled, why = from_rank0(world, pick)
    say(f"compile: {'yes' if compiled else 'no'} ({why})")
    if args.activation_memory_budget < 1 and not compiled:
        raise UserError("--activation_memory_budget works on compiled blocks: add --compile")
    return Compute(dtype, attn_impl, compiled, product)


def fingerprint(config) -> str:
    """A digest of the model's configuration, wherever it was read from."""
    values = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


# Entries of a configuration that neither change what a model with given weights computes, nor
# which weights an untrained one starts with.
WITHOUT_EFFECT = re.compile(
    "_.*|.*_token_id|.*dtype|architectures|auto_map|id2label|label2id|max_position_embeddings"
    "|transformers_version|use_cache"
)


def configuration_of(config) -> dict:
    """What a checkpoint keeps of a model's configuration, to recognise another one."""
    values = {k: v for k, v in config.to_dict().items() if not WITHOUT_EFFECT.fullmatch(k)}
    return json.loads(json.dumps(values, default=str))


def pick_lora(
    args: Args, world: World, source: Source, dtype_name: str, say: Callable
) -> Lora | None:
    """The adapters that the flags ask for, if this script has such flags."""
    if not args.lora_rank:
        return None
    if args.export != "none" and not importlib.util.find_spec("peft"):
        raise UserError("--export of adapters needs peft, which is not installed: run setup.sh")
    identify = functools.partial(
        identity_of, args.model_name_or_path, source.folder, source.weights, args.seed, drawn_on()
    )
    base = from_rank0(world, identify)
    lora = choose_lora(args, source.config, base)
    share = lora.parameters / parameters_of(source.config)
    say(
        f"adapters: rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)} of each "
        f"block: {short(lora.parameters)} parameters in fp32, {share:.2%} of the model's, which is "
        f"frozen in {dtype_name}"
    )
    return lora


def usual_lr(trained: bool, lora: Lora | None) -> tuple[float, str, int]:
    """(the learning rate if the flags give none, what it is for, the most passes over small data).
    trained: the model has weights.

    Adapters want ten times that of all weights: "LoRA Without Regret" (Schulman et al. 2025), and
    2e-4 in "QLoRA" (Dettmers et al. 2023)."""
    if lora:
        return 2e-4, "adapters", 10
    return (2e-5, "trained weights", 10) if trained else (1e-3, "random weights", 100)


def pick_horizon(
    args: Args, data_parallel: int, train: Packs, usual: tuple, earlier: dict, say: Callable
) -> tuple[Horizon, Packs]:
    """Rows of a step, number of steps and learning rate; and the rows of all passes. Sets what
    flags left open: --num_epochs, --warmup_steps. usual: from `usual_lr`; earlier: from
    `resumed_settings`."""
    global_batch = args.micro_batch_size * args.grad_accum_steps * data_parallel
    say(
        f"batch: {counted(args.micro_batch_size, 'row')} x {args.grad_accum_steps} accumulated x "
        f"{data_parallel} data-parallel = {counted(global_batch, 'row')} = "
        f"{global_batch * train.seq_len:,} token slots a step"
    )
    weights = train.stats.identity.get("weights")
    source = train

    def mixed(*length: int) -> Packs:
        return mix(source, weights, args.seed, args.pack_sequences, *length)

    n_rows = len(mixed(1) if weights else train)  # of a pass
    chosen = not args.max_steps and args.num_epochs is None
    if chosen:
        args.num_epochs = pick_epochs(n_rows, global_batch, usual[2], earlier, say)
    if weights:
        train = mixed(math.ceil(args.num_epochs or 1), args.max_steps * global_batch)
        first = train.doc_file[train.row_docs[: train.row_start[train.passes_at[1]]]]
        for n, (file, weight) in enumerate(zip(train.stats.files, weights, strict=True)):
            documents = counted(int((first == n).sum()), "document")
            say(f"data: {file.path}, weight {weight:g}: {documents} in the first pass")
    n_total = None if args.max_steps else max(1, train.rows_in(args.num_epochs))
    max_steps = args.max_steps or math.ceil(n_total / global_batch)
    if max_steps > MAX_STEPS:
        raise UserError(
            f"--num_epochs {args.num_epochs:g} takes {max_steps:,} steps: at most {MAX_STEPS:,}"
        )
    if before := fixed_steps(args, earlier):
        if before != max_steps:
            max_steps, n_total = before, None
            say(f"max_steps: {before} (from the resumed run, which an earlier version began)")
    if chosen and max_steps < FEW_STEPS:
        propose_smaller_steps(args, data_parallel, n_total, max_steps, say)
    if args.warmup_steps is None:
        args.warmup_steps = earlier.get("warmup_steps", min(10, max_steps // 10))
    lr = args.lr or usual[0]
    why = "" if args.lr else f" (the default for {usual[1]})"
    rows = min(max_steps * global_batch, n_total or math.inf)
    say(
        f"steps: {max_steps} = {rows / n_rows:.2f} epochs of {counted(n_rows, 'row')}; "
        f"lr {lr:g}{why}, {counted(args.warmup_steps, 'step')} of warm-up, "
        f"then {args.lr_scheduler}"
    )
    if args.warmup_steps >= max_steps:
        peak = lr * max_steps / args.warmup_steps
        say(
            f"warning: --warmup_steps {args.warmup_steps} is not shorter than the run of "
            f"{counted(max_steps, 'step')}: the learning rate only rises, to {peak:.2g} in the "
            "last step; give a shorter warm-up"
        )
    return Horizon(data_parallel, global_batch, max_steps, n_total, lr), train


def pick_epochs(n_rows: int, global_batch: int, most: int, earlier: dict, say: Callable) -> float:
    """Passes over the data for about ABOUT_STEPS steps, at most `most`; a resumed run keeps its
    own. n_rows: of a pass."""
    if earlier.get("num_epochs"):
        return float(earlier["num_epochs"])
    epochs = min(most, max(1, round(ABOUT_STEPS * global_batch / n_rows)))
    say(f"num_epochs: {epochs}, for about {ABOUT_STEPS} steps (from 1 to {most})")
    return epochs


def propose_smaller_steps(
    args: Args, data_parallel: int, n_total: int, max_steps: int, say: Callable
) -> None:
    """Name a micro-batch size and accumulation that give about FEW_STEPS steps or more."""
    rows, micro, accum = n_total // (FEW_STEPS * data_parallel), 1, 1
    if getattr(args, "stages", 1) > 1:  # a pipeline needs many micro-batches
        accum = args.grad_accum_steps
    else:
        micro = min(args.micro_batch_size, max(1, rows))
        accum = max(1, rows // micro)
    steps = math.ceil(n_total / (micro * accum * data_parallel))
    if steps > max_steps:
        say(
            f"steps: only {max_steps}; MICRO_BATCH_SIZE={micro} GRAD_ACCUM_STEPS={accum} makes "
            f"them {steps}"
        )


def pick_order(args: Args, horizon: Horizon, train: Packs, say: Callable) -> Callable:
    """The rows of each step. Raises UserError for a --length_warmup with steps that this run lacks
    or fills up with padding: the sorted rows would be others once the run is extended."""
    first, full = args.length_warmup, horizon.max_steps
    if horizon.n_total:
        full = min(full, horizon.n_total // horizon.global_batch)
    if first > full:
        raise UserError(
            f"--length_warmup {first} is longer than the run's {counted(full, 'step')} of "
            f"{counted(horizon.global_batch, 'row')}: give at most {full}"
        )
    if not args.shuffle:
        packed = "" if train.single else " by the first document of each (they are packed)"
        say(f"rows: in file order{packed}, the same in every epoch (--no_shuffle)")
    if first:
        say(f"rows: those of the first {first} steps in order of their longest document")
    return order_rows(
        train,
        args.seed,
        horizon.global_batch,
        horizon.n_total,
        shuffle=args.shuffle,
        length_warmup=first,
    )


# ---------------------------------------------------------------- of a resumed run


def resumed_settings(resume: str | None, world: World, folder: Path) -> dict:
    """config.json of the run that --resume names, which must have a seq_len; else {}."""
    named = folder if resume == "auto" else Path(resume or "")

    def look() -> dict:
        for file in (named / "config.json", named.parent.parent / "config.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
                found = parse(read_text(file))
                if 8 <= int(found["seq_len"]) <= MAX_INT:
                    return {**found, "seq_len": int(found["seq_len"])}
        return {}

    return from_rank0(world, look) if resume else {}


def named_checkpoint(resume: str | None, world: World, log: Log) -> Path | None:
    """The checkpoint that --resume names, whose tensors are not read yet; None without a name.
    Raises UserError if there is none."""
    if resume in (None, "auto"):
        return None
    return find_checkpoint(resume, log.folder, world, log.say, tensors=False)


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


def resumed_seq_len(seq_len: int, earlier: dict, say: Callable) -> int:
    """Without --seq_len, a resumed run keeps its earlier value, so that its rows stay the same.
    Earlier versions had a fixed default."""
    if seq_len or not earlier:
        return seq_len
    say(f"seq_len: {earlier['seq_len']} (from the resumed run)")
    return earlier["seq_len"]


def fixed_steps(args: Args, earlier: dict) -> int:
    """max_steps of a run that --resume auto continues and an earlier version began, whose launchers
    had a default of 60 steps; 0 if the flags or this version decide."""
    old = earlier and "max_skipped_steps" not in earlier
    if not old or args.resume != "auto" or args.max_steps or args.num_epochs not in (None, 1):
        return 0
    steps = earlier.get("max_steps")
    return steps if type(steps) is int and steps > 0 else 0
