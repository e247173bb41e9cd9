"""What a run measures is what it serves: held-out answers, chat and transformers agree."""

import json

import pytest
import torch
from conftest import smaller_model
from test_chat import talk
from test_plan import alone  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_demo import evaluate
from llm_demo.data.codec import stop_tokens

NO_THINKING = "enable_thinking is defined and enable_thinking is false"
BLOCK = "<think>\n\n</think>\n\n"
# Like Qwen3: an answer without reasoning gets an empty block, and so does a prompt on request.
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if " + NO_THINKING + " %}{{ '<think>\n\n</think>\n\n' }}ELSE{% endif %}{% endif %}"
)
# The prompt opens the block; a variable writes a system turn.
QWEN35 = (
    "{% if style is defined %}{{ '<|im_start|>system\n' + style + '<|im_end|>\n' }}{% endif %}"
    + QWEN3.replace("ELSE", "{% else %}{{ '<think>\n' }}")
)
STYLE = """--chat_template_kwargs={"style":"be"}"""
STYLED = "system\nbe<|im_end|>\n<|im_start|>"
QWEN3 = QWEN3.replace("ELSE", "")
WORDS = ("red", "blue", "green", "white", "black", "brown", "pink", "grey")
THINGS = ("a rose", "the sea", "grass", "snow", "coal", "a tree", "a pig", "a stone")
QUESTIONS = [f"What colour is {thing}?" for thing in THINGS]
ANSWERS = [f"It is {word}." for word in WORDS]


@pytest.mark.parametrize(
    "template, flag, card, system, asked",
    [
        (QWEN3, "--learn_reasoning=true", "", "", ""),
        (QWEN3, "--learn_reasoning=false", "| learn_reasoning | False |", "", BLOCK),
        (QWEN35, STYLE, "chat_template_kwargs", STYLED, "<think>\n"),
    ],
)
def test_answers_are_those_that_were_measured(
    template,
    flag,
    card,
    system,
    asked,
    tmp_path,
    alone,  # noqa: F811
    monkeypatch,
    capsys,
):
    rows = zip(QUESTIONS, ANSWERS, strict=True)
    lines = [json.dumps({"question": q, "answer": a}) for q, a in rows]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    (tmp_path / "qwen.jinja").write_text(template)
    smaller_model(tmp_path / "model")
    flags = (
        "--model_name_or_path model --train_json x.jsonl --eval_json x.jsonl --output_dir run "
        "--chat_template qwen.jinja --seq_len 64 --max_steps 60 --lr 5e-3 --micro_batch_size 4 "
        f"--grad_accum_steps 1 --no_pack_sequences --export fp32 {flag}"
    )
    alone(*flags.split())
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["eval_exact"]["60"] == 1

    assert card in (tmp_path / "run/hf/README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf", dtype=torch.float32)
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        length = prompt["input_ids"].shape[1]
        text = tokenizer.decode(prompt["input_ids"][0])
        assert text.startswith(f"<|im_start|>{system}user\n")
        assert text.endswith(f"<|im_start|>assistant\n{asked}")
        told = model.generate(
            **prompt, do_sample=False, max_new_tokens=30, eos_token_id=stop_tokens(tokenizer)
        )
        told = tokenizer.decode(told[0, length:])
        assert asked + told == f"{BLOCK}{answer}<|im_end|>"

    said = talk(monkeypatch, capsys, "run", "--max_new_tokens", "20", questions=QUESTIONS)
    assert said.out.splitlines() == ANSWERS, said.err

    flags = "--models run/hf --data x.jsonl --seq_len 64".split()
    evaluate.main(flags)
    assert "| 100.0% |" in capsys.readouterr().out
