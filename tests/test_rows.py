"""Data means what its owner meant: each key of a row and each kind of file, used or named."""

import gzip
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import refused
from test_labels import QWEN3
from tiny_tokenizer import (
    CHATML,
    data_of_a_run,
    first,
    golden,
    make_tokenizer,
    packs_of,
    skipped,
    turns_of,
    write,
)

from llm_demo.core.errors import UserError
from llm_demo.data import labels, reasons, sources
from llm_demo.data.build import choose_seq_len
from llm_demo.data.readers import read_rows
from llm_demo.data.sources import find_files, heldout_beside
from llm_demo.model.source import load_tokenizer

PAIR = {"prompt": "hi", "completion": "yo"}
YO = "<S>user\nhi<E>\n<S>assistant\n⟦yo<E>⟧\n"
TOOLS = (
    "{% for t in tools or [] %}{{ t.name + '\n' }}{% endfor %}{% for m in messages %}"
    "{{ '<S>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments | tojson }}"
    "{% endfor %}{{ '<E>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<S>assistant\n' }}"
    "{% endif %}"
)


def load(path, template=CHATML, said=None, **options):
    options = {"cache_dir": f"{os.path.dirname(path)}/cache", "seq_len": 256} | options
    log = (lambda line: None) if said is None else said.append
    return packs_of(path, make_tokenizer(template), log=log, **options)


def not_loaded(path, message, **options):
    with refused(message):
        load(path, **options)


# ------------------------------------------------------------------ keys of a row


@pytest.mark.parametrize("form", ["list", "string", "messages"])
def test_alpaca_system_and_history(tmp_path, form):
    history = [["a", "b"], ["c", "d"]]
    if form == "string":  # as a CSV has it
        history = json.dumps(history)
    if form == "messages":
        history = turns_of(*"abcd")
    row = {"instruction": "hi", "input": "", "output": "yo", "system": "s", "history": history}
    path = write(tmp_path / "x.jsonl", row)
    said = []
    before = "<S>system\ns<E>\n<S>user\na<E>\n<S>assistant\n⟦b<E>⟧\n<S>user\nc<E>\n<S>assistant\n"
    assert first(load(path, said=said)) == golden(f"{before}⟦d<E>⟧\n{YO}")
    found = (
        f"data: {path}: also used: system (1 example), history (1 example) (its answers are learnt)"
    )
    assert found in said
    last = before.replace("⟦", "").replace("⟧", "") + f"d<E>\n{YO}"
    assert first(load(path, learn_turns="last")) == golden(last)


def test_the_last_answer_is_not_an_earlier_one(tmp_path):
    """If the last one is not to be learnt, or is empty, nothing is."""
    turns = turns_of("a", "b", "hi", "yo")
    rows = [turns, [*turns[:3], turns[3] | {"weight": 0}], [*turns[:3], turns[3] | {"content": ""}]]
    path = write(tmp_path / "x.jsonl", *({"messages": each} for each in rows))
    packs = load(path, learn_turns="last")
    assert first(packs) == golden(f"<S>user\na<E>\n<S>assistant\nb<E>\n{YO}")
    assert skipped(packs) == {labels.MARKED: 1, labels.EMPTY_TURN: 1}


def test_system_beside_a_prompt_and_beside_messages(tmp_path):
    turns = turns_of("hi", "yo")
    system = {"role": "system", "content": "s"}
    for row in (
        {**PAIR, "system": "s"},
        {"messages": turns, "system": "s"},
        {"messages": [system, *turns], "system": "s"},
        {"conversations": turns, "system": "s"},
        {"prompt": turns[:1], "completion": turns[1:], "system": "s"},
    ):
        packs = load(write(tmp_path / "x.jsonl", row))
        assert first(packs) == golden(f"<S>system\ns<E>\n{YO}"), row
    row = {"messages": [system, *turns], "system": "another"}
    not_loaded(write(tmp_path / "x.jsonl", row), r"x.jsonl:1: 'system' differs from")


LEFT_OUT = [
    {"weight": 0}, {"train": False}, {"loss_mask": 0.0}, {"training": False}, {"loss_scale": 0.0},
    {"trainable": False}, {"step_loss_mask": 0}, {"loss": False, "step_loss_mask": 0},
]  # fmt: skip


@pytest.mark.parametrize("mark", LEFT_OUT)
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_turn_marked_so_is_not_learnt(tmp_path, mark, key):
    role, text = ("role", "content") if key == "messages" else ("from", "value")
    turns = [{role: "user", text: "a"}, {role: "assistant", text: "b"} | mark]
    turns += [{role: "user", text: "hi"}, {role: "assistant", text: "yo", "weight": 1}]
    marks = "weight train training trainable loss loss_mask loss_scale step_loss_mask".split()
    template = CHATML.replace("m.content", f"m.content ~ m.{' ~ m.'.join(marks)}")
    path, said = write(tmp_path / "x.jsonl", {key: turns}), []
    packs = load(path, template, said)  # the template does not see the marks
    assert first(packs) == golden(f"<S>user\na<E>\n<S>assistant\nb<E>\n{YO}")
    line = f"data: not learnt: 1 turn in 1 example: {labels.MARKED} (first {path}:1)"
    assert line in said
    said.clear()
    assert load(path, template, said).documents.stats.cache_hit and line in said


def test_marks_that_cannot_be_done(tmp_path):
    turns = turns_of("hi", "yo")
    for mask in (0, True):  # to some 0 means not learnt, to others 1 does
        path = write(tmp_path / "x.jsonl", {"messages": [turns[0], turns[1] | {"mask": mask}]})
        not_loaded(path, r"x.jsonl:1: messages\[1\]: 'mask': .* is not known, and may exclude")
    turns[0]["weight"] = 1
    packs = load(write(tmp_path / "x.jsonl", {"messages": turns}))
    assert first(packs) == golden(YO) and list(packs.documents.stats.turns) == [labels.NOT_OURS]
    for bad in (0.5, "no", [1, 0], -1, float("nan")):
        turns[1]["weight"] = bad
        path = write(tmp_path / "x.jsonl", {"messages": turns})
        not_loaded(path, r"x.jsonl:1: messages\[1\]: weight must be 0 or 1")
    turns[1] |= {"weight": 1, "train": True, "loss_scale": 0}
    path = write(tmp_path / "x.jsonl", {"messages": turns})
    not_loaded(path, r"messages\[1\]: weight and train and loss_scale contradict each other: keep")


UNKNOWN_MARKS = [
    {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]},
    {"loss_weight": 0}, {"lossMask": False}, {"no_loss": True}, {"masked": 1}, {"ignore": True},
    {"skip_loss": "true"}, {"is_trainable": "no"}, {"do_not_learn": True}, {"TRAIN": 0.0},
    {"token_weights": [[0], [1]]}, {"loss_spans": {"0": 3}}, {"mask_out": True}, {"mask_out": 0},
    {"train": True, "learn": 0}, {"not_masked": False},
]  # fmt: skip
OTHER_KEYS = [
    {"score": 0}, {"no_loss": False}, {"ignore": 0}, {"skip": None}, {"loss_weight": 1},
    {"lossless": False}, {"retrained": 0}, {"train_detail": []}, {"train_split": "a"},
    {"completed": True}, {"not_masked": True}, {"name": "no"},
]  # fmt: skip


@pytest.mark.parametrize("keys", UNKNOWN_MARKS + OTHER_KEYS)
def test_marks_of_unknown_names(tmp_path, keys):
    turns, key = turns_of("hi", "yo"), list(keys)[-1]
    path = write(tmp_path / "x.jsonl", {"messages": [turns[0], turns[1] | keys]})
    if keys in OTHER_KEYS:
        assert first(load(path)) == golden(YO)
    else:
        not_loaded(path, rf"x.jsonl:1: messages\[1\]: '{key}': .* is not known, and may exclude")
        load(path, "{% if messages[-1]." + key + " %}{% endif %}" + CHATML)  # the template's own
        load(path, train_on_prompt=True)  # whatever the marks
    for row in (
        # what is not learnt needs no mark
        {"messages": [turns[0] | keys, turns[1]]},
        {"prompt": [turns[0], turns[1] | keys, turns[0]], "completion": "yo"},
        {"messages": [*turns, turns[0], turns[1] | keys | {"train": False}]},
        PAIR | keys,  # of a row, only a turn's marks are refused
    ):
        load(write(tmp_path / "x.jsonl", row))


@pytest.mark.parametrize("pair", [PAIR, {"text": "yo"}, {"input_ids": [5, 6]}])
def test_marks_of_a_row(tmp_path, pair):
    for mark in ({"train": False}, {"weight": 0}, {"loss_mask": [0, 1, 0]}, {"loss_scale": "0"}):
        message = "(this example has '{0}'|'{0}' is not known|'{0}' must be)".format(*mark)
        not_loaded(write(tmp_path / "x.jsonl", pair | mark), f"x.jsonl:1: {message}")
    load(write(tmp_path / "x.jsonl", pair | {"train": True, "score": 0, "loss": 1.5}))


def test_marks_of_parts_of_a_turn(tmp_path):
    for mark in ({"train": False}, {"weight": 0}, {"loss_mask": [0, 1]}, {"no_loss": True}):
        parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"} | mark]
        turns = turns_of(parts, "yo", "hi", parts)
        path = write(tmp_path / "x.jsonl", {"messages": turns})
        not_loaded(path, rf"x.jsonl:1: messages\[3\]: a part of its content has '{list(mark)[0]}'")
        load(write(tmp_path / "x.jsonl", {"messages": turns[:2]}))


def test_tool_definitions_of_a_rollout(tmp_path):
    schema = [{"name": "f"}]
    for tools in ({"tool_defs": schema}, {"tool_defs": '[{"name": "f"}]', "tools": schema}):
        path = write(tmp_path / "x.jsonl", PAIR | tools)
        assert first(load(path, TOOLS)) == golden(f"f\n{YO}")
        assert list(load(path).documents.stats.files[0].unused) == [*reversed(tools)]
    for other, message in (([], None), ([{"name": "g"}], "'tools' and 'tool_defs' differ: keep")):
        path = write(tmp_path / "x.jsonl", PAIR | {"tools": other, "tool_defs": schema})
        not_loaded(path, message) if message else load(path)
    not_loaded(write(tmp_path / "x.jsonl", PAIR | {"tool_defs": "f"}), "'tool_defs' must be a list")


def test_keys_that_are_not_used_are_listed_once_a_file(tmp_path):
    turn = {"role": "user", "content": "hi"}
    rows = [{"messages": [turn, {"role": "assistant", "content": "yo"}], "id": i} for i in range(3)]
    rows[0]["source"], rows[1]["source"], rows[2]["tools"] = "web", "", [{"name": "f"}]
    path = write(tmp_path / "x.jsonl", *rows)
    for _ in range(2):  # a cache hit says the same
        said = []
        load(path, said=said)
        assert [line for line in said if " used: " in line or " unused " in line] == [
            f"data: {path}: unused keys: id (3 examples), source (1 example), tools (1 example)"
        ]


def test_tool_calls_of_sharegpt(tmp_path):
    call = {"name": "f", "arguments": {"x": 1}}
    turns = [("human", "hi"), ("function_call", json.dumps(call)), ("observation", "7")]
    turns = [{"from": role, "value": value} for role, value in [*turns, ("gpt", "yo")]]
    path = write(tmp_path / "x.jsonl", {"conversations": turns, "tools": '[{"name": "f"}]'})
    rest = '⟦f{"x": 1}<E>⟧\n<S>tool\n7<E>\n<S>assistant\n⟦yo<E>⟧\n'
    assert first(load(path, TOOLS)) == golden(f"f\n<S>user\nhi<E>\n<S>assistant\n{rest}")
    not_loaded(path, f"1 x {labels.NO_CALLS}".replace("(", r"\(").replace(")", r"\)"))
    turns[1] = {"from": "gpt", "value": "b"}
    path = write(tmp_path / "x.jsonl", {"conversations": turns})
    no_tools = CHATML.replace("m.content", "(m.content if m.role != 'tool' else '')")
    not_loaded(path, "1 x the chat template drops the tool turn", template=no_tools)
    as_json = CHATML.replace("m.content", "(m.content if m.role != 'tool' else m.content | tojson)")
    assert first(load(path, as_json))[0]
    turns[1] = {"from": "function_call", "value": "call f"}
    path = write(tmp_path / "x.jsonl", {"conversations": turns})
    not_loaded(path, r"conversations\[1\]: tool_calls must be a list of", template=TOOLS)


# ------------------------------------------------------------------ masks


def test_turns_that_cannot_be_learnt_are_counted(tmp_path):
    def think(text):
        return f"<think>\nr\n</think>\n\n{text}"

    rows = ("a", think("b"), "c", think("d"), "e", think("f")), ("a", "", "hi", "yo")
    path = write(tmp_path / "x.jsonl", *({"messages": turns_of(*row)} for row in rows))
    said = []
    packs = load(path, QWEN3, said, pack=False)
    start = "<S>user\na<E>\n<S>assistant\n"
    text = f"{start}b<E>\n<S>user\nc<E>\n<S>assistant\nd<E>\n<S>user\ne<E>\n<S>assistant\n"
    assert first(packs) == golden(f"{text}⟦<think>\nr\n</think>\n\nf<E>⟧\n")
    assert (
        f"data: not learnt: 2 turns in 1 example: {reasons.NO_REASONING} (first {path}:1)" in said
    )
    assert f"data: not learnt: 1 turn in 1 example: {reasons.EMPTY_TURN} (first {path}:2)" in said
    assert "--chat_template" in reasons.NO_REASONING and skipped(packs) == {}
    keeps = load(path, CHATML, pack=False)  # what the line advises
    learnt = f"{start}⟦{think('b')}<E>⟧\n<S>user\nc<E>\n<S>assistant\n⟦{think('d')}<E>⟧\n"
    assert first(keeps) == golden(f"{learnt}<S>user\ne<E>\n<S>assistant\n⟦{think('f')}<E>⟧\n")


def test_one_turn_that_cannot_be_learnt_leaves_the_others(tmp_path):
    turns = turns_of("a", "b<E>c", "hi", "yo")  # the stop token inside an answer
    packs = load(write(tmp_path / "x.jsonl", {"messages": turns}))
    assert first(packs) == golden(f"<S>user\na<E>\n<S>assistant\nb<E>c<E>\n{YO}")
    assert packs.documents.stats.turns[reasons.ENDS_INSIDE].turns == 1


# ------------------------------------------------------------------ files


def test_csv_cells_are_text(tmp_path):
    for name, tab in (("x.csv", ","), ("x.tsv", "\t")):
        lines = ["prompt,completion,note", "None,007,NA", 'null,"a, b\nc",', "NaN,1e3,x"]
        (tmp_path / name).write_text("\n".join(line.replace(",", tab) for line in lines) + "\n")
        rows = [row for _, row in read_rows(str(tmp_path / name))]
        comma = "a, b\nc".replace(",", tab)
        assert rows == [
            {"prompt": "None", "completion": "007", "note": "NA"},
            {"prompt": "null", "completion": comma, "note": ""},
            {"prompt": "NaN", "completion": "1e3", "note": "x"},
        ]
    packs = load(str(tmp_path / "x.csv"), pack=False)
    assert first(packs, 0) == golden(YO.replace("hi", "None").replace("yo", "007"))
    for content, message in (
        (
            "a,b\n1,2,3\n",
            "x.csv, row 1: the header has 2 columns, the row has 3 cells; quote cells",
        ),
        ("prompt,completion,\nq\n", "x.csv, row 1: the header has 3 columns, the row has 1 cell"),
        ("a;b\n1;2\n", "x.csv, row 1: unknown format, keys: a;b; accepted"),
        ("a,a\n1,2\n", "two columns are named 'a'"),
        ('a,b\n1,"2\n', "x.csv: can't be read behind row 0: unexpected end of data"),
        ("a,b\n", "is empty"),
    ):
        (tmp_path / "x.csv").write_text(content)
        not_loaded(str(tmp_path / "x.csv"), message)


def test_a_glob_leaves_out_what_is_held_out(tmp_path):
    names = ["a.csv", "a.heldout.csv", "b.parquet", "b.heldout.parquet", "c.jsonl.gz"]
    names += ["c.heldout.jsonl.gz"]
    for name in names:
        (tmp_path / name).write_text("")
    for pattern, kept in (("*.csv", "a.csv"), ("*.parquet", "b.parquet"), ("*.gz", "c.jsonl.gz")):
        files, said = find_files(f"{tmp_path}/{pattern}")
        assert files == [f"{tmp_path}/{kept}"]
        stem, extension = kept.split(".", 1)
        assert len(said) == 1 and said[0].endswith(f": {tmp_path}/{stem}.heldout.{extension}")
        assert heldout_beside(f"{tmp_path}/{kept}") == f"{tmp_path}/{stem}.heldout.{extension}"
    assert find_files(f"{tmp_path}/*.heldout.csv") == ([f"{tmp_path}/a.heldout.csv"], [])


def test_a_folder_of_files(tmp_path):
    kept = ["b.ndjson", "latest.csv", "train-0.parquet", "x.json.zst"]
    skipped = ["test-0.parquet", "validation.csv", "x.heldout.jsonl"]
    # no data, and not named
    others = ["dataset_info.json", "dataset_infos.json", "state.json"]
    others += [".hidden.jsonl", "README.md", "LICENSE", "c.jsonl.xz"]
    for name in kept + skipped + others:
        (tmp_path / name).write_text("")
    found, (line,) = find_files(str(tmp_path))
    assert [os.path.basename(f) for f in found] == kept
    for name in skipped + others:
        assert (name in line) == (name in skipped)
    (tmp_path / "only").mkdir()
    for name in ("test.jsonl", "data.xlsx"):
        (tmp_path / "only" / name).write_text("")
        with pytest.raises(UserError, match="no data file to train on in .*only: name "):
            find_files(f"{tmp_path}/only")


@pytest.mark.parametrize("word", ["test", "validation", "valid", "val", "dev", "eval", "Dev"])
def test_a_folder_trains_on_no_other_split(word, tmp_path):
    """By each word of a name, wherever it stands; a longer word that holds it is none."""
    others = [f"{word}.jsonl", f"x_{word}.jsonl", f"{word}-00000-of-00002.jsonl", f"a.{word}.jsonl"]
    kept = [f"{word}elopment.jsonl", "train.jsonl", f"un{word}.jsonl"]
    for name in (*others, *kept):
        (tmp_path / name).write_text("")
    found, said = find_files(str(tmp_path))
    assert sorted(os.path.basename(f) for f in found) == sorted(kept)
    assert all(name in said[0] for name in others)


def test_other_files_are_refused(tmp_path):
    for end in ("zip", "tar", "gztar", "bztar", "xztar"):
        (tmp_path / end).mkdir()
        write(tmp_path / end / "x.jsonl", PAIR)
        archive = shutil.make_archive(str(tmp_path / f"x{end}"), end, tmp_path / end)
        not_loaded(archive, "row format|broken JSON|not UTF-8|is empty")


def test_arguments_in_a_table_that_json_lacks(tmp_path):
    when = pa.scalar(0, pa.timestamp("s")).as_py()
    for value in (when, b"raw"):
        calls = [{"function": {"name": "f", "arguments": {"when": value}}}]
        turns = [{"role": "user", "content": "hi", "tool_calls": None}]
        turns.append({"role": "assistant", "content": "", "tool_calls": calls})
        pq.write_table(pa.table({"messages": [turns]}), tmp_path / "x.parquet")
        message = r"row 1: messages\[1\]: the arguments of f must be a JSON object: Object of type"
        not_loaded(str(tmp_path / "x.parquet"), message, template=TOOLS)


def test_what_save_to_disk_writes(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"messages": turns_of("hi", "yo")}] * 3)
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "splits")
    for name, count in (("one", 3), ("splits", 3), ("splits/test", 1)):
        packs = load(str(tmp_path / name), pack=False)
        assert len(packs) == count and first(packs, count - 1) == golden(YO)
    (tmp_path / "splits/train").rename(tmp_path / "splits/dev")
    not_loaded(str(tmp_path / "splits"), "no data file to train on in .*splits/train")
    (tmp_path / "one/data-00001-of-00002.arrow").write_bytes(b"\xff\xff\xff\xff1234")
    damaged = "data-00001-of-00002.arrow: can't be read behind row 0"
    not_loaded(str(tmp_path / "one"), damaged)


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def test_arrays_and_compressed_files(tmp_path):
    rows = [PAIR, {"prompt": "é", "completion": "x" * 5000}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    array = b"\xef\xbb\xbf\n" + json.dumps(rows, indent=1).encode()
    csv = b"prompt,completion\nhi,yo\n\xc3\xa9," + b"x" * 5000 + b"\n"
    files = {
        "a.json": array,
        "b.json": lines,  # JSON Lines all the same
        "c.json.gz": gzip.compress(array),
        "d.jsonl.gz": gzip.compress(lines[:20]) + gzip.compress(lines[20:]),
        "e.jsonl.zst": zstd(lines),
        "f.json.zst": zstd(array),
        "g.csv.gz": gzip.compress(csv),
    }

    for name, content in files.items():
        path, sizes = tmp_path / name, []
        path.write_bytes(content)
        bar = SimpleNamespace(update=sizes.append)
        assert [row for _, row in read_rows(str(path), bar)] == rows, name
        assert sum(sizes) == len(content), name
    assert len(load(",".join(str(tmp_path / name) for name in files), seq_len=5200)) > 1
    bad = {
        "y.json": (b'[{"prompt": 1},\n {"b": }]', "y.json:2: broken JSON: .* at column 8"),
        "z.json": (b'[{"a": 1},\n {"a": 2, "a": 3}]', "z.json: broken JSON: .*'a' twice: 2 and 3"),
        "x.jsonl.gz": (files["d.jsonl.gz"][:-9], "x.jsonl.gz: can't be read behind row"),
        "y.jsonl.gz": (b"no gzip", "y.jsonl.gz: can't be read behind row 0"),
        "x.jsonl.zst": (files["e.jsonl.zst"][:-9], "x.jsonl.zst: can't be read behind row"),
        "y.parquet": (b"PAR1 no table \xff\xfe" * 5, "y.parquet: can't be read behind"),
        "z.parquet": (b"", "z.parquet: can't be read behind row 0"),
        "z.csv": (b"", "z.csv is empty"),
        "y.jsonl.zst": (b"no zstd at all", "y.jsonl.zst: can't be read behind row 0"),
    }
    for name, (content, message) in bad.items():
        (tmp_path / name).write_bytes(content)
        with refused(message):
            list(read_rows(str(tmp_path / name)))


def test_objects_in_parquet_keep_their_own_keys_only(tmp_path):
    def row(name, answer, **arguments):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turns = [{"role": "user", "content": "hi"}]
        turns += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": [*turns, {"role": "tool", "content": "7"}, answer]}

    rows = [
        row("f", {"role": "assistant", "content": "yo"}, city="Rome", of=["a", None]),
        row("g", {"role": "assistant", "content": "yes", "name": "Eve"}, n=3, at={"x": 1}),
        row("h", {"role": "assistant", "content": "no"}, at={"y": 2}),
    ]
    jsonl, parquet = write(tmp_path / "x.jsonl", *rows), str(tmp_path / "x.parquet")
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    assert [row for _, row in read_rows(parquet)] == rows
    same = [load(path, TOOLS, pack=False) for path in (jsonl, parquet)]
    assert [first(same[0], i) for i in range(3)] == [first(same[1], i) for i in range(3)]


def test_parquet_files_that_are_unlike_json(tmp_path):
    """No rows, a column of a type that JSON lacks, a null where text is needed, binary data."""
    path = str(tmp_path / "x.parquet")
    pairs = pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"prompt": ["a", "b"], "completion": ["c", "d"], "map": pairs}), path)
    assert len(load(path).row_docs) == 2
    for prompts, message in (
        (pa.array([], pa.string()), "x.parquet is empty: it has no examples to train on"),
        ([None, "b"], "x.parquet, row 1: prompt must be text, not null"),
        (["a", None], "x.parquet, row 2: prompt must be text, not null"),
        ([b"a", b"b"], "x.parquet, row 1: prompt must be text, not"),
    ):
        completions = pa.array(["c"] * len(prompts), pa.string())
        pq.write_table(pa.table({"prompt": prompts, "completion": completions}), path)
        with pytest.raises(UserError, match=message):
            load(path)
    table = {"messages": [None], "prompt": ["a"], "completion": ["b"]}
    pq.write_table(pa.table(table), path)
    assert load(path).documents.stats.files[0].format == "prompt"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A dataset in a folder in the place of the hub: all else is the real load_dataset."""
    import datasets

    card = "configs:\n- config_name: main\n  data_files:\n"
    for split, rows in (("train", 3), ("test", 2)):
        card += f"  - split: {split}\n    path: {split}.jsonl\n"
        rows = [{"question": f"{split} {i}?", "answer": f"{i}", "id": None} for i in range(rows)]
        (tmp_path / "repository").mkdir(exist_ok=True)
        write(tmp_path / f"repository/{split}.jsonl", *rows)
    (tmp_path / "repository/README.md").write_text(f"---\n{card}---\n")
    real = datasets.load_dataset

    def load_dataset(name, config, split):
        assert name == "openai/gsm8k"
        cache = str(tmp_path / "datasets")
        return real(str(tmp_path / "repository"), config, split=split, cache_dir=cache)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    sources.hub_rows.cache_clear()
    yield
    sources.hub_rows.cache_clear()


def test_no_script_of_a_dataset_is_run(tmp_path, hub, monkeypatch):
    """Nor is a question asked on the terminal, as before datasets 4."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "y")
    for file in (tmp_path / "repository").iterdir():
        file.unlink()
    script = tmp_path / "repository/repository.py"
    script.write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    with pytest.raises(UserError, match="gsm8k:main:train, a dataset of the hub: "):
        load("openai/gsm8k:main:train")
    assert not (tmp_path / "marker").exists() and not asked


def test_a_dataset_of_the_hub(tmp_path, hub, monkeypatch):
    monkeypatch.setenv("LLM_DEMO_CACHE", str(tmp_path / "cache"))
    keys = {
        "input_key": "question",
        "target_key": "answer",
        "train_json": "openai/gsm8k:main:train",
    }

    def load_both(said, **flags):
        return data_of_a_run(said, **keys | flags)

    said = []
    train, heldout = load_both(said, eval_json="openai/gsm8k:main:test")
    assert (len(train.row_docs), len(heldout.row_docs)) == (3, 2)
    assert said[0].startswith("data: openai/gsm8k:main:train: question/answer (--input_key,")
    assert first(train) == golden("<S>user\ntrain 0?<E>\n<S>assistant\n⟦0<E>⟧\n")
    said.clear()
    train, heldout = load_both(said, train_json="openai/gsm8k:train[:2]")
    assert len(train.row_docs) == 2 and heldout is None and not train.documents.stats.cache_hit
    train, heldout = load_both([], train_json="openai/gsm8k", eval_json="openai/gsm8k:train")
    assert train.documents.stats.cache_hit and len(heldout.row_docs) == 3  # a hit by its rows
    for flags, message in (
        ({"eval_json": "openai/gsm8k"}, "openai/gsm8k: name the split"),
        (
            {"train_json": "openai/gsm8k:validation"},
            "openai/gsm8k:validation, a dataset of the hub: .*split",
        ),
        ({"train_json": "openai/gsm8k:other:train"}, "openai/gsm8k:other:train, a dataset.*other"),
    ):
        with refused(message):
            load_both([], **flags)
    (tmp_path / "openai").mkdir()  # then it is a path, possibly a mistyped one
    with pytest.raises(UserError, match="no such data file: openai/gsm8k"):
        load_both([], train_json="openai/gsm8k")


def test_a_file_that_is_trained_and_evaluated_on_is_named(tmp_path):
    path, said = write(tmp_path / "x.jsonl", PAIR), []
    for same in (path, f"{tmp_path}/./x.jsonl", shutil.copy(path, tmp_path / "copy.txt")):
        data_of_a_run(said, train_json=f"{tmp_path}/*.jsonl", eval_json=str(same))
        line = (
            f"warning: {same} is held out and also in the training data: its held-out loss and "
            "exact answers are those of examples that are learnt"
        )
        assert line in said


# ------------------------------------------------------------------ templates


def test_without_a_template_the_log_says_what_is_done(tmp_path):
    path, said = write(tmp_path / "x.jsonl", PAIR), []
    assert first(load(path, None, said)) == golden("hi\n⟦yo<E>⟧")
    line = "no chat template: turns are joined by line breaks and each answer ends with <E>"
    assert [line in text for text in said].count(True) == 1
    said.clear()
    load(write(tmp_path / "y.jsonl", {"text": "abc"}), None, said)
    assert not any("chat template" in text for text in said)


def test_chat_template_is_set_and_kept(tmp_path):
    make_tokenizer(None).save_pretrained(tmp_path / "model")
    (tmp_path / "t.jinja").write_text(CHATML)
    tokenizer = load_tokenizer(str(tmp_path / "model"), str(tmp_path / "t.jinja"))
    tokenizer.save_pretrained(tmp_path / "run")  # as a run and an export do
    assert load_tokenizer(str(tmp_path / "run")).chat_template == CHATML
    raises = "{{ raise_exception('a system turn, please') }}{{ messages }}"
    (tmp_path / "raises.jinja").write_text(raises)  # its rows will show what it takes
    assert load_tokenizer(str(tmp_path / "model"), str(tmp_path / "raises.jinja"))
    for content, message in (
        ("{% for m in messages %}\n{{ m.role ", "bad.jinja: line 2: unexpected end"),
        ("{{ messages | upside_down }}", "bad.jinja: line 1: No filter named 'upside_down'"),
        ("hello", "never uses messages"),
    ):
        (tmp_path / "bad.jinja").write_text(content)
        with refused(f"--chat_template .*{message}"):
            load_tokenizer(str(tmp_path / "model"), str(tmp_path / "bad.jinja"))


# ------------------------------------------------------------------ length of a row


def test_seq_len_holds_99_percent(tmp_path):
    assert choose_seq_len(np.arange(1, 1001), 4096)[0] == 1024  # 990 of 1,000
    assert choose_seq_len(np.array([5] * 99 + [4000]), 4096)[0] == 128
    # of fewer than 100 documents: all, so that none is cut
    assert choose_seq_len(np.array([100] * 9 + [900]), 4096)[0] == 1024
    assert choose_seq_len(np.array([5] * 98 + [4000]), 4096)[0] == 4096
    assert choose_seq_len(np.array([5] * 98 + [4000] * 2), 4096)[0] == 4096
    assert choose_seq_len(np.array([5] * 98 + [4000] * 2), 300) == (
        300, "99% of 100 documents have at most 4,000 tokens; limited to 300",
    )  # fmt: skip
    rows = [{"text": "a" * (150 if i == 7 else 3)} for i in range(200)]
    path = write(tmp_path / "x.jsonl", *rows)
    packs = load(path, seq_len=0)
    assert packs.seq_len == 128 and packs.documents.stats.cut.get("truncate", 0) == 1
    asked = load(path, seq_len=128)
    assert not asked.documents.stats.cache_hit
    for name in ("row_docs", "row_start", "label_counts"):
        assert (getattr(asked, name) == getattr(packs, name)).all(), name
    for name in ("tokens", "is_label", "starts"):
        ours, others = (getattr(rows.documents, name) for rows in (asked, packs))
        assert (ours == others).all(), name
    assert asked.documents.identity == packs.documents.identity
    again = load(path, seq_len=0)
    assert again.documents.stats.cache_hit and again.seq_len == 128
    assert load(path, seq_len=0, limit=64).seq_len == 64


def test_seq_len_of_a_plan(tmp_path):
    write(tmp_path / "x.heldout.jsonl", {"text": "b" * 300})
    path, said = write(tmp_path / "x.jsonl", *[{"text": "a" * 140}] * 9), []
    train, heldout = data_of_a_run(said, train_json=path)
    assert train.seq_len == heldout.seq_len == 256
    why = "99% of 9 documents have at most 141 tokens, rounded up to a multiple of 128"
    assert f"seq_len: 256 ({why})" in said
