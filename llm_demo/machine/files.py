"""Write files atomically, hash them, and detect a full disk."""

import errno
import hashlib
import json
import math
import os
import re
from collections import Counter
from pathlib import Path

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


def cache_folder() -> str:
    """The folder of what is kept between runs, such as packs."""
    return os.environ.get("LLM_DEMO_CACHE") or os.path.expanduser("~/.cache/llm_demo")


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
