"""Triton kernels that quantise and transpose in one pass; see fp8.py. A program has one tile."""

import torch
import triton
import triton.language as tl

TILE = 128
E4M3 = torch.float8_e4m3fn


def transposed(x: torch.Tensor, by_row: torch.Tensor, by_column: torch.Tensor) -> torch.Tensor:
    """As fp8.transposed_fp8."""
    R, C = x.shape
    out = torch.empty(C, R, dtype=E4M3, device=x.device)
    tiles = triton.cdiv(R, TILE), triton.cdiv(C, TILE)
    _transposed[tiles](x, by_row.contiguous(), by_column.contiguous(), out, R, C, TILE, num_warps=8)
    return out


@triton.jit
def _transposed(x, by_row, by_column, out, R, C, TILE: tl.constexpr):
    i, j = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    mask = (rows < R)[:, None] & (columns < C)[None, :]
    tile = tl.load(x + rows[:, None] * C + columns[None, :], mask, 0.0).to(tl.float32)
    tile *= tl.load(by_row + rows, rows < R, 0.0)[:, None]
    tile *= tl.load(by_column + columns, columns < C, 0.0)[None, :]
    at = columns[:, None] * R + rows[None, :]
    tl.store(out + at, tl.trans(tile.to(tl.float8e4nv)), tl.trans(mask))


def blocks(x: torch.Tensor, square: bool) -> tuple[torch.Tensor, ...]:
    """As fp8.fp8_blocks. R and C are multiples of 128."""
    R, C = x.shape
    q, qt = (torch.empty(n, m, dtype=E4M3, device=x.device) for n, m in ((R, C), (C, R)))
    sizes = (C // TILE, R), (R // TILE, C)
    if square:
        sizes = (R // TILE, C // TILE), (C // TILE, R // TILE)
    s, st = (torch.empty(size, dtype=torch.float32, device=x.device) for size in sizes)
    _blocks[(R // TILE, C // TILE)](x, q, s, qt, st, R, C, square, TILE, num_warps=8)
    return (q, s, qt, st) if square else (q, s.T, qt, st.T)


@triton.jit
def _scales(largest):
    """As fp8.scales_of."""
    bits = (tl.maximum(largest, 8.077935669463161e-28) / 448.0).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _blocks(x, q, s, qt, st, R, C, SQUARE: tl.constexpr, TILE: tl.constexpr):
    i, j = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    tile = tl.load(x + rows[:, None] * C + columns[None, :]).to(tl.float32)
    sizes = tl.abs(tile)
    at, at_t = rows[:, None] * C + columns[None, :], columns[:, None] * R + rows[None, :]
    if SQUARE:
        scale = _scales(tl.max(tl.max(sizes, 1), 0))
        tl.store(s + i * (C // TILE) + j, scale)
        tl.store(st + j * (R // TILE) + i, scale)
        small = (tile * (1 / scale)).to(tl.float8e4nv)
        tl.store(q + at, small)
        tl.store(qt + at_t, tl.trans(small))
    else:
        scale = _scales(tl.max(sizes, 1))
        tl.store(s + j * R + rows, scale)
        tl.store(q + at, (tile * (1 / scale)[:, None]).to(tl.float8e4nv))
        scale = _scales(tl.max(sizes, 0))
        tl.store(st + i * C + columns, scale)
        tl.store(qt + at_t, tl.trans((tile * (1 / scale)[None, :]).to(tl.float8e4nv)))
