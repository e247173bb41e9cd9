"""Tries kernels of this GPU against plain PyTorch, each in a process of its own.

A kernel can fail late and elsewhere: all checks may pass and the launch still break every later
call. `python -m llm_demo.machine.probes NAME ARGUMENTS` tries one. It prints what is wrong and
exits with code 1, or with 0 if nothing is.

A probe compares results and gradients. Its errors are {name of a tensor: error relative to what is
expected}, and one above its bound is a fault, and so is NaN."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from llm_demo.core.attention import BACKENDS, FASTEST_FIRST, make_documents
from llm_demo.machine.device import (
    DTYPES,
    KERNEL_VARIABLES,
    has_fused_kernels,
    planned,
    this_device,
)
from llm_demo.machine.files import ROOT, cache_folder, hash_of
from llm_demo.machine.process import PARENT, versions_of

MODULE = "llm_demo.machine.probes"
BOUNDS = {"fp32": 1e-3, "bf16": 4e-2, "fp16": 1e-2}  # of errors, by compute dtype
DELTA_BOUNDS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
EXPERTS_BOUND = 1e-2
EMULATED_BOUND = 1e-2  # of a GPU against the CPU, which emulates fp8 and 4 bits
OF_THE_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # variables that a probe must not see


def try_once(name: str, *arguments, packages: tuple = (), seconds: int = 180) -> str | None:
    """What is wrong with a kernel here; None if it is right, or if this GPU is only planned for.

    A success is remembered by name, arguments, device, PyTorch, versions of `packages` and the
    variables that choose kernels, in $LLM_DEMO_CACHE or ~/.cache/llm_demo. A failure is not: its
    cause, such as a missing compiler, may be gone next time. seconds: the limit of the process."""
    if planned():
        return None
    device = this_device()
    chosen = sorted(item for item in os.environ.items() if item[0].startswith(KERNEL_VARIABLES))
    versions = [torch.__version__, versions_of(packages)]
    key = [name, arguments, device.name, device.arch, versions, chosen]
    file = cache_folder() / "worked" / hash_of(key)[:24]
    if file.exists():
        return None
    env = {k: v for k, v in os.environ.items() if k not in OF_THE_LAUNCHER}
    env[PARENT] = str(os.getpid())
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-m", MODULE, name, *map(str, arguments)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"no result within {seconds} s"
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        return output.splitlines()[-1] if output else "failed silently"
    with contextlib.suppress(OSError):  # a read-only cache: test again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return None


# ---------------------------------------------------------------- the comparison


def largest(t: Tensor) -> Tensor:
    """The largest absolute value."""
    return t.abs().max()


def with_gradients(function: Callable, inputs: list[Tensor], up: Tensor) -> list[Tensor]:
    """[function(*inputs), the gradient of each input] for the gradient `up` of the result."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, up.to(out.dtype))]


def errors_of(
    found: list[Tensor], expected: list[Tensor], inputs: list[str], size=torch.linalg.vector_norm
) -> dict[str, float]:
    """The errors of results and of the gradients of these inputs. size: of a tensor, by which an
    error is measured."""
    names = ["results", *(f"gradients of {name}" for name in inputs)]
    errors = {}
    for name, ours, theirs in zip(names, found, expected, strict=True):
        theirs = theirs.detach().float()
        ours = ours.detach().to(theirs.device, torch.float32)
        errors[name] = (size(ours - theirs) / size(theirs)).item()
    return errors


def fault_of(errors: dict[str, float], bound: float) -> str | None:
    """What to say of the first error that is not within the bound."""
    for name, error in errors.items():
        if not error <= bound:  # also NaN
            return f"{name} are off by {error:.1e}, the limit is {bound:.0e}"
    return None


# ---------------------------------------------------------------- attention


def load_operators(impls: str) -> None:
    """Register the operators of backends of attention that have one of their own."""
    if "varlen_cudnn" in impls.split("+"):
        from llm_demo.options import long_documents  # noqa: F401
    if "efficient" in impls.split("+"):
        from llm_demo.options import wide_heads  # noqa: F401


def attention_errors(
    impl: str,
    dtype: torch.dtype,
    heads: tuple,
    device: str,
    fused: bool = False,
    window: int | None = None,
) -> dict[str, float]:
    """Errors of an attention backend against math in fp32, relative to the largest value.

    heads: as costs.Heads. fused: without SDPA's math kernel, which it takes silently if it refuses
    the fused ones. window: of tokens that a token attends to. Raises RuntimeError if it refuses
    them."""
    load_operators(impl)
    H, KV, D, E = heads
    B, S = 2, 256
    lengths = [256, 256] if impl == "sdpa" else [250, 6, 100, 156]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist(), B * S], dtype=torch.int32)
    torch.manual_seed(0)
    shapes = (H, D), (KV, D), (KV, E)
    leaves = [torch.randn(B, n, S, width, device=device).to(dtype) for n, width in shapes]
    up = torch.randn(B, S, H, E, device=device).to(dtype)

    def run(backend, cast, name):
        documents = make_documents(cu, (B, S), name, torch.device(device), long=120)
        attend = partial(BACKENDS[backend], documents=documents, scaling=D**-0.5, window=window)
        return with_gradients(attend, [x.to(cast) for x in leaves], up)

    if fused:
        # with full rows, bucketed is sdpa without its own list of kernels
        with sdpa_kernel(FASTEST_FIRST[:-1], set_priority=impl == "sdpa"):
            found = run("bucketed", dtype, impl)
    else:
        found = run(impl, dtype, impl)
    return errors_of(found, run("math", torch.float32, "math"), ["q", "k", "v"], largest)


def attention(dtype: str, impl: str, *numbers: str, device: str = "cuda") -> str | None:
    """numbers: as costs.Heads, and the sliding window of a model that has one, as text."""
    card = this_device()
    fused = impl in ("sdpa", "bucketed") and has_fused_kernels(card)
    heads, windows = tuple(map(int, numbers[:4])), [None]
    for window in numbers[4:]:
        # so short that one token more or less is seen, and as far from a multiple of 16
        windows.append(16 + int(window) % 16)
    try:
        for window in windows:
            errors = attention_errors(impl, DTYPES[dtype], heads, device, fused, window)
            fault = fault_of(errors, BOUNDS[dtype])
            if fault:
                return fault if window is None else f"{fault}, with a window of {window} tokens"
    except RuntimeError as e:
        if not fused or not re.search("No (available kernel|viable backend)", str(e)):
            raise
        allow, name = "", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
        if card.arch.startswith(("gfx11", "gfx12")) and os.environ.get(name) != "1":
            allow = f"; if those for {card.arch} are experimental, {name}=1 allows them"
        return f"PyTorch refuses its fused kernels here; bucketed_math runs the math kernel{allow}"
    return None


# ---------------------------------------------------------------- experts


def experts(dtype: str, device: str = "cuda") -> str | None:
    """One kernel for the products of all experts against single products. One has no rows."""
    from llm_demo.core.experts import PRODUCTS

    torch.manual_seed(0)
    x, weight = torch.randn(96, 64, device=device), torch.randn(4, 128, 64, device=device)
    ends = torch.tensor([40, 40, 41, 96], dtype=torch.int32, device=device)
    inputs = [t.to(DTYPES[dtype]) for t in (x, weight)]
    up = torch.randn(96, 128, device=device)
    results = {}
    for name, product in PRODUCTS.items():

        def multiply(x, weight, product=product):
            return product(x, weight.mT, ends)

        results[name] = with_gradients(multiply, inputs, up)
    errors = errors_of(results["grouped"], results["looped"], ["rows", "weights"])
    return fault_of(errors, EXPERTS_BOUND)


# ---------------------------------------------------------------- torch.compile


def compile_errors(impl: str, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Errors of a compiled block and loss, with an attention backend, against plain PyTorch in
    fp32."""
    load_operators(impl)
    # not above: who only chooses does not need them
    from transformers import AutoModelForCausalLM, Qwen3Config

    from llm_demo.core.decoder import Blocks, DecoderLoss, compile_forward
    from llm_demo.core.rows import position_ids

    B, S, columns = 2, 128, 8208  # the loss kernel reads two whole blocks of columns and a part
    config = Qwen3Config(
        vocab_size=columns,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    ids = torch.randint(columns, (B, S), device=device)
    targets = torch.randint(columns, (B * S,), device=device)
    ends = [S, B * S, B * S] if impl == "sdpa" else [100, S, B * S]
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    make = AutoModelForCausalLM.from_config
    plain = make(deepcopy(config), attn_implementation="packed_math")
    ours = make(deepcopy(config), attn_implementation=f"packed_{impl}")
    ours.to(device, dtype)
    plain.to(device).load_state_dict(ours.state_dict())
    ours.model.rotary_emb = plain.model.rotary_emb  # in fp32

    def run(lm, name, compiled):
        unit = Blocks(list(lm.model.layers), checkpointing=False)
        if compiled:
            compile_forward(unit)
        model = DecoderLoss(lm, [unit], compiled=compiled)
        positions = position_ids(cu.to(device), (B, S))
        documents = make_documents(cu, (B, S), name, device)
        of_tokens = torch.arange(B * S, device=device)
        loss = model(ids, positions, documents, of_tokens, targets)
        return [loss, *torch.autograd.grad(loss, list(lm.parameters()))]

    expected = run(plain, "math", compiled=False)
    found = run(ours, impl, compiled=True)
    return errors_of(found, expected, [name for name, _ in plain.named_parameters()])


def compiled(dtype: str, impl: str, device: str = "cuda") -> str | None:
    return fault_of(compile_errors(impl, DTYPES[dtype], torch.device(device)), BOUNDS[dtype])


# ---------------------------------------------------------------- fp8 and 4 bits


def fp8(recipe: str) -> str | None:
    """Products in fp8 against those that a CPU emulates."""
    from llm_demo.options.fp8 import linear

    if recipe == "blockwise" and not hasattr(F, "scaled_mm"):
        return f"PyTorch {torch.__version__} has no products of blocks"
    torch.manual_seed(0)
    x, w, up = (torch.randn(n).bfloat16() for n in ((2, 128, 384), (512, 384), (2, 128, 512)))
    product = partial(linear, recipe=recipe)
    expected = with_gradients(product, [x, w], up)
    found = with_gradients(torch.compile(product), [x.cuda(), w.cuda()], up.cuda())
    return fault_of(errors_of(found, expected, ["inputs", "weights"]), EMULATED_BOUND)


def four_bits(device: str = "cuda") -> str | None:
    """A device's values of a weight, and its numbers and scales, against a CPU's."""
    from llm_demo.options.four_bits import values_of
    from llm_demo.options.four_bits_library import quantised

    shape = (96, 320)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if device == "cuda":
        from llm_demo.options import four_bits_kernel  # noqa: F401  it computes the values there

    def run(place):
        bits, scales = quantised(weight.to(place))
        return [values_of(bits, scales, shape[1], torch.float32)]

    return fault_of(errors_of(run(device), run("cpu"), []), EMULATED_BOUND)


# ---------------------------------------------------------------- linear attention


def delta(rule: str, dtype: str, *heads: str, device: str = "cuda") -> str | None:
    """A kernel of linear attention against PyTorch's, which keeps documents apart. heads: as
    costs.heads_of_rule, as text."""
    from llm_demo.options.delta import rule_of

    keys, values, width, wide = map(int, heads)
    B, S, first = 2, 192, 75
    cu = torch.tensor([0, first, S, B * S, B * S], dtype=torch.int32)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(B, S, *shape, generator=generator, device=device)

    tensors = [draw(keys, width), draw(keys, width), draw(values, wide), draw(values).sigmoid()]
    tensors = [t.to(DTYPES[dtype]) for t in tensors]
    strength = torch.logspace(-2, 1.2, values, device=device)  # from long memories to none
    tensors.insert(3, -strength * draw(values).abs())  # the decay's logarithm is in fp32
    up = draw(values, wide).to(DTYPES[dtype])

    documents = make_documents(cu, (B, S), "bucketed", up.device)
    found = with_gradients(lambda *t: rule_of(rule)(*t, documents), tensors, up)
    exact = [t.float() for t in tensors]
    expected = with_gradients(lambda *t: rule_of("chunked")(*t, documents), exact, up)
    errors = errors_of(found, expected, ["q", "k", "v", "decay", "beta"])
    return fault_of(errors, DELTA_BOUNDS[dtype])


PROBES = {
    "attention": attention,
    "experts": experts,
    "compile": compiled,
    "fp8": fp8,
    "four_bits": four_bits,
    "delta": delta,
}

if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(PROBES[sys.argv[1]](*sys.argv[2:]))
