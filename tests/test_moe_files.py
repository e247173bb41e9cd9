"""Models with experts: their costs, where they are cut, their files read and written."""

import itertools
import math

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from llm_demo.model.costs import active_of, block_costs, flops_of_slot, head_cost, parameters_of
from llm_demo.model.cut import costs, describe_split, split
from llm_demo.model.decoder import make_units, skeleton, unit_sizes
from llm_demo.model.source import load_config

QWEN = load_config(ROOT / "models/qwen3-30b-a3b", 4096)
DEEPSEEK = DeepseekV3Config()  # its defaults are DeepSeek-V3's
SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
    num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64, num_experts_per_tok=2,
)  # fmt: skip
LATENT = dict(
    kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=20, n_routed_experts=8,
    n_group=4, topk_group=2, num_key_value_heads=4, **SIZES,
)  # fmt: skip
TINY = {
    "qwen3": Qwen3MoeConfig(
        num_experts=6, num_key_value_heads=2, head_dim=8, mlp_only_layers=[1], **SIZES
    ),
    "qwen3, every second": Qwen3MoeConfig(
        num_experts=6, num_key_value_heads=2, head_dim=8, decoder_sparse_step=2, **SIZES
    ),
    "deepseek": DeepseekV3Config(
        first_k_dense_replace=1, q_lora_rank=20, n_shared_experts=2, **LATENT
    ),
    "deepseek, plain queries": DeepseekV3Config(
        first_k_dense_replace=2, q_lora_rank=None, tie_word_embeddings=True, **LATENT
    ),
}
SHAPES = {**TINY, "Qwen3-30B-A3B": QWEN, "DeepSeek-V3": DEEPSEEK}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_of_each_block_are_the_models(name):
    config = SHAPES[name]
    with torch.device("meta"):  # skeleton reserves host memory for a tensor at a time, here 30 GB
        lm = AutoModelForCausalLM.from_config(config)
    for block, cost in zip(lm.model.layers, block_costs(config, 0), strict=True):
        assert cost.parameters == sum(p.numel() for p in block.parameters() if p.ndim > 1)
        unused = 0
        if hasattr(block.mlp, "experts"):
            experts = sum(p.numel() for p in block.mlp.experts.parameters())
            n = config.num_local_experts
            unused = experts * (n - config.num_experts_per_tok) // n
        assert cost.active == cost.parameters - unused
    ends = lm.get_input_embeddings().weight.numel() * (2 - config.tie_word_embeddings)
    assert parameters_of(config) == ends + sum(block.parameters for block in block_costs(config, 0))
    if name in TINY:  # a tied head counts once
        lm = skeleton(config, "math")
        assert parameters_of(config) == sum(p.numel() for p in lm.parameters() if p.ndim > 1)


def test_published_sizes():
    """The names say so: 30.5B and 3.3B; 671B and 37B (DeepSeek's count is without the embedding)."""
    assert parameters_of(QWEN) == pytest.approx(30.5e9, rel=2e-3)
    assert active_of(QWEN) == pytest.approx(3.35e9, rel=2e-3)
    assert parameters_of(DEEPSEEK) == pytest.approx(671e9, rel=1e-3)
    embedding = head_cost(DEEPSEEK).parameters
    assert active_of(DEEPSEEK) - embedding == pytest.approx(37e9, rel=2e-2)


def test_flops_are_of_active_weights_and_of_attentions_own_widths():
    S, config = 512, TINY["deepseek"]
    for cost in block_costs(config, S):
        assert cost.flops == 6 * cost.active + 6 * 4 * (24 + 20) * S
    block = block_costs(QWEN, S)[0]
    assert block.flops == 6 * block.active + 12 * 32 * 128 * S
    assert flops_of_slot(QWEN, S) == 48 * block.flops + head_cost(QWEN).flops
    assert flops_of_slot(QWEN, 0) < 6 * active_of(QWEN) < 6 * parameters_of(QWEN) / 9


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
@pytest.mark.parametrize("partition", ["balanced", "parameters"])
def test_each_block_weighs_its_own(name, pieces, partition):
    config = TINY[name]
    first, blocks, last = costs(config, 64, False, partition == "parameters")
    assert len(set(blocks)) == 2

    def dearest(counts):
        ends = list(itertools.accumulate(counts, initial=0))
        each = [sum(blocks[a:b]) for a, b in itertools.pairwise(ends)]
        each[0] += first
        each[-1] += last
        return sorted(each, reverse=True)

    every = (c for c in itertools.product(range(1, 5), repeat=pieces) if sum(c) == 4)
    best = min(dearest(counts) for counts in every)
    assert dearest(split(config, pieces, partition, 64, False)) == pytest.approx(best)


def test_dense_first_blocks_count_in_the_cut():
    """DeepSeek-V3's three dense blocks have 1/20 of the others' parameters, and as much work: 8 + 1
    experts of 2,048 are as wide as a dense block's 18,432."""
    assert split(DEEPSEEK, 4, "parameters", 4096, True) == [17, 15, 15, 14]
    assert split(DEEPSEEK, 4, "uniform", 4096, True) == [16, 15, 15, 15]
    assert split(DEEPSEEK, 2, "balanced", 4096, False) == [31, 30]
    said = describe_split([3, 58], [0, 1], DEEPSEEK, 4096, False)
    _, blocks, head = costs(DEEPSEEK, 4096, False)
    share = sum(blocks[:3]) / (sum(blocks) + head)
    assert f"stage 0: 3 blocks {share:.0%} of the work" in said


def test_units_of_blocks_of_different_sizes():
    assert unit_sizes(QWEN, 48, 0) == [1] * 48  # 623M parameters each
    tiny = TINY["deepseek, plain queries"]
    assert unit_sizes(tiny, 4, 0) == [2, 2]  # dense ones apart
    assert unit_sizes(tiny, 4, 3) == [2, 2] and unit_sizes(tiny, 4, 4) == [4]
    assert unit_sizes(tiny, 2, 0, first=1) == [1, 1] and unit_sizes(tiny, 2, 0, first=2) == [2]
    assert unit_sizes(TINY["qwen3"], 4, 0) == [1, 1, 2]
    lm = skeleton(TINY["qwen3"], "math")
    units = make_units(lm, lm.config, 0, False)
    assert [len(unit.blocks) for unit in units] == [1, 1, 2]
    assert [b for unit in units for b in unit.blocks] == list(lm.model.layers)
    assert math.prod(len(unit.blocks) for unit in units) == 2
