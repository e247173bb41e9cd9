"""Collectives between the GPUs of one node by their copy engines.

NCCL's kernels hold multiprocessors for as long as an operation is under way, and matrix products
beside them are slower for it. Here a rank copies from the others' memory; copies hold none, only
the barriers around them hold one. PyTorch's symmetric memory lends that memory; it is alpha.

FSDP2 can gather so by itself in versions after PyTorch 2.11 (set_symm_mem_for_comm), but then takes
no other exchange of gradients than its own."""

import math
import os
import weakref
from collections import defaultdict

import torch
import torch.distributed as dist

from llm_demo.device import World, links, this_device
from llm_demo.dist import from_rank0
from llm_demo.errors import UserError

try:
    from torch.distributed import _symmetric_memory as symmetric
except ImportError:
    symmetric = None

# A rendezvous would set up NVLink's multicast, too: more to go wrong, and nothing here uses it.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

# Parameters. On two H200 units of 193M (8B) gained 5 % of a step by copies; units of 63M (0.6B)
# nothing that could be told from noise (bench/LOG.md).
LARGE = 100_000_000


def choose(asked: bool | None, world: World, unit: int) -> tuple[bool, str]:
    """(whether to use them, the reason). asked: None leaves the choice to this; True raises
    UserError where they can't be used. unit: parameters of one gather. Every rank calls."""
    if asked is False:
        return False, "as asked"
    if asked is None and unit < LARGE:
        return False, f"{unit / 1e6:.0f}M parameters at a time are too few to gain by them"
    reason = cannot(world)
    if asked and reason:
        raise UserError(f"--copy_engines: {reason}")
    if reason or asked:
        return not reason, reason or "as asked"
    found = from_rank0(world, links)
    if not found or any(not kind.startswith("NV") for kind in found):
        how = ", ".join(found) or "this link"
        return False, f"not measured over {how}; --copy_engines tries it"
    return True, "copies take no multiprocessors from matrix products"


def cannot(world: World) -> str | None:
    """Why the ranks can't copy from one another, the same on all; None if they can."""
    reasons = [None] * world.size
    # The later two wait for the other ranks: not before all are ready for that.
    for step in (_lacks, _cannot_share, _cannot_gather):
        try:
            reason = step(world)
        except (AttributeError, RuntimeError, TypeError) as e:
            reason = f"a first try failed: {e}".splitlines()[0]
        dist.all_gather_object(reasons, reason)
        if found := next(filter(None, reasons), None):
            return found
    return None


def _lacks(world: World) -> str | None:
    device = this_device(world.device.index or 0)
    if device.vendor != "nvidia":
        return "only NVIDIA's GPUs have been tried"
    if world.size == 1:
        return "one GPU has nobody to copy from"
    if world.local_size < world.size or torch.cuda.device_count() < world.size:
        return f"this node has not all {world.size} ranks"
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE forbids what they do"
    others = [i for i in range(world.size) if i != world.local_rank]
    if not all(torch.cuda.can_device_access_peer(world.local_rank, i) for i in others):
        return "the GPUs can't reach each other's memory"
    if not hasattr(symmetric, "get_mem_pool"):
        return "this PyTorch has no pool of symmetric memory"
    return None


def _cannot_share(world: World) -> None:
    shared_empty(world.size, torch.float32, world.device)


def _cannot_gather(world: World) -> str | None:
    found = shared_empty(world.size, torch.float32, world.device)
    found[world.rank] = world.rank
    all_gather(found)
    right = found.tolist() == list(range(world.size))
    return None if right else "a first gather found other numbers"


class _Segment:
    """Memory that the other ranks can read, lent to one tensor at a time."""

    def __init__(self, n_bytes: int, device: torch.device):
        # From 10 MiB on, in steps of 2, the allocator gives a block of its own; what shares one
        # would share its barrier.
        n_bytes = max(16, math.ceil(n_bytes / 2**21) * 2) * 2**20
        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            self.memory = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        # PyTorch 2.11 fills new memory with zeros on the default stream, which gets there when it
        # has done the work before: over what side streams had copied (a head of zeros, once), and
        # over what a peer had signalled, who then waits for ever. A rendezvous waits for all.
        torch.cuda.synchronize()
        self.handle = symmetric.rendezvous(self.memory, dist.group.WORLD.group_name)
        if self.handle.buffer_ptrs[self.handle.rank] != self.memory.data_ptr():
            raise RuntimeError("a block of symmetric memory is shared")
        self.lent_to = lambda: None

    def lend(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.of(self.handle.rank, n, dtype)
        self.lent_to = weakref.ref(tensor.untyped_storage())  # gone with the last view of it
        return tensor

    def of(self, rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
        return self.handle.get_remote_tensor(rank, (n,), dtype)


segments = defaultdict(list)  # segments of each stream, as the allocator keeps its own


def shared_empty(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(n,) in memory that the other ranks can read. Every rank calls, for the same n and dtype on
    the same stream, and drops what it got in the same order: then all get the same segment.
    RuntimeError where memory can't be shared.

    PyTorch's pool alone won't do: of two free blocks of a size it takes that of the lower address,
    which need not be the same one on every rank. Each then waits at another's barrier."""
    mine = segments[torch.cuda.current_stream().cuda_stream]
    n_bytes = n * dtype.itemsize
    free = (s for s in mine if s.lent_to() is None and s.memory.numel() >= n_bytes)
    if (found := next(free, None)) is None:
        mine.append(found := _Segment(n_bytes, device))
    return found.lend(n, dtype)


def _segment_of(tensor: torch.Tensor) -> _Segment:
    begin = tensor.data_ptr()
    return next(s for some in segments.values() for s in some if s.memory.data_ptr() == begin)


def all_gather(output: torch.Tensor) -> None:
    """Fill `output` (n,) of shared_empty, n a multiple of the ranks, with every rank's part; this
    rank's is there already. Every rank calls."""
    segment = _segment_of(output)
    parts = output.chunk(segment.handle.world_size)
    segment.handle.barrier()  # all parts are in place
    for peer, theirs in _others(segment, output):
        parts[peer].copy_(theirs[peer])
    segment.handle.barrier()  # all have read


def all_to_all(input: torch.Tensor) -> list[torch.Tensor]:
    """This rank's part (n / ranks,) of every rank's `input` (n,) of shared_empty, by rank; that of
    its own input is a view. Every rank calls."""
    segment = _segment_of(input)
    parts = list(input.chunk(segment.handle.world_size))
    segment.handle.barrier()
    for peer, theirs in _others(segment, input):
        mine = theirs[segment.handle.rank]
        parts[peer] = torch.empty_like(mine).copy_(mine)
    segment.handle.barrier()
    return parts


def _others(segment: _Segment, shared: torch.Tensor):
    """(rank, its parts) of each other rank; ranks begin at different peers."""
    size = segment.handle.world_size
    for step in range(1, size):
        peer = (segment.handle.rank + step) % size
        yield peer, segment.of(peer, shared.numel(), shared.dtype).chunk(size)
