"""Runs a stage's order of work with ordinary backwards, so that FSDP2's hooks, activation
checkpointing and compiled blocks work as they do without a pipeline."""

from collections import deque
from collections.abc import Callable, Iterable

import torch

from fsdp_pp.orders import BACKWARD, FORWARD
from fsdp_pp.transfers import Links


def run(
    work: Iterable[tuple],
    last: int,
    links: Links,
    hidden: tuple[tuple, torch.dtype],
    forward: Callable,
    backward: Callable | None = None,
) -> None:
    """Do this stage's work of a step.

    Args:
        work: as of orders.with_receives.
        last: the last piece of the model.
        hidden: shape and dtype of a micro-batch's hidden states.
        forward: forward(piece, k, x) -> the output of a piece for micro-batch k. x: hidden states,
            None for the first piece.
        backward: backward(piece, k, y, gradient) runs autograd from the output y. gradient: None
            for the last piece, whose output is the loss. Without `backward`, nothing is kept."""
    shape, dtype = hidden
    kept, passed = {}, {}  # (piece, k) -> output; (kind, piece) -> from another piece of this stage

    def take(kind, piece):
        if (kind, piece) in links.received:
            return links.received[kind, piece].take()
        return passed[kind, piece].popleft()

    def give(kind, piece, t):
        if (kind, piece) in links.sent:
            links.sent[kind, piece].send(t)
        else:
            passed.setdefault((kind, piece), deque()).append(t)

    for kind, piece, k, receives in work:
        for received_kind, to in receives:  # while the device computes, since the host is ahead
            links.expect(received_kind, to, shape, dtype)
        links.begin()
        if kind == FORWARD:
            x = take(FORWARD, piece) if piece else None
            if piece and backward:
                # leaves before FSDP2 waits for its reductions at the end of the backward
                x.requires_grad_().register_hook(lambda grad, p=piece: give(BACKWARD, p - 1, grad))
            y = forward(piece, k, x)
            if backward:
                kept[piece, k] = y
            if piece < last:
                give(FORWARD, piece + 1, y.detach())
        else:
            grad = take(BACKWARD, piece) if piece < last else None
            backward(piece, k, kept.pop((piece, k)), grad)
    links.finish()
