"""Measure the ways to train a model on this machine, likeliest first: fit MODEL --measure.

Each way runs for a dozen steps through its launcher, as a row of the benchmark (bench/run.py), with
as many tokens a step as every other. A way that runs out of memory or fails is a row that says so,
and the search goes on. --out gets the rows, a table and a picture."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import plots, store
from bench.presets import DEFAULTS
from bench.run import describe, measure
from bench.table import APPROXIMATE, way_of
from bench.table import ways as ways_table
from llm_demo import step_time
from llm_demo.core.errors import UserError
from llm_demo.data.packs import load_rows
from llm_demo.flags.args import DataArgs
from llm_demo.machine.device import dtype_name, free_host_memory, peak_tflops, this_device
from llm_demo.machine.files import ROOT, write_text
from llm_demo.machine.text import counted
from llm_demo.memory import GB, Settings
from llm_demo.model.costs import Sizes
from llm_demo.model.local_model import find_here
from llm_demo.model.source import load_tokenizer
from llm_demo.run.folder import revision

STEPS = 12
TIMEOUT = 900  # seconds of one way
MUCH_SLOWER = 2.0  # than the fastest by the rough formula: such a way is skipped
EQUAL = 1.03  # by which the medians of equal ways may differ
DRIFT = 0.05  # of a step's time, between the first run of a way and the last
ENGINES = ("fsdp", "pp", "zero", "fsdp_pp")  # the simplest first
BATCH = ("micro_batch_size", "grad_accum_steps")
SAVINGS = ("use_activation_checkpointing", "activation_memory_budget", "activations_on_host")
OF_A_ROW = (*BATCH, "use_activation_checkpointing")


# ---------------------------------------------------------------- before the first run


def fill_from_machine(ask) -> None:
    """Set what was not asked for: the cards that are here, their memory, the length of the data's
    rows, and tokens of a step that all cards share. Raises UserError for what can't be measured."""
    if int(os.environ.get("NNODES") or 1) > 1:
        raise UserError("--measure runs on one node: unset NNODES")
    gpus = torch.cuda.device_count()
    if not ask.cards:
        ask.cards = gpus or 2
    if gpus and ask.cards > gpus:
        raise UserError(f"--cards {ask.cards}: this machine has {counted(gpus, 'GPU')}")
    if not ask.memory:
        ask.memory = this_device().memory_gb or free_host_memory() / GB / ask.cards
    if ask.train_json:
        tokenizer = load_tokenizer(ask.tokenizer_name_or_path or ask.model)
        rows, _ = load_rows(ask.train_json, tokenizer, DataArgs(seq_len=ask.seq_len or 0))
        ask.seq_len = rows.seq_len
    ask.seq_len = ask.seq_len or 1024
    least = ask.cards * ask.seq_len
    if ask.tokens_a_step < least:
        raise UserError(
            f"--tokens_a_step {ask.tokens_a_step} is less than a row of {ask.seq_len:,} tokens for "
            f"each of {ask.cards} processes: ask for {least:,} or more"
        )
    ask.tokens_a_step = -(-ask.tokens_a_step // least) * least


def fastest_of_each(choices: list, left_out: tuple[str, ...]) -> list:
    """Of the choices with the same script and flags, except the flags left out, the one that is
    fastest by the rough formula. The fastest comes first."""
    fastest = {}
    for choice in sorted(choices, key=lambda choice: (choice.seconds, len(choice.flags))):
        flags = {name: value for name, value in choice.flags.items() if name not in left_out}
        fastest.setdefault(f"{choice.settings.engine} {flags}", choice)
    return list(fastest.values())


def likeliest(fitting: list, ask) -> list:
    """What to measure, in order. First each way to spread the model, with the batch and the saving
    of memory that are the fastest by the rough formula. Then its other savings, and on one card
    other batches. An approximate way is measured once, unless ask.all. fitting: the choices that
    fit. Only those with exactly the tokens a step that were asked for are compared."""
    comparable = [choice for choice in fitting if choice.tokens == ask.tokens_a_step]
    kinds = fastest_of_each(comparable, left_out=BATCH if ask.cards > 1 else ())
    first = fastest_of_each(kinds, left_out=(*BATCH, *SAVINGS))
    others = [choice for choice in kinds if choice not in first]
    if not ask.all:
        others = [choice for choice in others if not approximate(choice)]
    return first + others


def row_of(choice, ask) -> dict:
    """The benchmark's row for a choice."""
    settings, flags = choice.settings, flags_beside(choice)
    if ask.tokenizer_name_or_path:
        flags["tokenizer_name_or_path"] = ask.tokenizer_name_or_path
    model, folder = ask.model, find_here(ask.model)
    if folder:
        model = folder.resolve()
        if model.is_relative_to(ROOT):
            model = model.relative_to(ROOT)
    return DEFAULTS | {
        "engine": settings.engine,
        "micro": settings.micro_batch_size,
        "ga": settings.grad_accum_steps,
        "ckpt": settings.use_activation_checkpointing,
        "dtype": dtype_name(ask.compute.dtype),
        "seq_len": ask.seq_len,
        "model": str(model),
        "gpus": ask.cards,
        "steps": STEPS,
        "data": ask.train_json or "full",
        "flags": flag_words(flags),
    }


def flags_beside(choice) -> dict:
    """Those of a choice that have no column in a table."""
    return {name: value for name, value in choice.flags.items() if name not in OF_A_ROW}


def flag_words(flags: dict) -> str:
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items()]
    return " ".join(words)


def earlier_rows(name: str, row: dict, resume: bool) -> dict[str, dict]:
    """{key: result} of an earlier run that --resume continues. row: any row to be measured. Raises
    UserError for earlier rows that can't be compared with new ones."""
    results, file = store.read(name), store.file_of(name)
    if results and not resume:
        raise UserError(
            f"{file} has {counted(len(results), 'row')}: --resume keeps those that ran, --out "
            "names another folder"
        )
    here = {"device": str(this_device()), "revision": revision(), "world_size": row["gpus"]}
    for result in results:
        other = [key for key in ("model", "data", "seq_len") if result["row"][key] != row[key]]
        if "env" in result:
            other += [key for key, value in here.items() if result["env"][key] != value]
        if other:
            raise UserError(f"{file} has rows of another {other[0]}: --out names another folder")
    return {store.key_of(result): result for result in results}


# ---------------------------------------------------------------- measuring


def measure_ways(fitting: list, sizes: Sizes, ask, command_of: Callable) -> None:
    """Measure ask.measure ways among the choices that fit, and print a comparison. command_of:
    gives the command to paste for a choice."""
    ways = likeliest(fitting, ask)
    if not ways:
        raise UserError(f"no way has exactly {ask.tokens_a_step:,} tokens a step")
    out = Path(ask.out or ROOT / "runs" / f"fit-{Path(ask.model).name}").absolute()
    name = str(out / "rows")
    earlier = earlier_rows(name, row_of(ways[0], ask), ask.resume)
    print(
        f"{counted(len(ways), 'kind')} of training fit, {min(ask.measure, len(ways))} will be "
        f"measured at {ask.tokens_a_step:,} tokens a step in {dtype_name(ask.compute.dtype)}"
    )
    found, done, took = [], [], []
    for choice in ways:
        if len(done) == ask.measure:
            break
        label = f"[{len(done) + 1}/{ask.measure}] {label_of(choice)}"
        fastest = min((one.seconds for one, _ in done), default=choice.seconds)
        if choice.seconds > MUCH_SLOWER * fastest and not ask.all:
            print(f"{label}: skipped, it should take over twice as long (--all runs it)")
            continue
        row = row_of(choice, ask)
        result = earlier.get(store.key_of({"row": row}))
        if not result or result["status"] != "ok":
            result = run_one(row, label, took, runs=ask.measure - len(done) + 1)
            store.write(name, result)
        else:
            print(f"{label}: measured before")
        found.append((choice, result))
        if result["status"] == "ok":
            done.append((choice, result))
    table = ways_table([result for _, result in found])
    write_text(out / "table.md", table)
    if not done:
        raise UserError(f"no way ran: their errors are in {store.file_of(name)}")
    first, result = done[0]
    again = run_one(row_of(first, ask), f"{label_of(first)}, once more", took, runs=1)
    plots.draw(name, out / "bars.png")
    best, why = recommended(done)
    print(f"\n{table}")
    for line in [*drifted(result, again), *speed_lines(done, sizes, ask), why]:
        print(line)
    print(f"rows, table and picture: {out}")
    print(command_of(best))


def run_one(row: dict, label: str, took: list[float], runs: int) -> dict:
    """Run a row by the benchmark's runner and print how it went. took: seconds of earlier runs,
    this one's are added. runs: that are left."""
    left = f" (about {statistics.mean(took) * runs:.0f} s left)" if took else ""
    print(f"{label} ...{left}", end=" ", flush=True)
    started = time.monotonic()
    result = measure(row, TIMEOUT)
    took.append(time.monotonic() - started)
    print(describe(result), flush=True)
    return result | {"row": row, "wall_s": round(took[-1], 1)}


# ---------------------------------------------------------------- comparing


def label_of(choice) -> str:
    return way_of(choice.settings.engine, flag_words(flags_beside(choice)))


def approximate(choice) -> bool:
    return bool(APPROXIMATE.search(flag_words(choice.flags)))


def median_of(result: dict) -> float:
    return result["summary"]["median_step_ms"]


def are_equal(a: dict, b: dict) -> bool:
    """Whether the middle halves of two rows' steps overlap, and their medians are close."""
    (low_a, high_a), (low_b, high_b) = (r["summary"]["quartiles_step_ms"] for r in (a, b))
    medians = median_of(a), median_of(b)
    return low_a <= high_b and low_b <= high_a and max(medians) <= EQUAL * min(medians)


def recommended(done: list) -> tuple:
    """(the simplest Choice of those equal to the fastest exact one, the reason). done: pairs of a
    choice and its result."""
    exact = [pair for pair in done if not approximate(pair[0])] or done
    fastest = min(exact, key=lambda pair: median_of(pair[1]))
    equal = [pair for pair in exact if are_equal(pair[1], fastest[1])]

    def complexity(pair) -> tuple:
        choice, result = pair
        return ENGINES.index(choice.settings.engine), len(choice.flags), median_of(result)

    best, _ = min(equal, key=complexity)
    others = ", ".join(label_of(choice) for choice, _ in equal if choice is not best)
    why = "the fastest"
    if median_of(fastest[1]) > min(median_of(result) for _, result in done):
        why = "the fastest of those that are exact"
    if others:
        why = f"the simplest of equals; as fast: {others}"
    return best, f"recommended: {label_of(best)}, {why}"


def drifted(first: dict, again: dict) -> list[str]:
    """A warning if the machine became faster or slower between two runs of the same row."""
    if again["status"] != "ok":
        return [f"warning: the first way failed when it ran once more: {again['error'][:160]}"]
    change = median_of(again) / median_of(first) - 1
    if abs(change) <= DRIFT:
        return []
    return [
        f"warning: the first way's step took {change:+.0%} when it ran once more: others use this "
        "machine, or its clocks changed; measure again before you trust small differences"
    ]


# ---------------------------------------------------------------- the machine's two constants


def speed_lines(done: list, sizes: Sizes, ask) -> list[str]:
    """Keep what the cards and their link sustained, for later searches; lines that say so."""
    tflops, bandwidth = [], []
    for choice, result in done:
        if choice.settings.engine == "fsdp" and not approximate(choice):
            card, link = rates_of(choice.settings, sizes, result["summary"])
            tflops.append(card)
            if link:
                bandwidth.append(link)
    if not tflops:
        return []
    speed = {"tflops": statistics.median(tflops)}
    words = f"measured: {speed['tflops']:.3g} TFLOP/s a card"
    peak = peak_tflops(this_device(), ask.compute.dtype)
    if peak:
        words += f" ({speed['tflops'] / peak:.0%} of its peak)"
    if bandwidth:
        speed["bandwidth"] = statistics.median(bandwidth)
        words += f", {speed['bandwidth']:.3g} GB/s between cards"
    file = step_time.keep_speed(ask.cards, speed)
    return [f"{words}; later searches here use {file}, deleting it forgets"]


def rates_of(settings: Settings, sizes: Sizes, summary: dict) -> tuple[float, float | None]:
    """(TFLOP/s of a card, GB/s between cards) with which the rough formula gives a row's time. GB/s
    is None if nothing was sent or timed."""
    exposed = max(summary["median_comm_exposed_ms"] or [0])
    micro = (summary["median_step_ms"] - exposed) / settings.grad_accum_steps / 1000
    computing = max(micro - step_time.LAUNCH, micro / 2)
    tflops = step_time.micro_batch_flops(sizes, settings) / computing / 1e12
    sent = step_time.shared_bytes(sizes, settings)
    comm, wait = summary["median_comm_ms"], summary["median_comm_wait_ms"]
    if not (sent and comm and wait):
        return tflops, None
    busy = min(total - waiting for total, waiting in zip(comm, wait, strict=True)) / 1000
    return tflops, sent / busy / 1e9 if busy > 0 else None
