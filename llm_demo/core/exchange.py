"""Rows gathered from the ranks of a group, or exchanged with them, as the compiler traces it."""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

GROUPS = {}  # by name: what the compiler sees


def known(group: ProcessGroup) -> str:
    """The name by which the functions below know a group."""
    GROUPS[group.group_name] = group
    return group.group_name


@torch.library.custom_op("llm_demo::gather_rows", mutates_args=())
def gather_rows(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """x [T, ...] of each rank -> [size T, ...], by rank."""
    out = x.new_empty(size * len(x), *x.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x.contiguous(), group=GROUPS[group])
    return out


@gather_rows.register_fake
def _(x, group, size):
    return x.new_empty(size * len(x), *x.shape[1:])


@torch.library.custom_op("llm_demo::exchange_rows", mutates_args=())
def exchange_rows(x: torch.Tensor, group: str) -> torch.Tensor:
    """x [size T, ...] -> the same shape: part i comes from rank i, which had it for this rank. Done
    twice it is undone, so it is its own backward.

    A group's ranks exchange in the order of their graphs, which are equal: of the same rows, and of
    the same compiled code, for what it depends on is that of whole rows."""
    x = x.contiguous()
    out = torch.empty_like(x)  # contiguous: gloo fills any other wrongly
    dist.all_to_all_single(out, x, group=GROUPS[group])
    return out


@exchange_rows.register_fake
def _(x, group):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_group(ctx, inputs, output):
    ctx.group = inputs[1]


def _exchange_back(ctx, grad):
    return exchange_rows(grad, ctx.group), None


exchange_rows.register_autograd(_exchange_back, setup_context=_keep_group)
