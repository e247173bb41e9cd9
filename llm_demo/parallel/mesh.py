"""The grid of processes, with a process group for each dimension, and a rank's part of a tensor."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from llm_demo.device import World

DATA = "data"  # ranks with shards of the parameters, each training on its own rows


def make_mesh(world: World, **sizes: int) -> DeviceMesh:
    """A mesh of all ranks with named dimensions; the last one varies fastest over ranks."""
    return init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def local_part(t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without gradient: all of it unless it is sharded."""
    return t.detach().to_local() if isinstance(t, DTensor) else t.detach()
