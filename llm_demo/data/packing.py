"""Packs whole documents into rows of equal length: cut what is too long, then best fit."""

from bisect import bisect_left, insort
from collections import Counter

import numpy as np

from llm_demo.data.records import Sample
from llm_demo.job.text import progress

# default seq_len: fits SHARE of the documents, a multiple of STEP, at most LONGEST_DEFAULT
SHARE, STEP, LONGEST_DEFAULT = 0.99, 128, 4096


def choose_seq_len(lengths: np.ndarray, limit: int) -> tuple[int, str]:
    """(seq_len, reason): enough slots for 99 % of the documents, rounded up to a multiple of 128,
    at most `limit`."""
    holds = int(np.quantile(lengths, SHARE, method="inverted_cdf"))
    seq_len = -(-holds // STEP) * STEP
    n = len(lengths)
    have = "the only document has" if n == 1 else f"{SHARE:.0%} of {n:,} documents have"
    why = f"{have} at most {holds:,} tokens"
    if seq_len <= limit:
        return seq_len, f"{why}, rounded up to a multiple of {STEP}"
    by = "by default" if limit == LONGEST_DEFAULT else "by the model"
    return limit, f"{why}; limited to {limit:,} {by}"


def fit(sample: Sample, seq_len: int, overlong: str, cut: Counter) -> list[Sample] | str:
    """Pieces of at most seq_len tokens with something to learn, or why there are none. cut: counts
    the documents that are cut and the tokens that are lost, see Stats."""
    if len(sample.ids) <= seq_len:
        return [sample]
    if overlong == "drop":
        return "longer than seq_len"
    end = seq_len if overlong == "truncate" else len(sample.ids)
    pieces = []
    for at in range(0, end, seq_len):
        piece = Sample(*(part[at : min(at + seq_len, end)].copy() for part in sample))
        piece.is_label[0] = False  # nothing in its piece predicts it
        if piece.is_label.any():
            pieces.append(piece)
    if not pieces:
        return "nothing to learn within seq_len"
    cut[overlong] += 1
    cut["tokens"] += len(sample.ids) - sum(len(piece.ids) for piece in pieces)
    learnt = sum(int(piece.is_label.sum()) for piece in pieces)
    cut["learnt"] += int(sample.is_label.sum()) - learnt
    return pieces


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
    """The rows of one pass over these documents: (their numbers row after row, where each row
    begins). pack: several documents in a row. doc_start: of all documents, see Packs."""
    lengths = np.diff(doc_start)[documents]
    row_of = best_fit(lengths, seq_len) if pack else np.arange(len(documents))
    starts = np.append(0, np.cumsum(np.bincount(row_of)))
    return documents[np.argsort(row_of, kind="stable")], starts


def tables_of(
    doc_start: np.ndarray, doc_labels: np.ndarray, seq_len: int, passes: list[tuple]
) -> dict[str, object]:
    """The fields of Packs that describe the rows of these passes, each from rows_of. doc_start,
    doc_labels: see Packs."""
    ends = np.cumsum([starts[-1] for _, starts in passes])
    parts = [starts[:-1] + end - starts[-1] for (_, starts), end in zip(passes, ends, strict=True)]
    row_docs = np.concatenate([documents for documents, _ in passes])
    row_start = np.append(np.concatenate(parts), ends[-1])
    tokens, labels = (
        np.add.reduceat(counts[row_docs], row_start[:-1])
        for counts in (np.diff(doc_start), doc_labels)
    )
    begins = np.cumsum([0, *(len(starts) - 1 for _, starts in passes)])
    return {
        "row_docs": row_docs,
        "row_start": row_start,
        "token_counts": tokens,
        "label_counts": labels,
        "max_docs": int((np.diff(row_start) + (tokens < seq_len)).max()),
        "passes": begins if len(passes) > 1 else None,
    }
