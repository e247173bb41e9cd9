"""Sample answers at the end of a run."""

from collections.abc import Callable

import torch

from llm_demo.core.rows import IGNORE_INDEX, Batch, bounds_of, position_ids
from llm_demo.data.codec import stop_tokens
from llm_demo.data.packs import prompts_of
from llm_demo.data.questions import answers_in_words
from llm_demo.run.log import Log


@torch.no_grad()
def show_answers(plan, micro_batch_size: int, next_tokens: Callable, log: Log) -> None:
    """Print the model's answers to three prompts and the expected ones. plan: of a run, see
    run/plan.py. next_tokens: as `ask` of
    `generate`."""
    tokens, data, tokenizer = plan.sample_tokens, plan.data, plan.source.tokenizer
    seq_len = data.train.seq_len
    pairs = prompts_of(data.heldout or data.train, 3, seq_len - min(tokens, seq_len // 2))
    shape, stop = (micro_batch_size, seq_len), set(stop_tokens(tokenizer))
    prompts = [prompt for prompt, _ in pairs]
    answers = generate(
        next_tokens, prompts, shape, max_docs=data.train.max_docs, tokens=tokens, stop=stop
    )
    if pairs:
        log.say(f"\n{'held-out' if data.heldout else 'training'} documents:")
    for shown in answers_in_words(tokenizer, pairs, answers):
        lines = [f"{name:<9}{' '.join(text.split())}" for name, text in shown.items()]
        log.say("\n" + "\n".join(lines))


def generate(
    ask: Callable,
    prompts: list[list[int]],
    shape: tuple[int, int],
    max_docs: int,
    tokens: int,
    stop: set[int],
) -> list[list[int]]:
    """Up to `tokens` more tokens for each prompt, greedily, ending at a token of `stop`: training's
    forward, without a cache, so that it works with any parallelism.

    ask(batch, index) -> int64 [B]: the most likely next tokens at the flat positions `index`, the
    same on every rank. shape (B, S) and max_docs: as in training, since a pipeline fixes them."""
    B, S = shape
    answers = []
    for first in range(0, len(prompts), B):
        rows = [list(p) for p in prompts[first : first + B]]
        growing = set(range(len(rows)))
        for _ in range(tokens):
            if not growing:
                break
            batch = _batch(rows, seq_len=S, max_docs=max_docs, count=B)
            index = torch.tensor([i * S + len(r) - 1 for i, r in enumerate(rows)])
            for i, token in enumerate(ask(batch, index).tolist()):
                if token in stop or len(rows[i]) == S:
                    growing.discard(i)
                elif i in growing:
                    rows[i].append(token)
        answers += rows
    return [row[len(prompt) :] for row, prompt in zip(answers, prompts, strict=True)]


def _batch(rows: list[list[int]], seq_len: int, max_docs: int, count: int) -> Batch:
    rows = rows + [[]] * (count - len(rows))
    ids = torch.tensor([row + [0] * (seq_len - len(row)) for row in rows])
    lengths = [[n for n in (len(row), seq_len - len(row)) if n] for row in rows]  # and of padding
    cu = torch.from_numpy(bounds_of(lengths, seq_len, max_docs))
    labels = torch.full_like(ids, IGNORE_INDEX)
    return Batch(ids, labels, position_ids(cu, (count, seq_len)), cu)
