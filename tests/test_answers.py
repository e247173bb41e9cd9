"""Answers of padded batches are those of one prompt alone."""

import copy
import json
import shutil

import pytest
import torch
from conftest import ROOT
from test_parity import MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_demo import evaluate

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "models/qwen3-tiny")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS["tied"], dtype=torch.float32).to(HERE).eval()
    model.generation_config = GenerationConfig()
    return model


def prompts_like(lengths, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 4096, (n,), generator=rng).tolist() for n in lengths]


def answers(model, tokenizer, prompts, *flags):
    args = evaluate.make_parser().parse_args(["--models", "m", "--data", "d", *map(str, flags)])
    return evaluate.in_batches(
        args.batch_size,
        HERE,
        lambda batch: evaluate.answers_of(batch, model, tokenizer, prompts, args.max_new_tokens),
    )


def alone(model, tokenizer, prompt, new):
    stop = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    with torch.no_grad():
        ids = list(prompt)
        while len(ids) < len(prompt) + new:
            logits = model(input_ids=torch.tensor([ids], device=HERE), use_cache=False).logits
            token = int(logits[0, -1].argmax())
            if token in stop:
                break
            ids.append(token)
    return ids[len(prompt) :]


def test_batches_answer_as_one_prompt_alone(model, tokenizer):
    prompts = prompts_like((3, 50, 7, 120, 9, 31, 31, 1))
    expected = [alone(model, tokenizer, prompt, 12) for prompt in prompts]
    for size in (3, 32):
        found = answers(model, tokenizer, prompts, "--batch_size", size, "--max_new_tokens", 12)
        assert found == expected


def test_answers_end_at_a_stop_token_and_at_the_last_position(model, tokenizer):
    """256 positions."""
    prompts = prompts_like((250, 3, 200))
    found = answers(model, tokenizer, prompts, "--max_new_tokens", 100)
    assert [len(a) for a in found] == [6, 100, 56]
    third = found[1][2]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(third)
    found = answers(model, tokenizer, prompts[1:2], "--max_new_tokens", 100)
    assert len(found[0]) <= 2 and third not in found[0]


def test_a_batch_that_does_not_fit_is_made_smaller(monkeypatch):
    tried = []

    def work(batch):
        tried.append(batch)
        if batch > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return "done"

    assert evaluate.in_batches(None, torch.device("cuda"), work) == "done"
    assert tried[0] == 256 and tried[-1] <= 100 < tried[-2]
    assert evaluate.in_batches(None, torch.device("cpu"), work) == "done" and tried[-1] == 32


def test_batches_take_the_longest_first_and_no_more_than_fit():
    lengths = [n * evaluate.TOKENS // 20 for n in (3, 30, 7, 6, 3, 3)]
    assert list(evaluate.batches(lengths, 3, "x")) == [[1], [2, 3], [0, 4, 5]]


def test_seq_len_is_what_models_know_by_default(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    text = " ".join(["word"] * 600)
    (tmp_path / "x.jsonl").write_text(f'{{"prompt": "a", "completion": "{text}"}}\n')
    shutil.copytree(tmp_path / "m", tmp_path / "short")
    config = json.loads((tmp_path / "m/config.json").read_text())
    config["max_position_embeddings"] = 128
    (tmp_path / "short/config.json").write_text(json.dumps(config))
    # two models get the same documents: as many tokens as both have positions for
    for names, seq_len in ((["m"], 256), (["m", "short"], 128)):
        models = [str(tmp_path / name) for name in names]
        flags = ["--data", tmp_path / "x.jsonl", "--show", 1, "--dtype", "fp32", "--out", tmp_path]
        evaluate.main([*map(str, flags), "--models", *models])
        found = json.loads((tmp_path / "evaluation.json").read_text())
        tokens = [one["files"][0]["tokens"] for one in found["models"]]
        assert found["seq_len"] == seq_len and len({*tokens}) == 1
        assert seq_len - 32 < tokens[0] < seq_len
