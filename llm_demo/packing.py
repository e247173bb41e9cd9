"""Samples -> rows of exactly seq_len slots, streamed to flat files. Only a few numpy tables grow
with the data: ten million rows need no ten million Python objects.
"""

import itertools
import json
import os
from array import array
from bisect import bisect_left, insort
from collections import Counter

import numpy as np

from llm_demo.errors import UserError
from llm_demo.labels import Codec, Sample, encode
from llm_demo.progress import progress
from llm_demo.records import file_layout, read_rows, to_record

CHUNK = 1000  # rows tokenised at a time
OVERLONG = ("truncate", "split", "drop")


def build(
    folder: str,
    files: list[str],
    codec: Codec,
    reading: tuple,
    seq_len: int,
    pack: bool,
    overlong: str,
) -> None:
    """Writes into `folder` all that data.Packs reads: tokens and learnt flags, document after
    document, the table of rows, and meta.json. `reading`: data_format, input_key, target_key.

    Own flat files, not a datasets.Dataset: a document is then one slice of a memory map, where an
    Arrow list column costs a look-up and a conversion. UserError if no row has anything to learn.
    """
    lengths, labels, stats = _tokenise(folder, files, codec, reading, seq_len, overlong)
    if not len(lengths):
        first = stats["first_skipped"]
        why = "; ".join(
            f"{n:,} x {reason} (first {first[reason]})" for reason, n in stats["skipped"].items()
        )
        raise UserError(
            f"{', '.join(files)}: none of {stats['rows_read']:,} rows can be learnt: {why}"
        )
    row_of = best_fit(lengths, seq_len) if pack else np.arange(len(lengths))
    docs_in = np.bincount(row_of)
    token_counts = np.bincount(row_of, weights=lengths).astype(np.int64)
    tables = {
        "doc_start": np.append(0, np.cumsum(lengths)),
        "row_docs": np.argsort(row_of, kind="stable"),
        "row_start": np.append(0, np.cumsum(docs_in)),
        "token_counts": token_counts,
        "label_counts": np.bincount(row_of, weights=labels).astype(np.int64),
    }
    for name, table in tables.items():
        np.save(f"{folder}/{name}.npy", table)
    tokenizer = codec.tokenizer
    pads = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None]
    stats |= {
        "documents": len(lengths),
        "packed_rows": len(docs_in),
        "tokens": int(lengths.sum()),
        "label_tokens": int(labels.sum()),
        "fill": float(lengths.sum() / (len(docs_in) * seq_len)),
    }
    meta = {
        "seq_len": seq_len,
        "pad_id": pads[0],
        "max_docs": int((docs_in + (token_counts < seq_len)).max()),
        "stats": stats,
    }
    with open(f"{folder}/meta.json", "w") as file:
        json.dump(meta, file, indent=1)


def _tokenise(
    folder, files, codec, reading, seq_len, overlong
) -> tuple[np.ndarray, np.ndarray, dict]:
    """Appends all documents to the flat files; their tokens and label tokens (int64), and stats."""
    lengths, labels = array("i"), array("i")  # not lists: millions of documents
    cut, skipped, first_skipped, layouts = Counter(), Counter(), {}, []
    size = sum(map(os.path.getsize, files))
    with (
        open(f"{folder}/tokens.int32", "wb") as tokens_out,
        open(f"{folder}/learnt.bool", "wb") as learnt_out,
        progress(what="tokenising", total=size, unit="B") as bar,
    ):
        for path in files:
            rows, layout, n_rows = read_rows(path, bar), None, 0
            while chunk := list(itertools.islice(rows, CHUNK)):
                layout = layout or file_layout(chunk[0][1], chunk[0][0], *reading)
                n_rows += len(chunk)
                samples = encode(codec, [to_record(row, layout, where) for where, row in chunk])
                for (where, _), sample in zip(chunk, samples, strict=True):
                    pieces = (
                        sample if isinstance(sample, str) else fit(sample, seq_len, overlong, cut)
                    )
                    if isinstance(pieces, str):
                        skipped[pieces] += 1
                        first_skipped.setdefault(pieces, where)
                        continue
                    for ids, learnt in pieces:
                        tokens_out.write(ids)
                        learnt_out.write(learnt)
                        lengths.append(len(ids))
                        labels.append(int(learnt.sum()))
            layouts.append({"path": path, **layout._asdict(), "rows": n_rows})
    stats = {
        "rows_read": sum(layout["rows"] for layout in layouts),
        "skipped": dict(skipped),
        "first_skipped": first_skipped,
        "truncated": cut["truncate"],
        "split": cut["split"],
        "files": layouts,
    }
    return np.array(lengths, np.int64), np.array(labels, np.int64), stats


def fit(sample: Sample, seq_len: int, overlong: str, cut: Counter) -> list[Sample] | str:
    """Pieces of at most seq_len tokens with something to learn, or why there are none."""
    if len(sample.ids) <= seq_len:
        return [sample]
    if overlong == "drop":
        return "longer than seq_len"
    end = seq_len if overlong == "truncate" else len(sample.ids)
    ends = range(seq_len, end + seq_len, seq_len)
    pieces = [Sample(*(part[at - seq_len : min(at, end)] for part in sample)) for at in ends]
    for piece in pieces:
        piece.learnt[0] = False  # nothing in its piece predicts it
    pieces = [piece for piece in pieces if piece.learnt.any()]
    if not pieces:
        return "nothing to learn within seq_len"
    cut[overlong] += 1
    return pieces


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Row of every document, int64 [documents]: longest first, each into the fullest row it fits.

    Exactly best-fit decreasing, but a whole group of equal lengths at a time: the fullest row that
    fits a document of n tokens stays the fullest that fits the next one, until less than n slots
    are left. So a million documents take a fraction of a second. Lengths must be in 1..capacity.
    """
    row_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    n_of = np.bincount(lengths, minlength=capacity + 1)
    free: dict[int, list[np.ndarray]] = {}  # free slots -> the rows that have them, in batches
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
