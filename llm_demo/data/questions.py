"""The last question of a prompt, as the user wrote it, without what the chat template adds."""

from collections.abc import Callable

from llm_demo.data.turns import REFUSALS, THINK_PROMPT

QUESTION = {"role": "user", "content": "QUESTION"}
BEFORE = (  # messages before a question
    [{"role": "system", "content": "INSTRUCTION"}],
    [{"role": "user", "content": "EARLIER"}, {"role": "assistant", "content": "ANSWER"}],
)


def question_reader(tokenizer) -> Callable[[list[int]], str]:
    """A function from a prompt's token ids to its last question; to all of its text, without
    special tokens, where the words that the chat template writes around a question are not found.
    """
    first, behind = _around(tokenizer, [])
    behind = THINK_PROMPT.sub("", behind).rstrip()
    # what stands between a question and the message before it
    between = []
    for messages in BEFORE:
        text, (head, _) = messages[-1]["content"], _around(tokenizer, messages)
        between.append(head.rpartition(text)[2] if text in head else "")

    def read(ids: list[int]) -> str:
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        starts = [len(first)] if text.startswith(first) else []
        for words in between:
            if words.strip() and words in text:
                starts.append(text.rindex(words) + len(words))
        end = text.find(behind, max(starts)) if starts and behind else -1
        if end < 0:
            return tokenizer.decode(ids, skip_special_tokens=True)
        return text[max(starts) : end]

    return read


def _around(tokenizer, messages: list[dict]) -> tuple[str, str]:
    """What stands before and behind a question that follows these messages, up to the answer. Empty
    if the tokenizer has no chat template, or it refuses these messages."""
    if not tokenizer.chat_template:
        return "", ""
    try:
        text = tokenizer.apply_chat_template(
            [*messages, QUESTION], tokenize=False, add_generation_prompt=True
        )
    except REFUSALS:
        return "", ""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)  # as a prompt is decoded
    before, _, behind = text.rpartition(QUESTION["content"])
    return before, behind
