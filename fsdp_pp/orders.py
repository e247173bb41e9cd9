"""The order in which each stage of a pipeline works on the pieces of the model that it holds.

A stage's work is a list of (FORWARD or BACKWARD, piece, micro-batch): some forwards, then a
forward and a backward in turn, then the rest of the backwards. Each piece sees the micro-batches in
order, so both sides of a transfer know what comes next.

1f1b: Narayanan et al. 2019, "PipeDream". interleaved: Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM"."""

from collections import Counter

from fsdp_pp.flags import SPLIT, TWICE

FORWARD, BACKWARD = "forward", "backward"


def stages_of(schedule: str, stages: int) -> list[int]:
    """The stage of each piece of the model. Twice around, or out and back (PyTorch's V)."""
    once = list(range(stages))
    if schedule in SPLIT:
        return once + once[::-1]
    return once * (2 if schedule in TWICE else 1)


def order(
    schedule: str, stages: int, stage: int, micro_batches: int, run_ahead: int = 0
) -> list[tuple]:
    """A stage's work in a step. interleaved needs micro_batches to be a multiple of stages.

    run_ahead: further forwards before the first backward, for each stage that follows. Without
    them, a stage that ends a forward needs the gradient that it has just enabled: both transfers
    are waited for."""
    mine = [p for p, at in enumerate(stages_of(schedule, stages)) if at == stage]
    forwards = forwards_only(schedule, stages, stage, micro_batches)
    both = [(k // stages, p, k) for p in mine for k in range(micro_batches)]
    backwards = [(BACKWARD, p, k) for _, p, k in sorted(both, key=lambda x: (x[0], -x[1], x[2]))]
    before = {
        "gpipe": micro_batches,
        "1f1b": stages - 1 - stage,
        "interleaved": 2 * (stages - 1 - stage) + stages,
    }[schedule]
    before += run_ahead * (stages - 1 - stage)
    if schedule == "interleaved":
        # what the last stage can send back before it needs a gradient of this stage
        before = min(before, 3 * stages)
    before = min(before, len(forwards))
    pairs = zip(forwards[before:], backwards, strict=False)
    rest = backwards[len(forwards) - before :]
    return [*forwards[:before], *(work for pair in pairs for work in pair), *rest]


def forwards_only(schedule: str, stages: int, stage: int, micro_batches: int) -> list[tuple]:
    """A stage's work when it only evaluates."""
    mine = [p for p, at in enumerate(stages_of(schedule, stages)) if at == stage]
    # as many micro-batches as there are stages go through one piece, then through the next
    both = sorted((k // stages, p, k) for p in mine for k in range(micro_batches))
    return [(FORWARD, p, k) for _, p, k in both]


def held(work: list[tuple]) -> dict[int, int]:
    """{piece: micro-batches whose activations it has} when a stage holds most of them."""
    now, most = Counter(), Counter()
    for kind, piece, _ in work:
        now[piece] += 1 if kind == FORWARD else -1
        most = now.copy() if now.total() > most.total() else most
    return dict(most)
