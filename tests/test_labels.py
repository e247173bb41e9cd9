"""Label masks: golden arrays for every kind of template; a mask is never a guess."""

import inspect
import itertools
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from tiny_tokenizer import CHATML, golden, make_tokenizer
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llm_demo.core.errors import UserError
from llm_demo.data import labels, reasons
from llm_demo.data.codec import Codec
from llm_demo.data.labels import encode
from llm_demo.data.records import detect_format, to_record
from llm_demo.data.turns import Record
from llm_demo.flags.args import DataArgs
from llm_demo.flags.parsing import NOT_VARIABLES, template_variables
from llm_demo.model.source import set_variables

SHARED = Path(__file__).parents[2] / "shared"

# Like Qwen3: only reasoning after the last question is kept, the last answer gets a block.
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<S>' + m.role + '\n' }}"
    "{% if m.role != 'assistant' %}{{ m.content }}"
    "{% else %}{% set think = m.reasoning_content or '' %}{% set content = m.content %}"
    "{% if '</think>' in content %}"
    "{% set think = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or think) %}"
    "{{ '<think>\n' + think + '\n</think>\n\n' }}{% endif %}{{ content }}"
    "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + ']' }}{% endfor %}{% endif %}"
    "{{ '<E>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<S>assistant\n' }}{% endif %}"
)
THINK_OR_NOT = (
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
ASKS = "{{ '<S>assistant\n' }}{% endif %}"
QWEN3_PROMPT = QWEN3.replace(ASKS, "{{ '<S>assistant\n' }}" + THINK_OR_NOT + "{% endif %}")
# Like Qwen3.5 and Qwen3-Thinking: the prompt opens the block that the answer goes on with.
QWEN35 = QWEN3.replace(
    ASKS,
    "{{ '<S>assistant\n' }}"
    + THINK_OR_NOT.replace("{% endif %}", "{% else %}{{ '<think>\n' }}{% endif %}")
    + "{% endif %}",
)
# Keeps the reasoning of earlier turns if it is asked to (Qwen3.6).
PRESERVES = QWEN35.replace("loop.index0 > ns.last", "(loop.index0 > ns.last or preserve_thinking)")
BLOCK = "<think>\n\n</think>\n\n"
# Like DeepSeek-R1: the generation prompt opens the reasoning, earlier turns lose theirs.
OPENS_THINK = CHATML.replace("<S>assistant\n", "<S>assistant\n<think>\n")
# Like Llama 3: the text of bos is part of the template, contents are trimmed.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<S>' + m.role + '\n\n' + m.content | trim + '<E>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<S>assistant\n\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<S>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<E>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<E>\n' }}{% endif %}{% endfor %}"
)
# The block holds what the model is given to answer as well, and a line break behind the answer.
TAGGED_WHOLE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ '<S>assistant\n' + m.content + '<E>\n' }}{% endgeneration %}"
    "{% else %}{{ '<S>' + m.role + '\n' + m.content + '<E>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<S>assistant\n' }}{% endif %}"
)
# Calls as Qwen writes them; as XML, one value after another; behind a special token (Mistral).
CALLS = CHATML.replace(
    "m.content + '<E>\n'",
    "m.content }}{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + '] ' + "
    "ARGUMENTS }}{% endfor %}{{ '<E>\n'",
)
AS_JSON = CALLS.replace("ARGUMENTS", "c.function.arguments | tojson")
AS_TEXT = CALLS.replace("ARGUMENTS", "c.function.arguments")  # DeepSeek-V3
AS_PYTHON = CALLS.replace("ARGUMENTS", "c.function.arguments | string")
CUT = CALLS.replace("ARGUMENTS", "(c.function.arguments | tojson)[:15]")
AS_XML = CALLS.replace(
    "ARGUMENTS }}",
    "'' }}{% for k, v in c.function.arguments.items() %}{{ '<' + k + '>' + (v | string) }}"
    "{% endfor %}{{ '' }}",
)
SPECIAL_CALLS = AS_JSON.replace("'[' +", "'<B>[' +")
# Like Mistral: tools stand before the last question only, no words ask for the answer.
MISTRAL = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}{{ 'TOOLS' }}{% endif %}"
    "{{ '<S>' + m.content + '</S>' }}"
    "{% elif m.tool_calls %}{{ '<B>' + m.tool_calls[0].function.name + '<E>' }}"
    "{% elif m.role == 'tool' %}{{ 'RESULT' + m.content + '</R>' }}"
    "{% else %}{{ ' ' + m.content + '<E>' }}{% endif %}{% endfor %}"
)
# Like GLM-4: each role has its token, and nothing else ends an answer.
ROLES = (
    "{% for m in messages %}"
    "{{ {'user': '<S>', 'assistant': '<B>', 'tool': '<P>'}[m.role] + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + ']' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<B>\n' }}{% endif %}"
)
# Marks of what to learn, and a token for calls alone.
ROLES_TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<B>\n' }}{% generation %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + ']<P>' }}"
    "{% endfor %}{% endgeneration %}{% else %}{{ '' if m.role == 'tool' else '<S>' }}"
    "{{ '\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<B>\n' }}{% endif %}"
)
PAIR = "<S>user\nhi<E>\n<S>assistant\n"
OSLO = {"city": "Oslo", "days": 2, "at": ['\u00e9\n"', None, True]}


def chat(*contents, **extra):
    """Alternating user and assistant turns; a content starting with "system:" comes first."""
    messages = []
    if contents[0].startswith("system:"):
        messages = [{"role": "system", "content": contents[0][7:]}]
        contents = contents[1:]
    roles = ["user", "assistant"] * len(contents)
    messages += [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    messages[-1] |= extra
    return Record(messages)


def call(name="f", arguments=None, content="", **extra):
    """A question and an answer that calls a tool."""
    function = {"name": name, "arguments": arguments or {}}
    return chat("hi", content, tool_calls=[{"type": "function", "function": function}], **extra)


def call_and_answer():
    answer = {"role": "assistant", "content": "so"}
    return Record([*call().messages, {"role": "tool", "content": "7"}, answer])


def one(record, tokenizer, **options):
    """(ids, shifted labels) of one record, or the reason why it is skipped."""
    ((sample, _),) = encode(Codec(tokenizer, **options), [record])
    if isinstance(sample, str):
        return sample
    ids, is_label = sample
    assert ids.dtype == np.int32 and is_label.dtype == bool and not is_label[0]
    shifted = np.where(is_label[1:], ids[1:], -100).tolist() + [-100]
    return ids.tolist(), shifted


TALK = chat("hi", "yo", "b", "c")
BOTH = PAIR + "⟦yo<E>⟧\n<S>user\nb<E>\n<S>assistant\n⟦c<E>⟧\n"
MASKS = {
    # template, conversation, what it becomes
    "system prompt": (CHATML, chat("system:s", "hi", "yo"),
        "<S>system\ns<E>\n" + PAIR + "⟦yo<E>⟧\n"),
    "three turns": (
        CHATML,
        chat("hi", "yo", "b", "bb", "c", "cc"),
        PAIR
        + "⟦yo<E>⟧\n<S>user\nb<E>\n<S>assistant\n⟦bb<E>⟧\n<S>user\nc<E>\n<S>assistant\n⟦cc<E>⟧\n",
    ),
    "ends with a question": (CHATML, chat("hi", "yo", "b"), PAIR + "⟦yo<E>⟧\n<S>user\nb<E>\n"),
    "answer quoted in the question": (CHATML, chat("assistant\nyo", "yo"),
        "<S>user\nassistant\nyo<E>\n<S>assistant\n⟦yo<E>⟧\n"),
    "characters of several tokens at both ends": (CHATML, chat("hi", "\U0001f680é\U0001f680"),
        PAIR + "⟦\U0001f680é\U0001f680<E>⟧\n"),
    "one blank answer": (CHATML, chat("hi", "", "b", "c"),
        PAIR + "<E>\n<S>user\nb<E>\n<S>assistant\n⟦c<E>⟧\n"),
    "reasoning lost in an earlier turn": (QWEN3, chat("hi", "<think>\nr\n</think>\n\nyo", "b", "c"),
        PAIR + "yo<E>\n<S>user\nb<E>\n<S>assistant\n⟦<think>\n\n</think>\n\nc<E>⟧\n"),
    "spaces kept by the template": (CHATML, chat("hi", " yo "), PAIR + "⟦ yo <E>⟧\n"),
    "empty think before the last answer": (QWEN3, TALK,
        PAIR + "⟦yo<E>⟧\n<S>user\nb<E>\n<S>assistant\n⟦<think>\n\n</think>\n\nc<E>⟧\n"),
    "reasoning in the answer": (QWEN3, chat("hi", "<think>\nr\n</think>\n\nyo"),
        PAIR + "⟦<think>\nr\n</think>\n\nyo<E>⟧\n"),
    "an empty think that the template drops": (QWEN3,
        chat("hi", "<think>\n\n</think>\n\nyo", "b", "c"),
        PAIR + "⟦yo<E>⟧\n<S>user\nb<E>\n<S>assistant\n⟦<think>\n\n</think>\n\nc<E>⟧\n"),
    "an empty think that the row has itself": (QWEN3, chat("hi", "<think>\n\n</think>\n\nyo"),
        PAIR + "⟦<think>\n\n</think>\n\nyo<E>⟧\n"),
    "reasoning_content": (QWEN3, chat("hi", "yo", reasoning_content="r"),
        PAIR + "⟦<think>\nr\n</think>\n\nyo<E>⟧\n"),
    "tool call": (QWEN3, chat("hi", "", tool_calls=[{"function": {"name": "f"}}]),
        PAIR + "⟦<think>\n\n</think>\n\n[f]<E>⟧\n"),
    "generation prompt opens think": (OPENS_THINK, TALK, BOTH),
    "special tokens inside the answer": (CHATML, chat("hi", "<S>4<P> it is", "b", "<P>"),
        PAIR + "⟦<S>4<P> it is<E>⟧\n<S>user\nb<E>\n<S>assistant\n⟦<P><E>⟧\n"),
    "a call behind a special token": (SPECIAL_CALLS, call(arguments={"x": 1}),
        PAIR + '⟦<B>[f] {"x": 1}<E>⟧\n'),
    "text and a call": (AS_JSON, call(arguments={"x": 1}, content="so: "),
        PAIR + '⟦so: [f] {"x": 1}<E>⟧\n'),
    "arguments as an object": (AS_JSON, call(arguments=OSLO),
        PAIR + "⟦[f] " + json.dumps(OSLO, ensure_ascii=False) + "<E>⟧\n"),
    "arguments as text, which the template wants": (AS_TEXT, call(arguments=OSLO),
        PAIR + "⟦[f] " + json.dumps(OSLO, ensure_ascii=False) + "<E>⟧\n"),
    "arguments as text, not as Python writes them": (AS_PYTHON, call(arguments={"city": "Oslo"}),
        PAIR + '⟦[f] {"city": "Oslo"}<E>⟧\n'),
    "arguments one by one": (AS_XML, call(arguments={"city": "Oslo", "days": 2, "far": False}),
        PAIR + "⟦[f] <city>Oslo<days>2<far>False<E>⟧\n"),
    "two assistant turns in a row": (QWEN3,
        Record([*chat("hi", "yo").messages, {"role": "assistant", "content": "so"}]),
        PAIR + "⟦yo<E>⟧\n<S>assistant\n⟦<think>\n\n</think>\n\nso<E>⟧\n"),
    "tools before the last question": (MISTRAL, TALK._replace(tools=[{"name": "f"}]),
        "<S>hi</S>⟦ yo<E>⟧TOOLS<S>b</S>⟦ c<E>⟧"),
    "calls before and after the last question": (
        MISTRAL,
        Record(
            [*call().messages, {"role": "tool", "content": "7"}]
            + [*chat("b", "c").messages, *call("g").messages],
            tools=[{"name": "f"}],
        ),
        "<S>hi</S>⟦<B>f<E>⟧RESULT7</R><S>b</S>⟦ c<E>⟧TOOLS<S>hi</S>⟦<B>g<E>⟧",
    ),
    "generation tags around all of the turn": (TAGGED_WHOLE, chat("hi", "y<P>o", "b", "c"),
        "<S>user\nhi<E>\n⟦<S>assistant\ny<P>o<E>⟧\n<S>user\nb<E>\n⟦<S>assistant\nc<E>⟧\n"),
    "generation tags that touch, of which one is context": (
        TAGGED_WHOLE.replace("<E>\n", "<E>"),
        Record(
            [*chat("hi", "yo").messages, {"role": "assistant", "content": "so"}], marks={1: False}
        ),
        "<S>user\nhi<E><S>assistant\nyo<E>⟦<S>assistant\nso<E>⟧",
    ),
    "generation tags around two parts": (
        TAGGED.replace(
            "{{ m.content + '<E>\n' }}{% endgen",
            "{{ m.content[:1] }}{% endgeneration %}{{ m.content[1:2] }}{% generation %}"
            "{{ m.content[2:] + '<E>\n' }}{% endgen",
        ),
        chat("hi", "abc"),
        PAIR + "⟦a⟧b⟦c<E>⟧\n",
    ),
    "more behind the stop token of a call": (
        CHATML.replace(
            "m.content + '<E>\n'",
            "m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name + '<E><S>bot' }}"
            "{% endif %}{{ '<E>\n'",
        ),
        call(),
        PAIR + "⟦f<E>⟧<S>bot<E>\n",
    ),
    "generation tags of two turns in a row": (TAGGED_WHOLE,
        Record([*chat("hi", "yo").messages, {"role": "assistant", "content": "so"}]),
        "<S>user\nhi<E>\n⟦<S>assistant\nyo<E>⟧\n⟦<S>assistant\nso<E>⟧\n"),
    "a line break before the stop token": (
        CHATML.replace("'<E>\n' }}{% endfor", "'\n<P>' }}{% endfor"), chat("hi", "yo"),
        "<S>user\nhi\n<P><S>assistant\n⟦yo\n<P>⟧"),
    "generation tags without the stop token": (
        TAGGED.replace("'<E>\n' }}{% endgen", "'' }}{% endgen").replace(
            "{% endgeneration %}", "{% endgeneration %}{{ '<E>\n' }}"
        ),
        TALK,
        BOTH,
    ),
    "the next role's token ends an answer": (ROLES, TALK, "<S>\nhi<B>\n⟦yo<S>⟧\nb<B>\n⟦c<S>⟧"),
    "the next role's token, and nothing behind a question": (ROLES, chat("hi", "yo", "b"),
        "<S>\nhi<B>\n⟦yo<S>⟧\nb"),
    "a tool's token ends a call": (ROLES, call_and_answer(), "<S>\nhi<B>\n⟦[f]<P>⟧\n7<B>\n⟦so<S>⟧"),
    "a tool's token ends the last call": (ROLES, call(), "<S>\nhi<B>\n⟦[f]<P>⟧"),
    "a question behind a call": (ROLES, Record([*call().messages, *chat("b", "c").messages]),
        "<S>\nhi<B>\n⟦[f]<S>⟧\nb<B>\n⟦c<S>⟧"),
    "the next role's token behind a line break": (
        ROLES.replace("m.content }}", "m.content + '\n' }}"), TALK,
        "<S>\nhi\n<B>\n⟦yo\n<S>⟧\nb\n<B>\n⟦c\n<S>⟧"),
    "nothing is added behind an empty answer": (ROLES, chat("hi", "yo", "b", ""),
        "<S>\nhi<B>\n⟦yo<S>⟧\nb<B>\n"),
    "an end between turns alone": (
        ROLES.replace("{% for c", "{{ '<E>' if m.role == 'assistant' and not loop.last }}{% for c"),
        TALK, "<S>\nhi<B>\n⟦yo<E>⟧<S>\nb<B>\n⟦c<E>⟧"),
    "generation tags, and the next role's token": (ROLES_TAGGED, TALK,
        "<S>\nhi<B>\n⟦yo<S>⟧\nb<B>\n⟦c<S>⟧"),
    "generation tags, and a token of calls": (
        ROLES_TAGGED.replace("{% endgen", "{{ '' if m.tool_calls else '<E>' }}{% endgen"), call(),
        "<S>\nhi<B>\n⟦[f]<P>⟧"),
    "generation tags": (TAGGED, TALK, BOTH),
}  # fmt: skip


@pytest.mark.parametrize("case", MASKS)
def test_mask(case):
    template, record, expected = MASKS[case]
    assert one(record, make_tokenizer(template)) == golden(expected)


TOOL = {"role": "tool", "content": "7"}
SO = {"role": "assistant", "content": "so"}
NEXT = "<S>user\nb<E>\n<S>assistant\n"
ANSWERS = {"learn_reasoning": False}
NO_THINKING = {"enable_thinking": False}
# What is learnt begins where the prompt that a server makes by default ends.
ASKED = {
    # template, conversation, options of Codec, what it becomes, remarks
    "an empty block": (QWEN3_PROMPT, chat("hi", "yo"), {}, PAIR + f"⟦{BLOCK}yo<E>⟧\n", {}),
    "an earlier turn has no block": (QWEN3_PROMPT, TALK, {},
        PAIR + f"⟦yo<E>⟧\n{NEXT}⟦{BLOCK}c<E>⟧\n", {}),
    "the prompt opens the block, and ends inside a token": (QWEN35, chat("hi", "yo"), {},
        PAIR + "<think>\n⟦\n</think>\n\nyo<E>⟧\n", {}),
    "it does so twice": (
        QWEN35.replace(" and (loop.last or think)", ""), Record([*call().messages, TOOL, SO]), {},
        PAIR + "<think>\n⟦\n</think>\n\n[f]<E>⟧\n<S>tool\n7<E>\n<S>assistant\n"
        + "<think>\n⟦\n</think>\n\nso<E>⟧\n", {},
    ),
    "the prompt opens the block of some reasoning": (QWEN35,
        chat("hi", "yo", reasoning_content="r"), {}, PAIR + "<think>\n⟦r\n</think>\n\nyo<E>⟧\n",
        {}),
    "an earlier turn has no block, but its prompt opened one": (QWEN35, TALK, {},
        PAIR + f"⟦yo<E>⟧\n{NEXT}<think>\n⟦\n</think>\n\nc<E>⟧\n", {reasons.UNOPENED: 1}),
    "the template writes no block at all": (OPENS_THINK, chat("hi", "yo"), {}, PAIR + "⟦yo<E>⟧\n",
        {reasons.UNOPENED: 1}),
    "the row asks without reasoning": (QWEN35,
        chat("hi", "yo")._replace(chat_template_kwargs=NO_THINKING), {}, PAIR + f"{BLOCK}⟦yo<E>⟧\n",
        {}),
    "the row has its earlier reasoning kept": (
        PRESERVES,
        chat("hi", "<think>\nr\n</think>\n\nyo", "b", "c")._replace(
            chat_template_kwargs={"preserve_thinking": True}
        ),
        {}, PAIR + f"<think>\n⟦r\n</think>\n\nyo<E>⟧\n{NEXT}<think>\n⟦\n</think>\n\nc<E>⟧\n", {},
    ),
    "the template has no such variable": (CHATML,
        chat("hi", "yo")._replace(chat_template_kwargs=NO_THINKING), {}, PAIR + "⟦yo<E>⟧\n",
        {reasons.NO_VARIABLE: 1}),
    "answers alone": (QWEN35, chat("hi", "yo"), ANSWERS, PAIR + f"{BLOCK}⟦yo<E>⟧\n", {}),
    "answers alone behind reasoning": (QWEN3_PROMPT, chat("hi", "<think>\nr\n</think>\n\nyo"),
        ANSWERS, PAIR + "<think>\nr\n</think>\n\n⟦yo<E>⟧\n", {reasons.WITH_REASONING: 1}),
    "answers alone, an earlier one without the block": (QWEN3_PROMPT, TALK, ANSWERS,
        PAIR + f"⟦yo<E>⟧\n{NEXT}{BLOCK}⟦c<E>⟧\n", {reasons.UNOPENED: 1}),
    "answers alone, with only a closing tag": (CHATML, chat("hi", "r</think>yo"), ANSWERS,
        PAIR + "r</think>⟦yo<E>⟧\n", {reasons.ONLY_CLOSED: 1, reasons.WITH_REASONING: 1}),
    "a rendered prompt": (CHATML, chat(PAIR, "yo"), {}, PAIR + "⟦yo<E>⟧\n", {}),
    "a rendered prompt, and the answer's end": (CHATML, chat(PAIR, "yo<E>\n"), {},
        PAIR + "⟦yo<E>⟧\n", {}),
    "a rendered prompt that asks for no reasoning": (QWEN35, chat(PAIR + BLOCK, "yo"), {},
        PAIR + f"{BLOCK}⟦yo<E>⟧\n", {}),
    "a rendered prompt of marks": (TAGGED_WHOLE, chat(PAIR, "yo"), {}, PAIR + "⟦yo<E>⟧\n", {}),
    "a rendered prompt, where no words ask": (MISTRAL, chat("<S>hi</S>", " yo"), {},
        "<S>hi</S>⟦ yo<E>⟧", {}),
    "special tokens in a question and an answer": (CHATML, chat("h<P>i", "yo", "b", "<B>"), {},
        f"<S>user\nh<P>i<E>\n<S>assistant\n⟦yo<E>⟧\n{NEXT}⟦<B><E>⟧\n",
        {reasons.SPECIALS_INSIDE: 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", ASKED)
def test_learnt_is_what_the_model_is_asked_for(case):
    template, record, options, expected, remarks = ASKED[case]
    tokenizer = make_tokenizer(template)
    set_variables(tokenizer, None, options.get("learn_reasoning", True))
    ((sample, found),) = encode(Codec(tokenizer, **options), [record])
    assert (sample.ids.tolist(), sample.is_label.tolist()) == masked(expected)
    assert +found == remarks
    if remarks or "<S>" in record.messages[0]["content"]:
        return
    # a server's prompt, in token ids, is what stands before the last learnt tokens
    last = max(i for i in range(1, len(sample.ids)) if sample.is_label[i] > sample.is_label[i - 1])
    end = max(i for i, m in enumerate(record.messages) if m["role"] == "assistant")
    asked = tokenizer.apply_chat_template(
        record.messages[:end], add_generation_prompt=True, **record.chat_template_kwargs
    )
    assert tokenizer.decode(asked["input_ids"]) == tokenizer.decode(sample.ids[:last])
    if expected.count("<think>\n⟦") < 2:  # a server may join the halves in earlier turns
        assert asked["input_ids"] == sample.ids[:last].tolist()


def masked(expected):
    """(ids, which are learnt) of a text as for `golden`."""
    ids, labels = golden(expected)
    return ids, [False, *(label >= 0 for label in labels[:-1])]


def test_variables_are_defaults_of_the_template():
    tokenizer = make_tokenizer(QWEN35)
    question = chat("hi").messages

    def asked(**more):
        return tokenizer.apply_chat_template(
            question, add_generation_prompt=True, tokenize=False, **more
        )

    assert asked() == PAIR + "<think>\n"
    (line,) = set_variables(tokenizer, None, learn_reasoning=False)
    assert line == "chat template: enable_thinking is false"
    assert asked() == PAIR + BLOCK
    assert asked(enable_thinking=True) == PAIR + "<think>\n"  # who asks decides
    set_variables(tokenizer, '{"enable_thinking": true}', learn_reasoning=False)  # so does the flag
    assert asked() == PAIR + "<think>\n"
    with pytest.raises(UserError, match="has no variable 'enable_thinkin': remove it"):
        set_variables(tokenizer, '{"enable_thinkin": true}')

    values = {"a": None, "b": [1, {"c": '"%}\n\U0001f680'}], "d": -2.5, "e": False}
    prints = make_tokenizer("{% for m in messages %}{{ [b, d, e] | tojson }}{% endfor %}")
    set_variables(prints, json.dumps(values))
    text = prints.apply_chat_template(question, tokenize=False)
    assert json.loads(text) == [values["b"], values["d"], values["e"]]


def test_variables_that_cannot_be_set():
    for text, words in (
        ("{", "no JSON object"), ("[1]", "must be a JSON object"), ("3", "must be a JSON object"),
        ('{"tools": []}', "'tools' is no variable"), ('{"a-b": 1}', "'a-b' is no variable"),
        ('{"bos_token": "x"}', "'bos_token' is no variable"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"--chat_template_kwargs.*{words}"):
            template_variables(text, "--chat_template_kwargs")
    names = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert names.keys() <= NOT_VARIABLES


def test_a_template_that_can_not_ask_without_reasoning():
    (line,) = set_variables(make_tokenizer(QWEN3), None, learn_reasoning=False)
    assert "no variable that puts the block into the prompt" in line and "--chat_template" in line
    assert set_variables(make_tokenizer(), None, learn_reasoning=False) == []


FAMILIES = ("llama3", "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "gemma3", "phi3",
            "phi3_5", "deepseekv3", "glm4moe")  # fmt: skip
SPECIALS = re.compile(r"<\|\w+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")
# what TRL's masks have besides: words that ask for the answer, an empty block, what follows a turn
BESIDE = re.compile(r"(<｜Assistant｜>)?\s*(<think>\s*</think>)?\s*(<\|endoftext\|>)?\s*")


@pytest.mark.real
@pytest.mark.parametrize("family", FAMILIES)
def test_published_templates(family):
    """TRL has copies, and others with marks of what to learn, which transformers reads."""
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    texts = [(folder / f"{family}{kind}.jinja").read_text() for kind in ("", "_training")]
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/qwen3-tiny")
    names = sorted(set(SPECIALS.findall("".join(texts))))
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.bos_token = tokenizer.eos_token = "<|endoftext|>"
    record, found = chat("2 + 2?", "It is 4.", "And 3?", "It is 6, I think."), []
    for text in texts:
        tokenizer.chat_template = text
        if text == texts[0]:
            ids, shifted = one(record, tokenizer)
            mask = [False, *(label >= 0 for label in shifted[:-1])]
        else:
            how = {"return_dict": True, "return_assistant_tokens_mask": True}
            encoded = tokenizer.apply_chat_template(record.messages, **how)
            ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        spans = itertools.groupby(zip(ids, mask, strict=True), lambda pair: bool(pair[1]))
        found.append([tokenizer.decode([i for i, _ in span]) for on, span in spans if on])
    assert len(found[0]) == len(found[1]) == 2
    for ours, theirs, answer in zip(*found, ("It is 4.", "It is 6, I think."), strict=True):
        assert SPECIALS.fullmatch(ours.removeprefix(answer).strip()), ours
        assert ours in theirs and BESIDE.fullmatch(theirs.replace(ours, "")), theirs


# The template writes its own line breaks around reasoning; a row may have others, or no first tag.
REASONED = {
    "<think>r</think>yo": "<think>\nr\n</think>\n\n⟦yo<E>⟧\n",
    "<think>\nr\n</think>\nyo": "<think>\nr\n</think>\n\n⟦yo<E>⟧\n",
    "<think>\n\nr\n\n</think>\n\nyo\n": "<think>\nr\n</think>\n\n⟦yo\n<E>⟧\n",
    "<think> r </think> yo": "<think>\n r \n</think>\n\n⟦ yo<E>⟧\n",
    "r\n</think>\n\nyo": "<think>\nr\n</think>\n\n⟦yo<E>⟧\n",
    "<think>hi</think>hi": "<think>\nhi\n</think>\n\n⟦hi<E>⟧\n",
}


@pytest.mark.parametrize("content", REASONED)
def test_reasoning_is_learnt_as_rendered(content):
    expected = REASONED[content]
    rendered = f"⟦{expected.replace('⟦', '')}"
    assert one(chat("hi", content), make_tokenizer(QWEN3)) == golden(PAIR + rendered)
    codec = {"learn_reasoning": False}
    assert one(chat("hi", content), make_tokenizer(QWEN3), **codec) == golden(PAIR + expected)


def test_reasoning_as_context():
    codec = {"learn_reasoning": False}
    given = chat("hi", "yo", reasoning_content="r")
    expected = golden(PAIR + "<think>\nr\n</think>\n\n⟦yo<E>⟧\n")
    assert one(given, make_tokenizer(QWEN3), **codec) == expected
    tags = QWEN3.replace("'<think>\n' + think + '\n</think>\n\n'", "'[THINK]' + think + '[/THINK]'")
    expected = golden(PAIR + "[THINK]r[/THINK]⟦yo<E>⟧\n")
    assert one(given, make_tokenizer(tags), **codec) == expected
    assert one(chat("hi", "yo"), make_tokenizer(), **codec) == golden(PAIR + "⟦yo<E>⟧\n")
    drops = CHATML.replace("m.content +", "m.content.split('</think>')[-1] +")
    dropped = chat("hi", "<think>r</think>yo")
    assert one(dropped, make_tokenizer(drops), **codec) == golden(PAIR + "⟦yo<E>⟧\n")
    assert one(given, make_tokenizer(), **codec) == golden(PAIR + "⟦yo<E>⟧\n")
    assert one(chat("hi", "<think>r9"), make_tokenizer(), **codec) == reasons.UNCLOSED
    only = chat("hi", "<think>r</think>")
    assert one(only, make_tokenizer(QWEN3), **codec) == reasons.EMPTY_TURN
    marked = make_tokenizer(TAGGED)
    expected = golden(PAIR + "<think>r</think>\n⟦yo<E>⟧\n")
    assert one(chat("hi", "<think>r</think>\nyo"), marked, **codec) == expected
    called = call(arguments={"x": 1}, content="<think>r</think>\n\n")
    expected = golden(PAIR + '<think>r</think>\n\n⟦[f] {"x": 1}<E>⟧\n')
    assert one(called, make_tokenizer(AS_JSON), **codec) == expected


RENDERED = labels.RENDERED.format(token="<S>")
SKIPPED = {
    "reasoning lost in the only answer": (QWEN3, chat("hi", "<think>\nr\n</think>\n\nyo", "b"),
        reasons.NO_REASONING),
    "template changes the text": (CHATML.replace("m.content", "m.content | upper"),
        chat("hi", "yo"), reasons.REWRITTEN),
    "tool call not rendered": (CHATML, chat("hi", "", tool_calls=[{"function": {"name": "f"}}]),
        labels.NO_CALLS),
    "a rendered prompt without its end": (CHATML, chat(PAIR[:-1], "yo"), RENDERED),
    "a rendered prompt behind another turn": (CHATML, chat("system:s", PAIR, "yo"), RENDERED),
    "the template's tokens in a question": (CHATML, chat("say <S>", "yo"), RENDERED),
    "stop token inside the answer": (CHATML, chat("hi", "a<E>b"), reasons.ENDS_INSIDE),
    "tags and dropped reasoning": (TAGGED, chat("hi", "yo", reasoning_content="r"),
        reasons.NO_REASONING),
    "a call and dropped reasoning": (SPECIAL_CALLS, call(content="so", reasoning_content="r"),
        reasons.NO_REASONING),
    "tags and a stop token inside": (TAGGED, chat("hi", "a<E>b"), reasons.ENDS_INSIDE),
    "template adds to the reasoning": (
        QWEN3.replace("'<think>\n' + think", "'<think>\nand ' + think"),
        chat("hi", "<think>\nr\n</think>\n\nyo"), reasons.REWRITTEN),
    "template writes another number": (AS_XML.replace("(v | string)", "(v | string) + '9'"),
        call(arguments={"n": 1}), reasons.REWRITTEN),
    "a tag in prose": (QWEN3, chat("hi", "end with </think> please"), reasons.REWRITTEN),
    "template drops a turn whose text is elsewhere": (
        CHATML.replace("{{ '<S>' +", "{{ '' if m.role == 'tool' else '<S>' +"),
        Record(
            [*call().messages[:1], {"role": "tool", "content": "7"}]
            + [{"role": "assistant", "content": "It is 7."}]
        ),
        labels.LEFT_OUT.format(role="tool"),
    ),
    "half a surrogate pair in a name": (AS_JSON, call("\ud800"), labels.NO_TEXT),
    "stop token inside an argument": (AS_JSON, call(arguments={"x": "<E>"}), reasons.ENDS_INSIDE),
    "template adds to the text": (CHATML.replace("m.content + ", "m.content + '2' + "),
        chat("hi", "4"), reasons.REWRITTEN),
    "template cuts the arguments": (CUT, call(arguments={"x": 1, "y": 234567}), reasons.REWRITTEN),
    "template drops the text beside a call": (MISTRAL, call(content="so"), reasons.REWRITTEN),
    "only the next turn begins with a special token": (CHATML.replace("<E>", ""),
        chat("hi", "yo", "b"), reasons.REWRITTEN),
    "generation tags around nothing": (
        TAGGED.replace("{{ m.content + '<E>\n' }}{% endgen", "{% endgen").replace(
            "{% endgeneration %}", "{% endgeneration %}{{ m.content + '<E>\n' }}"
        ),
        chat("hi", "yo"),
        reasons.UNMARKED,
    ),
    "newline token reaches into the answer": (CHATML, chat("hi", "\nyo"), reasons.STRADDLED),
    "no stop token": (CHATML.replace("<E>", ""), chat("hi", "yo"), reasons.REWRITTEN),
    "template raises": ("{{ raise_exception('no') }}", chat("hi", "yo"), f"{reasons.REFUSED}: no"),
    "begins with an answer": (CHATML, Record(chat("hi", "yo").messages[1:]), reasons.NO_PROMPT),
    "answers all blank": (CHATML, chat("hi", " \n"), reasons.EMPTY_TURN),
    "no answer": (CHATML, chat("hi"), labels.NOTHING),
    "no messages": (CHATML, Record([]), labels.NOTHING),
    "blank text": (CHATML, Record(None, text=" "), labels.NOTHING),
    "tags and a rewritten answer": (
        TAGGED.replace("m.content + '<E>\n' }}{% endgen", "'x<E>\n' }}{% endgen"), chat("hi", "yo"),
        reasons.REWRITTEN),
}  # fmt: skip


@pytest.mark.parametrize("case", SKIPPED)
def test_skipped(case):
    template, record, reason = SKIPPED[case]
    assert one(record, make_tokenizer(template)) == reason


def test_generation_tags_with_context_turns_and_with_untagged_turns():
    record = TALK._replace(context=frozenset({0, 1}))
    expected = golden(PAIR + "yo<E>\n<S>user\nb<E>\n<S>assistant\n⟦c<E>⟧\n")
    assert one(record, make_tokenizer(TAGGED)) == expected
    last_only = TAGGED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    assert one(record, make_tokenizer(last_only)) == expected  # only the last turn has marks
    assert one(chat("hi", "yo", "b"), make_tokenizer(last_only)) == reasons.UNMARKED


def test_two_answers_without_a_word_between_them():
    """The second one would be learnt behind the token that ends the first."""
    direct = CHATML.replace("'<S>' + m.role", "('' if m.role == 'assistant' else '<S>' + m.role)")
    record = Record([*chat("hi", "yo").messages, {"role": "assistant", "content": "so"}])
    template = direct.replace("{{ '<S>assistant\n' }}", "{{ '\n' }}")
    expected = golden("<S>user\nhi<E>\n\n⟦yo<E>⟧\n\nso<E>\n")
    assert one(record, make_tokenizer(template)) == expected


@pytest.mark.parametrize("template", [CHATML, QWEN3, TAGGED, AS_JSON])
def test_long_answers_take_no_longer_than_their_length(template):
    tokenizer = make_tokenizer(template)
    for answer in (
        "word " * 60_000,
        " " * 100_000 + "x",
        "<P>" * 3_000,
        "<think>r</think>" * 2_000,
    ):
        begun = time.perf_counter()
        one(chat("hi", answer), tokenizer)
        assert time.perf_counter() - begun < 5, answer[:10]


def test_train_on_prompt_learns_all_but_the_first_token():
    record = chat("hi", "yo")
    expected = golden("<S>⟦user\nhi<E>\n<S>assistant\nyo<E>\n⟧")
    assert one(record, make_tokenizer(), train_on_prompt=True) == expected


def test_tools_reach_the_template():
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    template = "{% if tools %}{{ tools[0].function.name + '\n' }}{% endif %}" + CHATML
    turns = chat("hi", "yo").messages
    turns[1:1] = [{"role": "tool", "content": "t"}]
    got = one(Record(turns, tools=[tool]), make_tokenizer(template))
    assert got == golden("f\n<S>user\nhi<E>\n<S>tool\nt<E>\n<S>assistant\n⟦yo<E>⟧\n")


PLAIN, WITH_BOS = {"template": None}, {"template": None, "bos": "<B>"}
BOS_OF_TEMPLATE = {"template": LLAMA, "bos": "<B>"}
TOKENIZERS = [
    # how a tokenizer is made, a conversation or text, what it becomes
    (BOS_OF_TEMPLATE, chat("hi", "  yo\n"), "<B><S>user\n\nhi<E><S>assistant\n\n⟦yo<E>⟧"),
    (BOS_OF_TEMPLATE, Record(None, text="abc"), "<B>⟦abc<E>⟧"),
    (BOS_OF_TEMPLATE, Record(None, text="<B>abc"), "<B>⟦abc<E>⟧"),
    (PLAIN, chat("hi", "yo"), "hi\n⟦yo<E>⟧"),
    (PLAIN, chat("system:s", "hi", "yo", "b", "c"), "s\nhi\n⟦yo<E>⟧\nb\n⟦c<E>⟧"),
    (PLAIN, chat("hi\n", "yo"), "hi\n\n⟦yo<E>⟧"),
    (WITH_BOS, chat("hi", "yo"), "<B>hi\n⟦yo<E>⟧"),
    (WITH_BOS, chat("", "yo"), "<B>⟦yo<E>⟧"),
    ({"pad": "<E>"}, chat("hi", "yo"), PAIR + "⟦yo<E>⟧\n"),  # eos is learnt all the same
    # Llama 3's byte-level post-processor takes a token's leading space out of its offsets
    ({"post_processor": processors.ByteLevel(trim_offsets=True)}, chat("hi", " yo"),
        PAIR + "⟦ yo<E>⟧\n"),
]  # fmt: skip


@pytest.mark.parametrize("how, record, expected", TOKENIZERS)
def test_other_tokenizers(how, record, expected):
    assert one(record, make_tokenizer(**how)) == golden(expected)


def test_without_a_template():
    whole = one(chat("hi", "yo"), make_tokenizer(**WITH_BOS), train_on_prompt=True)
    assert whole == golden("<B>⟦hi\nyo<E>⟧")
    assert one(chat("hi", "\nyo"), make_tokenizer(None)) == reasons.STRADDLED
    greeting = Record([{"role": "assistant", "content": "so"}, *chat("hi", "yo").messages])
    assert one(greeting, make_tokenizer(None)) == golden("so<E>\nhi\n⟦yo<E>⟧")
    assert one(chat("hi", "yo", "b"), make_tokenizer(None)) == golden("hi\n⟦yo<E>⟧\nb")


@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA, TAGGED])
def test_ids_are_those_of_apply_chat_template(template):
    tokenizer = make_tokenizer(template, bos="<B>")
    record = chat("system:sé\n\n", "a\n\nb ", "c\U0001f680", "d", "e")
    ids, _ = one(record, tokenizer)
    assert ids == tokenizer.apply_chat_template(record.messages, tokenize=True)["input_ids"]


def test_truncation_saved_with_the_tokenizer_is_ignored():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=99)
    assert one(chat("hi", "yo"), tokenizer) == golden(PAIR + "⟦yo<E>⟧\n")


def test_unfit_tokenizers_are_refused():
    class Slow:
        is_fast, name_or_path = False, "slow/model"

    with pytest.raises(UserError, match="slow/model is not a fast tokenizer"):
        Codec(Slow())
    with pytest.raises(UserError, match="neither a chat template nor an eos token"):
        Codec(make_tokenizer(None, eos=None))


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
def test_gsm8k_masks_decode_to_answer_and_stop_token():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "models/qwen3-tokenizer")
    codec = Codec(tokenizer)
    lines = (SHARED / "data/gsm8k/train.jsonl").read_text().splitlines()[:1000]
    rows = [json.loads(line) for line in lines]
    flags = DataArgs(input_key="question", target_key="answer")
    row_format = detect_format(rows[0], flags)
    encoded = encode(codec, [to_record(row, row_format) for row in rows])
    samples = [sample for sample, _ in encoded]
    for row, (ids, is_label) in zip(rows, samples, strict=True):
        assert tokenizer.decode(ids[is_label]) == row["answer"] + "<|im_end|>"
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": rows[0]["question"]}]
        + [{"role": "assistant", "content": rows[0]["answer"]}]
    )
    assert samples[0].ids.tolist() == whole["input_ids"]
