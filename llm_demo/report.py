"""Write a page that compares runs: python -m llm_demo.report RUN [RUN ...] --out FILE.html

RUN is a run's folder, finished or not. The page is one file that includes its charts, loads nothing
and runs no script. docs/report.md explains each chart."""

import html
import io
import math
import re
import statistics
import string
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from llm_demo.core.errors import UserError
from llm_demo.job.files import PART
from llm_demo.job.parsing import PlainParser, path_of
from llm_demo.job.process import command
from llm_demo.job.reader import (
    column,
    finite,
    median,
    number,
    peak_memory,
    read_run,
    skipped,
    status,
)
from llm_demo.job.summary import WARMUP

TIE = 0.01  # speeds and losses that differ by less are called equal
JUDGED = (  # settings that decide which tokens a held-out loss is of
    "eval_json", "seq_len", "overlong", "chat_template", "train_on_prompt",
    "learn_turns", "learn_reasoning",
)  # fmt: skip
ANSWER = re.compile("^prompt   (.*)\nanswer   (.*)\nexpected (.*)$", re.M)  # as loop.py prints it
GROUPS = 150  # of steps in a long line: their median and range are drawn
STYLE = Path(__file__).with_suffix(".css").read_text()
MARKER = "<!-- llm_demo report -->"  # only files with this marker are replaced

COLORS = ("#0072b2", "#d25500", "#00805c", "#a6478a", "#8a6a00", "#5b4fc4")
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)))  # used when colours run out
MUTED, LINE = "#5a6675", "#dce0e6"
PARTS = {  # of a step, in the order of the bars
    "compute": ("compute and idle", "#93a1b1"),
    "transfer": ("exposed transfer", "#3f77c8"),
    "waiting": ("exposed waiting", "#e0a023"),
}


def main(argv: list[str] | None = None) -> None:
    parser = PlainParser(prog="python -m llm_demo.report", description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--out", type=path_of, default=Path("report.html"), metavar="FILE.html",
        help="replaced only if it is an earlier report; default: report.html",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        check_out(args.out)
        text = page(read_runs(args.runs))
        replace(args.out.resolve(), text)
    except OSError as e:
        raise UserError(f"{e.filename or args.out}: {e.strerror}") from e
    print(f"report: {args.out}")


def replace(out: Path, text: str) -> None:
    """Write the page, at once if `out` is an ordinary file: a browser never sees half of it."""
    whole = not out.exists() or out.is_file()
    part = out.with_name(f"{PART}{out.name}") if whole else out
    try:
        if whole:
            part.unlink(missing_ok=True)  # it may be a link
        part.write_text(text, encoding="utf-8", errors="replace")
        if whole:
            part.replace(out)
    finally:
        if whole:
            part.unlink(missing_ok=True)


def check_out(out: Path) -> None:
    """Raise UserError unless a page may be written to `out`."""
    if out.is_dir():
        raise UserError(f"--out {out} is a folder: name a file in it")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: folder {out.parent} does not exist")
    if out.is_file():
        with open(out, "rb") as file:
            start = file.read(200)
        if start and MARKER.encode() not in start:
            raise UserError(f"--out {out} exists and is not a report: choose another name")


def read_runs(folders: list[Path]) -> list[SimpleNamespace]:
    """All runs, each with a letter and a line style. Raises UserError for duplicates."""
    for i, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:i]]:
            raise UserError(f"{folder} is given twice")
    runs = [read_run(folder) for folder in folders]
    for i, run in enumerate(runs):
        run.letter = string.ascii_uppercase[i % 26] + str(i // 26 or "")
        run.color = COLORS[i % len(COLORS)]
        run.dash = DASHES[i // len(COLORS) % len(DASHES)]
        run.width = 1.4 + 1.2 * min(2, len(runs) - 1 - i)  # shows a line below an equal one
    return runs


def new_chart(x_label: str, y_label: str = "", height: int = 250):
    """A figure and its axes; height in points of 1/72 inch, for a width of 400."""
    figure = Figure(figsize=(400 / 72, height / 72), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.locator_params(axis="x", nbins=6, integer=True)
    axes.xaxis.set_major_formatter(lambda v, _: short(v, 6))
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
    size = math.ceil(len(y) / GROUPS)
    if size > 1:
        starts = range(0, len(y), size)
        groups = [finite(y[i : i + size]) or [math.nan] for i in starts]
        x, y = [x[i] for i in starts], list(map(statistics.median, groups))
        low, high = list(map(min, groups)), list(map(max, groups))
        axes.fill_between(x, low, high, color=run.color, alpha=0.25, gid=f"{gid}-range")
    axes.plot(
        x, y, color=run.color, linestyle=run.dash, linewidth=run.width, gid=gid,
        marker="o" if len(y) <= 30 else None, markersize=2.5,
    )  # fmt: skip


def line_chart(runs: list, name: str, key: str, y_label: str, over: str = "step") -> str:
    """Plot one number of each run over another; empty if no run has both. The y axis is logarithmic
    if values span more than a factor of 50, as in a run that diverged."""
    figure, axes = new_chart("optimizer step" if over == "step" else "learnt tokens", y_label)
    values, crosses = [], False
    for i, run in enumerate(runs):
        x, y = column(run.steps, over), column(run.steps, key)
        if not finite(x):
            continue
        plot_line(axes, run, x, y, name)
        values += finite(y)
        if name == "loss":
            values += plot_heldout(axes, run, x, over)
        if name == "norm" and (bad := skipped(run)):
            axes.plot(
                bad, [0.03 + 0.05 * (i % 6)] * len(bad), "x", color=run.color, markersize=5,
                transform=axes.get_xaxis_transform(), gid=f"{run.letter}-skipped",
            )  # fmt: skip
            crosses = True
    if not values and not crosses:
        return ""
    if name == "speed":
        axes.set_ylim(0, max(values) * 1.06 or 1)
    elif values and 0 < min(values) < max(values) / 50:
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda v, _: short(v, 6))
    return svg(figure, f"{name}-{over.split('/')[-1]}")


def plot_heldout(axes, run, x: list[float], over: str) -> list[float]:
    """Draw the held-out losses and return them. x: the positions of the logged steps. Evaluations
    between two of them are interpolated linearly."""
    at, losses = column(run.evals, "step"), column(run.evals, "eval/loss")
    if over != "step":
        known = zip(column(run.steps, "step"), x, strict=True)
        known = [(0, 0), *(pair for pair in known if math.isfinite(pair[1]))]
        at = np.interp(at, *zip(*known, strict=True))
    axes.plot(
        at, losses, color=run.color, linewidth=1.1, linestyle=(0, (3, 2)),
        marker="o" if len(losses) <= 60 else None, markersize=5, markerfacecolor="white",
        gid=f"{run.letter}-heldout", zorder=3,
    )  # fmt: skip
    return finite(losses)


def memory_chart(runs: list) -> str:
    figure, axes = new_chart("rank", "GB (2³⁰ bytes)")
    peaks = [(run, peak_memory(run)) for run in runs if finite(peak_memory(run))]
    if not peaks:
        return ""
    ranks, width = max(len(gb) for _, gb in peaks), 0.8 / len(peaks)
    for i, (run, gb) in enumerate(peaks):
        at = [rank - 0.4 + width * (i + 0.5) for rank in range(len(gb))]
        bars = axes.bar(at, gb, width * 0.92, color=run.color)
        for rank, bar in enumerate(bars):
            bar.set_gid(f"{run.letter}-memory-{rank}")
        if ranks * len(peaks) <= 12:
            axes.bar_label(bars, fmt=short, padding=2, fontsize=10)
    axes.set_xlim(-0.6, ranks - 0.4)
    return svg(figure, "memory")


def split_chart(runs: list) -> str:
    bars = [(f"{run.letter}-{rank}", p) for run in runs for rank, p in enumerate(run.parts)]
    if not bars:
        return ""
    figure, axes = new_chart("milliseconds (median)", height=min(900, 90 + 16 * len(bars)))
    left = np.zeros(len(bars))
    for part, (_, color) in PARTS.items():
        widths = [parts[part] for _, parts in bars]
        drawn = axes.barh(range(len(bars)), widths, 0.72, left, color=color)
        for bar, (label, _) in zip(drawn, bars, strict=True):
            bar.set_gid(f"{label}-{part}")
        left += widths
    named = range(0, len(bars), math.ceil(len(bars) / 50))
    axes.set_yticks(named, [bars[i][0].replace("-", " rank ") for i in named])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    return svg(figure, "split")


def esc(value) -> str:
    """Escape a value from a file: text, never markup."""
    return html.escape(str(value))


def short(n: float, digits: int = 3) -> str:
    """1234 -> 1.23k; NaN -> a dash."""
    if not math.isfinite(n):
        return "–"
    n = float(f"{n:.{digits}g}")  # rounds first: 999.9 becomes 1k
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.{digits}g}{unit}"
    return f"{n:.{digits}g}"


def exact(n: float) -> str:
    return f"{n:.4f}" if math.isfinite(n) else "not finite"


def took(run) -> str:
    """The time of a finished run, since its last start."""
    seconds = number(run.summary.get("seconds"))
    if not seconds < 1e9:  # also NaN
        return "–"
    text = f"{seconds:.1f} s" if seconds < 60 else f"{timedelta(seconds=round(seconds))} h"
    since = number(run.config.get("resumed_step"))
    return text + (f" since step {since:,.0f}" if since > 0 else "")


def heldout(run) -> float:
    """The last held-out loss, or NaN."""
    return (column(run.evals, "eval/loss") or [math.nan])[-1]


def verdict(runs: list) -> str:
    """The result in a sentence: what one run reached, or each of the others beside the first."""
    first, *others = [run for run in runs if run.steps] or [None]
    if first is None:
        return "No step is logged yet."
    if others:
        said = f"{'; '.join(beside(first, run) for run in others)}. Less than {TIE:.0%} is a tie."
    elif math.isfinite(heldout(first)):
        start = column(first.evals, "eval/loss")[0]
        said = f"Reached a held-out loss of {heldout(first):.4f}"
        said += f", from {exact(start)} at step {first.evals[0]['step']:,}" * (len(first.evals) > 1)
        said += f", after {first.steps[-1]['step']:,} steps."
    else:
        loss = exact(number(first.steps[-1].get("train/loss")))
        said = f"Reached a training loss of {loss} after {first.steps[-1]['step']:,} steps."
        said += (
            " It has no held-out loss." if not first.evals else " Its held-out loss is not finite."
        )
    open_ = [run.letter for run in runs if status(run)[0] != "finished"]
    which = f"{', '.join(open_)}: not finished, so far only." if others else "It is not finished."
    return f"{said} {which}" if open_ else said


def beside(a, b) -> str:
    """How fast run b is and what it reached, compared with run a."""
    speed = median(b, "perf/toks_per_s") / (median(a, "perf/toks_per_s") or math.nan)
    times = "" if abs(speed - 1) < TIE else f"{speed:.2f} x "
    said = f"{b.letter} is {times}as fast as {a.letter}"
    if not math.isfinite(speed):
        said = f"{b.letter}: no speed to compare with {a.letter}'s"
    elif min(len(a.steps), len(b.steps)) < WARMUP + 3:
        said += " (few steps are logged)"
    new, old = heldout(b), heldout(a)
    if not math.isfinite(new - old):
        return f"{said}; a held-out loss of both is missing"
    if judged(a) != judged(b):
        return f"{said}; their held-out losses are of different data or tokens"
    level = "the same" if abs(new - old) < TIE * old else "a lower" if new < old else "a higher"
    seen = [number(run.steps[-1].get("data/label_tokens")) for run in (b, a)]
    share = seen[0] / (seen[1] or math.nan)
    return (
        f"{said}, at {level} held-out loss ({new:.4f}, {a.letter}: {old:.4f})"
        + f" after {share:.2f} x as many learnt tokens" * (abs(share - 1) >= TIE)
    )


def judged(run) -> list:
    """What must be equal for two held-out losses to mean the same."""
    tokenizer = run.config.get("tokenizer_name_or_path") or run.config.get("model_name_or_path")
    return [tokenizer, *(run.config.get(key) for key in JUDGED)]


def badge(run) -> str:
    return f'<b class="badge" style="background: {run.color}">{run.letter}</b>'


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table; on a narrow screen each cell is a line with its column's head. Cells are HTML."""
    names = [re.sub("<.*?>", "", cell) for cell in head]
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(
            f'<td data-head="{name}">{cell}</td>'
            for name, cell in zip(names[1:], row[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><tr>{top}</tr>{body}</table></div>'


def facts(run) -> dict[str, object]:
    """A card's facts: first how the run went, then its settings and hardware."""
    c, env = run.config, run.env
    last, step = run.steps[-1] if run.steps else {}, median(run, "perf/step_ms")
    mfu = median(run, "perf/mfu")
    of_old_run = "one process" if c.get("fsdp") is False else "FSDP"
    if "stages" in c:
        of_old_run = f"pipeline of {c['stages']} stages"
    tokens, labels = (short(number(last.get(f"data/{k}"))) for k in ("tokens", "label_tokens"))
    shown = {
        "held-out loss": exact(heldout(run)) if run.evals else "–",
        "training loss": exact(number(last.get("train/loss"))) if last else "–",
        "tokens per second": short(median(run, "perf/toks_per_s")),
        "peak memory": short(max(finite(peak_memory(run)), default=math.nan)) + " GB",
        "seen": f"{tokens} tokens, {labels} learnt",
        "skipped": f"{len(skipped(run)):,} of {len(run.steps):,} logged steps",
        "step": (f"{step:,.0f}" if step >= 100 else short(step)) + " ms",
        "MFU": short(100 * mfu) + " %" * math.isfinite(mfu),
        "duration": took(run),
        "learning rate": "–" if "lr" not in c else f"{c['lr']}, {c.get('lr_scheduler', '–')}",
        "parallelism": c.get("parallelism", of_old_run) if c else "–",
        "model": Path(str(c.get("model_name_or_path", "–"))).name,
        "data": Path(str(c.get("train_json", "–"))).name,
        "dtype": c.get("dtype", "–"),
        "device": f"{env.get('world_size', '–')} × {env.get('device', '–')}",
        "commit": env.get("revision") or "–",
        "last line logged": run.written,
    }
    evals = [(number(record["eval/loss"]), record["step"]) for record in run.evals]
    if evals := [pair for pair in evals if math.isfinite(pair[0])]:
        shown["best held-out loss"] = "{:.4f} at step {:,}".format(*min(evals))
    if right := finite(column(run.evals, "eval/exact")):
        at = [r["step"] for r in run.evals if math.isfinite(number(r.get("eval/exact")))]
        first = "at the start" if at[0] == 0 else f"at step {at[0]:,}"
        newest = max(column(run.steps, "step"), default=0)  # none yet if it has just started
        last = "at the end" if at[-1] == newest else f"at step {at[-1]:,}"
        shown["held-out answers exact"] = f"{right[0]:.1%} {first}"
        if len(at) > 1:
            shown["held-out answers exact"] += f", {right[-1]:.1%} {last}"
    return shown


def card(run) -> str:
    state, text = status(run)
    pairs = "".join(
        f"<div><dt>{name}</dt><dd>{esc(value)}</dd></div>" for name, value in facts(run).items()
    )
    notes = "".join(f'<p class="note">{esc(note)}</p>' for note in run.notes)
    return (
        f'<article class="card" style="border-top-color: {run.color}">'
        f'<h2>{badge(run)} <span class="name">{esc(run.folder)}</span></h2>'
        f'<p class="{state}">{esc(text)}</p><dl>{pairs}</dl>{notes}</article>'
    )


def figure(title: str, chart: str, caption: str) -> str:
    """A chart with its title and caption."""
    if not chart:
        return f'<figure><h3>{title}</h3><p class="note">Not recorded in these runs.</p></figure>'
    chart = chart.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return f"<figure><h3>{title}</h3>{chart}<figcaption>{caption}</figcaption></figure>"


def settings(run) -> dict[str, object]:
    """The settings and the environment of a run, flat."""
    flat = dict(run.config)
    for key, value in run.env.items():
        nested = isinstance(value, dict)
        flat |= {f"{key}: {k}": v for k, v in value.items()} if nested else {key: value}
    return {key: value for key, value in flat.items() if key not in HIDDEN}


HIDDEN = (  # what changes no result, noise, and what follows from other settings
    "output_dir", "local_rank", "overwrite", "resume", "resume_anyway", "resumed_step", "export",
    "report_to", "keep_last", "keep_best", "sample_tokens", "seed", "platform", "global_batch",
    "data_parallel", "parallelism",
)  # fmt: skip
UNUSED = {"None", "False", "0", "0.0", ""}


def settings_that_differ(runs: list) -> str:
    of_runs, rows = [settings(run) for run in runs], []
    absent = '<span class="absent">absent</span>'
    for key in dict.fromkeys(key for one in of_runs for key in one):
        cells = [esc(one[key]) if key in one else absent for one in of_runs]
        values = {str(one[key]) for one in of_runs if key in one}
        missing = absent in cells and values <= UNUSED  # a flag of one script, not used
        if len(set(cells)) > 1 and not missing:
            rows.append([esc(key).replace("_", "_<wbr>"), *cells])
    shown = table(["setting", *map(badge, runs)], rows) if rows else "<p>None.</p>"
    hidden = f'<p class="note">Not compared: {", ".join(HIDDEN)}.</p>'.replace("_", "_<wbr>")
    return f"<h2>Settings that differ</h2>{legend(runs)}{shown}{hidden}"


def answers(runs: list) -> str:
    """The sample answers at the end of the runs' logs, a row for each prompt."""
    asked = {}
    for run in runs:
        log = run.folder / "train.log"
        with open(log, "rb") if log.is_file() else io.BytesIO() as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - 100_000))
            text = file.read().decode("utf-8", "replace")
        for prompt, answer, expected in ANSWER.findall(text):
            asked.setdefault((prompt, expected), {})[run.letter] = answer
    rows = [
        [*map(esc, key), *(esc(given.get(run.letter, "–")) for run in runs)]
        for key, given in asked.items()
    ]
    shown = table(["prompt", "expected", *map(badge, runs)], rows)
    return f"<h2>Sample answers, as last printed</h2>{shown}" if rows else ""


def legend(runs: list) -> str:
    """The runs' letters and folders, if there are several."""
    keys = [f'<li>{badge(run)} <span class="name">{esc(run.folder)}</span></li>' for run in runs]
    return f'<ul class="legend">{"".join(keys)}</ul>' if len(runs) > 1 else ""


def charts(runs: list) -> str:
    """All figures, for runs that have steps."""
    counts = "; ".join(f"{run.letter}: {len(skipped(run)):,}" for run in runs)
    figures = [
        figure(
            "Loss over steps",
            line_chart(runs, "loss", "train/loss", "loss"),
            "Solid: training. Dashed: held-out. For a long run, the line is the median of each "
            "group of steps, and the band its range.",
        ),
        figure(
            "Loss over learnt tokens",
            line_chart(runs, "loss", "train/loss", "loss", over="data/label_tokens"),
            "The fair axis if runs take steps of different sizes. Learnt tokens have a label.",
        ),
        figure(
            "Gradient norm and skipped steps",
            line_chart(runs, "norm", "train/grad_norm", "gradient norm"),
            "The global norm before clipping. A cross at the bottom: a skipped step, whose norm "
            f"was not finite ({counts}).",
        ),
        figure(
            "Tokens per second",
            line_chart(runs, "speed", "perf/toks_per_s", "tokens per second"),
            "All processes together, without padding.",
        ),
        figure(
            "Memory of each rank",
            memory_chart(runs),
            "The peak so far: allocated on a GPU, resident on a CPU.",
        ),
        figure("Where a step's time goes", split_chart(runs), split_caption(runs)),
    ]
    return f'{legend(runs)}<div class="grid">{"".join(figures)}</div>{split_table(runs)}'


def split_caption(runs: list) -> str:
    parts = "".join(
        f'<li><i style="background: {color}"></i>{name}</li>' for name, color in PARTS.values()
    )
    untimed = ", ".join(run.letter for run in runs if not run.parts)
    more = f" Communication was not timed in {untimed}." if untimed else ""
    return f"""<ul class="legend">{parts}</ul> Medians without the first {WARMUP} logged steps.
<b>Exposed</b>: compute waited for it. <b>Waiting</b>: time beyond that of the fastest rank; in a
pipeline, the bubble and the cost of an uneven split. Exposed waiting is an upper bound and
exposed transfer a lower one; both are exact in a pipeline and on a CPU.{more}"""


def split_table(runs: list) -> str:
    names = [name for name, _ in PARTS.values()]
    head = ["milliseconds", "step", *names, "all communication", "all waiting"]
    keys, rows = ("step", *PARTS, "comm", "wait"), []
    for run in runs:
        for rank, parts in enumerate(run.parts):
            rows.append([f"{badge(run)} rank {rank}", *(f"{parts[key]:,.1f}" for key in keys)])
    return f"<h2>Parts of a step</h2>{table(head, rows)}" if rows else ""


def page(runs: list) -> str:
    """The whole page. A policy in its head forbids scripts and requests, whatever files say."""
    drawn = [run for run in runs if run.steps]
    names = ", ".join(str(run.folder) for run in runs)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignores the user's matplotlibrc
        matplotlib.rcParams.update(CHART)
        figures = charts(drawn) if drawn else '<p class="note">No step is logged yet.</p>'
    return f"""<!doctype html>
{MARKER}
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>llm_demo report: {esc(names)}</title><style>{STYLE}</style>
</head><body><header><p>llm_demo, training report of {datetime.now():%Y-%m-%d %H:%M:%S}</p>
<h1>{f"{len(runs)} runs compared" if len(runs) > 1 else esc(names)}</h1>
<p class="verdict">{verdict(runs)}</p></header><main>
<div class="cards">{"".join(map(card, runs))}</div>
{figures}
{answers(runs)}
{settings_that_differ(runs) if len(runs) > 1 else ""}</main>
<footer>Definitions: docs/report.md and docs/metrics.md.</footer>
</body></html>
"""


CHART = {  # matplotlib's settings
    "svg.fonttype": "none", "font.size": 11.5, "lines.solid_capstyle": "round",
    "axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": LINE,
}  # fmt: skip


if __name__ == "__main__":
    command(main)
