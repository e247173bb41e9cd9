"""The names of experts in Hugging Face's files: a tensor for each matrix of each expert there, all
experts of a block fused in memory.

    in memory                               in the files, for each expert e
    ….mlp.experts.gate_up_proj [E, 2I, H]   ….mlp.experts.e.gate_proj.weight [I, H], then up_proj
    ….mlp.experts.down_proj    [E, H, I]    ….mlp.experts.e.down_proj.weight [H, I]

All other tensors have one name."""

import re
from typing import NamedTuple

from llm_demo.core.experts import FUSED, fused

EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class Matrix(NamedTuple):
    """A tensor of the files, and where it lies in the fused one."""

    name: str
    expert: int
    rows: slice
    shape: tuple[int, int]


def matrices(name: str, shape: tuple) -> list[Matrix]:
    """What a fused parameter of this shape consists of; [] for any other."""
    if not fused(name):
        return []
    experts, _, kind = name.rpartition(".")
    size = shape[1] // len(FUSED[kind])
    return [
        Matrix(f"{experts}.{e}.{matrix}.weight", e, slice(at, at + size), (size, shape[2]))
        for e in range(shape[0])
        for at, matrix in zip((0, size), FUSED[kind], strict=False)
    ]


def in_memory(found: dict[str, tuple]) -> dict[str, tuple]:
    """{parameter: shape} for the {name: shape} of files."""
    shapes = {}
    for name, shape in found.items():
        if match := EXPERT.fullmatch(name):
            experts, expert, kind = match.groups()
            kind, parts = ("down_proj", 1) if kind == "down" else ("gate_up_proj", 2)
            name = f"{experts}.{kind}"
            n = max(int(expert) + 1, *shapes.get(name, (0,))[:1])
            shape = n, *(parts * size for size in shape[:1]), *shape[1:]
        shapes[name] = shape
    return shapes


def in_files(wanted: dict[str, tuple], fused: set[str]) -> dict[str, tuple]:
    """{name: shape} in the files for a model's {parameter: shape}. fused: names that are in them as
    they are in memory."""
    names = {}
    for name, shape in wanted.items():
        parts = [] if name in fused else matrices(name, shape)
        names |= {part.name: part.shape for part in parts} or {name: shape}
    return names
