"""The documents of data files, as they are cached, and what was counted when they were built."""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llm_demo.core.rows import Documents, Rows
from llm_demo.machine.files import verified
from llm_demo.machine.process import read_json
from llm_demo.machine.text import counted

# default seq_len: fits SHARE of the documents, a multiple of STEP, at most LONGEST_DEFAULT
SHARE, STEP, LONGEST_DEFAULT = 0.99, 128, 4096
FLAT = {"tokens.int32": np.int32, "learnt.bool": bool}  # the flat files
MOST_LINES = 50  # on examples that are skipped for different reasons


@dataclass
class File:
    """How the examples of a file were read."""

    path: str
    format: str
    keys: list[str]
    why: str
    place: str = ":"  # what stands between its name and the number of an example
    rows: int = 0
    used: dict[str, int] = field(default_factory=Counter)  # optional key: examples with it
    unused: dict[str, int] = field(
        default_factory=Counter
    )  # key that is not read: examples with it


@dataclass
class LeftOut:
    """Examples that are skipped for one reason, or whose turns are not learnt."""

    file: int  # number of the first example's file
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

    def note_system(self, record) -> None:
        """Note the system prompt that a conversation begins with, if it is another one."""
        system = ""
        if record.messages and record.messages[0]["role"] == "system":
            system = record.messages[0]["content"]
        if system not in self.systems and len(self.systems) < 2:
            self.systems.append(system)

    def first(self, rows: LeftOut) -> str:
        """ "first FILE:row", or "first FILE, row N" in tables and arrays."""
        file = self.files[rows.file]
        return f"first {file.path}{file.place}{rows.row}"

    def lines(self, data: Rows, eos: str | None, folder: str) -> list[str]:
        """What the log says of these examples. eos: what ends an answer if the tokenizer has no
        chat template, else None. folder: where they are cached."""
        lines = []
        for file in self.files:
            keys = "/".join(file.keys)
            lines.append(f"data: {file.path}: {keys} ({file.why}), {counted(file.rows, 'example')}")
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
        from llm_demo.data.reasons import REMARKS

        for reason, n in self.turns.items():
            turns = f"{counted(n.turns, 'turn')} in {counted(n.rows, 'example')}"
            lost = "" if reason in REMARKS else "not learnt: "
            lines.append(f"data: {lost}{turns}: {reason} ({self.first(n)})")
        for reason, n in itertools.islice(self.skipped.items(), MOST_LINES):
            lines.append(f"data: skipped {counted(n.rows, 'example')}: {reason} ({self.first(n)})")
        return lines

    def _line_on_cut(self, seq_len: int) -> str:
        what = "truncated" if "truncate" in self.cut else "split"
        n = counted(self.cut.get("truncate") or self.cut["split"], "document")
        lost = f"{self.cut['tokens']:,} tokens cut off, {self.cut['learnt']:,} of them learnt"
        return f"data: {n} of more than {seq_len:,} tokens {what}: {lost}"


def read_documents(folder: str, files: list[str], identity: dict, cache_hit: bool) -> Documents:
    """The documents of a folder that `build` has written from these files. Raises OSError,
    ValueError and others if it is damaged. identity: what they depend on; a checksum of tokens and
    labels is added."""
    sums = verified(folder)
    meta = read_json(Path(folder, "meta.json"))
    stats = Stats.of(meta["stats"])
    stats.cache_hit = cache_hit
    for file, path in zip(stats.files, files, strict=True):
        file.path = path  # the same bytes may have been cached under another name
    lengths, label_counts, file_numbers, row_numbers = np.load(f"{folder}/documents.npy")
    tokens, is_label = open_flat(folder)
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


def open_flat(folder: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, which of them are learnt) of all documents, mapped."""
    # asarray: a plain view of the map; slicing np.memmap itself is several times slower.
    maps = (np.memmap(f"{folder}/{name}", kind, "r") for name, kind in FLAT.items())
    return tuple(map(np.asarray, maps))


def count_left_out(
    left_out: dict[str, LeftOut], reason: str, file: int, row: int, turns: int = 0
) -> None:
    """Count an example that is left out for this reason, or so many turns of it."""
    rows = left_out.setdefault(reason, LeftOut(file, row))
    rows.rows += 1
    rows.turns += turns


def _listed(rows: dict[str, int]) -> str:
    """Keys and how many examples have each; of many, the first twelve."""
    keys = [f"{key or '(no name)'} ({counted(n, 'example')})" for key, n in rows.items()]
    return ", ".join(keys[:12]) + (" …" if len(keys) > 12 else "")
