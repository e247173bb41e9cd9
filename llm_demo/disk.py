"""What a write that failed is called: a full disk, whatever library met it."""

import errno
import os
import re
import resource
import shutil
from pathlib import Path

from llm_demo.args import parsed

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# PyTorch's writer and numpy's lose the system's reason
SILENT = re.compile(
    r"enforce fail at inline_container|PytorchStreamWriter failed writing"
    r"|\d+ requested and \d+ written"
)


def full(error: BaseException | None, folder: Path | str | None = None) -> str | None:
    """ "No space left on device: FOLDER" if `error`, or what caused it, comes of a full disk, a
    quota or the limit of `ulimit -f`; None if it does not. folder: where the write went."""
    while error:
        number = getattr(error, "errno", None)
        told = re.search(r"\(os error (\d+)\)", str(error))  # of a library in Rust
        if told:
            number = int(told[1])
        elif SILENT.search(str(error)):
            number = _guess(folder)
        if number in FULL:
            return _describe(number, getattr(error, "filename", None) or folder)
        error = error.__cause__ or error.__context__
    return None


def _guess(folder) -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return errno.ENOSPC if limit == resource.RLIM_INFINITY or _short(folder) else errno.EFBIG


def _short(folder) -> bool:
    """Whether the disk of this folder has next to no room."""
    try:
        there = next(
            p for p in (Path(folder).absolute(), *Path(folder).absolute().parents) if p.exists()
        )
        return shutil.disk_usage(there).free < 1 << 20
    except (TypeError, OSError):
        return False


def _describe(number: int, where) -> str:
    reason = os.strerror(number)
    if number == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY:
            reason += f" (ulimit -f allows {limit / 1e6:,.1f} MB)"
    if not where:
        places = _places()
        where = next((p for p in places if _short(p)), "--output_dir or the cache")
    return f"{reason}: {where}"


def _places() -> list[str]:
    """Where a run writes."""
    cache = os.environ.get("LLM_DEMO_CACHE") or os.path.expanduser("~/.cache/llm_demo")
    hub = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    return [p for p in (parsed.get("output_dir"), cache, hub, "/tmp", "/dev/shm") if p]
