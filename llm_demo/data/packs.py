"""From a data file to the rows of a step: pure functions of (file, tokenizer, flags, seed, step).

file -> records (records.py) -> samples (labels.py) -> rows of exactly seq_len slots (packing.py),
memory-mapped from a cache folder -> the rows of step k, and their tensors (steps.py)"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
import time

import numpy as np

from llm_demo.core.batch import IGNORE_INDEX
from llm_demo.core.errors import UserError
from llm_demo.core.rows import Packs
from llm_demo.data.build import TEXT_ARGUMENTS, build, read_meta
from llm_demo.data.labels import LEFT_OUT, MARKED, NO_PROMPT, NOT_OURS, REFUSED, make_codec
from llm_demo.data.packing import LONGEST_DEFAULT
from llm_demo.data.records import LEARNT, REAL, ROLES
from llm_demo.data.sources import content_of, find_files, split_name, table_of
from llm_demo.job.files import cache_folder, disk_full
from llm_demo.job.text import counted

BUILDING = f"building-{os.uname().nodename}+"  # name prefix of packs that this host builds
DAY = 24 * 3600
CACHE_VERSION = 6  # increase it when the same files are read, labelled or packed differently
SHOWN = 400  # tokens from each end of a long example


def load_packs(
    train_json: str,
    tokenizer,
    *,
    seq_len: int = 0,
    seq_len_limit: int = LONGEST_DEFAULT,
    pack: bool = True,
    train_on_prompt: bool = False,
    input_key: str | None = None,
    target_key: str | None = None,
    data_format: str = "auto",
    overlong: str = "truncate",
    learn_turns: str = "all",
    learn_reasoning: bool = True,
    dataset_config: str | None = None,
    dataset_split: str | None = None,
    cache_dir: str | None = None,
    log=print,
) -> Packs:
    """Packs of all files that find_files finds, built once and then read from the cache, after
    verifying its checksums.

    seq_len 0: fits 99 % of the documents, rounded up to a multiple of 128, at most seq_len_limit.
    pack: best fit of whole documents into rows; otherwise one padded document per row.
    overlong, for documents of over seq_len tokens: "truncate" keeps the first seq_len; "split"
    makes pieces of seq_len that do not see each other (a piece's first token has no context and is
    not learnt, and its last slot predicts nothing); "drop" skips the document.
    learn_turns: "last" learns only the last answer of each conversation.
    learn_reasoning: False makes reasoning (<think>) context of the answer.
    cache_dir: default $LLM_DEMO_CACHE, else ~/.cache/llm_demo. Any number of processes may build
    the same packs at once; letting one per node go first saves work.
    Packs.stats: rows_read, documents, packed_rows, skipped {reason: rows}, first_skipped {reason:
    "file:line"}, turns {reason they are not learnt: {turns, rows, first}} of the rows that are not
    skipped, truncated and split (documents), tokens, label_tokens, fill (0..1), files [{path,
    format, keys, why, rows, and rows by key: used, unused, unused_in_turns}], cache_hit.
    The commands check the flags; raises UserError for files or tokenizers that can't be used."""
    files = find_files(train_json, dataset_config, dataset_split, log)
    codec = make_codec(tokenizer, train_on_prompt, learn_turns == "last", learn_reasoning)
    format_flags = (data_format, input_key, target_key)
    flags = {  # in hashing order
        "seq_len": seq_len,
        "pack_sequences": pack,
        "train_on_prompt": train_on_prompt,
        "data_format": data_format,
        "input_key": input_key,
        "target_key": target_key,
        "overlong": overlong,
        "learn_turns": None if learn_turns == "all" else learn_turns,  # as in older checkpoints
        "learn_reasoning": None if learn_reasoning else False,
    }
    key, identity = _content_key(files, codec, flags, 0 if seq_len else seq_len_limit)
    root = cache_dir or cache_folder()
    folder = os.path.join(root, f"packs-{key}")
    packs = None
    if os.path.isdir(folder):
        try:
            packs = _open(folder, files, True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log(f"data: the cached pack {folder} is damaged ({error}); rebuilding it")
    if packs is None:
        settings = (files, codec, format_flags, seq_len, pack, overlong, seq_len_limit)
        _build_in(root, folder, settings)
        try:
            packs = _open(folder, files, False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder} is damaged ({error}) and could not be replaced: delete it, or set "
                "LLM_DEMO_CACHE to another folder"
            ) from None
    content = packs.stats.pop("content")
    identity |= {"seq_len": packs.seq_len, "reading": _reading(packs.stats)}
    identity["tokens and labels"] = content
    packs.stats["identity"] = identity
    _report(packs.stats, packs.seq_len, folder, codec, log)
    return packs


def _build_in(root: str, folder: str, settings: tuple) -> None:
    """Build packs in a temporary folder and rename it to `folder`, so that nothing half-written is
    visible. An existing folder is damaged; it is moved away first, and processes that have mapped
    its files keep them."""
    damaged = os.path.isdir(folder)
    try:
        os.makedirs(root, exist_ok=True)
        _remove_stale(root)
        temporary = tempfile.mkdtemp(prefix=BUILDING, dir=root)
        lock = open(os.path.join(temporary, "lock"), "w")
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        reason = disk_full(error, root) or error.strerror or error
        raise UserError(f"cannot write to the cache {root}: {reason}; set LLM_DEMO_CACHE") from None
    built = os.path.join(temporary, "packs")
    try:
        os.mkdir(built)
        build(built, *settings)
        if damaged and os.path.isdir(folder):
            os.rename(folder, os.path.join(temporary, "damaged"))
        os.replace(built, folder)
    except OSError as error:
        if not os.path.isdir(folder):  # else another process built the same content first
            reason = disk_full(error, root) or error.strerror or error
            raise UserError(f"cannot build the packs in {root}: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        lock.close()


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
    ids, labels, lengths = packs.row(row)
    ids, is_label = ids[: lengths[0]], np.append(False, labels[: lengths[0] - 1] != IGNORE_INDEX)
    whole = np.arange(len(ids))
    if (left_out := len(ids) - 2 * SHOWN) <= 0:
        parts = [whole]
    else:
        parts = [whole[:SHOWN], whole[-SHOWN:]]
    texts = []
    for part in parts:
        text = ""
        for span in np.split(part, np.flatnonzero(np.diff(is_label[part])) + 1):
            piece = tokenizer.decode(ids[span].tolist(), clean_up_tokenization_spaces=False)
            text += f"⟦{piece}⟧" if is_label[span[0]] else piece
        texts.append(text)
    return f"\n[... {left_out:,} tokens ...]\n".join(texts)


def heldout_beside(train_json: str) -> str | None:
    """The path x.heldout.jsonl for a single file x.jsonl, if both exist."""
    stem, extension = split_name(train_json)
    beside = f"{stem}.heldout{extension}"
    return beside if os.path.isfile(train_json) and os.path.isfile(beside) else None


def refuse_unknown_tokens(packs: list[Packs], vocab_size: int) -> None:
    """Raise UserError if data given as token ids has one outside the model's vocabulary."""
    for p in packs:
        files = [f["path"] for f in p.stats["files"] if f["format"] == "tokens"]
        if files and (largest := int(p.tokens.max())) >= vocab_size:
            raise UserError(
                f"{', '.join(files)}: token {largest}, but the model knows {vocab_size} only"
            )


def _content_key(files: list[str], codec, flags: dict, limit: int) -> tuple[str, dict]:
    """A hash of everything the packs depend on, as 24 hex digits, and a dict of its parts. Hashes
    contents, not names and dates, so a copy hits the cache; but the same bytes are other rows in a
    table with other separators."""
    key, identity = hashlib.sha256(), {}
    for path in files:
        try:
            content = content_of(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        key.update(bytes.fromhex(content) + table_of(path).encode())
        identity[f"content of data file {len(identity) + 1}"] = content[:16]
    tokenizer = codec.tokenizer
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, codec.bos]
    key.update(codec.backend.to_str().encode())
    rest = [CACHE_VERSION, tokenizer.special_tokens_map, ids, tokenizer.chat_template]
    rest += [list(flags.values()), limit]
    key.update(json.dumps(rest, default=str).encode())
    specials = json.dumps(rest[1:3], default=str)
    for name, text in (
        ("tokenizer", codec.backend.to_str() + specials),
        ("chat template", str(tokenizer.chat_template)),
    ):
        identity[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return key.hexdigest()[:24], identity | flags


def _reading(stats: dict) -> dict | None:
    """What earlier versions read differently in these rows, or None. Prevents an older checkpoint
    from silently resuming on other rows."""
    counts = {reason: turns["turns"] for reason, turns in stats["turns"].items()}
    counts.pop(NOT_OURS, None)  # these were never learnt
    if first := counts.pop(NO_PROMPT, 0):  # earlier versions counted these as refused
        counts[REFUSED] = counts.get(REFUSED, 0) + first
    newly_skipped = {MARKED, *(LEFT_OUT.format(role=role) for role in ROLES.values())}
    counts |= {reason: n for reason, n in stats["skipped"].items() if reason in newly_skipped}
    for file in stats["files"]:
        read = (REAL, *LEARNT, TEXT_ARGUMENTS)
        read += ("system", "history") * (file["format"] != "conversations")
        for key in (key for key in read if key in file["used"]):
            counts[key] = counts.get(key, 0) + file["used"][key]
    return counts or None


def _open(folder: str, files: list[str], hit: bool) -> Packs:
    """Map the packs in a folder. Raises OSError or ValueError if a file is damaged."""
    meta = read_meta(folder)
    names = {}  # the same bytes may have been cached under another name
    for path, file in zip(files, meta["stats"]["files"], strict=True):
        names[file["path"]], file["path"] = path, path
    stats = meta["stats"] | {"cache_hit": hit}
    first = stats["first_skipped"]
    stats["first_skipped"] = {reason: _renamed(where, names) for reason, where in first.items()}
    for turns in stats["turns"].values():
        turns["first"] = _renamed(turns["first"], names)
    meta["stats"] = stats
    # asarray: a plain view of the map; slicing np.memmap itself is several times slower.
    arrays = {
        os.path.basename(path)[:-4]: np.asarray(np.load(path, mmap_mode="r"))
        for path in glob.glob(f"{glob.escape(folder)}/*.npy")
    }
    tokens = np.asarray(np.memmap(f"{folder}/tokens.int32", np.int32, "r"))
    is_label = np.asarray(np.memmap(f"{folder}/learnt.bool", bool, "r"))
    return Packs(**meta, **arrays, tokens=tokens, is_label=is_label)


def _renamed(where: str, names: dict[str, str]) -> str:
    """ "FILE:row" or "FILE, row N" with the file's present name."""
    path, place = re.fullmatch(r"(.*?)(:\d+|, row \d+)", where, re.S).groups()
    return names.get(path, path) + place


def _report(stats: dict, seq_len: int, folder: str, codec, log) -> None:
    for file in stats["files"]:
        rows = counted(file["rows"], "row")
        log(f"data: {file['path']}: {'/'.join(file['keys'])} ({file['why']}), {rows}")
    for file in stats["files"]:
        if file["used"]:
            note = " (its answers are learnt)" * ("history" in file["used"])
            log(f"data: {file['path']}: also used: {_counts(file['used'])}{note}")
        if file["unused"]:
            log(f"data: {file['path']}: unused keys: {_counts(file['unused'])}")
        if file["unused_in_turns"]:
            log(f"data: {file['path']}: unused keys in turns: {_counts(file['unused_in_turns'])}")
    if not codec.template and any(f["format"] not in ("text", "tokens") for f in stats["files"]):
        log(
            "data: the tokenizer has no chat template: turns are joined by line breaks and each "
            f"answer ends with {codec.tokenizer.eos_token} (--chat_template FILE sets a template)"
        )
    log(
        f"data: {counted(stats['documents'], 'document')}, {counted(stats['tokens'], 'token')} "
        f"({stats['label_tokens']:,} learnt) in {counted(stats['packed_rows'], 'row')} of "
        f"{seq_len:,}, "
        f"{stats['fill']:.1%} filled; {'from' if stats['cache_hit'] else 'cached in'} {folder}"
    )
    for what in ("truncated", "split"):
        if stats[what]:
            documents = counted(stats[what], "document")
            were = "was" if stats[what] == 1 else "were"
            text = f"data: {documents} longer than {seq_len:,} tokens {were} {what}"
            if lost := stats.get("cut_tokens"):  # missing in packs of earlier versions
                learnt = f"{stats['cut_learnt']:,} of them learnt"
                text += f": {counted(lost, 'token')} cut off, {learnt}"
            log(text)
    for reason, n in stats["turns"].items():
        turns = f"{counted(n['turns'], 'turn')} in {counted(n['rows'], 'row')}"
        are = "is" if n["turns"] == 1 else "are"
        log(f"data: {turns} {are} not learnt: {reason} (first {n['first']})")
    for reason, n in stats["skipped"].items():
        first = stats["first_skipped"][reason]
        log(f"data: skipped {counted(n, 'row')}: {reason} (first {first})")


def _counts(rows: dict, most: int = 12) -> str:
    texts = [f"{key or '(no name)'} ({counted(n, 'row')})" for key, n in rows.items()]
    return ", ".join(texts[:most]) + f" and {len(texts) - most:,} more" * (len(texts) > most)
