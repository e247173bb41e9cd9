"""One process trains the plain model: no FSDP2, its numbers, less memory. And what holds it: fp32
masters that are flat tensors, one or two for each unit."""

import json

import pytest
import torch
from conftest import ROOT, TINY, logged, run_alone
from torch import nn

from bench.checkpoints import tensors
from fsdp.fsdp2 import autograd_accumulates
from llm_demo.core import optim
from llm_demo.core.masters import Masters
from llm_demo.core.optim import LossScale, clipped_step, halve, join, make_adamw

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEPT = ("train/loss", "train/grad_norm", "train/lr")


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains in this process: train(name, *flags) -> losses and norms of each step."""
    import fsdp.train_fsdp as script

    lines = (ROOT / "data/sft_en.jsonl").read_text().splitlines()
    (tmp_path / "data.jsonl").write_text("\n".join(lines[:60]))
    # two blocks and short rows: CPUs are slow in bf16
    config = json.loads((TINY / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": None}
    # a tied weight has two gradients, which autograd adds in fp32 for this FSDP2, else in bf16
    config["tie_word_embeddings"] = not autograd_accumulates()
    (tmp_path / "config.json").write_text(json.dumps(config))

    def train(name, *flags):
        out = tmp_path / name
        argv = [
            "--model_name_or_path", tmp_path, "--tokenizer_name_or_path", TINY,
            "--train_json", tmp_path / "data.jsonl",
            "--eval_json", "none", "--seq_len", 32, "--max_steps", 4, "--blocks_per_unit", 1,
            "--sample_tokens", 0, "--lr", 1e-3, "--warmup_steps", 2, "--output_dir", out,
            "--micro_batch_size", 1, "--save_every", 2, "--keep_last", 0, *flags,
        ]  # fmt: skip
        run_alone(monkeypatch, script, *argv)
        return {x["step"]: [x[k] for k in KEPT] for x in logged(out)}

    return train


@pytest.mark.skipif(HERE.type == "cuda", reason="a GPU's sums are not the same each time")
@pytest.mark.parametrize("accum", [1, 2])
def test_one_process_takes_the_plain_path_and_fsdp2s_numbers(accum, train, tmp_path, capsys):
    """To the bit, on a CPU; and either goes on where the other stopped."""
    flags = ["--dtype", "bf16", "--grad_accum_steps", accum]
    plain = train("plain", *flags)
    assert "one plain process" in capsys.readouterr().out
    sharded = train("sharded", "--fsdp", *flags)
    for name, is_sharded in (("plain", False), ("sharded", True)):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["fsdp"] == is_sharded
        assert (config["parallelism"] == "one process") != is_sharded
    assert plain == sharded
    folders = ["plain", "sharded"]
    if accum > 1:
        middle = "checkpoints/step_00000002"
        again = train("again", *flags, "--resume", tmp_path / "sharded" / middle)
        back = train("back", "--fsdp", *flags, "--resume", tmp_path / "plain" / middle)
        assert again == back == {step: plain[step] for step in (3, 4)}
        folders += ["again", "back"]
    found = [tensors(tmp_path / name / "checkpoints/step_00000004") for name in folders]
    for name, t in found[0].items():
        assert all(torch.equal(t, other[name]) for other in found[1:]), name


@pytest.mark.gpu
@pytest.mark.skipif(HERE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("accum", [1, 2])
def test_on_a_gpu_both_ways_learn_alike(accum, train, tmp_path):
    """Compiled: bf16 weights as half of their masters."""
    flags = ["--dtype", "bf16", "--grad_accum_steps", accum, "--seq_len", 256]
    plain = train("plain", *flags)
    sharded = train("sharded", "--fsdp", *flags)
    middle = tmp_path / "plain/checkpoints/step_00000002"
    again = train("again", *flags, "--resume", middle)
    for step, (loss, norm, _) in sharded.items():
        assert plain[step][0] == pytest.approx(loss, rel=2e-3)
        assert plain[step][1] == pytest.approx(norm, rel=2e-2)
    for step, found in again.items():
        assert found == pytest.approx(plain[step], rel=2e-3)


def small_model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = (nn.Linear(6, 5), nn.LayerNorm(5)), (nn.Linear(5, 4), nn.LayerNorm(4))
    return nn.Sequential(*(nn.Sequential(*unit) for unit in layers), nn.Linear(4, 1)).to(dtype)


@pytest.fixture(params=[False, True], ids=["fused", "compiled"])
def compiled(request, monkeypatch):
    """Whether AdamW is compiled; on a CPU, where that takes 20 s of C++, what would be compiled."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(optim, "compile_once", lambda function: function)
        monkeypatch.setattr("llm_demo.core.masters.compile_once", lambda function: function)
    monkeypatch.setattr(optim.CompiledAdamW, "LARGE", 20)
    monkeypatch.setattr(optim.CompiledAdamW, "SLICE", 12)
    return request.param


def masters_of(
    model, dtype, accumulates, compiled, lr=1e-3, weight_decay=0.1, moments=torch.float32
):
    masters = Masters(model, list(model)[:2], dtype, accumulates, compiled)
    optimizer = make_adamw(masters.params, lr, weight_decay, compiled, moments)
    masters.follow(optimizer)
    optim.fill_adam_state(optimizer, 0)
    return masters, optimizer


def fp32(masters, optimizer):
    return {p: master.clone() for p, master, *_ in masters.views(optimizer)}


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_masters_take_the_steps_of_adamw_in_fp32(micro_batches, dtype, moments, compiled):
    """Far below the resolution of bf16; and only matrices decay."""
    model = small_model().to(HERE)
    shapes = [p.shape for p in model.parameters()]
    plain = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    how = {"lr": 1e-5, "moments": moments}
    masters, optimizer = masters_of(model, dtype, micro_batches > 1, compiled, **how)
    reference = make_adamw(plain, 1e-5, 0.1, moments=moments)
    assert masters.halves == (compiled and dtype == torch.bfloat16)
    assert len(masters.params) == 2 * 3  # two units and the rest: matrices, and all else
    for _ in range(3):
        for p in plain:
            p.grad = torch.zeros_like(p)
        for k in range(micro_batches):
            model(torch.randn(7, 6, dtype=dtype, device=HERE)).sum().backward()
            for p, q in zip(model.parameters(), plain, strict=True):
                q.grad += p.grad.float()
            masters.take_grads(last=k == micro_batches - 1)
        assert all(group.sums is None for group in masters.groups)  # they would keep the memory
        assert all(p.grad is None for p in model.parameters())
        scale = LossScale(torch.bfloat16, HERE)
        norms = [clipped_step(each, 1.0, scale) for each in (optimizer, reference)]
        assert norms[0] == norms[1]
    found = fp32(masters, optimizer)
    assert all(t.dtype == moments for view in masters.views(optimizer) for t in view[2:])
    assert [p.shape for p in model.parameters()] == shapes
    for p, q in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(found[p], q.detach(), rtol=6e-7, atol=1e-7)
        assert torch.equal(p, found[p].to(dtype)) and not torch.equal(found[p], p.float())


def test_masters_sum_gradients_in_fp32(compiled):
    """1 + 1/512 has no bf16."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).to(HERE)
    masters, _ = masters_of(model, torch.bfloat16, True, compiled)
    for x in (1.0, 1 / 512):
        model(torch.tensor([[x]], dtype=torch.bfloat16, device=HERE)).sum().backward()
        masters.take_grads(last=x < 1)
    assert masters.params[0].grad.item() == 1 + 1 / 512


def test_a_skipped_step_changes_nothing(compiled):
    model = small_model().to(HERE)
    masters, optimizer = masters_of(model, torch.bfloat16, False, compiled)
    before = [group.fp32().clone() for group in masters.groups]
    model(torch.full((7, 6), torch.inf, dtype=torch.bfloat16, device=HERE)).sum().backward()
    masters.take_grads(True)
    assert not clipped_step(optimizer, 1.0, LossScale(torch.bfloat16, HERE)).isfinite()
    after = [group.fp32() for group in masters.groups]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_tied_weight_has_one_master():
    model = small_model()
    model[1][0].weight = model[0][0].weight = nn.Parameter(torch.ones(5, 6))
    masters, _ = masters_of(model, torch.bfloat16, False, False)
    assert sum(m.numel() for m in masters.params) == sum(p.numel() for p in model.parameters())
    assert model[1][0].weight is model[0][0].weight


def test_halves_of_an_fp32_make_it_again():
    bits = torch.randint(-(2**31), 2**31, (100_000,)).to(torch.int32)
    few = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x18000, 0x3F800000, 0x3F808000, 0x3F818000]
    few += [0x7F7FFFFF, 0x7F800000, 0x00000001, 0x807FFFFF]
    few = torch.tensor([x - (x >> 31 << 32) for x in few], dtype=torch.int32)
    master = torch.cat([bits, few]).view(torch.float32)
    master = master[~master.isnan()]
    weights, low = halve(master)
    assert weights.dtype == torch.bfloat16 and low.dtype == torch.int16
    assert torch.equal(weights, master.bfloat16())
    again = join(weights, low)
    off = master.view(torch.int32) - again.view(torch.int32)
    tie = master.view(torch.int32) & 0x1FFFF == 0x8000  # half of these: to the even one below
    assert torch.equal(off, tie.int())
    assert torch.equal(torch.cat(halve(again)[:1]), weights) and torch.equal(halve(again)[1], low)
