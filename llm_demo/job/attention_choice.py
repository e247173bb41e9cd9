"""Chooses the fastest attention backend that runs correctly here, tested in its own process."""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import re
import sys

import torch
from torch.nn.attention import sdpa_kernel

from llm_demo.core.attention import BACKENDS, FASTEST_FIRST, IMPLS, LONG, make_documents
from llm_demo.core.errors import UserError
from llm_demo.job.device import DTYPES, Device, is_sm, this_device
from llm_demo.job.probe import probe_once


def why_not(impl: str, device: Device, dtype: torch.dtype, single: bool) -> str | None:
    """Why `impl` can't run on this device, without trying it; None if it may run.

    single: no row holds more than one document."""
    if impl == "sdpa":
        return None if single else "rows hold several documents"
    if impl in ("bucketed", "bucketed_math", "math"):
        return None
    if impl == "varlen" and importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"PyTorch {torch.__version__} has no varlen_attn (it came with 2.10)"
    if impl == "varlen_cudnn" and device.vendor == "amd":
        return "cuDNN is for NVIDIA GPUs"
    if impl == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "the flash-attn package is not installed"
    if device.type == "cpu":
        return "has no CPU kernel"
    if dtype == torch.float32:
        return "needs bf16 or fp16"
    if not has_fused_kernels(device):
        built = "PyTorch's ROCm build " if impl == "varlen" else "flash-attn "
        return f"{built * (device.vendor == 'amd')}has no kernel for {device.arch}"
    return None


def has_fused_kernels(device: Device) -> bool:
    amd = ("gfx90a", "gfx942", "gfx950", "gfx11", "gfx12")
    return is_sm(device, 80) or device.vendor == "amd" and device.arch.startswith(amd)


def choose_attention(
    asked: str, device: Device, dtype: torch.dtype, heads, single=False, probe=None, longest=0
) -> tuple[str, list]:
    """(backend, reasons): the fastest backend that runs here, and a line for each rejected one.

    heads: as costs.Heads. single: as in why_not. probe(impl, dtype,
    heads) -> error or None is called for each candidate on a GPU. longest: tokens of the longest
    document. Raises UserError if a requested backend can't run."""
    if asked != "auto" and asked not in IMPLS:
        raise UserError(f"--attn_impl {asked}: choose from auto, {', '.join(IMPLS)}")
    probe = probe or probe_backend
    reasons = []
    impls = IMPLS if asked == "auto" else (asked,)
    if asked == "auto" and not (longest >= LONG and is_sm(device, 90)):
        impls = [impl for impl in IMPLS if impl != "varlen_cudnn"]  # no gain, or not measured
    for impl in impls:
        problem = why_not(impl, device, dtype, single)
        if (impl, asked) == ("sdpa", "auto") and not has_fused_kernels(device):
            # without fused kernels, buckets gain more by computing less padding
            problem = problem or "bucketed is as fast without fused kernels"
        if problem is None and device.type == "cuda" and not impl.endswith("math"):
            problem = probe(impl, dtype, heads)
        if problem is None:
            return impl, reasons
        reasons.append(f"{impl}: {problem}")
    raise UserError(f"--attn_impl {asked} can't run on {device}: {reasons[0].split(': ', 1)[1]}")


def probe_backend(impl: str, dtype: torch.dtype, heads) -> str | None:
    """Why `impl` fails or is wrong here, tested in its own process; None if it is correct."""
    name = next(name for name, d in DTYPES.items() if d == dtype)
    versions = (importlib.metadata.version("flash_attn"),) if impl == "flash_attn" else ()
    return probe_once("llm_demo.job.attention_choice", impl, name, *heads, versions=versions)


def compare_with_math(
    impl: str, dtype: torch.dtype, heads, device: str, fused: bool = False
) -> float:
    """Largest error of output and gradients against fp32 math, relative to the largest value.

    fused: without SDPA's math kernel, which it takes silently if it refuses the fused ones. Raises
    RuntimeError if it refuses them."""
    H, KV, D, E = heads
    B, S, lengths = 2, 256, [256, 256] if impl == "sdpa" else [250, 6, 100, 156]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist(), B * S], dtype=torch.int32)
    torch.manual_seed(0)
    shapes = (H, D), (KV, D), (KV, E)
    leaves = [torch.randn(B, n, S, width, device=device).to(dtype) for n, width in shapes]
    up = torch.randn(B, S, H, E, device=device).to(dtype)
    results = []
    for which, cast in ((impl, dtype), ("math", torch.float32)):
        qkv = [x.detach().to(cast).requires_grad_() for x in leaves]
        docs = make_documents(cu, (B, S), which, torch.device(device), long=120)
        if fused and which == impl:
            # with full rows, bucketed is sdpa without its own list of kernels
            with sdpa_kernel(FASTEST_FIRST[:-1], set_priority=impl == "sdpa"):
                out = BACKENDS["bucketed"](*qkv, docs, D**-0.5)
        else:
            out = BACKENDS[which](*qkv, docs, D**-0.5)
        results.append([out, *torch.autograd.grad(out, qkv, up.to(cast))])
    pairs = zip(*results, strict=True)
    return max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def _refused(device: Device) -> str:
    """What to say if SDPA refuses its fused kernels on a device that PyTorch has some for."""
    allow, name = "", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
    if device.arch.startswith(("gfx11", "gfx12")) and os.environ.get(name) != "1":
        allow = f"; if those for {device.arch} are experimental, {name}=1 allows them"
    return f"PyTorch refuses its fused kernels here; bucketed_math runs the math kernel{allow}"


def _probe_main():
    parser = argparse.ArgumentParser()
    parser.add_argument("impl")
    parser.add_argument("dtype")
    parser.add_argument("heads", type=int, nargs=4)
    a = parser.parse_args()
    device = this_device()
    fused = a.impl in ("sdpa", "bucketed") and has_fused_kernels(device)
    try:
        error = compare_with_math(a.impl, DTYPES[a.dtype], a.heads, "cuda", fused)
    except RuntimeError as e:
        if fused and re.search("No (available kernel|viable backend)", str(e)):
            sys.exit(_refused(device))
        raise
    bound = {"fp32": 1e-3, "bf16": 4e-2, "fp16": 1e-2}[a.dtype]
    if not error < bound:
        sys.exit(f"the result differs from math by {error:.1e}, the limit is {bound:.0e}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        _probe_main()


def fused_kernels(impl: str) -> list:
    """The operators that backend `impl` may run, as selective checkpointing names them."""
    if impl == "varlen":
        importlib.import_module("torch.nn.attention.varlen")  # which registers it
        names = ["torch_attn._varlen_attn"]
    elif impl == "varlen_cudnn":
        names = ["llm_demo.attend_documents"]
    elif impl == "flash_attn":
        importlib.import_module("flash_attn.flash_attn_interface")
        names = ["flash_attn._flash_attn_varlen_forward"]
    else:
        kinds = "cudnn_attention", "flash_attention", "efficient_attention"
        names = [f"aten._scaled_dot_product_{kind}" for kind in (*kinds, f"{kinds[1]}_for_cpu")]
    found = []
    for space, kernel in (name.split(".") for name in names):
        if operator := getattr(getattr(torch.ops, space), kernel, None):
            found.append(operator.default)
    return found
