"""Adapters: the trainer's numbers against PEFT's own LoRA in a plain loop, one document at a time
in one process; and the files of checkpoints and exports."""

import copy
import functools
import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import test_moe as moe
import test_parity as parity
import torch
import torch.nn.functional as F
from conftest import ROOT, args_with, run, torchrun
from peft import LoraConfig, PeftModel, get_peft_model
from test_estimate import KINDS, mixed, really_kept
from test_parity import assert_equal, plain_loop, train
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.checkpoints import tensors
from fsdp import estimate
from llm_demo.data.batch import position_ids
from llm_demo.data.packs import load_packs
from llm_demo.errors import UserError
from llm_demo.export import export, write_adapter
from llm_demo.model import memory
from llm_demo.model.attention import make_documents
from llm_demo.model.costs import block_costs, experts_of, flops_of_slot
from llm_demo.model.decoder import Blocks, skeleton
from llm_demo.model.experts import Routers, blocks_with_experts
from llm_demo.model.lora import (
    Factor,
    Lora,
    LoraLinear,
    apply_lora,
    choose_lora,
    factors_of,
    merge_into,
)
from llm_demo.model.names import FUSED
from llm_demo.model.source import find_model, load_config
from llm_demo.model.weights import materialise, open_weights
from llm_demo.plan import Compute
from llm_demo.run.checkpoint_files import read_tensors, weights_of

RANK, ALPHA = 6, 32  # a rank that no number of processes divides
TARGETS = {"tied": "all-linear", "untied": "q_proj,down_proj", "llama": "all-linear"}
PACKED = {"tied": True, "untied": True, "llama": False}
MIXTURES, EXPERTS = ("qwen", "deepseek", "shared"), 8
ENGINES = {  # (processes, further flags, (micro, accumulation) for each model)
    "plain": (1, ["--no_fsdp"], [(8, 1), (4, 2), (2, 4)]),
    "two": (2, [], [(1, 4), (4, 1), (2, 2)]),
    "two_reshard": (2, ["--reshard_after_forward"], [(4, 1), (2, 2), (1, 4)]),
    "four": (4, ["--reshard_after_forward"], [(1, 2), (2, 1), (2, 1)]),
    "replicas": (4, ["--replicas", "2"], [(2, 1), (1, 2), (1, 2)]),
}


def ours(name: str) -> str:
    """The name of a PEFT model's parameter in the trainer."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def with_peft(folder, name, targets=None):
    """PEFT's own model, whose factors start as the trainer's do. targets: of a mixture."""
    base = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    how = {"target_modules": targets or TARGETS[name]}
    if targets:
        base.config._experts_implementation = "eager"
        targets = lora_of(base.config, targets, RANK).targets
        how["target_modules"] = [name for name in targets if name not in FUSED]
        how["target_parameters"] = [f"mlp.experts.{name}" for name in targets if name in FUSED]
    elif how["target_modules"] != "all-linear":
        how["target_modules"] = how["target_modules"].split(",")
    how = LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **how)
    model = get_peft_model(base, how)
    for key, p in model.named_parameters():
        if p.requires_grad:
            values = Factor(p.shape[1], p.shape[0], zero="lora_B" in key)
            path = ours(key).removesuffix(".weight")
            if ".experts." in key:
                path = expert_factor(model, key)
            p.data.copy_(values.start(f"{parity.SEED}:{path}")["weight"])
    return model.to(parity.DEVICE)


def expert_factor(model, key):
    """The trainer's name of a factor of PEFT's over a block's experts."""
    wrap, factor = key.split(".lora_")
    matrix = model.get_submodule(wrap).parameter_name
    experts = ours(wrap).removesuffix(".base_layer")
    return f"{experts}.{matrix}_lora_{factor[0]}"


def by_our_names(model, tensors):
    """PEFT's factors, or their gradients, as the trainer has them: its A has a row for each expert
    and rank, and its B a column for each rank and expert."""
    found = {}
    for key, t in tensors.items():
        if ".experts." not in key:
            found[ours(key)] = t
        elif "lora_A" in key:
            found[expert_factor(model, key)] = t.view(EXPERTS, RANK, t.shape[1])
        else:
            found[expert_factor(model, key)] = t.view(len(t), RANK, EXPERTS).permute(2, 0, 1)
    return found


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    tokenizer = AutoTokenizer.from_pretrained(parity.TINY)
    parity.write_rows(folder / "data.jsonl")
    data, results = str(folder / "data.jsonl"), {}
    for name, config in parity.MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        packs = load_packs(data, tokenizer, seq_len=parity.SEQ_LEN, pack=PACKED[name])
        found = plain_loop(with_peft(folder, name), packs)
        found["grads"] = [{ours(k): v for k, v in step.items()} for step in found["grads"]]
        found["params"] = {ours(k): v for k, v in found["params"].items()}
        results[name] = found
    return folder, results


def test_factors_start_as_pefts(work):
    base = AutoModelForCausalLM.from_pretrained(work[0] / "tied", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=64, target_modules="all-linear"))
    first = model.base_model.model.model.layers[0].mlp.down_proj
    for theirs, zero in ((first.lora_A, False), (first.lora_B, True)):
        theirs = theirs["default"].weight
        mine = Factor(theirs.shape[1], theirs.shape[0], zero).start("1:a")["weight"]
        assert mine.shape == theirs.shape
        for figure in (torch.std, torch.amax, torch.amin):
            assert figure(mine).item() == pytest.approx(figure(theirs).item(), rel=0.05)
    again, other = (Factor(96, 64, False).start(name)["weight"] for name in ("1:a", "2:a"))
    assert not torch.equal(again, other)
    assert torch.equal(again, Factor(96, 64, False).start("1:a")["weight"])


def flags(name):
    return [
        "--lora_rank", str(RANK), "--lora_alpha", str(ALPHA), "--lora_targets", TARGETS[name],
        "--pack_sequences", str(PACKED[name]),
    ]  # fmt: skip


QUICK = ("plain", "two")


@pytest.mark.parametrize(
    "processes, quick",
    [(1, True), (2, True), *(pytest.param(n, False, marks=pytest.mark.slow) for n in (2, 4))],
)
def test_equals_peft(processes, quick, work):
    folder, expected = work
    cases = {}
    for engine, (n, more, splits) in ENGINES.items():
        if n != processes or quick != (engine in QUICK):
            continue
        for name, (micro, accum) in zip(parity.MODELS, splits, strict=True):
            recomputed = (engine, name) in (
                ("plain", "tied"), ("two", "untied"), ("two_reshard", "tied"), ("four", "llama")
            )  # fmt: skip
            case = f"{engine}-{name}"
            also = [*more, *flags(name), "--use_activation_checkpointing", str(recomputed)]
            cases[case] = parity.argv(folder, name, folder / case, micro, accum, *also)
        for dtype in parity.BOUNDS if processes < 4 else ():
            case, (micro, accum) = f"{engine}-{dtype}", splits[0]
            also = [*more, *flags("tied"), "--dtype", dtype]
            cases[case] = parity.argv(folder, "tied", folder / case, micro, accum, *also)
    for case, (losses, ranks) in train(folder, "fsdp", processes, cases).items():
        _, name = case.split("-")
        if name in expected:
            assert_equal(losses, ranks, expected[name])
            continue
        rough, loose = parity.BOUNDS[name]
        assert losses == pytest.approx(expected["tied"]["loss"], rel=rough)
        for rank in ranks:
            norms = [step["norm"] for step in rank["steps"]]
            assert norms == pytest.approx(expected["tied"]["norm"], rel=loose)
            assert rank["params"].keys() == expected["tied"]["params"].keys()


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """(folder of models with experts, (model, targets) -> PEFT's results, packed). Neither matrix
    of an expert is square, and there are more experts than ranks of an adapter."""
    folder = tmp_path_factory.mktemp("mixtures")
    models, tokenizer = parity.smaller_vocabulary(moe.MODELS, folder / "tokenizer")
    parity.write_rows(folder / "data.jsonl")
    packs = load_packs(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN)
    for name in MIXTURES:
        torch.manual_seed(0)
        models[name].moe_intermediate_size = 40
        model = AutoModelForCausalLM.from_config(models[name], dtype=torch.float32)
        for key, p in model.named_parameters():
            if key.endswith("bias"):
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
    "two_rows": (2, "shared", "all-linear", 4, 2, ROWS),
    "four": (4, "qwen", "all-linear", 2, 2, [*ROWS, *SPREAD, *AGAIN]),
    "four_spread": (4, "shared", "all-linear", 1, 2, ["--expert_parallel", "4"]),
    "four_replicas": (4, "deepseek", "all-linear", 2, 1, ["--replicas", "2"]),
    "four_bf16": (4, "deepseek", "all-linear", 2, 1, [*SPREAD, "--dtype", "bf16"]),
    "four_fp16": (4, "qwen", "all-linear", 2, 1, ["--dtype", "fp16"]),
}


@pytest.mark.parametrize("processes", (1, 2, pytest.param(4, marks=pytest.mark.slow)))
def test_on_experts_equals_peft(processes, mixtures):
    """Also beside frozen experts, and on one of their two matrices."""
    folder, expected = mixtures
    cases = {}
    for case, (n, name, targets, micro, accum, more) in WITH_EXPERTS.items():
        if n == processes:
            also = ["--lora_rank", str(RANK), "--lora_alpha", str(ALPHA), *more]
            also += ["--lora_targets", targets]
            cases[case] = parity.argv(folder, name, folder / case, micro, accum, *also)
    for case, (losses, ranks) in train(folder, "fsdp", processes, cases).items():
        wanted = expected(*WITH_EXPERTS[case][1:3])
        if "--dtype" not in WITH_EXPERTS[case][-1]:
            assert_equal(losses, ranks, wanted)
            continue
        rough, loose = parity.BOUNDS[case.split("_")[1]]
        assert losses == pytest.approx(wanted["loss"], rel=rough)
        for rank in ranks:
            assert [step["norm"] for step in rank["steps"]] == pytest.approx(
                wanted["norm"], rel=loose
            )


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
    Routers(blocks_with_experts(lm))
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


@pytest.mark.parametrize("how", ["spread", pytest.param("all here", marks=pytest.mark.slow)])
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

    def fill(checkpoint, tensors):
        for key, t in tensors.items():
            t.copy_(factors[key])

    monkeypatch.setattr("llm_demo.export.read_tensors", fill)
    write_adapter(tmp_path, tmp_path, wanted, torch.float32, lora)
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
    "of attention": ("qwen", {"lora_targets": "gate"}, r"k_proj, v_proj, o_proj \(attention\)"),
    "experts": ("deepseek", {"lora_targets": "up_proj"}, r"gate_up_proj, down_proj \(experts\)"),
    "dropout": ("qwen", {"lora_dropout": 0.1}, "attention alone: --lora_targets q_proj,k_proj,v_"),
    "dropout of experts": (
        "qwen", {"lora_dropout": 0.1, "lora_targets": "down_proj"}, "no dropout: drop it$",
    ),
    "rank": (
        "qwen", {"lora_rank": 33, "lora_targets": "down_proj"},
        r"33 is larger than a side of model.layers.0.mlp.experts.down_proj \(64 x 32\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_MIXTURES)
def test_what_experts_refuse(case):
    name, flags, said = IN_MIXTURES[case]
    args = {"lora_rank": 4, "lora_alpha": 32.0, "lora_dropout": 0.0, "lora_targets": "all-linear"}
    with pytest.raises(UserError, match=said):
        choose_lora(SimpleNamespace(**{**args, **flags}), moe.MODELS[name], {})


def test_attention_beside_experts_may_have_dropout():
    args = SimpleNamespace(
        lora_rank=4, lora_alpha=32.0, lora_dropout=0.1, lora_targets="o_proj,q_proj"
    )
    lora = choose_lora(args, moe.MODELS["shared"], {})
    assert lora.targets == ("q_proj", "o_proj")
    assert lora.active == lora.parameters and not lora.routed


# ---------------------------------------------------------------- checkpoints and exports


def run_flags(folder, model, out, *more):
    data = str(folder / "data.jsonl")
    return [
        "--model_name_or_path", str(folder / model), "--train_json", data, "--eval_json", data,
        "--seq_len", str(parity.SEQ_LEN), "--micro_batch_size", "4", "--max_steps", "4",
        "--lr", "1e-2", "--warmup_steps", "1", "--sample_tokens", "4", "--save_every", "2",
        "--keep_last", "0", "--lora_rank", "4", "--dtype", "fp32", "--seed", str(parity.SEED),
        "--output_dir", str(out), *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(work):
    """A run of two processes that has exported its adapters, with dropout, to be resumed."""
    folder = work[0]
    more = "--export", "fp32", "--lora_dropout", "0.1", "--use_activation_checkpointing"
    flags = run_flags(folder, "tied", folder / "run", *more)
    torchrun(2, ROOT / "fsdp/train_fsdp.py", *flags)
    return folder / "run"


def at(run, step):
    return run / f"checkpoints/step_{step:08d}"


def last_loss(run):
    """The held-out loss that the trainer has measured at the end."""
    losses = json.loads((run / "summary.json").read_text())["eval_loss"]
    assert losses["4"] < losses["0"] - 0.1, "nothing was learnt"
    return losses["4"]


def loss_of(model, folder):
    """The same of a Hugging Face model, one document at a time."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    packs = load_packs(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN, pack=False)
    total = count = 0
    with torch.no_grad():
        for row in range(len(packs)):
            ids, labels, lengths = packs.row(row)
            n = lengths[0]
            ids, labels = torch.tensor(ids[:n]), torch.tensor(labels[:n])
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            count += int((labels != -100).sum())
    return total / count


def test_a_checkpoint_holds_adapters_only_and_resumes_to_the_bit(run_folder, work):
    folder, again = work[0], work[0] / "again"
    more = "--lora_dropout", "0.1", "--use_activation_checkpointing", "--resume", at(run_folder, 2)
    torchrun(2, ROOT / "fsdp/train_fsdp.py", *run_flags(folder, "tied", again, *map(str, more)))
    one, other = tensors(at(run_folder, 4)), tensors(at(again, 4))
    assert one.keys() == other.keys() and len(one) == 4 * 7 * 2 * 3  # blocks, layers, A and B
    assert all(".lora_" in name for name in one)
    assert all(torch.equal(t, other[name]) for name, t in one.items())
    facts = json.loads((at(run_folder, 4) / "trainer.json").read_text())
    assert facts["adapters"]["base"]["path"] == str(folder / "tied")
    n = sum(t.numel() for name, t in one.items() if name.endswith(".weight"))
    line = rf"FSDP2 on 2 processes: [\d,]+ frozen parameters, {n:,} trained in adapters, [\d,]+ of"
    assert re.search(line, (run_folder / "train.log").read_text())


def test_dropout_is_drawn_from_the_seed(work):
    """So that two fresh starts are the same to the bit, and not those of another seed."""
    folder, cases = work[0], {}
    for case, seed in (("first", "5"), ("second", "5"), ("other", "6")):
        more = *flags("tied"), "--lora_dropout", "0.3", "--no_shuffle", "--max_steps", "2"
        cases[case] = [*parity.argv(folder, "tied", folder / case, 8, 1, *more), "--seed", seed]
    found = train(folder, "fsdp", 1, cases)
    first, second, other = (found[case][1][0]["params"] for case in cases)
    for name, t in first.items():
        assert torch.equal(t, second[name]), name
    assert not all(torch.equal(t, other[name]) for name, t in first.items())


def adapted_layer():
    """With a dropout of a half."""
    torch.manual_seed(3)
    layer = nn.Linear(8, 8)
    layer.requires_grad_(False)
    adapted = LoraLinear(layer, Lora(2, 4.0, 0.5, ("x",), 0, {})).to_empty(device="cpu")
    for p in adapted.parameters():
        p.data.normal_()
    return adapted


def test_dropout_is_of_the_adapters_inputs_in_training():
    """PEFT's formula: base(x) + B(A(dropout(x))) * scale."""
    layer, x = adapted_layer(), torch.randn(50, 8)
    base, (a, b) = F.linear(x, layer.weight, layer.bias), (layer.lora_A.weight, layer.lora_B.weight)
    torch.manual_seed(5)
    found = layer(x)
    torch.manual_seed(5)
    expected = base + F.dropout(x, 0.5) @ a.T @ b.T * (4.0 / 2)
    assert torch.allclose(found, expected, atol=1e-5)
    with torch.no_grad():
        whole = layer(x)
    assert torch.allclose(whole, base + x @ a.T @ b.T * (4.0 / 2), atol=1e-5)
    assert not torch.allclose(found, whole, atol=0.1)


def test_a_recomputed_block_drops_the_same_inputs():
    found = []
    for recomputed in (False, True):
        adapted = adapted_layer()

        class Block(nn.Module):
            mlp = None

            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, hidden, **unused):
                return self.inner(hidden)

        unit = Blocks([Block(adapted)], recomputed)
        torch.manual_seed(4)
        unit(torch.randn(1, 50, 8), None, None, None).square().sum().backward()
        found.append(adapted.lora_A.weight.grad)
    assert torch.equal(*found)


def test_peft_loads_the_export_with_the_trainers_loss(run_folder, work):
    folder, out = work[0], run_folder / "hf"
    assert not (out / "config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(folder / "tied", dtype=torch.float32)
    plain = loss_of(base, folder)
    model = PeftModel.from_pretrained(base, out)
    assert model.peft_config["default"].base_model_name_or_path == str(folder / "tied")
    assert loss_of(model, folder) == pytest.approx(last_loss(run_folder), rel=1e-5)
    assert plain == pytest.approx(
        json.loads((run_folder / "summary.json").read_text())["eval_loss"]["0"], rel=1e-5
    )


def test_an_export_names_the_layers_that_have_adapters(tmp_path, monkeypatch):
    config = parity.MODELS["tied"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lora = lora_of(config, "q_proj,down_proj", rank=4)._replace(base={"path": "a/base"}).facts()
    wanted = factors_of(lora, {name: tuple(p.shape) for name, p in model.named_parameters()})

    def fill(checkpoint, tensors):
        for t in tensors.values():
            t.normal_()

    monkeypatch.setattr("llm_demo.export.read_tensors", fill)
    write_adapter(tmp_path, tmp_path, wanted, torch.float32, lora)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(written["target_modules"]) == ["down_proj", "q_proj"]
    model = PeftModel.from_pretrained(model, tmp_path)
    adapted = {ours(name) for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted == wanted.keys() and len(adapted) == 4 * 2 * 2


def test_adapters_are_written_by_peft(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="by peft, which is not installed: run setup.sh, or write"):
        export(at(run_folder, 4), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(at(run_folder, 4), tmp_path / "merged", merge=True)


def test_an_adapter_is_no_model(run_folder):
    with pytest.raises(UserError, match="holds an adapter, not a model: export its run with"):
        find_model(str(run_folder / "hf"))


def exported(*words):
    return run([sys.executable, "-m", "llm_demo.export", *words])


def test_merge_writes_the_whole_model(run_folder, work, tmp_path):
    folder = work[0]
    done = exported(run_folder, tmp_path / "out", "--merge", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert loss_of(model, folder) == pytest.approx(last_loss(run_folder), rel=1e-5)
    done = exported(run_folder, tmp_path / "other", "--merge", "--base", folder / "untied")
    assert done.returncode == 2 and "adapters of another base" in done.stderr
    assert not (tmp_path / "other").exists()


def test_an_adapter_names_a_base_that_was_checked(run_folder, work, tmp_path, monkeypatch):
    checkpoint = at(run_folder, 4)
    shutil.copytree(work[0] / "tied", tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    export(checkpoint, tmp_path / "out", base="moved")
    written = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "moved")
    for base, said in (
        (str(work[0] / "untied"), "holds adapters of another base than"),
        ("./absent", "no model at ./absent"),
    ):
        with pytest.raises(UserError, match=said):
            export(checkpoint, tmp_path / "other", base=base)
    monkeypatch.setattr("llm_demo.export.find_model", lambda _: find_model("./gone"))
    with pytest.raises(
        UserError, match="no model at ./gone: .*; if .* has moved, name it with --b"
    ):
        export(checkpoint, tmp_path / "other", merge=True)
    assert not (tmp_path / "other").exists()


def test_a_base_of_random_weights_is_known_by_its_seed(work, tmp_path):
    folder = work[0]
    shutil.copytree(folder / "tied", tmp_path / "bare")
    (tmp_path / "bare/model.safetensors").unlink()
    (tmp_path / "data.jsonl").write_text((folder / "data.jsonl").read_text())
    flags = run_flags(tmp_path, "bare", tmp_path / "run")
    torchrun(1, ROOT / "fsdp/train_fsdp.py", *flags)
    done = exported(tmp_path / "run", tmp_path / "out", "--merge", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert loss_of(model, folder) == pytest.approx(last_loss(tmp_path / "run"), rel=1e-5)
    again = run_flags(tmp_path, "bare", tmp_path / "b", "--resume", tmp_path / "run", "--seed", "9")
    done = run([sys.executable, ROOT / "fsdp/train_fsdp.py", *again, "--resume_anyway"])
    assert done.returncode == 2 and "seed was 3, is 9" in done.stderr


def test_a_digest_is_of_values_not_of_files(work, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(work[0] / "untied", dtype=torch.float32)
    model.save_pretrained(tmp_path / "same", max_shard_size="100KB")
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[-1, -1] += 1
    model.save_pretrained(tmp_path / "other")
    own, same, other = (
        open_weights(f).digest()
        for f in (work[0] / "untied", tmp_path / "same", tmp_path / "other")
    )
    assert len(list((tmp_path / "same").glob("*.safetensors"))) > 2
    assert own == same != other


def test_targets_are_in_the_models_order():
    assert lora_of(parity.MODELS["tied"], "down_proj, q_proj").targets == ("q_proj", "down_proj")


NO_DATA = ["--train_json", "absent.jsonl"]  # for what is refused before data is read
RESUMED = {
    "without": ([], ["--lora_rank", "0"], "holds adapters: resume with fsdp/train_fsdp.py and"),
    "rank": ([], ["--lora_rank", "8"], "holds other adapters: rank was 4, is 8"),
    "alpha": ([], ["--lora_alpha", "8"], "holds other adapters: alpha was 32.0, is 8.0"),
    "base": (["untied"], [], "holds adapters of another base: path was "),
}


@pytest.mark.parametrize("case", RESUMED)
def test_another_resume_is_refused(case, run_folder, work, tmp_path):
    model, more, said = RESUMED[case]
    model = model[0] if model else "tied"
    more = [*more, *NO_DATA]
    flags = run_flags(work[0], model, tmp_path / "run", "--resume", run_folder, *more)
    done = run([sys.executable, ROOT / "fsdp/train_fsdp.py", *flags])
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_adapters_do_not_continue_a_whole_model(work, tmp_path):
    flags = run_flags(work[0], "tied", tmp_path / "whole", "--lora_rank", "0", "--max_steps", "1")
    torchrun(1, ROOT / "fsdp/train_fsdp.py", *flags)
    more = ["--resume", tmp_path / "whole", *NO_DATA]
    again = run_flags(work[0], "tied", tmp_path / "run", *more)
    done = run([sys.executable, ROOT / "fsdp/train_fsdp.py", *again])
    assert done.returncode == 2 and "holds a whole model, no adapters" in done.stderr
    done = exported(tmp_path / "whole", tmp_path / "out", "--merge")
    assert done.returncode == 2 and "--merge: " in done.stderr and "no adapters" in done.stderr


# ---------------------------------------------------------------- bad input

BAD = {
    "no layer": (["--lora_targets="], "--lora_targets names no layer: choose from q_proj, k_p"),
    "missing layer": (
        ["--lora_targets", "q_proj,gate"],
        "'gate' can't be adapted in this model; choose from q_proj, ",
    ),
    "rank": (["--lora_rank", "65"], "--lora_rank 65 is larger than a side of model.layers.0."),
    "alpha alone": (["--lora_rank", "0", "--lora_alpha", "8"], "--lora_alpha needs --lora_rank"),
    "on the host": (["--optimizer_on_host"], "does not work with --optimizer_on_host"),
    "PowerSGD": (["--psgd_rank", "2", "--replicas", "all"], "does not work with --psgd_rank"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, work, tmp_path):
    more, said = BAD[case]
    flags = run_flags(work[0], "tied", tmp_path / "run", *more)
    done = run([sys.executable, ROOT / "fsdp/train_fsdp.py", *flags])
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- memory and FLOPs


def lora_of(config, targets="all-linear", rank=16):
    args = SimpleNamespace(lora_rank=rank, lora_alpha=32.0, lora_dropout=0.0, lora_targets=targets)
    return choose_lora(args, config, {})


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,down_proj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_with_adapters_keep_what_real_ones_keep(dtype, targets):
    config = mixed(mlp_only_layers=[0, 1, 2])
    lora = Lora(64, 32.0, 0.0, lora_of(parity.MODELS["tied"], targets).targets, 0, {})
    real = really_kept(config, "sdpa", dtype, 1, lora=lora)
    compute = Compute(dtype, "sdpa", compile=False, lora=lora)
    found = memory._saved_uncompiled(config, compute, SimpleNamespace(seq_len=128, single=True))
    assert found[1] == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("kind, targets", [
    ("qwen3_moe", "all-linear"), ("qwen2_moe", "down_proj"), ("deepseek_v3", "o_proj,gate_up_proj"),
])  # fmt: skip
def test_plain_blocks_keep_inputs_of_experts_adapters(kind, targets):
    lora, how = lora_of(KINDS[kind], targets, rank=64), torch.bfloat16
    real = really_kept(KINDS[kind], "sdpa", how, 1, lora=lora)
    compute = SimpleNamespace(dtype=how, attn_impl="sdpa", lora=lora)
    train = SimpleNamespace(seq_len=128, single=True)
    found = memory._saved_uncompiled(KINDS[kind], compute, train)
    assert found[1] == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    "block, targets",
    [
        *((0, targets) for targets in ("all-linear", "q_proj,down_proj")),
        *((1, targets) for targets in ("all-linear", "gate_up_proj")),
        *(
            pytest.param(1, targets, marks=pytest.mark.slow)
            for targets in ("q_proj,o_proj", "down_proj")
        ),
    ],
)
def test_compiled_blocks_with_adapters_keep_what_the_partitioner_keeps(block, targets):
    """Block 1 has experts."""
    config = mixed() if block else mixed(mlp_only_layers=[0, 1, 2])
    lora = lora_of(config, targets, rank=64)
    torch._dynamo.reset()  # it gives up compiling a function that has been compiled often
    real = really_kept(config, "sdpa", torch.bfloat16, block, compiled=True, lora=lora)
    args = args_with()
    compute = Compute(torch.bfloat16, "sdpa", compile=True, lora=lora)
    found = memory.saved_bytes(args, config, compute, SimpleNamespace(single=True))
    assert found[block] == pytest.approx(real, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all-linear", "o_proj", "gate_up_proj"])
@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3"])
def test_compiled_blocks_of_other_mixtures_keep_them_too(kind, targets):
    lora, how = lora_of(KINDS[kind], targets, rank=64), torch.bfloat16
    args = SimpleNamespace(use_activation_checkpointing=False, activation_memory_budget=1.0)
    compute = SimpleNamespace(dtype=how, attn_impl="sdpa", compile=True, lora=lora)
    found = memory.saved_bytes(args, KINDS[kind], compute, SimpleNamespace(single=True))
    for block in (0, 1):  # a dense one, whose network is frozen
        torch._dynamo.reset()
        real = really_kept(KINDS[kind], "sdpa", how, block, compiled=True, lora=lora)
        assert found[block] == pytest.approx(real, rel=0.05)


def test_a_frozen_8b_takes_two_bytes_a_weight():
    config = load_config(ROOT / "models/qwen3-8b", 1024)
    lora = lora_of(config)
    d, inner, kv = 4096, 12288, 1024  # by hand: q, k, v, o; gate, up, down
    widths = [2 * d, d + kv, d + kv, 2 * d, d + inner, d + inner, d + inner]
    assert lora.parameters == 36 * 16 * sum(widths) == 43_646_976
    train = SimpleNamespace(seq_len=1024, single=True)
    args = args_with(
        micro_batch_size=4, grad_accum_steps=1, blocks_per_unit=0, psgd_rank=0,
        use_activation_checkpointing=True, activation_memory_budget=1.0,
        reshard_after_forward=False, optimizer_on_host=False,
    )  # fmt: skip
    compute = Compute(torch.bfloat16, "varlen", compile=True, lora=lora)
    (parts,) = estimate.of_fsdp(args, config, compute, train, 1, False)
    total, own = 8_190_427_136, lora.parameters  # without norms
    assert parts["weights"] == pytest.approx((2 * total + 4 * own) / 2**30, rel=1e-6)
    assert parts["optimizer"] == pytest.approx(8 * own / 2**30)
    assert parts["loss"] == pytest.approx(4096 * 151_936 * 2 / 2**30)  # only the logits
    assert sum(parts.values()) < 22
    shards = estimate.of_fsdp(args, config, compute, train, 2, True)
    gathered = 2 * total + 2 * own
    assert shards[0]["weights"] == pytest.approx((total + 2 * own + gathered) / 2**30, rel=1e-6)


def test_flops_leave_out_the_gradients_of_frozen_weights():
    config = load_config(ROOT / "models/qwen3-8b", 1024)
    weights = 8_190_427_136 - 151_936 * 4096  # the embedding is no product
    attention = 36 * 12 * 32 * 128 * 1024
    assert flops_of_slot(config, 1024) == 6 * weights + attention
    assert flops_of_slot(config, 1024, 1000) == 4 * weights + attention + 6000


def test_adapters_on_experts_are_counted():
    """By hand, for Qwen3-30B-A3B: 48 blocks of 128 experts, of which a token uses 8."""
    config = load_config(ROOT / "models/qwen3-30b-a3b-6l", 1024)
    lora, blocks = lora_of(config), config.num_hidden_layers
    attention = (2048 + 4096) * 2 + (2048 + 512) * 2
    expert = (2048 + 1536) + (768 + 2048)
    assert experts_of(config) == 128 and config.num_experts_per_tok == 8
    assert lora.parameters == blocks * 16 * (attention + 128 * expert)
    assert lora.routed == blocks * 16 * 128 * expert
    assert lora.active == blocks * 16 * (attention + 8 * expert)
    args = SimpleNamespace(
        micro_batch_size=1, grad_accum_steps=2, blocks_per_unit=0, psgd_rank=0,
        use_activation_checkpointing=True, activation_memory_budget=1.0, sequence_parallel=1,
        reshard_after_forward=False, optimizer_on_host=False, activations_on_host=False,
    )  # fmt: skip
    train = SimpleNamespace(seq_len=1024, single=True)
    compute = Compute(torch.bfloat16, "varlen", True, lora=lora)
    one, two = (
        estimate.of_fsdp(args, config, compute, train, 2, True, spread)[0] for spread in (1, 2)
    )
    assert one["optimizer"] == two["optimizer"] == pytest.approx(4 * lora.parameters / 2**30)
    frozen = sum(block.routed for block in block_costs(config, 0))
    gathered = 2 * (frozen + lora.routed) / 2  # in 16 bits, the half that is not here
    assert one["weights"] - two["weights"] == pytest.approx(gathered / 2**30)
    assert one["gradients"] - two["gradients"] == pytest.approx(4 * lora.routed / 2 / 2**30)
