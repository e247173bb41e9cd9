"""How much memory a rank will need at its peak, by part, before anything is allocated.

Two moments compete for the peak: the loss, when all activations are there and the logits of a
chunk; and the end of the backward, when all gradients are."""

import numpy as np
import torch
from transformers import AttentionInterface

from llm_demo.device import this_device
from llm_demo.model.attention import BUCKET, why_not
from llm_demo.model.costs import flops_per_token, head_size
from llm_demo.model.decoder import Blocks, skeleton, unit_sizes
from llm_demo.model.loss import CHUNK

GB = 2**30


def saved_bytes(plan, args) -> float:
    """Bytes that one block keeps for the backward, for one token."""
    if args.use_activation_checkpointing:
        return plan.config.hidden_size * torch.finfo(plan.dtype).bits // 8
    return _saved_by_block(plan, args)


def passing_bytes(plan, args) -> float:
    """Bytes for one token that are there only while one block's backward runs: what it computes
    again, and the gradients of the probabilities where attention is no fused kernel."""
    again = _saved_by_block(plan, args) if args.use_activation_checkpointing else 0
    return again + 2 * plan.config.num_attention_heads * _keys_kept(plan) * 4


def _saved_by_block(plan, args) -> float:
    """Bytes for one token without checkpointing."""
    config, size = plan.config, torch.finfo(plan.dtype).bits // 8
    d, inner = config.hidden_size, config.intermediate_size
    q = config.num_attention_heads * head_size(config)
    kv = config.num_key_value_heads * head_size(config)
    if plan.compile:
        # Both residuals and both norms' outputs; q, k before and after rotation, v, the attention's
        # output; gate, up and their product. What is cheap the compiler computes again.
        return (4 * d + 3 * q + 3 * kv + 3 * inner) * size * args.activation_memory_budget
    return _saved_uncompiled(plan)


class _Attention(torch.autograd.Function):
    """Keeps what a fused kernel keeps, and computes nothing."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q.transpose(1, 2))


def _count_attention(module, q, k, v, *args, **kwargs):
    return _Attention.apply(q, k, v), None


AttentionInterface.register("packed_counted", _count_attention)


def _saved_uncompiled(plan, tokens: int = 256) -> float:
    """The same for plain PyTorch, counted in a forward on the meta device, which allocates none."""
    block = skeleton(plan.config, "counted").model.layers[0].to(plan.dtype)
    like = {"dtype": plan.dtype, "device": "meta"}
    hidden = torch.empty(1, tokens, plan.config.hidden_size, requires_grad=True, **like)
    table = torch.empty(1, tokens, head_size(plan.config), **like)
    kept = {}

    def keep(t):  # several tensors may be views of one storage
        kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = Blocks([block], False)(hidden, (table, table), None, None)
    del out
    for p in block.parameters():
        kept.pop(p.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values()) / tokens + _saved_by_kernel(plan)


def _keys_kept(plan) -> float:
    """How many keys a token's probabilities are kept for, in the mean: none by a fused kernel."""
    device = this_device()
    plain = device.vendor == "amd" and why_not("varlen", device, plan.dtype, single=False)
    if plan.attn_impl == "math":
        return plan.train.seq_len
    if plan.attn_impl == "bucketed_math" or plan.attn_impl == "bucketed" and plain:
        lengths = np.diff(plan.train.doc_start)
        padded = np.minimum(-(-lengths // BUCKET) * BUCKET, plan.train.seq_len)
        return float((padded**2).sum() / lengths.sum())
    return 0


def _saved_by_kernel(plan) -> float:
    """What an attention that is not one fused kernel keeps besides q, k, v and its output."""
    heads, D = plan.config.num_attention_heads, head_size(plan.config)
    if keys := _keys_kept(plan):
        # the kernel works in fp32, on repeated k and v, and keeps the probabilities
        return 3 * heads * D * 4 + heads * keys * 4
    if plan.attn_impl == "bucketed" and not plan.train.single:
        # q, k and v are kept in the buckets only, the output there and in the order of the tokens
        return heads * D * torch.finfo(plan.dtype).bits // 8
    return 0


def loss_bytes(plan, args) -> float:
    """Bytes of a chunk's logits, of their gradient and of the head's gradient."""
    rows = min(CHUNK, args.micro_batch_size * args.seq_len)
    size = torch.finfo(plan.dtype).bits // 8
    # compiled: logits and their gradient; plain: in fp32, in place, beside them in less
    plain = 4 if size == 4 else 4 + size
    logits = rows * plan.config.vocab_size * (2 * size if plan.compile else plain)
    return logits + plan.config.vocab_size * plan.config.hidden_size * 4


def parameters(config) -> list[float]:
    """[of a block, of the embedding and of a head that is not tied to it: each this many]."""
    return [flops / 6 for flops in flops_per_token(config, 0)]


def of_fsdp(plan, args, ranks: int) -> list[dict[str, float]]:
    """GB (2**30 bytes) by part, one entry for each rank."""
    block, embedding = parameters(plan.config)
    n = plan.config.num_hidden_layers
    ends = embedding * (1 if plan.config.tie_word_embeddings else 2)
    total, size = n * block + ends, torch.finfo(plan.dtype).bits // 8
    unit = unit_sizes(plan.config, n, args.blocks_per_unit)[0] * block
    tokens = args.micro_batch_size * args.seq_len
    accumulates = args.grad_accum_steps > 1
    activations, loss = at_the_loss(plan, args, tokens * n, head=True)
    if args.fsdp:
        early = (
            total / ranks * 4 + (ends + 2 * unit if args.reshard_after_forward else total) * size
        )
        late = total / ranks * 4 + (embedding + unit) * size
        # between micro-batches gradients stay whole and in fp32
        kept = total * 4 if accumulates else 0
        # the shards, and what the embedding's is reduced from and to
        grads = (total / ranks + embedding * (1 + 1 / ranks)) * 4 + embedding * size
    else:
        kept = total * 4 if accumulates else 0
        halves = plan.dtype == torch.bfloat16 and plan.compile  # see llm_demo/parallel/masters.py
        early = late = total * (4 if halves or size == 4 else 4 + size)
        if size == 4:
            grads = (total + embedding) * 4
        elif accumulates:  # a micro-batch's are there before they are added
            grads = total * (4 + size)
        elif halves:  # a unit's are made one tensor
            grads = (total + max(unit, ends)) * size
        else:
            grads = total * 4 + 2 * ends * size
    rest = {"optimizer": total / ranks * 8}
    moments = (
        {"weights": early, **rest, "gradients": kept, "activations": activations, "loss": loss},
        {"weights": late, **rest, "gradients": grads, "activations": 0, "loss": 0},
    )
    parts = max(moments, key=lambda parts: sum(parts.values()))
    return [{k: v / GB for k, v in parts.items()}] * ranks


def at_the_loss(plan, args, block_tokens: float, head: bool) -> tuple[float, float]:
    """(bytes of activations, of the loss) when both together are most. block_tokens: tokens that
    are kept, times the blocks that keep them; head: whether the loss is formed here at all."""
    kept = block_tokens * saved_bytes(plan, args)
    passing = args.micro_batch_size * args.seq_len * passing_bytes(plan, args)
    loss = loss_bytes(plan, args) if head else 0
    return (kept, loss) if loss >= passing else (kept + passing, 0)


def of_pipeline(plan, args, pieces: list[list[tuple[int, int, bool, bool]]]) -> list[dict]:
    """GB (2**30 bytes) by part, one entry for each stage. pieces: for each stage its pieces of the
    model, (blocks, micro-batches in flight, has the embedding, has the head)."""
    block, embedding = parameters(plan.config)
    size = torch.finfo(plan.dtype).bits // 8
    tokens, found = args.micro_batch_size * args.seq_len, []
    for stage in pieces:
        ends = sum(first + last for _, _, first, last in stage)
        if plan.config.tie_word_embeddings:
            ends = min(ends, 1)
        count = sum(blocks for blocks, *_ in stage) * block + ends * embedding
        flight = sum(blocks * in_flight for blocks, in_flight, *_ in stage)
        head = any(last for *_, last in stage)
        activations, loss = at_the_loss(plan, args, tokens * flight, head)
        parts = {
            # ZeRO-1 shards masters and optimizer over replicas
            "weights": count * (size + 4 / plan.replicas),
            "optimizer": count * 8 / plan.replicas,
            # fp32's engine accumulates them beside those of the micro-batch
            "gradients": count * (8 if size == 4 and args.grad_accum_steps > 1 else 4),
            "activations": activations,
            "loss": loss,
        }
        if size == 4:  # and in its step once more, for the optimizer, and the embedding's apart
            last = count * (8 + 4 / plan.replicas) + embedding * 4 * bool(ends)
            step = {**parts, "gradients": last, "activations": 0, "loss": 0}
            parts = max(parts, step, key=lambda parts: sum(parts.values()))
        found.append({k: v / GB for k, v in parts.items()})
    return found


def describe(ranks: list[dict[str, float]]) -> str:
    """A table of the parts, and a word where they hardly fit this device."""
    totals = [sum(parts.values()) for parts in ranks]
    width = max(len(name) for name in ranks[0])
    lines = ["memory expected at the peak, GB (2**30 bytes) of each rank:"]
    for name in ranks[0]:
        lines.append(f"  {name:{width}} " + " ".join(f"{parts[name]:7.1f}" for parts in ranks))
    lines.append(f"  {'together':{width}} " + " ".join(f"{total:7.1f}" for total in totals))
    capacity_gb = this_device().memory_gb
    if capacity_gb and max(totals) > 0.95 * capacity_gb:
        lines.append(f"this will hardly fit: the device has {capacity_gb:.0f}")
    return "\n".join(lines)
