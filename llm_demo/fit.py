"""Find the flags that fit on your cards and should be fastest, or measure which are.

    python -m llm_demo.fit models/qwen3-8b --cards 2 --card h100 --tokens_a_step 100000
    python -m llm_demo.fit models/qwen3-8b --tokens_a_step 65536 --measure

--measure runs the likeliest ways on this machine, each for a dozen steps, and names the fastest.
Without it no GPU is needed.

Memory is what --estimate prints for full rows, in GiB (2**30 bytes), with what the allocator
reserves and what CUDA and NCCL take. 5 % of each card stay free; measured rows took up to 8 % more.
--card also says what runs there: dtype, attention, compiled blocks. Without it: bf16, fused
attention, compiled. What fits is ranked by a rough time of a step (llm_demo/step_time.py): a
ranking, not a promise. Once --measure has run, its speed of cards and link is used here."""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import math
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from llm_demo.core.errors import UserError
from llm_demo.flags import parsing
from llm_demo.flags.args import MAX_COUNT, MAX_TOKENS, LowBitArgs
from llm_demo.flags.parsing import PlainParser, whole
from llm_demo.machine.cards import CARDS, NVLINK, PCIE, SUSTAINED
from llm_demo.machine.process import command, early, read_json
from llm_demo.model.local_model import find_here

MOST_CARDS = 64  # of a node; more take minutes


def make_parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = PlainParser(prog="python -m llm_demo.fit", description=__doc__, formatter_class=style)
    add = parser.add_argument
    positive = functools.partial(parsing.numeral, kind=float, positive=True, at_most=1e6)
    number = functools.partial(parser.add_argument, type=positive)
    add("model", metavar="MODEL", help="a folder, or a hub id, of which only config.json is read")
    add("--cards", type=whole(1, MOST_CARDS), help="GPUs, of one node")
    add("--card", choices=CARDS, help="the kind of GPU")
    number("--memory", help="GiB (2**30 bytes) of each card; default: those of --card")
    add(
        "--tokens_a_step",
        type=whole(1, 10**9),
        required=True,
        help="minimum tokens per optimizer step",
    )
    add(
        "--seq_len", type=whole(8, MAX_TOKENS), help="tokens of a row; default: 1024, or the data's"
    )
    add(
        "--lora_rank",
        type=whole(at_most=MAX_COUNT),
        default=0,
        help="rank of adapters; default: 0, all weights",
    )
    add("--base_bits", type=int, choices=(4, 16), default=16, help="of the weights under adapters")
    moments = parsing.literals(LowBitArgs, "optim_state")
    add("--optim_state", choices=moments, default="fp32", help="dtype of AdamW's moments")
    number("--host_memory", help="GiB of the host's memory for the run; default: as needed")
    number("--tflops", help=f"TFLOP/s that a card sustains; default: {SUSTAINED} x its peak")
    number("--bandwidth", help=f"GB/s between cards; default: {NVLINK}, or {PCIE} without NVLink")
    add("--limit", action="store_true", help="add --device_memory_gb to the line")
    add(
        "--measure",
        type=whole(1, 100),
        nargs="?",
        const=6,
        metavar="N",
        help="run N ways to train on this machine; default: 6. --cards, --card and --memory "
        "are then this machine's",
    )
    measuring = parser.add_argument_group("with --measure")
    add = measuring.add_argument
    add("--train_json", metavar="DATA", help="rows; default: full rows of random tokens")
    add("--tokenizer_name_or_path", metavar="FOLDER", help="for --train_json; default: the model's")
    add("--out", metavar="FOLDER", help="of rows, table and picture; default: runs/fit-MODEL")
    add("--resume", action="store_true", help="keep the rows of --out that ran")
    add("--all", action="store_true", help="run ways that should take over twice as long, too")
    add("--zero", action="store_true", help="ZeRO 2 and 3, too")
    return parser


def check(ask) -> None:
    """Raise UserError for flags that lack another one, and for a model that is missing."""
    if ask.base_bits == 4 and not ask.lora_rank:
        raise UserError("--base_bits 4 needs --lora_rank (see --help)")
    if not ask.measure:
        if not ask.cards:
            raise UserError("set --cards (see --help)")
        for name in ("train_json", "tokenizer_name_or_path", "out", "resume", "all", "zero"):
            if getattr(ask, name):
                raise UserError(f"--{name} needs --measure (see --help)")
    find_here(ask.model)


if __name__ == "__main__":  # before the slow imports
    early(lambda: make_parser().parse_args(), check)

import torch

from llm_demo import step_time
from llm_demo.machine.device import (
    dtype_name,
    has_fused_kernels,
    is_sm,
    pick_dtype,
    plan_for,
    this_device,
)
from llm_demo.machine.files import ROOT
from llm_demo.machine.text import counted
from llm_demo.memory import (
    CONTEXT_GB,
    LONG_DOCUMENT,
    PROCESS,
    USABLE,
    Peak,
    Settings,
    attention_kept,
    peaks,
)
from llm_demo.model.adapters import ALL, choose_lora
from llm_demo.model.costs import Sizes, refuse_shares, shares_of_heads, sizes_of
from llm_demo.model.families import experts_of, family_of, is_hybrid, is_mixture
from llm_demo.model.model_folder import open_model
from llm_demo.model.source import find_model
from llm_demo.options.fp8 import qualifies
from llm_demo.run.choices import Compute, choose_compile
from llm_demo.run.cut import costs, split

LARGEST = 64  # micro-batch size
FEW = 2048  # tokens of a step and card up to which matrices may be spread
COMPUTE = Compute(torch.bfloat16, "varlen", compile=True, rule="fla")
DEVICE = "on the device"
# of the report's table; a choice with several of these flags counts as the last
WAYS = (
    DEVICE,
    "use_activation_checkpointing",
    "optimizer_on_host",
    "tensor_parallel",
    "sequence_parallel",
    "expert_parallel",
    "pp",
    "fsdp_pp",
)
FLAGS = (  # those that are searched, in the order of printing
    "micro_batch_size",
    "grad_accum_steps",
    "lora_rank",
    "base_bits",
    "optim_state",
    "activation_memory_budget",
    "use_activation_checkpointing",
    "activations_on_host",
    "stages",
    "schedule",
    "reshard_after_forward",
    "optimizer_on_host",
    "sequence_parallel",
    "expert_parallel",
    "tensor_parallel",
    "replicas",
    "psgd_rank",
    "fp8",
)
PSGD_RANK = 32


class Choice(NamedTuple):
    settings: Settings
    flags: dict
    seconds: float  # rough time of a step
    peak: Peak  # of the fullest card
    host: float  # GiB of the host's memory for all ranks
    tokens: int  # per step

    @property
    def memory(self) -> float:
        """GiB of the fullest card."""
        return self.peak.total

    @property
    def way(self) -> str:
        """One of WAYS."""
        if self.settings.engine != "fsdp":
            return self.settings.engine
        for flag in reversed(WAYS):
            if flag in self.flags:
                return flag
        return DEVICE

    def __str__(self):
        words = [f"--{k}" if v is True else f"--{k} {v}" for k, v in self.flags.items()]
        return " ".join(words)


def choices(config, sizes: Sizes, ask, pipeline: bool = True) -> Iterator[Choice]:
    """Every setting to consider, whether it fits or not."""
    ways = savings(config, ask)
    found = list(fsdp_settings(config, ask, ways))
    if pipeline and ask.cards % 2 == 0:
        found += pipeline_settings(config, ask, ways)
    if ask.measure:
        found += settings_to_measure(config, ask, ways)
    for settings in found:
        for batch in with_batches(ask, settings):
            yield choice_of(sizes, ask, batch)


def savings(config, ask) -> list[Settings]:
    """FSDP's settings, with each way to save memory of activations."""
    lora = None
    if ask.lora_rank:
        adapters = SimpleNamespace(
            lora_rank=ask.lora_rank,
            base_bits=ask.base_bits,
            lora_alpha=32.0,
            lora_dropout=0.0,
            lora_targets=ALL,
        )
        lora = choose_lora(adapters, config, {})
    plain = Settings(
        engine="fsdp",
        ranks=ask.cards,
        sharded=ask.cards > 1,
        seq_len=ask.seq_len,
        optim_state=ask.optim_state,
        dtype=dtype_name(ask.compute.dtype),
        compile=ask.compute.compile,
        keys=0 if "varlen" in ask.compute.attn_impl.split("+") else ask.seq_len,
        lora=lora,
    )
    checkpointing = replace(plain, use_activation_checkpointing=True)
    found = [plain, checkpointing]
    if plain.compile and not is_mixture(config):
        found.insert(1, replace(plain, activation_memory_budget=0.6))
    if ask.seq_len >= LONG_DOCUMENT:
        found.append(replace(checkpointing, activations_on_host=True))
    return found


def fsdp_settings(config, ask, ways: list[Settings]) -> Iterator[Settings]:
    """Without the sizes of batches. ways: as of `savings`."""
    n_experts, rows, shares = experts_of(config) or 1, [1], [1]
    experts = [n for n in range(1, ask.cards + 1) if ask.cards % n == n_experts % n == 0]
    tested = family_of(config).tested
    if not tested:  # a proof covers no spreading
        experts = [1]
    if tested and not is_hybrid(config):  # which takes whole rows and matrices
        if ask.seq_len >= LONG_DOCUMENT:
            rows = spreads(ask, shares_of_heads, config)
        if ask.tokens_a_step <= FEW * ask.cards and ask.base_bits == 16:
            shares = spreads(ask, refuse_shares, config)
    of_ranks = [(n, 1) for n in rows] + [(1, n) for n in shares if n > 1]
    reshards = (False, True) if ask.cards > 1 else (False,)
    hosts = (False,) if ask.lora_rank else (False, True)
    for saving, reshard, host, spread, (over_rows, over_shares) in itertools.product(
        ways, reshards, hosts, experts, of_ranks
    ):
        yield replace(
            saving,
            reshard_after_forward=reshard,
            optimizer_on_host=host,
            expert_parallel=spread,
            sequence_parallel=over_rows,
            tensor_parallel=over_shares,
        )


def pipeline_settings(config, ask, ways: list[Settings]) -> Iterator[Settings]:
    """Without the sizes of batches. DeepSpeed's pipeline takes no experts, no adapters and no bf16
    moments. FSDP inside a pipeline is considered where it differs: by sharded stages, or
    interleaved."""
    deepspeed = importlib.util.find_spec("deepspeed") and ask.optim_state == "fp32"
    deepspeed = deepspeed and not is_mixture(config) and not ask.lora_rank
    for saving, stages in itertools.product(ways, sorted({2, ask.cards})):
        if saving.activations_on_host or stages * 2 > config.num_hidden_layers:
            continue
        ranks = ask.cards // stages
        sharded = ranks > 1
        plain = replace(saving, engine="fsdp_pp", stages=stages, ranks=ranks, sharded=sharded)
        if deepspeed:
            yield replace(plain, engine="pp")
            yield replace(plain, engine="pp", schedule="dualpipev")
        if sharded or not deepspeed:
            yield plain
        if sharded:
            yield replace(plain, reshard_after_forward=True)
        yield replace(plain, schedule="interleaved")


def settings_to_measure(config, ask, ways: list[Settings]) -> Iterator[Settings]:
    """Settings that are named only once measured, because the rough formula is too rough for them:
    copies of the model, PowerSGD, fp8, the schedule v and ZeRO. Without batch sizes."""
    has_fp8 = is_sm(this_device(), 89) and ask.compute.compile and not is_mixture(config)
    has_fp8 = has_fp8 and qualifies(config.intermediate_size, config.hidden_size, multiple=16)
    for saving in ways:
        if saving.activations_on_host:
            continue
        if ask.cards > 1:
            copies = replace(saving, ranks=1, sharded=False, replicas=str(ask.cards))
            yield copies
            if not ask.lora_rank:
                yield replace(copies, psgd_rank=PSGD_RANK)
        if ask.cards > 1 and ask.cards % 2 == 0:
            for stages in sorted({2, ask.cards}):
                ranks = ask.cards // stages
                staged = replace(saving, engine="fsdp_pp", stages=stages, ranks=ranks, schedule="v")
                if stages * 2 <= config.num_hidden_layers:
                    yield replace(staged, sharded=ranks > 1)
        if has_fp8 and not ask.lora_rank:
            yield replace(saving, fp8="rowwise_gw")
        if ask.zero and importlib.util.find_spec("deepspeed") and not ask.lora_rank:
            for stage in (2, 3):
                zero = read_json(ROOT / zero_file(stage))
                yield replace(saving, engine="zero", zero=zero["zero_optimization"])


def zero_file(stage: int) -> str:
    return f"zero/ds_zero{stage}.json"


def spreads(ask, refuse: Callable, what) -> list[int]:
    """The numbers of cards over which rows may be cut. refuse(what, n) raises UserError if n cards
    can't share `what`."""
    possible = []
    for n in range(1, ask.cards + 1):
        with contextlib.suppress(UserError):
            refuse(what, n)
            if ask.cards % n == ask.seq_len % n == 0:
                possible.append(n)
    return possible


def with_batches(ask, settings: Settings) -> Iterator[Settings]:
    """With each micro-batch size, accumulated to at least the tokens asked for."""
    shares = settings.sequence_parallel * settings.tensor_parallel
    rows = math.ceil(ask.tokens_a_step / ask.seq_len / (ask.cards // settings.stages // shares))
    smallest = {math.ceil(rows / micro): micro for micro in range(min(rows, LARGEST), 0, -1)}
    for accum, micro in smallest.items():
        if settings.schedule == "dualpipev" and accum < 2 * settings.stages:
            continue
        if settings.schedule == "interleaved" and accum % settings.stages:
            continue
        yield replace(settings, micro_batch_size=micro, grad_accum_steps=accum)


def choice_of(sizes: Sizes, ask, settings: Settings) -> Choice:
    recomputed = settings.use_activation_checkpointing
    if settings.stages > 1:
        pieces = settings.stages * (1 if settings.schedule == "1f1b" else 2)
        times = costs(sizes, settings.micro_batch_size, ask.seq_len, recomputed)
        counts = split(sizes, pieces, "balanced", times)
        settings = replace(settings, counts=counts)
    elif recomputed:
        kept, _ = attention_kept(sizes, settings, ask.seq_len, ask.memory)
        settings = replace(settings, attention_kept=kept)
    seconds = step_time.step_seconds(sizes, settings, ask.tflops * 1e12, ask.bandwidth * 1e9)
    ranks = peaks(sizes, settings)
    fullest = max(ranks, key=lambda peak: peak.total)
    host = sum(peak.host for peak in ranks)
    rows = settings.tokens * settings.grad_accum_steps
    return Choice(
        settings=settings,
        flags=flags_of(settings, ask),
        seconds=seconds,
        peak=fullest,
        host=host,
        tokens=rows * (ask.cards // settings.stages),
    )


def flags_of(settings: Settings, ask) -> dict:
    """The flags that differ from their defaults, and the batch sizes."""
    adapters = {"lora_rank": ask.lora_rank, "base_bits": ask.base_bits}
    plain = vars(Settings(engine="", ranks=1)) | {"lora_rank": 0, "base_bits": 16}
    asked = vars(settings) | adapters
    flags = {}
    for flag in FLAGS:
        always = flag in ("micro_batch_size", "grad_accum_steps")
        always = always or flag == "schedule" and settings.stages > 1
        if always or asked[flag] != plain[flag]:
            flags[flag] = asked[flag]
    if settings.engine == "zero":
        flags["deepspeed_config"] = near(zero_file(settings.zero["stage"]))
    return flags


def near(file: str) -> str:
    """The shortest path of a file of this project that works from the current folder."""
    path = ROOT / file
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return str(path)


def lacking(choice: Choice, ask) -> float:
    """What is missing, as shares of the memory of a card and of the host; 0 if the choice fits."""
    card = max(0, choice.memory / ask.usable - 1)
    return card + (max(0, choice.host / ask.host_memory - 1) if ask.host_memory else 0)


def best(found: list[Choice], ask) -> tuple[Choice, bool]:
    """(the fastest that fits, or else the one that comes nearest; whether it fits)."""

    def key(choice: Choice) -> tuple:
        return lacking(choice, ask), choice.seconds, len(choice.flags), choice.memory

    choice = min(found, key=key)
    return choice, not lacking(choice, ask)


# ---------------------------------------------------------------- what is printed


def line(choice: Choice, ask) -> str:
    """The command to paste."""
    engine = choice.settings.engine
    launcher = near(f"{engine}/launch_{engine}.sh")
    words = f"--model_name_or_path {shlex.quote(ask.model)} --seq_len {ask.seq_len} {choice}"
    for flag in ("train_json", "tokenizer_name_or_path"):
        if getattr(ask, flag):
            words += f" --{flag} {shlex.quote(getattr(ask, flag))}"
    if ask.limit:  # of PyTorch alone
        words += f" --device_memory_gb {math.floor(10 * (ask.memory - CONTEXT_GB)) / 10}"
    return f"NPROC_PER_NODE={ask.cards} bash {shlex.quote(launcher)} {words}"


def report(found: list[Choice], ask) -> str:
    first, _ = best(found, ask)
    parts = ", ".join(f"{name} {gb:.1f}" for name, gb in first.peak.parts.items() if gb)
    compiled = "compiled" if ask.compute.compile else "not compiled"
    host = first.host or ask.cards * PROCESS
    rows = counted(first.tokens // ask.seq_len, "row")
    lines = [
        line(first, ask),
        "Add --train_json, and --tokenizer_name_or_path if the model's folder has no tokenizer.",
        f"tokens per step: {rows} x {ask.seq_len:,} = {first.tokens:,}",
        f"card: {ask.name}: {dtype_name(ask.compute.dtype)}, {ask.compute.attn_impl} attention, "
        f"{compiled}{ask.assumed}",
        f"times: a rough formula, at {ask.tflops:.3g} TFLOP/s a card and {ask.bandwidth:.3g} GB/s "
        f"between cards, {ask.speed_from}",
        f"memory: {first.memory:.1f} of {ask.memory:g} GiB a card: {parts}",
        f"host memory: {host:.1f} GiB for all processes",
        "considered (the fastest of each way by the rough time of a step):",
    ]
    for way in WAYS:
        candidates = [choice for choice in found if choice.way == way]
        if not candidates:
            continue
        choice, fits = best(candidates, ask)
        if choice is first:
            why = "chosen"
        elif fits:
            why = f"{choice.seconds / first.seconds:.2f} x the time"
        elif choice.memory <= ask.usable:
            why = f"needs {choice.host:.1f} GiB of the host's"
        else:
            why = f"{choice.memory - ask.usable:.1f} GiB too much"
        lines.append(f"  {way:28} {choice.memory:6.1f} GiB  {why:28} {choice}")
    return "\n".join(lines)


def nothing(found: list[Choice], config, ask) -> str:
    """What comes nearest, and what would help."""
    choice, _ = best(found, ask)
    helps = []
    if choice.memory > ask.usable:
        helps.append(f"cards of {math.ceil(choice.memory / USABLE)} GiB, more cards")
    if ask.host_memory and choice.host > ask.host_memory:
        helps.append(f"{math.ceil(choice.host)} GiB of host memory")
    if not ask.lora_rank:
        helps.append("--optim_state bf16, adapters (--lora_rank 16)")
    if ask.base_bits == 16:
        helps.append("adapters over a base in 4 bits (--lora_rank 16 --base_bits 4)")
    if not ask.lora_rank and not is_mixture(config):
        helps.append("ZeRO-3 with offload (docs/zero.md), which is not searched")
    return (
        f"nothing fits; nearest: {choice}: {choice.memory:.1f} GiB a card, where {ask.usable:.1f} "
        f"may be used, and {choice.host:.1f} GiB of host memory; what may help: {', '.join(helps)}"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """What is asked for, with what --card or this machine's cards stand for."""
    ask = make_parser().parse_args(argv)
    check(ask)
    plan_for(ask.card)
    if ask.measure:
        from bench.ways import fill_from_machine

        fill_from_machine(ask)
    ask.seq_len = ask.seq_len or 1024
    kept = {} if ask.card else step_time.kept_speed(ask.cards)
    ask.name, ask.compute, ask.assumed = "any, as fast as an H200", COMPUTE, ""
    kind = ask.card or ("here" if ask.measure or kept else None)
    if kind:
        card = this_device()
        dtype, _ = pick_dtype("auto", card)
        attention = "varlen" if has_fused_kernels(card) else "bucketed"
        compiled, _ = choose_compile(None, card, attention)
        ask.compute = Compute(dtype, attention, compiled, rule="fla")
        ask.name = card.name
        ask.memory = ask.memory or card.memory_gb
    if not ask.memory:
        raise UserError("set --card, or --memory (see --help)")
    ask.usable = ask.memory * USABLE
    tflops, bandwidth = step_time.speed_of(kind, ask.compute.dtype)
    ask.speed_from = "assumed"
    if kept and not (ask.tflops and ask.bandwidth):
        ask.speed_from = f"measured here ({step_time.speed_file(ask.cards)}, deleting it forgets)"
    ask.tflops = ask.tflops or kept.get("tflops", tflops)
    ask.bandwidth = ask.bandwidth or kept.get("bandwidth", bandwidth)
    return ask


def main(argv: list[str] | None = None) -> None:
    ask = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        on_hub = not Path(os.path.expanduser(ask.model)).is_dir()
        path = find_model(ask.model, config_in=folder)
        config, weights = open_model(path, ask.seq_len, with_weights=not on_hub)
    if weights and weights.packed and ask.base_bits != 4:
        raise UserError(f"{ask.model} holds weights in 4 bits: add --lora_rank 16 --base_bits 4")
    if is_hybrid(config):
        ask.assumed = ", with the kernels of fla-core"
    sizes = sizes_of(config)
    found = list(choices(config, sizes, ask))
    if not best(found, ask)[1]:
        print(f"error: {nothing(found, config, ask)}", file=sys.stderr)
        sys.exit(1)
    if ask.measure:
        fitting = [choice for choice in found if not lacking(choice, ask)]
        from bench.ways import measure_ways

        measure_ways(fitting, sizes, ask, lambda choice: line(choice, ask))
        return
    print(report(found, ask))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or a measured run would go on
    try:
        command(main)
    except KeyboardInterrupt:
        print("\nstopped: finished rows are kept, --resume continues", file=sys.stderr)
        sys.exit(130)
