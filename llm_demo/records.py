"""A data file -> records: rows in any of seven formats, read so that an error names the line."""

import glob
import json
import os
from collections.abc import Iterator
from typing import NamedTuple

from llm_demo.errors import UserError

# The keys a row must have, in the order they are tried on a file's first row. "text" is last and
# "messages" early because published sets often carry a flattened copy beside the real columns.
FORMATS = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "input": ("input", "target"),
    "text": ("text",),
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
}


class Record(NamedTuple):
    """One row, whatever its format: a conversation, or (messages is None) plain text or tokens."""

    messages: list[dict] | None  # role, content, and whatever else the chat template may want
    text: str = ""
    tools: list | None = None
    tokens: tuple[list[int], list[bool]] | None = None  # ids, and which of them are learnt
    learn_from: int = 0  # assistant turns before this index are context only


class Layout(NamedTuple):
    """How the rows of one file are read."""

    format: str
    keys: tuple[str, ...]
    why: str  # for the log


def find_files(train_json: str) -> list[str]:
    """Paths and globs, separated by commas -> files in a fixed order. UserError if there is none.

    A glob that does not ask for them leaves out *.heldout.jsonl: data/*.jsonl must not train on
    what the run is evaluated on.
    """
    files = []
    for part in [train_json] if os.path.exists(train_json) else train_json.split(","):
        part = part.strip()
        if os.path.isfile(part):
            files.append(part)
        elif os.path.isdir(part):
            raise UserError(
                f"{part} is a folder: name a file in it, or a glob such as {part}/*.jsonl"
            )
        elif glob.has_magic(part):
            found = sorted(p for p in glob.glob(part, recursive=True) if os.path.isfile(p))
            if ".heldout" not in part:
                found = [p for p in found if not p.endswith(".heldout.jsonl")]
            if not found:
                raise UserError(f"no data file matches {part}")
            files += found
        else:
            raise UserError(f"no such data file: {part or '(an empty name)'}")
    return files


def read_rows(path: str, progress=None) -> Iterator[tuple[str, dict]]:
    """Yields ("file:line", row). Blank lines are skipped and a UTF-8 BOM is tolerated.

    Parquet and CSV go through datasets. JSONL does not: its reader stops at a broken line without
    saying which one, and forces one schema on all rows. UserError for an empty file, broken JSON or
    encoding, a row of another kind.
    """
    if path.endswith((".parquet", ".csv")):
        yield from _read_table(path)
        return
    empty = True
    with open(path, "rb") as lines:
        for number, raw in enumerate(lines, 1):
            if progress is not None:
                progress.update(len(raw))
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
                raise UserError(
                    f"{where}: {what}; every line must be one whole JSON object"
                ) from None
            except (ValueError, RecursionError) as error:  # a number or a nesting beyond reason
                raise UserError(f"{where}: broken JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: a line must be one JSON object, not {_kind(row)}")
            empty = False
            yield where, row
    if empty:
        raise UserError(f"{path} is empty: no row to learn from")


def _read_table(path: str) -> Iterator[tuple[str, dict]]:
    from datasets import load_dataset  # takes a second to import, and most files are JSONL

    number = 0
    try:
        kind = os.path.splitext(path)[1][1:]
        for number, row in enumerate(
            load_dataset(kind, data_files=path, split="train", streaming=True), 1
        ):
            yield (
                f"{path}:{number}",
                {key: value for key, value in row.items() if value is not None},
            )
    except (ValueError, OSError) as error:  # pyarrow's and pandas' errors are ValueErrors
        raise UserError(f"{path}: no {kind} file: {str(error).splitlines()[0]}") from None
    if not number:
        raise UserError(f"{path} is empty: no row to learn from")


def file_layout(row, where, data_format="auto", input_key=None, target_key=None) -> Layout:
    """How to read a file, from its first row and the flags. UserError where they contradict."""
    if data_format not in DATA_FORMATS:
        raise UserError(f"--data_format {data_format}: choose from {', '.join(DATA_FORMATS)}")
    if bool(input_key) != bool(target_key):
        raise UserError("--input_key and --target_key go together: give both or neither")
    if input_key:
        if data_format not in ("auto", "prompt", "input"):
            raise UserError(
                f"--data_format {data_format} has no use for --input_key and --target_key"
            )
        return Layout("input", (input_key, target_key), "--input_key, --target_key")
    if data_format != "auto":
        return Layout(data_format, FORMATS[data_format], "--data_format")
    for name, keys in FORMATS.items():
        if all(key in row for key in keys):
            return Layout(name, keys, "first row")
    raise UserError(f"{where}: unknown row shape, keys: {_keys(row)}; accepted: {ACCEPTED}")


def to_record(row: dict, layout: Layout, where: str) -> Record:
    """One row -> Record. UserError for a missing key, an unknown role, content that is not text."""
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
    tools = _tools(row.get("tools"), where)
    if layout.format in ("messages", "conversations"):
        messages = _messages(values[0], where, layout.keys[0])
        system = row.get("system")  # ShareGPT sets often keep it beside the turns
        if layout.format == "conversations" and isinstance(system, str) and system:
            messages.insert(0, {"role": "system", "content": system})
        return Record(messages, tools=tools)
    if layout.format == "alpaca" and row.get("input"):
        extra = _text(row["input"], where, "input")
        values[0] = _text(values[0], where, "instruction") + "\n\n" + extra
    prompt, completion = (
        _messages(value, where, key)
        if isinstance(value, list) and value and not _is_part(value[0])
        else [{"role": role, "content": _text(value, where, key)}]
        for value, key, role in zip(values, layout.keys, ("user", "assistant"), strict=True)
    )
    return Record(prompt + completion, tools=tools, learn_from=len(prompt))


def _tokens(ids, labels, where: str) -> tuple[list[int], list[bool]]:
    """Ids of a tokenised document; labels: the same ids, or -100 where not learnt."""
    for name, value in (("input_ids", ids), ("labels", ids if labels is None else labels)):
        if not (isinstance(value, list) and all(type(i) is int for i in value)):
            raise UserError(f"{where}: {name!r} must be a list of whole numbers")
    if any(not 0 <= i < 2**31 for i in ids):
        raise UserError(f"{where}: 'input_ids' holds a number that is no token id")
    if labels is None:
        return ids, [True] * len(ids)
    same = len(labels) == len(ids) and all(
        label in (-100, i) for label, i in zip(labels, ids, strict=True)
    )
    if not same:
        raise UserError(
            f"{where}: 'labels' must repeat 'input_ids', not shifted, with -100 where not learnt"
        )
    return ids, [label != -100 for label in labels]


def _messages(turns, where: str, key: str) -> list[dict]:
    """Turns of OpenAI (role, content) or ShareGPT (from, value) -> messages, checked."""
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
        if not (isinstance(calls, list) and all(map(_is_call, calls))):
            raise UserError(f"{where}: {place}: tool_calls must be a list of function calls")
        if turn.get("reasoning_content") is not None:
            _text(turn["reasoning_content"], where, f"{place}: reasoning_content")
        if content is None and calls:
            content = ""  # OpenAI writes null beside tool calls
        rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
        rest |= {"role": ROLES[role], "content": _text(content, where, place)}
        messages.append(rest)
    return messages


def _text(value, where: str, place: str) -> str:
    """A string, or OpenAI content parts that are all text, as one string."""
    if isinstance(value, list) and value and all(_is_part(part) for part in value):
        bad = [part["type"] for part in value if not isinstance(part.get("text"), str)]
        if bad:
            raise UserError(f"{where}: {place} has a {bad[0]!r} part; only text can be learnt")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise UserError(f"{where}: {place} must be text, not {_kind(value)}")
    try:
        value.encode()  # the tokenizer's own error names neither file nor line
    except UnicodeEncodeError:
        raise UserError(f"{where}: {place} holds half a surrogate pair, which is no text") from None
    return value


def _tools(tools, where: str) -> list | None:
    """The row's tool schemas; columns exported from tables hold them as one JSON string."""
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    except json.JSONDecodeError:
        tools = "broken JSON"
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f"{where}: 'tools' must be a list of JSON schemas")
    return tools or None


def _is_call(value) -> bool:
    return isinstance(value, dict) and isinstance(value.get("function", value), dict)


def _is_part(value) -> bool:
    return isinstance(value, dict) and "type" in value and "role" not in value


def _keys(row: dict) -> str:
    return ", ".join(row) or "(none)"


def _kind(value) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
