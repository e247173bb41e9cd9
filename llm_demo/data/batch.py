"""A micro-batch: token ids, labels and document boundaries."""

from typing import NamedTuple

import numpy as np
import torch

IGNORE_INDEX = -100


class Batch(NamedTuple):
    input_ids: torch.Tensor  # int64 [B, S]
    labels: torch.Tensor  # int64 [B, S], already shifted
    position_ids: torch.Tensor  # int64 [B, S], from 0 in every document
    cu_seqlens: torch.Tensor  # int32 [B * max_docs + 1], where documents begin in the B * S slots


def to_device(device: torch.device, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Tensors on the device, Nones left out. From the CPU through pinned memory: a copy from
    pageable memory makes the host wait for all the work that the GPU was given before."""
    found = [t for t in tensors if t is not None]
    if device.type == "cuda":
        found = [t if t.is_cuda else t.pin_memory() for t in found]
    return [t.to(device, non_blocking=True) for t in found]


def learnt(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, targets): which flat positions of labels [B, S] are learnt, and what is due there.

    Call it on the CPU: on a GPU the number of positions would have to be waited for."""
    index = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    return index, labels.flatten()[index]


def answers_of(index: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Which answer each learnt position belongs to: int64 [n], documents with something to learn,
    numbered from 0. index: as of `learnt`; cu_seqlens: as in data.Batch. On the CPU, too."""
    documents = torch.searchsorted(cu_seqlens[1:].long(), index, right=True)
    return documents.unique_consecutive(return_inverse=True)[1]


def position_ids(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Positions that restart at 0 in each document: int64 [B, S] from boundaries [D+1]."""
    slots = torch.arange(shape[0] * shape[1], device=cu_seqlens.device)
    return (slots - cu_seqlens[_document_of(slots, cu_seqlens)]).view(shape)


def document_lengths(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The length of each token's document: [B, S] from boundaries [D+1]."""
    slots = torch.arange(shape[0] * shape[1], device=cu_seqlens.device)
    return cu_seqlens.diff()[_document_of(slots, cu_seqlens)].view(shape)


def _document_of(slots, cu_seqlens):
    return torch.searchsorted(cu_seqlens, slots.to(cu_seqlens.dtype), right=True) - 1


class Record(NamedTuple):
    """One row, whatever its format: a conversation, or (messages is None) plain text or tokens."""

    messages: list[dict] | None  # role, content, and whatever else the chat template may want
    text: str = ""
    tools: list | None = None
    tokens: tuple[list[int], list[bool]] | None = None  # ids, and which of them are learnt
    context: frozenset[int] = frozenset()  # messages of the prompt: never learnt
    marks: dict[int, bool] = {}  # message -> whether its weight, train or loss_mask says: learn


class Sample(NamedTuple):
    ids: np.ndarray  # int32 [n]
    learnt: np.ndarray  # bool [n]; the first is never learnt, nothing predicts it
