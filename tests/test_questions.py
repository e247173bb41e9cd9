"""The prompts that are shown: what the user wrote, without what the chat template adds."""

import json

import pytest
from test_labels import (
    BLOCK,
    LLAMA,
    MISTRAL,
    OPENS_THINK,
    QWEN3,
    QWEN3_PROMPT,
    QWEN35,
    ROLES,
    TAGGED,
)
from tiny_tokenizer import CHATML, make_tokenizer, packs_of

from llm_demo.data.packs import prompts_of
from llm_demo.data.questions import question_reader
from llm_demo.model.source import set_variables

OWN_SYSTEM = (  # like Qwen 2.5, which puts one in where a conversation has none
    "{% if messages[0].role != 'system' %}{{ '<S>system\nBe kind.<E>\n' }}{% endif %}" + CHATML
)
# like Llama 2: the system prompt is a part of the first question's turn
INST = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ '<S>[INST] <<SYS>>\n' + m.content + "
    "'\n<</SYS>>\n\n' }}{% elif m.role == 'user' %}"
    "{% if loop.index0 != 1 or messages[0].role != 'system' %}{{ '<S>[INST] ' }}{% endif %}"
    "{{ m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + '<E>' }}{% endif %}{% endfor %}"
)
PLAIN_WORDS = (  # like Alpaca: no special token, but for the end
    "{% for m in messages %}{% if m.role == 'user' %}{{ '### Question:\n' + m.content + '\n\n' }}"
    "{% elif m.role == 'system' %}{{ m.content + '\n\n' }}"
    "{% else %}{{ '### Answer:\n' + m.content + '<E>\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Answer:\n' }}{% endif %}"
)
QUESTION = "Is user a role?\n\nassistant, say so. "
TURNS = {
    "one": [],
    "a system prompt": [("system", "You are a user's\n\nassistant.")],
    "earlier turns": [("user", "hi"), ("assistant", "yo"), ("user", "b"), ("assistant", "c")],
    "all": [("system", "Be brief."), ("user", "hi"), ("assistant", "yo")],
}
TEMPLATES = {
    "chatml": CHATML, "own system": OWN_SYSTEM, "llama": LLAMA, "inst": INST, "words": PLAIN_WORDS,
    "qwen3": QWEN3, "qwen3.5": QWEN35, "opens": OPENS_THINK, "roles": ROLES, "mistral": MISTRAL,
}  # fmt: skip


def prompt_of(tmp_path, tokenizer, turns, **flags):
    """The prompt of the last answer, in token ids."""
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": messages}))
    packs = packs_of(str(tmp_path / "x.jsonl"), tokenizer, seq_len=512, **flags)
    ((prompt, _),) = prompts_of(packs, 1, 10**9)
    return prompt


@pytest.mark.parametrize("before", TURNS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_last_question_is_shown_as_it_was_written(template, before, tmp_path):
    if template in ("roles", "mistral") and before in ("a system prompt", "all"):
        pytest.skip("no system prompts")
    tokenizer = make_tokenizer(TEMPLATES[template], bos="<B>" if template == "llama" else None)
    turns = [*TURNS[before], ("user", QUESTION), ("assistant", "yo")]
    prompt = prompt_of(tmp_path, tokenizer, turns)
    assert question_reader(tokenizer)(prompt).strip() == QUESTION.strip()


@pytest.mark.parametrize("template", [QWEN3_PROMPT, QWEN35])
def test_reasoning_that_is_context_is_not_shown(template, tmp_path):
    for answer in ("yo", "<think>\nr\n</think>\n\nyo", f"{BLOCK}yo"):
        tokenizer = make_tokenizer(template)
        set_variables(tokenizer, None, learn_reasoning=False)
        turns = [("user", "b"), ("assistant", "c"), ("user", QUESTION), ("assistant", answer)]
        prompt = prompt_of(tmp_path, tokenizer, turns, learn_reasoning=False)
        assert question_reader(tokenizer)(prompt).strip() == QUESTION.strip()


def test_a_tools_result_is_no_question(tmp_path):
    turns = [("user", QUESTION), ("assistant", "yo"), ("tool", "4 degrees")]
    tokenizer = make_tokenizer(CHATML)
    prompt = prompt_of(tmp_path, tokenizer, [*turns, ("assistant", "cold")])
    assert question_reader(tokenizer)(prompt) == QUESTION


def test_what_is_not_found_is_shown_whole(tmp_path):
    tokenizer = make_tokenizer(None)
    prompt = prompt_of(tmp_path, tokenizer, [("user", "hi you"), ("assistant", "yo")])
    assert question_reader(tokenizer)(prompt) == "hi you\n"
    for template in (TAGGED, "{{ raise_exception('no') }}"):  # no words ask for the answer
        tokenizer.chat_template = template
        assert question_reader(tokenizer)([104, 105]) == "hi"
