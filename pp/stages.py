"""A Hugging Face decoder as a list of DeepSpeed layers, and how to cut it into stages."""

import functools
from collections.abc import Iterator

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from llm_demo.data.batch import position_ids
from llm_demo.errors import UserError
from llm_demo.model.attention import make_documents
from llm_demo.model.compiling import compile_forward
from llm_demo.model.costs import block_costs, head_cost
from llm_demo.model.decoder import Blocks
from llm_demo.model.loss import cross_entropy_sum, next_tokens, score
from llm_demo.model.rotary import rotary_tables


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
    TiedLayerSpec at both ends: both stages keep a copy, whose gradients DeepSpeed sums before the
    step."""
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


# ---------------------------------------------------------------- where to cut


def split(config, stages: int, partition: str, seq_len: int, checkpointing: bool) -> list[int]:
    """Blocks of each stage. partition: balanced (by FLOPs, including the head), uniform (by
    number), parameters, or counts such as "18,10". Raises UserError if they don't fit the model."""
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
            f"--partition {partition}: must be balanced, uniform, parameters, or counts such as "
            '"18,10"'
        ) from None
    if len(counts) != stages or sum(counts) != n or min(counts) < 1:
        raise UserError(
            f"--partition {partition}: give {stages} counts, each at least 1, with a sum of {n}, "
            "the model's number of blocks"
        )
    return counts


def costs(config, seq_len: int, checkpointing: bool, by_parameters=False) -> tuple:
    """(embedding, block, norm and head) in FLOPs per token, forward and backward, or parameters.

    Checkpointing runs a block's forward twice: 4/3 of its cost. The head's cost stays the same."""
    block, head = block_costs(config, seq_len)[0], head_cost(config)
    if by_parameters:
        return head.parameters, block.parameters, head.parameters
    return 0, block.flops * (4 / 3 if checkpointing else 1), head.flops


def stage_costs(counts, first, block, last) -> list[float]:
    """Cost of each stage, most expensive first: the smaller of two such lists is better."""
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
    return f"{share}; the largest share is {max(each) * len(each) / sum(each):.2f} x the mean"


def _candidates(n: int, stages: int) -> Iterator[list[int]]:
    """Every way to fill the first and last stage; the stages between share the rest evenly."""
    if stages == 1:
        yield [n]
        return
    middle = stages - 2
    for first in range(n - stages + 1, 0, -1):
        for last in range(1, n - middle - first + 1) if middle else [n - first]:
            rest = n - first - last
            yield [first, *(rest // middle + (s < rest % middle) for s in range(middle)), last]
