"""Attention over packed documents with heads of any width, by PyTorch's memory-efficient kernel.

Flash kernels take heads of up to 256 numbers; Gemma 4 has 512 in some blocks. This kernel takes any
width, also in fp32, and is slower. It is in an operator of its own, since torch.compile can't trace
its backward with a scale.

The backward needs memory for as many tokens as there are documents times the longest of them. So
neighbouring documents are computed together only if they are of similar length."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNED = 32  # the kernel rounds the number of sums of a document up to this
CAUSAL = 1  # its code of a causal mask


class _Group(NamedTuple):
    """Neighbouring documents that are computed together."""

    tokens: slice
    cu_seqlens: Tensor  # int32 [documents + 1] on the device, from 0
    longest: int  # tokens of the longest
    sums: slice  # their place among the sums of all groups


def _groups(heads: int, cu_seqlens: Tensor, boundaries: Tensor) -> Iterator[_Group]:
    """Groups that are at most doubled if all their documents are padded to the longest."""
    ends = boundaries.tolist()
    used = 0

    def group(first, last, longest):
        size = heads * (last - first) * -(-longest // ALIGNED) * ALIGNED
        return _Group(
            tokens=slice(ends[first], ends[last]),
            cu_seqlens=cu_seqlens[first : last + 1] - ends[first],
            longest=longest,
            sums=slice(used, used + size),
        )

    documents = sum(end < ends[-1] for end in ends)  # those that follow are empty
    first, longest = 0, 0
    for i in range(documents):
        n = ends[i + 1] - ends[i]
        padded = (i + 1 - first) * max(longest, n)
        if padded > 2 * (ends[i + 1] - ends[first]):
            done = group(first, i, longest)
            yield done
            first, longest, used = i, 0, done.sums.stop
        longest = max(longest, n)
    yield group(first, documents, longest)


@torch.library.custom_op("llm_demo::attend_wide", mutates_args=())
def attend_wide(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    boundaries: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents: q [T, H, D], k [T, KV, D], v [T, KV, E] -> (out
    [T, H, E], the logarithms of the softmax's sums as the kernel has them, fp32).

    cu_seqlens: int32 [documents + 1] from 0 to T on q's device; boundaries: the same on the CPU.
    window: tokens that a token attends to, itself included."""
    out, sums = _outputs(q, k, v, cu_seqlens)
    sums.zero_()  # groups rarely fill it
    for group in _groups(q.shape[1], cu_seqlens, boundaries):
        at = group.tokens
        keys, values = for_each_query(q, k[at], v[at])
        out[at], found = forward_of(
            q[at], keys, values, group.cu_seqlens, group.longest, scale=scale, window=window
        )
        sums[group.sums] = found.flatten()
    return out, sums


def for_each_query(q: Tensor, *of_keys: Tensor) -> list[Tensor]:
    """Keys and values with a head for each head of the queries: the kernel knows no groups."""
    groups = q.shape[1] // of_keys[0].shape[1]
    return [x.repeat_interleave(groups, 1) for x in of_keys]


@attend_wide.register_fake
def _outputs(q, k, v, cu_seqlens, *args):
    T, H, _ = q.shape
    sums = H * (2 * T + ALIGNED * (len(cu_seqlens) - 1))  # at most
    return q.new_empty(T, H, v.shape[2]), q.new_empty(sums, dtype=torch.float32)


@torch.library.custom_op("llm_demo::attend_wide_backward", mutates_args=())
def _attend_wide_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor,
    boundaries: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    H, KV = q.shape[1], k.shape[1]
    of_q, of_k, of_v = (x.new_empty(x.shape) for x in (q, k, v))
    for group in _groups(H, cu_seqlens, boundaries):
        at = group.tokens
        keys, values = for_each_query(q, k[at], v[at])
        of_q[at], *of_each = backward_of(
            grad[at],
            q[at],
            keys,
            values,
            out[at],
            sums[group.sums].view(len(group.cu_seqlens) - 1, H, -1),
            group.cu_seqlens,
            group.longest,
            scale=scale,
            window=window,
        )
        for whole, each in zip((of_k, of_v), of_each, strict=True):
            whole[at] = each.unflatten(1, (KV, -1)).sum(2, dtype=torch.float32)
    return of_q, of_k, of_v


@_attend_wide_backward.register_fake
def _(grad, q, k, v, *args):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep_tensors(ctx, inputs, output):
    q, k, v, cu_seqlens, boundaries, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, boundaries)


def _differentiate(ctx, grad, _):
    grads = _attend_wide_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.numbers)
    return (*grads, None, None, None, None)


attend_wide.register_autograd(_differentiate, setup_context=_keep_tensors)


def forward_of(q, k, v, cu, longest, scale, window):
    q, k, v = (x.contiguous()[None] for x in (q, k, v))
    found = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, cu, cu, longest, longest, 0.0, CAUSAL, True, scale=scale, window_size=window
    )
    return found[0][0], found[1]


def backward_of(grad, q, k, v, out, sums, cu, longest, scale, window):
    grad, q, k, v, out = (x.contiguous()[None] for x in (grad, q, k, v, out))
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout's random state
    grads = torch.ops.aten._efficient_attention_backward(
        grad,
        q,
        k,
        v,
        None,
        out,
        cu,
        cu,
        longest,
        longest,
        sums,
        0.0,
        unused,
        unused,
        CAUSAL,
        False,
        scale=scale,
        window_size=window,
    )
    return tuple(x[0] for x in grads[:3])
