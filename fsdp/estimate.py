"""Estimates a rank's peak memory under FSDP2 or in one process."""

import bisect
import functools
import itertools

import torch

from fsdp.activations_on_host import host_bytes
from fsdp.flags import sums_each
from fsdp.lowrank import TOGETHER
from fsdp.units import SLICE, SLOTS
from llm_demo.core.errors import UserError
from llm_demo.estimate import (
    GB,
    PROCESS,
    at_the_loss,
    capacity_of,
    describe,
    keys_kept,
    largest_unit,
    passing_bytes,
    peak,
    tokens_here,
)
from llm_demo.job.costs import block_costs, experts_of, head_cost, parameters_of, unit_sizes

LONG = 8192  # tokens of a document from which on attention takes a good part of the forward


def choose_spread(args, config, compute, train, world) -> tuple[int, str]:
    """(over how many ranks experts are spread, the reason): the fewest of a node's that fit."""
    capacity = capacity_of(args)
    if not capacity:
        return 1, "the memory of this device is not known"
    ranks = range(1, min(world.local_size, world.size) + 1)
    need, n_experts = {}, experts_of(config)
    for n in (n for n in ranks if world.size % n == world.local_size % n == n_experts % n == 0):
        parts = of_fsdp(args, config, compute, train, world.size, True, n)
        need[n] = max(sum(rank.values()) for rank in parts)
        if need[n] < 0.95 * capacity:
            why = "they fit" if n == 1 else "the fewest that fit"
            why += f": about {need[n]:.0f} of {capacity:.0f} GiB"
            if n > 1 and not args.reshard_after_forward:
                why += "; all on each rank with --reshard_after_forward may be faster"
            return n, why
    n = min(need, key=need.get)
    return n, f"takes least memory: about {need[n]:.0f} of {capacity:.0f} GiB"


def choose_attention_kept(
    args, config, compute, train, ranks: int, sharded: bool, spread: int
) -> tuple[int, str]:
    """(how many of the last blocks, if recomputed, keep what attention returned, the reason)."""
    if train.longest < LONG:
        return 0, "documents are short"
    if keys_kept(compute, train):
        return 0, f"{compute.attn_impl} is no fused kernel here"
    if not (capacity := capacity_of(args)):
        return 0, "the memory of this device is not known"

    @functools.cache
    def need(blocks: int) -> float:
        kept = compute._replace(attention_kept=blocks)
        parts = of_fsdp(args, config, kept, train, ranks, sharded, spread)
        return max(sum(rank.values()) for rank in parts)

    sizes = unit_sizes(config, config.num_hidden_layers, per_unit_of(args))
    counts = [0, *itertools.accumulate(reversed(sizes))]  # of the last unit, the last two, ...
    fit = bisect.bisect_left(counts, True, key=lambda n: need(n) >= 0.95 * capacity)
    most = counts[max(0, fit - 1)]
    tried = most or counts[1]
    return most, f"about {need(tried):.0f} of {capacity:.0f} GiB with {tried}"


def table(args, config, compute, train, ranks: int, sharded: bool, replicas: int, spread=1) -> str:
    """What --estimate prints. ranks: of one replica."""
    parts = of_fsdp(args, config, compute, train, ranks, sharded, spread)
    text = describe(parts * replicas, args)
    copies = replicas * of_copies(args, config, compute)
    later = "while checkpoints are written in the background"
    if args.activations_on_host or args.optimizer_on_host:
        host = replicas * of_host(args, config, compute, train, ranks)
        held = ["masters and moments"] * args.optimizer_on_host
        held += ["inputs of blocks"] * args.activations_on_host
        text += f"\nhost memory: {host:.1f} GiB for all ranks, with {' and '.join(held)}"
        text += f"; {copies:.1f} GiB more {later}" * (copies > 0)
    elif copies:
        text += f"\nhost memory: {copies:.1f} GiB more for all ranks {later}"
    return text


def of_copies(args, config, compute) -> float:
    """GB (2**30 bytes) of host memory that a replica's ranks take besides for the copies of masters
    and moments that checkpoints are written from, see run/checkpoint.py."""
    if not (args.save and args.save_every and args.save_async):
        return 0
    return 12 * (compute.lora.parameters if compute.lora else parameters_of(config)) / GB


def refuse_replicas(args, config, compute, train, ranks: int, replicas: int) -> None:
    """Raise UserError if a copy of the model needs more memory than its GPUs have."""
    capacity = capacity_of(args)
    need = max(sum(parts.values()) for parts in of_fsdp(args, config, compute, train, ranks, True))
    if capacity and need > 1.1 * capacity:  # an estimate
        raise UserError(
            f"--replicas {args.replicas}: a copy on {ranks} GPU(s) needs about "
            f"{need:.0f} of {capacity:.0f} GiB on each: ask for fewer replicas than {replicas}"
        )


def of_host(args, config, compute, train, ranks: int) -> float:
    """GB (2**30 bytes) of host memory that a replica's ranks take: what each process takes anyway,
    masters and moments with --optimizer_on_host, inputs of blocks with --activations_on_host."""
    need = ranks * PROCESS
    if args.optimizer_on_host:
        need += 12 * parameters_of(config) / GB
    if args.activations_on_host:
        shape = tokens_here(args, train), config.hidden_size
        need += ranks * host_bytes(config.num_hidden_layers, shape, compute.dtype) / GB
    return need


def per_unit_of(args) -> int:
    """Blocks of a unit, 0 if their size decides: only a unit's input goes to the host."""
    return 1 if args.activations_on_host else args.blocks_per_unit


def of_fsdp(
    args, config, compute, train, ranks: int, sharded: bool, spread: int = 1
) -> list[dict[str, float]]:
    """GB (2**30 bytes) by part, one entry for each rank of a replica. spread: --expert_parallel."""
    costs = block_costs(config, 0)
    blocks = [block.parameters - block.routed * (1 - 1 / spread) for block in costs]
    embedding, n = head_cost(config).parameters, len(blocks)
    total, size = parameters_of(config), compute.dtype.itemsize
    ends = total - sum(block.parameters for block in costs)  # embedding and head, or both in one
    whole = ends + sum(blocks)  # what a rank has when everything is gathered
    unit = largest_unit(unit_sizes(config, n, per_unit_of(args)), blocks)
    tokens = tokens_here(args, train)
    accumulates = args.grad_accum_steps > 1
    activations, loss = at_the_loss(args, config, compute, train, [tokens] * n, head=True)
    if spread > 1:  # an estimate: all ranks' tokens, their sums, and the gradients of both
        copies = 4 if compute.compile else 4 + 2 * config.num_experts_per_tok
        activations += copies * spread * tokens * config.hidden_size * size
    gathered = (ends + 2 * unit if args.reshard_after_forward else whole) * size
    if ranks > 1 and size < 4 and not args.optimizer_on_host:  # a buffer for embedding and head
        gathered += embedding * size
    head_in_fp32 = not args.use_activation_checkpointing  # the memory of its gradient: see loss.py
    trained = total
    if lora := compute.lora:  # what is frozen has no fp32 copy and no gradients
        trained, halves = lora.parameters, compute.dtype == torch.bfloat16 and compute.compile
        here = trained - lora.routed * (1 - 1 / spread)
        if sharded:
            reach = min(1, 2 * unit / sum(blocks)) if args.reshard_after_forward else 1
            early = (total * size + trained * 4) / ranks + gathered + here * reach * size
        else:
            early = total * size + trained * (4 if halves or size == 4 else 4 + size)
        late, kept, grads = early, here * 4 if accumulates else 0, here * 4
    elif args.optimizer_on_host and sharded:
        # without the embedding if resharded, with a buffer for its transfers and the head's
        freed = args.reshard_after_forward and not config.tie_word_embeddings
        early = total / ranks * size + gathered + (1 - freed) * embedding * size
        late = total / ranks * size + (embedding + unit) * size
        # the sums, and the embedding's gradient, also as sent
        kept = total / ranks * 4
        grads = kept + (2 + head_in_fp32) * embedding * size
    elif args.optimizer_on_host:
        early = late = total * size
        # the sums; a unit's gradients until they are added; a tied head's until the embedding's
        kept = total * 4
        of_head = config.tie_word_embeddings * (1 + head_in_fp32) * embedding * size
        grads = kept + of_head + max(unit, embedding) * size
    elif sharded:
        early = total / ranks * 4 + gathered
        late = total / ranks * 4 + (embedding + unit) * size
        # what stays between micro-batches, in fp32
        kept = (total / ranks if sums_each(args) else whole) * 4 if accumulates else 0
        # gradient shards, and input and output of the embedding's reduction
        grads = (total / ranks + embedding * (1 + 1 / ranks)) * 4 + embedding * size
    else:
        kept = total * 4 if accumulates else 0
        halves = compute.dtype == torch.bfloat16 and compute.compile  # see parallel/masters.py
        early = late = total * (4 if halves or size == 4 else 4 + size)
        if size == 4:
            grads = (total + embedding) * 4
        elif accumulates:  # a micro-batch's gradients exist until they are added
            grads = total * (4 + size)
        elif halves:  # a unit's gradients are concatenated
            grads = (total + max(unit, ends)) * size
        else:
            grads = total * 4 + 2 * ends * size
    first = 0  # of the backward of the first block, whose activations are recomputed
    if args.use_activation_checkpointing:
        first = tokens * max(passing_bytes(args, config, compute, train))
        grads_of_blocks = grads
        if sharded and not lora:
            grads_of_blocks = (total - embedding) / ranks * 4 + unit * 4
    passing = 3 * SLOTS * SLICE * 4  # masters and moments on their way
    # PowerSGD's errors, and two sets of matrices that are multiplied together
    errors = 4 * total / ranks + 8 * min(total / ranks, max(TOGETHER, embedding / ranks))
    errors = errors if args.psgd_rank else 0
    rest = {"optimizer": errors + (passing if args.optimizer_on_host else trained / ranks * 8)}
    moments = [
        {"weights": early, **rest, "gradients": kept, "activations": activations, "loss": loss},
        {"weights": late, **rest, "gradients": grads, "activations": 0, "loss": 0},
    ]
    if first:
        moments.append(
            {"weights": late, **rest, "gradients": grads_of_blocks, "activations": first, "loss": 0}
        )
    return [peak(*moments)] * ranks
