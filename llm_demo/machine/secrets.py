"""What of flags, environment and recorded settings is kept out of files and of what is printed."""

import os
import re
import sys

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
