"""Turns examples of seven formats into records: conversations, text or token ids."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from llm_demo.core.errors import UserError
from llm_demo.data.bad_rows import Bad, BadRows, Misread, short_reason
from llm_demo.data.marks import MARKS, may_exclude, reads
from llm_demo.data.turns import Record
from llm_demo.flags.parsing import template_variables
from llm_demo.machine.files import DECODER

# Keys of tokenised examples, each a list of 0 and 1: which tokens are real, which are learnt.
REAL = "attention_mask"
SAYS_WHAT = re.compile("mask|weight|seq_?len|sequence_id|document_id|segment|pixel", re.I)
LEARNT = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
MOST_ID = 2**31 - 1
# All keys of tokenised examples, with the least and the largest number in each list.
TOKEN_KEYS = {"input_ids": (0, MOST_ID), "labels": (-100, MOST_ID), "position_ids": (0, MOST_ID)}
TOKEN_KEYS |= dict.fromkeys((REAL, *LEARNT), (0, 1))
# Required keys, one choice or more, and optional ones, in the order they are tried on a file's
# first example. "text" is last and "messages" early because published sets often carry a flattened
# copy beside the real columns. Any other key is not used, and the log says so.
QUESTIONS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
)
TOOLS = ("tools", "tool_defs")  # one thing
VARIABLES = "chat_template_kwargs"  # of the chat template, for one example, as TRL names them
PAIR_KEYS = ("system", "history", *TOOLS, VARIABLES)
FORMATS = {
    "tokens": ((("input_ids",),), tuple(TOKEN_KEYS)),
    "messages": ((("messages",),), ("system", *TOOLS, VARIABLES)),
    "conversations": ((("conversations",),), ("system", *TOOLS, VARIABLES)),
    "prompt": ((("prompt", "completion"), ("prompt", "response")), PAIR_KEYS),
    "alpaca": (QUESTIONS, ("input", "context", "system_prompt", *PAIR_KEYS)),
    "input": ((("input", "target"),), PAIR_KEYS),
    "text": ((("text",),), ()),
}
ACCEPTED = (
    "messages, conversations, prompt + completion, instruction + output (+ input), question + "
    "answer, input + target, text, input_ids (+ labels), or two columns named by --input_key and "
    "--target_key"
)
CALLS = ("function_call", "tool_call")  # roles of turns whose text is a call, as JSON
# In lower case: "User" is "user".
NAMES = {
    "system": "system developer",
    "user": "user human prompter",
    "assistant": "assistant gpt chatgpt model bot ai",
    "tool": "tool function ipython observation tool_response function_response",
}
ROLES = {name: role for role, names in NAMES.items() for name in names.split()}
ROLES |= dict.fromkeys(CALLS, "assistant")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # keys of a turn, all for the first
CONTENT = ("content", "value")
ARGUMENTS = ("arguments", "parameters", "args", "input", "kwargs")  # of a call, likewise
TEXT_PARTS = (None, "text", "input_text", "output_text")  # types
TURN = {"role", "from", *CONTENT, "tool_calls", "function_call", *REASONING_KEYS}
ONLY_TEXT = "only text can be learnt: leave such examples out"
CHOICES = {"choices", "options"}  # a question of several choices, which the answer may only number
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
TRIED = 1000  # examples of which one must be in a known format
EMPTY = (None, "", [], {})


class RowFormat(NamedTuple):
    """How the examples of one file are read."""

    format: str
    keys: tuple[str, ...]
    why: str  # for the log


def detect_format(row: dict, flags) -> RowFormat:
    """How to read a file, by its first example and the flags, a DataArgs. Raises UserError if they
    conflict or no format fits."""
    if flags.input_key:
        if flags.data_format not in ("auto", "prompt", "input"):
            raise UserError(
                f"--data_format {flags.data_format} does not accept --input_key and --target_key"
            )
        return RowFormat("input", (flags.input_key, flags.target_key), "--input_key, --target_key")
    if flags.data_format != "auto":
        choices = FORMATS[flags.data_format][0]
        keys = next((keys for keys in choices if row.keys() >= set(keys)), choices[0])
        return RowFormat(flags.data_format, keys, "--data_format")
    # a table may have the columns of two formats, one of them null
    filled = {key for key, value in row.items() if value is not None}
    found = _format_of(filled) or _format_of(row.keys())
    if found is None:
        keys = ", ".join(row) or "(none)"
        raise UserError(f"unknown format, keys: {keys}; accepted: {ACCEPTED}")
    if found.format == "text" and isinstance(row.get("role"), str):
        raise UserError(
            "an example is one turn (role, text): collect the turns of each conversation in one "
            "example, as a list under 'messages'"
        )
    return found


def _format_of(present) -> RowFormat | None:
    """The first format whose keys are all present."""
    for name, (choices, _) in FORMATS.items():
        for keys in choices:
            numbered = keys == ("question", "answer") and CHOICES & present
            if present >= set(keys) and not numbered:
                return RowFormat(name, keys, "first example")
    return None


def open_rows(
    rows: Iterator, place: str, flags, template: str | None = None
) -> tuple[RowFormat, Iterator[tuple[int, dict, Record | Bad]]]:
    """(how a file is read, its examples: their number, as they are, as a record). Bad examples end
    the file, all of them in one UserError. With --skip_bad_rows they are kept: {} and the reason.
    Raises UserError if there is no good example to tell the format, and for a file with nothing but
    bad ones.

    rows: of read_rows; place: what stands before their numbers; flags: a DataArgs; template: as in
    `to_record`."""
    begin = list(itertools.islice(rows, TRIED))
    row_format = _detect(begin, place, flags)
    return row_format, _records(itertools.chain(begin, rows), place, row_format, flags, template)


def _detect(begin: list[tuple[int, dict | Bad]], place: str, flags) -> RowFormat:
    """How a file is read, by the first of these examples that is in a known format."""
    problem = None
    for n, row in begin:
        try:
            if isinstance(row, Bad):
                raise UserError(row)
            row_format = detect_format(row, flags)
        except UserError as error:
            problem = problem or UserError(f"{place}{n}: {error}")
            continue
        if problem and row_format.why == "first example":
            row_format = row_format._replace(why=f"example {n}")
        return row_format
    raise problem


def _records(
    rows: Iterable, place: str, row_format: RowFormat, flags, template: str | None
) -> Iterator[tuple[int, dict, Record | Bad]]:
    bad, skipped = BadRows(), BadRows()
    good = 0
    for n, row in rows:
        try:
            if isinstance(row, Bad):
                raise UserError(row)
            record = to_record(row, row_format, template)
        except UserError as error:
            if flags.skip_bad_rows and not isinstance(error, Misread):
                skipped.add(f"{place}{n}", error)
                yield n, {}, short_reason(str(error))
            else:
                bad.add(f"{place}{n}", error)
            continue
        good += 1
        if not bad.count:  # else only the other bad examples matter
            yield n, row, record
    if bad.count:
        can_skip = flags.skip_bad_rows is False and good and not bad.misread
        raise UserError(f"{bad}; --skip_bad_rows skips bad examples" if can_skip else str(bad))
    if not good:
        raise UserError(f"no example of this file can be read: {skipped}")


def keys_of(row: dict, row_format: RowFormat) -> tuple[list[str], list[str]]:
    """(optional keys of this example that its format reads, keys that it does not read), without
    those with empty values."""
    optional = FORMATS[row_format.format][1]
    used = [k for k in optional if k not in row_format.keys and row.get(k) not in EMPTY]
    read = {*row_format.keys, *optional}
    return used, [key for key in row if key not in read and row[key] not in EMPTY]


def to_record(row: dict, row_format: RowFormat, template: str | None = None) -> Record:
    """Convert one example. Raises UserError for a missing key, an unknown role, or non-text
    content, and Misread for marks of turns that contradict one another. template: the chat
    template; Misread too for other keys that may exclude a turn, unless the template reads them."""
    keys, kind = row_format.keys, row_format.format
    missing = [key for key in keys if key not in row]
    if missing:
        raise UserError(
            f"no {' or '.join(map(repr, missing))} in this example, keys: "
            f"{', '.join(row) or '(none)'}; the file is read as {kind} ({row_format.why}); "
            f"accepted: {ACCEPTED}"
        )
    used, unused = keys_of(row, row_format)
    _refuse_keys(row, kind, unused, template)
    if kind == "tokens":
        optional = {key: row[key] for key in TOKEN_KEYS if row.get(key) is not None}  # [] too
        return Record(None, tokens=_tokens({"input_ids": row["input_ids"], **optional}))
    if kind == "text":
        return Record(None, text=_text_of(row["text"], "text"))
    optional = {key: row[key] for key in used}
    tools = _tools(optional)
    variables = template_variables(optional.get(VARIABLES), VARIABLES)
    context = frozenset()
    if kind in ("messages", "conversations"):
        messages = _messages(row[kind], kind, template)
        messages = _system(optional, messages) + messages
    else:
        prompt = _side(_question(row, keys[0], optional), keys[0], "user", None)
        completion = _side(row[keys[1]], keys[1], "assistant", template)
        history = _history(optional.get("history"), template)
        before = _system(optional, history or prompt) + history
        messages = before + prompt + completion
        context = frozenset(range(len(before), len(before) + len(prompt)))
    return Record(
        messages,
        tools=tools,
        context=context,
        marks=_marks(messages),
        chat_template_kwargs=variables,
    )


def _refuse_keys(row: dict, kind: str, unused: list[str], template: str | None) -> None:
    """Raise Misread for keys of an example that may say what is learnt or, of token ids, where
    documents end, and UserError for pictures and the like."""
    for key in unused:
        is_mark = (
            template is not None and key in ("mask", *MARKS, *LEARNT) and may_exclude(key, row[key])
        )
        says_what = SAYS_WHAT.search(key) and key != "special_tokens_mask"
        if kind == "tokens" and (is_mark or says_what):
            raise Misread(
                f"{key!r} is not known beside 'input_ids': remove it, or name what is "
                f"learnt 'labels' or one of {', '.join(LEARNT)}"
            )
        if is_mark:
            raise Misread(
                f"this example has {key!r}: {_shown(row[key])}, but only turns have marks: leave "
                "such examples out, or mark their turns with 'train' false"
            )
        if key in MEDIA:
            raise UserError(f"this example has {key!r}, but {ONLY_TEXT}")


def _question(row: dict, key: str, optional: dict):
    """A prompt, with what the keys `input` and `context` add to it."""
    more = [name for name in ("input", "context") if name in optional]
    if not more:
        return row[key]
    texts = [_text_of(row[key], key)] + [_text_of(optional[name], name) for name in more]
    return "\n\n".join(text for text in texts if text.strip())


def _side(value, key: str, role: str, template: str | None) -> list[dict]:
    """The messages of a prompt or a completion: text, or a list of turns, in tables as JSON."""
    if isinstance(value, list) and value and not _is_part(value[0]):
        return _messages(value, key, template)
    if isinstance(value, str) and value.lstrip().startswith("["):
        turns = None
        with contextlib.suppress(UserError):
            turns = _from_json(value)
        are_turns = isinstance(turns, list) and all(
            isinstance(turn, dict) and "role" in turn for turn in turns
        )
        if turns and are_turns:
            return _messages(turns, key, template)
    return [{"role": role, "content": _text_of(value, key)}]


def _marks(messages: list[dict]) -> dict[int, bool]:
    """{number of a message: learn it}. Removes the marks, which no chat template should see."""
    marks = {}
    for number, message in enumerate(messages):
        values = [message.pop(key) for key in MARKS if key in message]
        if values:
            marks[number] = all(values)
    return marks


def _shown(value) -> str:
    """A value for an error, not all of a long one."""
    return json.dumps(value, default=str)[:60]


def _system(optional: dict, messages: list[dict]) -> list[dict]:
    """The system message, one or none, that a key of the example adds before these messages."""
    key = next((key for key in ("system", "system_prompt") if key in optional), None)
    if key is None:
        return []
    content = _text_of(optional[key], key)
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": content}]
    if messages[0]["content"].strip() != content.strip():
        raise UserError("'system' differs from the conversation's own system turn: keep only one")
    return []


def _history(history, template: str | None) -> list[dict]:
    """Earlier turns: [[question, answer], ...], possibly as a JSON string, or messages."""
    turns = _from_json(history) or []
    if isinstance(turns, list) and all(isinstance(h, list) and len(h) == 2 for h in turns):
        pairs, turns = turns, []
        for question, answer in pairs:
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": answer})
    return _messages(turns, "history", template)


def _tokens(optional: dict) -> tuple[np.ndarray, np.ndarray]:
    """(ids, which are learnt) of a tokenised example, without its padding. optional: its ids,
    labels (the same ids, -100 where not learnt), masks and positions. Raises UserError if they are
    of another form or contradict one another."""
    given = {key: _whole_numbers(key, values) for key, values in optional.items()}
    ids = given["input_ids"]
    for key, numbers in given.items():
        if len(numbers) != len(ids):
            raise UserError(f"{key!r} must be a list of numbers, one for each token")
    real = given.get(REAL, np.ones(len(ids))).astype(bool)
    at = np.flatnonzero(real)
    part = slice(at[0], at[-1] + 1) if len(at) else slice(0)
    if not real[part].all():
        raise Misread(
            "'attention_mask' has a 0 between ones: only padding at the beginning or the end is "
            "supported"
        )
    if "position_ids" in given and (given["position_ids"][part] != np.arange(len(at))).any():
        raise Misread(
            "'position_ids' must count from 0: give each document as an example of its own"
        )
    masks = {key: given[key].astype(bool) for key in LEARNT if key in given}
    if "labels" in given:
        labels = given["labels"]
        if ((labels != -100) & (labels != ids))[part].any():
            raise Misread(
                "'labels' must equal 'input_ids' (not shifted), or be -100 where not learnt"
            )
        # a copy of the ids learns no padding on purpose
        masks["labels"] = real if (labels == ids).all() else labels != -100
    learnt = next(iter(masks.values()), real)
    for key, mask in masks.items():
        if mask[~real].any():
            raise Misread(f"{key!r} contradicts {REAL!r}: padding can't be learnt")
        if (mask != learnt)[part][1:].any():  # nothing predicts a first token
            raise Misread(f"{' and '.join(masks)} contradict each other: keep one")
    return ids[part], learnt[part]


def _whole_numbers(key: str, values) -> np.ndarray:
    """The whole numbers under a key of a tokenised example. Raises UserError if they are none."""
    least, most = TOKEN_KEYS[key]
    try:
        numbers = np.array(values)
    except ValueError:  # lists of unequal lengths
        numbers = np.array("")
    are_numbers = numbers.ndim == 1 and numbers.dtype.kind in "bif"
    if not are_numbers or ((numbers < least) | (numbers > most) | (numbers % 1 != 0)).any():
        raise UserError(f"{key!r} must be a list of whole numbers from {least:,} to {most:,}")
    return numbers


def _messages(turns, key: str, template: str | None) -> list[dict]:
    """Check OpenAI (role, content) or ShareGPT (from, value) turns and convert them to messages, in
    which null is the same as no key. template: as in `to_record`."""
    turns = _from_json(turns)  # in a table
    if not isinstance(turns, list):
        raise UserError(f"{key!r} must be a list of turns, not {_shown(turns)}")
    return [_message(turn, f"{key}[{number}]", template) for number, turn in enumerate(turns)]


def _message(turn, place: str, template: str | None) -> dict:
    if not isinstance(turn, dict):
        raise UserError(f"{place} must be an object, not {_shown(turn)}")
    role = turn.get("from") if turn.get("role") is None else turn["role"]
    name = role.strip().lower() if isinstance(role, str) else None
    if name not in ROLES:
        raise UserError(f"{place} has unknown role {role!r}; known: {', '.join(ROLES)}")
    for media in MEDIA:
        if turn.get(media) not in EMPTY:
            raise UserError(f"{place} has {media!r}, but {ONLY_TEXT}")
    _refuse_marks(turn, place, template if ROLES[name] == "assistant" else None)
    _, content = _value(CONTENT, place, turn)
    calls = _from_json(turn.get("tool_calls"))
    older_call = turn.get("function_call")  # OpenAI's older key
    if older_call:
        if calls:
            raise UserError(f"{place} has tool_calls and function_call: keep one")
        calls = [older_call]
    if name in CALLS and not calls:
        content, calls = None, _from_json(content)
    if content is None and calls:
        content = ""  # OpenAI writes null beside tool calls
    message = {"role": ROLES[name], "content": ""}
    if calls:
        calls = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [_call(call, place) for call in calls]
    message["content"] = _text_of(content, place)
    key, reasoning = _value(REASONING_KEYS, place, turn)
    if reasoning is not None:
        message[REASONING_KEYS[0]] = _text_of(reasoning, f"{place}: {key}")
    return message | {k: v for k, v in turn.items() if k not in TURN and v is not None}


def _refuse_marks(turn: dict, place: str, template: str | None) -> None:
    """Raise Misread for marks of a turn that can't be followed. template: None if others than the
    known ones don't matter; see `to_record`."""
    marks = {mark: turn[mark] for mark in MARKS if turn.get(mark) is not None}
    for mark, value in marks.items():
        if value not in (0, 1):
            raise Misread(
                f"{place}: {mark} must be 0 or 1 (or false or true), not {value!r}: "
                "fractional weights are not supported"
            )
    if len({*map(bool, marks.values())}) > 1:
        raise Misread(f"{place}: {' and '.join(marks)} contradict each other: keep one")
    if template is None or not all(marks.values()):
        return
    for key, value in turn.items():
        known = key in MARKS or key in TURN
        if not known and may_exclude(key, value) and not reads(template, key):
            raise Misread(
                f"{place}: {key!r}: {_shown(value)} is not known, and may exclude the "
                "turn or a part of it: remove the key, or mark turns that are not learnt with "
                "'train' false"
            )
    content = next((turn[key] for key in CONTENT if isinstance(turn.get(key), list)), [])
    for key, value in (item for part in content if _is_part(part) for item in part.items()):
        if may_exclude(key, value):
            raise Misread(
                f"{place}: a part of its content has {key!r}: {_shown(value)}, but a turn "
                "is learnt as a whole: give it as turns of their own, or remove the key"
            )


def _value(keys: tuple[str, ...], place: str, *objects: dict) -> tuple[str, object]:
    """(key, value) of what these objects have under one of the keys; ("", None) if nothing. Raises
    UserError if two differ."""
    given = [(key, each[key]) for each in objects for key in keys if each.get(key) is not None]
    filled = [(key, value) for key, value in given if value not in EMPTY] or given[:1]
    for key, value in filled[1:]:
        if _bare(value) != _bare(filled[0][1]):
            raise UserError(f"{place}: {filled[0][0]!r} and {key!r} differ: keep one")
    return filled[0] if filled else ("", None)


def _bare(value):
    """A value to compare: text without the space around it, of content parts their text."""
    if isinstance(value, list) and all(_is_part(part) for part in value):
        value = "".join(str(part.get("text")) for part in value)
    return value.strip() if isinstance(value, str) else value


def _text_of(value, place: str) -> str:
    """A string; OpenAI content parts are joined if all are text."""
    if isinstance(value, list) and value and all(_is_part(part) for part in value):
        for part in value:
            if part["type"] not in TEXT_PARTS or not isinstance(part.get("text"), str):
                kind = part["type"]
                raise UserError(f"{place} has a part of type {kind!r}; only text is supported")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise UserError(f"{place} must be text, not {_shown(value)}")
    try:
        value.encode()  # the tokenizer's own error names neither file nor line
    except UnicodeEncodeError:
        raise UserError(f"{place} contains half a surrogate pair: invalid text") from None
    return value


def _call(call, place: str) -> dict:
    """A tool call as OpenAI nests it, with its arguments as an object. Raises UserError."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise UserError(f"{place}: tool_calls must be a list of function calls")
    name = function["name"]
    objects = [{key: _from_json(each.get(key)) for key in ARGUMENTS} for each in (function, call)]
    given, arguments = _value(ARGUMENTS, f"{place}: call of {name}", *objects)
    known = ("name", "function", *ARGUMENTS)
    for key, value in function.items():
        if not given and isinstance(value, dict) and key not in known:
            raise UserError(
                f"{place}: the call of {name} has {key!r} but no 'arguments': rename it"
            )
    arguments = arguments or {}
    try:
        json.dumps(arguments)  # a table may have dates or bytes
        if not isinstance(arguments, dict):
            raise TypeError(f"not {_shown(arguments)}")
    except (TypeError, RecursionError) as error:
        raise UserError(
            f"{place}: the arguments of {name} must be a JSON object: {error}"
        ) from None
    outer = {k: v for k, v in call.items() if k not in (*known, "type")}
    inner = {} if function is call else function
    inner = {k: v for k, v in inner.items() if k not in (*known, *outer)}
    function = {"name": name, "arguments": arguments, **inner}
    return {"type": "function", **outer, "function": function}


def _tools(optional: dict) -> list | None:
    """The example's tool schemas. Columns exported from tables hold them as one JSON string."""
    given = {key: _from_json(optional[key]) for key in TOOLS if key in optional}
    key, tools = _value(TOOLS, "this example", given)
    if not tools:
        return None
    if isinstance(tools, list):
        tools = [_from_json(tool) for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{key!r} must be a list of JSON schemas")
    return tools


def _from_json(value):
    """The parsed value of a JSON string; any other value unchanged. Raises UserError for an object
    with a key twice."""
    try:
        return DECODER.decode(value) if isinstance(value, str) and value else value
    except (json.JSONDecodeError, RecursionError):
        return value
    except ValueError as error:
        raise UserError(f"broken JSON: {error}") from None


def _is_part(value) -> bool:
    return isinstance(value, dict) and "type" in value and "role" not in value
