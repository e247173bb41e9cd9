"""Experts in 4 bits under adapters: the trainer's numbers against PEFT over the same values in a
plain loop, what exists of these values at a time, and files."""

import copy
import functools
import itertools
import json
from types import SimpleNamespace

import pytest
import test_lora as lora
import test_moe as moe
import test_parity as parity
import test_qwen35 as qwen35
import torch
from conftest import ROOT, assert_same_tensors, refused, slow, train_cases
from safetensors.torch import load_file, save_file
from test_four_bits import nearest
from test_parity import assert_equal, train
from tiny_tokenizer import packs_of
from torch import nn
from transformers import AutoModelForCausalLM

from llm_demo import memory
from llm_demo.core.decoder import fused, of_router
from llm_demo.core.experts import _multiply, grouped_product, looped_product
from llm_demo.model.adapters import choose_lora
from llm_demo.model.costs import sizes_of
from llm_demo.model.four_bits_base import write_base
from llm_demo.model.low_bits import BESIDE
from llm_demo.model.source import load_config
from llm_demo.model.weights_files import by_matrix, open_weights
from llm_demo.options import four_bits_experts
from llm_demo.options.four_bits_experts import FourBitsOfExperts
from llm_demo.options.four_bits_library import quantised
from llm_demo.run.export_run import export


def rounded(model):
    """What 4 bits make of a model's layers and of each matrix of an expert, by bitsandbytes."""
    for key, p in model.named_parameters():
        layer = model.get_submodule(key.rpartition(".")[0])
        linear = isinstance(layer, nn.Linear) and p.ndim == 2 and len(p) > 1
        linear = linear and not of_router(key)
        if ".layers." in key and (linear or fused(key)) and p.shape[-1] % 64 == 0:
            for matrix in by_matrix(key, p.data).values():
                matrix.copy_(nearest(matrix))


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """(folder of models with experts, (model, targets) -> PEFT's results). Rows of experts end in
    the middle of a word of 4 bytes. A dense block's down_proj stays in 16 bits."""
    folder = tmp_path_factory.mktemp("mixtures")
    models, tokenizer = parity.smaller_vocabulary(moe.MODELS | qwen35.EXPERTS, folder / "tokenizer")
    parity.write_rows(folder / "data.jsonl")
    packs = packs_of(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN)
    for name in ("qwen", "deepseek", "shared", "experts"):
        torch.manual_seed(0)
        models[name].moe_intermediate_size = 192
        model = AutoModelForCausalLM.from_config(models[name], dtype=torch.float32)
        for key, p in model.named_parameters():
            if name in qwen35.EXPERTS:
                qwen35.change(key, p.data)
                p.data *= 3 if key == "lm_head.weight" else 1  # its norms are to be clipped
            elif key.endswith("bias"):
                nn.init.normal_(p, std=0.05)
        if name == "deepseek":  # in the last block all tokens choose the first two experts
            model.model.layers[-1].mlp.gate.e_score_correction_bias[:2] = 10.0
        for place in (folder, folder / "values"):
            model.save_pretrained(place / name)
            tokenizer.save_pretrained(place / name)
            rounded(model)

    @functools.cache
    def expected(name, targets):
        model = lora.with_peft(folder / "values", name, targets)
        found = parity.plain_loop(model, packs)
        found["grads"] = [lora.by_our_names(model, step) for step in found["grads"]]
        return found | {"params": lora.by_our_names(model, found["params"])}

    return folder, expected


SPREAD, AGAIN = ["--expert_parallel", "2"], ["--use_activation_checkpointing"]
CASES = {  # (processes, model, targets, micro, accumulation, further flags)
    "plain": (1, "qwen", "all-linear", 4, 2, AGAIN),
    "frozen": (1, "shared", "q_proj,k_proj,v_proj,o_proj", 8, 1, []),
    "hybrid": (1, "experts", "all-linear", 4, 2, AGAIN),
    "two": (2, "deepseek", "all-linear", 2, 2, [*AGAIN, "--reshard_after_forward"]),
    "two_spread": (2, "shared", "all-linear", 1, 4, SPREAD),
    "two_bf16": (2, "qwen", "all-linear", 2, 2, ["--dtype", "bf16"]),
}


QUICK = ("plain", "two", "two_spread")


@pytest.mark.parametrize("processes, quick", [(1, True), (2, True), slow(1, False), slow(2, False)])
def test_equals_peft_over_the_same_values(processes, quick, mixtures):
    folder, expected = mixtures
    cases = {}
    for case, (n, name, targets, micro, accum, more) in CASES.items():
        if n == processes and quick == (case in QUICK):
            also = ["--lora_rank", lora.RANK, "--lora_alpha", lora.ALPHA, "--base_bits", 4, *more]
            also += ["--lora_targets", targets]
            cases[case] = parity.argv(folder, name, micro, accum, *map(str, also))
    for case, (losses, ranks) in train(folder, "fsdp", processes, cases).items():
        wanted = expected(*CASES[case][1:3])
        if case != "two_bf16":
            assert_equal(losses, ranks, wanted, later=5 * parity.TOLERANCE)
            continue
        rough, loose = parity.BOUNDS["bf16"]
        assert losses == pytest.approx(wanted["loss"], rel=rough)
        for rank in ranks:
            norms = [step["norm"] for step in rank["steps"]]
            assert norms == pytest.approx(wanted["norm"], rel=loose)


# ---------------------------------------------------------------- files


@pytest.fixture(scope="module")
def published(mixtures, tmp_path_factory):
    """A folder in 4 bits, with a matrix for each expert."""
    folder, out = mixtures[0] / "shared", tmp_path_factory.mktemp("published")
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    source = SimpleNamespace(config=load_config(folder, 96), weights=open_weights(folder))
    write_base(source, 0, torch.device("cpu"), str(out))
    tensors = load_file(folder / "model.safetensors")
    for file in out.glob("block_*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    save_file(tensors, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config["quantization_config"] = how | {"bnb_4bit_use_double_quant": True}
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_a_published_base_is_read_as_ours_resumed_and_merged(mixtures, published, tmp_path):
    folder, same = mixtures[0], [*SPREAD, *AGAIN, "--base_bits", 4]
    base, values = open_weights(published), open_weights(folder / "values/shared")
    assert len(base.in_4_bits()) == 4 * (4 + 2 + 2)  # attention, the shared expert, experts
    runs = {
        name: [*lora.run_flags(folder, "shared", tmp_path / name), *same, *more]
        for name, more in {
            "whole": [],
            "resumed": ["--resume", tmp_path / "whole/checkpoints/step_00000002"],
            "theirs": ["--model_name_or_path", published],
        }.items()
    }
    train_cases(tmp_path, "fsdp", 2, runs)
    last = {name: tmp_path / name / "checkpoints/step_00000004" for name in runs}
    for name in ("resumed", "theirs"):
        assert_same_tensors(last["whole"], last[name])
    export(last["theirs"], tmp_path / "merged", "fp32", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    trained = lora.last_loss(tmp_path / "theirs")
    assert lora.loss_of(merged, folder) == pytest.approx(trained, rel=1e-5)
    part = slice(2, 5), slice(7, 300)
    for name in base.shapes:
        assert torch.equal(base.read(name, part[: base.read(name).ndim]), values.read(name, part))


FIRST = "model.layers.0.mlp.experts.0.up_proj.weight"
FUSED_STATE = "model.layers.0.mlp.experts.gate_up_proj.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize("change, said", [
    ({FUSED_STATE: torch.zeros(3, dtype=torch.uint8)}, "are read from a matrix for each of them"),
    ({f"{FIRST}.quant_state.bitsandbytes__nf4": None}, f"{FIRST} is of type U8"),
    ({f"{FIRST}{part}": None for part in BESIDE} | {FIRST: torch.zeros(192, 64)},
     f"not all experts of model.layers.0.mlp.experts.gate_up_proj are in 4 bits: .*{FIRST}"),
])  # fmt: skip
def test_experts_in_another_layout(change, said, published, tmp_path):
    tensors = load_file(published / "model.safetensors") | change
    tensors = {name: t for name, t in tensors.items() if t is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with refused(said):
        open_weights(tmp_path).read_packed("model.layers.0.mlp.experts.gate_up_proj")


def test_experts_of_rows_that_no_block_divides():
    """The others are counted with what layers beside them have."""
    config = copy.deepcopy(moe.MODELS["shared"])
    flags = {"lora_alpha": 32.0, "lora_dropout": 0.0, "base_bits": 4, "lora_targets": "all-linear"}
    ask = SimpleNamespace(lora_rank=4, **flags)
    config.moe_intermediate_size = 96
    with refused("rows of down_proj of the experts have 96 numbers, no multiple of 64"):
        choose_lora(ask, config, {})
    config.moe_intermediate_size = 192
    of_layers, of_experts = choose_lora(ask, config, {}).in_4_bits
    layers = (2 * 64 + 2 * 32 + 2 * 48) * 64
    experts = 8 * 3 * 192 * 64
    assert of_layers == (4 * layers, 4 * layers * 36 // 64)
    assert of_experts == (4 * experts, 4 * 8 * (2 * 192 * 36 + 64 * 100))


@pytest.mark.parametrize("spread", [1, 4])
def test_what_a_rank_has_of_experts_in_4_bits(spread):
    """By hand, for Qwen3-30B-A3B in bf16: 48 blocks of 128 experts, 4.125 bits a number."""
    config = load_config(ROOT / "models/qwen3-30b-a3b", 1024)
    flags = {"lora_alpha": 32.0, "lora_dropout": 0.0, "base_bits": 4, "lora_targets": "all-linear"}
    lora_16 = choose_lora(SimpleNamespace(lora_rank=16, **flags), config, {})
    how = {"engine": "fsdp", "ranks": 4, "expert_parallel": spread, "lora": lora_16}
    part = memory.part_of(sizes_of(config), memory.Settings(**how), {0: 1})
    attention, routers = 2048 * (2 * 4096 + 2 * 512), 48 * 128 * 2048
    experts = 48 * 128 * 3 * 768 * 2048
    packed = 4.125 / 16
    assert part.blocks == routers + (48 * attention + experts / spread) * packed
    ends = 2 * 151_936 * 2048
    assert part.shard == (routers + (48 * attention + experts) * packed + ends) / 4


# ---------------------------------------------------------------- one product


E, N, K = 6, 160, 192


@pytest.fixture
def block(monkeypatch):
    """(experts, their values): a module with a matrix of gate and up in 4 bits, [E, N, K]. One
    expert is unpacked at a time."""
    monkeypatch.setattr(four_bits_experts, "UNPACKED", N * K)
    experts, values = nn.Module(), torch.randn(E, N, K)
    matrices = values.view(2 * E, N // 2, K)
    packed, scales = map(torch.stack, zip(*map(quantised, matrices), strict=True))
    for matrix in matrices:
        matrix.copy_(nearest(matrix))
    experts.gate_up_proj = nn.Parameter(values.to("meta"))
    read = functools.partial(tuple, (packed.view(E, N, -1), scales.view(E, 2, -1)))
    recipe = FourBitsOfExperts(experts, "gate_up_proj", torch.float32, read, matrices=2)
    experts.gate_up_proj_recipe = recipe.to_empty(device="cpu")
    experts.gate_up_proj = nn.Parameter(recipe.stored(), requires_grad=False)
    return experts, values


def ends_of(rows):
    return torch.tensor(rows).cumsum(0).to(torch.int32)


def watched(call, *given):
    """(what a call returns, how often an expert was unpacked, the most bytes that it had)."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        found = call(*given)
    events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    sizes = [e.nbytes() for e in events if e.name() == "[memory]"]
    names = [e.name() for e in events]
    unpacked = names.count("llm_demo::values_of_4_bits") / 4  # for all, one, gate and up
    return found, unpacked, max(itertools.accumulate(sizes), default=0)


@pytest.mark.parametrize("rows", [[4, 2, 3, 1, 1, 9], [0, 0, 0, 0, 0, 0], [0, 7, 5, 0, 0, 0]])
@pytest.mark.parametrize("compiled", [False, True])
def test_only_busy_experts_are_unpacked_and_nothing_keeps_values(rows, compiled, block):
    """One at a time, and again in the backward. The last row is of no expert here."""
    experts, values = block
    x, ends, kept = torch.randn(sum(rows) + 1, K, requires_grad=True), ends_of(rows), []

    def call(x):
        return _multiply(looped_product, experts, "gate_up_proj", x, ends)

    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
        call(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out, forward, most = watched(call, x)
    assert max(t.nbytes for t in kept) == experts.gate_up_proj.nbytes < values.nbytes / 7
    up = torch.randn_like(out)
    found, backward, later = watched(torch.autograd.grad, out, x, up)
    assert forward == backward == sum(n > 0 for n in rows)
    assert max(most, later) < 4 * values[0].nbytes
    of_rows = values[torch.repeat_interleave(torch.arange(E), torch.tensor(rows))]
    n = sum(rows)
    assert torch.allclose(out[:n], torch.einsum("rk,rnk->rn", x[:n], of_rows), atol=1e-4)
    assert torch.allclose(found[0][:n], torch.einsum("rn,rnk->rk", up[:n], of_rows), atol=1e-4)
    assert not found[0][n:].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernels_of_a_gpu(compiled, block):
    """The grouped product of what the Triton kernel unpacks, against the loop on a CPU."""
    from llm_demo.options import four_bits_kernel  # noqa: F401

    experts, _ = block
    rows = [40, 0, 3, 1, 0, 900]
    x, up, found = torch.randn(sum(rows), K), torch.randn(sum(rows), N), []
    weight = experts.gate_up_proj.data
    for device, dtype, product in (
        ("cpu", torch.float32, looped_product), ("cuda", torch.bfloat16, grouped_product)
    ):  # fmt: skip
        experts.to(device)
        experts.gate_up_proj.data = weight.to(device).view(dtype)
        call = functools.partial(_multiply, product, experts, "gate_up_proj")
        call = torch.compile(call) if compiled and device == "cuda" else call
        given = x.to(device, dtype).requires_grad_()
        out = call(given, ends_of(rows).to(device))
        grad = torch.autograd.grad(out, given, up.to(device, dtype))[0]
        found.append([t.float().cpu() for t in (out, grad)])
    for one, other in zip(*found, strict=True):
        assert parity.relative(other, one) < 1e-2
