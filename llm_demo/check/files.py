"""The disk. A worker looks at it, because a file system may hang."""

import os
import shutil
import tempfile
from pathlib import Path

from llm_demo.check.machine import ERROR, OK, WARNING

CHECKPOINT_GB = 7.2  # Qwen3-0.6B: weights and both AdamW moments in fp32


def disk(folder: str) -> dict:
    """Write to `folder` or its nearest existing parent; the free space there."""
    place = Path(folder).absolute()
    while not place.is_dir():
        place = place.parent
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:
        file.write(bytes(4096))
        os.fsync(file.fileno())
    return {"place": str(place), "free_gb": shutil.disk_usage(place).free / 1e9}


def disk_line(answer: dict, folder: str) -> list:
    fix = "free space there or choose another --output_dir"
    if answer.get("problem"):
        return [(ERROR, "disk", f"writing below {folder} failed: {answer['problem']}", fix)]
    text = f"{answer['place']}: {answer['free_gb']:.0f} GB free"
    if answer["free_gb"] < 3 * CHECKPOINT_GB:
        level = ERROR if answer["free_gb"] < 1 else WARNING
        text += f"; a checkpoint of a 0.6B model takes {CHECKPOINT_GB} GB"
        return [(level, "disk", text, f"{fix}, or save less: --keep_last 1")]
    return [(OK, "disk", text, "")]
