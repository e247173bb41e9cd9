"""Linear layers of blocks whose products are in fp8 (e4m3): approximate, about twice as fast.

The weight stays a parameter in the compute dtype: it is quantised in each forward and backward, so
that sharding, optimizer and checkpoints need not know of it. Scales are powers of two, so only the
rounding to fp8 is inexact. A recipe says which numbers share a scale:

- rowwise: those of a token, and those of a row of the weight. A scale can leave a product only
  along a dimension that is not summed. Along a summed one it moves to the other operand before
  that is quantised, so that all three products use the same rounded numbers.
- rowwise_gw: the same, but the gradient of the weight is a product in the compute dtype.
- blockwise: 128 numbers of a token, and 128 x 128 of a weight, as in DeepSeek-V3 (2024).

No scale depends on two tokens, except where a sum over tokens follows (the gradient of the weight):
so documents in a row do not change one another's results. On a CPU the same is emulated."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from llm_demo.core.decoder import of_router

RECIPES = ("rowwise_gw", "rowwise", "blockwise")
E4M3, TOP = torch.float8_e4m3fn, 448.0  # and its largest number
SMALLEST = 2.0**-90  # taken for the largest number of a block of zeros
BLOCK = 128
LEAST = 800  # N K / (N + K) of a layer's sizes, from which on it gains


def qualifies(outputs: int, inputs: int, multiple: int) -> bool:
    """Whether products of a layer gain more than quantising costs. multiple: of each size.

    On an H100 the products of N x K weights take 3.1e-15 N K s less a token, and quantising input
    and gradient takes up to 1.2e-12 (N + K) s (docs/fp8.md)."""
    large = outputs * inputs >= LEAST * (outputs + inputs)
    return large and outputs % multiple == inputs % multiple == 0


def use_fp8(lm: nn.Module, recipe: str, shares: int = 1) -> tuple[list[str], list[str]]:
    """Give the blocks of a decoder on the meta device layers with products in fp8: the linear ones
    that qualify, except routers. shares: --tensor_parallel, which cuts them later. Returns the name
    within a block of each of these, and of each other linear layer."""
    multiple = shares * (BLOCK if recipe == "blockwise" else 16)
    done, left = [], []
    for name, layer in [*lm.named_modules()]:
        if ".layers." not in name or type(layer) is not nn.Linear or of_router(name):
            continue
        parent, _, kind = name.rpartition(".")
        gains = qualifies(*layer.weight.shape, multiple)
        (done if gains else left).append(kind)
        if gains:
            setattr(lm.get_submodule(parent), kind, RecipeLinear(layer, recipe))
    return done, left


class RecipeLinear(nn.Linear):
    """A linear layer with another's weight and bias, and products by a recipe of `linear`."""

    def __init__(self, layer: nn.Linear, recipe: str | nn.Module | None):
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, has_bias, device="meta")
        self.weight, self.bias, self.recipe = layer.weight, layer.bias, recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, self.recipe)


def linear(x, weight, bias=None, recipe: str | nn.Module | None = None) -> torch.Tensor:
    """F.linear by a recipe. x [..., K], weight [N, K], bias [N] -> [..., N]. Without a recipe, and
    without gradients, as in an evaluation: in the dtype of x. A module: computes the product with
    the weight that it stores, see four_bits.py."""
    if isinstance(recipe, nn.Module):
        out = recipe(x, weight)
        return out if bias is None else out + bias
    if not recipe or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    function = _Blockwise if recipe == "blockwise" else _Rowwise
    rows = x.flatten(0, -2)
    out = function.apply(rows, weight, weight.requires_grad, recipe == "rowwise")
    out = out.unflatten(0, x.shape[:-1])
    return out if bias is None else out + bias


def scales_of(largest: torch.Tensor) -> torch.Tensor:
    """The smallest powers of two by which numbers up to `largest` in size are divided to be in the
    range of fp8. fp32."""
    bits = (largest.float().clamp(min=SMALLEST) / TOP).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def to_fp8(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    return (x.float() * (1 / divisor)).to(E4M3)


def product(a, scale_a, b, scale_b, dtype: torch.dtype, exact: bool = False) -> torch.Tensor:
    """a [M, K] times b [N, K] transposed, both fp8, in `dtype` [M, N]. scale_a, scale_b: of equal
    blocks, their shapes divide those of a and b. exact: sum in fp32; the fast sum of a Hopper GPU
    keeps about 14 bits."""
    if a.device.type == "cpu":
        return (_wide(a, scale_a) @ _wide(b, scale_b).T).to(dtype)
    if scale_a.shape[1] > 1:
        return _product_of_blocks(a, scale_a, b, scale_b, dtype)
    return torch._scaled_mm(
        a, b.T, scale_a=scale_a, scale_b=scale_b.T, out_dtype=dtype, use_fast_accum=not exact
    )


def _wide(x, scales):
    for dim in (0, 1):
        scales = scales.repeat_interleave(x.shape[dim] // scales.shape[dim], dim)
    return x.float() * scales


# PyTorch 2.11 can't trace F.scaled_mm
@torch.library.custom_op("llm_demo::product_of_blocks", mutates_args=())
def _product_of_blocks(
    a: torch.Tensor,
    scale_a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    kinds = F.ScalingType
    kind = kinds.BlockWise1x128
    if len(scale_b) < len(b):  # of 128 x 128; cuBLAS reads rows of a multiple of four
        kind = kinds.BlockWise128x128
        scale_b = F.pad(scale_b, (0, -scale_b.shape[1] % 4)).contiguous().T
    return F.scaled_mm(a, b.T, scale_a, kinds.BlockWise1x128, scale_b, kind, output_dtype=dtype)


@_product_of_blocks.register_fake
def _(a, scale_a, b, scale_b, dtype):
    return a.new_empty(len(a), len(b), dtype=dtype)


@torch.library.custom_op("llm_demo::transposed_fp8", mutates_args=())
def transposed_fp8(
    x: torch.Tensor,
    by_row: torch.Tensor,
    by_column: torch.Tensor,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [R, C] times by_row [R, 1] and by_column [1, C] in fp8, transposed: [C, R]. after: a tensor
    that must exist first. Else a compiler would move this, which needs no gradient, into the
    forward and keep the result."""
    if x.device.type == "cpu":
        return (x.float() * by_row * by_column).to(E4M3).T.contiguous()
    from llm_demo.options.fp8_kernels import transposed

    return transposed(x.contiguous(), by_row, by_column)


@transposed_fp8.register_fake
def _(x, by_row, by_column, after=None):
    return x.new_empty(x.shape[1], x.shape[0], dtype=E4M3)


class _Rowwise(torch.autograd.Function):
    """x [T, K] and w [N, K] -> [T, N]. trains: whether w has a gradient. in_fp8: its product is."""

    @staticmethod
    def forward(ctx, x, w, trains, in_fp8):
        scale_x, scale_w = (scales_of(t.abs().amax(1, keepdim=True)) for t in (x, w))
        ctx.trains, ctx.in_fp8 = trains, in_fp8
        ctx.save_for_backward(w, scale_w, *((x, scale_x) if trains else ()))
        return product(to_fp8(x, scale_x), scale_x, to_fp8(w, scale_w), scale_w, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        w, scale_w, *more = ctx.saved_tensors
        N, K = w.shape
        ones = scale_w.new_ones(K, 1)
        moved = grad.float() * scale_w.T  # [T, N]
        scale = scales_of(moved.abs().amax(1, keepdim=True))
        whole = transposed_fp8(w, 1 / scale_w, ones.T, grad)
        grad_x = product(to_fp8(moved, scale), scale, whole, ones, grad.dtype)
        if not ctx.trains:
            return grad_x, None, None, None
        x, scale_x = more
        if not ctx.in_fp8:
            return grad_x, grad.T @ x, None, None
        scale = scales_of((grad.float() * scale_x).abs().amax(0, keepdim=True))  # [1, N]
        columns = transposed_fp8(grad, scale_x, 1 / scale)  # [N, T]
        inputs = transposed_fp8(x, 1 / scale_x, ones.T)  # [K, T]
        grad_w = product(columns, scale.T, inputs, ones, grad.dtype, exact=True)
        return grad_x, grad_w, None, None


@torch.library.custom_op("llm_demo::fp8_blocks", mutates_args=())
def fp8_blocks(
    x: torch.Tensor, square: bool, after: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [R, C] in fp8 with scales of 1 x 128 blocks [R, C / 128], and the same of x transposed. Of
    128 x 128 blocks if `square`. Scales of 1 x 128 are stored by column, as cuBLAS reads them.
    after: as of transposed_fp8."""
    if x.device.type == "cuda":
        from llm_demo.options.fp8_kernels import blocks

        return blocks(x.contiguous(), square)
    return _fp8_blocks(x, square)


@fp8_blocks.register_fake
def _fp8_blocks(x, square, after=None):
    both = []
    for t in (x, x.T):
        tiles = t.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scales = scales_of(tiles.abs().amax((1, 3) if square else 3, keepdim=True))
        both.append(to_fp8(tiles, scales).flatten(2, 3).flatten(0, 1).contiguous())
        scales = scales.squeeze(3).flatten(0, 1)
        both.append(scales if square else scales.T.contiguous().T)
    return tuple(both)


class _Blockwise(torch.autograd.Function):
    """As _Rowwise. Keeps x in fp8, in blocks of 128 tokens, for the gradient of w."""

    @staticmethod
    def forward(ctx, x, w, trains, in_fp8):
        a, scale_a, columns, scale_columns = fp8_blocks(x, False)
        b, scale_b, _, _ = fp8_blocks(w, True)
        ctx.trains = trains
        ctx.save_for_backward(w, *((columns, scale_columns) if trains else ()))
        return product(a, scale_a, b, scale_b, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        w, *inputs = ctx.saved_tensors
        a, scale_a, columns, scale_columns = fp8_blocks(grad, False)
        _, _, b, scale_b = fp8_blocks(w, True, grad)
        grad_x = product(a, scale_a, b, scale_b, grad.dtype)
        if not ctx.trains:
            return grad_x, None, None, None
        return grad_x, product(columns, scale_columns, *inputs, grad.dtype), None, None
