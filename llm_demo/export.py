"""Export a checkpoint as a Hugging Face folder: python -m llm_demo.export RUN_OR_CHECKPOINT OUT

Works for all scripts. It needs neither the training GPUs nor memory for the whole model. Adapters
become a PEFT adapter, or with --merge the whole model."""

import argparse
import os
from pathlib import Path

from llm_demo.core.errors import UserError
from llm_demo.flags.args import TrainArgs
from llm_demo.flags.parsing import PlainParser, literals, path_of, size
from llm_demo.machine.process import early
from llm_demo.run.inputs import refuse_used

OF_WEIGHTS = (*literals(TrainArgs, "dtype")[1:], "fp8")


def make_parser() -> argparse.ArgumentParser:
    parser = PlainParser(prog="python -m llm_demo.export", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("source", type=path_of, help="a checkpoint, or a run folder for its newest complete one")
    add("out", type=path_of, help="folder to create")
    add(
        "--dtype",
        choices=OF_WEIGHTS,
        default="bf16",
        help="dtype of the weights; fp8: linear layers with a scale for 128 x 128 numbers, as "
        "DeepSeek-V3, the rest in bf16",
    )
    add("--merge", action="store_true", help="add adapters to their base: writes the whole model")
    add("--base", help="folder or hub id of the run's base, if it has moved")
    add(
        "--text_only",
        action="store_true",
        help="leave out what a model has beside the trained text, such as a vision tower",
    )
    add("--max_shard_size", type=size, default="5GB", help="largest weights file")
    add("--push_to_hub", metavar="REPO", help="also upload to this private repository")
    add("--public", action="store_true", help="make the --push_to_hub repository public")
    return parser


def check(args) -> None:
    """Raise UserError for flags that contradict each other, and for folders that can't be used."""
    if args.public and not args.push_to_hub:
        raise UserError("--public: set --push_to_hub too, which names the repository")
    source = args.source
    if not source.is_dir():
        raise UserError(f"{source}: no such folder")
    refuse_used(args.out)


if __name__ == "__main__":  # before the slow imports
    early(lambda: make_parser().parse_args(), check)

import torch

from llm_demo.core.mesh import World
from llm_demo.machine.dist import run
from llm_demo.machine.text import first_line
from llm_demo.run.checkpoint_files import find_checkpoint
from llm_demo.run.export_run import export

ALONE = World(0, 1, 0, torch.device("cpu"))  # this process


def main() -> None:
    args = make_parser().parse_args()
    check(args)
    named = os.path.join(".", args.source)  # "auto" is a folder here
    checkpoint = find_checkpoint(named, Path(named), ALONE, print)
    line = export(
        checkpoint=checkpoint,
        out=args.out,
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        merge=args.merge,
        base=args.base,
        text_only=args.text_only,
    )
    print(line)
    if args.push_to_hub:
        push(args.out, args.push_to_hub, private=not args.public)


def push(folder: Path, repo: str, private: bool = True) -> None:
    """Upload a folder to the hub with the token that huggingface_hub finds."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo).private:  # it existed before, and is not changed
            raise ValueError("it exists and is public: add --public or choose another name")
        api.upload_folder(repo_id=repo, folder_path=folder)
    except Exception as e:  # from several libraries below the hub's
        said = first_line(e)
        raise UserError(f"--push_to_hub {repo}: {said}; {folder} is complete") from e
    print(f"pushed {folder} to {repo}")


if __name__ == "__main__":
    run(main)
