"""The grid of processes, and a process group for each of its dimensions."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llm_demo.device import World

DATA = "data"  # ranks that hold shards of the parameters and train on rows of their own


def make_mesh(world: World, **sizes: int) -> DeviceMesh:
    """A mesh of all ranks: its dimensions by name, the last one varying fastest over ranks."""
    return init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
