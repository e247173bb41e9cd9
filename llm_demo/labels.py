"""Records -> samples: one conversation as token ids, and which of them are learnt.

The whole conversation is rendered once and tokenised once, so the ids are those of the tokenizer's
own apply_chat_template. Learnt is what follows the generation prompt of an assistant turn, up to
and with the turn's stop token; never the whitespace after it. A turn counts as found only where it
decodes to the text of the row (leading and trailing whitespace aside, which many templates trim)
plus the stop token. Anything else skips the row, with a reason: a guessed mask trains silently on
the wrong tokens.
"""

import re
from typing import NamedTuple

import numpy as np
from jinja2 import TemplateError
from tokenizers import Tokenizer

from llm_demo.errors import UserError
from llm_demo.records import Record

NOTHING = "nothing to learn"
REFUSED = "the chat template refuses the conversation"
REWRITTEN = "the chat template does not keep the assistant text as given"
UNSTOPPED = "no stop token after an assistant turn"
STRADDLED = "a token straddles the start of an assistant turn"

# Reasoning templates put an empty block before an answer that has none (Qwen3), and open one in the
# generation prompt (Qwen3-Thinking, DeepSeek-R1). Neither is the row's text.
EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\n*")
THINK_PROMPT = re.compile(r"<think>\s*(</think>\s*)?$")


class Sample(NamedTuple):
    ids: np.ndarray  # int32 [n]
    learnt: np.ndarray  # bool [n]; the first is never learnt, nothing predicts it


class Codec(NamedTuple):
    """What is asked of a tokenizer, prepared once."""

    tokenizer: object
    backend: Tokenizer  # the same ids, with exact offsets
    template: bool
    tagged: bool  # the template marks the assistant's tokens itself: {% generation %}
    stops: re.Pattern  # any special token
    special_ids: frozenset[int]
    bos: list[int]  # what this tokenizer puts before plain text: one id or none
    train_on_prompt: bool


def make_codec(tokenizer, train_on_prompt: bool = False) -> Codec:
    """UserError for a tokenizer without offsets (not "fast"), or with nothing to end a document."""
    name = getattr(tokenizer, "name_or_path", "") or "this tokenizer"
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{name}: a fast tokenizer (tokenizer.json) is needed for exact label masks"
        )
    if not tokenizer.chat_template and tokenizer.eos_token_id is None:
        raise UserError(
            f"{name}: neither a chat template nor an eos token, so nothing ends a document"
        )
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    # Saved truncation would cut rows unseen, padding would lengthen them, and a byte-level
    # post-processor (Llama 3) trims whitespace out of the offsets.
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None
    special = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    texts = sorted(map(re.escape, special.values()), key=len, reverse=True)
    bos = [tokenizer.bos_token_id]
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    return Codec(
        tokenizer,
        backend,
        template=bool(template),
        tagged=re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None,
        stops=re.compile("|".join(texts) or "(?!)"),
        special_ids=frozenset(special),
        bos=bos if tokenizer("a")["input_ids"][:1] == bos else [],
        train_on_prompt=train_on_prompt,
    )


def encode(codec: Codec, records: list[Record]) -> list[Sample | str]:
    """Samples in the order of `records`; for a row that is skipped, the reason instead.

    One call tokenises all rows, on all cores: the tokenizers library has its own threads. Rendering
    takes some 10 us, so worker processes (or datasets.map) would cost more than they save.
    """
    texts = [_render_record(codec, record) for record in records]
    encodings = codec.backend.encode_batch(
        [text or "" for text, _ in texts], add_special_tokens=False
    )
    return [
        reason or _sample(codec, record, text, encoding)
        for record, (text, reason), encoding in zip(records, texts, encodings, strict=True)
    ]


def _render_record(codec: Codec, record: Record) -> tuple[str, str]:
    """The text of the whole document, or why there is none."""
    eos = codec.tokenizer.eos_token or ""
    if record.tokens:
        return "", ""
    if record.messages is None:
        text = record.text if record.text.endswith(eos) else record.text + eos
        return text, "" if record.text.strip() else NOTHING
    turns = record.messages[record.learn_from :]
    answers = any(m["content"].strip() or m.get("tool_calls") for m in turns if _assistant(m))
    if not record.messages or not (answers or codec.train_on_prompt):
        return "", NOTHING
    if not codec.template:
        return _plain(record.messages, eos), ""
    try:
        return _render(codec, record, len(record.messages)), ""
    except _REFUSALS:
        return "", REFUSED


def _sample(codec: Codec, record: Record, text: str, encoding) -> Sample | str:
    if record.tokens:
        ids, learnt = np.array(record.tokens[0], np.int32), np.array(record.tokens[1], bool)
        learnt[:1] = False
        if codec.train_on_prompt:
            learnt[1:] = True
        return Sample(ids, learnt) if learnt.any() else NOTHING
    ids = np.array(encoding.ids, np.int32)
    learnt = np.zeros(len(ids), bool)
    if record.messages is None or codec.train_on_prompt:
        learnt[:] = True
    else:
        spans = _learnt_spans(codec, record, text, encoding)
        if isinstance(spans, str):
            return spans
        for start, stop in spans:
            first, last = encoding.char_to_token(start), encoding.char_to_token(stop)
            if first is None or encoding.token_to_chars(first)[0] != start:
                return STRADDLED
            if last is None or encoding.ids[last] not in codec.special_ids:
                return UNSTOPPED
            learnt[first : last + 1] = True
    if codec.bos and not (codec.template and record.messages) and list(ids[:1]) != codec.bos:
        ids, learnt = np.append(np.int32(codec.bos), ids), np.append(False, learnt)
    learnt[:1] = False
    return Sample(ids, learnt) if learnt.any() else NOTHING


def _learnt_spans(codec: Codec, record: Record, text: str, encoding) -> list[tuple[int, int]] | str:
    """(first character, first character of the stop token) of every learnt turn in `text`."""
    turns = [i for i, m in enumerate(record.messages) if _assistant(m) and i >= record.learn_from]
    try:
        starts = _turn_starts(codec, record, turns, text, encoding)
    except _REFUSALS:
        return REFUSED
    if starts is None:
        return REWRITTEN
    spans = []
    for turn, start in zip(turns, starts, strict=True):
        stop = codec.stops.search(text, start)
        if stop is None:
            return UNSTOPPED
        body = text[start : stop.start()]
        think = EMPTY_THINK.match(body)
        if think and not EMPTY_THINK.match(record.messages[turn]["content"]):
            start += think.end()
            body = body[think.end() :]
        if not _as_given(body, record.messages[turn]):
            return REWRITTEN
        spans.append((start, stop.start()))
    return spans


def _turn_starts(
    codec: Codec, record: Record, turns: list[int], text: str, encoding
) -> list[int] | None:
    """The first character of each turn's own text, or None where the template hides it."""
    if not codec.template:
        eos = codec.tokenizer.eos_token
        heads = [_plain(record.messages[:turn], eos) for turn in turns]
        return [len(head) + bool(head) for head in heads]
    if codec.tagged:
        marked = codec.tokenizer.apply_chat_template(
            record.messages, tools=record.tools, return_dict=True, return_assistant_tokens_mask=True
        )
        flags = np.diff(marked["assistant_masks"], prepend=0)
        runs = [encoding.token_to_chars(int(token))[0] for token in np.flatnonzero(flags == 1)]
        every = [i for i, message in enumerate(record.messages) if _assistant(message)]
        return [runs[every.index(turn)] for turn in turns] if len(runs) == len(every) else None
    starts = []
    for turn in turns:
        head = THINK_PROMPT.sub("", _render(codec, record, turn, add_generation_prompt=True))
        if not text.startswith(head):
            return None
        starts.append(len(head))
    return starts


def _as_given(body: str, message: dict) -> bool:
    """Whether the rendered turn is the row's text; how tool calls look is the template's to say."""
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
    if not reasoning and not calls:
        return body.strip() == message["content"].strip()
    names = [str(call.get("function", call).get("name")) for call in calls or []]
    wanted = [message["content"], reasoning or "", *names]
    return all(piece.strip() in body for piece in wanted)


def _render(codec: Codec, record: Record, end: int, **options) -> str:
    return codec.tokenizer.apply_chat_template(
        record.messages[:end], tools=record.tools, tokenize=False, **options
    )


def _plain(messages: list[dict], eos: str) -> str:
    """Without a chat template: the turns joined by newlines, each answer closed by eos."""
    turns = (m["content"] + (eos if _assistant(m) else "") for m in messages)
    return "\n".join(turn for turn in turns if turn)


def _assistant(message: dict) -> bool:
    return message["role"] == "assistant"


# What a template written for other conversations raises: raise_exception() and undefined names,
# None added to a string, the first of no messages.
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)
