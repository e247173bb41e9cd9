"""Parameters and FLOPs of a decoder, from its configuration."""

import math

from torch import nn


def flops_per_token(config, seq_len: int) -> tuple[float, float]:
    """Training FLOPs per token of (one block, the head): 6 per weight of a matrix product, and
    12·heads·head_dim·S of a block for attention, counted in full rather than its causal half, as
    in the PaLM paper's appendix B. Their sum over blocks and head is what MFU divides by."""
    d, inner = config.hidden_size, config.intermediate_size
    heads, head_dim = config.num_attention_heads, head_size(config)
    attention = d * head_dim * (2 * heads + 2 * config.num_key_value_heads)
    block = 6 * (attention + 3 * d * inner) + 12 * heads * head_dim * seq_len
    return block, 6 * d * config.vocab_size


def head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def param_count(model: nn.Module) -> int:
    return sum(math.prod(p.shape) for p in {id(p): p for p in model.parameters()}.values())


def flops_of_slot(config, seq_len: int) -> float:
    """Training FLOPs of one token slot through the whole model."""
    block, head = flops_per_token(config, seq_len)
    return config.num_hidden_layers * block + head
