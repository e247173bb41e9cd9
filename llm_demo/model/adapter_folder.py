"""A PEFT adapter's folder, as --adapter or a chat names it: what it says of itself, and whether
that can be applied exactly. It may be a stranger's: peft never reads it. Imports nothing heavy, so
that a launcher can read it."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from llm_demo.core.errors import UserError
from llm_demo.machine.process import read_json, regular
from llm_demo.machine.text import blame

# Keys of adapter_config.json that are read here, or change nothing for plain LoRA on linear layers
ENTRIES = {
    "r",
    "lora_alpha",
    "target_modules",
    "target_parameters",
    "lora_dropout",
    "base_model_name_or_path",
}
IGNORED_ENTRIES = {
    "auto_mapping",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
}
ALLOWED = {  # others of its keys; what is in none of these tables may only be off or empty
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "use_rslora": (True, False, None),
    # not those that change the base's weights too, or freeze a factor
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
FACTOR = re.compile(
    r"base_model\.model\.(?:.+\.)?(?!base_layer)([^.]+)(?:\.base_layer)*\.lora_[AB]\.weight"
)
# in the metadata of the tensors' file: what our exports say of their base
BASE, BITS = "llm_demo.base", "llm_demo.base_bits"


class Adapter(NamedTuple):
    """What a folder says."""

    folder: Path
    rank: int
    alpha: float  # products are scaled by this / rank, with use_rslora too
    targets: frozenset[str]  # what has factors; of experts, the names of their fused matrices
    listed: tuple[str, ...]  # the names that target_modules lists
    tensors: tuple[str, ...]  # names in the file
    base: str  # name of the base, "" if none is given
    made_for: str  # base_digest of it, "" unless this project's export has noted it
    bits: str = ""  # in how many its values were used, likewise

    @property
    def file(self) -> Path:
        return self.folder / "adapter_model.safetensors"


def open_adapter(name: str) -> Adapter:
    """Read what a folder says. Raises UserError for what can't be applied exactly."""
    folder = Path(name)
    file = folder / "adapter_config.json"
    if not file.is_file():
        what = "a folder without adapter_config.json" if folder.is_dir() else "no folder"
        raise UserError(
            f"--adapter {name}: {what}: it must be the folder of a PEFT adapter, as exports and "
            "save_pretrained write it; get one of the hub by hf download"
        )
    with blame(file):
        config = read_json(file)
        for problem in problems_of_adapter(config):
            raise ValueError(problem)
        rank, alpha = config["r"], float(config["lora_alpha"])
        if type(rank) is not int or not 0 < rank <= 1 << 16 or not 0 < alpha < math.inf:
            raise ValueError(f"r {rank} and lora_alpha {alpha} are not positive numbers")
        if config.get("use_rslora"):
            alpha *= math.sqrt(rank)
        experts = [ending(name) for name in config.get("target_parameters") or ()]
        listed = config.get("target_modules")
        listed = tuple(map(ending, listed)) if isinstance(listed, list) else ()
    tensors, metadata = header_of(folder)
    matches = [FACTOR.fullmatch(name) for name in tensors]
    ends = {match[1] for match in matches if match}
    if "experts" in ends:  # their factors do not name the matrix
        ends.update(experts)
    return Adapter(
        folder=folder,
        rank=rank,
        alpha=alpha,
        targets=frozenset(ends - {"experts"}),
        listed=listed,
        tensors=tensors,
        base=config.get("base_model_name_or_path") or "",
        made_for=metadata.get(BASE, ""),
        bits=metadata.get(BITS, ""),
    )


def ending(name: str) -> str:
    return name.rpartition(".")[2]


def problems_of_adapter(config: dict) -> Iterator[str]:
    """Why an adapter_config.json can't be applied exactly, if so."""
    for key in config.keys() - ENTRIES - IGNORED_ENTRIES:
        value = config[key]
        on = value or type(value) is int  # 0 may be the first layer or token
        if value not in ALLOWED[key] if key in ALLOWED else on:
            yield (
                f"{key} {json.dumps(value)[:80]} can't be applied exactly: merge the adapter "
                "into its base with peft's merge_and_unload, and use that model"
            )


def header_of(folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """(names of the tensors in adapter_model.safetensors, its metadata). Raises UserError."""
    file = regular(folder / "adapter_model.safetensors")
    if not file.is_file():
        other = next(folder.glob("adapter_model*"), None)
        held = f"{other.name}, but no {file.name}" if other else f"no {file.name}"
        raise UserError(f"{folder} holds {held}: write it again with peft's save_pretrained")
    with blame(file), safe_open(file, "np") as opened:
        names = tuple(opened.keys())
        if not names:
            raise ValueError("it holds no tensors")
        return names, opened.metadata() or {}


def adopted(flags: dict) -> dict:
    """Flags with the rank, alpha and targets of --adapter. Raises UserError for a flag that says
    otherwise; adapters.py looks at the targets' flag, whose names depend on the model."""
    adapter = open_adapter(flags["adapter"])
    found = {"lora_rank": adapter.rank, "lora_alpha": adapter.alpha}
    for name, value in found.items():
        given = flags[name]
        if given is not None and not math.isclose(given, value, rel_tol=1e-5):
            raise UserError(
                f"--{name} {given:g} contradicts --adapter {flags['adapter']}, where it is "
                f"{value:g}: drop the flag"
            )
    if flags["lora_targets"] is None:
        found["lora_targets"] = ",".join(sorted(adapter.targets))
    return found
