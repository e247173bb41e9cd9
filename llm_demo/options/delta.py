"""Gated delta rule of packed documents, in Hugging Face's modules (Qwen3.5's linear attention).

A layer of this kind has no scores: a state of each head passes over a document's tokens, after a
causal convolution of a few of them. Both start from nothing in each document.

Here the rule is transformers' PyTorch version on attention's buckets, each document a row: exact,
and slow on GPUs.

Source: "Gated Delta Networks" (Yang et al. 2024)."""

import inspect
import types
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from llm_demo.core.decoder import delta_layers
from llm_demo.core.rows import position_ids


def use_rule(model: nn.Module, name: str) -> None:
    """Let a model's layers with a delta rule take packed documents. name: as of rule_of."""
    for layer in delta_layers(model):
        layer.rule = rule_of(name)
        layer.forward = types.MethodType(_forward, layer)


def _forward(layer, hidden_states, documents, **kwargs):
    """In place of the layer's own forward: hidden_states [B, S, d] -> the same shape."""
    positions = position_ids(documents.cu_seqlens, tuple(hidden_states.shape[:2]))
    mixed = convolve(layer.in_proj_qkv(hidden_states), layer.conv1d.weight.squeeze(1), positions)
    q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (q, k))
    v, z = (x.unflatten(-1, (-1, layer.head_v_dim)) for x in (v, layer.in_proj_z(hidden_states)))
    beta = layer.in_proj_b(hidden_states).sigmoid()
    steps = F.softplus(layer.in_proj_a(hidden_states).float() + layer.dt_bias)
    out = layer.rule(q, k, v, -layer.A_log.float().exp() * steps, beta, documents)
    out = layer.norm(out.flatten(0, 2), z.flatten(0, 2))
    return layer.out_proj(out.view(*hidden_states.shape[:2], -1))


def convolve(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """silu of a causal convolution of each channel within each document. x [B, S, C], weight
    [C, taps], the last of which is a token's own, positions [B, S], from 0 -> [B, S, C]."""
    own, *earlier = weight.float().flip(1).T
    out = x * own
    for back, tap in enumerate(earlier, 1):  # a compiler would keep padded copies, but rolls again
        before = x.roll(back, 1).masked_fill(positions[..., None] < back, 0)
        out = out + before * tap
    return F.silu(out).to(x.dtype)


def chunked(q, k, v, g, beta, documents) -> torch.Tensor:
    """The rule itself: q and k [B, S, H, D], v [B, S, HV, E], g, the logarithm of the decay, and
    beta [B, S, HV] -> [B, S, HV, E]. Padding of a bucket comes last and is zeros."""
    # here, so that other models need not import it; the function within transformers' choice
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    rule = partial(inspect.unwrap(torch_chunk_gated_delta_rule), use_qk_l2norm_in_kernel=True)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return documents.by_bucket(lambda *rows: rule(*rows)[0], q, k, v, g, beta)


def rule_of(name: str) -> Callable:
    """A function like `chunked`: that itself, or a kernel of flash-linear-attention."""
    if name == "chunked":
        return chunked
    from llm_demo.options.delta_kernels import KERNELS

    return KERNELS[name]
