"""A base in 4 bits under adapters: the trainer's numbers against PEFT over the same values in a
plain loop, and files as transformers writes them."""

import importlib.util
import json
import os
import shutil
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_lora as lora
import test_parity as parity
import torch
from conftest import ROOT, assert_same_tensors, refused, run, slow, train_cases
from safetensors.torch import load_file, save_file
from test_parity import assert_equal, plain_loop, train
from tiny_tokenizer import packs_of
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from llm_demo.core.decoder import skeleton
from llm_demo.core.errors import UserError
from llm_demo.machine import probes
from llm_demo.machine.text import layer_kinds
from llm_demo.model.adapters import in_4_bits
from llm_demo.model.four_bits_base import cached_base, find_or_build, note_values
from llm_demo.model.model_folder import load_model, open_model
from llm_demo.model.weights_files import open_weights
from llm_demo.options import four_bits
from llm_demo.options.four_bits_library import library, need_library, pack, quantise, scales_in
from llm_demo.options.lora import quantisable, use_four_bits
from llm_demo.run.export_run import export

functional = library()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def nearest(weight):
    """A weight after quantisation, by bitsandbytes alone."""
    numbers, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    return functional.dequantize_4bit(numbers, state)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Models, copies of them with the values that 4 bits give, and what PEFT makes of these. Some
    weights have two groups of scales, and rows that end in the middle of a word of 4 bytes."""
    folder = tmp_path_factory.mktemp("four_bits")
    models, tokenizer = parity.smaller_vocabulary(parity.MODELS, folder / "tokenizer")
    parity.write_rows(folder / "data.jsonl")
    packs, results = packs_of(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN), {}
    for name in ("tied", "llama"):
        models[name].intermediate_size = 320
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(models[name], dtype=torch.float32)
        for copy in (folder, folder / "values"):
            model.save_pretrained(copy / name)
            tokenizer.save_pretrained(copy / name)
            for key, layer in model.named_modules():
                if isinstance(layer, nn.Linear) and ".layers." in key:
                    layer.weight.data = nearest(layer.weight.data)
        found = plain_loop(lora.with_peft(folder / "values", name, None), packs)
        found["grads"] = [{lora.ours(k): v for k, v in step.items()} for step in found["grads"]]
        found["params"] = {lora.ours(k): v for k, v in found["params"].items()}
        results[name] = found
    return folder, results


def flags(name):
    return [*lora.flags(name), "--pack_sequences", "--base_bits", 4]


# after the first step: AdamW divides gradients of 1e-8 by their noise, which depends on the CPU
NOISE = 4e-5
CKPT = ["--use_activation_checkpointing"]


@pytest.mark.parametrize(
    "kind, processes", [("fsdp", 1), ("fsdp", 2), ("fsdp_pp", 2), slow("fsdp_pp", 4)]
)
def test_equals_peft_over_the_same_values(kind, processes, work):
    folder, expected = work
    cases = {
        ("fsdp_pp", 2): {
            "stages-tied": (4, 2, CKPT), "v-llama": (2, 4, ["--schedule", "v"]),
        },
        ("fsdp_pp", 4): {
            "grid-tied": (2, 2, []),
            "twice-llama": (1, 4, ["--schedule", "interleaved", "--reshard_after_forward"]),
        },
        ("fsdp", 1): {"one-tied": (4, 2, CKPT), "one-llama": (8, 1, [])},
        ("fsdp", 2): {
            "two-tied": (2, 2, []), "reshard-tied": (2, 2, [*CKPT, "--reshard_after_forward"]),
            "rows-llama": (4, 2, [*CKPT, "--sequence_parallel", 2, "--attn_impl", "bucketed"]),
        },
    }[kind, processes]  # fmt: skip
    argv = {}
    for case, (micro, accum, more) in cases.items():
        name = case.split("-")[1]
        argv[case] = parity.argv(folder, name, micro, accum, *map(str, [*flags(name), *more]))
    for case, (losses, ranks) in train(folder, kind, processes, argv).items():
        assert_equal(losses, ranks, expected[case.split("-")[1]], later=NOISE)


def test_a_run_goes_on_to_the_bit_from_files_of_transformers_too(work, tmp_path):
    """Its export names the bits, and what was trained is what merging adds to."""
    folder = work[0]
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        folder / "tied", quantization_config=how, dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "published")
    AutoTokenizer.from_pretrained(folder / "tied").save_pretrained(tmp_path / "published")
    base = open_weights(tmp_path / "published")
    assert len(base.packed) == 4 * 7
    same = ["--base_bits", 4, *CKPT]
    runs = {
        "whole": lora.run_flags(folder, "tied", tmp_path / "whole", *same),
        "resumed": lora.run_flags(
            folder, "tied", tmp_path / "resumed", *same,
            "--resume", tmp_path / "whole/checkpoints/step_00000002",
        ),
        "theirs": [
            *lora.run_flags(folder, "tied", tmp_path / "theirs", *same),
            "--model_name_or_path", tmp_path / "published",
        ],
    }  # fmt: skip
    train_cases(tmp_path, "fsdp", 2, runs)
    last = {name: tmp_path / name / "checkpoints/step_00000004" for name in runs}
    for name in ("resumed", "theirs"):
        assert_same_tensors(last["whole"], last[name])
    facts = json.loads((last["whole"] / "trainer.json").read_text())
    assert facts["adapters"]["base"]["bits"] == 4
    saver = SimpleNamespace(path=last["whole"], facts=facts, adapters={"base": {}})
    with pytest.raises(UserError, match="step_00000004 holds adapters over other values than"):
        note_values(saver, "other", tmp_path)
    note_values(saver, facts["adapters"]["base"]["values"], tmp_path)
    for name, same in (("whole", False), ("theirs", True)):
        line = export(last[name], tmp_path / f"{name}-merged", "fp32", merge=True)
        assert ("16-bit" in line) != same
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-merged")
        loss, trained = lora.loss_of(merged, folder), lora.last_loss(tmp_path / name)
        assert (loss == pytest.approx(trained, rel=1e-5)) == same
        assert loss == pytest.approx(trained, rel=0.05)
    config, _ = open_model(tmp_path / "published", 64)
    theirs = load_model("x", tmp_path / "published", config, torch.float32)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(theirs.state_dict()[name], base.read(name))
    export(last["whole"], tmp_path / "adapter")
    assert "| base_bits | 4 |" in (tmp_path / "adapter/README.md").read_text()


def test_what_stays_in_16_bits_is_counted():
    """In the log, and in estimates: of rows that are no whole blocks, or as published files say."""
    assert layer_kinds(["q", "v", "q"], ["q", "o"]) == (["q", "v"], ["o", "q (1 of 3)"])
    config = deepcopy(parity.MODELS["tied"])
    config.intermediate_size = 96  # rows of down_proj
    weights = quantisable(skeleton(config, "sdpa"))
    whole = sum(p.numel() for p in weights.values() if p.shape[1] == 64)
    assert in_4_bits(weights, {}) == ((whole, whole * 36 // 64), (0, 0))
    assert in_4_bits(weights, {"model.layers.1.mlp.up_proj.weight"})[0] == (96 * 64, 96 * 36)


# ---------------------------------------------------------------- a layer


def layer_of(N, K, dtype):
    weight = torch.randn(N, K)
    numbers, state = quantise(weight)
    bits = pack(numbers, state.absmax, (N, K))
    scales = scales_in(state)
    block = nn.ModuleDict({"up": nn.Linear(K, N, device="meta")})
    lm = nn.ModuleDict({"layers": nn.ModuleList([block])})
    model, names = nn.ModuleDict({"model": lm}), {"model.layers.0.up.weight"}
    done = use_four_bits(model, dtype, lambda name: (bits, scales), names)
    assert done == (["up"], [])
    layer = block["up"].to_empty(device="cpu")
    layer.weight.data.copy_(layer.recipe.stored())
    layer.bias.data = torch.randn(N).to(dtype)
    return layer, functional.dequantize_4bit(numbers, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_keeps_no_values(dtype, compiled):
    """Output and gradient are those of its values, which the backward computes again."""
    layer, values = layer_of(96, 320, dtype)
    assert layer.weight.nbytes == 96 * 168
    x = torch.randn(2, 5, 320).to(dtype).requires_grad_()
    kept = []

    def keep(t):
        kept.append(t.numel() * t.itemsize)
        return t

    function = torch.compile(layer) if compiled else layer
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = function(x)
    assert max(kept) <= layer.weight.nbytes
    found = torch.autograd.grad(out.float().square().sum(), x)[0]
    expected = (x @ values.to(dtype).T + layer.bias).float().square().sum()
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    expected = torch.autograd.grad(expected, x)[0]
    assert (found - expected).norm() < bound * expected.norm()


@pytest.mark.gpu
@needs_gpu
def test_the_values_of_a_gpu():
    assert probes.four_bits() is None
    same_as_the_library("cuda")


def same_as_the_library(device, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    for dtype in dtypes:
        for shape in ((96, 320), (40, 64), (10, 4096)):  # with two rows to a program, and many
            numbers, state = quantise(torch.randn(shape).to(device))
            bits, state.dtype = pack(numbers, state.absmax, shape), dtype
            apart = torch.cat([bits.new_zeros(2), bits.flatten()])[2:].view(bits.shape)
            for where in (bits, apart):  # a word may begin at half of one
                found = four_bits.values_of(where, scales_in(state), shape[1], dtype)
                assert torch.equal(found, functional.dequantize_4bit(numbers, state))
                # of experts, each with two matrices
                own, rows = scales_in(state), where
                own, rows = torch.stack([own, own * 2] * 2), torch.stack([rows, rows.flip(0)] * 2)
                pairs = own.view(2, 2, -1), rows.view(2, 2, *where.shape)
                found = four_bits.values_of(pairs[1], pairs[0], shape[1], dtype).flatten(0, 1)
                for i in range(4):
                    of_one = four_bits.values_of(rows[i], own[i], shape[1], dtype)
                    assert torch.equal(found[i], of_one)


def test_the_values_of_a_cpu():
    assert probes.four_bits("cpu") is None
    same_as_the_library("cpu")


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
def test_the_kernel():
    """In Triton's interpreter, to the bit. There, bf16 is cut off and not rounded, so fp32."""
    code = "import torch, test_four_bits as t; from llm_demo.options import four_bits_kernel as k\n"
    code += "t.four_bits.values_of = k.values\n"
    code += "t.same_as_the_library('cpu', [torch.float32]); print('same')"
    where = {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "TRITON_INTERPRET": "1"}
    assert run([sys.executable, "-c", code], fresh=True, **where).stdout == "same\n"


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "code, said",
    [
        ("raise OSError('libcudart.so.12: no such\\nfile')", "libcudart.so.12: no such"),
        ("", "quantize_4bit"),
    ],
)
def test_a_library_that_does_not_work(code, said, tmp_path, monkeypatch):
    """Of which CUDA's library or a part of its own is missing, or which is of another version."""
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes/__init__.py").write_text("")
    (tmp_path / "bitsandbytes/functional.py").write_text(code)
    library.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(UserError, match=f"{said}.*pip install -U bitsandbytes"):
            need_library()
    finally:
        library.cache_clear()


def test_one_process_without_the_library(work, tmp_path):
    """Such as one on another node: it ends the others too, by one line."""
    code = "import importlib.metadata as m, os, runpy, sys\n"
    code += "if os.environ['RANK'] == '1':\n"
    code += "    sys.modules['bitsandbytes'], real = None, m.distribution\n"
    code += "    m.distribution = lambda name: real(name.replace('bitsandbytes', 'absent'))\n"
    code += f"runpy.run_path({str(ROOT / 'fsdp/train_fsdp.py')!r}, run_name='__main__')"
    (tmp_path / "worker.py").write_text(code)
    argv = [*lora.run_flags(work[0], "tied", tmp_path / "run"), "--base_bits", 4]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    said = run([sys.executable, *launch, tmp_path / "worker.py", *argv]).stderr
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "need bitsandbytes, which does not work" in errors[0], said
    assert "four_bits.py" not in said  # in a traceback


def test_no_kernel_is_downloaded():
    """bitsandbytes would, on some CPUs, if the package `kernels` is there."""
    code = "import sys, types; sys.modules['kernels'] = trap = types.ModuleType('kernels')\n"
    code += "trap.get_kernel = lambda *a, **k: print('downloaded')\n"
    code += "from llm_demo.options.four_bits_library import library; library()\n"
    code += "assert sys.modules['kernels'] is trap"
    done = run([sys.executable, "-c", code], fresh=True)
    assert done.returncode == 0 and done.stdout == done.stderr == ""


def test_a_damaged_base_in_the_cache_is_made_again(tmp_path):
    folder, said = tmp_path / "nf4-x", []

    def make(built):
        Path(built, "a").write_text("right")

    find_or_build(folder, make, said.append)
    assert {f.stat().st_mode & 0o777 for f in folder.iterdir()} == {0o644}  # others may read it
    (folder / "a").write_text("wrong")
    find_or_build(folder, make, said.append)
    assert (folder / "a").read_text() == "right"
    assert len(said) == 1 and "damaged (a: wrong checksum); rebuilding it" in said[0]
    assert find_or_build(folder, None, said.append).keys() == {"a"}
    (folder / "crc32.json").write_text("[]")
    find_or_build(folder, make, said.append)
    assert "crc32.json is not a list of checksums" in said[1]


# ---------------------------------------------------------------- files from elsewhere


NAME = "model.layers.0.mlp.up_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def published(work, tmp_path_factory):
    """{name: tensor} of a folder in 4 bits of one layer."""
    weight = load_file(work[0] / "tied/model.safetensors")[NAME]
    numbers, state = quantise(weight)
    parts = {f"{NAME}.{k}": t.contiguous() for k, t in state.as_dict(packed=True).items()}
    return {NAME: numbers} | parts, nearest(weight)


def opened(tensors, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    return open_weights(tmp_path)


def test_values_are_read_whole_and_in_part(published, tmp_path):
    weights = opened(published[0], tmp_path)
    assert weights.shapes == {NAME: tuple(published[1].shape)}
    assert torch.equal(weights.read(NAME), published[1])
    part = slice(3, 70), slice(1, 9)
    assert torch.equal(weights.read(NAME, part), published[1][part])


def as_bytes(facts):
    return torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)


def state(**changes):
    facts = {"quant_type": "nf4", "blocksize": 64, "shape": [320, 64], "nested_blocksize": 256}
    return {STATE: as_bytes(facts | {"nested_offset": 0.1} | changes)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({f"{NAME}.absmax": None}, "in 4 bits: KeyError .*absmax"),
        (
            {NAME: torch.zeros(100, 1, dtype=torch.uint8)},
            "in 4 bits: shape .* of size 100",
        ),
        ({"other.weight": torch.zeros(3, dtype=torch.uint8)}, "other.weight is of type U8"),
        ({f"{NAME}.nested_absmax": torch.tensor([1.0, torch.nan])}, "scales are not finite"),
        ({f"{NAME}.nested_absmax": torch.ones(3)}, "it has 276 scales of scales and levels"),
        (state(nested_offset=float("nan")), "scales are not finite"),
        (state(shape=[320, 65]), f"{STATE}: shape .*: only rows of whole blocks"),
        (state(quant_type="fp4"), r"\['fp4', 64, 256\]: only nf4 by blocks of 64 and 256"),
        ({STATE: torch.full((9,), 65, dtype=torch.uint8)}, f"{STATE}: Expecting value"),
    ],
)
def test_files_that_are_not_as_they_say(change, message, published, tmp_path):
    tensors = {n: t for n, t in (published[0] | change).items() if t is not None}
    with refused(message):
        opened(tensors, tmp_path).read(NAME)


def test_a_changed_file_is_another_base(work, tmp_path):
    """Also where only some of its values are looked at to identify it."""
    file = tmp_path / "model.safetensors"
    shutil.copy(work[0] / "tied/model.safetensors", file)
    source = SimpleNamespace(config=parity.MODELS["tied"], weights=open_weights(tmp_path))
    before = cached_base(source, {"weights": "the same"})
    assert before == cached_base(source, {"weights": "the same", "path": "elsewhere"})
    os.utime(file, ns=(0, 0))
    assert before != cached_base(source, {"weights": "the same"})
