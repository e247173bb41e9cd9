"""Turns records into samples: one conversation as token ids, with the labels marked.

The whole conversation is rendered once and tokenised once, so the ids equal those of the
tokenizer's own apply_chat_template, but where the prompt of a turn ends inside a token (see
turns.py). The labels are the tokens after the default generation prompt of an assistant turn, up to
and including the turn's stop token, without the whitespace after it: what a model has to write when
it is asked. So an empty block of reasoning is learnt, unless the prompt holds it. If the template
marks what to learn itself ({% generation %}), the labels are what it marks. If only the token of
the next turn's role ends answers (GLM-4), that is the stop token, and it is added to the last
answer. A turn that is not as the example has it (see turns.py) is not learnt, and the reason is
logged. An example without a learnt turn is skipped."""

import copy
import json
import re
from collections import Counter

import numpy as np

from llm_demo.data.codec import REFUSALS, THINK_PROMPT, Codec, assistant, has_variable, is_empty
from llm_demo.data.reasons import (
    EMPTY_TURN,
    LEFT_OUT,
    MARKED,
    NO_CALLS,
    NO_TEXT,
    NO_VARIABLE,
    NOT_OURS,
    NOTHING,
    REFUSED,
    RENDERED,
    SPECIALS_INSIDE,
)
from llm_demo.data.turns import (
    NotLearnt,
    Record,
    Rendered,
    Sample,
    behind_calls,
    changed,
    plain_text,
    spans_of,
)


def encode(codec: Codec, records: list[Record]) -> list[tuple[Sample | str, Counter]]:
    """For each record: its sample, or why it is skipped; and {why a turn is not learnt, or one of
    turns.REMARKS: its turns}.

    One call tokenises all records on all cores, with the tokenizers library's own threads.
    Rendering takes about 10 us, so worker processes (or datasets.map) would cost more than they
    save."""
    rendered, results = [], []
    for record in records:
        try:
            rendered.append(_render(codec, record))
        except NotLearnt as reason:
            rendered.append((str(reason), ""))
    texts = [text for _, text in rendered]
    encodings = codec.backend.encode_batch(texts, add_special_tokens=False)
    for (result, text), encoding in zip(rendered, encodings, strict=True):
        reasons = Counter()
        if isinstance(result, Record):
            try:
                result = _sample(Rendered(codec, result, text, encoding), reasons)
            except NotLearnt as reason:
                result = str(reason)
        results.append((result, reasons))
    return results


def _answers(record: Record) -> dict[int, str | None]:
    """{number of a message of the assistant, but for context: why it is not learnt, if so}."""
    found = {}
    for i, message in enumerate(record.messages):
        if assistant(message) and i not in record.context:
            empty = EMPTY_TURN if is_empty(message) else None
            found[i] = empty if record.marks.get(i, True) else MARKED
    return found


def _render(codec: Codec, record: Record) -> tuple[Record, str]:
    """(the record as the template wants it, text of the whole document). Raises NotLearnt."""
    if record.tokens:
        return record, ""
    eos = codec.tokenizer.eos_token or ""
    if record.messages is None:
        if not record.text.strip():
            raise NotLearnt(NOTHING)
        is_ended = record.text.rstrip().endswith(eos)
        return record, record.text if is_ended else record.text + eos
    if not record.messages or not (codec.train_on_prompt or _answers(record)):
        raise NotLearnt(NOTHING)
    has_calls = any(message.get("tool_calls") for message in record.messages)
    if has_calls and "tool_calls" not in codec.template:
        raise NotLearnt(NO_CALLS)
    if not codec.template:
        return record, plain_text(record.messages, eos)
    prompt_is_rendered = _rendered_prompt(codec, record)
    if prompt_is_rendered:
        return prompt_is_rendered
    form, text = _by_template(codec, record)
    try:
        text.encode()  # the tokenizer's own error names no example
    except UnicodeEncodeError:
        raise NotLearnt(NO_TEXT) from None
    _refuse_dropped(codec, form, text)
    return form, text + codec.closing(form.messages)


def _by_template(codec: Codec, record: Record) -> tuple[Record, str]:
    """(the record in the form that the chat template keeps, its text). Most templates take a call's
    arguments as an object, some (DeepSeek-V3) only as JSON text. Raises NotLearnt."""
    calls = [call for message in record.messages for call in message.get("tool_calls", [])]
    forms = [record]
    if calls:
        forms.append(arguments_as_text(record))
    rendered, reasons = [], []
    for form in forms:
        try:
            text = codec.tokenizer.apply_chat_template(
                form.messages, tools=form.tools, tokenize=False, **form.chat_template_kwargs
            )
        except REFUSALS as error:
            words = " ".join(str(error).split())[:100]
            reasons.append(f"{REFUSED}: {words}" if words else REFUSED)
            continue
        if behind_calls(text, calls) is not None:
            return form, text
        rendered.append((form, text))
    if not rendered:
        raise NotLearnt(reasons[0])
    return rendered[0]


def _rendered_prompt(codec: Codec, record: Record) -> tuple[Record, str] | None:
    """(the record, its text) if its prompt is text as the chat template writes it, up to where it
    asks for the answer: both are used as they are, and the answer gets its end. None if no message
    but the assistant's holds a special token that the template writes. Raises NotLearnt if one
    does otherwise."""
    messages = record.messages
    given = [codec.own.search(m["content"]) for m in messages if not assistant(m)]
    if not any(given):
        return None
    roles = [message["role"] for message in messages]
    prompt = messages[0]["content"]
    complete = THINK_PROMPT.sub("", prompt).endswith(codec.asks) and codec.asks
    if not complete or roles != ["user", "assistant"] or record.tools:
        token = next(match[0] for match in given if match)
        raise NotLearnt(RENDERED.format(token=token))
    answer = messages[1]["content"]
    end = re.search(rf"(?:{codec.ends.pattern})\s*$", answer)
    if end:
        answer = answer[: end.start()]
    messages = changed(messages, 1, content=answer)
    text = prompt + answer + codec.behind + codec.closing(messages)
    return record._replace(messages=messages, is_rendered=True), text


def arguments_as_text(record: Record) -> Record:
    """The record with the arguments of its calls as JSON text."""
    messages = copy.deepcopy(record.messages)
    for call in [call for m in messages for call in m.get("tool_calls", [])]:
        function = call["function"]
        function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return record._replace(messages=messages)


def _refuse_dropped(codec: Codec, record: Record, text: str) -> None:
    """Raise NotLearnt if the template drops the content of a turn that is not the assistant's: the
    text is the same without it. A template may also write it in another form, such as JSON."""
    given = "\0".join(message["content"] for message in record.messages)
    for number, message in enumerate(record.messages):
        content = message["content"].strip()  # it may be part of another turn's
        if assistant(message) or text.count(content) >= given.count(content):
            continue
        if codec.try_render(changed(record.messages, number, content=""), record) == text:
            raise NotLearnt(LEFT_OUT.format(role=message["role"]))


def _sample(chat: Rendered, reasons: Counter) -> Sample:
    codec, record = chat.codec, chat.record
    spans = None
    if record.messages is not None:
        texts = [message["content"] for message in record.messages]
        if record.is_rendered:
            del texts[0]
        if any(map(codec.specials.search, texts)):
            reasons[SPECIALS_INSIDE] += 1
        if not all(has_variable(codec.template, key) for key in record.chat_template_kwargs):
            reasons[NO_VARIABLE] += 1
        if not codec.train_on_prompt:
            chat, spans = _learnt_spans(chat, reasons)
    if record.tokens:
        ids, is_label = record.tokens
    else:
        ids = np.array(chat.encoding.ids)
        is_label = np.full(len(ids), spans is None)
        for first, last in spans or ():
            is_label[first : last + 1] = True
    ids, is_label = ids.astype(np.int32), is_label.astype(bool)
    if codec.train_on_prompt:
        is_label[:] = True
    by_template = codec.template and record.messages
    if codec.bos and not record.tokens and not by_template and list(ids[:1]) != codec.bos:
        ids, is_label = np.append(np.int32(codec.bos), ids), np.append(False, is_label)
    is_label[:1] = False
    if not is_label.any():
        raise NotLearnt(NOTHING)
    return Sample(ids, is_label)


def _learnt_spans(chat: Rendered, reasons: Counter) -> tuple[Rendered, list[tuple[int, int]]]:
    """(the conversation as `spans_of` leaves it, (first token, stop token) of each learnt turn).
    Counts in `reasons` the record's turns that are not learnt, and remarks on those that are;
    raises NotLearnt, with the reason of the first one that is not, if none is."""
    codec, record = chat.codec, chat.record
    answers = _answers(record)
    reasons.update(filter(None, answers.values()))
    reasons[NOT_OURS] += sum(learn and i not in answers for i, learn in record.marks.items())
    if codec.last_only:
        answers = dict(list(answers.items())[-1:])
    turns = [i for i, why_not in answers.items() if not why_not]
    failed = []
    marks = None
    if codec.tagged and turns and not record.is_rendered:
        encoded = codec.try_render(
            record.messages,
            record,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        found = (encoded or {}).get("assistant_masks", [])
        marks = np.zeros(len(chat.encoding.ids), bool)  # also of what `closing` adds
        marks[: len(found)] = found
    spans = []
    for turn in turns:
        remarks = set()
        try:
            chat, of_turn = spans_of(chat, turn, marks, remarks)
            spans += of_turn
            reasons.update(remarks)
        except NotLearnt as reason:
            reasons[str(reason)] += 1
            failed.append(str(reason))
    if not spans:
        failed += [why_not for why_not in answers.values() if why_not]
        raise NotLearnt(failed[0] if failed else NOTHING)
    return chat, spans
