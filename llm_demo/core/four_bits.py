"""Linear layers of blocks whose frozen weights are stored in 4 bits (NF4, double quantisation).

64 numbers in a row of a weight [N, K] share a scale; a number is one of 16 levels times it. Scales
are stored in a byte each, 256 of which share an fp32 scale. A row of the parameter holds its
numbers, two a byte, then its scales. These bytes are seen as numbers of the compute dtype, so that
sharding and gathering need not know of them. The values are computed from them in each forward and
again in each backward, for one layer at a time.

Source: "QLoRA: Efficient Finetuning of Quantized LLMs" (Dettmers et al. 2023), in the format of the
library bitsandbytes, which computes the values."""

import functools
import logging
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

BLOCK, GROUP = 64, 256  # numbers that share a scale, and scales that do
NF4 = {"blocksize": BLOCK, "quant_type": "nf4"}


@functools.cache
def library():
    """bitsandbytes.functional. On some CPUs bitsandbytes would download a kernel and run it, if
    the package `kernels` is installed: this import hides that. Raises ImportError."""
    log, hidden = logging.getLogger("bitsandbytes"), sys.modules.get("kernels")
    level = log.level
    log.setLevel(logging.ERROR)
    sys.modules["kernels"] = None
    try:
        import bitsandbytes.functional
    finally:
        log.setLevel(level)
        del sys.modules["kernels"]
        if hidden:
            sys.modules["kernels"] = hidden
    return bitsandbytes.functional


def row_bytes(inputs: int) -> int:
    """Bytes of a row of the parameter, a multiple of 4."""
    return -(-(inputs // 2 + inputs // BLOCK) // 4) * 4


def scales_of(outputs: int, inputs: int) -> int:
    """How many scales of scales a weight has."""
    return -(-outputs * inputs // (BLOCK * GROUP))


def pack(numbers: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The parameter's bytes, uint8 [N, row_bytes(K)]. numbers, scales: uint8 with N K / 2 and
    N K / 64 elements; shape: (N, K)."""
    rows = [t.reshape(shape[0], -1) for t in (numbers, scales)]
    used = sum(t.shape[1] for t in rows)
    return F.pad(torch.cat(rows, 1), (0, row_bytes(shape[1]) - used))


@torch.library.custom_op("llm_demo::values_of_4_bits", mutates_args=())
def values_of(
    weight: torch.Tensor,
    scales: torch.Tensor,
    inputs: int,
    dtype: torch.dtype,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values [N, K] of a parameter [N, any]. scales: fp32, those of scales, then what is added
    to all scales. inputs: K. after: what must exist before: a compiler moves what needs no gradient
    into the forward, and keeps it."""
    functional, rows = library(), weight.view(torch.uint8)
    of_numbers, of_scales = levels(weight.device)
    numbers, of_blocks = rows[:, : inputs // 2], rows[:, inputs // 2 :][:, : inputs // BLOCK]
    nested = functional.QuantState(
        scales[:-1], code=of_scales, blocksize=GROUP, dtype=torch.float32
    )
    state = functional.QuantState(
        of_blocks.flatten(), (len(rows), inputs), dtype=dtype, offset=scales[-1], state2=nested,
        code=of_numbers, **NF4,
    )  # fmt: skip
    return functional.dequantize_4bit(numbers.reshape(-1, 1), state)


@values_of.register_fake
def _(weight, scales, inputs, dtype, after=None):
    return weight.new_empty(len(weight), inputs, dtype=dtype)


@functools.cache
def levels(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The levels of numbers [16] and of scales [256]: bitsandbytes would copy the first to the
    device, and wait for it, each time."""
    return library().get_4bit_type("nf4", device), library().create_dynamic_map().to(device)


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

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, read: Callable):
        """read() -> (bytes as of `pack`, scales as of `values_of`)."""
        super().__init__()
        self.dtype, self.read = dtype, read
        scales = torch.empty(scales_of(*shape) + 1, device="meta")
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _Frozen.apply(x, weight, self.scales)

    def stored(self) -> torch.Tensor:
        """The whole weight. Sets the scales."""
        packed, scales = self.read()
        self.scales.copy_(scales)
        return packed.view(self.dtype)
