"""What the ranks of a pipeline hold."""

import torch

from llm_demo.estimate import LOSS, NONE, Held
from llm_demo.model.costs import MOMENT_BYTES, block_costs, head_cost, state_bytes

BUCKET = 5e8  # DeepSpeed's default of reduce_bucket_size


def held(
    args, config, compute, train, replicas: int, counts: list[int], bucket: float = BUCKET
) -> list[Held]:
    """What each rank holds, a stage's replicas beside each other. counts: blocks of each piece of
    the model. bucket: elements of a gradient bucket."""
    costs, embedding = block_costs(config, 0), head_cost(config).parameters
    piece_of = [piece for piece, count in enumerate(counts) for _ in range(count)]  # by block
    size, accumulates = compute.dtype.itemsize, args.grad_accum_steps > 1
    # in fp32 and fp16 DeepSpeed has one from the first backward on, and one more while it reduces
    bucket *= 0 if compute.dtype == torch.bfloat16 else 4
    ranks = []
    for stage in range(args.stages):
        flight = in_flight(args.schedule, args.stages, stage, args.grad_accum_steps)
        tokens = [args.micro_batch_size * train.seq_len * flight.get(p, 0) for p in piece_of]
        head = len(counts) - 1 in flight
        ends = (0 in flight) + head
        ends = min(ends, 1) if config.tie_word_embeddings else ends
        blocks = [cost for cost, p in zip(costs, piece_of, strict=True) if p in flight]
        count = ends * embedding + sum(block.parameters for block in blocks)
        # ZeRO-1 shards masters and moments over replicas
        weights = count * (size + 4 / replicas)
        # the fp32 engine keeps accumulated gradients beside the micro-batch's
        sums = count * (8 if size == 4 and accumulates else 4)
        times = [(weights, sums + bucket, LOSS), (weights, sums + 2 * bucket, NONE)]
        if size == 4:  # its step copies them for the optimizer, the embedding's separately
            copied = count * (8 + 4 / replicas) + embedding * 4 * bool(ends)
            times.append((weights, copied + bucket, NONE))
        # one replica copies only in the background; of several, each keeps its share
        copied = args.save and args.save_every
        if replicas > 1:
            copied = args.save or args.resume
        copies = state_bytes(args) * count / replicas * bool(copied)
        moments = count * MOMENT_BYTES[args.optim_state] / replicas
        ranks += [Held(moments, times, tokens, head, copies=copies)] * replicas
    return ranks


def in_flight(which: str, stages: int, stage: int, accum: int) -> dict[int, int]:
    """{piece of the model that a stage has: micro-batches whose activations it holds when they take
    most}, according to DeepSpeed's schedules."""
    if which == "dualpipev":
        return {stage: 2 * stages - stage, 2 * stages - 1 - stage: stage + 1}
    return {stage: min(accum, stages - stage)}
