"""Making and loading decoders: every name read, every value right, the same in every process."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from bench import checkpoints
from llm_demo.data.batch import position_ids
from llm_demo.errors import UserError
from llm_demo.model.attention import make_documents
from llm_demo.model.costs import block_costs, flops_of_slot, head_cost, param_count
from llm_demo.model.decoder import Blocks, DecoderLoss, skeleton, unit_sizes
from llm_demo.model.source import find_model, load_config, load_tokenizer
from llm_demo.model.weights import materialise, open_weights

CPU = torch.device("cpu")
SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
CONFIGS = {
    "qwen3-tied": Qwen3Config(tie_word_embeddings=True, head_dim=8, **SIZES),
    "qwen3": Qwen3Config(tie_word_embeddings=False, head_dim=16, **SIZES),
    "qwen2": Qwen2Config(tie_word_embeddings=True, **SIZES),  # has biases
    "llama": LlamaConfig(
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        **SIZES,
    ),  # fmt: skip
    "mistral": MistralConfig(sliding_window=None, **SIZES),
}


def build(config, weights, seed=0):
    lm = skeleton(config, "bucketed", weights)
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb"]
    names += [f"model.layers.{i}" for i in range(config.num_hidden_layers)]
    for name in reversed(names + ([] if config.tie_word_embeddings else ["lm_head"])):
        materialise(lm, name, weights, seed, CPU)
    if config.tie_word_embeddings:
        lm.lm_head.weight = lm.model.embed_tokens.weight
    return lm


@pytest.mark.parametrize("shards", ["1MB", "20KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loaded_model_equals_hugging_faces(name, shards, tmp_path):
    """Logits of the model loaded part by part equal from_pretrained's: rotary buffers included."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path, max_shard_size=shards)
    true = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    lm = build(load_config(tmp_path, 64), open_weights(tmp_path))
    ids = torch.randint(0, 97, (2, 64))
    cu = torch.tensor([0, 64, 128], dtype=torch.int32)
    documents = make_documents(cu, (2, 64), "bucketed", CPU)
    hidden = lm.model(
        input_ids=ids, position_ids=position_ids(cu, (2, 64)), documents=documents, use_cache=False
    ).last_hidden_state
    torch.testing.assert_close(lm.lm_head(hidden), true(ids).logits)
    assert param_count(lm) == sum(p.numel() for p in true.parameters())
    assert not any(t.is_meta for t in [*lm.parameters(), *lm.buffers()])


@pytest.mark.parametrize("name", CONFIGS)
def test_random_weights_are_the_same_whoever_makes_them(name):
    whole = dict(build(CONFIGS[name], None, seed=5).named_parameters())
    part = materialise(skeleton(CONFIGS[name], "math"), "model.layers.1", None, 5, CPU)
    for key, param in part.named_parameters():
        assert torch.equal(param, whole[f"model.layers.1.{key}"])
        assert torch.equal(param, param.bfloat16().float())
    other = materialise(skeleton(CONFIGS[name], "math"), "model.layers.1", None, 6, CPU)
    assert not torch.equal(other.mlp.up_proj.weight, part.mlp.up_proj.weight)
    assert whole["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    ups = [whole[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 2)]
    assert not torch.equal(*ups)
    assert (whole["model.norm.weight"] == 1).all()


def test_random_weights_leave_the_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build(CONFIGS["qwen3"], None)
    assert torch.equal(torch.rand(3), expected)


def test_published_flops():
    """Qwen3-0.6B at S = 1024: 28 blocks of 119.5 MFLOP and a head of 933 MFLOP a token."""
    config = load_config(ROOT / "models/qwen3-0.6b", 1024)
    blocks, head = [b.flops for b in block_costs(config, 1024)], head_cost(config).flops
    (block,) = set(blocks)
    assert flops_of_slot(config, 1024) == 28 * block + head
    assert block == pytest.approx(119.5e6, rel=1e-3)
    assert head == pytest.approx(933e6, rel=1e-3)


def test_checkpointing_keeps_one_tensor_a_block_and_the_numbers():
    lm = build(CONFIGS["qwen3"], None)
    cu = torch.tensor([0, 40, 64], dtype=torch.int32)
    documents, positions = make_documents(cu, (1, 64), "bucketed", CPU), position_ids(cu, (1, 64))
    hidden = torch.randn(1, 64, 32, requires_grad=True)
    rotary = lm.model.rotary_emb(hidden, positions)
    found = []
    for checkpointing in (False, True):
        kept = []
        unit = Blocks(list(lm.model.layers), checkpointing)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: (k.append(t), t)[1], id):
            unit(hidden, rotary, positions, documents)
        out = unit(hidden, rotary, positions, documents)
        grads = torch.autograd.grad(out.square().sum(), [hidden, *lm.model.layers.parameters()])
        found.append((len(kept), out, grads))
    (many, out, grads), (few, out2, grads2) = found
    assert few <= 2 * len(lm.model.layers) < many
    assert torch.equal(out, out2) and all(map(torch.equal, grads, grads2))


def test_sizes_of_units():
    small, large = (load_config(ROOT / f"models/qwen3-{n}", 1024) for n in ("0.6b", "8b"))
    assert unit_sizes(small, 28, 0) == [4] * 7  # 16M parameters a block
    assert unit_sizes(small, 18, 0) == [4, 4, 4, 3, 3]
    assert unit_sizes(large, 36, 0) == [1] * 36  # 193M
    assert unit_sizes(large, 5, 2) == [2, 2, 1]


@pytest.mark.parametrize("name", CONFIGS)
def test_names_of_a_model_in_units_are_hugging_faces(name):
    lm = build(CONFIGS[name], None)
    expected = {n: id(p) for n, p in lm.named_parameters()}
    blocks = list(lm.model.layers)
    model = DecoderLoss(lm, [Blocks(blocks[:2], False), Blocks(blocks[2:], False)])
    assert {p.hf_name: id(p) for p in model.parameters()} == expected


def test_next_tokens_without_targets():
    lm = build(CONFIGS["qwen3"], None)
    model = DecoderLoss(lm, [Blocks(list(lm.model.layers), False)])
    cu = torch.tensor([0, 64], dtype=torch.int32)
    documents = make_documents(cu, (1, 64), "bucketed", CPU)
    ids, index = torch.randint(0, 97, (1, 64)), torch.tensor([3, 63])
    assert model(ids, position_ids(cu, (1, 64)), documents, index).shape == (2,)


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "no model at"),
        ({"config.json": "{"}, "config.json"),
        ({"config.json": '{"model_type": "gpt2"}'}, "gpt2 is not one of qwen3, qwen2"),
        ({"config.json": '{"model_type": "nonsense"}'}, "nonsense"),
        ({"config.json": '{"model_type": "qwen3", "head_dim": null}'}, "field 'head_dim'"),
        (
            {"config.json": '{"model_type": "qwen3", "num_key_value_heads": 0}'},
            "config.json: num_key_value_heads 0 is not a positive number",
        ),
        (
            {"config.json": '{"model_type": "qwen3", "num_hidden_layers": 0}'},
            "config.json: num_hidden_layers 0 is not a positive number",
        ),
        ({"config.json": '{"model_type": "qwen3", "head_dim": 0}'}, "head_dim 0 is not a positive"),
        ({"config.json": '{"model_type": "llama", "hidden_act": "foo"}'}, "hidden_act foo is unk"),
        ({"config.json": '{"model_type": "qwen3"}', "pytorch_model.bin": ""}, "save_pretrained"),
        ({"config.json": '{"model_type": "qwen3"}', "model.safetensors": "x"}, "model.safetensors"),
    ],
)
def test_bad_folders(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        folder = find_model(str(tmp_path))
        load_config(folder, 64)
        open_weights(folder)


def test_weights_that_do_not_fit(tmp_path):
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 4}, "weight model.layers.3"),
        ({"num_hidden_layers": 2}, "model.layers.2.input_layernorm.weight is not a weight of this"),
        ({"intermediate_size": 50}, r"down_proj.weight has shape \[32, 48\], .* \[32, 50\]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=message):
            build(load_config(tmp_path, 64), open_weights(tmp_path))


@pytest.mark.slow
def test_reading_a_model_takes_no_more_of_the_host_than_its_weights():
    """2.4 GB of fp32 weights on two processes without a GPU, whose parameters are in the host's
    memory too: 1.0 of the file."""
    args = SimpleNamespace(
        model=None, import_model="models/qwen3-0.6b", import_dtype="fp32", dtype="fp32",
        seq_len=128, steps=3, flags="",
    )  # fmt: skip
    result = checkpoints.measure_import("fsdp", args)
    assert result["bytes"] > 2e9
    assert result["peak"] - result["without"] < 1.3 * result["bytes"]


def test_sequences_longer_than_the_model_knows(tmp_path):
    load_config(ROOT / "models/qwen3-tiny", 4096)  # without weights
    shutil.copy(ROOT / "models/qwen3-tiny/config.json", tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="--seq_len 4096: .* positions up to 2048"):
        load_config(tmp_path, 4096)


def test_a_folder_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match="--tokenizer_name_or_path"):
        load_tokenizer(str(tmp_path))
