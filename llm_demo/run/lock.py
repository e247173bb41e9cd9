"""The lock of a run's folder, so that only one run uses it."""

import fcntl
import os
from pathlib import Path

from llm_demo.core.errors import UserError
from llm_demo.machine.process import regular
from llm_demo.run.folder import delete_run, published


class Lock:
    """The lock of a run's folder: on its cmd.sh. It ends with its process, however that ends.

    mode: for opening cmd.sh. Raises UserError if another run has the lock, or made cmd.sh (x)."""

    def __init__(self, folder: Path, mode: str):
        self.path = folder / "cmd.sh"
        try:
            self.script = open(regular(self.path), mode, encoding="utf-8")
            fcntl.flock(self.script, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileExistsError, BlockingIOError):
            raise UserError(f"--output_dir {folder}: another run is using it") from None
        except FileNotFoundError:
            raise
        except OSError as e:  # some network file systems have no locks
            raise UserError(f"--output_dir {folder}: can't lock cmd.sh: {e.strerror}") from None

    def lost(self) -> bool:
        """Whether cmd.sh was deleted, moved or replaced, alone or with its folder."""
        try:
            return not os.path.samestat(os.fstat(self.script.fileno()), self.path.stat())
        except OSError:
            return True

    def close(self) -> None:
        self.script.close()


def lock_folder(folder: Path, args) -> Lock | None:
    """Lock an earlier run's folder before its checkpoints are searched. Returns None if there is
    nothing to lock. Creates nothing in a dry run. Raises UserError if another run uses the
    folder."""
    keep = args.dry_run or not published(folder / "checkpoints")  # cmd.sh may have been lost
    try:
        return None if args.estimate else Lock(folder, "r+" if keep else "a")
    except FileNotFoundError:
        return None


def take_folder(folder: Path, args, held: Lock | None) -> Lock:
    """Create the folder, or delete the run in it for --overwrite. Returns its lock. held: from
    `lock_folder`. Raises UserError if another run has taken the folder since."""
    if args.overwrite and folder.exists():
        held = held or Lock(folder, "a")
        delete_run(folder)
    if held:
        return held
    folder.mkdir(parents=True, exist_ok=True)
    if published(folder / "checkpoints"):
        raise UserError(f"--output_dir {folder}: another run is using it")
    return Lock(folder, "a" if args.resume == "auto" else "x")
