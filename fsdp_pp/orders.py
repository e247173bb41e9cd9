"""The order in which each stage of a pipeline works on its pieces of the model, and what runs it.

A stage's work is a list of (FORWARD or BACKWARD, piece, micro-batch): some forwards, then a
forward and a backward in turn (but in v as it comes), then the rest of the backwards. Each piece
sees the micro-batches in order, so both sides of a transfer know what comes next.

1f1b: Narayanan et al. 2019, "PipeDream". interleaved: Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM". v: pieces placed as by Qi et al. 2024,
"Pipeline Parallelism with Controllable Memory", with whole backwards."""

import functools
from bisect import bisect
from collections.abc import Callable, Iterable

import torch

FORWARD, BACKWARD = "forward", "backward"


def stages_of(schedule: str, stages: int) -> list[int]:
    """The stage of each piece of the model. Twice around, or out and back."""
    once = list(range(stages))
    return once + {"interleaved": once, "v": once[::-1]}.get(schedule, [])


def order(schedule: str, stages: int, stage: int, micro_batches: int) -> list[tuple]:
    """A stage's work in a step. interleaved needs micro_batches to be a multiple of stages."""
    if schedule == "v":
        return out_and_back(stages, micro_batches)[stage]
    pieces = [p for p, at in enumerate(stages_of(schedule, stages)) if at == stage]
    forwards = forwards_only(schedule, stages, stage, micro_batches)
    rounds = [(k // stages, p, k) for p in pieces for k in range(micro_batches)]
    backwards = [(BACKWARD, p, k) for _, p, k in sorted(rounds, key=lambda x: (x[0], -x[1], x[2]))]
    before = {
        "gpipe": micro_batches,
        "1f1b": stages - 1 - stage,
        "interleaved": 2 * (stages - 1 - stage) + stages,
    }[schedule]
    if schedule == "interleaved":
        # what the last stage can send back before it needs a gradient of this stage
        before = min(before, 3 * stages)
    before = min(before, len(forwards))
    pairs = zip(forwards[before:], backwards, strict=False)
    rest = backwards[len(forwards) - before :]
    return [*forwards[:before], *(work for pair in pairs for work in pair), *rest]


@functools.cache
def out_and_back(stages: int, micro_batches: int) -> list[list[tuple]]:
    """All stages' work in the schedule v, as if a forward took 1 and a backward 2.

    Each stage does first what can begin first: a forward before a backward, and of forwards that of
    the later piece. The first stage begins no micro-batch while it has 2 x stages - 1 under way.
    With twice as many micro-batches as stages, stages wait as little as in interleaved."""
    where, limit = stages_of("v", stages), 2 * stages - 1
    last, works, free = len(where) - 1, [[] for _ in range(stages)], [0] * stages
    ready, entered, left = {}, 0, 0  # {work: when the one before it ends}

    def order_of(work):
        kind, piece, k = work
        begins = max(ready[work], free[where[piece]])
        return begins, kind == BACKWARD, -piece if kind == FORWARD else k, k

    while left < micro_batches:
        if entered < min(micro_batches, left + limit) and (FORWARD, 0, entered) not in ready:
            ready[FORWARD, 0, entered] = 0
        kind, piece, k = work = min(ready, key=order_of)
        ends = order_of(work)[0] + (1 if kind == FORWARD else 2)
        del ready[work]
        works[where[piece]].append(work)
        free[where[piece]] = ends
        entered += (kind, piece) == (FORWARD, 0)
        left += (kind, piece) == (BACKWARD, 0)
        if kind == FORWARD:
            ready[(FORWARD, piece + 1, k) if piece < last else (BACKWARD, last, k)] = ends
        elif piece:
            ready[BACKWARD, piece - 1, k] = ends
    return works


def forwards_only(schedule: str, stages: int, stage: int, micro_batches: int) -> list[tuple]:
    """A stage's work when it only evaluates."""
    pieces = [p for p, at in enumerate(stages_of(schedule, stages)) if at == stage]
    # as many micro-batches as there are stages go through one piece, then through the next
    rounds = sorted((k // stages, p, k) for p in pieces for k in range(micro_batches))
    return [(FORWARD, p, k) for _, p, k in rounds]


def with_receives(works: list[list[tuple]], where: list[int], stage: int) -> list[tuple]:
    """A stage's work as (kind, piece, micro-batch, receives): the (kind, piece) of each receive
    that is to be launched before this work.

    A transfer ends when both sides have launched it, and a host may wait for all that it has
    launched at any time: when it loads a kernel, compiles, or runs short of memory. So a receive is
    launched neither after its sender may have to wait for it, nor before the sender can reach the
    send without this stage. All stages' work is numbered in an order in which it could be done one
    after the other; what work n sends is received before the first work of a higher number. So no
    cycle of waiting hosts can form.

    works: of each stage. where: the stage of each piece."""
    last, number, done = len(where) - 1, {}, [0] * len(works)
    while len(number) < sum(map(len, works)):
        begun = len(number)  # a round, in which a stage does at most one piece of work
        for s, work in enumerate(works):
            if done[s] < len(work):
                kind, piece, k = work[done[s]]
                first = piece == (0 if kind == FORWARD else last)
                previous = piece - 1 if kind == FORWARD else piece + 1
                if first or number.get((kind, previous, k), begun) < begun:
                    number[kind, piece, k] = len(number)
                    done[s] += 1
    receives = [[] for _ in works[stage]]
    numbers = [number[work] for work in works[stage]]
    for (kind, piece, _), n in number.items():  # in the order in which they are sent
        into = piece + 1 if kind == FORWARD else piece - 1
        if 0 <= into <= last and where[piece] != stage == where[into]:
            receives[bisect(numbers, n)].append((kind, into))
    return [(*work, now) for work, now in zip(works[stage], receives, strict=True)]


def run_stage(
    work: Iterable[tuple],
    last: int,
    links,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    forward: Callable,
    backward: Callable | None = None,
) -> None:
    """Do this stage's work of a step with ordinary backwards, so that FSDP2's hooks, activation
    checkpointing and compiled blocks work as they do without a pipeline.

    Args:
        work: as of with_receives.
        links: transfers.Links.
        last: the last piece of the model.
        shape, dtype: of a micro-batch's hidden states.
        forward: forward(piece, k, x) -> the output of a piece for micro-batch k. x: hidden states,
            None for the first piece.
        backward: backward(piece, k, y, gradient) runs autograd from the output y. gradient: None
            for the last piece, whose output is the loss. Without `backward`, nothing is kept."""
    kept = {}  # (piece, k) -> output
    for kind, piece, k, receives in work:
        for received_kind, to in receives:  # while the device computes, since the host is ahead
            links.expect(received_kind, to, shape, dtype)
        links.begin()
        if kind == FORWARD:
            x = links.take(FORWARD, piece) if piece else None
            if piece and backward:
                # leaves before FSDP2 waits for its reductions at the end of the backward
                back = functools.partial(links.give, BACKWARD, piece - 1)
                x.requires_grad_().register_hook(back)
            y = forward(piece, k, x)
            if backward:
                kept[piece, k] = y
            if piece < last:
                links.give(FORWARD, piece + 1, y.detach())
        else:
            grad = links.take(BACKWARD, piece) if piece < last else None
            backward(piece, k, kept.pop((piece, k)), grad)
    links.finish()
