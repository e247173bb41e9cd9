"""Turns records into samples: one conversation as token ids, with the labels marked.

The whole conversation is rendered once and tokenised once, so the ids equal those of the
tokenizer's own apply_chat_template. The labels are the tokens after the generation prompt of an
assistant turn, up to and including the turn's stop token, without the whitespace after it. A turn
is accepted only if it decodes to the row's text plus the stop token, ignoring leading and trailing
whitespace, which many templates trim. Any other turn is not learnt, and the reason is logged. A row
without a learnt turn is skipped: a guessed mask would silently train on the wrong tokens."""

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
from jinja2 import TemplateError
from tokenizers import Tokenizer

from llm_demo.data.batch import Record, Sample
from llm_demo.errors import UserError

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

MARKED = "marked with weight 0, train false or the like"

NOT_OURS = "marked to be learnt, but only the assistant's answers can be"

UNSTOPPED = "no stop token after an assistant turn"

STRADDLED = "a token straddles the start of an assistant turn"

# Reasoning templates put an empty block before an answer without reasoning (Qwen3), and open one in
# the generation prompt (Qwen3-Thinking, DeepSeek-R1). Neither is part of the row's text.
EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\n*")

THINK_PROMPT = re.compile(r"<think>\s*(</think>\s*)?$")

REASONING = re.compile(r"^.*</think>", re.DOTALL)


class Codec(NamedTuple):
    """A tokenizer and what is derived from it once."""

    tokenizer: object
    backend: Tokenizer  # the same ids, with exact offsets
    template: str  # source of all its chat templates; "" if it has none
    tagged: bool  # the template marks the assistant's tokens itself: {% generation %}
    stops: re.Pattern  # any special token
    special_ids: frozenset[int]
    bos: list[int]  # ids put before plain text: one or none
    train_on_prompt: bool
    last_turn_only: bool


def make_codec(tokenizer, train_on_prompt: bool = False, last_turn_only: bool = False) -> Codec:
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
    texts = sorted(map(re.escape, special.values()), key=len, reverse=True)
    bos = [tokenizer.bos_token_id]
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    templates = tokenizer.chat_template  # some have a second one, for tools
    source = "\n".join(templates.values()) if isinstance(templates, dict) else template
    return Codec(
        tokenizer,
        backend,
        template=source,
        tagged=re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None,
        stops=re.compile("|".join(texts) or "(?!)"),
        special_ids=frozenset(special),
        bos=bos if tokenizer("a")["input_ids"][:1] == bos else [],
        train_on_prompt=train_on_prompt,
        last_turn_only=last_turn_only,
    )


def encode(
    codec: Codec, records: list[Record], not_learnt: list[Counter] | None = None
) -> list[Sample | str]:
    """Samples in the order of `records`; for a skipped row, the reason instead.

    not_learnt: receives a Counter for each record, {why a turn is not learnt: turns}. One call
    tokenises all rows on all cores, with the tokenizers library's own threads. Rendering takes
    about 10 us, so worker processes (or datasets.map) would cost more than they save."""
    texts = [_render_record(codec, record) for record in records]
    encodings = codec.backend.encode_batch(
        [text or "" for text, _ in texts], add_special_tokens=False
    )
    samples = []
    for record, (text, reason), encoding in zip(records, texts, encodings, strict=True):
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


def _render_record(codec: Codec, record: Record) -> tuple[str, str]:
    """(text of the whole document, the reason if the row is skipped)."""
    eos = codec.tokenizer.eos_token or ""
    if record.tokens:
        return "", ""
    if record.messages is None:
        text = record.text if record.text.endswith(eos) else record.text + eos
        return text, "" if record.text.strip() else NOTHING
    if not record.messages or not (codec.train_on_prompt or _learnt_turns(record)):
        turns = _assistant_turns(record)
        all_empty = all(_is_empty(record.messages[i]) for i in turns)
        return "", (EMPTY_TURN if turns else NOTHING) if all_empty else MARKED
    if "tool_calls" not in codec.template and any(m.get("tool_calls") for m in record.messages):
        return "", NO_CALLS
    if not codec.template:
        return _plain(record.messages, eos), ""
    try:
        text = _render(codec, record.messages, record)
    except REFUSALS:
        return "", REFUSED
    for number, message in enumerate(record.messages):
        if not _assistant(message) and message["content"].strip() not in text:
            if _leaves_out(codec, record, number, text):
                return "", LEFT_OUT.format(role=message["role"])
    return text, ""


def _leaves_out(codec: Codec, record: Record, number: int, text: str) -> bool:
    """Whether the template drops this message's content: the text is the same without it. A
    template may also write the content in another form, such as JSON."""
    messages = [*record.messages]
    messages[number] = messages[number] | {"content": ""}
    try:
        return _render(codec, messages, record) == text
    except REFUSALS:
        return False


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
    starts = _turn_starts(codec, record, turns, text, encoding)
    for turn, span in zip(turns, starts, strict=True):
        if isinstance(span, int):
            span = _span(codec, record, turn, span, text, encoding)
        if isinstance(span, str):
            reasons[span] += 1
            why = span if why == NOTHING else why
        else:
            spans.append(span)
    return spans, why


def _span(
    codec: Codec, record: Record, turn: int, start: int, text: str, encoding
) -> tuple[int, int] | str:
    """(first token, stop token) of the turn that starts at character `start`, or why it has
    none."""
    message = record.messages[turn]
    stop = codec.stops.search(text, start)
    if stop is None:
        return UNSTOPPED
    body = text[start : stop.start()]
    think = EMPTY_THINK.match(body)
    if think and not EMPTY_THINK.match(message["content"]):
        start += think.end()
        body = body[think.end() :]
    if not _as_given(body, message):
        return NO_REASONING if _without_reasoning(body, message) else REWRITTEN
    first, last = encoding.char_to_token(start), encoding.char_to_token(stop.start())
    if first is None or encoding.token_to_chars(first)[0] != start:
        return STRADDLED
    if last is None or encoding.ids[last] not in codec.special_ids:
        return UNSTOPPED
    return first, last


def _turn_starts(
    codec: Codec, record: Record, turns: list[int], text: str, encoding
) -> list[int | str]:
    """The first character of each turn's own text, or why it is unknown."""
    if not codec.template:
        eos = codec.tokenizer.eos_token
        heads = [_plain(record.messages[:turn], eos) for turn in turns]
        return [len(head) + bool(head) for head in heads]
    if codec.tagged:
        try:
            tagged = codec.tokenizer.apply_chat_template(
                record.messages,
                tools=record.tools,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except REFUSALS:
            return [REFUSED] * len(turns)
        first_tokens = np.flatnonzero(np.diff(tagged["assistant_masks"], prepend=0) == 1)
        starts = [encoding.token_to_chars(int(token))[0] for token in first_tokens]
        all_turns = [i for i, message in enumerate(record.messages) if _assistant(message)]
        if len(starts) != len(all_turns):
            return [REWRITTEN] * len(turns)
        return [starts[all_turns.index(turn)] for turn in turns]
    starts = []
    for turn in turns:
        try:
            head = _render(codec, record.messages[:turn], record, add_generation_prompt=True)
        except REFUSALS:
            starts.append(REFUSED if turn else NO_PROMPT)  # few templates take no messages at all
            continue
        head = THINK_PROMPT.sub("", head)
        starts.append(len(head) if text.startswith(head) else REWRITTEN)
    return starts


def _as_given(body: str, message: dict) -> bool:
    """Whether the rendered turn is the row's text. The template decides how tool calls look."""
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
    if not reasoning and not calls:
        return body.strip() == message["content"].strip()
    names = [str(call.get("function", call).get("name")) for call in calls or []]
    return all(part.strip() in body for part in (message["content"], reasoning or "", *names))


def _without_reasoning(body: str, message: dict) -> bool:
    """Whether the rendered turn is the row's text without the reasoning before the answer."""
    answer = REASONING.sub("", message["content"])
    reasoned = answer != message["content"] or (message.get("reasoning_content") or "").strip()
    return bool(reasoned) and answer.strip() in body and "</think>" not in body


def _render(codec: Codec, messages: list[dict], record: Record, **options) -> str:
    return codec.tokenizer.apply_chat_template(
        messages, tools=record.tools, tokenize=False, **options
    )


def _plain(messages: list[dict], eos: str) -> str:
    """The text without a chat template: turns joined by newlines, each answer ended by eos."""
    turns = (m["content"] + (eos if _assistant(m) else "") for m in messages)
    return "\n".join(turn for turn in turns if turn)


def _assistant(message: dict) -> bool:
    return message["role"] == "assistant"


# What a template raises for conversations it does not support: raise_exception() and undefined
# names, None added to a string, the first of no messages.
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)
