"""Where the text of an assistant turn stands in a conversation that a chat template has rendered.

A turn is accepted only if its rendered text is all of the example's: content, reasoning and every
argument of its calls, ignoring whitespace around them, which many templates trim. A guessed mask
would silently train on the wrong tokens."""

import itertools
import json
import re
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding

from llm_demo.data.codec import STAND_IN, THINK_PROMPT, assistant
from llm_demo.data.reasons import (
    EMPTY_TURN,
    ENDS_INSIDE,
    NO_PROMPT,
    NO_REASONING,
    ONLY_CLOSED,
    REFUSED,
    REWRITTEN,
    STRADDLED,
    UNCLOSED,
    UNMARKED,
    UNOPENED,
    UNSTOPPED,
    WITH_REASONING,
)

# Reasoning templates put an empty block before an answer without reasoning (Qwen3), and open one in
# the generation prompt (Qwen3-Thinking, DeepSeek-R1). Neither is part of the example's text.
EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\n*")
# Reasoning in a turn's text. A prompt may hold the tag that opens it; the one that closes it then
# stands at the beginning or the end of a line.
REASONING_TEXT = re.compile(
    r"<think>(.*?)</think>|(.*?)(?:(?<=\n)</think>|</think>(?=\n|$))", re.DOTALL
)
TAG = re.compile(r"\s*(?:[<[][^\s>\]]*[>\]])?\s*")  # what a template puts around reasoning
NAMED_TAG = re.compile(r"\s*(?:[<[][^\s>\]]*[>\]]\w*)?\s*")  # and before it: a channel's name
SPACE = re.compile(r"\s*")


class Record(NamedTuple):
    """One example of any format: a conversation or, if messages is None, plain text or tokens."""

    messages: list[dict] | None  # role, content, other keys of the chat template
    text: str = ""
    tools: list | None = None
    tokens: tuple[np.ndarray, np.ndarray] | None = None  # ids, and which are labels
    context: frozenset[int] = frozenset()  # message numbers of the prompt, never learnt
    marks: dict[int, bool] = {}  # message number -> learn it, by its weight, train or loss_mask
    chat_template_kwargs: dict = {}  # variables of the chat template, for this example
    is_rendered: bool = False  # the prompt is text as the chat template writes it


class Sample(NamedTuple):
    ids: np.ndarray  # int32 [n]
    is_label: np.ndarray  # bool [n]; the first token is never one: nothing predicts it


class NotLearnt(Exception):
    """The reason why an example or a turn is not learnt."""


class Rendered(NamedTuple):
    """A whole conversation as its chat template writes it."""

    codec: object  # a labels.Codec
    record: Record
    text: str
    encoding: Encoding
    borders: tuple[int, ...] = ()  # characters between which the text was tokenised apart


def changed(messages: list[dict], number: int, **values) -> list[dict]:
    """The messages, this one with other values."""
    return [*messages[:number], messages[number] | values, *messages[number + 1 :]]


def plain_text(messages: list[dict], eos: str) -> str:
    """The text without a chat template: turns joined by newlines, each answer ended by eos."""
    turns = (m["content"] + (eos if assistant(m) else "") for m in messages)
    return "\n".join(turn for turn in turns if turn)


def spans_of(
    chat: Rendered, turn: int, marks: np.ndarray | None, remarks: set[str]
) -> tuple[Rendered, list[tuple[int, int]]]:
    """(the conversation, (first token, last token) of each learnt part of a turn). The conversation
    has one more border between tokens if the generation prompt ends inside one. Adds to `remarks`.
    Raises NotLearnt. marks: the template's, bool [tokens], or None; they may begin with the words
    that ask for the answer, and end before the stop token."""
    codec, text = chat.codec, chat.text
    begin, start = _start(chat, turn, remarks)
    opened = start > begin
    try:
        start, stop = _characters(chat, turn, begin, start, remarks)
    except NotLearnt:
        if marks is None:
            raise
        first = chat.encoding.char_to_token(_not_space(text, start)) or 0
        marked = first + np.flatnonzero(marks[first:])
        at = chat.encoding.token_to_chars(int(marked[0]))[0] if len(marked) else len(text)
        if codec.ends.search(text, start, at):
            raise NotLearnt(UNMARKED) from None
        # the template may not ask for the answer
        start, stop = _characters(chat, turn, at, at, remarks)
    if opened and marks is None and not _token_begins(chat.encoding, start):
        chat = _split(chat, start)
    encoding = chat.encoding
    first, last = encoding.char_to_token(start), encoding.char_to_token(stop)
    if not _token_begins(encoding, start):
        raise NotLearnt(STRADDLED)
    if last is None or encoding.ids[last] not in codec.special_ids:
        raise NotLearnt(UNSTOPPED)
    if marks is None:
        return chat, [(first, last)]
    if codec.learn_reasoning:
        ends = [m.end() for m in codec.ends.finditer(text, 0, start)]
        first = encoding.char_to_token(_not_space(text, ends[-1])) if ends else 0
    marked = np.append(marks[first:last], marks[last - 1] | marks[last])
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False))
    if not len(edges):
        raise NotLearnt(UNMARKED)
    return chat, [(first + int(a), first + int(b) - 1) for a, b in edges.reshape(-1, 2)]


def _token_begins(encoding: Encoding, at: int) -> bool:
    """Whether a token begins at this character."""
    token = encoding.char_to_token(at)
    return token is not None and encoding.token_to_chars(token)[0] == at


def _split(chat: Rendered, border: int) -> Rendered:
    """The conversation with what the model writes tokenised apart from its prompt. A server's
    prompt ends at this character, so the model never sees a token that reaches beyond it: in
    Qwen3.5 the prompt ends with "<think>" and one line break, an empty block goes on with another,
    and both are one token."""
    borders = (*chat.borders, border)
    pieces = [chat.text[a:b] for a, b in itertools.pairwise((0, *borders, len(chat.text)))]
    parts = [chat.codec.backend.encode(piece, add_special_tokens=False) for piece in pieces]
    if any(part.tokens[0].startswith("\u2581") for part in parts[1:]):
        return chat  # this tokenizer puts a space before any text
    encoding = Encoding.merge(parts, growing_offsets=True)
    return chat._replace(encoding=encoding, borders=borders)


def _characters(
    chat: Rendered, turn: int, begin: int, start: int, remarks: set[str]
) -> tuple[int, int]:
    """Where the learnt text and the stop token of a turn begin: the first stop token behind all of
    the turn's parts. begin, start: see _start. Raises NotLearnt."""
    codec, record, text = chat.codec, chat.record, chat.text
    message = record.messages[turn]
    if not codec.learn_reasoning:
        message = _with_reasoning_apart(message, remarks)
    reasoning, answer = _reasoning_and_answer(message)
    forms, until = [message], text
    if not codec.learn_reasoning:  # the template may drop it
        forms.append(message | {"content": answer, "reasoning_content": None})
    if message.get("tool_calls"):  # what stands behind them may belong to the next turn
        until = codec.try_render(record.messages[: turn + 1], record) or ""
    for stop in codec.ends.finditer(text, begin):
        if stop.start() - begin < len(answer):
            continue
        places = [_answer_in(text[begin : stop.start()], form) for form in forms]
        places = [place for place in places if place is not None]
        if not places:
            continue
        place = places[0]
        if text[begin : stop.start() if codec.closings else stop.end()] not in until:
            break
        if codec.ends.search(text, begin, stop.start()):
            raise NotLearnt(ENDS_INSIDE)
        if not codec.learn_reasoning:
            if text[start : begin + place].strip():  # else the prompt ends where the answer begins
                start = begin + place
            if not text[start : stop.start()].strip():
                raise NotLearnt(EMPTY_TURN)
            if reasoning:
                remarks.add(WITH_REASONING)
        return start, stop.start()
    end = codec.ends.search(text, begin)
    body = text[begin : end.start() if end else len(text)]
    if reasoning and answer in body and "</think>" not in body:
        raise NotLearnt(NO_REASONING)
    raise NotLearnt(REWRITTEN)


def _start(chat: Rendered, turn: int, remarks: set[str]) -> tuple[int, int]:
    """(where a turn's text begins, where the model begins to write it). The two differ if the text
    that the model is given to answer opens a block of reasoning, or holds an empty one. Templates
    may write earlier turns otherwise (Qwen3's reasoning, Mistral's tools): then it begins behind
    that text's last words before the turn. Raises NotLearnt."""
    codec, record, text = chat.codec, chat.record, chat.text
    before = record.messages[:turn]
    if record.is_rendered:
        return (len(before[-1]["content"]),) * 2
    if not codec.template:
        if not before:
            raise NotLearnt(NO_PROMPT)
        head = plain_text(before, codec.tokenizer.eos_token)
        return (len(head) + bool(head),) * 2
    head = codec.try_render(before, record, add_generation_prompt=True)
    if head is None:  # few templates take no messages at all
        raise NotLearnt(REFUSED if turn else NO_PROMPT)
    bare = THINK_PROMPT.sub("", head)
    block = head[len(bare) :]
    begin = _begin(chat, turn, bare)
    if text.startswith(block, begin):
        return begin, begin + len(block)
    if codec.learn_reasoning or not text.startswith("<think>", begin):
        remarks.add(UNOPENED)  # else it has reasoning, see WITH_REASONING
    return begin, begin


def _begin(chat: Rendered, turn: int, head: str) -> int:
    """See _start. head: the text that the model is given, without a block of reasoning."""
    codec, record, text = chat.codec, chat.record, chat.text
    before = record.messages[:turn]
    if text.startswith(head):
        again = turn and assistant(before[-1])  # two turns in a row
        if again and re.search(rf"(?:{codec.ends.pattern})\s*$", head):
            raise NotLearnt(NO_PROMPT)
        return len(head)
    marks = []
    if turn:
        marks.append({"content": STAND_IN})
        calls = record.messages[turn].get("tool_calls")
        if calls:
            function = calls[0]["function"] | {"name": STAND_IN}
            marks.append({"tool_calls": [calls[0] | {"function": function}, *calls[1:]]})
    for mark in marks:
        marked = codec.try_render(changed(record.messages, turn, **mark), record) or ""
        asked = changed(before, turn - 1, content=STAND_IN)
        asked = codec.try_render(asked, record, add_generation_prompt=True) or ""
        place, words = marked.find(STAND_IN), THINK_PROMPT.sub("", asked.rpartition(STAND_IN)[2])
        if place >= 0 and words and STAND_IN in asked and text[:place] == marked[:place]:
            at = text.rfind(words, 0, place)
            if at < 0:
                break
            return at + len(words)
    raise NotLearnt(REWRITTEN)


def _with_reasoning_apart(message: dict, remarks: set[str]) -> dict:
    """The message with its reasoning out of its content, also where only the tag that closes it is
    there: a prompt may hold the other. Raises NotLearnt if nothing closes it."""
    content = message["content"].strip()
    if "</think>" not in content:
        if content.startswith("<think>"):
            raise NotLearnt(UNCLOSED)
        return message
    if (message.get("reasoning_content") or "").strip() or REASONING_TEXT.match(content):
        return message
    remarks.add(ONLY_CLOSED)
    reasoning, _, answer = content.partition("</think>")
    return message | {"reasoning_content": reasoning, "content": answer}


def _not_space(text: str, at: int) -> int:
    """The first character from `at` on that is not whitespace."""
    return SPACE.match(text, at).end()


def _answer_in(body: str, message: dict) -> int | None:
    """Where the answer begins in a rendered turn, behind its reasoning; None if the turn is not
    exactly the example's. The template decides how reasoning and tool calls look."""
    reasoning, answer = _reasoning_and_answer(message)
    calls = message.get("tool_calls", [])
    at = 0
    if reasoning:
        begins = [tag.match(body).end() for tag in (TAG, NAMED_TAG)]
        places = [place for place in begins if body.startswith(reasoning, place)]
        if not places:
            return None
        at = TAG.match(body, places[0] + len(reasoning)).end()
    elif EMPTY_THINK.match(body):  # the example has it too
        at = EMPTY_THINK.match(body).end()
    rest = body[at:].strip()
    whole = rest.startswith(answer) if calls else rest == answer
    if not whole or behind_calls(rest[len(answer) :], calls) is None:
        return None
    return len(body[:at].rstrip(" "))  # a space may be part of the first token


def _reasoning_and_answer(message: dict) -> tuple[str, str]:
    content = message["content"].strip()
    reasoning = message.get("reasoning_content") or ""
    if not reasoning.strip() and "</think>" in content:
        match = REASONING_TEXT.match(content)
        if match:
            reasoning = match[1] or match[2] or ""
            content = content[match.end() :]
    return reasoning.strip(), content.strip()


def behind_calls(text: str, calls: list[dict]) -> str | None:
    """What stands behind tool calls in a text: the name and then every argument of each, in order.
    None if one of them is not there."""
    for call in calls:
        arguments = call["function"].get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        text = _behind(text, call["function"]["name"])
        text = None if text is None else _behind(text, arguments)
        if text is None:
            return None
    return text


def _behind(text: str, value, depth: int = 0) -> str | None:
    """What stands behind a JSON value in a text, as JSON or as the template writes its parts, such
    as <key>value</key>. None if a part is missing, or if it stands there as Python writes it."""
    if isinstance(value, str):
        forms = {json.dumps(value, ensure_ascii=False), json.dumps(value), value}
        places = [(text.find(form), -len(form)) for form in forms if form in text]
        if not places:
            return None
        first, minus_length = min(places)  # of several at one place the longest
        return text[first - minus_length :]
    if not isinstance(value, (dict, list)):
        forms = "|".join(map(re.escape, (json.dumps(value), str(value))))
        match = re.search(rf"(?<![\w.])(?:{forms})(?!\.?\w)", text)  # not a part of another number
        return text[match.end() :] if match else None
    if depth < 2 and str(value) in text and json.dumps(value, ensure_ascii=False) not in text:
        return None
    parts = value
    if isinstance(value, dict):
        parts = itertools.chain.from_iterable(value.items())
    for part in parts:
        text = _behind(text, part, depth + 1)
        if text is None:
            return None
    return text
