"""Rotary embeddings whose frequencies depend on lengths: each packed document gets its own."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from test_evaluate import evaluated, transformers_loss
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    LlamaConfig,
    Qwen3Config,
)

from llm_demo import evaluate
from llm_demo.core.attention import make_documents, rotary_tables
from llm_demo.core.decoder import Blocks, DecoderLoss, allocate, skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.rows import position_ids
from llm_demo.model.source import load_config
from pp.ds_engine import BlockInputs

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = dict(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    initializer_range=0.1,
)  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.7 * i for i in range(8)],
}  # fmt: skip
ROPES = {
    "longrope": LONGROPE,
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
             "original_max_position_embeddings": 32},
}  # fmt: skip
ROWS = [[24, 25, 47], [96], [3, 60, 20, 13]]  # short and long side by side; the last is padding


def config_of(kind, family=Qwen3Config):
    return family(rope_parameters=dict(ROPES[kind]), tie_word_embeddings=False, **SIZES)


def micro_batch():
    """(ids, labels, cu_seqlens): rows of 96; of the third, the last 13 slots are padding."""
    ids = torch.randint(0, 512, (3, 96), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    ends = torch.tensor([n for row in ROWS for n in row]).cumsum(0)
    labels.view(-1)[ends - 1] = -100
    labels[2, -13:] = -100
    return ids, labels, torch.cat([torch.zeros(1), ends, ends[-1:]]).int()


def alone(model, ids, labels, cu):
    """The loss of all documents, each alone in a batch of transformers' own model."""
    total = 0.0
    for start, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        x, y = ids.view(-1)[start:end].to(HERE), labels.view(-1)[start:end].to(HERE)
        if (y != -100).any():
            logits = model(input_ids=x[None], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits, y, reduction="sum")
    return total


def norm(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.stack([g.double().square().sum() for g in grads]).sum().sqrt().item()


@pytest.mark.parametrize("family", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("kind", ROPES)
def test_a_packed_document_has_the_frequencies_it_has_alone(kind, family):
    config = config_of(kind, family)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(HERE)
    ids, labels, cu = micro_batch()
    expected = alone(plain, ids, labels, cu)
    expected.backward()

    lm = skeleton(config, "math")
    model = DecoderLoss(lm, [Blocks(list(lm.model.layers), False)])
    allocate(model, HERE)
    lm.load_state_dict(plain.state_dict())
    index = (labels.flatten() != -100).nonzero().squeeze(1)
    documents = make_documents(cu, (3, 96), "math", HERE)
    positions = position_ids(cu, (3, 96))
    found = model(
        ids.to(HERE), positions.to(HERE), documents, index.to(HERE),
        labels.flatten()[index].to(HERE),
    )  # fmt: skip
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert norm(model) == pytest.approx(norm(plain), rel=1e-5)

    # a stage of the pipeline makes the same tables
    layout = BlockInputs(lm.model.rotary_emb, "math", HERE)
    layout.follow(iter([cu]))
    (cos, sin), _, _ = layout.advance(torch.zeros(3, 96, 64, device=HERE))
    for start, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        if start < end and end - start != 13:
            own = torch.arange(end - start, device=HERE)[None]
            tables = plain.model.rotary_emb(torch.zeros(1, device=HERE), own)
            for ours, theirs in zip((cos, sin), tables, strict=True):
                torch.testing.assert_close(ours.view(-1, 16)[start:end], theirs[0])


def latent_yarn():
    """DeepSeek-V3's own yarn, made smaller; its two mscales differ, so that both are seen."""
    yarn = dict(
        rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=16,
        beta_fast=32, beta_slow=1, mscale=0.7, mscale_all_dim=1.3,
    )  # fmt: skip
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_key_value_heads": 4}
    return DeepseekV3Config(
        **sizes, rope_parameters=yarn, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, kv_lora_rank=24, q_lora_rank=32,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1,
    )  # fmt: skip


def test_latent_attention_with_yarn():
    """The tables and the scaled scores of packed documents are those of each alone."""
    torch.manual_seed(0)
    how = {"dtype": torch.float32, "experts_implementation": "eager"}
    plain = AutoModelForCausalLM.from_config(latent_yarn(), **how).to(HERE)
    lm = skeleton(latent_yarn(), "bucketed")
    lm.set_experts_implementation("eager")
    allocate(lm, HERE)
    lm.load_state_dict(plain.state_dict())
    ids, labels, cu = micro_batch()
    positions, documents = position_ids(cu, (3, 96)), make_documents(cu, (3, 96), "bucketed", HERE)
    hidden = lm.model.embed_tokens(ids.to(HERE))
    tables = rotary_tables(lm.model.rotary_emb, hidden, positions.to(HERE), documents)
    out = lm.model.norm(Blocks(list(lm.model.layers), False)(hidden, tables, None, documents))
    assert tables[0].shape == (3, 96, 8)
    assert tables[0][0, 0, 0] != 1  # mscale: 0.7 / 1.3
    seen = {}
    plain.model.rotary_emb.register_forward_hook(lambda module, x, y: seen.update(tables=y))
    for start, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        if start < end:
            one = ids.view(1, -1)[:, start:end].to(HERE)
            alone = plain.model(input_ids=one, use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(out.flatten(0, 1)[start:end], alone, rtol=1e-5, atol=1e-5)
            for ours, theirs in zip(tables, seen["tables"], strict=True):
                assert torch.equal(ours.flatten(0, 1)[start:end], theirs[0])


@pytest.mark.parametrize("kind", ROPES)
def test_evaluation_does_not_mix_frequencies(kind, tmp_path):
    """Documents of 10, 60 and 120 tokens, in one batch where their frequencies allow it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    rows = [{"input_ids": [i % 500 for i in range(n)]} for n in (10, 60, 120)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--models", tmp_path, "--data", tmp_path / "x.jsonl", "--seq_len", 128, "--show", 0]
    found = evaluated(tmp_path, flags)["files"][0]
    loss, tokens = transformers_loss(tmp_path, tmp_path / "x.jsonl", 128)
    assert found["tokens"] == tokens and found["loss"] == pytest.approx(loss, rel=1e-5)
    assert evaluate.length_dependent_rope(config_of(kind)) == (kind != "yarn")
    assert not evaluate.length_dependent_rope(load_config(TINY, 64))


def test_a_broken_longrope_is_one_line(tmp_path):
    config = config_of("longrope").to_dict()
    config["rope_parameters"]["long_factor"] = [1.0, 2.0, 3.0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="longrope"):
        load_config(tmp_path, 64)
