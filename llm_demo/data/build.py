"""Turns data files into documents of at most seq_len tokens, streamed to flat files.

Only a few numpy tables grow with the data: ten million examples need no ten million Python objects.
The flat files replace a datasets.Dataset: a document is one slice of a memory map, where an Arrow
list column costs a lookup and a conversion."""

import itertools
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llm_demo.core.errors import UserError
from llm_demo.data.bad_rows import Bad
from llm_demo.data.codec import Codec, has_variable
from llm_demo.data.documents import (
    FLAT,
    MOST_LINES,
    SHARE,
    STEP,
    File,
    Stats,
    count_left_out,
    open_flat,
)
from llm_demo.data.labels import encode
from llm_demo.data.readers import place_of, read_rows
from llm_demo.data.records import TOOLS, RowFormat, keys_of, open_rows
from llm_demo.data.sources import hub_parts
from llm_demo.data.turns import Sample
from llm_demo.machine.text import counted, progress

ROWS_AT_A_TIME = 1000  # examples tokenised in one call


def write_documents(folder: str, files: list[str], codec: Codec, flags, limit: int) -> None:
    """Write to `folder` the tokens of all documents, one after another, which of them are learnt,
    documents.npy, int64 [4, documents]: tokens, learnt ones, number of the file, and line or row in
    it, and meta.json. flags, limit: see load_rows. Raises UserError if no example has anything to
    learn."""
    stats = Stats()
    documents = _to_flat(folder, _tokenise(files, codec, flags, stats))
    seq_len, lengths = flags.seq_len, documents[0]
    if not seq_len and len(lengths):
        seq_len, stats.seq_len_why = choose_seq_len(lengths, limit)
    if lengths.max(initial=0) > seq_len:
        pieces = _in_pieces(open_flat(folder), documents, seq_len, flags.overlong, stats)
        documents = _to_flat(folder, pieces)
    if not documents.size:
        reasons = itertools.islice(stats.skipped.items(), MOST_LINES)
        why = "; ".join(f"{s.rows:,} x {reason} ({stats.first(s)})" for reason, s in reasons)
        raise UserError(f"{', '.join(files)}: all examples are skipped: {why}")
    np.save(f"{folder}/documents.npy", documents)
    tokenizer = codec.tokenizer
    pads = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None]
    with open(f"{folder}/meta.json", "w", encoding="utf-8") as file:
        json.dump({"seq_len": seq_len, "pad_id": pads[0], "stats": stats}, file, default=vars)


def choose_seq_len(lengths: np.ndarray, limit: int) -> tuple[int, str]:
    """(seq_len, reason): enough slots for 99 % of the documents, rounded up to a multiple of 128,
    at most `limit`."""
    holds = int(np.quantile(lengths, SHARE, method="inverted_cdf"))
    seq_len = -(-holds // STEP) * STEP
    why = f"{SHARE:.0%} of {counted(len(lengths), 'document')} have at most {holds:,} tokens"
    if seq_len <= limit:
        return seq_len, f"{why}, rounded up to a multiple of {STEP}"
    return limit, f"{why}; limited to {limit:,}"


def _to_flat(folder: str, samples: Iterator[tuple[Sample, int, int]]) -> np.ndarray:
    """Write documents, each with the numbers of its file and row, to new flat files; earlier ones
    may still be mapped. Return their table, see `_write_documents`."""
    paths = [Path(folder, name) for name in FLAT]
    for path in paths:
        path.unlink(missing_ok=True)
    table = array("q")  # not a list: there may be millions
    with open(paths[0], "wb") as tokens, open(paths[1], "wb") as learnt:
        for sample, file, row in samples:
            tokens.write(sample.ids)
            learnt.write(sample.is_label)
            table.extend((len(sample.ids), int(sample.is_label.sum()), file, row))
    return np.array(table, np.int64).reshape(-1, 4).T


def _tokenise(
    files: list[str], codec: Codec, flags, stats: Stats
) -> Iterator[tuple[Sample, int, int]]:
    """Yield all documents, uncut, each with the numbers of its file and row."""
    size = sum(os.path.getsize(path) for path in files if not hub_parts(path))
    with progress(what="tokenising", total=size, unit="B") as bar:
        for number, path in enumerate(files):
            place = place_of(path)
            template = None if codec.train_on_prompt else codec.template  # see to_record
            row_format, rows = open_rows(read_rows(path, bar), f"{path}{place}", flags, template)
            file = File(path, row_format.format, row_format.keys, row_format.why, place)
            stats.files.append(file)
            for chunk in iter(lambda rows=rows: list(itertools.islice(rows, ROWS_AT_A_TIME)), []):
                file.rows += len(chunk)
                for n, _, record in chunk:
                    if isinstance(record, Bad):
                        count_left_out(stats.skipped, record, number, n)
                good = [each for each in chunk if not isinstance(each[2], Bad)]
                encoded = encode(codec, [record for _, _, record in good])
                for (n, row, record), (sample, reasons) in zip(good, encoded, strict=True):
                    _count_keys(file, row, row_format, codec.template)
                    if isinstance(sample, str):
                        count_left_out(stats.skipped, sample, number, n)
                        continue
                    for reason, turns in (+reasons).items():
                        count_left_out(stats.turns, reason, number, n, turns)
                    stats.note_system(record)
                    yield sample, number, n


def _count_keys(file: File, row: dict, row_format: RowFormat, template: str) -> None:
    """Count an example under each optional key that it uses and each key that nothing uses."""
    used, unused = keys_of(row, row_format)
    if not has_variable(template, "tools"):
        unused += [key for key in used if key in TOOLS]
    file.used.update(key for key in used if key not in unused)
    file.unused.update(unused)


def _in_pieces(
    flat: tuple, documents: np.ndarray, seq_len: int, overlong: str, stats: Stats
) -> Iterator[tuple[Sample, int, int]]:
    """Yield documents of at most seq_len tokens, pieces of those in the flat files, as `_tokenise`
    does. A piece without anything to learn is left out."""
    tokens, is_label = flat
    stats.cut = Counter()
    begin = 0
    for document in documents.T:
        length, learnt, file, row = document.tolist()
        whole = Sample(tokens[begin : begin + length], is_label[begin : begin + length])
        begin += length
        if length <= seq_len:
            yield whole, file, row
            continue
        if overlong == "drop":
            count_left_out(stats.skipped, "longer than seq_len", file, row)
            continue
        pieces = []
        for at in range(0, seq_len if overlong == "truncate" else length, seq_len):
            part = slice(at, at + seq_len)
            piece = Sample(whole.ids[part].copy(), whole.is_label[part].copy())
            piece.is_label[0] = False  # nothing in its piece predicts it
            if piece.is_label.any():
                pieces.append(piece)
        if not pieces:
            count_left_out(stats.skipped, "nothing to learn within seq_len", file, row)
            continue
        lost = length - sum(len(piece.ids) for piece in pieces)
        not_learnt = learnt - sum(int(piece.is_label.sum()) for piece in pieces)
        stats.cut.update({overlong: 1, "tokens": lost, "learnt": not_learnt})
        for piece in pieces:
            yield piece, file, row
