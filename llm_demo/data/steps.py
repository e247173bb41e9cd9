"""Which rows an optimizer step trains on, and their tensors."""

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from llm_demo.data.batch import Batch
from llm_demo.data.packs import Packs


def step_rows(
    n_rows: int, seed: int, step: int, global_batch: int, n_total: int | None = None
) -> np.ndarray:
    """Rows of optimizer step `step` (from 0), int64 [global_batch]; pure, whoever asks.

    The stream is one seeded permutation of all rows an epoch, end to end; step k takes positions
    k * global_batch and on. Ranks and micro-batches slice the result, so no split of it changes a
    step, and resuming is counting. From stream position n_total on, rows are -1: see Packs.row.
    """
    at = step * global_batch + np.arange(global_batch)
    rows = np.empty(global_batch, np.int64)
    for epoch in range(at[0] // n_rows, at[-1] // n_rows + 1):
        here = at // n_rows == epoch
        rows[here] = _permutation(n_rows, seed, epoch)[at[here] % n_rows]
    if n_total is not None:
        rows[at >= n_total] = -1
    return rows


@functools.lru_cache(maxsize=2)  # a step may end one epoch and begin the next
def _permutation(n_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n_rows)


def collate(packs: Packs, rows, max_docs: int) -> Batch:
    """Tensors of these rows (see Batch). max_docs, at least packs.max_docs, fixes the shape of
    cu_seqlens: its end repeats B * S, which reads as documents of no length.
    """
    ids, labels, lengths = zip(*(packs.row(int(row)) for row in rows), strict=True)
    for row, found in zip(rows, lengths, strict=True):
        if len(found) > max_docs:
            raise ValueError(f"row {row} holds {len(found)} documents, max_docs is {max_docs}")
    ids, labels = np.stack(ids), np.stack(labels)
    bounds = _bounds(lengths, packs.seq_len, max_docs)
    positions = np.arange(ids.size) - np.repeat(bounds[:-1], np.diff(bounds))
    return Batch(*map(torch.from_numpy, (ids, labels, positions.reshape(ids.shape), bounds)))


def boundaries(packs: Packs, rows, max_docs: int) -> torch.Tensor:
    """cu_seqlens of these rows, as in Batch, without reading a token."""
    lengths = [packs.lengths(int(row)) for row in rows]
    return torch.from_numpy(_bounds(lengths, packs.seq_len, max_docs))


def _bounds(lengths: Sequence[list[int]], seq_len: int, max_docs: int) -> np.ndarray:
    ends = list(itertools.accumulate(itertools.chain(*lengths)))
    bounds = np.full(len(lengths) * max_docs + 1, len(lengths) * seq_len, np.int32)
    bounds[: len(ends) + 1] = [0, *ends]
    return bounds
