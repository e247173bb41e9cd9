"""Pictures of a folder of results: python -m bench.plots FOLDER ... [--check]

From the rows of bench/results/FOLDER, bench/plots/FOLDER.png: throughput against tokens a step with
the crossover marked, memory, and where a step's time goes. --check fails where a picture is of
other results."""

import hashlib
import json
import sys
from pathlib import Path

from bench.run import RESULTS
from bench.table import rows_of
from llm_demo.errors import UserError
from llm_demo.files import ROOT

PLOTS = ROOT / "bench/plots"
COLORS = {"fsdp": "tab:blue", "pp": "tab:orange", "pp dualpipev": "tab:red"}


def series(folder: Path) -> dict[str, list[dict]]:
    """{engine and schedule: its rows that worked, by tokens a step}."""
    found = {}
    for result in rows_of(folder):
        if result["status"] == "ok" and "median_comm_ms" in result["summary"]:
            schedule = " dualpipev" if "dualpipev" in result["row"]["flags"] else ""
            found.setdefault(result["row"]["engine"] + schedule, []).append(result)
    for rows in found.values():
        rows.sort(key=tokens)
    return found


def tokens(result: dict) -> int:
    return result["config"]["global_batch"] * result["row"]["seq_len"]


def crossover(a: list[tuple], b: list[tuple]) -> tuple | None:
    """The first point where line b, (x, y) at growing x, rises above line a; between points both
    are straight. None if it never does, (x, y) of b's first point if it is above from the start."""

    def at(line, x):
        for (x0, y0), (x1, y1) in zip(line, line[1:], strict=False):
            if x0 <= x <= x1:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        return None

    xs = sorted({x for x, _ in a} | {x for x, _ in b})
    lead = [(x, at(b, x) - at(a, x)) for x in xs if at(a, x) is not None and at(b, x) is not None]
    for i, (x, ahead) in enumerate(lead):
        if ahead > 0:
            if i:
                x0, behind = lead[i - 1]
                x = x0 + (x - x0) * -behind / (ahead - behind)
            return x, at(b, x)
    return None


def draw(folder: Path, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = series(folder)
    if not found:
        raise UserError(f"{folder}: no results to draw")
    figure, (speed, memory, split) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    lines, title = {}, "throughput"
    for name, rows in found.items():
        lines[name] = [(tokens(r) / 1e3, r["summary"]["median_slots_per_s"] / 1e3) for r in rows]
        speed.plot(*zip(*lines[name], strict=True), "o-", color=COLORS[name], label=name)
    for name in lines.keys() - {"fsdp"} if "fsdp" in lines else ():
        title = "throughput: FSDP ahead everywhere" if title == "throughput" else title
        if point := crossover(lines["fsdp"], lines[name]):
            title = "throughput, crossover dotted"
            speed.axvline(point[0], color=COLORS[name], linestyle=":")
            speed.annotate(f"{name} ahead from {point[0]:.0f}k", point)
    speed.set(xlabel="thousand tokens a step", ylabel="thousand tokens/s, all GPUs", ylim=(0, None))
    speed.set_title(title)
    speed.legend()

    bars = [(name, r) for name, rows in found.items() for r in rows]
    labels = [f"{name} {r['row']['micro']}x{r['row']['ga']}" for name, r in bars]
    colors = [COLORS[name] for name, _ in bars]
    memory.bar(labels, [max(r["summary"]["peak_mem_gb"]) for _, r in bars], color=colors)
    memory.set(title="peak memory of the fullest rank", ylabel="2^30 bytes")

    bottom = [0.0] * len(bars)
    for part, color in (
        ("compute and idle", "0.7"), ("exposed transfer", "tab:green"), ("waiting", "tab:purple"),
    ):  # fmt: skip
        heights = [shares(r["summary"])[part] for _, r in bars]
        split.bar(labels, heights, bottom=bottom, color=color, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    split.set(title="a step of the rank that waits most", ylabel="share of the step")
    split.legend()
    for axes in (memory, split):
        axes.tick_params(axis="x", rotation=90)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80, metadata={"Description": digest(folder)})
    plt.close(figure)


def shares(summary: dict) -> dict[str, float]:
    """Of the rank that waits most: a step's parts, 1 together."""
    exposed, wait = summary["median_comm_exposed_ms"], summary["median_comm_wait_ms"]
    rank = max(range(len(wait)), key=lambda r: wait[r])
    # what was waited for may be hidden behind compute
    exposed, wait = exposed[rank], min(wait[rank], exposed[rank])
    step = summary["median_step_ms"]
    parts = {"compute and idle": step - exposed, "exposed transfer": exposed - wait}
    return {name: ms / step for name, ms in {**parts, "waiting": wait}.items()}


def digest(folder: Path) -> str:
    """What the pictures of these results carry inside."""
    shown = [
        (name, tokens(r), shares(r["summary"]), r["summary"]["median_slots_per_s"],
         r["summary"]["peak_mem_gb"]) for name, rows in series(folder).items() for r in rows
    ]  # fmt: skip
    return f"results {hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]}"


def main() -> int:
    folders = [a for a in sys.argv[1:] if a != "--check"]
    if not folders:
        raise UserError("name a folder below bench/results: python -m bench.plots my-box/teff")
    for name in folders:
        folder, file = RESULTS / name, PLOTS / f"{name}.png"
        if "--check" not in sys.argv:
            draw(folder, file)
            print(f"{file}")
        elif not file.exists() or digest(folder).encode() not in file.read_bytes():
            raise UserError(f"{file} is not of the results: python -m bench.plots {name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)
