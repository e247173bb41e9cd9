"""Models with experts: their costs, where they are cut, their files read and written."""

import copy
import itertools
import json
import math
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, refused
from safetensors.torch import load_file, save_file
from test_export import run_of
from test_model import build
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from llm_demo.core.decoder import fill, make_units, materialise, skeleton
from llm_demo.core.errors import UserError
from llm_demo.model import export_files
from llm_demo.model.costs import (
    active_of,
    block_costs,
    flops_of_slot,
    parameters_of,
    sizes_of,
    unit_sizes,
)
from llm_demo.model.families import experts_of
from llm_demo.model.source import load_config
from llm_demo.model.weights_files import open_weights
from llm_demo.run.cut import costs, describe_split, parameters, split
from llm_demo.run.export_run import export

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
    "qwen3": Qwen3MoeConfig(num_experts=6, num_key_value_heads=2, head_dim=8, mlp_only_layers=[1],
                            **SIZES),
    "qwen3, every second": Qwen3MoeConfig(num_experts=6, num_key_value_heads=2, head_dim=8,
                                          decoder_sparse_step=2, **SIZES),
    "qwen2": Qwen2MoeConfig(num_experts=6, num_key_value_heads=2,
                            shared_expert_intermediate_size=20, mlp_only_layers=[2], **SIZES),
    "deepseek": DeepseekV3Config(first_k_dense_replace=1, q_lora_rank=20, n_shared_experts=2,
                                 **LATENT),
    "deepseek, plain queries": DeepseekV3Config(first_k_dense_replace=2, q_lora_rank=None,
                                                tie_word_embeddings=True, **LATENT),
}  # fmt: skip
SHAPES = {**TINY, "Qwen3-30B-A3B": QWEN, "DeepSeek-V3": DEEPSEEK}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_of_each_block_are_the_models(name):
    config = SHAPES[name]
    with torch.device("meta"):  # skeleton reserves host memory for a tensor at a time, here 30 GB
        lm = AutoModelForCausalLM.from_config(config)
    for block, cost in zip(lm.model.layers, block_costs(config), strict=True):
        assert cost.parameters == sum(p.numel() for p in block.parameters() if p.ndim > 1)
        unused = 0
        if hasattr(block.mlp, "experts"):
            experts = sum(p.numel() for p in block.mlp.experts.parameters())
            n = experts_of(config)
            unused = experts * (n - config.num_experts_per_tok) // n
        assert cost.active == cost.parameters - unused
    ends = lm.get_input_embeddings().weight.numel() * (2 - config.tie_word_embeddings)
    assert parameters_of(config) == ends + sum(block.parameters for block in block_costs(config))
    if name in TINY:  # a tied head counts once
        lm = skeleton(config, "math")
        assert parameters_of(config) == sum(p.numel() for p in lm.parameters() if p.ndim > 1)


def test_published_sizes():
    """The names say so: 30.5B and 3.3B; 671B and 37B (without the embedding)."""
    assert parameters_of(QWEN) == pytest.approx(30.5e9, rel=2e-3)
    assert active_of(QWEN) == pytest.approx(3.35e9, rel=2e-3)
    assert parameters_of(DEEPSEEK) == pytest.approx(671e9, rel=1e-3)
    embedding = sizes_of(DEEPSEEK).embedding
    assert active_of(DEEPSEEK) - embedding == pytest.approx(37e9, rel=2e-2)


def test_flops_are_of_active_weights_and_of_attentions_own_widths():
    S, config = 512, TINY["deepseek"]
    for cost in block_costs(config):
        assert cost.flops(S) == 6 * cost.active + 6 * 4 * (24 + 20) * S
    sizes = sizes_of(QWEN)
    block = sizes.blocks[0]
    assert block.flops(S) == 6 * block.active + 12 * 32 * 128 * S
    assert flops_of_slot(sizes, S) == 48 * block.flops(S) + 6 * sizes.embedding
    assert flops_of_slot(sizes, 0) < 6 * active_of(QWEN) < 6 * parameters_of(QWEN) / 9


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
@pytest.mark.parametrize("partition", ["balanced", "parameters"])
def test_each_block_weighs_its_own(name, pieces, partition):
    sizes = sizes_of(TINY[name])
    by_parameters = partition == "parameters"
    first, blocks, last = parameters(sizes) if by_parameters else costs(sizes, 4, 64, False)
    assert len(set(blocks)) == 2

    def dearest(counts):
        ends = list(itertools.accumulate(counts, initial=0))
        each = [sum(blocks[a:b]) for a, b in itertools.pairwise(ends)]
        each[0] += first
        each[-1] += last
        return sorted(each, reverse=True)

    every = (c for c in itertools.product(range(1, 5), repeat=pieces) if sum(c) == 4)
    best = min(dearest(counts) for counts in every)
    chosen = split(sizes, pieces, partition, costs(sizes, 4, 64, False))
    assert dearest(chosen) == pytest.approx(best)


def test_dense_first_blocks_count_in_the_cut():
    """DeepSeek-V3's three dense blocks have 1/20 of the others' parameters, and as much work: 8 + 1
    experts of 2,048 are as wide as a dense block's 18,432."""
    sizes = sizes_of(DEEPSEEK)
    times = costs(sizes, 4, 4096, False)
    assert split(sizes, 4, "parameters", times) == [17, 15, 15, 14]
    assert split(sizes, 4, "uniform", times) == [16, 15, 15, 15]
    assert split(sizes, 2, "balanced", times) == [31, 30]
    said = describe_split([3, 58], [0, 1], times)
    embedding, blocks, head = costs(sizes_of(DEEPSEEK), 4, 4096, False)
    share = (embedding + sum(blocks[:3])) / (embedding + sum(blocks) + head)
    assert f"stage 0: 3 blocks {share:.0%} of the work" in said


def test_units_of_blocks_of_different_sizes():
    assert unit_sizes(QWEN, 48, 0) == [1] * 48  # 623M parameters each
    tiny = TINY["deepseek, plain queries"]
    assert unit_sizes(tiny, 4, 0) == [2, 2]  # dense ones apart
    assert unit_sizes(tiny, 4, 3) == [2, 2] and unit_sizes(tiny, 4, 4) == [4]
    assert unit_sizes(tiny, 2, 0, first=1) == [1, 1] and unit_sizes(tiny, 2, 0, first=2) == [2]
    assert unit_sizes(TINY["qwen3"], 4, 0) == [1, 1, 2]
    lm = skeleton(TINY["qwen3"], "math")
    units = make_units(lm.model.layers, unit_sizes(lm.config, 4, 0), False)
    assert [len(unit.blocks) for unit in units] == [1, 1, 2]
    assert [b for unit in units for b in unit.blocks] == list(lm.model.layers)
    assert math.prod(len(unit.blocks) for unit in units) == 2


def random_model(name):
    """(a model, its buffers in files): biases that choose experts are not zero."""
    torch.manual_seed(0)
    config = copy.deepcopy(TINY[name])  # the model changes its own
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    for bias in biases.values():
        bias.normal_()
    return model, biases


def saved(name, folder, **how):
    """What from_pretrained reads, in fp32, of random weights saved in `folder`."""
    random_model(name)[0].save_pretrained(folder, **how)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


HOW = {
    "a tensor for each expert": {},
    "in shards": {"max_shard_size": "20KB"},
    "fused": {"save_original_format": False},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", TINY)
def test_weights_read_are_hugging_faces(name, how, tmp_path):
    """Every parameter and buffer of the model built block by block, to the bit; and any slices,
    such as FSDP2 asks for: of the experts, some or none."""
    true = saved(name, tmp_path, **HOW[how])
    weights = open_weights(tmp_path)
    assert any(re.search(r"experts\.0\.up_proj", n) for n in weights.files) == (how != "fused")
    assert len(set(weights.files.values())) > 3 or how != "in shards"
    lm = build(load_config(tmp_path, 64), weights)
    mine = dict(itertools.chain(lm.named_parameters(), lm.named_buffers()))
    for key in true.keys() - {"lm_head.weight"}:
        assert torch.equal(mine[key], true[key]) and mine[key].hf_name == key, key
    for key, whole in true.items():
        if whole.ndim < 3:
            continue
        assert weights.shapes[key] == whole.shape
        for experts in ((0, 3), (3, 6), (5, 6), (2, 2), (0, len(whole))):
            for rest in ([], [slice(5, 21)], [slice(17, 18), slice(3, 9)]):
                part = slice(*experts), *rest
                assert torch.equal(weights.read(key, part), whole[part]), (key, part)


def test_only_what_is_asked_for_is_read(tmp_path):
    """Of no other expert anything."""
    saved("qwen3", tmp_path)
    weights, read = open_weights(tmp_path), []
    weights.bar = SimpleNamespace(update=read.append)
    values = weights.read("model.layers.0.mlp.experts.gate_up_proj", (slice(2, 4),))
    assert sum(read) == values.nbytes == 2 * 32 * 32 * 4


def changed(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    skeleton(load_config(folder, 64), "math", open_weights(folder))


def test_bad_files_are_named_by_their_own_tensor(tmp_path):
    saved("deepseek", tmp_path)
    block = "model.layers.2.mlp."
    expert, bias = f"{block}experts.7.up_proj.weight", f"{block}gate.e_score_correction_bias"
    for change, message in (
        (lambda t: t.pop(expert), f"weight {expert} is missing"),
        (lambda t: t.update({expert: torch.ones(16, 31)}), rf"{expert} has shape \[16, 31\], but"),
        (lambda t: t.update({expert: torch.ones(())}), rf"{expert} has shape \[\], but"),
        (lambda t: t.update({expert: torch.ones(16, 32)}), None),
        (
            lambda t: t.update({expert.replace("7", "8"): torch.ones(16, 32)}),
            "experts.8.up_proj.weight is not a weight of this model",
        ),
        (lambda t: t.pop(expert.replace("7", "8")), None),
        (lambda t: t.pop(bias), f"weight {bias} is missing"),
    ):
        if message is None:
            changed(tmp_path, change)
            continue
        with pytest.raises(UserError, match=message):
            changed(tmp_path, change)


def test_layers_of_multi_token_prediction_are_ignored(tmp_path):
    """As DeepSeek-V3's files hold one, after the model's last block; any other layer too many is
    refused."""
    saved("deepseek", tmp_path)
    names = "enorm", "mlp.experts.0.up_proj"
    extra = {f"model.layers.4.{name}.weight": torch.ones(3) for name in names}
    with pytest.raises(UserError, match="model.layers.4.enorm.weight is not a weight of this mod"):
        changed(tmp_path, lambda t: t.update(extra))
    changed(tmp_path, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.ones(3)}))
    assert len(open_weights(tmp_path).ignored) == 3


def test_random_models_have_zero_biases():
    lm = skeleton(TINY["deepseek"], "math")
    part = materialise(lm, "model.layers.2", None, 0, torch.device("cpu"))
    bias = part.mlp.gate.e_score_correction_bias
    assert bias.hf_name == "model.layers.2.mlp.gate.e_score_correction_bias"
    assert bias.dtype == torch.float32 and not bias.any()
    assert part.mlp.experts.gate_up_proj.std().item() == pytest.approx(0.02, rel=0.1)
    other = fill(lm, "model.layers.2", None, 0)
    assert other is part


BAD = {
    "num_experts_per_tok 9 does not choose from 8 experts": {"num_experts_per_tok": 9},
    "n_group 3 does not divide 8 experts into groups of at least 2": {"n_group": 3},
    "n_group 8 does not divide 8 experts into groups": {"n_group": 8, "topk_group": 2},
    "topk_group 5 of n_group 4 has too few experts to choose 2 from": {"topk_group": 5},
    "topk_group 1 of n_group 4 has too few experts to choose 3 from": {
        "num_experts_per_tok": 3, "topk_group": 1,
    },
    "scoring_func softmax is not supported, only sigmoid": {"scoring_func": "softmax"},
    "topk_method greedy is not supported, only noaux_tc": {"topk_method": "greedy"},
    "moe_layer_freq 2 is not supported, only 1": {"moe_layer_freq": 2},
    "num_key_value_heads differs from num_attention_heads": {"num_key_value_heads": 2},
    "config.json: .*not supported between": {"first_k_dense_replace": None},
    "no block has experts": {"first_k_dense_replace": 4},
    r"weights are quantized in a way that is not read \(.*'quant_method': 'fp8'": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]},
    },
}  # fmt: skip


OTHERS = [  # of Qwen's
    ("qwen2", {"num_experts": 1}, "num_experts_per_tok 2 does not choose from 1 experts"),
    ("qwen3", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 does not choose from 6 experts"),
    ("qwen3", {"mlp_only_layers": [0, 1, 2, 3]}, "no block has experts"),
    ("qwen3", {"decoder_sparse_step": 5}, "no block has experts"),
]  # fmt: skip
REFUSED = [*(("deepseek", change, message) for message, change in BAD.items()), *OTHERS]


@pytest.mark.parametrize("name, change, message", REFUSED)
def test_configurations_that_are_refused(name, change, message, tmp_path, record_property):
    record_property("bad inputs", 1)
    config = json.loads(TINY[name].to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_config(tmp_path, 64)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with refused(message):
        load_config(tmp_path, 64)


def trained(name, folder, without=()):
    """A model, and a run's checkpoint that holds its parameters and buffers."""
    model, biases = random_model(name)
    state = {n: p.detach() for n, p in model.named_parameters()} | biases
    state = {n: t for n, t in state.items() if n not in without}
    return model, run_of(folder, model, state) / "checkpoints/step_00000007"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", TINY)
def test_exported_experts_give_the_same_logits(name, shards, dtype, tmp_path, alone):
    """Every parameter and buffer to the bit, from a tensor for each expert, as on the hub. What
    chooses experts stays in fp32."""
    model, checkpoint = trained(name, tmp_path / "run")
    size = sum(p.numel() for p in model.parameters()) * (4 if dtype == "fp32" else 2)
    out = tmp_path / "out"
    export(checkpoint, out, dtype, "5GB" if shards == 1 else int(size * 0.4))
    files = sorted(out.glob("*.safetensors"))
    assert len(files) >= shards
    tensors = {n: t for file in files for n, t in load_file(file).items()}
    assert not any(n.endswith(("gate_up_proj", "experts.down_proj")) for n in tensors)
    experts = sum(block.chosen > 0 for block in block_costs(model.config)) * experts_of(
        model.config
    )
    assert sum(".mlp.experts." in n for n in tensors) == 3 * experts
    assert sum(t.nbytes for t in tensors.values()) == pytest.approx(size, rel=0.01)
    if shards > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == tensors.keys()
    again, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert getattr(again.config, "num_mtp_layers", 0) == 0
    if not name.startswith("deepseek"):  # by transformers 4's name
        written = json.loads((out / "config.json").read_text())
        assert written["num_experts"] == experts_of(model.config)
    ids, state = torch.randint(0, 97, (2, 33)), again.state_dict()
    for key, true in model.state_dict().items():
        if key.endswith("e_score_correction_bias"):
            assert state[key].dtype == torch.float32 and true.any()
        assert torch.equal(state[key], true.to(state[key].dtype)), key
    if dtype == "fp32":
        with torch.no_grad():
            assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
    weights = open_weights(out)
    skeleton(load_config(out, 64), "math", weights)
    tied = {"lm_head.weight"}
    assert weights.shapes.keys() - tied == model.state_dict().keys() - tied


def test_the_masters_of_a_file_are_not_held_at_once(tmp_path, monkeypatch):
    """At most READ bytes of them, or one fused tensor. Those read before are freed."""
    shapes = {n: tuple(p.shape) for n, p in random_model("qwen3")[0].named_parameters()}
    sizes = [4 * math.prod(shape) for shape in shapes.values()]
    monkeypatch.setattr(export_files, "READ_AT_ONCE", 4096)
    held, earlier = [], []

    def read(tensors):
        assert not any(t() is not None for t in earlier)
        held.append(sum(t.nbytes for t in tensors.values()))
        for t in tensors.values():
            earlier.append(weakref.ref(t.zero_()))

    export_files.write_weights(tmp_path, read, shapes, torch.bfloat16, "5GB")
    assert len(held) > 3 and max(held) == max(sizes)
    assert sum(held) == sum(sizes)


def test_a_checkpoint_without_the_bias_is_refused(tmp_path, alone):
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    _, checkpoint = trained("deepseek", tmp_path / "run", without=[bias])
    with pytest.raises(UserError, match=f"{bias} is missing there"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
