"""A run's folder read back: its settings, the records of its steps, their medians."""

import contextlib
import json
import math
import statistics
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

from llm_demo.core.errors import UserError
from llm_demo.job.parsing import MAX_INT
from llm_demo.job.process import read_text
from llm_demo.job.text import counted

WARMUP = 2  # logged steps left out of the medians: allocator, kernels and caches warm up


def read_run(folder: Path) -> SimpleNamespace:
    """Attributes: config, env and summary (dicts, empty if the file is missing), steps and evals
    (records of metrics.jsonl, in order), notes (what could not be read), parts (see step_parts).

    Raises UserError if the folder holds no run, OSError if it can't be read."""
    if not folder.is_dir():
        problem = "is a file: name the run's folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {problem}")
    file = folder / "metrics.jsonl"
    if not (file.exists() or (folder / "config.json").exists()):
        raise UserError(f"{folder} is not a run's folder: it has no metrics.jsonl or config.json")
    run = SimpleNamespace(folder=folder, notes=[], written="–")
    for name in ("config", "env", "summary"):
        path = folder / f"{name}.json"
        content = parse(read_text(path)) if path.exists() else {}
        if not isinstance(content, dict):
            run.notes.append(f"{name}.json could not be read")
            content = {}
        setattr(run, name, content)
    if "model_type" in run.config and not file.exists():
        raise UserError(f"{folder} is a model's folder, not a run's")
    lines = []
    if file.exists():
        lines, broken = read_records(file)
        run.written = f"{datetime.fromtimestamp(file.stat().st_mtime):%Y-%m-%d %H:%M:%S}"
        if broken:
            run.notes.append(f"{counted(broken, 'unreadable line')} of metrics.jsonl skipped")
    steps, evals = {}, {}
    for _, record in lines:
        if "train/loss" in record:
            steps[record["step"]] = record
        elif "eval/loss" in record:
            evals[record["step"]] = record
    run.steps, run.evals = ([by[step] for step in sorted(by)] for by in (steps, evals))
    run.parts = step_parts(run)
    return run


def settings_of(resume: str | None, folder: Path) -> dict:
    """config.json of the run that --resume names, which must have a seq_len; else {}. resume: a
    run, one of its checkpoints, "auto" for the run in `folder`, or None."""
    if not resume:
        return {}
    named = folder if resume == "auto" else Path(resume)
    for file in (named / "config.json", named.parent.parent / "config.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            settings = parse(read_text(file))
            if 8 <= int(settings["seq_len"]) <= MAX_INT:
                return {**settings, "seq_len": int(settings["seq_len"])}
    return {}


def read_records(file: Path) -> tuple[list[tuple[str, dict]], int]:
    """([(line, its record)], number of lines without one) of a metrics.jsonl. Raises UserError for
    a pipe or a device, OSError if it can't be read."""
    records, broken = [], 0
    for line in filter(str.strip, read_text(file).split("\n")):
        record = parse(line)
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is int and 0 <= step < 2**53:
            records.append((line, record))
        else:
            broken += 1
    return records, broken


def parse(text: str):
    """JSON, or None if it is truncated or invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def number(value) -> float:
    """A float; NaN for anything else, infinity included."""
    usable = type(value) in (int, float) and abs(value) < 1e300
    return float(value) if usable else math.nan


def column(records: list[dict], key: str) -> list[float]:
    return [number(record.get(key)) for record in records]


def finite_of(values) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def middle(values) -> float:
    """Median of the finite values; NaN if there are none."""
    return statistics.median(finite_of(values) or [math.nan])


def median(steps: list[dict], key: str) -> float:
    """The median of the records of steps, without the first WARMUP of them; NaN if none has it."""
    return middle(column(steps[WARMUP:] or steps, key))


def of_ranks(steps: list[dict], key: str) -> list[float]:
    """The same for each rank; empty if not recorded. After a resume with a different number of
    ranks, only those steps count."""
    lists = [r[key] for r in steps[WARMUP:] or steps if isinstance(r.get(key), list)]
    ranks = [map(number, values) for values in lists if len(values) == len(lists[-1])]
    return [middle(values) for values in zip(*ranks, strict=True)]


def peaks_of(record: dict) -> list | None:
    """Peak memory of each rank so far in 2^30 bytes: reserved on a GPU, resident on a CPU."""
    return record.get("perf/reserved_gb") or record.get("perf/peak_mem_gb")


def step_parts(run) -> list[dict[str, float]]:
    """One dict per rank of where a step's time went, medians in ms: compute, transfer and waiting,
    which add up to `step`. Empty if communication was not timed. How much waiting was hidden behind
    compute is not recorded, so as much of it as fits is counted as exposed. That is exact if all
    communication is exposed, as in a pipeline or on a CPU; otherwise `waiting` is an upper bound
    and `transfer` a lower one."""
    keys = ("perf/comm_exposed_ms", "perf/comm_wait_ms")
    exposed, wait = (of_ranks(run.steps, key) for key in keys)
    step = median(run.steps, "perf/step_ms")
    if len(exposed) != len(wait) or math.isnan(sum([step, *exposed, *wait])):
        return []
    ranks = []
    for e, w in zip(exposed, wait, strict=True):
        e = min(e, step)
        waiting = min(w, e)
        parts = {"compute": step - e, "transfer": e - waiting, "waiting": waiting}
        ranks.append({**parts, "step": step})
    return ranks


def skipped(run) -> list[int]:
    return [record["step"] for record in run.steps if record.get("train/skipped") is True]


def status(run) -> str:
    """Whether a run has finished, for the reader."""
    if not run.steps:
        return "no step logged yet"
    last, wanted = run.steps[-1]["step"], number(run.config.get("max_steps"))
    if number(run.summary.get("steps")) >= max(last, wanted):  # `last` if wanted is NaN
        return f"finished, {last:,} steps"
    total = f" of {wanted:,.0f}" if wanted > 0 else ""
    return f"running or interrupted at step {last:,}{total}"
