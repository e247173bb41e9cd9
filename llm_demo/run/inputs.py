"""What flags name on this machine: data, folders and files, looked at before slow imports.

A check of what is there takes milliseconds, PyTorch and transformers take seconds, in each rank."""

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from llm_demo.core.errors import UserError
from llm_demo.data.sources import find_files, heldout_beside, weighted
from llm_demo.model.local_model import find_here
from llm_demo.run.folder import choose_folder, refuse_inside_checkpoints


def refuse_absent(flag: str, file: str | Path | None) -> None:
    """Raise UserError if a flag names a file that does not exist."""
    if file and not os.path.exists(file):
        raise UserError(f"{flag} {file}: No such file or directory")


def refuse_used(out: Path) -> None:
    """Raise UserError if `out` can't become a new folder."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose another name")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: choose another folder")
    if out.resolve() == Path.cwd():  # it is replaced as a whole
        raise UserError(f"{out} is the working folder: choose another")
    refuse_inside_checkpoints(out)


class Sources(NamedTuple):
    """The data that flags name."""

    train: str  # without weights
    weights: list[float] | None  # of each file of `train`
    heldout: str  # or "none"


def sources_of(args) -> Sources:
    train, weights = weighted(args.train_json)
    heldout = args.eval_json
    if args.eval_fraction:
        heldout = "none"
    elif heldout == "auto":
        heldout = heldout_beside(train) or "none"
    return Sources(train, weights, heldout)


def look(args, first_node: bool = True) -> None:
    """Raise UserError if something that a training script's flags name on this machine is missing,
    or is data with bad examples. first_node: whether this node writes the run's folder and reads
    what is resumed."""
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
    sources = sources_of(args)
    train, _ = find_files(sources.train, split="train")
    heldout = []
    if sources.heldout != "none":
        heldout, _ = find_files(sources.heldout)
    from llm_demo.data.check import check_rows  # imports numpy: after what needs none

    check_rows(train, args)
    check_rows(heldout, dataclasses.replace(args, skip_bad_rows=None))
