"""Token-sum cross-entropy from hidden states and the head's weight, in chunks of rows.

With a vocabulary of 152k, logits are by far the largest tensor of a micro-batch. Here they exist
for one chunk of rows at a time, whose loss and gradients are computed at once."""

import functools
import importlib.util

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from llm_demo.core.optim import compile_once

HEAD_SLICE = 1 << 25  # elements of the head's gradient that exist in fp32 at a time
MULTIPLE = 8  # products are 4 times as slow if a row or slice of a matrix doesn't start at 16 bytes
CHUNK_ROWS = 4096  # small chunks starve the matrix units: 64 rows take several times as long
SLIM = 6  # chunks are so much smaller where memory is short


def cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor,
    targets: torch.Tensor,
    compiled: bool = False,
    slim: bool = False,
    in_place: bool = False,
    cap: float | None = None,
) -> torch.Tensor:
    """Sum of -log p(target) over the labels, an fp32 scalar.

    hidden: [B, S, d]. weight: the head's [V, d], tied or not, gathered if sharded, in hidden's
    dtype; if frozen, it gets no gradient. index, targets: int64 [n] from label_positions. Softmax
    and sums are in fp32. compiled: use one Triton kernel, or torch.compile where there is no
    Triton, instead of six passes over a chunk's logits. slim: smaller chunks if there are several,
    and always if the head is frozen. in_place: in several chunks, the head's gradient takes the
    memory of its fp32 sum, twice its own: less at the loss, more until the gradient is freed. cap:
    logits z are cap * tanh(z / cap), in fp32 ("Gemma 2", Gemma Team 2024)."""
    rows = hidden.flatten(0, 1).index_select(0, index)
    loss_of_logits, scaled = _loss_of_logits, _scaled
    if compiled:
        loss_of_logits = _kernel(rows.device.type) or _compiled(_loss_of_logits)
        scaled = _compiled(_fused_scaled)
    # a frozen head has no gradient to sum over chunks
    slim = slim and len(rows) > CHUNK_ROWS or not weight.requires_grad
    chunks = _chunks(len(rows), CHUNK_ROWS // SLIM if slim else CHUNK_ROWS)
    needs_grad = torch.is_grad_enabled()
    of_head = needs_grad and weight.requires_grad
    in_place = in_place and len(chunks) > 1
    loss_of_logits = functools.partial(loss_of_logits, cap=cap)
    return _ChunkedCrossEntropy.apply(
        rows, weight, targets, chunks, in_place, needs_grad, of_head, loss_of_logits, scaled
    )


@torch.no_grad()
def score(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor,
    targets: torch.Tensor,
    answers: torch.Tensor,
    compiled: bool = False,
    group: ProcessGroup | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """(the result of `cross_entropy_sum`, the number of wrong answers): fp32 [2].

    An answer is wrong if one of its tokens is not the most likely one after the prompt and the
    tokens before it: greedy decoding gives the others. answers: int64 [n] from `answers_of`. group:
    of ranks with slices of the same rows, numbered together; each counts its share of the wrong
    answers, so that the sum over ranks is their number."""
    rows = hidden.flatten(0, 1).index_select(0, index)
    score_of_chunk = _compiled(_score_of_chunk) if compiled else _score_of_chunk
    loss = torch.zeros((), device=rows.device)
    ranks = group.size() if group else 1
    # per answer: at most one per row, and on every rank of a group as many
    n = hidden[..., 0].numel() * ranks if group else len(rows)
    wrong = torch.zeros(n, device=rows.device)
    # not compiled, logits exist twice
    for chunk in _chunks(len(rows), CHUNK_ROWS if compiled else CHUNK_ROWS // 2):
        loss_sum, misses = score_of_chunk(rows[chunk], weight, targets[chunk], cap)
        loss += loss_sum
        wrong.index_add_(0, answers[chunk], misses)
    if group:
        dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)
    return torch.stack((loss, (wrong > 0).sum() / ranks))


def next_tokens(hidden: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The most likely next token at flat positions `index` [n] of hidden [B, S, d]: int64 [n]. A
    soft cap keeps the order of logits."""
    rows = hidden.flatten(0, 1).index_select(0, index)
    return (rows @ weight.T).argmax(-1)


def _chunks(count: int, most: int = 0) -> list[slice]:
    """Split `count` rows into chunks of similar size: a short last chunk is slow."""
    n_chunks = -(-count // (most or CHUNK_ROWS))
    size = -(-count // max(1, n_chunks))
    return [slice(start, start + size) for start in range(0, count, max(1, size))]


def _logits(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """h @ weight.T, with rows as far apart as products need: some vocabularies have odd sizes."""
    columns = weight.shape[0]
    padded = -(-columns // MULTIPLE) * MULTIPLE
    return torch.mm(h, weight.T, out=h.new_empty(len(h), padded)[:, :columns])


def _scale(dtype: torch.dtype) -> float:
    """What a gradient of logits is multiplied by where it is stored. Most of its numbers would be
    subnormal in fp16: of few bits, and taken for zero in products on an MI200."""
    return 1024.0 if dtype == torch.float16 else 1.0


def _loss_of_logits(out, targets, scale=1.0, cap=None):
    """The loss sum of one chunk's logits, which become their own gradient, times `scale`. cap: as
    of cross_entropy_sum.

    Works in place: logsumexp would allocate another fp32 tensor of the logits' size, as a cap
    does."""
    logits = out.float()
    slope = None
    if cap is not None:
        logits.div_(cap).tanh_()
        slope = logits.square().neg_().add_(1)  # of the cap
        logits *= cap
    logits -= logits.amax(-1, keepdim=True)
    hit = logits.gather(1, targets[:, None])
    p = logits.exp_()
    total = p.sum(-1, keepdim=True)
    loss = (total.log() - hit).sum()
    p /= total / scale  # d/dlogits = softmax - one-hot
    p.scatter_add_(1, targets[:, None], torch.full_like(targets[:, None], -scale, dtype=p.dtype))
    if slope is not None:
        p *= slope
    if p is not out:
        out.copy_(p)
    return loss


def _score_of_chunk(h, weight, targets, cap=None):
    """(loss sum, 1.0 where the target is not the most likely token) of one chunk of rows."""
    logits = h @ weight.T
    misses = (logits.argmax(-1) != targets).float()
    logits = logits.float()
    if cap is not None:
        logits = (logits / cap).tanh() * cap
    loss = (logits.logsumexp(-1, keepdim=True) - logits.gather(1, targets[:, None])).sum()
    return loss, misses


def _scaled(out, grad, factor):
    """Set `out` to a gradient of the loss sum, times the factor that the loss was scaled by."""
    torch.mul(grad, factor, out=out)


def _fused_scaled(out, grad, factor):
    """The same in a form that torch.compile fuses; it needs no work in place."""
    out.copy_(grad * factor)


_compiled = functools.partial(compile_once, dynamic=None)


@functools.cache
def _kernel(device_type: str):
    """The kernel for `_loss_of_logits` on this kind of device, None if there is none."""
    if device_type != "cuda" or not importlib.util.find_spec("triton"):
        return None
    from llm_demo.core.loss_kernel import loss_of_logits

    return loss_of_logits


@functools.cache
def _fp32_products(device_type: str) -> bool:
    """Whether a product of bf16 matrices can be added to fp32 without rounding in between."""
    a = torch.ones(16, 16, dtype=torch.bfloat16, device=device_type)
    try:
        torch.addmm(a.float(), a, a, out_dtype=torch.float32)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


def _add_product(total, p, h):
    """Add p.T @ h without p's scale to total [V, d] in fp32, in place; total is None at first."""
    if h.dtype == torch.float32:
        return p.T @ h if total is None else total.addmm_(p.T, h)
    alpha = 1 / _scale(h.dtype)  # applied before the product is rounded, so it can't overflow
    if not _fp32_products(h.device.type):
        product = torch.addmm(h[0], p.T, h, beta=0, alpha=alpha)
        return product.float() if total is None else total.add_(product)
    beta = int(total is not None)
    if total is None:
        total = torch.empty(p.shape[1], h.shape[1], dtype=torch.float32, device=h.device)
    return torch.addmm(total, p.T, h, out_dtype=torch.float32, beta=beta, alpha=alpha, out=total)


def _times(h, factor):
    """h [n, d] times an fp32 factor, in place. A product in h's dtype would round the factor, and
    all gradients of the blocks with it, but not those of the head."""
    for rows in h.split(CHUNK_ROWS):
        rows.copy_(rows.float().mul_(factor))
    return h


def _narrowed(total, scaled, factor, dtype):
    """`total` [V, d] times `factor`, in `dtype` and in total's own memory."""
    out = total.view(-1).view(dtype)[: total.numel()].view(total.shape)
    rows = max(1, HEAD_SLICE // total.shape[1])
    for source, target in zip(total.split(rows), out.split(rows), strict=True):
        # what is written lies before what is still to be read, except in this slice
        part = torch.empty_like(target)
        scaled(part, source, factor)
        target.copy_(part)
    return out


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Forms the gradients of the hidden states in the forward, and that of the head's weight there
    too if there are several chunks. The gradient of a single chunk's logits is kept: it takes less
    memory than the head's gradient in fp32, which the backward then needs only in slices. in_place:
    the backward narrows a sum over chunks in its own memory. of_head: whether the head's gradient
    is wanted."""

    @staticmethod
    def forward(
        ctx, hidden, weight, targets, chunks, in_place, needs_grad, of_head, loss_of_logits, scaled
    ):
        ctx.scaled, ctx.in_place, ctx.of_head = scaled, in_place, of_head
        keeps = of_head and len(chunks) < 2  # the only chunk's gradient
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_w = p = None  # a bf16 sum would round once per chunk
        grad_h = torch.empty_like(hidden) if needs_grad else None
        scale = _scale(hidden.dtype)
        for chunk in chunks:
            p = _logits(hidden[chunk], weight)
            total += loss_of_logits(p, targets[chunk], scale)
            if needs_grad:
                part = grad_h[chunk]
                torch.addmm(part, p, weight, beta=0, alpha=1 / scale, out=part)
            if not keeps:
                if of_head:
                    grad_w = _add_product(grad_w, p, hidden[chunk])
                p = None  # else it stays beside the next chunk's logits
        if needs_grad:
            ctx.save_for_backward(grad_h, grad_w, *((hidden, p) if keeps else ()))
            ctx.shape = weight.shape
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_h, grad_w, *chunk = ctx.saved_tensors
        none = (None,) * 7
        if not ctx.of_head:
            return _times(grad_h, grad), None, *none
        if ctx.in_place:
            out = _narrowed(grad_w, ctx.scaled, grad, grad_h.dtype)
            return _times(grad_h, grad), out, *none
        out = torch.empty(ctx.shape, dtype=grad_h.dtype, device=grad_h.device)
        if grad_w is not None:
            ctx.scaled(out, grad_w, grad)
        elif chunk[1] is None:  # a micro-batch without labels
            out.zero_()
        else:
            hidden, p = chunk
            rows = max(1, HEAD_SLICE // hidden.shape[1] // MULTIPLE) * MULTIPLE
            for part, columns in zip(out.split(rows), p.split(rows, dim=1), strict=True):
                ctx.scaled(part, _add_product(None, columns, hidden), grad)
        return _times(grad_h, grad), out, *none
