"""Products in fp8: the formula written out, one document's numbers apart from another's, what is
kept for the backward, kernels of a GPU, and whole runs."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    args_with,
    assert_same_tensors,
    logged,
    refused,
    slow,
    smaller_tokenizer,
    train_cases,
)
from test_attention import A100, CPU, H100, MI300
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import DecoderLoss, make_units
from llm_demo.core.rows import position_ids
from llm_demo.machine import probes
from llm_demo.machine.text import layer_kinds
from llm_demo.options import fp8
from llm_demo.options.fp8 import RECIPES, fp8_blocks, linear, scales_of, transposed_fp8, use_fp8
from llm_demo.options.lora import Lora, LoraLinear
from llm_demo.run.choices import Compute, choose_fp8

T, N, K = 256, 384, 256
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def rounded(x):
    """x to the nearest number of e4m3, three bits after the leading one, even if in the middle."""
    exponents = np.maximum(np.frexp(np.abs(x))[1] - 1, -6)
    step = 2.0 ** (exponents - 3)
    return np.round(x / step) * step


def scale(largest):
    """The smallest power of two by which `largest` is divided to be 448 at most."""
    return 2.0 ** np.ceil(np.log2(np.maximum(largest, 2.0**-90) / 448))


def by_block(x, rows, columns):
    """x as fp8 has it, times its scales: one for each block of so many rows and columns."""
    shape = len(x) // rows, rows, x.shape[1] // columns, columns
    tiles = x.reshape(shape)
    scales = scale(np.abs(tiles).max((1, 3), keepdims=True))
    return (rounded(tiles / scales) * scales).reshape(x.shape)


def expected(recipe, x, w, g):
    """(x w^T, the gradient of x, that of w) for the gradient g, in fp64."""
    if recipe == "blockwise":
        a, b = by_block(x, 1, 128), by_block(w, 128, 128)
        grad_w = by_block(g, 128, 1).T @ by_block(x, 128, 1)
        return a @ b.T, by_block(g, 1, 128) @ b, grad_w
    of_x, of_w = scale(np.abs(x).max(1, keepdims=True)), scale(np.abs(w).max(1, keepdims=True))
    a, b = rounded(x / of_x), rounded(w / of_w)
    grad_x = by_block(g * of_w.T, 1, N) @ b
    grad_w = by_block(g * of_x, T, 1).T @ a if recipe == "rowwise" else g.T @ x
    return (a * of_x) @ (b * of_w).T, grad_x, grad_w


def numbers():
    """x, w and the gradient, with zeros, a large channel, and rows of very different sizes."""
    torch.manual_seed(0)
    x, w, g = torch.randn(T, K), 0.05 * torch.randn(N, K), 1e-5 * torch.randn(T, N)
    x[:, 7] *= 50
    x[3], w[5], g[9], x[11] = 0, 0, 0, 448
    w[20:40] *= 100
    g[:, 17] *= 1e4
    return x, w, g


def results(recipe, x, w, g):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = linear(x, w, None, recipe)
    return y.detach(), *torch.autograd.grad(y, (x, w), g)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_formula(recipe):
    x, w, g = numbers()
    wanted = expected(recipe, *(t.double().numpy() for t in (x, w, g)))
    for found, want in zip(results(recipe, x, w, g), wanted, strict=True):
        want = torch.from_numpy(want)
        assert (found - want).norm() < 1e-6 * want.norm()
    exact = x @ w.T, g @ w, g.T @ x
    for found, want in zip(results(recipe, x, w, g), exact, strict=True):
        assert (found - want).norm() < 0.06 * want.norm()  # 3 bits: each number within 1/16


def test_scales_at_their_limits():
    largest = torch.tensor([448, 448.0001, 1, 0, 1e-40, 3e38])
    assert scales_of(largest).tolist() == [1, 2, 2**-8, 2**-98, 2**-98, 2.0**120]
    assert scales_of(largest.bfloat16()).tolist()[:2] == [1, 1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(recipe, bad):
    """So that the step is skipped; in other rows of tokens nothing changes."""
    x, w, g = numbers()
    y = linear(x, w, None, recipe)
    x[5, 3] = bad
    found = linear(x, w.requires_grad_(), None, recipe)
    assert not found[5].isfinite().any()
    assert found[6:].equal(y[6:]) and found[:5].equal(y[:5])
    (grad,) = torch.autograd.grad(found, w, g)
    assert not grad.isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_gradients_it_is_the_plain_layer(recipe):
    x, w, _ = numbers()
    with torch.no_grad():
        assert linear(x, w, w[:, 0], recipe).equal(F.linear(x, w, w[:, 0]))
    assert not linear(x, w, w[:, 0], recipe).equal(F.linear(x, w, w[:, 0]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_frozen_weight_has_no_gradient(recipe):
    """Nor does an adapter's base; the input's gradient is the same."""
    x, w, g = numbers()
    _, grad_x, _ = results(recipe, x, w, g)
    x = x.requires_grad_()
    assert torch.autograd.grad(linear(x, w, None, recipe), x, g)[0].equal(grad_x)
    base = fp8.RecipeLinear(nn.Linear(K, N, bias=False), recipe).requires_grad_(False)
    adapted = LoraLinear(base, Lora(2, 4.0, 0.0, ("x",), 0, {})).to_empty(device="cpu")
    adapted.weight.data.copy_(w)
    for factor in (adapted.lora_A, adapted.lora_B):
        nn.init.normal_(factor.weight)
    wanted = linear(x, w, None, recipe) + adapted.lora_B(adapted.lora_A(x) * 2)
    assert adapted(x).equal(wanted)


def places(bounds):
    """The positions and documents of one row with these bounds."""
    shape = 1, int(bounds[-1])
    return position_ids(bounds, shape), make_documents(bounds, shape, "math", torch.device("cpu"))


def tiny(recipe, monkeypatch, checkpointing=False):
    """A decoder's blocks, all of whose layers are in fp8, small as they are."""
    monkeypatch.setattr(fp8, "LEAST", 0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="packed_math",
    )  # fmt: skip
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    if recipe:
        assert use_fp8(lm, recipe)[1] == []
    units = make_units(lm.model.layers, [1], checkpointing)
    return DecoderLoss(lm, units, first=False, last=False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_documents_in_a_row_do_not_change_one_another(recipe, monkeypatch):
    """Bit by bit: neither what a block makes of a document nor what reaches it backwards."""
    model, bounds = tiny(recipe, monkeypatch), torch.tensor([0, 100, 128], dtype=torch.int32)
    where = places(bounds)
    x, up, found = torch.randn(1, 128, 128), torch.randn(1, 128, 128), []
    x *= 10 ** (-4 * torch.rand(x.shape))  # small numbers, which larger scales would round
    for times in (1, 1e5):  # the second document
        x[:, 100:, 1:] /= times
        up[:, 100:] *= times
        leaf = x.clone().requires_grad_()
        out = model(leaf, *where, None)
        (grad,) = torch.autograd.grad(out, leaf, up)
        found.append((out[:, :100], grad[:, :100], out[:, 100:]))
    assert [a.equal(b) for a, b in zip(*found, strict=True)] == [True, True, False]


def kept(function, weights):
    """{memory: (bytes, dtype, shape)} of what a function keeps for its backward, but weights."""
    fixed, found = {w.untyped_storage().data_ptr() for w in weights}, {}

    def pack(t):
        if (at := t.untyped_storage().data_ptr()) not in fixed:
            found[at] = t.untyped_storage().nbytes(), t.dtype, tuple(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return found.values()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_block_keeps_no_weight_in_fp8(recipe):
    """And no more than without fp8, but for scales."""

    def mlp(x, gate, up, down, recipe):
        inner = F.silu(linear(x, gate, None, recipe)) * linear(x, up, None, recipe)
        return linear(inner, down, None, recipe)

    weights = [torch.randn(n).bfloat16().requires_grad_() for n in ((640, 256), (640, 256))]
    weights.append(torch.randn(256, 640).bfloat16().requires_grad_())
    sizes = []
    for each in (recipe, None):
        torch._dynamo.reset()
        compiled = torch.compile(mlp, backend="aot_eager_decomp_partition", dynamic=False)
        x = torch.randn(512, 256).bfloat16().requires_grad_()
        found = kept(lambda: compiled(x, *weights, each), weights)  # noqa: B023
        assert all(512 in shape for _, dtype, shape in found if dtype == torch.float8_e4m3fn)
        sizes.append(sum(size for size, *_ in found))
    assert sizes[0] <= sizes[1] * 1.02


@pytest.mark.parametrize("recipe", ["rowwise_gw", slow("rowwise"), slow("blockwise")])
def test_recomputed_blocks_keep_nothing_in_between(recipe, monkeypatch):
    found = []
    for each in (recipe, None):
        torch._dynamo.reset()
        model = tiny(each, monkeypatch, checkpointing=True)
        (unit,), where = model.units, places(torch.tensor([0, 512], dtype=torch.int32))
        unit.forward = torch.compile(unit.forward, backend="aot_eager_decomp_partition")
        x = torch.zeros(1, 512, 128, requires_grad=True)
        sizes = kept(lambda: model(x, *where, None), model.parameters())  # noqa: B023
        found.append(sum(size for size, *_ in sizes))
    assert found[0] == found[1]


def test_large_layers_only(monkeypatch):
    """Not routers, embedding and head; and sizes that kernels take, also of a share."""
    assert fp8.qualifies(4096, 4096, 16) and fp8.qualifies(1024, 4096, 16)  # of 8B
    assert fp8.qualifies(2048, 2048, 16) and not fp8.qualifies(1024, 2048, 16)  # of 1.7B
    assert not fp8.qualifies(3072, 1024, 16)  # 0.6B
    assert not fp8.qualifies(4096, 4104, 16) and fp8.qualifies(4096, 4112, 16)
    assert not fp8.qualifies(4096, 4112, 128)
    config = Qwen3Config(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, head_dim=64,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    done, left = layer_kinds(*use_fp8(lm, "rowwise"))
    assert done == ["down_proj", "gate_proj", "up_proj"]
    assert left == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert type(lm.lm_head) is nn.Linear
    config.intermediate_size = 4096 + 16  # half of it is no multiple of 16
    for shares, of in ((1, ["down_proj", "gate_proj", "up_proj"]), (2, [])):
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config)
        assert layer_kinds(*use_fp8(lm, "rowwise", shares))[0] == of


def decide(recipe, device, compute, probe=None, micro=1, seq_len=1024, **flags):
    args = args_with(fp8=recipe, micro_batch_size=micro, **flags)
    return choose_fp8(args, device, compute, seq_len, probe)


BF16 = Compute(torch.bfloat16, "varlen", compile=True)


def test_where_it_works(record_property):
    works, tokens = (lambda *_: None), "a micro-batch has {} tokens, which must be a multiple of {}"
    assert decide("none", CPU, BF16) == ("", [])
    assert decide("rowwise", H100, BF16, works) == ("rowwise", [])
    assert decide("rowwise_gw", H100, BF16, works, seq_len=1001)[0] == "rowwise_gw"
    assert "emulated" in decide("blockwise", CPU, Compute(torch.float32, "math", False))[1][0]
    cases = [
        (("rowwise", A100, BF16), "needs an NVIDIA GPU of sm_89 or later"),
        (("rowwise", MI300, BF16), "needs an NVIDIA GPU of sm_89 or later"),
        (("rowwise", H100, Compute(torch.float32, "math", True)), "needs --dtype bf16, not fp32"),
        (("rowwise", H100, Compute(torch.float16, "math", True)), "needs --dtype bf16, not fp16"),
        (("rowwise", H100, Compute(torch.bfloat16, "math", False)), "needs compiled blocks"),
        (("rowwise", H100, BF16, lambda *_: "differs"), "does not work here: differs"),
        (("rowwise", H100, BF16, works, 3, 1001), tokens.format(3003, 16)),
        (("blockwise", H100, BF16, works, 1, 1040), tokens.format(1040, 128)),
    ]
    for given, message in cases:
        with refused(f"--fp8 {given[0]}.*{message}"):
            decide(*given)
    record_property("bad inputs", len(cases))
    slices = {"seq_len": 1040, "sequence_parallel": 2}  # the row of a rank has 520 tokens
    with refused(tokens.format(520, 16)):
        decide("rowwise", H100, BF16, works, **slices)
    assert decide("rowwise", H100, BF16, works, micro=2, **slices) == ("rowwise", [])


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A small model with layers that are large enough."""
    folder = smaller_tokenizer(tmp_path_factory.mktemp("wide") / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "head_dim": 32, "initializer_range": 0.02}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_whole_runs(wide, tmp_path):
    """Recomputed blocks and a resumed run are the same to the bit, other ways to spread the work
    nearly so, as a rounding may go the other way; and the held-out loss is near that in fp32."""
    same = ["--model_name_or_path", wide, "--seq_len", 64, "--max_steps", 2, "--lr", 1e-3]
    same += ["--grad_accum_steps", 1, "--eval_json", "none", "--sample_tokens", 0]
    same += ["--save_every", 1, "--lr_scheduler", "constant", "--warmup_steps", 0]
    two = ["--micro_batch_size", 2, "--fp8", "rowwise"]
    cases = {
        "whole": two,
        "ckpt": [*two, "--use_activation_checkpointing"],
        "resumed": [*two, "--resume", tmp_path / "whole/checkpoints/step_00000001"],
        "shares": ["--micro_batch_size", 4, "--fp8", "rowwise", "--tensor_parallel", 2],
        "blocks": [*two[:-1], "blockwise"],
        "fp32": two[:-2],
    }
    train_cases(tmp_path, "fsdp", 2, {name: [*same, *more] for name, more in cases.items()})
    for name in ("ckpt", "resumed"):
        assert_same_tensors(*(tmp_path / f"{n}/checkpoints/step_00000002" for n in ("whole", name)))
    losses = {n: [r["train/loss"] for r in logged(tmp_path / n)] for n in cases}
    assert losses["whole"] == losses["ckpt"]
    assert losses["shares"] == pytest.approx(losses["whole"], rel=2e-3)
    assert losses["whole"] != losses["fp32"] != losses["blocks"]
    assert losses["whole"] == pytest.approx(losses["fp32"], rel=2e-2)
    assert losses["blocks"] == pytest.approx(losses["fp32"], rel=2e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_a_gpu(recipe):
    assert probes.fp8(recipe) is None


@pytest.mark.gpu
@needs_gpu
def test_kernels_of_a_gpu():
    """Bit by bit what a CPU emulates, at sizes that tiles do not divide too."""
    for rows, columns in ((256, 384), (200, 272)):
        x = torch.randn(rows, columns).bfloat16()
        x[3], x[7], x[:, 5] = 0, x[7] * 1e-6, x[:, 5] * 1000
        by_row = 1 / scales_of(x.abs().amax(1, keepdim=True))
        by_column = 1 / scales_of((x * by_row).abs().amax(0, keepdim=True))
        given = x, by_row, by_column
        found = transposed_fp8(*(t.cuda() for t in given))
        assert found.view(torch.uint8).cpu().equal(transposed_fp8(*given).view(torch.uint8))
    for square in (False, True):
        x = torch.randn(256, 384).bfloat16()
        for a, b in zip(fp8_blocks(x, square), fp8_blocks(x.cuda(), square), strict=True):
            assert a.float().equal(b.float().cpu()) and a.stride() == b.stride()
