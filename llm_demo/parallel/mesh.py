"""The grid of processes, with a process group for each dimension."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llm_demo.device import World

DATA = "data"  # ranks with shards of the parameters, each training on its own rows


def make_mesh(world: World, **sizes: int) -> DeviceMesh:
    """A mesh of all ranks with named dimensions; the last one varies fastest over ranks."""
    return init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
