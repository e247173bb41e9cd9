"""bitsandbytes, which rounds weights to 4 bits, and its numbers as a parameter of four_bits.py."""

import functools
import logging
import platform
import sys
from importlib.metadata import version

import torch
import torch.nn.functional as F

from llm_demo.core.errors import UserError
from llm_demo.options.four_bits import BLOCK, row_bytes


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
    try:
        for name in ("quantize_4bit", "get_4bit_type", "create_dynamic_map"):
            getattr(library(), name)
        version("bitsandbytes")
    except Exception as e:  # its own libraries', too
        raise UserError(
            f"weights in 4 bits need bitsandbytes, which does not work on {platform.node()} "
            f"({repr(e)[:200]}): pip install -U bitsandbytes"
        ) from e


def quantise(weight: torch.Tensor) -> tuple:
    """(numbers, QuantState) of a weight in bitsandbytes' NF4, with scales in a byte each."""
    return library().quantize_4bit(
        weight, compress_statistics=True, blocksize=BLOCK, quant_type="nf4"
    )


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes, scales) of a weight [N, K] as of four_bits.values_of, on its device."""
    numbers, state = quantise(weight)
    return pack(numbers, state.absmax, tuple(weight.shape)), scales_in(state)


def scales_in(state) -> torch.Tensor:
    """The scales as of `values_of` in a QuantState of bitsandbytes."""
    return torch.cat([state.state2.absmax, state.offset.view(1), state.code, state.state2.code])


def pack(numbers: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The parameter's bytes, uint8 [N, row_bytes(K)]. numbers, scales: uint8
    with N K / 2 and N K / 64 elements; shape: (N, K)."""
    rows = [t.reshape(shape[0], -1) for t in (numbers, scales)]
    used = sum(t.shape[1] for t in rows)
    return F.pad(torch.cat(rows, 1), (0, row_bytes(shape[1]) - used))
