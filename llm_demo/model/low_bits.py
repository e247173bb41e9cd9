"""Weights in 8 and 4 bits in files, as they are published.

fp8, a byte a number, of X.weight [N, K] in e4m3: a value is its number times its scale.

    X.weight_scale_inv  fp32 [ceil(N / 128), ceil(K / 128)], a scale for 128 x 128 numbers

This is DeepSeek-V3's format (https://huggingface.co/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md;
Qwen3's releases have scales in bf16).

4 bits, as bitsandbytes and transformers write them, see options/four_bits.py:

    X.weight                       uint8 [N K / 2, 1], two numbers a byte
    X.weight.absmax                uint8 [N K / 64], a scale for each block of 64 numbers
    X.weight.nested_absmax         fp32, a scale for each 256 scales
    X.weight.quant_map             fp32 [16], the levels of numbers
    X.weight.nested_quant_map      fp32 [256], the levels of scales
    X.weight.quant_state.bitsandbytes__nf4    uint8, JSON: shape, sizes of blocks, ..."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from llm_demo.core.decoder import fused
from llm_demo.core.errors import UserError
from llm_demo.machine.text import blame

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = torch.finfo(E4M3).max  # 448
SAFETENSORS_E4M3 = "F8_E4M3"  # safetensors' name of it
BLOCK = 128  # rows and columns of fp8 that share a scale
SCALES = "_scale_inv"  # after a weight's name
# `quantization_config` of exports in fp8, as published
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
# of a `quantization_config`, what is read
READ = (
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
)
# Of a block, what is quantised: all linear layers but routers and gates.
LINEAR = re.compile(r"model\.layers\.\d+\..+_proj(_with_mqa)?\.weight")
# Servers compute these as one layer, and refuse one whose parts differ in dtype.
TOGETHER = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "q_a_proj": "qkv_a",
    "kv_a_proj_with_mqa": "qkv_a",
}


def problems_of_quantization(quantization: dict) -> Iterator[str]:
    """Why weights with this `quantization_config` can't be read, if so."""
    given = {"fmt": "e4m3"} | quantization
    for known in READ:
        if all(given.get(key) == value for key, value in known.items()):
            return
    yield (
        f"its weights are quantized in a way that is not read ({str(quantization)[:160]}): give a "
        f"copy in bf16, in fp8 with blocks of {BLOCK} x {BLOCK}, or under adapters in "
        "bitsandbytes' NF4 with double quantization"
    )


def grid(shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales of a weight; the last ones may be of fewer rows or columns."""
    return tuple(-(-n // BLOCK) for n in shape)


def scales_of(fp8: list[str], shapes: dict[str, tuple], folder: Path) -> dict[str, str]:
    """{weight: name of its scales} of the weights in fp8. shapes: {name: shape} of all tensors of
    the files. Raises UserError naming a tensor without scales of its shape."""
    found = {}
    for name in fp8:
        shape = shapes[name]
        scales = name + SCALES
        if scales not in shapes:
            raise UserError(f"{folder}: {name} is in fp8, but {scales} is missing")
        if shapes[scales] != grid(shape):
            raise UserError(
                f"{folder}: {scales} has shape {list(shapes[scales])}, but {name} of shape "
                f"{list(shape)} has scales of shape {list(grid(shape))}"
            )
        found[name] = scales
    return found


def dequantised(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    part: tuple[slice, ...],
    shape: tuple[int, int],
) -> torch.Tensor:
    """fp32 values of the part of a weight that these slices select: its e4m3 numbers times scales.
    shape, scales: of the whole weight."""
    spans = (*part, slice(None))[:2]
    for dim, span in enumerate(spans):
        scales = scales.index_select(dim, torch.arange(shape[dim])[span] // BLOCK)
    return numbers.float().mul_(scales.float())


def to_quantise(shapes: dict[str, tuple]) -> set[str]:
    """The weights to write in fp8: those that blocks divide, since transformers 5.23 refuses the
    others, or reads them wrongly. shapes: {name: shape} of the files."""
    linear = {name: shape for name, shape in shapes.items() if LINEAR.fullmatch(name)}
    kept = {_layer(name) for name, shape in linear.items() if any(n % BLOCK for n in shape)}
    return {name for name in linear if _layer(name) not in kept}


def _layer(name: str) -> str:
    """The layer of a server that a weight is part of."""
    module, _, kind = name.removesuffix(".weight").rpartition(".")
    return f"{module}.{TOGETHER.get(kind, kind)}"


def fp8_config(shapes: dict[str, tuple], more: Iterable[str] = (), inside: str = "model.") -> dict:
    """The `quantization_config` of files with these {name: shape}: with the modules of blocks that
    are not in fp8, if any. more: weights beside the text. inside: how the text's names begin in the
    whole model. Raises UserError if nothing is in fp8."""
    names = to_quantise(shapes)
    if not names:
        raise UserError(
            f"--dtype fp8: blocks of {BLOCK} x {BLOCK} divide no layer of this model: use bf16"
        )
    left = {}  # modules, in the order of the files
    for name, shape in shapes.items():
        matrix = len(shape) == 2 or fused(name)
        if name.startswith("model.layers") and matrix and name not in names:
            module = re.sub(r"(\.experts)\..+", r"\1", name.removesuffix(".weight"))
            left[inside + module.removeprefix("model.")] = None
    left |= dict.fromkeys(name.removesuffix(".weight") for name in more)
    if not left:
        return FP8
    return FP8 | {"modules_to_not_convert": ["lm_head", *left]}


def laid_out(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What files hold of {name: tensor}, all without memory: some in fp8, each with its scales."""
    names = to_quantise({name: t.shape for name, t in tensors.items()})
    found = {}
    for name, t in tensors.items():
        if name in names:
            found[name] = t.to(E4M3)
            found[name + SCALES] = torch.empty(grid(t.shape), device="meta")
        else:
            found[name] = t
    return found


def quantised_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 numbers, fp32 scales) of a matrix in fp32, which blocks divide. A scale is the largest
    absolute value / 448, so that this becomes 448; of zeros it is 1.

    Values that were read get the numbers and scales that they were read from. In fp32, 448 x s is
    rounded, so the largest value / 448 may be the neighbour of s; then s restores all values."""
    w = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = w.abs().amax((1, 3), keepdim=True) / LARGEST_E4M3
    scales = torch.where(scales > 0, scales, 1.0)
    for to in (torch.inf, 0.0):
        other = scales.nextafter(torch.tensor(to))
        scales = torch.where(_restores(w, other) & ~_restores(w, scales), other, scales)
    return _numbers(w, scales).view(weight.shape), scales[:, 0, :, 0]


def _numbers(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Clamped, since a rounded scale may be small: earlier versions of PyTorch make NaN of 465."""
    return (w / scales).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)


def _restores(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Which blocks of w [n, rows, k, columns] are numbers times these scales: [n, 1, k, 1]."""
    return (_numbers(w, scales).float().mul_(scales) == w).all(3, True).all(1, True)


# ---------------------------------------------------------------- 4 bits

STATE = ".quant_state.bitsandbytes__"
PARTS_OF_4_BITS = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")
BESIDE = (*PARTS_OF_4_BITS, f"{STATE}nf4")  # what a weight in 4 bits has beside it


class Stored(NamedTuple):
    """A weight in 4 bits."""

    shape: tuple[int, int]
    offset: float  # added to all scales


def four_bits_of(
    names: Iterable[str], read: Callable[[str], torch.Tensor], folder: Path
) -> dict[str, Stored]:
    """{weight: Stored} of files. names: of all tensors; read(name) -> one. Raises UserError for
    what is not read."""
    found = {}
    for state in sorted(name for name in names if STATE in name):
        name = state.partition(STATE)[0]
        with blame(f"{folder}: {state}"):
            if fused(name):
                raise ValueError("experts in 4 bits are read from a matrix for each of them")
            found[name] = _stored(state, read)
    return found


def _stored(state: str, read: Callable[[str], torch.Tensor]) -> Stored:
    """What a weight's state says. Raises ValueError for what is not read, and what libraries
    raise."""
    facts = json.loads(bytes(read(state).tolist()))
    kind = [facts[key] for key in ("quant_type", "blocksize", "nested_blocksize")]
    from llm_demo.options import four_bits

    if kind != ["nf4", four_bits.BLOCK, four_bits.GROUP] or not state.endswith("nf4"):
        raise ValueError(f"{kind}: only nf4 by blocks of {four_bits.BLOCK} and {four_bits.GROUP}")
    rows, columns = map(int, facts["shape"])
    if columns % four_bits.BLOCK:
        raise ValueError(f"shape {[rows, columns]}: only rows of whole blocks")
    return Stored((rows, columns), float(facts["nested_offset"]))


def packed(
    stored: Stored, name: str, read: Callable[[str], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes of a weight, its scales) for options.four_bits. Raises UserError if one is not
    finite, or a tensor has not as many elements as the weight's shape implies."""
    from llm_demo.options import four_bits
    from llm_demo.options.four_bits_library import pack

    N, K = stored.shape
    with blame(f"{name} of shape {[N, K]} in 4 bits"):
        group, *levels = (read(name + part).flatten() for part in PARTS_OF_4_BITS[1:])
        scales = torch.cat([group, torch.tensor([stored.offset]), *levels])
        if len(scales) != four_bits.scales_of(N, K) + four_bits.TABLES:
            raise ValueError(f"it has {len(scales):,} scales of scales and levels")
        if not scales.isfinite().all():
            raise ValueError("its scales are not finite (NaN or infinity): give another copy")
        numbers = read(name).reshape(N, K // 2)
        absmax = read(f"{name}.absmax").reshape(N, K // four_bits.BLOCK)
    return pack(numbers, absmax, stored.shape), scales
