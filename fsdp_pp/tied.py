"""Tied embeddings in a pipeline: the head is a copy of the embedding, on the last stage or, where
both ends of the model are on one stage, beside it. Both copies take the same steps."""

import torch
import torch.distributed as dist

from llm_demo.job.dist import timeout


class TiedEnds:
    """Keeps the copies equal.

    Args:
        pair: (the embedding's weight, the head's), None for what is not here or not tied.
        optimized: Shards or Masters with the parameters of this stage.
        group: the ranks with this shard of either copy; None if untied."""

    def __init__(self, pair: tuple, optimized, group: dist.ProcessGroup | None):
        (self.embedding, self.head), self.optimized, self.group = pair, optimized, group
        self.both = self.embedding is not None and self.head is not None

    def sum_gradients(self) -> None:
        """Give each copy the sum of both gradients."""
        ends = [p for p in (self.embedding, self.head) if p is not None]
        grads = [self.optimized.grad_of(p) for p in ends]
        if self.both:
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])
        elif ends:
            dist.all_reduce(grads[0], group=self.group)

    def counted_once(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Without the head's, for the norm: the embedding's is the same."""
        if self.head is None:
            return grads
        copy = self.optimized.grad_of(self.head)
        return [g for g in grads if not (g.numel() and g.data_ptr() == copy.data_ptr())]

    def saved(self, optimizer):
        """What a checkpoint holds of this stage: `optimized.views` without the copy."""
        return (view for view in self.optimized.views(optimizer) if view[0] is not self.head)

    def loaded(self, optimizer):
        """What is to be filled from a checkpoint: the copy too if the embedding is elsewhere."""
        return self.saved(optimizer) if self.both else self.optimized.views(optimizer)

    @torch.no_grad()
    def copy(self, optimizer) -> None:
        """After loading: the master and the moments of a copy beside its embedding."""
        if self.both:
            views = {view[0]: view[1:] for view in self.optimized.views(optimizer)}
            for ours, theirs in zip(views[self.head], views[self.embedding], strict=True):
                ours.copy_(theirs)


def tied_group(first: list[int], last: list[int], shard: int) -> dist.ProcessGroup:
    """The ranks that have the same shard of the embedding and of its copy. first, last: ranks of
    the stages with either, by shard. Every rank calls."""
    pairs = zip(first, last, strict=True)
    groups = [dist.new_group(sorted({*pair}), timeout=timeout()) for pair in pairs]
    return groups[shard]
