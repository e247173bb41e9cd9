"""Greedy answers from a model in training: training forward, no cache, any parallelism."""

import itertools
from collections.abc import Callable

import numpy as np
import torch

from llm_demo.core.rows import IGNORE_INDEX, Batch, Packs, bounds_of, position_ids


def prompts_of(packs: Packs, count: int, most: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) token lists of the file's first `count` documents with prompts of at most
    `most` tokens. An answer is the last run of labels with such a prompt: a conversation's last
    learnt turn, after the turns before it as they are in the file."""
    pairs = []
    for start, end in itertools.pairwise(packs.doc_start.tolist()):
        if len(pairs) == count:
            break
        ids = packs.tokens[start:end]
        where = packs.is_label[start + 1 : end].nonzero()[0] + 1  # nothing predicts a first token
        runs = np.split(where, (np.diff(where) > 1).nonzero()[0] + 1)
        if runs := [run for run in runs if len(run) and run[0] <= most]:
            pairs.append((ids[: runs[-1][0]].tolist(), ids[runs[-1]].tolist()))
    return pairs


def generate(
    ask: Callable,
    prompts: list[list[int]],
    shape: tuple[int, int],
    max_docs: int,
    tokens: int,
    stop,
) -> list[list[int]]:
    """Up to `tokens` more tokens for each prompt, greedily, ending at a token of `stop`.

    ask(batch, index) -> int64 [B]: the most likely next tokens at the flat positions `index`, the
    same on every rank. shape (B, S) and max_docs: as in training, since a pipeline fixes them."""
    B, S = shape
    answers = []
    for first in range(0, len(prompts), B):
        rows = [list(p) for p in prompts[first : first + B]]
        done = [False] * len(rows)
        lengths = [len(r) for r in rows]
        for _ in range(tokens):
            if all(done):
                break
            batch = _batch(rows, S, max_docs, B)
            index = torch.tensor([i * S + len(r) - 1 for i, r in enumerate(rows)])
            for i, token in enumerate(ask(batch, index).tolist()):
                done[i] = done[i] or token in stop or len(rows[i]) == S
                if not done[i]:
                    rows[i].append(token)
        answers += [row[n:] for row, n in zip(rows, lengths, strict=True)]
    return answers


def _batch(rows: list[list[int]], seq_len: int, max_docs: int, count: int) -> Batch:
    rows = rows + [[]] * (count - len(rows))
    ids = torch.tensor([row + [0] * (seq_len - len(row)) for row in rows])
    lengths = [[n for n in (len(row), seq_len - len(row)) if n] for row in rows]  # and of padding
    cu = torch.from_numpy(bounds_of(lengths, seq_len, max_docs))
    labels = torch.full_like(ids, IGNORE_INDEX)
    return Batch(ids, labels, position_ids(cu, (count, seq_len)), cu)
