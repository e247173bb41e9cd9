"""Attention over packed documents with heads of any width, by PyTorch's memory-efficient kernel.

Flash kernels take heads of up to 256 numbers; Gemma 4 has 512 in some blocks. This kernel takes any
width, also in fp32, and is slower. It is in an operator of its own, since torch.compile can't trace
its backward with a scale."""

import torch
from torch import Tensor

ALIGNED = 32  # the kernel rounds the number of sums of a document up to this
CAUSAL = 1  # its code of a causal mask


@torch.library.custom_op("llm_demo::attend_wide", mutates_args=())
def attend_wide(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents: q [T, H, D], k [T, KV, D], v [T, KV, E] -> (out
    [T, H, E], the logarithms of the softmax's sums, fp32).

    cu_seqlens: int32 [documents + 1] from 0 to T. longest: at least the tokens of each document.
    window: tokens that a token attends to, itself included."""
    k, v = for_each_query(q, k, v)
    return forward_of(q, k, v, cu_seqlens, longest, scale, window)


def for_each_query(q: Tensor, *of_keys: Tensor) -> list[Tensor]:
    """Keys and values with a head for each head of the queries: the kernel knows no groups."""
    groups = q.shape[1] // of_keys[0].shape[1]
    return [x.repeat_interleave(groups, 1) for x in of_keys]


@attend_wide.register_fake
def _(q, k, v, cu_seqlens, longest, scale, window):
    sums = len(cu_seqlens) - 1, q.shape[1], -(-longest // ALIGNED) * ALIGNED
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(sums, dtype=torch.float32)


@torch.library.custom_op("llm_demo::attend_wide_backward", mutates_args=())
def _attend_wide_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = for_each_query(q, k, v)
    of_q, *of_each = backward_of(
        grad, q, keys, values, out, sums, cu_seqlens, longest, scale, window
    )
    heads = k.shape[1]
    summed = (x.unflatten(1, (heads, -1)).sum(2, dtype=torch.float32) for x in of_each)
    of_k, of_v = (x.to(q.dtype) for x in summed)
    return of_q, of_k, of_v


@_attend_wide_backward.register_fake
def _(grad, q, k, v, *args):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep_tensors(ctx, inputs, output):
    q, k, v, cu_seqlens, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


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
