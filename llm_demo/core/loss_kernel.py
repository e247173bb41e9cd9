"""Cross-entropy over a large vocabulary in one Triton kernel: loss, and gradient in place.

A program handles one row of logits. It reads the row twice, the second time backwards, since the
columns read last are the likeliest to be in the cache."""

import torch
import triton
import triton.language as tl

# A program reads LANES x EACH columns at a time; a lane is a thread's run of columns: 16 bytes in
# 16 bits. On one H200, 4,096 rows of 151,936 in bf16 take 0.89 ms: bench/LOG.md.
LANES, EACH = 512, 8
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def loss_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, scale: float = 1.0, cap: float | None = None
) -> torch.Tensor:
    """The sum of -log p(target) over rows, an fp32 scalar; logits become its gradient, times
    `scale`.

    logits: [n, V] of any floating dtype, rows contiguous. targets: int64 [n], each in [0, V).
    Softmax and sums are in fp32. cap: as of loss.cross_entropy_sum."""
    n, columns = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n:
        warps = LANES // torch.cuda.get_device_properties(logits.device).warp_size  # 64 on CDNA
        _row[(n,)](
            logits,
            targets,
            losses,
            logits.stride(0),
            columns,
            SCALE=scale,
            CAP=cap,
            LANES=LANES,
            EACH=EACH,
            num_warps=warps,
        )
    return losses.sum()


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1  # to 1e-7; Triton has no other on every GPU


@triton.jit
def _row(
    logits, targets, losses, stride, columns,
    SCALE: tl.constexpr, CAP: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * stride
    hit = tl.load(logits + target).to(tl.float32)
    if CAP is not None:
        hit = CAP * _tanh(hit / CAP)
    block: tl.constexpr = LANES * EACH
    lanes = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    # per lane: the largest logit so far, and the sum of exp(x - top); no thread waits for another
    top = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, columns, block):
        at = start + lanes
        mask = at < columns
        x = tl.load(logits + at, mask, -float("inf"), eviction_policy="evict_last").to(tl.float32)
        if CAP is not None:  # of what is no column it would be finite
            x = tl.where(mask, CAP * _tanh(x / CAP), -float("inf"))
        larger = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp(top - larger) + tl.sum(tl.exp(x - larger[:, None]), 1)
        top = larger
    most = tl.max(top, 0)
    norm = tl.sum(total * tl.exp(top - most), 0)
    tl.store(losses + row, tl.log(norm) - (hit - most))
    share = SCALE / norm
    last = (columns - 1) // block * block
    for start in range(0, columns, block):
        at = last - start + lanes
        mask = at < columns
        x = tl.load(logits + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        tangent = 0.0
        if CAP is not None:
            tangent = _tanh(x / CAP)
            x = CAP * tangent
        p = tl.exp(x - most) * share
        p = tl.where(at == target, p - SCALE, p) * (1 - tangent * tangent)
        p = p.to(logits.dtype.element_ty)
        tl.store(logits + at, p, mask, eviction_policy="evict_first")
