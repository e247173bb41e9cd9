"""Weights in 4 bits in files, as bitsandbytes and transformers write them.

    X.weight                       uint8 [N K / 2, 1], two numbers a byte
    X.weight.absmax                uint8 [N K / 64], a scale for each block of 64 numbers
    X.weight.nested_absmax         fp32, a scale for each 256 scales
    X.weight.quant_map             fp32 [16], the levels of numbers
    X.weight.nested_quant_map      fp32 [256], the levels of scales
    X.weight.quant_state.bitsandbytes__nf4    uint8, JSON: shape, sizes of blocks, ...

of X.weight [N, K], see core/four_bits.py."""

import json
from collections.abc import Callable
from typing import NamedTuple

import torch

from llm_demo.core.errors import UserError
from llm_demo.core.four_bits import BLOCK, GROUP, can_store, library, pack, scales_of

STATE = ".quant_state.bitsandbytes__"
PARTS = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")


class Stored(NamedTuple):
    """A weight in 4 bits."""

    shape: tuple[int, int]
    offset: float  # added to all scales


def parts_of(name: str) -> tuple[str, ...]:
    """The tensors that a weight in 4 bits has beside it."""
    return *(name + part for part in PARTS), f"{name}{STATE}nf4"


def four_bits_of(sizes: dict[str, tuple], read: Callable, folder) -> dict[str, Stored]:
    """{weight: Stored} of files. sizes: {name: shape} of all tensors; read(name) -> one. Raises
    UserError naming a tensor that is missing or has another size than implied."""
    found = {}
    for state in sorted(name for name in sizes if STATE in name):
        name, _, kind = state.partition(STATE)
        try:
            facts = json.loads(bytes(read(state).tolist()))
            shape, offset = tuple(facts["shape"]), float(facts["nested_offset"])
            how = facts["quant_type"], facts["blocksize"], facts["nested_blocksize"]
            N, K = shape
            counts = N * K // 2, N * K // BLOCK, scales_of(*shape), 16, 256
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise UserError(f"{folder}: {state} is not readable ({e!r})") from None
        if how != ("nf4", BLOCK, GROUP) or not can_store(*shape):
            raise UserError(
                f"{folder}: {name} of shape {list(shape)} is in {how[0]} by blocks of {how[1]} and "
                f"{how[2]}; read is nf4 by blocks of {BLOCK} and {GROUP}, rows of whole blocks"
            )
        for part, count in zip(("", *PARTS), counts, strict=True):
            if name + part not in sizes:
                raise UserError(f"{folder}: {name} is in 4 bits, but {name}{part} is missing")
            size = sizes[name + part]
            if torch.Size(size).numel() != count:
                raise UserError(
                    f"{folder}: {name}{part} has shape {list(size)}, but {name} of shape "
                    f"{list(shape)} has {count:,} of them"
                )
        for part, levels in zip(PARTS[2:], _levels(), strict=True):
            if not torch.allclose(read(name + part), levels, atol=1e-6):
                raise UserError(f"{folder}: {name}{part} has other levels than bitsandbytes'")
        found[name] = Stored(shape, offset)
    return found


def _levels() -> tuple[torch.Tensor, torch.Tensor]:
    """Of numbers and of scales."""
    need_library()
    return library().get_4bit_type("nf4", "cpu"), library().create_dynamic_map()


def packed(stored: Stored, name: str, read: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    """(the bytes of a weight, its scales) as of core.four_bits."""
    offset = torch.tensor([stored.offset])
    scales = torch.cat([read(f"{name}.nested_absmax").flatten().float(), offset])
    return pack(read(name), read(f"{name}.absmax"), stored.shape), scales


def need_library() -> None:
    """Raise UserError without bitsandbytes."""
    try:
        library()
    except ImportError:
        raise UserError(
            "weights in 4 bits need bitsandbytes, which is not installed: pip install bitsandbytes"
        ) from None
