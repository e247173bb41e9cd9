from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from llm_demo.core import loss
from llm_demo.core.loss import cross_entropy_sum, next_tokens
from llm_demo.core.rows import label_positions

B, S, D, V = 3, 10, 8, 50


class Watch(TorchDispatchMode):
    """Calls see(operator, result) for each tensor that is made."""

    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.see(func, out)
        return out


def plain_sum(hidden, weight, labels):
    """PyTorch's own cross-entropy."""
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")


def assert_plain(mine, hidden, weight, labels, factor=3):
    """Value, and gradients of `factor` times it, are those of PyTorch's own."""
    plain = plain_sum(hidden, weight, labels)
    torch.testing.assert_close(mine, plain)
    grads = torch.autograd.grad(mine * factor, (hidden, weight))
    for a, e in zip(grads, torch.autograd.grad(plain * factor, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, e)


def case(n_labels, dtype=torch.float64):
    torch.manual_seed(n_labels)
    hidden = torch.randn(B, S, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    labels = torch.full((B * S,), -100)
    where = torch.randperm(B * S)[:n_labels]
    labels[where] = torch.randint(0, V, (n_labels,))
    return hidden, weight, labels.view(B, S)


@pytest.fixture
def set_chunk_rows(monkeypatch):
    """Sets how many rows a chunk of the loss has, until the test ends."""

    def set_chunk_rows(rows):
        monkeypatch.setattr(loss, "CHUNK_ROWS", rows)

    return set_chunk_rows


@pytest.mark.parametrize("chunk", [1, 4, 7, 4096])
@pytest.mark.parametrize("n_labels", [0, 1, 17, 30])
def test_equals_plain_cross_entropy(n_labels, chunk, set_chunk_rows):
    set_chunk_rows(chunk)
    hidden, weight, labels = case(n_labels, torch.float32)
    mine = cross_entropy_sum(hidden, weight, *label_positions(labels))
    assert mine.dtype == torch.float32
    assert_plain(mine, hidden, weight, labels)


def test_the_heads_gradient_is_summed_in_fp32_over_chunks_in_bf16(set_chunk_rows):
    """Each chunk's product is rounded where a product can't be added to fp32; a sum in bf16 would
    be off by 7e-3."""
    set_chunk_rows(64)
    torch.manual_seed(0)
    n, d, columns = 2048, 32, 256
    hidden = torch.randn(1, n, d).bfloat16().requires_grad_()
    weight = (torch.randn(columns, d) / 4).bfloat16().requires_grad_()
    targets = torch.randint(0, columns, (n,))
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    plain = F.cross_entropy(wide[0][0] @ wide[1].T, targets, reduction="sum")
    mine = cross_entropy_sum(hidden, weight, torch.arange(n), targets)
    assert mine.item() == pytest.approx(plain.item(), rel=1e-3)
    (exact,) = torch.autograd.grad(plain, wide[1])
    (grad,) = torch.autograd.grad(mine, weight)
    assert (grad.double() - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_the_heads_gradient_is_narrowed_in_place_if_memory_is_short(
    dtype, tied, set_chunk_rows, monkeypatch
):
    """The same bits as with chunks of that size anyway, and no second tensor of its size."""
    monkeypatch.setattr(loss, "HEAD_SLICE", 3 * D)  # slices of three rows, the last one shorter
    hidden, weight, labels = case(30, dtype)
    found, sizes = [], []
    for chunk, slim in ((24, True), (24 // loss.SLIM, False)):
        set_chunk_rows(chunk)
        sizes.clear()
        how = {"slim": slim, "in_place": slim}
        value = 3 * cross_entropy_sum(hidden, weight, *label_positions(labels), **how)
        if tied:
            value = value + (weight * torch.arange(V)[:, None].to(dtype)).sum()
        with Watch(lambda func, out: "empty" in str(func) and sizes.append(out.numel())):
            found.append((value, *torch.autograd.grad(value, (hidden, weight))))
        assert (V * D in sizes) == (not slim)
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@mock.patch.object(loss, "HEAD_SLICE", 13 * D)
def test_slices_of_the_heads_gradient_start_where_products_are_fast():
    """And its rows, of a vocabulary that is no multiple of 8."""
    hidden, weight, labels = case(30, torch.bfloat16)
    starts = set()

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if str(func.overloadpacket) in ("aten.mm", "aten.addmm"):
                operands = [x for x in args if isinstance(x, torch.Tensor) and x.ndim == 2]
                starts.update(x.storage_offset() * x.itemsize for x in operands)
                assert all(max(x.stride()) * x.itemsize % 16 == 0 for x in operands)
            return func(*args, **(kwargs or {}))

    with Note():
        cross_entropy_sum(hidden, weight, *label_positions(labels)).backward()
    assert starts == {i * 8 * weight.itemsize for i in range(-(-V // 8))}


@pytest.mark.parametrize("rows", [4096, 5])  # one chunk, several
@pytest.mark.parametrize("sharp", [0.02, 0.3])  # of the head's weights
def test_fp16_where_products_take_subnormal_numbers_for_zero(sharp, rows, set_chunk_rows):
    """As an MI200's matrix units do. Most probabilities in a large vocabulary are subnormal in fp16
    (below 6.1e-5), and their sum is not small."""
    products = []

    def flushed(x):
        half = isinstance(x, torch.Tensor) and x.dtype == torch.float16
        return x.where(x.abs() >= torch.finfo(torch.float16).tiny, 0) if half else x

    class Flush(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if str(func.overloadpacket) in ("aten.mm", "aten.addmm"):
                products.append(func)
                args = [flushed(x) for x in args]
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    n, d, columns = 12, 32, 151_936
    set_chunk_rows(rows)
    on = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.randn(1, n, d, device=on).half().requires_grad_()
    weight = (torch.randn(columns, d, device=on) * sharp).half().requires_grad_()
    targets = torch.randint(0, columns, (n,), device=on)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    plain = F.cross_entropy(wide[0][0] @ wide[1].T, targets, reduction="sum")
    with Flush():
        mine = cross_entropy_sum(hidden, weight, torch.arange(n, device=on), targets)
        found = torch.autograd.grad(mine * 64, (hidden, weight))
    assert len(products) >= 3  # logits, and a gradient of each factor
    for a, e in zip(found, torch.autograd.grad(plain * 64, wide), strict=True):
        assert (a - e).norm() < 1e-3 * e.norm()


@pytest.mark.parametrize("compiled, frozen", [(False, False), (False, True), (True, True)])
def test_bf16_gradients_are_scaled_by_the_factor_itself(compiled, frozen):
    """Not by the factor in bf16, which is 0.4 % off, and all gradients of the blocks with it."""
    hidden, weight, labels = (t.detach() for t in case(30, torch.bfloat16))
    weight.requires_grad_(not frozen)
    found = []
    factor = 1.0037 / 1024  # halfway between two numbers in bf16
    for by in (1.0, factor):
        hidden = hidden.detach().requires_grad_()
        (cross_entropy_sum(hidden, weight, *label_positions(labels), compiled) * by).backward()
        found.append(hidden.grad.double())
    scaled = (found[0] * found[1]).sum() / found[0].square().sum()
    assert scaled == pytest.approx(factor, rel=1.5e-3)


@pytest.mark.parametrize("scale", [100.0, 1e5])
def test_logits_that_exp_overflows_at(scale):
    """exp(89) is infinite in fp32. Losses and gradients are those of PyTorch's own, and finite."""
    hidden, weight, labels = case(17, torch.float32)
    hidden = (hidden * scale).detach().requires_grad_()
    logits = (hidden @ weight.T).flatten(0, 1)
    assert logits.amax() > 89 and logits.amin() < -89
    mine = cross_entropy_sum(hidden, weight, *label_positions(labels))
    assert mine.isfinite()
    assert_plain(mine, hidden, weight, labels, factor=1)


def test_full_logits_never_exist(set_chunk_rows):
    """The largest tensor made is a chunk of logits, or the weight's gradient."""
    set_chunk_rows(4)
    sizes = []
    hidden, weight, labels = case(30, torch.float32)
    with Watch(lambda _, out: sizes.append(out.numel())):
        cross_entropy_sum(hidden, weight, *label_positions(labels)).backward()
    assert max(sizes) <= max(4 * V, V * D) < 30 * V


@pytest.mark.parametrize("rows", [1000, 7])
def test_a_frozen_head_gets_no_gradient_and_takes_no_memory(rows, set_chunk_rows):
    set_chunk_rows(rows)
    hidden, weight, labels = case(17, torch.float32)
    index = label_positions(labels)
    (expected,) = torch.autograd.grad(cross_entropy_sum(hidden, weight, *index) / 3, hidden)
    shapes, frozen = [], weight.detach()
    with Watch(lambda _, out: shapes.append(out.shape)):
        (found,) = torch.autograd.grad(cross_entropy_sum(hidden, frozen, *index) / 3, hidden)
    torch.testing.assert_close(found, expected)
    assert weight.shape not in shapes
    logits = {shape[0] for shape in shapes if shape[1:] == (V,)} - {D}  # not the head, transposed
    assert 0 < max(logits) <= max(1, rows // loss.SLIM)


def test_no_gradient_work_without_gradients():
    hidden, weight, labels = case(17, torch.float32)
    with torch.no_grad():
        value = cross_entropy_sum(hidden, weight, *label_positions(labels))
    assert not value.requires_grad
    expected = cross_entropy_sum(hidden, weight, *label_positions(labels)).detach()
    torch.testing.assert_close(value, expected)


def test_next_tokens():
    hidden, weight, _ = case(0)
    index = torch.tensor([0, 13, 29])
    expected = (hidden.flatten(0, 1)[index] @ weight.T).argmax(-1)
    assert torch.equal(next_tokens(hidden, weight, index), expected)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [50, 8192, 151_936])
def test_the_kernel_equals_double_precision(columns, dtype):
    """Also where the first columns have no probability, and where exp of a logit overflows."""
    torch.manual_seed(0)
    logits = (torch.randn(37, columns, device="cuda") * 30).to(dtype)
    logits[3, : columns // 2] = -torch.inf
    targets = torch.randint(columns // 2, columns, (37,), device="cuda")
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, wide)
    found = loss._kernel("cuda")(logits, targets)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)
    bound = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    torch.testing.assert_close(logits.double(), gradient, rtol=bound, atol=1e-6)
    again = wide.detach().to(dtype)
    assert torch.equal(loss._kernel("cuda")(again, targets), found)
    assert torch.equal(again, logits)  # the same bits each time
    scaled = wide.detach().to(dtype)
    assert torch.equal(loss._kernel("cuda")(scaled, targets, 1024.0), found)
    torch.testing.assert_close(scaled.double() / 1024, gradient, rtol=bound, atol=1e-6)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_the_kernel_passes_on_what_is_not_finite(value):
    logits = torch.randn(2, 20_000, device="cuda")
    logits[1, 19_000] = value
    total = loss._kernel("cuda")(logits, torch.tensor([5, 7], device="cuda"))
    assert not total.isfinite() and logits[0].isfinite().all() and not logits[1].isfinite().all()


@pytest.mark.gpu
@needs_gpu
def test_the_compiled_loss_uses_the_kernel_and_equals_plain():
    hidden, weight, labels = (t.detach().cuda() for t in case(17, torch.float32))
    hidden.requires_grad_(), weight.requires_grad_()
    assert loss._kernel("cuda") is not None and loss._kernel("cpu") is None
    mine = cross_entropy_sum(hidden, weight, *label_positions(labels), compiled=True)
    assert_plain(mine, hidden, weight, labels)
