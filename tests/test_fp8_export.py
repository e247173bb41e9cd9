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
    DOWN,
    FP8,
    PARTIAL,
    SCALE,
    change,
    in_fp8,
    published,
    value_by_value,
    values_of,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers import AutoHfQuantizer

from llm_demo.model.low_bits import quantised_blocks
from llm_demo.model.model_folder import describe_model, load_model, open_model
from llm_demo.model.source import load_tokenizer
from llm_demo.run import checkpoint_files
from llm_demo.run.export_run import export

pytestmark = pytest.mark.usefixtures("alone")


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
@pytest.mark.parametrize("name", ["qwen3", "experts", "deepseek", "odd scales"])
def test_what_was_read_is_written_again(name, shard, tmp_path):
    """Names, shapes, dtypes, bytes, configuration; also with each weight in another file than its
    scales."""
    columns = {"kv_lora_rank": 240, "hidden_size": 256} if name == "deepseek" else {}
    kind = "qwen3" if name == "odd scales" else name
    folder = published(kind, tmp_path / "base", **columns)
    if name == "odd scales":
        odd_scales(folder)
    given, out = tensors_of(folder), tmp_path / "out"
    if name == "deepseek":  # blocks divide no 240 columns
        for key in [n for n in given if n.endswith("kv_b_proj.weight")]:
            given[key] = value_by_value(given, key).bfloat16()
            del given[f"{key}_scale_inv"]
    export(run_of(folder, tmp_path / "run"), out, "fp8", shard)
    if shard == "1KB":
        places = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
        assert places.keys() == given.keys()
        scales = [n for n in places if n.endswith("_scale_inv")]
        assert not any(places[n.removesuffix("_scale_inv")] == places[n] for n in scales)
    written = tensors_of(out)
    assert written.keys() == given.keys()
    for key, t in given.items():
        assert same_bytes(written[key], t), key
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    left = set(config["quantization_config"].pop("modules_to_not_convert", []))
    assert config["quantization_config"] == FP8
    routers = {n.removesuffix(".weight") for n in given if n.endswith("mlp.gate.weight")}
    projections = {n for n in left if n.endswith("kv_b_proj")}
    assert len(projections) == (2 if name == "deepseek" else 0)
    assert left == ({"lm_head"} | routers | projections if routers else set())


def assert_loads(out):
    """transformers and this project read the same values from an export, and both answer."""
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
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


@pytest.mark.parametrize(
    "name, partial",
    [
        ("qwen3", False),
        ("qwen3", True),
        ("experts", False),
        ("deepseek", False),
        ("deepseek", True),
    ],
)
def test_transformers_loads_blocks(name, partial, tmp_path):
    """Also of a model that blocks do not divide: what is left is in bf16, and so is what servers
    compute with it as one layer."""
    sizes = PARTIAL[name] if partial else {}
    folder = published(name, tmp_path / "base", **sizes)
    out = tmp_path / "out"
    export(run_of(folder, tmp_path / "run"), out, "fp8")
    assert_loads(out)
    assert_computed_in_fp8(out)
    if not partial:
        return
    left = json.loads((out / "config.json").read_text())["quantization_config"]
    left = {re.sub(r"\d+", "N", n) for n in left["modules_to_not_convert"]}
    state = tensors_of(out)
    if name == "qwen3":
        mlp = {f"model.layers.N.mlp.{n}_proj" for n in ("gate", "up", "down")}
        assert left == {"lm_head"} | mlp
    else:  # 576 rows of kv_a, experts 320 wide
        of_block = {n.removeprefix("model.layers.N.") for n in left}
        attention = {"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"}
        assert {"mlp.experts", "mlp.gate"} | attention < of_block
        assert not any(n.startswith("mlp.experts.") for n in of_block)
        assert state["model.layers.0.self_attn.q_a_proj.weight"].dtype == torch.bfloat16
    for key, t in state.items():
        if in_fp8(key, t) and "_scale" not in key and t.dtype == torch.bfloat16:
            assert any(n in re.sub(r"\d+", "N", key) for n in left), key


def test_the_formula():
    """Of weights that no fp8 number gave: s = max |w| / 448, and w / s rounded to e4m3."""
    torch.manual_seed(0)
    w = torch.randn(256, 384) * torch.logspace(-9, 3, 256)[:, None]
    w[128:, :128] = 0
    w[3] = 0
    tiny = torch.tensor(448 * 1.4 * 2.0**-149)  # its scale, 1.4 of the smallest number, is 1 of it
    w[5] = w[128:, 128:256] = tiny
    numbers, scales = quantised_blocks(w)
    assert scales.dtype == torch.float32
    for i in range(2):
        for j in range(3):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            s = w[at].abs().max() / 448
            s = s if s > 0 else torch.ones(())
            assert scales[i, j] == s
            expected = (w[at] / s).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert same_bytes(numbers[at], expected)


def spoilt(state):
    state[DOWN][3, 4] = float("nan")


def test_what_cannot_be_exported(tmp_path, record_property):
    record_property("bad inputs", 3)
    folder = published("qwen3", tmp_path / "base")
    with refused(f"{DOWN} is not finite in torch.float8_e4m3fn; nothing was exported"):
        export(run_of(folder, tmp_path / "a", spoilt), tmp_path / "out", "fp8")
    adapters = {"rank": 1, "alpha": 1.0, "dropout": 0.0, "targets": ["q_proj"]}
    adapters["base"] = {"path": str(folder), "weights": ""}
    checkpoint = run_of(folder, tmp_path / "b", adapters=adapters)
    with refused("--dtype fp8: .* holds adapters: merge them, with --merge"):
        export(checkpoint, tmp_path / "out", "fp8")
    folder = published("qwen3", tmp_path / "narrow", hidden_size=96)
    with refused("--dtype fp8: blocks of 128 x 128 divide no layer of this model: use bf16"):
        export(run_of(folder, tmp_path / "c"), tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()


def test_exports_in_other_dtypes_do_not_say_fp8(tmp_path):
    export(run_of(published("qwen3", tmp_path / "base"), tmp_path / "run"), tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    true = tensors_of(tmp_path / "base")
    written = tensors_of(tmp_path / "out")[DOWN]
    assert written.dtype == torch.bfloat16
    assert torch.equal(written, value_by_value(true, DOWN).bfloat16())
    assert SCALE in true and SCALE not in tensors_of(tmp_path / "out")


def dequantised(folder, out):
    """A copy of the folder whose weights are the values in fp32."""
    shutil.copytree(folder, out)
    values = values_of(load_file(out / "model.safetensors"))
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
            published(model, folder, **PARTIAL[model])
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
                export(run / step, run / "hf", "fp32", merge=True)
            merged, true = tensors_of(one / "hf"), tensors_of(other / "hf")
            assert merged.keys() == true.keys()
            assert all(torch.equal(t, true[key]) for key, t in merged.items())
        assert "in fp8 times their scales" in (one / "train.log").read_text()
