"""A Hugging Face decoder as a list of DeepSpeed layers, and where to cut it into stages."""

import functools
from collections.abc import Iterator

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from llm_demo.attention import make_documents, position_ids
from llm_demo.errors import UserError
from llm_demo.loss import cross_entropy_sum, next_tokens
from llm_demo.model import flops_per_token, materialise


class Layout:
    """What every block of a stage needs of a micro-batch, made once a stage from the boundaries.

    Only hidden states and boundaries cross between stages: no float without a gradient can, and
    positions and rotary tables are a function of the boundaries. Not an nn.Module, so that
    DeepSpeed's cast to bf16 or fp16 spares the rotary frequencies."""

    def __init__(self, rotary: nn.Module, attn_impl: str, device: torch.device):
        self.rotary, self.attn_impl, self.device = rotary.to(device), attn_impl, device
        self.cu_seqlens = self.made = None

    def __call__(self, hidden: torch.Tensor, cu_seqlens: torch.Tensor) -> dict:
        if cu_seqlens is not self.cu_seqlens:  # the first block of this stage, for this micro-batch
            shape = tuple(hidden.shape[:2])
            positions = position_ids(cu_seqlens, shape)
            self.made = {
                "documents": make_documents(cu_seqlens, shape, self.attn_impl, self.device),
                "position_ids": positions,
                "position_embeddings": self.rotary(hidden, positions),
            }
            self.cu_seqlens = cu_seqlens
        return self.made


class Embedding(nn.Module):
    """(input_ids [B, S], boundaries) -> (hidden [B, S, d], boundaries)."""

    def __init__(self, make):
        super().__init__()
        self.embed_tokens = make("model.embed_tokens")

    def forward(self, x):
        ids, cu_seqlens = x
        return self.embed_tokens(ids), cu_seqlens


class Block(nn.Module):
    """One decoder block: (hidden, boundaries) -> the same."""

    def __init__(self, make, i: int, layout: Layout):
        super().__init__()
        self.block, self.layout = make(f"model.layers.{i}"), layout

    def forward(self, x):
        hidden, cu_seqlens = x
        return self.block(hidden, use_cache=False, **self.layout(hidden, cu_seqlens)), cu_seqlens


class Norm(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.norm = make("model.norm")

    def forward(self, x):
        return self.norm(x[0])


class Head(nn.Module):
    """hidden -> (hidden, the head's weight): the loss forms logits by chunks, never all of them."""

    def __init__(self, make):
        super().__init__()
        self.lm_head = make("lm_head")

    def forward(self, hidden):
        return hidden, self.lm_head.weight


def tied_head(embedding: Embedding, hidden: torch.Tensor):
    return hidden, embedding.embed_tokens.weight


def layer_specs(lm, weights, seed: int, attn_impl: str, device: torch.device) -> list[LayerSpec]:
    """Embedding, blocks, norm, head of a skeleton; each is materialised only on its own stage.

    Tied embeddings are one TiedLayerSpec at both ends: both stages keep a copy, whose gradients
    DeepSpeed sums before the step."""
    make = functools.partial(materialise, lm, weights=weights, seed=seed, device=device)
    layout = Layout(lm.model.rotary_emb, attn_impl, device)
    n = lm.config.num_hidden_layers
    middle = [*(LayerSpec(Block, make, i, layout) for i in range(n)), LayerSpec(Norm, make)]
    if not lm.config.tie_word_embeddings:
        return [LayerSpec(Embedding, make), *middle, LayerSpec(Head, make)]
    tied = functools.partial(
        TiedLayerSpec, "embedding", Embedding, make, tied_weight_attr="embed_tokens.weight"
    )
    return [tied(), *middle, tied(forward_fn=tied_head)]


def loss_fn(outputs, labels):
    """(hidden, weight), (index, targets, factor) -> the micro-batch's share of the step's loss."""
    index, targets, factor = labels
    return cross_entropy_sum(*outputs, index, targets) * factor


def ask_fn(outputs, labels):
    """The same places' likeliest next tokens, for generation in the place of loss_fn."""
    return next_tokens(*outputs, labels[0])


# ---------------------------------------------------------------- where to cut


def split(config, stages: int, partition: str, seq_len: int, checkpointing: bool) -> list[int]:
    """Blocks of each stage. partition: balanced (by FLOPs, the head counted), uniform (by number),
    parameters, or numbers such as "18,10". Raises UserError where they don't fit the model."""
    n = config.num_hidden_layers
    if n < stages:
        raise UserError(f"--stages {stages}: the model has {n} blocks only")
    if partition == "uniform":
        return [n // stages + (s < n % stages) for s in range(stages)]
    if partition in ("balanced", "parameters"):
        first, block, last = costs(config, seq_len, checkpointing, partition == "parameters")
        return min(_candidates(n, stages), key=lambda c: stage_costs(c, first, block, last))
    try:
        counts = [int(x) for x in partition.split(",")]
    except ValueError:
        raise UserError(
            f'--partition {partition}: balanced, uniform, parameters, or counts such as "18,10"'
        ) from None
    if len(counts) != stages or sum(counts) != n or min(counts) < 1:
        raise UserError(
            f"--partition {partition}: {stages} stages want as many counts, each at least 1, that "
            f"sum to the model's {n} blocks"
        )
    return counts


def costs(config, seq_len: int, checkpointing: bool, by_parameters=False) -> tuple:
    """(embedding, block, norm and head): FLOPs a token, forward and backward, or parameters.

    Checkpointing runs a block's forward once more: 4/3 of its cost, and nothing for the head."""
    block, head = flops_per_token(config, seq_len)
    if not by_parameters:
        return 0, block * (4 / 3 if checkpointing else 1), head
    block, _ = flops_per_token(config, 0)
    return head / 6, block / 6, head / 6


def stage_costs(counts, first, block, last) -> list[float]:
    """Cost of each stage, dearest first: comparing two such lists finds the better split."""
    each = [c * block for c in counts]
    each[0] += first
    each[-1] += last
    return sorted(each, reverse=True)


def describe_split(counts: list[int], config, seq_len: int, checkpointing: bool) -> str:
    first, block, last = costs(config, seq_len, checkpointing)
    each = [c * block + last * (s == len(counts) - 1) for s, c in enumerate(counts)]
    share = ", ".join(
        f"stage {s}: {c} blocks{' + head' * (s == len(counts) - 1)} {x / sum(each):.0%} of the work"
        for s, (c, x) in enumerate(zip(counts, each, strict=True))
    )
    return f"{share}; the dearest is {max(each) * len(each) / sum(each):.2f} x the mean"


def _candidates(n: int, stages: int) -> Iterator[list[int]]:
    """Every way to fill the first and the last stage; between them blocks are alike, so evenly."""
    if stages == 1:
        yield [n]
        return
    middle = stages - 2
    for first in range(n - stages + 1, 0, -1):
        for last in range(1, n - middle - first + 1) if middle else [n - first]:
            rest = n - first - last
            yield [first, *(rest // middle + (s < rest % middle) for s in range(middle)), last]


def bounds(counts: list[int]) -> list[int]:
    """Layer numbers where stages begin, and the end: the embedding is layer 0, norm and head the
    last two."""
    edges = [0]
    for count in counts:
        edges.append(edges[-1] + count)
    return [0, *(edge + 1 for edge in edges[1:-1]), edges[-1] + 3]
