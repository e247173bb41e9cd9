"""Feed-forward networks, and the last norm, that take long rows in pieces.

Recomputed, a network's activations are the largest of a block's: nine times its hidden states in
Qwen3-8B. The last norm, which is not compiled, takes thirteen times the hidden states in its
backward. In pieces, only the activations of one piece exist at a time, in the forward and in the
backward. This is done over a frozen base only: elsewhere states and gradients take most of the
memory, and a weight's gradient would be summed over pieces."""

import functools

import torch
from torch import nn

from llm_demo.core.decoder import Blocks, recomputed

PIECE, LONG = 1 << 13, 1 << 15  # tokens: of a piece, and that go through whole


def use_pieces(unit: Blocks) -> None:
    """Let the frozen networks of a unit's blocks take PIECE tokens at a time if a micro-batch has
    more than LONG, and if blocks are recomputed."""
    for block in unit.blocks if unit.checkpointing else ():
        network = getattr(block, "mlp", None)  # some families call it otherwise
        if network is None or hasattr(network, "experts"):
            continue
        if any(not p.requires_grad for p in network.parameters()):  # frozen
            go_in_pieces(network, unit.list_results_to_keep, unit.dropout)


def go_in_pieces(
    module: nn.Module, list_results_to_keep: bool = False, dropout: bool = False
) -> None:
    """Let a module that computes each token alone take PIECE tokens at a time if it gets more than
    LONG, and keep only its input for the backward. list_results_to_keep, dropout: as of Blocks."""
    module.__class__ = in_pieces(type(module))
    module.lists_results, module.has_dropout = list_results_to_keep, dropout


@functools.cache
def in_pieces(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of this module class whose forward goes in pieces. There is one for each class,
    since blocks of one class share compiled code."""

    class Pieces(kind):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            rows, run = hidden.flatten(0, 1), super().forward
            if len(rows) <= LONG:
                return run(hidden)
            pieces = rows.split(PIECE)
            if torch.is_grad_enabled():
                lists, dropout = self.lists_results, self.has_dropout
                done = [recomputed(run, piece, lists, dropout) for piece in pieces]
            else:
                done = [run(piece) for piece in pieces]
            return torch.cat(done).view_as(hidden)

    return Pieces
