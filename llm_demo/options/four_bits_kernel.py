"""The values of weights in 4 bits by one Triton kernel, see four_bits.py.

A program computes WORDS x 8 of them: an int32 holds 8 numbers, which share a scale."""

import torch
import triton
import triton.language as tl

from llm_demo.options import four_bits

WORDS = 1024


@four_bits.values_of.register_kernel("cuda")
def values(weight, scales, inputs: int, dtype: torch.dtype, after=None) -> torch.Tensor:
    """As four_bits.values_of."""
    out = torch.empty(*weight.shape[:-1], inputs, dtype=dtype, device=weight.device)
    rows, total = weight.view(torch.uint8), weight.shape[-2] * inputs // 8
    words = (rows.clone() if rows.storage_offset() % 4 else rows).view(torch.int32)
    _values[(triton.cdiv(total, WORDS), weight.shape[:-2].numel())](
        words=words,
        rows=rows,
        groups=scales,
        out=out,
        total=total,
        stride=words.shape[-1],
        scales=scales.shape[-1],
        TABLES=four_bits.TABLES,
        PER_ROW=inputs // 8,
        WORDS=WORDS,
        num_warps=8,
        enable_fp_fusion=False,  # products and sums are rounded apart
    )
    return out


@triton.jit
def _values(
    words,
    rows,
    groups,
    out,
    total,
    stride,
    scales,
    TABLES: tl.constexpr,
    PER_ROW: tl.constexpr,
    WORDS: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    begin = matrix * (total // PER_ROW) * stride
    words += begin
    rows += begin * 4
    groups += matrix * scales
    tables = groups + (scales - TABLES)
    out += matrix * total * 8
    i = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = i < total
    row, word = i // PER_ROW, i % PER_ROW
    eight = tl.load(words + row * stride + word, inside)
    code = tl.load(rows + (row * stride + PER_ROW) * 4 + word // 8, inside).to(tl.int32)
    scale = tl.load(tables + 1 + 16 + code, inside) * tl.load(groups + i // (8 * 256), inside)
    scale += tl.load(tables)  # then come 16 levels of numbers, and those of scales
    j = tl.arange(0, 8)
    numbers = (eight[:, None] >> (j // 2 * 8 + 4 - j % 2 * 4)[None, :]) & 15  # high halves first
    found = tl.load(tables + 1 + numbers) * scale[:, None]
    at = i.to(tl.int64)[:, None] * 8 + j[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), inside[:, None])
