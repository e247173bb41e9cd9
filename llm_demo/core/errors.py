"""Exceptions for the user: scripts print the message, safe to print, and no traceback."""

import re

# Control characters, but newline and tab, and what changes the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with escapes such as \\x1b in place of CONTROL: a terminal obeys those characters,
    wherever they come from."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str) -> str:
    """The text with the beginning of each word of more than 500 characters, such as a value."""
    return re.sub(r"\S{501,}", lambda w: f"{w[0][:200]}… ({len(w[0]):,} characters)", text)


class UserError(Exception):
    """Bad input. The message is one clear line: what, where, what to do."""

    def __str__(self):
        return shortened(printable(" ".join(super().__str__().splitlines())))


class Stopped(Exception):
    """A signal asked the run to stop, and it stopped between two steps, with a checkpoint."""
