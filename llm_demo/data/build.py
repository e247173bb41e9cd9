"""Turns data files into documents of at most seq_len tokens, streamed to flat files.

Only a few numpy tables grow with the data: ten million rows need no ten million Python objects.
The flat files replace a datasets.Dataset: a document is one slice of a memory map, where an Arrow
list column costs a lookup and a conversion."""

import contextlib
import functools
import itertools
import json
import os
import re
from array import array
from collections import Counter

import numpy as np

from llm_demo.core.errors import UserError
from llm_demo.data.labels import Codec, encode
from llm_demo.data.packing import choose_seq_len, fit
from llm_demo.data.records import REAL, Record, RowFormat, Sample, detect_format, keys_of, to_record
from llm_demo.data.sources import hub_parts, place_of, read_rows
from llm_demo.data.stats import File, LeftOut, Stats
from llm_demo.job.text import progress

ROWS_AT_A_TIME = 1000  # rows tokenised in one call
TURN_KEYS = {"role", "content", "tool_calls", "reasoning_content"}  # always used
TEXT_ARGUMENTS = "arguments of tool calls as JSON text"
TOKENS, LEARNT = "tokens.int32", "learnt.bool"  # the flat files


def build(folder: str, files: list[str], codec: Codec, flags, limit: int) -> None:
    """Write to `folder` the tokens of all documents, one after another, which of them are learnt,
    documents.npy, int64 [4, documents]: tokens, learnt ones, number of the file, and line or row in
    it, and meta.json. flags, limit: see load_packs. Raises UserError if no row has anything to
    learn."""
    documents, stats = _tokenise(folder, files, codec, flags)
    seq_len, lengths = flags.seq_len, documents[0]
    if not seq_len and len(lengths):
        seq_len, stats.seq_len_why = choose_seq_len(lengths, limit)
    if lengths.max(initial=0) > seq_len:
        documents = _cut(folder, documents, seq_len, flags.overlong, stats)
    if not documents.size:
        n = sum(file.rows for file in stats.files)
        rows = "the only row was" if n == 1 else f"all {n:,} rows were"
        reasons = stats.skipped.items()
        why = "; ".join(f"{s.rows:,} x {reason} ({stats.first(s)})" for reason, s in reasons)
        raise UserError(f"{', '.join(files)}: {rows} skipped: {why}")
    np.save(f"{folder}/documents.npy", documents)
    tokenizer = codec.tokenizer
    pads = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None]
    with open(f"{folder}/meta.json", "w") as file:
        json.dump({"seq_len": seq_len, "pad_id": pads[0], "stats": stats}, file, default=vars)


def open_flat(folder: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, which of them are learnt) of all documents, mapped."""
    # asarray: a plain view of the map; slicing np.memmap itself is several times slower.
    kinds = ((TOKENS, np.int32), (LEARNT, bool))
    return tuple(np.asarray(np.memmap(f"{folder}/{name}", kind, "r")) for name, kind in kinds)


class _Writer:
    """Writes documents to the flat files, which change once it is closed. stack: closes what it
    opens if that fails."""

    def __init__(self, folder: str, stack: contextlib.ExitStack):
        self.paths = [f"{folder}/{name}" for name in (TOKENS, LEARNT)]
        self.files = [stack.enter_context(open(f"{path}.part", "wb")) for path in self.paths]
        self.columns = [array("q") for _ in range(4)]  # not lists: there may be millions

    def add(self, sample: Sample, file: int, row: int) -> None:
        for out, part in zip(self.files, sample, strict=True):
            out.write(part)
        values = (len(sample.ids), int(sample.is_label.sum()), file, row)
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)

    def close(self) -> np.ndarray:
        """The table of documents, see `build`."""
        for out, path in zip(self.files, self.paths, strict=True):
            out.close()
            os.replace(f"{path}.part", path)
        return np.array(self.columns, np.int64)


def _tokenise(folder: str, files: list[str], codec: Codec, flags) -> tuple[np.ndarray, Stats]:
    """Write all documents, uncut; return their table."""
    stats = Stats()
    size = sum(os.path.getsize(path) for path in files if not hub_parts(path))
    with (
        contextlib.ExitStack() as stack,
        progress(what="tokenising", total=size, unit="B") as bar,
    ):
        out = _Writer(folder, stack)
        for number, path in enumerate(files):
            rows, place, row_format = read_rows(path, bar), f"{path}{place_of(path)}", None
            while chunk := list(itertools.islice(rows, ROWS_AT_A_TIME)):
                if not row_format:
                    n, row = chunk[0]
                    row_format = detect_format(row, f"{place}{n}", flags)
                    file = File(path, place_of(path), *row_format)
                    stats.files.append(file)
                file.rows += len(chunk)
                records = [to_record(row, row_format, f"{place}{n}") for n, row in chunk]
                for (_, row), record in zip(chunk, records, strict=True):
                    _count_keys(file, row, row_format, record, codec.template)
                for (n, _), encoded in zip(chunk, encode(codec, records), strict=True):
                    sample, reasons = encoded
                    if isinstance(sample, str):
                        stats.skip(sample, number, n)
                        continue
                    for reason, turns in (+reasons).items():
                        left_out = stats.turns.setdefault(reason, LeftOut(number, n))
                        left_out.turns += turns
                        left_out.rows += 1
                    out.add(sample, number, n)
        return out.close(), stats


def _count_keys(
    file: File, row: dict, row_format: RowFormat, record: Record, template: str
) -> None:
    """Count a row under each optional key that it uses and each key that nothing uses."""
    value, (used, unused) = row[row_format.keys[0]], keys_of(row, row_format)
    if record.tokens and len(record.tokens[0]) == len(value):
        used = [key for key in used if key != REAL]  # there is no padding
    if "tools" in used and not _mentions(template, "tools"):
        used.remove("tools")
        unused.append("tools")
    if record.messages and any(map(_text_arguments, value)):
        used.append(TEXT_ARGUMENTS)
    in_turns = {key for m in record.messages or () for key, value in m.items() if value is not None}
    in_turns = [k for k in sorted(in_turns - TURN_KEYS) if not _mentions(template, k)]
    for rows, keys in zip(file.noted.values(), (used, unused, in_turns), strict=True):
        for key in keys:
            rows[key] = rows.get(key, 0) + 1


def _text_arguments(turn) -> bool:
    """Whether a turn of a row has a tool call whose arguments are JSON text."""
    calls = (turn.get("tool_calls") or []) if isinstance(turn, dict) else []
    return isinstance(calls, str) or any(
        isinstance(call.get("function", call).get("arguments"), str) for call in calls
    )


@functools.cache
def _mentions(template: str, key: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", template) is not None


def _cut(folder: str, documents: np.ndarray, seq_len: int, overlong: str, stats: Stats):
    """Rewrite the flat files with documents of at most seq_len tokens; return their table."""
    flat, begin, stats.cut = open_flat(folder), 0, Counter()
    with contextlib.ExitStack() as stack:
        out = _Writer(folder, stack)
        for length, _, file, row in map(np.ndarray.tolist, documents.T):  # lazily
            span = slice(begin, begin + length)
            begin += length
            pieces = fit(Sample(*(part[span] for part in flat)), seq_len, overlong, stats.cut)
            if isinstance(pieces, str):
                stats.skip(pieces, file, row)
                continue
            for piece in pieces:
                out.add(piece, file, row)
        return out.close()
