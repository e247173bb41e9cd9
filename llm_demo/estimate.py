"""Estimates a rank's peak memory, by part, before anything is allocated.

Each engine's estimate.py says what its ranks hold (`Held`). `peak` turns that into GiB, `report`
into the table of --estimate; llm_demo/fit.py and defaults that depend on memory ask `peak` too."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from fsdp.activations_on_host import STAY
from fsdp.pieces import PIECE
from llm_demo.core.attention import BUCKET
from llm_demo.core.errors import UserError
from llm_demo.core.loss import CHUNK_ROWS, HEAD_SLICE, SLIM
from llm_demo.core.mesh import World
from llm_demo.machine.device import free_host_memory, this_device
from llm_demo.machine.dist import once_per_node
from llm_demo.model.activations import count_blocks
from llm_demo.model.costs import (
    dense_width,
    experts_of,
    heads_of,
    heads_of_rule,
    kinds_of,
    mixed_blocks,
)
from llm_demo.run.choices import has_fused_kernels

GB = 2**30
# per chosen expert with its probability: kept, so that the recomputation has the same ones
CHOICES = 12
UNUSED, CONTEXT = "reserved, unused", "CUDA and NCCL"
SCATTERED = 0.04  # of what is allocated: the allocator's free memory between it
CONTEXT_GB = 1.2  # measured on two H100
RULE_CHUNK = 64  # tokens that a kernel of a delta rule takes together
PROCESS = 2.1  # GiB of host memory: Python, PyTorch, CUDA; measured beside 0.6B to 14B on H200
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
    rules = _of_rules(config, compute)
    if not args.use_activation_checkpointing:
        return [always + sum(both) for both in zip(experts, rules, strict=True)]
    # Of the feed-forward network's product, or of a fused kernel's output, queries, keys and values
    # when the network's activations are gone. Flash attention and cuDNN have those of queries also
    # in fp32, and those of keys and values also for each head of queries.
    network, heads = dense_width(config) * size, heads_of(config)
    grouped = heads.keys + heads.queries * (heads.keys < heads.queries)
    kernel = (heads.queries + grouped) * (heads.width + heads.values) * size
    kernel += heads.queries * heads.width * 4
    again = _saved_by_blocks(args, config, compute, train)
    tokens, less = tokens_here(args, train), 0
    if compute.lora and tokens > 2 * PIECE:
        less = 3 * network * (1 - PIECE / tokens)
    gone = 3 * network - less
    dense = max(network - less / 3, kernel * (not keys) - gone)
    inner = 3 * size * (getattr(config, "moe_intermediate_size", 0) or 0)  # of each chosen expert
    freed = [k * inner or gone for k in _chosen(config)]
    beside = [max(of_experts or dense, rule - done) - less * (not of_experts)
              for of_experts, rule, done in zip(experts, rules, freed, strict=True)]  # fmt: skip
    return [saved + always + more for saved, more in zip(again, beside, strict=True)]


def _of_rules(config, compute) -> list[float]:
    """Bytes per token that the backward of each block's delta rule allocates: of the kernel with a
    decay of each channel, counted by hand; others take less."""
    blocks = [hybrid for _, hybrid in kinds_of(config)]
    if not any(blocks) or compute.rule == "chunked":
        return [0] * len(blocks)
    _, heads, width, values = heads_of_rule(config)
    states = 2 * width * values / RULE_CHUNK  # and their gradients
    each = 4 * (7 * width + 2 * RULE_CHUNK)  # in fp32
    each += compute.dtype.itemsize * (3 * width + 4 * values + 2 * RULE_CHUNK + states)
    return [heads * each * hybrid for hybrid in blocks]


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


def _saved_by_blocks(args, config, compute, train) -> list[float]:
    """Bytes per token that each block keeps without checkpointing."""
    kernel = _saved_by_kernel(config, compute, train) + _exchanged(args, config, compute)[0]
    moved = "varlen" if _pads(compute) else "sdpa"
    if compute.attn_impl.startswith("bucketed") and not train.single:
        moved = "buckets"
    counted = count_blocks(config, compute, moved)
    kernels = [kernel * (not linear) for _, linear in kinds_of(config)]
    if not compute.compile:
        return [saved + more for (saved, _), more in zip(counted, kernels, strict=True)]
    # Routers' inputs, if they are trained, and probabilities in fp32; a token's choices in three
    # orders, and their weights.
    router = 4 * config.hidden_size * (not compute.lora) + 4 * experts_of(config)
    routers = [bool(k) * (router + k * (3 * 8 + 4)) for k in _chosen(config)]
    share = compute.dtype.itemsize / 4  # of fp32's
    return [
        args.activation_memory_budget * (products * share + router + kernel)
        for (_, products), router, kernel in zip(counted, routers, kernels, strict=True)
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


def largest_unit(sizes: list[int], blocks: list[int]) -> int:
    """Parameters of the largest unit. sizes: blocks of each; blocks: parameters of each."""
    ends = itertools.accumulate(sizes)
    return max(sum(blocks[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def with_master(compute) -> int:
    """Bytes of a weight and its fp32 master in one process, see core/masters.py."""
    size = compute.dtype.itemsize
    halves = compute.dtype == torch.bfloat16 and compute.compile  # of which one is the weight
    return 4 if halves or size == 4 else 4 + size
