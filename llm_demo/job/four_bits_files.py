"""Weights in 4 bits in files, as bitsandbytes and transformers write them.

    X.weight                       uint8 [N K / 2, 1], two numbers a byte
    X.weight.absmax                uint8 [N K / 64], a scale for each block of 64 numbers
    X.weight.nested_absmax         fp32, a scale for each 256 scales
    X.weight.quant_map             fp32 [16], the levels of numbers
    X.weight.nested_quant_map      fp32 [256], the levels of scales
    X.weight.quant_state.bitsandbytes__nf4    uint8, JSON: shape, sizes of blocks, ...

of X.weight [N, K], see core/four_bits.py."""

import functools
import json
import logging
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

import torch
import torch.nn.functional as F

from llm_demo.core.errors import UserError
from llm_demo.core.four_bits import BLOCK, GROUP, NUMBERS, SCALES, row_bytes, scales_of

STATE = ".quant_state.bitsandbytes__"
PARTS = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")


class Stored(NamedTuple):
    """A weight in 4 bits."""

    shape: tuple[int, int]
    offset: float  # added to all scales


def parts_of(name: str) -> tuple[str, ...]:
    """The tensors that a weight in 4 bits has beside it."""
    return *(name + part for part in PARTS), f"{name}{STATE}nf4"


def four_bits_of(sizes: dict[str, tuple], kinds: dict, read: Callable, folder) -> dict[str, Stored]:
    """{weight: Stored} of files. sizes, kinds: {name: shape, type} of all tensors; read(name) ->
    one. Raises UserError naming a tensor that is missing or is not as its weight implies."""
    found, of = {}, ("U8", "U8", "F32", "F32", "F32")  # types of a weight and its parts
    for state in sorted(name for name in sizes if STATE in name):
        name = state.partition(STATE)[0]
        N, K, offset = _facts(state, read, folder)
        counts = N * K // 2, N * K // BLOCK, scales_of(N, K), NUMBERS, SCALES
        for part, count, kind in zip(("", *PARTS), counts, of, strict=True):
            if name + part not in sizes:
                raise UserError(f"{folder}: {name} is in 4 bits, but {name}{part} is missing")
            size, is_kind = sizes[name + part], kinds[name + part]
            if (torch.Size(size).numel(), is_kind) != (count, kind):
                raise UserError(
                    f"{folder}: {name}{part} has shape {list(size)} and type {is_kind}, but {name} "
                    f"of shape {[N, K]} has {count:,} of type {kind}"
                )
        need_library()
        known = library().get_4bit_type("nf4", "cpu"), library().create_dynamic_map()
        for part, wanted in zip(PARTS[2:], known, strict=True):
            if not torch.allclose(read(name + part).flatten(), wanted, atol=1e-6):
                raise UserError(f"{folder}: {name}{part} has other levels than bitsandbytes'")
        found[name] = Stored((N, K), offset)
    return found


def _facts(state: str, read: Callable, folder) -> tuple[int, int, float]:
    """(rows, columns, offset) that a weight's state says. Raises UserError."""
    try:
        facts = json.loads(bytes(read(state).tolist()))
        N, K = map(int, facts["shape"])
        how = [facts[key] for key in ("quant_type", "blocksize", "nested_blocksize")]
        offset = float(facts["nested_offset"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
        raise UserError(f"{folder}: {state} can't be read: {repr(e)[:200]}") from None
    sizes = 0 < N < 2**31 and 0 < K < 2**31 and K % BLOCK == 0
    if not (sizes and state.endswith("nf4") and how == ["nf4", BLOCK, GROUP]):
        raise UserError(
            f"{folder}: {state.partition(STATE)[0]} is in {str(how)[:80]}, of shape "
            f"{str(facts['shape'])[:80]}: only nf4 by blocks of {BLOCK} and {GROUP} is read, of "
            "rows of whole blocks"
        )
    return N, K, offset


def packed(stored: Stored, name: str, read: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    """(the bytes of a weight, its scales) as of core.four_bits. Raises UserError for scales that
    are not finite."""
    group, *levels = (read(name + part).flatten() for part in PARTS[1:])
    scales = torch.cat([group, torch.tensor([stored.offset]), *levels])
    if not scales.isfinite().all():
        raise UserError(f"{name}: its scales are not finite (NaN or infinity): give another copy")
    return pack(read(name), read(f"{name}.absmax"), stored.shape), scales


def pack(numbers: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The parameter's bytes, uint8 [N, row_bytes(K)], see core/four_bits.py. numbers, scales: uint8
    with N K / 2 and N K / 64 elements; shape: (N, K)."""
    rows = [t.reshape(shape[0], -1) for t in (numbers, scales)]
    used = sum(t.shape[1] for t in rows)
    return F.pad(torch.cat(rows, 1), (0, row_bytes(shape[1]) - used))


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


def need_library() -> None:
    """Raise UserError without a bitsandbytes that works."""
    problem = ""
    try:
        functional = library()
        for name in ("quantize_4bit", "get_4bit_type", "create_dynamic_map"):
            getattr(functional, name)
        version("bitsandbytes")
    except Exception as e:  # its own libraries', too
        gone = isinstance(e, ImportError) and e.name in ("bitsandbytes", "bitsandbytes.functional")
        problem = "is not installed" if gone else f"does not work ({repr(e)[:200]})"
    if problem:
        raise UserError(
            f"weights in 4 bits need bitsandbytes, which {problem} on {platform.node()}: "
            f"pip install {'-U ' * (not gone)}bitsandbytes"
        )
