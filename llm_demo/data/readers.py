"""Reads the examples of data files and hub datasets. Errors name the file and the line or row."""

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterator

from tqdm.utils import CallbackIOWrapper

from llm_demo.core.errors import UserError
from llm_demo.data.bad_rows import Bad
from llm_demo.data.sources import COMPRESSED, hub_parts, hub_rows, split_name, suffix_of
from llm_demo.machine.files import DECODER
from llm_demo.machine.text import counted, words_of

BOM = b"\xef\xbb\xbf"
BLANK = object()  # a line without an example
NOT_UTF8 = "not UTF-8: re-encode the file"
ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as Python reads them


def read_rows(path: str, bar=None) -> Iterator[tuple[int, dict | Bad]]:
    """Yield (number, example). The number counts from 1: the lines of JSON Lines, whose blank lines
    are skipped, else the rows. An example that can't be read or is no object is a Bad. A UTF-8 BOM
    is accepted. bar: a progress bar, advanced by the bytes read.

    Raises UserError for an empty file, or one that is damaged."""
    import pyarrow  # installed with datasets

    read = _read_hub if hub_parts(path) else READERS.get(suffix_of(path), _read_json)
    number, empty = 0, True
    try:
        for number, row in enumerate(read(path, bar), 1):
            if row is BLANK:
                continue
            empty = False
            if not isinstance(row, dict | Bad):
                row = Bad(f"an example must be a JSON object, not {json.dumps(row)[:50]}")
            yield number, row
    except (OSError, ValueError, csv.Error, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: can't be read behind row {number}: {words_of(error)}") from None
    if empty:
        raise UserError(f"{path} is empty: it has no examples to train on")


def place_of(path: str) -> str:
    """What stands between the name of a source and the number of an example."""
    is_table = hub_parts(path) or suffix_of(path) in READERS or is_array(path)
    return ", row " if is_table else ":"


def is_array(path: str) -> bool:
    """Whether a .json file is one array of examples; False for one that can't be read."""
    if suffix_of(path) != ".json":
        return False
    with contextlib.suppress(OSError), _opened(path) as file:
        return file.read(1000).removeprefix(BOM).lstrip()[:1] == b"["
    return False


@contextlib.contextmanager
def _opened(path: str, bar=None):
    """A file of PyArrow with what is in a file, decompressed."""
    import pyarrow

    with open(path, "rb") as file:
        if bar is not None:
            file = CallbackIOWrapper(bar.update, file, "read")
        compression = split_name(path)[2].lower()
        yield pyarrow.input_stream(file, compression=COMPRESSED.get(compression))


def _read_json(path: str, bar) -> Iterator:
    """Examples of JSON Lines, BLANK for an empty line, or of one array of objects in a .json
    file."""
    with _opened(path, bar) as file:
        if is_array(path):
            try:
                rows = DECODER.decode(file.read().decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
                raise UserError(f"{path}{line}: {_broken(error)}") from None
            yield from rows
            return
        for line in io.BufferedReader(file, 2**20):
            try:
                text = line.decode("utf-8-sig").rstrip()
                row = DECODER.decode(text) if text else BLANK
            except (ValueError, RecursionError) as error:
                row = Bad(_broken(error))
            yield row


def _broken(error: Exception) -> str:
    """What is wrong with the text of an example, or of a file that is one array."""
    if isinstance(error, UnicodeDecodeError):
        return NOT_UTF8
    if isinstance(error, json.JSONDecodeError):
        what = error.msg.removesuffix(" at")  # "Invalid control character at"
        return f"broken JSON: {what} at column {error.colno}"
    return f"broken JSON: {error}"  # a key twice, a huge number, extreme nesting


def _read_csv(path: str, bar) -> Iterator[dict | Bad]:
    """Rows of a CSV or TSV file. Every cell stays text."""
    csv.field_size_limit(2**31 - 1)
    separator = "\t" if suffix_of(path) == ".tsv" else ","
    with _opened(path, bar) as file:
        lines = io.TextIOWrapper(
            io.BufferedReader(file, 2**20), "utf-8-sig", errors="surrogateescape", newline=""
        )
        rows = csv.reader(lines, delimiter=separator, strict=True)
        names = next(rows, [])
        if ESCAPED.search("".join(names)):
            raise UserError(f"{path}, the header: {NOT_UTF8}")
        _refuse_repeated(path, names)
        for cells in rows:
            if ESCAPED.search("".join(cells)):
                yield Bad(NOT_UTF8)
            elif len(cells) == len(names):
                yield dict(zip(names, cells, strict=True))
            elif cells:  # else a blank line
                yield Bad(
                    f"the header has {counted(len(names), 'column')}, the row has "
                    f"{counted(len(cells), 'cell')}; quote cells that contain separators or line "
                    "breaks, and don't leave out empty ones"
                )


def _read_arrow(path: str, bar) -> Iterator[dict]:
    """Rows of a Parquet file, or of an Arrow stream, as save_to_disk of datasets writes it."""
    from pyarrow import ipc, parquet

    with _opened(path, bar) as raw:
        if suffix_of(path) == ".parquet":
            file = parquet.ParquetFile(raw)
            names, batches = file.schema_arrow.names, file.iter_batches(1000)
        else:
            batches = ipc.open_stream(raw)
            names = batches.schema.names
        _refuse_repeated(path, names)
        for batch in batches:
            yield from map(_of_table, batch.to_pylist())


def _refuse_repeated(path: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: two columns are named {name!r}")


def _read_hub(source: str, bar) -> Iterator[dict]:
    return map(_of_table, hub_rows(source))


def _of_table(row: dict) -> dict:
    """A row without the keys of objects that are null: Arrow gives each object in a column the keys
    of all of them. A null cell stays: its column exists."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value):
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    if isinstance(value, list):  # its nulls stay
        return [_without_nulls(v) for v in value]
    return value


READERS = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_arrow,
    ".arrow": _read_arrow,
}  # of tables
