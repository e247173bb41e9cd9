"""Finds data files and hub datasets and reads their rows. Errors name the line."""

import contextlib
import csv
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator

from llm_demo.core.errors import UserError
from llm_demo.job.files import DECODER, digest
from llm_demo.job.text import counted

FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")  # searched for in a folder

TABLES = (".csv", ".tsv", ".parquet", ".arrow")

COMPRESSED = (".gz", ".zst")

NOT_READ = (".xz", ".zip", ".bz2", ".7z", ".lz4", ".tar", ".tgz", ".xlsx")

LFS = b"version https://git-lfs.github.com/spec/v1"

HELD_OUT = re.compile(r"\.heldout\.")

# Files of a folder that hold splits not for training, by their names on the hub.
NOT_FOR_TRAINING = re.compile(
    r"\.heldout\.|(?i:(^|[-_.])(test|validation|valid|val|dev|eval)([-_.]|$))"
)

NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")

WEIGHT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf)", re.I)

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}

# openai/gsm8k, openai/gsm8k:test, openai/gsm8k:main:train[:1000]
HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*?)(?::([\w.-]+))??(?::(\w+(?:\[[\w:%-]*\])?))?")


def find_files(
    train_json: str, config: str | None = None, split: str | None = None, say: Callable = print
) -> list[str]:
    """Expand files, folders, globs and hub datasets, separated by commas, in a fixed order: to
    paths, and to "id:split" or "id:config:split" for the hub.

    Globs and folders skip every x.heldout.*, unless the glob asks for them: evaluation data must
    not be trained on. Folders also skip test and validation splits. say(line) reports the skipped
    files. config, split: for hub datasets that do not name their own. Raises UserError if there is
    nothing to read."""
    files = []
    for part in [train_json] if os.path.exists(train_json) else train_json.split(","):
        part = part.strip()
        if os.path.isfile(part):
            files.append(part)
        elif os.path.isdir(part):
            if os.path.isfile(os.path.join(part, "dataset_dict.json")):  # datasets' save_to_disk
                part = os.path.join(part, split or "train")
            files += _in_folder(part, say)
        elif hub := hub_parts(part):
            name, own_config, own_split = hub
            if not (own_split or split):
                raise UserError(f"{part}: name the split to read, for example {part}:test")
            files.append(":".join(filter(None, (name, own_config or config, own_split or split))))
        elif glob.has_magic(part):
            matches = sorted(p for p in glob.glob(part, recursive=True) if os.path.isfile(p))
            if ".heldout" not in part:
                matches = _without(matches, HELD_OUT, say)
            if not matches:
                raise UserError(f"no data file matches {part}")
            files += matches
        else:
            raise UserError(f"no such data file: {part or '(an empty name)'}")
    for path in files:
        if not hub_parts(path) and _suffix(path) in NOT_READ:
            raise UserError(
                f"{path}: {_suffix(path)} files are not read: convert it to one of "
                f"{', '.join(FILES)}, also with .gz or .zst"
            )
    return files


def weighted(
    train_json: str, config: str | None = None, split: str | None = "train"
) -> tuple[str, list[float] | None]:
    """(train_json without weights, the weight of each file that find_files then returns, None if
    none is given). "a.jsonl*2" has the weight 2 unless a file has this name. Raises UserError."""
    if os.path.exists(train_json) or "*" not in train_json:
        return train_json, None
    parts, given = [], False
    for part in map(str.strip, train_json.split(",")):
        name, star, number = part.rpartition("*")
        source = star and (os.path.exists(name) or hub_parts(name) or glob.glob(name))
        weight = 1.0
        if source and WEIGHT.fullmatch(number) and not glob.glob(part):
            name, weight, given = name.strip(), float(number), True
            if not 0 < weight < math.inf:
                raise UserError(f"--train_json {part}: the weight {number} is not above 0")
        elif os.path.isfile(name) and not glob.glob(part):
            raise UserError(f"--train_json {part}: {number!r} is not a weight, such as 2 or 0.3")
        else:
            name = part
        parts.append((name, weight))
    if not given:
        return train_json, None
    quiet = functools.partial(find_files, config=config, split=split, say=lambda line: None)
    weights = [weight for name, weight in parts for _ in quiet(name)]
    return ",".join(name for name, _ in parts), weights


def hub_parts(name: str) -> tuple[str, str | None, str | None] | None:
    """(id, configuration, split) if `name` is a hub dataset, else None. A name that begins with an
    existing folder is a file, possibly mistyped."""
    match = HUB.fullmatch(name)
    if not match or os.path.isdir(name.split("/")[0]) or _suffix(name) in FILES:
        return None
    return match.groups()


def _in_folder(folder: str, say: Callable) -> list[str]:
    if not os.path.isdir(folder):
        splits = ", ".join(sorted(next(os.walk(os.path.dirname(folder)))[1]))
        raise UserError(f"no such split: {folder}; name one of the folders beside it: {splits}")
    names = [n for n in sorted(os.listdir(folder)) if n[0] != "." and n not in NO_DATA]
    paths = [os.path.join(folder, n) for n in names if _suffix(n) in FILES]
    paths = [path for path in paths if os.path.isfile(path)]
    files = _without(paths, NOT_FOR_TRAINING, say)
    if not files:
        holds = f"only {', '.join(map(os.path.basename, paths))}" if paths else "no data file"
        raise UserError(
            f"{folder} is a folder with {holds}: name a data file ({', '.join(FILES)}, also with "
            f".gz or .zst) or the folder that holds it{_subfolder(folder)}"
        )
    return files


def _subfolder(folder: str) -> str:
    """ ", such as FOLDER/NAME" with the first subfolder that has data to train on, or ""."""
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*", "*"))):
        within, name = os.path.split(path)
        if _suffix(name) in FILES and name not in NO_DATA and not NOT_FOR_TRAINING.search(name):
            return f", such as {within}"
    return ""


def _without(paths: list[str], names: re.Pattern, say: Callable) -> list[str]:
    """The paths whose file names do not match; the others are reported."""
    skipped = [path for path in paths if names.search(os.path.basename(path))]
    if skipped:
        say(f"data: skipped, named as held-out or test data: {', '.join(skipped)}")
    return [path for path in paths if path not in skipped]


def split_name(path: str) -> tuple[str, str]:
    """x.jsonl.gz -> ("x", ".jsonl.gz"): the extension with its compression."""
    stem, last = os.path.splitext(path)
    if last.lower() in COMPRESSED:
        stem, kind = os.path.splitext(stem)
        last = kind + last
    return stem, last


def _suffix(path: str) -> str:
    """The extension without the compression: ".jsonl" for x.jsonl.gz."""
    extension = split_name(path)[1].lower()
    return "." + extension.split(".")[1] if extension else ""


def content_of(source: str) -> str:
    """The SHA-256 of a file, or of all rows of a hub dataset, as hex digits."""
    if not hub_parts(source):
        return digest(source)
    hashed = hashlib.sha256()
    for rows in _hub_rows(source).iter(batch_size=1000):
        hashed.update(json.dumps(rows, default=str, sort_keys=True).encode())
    return hashed.hexdigest()


def read_rows(path: str, progress=None) -> Iterator[tuple[str, dict]]:
    """Yield ("file:line", row), or in tables and arrays ("file, row N", row). Blank lines are
    skipped and a UTF-8 BOM is accepted.

    Only hub datasets are read with datasets. In JSONL it stops at a broken line without naming it,
    and forces one schema on all rows. In CSV it converts None and 007 to something other than text.
    In Parquet it refuses columns of some types, used or not. Raises UserError for an empty file,
    broken JSON or encoding, or a row of another type."""
    readers = {
        ".parquet": _read_arrow, ".arrow": _read_arrow, ".csv": _read_csv, ".tsv": _read_csv,
        ".json": _read_json,
    }  # fmt: skip
    read = _read_hub if hub_parts(path) else readers.get(_suffix(path), _read_lines)
    number, prefix = 0, row_prefix(path)
    for number, row in read(path, progress):
        where = f"{prefix}{number}"
        if not isinstance(row, dict):
            wrong_name = isinstance(row, list) and _suffix(path) != ".json"
            hint = "; a file with one array of rows must be named .json" * wrong_name
            raise UserError(
                f"{where}: a row must be a JSON object, not {json.dumps(row)[:50]}{hint}"
            )
        yield where, row
    if not number:
        raise UserError(f"{path} is empty: it has no rows to train on")


def table_of(path: str) -> str:
    """ ".csv", ".tsv" or ".parquet" for a table, "" for anything else."""
    return _suffix(path) if not hub_parts(path) and _suffix(path) in TABLES else ""


def row_prefix(path: str) -> str:
    """What stands before a row's number: "FILE, row " in tables and arrays, else "FILE:"."""
    rows = hub_parts(path) or table_of(path) or _suffix(path) == ".json" and _array(path)
    return f"{path}, row " if rows else f"{path}:"


def _array(path: str) -> bool:
    with _opened(path) as file:
        return file.read(1000).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


@contextlib.contextmanager
def _opened(path: str, progress=None):
    """A buffered reader of the decompressed file. Raises UserError if reading fails."""
    compressed = os.path.splitext(path)[1].lower()
    _refuse_pointer(path)
    try:
        with open(path, "rb") as raw:
            if progress is not None:
                raw = _Counted(raw, progress)
            if compressed == ".gz":
                with gzip.open(raw) as decompressed:
                    yield decompressed
            elif compressed == ".zst":
                yield io.BufferedReader(_zstd(path, raw))
            else:
                yield io.BufferedReader(raw, 2**20) if progress is not None else raw
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        raise UserError(f"{path}: damaged or truncated {compressed} file: {error}") from None


class _Counted(io.RawIOBase):
    """A file whose reads advance a progress bar."""

    def __init__(self, file, progress):
        self.file, self.progress = file, progress

    def readable(self):
        return True

    def readinto(self, buffer):
        n = self.file.readinto(buffer)
        self.progress.update(n)
        return n


def _zstd(path: str, raw):
    import pyarrow  # installed with datasets; includes the codec

    if not pyarrow.Codec.is_available("zstd"):
        raise UserError(
            f"{path}: the installed pyarrow cannot read .zst: decompress the file with zstd -d"
        )
    return pyarrow.CompressedInputStream(raw, "zstd")


def _refuse_pointer(path: str) -> None:
    try:
        with open(path, "rb") as file:
            start = file.read(len(LFS))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if start == LFS:
        raise UserError(
            f"{path} is a Git LFS pointer, not the data: run git lfs pull in its repository, or "
            "download the file itself"
        )


def _read_lines(path: str, progress=None) -> Iterator[tuple[int, object]]:
    hint = "every line must be one JSON object"
    if _suffix(path) == ".json":
        hint = "a .json file must be one array of objects, or one object in each line"
    with _opened(path, progress) as lines:
        for number, raw in enumerate(lines, 1):
            if line := _decode(raw, f"{path}:{number}", "utf-8-sig" if number == 1 else "utf-8"):
                yield number, _parse(line, path, number, hint)


def _read_json(path: str, progress=None) -> Iterator[tuple[int, object]]:
    """Rows of one array of objects, or of JSON Lines in a .json file."""
    if not _array(path):
        yield from _read_lines(path, progress)
        return
    with _opened(path, progress) as file:
        text = _decode(file.read(), path, "utf-8-sig")
    yield from enumerate(_parse(text, path, 1, "the file must be one array of rows"), 1)


def _decode(raw: bytes, where: str, encoding: str) -> str:
    try:
        return raw.decode(encoding).rstrip()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason}); re-encode the file") from None


def _parse(text: str, path: str, line: int, hint: str):
    """Parse JSON that starts in this line of the file."""
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        problem = f"{path}:{line + error.lineno - 1}: broken JSON: {error.msg}"
        raise UserError(f"{problem} at column {error.colno}; {hint}") from None
    except (ValueError, RecursionError) as error:  # a key twice, a huge number, extreme nesting
        where = path if "\n" in text else f"{path}:{line}"  # somewhere in a whole file
        raise UserError(f"{where}: broken JSON: {error}") from None


def _read_csv(path: str, progress=None) -> Iterator[tuple[int, dict]]:
    """Rows of a CSV or TSV file. Every cell stays text."""
    csv.field_size_limit(2**31 - 1)
    tab = "\t" if _suffix(path) == ".tsv" else ","
    number = 0
    with _opened(path, progress) as file:
        lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
        reader = csv.DictReader(lines, delimiter=tab, strict=True)
        try:
            names = reader.fieldnames or []
            if repeated := [name for name in names if names.count(name) > 1]:
                raise UserError(f"{path}: two columns are named {repeated[0]!r}")
            if len(names) == 1 and (found := re.search("[;,\t]", names[0])):
                raise UserError(
                    f"{path}: the header is one cell, {names[0][:80]!r}: separate cells by "
                    f"{SEPARATORS[tab]}, not {SEPARATORS[found[0]]}"
                )
            for number, row in enumerate(reader, 1):
                surplus = row.pop(None, [])
                cells = sum(cell is not None for cell in row.values()) + len(surplus)
                if cells != len(names):
                    raise UserError(
                        f"{path}, row {number}: {counted(cells, 'cell')}, but the header has "
                        f"{counted(len(names), 'column')}: quote cells that contain separators or "
                        "line breaks, and don't leave out empty ones"
                    )
                yield number, row
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 ({error.reason}); re-encode the file") from None
        except csv.Error as error:
            kind = _suffix(path)[1:].upper()
            raise UserError(f"{path}, row {number + 1}: not valid {kind}: {error}") from None


def _read_arrow(path: str, progress=None) -> Iterator[tuple[int, dict]]:
    """Rows of a Parquet file, or of an Arrow stream as datasets' save_to_disk writes it."""
    import pyarrow  # installed with datasets
    from pyarrow import ipc
    from pyarrow.parquet import ParquetFile

    _refuse_pointer(path)
    kind = _suffix(path)[1:].capitalize()
    numbers = itertools.count(1)
    try:
        with ParquetFile(path) if kind == "Parquet" else ipc.open_stream(path) as file:
            names = (file.schema_arrow if kind == "Parquet" else file.schema).names
            if repeated := [name for name in names if names.count(name) > 1]:
                raise UserError(f"{path}: two columns are named {repeated[0]!r}")
            for batch in file.iter_batches(1000) if kind == "Parquet" else file:
                for row in batch.to_pylist():
                    yield next(numbers), _of_table(row)
        if progress is not None:
            progress.update(os.path.getsize(path))
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a valid {kind} file: {reason}") from None


def _read_hub(source: str, progress=None) -> Iterator[tuple[int, dict]]:
    for number, row in enumerate(_hub_rows(source), 1):
        yield number, _of_table(row)


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
            "(see --dataset_config and --dataset_split)"
        ) from None


def _of_table(row: dict) -> dict:
    """A row without the nulls inside its cells. A null cell stays: its column exists."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value):
    """A value without the keys that are null, at every depth: Arrow gives each object in a column
    the keys of all of them. Nulls in lists stay."""
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
