"""Bad examples: what is wrong with each, and one error for all."""

import re
from dataclasses import dataclass, field

from llm_demo.core.errors import UserError

NAMED = 10  # bad examples in an error
OF_ONE_ROW = r" at column \d+|, (keys:|not) .*|(?<=twice): .*"


class Bad(str):
    """Why an example can't be read; stands in its place."""


class Misread(UserError):
    """Data that says in an unknown form what is learnt. Such examples are never skipped: they are
    not broken, and other examples of the file may mean the same."""


@dataclass
class BadRows:
    """Bad examples of a file, for one error."""

    first: list[str] = field(default_factory=list)  # where they are and what is wrong
    count: int = 0
    misread: bool = False  # one of them is a Misread

    def add(self, where: str, error: UserError) -> None:
        self.count += 1
        self.misread |= isinstance(error, Misread)
        if len(self.first) < NAMED:
            self.first.append(f"{where}: {error}")

    def __str__(self) -> str:
        if self.count == 1:
            return self.first[0]
        few = f", the first {NAMED}" if self.count > NAMED else ""
        rows = "; ".join(_shortened(each, 200) for each in self.first)
        return f"{self.count:,} bad examples{few}: {rows}"


def short_reason(error: str) -> Bad:
    """What is wrong with a bad example, without what differs between examples, and without
    hints."""
    text = re.sub(OF_ONE_ROW, "", _shortened(error, 100))
    return Bad(re.sub(r"\[\d+\]", "[…]", f"bad example: {text}"))


def _shortened(text: str, most: int) -> str:
    """The text of an error without its hints, not all of a long one."""
    text = text.partition("; ")[0]
    return text if len(text) <= most else f"{text[:most]} …"
