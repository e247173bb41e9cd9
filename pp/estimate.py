"""Estimates the peak memory of a pipeline stage."""

from deepspeed.runtime.pipe import schedule

from llm_demo.model.costs import block_costs, head_cost
from llm_demo.model.memory import at_the_loss, describe, peak


def table(args, config, compute, train, replicas: int, counts: list[int]) -> str:
    """What --estimate prints. counts: blocks of each piece of the model."""
    held = pieces_held(args.schedule, args.stages, counts, args.grad_accum_steps)
    parts = of_pipeline(args, config, compute, train, replicas, held)
    return describe(parts, args.device_memory_gb)


def pieces_held(which: str, stages: int, counts: list[int], accum: int) -> list[list[tuple]]:
    """For each stage, its pieces of the model: (its blocks, most micro-batches whose activations it
    holds at once, has the embedding, has the head), according to the schedule."""
    blocks_of, held = [range(sum(counts[:p]), sum(counts[: p + 1])) for p in range(len(counts))], []
    for stage in range(stages):
        if which == "dualpipev":
            steps = schedule.DualPipeVSchedule(accum, stages, stage).steps()
        else:
            steps = schedule.TrainSchedule(accum, stages, stage).steps()
        pieces = [stage, 2 * stages - 1 - stage][: 1 + (which == "dualpipev")]
        now, most, peak = dict.fromkeys(pieces, 0), dict.fromkeys(pieces, 0), 0
        for instruction in (i for step in steps for i in step):
            kind = type(instruction)
            if kind in (schedule.ForwardPass, schedule.BackwardPass):
                piece = pieces[getattr(instruction, "phase", 0)]
                now[piece] += 1 if kind is schedule.ForwardPass else -1
                blocks = sum(counts[p] * now[p] for p in pieces)
                if blocks > peak:
                    peak, most = blocks, dict(now)
        held.append([(blocks_of[p], most[p], p == 0, p == len(counts) - 1) for p in pieces])
    return held


def of_pipeline(
    args, config, compute, train, replicas: int, pieces: list[list[tuple[range, int, bool, bool]]]
) -> list[dict]:
    """GB (2**30 bytes) by part, one entry per stage. pieces: as `pieces_held` returns them."""
    blocks, embedding = block_costs(config, 0), head_cost(config).parameters
    size = compute.dtype.itemsize
    tokens, found = args.micro_batch_size * train.seq_len, []
    for stage in pieces:
        ends = sum(first + last for _, _, first, last in stage)
        if config.tie_word_embeddings:
            ends = min(ends, 1)
        count, flight = ends * embedding, [0] * len(blocks)
        for piece, in_flight, *_ in stage:
            count += sum(blocks[i].parameters for i in piece)
            for i in piece:
                flight[i] = tokens * in_flight
        head = any(last for *_, last in stage)
        activations, loss = at_the_loss(args, config, compute, train, flight, head)
        parts = {
            # ZeRO-1 shards masters and optimizer over replicas
            "weights": count * (size + 4 / replicas),
            "optimizer": count * 8 / replicas,
            # the fp32 engine keeps accumulated gradients beside the micro-batch's
            "gradients": count * (8 if size == 4 and args.grad_accum_steps > 1 else 4),
            "activations": activations,
            "loss": loss,
        }
        moments = [parts]
        if size == 4:  # its step copies them for the optimizer, the embedding's separately
            last = count * (8 + 4 / replicas) + embedding * 4 * bool(ends)
            moments.append({**parts, "gradients": last, "activations": 0, "loss": 0})
        found.append(peak(*moments))
    return found
