"""Markdown tables of bench/results: python -m bench.table [--check] [NAME ...]

With names it prints the tables of bench/results/NAME.jsonl (my-box/seed). Without, it updates the
tables between <!-- table: NAME --> and <!-- end --> in README.md and docs/*.md; --check only fails
if one of them differs from the results. What may follow a name:
  #only=REGEX         the rows whose setting matches
  #sizes              a line for each way, a column for each number of slots per step
  #toks/s, #peak_mem  each model's rows divided by its first; NAME,NAME: by that of the same file
  #pp or #fsdp        one script's rows with the batch in columns of its own
  #ways               what --measure printed, the fastest first"""

import argparse
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path

from bench import store
from bench.presets import ONE_OF
from llm_demo.core.errors import UserError
from llm_demo.flags.parsing import PlainParser
from llm_demo.machine.files import ROOT
from llm_demo.machine.process import command

MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.S)
# Columns, the most important first: those that are empty, or too wide for the page, are left out.
HEAD = (
    "setting", "step_ms", "toks/s", "peak_mem", "T_eff", "host_mem", "learnt/s", "comm_ms",
    "exposed", "MFU",
)  # fmt: skip
QUALITY = ("rank", "bytes sent", "held-out loss at the end", "held-out examples answered exactly")
WAYS = ("way", "step_ms", "toks/s", "peak_mem", "ratio", "batch", "comm_ms")
BATCH = ("micro_bsz", "GA", "ckpt", "dtype")
SHORT = (*BATCH, "step_ms", "toks/s", "peak_mem", "comm_ms")
MOST_COLUMNS = 8

# Flags in the column "setting", and how they are called there; a flag's value follows.
SHORT_FLAGS = {
    "activation_memory_budget": "budget",
    "reshard_after_forward": "reshard",
    "optimizer_on_host": "host",
    "device_memory_gb": "limit",
    "activations_on_host": "activations on host",
    "sequence_parallel": "rows over",
    "expert_parallel": "experts over",
    "tensor_parallel": "matrices over",
    "lora_rank": "LoRA",
    "base_bits": "bits",
    "psgd_rank": "PowerSGD",
    "optim_state": "moments",
    "no_copy_engines": "NCCL",
    "schedule": "",  # the value says it
    "attn_impl": "",
    "deepspeed_config": "",
}

COMPARED = {
    "toks/s": ("{:,.0f}", lambda summary: summary["median_slots_per_s"]),
    "peak_mem": ("{:.1f}", lambda summary: max(store.peaks_of(summary))),
}
APPROXIMATE = re.compile("--psgd_rank|--fp8")  # gradients are not those of a plain loop
ROUGH = "≈"  # marks such a setting
RETRIED = "*"  # marks the memory of a row whose allocator ran dry after step 3

PAGE = 796  # pixels of a page's text, as forges show it
PADDING = 27  # pixels of a cell beside its text
WRAPPED = 240  # pixels of the first column; longer cells take two lines
WIDTHS = {  # of Helvetica's characters, in thousandths of the font's size; others have 556
    char: width
    for width, chars in {
        222: "'ijl|",
        278: " !,./:;I[]ft",
        333: "()-r{}",
        389: "*",
        500: "Jckvxyz",
        584: "+<=>~",
        667: "&ABEFKLPSTVXYZ",
        722: "CDHNRUw",
        778: "GOQ",
        833: "Mm",
        889: "%",
        944: "W",
    }.items()
    for char in chars
}


def pixels(text: str, bold: bool = False) -> float:
    """Estimate the width of a cell's text: marks of links and emphasis take no room, code has a
    font of its own."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    code = re.findall("`([^`]*)`", text)
    plain = re.sub("`[^`]*`", "", text)
    width = 16 * sum(WIDTHS.get(char, 556) for char in plain) / 1000
    if bold:
        width *= 1.08
    return width + sum(8.2 * len(words) + 6 for words in code)


def width_of(columns: list[tuple]) -> float:
    """Estimate the width of a table. columns: (title, *cells)."""
    widths = [max([pixels(title, bold=True), *map(pixels, cells)]) for title, *cells in columns]
    return min(widths[0], WRAPPED) + sum(widths[1:]) + PADDING * len(columns)


def markdown(lines) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def in_columns(columns: list[tuple]) -> str:
    """Return a table of (title, *cells); a column for which there is no room is left out."""
    kept = []
    for column in columns:
        if len(kept) < MOST_COLUMNS and width_of([*kept, column]) <= PAGE:
            kept.append(column)
    return markdown(zip(*[(title, "---", *cells) for title, *cells in kept], strict=True))


# ---------------------------------------------------------------- rows


def in_order(results: list[dict]) -> list[dict]:
    """Sort results by their settings."""
    order = ("model", "engine", "ckpt", "micro", "ga", "dtype", "data", "flags", "env")
    return sorted(results, key=lambda r: [str(r["row"][k]).rjust(8) for k in order])


def flags_of(row: dict) -> list[tuple[str, str]]:
    """(name, value) of a row's flags, without those of data."""
    found = re.findall(r"--(\w+)((?: (?!--)\S+)*)", row["flags"])
    return [(name, value.strip()) for name, value in found if name != "tokenizer_name_or_path"]


def words_of(row: dict) -> list[str]:
    """A row's checkpointing, data and flags by their short names."""
    words = ["ckpt"] if row["ckpt"] else []
    if row["data"] != "full":
        words.append(Path(row["data"]).stem)
    for name, value in flags_of(row):
        value = re.sub(r"\S*/|\.json$|^rowwise_gw$", "", value)
        words.append(f"{SHORT_FLAGS.get(name, name)} {value}".strip())
    if APPROXIMATE.search(row["flags"]):
        words[-1] += f" {ROUGH}"
    return words


def name_of_model(row: dict) -> str:
    return re.sub(r"(\d)b", r"\1B", Path(row["model"]).name.removeprefix("qwen3-"))


def settings_of(results: list[dict]) -> list[str]:
    """The settings of rows: model, script, micro-batch size x GA, then what differs from the
    defaults. The model, variables and the dtype are named if the rows have several."""
    several = {key: len({r["row"][key] for r in results}) > 1 for key in ("model", "env", "dtype")}
    settings = []
    for row in (result["row"] for result in results):
        head = f"{row['engine']} {row['micro']} x {row['ga']}"
        if several["model"]:
            head = f"{name_of_model(row)} {head}"
        words = [head, *words_of(row)]
        words += [row[key] for key in ("dtype", "env") if several[key] and row[key]]
        settings.append(", ".join(words))
    return settings


def legend(results: list[dict]) -> str:
    """A sentence that says what the short names of rows stand for, "" if there are none."""
    names = dict.fromkeys(name for r in results for name, _ in flags_of(r["row"]))
    texts = [f"{SHORT_FLAGS[name]} = `--{name}`" for name in names if SHORT_FLAGS.get(name)]
    if any(APPROXIMATE.search(r["row"]["flags"]) for r in results):
        texts.append(f"{ROUGH} = approximate")
    return f"{', '.join(texts)}." if texts else ""


def below(*sentences: str) -> str:
    """The line below a table."""
    text = " ".join(filter(None, sentences))
    text = textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)
    return f"\n{text}\n" if text else ""


def peaks(result: dict) -> str:
    """A row's memory: of each rank, once if it is the same for all."""
    summary = result["summary"]
    found = [f"{peak:.1f}" for peak in store.peaks_of(summary) or ()]
    if ONE_OF in result["row"]["flags"] or len({*found}) == 1:
        found = found[:1]
    if summary.get("late_alloc_retries"):
        found.append(RETRIED)
    return " / ".join(found).replace(f" / {RETRIED}", RETRIED)


def line_of(result: dict) -> dict[str, str]:
    """The cells of a row by their titles, without the setting. Times are medians."""
    if result["status"] != "ok":
        return {"step_ms": result["status"]}
    row, summary = result["row"], result["summary"]

    def worst(key):
        return f"{max(summary[key]):.1f}" if any(summary.get(key) or ()) else "n/a"

    line = {
        "step_ms": f"{summary['median_step_ms']:.1f}",
        "toks/s": f"{summary['median_slots_per_s']:,.0f}",
        "peak_mem": peaks(result),
        "T_eff": f"{result['config']['global_batch'] * row['seq_len']:,}",
        "comm_ms": worst("median_comm_ms"),
        "exposed": worst("median_comm_exposed_ms"),
        "MFU": f"{summary['mfu']:.1%}" if summary.get("mfu") else "n/a",
    }
    if re.search("offload|on_host", row["flags"]) or row["engine"] == "zero":
        line["host_mem"] = f"{sum(summary.get('peak_host_gb', ())):.1f}"
    if row["data"] != "full" and "median_label_toks_per_s" in summary:
        line["learnt/s"] = f"{summary['median_label_toks_per_s']:,.0f}"
    return line


# ---------------------------------------------------------------- tables


def rows(results: list[dict]) -> str:
    """A line for each result."""
    lines = [line_of(result) for result in results]
    columns = [("setting", *settings_of(results))]
    for title in HEAD[1:]:
        cells = [line.get(title, "") for line in lines]
        same = title == "T_eff" and len({*cells} - {""}) == 1  # the text names it
        if {*cells} - {"", "n/a"} and not same:
            columns.append((title, *cells))
    return in_columns(columns)


def nine(results: list[dict]) -> str:
    """One script's rows, with the batch in columns of its own."""
    lines = []
    for result in results:
        row = result["row"]
        batch = [str(row["micro"]), str(row["ga"]), "FT"[row["ckpt"]], row["dtype"]]
        lines.append(dict(zip(BATCH, batch, strict=True)) | line_of(result))
    return in_columns([(title, *(line.get(title, "") for line in lines)) for title in SHORT])


def by_size(results: list[dict]) -> str:
    """A line for each way: thousand slots per second at each number of slots per step, and the
    memory at the largest. The fastest there is the first."""
    found, sizes = {}, set()
    for result in results:
        size = result["config"]["global_batch"] * result["row"]["seq_len"]
        words = [result["row"]["engine"], *words_of(result["row"])]
        found.setdefault(", ".join(words), {})[size] = result
        sizes.add(size)
    sizes = sorted(sizes)
    ways = sorted(found, key=lambda way: -rate(found[way][sizes[-1]]))
    columns = [("way", *ways)]
    for size in sizes:
        cells = [f"{rate(found[way][size]):.0f}" if size in found[way] else "" for way in ways]
        columns.append((f"{size:,}", *cells))
    columns.append(("peak_mem", *(peaks(found[way][sizes[-1]]) for way in ways)))
    return in_columns(columns)


def rate(result: dict) -> float:
    return result["summary"]["median_slots_per_s"] / 1e3


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
    """A way to train in words: the script and its flags, without those of data."""
    words = re.sub(r"--tokenizer_name_or_path \S+", "", flags).replace("--", "")
    way = " ".join([engine, *words.split()])
    return f"{way} (approximate)" if APPROXIMATE.search(flags) else way


def ways(results: list[dict]) -> str:
    """The table of --measure, and its legend: the fastest first, then rows without a time. step_ms
    is the median, with the quartiles; ratio is its share of the fastest."""
    done = [result for result in results if result["status"] == "ok"]
    done.sort(key=lambda result: result["summary"]["median_step_ms"])
    lines = []
    for result in done:
        summary = result["summary"]
        step_ms = summary["median_step_ms"]
        low, high = summary["quartiles_step_ms"]
        fastest = done[0]["summary"]["median_step_ms"]
        lines.append(
            [
                f"{step_ms:.1f} ({low:.0f}–{high:.0f})",
                f"{summary['median_slots_per_s']:,.0f}",
                peaks(result),
                f"{step_ms / fastest:.2f}",
            ]
        )
    failed = [result for result in results if result["status"] != "ok"]
    lines += [[result["status"], "", "", ""] for result in failed]
    lines = [
        [
            ", ".join([r["row"]["engine"], *words_of(r["row"])]),
            *line,
            f"{r['row']['micro']} x {r['row']['ga']}",
            str(r.get("summary", {}).get("row", {}).get("comm_ms", "")),
        ]
        for r, line in zip(done + failed, lines, strict=True)
    ]
    lines = [WAYS, ["---"] * len(WAYS), *lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = markdown(
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    )
    return text + below(legend(results))


def compared(files: list[list[dict]], column: str) -> str:
    """A table of one column of the results: for each model the number of its first row, then the
    others' divided by that of the same file."""
    text, number = COMPARED[column]
    first, shares, names = {}, {}, {}
    for results in files:
        base = {}
        for result in (result for result in results if result["status"] == "ok"):
            model = name_of_model(result["row"])
            value = number(result["summary"])
            way = " ".join(words_of(result["row"] | {"ckpt": False})) or result["row"]["engine"]
            first.setdefault(model, (way, text.format(value)))
            names.setdefault(way)
            if model in base:
                shares[model, way] = f"{value / base[model]:.2f} x"
            base.setdefault(model, value)
    start = next(iter(names))
    others = [way for way in names if way != start]
    columns = [("model", *first), (f"{start}: {column}", *(value for _, value in first.values()))]
    for way in others:
        columns.append((way, *(shares.get((model, way), "") for model in first)))
    return in_columns(columns)


def chosen(name: str) -> tuple[list[list[dict]], str]:
    """(the results of each file that a mark names, the view of them)."""
    names, *views = name.split("#")
    only = [view.removeprefix("only=") for view in views if view.startswith("only=")]
    files = []
    for file in names.split(","):
        results = store.read(file)
        if not results:
            raise UserError(f"no results in {store.file_of(file)}")
        if only:
            settings = zip(results, settings_of(results), strict=True)
            results = [result for result, setting in settings if re.search(only[0], setting)]
        files.append(results)
    return files, "".join(view for view in views if not view.startswith("only="))


def table(name: str) -> str:
    """Return the table of a mark. Those of bench.checkpoints have their own columns."""
    files, view = chosen(name)
    results = files[0]
    if "columns" in results[0]:
        titles = list(results[0]["columns"])
        columns = [(title, *(r["columns"][title] for r in results)) for title in titles]
        if len(columns) > MOST_COLUMNS:  # a column for each result then
            columns = [*zip(*columns, strict=True)]
        return markdown(zip(*[(title, "---", *cells) for title, *cells in columns], strict=True))
    if all("--psgd_rank" in result["row"]["flags"] for result in results):
        lines = map(quality_of, sorted(results, key=rank_of))
        return markdown([QUALITY, ["---"] * len(QUALITY), *lines])
    if view == "ways":
        return ways(results)
    if view in COMPARED:
        return compared([in_order(file) for file in files], view)
    results = in_order(results)
    if view == "sizes":
        return by_size(results)
    if view:
        return nine([result for result in results if result["row"]["engine"] == view])
    return rows(results)


def notes_of(results: list[dict]) -> str:
    """Return sentences that name the commits of a table's rows, "" if they are not recorded, and
    what its memory is."""
    ran = [r for r in results if r.get("status", "ok") == "ok"]  # others record no commit
    found = Counter(str(r.get("env", {}).get("revision") or "")[:7] for r in ran)
    if not all(found):
        return ""
    commits = [f"{commit} ({n})" if len(found) > 1 else commit for commit, n in found.items()]
    text = f"Measured at {', '.join(commits)}."
    summaries = [r["summary"] for r in results if "summary" in r]
    if all("--psgd_rank" in r["row"]["flags"] for r in results if "row" in r):
        summaries = []  # that table has no memory
    older = [s for s in summaries if not s.get("reserved_gb")]
    if older:
        some = "" if len(older) == len(summaries) else f" of {len(older)} rows"
        text += f" `peak_mem`{some} is what was allocated; a card needs more."
    if any(s.get("late_alloc_retries") for s in summaries):
        text += f" {RETRIED}: memory ran out after step 3, and the allocator freed its cache."
    return text


def footer(name: str, notes: bool) -> str:
    """The line below a mark's table: what was measured, and short names."""
    files, view = chosen(name)
    results = [result for file in files for result in file]
    measured = notes_of(results) if notes else ""
    short = "row" in results[0] and view in ("", "sizes")
    return below(measured, legend(results) if short else "")


def render(text: str, notes: bool) -> str:
    """Return a page's text with every marked table made from the results. notes: below each, name
    the commits and how many rows were measured at each."""

    def made(match: re.Match) -> str:
        return match[1] + table(match[2]) + footer(match[2], notes) + match[4]

    return MARKED.sub(made, text)


def rendered(page: Path) -> str:
    """Return the text that a page should have. The README's tables are in docs too, with notes."""
    return render(page.read_text("utf-8"), notes=page.parent != ROOT)


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
        print(table(name) + footer(name, notes=False))
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
