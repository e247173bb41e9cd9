"""A tokenizer, and what its chat template writes around an answer."""

import re

from jinja2 import TemplateError
from tokenizers import Tokenizer

from llm_demo.core.errors import UserError

# At the end of a prompt: what opens a block of reasoning, and perhaps closes it. Gemma 4's is a
# channel.
THINK_PROMPT = re.compile(r"(<think>\s*(</think>\s*)?|<\|channel>thought\s*(<channel\|>\s*)?)$")
STAND_IN = "\ue000"  # stands for a part of a turn, to see where a template puts it
# What a template raises for conversations it does not support: raise_exception() and undefined
# names, None added to a string, the first of no messages; and arguments nested too deeply.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
CLOSED_BLOCK = re.compile(r"(<think>\s*</think>|<\|channel>thought\s*<channel\|>)\s*$")  # likewise


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
        if not self.closings or not assistant(last) or is_empty(last):
            return ""
        return self.closings.get("tool" if last.get("tool_calls") else "user", "")

    def try_render(self, messages: list[dict], record, **options):
        """These messages as the chat template writes them: text, or tokens. None if it refuses.
        record: a turns.Record."""
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


def is_empty(message: dict) -> bool:
    return not (message["content"].strip() or message.get("tool_calls"))


def assistant(message: dict) -> bool:
    return message["role"] == "assistant"
