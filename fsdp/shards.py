"""This rank's shards of an FSDP2 model: what is optimized and checkpointed."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llm_demo.optim import MOMENTS


class Shards:
    """This rank's shards as plain parameters that share their memory.

    With DTensors an optimizer spends more host time on dispatch than the GPU spends on the step."""

    def __init__(self, model: nn.Module):
        self.sharded = [p for p in model.parameters() if p.requires_grad]
        self.local = [nn.Parameter(p.detach().to_local()) for p in self.sharded]

    @torch.no_grad()  # else each to_local() is an autograd function: 2 ms per step
    def take_grads(self) -> None:
        """Move the gradients of the step, already summed, to the plain parameters: once per step.
        `Masters.take_grads` adds instead."""
        for whole, local in zip(self.sharded, self.local, strict=True):
            local.grad, whole.grad = whole.grad.to_local(), None


def training_state(views, optimizer, mesh) -> dict[str, torch.Tensor]:
    """{Hugging Face name: fp32 master, name.exp_avg: ..., name.exp_avg_sq: ...}, in place and
    sharded like the parameters. views: as `optim.adam_views`. mesh: of the device they are on."""
    state = {}
    for p, *tensors in views(optimizer):
        for key, t in zip(("", *(f".{k}" for k in MOMENTS)), tensors, strict=True):
            if isinstance(p, DTensor):
                how = {"shape": p.shape, "stride": p.stride()}
                t = DTensor.from_local(t, mesh, p.placements, **how)
            state[p.hf_name + key] = t
    return state
