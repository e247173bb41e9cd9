"""Choose a run's folder, and lock it so that only one run uses it. args: the flags."""

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

from llm_demo.core.errors import UserError
from llm_demo.job.files import PART, ROOT
from llm_demo.job.process import regular

# flags that name what a run reads; not every script has all of them
INPUTS = ("model_name_or_path", "tokenizer_name_or_path", "chat_template", "train_json",
          "eval_json", "deepspeed_config")  # fmt: skip


def choose_folder(args, script: str) -> Path:
    """The run's folder, not yet created or emptied. Raises UserError if it can't be used."""
    model = Path(args.model_name_or_path).name
    name = f"{script}-{model}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(args.output_dir) if args.output_dir else ROOT / "runs" / name
    if folder.is_symlink() and not folder.exists():
        raise UserError(
            f"--output_dir {folder} is a link to {os.readlink(folder)}, which does not exist: "
            "create that folder, or remove the link"
        )
    if args.overwrite:
        _refuse_places_in(folder)
    place = folder.absolute()
    above = next((p for p in place.parents if p.exists()), place)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file: choose another name")
    try:  # access() allows root everything, even in /proc
        os.rmdir(tempfile.mkdtemp(prefix=".llm_demo-", dir=above))
    except OSError as e:
        raise UserError(f"--output_dir {folder}: can't be created in {above}: {e.strerror}") from e
    if not args.output_dir:
        return folder if args.dry_run or args.estimate else _reserve(folder)
    for run in filter(is_run, folder.resolve().parents):
        raise UserError(f"--output_dir {folder} is inside {run}, the folder of another run")
    if args.overwrite:
        _refuse_inputs_in(folder, args)
    if folder.exists() and any(folder.iterdir()):
        if not (args.overwrite or args.resume == "auto"):
            raise UserError(
                f"--output_dir {folder} is not empty: choose another, or add --overwrite, or "
                "--resume auto to continue"
            )
        ours = is_run(folder)
        if not ours and args.resume:  # killed early, or cmd.sh is lost
            ours = [f.name for f in folder.iterdir()] == ["cmd.sh"] or published(
                folder / "checkpoints"
            )
        if not ours:
            raise UserError(f"--output_dir {folder} is not a run's folder, so it is left unchanged")
        _refuse_links(folder)
    return folder


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run."""
    return all((folder / name).is_file() for name in ("cmd.sh", "config.json"))


def refuse_inside_checkpoints(out: Path) -> None:
    """Raise UserError if a tool would write into a run's checkpoints, which the run deletes."""
    for above in out.resolve().parents:
        if above.name == "checkpoints" and (is_run(above.parent) or published(above)):
            raise UserError(f"{out} is inside {above}, where a run keeps its checkpoints")


def _refuse_links(folder: Path) -> None:
    """Raise UserError for a link or a pipe in a run's folder, which may be a stranger's: the run
    would write through it."""
    for above, folders, files in os.walk(folder):
        for path in (Path(above, name) for name in folders + files):
            if path.is_symlink() or path.is_fifo():
                raise UserError(
                    f"--output_dir {folder}: {path.relative_to(folder)} is a link or a pipe, and "
                    "the run would write elsewhere: remove it"
                )
        folders[:] = [name for name in folders if name != "wandb"]  # has links of its own


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


def _refuse_places_in(folder: Path) -> None:
    """Raise UserError if --overwrite would delete more than a run."""
    home = Path(os.path.expanduser("~")).resolve()
    for what, kept in (
        ("the working folder", [*Path.cwd().parents]),
        ("your home folder", [home, *home.parents]),
        ("the repository", [ROOT, *ROOT.parents]),
    ):
        if folder.resolve() in kept:
            raise UserError(f"--overwrite would delete {what}, in --output_dir {folder}")


def _refuse_inputs_in(folder: Path, args) -> None:
    """Raise UserError if --overwrite would delete what this run reads."""
    folder = folder.resolve()
    for flag in INPUTS:
        for name in filter(None, (getattr(args, flag, None) or "").split(",")):
            path = str(Path(name.strip()).expanduser())
            paths = (path, path.rpartition("*")[0] or path)  # it may have a weight
            for found in (Path(p) for p in paths for p in glob.glob(p, recursive=True) or [p]):
                if found.exists() and folder in (found.resolve(), *found.resolve().parents):
                    raise UserError(
                        f"--overwrite would delete --{flag} {name}: choose another folder"
                    )


def lock_folder(folder: Path, args):
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


def take_folder(folder: Path, args, held):
    """Create the folder, or empty it for --overwrite, when it may be the working folder; returns
    its lock. held: what `lock_folder` returned. Raises UserError if another run has taken the
    folder since."""
    try:
        if args.overwrite and folder.exists():
            if not held:
                _lock(folder / "cmd.sh", "a").close()
            for path in folder.iterdir():
                real = path.is_dir() and not path.is_symlink()
                shutil.rmtree(path) if real else path.unlink()
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
    opened = open(regular(file), mode)
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
