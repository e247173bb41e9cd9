"""Packing, cache, the rows of a step, batches, on documents that can be told apart."""

import dataclasses
import itertools
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizer import CHATML, golden, make_tokenizer, packs_of, skipped, turns_of
from tiny_tokenizer import write as write_rows

from llm_demo.core.errors import UserError
from llm_demo.core.rows import Slice, collate, order_rows, real_tokens, step_rows
from llm_demo.data.packs import best_fit, describe_example, prompts_of
from llm_demo.machine import files
from llm_demo.run.plan import with_max_docs

SHARED = Path(__file__).parents[2] / "shared"
TEXTS = ["a" * (i % 13) + f"{i:03d}" for i in range(200)]  # documents of 4 to 16 tokens with eos


def write(path, texts=TEXTS):
    return write_rows(path, *({"text": text} for text in texts))


def load(path, tokenizer=None, seq_len=32, **options):
    options = {"cache_dir": os.path.dirname(path) + "/cache", "log": lambda line: None} | options
    return packs_of(path, tokenizer or make_tokenizer(), seq_len=seq_len, **options)


def documents(packs):
    """Every document of the packs as (ids, labels), padding tails left out."""
    found = []
    for i in range(len(packs)):
        ids, labels, lengths = packs.row(i)
        assert ids.shape == labels.shape == (packs.seq_len,) and sum(lengths) == packs.seq_len
        at = np.cumsum(lengths)[:-1]
        parts = [
            (part.tolist(), label.tolist())
            for part, label in zip(np.split(ids, at), np.split(labels, at), strict=True)
        ]
        n_tokens = packs.token_counts[i]
        assert n_tokens == sum(len(part) for part, _ in parts if part[0] != packs.documents.pad_id)
        assert packs.label_counts[i] == (labels != -100).sum()
        if n_tokens < packs.seq_len:
            tail, nothing = parts.pop()
            assert set(tail) == {packs.documents.pad_id} and set(nothing) == {-100}
        found += parts
    return found


@pytest.mark.parametrize("pack", [True, False])
def test_packs_hold_every_document_once_with_its_labels(tmp_path, pack):
    packs = load(write(tmp_path / "x.jsonl"), pack=pack)
    expected = [golden(f"{text[0]}⟦{text[1:]}<E>⟧") for text in TEXTS]
    assert sorted(documents(packs)) == sorted(expected)
    assert len(packs.row_docs) == packs.documents.stats.files[0].rows == len(TEXTS)
    assert packs.token_counts.sum() == sum(len(t) + 1 for t in TEXTS)
    assert packs.label_counts.sum() == sum(map(len, TEXTS))
    if pack:
        assert packs.token_counts.sum() / (len(packs) * packs.seq_len) > 0.98
    else:
        assert len(packs) == len(TEXTS) and packs.max_docs == 2
        assert documents(packs) == expected
    assert packs.max_docs == max(len(packs.lengths(i)) for i in range(len(packs)))
    ids, labels, lengths = packs.row(-1)  # of padding
    assert set(ids.tolist()) == {260} and set(labels.tolist()) == {-100} and lengths == [32]
    with pytest.raises(IndexError):
        packs.row(len(packs))


def test_eos_as_padding_is_learnt_in_documents_only(tmp_path):
    packs = load(
        write(tmp_path / "x.jsonl", ["abc", "defgh"]), make_tokenizer(pad="<E>"), seq_len=16
    )
    assert packs.documents.pad_id == 259
    assert packs.row(0)[1].tolist() == [98, 99, 259, -100, 101, 102, 103, 104, 259] + [-100] * 7
    assert load(write(tmp_path / "x.jsonl"), make_tokenizer(pad=None)).documents.pad_id == 259


LONG = "abcdefghijklmnopqr"  # 19 tokens with eos


@pytest.mark.parametrize(
    ("overlong", "pieces"),
    [
        ("truncate", ["a⟦bcdefgh⟧"]),
        ("split", ["a⟦bcdefgh⟧", "i⟦jklmnop⟧", "q⟦r<E>⟧"]),
        ("drop", []),
    ],
)
def test_overlong(tmp_path, overlong, pieces):
    said = []
    file = write(tmp_path / "x.jsonl", [LONG, "xy"])
    packs = load(file, seq_len=8, overlong=overlong, log=said.append)
    assert sorted(documents(packs)) == sorted(golden(piece) for piece in [*pieces, "x⟦y<E>⟧"])
    assert packs.documents.stats.cut.get("truncate", 0) == (overlong == "truncate")
    assert packs.documents.stats.cut.get("split", 0) == (overlong == "split")
    dropped = {"longer than seq_len": 1} if overlong == "drop" else {}
    assert skipped(packs) == dropped
    cut = "1 document of more than 8 tokens truncated: 11 tokens cut off, 11 of them learnt"
    assert any(cut in line for line in said) == (overlong == "truncate")


def test_answers_of_a_conversation_are_its_last_turn(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", {"messages": turns_of(*"1234")})
    packs, tokenizer = load(path, seq_len=64), make_tokenizer()
    ((prompt, answer),) = prompts_of(packs, 1, 10**9)
    assert tokenizer.decode(answer, skip_special_tokens=True).split() == ["4"]
    asked = tokenizer.decode(prompt, skip_special_tokens=True).split()
    assert [word for word in asked if word.isdigit()] == ["1", "2", "3"]
    ((prompt, answer),) = prompts_of(packs, 1, len(prompt) - 1)  # no room: the turn before
    assert tokenizer.decode(answer, skip_special_tokens=True).split() == ["2"]


def test_rows_with_nothing_to_learn_are_dropped_and_counted(tmp_path):
    rows = [
        {"prompt": p, "completion": c} for p, c in [("hi", "yo"), ("hi", " "), ("h" * 40, "yo")]
    ]
    path, lines = write_rows(tmp_path / "x.jsonl", *rows), []
    packs = load(path, log=lines.append)
    assert documents(packs) == [golden("<S>user\nhi<E>\n<S>assistant\n⟦yo<E>⟧\n")]
    empty = "the assistant turn is empty"
    assert skipped(packs) == {empty: 1, "nothing to learn within seq_len": 1}
    assert any(f"skipped 1 example: {empty} (first {path}:2)" in line for line in lines)
    write_rows(tmp_path / "x.jsonl", rows[1])
    with pytest.raises(UserError, match=f"all examples are skipped: 1 x {empty}"):
        load(path)


def test_best_fit_is_best_fit_decreasing():
    def one_by_one(lengths, capacity):
        free = []
        for n in sorted(lengths, reverse=True):
            fits = [(left, row) for row, left in enumerate(free) if left >= n]
            if fits:
                free[min(fits)[1]] -= n
            else:
                free.append(capacity - n)
        return sorted(free)

    random = np.random.default_rng(0)
    for _ in range(100):
        capacity = int(random.integers(8, 60))
        lengths = random.integers(1, capacity + 1, random.integers(1, 120))
        used = np.bincount(best_fit(lengths, capacity), weights=lengths)
        assert sorted(capacity - used) == one_by_one(lengths.tolist(), capacity)


def test_a_step_is_the_same_rows_for_every_split():
    whole = step_rows([0, 50], 3, 7, 16)
    for ranks, micro, accumulation in [(1, 16, 1), (2, 4, 2), (4, 1, 4), (8, 2, 1)]:
        parts = whole.reshape(accumulation, ranks, micro)
        assert (
            parts.reshape(-1).tolist()
            == step_rows([0, 50], 3, 7, ranks * micro * accumulation).tolist()
        )
    # The stream is one sequence, so halving the global batch halves the steps' rows, nothing else.
    halves = np.concatenate([step_rows([0, 50], 3, 14, 8), step_rows([0, 50], 3, 15, 8)])
    assert halves.tolist() == whole.tolist()


def test_every_row_once_an_epoch_in_another_order():
    stream = np.concatenate([step_rows([0, 10], 0, step, 4) for step in range(10)])
    epochs = stream.reshape(4, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    assert step_rows([0, 10], 1, 0, 10).tolist() != step_rows([0, 10], 0, 0, 10).tolist()
    big = step_rows([0, 10], 0, 0, 40)  # several epochs in one step
    assert big.tolist() == stream.tolist()


def test_the_stream_ends_in_empty_rows():
    rows = np.concatenate([step_rows([0, 10], 0, step, 4, n_total=10) for step in range(4)])
    assert sorted(rows[:10].tolist()) == list(range(10)) and rows[10:].tolist() == [-1] * 6


def test_the_rows_are_pinned():
    # Resuming a run with a newer version must go on with the same rows.
    assert step_rows([0, 6], 0, 0, 12).tolist() == [3, 2, 5, 4, 0, 1, 1, 4, 3, 0, 2, 5]


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """84 rows with longest documents of 4 to 16 tokens."""
    random = np.random.default_rng(0).permutation(TEXTS).tolist()
    path = tmp_path_factory.mktemp("rows") / "x.jsonl"
    return load(write(path, random), seq_len=24)


def stream_of(rows_of, steps):
    return np.concatenate([rows_of(step) for step in range(steps)])


def test_longest_document_and_file_order_of_rows(packs):
    docs = [packs.row_docs[a:b] for a, b in itertools.pairwise(packs.row_start)]
    lengths = np.diff(packs.documents.starts)
    assert packs.longest_of_rows().tolist() == [max(lengths[d]) for d in docs]
    assert packs.file_order().tolist() == sorted(range(len(packs)), key=lambda i: min(docs[i]))
    assert any(len(d) > 1 for d in docs) and packs.file_order()[0] != 0


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("steps, batch", [(4, 8), (7, 24), (2, 200)])  # up to five epochs
def test_length_warmup_reorders_the_same_rows(packs, steps, batch, shuffle):
    plain = order_rows(packs, 3, batch, None, shuffle)
    rows_of = order_rows(packs, 3, batch, steps * batch, shuffle, steps)
    longest, before = packs.longest_of_rows().tolist(), stream_of(plain, steps).tolist()
    # sorted() is stable: equal rows stay in the order that they had
    assert stream_of(rows_of, steps).tolist() == sorted(before, key=longest.__getitem__) != before
    assert len(set(longest)) > 5 and rows_of(0).shape == (batch,) and rows_of(0).dtype == np.int64
    rows_of = order_rows(packs, 3, batch, (steps + 2) * batch - 3, shuffle, steps)
    for step in (steps, steps + 1, 0, steps):  # in any order, as after a resume
        rows = sorted(before, key=longest.__getitem__)[:batch] if step == 0 else plain(step)
        padded = [-1] * (3 * (step == steps + 1))
        assert rows_of(step).tolist() == [*rows[: batch - len(padded)], *padded]
    for step in range(steps):  # another length of the run: the same rows
        longer = order_rows(packs, 3, batch, None, shuffle, steps)
        assert rows_of(step).tolist() == longer(step).tolist()


def test_without_shuffling_every_epoch_is_in_file_order(tmp_path, packs):
    alone = load(write(tmp_path / "x.jsonl"), pack=False)
    rows_of = order_rows(alone, 1, 150, 450, shuffle=False)
    expected = [i % len(TEXTS) for i in range(450)] + [-1] * 150
    assert stream_of(rows_of, 4).tolist() == expected
    rows = stream_of(order_rows(packs, 1, 4, shuffle=False), 2 * len(packs) // 4)
    epochs = rows.reshape(2, -1)
    assert (epochs[0] == epochs[1]).all() and sorted(epochs[0]) == list(range(len(packs)))
    first = [packs.row_docs[packs.row_start[i]] for i in epochs[0]]
    assert first == sorted(first)


def test_training_and_held_out_rows_have_one_shape(tmp_path, packs):
    single = load(write(tmp_path / "x.jsonl"), pack=False)
    assert packs.max_docs > single.max_docs == 2
    for train, heldout in ((single, packs), (packs, single), (packs, None)):
        data = with_max_docs(train, heldout)
        assert all(rows.max_docs == packs.max_docs for rows in data.packs())


def test_collate(tmp_path):
    packs = load(write(tmp_path / "x.jsonl", ["abc", "defgh", "ijklmnopqrs"]), seq_len=16)
    assert [packs.row(i)[2] for i in range(2)] == [[4, 12], [6, 10]]
    batch = collate(dataclasses.replace(packs, max_docs=3), np.array([1, -1, 0]))
    assert batch.cu_seqlens.tolist() == [0, 6, 16, 32, 36] + [48] * 5
    assert batch.position_ids.tolist() == [
        [*range(6), *range(10)],
        [*range(16)],
        [*range(4), *range(12)],
    ]
    for b, row in enumerate([1, -1, 0]):
        ids, labels, _ = packs.row(row)
        assert batch.input_ids[b].tolist() == ids.tolist()
        assert batch.labels[b].tolist() == labels.tolist()
    kinds = [str(tensor.dtype) for tensor in batch]
    assert kinds == ["torch.int64", "torch.int64", "torch.int64", "torch.int32", "torch.int64"]
    assert batch.n_tokens.tolist() == [6, 0, 16]
    real = real_tokens(batch).view(3, 16)
    assert real.sum(1).tolist() == [6, 0, 16]
    assert real[0, :6].all()
    slices = [real_tokens(batch, Slice(at, 4)).view(3, 4) for at in range(4)]
    assert np.concatenate(slices, 1).tolist() == real.tolist()
    with pytest.raises(ValueError):
        collate(dataclasses.replace(packs, max_docs=1), [0])


def test_cache_is_keyed_by_content(tmp_path):
    path = write(tmp_path / "x.jsonl")
    first = load(path)
    assert not first.documents.stats.cache_hit
    again = load(path)
    assert again.documents.stats == replace(first.documents.stats, cache_hit=True)
    assert documents(again) == documents(first)
    copy = write(tmp_path / "copy.jsonl")
    hit = load(copy)
    assert hit.documents.stats.cache_hit and hit.documents.stats.files[0].path == copy
    changed = [
        {"seq_len": 16},
        {"train_on_prompt": True},
        {"overlong": "drop"},
        {"data_format": "text"},
        {"tokenizer": make_tokenizer(CHATML + " ")},
        {"tokenizer": make_tokenizer(pad="<E>")},
        {"tokenizer": make_tokenizer(bos="<B>")},
    ]
    for change in changed:
        assert not load(path, **change).documents.stats.cache_hit, change
    single = load(path, pack=False)  # rows are made of the same documents
    assert single.documents.stats.cache_hit and len(single) == len(TEXTS)
    write(tmp_path / "x.jsonl", [*TEXTS[:-1], "other"])
    assert not load(path).documents.stats.cache_hit


def test_the_same_bytes_are_other_rows_in_another_kind_of_table(tmp_path):
    text = "prompt,x\tcompletion,y\na,b\tc,d\n"
    keys = {"input_key": "prompt,x", "target_key": "completion,y"}
    (tmp_path / "x.tsv").write_text(text)
    (tmp_path / "x.csv").write_text(text)
    load(str(tmp_path / "x.tsv"), **keys)
    with pytest.raises(UserError, match="prompt,x"):
        load(str(tmp_path / "x.csv"), **keys)


def test_a_cache_hit_names_the_present_file(tmp_path):
    """In the rows that are skipped and in the turns that are not learnt, too."""
    turns = turns_of(*"abcd")
    turns[1]["weight"] = 0
    old = write_rows(tmp_path / "old.jsonl", {"messages": turns[:1]}, {"messages": turns})
    said = [], []
    built = load(old, seq_len=256, log=said[0].append).documents.stats
    (tmp_path / "old.jsonl").rename(tmp_path / "new.jsonl")
    hit = load(str(tmp_path / "new.jsonl"), seq_len=256, log=said[1].append).documents.stats
    assert hit.cache_hit and built.skipped and built.turns
    hit = [line.replace("; from /", "; cached in /") for line in said[1]]
    assert [line.replace("/old.", "/new.") for line in said[0]] == hit


def test_cache_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_DEMO_CACHE", str(tmp_path / "elsewhere"))
    load(write(tmp_path / "x.jsonl"), cache_dir=None)
    assert len(list((tmp_path / "elsewhere").glob("packs-*"))) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to the cache .*/file: File exists; set LLM_"):
        load(str(tmp_path / "x.jsonl"), cache_dir=str(tmp_path / "file"))


def test_what_killed_builds_have_left_is_removed_after_a_day(tmp_path):
    folder = tmp_path / "cache"
    for name, age in (("building-old", 2 * files.DAY), ("building-new", files.DAY // 2)):
        (folder / name / "built").mkdir(parents=True)
        for file in (folder / name / "built", folder / name):
            os.utime(file, (0, time.time() - age))
    load(write(tmp_path / "x.jsonl"))
    assert [name for name in os.listdir(folder) if name.startswith("building-")] == ["building-new"]


def test_the_slower_of_two_builders_uses_the_other_ones_files(tmp_path):
    folder = tmp_path / "cache/pack"

    def write_as(who):
        return lambda built: Path(built, "a").write_text(who)

    def overtaken(built):
        files.build(str(folder), write_as("the faster one"))
        write_as("the slower one")(built)

    files.build(str(folder), overtaken)
    assert (folder / "a").read_text() == "the faster one" and files.verified(str(folder))
    assert os.listdir(tmp_path / "cache") == ["pack"]


def test_describe_example(tmp_path):
    packs = load(write_rows(tmp_path / "x.jsonl", {"prompt": "hi", "completion": "y\u00e9"}))
    text = "<S>user\nhi<E>\n<S>assistant\n⟦yé<E>⟧\n"
    assert describe_example(packs, make_tokenizer()) == text

    text = TEXTS[12] * 300  # 4,500 letters
    packs = load(write(tmp_path / "x.jsonl", [text]), seq_len=8192)
    first, last = describe_example(packs, make_tokenizer()).split("\n[... 1,505 characters ...]\n")
    assert first == f"{text[0]}⟦{text[1:1499]}" and last == f"{text[-1496:]}<E>⟧"
