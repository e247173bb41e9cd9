"""Weights in files: a folder's safetensors, read in part, and adapters, with what they belong to.

Hugging Face's files have a tensor for each matrix of each expert. In memory, and in the files of
Qwen3.5 and Gemma 4 as published, all experts of a block are fused. All other tensors have one name.

    in memory                               in the files, for each expert e
    ….mlp.experts.gate_up_proj [E, 2I, H]   ….mlp.experts.e.gate_proj.weight [I, H], then up_proj
    ….mlp.experts.down_proj    [E, H, I]    ….mlp.experts.e.down_proj.weight [H, I]"""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from llm_demo.core.decoder import FUSED, fused
from llm_demo.core.errors import UserError
from llm_demo.machine.files import hash_of
from llm_demo.machine.process import read_json, regular
from llm_demo.machine.text import blame, differences, progress
from llm_demo.model.families import OTHER_PARTS, TEXT_NAMES, family_in
from llm_demo.model.local_model import refuse_deepspeed

SAMPLE = 4096  # bytes at the beginning, the middle and the end of a tensor
EXTRA = "eh_proj.weight"  # only layers of multi-token prediction have it
ROTARY = "rotary_emb.inv_freq"  # config.json implies these
# by safetensors' names
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's matrices of experts
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


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


def in_memory(files: dict[str, tuple]) -> dict[str, tuple]:
    """{parameter: shape} for the {name: shape} of files."""
    shapes, experts = {}, {}
    for name, shape in files.items():
        match = EXPERT.fullmatch(name)
        if not match:
            shapes[name] = shape
            continue
        block, expert, kind = match.groups()
        parts = 1 if kind == "down" else 2
        name = f"{block}.down_proj" if kind == "down" else f"{block}.gate_up_proj"
        experts[name] = max(experts.get(name, 0), int(expert) + 1)
        rows = [parts * size for size in shape[:1]]
        shapes[name] = (experts[name], *rows, *shape[1:])
    return shapes


def fused_in_files(name: str) -> bool:
    """Whether files have a parameter of experts as it is in memory. Those of Gemma 4 do."""
    return fused(name) and ".mlp." not in name


def as_in_files(name: str, t: torch.Tensor) -> dict[str, torch.Tensor]:
    """{name in the files: view} of all that a parameter consists of."""
    return {name: t} if fused_in_files(name) else by_matrix(name, t)


def by_matrix(name: str, t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same of files with a tensor for each matrix of each expert."""
    return {m.name: t[m.expert, m.rows] for m in matrices(name, t.shape)} or {name: t}


def in_files(wanted: dict[str, tuple], as_they_are: Iterable[str] = ()) -> dict[str, tuple]:
    """{name: shape} in the files for a model's {parameter: shape}. as_they_are: names
    that are in them as they are in memory."""
    names = {}
    for name, shape in wanted.items():
        whole = name in as_they_are or fused_in_files(name)
        parts = [] if whole else matrices(name, shape)
        names |= {part.name: part.shape for part in parts} or {name: shape}
    return names


@contextlib.contextmanager
def open_file(file: Path):
    with blame(file, OSError, SafetensorError), safe_open(regular(file), "pt") as opened:
        yield opened


def text_name(name: str) -> str:
    """What a tensor of a model with images is called in a model of its text alone."""
    for begin, ours in TEXT_NAMES.items():
        if name.startswith(begin):
            return ours + name.removeprefix(begin)
    return name


class Names:
    """What tensors of a family are called in files, where transformers' modules have other names.
    Source: its own table, transformers.conversion_mapping. family: as of family_in."""

    def __init__(self, family: str | None):
        transforms = get_checkpoint_conversion_mapping(family) or []
        self.of_ours = [t for t in transforms if type(t) is WeightRenaming]
        self.of_files = [t.reverse_transform() for t in reversed(self.of_ours)]
        sources = [pattern for t in transforms for pattern in t.source_patterns]
        self.numbered = any("experts.*.w1" in pattern for pattern in sources)

    def ours(self, name: str) -> str:
        """The name in the model of a tensor of the files."""
        name = text_name(name)
        for transform in self.of_ours:
            name, _ = transform.rename_source_key(name)
        if self.numbered:
            for number, matrix in NUMBERED.items():
                name = re.sub(rf"(\.experts\.\d+\.){number}\.", rf"\1{matrix}.", name)
        return name

    def in_files(self, name: str) -> str:
        """The name in the files of a tensor of the model."""
        if self.numbered:
            for number, matrix in NUMBERED.items():
                name = re.sub(rf"(\.experts\.\d+\.){matrix}\.", rf"\1{number}.", name)
        for transform in self.of_files:
            name, _ = transform.rename_source_key(name)
        return name


class Weights:
    """A folder's safetensors: names and shapes of the model's parameters, and any of them or part
    of one on demand. Fused experts are read from a tensor for each, or fused. Values in fp8 are
    multiplied by their scales, which are in `scales` and are no parameters. family: as of Names.

    Files are mapped for one read at a time: pages count as this process's memory while they are
    mapped, and a rank should hold no more of a file than it keeps."""

    def __init__(self, folder: Path, files: dict[str, Path], family: str | None = None):
        names_of = Names(family)
        self.folder = folder
        self.names = {}  # in the files
        self.files = {}
        for name, file in files.items():
            ours = names_of.ours(name)
            if ours in self.names:
                other = self.names[ours]
                raise UserError(f"{folder}: {name} and {other} are the same weight; remove one")
            self.names[ours], self.files[ours] = name, file
        # what training doesn't use: layers that predict further tokens (DeepSeek), a vision tower,
        # the rotary frequencies of old files
        extra = [n.removesuffix(EXTRA) for n in self.files if n.endswith(f".{EXTRA}")]
        unused = (*OTHER_PARTS, *extra)
        self.ignored = [n for n in self.files if n.startswith(unused) or n.endswith(ROTARY)]
        self.renamed = any(ours != name for ours, name in self.names.items())
        self.untrained = {}  # of what exports keep: {name in the files: file}
        for name in self.ignored:
            file = self.files.pop(name)
            if name.startswith(unused):
                self.untrained[self.names[name]] = file
        self.bar = None  # advanced by the bytes read
        self.stored, self.kinds = {}, {}
        for file in sorted(set(self.files.values())):
            with open_file(file) as opened:
                for name in self._names_in(file):
                    tensor = opened.get_slice(self.names[name])
                    self.stored[name] = tuple(tensor.get_shape())
                    self.kinds[name] = tensor.get_dtype()
        self.bytes = sum(file.stat().st_size for file in set(self.files.values()))
        self.scales, self.packed = {}, {}
        if not set(FLOATS).issuperset(self.kinds.values()):
            self._find_low_bits(folder)
        plain = {*self.stored, *self.scales.values()} - {*self.scales, *self.packed}
        for name in sorted(plain):
            if self.kinds[name] not in FLOATS:
                raise UserError(
                    f"{self.files[name]}: {name} is of type {self.kinds[name]}, not one of "
                    f"{', '.join(FLOATS)}: give a copy of the model in bf16"
                )
        self.shapes = in_memory(self.stored)

    def _find_low_bits(self, folder: Path) -> None:
        """Weights in fp8, with the names of their scales, and in 4 bits."""
        from llm_demo.model import low_bits

        fp8 = [name for name, kind in self.kinds.items() if kind == low_bits.SAFETENSORS_E4M3]
        self.scales = low_bits.scales_of(fp8, self.stored, folder)
        for scales in self.scales.values():
            del self.stored[scales]
        with self._reader() as read:
            self.packed = low_bits.four_bits_of(self.stored, read, folder)
        for name, weight in self.packed.items():
            for part in low_bits.BESIDE:
                self.stored.pop(name + part, None)
            self.stored[name] = weight.shape

    def _names_in(self, file: Path) -> list[str]:
        return [name for name, place in self.files.items() if place == file]

    def check(
        self,
        wanted: dict[str, tuple],
        tied: Container[str] = (),
        implied_by: str = "config.json implies",
    ) -> None:
        """Raise UserError naming a tensor of the files that is missing, of another shape, or not in
        the model. wanted: {name: shape} of the model. tied: names that may be missing."""
        wanted = in_files(wanted, self.stored.keys())
        for name in sorted(wanted.keys() - self.stored.keys()):
            if name not in tied:
                raise UserError(f"{self.folder}: weight {name} is missing")
        for name, shape in sorted(self.stored.items()):
            if name not in wanted:
                raise UserError(f"{self.folder}: {name} is not a weight of this model")
            if shape != wanted.get(name, shape):
                raise UserError(
                    f"{self.folder}: {name} has shape {list(shape)}, but {implied_by} "
                    f"{list(wanted[name])}"
                )

    def digest(self) -> str:
        """A digest of the tensors' names, dtypes, shapes and of samples of their values, whichever
        files they are in. Reading all values would take minutes for a large model."""
        samples = {}
        for file in set(self.files.values()):
            with open_file(file) as opened:
                for name in self._names_in(file):
                    about = opened.get_slice(self.names[name])
                    values = opened.get_tensor(self.names[name])  # mapped
                    values = values.flatten().view(torch.uint8).numpy()
                    begins = 0, len(values) // 2, max(0, len(values) - SAMPLE)
                    sample = b"".join(values[at : at + SAMPLE].tobytes() for at in begins)
                    digest = hashlib.sha256(sample).hexdigest()
                    samples[name] = about.get_dtype(), about.get_shape(), digest
        return hash_of(samples)[:16]

    def read(self, name: str, part: tuple[slice, ...] = (slice(None),)) -> torch.Tensor:
        """A parameter, or the part that these slices of its dimensions select, in the file's dtype,
        or in fp32 if that is fp8 or 4 bits, on the CPU. Raises UserError."""
        with self._reader() as read:
            if name in self.files:
                return self._values(read, name, part)
            return self._fuse(read, name, part)

    def read_packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(the bytes of a weight in 4 bits, its scales), as options.four_bits has them. Of fused
        experts: [E, N, bytes] and [E, matrices, any]."""
        from llm_demo.model.low_bits import packed

        shape = self.shapes[name]
        with self._reader() as read:
            if name in self.packed:
                return packed(self.packed[name], name, read)
            with blame(f"{self.folder}: not all experts of {name} are in 4 bits"):
                of_each = [packed(self.packed[m.name], m.name, read) for m in matrices(name, shape)]
        rows, scales = map(torch.stack, zip(*of_each, strict=True))
        return rows.view(*shape[:2], -1), scales.unflatten(0, (shape[0], -1))

    def in_4_bits(self) -> dict[str, tuple]:
        """{name: shape} of the parameters that are so, of experts if one of their matrices is."""
        return in_memory({name: stored.shape for name, stored in self.packed.items()})

    @contextlib.contextmanager
    def _reader(self):
        """A function(name, part) that returns this part of a tensor of the files as it is. Each
        file is opened once, which takes ms if it has many tensors."""
        with contextlib.ExitStack() as stack:

            @functools.cache
            def opened(file: Path):
                return stack.enter_context(safe_open(regular(file), "pt"))

            def read(name: str, part: tuple[slice, ...] = (slice(None),)) -> torch.Tensor:
                file = self.files[name]
                with blame(file, OSError, SafetensorError):
                    stored = opened(file).get_slice(self.names[name])
                    values = stored[part[: len(stored.get_shape())]]  # a number has no slices
                if self.bar is not None:
                    self.bar.update(values.nbytes)
                return values

            yield read

    def _values(self, read: Callable, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """As `read`, of a tensor that is in the files."""
        if name in self.packed:
            from llm_demo.model.low_bits import packed
            from llm_demo.options.four_bits import values_of

            weight, scales = packed(self.packed[name], name, read)
            return values_of(weight, scales, self.packed[name].shape[1], torch.float32)[part]
        values = read(name, part)
        if name not in self.scales:
            return values
        from llm_demo.model.low_bits import dequantised

        scales = read(self.scales[name], (slice(None),))
        return dequantised(values, scales, part, self.stored[name])

    def _fuse(self, read: Callable, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """As `read`, of fused experts. Only the files of the selected experts are read."""
        experts = range(self.shapes[name][0])[part[0]]
        chosen = [m for m in matrices(name, self.shapes[name]) if m.expert in experts]
        dtype = torch.float32
        if chosen and all(self.kinds[m.name] in FLOATS for m in chosen):
            dtype = FLOATS[self.kinds[chosen[0].name]]
        values = torch.empty(len(experts), *self.shapes[name][1:], dtype=dtype)
        for m in chosen:
            values[m.expert - experts.start, m.rows] = self._values(read, m.name, (slice(None),))
        return values[(slice(None), *part[1:])]


def open_weights(folder: Path) -> Weights | None:
    """The folder's weights; None if it holds none. Raises UserError for other formats."""
    places, file, family = places_in(folder), folder / "config.json", None
    if places is None:
        return None
    if file.is_file():
        with blame(file):
            family = family_in(read_json(file))
    return Weights(folder, places, family)


def places_in(folder: Path) -> dict[str, Path] | None:
    """{name: file} of the folder's tensors; None if it holds none. Raises UserError for other
    formats."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if os.path.lexists(index):
        with blame(index):
            places = json.loads(regular(index).read_text("utf-8"))["weight_map"]
            away = [f for f in places.values() if f.startswith("/") or ".." in Path(f).parts]
            if away:
                raise ValueError(f"it names {away[0]}, which is not in its folder")
            return {name: folder / file for name, file in places.items()}
    if os.path.lexists(single):
        return names_in([single])
    refuse_deepspeed(folder)
    other = [*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.safetensors")]
    if other:
        raise UserError(
            f"{folder} holds {other[0].name}; weights must be model.safetensors (or shards with "
            "model.safetensors.index.json): save them again with save_pretrained"
        )
    return None


def weights_in(files: list[Path]) -> Weights:
    """The weights in all of these files of a folder."""
    return Weights(files[0].parent, names_in(files))


def names_in(files: list[Path]) -> dict[str, Path]:
    """{name: file} of the tensors in all of these files."""
    places = {}
    for file in files:
        with open_file(file) as opened:
            places |= dict.fromkeys(opened.keys(), file)
    return places


@contextlib.contextmanager
def loading(weights: Weights | None, shares: int):
    """Show the progress of reading one of `shares` equal shares."""
    if weights is None:
        yield
        return
    with progress(what="loading weights", total=weights.bytes / shares, unit="B") as weights.bar:
        yield


def fingerprint(config) -> str:
    """A digest of the model's configuration, wherever it was read from."""
    return hash_of({k: v for k, v in config.to_dict().items() if k != "_name_or_path"})[:12]


def identity_of(
    name: str, folder: Path, weights: Weights | None, seed: int = 0, device: str = ""
) -> dict:
    """What adapters belong to. name: of the model, as given. Random weights are known by their seed
    and by the device that draws them."""
    local = Path(os.path.expanduser(name)) == folder
    base = {"path": str(folder.absolute()) if local else name}
    if weights:
        return base | {"weights": weights.digest()}
    return base | {"weights": "random", "seed": seed, "drawn on": device}


QUANTISED = ("bits", "values")  # of an identity: how the weights were used


def base_digest(base: dict) -> str:
    """A digest of an identity, wherever its weights lie and in however many bits they were used."""
    return hash_of({k: v for k, v in base.items() if k not in QUANTISED} | {"path": ""})[:16]


def refuse_other_adapters(path: Path, before: dict | None, now: dict | None) -> None:
    """Raise UserError unless a run and its checkpoint train the same adapters, or none. before: of
    the checkpoint, now: of the run; both are what `Lora.facts` returns."""
    if before and not now:
        raise UserError(
            f"{path} holds adapters: resume with fsdp/train_fsdp.py or fsdp_pp/train_fsdp_pp.py "
            f"and --lora_rank {before['rank']}, or export it with --merge and train that"
        )
    if now and not before:
        raise UserError(
            f"{path} holds a whole model, no adapters: drop --lora_rank, or export it and "
            "train adapters of that"
        )
    if not now:
        return
    changes = differences(compared(before), compared(now))
    if changes:
        raise UserError(f"{path} holds other adapters: {'; '.join(changes)}")


def compared(lora: dict) -> dict:
    """What two runs of adapters must have in common. lora: as of `Lora.facts`."""
    # the values of 4 bits are compared once they are there
    base = {k: v for k, v in lora["base"].items() if k not in ("path", "values")}
    return {key: lora[key] for key in ("rank", "alpha", "targets")} | {"base": base}
