"""Adapters on experts, beside PEFT's own: the trainer's numbers, checkpoints and exports."""

import copy
import functools
import json
import sys
from types import SimpleNamespace

import pytest
import test_moe as moe
import test_parity as parity
import test_qwen35 as qwen35
import torch
from conftest import ROOT, run, slow, torchrun
from peft import PeftModel, get_peft_model
from test_lora import (
    ALPHA,
    EXPERTS,
    RANK,
    at,
    by_our_names,
    exported,
    last_loss,
    lora_of,
    loss_of,
    run_flags,
    with_peft,
)
from test_parity import assert_equal, plain_loop, train
from tiny_tokenizer import packs_of
from torch import nn
from transformers import AutoModelForCausalLM

from bench.checkpoints import tensors
from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import FUSED, Blocks, blocks_with_experts, materialise, skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.experts import Routers
from llm_demo.core.rows import position_ids
from llm_demo.model.adapters import choose_lora
from llm_demo.model.export_files import write_adapter
from llm_demo.model.source import load_config
from llm_demo.model.weights_files import open_weights
from llm_demo.options.lora import apply_lora, factors_of, merge_into
from llm_demo.run.checkpoint_files import read_tensors, weights_of


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """(folder of models with experts, (model, targets) -> PEFT's results, packed). Neither matrix
    of an expert is square, and there are more experts than ranks of an adapter."""
    folder = tmp_path_factory.mktemp("mixtures")
    models, tokenizer = parity.smaller_vocabulary(moe.MODELS | qwen35.EXPERTS, folder / "tokenizer")
    parity.write_rows(folder / "data.jsonl")
    packs = packs_of(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN)
    for name in ("qwen", "deepseek", "shared", "experts"):
        torch.manual_seed(0)
        models[name].moe_intermediate_size = 40
        model = AutoModelForCausalLM.from_config(models[name], dtype=torch.float32)
        for key, p in model.named_parameters():
            if name in qwen35.EXPERTS:
                qwen35.change(key, p.data)
                p.data *= 3 if key == "lm_head.weight" else 1  # its norms are to be clipped
            elif key.endswith("bias"):
                nn.init.normal_(p, std=0.05)
        if name == "deepseek":  # in the last block all tokens choose the first two experts
            model.model.layers[-1].mlp.gate.e_score_correction_bias[:2] = 10.0
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    @functools.cache
    def expected(name, targets):
        model = with_peft(folder, name, targets)
        found = plain_loop(model, packs)
        found["grads"] = [by_our_names(model, step) for step in found["grads"]]
        return found | {"params": by_our_names(model, found["params"])}

    return folder, expected


SPREAD, AGAIN = ["--expert_parallel", "2"], ["--use_activation_checkpointing"]
ROWS, ATTENTION = ["--sequence_parallel", "2"], "q_proj,k_proj,v_proj,o_proj"
WITH_EXPERTS = {  # (processes, model, targets, micro, accumulation, further flags)
    "plain": (1, "qwen", "all-linear", 4, 2, AGAIN),
    "frozen": (1, "shared", ATTENTION, 8, 1, []),
    "down": (1, "deepseek", "down_proj", 2, 4, []),
    "two": (2, "qwen", "all-linear", 2, 2, ["--reshard_after_forward"]),
    "two_gate_up": (2, "deepseek", "gate_up_proj", 4, 1, []),
    "two_spread": (2, "deepseek", "all-linear", 1, 4, [*SPREAD, *AGAIN]),
    "two_hybrid": (2, "experts", "all-linear", 2, 2, [*SPREAD, *AGAIN]),
    "two_rows": (2, "shared", "all-linear", 4, 2, ROWS),
    "four": (4, "qwen", "all-linear", 2, 2, [*ROWS, *SPREAD, *AGAIN]),
    "four_spread": (4, "shared", "all-linear", 1, 2, ["--expert_parallel", "4"]),
    "four_replicas": (4, "deepseek", "all-linear", 2, 1, ["--replicas", "2"]),
    "four_bf16": (4, "deepseek", "all-linear", 2, 1, [*SPREAD, "--dtype", "bf16"]),
    "four_fp16": (4, "qwen", "all-linear", 2, 1, ["--dtype", "fp16"]),
}
# the same in a pipeline; in the first, the first piece has no adapter, but its stage has
IN_STAGES = {
    "twice": (2, "deepseek", "down_proj", 2, 4, ["--schedule", "interleaved"]),
    "stages": (2, "qwen", "all-linear", 4, 2, AGAIN),
    "v": (2, "experts", "all-linear", 1, 8, ["--schedule", "v"]),
    "spread": (4, "deepseek", "all-linear", 2, 2, [*SPREAD, *AGAIN]),
    "shares": (4, "shared", "all-linear", 4, 2, [*SPREAD, "--tensor_parallel", "2"]),
}


@pytest.mark.parametrize("kind, processes, quick", [
    ("fsdp", 1, True), ("fsdp", 2, True), slow("fsdp", 2, False), slow("fsdp", 4, False),
    ("fsdp_pp", 2, True), slow("fsdp_pp", 2, False), slow("fsdp_pp", 4, False),
])  # fmt: skip
def test_on_experts_equals_peft(kind, processes, quick, mixtures):
    """Also beside frozen experts, and on one of their two matrices."""
    folder, expected = mixtures
    cases, wanted_by = {}, {"fsdp": WITH_EXPERTS, "fsdp_pp": IN_STAGES}[kind]
    for case, (n, name, targets, micro, accum, more) in wanted_by.items():
        if n == processes and quick == (n == 1 or case in ("two_spread", "two_rows", "twice")):
            also = ["--lora_rank", str(RANK), "--lora_alpha", str(ALPHA), *more]
            also += ["--lora_targets", targets]
            cases[case] = parity.argv(folder, name, micro, accum, *also)
    for case, (losses, ranks) in train(folder, kind, processes, cases).items():
        wanted = expected(*wanted_by[case][1:3])
        if "--dtype" not in wanted_by[case][-1]:
            # AdamW moves a factor that starts at zero by about lr for any gradient, however small,
            # and so shows the rounding of the smallest ones: 1.8e-5 on CPUs with AMX
            assert_equal(losses, ranks, wanted, later=5 * parity.TOLERANCE)
            continue
        rough, loose = parity.BOUNDS[case.split("_")[1]]
        assert losses == pytest.approx(wanted["loss"], rel=rough)
        for rank in ranks:
            norms = [step["norm"] for step in rank["steps"]]
            assert norms == pytest.approx(wanted["norm"], rel=loose)


@pytest.fixture(scope="module")
def mixture_run(mixtures):
    """A run whose experts are spread over its two processes, and have adapters."""
    folder, _ = mixtures
    more = *SPREAD, *AGAIN, "--export", "fp32"
    torchrun(2, ROOT / "fsdp/train_fsdp.py", *run_flags(folder, "deepseek", folder / "run", *more))
    return folder / "run"


def trainers_logits(run, base, ids):
    """Of the trainer's own modules, with a checkpoint's adapters over the base's weights."""
    facts = json.loads((at(run, 4) / "trainer.json").read_text())["adapters"]
    config, cpu = load_config(base, 96), torch.device("cpu")
    lm = skeleton(config, "math")
    lora = lora_of(config, ",".join(facts["targets"]), facts["rank"])
    apply_lora(lm, lora, torch.float32)
    lm = materialise(lm, "", open_weights(base), 0, cpu)
    held = {p.hf_name: p.data for p in lm.parameters() if p.requires_grad}
    assert held.keys() == weights_of(at(run, 4)).keys()
    read_tensors(at(run, 4), held)
    blocks = blocks_with_experts(lm)
    Routers(blocks, [block.mlp.gate for block in blocks])
    cu = torch.tensor([0, ids.numel()], dtype=torch.int32)
    positions = position_ids(cu, ids.shape)
    with torch.no_grad():
        hidden = lm.model.embed_tokens(ids)
        rotary = lm.model.rotary_emb(hidden, positions)
        documents = make_documents(cu, tuple(ids.shape), "math", cpu)
        hidden = Blocks(list(lm.model.layers), False)(hidden, rotary, positions, documents)
        return lm.lm_head(lm.model.norm(hidden))


def test_adapters_on_experts_are_exported_and_merged(mixtures, mixture_run, tmp_path):
    base = mixtures[0] / "deepseek"
    done = exported(mixture_run, tmp_path / "merged", "--merge", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.arange(5, 69)[None]
    wanted = trainers_logits(mixture_run, base, ids)
    with torch.no_grad():
        before = plain(ids).logits
    adapted = PeftModel.from_pretrained(plain, mixture_run / "hf")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert parity.relative(before, wanted) > 0.1
    for model in (adapted, whole):
        with torch.no_grad():
            assert parity.relative(model(ids).logits, wanted) < parity.TOLERANCE
    assert loss_of(whole, mixtures[0]) == pytest.approx(last_loss(mixture_run), rel=1e-5)


@pytest.mark.parametrize("how", ["spread", slow("all here")])
def test_adapters_on_experts_resume(how, mixtures, mixture_run):
    """To the bit with the experts spread as before; else with the same numbers."""
    folder, spread = mixtures[0], how == "spread"
    out, more = folder / f"again {how}", SPREAD if spread else ["--expert_parallel", "1"]
    more = *more, *AGAIN, "--resume", str(at(mixture_run, 2))
    torchrun(2, ROOT / "fsdp/train_fsdp.py", *run_flags(folder, "deepseek", out, *more))
    one, other = tensors(at(mixture_run, 4)), tensors(at(out, 4))
    assert one.keys() == other.keys()
    shapes = {name: tuple(t.shape) for name, t in one.items()}
    assert shapes["model.layers.3.mlp.experts.gate_up_proj_lora_A"] == (EXPERTS, 4, 64)
    assert shapes["model.layers.3.mlp.experts.gate_up_proj_lora_B"] == (EXPERTS, 80, 4)
    for name, t in one.items():
        assert torch.equal(t, other[name]) or not spread, name
        assert parity.relative(other[name], t) < 1e-3, name


@pytest.mark.parametrize("name, targets", [
    ("qwen", "gate_up_proj,down_proj"), ("shared", "all-linear"), ("deepseek", "o_proj,down_proj"),
    ("shared", "gate_up_proj"),
])  # fmt: skip
def test_peft_reads_experts_as_the_merge_adds_them(name, targets, tmp_path, monkeypatch):
    """Other experts than ranks, and no square matrix, so that no order can pass for another."""
    config = copy.deepcopy(moe.MODELS[name])
    config.moe_intermediate_size, config.vocab_size = 24, 64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for p in model.parameters():
        p.data.normal_(0, 0.1)
    lora = lora_of(config, targets, rank=6)._replace(base={"path": "a/base"}).facts()
    wanted = factors_of(lora, {name: tuple(p.shape) for name, p in model.named_parameters()})
    factors = {name: torch.randn(shape) / 4 for name, shape in wanted.items()}

    def fill(tensors):
        for key, t in tensors.items():
            t.copy_(factors[key])

    write_adapter(tmp_path, fill, wanted, torch.float32, lora)
    merged = copy.deepcopy(model)
    for key, p in merged.named_parameters():
        merge_into(key, p.data, factors, lora)
    found = PeftModel.from_pretrained(model, tmp_path)
    again = get_peft_model(copy.deepcopy(merged), found.peft_config["default"])
    own = {k for k in again.state_dict() if ".lora_" in k}
    assert {k for k in found.state_dict() if ".lora_" in k} == own
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert parity.relative(found(ids).logits, merged(ids).logits) < parity.TOLERANCE
        assert parity.relative(found.unload()(ids).logits, merged(ids).logits) > 0.1
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    names = lora["targets"]
    assert sorted(written["target_modules"]) == sorted(n for n in names if n not in FUSED)
    on_experts = [f"mlp.experts.{n}" for n in FUSED if n in names]
    assert written["target_parameters"] == on_experts


def test_experts_factors_start_alike_wherever_they_are():
    """Drawn from seed and name alone, as PEFT draws them."""
    config, found = moe.MODELS["qwen"], []
    for part in (slice(None), slice(2, 6)):
        lm = skeleton(config, "sdpa")
        apply_lora(lm, lora_of(config, rank=6), torch.float32)
        experts = lm.model.layers[0].mlp.experts
        for name, p in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, nn.Parameter(p[part].clone(), requires_grad=p.requires_grad))
        found.append(experts.start("3:model.layers.0.mlp.experts"))
    assert found[0].keys() == {f"{kind}_lora_{x}" for kind in FUSED for x in "AB"}
    for name, whole in found[0].items():
        assert torch.equal(whole, found[1][name])
        bound = 1 / whole.shape[2] ** 0.5
        if name.endswith("A"):
            assert whole.shape == (8, 6, 64 if "gate" in name else 32)
            assert 0.95 * bound < whole.abs().max() <= 1.01 * bound
        else:
            assert not whole.any()
    assert not torch.equal(found[0]["gate_up_proj_lora_A"][0], found[0]["gate_up_proj_lora_A"][1])


IN_MIXTURES = {
    "layer": ("shared", {"lora_targets": "gate_proj"}, "'gate_proj' can't be adapted in this"),
    "of attention": ("qwen", {"lora_targets": "gate"}, "v_proj, o_proj, gate_up_proj"),
    "experts": ("deepseek", {"lora_targets": "up_proj"}, "gate_up_proj, down_proj"),
    "dropout": ("qwen", {"lora_dropout": 0.1}, "attention alone by --lora_targets"),
    "dropout of experts": (
        "qwen", {"lora_dropout": 0.1, "lora_targets": "down_proj"}, "no dropout: drop it, or",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_MIXTURES)
def test_what_experts_refuse(case):
    name, flags, said = IN_MIXTURES[case]
    args = {"lora_rank": 4, "lora_alpha": 32.0, "lora_dropout": 0.0, "lora_targets": "all-linear"}
    args["base_bits"] = 16
    with pytest.raises(UserError, match=said):
        choose_lora(SimpleNamespace(**{**args, **flags}), moe.MODELS[name], {})


def test_a_stage_without_an_adapter_is_refused(mixtures, tmp_path):
    """The first block has no experts. By one line, before weights are read."""
    cut = "--partition", "1,3", "--lora_targets", "down_proj"
    argv = run_flags(mixtures[0], "deepseek", tmp_path / "run", *cut)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run([sys.executable, *launch, ROOT / "fsdp_pp/train_fsdp_pp.py", *argv])
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    said = "error: --lora_targets down_proj: stage 0 has no such layer, so nothing to train: choose"
    assert done.returncode and len(errors) == 1 and errors[0].startswith(said), done.stderr
    assert "loading weights" not in done.stderr and not (tmp_path / "run").exists()
