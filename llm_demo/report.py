"""A page that shows runs side by side: python -m llm_demo.report RUN [RUN ...] --out FILE.html

RUN is a run's folder, finished or not. The page is one file with its charts inside: it loads
nothing, runs no script, and can be mailed. docs/report.md explains each chart."""

import argparse
import contextlib
import html
import io
import json
import math
import re
import statistics
import string
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

from llm_demo.errors import UserError

WARMUP = 2  # logged steps left out of medians, as in metrics.py (which would import torch)
POINTS = 1000  # of a line, at most; two per point where the line is noisy, so no spike is lost
SMOOTHED = 100  # logged steps from which a line gets a running median
BARS = 16  # ranks of one run in a bar chart, at most
MARKER = "<!-- llm_demo report -->"  # how a page is recognized as one that may be replaced

# name: (on a light page, on a dark one). The runs' colours are told apart by colour-blind readers.
COLORS = {
    "page": ("#f4f5f7", "#14171c"),
    "panel": ("#fdfdfe", "#1d2229"),
    "ink": ("#1c2530", "#e4e8ee"),
    "muted": ("#5a6675", "#9aa6b5"),
    "line": ("#dce0e6", "#363e49"),
    "run0": ("#0072b2", "#5cb8f0"),
    "run1": ("#d25500", "#ff9b52"),
    "run2": ("#00805c", "#2ecc9f"),
    "run3": ("#a6478a", "#e89acb"),
    "run4": ("#8a6a00", "#ecc94b"),
    "run5": ("#5b4fc4", "#aaa1ff"),
    "compute": ("#93a1b1", "#64748a"),
    "transfer": ("#3f77c8", "#74a8f2"),
    "waiting": ("#e0a023", "#f3bf55"),
    "good": ("#1b7a43", "#58cf8a"),
    "warn": ("#9a6200", "#f0b345"),
}
RUN_COLORS = [name for name in COLORS if name.startswith("run")]
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)))  # once the colours are used up
PARTS = {  # of a step, in the order of the bars
    "compute": "compute and idle",
    "transfer": "exposed transfer",
    "waiting": "exposed waiting",
}


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    check_out(args.out)
    try:
        runs = read_runs(args.runs)
    except OSError as e:
        raise UserError(f"{e.filename}: {e.strerror}") from e
    text = page(runs)
    part = args.out.with_name(f"{args.out.name}.part")
    try:
        part.write_bytes(text.encode("utf-8", "replace"))
        part.replace(args.out)  # a browser never sees half a page
    except OSError as e:
        with contextlib.suppress(OSError):
            part.unlink()
        raise UserError(f"--out {args.out}: {e.strerror or e}") from e
    print(f"report: {args.out}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llm_demo.report", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE.html",
        help="the page; an earlier report is replaced, any other file is not "
        "(default: report.html in the current folder)",
    )  # fmt: skip
    return parser


def check_out(out: Path) -> None:
    """Raise UserError unless a page may be written to `out`."""
    try:
        if out.is_dir():
            raise UserError(f"--out {out} is a folder: name a file in it")
        if not out.absolute().parent.is_dir():
            raise UserError(f"--out {out}: there is no folder {out.parent}: make it first")
        if out.exists():
            if not out.is_file():
                raise UserError(f"--out {out} is not a file: choose another name")
            with open(out, "rb") as file:
                start = file.read(200)
            if start and MARKER.encode() not in start:
                raise UserError(f"--out {out} exists and is not a report: choose another name")
    except OSError as e:
        raise UserError(f"--out {out}: {e.strerror or e}") from e


# ---- reading -------------------------------------------------------------------------------------


def read_runs(folders: list[Path]) -> list[SimpleNamespace]:
    """All runs, each with a letter (A, B, ...), a colour and the shortest name that is its own."""
    runs = [read_run(folder) for folder in folders]
    paths = [folder.resolve() for folder in folders]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise UserError(f"{folders[i]} is given twice")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    for i, (run, path) in enumerate(zip(runs, paths, strict=True)):
        run.name = "/".join(path.parts[-depth:])
        run.letter = string.ascii_uppercase[i % 26] + str(i // 26 or "")
        run.color = RUN_COLORS[i % len(RUN_COLORS)]
        run.dash = DASHES[i // len(RUN_COLORS) % len(DASHES)]
        run.below = 2.2 * min(2, len(runs) - 1 - i)  # wider, to show below a line that hides it
    return runs


def read_run(folder: Path) -> SimpleNamespace:
    """What a run's folder says: config, env and summary (dicts, empty where a file is missing),
    steps (records of optimizer steps, in order), evals [(step, loss)], notes (what could not be
    read), written (when a line was last logged, or None), parts (see step_parts).

    Raises UserError if the folder holds no run, OSError if it can't be read. Lines that were cut
    short are left out and counted."""
    if not folder.is_dir():
        what = "is a file: name the run's folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}")
    file = folder / "metrics.jsonl"
    if not (file.exists() or (folder / "config.json").exists()):
        raise UserError(
            f"{folder} is not a run's folder: it has neither metrics.jsonl nor config.json"
        )
    run = SimpleNamespace(folder=folder, notes=[], written=None, steps=[], evals=[])
    run.config, run.env, run.summary = (
        read_json(folder / f"{name}.json", run.notes) for name in ("config", "env", "summary")
    )
    text = ""
    if file.exists():
        text = file.read_text(encoding="utf-8", errors="replace")
        run.written = file.stat().st_mtime
    steps, evals, broken = {}, {}, 0
    for line in text.split("\n"):
        record = parse(line)
        step = record.get("step") if isinstance(record, dict) else None
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
            broken += bool(line.strip())
        elif "train/loss" in record:
            steps[step] = record
        elif "eval/loss" in record:
            evals[step] = number(record["eval/loss"])
    if broken:
        lines = "1 unreadable line" if broken == 1 else f"{broken} unreadable lines"
        run.notes.append(f"{lines} of metrics.jsonl left out")
    run.steps = [steps[step] for step in sorted(steps)]
    run.evals = sorted(evals.items())
    run.parts = step_parts(run)
    return run


def read_json(file: Path, notes: list[str]) -> dict:
    if not file.exists():
        return {}
    try:
        found = parse(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = None
    if not isinstance(found, dict):
        notes.append(f"{file.name} could not be read")
        return {}
    return found


def parse(text: str):
    """JSON, or None where it is cut short or broken."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def number(value) -> float:
    """A float; NaN for whatever is no number, a missing or infinite one included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


def column(run, key: str) -> list[float]:
    """One number a logged step, NaN where there is none."""
    return [number(record.get(key)) for record in run.steps]


def steady(run) -> list[dict]:
    """The logged steps that medians are taken of."""
    return run.steps[WARMUP:] or run.steps


def median(run, key: str) -> float:
    return middle(number(record.get(key)) for record in steady(run))


def middle(values) -> float:
    """Median of the finite ones; NaN if there are none."""
    return statistics.median(finite(values) or [math.nan])


def finite(values) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def of_ranks(run, key: str) -> list[float] | None:
    """Medians, one a rank. None where this was not recorded. A run that was resumed with another
    number of ranks counts from there."""
    lists = [record[key] for record in steady(run) if isinstance(record.get(key), list)]
    ranks = [[number(v) for v in found] for found in lists if len(found) == len(lists[-1])]
    return [middle(values) for values in zip(*ranks, strict=True)] or None


def peak_memory(run) -> list[float]:
    """Peak of each rank so far, in 2^30 bytes; empty where there is none."""
    lists = [record.get("perf/peak_mem_gb") for record in run.steps]
    lists = [found for found in lists if isinstance(found, list)]
    return [number(v) for v in lists[-1]] if lists else []


def step_parts(run) -> list[dict[str, float]] | None:
    """Where a step's time went, a dict a rank, medians in ms: the PARTS, which add up to `step`;
    `comm` and `wait`, all of it, behind compute or not. None where communication was not timed.

    How much of the waiting was hidden behind compute is not recorded: waiting is taken to be
    exposed as far as it fits. Where all communication is exposed, as in a pipeline or on a CPU,
    that is exact; else `waiting` is at most this and `transfer` at least."""
    keys = ("perf/comm_ms", "perf/comm_exposed_ms", "perf/comm_wait_ms")
    comm, exposed, wait = (of_ranks(run, key) for key in keys)
    step = median(run, "perf/step_ms")
    if not (comm and exposed and wait) or run.config.get("comm_timer") is False:
        return None
    if not math.isfinite(math.fsum([step, *comm, *exposed, *wait])):
        return None
    ranks = []
    for c, e, w in zip(comm, exposed, wait, strict=True):
        e = min(e, step)
        waiting = min(w, e)
        parts = {"compute": step - e, "transfer": e - waiting, "waiting": waiting}
        ranks.append({**parts, "step": step, "comm": c, "wait": w})
    return ranks


def skipped(run) -> list[int]:
    return [record["step"] for record in run.steps if record.get("train/skipped") is True]


def best(run) -> tuple[float, int] | None:
    """The lowest held-out loss and its step."""
    found = [(loss, step) for step, loss in run.evals if math.isfinite(loss)]
    return min(found, default=None)


def status(run) -> tuple[str, str]:
    """(finished, unfinished or empty; the same for a reader)."""
    if not run.steps:
        return "empty", "no step logged yet"
    last, wanted = run.steps[-1]["step"], run.config.get("max_steps")
    wanted = wanted if isinstance(wanted, int) and wanted > 0 else None
    of = f" of {wanted:,}" if wanted else ""
    ended = number(run.summary.get("steps"))
    if ended >= last and not (wanted and ended < wanted):
        return "finished", f"finished, {last:,} steps"
    return "unfinished", f"running or interrupted at step {last:,}{of}"


def seconds(run) -> list[float]:
    """Seconds of training up to each logged step, evaluations and saves left out."""
    every = run.config.get("log_every")
    first = every if isinstance(every, int) and every > 0 else 1
    found, total, before = [], 0.0, None
    for record in run.steps:
        step = record["step"]
        count = min(step, first) if before is None else step - before
        ms = number(record.get("perf/step_ms"))
        total, before = total + (count * ms / 1e3 if math.isfinite(ms) else 0.0), step
        found.append(total)
    return found


def at_steps(run, steps: list[int], values: list[float]) -> list[float]:
    """What `values`, one a logged step and 0 at step 0, are at other steps: a straight line between
    logged ones."""
    import numpy as np

    known = [(r["step"], v) for r, v in zip(run.steps, values, strict=True) if math.isfinite(v)]
    known = known if known and known[0][0] == 0 else [(0, 0.0), *known]
    return np.interp(steps, *zip(*known, strict=True)).tolist()


# ---- lines of a bearable size --------------------------------------------------------------------


def blocks(count: int) -> list[range]:
    """`count` values as at most POINTS neighbouring groups."""
    size = math.ceil(count / POINTS)
    return [range(i, min(i + size, count)) for i in range(0, count, size)]


def thin(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """At most 2 x POINTS points that look the same: each group's lowest and highest, so that spikes
    stay. A group without a finite value stays a gap."""
    if len(y) <= 2 * POINTS:
        return x, y
    kept = []
    for group in blocks(len(y)):
        valid = sorted((i for i in group if math.isfinite(y[i])), key=y.__getitem__)
        kept += sorted({valid[0], valid[-1]}) if valid else group[:1]
    return [x[i] for i in kept], [y[i] for i in kept]


def smooth(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """A running median over a fortieth of the line, of at most POINTS points."""
    groups = blocks(len(y))
    x = [x[group[-1]] for group in groups]
    y = [middle(y[i] for i in group) for group in groups]
    half = max(2, len(y) // 80)
    return x, [middle(y[max(0, i - half) : i + half + 1]) for i in range(len(y))]


# ---- charts: matplotlib's SVG --------------------------------------------------------------------


def draw(name: str, paint, height: int = 250) -> str:
    """The SVG of a chart whose axes `paint(axes)` fills. Its text is text, in the page's font, and
    its colours are the page's variables."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UserError(
            f"a report needs matplotlib: {sys.executable} -m pip install matplotlib"
        ) from e

    light = {key: value for key, (value, _) in COLORS.items()}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what a matplotlibrc of the user's says
        matplotlib.rcParams.update({
            "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11.5,
            "axes.edgecolor": light["muted"], "axes.labelcolor": light["muted"],
            "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
            "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": light["line"],
            "grid.linewidth": 0.8, "xtick.color": light["muted"], "ytick.color": light["muted"],
            "axes.linewidth": 0.8, "axes.xmargin": 0.02, "axes.ymargin": 0.06,
            "lines.solid_capstyle": "round", "text.parse_math": False,
        })  # fmt: skip
        figure = Figure(figsize=(400 / 72, height / 72), layout="constrained")
        paint(figure.subplots())
        out = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    # ids are the page's, and each chart has an axes_1
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    for key, value in light.items():
        svg = svg.replace(value, f"var(--{key})")
    return svg


def hue(name: str) -> str:
    """A colour to draw with; `draw` puts the page's variable in its place."""
    return COLORS[name][0]


def plot_line(axes, run, x: list[float], y: list[float], what: str, more: float = 0) -> None:
    """A run's line, `more` points wider than the last run's; of a long one every step thin, and
    the running median on it."""
    style = {"color": hue(run.color), "linestyle": run.dash}
    if len(y) < SMOOTHED:
        dots = {"marker": "o", "markersize": 2.5} if len(y) <= 30 else {}
        axes.plot(x, y, linewidth=1.6 + more, gid=f"{run.letter}-{what}", **style, **dots)
        return
    axes.plot(*thin(x, y), linewidth=0.7, alpha=0.35, gid=f"{run.letter}-{what}", **style)
    axes.plot(*smooth(x, y), linewidth=1.9 + more / 2, gid=f"{run.letter}-{what}-median", **style)


def plot_evals(axes, run, x: list[float]) -> None:
    losses = [loss for _, loss in run.evals]
    few = len(losses) <= 60
    x, losses = (x, losses) if few else thin(x, losses)
    axes.plot(
        x, losses, color=hue(run.color), linewidth=1.1, linestyle=(0, (3, 2)),
        marker="o" if few else None, markersize=5, markerfacecolor=hue("panel"),
        gid=f"{run.letter}-heldout",
    )  # fmt: skip


def scale(axes, values: list[float], from_zero: bool = False) -> None:
    """The y axis: logarithmic where values span more than a factor of 50, as those of a run that
    went astray do."""
    from matplotlib import ticker

    values = finite(values)
    if from_zero:
        axes.set_ylim(0, max(values, default=0) * 1.06 or 1)
    elif values and min(values) > 0 and max(values) > 50 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 3), numticks=12))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(lambda v, _: short(v, 6))


def x_axis(axes, label: str, whole: bool = True) -> None:
    axes.set_xlabel(label)
    axes.locator_params(axis="x", nbins=6, integer=whole)
    axes.xaxis.set_major_formatter(lambda v, _: short(v, 6))


def loss_chart(runs: list, over: str) -> str | None:
    """Training and held-out loss over `over`: step, tokens (learnt ones) or time. None where no run
    has the numbers."""
    found, per = [], 1
    for run in runs:
        steps = [record["step"] for record in run.steps]
        x = {"step": steps, "tokens": column(run, "data/label_tokens"), "time": seconds(run)}[over]
        if finite(x):
            found.append((run, x))
    if not found:
        return None
    label = {"step": "optimizer step", "tokens": "learnt tokens"}.get(over)
    if over == "time":
        longest = max(max(x) for _, x in found)
        per, unit = (3600, "hours") if longest > 3 * 3600 else (60, "minutes")
        per, unit = (1, "seconds") if longest <= 180 else (per, unit)
        label = f"{unit} of training"

    def paint(axes):
        for run, x in found:
            evaluated = [step for step, _ in run.evals]
            at = evaluated if over == "step" else at_steps(run, evaluated, x)
            more = 0 if over == "time" else run.below
            plot_line(axes, run, [v / per for v in x], column(run, "train/loss"), "loss", more)
            if run.evals:
                plot_evals(axes, run, [v / per for v in at])
        every = [v for run, _ in found for v in column(run, "train/loss")]
        scale(axes, every + [loss for run, _ in found for _, loss in run.evals])
        axes.set_ylabel("loss")
        x_axis(axes, label, whole=over != "time")

    return draw(f"loss-{over}", paint)


def speed_chart(runs: list) -> str | None:
    found = [(run, column(run, "perf/toks_per_s")) for run in runs]
    found = [(run, y) for run, y in found if finite(y)]
    if not found:
        return None

    def paint(axes):
        for run, y in found:
            plot_line(axes, run, [record["step"] for record in run.steps], y, "speed")
        scale(axes, [v for _, y in found for v in y], from_zero=True)
        axes.set_ylabel("tokens a second")
        x_axis(axes, "optimizer step")

    return draw("speed", paint)


def norm_chart(runs: list) -> str | None:
    found = [(run, column(run, "train/grad_norm")) for run in runs]
    found = [(run, y) for run, y in found if finite(y) or skipped(run)]
    if not found:
        return None

    def paint(axes):
        for i, (run, y) in enumerate(found):
            steps = [record["step"] for record in run.steps]
            plot_line(axes, run, steps, y, "norm", run.below)
            if bad := skipped(run):
                bad = [bad[group[0]] for group in blocks(len(bad))]
                axes.plot(
                    bad, [0.03 + 0.05 * (i % 6)] * len(bad), "x", markersize=5,
                    color=hue(run.color),
                    transform=axes.get_xaxis_transform(), gid=f"{run.letter}-skipped",
                )  # fmt: skip
        scale(axes, [v for _, y in found for v in y])
        axes.set_ylabel("gradient norm")
        x_axis(axes, "optimizer step")

    return draw("norm", paint)


def memory_chart(runs: list) -> str | None:
    found = [(run, peak_memory(run)) for run in runs]
    found = [(run, gb) for run, gb in found if finite(gb)]
    if not found:
        return None

    def paint(axes):
        most = max(len(gb) for _, gb in found)
        width = 0.8 / len(found)
        for i, (run, gb) in enumerate(found):
            at = [rank - 0.4 + width * (i + 0.5) for rank in range(len(gb))]
            heights = [v if math.isfinite(v) else 0 for v in gb]
            for bar, rank in zip(
                axes.bar(at, heights, width * 0.92, color=hue(run.color)), range(most), strict=False
            ):
                bar.set_gid(f"{run.letter}-memory-{rank}")
            if most * len(found) <= 12:
                for left, height in zip(at, heights, strict=True):
                    axes.annotate(
                        short(height), (left, height), (0, 3), textcoords="offset points",
                        ha="center", color=hue("ink"), fontsize=10,
                    )  # fmt: skip
        scale(axes, [v * 1.08 for _, gb in found for v in gb], from_zero=True)
        axes.set_ylabel("GB (2³⁰ bytes)")
        x_axis(axes, "rank")
        axes.set_xlim(-0.6, most - 0.4)

    return draw("memory", paint)


def split_bars(runs: list) -> list[tuple[str, dict]]:
    """(label, parts) of each bar; of a run with more ranks than BARS, those from the one with the
    most compute to the one with the least, evenly apart."""
    bars = []
    for run in runs:
        ranks = list(enumerate(run.parts or []))
        if len(ranks) > BARS:
            ranks.sort(key=lambda pair: -pair[1]["compute"])
            ranks = [ranks[round(i * (len(ranks) - 1) / (BARS - 1))] for i in range(BARS)]
        bars += [(f"{run.letter} rank {rank}", parts) for rank, parts in ranks]
    return bars


def split_chart(runs: list) -> str | None:
    bars = split_bars(runs)
    if not bars:
        return None

    def paint(axes):
        labels, left = [label for label, _ in bars], [0.0] * len(bars)
        for part in PARTS:
            widths = [parts[part] for _, parts in bars]
            drawn = axes.barh(range(len(bars)), widths, 0.72, left, color=hue(part))
            for bar, label in zip(drawn, labels, strict=True):
                bar.set_gid(f"{label.replace(' rank ', '-')}-{part}")
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(bars)), labels)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0, max(left) * 1.02 or 1)
        axes.grid(False, axis="y")
        axes.grid(True, axis="x")
        x_axis(axes, "milliseconds of a step (median)", whole=False)

    return draw("split", paint, height=max(150, 70 + 22 * len(bars)))


# ---- the page ------------------------------------------------------------------------------------


def esc(value) -> str:
    """Whatever a file says, as text: never as markup."""
    return html.escape(str(value), quote=True)


def short(n: float, digits: int = 3) -> str:
    """1234 -> 1.23k; NaN is a dash."""
    if not math.isfinite(n):
        return "–"
    n = float(f"{n:.{digits}g}")  # first, for 999.9 is 1k
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.{digits}g}{unit}"
    return f"{n:.{digits}g}"


def exact(n: float) -> str:
    return f"{n:.4f}" if math.isfinite(n) else "not finite"


def badge(run) -> str:
    return f'<b class="badge" style="background: var(--{run.color})">{run.letter}</b>'


def kind(run) -> str:
    """FSDP or pipeline, and over how many processes."""
    size = run.env.get("world_size")
    of = f", {size} process{'es' * (size != 1)}" if isinstance(size, int) else ""
    if "stages" in run.config:
        stages = run.config["stages"]
        return f"pipeline of {stages} stage{'s' * (stages != 1)}{of}"
    if size == 1 or run.config.get("fsdp") is False:
        return "one process"
    return f"FSDP{of}" if "fsdp" in run.config else "–"


def facts(run) -> dict[str, tuple[str, str]]:
    """{name: (what the card says, what it says in full)}."""
    c, env = run.config, run.env

    def file_name(key):
        said = str(c.get(key) or "–")
        return ", ".join(Path(p).name if p.startswith("/") else p for p in said.split(",")), said

    device = str(env.get("device", "–"))
    if isinstance(env.get("world_size"), int):
        device = f"{env['world_size']} × {device}"
    batch = "–"
    if "micro_batch_size" in c:
        shape = f"{c['micro_batch_size']} × {c.get('grad_accum_steps')} accumulated"
        if "replicas" in c:
            shape += f" × {c['replicas']} replica{'s' * (c['replicas'] != 1)}"
        rows = f" = {c['global_batch']} rows" if "global_batch" in c else ""
        batch = f"{shape}{rows} of {c.get('seq_len')} slots"
    step_ms, mfu = median(run, "perf/step_ms"), median(run, "perf/mfu")
    step = f"{step_ms:,.0f} ms" if step_ms >= 100 else f"{short(step_ms)} ms"
    if math.isfinite(mfu):
        step += f", MFU {mfu:.1%}"
    last = run.steps[-1] if run.steps else {}
    tokens = [short(number(last.get(key))) for key in ("data/tokens", "data/label_tokens")]
    found = {
        "Script": kind(run),
        "Model": file_name("model_name_or_path"),
        "Data": file_name("train_json"),
        "Held-out": file_name("eval_json"),
        "Device": device,
        "Dtype": c.get("dtype", "–"),
        "Batch": batch,
        "Step": step if math.isfinite(step_ms) else "–",
        "Seen": f"{tokens[0]} tokens, {tokens[1]} learnt",
        "Skipped": f"{len(skipped(run)):,} of {len(run.steps):,} logged steps",
        "Commit": env.get("revision") or "–",
        "Folder": (run.folder, run.folder.resolve()),
    }
    if run.written:
        found["Last line"] = f"{datetime.fromtimestamp(run.written):%Y-%m-%d %H:%M:%S}"
    return {k: v if isinstance(v, tuple) else (v, v) for k, v in found.items()}


def card(run) -> str:
    word, said = status(run)
    figures = []
    if run.evals:
        lowest = best(run)
        note = f"best {lowest[0]:.4f} at step {lowest[1]:,}" if lowest else ""
        figures.append(("held-out loss", exact(run.evals[-1][1]), note))
    else:
        figures.append(("held-out loss", "–", "not measured"))
    losses = finite(column(run, "train/loss"))
    last = exact(number(run.steps[-1]["train/loss"])) if run.steps else "–"
    figures.append(("training loss", last, f"lowest {min(losses):.4f}" if losses else ""))
    learnt = short(median(run, "perf/label_toks_per_s"))
    figures.append(
        ("tokens a second", short(median(run, "perf/toks_per_s")), f"median; {learnt} learnt")
    )
    gb = finite(peak_memory(run))
    figures.append(("peak memory", f"{max(gb):.2f} GB" if gb else "–", "of the fullest rank"))
    numbers = "".join(
        f"<div><dt>{name}</dt><dd>{esc(value)}<small>{esc(note)}</small></dd></div>"
        for name, value, note in figures
    )
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td title="{esc(full)}">{esc(value)}</td></tr>'
        for name, (value, full) in facts(run).items()
    )
    notes = "".join(f'<p class="note">{esc(note)}</p>' for note in run.notes)
    return (
        f'<article class="card" style="border-top-color: var(--{run.color})">'
        f'<h2>{badge(run)} <span class="name">{esc(run.name)}</span></h2>'
        f'<p><span class="status {word}">{esc(said)}</span></p>'
        f'<dl class="figures">{numbers}</dl><table class="facts">{rows}</table>{notes}</article>'
    )


def figure(title: str, svg: str | None, caption: str, alt: str, more: str = "") -> str:
    """A chart with its title and how to read it. alt: what it shows, in words. With `more`, HTML to
    stand below, it takes the whole width."""
    if svg is None:
        return f'<figure><h3>{title}</h3><p class="none">Not recorded in these runs.</p></figure>'
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{esc(alt)}"', 1)
    if more:
        inside = f'<div class="grid"><div>{svg}</div><figcaption>{caption}</figcaption></div>{more}'
        return f'<figure class="wide"><h3>{title}</h3>{inside}</figure>'
    return f"<figure><h3>{title}</h3>{svg}<figcaption>{caption}</figcaption></figure>"


def ends(runs: list, key: str) -> str:
    """For a chart's text: the first and last value of each run."""
    said = []
    for run in runs:
        pairs = [(r["step"], number(r.get(key))) for r in run.steps]
        pairs = [pair for pair in pairs if math.isfinite(pair[1])]
        if pairs:
            (a, first), (b, last) = pairs[0], pairs[-1]
            said.append(f"{run.letter}: {first:.4g} at step {a}, {last:.4g} at step {b}")
    return "; ".join(said) or "no values"


def table(head: list[str], rows: list[list[str]], caption: str) -> str:
    """A table that scrolls sideways in its own box. The cells are HTML."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{esc(caption)}"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def split_table(runs: list) -> str:
    rows = []
    for run in runs:
        for rank, parts in enumerate(run.parts or []):
            cells = [f"{parts[k]:,.1f}" for k in ("step", *PARTS, "comm", "wait")]
            rows.append([f"{badge(run)} rank {rank}", *cells])
    head = ["milliseconds", "step", *PARTS.values(), "all communication", "all waiting"]
    return table(head, rows, "Where a step's time goes, in milliseconds")


def settings(run) -> dict[str, object]:
    """Everything a run was told and ran on, flat, but for its folder."""
    found = {k: v for k, v in run.config.items() if k not in ("output_dir", "local_rank")}
    for key, value in run.env.items():
        if key in ("versions", "environment") and isinstance(value, dict):
            found.update({f"{key}: {k}": v for k, v in value.items()})
        else:
            found[f"machine: {key}"] = value
    return found


def settings_tables(runs: list) -> str:
    """The settings that differ, and, folded, those that don't."""
    every = [settings(run) for run in runs]
    keys = dict.fromkeys(key for found in every for key in found)
    keys = sorted(keys, key=lambda key: ": " in key)  # flags, then the machine
    absent = object()

    def cell(value) -> str:
        if value is absent:
            return '<span class="absent">absent</span>'
        return esc(value if isinstance(value, str) else json.dumps(value))

    differ, same = [], []
    for key in keys:
        name = esc(key).replace("_", "_<wbr>")
        values = [found.get(key, absent) for found in every]
        if len(set(map(cell, values))) > 1:
            differ.append([name, *map(cell, values)])
        else:
            same.append([name, cell(values[0])])
    parts = []
    if len(runs) > 1:
        parts.append("<h2>Settings that differ</h2>")
        head = ["setting", *(f"{badge(run)} {esc(run.name)}" for run in runs)]
        parts.append(
            table(head, differ, "Settings that differ") if differ else "<p>None of them.</p>"
        )
    if same:
        title = "Settings that are the same" if len(runs) > 1 else "All settings"
        inside = table(["setting", "value"], same, title)
        parts.append(f"<details><summary>{title} ({len(same)})</summary>{inside}</details>")
    return "".join(parts)


def charts(runs: list) -> str:
    """All figures, of runs that have steps."""
    losses = f"Training loss. {ends(runs, 'train/loss')}."
    for run in runs:
        if run.evals:
            said = ", ".join(f"{exact(v)} at step {s}" for s, v in (run.evals[0], run.evals[-1]))
            losses += f" Held-out loss of {run.letter}: {said}."
    lines = "Solid: training loss. "
    if any(len(run.steps) >= SMOOTHED for run in runs):
        lines = "Thin: training loss of each logged step; thick: its running median. "
    lines += "Dashed: held-out loss."
    if len(runs) > 1:
        lines += " Where runs agree, the earlier letter's line is the wider one below."
    counts = "; ".join(f"{run.letter}: {len(skipped(run)):,}" for run in runs)
    memory = "; ".join(f"{run.letter}: {', '.join(map(short, peak_memory(run)))}" for run in runs)
    learning = [
        figure("Loss over steps", loss_chart(runs, "step"), lines, f"Loss over steps. {losses}"),
        figure(
            "Loss over learnt tokens",
            loss_chart(runs, "tokens"),
            "The fair axis where runs take steps of different sizes. Learnt tokens are those with "
            "a label.",
            f"Loss over learnt tokens. {losses}",
        ),
        figure(
            "Loss over time",
            loss_chart(runs, "time"),
            "Time spent in training steps: without start-up, evaluations and saves.",
            f"Loss over time of training. {losses}",
        ),
        figure(
            "Gradient norm and skipped steps",
            norm_chart(runs),
            "The global norm before clipping. A cross at the bottom: a skipped step, whose norm "
            f"was not finite ({counts}).",
            f"Gradient norm. {ends(runs, 'train/grad_norm')}. Skipped steps: {counts}.",
        ),
    ]
    speed = [
        figure(
            "Tokens a second",
            speed_chart(runs),
            "Of all processes together, padding not counted.",
            f"Tokens a second. {ends(runs, 'perf/toks_per_s')}.",
        ),
        figure(
            "Memory of each rank",
            memory_chart(runs),
            "The peak so far: allocated on a GPU, resident on a CPU.",
            f"Peak memory of each rank in GB. {memory}.",
        ),
        split_figure(runs),
    ]
    keys = "".join(
        f'<li>{badge(run)} <span class="name">{esc(run.name)}</span></li>' for run in runs
    )
    legend = f'<ul class="legend" aria-label="Runs">{keys}</ul>' if len(runs) > 1 else ""
    return "".join(
        f'<section><h2>{title}</h2>{legend}<div class="grid">{"".join(figures)}</div></section>'
        for title, figures in (("Learning", learning), ("Speed and memory", speed))
    )


def split_figure(runs: list) -> str:
    key = "".join(
        f'<li><i style="background: var(--{part})"></i>{name}</li>' for part, name in PARTS.items()
    )
    more = ""
    if any(len(run.parts or []) > BARS for run in runs):
        more += f" The bars show {BARS} ranks of a run with more, the table all of them."
    if untimed := [run.letter for run in runs if run.parts is None]:
        more += f" Communication was not timed in {', '.join(untimed)}."
    caption = f"""<ul class="legend">{key}</ul>
<p>Medians without the first {WARMUP} logged steps. <b>Exposed</b>: compute stood still for it.
<b>Waiting</b> is what an operation took beyond its time on the fastest rank; in a pipeline that is
the bubble and what an uneven split costs. <b>Compute and idle</b> is the rest of the step.</p>
<p>How much of the waiting was hidden behind compute is not recorded. As much as fits is counted as
exposed, so here waiting is an upper bound and transfer a lower one. Where all communication is
exposed, as in a pipeline or on a CPU, both are exact. The last two columns count hidden time,
too.{more}</p>"""
    said = "; ".join(
        f"{label}: {', '.join(f'{name} {bar[part]:.4g} ms' for part, name in PARTS.items())}"
        for label, bar in split_bars(runs)
    )
    alt = f"Parts of a step for each rank. {said}."
    return figure("Where a step's time goes", split_chart(runs), caption, alt, split_table(runs))


def page(runs: list) -> str:
    """The whole page. A policy in its head forbids scripts and requests, whatever files say."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    names = ", ".join(run.name for run in runs)
    drawn = [run for run in runs if run.steps]
    figures = charts(drawn) if drawn else (
        '<p class="none">No step is logged yet. Once there are some, run the same command '
        "again.</p>"
    )  # fmt: skip
    now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    return f"""<!doctype html>
{MARKER}
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>llm_demo report: {esc(names)}</title><style>{css()}</style></head><body>
<header><p>llm_demo, training report of {now}</p><h1>{esc(title)}</h1></header><main>
<div class="cards">{"".join(map(card, runs))}</div>
{figures}
<section>{settings_tables(runs)}</section></main>
<footer>Definitions: docs/report.md and “How to read a run” in README.md.</footer>
</body></html>
"""


def css() -> str:
    light, dark = (
        "".join(f"--{name}: {pair[i]};" for name, pair in COLORS.items()) for i in range(2)
    )
    return f"""
:root {{ color-scheme: light dark; {light} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
{STYLE}"""


STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 20px clamp(12px, 3vw, 40px) 40px;
  background: var(--page); color: var(--ink); line-height: 1.45;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header p, footer, figcaption, .note, .none, small, .absent { color: var(--muted); }
header p { margin: 0; font-size: .85rem; }
h1 { margin: 0 0 18px; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 34px 0 12px; }
h3 { font-size: .98rem; margin: 0 0 6px; }
.cards, .grid { display: grid; gap: 16px; --least: 330px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, var(--least)), 1fr)); }
.grid { --least: max(330px, 40%); }
.wide { grid-column: 1 / -1; } .wide .scroll { margin-top: 14px; }
.card, figure { margin: 0; min-width: 0; padding: 16px; background: var(--panel);
  border: 1px solid var(--line); border-radius: 10px; }
.card { border-top: 4px solid; }
.card h2 { margin: 0 0 6px; display: flex; gap: 8px; align-items: center; }
.name { overflow-wrap: anywhere; min-width: 0; }
.card p { margin: 0 0 10px; font-size: .85rem; }
.badge { display: inline-grid; place-items: center; flex: none; min-width: 1.5em; height: 1.5em;
  padding: 0 .3em; border-radius: 5px; color: var(--panel); font-size: .85em; line-height: 1; }
.status { display: inline-block; border: 1px solid; border-radius: 12px; padding: 1px 10px; }
.finished { color: var(--good); } .unfinished { color: var(--warn); }
.empty { color: var(--muted); }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; margin: 0 0 12px; }
dt { font-size: .8rem; color: var(--muted); }
dd { margin: 0; font-size: 1.45rem; font-weight: 600; line-height: 1.2;
  font-variant-numeric: tabular-nums; }
small { display: block; font-size: .78rem; font-weight: 400; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px 4px 0; text-align: left; vertical-align: top; font-weight: 400; }
.facts { width: 100%; } .facts th { color: var(--muted); white-space: nowrap; }
.facts td { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; }
.scroll table { width: 100%; }
.scroll th, .scroll td { padding: 6px 12px; border-bottom: 1px solid var(--line); }
.scroll td { max-width: 26rem; overflow-wrap: anywhere; }
.scroll thead th { font-weight: 600; vertical-align: bottom; }
.scroll tbody th { max-width: 50vw; overflow-wrap: break-word; background: var(--panel);
  position: sticky; left: 0; }
.scroll tbody tr:last-child > * { border-bottom: 0; }
figure { display: flex; flex-direction: column; }
figure svg { display: block; width: 100%; max-width: 540px; height: auto; margin: 0 auto; }
svg text { font-family: inherit !important; }
figcaption p { margin: 0 0 8px; }
figcaption { padding-top: 8px; font-size: .82rem; }
figure .scroll td, figure .scroll thead th + th { text-align: right; }
figure .scroll td { white-space: nowrap; }
figure .scroll { max-height: 420px; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; margin: 0 0 12px; padding: 0;
  list-style: none; font-size: .85rem; color: var(--ink); }
.legend li { display: flex; align-items: center; gap: 6px; min-width: 0; }
.legend i { width: 14px; height: 14px; border-radius: 3px; }
.none { padding: 24px 0; }
@media (max-width: 500px) { .card, figure { padding: 12px 10px; } }
details { margin-top: 16px; } summary { cursor: pointer; font-weight: 600; padding: 6px 0; }
footer { margin-top: 30px; font-size: .82rem; }
@media print {
  :root { --page: white; --panel: white; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .card, figure, tr { break-inside: avoid; }
  h2, .legend { break-after: avoid; }
  figure .scroll { overflow: visible; max-height: none; }
  .grid { grid-template-columns: 1fr 1fr; gap: 8px; }
  * { print-color-adjust: exact; }
}
"""


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
