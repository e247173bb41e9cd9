"""Token-sum cross-entropy from hidden states and the head's weight, in chunks of rows.

With a vocabulary of 152k the logits of a micro-batch are its largest tensor by far. Here they exist
for one chunk of rows at a time: its loss and its gradients are formed while it is there."""

import torch
from torch.autograd.function import once_differentiable

from llm_demo.data import IGNORE_INDEX

CHUNK = 4096  # rows. Small chunks starve the matrix units: 64 rows cost a multiple of the time


def learnt(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, targets): which flat positions of labels [B, S] are learnt, and what is due there.

    Call it on the CPU: on a GPU the number of positions would have to be waited for."""
    index = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    return index, labels.flatten()[index]


def cross_entropy_sum(
    hidden: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Sum of -log p(target) over the learnt positions, an fp32 scalar.

    hidden: [B, S, d]; weight: the head's [V, d], tied to the embedding or not, whole (not a
    shard), in hidden's dtype; index, targets: int64 [n] as of `learnt`. Softmax and sums: fp32."""
    rows = hidden.flatten(0, 1).index_select(0, index)
    return _ChunkedCrossEntropy.apply(rows, weight, targets, torch.is_grad_enabled())


def next_tokens(hidden: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The likeliest next token at flat positions `index` [n] of hidden [B, S, d]: int64 [n]."""
    rows = hidden.flatten(0, 1).index_select(0, index)
    return (rows @ weight.T).argmax(-1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, needs_grad):
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # A sum over chunks in bf16 would round once a chunk.
        grad_w = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        grad_h = torch.empty_like(hidden) if needs_grad else None
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            h, t = hidden[part], targets[part]
            logits = (h @ weight.T).float()
            t = t.unsqueeze(1)
            norm = logits.logsumexp(-1, keepdim=True)
            total += (norm - logits.gather(1, t)).sum()
            if needs_grad:  # d/dlogits = softmax - one-hot
                p = logits.sub_(norm).exp_()
                p.scatter_add_(1, t, torch.full_like(t, -1.0, dtype=p.dtype))
                p = p.to(h.dtype)
                torch.mm(p, weight, out=grad_h[part])
                grad_w += p.T @ h
        if needs_grad:
            ctx.save_for_backward(grad_h, grad_w.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_h, grad_w = ctx.saved_tensors
        return grad_h * grad.to(grad_h.dtype), grad_w * grad.to(grad_w.dtype), None, None
