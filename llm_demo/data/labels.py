"""Turns records into samples: one conversation as token ids, with the labels marked.

The whole conversation is rendered once and tokenised once, so the ids equal those of the
tokenizer's own apply_chat_template. The labels are the tokens after the generation prompt of an
assistant turn, up to and including the turn's stop token, without the whitespace after it. If the
template marks what to learn itself ({% generation %}), the labels are what it marks. A turn is
accepted only if its rendered text is all of the row's: content, reasoning and every argument of its
calls, ignoring whitespace around them, which many templates trim. Any other turn is not learnt, and
the reason is logged. A row without a learnt turn is skipped: a guessed mask would silently train on
the wrong tokens."""

import itertools
import json
import re
from collections import Counter
from typing import NamedTuple

import numpy as np
from jinja2 import TemplateError
from tokenizers import Tokenizer

from llm_demo.core.errors import UserError
from llm_demo.data.records import Record, Sample

# Reasons. Caches and checkpoints store them, so a new text would read as a change of the data.
NOTHING = "nothing to learn"

REFUSED = "the chat template refuses the conversation"

REWRITTEN = "the chat template does not keep the assistant text as given"

NO_REASONING = (
    "the chat template drops the turn's reasoning; set one that keeps it with --chat_template"
)

NO_CALLS = "the chat template does not support tool calls (function_call turns)"

LEFT_OUT = "the chat template drops the {role} turn"

NO_PROMPT = "there is no prompt before the assistant turn"

EMPTY_TURN = "the assistant turn is empty"

ENDS_INSIDE = "the assistant text contains the token that ends a turn"

UNMARKED = "the chat template's {% generation %} marks leave the turn out"

MARKED = "marked with weight 0, train false or the like"

NO_TEXT = "it contains half a surrogate pair: invalid text"

NOT_OURS = "marked to be learnt, but only the assistant's answers can be"

UNSTOPPED = "no stop token after an assistant turn"

STRADDLED = "a token straddles the start of an assistant turn"

# Reasoning templates put an empty block before an answer without reasoning (Qwen3), and open one in
# the generation prompt (Qwen3-Thinking, DeepSeek-R1). Neither is part of the row's text.
EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\n*")

THINK_PROMPT = re.compile(r"<think>\s*(</think>\s*)?$")

# Reasoning in a turn's text. A prompt may hold the tag that opens it; the one that closes it then
# stands at the beginning or the end of a line.
REASONING = re.compile(r"<think>(.*?)</think>|(.*?)(?:(?<=\n)</think>|</think>(?=\n|$))", re.DOTALL)

TAG = re.compile(r"\s*(?:[<[][^\s>\]]*[>\]])?\s*")  # what a template puts around reasoning

SPACE = re.compile(r"\s*")

MARKER = "\ue000"  # stands for a part of a turn, to see where a template puts it


class Codec(NamedTuple):
    """A tokenizer and what is derived from it once."""

    tokenizer: object
    backend: Tokenizer  # the same ids, with exact offsets
    template: str  # source of all its chat templates; "" if it has none
    tagged: bool  # the template marks the assistant's tokens itself: {% generation %}
    specials: re.Pattern  # any special token
    ends: re.Pattern  # those that end a turn
    special_ids: frozenset[int]
    bos: list[int]  # ids put before plain text: one or none
    train_on_prompt: bool
    last_turn_only: bool
    learn_reasoning: bool


def make_codec(
    tokenizer,
    train_on_prompt: bool = False,
    last_turn_only: bool = False,
    learn_reasoning: bool = True,
) -> Codec:
    """Prepare a tokenizer. Raises UserError if it lacks offsets (not "fast") or an end token."""
    name = getattr(tokenizer, "name_or_path", "") or "this tokenizer"
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{name} is not a fast tokenizer (tokenizer.json), which exact labels require"
        )
    if not tokenizer.chat_template and tokenizer.eos_token_id is None:
        raise UserError(
            f"{name} has neither a chat template nor an eos token to end a document with"
        )
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    # Saved truncation would silently cut rows, padding would lengthen them, and a byte-level
    # post-processor (Llama 3) trims whitespace from the offsets.
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None
    special = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    bos = [tokenizer.bos_token_id]
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    templates = tokenizer.chat_template  # some have a second one, for tools
    source = "\n".join(templates.values()) if isinstance(templates, dict) else template
    return Codec(
        tokenizer,
        backend,
        template=source,
        tagged=re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None,
        specials=_any_of(special.values()),
        ends=_any_of(special[i] for i in stop_tokens(tokenizer) if i in special),
        special_ids=frozenset(special),
        bos=bos if tokenizer("a")["input_ids"][:1] == bos else [],
        train_on_prompt=train_on_prompt,
        last_turn_only=last_turn_only,
        learn_reasoning=learn_reasoning,
    )


def _any_of(texts) -> re.Pattern:
    texts = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile("|".join(texts) or "(?!)")


def stop_tokens(tokenizer) -> list[int]:
    """Tokens that end an answer: the tokenizer's eos, and the special token that its chat template
    puts after an assistant turn, whatever whitespace is between."""
    stop = {tokenizer.eos_token_id}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except REFUSALS:
            text = ""
        rest = text.rpartition("ANSWER")[2] if "ANSWER" in text else ""
        behind = tokenizer(rest.lstrip(), add_special_tokens=False).input_ids
        known = tokenizer.added_tokens_decoder
        stop |= {t for t in behind[:1] if t in known and known[t].special}
    return sorted(stop - {None})


def encode(
    codec: Codec, records: list[Record], not_learnt: list[Counter] | None = None
) -> list[Sample | str]:
    """Samples in the order of `records`; for a skipped row, the reason instead.

    not_learnt: receives a Counter for each record, {why a turn is not learnt: turns}. One call
    tokenises all rows on all cores, with the tokenizers library's own threads. Rendering takes
    about 10 us, so worker processes (or datasets.map) would cost more than they save."""
    texts = [_render_record(codec, record) for record in records]
    encodings = codec.backend.encode_batch([text for _, text, _ in texts], add_special_tokens=False)
    samples = []
    for (record, text, reason), encoding in zip(texts, encodings, strict=True):
        reasons = Counter()
        samples.append(reason or _sample(codec, record, text, encoding, reasons))
        if not_learnt is not None:
            not_learnt.append(reasons)
    return samples


def _learnt_turns(record: Record, last_only: bool = False) -> list[int]:
    """The numbers of the messages to learn: non-empty assistant turns not marked otherwise."""
    turns = [i for i in _assistant_turns(record) if record.marks.get(i, True)]
    turns = [i for i in turns if not _is_empty(record.messages[i])]
    return turns[-1:] if last_only else turns


def _assistant_turns(record: Record) -> list[int]:
    return [i for i, m in enumerate(record.messages) if _assistant(m) and i not in record.context]


def _is_empty(message: dict) -> bool:
    return not (message["content"].strip() or message.get("tool_calls"))


def _render_record(codec: Codec, record: Record) -> tuple[Record, str, str]:
    """(the record as the template wants it, text of the whole document, the reason if the row is
    skipped)."""
    eos = codec.tokenizer.eos_token or ""
    if record.tokens:
        return record, "", ""
    if record.messages is None:
        text = record.text if record.text.endswith(eos) else record.text + eos
        return record, text, "" if record.text.strip() else NOTHING
    if not record.messages or not (codec.train_on_prompt or _learnt_turns(record)):
        turns = _assistant_turns(record)
        all_empty = all(_is_empty(record.messages[i]) for i in turns)
        return record, "", (EMPTY_TURN if turns else NOTHING) if all_empty else MARKED
    calls = [call for m in record.messages for call in m.get("tool_calls", [])]
    if calls and "tool_calls" not in codec.template:
        return record, "", NO_CALLS
    if not codec.template:
        return record, _plain(record.messages, eos), ""
    rendered, reasons = [], []
    # Most templates take a call's arguments as an object, some (DeepSeek-V3) only as JSON text.
    for form in (record, _arguments_as_text(record)) if calls else (record,):
        try:
            text = _render(codec, form.messages, form)
        except REFUSALS as error:
            words = " ".join(str(error).split())[:100]
            reasons.append(f"{REFUSED}: {words}" if words else REFUSED)
            continue
        rendered.append((form, text))
        if _behind_calls(text, calls) is not None:
            rendered = [(form, text)]
            break
    if not rendered:
        return record, "", reasons[0]
    form, text = rendered[0]
    try:
        text.encode()  # the tokenizer's own error names no row
    except UnicodeEncodeError:
        return record, "", NO_TEXT
    dropped = _dropped_role(codec, form, text)
    return form, text, LEFT_OUT.format(role=dropped) if dropped else ""


def _arguments_as_text(record: Record) -> Record:
    """The record with the arguments of its calls as JSON text."""

    def as_text(call: dict) -> dict:
        function = call["function"]
        text = json.dumps(function.get("arguments", {}), ensure_ascii=False)
        return call | {"function": function | {"arguments": text}}

    messages = [
        m | {"tool_calls": list(map(as_text, m["tool_calls"]))} if "tool_calls" in m else m
        for m in record.messages
    ]
    return record._replace(messages=messages)


def _dropped_role(codec: Codec, record: Record, text: str) -> str | None:
    """The role of the first turn whose content the template drops, apart from the assistant's."""
    given = "\0".join(message["content"] for message in record.messages)
    for number, message in enumerate(record.messages):
        content = message["content"].strip()  # it may be part of another turn's
        if not _assistant(message) and text.count(content) < given.count(content):
            if _leaves_out(codec, record, number, text):
                return message["role"]
    return None


def _leaves_out(codec: Codec, record: Record, number: int, text: str) -> bool:
    """Whether the template drops this message's content: the text is the same without it. A
    template may also write the content in another form, such as JSON."""
    try:
        return _render(codec, _changed(record.messages, number, content=""), record) == text
    except REFUSALS:
        return False


def _changed(messages: list[dict], number: int, **values) -> list[dict]:
    """The messages, this one with other values."""
    return [*messages[:number], messages[number] | values, *messages[number + 1 :]]


def _sample(codec: Codec, record: Record, text: str, encoding, reasons: Counter) -> Sample | str:
    ids, is_label = record.tokens or (encoding.ids, [True] * len(encoding.ids))
    ids, is_label = np.array(ids, np.int32), np.array(is_label, bool)
    if codec.train_on_prompt:
        is_label[:] = True
    elif record.messages is not None:
        spans, why = _learnt_spans(codec, record, text, encoding, reasons)
        if not spans:
            return why
        is_label[:] = False
        for first, last in spans:
            is_label[first : last + 1] = True
    rendered = record.tokens or codec.template and record.messages
    if codec.bos and not rendered and list(ids[:1]) != codec.bos:
        ids, is_label = np.append(np.int32(codec.bos), ids), np.append(False, is_label)
    is_label[:1] = False
    return Sample(ids, is_label) if is_label.any() else NOTHING


def _learnt_spans(
    codec: Codec, record: Record, text: str, encoding, reasons: Counter
) -> tuple[list[tuple[int, int]], str]:
    """((first token, stop token) of each learnt turn, why the first other turn is not learnt).
    Counts the row's turns that are not learnt in `reasons`."""
    turns, spans, why = _learnt_turns(record, codec.last_turn_only), [], NOTHING
    for i in _assistant_turns(record):
        if not record.marks.get(i, True):
            reasons[MARKED] += 1
        elif _is_empty(record.messages[i]):
            reasons[EMPTY_TURN] += 1
    reasons[NOT_OURS] += sum(
        learn and not (_assistant(record.messages[i]) and i not in record.context)
        for i, learn in record.marks.items()
    )
    marks = _marks(codec, record) if codec.tagged and turns else None
    for turn in turns:
        found = _spans(codec, record, turn, text, encoding, marks)
        if isinstance(found, str):
            reasons[found] += 1
            why = found if why == NOTHING else why
        else:
            spans += found
    return spans, why


def _marks(codec: Codec, record: Record) -> np.ndarray:
    """Which tokens of a conversation its template marks: bool [tokens]."""
    try:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = _render(codec, record.messages, record, tokenize=True, **options)
        return np.array(found["assistant_masks"], bool)
    except REFUSALS:
        return np.zeros(0, bool)


def _spans(
    codec: Codec, record: Record, turn: int, text: str, encoding, marks
) -> list[tuple[int, int]] | str:
    """(first token, last token) of each learnt part of a turn, or why it is not learnt. marks: the
    template's, or None; they may begin with the words that ask for the answer, and end before the
    stop token."""
    start = _start(codec, record, turn, text)
    if isinstance(start, str):
        return start
    found = _characters(codec, record, turn, text, start)
    if marks is not None and isinstance(found, str):  # the template may not ask for the answer
        first = encoding.char_to_token(_not_space(text, start)) or 0
        marked = first + np.flatnonzero(marks[first:])
        at = encoding.token_to_chars(int(marked[0]))[0] if len(marked) else len(text)
        if codec.ends.search(text, start, at):
            return UNMARKED
        found = _characters(codec, record, turn, text, at)
    if isinstance(found, str):
        return found
    start, stop = found
    first, last = encoding.char_to_token(start), encoding.char_to_token(stop)
    if first is None or encoding.token_to_chars(first)[0] != start:
        return STRADDLED
    if last is None or encoding.ids[last] not in codec.special_ids:
        return UNSTOPPED
    if marks is None:
        return [(first, last)]
    if codec.learn_reasoning:
        ends = [m.end() for m in codec.ends.finditer(text, 0, start)]
        first = encoding.char_to_token(_not_space(text, ends[-1])) if ends else 0
    own = np.append(marks[first:last], marks[last - 1] | marks[last])
    edges = np.flatnonzero(np.diff(own, prepend=False, append=False))
    runs = [(first + int(a), first + int(b) - 1) for a, b in edges.reshape(-1, 2)]
    return runs or UNMARKED


def _characters(
    codec: Codec, record: Record, turn: int, text: str, start: int
) -> tuple[int, int] | str:
    """Where the learnt text and the stop token of a turn begin, whose own text begins at `start`,
    or why it is not learnt."""
    message = record.messages[turn]
    think = EMPTY_THINK.match(text, start)
    if think and not EMPTY_THINK.match(message["content"]):
        start = think.end()
    stop, answer = _stop(codec, record, turn, text, start)
    if stop is None:
        content, at = message["content"].strip(), _not_space(text, start)
        at = _not_space(text, at + len(content)) if text.startswith(content, at) else 0
        ended = at == len(text) or codec.specials.match(text, at)
        calls = message.get("tool_calls")
        if content and at and ended and not calls and not codec.ends.match(text, at):
            return UNSTOPPED
        end = codec.ends.search(text, start)
        body = text[start : end.start()] if end else ""
        return NO_REASONING if _without_reasoning(body, message) else REWRITTEN
    if codec.ends.search(text, start, stop):
        return ENDS_INSIDE
    if not codec.learn_reasoning:
        start += answer
        if not text[start:stop].strip():
            return EMPTY_TURN
    return start, stop


def _stop(codec: Codec, record: Record, turn: int, text: str, start: int) -> tuple[int | None, int]:
    """Where the first stop token begins behind all of a turn's parts, or None; and where its answer
    begins, counted from `start`."""
    message, own = record.messages[turn], None
    plain, texts = _reasoning_and_answer(message)[1], [message]
    if not codec.learn_reasoning:  # the template may drop it
        texts.append(message | {"content": plain, "reasoning_content": None})
    for stop in codec.ends.finditer(text, start):
        if stop.start() - start < len(plain):
            continue
        found = [_answer_in(text[start : stop.start()], given) for given in texts]
        if (answer := next((at for at in found if at is not None), None)) is None:
            continue
        if message.get("tool_calls"):  # what stands behind them may belong to the next turn
            try:
                own = own or _render(codec, record.messages[: turn + 1], record)
            except REFUSALS:
                break
            if text[start : stop.end()] not in own:
                break
        return stop.start(), answer
    return None, 0


def _start(codec: Codec, record: Record, turn: int, text: str) -> int | str:
    """The first character of a turn's own text, or why it is unknown: the end of the text that the
    model is given to answer, or where that text's last words are found before the turn, since
    templates may write earlier turns otherwise (Qwen3's reasoning, Mistral's tools)."""
    before = record.messages[:turn]
    again = turn and _assistant(before[-1])  # two turns in a row
    if not codec.template:
        head = _plain(before, codec.tokenizer.eos_token)
        return len(head) + bool(head)
    try:
        head = THINK_PROMPT.sub("", _render(codec, before, record, add_generation_prompt=True))
    except REFUSALS:
        return REFUSED if turn else NO_PROMPT  # few templates take no messages at all
    if text.startswith(head):
        ended = re.search(rf"(?:{codec.ends.pattern})\s*$", head) if again else None
        return NO_PROMPT if ended else len(head)
    if not turn:
        return REWRITTEN
    marks = [{"content": MARKER}]
    if calls := record.messages[turn].get("tool_calls"):
        function = calls[0]["function"] | {"name": MARKER}
        marks.append({"tool_calls": [calls[0] | {"function": function}, *calls[1:]]})
    for mark in marks:
        try:
            marked = _render(codec, _changed(record.messages, turn, **mark), record)
            asked = _changed(before, turn - 1, content=MARKER)
            asked = _render(codec, asked, record, add_generation_prompt=True)
        except REFUSALS:
            continue
        place, words = marked.find(MARKER), THINK_PROMPT.sub("", asked.rpartition(MARKER)[2])
        if place >= 0 and words and MARKER in asked and text[:place] == marked[:place]:
            at = text.rfind(words, 0, place)
            return REWRITTEN if at < 0 else at + len(words)
    return REWRITTEN


def _not_space(text: str, at: int) -> int:
    """The first character from `at` on that is not whitespace."""
    return SPACE.match(text, at).end()


def _answer_in(body: str, message: dict) -> int | None:
    """Where the answer begins in a rendered turn, behind its reasoning; None if the turn is not
    exactly the row's. The template decides how reasoning and tool calls look."""
    reasoning, answer = _reasoning_and_answer(message)
    calls, at = message.get("tool_calls", []), 0
    if reasoning:
        at = TAG.match(body).end()
        if not body.startswith(reasoning, at):
            return None
        at = TAG.match(body, at + len(reasoning)).end()
    elif think := EMPTY_THINK.match(body):  # the row's own
        at = think.end()
    rest = body[at:].strip()
    whole = rest.startswith(answer) if calls else rest == answer
    if not whole or _behind_calls(rest[len(answer) :], calls) is None:
        return None
    return len(body[:at].rstrip(" "))  # a space may be part of the first token


def _reasoning_and_answer(message: dict) -> tuple[str, str]:
    content, reasoning = message["content"].strip(), message.get("reasoning_content") or ""
    if not reasoning.strip() and "</think>" in content and (found := REASONING.match(content)):
        reasoning, content = found[1] or found[2] or "", content[found.end() :]
    return reasoning.strip(), content.strip()


def _behind_calls(text: str, calls: list[dict]) -> str | None:
    """What stands behind tool calls in a text: the name and then every argument of each, in order.
    None if one of them is not there."""
    for call in calls:
        arguments = call["function"].get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        for part in (call["function"]["name"], arguments):
            if (text := _behind(text, part)) is None:
                return None
    return text


def _behind(text: str, value, depth: int = 0) -> str | None:
    """What stands behind a JSON value in a text, as JSON or as the template writes its parts, such
    as <key>value</key>. None if a part is missing, or if it stands there as Python writes it."""
    if isinstance(value, str):
        forms = {json.dumps(value, ensure_ascii=False), json.dumps(value), value}
        places = [(at, -len(form)) for form in forms if (at := text.find(form)) >= 0]
        return text[min(places)[0] - min(places)[1] :] if places else None
    if not isinstance(value, (dict, list)):
        forms = "|".join(map(re.escape, (json.dumps(value), str(value))))
        found = re.search(rf"(?<![\w.])(?:{forms})(?!\.?\w)", text)  # not a part of another number
        return text[found.end() :] if found else None
    if depth < 2 and str(value) in text and json.dumps(value, ensure_ascii=False) not in text:
        return None
    parts = itertools.chain(*value.items()) if isinstance(value, dict) else value
    for part in parts:
        if (text := _behind(text, part, depth + 1)) is None:
            return None
    return text


def _without_reasoning(body: str, message: dict) -> bool:
    """Whether a rendered turn is the row's, but for the reasoning before the answer."""
    reasoning, answer = _reasoning_and_answer(message)
    return bool(reasoning) and answer in body and "</think>" not in body


def _render(codec: Codec, messages: list[dict], record: Record, tokenize=False, **options):
    return codec.tokenizer.apply_chat_template(
        messages, tools=record.tools, tokenize=tokenize, **options
    )


def _plain(messages: list[dict], eos: str) -> str:
    """The text without a chat template: turns joined by newlines, each answer ended by eos."""
    turns = (m["content"] + (eos if _assistant(m) else "") for m in messages)
    return "\n".join(turn for turn in turns if turn)


def _assistant(message: dict) -> bool:
    return message["role"] == "assistant"


# What a template raises for conversations it does not support: raise_exception() and undefined
# names, None added to a string, the first of no messages; and arguments nested too deeply.
REFUSALS = (
    TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError,
)  # fmt: skip
