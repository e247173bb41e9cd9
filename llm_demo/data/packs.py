"""From a data file to the rows of a step: pure functions of (file, tokenizer, flags, seed, step).

file -> records (records.py) -> documents (labels.py), memory-mapped from a cache folder (build.py)
-> rows of exactly seq_len slots -> the rows of step k, and their tensors (core/rows.py)"""

import dataclasses
import hashlib
import itertools
import json
import os

import numpy as np

from llm_demo.core.errors import UserError
from llm_demo.core.rows import IGNORE_INDEX, Packs
from llm_demo.data.build import LONGEST_DEFAULT, read, write_documents
from llm_demo.data.labels import Codec
from llm_demo.data.sources import content_of, find_files, place_of, suffix_of
from llm_demo.flags.args import names_of
from llm_demo.machine.cache import build
from llm_demo.machine.files import cache_folder
from llm_demo.machine.text import counted, progress

FORMAT = 11  # of a pack; increase it when the same files are read, labelled or stored differently
SPLIT_SEED = 0  # not --seed, so that runs with other seeds have the same held-out documents
SHOWN = 400  # tokens from each end of a long example
MOST_DOCUMENTS = 200_000_000  # of all passes of a mixture: a few GB of numbers


def load_packs(
    train_json: str,
    tokenizer,
    flags,
    split: str | None = None,
    limit: int = LONGEST_DEFAULT,
    log=print,
) -> Packs:
    """Packs of all files that find_files finds. Their documents are built once and then read from
    the cache, after verifying its checksums; packing them into rows takes a moment.

    split: of hub datasets that name none. flags: a DataArgs. Its seq_len 0: fits 99 % of the
    documents, rounded up to a multiple of 128, at most `limit`. pack_sequences: best fit of whole
    documents into rows; otherwise one padded document per row. overlong, for documents of over
    seq_len tokens: "truncate" keeps the first seq_len; "split" makes pieces of seq_len that do not
    see each other (a piece's first token has no context and is not learnt, and its last slot
    predicts nothing); "drop" skips the document. The cache: $LLM_DEMO_CACHE, else
    ~/.cache/llm_demo. Any number of processes may build the same packs at once; letting one per
    node go first saves work. Packs.stats: a Stats.

    The commands check the flags; raises UserError for files or tokenizers that can't be used."""
    files, skipped = find_files(train_json, split)
    for line in skipped:
        log(line)
    last_only = flags.learn_turns == "last"
    codec = Codec(tokenizer, flags.train_on_prompt, last_only, flags.learn_reasoning)
    key, identity = _identify(files, codec, flags, limit)
    folder = os.path.join(cache_folder(), f"packs-{key}")
    packs, problem = _open(folder, files, flags.pack_sequences)
    hit = packs is not None
    if problem:
        log(f"data: the cached pack {folder} is damaged ({problem}); rebuilding it")
    if not hit:
        build(folder, lambda built: write_documents(built, files, codec, flags, limit))
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
    identity |= {name: getattr(flags, name) for name in names_of("rows")}
    defaults = {"learn_turns": "all", "learn_reasoning": True, "skip_bad_rows": False}
    for name, default in defaults.items():
        if identity[name] == default:
            identity[name] = None  # as checkpoints have it
    facts = identity | {"pack_sequences": None, "limit": 0 if flags.seq_len else limit}
    key = [FORMAT, contents, list(map(suffix_of, files)), facts]
    return _hash(json.dumps(key))[:24], identity


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _open(folder: str, files: list[str], pack: bool) -> tuple[Packs | None, object]:
    """(the packs in a folder or None, what is wrong with it: None if it does not exist)."""
    if not os.path.isdir(folder):
        return None, None
    try:
        packs = read(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, error
    for file, path in zip(packs.stats.files, files, strict=True):
        file.path = path  # the same bytes may have been cached under another name
    return with_rows(packs, [rows_of(packs, np.arange(len(packs.doc_labels)), pack)]), None


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Row of each document, int64 [documents]: longest first, each into the fullest row it fits.

    Exactly best-fit decreasing, but for a whole group of equal lengths at a time: the fullest row
    that fits a document of n tokens stays the fullest until fewer than n slots are left. A million
    documents take a fraction of a second. Lengths must be in 1..capacity."""
    row_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    n_of = np.bincount(lengths, minlength=capacity + 1)
    free = [[] for _ in range(capacity + 1)]  # free slots -> rows with that many, in batches
    any_free = np.arange(capacity + 1) == capacity  # for new rows there always are
    n_rows = done = 0

    def put_back(size: int, rows: np.ndarray) -> None:
        if len(rows):
            free[size].append(rows)
            any_free[size] = True

    for n in progress(np.flatnonzero(n_of)[::-1].tolist(), "packing", unit="lengths"):
        documents = by_length[done : done + n_of[n]]
        done += n_of[n]
        while len(documents):
            size = n + int(any_free[n:].argmax())
            each = size // n
            if size < capacity:
                rows = free[size].pop()
                any_free[size] = bool(free[size])
            else:
                rows = np.arange(n_rows, n_rows - (-len(documents) // each))
                n_rows += len(rows)
            used = min(len(rows), -(-len(documents) // each))
            placed = min(len(documents), used * each)
            row_of[documents[:placed]] = np.repeat(rows[:used], each)[:placed]
            documents = documents[placed:]
            last = placed - (used - 1) * each  # the last row may get fewer
            put_back(size - each * n, rows[: used - 1])
            put_back(size - last * n, rows[used - 1 : used])
            put_back(size, rows[used:])
    return row_of


def rows_of(packs: Packs, documents: np.ndarray, pack: bool) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one pass over these documents: (their numbers row after row, how many each row
    has). pack: several documents in a row."""
    lengths = np.diff(packs.doc_start)[documents]
    row_of = best_fit(lengths, packs.seq_len) if pack else np.arange(len(documents))
    return documents[np.argsort(row_of, kind="stable")], np.bincount(row_of)


def with_rows(packs: Packs, passes: list[tuple]) -> Packs:
    """Packs of the same documents in the rows of these passes, each from rows_of."""
    row_docs, counts = map(np.concatenate, zip(*passes, strict=True))
    row_start = np.append(0, np.cumsum(counts))
    tokens, labels = (
        np.add.reduceat(n[row_docs], row_start[:-1])
        for n in (np.diff(packs.doc_start), packs.doc_labels)
    )
    begins = np.cumsum([0, *(len(rows) for _, rows in passes)])
    return dataclasses.replace(
        packs, row_docs=row_docs, row_start=row_start, token_counts=tokens, label_counts=labels,
        max_docs=int((counts + (tokens < packs.seq_len)).max()),
        passes=begins if len(passes) > 1 else None,
    )  # fmt: skip


def split_off(packs: Packs, fraction: float, pack: bool) -> tuple[Packs, Packs]:
    """(packs of the other documents, packs of a random `fraction` of them). A document that was
    split into pieces stays whole. pack: as in load_packs. Raises UserError if one part is empty."""
    begins = np.diff((packs.doc_file, packs.doc_row)).any(0)  # else a piece of the one before
    document_of = np.append(0, np.cumsum(begins))
    total = int(document_of[-1]) + 1
    chosen = round(total * fraction)
    if not 0 < chosen < total:
        raise UserError(
            f"--eval_fraction {fraction:g} of {total:,} documents leaves none to "
            f"{'train' if chosen else 'evaluate'} on"
        )
    held_out = np.zeros(total, bool)
    held_out[np.random.default_rng(SPLIT_SEED).permutation(total)[:chosen]] = True
    held_out = held_out[document_of]
    parts = (np.flatnonzero(~held_out), np.flatnonzero(held_out))
    return tuple(with_rows(packs, [rows_of(packs, part, pack)]) for part in parts)


def mix(
    packs: Packs, weights: list[float], seed: int, pack: bool, epochs: int, rows: int = 0
) -> Packs:
    """Packs of several passes, each of other documents: weight times as many of each file as these
    packs have. weights: of each file. Passes are added until there are `epochs` and `rows` rows.

    The documents of a file are dealt in a random order, then in another one, and so on; pass e gets
    the next share. So a weight of 2 takes each document twice a pass, and 0.3 takes another 30 % in
    each of three passes. A pass depends on seed and number alone, so a longer run has the same."""
    available, passes, n_rows = np.sort(packs.row_docs), [], 0
    files = [available[packs.doc_file[available] == n] for n in range(len(weights))]
    a_pass = sum(weight * len(file) for weight, file in zip(weights, files, strict=True))
    total = max(a_pass * epochs, rows * len(available) / len(packs))
    if total > MOST_DOCUMENTS:
        raise UserError(
            f"--train_json: a pass with the weights {weights} has {a_pass:,.0f} documents, and the "
            f"run takes {total:,.0f}: at most {MOST_DOCUMENTS:,}; give smaller weights, or fewer "
            "steps or epochs"
        )
    for epoch in itertools.count():
        documents = [
            _dealt(documents, weight, [seed, n], epoch)
            for n, (documents, weight) in enumerate(zip(files, weights, strict=True))
        ]
        chosen = np.sort(np.concatenate(documents))
        if not len(chosen):
            raise UserError(f"the weights {weights} of --train_json leave no document to train on")
        passes.append(rows_of(packs, chosen, pack))
        n_rows += len(passes[-1][1])
        if epoch + 1 >= epochs and n_rows >= rows:
            return with_rows(packs, passes)


def _dealt(documents: np.ndarray, weight: float, seed: list[int], epoch: int) -> np.ndarray:
    """The share of a file's documents that a pass takes."""
    n = len(documents)
    begin, end = (round(e * weight * n) for e in (epoch, epoch + 1))
    first, last = begin // max(1, n), -(-end // max(1, n))
    randoms = [np.random.default_rng([*seed, deal]) for deal in range(first, last)]
    dealt = [documents[:0], *(random.permutation(documents) for random in randoms)]
    return np.concatenate(dealt)[begin - first * n : end - first * n]


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


def shares_of_files(train: Packs, weights: list[float]) -> list[str]:
    """Lines on the documents of each file in the first pass of a mixture."""
    first, lines = train.doc_file[train.row_docs[: train.row_start[train.passes_at[1]]]], []
    for n, (file, weight) in enumerate(zip(train.stats.files, weights, strict=True)):
        documents = counted(int((first == n).sum()), "document")
        lines.append(f"data: {file.path}, weight {weight:g}: {documents} in the first pass")
    return lines


def prompts_of(packs: Packs, count: int, most: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) token lists of the first `count` documents in the packs' rows, in the file's
    order, with prompts of at most `most` tokens. An answer is the last run of labels with such a
    prompt: a conversation's last learnt turn, after the turns before it as they are in the file."""
    pairs = []
    for doc in np.unique(packs.row_docs):  # a split's packs have the documents of the whole file
        if len(pairs) == count:
            break
        start, end = packs.doc_start[doc : doc + 2]
        ids = packs.tokens[start:end]
        where = packs.is_label[start + 1 : end].nonzero()[0] + 1  # nothing predicts a first token
        runs = np.split(where, (np.diff(where) > 1).nonzero()[0] + 1)
        if runs := [run for run in runs if len(run) and run[0] <= most]:
            pairs.append((ids[: runs[-1][0]].tolist(), ids[runs[-1]].tolist()))
    return pairs


def refuse_unknown_tokens(packs: list[Packs], vocab_size: int) -> None:
    """Raise UserError if data given as token ids has one outside the model's vocabulary."""
    for p in packs:
        files = [file.path for file in p.stats.files if file.format == "tokens"]
        if files and (largest := int(p.tokens.max())) >= vocab_size:
            doc = np.searchsorted(p.doc_start, int(p.tokens.argmax()), "right") - 1
            path = p.stats.files[p.doc_file[doc]].path
            where = f"{path}{place_of(path)}{p.doc_row[doc]}"
            raise UserError(f"{where}: token {largest}, but the model knows {vocab_size} only")
