"""Builds rows of exactly seq_len slots from data files, streamed to flat files.

Only a few numpy tables grow with the data: ten million rows need no ten million Python objects."""

import contextlib
import functools
import itertools
import json
import os
import re
import zlib
from array import array
from collections import Counter
from typing import NamedTuple

import numpy as np

from llm_demo.data.batch import Record, Sample
from llm_demo.data.labels import Codec, encode
from llm_demo.data.packing import best_fit, choose_seq_len, fit
from llm_demo.data.records import (
    Layout,
    file_layout,
    read_rows,
    size_of,
    to_record,
    unused_keys,
    used_keys,
)
from llm_demo.errors import UserError
from llm_demo.progress import progress

CHUNK = 1000  # rows tokenised at a time

TURN_KEYS = {"role", "content", "tool_calls", "reasoning_content"}  # always used


def build(
    folder: str,
    files: list[str],
    codec: Codec,
    reading: tuple,
    seq_len: int,
    pack: bool,
    overlong: str,
    limit: int = 0,
) -> None:
    """Write to `folder` everything data.Packs reads: tokens and learnt flags, one document after
    another, the table of rows, and meta.json. reading: (data_format, input_key, target_key).
    seq_len 0: see choose_seq_len.

    Flat files replace a datasets.Dataset: a document is one slice of a memory map, where an Arrow
    list column costs a lookup and a conversion. Raises UserError if no row has anything to learn.
    """
    documents, stats = _tokenise(folder, files, codec, reading)
    if not seq_len and len(documents.lengths):
        seq_len, stats["seq_len_why"] = choose_seq_len(documents.lengths, limit)
    if documents.lengths.max(initial=0) > seq_len:
        documents = _cut(folder, documents, files, seq_len, overlong, stats)
    lengths = documents.lengths
    if not len(lengths):
        first = stats["first_skipped"]
        why = "; ".join(
            f"{n:,} x {reason} (first {first[reason]})" for reason, n in stats["skipped"].items()
        )
        raise UserError(f"{', '.join(files)}: all {stats['rows_read']:,} rows were skipped: {why}")
    row_of = best_fit(lengths, seq_len) if pack else np.arange(len(lengths))
    docs_in = np.bincount(row_of)
    token_counts = np.bincount(row_of, weights=lengths).astype(np.int64)
    tables = {
        "doc_start": np.append(0, np.cumsum(lengths)),
        "row_docs": np.argsort(row_of, kind="stable"),
        "row_start": np.append(0, np.cumsum(docs_in)),
        "token_counts": token_counts,
        "label_counts": np.bincount(row_of, weights=documents.labels).astype(np.int64),
    }
    for name, table in tables.items():
        np.save(f"{folder}/{name}.npy", table)
    tokenizer = codec.tokenizer
    pads = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None]
    stats |= {
        "documents": len(lengths),
        "packed_rows": len(docs_in),
        "tokens": int(lengths.sum()),
        "label_tokens": int(documents.labels.sum()),
        "fill": float(lengths.sum() / (len(docs_in) * seq_len)),
    }
    meta = {
        "seq_len": seq_len,
        "pad_id": pads[0],
        "max_docs": int((docs_in + (token_counts < seq_len)).max()),
        "stats": stats,
    }
    write_meta(folder, meta)


def write_meta(folder: str, meta: dict) -> None:
    """Write meta.json, with the size and CRC-32 of each file and a CRC-32 of its own contents."""
    files = {name: _fingerprint(f"{folder}/{name}") for name in sorted(os.listdir(folder))}
    body = json.dumps({"meta": meta, "files": files})
    with open(f"{folder}/meta.json", "w") as file:
        json.dump({"crc32": zlib.crc32(body.encode()), **json.loads(body)}, file, indent=1)


def read_meta(folder: str) -> dict:
    """Contents of meta.json, after verifying every file of the pack. Raises OSError or ValueError
    if one is damaged: a pack with zeroed tokens would otherwise be trained on."""
    with open(f"{folder}/meta.json") as file:
        found = json.load(file)
    try:
        crc = found.pop("crc32")
        same = crc == zlib.crc32(json.dumps(found).encode())
    except (AttributeError, KeyError, TypeError):
        same = False
    if not same:
        raise ValueError("meta.json has a wrong checksum")
    for name, (size, crc) in found["files"].items():
        if os.path.getsize(f"{folder}/{name}") != size:
            raise ValueError(f"{name} should have {size:,} bytes")
        if _fingerprint(f"{folder}/{name}")[1] != crc:
            raise ValueError(f"{name} has a wrong checksum")
    return found["meta"]


def _fingerprint(path: str) -> list[int]:
    crc = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return [size, crc]


class Documents(NamedTuple):
    """The documents in the flat files, in order, and their origin."""

    lengths: np.ndarray  # int64 [documents], tokens
    labels: np.ndarray  # int64 [documents], label tokens
    file: np.ndarray  # int64 [documents], file number
    row: np.ndarray  # int64 [documents], line or row in that file


def _tokenise(folder, files, codec, reading) -> tuple[Documents, dict]:
    """Write all documents, uncut, to the flat files; return their table and stats."""
    lengths, labels = array("i"), array("i")  # not lists: there may be millions
    file_of, row_of = array("i"), array("q")
    skipped, first_skipped, described = Counter(), {}, []
    turns, rows_with, first_turns = Counter(), Counter(), {}
    size = sum(map(size_of, files))
    with (
        open(f"{folder}/tokens.int32", "wb") as tokens_out,
        open(f"{folder}/learnt.bool", "wb") as learnt_out,
        progress(what="tokenising", total=size, unit="B") as bar,
    ):
        for number, path in enumerate(files):
            rows, layout, n_rows = read_rows(path, bar), None, 0
            keys = {"used": Counter(), "unused": Counter(), "unused_in_turns": Counter()}
            while chunk := list(itertools.islice(rows, CHUNK)):
                layout = layout or file_layout(chunk[0][1], chunk[0][0], *reading)
                n_rows += len(chunk)
                records, not_learnt = [], []
                for where, row in chunk:
                    records.append(to_record(row, layout, where))
                    _count_keys(keys, row, layout, records[-1], codec.template)
                samples = encode(codec, records, not_learnt)
                for (where, _), sample, left in zip(chunk, samples, not_learnt, strict=True):
                    if isinstance(sample, str):
                        skipped[sample] += 1
                        first_skipped.setdefault(sample, where)
                        continue
                    for reason, n in (+left).items():
                        turns[reason] += n
                        rows_with[reason] += 1
                        first_turns.setdefault(reason, where)
                    tokens_out.write(sample.ids)
                    learnt_out.write(sample.learnt)
                    lengths.append(len(sample.ids))
                    labels.append(int(sample.learnt.sum()))
                    file_of.append(number)
                    row_of.append(int(where.rsplit(":", 1)[1]))
            described.append({"path": path, **layout._asdict(), "rows": n_rows, **keys})
    stats = {
        "rows_read": sum(layout["rows"] for layout in described),
        "skipped": dict(skipped),
        "first_skipped": first_skipped,
        "turns": {
            reason: {"turns": n, "rows": rows_with[reason], "first": first_turns[reason]}
            for reason, n in turns.items()
        },
        "truncated": 0,
        "split": 0,
        "files": described,
    }
    tables = (np.array(found, np.int64) for found in (lengths, labels, file_of, row_of))
    return Documents(*tables), stats


def _count_keys(keys: dict, row: dict, layout: Layout, record: Record, template: str) -> None:
    """Count a row under each optional key that it uses and each key that nothing uses."""
    used = used_keys(row, layout)
    unseen = [key for key in used if key == "tools" and not _names(template, key)]
    keys["used"].update(key for key in used if key not in unseen)
    keys["unused"].update([*unused_keys(row, layout), *unseen])
    found = {key for m in record.messages or () for key, value in m.items() if value is not None}
    found = sorted(found - TURN_KEYS)
    keys["unused_in_turns"].update(key for key in found if not _names(template, key))


@functools.cache
def _names(template: str, key: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", template) is not None


def _cut(
    folder, documents: Documents, files, seq_len: int, overlong: str, stats: dict
) -> Documents:
    """Rewrite the flat files with documents of at most seq_len tokens; return their table. Adds the
    numbers of cut and dropped documents to stats."""
    flat = {
        "tokens.int32": np.memmap(f"{folder}/tokens.int32", np.int32, "r"),
        "learnt.bool": np.memmap(f"{folder}/learnt.bool", bool, "r"),
    }
    cut, at, done, kept = Counter(), 0, 0, []
    starts = np.append(0, np.cumsum(documents.lengths))
    with contextlib.ExitStack() as stack:
        outs = [stack.enter_context(open(f"{folder}/{name}.cut", "wb")) for name in flat]

        def copy_until(document: int) -> None:
            for out, source in zip(outs, flat.values(), strict=True):
                out.write(source[at : starts[document]])
            kept.append(Documents(*(column[done:document] for column in documents)))

        for i in np.flatnonzero(documents.lengths > seq_len).tolist():
            copy_until(i)
            at, done = starts[i + 1], i + 1
            sample = Sample(*(source[starts[i] : at].copy() for source in flat.values()))
            pieces = fit(sample, seq_len, overlong, cut)
            if isinstance(pieces, str):
                stats["skipped"][pieces] = stats["skipped"].get(pieces, 0) + 1
                where = f"{files[documents.file[i]]}:{documents.row[i]}"
                stats["first_skipped"].setdefault(pieces, where)
                continue
            for piece in pieces:
                for out, part in zip(outs, piece, strict=True):
                    out.write(part)
                counts = (len(piece.ids), piece.learnt.sum(), documents.file[i], documents.row[i])
                kept.append(Documents(*(np.array([n], np.int64) for n in counts)))
        copy_until(len(documents.lengths))
    for name in flat:
        os.replace(f"{folder}/{name}.cut", f"{folder}/{name}")
    stats |= {"truncated": cut["truncate"], "split": cut["split"]}
    return Documents(*map(np.concatenate, zip(*kept, strict=True)))
