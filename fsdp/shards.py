"""This rank's part of each parameter, on the device: what is optimized and checkpointed.

Shards, Halves, `Masters` in one process, and HostAdamW are used alike: `params` are optimized,
`take_grads` follows each micro-batch, `grads` are those of the step, `views` are for checkpoints,
`store` is after loading one."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.units import Unit
from llm_demo.optim import LOW, MOMENTS, adam_views, fill_adam_state, join, split
from llm_demo.parallel.mesh import local_part


class Shards:
    """The parameters themselves, fp32, as plain ones that share their memory.

    With DTensors an optimizer spends more host time on dispatch than the GPU spends on the step."""

    def __init__(self, model: nn.Module):
        self.model_params = [p for p in model.parameters() if p.requires_grad]
        self.params = [nn.Parameter(local_part(p)) for p in self.model_params]

    @torch.no_grad()  # else each to_local() is an autograd function: 2 ms per step
    def take_grads(self, last: bool) -> None:
        """Move the gradients of the step, which autograd has summed, after its last micro-batch."""
        if last:
            for whole, p in zip(self.model_params, self.params, strict=True):
                p.grad, whole.grad = local_part(whole.grad), None

    def grads(self) -> list[torch.Tensor]:
        """This rank's part of the gradients of `model_params`, fp32."""
        return [p.grad for p in self.params]

    def follow(self, optimizer: torch.optim.AdamW) -> None:
        """Nothing to do: the optimizer of `params` updates the model."""

    def views(self, optimizer: torch.optim.AdamW) -> Iterator[tuple]:
        """(parameter, its fp32 master, *MOMENTS of it) of each parameter, in place."""
        return adam_views(list(zip(self.model_params, self.params, strict=True)), optimizer)

    def store(self, masters: dict[nn.Parameter, torch.Tensor]) -> None:
        """Nothing to do: `views` are in place."""


class Halves:
    """bf16 weights, each half of its fp32 master (`optim.split`), the other half beside it. FSDP2
    then gathers without a cast. For a compiled AdamW.

    Sums of gradients exist from a unit's backward to the end of the step."""

    def __init__(self, units: list[Unit]):
        self.units, self.low = units, {}
        self.model_params, self.params = [p for unit in units for p in unit.params], []
        for unit in units:
            for p, local in zip(unit.params, unit.locals, strict=True):
                self.low[p] = torch.zeros_like(local, dtype=torch.int16)
                self.params.append(nn.Parameter(local))
                self.params[-1].grad_dtype = torch.float32

    @torch.no_grad()
    def keep(self, p: nn.Parameter, values: torch.Tensor) -> None:
        """Set this rank's part of a parameter and of its master."""
        weights = local_part(p)
        for old, new in zip(
            (weights, self.low[p]), split(values.float().to(weights.device)), strict=True
        ):
            old.copy_(new)

    def take_grads(self, last: bool) -> None:
        """Move the sums of the step after its last micro-batch."""
        if last:
            grads = [grad for unit in self.units for grad in unit.release()]
            for p, grad in zip(self.params, grads, strict=True):
                p.grad = grad

    def grads(self) -> list[torch.Tensor]:
        """As of Shards."""
        return [p.grad for p in self.params]

    def follow(self, optimizer: torch.optim.AdamW) -> None:
        """Give the optimizer of `params` their other halves."""
        for p, low in zip(self.params, self.low.values(), strict=True):
            optimizer.state[p][LOW] = low
        fill_adam_state(optimizer, 0)

    def views(self, optimizer: torch.optim.AdamW) -> Iterator[tuple]:
        """As of Shards, but masters are new tensors: pass them back to `store`."""
        for (p, low), local in zip(self.low.items(), self.params, strict=True):
            state = optimizer.state[local]
            yield p, join(local.detach(), low), *(state[name] for name in MOMENTS)

    def store(self, masters: dict[nn.Parameter, torch.Tensor]) -> None:
        """Set the masters, and with them the weights."""
        for p, values in masters.items():
            self.keep(p, local_part(values))


def training_state(views, optimizer, mesh, low_rank) -> dict[str, torch.Tensor]:
    """{Hugging Face name: fp32 master, name.exp_avg: ..., name.exp_avg_sq: ...}, in place and
    sharded like the parameters, and what LowRank keeps. views: as `optim.adam_views`. mesh: of the
    device they are on."""
    state = {}
    for p, *tensors in views(optimizer):
        for key, t in zip(("", *(f".{k}" for k in MOMENTS)), tensors, strict=True):
            if isinstance(p, DTensor):
                how = {"shape": p.shape, "stride": p.stride()}
                t = DTensor.from_local(t, mesh, p.placements, **how)
            state[p.hf_name + key] = t
    return state | (low_rank.state() if low_rank else {})
