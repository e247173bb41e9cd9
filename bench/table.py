"""Markdown tables from the JSON under bench/results/: python -m bench.table [--check]

Between <!-- table: FOLDER --> and <!-- end --> in README.md stands the table of that folder below
bench/results/. Without arguments they are written anew; --check fails where one differs."""

import json
import re
import sys
from pathlib import Path

from bench.run import RESULTS
from llm_demo.args import ROOT

MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.S)
HEAD = (
    "engine", "model", "micro", "GA", "ckpt", "dtype", "step_ms", "comm_ms", "exposed", "waiting",
    "toks/s", "MFU", "peak_mem(G)",
)  # fmt: skip


def rows_of(folder: Path) -> list[dict]:
    """A folder's results, ordered by their settings."""
    rows = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    order = ("model", "engine", "ckpt", "micro", "ga", "dtype", "data", "flags", "env")
    return sorted(rows, key=lambda r: [str(r["row"][k]).rjust(8) for k in order])


def line_of(result: dict) -> list[str]:
    row, summary = result["row"], result.get("summary", {})
    notes = [row["data"]] * (row["data"] != "full") + row["flags"].split() + row["env"].split()
    engine = row["engine"] + (f" ({' '.join(notes)})" if notes else "")
    head = [
        engine,
        Path(row["model"]).name,
        row["micro"],
        row["ga"],
        "FT"[row["ckpt"]],
        row["dtype"],
    ]
    if result["status"] != "ok":
        return [*head, result["status"], *[""] * (len(HEAD) - len(head) - 1)]

    def worst(key):
        return f"{max(summary[key]):.1f}" if key in summary else "n/a"

    mfu = f"{summary['mfu']:.1%}" if summary.get("mfu") else "n/a"
    return [
        *head, f"{summary['median_step_ms']:.1f}", worst("median_comm_ms"),
        worst("median_comm_exposed_ms"), worst("median_comm_wait_ms"),
        f"{summary['median_slots_per_s']:,.0f}", mfu,
        " / ".join(f"{m:.1f}" for m in summary["peak_mem_gb"]),
    ]  # fmt: skip


def table(folder: Path) -> str:
    rows = [HEAD, ["---"] * len(HEAD), *map(line_of, rows_of(folder))]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def render(text: str) -> str:
    """The README's text with every marked table made from the results."""

    def fill(found):
        return found[1] + table(RESULTS / found[2]) + found[4]

    return MARKED.sub(fill, text)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    fresh = render(text)
    if "--check" in sys.argv:
        if fresh != text:
            print(
                "error: README.md and bench/results differ: python -m bench.table", file=sys.stderr
            )
        return int(fresh != text)
    readme.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
