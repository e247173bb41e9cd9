"""Qwen3.5: a gated delta rule in three of four blocks, against a plain loop with Hugging Face's own
model, one document at a time, as test_parity.py."""

import pytest
import torch
from conftest import ZERO, slow
from test_families import IDS, cases
from test_parity import (
    SEQ_LEN,
    SIZES,
    assert_equal,
    plain_loop,
    smaller_vocabulary,
    train,
    write_rows,
)
from tiny_tokenizer import packs_of
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

# The norm of a layer's output makes it as long for a query nearly at right angles to its key: with
# the usual epsilon, rounding in one step is a thousand times as large in the next.
RULE = dict(rms_norm_eps=1e-2, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=8, linear_value_head_dim=16)  # fmt: skip
MODELS = {
    "untied": Qwen3_5TextConfig(tie_word_embeddings=False, **RULE, **IDS, **SIZES),
    "tied": Qwen3_5TextConfig(tie_word_embeddings=True, **RULE, **IDS, **SIZES),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Models with weights, ragged data, and the plain loop's results for each."""
    folder = tmp_path_factory.mktemp("qwen35")
    models, tokenizer = smaller_vocabulary(MODELS, folder / "tokenizer")
    write_rows(folder / "data.jsonl")
    packs = packs_of(str(folder / "data.jsonl"), tokenizer, seq_len=SEQ_LEN)
    results = {}
    for name, config in models.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter, values in model.named_parameters():
            if parameter.endswith("conv1d.weight"):
                values.data *= 10  # else keys are as short as the epsilon of their norm
            if values.ndim < 2:
                values.data += torch.randn_like(values) * 0.1
            if parameter.endswith("A_log"):
                values.data -= 3  # memories as long as trained ones
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        results[name] = plain_loop(model, packs)
    return folder, results


SCRIPTS = {
    ("fsdp", 1): (["tied"], 8, []),
    ("fsdp", 2): (MODELS, 4, ["--reshard_after_forward"]),
    ("fsdp", 4): (MODELS, 2, []),
    ("pp", 2): (MODELS, 8, []),
    ("fsdp_pp", 2): (MODELS, 8, []),
    ("fsdp_pp", 4): (MODELS, 4, ["--reshard_after_forward"]),
    ("zero", 2): (MODELS, 4, ZERO["zero3"]),
}
QUICK = [("fsdp", 2), ("pp", 2)]


@pytest.mark.parametrize("script, n", [key if key in QUICK else slow(*key) for key in SCRIPTS])
def test_equals_plain_loop(script, n, work, tmp_path):
    folder, expected = work
    names, rows, flags = SCRIPTS[script, n]
    found = train(tmp_path, script, n, cases(folder, names, rows, flags))
    for name, (losses, ranks) in found.items():
        assert_equal(losses, ranks, expected[name.removesuffix("-out")])
