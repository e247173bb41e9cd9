"""What lies in data/ and models/ is what the READMEs say: rows, tokenizer, template, sizes."""

import functools
import json
import re
import runpy

import pytest
import torch
from conftest import ROOT, TINY
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from llm_demo.model.costs import active_of


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def test_any_text_comes_back(tokenizer):
    for text in (
        "",
        "  two spaces, a tab\tand\r\n\r\n  lines ended \n in  every way   ",
        "Décomposé: e\u0301 is not é; ﬁ ① Å \u212b",  # normalisation would change these
        "日本語 العربية हिन्दी ไทย 한국어 👩‍👩‍👧 🎉 \U0010ffff",
        "\x00\x01\x7f\u200b\ufeff\u2028",
        "<|im_end|> <think>\n\n</think>\n x = 12345.678e-9",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("2025")) == ["2", "0", "2", "5"]


def test_tokenizer_is_made_from_the_data(monkeypatch, tmp_path):
    # Red when sft_en.jsonl was edited and models/train_tokenizer.py was not run again.
    script = runpy.run_path(str(ROOT / "models" / "train_tokenizer.py"))
    monkeypatch.setitem(script["main"].__globals__, "OUT", tmp_path)
    script["main"]()
    made, bundled = (json.loads((d / "tokenizer.json").read_text()) for d in (tmp_path, TINY))
    assert made["model"]["vocab"] == bundled["model"]["vocab"]
    assert made["added_tokens"] == bundled["added_tokens"]


def test_chat_template(tokenizer):
    """No system prompt is made up, and contents are not trimmed."""
    system = {"role": "system", "content": "Be brief."}
    turns = [{"role": "user", "content": " Hi\n"}, {"role": "assistant", "content": "Hello. "}]
    hi, begun = "<|im_start|>user\n Hi\n<|im_end|>\n", "<|im_start|>assistant\n"
    both = f"{hi}{begun}Hello. <|im_end|>\n"
    brief = "<|im_start|>system\nBe brief.<|im_end|>\n"
    made = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    assert made(turns) == both
    assert made([system, turns[0]], add_generation_prompt=True) == brief + hi + begun
    assert made([system, *turns, *turns]) == brief + both * 2


PUBLISHED = {
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
}  # fmt: skip


LIKE = ("qwen3.5-0.8b-like", "qwen3.5-4b-like")  # sizes from memory of published ones


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-moe-tiny", *LIKE, *PUBLISHED])
def test_model_sizes(name):
    text = (ROOT / "models" / "README.md").read_text("utf-8")
    stated = int(re.search(rf"`{re.escape(name)}/` \| ([\d,]+)", text)[1].replace(",", ""))
    config = AutoConfig.from_pretrained(ROOT / "models" / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # transformers 5.0 leaves that out on the meta device
    count = sum(p.numel() for p in model.parameters())
    assert count == stated == PUBLISHED.get(name, count)
    untied = ("qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b")
    assert config.tie_word_embeddings is (name not in untied)
    assert config.rope_parameters["rope_theta"] == (1e7 if name in LIKE else 1e6)
    if "a token uses" in text.split(f"`{name}/`")[1].split("\n")[0]:
        used = active_of(config) + sum(p.numel() for p in model.parameters() if p.ndim < 2)
        assert f"a token uses {config.num_experts_per_tok}: {used:,} parameters" in text
    if name.endswith("tiny"):
        assert 2e6 < count < 5e6 and config.vocab_size == 4096
        assert config.num_key_value_heads < config.num_attention_heads
