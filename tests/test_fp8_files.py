"""Weights in fp8, as they are published: read to the values of transformers, and written again.

The folders here are made by the formulas of the formats, one number at a time where they matter."""

import itertools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, refused
from safetensors.torch import load_file, save_file
from test_model import build
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from llm_demo.model.model_folder import load_model, open_model
from llm_demo.model.source import load_config
from llm_demo.model.weights_files import open_weights

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
LATENT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 112,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
HEADS = {"head_dim": 64, "num_key_value_heads": 2}
MODELS = {
    "qwen3": Qwen3Config(**SIZES | HEADS),
    "experts": Qwen3MoeConfig(**SIZES | HEADS | {"num_experts": 4}),
    "deepseek": DeepseekV3Config(**SIZES | LATENT),
}
# 576 rows, 320 rows and columns: what no block of 128 divides
PARTIAL = {
    "qwen3": {"intermediate_size": 320},
    "deepseek": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "moe_intermediate_size": 320,
    },
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
DOWN = "model.layers.0.mlp.down_proj.weight"
SCALE = f"{DOWN}_scale_inv"


def in_fp8(name, t):
    """Whether a published folder has this tensor in fp8."""
    return t.ndim == 2 and not any(n in name for n in ("lm_head", "embed", "mlp.gate.weight"))


def quantised(w, dtype):
    """(e4m3 numbers, scales) of blocks: w / s, s = max |w| / 448."""
    scales = torch.empty(-(-w.shape[0] // 128), -(-w.shape[1] // 128))
    numbers = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    for i, j in itertools.product(*map(range, scales.shape)):
        at = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
        s = (w[at].abs().max() / 448).to(dtype).float()
        numbers[at], scales[i, j] = (w[at] / s).clamp(-448, 448).to(numbers.dtype), s
    return numbers, scales.to(dtype)


def published(name, folder, dtype=torch.float32, **sizes):
    """A folder in fp8 of random weights in bf16. dtype: of the scales."""
    torch.manual_seed(0)
    config = type(MODELS[name])(**{**MODELS[name].to_diff_dict(), **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    biases = {n: t.float() for n, t in state.items() if n.endswith("e_score_correction_bias")}
    state |= biases
    for key in [key for key, t in state.items() if in_fp8(key, t)]:
        state[key], state[f"{key}_scale_inv"] = quantised(state[key].float(), dtype)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, quantization_config=FP8)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / file, folder)
    return folder


def change(folder, **more):
    """Change config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))


def value_by_value(state, name):
    """A weight in fp32 by the formula."""
    numbers, scales = state[name].float(), state[f"{name}_scale_inv"].float()
    rows, columns = (torch.arange(n) for n in numbers.shape)
    return numbers * scales[rows[:, None] // 128, columns[None] // 128]


def values_of(state):
    """{name: values} of all weights of a folder."""
    names = [name for name in state if "_scale" not in name]
    fp8 = [name for name in names if state[name].element_size() == 1]
    return {name: value_by_value(state, name) if name in fp8 else state[name] for name in names}


def in_two_files(folder):
    """Move all scales, and every second other tensor, to another file."""
    state = load_file(folder / "model.safetensors")
    other = {n for i, n in enumerate(sorted(state)) if i % 2 or "_scale" in n}
    files = {"a.safetensors": state.keys() - other, "b.safetensors": other}
    for file, names in files.items():
        save_file({n: state[n] for n in names}, folder / file, metadata={"format": "pt"})
    places = {n: file for file, names in files.items() for n in names}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def assert_built(folder, true):
    """The model that is built block by block has these values, to the bit."""
    lm = build(*open_model(folder, 64))
    mine = dict(itertools.chain(lm.named_parameters(), lm.named_buffers()))
    for name, value in true.items():
        assert torch.equal(mine[name].to(value.dtype), value), name


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_values_are_transformers(name, dtype, files, tmp_path):
    """In both dtypes of scales: DeepSeek's, Qwen's. transformers multiplies on a CPU."""
    folder = published(name, tmp_path, dtype=dtype)
    if files == 2:
        in_two_files(folder)
    assert_built(
        folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    )
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    config, _ = open_model(folder, 64)
    mine = load_model("it", folder, config, torch.bfloat16).state_dict()
    assert mine.keys() == loaded.keys()
    assert all(mine[n].dtype == t.dtype and torch.equal(mine[n], t) for n, t in loaded.items())


@pytest.mark.parametrize("name", PARTIAL)
def test_any_slices_of_partial_blocks(name, tmp_path):
    """By the formula, a value at a time: what ranks ask for, of experts too. transformers loads no
    partial blocks."""
    folder = published(name, tmp_path, **PARTIAL[name])
    state, weights = load_file(folder / "model.safetensors"), open_weights(folder)
    assert len(weights.scales) == sum("_scale" in n for n in state) > 10
    true = values_of(state)
    cuts = [(0, 1), (127, 129), (128, 256), (250, 576), (300, 320), (5, 5), (0, None)]
    for key, value in true.items():
        if ".experts." in key:
            continue
        assert torch.equal(weights.read(key), value), key
        for a, b in itertools.product(cuts, cuts[::2]) if value.ndim == 2 else ():
            part = slice(*a), slice(*b)
            assert torch.equal(weights.read(key, part), value[part]), (key, part)
            assert torch.equal(weights.read(key, part[:1]), value[part[0]])
    for key in (n for n in weights.shapes if ".experts." in n):
        block, kinds = key.rpartition(".")[0], ("down",)
        if key.endswith("gate_up_proj"):
            kinds = "gate", "up"
        experts = []
        for e in range(weights.shapes[key][0]):
            experts.append(torch.cat([true[f"{block}.{e}.{kind}_proj.weight"] for kind in kinds]))
        whole = torch.stack(experts)
        slices = [slice(*cut) for cut in cuts[:5]]
        for part in itertools.product([slice(2, 4)], slices, slices):
            assert torch.equal(weights.read(key, part), whole[part]), (key, part)
        assert torch.equal(weights.read(key), whole)


def test_only_what_is_needed_is_read_and_counted(tmp_path):
    """A rank's rows, and a matrix's scales, which are few."""
    weights, read = open_weights(published("qwen3", tmp_path, **PARTIAL["qwen3"])), []
    weights.bar = SimpleNamespace(update=read.append)
    up = DOWN.replace("down", "up")
    weights.read(up, (slice(120, 130),))  # of [320, 128]
    assert sum(read) == 10 * 128 + 3 * 4
    weights.read(DOWN, (slice(0, 128), slice(256, 320)))
    assert sum(read) == 10 * 128 + 3 * 4 + 128 * 64 + 3 * 4
    read.clear()
    for name in weights.shapes:
        weights.read(name)
    assert 0.9 * weights.bytes < sum(read) < weights.bytes  # less the header


def test_scales_are_no_parameters_but_are_in_the_digest(tmp_path):
    weights = open_weights(published("qwen3", tmp_path))
    assert not any("scale" in name for name in weights.shapes)
    before, state = weights.digest(), load_file(tmp_path / "model.safetensors")
    assert open_weights(tmp_path).digest() == before
    state[f"{DOWN}_scale_inv"][0, 1] *= 2
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert open_weights(tmp_path).digest() != before


METHODS = [  # of quantization_config that is not read
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "compressed-tensors", "format": "float-quantized"},
    {"quant_method": "fp8"},
    FP8 | {"weight_block_size": [64, 64]},
    FP8 | {"fmt": "e5m2"},
    {"bits": 8},
]


@pytest.mark.parametrize("quantization", METHODS)
def test_other_kinds_are_refused(quantization, tmp_path, record_property):
    record_property("bad inputs", 1)
    config = MODELS["qwen3"].to_dict() | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(r"in a way that is not read \(.*\): give a copy in bf16, in fp8 with"):
        load_config(tmp_path, 64)


TENSORS = {  # what is said of a folder: what its weight and its scales become
    f"{DOWN} is in fp8, but {SCALE} is missing": lambda w, s: (w, None),
    rf"{SCALE} has shape \[2, 1\], but {DOWN} of shape \[128, 256\] has .* shape \[1, 2\]": (
        lambda w, s: (w, s.T)
    ),
    rf"{SCALE} has shape \[2\], but {DOWN} of": lambda w, s: (w, s[0]),
    f"{SCALE} is of type I32": lambda w, s: (w, s.int()),
    f"{SCALE} is in fp8, but": lambda w, s: (w, s.to(torch.float8_e4m3fn)),
    f"{DOWN} is of type F8_E5M2": lambda w, s: (w.float().to(torch.float8_e5m2), s),
    f"{SCALE} is not a weight of this model": lambda w, s: (w.bfloat16(), s),
    rf"{SCALE} has shape \[1, 2\], but {DOWN} of shape \[32768\]": lambda w, s: (w.flatten(), s),
    rf"{DOWN} has shape \[128, 128\], but config.json implies \[128, 256\]": (
        lambda w, s: (w[:, :128], s[:, :1])
    ),
    f"weight {DOWN} is missing": lambda w, s: (None, None),
}


@pytest.mark.parametrize("message", TENSORS)
def test_wrong_tensors_are_named(message, tmp_path, record_property):
    record_property("bad inputs", 1)
    file = published("qwen3", tmp_path) / "model.safetensors"
    state = load_file(file)
    state[DOWN], state[SCALE] = TENSORS[message](state[DOWN], state[SCALE])
    state = {name: t.contiguous() for name, t in state.items() if t is not None}
    save_file(state, file, metadata={"format": "pt"})
    with refused(message):
        open_model(tmp_path, 64)


def test_experts_of_both_dtypes(tmp_path):
    """Whichever comes first, no value is rounded."""
    file = published("experts", tmp_path) / "model.safetensors"
    for expert in (0, 3):
        state, name = load_file(file), f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        others = [name.replace(f"s.{expert}.", f"s.{e}.") for e in (1, 2)]
        true = torch.stack([value_by_value(state, other) for other in others])
        state[name] = state[name].float().bfloat16()
        del state[f"{name}_scale_inv"]
        save_file(state, file, metadata={"format": "pt"})
        values = open_model(tmp_path, 64)[1].read("model.layers.1.mlp.experts.down_proj")
        assert torch.equal(values[expert], state[name].float())
        assert torch.equal(values[1:3], true)
