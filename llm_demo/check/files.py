"""The disk. A worker measures it, because a file system may hang."""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from llm_demo.check.machine import ERROR, OK, WARNING

MIB = 1 << 20
CHECKPOINT_GB = 7.2  # Qwen3-0.6B: weights and both AdamW moments in fp32


def disk(folder: str) -> dict:
    """Free space, write speed and fsync time in `folder` or its nearest existing parent."""
    place = Path(folder).absolute()
    while not place.is_dir():
        place = place.parent
    free = shutil.disk_usage(place).free
    chunk = os.urandom(8 * MIB)  # not zeros: some file systems compress
    largest = min(256 * MIB, free // 2)
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:
        syncs = []
        for _ in range(5):
            file.write(chunk[:4096])
            begun = time.perf_counter()
            os.fsync(file.fileno())
            syncs.append(time.perf_counter() - begun)
        begun, written = time.perf_counter(), 0
        while written < largest and time.perf_counter() - begun < 2:
            written += file.write(chunk)
        os.fsync(file.fileno())
        speed = written / 1e6 / (time.perf_counter() - begun)
    sync = statistics.median(syncs) * 1e3
    return {"place": str(place), "free_gb": free / 1e9, "mb_per_s": speed, "fsync_ms": sync}


def disk_line(answer: dict, folder: str) -> list:
    if answer.get("problem"):
        fix = "free space there or choose another --output_dir"
        return [(ERROR, "disk", f"writing below {folder} failed: {answer['problem']}", fix)]
    free, speed, sync = answer["free_gb"], answer["mb_per_s"], answer["fsync_ms"]
    text = f"{answer['place']}: {free:.0f} GB free, writes {speed:.0f} MB/s, fsync {sync:.1f} ms"
    if free < 1:
        return [(ERROR, "disk", text, "free space or choose another --output_dir")]
    size = f"a checkpoint of a 0.6B model takes {CHECKPOINT_GB} GB"
    if free < 3 * CHECKPOINT_GB:
        fix = "free space, choose another --output_dir, or save less: --keep_last 1"
        return [(WARNING, "disk", f"{text}; {size}", fix)]
    if speed < 100 or sync > 500:
        fix = "choose a faster --output_dir, or save less often"
        return [(WARNING, "disk", f"{text}: slow, since {size}", fix)]
    return [(OK, "disk", text, "")]
