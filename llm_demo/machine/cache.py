"""Folders in the cache: built once, by whichever process comes first, and verified when read."""

import contextlib
import fcntl
import glob
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
BUILDING = f"building-{os.uname().nodename}+"  # name prefix of what this host builds
DAY = 24 * 3600


def build(folder: str, write: Callable[[str], None]) -> None:
    """Let `write` fill a temporary folder and rename it to `folder`, so that nothing half-written
    is visible. An existing folder is damaged: its files are replaced one by one, since another node
    may have done so just before, and is reading them. Processes that have mapped the old ones keep
    them. Raises UserError if the cache can't be written."""
    root, damaged = os.path.dirname(folder), os.path.isdir(folder)
    try:
        os.makedirs(root, exist_ok=True)
        _remove_stale(root)
        with (
            tempfile.TemporaryDirectory(
                prefix=BUILDING, dir=root, ignore_cleanup_errors=True
            ) as temporary,
            open(os.path.join(temporary, "lock"), "w", encoding="utf-8") as lock,
        ):
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            built = os.path.join(temporary, "built")
            os.mkdir(built)
            write(built)
            let_read(Path(built))
            sums = _sums_of(built)
            with open(f"{built}/{SUMS}", "w", encoding="utf-8") as file:
                json.dump(sums, file)
            if not (damaged and os.path.isdir(folder)):
                return os.replace(built, folder)
            for name in os.listdir(folder):
                if name not in os.listdir(built):
                    with contextlib.suppress(FileNotFoundError):  # another node removed it
                        os.remove(f"{folder}/{name}")
            for name in (*sums, SUMS):
                os.replace(f"{built}/{name}", f"{folder}/{name}")
    except OSError as error:
        if not os.path.isdir(folder):  # else another process built the same content first
            reason = disk_full(error, root) or error.strerror or error
            raise UserError(
                f"cannot write to the cache {root}: {reason}; set LLM_DEMO_CACHE"
            ) from error


def _remove_stale(root: str) -> None:
    """Remove what killed builds have left. A build's lock ends with it, but is not trusted to reach
    other hosts: what they left is removed after a day."""
    for folder in glob.glob(f"{glob.escape(root)}/building-*"):
        ours = os.path.basename(folder).startswith(BUILDING)
        with contextlib.suppress(OSError):  # it is in use, or gone
            files = [folder, *glob.glob(f"{glob.escape(folder)}/**", recursive=True)]
            age = time.time() - max(map(os.path.getmtime, files))
            if age > (60 if ours else DAY):  # a new one may not be locked yet
                with open(os.path.join(folder, "lock"), "a", encoding="utf-8") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
