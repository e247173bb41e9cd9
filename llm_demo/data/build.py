"""Turns data files into documents of at most seq_len tokens, streamed to flat files.

Only a few numpy tables grow with the data: ten million rows need no ten million Python objects.
The flat files replace a datasets.Dataset: a document is one slice of a memory map, where an Arrow
list column costs a lookup and a conversion."""

import itertools
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llm_demo.core.errors import UserError
from llm_demo.core.rows import Documents, Rows
from llm_demo.data.bad_rows import Bad
from llm_demo.data.labels import Codec, encode, has_variable
from llm_demo.data.records import TOOLS, RowFormat, keys_of, open_rows
from llm_demo.data.sources import hub_parts, place_of, read_rows
from llm_demo.data.turns import REMARKS, Record, Sample
from llm_demo.machine.cache import verified
from llm_demo.machine.text import counted, progress

ROWS_AT_A_TIME = 1000  # rows tokenised in one call
# default seq_len: fits SHARE of the documents, a multiple of STEP, at most LONGEST_DEFAULT
SHARE, STEP, LONGEST_DEFAULT = 0.99, 128, 4096
FLAT = {"tokens.int32": np.int32, "learnt.bool": bool}  # the flat files
MOST_LINES = 50  # on rows that are skipped for different reasons


@dataclass
class File:
    """How the rows of a file were read."""

    path: str
    format: str
    keys: list[str]
    why: str
    rows: int = 0
    used: dict[str, int] = field(default_factory=Counter)  # optional key: rows with it
    unused: dict[str, int] = field(default_factory=Counter)  # key that is not read: rows with it


@dataclass
class LeftOut:
    """Rows that are skipped for one reason, or whose turns are not learnt."""

    file: int  # number of the first row's file
    row: int  # its number
    rows: int = 0
    turns: int = 0


@dataclass
class Stats:
    """What was read and what was left out, for the log, the cache and a run's identity."""

    files: list[File] = field(default_factory=list)
    skipped: dict[str, LeftOut] = field(default_factory=dict)  # by reason
    turns: dict[str, LeftOut] = field(default_factory=dict)  # not learnt, or with a remark
    # documents that were cut ("truncate", "split"), "tokens" that were lost, and those "learnt"
    cut: dict[str, int] = field(default_factory=dict)
    systems: list[str] = field(default_factory=list)  # system prompts ("": none), at most two
    seq_len_why: str = ""  # if seq_len was chosen
    cache_hit: bool = False

    @classmethod
    def of(cls, facts: dict) -> "Stats":
        """From JSON. Raises KeyError or TypeError if it is not what `json.dump(default=vars)` of
        Stats wrote."""
        files = [File(**file) for file in facts["files"]]
        left_out = {
            name: {reason: LeftOut(**rows) for reason, rows in facts[name].items()}
            for name in ("skipped", "turns")
        }
        return cls(**{**facts, **left_out, "files": files})

    def count_turns(self, reasons: Counter, file: int, row: int) -> None:
        """Count a row's turns that are not learnt, and remarks. reasons: as of labels.encode."""
        for reason, turns in (+reasons).items():
            _count_left_out(self.turns, reason, file, row, turns)

    def note_system(self, record: Record) -> None:
        """Note the system prompt that a conversation begins with, if it is another one."""
        system = ""
        if record.messages and record.messages[0]["role"] == "system":
            system = record.messages[0]["content"]
        if system not in self.systems and len(self.systems) < 2:
            self.systems.append(system)

    def first(self, rows: LeftOut) -> str:
        """ "first FILE:row", or "first FILE, row N" in tables and arrays."""
        path = self.files[rows.file].path
        return f"first {path}{place_of(path)}{rows.row}"

    def lines(self, data: Rows, eos: str | None, folder: str) -> list[str]:
        """What the log says of these rows. eos: what ends an answer if the tokenizer has no chat
        template, else None. folder: where they are cached."""
        lines = []
        for file in self.files:
            keys = "/".join(file.keys)
            lines.append(f"data: {file.path}: {keys} ({file.why}), {counted(file.rows, 'row')}")
        for file in self.files:
            if file.used:
                note = " (its answers are learnt)" if "history" in file.used else ""
                lines.append(f"data: {file.path}: also used: {_listed(file.used)}{note}")
            if file.unused:
                lines.append(f"data: {file.path}: unused keys: {_listed(file.unused)}")
        if eos is not None and any(file.format not in ("text", "tokens") for file in self.files):
            lines.append(
                "data: the tokenizer has no chat template: turns are joined by line breaks and "
                f"each answer ends with {eos} (--chat_template FILE sets a template)"
            )
        tokens = int(data.token_counts.sum())
        filled = tokens / (len(data) * data.seq_len)
        lines.append(
            f"data: {counted(len(data.row_docs), 'document')}, {counted(tokens, 'token')} "
            f"({data.label_counts.sum():,} learnt) in {counted(len(data), 'row')} of "
            f"{data.seq_len:,}, {filled:.1%} filled; "
            f"{'from' if self.cache_hit else 'cached in'} {folder}"
        )
        if self.cut:
            lines.append(self._line_on_cut(data.seq_len))
        for reason, n in self.turns.items():
            turns = f"{counted(n.turns, 'turn')} in {counted(n.rows, 'row')}"
            lost = "" if reason in REMARKS else "not learnt: "
            lines.append(f"data: {lost}{turns}: {reason} ({self.first(n)})")
        for reason, n in itertools.islice(self.skipped.items(), MOST_LINES):
            lines.append(f"data: skipped {counted(n.rows, 'row')}: {reason} ({self.first(n)})")
        return lines

    def _line_on_cut(self, seq_len: int) -> str:
        what = "truncated" if "truncate" in self.cut else "split"
        n = counted(self.cut.get("truncate") or self.cut["split"], "document")
        lost = f"{self.cut['tokens']:,} tokens cut off, {self.cut['learnt']:,} of them learnt"
        return f"data: {n} of more than {seq_len:,} tokens {what}: {lost}"


def write_documents(folder: str, files: list[str], codec: Codec, flags, limit: int) -> None:
    """Write to `folder` the tokens of all documents, one after another, which of them are learnt,
    documents.npy, int64 [4, documents]: tokens, learnt ones, number of the file, and line or row in
    it, and meta.json. flags, limit: see load_rows. Raises UserError if no row has anything to
    learn."""
    stats = Stats()
    documents = _to_flat(folder, _tokenise(files, codec, flags, stats))
    seq_len, lengths = flags.seq_len, documents[0]
    if not seq_len and len(lengths):
        seq_len, stats.seq_len_why = choose_seq_len(lengths, limit)
    if lengths.max(initial=0) > seq_len:
        pieces = _in_pieces(_open_flat(folder), documents, seq_len, flags.overlong, stats)
        documents = _to_flat(folder, pieces)
    if not documents.size:
        reasons = itertools.islice(stats.skipped.items(), MOST_LINES)
        why = "; ".join(f"{s.rows:,} x {reason} ({stats.first(s)})" for reason, s in reasons)
        raise UserError(f"{', '.join(files)}: all rows are skipped: {why}")
    np.save(f"{folder}/documents.npy", documents)
    tokenizer = codec.tokenizer
    pads = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None]
    with open(f"{folder}/meta.json", "w", encoding="utf-8") as file:
        json.dump({"seq_len": seq_len, "pad_id": pads[0], "stats": stats}, file, default=vars)


def read_documents(folder: str, files: list[str], identity: dict, cache_hit: bool) -> Documents:
    """The documents of a folder that `build` has written from these files. Raises OSError,
    ValueError and others if it is damaged. identity: what they depend on; a checksum of tokens and
    labels is added."""
    sums = verified(folder)
    meta = json.loads(Path(folder, "meta.json").read_text("utf-8"))
    stats = Stats.of(meta["stats"])
    stats.cache_hit = cache_hit
    for file, path in zip(stats.files, files, strict=True):
        file.path = path  # the same bytes may have been cached under another name
    lengths, label_counts, file_numbers, row_numbers = np.load(f"{folder}/documents.npy")
    tokens, is_label = _open_flat(folder)
    checksum = "-".join(sums[name] for name in FLAT)
    seq_len = meta["seq_len"]
    return Documents(
        seq_len=seq_len,
        pad_id=meta["pad_id"],
        tokens=tokens,
        is_label=is_label,
        starts=np.append(0, np.cumsum(lengths)),
        label_counts=label_counts,
        file_numbers=file_numbers,
        row_numbers=row_numbers,
        stats=stats,
        identity=identity | {"seq_len": seq_len, "tokens and labels": checksum},
    )


def _open_flat(folder: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, which of them are learnt) of all documents, mapped."""
    # asarray: a plain view of the map; slicing np.memmap itself is several times slower.
    maps = (np.memmap(f"{folder}/{name}", kind, "r") for name, kind in FLAT.items())
    return tuple(map(np.asarray, maps))


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
            place = f"{path}{place_of(path)}"
            template = None if codec.train_on_prompt else codec.template  # see to_record
            row_format, rows = open_rows(read_rows(path, bar), place, flags, template)
            file = File(path, row_format.format, row_format.keys, row_format.why)
            stats.files.append(file)
            for chunk in iter(lambda rows=rows: list(itertools.islice(rows, ROWS_AT_A_TIME)), []):
                file.rows += len(chunk)
                for n, _, record in chunk:
                    if isinstance(record, Bad):
                        _count_left_out(stats.skipped, record, number, n)
                good = [each for each in chunk if not isinstance(each[2], Bad)]
                encoded = encode(codec, [record for _, _, record in good])
                for (n, row, record), (sample, reasons) in zip(good, encoded, strict=True):
                    _count_keys(file, row, row_format, codec.template)
                    if isinstance(sample, str):
                        _count_left_out(stats.skipped, sample, number, n)
                        continue
                    stats.count_turns(reasons, number, n)
                    stats.note_system(record)
                    yield sample, number, n


def _count_left_out(
    left_out: dict[str, LeftOut], reason: str, file: int, row: int, turns: int = 0
) -> None:
    """Count a row that is left out for this reason, or so many turns of it."""
    rows = left_out.setdefault(reason, LeftOut(file, row))
    rows.rows += 1
    rows.turns += turns


def _count_keys(file: File, row: dict, row_format: RowFormat, template: str) -> None:
    """Count a row under each optional key that it uses and each key that nothing uses."""
    used, unused = keys_of(row, row_format)
    if not has_variable(template, "tools"):
        unused += [key for key in used if key in TOOLS]
    file.used.update(key for key in used if key not in unused)
    file.unused.update(unused)


def _listed(rows: dict[str, int]) -> str:
    """Keys and how many rows have each; of many, the first twelve."""
    keys = [f"{key or '(no name)'} ({counted(n, 'row')})" for key, n in rows.items()]
    return ", ".join(keys[:12]) + (" …" if len(keys) > 12 else "")


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
            _count_left_out(stats.skipped, "longer than seq_len", file, row)
            continue
        pieces = []
        for at in range(0, seq_len if overlong == "truncate" else length, seq_len):
            part = slice(at, at + seq_len)
            piece = Sample(whole.ids[part].copy(), whole.is_label[part].copy())
            piece.is_label[0] = False  # nothing in its piece predicts it
            if piece.is_label.any():
                pieces.append(piece)
        if not pieces:
            _count_left_out(stats.skipped, "nothing to learn within seq_len", file, row)
            continue
        lost = length - sum(len(piece.ids) for piece in pieces)
        not_learnt = learnt - sum(int(piece.is_label.sum()) for piece in pieces)
        stats.cut.update({overlong: 1, "tokens": lost, "learnt": not_learnt})
        for piece in pieces:
            yield piece, file, row
