"""What a base has beside the text that is trained, such as a vision tower. A run records it at its
start, and an export puts it back:

    model/untrained.json   where the base is, and a digest of each such tensor
    model/base/            the base's small files: its configuration, those of its processor"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch

from llm_demo.core.decoder import fused
from llm_demo.core.errors import UserError
from llm_demo.machine.process import read_text
from llm_demo.machine.text import blame
from llm_demo.model.families import WITH_IMAGES
from llm_demo.model.weights_files import Weights, found_at, open_file, places_in

RECORD, SMALL_FILES = "untrained.json", "base"
KINDS = (".json", ".jinja", ".txt", ".model")  # of small files
# of these, what an export writes itself
OURS = {
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
}


class Untrained(NamedTuple):
    """What goes into an export beside the text, and how the files of such a model are."""

    places: dict[str, Path]  # {name: file} of its tensors
    names: dict[str, str]  # {"model" and "lm_head": what they are called}
    fused: bool  # the experts of a block are one tensor

    def name_of(self, name: str) -> str:
        """The name in the files of a tensor of the text."""
        begin, dot, rest = name.partition(".")
        return self.names.get(begin, begin) + dot + rest

    def read(self, names) -> dict[str, torch.Tensor]:
        """Those of these tensors that it has, mapped."""
        return {name: mapped(self.places[name], name) for name in names if name in self.places}


TEXT_ALONE = Untrained({}, {}, fused=False)  # no more than text, in the files of its own model


def mapped(file: Path, name: str) -> torch.Tensor:
    """A tensor of a file as it is. Its pages are in memory once they are used."""
    with open_file(file) as opened:
        return opened.get_tensor(name)


def digest_of(file: Path, name: str) -> str:
    """The SHA-256 of a tensor's dtype, shape and bytes."""
    t = mapped(file, name)
    hashed = hashlib.sha256(f"{t.dtype} {tuple(t.shape)}".encode())
    hashed.update(t.flatten().view(torch.uint8).numpy())
    return hashed.hexdigest()


# ---------------------------------------------------------------- at a run's start


def takes_images(folder: Path, of_text: str = "") -> bool:
    """Whether config.json is of a model with images, or with of_text="_text" of its text."""
    kind = json.loads(read_text(folder / "config.json")).get("model_type")
    return kind in [name + of_text for name in WITH_IMAGES]


def why_text_alone(folder: Path, weights: Weights | None) -> str | None:
    """Why exports hold no more than the text: "" if the base has no more. None: they do."""
    if not takes_images(folder) and not (weights and weights.untrained):
        return ""
    if weights is None:
        return "its weights were random"
    if weights.scales or weights.packed:
        return "its base has weights in 8 or 4 bits"
    return None


def record_of(name: str, folder: Path, weights: Weights | None) -> dict:
    """What a run records of its base. name: of the base, as given."""
    record = {"images": takes_images(folder), "why": why_text_alone(folder, weights)}
    if record["why"] is not None:
        return record
    places = weights.untrained
    model = weights.names["model.embed_tokens.weight"].removesuffix(".embed_tokens.weight")
    head = "language_model.lm_head" if model == "language_model.model" else "lm_head"
    return record | {
        "path": found_at(name, folder),
        "revision": folder.name,  # of a hub id, whose cache names folders by commits
        "files": sorted({str(file.relative_to(weights.folder)) for file in places.values()}),
        "names": {"model": model, "lm_head": head},
        "fused": any(fused(tensor) for tensor in weights.stored),
        "tensors": {tensor: digest_of(file, tensor) for tensor, file in places.items()},
    }


def read_record(model: Path) -> dict:
    """What was recorded in the model/ folder of a run. Raises UserError."""
    file = model / RECORD
    if file.is_file():
        with blame(file):
            return json.loads(read_text(file))
    images = takes_images(model, of_text="_text")
    return {"images": images, "why": "the run recorded nothing else" if images else ""}


def copy_small(folder: Path, out: Path) -> None:
    """Copy a model's small files but for those that exports write."""
    out.mkdir(exist_ok=True)
    for file in {*folder.iterdir()} - {folder / name for name in OURS}:
        if file.suffix in KINDS and file.is_file() and file.stat().st_size <= 1 << 24:
            (out / file.name).write_bytes(file.read_bytes())


# ---------------------------------------------------------------- in an export


def untrained_in(folder: Path, record: dict) -> Untrained:
    """What was recorded, in this folder of the base. Reads all of it. Raises UserError naming a
    file that is not as it was."""
    tensors, places = record["tensors"], places_in(folder) or {}
    for name, digest in tensors.items():
        if name not in places or digest_of(places[name], name) != digest:
            file = places.get(name, folder)
            raise UserError(f"{file}: {name} is not as it was when the run began")
    return Untrained({n: places[n] for n in tensors}, record["names"], record["fused"])


def whole_config(base: dict, text: dict) -> dict:
    """The configuration of the whole model. base: as it came; text: of an export of its text."""
    if base.get("model_type") not in WITH_IMAGES:
        return text
    above = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
    whole = base | {key: text[key] for key in above if key in text}
    whole.pop("auto_map", None)  # names code that is not in this folder
    for key in ("architectures", "transformers_version", "quantization_config"):
        text.pop(key, None)
    return whole | {"text_config": text}
