"""Attention over packed documents in one operator: long ones by cuDNN, the others by flash.

On an H200 cuDNN's kernel for a whole row is about twice as fast as the flash kernel behind
`varlen_attn`. It takes about 50 ms to prepare for a new length, so long documents are padded to a
few lengths. It has no sliding windows: flash computes documents longer than one. cuDNN's own kernel
for packed documents gave wrong gradients in PyTorch 2.11: see bench/LOG.md."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class _Part(NamedTuple):
    """A long document, or neighbouring short ones."""

    tokens: slice
    documents: slice
    longest: int
    padded: int  # length of a long document with its padding, or 0


def _parts(boundaries: Tensor, long: int, window: int | None) -> Iterator[_Part]:
    lengths, at = boundaries.diff(), 0
    alone = lengths >= long
    if window is not None:
        alone &= lengths <= window
    for i in [*alone.nonzero().flatten().tolist(), len(lengths)]:
        start, end = boundaries[at].item(), boundaries[i].item()
        if start < end:
            # At 1, the flash kernel expects a query of every document, and some are empty.
            longest = max(2, int(lengths[at:i].max()))
            yield _Part(slice(start, end), slice(at, i), longest, 0)
        if i < len(lengths):
            n = int(lengths[i])
            yield _Part(slice(end, end + n), slice(i, i + 1), n, padded_length(n))
        at = i + 1


def padded_length(n: int) -> int:
    """The next of 16 lengths for each power of two: at most 6 % more."""
    step = max(64, 2 ** n.bit_length() // 32)
    return -(-n // step) * step


@torch.library.custom_op("llm_demo::attend_documents", mutates_args=())
def attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    boundaries: Tensor,
    long: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents: q [T, H, D], k and v [T, KV, D], bf16 or fp16, ->
    (out [T, H, D], logarithms of the softmax's sums, fp32 [H, T]).

    cu_seqlens: int32 [documents + 1] from 0 to T on q's device; boundaries: the same on the CPU.
    long: documents of so many tokens or more are computed one by one, unless they are longer than
    the window: tokens that a token attends to, itself included."""
    out, sums = _empty(q, k, v)
    for part in _parts(boundaries, long, window):
        at, qkv = part.tokens, [x[part.tokens] for x in (q, k, v)]
        if part.padded:
            one, its_sums = forward_of_one(*(_pad(x, part) for x in qkv), scale)
            out[at] = _without_padding(one, part)
            sums[:, at] = its_sums.view(len(sums), -1)[:, : part.longest]
        else:
            cu = _boundaries_of(part, cu_seqlens)
            out[at], sums[:, at] = forward_of_short(*qkv, cu, part.longest, scale, window)
    return out, sums


@attend_documents.register_fake
def _empty(q, k, v, *args):
    return q.new_empty(q.shape), q.new_empty(q.shape[1], len(q), dtype=torch.float32)


@torch.library.custom_op("llm_demo::attend_documents_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    cu_seqlens: Tensor, boundaries: Tensor, long: int, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = tuple(x.new_empty(x.shape) for x in (q, k, v))
    for part in _parts(boundaries, long, window):
        tensors = [x[part.tokens] for x in (grad, q, k, v, out)]
        its_sums = sums[:, part.tokens]
        if part.padded:
            its_sums = F.pad(its_sums, (0, part.padded - part.longest))
            found = backward_of_one(*(_pad(x, part) for x in tensors), its_sums, scale)
            found = [_without_padding(x, part) for x in found]
        else:
            cu = _boundaries_of(part, cu_seqlens)
            found = backward_of_short(
                *tensors, its_sums.contiguous(), cu, part.longest, scale, window
            )
        for whole, some in zip(grads, found, strict=True):
            whole[part.tokens] = some
    return grads


@_attention_backward.register_fake
def _(grad, q, k, v, *args):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep_attention_inputs(ctx, inputs, output):
    q, k, v, cu_seqlens, boundaries, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, boundaries)


def _differentiate_attention(ctx, grad, _):
    grads = _attention_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.numbers)
    return (*grads, None, None, None, None, None)


attend_documents.register_autograd(_differentiate_attention, setup_context=_keep_attention_inputs)


def _boundaries_of(part: _Part, cu_seqlens: Tensor) -> Tensor:
    cu = cu_seqlens[part.documents.start : part.documents.stop + 1]
    return cu - cu[0]


def _pad(x: Tensor, part: _Part) -> Tensor:
    """A document's [n, H, D], with zeros at its end, as [1, H, padded, D]."""
    if part.padded > part.longest:
        x = F.pad(x, (0, 0, 0, 0, 0, part.padded - part.longest))
    return x.transpose(0, 1)[None]


def _without_padding(x: Tensor, part: _Part) -> Tensor:
    return x[0].transpose(0, 1)[: part.longest]


def forward_of_one(q, k, v, scale):
    found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, scale=scale)
    return found[:2]


def backward_of_one(grad, q, k, v, out, sums, scale):
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout's random state
    n = q.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, sums[None, ..., None], unused, unused, None, None, None, n, n, 0.0,
        True, scale=scale,
    )  # fmt: skip


def forward_of_short(q, k, v, cu, longest, scale, window):
    left = None if window is None else window - 1  # keys before a query's own
    found = aten._flash_attention_forward(
        q, k, v, cu, cu, longest, longest, 0.0, True, False, scale=scale, window_size_left=left
    )
    return found[:2]


def backward_of_short(grad, q, k, v, out, sums, cu, longest, scale, window):
    left = None if window is None else window - 1
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        sums,
        cu,
        cu,
        longest,
        longest,
        0.0,
        True,
        unused,
        unused,
        scale=scale,
        window_size_left=left,
    )
