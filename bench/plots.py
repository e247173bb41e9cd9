"""Pictures of results: python -m bench.plots NAME ... [--check]

Draws bench/results/NAME.jsonl as bench/plots/NAME.png: throughput, peak memory and how a step's
time is spent, one bar a row. If the rows differ only in script, flags, micro-batch size and
gradient accumulation, throughput is drawn as curves over slots per step, with a ring where one
passes FSDP's. Several files with commas between them become one picture, named after the first: a
panel of bars for each file, as for links of different speed, at the least and at the most slots per
step. Hatched bars are approximate. --check fails if a picture was drawn from other results."""

import argparse
import hashlib
import json
import re
import subprocess
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench import store
from bench.presets import ONE_OF
from bench.table import APPROXIMATE, in_order
from llm_demo.core.errors import UserError
from llm_demo.flags.parsing import PlainParser
from llm_demo.machine.files import ROOT
from llm_demo.machine.process import command
from llm_demo.report import COLORS, PARTS_OF_A_STEP

PLOTS = ROOT / "bench/plots"
ENGINES = ("fsdp", "pp", "fsdp_pp", "zero", "torchtitan", "trl")
COLOR_OF = dict(zip(ENGINES, COLORS[: len(ENGINES)], strict=True))
STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "*-.")  # of the lines, in turn
HATCH = "///"  # of bars whose gradients are approximate
LINKS = {
    "NCCL_P2P_DISABLE=1": "through host memory",
    "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1": "through sockets",
}


def rows_of(name: str) -> list[dict]:
    """Read the successful rows, those of a group one after another, by slots per step."""
    results = store.read(name)
    if any("row" not in r for r in results) or len({*map(store.key_of, results)}) < len(results):
        raise UserError(f"{name} has a table of its own and no picture: python -m bench.table")
    rows = in_order([r for r in results if r["status"] == "ok"])
    if not rows:
        raise UserError(f"{name}: no results to draw")
    groups = list(dict.fromkeys(map(group_of, rows)))
    return sorted(rows, key=lambda r: (groups.index(group_of(r)), slots(r), r["row"]["engine"]))


def slots(result: dict) -> int:
    """Return T_eff, the slots of an optimizer step."""
    return result["config"]["global_batch"] * result["row"]["seq_len"]


def group_of(result: dict) -> tuple[str, ...]:
    """Say in words what must be equal for two rows to be points of one picture's curves."""
    row, env = result["row"], result["env"]
    ranks = 1 if ONE_OF in row["flags"] else env["world_size"]
    link = row["env"] or re.sub(r"^NV(\d+)$", r"over NVLink (\1 links)", env["link"] or "")
    return (
        Path(row["model"]).name, row["dtype"], "no " * (not row["ckpt"]) + "checkpointing",
        f"{Path(row['data']).stem} rows of {row['seq_len']:,}",
        f"{ranks} x {env['device'].split(' (')[0]}", LINKS.get(link, link) if ranks > 1 else "",
    )  # fmt: skip


def in_common(rows: list[dict]) -> list[bool]:
    """Return for each word of the groups whether all rows share it."""
    return [len(set(words)) == 1 for words in zip(*map(group_of, rows), strict=True)]


def words(result: dict, chosen: list[bool]) -> str:
    """Join a row's chosen words."""
    picked = [word for word, is_it in zip(group_of(result), chosen, strict=True) if is_it]
    return ", ".join(filter(None, picked))


def flags_of(result: dict) -> list[str]:
    return re.findall(r"--\S+(?: (?!--)\S+)*", result["row"]["flags"])


def way(result: dict, known: set[str] = frozenset()) -> str:
    """Name the script and its flags, without those that are known already."""
    flags = " ".join(flag for flag in flags_of(result) if flag not in known)
    flags = flags.replace("--replicas all", "replicas").replace("--schedule ", "")
    flags = flags.replace("--fsdp", "sharded")  # one process through FSDP
    return f"{result['row']['engine']} {flags.replace('--', '')}".strip()


def lines_of(rows: list[dict]) -> dict[str, list[dict]]:
    """Return the curves: the rows of each script, flags and micro-batch size, by slots per step.

    They are {} if rows differ in more, and so lie on different curves, or if no curve has two
    points."""
    lines, sizes = {}, {r["row"]["micro"] for r in rows}
    for row in sorted(rows, key=slots):
        micro = f", micro {row['row']['micro']}" if len(sizes) > 1 else ""
        lines.setdefault(f"{way(row)}{micro}", []).append(row)
    alone = all(len({*map(slots, line)}) == 1 for line in lines.values())
    return {} if alone or not all(in_common(rows)) else lines


def points(line: list[dict]) -> list[tuple[float, float]]:
    """Return (thousand slots of a step, thousand slots per second)."""
    return [(slots(r) / 1e3, r["summary"]["median_slots_per_s"] / 1e3) for r in line]


def crossover(a: list[tuple], b: list[tuple]) -> tuple | None:
    """Return the first (x, y) from which line b stays above line a, or None if it ends below.

    A lead of less than 1 % is a tie: the steps of a run differ by more. Lines are points (x, y) of
    growing x, joined by straight segments, and compared where both are. If b is above a all along,
    that is the first such point."""

    def at(line, x):
        return float(np.interp(x, *zip(*line, strict=True)))

    low, high = max(a[0][0], b[0][0]), min(a[-1][0], b[-1][0])
    xs = [x for x in sorted({x for x, _ in [*a, *b]}) if low <= x <= high]
    lead = [at(b, x) - at(a, x) for x in xs]
    behind = [i for i, ahead in enumerate(lead) if ahead <= at(a, xs[i]) / 100]
    if not xs or len(xs) - 1 in behind:
        return None
    i = behind[-1] if behind else 0
    x = float(np.interp(0, lead[i : i + 2], xs[i : i + 2])) if behind else xs[0]
    return x, at(b, x)


def overtakes(lines: dict[str, list[dict]]) -> dict[str, tuple]:
    """Return {name: the point from which it stays ahead of FSDP with its micro-batch size}."""
    found = {}
    for name, line in lines.items():
        base = lines.get(re.sub("^[^,]*", "fsdp", name), line)
        if base is not line and (point := crossover(points(base), points(line))):
            found[name] = point
    return found


def curves(axes, lines: dict[str, list[dict]], top: float) -> None:
    """Draw throughput against slots per step, each line with its name at its end. top: the highest
    value of the y axis."""
    axes.set(xlabel="thousand slots per step", ylim=(0, top))
    steps = sorted({x for line in lines.values() for x, _ in points(line)})
    axes.set_xticks(steps, [f"{x:.3g}" for x in steps])
    ends, styles = [], dict.fromkeys(COLOR_OF, 0)
    for name, line in lines.items():
        engine, at = line[0]["row"]["engine"], points(line)
        color, style = COLOR_OF[engine], STYLES[styles[engine] % len(STYLES)]
        styles[engine] += 1
        axes.plot(*zip(*at, strict=True), style, color=color, markersize=5)
        if len(at) > 1:
            ends.append((at[-1], name, color))
        else:
            axes.annotate(name, at[0], (8, -4), textcoords="offset points", color=color)
    ends.sort(key=lambda end: end[0][1])
    ys = up = down = np.array([y for (_, y), *_ in ends])
    gap = np.arange(len(ys)) * top / 18  # of a line of text
    up = np.maximum.accumulate(ys - gap) + gap  # names must not overlap: half way between
    down = np.minimum.accumulate((ys - gap)[::-1])[::-1] + gap  # moving them up and down
    ys = (up + down) / 2
    for (end, name, color), y in zip(ends, ys - max([0, *(ys - top)]), strict=True):
        axes.annotate(
            name, end, (1.06, y), textcoords=("axes fraction", "data"), color=color, va="center",
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


def bars(axes, lines: list[tuple[str, dict | None]], title: str, value) -> None:
    """Draw a bar for each row of (label, row), with its value; a label without a row is a heading.

    value: its value, from a summary."""
    at = [i for i, (_, row) in enumerate(lines) if row]
    rows = [row for _, row in lines if row]
    values = [value(row["summary"]) for row in rows]
    drawn = axes.barh(at, values, 0.72, color=[COLOR_OF[r["row"]["engine"]] for r in rows])
    for bar, row in zip(drawn, rows, strict=True):
        if APPROXIMATE.search(row["row"]["flags"]):
            bar.set(hatch=HATCH, edgecolor="white")
    axes.bar_label(drawn, fmt="%.3g", padding=3)
    axes.set(title=title, xlim=(0, max(values) * 1.15), xticks=[])


def split(axes, lines: list[tuple[str, dict | None]]) -> None:
    """Draw how a step's time is spent, for the rows whose communication was timed."""
    found = {i: shares(row["summary"]) for i, (_, row) in enumerate(lines) if row}
    timed = {i: parts for i, parts in found.items() if parts}
    left = np.zeros(len(timed))
    for part, (_, color) in zip(SHARES, PARTS_OF_A_STEP.values(), strict=True):
        widths = [parts[part] for parts in timed.values()]
        axes.barh([*timed], widths, 0.72, left, color=color, label=part)
        left += widths
    for i in found.keys() - timed.keys():
        axes.text(0.01, i, "not timed", va="center", color="0.4")
    axes.set(title="step of the rank that waits most", xlim=(0, 1))
    axes.figure.legend(loc="outside lower right", ncols=3)


def draw(name: str, file: Path) -> None:
    rows = rows_of(name)
    lines, common, heading = lines_of(rows), in_common(rows), ""
    known = set.intersection(*(set(flags_of(r)) for r in rows))
    labelled = []
    for row in rows:
        if heading != (heading := words(row, [not shared for shared in common])):
            labelled.append((heading, None))
        steps = f"{row['row']['micro']} x {row['row']['ga']}, {slots(row) / 1e3:.3g}k"
        labelled.append((f"{way(row, known)}, {steps}", row))
    heights = [5.2] * bool(lines) + [1.4 + 0.24 * len(labelled)]
    figure = Figure(figsize=(16, sum(heights) + 0.8), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if lines:
        draw_curves(parts[0].subplots(), lines)
    below = parts[-1].subplots(1, 3)
    bars(below[0], labelled, "thousand slots/s", in_thousands)
    bars(below[1], labelled, "peak GiB of the fullest rank", lambda s: max(store.peaks_of(s)))
    split(below[2], labelled)
    for axes in below:
        axes.set_yticks(range(len(labelled)), [])
        axes.set_ylim(len(labelled) - 0.4, -0.6)
    below[0].set_yticklabels([label for label, _ in labelled])
    for tick, (_, row) in zip(below[0].get_yticklabels(), labelled, strict=True):
        tick.set_fontweight("normal" if row else "bold")
    failed = len(store.read(name)) - len(rows)
    notes = [
        words(rows[0], common), " ".join(sorted(known)),
        f"not drawn: {failed} failed" * bool(failed),
        "each bar: script and flags, micro-batch size x accumulation steps, slots per step",
    ]  # fmt: skip
    figure.suptitle("\n".join(textwrap.fill(note, 150) for note in notes if note))
    save(figure, file, name)


def draw_curves(axes, lines: dict[str, list[dict]]) -> None:
    """Draw a file's curves, and a ring where one begins to stay ahead of FSDP."""
    curves(axes, lines, 1.1 * max(y for line in lines.values() for _, y in points(line)))
    ahead = overtakes(lines)
    for point in ahead.values():
        axes.plot(*point, "o", markersize=13, markerfacecolor="none", markeredgecolor="black")
    said = ", ".join(f"{name} from {x:.3g}k" for name, (x, _) in ahead.items())
    axes.set_title(textwrap.fill(f"stays ahead of fsdp (ring): {said}" if said else "", 120))
    axes.set_ylabel("thousand slots/s")


def draw_links(names: list[str], file: Path) -> None:
    """Draw the throughput of the ways that all files have: a column of panels for each file, a row
    for the least and one for the most slots per step that all files have."""
    files = list(map(rows_of, names))
    steps = set.intersection(*({*map(slots, rows)} for rows in files))
    if not steps:
        raise UserError(f"{', '.join(names)}: no number of slots per step is in all of them")
    shared = in_common([rows[0] for rows in files])
    titles = [words(rows[0], [not same for same in shared]) for rows in files]
    panels = {size: panels_of(names, files, size) for size in sorted({min(steps), max(steps)})}
    heights = [len(found[0]) + 2 for found in panels.values()]
    figure = Figure(figsize=(9.5, 1.1 + 0.25 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), len(files), squeeze=False, height_ratios=heights)
    rates = [
        in_thousands(r["summary"]) for found in panels.values() for p in found for r in p.values()
    ]
    for row, (size, found) in zip(grid, panels.items(), strict=True):
        for axes, title, panel in zip(row, titles, found, strict=True):
            bars(axes, [*panel.items()], title, in_thousands)
            axes.set(xlim=(0, 1.2 * max(rates)), ylim=(len(panel) - 0.4, -0.6), yticks=[])
        row[0].set_yticks(range(len(found[0])), [*found[0]])
        row[0].set_title(
            f"{size:,} slots per step", loc="left", x=-0.82, fontweight="bold", fontsize=11
        )
    figure.suptitle(f"thousand slots/s: {words(files[0][0], shared)}", fontsize=11)
    explain(figure, [row for rows in files for row in rows])
    save(figure, file, *names)


def panels_of(names: list[str], files: list[list[dict]], size: int) -> list[dict[str, dict]]:
    """{way: row} of each file, of the ways that all have at this number of slots per step, the
    fastest in the first file first. Raises UserError if bars would not be comparable."""
    panels = []
    for name, rows in zip(names, files, strict=True):
        rows = [row for row in rows if slots(row) == size]
        panels.append({way(row): row for row in rows})
        if len(panels[-1]) < len(rows) or not all(in_common(rows)):
            raise UserError(f"{name} has bars that differ in more than script and flags")
    common = in_all(panels)
    if not common:
        raise UserError(f"{', '.join(names)}: no script with the same flags is in all of them")
    common.sort(key=lambda way: -panels[0][way]["summary"]["median_slots_per_s"])
    return [{way: panel[way] for way in common} for panel in panels]


def explain(figure: Figure, rows: list[dict]) -> None:
    """Draw a legend of colors, and in the corner what was measured."""
    engines = sorted({row["row"]["engine"] for row in rows}, key=ENGINES.index)
    marks = [Patch(color=COLOR_OF[engine], label=engine) for engine in engines]
    marks.append(Patch(facecolor="0.8", edgecolor="0.3", hatch=HATCH, label="approximate"))
    figure.legend(handles=marks, loc="outside lower left", ncols=len(marks), frameon=False)
    commits = sorted({row["env"]["revision"][:7] for row in rows})
    text = f"commit {', '.join(map(dated, commits))}, PyTorch {rows[0]['env']['versions']['torch']}"
    figure.text(0.995, 0.01, text, ha="right", fontsize=9, color="0.4")


def dated(commit: str) -> str:
    """A commit with its date, if the history is here."""
    command = ["git", "show", "-s", "--format=%cs", commit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return f"{commit} of {done.stdout.strip()}" if done.returncode == 0 else commit


def in_thousands(summary: dict) -> float:
    return summary["median_slots_per_s"] / 1e3


def save(figure: Figure, file: Path, *names: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=90, metadata={"Description": digest(*names)})


def in_all(panels: list[dict]) -> list[str]:
    """Return the keys that all panels have, in the order of the first."""
    return [name for name in panels[0] if all(name in panel for panel in panels)]


SHARES = "compute and idle", "exposed transfer", "waiting"


def shares(summary: dict) -> dict[str, float]:
    """Split the step of the rank that waits most; the shares add up to 1. {} if communication was
    not timed."""
    comm = summary.get("median_comm_ms")
    if not comm or (len(comm) > 1 and not any(comm)):
        return {}
    exposed, wait = summary["median_comm_exposed_ms"], summary["median_comm_wait_ms"]
    rank = max(range(len(wait)), key=lambda r: wait[r])
    # part of the waiting may be hidden behind compute
    exposed, wait = exposed[rank], min(wait[rank], exposed[rank])
    step = summary["median_step_ms"]
    parts = step - exposed, exposed - wait, wait
    return {name: ms / step for name, ms in zip(SHARES, parts, strict=True)}


def digest(*names: str) -> str:
    """Return a hash of the results drawn; each picture contains its own."""
    shown = [
        (way(r), slots(r), shares(r["summary"]), r["summary"]["median_slots_per_s"],
         store.peaks_of(r["summary"]), group_of(r))
        for name in names for r in rows_of(name)
    ]  # fmt: skip
    return f"results {hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]}"


def main() -> int:
    style = argparse.RawTextHelpFormatter
    parser = PlainParser(prog="python -m bench.plots", description=__doc__, formatter_class=style)
    parser.add_argument("pictures", nargs="+", metavar="NAME", help="results, such as my-box/teff")
    parser.add_argument("--check", action="store_true", help="draw nothing, only compare")
    args = parser.parse_args()
    for picture in args.pictures:
        names = picture.split(",")
        file, mark = PLOTS / f"{names[0]}.png", digest(*names)
        if not args.check:
            draw(*names, file) if len(names) == 1 else draw_links(names, file)
            print(file)
        elif not file.exists() or mark.encode() not in file.read_bytes():
            raise UserError(f"{file} is out of date: run python -m bench.plots {picture}")
    return 0


if __name__ == "__main__":
    command(main)
