"""Where to cut a decoder into the stages of a pipeline."""

import functools
import math
from collections.abc import Callable

from llm_demo.core.errors import UserError
from llm_demo.machine.text import counted
from llm_demo.model.costs import OVERHEAD, Sizes

# Measured on pipelines of 0.6B and 8B on two H200 (bench/LOG.md). The head takes less time for its
# FLOPs than a block, because its products are larger.
HEAD = 0.92
# The embedding's dense gradient takes as long as the head's products for this many tokens. Measured
# with 2 and 8 rows of 1,024 tokens.
EMBEDDING = 600


def plan_and_cut(job, replicas: int, where: list[int], refuse: Callable) -> list[int]:
    """Make the plan of a run.Job. Returns, and logs, the blocks of each piece of the model. where:
    the stage of each piece. replicas, refuse: as of Job.decide. Raises UserError."""
    args = job.args

    def refuse_too_many_pieces(config):
        refuse(config)
        given_counts(config.num_hidden_layers, len(where), args.partition)

    job.decide(replicas, refuse_too_many_pieces)
    sizes, seq_len = job.plan.sizes, job.plan.data.train.seq_len
    times = costs(sizes, args.micro_batch_size, seq_len, args.use_activation_checkpointing)
    counts = split(sizes, len(where), args.partition, times)
    job.log.resolved(partition=",".join(map(str, counts)))
    job.log.say(f"pipeline: {describe_split(counts, where, times)}")
    return counts


def split(sizes: Sizes, pieces: int, partition: str, times: tuple) -> list[int]:
    """Blocks of each piece, of which a stage has one or two. partition: balanced (by `times`, as of
    `costs`), uniform (by number), parameters, or counts such as "18,10". Raises UserError if they
    don't fit the model."""
    n = len(sizes.blocks)
    given = given_counts(n, pieces, partition)
    if given:
        return given
    if partition == "uniform":
        return [n // pieces + (s < n % pieces) for s in range(pieces)]
    if partition == "parameters":
        times = parameters(sizes)
    first, blocks, last = times
    return [*_best(pieces, first, tuple(blocks), last)]


def given_counts(n: int, pieces: int, partition: str) -> list[int] | None:
    """The blocks of each piece as `partition` gives them; None if it names a way to choose them.
    n: blocks of the model. Raises UserError, without knowing the data, if they or so many pieces
    don't fit it."""
    if n < pieces:
        blocks = counted(n, "block")
        raise UserError(f"--stages: the model has {blocks}, too few for {pieces} pieces")
    if partition in ("balanced", "uniform", "parameters"):
        return None
    counts = [int(x) for x in partition.split(",")]
    if len(counts) != pieces or sum(counts) != n or min(counts) < 1:
        raise UserError(
            f"--partition {partition}: give {pieces} counts, each at least 1, with a sum of {n}, "
            "the model's number of blocks"
        )
    return counts


def parameters(sizes: Sizes) -> tuple[int, list[int], int]:
    """The matrix parameters of (embedding, each block, head)."""
    return sizes.embedding, [block.parameters for block in sizes.blocks], sizes.embedding


def costs(
    sizes: Sizes, micro_batch: int, seq_len: int, checkpointing: bool
) -> tuple[float, list[float], float]:
    """The estimated times of (embedding, each block, norm and head) for a micro-batch of so many
    rows, forward and backward, as the FLOPs that a block does in that time.

    Checkpointing runs a block's forward twice: 4/3 of its FLOPs. The head's stay the same."""
    tokens, head = micro_batch * seq_len, 6 * sizes.embedding  # FLOPs of a token
    again = 4 / 3 if checkpointing else 1
    blocks = [
        tokens * block.flops(seq_len) * again + OVERHEAD * 6 * block.parameters
        for block in sizes.blocks
    ]
    return EMBEDDING * head, blocks, (HEAD * tokens + OVERHEAD) * head


def describe_split(counts: list[int], where: list[int], times: tuple) -> str:
    """The blocks and the share of the work of each stage. where: the stage of each piece. times: as
    of `costs`."""
    first, each_block, last = times
    at = 0
    each, blocks = [0.0] * (max(where) + 1), [[] for _ in range(max(where) + 1)]
    for piece, (count, stage) in enumerate(zip(counts, where, strict=True)):
        head = piece == len(counts) - 1
        each[stage] += math.fsum(each_block[at : at + count]) + first * (piece == 0) + last * head
        at += count
        blocks[stage].append(counted(count, "block") + (" + head" if head else ""))
    share = ", ".join(
        f"stage {s}: {' and '.join(names)} {x / sum(each):.0%} of the work"
        for s, (names, x) in enumerate(zip(blocks, each, strict=True))
    )
    return f"{share}; the largest share is {max(each) * len(each) / sum(each):.2f} x the mean"


@functools.cache
def _best(pieces: int, first: float, blocks: tuple[float, ...], last: float) -> tuple[int, ...]:
    """The counts with the smallest costs of pieces, the most expensive compared first; of equal
    ones those with the most blocks in the earlier pieces."""

    def cost(piece: int, start: int, end: int) -> float:
        ends = first * (piece == 0) + last * (piece == pieces - 1)
        return math.fsum(blocks[start:end]) + ends  # rounded once, so that equal pieces are equal

    n = len(blocks)
    best = {0: ([], [])}  # end -> costs and negative counts of the pieces up to there
    for piece in range(pieces):
        left = pieces - 1 - piece
        ends = range(piece + 1, n - left + 1) if left else [n]
        best = {
            end: min(
                (sorted([*costs, cost(piece, start, end)], reverse=True), [*counts, start - end])
                for start, (costs, counts) in best.items()
                if start < end
            )
            for end in ends
        }
    return tuple(-count for count in best[n][1])
