"""Qwen3.5: a gated delta rule in three of four blocks, against a plain loop with Hugging Face's own
model, one document at a time, as test_parity.py."""

import copy
import functools
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_lora as lora
import torch
from conftest import ROOT, ZERO, args_with, run, slow
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_attention import CPU, H100
from test_evaluate import evaluated
from test_families import IDS, cases, whole_and_adapters
from test_parity import SEQ_LEN, SIZES, argv, assert_equal, train, write_models
from torch.library import opcheck
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import skeleton
from llm_demo.core.errors import UserError
from llm_demo.machine import probes
from llm_demo.model.adapter_folder import open_adapter
from llm_demo.model.adapters import matrices_in, start_of
from llm_demo.model.check_config import problems_of
from llm_demo.model.costs import parameters_of
from llm_demo.model.model_folder import open_model
from llm_demo.options import delta_kernels
from llm_demo.options.delta import chunked, use_rule
from llm_demo.options.lora import Lora, apply_lora
from llm_demo.run.choices import DELTA_KERNELS, choose_rule, refuse_flags
from llm_demo.run.export_run import export

# The norm of a layer's output makes it as long for a query nearly at right angles to its key: with
# the usual epsilon, rounding in one step is a thousand times as large in the next.
RULE = dict(rms_norm_eps=1e-2, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=8, linear_value_head_dim=16)  # fmt: skip
MODELS = {
    "untied": Qwen3_5TextConfig(tie_word_embeddings=False, **RULE, **IDS, **SIZES),
    "tied": Qwen3_5TextConfig(tie_word_embeddings=True, **RULE, **IDS, **SIZES),
}
WITHOUT_DENSE = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
EXPERTS = {
    "experts": Qwen3_5MoeTextConfig(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
                                    shared_expert_intermediate_size=48, **RULE, **IDS,
                                    **WITHOUT_DENSE),
}  # fmt: skip
PUBLISHED = ((Qwen3_5Config, Qwen3_5ForConditionalGeneration),
             (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration))  # fmt: skip
SPREAD_2 = ["--expert_parallel", "2"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Models with weights, ragged data, and the plain loop's results for each."""
    folder = tmp_path_factory.mktemp("qwen35")
    return folder, write_models(folder, MODELS | EXPERTS, change)


def change(name, values):
    if name.endswith("conv1d.weight"):
        values *= 10  # else keys are as short as the epsilon of their norm
    if values.ndim < 2:
        values += torch.randn_like(values) * 0.1
    if name.endswith("A_log"):
        values -= 3  # memories as long as trained ones


SCRIPTS = [
    slow("fsdp", 1, ["tied"], 8, []),
    ("fsdp", 2, MODELS, 4, ["--reshard_after_forward"]),
    slow("fsdp", 4, MODELS, 2, []),
    slow("fsdp", 4, MODELS, 2, ["--replicas", "2", "--blocks_per_unit", "3"]),
    ("pp", 2, MODELS, 8, []),
    slow("fsdp_pp", 2, MODELS, 8, []),
    slow("fsdp_pp", 4, MODELS, 4, ["--reshard_after_forward"]),
    slow("zero", 2, MODELS, 4, ZERO["zero3"]),
    slow("fsdp", 1, EXPERTS, 8, ["--no_fsdp", "--optimizer_on_host"]),
    ("fsdp", 2, EXPERTS, 4, ["--reshard_after_forward"]),
    slow("fsdp", 4, EXPERTS, 2, ["--reshard_after_forward", *SPREAD_2]),
    slow("fsdp_pp", 2, EXPERTS, 8, []),
    slow("fsdp_pp", 4, EXPERTS, 4, ["--reshard_after_forward", *SPREAD_2]),
]


@pytest.mark.parametrize("script, n, names, rows, flags", SCRIPTS)
def test_equals_plain_loop(script, n, names, rows, flags, work, tmp_path):
    folder, expected = work
    found = train(tmp_path, script, n, cases(folder, names, rows, flags))
    for name, (losses, ranks) in found.items():
        assert_equal(losses, ranks, expected[name.removesuffix("-out")])


# ---------------------------------------------------------------- documents


def rule_inputs(values):
    """Random hidden states of three documents in two rows, and where these begin."""
    torch.manual_seed(0)
    cu = torch.tensor([0, 50, 51, 96, 192], dtype=torch.int32)
    return torch.randn(2, 96, values), cu


@pytest.mark.parametrize("impl", ["bucketed", "sdpa"])
def test_a_document_does_not_reach_another(impl, work):
    """Output and gradient of others are the same bits; convolution and state begin anew."""
    lm = AutoModelForCausalLM.from_pretrained(work[0] / "untied")
    use_rule(lm, "chunked")
    layer = lm.model.layers[0].linear_attn
    x, cu = rule_inputs(64)
    first = slice(0, 50) if impl == "bucketed" else slice(0, 96)
    cu = cu if impl == "bucketed" else torch.tensor([0, 96, 192], dtype=torch.int32)
    documents, found = make_documents(cu, (2, 96), impl, torch.device("cpu")), []
    for scale in (1.0, 3.0):
        hidden = x.clone()
        hidden[0, first] *= scale
        out = layer(hidden.requires_grad_(), documents=documents)
        up = torch.ones_like(out)
        up[0, first] *= scale
        (grad,) = torch.autograd.grad(out, hidden, up)
        found.append([t.flatten(0, 1) for t in (out, grad)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a[first.stop :], b[first.stop :])
        assert not torch.equal(a[first], b[first])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("heads", [(16, 16, 128, 128), (16, 32, 128, 128)])
def test_a_kernel_of_fla_is_right_here(dtype, heads):
    """At least one of both, as a run would choose it: near PyTorch's, and documents apart. In fp32
    a kernel that computes in TF32 is not near enough, and PyTorch's is used."""
    pytest.importorskip("fla")
    faults = [probes.delta(rule, dtype, *map(str, heads)) for rule in DELTA_KERNELS]
    if dtype == "fp32" and None not in faults:
        pytest.skip(str(faults))
    assert None in faults, faults


class StandIn(torch.autograd.Function):
    """For a kernel of fla. In a thread: only this class has gradients within an operator."""

    @staticmethod
    def forward(ctx, kda, q, k, v, g, beta, cu, boundaries):
        def compute(q, k, v, g, beta):
            documents = make_documents(cu, tuple(q.shape[:2]), "bucketed", q.device)
            return chunked(q, k, v, g.mean(-1) if kda else g, beta, documents)

        assert g.ndim == 3 + kda and (boundaries is None or boundaries.equal(cu))
        ctx.leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        ctx.out = ThreadPoolExecutor(1).submit(compute, *ctx.leaves).result()
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, up):
        grads = ThreadPoolExecutor(1).submit(torch.autograd.grad, ctx.out, ctx.leaves, up)
        return None, *grads.result(), None, None


@pytest.mark.parametrize("rule", DELTA_KERNELS)
def test_the_operator_around_a_kernel(rule, monkeypatch):
    """Results and gradients are PyTorch's, documents apart, and the compiler sees the same."""
    monkeypatch.setattr(delta_kernels, "_run_kernel", StandIn.apply)
    assert probes.delta(rule, "fp32", "2", "4", "8", "16", device="cpu") is None
    cu = torch.tensor([0, 5, 12, 12], dtype=torch.int32)
    tensors = [torch.rand(1, 12, *s) for s in ((2, 8), (2, 8), (4, 16), (4,), (4,))]
    for boundaries in (None, cu):
        inputs = [t.clone().requires_grad_() for t in tensors]
        opcheck(delta_kernels._by_kernel, (rule == "fla_kda", *inputs, cu, boundaries))


# ---------------------------------------------------------------- folders


@pytest.fixture(scope="module")
def published(work, tmp_path_factory):
    """(a function of a model's name -> a folder as Qwen3.5's are published: with a vision tower, a
    layer that predicts a second token, and fused experts, the class that reads it)."""

    @functools.cache
    def once(name):
        folder = tmp_path_factory.mktemp("published") / name
        text = copy.deepcopy(AutoConfig.from_pretrained(work[0] / name)).to_dict()
        vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2)
        parts = dict(text_config=text, vision_config=vision | {"out_hidden_size": 64})
        kind, whole = PUBLISHED[name in EXPERTS]
        torch.manual_seed(1)
        model = whole(kind(tie_word_embeddings=text["tie_word_embeddings"], **parts))
        model.save_pretrained(folder, save_original_format=False)
        tensors = load_file(folder / "model.safetensors")
        assert "model.language_model.norm.weight" in tensors
        fused = "model.language_model.layers.0.mlp.experts.down_proj"
        assert (fused in tensors) == (name in EXPERTS)
        tensors["mtp.layers.0.mlp.experts.down_proj"] = torch.zeros(3)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        AutoTokenizer.from_pretrained(work[0] / name).save_pretrained(folder)
        return folder, whole

    return once


@pytest.mark.parametrize("name", ["tied", "experts"])
def test_the_text_of_a_published_folder_is_trained(name, published, work, tmp_path):
    """Its loss is that of the whole model. So is its export's, in which all else is as it was.
    evaluate reads both."""
    published, whole = published(name)
    flags = ["--model_name_or_path", published, *lora.run_flags(work[0], "", tmp_path / "run")[2:]]
    flags = [str(f) for f in flags] + ["--lora_rank", "0", "--export", "fp32"]
    done = run([sys.executable, ROOT / "fsdp/train_fsdp.py", *flags, "--no_fsdp"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert " not used: " in done.stdout
    losses = json.loads((tmp_path / "run/summary.json").read_text())["eval_loss"]
    assert lora.loss_of(whole.from_pretrained(published), work[0]) == pytest.approx(
        losses["0"], rel=2e-5
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf")
    assert model.config.model_type == AutoConfig.from_pretrained(work[0] / name).model_type
    assert lora.loss_of(model, work[0]) == pytest.approx(losses["4"], rel=2e-5)
    model = whole.from_pretrained(tmp_path / "run/hf")
    assert lora.loss_of(model, work[0]) == pytest.approx(losses["4"], rel=2e-5)
    before, after = (load_file(f / "model.safetensors") for f in (published, tmp_path / "run/hf"))
    same = {n for n, t in before.items() if torch.equal(t, after[n])}
    assert before.keys() == after.keys()
    assert same == {n for n in before if n.startswith(("model.visual.", "mtp."))}
    flags = ["--models", published, "--data", work[0] / "data.jsonl", "--seq_len", SEQ_LEN]
    flags += ["--max_new_tokens", 4, "--batch_size", 3]
    (file,) = evaluated(published, flags)["files"]
    assert file["loss"] == pytest.approx(losses["0"], rel=2e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_moe_text", None])
def test_a_published_folder_whose_text_is_of_another_family(kind, published, tmp_path):
    shutil.copytree(published("tied")[0], folder := tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = kind
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"text_config has model_type {kind}, not qwen3_5_text"):
        open_model(folder, SEQ_LEN)


def test_a_weight_with_two_names(published, tmp_path):
    shutil.copytree(published("tied")[0], folder := tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(64)  # beside model.language_model.norm.weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight .*are the same weight"):
        open_model(folder, SEQ_LEN)


@pytest.mark.parametrize("name", ["tied", "experts"])
def test_adapters_that_peft_saved_over_the_whole_model_are_read(name, published, tmp_path):
    """PEFT finds "language_model." in their names; ours are those of the text alone."""
    folder, whole = published(name)
    model = whole.from_pretrained(folder)
    targets = ["q_proj", "out_proj"]  # which the vision tower has not
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    adapted.save_pretrained(tmp_path)
    _, read = start_of(open_adapter(tmp_path), ",".join(targets), model.config.text_config)
    values = {n: p for n, p in adapted.named_parameters() if ".lora_A." in n}
    assert any(".linear_attn." in n for n in values)
    for name, p in values.items():
        name = name.replace("base_model.model.model.language_model.", "model.")
        assert torch.equal(read(name.replace(".default.", ".")), p)


@pytest.mark.parametrize("name", MODELS | EXPERTS)
def test_parameters(name, work):
    folder = work[0] / name
    config, _ = open_model(folder, SEQ_LEN)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert parameters_of(config) == sum(p.numel() for p in model.parameters() if p.ndim > 1)


# ---------------------------------------------------------------- runs


def test_16_bits_with_decays_in_fp32(work, tmp_path):
    """Sharded, on the device and on the host, and over a frozen base, forwards see decays' weights
    in fp32; losses are near fp32's."""
    folder, expected = work
    how = ["--dtype", "bf16", "--max_steps", 2]
    runs = {
        "device": [*how, "--use_activation_checkpointing"],
        "host": [*how, "--optimizer_on_host"],
        "lora": [*how, "--lora_rank", "8", "--lr", "1e-3"],  # more than heads
    }
    same = argv(folder, "tied", 2, 2)
    runs = {name: [*same, *more] for name, more in runs.items()}
    for name, (losses, ranks) in train(tmp_path, "fsdp", 2, runs).items():
        assert [rank["decays"] for rank in ranks] == [{torch.float32}] * 2, name
        trained = 1 if name == "lora" else 2  # adapters take steps of their own
        assert losses[:trained] == pytest.approx(expected["tied"]["loss"][:trained], rel=5e-3), name


def test_what_stays_in_fp32_and_has_no_adapter(work):
    lm = skeleton(AutoConfig.from_pretrained(work[0] / "tied"), "bucketed")
    lora = Lora(2, 4.0, 0.0, ("q_proj", "in_proj_qkv", "conv1d"), 0, {})
    apply_lora(lm, lora, torch.bfloat16)
    layer = lm.model.layers[0].linear_attn
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert layer.conv1d.weight.dtype == layer.in_proj_qkv.weight.dtype == torch.bfloat16
    assert hasattr(layer.in_proj_qkv, "lora_A") and not hasattr(layer.conv1d, "lora_A")
    assert not any(".conv1d." in name for name in matrices_in(lm.config))
    names = [*matrices_in(EXPERTS["experts"])]  # PEFT can't adapt MLPs beside experts
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in names
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert not any(".mlp." in name and ".experts." not in name for name in names)


@pytest.mark.slow
def test_exports_have_the_trainers_loss(work, tmp_path):
    """Of adapters too, merged; in bf16 the decays' parameters stay as they are."""
    folder = work[0]
    for run_name in whole_and_adapters(folder, MODELS | EXPERTS, tmp_path):
        at, out = tmp_path / run_name / "checkpoints/step_00000004", tmp_path / f"{run_name}-hf"
        export(at, out, "fp32", merge=run_name.endswith("lora"))
        losses = json.loads((tmp_path / run_name / "summary.json").read_text())["eval_loss"]
        assert losses["4"] < losses["0"] - 0.05
        loss = lora.loss_of(AutoModelForCausalLM.from_pretrained(out), folder)
        assert loss == pytest.approx(losses["4"], rel=2e-5), run_name
    export(at, tmp_path / "bf16", "bf16", merge=True)
    kinds = {n: t.dtype for n, t in load_file(tmp_path / "bf16/model.safetensors").items()}
    assert kinds["model.layers.0.linear_attn.A_log"] == torch.float32
    assert kinds["model.layers.0.linear_attn.conv1d.weight"] == torch.bfloat16


# ---------------------------------------------------------------- what is refused

WRONG = [
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types: sliding_attention is not supported"),
    ({"linear_num_value_heads": 3}, "3 is not a multiple of 2 key heads"),
    ({"hidden_act": "gelu"}, "hidden_act gelu"),
    ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
]
WRONG_EXPERTS = [
    ({"num_experts": None}, "num_experts_per_tok 2 does not choose from 0 experts"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 does not choose from 8 experts"),
    ({"norm_topk_prob": False}, "norm_topk_prob False is not supported, only True"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported, only 1"),
    ({"mlp_only_layers": [0]}, "mlp_only_layers [0] is not supported, only []"),
]
HARMLESS = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": None}
HARMLESS |= {"intermediate_size": None, "num_local_experts": 4}


@pytest.mark.parametrize(
    "name, changes, message",
    [("tied", *case) for case in WRONG] + [("experts", *case) for case in WRONG_EXPERTS],
)
def test_configurations_that_are_refused(name, changes, message):
    config = copy.deepcopy((MODELS | EXPERTS)[name])
    vars(config).update(changes)
    assert message in next(problems_of(config))


def test_keys_that_change_nothing_are_taken():
    config = copy.deepcopy(EXPERTS["experts"])
    counted = parameters_of(config)
    vars(config).update(HARMLESS)
    assert [*problems_of(config)] == [] and parameters_of(config) == counted


@pytest.mark.parametrize("flag, value", [("sequence_parallel", 2), ("tensor_parallel", 2),
                                         ("psgd_rank", 4), ("attn_impl", "varlen")])  # fmt: skip
def test_flags_that_are_refused(flag, value):
    args = args_with(**{flag: value})
    with pytest.raises(UserError, match=f"--{flag}"):
        refuse_flags(args, MODELS["tied"])
        choose_rule(args.attn_impl, CPU, torch.float32, MODELS["tied"])


def test_a_kernel_is_chosen_by_what_a_probe_finds(monkeypatch):
    """In this order, and PyTorch's version if neither works or fla is not installed."""
    faults = {"fla": "wrong", "fla_kda": None}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: faults)

    def decide():
        (rule, among), lines = choose_rule(
            "auto", H100, torch.bfloat16, MODELS["tied"], probe=lambda rule, *given: faults[rule]
        )
        return rule, "varlen" in among, lines[-1]

    assert decide() == ("fla_kda", True, "linear attention: fla_kda")
    faults["fla_kda"] = "a document changes what another gives"
    assert decide()[:2] == ("chunked", False)
    faults.clear()
    assert "slow on a GPU; pip install fla-core" in decide()[2]
