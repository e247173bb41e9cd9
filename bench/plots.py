"""Pictures of results: python -m bench.plots NAME ... [--check]

Draws bench/results/NAME.jsonl as bench/plots/NAME.png: throughput against slots per step, with
the crossover marked; peak memory; how a step's time is spent. Several files with commas between
them become one picture, named after the first: throughput of the strategies that all have, one
panel a file, as for links of different speed. --check fails if a picture was drawn from other
results."""

import argparse
import hashlib
import json
import re
from pathlib import Path

import numpy as np

from bench import store
from bench.table import in_order
from llm_demo.args import PlainParser
from llm_demo.errors import UserError
from llm_demo.files import ROOT
from llm_demo.process import command

PLOTS = ROOT / "bench/plots"


def series(name: str) -> dict[str, list[dict]]:
    """Group successful rows by engine and flags, ordered by slots per step."""
    groups = {}
    for result in in_order(store.read(name)):
        if result["status"] == "ok" and "median_comm_ms" in result["summary"]:
            flags = result["row"]["flags"].replace("--schedule ", "").replace("--", "")
            groups.setdefault(f"{result['row']['engine']} {flags}".strip(), []).append(result)
    for rows in groups.values():
        rows.sort(key=slots)
    return groups


def slots(result: dict) -> int:
    """Return T_eff, the slots of an optimizer step."""
    return result["config"]["global_batch"] * result["row"]["seq_len"]


def crossover(a: list[tuple], b: list[tuple]) -> tuple | None:
    """Return the first (x, y) where line b rises above line a, or None if it never does.

    A lead of less than 1 % is a tie: the steps of a run differ by more. Lines are points (x, y) of
    growing x, joined by straight segments. If b starts above a, that is the first point that both
    lines cover."""

    def at(line, x):
        return float(np.interp(x, *zip(*line, strict=True)))

    low, high = max(a[0][0], b[0][0]), min(a[-1][0], b[-1][0])
    xs = [x for x in sorted({x for x, _ in [*a, *b]}) if low <= x <= high]
    lead = [at(b, x) - at(a, x) for x in xs]
    for i, ahead in enumerate(lead):
        if ahead > at(a, xs[i]) / 100:
            x = float(np.interp(0, lead[i - 1 : i + 1], xs[i - 1 : i + 1])) if i else xs[0]
            return x, at(b, x)
    return None


def draw(results: str, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = series(results)
    color_of = {name: f"C{i}" for i, name in enumerate(groups)}
    figure, (speed, memory, split) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    lines, title = {}, "throughput"
    for name, rows in groups.items():
        lines[name] = [(slots(r) / 1e3, r["summary"]["median_slots_per_s"] / 1e3) for r in rows]
        speed.plot(*zip(*lines[name], strict=True), "o-", color=color_of[name], label=name)
    for name in lines.keys() - {"fsdp"} if "fsdp" in lines else ():
        title = "throughput: no pipeline leads FSDP" if title == "throughput" else title
        if point := crossover(lines["fsdp"], lines[name]):
            title = "throughput, crossover dotted"
            speed.axvline(point[0], color=color_of[name], linestyle=":")
            speed.annotate(f"{name} ahead from {point[0]:.0f}k", point)
    speed.set(xlabel="T_eff, thousand slots per step", ylabel="thousand slots/s", ylim=(0, None))
    speed.set_title(title)
    speed.legend()

    bars = [(name, r) for name, rows in groups.items() for r in rows]
    labels = [f"{name} {r['row']['micro']}x{r['row']['ga']}" for name, r in bars]
    colors = [color_of[name] for name, _ in bars]
    memory.bar(labels, [max(r["summary"]["peak_mem_gb"]) for _, r in bars], color=colors)
    memory.set(title="peak memory of the fullest rank", ylabel="2^30 bytes")

    bottom = [0.0] * len(bars)
    for part, color in (
        ("compute and idle", "0.7"), ("exposed transfer", "tab:cyan"), ("waiting", "tab:purple"),
    ):  # fmt: skip
        heights = [shares(r["summary"])[part] for _, r in bars]
        split.bar(labels, heights, bottom=bottom, color=color, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    split.set(title="a step of the rank that waits most", ylabel="share of the step")
    split.legend()
    for axes in (memory, split):
        axes.tick_params(axis="x", rotation=90)
        axes.set_xlabel("engine, micro x GA")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.suptitle(setup_of([r for rows in groups.values() for r in rows]))
    figure.savefig(file, dpi=80, metadata={"Description": digest(results)})
    plt.close(figure)


def draw_panels(names: list[str], file: Path) -> None:
    """Throughput against slots per step: a panel for each file, a line for each engine and its
    flags that all files have, in the same colour everywhere."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [series(name) for name in names]
    common = in_all(panels)
    if not common:
        raise UserError(f"{', '.join(names)}: no engine with the same flags is in all of them")
    colors = {name: f"C{i}" for i, name in enumerate(common)}
    size = 5 * len(panels) + 3.2, 4.6
    figure, axes = plt.subplots(
        1, len(panels), figsize=size, sharex=True, sharey=True, layout="constrained"
    )
    drawn = {}
    for axis, groups in zip(axes, panels, strict=True):
        for name in common:
            xs = [slots(r) / 1e3 for r in groups[name]]
            ys = [r["summary"]["median_slots_per_s"] / 1e3 for r in groups[name]]
            (drawn[name],) = axis.plot(xs, ys, "o-", color=colors[name])
        axis.set(xlabel="thousand slots per step", ylim=(0, None))
        setup = setup_of([r for rows in groups.values() for r in rows])
        axis.set_title("\n".join(setup.rsplit(", ", 1)), fontsize=9)
    axes[0].set_ylabel("thousand slots/s")
    figure.legend([*drawn.values()], [*drawn], loc="outside right center")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80, metadata={"Description": digest(*names)})
    plt.close(figure)


def in_all(panels: list[dict]) -> list[str]:
    """Return the keys that all panels have, in the order of the first."""
    return [name for name in panels[0] if all(name in groups for groups in panels)]


def setup_of(results: list[dict]) -> str:
    """Return models, devices and link of the results, for the title of their picture."""
    setups = set()
    for result in results:
        row, env = result["row"], result["env"]
        link = row["env"] or re.sub(r"^NV(\d+)$", r"NVLink x\1", env["link"] or "")
        devices = f"{env['world_size']} x {env['device'].split(' (')[0]}"
        setups.add(", ".join(filter(None, (Path(row["model"]).name, devices, link))))
    return "; ".join(sorted(setups))


def shares(summary: dict) -> dict[str, float]:
    """Split the step of the rank that waits most; the shares add up to 1."""
    keys = "median_comm_exposed_ms", "median_comm_wait_ms"
    exposed, wait = (summary[key] or [0.0] for key in keys)  # None: not measured
    rank = max(range(len(wait)), key=lambda r: wait[r])
    # part of the waiting may be hidden behind compute
    exposed, wait = exposed[rank], min(wait[rank], exposed[rank])
    step = summary["median_step_ms"]
    parts = {"compute and idle": step - exposed, "exposed transfer": exposed - wait}
    return {name: ms / step for name, ms in {**parts, "waiting": wait}.items()}


def digest(*names: str) -> str:
    """Return a hash of the results drawn; each picture contains its own."""
    shown = [
        (engine, slots(r), shares(r["summary"]), r["summary"]["median_slots_per_s"],
         r["summary"]["peak_mem_gb"])
        for name in names for engine, rows in series(name).items() for r in rows
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
        for name in names:
            if not series(name):
                raise UserError(f"{name}: no results to draw")
        file = PLOTS / f"{names[0]}.png"
        if not args.check:
            draw(*names, file) if len(names) == 1 else draw_panels(names, file)
            print(file)
        elif not file.exists() or digest(*names).encode() not in file.read_bytes():
            raise UserError(f"{file} is out of date: run python -m bench.plots {picture}")
    return 0


if __name__ == "__main__":
    command(main)
