"""FSDP2's settings for exact numbers, and the memory that its gradients take."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fsdp.units import params_of
from llm_demo.core.decoder import Blocks, DecoderLoss
from llm_demo.core.experts import blocks_with_experts


def precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Compute in `dtype`. fp32 shards are the masters; gradients are summed over ranks and
    micro-batches in fp32."""
    if dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


class WithExperts(nn.Module):
    """A unit of blocks, already sharded: to FSDP2 the unit of their experts, which also stay where
    they are. group: of the ranks with shards of these."""

    def __init__(self, unit: Blocks, group: ProcessGroup):
        super().__init__()
        self.unit, self.group = unit, group
        self.experts = nn.ModuleList(b.mlp.experts for b in blocks_with_experts(unit))

    def forward(self, *inputs):
        return self.unit(*inputs)


def shard_units(
    model: DecoderLoss, dtype: torch.dtype, mesh: DeviceMesh, reshard: bool, spread=None
) -> None:
    """Shard each unit of blocks with FSDP2 over a mesh, and before them the routers, if there are
    any: fp32 in every dtype, gathered together, before the first block. spread: the mesh of the
    ranks with the same experts, if not all ranks have the same."""
    routers, experts = set(), set()
    if model.routers:
        fully_shard(model.routers, mesh=mesh, reshard_after_forward=False)
        routers = set(model.routers.parameters())
    if spread:
        experts = {p for b in blocks_with_experts(model) for p in b.mlp.experts.parameters()}
    how = {"mp_policy": precision(dtype), "reshard_after_forward": reshard}
    for i, unit in enumerate(model.units):
        fully_shard(unit, mesh=mesh, ignored_params=routers | experts, **how)
        if experts & set(unit.parameters()):
            model.units[i] = WithExperts(unit, spread.get_group())
            fully_shard(model.units[i], mesh=spread, **how)


def empty_sum(unit: FSDPModule, compute, size, dtype: torch.dtype, device) -> torch.Tensor:
    """An empty tensor for the sum over ranks of a unit's gradients, in the memory of the stream
    `compute`, which computes.

    FSDP2 allocates it on another stream, and the allocator keeps a pool for each. In the backward
    that pool grows by all gradients while activations leave theirs, and the device must hold both:
    15 GiB more for 8B on two GPUs (bench/LOG.md). FSDP2's stream has just waited for `compute`, so
    nothing uses that memory any more, and the sum lasts until the optimizer's step; a Unit, which
    adds it at once, holds it back by record_stream. The sum of a later micro-batch is freed once it
    is added, while FSDP2's stream may still read it, so it comes from that stream's pool."""
    streams = torch.get_device_module(device)
    params = params_of(unit)
    lasts = params is not None and all(p.grad is None for p in params)
    with streams.stream(compute if lasts else streams.current_stream()):
        return torch.empty(*size, dtype=dtype, device=device)


class SumBesideActivations:
    """FSDP2's own reduce-scatter of a unit, but with sums by `empty_sum`."""

    def __init__(self, unit: FSDPModule):
        self.unit, self.compute = unit, None

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.compute is None:  # FSDP2 allocates what it sends, then on its own stream the sum
            self.compute = torch.get_device_module(device).current_stream()
            return torch.empty(*size, dtype=dtype, device=device)
        compute, self.compute = self.compute, None
        return empty_sum(self.unit, compute, size, dtype, device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        # PyTorch 2.13 renamed it
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def sum_over_ranks(model: nn.Module) -> None:
    """Sum gradients over ranks, because the loss is already divided by the step's token count. By
    default FSDP2 averages or sums, depending on backend and version."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):  # each unit: the settings do not reach nested units
            unit.set_gradient_divide_factor(1.0)
            if hasattr(unit, "set_force_sum_reduction_for_comms"):
                # gloo lacks the operation used otherwise
                unit.set_force_sum_reduction_for_comms(True)
            if hasattr(unit, "set_custom_reduce_scatter"):
                unit.set_custom_reduce_scatter(SumBesideActivations(unit))


def accumulate(model: FSDPModule, reshard_after_forward: bool, last: bool, every: bool) -> None:
    """Between micro-batches, keep gradients unreduced unless `every` one is reduced, and weights
    gathered if memory allows."""
    settings = last or every, last or reshard_after_forward, last
    if getattr(model, "fsdp_settings", None) == settings:
        return  # each call below would go through all modules
    model.fsdp_settings = settings
    model.set_requires_gradient_sync(last or every)
    # else FSDP2 expects the next backward to go through the units of all forwards since the last,
    # and gathers the head again during the embedding's backward
    model.set_is_last_backward(last or every)
    model.set_reshard_after_backward(last or reshard_after_forward)
    if routers := getattr(model, "routers", None):
        # a pipeline's next backward needs them: without outputs, nothing gathers them again
        routers.set_reshard_after_backward(last, recurse=False)
