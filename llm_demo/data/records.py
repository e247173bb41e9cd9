"""Turns rows of seven formats into records: conversations, text or token ids."""

import json
import re
from typing import NamedTuple

import numpy as np

from llm_demo.core.errors import UserError
from llm_demo.job.files import DECODER


class Record(NamedTuple):
    """One row of any format: a conversation or, if messages is None, plain text or tokens."""

    messages: list[dict] | None  # role, content, other keys of the chat template
    text: str = ""
    tools: list | None = None
    tokens: tuple[list[int], list[bool]] | None = None  # ids, and which are labels
    context: frozenset[int] = frozenset()  # message numbers of the prompt, never learnt
    marks: dict[int, bool] = {}  # message number -> learn it, by its weight, train or loss_mask


class Sample(NamedTuple):
    ids: np.ndarray  # int32 [n]
    is_label: np.ndarray  # bool [n]; the first token is never one: nothing predicts it


# Keys of tokenised rows, each a list of 0 and 1: which tokens are real, which are learnt.
REAL = "attention_mask"
SAYS_WHAT = re.compile("mask|weight|seq_?len|sequence_id|document_id|segment|pixel", re.I)
LEARNT = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")

# Required keys, one choice or more, and optional ones, in the order they are tried on a file's
# first row. "text" is last and "messages" early because published sets often carry a flattened copy
# beside the real columns. Any other key is not used, and the log says so.
FORMATS = {
    "tokens": ((("input_ids",),), ("labels", REAL, *LEARNT, "position_ids")),
    "messages": ((("messages",),), ("system", "tools")),
    "conversations": ((("conversations",),), ("system", "tools")),
    "prompt": (
        (("prompt", "completion"), ("prompt", "response")),
        ("system", "history", "tools"),
    ),
    "alpaca": (
        (
            ("instruction", "output"),
            ("instruction", "response"),
            ("question", "answer"),
            ("question", "response"),
            ("query", "response"),
        ),
        ("input", "context", "system", "system_prompt", "history", "tools"),
    ),
    "input": ((("input", "target"),), ("system", "history", "tools")),
    "text": ((("text",),), ()),
}

DATA_FORMATS = ("auto", *FORMATS)

ACCEPTED = (
    "messages, conversations, prompt + completion, instruction + output (+ input), question + "
    "answer, input + target, text, input_ids (+ labels), or two columns named by --input_key and "
    "--target_key"
)

# In lower case: "User" is "user".
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": "assistant",  # its text is the call, as JSON
    "tool_call": "assistant",
}

CALLS = ("function_call", "tool_call")

MARKS = ("weight", "train", "loss_mask", "loss")  # keys of a turn; 0 or false: not learnt

REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a turn, all for the first

ONLY_TEXT = "only text can be learnt: leave such rows out"

CHOICES = {"choices", "options"}  # a question of several choices, which the answer may only number

MEDIA = ("image", "images", "video", "videos", "audio", "audios")

ONE_TURN = "collect the turns of each conversation in one row, as a list under 'messages'"

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
        choices = FORMATS[data_format][0]
        keys = next((keys for keys in choices if row.keys() >= set(keys)), choices[0])
        return RowFormat(data_format, keys, "--data_format")
    if row and all(isinstance(v, dict) and "0" in v for v in row.values()):
        raise UserError(
            f"{where}: these are the columns of a table, as pandas writes them: save it with "
            "df.to_json(FILE, orient='records', lines=True)"
        )
    filled = {key for key, value in row.items() if value is not None}
    for present in (filled, row.keys()):  # a table may have a null in one of two formats' columns
        for name, (choices, _) in FORMATS.items():
            for keys in choices:
                if keys == ("question", "answer") and CHOICES & present:
                    continue
                if present >= set(keys):
                    if name == "text" and isinstance(row.get("role"), str):
                        raise UserError(f"{where}: a row is one turn (role, text): {ONE_TURN}")
                    return RowFormat(name, keys, "first row")
    cure = f": a row is one turn: {ONE_TURN}" if isinstance(row.get("role"), str) else ""
    raise UserError(f"{where}: unknown row format, keys: {_keys(row)}{cure}; accepted: {ACCEPTED}")


def to_record(row: dict, row_format: RowFormat, where: str) -> Record:
    """Convert one row. Raises UserError for a missing key, an unknown role, or non-text content."""
    missing = [key for key in row_format.keys if key not in row]
    if missing:
        raise UserError(
            f"{where}: no {' or '.join(map(repr, missing))} in this row, keys: {_keys(row)}; "
            f"the file is read as {row_format.format} ({row_format.why}); accepted: {ACCEPTED}"
        )
    values = [row[key] for key in row_format.keys]
    optional = {key: row[key] for key in used_keys(row, row_format)}
    if row_format.format == "tokens":
        _refuse_unknown_masks(row, row_format, where)
        return Record(None, tokens=_tokens(values[0], optional, where))
    if media := [key for key in MEDIA if key in unused_keys(row, row_format)]:
        raise UserError(f"{where}: this row has {media[0]!r}, but {ONLY_TEXT}")
    if row_format.format == "text":
        return Record(None, text=_text(values[0], where, "text"))
    tools = _tools(optional.get("tools"), where)
    if row_format.format in ("messages", "conversations"):
        messages = _messages(values[0], where, row_format.keys[0])
        return _record(_system(optional, where, messages) + messages, tools)
    for key in ("input", "context"):
        if key in optional:
            question = _text(values[0], where, row_format.keys[0])
            values[0] = f"{question}\n\n{_text(optional[key], where, key)}"
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
    key = next((key for key in ("system", "system_prompt") if key in optional), None)
    if key is None:
        return []
    content = _text(optional[key], where, key)
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


def _tokens(ids, optional: dict, where: str) -> tuple[list[int], list[bool]]:
    """(ids, which are learnt) of a tokenised row, without its padding. optional: its labels (the
    same ids, -100 where not learnt), masks and positions. Raises UserError if they are of another
    form or contradict one another."""
    numbers = {"input_ids": ids, **{k: optional.get(k, ids) for k in ("labels", "position_ids")}}
    for name, value in numbers.items():
        if not (isinstance(value, list) and all(type(i) is int for i in value)):
            raise UserError(f"{where}: {name!r} must be a list of integers")
    if any(not 0 <= i < 2**31 for i in ids):
        raise UserError(f"{where}: 'input_ids' contains a number that is not a token id")
    masks = {key: optional[key] for key in (REAL, *LEARNT) if key in optional}
    for key, mask in masks.items():
        zeros_and_ones = isinstance(mask, list) and all(i in (0, 1) for i in mask)
        if not (zeros_and_ones and len(mask) == len(ids)):
            raise UserError(f"{where}: {key!r} must be a list of 0 and 1, one for each token")
    first, end = 0, len(ids)  # of the real tokens
    if REAL in masks:
        real = masks.pop(REAL)
        first = real.index(1) if 1 in real else len(ids)
        end = max(first, len(ids) - real[::-1].index(1)) if 1 in real else first
        if 0 in real[first:end]:
            raise UserError(
                f"{where}: 'attention_mask' has a 0 between ones: only padding at the beginning or "
                "the end is supported"
            )
    positions = optional.get("position_ids", [])
    if positions and positions[first:end] != list(range(end - first)):
        raise UserError(
            f"{where}: 'position_ids' must count from 0: give each document as a row of its own"
        )
    masks = {key: [bool(i) for i in mask] for key, mask in masks.items()}
    if (labels := optional.get("labels")) is not None:
        same = [a in (-100, b) for a, b in zip(labels, ids, strict=False)]
        if len(labels) != len(ids) or not all(same[first:end]):
            raise UserError(
                f"{where}: 'labels' must equal 'input_ids' (not shifted), or be -100 where not "
                "learnt"
            )
        masks["labels"] = [label != -100 for label in labels]
        if labels == ids:  # a plain copy, which learns no padding on purpose
            masks["labels"] = [first <= i < end for i in range(len(ids))]
    for key, mask in masks.items():
        if any(mask[:first]) or any(mask[end:]):
            raise UserError(f"{where}: {key!r} contradicts {REAL!r}: padding can't be learnt")
    learnt = {key: mask[first:end] for key, mask in masks.items()} or {"": [True] * (end - first)}
    (one, result), *others = learnt.items()
    for other, mask in others:
        if mask[1:] != result[1:]:  # nothing predicts a first token
            raise UserError(f"{where}: {one!r} and {other!r} contradict each other: keep one")
    return ids[first:end], result


def _refuse_unknown_masks(row: dict, row_format: RowFormat, where: str) -> None:
    """Raise UserError for a key that may say what is learnt or where documents end."""
    for key in unused_keys(row, row_format):
        if SAYS_WHAT.search(key) and key != "special_tokens_mask":
            raise UserError(
                f"{where}: {key!r} is not known beside 'input_ids': remove it, or name what is "
                f"learnt 'labels' or one of {', '.join(LEARNT)}"
            )


def _messages(turns, where: str, key: str) -> list[dict]:
    """Check OpenAI (role, content) or ShareGPT (from, value) turns and convert them to messages, in
    which null is the same as no key."""
    if not isinstance(turns, list):
        raise UserError(f"{where}: {key!r} must be a list of turns, not {_kind(turns)}")
    messages = []
    for number, turn in enumerate(turns):
        place = f"{key}[{number}]"
        if not isinstance(turn, dict):
            raise UserError(f"{where}: {place} must be an object, not {_kind(turn)}")
        role = turn.get("role", turn.get("from"))
        name = role.strip().lower() if isinstance(role, str) else None
        if name not in ROLES:
            raise UserError(
                f"{where}: {place} has unknown role {role!r}; known: {', '.join(ROLES)}"
            )
        if media := [k for k in MEDIA if turn.get(k) not in EMPTY]:
            raise UserError(f"{where}: {place} has {media[0]!r}, but {ONLY_TEXT}")
        for mark in MARKS:
            if (value := turn.get(mark)) is not None and value not in (0, 1):
                raise UserError(
                    f"{where}: {place}: {mark} must be 0 or 1 (or false or true), not {value!r}: "
                    "fractional weights are not supported"
                )
        content, calls = turn.get("content", turn.get("value")), _from_json(turn.get("tool_calls"))
        if call := turn.get("function_call"):  # OpenAI's older key
            if calls:
                raise UserError(f"{where}: {place} has tool_calls and function_call: keep one")
            calls = [call]
        if name in CALLS and not calls:
            content, calls = None, _calls_in(content, where, place, name)
        calls = _calls(calls, where, place) if calls else None
        if content is None and calls:
            content = ""  # OpenAI writes null beside tool calls
        message = {"role": ROLES[name], "content": _text(content, where, place)}
        if calls:
            message["tool_calls"] = calls
        if said := [k for k in REASONING if turn.get(k) is not None]:
            message[REASONING[0]] = _text(turn[said[0]], where, f"{place}: {said[0]}")
        read = ("role", "from", "content", "value", "tool_calls", "function_call", *REASONING)
        others = {k: v for k, v in turn.items() if k not in read and v is not None}
        messages.append(message | others)
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


def _calls_in(value, where: str, place: str, role: str) -> list[dict]:
    """Tool calls of a turn whose text is one call, or a list of calls, as JSON."""
    calls = _from_json(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise UserError(
            f"{where}: {place}: a {role} turn must contain JSON with 'name' and 'arguments'"
        )
    return calls


def _calls(calls, where: str, place: str) -> list[dict]:
    """Tool calls as OpenAI nests them, with arguments as an object. Raises UserError."""
    nested = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise UserError(f"{where}: {place}: tool_calls must be a list of function calls")
        arguments = function.get("arguments", function.get("parameters")) or {}
        try:
            if isinstance(arguments, str):
                arguments = DECODER.decode(arguments.strip() or "{}")
            json.dumps(arguments)  # a table may have dates or bytes
            if not isinstance(arguments, dict):
                raise TypeError(f"it is {_kind(arguments)}")
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"{where}: {place}: the arguments of {function['name']} must be a JSON object: "
                f"{error}"
            ) from None
        own = ("name", "arguments", "parameters")
        outer = {k: v for k, v in call.items() if k not in (*own, "function")}
        inner = {k: v for k, v in function.items() if k not in (*own, *outer)}
        function = {"name": function["name"], "arguments": arguments, **inner}
        nested.append({"type": "function", **outer, "function": function})
    return nested


def _tools(tools, where: str) -> list | None:
    """The row's tool schemas. Columns exported from tables hold them as one JSON string."""
    tools = _from_json(tools)
    if isinstance(tools, list):
        tools = [_from_json(tool) for tool in tools]
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f"{where}: 'tools' must be a list of JSON schemas")
    return tools or None


def _from_json(value):
    """The parsed value of a JSON string; any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError):
        return value


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
