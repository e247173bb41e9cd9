"""Weights in fp8, as they are published: read to the values of transformers, and written again.

The folders here are made by the formulas of the formats, one number at a time where they matter."""

import itertools
import json
import shutil

import pytest
import torch
from conftest import TINY, refused
from safetensors.torch import load_file, save_file
from test_model import build
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    DeepseekV3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from llm_demo.model.model_folder import describe_model, load_model, open_model, try_describe
from llm_demo.model.source import find_model, load_config, load_tokenizer
from llm_demo.model.weights_files import open_weights

SIZES = dict(
    vocab_size=4096, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
    num_hidden_layers=2, num_attention_heads=4, num_experts_per_tok=2, max_position_embeddings=64,
)  # fmt: skip
LATENT = dict(
    q_lora_rank=128, kv_lora_rank=112, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    n_routed_experts=8, n_group=4, topk_group=2, num_key_value_heads=8, first_k_dense_replace=1,
)  # fmt: skip
MODELS = {
    "qwen3": Qwen3Config(head_dim=64, num_key_value_heads=2, **SIZES),
    "experts": Qwen3MoeConfig(head_dim=64, num_key_value_heads=2, num_experts=4, **SIZES),
    "deepseek": DeepseekV3Config(**{**SIZES, "num_attention_heads": 8}, **LATENT),
}
# 576 rows, 320 rows and columns: what no block of 128 divides
PARTIAL = {
    "qwen3": {"intermediate_size": 320},
    "deepseek": {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "moe_intermediate_size": 320,
    },
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
          "weight_block_size": [128, 128]}  # fmt: skip
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
ROWS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {**FLOAT, "strategy": "channel", "dynamic": False},
        "input_activations": {**FLOAT, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip
DOWN = "model.layers.0.mlp.down_proj.weight"


def in_fp8(name, t):
    """Whether a published folder has this tensor in fp8."""
    return t.ndim == 2 and not any(n in name for n in ("lm_head", "embed", "mlp.gate.weight"))


def quantised(w, rows, columns, dtype):
    """(e4m3 numbers, scales) of blocks of rows x columns: w / s, s = max |w| / 448."""
    scales = torch.empty(-(-w.shape[0] // rows), -(-w.shape[1] // columns))
    numbers = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    for i, j in itertools.product(*map(range, scales.shape)):
        at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        s = (w[at].abs().max() / 448).to(dtype).float()
        numbers[at], scales[i, j] = (w[at] / s).clamp(-448, 448).to(numbers.dtype), s
    return numbers, scales.to(dtype)


def published(name, folder, way="blocks", dtype=torch.float32, **sizes):
    """A folder in fp8 of random weights in bf16. dtype: of the scales."""
    torch.manual_seed(0)
    config = type(MODELS[name])(**{**MODELS[name].to_diff_dict(), **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    biases = {n: t.float() for n, t in state.items() if n.endswith("e_score_correction_bias")}
    state |= biases
    for key in [key for key, t in state.items() if in_fp8(key, t)]:
        columns = 128 if way == "blocks" else state[key].shape[1]
        end = "_scale_inv" if way == "blocks" else "_scale"
        numbers = quantised(state[key].float(), 128 if way == "blocks" else 1, columns, dtype)
        state[key], state[key + end] = numbers
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, quantization_config=BLOCKS if way == "blocks" else ROWS)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / file, folder)
    return folder


def change(folder, **more):
    """Change config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))


def value_by_value(state, name):
    """A weight in fp32 by the formula."""
    numbers = state[name].float()
    blocks = name + "_scale_inv" in state
    scales = state[name + ("_scale_inv" if blocks else "_scale")].float()
    rows, columns = (torch.arange(n) for n in numbers.shape)
    if blocks:
        return numbers * scales[rows[:, None] // 128, columns[None] // 128]
    return numbers * scales[rows[:, None], 0]


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


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_transformers(name, tmp_path):
    """compressed-tensors multiplies in bf16, the dtype of its scales."""
    pytest.importorskip("compressed_tensors")
    folder = published(name, tmp_path, "rows", torch.bfloat16)
    change(folder, quantization_config=ROWS | {"ignore": ["lm_head", "re:.*mlp.gate$"]})
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)
    assert_built(folder, loaded.state_dict())


@pytest.mark.parametrize("way", ["blocks", "rows"])
@pytest.mark.parametrize("name", PARTIAL)
def test_any_slices_of_partial_blocks(name, way, tmp_path):
    """By the formula, a value at a time: what ranks ask for, of experts too. transformers loads no
    partial blocks."""
    folder = published(name, tmp_path, way, **PARTIAL[name])
    state, weights = load_file(folder / "model.safetensors"), open_weights(folder)
    assert len(weights.scales) == sum("_scale" in n for n in state) > 10
    true = {n: value_by_value(state, n) if n in weights.scales else t for n, t in state.items()
            if "_scale" not in n}  # fmt: skip
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
        whole = torch.stack([
            torch.cat([true[f"{block}.{e}.{kind}_proj.weight"] for kind in kinds])
            for e in range(weights.shapes[key][0])
        ])  # fmt: skip
        for part in itertools.product([slice(2, 4)], *(map(lambda s: slice(*s), cuts[:5]),) * 2):
            assert torch.equal(weights.read(key, part), whole[part]), (key, part)
        assert torch.equal(weights.read(key), whole)


def test_only_what_is_needed_is_read_and_counted(tmp_path):
    """A rank's rows, and a matrix's scales, which are few."""
    weights = open_weights(published("qwen3", tmp_path, **PARTIAL["qwen3"]))
    up = DOWN.replace("down", "up")
    weights.read(up, (slice(120, 130),))  # of [320, 128]
    assert weights.bytes_read == 10 * 128 + 3 * 4
    weights.read(DOWN, (slice(0, 128), slice(256, 320)))
    assert weights.bytes_read == 10 * 128 + 3 * 4 + 128 * 64 + 3 * 4
    other = open_weights(tmp_path)
    for name in other.shapes:
        other.read(name)
    assert 0.9 * other.bytes < other.bytes_read < other.bytes  # less the header


def test_scales_are_no_parameters_but_are_in_the_digest(tmp_path):
    weights = open_weights(published("qwen3", tmp_path))
    assert not any("scale" in name for name in weights.shapes)
    before, state = weights.digest(), load_file(tmp_path / "model.safetensors")
    assert open_weights(tmp_path).digest() == before
    state[f"{DOWN}_scale_inv"][0, 1] *= 2
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert open_weights(tmp_path).digest() != before


@pytest.mark.parametrize("way", ["blocks", "rows"])
def test_the_configuration_is_of_what_is_read(way, tmp_path):
    """Nothing that a run or an export writes says that its weights are in fp8."""
    folder = published("qwen3", tmp_path / "x", way)
    config, _ = open_model(find_model(str(folder)), 64)
    assert not hasattr(config, "quantization_config")
    tokenizer = load_tokenizer(str(folder))
    assert not try_describe(folder, tokenizer, config)
    describe_model(folder, tokenizer, tmp_path / "model", config)
    assert "quantization_config" not in json.loads((tmp_path / "model/config.json").read_text())
    assert "quantization_config" in json.loads((folder / "config.json").read_text())


METHODS = [  # of quantization_config, and what is said of it
    ({"quant_method": "awq", "bits": 4}, "quant_method awq"),
    ({"quant_method": "fp8"}, "quant_method fp8"),
    (BLOCKS | {"weight_block_size": [64, 64]}, "quant_method fp8"),
    (BLOCKS | {"weight_block_size": None}, "quant_method fp8"),
    (BLOCKS | {"weight_block_size": [[128], 128]}, "quant_method fp8"),
    (BLOCKS | {"fmt": "e5m2"}, "quant_method fp8"),
    (ROWS | {"format": "pack-quantized"}, "quant_method compressed-tensors"),
    (ROWS | {"config_groups": {}}, "quant_method compressed-tensors"),
    (ROWS | {"config_groups": [1]}, "quant_method compressed-tensors"),
    (ROWS | {"config_groups": {"a": {"weights": None}}}, "quant_method compressed-tensors"),
    (ROWS | {"config_groups": {"a": {"weights": FLOAT | {"strategy": "tensor"}}}},
     "quant_method compressed-tensors"),
    ({"quant_method": None}, "quant_method None"),
    ({"bits": 8}, "quant_method None"),
]  # fmt: skip


@pytest.mark.parametrize("quantization, message", METHODS)
def test_other_kinds_name_their_method(quantization, message, tmp_path, record_property):
    record_property("bad inputs", 1)
    config = MODELS["qwen3"].to_dict() | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(rf"in a way that is not read \({message}\): give a copy in bf16, in fp8 with"):
        load_config(tmp_path, 64)


SCALE = f"{DOWN}_scale_inv"
E5M2 = torch.zeros(128, 256).to(torch.float8_e5m2)
TENSORS = [  # what is done to a folder's tensors, and what is said of it
    (lambda t: t.pop(SCALE), rf"{DOWN} is in fp8, but {SCALE} \(or {DOWN}_scale\) is missing"),
    (lambda t: t.update({SCALE: t[SCALE].T.contiguous()}),
     rf"{SCALE} has shape \[2, 1\], but {DOWN} of shape \[128, 256\] has .* shape \[1, 2\]"),
    (lambda t: t.update({SCALE: t[SCALE][0]}), rf"{SCALE} has shape \[2\], but {DOWN} of"),
    (lambda t: t.update({f"{DOWN}_scale": t.pop(SCALE)}), r"has scales of shape \[128, 1\]"),
    (lambda t: t.update({SCALE: t[SCALE].int()}), f"{SCALE} is of type I32"),
    (lambda t: t.update({SCALE: t[SCALE].to(torch.float8_e4m3fn)}), f"{SCALE} is in fp8, but"),
    (lambda t: t.update({DOWN: E5M2}), f"{DOWN} is of type F8_E5M2"),
    (lambda t: t.update({DOWN: t[DOWN].bfloat16()}), f"{SCALE} is not a weight of this model"),
    (lambda t: t.update({f"{DOWN}_scale": t[SCALE] + 1}), f"{DOWN}_scale is not a weight of this"),
    (lambda t: t.update({DOWN: t[DOWN].flatten()}), rf"{DOWN} is in fp8, but of shape \[32768\]"),
    (lambda t: t.update({DOWN: t[DOWN][:, :128].contiguous(), SCALE: t[SCALE][:, :1]}),
     rf"{DOWN} has shape \[128, 128\], but config.json implies \[128, 256\]"),
    (lambda t: t.pop(DOWN), f"weight {DOWN} is missing"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", TENSORS)
def test_wrong_tensors_are_named(change, message, tmp_path, record_property):
    record_property("bad inputs", 1)
    file = published("qwen3", tmp_path) / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file({n: t.contiguous() for n, t in state.items()}, file, metadata={"format": "pt"})
    with refused(message):
        open_model(tmp_path, 64)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(scale, tmp_path, record_property):
    record_property("bad inputs", 1)
    file = published("qwen3", tmp_path) / "model.safetensors"
    state = load_file(file)
    state[SCALE][0, 1] = scale
    save_file(state, file, metadata={"format": "pt"})
    with refused(f"{DOWN} is not finite"):
        assert_built(tmp_path, {})


def test_experts_of_both_dtypes(tmp_path):
    """Whichever comes first, no value is rounded."""
    file = published("experts", tmp_path) / "model.safetensors"
    for expert in (0, 3):
        state, name = load_file(file), f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        true = torch.stack([
            value_by_value(state, name.replace(f"s.{expert}.", f"s.{e}.")) for e in range(1, 3)
        ])  # fmt: skip
        state[name] = state[name].float().bfloat16()
        del state[f"{name}_scale_inv"]
        save_file(state, file, metadata={"format": "pt"})
        values = open_model(tmp_path, 64)[1].read("model.layers.1.mlp.experts.down_proj")
        assert torch.equal(values[expert], state[name].float())
        assert torch.equal(values[1:3], true)
