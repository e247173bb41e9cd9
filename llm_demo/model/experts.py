"""Mixture of experts in Hugging Face's modules: fp32 routers, and grouped products for experts.

Tokens are sorted by expert, so that each expert's rows lie together. Every step is a gather whose
backward is a gather too: no scatter-add, so results are the same bits each time. A token's weights
are applied before the last product, in fp32, and its experts' results are summed in fp32."""

import functools
import sys

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llm_demo.device import Device
from llm_demo.probe import probe_once


class Routers(nn.Module):
    """The routers of a decoder's blocks, which also stay where they are: a unit whose weights are
    fp32 in every compute dtype. Its forward comes before the first block's, and does nothing but
    let FSDP2 gather them."""

    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.routers = nn.ModuleList(block.mlp.gate for block in blocks)
        for router in self.routers:
            count = torch.zeros(router.num_experts, dtype=torch.int64)
            router.register_buffer("chosen", count, persistent=False)
            if not hasattr(router, "e_score_correction_bias"):
                router.forward = functools.partial(_choose, router)
            router.register_forward_pre_hook(_in_fp32)
            router.register_forward_hook(_count)

    def forward(self) -> None:
        pass

    @torch.no_grad()
    def take_load(self) -> torch.Tensor:
        """How often each expert was chosen since the last call: int64 [blocks, experts], of this
        rank. Recomputed blocks count twice, equally for all experts."""
        load = torch.stack([router.chosen for router in self.routers])
        for router in self.routers:
            router.chosen.zero_()
        return load


def blocks_with_experts(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(getattr(m, "mlp", None), "experts")]


def _choose(router, hidden):
    """Qwen3-MoE's router, without the change in place that recomputed blocks can't repeat."""
    logits = F.linear(hidden, router.weight)
    probabilities = logits.softmax(-1)
    index = probabilities.topk(router.top_k)[1]
    weights = probabilities.gather(1, index)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, index


def _in_fp32(router, args):
    return (args[0].float(),)


def _count(router, args, outputs):
    """Count the choices. outputs: logits and weights, and the experts of each token [T, k]."""
    ordered = outputs[2].detach().flatten().sort()[0]
    ends = _ends(ordered, router.num_experts)
    router.chosen.add_(ends.diff(prepend=ends.new_zeros(1)))


def sorted_experts(product, self, hidden, index, weights):
    """Hugging Face's signature for experts: hidden [T, d], the k experts of each token [T, k] and
    their weights [T, k] -> [T, d]. product: of the rows of each expert with its matrix."""
    k, dtype = index.shape[1], hidden.dtype
    ordered, order = index.flatten().sort(stable=True)
    inverse = order.argsort()  # of a permutation: no equal elements
    ends = _ends(ordered, self.num_experts)
    x = _Rearrange.apply(hidden, order, inverse, k, True)
    gate, up = product(x, self.gate_up_proj.mT, ends).chunk(2, -1)
    of_rows = _Rearrange.apply(weights.reshape(-1, 1), order, inverse, 1, True)
    inner = (self.act_fn(gate) * up * of_rows).to(dtype)
    return _Rearrange.apply(product(inner, self.down_proj.mT, ends), order, inverse, k, False)


def _ends(ordered: torch.Tensor, n: int) -> torch.Tensor:
    """The end of each expert's rows, int32 [n]. ordered: experts in ascending order."""
    experts = torch.arange(n, device=ordered.device)
    return torch.searchsorted(ordered, experts, right=True, out_int32=True)


class _Rearrange(torch.autograd.Function):
    """Copy tokens to the k rows of their experts, or sum these rows into tokens: each is the
    other's backward. order: of the T k rows, by expert; inverse: where each row of a token went."""

    @staticmethod
    def forward(ctx, x, order, inverse, k, into_rows):
        ctx.save_for_backward(order, inverse)
        ctx.k, ctx.into_rows = k, into_rows
        return _Rearrange.move(x, order, inverse, k, into_rows)

    @staticmethod
    def backward(ctx, grad):
        order, inverse = ctx.saved_tensors
        return _Rearrange.move(grad, order, inverse, ctx.k, not ctx.into_rows), *(None,) * 4

    @staticmethod
    def move(x, order, inverse, k, into_rows):
        if into_rows:
            return x[order // k]
        wide = torch.promote_types(x.dtype, torch.float32)
        return x[inverse].unflatten(0, (-1, k)).sum(1, dtype=wide).to(x.dtype)


def grouped_product(x, weight, ends):
    """x [R, d] by weight [E, d, n], expert e's rows ending at ends[e] -> [R, n]. Rows after the
    last end are undefined, and so are their gradients."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return product(x, weight, offs=ends)


def looped_product(x, weight, ends):
    """The same, a product per expert; waits for the device, to know how many rows each has."""
    return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)


PRODUCTS = {"grouped": grouped_product, "looped": looped_product}
for _name, _product in PRODUCTS.items():
    ALL_EXPERTS_FUNCTIONS.register(f"sorted_{_name}", functools.partial(sorted_experts, _product))


def choose_product(device: Device, dtype: torch.dtype, probe=None) -> tuple[str, str]:
    """(a name from PRODUCTS, the reason). probe() -> error or None runs on a GPU."""
    if device.type == "cpu":
        return "looped", "a product per expert"
    if dtype != torch.bfloat16:
        return "looped", "the grouped product needs bf16"
    probe = probe or (lambda: probe_once("llm_demo.model.experts", str(dtype).split(".")[-1]))
    if problem := probe():
        return "looped", f"the grouped product does not work here: {problem}"
    return "grouped", "one kernel for all experts"


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
