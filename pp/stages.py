"""A Hugging Face decoder as a list of DeepSpeed layers."""

import functools
from collections.abc import Iterator

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from llm_demo.core.attention import make_documents, rotary_tables
from llm_demo.core.decoder import Blocks, compile_forward
from llm_demo.core.loss import cross_entropy_sum, next_tokens, score
from llm_demo.core.rows import position_ids


class Layout:
    """What a stage's blocks need of a micro-batch besides hidden states, made once per stage.

    A stage knows the rows of each step, so only hidden states are sent: one message per micro-batch
    and direction. Not an nn.Module, so DeepSpeed's cast to bf16 or fp16 spares the rotary
    frequencies."""

    def __init__(self, rotary: nn.Module, attn_impl: str, device: torch.device):
        self.rotary, self.attn_impl, self.device = rotary.to(device), attn_impl, device

    def follow(self, boundaries: Iterator[torch.Tensor]) -> None:
        """Take cu_seqlens of the coming micro-batches from `boundaries`, in forward order."""
        self.boundaries = boundaries

    def advance(self, hidden: torch.Tensor) -> tuple:
        """(rotary tables, positions, documents) of the next micro-batch, for all blocks here."""
        cu_seqlens, shape = next(self.boundaries), tuple(hidden.shape[:2])
        documents = make_documents(cu_seqlens, shape, self.attn_impl, self.device)
        positions = position_ids(documents.cu_seqlens, shape)
        tables = rotary_tables(self.rotary, hidden, positions, documents)
        self.made = tables, positions, documents
        return self.made


class Embedding(nn.Module):
    """input_ids [B, S] -> hidden [B, S, d]."""

    def __init__(self, make):
        super().__init__()
        self.embed_tokens = make("model.embed_tokens")

    def forward(self, ids):
        return self.embed_tokens(ids)


class Unit(nn.Module):
    """`size` decoder blocks from block `at` on. leads: it is the first unit of its stage. budget:
    activation memory budget if compiled, else None."""

    def __init__(self, make, at, size, layout, leads, checkpointing, budget):
        super().__init__()
        self.layout, self.leads = layout, leads
        self.blocks = Blocks([make(f"model.layers.{at + k}") for k in range(size)], checkpointing)
        if budget is not None:
            compile_forward(self.blocks, budget)

    def forward(self, hidden):
        layout = self.layout.advance(hidden) if self.leads else self.layout.made
        return self.blocks(hidden, *layout)


class Norm(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.norm = make("model.norm")

    def forward(self, hidden):
        return self.norm(hidden)


class Head(nn.Module):
    """hidden -> (hidden, the head's weight): the loss forms logits in chunks, never all at once."""

    def __init__(self, make):
        super().__init__()
        self.lm_head = make("lm_head")

    def forward(self, hidden):
        return hidden, self.lm_head.weight


def tied_head(embedding: Embedding, hidden: torch.Tensor):
    return hidden, embedding.embed_tokens.weight


def layer_specs(
    config, make, sizes: list[list[int]], layouts: list[Layout], checkpointing: bool, budget
):
    """(layers, their bounds): embedding, units of blocks, norm and head, cut into pieces.

    make(name) materialises a submodule, only on its own stage. sizes: blocks of each unit of each
    piece. budget: activation memory budget, None if uncompiled. Tied embeddings are one
    TiedLayerSpec at both ends: both stages keep a copy, whose gradients ds_patches.py sums before
    the step."""
    layers, bounds, at = [], [0], 0
    for layout, units in zip(layouts, sizes, strict=True):
        for k, size in enumerate(units):
            layers.append(LayerSpec(Unit, make, at, size, layout, k == 0, checkpointing, budget))
            at += size
        bounds.append(1 + len(layers))
    bounds[-1] += 2
    layers.append(LayerSpec(Norm, make))
    if not config.tie_word_embeddings:
        return [LayerSpec(Embedding, make), *layers, LayerSpec(Head, make)], bounds
    tied = functools.partial(
        TiedLayerSpec, "embedding", Embedding, make, tied_weight_attr="embed_tokens.weight"
    )
    return [tied(), *layers, tied(forward_fn=tied_head)], bounds


def loss_fn(outputs, labels, compiled: bool = False):
    """(hidden, weight), (index, targets, factor) -> the micro-batch's share of the step's loss."""
    index, targets, factor = labels
    return cross_entropy_sum(*outputs, index, targets, compiled) * factor


def score_fn(outputs, labels, compiled: bool = False):
    """(hidden, weight), (index, targets, answers) -> loss.score of the micro-batch, fp32 [2]."""
    return score(*outputs, *labels, compiled)


def ask_fn(outputs, labels):
    """The most likely next tokens at the same positions; replaces loss_fn for generation."""
    return next_tokens(*outputs, labels[0])
