"""Write the tables of what fits, in docs/fits.md, docs/long.md, docs/adapters.md and the README:
python docs/make_fits.py

What fits is found by llm_demo/fit.py. tests/test_fit.py fails when the tables are stale."""

import bisect
import functools
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llm_demo import fit  # noqa: E402
from llm_demo.machine.device import plan_for  # noqa: E402
from llm_demo.model.costs import sizes_of  # noqa: E402
from llm_demo.model.source import load_config  # noqa: E402

MODELS = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
CARDS = {  # (number, kind): head of a column
    (1, "rtx4090"): "1 x RTX 4090, 24 GB",
    (2, "rtx4090"): "2 x RTX 4090",
    (2, "mi100"): "2 x MI100, 32 GB",
    (1, "h100"): "1 x H100, 80 GB",
    (2, "h100"): "2 x H100",
    (2, "h200"): "2 x H200, 141 GB",
}
MORE = {  # docs/fits.md has the largest model for these, too
    (2, "rtx3090"): "2 x RTX 3090, 24 GB",
    (2, "a100"): "2 x A100, 80 GB",
    (2, "rx7900xtx"): "2 x RX 7900 XTX, 24 GB",
    (2, "mi210"): "2 x MI210, 64 GB",
    (2, "mi300x"): "2 x MI300X, 192 GB",
}
TOKENS = 65_536
DEVICE, HOST, ADAPTERS = "on the device", "host optimizer", "adapters"
FOUR_BITS = "adapters, 4 bits"
RANK = 16  # rank of the adapters
NAMES = {DEVICE: DEVICE, HOST: "`--optimizer_on_host`", ADAPTERS: f"`--lora_rank {RANK}`",
         FOUR_BITS: "the same, `--base_bits 4`"}  # fmt: skip
POWERS, STEPS_OF_16K = [2**power for power in range(3, 11)], range(16, 513, 16)  # 1,024 tokens
SHOWN = {  # flags of cells; the others are left out
    "micro_batch_size": "",
    "activation_memory_budget": "budget",
    "use_activation_checkpointing": "ckpt",
    "activations_on_host": "activations on host",
    "schedule": "",
    "reshard_after_forward": "reshard",
    "optimizer_on_host": "host",
    "sequence_parallel": "rows over",
    "expert_parallel": "experts over",
    "tensor_parallel": "matrices over",
}
HOST_GB = 128  # host memory for each card, in the table of the longest rows
MARKED = re.compile(r"(<!-- fits -->\n).*?(<!-- end fits -->)", re.S)
MARKED_MORE = re.compile(r"(<!-- more cards -->\n).*?(<!-- end more cards -->)", re.S)
LONGEST = re.compile(r"(<!-- longest -->\n).*?(<!-- end longest -->)", re.S)


def cells() -> dict[tuple, fit.Choice | None]:
    """(model, cards, setting) -> the fastest choice that fits, None if nothing does."""
    found = {}
    for model in MODELS:
        config = load_config(folder(model), 1024)
        sizes = sizes_of(config)
        for cards, kind in (*CARDS, *MORE):
            words = f"{folder(model)} --cards {cards} --card {kind} --tokens_a_step {TOKENS}"
            ask = fit.parse(words.split())
            lora = [*words.split(), "--lora_rank", str(RANK)]
            four_bits = fit.parse([*lora, "--base_bits", "4"])
            every = list(fit.choices(config, sizes, ask))
            for way, several in (
                (DEVICE, [c for c in every if c.way not in ("optimizer_on_host", "fsdp_pp")]),
                (HOST, [c for c in every if c.way == "optimizer_on_host"]),
                (ADAPTERS, list(fit.choices(config, sizes, fit.parse(lora)))),
                (FOUR_BITS, list(fit.choices(config, sizes, four_bits))),
            ):
                choice, fits = fit.best(several, ask)
                found[model, (cards, kind), way] = choice if fits else None
    return found


def folder(model: str) -> Path:
    return ROOT / f"models/qwen3-{model.lower()}"


def cell(choice: fit.Choice | None) -> str:
    """The micro-batch size and flags of a choice, abbreviated."""
    if not choice:
        return "–"
    words = words_of(choice.flags).removesuffix(", host")
    return f"{choice.way} {words}" if choice.way in ("pp", "fsdp_pp") else words


def words_of(flags: dict) -> str:
    words = []
    for flag, short in SHOWN.items():
        if flag in flags:
            value = "" if flags[flag] is True else flags[flag]
            words.append(f"{short} {value}".strip())
    return ", ".join(words)


def table(found: dict) -> str:
    text = (
        f"| model | setting | {' | '.join(CARDS.values())} |\n" + "|---" * (len(CARDS) + 2) + "|\n"
    )
    for model in MODELS[1:]:  # the smallest fits everywhere
        for way in NAMES:
            row = [cell(found[model, cards, way]) for cards in CARDS]
            text += f"| {model} | {way} | {' | '.join(row)} |\n"
    return text


def short(found: dict, columns: dict) -> str:
    """The largest model that fits on each set of cards."""
    text = f"| | {' | '.join(columns.values())} |\n" + "|---" * (len(columns) + 1) + "|\n"
    for way, name in NAMES.items():
        row = []
        for cards in columns:
            fitting = [model for model in MODELS if found[model, cards, way]]
            row += [f"{m} ({cell(found[m, cards, way])})" for m in fitting[-1:]] or ["–"]
        text += f"| {name} | {' | '.join(row)} |\n"
    return text


def longest(model: str, asked: str, sizes: Sequence[int]) -> str:
    """The longest row that fits, of `sizes` of 1,024 tokens. asked: of fit, which prints flags."""

    @functools.cache
    def fastest(size: int) -> tuple[fit.Choice, bool]:
        words = f"{folder(model)} {asked} --seq_len {size << 10} --tokens_a_step {size << 10}"
        ask = fit.parse(words.split())
        config = load_config(folder(model), size << 10)
        found = fit.choices(config, sizes_of(config), ask, pipeline=False)
        return fit.best(list(found), ask)

    fitting = bisect.bisect_left(sizes, True, key=lambda size: not fastest(size)[1])
    if not fitting:
        return "–"
    return f"{sizes[fitting - 1]}k"


def long_rows() -> str:
    text = f"| model | {' | '.join(CARDS.values())} |\n" + "|---" * (len(CARDS) + 1) + "|\n"
    for model in ("0.6B", "4B", "8B", "14B"):
        row = [
            longest(model, f"--cards {n} --card {kind} --host_memory {n * HOST_GB}", POWERS)
            for n, kind in CARDS
        ]
        text += f"| {model} | {' | '.join(row)} |\n"
    return text


def long_rows_of_adapters() -> str:
    """On one card of some memory, in GiB."""
    sizes = {"24 GB": 23.6, "48 GB": 47.4, "80 GB": 79.2}
    text = f"| model | base | {' | '.join(sizes)} |\n" + "|---" * (len(sizes) + 2) + "|\n"
    for model, bits in itertools.product(("8B", "14B"), (16, 4)):
        how = f"--cards 1 --host_memory {HOST_GB} --lora_rank {RANK} --base_bits {bits} --memory"
        row = [longest(model, f"{how} {gib}", STEPS_OF_16K) for gib in sizes.values()]
        text += f"| {model} | {bits} bits | {' | '.join(row)} |\n"
    return text


def pages(of_long_rows: bool) -> dict[Path, str]:
    """Page -> its text with up-to-date tables, of the longest rows or of the largest models."""
    if of_long_rows:
        made = (
            (ROOT / "docs/long.md", LONGEST, long_rows()),
            (ROOT / "docs/adapters.md", LONGEST, long_rows_of_adapters()),
        )
    else:
        found = cells()
        made = (
            (ROOT / "docs/fits.md", MARKED, table(found)),
            (ROOT / "docs/fits.md", MARKED_MORE, short(found, MORE)),
            (ROOT / "README.md", MARKED, short(found, CARDS)),
        )
    plan_for("")  # this machine again
    texts = {}
    for page, marks, new in made:
        text = texts.get(page) or page.read_text("utf-8")
        texts[page] = marks.sub(lambda m, new=new: m[1] + new + m[2], text)
    return texts


if __name__ == "__main__":
    for page, text in (pages(False) | pages(True)).items():
        page.write_text(text, encoding="utf-8")
