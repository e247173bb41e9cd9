"""Results on disk: bench/results/NAME.jsonl has one JSON object per line, one line per row."""

import contextlib
import fcntl
import json
import os
from pathlib import Path

from bench.presets import DEFAULTS
from llm_demo.machine.files import ROOT, write_text

RESULTS = ROOT / "bench/results"


def peaks_of(summary: dict) -> list[float]:
    """Peak memory of each rank that its card must have; older rows only recorded what was
    allocated."""
    return summary.get("reserved_gb") or summary["peak_mem_gb"]


def file_of(name: str) -> Path:
    return RESULTS / f"{name}.jsonl"


def read(name: str) -> list[dict]:
    """Read the results of a file in the order they were added; [] if there is no file."""
    file = file_of(name)
    return (
        [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    )


def write(name: str, result: dict) -> None:
    """Add a result to a file, or replace the result with the same settings.

    The file is replaced as a whole: an interruption leaves the old one. It is read again first,
    because another benchmark may have added rows in the meantime."""
    file = file_of(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.parent):
        results = {key_of(r): r for r in read(name)}
        results[key_of(result)] = result
        write_text(file, "".join(f"{json.dumps(r)}\n" for r in results.values()))


@contextlib.contextmanager
def locked(folder: Path):
    """Hold a lock on a folder; another process waits for it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems can't lock a folder
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def key_of(result: dict) -> str:
    """What identifies a result: all settings of a row but the number of steps.

    Results of bench.checkpoints have columns of their own; the first names script and flags."""
    if "columns" in result:
        return result["columns"]["script"]
    return json.dumps({**DEFAULTS, **result["row"], "steps": None}, sort_keys=True)
