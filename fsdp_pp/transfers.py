"""Sends hidden states and their gradients between the pieces of the model."""

import itertools
import os
from collections import defaultdict, deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_pp.orders import BACKWARD, FORWARD
from llm_demo.core.mesh import World
from llm_demo.machine.device import other_than_nvlink
from llm_demo.machine.dist import from_rank0, timeout

# Thread blocks of NCCL's kernel for a transfer, each of which takes up a processor of the GPU, also
# while it waits. With NCCL's own choice a step took 5 % longer (bench/LOG.md).
MAX_CTAS = 2


def small_group(ranks: list[int], device: torch.device) -> dist.ProcessGroup:
    """A process group whose transfers leave the device to the compute beside them."""
    if device.type != "cuda":
        return dist.new_group(ranks, timeout=timeout())
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas, options._timeout = MAX_CTAS, timeout()
    return dist.new_group(ranks, timeout=timeout(), backend="nccl", pg_options=options)


def receive_early(world: World, say: Callable) -> bool:
    """Whether NCCL's receives begin with the piece of work before the one that they are launched
    for. Collective. Logs the reason.

    NCCL's kernel of a receive takes up a part of the device while it waits for the sender. Over
    NVLink this costs more than the transfer itself, so receives begin later."""
    if world.device.type != "cuda":  # a receive blocks, and is called where it is needed
        return False
    others = from_rank0(world, other_than_nvlink)
    if world.size > world.local_size:
        why = "some transfers are between nodes"
    elif os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        why = "NCCL_P2P_DISABLE is set"
    elif others:
        why = f"over {others}"
    else:
        say("receives: begin late (over NVLink, waiting costs more than the transfer)")
        return False
    say(f"receives: begin early ({why})")
    return True


class Link:
    """Transfers from one rank to another, always in the same order.

    A process group and a stream of its own: a transfer that waits for its other side holds up no
    other, and computing goes on meanwhile."""

    def __init__(self, source: int, target: int, group: dist.ProcessGroup, device: torch.device):
        self.source, self.target, self.group, self.device = source, target, group, device
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self.under_way = deque()

    def send(self, t: torch.Tensor) -> None:
        t = t.contiguous()
        if not self.cuda:  # dist.send would wait until the other side receives
            self.under_way.append((dist.isend(t, self.target, group=self.group), t))
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            dist.send(t, self.target, group=self.group)
        t.record_stream(self.stream)

    def expect(self, shape: tuple, dtype: torch.dtype, after: torch.cuda.Event | None) -> None:
        """Receive the next tensor, from `after` on."""
        if not self.cuda:
            self.under_way.append(torch.empty(shape, dtype=dtype))
            return
        if after:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            t = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(t, self.source, group=self.group)
            self.under_way.append((t, self.stream.record_event()))

    def take(self) -> torch.Tensor:
        """The oldest tensor that is expected, once it is there."""
        if not self.cuda:
            t = self.under_way.popleft()
            dist.recv(t, self.source, group=self.group)
            return t
        t, there = self.under_way.popleft()
        torch.cuda.current_stream().wait_event(there)
        t.record_stream(torch.cuda.current_stream())
        return t

    def finish(self) -> None:
        """Wait for what was sent, on a CPU."""
        while self.under_way:
            self.under_way.popleft()[0].wait()


class CopiedLink:
    """A Link in one direction of a copy_engines.Mailbox: its transfers are copies by the GPUs' copy
    engines."""

    def __init__(self, box, sends: bool):
        self.box, self.shapes = box, deque()
        self.stream = torch.cuda.Stream() if sends else None

    def send(self, t: torch.Tensor) -> None:
        t = t.contiguous()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.box.put(t)
        t.record_stream(self.stream)

    def expect(self, shape: tuple, dtype: torch.dtype, after: torch.cuda.Event | None) -> None:
        """Note the shape of the next tensor. It comes without having been asked for."""
        self.shapes.append(shape)

    def take(self) -> torch.Tensor:
        """The oldest tensor that is expected, once it is there."""
        return self.box.take(self.shapes.popleft())

    def finish(self) -> None:
        """Let the compute stream wait for what was sent, so that its times can be read after it."""
        torch.cuda.current_stream().wait_stream(self.stream)


class Links:
    """A rank's links to the pieces before and after its own, once made.

    Args:
        stages: the stage of each piece.
        grid: ranks, [stages, shards].
        rank: this rank."""

    def __init__(self, stages: list[int], grid: torch.Tensor, rank: int, device: torch.device):
        self.rank, self.device, self.cuda = rank, device, device.type == "cuda"
        self.early = self.begun = None
        self.sent, self.received, self.pairs = {}, {}, []
        self.passed = defaultdict(deque)  # from one piece of this stage to another
        for piece, (stage, after) in enumerate(itertools.pairwise(stages)):
            if stage != after:
                for pair in zip(grid[stage].tolist(), grid[after].tolist(), strict=True):
                    self.pairs.append((piece, *pair))

    def by_nccl(self, early: bool) -> None:
        """Make links of NCCL, or of gloo on a CPU. early: see receive_early.

        Every rank makes the groups of all pipelines: a group is made by all ranks together. Each
        link sends something once: the first transfer of a group makes the host wait for the other
        side."""
        self.early = early
        for piece, a, b in self.pairs:
            there, back = (FORWARD, piece + 1, a, b), (BACKWARD, piece, b, a)
            for kind, into, source, target in (there, back):
                group = small_group([source, target], self.device)
                if self.rank not in (source, target):
                    continue
                link = Link(source, target, group, self.device)
                if self.rank == source:
                    self.sent[kind, into] = link
                    link.send(torch.zeros(1, device=self.device))
                else:
                    self.received[kind, into] = link
                    link.expect((1,), torch.float32, None)
                    link.take()
        self.finish()

    def by_copy_engines(self, largest: int, dtype: torch.dtype, timed: Callable) -> None:
        """Make links of copy engines. largest: elements of a transfer at most. timed:
        CommTimer.call."""
        from fsdp.copy_engines import Mailbox, mailboxes

        of_rank = defaultdict(list)  # its pairs; the n-th has its n-th mailbox
        for pair in self.pairs:
            for rank in pair[1:]:
                of_rank[rank].append(pair)
        boxes = mailboxes(max(map(len, of_rank.values())), largest, dtype, self.device)
        for number, pair in enumerate(of_rank[self.rank]):
            piece, first, second = pair
            other = second if self.rank == first else first
            box = Mailbox(boxes, number, of_rank[other].index(pair), other, timed)
            for kind, into, source in (FORWARD, piece + 1, first), (BACKWARD, piece, second):
                sends = self.rank == source
                links = self.sent if sends else self.received
                links[kind, into] = CopiedLink(box, sends)

    def begin(self) -> None:
        """A piece of work begins."""
        if self.cuda and self.early:
            self.begun = torch.cuda.current_stream().record_event()

    def expect(self, kind: str, piece: int, shape: tuple, dtype: torch.dtype) -> None:
        """Receive by NCCL beside the work that has begun if early, else after it."""
        if self.cuda and self.early is False:
            self.begun = torch.cuda.current_stream().record_event()
        self.received[kind, piece].expect(shape, dtype, self.begun)

    def give(self, kind: str, piece: int, t: torch.Tensor) -> None:
        """Send a tensor to a piece, or pass it on if that is here."""
        link = self.sent.get((kind, piece))
        (link.send if link else self.passed[kind, piece].append)(t)

    def take(self, kind: str, piece: int) -> torch.Tensor:
        """The oldest tensor for a piece of this stage."""
        link = self.received.get((kind, piece))
        return link.take() if link else self.passed[kind, piece].popleft()

    def finish(self) -> None:
        """Wait for what was sent: the host on a CPU, the device for copies."""
        for link in self.sent.values():
            link.finish()
