"""A micro-batch: token ids, labels and document boundaries."""

from typing import NamedTuple

import torch

IGNORE_INDEX = -100


class Batch(NamedTuple):
    input_ids: torch.Tensor  # int64 [B, S]
    labels: torch.Tensor  # int64 [B, S], already shifted
    position_ids: torch.Tensor  # int64 [B, S], restart at 0 in each document
    cu_seqlens: torch.Tensor  # int32 [B * max_docs + 1], document starts in the flat B * S slots
    n_tokens: torch.Tensor | None = None  # int64 [B], of each row before its padding


class Part(NamedTuple):
    """The slice of every row that a rank holds: number `at` of `of` equal ones."""

    at: int = 0
    of: int = 1

    def of_rows(self, t: torch.Tensor) -> torch.Tensor:
        """This slice of [B, S]: [B, S / of]."""
        return t.chunk(self.of, 1)[self.at].contiguous()

    def of_positions(self, index: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(which of the flat positions `index` [n] of whole rows lie here: bool [n]; their flat
        positions in the slice)."""
        own = seq_len // self.of
        row, slot = index // seq_len, index % seq_len
        here = slot // own == self.at
        return here, (row * own + slot % own)[here]


WHOLE = Part()


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


def real_tokens(batch: Batch, part: Part = WHOLE) -> torch.Tensor:
    """Which slots of a slice are not padding: bool [B * S / part.of]."""
    slots = torch.arange(batch.input_ids.shape[1], device=batch.n_tokens.device)
    return part.of_rows(slots < batch.n_tokens[:, None]).flatten()


def answers_of(index: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The answer of each label: int64 [n], documents with labels numbered from 0. index: from
    label_positions; cu_seqlens: as in Batch. Call it on the CPU, like label_positions."""
    documents = torch.searchsorted(cu_seqlens[1:].long(), index, right=True)
    return documents.unique_consecutive(return_inverse=True)[1]


def position_ids(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Positions that restart at 0 in each document: int64 [B, S] from boundaries [D+1]."""
    slots = torch.arange(shape[0] * shape[1], device=cu_seqlens.device)
    return (slots - cu_seqlens[document_of(slots, cu_seqlens)]).view(shape)


def document_lengths(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The length of each token's document: [B, S] from boundaries [D+1]."""
    slots = torch.arange(shape[0] * shape[1], device=cu_seqlens.device)
    return cu_seqlens.diff()[document_of(slots, cu_seqlens)].view(shape)


def document_of(slots: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The number of each flat slot's document."""
    return torch.searchsorted(cu_seqlens, slots.to(cu_seqlens.dtype), right=True) - 1
