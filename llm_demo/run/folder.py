"""A run's folder: chosen, taken by one run alone, and what it takes to repeat the run."""

import fcntl
import os
import shlex
import shutil
import sys
from argparse import Namespace
from datetime import datetime
from pathlib import Path

from llm_demo.dist import World, from_rank0
from llm_demo.errors import UserError
from llm_demo.files import ROOT, write_json
from llm_demo.run.checkpoint_files import published
from llm_demo.run.environment import environment


def choose_folder(args: Namespace, world: World, script: str) -> Path:
    """The run's folder; nothing is made or emptied yet. Raises UserError if it holds something."""

    def choose() -> Path:
        model = Path(args.model_name_or_path).name
        name = f"{script}-{model}-{datetime.now():%Y%m%d-%H%M%S}"
        folder = Path(args.output_dir) if args.output_dir else ROOT / "runs" / name
        above = next(p for p in folder.absolute().parents if p.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise UserError(f"--output_dir {folder}: can't be made in {above}")
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--output_dir {folder} is a file: choose another name")
        if args.overwrite:
            _refuse_inputs_in(folder, args)
        if folder.exists() and any(folder.iterdir()):
            if not (args.overwrite or args.resume == "auto"):
                raise UserError(
                    f"--output_dir {folder} is not empty: choose another, or add --overwrite, or "
                    "--resume auto to go on"
                )
            ours = (folder / "cmd.sh").is_file() and (folder / "config.json").is_file()
            if not ours and args.resume:  # killed while it began, or cmd.sh is lost
                ours = [f.name for f in folder.iterdir()] == ["cmd.sh"] or published(
                    folder / "checkpoints"
                )
            if not ours:
                raise UserError(f"{folder} is no run's folder, it stays as it is")
        return folder

    return from_rank0(world, choose)


def _refuse_inputs_in(folder: Path, args: Namespace) -> None:
    """Raise UserError if --overwrite would delete what this run reads."""
    for flag in ("model_name_or_path", "tokenizer_name_or_path", "train_json", "eval_json"):
        for name in (getattr(args, flag) or "").split(","):
            path = Path(name).expanduser()
            if path.exists() and folder.resolve() in (path.resolve(), *path.resolve().parents):
                raise UserError(f"--overwrite would delete --{flag} {name}: choose another folder")


def lock_folder(folder: Path, args: Namespace):
    """Lock the folder of an earlier run, before its checkpoints are looked for: a file to keep
    open, or None where there is none to lock. Creates nothing in a dry run. Raises UserError if
    another run is at work there; its lock ends with its process, however that ends."""
    made = args.dry_run or not published(folder / "checkpoints")  # cmd.sh may have been lost
    try:
        return None if args.estimate else _lock(folder / "cmd.sh", "r+" if made else "a")
    except FileNotFoundError:
        return None
    except BlockingIOError:
        raise UserError(f"--output_dir {folder}: another run is at work there") from None
    except OSError as e:
        raise UserError(f"--output_dir {folder}: {e.strerror}: {e.filename}") from None


def take_folder(folder: Path, args: Namespace, held):
    """Make the folder, or empty it for --overwrite; returns its lock. held: what `lock_folder`
    returned. Raises UserError if another run has taken the folder since then."""
    try:
        if args.overwrite and folder.exists():
            folder = folder.resolve()  # a link stays, and what it points to is made again
            if not held:
                _lock(folder / "cmd.sh", "a").close()
            shutil.rmtree(folder)
        elif held:
            return held
        folder.mkdir(parents=True, exist_ok=True)
        if published(folder / "checkpoints"):
            raise FileExistsError
        return _lock(folder / "cmd.sh", "a" if args.resume == "auto" else "x")
    except (FileExistsError, BlockingIOError):
        raise UserError(f"--output_dir {folder}: another run is at work there") from None


def _lock(file: Path, mode: str):
    opened = open(file, mode)
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return opened


def describe_run(folder: Path, settings: dict, world: World, script: str) -> None:
    """Write config.json, env.json and cmd.sh."""
    write_json(folder / "config.json", settings, indent=2, default=str)
    write_json(folder / "env.json", environment(world), indent=2, default=str)
    argv = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    kind, path = {
        "fsdp": ("torchrun", "fsdp/train_fsdp.py"),
        "pp": ("deepspeed", "pp/pp_train.py"),
    }[script]
    given = os.environ
    several = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if "NNODES" in given else ()
    nodes = [f"{name}={given[name]}" for name in several if name in given]
    # Not through the launcher: its defaults would fill what this run left to the script. With exec,
    # because a run that goes on in this folder rewrites the file while bash would still read it.
    (folder / "cmd.sh").write_text(
        f"#!/usr/bin/env bash\ncd {shlex.quote(os.getcwd())}\n"
        f"exec env {' '.join([*nodes, f'NPROC_PER_NODE={world.local_size}'])} "
        f"PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m llm_demo.launch "
        f'{kind} {shlex.quote(str(ROOT / path))} {shlex.join(argv)} "$@"\n'
    )


def gone(folder: Path) -> str:
    return f"{folder} is gone: it was deleted or moved while the run was at work there"


def last_checkpoint(folder: Path) -> str:
    """A clause that names the checkpoint to go on from."""
    newest = next(iter(published(folder / "checkpoints")), None)
    return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
