"""Where to cut a decoder into the stages of a pipeline."""

from collections.abc import Iterator

from llm_demo.errors import UserError
from llm_demo.model.costs import block_costs, head_cost


def split(config, pieces: int, partition: str, seq_len: int, checkpointing: bool) -> list[int]:
    """Blocks of each piece, of which a stage has one or two. partition: balanced (by FLOPs,
    including the head), uniform (by number), parameters, or counts such as "18,10". Raises
    UserError if they don't fit the model."""
    n = config.num_hidden_layers
    if n < pieces:
        raise UserError(f"--stages: the model has {n} blocks, too few for {pieces} pieces")
    if partition == "uniform":
        return [n // pieces + (s < n % pieces) for s in range(pieces)]
    if partition in ("balanced", "parameters"):
        first, block, last = costs(config, seq_len, checkpointing, partition == "parameters")
        return min(_candidates(n, pieces), key=lambda c: stage_costs(c, first, block, last))
    try:
        counts = [int(x) for x in partition.split(",")]
    except ValueError:
        raise UserError(
            f"--partition {partition}: must be balanced, uniform, parameters, or counts such as "
            '"18,10"'
        ) from None
    if len(counts) != pieces or sum(counts) != n or min(counts) < 1:
        raise UserError(
            f"--partition {partition}: give {pieces} counts, each at least 1, with a sum of {n}, "
            "the model's number of blocks"
        )
    return counts


def costs(config, seq_len: int, checkpointing: bool, by_parameters=False) -> tuple:
    """(embedding, block, norm and head) in FLOPs per token, forward and backward, or parameters.

    Checkpointing runs a block's forward twice: 4/3 of its cost. The head's cost stays the same."""
    block, head = block_costs(config, seq_len)[0], head_cost(config)
    if by_parameters:
        return head.parameters, block.parameters, head.parameters
    return 0, block.flops * (4 / 3 if checkpointing else 1), head.flops


def stage_costs(counts, first, block, last) -> list[float]:
    """Cost of each stage, most expensive first: the smaller of two such lists is better."""
    each = [c * block for c in counts]
    each[0] += first
    each[-1] += last
    return sorted(each, reverse=True)


def describe_split(
    counts: list[int], where: list[int], config, seq_len: int, checkpointing: bool
) -> str:
    """The blocks and the share of the work of each stage. where: the stage of each piece."""
    _, block, last = costs(config, seq_len, checkpointing)
    each, blocks = [0.0] * (max(where) + 1), [[] for _ in range(max(where) + 1)]
    for piece, (count, stage) in enumerate(zip(counts, where, strict=True)):
        head = piece == len(counts) - 1
        each[stage] += count * block + last * head
        blocks[stage].append(f"{count} blocks{' + head' * head}")
    share = ", ".join(
        f"stage {s}: {' and '.join(names)} {x / sum(each):.0%} of the work"
        for s, (names, x) in enumerate(zip(blocks, each, strict=True))
    )
    return f"{share}; the largest share is {max(each) * len(each) / sum(each):.2f} x the mean"


def _candidates(n: int, stages: int) -> Iterator[list[int]]:
    """Every way to fill the first and last stage; the stages between share the rest evenly."""
    if stages == 1:
        yield [n]
        return
    middle = stages - 2
    for first in range(n - stages + 1, 0, -1):
        for last in range(1, n - middle - first + 1) if middle else [n - first]:
            rest = n - first - last
            yield [first, *(rest // middle + (s < rest % middle) for s in range(middle)), last]
