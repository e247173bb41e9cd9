"""Chooses the product of a mixture of experts, tested in its own process."""

import sys
from importlib.metadata import version

import torch

from llm_demo.core.errors import UserError
from llm_demo.core.experts import PRODUCTS
from llm_demo.job.device import Device, is_sm
from llm_demo.job.probe import probe_once


def choose_product(config, device: Device, dtype: torch.dtype, probe=None) -> tuple[str, str]:
    """(a name from PRODUCTS, the reason). probe() -> error or None runs on a GPU. Raises UserError
    if transformers lacks what both need."""
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        raise UserError(
            f"transformers {version('transformers')} is too old for experts: upgrade it"
        )
    if device.type == "cpu":
        return "looped", "on a CPU"
    if dtype != torch.bfloat16:
        return "looped", "the grouped product needs bf16"
    if config.hidden_size % 8 or config.moe_intermediate_size % 8:
        return "looped", "the grouped product needs sizes that are multiples of 8"
    probe = probe or (lambda: probe_once("llm_demo.job.experts_choice", str(dtype).split(".")[-1]))
    if problem := probe():
        return "looped", f"the grouped product does not work here: {problem}"
    if is_sm(device, 90) and not is_sm(device, 110):
        return "grouped", "one kernel for all experts"
    return "grouped", f"PyTorch's, which may be a loop over experts on {device.arch}"


def why_not_compiled(product: str) -> str | None:
    """Why blocks with this product can't be compiled, if so."""
    if product == "looped" and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        here = f"transformers {version('transformers')}"
        return f"the looped product's backward in {here} can't be compiled: upgrade it"
    return None


def _selftest(dtype: torch.dtype) -> None:
    """Compare both products, with an expert that has no rows."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight = torch.randn(96, 64, device=device), torch.randn(4, 128, 64, device=device)
    ends = torch.tensor([40, 40, 41, 96], dtype=torch.int32, device=device)
    results = []
    for product in PRODUCTS.values():
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        y = product(leaves[0], leaves[1].mT, ends)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for name, a, b in zip(("results", "gradients", "weights' gradients"), *results, strict=True):
        if not (a.float() - b.float()).norm() <= 1e-2 * b.float().norm():
            sys.exit(f"{name} differ from single products")


if __name__ == "__main__":
    _selftest(getattr(torch, sys.argv[1]))
