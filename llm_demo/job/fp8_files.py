"""fp8 in files: matrices of one byte a number, with scales, as they are published.

    blocks  X.weight_scale_inv  fp32 [ceil(N / 128), ceil(K / 128)], a scale for 128 x 128 numbers
    rows    X.weight_scale      bf16 [N, 1], a scale for each row

of X.weight [N, K], in e4m3: a value is its number times its scale. Blocks are DeepSeek-V3's format
(https://huggingface.co/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md; Qwen3's releases have scales in
bf16), rows are compressed-tensors' (https://github.com/vllm-project/compressed-tensors)."""

import re

import torch

from llm_demo.core.errors import UserError

E4M3, LARGEST = torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max  # 448
KIND = "F8_E4M3"  # safetensors' name of it
BLOCK = 128  # rows and columns
SCALES = {"blocks": "_scale_inv", "rows": "_scale"}  # after a weight's name
FORMATS = {"fp8": "blocks", "fp8_rows": "rows"}  # of --dtype
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
    except (AttributeError, KeyError, TypeError):  # of another form
        pass
    if kinds in ({(BLOCK, BLOCK)}, {("float", 8, "channel")}):
        return None
    return (
        f"its weights are quantized in a way that is not read (quant_method {str(method)[:80]}): "
        f"give a copy in bf16, in fp8 with blocks of {BLOCK} x {BLOCK}, or in compressed-tensors' "
        "fp8 with a scale for each row"
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


def touched(way: str, part: tuple[slice, ...], shape: tuple[int, int]) -> tuple[slice, slice]:
    """The slices of a weight's scales that the part needs which these slices of its dimensions
    select: where it ends within a block, that block's too. shape: of the whole weight."""
    return tuple(
        slice(span.start // size, -(-span.stop // size)) for span, size in _spans(way, part, shape)
    )


def dequantised(numbers: torch.Tensor, scales: torch.Tensor, way: str, part, shape) -> torch.Tensor:
    """fp32 values of a part of a weight: its e4m3 numbers times the `touched` scales."""
    for dim, (span, size) in enumerate(_spans(way, part, shape)):
        index = torch.arange(span.start, span.stop) // size - span.start // size
        scales = scales.index_select(dim, index)
    return numbers.float().mul_(scales.float())


def _spans(way: str, part: tuple[slice, ...], shape: tuple[int, int]) -> list[tuple[range, int]]:
    """(its indices, how many share a scale) of each dimension of a part."""
    ranges = [range(n)[s] for n, s in zip(shape, (*part, slice(None))[:2], strict=True)]
    return list(zip(ranges, size_of(way, shape), strict=True))
