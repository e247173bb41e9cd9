"""The experts' function and the routers, against Hugging Face's own in fp64 or a plain formula."""

import copy
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from conftest import args_with
from test_attention import A100, CPU, H100, MI300
from torch import nn
from transformers import (
    DeepseekV3Config,
    OlmoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.moe import batched_mm_experts_forward
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from fsdp.by_memory import choose_spread
from llm_demo.core.decoder import Blocks
from llm_demo.core.experts import PRODUCTS, Routers, looped_product, sorted_experts
from llm_demo.core.mesh import World
from llm_demo.options.lora import Lora, adapt_experts
from llm_demo.run.choices import choose_product, decide_compute, why_not_compiled

D, E, K = 32, 8, 2
SIZES = dict(hidden_size=D, moe_intermediate_size=16, num_experts_per_tok=K, hidden_act="silu")
CONFIGS = {
    "qwen": Qwen3MoeConfig(num_experts=E, norm_topk_prob=True, **SIZES),
    "not normed": Qwen3MoeConfig(num_experts=E, norm_topk_prob=False, **SIZES),
    "deepseek": DeepseekV3Config(n_routed_experts=E, n_group=2, topk_group=1, **SIZES),
}


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden, **_):
        return self.mlp(hidden)


def experts_of(name, product="looped", dtype=torch.float64):
    """(Hugging Face's module with eager experts, the same with ours and its Routers)."""
    config = copy.deepcopy(CONFIGS[name])
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs = (DeepseekV3MoE if name == "deepseek" else Qwen3MoeSparseMoeBlock)(config)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    theirs.to(dtype)
    ours = copy.deepcopy(theirs)
    ours.experts.config = copy.deepcopy(config)
    ours.experts.config._experts_implementation = f"sorted_{product}"
    ours.gate.float()
    return theirs, ours, Routers([Block(ours)], [ours.gate])


def adapted(experts, rank=6):
    """The same experts with adapters, of a rank that the grouped kernel does not take."""
    lora = Lora(rank, 12.0, 0.0, (), 0, {})
    for kind in ("gate_up_proj", "down_proj"):
        adapt_experts(experts, kind, lora)
    for name, p in list(experts.named_parameters(recurse=False)):
        if p.is_meta:
            values = torch.randn(p.shape).to(experts.down_proj.dtype) / 8
            setattr(experts, name, nn.Parameter(values))
    return experts


def in_fp32(gate):
    """Let Hugging Face's router work in fp32, as ours does."""
    gate.forward = lambda h: type(gate).forward(gate.float(), h.float())


def results(module, x):
    """The result, and the gradients of x and each parameter."""
    x = x.clone().requires_grad_()
    y = module(x)
    weights = [p for p in module.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad((y * y.detach().cos()).sum(), [x, *weights])]


def close(mine, theirs, bound):
    for a, b in zip(mine, theirs, strict=True):
        assert (a.double() - b.double()).norm() <= bound * b.double().norm().clamp(min=1e-9)


INPUTS = {
    "random": lambda: torch.randn(3, 40, D),
    "fewer tokens than experts": lambda: torch.randn(1, 2, D),
    "all alike": lambda: torch.randn(1, 1, D).expand(2, 30, D),  # two experts have all tokens
    "one token": lambda: torch.randn(1, 1, D),
}


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_hugging_face(name, given):
    theirs, ours, _ = experts_of(name)
    torch.manual_seed(1)
    x = INPUTS[given]().double()
    in_fp32(theirs.gate)
    close(results(ours, x), results(theirs, x), 1e-6)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_products_agree(dtype, bound, lora):
    """Also where freed memory, which a product may leave in its results, holds NaN."""
    found = []
    for product in PRODUCTS:
        _, ours, _ = experts_of("qwen", product, dtype)
        if lora:
            adapted(ours.experts)
        torch.manual_seed(1)
        x = torch.randn(1, 60, D).to(dtype)
        junk = [torch.full((n, m), torch.nan, dtype=dtype) for n in (60, 120) for m in (16, 32, 64)]
        del junk
        found.append(results(ours, x))
    close(found[0], found[1], bound)
    assert all(t.isfinite().all() for t in found[0])


def test_weights_of_a_token_are_not_rounded():
    """To the bit: fp32 times bf16, rounded once. The last product is with the unit matrix."""
    _, ours, _ = experts_of("qwen", dtype=torch.bfloat16)
    experts, (wide, d) = ours.experts, (ours.experts.down_proj.shape[2], D)
    with torch.no_grad():
        experts.down_proj.copy_(torch.eye(d, wide))
    hidden, index = torch.randn(1, d).bfloat16(), torch.tensor([[3]])
    weight = torch.tensor([[0.33337]])
    found = sorted_experts(looped_product, experts, hidden, index, weight)
    gate, up = (hidden @ experts.gate_up_proj[3].T).chunk(2, -1)
    product = nn.functional.silu(gate) * up
    assert found[:, :wide].equal((product * weight).bfloat16())
    assert not found[:, :wide].equal(product * weight.bfloat16())


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_are_their_products_sum(name, lora):
    """Against experts with W + scale B A in place of W."""
    _, ours, _ = experts_of(name)
    _, other, _ = experts_of(name)
    adapted(ours.experts)
    with torch.no_grad():
        for kind in ("gate_up_proj", "down_proj"):
            b, a = (getattr(ours.experts, f"{kind}_lora_{x}") for x in "BA")
            getattr(other.experts, kind).add_(b @ a, alpha=12.0 / 6 if lora else 0)
    x = torch.randn(1, 60, D).double()
    mine, theirs = ours(x), other(x)
    assert ((mine - theirs).norm() < 1e-6 * theirs.norm()) == lora


class NaNAfter(torch.autograd.Function):
    """The identity, with NaN in the gradients of rows after the last end."""

    @staticmethod
    def forward(ctx, rows, ends):
        ctx.save_for_backward(ends)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        (ends,) = ctx.saved_tensors
        after = torch.arange(len(grad))[:, None] >= ends[-1]
        return grad.masked_fill(after, torch.nan), None


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "name, backend", [("looped", None), ("looped", "aot_eager"), ("grouped", None)]
)
@pytest.mark.parametrize("chosen", ["random", "none of the first part"])
def test_parts_of_the_experts_add_up(chosen, name, backend, lora):
    """What each part adds, and its gradients, compiled or not, against all at once, not compiled.
    Where no token chose any of a part's experts too, though memory beyond the rows of a product
    holds NaN, as do these rows' gradients."""
    if backend and why_not_compiled("looped"):
        pytest.skip("transformers is too old")
    torch._dynamo.config.capture_scalar_outputs = True  # as compile_forward does

    def product(rows, weight, ends):
        after = torch.arange(len(rows))[:, None] >= ends[-1]
        rows = NaNAfter.apply(rows, ends)
        return PRODUCTS[name](rows, weight, ends).masked_fill(after, torch.nan)

    dtype, bound = (torch.float64, 1e-12) if name == "looped" else (torch.float32, 1e-6)
    _, ours, _ = experts_of("qwen", dtype=dtype)
    names = ["gate_up_proj", "down_proj"]
    if lora:
        names += [f"{kind}_lora_{x}" for kind in names for x in "AB"]
        adapted(ours.experts, 6 if name == "looped" else 8)
    x, weights = torch.randn(30, D, dtype=dtype), torch.rand(30, K, dtype=dtype)
    index = torch.stack([torch.randperm(E // 2)[:K] for _ in range(30)])
    index += E // 2 if chosen != "random" else (torch.arange(30) % 2 * E // 2)[:, None]

    def added_by(first, n, backend):
        """The results and gradients of x, the weights, and these experts."""
        matrices = [
            getattr(ours.experts, name)[first : first + n].detach().requires_grad_()
            for name in names
        ]
        more = dict(zip(names, matrices, strict=True))
        gate = ours.experts._apply_gate
        part = SimpleNamespace(num_experts=E, _apply_gate=gate, lora_scale=2.0, **more)
        leaves = [t.clone().requires_grad_() for t in (x, weights)]
        here = (index - first).where((index >= first) & (index < first + n), n)
        function = sorted_experts
        if backend:
            function = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
        y = function(product, part, leaves[0], here, leaves[1])
        return [y, *torch.autograd.grad((y * x.cos()).sum(), [*leaves, *matrices])]

    whole = added_by(0, E, None)
    parts = [added_by(first, E // 4, backend) for first in range(0, E, E // 4)]
    together = [sum(each) for each in list(zip(*parts, strict=True))[:3]]
    together += [torch.cat(each) for each in list(zip(*parts, strict=True))[3:]]
    close(together, whole, bound)


def test_experts_with_a_gate_of_their_own(monkeypatch):
    """As step3p7 and hy_v4 bound it: small inputs don't show it."""

    def bounded(self, rows):
        gate, up = rows.chunk(2, -1)
        return self.act_fn(gate).clamp(max=0.1) * up.clamp(-0.1, 0.1)

    _, ours, _ = experts_of("qwen", "looped")
    monkeypatch.setattr(type(ours.experts), "_apply_gate", bounded)
    hidden, weights = torch.randn(30, D).double(), torch.rand(30, K).double()
    index = torch.randint(E, (30, K))
    expected = batched_mm_experts_forward(ours.experts, hidden, index, weights)
    close([sorted_experts(looped_product, ours.experts, hidden, index, weights)], [expected], 1e-12)


def test_the_same_bits_each_time():
    _, ours, _ = experts_of("qwen", "looped", torch.bfloat16)
    x = torch.randn(2, 50, D).bfloat16()
    for a, b in zip(results(ours, x), results(ours, x), strict=True):
        assert torch.equal(a, b)


def test_the_router_is_in_fp32():
    _, ours, _ = experts_of("qwen", "looped", torch.bfloat16)
    seen = []
    ours.gate.register_forward_hook(lambda m, args, out: seen.extend([args[0], *out[:2]]))
    y = ours(torch.randn(1, 8, D).bfloat16())
    assert [t.dtype for t in seen] == [torch.float32] * 3
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recomputed_block_takes_the_same_experts(name):
    """Though its input differs by then, as recomputed activations may in their last bits."""
    _, ours, _ = experts_of(name)
    noise, chosen = [torch.zeros(()), torch.full((), 5.0)], []
    gate = ours.gate.forward

    def forward(hidden):
        n = noise.pop(0) if len(noise) > 1 else noise[0]
        found = gate(hidden + n * torch.randn(hidden.shape, generator=torch.Generator()))
        chosen.append(found[2])
        return found

    ours.gate.forward = forward
    x = torch.randn(1, 60, D).double().requires_grad_()
    Blocks([Block(ours)], checkpointing=True)(x, None, None, None).square().sum().backward()
    assert len(chosen) == 2
    assert torch.equal(*chosen)


def counts_of(index):
    return torch.bincount(index.flatten(), minlength=E)


def test_load(alone):
    _, ours, routers = experts_of("qwen")
    x = torch.randn(1, 60, D).double()
    index = ours.gate(x[0])[2]
    assert torch.equal(routers.take_load(), counts_of(index)[None])
    for _ in range(2):
        ours(x)
    with torch.no_grad():
        ours(x)  # of an evaluation
    assert torch.equal(routers.sum_load(), 2 * counts_of(index)[None])
    ours(x)
    assert torch.equal(routers.take_load(), 3 * counts_of(index)[None])
    assert routers.take_load().sum() == 0
    real = torch.arange(60) < 13
    routers.see(real)
    ours(x)
    assert torch.equal(routers.take_load(), counts_of(index[real])[None])


def test_deepseeks_bias_follows_the_load(alone):
    _, ours, routers = experts_of("deepseek")
    x = torch.randn(1, 60, D).double()
    for norm, changes in ((torch.tensor(torch.inf), 0), (torch.tensor(1.0), 1)):
        before = ours.gate.e_score_correction_bias.clone()
        ours(x)
        load = counts_of(ours.gate(x[0])[2]) * 2.0
        routers.update_bias(0.125, norm)
        expected = before + changes * 0.125 * (load.mean() - load).sign()
        assert torch.equal(ours.gate.e_score_correction_bias, expected)
    assert ours.gate.e_score_correction_bias.abs().sum() > 0
    ours(x)
    assert not torch.equal(counts_of(ours.gate(x[0])[2]) * 2.0, load)
    ours.gate.e_score_correction_bias.zero_()
    ours.gate.chosen[:] = torch.tensor([5, 3, *[4] * (E - 2)])  # most as often as the mean
    routers.update_bias(0.125, norm)
    expected = torch.tensor([-0.125, 0.125, *[0.0] * (E - 2)])
    assert torch.equal(ours.gate.e_score_correction_bias, expected)


def test_auxiliary_loss(alone):
    """Its gradient, in two micro-batches with padding, against autograd through the formula over
    all tokens at once."""
    _, ours, routers = experts_of("qwen")
    x, real = torch.randn(2, 60, D), torch.stack([torch.arange(60) < 60, torch.arange(60) < 25])
    weight = ours.gate.weight

    probabilities = (x[real] @ weight.T).softmax(-1)
    share = counts_of(probabilities.topk(K)[1]) / len(probabilities)
    loss = E * (share * probabilities.mean(0)).sum()
    (expected,) = torch.autograd.grad(0.3 * loss, weight)
    ours.gate(x[0])  # of an earlier step that was not logged
    routers.begin_pass()
    with torch.no_grad():
        for each, own in zip(x, real, strict=True):
            routers.see(own)
            ours.gate(each)
    value = routers.set_push(0.3, torch.tensor(4.0))
    assert value.item() == pytest.approx(loss.item(), rel=1e-6)
    for each, own in zip(x, real, strict=True):
        routers.see(own)
        logits, weights, _ = ours.gate(each)
        (0 * weights.sum()).backward()
    close([weight.grad], [4.0 * expected], 1e-5)
    assert routers.take_load().sum() == K * (60 + 85)  # the pass is not counted


@pytest.mark.skipif(why_not_compiled("looped") is not None, reason="transformers is too old")
@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_share_compiled_code(name):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = torch.randn(1, 24, D)
    for _ in range(3):
        theirs, ours, _ = experts_of(name, dtype=torch.float32)
        compiled = torch.compile(ours.forward, backend="aot_eager", dynamic=False)
        close([compiled(x)], [theirs(x)], 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    "asked, reason", [(None, "on a CPU"), (True, "does not work here: the looped product's")]
)
def test_blocks_are_not_compiled_if_their_backward_cannot_be(asked, reason, alone, monkeypatch):
    """Nor those of the looped product only, if it is asked for; others are."""
    args = args_with(compile=asked)
    ops = SimpleNamespace(grouped_mm_fallback=looped_product)  # and not its backward
    monkeypatch.setattr(torch.ops, "transformers", ops)
    config = Qwen3MoeConfig(num_experts=E, **SIZES)
    for given, experts in ((config, True), (Qwen3Config(hidden_size=D), False)):
        compute, said = decide_compute(args, CPU, torch.float32, given, [])
        assert compute.compile == (asked is True and not experts)
        (line,) = [line for line in said if line.startswith("compile: ")]
        assert (reason in line) == (experts or asked is None)
    assert why_not_compiled("grouped") is None


def test_the_log_says_where_experts_are():
    said, resolved = [], {}
    log = SimpleNamespace(say=said.append, resolved=lambda **more: resolved.update(more))
    two, config = World(0, 2, 0, CPU), Qwen3MoeConfig(num_experts=E, **SIZES)
    for asked, replicas, line in (
        (None, "2", "experts: all on each rank (because of --replicas)"),
        (2, "1", "experts: spread over 2 ranks (as requested)"),
    ):
        args = Namespace(expert_parallel=asked, replicas=replicas)
        n = choose_spread(args, config, None, None, two, log)
        assert n == resolved["expert_parallel"] == (asked or 1) and said.pop() == line


def test_choice_of_the_product():
    assert choose_product(CONFIGS["qwen"], CPU, torch.float32) == ("looped", "on a CPU")
    narrow = Qwen3MoeConfig(**{**SIZES, "moe_intermediate_size": 12})
    assert choose_product(narrow, H100, torch.bfloat16, probe=lambda *of: None)[0] == "looped"
    for config in (Qwen3_5MoeTextConfig(), OlmoeConfig()):  # without a dense width, or another
        found = choose_product(config, H100, torch.bfloat16, probe=lambda *of: None)
        assert found[0] == "grouped"
    for device, dtype, problem, expected in (
        (CPU, torch.bfloat16, None, "looped"),
        (H100, torch.float32, None, "looped"),
        (H100, torch.bfloat16, None, "grouped"),
        (H100, torch.bfloat16, "no kernel", "looped"),
    ):
        product, why = choose_product(
            CONFIGS["qwen"], device, dtype, probe=lambda *of, p=problem: p
        )
        assert product == expected
        assert (problem or "") in why
    for device in (A100, MI300):
        said = choose_product(CONFIGS["qwen"], device, torch.bfloat16, probe=lambda *of: None)
        assert said[0] == "grouped"
