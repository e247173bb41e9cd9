"""Which documents are trained on: sources by weight, held-out ones split off."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from tiny_tokenizer import make_tokenizer, packs_of

from llm_demo.core.errors import UserError
from llm_demo.core.rows import order_rows
from llm_demo.data.packs import mix, split_off
from llm_demo.data.sources import find_files, weighted


def files(folder, *counts):
    """Files of so many documents of various lengths, each with a text of its own."""
    paths = []
    for n, count in enumerate(counts):
        rows = [{"text": f"{n}-{i} " + "x" * (i % 7)} for i in range(count)]
        path = folder / f"{'abc'[n]}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(str(path))
    return paths


def load(path, **options):
    options = {"seq_len": 64, "log": lambda line: None, "cache_dir": "/tmp/unused"} | options
    return packs_of(path, make_tokenizer(), **options)


def documents(packs, rows):
    """The text of each document in these rows."""
    ids = packs.documents.tokens
    docs = [d for r in rows for d in packs.row_docs[packs.row_start[r] : packs.row_start[r + 1]]]
    spans = [ids[packs.documents.starts[d] : packs.documents.starts[d + 1]] for d in docs]
    return ["".join(map(chr, span[:-1])).strip("x").strip() for span in spans]


@pytest.mark.parametrize("pack", [True, False])
def test_each_pass_takes_another_share(tmp_path, pack):
    packs = load(",".join(files(tmp_path, 10, 30)), cache_dir=str(tmp_path / "cache"), pack=pack)
    mixed = mix(packs, [2, 0.3], 7, pack, epochs=4)
    assert len(mixed.passes) == 5 and mixed.passes[-1] == len(mixed)
    seen = []
    for at, end in zip(mixed.passes, mixed.passes[1:], strict=False):
        found = Counter(documents(mixed, range(at, end)))
        assert [found[f"0-{i}"] for i in range(10)] == [2] * 10
        seen.append({text for text in found if text.startswith("1-")})
        assert sum(found.values()) == 20 + 9
    assert len(set.union(*seen[:3])) == 27  # three shares without a document twice
    longer = mix(packs, [2, 0.3], 7, pack, epochs=1, n_rows=len(mixed) + 1)  # has the same passes
    assert len(longer.passes) > 5 and (longer.passes[:5] == mixed.passes).all()
    assert documents(longer, range(len(mixed))) == documents(mixed, range(len(mixed)))
    other = mix(packs, [2, 0.3], 8, pack, epochs=1)
    assert {t for t in documents(other, range(len(other))) if t[0] == "1"} != seen[0]
    for epochs, rows in ((10**8, 0), (1, 10**10)):
        with pytest.raises(UserError, match="--train_json: .* documents: at most 200,000,000"):
            mix(packs, [2, 0.3], 7, pack, epochs, rows)
    for row in range(len(mixed)):
        ids, labels, lengths = mixed.row(row)
        assert sum(lengths) == 64 and mixed.label_counts[row] == (labels != -100).sum()
        assert mixed.token_counts[row] == 64 - (lengths[-1] if (ids == 260).any() else 0)
        assert len(lengths) <= mixed.max_docs
        real = np.array(lengths[: len(lengths) - bool((ids == 260).any())])
        assert mixed.attended(np.array([row, -1])) == (real**2).sum() / 128


@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_go_through_all_passes_in_turn(tmp_path, shuffle):
    packs = load(",".join(files(tmp_path, 10, 30)), cache_dir=str(tmp_path / "cache"))
    mixed = mix(packs, [1, 0.5], 7, True, epochs=3)
    n = len(mixed)
    rows_of = order_rows(mixed, 1, 2, n_total=n, shuffle=shuffle)
    rows = np.concatenate([rows_of(step) for step in range(-(-n // 2))])
    assert sorted(rows[rows >= 0]) == list(range(n)) and (rows[n:] == -1).all()
    for at, end in zip(mixed.passes, mixed.passes[1:], strict=False):
        assert sorted(rows[at:end]) == list(range(at, end))
    assert mixed.rows_in(1) == mixed.passes[1] and mixed.rows_in(3) == n
    assert mixed.passes[1] < mixed.rows_in(1.5) < mixed.passes[2]


def test_a_split_is_by_document_and_always_the_same(tmp_path):
    (path,) = files(tmp_path, 40)
    long = {"text": "long " * 60}  # becomes pieces
    with open(path, "a") as file:
        file.write(json.dumps(long) + "\n")
    packs = load(path, cache_dir=str(tmp_path / "cache"), overlong="split")
    for fraction, count in ((0.05, 2), (0.5, 20)):
        parts = split_off(packs, fraction, True)
        rows = [set(part.documents.row_numbers[part.row_docs]) for part in parts]
        assert not rows[0] & rows[1] and len(rows[0] | rows[1]) == 41 and len(rows[1]) == count
        assert sum(part.token_counts.sum() for part in parts) == packs.token_counts.sum()
        again = split_off(packs, fraction, False)[1]
        assert set(again.documents.row_numbers[again.row_docs]) == rows[1]
    for fraction, what in ((0.001, "evaluate"), (0.999, "train")):
        with pytest.raises(UserError, match=f"--eval_fraction .* leaves none to {what} on"):
            split_off(packs, fraction, True)


def test_a_share_of_a_pass_is_rounded(tmp_path):
    """0.29 * 100 is 28.999... as a number of 64 bits."""
    (path,) = files(tmp_path, 100)
    packs = load(path, cache_dir=str(tmp_path / "cache"), pack=False)
    assert [packs.rows_in(share) for share in (0.29, 0.58, 1, 1.13)] == [29, 58, 100, 113]
    mixed = dataclasses.replace(packs, passes=np.array([0, 100, 200]))
    assert [mixed.rows_in(share) for share in (0.29, 0.58, 1, 1.13)] == [29, 58, 100, 113]


def test_the_only_rows_of_two_files_are_two_documents(tmp_path):
    paths = files(tmp_path, 1, 1)
    packs = load(",".join(paths), cache_dir=str(tmp_path / "cache"))
    assert packs.documents.row_numbers.tolist() == [1, 1]
    trained, heldout = split_off(packs, 0.5, True)
    assert sorted([*trained.row_docs, *heldout.row_docs]) == [0, 1]


def test_weights_of_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = files(tmp_path, 2, 3)
    (tmp_path / "dir").mkdir()
    for name in ("c.jsonl", "d.jsonl"):
        (tmp_path / "dir" / name).write_text("")
    (tmp_path / "odd*2").write_text("")
    assert weighted(f"{a}*2, {b}*0.3") == (f"{a},{b}", [2, 0.3])
    assert weighted(f"{a},{b}*.5") == (f"{a},{b}", [1, 0.5])
    assert weighted("dir*3") == ("dir", [3, 3])
    assert weighted("dir/*.jsonl*3,b.jsonl") == ("dir/*.jsonl,b.jsonl", [3, 3, 1])
    assert weighted("openai/gsm8k:main:train*2") == ("openai/gsm8k:main:train", [2])
    for plain in (a, f"{a},{b}", "dir/*.jsonl", "*.jsonl", "odd*2", "d*"):
        assert weighted(plain) == (plain, None), plain
    with pytest.raises(UserError, match=r"--train_json a.jsonl\*0: a weight must be .* above 0"):
        weighted("a.jsonl*0")
    for bad in ("-1", "nan", "two"):
        with pytest.raises(UserError, match=rf"no data file .* in a.jsonl\*{bad}"):
            find_files(weighted(f"a.jsonl*{bad}")[0])
    assert weighted("a.jsonl*1e3") == ("a.jsonl", [1000])
