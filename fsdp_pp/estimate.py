"""What the ranks of each pipeline stage hold."""

import itertools

from fsdp.copy_engines import Mailbox
from fsdp.estimate import exchanged_bytes
from fsdp_pp import orders
from llm_demo.estimate import LOSS, NONE, Held, largest_unit, tokens_here, with_master
from llm_demo.model.costs import (
    MOMENT_BYTES,
    block_costs,
    head_cost,
    on_a_rank,
    state_bytes,
    unit_sizes,
)


def held(args, config, compute, train, ranks: int, counts: list[int]) -> list[Held]:
    """What each rank holds. ranks: of a stage. counts: blocks of each piece of the model."""
    costs, embedding = block_costs(config, 0), head_cost(config).parameters
    starts, accum = [0, *itertools.accumulate(counts)], args.grad_accum_steps
    size, slots = compute.dtype.itemsize, tokens_here(args, train)
    hidden = slots // args.micro_batch_size * config.hidden_size * size  # bytes of a row's
    spread = args.expert_parallel or 1
    parts = [on_a_rank(block, args.tensor_parallel, spread) for block in costs]
    exchanged = exchanged_bytes(config, compute, slots, spread)
    mailbox = 0
    if args.copy_engines is not False:  # or may be chosen
        rows = args.micro_batch_size
        mailbox = Mailbox.SLOTS * rows * hidden * max(mailboxes(args.schedule, args.stages))
    of_all = []
    for stage in range(args.stages):
        flight = orders.in_flight(orders.order(args.schedule, args.stages, stage, accum))
        pieces = {p: parts[starts[p] : starts[p + 1]] for p in flight}
        head = len(counts) - 1 in flight
        ends = embedding * ((0 in flight) + head)  # a tied head is a copy
        total = sum(map(sum, pieces.values())) + ends  # on this rank once it is gathered
        stored = sum(c.parameters for p in flight for c in costs[starts[p] : starts[p + 1]]) + ends
        if ranks > 1:
            gathered = total
            if args.reshard_after_forward:
                of = {p: (counts[p], args.blocks_per_unit, starts[p]) for p in flight}
                units = {p: unit_sizes(config, *of[p]) for p in flight}
                gathered = ends + 2 * max(largest_unit(units[p], pieces[p]) for p in flight)
            weights, sums = stored / ranks * 4 + gathered * size, total * 4
            # input and output of the reduction of embedding or head
            late = sums + embedding * (1 + 1 / ranks) * 4 * bool(ends)
        else:
            weights = total * with_master(compute)
            sums = total * (4 if accum > 1 or size == 4 else size)
            # a micro-batch's gradients exist until they are added
            micro = max(map(sum, pieces.values())) + embedding * bool(ends)
            late = sums + micro * size * (size < 4)
        tokens = [slots * flight.get(p, 0) for p, n in enumerate(counts) for _ in range(n)]
        # outputs for the next stage, until their backward
        transfers = args.micro_batch_size * hidden * sum(flight.values()) + mailbox + exchanged
        times = [(weights, sums, LOSS), (weights, late, NONE)]
        moments = stored / ranks * MOMENT_BYTES[args.optim_state]
        copies = stored / ranks * state_bytes(args)
        copies *= bool(args.save and args.save_every)
        of_all += [Held(moments, times, tokens, head, transfers, 0, copies)] * ranks
    return of_all


def mailboxes(schedule: str, stages: int) -> list[int]:
    """Mailboxes of each stage: one for each pair of consecutive pieces of which it has one. All
    stages allocate as many as that with most."""
    pairs = [*itertools.pairwise(orders.stages_of(schedule, stages))]
    return [sum(a != b and stage in (a, b) for a, b in pairs) for stage in range(stages)]
