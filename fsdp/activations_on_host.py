"""Inputs of a decoder's units in host memory, from their forward to their backward.

With activation checkpointing and units of one block, a block keeps nothing else. Copies run on a
stream of their own, beside the compute of the next blocks."""

import contextlib
import math
from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks

from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.machine.device import cores_near, free_host_memory, pin
from llm_demo.machine.dist import once_per_node
from llm_demo.machine.process import stay_near

STAY = 2  # inputs that stay on the device: while the last is used, the one before is copied


class ActivationsOnHost:
    """Host memory for the inputs of n units in one micro-batch, each of a shape and dtype. Raises
    UserError if it can't be pinned."""

    def __init__(self, n: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.shape, self.dtype, self.device, self.n = torch.Size(shape), dtype, device, n
        # the last unit's is needed first
        self.buffers = torch.empty(n - 1, *shape, dtype=dtype)
        self.stream = None
        if device.type != "cpu":
            self.stream = torch.get_device_module(device).Stream(device)
            if len(self.buffers):
                pin_all(self.buffers, self, "--activations_on_host")
        # by unit: (input on the device, the end of its copy, whether that is from the host)
        self.kept = {}

    def of_unit(self, i: int, hidden: torch.Tensor):
        """A context for the forward of unit i, in which autograd saves its input `hidden` here.
        Every unit's forward has to be followed by that of the next, or by none."""
        if not torch.is_grad_enabled() or hidden.shape != self.shape:
            return contextlib.nullcontext()
        if i == 0:
            self._drop(-1)  # what a forward without a backward has left
        given = hidden.data_ptr(), self.shape, hidden.stride(), self.dtype

        def pack(t: torch.Tensor):
            same = (t.data_ptr(), t.shape, t.stride(), t.dtype) == given
            if not same or i == self.n - 1:
                return t
            if i not in self.kept:
                self._send(i, t.detach())
            return i

        return saved_tensors_hooks(pack, self._take)

    def _send(self, i: int, t: torch.Tensor) -> None:
        self.kept[i] = t, self._copy(self.buffers[i], t), False
        if i >= STAY:
            self._wait(self.kept.pop(i - STAY)[1])  # what is computed from now on may overwrite it

    def _take(self, packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        for i in (packed, packed - 1):
            if i >= 0 and i not in self.kept:
                t = torch.empty(self.shape, dtype=self.dtype, device=self.device)
                self.kept[i] = t, self._copy(t, self.buffers[i]), True
        t, copied, fetched = self.kept[packed]
        if fetched:
            self._wait(copied)
        self._drop(packed - 1)  # autograd holds it now
        return t

    def _drop(self, after: int) -> None:
        """Drop the inputs of all later units."""
        for i in [i for i in self.kept if i > after]:
            self._wait(self.kept.pop(i)[1])

    def _copy(self, to: torch.Tensor, source: torch.Tensor):
        """Copy after what has been computed by now, beside what follows. Returns the copy's end."""
        if not self.stream:
            to.copy_(source)
            return None
        module = torch.get_device_module(self.device)
        self.stream.wait_stream(module.current_stream())
        with module.stream(self.stream):
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def _wait(self, copied) -> None:
        if self.stream:
            torch.get_device_module(self.device).current_stream().wait_event(copied)


def host_bytes(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of host memory that a rank's ActivationsOnHost takes."""
    return (n - 1) * math.prod(shape) * dtype.itemsize


def keep_on_host(
    n: int, shape: tuple[int, ...], dtype: torch.dtype, world: World, say: Callable, others: int = 0
) -> ActivationsOnHost:
    """ActivationsOnHost for a rank, which is bound to CPU cores near its GPU. Every rank calls.
    others: further bytes of this node's memory that will be used. Raises UserError if the node has
    too little."""
    need = world.local_size * host_bytes(n, shape, dtype)
    what = "host memory"
    what += f" besides the optimizer's {others / 2**30:.1f} GiB" if others else ""
    advice = "use shorter rows or a smaller --micro_batch_size"
    say(once_per_node(world, lambda: claim_host("activations", need, what, advice, world, others)))
    return ActivationsOnHost(n, shape, dtype, world.device)


def claim_host(name: str, need: int, what: str, advice: str, world: World, others: int = 0) -> str:
    """Check that this node has `need` bytes of memory, and `others` besides, and keep this process
    near its GPU. Returns what to log. Raises UserError if they do not fit."""
    gb, free = need / 2**30, free_host_memory()
    if need + others > free:
        raise UserError(
            f"--{name}_on_host needs {gb:.1f} GiB of {what}, and {free / 2**30:.1f} GiB are free: "
            f"{advice}"
        )
    where = stay_near(cores_near(world.device))
    return f"{name} on the host: {gb:.1f} GiB of {free / 2**30:.1f} GiB free{where}"


def pin_all(memory: torch.Tensor, owner, flag: str) -> None:
    """Pin host memory for as long as its owner lives. Raises UserError if it can't be."""
    if not pin(memory, owner):
        raise UserError(
            f"{flag}: host memory can't be pinned: free memory, or raise the limit of locked "
            "memory (ulimit -l)"
        )
