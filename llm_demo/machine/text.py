"""Numbers that are read, and what is shown: counts, what a library says, differences, the progress
of slow work, commands."""

import contextlib
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from llm_demo.core.errors import UserError
from llm_demo.machine.files import ROOT

STOPPED = 75  # exit code of a run that was asked to stop and has saved (sysexits' EX_TEMPFAIL)
# upper bounds of numbers without another one
MAX_INT, MAX_REAL = 2**31 - 1, 10**9
DELAY = 2  # seconds of work before a bar is shown


def number_in(
    text: str,
    kind: type,
    at_least: float = 0,
    at_most: float | None = None,
    positive: bool = False,
) -> float:
    """The int or float that a text means. Raises ValueError, which says what it must be."""
    try:
        value = kind(text)
    except ValueError:
        words = "must be a whole number" if kind is int else "must be a number"
        raise ValueError(words) from None
    if at_most is None:
        at_most = MAX_INT if kind is int else MAX_REAL
    if not abs(value) < math.inf:
        raise ValueError("must be a finite number")
    if positive and value <= 0:
        raise ValueError("must be positive")
    if value < at_least:
        raise ValueError(f"must be at least {at_least}" if at_least else "must not be negative")
    if value > at_most:
        raise ValueError(f"must be at most {at_most:,}")
    return value


def counted(n: int, one: str, many: str | None = None) -> str:
    """A count in words: 1 row, 2,700 rows. many: default is `one` with an s."""
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


def short(n: int) -> str:
    """A large count in three digits."""
    if n < 1e6:
        return f"{n:,}"
    return f"{n / 1e9:.3g}B" if n >= 1e9 else f"{n / 1e6:.3g}M"


def words_of(error: BaseException) -> str:
    """What a library says, in one line. A KeyError's text is only the key."""
    text = " ".join(str(error).split())[:300]
    plain = text and not isinstance(error, LookupError)
    return text if plain else f"{type(error).__name__} {text}".strip()


def first_line(error: BaseException) -> str:
    """The first line of what a library says."""
    return (str(error).strip().splitlines() or [repr(error)])[0]


@contextlib.contextmanager
def blame(file: Path | str, *kinds: type[Exception]):
    """Put a file's name before what a library says of it. kinds: of its errors; default: all but
    of memory. Raises UserError."""
    kinds = kinds or (Exception,)
    try:
        yield
    except (UserError, MemoryError):
        raise
    except kinds as e:
        raise UserError(f"{file}: {words_of(e)}") from e


def differences(before: dict, now: dict, prefix: str = "") -> list[str]:
    """The differences between two identities, by name: "seed was 1, is 2"."""
    lines = []
    for key in {**before, **now}:
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key} ")
        elif a != b:
            lines.append(f"{prefix}{key} was {a}, is {b}")
    return lines


def progress(
    iterable: Iterable | None = None, what: str = "", total: float | None = None, unit: str = "it"
) -> tqdm:
    """Show the progress of `what` on a terminal once it has taken DELAY seconds; rank 0 only.

    Iterate over it, or use it as a context manager and call update(n). total: default is the
    iterable's length. unit "B": bytes, shown as kB, MB, GB."""
    size = shutil.get_terminal_size()  # 80 x 24 if the terminal reports none; tqdm shows nothing
    return tqdm(
        iterable,
        desc=what,
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        delay=DELAY,
        disable=os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty(),
        ncols=size.columns,
        nrows=size.lines,
    )


def resume(folder: Path, *flags) -> str:
    """The command that resumes from the run's newest checkpoint."""
    if "NNODES" in os.environ:
        return "the same command on every node, with --resume auto"
    flags = ["--output_dir", folder.absolute(), "--no_overwrite", "--resume", "auto", *flags]
    return shlex.join(["bash", shown(folder / "cmd.sh"), *map(str, flags)])


def module(name: str, *arguments) -> str:
    """python -m llm_demo.NAME with these arguments, from any folder."""
    in_root = users_folder() == ROOT  # python -m finds the package there
    path = [] if in_root else [f"PYTHONPATH={shlex.quote(str(ROOT))}"]
    words = [shown(Path(sys.executable)), "-m", f"llm_demo.{name}", *map(str, arguments)]
    return " ".join([*path, shlex.join(words)])


def shown(path: Path) -> str:
    """The path, relative to the user's working folder if it lies inside."""
    path, folder = path.absolute(), users_folder()
    text = str(path.relative_to(folder) if path.is_relative_to(folder) else path)
    return f"./{text}" if text.startswith("-") else text  # else a command takes it for a flag


def users_folder() -> Path:
    """Where the user started the run: a run's cmd.sh goes to the folder of the run before."""
    return Path(os.environ.get("LLM_DEMO_STARTED_IN", Path.cwd()))


def layer_kinds(done: list[str], left: list[str]) -> tuple[list[str], list[str]]:
    """The names in `done`, and those in `left`, with their number if they are in both."""
    rest = []
    for name in sorted({*left}):
        if name in done:
            n = left.count(name)
            name += f" ({n} of {n + done.count(name)})"
        rest.append(name)
    return sorted({*done}), rest


# In a variable's name, or in a name of an address's query: its value is a secret.
SECRET = re.compile("TOKEN|KEY|SECRET|PASS|PWD|CRED|AUTH|PRIVATE|SIGNATURE", re.IGNORECASE)

# What comes before a host in an address: user:password@, also with a password that is not quoted.
# A number is a host's port.
LOGIN = re.compile(r"(://)(?:[^\s/?#]+|[^\s/?#:@]*:(?!\d+[/?#])(?:(?!://)\S){1,999})@")
QUERY = re.compile(r"([?&][^\s?&=#]+=)[^\s&#]+")  # of an address


def without_secrets(text: str) -> str:
    """The text with *** in place of the logins and secrets of addresses."""
    text = LOGIN.sub(r"\1***@", text)
    return QUERY.sub(lambda found: f"{found[1]}***" if SECRET.search(found[1]) else found[0], text)


def without_given_secrets(text: str) -> str:
    """The text without secrets in addresses of this process's flags and environment. Other
    addresses, such as those of data, stay as they are."""
    if "://" in text or "=" in text:
        for value in (*sys.argv, *os.environ.values()):
            for secret in [*LOGIN.finditer(value), *QUERY.finditer(value)]:
                text = text.replace(secret[0], without_secrets(secret[0]))
    return text
