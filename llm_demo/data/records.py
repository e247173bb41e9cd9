"""Reads rows of a data file, in any of seven formats, as records. Errors name the line."""

import contextlib
import csv
import functools
import glob
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from llm_demo.data.batch import Record
from llm_demo.errors import UserError

# Required keys, in the order they are tried on a file's first row. "text" is last and "messages"
# early because published sets often carry a flattened copy beside the real columns.
FORMATS = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "input": ("input", "target"),
    "text": ("text",),
}

# Optional keys. Any other key is not used, and the log says so.
OPTIONAL = {
    "tokens": ("labels",),
    "messages": ("system", "tools"),
    "conversations": ("system", "tools"),
    "prompt": ("system", "history", "tools"),
    "alpaca": ("input", "system", "history", "tools"),
    "input": ("system", "history", "tools"),
    "text": (),
}

DATA_FORMATS = ("auto", *FORMATS)

ACCEPTED = (
    "messages, conversations, prompt + completion, instruction + output (+ input), input + target, "
    "text, input_ids (+ labels), or your own two names by --input_key and --target_key"
)

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_call": "assistant",  # its text is the call, as JSON
    "tool_call": "assistant",
}

CALLS = ("function_call", "tool_call")

MARKS = ("weight", "train", "loss_mask", "loss")  # keys of a turn; 0 or false: not learnt

FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")  # searched for in a folder

COMPRESSED = (".gz", ".zst")

EMPTY = (None, "", [], {})

LFS = b"version https://git-lfs.github.com/spec/v1"

# Files of a folder that hold splits not for training, by their names on the hub.
NOT_FOR_TRAINING = re.compile(r"(^|[-_.])(test|validation|valid|val|dev|eval)([-_.]|$)", re.I)

NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")

# openai/gsm8k, openai/gsm8k:test, openai/gsm8k:main:train[:1000]
HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*?)(?::([\w.-]+))??(?::(\w+(?:\[[\w:%-]*\])?))?")


class Layout(NamedTuple):
    """How the rows of one file are read."""

    format: str
    keys: tuple[str, ...]
    why: str  # for the log


def find_files(
    train_json: str, config: str | None = None, split: str | None = None, say: Callable = None
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
            files += _in_folder(part, say)
        elif hub := hub_parts(part):
            name, own_config, own_split = hub
            if not (own_split or split):
                raise UserError(f"{part}: name the split to read, for example {part}:test")
            files.append(":".join(filter(None, (name, own_config or config, own_split or split))))
        elif glob.has_magic(part):
            found = sorted(p for p in glob.glob(part, recursive=True) if os.path.isfile(p))
            if ".heldout" not in part:
                found = _without(found, lambda p: ".heldout." in os.path.basename(p), say)
            if not found:
                raise UserError(f"no data file matches {part}")
            files += found
        else:
            raise UserError(f"no such data file: {part or '(an empty name)'}")
    return files


def hub_parts(name: str) -> tuple[str, str | None, str | None] | None:
    """(id, configuration, split) if `name` is a hub dataset, else None. A name that begins with an
    existing folder is a file, possibly mistyped."""
    found = HUB.fullmatch(name)
    if not found or os.path.isdir(name.split("/")[0]) or _suffix(name) in FILES:
        return None
    return found.groups()


def _in_folder(folder: str, say) -> list[str]:
    names = [n for n in sorted(os.listdir(folder)) if n[0] != "." and n not in NO_DATA]
    found = [os.path.join(folder, n) for n in names if _suffix(n) in FILES]
    found = [path for path in found if os.path.isfile(path)]

    def kept_aside(path: str) -> bool:
        name = os.path.basename(path)
        return ".heldout." in name or NOT_FOR_TRAINING.search(name) is not None

    files = _without(found, kept_aside, say)
    if not files:
        what = f"only {', '.join(map(os.path.basename, found))}" if found else "no data file"
        raise UserError(
            f"{folder} is a folder with {what}: name a data file ({', '.join(FILES)}, also with "
            f".gz or .zst) or a glob such as {folder.rstrip('/')}/*/*.parquet"
        )
    return files


def _without(files: list[str], leave_out: Callable, say) -> list[str]:
    if (out := [path for path in files if leave_out(path)]) and say:
        say(f"data: skipped, named as held-out or test data: {', '.join(out)}")
    return [path for path in files if not leave_out(path)]


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


def content_of(source: str, digest: Callable) -> str:
    """A hash of one result of find_files: digest(path) of a file, all rows of a hub dataset."""
    if not hub_parts(source):
        return digest(source)
    hashed = hashlib.sha256()
    for rows in _hub_rows(source).iter(batch_size=1000):
        hashed.update(json.dumps(rows, default=str, sort_keys=True).encode())
    return hashed.hexdigest()


def size_of(source: str) -> int:
    """Bytes of a file, for a progress bar; 0 for a hub dataset."""
    return 0 if hub_parts(source) else os.path.getsize(source)


def read_rows(path: str, progress=None) -> Iterator[tuple[str, dict]]:
    """Yield ("file:line", row); in tables and arrays, the row number replaces the line. Blank lines
    are skipped and a UTF-8 BOM is accepted.

    Parquet and hub datasets are read with datasets. JSONL is not: datasets stops at a broken line
    without naming it, and forces one schema on all rows. Nor is CSV: datasets converts None and 007
    to something other than text. Raises UserError for an empty file, broken JSON or encoding, or a
    row of another type."""
    kind, read = _suffix(path), _read_lines
    if hub_parts(path):
        kind, read = "hub", _read_hub
    elif kind == ".parquet":
        _refuse_pointer(path)
        read = _read_parquet
    elif kind in (".csv", ".tsv"):
        read = _read_csv
    elif kind == ".json":
        read = _read_json
    empty = True
    for found in read(path, progress):
        empty = False
        yield found
    if empty:
        raise UserError(f"{path} is empty: it has no rows to train on")


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
                with gzip.open(raw) as opened:
                    yield opened
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


def _read_lines(path: str, progress=None) -> Iterator[tuple[str, dict]]:
    with _opened(path, progress) as lines:
        for number, raw in enumerate(lines, 1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
                if not line:
                    continue
                row = json.loads(line)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where}: not UTF-8 ({error.reason}); re-encode the file"
                ) from None
            except json.JSONDecodeError as error:
                what = f"broken JSON: {error.msg} at column {error.colno}"
                what += f"; every line must be one complete JSON object{_array(number, raw)}"
                raise UserError(f"{where}: {what}") from None
            except (ValueError, RecursionError) as error:  # a huge number or extreme nesting
                raise UserError(f"{where}: broken JSON: {error}") from None
            if not isinstance(row, dict):
                what = f"a line must be one JSON object, not {_kind(row)}{_array(number, raw)}"
                raise UserError(f"{where}: {what}")
            yield where, row


def _array(number: int, raw: bytes) -> str:
    if number == 1 and raw.lstrip().startswith(b"["):
        return "; a file with one array of rows must be named .json"
    return ""


def _read_json(path: str, progress=None) -> Iterator[tuple[str, dict]]:
    """Rows of one array of objects, or of JSON Lines in a .json file."""
    with _opened(path) as file:
        start = file.read(1000).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start != b"[":
        yield from _read_lines(path, progress)
        return
    with _opened(path, progress) as file:
        try:
            rows = json.loads(file.read().decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 ({error.reason}); re-encode the file") from None
        except json.JSONDecodeError as error:
            what = f"broken JSON: {error.msg} at column {error.colno}"
            raise UserError(f"{path}:{error.lineno}: {what} of the array of rows") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: broken JSON: {error}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: a row must be a JSON object, not {_kind(row)}")
        yield f"{path}:{number}", row


def _read_csv(path: str, progress=None) -> Iterator[tuple[str, dict]]:
    """Rows of a CSV or TSV file. Every cell stays text."""
    csv.field_size_limit(2**31 - 1)
    tab = "\t" if _suffix(path) == ".tsv" else ","
    number = 0
    with _opened(path, progress) as file:
        lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
        reader = csv.DictReader(lines, delimiter=tab, strict=True)
        try:
            names = reader.fieldnames or []
            if twice := [name for name in names if names.count(name) > 1]:
                raise UserError(f"{path}: two columns are named {twice[0]!r}")
            for number, row in enumerate(reader, 1):
                if None in row:
                    raise UserError(
                        f"{path}:{number}: {len(names) + len(row[None])} cells, but "
                        f"{len(names)} columns: quote cells that contain the separator"
                    )
                yield f"{path}:{number}", {k: v for k, v in row.items() if v is not None}
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 ({error.reason}); re-encode the file") from None
        except csv.Error as error:
            kind = _suffix(path)[1:].upper()
            raise UserError(f"{path}:{number + 1}: not valid {kind}: {error}") from None


def _read_parquet(path: str, progress=None) -> Iterator[tuple[str, dict]]:
    from datasets import load_dataset  # takes a second to import, and most files are JSONL

    try:
        rows = load_dataset("parquet", data_files=path, split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"{path}:{number}", _without_nulls(row)
        if progress is not None:
            progress.update(os.path.getsize(path))
    except (ValueError, OSError) as error:  # pyarrow's errors are ValueErrors
        raise UserError(
            f"{path} is not a valid Parquet file: {str(error).splitlines()[0]}"
        ) from None


def _read_hub(source: str, progress=None) -> Iterator[tuple[str, dict]]:
    for number, row in enumerate(_hub_rows(source), 1):
        yield f"{source}:{number}", _without_nulls(row)


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


def _without_nulls(row: dict) -> dict:
    return {key: value for key, value in row.items() if value is not None}


def file_layout(row, where, data_format="auto", input_key=None, target_key=None) -> Layout:
    """How to read a file, by its first row and the flags. Raises UserError if flags conflict."""
    if data_format not in DATA_FORMATS:
        raise UserError(f"--data_format {data_format}: choose from {', '.join(DATA_FORMATS)}")
    if bool(input_key) != bool(target_key):
        raise UserError("--input_key and --target_key go together: give both or neither")
    if input_key:
        if data_format not in ("auto", "prompt", "input"):
            raise UserError(
                f"--data_format {data_format} does not accept --input_key and --target_key"
            )
        return Layout("input", (input_key, target_key), "--input_key, --target_key")
    if data_format != "auto":
        return Layout(data_format, FORMATS[data_format], "--data_format")
    for name, keys in FORMATS.items():
        if all(key in row for key in keys):
            return Layout(name, keys, "first row")
    raise UserError(f"{where}: unknown row shape, keys: {_keys(row)}; accepted: {ACCEPTED}")


def to_record(row: dict, layout: Layout, where: str) -> Record:
    """Convert one row. Raises UserError for a missing key, an unknown role, or non-text content."""
    missing = [key for key in layout.keys if key not in row]
    if missing:
        raise UserError(
            f"{where}: no {' or '.join(map(repr, missing))} in this row, keys: {_keys(row)}; "
            f"the file is read as {layout.format} ({layout.why}); accepted: {ACCEPTED}"
        )
    values = [row[key] for key in layout.keys]
    if layout.format == "text":
        return Record(None, text=_text(values[0], where, "text"))
    if layout.format == "tokens":
        return Record(None, tokens=_tokens(values[0], row.get("labels"), where))
    more = {key: row[key] for key in used_keys(row, layout)}
    tools = _tools(more.get("tools"), where)
    if layout.format in ("messages", "conversations"):
        messages = _messages(values[0], where, layout.keys[0])
        return _record(_system(more, where, messages) + messages, tools, where)
    if "input" in more:
        extra = _text(more["input"], where, "input")
        values[0] = _text(values[0], where, "instruction") + "\n\n" + extra
    prompt, completion = (
        _messages(value, where, key)
        if isinstance(value, list) and value and not _is_part(value[0])
        else [{"role": role, "content": _text(value, where, key)}]
        for value, key, role in zip(values, layout.keys, ("user", "assistant"), strict=True)
    )
    earlier = _history(more.get("history"), where)
    earlier = _system(more, where, earlier or prompt) + earlier
    context = frozenset(range(len(earlier), len(earlier) + len(prompt)))
    return _record(earlier + prompt + completion, tools, where, context)


def used_keys(row: dict, layout: Layout) -> list[str]:
    """Optional keys that this row has and its layout reads, except those with empty values."""
    return [
        key
        for key in OPTIONAL[layout.format]
        if key not in layout.keys and row.get(key) not in EMPTY
    ]


def unused_keys(row: dict, layout: Layout) -> list[str]:
    """Keys of this row that its layout does not read, except those with empty values."""
    read = {*layout.keys, *OPTIONAL[layout.format]}
    return [key for key in row if key not in read and row[key] not in EMPTY]


def _record(messages, tools, where: str, context=frozenset()) -> Record:
    """A conversation without its turns' marks, which no chat template should see."""
    marks = {}
    for number, message in enumerate(messages):
        found = [message.pop(key) for key in MARKS if key in message]
        if found := [value for value in found if value is not None]:
            marks[number] = all(found)
    return Record(messages, tools=tools, context=context, marks=marks)


def _system(more: dict, where: str, messages: list[dict]) -> list[dict]:
    """The system message, one or none, that the row's own key adds before these messages."""
    if "system" not in more:
        return []
    content = _text(more["system"], where, "system")
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": content}]
    if messages[0]["content"].strip() != content.strip():
        raise UserError(
            f"{where}: 'system' differs from the conversation's own system turn: keep only one"
        )
    return []


def _history(history, where: str) -> list[dict]:
    """Earlier turns: [[question, answer], ...], possibly as a JSON string, or messages."""
    history = _from_json(history) or []
    if isinstance(history, list) and all(isinstance(turn, dict) for turn in history):
        return _messages(history, where, "history")
    if not (isinstance(history, list) and all(_is_pair(pair) for pair in history)):
        raise UserError(
            f"{where}: 'history' must be a list of [question, answer] pairs; rename the key "
            "if it means something else"
        )
    return [
        {"role": role, "content": _text(pair[side], where, f"history[{number}]")}
        for number, pair in enumerate(history)
        for side, role in enumerate(("user", "assistant"))
    ]


def _tokens(ids, labels, where: str) -> tuple[list[int], list[bool]]:
    """(ids, learnt flags) of a tokenised document. labels: the same ids, -100 where not learnt."""
    for name, value in (("input_ids", ids), ("labels", ids if labels is None else labels)):
        if not (isinstance(value, list) and all(type(i) is int for i in value)):
            raise UserError(f"{where}: {name!r} must be a list of whole numbers")
    if any(not 0 <= i < 2**31 for i in ids):
        raise UserError(f"{where}: 'input_ids' contains a number that is not a token id")
    if labels is None:
        return ids, [True] * len(ids)
    same = len(labels) == len(ids) and all(
        label in (-100, i) for label, i in zip(labels, ids, strict=True)
    )
    if not same:
        raise UserError(
            f"{where}: 'labels' must equal 'input_ids' (not shifted), or be -100 where not learnt"
        )
    return ids, [label != -100 for label in labels]


def _messages(turns, where: str, key: str) -> list[dict]:
    """Check OpenAI (role, content) or ShareGPT (from, value) turns and convert them to messages."""
    if not isinstance(turns, list):
        raise UserError(f"{where}: {key!r} must be a list of turns, not {_kind(turns)}")
    messages = []
    for number, turn in enumerate(turns):
        place = f"{key}[{number}]"
        if not isinstance(turn, dict):
            raise UserError(f"{where}: {place} must be an object, not {_kind(turn)}")
        role = turn.get("role", turn.get("from"))
        if not isinstance(role, str) or role not in ROLES:
            raise UserError(
                f"{where}: {place} has unknown role {role!r}; known: {', '.join(ROLES)}"
            )
        content, calls = turn.get("content", turn.get("value")), turn.get("tool_calls") or []
        if role in CALLS and not calls:
            content, calls = None, _calls(content, where, place, role)
        if not (isinstance(calls, list) and all(map(_is_call, calls))):
            raise UserError(f"{where}: {place}: tool_calls must be a list of function calls")
        for mark in MARKS:
            if (value := turn.get(mark)) is not None and value not in (0, 1):
                raise UserError(
                    f"{where}: {place}: {mark} must be 0 or 1 (or false or true), not {value!r}: "
                    "fractional weights are not supported"
                )
        if turn.get("reasoning_content") is not None:
            _text(turn["reasoning_content"], where, f"{place}: reasoning_content")
        if content is None and calls:
            content = ""  # OpenAI writes null beside tool calls
        rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
        rest |= {"role": ROLES[role], "content": _text(content, where, place)}
        if role in CALLS:
            rest["tool_calls"] = calls
        messages.append(rest)
    return messages


def _text(value, where: str, place: str) -> str:
    """A string; OpenAI content parts are joined if all are text."""
    if isinstance(value, list) and value and all(_is_part(part) for part in value):
        bad = [part["type"] for part in value if not isinstance(part.get("text"), str)]
        if bad:
            raise UserError(f"{where}: {place} has a {bad[0]!r} part; only text is supported")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise UserError(f"{where}: {place} must be text, not {_kind(value)}")
    try:
        value.encode()  # the tokenizer's own error names neither file nor line
    except UnicodeEncodeError:
        raise UserError(f"{where}: {place} contains half a surrogate pair: invalid text") from None
    return value


def _calls(value, where: str, place: str, role: str) -> list[dict]:
    """Tool calls of a turn whose text is one call, or a list of calls, as JSON."""
    calls = _from_json(value)
    calls = calls if isinstance(calls, list) else [calls]
    found = []
    for call in calls:
        if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            raise UserError(
                f"{where}: {place}: a {role} turn must contain JSON with 'name' and 'arguments'"
            )
        function = {"name": call["name"], "arguments": _from_json(call.get("arguments") or {})}
        found.append({"type": "function", "function": function})
    return found


def _tools(tools, where: str) -> list | None:
    """The row's tool schemas. Columns exported from tables hold them as one JSON string."""
    tools = _from_json(tools)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f"{where}: 'tools' must be a list of JSON schemas")
    return tools or None


def _from_json(value):
    """The parsed value of a JSON string; any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError):
        return value


def _is_call(value) -> bool:
    return isinstance(value, dict) and isinstance(value.get("function", value), dict)


def _is_pair(value) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2


def _is_part(value) -> bool:
    return isinstance(value, dict) and "type" in value and "role" not in value


def _keys(row: dict) -> str:
    return ", ".join(row) or "(none)"


def _kind(value) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
