"""A PEFT adapter's folder, as --adapter or a chat names it: what it says of itself, and whether
that can be applied exactly. It may be a stranger's: peft never reads it. Imports nothing heavy, so
that a launcher can read it."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from llm_demo.core.errors import UserError
from llm_demo.machine.process import read_text, regular
from llm_demo.machine.text import words_of

# Keys of adapter_config.json that are read here, or change nothing for plain LoRA on linear layers
READ = {"r", "lora_alpha", "use_rslora", "target_modules", "target_parameters", "lora_dropout",
        "base_model_name_or_path"}  # fmt: skip
WITHOUT_EFFECT = {"auto_mapping", "eva_config", "exclude_modules", "inference_mode",
                  "megatron_core", "peft_version", "qalora_group_size", "revision"}  # fmt: skip
ALLOWED = {  # others of its keys; what is in none of these tables may only be off or empty
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
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
    dropout: float
    targets: frozenset[str]  # what has factors; of experts, the names of their fused matrices
    modules: str | list[str] | None  # target_modules: a regular expression, or ends of names
    tensors: tuple[str, ...]  # names in the file
    base: str  # name of the base, "" if none is given
    made_for: str  # base_digest of it, "" unless this project's export has noted it
    bits: str = ""  # in how many its values were used, likewise

    @property
    def file(self) -> Path:
        return self.folder / "adapter_model.safetensors"

    def aims_at(self, module: str) -> bool:
        """Whether target_modules means this module, as in peft. Raises UserError for one that is no
        regular expression."""
        if self.modules in (None, "all-linear"):
            return True
        if isinstance(self.modules, list):
            return any(f".{module}".endswith(f".{name}") for name in self.modules)
        try:
            return bool(re.fullmatch(self.modules, module))
        except (re.error, RecursionError, OverflowError) as e:
            raise UserError(
                f"{self.folder}/adapter_config.json: target_modules is neither a list nor a "
                f"regular expression: {words_of(e)}"
            ) from e


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
    try:
        config = json.loads(read_text(file))
        problem = next(problems_of(config), None)
    except (OSError, ValueError, AttributeError, RecursionError) as e:
        raise UserError(f"{file} can't be read: {words_of(e)}") from e
    if problem:
        raise UserError(f"{file}: {problem}")
    rank, alpha, modules = config["r"], float(config["lora_alpha"]), config.get("target_modules")
    tensors, metadata = header_of(folder)
    ends = {match[1] for match in map(FACTOR.fullmatch, tensors) if match}
    if "experts" in ends:  # their factors do not name the matrix
        ends |= {ending(name) for name in config.get("target_parameters") or ()}
    return Adapter(
        folder, rank, alpha * math.sqrt(rank) if config.get("use_rslora") else alpha,
        config.get("lora_dropout") or 0.0, frozenset(ends - {"experts"}), modules, tensors,
        config.get("base_model_name_or_path") or "", metadata.get(BASE, ""), metadata.get(BITS, ""),
    )  # fmt: skip


def _number(x) -> bool:
    return type(x) in (int, float)


def _names(x) -> bool:
    return x is None or isinstance(x, list) and all(type(name) is str for name in x)


FITS = {  # key of adapter_config.json -> check of its value, None if it is missing
    "peft_type": lambda x: x is not None,
    "r": lambda x: type(x) is int and 0 < x <= 1 << 16,
    "lora_alpha": lambda x: _number(x) and 0 < x <= 1e9,
    "use_rslora": lambda x: x in (True, False, None),
    "lora_dropout": lambda x: x is None or _number(x) and 0 <= x < 1,
    "target_modules": lambda x: type(x) is str or _names(x),
    "target_parameters": _names,
    "base_model_name_or_path": lambda x: type(x) is str or x is None,
}


def ending(name: str) -> str:
    return name.rpartition(".")[2]


def problems_of(config: dict) -> Iterator[str]:
    """Why an adapter_config.json can't be applied exactly, if so."""
    for key in config.keys() - READ - WITHOUT_EFFECT:
        value = config[key]
        on = value or type(value) is int  # 0 may be the first layer or token
        if value not in ALLOWED[key] if key in ALLOWED else on:
            yield (
                f"{key} {json.dumps(value)[:80]} can't be applied exactly: merge the adapter "
                "into its base with peft's merge_and_unload, and use that model"
            )
    for key, fits in FITS.items():
        if not fits(value := config.get(key)):
            yield f"invalid {key}: {json.dumps(value)[:80]}"


def header_of(folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """(names of the tensors in adapter_model.safetensors, its metadata). Raises UserError."""
    file = regular(folder / "adapter_model.safetensors")
    if not file.is_file():
        other = next(folder.glob("adapter_model*"), None)
        held = f"{other.name}, but no {file.name}" if other else f"no {file.name}"
        raise UserError(f"{folder} holds {held}: write it again with peft's save_pretrained")
    try:
        with safe_open(file, "np") as opened:
            if names := tuple(opened.keys()):
                return names, opened.metadata() or {}
        raise UserError(f"{file} holds no tensors")
    except SafetensorError as e:
        raise UserError(f"{file} is damaged or incomplete: {words_of(e)}") from e


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
