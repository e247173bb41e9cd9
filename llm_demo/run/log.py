"""What a run prints and records: the console, train.log, metrics.jsonl, trackers, the folder."""

import contextlib
import fcntl
import importlib
import json
import os
from pathlib import Path
from typing import TextIO

import torch

from llm_demo.core.errors import UserError, printable
from llm_demo.core.mesh import World
from llm_demo.flags.args import Args
from llm_demo.machine.dist import from_rank0
from llm_demo.machine.files import finite, write_text
from llm_demo.machine.process import read_json, regular
from llm_demo.machine.text import counted, progress, without_given_secrets
from llm_demo.run.folder import (
    choose_folder,
    delete_run,
    describe_run,
    float_of,
    published,
    read_records,
)


class Log:
    """Writes to a run's folder and the console. Every rank calls; only rank 0 writes and prints."""

    def __init__(self, args: Args, world: World, script: str):
        self.args, self.world = args, world
        self.is_main = world.rank == 0
        self.tracker = Tracker(args.report_to)
        self.folder = from_rank0(world, lambda: choose_folder(args, script))
        self.settings = dict(vars(args))  # for config.json: flags as resolved
        self.lock = self.file = self.metrics = None
        self.early, self.early_records = [], []  # until the folder exists
        from_rank0(world, self._lock)

    def _lock(self) -> None:
        self.lock = lock_folder(self.folder, self.args)

    def resolved(self, **settings) -> None:
        """Record settings that the flags left open, and the script's `parallelism`: a few words
        for the report and the model card."""
        self.settings |= settings

    def say(self, text: str, shown: str | None = None) -> None:
        """Print a line on rank 0 and write it to train.log. shown: what to print instead of it; "":
        nothing."""
        if not self.is_main:
            return
        text = printable(without_given_secrets(text))
        if self.file is None:
            self.early.append(text)
        else:
            with self.writing():
                print(text, file=self.file, flush=True)
        if shown != "":
            print(shown or text, flush=True)

    def decided(self, decision: tuple):
        """The value of a decision, whose lines are logged. decision: (value, lines)."""
        value, lines = decision
        for line in lines:
            self.say(line)
        return value

    def record(self, record: dict) -> None:
        """Append an object to metrics.jsonl, and to the tracker."""
        if not self.is_main:
            return
        if self.file is None:
            self.early_records.append(record)
            return
        with self.writing():
            print(json.dumps(finite(record)), file=self.metrics, flush=True)
            self.tracker.add(self.folder, record)

    @contextlib.contextmanager
    def writing(self):
        """Turn a failed write, or a folder that was deleted, into a UserError of one line."""
        try:
            self._check()
            yield
        except OSError as e:
            self._check()
            reason = f"{e.strerror or e}: {e.filename or self.folder}"
            raise UserError(f"--output_dir {self.folder}: {reason}") from e

    def gone(self) -> str:
        """A sentence if the folder was deleted, moved or replaced, else "". Ranks other than 0 only
        see that it is missing."""
        lost = is_lost(self.lock) if self.file else not self.folder.is_dir()
        return f"{self.folder} is gone: it was deleted or moved during the run" if lost else ""

    def _check(self) -> None:
        if self.file and self.gone():
            raise UserError(self.gone())

    def open(self, resumed_at: int) -> list[dict]:
        """Create the folder with config.json, env.json and cmd.sh. Every rank calls.

        Returns, on rank 0, the steps up to `resumed_at` that metrics.jsonl already holds. Called
        after the first step: a run that is refused or fails before that must neither empty an old
        run nor leave a folder that blocks the next attempt."""
        earlier = []

        def make():
            with self.writing():
                self.lock = take_folder(self.folder, self.args, self.lock)
                if (self.folder / "metrics.jsonl").exists():
                    earlier.extend(self._forget_steps_after(resumed_at))
                settings = {**self.settings, "output_dir": str(self.folder)}
                describe_run(self.folder, settings, self.world)
                self.metrics = open_log(self.folder / "metrics.jsonl")
                self.file = open_log(self.folder / "train.log")
                print(*self.early, sep="\n", file=self.file, flush=True)
            for record in self.early_records:
                self.record(record)

        torch.get_device_module(self.world.device).synchronize()
        torch.distributed.all_reduce(torch.zeros(1))  # on the CPU: waits for all ranks
        from_rank0(self.world, make)
        return earlier

    def _forget_steps_after(self, step: int) -> list[dict]:
        """Drop the records after `step` from metrics.jsonl, left by a killed run, and lines that
        are no records."""
        file = self.folder / "metrics.jsonl"
        lines, broken = read_records(file)
        if step and broken:
            self.say(f"resume: {counted(broken, 'unreadable line')} of metrics.jsonl removed")
        kept = [(line, r) for line, r in lines if r["step"] <= step] if step else []
        write_text(file, "".join(f"{line}\n" for line, _ in kept))
        return [
            {**r, "train/loss": float_of(r["train/loss"])}  # null: it was not finite
            for _, r in kept
            if "train/loss" in r and isinstance(r.get("perf/peak_mem_gb"), list)
        ]

    progress = staticmethod(progress)

    def close(self) -> None:
        """End the log of a run that is complete or stopped. Every rank may call."""
        if self.is_main:
            self.tracker.close()  # else a run that was stopped would appear as crashed
            self.file.close()
            self.metrics.close()
            self.lock.close()


def open_log(file: Path):
    """A text file to append to. What is no text is written as escapes."""
    return open(regular(file), "a", encoding="utf-8", errors="backslashreplace")


class Tracker:
    """Writes a run's numbers for TensorBoard, if asked. Weights & Biases reads them from there.

    report_to: of --report_to, whose packages are imported only then."""

    def __init__(self, report_to: str):
        self.report_to, self.writer = report_to, None
        if report_to == "none":
            return
        try:
            self.tensorboard = importlib.import_module("torch.utils.tensorboard")
            if report_to == "wandb":
                self.wandb = importlib.import_module("wandb")
        except ImportError as e:
            packages = "tensorboard" if report_to == "tensorboard" else "wandb tensorboard"
            raise UserError(f"--report_to {report_to}: run pip install {packages}") from e

    def add(self, folder: Path, record: dict) -> None:
        """Write the numbers of a record: of a list, such as one of each rank, the largest."""
        if self.report_to == "none":
            return
        if self.writer is None:
            self.writer = self._open(folder)
        for key, value in record.items():
            if isinstance(value, list) and value:
                value = max(value)
            if isinstance(value, (int, float)) and key != "step":
                self.writer.add_scalar(key, value, record["step"])
        self.writer.flush()

    def _open(self, folder: Path):
        config = read_json(folder / "config.json")
        if self.report_to == "wandb":
            self.wandb.init(
                project=os.environ.get("WANDB_PROJECT", "llm_demo"),
                name=folder.name,
                dir=folder,
                config=config,
                sync_tensorboard=True,  # of writers that are made from now on
            )
        writer = self.tensorboard.SummaryWriter(folder / "tb")
        rows = "\n".join(f"| {key} | {value} |" for key, value in config.items())
        writer.add_text("config", f"| setting | value |\n|---|---|\n{rows}")
        return writer

    def close(self) -> None:
        if self.writer:
            self.writer.close()
            if self.report_to == "wandb":
                self.wandb.finish()
        self.writer = None


def lock(folder: Path, mode: str) -> TextIO:
    """The lock of a run's folder: its open cmd.sh. It ends with its process, however that ends.

    mode: for opening cmd.sh. Raises UserError if another run has the lock, or made cmd.sh (x)."""
    try:
        script = open(regular(folder / "cmd.sh"), mode, encoding="utf-8")
        fcntl.flock(script, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return script
    except (FileExistsError, BlockingIOError):
        raise UserError(f"--output_dir {folder}: another run is using it") from None
    except FileNotFoundError:
        raise
    except OSError as e:  # some network file systems have no locks
        raise UserError(f"--output_dir {folder}: can't lock cmd.sh: {e.strerror}") from None


def is_lost(script: TextIO) -> bool:
    """Whether a locked cmd.sh was deleted, moved or replaced, alone or with its folder."""
    try:
        return not os.path.samestat(os.fstat(script.fileno()), os.stat(script.name))
    except OSError:
        return True


def lock_folder(folder: Path, args) -> TextIO | None:
    """Lock an earlier run's folder before its checkpoints are searched. Returns None if there is
    nothing to lock. Creates nothing in a dry run. Raises UserError if another run uses the
    folder."""
    keep = args.dry_run or not published(folder / "checkpoints")  # cmd.sh may have been lost
    try:
        return None if args.estimate else lock(folder, "r+" if keep else "a")
    except FileNotFoundError:
        return None


def take_folder(folder: Path, args, held: TextIO | None) -> TextIO:
    """Create the folder, or delete the run in it for --overwrite. Returns its lock. held: from
    `lock_folder`. Raises UserError if another run has taken the folder since."""
    if args.overwrite and folder.exists():
        held = held or lock(folder, "a")
        delete_run(folder)
    if held:
        return held
    folder.mkdir(parents=True, exist_ok=True)
    if published(folder / "checkpoints"):
        raise UserError(f"--output_dir {folder}: another run is using it")
    return lock(folder, "a" if args.resume == "auto" else "x")
