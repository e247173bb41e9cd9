"""Reads a run's folder back: its settings, the records of its steps, their medians."""

import contextlib
import json
import math
import statistics
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

from llm_demo.core.errors import UserError, counted
from llm_demo.job.parsing import MAX_INT
from llm_demo.job.process import read_text
from llm_demo.job.summary import WARMUP


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


def finite(values) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def middle(values) -> float:
    """Median of the finite values; NaN if there are none."""
    return statistics.median(finite(values) or [math.nan])


def median(run, key: str) -> float:
    return middle(column(run.steps[WARMUP:] or run.steps, key))


def of_ranks(run, key: str) -> list[float]:
    """Median of each rank; empty if not recorded. After a resume with a different number of ranks,
    only those steps count."""
    records = run.steps[WARMUP:] or run.steps
    lists = [record[key] for record in records if isinstance(record.get(key), list)]
    ranks = [map(number, values) for values in lists if len(values) == len(lists[-1])]
    return [middle(values) for values in zip(*ranks, strict=True)]


def peak_memory(run) -> list[float]:
    """Peak of each rank so far, in 2^30 bytes; empty if not recorded."""
    lists = [gb for r in run.steps if isinstance(gb := r.get("perf/peak_mem_gb"), list)]
    return list(map(number, lists[-1])) if lists else []


def step_parts(run) -> list[dict[str, float]]:
    """One dict per rank of where a step's time went, medians in ms: compute, transfer and waiting,
    which add up to `step`; `comm` and `wait` in total, hidden behind compute or not. Empty if
    communication was not timed. How much waiting was hidden behind compute is not recorded, so as
    much of it as fits is counted as exposed. That is exact if all communication is exposed, as in a
    pipeline or on a CPU; otherwise `waiting` is an upper bound and `transfer` a lower one."""
    keys = ("perf/comm_ms", "perf/comm_exposed_ms", "perf/comm_wait_ms")
    comm, exposed, wait = (of_ranks(run, key) for key in keys)
    step = median(run, "perf/step_ms")
    timed = comm and exposed and wait and run.config.get("comm_timer") is not False
    if not timed or math.isnan(sum([step, *comm, *exposed, *wait])):
        return []
    ranks = []
    for c, e, w in zip(comm, exposed, wait, strict=True):
        e = min(e, step)
        waiting = min(w, e)
        parts = {"compute": step - e, "transfer": e - waiting, "waiting": waiting}
        ranks.append({**parts, "step": step, "comm": c, "wait": w})
    return ranks


def skipped(run) -> list[int]:
    return [record["step"] for record in run.steps if record.get("train/skipped") is True]


def status(run) -> tuple[str, str]:
    """(finished, unfinished or empty; the same as a text for the reader)."""
    if not run.steps:
        return "empty", "no step logged yet"
    last, wanted = run.steps[-1]["step"], number(run.config.get("max_steps"))
    if number(run.summary.get("steps")) >= max(last, wanted):  # `last` if wanted is NaN
        return "finished", f"finished, {last:,} steps"
    total = f" of {wanted:,.0f}" if wanted > 0 else ""
    return "unfinished", f"running or interrupted at step {last:,}{total}"
