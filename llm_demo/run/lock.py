"""A run's folder while the run uses it: locked, so that only one does, and kept whole."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from llm_demo.core.errors import UserError
from llm_demo.machine.process import regular
from llm_demo.run.folder import delete_run, published


class Lock:
    """The lock of a run's folder: on cmd.sh, and on the folder itself, since cmd.sh may be deleted.
    It ends with its process, however that ends.

    mode: for opening cmd.sh. Raises UserError if another run has the lock, or made cmd.sh (x)."""

    def __init__(self, folder: Path, mode: str):
        self.folder, self.number, self.script = folder, None, None
        self.number = os.open(folder, os.O_RDONLY)  # so no other folder gets its inode
        try:
            self._take(self.number)
            self.take_script(mode)
        except BaseException:
            self.close()
            raise

    def _take(self, opened) -> None:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output_dir {self.folder}: another run is using it") from None
        except OSError:  # some network file systems can't lock a folder
            if opened is self.script:
                raise

    def take_script(self, mode: str) -> None:
        """Open and lock cmd.sh, once more if it is another file now."""
        before = self.script
        try:
            self.script = open(regular(self.folder / "cmd.sh"), mode, encoding="utf-8")
        except FileExistsError:
            raise UserError(f"--output_dir {self.folder}: another run is using it") from None
        self._take(self.script)
        if before:
            before.close()

    def make_folder(self, name: str) -> None:
        """Make a folder in the one that was locked, whatever lies at its name now."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=self.number)

    def of_folder(self) -> bool:
        """Whether the folder of this name is still the one that was locked."""
        return _same(self.number, self.folder)

    def of_script(self) -> bool:
        """Whether cmd.sh is still the file that was locked."""
        return _same(self.script.fileno(), self.folder / "cmd.sh")

    def close(self) -> None:
        if self.number is not None:
            os.close(self.number)
            self.number = None
        if self.script:
            self.script.close()

    __del__ = close


def _same(number: int, path: Path) -> bool:
    """Whether an open file is what lies at this path."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


def lock_folder(folder: Path, args) -> Lock | None:
    """Lock an earlier run's folder before its checkpoints are searched. Returns None if there is
    nothing to lock. Creates nothing in a dry run. Raises UserError if another run uses the
    folder."""
    keep = args.dry_run or not published(folder / "checkpoints")  # cmd.sh may have been lost
    try:
        return None if args.estimate else Lock(folder, "r+" if keep else "a")
    except FileNotFoundError:
        return None
    except OSError as e:
        raise UserError(f"--output_dir {folder}: {e.strerror}: {e.filename}") from None


def take_folder(folder: Path, args, held: Lock | None) -> Lock:
    """Create the folder, or delete the run in it for --overwrite. Returns its lock. held: from
    `lock_folder`. Raises UserError if another run has taken the folder since."""
    if args.overwrite and folder.exists():
        held = held or Lock(folder, "a")
        delete_run(folder)
        held.take_script("x")
    if held:
        return held
    folder.mkdir(parents=True, exist_ok=True)
    if published(folder / "checkpoints"):
        raise UserError(f"--output_dir {folder}: another run is using it")
    return Lock(folder, "a" if args.resume == "auto" else "x")


def content_of_run(folder: Path) -> dict[str, bytes]:
    """{name: content} of the files that describe a run: cmd.sh, config.json, env.json, model/."""
    files = [*map(folder.joinpath, ("cmd.sh", "config.json", "env.json")), *folder.glob("model/*")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()}


def put_back(lock: Lock, files: dict[str, bytes]) -> list[str]:
    """Write those files of a run's folder again that were deleted, and lock cmd.sh again. Returns
    their names. files: from `described`. Raises UserError if another run has taken the folder."""
    missing = [name for name in files if not os.path.lexists(lock.folder / name)]
    if not lock.of_script():
        lock.take_script("a")
    for name in missing:
        file = lock.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(files[name])
    return missing


def reopened(opened, file: Path) -> tuple:
    """(a log, open, whether it was deleted). opened: it, as it was opened before, from which its
    content is copied if it was deleted."""
    if _same(opened.fileno(), file):
        return opened, False
    deleted = not file.exists()  # else someone has written it anew
    with opened:
        new = open_log(file)
        if deleted:
            opened.seek(0)
            shutil.copyfileobj(opened, new)
            new.flush()
    return new, deleted


def open_log(file: Path):
    """A text file to append to, which can also be read. What is no text is written as escapes."""
    return open(regular(file), "a+", encoding="utf-8", errors="backslashreplace")


def folder_gone(folder: Path) -> str:
    return f"{folder} is gone: it was deleted or moved during the run"
