"""An export holds what vLLM and other servers read of a folder before they serve it."""

import json

import pytest
import torch
from conftest import TINY
from test_export import trained
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from llm_demo.data.codec import stop_tokens
from llm_demo.run.export_run import export

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("has_generation_config", [True, False])
def test_an_export_can_be_served(has_generation_config, tmp_path):
    _, run = trained(tmp_path, "tied")
    config = json.loads((run / "model/config.json").read_text())
    config.pop("architectures", None)  # as of a configuration that no model was saved with
    (run / "model/config.json").write_text(json.dumps(config))
    if not has_generation_config:
        (run / "model/generation_config.json").unlink()
    out = tmp_path / "served"
    export(run / "checkpoints/step_00000007", out)

    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    assert AutoConfig.from_pretrained(out).dtype == torch.bfloat16
    assert config["vocab_size"] >= len(AutoTokenizer.from_pretrained(out))
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert (out / name).is_file(), name
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(TINY).chat_template
    # a server's answers end where the training data's did
    ends = GenerationConfig.from_pretrained(out).eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends
    assert tokenizer.eos_token_id in ends
    if has_generation_config:
        assert GenerationConfig.from_pretrained(out).max_new_tokens == 77  # the model's own


def test_answers_end_at_the_end_of_the_templates_turn():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.eos_token = "<|endoftext|>"  # as of a base model
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_end|>")]
    assert stop_tokens(tokenizer) == sorted(ids)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert stop_tokens(tokenizer) == ids[:1]  # no special token there
    for refusing in ("{{ raise_exception('tools only') }}", "<|im_start|>nothing of it"):
        tokenizer.chat_template = refusing
        assert stop_tokens(tokenizer) == ids[:1]
    tokenizer.chat_template = None
    assert stop_tokens(tokenizer) == ids[:1]


@pytest.mark.parametrize(
    "end, stops",
    [
        ("<|im_end|>", True), (" \n<|im_end|>\n", True), ("<|im_end|", False), ("</s>", False),
        ("</think>", False), ("</think><|im_end|>", False),  # an added token, but no special one
    ],
)  # fmt: skip
def test_only_a_special_token_ends_answers(end, stops):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + END }}{% endfor %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("END", repr(end))
    of_template = [tokenizer.convert_tokens_to_ids("<|im_end|>")] * stops
    assert stop_tokens(tokenizer) == [tokenizer.eos_token_id, *of_template]
    tokenizer.split_special_tokens = True  # the same text is then no special token
    assert stop_tokens(tokenizer) == [tokenizer.eos_token_id]
