"""What a base has beside the text that is trained, such as a vision tower. A run records it at its
start, and an export puts it back:

    model/untrained.json   where the base is, and the file and a digest of each such tensor
    model/base/            the base's small files: its configuration, those of its processor"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from llm_demo.core.decoder import fused
from llm_demo.core.errors import UserError
from llm_demo.machine.process import read_json
from llm_demo.machine.text import blame
from llm_demo.model.families import takes_images
from llm_demo.model.weights_files import Weights, identity_of, open_file

RECORD, SMALL_FILES = "untrained.json", "base"
# Names of small files, without those that an export writes itself, but for config.json.
COPIED = re.compile(
    r"(?!(added_tokens|chat_template|generation_config|merges|model\.safetensors|special_tokens_map"
    r"|tekken|tokenizer|tokenizer_config|vocab)\.).+\.(json|jinja|txt|model)"
)
EMBEDDED = "embed_tokens.weight"
EARLIER = {"images": False, "why": "the run is of a version that recorded nothing else"}


class Untrained(NamedTuple):
    """What goes into an export beside the text, and how the text is called there."""

    places: dict[str, Path] = {}  # {name: file} of its tensors
    begin: str = ""  # what all names of the text begin with
    model: str = "model."  # and then those of all but the head
    fused: bool = False  # the experts of a block are one tensor

    def name_of(self, name: str) -> str:
        """The name in the files of a tensor of the text."""
        return self.begin + name.replace("model.", self.model, 1)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Those of these tensors that it has, mapped."""
        return {name: mapped(self.places[name], name) for name in names if name in self.places}


def mapped(file: Path, name: str) -> torch.Tensor:
    """A tensor of a file as it is. Its pages are in memory once they are used."""
    with open_file(file) as opened:
        return opened.get_tensor(name)


def digest_of(t: torch.Tensor) -> str:
    """The SHA-256 of a tensor's dtype, shape and bytes."""
    hashed = hashlib.sha256(f"{t.dtype} {tuple(t.shape)}".encode())
    hashed.update(t.flatten().view(torch.uint8).numpy())
    return hashed.hexdigest()


def record_of(name: str, folder: Path, weights: Weights | None) -> dict:
    """What a run records of its base. name: of the base, as given. "why": exports hold no more than
    text; "" if the base has no more, None if they hold it."""
    images = takes_images(read_json(folder / "config.json"))
    record = {"images": images, "why": None}
    if not (images or weights and weights.untrained):
        return record | {"why": ""}
    if weights is None:
        return record | {"why": "the run began with random weights"}
    if weights.scales or weights.packed:
        return record | {"why": "its base has weights in 8 or 4 bits"}
    embedding = weights.names[f"model.{EMBEDDED}"]
    begin = "language_model." if embedding.startswith("language_model.") else ""
    tensors = {}
    for tensor, file in weights.untrained.items():
        digest = digest_of(mapped(file, tensor))
        tensors[tensor] = str(file.relative_to(folder)), digest
    return record | {
        "path": identity_of(name, folder, None)["path"],
        "revision": folder.name,  # of a hub id, whose cache names folders by commits
        "begin": begin,
        "model": embedding.removeprefix(begin).removesuffix(EMBEDDED),
        "fused": any(fused(tensor) for tensor in weights.stored),
        "tensors": tensors,
    }


def read_record(model: Path) -> dict:
    """What was recorded in the model/ folder of a run. Raises UserError."""
    file = model / RECORD
    if not file.is_file():
        return EARLIER
    with blame(file):
        return EARLIER | read_json(file)


def copy_small(folder: Path, out: Path) -> None:
    """Copy a model's small files."""
    out.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if COPIED.fullmatch(file.name) and file.is_file() and file.stat().st_size < 1 << 24:
            (out / file.name).write_bytes(file.read_bytes())


def untrained_in(folder: Path, record: dict) -> Untrained:
    """What was recorded, in this folder of the base. Reads all of it. Raises UserError naming a
    file that is not as it was."""
    places = {}
    for name, (file, digest) in record["tensors"].items():
        places[name] = folder / file
        if digest_of(mapped(folder / file, name)) != digest:
            raise UserError(f"{folder / file}: {name} is not as it was when the run began")
    return Untrained(places, record["begin"], record["model"], record["fused"])


def whole_config(base: dict, text: dict) -> dict:
    """The configuration of the whole model. base: as it came; text: of an export of its text."""
    if not takes_images(base):
        return text
    above = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
    whole = base | {key: text[key] for key in above if key in text}
    whole.pop("auto_map", None)  # names code that is not in this folder
    for key in ("architectures", "transformers_version", "quantization_config"):
        text.pop(key, None)
    return whole | {"text_config": text}
