"""Exceptions for the user: scripts print the message and exit, without a traceback. Also counts in
messages, and text of others made safe to print."""

import re

# Control characters, but newline and tab, and what changes the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

STOPPED = 75  # exit code of a run that was asked to stop and has saved (sysexits' EX_TEMPFAIL)


def counted(n: int, one: str, many: str | None = None) -> str:
    """A count in words: 1 row, 2,700 rows. many: default is `one` with an s."""
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


def printable(text: str) -> str:
    """The text with escapes such as \\x1b in place of CONTROL: a terminal obeys those characters,
    wherever they come from."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class UserError(Exception):
    """Bad input. The message is one clear line: what, where, what to do."""

    def __str__(self):
        return printable(" ".join(super().__str__().splitlines()))


def words_of(error: BaseException) -> str:
    """What a library says, in one line. A KeyError's text is only the key."""
    text = " ".join(str(error).split())[:300]
    plain = text and not isinstance(error, LookupError)
    return text if plain else f"{type(error).__name__} {text}".strip()


class Stopped(Exception):
    """A signal asked the run to stop, and it stopped between two steps, with a checkpoint."""


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
