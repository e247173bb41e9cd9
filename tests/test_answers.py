"""Answers by continuous batching are those of the reference loop, and those of one prompt alone."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from test_parity import MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_demo import evaluate
from llm_demo.errors import UserError
from llm_demo.model import batched

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
    batch, why = batched.choose_batched(args.generate, HERE, model.config)
    return evaluate.answer(model, tokenizer, prompts, args, HERE, batch, why)


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


def test_both_ways_answer_as_one_prompt_alone(model, tokenizer):
    prompts = prompts_like((3, 50, 7, 120, 9, 31, 31, 1))
    fast, how = answers(model, tokenizer, prompts, "--generate", "batch", "--max_new_tokens", 12)
    assert how.startswith("by continuous batching")
    slow, how = answers(model, tokenizer, prompts, "--generate", "reference", "--batch_size", 3,
                        "--max_new_tokens", 12)  # fmt: skip
    assert how.startswith("batch by batch")
    assert fast == slow == [alone(model, tokenizer, prompt, 12) for prompt in prompts]
    assert model.config._attn_implementation == "sdpa"  # as before


@pytest.mark.parametrize("how", ["batch", "reference"])
def test_answers_end_at_a_stop_token_and_at_the_last_position(how, model, tokenizer):
    """256 positions."""
    prompts = prompts_like((250, 3, 200))
    found, _ = answers(model, tokenizer, prompts, "--generate", how, "--max_new_tokens", 100)
    assert [len(a) for a in found] == [6, 100, 56]
    third = found[1][2]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(third)
    found, _ = answers(model, tokenizer, prompts[1:2], "--generate", how, "--max_new_tokens", 100)
    assert len(found[0]) <= 2 and third not in found[0]


def test_what_is_chosen_and_why(model, tokenizer, monkeypatch):
    gpu, cpu, plain = torch.device("cuda"), torch.device("cpu"), MODELS["tied"]
    longrope = SimpleNamespace(rope_parameters={"rope_type": "longrope"})
    monkeypatch.setattr(batched, "paged_kernel", lambda: "flash_attention_3")
    assert batched.choose_batched("auto", gpu, plain) == (True, "faster than padded batches")
    monkeypatch.setattr(batched, "paged_kernel", lambda: None)
    assert not batched.choose_batched("auto", gpu, plain)[0]
    assert batched.choose_batched("batch", gpu, plain) == (True, "as requested")
    assert batched.choose_batched("auto", cpu, plain) == (True, "faster than padded batches")
    assert batched.choose_batched("reference", gpu, plain) == (False, "as requested")
    chosen, why = batched.choose_batched("batch", gpu, longrope)
    assert not chosen and "longrope" in why
    monkeypatch.setattr(batched, "ContinuousBatchingConfig", None)
    chosen, why = batched.choose_batched("auto", gpu, plain)
    assert not chosen and "transformers" in why


def test_where_it_fails_the_reference_answers(model, tokenizer, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(model, "generate_batch", broken)
    monkeypatch.setattr(evaluate, "choose_batched", lambda *_: (True, "a GPU"))
    args = evaluate.make_parser().parse_args(["--models", "m", "--data", "d"])
    args.max_new_tokens = 2
    found, how = evaluate.answer(model, tokenizer, [[1, 2]], args, HERE, True, "a GPU")
    assert len(found[0]) == 2 and how == "batch by batch (continuous batching failed: no kernel)"
    args.generate = "batch"
    with pytest.raises(UserError, match="--generate batch: continuous batching failed: no kernel"):
        evaluate.answer(model, tokenizer, [[1, 2]], args, HERE, True, "as requested")


def test_a_batch_that_does_not_fit_is_made_smaller(monkeypatch):
    tried = []

    def work(batch, x):
        tried.append(batch)
        if batch > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return x

    args = SimpleNamespace(batch_size=None)
    assert evaluate.in_batches(args, torch.device("cuda"), work, "done") == "done"
    assert tried[0] == 256 and tried[-1] <= 100 < tried[-2]
    assert evaluate.in_batches(args, torch.device("cpu"), work, 1) == 1 and tried[-1] == 32


def test_batches_take_the_longest_first_and_no_more_than_fit(monkeypatch):
    monkeypatch.setattr(evaluate, "TOKENS", 20)
    found = list(evaluate.batches([3, 30, 7, 6, 3, 3], 3, "x"))
    assert found == [[1], [2, 3], [0, 4, 5]]


def test_seq_len_is_what_the_models_know_by_default(
    model, tokenizer, tmp_path, monkeypatch, capsys
):
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    text = " ".join(["word"] * 600)
    (tmp_path / "x.jsonl").write_text(f'{{"prompt": "a", "completion": "{text}"}}\n')
    seen = []
    monkeypatch.setattr(
        evaluate, "load_packs",
        lambda *a, load=evaluate.load_packs, **k: seen.append(load(*a, **k)) or seen[-1],
    )  # fmt: skip
    argv = ["evaluate", "--models", tmp_path / "m", "--data", tmp_path / "x.jsonl", "--show", 1]
    monkeypatch.setattr(sys, "argv", [*map(str, argv), "--dtype", "fp32"])
    evaluate.main()
    assert seen[0].seq_len == 256 == int(seen[0].token_counts[0])
    assert "loss of 1 document of" in capsys.readouterr().err
