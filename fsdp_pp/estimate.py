"""Estimates the peak memory of the ranks of each pipeline stage."""

import itertools

import torch

from fsdp.copy_engines import Mailbox
from fsdp_pp import orders
from llm_demo.estimate import at_the_loss, describe, largest_unit, peak
from llm_demo.job.costs import block_costs, head_cost, unit_sizes


def table(args, config, compute, train, ranks: int, counts: list[int]) -> str:
    """What --estimate prints. ranks: of a stage. counts: blocks of each piece of the model."""
    stages = of_stages(args, config, compute, train, ranks, counts)
    return describe([parts for parts in stages for _ in range(ranks)], args)


def mailboxes(schedule: str, stages: int) -> list[int]:
    """Mailboxes of each stage: one for each pair of consecutive pieces of which it has one. All
    stages allocate as many as that with most."""
    pairs = [*itertools.pairwise(orders.stages_of(schedule, stages))]
    return [sum(a != b and stage in (a, b) for a, b in pairs) for stage in range(stages)]


def of_stages(
    args, config, compute, train, ranks: int, counts: list[int]
) -> list[dict[str, float]]:
    """GB (2**30 bytes) by part, one entry per stage."""
    blocks, embedding = block_costs(config, 0), head_cost(config).parameters
    pieces = [range(sum(counts[:p]), sum(counts[: p + 1])) for p in range(len(counts))]
    parameters = [sum(blocks[i].parameters for i in piece) for piece in pieces]
    size = compute.dtype.itemsize
    accum, found = args.grad_accum_steps, []
    tokens = args.micro_batch_size * train.seq_len
    for stage in range(args.stages):
        held = orders.held(orders.order(args.schedule, args.stages, stage, accum, args.run_ahead))
        head = len(counts) - 1 in held
        ends = (0 in held) + head  # a tied head is a copy
        total = sum(parameters[piece] for piece in held) + ends * embedding
        flight = [0] * len(blocks)
        for piece, micro in held.items():
            for i in pieces[piece]:
                flight[i] = tokens * micro
        activations, loss = at_the_loss(args, config, compute, train, flight, head)
        # outputs for the next stage, until their backward
        activations += tokens * config.hidden_size * size * sum(held.values())
        if args.copy_engines is not False:  # or may be chosen
            rows = max(args.micro_batch_size, args.eval_batch_size)
            slots = Mailbox.SLOTS * rows * train.seq_len * config.hidden_size * size
            activations += slots * max(mailboxes(args.schedule, args.stages))
        if ranks > 1:
            unit = 0
            for piece in map(pieces.__getitem__, held):
                sizes = unit_sizes(config, len(piece), args.blocks_per_unit, piece.start)
                unit = max(unit, largest_unit(sizes, [blocks[i].parameters for i in piece]))
            gathered = ends * embedding + 2 * unit if args.reshard_after_forward else total
            weights, kept = total / ranks * 4 + gathered * size, total * 4
            # input and output of the reduction of embedding or head
            late = kept + embedding * (1 + 1 / ranks) * 4 * bool(ends)
        else:
            halves = compute.dtype == torch.bfloat16 and compute.compile  # parallel/masters.py
            weights = total * (4 if halves or size == 4 else 4 + size)
            kept = total * (4 if accum > 1 or size == 4 else size)
            # a micro-batch's gradients exist until they are added
            micro = max(parameters[piece] for piece in held) + bool(ends) * embedding
            late = kept + micro * size * (size < 4)
        rest = {"weights": weights, "optimizer": total / ranks * 8}
        loss_formed = {**rest, "gradients": kept, "activations": activations, "loss": loss}
        reduced = {**rest, "gradients": late, "activations": 0, "loss": 0}
        found.append(peak(loss_formed, reduced))
    return found
