"""Reads the rows of a file as records. Bad rows make one error, or are skipped.

Nothing heavy is imported, so that local files can be checked before torch is imported."""

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

from llm_demo.core.errors import UserError
from llm_demo.data.records import Misread, RowFormat, detect_format, to_record
from llm_demo.data.sources import Bad, hub_parts, is_array, place_of, read_rows
from llm_demo.data.turns import Record
from llm_demo.job.text import counted

NAMED = 10  # bad rows in an error
MOST = 1000  # bad rows after which reading ends
TRIED = 1000  # rows of which one must be in a known format
OF_ONE_ROW = r" at column \d+|, keys: .*|(?<=must be a JSON object), not .*|(?<=twice): .*"
CHECKED = 16 << 20  # bytes of all files: at most two seconds


@dataclass
class BadRows:
    """Bad rows of all files, for one error."""

    may_skip: bool  # --skip_bad_rows would help
    first: list[str] = field(default_factory=list)  # where they are and what is wrong
    count: int = 0
    good: int = 0  # other rows

    def add(self, error: UserError) -> None:
        self.count += 1
        self.may_skip &= not isinstance(error, Misread)
        if len(self.first) < NAMED:
            self.first.append(str(error))

    def error(self, about: str = "") -> UserError:
        """about: what to say first."""
        text = self.first[0]
        if self.count > 1:
            text = f"{self.count:,} bad rows"
            text = f"at least {text}" if self.count == MOST else text
            text += f", the first {NAMED}: " if self.count > NAMED else ": "
            text += "; ".join(_cut(each, 200) for each in self.first)
        cure = "; --skip_bad_rows skips bad rows" if self.may_skip and self.good else ""
        return UserError(f"{about}{text}{cure}")


def open_rows(
    path: str, flags, bad: BadRows, template: str | None = None, bar=None
) -> tuple[RowFormat, Iterator[tuple[int, dict, Record | Bad]]]:
    """(how a file is read, its rows: their number from 1, as they are, as a record). Bad rows are
    left out and counted in `bad`. With --skip_bad_rows they are kept: {} and the reason. Raises
    UserError if there is no good row to tell the format, after MOST bad rows, and for a file with
    nothing but bad rows. flags: a DataArgs; template: as in `to_record`."""
    rows = read_rows(path, bar, keep_bad=True)
    row_format, begin = _detect(rows, path, flags)
    rows = itertools.chain(begin, rows)
    return row_format, _records(path, rows, row_format, flags, bad, template)


def check_rows(files: list[str], flags, most: int = CHECKED) -> None:
    """Raise UserError for bad rows in the first `most` bytes of local files, all files together.
    Once one is found, all are read to the end, so that the error has all bad rows. What is behind
    those bytes is read once the tokenizer is there. An array is read as a whole or not at all."""
    bad, sizes = BadRows(flags.skip_bad_rows is False), []
    bar = SimpleNamespace(update=sizes.append)
    for path in files:
        if hub_parts(path) or is_array(path) and os.path.getsize(path) > most:
            continue
        _, rows = open_rows(path, flags, bad, bar=bar)
        for _ in rows:
            if sum(sizes) > most and not bad.count:
                return
    if bad.count:
        raise bad.error()


def _detect(rows: Iterator, path: str, flags) -> tuple[RowFormat, list]:
    """(how a file is read, the rows that were read for that): as its first row tells, or the first
    one that is in a known format."""
    begin, bad, unknown = [], BadRows(False), None
    for n, row in itertools.islice(rows, TRIED):
        begin.append((n, row))
        where = f"{path}{place_of(path)}{n}"
        if isinstance(row, Bad):
            bad.add(UserError(f"{where}: {row}"))
            continue
        try:
            row_format = detect_format(row, where, flags)
        except UserError as error:
            unknown = unknown or error
            continue
        if len(begin) > 1 and row_format.why == "first row":
            row_format = row_format._replace(why=f"row {n}")
        return row_format, begin
    raise unknown or bad.error()


def _records(
    path: str, rows: Iterable, row_format: RowFormat, flags, bad: BadRows, template: str | None
) -> Iterator[tuple[int, dict, Record | Bad]]:
    place, skipped, good = f"{path}{place_of(path)}", BadRows(False), 0
    for n, row in rows:
        where = f"{place}{n}"
        try:
            if isinstance(row, Bad):
                raise UserError(f"{where}: {row}")
            record = to_record(row, row_format, where, template)
        except UserError as error:
            if flags.skip_bad_rows and not isinstance(error, Misread):
                skipped.add(error)
                yield n, {}, _reason(str(error).removeprefix(f"{where}: "))
                continue
            bad.add(error)
            if bad.count == MOST:
                raise bad.error() from None
            continue
        good += 1
        bad.good += 1
        yield n, row, record
    if skipped.count and not good:
        rows = counted(skipped.count, "row")
        raise skipped.error(f"{path}: no row of {rows} can be read: ")


def _reason(error: str) -> Bad:
    """What is wrong with a bad row, without what differs between rows, and without hints."""
    text = re.sub(OF_ONE_ROW, "", _cut(error, 100))
    return Bad(re.sub(r"\[\d+\]", "[…]", f"bad row: {text}"))


def _cut(text: str, most: int) -> str:
    """The text of an error without its hints, not all of a long one."""
    text = text.partition("; ")[0]
    return text if len(text) <= most else f"{text[:most]} …"
