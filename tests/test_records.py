"""File formats: every shape of row becomes the same conversation, every bad example is named."""

import json

import pytest
from test_labels import AS_JSON, AS_TEXT, QWEN3
from tiny_tokenizer import first, golden, make_tokenizer, packs_of, skipped, turns_of, write

from llm_demo.core.errors import UserError
from llm_demo.data import build
from llm_demo.data.readers import read_rows
from llm_demo.data.records import FORMATS
from llm_demo.data.sources import find_files

YO = "<S>user\nhi<E>\n<S>assistant\n⟦yo<E>⟧\n"
PART = {"type": "text", "text": "hi"}
SAME_ROW = {
    "messages": {"messages": turns_of("hi", "yo")},
    "conversations": {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    },
    "prompt": {"prompt": "hi", "completion": "yo"},
    "input": {"input": "hi", "target": "yo"},
    "alpaca": {"instruction": "hi", "input": "", "output": "yo", "text": "flattened: hi yo"},
}


def load(path, tokenizer=None, seq_len=64, **options):
    options = {"cache_dir": path + ".cache", "log": lambda line: None} | options
    return packs_of(path, tokenizer or make_tokenizer(), seq_len=seq_len, **options)


@pytest.mark.parametrize("name", SAME_ROW)
@pytest.mark.parametrize("data_format", ["auto", "explicit"])
def test_every_format_is_the_same_conversation(tmp_path, name, data_format):
    path = write(tmp_path / "x.jsonl", SAME_ROW[name])
    packs = load(path, data_format=name if data_format == "explicit" else "auto")
    assert first(packs) == golden(YO)
    assert packs.documents.stats.files[0].format == name


def test_text_is_learnt_whole_and_ends_with_eos(tmp_path):
    path = write(tmp_path / "x.jsonl", {"text": "abc"}, {"text": "ab<E>"}, {"text": "a<E>\n"})
    packs = load(path, pack=False)
    assert first(packs, 0) == golden("a⟦bc<E>⟧")
    assert first(packs, 1) == golden("a⟦b<E>⟧")
    assert first(packs, 2) == golden("a⟦<E>\n⟧")  # as a template has written it


def test_tokens_are_taken_as_they_are(tmp_path):
    path = write(
        tmp_path / "x.jsonl",
        {"input_ids": [5, 6, 7]},
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [5, 6], "labels": [-100, -100]},
    )
    packs = load(path, pack=False)
    assert first(packs, 0) == ([5, 6, 7], [6, 7, -100])
    assert first(packs, 1) == ([5, 6, 7, 8], [-100, 7, 8, -100])
    assert skipped(packs) == {"nothing to learn": 1}
    for row, message in (
        ({"input_ids": "abc"}, "'input_ids' must be a list of whole numbers from 0"),
        ({"input_ids": [1, -2]}, "'input_ids' must be a list of whole numbers from 0"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "not shifted"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' must be a list of numbers, one for each"),
    ):
        with pytest.raises(UserError, match=f":1: .*{message}"):
            load(write(tmp_path / "y.jsonl", row))


IDS = [5, 6, 7, 8, 9]
MASKED = {
    # keys of a row beside its ids, and what is left: ids, shifted labels
    "nothing": ({}, IDS, [6, 7, 8, 9, -100]),
    "completion_mask": ({"completion_mask": [0, 0, 0, 1, 1]}, IDS, [-100, -100, 8, 9, -100]),
    "assistant_masks": ({"assistant_masks": [0, 1, 0, 0, 1]}, IDS, [6, -100, -100, 9, -100]),
    "loss_mask": ({"loss_mask": [False, False, True, 1.0, 0]}, IDS, [-100, 7, 8, -100, -100]),
    "padded right": ({"attention_mask": [1, 1, 1, 0, 0]}, IDS[:3], [6, 7, -100]),
    "padded left": ({"attention_mask": [0, 0, 1, 1, 1]}, IDS[2:], [8, 9, -100]),
    "padded on both sides": ({"attention_mask": [0, 1, 1, 1, 0],
                              "completion_mask": [0, 0, 0, 1, 0]},
                             IDS[1:4], [-100, 8, -100]),
    "padded, with labels": ({"attention_mask": [1, 1, 1, 1, 0], "labels": [-100, -100, 7, 8, -100]},
                            IDS[:4], [-100, 7, 8, -100]),
    "padded, labels a copy": ({"attention_mask": [1, 1, 1, 1, 0], "labels": IDS}, IDS[:4],
                              [6, 7, 8, -100]),
    "padded, positions": ({"attention_mask": [0, 1, 1, 1, 1], "position_ids": [1, 0, 1, 2, 3]},
                          IDS[1:], [7, 8, 9, -100]),
    "masks that agree": ({"completion_mask": [1, 0, 0, 1, 1], "labels": [-100, -100, -100, 8, 9]},
                         IDS, [-100, -100, 8, 9, -100]),
}  # fmt: skip


def test_keys_of_tokenised_rows(tmp_path):
    for case, (keys, ids, shifted) in MASKED.items():
        path, said = write(tmp_path / "x.jsonl", {"input_ids": IDS, **keys}), []
        assert first(load(path, log=said.append)) == (ids, shifted), case
        assert not any("unused" in line for line in said)


COMPLETION, REAL, LOSS = "completion_mask", "attention_mask", "loss_mask"
REFUSED = [
    # keys of a row beside its ids, and what the message names
    ({COMPLETION: [0, 0, 0, 1, 1], LOSS: [0, 0, 1, 1, 1]}, "contradict each other"),
    ({COMPLETION: [0, 0, 0, 1, 1], "labels": IDS}, "completion_mask and labels contradict each"),
    ({REAL: [1, 1, 1, 0, 0], COMPLETION: [0, 0, 1, 1, 0]}, "'completion_mask' contradicts 'att"),
    ({REAL: [1, 1, 1, 0, 0], "labels": [-100, 6, 7, 8, -100]}, "'labels' contradicts 'attention"),
    ({REAL: [1, 1, 0, 1, 1]}, "'attention_mask' has a 0 between ones"),
    ({"position_ids": [0, 1, 2, 0, 1]}, "'position_ids' must count from 0"),
    ({"position_ids": {"a": 1}}, "'position_ids' must be a list of whole"),
    ({LOSS: [0, 1]}, "'loss_mask' must be a list of numbers, one for each"),
    ({LOSS: [0, 0.5, 1, 1, 1]}, "'loss_mask' must be a list of whole"),
    ({REAL: [[1] * 5] * 5}, "'attention_mask' must be a list of whole"),
    ({"labels": []}, "'labels' must be a list of numbers, one for each token"),
    ({COMPLETION: []}, "'completion_mask' must be a list of numbers, one"),
]
UNKNOWN = ("prompt_mask", "mask", "cu_seq_lens_q", "weight", "pixel_values", "seq_lengths",
           "sequence_ids", "document_ids", "segment_ids")  # fmt: skip
REFUSED += [({key: [1, 0]}, f"'{key}' is not known beside 'input_ids'") for key in UNKNOWN]


def test_keys_of_tokenised_rows_that_are_refused(tmp_path):
    for keys, message in REFUSED:
        with pytest.raises(UserError, match=rf"x.jsonl:1: .*{message}"):
            load(write(tmp_path / "x.jsonl", {"input_ids": IDS, **keys}))


def test_a_row_of_padding_is_skipped(tmp_path):
    row = {"input_ids": IDS, "attention_mask": [0] * 5}
    packs = load(write(tmp_path / "x.jsonl", row, {"input_ids": IDS}))
    assert skipped(packs) == {"nothing to learn": 1}


QUESTIONS = [
    ("question", "answer"),
    ("question", "response"),
    ("instruction", "response"),
    ("query", "response"),
]


def test_pairs_of_columns_that_are_detected(tmp_path):
    for keys in (*QUESTIONS, ("prompt", "response")):
        row = dict(zip(keys, ("hi", "yo"), strict=True))
        assert first(load(write(tmp_path / "x.jsonl", row | {"id": 7}))) == golden(YO)
        if keys in QUESTIONS:  # as Dolly has it
            packs = load(write(tmp_path / "y.jsonl", row | {"context": "c", "input": ""}))
            assert first(packs) == golden(YO.replace("hi", "hi\n\nc"))
            assert packs.documents.stats.files[0].used == {"context": 1}


OTHER_NAMES = {
    "system": ["developer"],
    "user": ["human", "prompter", "USER", " user "],
    "assistant": ["gpt", "chatgpt", "model", "bot", "ai"],
    "tool": ["function", "ipython", "observation", "tool_response", "function_response"],
}


def test_each_name_of_a_role(tmp_path):
    for role, names in OTHER_NAMES.items():
        for name in (role, *names):
            turns = messages(("system", "s"), ("user", "u"), ("assistant", "a"), ("tool", "t"))
            turns["messages"].append({"role": "assistant", "content": "b"})
            for turn in turns["messages"]:
                turn["role"] = name if turn["role"] == role else turn["role"]
            found = first(load(write(tmp_path / f"{name}.jsonl", turns)))
            text = "<S>system\ns<E>\n<S>user\nu<E>\n<S>assistant\n⟦a<E>⟧\n<S>tool\nt<E>\n"
            assert found == golden(f"{text}<S>assistant\n⟦b<E>⟧\n"), name


def test_media_are_refused_by_each_name(tmp_path):
    for key in ("image", "images", "video", "videos", "audio", "audios"):
        of_turn = messages(("user", "x"), ("assistant", "y"))
        of_turn["messages"][0][key] = ["a"]
        for row, where in (({**GOOD, key: ["a"]}, "this example"), (of_turn, r"messages\[0\]")):
            with pytest.raises(UserError, match=f":1: {where} has '{key}', but only text"):
                load(write(tmp_path / "x.jsonl", row))


def test_text_parts_by_each_type(tmp_path):
    for kind in ("text", "input_text", "output_text", None):
        parts = [{"type": kind, "text": "h"}, {"type": kind, "text": "i"}]
        row = {"messages": [{"role": "user", "content": parts}, *turns_of("hi", "yo")[1:]]}
        assert first(load(write(tmp_path / "x.jsonl", row))) == golden(YO)


def test_a_null_or_empty_key_of_a_turn_is_no_key(tmp_path):
    template = (
        "{% for m in messages %}{% for k in ['tool_calls', 'function_call', 'refusal', 'name'] %}"
        "{% if k in m %}{{ raise_exception('this template has no ' + k) }}{% endif %}{% endfor %}"
        "{{ '<S>' + m.role + '\n' + m.content + '<E>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<S>assistant\n' }}{% endif %}"
    )
    empty = {"tool_calls": [], "function_call": None, "refusal": None}
    turns = turns_of("hi", "yo")
    row = {"messages": [turn | empty | {"tool_calls": None} for turn in turns]}
    again = {"messages": [turn | empty for turn in turns]}
    packs = load(write(tmp_path / "x.jsonl", row, again), make_tokenizer(template), pack=False)
    assert [first(packs, number) for number in range(2)] == [golden(YO)] * 2
    path = write(tmp_path / "y.jsonl", {"messages": [turns[0] | {"name": "Eve"}, turns[1]]})
    with pytest.raises(UserError, match="refuses the conversation: this template has no name"):
        load(path, make_tokenizer(template))


WAYS_TO_CALL = {
    "object": {"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    "text": {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x":1}'}}]},
    "not nested": {"tool_calls": [{"name": "f", "arguments": '{"x": 1}', "type": "function"}]},
    "parameters": {"tool_calls": [{"function": {"name": "f", "parameters": {"x": 1}}}]},
    "LangChain's": {"tool_calls": [{"name": "f", "args": {"x": 1}, "type": "tool_call"}]},
    "Anthropic's": {"tool_calls": [{"type": "tool_use", "name": "f", "input": {"x": 1}}]},
    "beside": {"tool_calls": [{"function": {"name": "f"}, "arguments": {"x": 1}}]},
    "beside null": {"tool_calls": [{"function": None, "name": "f", "kwargs": {"x": 1}}]},
    "a null": {"tool_calls": [{"name": "f", "arguments": None, "parameters": {"x": 1}}]},
    "twice": {"tool_calls": [{"name": "f", "arguments": '{"x":1}', "parameters": {"x": 1}}]},
    "empty text": {"tool_calls": [{"name": "f", "arguments": "{}", "input": {"x": 1}}]},
    "list as text": {"tool_calls": '[{"name": "f", "arguments": {"x": 1}}]'},
    "older key": {"function_call": {"name": "f", "arguments": '{"x": 1}'}, "content": None},
    "turn": {"role": "function_call", "content": '{"name": "f", "arguments": "{\\"x\\": 1}"}'},
}


@pytest.mark.parametrize("way", WAYS_TO_CALL)
@pytest.mark.parametrize("template", [AS_JSON, AS_TEXT])
def test_one_call_in_any_encoding(tmp_path, way, template):
    turns = turns_of("hi", "")
    turns[1] |= WAYS_TO_CALL[way]
    turns += [{"role": "ipython" if way == "text" else "function", "content": "7"}]
    path = write(tmp_path / "x.jsonl", {"messages": [*turns, turns[1] | {"weight": 0}]})
    learnt = '⟦[f] {"x": 1}<E>⟧\n<S>tool\n7<E>\n<S>assistant\n[f] {"x": 1}<E>\n'
    packs = load(path, make_tokenizer(template), seq_len=128)
    assert first(packs) == golden(f"<S>user\nhi<E>\n<S>assistant\n{learnt}")


def test_reasoning_by_other_names(tmp_path):
    expected = golden("<S>user\nhi<E>\n<S>assistant\n⟦<think>\nr\n</think>\n\nyo<E>⟧\n")
    for key in ("reasoning_content", "reasoning", "thinking"):
        turns = turns_of("hi", "yo")
        turns[1][key] = "r"
        path, said = write(tmp_path / f"{key}.jsonl", {"messages": turns}), []
        packs = load(path, make_tokenizer(QWEN3), log=said.append)
        assert first(packs) == expected
        assert not any("unused" in line for line in said)
    for more in ({"reasoning": "", "thinking": "r"}, {"reasoning": "r", "thinking": "r"}):
        path = write(tmp_path / "x.jsonl", {"messages": [turns[0], turns[1] | more]})
        assert first(load(path, make_tokenizer(QWEN3))) == expected


def test_golden_numbers(tmp_path):
    # The one golden array in plain numbers, to hold the others' notation to account.
    path = write(tmp_path / "x.jsonl", {"messages": turns_of("A", "BC")})
    ids, labels, lengths = load(path, seq_len=28).row(0)
    user = [258, 117, 115, 101, 114, 10]
    assistant = [258, 97, 115, 115, 105, 115, 116, 97, 110, 116]
    assert ids.tolist() == [*user, 65, 259, 10, *assistant, 10, 66, 67, 259, 10, *[260] * 4]
    assert labels.tolist() == [*[-100] * 19, 66, 67, 259, *[-100] * 6]
    assert lengths == [24, 4]


def test_own_names_by_keys(tmp_path):
    path = write(tmp_path / "x.jsonl", {"question": "hi", "answer": "yo", "text": "no"})
    packs = load(path, input_key="question", target_key="answer")
    assert first(packs) == golden(YO)


def test_variants_of_a_turn(tmp_path):
    parts = [PART | {"text": text} for text in ("be ", "brief")]
    turns = [{"role": "developer", "content": parts}, {"role": "human", "content": "hi"}]
    turns.append({"from": "gpt", "value": "yo"})
    sharegpt = {"system": "be brief", **SAME_ROW["conversations"]}
    nulls = [turn | {"role": None, "content": None} for turn in sharegpt["conversations"]]
    empty = [turn | {"content": ""} for turn in sharegpt["conversations"]]
    sharegpts = [sharegpt, *(sharegpt | {"conversations": each} for each in (nulls, empty))]
    expected = golden(f"<S>system\nbe brief<E>\n{YO}")
    for row in ({"messages": turns}, {"messages": json.dumps(turns)}, *sharegpts):
        assert first(load(write(tmp_path / "x.jsonl", row), seq_len=96)) == expected


def test_alpaca_input_follows_the_instruction(tmp_path):
    row = {"instruction": "add", "input": "1 2", "output": "3"}
    packs = load(write(tmp_path / "x.jsonl", row))
    assert first(packs) == golden("<S>user\nadd\n\n1 2<E>\n<S>assistant\n⟦3<E>⟧\n")
    for blank in ({"instruction": "hi", "input": " "}, {"instruction": "", "input": "hi"}):
        row = {**blank, "output": "yo"}
        assert first(load(write(tmp_path / "x.jsonl", row))) == golden(YO)


def test_prompt_as_messages_is_context_only(tmp_path):
    row = {"prompt": turns_of("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]}
    packs = load(write(tmp_path / "x.jsonl", row), seq_len=128)
    text = "<S>user\na<E>\n<S>assistant\nb<E>\n<S>user\nc<E>\n<S>assistant\n⟦d<E>⟧\n"
    assert first(packs) == golden(text)
    row = {key: json.dumps(turns) for key, turns in row.items()}  # as a table has it
    assert first(load(write(tmp_path / "y.jsonl", row), seq_len=128)) == golden(text)
    row = {"prompt": "[1]", "completion": "[]"}  # but not what is no list of messages
    text = "<S>user\n[1]<E>\n<S>assistant\n⟦[]<E>⟧\n"
    assert first(load(write(tmp_path / "z.jsonl", row))) == golden(text)


def test_reading_tolerates_bom_blank_lines_and_crlf(tmp_path):
    line = json.dumps({"text": "é"}, ensure_ascii=False).encode()
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\n   \n" + line)
    rows = list(read_rows(str(path)))
    assert rows == [(1, {"text": "é"}), (4, {"text": "é"})]


def test_files_by_list_and_glob(tmp_path):
    a = write(tmp_path / "a.jsonl", {"text": "aaa"})
    b = write(tmp_path / "b.jsonl", SAME_ROW["prompt"])
    held_out = write(tmp_path / "a.heldout.jsonl", {"text": "ccc"})
    assert find_files(f"{b}, {a}") == ([b, a], [])
    # a held-out document would be learnt too
    for twice in (f"{a},{b},{a}", f"{tmp_path},{a}", f"{a},{tmp_path}/./a.jsonl"):
        with pytest.raises(UserError, match="a.jsonl is listed twice: list it once"):
            find_files(twice)
    assert find_files(f"{tmp_path}/*.jsonl")[0] == [a, b]  # what is evaluated on is not trained on
    assert find_files(f"{tmp_path}/*.heldout.jsonl")[0] == [held_out]
    lines = []
    load(f"{a},{b}", log=lines.append, cache_dir=str(tmp_path / "cache"))
    assert lines[0] == f"data: {a}: text (first example), 1 example"
    assert lines[1] == f"data: {b}: prompt/completion (first example), 1 example"


def messages(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = {"prompt": "hi", "completion": "yo"}
CALL = {"name": "f", "arguments": {}}
TWICE = '{"x": 1, "x": 2}'


def answer(**keys):
    return {"messages": [{"role": "assistant", **keys}]}


def calls(**keys):
    return answer(tool_calls=[{"name": "f", **keys}])


BAD_ROWS = [
    # the last row of a file, and what the message says behind the file's name
    ('{"prompt": \n', ":2: broken JSON: Expecting value at column 11"),
    ('{"prompt": "a\tb"}\n', ":2: broken JSON: Invalid control character at column 14"),
    ({"text": "x"}, ":2: no 'prompt' or 'completion' in this example, keys: text; the file is"),
    ({"prompt": "x", "completion": None}, ":2: completion must be text, not null"),
    ("\n", " is empty"),
    ({"a": 1, "b": 2}, ":1: unknown format, keys: a, b; accepted: messages, conv"),
    (answer(content=None), ":1: messages[0] must be text, not null"),
    (answer(content=[PART, {"type": "image", "image": "a", "text": ""}]),
     ":1: messages[0] has a part of type 'image'"),
    (answer(content=[PART | {"type": "reasoning"}]),
     ":1: messages[0] has a part of type 'reasoning'"),
    (answer(content="x", value="y"), ":1: messages[0]: 'content' and 'value' differ: keep one"),
    (answer(content="x", reasoning="y", thinking="z"),
     ":1: messages[0]: 'reasoning' and 'thinking' differ: keep one"),
    (calls(args={"x": 1}, parameters={"x": 2}),
     ":1: messages[0]: call of f: 'parameters' and 'args' differ: keep one"),
    (calls(params={"x": 1}),
     ":1: messages[0]: the call of f has 'params' but no 'arguments': rename it"),
    (calls(arguments="x"), ":1: messages[0]: the arguments of f must be a JSON object: not"),
    (calls(arguments=TWICE), ":1: broken JSON: an object has the key 'x' twice"),
    ({"conversations": [{"from": "function_call", "value": f'{{"name": "f", "x": {TWICE}}}'}]},
     ":1: broken JSON: an object has the key 'x' twice: 1 and 2"),
    (answer(tool_calls=[CALL], function_call=CALL),
     ":1: messages[0] has tool_calls and function_call: keep one"),
    (answer(tool_calls=["f"]), ":1: messages[0]: tool_calls must be a list of function calls"),
    (answer(content="x", reasoning_content=1),
     ":1: messages[0]: reasoning_content must be text, not 1"),
    (messages(("user", "x"), ("narrator", "y")), ":1: messages[1] has unknown role 'narrator'"),
    ({"question": "q", "choices": ["a", "b"], "answer": "0"},
     ":1: unknown format, keys: question, choices, answer"),
    ({"role": "prompter", "text": "x"}, ":1: an example is one turn (role, text): collect the"),
    ({"prompt": {"0": "x"}, "completion": {"0": "y"}}, ":1: prompt must be text, not"),
    ({"messages": "x"}, ":1: 'messages' must be a list of turns, not"),
    ({"messages": ["x"]}, ":1: messages[0] must be an object, not"),
    ({"text": "\ud83d"}, ":1: text contains half a surrogate pair"),
    ({**SAME_ROW["messages"], "tools": "{"}, ":1: 'tools' must be a list"),
]  # fmt: skip


def test_bad_rows_are_named(tmp_path):
    for row, expected in BAD_ROWS:
        rows = (GOOD, row) if expected.startswith(":2") else (row,)
        path = write(tmp_path / "x.jsonl", *rows)
        with pytest.raises(UserError) as error:
            load(path)
        assert f"{path}{expected}" in str(error.value) and "\n" not in str(error.value)
        assert not list(tmp_path.glob("*.cache/*"))  # nothing half-built is left behind


def test_the_first_row_decides_for_the_whole_file(tmp_path):
    path = write(tmp_path / "x.jsonl", *[GOOD] * build.ROWS_AT_A_TIME, {"text": "x"})
    with pytest.raises(UserError, match=r":1001: no 'prompt' or 'completion'"):
        load(path)


def test_not_utf8_is_named(tmp_path):
    for name, content, message in (
        ("x.jsonl", '{"text": "ok"}\n{"text": "é"}\n'.encode("latin-1"), ":2: not UTF-8"),
        ("x.csv", "prompt,completion\na,b\ncafé,b\n".encode("latin-1"), ", row 2: not UTF-8"),
        ("x.tsv", "prompt\tcompletion\na\tb\n".encode("utf-16"), ", the header: not UTF-8"),
        ("y.jsonl", '{"text": "ok"}\n'.encode("utf-16"), ":1: not UTF-8"),
        ("x.json", '[{"text": "ok"}]'.encode("utf-32"), ":1: not UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name + message):
            load(str(tmp_path / name))


def test_flags_that_contradict(tmp_path):
    for options, message in (
        ({"input_key": "q", "target_key": "a"}, r":1: no 'q' or 'a'.*prompt, compl"),
        ({"data_format": "messages"}, r":1: no 'messages'.*keys: prompt, compl"),
        ({"input_key": "a", "target_key": "b", "data_format": "text"}, "does not accept"),
    ):
        with pytest.raises(UserError, match=message):
            load(write(tmp_path / "x.jsonl", GOOD), **options)


def test_missing_files(tmp_path):
    for name, message in (
        ("none.jsonl", "no such data file: .*none.jsonl"),
        ("none*.jsonl", r"no data file .*none\*"),
        ("", "no data file to train on in "),
    ):
        with pytest.raises(UserError, match=message):
            load(f"{tmp_path}/{name}", cache_dir=str(tmp_path / "cache"))


def test_formats_are_the_flag_values():
    assert set(SAME_ROW) | {"text", "tokens"} == set(FORMATS)


def test_tables_that_datasets_wrote(tmp_path):
    from datasets import Dataset

    rows = Dataset.from_dict({"question": ["1 + 1?", "Why?"], "answer": ["2", "Because."]})
    rows.to_csv(tmp_path / "x.csv")
    # with a glob's characters in their names, too
    for name in ("x.parquet", "x[1].parquet", "x]y.parquet", "[!x]*?.parquet"):
        rows.to_parquet(tmp_path / name)
    for path in tmp_path.iterdir():
        assert list(read_rows(str(path))) == [
            (1, {"question": "1 + 1?", "answer": "2"}),
            (2, {"question": "Why?", "answer": "Because."}),
        ]
