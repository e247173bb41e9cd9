"""Decides whether --fp8 works here, and says which layers it is for.

`python -m llm_demo.run.choose_fp8 RECIPE` compares a GPU's kernels with what a CPU emulates."""

import functools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from llm_demo.core.errors import UserError
from llm_demo.core.fp8 import BLOCK, linear, use_fp8
from llm_demo.flags.args import Args
from llm_demo.machine.device import Device, dtype_name, is_sm
from llm_demo.machine.text import layer_kinds
from llm_demo.model.costs import experts_of
from llm_demo.run.choices import Compute, above, probe_once

MODULE = "llm_demo.run.choose_fp8"


def decide_fp8(
    args: Args, ask: Callable, device: Device, compute: Compute, seq_len: int, probe=None
) -> tuple[str, list[str]]:
    """(--fp8 or "", lines). ask: as of decide_compute. seq_len: tokens of a row. probe() -> error
    or None runs on a GPU. Raises UserError where it can't work."""
    if args.fp8 == "none":
        return "", []
    flag, on_gpu = f"--fp8 {args.fp8}", device.type == "cuda"
    tokens = args.micro_batch_size * seq_len // args.sequence_parallel
    multiple = {"rowwise": 16, "blockwise": BLOCK}.get(args.fp8, 1)
    if device.vendor == "amd":
        raise UserError(f"{flag}: not supported on AMD GPUs: {device.name} ({device.arch})")
    if on_gpu and not is_sm(device, 89):
        raise UserError(f"{flag}: {device.name} ({device.arch}) has no fp8: it came with sm_89")
    if compute.dtype == torch.float16 or on_gpu and compute.dtype != torch.bfloat16:
        raise UserError(f"{flag} needs --dtype bf16, not {dtype_name(compute.dtype)}")
    if on_gpu and not compute.compile:
        raise UserError(f"{flag} needs compiled blocks, without which it is slower than bf16")
    if tokens % multiple:
        raise UserError(
            f"{flag}: a micro-batch has {tokens} tokens, which must be a multiple of {multiple}: "
            "set --seq_len or --micro_batch_size"
        )
    probe = probe or functools.partial(probe_once, MODULE, args.fp8)
    if on_gpu and (problem := ask(probe)):
        raise UserError(f"{flag} does not work here: {problem}")
    slow = [] if on_gpu else ["fp8: emulated on a CPU, which is slow"]
    return args.fp8, slow


def give_fp8(lm: nn.Module, compute: Compute, shares: int, say: Callable) -> None:
    """core.fp8.use_fp8 as decided, in the log. Raises UserError if it is for no layer."""
    if not compute.fp8:
        return
    done, left = layer_kinds(*use_fp8(lm, compute.fp8, shares))
    if not done:
        raise UserError(f"--fp8 {compute.fp8}: no layer of this model's blocks is large enough")
    rest = [*left, *["experts and routers"] * bool(experts_of(lm.config)), "embedding", "head"]
    say(f"fp8: {compute.fp8} products, approximate: {', '.join(done)}; not: {', '.join(rest)}")


def fp8_fault(recipe: str) -> str | None:
    """What is wrong with this GPU's products by a recipe."""
    if recipe == "blockwise" and not hasattr(F, "scaled_mm"):
        return f"PyTorch {torch.__version__} has no products of blocks"
    torch.manual_seed(0)
    x, w, up = (torch.randn(n).bfloat16() for n in ((2, 128, 384), (512, 384), (2, 128, 512)))
    results = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device).requires_grad_() for t in (x, w)]
        function = functools.partial(linear, recipe=recipe)
        if device == "cuda":
            function = torch.compile(function)
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, up.to(device))])
    pairs = zip(*results, strict=True)
    error = max(((a - b.cpu()).float().norm() / a.float().norm()).item() for a, b in pairs)
    return above("products differ from what a CPU emulates", error, "fp16")


if __name__ == "__main__":
    sys.exit(fp8_fault(*sys.argv[1:]))
