"""Checkpoints: written aside, hashed, published by a rename; found again whole, or passed over.

One format for both scripts, by torch.distributed.checkpoint: fp32 master weights and Adam's moments
under their Hugging Face names, whoever holds them in whatever pieces. So a run goes on with other
numbers of ranks or stages, and with the other script.

    checkpoints/step_00000020/   *.distcp, .metadata   torch.distributed.checkpoint's
                                 trainer.json          step, loss scale, what the run trains on
                                 manifest.json         size and SHA-256 of the others, written last
    checkpoints/latest           the name of the last one published
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from llm_demo.dist import World, from_rank0
from llm_demo.errors import Stopped, UserError

PART = ".part-"  # of what is not published, or not any more: never looked at, removed by the next


class Checkpoints:
    """A run's checkpoints: when to save, in which order, and what to keep."""

    def __init__(self, plan, args, world: World):
        self.run, self.args, self.world = plan.run, args, world
        self.describe_model = plan.describe_model
        self.last_step = plan.max_steps
        self.folder = plan.run.folder / "checkpoints"
        self.identity = plan.identity
        # the writing thread talks to its peers while the others train: a group of its own
        self.group = dist.new_group(backend="gloo")
        self.thread, self.problem, self.done = None, None, None
        self.staged, self.mesh, self.reserving = {}, None, None
        self.asked = False  # by a signal, to stop
        started = time.perf_counter()
        self.path = find(args, plan.run.folder, world, plan.run.say)
        self.seconds = time.perf_counter() - started
        self.facts = facts_of(self.path) if self.path else {}
        self.first_step = self.facts.get("step", 0)
        if found := differences(self.facts.get("identity", {}), self.identity) if self.path else []:
            said = f"{self.path} trained on other rows: {'; '.join(found)}"
            if not args.resume_anyway:
                raise UserError(f"{said}; --resume_anyway goes on all the same")
            plan.run.say(f"resume: {said}; going on, as asked")

    def load(self, tensors: dict) -> None:
        """Fill tensors from the checkpoint that --resume has found."""
        started = time.perf_counter()
        load(self.path, tensors, self.world, self.group)
        load_rng(self.path, self.world)
        seconds = self.seconds + time.perf_counter() - started
        self.run.say(
            f"resume: {self.path}, after step {self.first_step}, checked and read in "
            f"{seconds:.2f} s"
        )

    def begin(self) -> None:
        """From here on a signal ends the run at the end of a step, with a checkpoint."""
        if not self.args.save:
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)
        if self.world.rank == 0:
            for left in self.folder.glob(f"{PART}*"):  # by a killed run
                shutil.rmtree(left, ignore_errors=True)
            self.describe_model(self.run.folder / "model")

    def _ask(self, *_signal):
        self.asked = True

    def after_step(self, step: int, tensors, facts) -> None:
        """Save if it is time to: tensors() -> {name: tensor}, facts() -> JSON. Every rank calls,
        after every step. Raises Stopped once a signal on any rank is answered by a checkpoint."""
        if not self.args.save:
            return
        self._report()
        asked = torch.tensor(2 if self.problem else int(self.asked))
        with self.run.comm.mute():  # on the CPU: the GPU works on
            dist.all_reduce(asked, dist.ReduceOp.MAX)
        if asked == 2:  # on all ranks in the same step, whoever knew it first
            self.finish()
        every, last = self.args.save_every, step == self.last_step
        if every and step == self.first_step + 1 and self.args.save_async and not last:
            self._reserve(tensors())
        if asked or last or every and step % every == 0:
            self.save(step, tensors(), facts(), wait=bool(asked or last))
        if asked and not last:
            raise Stopped(
                f"stopped after step {step}, which is saved: the same command with --resume auto "
                "goes on"
            )

    def save(self, step: int, tensors: dict, facts: dict, wait: bool) -> None:
        """Write a checkpoint, in the background unless `wait`; training stands still until its
        tensors are copied. Raises UserError if this one, or the one before, can't be written."""
        started = time.perf_counter()
        self.run.flush()  # metrics.jsonl holds all steps up to this one
        self.finish()
        tensors = {**tensors, **rng_state(self.world)}
        facts = {"step": step, **facts, **self.run.facts(step), "identity": self.identity}
        name = f"step_{step:08d}"
        if wait or not self.args.save_async:
            self._write(name, tensors, facts, started)
            self.finish()
        else:
            work = (name, self._stage(tensors), facts, started, time.perf_counter())
            self.thread = threading.Thread(target=self._write, args=work, daemon=True)
            self.thread.start()
        self.run.restart_clock()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises UserError if it can't be."""
        if self.thread:
            self.thread.join()
            self.thread = None
        if self.problem:
            raise UserError(self.problem)
        self._report()

    def _report(self) -> None:
        """Log the checkpoint that the writing thread has published, if it has."""
        if self.done:
            done, self.done = self.done, None
            self.run.log_save(*done)

    def export(self) -> None:
        """With --export: the last checkpoint as a Hugging Face folder, hf/ beside it."""
        if self.args.export != "none" and self.world.rank == 0:
            from llm_demo.export import export  # which imports this module

            out = self.run.folder / "hf"
            shutil.rmtree(out, ignore_errors=True)  # of an earlier end of this run
            self.run.say(export(published(self.folder)[0], out, self.args.export))

    def _reserve(self, tensors: dict) -> None:
        """Take pinned memory for a GPU's copies while training goes on: it takes seconds. Where
        there is little left, checkpoints are not written in the background."""
        found = {name: _local(t) for name, t in {**tensors, **rng_state(self.world)}.items()}
        places, total = {}, 0
        for name, t in found.items():
            places[name] = slice(total, total + t.nbytes)
            total += -(-t.nbytes // 64) * 64
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world.size))
        short = torch.tensor(int(total * here > 0.8 * psutil.virtual_memory().available))
        with self.run.comm.mute():
            dist.all_reduce(short, dist.ReduceOp.MAX)
        if short:
            self.args.save_async = False
            self.run.say("checkpoints: training waits for them, the host has no room for copies")
        elif self.world.device.type == "cuda":

            def reserve():
                torch.cuda.set_device(self.world.device)  # a thread begins with the first one
                memory = torch.empty(total, dtype=torch.uint8).zero_()
                # pinned as it is: PyTorch's own rounds each allocation up to a power of two
                torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), total, 1)
                for name, t in found.items():
                    self.staged[name] = memory[places[name]].view(t.dtype).view(t.shape)

            self.reserving = threading.Thread(target=reserve, daemon=True)
            self.reserving.start()

    def _stage(self, tensors: dict) -> dict:
        """Copies in the host's memory, in the same buffers each time, pinned for a GPU."""
        if self.reserving:
            self.reserving.join()
        if self.mesh is None and any(isinstance(t, DTensor) for t in tensors.values()):
            self.mesh = init_device_mesh("cpu", (self.world.size,))
        found = {}
        for name, t in tensors.items():
            local = _local(t)
            if name not in self.staged:
                self.staged[name] = torch.empty_like(local, device="cpu")
            found[name] = self.staged[name].copy_(local, non_blocking=True)
            if isinstance(t, DTensor):
                found[name] = DTensor.from_local(
                    found[name], self.mesh, t.placements, shape=t.shape, stride=t.stride()
                )
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return found

    def _write(self, name: str, tensors: dict, facts: dict, started, went_on=None) -> None:
        part = self.folder / f"{PART}{name}"
        try:
            size = write(part, tensors, facts, self.world, self.group)

            def show():
                if self.world.rank == 0:
                    publish(part, self.folder / name)
                    self._prune(name)

            together(show, self.world, self.group)
            now = time.perf_counter()
            self.done = self.folder / name, size, now - started, (went_on or now) - started
        except (Exception, dcp.CheckpointException) as e:  # of a thread: the next step's business
            if self.world.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            free = shutil.disk_usage(self.run.folder).free / 1e6
            self.problem = (
                f"checkpoint {self.folder / name} can't be written: {reason_of(e)} ({free:,.0f} MB "
                "are free there); those before it are whole"
            )

    def _prune(self, newest: str) -> None:
        """Remove all but the newest, the K newest, and the best by held-out loss. Rank 0."""
        if not self.args.keep_last:
            return
        names = [path.name for path in published(self.folder)]
        keep = {newest, *names[: self.args.keep_last]}
        if self.args.keep_best:
            losses = {n: facts_of(self.folder / n).get("eval_loss") for n in names}
            known = {n: loss for n, loss in losses.items() if loss is not None}
            keep |= {min(known, key=known.get)} if known else set()
        for name in set(names) - keep:
            (self.folder / name).rename(self.folder / f"{PART}{name}")
            shutil.rmtree(self.folder / f"{PART}{name}", ignore_errors=True)


# ---------------------------------------------------------------- files


def together(act, world: World, group=None) -> list:
    """What act() returns on each rank; an OSError on one is raised on all, so that nobody waits."""
    mine = error = None
    try:
        mine = act()
    except OSError as e:
        error = str(e)
    found = [None] * world.size
    dist.all_gather_object(found, (mine, error), group=group)
    if errors := [e for _, e in found if e]:
        raise OSError(errors[0])
    return [mine for mine, _ in found]


def write(part: Path, tensors: dict, facts: dict, world: World, group=None) -> int:
    """Write tensors and facts to the folder `part`, with a manifest; every rank calls. Returns the
    bytes of all ranks. Raises OSError, or what torch.distributed.checkpoint raises."""
    first = world.rank == 0

    def make():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)

    def hashed():
        names = [file.name for file in part.glob(f"__{world.rank}_*")]
        if first:
            _write_json(part / "trainer.json", facts)
            names += [".metadata", "trainer.json"]
        return {name: [(part / name).stat().st_size, digest(part / name)] for name in names}

    together(make if first else lambda: None, world, group)
    writer = dcp.FileSystemWriter(part, thread_count=1, sync_files=True)
    dcp.save(tensors, storage_writer=writer, process_group=group)
    files = {k: v for rank in together(hashed, world, group) for k, v in rank.items()}
    manifest = functools.partial(_write_json, part / "manifest.json", {"files": files})
    together(manifest if first else lambda: None, world, group)
    return sum(size for size, _ in files.values())


def publish(part: Path, final: Path) -> None:
    """Give a folder that is whole its name, and only then point `latest` at it."""
    _sync(part)
    if final.exists():  # of the same step, from before a resume further back
        old = final.with_name(f"{PART}old-{final.name}")
        final.rename(old)
        part.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        part.rename(final)
    _sync(final.parent)
    _write_text(final.parent / "latest", final.name + "\n")


def published(folder: Path) -> list[Path]:
    """Checkpoints in a folder, newest first, whole or not."""
    return sorted(folder.glob("step_" + "[0-9]" * 8), reverse=True)


def facts_of(path: Path) -> dict:
    try:
        return json.loads((path / "trainer.json").read_text())
    except (OSError, ValueError):
        return {}


def problem_of(path: Path, world: World) -> str | None:
    """Why a checkpoint is not whole; None if it is. Every rank calls and reads a share of it."""

    def look():
        try:
            files = json.loads((path / "manifest.json").read_text())["files"]
        except (OSError, ValueError, KeyError) as e:
            return {}, f"manifest.json: {getattr(e, 'strerror', None) or e}"
        for name, (size, _) in files.items():
            try:
                found = (path / name).stat().st_size
            except OSError as e:
                return files, f"{name}: {e.strerror}"
            if found != size:
                return files, f"{name} has {found:,} bytes, not {size:,}"
        return files, None

    files, problem = from_rank0(world, look)
    if problem:
        return problem
    mine = None
    for name in sorted(files)[world.rank :: world.size]:
        try:
            if digest(path / name) != files[name][1]:
                mine = f"{name} is not what was written: its SHA-256 differs"
        except OSError as e:
            mine = f"{name}: {e.strerror}"
    found = [None] * world.size
    dist.all_gather_object(found, mine)
    return next((p for p in found if p), None)


def find(args, run_folder: Path, world: World, say) -> Path | None:
    """The checkpoint that --resume asks for, whole; None to start from the beginning. Raises
    UserError if one was named and is not whole."""
    if not args.resume:
        return None
    auto = args.resume == "auto"
    named = run_folder if auto else Path(args.resume)
    if not auto and from_rank0(world, (named / "manifest.json").exists):
        if problem := problem_of(named, world):
            raise UserError(f"--resume {named}: {problem}")
        return named
    folder = named / "checkpoints"
    for path in from_rank0(world, lambda: published(folder)):
        problem = problem_of(path, world)
        if not problem:
            return path
        say(f"resume: {path.name} is passed over: {problem}")
    if not auto:
        raise UserError(f"--resume {named}: no whole checkpoint there")
    say(f"resume: no checkpoint in {folder}, from the start")
    return None


def differences(before: dict, now: dict, prefix: str = "") -> list[str]:
    """What differs between two identities, by name: "seed was 1, is 2"."""
    found = []
    for key in {**before, **now}:
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key} ")
        elif a != b:
            found.append(f"{prefix}{key} was {a}, is {b}")
    return found


def load(path: Path, tensors: dict, world: World, group=None) -> None:
    """Fill `tensors` ({name: tensor or DTensor}, in place) from a checkpoint, in whatever pieces it
    was saved; every rank calls. Raises UserError where names or shapes are another model's."""
    reader = dcp.FileSystemReader(path)
    there = {
        name: tuple(found.size)
        for name, found in reader.read_metadata().state_dict_metadata.items()
        if hasattr(found, "size") and not name.startswith("rng.")
    }
    here = [None] * world.size
    mine = {name: tuple(t.shape) for name, t in tensors.items() if not name.startswith("rng.")}
    dist.all_gather_object(here, mine)
    wanted = {name: shape for rank in here for name, shape in rank.items()}
    for name in sorted({*wanted, *there}):
        if wanted.get(name) != there.get(name):
            raise UserError(
                f"{path} is of another model: {name} is {there.get(name, 'missing')} there, "
                f"{wanted.get(name, 'missing')} here"
            )
    try:
        dcp.load(tensors, storage_reader=reader, process_group=group)
    except dcp.CheckpointException as e:
        raise UserError(f"{path} can't be read: {reason_of(e)}") from e


def reason_of(error: BaseException) -> str:
    """One line of what went wrong, of the rank where it did."""
    if isinstance(error, dcp.CheckpointException):  # no Exception, and its text is a traceback
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return (lines[-1] if lines else repr(error))[:300]


def _local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def rng_state(world: World) -> dict[str, torch.Tensor]:
    """This rank's random number generators, under names of its own. Training draws from none."""
    state = {f"rng.cpu.{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        state[f"rng.cuda.{world.rank}"] = torch.cuda.get_rng_state()
    return state


def load_rng(path: Path, world: World) -> None:
    """Set them again where the checkpoint has those of a rank of this number."""
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: t for name, t in rng_state(world).items() if name in names}
    with contextlib.suppress(RuntimeError):  # of another kind of device
        read(path, state)
        for name, t in state.items():
            torch.cuda.set_rng_state(t) if "cuda" in name else torch.set_rng_state(t)


def read(path: Path, tensors: dict) -> None:
    """Fill whole tensors by name, in this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no_dist means a single process
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def digest(file: Path) -> str:
    found = hashlib.sha256()
    with open(file, "rb") as f:
        while block := f.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def _write_json(file: Path, what) -> None:
    _write_text(file, json.dumps(what, indent=1) + "\n")


def _write_text(file: Path, text: str) -> None:
    """Replace a small file at once."""
    part = file.with_name(f"{PART}{file.name}")
    with open(part, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    part.replace(file)


def _sync(folder: Path) -> None:
    """Make names in a folder survive a loss of power."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
