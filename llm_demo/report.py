"""Write a page that compares runs: python -m llm_demo.report RUN [RUN ...] --out FILE.html

RUN is a run's folder, finished or not. The page is one file that includes its charts, loads nothing
and runs no script. docs/metrics.md explains each chart."""

import io
import math
import re
import statistics
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
from jinja2 import Environment
from matplotlib.figure import Figure

from llm_demo.core.errors import UserError
from llm_demo.flags.args import names_of
from llm_demo.flags.parsing import PlainParser, path_of
from llm_demo.machine.files import write_text
from llm_demo.machine.process import command, read_text, regular
from llm_demo.machine.text import blame, counted
from llm_demo.run.folder import (
    WARMUP,
    column,
    finite_of,
    float_of,
    median,
    peaks_of,
    read_run,
    status,
)

POINTS_OF_A_LINE = 150  # of steps in a long line: their median and range are drawn
PAGE = Path(__file__).with_suffix(".html")  # the template
MARKER = "<!-- llm_demo report -->"  # only files with this marker are replaced

COLORS = ("#0072b2", "#d25500", "#00805c", "#a6478a", "#8a6a00", "#5b4fc4")
MUTED, LINE = "#5a6675", "#dce0e6"
PARTS_OF_A_STEP = {  # of a step, in the order of the bars
    "compute": ("compute and idle", "#93a1b1"),
    "transfer": ("exposed transfer", "#3f77c8"),
    "waiting": ("exposed waiting", "#e0a023"),
}


def main(argv: list[str] | None = None) -> None:
    parser = PlainParser(prog="python -m llm_demo.report", description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--out",
        type=path_of,
        default=Path("report.html"),
        metavar="FILE.html",
        help="replaced only if it is an earlier report; default: report.html",
    )
    args = parser.parse_args(argv)
    try:
        if regular(args.out).exists() and MARKER not in read_text(args.out)[:200]:
            raise UserError(f"--out {args.out} exists and is not a report: choose another name")
        with blame(", ".join(map(str, args.runs))):
            page = page_of(read_runs(args.runs))
        write_text(args.out.resolve(), page)
    except OSError as e:
        raise UserError(f"{e.filename or args.out}: {e.strerror}") from e
    print(f"report: {args.out}")


def read_runs(folders: list[Path]) -> list[SimpleNamespace]:
    """All runs, each with a letter and a line style."""
    runs = [read_run(folder) for folder in folders]
    for i, run in enumerate(runs):
        run.letter = chr(ord("A") + i)
        run.color = COLORS[i % len(COLORS)]
        run.width = 1.4 + 1.2 * min(2, len(runs) - 1 - i)  # shows a line below an equal one
    return runs


def new_chart(x_label: str, y_label: str = "", height: int = 250):
    """A figure and its axes; height in points of 1/72 inch, for a width of 400."""
    figure = Figure(figsize=(400 / 72, height / 72), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.locator_params(axis="x", nbins=6, integer=True)
    axes.xaxis.set_major_formatter(lambda v, _: short_number(v, 6))
    return figure, axes


def svg(figure: Figure, name: str) -> str:
    """The chart as an SVG element, with ids that no other chart has."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True)
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text)


def plot_line(axes, run, x: list[float], y: list[float], name: str) -> None:
    """Draw a run's line; for a long one the median and range of each group of steps."""
    gid = f"{run.letter}-{name}"
    size = math.ceil(len(y) / POINTS_OF_A_LINE)
    if size > 1:
        starts = range(0, len(y), size)
        x = x[::size]
        groups = [finite_of(y[i : i + size]) or [math.nan] for i in starts]
        y = [statistics.median(group) for group in groups]
        low = [min(group) for group in groups]
        high = [max(group) for group in groups]
        axes.fill_between(x, low, high, color=run.color, alpha=0.25, gid=f"{gid}-range")
    axes.plot(
        x,
        y,
        color=run.color,
        linewidth=run.width,
        gid=gid,
        marker="o" if len(y) <= 30 else None,
        markersize=2.5,
    )


def line_chart(runs: list, name: str, key: str, y_label: str) -> str:
    """Plot a number of each run over its steps; empty if no run has it. The y axis is logarithmic
    if values span more than a factor of 50, as in a run that diverged."""
    figure, axes = new_chart("optimizer step", y_label)
    values = []
    for run in runs:
        y = column(run.steps, key)
        plot_line(axes, run, column(run.steps, "step"), y, name)
        values += finite_of(y)
        if name == "loss":
            heldout = column(run.evals, "eval/loss")
            axes.plot(
                column(run.evals, "step"),
                heldout,
                color=run.color,
                linewidth=1.1,
                linestyle=(0, (3, 2)),
                marker="o" if len(heldout) <= 60 else None,
                markersize=5,
                markerfacecolor="white",
                gid=f"{run.letter}-heldout",
                zorder=3,
            )
            values += finite_of(heldout)
    if not values:
        return ""
    if name == "speed":
        axes.set_ylim(0, max(values) * 1.06 or 1)
    elif 0 < min(values) < max(values) / 50:
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda v, _: short_number(v, 6))
    return svg(figure, name)


def split_chart(runs: list) -> str:
    """A bar for each rank: where a step's time goes, in ms. Empty if it was not timed."""
    bars = [(f"{run.letter}-{rank}", p) for run in runs for rank, p in enumerate(run.parts)]
    if not bars:
        return ""
    figure, axes = new_chart("milliseconds (median)", height=115 + 16 * len(bars))
    left, widest = np.zeros(len(bars)), max(parts["step"] for _, parts in bars)
    for part, (name, color) in PARTS_OF_A_STEP.items():
        widths = [parts[part] for _, parts in bars]
        drawn = axes.barh(range(len(bars)), widths, 0.72, left, color=color, label=name)
        for bar, (label, _) in zip(drawn, bars, strict=True):
            bar.set_gid(f"{label}-{part}")
        said = [short_number(width) if width > widest / 12 else "" for width in widths]
        axes.bar_label(drawn, said, label_type="center", fontsize=9)
        left += widths
    figure.legend(
        loc="outside upper center", ncols=len(PARTS_OF_A_STEP), frameon=False, fontsize=10
    )
    axes.set_yticks(range(len(bars)), [label.replace("-", " rank ") for label, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    return svg(figure, "split")


def short_number(n: float, digits: int = 3) -> str:
    """1234 -> 1.23k; NaN -> a dash."""
    if not math.isfinite(n):
        return "–"
    n = float(f"{n:.{digits}g}")  # rounds first: 999.9 becomes 1k
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.{digits}g}{unit}"
    return f"{n:.{digits}g}"


def decimal(n: float) -> str:
    return f"{n:.4f}" if math.isfinite(n) else "not finite"


def facts(run, first) -> dict[str, object]:
    """How a run went, what it trained, and on what; what is empty or missing is shown as a dash.
    first: the run that others are compared with."""
    config, env = run.config, run.env
    found = {
        "status": status(run),
        "last line logged": run.written,
        "learning rate": f"{config.get('lr', '–')}, {config.get('lr_scheduler', '–')}",
        "parallelism": config.get("parallelism"),
        "model": Path(config.get("model_name_or_path", "")).name,
        "data": Path(config.get("train_json", "")).name,
        "dtype": config.get("dtype"),
        "device": f"{env.get('world_size', '–')} × {env.get('device', '–')}",
        "commit": env.get("revision"),
    }
    if "seconds" in run.summary:
        found["duration"] = timedelta(seconds=round(run.summary["seconds"]))
    if run.broken:
        found["notes"] = f"{counted(run.broken, 'unreadable line')} of metrics.jsonl skipped"
    if run.evals:
        found |= facts_of_evals(run, first)
    if run.steps:
        found |= facts_of_steps(run, first)
    return found


def facts_of_evals(run, first) -> dict[str, str]:
    """The held-out loss and answers of a run."""
    losses = column(run.evals, "eval/loss")
    exact = finite_of(column(run.evals, "eval/exact"))
    last = decimal(losses[-1])
    of_data = names_of("held_out")
    if run.config.get("eval_fraction"):
        of_data = (*of_data, "train_json")  # held out of the training data
    if any(run.config.get(key) != first.config.get(key) for key in of_data):
        last += f" (of other data or tokens than {first.letter}'s)"
    return {
        "held-out loss": last,
        "best held-out loss": decimal(min(finite_of(losses), default=math.nan)),
        "held-out answers exact": f"{exact[0]:.1%} → {exact[-1]:.1%}" if exact else "",
    }


def facts_of_steps(run, first) -> dict[str, str]:
    """The training loss, speed, memory and tokens of a run: the last step's, or medians."""
    last, mfu = run.steps[-1], median(run.steps, "perf/mfu")
    speed = median(run.steps, "perf/toks_per_s")
    ratio = speed / (median(first.steps, "perf/toks_per_s") or math.nan)
    said = short_number(speed)
    alike = all(run.config.get(key) == first.config.get(key) for key in names_of("trained_on"))
    if run is not first and alike and math.isfinite(ratio):
        said += f" ({ratio:.2f} x {first.letter})"
    skipped = sum(record.get("train/skipped") is True for record in run.steps)
    memory = peaks_of(last)
    if len(memory) > 8:
        memory = [max(memory)]
    return {
        "training loss": decimal(float_of(last["train/loss"])),
        "tokens per second": said,
        "step": f"{median(run.steps, 'perf/step_ms'):,.1f} ms",
        "MFU": f"{100 * mfu:.3g} %" if math.isfinite(mfu) else "",
        "peak memory": " / ".join(map(short_number, memory)) + " GiB",
        "seen": f"{short_number(last['data/tokens'])} tokens, "
        f"{short_number(last['data/label_tokens'])} learnt",
        "skipped": f"{skipped:,} of {len(run.steps):,} logged steps",
    }


def settings(run) -> dict[str, object]:
    """The settings and the environment of a run, flat."""
    flat = dict(run.config)
    for key, value in run.env.items():
        nested = isinstance(value, dict)
        flat |= {f"{key}: {k}": v for k, v in value.items()} if nested else {key: value}
    return {key: value for key, value in flat.items() if key not in HIDDEN}


# what changes no result, noise, and what follows from other settings
HIDDEN = (
    *names_of("quiet"),
    "resumed_step",
    "platform",
    "global_batch",
    "data_parallel",
    "parallelism",
)
UNUSED = {"None", "False", "0", "0.0", ""}


def settings_that_differ(runs: list) -> dict[str, list[str | None]]:
    """The settings that differ, each with its text in every run; None where it is absent."""
    of_runs, found = [settings(run) for run in runs], {}
    keys = dict.fromkeys(key for one in of_runs for key in one)
    for key in keys:
        values = [str(one[key]) if key in one else None for one in of_runs]
        unused = None in values and {*values} <= {None, *UNUSED}  # a flag of one script
        if len({*values}) > 1 and not unused:
            found[key] = values
    return found


def page_of(runs: list) -> str:
    """The whole page. A policy in its head forbids scripts and requests, whatever files say."""
    drawn = [run for run in runs if run.steps]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignores the user's matplotlibrc
        matplotlib.rcParams.update(CHART)
        charts = {
            "loss": line_chart(drawn, "loss", "train/loss", "loss"),
            "norm": line_chart(drawn, "norm", "train/grad_norm", "gradient norm"),
            "speed": line_chart(drawn, "speed", "perf/toks_per_s", "tokens per second"),
            "split": split_chart(drawn),
        }
    template = Environment(autoescape=True, trim_blocks=True).from_string(PAGE.read_text("utf-8"))
    return template.render(
        marker=MARKER,
        names=", ".join(str(run.folder) for run in runs),
        runs=runs,
        warmup=WARMUP,
        charts=drawn and charts,
        untimed=[run.letter for run in drawn if not run.parts],
        facts=[facts(run, runs[0]) for run in runs],
        differences=settings_that_differ(runs),
        hidden=HIDDEN,
        now=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
    )


CHART = {  # matplotlib's settings
    "svg.fonttype": "none",
    "font.size": 11.5,
    "lines.solid_capstyle": "round",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
}


if __name__ == "__main__":
    command(main)
