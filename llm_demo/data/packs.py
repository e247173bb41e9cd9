"""From a data file to the rows of a step: pure functions of (file, tokenizer, flags, seed, step).

file -> records (records.py) -> documents (labels.py), memory-mapped from a cache folder -> rows of
exactly seq_len slots (packing.py) -> the rows of step k, and their tensors (core/rows.py)"""

import contextlib
import fcntl
import glob
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
import zlib

import numpy as np

from llm_demo.core.batch import IGNORE_INDEX
from llm_demo.core.errors import UserError
from llm_demo.core.rows import Packs
from llm_demo.data.build import LEARNT, LONGEST_DEFAULT, TOKENS, Stats, build, open_flat
from llm_demo.data.labels import Codec
from llm_demo.data.packing import rows_of, tables_of
from llm_demo.data.sources import content_of, find_files, split_name, suffix_of
from llm_demo.job.files import cache_folder, disk_full

FORMAT = 7  # of a pack; increase it when the same files are read, labelled or stored differently
BUILDING = f"building-{os.uname().nodename}+"  # name prefix of packs that this host builds
DAY = 24 * 3600
SHOWN = 400  # tokens from each end of a long example
SUMS = "crc32.json"  # the CRC-32 of every other file of a pack
# Flags that the rows of a step depend on; with the file's content they identify them.
FLAGS = (
    "seq_len", "pack_sequences", "train_on_prompt", "data_format", "input_key", "target_key",
    "overlong", "learn_turns", "learn_reasoning",
)  # fmt: skip


def load_packs(
    train_json: str,
    tokenizer,
    flags,
    *,
    limit: int = LONGEST_DEFAULT,
    cache_dir: str | None = None,
    log=print,
) -> Packs:
    """Packs of all files that find_files finds. Their documents are built once and then read from
    the cache, after verifying its checksums; packing them into rows takes a moment.

    flags: a DataArgs. Its seq_len 0: fits 99 % of the documents, rounded up to a multiple of 128,
    at most `limit`. pack_sequences: best fit of whole documents into rows; otherwise one padded
    document per row. overlong, for documents of over seq_len tokens: "truncate" keeps the first
    seq_len; "split" makes pieces of seq_len that do not see each other (a piece's first token has
    no context and is not learnt, and its last slot predicts nothing); "drop" skips the document.
    cache_dir: default $LLM_DEMO_CACHE, else ~/.cache/llm_demo. Any number of processes may build
    the same packs at once; letting one per node go first saves work. Packs.stats: a Stats.

    The commands check the flags; raises UserError for files or tokenizers that can't be used."""
    files = find_files(train_json, flags.dataset_config, flags.dataset_split, log)
    last_only = flags.learn_turns == "last"
    codec = Codec(tokenizer, flags.train_on_prompt, last_only, flags.learn_reasoning)
    key, identity = _identify(files, codec, flags, limit)
    root = cache_dir or cache_folder()
    folder = os.path.join(root, f"packs-{key}")
    packs, problem = _open(folder, files, flags.pack_sequences)
    hit = packs is not None
    if problem:
        log(f"data: the cached pack {folder} is damaged ({problem}); rebuilding it")
    if not hit:
        _build_in(root, folder, files, codec, flags, limit)
        packs, problem = _open(folder, files, flags.pack_sequences)
    if not packs:
        raise UserError(
            f"{folder} is damaged ({problem}) and could not be replaced: delete it, or set "
            "LLM_DEMO_CACHE to another folder"
        )
    packs.stats.cache_hit = hit
    packs.stats.identity = identity | {"seq_len": packs.seq_len} | packs.stats.identity
    eos = None if codec.template else codec.tokenizer.eos_token
    for line in packs.stats.lines(packs, eos, folder):
        log(line)
    return packs


def _identify(files: list[str], codec: Codec, flags, limit: int) -> tuple[str, dict]:
    """(the name of the pack: a hash of everything that it depends on, what a run compares of that
    when it is resumed). Of contents, not names and dates, so a copy hits the cache; but the same
    bytes are other rows in a file of another kind."""
    tokenizer = codec.tokenizer
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, codec.bos]
    specials = json.dumps([tokenizer.special_tokens_map, ids], default=str)
    contents = list(map(content_of, files))
    identity = {f"content of data file {n}": text[:16] for n, text in enumerate(contents, 1)}
    identity["tokenizer"] = _hash(codec.backend.to_str() + specials)[:16]
    identity["chat template"] = _hash(str(tokenizer.chat_template))[:16]
    identity |= {name: getattr(flags, name) for name in FLAGS}
    for name, default in (("learn_turns", "all"), ("learn_reasoning", True)):
        if identity[name] == default:
            identity[name] = None  # as checkpoints have it
    facts = identity | {"pack_sequences": None, "limit": 0 if flags.seq_len else limit}
    key = [FORMAT, contents, list(map(suffix_of, files)), facts]
    return _hash(json.dumps(key))[:24], identity


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _open(folder: str, files: list[str], pack: bool) -> tuple[Packs | None, object]:
    """(the packs in a folder or None, what is wrong with it: None if it does not exist). Their
    identity is a checksum of tokens and labels."""
    if not os.path.isdir(folder):
        return None, None
    try:
        with open(f"{folder}/{SUMS}") as file:
            sums = json.load(file)
        if bad := dict(sums.items() ^ _sums(folder).items()):
            return None, f"{', '.join(sorted(bad))}: wrong checksum"
        with open(f"{folder}/meta.json") as file:
            meta = json.load(file)
        lengths, doc_labels, doc_file, doc_row = np.load(f"{folder}/documents.npy")
        stats = Stats.of(meta["stats"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, error
    for file, path in zip(stats.files, files, strict=True):
        file.path = path  # the same bytes may have been cached under another name
    stats.identity["tokens and labels"] = f"{sums[TOKENS]}-{sums[LEARNT]}"
    seq_len, doc_start = meta["seq_len"], np.append(0, np.cumsum(lengths))
    tokens, is_label = open_flat(folder)
    rows = rows_of(doc_start, np.arange(len(lengths)), seq_len, pack)
    packs = Packs(
        seq_len=seq_len, pad_id=meta["pad_id"], stats=stats, tokens=tokens, is_label=is_label,
        doc_start=doc_start, doc_labels=doc_labels, doc_file=doc_file, doc_row=doc_row,
        **tables_of(doc_start, doc_labels, seq_len, [rows]),
    )  # fmt: skip
    return packs, None


def _sums(folder: str) -> dict[str, str]:
    """The CRC-32 of each file of a pack, as hex digits: one with zeroed tokens would otherwise be
    trained on."""
    files = {name: f"{folder}/{name}" for name in os.listdir(folder) if name != SUMS}
    return {n: f"{zlib.crc32(np.memmap(file, np.uint8, 'r')):08x}" for n, file in files.items()}


def _build_in(root: str, folder: str, *settings) -> None:
    """Build packs in a temporary folder and rename it to `folder`, so that nothing half-written is
    visible. An existing folder is damaged; it is moved away first, and processes that have mapped
    its files keep them."""
    damaged = os.path.isdir(folder)
    try:
        os.makedirs(root, exist_ok=True)
        _remove_stale(root)
        with (
            tempfile.TemporaryDirectory(
                prefix=BUILDING, dir=root, ignore_cleanup_errors=True
            ) as temporary,
            open(os.path.join(temporary, "lock"), "w") as lock,
        ):
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            built = os.path.join(temporary, "packs")
            os.mkdir(built)
            build(built, *settings)
            sums = _sums(built)
            with open(f"{built}/{SUMS}", "w") as file:
                json.dump(sums, file)
            if damaged and os.path.isdir(folder):
                os.rename(folder, os.path.join(temporary, "damaged"))
            os.replace(built, folder)
    except OSError as error:
        if not os.path.isdir(folder):  # else another process built the same content first
            reason = disk_full(error, root) or error.strerror or error
            raise UserError(
                f"cannot write to the cache {root}: {reason}; set LLM_DEMO_CACHE"
            ) from error


def _remove_stale(root: str) -> None:
    """Remove what killed builds have left. A build's lock ends with it, but is not trusted to reach
    other hosts: what they left is removed after a day."""
    for folder in glob.glob(f"{glob.escape(root)}/building-*"):
        ours = os.path.basename(folder).startswith(BUILDING)
        with contextlib.suppress(OSError):  # it is in use, or gone
            files = [folder, *glob.glob(f"{glob.escape(folder)}/**", recursive=True)]
            age = time.time() - max(map(os.path.getmtime, files))
            if age > (60 if ours else DAY):  # a new one may not be locked yet
                with open(os.path.join(folder, "lock"), "a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


def describe_example(packs: Packs, tokenizer, row: int = 0) -> str:
    """The first document of a row as text, learnt tokens in brackets. Only the beginning and the
    end of a long one."""
    ids, labels, (n, *_) = packs.row(row)
    is_label = np.append(False, labels[: n - 1] != IGNORE_INDEX)
    parts = [range(n)] if n <= 2 * SHOWN else [range(SHOWN), range(n - SHOWN, n)]
    texts = []
    for part in parts:
        text = ""
        for learnt, span in itertools.groupby(part, is_label.__getitem__):
            piece = tokenizer.decode(ids[list(span)].tolist(), clean_up_tokenization_spaces=False)
            text += f"⟦{piece}⟧" if learnt else piece
        texts.append(text)
    return f"\n[... {n - 2 * SHOWN:,} tokens ...]\n".join(texts)


def heldout_beside(train_json: str) -> str | None:
    """The path x.heldout.jsonl for a single file x.jsonl, if both exist."""
    stem, extension = split_name(train_json)
    beside = f"{stem}.heldout{extension}"
    return beside if os.path.isfile(train_json) and os.path.isfile(beside) else None


def refuse_unknown_tokens(packs: list[Packs], vocab_size: int) -> None:
    """Raise UserError if data given as token ids has one outside the model's vocabulary."""
    for p in packs:
        files = [file.path for file in p.stats.files if file.format == "tokens"]
        if files and (largest := int(p.tokens.max())) >= vocab_size:
            raise UserError(
                f"{', '.join(files)}: token {largest}, but the model knows {vocab_size} only"
            )
