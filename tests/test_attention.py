"""The backends' numbers, and the choice between them on machines we have and machines we fake."""

import functools
import itertools
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from llm_demo.core import attention
from llm_demo.core.attention import BACKENDS, make_documents
from llm_demo.core.errors import UserError
from llm_demo.core.rows import position_ids
from llm_demo.machine import probes
from llm_demo.machine.cards import CARDS
from llm_demo.machine.device import Device, dtype_name, peak_tflops, pick_dtype, this_device
from llm_demo.model.costs import heads_of, windows_of
from llm_demo.options import long_documents  # noqa: F401  registers the operator of varlen_cudnn
from llm_demo.run import choices
from llm_demo.run.choices import choose_attention

ON_CPU = ["bucketed", "bucketed_math", "math"]
# Fused kernels want a GPU and bf16; the same assertions hold there to the bit, too.
ON_GPU = [
    pytest.param(impl, marks=pytest.mark.gpu)
    for impl in ("varlen_cudnn", "varlen", "flash_attn", "bucketed")
]


def place(impl, request):
    """(device, dtype) for a backend of ON_CPU or ON_GPU; skips where it can't run."""
    if request.node.get_closest_marker("gpu") is None:
        return torch.device("cpu"), torch.float32
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if problem := choices.why_not(impl, this_device(), torch.bfloat16, False):
        pytest.skip(problem)
    request.getfixturevalue("monkeypatch").setattr(attention, "LONG", 60)
    return torch.device("cuda"), torch.bfloat16


LENGTHS = [[40, 70, 10, 8], [128], [1, 127], [64, 64]]  # rows of 128 slots
B, S, HEADS = len(LENGTHS), 128, (4, 2, 16, 16)


def boundaries(lengths=LENGTHS, max_docs=6):
    cu = torch.full((len(lengths) * max_docs + 1,), len(lengths) * S, dtype=torch.int32)
    flat = torch.tensor([0, *itertools.chain(*lengths)]).cumsum(0)
    cu[: len(flat)] = flat
    return cu


def each_alone(q, k, v, scaling, lengths=LENGTHS, window=S):
    """Attention over each of the documents, by its definition: [B, S, H, width of v]."""
    expected = torch.zeros(B, S, q.shape[1], v.shape[-1], dtype=q.dtype)
    for b, of_row in enumerate(lengths):
        start = 0
        for n in of_row:
            one = slice(start, start + n)
            groups = q.shape[1] // k.shape[1]
            keys, values = (x[b, :, one].repeat_interleave(groups, 0) for x in (k, v))
            scores = q[b, :, one] @ keys.transpose(1, 2) * scaling
            before = torch.arange(n)[:, None] - torch.arange(n)  # tokens from a query to a key
            scores = scores.masked_fill((before < 0) | (before >= window), -torch.inf)
            expected[b, one] = (scores.softmax(-1) @ values).transpose(0, 1)
            start += n
    return expected


def assert_equals_each_alone(
    impl, values, long=None, dtype=torch.float64, rtol=1e-9, atol=1e-12, lengths=LENGTHS, window=S
):
    """Output and gradients of a backend. values: width of a value; queries and keys have 16."""
    torch.manual_seed(0)
    shapes = (4, 16), (2, 16), (2, values)
    qkv = [torch.randn(B, n, S, width, dtype=dtype, requires_grad=True) for n, width in shapes]
    documents = make_documents(boundaries(lengths), (B, S), impl, torch.device("cpu"), long)
    how = {"scaling": 0.3, "window": None if window == S else window}
    outs = BACKENDS[impl](*qkv, documents, **how), each_alone(*qkv, 0.3, lengths, window)
    up = torch.randn_like(outs[1])
    found, expected = ([out, *torch.autograd.grad(out, qkv, up)] for out in outs)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol)


@pytest.mark.parametrize("impl", ON_CPU)
def test_equals_attention_over_each_document_alone(impl):
    assert_equals_each_alone(impl, values=16)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """varlen_attn and flash_attn_varlen_func for CPUs, as strict about widths as their kernels."""

    def kernel(q, k, v, cu, cu_k, max_q, max_k, softmax_scale, causal, window_size):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and causal and window_size[1] == 0
        out = []
        for start, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
            one = (x[start:end].transpose(0, 1) for x in (q, k, v))
            mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()
            if window_size[0] >= 0:  # keys to the left of a query's own
                mask = mask.triu(-window_size[0])
            out.append(F.scaled_dot_product_attention(
                *one, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            ).transpose(0, 1))  # fmt: skip
        return torch.cat(out)

    def varlen(*args, scale=None, window_size=(-1, 0)):
        return kernel(*args, scale, True, window_size)

    flash = SimpleNamespace(flash_attn_varlen_func=kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    scales = iter((True, False))  # varlen_attn took no scale at first
    monkeypatch.setattr(attention, "_torch_varlen", lambda: (varlen, True, next(scales)))


@pytest.mark.parametrize("values", [8, 16, 24])
@pytest.mark.parametrize("impl", [*ON_CPU, "varlen", "flash_attn"])
def test_values_of_another_width(impl, values, on_a_cpu):
    for window in (S, 16):
        assert_equals_each_alone(impl, values, window=window)


# in each a document of more tokens than a window of 16, or of 64 and more, which are blocks
WINDOWED = [[15, 16, 17, 80], [128], [64, 64], [1, 127]]


@pytest.mark.parametrize("window", [1, 15, 16, 17, 63, 64, 65, 127])
@pytest.mark.parametrize("impl", [*ON_CPU, "varlen", "flash_attn"])
def test_windows_equal_attention_over_each_document_alone(impl, window, on_a_cpu):
    assert_equals_each_alone(impl, 16, lengths=WINDOWED, window=window)


def test_full_rows_with_values_of_another_width():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, S, width, dtype=torch.float64) for width in (16, 16, 24))
    outs = []
    for impl in ("sdpa", "bucketed", "math"):
        documents = make_documents(boundaries([[S]] * 2), (2, S), impl, torch.device("cpu"))
        outs.append(BACKENDS[impl](q, k, v, documents, 0.3))
    assert outs[0].shape == (2, S, 4, 24)
    for out in outs[:2]:
        torch.testing.assert_close(out, outs[2], rtol=1e-9, atol=1e-12)


def test_the_shape_of_a_models_attention():
    assert heads_of(DeepseekV3Config(), 0) == (128, 128, 192, 128)
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert heads_of(LlamaConfig(**sizes), 0) == (4, 2, 16, 16)
    assert heads_of(Qwen3Config(head_dim=32, **sizes), 0) == (4, 2, 32, 32)


def small(kind, impl):
    """A model of two blocks with a backend."""
    config = kind(
        vocab_size=64, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.2,
        sliding_window=30,  # which Llama does not know, and Qwen3 does not use unless told to
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=f"packed_{impl}")


@pytest.mark.parametrize("poison", [False, True], ids=["change", "nan"])
@pytest.mark.parametrize("impl", [*ON_CPU, *ON_GPU])
@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mistral"])
def test_documents_do_not_see_each_other(impl, model_type, poison, request):
    """Another content of document i leaves document j's outputs and gradients equal to the bit."""
    if poison and impl == "math":
        pytest.skip("a mask can't keep NaN out: 0 x NaN is NaN")
    device, dtype = place(impl, request)
    torch.manual_seed(0)
    kinds = {"qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig}
    lm = small(kinds[model_type], impl).to(device, dtype)
    cu = boundaries()
    documents = make_documents(cu, (B, S), impl, device)
    positions = position_ids(cu.to(device), (B, S))
    embedded = torch.randn(B, S, 64).to(device, dtype)

    how = {"position_ids": positions, "documents": documents, "use_cache": False}

    def run(x):
        x = x.clone().requires_grad_()
        out = lm.model(inputs_embeds=x, **how).last_hidden_state
        (grad,) = torch.autograd.grad(out.nan_to_num().square().sum(), x)
        return out, grad

    changed = embedded.clone()
    changed[0, 40:110] = torch.nan if poison else torch.randn(70, 64)  # row 0's second
    (out, grad), (out2, grad2) = run(embedded), run(changed)
    same = torch.ones(B, S, dtype=torch.bool)
    same[0, 40:110] = False
    assert torch.equal(out[same], out2[same])
    assert torch.equal(grad[same], grad2[same])
    assert not torch.equal(out[~same], out2[~same])


def test_sdpa_where_a_row_is_one_document_and_padding():
    """Nothing tells it where the document ends: what comes later can't be seen anyway."""
    torch.manual_seed(0)
    lengths = [[100, 28], [128], [7, 121], [64, 64]]
    q, k, v = (torch.randn(B, n, S, 16, dtype=torch.float64) for n in (4, 2, 2))
    outs = []
    for impl in ("sdpa", "math"):
        documents = make_documents(boundaries(lengths), (B, S), impl, torch.device("cpu"))
        outs.append(BACKENDS[impl](q, k, v, documents, 0.3))
    for b, (n, *_) in enumerate(lengths):
        torch.testing.assert_close(outs[0][b, :n], outs[1][b, :n], rtol=1e-9, atol=1e-12)


def test_full_rows_are_not_copied():
    documents = make_documents(boundaries([[S]] * 2), (2, S), "bucketed", torch.device("cpu"))
    assert documents.buckets is None


def test_which_window_a_backend_is_given(monkeypatch):
    """What transformers passes, or else its module has; none if no document can be longer."""
    given, q = [], torch.randn(B, 4, S, 16)
    monkeypatch.setitem(BACKENDS, "math", lambda *args, window, **more: given.append(window))
    documents = make_documents(boundaries(), (B, S), "math", torch.device("cpu"))
    for of_module, passed, expected in (
        (None, {"sliding_window": S - 1}, S - 1),
        (None, {"sliding_window": S}, None),
        (None, {}, None),
        (16, {}, 16),
        (16, {"sliding_window": None}, None),
    ):
        module = SimpleNamespace(sliding_window=of_module)
        attention.attend("math", module, q, q, q, None, scaling=1, documents=documents, **passed)
        assert given.pop() == expected


def compare(impl, dtype, heads, device="cpu", window=None):
    return max(probes.attention_errors(impl, dtype, heads, device, window=window).values())


@pytest.mark.parametrize("impl", ["sdpa", *ON_CPU])
def test_comparison_used_by_the_probe(impl):
    for heads in (HEADS, (4, 4, 24, 16), (4, 4, 16, 24)):
        for window in (None, 16):
            assert compare(impl, torch.float32, heads, window=window) < 1e-5


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_the_probe_sees_a_window_of_one_token_more_or_less(off, monkeypatch):
    def wrong(q, k, v, documents, scaling, window, right=BACKENDS["bucketed"]):
        tried.append(window)
        return right(q, k, v, documents, scaling, window=window and window + off)

    tried, heads = [], map(str, (16, 8, 128, 128))
    monkeypatch.setitem(BACKENDS, "bucketed", wrong)
    found = probes.attention("bf16", "bucketed", *heads, "2047", device="cpu")
    assert tried == [None, 31]
    assert found is None if off == 0 else "off by" in found and "a window of 31 tokens" in found


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_the_probe_sees_one_wrong_gradient(which, monkeypatch):
    """The output is right, and so are the other two gradients."""

    def wrong(q, k, v, documents, scaling, window, right=BACKENDS["bucketed"]):
        given = {"q": q, "k": k, "v": v}
        given[which] = given[which].clone()
        given[which].register_hook(lambda grad: 1.25 * grad)
        return right(*given.values(), documents, scaling)

    monkeypatch.setitem(BACKENDS, "bucketed", wrong)
    error = compare("bucketed", torch.float32, HEADS, "cpu")
    assert error == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("dtype, bound", [("fp32", 1e-3), ("bf16", 4e-2), ("fp16", 1e-2)])
def test_the_probe_allows_what_rounding_takes(dtype, bound):
    for error, wrong in ((0.9 * bound, False), (1.1 * bound, True), (math.nan, True)):
        found = probes.fault_of({"results": 0.0, "gradients of v": error}, probes.BOUNDS[dtype])
        assert (found is not None) == wrong


# ---------------------------------------------------------------- the choice, on faked machines

MI100 = Device("AMD Instinct MI100", "gfx908", 32.0)
MI210 = Device("AMD Instinct MI210", "gfx90a", 64.0)
MI300 = Device("AMD Instinct MI300X", "gfx942", 192.0)
RX7900 = Device("AMD Radeon RX 7900 XTX", "gfx1100", 24.0)
H100 = Device("NVIDIA H100 80GB HBM3", "sm_90", 80.0)
A100 = Device("NVIDIA A100-SXM4-80GB", "sm_80", 80.0)
V100 = Device("Tesla V100", "sm_70", 32.0)
CPU = Device("CPU, 2 cores", "", 0.0)


def works(*probed, **more):
    return None


def only_math_works(name, dtype, impl, *heads, **more):
    return None if "math" in impl else "crashed"


def only_whole_documents_work(name, dtype, impl, *numbers, **more):
    return "wrong" if impl == "varlen" and numbers[len(HEADS) :] == (512,) else None


def cudnn_is_wrong(name, dtype, impl, *heads, **more):
    return "wrong" if impl == "varlen_cudnn" else None


def pick(
    device, dtype=torch.bfloat16, asked="auto", ask=works, flash=False, varlen=True, single=False,
    longest=1024, window=None, kernel=lambda window_size: None,
):  # fmt: skip
    """kernel: with the signature of varlen_attn, as far as it matters."""
    name = "torch.nn.attention.varlen"
    packages = {"flash_attn": flash, name: varlen}
    attention._torch_varlen.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, SimpleNamespace(varlen_attn=kernel))
        patch.setattr(choices.importlib.util, "find_spec", lambda n: packages[n] or None)
        found = choose_attention(
            asked, device, dtype, HEADS, single, longest, probe=ask, window=window
        )
        attention._torch_varlen.cache_clear()
        return found


@pytest.mark.parametrize(
    "device, options, chosen, reason",
    [
        (MI100, {}, "bucketed", "varlen: has no kernel for gfx908"),
        (MI100, {"flash": True}, "bucketed", "flash_attn: has no kernel for gfx908"),
        (MI300, {}, "varlen", "sdpa: rows hold several documents"),
        (H100, {"single": True}, "sdpa", None),
        (H100, {"single": True, "dtype": torch.float32}, "sdpa", None),
        (H100, {"single": True, "varlen": False}, "sdpa", None),
        (MI100, {"single": True}, "bucketed", "sdpa: bucketed is as fast without fused kernels"),
        (MI300, {"varlen": False, "flash": True}, "flash_attn", "it came with 2.10"),
        (H100, {}, "varlen", "sdpa: rows hold several documents"),
        (H100, {"varlen": False, "flash": True}, "flash_attn", "it came with 2.10"),
        (H100, {"longest": 4096}, "varlen_cudnn", "sdpa: rows hold several documents"),
        (H100, {"longest": 4095}, "varlen", "sdpa: rows hold several documents"),
        (A100, {"longest": 4096}, "varlen", "sdpa: rows hold several documents"),
        (MI300, {"longest": 4096}, "varlen", "sdpa: rows hold several documents"),
        (CPU, {"longest": 4096}, "bucketed", "varlen: has no CPU kernel"),
        (H100, {"longest": 4096, "ask": cudnn_is_wrong}, "varlen", "varlen_cudnn: wrong"),
        (H100, {"longest": 4096, "dtype": torch.float32}, "bucketed",
         "varlen_cudnn: needs bf16 or fp16"),
        (H100, {"varlen": False}, "bucketed", "the flash-attn package is not installed"),
        (H100, {"dtype": torch.float32}, "bucketed", "varlen: needs bf16 or fp16"),
        (V100, {"dtype": torch.float16, "flash": True}, "bucketed", "has no kernel for sm_70"),
        (CPU, {"dtype": torch.float32}, "bucketed", "varlen: has no CPU kernel"),
        (H100, {"ask": only_math_works}, "bucketed_math",
         "bucketed: crashed"),
        (H100, {"single": True, "window": 512}, "varlen", "sdpa: with a sliding window it"),
        (H100, {"longest": 4096, "window": 512}, "varlen_cudnn", "sdpa: rows hold several"),
        (H100, {"ask": only_whole_documents_work}, "varlen", "sdpa: rows hold several"),
        (H100, {"ask": only_whole_documents_work, "window": 512}, "bucketed", "varlen: wrong"),
    ],
)  # fmt: skip
def test_auto_choice_and_reasons(device, options, chosen, reason):
    impl, reasons = pick(device, **options)
    assert impl == chosen
    assert reason is None and not reasons or any(reason in r for r in reasons)


def test_a_forced_backend_that_cannot_run_is_an_error_with_the_reason():
    for device, asked, fault, message in (
        (MI100, "varlen", None, "--attn_impl varlen can't run on .* no kernel for gfx908"),
        (H100, "flash_attn", None, "the flash-attn package is not installed"),
        (H100, "varlen", "crashed", "crashed"),
        (H100, "sdpa", None, "--attn_impl sdpa can't run .* several documents"),
        (H100, "flash", None, "choose from auto, sdpa, varlen_cudnn"),
        (MI300, "varlen_cudnn", None, "varlen_cudnn can't run on .* cuDNN is for NVIDIA GPUs"),
        (H100, "varlen_cudnn", "wrong", "varlen_cudnn can't run on .* wrong"),
    ):
        with pytest.raises(UserError, match=message):
            pick(device, asked=asked, ask=lambda *_, fault=fault, **more: fault)
    assert pick(H100, asked="varlen_cudnn")[0] == "varlen_cudnn"
    assert pick(MI100, asked="math")[0] == "math"


def test_varlen_of_old_versions_has_no_windows():
    def old(is_causal): ...

    assert pick(H100, kernel=old)[0] == "varlen"
    impl, reasons = pick(H100, kernel=old, window=512)
    assert impl == "bucketed" and "has no sliding windows" in reasons[1]


def test_windows_that_rows_are_longer_than_are_tried():
    qwen = {"sliding_window": 16, "max_window_layers": 2, "num_hidden_layers": 4}
    config = Qwen3Config(use_sliding_window=True, **qwen)
    assert [choices.short_window(windows_of(config), seq_len) for seq_len in (16, 17)] == [None, 16]
    assert choices.short_window(windows_of(Qwen3Config(**qwen)), 17) is None


def test_an_mi100_is_not_taken_for_a_hopper(monkeypatch):
    """ROCm reports capability (9, 0) for gfx908: Hopper's."""
    props = SimpleNamespace(
        name="AMD Instinct MI100", gcnArchName="gfx908:sramecc+:xnack-", total_memory=32 * 2**30,
        multi_processor_count=120,
    )  # fmt: skip
    machine = {
        "torch.version.hip": "6.4.0",
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.get_device_properties": lambda i: props,
        "torch.cuda.get_device_capability": lambda i: (9, 0),
    }
    for name, part in machine.items():
        monkeypatch.setattr(name, part)
    device = this_device()
    assert device == MI100
    assert pick(device)[0] == "bucketed"
    assert pick_dtype("auto", device)[0] == torch.bfloat16
    peaks = [peak_tflops(device, d) for d in (torch.float32, torch.bfloat16, torch.float16)]
    assert peaks == [46.1, 92.3, 184.6]


def test_peak_of_an_unknown_device_is_unknown():
    assert peak_tflops(CPU, torch.float32) is None
    assert peak_tflops(Device("NVIDIA A10", "sm_86", 24.0), torch.bfloat16) is None
    assert peak_tflops(CARDS["t4"], torch.bfloat16) is None
    assert all(peak_tflops(card, pick_dtype("auto", card)[0]) for card in CARDS.values())
    assert peak_tflops(H100, torch.bfloat16) == 989.4


def test_dtype_of_old_gpus():
    assert pick_dtype("auto", V100)[0] == torch.float16
    with pytest.raises(UserError, match="has no bf16"):
        pick_dtype("bf16", V100)


NAME = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
REFUSED = "PyTorch refuses its fused kernels here; bucketed_math runs the math kernel"


@pytest.mark.parametrize("impl", ["sdpa", "bucketed"])
@pytest.mark.parametrize(
    "device, allowed, values, problem",
    [
        (RX7900, "", 24, f"{REFUSED}; if those for gfx1100 are experimental, {NAME}=1 allows them"),
        (RX7900, "1", 24, REFUSED),
        (MI300, "", 24, REFUSED),
        (MI100, "", 24, None),  # which has none: nothing is refused
        (RX7900, "", 16, None),
    ],
)
def test_the_probe_notices_refused_kernels(impl, device, allowed, values, problem, monkeypatch):
    """PyTorch's fused kernel for CPUs refuses values of another width, and math runs silently."""
    monkeypatch.setattr(probes, "this_device", lambda: device)
    monkeypatch.setenv(NAME, allowed)
    heads = "4", "4", "16", str(values)
    assert probes.attention("fp32", impl, *heads, device="cpu") == problem


def test_the_probe_does_not_import_transformers():
    code = "import sys, llm_demo.machine.probes; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_what_backends_cannot_compute_is_refused():
    documents = make_documents(boundaries(), (B, S), "math", torch.device("cpu"))
    q = torch.randn(B, 4, S, 16)
    attend = functools.partial(attention.attend, "math", None, q, q, q, None)
    attend = functools.partial(attend, scaling=1.0, documents=documents)
    for extra, message in (
        ({"softcap": 30.0}, "softcap"),
        ({"dropout": 0.1}, "attention_dropout"),
    ):
        with pytest.raises(UserError, match=message):
            attend(**extra)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("impl", attention.IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [(16, 8, 128, 128), (16, 16, 192, 128)], ids=["", "latent"])
def test_backends_on_this_gpu(impl, dtype, heads):
    """Windows that a document of 100 tokens is one shorter and longer than, and one of 250 five
    times as long, beside those that `sdpa` has: rows of 256."""
    device = this_device()
    if problem := choices.why_not(impl, device, dtype, single=True, window=16):
        pytest.skip(problem)
    assert probes.try_once("attention", dtype_name(dtype), impl, *heads, 2047) is None
    bound = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-5}[dtype]
    for window in (None, 1, 50, 99, 100, 101, 128, 255):
        errors = probes.attention_errors(impl, dtype, heads, "cuda", window=window)
        if window == 1:  # one key: no gradient reaches queries and keys
            errors = {name: errors[name] for name in ("results", "gradients of v")}
        assert max(errors.values()) < bound, window
