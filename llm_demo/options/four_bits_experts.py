"""Experts of a block whose frozen weights are stored in 4 bits, see four_bits.py.

A fused parameter [E, N, K] is stored as [E, N, bytes of a row]. Each matrix that files have of an
expert is rounded alone and has its own scales of scales: gate and up are two, though one parameter
holds both. Only experts with tokens are unpacked, a few at a time, inside the product: in the
forward, and again in the backward. Nothing keeps their values."""

import torch
from torch import Tensor

from llm_demo.core.experts import grouped_product, looped_product
from llm_demo.options.four_bits import FourBits, values_of

UNPACKED = 1 << 26  # numbers that exist at a time, unless one expert's matrix has more


@torch.library.custom_op("llm_demo::times_experts", mutates_args=())
def times_experts(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    ends: Tensor,
    inputs: int,
    back: bool,
    grouped: bool,
) -> Tensor:
    """x [R, K] by the values of each row's expert [N, K] transposed -> [R, N], or, `back`, x [R, N]
    by them -> [R, K]. weight [E, N, any], scales [E, matrices of each, any], inputs: as of
    `values_of`. ends: int32 [E], of each expert's rows; rows after the last are zero. grouped: by
    PyTorch's grouped kernel. Waits for the device, to know which experts have rows."""
    multiply = grouped_product if grouped else looped_product
    x, outputs = x.contiguous(), weight.shape[1]
    out = x.new_zeros(len(x), inputs if back else outputs)
    busy = ends.diff(prepend=ends.new_zeros(1)).nonzero().flatten()
    stops, few = ends[busy], max(1, UNPACKED // (outputs * inputs))
    until, begin = stops.tolist(), 0
    for at in range(0, len(until), few):
        some = slice(at, at + few)
        rows = slice(begin, until[some][-1])
        packed = weight[busy[some]].unflatten(1, (scales.shape[1], -1))
        values = values_of(packed, scales[busy[some]], inputs, x.dtype).flatten(1, 2)
        out[rows] = multiply(x[rows], values if back else values.mT, stops[some] - begin)
        del values  # before the next exist
        begin = rows.stop
    return out


@times_experts.register_fake
def _(x, weight, scales, ends, inputs, back, grouped):
    return x.new_empty(x.shape[0], inputs if back else weight.shape[1])


def _keep(ctx, inputs, output):
    _, weight, scales, ends, ctx.inputs, _, ctx.grouped = inputs
    ctx.save_for_backward(weight, scales, ends)


def _back(ctx, grad):
    back = times_experts(grad, *ctx.saved_tensors, ctx.inputs, True, ctx.grouped)
    return back, *(None,) * 6


times_experts.register_autograd(_back, setup_context=_keep)


class FourBitsOfExperts(FourBits):
    """How the product with a fused matrix of a block's experts is computed."""

    def forward(self, x, weight, ends, grouped: bool, first: int) -> Tensor:
        """x [R, K] -> [R, N]. weight: the experts that are here; first: the first of them; ends,
        grouped: as of `times_experts`."""
        scales = self.scales[first : first + len(weight)]
        return times_experts(x, weight, scales, ends, self.inputs, False, grouped)
