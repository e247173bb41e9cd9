"""What flags name on this machine: models, data and folders, looked at before slow imports.

A check of what is there takes milliseconds, PyTorch and transformers take seconds, in each rank."""

import errno
import os
from pathlib import Path

from llm_demo.core.errors import UserError
from llm_demo.data.sources import LFS, find_files, heldout_beside, weighted
from llm_demo.job.folder import choose_folder, refuse_inside_checkpoints

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # of a model's folder


def find_here(name: str) -> Path | None:
    """The folder of a model on this machine, None for a hub id. Raises UserError for anything else:
    a run, an adapter, an incomplete download, nothing."""
    folder = Path(os.path.expanduser(name))
    if (folder / "cmd.sh").is_file() and (folder / "checkpoints").is_dir():
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


def refuse_absent(flag: str, file: str | Path | None) -> None:
    """Raise UserError if a flag names a file that does not exist."""
    if file and not os.path.exists(file):
        raise UserError(f"{flag} {file}: {os.strerror(errno.ENOENT)}")


def refuse_used(out: Path) -> None:
    """Raise UserError if `out` can't become a new folder."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose another name")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: choose another folder")
    if out.resolve() == Path.cwd():  # it is replaced as a whole
        raise UserError(f"{out} is the working folder: choose another")
    refuse_inside_checkpoints(out)


def heldout_file(args) -> str:
    """The held-out file, or "none"."""
    if args.eval_fraction:
        return "none"
    if args.eval_json == "auto":
        return heldout_beside(weighted(args.train_json)[0]) or "none"
    return args.eval_json


def look(args, first_node: bool = True) -> None:
    """Raise UserError if something is missing that a training script's flags name on this machine.
    first_node: whether this one writes the run's folder and reads what is resumed."""
    if first_node:
        choose_folder(args, "")
        if args.resume and args.resume != "auto" and not Path(args.resume).is_dir():
            raise UserError(f"{args.resume}: no such folder")
    find_here(args.model_name_or_path)
    tokenizer = args.tokenizer_name_or_path
    if tokenizer and not Path(tokenizer).is_dir():
        find_here(tokenizer)
    refuse_absent("--chat_template", args.chat_template)
    refuse_absent("--deepspeed_config", args.deepspeed_config)
    config, split = args.dataset_config, args.dataset_split or "train"
    train_json, _ = weighted(args.train_json, config, split)
    eval_json = heldout_file(args)
    quiet = lambda line: None  # noqa: E731
    find_files(train_json, config, split, say=quiet)
    if eval_json != "none":
        find_files(eval_json, config, say=quiet)
