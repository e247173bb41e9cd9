"""Write files atomically, hash them, and detect a full disk."""

import errno
import hashlib
import json
import math
import os
import re
import resource
import shutil
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
    os.umask(umask := os.umask(0))
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)


def disk_full(
    error: BaseException | None, folder: Path | str | None = None, output_dir: str | None = None
) -> str | None:
    """Return "No space left on device: FOLDER" if the cause of `error` is a full disk, a quota or
    the limit of `ulimit -f`; else None.

    folder: where the write went, if known; otherwise output_dir is one of the candidates."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    unlimited = limit == resource.RLIM_INFINITY
    while error:
        number = getattr(error, "errno", None)
        if rust := re.search(r"\(os error (\d+)\)", str(error)):  # a library in Rust
            number = int(rust[1])
        elif SILENT.search(str(error)):
            number = errno.ENOSPC if unlimited or _nearly_full(folder) else errno.EFBIG
        if number in FULL:
            break
        error = error.__cause__ or error.__context__
    else:
        return None
    reason = os.strerror(number)
    if number == errno.EFBIG and not unlimited:
        reason += f" (ulimit -f allows {limit / 1e6:,.1f} MB)"
    hub = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    places = (output_dir, cache_folder(), hub, "/tmp", "/dev/shm")
    full = next(filter(_nearly_full, places), "--output_dir or the cache")
    return f"{reason}: {getattr(error, 'filename', None) or folder or full}"


def _nearly_full(folder: Path | str | None) -> bool:
    """Whether this folder's disk is nearly full."""
    try:
        path = Path(folder).absolute()
        existing = next(p for p in (path, *path.parents) if p.exists())
        return shutil.disk_usage(existing).free < 1 << 20
    except (TypeError, OSError):
        return False


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
