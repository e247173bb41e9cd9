"""Linear layers of blocks whose frozen weights are stored in 4 bits (NF4, double quantisation).

64 numbers in a row of a weight [N, K] share a scale; a number is one of 16 levels times it. Scales
are stored in a byte each, 256 of which share an fp32 scale. A row of the parameter holds its
numbers, two a byte, then its scales. These bytes are seen as numbers of the compute dtype, so that
sharding and gathering need not know of them. The values are computed from them in each forward and
again in each backward, for one layer at a time.

Source: "QLoRA: Efficient Finetuning of Quantized LLMs" (Dettmers et al. 2023), in the format of the
library bitsandbytes, which rounds the weights to it, see four_bits_library.py."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BLOCK, GROUP = 64, 256  # numbers that share a scale, and scales that do
NUMBERS, SCALES = 16, 256  # levels of each
TABLES = 1 + NUMBERS + SCALES  # what `values_of` is given beside scales of scales


def row_bytes(inputs: int) -> int:
    """Bytes of a row of the parameter, a multiple of 4."""
    return -(-(inputs // 2 + inputs // BLOCK) // 4) * 4


def scales_of(outputs: int, inputs: int) -> int:
    """How many scales of scales a weight has."""
    return -(-outputs * inputs // (BLOCK * GROUP))


@torch.library.custom_op("llm_demo::values_of_4_bits", mutates_args=(), device_types="cpu")
def values_of(
    weight: Tensor,
    scales: Tensor,
    inputs: int,
    dtype: torch.dtype,
    after: Tensor | None = None,
) -> Tensor:
    """The values [..., N, K] of parameters [..., N, any]. scales: [..., any] those of scales, what
    is added to all scales, the levels of numbers, those of scales. inputs: K. after: a tensor that
    must exist first. Else a compiler would move this, which needs no gradient, into the forward and
    keep the result. On a GPU, importing four_bits_kernel.py is what makes it work."""
    if scales.ndim > 1:
        each = zip(weight, scales, strict=True)
        return torch.stack([values_of(rows, own, inputs, dtype) for rows, own in each])
    rows, K = weight.view(torch.uint8), inputs
    groups, tables = scales[:-TABLES], scales[-TABLES:]
    added, of_numbers, of_scales = tables.split((1, NUMBERS, SCALES))
    numbers, of_blocks = rows[:, : K // 2], rows[:, K // 2 :][:, : K // BLOCK].flatten()
    groups = groups.repeat_interleave(GROUP)[: len(of_blocks)]
    of_blocks = of_scales[of_blocks.int()] * groups + added
    pairs = torch.cartesian_prod(of_numbers, of_numbers)  # of a byte
    values = F.embedding(numbers.int(), pairs).view(-1, BLOCK) * of_blocks[:, None]
    return values.view(-1, K).to(dtype)


@values_of.register_fake
def _(weight, scales, inputs, dtype, after=None):
    return weight.new_empty(*weight.shape[:-1], inputs, dtype=dtype)


class _Frozen(torch.autograd.Function):
    """x [..., K] times values [N, K] transposed."""

    @staticmethod
    def forward(ctx, x, weight, scales):
        ctx.save_for_backward(weight, scales)
        ctx.inputs = x.shape[-1]
        return F.linear(x, values_of(weight, scales, x.shape[-1], x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad @ values_of(*ctx.saved_tensors, ctx.inputs, grad.dtype, grad), None, None


class FourBits(nn.Module):
    """How a layer's product is computed, with its scales of scales."""

    def __init__(
        self, owner: nn.Module, key: str, dtype: torch.dtype, read: Callable, matrices: int = 1
    ):
        """Stores a parameter of its owner on the meta device, [N, K] or of experts [E, N, K], in 4
        bits. read() -> (bytes [..., row_bytes(K)], scales as of `values_of`). matrices: of each
        expert."""
        super().__init__()
        *experts, outputs, self.inputs = getattr(owner, key).shape
        self.dtype, self.read = dtype, read
        width = row_bytes(self.inputs) // dtype.itemsize
        packed = torch.empty((*experts, outputs, width), dtype=dtype, device="meta")
        setattr(owner, key, nn.Parameter(packed, requires_grad=False))
        if experts:
            experts.append(matrices)
        n_scales = scales_of(outputs // matrices, self.inputs) + TABLES
        scales = torch.empty((*experts, n_scales), device="meta")
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return _Frozen.apply(x, weight, self.scales)

    def stored(self) -> Tensor:
        """The whole weight. Sets the scales."""
        packed, scales = self.read()
        self.scales.copy_(scales)
        return packed.view(self.dtype)
