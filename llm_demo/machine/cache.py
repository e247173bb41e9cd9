"""Folders in the cache: built once, by whichever process comes first, and verified when read."""

import contextlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llm_demo.core.errors import UserError
from llm_demo.machine.files import disk_full, let_read

SUMS = "crc32.json"  # the CRC-32 of every other file of a folder
BUILDING = "building-"  # name prefix of what is being built
DAY = 24 * 3600


def build(folder: str, write: Callable[[str], None]) -> None:
    """Let `write` fill a temporary folder and rename it to `folder`, so that nothing half-written
    is visible. An existing folder is damaged and replaced. Processes that have mapped its files
    keep them. Raises UserError if the cache can't be written."""
    root, damaged = os.path.dirname(folder), os.path.isdir(folder)
    try:
        os.makedirs(root, exist_ok=True)
        _remove_old(root)
        with tempfile.TemporaryDirectory(
            prefix=BUILDING, dir=root, ignore_cleanup_errors=True
        ) as temporary:
            built = os.path.join(temporary, "built")
            os.mkdir(built)
            write(built)
            let_read(Path(built))
            sums = _sums_of(built)
            with open(f"{built}/{SUMS}", "w", encoding="utf-8") as file:
                json.dump(sums, file)
            if damaged:
                with contextlib.suppress(FileNotFoundError):  # another node does the same
                    os.rename(folder, f"{temporary}/damaged")
            os.replace(built, folder)
    except OSError as error:
        if not os.path.isdir(folder):  # else another process built the same content first
            reason = disk_full(error, root) or error.strerror or error
            raise UserError(
                f"cannot write to the cache {root}: {reason}; set LLM_DEMO_CACHE"
            ) from error


def _remove_old(root: str) -> None:
    """Remove what killed builds have left, after a day without a change."""
    for folder in Path(root).glob(f"{BUILDING}*"):
        with contextlib.suppress(OSError):  # it is gone
            newest = max(file.stat().st_mtime for file in (folder, *folder.rglob("*")))
            if time.time() - newest > DAY:
                shutil.rmtree(folder, ignore_errors=True)


def verified(folder: str) -> dict[str, str]:
    """{file: its CRC-32} of a folder that `build` made. Raises ValueError if a file has changed,
    OSError if one can't be read."""
    with open(f"{folder}/{SUMS}", encoding="utf-8") as file:
        sums = json.load(file)
    if not isinstance(sums, dict) or not all(isinstance(of, str) for of in sums.values()):
        raise ValueError(f"{SUMS} is not a list of checksums")
    bad = dict(sums.items() ^ _sums_of(folder).items())
    if bad:
        raise ValueError(f"{', '.join(sorted(bad))}: wrong checksum")
    return sums


def _sums_of(folder: str) -> dict[str, str]:
    """The CRC-32 of each file, as hex digits: one with zeroed values would otherwise be
    trained on."""
    files = {name: f"{folder}/{name}" for name in os.listdir(folder) if name != SUMS}
    return {n: f"{zlib.crc32(np.memmap(file, np.uint8, 'r')):08x}" for n, file in files.items()}
