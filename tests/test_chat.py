"""Talk to runs, exports and adapters: the answers are transformers' own, alone on stdout."""

import io
import json
import shutil
import sys

import pytest
import torch
from conftest import ROOT, refused
from safetensors.torch import save_file
from test_plan import alone  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_demo import chat
from llm_demo.core.errors import UserError
from llm_demo.data.codec import stop_tokens
from llm_demo.run.export_run import export

QUESTIONS = ["What is 11 + 33?", "Spell the word cat."]


def talk(monkeypatch, capsys, *flags, questions=QUESTIONS, terminal=False):
    """What a chat prints: (stdout, stderr)."""
    text = "".join(f"{question}\n" for question in questions)
    lines = io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape")))
    lines.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", lines)
    capsys.readouterr()
    chat.main(["--max_new_tokens", "12", *map(str, flags)])
    return capsys.readouterr()


def expected(folder, *conversations, tokens=12):
    """transformers' greedy answers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for messages in conversations:
        how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        ids = tokenizer.apply_chat_template(messages, **how)
        how = {"do_sample": False, "eos_token_id": stop_tokens(tokenizer)}
        out = model.generate(**ids, max_new_tokens=tokens, **how)
        answer = out[0, ids["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(answer, skip_special_tokens=True))
    return answers


def user(content):
    return {"role": "user", "content": content}


def train(alone, *flags):  # noqa: F811
    flags = ["--seq_len", "64", "--lr", "1e-2", "--eval_json", "none", *flags]
    alone("--train_json", ROOT / "data/first_run.jsonl", "--max_steps", "3", *flags)


def test_a_run_and_its_export_answer_alike(tmp_path, alone, monkeypatch, capsys):  # noqa: F811
    train(alone, "--output_dir", "run")
    out, said = talk(monkeypatch, capsys, "run")
    assert said.startswith("model: run/checkpoints/step_00000003, in fp32\n")
    assert "Loading" not in said and "exported" not in said  # no bar, and no folder is left
    assert not (tmp_path / "run/hf").exists()
    train(alone, "--output_dir", "run", "--resume", "auto", "--export", "fp32")
    answers = expected(tmp_path / "run/hf", *([user(q)] for q in QUESTIONS))
    assert out == "".join(f"{answer}\n" for answer in answers) and len(set(answers)) == 2
    assert talk(monkeypatch, capsys, "run")[0] == talk(monkeypatch, capsys, "run/hf")[0] == out
    assert not list(tmp_path.glob("**/model"))[1:]  # but the run's own
    # a terminal: a conversation, until an empty line
    first = answers[0]
    second, again = expected(
        tmp_path / "run/hf",
        [user(QUESTIONS[0]), {"role": "assistant", "content": first}, user("And now?")],
        [user("And now?")],
    )
    lines = [QUESTIONS[0], "And now?", "", "And now?"]
    out, said = talk(monkeypatch, capsys, "run", questions=lines, terminal=True)
    assert out == f"{first}\n{second}\n{again}\n" and said.count("> ") == 5
    lines = ["/exit", QUESTIONS[0]]
    assert talk(monkeypatch, capsys, "run", questions=lines, terminal=True)[0] == ""
    with pytest.raises(UserError, match="^the questions: 'utf-8' codec can't decode byte 0xff"):
        talk(monkeypatch, capsys, "run", questions=[QUESTIONS[0], "Why\udcff?"])
    # a run that went on is not what hf/ holds
    train(alone, "--output_dir", "run", "--resume", "auto", "--max_steps", "12")
    export(next((tmp_path / "run/checkpoints").glob("*12")), tmp_path / "newest", "fp32")
    newest = expected(tmp_path / "newest", *([user(q)] for q in QUESTIONS))
    out = talk(monkeypatch, capsys, "run")[0]
    assert out == "".join(f"{answer}\n" for answer in newest) and newest != answers
    (tmp_path / "run/checkpoints").rename(tmp_path / "elsewhere")
    assert talk(monkeypatch, capsys, "run")[0] == talk(monkeypatch, capsys, "run/hf")[0]
    (tmp_path / "run/hf").rename(tmp_path / "hf")
    with pytest.raises(UserError, match="^run is the folder of a run without checkpoints: it ran"):
        talk(monkeypatch, capsys, "run")


def test_adapters_of_a_run_and_of_a_folder(tmp_path, alone, monkeypatch, capsys):  # noqa: F811
    train(alone, "--output_dir", "base", "--export", "fp32")
    base = ["--model_name_or_path", "base/hf", "--lora_rank", "4"]
    train(alone, *base, "--output_dir", "run", "--export", "fp32")
    answers = expected(tmp_path / "run/hf", *([user(q)] for q in QUESTIONS))  # by peft
    out = "".join(f"{answer}\n" for answer in answers)
    assert talk(monkeypatch, capsys, "run")[0] == talk(monkeypatch, capsys, "run/hf")[0] == out
    (tmp_path / "base").rename(tmp_path / "moved")
    for name in ("run", "run/hf"):
        assert talk(monkeypatch, capsys, name, "--base", "moved/hf")[0] == out
        with pytest.raises(UserError, match="no model at"):
            talk(monkeypatch, capsys, name)


def test_what_cannot_be_talked_to_is_one_line(tmp_path, monkeypatch, capsys):
    tiny = ROOT / "models/qwen3-tiny"
    model = AutoModelForCausalLM.from_config(chat.open_model(tiny, 1)[0], dtype=torch.float32)
    model.save_pretrained(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.save_pretrained(tmp_path / "good")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/cmd.sh").write_text("")
    says = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    for name, base in (("homeless", None), ("lost", "~nobody-here/x")):
        (tmp_path / name).mkdir()
        config = json.dumps(says | {"base_model_name_or_path": base})
        (tmp_path / name / "adapter_config.json").write_text(config)
        save_file({"x": torch.zeros(1)}, tmp_path / name / "adapter_model.safetensors")
    (tmp_path / "refuses.jinja").write_text(
        "{% if messages %}{{ raise_exception('No.') }}{% endif %}"
    )
    for flags, message in (
        ([tmp_path / "none"], "no model at .*/none"),
        ([tiny], "has no weights: name a trained model or a run"),
        ([tmp_path / "plain"], "plain has no chat template: set one with --chat_template FILE"),
        ([tmp_path / "run"], "run.*no.*checkpoint"),
        ([tmp_path / "homeless"], "adapter_config.json names no base: name it with --base"),
        ([tmp_path / "lost"], "no model at ~nobody-here/x"),
        (
            [tmp_path / "lost", "--base", tmp_path / "good"],
            "target_modules has q_proj, of which there is no factor",
        ),
        ([tmp_path / "good", "--base", tiny], "--base: .*good is no adapter"),
        ([tmp_path / "good", "--chat_template", tmp_path / "refuses.jinja"], "conversation: No."),
    ):
        with refused(message):
            talk(monkeypatch, capsys, *flags)
    long = "word " * 3000
    message = r"has [\d,]+ tokens, but the model's positions end at 2,048: ask a shorter question"
    with pytest.raises(UserError, match=message):
        talk(monkeypatch, capsys, tmp_path / "good", questions=[long])
    out, said = talk(monkeypatch, capsys, tmp_path / "good", questions=[long, "Hi"], terminal=True)
    assert "error: the conversation has" in said and out.count("\n") >= 1
