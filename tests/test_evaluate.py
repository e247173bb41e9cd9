"""Base against tuned: the loss is transformers' own, answers are those of one prompt at a time."""

import json
import math
import shutil

import pytest
import torch
from conftest import TINY, refused
from test_families import MODELS as FAMILIES
from test_parity import MODELS
from tiny_tokenizer import packs_of
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_demo import evaluate
from llm_demo.core.errors import UserError

ROWS = [
    {"question": "why " * (1 + i % 5), "answer": f"word {i} " * (1 + i % 3) + f"#### {1000 + i:,}"}
    for i in range(7)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for seed, name in enumerate(("base", "tuned")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(MODELS["tied"], dtype=torch.float32)
        model.save_pretrained(folder / name)
        GenerationConfig(repetition_penalty=1.5).save_pretrained(folder / name)  # to be left out
        tokenizer.save_pretrained(folder / name)
    (folder / "x.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return folder


def arguments(folder, *more):
    flags = ["--models", folder / "base", folder / "tuned", "--data", folder / "x.jsonl"]
    flags += ["--input_key", "question", "--target_key", "answer", "--seq_len", "64"]
    return [str(f) for f in (*flags, "--max_new_tokens", "5", "--dtype", "fp32", *more)]


def evaluated(model, flags):
    """What is found of a model in fp32 on the CPU."""
    args = evaluate.make_parser().parse_args(list(map(str, flags)))
    return evaluate.evaluate(str(model), args, torch.device("cpu"), torch.float32)


def transformers_loss(model_folder, data, seq_len, **keys):
    """(mean loss over the learnt tokens, their number) by transformers, a document at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    packs = packs_of(str(data), tokenizer, seq_len=seq_len, pack=False, **keys)
    total = tokens = 0
    for i in range(len(packs)):
        ids, labels, lengths = packs.row(i)
        n = int((labels != -100).sum())
        ids = torch.tensor(ids[: lengths[0]])[None]
        # transformers shifts by itself
        own = torch.cat([torch.tensor([-100]), torch.tensor(labels[: lengths[0] - 1])])[None]
        with torch.no_grad():
            total += model(input_ids=ids, labels=own).loss.item() * n
        tokens += n
    return total / tokens, tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_of_other_families_are_those_of_transformers(name, folder, tmp_path):
    AutoModelForCausalLM.from_config(FAMILIES[name]).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    (file,) = evaluated(tmp_path, [*arguments(folder), "--max_new_tokens", "1"])["files"]
    keys = {"input_key": "question", "target_key": "answer"}
    loss, _ = transformers_loss(tmp_path, folder / "x.jsonl", 64, **keys)
    assert file["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.filterwarnings("error::FutureWarning")  # of names that transformers drops
@pytest.mark.parametrize("batch", [1, 3])
def test_loss_and_answers_are_those_of_plain_transformers(batch, folder):
    found = evaluated(folder / "base", arguments(folder, "--batch_size", str(batch)))
    (file,) = found["files"]
    model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    keys = {"input_key": "question", "target_key": "answer"}
    loss, tokens = transformers_loss(folder / "base", folder / "x.jsonl", 64, **keys)
    assert file["tokens"] == tokens and file["rows"] == 7
    assert file["loss"] == pytest.approx(loss, rel=1e-5)
    assert file["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    for shown, row in zip(file["answers"], ROWS, strict=False):
        turn = [{"role": "user", "content": row["question"]}]
        how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = tokenizer.apply_chat_template(turn, **how)
        model.generation_config = GenerationConfig()
        out = model.generate(**prompt, do_sample=False, max_new_tokens=5)
        answer = out[0, prompt["input_ids"].shape[1] :]
        assert shown["answer"] == tokenizer.decode(answer, skip_special_tokens=True)
        assert shown["expected"].strip() == row["answer"].strip()


def test_no_answer_is_generated_if_none_is_shown(folder):
    found = evaluated(folder / "base", arguments(folder, "--rows", "2", "--show", "0"))
    assert found["files"][0]["rows"] == 2 and found["files"][0]["answers"] == []


def test_the_command_writes_a_table_and_json(folder, tmp_path, capsys):
    flags = arguments(folder, "--out", tmp_path, "--rows", "4")
    regex = ["--answer_regex", r"#### (-?[\d,.]+)"]
    evaluate.main([*flags, *regex])
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert [m["files"][0]["exact"] for m in found["models"]] == [0.0, 0.0]
    assert found["models"][0]["files"][0]["exact_of"] == 4
    text = (tmp_path / "evaluation.md").read_text()
    assert text in capsys.readouterr().out
    assert text.count("| x.jsonl |") == 2 and "0.0% of 4" in text
    assert text.count("- expected: ") == 3 and "/tuned: " in text


def test_all_models_get_rows_that_the_shortest_can_take(folder, tmp_path):
    """Without --seq_len: the fewest positions of any."""
    models = []
    for positions in (256, 128):
        copy = tmp_path / str(positions)
        shutil.copytree(folder / "base", copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": positions})
        )
        models.append(str(copy))
    flags = arguments(folder, "--out", tmp_path / "out", "--rows", "1", "--show", "0")
    at = flags.index("--seq_len")
    del flags[at : at + 2], flags[1:3]
    evaluate.main([flags[0], *models, *flags[1:]])
    assert json.loads((tmp_path / "out/evaluation.json").read_text())["seq_len"] == 128


def test_the_date_that_a_template_prints(folder, tmp_path, capsys):
    shutil.copytree(folder / "base", tmp_path / "dated")
    template = tmp_path / "dated/chat_template.jinja"
    template.write_text("{{ 'It is ' + strftime_now('%Y-%m-%d') }}" + template.read_text())
    flags = ("--date", "2026-07-04", "--rows", "1", "--max_new_tokens", "1")
    found = evaluated(tmp_path / "dated", arguments(folder, *flags))
    assert "dated: the chat template prints the date, here 2026-07-04" in capsys.readouterr().err
    assert found["files"][0]["answers"][0]["prompt"] == "why "  # as the user wrote it


def test_the_table_is_printed_if_it_can_t_be_written(folder, tmp_path, capsys):
    (tmp_path / "out/evaluation.json").mkdir(parents=True)
    with refused(f"--out {tmp_path}/out: .*Is a directory"):
        evaluate.main(arguments(folder, "--out", tmp_path / "out", "--rows", "1", "--show", "0"))
    assert capsys.readouterr().out.count("| x.jsonl |") == 1


@pytest.mark.parametrize("content", ["[]", "null", '{"cache_implementation": "zzz"}'])
def test_a_file_that_only_transformers_reads(content, folder, tmp_path):
    shutil.copytree(folder / "base", tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(content)
    with refused("/model: "):
        evaluated(tmp_path / "model", arguments(folder))


@pytest.mark.parametrize("batch", ["1", "3"])
def test_the_share_answered_exactly(batch, folder, tmp_path):
    """Rows that end in the model's own greedy tokens, and two in which one of them is another."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    rows = []
    for n in (5, 9, 17, 6, 8):
        prompt = torch.arange(20, 20 + n)[None]
        how = {"do_sample": False, "repetition_penalty": 1.0}
        ids = model.generate(prompt, max_new_tokens=4, min_new_tokens=4, **how)[0].tolist()
        ids[n + 1] = ids[n + 1] if n % 3 else 7  # of 9 and 6
        rows.append({"input_ids": ids, "labels": [-100] * n + ids[n:]})
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--models", folder / "base", "--data", tmp_path / "x.jsonl", "--show", "0"]
    flags += ["--dtype", "fp32", "--batch_size", batch, "--seq_len", "64"]
    found = evaluated(folder / "base", flags)
    assert found["files"][0]["answered_exactly"] == 3 / 5
    assert "| 60.0% |" in evaluate.markdown([found])


def test_answers_to_other_rows_are_not_put_side_by_side():
    def of(model, *rows):
        answers = [{"prompt": f"{r}?", "answer": f"{r} by {model}", "expected": r} for r in rows]
        figures = {"file": "x.jsonl", "rows": len(rows), "loss": 1.0, "perplexity": 2.7}
        figures["answered_exactly"] = 0.5
        return {"model": model, "files": [{**figures, "tokens": 3, "answers": answers}]}

    together = evaluate.markdown([of("a", "one", "two"), of("b", "one", "two")])
    assert "different examples" not in together and together.count("**x.jsonl, example 2**") == 1
    assert "- a: two by a\n- b: two by b" in together
    for other in (of("b", "two", "three"), of("b", "two")):
        apart = evaluate.markdown([of("a", "one", "two"), other])
        assert "read different examples of x.jsonl (a 2, b " in apart and "expected" not in apart


def test_results_of_answers():
    flags = ["--models", "m", "--data", "d", "--answer_regex", r"#### (-?[\d,.]+)"]
    args = evaluate.make_parser().parse_args(flags)
    assert evaluate.result("2 + 2 = 4\n#### 1\n#### 1,234.", args) == "1234"
    assert evaluate.result("#### -5", args) == "-5"
    assert evaluate.result("no number", args) is None


def test_a_model_without_weights_is_one_line(folder):
    with pytest.raises(UserError, match="has no weights"):
        evaluated(TINY, arguments(folder))


def test_bad_data_is_one_line(folder, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"input_ids": [1, 2, 5000000]}\n')
    flags = ["--models", str(folder / "base"), "--data", str(path)]
    with pytest.raises(UserError, match="x.jsonl: token 5000000, but the model knows 4096 only"):
        evaluate.main(flags)
    path.unlink()
    with pytest.raises(UserError, match="no such data file: .*x.jsonl"):
        evaluate.main(flags)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--data_format csv", "--data_format csv: choose from auto"),
        ("--learn_turns first", "--learn_turns first: choose from all, last"),
        ("--input_key prompt", "--input_key needs --target_key: they name a pair of columns"),
        ("--seq_len 7", "--seq_len 7 is too small: the minimum is 8"),
        (
            "--learn_turns last --train_on_prompt",
            "--train_on_prompt does not work with --learn_turns last",
        ),
        (f"--out {__file__}", "--out .*test_evaluate.py is a file: name a folder"),
        ("--date tomorrow", "--date: invalid day value: 'tomorrow'"),
        # it would find the same in every answer
        ("--answer_regex Answer", "--answer_regex Answer: put what to compare in a group"),
        ("--out /proc/new", "--out /proc/new: can't write to /proc: No such file"),
    ],
)
def test_bad_flags_are_one_line_before_a_model_is_sought(flags, message, folder):
    flags = ["--models", "a/model", "--data", str(folder / "x.jsonl"), *flags.split()]
    with pytest.raises(UserError, match=message):
        evaluate.main(flags)
