"""A checkpoint as files: written aside, hashed, published by a rename; found again, or passed over.

One format for both scripts, by torch.distributed.checkpoint: fp32 master weights and Adam's moments
under their Hugging Face names, whoever holds them in whatever pieces. So a run goes on with other
numbers of ranks or stages, and with the other script.

    checkpoints/step_00000020/   *.distcp, .metadata   torch.distributed.checkpoint's
                                 trainer.json          step, loss scale, what the run trains on
                                 manifest.json         size and SHA-256 of the others, written last
    checkpoints/latest           the name of the last one published
"""

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from llm_demo.dist import World, from_rank0
from llm_demo.errors import UserError

PART = ".part-"  # of what is not published, or not any more: never looked at, removed by the next


def together(act, world: World, group=None) -> list:
    """What act() returns on each rank; an error on one is an OSError on all: nobody waits."""
    mine = error = None
    try:
        mine = act()
    except Exception as e:
        error = reason_of(e)
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

    def finish():
        for name, (size, _) in files.items():  # another node's, too
            if not (part / name).exists() or (part / name).stat().st_size != size:
                raise OSError(f"rank 0 does not see {name}: do all nodes share --output_dir?")
        _write_json(part / "manifest.json", {"files": files})

    together(finish if first else lambda: None, world, group)
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
            raise UserError(f"{named}: {problem}")
        return named
    folder = named / "checkpoints"
    for path in from_rank0(world, lambda: published(folder)):
        problem = problem_of(path, world)
        if not problem:
            return path
        say(f"resume: {path.name} is passed over: {problem}")
    if not auto:
        raise UserError(f"{named}: no whole checkpoint there")
    say(f"resume: no checkpoint in {folder}, from the start")
    return None


def shapes_of(path: Path) -> dict[str, tuple]:
    """{name: shape} of a checkpoint's weights and moments."""
    there = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: tuple(t.size) for name, t in there.items() if not name.startswith("rng.")}


def load(path: Path, tensors: dict, world: World, group=None) -> None:
    """Fill `tensors` ({name: tensor or DTensor}, in place) from a checkpoint, in whatever pieces it
    was saved; every rank calls. Raises UserError where names or shapes are another model's."""
    there = shapes_of(path)
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
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), process_group=group)
    except dcp.CheckpointException as e:
        raise UserError(f"{path} can't be read: {reason_of(e)}") from e


def reason_of(error: BaseException) -> str:
    """One line of what went wrong, of the rank where it did."""
    if isinstance(error, dcp.CheckpointException):  # no Exception, and its text is a traceback
        error = next(iter(error.failures.values()))[0]
    cause = error  # a full disk may show as an error of the file's format
    while cause and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    lines = str(cause or error).strip().splitlines()
    return (lines[-1] if lines else repr(error))[:300]


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
