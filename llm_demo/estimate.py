"""Estimates a rank's peak memory, by part, before anything is allocated.

Each engine's estimate.py says what its ranks hold (`Held`). `peak` turns that into GB, `report`
into the table of --estimate; llm_demo/fit.py and defaults that depend on memory ask `peak` too."""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fsdp.activations_on_host import STAY
from llm_demo.core.attention import BUCKET, one_width
from llm_demo.core.decoder import PIECE, Blocks, skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.experts import Routers, blocks_with_experts, sorted_experts
from llm_demo.core.lora import apply_lora
from llm_demo.core.loss import CHUNK_ROWS, HEAD_SLICE, SLIM
from llm_demo.core.mesh import World
from llm_demo.job.choices import has_fused_kernels
from llm_demo.job.costs import experts_of, heads_of, mixed_blocks, rotary_width
from llm_demo.job.device import free_host_memory, this_device
from llm_demo.job.dist import once_per_node

GB = 2**30
# per chosen expert with its probability: kept, so that the recomputation has the same ones
CHOICES = 12
UNUSED, CONTEXT = "reserved, unused", "CUDA and NCCL"
SCATTERED = 0.04  # of what is allocated: the allocator's free memory between it
CONTEXT_GB = 1.2  # measured on two H100
PROCESS = 2.1  # GB of host memory: Python, PyTorch, CUDA; measured beside 0.6B to 14B on H200
USABLE = 0.95  # share of a card's memory; the rest is for what the estimate leaves out
# What a moment has of activations: all and the loss; all; those of a recomputed block; none.
LOSS, KEPT, BLOCK, NONE = "loss", "kept", "block", "none"


class Held(NamedTuple):
    """What a rank holds."""

    optimizer: float  # bytes, throughout the step
    # that may take most: (bytes of weights with masters, bytes of gradients, LOSS, KEPT, ...)
    times: list[tuple[float, float, str]]
    tokens: list[float]  # whose activations each block of the model keeps; 0: it is elsewhere
    head: bool = True  # whether the loss is computed here
    transfers: float = 0  # bytes on their way between ranks, beside activations
    host: float = 0  # bytes of host memory, with the process, if anything is offloaded
    copies: float = 0  # bytes more of host memory while a checkpoint is saved or read


def peak(held: Held, args, config, compute, train) -> dict[str, float]:
    """GB (2**30 bytes) by part at the moment that takes most, with what a card needs besides."""
    kept, loss = at_the_loss(args, config, compute, train, held.tokens, held.head)
    kept, block = kept + held.transfers, 0
    if args.use_activation_checkpointing:
        block = tokens_here(args, train) * max(passing_bytes(args, config, compute, train))
    beside = {LOSS: (kept, loss), KEPT: (kept, 0), BLOCK: (block, 0), NONE: (0, 0)}
    all_parts = [(w, held.optimizer, grads, *beside[when]) for w, grads, when in held.times]
    names = ("weights", "optimizer", "gradients", "activations", "loss")
    gb = {name: size / GB for name, size in zip(names, max(all_parts, key=sum), strict=True)}
    return {**gb, UNUSED: SCATTERED * sum(gb.values()), CONTEXT: CONTEXT_GB}


def fullest(ranks: list[Held], args, config, compute, train) -> dict[str, float]:
    """`peak` of the rank that needs most."""
    different = {id(held): held for held in ranks}.values()
    each = (peak(held, args, config, compute, train) for held in different)
    return max(each, key=lambda parts: sum(parts.values()))


def need(ranks: list[Held], args, config, compute, train) -> float:
    """GB (2**30 bytes) of the rank that needs most."""
    return sum(fullest(ranks, args, config, compute, train).values())


def capacity_of(args) -> float:
    """GB (2**30 bytes) of a card for all that `peak` counts, 0 if unknown. --device_memory_gb does
    not limit CUDA and NCCL."""
    limit = args.device_memory_gb
    return limit + CONTEXT_GB if limit else this_device().memory_gb


def report(ranks: list[Held], args, config, compute, train) -> str:
    """What --estimate prints: a table of the parts, with a warning if they come near what a card
    has, and host memory."""
    device, capacity_gb = this_device(), capacity_of(args)
    each = [peak(held, args, config, compute, train) for held in ranks]
    if device.type == "cpu":  # has neither
        each = [{k: v for k, v in parts.items() if k not in (UNUSED, CONTEXT)} for parts in each]
    rows = {name: [parts[name] for parts in each] for name in each[0]}
    rows["total"] = [sum(parts.values()) for parts in each]
    width = max(map(len, rows))
    lines = [f"estimated peak memory of each rank on {device}, in GiB (2**30 bytes):"]
    lines += [f"  {n:{width}} " + " ".join(f"{gb:7.1f}" for gb in row) for n, row in rows.items()]
    if device.type == "cpu":
        lines.append("this is the run on this machine's CPU; --card estimates it on a GPU")
    if capacity_gb and max(rows["total"]) > USABLE * capacity_gb:
        lines.append(f"warning: this may not fit into {capacity_gb:.1f} GiB")
    if on_host := _in_words(sum(h.host for h in ranks) / GB, sum(h.copies for h in ranks) / GB):
        lines.append(f"host memory: {on_host}, for all ranks")
    return "\n".join(lines)


def _in_words(offloaded: float, copies: float) -> str:
    parts = {"for what is offloaded": offloaded, "while a checkpoint is saved or read": copies}
    return " and ".join(f"{size:.1f} GiB {what}" for what, size in parts.items() if size > 0)


def check_host(ranks: list[Held], args, world: World, say: Callable, advice: str) -> None:
    """Check each node's host memory before anything is allocated, and say what is offloaded. Every
    rank calls. Raises UserError, with the advice, if a node has too little."""
    node = ranks[world.rank - world.local_rank :][: world.local_size]
    # the processes have started already
    kept = sum(max(0, held.host / GB - PROCESS) for held in node)
    copies = sum(held.copies for held in node) / GB

    def check() -> str:
        free, needed = free_host_memory() / GB, _in_words(kept, copies)
        if kept + copies > free:
            unsaved = "add --no_save, or " * (kept < free and not args.resume)
            lacking = f"this node needs {needed}, and {free:.1f} GiB are free"
            raise UserError(f"host memory: {lacking}: {unsaved}{advice}")
        return f"host memory: {needed}, of {free:.1f} GiB free"

    said = once_per_node(world, check)
    if kept:
        say(said)


# ---------------------------------------------------------------- what blocks and the loss take


def at_the_loss(args, config, compute, train, tokens: list, head: bool) -> tuple[float, float]:
    """Bytes of (activations, the loss) when their sum is largest. tokens, head: see `Held`."""
    saved = saved_bytes(args, config, compute, train)
    kept = sum(count * of_token for count, of_token in zip(tokens, saved, strict=True))
    if args.activations_on_host:  # a few inputs, but all choices
        kept -= sum(tokens[STAY + 1 :]) * config.hidden_size * compute.dtype.itemsize
    if n := compute.attention_kept:
        kept += sum(tokens[-n:]) * attention_bytes(config, compute)
    passing = zip(tokens, passing_bytes(args, config, compute, train), strict=True)
    passing = tokens_here(args, train) * max(each for count, each in passing if count)
    loss = loss_bytes(args, config, compute, train) if head else 0
    return (kept, loss) if loss >= passing else (kept + passing, 0)


def tokens_here(args, train) -> int:
    """Tokens of a micro-batch that a rank holds."""
    return args.micro_batch_size * train.seq_len // (args.sequence_parallel * args.tensor_parallel)


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
    keys, size = keys_kept(compute, train), compute.dtype.itemsize
    always = 2 * config.num_attention_heads * keys * 4 + _exchanged(args, config, compute)[1]
    # an estimate: of the experts' inputs, in the order of experts and of tokens
    experts = [2 * k * config.hidden_size * size for k in _chosen(config)]
    if not args.use_activation_checkpointing:
        return [always + of_experts for of_experts in experts]
    # Of the feed-forward network's product, or of a fused kernel's output, queries, keys and values
    # when the network's activations are gone. Flash attention and cuDNN have those of queries also
    # in fp32, and those of keys and values also for each head of queries.
    network, heads = config.intermediate_size * size, heads_of(config)
    grouped = heads.keys + heads.queries * (heads.keys < heads.queries)
    kernel = (heads.queries + grouped) * (heads.width + heads.values) * size
    kernel += heads.queries * heads.width * 4
    again = _saved_by_blocks(args, config, compute, train)
    tokens, less = tokens_here(args, train), 0
    if compute.lora and tokens > 2 * PIECE:
        less = 3 * network * (1 - PIECE / tokens)
    dense = max(network - less / 3, kernel * (not keys) - (3 * network - less)) - less
    return [
        saved + always + (of_experts or dense)
        for saved, of_experts in zip(again, experts, strict=True)
    ]


def _exchanged(args, config, compute) -> tuple[int, int]:
    """(bytes per token that a block keeps because it exchanges slices for heads or for whole rows,
    bytes of what it sends and receives meanwhile)."""
    n, size = args.sequence_parallel, compute.dtype.itemsize
    if (shares := args.tensor_parallel) > 1:  # rows for attention and MLP; sums, sent and received
        return tuple(2 * k * config.hidden_size * size for k in (shares - 1, shares))
    if n == 1:
        return 0, 0
    queries, keys, width, values = heads_of(config)
    sent = queries * width + (repeated := max(keys, n)) * (width + values)
    # the output also as its product wants it, and the copies of keys and values
    extra = queries * values + (repeated - keys) * (width + values)
    return extra * size, 2 * sent * size


def _chosen(config) -> list[int]:
    """For each block, how many experts a token has there."""
    chosen = getattr(config, "num_experts_per_tok", 0)
    return [chosen if mixed else 0 for mixed in mixed_blocks(config)]


def loss_bytes(args, config, compute, train) -> float:
    """Bytes of a chunk's logits, which become their gradient, and of the head's gradient."""
    tokens = tokens_here(args, train)
    slim = args.optimizer_on_host and tokens > CHUNK_ROWS or compute.lora
    rows = min(CHUNK_ROWS // SLIM if slim else CHUNK_ROWS, tokens)
    weight, size = config.vocab_size * config.hidden_size, compute.dtype.itemsize
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


# ---------------------------------------------------------------- counted without allocating


def _saved_by_blocks(args, config, compute, train) -> list[float]:
    """Bytes per token that each block keeps without checkpointing."""
    kernel = _saved_by_kernel(config, compute, train) + _exchanged(args, config, compute)[0]
    counted = _count_blocks(config, compute, train)
    if not compute.compile:
        return [saved + kernel for saved, _ in counted]
    # Routers' inputs, if they are trained, and probabilities in fp32; a token's choices in three
    # orders, and their weights.
    router = 4 * config.hidden_size * (not compute.lora) + 4 * experts_of(config)
    routers = [bool(k) * (router + k * (3 * 8 + 4)) for k in _chosen(config)]
    share = compute.dtype.itemsize / 4  # of fp32's
    return [
        args.activation_memory_budget * (products * share + router + kernel)
        for (_, products), router in zip(counted, routers, strict=True)
    ]


def _pads(compute) -> bool:
    return compute.attn_impl in ("varlen_cudnn", "varlen", "flash_attn")


def keys_kept(compute, train) -> float:
    """Mean number of keys per token whose probabilities are kept: none by a fused kernel."""
    if compute.attn_impl == "math":
        return train.seq_len
    plain = compute.attn_impl == "bucketed_math"
    if compute.attn_impl == "bucketed" and (device := this_device()).vendor == "amd":
        plain = not has_fused_kernels(device)
    if plain:
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


_counts = {}  # {what bytes per token depend on: (the configuration, what `_count_blocks` returns)}
_noted = {}  # storages that products, attention and sums read or write in a forward, by id
SOME = 2**24  # tokens of a forward, so many that what has the size of weights is little beside them


def _count_blocks(config, compute, train) -> list[tuple[float, float]]:
    """For each block (bytes per token that autograd keeps, those of them that the compiler keeps,
    in fp32), without what attention's kernel keeps besides, counted on the meta device.

    The compiler keeps what products, attention and sums read or write, as far as the backward needs
    it, and computes the rest again."""
    moved = "varlen" if _pads(compute) else "sdpa"
    if compute.attn_impl.startswith("bucketed") and not train.single:
        moved = "buckets"
    dtype, lora = torch.float32 if compute.compile else compute.dtype, compute.lora
    key = id(config), dtype, moved, lora and (lora.rank, tuple(lora.targets))
    if key not in _counts:
        kinds, few = mixed_blocks(config), copy.copy(config)
        few.num_hidden_layers = 1 + max(map(kinds.index, kinds))  # the first of each kind
        lm = skeleton(few, "counted", product="counted")
        if lora:
            apply_lora(lm, lora, dtype)
        if with_experts := blocks_with_experts(lm.model):
            Routers(with_experts)
        blocks = {kind: lm.model.layers[kinds.index(kind)] for kind in kinds}
        of = {kind: _count(block, config, dtype, moved) for kind, block in blocks.items()}
        _counts[key] = config, [of[kind] for kind in kinds]
    return _counts[key][1]


def _count(block, config, dtype, moved: str) -> tuple[float, float]:
    """Bytes per token that autograd and the compiler keep of a block."""
    block.to("meta", dtype)
    if hasattr(block.mlp, "gate"):
        block.mlp.gate.float()
    meta = functools.partial(torch.empty, 1, SOME, dtype=dtype, device="meta")
    hidden = meta(config.hidden_size, requires_grad=True)
    table = meta(rotary_width(config))
    kept = {}

    def keep(t):  # several tensors may be views of one storage
        kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    def note_module(module, inputs, out):  # residual sums are inputs of norms
        _note(*inputs[:1], *[out] * isinstance(module, nn.Linear))

    _noted.clear()
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with register_module_forward_hook(note_module), hooks:
        out = Blocks([block], False)(hidden, (table, table), None, moved)
    del out
    for p in block.parameters():
        kept.pop(p.untyped_storage()._cdata, None)
    noted = (storage.nbytes() for key, storage in kept.items() if key in _noted)
    return sum(storage.nbytes() for storage in kept.values()) / SOME, sum(noted) / SOME


def _note(*tensors: torch.Tensor) -> None:
    _noted.update((t.untyped_storage()._cdata, t.untyped_storage()) for t in tensors)


class _Kernel(torch.autograd.Function):
    """Returns `out`, saves what a kernel saves, and computes nothing."""

    @staticmethod
    def forward(ctx, out, *saved):
        ctx.save_for_backward(*saved)
        return out.view_as(out)


def _attend(q, k, v, by_token: bool):
    B, H, S, E = *q.shape[:3], v.shape[-1]
    if by_token or q.transpose(1, 2).is_contiguous():
        out = q.new_empty(B, S, H, E)
    else:  # in the order of q
        out = q.new_empty(B, H, S, E).transpose(1, 2)
    _note(q, k, v, out)
    return _Kernel.apply(out, q, k, v, out)


def _count_attention(module, q, k, v, *args, documents: str, **kwargs):
    """documents: sdpa, buckets or varlen, as which tokens are moved and values widened."""
    if documents == "varlen":
        kernel = one_width(lambda q, k, v, documents, scaling: _attend(q, k, v, True))
        return kernel(q, k, v, None, None), None
    if documents == "buckets":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return _attend(q, k, v, documents == "buckets"), None


def _count_product(rows, weight, ends):
    """Of experts. Compiled, a frozen one does not keep its input."""
    out = rows.new_empty(len(rows), weight.shape[-1])
    _note(out, *[rows] * weight.requires_grad)
    return _Kernel.apply(out, rows, weight)


AttentionInterface.register("packed_counted", _count_attention)
ALL_EXPERTS_FUNCTIONS.register("sorted_counted", functools.partial(sorted_experts, _count_product))


def largest_unit(sizes: list[int], blocks: list[int]) -> int:
    """Parameters of the largest unit. sizes: blocks of each; blocks: parameters of each."""
    ends = itertools.accumulate(sizes)
    return max(sum(blocks[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def with_master(compute) -> int:
    """Bytes of a weight and its fp32 master in one process, see core/masters.py."""
    size = compute.dtype.itemsize
    halves = compute.dtype == torch.bfloat16 and compute.compile  # of which one is the weight
    return 4 if halves or size == 4 else 4 + size
