"""Find the flags that fit on your cards and should be fastest. Needs no GPU.

    python -m llm_demo.fit models/qwen3-8b --cards 2 --card h100 --tokens_a_step 100000

Memory is what --estimate prints for full rows, in GiB (2**30 bytes), with what the allocator
reserves and what CUDA and NCCL take; 5 % of each card stay free, as much as measured rows are off.
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
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from fsdp import estimate
from fsdp.flags import FsdpArgs
from fsdp_pp import estimate as fsdp_pp_estimate
from fsdp_pp.flags import FsdpPipeArgs
from llm_demo import step_time
from llm_demo.core.errors import UserError
from llm_demo.core.lora import Lora
from llm_demo.estimate import CONTEXT_GB, PROCESS
from llm_demo.job.adapters import choose_lora
from llm_demo.job.args import parse_args
from llm_demo.job.choices import choose_compile, has_fused_kernels
from llm_demo.job.costs import experts_of, heads_of, share_of_heads
from llm_demo.job.device import CARDS, DTYPES, peak_tflops, pick_dtype, plan_for, this_device
from llm_demo.job.files import ROOT
from llm_demo.job.model_folder import open_model
from llm_demo.job.parsing import PlainParser, whole
from llm_demo.job.plan import Compute
from llm_demo.job.process import command
from llm_demo.job.source import find_model, is_mixture
from llm_demo.job.text import counted
from pp.cut import split
from pp.flags import PipeArgs

FREE = 0.05  # share of a card's memory, for what the estimate leaves out
LARGEST = 64  # micro-batch size
ADAPTERS = 16  # rank of those offered if nothing else fits
COMPUTE = Compute(torch.bfloat16, "varlen", compile=True)
TFLOPS, SUSTAINED = 550, 0.55  # of an H200 in bf16; share of a data sheet's that is reached
NVLINK, PCIE = 200, 20  # GB/s between cards
LINKED = ("h100", "h200", "a100")  # by NVLink
DEVICE, CKPT, HOST, SPREAD, EXPERTS, PIPE, GRID = WAYS = (
    "on the device", "checkpointing", "host optimizer", "rows spread", "experts spread", "pipeline",
    "FSDP pipeline",
)  # fmt: skip
LAUNCHERS = {PIPE: "pp/launch_pp.sh", GRID: "fsdp_pp/launch_fsdp_pp.sh"}
FLAGS = {PIPE: PipeArgs, GRID: FsdpPipeArgs}  # for the others: FsdpArgs
NOT_SEARCHED = "ZeRO-3 with offload, which keeps the weights on the host too, is not searched"
LONG = 8192  # tokens of a row from which on it may be spread over cards
SHORT = {
    "micro_batch_size": "micro", "grad_accum_steps": "GA", "use_activation_checkpointing": "ckpt",
    "activation_memory_budget": "budget", "reshard_after_forward": "reshard",
    "optimizer_on_host": "host", "activations_on_host": "activations on host",
    "sequence_parallel": "rows over", "expert_parallel": "experts over", "stages": "stages",
    "schedule": "", "lora_rank": "rank",
}  # fmt: skip


class Choice(NamedTuple):
    way: str  # one of WAYS
    flags: dict
    seconds: float  # estimated time of a step, see above
    tokens: int  # per step
    parts: dict[str, float]  # memory of the fullest card, GB
    host: float  # memory of the host for all ranks, GB

    @property
    def memory(self) -> float:
        return sum(self.parts.values())

    def __str__(self):
        words = [f"{SHORT[k]} {'' if v is True else v}".strip() for k, v in self.flags.items()]
        return ", ".join(words)


def choices(config, ask, pipeline: bool = True) -> Iterator[Choice]:
    """Every setting to consider, whether it fits or not."""
    lora, rank = None, {}
    if ask.lora_rank:
        rank = {"lora_rank": ask.lora_rank}
        lora = choose_lora(dataclasses.replace(flags_of(FsdpArgs), **rank), config, {})
    # a copy with the same values: transformers takes 2 us to look one up
    names = (*config.to_dict(), *config.attribute_map)
    copy = {n: getattr(config, n) for n in names if hasattr(config, n)}
    config = SimpleNamespace(**copy, whole=config)
    ckpt = {"use_activation_checkpointing": True}
    savings = [{}, *[{"activation_memory_budget": 0.6}] * ask.compute.compile, ckpt]
    if ask.seq_len >= LONG:
        savings.append({**ckpt, "activations_on_host": True})
    for saved in savings:
        grid = (False, True), (False, True), spreads(config, ask), expert_spreads(config, ask)
        for reshard, host, rows, experts in itertools.product(*grid):
            on = {"reshard_after_forward": reshard, "optimizer_on_host": host}
            on["sequence_parallel"] = rows if rows > 1 else 0
            on["expert_parallel"] = experts if experts > 1 else 0
            refused = is_mixture(config) and "activation_memory_budget" in saved
            refused |= host and bool(lora)
            if (ask.cards > 1 or not reshard) and not refused:
                flags = {**rank, **saved, **{k: v for k, v in on.items() if v}}
                yield from batches(config, ask, DEVICE, flags, lora)
        refused = is_mixture(config) and "activation_memory_budget" in saved
        refused |= bool(lora) or "activations_on_host" in saved
        if pipeline and not refused and ask.cards % 2 == 0:
            yield from pipelines(config, ask, saved)


def pipelines(config, ask, saved: dict) -> Iterator[Choice]:
    """DeepSpeed's pipeline, which takes no experts, and FSDP inside a pipeline where that differs:
    by sharded stages or by the interleaved schedule."""
    deepspeed = not is_mixture(config) and importlib.util.find_spec("deepspeed")
    for stages in sorted({2, ask.cards}):
        if stages * 2 > config.num_hidden_layers:
            continue
        flags = {**saved, "stages": stages}
        for kind in ("1f1b", "dualpipev") if deepspeed else ():
            yield from batches(config, ask, PIPE, {**flags, "schedule": kind})
        if ask.cards > stages or not deepspeed:
            yield from batches(config, ask, GRID, {**flags, "schedule": "1f1b"})
        if ask.cards > stages:
            resharded = {**flags, "schedule": "1f1b", "reshard_after_forward": True}
            yield from batches(config, ask, GRID, resharded)
        yield from batches(config, ask, GRID, {**flags, "schedule": "interleaved"})


def spreads(config, ask) -> list[int]:
    """Over how many cards a row may be spread."""
    if ask.seq_len < LONG:
        return [1]
    possible = []
    for n in (n for n in range(1, ask.cards + 1) if ask.cards % n == ask.seq_len % n == 0):
        with contextlib.suppress(UserError):
            share_of_heads(heads_of(config), n)
            possible.append(n)
    return possible


def expert_spreads(config, ask) -> list[int]:
    """Over how many cards each block's experts may be spread."""
    experts = experts_of(config) or 1
    return [n for n in range(1, ask.cards + 1) if ask.cards % n == experts % n == 0]


def batches(config, ask, way: str, flags: dict, lora: Lora | None = None) -> Iterator[Choice]:
    """The same flags with each micro-batch size, accumulated to at least the tokens asked for."""
    compute, stages = ask.compute._replace(lora=lora), flags.get("stages", 1)
    defaults = flags_of(FLAGS.get(way, FsdpArgs))
    cards = ask.cards // stages  # that each hold a part of the same stage
    experts_over = flags.get("expert_parallel", 1)
    replicas = cards // flags.get("sequence_parallel", 1)
    rows = math.ceil(ask.tokens_a_step / ask.seq_len / replicas)
    train = SimpleNamespace(
        seq_len=ask.seq_len, longest=ask.seq_len, single=True, doc_start=np.array([0, ask.seq_len])
    )
    smallest = {math.ceil(rows / micro): micro for micro in range(min(rows, LARGEST), 0, -1)}
    for accum, micro in smallest.items():
        batch = {"micro_batch_size": micro, "grad_accum_steps": accum}
        args, host = dataclasses.replace(defaults, **batch, **flags), 0.0
        speed = ask.seq_len, cards, ask.tflops, ask.bandwidth
        if stages > 1:
            if args.schedule == "dualpipev" and accum < 2 * stages:
                continue
            if args.schedule == "interleaved" and accum % stages:
                continue
            parts = of_stages(way, args, config, compute, train, replicas)
            seconds = step_time.of_pipeline(args, config, *speed)
        else:
            if args.use_activation_checkpointing and train.longest >= estimate.LONG:
                within = dataclasses.replace(args, device_memory_gb=ask.memory)
                blocks, _ = estimate.choose_attention_kept(
                    within, config, compute, train, cards, cards > 1, experts_over
                )
                compute = compute._replace(attention_kept=blocks)
            parts = estimate.of_fsdp(args, config, compute, train, cards, cards > 1, experts_over)
            way = CKPT if args.use_activation_checkpointing else DEVICE
            adapters = lora and lora.active
            not_recomputed = compute.attention_kept / config.num_hidden_layers
            seconds = step_time.of_fsdp(args, config, *speed, adapters, not_recomputed)
            if args.optimizer_on_host:
                way = HOST
            if replicas < cards:
                way = SPREAD
            if experts_over > 1:
                way = EXPERTS
            if args.optimizer_on_host or args.activations_on_host:
                host = estimate.of_host(args, config, compute, train, cards)
        tokens = micro * accum * replicas * ask.seq_len
        fullest = max(parts, key=lambda parts: sum(parts.values()))
        yield Choice(way, {**batch, **flags}, seconds, tokens, fullest, host)


@functools.cache
def flags_of(group: type):
    return parse_args("", group, argv=[])


def of_stages(way: str, args, config, compute, train, replicas: int) -> list[dict[str, float]]:
    pieces = args.stages * (1 + (args.schedule in ("dualpipev", "interleaved")))
    counts = split(
        config, pieces, args.partition,
        args.micro_batch_size, train.seq_len, args.use_activation_checkpointing,
    )  # fmt: skip
    if way == GRID:
        return fsdp_pp_estimate.of_stages(args, config, compute, train, replicas, counts)
    from pp import estimate as pp_estimate  # after the flags: importing DeepSpeed takes seconds

    steady = min(args.grad_accum_steps, 4 * args.stages)  # more hold no more at once
    held = pp_estimate.pieces_held(args.schedule, args.stages, counts, steady)
    return pp_estimate.of_pipeline(args, config, compute, train, replicas, held)


def lacking(choice: Choice, ask) -> float:
    """What is missing, as shares of the memory of a card and of the host; 0 if the choice fits."""
    card = max(0, choice.memory / usable(ask) - 1)
    return card + (max(0, choice.host / ask.host_memory - 1) if ask.host_memory else 0)


def usable(ask) -> float:
    return ask.memory * (1 - FREE)


def best(found: list[Choice], ask) -> tuple[Choice, bool]:
    """(the fastest that fits, or else the one that comes nearest; whether it fits)."""
    fitting = [choice for choice in found if not lacking(choice, ask)]
    if not fitting:
        return min(found, key=lambda choice: (lacking(choice, ask), choice.seconds)), False
    return min(fitting, key=lambda c: (c.seconds, len(c.flags), c.memory)), True


# ---------------------------------------------------------------- what is printed


def line(choice: Choice, ask) -> str:
    """The command to paste."""
    launcher = ROOT / LAUNCHERS.get(choice.way, "fsdp/launch_fsdp.sh")
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
    dtype = next(name for name, kind in DTYPES.items() if kind == ask.compute.dtype)
    runs = f"{ask.name}: {dtype}, {ask.compute.attn_impl} attention"
    runs += ", compiled" if ask.compute.compile else ", not compiled"
    on_host = ["masters and moments"] * ("optimizer_on_host" in first.flags)
    on_host += ["inputs of blocks"] * ("activations_on_host" in first.flags)
    host = f"{first.host:.1f} GiB for {' and '.join(on_host)}"
    if not on_host:
        host = f"about {ask.cards * PROCESS:.0f} GiB; the optimizer is on the cards"
    unknown = ", if the host has that: see --host_memory" * (not ask.host_memory and first.host > 0)
    rows = counted(first.tokens // ask.seq_len, "row")
    lines = [
        line(first, ask),
        "Add --train_json, and --tokenizer_name_or_path if the model's folder has no tokenizer.",
        f"tokens per step: {rows} x {ask.seq_len:,} = {first.tokens:,}",
        f"card: {runs}",
        f"estimated time of a step: {first.seconds:.2g} s, at {ask.tflops:.0f} TFLOP/s a card and "
        f"{ask.bandwidth:g} GB/s between cards",
        f"memory: {first.memory:.1f} of {ask.memory:g} GiB a card: {parts}",
        f"host memory: {host}{unknown}",
        "considered (the fastest of each kind by the estimated time of a step):",
    ]
    for way in WAYS:
        if candidates := [choice for choice in found if choice.way == way]:
            choice, fits = best(candidates, ask)
            slower = f"{choice.seconds / first.seconds:.2f} x the time"
            why = "chosen" if choice is first else slower if fits else shortage(choice, ask)
            lines.append(f"  {way:15} {choice.memory:6.1f} GiB  {why:28} {choice}")
    return "\n".join(lines)


def shortage(choice: Choice, ask) -> str:
    over = choice.memory - usable(ask)
    return f"{over:.1f} GiB too much" if over > 0 else f"needs {choice.host:.1f} GiB of the host's"


def nothing(found: list[Choice], config, ask) -> str:
    """What comes nearest, and what would help."""
    choice, _ = best(found, ask)
    memory = f"{choice.memory:.1f} GiB a card, where {usable(ask):.1f} may be used"
    memory += f", and {choice.host:.1f} GiB of host memory" * (choice.host > 0)
    needs = []
    if choice.memory > usable(ask):
        needs.append(f"cards of {math.ceil(choice.memory / (1 - FREE))} GiB")
    if ask.host_memory and choice.host > ask.host_memory:
        memory += f", of {ask.host_memory:g}"
        needs.append(f"{math.ceil(choice.host)} GiB of host memory")
    helps = [" with ".join(needs)]
    adapters = argparse.Namespace(**{**vars(ask), "lora_rank": ADAPTERS})
    if not ask.lora_rank and best(list(choices(config, adapters, pipeline=False)), adapters)[1]:
        helps.insert(0, f"adapters only (--lora_rank {ADAPTERS})")
    for cards in (2 * ask.cards, 4 * ask.cards, 8 * ask.cards):
        larger = argparse.Namespace(**{**vars(ask), "cards": cards})
        if best(list(choices(config, larger, pipeline=False)), larger)[1]:
            helps.append(f"{cards} such cards")
            break
    if enough := [c.host for c in found if c.memory <= usable(ask)]:
        helps.append(f"{math.ceil(min(enough))} GiB of host memory")
    helps = " or ".join(dict.fromkeys(helps))
    note = "" if ask.lora_rank or is_mixture(config) else f"; {NOT_SEARCHED}: see docs/zero.md"
    return f"nothing fits; nearest: {choice}: {memory}; what would help: {helps}{note}"


def above_0(text: str) -> float:
    """A type for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:80]}: must be a number above 0")
    return value


def make_parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = PlainParser(prog="python -m llm_demo.fit", description=__doc__, formatter_class=style)
    add, number = parser.add_argument, functools.partial(parser.add_argument, type=above_0)
    add("model", metavar="MODEL", help="a folder, or a hub id, of which only config.json is read")
    add("--cards", type=whole(1), required=True, help="GPUs, of one node")
    add("--card", choices=CARDS, help="the kind of GPU")
    number("--memory", help="GiB (2**30 bytes) of each card; default: those of --card")
    add("--tokens_a_step", type=whole(1), required=True, help="minimum tokens per optimizer step")
    add("--seq_len", type=whole(8), default=1024, help="tokens of a row; default: 1024")
    add("--lora_rank", type=whole(), default=0, help="rank of adapters; default: 0, all weights")
    number("--host_memory", help="GiB of the host's memory for the run; default: as needed")
    number("--tflops", help=f"TFLOP/s that a card sustains; default: {SUSTAINED} x its peak")
    number("--bandwidth", help=f"GB/s between cards; default: {NVLINK}, or {PCIE} without NVLink")
    add("--limit", action="store_true", help="add --device_memory_gb to the line")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """What is asked for, with what --card stands for."""
    ask = (parser := make_parser()).parse_args(argv)
    plan_for(ask.card)
    ask.name, ask.compute, tflops = "any, as fast as an H200", COMPUTE, TFLOPS
    if ask.card:
        card = this_device()
        dtype, _ = pick_dtype("auto", card)
        attention = "varlen" if has_fused_kernels(card) else "bucketed"
        ask.name, ask.memory = card.name, ask.memory or card.memory_gb
        ask.compute = Compute(dtype, attention, choose_compile(None, card, attention)[0])
        tflops = SUSTAINED * peak_tflops(card, dtype)
    elif not ask.memory:
        parser.error("set --card, or --memory")
    ask.tflops = ask.tflops or tflops
    ask.bandwidth = ask.bandwidth or (NVLINK if ask.card in (None, *LINKED) else PCIE)
    return ask


def main(argv: list[str] | None = None) -> None:
    ask = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        on_hub = not Path(ask.model).expanduser().is_dir()
        path = find_model(ask.model, config_in=folder)
        config, _ = open_model(path, ask.seq_len, with_weights=not on_hub)
    found = list(choices(config, ask))
    if not best(found, ask)[1]:
        print(f"error: {nothing(found, config, ask)}", file=sys.stderr)
        sys.exit(1)
    print(report(found, ask))


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would look for a GPU
    command(main)
