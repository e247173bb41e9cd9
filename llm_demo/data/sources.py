"""Finds data files and hub datasets and reads their examples. Errors name the file and the line or
row.

Only hub datasets are read by datasets. For CSV it shifts a row that is one cell too long into other
columns and fills up a short one, in silence. For Parquet it refuses columns of some types, used or
not. For JSON Lines it does not name a broken line, and all rows need the same types. So Parquet and
Arrow are read by PyArrow, as datasets itself does, and the others by the standard library."""

import functools
import glob
import hashlib
import json
import os
import re

from llm_demo.core.errors import UserError
from llm_demo.machine.files import digest
from llm_demo.machine.text import blame

# searched for in a folder
DATA_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # and their names in PyArrow
HELD_OUT = re.compile(r"\.heldout\.")
# Files of a folder that hold splits not for training, by their names on the hub.
NOT_FOR_TRAINING = re.compile(
    r"\.heldout\.|(?i:(^|[-_.])(test|validation|valid|val|dev|eval)([-_.]|$))"
)
NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# openai/gsm8k, openai/gsm8k:test, openai/gsm8k:main:train[:1000]
HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*?)(?::([\w.-]+))??(?::(\w+(?:\[[\w:%-]*\])?))?")


def find_files(names: str, split: str | None = None) -> tuple[list[str], list[str]]:
    """(what to read, lines for the log about files that are skipped).

    names: files, folders, globs and hub datasets, separated by commas. They become paths, and
    "id:split" or "id:configuration:split" for the hub, in a fixed order. Globs and folders skip
    every x.heldout.*, unless the glob asks for them: evaluation data must not be trained on.
    Folders also skip test and validation splits. split: of hub datasets that name none. Raises
    UserError if there is nothing to read."""
    parts = [names] if os.path.exists(names) else names.split(",")
    files, lines = [], []
    for part in parts:
        found, skipped = _expand(part.strip(), split)
        files += found
        if skipped:
            lines.append(f"data: skipped, named as held-out or test data: {', '.join(skipped)}")
    seen = set()
    for path in files:
        if os.path.realpath(path) in seen:
            raise UserError(
                f"{path} is listed twice: list it once (to repeat it, give it a weight: {path}*2)"
            )
        seen.add(os.path.realpath(path))
    return files, lines


def _expand(part: str, split: str | None) -> tuple[list[str], list[str]]:
    """(what one part of a list of sources names, files that are skipped)."""
    if os.path.isfile(part):
        return [part], []
    is_folder = os.path.isdir(part)
    hub = hub_parts(part)
    if hub and not is_folder:
        if not (hub[2] or split):
            raise UserError(f"{part}: name the split to read, for example {part}:test")
        return [part if hub[2] else f"{part}:{split}"], []
    pattern = part
    if is_folder:
        if os.path.isfile(f"{part}/dataset_dict.json"):  # save_to_disk of datasets has written it
            part = os.path.join(part, "train")
        pattern = os.path.join(glob.escape(part), "*")
    elif not glob.has_magic(part):
        raise UserError(f"no such data file: {part or '(an empty name)'}")
    found = [path for path in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(path)]
    held_out = HELD_OUT
    if is_folder:
        found = [path for path in found if suffix_of(path) in DATA_FILES]
        found = [path for path in found if os.path.basename(path) not in NO_DATA]
        held_out = NOT_FOR_TRAINING
    skipped = []
    if is_folder or ".heldout" not in part:
        skipped = [path for path in found if held_out.search(os.path.basename(path))]
    files = [path for path in found if path not in skipped]
    if not files:
        raise UserError(
            f"no data file to train on in {part}: name files ({', '.join(DATA_FILES)}, also with "
            ".gz or .zst) or the folder that holds them"
        )
    return files, skipped


def weighted(train_json: str) -> tuple[str, list[float] | None]:
    """(train_json without weights, the weight of each file that find_files then returns, None if
    none is given). "a.jsonl*2" has the weight 2 unless a file has this name. Raises UserError."""
    if os.path.exists(train_json):
        return train_json, None
    parts = [_name_and_weight(part.strip()) for part in train_json.split(",")]
    if all(weight is None for _, weight in parts):
        return train_json, None
    weights = []
    for name, weight in parts:
        files, _ = find_files(name, "train")
        weights += [1 if weight is None else weight] * len(files)
    return ",".join(name for name, _ in parts), weights


def _name_and_weight(part: str) -> tuple[str, float | None]:
    """The name and the weight of one part of a list of sources. A glob may hold stars, too."""
    match = re.fullmatch(r"(.*\S)\s*\*\s*(\d*\.?\d+(?:e-?\d+)?)", part)
    if not match or glob.glob(part):
        return part, None
    weight = float(match[2])
    if not weight:
        raise UserError(f"--train_json {part}: a weight must be a number above 0")
    return match[1], weight


def hub_parts(name: str) -> tuple[str, str | None, str | None] | None:
    """(id, configuration, split) if `name` is a hub dataset, else None. A name that begins with an
    existing folder is a file, possibly mistyped."""
    match = HUB.fullmatch(name)
    if not match or os.path.isdir(name.split("/")[0]) or suffix_of(name) in DATA_FILES:
        return None
    return match.groups()


def split_name(path: str) -> tuple[str, str, str]:
    """x.jsonl.gz -> ("x", ".jsonl", ".gz"): the extension and the compression."""
    stem, last = os.path.splitext(path)
    if last.lower() in COMPRESSED:
        return (*os.path.splitext(stem), last)
    return stem, last, ""


def heldout_beside(train_json: str) -> str | None:
    """The path x.heldout.jsonl for a single file x.jsonl, if both exist."""
    stem, kind, compression = split_name(train_json)
    beside = f"{stem}.heldout{kind}{compression}"
    return beside if os.path.isfile(train_json) and os.path.isfile(beside) else None


def suffix_of(path: str) -> str:
    """The extension without the compression: ".jsonl" for x.jsonl.gz."""
    _, kind, compression = split_name(path)
    return (kind or compression).lower()


def content_of(source: str) -> str:
    """The SHA-256 of a file, or of all examples of a hub dataset, as hex digits. Raises
    UserError."""
    if not hub_parts(source):
        with blame(source, OSError):
            return digest(source)
    hashed = hashlib.sha256()
    for rows in hub_rows(source).iter(batch_size=1000):
        hashed.update(json.dumps(rows, default=str, sort_keys=True).encode())
    return hashed.hexdigest()


@functools.lru_cache(maxsize=4)  # each is hashed, then read
def hub_rows(source: str):
    """A hub dataset, downloaded once to the hub's cache. Raises UserError on failure."""
    from datasets import load_dataset

    name, config, split = hub_parts(source)
    with blame(f"{source}, a dataset of the hub"):
        return load_dataset(name, config, split=split)
