"""A base in 4 bits under adapters, which bitsandbytes makes of other weights: in the cache."""

import functools
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from llm_demo.core.decoder import materialise, skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.machine.device import dtype_name
from llm_demo.machine.dist import once_per_node, same_on_all_nodes
from llm_demo.machine.files import build, cache_folder, hash_of, verified
from llm_demo.machine.text import blame, layer_kinds, progress
from llm_demo.model.weights_files import by_matrix, fingerprint, weights_in
from llm_demo.options.four_bits import BLOCK
from llm_demo.options.four_bits_library import quantise
from llm_demo.options.lora import quantisable, use_four_bits

FORMAT = 1  # of a cached base; increase it when the same files are stored differently


def give_four_bits(
    lm: nn.Module, source, compute, seed: int, world: World, saver, say: Callable
) -> None:
    """options.four_bits.use_four_bits with this run's base, from its files or from the cache, where
    the first process of each node puts it. Every rank calls. source, compute, saver: as those of a
    run.Job. Raises UserError."""
    weights, where = source.weights, "the files"
    if not (weights and weights.packed):
        folder = cached_base(source, compute.lora.base)
        make = functools.partial(write_base, source, seed, world.device)
        sums = once_per_node(world, functools.partial(find_or_build, folder, make, say))
        same_on_all_nodes(world, {"the base in 4 bits": sums})
        note_values(saver, hash_of(sorted(sums.items()))[:16], folder)
        weights, where = weights_in(sorted(folder.glob("*.safetensors"))), folder
    found = use_four_bits(lm, compute.dtype, weights.read_packed, weights.in_4_bits())
    done, left = layer_kinds(*found)
    if not done:
        raise UserError("--base_bits 4: rows of no layer are a multiple of 64 wide")
    rest = ", ".join([*left, "embedding", "head", "norms"])
    dtype = dtype_name(compute.dtype)
    say(f"base: 4 bits (NF4) from {where}: {', '.join(done)}; in {dtype}: {rest}")


def note_values(saver, values: str, folder: Path) -> None:
    """Note a digest of a base's values. Raises UserError if the resumed checkpoint has another."""
    before = (saver.facts.get("adapters") or saver.adapters)["base"].get("values", values)
    if before != values:
        raise UserError(
            f"{saver.path} holds adapters over other values than those of {folder}: another "
            "bitsandbytes or device has quantised them; copy the folder of that name from there"
        )
    saver.adapters["base"]["values"] = values


def cached_base(source, base: dict) -> Path:
    """Where the cache has a base in 4 bits. base: as of weights_files.identity_of."""
    files = sorted(set(source.weights.files.values())) if source.weights else []
    stats = []  # the samples in `base` do not do
    for file in files:
        stat = file.stat()
        stats.append((file.name, stat.st_size, stat.st_mtime_ns))
    facts = {k: v for k, v in base.items() if k != "path"}
    key = [FORMAT, version("bitsandbytes"), facts, stats, fingerprint(source.config)]
    return cache_folder() / f"nf4-{hash_of(key)[:24]}"


def find_or_build(folder: Path, make: Callable, say: Callable) -> dict[str, str]:
    """{file: its checksum} of a folder of the cache, which `make` writes if missing or damaged."""
    if folder.is_dir():
        try:
            return verified(str(folder))
        except (OSError, ValueError) as e:
            say(f"base: the cached {folder} is damaged ({e}); rebuilding it")
    build(str(folder), make)
    with blame(f"{folder} is damaged, delete it", OSError, ValueError):
        return verified(str(folder))


def write_base(source, seed: int, device: torch.device, folder: str) -> None:
    """Write the linear layers and experts of a model in 4 bits, block by block, each block to a
    file. Each matrix that files have of an expert is rounded alone."""
    lm = skeleton(source.config, "sdpa", source.weights)
    n = len(lm.model.layers)
    for i in progress(range(n), "quantising blocks", unit="blocks"):
        tensors, name = {}, f"model.layers.{i}"
        block = materialise(lm, name, source.weights, seed, device)
        for key, p in quantisable(block, prefix=name).items():
            for path, values in by_matrix(key, p.detach()).items():
                if values.shape[1] % BLOCK:
                    continue
                with blame(f"bitsandbytes can't quantise {path}", RuntimeError):
                    numbers, state = quantise(values.contiguous())
                tensors[path] = numbers.cpu().contiguous()
                for part, t in state.as_dict(packed=True).items():
                    tensors[f"{path}.{part}"] = t.cpu().contiguous()
        save_file(tensors, f"{folder}/block_{i:04}.safetensors")
        block.to("meta")
