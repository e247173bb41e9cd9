"""How a process ends, and numbers from the environment; needed before torch is imported."""

import contextlib
import ctypes
import errno
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

from llm_demo.core.errors import UserError, printable
from llm_demo.machine.files import FULL, PART, ROOT, disk_full, let_read
from llm_demo.machine.text import number_in, without_given_secrets

PARENT = "LLM_DEMO_PARENT"  # in a child's environment: our pid, so that the child ends with us

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

UNUSABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)

# what progress bars write to reach their line: at the beginning of a text, or alone
MOVES = re.compile("(\x1b\\[A)+$|\r?")

MARK = "launch_common.sh"  # a file of each clone of the repository

SCRIPTS = ("fsdp", "fsdp_pp", "pp", "zero")  # folders beside llm_demo/ in a clone

INSTALL = "run it from a clone of the repository, where you have run pip install -e ."

YEAR = 365 * 24 * 60  # minutes; no wait may be longer


def number(name: str, default: float, kind: type = int, **bounds) -> float:
    """A number from the environment. bounds: as of text.number_in. Raises UserError for anything
    else."""
    text = os.environ.get(name) or str(default)
    try:
        return number_in(text, kind, **bounds)
    except ValueError as e:
        raise UserError(f"{name}={text[:80]}: {e}") from None


def timeout_minutes() -> float:
    """How long a rank waits for the others in one operation. Raises UserError."""
    return number("DIST_TIMEOUT_MINUTES", 30, float, positive=True, at_most=YEAR)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """{package: its version, "" if it is not installed}."""
    found = dict.fromkeys(packages, "")
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def usable_cores() -> list[int]:
    """The numbers of the CPU cores that this process may use."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return list(range(os.cpu_count() or 1))


def stay_near(cores: list[int]) -> str:
    """Keep this thread, and those started from now on, on these cores of a GPU's NUMA node, where
    the memory that they touch first then lies. Returns what to log, "" if this process may use none
    of the cores."""
    near = set(cores) & set(usable_cores())
    if not near:
        return ""
    os.sched_setaffinity(0, near)
    return f", {len(near)} cores of the GPU's NUMA node"


def end_with_parent(parent: int) -> None:
    """Kill this process when `parent`, the process that started it, ends in any way.

    On Linux the kernel sends SIGKILL, even after an exec. Elsewhere a thread checks once a second.
    Exits at once if the parent has already ended."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to stop. Under nohup, SIGHUP stays ignored."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return [signal.SIGTERM, signal.SIGINT]
    return [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


def quit_on(*signals: signal.Signals) -> None:
    """On these signals, print one line and exit with code 128 + n, at once and without a traceback.
    For the time before there is anything to save or clean up."""
    for signum in signals:
        signal.signal(signum, _quit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # launch_common.sh blocks SIGINT


def _quit(signum, _frame) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"error: stopped by {signal.Signals(signum).name}\n".encode())
    os._exit(128 + signum)


def raise_on_ctrl_c() -> None:
    """Undo quit_on for SIGINT: Ctrl-C now raises KeyboardInterrupt, so that code can clean up."""
    if signal.getsignal(signal.SIGINT) is _quit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def outlive_terminal() -> None:
    """Discard output, without an error, once the terminal or the pipe's reader is gone or its disk
    is full: a run whose terminal was closed still has to save. Print ? for characters that the
    console's encoding lacks, and escapes for control characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Stream):
            setattr(sys, name, _Stream(stream))
            for logger in logging.root.manager.loggerDict.values():  # of libraries, imported before
                for handler in getattr(logger, "handlers", ()):
                    if vars(handler).get("stream") is stream:
                        handler.setStream(getattr(sys, name))


class _Stream:
    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        moves = MOVES.match(text)[0]
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = printable(without_given_secrets(text[len(moves) :]))
        text = text.encode(encoding, "replace").decode(encoding)
        return self._try(self._stream.write, moves + text)

    def flush(self):
        return self._try(self._stream.flush)

    def _try(self, call, *args):
        try:
            return call(*args)
        except OSError as e:
            if e.errno not in (errno.EIO, errno.EPIPE, *FULL):
                raise
            if e.errno in FULL:
                with contextlib.suppress(OSError):  # may be the same file
                    line = f"warning: {os.strerror(e.errno)}: further console output is dropped\n"
                    os.write(2, line.encode())
            # buffered text and C++ output also go there
            with open(os.devnull, "w", encoding="utf-8") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


@contextlib.contextmanager
def refuse_unusable_paths():
    """Raise UserError for a path without permission or with too long a name. Even Path.exists
    raises an OSError for these."""
    try:
        yield
    except OSError as error:
        named = isinstance(error.filename, (str, os.PathLike))
        if not named or error.errno not in UNUSABLE or disk_full(error):
            raise
        raise UserError(f"{error.filename}: {error.strerror}") from error


def fault_of_environment(error: BaseException) -> str | None:
    """The error in one line, if its message names an environment variable or quotes its value, as a
    library does when it refuses the value; else None."""
    text = " ".join(str(error).split())
    if "no socket interface found" in text:  # NCCL names neither
        return f"NCCL_SOCKET_IFNAME={os.environ.get('NCCL_SOCKET_IFNAME')}: no such interface"
    for name, value in os.environ.items() if not isinstance(error, ImportError) else ():
        named = "_" in name and re.search(rf"\b{name}\b", text)
        quoted = rf"['\"]{re.escape(value)}['\"]|: {re.escape(value)}(,|$)"
        plain = value.isdecimal() or value.lower() in ("", "true", "false")  # in many messages
        if named or not plain and re.search(quoted, text):
            return f"{name} in the environment: {text[:300]}"
    return None


def let_others_speak() -> None:
    """Wait as long as rank 0 needs to print the same error. The launcher then ends this rank; if it
    exited first, rank 0 would be killed before it could print."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # don't save first
    time.sleep(3)


def refuse_other_clone(script: str) -> None:
    """Raise UserError for a script of another clone of the repository than this package's."""
    root = Path(script).resolve().parent.parent
    ours, theirs = ROOT / "llm_demo", root / "llm_demo"
    if (root / MARK).is_file() and theirs.is_dir() and not theirs.samefile(ours):
        raise UserError(
            f"{script} would run with llm_demo of {ROOT}: start it in {root} with "
            f"PYTHONPATH={root}, or run pip install -e {root}"
        )


def _lacks_clone(error: BaseException) -> bool:
    """Whether a folder of scripts is missing, because this package was installed as a copy."""
    missing = isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0]
    return missing in SCRIPTS and not (ROOT / MARK).is_file()


def end_in_one_line(kind, error, trace) -> None:
    """sys.excepthook, for the time while modules are imported: one line if a library refuses the
    environment, or if this installation can't work, else the traceback."""
    reason = fault_of_environment(error)
    if isinstance(error, UserError):
        reason = str(error)
    elif _lacks_clone(error):
        reason = f"llm_demo in {ROOT} is a copy without {error.name}/: {INSTALL}"
    if not reason:
        return sys.__excepthook__(kind, error, trace)
    if os.environ.get("RANK", "0") != "0":
        let_others_speak()
    print(f"error: {printable(without_given_secrets(reason))}", file=sys.stderr)
    sys.exit(2)


def regular(file: Path) -> Path:
    """The file. Raises UserError if it is a pipe or a device, on which a program may wait without
    end."""
    if os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):
        raise UserError(f"{file} is not a regular file")
    return file


def read_text(file: Path) -> str:
    """The text of a small file that may come from elsewhere, bytes that are not UTF-8 replaced.
    Raises UserError for a pipe or a device, OSError if it can't be read."""
    return regular(file).read_text("utf-8", "replace")


def read_json(file: Path):
    """The value in a JSON file. Raises UserError for a pipe or a device, OSError if it can't be
    read, ValueError if it is no JSON in UTF-8."""
    return json.loads(regular(file).read_text("utf-8"))


def command(main: Callable[[], int | None]) -> None:
    """Exit with the code that main() returns. Bad input ends with one line and code 2."""
    sys.exit(_in_one_line(main))


def early(parse: Callable, check: Callable) -> None:
    """Call check(parse()) before slow imports: --help and bad input end the process here. Not on
    one of several ranks, whose launcher has done it."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        _in_one_line(lambda: check(parse()))


def _in_one_line(act: Callable):
    """What act() returns. Bad input ends the process with one line and code 2."""
    outlive_terminal()
    try:
        with refuse_unusable_paths():
            return act()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` once it is complete. Raises UserError if it can't
    be written."""
    part = out.with_name(f"{PART}{out.name}")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        yield part
        let_read(part)
        if out.exists():
            out.rmdir()
        part.rename(out)
    except Exception as e:  # from several libraries
        reason = disk_full(e, part)
        if not reason and not isinstance(e, OSError):
            raise
        raise UserError(f"cannot write {out}: {reason or e}") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)
