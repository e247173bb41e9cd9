"""Label masks: golden arrays for every kind of template; a mask is never a guess."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizer import CHATML, golden, make_tokenizer
from tokenizers import processors

from llm_demo.data import labels
from llm_demo.data.batch import Record
from llm_demo.data.labels import encode, make_codec
from llm_demo.data.records import detect_format, to_record
from llm_demo.errors import UserError

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
PAIR = "<S>user\nhi<E>\n<S>assistant\n"


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


def one(record, tokenizer, **options):
    """(ids, shifted labels) of one record, or the reason why it is skipped."""
    (sample,) = encode(make_codec(tokenizer, **options), [record])
    if isinstance(sample, str):
        return sample
    ids, is_label = sample
    assert ids.dtype == np.int32 and is_label.dtype == bool and not is_label[0]
    shifted = np.where(is_label[1:], ids[1:], -100).tolist() + [-100]
    return ids.tolist(), shifted


MASKS = {
    # template, conversation, what it becomes
    "system prompt": (
        CHATML,
        chat("system:s", "hi", "yo"),
        "<S>system\ns<E>\n" + PAIR + "⟦yo<E>⟧\n",
    ),
    "three turns": (
        CHATML,
        chat("hi", "yo", "b", "bb", "c", "cc"),
        PAIR
        + "⟦yo<E>⟧\n<S>user\nb<E>\n<S>assistant\n⟦bb<E>⟧\n<S>user\nc<E>\n<S>assistant\n⟦cc<E>⟧\n",
    ),
    "ends with a question": (
        CHATML,
        chat("hi", "yo", "b"),
        PAIR + "⟦yo<E>⟧\n<S>user\nb<E>\n",
    ),
    "answer quoted in the question": (
        CHATML,
        chat("assistant\nyo", "yo"),
        "<S>user\nassistant\nyo<E>\n<S>assistant\n⟦yo<E>⟧\n",
    ),
    "characters of several tokens at both ends": (
        CHATML,
        chat("hi", "\U0001f680é\U0001f680"),
        PAIR + "⟦\U0001f680é\U0001f680<E>⟧\n",
    ),
    "one blank answer": (
        CHATML,
        chat("hi", "", "b", "c"),
        PAIR + "<E>\n<S>user\nb<E>\n<S>assistant\n⟦c<E>⟧\n",
    ),
    "reasoning lost in an earlier turn": (
        QWEN3,
        chat("hi", "<think>\nr\n</think>\n\nyo", "b", "c"),
        PAIR + "yo<E>\n<S>user\nb<E>\n<S>assistant\n<think>\n\n</think>\n\n⟦c<E>⟧\n",
    ),
    "spaces kept by the template": (CHATML, chat("hi", " yo "), PAIR + "⟦ yo <E>⟧\n"),
    "empty think before the last answer": (
        QWEN3,
        chat("hi", "yo", "b", "c"),
        PAIR + "⟦yo<E>⟧\n<S>user\nb<E>\n<S>assistant\n<think>\n\n</think>\n\n⟦c<E>⟧\n",
    ),
    "reasoning in the answer": (
        QWEN3,
        chat("hi", "<think>\nr\n</think>\n\nyo"),
        PAIR + "⟦<think>\nr\n</think>\n\nyo<E>⟧\n",
    ),
    "an empty think that the row has itself": (
        QWEN3,
        chat("hi", "<think>\n\n</think>\n\nyo"),
        PAIR + "⟦<think>\n\n</think>\n\nyo<E>⟧\n",
    ),
    "reasoning_content": (
        QWEN3,
        chat("hi", "yo", reasoning_content="r"),
        PAIR + "⟦<think>\nr\n</think>\n\nyo<E>⟧\n",
    ),
    "tool call": (
        QWEN3,
        chat("hi", "", tool_calls=[{"function": {"name": "f"}}]),
        PAIR + "<think>\n\n</think>\n\n⟦[f]<E>⟧\n",
    ),
    "generation prompt opens think": (
        OPENS_THINK,
        chat("hi", "yo", "b", "c"),
        PAIR + "⟦yo<E>⟧\n<S>user\nb<E>\n<S>assistant\n⟦c<E>⟧\n",
    ),
    "generation tags": (
        TAGGED,
        chat("hi", "yo", "b", "c"),
        PAIR + "⟦yo<E>⟧\n<S>user\nb<E>\n<S>assistant\n⟦c<E>⟧\n",
    ),
}


@pytest.mark.parametrize("case", MASKS)
def test_mask(case):
    template, record, expected = MASKS[case]
    assert one(record, make_tokenizer(template)) == golden(expected)


SKIPPED = {
    "reasoning lost in the only answer": (
        QWEN3,
        chat("hi", "<think>\nr\n</think>\n\nyo", "b"),
        labels.NO_REASONING,
    ),
    "template changes the text": (
        CHATML.replace("m.content", "m.content | upper"),
        chat("hi", "yo"),
        labels.REWRITTEN,
    ),
    "tool call not rendered": (
        CHATML,
        chat("hi", "", tool_calls=[{"function": {"name": "f"}}]),
        labels.NO_CALLS,
    ),
    "special token inside the answer": (CHATML, chat("hi", "a<S>b"), labels.REWRITTEN),
    "newline token reaches into the answer": (CHATML, chat("hi", "\nyo"), labels.STRADDLED),
    "no stop token": (CHATML.replace("<E>", ""), chat("hi", "yo"), labels.UNSTOPPED),
    "template raises": ("{{ raise_exception('no') }}", chat("hi", "yo"), labels.REFUSED),
    "begins with an answer": (CHATML, Record(chat("hi", "yo").messages[1:]), labels.NO_PROMPT),
    "answers all blank": (CHATML, chat("hi", " \n"), labels.EMPTY_TURN),
    "no answer": (CHATML, chat("hi"), labels.NOTHING),
    "no messages": (CHATML, Record([]), labels.NOTHING),
    "blank text": (CHATML, Record(None, text=" "), labels.NOTHING),
    "tags and a rewritten answer": (
        TAGGED.replace("m.content + '<E>\n' }}{% endgen", "'x<E>\n' }}{% endgen"),
        chat("hi", "yo"),
        labels.REWRITTEN,
    ),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_skipped(case):
    template, record, reason = SKIPPED[case]
    assert one(record, make_tokenizer(template)) == reason


def test_generation_tags_with_context_turns_and_with_untagged_turns():
    record = chat("hi", "yo", "b", "c")._replace(context=frozenset({0, 1}))
    expected = golden(PAIR + "yo<E>\n<S>user\nb<E>\n<S>assistant\n⟦c<E>⟧\n")
    assert one(record, make_tokenizer(TAGGED)) == expected
    last_only = TAGGED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    assert one(record, make_tokenizer(last_only)) == labels.REWRITTEN


def test_one_skipped_row_leaves_the_others():
    codec = make_codec(make_tokenizer())
    good, bad, again = encode(codec, [chat("hi", "yo"), chat("hi", "\nyo"), chat("hi", "yo")])
    assert bad == labels.STRADDLED
    assert good.ids.tolist() == again.ids.tolist() == golden(PAIR + "yo<E>\n")[0]


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


def test_llama_bos_is_there_once():
    tokenizer = make_tokenizer(LLAMA, bos="<B>")
    expected = golden("<B><S>user\n\nhi<E><S>assistant\n\n⟦yo<E>⟧")
    assert one(chat("hi", "  yo\n"), tokenizer) == expected  # trimmed by the template: fine
    assert one(Record(None, text="abc"), tokenizer) == golden("<B>⟦abc<E>⟧")
    assert one(Record(None, text="<B>abc"), tokenizer) == golden("<B>⟦abc<E>⟧")


def test_without_a_template():
    plain = make_tokenizer(None)
    assert one(chat("hi", "yo"), plain) == golden("hi\n⟦yo<E>⟧")
    record = chat("system:s", "hi", "yo", "b", "c")
    assert one(record, plain) == golden("s\nhi\n⟦yo<E>⟧\nb\n⟦c<E>⟧")
    with_bos = make_tokenizer(None, bos="<B>")
    assert one(chat("hi", "yo"), with_bos) == golden("<B>hi\n⟦yo<E>⟧")
    assert one(chat("", "yo"), with_bos) == golden("<B>⟦yo<E>⟧")
    assert one(chat("hi", "yo"), with_bos, train_on_prompt=True) == golden("<B>⟦hi\nyo<E>⟧")
    assert one(chat("hi\n", "yo"), plain) == golden("hi\n\n⟦yo<E>⟧")
    assert one(chat("hi", "\nyo"), plain) == labels.STRADDLED


def test_pad_equal_to_eos_is_still_learnt():
    tokenizer = make_tokenizer(pad="<E>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert one(chat("hi", "yo"), tokenizer) == golden(PAIR + "⟦yo<E>⟧\n")


@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA, TAGGED])
def test_ids_are_those_of_apply_chat_template(template):
    tokenizer = make_tokenizer(template, bos="<B>")
    record = chat("system:sé\n\n", "a\n\nb ", "c\U0001f680", "d", "e")
    ids, _ = one(record, tokenizer)
    assert ids == tokenizer.apply_chat_template(record.messages, tokenize=True)["input_ids"]


def test_offsets_survive_a_trimming_post_processor():
    # Llama 3's byte-level post-processor takes a token's leading space out of its offsets.
    tokenizer = make_tokenizer(post_processor=processors.ByteLevel(trim_offsets=True))
    assert one(chat("hi", " yo"), tokenizer) == golden(PAIR + "⟦ yo<E>⟧\n")


def test_truncation_saved_with_the_tokenizer_is_ignored():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=99)
    assert one(chat("hi", "yo"), tokenizer) == golden(PAIR + "⟦yo<E>⟧\n")


def test_unfit_tokenizers_are_refused():
    class Slow:
        is_fast, name_or_path = False, "slow/model"

    with pytest.raises(UserError, match="slow/model is not a fast tokenizer"):
        make_codec(Slow())
    with pytest.raises(UserError, match="neither a chat template nor an eos token"):
        make_codec(make_tokenizer(None, eos=None))


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
def test_gsm8k_masks_decode_to_answer_and_stop_token():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "models/qwen3-tokenizer")
    codec = make_codec(tokenizer)
    lines = (SHARED / "data/gsm8k/train.jsonl").read_text().splitlines()[:1000]
    rows = [json.loads(line) for line in lines]
    row_format = detect_format(rows[0], "x:1", input_key="question", target_key="answer")
    samples = encode(codec, [to_record(row, row_format, "x:1") for row in rows])
    for row, (ids, is_label) in zip(rows, samples, strict=True):
        assert tokenizer.decode(ids[is_label]) == row["answer"] + "<|im_end|>"
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": rows[0]["question"]}]
        + [{"role": "assistant", "content": rows[0]["answer"]}]
    )
    assert samples[0].ids.tolist() == whole["input_ids"]
