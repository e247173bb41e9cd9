"""From a data file to the rows of a step: pure functions of (file, tokenizer, flags, seed, step).

file -> records (records.py) -> documents (labels.py), memory-mapped from a cache folder (build.py)
-> rows of exactly seq_len slots -> the rows of step k, and their tensors (core/rows.py)"""

import hashlib
import itertools
import json
import os

import numpy as np

from llm_demo.core.errors import UserError
from llm_demo.core.rows import IGNORE_INDEX, Documents, Rows
from llm_demo.data.codec import Codec
from llm_demo.data.documents import LONGEST_DEFAULT, read_documents
from llm_demo.data.sources import content_of, find_files, suffix_of
from llm_demo.flags.args import names_of
from llm_demo.machine.files import build, cache_folder
from llm_demo.machine.text import blame, counted

# of a pack; increase it when the same files are read, labelled or stored differently
PACK_VERSION = 12
SPLIT_SEED = 0  # not --seed, so that runs with other seeds have the same held-out documents
SHOWN = 1500  # characters from each end of a long example
CONTENT_OF = "content of data file"  # in an identity, with its number
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what read_documents raises
DEFAULTS = {"learn_turns": "all", "learn_reasoning": True, "skip_bad_rows": False}
MOST_DOCUMENTS = 200_000_000  # of all passes of a mixture: a few GB of numbers


def load_rows(
    train_json: str,
    tokenizer,
    flags,
    split: str | None = None,
    limit: int = LONGEST_DEFAULT,
) -> tuple[Rows, list[str]]:
    """(rows of all files that find_files finds, lines for the log). Their documents are built once
    and then read from the cache, after verifying its checksums; packing them takes a moment.

    split: of hub datasets that name none. flags: a DataArgs. Its seq_len 0: fits 99 % of the
    documents, rounded up to a multiple of 128, at most `limit`. pack_sequences: best fit of whole
    documents into rows; otherwise one padded document per row. overlong, for documents of over
    seq_len tokens: "truncate" keeps the first seq_len; "split" makes pieces of seq_len that do not
    see each other (a piece's first token has no context and is not learnt, and its last slot
    predicts nothing); "drop" skips the document. The cache: $LLM_DEMO_CACHE, else
    ~/.cache/llm_demo. Any number of processes may build the same documents at once; letting one
    per node go first saves work.

    The commands check the flags; raises UserError for files or tokenizers that can't be used."""
    files, lines = find_files(train_json, split)
    last_only = flags.learn_turns == "last"
    codec = Codec(tokenizer, flags.train_on_prompt, last_only, flags.learn_reasoning)
    key, identity = _identify(files, codec, flags, limit)
    folder = str(cache_folder() / f"packs-{key}")
    documents = None
    if os.path.isdir(folder):
        try:
            documents = read_documents(folder, files, identity, cache_hit=True)
        except DAMAGE as error:
            lines.append(f"data: the cached pack {folder} is damaged ({error}); rebuilding it")
    if not documents:
        from llm_demo.data.build import write_documents

        build(folder, lambda built: write_documents(built, files, codec, flags, limit))
        with blame(f"{folder} is damaged; delete it, or set LLM_DEMO_CACHE to another folder"):
            documents = read_documents(folder, files, identity, cache_hit=False)
    everything = np.arange(len(documents.lengths))
    rows = in_rows(documents, [one_pass(documents, everything, flags.pack_sequences)])
    eos = None if codec.template else codec.tokenizer.eos_token
    return rows, lines + documents.stats.lines(rows, eos, folder)


def _identify(files: list[str], codec: Codec, flags, limit: int) -> tuple[str, dict]:
    """(the name of the pack: a hash of everything that it depends on, what a run compares of that
    when it is resumed). Of contents, not names and dates, so a copy hits the cache; but the same
    bytes are other rows in a file of another kind."""
    tokenizer = codec.tokenizer
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, codec.bos]
    specials = json.dumps([tokenizer.special_tokens_map, ids], default=str)
    contents = [content_of(file) for file in files]
    identity = {f"{CONTENT_OF} {n}": text[:16] for n, text in enumerate(contents, 1)}
    identity["tokenizer"] = _hash(codec.backend.to_str() + specials)[:16]
    identity["chat template"] = _hash(str(tokenizer.chat_template))[:16]
    for name in names_of("rows"):
        value = getattr(flags, name)
        # checkpoints of runs that did not have these flags hold None
        identity[name] = None if value == DEFAULTS.get(name) else value
    facts = identity | {"pack_sequences": None, "limit": 0 if flags.seq_len else limit}
    kinds = [suffix_of(file) for file in files]
    return _hash(json.dumps([PACK_VERSION, contents, kinds, facts]))[:24], identity


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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

    for n in np.flatnonzero(n_of)[::-1].tolist():
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
            for left, some in (
                (size - each * n, rows[: used - 1]),
                (size - last * n, rows[used - 1 : used]),
                (size, rows[used:]),
            ):
                if len(some):
                    free[left].append(some)
                    any_free[left] = True
    return row_of


def one_pass(
    documents: Documents, numbers: np.ndarray, pack: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one pass over the documents of these numbers: (their numbers row after row, how
    many each row has). pack: several documents in a row."""
    row_of = np.arange(len(numbers))
    if pack:
        row_of = best_fit(documents.lengths[numbers], documents.seq_len)
    return numbers[np.argsort(row_of, kind="stable")], np.bincount(row_of)


def in_rows(documents: Documents, passes: list[tuple[np.ndarray, np.ndarray]]) -> Rows:
    """The rows of these passes, each from `one_pass`, one after another."""
    row_docs = np.concatenate([numbers for numbers, _ in passes])
    counts = np.concatenate([counts for _, counts in passes])
    row_start = np.append(0, np.cumsum(counts))
    token_counts = np.add.reduceat(documents.lengths[row_docs], row_start[:-1])
    has_padding = token_counts < documents.seq_len
    return Rows(
        documents=documents,
        row_docs=row_docs,
        row_start=row_start,
        token_counts=token_counts,
        label_counts=np.add.reduceat(documents.label_counts[row_docs], row_start[:-1]),
        max_docs=int((counts + has_padding).max()),
        passes=np.append(0, np.cumsum([len(counts) for _, counts in passes])),
    )


def split_off(data: Rows, fraction: float, pack: bool) -> tuple[Rows, Rows]:
    """(rows of the other documents, rows of a random `fraction` of them). A document that was split
    into pieces stays whole. pack: as in `one_pass`. Raises UserError if one part is empty."""
    documents = data.documents
    # the others are pieces of the one before
    is_new = np.diff((documents.file_numbers, documents.row_numbers)).any(0)
    whole = np.append(0, np.cumsum(is_new))  # the number of each piece's document
    total = int(whole[-1]) + 1
    chosen = round(total * fraction)
    if not 0 < chosen < total:
        raise UserError(
            f"--eval_fraction {fraction:g} of {total:,} documents leaves none to "
            f"{'train' if chosen else 'evaluate'} on"
        )
    held_out = np.zeros(total, bool)
    held_out[np.random.default_rng(SPLIT_SEED).permutation(total)[:chosen]] = True
    is_held_out = held_out[whole]
    train = one_pass(documents, np.flatnonzero(~is_held_out), pack)
    heldout = one_pass(documents, np.flatnonzero(is_held_out), pack)
    return in_rows(documents, [train]), in_rows(documents, [heldout])


def mix(
    data: Rows, weights: list[float], seed: int, pack: bool, epochs: int, n_rows: int = 0
) -> Rows:
    """Rows of several passes, each of other documents: weight times as many of each file as `data`
    has. weights: of each file. Passes are added until there are `epochs` and `n_rows` rows.

    The documents of a file are dealt in a random order, then in another one, and so on; pass e gets
    the next share. So a weight of 2 takes each document twice a pass, and 0.3 takes another 30 % in
    each of three passes. A pass depends on seed and number alone, so a longer run has the same."""
    documents = data.documents
    available = np.sort(data.row_docs)
    file_numbers = documents.file_numbers[available]
    files = [available[file_numbers == n] for n in range(len(weights))]
    a_pass = sum(weight * len(file) for weight, file in zip(weights, files, strict=True))
    total = max(a_pass * epochs, n_rows * len(available) / len(data))
    if total > MOST_DOCUMENTS:
        raise UserError(
            f"--train_json: with the weights {weights} the run takes {total:,.0f} documents: at "
            f"most {MOST_DOCUMENTS:,}"
        )
    passes, made = [], 0
    while len(passes) < epochs or made < n_rows:
        shares = [
            _dealt(file, weights[n], [seed, n], epoch=len(passes)) for n, file in enumerate(files)
        ]
        chosen = np.sort(np.concatenate(shares))
        if not len(chosen):
            raise UserError(f"the weights {weights} of --train_json leave no document to train on")
        numbers, counts = one_pass(documents, chosen, pack)
        passes.append((numbers, counts))
        made += len(counts)
    return in_rows(documents, passes)


def _dealt(documents: np.ndarray, weight: float, seed: list[int], epoch: int) -> np.ndarray:
    """The share of a file's documents that a pass takes."""
    n = len(documents)
    begin = round(epoch * weight * n)
    end = round((epoch + 1) * weight * n)
    if begin == end:
        return documents[:0]
    first_deal, last_deal = begin // n, (end - 1) // n
    dealt = [
        np.random.default_rng([*seed, deal]).permutation(documents)
        for deal in range(first_deal, last_deal + 1)
    ]
    return np.concatenate(dealt)[begin - first_deal * n : end - first_deal * n]


def describe_example(data: Rows, tokenizer, row: int = 0) -> str:
    """The first document of a row as text, learnt tokens in brackets. Only the beginning and the
    end of a long one."""
    ids, labels, lengths = data.row(row)
    n = lengths[0]
    is_label = np.append(False, labels[: n - 1] != IGNORE_INDEX)
    text = ""
    for learnt, span in itertools.groupby(range(n), is_label.__getitem__):
        piece = tokenizer.decode(ids[list(span)].tolist(), clean_up_tokenization_spaces=False)
        text += f"⟦{piece}⟧" if learnt else piece
    if len(text) > 2 * SHOWN:
        middle = f"\n[... {len(text) - 2 * SHOWN:,} characters ...]\n"
        text = text[:SHOWN] + middle + text[-SHOWN:]
    return text


def shares_of_files(train: Rows, weights: list[float]) -> list[str]:
    """Lines on the documents of each file in the first pass of a mixture."""
    documents = train.documents
    in_first_pass = train.row_docs[: train.row_start[train.passes[1]]]
    counts = np.bincount(documents.file_numbers[in_first_pass], minlength=len(weights))
    return [
        f"data: {file.path}, weight {weight:g}: {counted(int(n), 'document')} in the first pass"
        for file, weight, n in zip(documents.stats.files, weights, counts, strict=True)
    ]


def prompts_of(data: Rows, count: int, most: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) token lists of the first `count` documents of these rows, in the file's
    order, with prompts of at most `most` tokens. An answer is the last run of labels with such a
    prompt: a conversation's last learnt turn, after the turns before it as they are in the file."""
    documents = data.documents
    pairs = []
    for number in np.unique(data.row_docs):  # a split has the documents of the whole file
        if len(pairs) == count:
            break
        start, end = documents.starts[number : number + 2]
        ids = documents.tokens[start:end]
        learnt = documents.is_label[start + 1 : end].nonzero()[0] + 1  # nothing predicts the first
        runs = np.split(learnt, (np.diff(learnt) > 1).nonzero()[0] + 1)
        runs = [run for run in runs if len(run) and run[0] <= most]
        if runs:
            pairs.append((ids[: runs[-1][0]].tolist(), ids[runs[-1]].tolist()))
    return pairs


def refuse_unknown_tokens(data: list[Rows], vocab_size: int) -> None:
    """Raise UserError if data given as token ids has one outside the model's vocabulary."""
    for documents in (rows.documents for rows in data):
        files = [file.path for file in documents.stats.files if file.format == "tokens"]
        largest = int(documents.tokens.max())
        if files and largest >= vocab_size:
            raise UserError(
                f"{', '.join(files)}: token {largest}, but the model knows {vocab_size} only"
            )
