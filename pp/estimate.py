"""Estimates the peak memory of a pipeline stage."""

import torch
from deepspeed.runtime.pipe import schedule

from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.estimate import GB, at_the_loss, describe, peak
from llm_demo.job.costs import block_costs, head_cost
from llm_demo.job.device import free_host_memory
from llm_demo.job.dist import once_per_node

BUCKET = 5e8  # DeepSpeed's default of reduce_bucket_size


def table(args, config, compute, train, replicas: int, counts: list[int], zero: dict) -> str:
    """What --estimate prints. counts: blocks of each piece of the model. zero: the engine's."""
    held = pieces_held(args.schedule, args.stages, counts, args.grad_accum_steps)
    bucket = zero.get("reduce_bucket_size", BUCKET)
    parts = of_pipeline(args, config, compute, train, replicas, held, bucket)
    text = describe(parts, args)
    ranks = range(args.stages * replicas)
    copies = of_copies(args, parameters_of_stages(config, held), replicas, ranks)
    if copies:
        text += f"\nhost memory: {copies:.1f} GiB more for all ranks while a checkpoint is saved"
        text += " or read" * bool(args.resume)
    return text


def check_host(args, config, replicas: int, counts: list[int], world: World) -> None:
    """Check each node's host memory for copies of checkpoints before anything is allocated. Every
    rank calls. Raises UserError if a node has too little. With one replica, run/checkpoint.py does
    without copies where they do not fit."""
    if replicas == 1:
        return
    held = pieces_held(args.schedule, args.stages, counts, args.grad_accum_steps)
    first = world.rank - world.local_rank
    ranks = range(first, first + world.local_size)
    need = of_copies(args, parameters_of_stages(config, held), replicas, ranks)

    def check() -> None:
        free = free_host_memory() / GB
        if need > free:
            unsaved = "add --no_save, or " * (not args.resume)
            raise UserError(
                f"host memory: a checkpoint needs {need:.1f} GiB on this node, and {free:.1f} GiB "
                f"are free: {unsaved}use fewer replicas, more nodes or a smaller model"
            )

    once_per_node(world, check)


def of_copies(args, parameters: list[float], replicas: int, ranks: range) -> float:
    """GB (2**30 bytes) of host memory that these ranks take besides while a checkpoint is saved or
    read: masters and moments, see ds_state.py. parameters: of each stage."""
    if replicas == 1:
        copied = args.save and args.save_every and args.save_async
        return 12 * sum(parameters) / GB if copied else 0
    # a stage's first replica gathers what it saves; each replica reads all
    keep = [rank for rank in ranks if args.resume or args.save and rank % replicas == 0]
    return 12 * sum(parameters[rank // replicas] for rank in keep) / GB


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


def parameters_of_stages(config, pieces: list[list[tuple]]) -> list[float]:
    """Parameters of each stage. pieces: as `pieces_held` returns them."""
    blocks, embedding, found = block_costs(config, 0), head_cost(config).parameters, []
    for stage in pieces:
        ends = ends_of(config, stage)
        found.append(ends * embedding + sum(blocks[i].parameters for of, *_ in stage for i in of))
    return found


def ends_of(config, stage: list[tuple]) -> int:
    """How many matrices a stage has of the embedding and the head; a tied one counts once."""
    ends = sum(first + last for _, _, first, last in stage)
    return min(ends, 1) if config.tie_word_embeddings else ends


def of_pipeline(
    args, config, compute, train, replicas: int, pieces: list[list[tuple]], bucket: float = BUCKET
) -> list[dict]:
    """GB (2**30 bytes) by part, one entry per stage. pieces: as `pieces_held` returns them. bucket:
    elements of a gradient bucket."""
    counts, embedding = parameters_of_stages(config, pieces), head_cost(config).parameters
    size = compute.dtype.itemsize
    # in fp32 and fp16 DeepSpeed has one from the first backward on, and one more while it reduces
    bucket *= 0 if compute.dtype == torch.bfloat16 else 4
    tokens, found = args.micro_batch_size * train.seq_len, []
    for stage, count in zip(pieces, counts, strict=True):
        flight = [0] * config.num_hidden_layers
        for piece, in_flight, *_ in stage:
            for i in piece:
                flight[i] = tokens * in_flight
        head = any(last for *_, last in stage)
        activations, loss = at_the_loss(args, config, compute, train, flight, head)
        # the fp32 engine keeps accumulated gradients beside the micro-batch's
        kept = count * (8 if size == 4 and args.grad_accum_steps > 1 else 4)
        parts = {
            # ZeRO-1 shards masters and optimizer over replicas
            "weights": count * (size + 4 / replicas),
            "optimizer": count * 8 / replicas,
            "gradients": kept + bucket,
            "activations": activations,
            "loss": loss,
        }
        reduced = {**parts, "gradients": kept + 2 * bucket, "activations": 0, "loss": 0}
        moments = [parts, reduced]
        if size == 4:  # its step copies them for the optimizer, the embedding's separately
            last = count * (8 + 4 / replicas) + embedding * 4 * bool(ends_of(config, stage))
            moments.append({**reduced, "gradients": last + bucket})
        found.append(peak(*moments))
    return found
