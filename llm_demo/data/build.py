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

from llm_demo.core.errors import UserError
from llm_demo.data.labels import Codec, encode
from llm_demo.data.packing import best_fit, choose_seq_len, fit
from llm_demo.data.records import (
    REAL,
    Record,
    RowFormat,
    Sample,
    detect_format,
    to_record,
    unused_keys,
    used_keys,
)
from llm_demo.data.sources import hub_parts, read_rows, row_prefix
from llm_demo.job.progress import progress

ROWS_AT_A_TIME = 1000  # rows tokenised in one call

TURN_KEYS = {"role", "content", "tool_calls", "reasoning_content"}  # always used

TEXT_ARGUMENTS = "arguments of tool calls as JSON text"


def build(
    folder: str,
    files: list[str],
    codec: Codec,
    format_flags: tuple,
    seq_len: int,
    pack: bool,
    overlong: str,
    limit: int = 0,
) -> None:
    """Write to `folder` everything data.Packs reads: tokens and which of them are labels, one
    document after another, the table of rows, and meta.json. format_flags: (data_format, input_key,
    target_key). seq_len 0: see choose_seq_len.

    Flat files replace a datasets.Dataset: a document is one slice of a memory map, where an Arrow
    list column costs a lookup and a conversion. Raises UserError if no row has anything to learn.
    """
    documents, stats = _tokenise(folder, files, codec, format_flags)
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
        n = stats["rows_read"]
        rows = "the only row was" if n == 1 else f"all {n:,} rows were"
        raise UserError(f"{', '.join(files)}: {rows} skipped: {why}")
    row_of = best_fit(lengths, seq_len) if pack else np.arange(len(lengths))
    docs_in = np.bincount(row_of)
    token_counts = np.bincount(row_of, weights=lengths).astype(np.int64)
    tables = {
        "doc_start": np.append(0, np.cumsum(lengths)),
        "row_docs": np.argsort(row_of, kind="stable"),
        "row_start": np.append(0, np.cumsum(docs_in)),
        "token_counts": token_counts,
        "label_counts": np.bincount(row_of, weights=documents.label_counts).astype(np.int64),
        "doc_file": documents.file,
        "doc_row": documents.row,
    }
    for name, table in tables.items():
        np.save(f"{folder}/{name}.npy", table)
    tokenizer = codec.tokenizer
    pads = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None]
    stats |= {
        "documents": len(lengths),
        "packed_rows": len(docs_in),
        "tokens": int(lengths.sum()),
        "label_tokens": int(documents.label_counts.sum()),
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
    """Contents of meta.json, after verifying every file of the pack; stats["content"] is a checksum
    of tokens and labels. Raises OSError or ValueError if a file is damaged: a pack with zeroed
    tokens would otherwise be trained on."""
    with open(f"{folder}/meta.json") as file:
        body = json.load(file)
    crc = body.pop("crc32", None) if isinstance(body, dict) else None
    if crc != zlib.crc32(json.dumps(body).encode()):
        raise ValueError("meta.json has a wrong checksum")
    for name, (size, crc) in body["files"].items():
        if os.path.getsize(f"{folder}/{name}") != size:
            raise ValueError(f"{name} should have {size:,} bytes")
        if _fingerprint(f"{folder}/{name}")[1] != crc:
            raise ValueError(f"{name} has a wrong checksum")
    meta, sums = body["meta"], [body["files"][n][1] for n in ("tokens.int32", "learnt.bool")]
    meta["stats"]["content"] = "-".join(f"{crc:08x}" for crc in sums)
    return meta


def _fingerprint(path: str) -> list[int]:
    crc = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return [size, crc]


class Documents(NamedTuple):
    """The documents in the flat files, in order, and their origin."""

    lengths: np.ndarray  # int64 [documents], tokens
    label_counts: np.ndarray  # int64 [documents], label tokens
    file: np.ndarray  # int64 [documents], file number
    row: np.ndarray  # int64 [documents], line or row in that file


def _tokenise(folder, files, codec, format_flags) -> tuple[Documents, dict]:
    """Write all documents, uncut, to the flat files; return their table and stats."""
    documents = Documents(*map(array, "iiiq"))  # not lists: there may be millions
    skipped, first_skipped, turns, described = Counter(), {}, {}, []
    size = sum(os.path.getsize(path) for path in files if not hub_parts(path))
    with (
        open(f"{folder}/tokens.int32", "wb") as tokens_out,
        open(f"{folder}/learnt.bool", "wb") as is_label_out,
        progress(what="tokenising", total=size, unit="B") as bar,
    ):
        for number, path in enumerate(files):
            rows, row_format, n_rows = read_rows(path, bar), None, 0
            keys = {"used": Counter(), "unused": Counter(), "unused_in_turns": Counter()}
            while chunk := list(itertools.islice(rows, ROWS_AT_A_TIME)):
                row_format = row_format or detect_format(chunk[0][1], chunk[0][0], *format_flags)
                n_rows += len(chunk)
                records, not_learnt = [], []
                for where, row in chunk:
                    records.append(to_record(row, row_format, where))
                    _count_keys(keys, row, row_format, records[-1], codec.template)
                samples = encode(codec, records, not_learnt)
                for (where, _), sample, reasons in zip(chunk, samples, not_learnt, strict=True):
                    if isinstance(sample, str):
                        skipped[sample] += 1
                        first_skipped.setdefault(sample, where)
                        continue
                    for reason, n in (+reasons).items():
                        counts = turns.setdefault(reason, {"turns": 0, "rows": 0, "first": where})
                        counts["turns"] += n
                        counts["rows"] += 1
                    tokens_out.write(sample.ids)
                    is_label_out.write(sample.is_label)
                    line = int(re.search(r"\d+$", where)[0])
                    values = (len(sample.ids), int(sample.is_label.sum()), number, line)
                    for column, value in zip(documents, values, strict=True):
                        column.append(value)
            described.append({"path": path, **row_format._asdict(), "rows": n_rows, **keys})
    stats = {
        "rows_read": sum(file["rows"] for file in described),
        "skipped": dict(skipped),
        "first_skipped": first_skipped,
        "turns": turns,
        "truncated": 0,
        "split": 0,
        "files": described,
    }
    return Documents(*(np.array(column, np.int64) for column in documents)), stats


def _count_keys(
    keys: dict, row: dict, row_format: RowFormat, record: Record, template: str
) -> None:
    """Count a row under each optional key that it uses and each key that nothing uses."""
    used = used_keys(row, row_format)
    if record.tokens and len(record.tokens[0]) == len(row[row_format.keys[0]]):
        used = [key for key in used if key != REAL]  # there is no padding
    dropped = [key for key in used if key == "tools" and not _mentions(template, key)]
    keys["used"].update(key for key in used if key not in dropped)
    keys["unused"].update([*unused_keys(row, row_format), *dropped])
    if record.messages and any(map(_text_arguments, row[row_format.keys[0]])):
        keys["used"][TEXT_ARGUMENTS] += 1
    in_turns = {key for m in record.messages or () for key, value in m.items() if value is not None}
    in_turns = sorted(in_turns - TURN_KEYS)
    keys["unused_in_turns"].update(key for key in in_turns if not _mentions(template, key))


def _text_arguments(turn) -> bool:
    """Whether a turn of a row has a tool call whose arguments are JSON text."""
    calls = (turn.get("tool_calls") or []) if isinstance(turn, dict) else []
    if isinstance(calls, str):
        return True
    return any(isinstance(call.get("function", call).get("arguments"), str) for call in calls)


@functools.cache
def _mentions(template: str, key: str) -> bool:
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
    cut, lost, copied, parts = Counter(), Counter(), 0, []  # copied: documents so far
    starts = np.append(0, np.cumsum(documents.lengths))
    with contextlib.ExitStack() as stack:
        outs = [stack.enter_context(open(f"{folder}/{name}.cut", "wb")) for name in flat]

        def copy_until(document: int) -> None:
            for out, source in zip(outs, flat.values(), strict=True):
                out.write(source[starts[copied] : starts[document]])
            parts.append(Documents(*(column[copied:document] for column in documents)))

        for i in np.flatnonzero(documents.lengths > seq_len).tolist():
            copy_until(i)
            copied = i + 1
            span = slice(starts[i], starts[i + 1])
            sample = Sample(*(source[span].copy() for source in flat.values()))
            pieces = fit(sample, seq_len, overlong, cut)
            if isinstance(pieces, str):
                stats["skipped"][pieces] = stats["skipped"].get(pieces, 0) + 1
                if pieces not in stats["first_skipped"]:
                    where = f"{row_prefix(files[documents.file[i]])}{documents.row[i]}"
                    stats["first_skipped"][pieces] = where
                continue
            lost["tokens"] += len(sample.ids) - sum(len(piece.ids) for piece in pieces)
            lost["learnt"] += int(documents.label_counts[i] - sum(p.is_label.sum() for p in pieces))
            for piece in pieces:
                for out, part in zip(outs, piece, strict=True):
                    out.write(part)
                counts = (len(piece.ids), piece.is_label.sum(), documents.file[i], documents.row[i])
                parts.append(Documents(*(np.array([n], np.int64) for n in counts)))
        copy_until(len(documents.lengths))
    for name in flat:
        os.replace(f"{folder}/{name}.cut", f"{folder}/{name}")
    stats |= {"truncated": cut["truncate"], "split": cut["split"]}
    stats |= {"cut_tokens": lost["tokens"], "cut_learnt": lost["learnt"]}
    return Documents(*map(np.concatenate, zip(*parts, strict=True)))
