"""Weights and adapters as Hugging Face and PEFT have them in files, written from fp32 values that
are read a few at a time."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from llm_demo.core.decoder import DECAYS
from llm_demo.core.errors import UserError
from llm_demo.machine.files import write_json
from llm_demo.machine.text import blame, progress
from llm_demo.model.adapter_folder import BASE, BITS
from llm_demo.model.adapters import in_peft, peft_targets
from llm_demo.model.costs import on_meta
from llm_demo.model.families import family_of
from llm_demo.model.low_bits import E4M3, SCALES, laid_out, quantised_blocks
from llm_demo.model.source import read_config
from llm_demo.model.untrained import Untrained, mapped
from llm_demo.model.weights_files import Names, Weights, as_in_files, base_digest, in_files
from llm_demo.options.lora import factor_names, merge_into

UNTRAINED = Untrained()  # none
WEIGHTS = "model{suffix}.safetensors"
READ_AT_ONCE = 1 << 30  # bytes of fp32 values read at once, or one tensor that has more


Read = Callable[[dict[str, torch.Tensor]], None]  # fills {name: tensor} in fp32


def described_model(folder: Path) -> tuple[object, dict[str, tuple], set[str]]:
    """The model of a run's saved configuration: (transformers' configuration, {name: shape} of its
    weights, a tied one once, names of those that stay in fp32). Raises UserError."""
    with blame(folder / "config.json"):  # which may come from elsewhere
        config = read_config(folder)
        family_of(config)  # raises KeyError
        model = on_meta(config)
    weights = dict(model.named_parameters())
    in_fp32 = {name for name in weights if name.endswith(DECAYS)}
    saved = model.state_dict()
    for name, t in model.named_buffers():
        if name in saved:
            weights[name] = t
            in_fp32.add(name)
    return config, {name: tuple(t.shape) for name, t in weights.items()}, in_fp32


def save_finite(tensors: dict[str, torch.Tensor], file: Path, noted: dict | None = None) -> None:
    """Write safetensors; noted: further metadata. Raises UserError if a number is not finite."""
    for name, t in tensors.items():
        if t.dtype == E4M3:
            finite = t.float().isfinite()
        else:
            finite = t.isfinite()
        if not finite.all():
            raise UserError(f"{name} is not finite in {t.dtype}; nothing was exported")
    save_file(tensors, file, metadata={"format": "pt"} | (noted or {}))


def write_adapter(
    folder: Path, read: Read, shapes: dict[str, tuple], dtype: torch.dtype, lora: dict
) -> int:
    """Write adapters as PEFT does; returns bytes. shapes: of their factors; lora: what
    Lora.facts() returned."""
    factors = {name: torch.empty(shape) for name, shape in shapes.items()}
    read(factors)
    tensors = {name: t.to(dtype) for name, t in in_peft(factors).items()}
    base, alpha = lora["base"], lora["alpha"]
    noted = {BASE: base_digest(base), BITS: str(base.get("bits", 16))}
    save_finite(tensors, folder / "adapter_model.safetensors", noted)
    modules, parameters = peft_targets(factors)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base["path"],
        "r": lora["rank"],
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora["dropout"],
        "target_modules": modules,
        "target_parameters": parameters,
        "bias": "none",
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", config, indent=2)
    return sum(t.nbytes for t in tensors.values())


def merged(read_factors: Read, shapes: dict[str, tuple], lora: dict, base: Weights) -> Read:
    """The sums of a base and its adapters. shapes: of the factors."""

    def read(tensors: dict[str, torch.Tensor]) -> None:
        factors = {}
        for name in tensors:
            for factor in factor_names(name):
                if factor in shapes:
                    factors[factor] = torch.empty(shapes[factor])
        read_factors(factors)
        for name, t in tensors.items():
            t.copy_(base.read(name))
            merge_into(name, t, factors, lora)

    return read


def write_weights(
    folder: Path,
    read: Read,
    shapes: dict[str, tuple],
    dtype: torch.dtype,
    max_shard_size: str | int,
    in_fp32: Iterable[str] = (),
    fp8: bool = False,
    untrained: Untrained = UNTRAINED,
    family: str | None = None,
) -> int:
    """Write safetensors, sharded with an index if needed; returns bytes. shapes: of the
    configuration's model; fused experts are written as a tensor for each matrix of each, or as the
    base of `untrained` has them. in_fp32: names that stay so. fp8: of linear layers, see
    low_bits.py. untrained: further tensors, written as they are. family: as of Names."""
    of_files = {}
    as_they_are = shapes if untrained.fused and not fp8 else ()
    for name, shape in in_files(shapes, as_they_are).items():
        kind = torch.float32 if name in in_fp32 else dtype
        of_files[name] = torch.empty(shape, dtype=kind, device="meta")
    if fp8:
        of_files = laid_out(of_files)
    names_of = Names(family)
    ours = {untrained.name_of(names_of.in_files(name)): name for name in of_files}
    tensors = {name: of_files[of_text] for name, of_text in ours.items()}
    tensors |= {n: mapped(file, n).to("meta") for n, file in untrained.places.items()}
    plan = in_shards(tensors, max_shard_size)
    for file, names in progress(plan.filename_to_tensors.items(), "exporting", unit="files"):
        kinds = {ours[name]: tensors[name].dtype for name in names if name in ours}
        text = read_file(read, shapes, kinds)
        held = {name: text[ours[name]] for name in names if name in ours}
        save_finite(held | untrained.read(names), folder / file)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index, indent=2)
    return plan.metadata["total_size"]


def in_shards(tensors: dict[str, torch.Tensor], max_shard_size: str | int):
    """The hub's plan to split tensors into groups of at most so many bytes, or of one tensor."""
    return split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda t: t.nbytes,
        filename_pattern=WEIGHTS,
        max_shard_size=max_shard_size,
    )


def read_file(
    read: Read, shapes: dict[str, tuple], kinds: dict[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """What a file holds. shapes: of the model; kinds: {name: dtype} in the file. A fused tensor is
    read whole, even if another file has some of its experts."""
    weights = {name.removesuffix(SCALES) for name in kinds}
    needed = {}
    for name, shape in shapes.items():
        if weights & in_files({name: shape}, weights).keys():
            needed[name] = torch.empty(shape, device="meta")
    tensors = {}
    for names in in_shards(needed, READ_AT_ONCE).filename_to_tensors.values():
        tensors |= read_group(read, {name: shapes[name] for name in names}, kinds)
    return tensors


def read_group(
    read: Read, shapes: dict[str, tuple], kinds: dict[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """As `read_file`, of these weights, whose fp32 values are in memory until it returns."""
    masters = {name: torch.empty(shape) for name, shape in shapes.items()}
    read(masters)
    tensors = {}
    for name, master in masters.items():
        parts = {name: master} if name in kinds else as_in_files(name, master)
        for part, t in parts.items():
            stored = {part: t}
            if kinds.get(part) == E4M3 or part + SCALES in kinds:
                stored = dict(zip((part, part + SCALES), quantised_blocks(t), strict=True))
            for key in stored.keys() & kinds.keys():  # copies: safetensors refuses shared memory
                tensors[key] = stored[key].to(kinds[key], copy=True)
    return tensors
