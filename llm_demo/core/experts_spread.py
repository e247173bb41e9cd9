"""Experts spread over ranks: each rank of a group holds a part of every block's experts.

The tokens of all ranks of the group come to each of them, which computes what its experts add, and
these sums go back to where the tokens came from. With 8 experts of a token on 8 ranks that moves as
many bytes as sending each row to its expert, and fewer on fewer ranks, and no rank waits for the
number of rows that the others send."""

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llm_demo.core.exchange import exchange_rows, gather_rows, known
from llm_demo.core.experts import PRODUCTS, blocks_with_experts, sorted_experts


def keep_part(model: PreTrainedModel, grid: DeviceMesh) -> None:
    """Leave this rank's part of each block's experts to a model on the meta device. grid: parts of
    the experts x shards of such a part, over all ranks."""
    group = grid.get_group(0)
    config = model.config
    config._experts_implementation = config._experts_implementation.replace("sorted", "spread")
    for experts in (block.mlp.experts for block in blocks_with_experts(model)):
        n = experts.num_experts // group.size()
        experts.grid, experts.first = grid, group.rank() * n
        experts.spread_over = known(group), group.size()
        for name, p in experts.named_parameters(recurse=False):
            part = nn.Parameter(p[experts.first :][:n].clone(), requires_grad=p.requires_grad)
            setattr(experts, name, part)


def spread_experts(product, self, hidden, index, weights):
    """As `sorted_experts`, by this rank's experts for the tokens of the group's ranks, each of
    which has as many tokens."""
    n, over = len(self.gate_up_proj), self.spread_over
    hidden, weights = _FromAll.apply(hidden, *over), _FromAll.apply(weights, *over)
    index = gather_rows(index, *over) - self.first
    index = index.where((index >= 0) & (index < n), n)  # another rank's
    return _SumForAll.apply(sorted_experts(product, self, hidden, index, weights), *over)


def _sum_for_all(x, group, size):
    """x [size T, ...] of each rank -> [T, ...], this rank's part of the sum, added in fp32."""
    parts = exchange_rows(x, group).unflatten(0, (size, -1))
    return parts.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


class _FromAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, size):
        ctx.over = group, size
        return gather_rows(x, group, size)

    @staticmethod
    def backward(ctx, grad):
        return _sum_for_all(grad, *ctx.over), None, None


class _SumForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, size):
        ctx.over = group, size
        return _sum_for_all(x, group, size)

    @staticmethod
    def backward(ctx, grad):
        return gather_rows(grad, *ctx.over), None, None


for _name, _product in PRODUCTS.items():
    ALL_EXPERTS_FUNCTIONS.register(f"spread_{_name}", functools.partial(spread_experts, _product))
