"""Where to cut a decoder into the stages of a pipeline."""

from collections.abc import Iterator

from llm_demo.errors import UserError
from llm_demo.model.costs import block_costs, head_cost


def split(config, stages: int, partition: str, seq_len: int, checkpointing: bool) -> list[int]:
    """Blocks of each stage. partition: balanced (by FLOPs, including the head), uniform (by
    number), parameters, or counts such as "18,10". Raises UserError if they don't fit the model."""
    n = config.num_hidden_layers
    if n < stages:
        raise UserError(f"--stages {stages}: the model has {n} blocks only")
    if partition == "uniform":
        return [n // stages + (s < n % stages) for s in range(stages)]
    if partition in ("balanced", "parameters"):
        first, block, last = costs(config, seq_len, checkpointing, partition == "parameters")
        return min(_candidates(n, stages), key=lambda c: stage_costs(c, first, block, last))
    try:
        counts = [int(x) for x in partition.split(",")]
    except ValueError:
        raise UserError(
            f"--partition {partition}: must be balanced, uniform, parameters, or counts such as "
            '"18,10"'
        ) from None
    if len(counts) != stages or sum(counts) != n or min(counts) < 1:
        raise UserError(
            f"--partition {partition}: give {stages} counts, each at least 1, with a sum of {n}, "
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


def describe_split(counts: list[int], config, seq_len: int, checkpointing: bool) -> str:
    first, block, last = costs(config, seq_len, checkpointing)
    each = [c * block + last * (s == len(counts) - 1) for s, c in enumerate(counts)]
    share = ", ".join(
        f"stage {s}: {c} blocks{' + head' * (s == len(counts) - 1)} {x / sum(each):.0%} of the work"
        for s, (c, x) in enumerate(zip(counts, each, strict=True))
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
