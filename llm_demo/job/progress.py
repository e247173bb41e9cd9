"""Show the progress of slow work: a bar on a terminal, occasional lines in a file."""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tqdm import tqdm

DELAY = 2  # seconds of work before anything is shown
EVERY = 10  # seconds between lines if stderr is not a terminal


def progress(
    iterable: Iterable | None = None, what: str = "", total: float | None = None, unit: str = "it"
) -> tqdm:
    """Show the progress of `what` on stderr once it has taken DELAY seconds; rank 0 only.

    Iterate over it, or use it as a context manager and call update(n). total: default is the
    iterable's length. unit "B": bytes, shown as kB, MB, GB."""
    size = shutil.get_terminal_size()  # 80 x 24 if the terminal reports none; tqdm shows nothing
    bar = sys.stderr.isatty()
    return (tqdm if bar else _Lines)(
        iterable, desc=what, total=total, unit=unit, unit_scale=unit == "B", delay=DELAY,
        file=sys.stderr, disable=os.environ.get("RANK", "0") != "0", ncols=size.columns,
        nrows=size.lines, mininterval=0.1 if bar else EVERY,
    )  # fmt: skip


@contextlib.contextmanager
def watched(what: str, total: float | None, measure: Callable[[], float], unit: str = "B"):
    """Show the progress of a block that cannot report it: a thread calls `measure()`, the amount
    done, twice a second. A block that ends without an error counts as complete."""
    over = threading.Event()

    def watch():
        while not over.wait(0.5):
            bar.update(max(0, measure() - bar.n))

    with progress(what=what, total=total, unit=unit) as bar:
        thread = threading.Thread(target=watch, daemon=True)
        if not bar.disable:
            thread.start()
        done = None
        try:
            yield bar
            done = total  # measure()'s subject may be gone by now, such as a renamed folder
        finally:
            over.set()
            if not bar.disable:
                thread.join()
                bar.update(max(0, (measure() if done is None else done) - bar.n))


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder that is being written; 0 if it does not exist."""
    total = 0
    with contextlib.suppress(OSError):  # a file may be renamed meanwhile
        for file in folder.iterdir():
            total += file.stat().st_size
    return total


class _Lines(tqdm):
    """tqdm for a log file: a line every EVERY seconds and one at the end, without control codes."""

    said = None  # the amount on the last line

    def display(self, msg=None, pos=None):
        self.said, unit = self.n, self.unit if self.unit_scale else f" {self.unit}"
        amounts = "{n_fmt} of {total_fmt}%s, {percentage:.0f}%%" if self.total else "{n_fmt}%s"
        form = {"bar_format": "{desc}: " + amounts % unit + ", {elapsed}"}
        print(self.format_meter(**self.format_dict | form), file=self.fp, flush=True)

    def close(self):
        if not self.disable:
            if time.time() - self.start_t >= self.delay and self.said != self.n:
                self.display()
            self.last_print_t = self.start_t  # so that tqdm clears nothing
        super().close()
