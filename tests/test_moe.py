"""Mixtures of experts: every script's numbers against Hugging Face's own experts, one document at a
time in one process."""

import json

import pytest
import test_parity as parity
import torch
from test_parity import assert_equal, plain_loop, train
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, Qwen3MoeConfig

from llm_demo.data.packs import load_packs

SIZES = dict(
    vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=4, max_position_embeddings=256, initializer_range=0.05,
    moe_intermediate_size=32, num_experts_per_tok=2,
)  # fmt: skip
MODELS = {
    "qwen": Qwen3MoeConfig(
        num_experts=8, num_key_value_heads=2, head_dim=16, norm_topk_prob=True,
        mlp_only_layers=[1], tie_word_embeddings=True, **SIZES,
    ),
    "deepseek": DeepseekV3Config(
        n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1,
        num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, tie_word_embeddings=False, **SIZES,
    ),
}  # fmt: skip
ENGINES = {  # (script, processes, further flags, (micro, accumulation) for each model)
    "plain": ("fsdp", 1, ["--no_fsdp"], [(8, 1), (2, 4)]),
    "fsdp": ("fsdp", 2, [], [(1, 4), (4, 1)]),
    "reshard": ("fsdp", 2, ["--reshard_after_forward"], [(4, 1), (2, 2)]),
    "fpp": ("fsdp_pp", 2, [], [(2, 4), (1, 8)]),
    "twice": ("fsdp_pp", 4, ["--schedule", "interleaved"], [(1, 4), (1, 4)]),
    "zbv": ("fsdp_pp", 2, ["--schedule", "zbv"], [(2, 4), (1, 8)]),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    tokenizer = AutoTokenizer.from_pretrained(parity.TINY)
    rows = []
    for i in range(90):
        answer = " ".join(f"{w}{i}" for w in ("alpha", "beta", "gamma", "delta")[: 1 + i % 4])
        turns = [
            {"role": "user", "content": "why " * (1 + (i * 7) % 11)},
            {"role": "assistant", "content": answer},
        ]
        rows.append(json.dumps({"messages": turns}))
    (folder / "data.jsonl").write_text("\n".join(rows))
    packs = load_packs(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN)
    results = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        model.config._experts_implementation = "eager"
        results[name] = plain_loop(model.to(parity.DEVICE), packs)
    return folder, results


@pytest.mark.parametrize("engine", ENGINES)
def test_equals_plain_loop(engine, work):
    folder, expected = work
    kind, processes, flags, splits = ENGINES[engine]
    cases = {}
    recomputed = "false" if engine == "zbv" else "true"  # which it refuses
    for (model, checkpointing), (micro, accum) in zip(
        [("qwen", recomputed), ("deepseek", "false")], splits, strict=True
    ):
        name = f"{engine}-{model}"
        more = [*flags, "--use_activation_checkpointing", checkpointing]
        cases[name] = parity.argv(folder, model, folder / name, micro, accum, *more)
    for name, (losses, ranks) in train(folder, kind, processes, cases).items():
        for rank in ranks:  # DeepSeek's bias is no parameter, and no flag lets it change
            biases = [n for n in rank["params"] if n.endswith("e_score_correction_bias")]
            assert not any(rank["params"].pop(n).any() for n in biases)
            assert len(biases) > 0 or "deepseek" not in name
        assert_equal(losses, ranks, expected[name.split("-")[1]])
