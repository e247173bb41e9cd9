"""Exports in fp8: a published folder's files, and the bytes that were read; runs that read them."""

import json
import re
import shutil

import pytest
import torch
from conftest import ROOT, assert_same_tensors, logged, refused, slow, train_cases
from safetensors.torch import load_file, save_file
from test_checkpoint import WORLD
from test_export import FACTS
from test_fp8_files import (
    BLOCKS,
    DOWN,
    PARTIAL,
    ROWS,
    SCALE,
    change,
    in_fp8,
    published,
    value_by_value,
)
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig
from transformers.quantizers import AutoHfQuantizer

from llm_demo import export
from llm_demo.model.low_bits import quantised, weight_of
from llm_demo.model.model_folder import describe_model, load_model, open_model
from llm_demo.model.source import load_tokenizer
from llm_demo.run import checkpoint_files

pytestmark = pytest.mark.usefixtures("alone")
WAYS = {"fp8": "blocks", "fp8_rows": "rows"}


def run_of(folder, run, spoil=lambda state: None, **facts):
    """The checkpoint of a run that has taken no step from the folder's weights."""
    config, weights = open_model(folder, 64)
    state = {name: weights.read(name).float() for name in weights.shapes}
    spoil(state)
    (run / "checkpoints").mkdir(parents=True)
    checkpoint_files.write(run / "checkpoints/.part", state, FACTS | facts, WORLD)
    checkpoint_files.publish(run / "checkpoints/.part", run / "checkpoints/step_00000007")
    describe_model(folder, load_tokenizer(str(folder)), run / "model", config)
    settings = {"model_name_or_path": "a/base", "train_json": "x.jsonl", "parallelism": "FSDP2"}
    (run / "config.json").write_text(json.dumps(settings))
    return run / "checkpoints/step_00000007"


def tensors_of(folder):
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def same_bytes(a, b):
    a, b = a.contiguous(), b.contiguous()
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def odd_scales(folder):
    """As of weights that were trained in fp32: all bits of a scale count."""
    state, numbers = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in (n for n in state if n.endswith("_scale_inv")):
        state[name] *= 1 + torch.rand(state[name].shape, generator=numbers)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("shard", ["5GB", "1KB"])
@pytest.mark.parametrize("dtype", ["fp8", "fp8_rows", "odd scales"])
@pytest.mark.parametrize("name", ["qwen3", "experts", "deepseek"])
def test_what_was_read_is_written_again(name, dtype, shard, tmp_path):
    """Names, shapes, dtypes, bytes, configuration; also with each weight in another file than its
    scales."""
    way = WAYS.get(dtype, "blocks")
    scales = torch.float32 if way == "blocks" else torch.bfloat16
    columns = {"kv_lora_rank": 240, "hidden_size": 256} if name == "deepseek" else {}
    folder = published(name, tmp_path / "base", way, scales, **columns)
    if dtype == "odd scales":
        odd_scales(folder)
    given, out = tensors_of(folder), tmp_path / "out"
    if name == "deepseek" and way == "blocks":  # blocks divide no 240 columns
        for key in [n for n in given if n.endswith("kv_b_proj.weight")]:
            given[key] = value_by_value(given, key).bfloat16()
            del given[f"{key}_scale_inv"]
    how = "fp8_rows" if way == "rows" else "fp8"
    export.export(run_of(folder, tmp_path / "run"), out, how, shard)
    if shard == "1KB":
        places = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
        assert places.keys() == given.keys()
        assert not any(places.get(weight_of(n)) == f for n, f in places.items() if "_scale" in n)
    written = tensors_of(out)
    assert written.keys() == given.keys()
    for key, t in given.items():
        assert same_bytes(written[key], t), key
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    if name == "qwen3":
        assert config["quantization_config"] == (BLOCKS if way == "blocks" else ROWS)
    left = config["quantization_config"].get(
        "modules_to_not_convert" if way == "blocks" else "ignore"
    )
    routers = [n.removesuffix(".weight") for n in given if n.endswith("mlp.gate.weight")]
    if routers:
        assert {"lm_head", *routers} <= set(left)
        others = {"lm_head", *routers} ^ set(left)
        assert others == {n for n in others if n.endswith("kv_b_proj")}
        assert len(others) == 2 * (name == "deepseek" and way == "blocks")


def assert_loads(out, **how):
    """transformers and this project read the same values from an export, and both answer."""
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, **how)
    config, weights = open_model(out, 64)
    assert weights.scales
    mine = load_model("it", out, config, torch.bfloat16)
    true = loaded.state_dict()
    assert mine.state_dict().keys() == true.keys()
    assert all(torch.equal(t, true[n]) for n, t in mine.state_dict().items())
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(mine(ids).logits, loaded(ids).logits)


def assert_computed_in_fp8(out):
    """On a GPU, transformers would replace just the modules that have scales in these files."""
    config = AutoConfig.from_pretrained(out)
    how = AutoHfQuantizer.from_config(config.quantization_config)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    how._process_model_before_weight_loading(model)
    replaced = (
        n for n, m in model.named_modules() if type(m).__name__ in ("FP8Linear", "FP8Experts")
    )
    scaled = (n.removesuffix(".weight_scale_inv") for n in tensors_of(out) if "_scale_inv" in n)
    assert {*replaced} == {re.sub(r"(\.experts)\..+", r"\1", n) for n in scaled}


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "experts", "deepseek"])
def test_transformers_loads_blocks(name, partial, tmp_path):
    """Also of a model that blocks do not divide: what is left is in bf16, and so is what servers
    compute with it as one layer."""
    folder = published(name, tmp_path / "base", "rows", **PARTIAL.get(name, {}) if partial else {})
    out = tmp_path / "out"
    export.export(run_of(folder, tmp_path / "run"), out, "fp8")
    assert_loads(out)
    assert_computed_in_fp8(out)
    if name == "experts" or not partial:
        return
    left = json.loads((out / "config.json").read_text())["quantization_config"]
    left = {re.sub(r"\d+", "N", n) for n in left["modules_to_not_convert"]}
    state = tensors_of(out)
    if name == "qwen3":
        assert left == {
            "lm_head",
            *(f"model.layers.N.mlp.{n}_proj" for n in ("gate", "up", "down")),
        }
    else:  # 576 rows of kv_a, experts 320 wide
        assert {f"model.layers.N.{n}" for n in (
            "mlp.experts", "mlp.gate", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa",
        )} < left  # fmt: skip
        assert not any(n.startswith("model.layers.N.mlp.experts.") for n in left)
        assert state["model.layers.0.self_attn.q_a_proj.weight"].dtype == torch.bfloat16
    for key, t in state.items():
        if in_fp8(key, t) and "_scale" not in key and t.dtype == torch.bfloat16:
            assert any(n in re.sub(r"\d+", "N", key) for n in left), key


@pytest.mark.parametrize("name", ["qwen3", "experts", "deepseek"])
def test_transformers_loads_rows(name, tmp_path):
    """And compressed-tensors calls the configuration FP8_DYNAMIC."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    folder = published(name, tmp_path / "base", **PARTIAL.get(name, {}))
    out = tmp_path / "out"
    export.export(run_of(folder, tmp_path / "run"), out, "fp8_rows")
    assert_loads(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    written = json.loads((out / "config.json").read_text())["quantization_config"]
    (group,) = quantization.QuantizationConfig.model_validate(written).config_groups.values()
    preset = quantization.preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    same = "num_bits", "type", "symmetric", "strategy", "dynamic"
    for part in ("weights", "input_activations"):
        mine, true = getattr(group, part), getattr(preset, part)
        assert [getattr(mine, key) for key in same] == [getattr(true, key) for key in same]


@pytest.mark.parametrize("way", ["blocks", "rows"])
def test_the_formula(way):
    """Of weights that no fp8 number gave: s = max |w| / 448, and w / s rounded to e4m3."""
    torch.manual_seed(0)
    w = torch.randn(256, 384) * torch.logspace(-9, 3, 256)[:, None]
    w[128:, :128] = 0
    w[3] = 0
    tiny = torch.tensor(448 * 1.4 * 2.0**-149)  # its scale, 1.4 of the smallest number, is 1 of it
    w[5] = w[128:, 128:256] = tiny
    numbers, scales = quantised(w, way)
    size = (128, 128) if way == "blocks" else (1, 384)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = tuple(slice(n * k, n * k + k) for n, k in zip((i, j), size, strict=True))
            s = (w[at].abs().max() / 448).to(scales.dtype)
            s = s if s > 0 else torch.ones((), dtype=scales.dtype)
            assert scales[i, j] == s
            expected = (w[at] / s.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert same_bytes(numbers[at], expected)
    assert scales.dtype == (torch.float32 if way == "blocks" else torch.bfloat16)


def spoilt(state):
    state[DOWN][3, 4] = float("nan")


def test_what_cannot_be_exported(tmp_path, record_property):
    record_property("bad inputs", 3)
    folder = published("qwen3", tmp_path / "base")
    with refused(f"{DOWN} is not finite in torch.float8_e4m3fn; nothing was exported"):
        export.export(run_of(folder, tmp_path / "a", spoilt), tmp_path / "out", "fp8")
    adapters = {"rank": 1, "alpha": 1.0, "dropout": 0.0, "targets": ["q_proj"]}
    adapters["base"] = {"path": str(folder), "weights": ""}
    checkpoint = run_of(folder, tmp_path / "b", adapters=adapters)
    with refused("--dtype fp8_rows: .* holds adapters: merge them, with --merge"):
        export.export(checkpoint, tmp_path / "out", "fp8_rows")
    folder = published("qwen3", tmp_path / "narrow", "rows", hidden_size=96)
    with refused("--dtype fp8: blocks of 128 x 128 divide no layer of this model: use fp8_rows"):
        export.export(run_of(folder, tmp_path / "c"), tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()


def test_exports_in_other_dtypes_do_not_say_fp8(tmp_path):
    export.export(run_of(published("qwen3", tmp_path / "base"), tmp_path / "run"), tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    true = tensors_of(tmp_path / "base")
    written = tensors_of(tmp_path / "out")[DOWN]
    assert written.dtype == torch.bfloat16
    assert torch.equal(written, value_by_value(true, DOWN).bfloat16())
    assert SCALE in true and SCALE not in tensors_of(tmp_path / "out")


def dequantised(folder, out):
    """A copy of the folder whose weights are the values in fp32."""
    shutil.copytree(folder, out)
    state = load_file(out / "model.safetensors")
    values = {n: value_by_value(state, n) if t.element_size() == 1 else t for n, t in state.items()
              if "_scale" not in n}  # fmt: skip
    save_file(values, out / "model.safetensors", metadata={"format": "pt"})
    change(out, quantization_config=None)


CASES = {  # what each rank reads: rows of experts, of heads, whole matrices
    "fsdp": {
        "experts": ("deepseek", ["--expert_parallel", "2"]),
        "heads": ("qwen3", ["--tensor_parallel", "2"]),
        "in bf16": ("deepseek", ["--dtype", "bf16"]),
        "adapters": ("qwen3", ["--lora_rank", "4"]),
    },
    "fsdp_pp": {"pieces": ("deepseek", ["--stages", "2"])},
    "pp": {"a pipeline": ("qwen3", ["--stages", "2", "--dtype", "bf16"])},
    "zero": {"ZeRO-2": ("qwen3", ["--dtype", "bf16"])},
}


@pytest.mark.parametrize("kind", [slow("fsdp"), slow("fsdp_pp"), slow("pp"), slow("zero")])
def test_runs_are_those_of_the_values(kind, tmp_path):
    """Bit for bit on two processes: losses, norms, all that a checkpoint holds."""
    rows = (ROOT / "data/first_run.jsonl").read_text().splitlines()[:16]
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    cases = {}
    for name, (model, more) in CASES[kind].items():
        folder = tmp_path / model
        if not folder.exists():
            way = "rows" if kind == "fsdp_pp" else "blocks"
            published(model, folder, way, **PARTIAL[model])
            dequantised(folder, tmp_path / f"{model}-values")
        for base in (model, f"{model}-values"):
            cases[f"{name}, {base}"] = [
                "--model_name_or_path", tmp_path / base, "--train_json", tmp_path / "x.jsonl",
                "--seq_len", "64", "--max_steps", "2", "--micro_batch_size", "2", *more,
                "--grad_accum_steps", "2", "--sample_tokens", "0", "--eval_json", "none",
            ]  # fmt: skip
    train_cases(tmp_path, kind, 2, cases)
    for name, (model, _) in CASES[kind].items():
        one, other = tmp_path / f"{name}, {model}", tmp_path / f"{name}, {model}-values"
        for key in ("train/loss", "train/grad_norm"):
            numbers = [record[key] for record in logged(one, key)]
            assert numbers and numbers == [record[key] for record in logged(other, key)]
        step = "checkpoints/step_00000002"
        assert_same_tensors(one / step, other / step)
        if name == "adapters":
            for run in (one, other):
                export.export(run / step, run / "hf", "fp32", merge=True)
            merged, true = tensors_of(one / "hf"), tensors_of(other / "hf")
            assert merged.keys() == true.keys()
            assert all(torch.equal(t, true[key]) for key, t in merged.items())
        assert "in fp8 times their scales" in (one / "train.log").read_text()
