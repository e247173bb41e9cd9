"""Markdown tables from the JSON under bench/results/: python -m bench.table [--check] [FOLDER ...]

Prints those of the folders named (below bench/results/: my-box/seed). Without any it writes anew
what stands in README.md between <!-- table: FOLDER --> and <!-- end -->; --check fails where that
and the results differ."""

import argparse
import json
import re
import sys
from pathlib import Path

from bench.run import RESULTS
from llm_demo.files import ROOT

MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.S)
HEAD = (
    "engine", "model", "micro", "GA", "ckpt", "dtype", "T_eff", "step_ms", "comm_ms", "exposed",
    "waiting", "toks/s", "real/s", "learnt/s", "MFU", "peak_mem(G)",
)  # fmt: skip
OPTIONAL = {"model": 1, "real/s": 0, "learnt/s": 0}  # left out with no more than so many values


def rows_of(folder: Path) -> list[dict]:
    """A folder's results, ordered by their settings."""
    rows = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    order = ("model", "engine", "ckpt", "micro", "ga", "dtype", "data", "flags", "env")
    return sorted(rows, key=lambda r: [str(r["row"][k]).rjust(8) for k in order])


def line_of(result: dict, env: bool = True) -> list[str]:
    """A row of the table: medians, and of step_ms the least and the most. env: name it, too."""
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
        return f"{max(summary[key]):.1f}" if any(summary.get(key, ())) else "n/a"

    def rate(key):
        return f"{summary[key]:,.0f}" if row["data"] != "full" and key in summary else ""

    low, high = summary["spread_step_ms"]
    mfu = f"{summary['mfu']:.1%}" if summary.get("mfu") else "n/a"
    return [
        *head, f"{result['config']['global_batch'] * row['seq_len']:,}",
        f"{summary['median_step_ms']:.1f} ({low:.0f}–{high:.0f})", worst("median_comm_ms"),
        worst("median_comm_exposed_ms"), worst("median_comm_wait_ms"),
        f"{summary['median_slots_per_s']:,.0f}", rate("median_toks_per_s"),
        rate("median_label_toks_per_s"), mfu,
        " / ".join(f"{m:.1f}" for m in summary["peak_mem_gb"]),
    ]  # fmt: skip


def table(folder: Path) -> str:
    """A folder's table in Markdown. Results of bench.checkpoints bring their own columns."""
    named = [json.loads(file.read_text()).get("columns") for file in sorted(folder.glob("*.json"))]
    if all(named):
        rows = [dict(zip(named[0], named[0], strict=True)), dict.fromkeys(named[0], "---"), *named]
        return "".join(f"| {' | '.join(row.values())} |\n" for row in rows)
    results = rows_of(folder)
    env = len({result["row"]["env"] for result in results}) > 1  # what all share is said once
    lines = [[str(cell) for cell in line_of(result, env)] for result in results]
    kept = []
    for name, column in zip(HEAD, zip(*lines, strict=True), strict=True):
        if len(set(column) - {""}) > OPTIONAL.get(name, -1):
            kept.append((name, "---", *column))
    return "".join(f"| {' | '.join(row)} |\n" for row in zip(*kept, strict=True))


def render(text: str) -> str:
    """The README's text with every marked table made from the results."""

    def fill(found):
        return found[1] + table(RESULTS / found[2]) + found[4]

    return MARKED.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check and args.folders:
        parser.error("--check is for README.md, without a FOLDER")
    for name in args.folders:
        if not any((RESULTS / name).glob("*.json")):
            print(f"error: no results in {RESULTS / name}", file=sys.stderr)
            return 2
        print(table(RESULTS / name))
    if args.folders:
        return 0
    readme = ROOT / "README.md"
    text = readme.read_text()
    fresh = render(text)
    if args.check:
        if fresh != text:
            print(
                "error: README.md and bench/results differ: python -m bench.table", file=sys.stderr
            )
        return int(fresh != text)
    readme.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
