"""Turns rows of seven formats into records: conversations, text or token ids."""

import json
from typing import NamedTuple

from llm_demo.data.batch import Record
from llm_demo.errors import UserError

# Required and optional keys, in the order they are tried on a file's first row. "text" is last and
# "messages" early because published sets often carry a flattened copy beside the real columns. Any
# other key is not used, and the log says so.
FORMATS = {
    "tokens": (("input_ids",), ("labels",)),
    "messages": (("messages",), ("system", "tools")),
    "conversations": (("conversations",), ("system", "tools")),
    "prompt": (("prompt", "completion"), ("system", "history", "tools")),
    "alpaca": (("instruction", "output"), ("input", "system", "history", "tools")),
    "input": (("input", "target"), ("system", "history", "tools")),
    "text": (("text",), ()),
}

DATA_FORMATS = ("auto", *FORMATS)

ACCEPTED = (
    "messages, conversations, prompt + completion, instruction + output (+ input), input + target, "
    "text, input_ids (+ labels), or two columns named by --input_key and --target_key"
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

EMPTY = (None, "", [], {})


class RowFormat(NamedTuple):
    """How the rows of one file are read."""

    format: str
    keys: tuple[str, ...]
    why: str  # for the log


def detect_format(row, where, data_format="auto", input_key=None, target_key=None) -> RowFormat:
    """How to read a file, by its first row and the flags. Raises UserError if flags conflict."""
    if input_key:
        if data_format not in ("auto", "prompt", "input"):
            raise UserError(
                f"--data_format {data_format} does not accept --input_key and --target_key"
            )
        return RowFormat("input", (input_key, target_key), "--input_key, --target_key")
    if data_format != "auto":
        return RowFormat(data_format, FORMATS[data_format][0], "--data_format")
    filled = {key for key, value in row.items() if value is not None}
    for present in (filled, row.keys()):  # a table may have a null in one of two formats' columns
        for name, (keys, _) in FORMATS.items():
            if present >= set(keys):
                return RowFormat(name, keys, "first row")
    raise UserError(f"{where}: unknown row format, keys: {_keys(row)}; accepted: {ACCEPTED}")


def to_record(row: dict, row_format: RowFormat, where: str) -> Record:
    """Convert one row. Raises UserError for a missing key, an unknown role, or non-text content."""
    missing = [key for key in row_format.keys if key not in row]
    if missing:
        raise UserError(
            f"{where}: no {' or '.join(map(repr, missing))} in this row, keys: {_keys(row)}; "
            f"the file is read as {row_format.format} ({row_format.why}); accepted: {ACCEPTED}"
        )
    values = [row[key] for key in row_format.keys]
    if row_format.format == "text":
        return Record(None, text=_text(values[0], where, "text"))
    if row_format.format == "tokens":
        return Record(None, tokens=_tokens(values[0], row.get("labels"), where))
    optional = {key: row[key] for key in used_keys(row, row_format)}
    tools = _tools(optional.get("tools"), where)
    if row_format.format in ("messages", "conversations"):
        messages = _messages(values[0], where, row_format.keys[0])
        return _record(_system(optional, where, messages) + messages, tools)
    if "input" in optional:
        instruction = _text(values[0], where, "instruction")
        values[0] = f"{instruction}\n\n{_text(optional['input'], where, 'input')}"
    prompt, completion = (
        _messages(value, where, key)
        if isinstance(value, list) and value and not _is_part(value[0])
        else [{"role": role, "content": _text(value, where, key)}]
        for value, key, role in zip(values, row_format.keys, ("user", "assistant"), strict=True)
    )
    history = _history(optional.get("history"), where)
    before = _system(optional, where, history or prompt) + history
    context = frozenset(range(len(before), len(before) + len(prompt)))
    return _record(before + prompt + completion, tools, context)


def used_keys(row: dict, row_format: RowFormat) -> list[str]:
    """Optional keys that this row has and its format reads, except those with empty values."""
    optional = FORMATS[row_format.format][1]
    return [k for k in optional if k not in row_format.keys and row.get(k) not in EMPTY]


def unused_keys(row: dict, row_format: RowFormat) -> list[str]:
    """Keys of this row that its format does not read, except those with empty values."""
    read = {*row_format.keys, *FORMATS[row_format.format][1]}
    return [key for key in row if key not in read and row[key] not in EMPTY]


def _record(messages, tools, context=frozenset()) -> Record:
    """A conversation without its turns' marks, which no chat template should see."""
    marks = {}
    for number, message in enumerate(messages):
        values = [message.pop(key, None) for key in MARKS]
        if values := [value for value in values if value is not None]:
            marks[number] = all(values)
    return Record(messages, tools=tools, context=context, marks=marks)


def _system(optional: dict, where: str, messages: list[dict]) -> list[dict]:
    """The system message, one or none, that the row's own key adds before these messages."""
    if "system" not in optional:
        return []
    content = _text(optional["system"], where, "system")
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
    """(ids, which are labels) of a tokenised row. labels: the same ids, -100 where not learnt."""
    for name, value in (("input_ids", ids), ("labels", ids if labels is None else labels)):
        if not (isinstance(value, list) and all(type(i) is int for i in value)):
            raise UserError(f"{where}: {name!r} must be a list of integers")
    if any(not 0 <= i < 2**31 for i in ids):
        raise UserError(f"{where}: 'input_ids' contains a number that is not a token id")
    if labels is None:
        return ids, [True] * len(ids)
    if len(labels) != len(ids) or any(a not in (-100, b) for a, b in zip(labels, ids, strict=True)):
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
        message = {k: v for k, v in turn.items() if k not in ("from", "value")}
        message |= {"role": ROLES[role], "content": _text(content, where, place)}
        if role in CALLS:
            message["tool_calls"] = calls
        messages.append(message)
    return messages


def _text(value, where: str, place: str) -> str:
    """A string; OpenAI content parts are joined if all are text."""
    if isinstance(value, list) and value and all(_is_part(part) for part in value):
        bad = [part["type"] for part in value if not isinstance(part.get("text"), str)]
        if bad:
            raise UserError(
                f"{where}: {place} has a part of type {bad[0]!r}; only text is supported"
            )
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
    functions = []
    for call in calls:
        if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            raise UserError(
                f"{where}: {place}: a {role} turn must contain JSON with 'name' and 'arguments'"
            )
        function = {"name": call["name"], "arguments": _from_json(call.get("arguments") or {})}
        functions.append({"type": "function", "function": function})
    return functions


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
    names |= {int: "a number", float: "a number", bytes: "binary data"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
