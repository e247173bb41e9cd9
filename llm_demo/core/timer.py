"""Times the steps of a run: compute, communication, data, memory."""

import contextlib
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from llm_demo.core.comm import CommTimer
from llm_demo.core.mesh import World


class Timings(NamedTuple):
    """What an interval of steps took, per step where a step is named. Times are in ms."""

    counts: Counter  # of steps, tokens, labels, slots, flops in it, over all ranks
    numbers: dict[str, torch.Tensor]  # of its last step, on the CPU
    seconds: float
    memory: tuple[float, float, int]  # as memory_peaks, with the retries of this interval
    busy: float  # see comm.py, as exposed and doubt
    exposed: float
    doubt: float
    operations: dict  # {operation: (start, end)} for comm.waiting
    data: float  # to make the batches


class StepTimer:
    """Marks steps on the device, so that reading their times never makes the host wait for it.

    comm: whether communication is timed."""

    def __init__(self, world: World, comm: bool = True):
        self.device, self.times_comm = world.device, comm
        self.comm = CommTimer(world.device, world.rank, world.size)
        self.started, self.retries = time.perf_counter(), 0  # retries: of the allocator so far
        self.restart()

    def begin(self) -> None:
        """Start before step 1, with the memory that loading has left given back."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.started, self.retries = time.perf_counter(), memory_peaks(self.device)[2]
        if self.times_comm:
            self.comm.install()
        self.restart()

    def restart(self, since=None) -> None:
        """Start an interval at the event `since`, by default now: what came before it, such as an
        evaluation, belongs to no step."""
        self.comm.take()
        self.data_seconds, self.since = 0.0, since or self.comm.event()
        self.counts = Counter()

    def stop(self) -> float:
        """The seconds since `begin`."""
        self.comm.remove()
        return time.perf_counter() - self.started

    def mute(self) -> contextlib.AbstractContextManager:
        """Do not time the communication inside."""
        return self.comm.mute()

    def data(self, batches: Iterable) -> Iterator:
        """Yield the same batches, and time how long they take to make."""
        batches = iter(batches)
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self.data_seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def count(self, **counts: float) -> None:
        """Count a step: its tokens, labels, slots and flops over all ranks."""
        self.counts.update(steps=1, **counts)

    def end(
        self, numbers: dict, more: Callable[[], dict] = dict, first: bool = False
    ) -> Callable[[], Timings]:
        """End an interval. Returns what reads it, to be called a logged step later: by then the
        device has come here.

        numbers: {name: tensor on the device}; more(): further ones, which may take communication.
        Both are copied to the host meanwhile. first: the next interval begins after the copies."""
        ended = self.comm.event()
        with self.mute():
            copies = {name: _to_cpu(value) for name, value in {**numbers, **more()}.items()}
        copied = self.comm.event()  # later than `ended`
        *peaks, retries = memory_peaks(self.device)
        memory = (*peaks, retries - self.retries)
        self.retries = retries
        counts, taken, data, since = self.counts, self.comm.take(), self.data_seconds, self.since
        self.restart(None if first else ended)

        def read() -> Timings:
            copied.synchronize()
            seconds, steps = since.elapsed_time(ended) / 1e3, counts["steps"]
            *times, operations = self.comm.read(taken, since)
            times = [ms / steps for ms in times]
            data_ms = data * 1e3 / steps
            return Timings(counts, copies, seconds, memory, *times, operations, data_ms)

        return read


def _to_cpu(value):
    value = value.detach() if hasattr(value, "detach") else value
    return value.to("cpu", non_blocking=True) if hasattr(value, "to") else value


def memory_peaks(device: torch.device) -> tuple[float, float, int]:
    """(peak memory of this process: allocated on a GPU, resident on a CPU; peak that PyTorch's
    allocator reserved on a GPU; its retries so far), memory in 2**30 bytes. In a retry the
    allocator is out of memory, frees what it only keeps, and waits for the device."""
    if device.type != "cuda":
        return peak_host_gb(), 0.0, 0
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return allocated / 2**30, reserved / 2**30, stats["num_alloc_retries"]


def peak_host_gb() -> float:
    """Peak resident host memory of this process in 2**30 bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
