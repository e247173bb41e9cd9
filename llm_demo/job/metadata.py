"""Read a checkpoint's .metadata without running code. torch.distributed.checkpoint (DCP) stores
this index of tensors as a pickle, and unpickling can run any command. So the pickle is read into
inert records: only names that DCP writes are accepted, and none of them is imported. DCP's own
objects are then built from the records, with every value checked."""

import pickle
import re
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from llm_demo.core.errors import UserError

# What DCP pickles in addition to dtypes. BytesStorageMetadata is left out: DCP unpickles such items
# without restrictions, and this project's checkpoints hold tensors only.
NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # Python 3.13
}  # fmt: skip


class Reader(dcp.FileSystemReader):
    """DCP's reader with a safe read_metadata. DCP reads the tensors by
    torch.load(weights_only=True)."""

    def read_metadata(self, *_args, **_kwargs) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(checkpoint: Path) -> Metadata:
    """DCP's index of a checkpoint's tensors. Raises UserError if the index can't be read or holds
    anything this project does not write."""
    file = checkpoint / ".metadata"
    try:
        with open(file, "rb") as opened:
            return _metadata(_Unpickler(opened).load())
    except OSError as e:
        raise UserError(f"{file} can't be read: {e.strerror or e}") from None
    except _Refused as e:
        raise UserError(f"{file} is refused: {e}") from None
    except Exception as e:  # a damaged pickle can raise almost anything
        raise UserError(f"{file} is damaged: {str(e).strip() or repr(e)}"[:300]) from None


class _Refused(Exception):
    pass


class _Record:
    """An inert stand-in for an object of NAMES: keeps what the object was made of."""

    def __init__(self, *args):
        self.args = args

    def __setstate__(self, state):
        self.state = state


def _member(kind, _name):
    """Stands in for getattr, by which Python 3.11.0 to 3.11.3 pickles members of an enum."""
    if getattr(kind, "__name__", "") != "_MEM_FORMAT_ENCODING" or not issubclass(kind, _Record):
        raise _Refused("it refers to builtins.getattr, which no checkpoint needs")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file):
        super().__init__(file)
        self.stand_ins = {}  # classes of this file only: a pickle may also modify a class

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return _member
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in NAMES.get(module, ()):
            raise _Refused(f"it refers to {module}.{name}, which no checkpoint needs")
        return self.stand_ins.setdefault(name, type(name, (_Record,), {}))


def _metadata(record: _Record) -> Metadata:
    """DCP's own object with the same places and sizes. Dtypes are read with the tensors. Raises if
    a value has the wrong type: no record, number or text is taken for another."""
    tensors, storage = {}, {}
    for name, tensor in record.state["state_dict_metadata"].items():
        chunks = [chunk.state for chunk in tensor.state["chunks"]]
        chunks = [ChunkStorageMetadata(_size(c["offsets"]), _size(c["sizes"])) for c in chunks]
        size = _size(tensor.state["size"])
        tensors[_a(str, name)] = TensorStorageMetadata(TensorProperties(), size, chunks)
    for index, place in record.state["storage_data"].items():
        index, place = index.state, place.state
        file, offset = _a(str, place["relative_path"]), index.get("offset")
        if not re.fullmatch(r"__\d+_\d+\.distcp", file):
            raise _Refused(f"it names {file!r}, which is not a checkpoint file")
        if place.get("transform_descriptors"):
            raise _Refused(f"it asks to transform {file}")
        key = MetadataIndex(_a(str, index["fqn"]), offset and _size(offset))
        storage[key] = _StorageInfo(file, _count(place["offset"]), _count(place["length"]))
    return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta())


def _a(kind: type, value):
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def _count(n) -> int:
    if _a(int, n) < 0:
        raise ValueError(f"{n} is negative")
    return n


def _size(record: _Record) -> torch.Size:
    return torch.Size(map(_count, record.args[0]))
