import contextlib
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.host_adamw import HostAdamW, UnitSum
from llm_demo.core import optim
from llm_demo.core.optim import MOMENTS, LossScale, clipped_step, global_norm, lr_at, make_adamw
from llm_demo.flags.args import TrainArgs
from llm_demo.flags.parsing import literals
from llm_demo.run.choices import compiles_adamw

CPU, BF16 = torch.device("cpu"), torch.bfloat16
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1))


LR_SCHEDULERS = literals(TrainArgs, "lr_scheduler")


@pytest.mark.parametrize("lr_scheduler", LR_SCHEDULERS)
def test_learning_rate(lr_scheduler):
    lrs = [lr_at(step, 1.0, 4, 20, lr_scheduler) for step in range(20)]
    assert lrs[:4] == [0.25, 0.5, 0.75, 1.0]
    assert lrs[-1] == pytest.approx(1.0 if lr_scheduler == "constant" else 0.1)
    assert all(a >= b for a, b in zip(lrs[3:], lrs[4:], strict=False))
    if lr_scheduler == "cosine":
        assert lrs[11] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert lr_at(0, 1.0, 0, 1, lr_scheduler) == pytest.approx(lrs[-1])


def test_each_lr_scheduler_of_the_flag_is_another_curve():
    curves = {tuple(lr_at(step, 1.0, 4, 20, name) for step in range(20)) for name in LR_SCHEDULERS}
    assert len(curves) == len(LR_SCHEDULERS)


@pytest.mark.parametrize("step", [0, 10])
def test_an_unknown_lr_scheduler_is_an_error(step):
    """Not linear decay; in the warm-up, too."""
    with pytest.raises(ValueError, match="wsd"):
        lr_at(step, 1.0, 4, 20, "wsd")


def test_compiled_where_it_pays_and_said_so():
    compiled, lines = compiles_adamw(True, 8_190_735_360, 8)
    assert compiled and lines[0].startswith("adamw: compiled")
    assert compiles_adamw(True, 596_049_920, 1, flat=True)[0]
    assert compiles_adamw(True, 8_190_735_360, 9) == (False, [])
    assert compiles_adamw(True, 596_049_920, 1) == (False, [])
    assert compiles_adamw(False, 8_190_735_360, 8) == (False, [])


@pytest.fixture(params=[False, True], ids=["fused", "compiled"])
def compiled(request, monkeypatch):
    """Whether AdamW is compiled; on a CPU, where that takes 20 s of C++, what would be compiled."""
    small = (  # parameters have 30, 5, 5, 5, 5 and 1 elements
        (optim.CompiledAdamW, "LARGE", 5),
        (optim.CompiledAdamW, "SLICE", 12),
        (optim, "WIDE", 7),
    )
    for owner, name, value in small:
        monkeypatch.setattr(owner, name, value)
    with torch.compiler.set_stance("default" if torch.cuda.is_available() else "force_eager"):
        yield request.param


class Made(TorchDispatchMode):
    """Notes the sizes of tensors that are made, and the dtypes that each norm is of."""

    def __init__(self):
        super().__init__()
        self.sizes, self.of_norms = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._foreach_norm:
            self.of_norms.append({t.dtype for t in args[0]})
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func._schema.returns[0].alias_info:
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
def test_clipped_step_equals_torch(clip, dtype, compiled):
    """In parameters and moments: AdamW's updates alone hardly show by what gradients are scaled."""
    mine, plain = small_model().to(HERE), small_model().to(HERE)
    x = torch.randn(7, 6, device=HERE)
    ours = make_adamw(mine.parameters(), 1e-2, 0.1, compiled)
    theirs = torch.optim.AdamW(
        [{"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.1},
         {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95),
    )  # fmt: skip
    loss_scale = LossScale(dtype, HERE)
    assert loss_scale.scale == (2**16 if dtype == torch.float16 else 1)
    for step in range(3):
        for group in (*ours.param_groups, *theirs.param_groups):
            group["lr"] = 1e-2 / (step + 1)
        (mine(x).square().sum() * loss_scale.scale).backward()
        plain(x).square().sum().backward()
        norm = clipped_step(ours, clip, loss_scale)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf)
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(norm, expected)
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        for name in MOMENTS:  # relative: of small gradients, too
            moment, true = ours.state[a][name], theirs.state[b][name]
            torch.testing.assert_close(moment, true, rtol=1e-4, atol=1e-6 * true.abs().max().item())


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_bf16_moments_are_those_of_an_adamw_that_rounds_them_after_each_step(clip, compiled):
    mine, plain = small_model().to(HERE), small_model().to(HERE)
    x = torch.randn(7, 6, device=HERE)
    ours = make_adamw(mine.parameters(), 1e-2, 0.1, compiled, torch.bfloat16)
    theirs = make_adamw(plain.parameters(), 1e-2, 0.1)
    for step in range(5):
        for model, optimizer in ((mine, ours), (plain, theirs)):
            model(x).square().sum().backward()
            clipped_step(optimizer, clip, LossScale(torch.float32, HERE))
        for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            assert ours.state[a]["step"] == step + 1
            for name in MOMENTS:
                moment, true = ours.state[a][name], theirs.state[b][name]
                assert moment.dtype == torch.bfloat16
                true.copy_(true.bfloat16())
                # to the bit, but for what lies between two values of bf16
                torch.testing.assert_close(moment.float(), true, rtol=2**-7, atol=1e-12)
                assert (moment == true).float().mean() >= 0.8


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_a_step_takes_memory_for_a_slice_only(moments, compiled):
    """Not for a whole parameter, and fp32 copies of bf16 moments not for all parameters. What is
    compiled is tried out on copies: of 4 billion elements they would be 50 GB."""
    matrix = nn.Parameter(torch.zeros(10, 10, device=HERE))
    optimizer = make_adamw([matrix], 1e-3, 0.1, compiled, moments)
    for _ in range(2):
        matrix.grad = torch.ones_like(matrix)
        with Made() as made:
            optimizer.step()
    assert max(made.sizes, default=0) <= 2 * 12


def test_bf16_moments_need_a_second_moment_that_decays(monkeypatch):
    """With beta2 0.999 it stays, as this shows; AdamW on the host asks the same."""
    v = torch.ones(3, dtype=torch.bfloat16)
    assert torch.equal((v.float() * 0.999).bfloat16(), v)
    assert optim.BETAS[1] <= optim.LARGEST_BETA2
    monkeypatch.setattr(optim, "BETAS", (0.9, 0.999))
    for dtype, refused in ((torch.bfloat16, True), (torch.float32, False)):
        for make in (make_adamw, HostAdamW):
            unit = UnitSum(nn.Module(), [nn.Parameter(torch.zeros(3))], [3], compiles=False)
            model = [unit] if make is HostAdamW else unit.params
            raises = pytest.raises(ValueError, match="beta2 <= 0.99, not 0.999")
            with raises if refused else contextlib.nullcontext():
                make(model, 1e-3, 0.1, moments=dtype)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_non_finite_norm_skips_the_step(dtype, bad, compiled):
    model = small_model().to(HERE)
    optimizer = make_adamw(model.parameters(), 1e-2, 0.1, compiled, dtype)
    scale = LossScale(torch.float16, HERE)
    model(torch.randn(7, 6, device=HERE)).sum().backward()
    clipped_step(optimizer, 1.0, scale)
    before = [p.clone() for p in model.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    model(torch.randn(7, 6, device=HERE)).sum().backward()
    model[0].weight.grad[0, 0] = bad
    assert not clipped_step(optimizer, 1.0, scale).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    kept = [s["exp_avg"] for s in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, kept, strict=True))
    assert all(s["step"] == 1 for s in optimizer.state.values())
    assert scale.scale == 2.0**15
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("compiled", [True], indirect=True)
def test_a_small_rate_decays_by_its_share(compiled):
    """1 - 9.2e-8 is not in fp32: 1 - 1.2e-7 is, and would decay by a third more."""
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.rand(20, 20, device=HERE) + 1)
    optimizer = make_adamw([matrix], 9.2e-6, 0.01, compiled)
    before = matrix.detach().double()
    for _ in range(100):
        matrix.grad = torch.zeros_like(matrix)
        clipped_step(optimizer, 1.0, LossScale(torch.float32, HERE))
    gone = (before - matrix.double()).sum() / before.sum()
    assert gone.item() == pytest.approx(100 * 9.2e-8, rel=0.2)  # parameters are rounded, too


def test_a_first_step_may_be_skipped(compiled):
    models = [small_model().to(HERE) for _ in range(2)]
    x = torch.randn(7, 6, device=HERE)
    for model, skips in zip(models, (1, 0), strict=True):
        optimizer = make_adamw(model.parameters(), 1e-2, 0.1, compiled)
        for step in range(skips + 2):
            model(x).square().sum().backward()
            if step < skips:
                model[0].weight.grad[0, 0] = math.nan
            clipped_step(optimizer, 1.0, LossScale(torch.float32, HERE))
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def test_loss_scale_grows_falls_to_1_and_is_1_in_other_dtypes():
    scale = LossScale(torch.float16, CPU)
    for _ in range(1000):
        scale.update(torch.tensor(False))
    assert scale.scale == 2.0**17
    scale.update(torch.tensor(True))
    assert scale.scale == 2.0**16 and scale.good_steps == 0
    for _ in range(20):
        scale.update(torch.tensor(True))
    assert scale.scale == 1
    halved = LossScale(torch.float16, CPU)
    for overflow in [False] * 999 + [True] + [False] * 999:  # it grows after 1000 in a row
        halved.update(torch.tensor(overflow))
    assert halved.scale == 2.0**15
    halved.update(torch.tensor(False))
    assert halved.scale == 2.0**16
    fixed = LossScale(torch.bfloat16, CPU)
    fixed.update(torch.tensor(True))
    assert fixed.scale == 1


def test_global_norm_of_two_dtypes_copies_nothing():
    """A GPU's kernel takes a list of one dtype. Of several, PyTorch copies each tensor in fp64."""
    grads = [torch.ones(n, dtype=d) for n, d in ((3, BF16), (4, torch.float32), (9, BF16))]
    with Made() as made:
        assert global_norm(grads).item() == 4.0
    assert made.of_norms == [{BF16}, {torch.float32}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_global_norm_of_two_dtypes_needs_no_memory():
    grads = [torch.ones(1 << 24, dtype=d, device="cuda") for d in (BF16, torch.float32)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert global_norm(grads).item() == pytest.approx(2**12.5)
    assert torch.cuda.max_memory_allocated() - before < 1 << 24


def test_global_norm_is_exact_for_large_tensors():
    """torch's fp32 norm of a CPU tensor this large is off by more."""
    grad = torch.full((4096, 64), 0.1)
    expected = 0.1 * math.sqrt(2 * grad.numel())
    assert global_norm([grad, grad]).item() == pytest.approx(expected, rel=1e-6)
