"""Parameters and FLOPs of a decoder, per block, from its configuration."""

import math
from typing import NamedTuple

from torch import nn


class Cost(NamedTuple):
    parameters: int  # matrices only, no norms
    active: int  # parameters that one token uses
    flops: float  # training FLOPs per token, forward and backward


def block_costs(config, seq_len: int) -> list[Cost]:
    """The cost of each decoder block.

    FLOPs: 6 per active weight of a matrix product, plus 12·heads·head_dim·S for attention, counted
    in full rather than its causal half, as in the PaLM paper's appendix B."""
    d, inner = config.hidden_size, config.intermediate_size
    heads, head_dim = config.num_attention_heads, head_size(config)
    attention = d * head_dim * (2 * heads + 2 * config.num_key_value_heads)
    weights = attention + 3 * d * inner
    block = Cost(weights, weights, 6 * weights + 12 * heads * head_dim * seq_len)
    return [block] * config.num_hidden_layers


def head_cost(config) -> Cost:
    """The cost of the head. The embedding has as many parameters but no matrix product."""
    weights = config.hidden_size * config.vocab_size
    return Cost(weights, weights, 6 * weights)


def flops_of_slot(config, seq_len: int) -> float:
    """Training FLOPs of one token slot through the whole model, the basis of MFU."""
    return sum(block.flops for block in block_costs(config, seq_len)) + head_cost(config).flops


def parameters_of(config) -> int:
    """Matrix parameters of the whole model; a tied embedding and head count once."""
    ends = head_cost(config).parameters * (1 if config.tie_word_embeddings else 2)
    return sum(block.parameters for block in block_costs(config, 0)) + ends


def head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def param_count(model: nn.Module) -> int:
    return sum(math.prod(p.shape) for p in {id(p): p for p in model.parameters()}.values())
