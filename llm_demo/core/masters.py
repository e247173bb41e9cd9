"""fp32 masters of a model that computes in bf16 or fp16, in one process.

A unit's weights are one flat tensor, and so is each AdamW state. Clipping, AdamW and the update of
the weights then take a few large kernels, not several per parameter.

If AdamW is compiled, bf16 weights are half of their masters: see `optim.halve`."""

from collections.abc import Iterator, Set

import torch
from torch import nn

from llm_demo.core.optim import LOW, MOMENTS, add, can_halve, compile_once, halve, join


class Group:
    """The matrices of a unit, or its other parameters, which AdamW does not decay."""

    def __init__(self, params: list[nn.Parameter], dtype: torch.dtype, halves: bool):
        self.params, self.sizes = params, [p.numel() for p in params]
        flat = torch.cat([p.detach().flatten() for p in params])
        if params[0].ndim >= 2:
            flat = flat[None]  # so that make_adamw sees a matrix
        self.weights, self.low = halve(flat) if halves else (flat.to(dtype), None)
        for p, part in zip(params, self.parts(self.weights), strict=True):
            p.data = part  # frees the fp32 parameter
        self.master = nn.Parameter(self.weights if halves else flat)  # what is optimized
        self.sums = None  # between micro-batches: the parts of its gradient

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat tensor, one per parameter, each in the parameter's shape."""
        found = flat.view(-1).split(self.sizes)
        return [part.view(p.shape) for p, part in zip(self.params, found, strict=True)]

    def fp32(self) -> torch.Tensor:
        """The masters: the optimized tensor itself, or a new tensor."""
        return self.master.detach() if self.low is None else join(self.weights, self.low)

    def store(self, masters: list[torch.Tensor]) -> None:
        """Set the masters, one tensor per parameter, and update the weights from them."""
        flat = torch.cat([t.flatten() for t in masters]).view(self.weights.shape)
        if self.low is None:
            self.master.copy_(flat)
            self.weights.copy_(flat)
        else:
            for old, new in zip((self.weights, self.low), halve(flat), strict=True):
                old.copy_(new)


class Masters:
    """Converts a model's fp32 parameters to `dtype` and keeps fp32 masters to optimize.

    units: modules whose parameters are handled together; the remaining parameters form one more
    unit. accumulates: a step has several micro-batches. compiled: whether AdamW is. in_fp32:
    parameters that stay as they are."""

    def __init__(
        self,
        model: nn.Module,
        units: list[nn.Module],
        dtype: torch.dtype,
        accumulates: bool,
        compiled: bool,
        in_fp32: Set[nn.Parameter] = frozenset(),
    ):
        self.halves = compiled and can_halve(dtype, fp32_grads=accumulates)
        self.groups, taken = [], set()
        for unit in [*units, model]:
            params = [p for p in unit.parameters() if p.requires_grad and p not in taken]
            taken.update(params)
            kept = [p for p in params if p in in_fp32]
            params = [p for p in params if p not in in_fp32]
            for kind in ([p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]):
                if kind:
                    self.groups.append(Group(kind, dtype, self.halves))
            if kept:
                self.groups.append(Group(kept, torch.float32, halves=False))
        self.model_params = [p for group in self.groups for p in group.params]
        self.params = [group.master for group in self.groups]
        for group in self.groups:
            # Gradients of a single micro-batch stay in bf16: the same values in half the memory.
            group.grad_dtype = torch.float32 if accumulates or group.low is None else dtype
            if group.master.dtype != group.grad_dtype:
                group.master.grad_dtype = group.grad_dtype
        self.add = compile_once(add) if compiled else add

    @torch.no_grad()
    def take_grads(self, last: bool) -> None:
        """Add the gradients of a micro-batch to those of the masters. Units without any, which had
        no part in this backward, stay as they are."""
        for group in self.groups:
            grads = [p.grad for p in group.params]
            if grads[0] is None:
                continue
            if group.master.grad is None:
                flat = torch.cat([grad.flatten() for grad in grads]).to(group.grad_dtype)
                group.master.grad = flat.view(group.master.shape)
                if not last:
                    group.sums = group.parts(flat)
            else:
                self.add(group.sums, grads)
                if last:
                    group.sums = None
            del grads
            for p in group.params:
                p.grad = None

    def grads(self) -> list[torch.Tensor]:
        """The gradients of the step, by `params`."""
        return [p.grad for p in self.params]

    def grad_of(self, p: nn.Parameter) -> torch.Tensor:
        """The gradient of a parameter, in place."""
        group = next(group for group in self.groups if any(p is one for one in group.params))
        parts = group.parts(group.master.grad)
        return next(part for one, part in zip(group.params, parts, strict=True) if one is p)

    def follow(self, optimizer: torch.optim.AdamW) -> None:
        """Update the weights from the masters in each step of this optimizer of `params`."""
        if not self.halves:
            optimizer.register_step_post_hook(self._copy)
            return
        for group in self.groups:
            if group.low is None:
                continue
            optimizer.state[group.master][LOW] = group.low

    @torch.no_grad()
    def _copy(self, *_) -> None:
        for group in self.groups:
            group.weights.copy_(group.master)

    def views(self, optimizer: torch.optim.AdamW) -> Iterator[tuple]:
        """(parameter, its fp32 master, *MOMENTS of it) of each parameter, as `adam_views` of fsdp.
        All are in place, except masters made of two halves: pass those back to `store`."""
        for group in self.groups:
            state = optimizer.state[group.master]
            flat = [group.fp32(), *(state[name] for name in MOMENTS)]
            yield from zip(group.params, *map(group.parts, flat), strict=True)

    @torch.no_grad()
    def store(self, masters: dict[nn.Parameter, torch.Tensor]) -> None:
        """Set the masters and update the weights from them."""
        for group in self.groups:
            group.store([masters[p] for p in group.params])
