"""Collectives between the GPUs of one node by their copy engines.

NCCL's kernels hold multiprocessors for as long as an operation is under way, waiting included, and
matrix products beside them are slower for it. Here a rank copies from the others' memory, which
takes none. PyTorch's symmetric memory lends that memory; it and its barriers are alpha."""

import os

import torch
import torch.distributed as dist

from llm_demo.device import link, this_device
from llm_demo.dist import World, from_rank0
from llm_demo.errors import UserError

try:
    from torch.distributed import _symmetric_memory as symmetric
except ImportError:
    symmetric = None

# A rendezvous would set up NVLink's multicast, too: more to go wrong, and nothing here uses it.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

zeroed = set()  # where the segments begin that are ready


def choose(asked: bool | None, world: World) -> tuple[bool, str]:
    """(whether to use them, the reason). asked: None leaves the choice to this; True raises
    UserError where they can't be used. Every rank calls."""
    if asked is False:
        return False, "as asked"
    reason = cannot(world)
    if asked and reason:
        raise UserError(f"--copy_engines: {reason}")
    if reason or asked:
        return not reason, reason or "as asked"
    how = from_rank0(world, link)
    if not str(how).startswith("NV"):
        return False, f"not measured over {how}; --copy_engines tries it"
    return True, "they take no multiprocessors from matrix products"


def cannot(world: World) -> str | None:
    """Why the ranks can't copy from one another, the same on all; None if they can."""
    reasons = [None] * world.size
    for step in (_lacks, _fails):  # the second is a collective: not before all have what it needs
        dist.all_gather_object(reasons, step(world))
        if found := next(filter(None, reasons), None):
            return found
    return None


def _lacks(world: World) -> str | None:
    device = this_device(world.device.index or 0)
    if device.vendor != "nvidia":
        return "for NVIDIA's GPUs"
    if world.size == 1:
        return "one GPU has nobody to copy from"
    if world.local_size < world.size:
        return f"for one node, and this one has {world.local_size} of {world.size} ranks"
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE forbids what they do"
    others = [i for i in range(torch.cuda.device_count()) if i != world.device.index]
    if not all(torch.cuda.can_device_access_peer(world.device.index, i) for i in others):
        return "the GPUs can't reach each other's memory"
    if not hasattr(symmetric, "get_mem_pool"):
        return "this PyTorch has no pool of symmetric memory"
    return None


def _fails(world: World) -> str | None:
    try:
        found = shared_empty((world.size * 8,), torch.float32, world.device)
        found.chunk(world.size)[world.rank].fill_(world.rank)
        all_gather(found, group=dist.group.WORLD)
        expected = torch.arange(world.size).repeat_interleave(8).tolist()
        return None if found.tolist() == expected else "a first gather found other numbers"
    except (AttributeError, RuntimeError, TypeError) as e:
        return f"a first gather failed: {str(e).splitlines()[0]}"


def shared_empty(size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that the other ranks can read. Every rank calls, for the same size, in one order."""
    with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
        found = torch.empty(*size, dtype=dtype, device=device)
    handle = symmetric.rendezvous(found, dist.group.WORLD.group_name)
    begin = handle.buffer_ptrs[handle.rank]
    if begin not in zeroed:
        # PyTorch 2.11 fills a new segment with zeros on the default stream, which gets there when
        # it has done the work before: over what side streams had copied. A head of zeros, once.
        torch.cuda.synchronize()
        zeroed.add(begin)
    return found


def all_gather(output: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    """Fill `output`, of shared_empty, with every rank's part; this rank's is there already."""
    handle = symmetric.rendezvous(output, group.group_name)
    parts = output.chunk(handle.world_size)
    handle.barrier(channel=0)  # all parts are in place
    for peer, theirs in _others(handle, output):
        parts[peer].copy_(theirs.chunk(handle.world_size)[peer])
    handle.barrier(channel=0)  # all have read


def all_to_all(input: torch.Tensor, *, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """This rank's part of every rank's `input`, of shared_empty, by rank. Its own isn't copied."""
    handle = symmetric.rendezvous(input, group.group_name)
    parts = list(input.chunk(handle.world_size))
    handle.barrier(channel=1)  # gathers go on meanwhile, on another stream
    for peer, theirs in _others(handle, input):
        mine = theirs.chunk(handle.world_size)[handle.rank]
        parts[peer] = torch.empty_like(mine).copy_(mine)
    handle.barrier(channel=1)
    return parts


def _others(handle, shared: torch.Tensor):
    """(rank, its memory) of each other rank, the next one first: no two read the same at a time."""
    for step in range(1, handle.world_size):
        peer = (handle.rank + step) % handle.world_size
        yield peer, handle.get_remote_tensor(peer, shared.shape, shared.dtype)
