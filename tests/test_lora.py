"""Adapters: the trainer's numbers against PEFT's own LoRA in a plain loop, one document at a time
in one process; and the files of checkpoints and exports."""

import json
import re
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import test_parity as parity
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    assert_same_tensors,
    refused,
    run,
    slow,
    torchrun,
    train_cases,
)
from peft import LoraConfig, PeftModel, get_peft_model
from test_parity import assert_equal, plain_loop, train
from tiny_tokenizer import packs_of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from bench.checkpoints import tensors
from fsdp.pieces import go_in_pieces, use_pieces
from llm_demo.core.decoder import Blocks
from llm_demo.core.errors import UserError
from llm_demo.model.adapters import choose_lora, peft_targets
from llm_demo.model.weights_files import open_weights, refuse_other_adapters
from llm_demo.options import lora
from llm_demo.options.four_bits import FourBits
from llm_demo.options.four_bits_library import quantised
from llm_demo.options.fp8 import RecipeLinear
from llm_demo.options.lora import Factor, Lora, LoraLinear, factors_of
from llm_demo.run.export_run import export

RANK, ALPHA = 6, 32  # a rank that no number of processes divides
TARGETS = {"tied": "all-linear", "untied": "q_proj,down_proj", "llama": "all-linear"}
PACKED = {"tied": True, "untied": True, "llama": False}
EXPERTS = 8  # of a model with experts
# whose first gradients have no element that is nearly zero: AdamW would move it by rounding
SEEDS = {"tied": 1, "untied": 0, "llama": 5}
RESHARD = ["--reshard_after_forward"]
ENGINES = {  # (script, processes, further flags, (micro, accumulation) for each model)
    "plain": ("fsdp", 1, ["--no_fsdp"], [(8, 1), (4, 2), (2, 4)]),
    "two": ("fsdp", 2, [], [(1, 4), (4, 1), (2, 2)]),
    "two_shares": ("fsdp", 2, ["--tensor_parallel", "2"], [(2, 4), (8, 1), (4, 2)]),
    "two_reshard": ("fsdp", 2, RESHARD, [(4, 1), (2, 2), (1, 4)]),
    "four": ("fsdp", 4, RESHARD, [(1, 2), (2, 1), (2, 1)]),
    "replicas": ("fsdp", 4, ["--replicas", "2"], [(2, 1), (1, 2), (1, 2)]),
    "stages": ("fsdp_pp", 2, ["--blocks_per_unit", "1"], [(2, 4), (4, 2), (1, 8)]),
    "v": ("fsdp_pp", 2, ["--schedule", "v"], [(1, 8), (2, 4), (4, 2)]),
    "gpipe": ("fsdp_pp", 2, ["--schedule", "gpipe"], [(4, 2), (1, 8), (2, 4)]),
    "interleaved": ("fsdp_pp", 2, ["--schedule", "interleaved"], [(2, 4), (4, 2), (1, 8)]),
    "grid": ("fsdp_pp", 4, [], [(1, 4), (2, 2), (4, 1)]),
    "grid_v": ("fsdp_pp", 4, ["--schedule", "v", *RESHARD], [(2, 2), (1, 4), (1, 4)]),
    "grid_gpipe": ("fsdp_pp", 4, ["--schedule", "gpipe"], [(2, 2), (1, 4), (2, 2)]),
    "grid_twice": ("fsdp_pp", 4, ["--schedule", "interleaved"], [(1, 4), (2, 2), (2, 2)]),
    "grid_shares": ("fsdp_pp", 4, ["--tensor_parallel", "2"], [(2, 4), (4, 2), (8, 1)]),
}
RECOMPUTED = (
    "plain-tied two-untied two_reshard-tied four-llama stages-tied v-untied gpipe-llama grid-tied "
    "grid_v-untied"
).split()


def ours(name: str) -> str:
    """The name of a PEFT model's parameter in the trainer."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def lora_of(config, targets="all-linear", rank=16):
    how = {"lora_alpha": 32.0, "lora_dropout": 0.0, "base_bits": 16}
    args = SimpleNamespace(lora_rank=rank, lora_targets=targets, **how)
    return choose_lora(args, config, {})


def with_peft(folder, name, targets=None):
    """PEFT's own model, whose factors start as the trainer's do. targets: of a mixture."""
    base = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    how = {"target_modules": targets or TARGETS[name]}
    if targets:
        base.config._experts_implementation = "eager"
        facts = lora_of(base.config, targets, RANK).facts()
        shapes = {name: tuple(p.shape) for name, p in base.named_parameters()}
        factors = factors_of(facts, shapes)
        how["target_modules"], how["target_parameters"] = peft_targets(factors)
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
    models, tokenizer = parity.smaller_vocabulary(parity.MODELS, folder / "tokenizer")
    parity.write_rows(folder / "data.jsonl")
    data, results = str(folder / "data.jsonl"), {}
    for name, config in models.items():
        torch.manual_seed(SEEDS[name])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        packs = packs_of(data, tokenizer, seq_len=parity.SEQ_LEN, pack=PACKED[name])
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
        assert torch.equal(mine, mine.bfloat16().float())  # a bf16 run starts from the same
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


QUICK = ("plain", "two", "stages", "v")
LAUNCHES = ("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("fsdp_pp", 2), ("fsdp_pp", 4)


@pytest.mark.parametrize("kind, processes, quick", [
    *((*launch, True) for launch in LAUNCHES if launch[1] < 4),
    *(slow(*launch, False) for launch in LAUNCHES if launch[1] > 1),
])  # fmt: skip
def test_equals_peft(kind, processes, quick, work):
    folder, expected = work
    cases = {}
    for engine, (script, n, more, splits) in ENGINES.items():
        if (script, n) != (kind, processes) or quick != (engine in QUICK):
            continue
        for name, (micro, accum) in zip(parity.MODELS, splits, strict=True):
            case = f"{engine}-{name}"
            recomputed = str(case in RECOMPUTED)
            also = [*more, *flags(name), "--use_activation_checkpointing", recomputed]
            cases[case] = parity.argv(folder, name, micro, accum, *also)
        for dtype in parity.BOUNDS if processes < 4 else ():
            case, (micro, accum) = f"{engine}-{dtype}", splits[0]
            also = [*more, *flags("tied"), "--dtype", dtype]
            cases[case] = parity.argv(folder, "tied", micro, accum, *also)
    for case, (losses, ranks) in train(folder, kind, processes, cases).items():
        _, name = case.split("-")
        if name in expected:
            assert_equal(losses, ranks, expected[name])
            continue
        rough, loose = parity.BOUNDS[name]
        assert losses == pytest.approx(expected["tied"]["loss"], rel=rough)
        for rank in ranks:
            norms = [step["norm"] for step in rank["steps"]]
            assert norms == pytest.approx(expected["tied"]["norm"], rel=loose)
        names = {name for rank in ranks for name in rank["params"]}
        assert names == expected["tied"]["params"].keys()


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
    packs = packs_of(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN, pack=False)
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
    one = assert_same_tensors(at(run_folder, 4), at(again, 4))
    assert len(one) == 4 * 7 * 2 * 3  # blocks, layers, A and B
    assert all(".lora_" in name for name in one)
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
        cases[case] = [*parity.argv(folder, "tied", 8, 1, *more), "--seed", seed]
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


@pytest.mark.parametrize("bits, trains", [(16, True), (16, False), (4, True)])
def test_large_results_exist_once(bits, trains):
    """The same values and gradients as of two results that are added; no gradient that nobody
    asks for."""
    torch.manual_seed(3)
    base = nn.Linear(64, 96, bias=bits == 16).requires_grad_(False)
    if bits == 4:
        stored = quantised(base.weight)
        recipe = FourBits(base, "weight", torch.float32, read=lambda: stored).to_empty(device="cpu")
        base.weight = nn.Parameter(recipe.stored(), requires_grad=False)
        base = RecipeLinear(base, recipe)
    layer = LoraLinear(base, Lora(2, 4.0, 0.0, ("x",), 0, {}))
    Blocks([layer], checkpointing=True)
    for factor in (layer.lora_A, layer.lora_B):
        factor.to_empty(device="cpu").weight.data.normal_()
    found, x, in_one = {}, torch.randn(2, 5, 64), LoraLinear._in_one
    for large in (1, 10 * 96, 10 * 96 + 1):
        hidden = x.clone().requires_grad_(trains)
        counted = mock.patch.object(LoraLinear, "_in_one", autospec=True, side_effect=in_one)
        with mock.patch.object(lora, "LARGE_RESULT", large), counted as called:
            out = layer(hidden)
        assert called.call_count == (large <= 10 * 96)
        out.square().sum().backward()
        found[large] = [out, *(p.grad for p in layer.parameters() if p.requires_grad)]
        found[large] += [hidden.grad] * trains
        layer.zero_grad()
    assert len(found[1]) == 3 + trains
    for one, two in zip(found[1], found[10 * 96 + 1], strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-4)


class Network(nn.Module):
    """A block that is a feed-forward network and nothing else."""

    def __init__(self, layer):
        super().__init__()
        self.mlp = layer

    def forward(self, hidden, **unused):
        return self.mlp(hidden)


def gradient_of(layer, recomputed: bool, hidden) -> torch.Tensor:
    torch.manual_seed(4)
    use_pieces(unit := Blocks([Network(layer)], recomputed))
    unit(hidden, None, None, None).square().sum().backward()
    return layer.lora_A.weight.grad


def test_a_recomputed_block_drops_the_same_inputs():
    hidden = torch.randn(1, 50, 8)
    found = [gradient_of(adapted_layer(), recomputed, hidden) for recomputed in (False, True)]
    assert torch.equal(*found)


def test_long_rows_go_through_a_network_in_pieces(monkeypatch):
    """Over a frozen base; in the backward too. What the parts of a piece add up to is the same."""
    hidden, rows = torch.randn(2, 50, 8), []
    monkeypatch.setattr("fsdp.pieces.PIECE", 30)
    monkeypatch.setattr("fsdp.pieces.LONG", 60)
    found = []
    for recomputed in (False, True):
        layer = adapted_layer()
        layer.dropout = 0
        layer.lora_B.register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
        found.append(gradient_of(layer, recomputed, hidden))
    assert torch.allclose(*found, rtol=1e-5)
    assert rows[0] == 2 and max(rows[1:]) == 30  # whole rows; then at most a piece at a time


def test_a_frozen_norm_keeps_only_the_input_of_long_rows(monkeypatch):
    """The same bits: each token is computed alone."""
    monkeypatch.setattr("fsdp.pieces.PIECE", 30)
    torch.manual_seed(3)
    hidden, found, kept = torch.randn(2, 50, 8), [], []
    for long in (200, 60):
        monkeypatch.setattr("fsdp.pieces.LONG", long)
        go_in_pieces(norm := Qwen3RMSNorm(8).requires_grad_(False))
        x, sizes = hidden.clone().requires_grad_(), []
        with saved_tensors_hooks(lambda t, n=sizes: n.append(t.numel()) or t, lambda t: t):
            out = norm(x)
        out.square().sum().backward()
        found.append((out, x.grad))
        kept.append(sum(sizes))
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    assert kept[0] > 2 * hidden.numel() and kept[1] == hidden.numel()


def test_peft_loads_the_export_with_the_trainers_loss(run_folder, work):
    folder, out = work[0], run_folder / "hf"
    assert not (out / "config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(folder / "tied", dtype=torch.float32)
    plain = loss_of(base, folder)
    model = PeftModel.from_pretrained(base, out)
    assert model.peft_config["default"].base_model_name_or_path == str(folder / "tied")
    assert loss_of(model, folder) == pytest.approx(last_loss(run_folder), rel=1e-5)
    measured = json.loads((run_folder / "summary.json").read_text())["eval_loss"]
    assert plain == pytest.approx(measured["0"], rel=1e-5)


def exported(*words):
    return run([sys.executable, "-m", "llm_demo.export", *words])


def test_a_run_goes_through_stages_and_back(work, tmp_path):
    """fsdp, a pipeline, fsdp: as fsdp alone. What a pipeline ends with is exported alike."""
    folder, more = work[0], ["--save_every", "1"]
    train_cases(folder, "fsdp", 2, {"alone": run_flags(folder, "tied", "", *more)})
    more += ["--resume", at(folder / "alone", 1), "--schedule", "v", "--micro_batch_size", "8"]
    train_cases(folder, "fsdp_pp", 2, {
        "staged": run_flags(folder, "tied", "", *more, "--export", "fp32"),
    })  # fmt: skip
    more = "--resume", at(folder / "staged", 2)
    train_cases(folder, "fsdp", 2, {"back": run_flags(folder, "tied", "", *more)})
    wanted = tensors(at(folder / "alone", 4))
    for name in ("staged", "back"):
        found = tensors(at(folder / name, 4))
        assert found.keys() == wanted.keys()
        for key, t in wanted.items():
            assert parity.relative(found[key], t) < 1e-3, (name, key)
        assert last_loss(folder / name) == pytest.approx(last_loss(folder / "alone"), rel=1e-5)
    said = (folder / "staged/train.log").read_text()
    line = r"v pipeline of 2 stages: [\d,]+ frozen parameters, [\d,]+ trained in adapters, "
    assert re.search(line, said)
    base = AutoModelForCausalLM.from_pretrained(folder / "tied", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, folder / "staged/hf")
    assert loss_of(adapted, folder) == pytest.approx(last_loss(folder / "staged"), rel=1e-5)
    export(at(folder / "staged", 4), tmp_path / "merged", "fp32", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert loss_of(merged, folder) == pytest.approx(last_loss(folder / "staged"), rel=1e-5)


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
    assert not (tmp_path / "other").exists()


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


def test_a_resumed_run_that_does_not_go_on_with_them_is_refused(run_folder, work, tmp_path):
    more = "--resume", run_folder, "--lora_rank", "0"
    flags = run_flags(work[0], "tied", tmp_path / "run", *map(str, more))
    done = run([sys.executable, ROOT / "fsdp/train_fsdp.py", *flags])
    said = "holds adapters: resume with fsdp/train_fsdp.py or fsdp_pp/train_fsdp_pp.py and"
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()
    same = json.loads((at(run_folder, 4) / "trainer.json").read_text())["adapters"]
    base = {"path": "a", "weights": "random", "seed": 3}
    for before, now, said in (
        (same, same | {"base": same["base"] | {"path": "moved"}}, None),
        (None, same, "holds a whole model, no adapters"),
        (same, same | {"rank": 8}, "rank was 4, is 8"),
        (same, same | {"alpha": 8.0}, "alpha was 32.0, is 8.0"),
        (same, same | {"base": base}, "base weights was "),
        (same | {"base": base}, same | {"base": base | {"seed": 9}}, "base seed was 3, is 9"),
        (same, same | {"base": same["base"] | {"bits": 4}}, "base bits was None, is 4"),
    ):
        if said is None:
            refuse_other_adapters(run_folder, before, now)
            continue
        with refused(said):
            refuse_other_adapters(run_folder, before, now)


def test_a_base_without_weights_takes_no_adapters(run_folder, work, tmp_path):
    shutil.copytree(work[0] / "tied", tmp_path / "bare")
    (tmp_path / "bare/model.safetensors").unlink()
    with refused("bare, the adapters' base, has no weights"):
        export(at(run_folder, 4), tmp_path / "out", merge=True, base=str(tmp_path / "bare"))
