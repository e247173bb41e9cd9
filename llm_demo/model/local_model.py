"""Whether a model's name is a folder on this machine, and what else it may be. Imports nothing
heavy."""

import os
from pathlib import Path

from llm_demo.core.errors import UserError
from llm_demo.machine.files import LFS

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # of a model's folder


def find_here(name: str) -> Path | None:
    """The folder of a model on this machine, None for a hub id. Raises UserError for anything else:
    a run, an adapter, an incomplete download, nothing."""
    folder = Path(os.path.expanduser(name))
    if is_of_run(folder):
        if not (folder / "checkpoints").is_dir():
            raise UserError(
                f"{name} is the folder of a run without checkpoints: it ran with --no_save, or "
                "they were deleted"
            )
        raise UserError(
            f"{name} is the folder of a run, not a model: export it first with "
            f"python -m llm_demo.export {name} OUT"
        )
    if (folder / "config.json").is_file():
        refuse_adapter(name, folder)
        refuse_pointers(folder)
        return folder
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{name} holds an adapter, not a model: export its run with python -m llm_demo.export "
            f"--merge, or train on from it: --model_name_or_path BASE --adapter {name}"
        )
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        refuse_deepspeed(folder)
        raise UserError(f"no model at {name}: it is neither a folder with config.json nor a hub id")
    return None


def is_of_run(folder: Path) -> bool:
    """Whether this is a run's folder, also if a part of it was deleted."""
    return sum((folder / name).exists() for name in ("cmd.sh", "env.json", "checkpoints")) > 1


def refuse_adapter(name: str, folder: Path) -> None:
    """Raise UserError if a model's folder also holds an adapter. transformers would add it to the
    model, and peft before 0.20 runs a module that the adapter's configuration names. Training
    would ignore it."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{name} holds both a model and an adapter (adapter_config.json), so what to load is "
            "not clear: merge them into one model, or move the adapter's files away"
        )


def refuse_pointers(folder: Path) -> None:
    """Raise UserError if a file is a Git LFS pointer, which an incomplete download leaves."""
    for file in sorted(f for pattern in FILES for f in folder.glob(pattern)):
        if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(LFS):
            raise UserError(
                f"{file} is a Git LFS pointer, not the file: run git lfs pull in {folder}"
            )


def refuse_deepspeed(folder: Path) -> None:
    """Raise UserError if a folder holds a checkpoint in the format of DeepSpeed's engines."""
    files = ("*model_states.pt", "global_step*/*model_states.pt")
    if any(any(folder.glob(pattern)) for pattern in files):
        raise UserError(
            f"{folder} is a checkpoint in DeepSpeed's own format, which is not read: convert it to "
            "a Hugging Face folder (ZeRO's by DeepSpeed's zero_to_fp32.py --safe_serialization, "
            "then add config.json and the tokenizer's files), and train from that"
        )
