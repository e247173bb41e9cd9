"""Write files atomically, hash them, detect a full disk, and build folders in the cache: once, by
whichever process comes first, and verified when read."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from llm_demo.core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]  # the repository
LFS = b"version https://git-lfs.github.com/spec/v1"  # how a pointer in place of a file begins
PART = ".part-"  # name prefix of anything incomplete or being removed; never read

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# messages of PyTorch's and numpy's writers, which do not name the system's error
SILENT = re.compile(
    r"enforce fail at inline_container|PytorchStreamWriter failed writing"
    r"|\d+ requested and \d+ written"
)


def let_read(folder: Path) -> None:
    """Give the files of a folder the permissions of new ones: safetensors lets only the owner
    read."""
    umask = os.umask(0)  # it can be read only by setting it
    os.umask(umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)


def disk_full(error: BaseException | None, folder: Path | str | None = None) -> str | None:
    """The cause of `error` in one line, with the file or folder if known, if that is a full disk, a
    quota or the limit of `ulimit -f`; else None. folder: where the write went."""
    while error:
        reason = _not_written(error)
        if reason:
            place = getattr(error, "filename", None) or folder
            return f"{reason}: {place}" if place else reason
        error = error.__cause__ or error.__context__
    return None


def _not_written(error: BaseException) -> str | None:
    """Why a file could not be written whole, by the system or by a library that does not say."""
    number = getattr(error, "errno", None)
    rust = re.search(r"\(os error (\d+)\)", str(error))  # a library in Rust
    if rust:
        number = int(rust[1])
    if number in FULL:
        return os.strerror(number)
    if SILENT.search(str(error)):
        return "a file could not be written whole: its disk is full, or ulimit -f is too low"
    return None


def cache_folder() -> Path:
    """The folder of what is kept between runs, such as packs."""
    return Path(os.environ.get("LLM_DEMO_CACHE") or os.path.expanduser("~/.cache/llm_demo"))


def digest(file: Path) -> str:
    hashed = hashlib.sha256()  # hashlib.file_digest needs Python 3.11
    with open(file, "rb") as f:
        while block := f.read(1 << 22):
            hashed.update(block)
    return hashed.hexdigest()


def hash_of(facts) -> str:
    """The SHA-256 of facts as JSON, as hex digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def write_json(file: Path, value, **options) -> None:
    """Replace a JSON file atomically. options: those of json.dumps."""
    write_text(file, json.dumps(value, **{"indent": 1, **options}) + "\n")


def write_text(file: Path, text: str) -> None:
    """Replace a small file atomically: a reader sees either the old text or the new one. What
    UTF-8 can't hold, such as half a surrogate pair of a file's name, is written as an escape."""
    part = file.with_name(f"{PART}{file.name}")
    part.unlink(missing_ok=True)
    try:
        # x: never through a link that lies there
        with open(part, "x", encoding="utf-8", errors="backslashreplace") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a folder's file names survive a loss of power."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _object(pairs: list[tuple]) -> dict:
    """A JSON object. json itself would keep the last of two values of a key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        values = " and ".join(repr(value)[:40] for k, value in pairs if k == key)
        raise ValueError(f"an object has the key {key!r} twice: {values}")
    return values


# Refuses a key twice. Made once: json.loads with a hook makes one each time.
DECODER = json.JSONDecoder(object_pairs_hook=_object)


def finite(record: dict) -> dict:
    """Replace NaN and infinity by None, because JSON has no such numbers."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }


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
    import numpy as np  # flags are parsed before it is loaded

    files = {name: f"{folder}/{name}" for name in os.listdir(folder) if name != SUMS}
    return {n: f"{zlib.crc32(np.memmap(file, np.uint8, 'r')):08x}" for n, file in files.items()}
