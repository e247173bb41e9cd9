"""This rank's part of each parameter, on the device: what is optimized and checkpointed.

Shards, `Masters` of core and HostAdamW all have: params, what is optimized; take_grads(last), after
each micro-batch; grads(), those of the step; views(optimizer), for a checkpoint; store(masters),
after loading one."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from llm_demo.core.mesh import local_part, on_device
from llm_demo.core.optim import MOMENTS


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

    def grad_of(self, p: nn.Parameter) -> torch.Tensor:
        """This rank's part of a parameter's gradient, in place."""
        pairs = zip(self.model_params, self.params, strict=True)
        return next(shard.grad for whole, shard in pairs if whole is p)

    def follow(self, optimizer: torch.optim.AdamW) -> None:
        """Nothing to do: the optimizer of `params` updates the model."""

    def views(self, optimizer: torch.optim.AdamW) -> Iterator[tuple]:
        """(parameter, its fp32 master, *MOMENTS of it) of each parameter, in place."""
        return adam_views(list(zip(self.model_params, self.params, strict=True)), optimizer)

    def store(self, masters: dict[nn.Parameter, torch.Tensor]) -> None:
        """Nothing to do: `views` are in place."""


def not_optimized(model: nn.Module) -> list[torch.Tensor]:
    """What else belongs to the weights: frozen parameters, and buffers that files hold."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return frozen + [b for b in model.buffers() if hasattr(b, "hf_name")]


def training_state(views, optimizer, mesh, low_rank, fixed=()) -> dict[str, torch.Tensor]:
    """{Hugging Face name: fp32 master, name.exp_avg: ..., name.exp_avg_sq: ...}, in place and
    sharded like the parameters, and what LowRank keeps. views: as `shards.adam_views`. mesh: of all
    ranks, on the device of these tensors. fixed: as of not_optimized."""
    state = {}
    for p, *tensors in [*views(optimizer), *((p, local_part(p)) for p in fixed)]:
        for key, t in zip(("", *(f".{k}" for k in MOMENTS)), tensors, strict=False):
            if isinstance(p, DTensor):
                t = on_grid(t, p, mesh)
            state[p.hf_name + key] = t
    return state | (low_rank.state() if low_rank else {})


def on_grid(local: torch.Tensor, like: DTensor, grid: DeviceMesh) -> DTensor:
    """A tensor sharded like another, described on the grid of all ranks: so every rank names the
    same mesh, even if `like` is on that of its replica. local: this rank's part. like.grid: of
    experts that are spread over ranks."""
    grid = on_device(grid, local.device.type)
    shape, placements = like.shape, [Replicate()] * (grid.ndim - len(like.placements))
    placements += like.placements
    if experts := getattr(like, "grid", None):
        grid, placements = on_device(experts, local.device.type), [Shard(0), Shard(0)]
        shape = grid.size(0) * len(like), *like.shape[1:]
    return DTensor.from_local(local, grid, placements, shape=shape, stride=like.stride())


def adam_views(pairs: list[tuple], optimizer: torch.optim.AdamW) -> Iterator[tuple]:
    """Yield (parameter, its fp32 master, *its MOMENTS) for each of `pairs`, (parameter, master)."""
    for p, master in pairs:
        yield p, master.detach(), *(optimizer.state[master][name] for name in MOMENTS)
