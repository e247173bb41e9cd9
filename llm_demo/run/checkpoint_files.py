"""A checkpoint's files: write, hash, publish by a rename, find, verify and load.

All scripts use one format of torch.distributed.checkpoint: fp32 master weights and Adam's moments
under their Hugging Face names, however they are sharded. So a run can resume with a different
number of ranks or stages, or with another script.

    checkpoints/step_00000020/   *.distcp, .metadata   torch.distributed.checkpoint's
                                 trainer.json          step, loss scale, what the run trains on
                                 manifest.json         size and SHA-256 of the others, written last
    checkpoints/latest           the name of the last one published

.metadata, the index of tensors, is a pickle, and unpickling can run any command. So it is read into
inert records: only names that torch.distributed.checkpoint (DCP) writes are accepted, and none of
them is imported. DCP's own objects are then built from the records, with every value checked.
"""

import pickle
import re
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.core.optim import MOMENTS, PSGD
from llm_demo.machine.dist import from_rank0, on_all_ranks
from llm_demo.machine.files import PART, digest, disk_full, sync_folder, write_json, write_text
from llm_demo.machine.process import read_json
from llm_demo.machine.text import blame, words_of
from llm_demo.model.local_model import refuse_deepspeed
from llm_demo.run.folder import object_in, published


def write(part: Path, tensors: dict, facts: dict, world: World, group=None) -> int:
    """Write tensors and facts to the folder `part`, with a manifest. Every rank calls. Returns the
    bytes of all ranks. Raises OSError, or what torch.distributed.checkpoint raises."""
    first = world.rank == 0

    def make():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()  # not with parents: the run's folder may be another one now

    def hashed():
        names = [file.name for file in part.glob(f"__{world.rank}_*")]
        if first:
            write_json(part / "trainer.json", facts)
            names += [".metadata", "trainer.json"]
        return {name: [(part / name).stat().st_size, digest(part / name)] for name in names}

    on_all_ranks(make if first else lambda: None, world, group)
    # Copying ahead waits for the current stream every 10 MB, even if no tensor is on a device. In
    # the writing thread that is the first GPU's: rank 0's steps, or another rank's context there.
    on_gpu = any(t.is_cuda for t in tensors.values())
    ahead = {} if on_gpu else {"per_thread_copy_ahead": 0}
    writer = dcp.FileSystemWriter(part, thread_count=1, sync_files=True, **ahead)
    dcp.save(tensors, storage_writer=writer, process_group=group)
    files = {k: v for rank in on_all_ranks(hashed, world, group) for k, v in rank.items()}

    def finish():
        for name, (size, _) in files.items():  # files of other nodes, too
            if not (part / name).exists() or (part / name).stat().st_size != size:
                raise OSError(f"rank 0 can't see {name}: all nodes must share --output_dir")
        write_json(part / "manifest.json", {"files": files})

    on_all_ranks(finish if first else lambda: None, world, group)
    return sum(size for size, _ in files.values())


def publish(part: Path, final: Path) -> None:
    """Rename a complete folder to its final name, then point `latest` at it."""
    sync_folder(part)
    old = final.with_name(f"{PART}old-{final.name}")
    if final.exists():  # the same step, from before a resume at an earlier one
        final.rename(old)
    part.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    sync_folder(final.parent)
    write_text(final.parent / "latest", final.name + "\n")


# Entries of trainer.json and their types. Runs without adapters, or of earlier versions, have not
# all of those in OPTIONAL.
REQUIRED = {
    **dict.fromkeys(("step", "adam_steps", "tokens", "label_tokens"), int),
    **dict.fromkeys(("evals", "exact"), list),
    "loss_scale": dict,
    "eval_loss": (float, int, type(None)),
}
OPTIONAL = dict.fromkeys(("identity", "settings", "model", "adapters"), dict)


def checked_facts(path: Path) -> dict:
    """A checkpoint's trainer.json. Raises UserError if an entry is missing or has the wrong type:
    the file may come from elsewhere, or from an earlier version."""
    facts = object_in(path / "trainer.json")
    missing = REQUIRED.keys() - facts.keys()
    if missing:
        lack = f"trainer.json has no {min(missing)}"
        raise UserError(f"{path} is not a checkpoint of this version: {lack}")
    for name, kinds in {**REQUIRED, **OPTIONAL}.items():
        if name in facts and not isinstance(facts[name], kinds):
            raise UserError(f"{path}/trainer.json: invalid {name}: {str(facts[name])[:60]!r}")
    return facts


def manifest_of(path: Path) -> dict[str, tuple[int, str]]:
    """{file: (bytes, SHA-256)} of a checkpoint, whose files have these sizes. Raises UserError for
    what a stranger may have written: nothing outside the folder is opened, no device, no pipe."""
    with blame("manifest.json"):
        listed = read_json(path / "manifest.json")["files"]
        files = {name: (size, sha) for name, (size, sha) in listed.items()}
    for name, (size, _) in files.items():
        if Path(name).name != name:
            raise UserError(f"manifest.json: {name[:80]!r} is not a checkpoint file")
        if not (path / name).is_file():
            raise UserError(f"{name} is missing, or is not a regular file")
        found = (path / name).stat().st_size
        if found != size:
            raise UserError(f"{name} has {found:,} bytes instead of {size}")
    missing = {".metadata", "trainer.json"} - files.keys()
    if missing:
        raise UserError(f"manifest.json does not list {min(missing)}")
    return files


def refuse_damaged(path: Path, world: World, tensors: bool) -> None:
    """Raise UserError or OSError, on every rank, for a checkpoint that is not intact. Each rank
    reads a share of it. tensors: read their files too, which takes long."""

    def compare():
        for name in names[world.rank :: world.size]:
            if digest(path / name) != files[name][1]:
                raise OSError(f"{name} has changed since it was written: its SHA-256 differs")

    files = from_rank0(world, lambda: manifest_of(path))
    names = sorted(name for name in files if tensors or not name.endswith(".distcp"))
    on_all_ranks(compare, world)


def find_checkpoint(
    resume: str | None, run_folder: Path, world: World, say, tensors: bool = True
) -> Path | None:
    """The intact checkpoint that --resume asks for; None to start from the beginning. Raises
    UserError if a named checkpoint is damaged, or all of a run are. tensors: see refuse_damaged."""
    if not resume:
        return None
    auto = resume == "auto"
    named = run_folder if auto else Path(resume)
    is_one = not auto and from_rank0(world, (named / "manifest.json").exists)
    paths = [named] if is_one else from_rank0(world, lambda: published(named / "checkpoints"))
    for path in paths:
        try:
            refuse_damaged(path, world, tensors)
            return path
        except (UserError, OSError) as e:
            problem = e
        say(f"resume: {path.name} skipped: {problem}")
    if auto and not paths:
        say(f"resume: no checkpoint in {named}/checkpoints, starting from step 1")
        return None
    if auto:
        raise UserError(
            f"no checkpoint in {named}/checkpoints is intact: to start again from step 1, move it "
            "away"
        )
    from_rank0(world, lambda: refuse_deepspeed(named))
    raise UserError(f"{named}: {problem if is_one else 'it has no intact checkpoint'}")


# What DCP pickles in addition to dtypes. BytesStorageMetadata is left out: DCP unpickles such items
# without restrictions, and this project's checkpoints hold tensors only.
PICKLED = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    **dict.fromkeys(("pathlib", "pathlib._local"), ("PosixPath", "WindowsPath")),
}


class Reader(dcp.FileSystemReader):
    """DCP's reader with a safe read_metadata. DCP reads the tensors by
    torch.load(weights_only=True)."""

    def read_metadata(self, *_args, **_kwargs) -> metadata.Metadata:
        return read_metadata(Path(self.path))


def read_metadata(checkpoint: Path) -> metadata.Metadata:
    """DCP's index of a checkpoint's tensors. Raises UserError if the index can't be read or holds
    anything this project does not write."""
    file = checkpoint / ".metadata"
    try:
        with open(file, "rb") as opened:
            return _metadata(_Unpickler(opened).load().state)
    except OSError as e:
        raise UserError(f"{file} can't be read: {e.strerror or e}") from None
    except UserError as e:
        raise UserError(f"{file} is refused: {e}") from None
    except Exception as e:  # a damaged pickle can raise almost anything
        raise UserError(f"{file} is damaged: {str(e).strip() or repr(e)}"[:300]) from None


class _Record:
    """An inert stand-in for a pickled object: keeps what the object was made of."""

    def __init__(self, *args):
        self.args = args

    def __setstate__(self, state):
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file):
        super().__init__(file)
        self.stand_ins = {}  # classes of this file only: a pickle may also modify a class

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return _member
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in PICKLED.get(module, ()):
            raise UserError(f"it refers to {module}.{name}, which no checkpoint needs")
        return self.stand_ins.setdefault(name, type(name, (_Record,), {}))


def _member(kind, _name):
    """Stands in for getattr, by which Python 3.11.0 to 3.11.3 pickles members of an enum."""
    if getattr(kind, "__name__", "") != "_MEM_FORMAT_ENCODING" or not issubclass(kind, _Record):
        raise UserError("it refers to builtins.getattr, which no checkpoint needs")


def _metadata(index: dict) -> metadata.Metadata:
    """DCP's own object with the same places and sizes. Dtypes are read with the tensors. Raises if
    the index has another structure."""
    tensors, storage = {}, {}
    for name, tensor in index["state_dict_metadata"].items():
        states = [chunk.state for chunk in tensor.state["chunks"]]
        parts = [(_size(state["offsets"]), _size(state["sizes"])) for state in states]
        chunks = [metadata.ChunkStorageMetadata(*part) for part in parts]
        properties, size = metadata.TensorProperties(), _size(tensor.state["size"])
        tensors[str(name)] = metadata.TensorStorageMetadata(properties, size, chunks)
    for key, place in index["storage_data"].items():
        key, place = key.state, place.state
        file, offset = place["relative_path"], key.get("offset")
        if not re.fullmatch(r"__\d+_\d+\.distcp", file):
            raise UserError(f"it names {file!r}, which is not a checkpoint file")
        if place.get("transform_descriptors"):
            raise UserError(f"it asks to transform {file}")
        key = metadata.MetadataIndex(str(key["fqn"]), offset and _size(offset))
        storage[key] = filesystem._StorageInfo(file, int(place["offset"]), int(place["length"]))
    return metadata.Metadata(tensors, storage_data=storage)


def _size(record: _Record) -> torch.Size:
    return torch.Size(record.args[0])


def shapes_of(path: Path) -> dict[str, tuple]:
    """{name: shape} of a checkpoint's weights and moments."""
    tensors = read_metadata(path).state_dict_metadata
    return {name: tuple(t.size) for name, t in tensors.items() if not name.startswith("rng.")}


def weights_of(path: Path) -> dict[str, tuple]:
    """{name: shape} of a checkpoint's weights."""
    ends = tuple(f".{name}" for name in MOMENTS + PSGD)
    return {name: shape for name, shape in shapes_of(path).items() if not name.endswith(ends)}


def compare_shapes(
    path: Path, saved: dict[str, tuple], wanted: dict[str, tuple], where: str = "in this run"
) -> set[str]:
    """The names of what PowerSGD keeps that differ or are missing on either side. Raises UserError
    if anything else does. saved: {name: shape} of a checkpoint; wanted: the same of `where`."""
    names = {n for n in {*wanted, *saved} if wanted.get(n) != saved.get(n)}
    for name in sorted(names):
        if not name.endswith(PSGD):
            raise UserError(
                f"{path} is of another model: the shape of {name} is {saved.get(name, 'missing')} "
                f"there, {wanted.get(name, 'missing')} {where}"
            )
    return names


def load(path: Path, tensors: dict, world: World, group=None, say=print) -> None:
    """Fill `tensors` ({name: tensor or DTensor}) in place from a checkpoint, however it was
    sharded. Every rank calls. Raises UserError if names or shapes do not match the model. What
    PowerSGD keeps may be missing on either side, or differ in its rank."""
    mine = {name: tuple(t.shape) for name, t in tensors.items()}
    wanted = {k: v for shapes in on_all_ranks(lambda: mine, world) for k, v in shapes.items()}
    saved = shapes_of(path)
    unused = compare_shapes(path, saved, wanted)
    for kind in PSGD:
        some = [name for name in unused & saved.keys() if name.endswith(kind)]
        if some:
            say(f"resume: {kind} of {len(some)} matrices in the checkpoint is not used")
    tensors = {name: t for name, t in tensors.items() if name not in unused}
    read_tensors(path, tensors, process_group=group)


def read_tensors(path: Path, tensors: dict, **options) -> None:
    """Fill tensors by name: unsharded ones in this process alone, unless options, those of
    dcp.load, name a process group. Raises UserError."""
    options = options or {"no_dist": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no_dist means a single process
            dcp.load(tensors, storage_reader=Reader(path), **options)
    except (dcp.CheckpointException, OSError) as e:
        raise UserError(f"{path} can't be read: {reason_of(e)}") from e


def reason_of(error: BaseException, folder: Path | None = None) -> str:
    """The error in one line, from the rank where it happened. folder: where it was writing."""
    if isinstance(error, dcp.CheckpointException):  # not an Exception; its text is a traceback
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError):  # from torch.load(weights_only=True)
        return "a tensor file holds other objects, which are refused"
    return disk_full(error, folder) or words_of(error)
