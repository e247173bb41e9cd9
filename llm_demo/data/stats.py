"""What was read and what was left out, for the log, the cache and a run's identity."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llm_demo.job.text import counted

NOTED = ("also used", "unused keys", "unused keys in turns")


@dataclass
class File:
    """How the rows of a file were read."""

    path: str
    place: str  # what stands between its path and the number of a row
    format: str
    keys: list[str]
    why: str
    rows: int = 0
    # rows with each optional key ("also used") and each that is not read
    noted: dict[str, dict[str, int]] = field(default_factory=lambda: {kind: {} for kind in NOTED})


@dataclass
class LeftOut:
    """Rows that are skipped for one reason, or whose turns are not learnt."""

    file: int  # number of the first row's file
    row: int  # its number
    rows: int = 0
    turns: int = 0


@dataclass
class Stats:
    """Of one call of load_packs."""

    files: list[File] = field(default_factory=list)
    skipped: dict[str, LeftOut] = field(default_factory=dict)  # by reason
    turns: dict[str, LeftOut] = field(default_factory=dict)  # not learnt, in rows that are kept
    # documents that were cut ("truncate", "split"), "tokens" that were lost, and those "learnt"
    cut: dict[str, int] = field(default_factory=dict)
    seq_len_why: str = ""  # if seq_len was chosen
    cache_hit: bool = False
    identity: dict = field(default_factory=dict)  # what the rows depend on, by name

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

    def skip(self, reason: str, file: int, row: int) -> None:
        self.skipped.setdefault(reason, LeftOut(file, row)).rows += 1

    def first(self, rows: LeftOut) -> str:
        """ "first FILE:row", or "first FILE, row N" in tables and arrays."""
        file = self.files[rows.file]
        return f"first {file.path}{file.place}{rows.row}"

    def lines(self, packs, eos: str | None, folder: str) -> Iterator[str]:
        """What the log says of these packs. eos: what ends an answer if the tokenizer has no chat
        template, else None. folder: where they are cached."""
        for file in self.files:
            keys = "/".join(file.keys)
            yield f"data: {file.path}: {keys} ({file.why}), {counted(file.rows, 'row')}"
        for file in self.files:
            for what, rows in file.noted.items():
                if rows:
                    note = " (its answers are learnt)" * ("history" in rows and what == NOTED[0])
                    yield f"data: {file.path}: {what}: {_by_key(rows)}{note}"
        if eos is not None and any(f.format not in ("text", "tokens") for f in self.files):
            yield (
                "data: the tokenizer has no chat template: turns are joined by line breaks and "
                f"each answer ends with {eos} (--chat_template FILE sets a template)"
            )
        tokens = int(packs.token_counts.sum())
        yield (
            f"data: {counted(len(packs.row_docs), 'document')}, {counted(tokens, 'token')} "
            f"({packs.label_counts.sum():,} learnt) in {counted(len(packs), 'row')} of "
            f"{packs.seq_len:,}, {tokens / (len(packs) * packs.seq_len):.1%} filled; "
            f"{'from' if self.cache_hit else 'cached in'} {folder}"
        )
        for overlong, what in (("truncate", "truncated"), ("split", "split")):
            if n := self.cut.get(overlong):
                text = f"{counted(n, 'document')} longer than {packs.seq_len:,} tokens"
                if lost := self.cut["tokens"]:
                    learnt = f"{self.cut['learnt']:,} of them learnt"
                    what += f": {counted(lost, 'token')} cut off, {learnt}"
                yield f"data: {text} {'was' if n == 1 else 'were'} {what}"
        for reason, n in self.turns.items():
            turns = f"{counted(n.turns, 'turn')} in {counted(n.rows, 'row')}"
            are = "is" if n.turns == 1 else "are"
            yield f"data: {turns} {are} not learnt: {reason} ({self.first(n)})"
        for reason, n in self.skipped.items():
            yield f"data: skipped {counted(n.rows, 'row')}: {reason} ({self.first(n)})"


def _by_key(rows: dict[str, int], most: int = 12) -> str:
    texts = [f"{key or '(no name)'} ({counted(n, 'row')})" for key, n in rows.items()]
    return ", ".join(texts[:most]) + f" and {len(texts) - most:,} more" * (len(texts) > most)
