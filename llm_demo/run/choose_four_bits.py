"""--base_bits 4: decides whether it works, and puts a base in 4 bits into the cache.

`python -m llm_demo.run.choose_four_bits` compares a GPU's values with the CPU's."""

import functools
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from llm_demo.core.decoder import materialise, skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.four_bits import BLOCK, values_of
from llm_demo.core.lora import use_four_bits
from llm_demo.machine.cache import build, verified
from llm_demo.machine.device import dtype_name
from llm_demo.machine.dist import from_rank0, once_per_node, same_on_all_nodes
from llm_demo.machine.files import cache_folder, hash_of
from llm_demo.machine.text import layer_kinds, progress, words_of
from llm_demo.model.costs import experts_of
from llm_demo.model.low_bits import library, need_library, pack
from llm_demo.model.weights_files import fingerprint, weights_in
from llm_demo.run.choices import above, probe_once

MODULE = "llm_demo.run.choose_four_bits"
# scales in a byte each
DOUBLE = {"compress_statistics": True, "blocksize": BLOCK, "quant_type": "nf4"}
FORMAT = 1  # of a cached base; increase it when the same files are stored differently


def decide_four_bits(args, source, world) -> None:
    """Raise UserError on every rank if --base_bits 4 can't work on one of them, and for files in 4
    bits without it. source: a Source."""
    if args.base_bits != 4:
        if source.weights and source.weights.packed:
            raise UserError(
                f"{source.folder} holds weights in 4 bits: train adapters over them with "
                "fsdp/train_fsdp.py --lora_rank 16 --base_bits 4, or give a copy in bf16"
            )
        return
    if experts_of(source.config):
        raise UserError("--base_bits 4 does not work with mixtures of experts: drop it")
    once_per_node(world, need_library)
    if world.device.type == "cuda":
        if problem := from_rank0(world, functools.partial(probe_once, MODULE)):
            raise UserError(f"--base_bits 4 does not work here: {problem}")
        use_kernel()


def use_kernel() -> None:
    """Let a GPU compute the values."""
    from llm_demo.core import four_bits_kernel  # noqa: F401  it needs Triton


def give_four_bits(lm: nn.Module, job) -> None:
    """core.four_bits.use_four_bits with this run's base, from its files or from the cache, where
    the first process of each node puts it. Every rank calls. Raises UserError."""
    args, source, say, dtype = job.args, job.plan.source, job.log.say, job.plan.compute.dtype
    if args.base_bits != 4:
        return
    weights, where = source.weights, "the files"
    if not (weights and weights.packed):
        folder = cached_base(source, job.plan.compute.lora.base)
        make = functools.partial(quantise, source, args.seed, job.world.device)
        sums = once_per_node(job.world, functools.partial(find_or_build, folder, make, say))
        same_on_all_nodes(job.world, {"the base in 4 bits": sums})
        note_values(job.saver, hash_of(sorted(sums.items()))[:16], folder)
        weights, where = weights_in(sorted(folder.glob("*.safetensors"))), folder
    done, left = layer_kinds(*use_four_bits(lm, dtype, weights.read_packed, weights.packed))
    if not done:
        raise UserError("--base_bits 4: rows of no layer are a multiple of 64 wide")
    rest = ", ".join([*left, "embedding", "head", "norms"])
    say(f"base: 4 bits (NF4) from {where}: {', '.join(done)}; in {dtype_name(dtype)}: {rest}")


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
    stats = [(f.name, (s := f.stat()).st_size, s.st_mtime_ns) for f in files]  # samples do not do
    facts = {k: v for k, v in base.items() if k != "path"}
    key = [FORMAT, version("bitsandbytes"), facts, stats, fingerprint(source.config)]
    return Path(cache_folder(), f"nf4-{hash_of(key)[:24]}")


def find_or_build(folder: Path, make: Callable, say: Callable) -> dict[str, str]:
    """{file: its checksum} of a folder of the cache, which `make` writes if missing or damaged."""
    if folder.is_dir():
        try:
            return verified(str(folder))
        except PermissionError as e:
            raise UserError(f"{e}: set LLM_DEMO_CACHE to a folder of yours") from e
        except (OSError, ValueError) as e:
            say(f"base: the cached {folder} is damaged ({e}); rebuilding it")
    build(str(folder), make)
    try:
        return verified(str(folder))
    except (OSError, ValueError) as e:
        raise UserError(f"{folder} is damaged ({e}): delete it") from e


def quantise(source, seed: int, device: torch.device, folder: str) -> None:
    """Write the linear layers of a model in 4 bits, block by block, each block to a file."""
    functional = library()
    lm = skeleton(source.config, "sdpa", source.weights)
    n = len(lm.model.layers)
    for i in progress(range(n), "quantising blocks", unit="blocks"):
        tensors, name = {}, f"model.layers.{i}"
        block = materialise(lm, name, source.weights, seed, device)
        for path, layer in block.named_modules(prefix=name):
            if type(layer) is nn.Linear and layer.in_features % BLOCK == 0:
                values = layer.weight.detach().contiguous()
                try:
                    numbers, state = functional.quantize_4bit(values, **DOUBLE)
                except RuntimeError as e:  # of its own library, or out of memory
                    raise UserError(f"bitsandbytes can't quantise {path}: {words_of(e)}") from e
                parts = {"": numbers} | {f".{k}": t for k, t in state.as_dict(packed=True).items()}
                tensors |= {f"{path}.weight{k}": t.cpu().contiguous() for k, t in parts.items()}
        save_file(tensors, f"{folder}/block_{i:04}.safetensors")
        block.to("meta")


def scales_in(state) -> torch.Tensor:
    """The scales as of `values_of` in a QuantState of bitsandbytes."""
    return torch.cat([state.state2.absmax, state.offset.view(1), state.code, state.state2.code])


def fault(device: str = "cuda") -> str | None:
    """What is wrong with a device's values of a weight, and its numbers and scales."""
    shape, found = (96, 320), []
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if device == "cuda":
        use_kernel()
    for place in ("cpu", device):
        numbers, state = library().quantize_4bit(weight.to(place), **DOUBLE)
        bits = pack(numbers, state.absmax, shape)
        found.append(values_of(bits, scales_in(state), shape[1], torch.float32).cpu())
    error = ((found[1] - found[0]).norm() / found[0].norm()).item()
    return above("values in 4 bits differ from a CPU's", error, "fp16")


if __name__ == "__main__":
    sys.exit(fault())
