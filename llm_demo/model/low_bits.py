"""Weights in 8 and 4 bits in files, as they are published.

fp8, a byte a number, of X.weight [N, K] in e4m3: a value is its number times its scale.

    blocks  X.weight_scale_inv  fp32 [ceil(N / 128), ceil(K / 128)], a scale for 128 x 128 numbers
    rows    X.weight_scale      bf16 [N, 1], a scale for each row

Blocks are DeepSeek-V3's format (https://huggingface.co/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md;
Qwen3's releases have scales in bf16), rows are compressed-tensors'
(https://github.com/vllm-project/compressed-tensors).

4 bits, as bitsandbytes and transformers write them, see core/four_bits.py:

    X.weight                       uint8 [N K / 2, 1], two numbers a byte
    X.weight.absmax                uint8 [N K / 64], a scale for each block of 64 numbers
    X.weight.nested_absmax         fp32, a scale for each 256 scales
    X.weight.quant_map             fp32 [16], the levels of numbers
    X.weight.nested_quant_map      fp32 [256], the levels of scales
    X.weight.quant_state.bitsandbytes__nf4    uint8, JSON: shape, sizes of blocks, ..."""

import functools
import json
import logging
import platform
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

import torch
import torch.nn.functional as F

from llm_demo.core import four_bits
from llm_demo.core.errors import UserError

E4M3, LARGEST = torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max  # 448
KIND = "F8_E4M3"  # safetensors' name of it
BLOCK = 128  # rows and columns of fp8
SCALES = {"blocks": "_scale_inv", "rows": "_scale"}  # after a weight's name
DTYPES = {"blocks": torch.float32, "rows": torch.bfloat16}  # of scales that are written
FORMATS = {"fp8": "blocks", "fp8_rows": "rows"}  # of --dtype
# of a `quantization_config` of bitsandbytes, see below
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
# Of a block, what is quantised: all linear layers but routers and gates.
LINEAR = re.compile(r"model\.layers\.\d+\..+_proj(_with_mqa)?\.weight")
# Servers compute these as one layer, and refuse one whose parts differ in dtype.
TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv",
            "q_a_proj": "qkv_a", "kv_a_proj_with_mqa": "qkv_a"}  # fmt: skip


def why_unread(quantization) -> str | None:
    """Why weights with this `quantization_config` can't be read, if so. None: they have none."""
    if not quantization:
        return None
    method, kinds = quantization, None
    try:
        method = quantization.get("quant_method")
        if method == "compressed-tensors" and quantization["format"] == "float-quantized":
            parts = [group["weights"] for group in quantization["config_groups"].values()]
            kinds = {(part["type"], part["num_bits"], part["strategy"]) for part in parts}
        elif method == "fp8" and quantization.get("fmt", "e4m3") == "e4m3":
            kinds = {tuple(quantization["weight_block_size"])}
        elif method == "bitsandbytes":
            others = {k: quantization.get(k) for k, v in NF4.items() if quantization.get(k) != v}
            if not others:
                return None
            method = f"bitsandbytes with {', '.join(f'{k} {v}' for k, v in others.items())}"
    except (AttributeError, KeyError, TypeError):  # of another form
        pass
    if kinds in ({(BLOCK, BLOCK)}, {("float", 8, "channel")}):
        return None
    return (
        f"its weights are quantized in a way that is not read (quant_method {str(method)[:160]}): "
        f"give a copy in bf16, in fp8 with blocks of {BLOCK} x {BLOCK}, in compressed-tensors' fp8 "
        "with a scale for each row, or under adapters in bitsandbytes' NF4 with double quantization"
    )


def weight_of(name: str) -> str:
    """The name of the weight that a tensor of the files belongs to, its scales or itself."""
    return name.removesuffix("_scale_inv").removesuffix("_scale")


def size_of(way: str, shape: tuple[int, int]) -> tuple[int, int]:
    """The rows and columns that share a scale. way: of SCALES; shape: of the weight."""
    return (BLOCK, BLOCK) if way == "blocks" else (1, max(1, shape[1]))


def grid(way: str, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales of a weight; the last ones may be of fewer rows or columns."""
    return tuple(-(-n // size) for n, size in zip(shape, size_of(way, shape), strict=True))


def scales_of(fp8: list[str], shapes: dict[str, tuple], folder) -> dict[str, tuple[str, str]]:
    """{weight: (name of its scales, way)} of the weights in fp8. shapes: {name: shape} of all
    tensors of the files. Raises UserError naming a tensor without scales of its shape."""
    found = {}
    for name in fp8:
        shape = shapes[name]
        if len(shape) != 2:
            raise UserError(f"{folder}: {name} is in fp8, but of shape {list(shape)}, no matrix")
        way = next((way for way, end in SCALES.items() if name + end in shapes), None)
        if not way:
            raise UserError(
                f"{folder}: {name} is in fp8, but {name}_scale_inv (or {name}_scale) is missing"
            )
        scales, wanted = name + SCALES[way], grid(way, shape)
        if shapes[scales] != wanted:
            raise UserError(
                f"{folder}: {scales} has shape {list(shapes[scales])}, but {name} of shape "
                f"{list(shape)} has scales of shape {list(wanted)}"
            )
        found[name] = scales, way
    return found


def dequantised(numbers: torch.Tensor, scales: torch.Tensor, way: str, part, shape) -> torch.Tensor:
    """fp32 values of the part of a weight that these slices select: its e4m3 numbers times scales.
    shape, scales: of the whole weight."""
    spans = (*part, slice(None))[:2]
    for dim, (size, span) in enumerate(zip(size_of(way, shape), spans, strict=True)):
        scales = scales.index_select(dim, torch.arange(shape[dim])[span] // size)
    return numbers.float().mul_(scales.float())


def chosen(shapes: dict[str, tuple], way: str) -> set[str]:
    """The weights to write in fp8. Blocks: those that they divide, since transformers 5.23 refuses
    the others, or reads them wrongly. shapes: {name: shape} of the files."""
    linear = {name: shape for name, shape in shapes.items() if LINEAR.fullmatch(name)}
    if way == "rows":
        return set(linear)
    kept = {_layer(name) for name, shape in linear.items() if any(n % BLOCK for n in shape)}
    return {name for name in linear if _layer(name) not in kept}


def _layer(name: str) -> str:
    """The layer of a server that a weight is part of."""
    module, _, kind = name.removesuffix(".weight").rpartition(".")
    return f"{module}.{TOGETHER.get(kind, kind)}"


def configuration(way: str, shapes: dict[str, tuple]) -> dict:
    """The `quantization_config` of files with these {name: shape}, as published: with the modules
    of blocks that are not in fp8, if any. What they are multiplied with is quantised by servers.
    Raises UserError if nothing is in fp8."""
    names = chosen(shapes, way)
    if not names:
        raise UserError(
            f"--dtype fp8: blocks of {BLOCK} x {BLOCK} divide no layer of this model: use fp8_rows"
        )
    matrices = {n for n, s in shapes.items() if len(s) == 2 and n.startswith("model.layers")}
    left = [n.removesuffix(".weight") for n in shapes if n in matrices - names]
    left = list(dict.fromkeys(re.sub(r"(\.experts)\.\d+\..+", r"\1", n) for n in left))
    if way == "blocks":
        blocks = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                  "weight_block_size": [BLOCK, BLOCK]}  # fmt: skip
        return blocks | ({"modules_to_not_convert": ["lm_head", *left]} if left else {})
    e4m3 = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = e4m3 | {"strategy": "token", "dynamic": True}
    weights = e4m3 | {"strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "quantization_status": "compressed", "config_groups": {"group_0": group},
        "ignore": ["lm_head", *left],
    }  # fmt: skip


def laid_out(tensors: dict[str, torch.Tensor], way: str) -> dict[str, torch.Tensor]:
    """What files hold of {name: tensor}, all without memory: some in fp8, each with its scales."""
    names, found = chosen({name: t.shape for name, t in tensors.items()}, way), {}
    for name, t in tensors.items():
        found[name] = t.to(E4M3) if name in names else t
        if name in names:
            size = grid(way, t.shape)
            found[name + SCALES[way]] = torch.empty(size, dtype=DTYPES[way], device="meta")
    return found


def as_stored(name: str, values: torch.Tensor, kinds: dict, way: str | None) -> dict:
    """{name: copy} of what a file holds of a weight. kinds: {name: dtype} there; way: of fp8."""
    found, scales = {name: values}, name + SCALES.get(way, "")
    if way and (kinds.get(name) == E4M3 or scales in kinds):
        found = dict(zip((name, scales), quantised(values, way), strict=True))
    return {n: t.to(kinds[n], copy=True) for n, t in found.items() if n in kinds}


def quantised(weight: torch.Tensor, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 numbers, scales) of a matrix in fp32, which blocks divide. A scale is the largest
    absolute value / 448, so that this becomes 448; of zeros it is 1.

    Values that were read get the numbers and scales that they were read from. In fp32, 448 x s is
    rounded, so the largest value / 448 may be the neighbour of s; then s restores all values."""
    rows, columns = size_of(way, weight.shape)
    w = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = w.abs().amax((1, 3), keepdim=True) / LARGEST
    scales = scales.to(DTYPES[way]).float()
    scales = torch.where(scales > 0, scales, 1.0)
    if way == "blocks":
        for to in (torch.inf, 0.0):
            other = scales.nextafter(torch.tensor(to))
            scales = torch.where(_restores(w, other) & ~_restores(w, scales), other, scales)
    return _numbers(w, scales).view(weight.shape), scales[:, 0, :, 0].to(DTYPES[way])


def _numbers(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Clamped, since a rounded scale may be small: earlier versions of PyTorch make NaN of 465."""
    return (w / scales).clamp_(-LARGEST, LARGEST).to(E4M3)


def _restores(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Which blocks of w [n, rows, k, columns] are numbers times these scales: [n, 1, k, 1]."""
    return (_numbers(w, scales).float().mul_(scales) == w).all(3, True).all(1, True)


# ---------------------------------------------------------------- 4 bits

STATE = ".quant_state.bitsandbytes__"
PARTS = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")
BESIDE = (*PARTS, f"{STATE}nf4")  # what a weight in 4 bits has beside it


class Stored(NamedTuple):
    """A weight in 4 bits."""

    shape: tuple[int, int]
    offset: float  # added to all scales


def four_bits_of(sizes: dict[str, tuple], kinds: dict, read: Callable, folder) -> dict[str, Stored]:
    """{weight: Stored} of files. sizes, kinds: {name: shape, type} of all tensors; read(name) ->
    one. Raises UserError naming a tensor that is missing or is not as its weight implies."""
    found, of = {}, ("U8", "U8", "F32", "F32", "F32")  # types of a weight and its parts
    for state in sorted(name for name in sizes if STATE in name):
        name = state.partition(STATE)[0]
        N, K, offset = _facts(state, read, folder)
        counts = N * K // 2, N * K // four_bits.BLOCK, four_bits.scales_of(N, K)
        counts += four_bits.NUMBERS, four_bits.SCALES
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
    sizes = 0 < N < 2**31 and 0 < K < 2**31 and K % four_bits.BLOCK == 0
    if not (sizes and state.endswith("nf4") and how == ["nf4", four_bits.BLOCK, four_bits.GROUP]):
        raise UserError(
            f"{folder}: {state.partition(STATE)[0]} is in {str(how)[:80]}, of shape "
            f"{str(facts['shape'])[:80]}: only nf4 by blocks of {four_bits.BLOCK} and "
            f"{four_bits.GROUP} is read, of rows of whole blocks"
        )
    return N, K, offset


def packed(stored: Stored, name: str, read: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes of a weight, its scales) for core.four_bits. Raises UserError if one is not finite."""
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
    return F.pad(torch.cat(rows, 1), (0, four_bits.row_bytes(shape[1]) - used))


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
        gone = isinstance(e, ImportError) and e.name in ("bitsandbytes", "bitsandbytes.functional")
        problem = "is not installed" if gone else f"does not work ({repr(e)[:200]})"
        raise UserError(
            f"weights in 4 bits need bitsandbytes, which {problem} on {platform.node()}: "
            f"pip install {'-U ' * (not gone)}bitsandbytes"
        ) from e
