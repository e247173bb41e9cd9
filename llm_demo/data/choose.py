"""Chooses documents of packs: splits off held-out ones, and mixes sources by weight."""

import dataclasses
import itertools

import numpy as np

from llm_demo.core.errors import UserError
from llm_demo.core.rows import Packs
from llm_demo.data.packing import best_fit

SPLIT_SEED = 0  # not --seed, so that runs with other seeds have the same held-out documents


def split_off(packs: Packs, fraction: float, pack: bool) -> tuple[Packs, Packs]:
    """(packs of the other documents, packs of a random `fraction` of them). A document that was
    split into pieces stays whole. pack: as in load_packs. Raises UserError if one part is empty."""
    origin = np.stack((packs.doc_file, packs.doc_row))
    _, document_of = np.unique(origin, axis=1, return_inverse=True)
    document_of = document_of.reshape(-1)
    total = int(document_of.max()) + 1
    chosen = round(total * fraction)
    if not 0 < chosen < total:
        raise UserError(
            f"--eval_fraction {fraction:g} of {total:,} documents leaves none to "
            f"{'train' if chosen else 'evaluate'} on"
        )
    held_out = np.zeros(total, bool)
    held_out[np.random.default_rng(SPLIT_SEED).permutation(total)[:chosen]] = True
    held_out = held_out[document_of]
    parts = (np.flatnonzero(~held_out), np.flatnonzero(held_out))
    return tuple(_repacked(packs, [_rows_of(packs, part, pack)]) for part in parts)


def mix(
    packs: Packs, weights: list[float], seed: int, pack: bool, epochs: int, rows: int = 0
) -> Packs:
    """Packs of several passes, each of other documents: weight times as many of each file as these
    packs have. weights: of each file. Passes are added until there are `epochs` and `rows` rows.

    The documents of a file are dealt in a random order, then in another one, and so on; pass e gets
    the next share. So a weight of 2 takes each document twice a pass, and 0.3 takes another 30 % in
    each of three passes. A pass depends on seed and number alone, so a longer run has the same."""
    available, passes, n_rows = np.sort(packs.row_docs), [], 0
    files = [available[packs.doc_file[available] == n] for n in range(len(weights))]
    for epoch in itertools.count():
        documents = [
            _dealt(documents, weight, [seed, n], epoch)
            for n, (documents, weight) in enumerate(zip(files, weights, strict=True))
        ]
        chosen = np.sort(np.concatenate(documents))
        if not len(chosen):
            raise UserError(f"the weights {weights} of --train_json leave no document to train on")
        passes.append(_rows_of(packs, chosen, pack))
        n_rows += len(passes[-1][1]) - 1
        if epoch + 1 >= epochs and n_rows >= rows:
            return _repacked(packs, passes)


def _dealt(documents: np.ndarray, weight: float, seed: list[int], epoch: int) -> np.ndarray:
    """The share of a file's documents that a pass takes."""
    n = len(documents)
    begin, end = (round(e * weight * n) for e in (epoch, epoch + 1))
    parts = []
    for deal in range(begin // max(1, n), -(-end // max(1, n))):
        order = np.random.default_rng([*seed, deal]).permutation(documents)
        parts.append(order[max(0, begin - deal * n) : end - deal * n])
    return np.concatenate([documents[:0], *parts])


def _rows_of(packs: Packs, documents: np.ndarray, pack: bool) -> tuple[np.ndarray, np.ndarray]:
    """(documents row after row, where each row begins) of one pass."""
    lengths = np.diff(packs.doc_start)[documents]
    row_of = best_fit(lengths, packs.seq_len) if pack else np.arange(len(documents))
    starts = np.append(0, np.cumsum(np.bincount(row_of)))
    return documents[np.argsort(row_of, kind="stable")], starts


def _repacked(packs: Packs, passes: list[tuple[np.ndarray, np.ndarray]]) -> Packs:
    """Packs of these passes, each from `_rows_of`."""
    row_docs, row_start, begins = [], [np.zeros(1, np.int64)], [0]
    for docs, starts in passes:
        row_docs.append(docs)
        row_start.append(row_start[-1][-1] + starts[1:])
        begins.append(begins[-1] + len(starts) - 1)
    row_docs, row_start = np.concatenate(row_docs), np.concatenate(row_start)
    lengths, learnt = np.diff(packs.doc_start), np.append(0, np.cumsum(packs.is_label))
    of_docs = learnt[packs.doc_start[1:]] - learnt[packs.doc_start[:-1]]
    tokens, labels = (np.add.reduceat(x[row_docs], row_start[:-1]) for x in (lengths, of_docs))
    n_docs = np.diff(row_start) + (tokens < packs.seq_len)
    stats = packs.stats | {
        "documents": len(row_docs),
        "packed_rows": len(n_docs),
        "tokens": int(tokens.sum()),
        "label_tokens": int(labels.sum()),
        "fill": float(tokens.sum() / (len(n_docs) * packs.seq_len)),
    }
    return dataclasses.replace(
        packs, row_docs=row_docs, row_start=row_start, token_counts=tokens, label_counts=labels,
        max_docs=int(n_docs.max()), passes=np.array(begins) if len(passes) > 1 else None,
        stats=stats,
    )  # fmt: skip
