"""Mixture of experts in Hugging Face's modules: fp32 routers, and grouped products for experts.

Tokens are sorted by expert, so that each expert's rows lie together. Every step is a gather whose
backward is a gather too: no scatter-add, so results are the same bits each time. A token's weights
are applied before the last product, in fp32, and its experts' results are summed in fp32.

Experts may be spread: each rank of a group holds a part of every block's. Each rank gets the tokens
of all ranks of the group and computes what its experts add. These sums go back to the ranks that
the tokens came from. With 8 experts a token on 8 ranks, this moves as many bytes as sending each
row to its expert, and fewer on fewer ranks. No rank waits for the number of rows that other ranks
send."""

import functools
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llm_demo.core.mesh import gather_rows, keep_parts, known, narrowed, spread_tokens


class Routers(nn.Module):
    """The routers of a decoder's blocks, as a unit whose weights are fp32 in every compute dtype.
    The routers also stay in their blocks. The unit's forward runs before the first block's and
    computes nothing: it lets FSDP2 gather the weights.

    blocks: with experts; routers: of each of them. In their forwards they count how often each
    expert is chosen, unless gradients are off. A block recomputed without the compiler counts
    twice, equally for all experts."""

    def __init__(self, blocks: list[nn.Module], routers: list[nn.Module]):
        super().__init__()
        self.routers = nn.ModuleList(routers)
        self.load = 0  # choices, summed over ranks and not taken yet
        for block, router in zip(blocks, self.routers, strict=True):
            count = torch.zeros(router.num_experts, dtype=torch.int64)
            router.register_buffer("chosen", count, persistent=False)
            router.real = router.push = router.mass = None
            if not any(hasattr(m, "e_score_correction_bias") for m in (router, block.mlp)):
                choose = _choose_scaled if hasattr(router, "per_expert_scale") else _choose
                # a method: the compiler would see a new function in each block otherwise
                router.forward = types.MethodType(choose, router)
            router.register_forward_pre_hook(_in_fp32)
            router.register_forward_hook(_count_choices)

    def forward(self) -> None:
        pass

    @torch.no_grad()
    def sum_load(self, group=None) -> torch.Tensor:
        """How often each expert was chosen since the last call, over all ranks: int64 [blocks,
        experts]. Collective."""
        load = torch.stack([router.chosen for router in self.routers])
        for router in self.routers:
            router.chosen.zero_()
        dist.all_reduce(load, group=group)
        self.load = self.load + load
        return load

    def take_load(self, group=None) -> torch.Tensor:
        """The same since the last call of this function, for the log."""
        self.sum_load(group)
        load, self.load = self.load, 0
        return load

    @torch.no_grad()
    def update_bias(self, rate: float, norm: torch.Tensor) -> None:
        """Raise the bias of experts that were chosen less often than the mean by `rate`, lower that
        of the others, unless the step was skipped because its norm is not finite. Source:
        "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (Wang et al. 2024)."""
        load = self.sum_load().double()
        rate = torch.where(norm.isfinite(), rate, 0.0)
        for router, own in zip(self.routers, load, strict=True):
            router.e_score_correction_bias += rate * (own.mean() - own).sign()

    def see(self, real: torch.Tensor | None) -> None:
        """Leave the tokens that are not `real`, bool [T], out of counts and of the auxiliary loss,
        until the next call."""
        for router in self.routers:
            router.real = real

    @torch.no_grad()
    def begin_pass(self) -> None:
        """Count choices and probabilities in the following forwards without gradients."""
        for router in self.routers:
            router.kept = router.chosen.clone()
            router.chosen.zero_()
            router.mass = torch.zeros_like(router.chosen, dtype=torch.float64)

    @torch.no_grad()
    def set_push(self, coefficient: float, scale: torch.Tensor) -> torch.Tensor:
        """Add the gradient of `coefficient` times the auxiliary loss to the following backwards.
        Returns the auxiliary loss, fp64, without the coefficient. Call it after a pass over the
        step's tokens, on every rank.

        The mean over blocks of E * sum over experts (f_e * P_e): E experts, f_e the choices of an
        expert and P_e its probability, per token of the global batch. Source: "Switch Transformers"
        (Fedus et al. 2021), with f as Hugging Face counts it, which sums to the choices of a token.
        scale: of the loss."""
        counts = torch.stack([router.chosen for router in self.routers]).double()
        mass = torch.stack([router.mass for router in self.routers])
        for router in self.routers:
            router.chosen.copy_(router.kept)
            router.mass = None
        both = torch.stack([counts, mass])
        dist.all_reduce(both)
        counts, mass = both
        blocks, experts = counts.shape
        tokens = counts[0].sum() / self.routers[0].top_k
        slope = experts / blocks * counts / tokens.square()  # of the loss by each probability
        for router, own in zip(self.routers, slope, strict=True):
            router.push = (own * coefficient * scale).float()
        return (slope * mass).sum()


def _choose(router, hidden):
    """Qwen3-MoE's router, without the change in place that recomputed blocks can't repeat."""
    logits = F.linear(hidden, router.weight)
    probabilities = logits.softmax(-1)
    if router.mass is not None:
        router.mass.add_((probabilities * router.real[:, None]).sum(0, dtype=torch.float64))
    if router.push is not None:
        probabilities = _Push.apply(probabilities, router.push, router.real)
    index = probabilities.topk(router.top_k)[1]
    weights = probabilities.gather(1, index)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, index


def _choose_scaled(router, hidden):
    """Gemma 4's router, likewise."""
    normed = router.norm(hidden) * router.scale * router.scalar_root_size
    probabilities = router.proj(normed).softmax(-1)
    index = probabilities.topk(router.top_k)[1]
    weights = probabilities.gather(1, index)
    weights = weights / weights.sum(-1, keepdim=True) * router.per_expert_scale[index]
    return probabilities, weights, index


def _in_fp32(router, args):
    return (args[0].float(), *args[1:])


def _count_choices(router, args, outputs):
    """Count the choices. outputs: logits and weights, and the experts of each token [T, k]."""
    if torch.is_grad_enabled() or router.mass is not None:
        index = outputs[2]
        one = torch.ones_like(index)
        if router.real is not None:
            one *= router.real[:, None]
        router.chosen.scatter_add_(0, index.flatten(), one.flatten())  # integers, in any order


class _Push(torch.autograd.Function):
    """The identity of probabilities [T, E]. The backward adds push [E] for each real token."""

    @staticmethod
    def forward(ctx, probabilities, push, real):
        ctx.save_for_backward(push, real)
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx, grad):
        push, real = ctx.saved_tensors
        return grad + push * real[:, None], None, None


def sorted_experts(product, self, hidden, index, weights):
    """Hugging Face's signature for experts: hidden [T, d], the k experts of each token [T, k] and
    their weights [T, k] -> [T, d]. product: of the rows of each expert with its matrix. If only
    n of the model's experts are here, index n says that the expert is on another rank: it
    contributes zero here."""
    n, k, dtype = len(self.gate_up_proj), index.shape[1], hidden.dtype
    ordered, order = index.flatten().sort(stable=True)
    places = torch.arange(len(order), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, places)  # each index once
    # int32 [n], of each expert's rows
    ends = torch.searchsorted(
        ordered, torch.arange(n, device=order.device), right=True, out_int32=True
    )
    here = None
    if n < self.num_experts:  # the others' rows come last, and are cut off
        here, rows = inverse < ends[-1], ends[-1].clamp(min=1).item()
        torch._check(1 <= rows)  # for the compiler
        torch._check(rows <= len(order))
        order, inverse = order[:rows], inverse.where(here, 0)
    x = _RearrangeRows.apply(hidden, order, inverse, here, k, True)
    gated = self._apply_gate(_multiply(product, self, "gate_up_proj", x, ends))
    of_rows = _RearrangeRows.apply(weights.reshape(-1, 1), order, inverse, here, 1, True)
    inner = (gated * of_rows).to(dtype)
    added = _multiply(product, self, "down_proj", inner, ends)
    return _RearrangeRows.apply(added, order, inverse, here, k, False)


def _multiply(product, self, kind, x, ends):
    """x [R, inputs] by this matrix of each row's expert -> [R, outputs], plus what its adapter adds
    if it has one (see lora.py)."""
    weight, recipe = getattr(self, kind), getattr(self, f"{kind}_recipe", None)
    if recipe is None:
        y = product(x, weight.mT, ends)
    else:  # stored in fewer bits
        y = recipe(x, weight, ends, product is grouped_product, getattr(self, "first", 0))
    a, b = (getattr(self, f"{kind}_lora_{name}", None) for name in "AB")
    if a is None:
        return y
    if product is grouped_product and (more := -a.shape[1] % 8):  # whose rows are of 16 bytes
        a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
    return y + product(product(x, a.mT, ends) * self.lora_scale, b.mT, ends)


class _RearrangeRows(torch.autograd.Function):
    """Copy tokens to the k rows of their experts, or sum these rows into tokens: each is the
    other's backward. order: of the T k rows, by expert; inverse: where each row of a token went;
    here: whether it went to an expert on this rank, else it is undefined; None: all did."""

    @staticmethod
    def forward(ctx, x, order, inverse, here, k, into_rows):
        ctx.save_for_backward(order, inverse, here)
        ctx.k, ctx.into_rows = k, into_rows
        return _RearrangeRows.move(x, order, inverse, here, k, into_rows)

    @staticmethod
    def backward(ctx, grad):
        moved = _RearrangeRows.move(grad, *ctx.saved_tensors, ctx.k, not ctx.into_rows)
        return moved, *(None,) * 5

    @staticmethod
    def move(x, order, inverse, here, k, into_rows):
        if into_rows:
            return x[order // k]
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = x[inverse]
        if here is not None:
            rows = rows.where(here[:, None], 0)
        return narrowed(rows.unflatten(0, (-1, k)).sum(1, dtype=wide), x.dtype)


def grouped_product(x, weight, ends):
    """x [R, d] by weight [E, d, n], expert e's rows ending at ends[e] -> [R, n]. Rows after the
    last end are undefined, and so are their gradients."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return product(x, weight, offs=ends)


def looped_product(x, weight, ends):
    """The same, a product per expert; waits for the device, to know how many rows each has."""
    return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)


# ---------------------------------------------------------------- experts spread over ranks


def keep_part(model: PreTrainedModel, of_blocks: list[nn.Module], grid: DeviceMesh) -> None:
    """Leave this rank's part of each block's experts, of_blocks, to a model on the meta device.
    grid: parts of the experts x shards of such a part, over all ranks."""
    group = grid.get_group(0)
    config = model.config
    config._experts_implementation = config._experts_implementation.replace("sorted", "spread")
    for experts in of_blocks:
        experts.first = group.rank() * (experts.num_experts // group.size())
        experts.spread_over = known(group), group.size()
        keep_parts(experts, grid, {name: 0 for name, _ in experts.named_parameters(recurse=False)})


def spread_experts(product, self, hidden, index, weights):
    """As `sorted_experts`, by this rank's experts for the tokens of the group's ranks, each of
    which has as many tokens."""
    n, (group, size) = len(self.gate_up_proj), self.spread_over
    hidden, weights = (spread_tokens(x, True, group, size) for x in (hidden, weights))
    index = gather_rows(index, group, size) - self.first
    index = index.where((index >= 0) & (index < n), n)  # another rank's
    added = sorted_experts(product, self, hidden, index, weights)
    return spread_tokens(added, False, group, size)


PRODUCTS = {"grouped": grouped_product, "looped": looped_product}
for _name, _product in PRODUCTS.items():
    ALL_EXPERTS_FUNCTIONS.register(f"sorted_{_name}", functools.partial(sorted_experts, _product))
    ALL_EXPERTS_FUNCTIONS.register(f"spread_{_name}", functools.partial(spread_experts, _product))
