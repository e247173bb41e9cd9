"""Estimates a rank's peak memory, by part, before anything is allocated.

The peak is at one of two moments: at the loss, with all activations and a chunk's logits, or at the
end of the backward, with all gradients."""

import numpy as np
import torch
from transformers import AttentionInterface

from llm_demo.device import this_device
from llm_demo.model.attention import BUCKET
from llm_demo.model.attention_choice import why_not
from llm_demo.model.costs import head_size
from llm_demo.model.decoder import Blocks, skeleton
from llm_demo.model.loss import CHUNK_ROWS, HEAD_SLICE

GB = 2**30


def saved_bytes(args, config, compute, train) -> float:
    """Bytes per token that one block keeps for the backward."""
    if args.use_activation_checkpointing:
        return config.hidden_size * torch.finfo(compute.dtype).bits // 8
    return _saved_by_block(args, config, compute, train)


def passing_bytes(args, config, compute, train) -> float:
    """Bytes per token that exist only while one block's backward runs: recomputed activations, and
    the gradients of the probabilities if attention is not a fused kernel."""
    recomputed = args.use_activation_checkpointing
    again = _saved_by_block(args, config, compute, train) if recomputed else 0
    return again + 2 * config.num_attention_heads * _keys_kept(config, compute, train) * 4


def _saved_by_block(args, config, compute, train) -> float:
    """Bytes per token that one block keeps without checkpointing."""
    size = torch.finfo(compute.dtype).bits // 8
    d, inner = config.hidden_size, config.intermediate_size
    q = config.num_attention_heads * head_size(config)
    kv = config.num_key_value_heads * head_size(config)
    if compute.compile:
        # Both residuals and both norms' outputs; q, k before and after rotation, v, the attention
        # output; gate, up and their product. The compiler recomputes what is cheap.
        return (4 * d + 3 * q + 3 * kv + 3 * inner) * size * args.activation_memory_budget
    return _saved_uncompiled(config, compute, train)


class _Attention(torch.autograd.Function):
    """Saves what a fused kernel saves, and computes nothing."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q.transpose(1, 2))


def _count_attention(module, q, k, v, *args, **kwargs):
    return _Attention.apply(q, k, v), None


AttentionInterface.register("packed_counted", _count_attention)


def _saved_uncompiled(config, compute, train, tokens: int = 256) -> float:
    """The same for plain PyTorch, counted in a forward on the meta device without allocating."""
    block = skeleton(config, "counted").model.layers[0].to(compute.dtype)
    like = {"dtype": compute.dtype, "device": "meta"}
    hidden = torch.empty(1, tokens, config.hidden_size, requires_grad=True, **like)
    table = torch.empty(1, tokens, head_size(config), **like)
    kept = {}

    def keep(t):  # several tensors may be views of one storage
        kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = Blocks([block], False)(hidden, (table, table), None, None)
    del out
    for p in block.parameters():
        kept.pop(p.untyped_storage()._cdata, None)
    saved = sum(storage.nbytes() for storage in kept.values()) / tokens
    return saved + _saved_by_kernel(config, compute, train)


def _keys_kept(config, compute, train) -> float:
    """Mean number of keys per token whose probabilities are kept: none by a fused kernel."""
    device = this_device() if compute.attn_impl == "bucketed" else None
    plain = device and device.vendor == "amd" and why_not("varlen", device, compute.dtype, False)
    if compute.attn_impl == "math":
        return train.seq_len
    if compute.attn_impl == "bucketed_math" or compute.attn_impl == "bucketed" and plain:
        lengths = np.diff(train.doc_start)
        padded = np.minimum(-(-lengths // BUCKET) * BUCKET, train.seq_len)
        return float((padded**2).sum() / lengths.sum())
    return 0


def _saved_by_kernel(config, compute, train) -> float:
    """Bytes per token kept besides q, k, v and the output if attention is not one fused kernel."""
    heads, D = config.num_attention_heads, head_size(config)
    if keys := _keys_kept(config, compute, train):
        # the kernel works in fp32, on repeated k and v, and keeps the probabilities
        return 3 * heads * D * 4 + heads * keys * 4
    if compute.attn_impl == "bucketed" and not train.single:
        # q, k and v are kept only in buckets, the output in buckets and in token order
        return heads * D * torch.finfo(compute.dtype).bits // 8
    return 0


def loss_bytes(args, config, compute, train) -> float:
    """Bytes of a chunk's logits, which become their gradient, and of the head's gradient."""
    tokens = args.micro_batch_size * train.seq_len
    slim = getattr(args, "optimizer_on_host", False) and tokens > CHUNK_ROWS
    rows = min(CHUNK_ROWS // 4 if slim else CHUNK_ROWS, tokens)
    weight = config.vocab_size * config.hidden_size
    size = torch.finfo(compute.dtype).bits // 8
    logits = rows * config.vocab_size * size
    # in place if compiled or in fp32, else beside an fp32 copy
    copied = 0 if compute.compile or size == 4 else rows * config.vocab_size * 4
    if tokens > CHUNK_ROWS:  # the head's gradient is summed in fp32
        return weight * 4 + max(logits + copied, weight * size)
    return logits + max(copied, weight * size + min(HEAD_SLICE, weight) * 4)


def at_the_loss(
    args, config, compute, train, block_tokens: float, head: bool
) -> tuple[float, float]:
    """(bytes of activations, bytes of the loss) when their sum is largest. block_tokens: tokens
    kept, times the blocks that keep them; head: whether the loss is computed here."""
    kept = block_tokens * saved_bytes(args, config, compute, train)
    passing = args.micro_batch_size * train.seq_len * passing_bytes(args, config, compute, train)
    loss = loss_bytes(args, config, compute, train) if head else 0
    return (kept, loss) if loss >= passing else (kept + passing, 0)


def describe(ranks: list[dict[str, float]], limit_gb: float = 0) -> str:
    """A table of the parts, with a warning if they come near the memory of this device, or near
    limit_gb if that is set."""
    totals = [sum(parts.values()) for parts in ranks]
    width = max(len(name) for name in ranks[0])
    lines = ["estimated peak memory of each rank in GB (2**30 bytes):"]
    for name in ranks[0]:
        lines.append(f"  {name:{width}} " + " ".join(f"{parts[name]:7.1f}" for parts in ranks))
    lines.append(f"  {'total':{width}} " + " ".join(f"{total:7.1f}" for total in totals))
    capacity_gb = limit_gb or this_device().memory_gb
    if capacity_gb and max(totals) > 0.95 * capacity_gb:
        lines.append(f"warning: this may not fit into {capacity_gb:.0f} GB")
    return "\n".join(lines)
