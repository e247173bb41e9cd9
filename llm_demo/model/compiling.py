"""torch.compile for units of blocks and for the loss, and whether it works and pays off here."""

import sys

import torch
from torch import nn

from llm_demo.device import Device, is_sm
from llm_demo.probe import probe_once

# What `sdpa_kernel` leaves in a graph. PyTorch does not cache graphs with functions that it does
# not know: every run would trace and differentiate its blocks again. The names of the kernels are
# in the graph, so a cached graph is never used for other kernels.
CACHEABLE = {
    f"torch.nn.attention.{name}": str(torch.__version__)
    for name in ("_backend_from_string", "_sdpa_kernel")
}


def choose_compile(
    asked: bool | None, device: Device, attn_impl: str, probe=None, problem: str | None = None
):
    """(whether to compile, the reason). asked: None decides here. problem: why this model's blocks
    can't be compiled, if so.

    probe() -> error or None runs on a GPU before any real compilation: without a C compiler, for
    example, Triton fails only in the first step."""
    probe = probe or (lambda: probe_once("llm_demo.model.compiling"))
    if asked is False:
        return False, "as requested"
    if asked is None:
        if device.type == "cpu":
            return False, "compiling takes longer than it saves on a CPU"
        if not is_sm(device, 80):
            return False, f"not measured on {device.arch}; --compile enables it"
        if attn_impl.startswith("bucketed") or attn_impl == "math":
            return False, f"attention {attn_impl} has shapes that change with the data"
    if problem := problem or (probe() if device.type == "cuda" else None):
        return False, f"torch.compile does not work here: {problem}"
    return True, "as requested" if asked else "fewer and larger kernels"


def compile_forward(module: nn.Module, memory_budget: float = 1.0) -> None:
    """Compile a module's forward but not its hooks: FSDP's hooks stay outside, in order.

    Modules of the same structure share compiled code, so 28 blocks cost one compilation.
    memory_budget: see --activation_memory_budget."""
    # one entry per unit size, with and without gradients, in train and eval mode
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    # the number of a rank's rows (experts.py) is read from the device inside the graph
    torch._dynamo.config.capture_scalar_outputs = True
    torch._functorch.config.activation_memory_budget = memory_budget
    torch._inductor.config.unsafe_marked_cacheable_functions |= CACHEABLE
    # dynamic=False: evaluation with another batch size must not make training shapes symbolic
    module.forward = torch.compile(module.forward, dynamic=False)


def _selftest() -> None:
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    torch.manual_seed(0)
    layer = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)).cuda()
    x = torch.randn(128, 64, device="cuda")
    expected = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    ours = torch.autograd.grad(torch.compile(layer)(x).square().sum(), layer.parameters())
    for a, b in zip(ours, expected, strict=True):
        if not (a - b).norm() < 1e-3 * b.norm():
            sys.exit("compiled and plain gradients differ")


if __name__ == "__main__":
    _selftest()
