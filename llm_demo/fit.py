"""Find the flags that fit on your cards and should be fastest. Needs no GPU.

    python -m llm_demo.fit models/qwen3-8b --cards 2 --card h100 --tokens_a_step 100000

Memory is what --estimate prints for full rows, in GiB (2**30 bytes), with what the allocator
reserves and what CUDA and NCCL take. 5 % of each card stay free; measured rows took up to 6 % more.
--card also says what runs there: dtype, attention, compiled blocks. Without it: bf16, fused
attention, compiled. What fits is ranked by a rough time of a step (llm_demo/step_time.py): a
ranking, not a promise."""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from llm_demo.core.errors import UserError
from llm_demo.flags import parsing
from llm_demo.flags.args import MAX_COUNT, MAX_TOKENS, SpreadArgs, TrainArgs, parse_args
from llm_demo.flags.parsing import PlainParser, whole
from llm_demo.machine.cards import CARDS, NVLINK, PCIE, SUSTAINED
from llm_demo.machine.process import command, early
from llm_demo.model.local_model import find_here

MOST_CARDS = 64  # of a node; more take minutes


def make_parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = PlainParser(prog="python -m llm_demo.fit", description=__doc__, formatter_class=style)
    add = parser.add_argument
    number = functools.partial(parser.add_argument, type=parsing.real(at_most=1e6))
    add("model", metavar="MODEL", help="a folder, or a hub id, of which only config.json is read")
    add("--cards", type=whole(1, MOST_CARDS), required=True, help="GPUs, of one node")
    add("--card", choices=CARDS, help="the kind of GPU")
    number("--memory", help="GiB (2**30 bytes) of each card; default: those of --card")
    add(
        "--tokens_a_step",
        type=whole(1, 10**9),
        required=True,
        help="minimum tokens per optimizer step",
    )
    add("--seq_len", type=whole(8, MAX_TOKENS), default=1024, help="tokens of a row; default: 1024")
    add(
        "--lora_rank",
        type=whole(at_most=MAX_COUNT),
        default=0,
        help="rank of adapters; default: 0, all weights",
    )
    add("--base_bits", type=int, choices=(4, 16), default=16, help="of the weights under adapters")
    moments = parsing.choices(TrainArgs, "optim_state")
    add("--optim_state", choices=moments, default="fp32", help="dtype of AdamW's moments")
    number("--host_memory", help="GiB of the host's memory for the run; default: as needed")
    number("--tflops", help=f"TFLOP/s that a card sustains; default: {SUSTAINED} x its peak")
    number("--bandwidth", help=f"GB/s between cards; default: {NVLINK}, or {PCIE} without NVLink")
    add("--limit", action="store_true", help="add --device_memory_gb to the line")
    return parser


def check(ask) -> None:
    """Raise UserError for flags that lack another one, and for a model that is missing."""
    if ask.base_bits == 4 and not ask.lora_rank:
        raise UserError("--base_bits 4 needs --lora_rank (see --help)")
    if not (ask.card or ask.memory):
        raise UserError("set --card, or --memory (see --help)")
    find_here(ask.model)


if __name__ == "__main__":  # before the slow imports
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would look for a GPU
    early(lambda: make_parser().parse_args(), check)

import numpy as np
import torch

from fsdp import estimate
from fsdp.flags import FsdpArgs
from fsdp_pp import estimate as fsdp_pp_estimate
from fsdp_pp.flags import FsdpPipeArgs
from llm_demo import step_time
from llm_demo.estimate import CONTEXT_GB, GB, PROCESS, USABLE, fullest
from llm_demo.machine.device import dtype_name, pick_dtype, plan_for, this_device
from llm_demo.machine.files import ROOT
from llm_demo.machine.text import counted
from llm_demo.model.adapters import choose_lora
from llm_demo.model.costs import (
    experts_of,
    heads_of,
    is_hybrid,
    refuse_shares,
    share_of_heads,
)
from llm_demo.model.families import is_mixture
from llm_demo.model.model_folder import open_model
from llm_demo.model.source import find_model
from llm_demo.run.choices import Compute, choose_compile, has_fused_kernels
from pp import estimate as pp_estimate
from pp.cut import split
from pp.flags import PipeArgs

LARGEST = 64  # micro-batch size
ADAPTERS = 16  # rank of those offered if nothing else fits
COMPUTE = Compute(torch.bfloat16, "varlen", compile=True, rule="fla")
FSDP, PP, FSDP_PP = "fsdp/launch_fsdp.sh", "pp/launch_pp.sh", "fsdp_pp/launch_fsdp_pp.sh"
FLAGS = {FSDP: (FsdpArgs, SpreadArgs), PP: (PipeArgs,), FSDP_PP: (FsdpPipeArgs, SpreadArgs)}
DEVICE, CKPT, HOST, SPREAD, EXPERTS, SHARES, PIPE, GRID = WAYS = (
    "on the device", "checkpointing", "host optimizer", "rows spread", "experts spread",
    "matrices spread", "pipeline", "FSDP pipeline",
)  # fmt: skip
WAY_OF = {  # by launcher, or else by the first of these flags
    PP: PIPE, FSDP_PP: GRID, "expert_parallel": EXPERTS, "sequence_parallel": SPREAD,
    "tensor_parallel": SHARES,
    "optimizer_on_host": HOST, "use_activation_checkpointing": CKPT,
}  # fmt: skip
NOT_SEARCHED = "ZeRO-3 with offload, which keeps the weights on the host too, is not searched"
LONG = 8192  # tokens of a row from which on it may be spread over cards
FEW = 2048  # tokens of a step and card up to which matrices may be spread
SHORT = {
    "micro_batch_size": "micro", "grad_accum_steps": "GA", "use_activation_checkpointing": "ckpt",
    "activation_memory_budget": "budget", "reshard_after_forward": "reshard",
    "optimizer_on_host": "host", "activations_on_host": "activations on host",
    "sequence_parallel": "rows over", "expert_parallel": "experts over",
    "tensor_parallel": "matrices over", "stages": "stages",
    "schedule": "", "lora_rank": "rank", "base_bits": "bits", "optim_state": "moments",
}  # fmt: skip


class Choice(NamedTuple):
    launcher: str
    flags: dict
    seconds: float  # estimated time of a step, see above
    tokens: int  # per step
    parts: dict[str, float]  # memory of the fullest card, GiB
    host: float  # memory of the host for all ranks, GiB

    @property
    def memory(self) -> float:
        return sum(self.parts.values())

    @property
    def way(self) -> str:
        """One of WAYS."""
        return next((WAY_OF[k] for k in WAY_OF if k in (self.launcher, *self.flags)), DEVICE)

    def __str__(self):
        words = [f"{SHORT[k]} {'' if v is True else v}".strip() for k, v in self.flags.items()]
        return ", ".join(words)


def choices(config, ask, pipeline: bool = True) -> Iterator[Choice]:
    """Every setting to consider, whether it fits or not."""
    compute = ask.compute
    if ask.lora_rank:
        words = tuple(w for k, v in adapters(ask).items() for w in (f"--{k}", str(v)))
        args = flags_of(*FLAGS[FSDP], argv=words)
        compute = compute._replace(lora=choose_lora(args, config, {}))
    for launcher, flags in settings(config, ask, pipeline):
        yield from batches(config, ask, compute, launcher, flags)


def adapters(ask) -> dict:
    """The flags of adapters, {} without."""
    bits = {"base_bits": ask.base_bits} if ask.base_bits != 16 else {}
    return {"lora_rank": ask.lora_rank, **bits} if ask.lora_rank else {}


def settings(config, ask, pipeline: bool) -> Iterator[tuple[str, dict]]:
    """(launcher, flags) to consider, without the sizes of batches."""
    mixture, lora = is_mixture(config), adapters(ask)
    moments = {"optim_state": ask.optim_state} if ask.optim_state != "fp32" else {}
    ckpt = {"use_activation_checkpointing": True}
    savings = [{}, ckpt]
    if ask.compute.compile and not mixture:
        savings.insert(1, {"activation_memory_budget": 0.6})
    on_host = [{**ckpt, "activations_on_host": True}] * (ask.seq_len >= LONG)
    either = (False, True)
    long, small = ask.seq_len >= LONG, ask.tokens_a_step <= FEW * ask.cards
    if is_hybrid(config):  # which take whole rows and matrices
        long = small = False
    over_rows = spreads(ask, share_of_heads, heads_of(config)) if long else [1]
    over_matrices = spreads(ask, refuse_shares, config) if small else [1]
    experts = experts_of(config) or 1
    over_experts = [n for n in range(1, ask.cards + 1) if ask.cards % n == experts % n == 0]
    for saved, reshard, host, rows, experts, shares in itertools.product(
        savings + on_host, either[: ask.cards], either[: 2 - bool(lora)],
        over_rows, over_experts, over_matrices,
    ):  # fmt: skip
        if rows > 1 < shares or ask.base_bits == 4 and shares > 1:
            continue
        on = {"reshard_after_forward": reshard, "optimizer_on_host": host}
        over = {"sequence_parallel": rows, "expert_parallel": experts, "tensor_parallel": shares}
        flags = {k: v for k, v in on.items() if v} | {k: v for k, v in over.items() if v > 1}
        yield FSDP, lora | moments | saved | flags
    if lora or not pipeline or ask.cards % 2:
        return
    # DeepSpeed's pipeline takes no experts, no bf16 moments. FSDP inside a pipeline is considered
    # where it differs: by sharded stages or by the interleaved schedule.
    deepspeed = bool(not (mixture or moments) and importlib.util.find_spec("deepspeed"))
    for saved, stages in itertools.product(savings, sorted({2, ask.cards})):
        plain = {**moments, **saved, "stages": stages, "schedule": "1f1b"}
        sharded = ask.cards > stages
        each = [(PP, plain), (PP, plain | {"schedule": "dualpipev"})] * deepspeed
        each += [(FSDP_PP, plain)] * (sharded or not deepspeed)
        each += [(FSDP_PP, plain | {"reshard_after_forward": True})] * sharded
        each += [(FSDP_PP, plain | {"schedule": "interleaved"})]
        yield from each if stages * 2 <= config.num_hidden_layers else ()


def spreads(ask, refuse: Callable, what) -> list[int]:
    """Over how many cards rows may be cut. refuse(what, n) raises UserError if n can't share it."""
    possible = []
    for n in range(1, ask.cards + 1):
        with contextlib.suppress(UserError):
            refuse(what, n)
            possible += [n] * (ask.cards % n == ask.seq_len % n == 0)
    return possible


def batches(config, ask, compute, launcher: str, flags: dict) -> Iterator[Choice]:
    """The same flags with each micro-batch size, accumulated to at least the tokens asked for."""
    stages, S = flags.get("stages", 1), ask.seq_len
    cards = ask.cards // stages  # that each hold a part of the same stage
    replicas = cards // flags.get("sequence_parallel", 1) // flags.get("tensor_parallel", 1)
    rows = math.ceil(ask.tokens_a_step / S / replicas)
    train = SimpleNamespace(seq_len=S, longest=S, single=True, doc_start=np.array([0, S]))
    smallest = {math.ceil(rows / micro): micro for micro in range(min(rows, LARGEST), 0, -1)}
    for accum, micro in smallest.items():
        possible = {"dualpipev": accum >= 2 * stages, "interleaved": accum % stages == 0}
        if not possible.get(flags.get("schedule"), True):
            continue
        batch = {"micro_batch_size": micro, "grad_accum_steps": accum}
        limits = {"seq_len": S, "device_memory_gb": ask.memory - CONTEXT_GB}
        args = dataclasses.replace(flags_of(*FLAGS[launcher]), **limits, **batch, **flags)
        job, speed = (args, config, compute, train), (ask.tflops * 1e12, ask.bandwidth * 1e9)
        if launcher == FSDP:
            how = cards, cards > 1, flags.get("expert_parallel", 1)
            if args.use_activation_checkpointing:
                kept, _ = estimate.attention_kept(*job, *how)
                job = args, config, compute._replace(attention_kept=kept), train
            ranks = estimate.held(*job, *how)
            seconds = step_time.of_fsdp(args, config, job[2], cards, *speed)
        else:
            pieces = args.stages * (1 + (args.schedule in ("dualpipev", "interleaved")))
            shape = args.partition, micro, S, args.use_activation_checkpointing
            counts = split(config, pieces, *shape)
            held = fsdp_pp_estimate.held if launcher == FSDP_PP else pp_estimate.held
            ranks = held(*job, replicas, counts)
            seconds = step_time.of_pipeline(args, config, compute, replicas, *speed)
        host = sum(each.host for each in ranks) / GB
        tokens, parts = micro * accum * replicas * S, fullest(ranks, *job)
        yield Choice(launcher, {**batch, **flags}, seconds, tokens, parts, host)


@functools.cache
def flags_of(*groups: type, argv=()):
    return parse_args("", *groups, argv=list(argv))


def lacking(choice: Choice, ask) -> float:
    """What is missing, as shares of the memory of a card and of the host; 0 if the choice fits."""
    card = max(0, choice.memory / ask.usable - 1)
    return card + (max(0, choice.host / ask.host_memory - 1) if ask.host_memory else 0)


def best(found: list[Choice], ask) -> tuple[Choice, bool]:
    """(the fastest that fits, or else the one that comes nearest; whether it fits)."""
    key = lambda c: (lacking(c, ask), c.seconds, len(c.flags), c.memory)  # noqa: E731
    return (choice := min(found, key=key)), not lacking(choice, ask)


# ---------------------------------------------------------------- what is printed


def line(choice: Choice, ask) -> str:
    """The command to paste."""
    launcher = ROOT / choice.launcher
    if launcher.is_relative_to(Path.cwd()):
        launcher = launcher.relative_to(Path.cwd())
    flags = {"model_name_or_path": ask.model, "seq_len": ask.seq_len, **choice.flags}
    if ask.limit:  # of PyTorch alone
        flags["device_memory_gb"] = math.floor(10 * (ask.memory - CONTEXT_GB)) / 10
    words = [f"--{k}" if v is True else f"--{k} {shlex.quote(str(v))}" for k, v in flags.items()]
    return f"NPROC_PER_NODE={ask.cards} bash {shlex.quote(str(launcher))} {' '.join(words)}"


def report(found: list[Choice], ask) -> str:
    first, _ = best(found, ask)
    parts = ", ".join(f"{name} {gb:.1f}" for name, gb in first.parts.items() if gb)
    dtype = dtype_name(ask.compute.dtype)
    compiled = "compiled" if ask.compute.compile else "not compiled"
    on_host = ["masters and moments"] * ("optimizer_on_host" in first.flags)
    on_host += ["inputs of blocks"] * ("activations_on_host" in first.flags)
    host = f"about {ask.cards * PROCESS:.0f} GiB; the optimizer is on the cards"
    if on_host:
        unknown = ", if the host has that: see --host_memory" * (not ask.host_memory)
        host = f"{first.host:.1f} GiB for {' and '.join(on_host)}{unknown}"
    rows = counted(first.tokens // ask.seq_len, "row")
    lines = [
        line(first, ask),
        "Add --train_json, and --tokenizer_name_or_path if the model's folder has no tokenizer.",
        f"tokens per step: {rows} x {ask.seq_len:,} = {first.tokens:,}",
        f"card: {ask.name}: {dtype}, {ask.compute.attn_impl} attention, {compiled}{ask.assumed}",
        f"estimated time of a step: {first.seconds:.2g} s, at {ask.tflops:.0f} TFLOP/s a card and "
        f"{ask.bandwidth:g} GB/s between cards",
        f"memory: {first.memory:.1f} of {ask.memory:g} GiB a card: {parts}",
        f"host memory: {host}",
        "considered (the fastest of each kind by the estimated time of a step):",
    ]
    for way in WAYS:
        if candidates := [choice for choice in found if choice.way == way]:
            choice, fits = best(candidates, ask)
            why = f"{choice.memory - ask.usable:.1f} GiB too much"
            if fits:
                why = f"{choice.seconds / first.seconds:.2f} x the time"
            elif choice.memory <= ask.usable:
                why = f"needs {choice.host:.1f} GiB of the host's"
            why = "chosen" if choice is first else why
            lines.append(f"  {way:15} {choice.memory:6.1f} GiB  {why:28} {choice}")
    return "\n".join(lines)


def nothing(found: list[Choice], config, ask) -> str:
    """What comes nearest, and what would help."""

    def would_fit(**other) -> bool:
        those = argparse.Namespace(**vars(ask) | other)
        return best([*choices(config, those, pipeline=False)], those)[1]

    choice, _ = best(found, ask)
    memory = f"{choice.memory:.1f} GiB a card, where {ask.usable:.1f} may be used"
    memory += f", and {choice.host:.1f} GiB of host memory" * (choice.host > 0)
    needs = [f"cards of {math.ceil(choice.memory / USABLE)} GiB"] * (choice.memory > ask.usable)
    if ask.host_memory and choice.host > ask.host_memory:
        memory += f", of {ask.host_memory:g}"
        needs.append(f"{math.ceil(choice.host)} GiB of host memory")
    helps = [" with ".join(needs)]
    if not ask.lora_rank and would_fit(lora_rank=ADAPTERS):
        helps.insert(0, f"adapters only (--lora_rank {ADAPTERS})")
    elif not is_mixture(config) and would_fit(lora_rank=ask.lora_rank or ADAPTERS, base_bits=4):
        rank = ask.lora_rank or ADAPTERS
        helps.insert(0, f"adapters over a base in 4 bits (--lora_rank {rank} --base_bits 4)")
    if not ask.lora_rank and ask.optim_state == "fp32" and would_fit(optim_state="bf16"):
        helps.insert(0, "AdamW's moments in bf16 (--optim_state bf16)")
    more = (ask.cards * times for times in (2, 4, 8))
    helps += [f"{n} such cards" for n in more if would_fit(cards=n)][:1]
    if enough := [c.host for c in found if c.memory <= ask.usable]:
        helps.append(f"{math.ceil(min(enough))} GiB of host memory")
    note = "" if ask.lora_rank or is_mixture(config) else f"; {NOT_SEARCHED}: see docs/zero.md"
    helps = " or ".join(dict.fromkeys(helps))
    return f"nothing fits; nearest: {choice}: {memory}; what would help: {helps}{note}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """What is asked for, with what --card stands for."""
    ask = make_parser().parse_args(argv)
    check(ask)
    plan_for(ask.card)
    ask.name, ask.compute, ask.assumed = "any, as fast as an H200", COMPUTE, ""
    if ask.card:
        card = this_device()
        dtype, _ = pick_dtype("auto", card)
        attention = "varlen" if has_fused_kernels(card) else "bucketed"
        ask.name, ask.memory = card.name, ask.memory or card.memory_gb
        compiled, _ = choose_compile(None, card, attention)
        ask.compute = Compute(dtype, attention, compiled, rule="fla")
    ask.usable = ask.memory * USABLE
    tflops, bandwidth = step_time.speed_of(ask.card, ask.compute.dtype)
    ask.tflops, ask.bandwidth = ask.tflops or tflops, ask.bandwidth or bandwidth
    return ask


def main(argv: list[str] | None = None) -> None:
    ask = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        on_hub = not Path(os.path.expanduser(ask.model)).is_dir()
        path = find_model(ask.model, config_in=folder)
        config, weights = open_model(path, ask.seq_len, with_weights=not on_hub)
    if weights and weights.packed and ask.base_bits != 4:
        raise UserError(f"{ask.model} holds weights in 4 bits: add --lora_rank 16 --base_bits 4")
    if ask.base_bits == 4 and is_mixture(config):
        raise UserError("--base_bits 4 does not work with mixtures of experts: drop it")
    ask.assumed = ", with the kernels of fla-core" * is_hybrid(config)
    found = list(choices(config, ask))
    if not best(found, ask)[1]:
        print(f"error: {nothing(found, config, ask)}", file=sys.stderr)
        sys.exit(1)
    print(report(found, ask))


if __name__ == "__main__":
    command(main)
