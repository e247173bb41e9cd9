"""Exceptions for the user: scripts print the message, safe to print, and no traceback.

What is safe to print holds neither characters that a terminal obeys nor a secret."""

import os
import re
import sys

# Control characters, but newline and tab, and what changes the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

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


def printable(text: str) -> str:
    """The text with escapes such as \\x1b in place of CONTROL: a terminal obeys those characters,
    wherever they come from. Addresses of this process's flags and environment are without secrets;
    other addresses, such as those of data, stay as they are."""
    if "://" in text or "=" in text:
        for value in (*sys.argv, *os.environ.values()):
            for secret in [*LOGIN.finditer(value), *QUERY.finditer(value)]:
                text = text.replace(secret[0], without_secrets(secret[0]))
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class UserError(Exception):
    """Bad input. The message is one clear line: what, where, what to do."""

    def __str__(self):
        return printable(" ".join(super().__str__().splitlines()))


class Stopped(Exception):
    """A signal asked the run to stop, and it stopped between two steps, with a checkpoint."""
