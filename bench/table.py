"""Markdown tables of bench/results: python -m bench.table [--check] [NAME ...]

With names it prints the tables of bench/results/NAME.jsonl (my-box/seed). Without, it updates the
tables between <!-- table: NAME --> and <!-- end --> in README.md and docs/*.md; --check only fails
if one of them differs from the results. NAME#toks/s and NAME#peak_mem(G) compare each model's rows
with its first; NAME#fsdp has one engine's rows in eight columns; NAME#ways is what --measure
printed, the fastest first."""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

from bench import store
from bench.presets import ONE_OF
from llm_demo.core.errors import UserError
from llm_demo.flags.parsing import PlainParser
from llm_demo.machine.files import ROOT
from llm_demo.machine.process import command

MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.S)
HEAD = (
    "engine", "model", "micro", "GA", "ckpt", "dtype", "T_eff", "step_ms", "comm_ms", "exposed",
    "waiting", "toks/s", "real/s", "learnt/s", "MFU", "peak_mem(G)", "allocated(G)", "host_mem(G)",
)  # fmt: skip
QUALITY = ("rank", "bytes sent", "held-out loss at the end", "held-out rows answered exactly")
WAYS = (
    "way",
    "micro_bsz",
    "GA",
    "ckpt",
    "step_ms",
    "toks/s",
    "ratio",
    "peak_mem(G)",
    "comm_ms",
    "dtype",
)
SHORT = "micro", "GA", "ckpt", "dtype", "step_ms", "comm_ms", "toks/s", "peak_mem(G)"
OPTIONAL = {
    "model": 1,
    "real/s": 0,
    "learnt/s": 0,
    "allocated(G)": 0,
    "host_mem(G)": 0,
}  # columns left out if they have no more values than this

COMPARED = {
    "toks/s": ("{:,.0f}", lambda summary: summary["median_slots_per_s"]),
    "peak_mem(G)": ("{:.1f}", lambda summary: max(store.peaks_of(summary))),
}
APPROXIMATE = re.compile("--psgd_rank|--fp8")  # gradients are not those of a plain loop
RETRIED = "*"  # marks the memory of a row whose allocator ran dry after step 3


def in_order(results: list[dict]) -> list[dict]:
    """Sort results by their settings."""
    order = ("model", "engine", "ckpt", "micro", "ga", "dtype", "data", "flags", "env")
    return sorted(results, key=lambda r: [str(r["row"][k]).rjust(8) for k in order])


def line_of(result: dict, env: bool = True, host: bool = False) -> list[str]:
    """Format a row of the table: medians, and for step_ms also the minimum and the maximum.

    env: whether to name the row's environment variables; host: whether to give the host memory."""
    row, summary = result["row"], result.get("summary", {})
    notes = [row["data"]] * (row["data"] != "full") + row["flags"].split()
    notes += row["env"].split() if env else []
    engine = row["engine"] + (f" ({' '.join(notes)})" if notes else "")
    head = [
        engine, Path(row["model"]).name, row["micro"], row["ga"], "FT"[row["ckpt"]], row["dtype"],
    ]  # fmt: skip
    if result["status"] != "ok":
        return [*head, "", result["status"], *[""] * (len(HEAD) - len(head) - 2)]

    def worst(key):
        return f"{max(summary[key]):.1f}" if any(summary.get(key) or ()) else "n/a"

    def rate(key):
        return f"{summary[key]:,.0f}" if row["data"] != "full" and key in summary else ""

    ranks = 1 if ONE_OF in notes else None  # the other ranks are this one again
    peaks, allocated = (
        " / ".join(f"{m:.1f}" for m in (memory or ())[:ranks])
        for memory in (
            store.peaks_of(summary),
            summary.get("reserved_gb") and summary["peak_mem_gb"],
        )
    )
    low, high = summary["spread_step_ms"]
    mfu = f"{summary['mfu']:.1%}" if summary.get("mfu") else "n/a"
    return [
        *head, f"{result['config']['global_batch'] * row['seq_len']:,}",
        f"{summary['median_step_ms']:.1f} ({low:.0f}–{high:.0f})", worst("median_comm_ms"),
        worst("median_comm_exposed_ms"), worst("median_comm_wait_ms"),
        f"{summary['median_slots_per_s']:,.0f}", rate("median_toks_per_s"),
        rate("median_label_toks_per_s"), mfu,
        peaks + RETRIED * bool(summary.get("late_alloc_retries")), allocated,
        f"{sum(summary.get('peak_host_gb', ())):.1f}" if host else "",
    ]  # fmt: skip


def rank_of(result: dict) -> int:
    return int(re.search(r"--psgd_rank (\d+)", result["row"]["flags"])[1])


def quality_of(result: dict) -> list[str]:
    """Format a row of the table of PowerSGD's ranks."""
    head = [str(rank_of(result) or "exact"), f"{result.get('sent', 1):.1%}"]
    if result["status"] != "ok":
        return [head[0], "", result["status"], ""]
    at_the_end = [list(result["summary"][key].values())[-1] for key in ("eval_loss", "eval_exact")]
    return [*head, f"{at_the_end[0]:.3f}", f"{at_the_end[1]:.1%}"]


def way_of(engine: str, flags: str) -> str:
    """A way to train in words: the engine and its flags, those of data apart."""
    words = re.sub(r"--tokenizer_name_or_path \S+", "", flags).replace("--", "")
    way = " ".join([engine, *words.split()])
    return f"{way} (approximate)" if APPROXIMATE.search(flags) else way


def ways(results: list[dict]) -> str:
    """Return the table of --measure: the fastest first, then rows without a time. step_ms is the
    median, with the quartiles; ratio is its share of the fastest."""
    done = [result for result in results if result["status"] == "ok"]
    done.sort(key=lambda result: result["summary"]["median_step_ms"])
    lines = []
    for result in done:
        row, summary = result["row"], result["summary"]
        step_ms = summary["median_step_ms"]
        low, high = summary["quartiles_step_ms"]
        columns = summary["row"] | {
            "way": way_of(row["engine"], row["flags"]),
            "step_ms": f"{step_ms:.1f} ({low:.1f}–{high:.1f})",
            "toks/s": f"{summary['median_slots_per_s']:,.0f}",
            "ratio": f"{step_ms / done[0]['summary']['median_step_ms']:.2f}",
        }
        if summary["late_alloc_retries"]:
            columns["peak_mem(G)"] += f" {RETRIED}"
        lines.append([str(columns[name]) for name in WAYS])
    for result in results:
        if result["status"] != "ok":
            row = result["row"]
            batch = [str(row["micro"]), str(row["ga"]), "FT"[row["ckpt"]]]
            lines.append(
                [
                    way_of(row["engine"], row["flags"]),
                    *batch,
                    result["status"],
                    *[""] * 4,
                    row["dtype"],
                ]
            )
    lines = [WAYS, ["---"] * len(WAYS), *lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return markdown(
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    )


def table(name: str) -> str:
    """Return the table of a file of results. Those of bench.checkpoints have their own columns."""
    name, _, column = name.partition("#")
    results = store.read(name)
    if not results:
        raise UserError(f"no results in {store.file_of(name)}")
    if "columns" in results[0]:
        head = list(results[0]["columns"])
        return markdown([head, ["---"] * len(head), *(r["columns"].values() for r in results)])
    if all("--psgd_rank" in result["row"]["flags"] for result in results):
        lines = map(quality_of, sorted(results, key=rank_of))
        return markdown([QUALITY, ["---"] * len(QUALITY), *lines])
    if column == "ways":
        return ways(results)
    results = in_order(results)
    if column in COMPARED:
        return compared(results, column)
    if column:
        return short([result for result in results if result["row"]["engine"] == column])
    env = len({result["row"]["env"] for result in results}) > 1  # the text names a common one
    host = any(re.search("offload|on_host", result["row"]["flags"]) for result in results)
    lines = [[str(cell) for cell in line_of(result, env, host)] for result in results]
    columns = []
    for title, column in zip(HEAD, zip(*lines, strict=True), strict=True):
        if len(set(column) - {""}) > OPTIONAL.get(title, -1):
            columns.append((title, "---", *column))
    return markdown(zip(*columns, strict=True))


def short(results: list[dict]) -> str:
    """Return a table of one engine's rows, in few columns; a time is the median."""
    lines = [dict(zip(HEAD, map(str, line_of(result)), strict=True)) for result in results]
    rows = [[line[title].split(" (")[0] for title in SHORT] for line in lines]
    return markdown([["micro_bsz", *SHORT[1:]], ["---"] * len(SHORT), *rows])


def compared(results: list[dict], column: str) -> str:
    """Return a table of one column of the results: for each model the number of its first row, then
    the others' divided by it."""
    text, number = COMPARED[column]
    models = {}
    for result in results:
        way = [result["row"]["engine"], *result["row"]["flags"].split()][-1]
        found = models.setdefault(Path(result["row"]["model"]).name, {})
        if result["status"] == "ok":
            found[way] = number(result["summary"])
    first, *others = dict.fromkeys(way for found in models.values() for way in found)
    lines = [["model", f"{first}: {column}", *others], ["---"] * (2 + len(others))]
    for model, found in models.items():
        shares = [f"{found[way] / found[first]:.2f} x" if way in found else "" for way in others]
        lines.append([model, text.format(found[first]), *shares])
    return markdown(lines)


def markdown(lines) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def notes_of(name: str) -> str:
    """Return lines that name the commits of a table's rows, "" if they are not recorded, and what
    its memory is."""
    results = store.read(name.partition("#")[0])
    ran = [r for r in results if r.get("status", "ok") == "ok"]  # others record no commit
    found = Counter(str(r.get("env", {}).get("revision") or "")[:7] for r in ran)
    rows = [f"{commit} ({n})" if len(found) > 1 else commit for commit, n in found.items()]
    text = f"\nMeasured at {', '.join(rows)}." if all(found) else ""
    summaries = [r["summary"] for r in results if "summary" in r]
    if all("--psgd_rank" in r["row"]["flags"] for r in results if "row" in r):
        summaries = []  # that table has no memory
    older = [s for s in summaries if not s.get("reserved_gb")]
    if text and older:
        rows = "" if len(older) == len(summaries) else " of rows without `allocated`"
        text += f" `peak_mem`{rows} is what was allocated; a card needs more."
    if any(s.get("late_alloc_retries") for s in summaries):
        text += f" {RETRIED}: memory ran out after step 3, and the allocator freed its cache."
    return text and f"{text}\n"


def render(text: str, notes: bool) -> str:
    """Return a page's text with every marked table made from the results. notes: below each, name
    the commits and how many rows were measured at each."""

    def made(match: re.Match) -> str:
        return match[1] + table(match[2]) + notes_of(match[2]) * notes + match[4]

    return MARKED.sub(made, text)


def rendered(page: Path) -> str:
    """Return the text that a page should have. The README's tables are in docs too, with notes."""
    return render(page.read_text("utf-8"), notes=page.parent.name == "docs")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> int:
    style = argparse.RawTextHelpFormatter
    parser = PlainParser(prog="python -m bench.table", description=__doc__, formatter_class=style)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check and args.names:
        parser.error("--check takes no NAME")
    for name in args.names:
        print(table(name))
    stale = [] if args.names else [p for p in pages() if p.read_text("utf-8") != rendered(p)]
    for page in stale:
        if args.check:
            message = f"{page.relative_to(ROOT)} is out of date: run python -m bench.table"
            print(f"error: {message}", file=sys.stderr)
        else:
            page.write_text(rendered(page), encoding="utf-8")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    command(main)
