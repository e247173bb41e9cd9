"""Bad rows: all in one error, or skipped and counted; never those of held-out data."""

import json
import re
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import refused, run
from tiny_tokenizer import data_of_a_run, first, golden, make_tokenizer, packs_of, skipped, write

from llm_demo.core.errors import UserError
from llm_demo.data.check import CHECKED, check_rows
from llm_demo.flags.args import DataArgs

GOOD = {"prompt": "hi", "completion": "yo"}
TURN = {"role": "user", "content": "hi"}
YO = "<S>user\nhi<E>\n<S>assistant\n⟦yo<E>⟧\n"
FAULTS = {  # a row or line, what an error says of it, its reason when it is skipped
    "null": (GOOD | {"completion": None}, "completion must be text, not null"),
    "number": (GOOD | {"completion": 7}, "completion must be text, not 7"),
    "object": ({"prompt": {"a": 1}, "completion": "yo"}, "prompt must be text, not {\"a\": 1}"),
    "missing": ({"prompt": "hi"}, "no 'completion' in this example"),
    "other format": ({"text": "x"}, "no 'prompt' or 'completion' in this example"),
    "empty": ({}, "no 'prompt' or 'completion' in this example"),
    "array": ("[1]\n", "an example must be a JSON object, not [1]"),
    "broken": ('{"prompt": "hi\n', "broken JSON: Unterminated string starting"),
    "twice": ('{"prompt": 1, "prompt": 2}\n',
              "broken JSON: an object has the key 'prompt' twice: 1 and 2"),
    "picture": (GOOD | {"images": ["a"]},
                "this example has 'images', but only text can be learnt: leave such examples out"),
}  # fmt: skip


def load(path, said=None, **options):
    options = {"seq_len": 64, "cache_dir": f"{path}.cache"} | options
    log = (lambda line: None) if said is None else said.append
    return packs_of(path, make_tokenizer(), log=log, **options)


def message_of(path, **options):
    """The error of a file's rows, which is the same before ranks start."""
    with pytest.raises(UserError) as error:
        load(path, **options)
    if not path.endswith(".json"):
        with pytest.raises(UserError) as early:
            check_rows([path], DataArgs(**options))
        assert str(early.value) == str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_all_are_in_one_error(tmp_path):
    rows = [row for row, _ in FAULTS.values()]
    path = write(tmp_path / "x.jsonl", *rows[:5], GOOD, *rows[5:], GOOD)
    message = message_of(path)
    assert message.startswith(
        f"10 bad examples: {path}:1: completion must be text, not null; {path}:2"
    )
    numbers = [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]  # the good one is line 6
    for n, (_, what) in zip(numbers, FAULTS.values(), strict=True):
        assert f"{path}:{n}: {what}" in message
    assert message.endswith("; --skip_bad_rows skips bad examples") and "accepted" not in message
    one = write(tmp_path / "one.jsonl", GOOD, rows[1])
    assert message_of(one) == (
        f"{one}:2: completion must be text, not 7; --skip_bad_rows skips bad examples"
    )
    long = message_of(write(tmp_path / "x.jsonl", *[{"a" * 999: 1}] * 12, GOOD))
    assert long.startswith("12 bad examples, the first 10: ") and len(long) < 4000


def test_in_every_kind_of_file(tmp_path):
    texts = ["a", None, "b", None]
    pq.write_table(pa.table({"prompt": ["hi"] * 4, "completion": texts}), tmp_path / "x.parquet")
    rows = [GOOD | {"completion": text} for text in texts]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    (tmp_path / "x.csv").write_bytes(b"prompt,completion\nhi,a\nhi\nhi,b\n\nhi\n")
    for kind in ("parquet", "json", "csv"):
        path = str(tmp_path / f"x.{kind}")
        assert message_of(path).startswith(f"2 bad examples: {path}, row 2: ")
        assert f"; {path}, row 4: " in message_of(path)
        packs = load(path, skip_bad_rows=True)
        assert len(packs.row_docs) == 2 and packs.documents.row_numbers.tolist() == [1, 3]


def test_they_are_skipped_and_counted(tmp_path):
    rows = [row for row, _ in FAULTS.values()]
    turns = [{"messages": [{"role": "user", "content": None}]}] * 2
    path, said = write(tmp_path / "x.jsonl", *rows, *rows[:2], GOOD, *turns, GOOD), []
    packs = load(path, said, skip_bad_rows=True, pack=False)
    assert [first(packs, row) for row in range(len(packs))] == [golden(YO)] * 2
    counts = dict.fromkeys([f"bad example: {what}" for _, what in FAULTS.values()], 1)
    counts["bad example: no 'prompt' or 'completion' in this example"] = 4
    cut = {re.sub(", not .*|(?<=twice): .*", "", what): n for what, n in counts.items()}
    assert skipped(packs) == cut | {"bad example: completion must be text": 4}
    assert f"data: {path}: prompt/completion (first example), 16 examples" in said
    line = f"data: skipped 4 examples: bad example: completion must be text (first {path}:1)"
    assert line in said
    said.clear()
    assert load(path, said, skip_bad_rows=True).documents.stats.cache_hit and line in said
    # the flag is a part of what identifies the rows; without it nothing has changed
    assert packs.documents.identity["skip_bad_rows"] is True
    good = write(tmp_path / "good.jsonl", GOOD)
    assert load(good).documents.identity["skip_bad_rows"] is None
    assert not load(good, skip_bad_rows=True).documents.stats.cache_hit


def test_the_first_row_may_be_bad(tmp_path):
    for what in ("broken", "missing", "array", "empty"):
        path, said = write(tmp_path / "x.jsonl", FAULTS[what][0], GOOD, GOOD), []
        assert message_of(path).startswith(f"{path}:1: {FAULTS[what][1]}")
        assert len(load(path, said, skip_bad_rows=True).row_docs) == 2
        assert said[0] == f"data: {path}: prompt/completion (example 2), 3 examples"


def test_reasons_are_few(tmp_path):
    roles = [{"messages": [{"role": f"role {n}", "content": "x"}]} for n in range(70)]
    places = [{"messages": [TURN] * n + [TURN | {"content": None}]} for n in range(5)]
    good = {"messages": [TURN, TURN | {"role": "assistant"}]}
    path, said = write(tmp_path / "x.jsonl", *places, *roles, good), []
    assert (
        skipped(load(path, said, skip_bad_rows=True))["bad example: messages[…] must be text"] == 5
    )
    assert len([line for line in said if line.startswith("data: skipped")]) == 50


def test_nothing_but_bad_rows(tmp_path):
    good = write(tmp_path / "good.jsonl", GOOD)
    for rows in (("{\n", "[1]\n"), ({"prompt": 1, "completion": "a"}, GOOD | {"completion": 2})):
        path = write(tmp_path / "x.jsonl", *rows)
        for skip in (False, True):
            assert f"{path}:1: " in message_of(path, skip_bad_rows=skip)
            assert "--skip_bad_rows" not in message_of(path)  # it would not help
        with refused(f"{path}:1: "):  # nor with other files
            load(f"{good},{path}", skip_bad_rows=True, cache_dir=str(tmp_path / "cache"))
    path = write(tmp_path / "x.jsonl", {"frage": "a"}, "{\n", {"frage": "b"})
    for skip in (False, True):
        assert message_of(path, skip_bad_rows=skip).startswith(f"{path}:1: unknown format")


def test_what_is_learnt_is_never_skipped_over(tmp_path):
    """Marks and masks that are not understood: other rows may mean the same."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    null, good = {"messages": [{"role": "user", "content": None}]}, {"messages": turns}
    for mark in ({"no_loss": True}, {"weight": 0.5}, {"train": 0, "loss": 1}, {"mask": True}):
        odd = {"messages": [turns[0], turns[1] | mark]}
        path = write(tmp_path / "x.jsonl", null, good, odd, odd)
        with refused(rf"2 bad examples: {path}:3: .*; {path}:4: [^;]*$"):
            load(path, skip_bad_rows=True)
        with refused(rf"3 bad examples: {path}:1: [^;]*; {path}:3: .*; {path}:4: [^;]*$"):
            load(path)
    ids = {"input_ids": [5, 6], "labels": [5, 6]}
    for odd in ({"prompt_mask": [0, 1]}, {"labels": [6, 7]}, {"loss_mask": [0, 0]}):
        path = write(tmp_path / "x.jsonl", ids, {"input_ids": "x", "labels": [1]}, ids | odd)
        with refused(f"^{path}:3: "):
            load(path, skip_bad_rows=True)


def test_held_out_rows_are_never_skipped(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_DEMO_CACHE", str(tmp_path / "cache"))
    train = write(tmp_path / "x.jsonl", GOOD, "{\n", GOOD, GOOD)
    held = write(tmp_path / "x.heldout.jsonl", GOOD, "{\n", "{\n")

    def load_both(**flags):
        return data_of_a_run(train_json=train, skip_bad_rows=True, seq_len=64, **flags)

    with refused(rf"^2 bad examples: {held}:2: broken JSON: [^;]*; {held}:3: broken JSON: [^;]*$"):
        load_both()
    parts = load_both(eval_json="none", eval_fraction=0.3)
    assert [len(packs.row_docs) for packs in parts] == [2, 1]
    write(tmp_path / "x.heldout.jsonl", GOOD)
    assert [len(packs.row_docs) for packs in load_both()] == [3, 1]


def test_a_check_before_ranks_start_is_short(tmp_path):
    line = json.dumps(GOOD | {"completion": "y" * 100}) + "\n"
    began = time.process_time()
    check_rows([write(tmp_path / "x.jsonl", line * CHECKED, "{\n")], DataArgs())  # the ranks do
    assert time.process_time() - began < 3
    with refused(
        f"2 bad examples: .*x.jsonl:1: broken JSON.*; .*x.jsonl:{CHECKED + 2}: broken JSON"
    ):
        check_rows([write(tmp_path / "x.jsonl", "{\n", line * CHECKED, "{\n")], DataArgs())
    array = write(tmp_path / "x.json", json.dumps([GOOD, {}]))
    check_rows([array, "openai/gsm8k:test"], DataArgs())


EVALUATE = f"{sys.executable} -m llm_demo.evaluate --models models/qwen3-tiny --data"


@pytest.mark.parametrize("command", ["bash fsdp/launch_fsdp.sh --train_json", EVALUATE])
def test_before_torch_is_imported(command, tmp_path, record_property):
    record_property("bad inputs", 1)
    for heavy in ("torch", "transformers"):
        (tmp_path / f"{heavy}.py").write_text("raise SystemExit('too late')")
    path = write(tmp_path / "x.jsonl", GOOD, "{\n", GOOD, {"prompt": 7, "completion": "yo"})
    env = {"PYTHONPATH": str(tmp_path), "PYTHON": sys.executable}
    done = run([*command.split(), path], fresh=True, **env)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert line.startswith(
        f"error: 2 bad examples: {path}:2: broken JSON: Expecting property name "
    )
    assert f"; {path}:4: prompt must be text, not 7" in line and done.returncode == 2
    assert "skip_bad_rows" in line or command == EVALUATE
