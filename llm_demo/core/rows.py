"""Rows of documents, the rows of each optimizer step, and their tensors in micro-batches."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

IGNORE_INDEX = -100


class Batch(NamedTuple):
    input_ids: torch.Tensor  # int64 [B, S]
    labels: torch.Tensor  # int64 [B, S], already shifted
    position_ids: torch.Tensor  # int64 [B, S], restart at 0 in each document
    cu_seqlens: torch.Tensor  # int32 [B * max_docs + 1], document starts in the flat B * S slots
    n_tokens: torch.Tensor | None = None  # int64 [B], of each row before its padding


class Slice(NamedTuple):
    """The slice of every row that a rank holds: number `index` of `count` equal ones."""

    index: int = 0
    count: int = 1

    def of_rows(self, t: torch.Tensor) -> torch.Tensor:
        """This slice of [B, S]: [B, S / count]."""
        return t.chunk(self.count, 1)[self.index].contiguous()

    def of_positions(self, index: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(which of the flat positions `index` [n] of whole rows lie here: bool [n]; their flat
        positions in the slice)."""
        own = seq_len // self.count
        row, slot = index // seq_len, index % seq_len
        here = slot // own == self.index
        return here, (row * own + slot % own)[here]


WHOLE_ROWS = Slice()


@dataclass(frozen=True, eq=False)
class Documents:
    """The tokens of all documents, and where each is from."""

    seq_len: int  # the most tokens of a document, and the slots of a row
    pad_id: int
    tokens: np.ndarray  # int32 [all tokens], documents concatenated in file order
    is_label: np.ndarray  # bool [all tokens]
    starts: np.ndarray  # int64 [documents + 1], into tokens
    label_counts: np.ndarray  # int64 [documents], label tokens of each
    file_numbers: np.ndarray  # int64 [documents], of the file that each is from
    row_numbers: np.ndarray  # int64 [documents], line or row in that file
    stats: object  # data.build.Stats: what was read, for the log
    identity: dict  # what they depend on, by name

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.starts)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of exactly seq_len slots, each holding whole documents and a padding tail."""

    documents: Documents
    row_docs: np.ndarray  # int64 [documents], document numbers, row after row, rising in each
    row_start: np.ndarray  # int64 [rows + 1], into row_docs
    token_counts: np.ndarray  # int64 [rows], tokens of each row without padding
    label_counts: np.ndarray  # int64 [rows], label tokens of each row
    max_docs: int  # most documents in one row, or more; a padding tail counts as one
    passes: np.ndarray  # int64 [passes + 1], where each pass begins; all come again afterwards

    def __len__(self) -> int:
        return len(self.row_start) - 1

    @property
    def seq_len(self) -> int:
        return self.documents.seq_len

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """(input_ids [S], labels [S], document lengths) of row i, int64; i = -1 is all padding.

        Labels are shifted only here: labels[t] is input_ids[t + 1] if that token is a label, else
        -100, so a document's last slot predicts nothing. The lengths sum to S: the padding tail
        counts as a document, without labels."""
        documents = self.documents
        ids = np.full(self.seq_len, documents.pad_id, np.int64)
        labels = np.full(self.seq_len, IGNORE_INDEX, np.int64)
        at = 0
        for number in self._docs(i):
            span = slice(documents.starts[number], documents.starts[number + 1])
            tokens, is_label = documents.tokens[span], documents.is_label[span]
            end = at + len(tokens)
            ids[at:end] = tokens
            labels[at : end - 1] = np.where(is_label[1:], tokens[1:], IGNORE_INDEX)
            at = end
        return ids, labels, self.lengths(i)

    def lengths(self, i: int) -> list[int]:
        """Document lengths of row i. They sum to S: a padding tail counts as a document."""
        lengths = self.documents.lengths[self._docs(i)].tolist()
        padding = self.seq_len - sum(lengths)
        if padding:
            lengths.append(padding)
        return lengths

    def _docs(self, i: int) -> np.ndarray:
        if i == -1:
            return self.row_docs[:0]
        return self.row_docs[self.row_start[i] : self.row_start[i + 1]]

    @property
    def longest(self) -> int:
        """Tokens of the longest document, ignoring padding tails."""
        return int(self.documents.lengths[self.row_docs].max(initial=0))

    @functools.cached_property
    def _squares(self) -> np.ndarray:
        """The sum of the squared lengths of each row's documents, fp64 [rows]."""
        lengths = self.documents.lengths[self.row_docs].astype(float)
        return np.add.reduceat(lengths**2, self.row_start[:-1])

    def attended(self, rows: np.ndarray) -> float:
        """The mean length of the document of each slot of these rows, 0 for padding: the slots that
        attention sees."""
        return float(self._squares[rows[rows >= 0]].sum()) / (len(rows) * self.seq_len)

    @property
    def single(self) -> bool:
        """Whether every row holds at most one document."""
        return int(np.diff(self.row_start).max(initial=0)) <= 1

    def longest_of_rows(self) -> np.ndarray:
        """Tokens of the longest document of each row, ignoring padding tails, int64 [rows]."""
        return np.maximum.reduceat(self.documents.lengths[self.row_docs], self.row_start[:-1])

    def file_order(self) -> np.ndarray:
        """All rows in the order of the first document of each, pass after pass, int64 [rows]."""
        passes = np.searchsorted(self.passes, np.arange(len(self)), side="right")
        return np.lexsort((self.row_docs[self.row_start[:-1]], passes))

    def rows_in(self, epochs: float) -> int:
        """The number of rows in so many passes, which need not be whole."""
        if len(self.passes) == 2:
            return round(len(self) * epochs)
        at = np.interp(epochs, np.arange(len(self.passes)), self.passes)
        return round(float(at))


def order_rows(
    data: Rows,
    seed: int,
    global_batch: int,
    n_total: int | None = None,
    shuffle: bool = True,
    length_warmup: int = 0,
) -> Callable[[int], np.ndarray]:
    """The rows of a run: step_rows as a function of the step alone.

    shuffle False: Rows.file_order in every epoch. length_warmup: number of steps at the start
    whose rows are sorted by their longest document, shortest first; equal ones keep their order.
    These steps must end before n_total, so that a run of another length has the same."""
    order = None if shuffle else data.file_order()

    def rows_of(step: int, size: int = global_batch) -> np.ndarray:
        return step_rows(data.passes, seed, step, size, n_total, order)

    if not length_warmup:
        return rows_of
    rows = rows_of(0, length_warmup * global_batch)
    longest = data.longest_of_rows()[rows]
    early = rows[np.argsort(longest, kind="stable")].reshape(length_warmup, global_batch)
    return lambda step: early[step] if step < length_warmup else rows_of(step)


def step_rows(
    passes: np.ndarray,
    seed: int,
    step: int,
    global_batch: int,
    n_total: int | None = None,
    order: np.ndarray | None = None,
) -> np.ndarray:
    """Rows of optimizer step `step` (from 0), int64 [global_batch], the same on every rank.

    The stream is one seeded permutation of the rows of each pass, or `order`, concatenated, then
    others of the same passes. Step k takes the global_batch positions from k * global_batch. Ranks
    and micro-batches slice the result, so the split never changes a step, and resuming needs only
    the step number. From stream position n_total on, rows are -1: see Rows.row. passes:
    Rows.passes."""
    begin, end = step * global_batch, (step + 1) * global_batch
    at, parts = begin, []
    while at < end:
        lap, place = divmod(at, int(passes[-1]))
        number = int(np.searchsorted(passes, place, side="right")) - 1
        first, last = int(passes[number]), int(passes[number + 1])
        if order is None:
            epoch = lap * (len(passes) - 1) + number
            rows = first + _permutation(last - first, seed, epoch)
        else:
            rows = order[first:last]
        rows = rows[place - first :][: end - at]
        parts.append(rows)
        at += len(rows)
    rows = np.concatenate(parts)
    if n_total is not None:
        rows[max(0, n_total - begin) :] = -1
    return rows


@functools.lru_cache(maxsize=2)  # a step may end one epoch and begin the next
def _permutation(n_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n_rows)


def collate(data: Rows, rows) -> Batch:
    """The Batch of these rows. data.max_docs fixes the shape of cu_seqlens: its end repeats B * S,
    which reads as documents of length 0."""
    ids, labels, lengths = zip(*(data.row(int(row)) for row in rows), strict=True)
    ids, labels = np.stack(ids), np.stack(labels)
    bounds = bounds_of(lengths, data.seq_len, data.max_docs)
    positions = np.arange(ids.size) - np.repeat(bounds[:-1], np.diff(bounds))
    rows = np.asarray(rows)
    n_tokens = np.where(rows < 0, 0, data.token_counts[rows]).astype(np.int64)
    arrays = ids, labels, positions.reshape(ids.shape), bounds, n_tokens
    return Batch(*map(torch.from_numpy, arrays))


def bounds_of(lengths: Sequence[list[int]], seq_len: int, max_docs: int) -> np.ndarray:
    """cu_seqlens, see Batch. lengths: those of each row's documents, see Rows.row."""
    ends = list(itertools.accumulate(itertools.chain(*lengths)))
    bounds = np.full(len(lengths) * max_docs + 1, len(lengths) * seq_len, np.int32)
    bounds[: len(ends) + 1] = [0, *ends]
    return bounds


def token_counts(data: Rows, rows: np.ndarray) -> tuple[int, int]:
    """(tokens, label tokens) of these rows."""
    rows = rows[rows >= 0]
    return int(data.token_counts[rows].sum()), int(data.label_counts[rows].sum())


def micro_batches(
    data: Rows, rows: np.ndarray, dp_rank: int, dp_size: int, micro: int
) -> Iterator[Batch]:
    """This data-parallel rank's share of `rows`, in micro-batches of `micro` rows, on the CPU."""
    for group in share_of(rows, dp_rank, dp_size, micro):
        yield collate(data, group)


def share_of(rows: np.ndarray, dp_rank: int, dp_size: int, micro: int) -> np.ndarray:
    """This data-parallel rank's rows: [micro-batches, micro]."""
    return rows.reshape(-1, dp_size, micro)[:, dp_rank]


def heldout_rows(data: Rows, dp_size: int, micro: int, at_least: int = 1) -> np.ndarray:
    """All rows, padded with -1 so that each rank has as many micro-batches, `at_least` or
    more."""
    count = max(at_least, -(-len(data) // (dp_size * micro)))
    rows = np.full(count * dp_size * micro, -1)
    rows[: len(data)] = np.arange(len(data))
    return rows


def to_device(device: torch.device, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Move tensors to the device, skipping Nones. CPU tensors are pinned first: a copy from
    pageable memory blocks the host until the GPU finishes its queued work."""
    present = [t for t in tensors if t is not None]
    if device.type == "cuda":
        present = [t if t.is_cuda else t.pin_memory() for t in present]
    return [t.to(device, non_blocking=True) for t in present]


def label_positions(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, targets): the flat positions of labels [B, S] that have a label, and these labels,
    int64 [n].

    Call it on the CPU: a GPU would block until the number of positions is known."""
    index = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    return index, labels.flatten()[index]


def real_tokens(batch: Batch, part: Slice = WHOLE_ROWS) -> torch.Tensor:
    """Which slots of a slice are not padding: bool [B * S / part.count]."""
    slots = torch.arange(batch.input_ids.shape[1], device=batch.n_tokens.device)
    return part.of_rows(slots < batch.n_tokens[:, None]).flatten()


def answers_of(index: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The answer of each label: int64 [n], documents with labels numbered from 0. index: from
    label_positions; cu_seqlens: as in Batch. Call it on the CPU, like label_positions."""
    return document_of(index, cu_seqlens).unique_consecutive(return_inverse=True)[1]


def position_ids(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Positions that restart at 0 in each document: int64 [B, S] from boundaries [D+1]."""
    slots = torch.arange(shape[0] * shape[1], device=cu_seqlens.device)
    return (slots - cu_seqlens[document_of(slots, cu_seqlens)]).view(shape)


def document_of(slots: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The number of each flat slot's document."""
    return torch.searchsorted(cu_seqlens, slots.to(cu_seqlens.dtype), right=True) - 1
