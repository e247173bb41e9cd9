"""Choose a run's folder, and lock it so that only one run uses it."""

import contextlib
import fcntl
import glob
import itertools
import os
import shutil
import tempfile
import time
from datetime import datetime
from pathlib import Path

from llm_demo.args import Args
from llm_demo.errors import UserError
from llm_demo.files import PART, ROOT

# flags that name what a run reads; not every script has all of them
INPUTS = ("model_name_or_path", "tokenizer_name_or_path", "chat_template", "train_json",
          "eval_json", "deepspeed_config")  # fmt: skip


def choose_folder(args: Args, script: str) -> Path:
    """The run's folder, not yet created or emptied. Raises UserError if it can't be used."""
    model = Path(args.model_name_or_path).name
    name = f"{script}-{model}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(args.output_dir) if args.output_dir else ROOT / "runs" / name
    if folder.is_symlink() and not folder.exists():
        raise UserError(
            f"--output_dir {folder} is a link to {os.readlink(folder)}, which does not exist: "
            "create that folder, or remove the link"
        )
    above = next(p for p in folder.absolute().parents if p.exists())
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file: choose another name")
    try:  # access() allows root everything, even in /proc
        os.rmdir(tempfile.mkdtemp(prefix=".llm_demo-", dir=above))
    except OSError as e:
        raise UserError(f"--output_dir {folder}: can't be created in {above}: {e.strerror}") from e
    if not args.output_dir:
        return folder if args.dry_run or args.estimate else _reserve(folder)
    if args.overwrite:
        _refuse_inputs_in(folder, args)
    if folder.exists() and any(folder.iterdir()):
        if not (args.overwrite or args.resume == "auto"):
            raise UserError(
                f"--output_dir {folder} is not empty: choose another, or add --overwrite, or "
                "--resume auto to continue"
            )
        ours = (folder / "cmd.sh").is_file() and (folder / "config.json").is_file()
        if not ours and args.resume:  # killed early, or cmd.sh is lost
            ours = [f.name for f in folder.iterdir()] == ["cmd.sh"] or published(
                folder / "checkpoints"
            )
        if not ours:
            raise UserError(f"--output_dir {folder} is not a run's folder, so it is left unchanged")
    return folder


def _reserve(folder: Path) -> Path:
    """The folder, or with -2, -3, ... if a run that began in the same second has it. An empty file
    beside it keeps the name until the folder exists."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"{PART}name-*"):  # of runs that ended before step 1
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - 3600:  # that second does not come again
                left.unlink()
    for n in itertools.count(2):
        mark = _mark(folder)
        try:
            mark.touch(exist_ok=False)
            if not folder.exists():
                return folder
            mark.unlink()
        except FileExistsError:
            pass
        folder = folder.with_name(f"{folder.name.removesuffix(f'-{n - 1}')}-{n}")


def _mark(folder: Path) -> Path:
    folder = folder.absolute()  # "." has no name
    return folder.with_name(f"{PART}name-{folder.name}")


def _refuse_inputs_in(folder: Path, args: Args) -> None:
    """Raise UserError if --overwrite would delete what this run reads."""
    folder = folder.resolve()
    for flag in INPUTS:
        for name in filter(None, (getattr(args, flag, None) or "").split(",")):
            path = str(Path(name.strip()).expanduser())
            for found in map(Path, glob.glob(path, recursive=True) or [path]):
                if found.exists() and folder in (found.resolve(), *found.resolve().parents):
                    raise UserError(
                        f"--overwrite would delete --{flag} {name}: choose another folder"
                    )


def lock_folder(folder: Path, args: Args):
    """Lock an earlier run's folder before its checkpoints are searched. Returns a file to keep
    open, or None if there is nothing to lock. Creates nothing in a dry run. The lock ends with its
    process, however that ends. Raises UserError if another run uses the folder."""
    keep = args.dry_run or not published(folder / "checkpoints")  # cmd.sh may have been lost
    try:
        return None if args.estimate else _lock(folder / "cmd.sh", "r+" if keep else "a")
    except FileNotFoundError:
        return None
    except BlockingIOError:
        raise UserError(f"--output_dir {folder}: another run is using it") from None
    except OSError as e:
        raise UserError(f"--output_dir {folder}: {e.strerror}: {e.filename}") from None


def take_folder(folder: Path, args: Args, held):
    """Create the folder, or empty it for --overwrite; returns its lock. held: what `lock_folder`
    returned. Raises UserError if another run has taken the folder since."""
    try:
        if args.overwrite and folder.exists():
            folder = folder.resolve()  # keep a symbolic link, and recreate its target
            if not held:
                _lock(folder / "cmd.sh", "a").close()
            shutil.rmtree(folder)
        elif held:
            return held
        folder.mkdir(parents=True, exist_ok=True)
        _mark(folder).unlink(missing_ok=True)
        if published(folder / "checkpoints"):
            raise FileExistsError
        return _lock(folder / "cmd.sh", "a" if args.resume == "auto" else "x")
    except (FileExistsError, BlockingIOError):
        raise UserError(f"--output_dir {folder}: another run is using it") from None


def _lock(file: Path, mode: str):
    opened = open(file, mode)
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return opened


def folder_gone(folder: Path) -> str:
    return f"{folder} is gone: it was deleted or moved during the run"


def last_checkpoint(folder: Path) -> str:
    """A clause that names the checkpoint to resume from."""
    newest = next(iter(published(folder / "checkpoints")), None)
    return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"


def published(folder: Path) -> list[Path]:
    """Checkpoints in a folder, newest first, intact or not."""
    return sorted(folder.glob("step_" + "[0-9]" * 8), reverse=True)
