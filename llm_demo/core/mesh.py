"""The grid of processes, a process group for each dimension, collectives that torch.compile knows,
and a rank's part of a tensor."""

import functools
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def local_size(self) -> int:
        """The number of ranks on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE") or self.size)


# dimensions of a mesh: stages of a pipeline, ranks with the same parameters, ranks with different
# parts of the experts, of each matrix or of rows, and ranks with shards of one copy
STAGE, REPLICA, SPLIT, SHARD = "stage", "replica", "split", "shard"


def make_mesh(world: World, **sizes: int) -> DeviceMesh:
    """A mesh of all ranks with named dimensions; the last one varies fastest over ranks. Dimensions
    of size 1 are left out, except the last one."""
    last = next(reversed(sizes))
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == last}
    return init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def make_part_mesh(world: World, n: int, stages: int = 1) -> DeviceMesh:
    """A mesh of all ranks of this rank's stage, n parts x shards of each part. n consecutive ranks
    have all parts. Collective: every rank makes the meshes of all stages."""
    ranks = torch.arange(world.size).view(stages, -1, n)
    meshes = [
        DeviceMesh(world.device.type, of_stage.T, mesh_dim_names=(SPLIT, SHARD))
        for of_stage in ranks
    ]
    for mesh in meshes:
        on_device(mesh, "cpu")  # for checkpoints
    return meshes[world.rank * stages // world.size]


def keep_parts(module: nn.Module, grid: DeviceMesh, dims: dict[str, int]) -> None:
    """Cut a module's own parameters, on the meta device, to this rank's part, and note which part.
    grid: parts x shards of each part. dims: {name: the dimension that is cut}."""
    n, at = grid.size(0), grid.get_local_rank(0)
    module.grid, module.cut = grid, {}
    for name, dim in dims.items():
        if (p := getattr(module, name)) is not None:
            part = p.chunk(n, dim)[at].clone()
            setattr(module, name, nn.Parameter(part, requires_grad=p.requires_grad))
            module.cut[name] = dim


@functools.cache
def on_device(mesh: DeviceMesh, device: str) -> DeviceMesh:
    """The same mesh for tensors on another type of device. Collective."""
    same = mesh.device_type == device
    return mesh if same else DeviceMesh(device, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def local_part(t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without gradient: all of it unless it is sharded."""
    # detach() of a DTensor takes 10 times as long
    return (t.to_local() if isinstance(t, DTensor) else t).detach()


def all_gather(output: torch.Tensor, input: torch.Tensor, **how):
    """all_gather_into_tensor, which PyTorch 2.13 renamed."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, input, **how)


GROUPS = {}  # by name: what the compiler sees


def known(group: ProcessGroup) -> str:
    """The name by which the functions below know a group."""
    GROUPS[group.group_name] = group
    return group.group_name


@torch.library.custom_op("llm_demo::gather_rows", mutates_args=())
def gather_rows(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """x [T, ...] of each rank -> [size T, ...], by rank."""
    out = x.new_empty(size * len(x), *x.shape[1:])
    all_gather(out, x.contiguous(), group=GROUPS[group])
    return out


@gather_rows.register_fake
def _(x, group, size):
    return x.new_empty(size * len(x), *x.shape[1:])


@torch.library.custom_op("llm_demo::exchange_rows", mutates_args=())
def exchange_rows(x: torch.Tensor, group: str) -> torch.Tensor:
    """x [size T, ...] -> the same shape: part i comes from rank i, which had it for this rank.
    It is its own inverse, so also its own backward.

    All ranks of a group run the same compiled graph, so their exchanges match in order."""
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


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in this dtype, for the end of an autograd function's forward: in compiled blocks PyTorch
    2.11 drops the gradient of a result that `to` returns as it is."""
    return x if x.dtype == dtype else x.to(dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gathers, group, size):
        ctx.back = not gathers, group, size
        return _Spread.move(x, gathers, group, size)

    @staticmethod
    def backward(ctx, grad):
        return _Spread.move(grad, *ctx.back), None, None, None

    @staticmethod
    def move(x, gathers, group, size):
        if gathers:
            return gather_rows(x, group, size)
        parts = exchange_rows(x, group).unflatten(0, (size, -1))
        return narrowed(parts.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)), x.dtype)


def spread_tokens(x: torch.Tensor, gathers: bool, group: str, size: int) -> torch.Tensor:
    """Gather what all ranks of a group have, x [T, ...] of each -> [size T, ...], or sum what each
    adds to it in fp32, back to [T, ...] of each: each is the other's backward."""
    return _Spread.apply(x, gathers, group, size)
