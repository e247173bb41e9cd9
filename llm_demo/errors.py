"""Exceptions for the user: scripts print the message and exit, without a traceback."""

STOPPED = 75  # exit code of a run that was asked to stop and has saved (sysexits' EX_TEMPFAIL)


class UserError(Exception):
    """Bad input. The message is one clear line: what, where, what to do."""


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
