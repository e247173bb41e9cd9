"""Estimates a rank's peak memory, by part, before anything is allocated.

The peak is at one of two moments: at the loss, with all activations and a chunk's logits, or at the
end of the backward, with all gradients."""

import functools
import itertools

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fsdp.activations_on_host import STAY
from llm_demo.core.attention import BUCKET, one_width
from llm_demo.core.decoder import Blocks, skeleton
from llm_demo.core.experts import FUSED, Routers, blocks_with_experts, sorted_experts
from llm_demo.core.lora import apply_lora
from llm_demo.core.loss import CHUNK_ROWS, HEAD_SLICE, SLIM
from llm_demo.job.choices import has_fused_kernels
from llm_demo.job.costs import experts_of, head_size, heads_of, latent, mixed_blocks, shared_width
from llm_demo.job.device import this_device

GB = 2**30
# per chosen expert with its probability: kept, so that the recomputation has the same ones
CHOICES = 12
UNUSED, CONTEXT = "reserved, unused", "CUDA and NCCL"
SCATTERED = 0.04  # of what is allocated: the allocator's free memory between it
CONTEXT_GB = 1.2  # measured on two H100
PROCESS = 2.1  # GB of host memory: Python, PyTorch, CUDA; measured beside 0.6B to 14B on H200


def saved_bytes(args, config, compute, train) -> list[float]:
    """Bytes per token that each block keeps for the backward."""
    if args.use_activation_checkpointing:
        hidden = config.hidden_size * compute.dtype.itemsize
        return [hidden + CHOICES * k for k in _chosen(config)]
    return _saved_by_blocks(args, config, compute, train)


def attention_bytes(config, compute) -> int:
    """Bytes per token of what a block's attention returned: its output, as wide as the kernel has
    it, and the logarithms of the sums."""
    heads = heads_of(config)
    width = max(heads.width, heads.values) if _pads(compute) else heads.values
    return heads.queries * (width * compute.dtype.itemsize + 4)


def passing_bytes(args, config, compute, train) -> list[float]:
    """Bytes per token that exist only while a block's backward runs: recomputed activations with
    the gradients beside them, and the gradients of the probabilities if attention is not a fused
    kernel."""
    chosen, size = _chosen(config), compute.dtype.itemsize
    recomputed = args.use_activation_checkpointing
    again = _saved_by_blocks(args, config, compute, train) if recomputed else [0] * len(chosen)
    scores = 2 * config.num_attention_heads * keys_kept(compute, train) * 4
    scores += _exchanged(args, config, compute)[1]
    dense = 0
    if recomputed:
        # of the feed-forward network's product, or those of attention when the network's
        # activations are gone
        network = config.intermediate_size * size
        dense = max(network, _attention_gradients(args, config, compute, train) - 3 * network)
    # an estimate: of the experts' inputs, in the order of experts and of tokens
    experts = [2 * k * config.hidden_size * size for k in chosen]
    grads = [of_experts or dense for of_experts in experts]
    return [saved + scores + grad for saved, grad in zip(again, grads, strict=True)]


def _attention_gradients(args, config, compute, train) -> float:
    """Bytes per token of the gradients of a fused kernel's output, queries, keys and values, as
    flash attention and cuDNN have them: of queries also in fp32, of keys and values also for each
    head of queries."""
    if keys_kept(compute, train):
        return 0
    queries, keys, width, values = heads_of(config)
    grouped = queries if keys < queries else 0
    size = compute.dtype.itemsize
    exchanged = 2 * (args.sequence_parallel > 1)
    numbers = queries * (width + (1 + exchanged) * values) + (keys + grouped) * (width + values)
    rounded = 0  # flash attention has 128 more rows for each document
    if _pads(compute) and not train.single:
        rounded = 128 * (len(train.doc_start) - 1) / int(train.doc_start[-1])
    return numbers * size + queries * width * 4 * (1 + rounded)


def tokens_here(args, train) -> int:
    """Tokens of a micro-batch that a rank holds."""
    return args.micro_batch_size * train.seq_len // args.sequence_parallel


def _exchanged(args, config, compute) -> tuple[int, int]:
    """(bytes per token that a block keeps because its attention exchanges slices and heads, bytes
    of what it sends and receives meanwhile)."""
    n, size = args.sequence_parallel, compute.dtype.itemsize
    if n == 1:
        return 0, 0
    queries, keys, width, values = heads_of(config)
    repeated = max(keys, n)
    sent = queries * width + repeated * (width + values)
    # the output also as its product wants it, and the copies of keys and values
    extra = queries * values + (repeated - keys) * (width + values)
    return extra * size, 2 * sent * size


def _chosen(config) -> list[int]:
    """For each block, how many experts a token has there."""
    chosen = getattr(config, "num_experts_per_tok", 0)
    return [chosen if mixed else 0 for mixed in mixed_blocks(config)]


def _saved_by_blocks(args, config, compute, train) -> list[float]:
    """Bytes per token that each block keeps without checkpointing."""
    exchanged = _exchanged(args, config, compute)[0]
    if not compute.compile:
        return [each + exchanged for each in _saved_uncompiled(config, compute, train)]
    lora, size, chosen = compute.lora, compute.dtype.itemsize, _chosen(config)
    of_experts = set(FUSED) if any(chosen) else set()  # what these names mean in a mixture
    targets = set(lora.targets) if lora else set()
    layers = targets - of_experts
    adapters = lora.rank * len(layers) if lora else 0  # inputs of the second factors

    def trained(*names: str) -> bool:  # else a product needs no input in the backward
        return not lora or any(name in layers for name in names)

    d, shape = config.hidden_size, heads_of(config)
    # Both residuals and both norms' outputs; q and k, v, the attention output; gate, up and their
    # product. Qwen3 normalises q and k, and keeps them before that too. The compiler recomputes
    # what is cheap.
    times = 3 if config.model_type.startswith("qwen3") else 2
    attention = times * (shape.queries + shape.keys) * shape.width
    if latent(config):
        attention = _latent_attention(config, shape, compute, trained)
    attention += d * (2 + trained("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"))
    saved = []
    for k in chosen:
        if k:
            inner = config.moe_intermediate_size
            always = (2 + (not lora)) * shared_width(config)
            if config.model_type == "qwen2_moe":  # what the shared expert's gate multiplies
                always += d
            rows = d + 3 * inner
            if lora:  # frozen products need no inputs, adapted ones need theirs and the adapters'
                rows = 2 * inner + (lora.rank + d) * ("gate_up_proj" in targets)
                rows += (lora.rank + inner) * ("down_proj" in targets)
            kept = (d * (not lora) + attention + always + k * rows + adapters) * size
            # the router's input, if trained, and probabilities in fp32; the choices in three
            # orders; the weights
            kept += 4 * d * (not lora) + 4 * experts_of(config) + k * (3 * 8 + 4)
        else:
            inner = config.intermediate_size
            mlp = d * trained("gate_proj", "up_proj") + (2 + trained("down_proj")) * inner
            kept = (attention + mlp + adapters) * size
        saved.append((kept + exchanged) * args.activation_memory_budget)
    return saved


def _latent_attention(config, shape, compute, trained) -> int:
    """Numbers per token that compiled latent attention keeps. trained: see _saved_by_blocks."""
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    if _pads(compute) and shape.width != shape.values:  # all of one width; the output also cut
        kernel = 4 * max(shape.width, shape.values) + shape.values * trained("o_proj")
    else:  # q, k, what v is a view of, the output as the kernel and as the projection want it
        kernel = 2 * shape.width + nope + (2 + trained("o_proj")) * shape.values
    # the latents, most of them before and after their norm
    latents = (1 + trained("q_b_proj")) * (config.q_lora_rank or 0)
    latents += (1 + trained("kv_b_proj")) * config.kv_lora_rank + rope
    return shape.queries * kernel + latents


def _pads(compute) -> bool:
    return compute.attn_impl in ("varlen_cudnn", "varlen", "flash_attn")


class _Attention(torch.autograd.Function):
    """Saves what a fused kernel saves, and computes nothing."""

    @staticmethod
    def forward(ctx, q, k, v, by_token: bool):
        B, H, S, E = *q.shape[:3], v.shape[-1]
        if by_token or q.transpose(1, 2).is_contiguous():
            out = q.new_empty(B, S, H, E)
        else:  # in the order of q
            out = q.new_empty(B, H, S, E).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out)
        return out


def _count_attention(module, q, k, v, *args, documents: str, **kwargs):
    """documents: sdpa, buckets or varlen, as which tokens are moved and values widened."""
    if documents == "sdpa":
        return _Attention.apply(q, k, v, False), None
    if documents == "varlen":
        kernel = one_width(lambda q, k, v, documents, scaling: _Attention.apply(q, k, v, True))
        return kernel(q, k, v, None, None), None
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return _Attention.apply(q, k, v, True), None


class _Product(torch.autograd.Function):
    """Saves what the experts' product saves, and computes nothing."""

    @staticmethod
    def forward(ctx, rows, weight, ends):
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.shape[-1])


AttentionInterface.register("packed_counted", _count_attention)
ALL_EXPERTS_FUNCTIONS.register("sorted_counted", functools.partial(sorted_experts, _Product.apply))


_counts = {}  # {what bytes per token depend on: (the configuration, bytes of each block)}


def _saved_uncompiled(config, compute, train) -> list[float]:
    """The same for plain PyTorch, counted in a forward on the meta device without allocating."""
    moved = "varlen" if _pads(compute) else "sdpa"
    if compute.attn_impl.startswith("bucketed") and not train.single:
        moved = "buckets"
    config = getattr(config, "whole", config)
    lora = compute.lora and (compute.lora.rank, tuple(compute.lora.targets))
    key = id(config), compute.dtype, moved, lora
    if key not in _counts:
        _counts[key] = config, _count_blocks(config, compute, moved)
    kernel = _saved_by_kernel(config, compute, train)
    return [counted + kernel for counted in _counts[key][1]]


def _count_blocks(config, compute, moved: str) -> list[float]:
    """Bytes per token that each block keeps, without what its attention's kernel does."""
    lm = skeleton(config, "counted", product="counted")
    if lora := compute.lora:
        apply_lora(lm, lora, compute.dtype)
    model = lm.model
    if with_experts := blocks_with_experts(model):
        Routers(with_experts)
    counted, saved = {}, []
    for block in model.layers:  # few differ
        shapes = tuple(p.shape for p in block.parameters())
        if shapes not in counted:
            block.to("meta", compute.dtype)
            if hasattr(block.mlp, "gate"):
                block.mlp.gate.float()
            # the difference of two: some tensors have the size of weights, not of tokens
            twice, once = (_count(block, config, compute, moved, n) for n in (512, 256))
            counted[shapes] = (twice - once) / 256
        saved.append(counted[shapes])
    return saved


def _count(block, config, compute, moved: str, tokens: int) -> int:
    """Bytes that a block on the meta device keeps."""
    meta = functools.partial(torch.empty, dtype=compute.dtype, device="meta")
    hidden = meta(1, tokens, config.hidden_size, requires_grad=True)
    rotary = getattr(config, "qk_rope_head_dim", None) or head_size(config)
    table = meta(1, tokens, rotary)
    kept = {}

    def keep(t):  # several tensors may be views of one storage
        kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = Blocks([block], False)(hidden, (table, table), None, moved)
    del out
    for p in block.parameters():
        kept.pop(p.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


def keys_kept(compute, train) -> float:
    """Mean number of keys per token whose probabilities are kept: none by a fused kernel."""
    device = this_device() if compute.attn_impl == "bucketed" else None
    plain = device and device.vendor == "amd" and not has_fused_kernels(device)
    if compute.attn_impl == "math":
        return train.seq_len
    if compute.attn_impl == "bucketed_math" or compute.attn_impl == "bucketed" and plain:
        lengths = np.diff(train.doc_start)
        padded = np.minimum(-(-lengths // BUCKET) * BUCKET, train.seq_len)
        return float((padded**2).sum() / lengths.sum())
    return 0


def _saved_by_kernel(config, compute, train) -> float:
    """Bytes per token kept besides q, k, v and the output if attention is not one fused kernel."""
    heads, _, width, values = heads_of(config)
    if keys := keys_kept(compute, train):
        # the kernel works in fp32, on repeated k and v, and keeps the probabilities
        return heads * (2 * width + values) * 4 + heads * keys * 4
    if compute.attn_impl == "bucketed" and not train.single:
        # q, k and v are kept only in buckets, the output in buckets and in token order
        return heads * values * compute.dtype.itemsize
    return 0


def loss_bytes(args, config, compute, train) -> float:
    """Bytes of a chunk's logits, which become their gradient, and of the head's gradient."""
    tokens = tokens_here(args, train)
    slim = args.optimizer_on_host and tokens > CHUNK_ROWS or compute.lora
    rows = min(CHUNK_ROWS // SLIM if slim else CHUNK_ROWS, tokens)
    weight = config.vocab_size * config.hidden_size
    size = compute.dtype.itemsize
    logits = rows * config.vocab_size * size
    # in place if compiled or in fp32, else beside an fp32 copy
    copied = 0 if compute.compile or size == 4 else rows * config.vocab_size * 4
    if compute.lora:  # the head has no gradient
        return logits + copied
    if tokens > CHUNK_ROWS:  # the head's gradient is summed in fp32
        in_place = slim and not args.use_activation_checkpointing
        narrowed = min(HEAD_SLICE, weight) if in_place else weight
        return weight * 4 + max(logits + copied, narrowed * size)
    return logits + max(copied, weight * size + min(HEAD_SLICE, weight) * 4)


def at_the_loss(
    args, config, compute, train, tokens: list[float], head: bool
) -> tuple[float, float]:
    """(bytes of activations, bytes of the loss) when their sum is largest. tokens: kept by each
    block of the model, 0 if it is elsewhere; head: whether the loss is computed here."""
    saved = saved_bytes(args, config, compute, train)
    kept = sum(count * of_token for count, of_token in zip(tokens, saved, strict=True))
    if args.activations_on_host:  # a few inputs, but all choices
        inputs = config.hidden_size * compute.dtype.itemsize
        kept -= sum(tokens[STAY + 1 :]) * inputs
    if n := compute.attention_kept:
        kept += sum(tokens[-n:]) * attention_bytes(config, compute)
    passing = zip(tokens, passing_bytes(args, config, compute, train), strict=True)
    largest = max(each for count, each in passing if count)
    passing = tokens_here(args, train) * largest
    loss = loss_bytes(args, config, compute, train) if head else 0
    return (kept, loss) if loss >= passing else (kept + passing, 0)


def largest_unit(sizes: list[int], blocks: list[int]) -> int:
    """Parameters of the largest unit. sizes: blocks of each; blocks: parameters of each."""
    ends = itertools.accumulate(sizes)
    return max(sum(blocks[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def peak(*moments: dict[str, float]) -> dict[str, float]:
    """GB (2**30 bytes) by part of the moment that takes most, with what a card needs besides.
    moments: bytes by part."""
    largest = max(moments, key=lambda parts: sum(parts.values()))
    parts = {name: size / GB for name, size in largest.items()}
    return {**parts, UNUSED: SCATTERED * sum(parts.values()), CONTEXT: CONTEXT_GB}


def capacity_of(args) -> float:
    """GB (2**30 bytes) of a card for all that `peak` counts, 0 if unknown. --device_memory_gb does
    not limit CUDA and NCCL."""
    limit = args.device_memory_gb
    return limit + CONTEXT_GB if limit else this_device().memory_gb


def describe(ranks: list[dict[str, float]], args) -> str:
    """A table of the parts, with a warning if they come near what a card has."""
    device, capacity_gb = this_device(), capacity_of(args)
    if device.type == "cpu":  # has neither
        ranks = [{k: v for k, v in parts.items() if k not in (UNUSED, CONTEXT)} for parts in ranks]
    totals = [sum(parts.values()) for parts in ranks]
    width = max(len(name) for name in ranks[0])
    lines = [f"estimated peak memory of each rank on {device}, in GiB (2**30 bytes):"]
    for name in ranks[0]:
        lines.append(f"  {name:{width}} " + " ".join(f"{parts[name]:7.1f}" for parts in ranks))
    lines.append(f"  {'total':{width}} " + " ".join(f"{total:7.1f}" for total in totals))
    if device.type == "cpu":
        lines.append("this is the run on this machine's CPU; --card estimates it on a GPU")
    if capacity_gb and max(totals) > 0.95 * capacity_gb:
        lines.append(f"warning: this may not fit into {capacity_gb:.1f} GiB")
    return "\n".join(lines)
