"""Packs documents into rows: best fit of whole ones, held-out ones split off, sources by weight."""

import dataclasses
import itertools
from bisect import bisect_left, insort

import numpy as np

from llm_demo.core.errors import UserError
from llm_demo.core.rows import Packs
from llm_demo.job.progress import progress

SPLIT_SEED = 0  # not --seed, so that runs with other seeds have the same held-out documents


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Row of each document, int64 [documents]: longest first, each into the fullest row it fits.

    Exactly best-fit decreasing, but for a whole group of equal lengths at a time: the fullest row
    that fits a document of n tokens stays the fullest until fewer than n slots are left. A million
    documents take a fraction of a second. Lengths must be in 1..capacity."""
    row_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    n_of = np.bincount(lengths, minlength=capacity + 1)
    free: dict[int, list[np.ndarray]] = {}  # free slots -> rows with that many, in batches
    sizes: list[int] = []  # the keys of `free`, sorted
    n_rows = done = 0

    def put_back(size: int, rows: np.ndarray) -> None:
        if size and len(rows):
            if size not in free:
                free[size] = []
                insort(sizes, size)
            free[size].append(rows)

    for n in progress(np.flatnonzero(n_of)[::-1].tolist(), "packing", unit="lengths"):
        documents = by_length[done : done + n_of[n]]
        done += n_of[n]
        while len(documents):
            at = bisect_left(sizes, n)
            if at < len(sizes):
                size = sizes[at]
                rows = free[size].pop()
                if not free[size]:
                    del free[size], sizes[at]
            else:
                size = capacity
                rows = np.arange(n_rows, n_rows - (-len(documents) // (size // n)))
                n_rows += len(rows)
            each = size // n
            used = min(len(rows), -(-len(documents) // each))
            placed = min(len(documents), used * each)
            row_of[documents[:placed]] = np.repeat(rows[:used], each)[:placed]
            documents = documents[placed:]
            last = placed - (used - 1) * each  # the last row may get fewer
            put_back(size - each * n, rows[: used - 1])
            put_back(size - last * n, rows[used - 1 : used])
            put_back(size, rows[used:])
    return row_of


def rows_of(
    doc_start: np.ndarray, documents: np.ndarray, seq_len: int, pack: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one pass over these documents: (their numbers row after row, how many each row
    has). pack: several documents in a row. doc_start: of all documents, see Packs."""
    lengths = np.diff(doc_start)[documents]
    row_of = best_fit(lengths, seq_len) if pack else np.arange(len(documents))
    return documents[np.argsort(row_of, kind="stable")], np.bincount(row_of)


def tables_of(
    doc_start: np.ndarray, doc_labels: np.ndarray, seq_len: int, passes: list[tuple]
) -> dict[str, object]:
    """The fields of Packs that describe the rows of these passes, each from rows_of. doc_start,
    doc_labels: see Packs."""
    row_docs, counts = map(np.concatenate, zip(*passes, strict=True))
    row_start = np.append(0, np.cumsum(counts))
    tokens, labels = (
        np.add.reduceat(n[row_docs], row_start[:-1]) for n in (np.diff(doc_start), doc_labels)
    )
    begins = np.cumsum([0, *(len(rows) for _, rows in passes)])
    return {
        "row_docs": row_docs,
        "row_start": row_start,
        "token_counts": tokens,
        "label_counts": labels,
        "max_docs": int((counts + (tokens < seq_len)).max()),
        "passes": begins if len(passes) > 1 else None,
    }


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
    return tuple(
        _of_passes(packs, [rows_of(packs.doc_start, part, packs.seq_len, pack)]) for part in parts
    )


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
        passes.append(rows_of(packs.doc_start, chosen, packs.seq_len, pack))
        n_rows += len(passes[-1][1])
        if epoch + 1 >= epochs and n_rows >= rows:
            return _of_passes(packs, passes)


def _dealt(documents: np.ndarray, weight: float, seed: list[int], epoch: int) -> np.ndarray:
    """The share of a file's documents that a pass takes."""
    n = len(documents)
    begin, end = (round(e * weight * n) for e in (epoch, epoch + 1))
    parts = []
    for deal in range(begin // max(1, n), -(-end // max(1, n))):
        order = np.random.default_rng([*seed, deal]).permutation(documents)
        parts.append(order[max(0, begin - deal * n) : end - deal * n])
    return np.concatenate([documents[:0], *parts])


def _of_passes(packs: Packs, passes: list[tuple]) -> Packs:
    """Packs of these passes, each from rows_of."""
    tables = tables_of(packs.doc_start, packs.doc_labels, packs.seq_len, passes)
    return dataclasses.replace(packs, **tables)
