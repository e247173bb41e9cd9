"""Transfers between the GPUs of one node by their copy engines.

NCCL's kernels occupy multiprocessors for as long as an operation runs, which slows matrix products
beside them. Here each rank copies from the others' memory, or into it. Copies occupy no
multiprocessor; only the barriers and signals around them occupy one. Lost otherwise: 22 of 424 ms
of 8B's step in FSDP, 2.6 to 3.2 % of a pipeline's (bench/LOG.md, docs/ways.md). The memory is
PyTorch's symmetric memory, which is alpha; `cannot` says why it is not used.

FSDP2 can gather this way itself in versions after PyTorch 2.11 (set_symm_mem_for_comm), but then
accepts no gradient exchange other than its own."""

import math
import os
import weakref
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist

from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.core.timer import AWAIT
from llm_demo.machine.device import other_than_nvlink, this_device
from llm_demo.machine.dist import from_rank0, timeout

try:
    from torch.distributed import _symmetric_memory as symmetric
except ImportError:
    symmetric = None

# A rendezvous would also set up NVLink multicast, which nothing here uses and which can fail.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def choose_copy_engines(
    asked: bool | None, world: World, group, say: Callable, no_gain: str = ""
) -> bool:
    """Whether to use copy engines. Collective. Logs the reason.

    Args:
        asked: None decides here; True raises UserError if they can't be used.
        group: the process group whose ranks copy from one another.
        no_gain: why copy engines would gain nothing here, or "". Ignored if asked is True."""
    against = "as requested" if asked is False else no_gain if asked is None else ""
    against = against or cannot(world, group)
    if asked and against:
        raise UserError(f"--copy_engines: {against}")
    if not (asked or against) and (others := from_rank0(world, other_than_nvlink)):
        against = f"not measured over {others}; --copy_engines tries it"
    gain = "as requested" if asked else "copies take no multiprocessors from matrix products"
    say(f"copy engines: no ({against})" if against else f"copy engines: yes ({gain})")
    return not against


def cannot(world: World, group) -> str | None:
    """Why the ranks can't copy from one another, the same on all ranks; None if they can."""
    reasons = [None] * world.size
    # The last two wait for other ranks: each needs all ranks to have passed the one before.
    for check in (_lacks, _cannot_share, _cannot_gather):
        try:
            reason = check(world, group)
        except (AttributeError, RuntimeError, TypeError) as e:
            reason = f"a test failed: {e}".splitlines()[0]
        dist.all_gather_object(reasons, reason)
        if reason := next(filter(None, reasons), None):
            return reason
    return None


def _lacks(world: World, group=None) -> str | None:
    device = this_device(world.device.index or 0)
    if device.vendor != "nvidia":
        return "tested on NVIDIA GPUs only"
    ranks = dist.get_process_group_ranks(group) if group else range(world.size)
    if len(ranks) == 1:
        return "one process has nothing to copy"
    nodes = {rank // world.local_size for rank in ranks}
    if len(nodes) > 1:
        return f"the {len(ranks)} ranks are not all on one node"
    if torch.cuda.device_count() < world.local_size:
        return "each process sees only some of the node's GPUs"
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set, which forbids copies between GPUs"
    others = {rank % world.local_size for rank in ranks} - {world.local_rank}
    if not all(torch.cuda.can_device_access_peer(world.local_rank, i) for i in others):
        return "the GPUs can't reach each other's memory"
    if not hasattr(symmetric, "get_mem_pool"):
        return "this PyTorch has no symmetric memory pool"
    return None


def _cannot_share(world: World, group) -> None:
    shared_empty(group.size(), torch.float32, world.device, group)


def _cannot_gather(world: World, group) -> str | None:
    gathered = shared_empty(group.size(), torch.float32, world.device, group)
    gathered[group.rank()] = group.rank()
    all_gather(gathered)
    right = gathered.tolist() == list(range(group.size()))
    return None if right else "a test gather returned wrong numbers"


class _Segment:
    """Memory that the other ranks can read, lent to one tensor at a time."""

    def __init__(self, n_bytes: int, device: torch.device, group):
        # From 10 MiB on, in steps of 2, the allocator gives a tensor its own block. Tensors in one
        # block would share its barrier.
        n_bytes = max(16, math.ceil(n_bytes / 2**21) * 2) * 2**20
        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            self.memory = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        # PyTorch 2.11 zeroes new memory on the default stream, after that stream's earlier work.
        # This could overwrite what side streams copied (a head became zeros once) or a peer's
        # signal, and the peer would wait forever. So wait here; the rendezvous waits for all ranks.
        torch.cuda.synchronize()
        self.handle = symmetric.rendezvous(self.memory, group.group_name)
        if self.handle.buffer_ptrs[self.handle.rank] != self.memory.data_ptr():
            raise RuntimeError("a block of symmetric memory is shared")
        self.lent_to, self.parts = lambda: None, {}
        by_address[self.memory.data_ptr()] = self

    def of(self, rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
        return self.handle.get_remote_tensor(rank, (n,), dtype)

    def others(self, lent: torch.Tensor) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
        """(rank, the parts of its tensor) of each other rank. Each rank starts at a different peer.
        Cached: making them takes the host as long as launching the copies."""
        kind = lent.numel(), lent.dtype
        if kind not in self.parts:
            size = self.handle.world_size
            peers = [(self.handle.rank + step) % size for step in range(1, size)]
            self.parts[kind] = [(peer, self.of(peer, *kind).chunk(size)) for peer in peers]
        return self.parts[kind]


by_address = {}  # all segments
segments = defaultdict(list)  # per group and stream, as the allocator keeps its own, or per pool


def shared_empty(
    n: int, dtype: torch.dtype, device: torch.device, group, pool: str | None = None
) -> torch.Tensor:
    """An empty tensor (n,) in memory that the group's other ranks can read. Collective: every rank
    calls with the same n and dtype on the same stream, and drops its tensors in the same order, so
    that all get the same segment. Raises RuntimeError if memory can't be shared.

    pool: tensors of one pool share memory even on different streams. The caller makes a stream wait
    for the one that used the memory before. None: a pool for each stream.

    PyTorch's pool alone does not suffice: of two free blocks of a size it takes that at the lower
    address, which may differ between ranks. Each rank would then wait at another's barrier."""
    made = segments[group.group_name, pool or torch.cuda.current_stream().cuda_stream]
    n_bytes = n * dtype.itemsize
    free = (s for s in made if s.lent_to() is None and s.memory.numel() >= n_bytes)
    if (segment := next(free, None)) is None:
        made.append(segment := _Segment(n_bytes, device, group))
    tensor = segment.of(segment.handle.rank, n, dtype)
    segment.lent_to = weakref.ref(tensor.untyped_storage())  # freed with its last view
    return tensor


class Mailbox:
    """Memory of two ranks into which each puts tensors for the other.

    A tensor is copied as soon as its sender has it. The receiver waits on the stream on which it
    takes it, so it can compute until it needs the tensor."""

    SLOTS = 4  # tensors of each direction at a time

    def __init__(self, boxes: torch.Tensor, number: int, theirs: int, other: int, timed: Callable):
        """boxes: the memory of all ranks' mailboxes, from `mailboxes`. number, theirs: of this one
        among the mailboxes of this rank, and of the rank `other`. timed: CommTimer.call."""
        segment = by_address[boxes.data_ptr()]
        far = segment.of(other, boxes.numel(), boxes.dtype).view(boxes.shape)
        self.handle, self.other, self.timed = segment.handle, other, timed
        self.numbers, self.inbox, self.outbox = (number, theirs), boxes[number], far[theirs]
        self.n_put = self.n_taken = 0
        self.limit = int(timeout().total_seconds() * 1e3)

    def put(self, t: torch.Tensor) -> None:
        """Copy a contiguous tensor to the other rank, as soon as a slot is free there."""
        slot, near, far = self._channels(self.n_put)
        if self.n_put >= self.SLOTS:
            self._wait(near + self.SLOTS)
        self.timed("put", self._copy, t, slot, far)
        self.n_put += 1

    def _copy(self, t: torch.Tensor, slot: int, channel: int) -> None:
        self.outbox[slot, : t.numel()].copy_(t.view(-1))
        self.handle.put_signal(self.other, channel, self.limit)

    def take(self, shape: tuple) -> torch.Tensor:
        """The oldest tensor that the other rank has put here, as soon as it is there."""
        slot, near, far = self._channels(self.n_taken)
        self._wait(near)
        t = self.inbox[slot, : math.prod(shape)].view(shape).clone()
        self.handle.put_signal(self.other, far + self.SLOTS, self.limit)
        self.n_taken += 1
        return t

    def _wait(self, channel: int) -> None:
        self.timed(AWAIT, self.handle.wait_signal, self.other, channel, self.limit)

    def _channels(self, n: int) -> tuple[int, int, int]:
        """(slot of the n-th tensor of a direction, the channel on which this rank learns that the
        slot is full, the channel on which the other rank does). The channels for a slot that is
        free are SLOTS higher. Barriers use channel 0."""
        slot = n % self.SLOTS
        return slot, *(1 + 2 * self.SLOTS * box + slot for box in self.numbers)


def mailboxes(n_boxes: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The memory of each rank's mailboxes, for tensors of at most n elements. Nothing else may use
    it later. Collective over all ranks: up to PyTorch 2.13 a rendezvous is numbered per process,
    not per group, so ranks that had been in fewer of them would wait for ever."""
    shape = n_boxes, Mailbox.SLOTS, n
    return shared_empty(math.prod(shape), dtype, device, dist.group.WORLD).view(shape)


def all_gather(output: torch.Tensor) -> None:
    """Fill `output` (n,) from shared_empty with every rank's part; this rank's part is already
    there. n: a multiple of the number of ranks. Collective."""
    segment = by_address[output.data_ptr()]
    parts = output.chunk(segment.handle.world_size)
    segment.handle.barrier()  # all parts are in place
    for peer, theirs in segment.others(output):
        parts[peer].copy_(theirs[peer])
    segment.handle.barrier()  # all have read


def all_to_all(input: torch.Tensor) -> list[torch.Tensor]:
    """This rank's part (n / ranks,) of every rank's `input` (n,) from shared_empty, in rank order.
    The part of its own input is a view. Collective."""
    segment = by_address[input.data_ptr()]
    parts = list(input.chunk(segment.handle.world_size))
    segment.handle.barrier()
    for peer, theirs in segment.others(input):
        mine = theirs[segment.handle.rank]
        parts[peer] = torch.empty_like(mine).copy_(mine)
    segment.handle.barrier()
    return parts
