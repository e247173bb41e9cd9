"""Finds data files and hub datasets and reads their rows. Errors name the file and the row.

Only hub datasets are read by datasets. For CSV it shifts a row that is one cell too long into other
columns and fills up a short one, in silence. For Parquet it refuses columns of some types, used or
not. For JSON Lines it does not name a broken line, and all rows need the same types. So Parquet and
Arrow are read by PyArrow, as datasets itself does, and the others by the standard library."""

import codecs
import contextlib
import csv
import functools
import glob
import hashlib
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator

from tqdm.utils import CallbackIOWrapper

from llm_demo.core.errors import UserError
from llm_demo.data.bad_rows import Bad
from llm_demo.machine.files import DECODER, LFS, digest
from llm_demo.machine.text import counted, words_of

# searched for in a folder
FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # and their names in PyArrow
NOT_READ = (".xz", ".zip", ".bz2", ".7z", ".lz4", ".tar", ".tgz", ".xlsx")
HELD_OUT = re.compile(r"\.heldout\.")
# Files of a folder that hold splits not for training, by their names on the hub.
NOT_FOR_TRAINING = re.compile(
    r"\.heldout\.|(?i:(^|[-_.])(test|validation|valid|val|dev|eval)([-_.]|$))"
)
NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
NO_ROWS = re.compile(r"^\.|^[^.]*$|\.md$", re.I)  # .gitattributes, LICENSE, README.md
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
# openai/gsm8k, openai/gsm8k:test, openai/gsm8k:main:train[:1000]
HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*?)(?::([\w.-]+))??(?::(\w+(?:\[[\w:%-]*\])?))?")
BOM = b"\xef\xbb\xbf"
OTHER_BOMS = {  # UTF-32's begins with UTF-16's
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip
NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes that "surrogateescape" has kept
BLANK = object()  # a line without a row
MOST_WEIGHT = 1000  # of a file in a mixture


def find_files(train_json: str, split: str | None = None, say: Callable = print) -> list[str]:
    """Expand files, folders, globs and hub datasets, separated by commas, in a fixed order: to
    paths, and to "id:split" or "id:config:split" for the hub.

    Globs and folders skip every x.heldout.*, unless the glob asks for them: evaluation data must
    not be trained on. Folders also skip test and validation splits. say(line) reports the skipped
    files. split: of hub datasets that name none. Raises UserError if there is nothing to read."""
    parts = [train_json] if os.path.exists(train_json) else train_json.split(",")
    files = [file for part in parts for file in _expand(part.strip(), split, say)]
    for path in files:
        if not hub_parts(path) and suffix_of(path) in NOT_READ:
            raise UserError(
                f"{path}: {suffix_of(path)} files are not read: convert it to one of "
                f"{', '.join(FILES)}, also with .gz or .zst"
            )
    for path, times in Counter(map(os.path.realpath, files)).items():
        if times > 1:
            raise UserError(
                f"{path} is listed twice: list it once (to repeat it, give it a weight: {path}*2)"
            )
    return files


def _expand(part: str, split: str | None, say: Callable) -> list[str]:
    """What one part of a list of sources names."""
    if os.path.isfile(part):
        return [part]
    if os.path.isdir(part):
        if os.path.isfile(os.path.join(part, "dataset_dict.json")):  # datasets' save_to_disk
            part = os.path.join(part, "train")
        return _in_folder(part, say)
    if hub := hub_parts(part):
        if not (hub[2] or split):
            raise UserError(f"{part}: name the split to read, for example {part}:test")
        return [part if hub[2] else f"{part}:{split}"]
    if not glob.has_magic(part):
        raise UserError(f"no such data file: {part or '(an empty name)'}")
    matches = [p for p in sorted(glob.glob(part, recursive=True)) if os.path.isfile(p)]
    if ".heldout" not in part:
        matches = _without(matches, HELD_OUT, say)
    if not matches:
        raise UserError(f"no data file matches {part}")
    return matches


def weighted(train_json: str) -> tuple[str, list[float] | None]:
    """(train_json without weights, the weight of each file that find_files then returns, None if
    none is given). "a.jsonl*2" has the weight 2 unless a file has this name. Raises UserError."""
    if os.path.exists(train_json) or "*" not in train_json:
        return train_json, None
    parts = []
    for part in map(str.strip, train_json.split(",")):
        name, star, number = map(str.strip, part.rpartition("*"))
        source = star and (os.path.exists(name) or hub_parts(name) or glob.glob(name))
        weight = None
        if source and not glob.glob(part):
            with contextlib.suppress(ValueError):  # "dir/*.jsonl"
                weight = float(number)
            if not 0 < (weight or 0) < math.inf and (weight is not None or os.path.isfile(name)):
                raise UserError(
                    f"--train_json {part}: the weight {number!r} is not a number above 0"
                )
            if (weight or 0) > MOST_WEIGHT:
                raise UserError(
                    f"--train_json {part}: a weight must be at most {MOST_WEIGHT:,}; --num_epochs "
                    "repeats all files"
                )
        parts.append((part if weight is None else name, weight))
    if all(weight is None for _, weight in parts):
        return train_json, None
    quiet = functools.partial(find_files, split="train", say=lambda line: None)
    weights = [1 if weight is None else weight for name, weight in parts for _ in quiet(name)]
    return ",".join(name for name, _ in parts), weights


def hub_parts(name: str) -> tuple[str, str | None, str | None] | None:
    """(id, configuration, split) if `name` is a hub dataset, else None. A name that begins with an
    existing folder is a file, possibly mistyped."""
    match = HUB.fullmatch(name)
    if not match or os.path.isdir(name.split("/")[0]) or suffix_of(name) in FILES:
        return None
    return match.groups()


def _in_folder(folder: str, say: Callable) -> list[str]:
    if not os.path.isdir(folder):
        splits = ", ".join(sorted(next(os.walk(os.path.dirname(folder)))[1]))
        raise UserError(f"no such split: {folder}; name one of the folders beside it: {splits}")
    paths = _data_files(folder, "*")
    if files := _without(paths, NOT_FOR_TRAINING, say):
        others = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        others = [name for name in others if not NO_ROWS.search(name)]
        if others := sorted({*others} - {*map(os.path.basename, paths)} - {*NO_DATA}):
            more = f" and {len(others) - 12} more" if len(others) > 12 else ""
            say(f"data: skipped, unsupported file types: {', '.join(others[:12])}{more}")
        return files
    holds = f"only {', '.join(map(os.path.basename, paths))}" if paths else "no data file"
    usable = _without(_data_files(folder, "*/*"), NOT_FOR_TRAINING, say=lambda line: None)
    such = f", such as {os.path.dirname(usable[0])}" if usable else ""
    raise UserError(
        f"{folder} is a folder with {holds}: name a data file ({', '.join(FILES)}, also with "
        f".gz or .zst) or the folder that holds it{such}"
    )


def _data_files(folder: str, pattern: str) -> list[str]:
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))
    return [p for p in paths if suffix_of(p) in FILES and os.path.basename(p) not in NO_DATA]


def _without(paths: list[str], names: re.Pattern, say: Callable) -> list[str]:
    """The paths of files whose names do not match; the others are reported."""
    skipped = [path for path in paths if names.search(os.path.basename(path))]
    if skipped:
        say(f"data: skipped, named as held-out or test data: {', '.join(skipped)}")
    return [path for path in paths if path not in skipped and os.path.isfile(path)]


def _split_name(path: str) -> tuple[str, str, str]:
    """x.jsonl.gz -> ("x", ".jsonl", ".gz"): the extension and the compression."""
    stem, last = os.path.splitext(path)
    compressed = last.lower() in COMPRESSED
    return (*os.path.splitext(stem), last) if compressed else (stem, last, "")


def heldout_beside(train_json: str) -> str | None:
    """The path x.heldout.jsonl for a single file x.jsonl, if both exist."""
    stem, kind, compression = _split_name(train_json)
    beside = f"{stem}.heldout{kind}{compression}"
    return beside if os.path.isfile(train_json) and os.path.isfile(beside) else None


def suffix_of(path: str) -> str:
    """The extension without the compression: ".jsonl" for x.jsonl.gz."""
    _, kind, compression = _split_name(path)
    return (kind or compression).lower()


def content_of(source: str) -> str:
    """The SHA-256 of a file, or of all rows of a hub dataset, as hex digits. Raises UserError."""
    if not hub_parts(source):
        try:
            return digest(source)
        except OSError as error:
            raise UserError(f"cannot read {source}: {error.strerror}") from None
    hashed = hashlib.sha256()
    for rows in _hub_rows(source).iter(batch_size=1000):
        hashed.update(json.dumps(rows, default=str, sort_keys=True).encode())
    return hashed.hexdigest()


def read_rows(path: str, bar=None, keep_bad=False) -> Iterator[tuple[int, dict]]:
    """Yield (number from 1, row): of the line in JSON Lines, whose blank lines are skipped, else of
    the row. A UTF-8 BOM is accepted. bar: a progress bar, advanced by the bytes read.

    Raises UserError for an empty file, one that is damaged, or a row that can't be read or is no
    object. keep_bad: yield a Bad in place of such a row."""
    import pyarrow  # installed with datasets

    number, empty, hub = 0, True, hub_parts(path)
    read = TABLES.get(suffix_of(path), _read_json)
    try:
        for number, row in enumerate(_hub_rows(path) if hub else read(path, bar), 1):
            if row is BLANK:
                continue
            empty = False
            if not isinstance(row, dict | Bad):
                wrong_name = isinstance(row, list) and suffix_of(path) != ".json"
                hint = "; a file with one array of rows must be named .json" * wrong_name
                row = Bad(f"a row must be a JSON object, not {json.dumps(row)[:50]}{hint}")
            if isinstance(row, Bad) and not keep_bad:
                raise UserError(f"{path}{place_of(path)}{number}: {row}")
            if hub or read is _read_arrow:  # a null cell stays: its column exists
                row = {key: _without_nulls(value) for key, value in row.items()}
            yield number, row
    except (OSError, ValueError, RecursionError, csv.Error, pyarrow.ArrowException) as error:
        raise UserError(_what_is_wrong(path, number, error)) from None
    if empty:
        raise UserError(f"{path} is empty: it has no rows to train on")


def place_of(path: str) -> str:
    """What stands between the name of a source and the number of a row."""
    return ", row " if hub_parts(path) or suffix_of(path) in TABLES or is_array(path) else ":"


def is_array(path: str) -> bool:
    """Whether a .json file is one array of rows; False for one that can't be read."""
    with contextlib.suppress(OSError):
        if suffix_of(path) == ".json":
            with _opened(path) as file:
                return file.read(1000).removeprefix(BOM).lstrip()[:1] == b"["
    return False


def _what_is_wrong(path: str, number: int, error: Exception) -> str:
    """What to say of a reader's error behind row `number`, after which it can't read on."""
    last = os.path.splitext(path)[1].lower()
    if getattr(error, "errno", None):
        return f"cannot read {path}: {error.strerror}"
    if isinstance(error, json.JSONDecodeError):
        return f"{path}:{number + error.lineno}: {_broken(path, error)}"
    text = suffix_of(path) not in TABLES and isinstance(error, (ValueError, RecursionError))
    if text or isinstance(error, UnicodeDecodeError):
        return f"{path}: {_broken(path, error)}"
    where = path if last in COMPRESSED else f"{path}{place_of(path)}{number + 1}"
    return f"{where}: damaged or truncated {last} file: {words_of(error)}"


def _broken(path: str, error: Exception) -> str:
    """What is wrong with the text of a row, or of a file that is one array."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 ({error.reason}); re-encode the file"
    if not isinstance(error, json.JSONDecodeError):
        return f"broken JSON: {error}"  # a key twice, a huge number, extreme nesting
    hint = "every line must be one JSON object"
    if suffix_of(path) == ".json":
        hint = "a .json file must be one array of objects, or one object in each line"
    what = error.msg.removesuffix(" at")  # "Invalid control character at"
    return f"broken JSON: {what} at column {error.colno}; {hint}"


@contextlib.contextmanager
def _opened(path: str, bar=None):
    """A file of PyArrow with what is in a file, decompressed."""
    import pyarrow

    with open(path, "rb") as file:
        if file.peek(len(LFS)).startswith(LFS):
            raise UserError(
                f"{path} is a Git LFS pointer, not the data: run git lfs pull in its repository, "
                "or download the file itself"
            )
        if bar is not None:
            file = CallbackIOWrapper(bar.update, file, "read")
        compression = _split_name(path)[2].lower()
        yield pyarrow.input_stream(file, compression=COMPRESSED.get(compression))


@contextlib.contextmanager
def _opened_text(path: str, bar):
    """`_opened`, buffered, for text in UTF-8. Raises UserError if its first bytes say otherwise."""
    with _opened(path, bar) as file:
        file = io.BufferedReader(file, 2**20)
        head = file.peek(4)
        for bom, encoding in OTHER_BOMS.items():
            if head.startswith(bom):
                raise UserError(
                    f"{path}{place_of(path)}1: not UTF-8, but {encoding}; re-encode the file: "
                    f"iconv -f {encoding} -t UTF-8"
                )
        yield file


def _read_json(path: str, bar) -> Iterator:
    """Rows of JSON Lines, BLANK for an empty line, or of one array of objects in a .json file."""
    with _opened_text(path, bar) as file:
        if is_array(path):
            yield from DECODER.decode(file.read().decode("utf-8-sig"))
            return
        for line in file:
            try:
                text = line.decode("utf-8-sig").rstrip()
                row = DECODER.decode(text) if text else BLANK
            except (ValueError, RecursionError) as error:
                row = Bad(_broken(path, error))
            yield row


def _read_csv(path: str, bar) -> Iterator[dict | Bad]:
    """Rows of a CSV or TSV file. Every cell stays text."""
    csv.field_size_limit(2**31 - 1)
    separator = "\t" if suffix_of(path) == ".tsv" else ","
    with _opened_text(path, bar) as file:
        # a decoder's error would name no row: it reads ahead
        lines = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        cells = csv.reader(lines, delimiter=separator, strict=True)
        names = next(cells, [])
        if NOT_UTF8.search("".join(names)):
            raise UserError(f"{path}, line 1 (the header): not UTF-8; re-encode the file")
        _refuse_repeated(path, names)
        if len(names) == 1 and (other := re.search("[;,\t]", names[0])):
            raise UserError(
                f"{path}: the header is one cell, {names[0][:80]!r}: separate cells by "
                f"{SEPARATORS[separator]}, not {SEPARATORS[other[0]]}"
            )
        for row in filter(None, cells):  # blank lines are no rows
            if byte := NOT_UTF8.search("".join(row)):
                yield Bad(f"not UTF-8 (byte 0x{ord(byte[0]) - 0xDC00:02x}); re-encode the file")
            elif len(row) != len(names):
                yield Bad(
                    f"{counted(len(row), 'cell')}, but the header has "
                    f"{counted(len(names), 'column')}: quote cells that contain separators or "
                    "line breaks, and don't leave out empty ones"
                )
            else:
                yield dict(zip(names, row, strict=True))


def _read_arrow(path: str, bar) -> Iterator[dict]:
    """Rows of a Parquet file, or of an Arrow stream as datasets' save_to_disk writes it."""
    from pyarrow import ipc
    from pyarrow.parquet import ParquetFile

    parquet = suffix_of(path) == ".parquet"
    with _opened(path, bar) as raw, ParquetFile(raw) if parquet else ipc.open_stream(raw) as file:
        _refuse_repeated(path, (file.schema_arrow if parquet else file.schema).names)
        for batch in file.iter_batches(1000) if parquet else file:
            yield from batch.to_pylist()


def _refuse_repeated(path: str, names: list[str]) -> None:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path}: two columns are named {repeated[0]!r}")


@functools.lru_cache(maxsize=4)  # each is hashed, then read
def _hub_rows(source: str):
    """A hub dataset, downloaded once to the hub's cache. Raises UserError on failure."""
    from datasets import load_dataset

    name, config, split = hub_parts(source)
    try:
        return load_dataset(name, config, split=split)
    except Exception as error:  # from any of several libraries
        reason = " ".join(str(error).split())[:300] or repr(error)
        raise UserError(
            f"{source}: not a local file, and loading it from the hub failed: {reason} "
            "(a dataset is named id, id:split or id:configuration:split)"
        ) from None


def _without_nulls(value):
    """A value without the keys that are null, at every depth: Arrow gives each object in a column
    the keys of all of them. Nulls in lists stay."""
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


TABLES = {".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_arrow, ".arrow": _read_arrow}
