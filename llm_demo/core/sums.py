"""Sums of gradients, each in one pass over the memory once compiled. PyTorch's own kernels that add
bf16 to fp32 run at half the memory bandwidth, once per tensor."""

import functools

import torch


@functools.cache
def compile_once(function, dynamic: bool | None = False):
    """The function, compiled the first time. dynamic: as in torch.compile; a unit has few, fixed
    shapes, which leave nothing to generalise."""
    return torch.compile(function, dynamic=dynamic)


def add(sums: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """Add gradients to their sums in place, also bf16 gradients to fp32 sums."""
    torch._foreach_add_(sums, grads)


def sum_into(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Set `out` to the sum of `parts`, tensors of its shape, added in its dtype."""
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)


def add_into(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Add the sum of `parts`, tensors of its shape, to `out`; all additions are in its dtype."""
    total = parts[0].to(out.dtype)
    for part in parts[1:]:
        total = total + part
    out.add_(total)
