"""The last question of a prompt, as the user wrote it, without what the chat template adds."""

import functools
from collections.abc import Callable

from llm_demo.data.codec import REFUSALS, THINK_PROMPT

QUESTION = {"role": "user", "content": "QUESTION"}
BEFORE = (  # messages before a question
    [],
    [{"role": "system", "content": "EARLIER"}],
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": "EARLIER"}],
)


def question_reader(tokenizer) -> Callable[[list[int]], str]:
    """A function from a prompt's token ids to its last question; to all of its text, without
    special tokens, where the words that the chat template writes around a question are not found.
    """
    around = [_around(tokenizer, messages) for messages in BEFORE]
    # what stands between a question and the message before it
    heads = [before.rpartition("EARLIER")[2] for before, _ in around]
    behind = THINK_PROMPT.sub("", around[0][1]).rstrip()

    def read(ids: list[int]) -> str:
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        starts = [text.rindex(head) + len(head) for head in heads if head.strip() and head in text]
        end = text.find(behind, max(starts)) if starts and behind else -1
        if end < 0:
            return tokenizer.decode(ids, skip_special_tokens=True)
        return text[max(starts) : end]

    return read


def answers_in_words(tokenizer, pairs: list[tuple], answers: list) -> list[dict[str, str]]:
    """The text of each prompt, of the model's answer and of the expected one. pairs: (prompt,
    expected), in token ids, as are answers."""
    question = question_reader(tokenizer)
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    return [
        {"prompt": question(prompt), "answer": decode(given), "expected": decode(expected)}
        for (prompt, expected), given in zip(pairs, answers, strict=True)
    ]


def _around(tokenizer, messages: list[dict]) -> tuple[str, str]:
    """What stands before and behind a question that follows these messages, up to the answer. Empty
    if the tokenizer has no chat template, or it refuses these messages."""
    try:
        ids = tokenizer.apply_chat_template(
            [*messages, QUESTION], add_generation_prompt=True, return_dict=False
        )
    except REFUSALS:
        return "", ""
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)  # as a prompt is decoded
    before, _, behind = text.rpartition(QUESTION["content"])
    return before, behind
