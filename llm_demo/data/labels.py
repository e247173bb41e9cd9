"""Turns records into samples: one conversation as token ids, with the labels marked.

The whole conversation is rendered once and tokenised once, so the ids equal those of the
tokenizer's own apply_chat_template, but where the prompt of a turn ends inside a token (see
turns.py). The labels are the tokens after the default generation prompt of an assistant turn, up to
and including the turn's stop token, without the whitespace after it: what a model has to write when
it is asked. So an empty block of reasoning is learnt, unless the prompt holds it. If the
template marks what to learn itself ({% generation %}), the labels are what it marks. If only the
token of the next turn's role ends answers (GLM-4), that is the stop token, and it is added to the
last answer. A turn that is not as the row has it (see turns.py) is not learnt, and the reason is
logged. A row without a learnt turn is skipped."""

import copy
import json
import re
from collections import Counter

import numpy as np
from tokenizers import Tokenizer

from llm_demo.core.errors import UserError
from llm_demo.data.turns import (
    EMPTY_TURN,
    NO_VARIABLE,
    REFUSALS,
    REFUSED,
    SPECIALS_INSIDE,
    STAND_IN,
    THINK_PROMPT,
    NotLearnt,
    Record,
    Rendered,
    Sample,
    assistant,
    behind_calls,
    changed,
    plain_text,
    spans_of,
)

NOTHING = "nothing to learn"
NO_CALLS = "the chat template does not support tool calls (function_call turns)"
LEFT_OUT = "the chat template drops the {role} turn"
MARKED = "marked with weight 0, train false or the like"
NO_TEXT = "it contains half a surrogate pair: invalid text"
NOT_OURS = "marked to be learnt, but only the assistant's answers can be"
RENDERED = (
    "a prompt contains tokens that the chat template writes itself, such as {token}: give the bare "
    "text, or a prompt that ends as the template's generation prompt does"
)
CLOSED_BLOCK = re.compile(r"<think>\s*</think>\s*$")  # at the end of a prompt: do not reason


class Codec:
    """A tokenizer and what is derived from it once. last_only: only the last turn is learnt. Raises
    UserError if the tokenizer lacks offsets (not "fast") or an end token."""

    def __init__(self, tokenizer, train_on_prompt=False, last_only=False, learn_reasoning=True):
        name = tokenizer.name_or_path or "this tokenizer"
        if not tokenizer.is_fast:
            raise UserError(
                f"{name} is not a fast tokenizer (tokenizer.json), which exact labels require"
            )
        if not tokenizer.chat_template and tokenizer.eos_token_id is None:
            raise UserError(
                f"{name} has neither a chat template nor an eos token to end a document with"
            )
        self.tokenizer, self.train_on_prompt = tokenizer, train_on_prompt
        self.last_only, self.learn_reasoning = last_only, learn_reasoning
        # The same ids, with exact offsets. Saved truncation would silently cut rows, padding would
        # lengthen them, and a byte-level post-processor (Llama 3) trims whitespace from offsets.
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.post_processor = None
        special = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special_ids, self.specials = frozenset(special), _any_of(special.values())
        self.closings = closings(tokenizer)
        self.ends = _any_of(special[i] for i in stop_tokens(tokenizer) if i in special)  # of a turn
        self.template = template_of(tokenizer)
        # the template marks the assistant's tokens itself
        template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
        self.tagged = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        bos = [tokenizer.bos_token_id]  # ids put before plain text: one or none
        self.bos = bos if tokenizer("a")["input_ids"][:1] == bos else []
        # what the template writes: to ask for an answer, behind it, and its special tokens
        told = asked = self.behind = ""
        if self.template:
            question = [{"role": "user", "content": STAND_IN}]
            told = _try_render(tokenizer, question) or ""
            asked = _try_render(tokenizer, question, add_generation_prompt=True) or ""
            self.behind = _behind_answer(tokenizer)
        words = asked.removeprefix(told) or asked.rpartition(STAND_IN)[2]
        self.asks = THINK_PROMPT.sub("", words)
        self.own = _any_of(set(self.specials.findall(told + asked + self.behind)))

    def closing(self, messages: list[dict]) -> str:
        """What ends a conversation whose template does not end its last answer."""
        last = messages[-1]
        if not self.closings or not assistant(last) or _is_empty(last):
            return ""
        return self.closings.get("tool" if last.get("tool_calls") else "user", "")

    def try_render(self, messages: list[dict], record: Record, **options):
        """These messages as the chat template writes them: text, or tokens. None if it refuses."""
        variables = record.chat_template_kwargs
        return _try_render(self.tokenizer, messages, tools=record.tools, **variables, **options)


def template_of(tokenizer) -> str:
    """The text of the chat template, or of both if there is a second one, for tools."""
    templates = tokenizer.chat_template
    return "\n".join(templates.values()) if isinstance(templates, dict) else templates or ""


def has_variable(template: str, name: str) -> bool:
    """Whether a chat template may read a variable of this name."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def thinking_variables(template: str) -> list[dict]:
    """{name: value} of each setting by which a chat template might write, or ask for, reasoning in
    another way: its names with "think" or "reason" in them, true and false."""
    names = sorted(set(re.findall(r"\b\w*(?:think|reason)\w*\b", template)))
    return [{name: value} for name in names if name.isidentifier() for value in (True, False)]


def closes_reasoning(tokenizer, variables: dict) -> dict | None:
    """What to add to variables of the chat template, so that the prompt of a question holds a
    closed, empty block of reasoning; {} if it does so without, None if nothing does it."""
    question = [{"role": "user", "content": "?"}]
    for more in ({}, *thinking_variables(template_of(tokenizer))):
        if more.keys() & variables.keys():
            continue
        given = variables | more
        prompt = _try_render(tokenizer, question, add_generation_prompt=True, **given)
        if prompt and CLOSED_BLOCK.search(prompt):
            return more
    return None


def writes_empty_blocks(tokenizer) -> bool:
    """Whether the chat template puts an empty block of reasoning before an answer without any."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
    text = _try_render(tokenizer, turns) or ""
    return CLOSED_BLOCK.search(text.partition("ANSWER")[0]) is not None


def _any_of(texts) -> re.Pattern:
    texts = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile("|".join(texts) or "(?!)")


def stop_tokens(tokenizer) -> list[int]:
    """Tokens that end an answer: the tokenizer's eos, and the special tokens that its chat template
    puts after an answer and after a call, whatever whitespace is between; or those of `closings`.
    """
    stop = {tokenizer.eos_token_id}
    if tokenizer.chat_template:
        texts = [_behind_answer(tokenizer), *closings(tokenizer).values()]
        stop |= {_special(tokenizer, text, 0) for text in texts}
        call = {"type": "function", "function": {"name": "ANSWER", "arguments": {}}}
        behind_call = _behind_answer(tokenizer, content="", tool_calls=[call])
        stop.add(_special(tokenizer, behind_call, -1))
    return sorted(stop - {None})


def closings(tokenizer) -> dict[str, str]:
    """{role: what is missing behind a last answer, up to the special token that stands there before
    a message of that role}, if the template does not end the last answer and asks for the next one
    with another token."""
    if not tokenizer.chat_template:
        return {}
    own = _behind_answer(tokenizer)
    if own.strip():
        return {}
    question = [{"role": "user", "content": "?"}]
    asks = _try_render(tokenizer, question, add_generation_prompt=True) or ""
    asks = _special(tokenizer, asks.removeprefix(_try_render(tokenizer, question) or ""), 0)
    found = {}
    for role in ("user", "tool", "system"):
        text = _behind_answer(tokenizer, role)
        token = _special(tokenizer, text, 0)
        if token not in (None, asks):
            token = tokenizer.convert_ids_to_tokens(token)
            found[role] = text.removeprefix(own).partition(token)[0] + token
    return found


def _behind_answer(tokenizer, role: str = "", **answer) -> str:
    """What the chat template writes behind an answer, before a message of this role. "" if it
    refuses that. answer: of the message, with the word ANSWER."""
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "ANSWER", **answer},
    ]
    if role:
        turns.append({"role": role, "content": "?"})
    text = _try_render(tokenizer, turns) or ""
    return text.rpartition("ANSWER")[2] if "ANSWER" in text else ""


def _try_render(tokenizer, messages: list[dict], tokenize=False, **options):
    """See Codec.try_render."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, **options)
    except REFUSALS:
        return None


def _special(tokenizer, text: str, at: int) -> int | None:
    """The token at this place of a text, without whitespace around it, if it is special."""
    known = tokenizer.added_tokens_decoder
    ids = tokenizer(text.strip(), add_special_tokens=False).input_ids
    return ids[at] if ids and ids[at] in known and known[ids[at]].special else None


def encode(codec: Codec, records: list[Record]) -> list[tuple[Sample | str, Counter]]:
    """For each record: its sample, or why its row is skipped; and {why a turn is not learnt, or one
    of turns.REMARKS: its turns}.

    One call tokenises all rows on all cores, with the tokenizers library's own threads. Rendering
    takes about 10 us, so worker processes (or datasets.map) would cost more than they save."""
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
            empty = EMPTY_TURN if _is_empty(message) else None
            found[i] = empty if record.marks.get(i, True) else MARKED
    return found


def _is_empty(message: dict) -> bool:
    return not (message["content"].strip() or message.get("tool_calls"))


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
        text.encode()  # the tokenizer's own error names no row
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
    Counts in `reasons` the row's turns that are not learnt, and remarks on those that are; raises
    NotLearnt, with the reason of the first one that is not, if none is."""
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
