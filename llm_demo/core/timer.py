"""Times the steps of a run: compute, communication, data, memory; cheaply enough for all of it.

For communication, the Python entry points of torch.distributed are wrapped, and a pair of events is
recorded on the communicating stream: the compute stream, or a side stream, also one of autograd's
threads. On a CPU the clock is read instead.

    busy     union of the times in which an operation was under way, waiting for a peer included
    exposed  the part of busy in which nothing was computed: operations on the compute stream,
             and operations on other streams while it waits for them
    wait     the part of busy that was not transfer: the union of the operations' waits. Each wait
             lasts from the operation's start for its time beyond the shortest time of the same
             operation on any of its ranks; a send and its receive count as one operation, matched
             by order; a wait for a signal of copy_engines.py is all wait

profiling.py takes the same from a profiler's trace. Its exposed is the communication during which
no kernel runs.
"""

import contextlib
import functools
import inspect
import math
import resource
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from llm_demo.core.mesh import World


class Timings(NamedTuple):
    """What an interval of steps took, per step where a step is named. Times are in ms."""

    counts: Counter  # of steps, tokens, labels, slots, flops in it, over all ranks
    numbers: dict[str, torch.Tensor]  # of its last step, on the CPU
    seconds: float
    memory: tuple[float, float, int]  # as memory_peaks, with the retries of this interval
    busy: float  # see above, as exposed
    exposed: float
    operations: dict  # {operation: (start, end)} for profiling.waiting
    data: float  # to make the batches


class StepTimer:
    """Marks steps on the device, so that reading their times never makes the host wait for it.

    comm: whether communication is timed."""

    def __init__(self, world: World, comm: bool = True):
        self.device, self.times_comm = world.device, comm
        self.comm = CommTimer(world.device, world.rank, world.size)
        self.mute = self.comm.mute  # a context: communication inside is not timed
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
        """End an interval. Returns a function that reads it, to be called one logged step later,
        when the device has passed this point.

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


COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
    "send",
    "recv",
)
AWAIT = "wait_signal"  # an operation that only waits
MUTED = "llm_demo: not timed"  # so that a CPU profile can exclude it too


def union(intervals) -> float:
    """Length covered by (start, end) pairs, overlaps counted once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def waiting(ranks: list[dict]) -> list[float]:
    """How long each rank waited inside operations, overlaps counted once. ranks: {operation:
    (start, end)} of each, by its own clock, in the unit of the result."""
    transfer = {}
    for operations in ranks:
        for key, (start, end) in operations.items():
            least = 0.0 if AWAIT in str(key[0]) else end - start
            transfer[key] = min(least, transfer.get(key, math.inf))
    return [
        union((start, end - transfer[key]) for key, (start, end) in operations.items())
        for operations in ranks
    ]


class _Clock:
    """A CPU clock with the interface of an event."""

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, later) -> float:
        return (later.at - self.at) * 1e3

    def synchronize(self):
        pass


class CommTimer:
    """Times operations; `take` collects those of a step, `read` reads them after its end."""

    def __init__(self, device: torch.device, rank: int, size: int):
        self.device, self.rank = device, rank
        self.cuda = device.type == "cuda"
        self.spare, self.ops, self.waits, self.muted = [], [], [], size == 1
        self.counts = Counter()
        self.originals = {}

    def event(self):
        """A timing event (a clock on a CPU), recorded now on the current stream."""
        event = self._take_event()
        event.record()
        return event

    def _take_event(self):
        return self.spare.pop() if self.spare else self._new()

    def _new(self):
        return torch.cuda.Event(enable_timing=True) if self.cuda else _Clock()

    def install(self) -> None:
        """Wrap torch.distributed's functions."""
        for name in COLLECTIVES:
            if hasattr(dist, name):
                parameters = tuple(inspect.signature(getattr(dist, name)).parameters)
                self._patch(dist, name, functools.partial(self._timed_call, name, parameters))
        self._patch(dist, "batch_isend_irecv", self._timed_batch)
        if self.cuda:
            self.compute = torch.cuda.current_stream().cuda_stream
            self._patch(torch.cuda.Stream, "wait_event", self._timed_wait)

    def call(self, name: str, function, *args, group: dist.ProcessGroup | None = None):
        """Call and time a collective that is not one of torch.distributed's. group: the ranks that
        take part; None: all."""
        if not self.originals:  # not installed
            return function(*args)
        return self._timed(f"copied {name}", function, args, {}, group)

    def remove(self) -> None:
        for (where, name), original in self.originals.items():
            setattr(where, name, original)
        self.originals.clear()

    @contextlib.contextmanager
    def mute(self):
        """Do not time operations inside, such as reading the measurements themselves."""
        muted, self.muted = self.muted, True
        try:
            with torch.profiler.record_function(MUTED):
                yield
        finally:
            self.muted = muted

    def _patch(self, where, name, wrapper):
        original = self.originals[where, name] = getattr(where, name)

        @functools.wraps(original)
        def patched(*args, **kwargs):
            return wrapper(original, args, kwargs)

        setattr(where, name, patched)

    def _timed_call(self, name, parameters, call, args, kwargs):
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if given.get("async_op"):
            return call(*args, **kwargs)
        ends = {"send": (self.rank, given.get("dst")), "recv": (given.get("src"), self.rank)}
        return self._timed(name, call, args, kwargs, given.get("group"), ends.get(name))

    def _timed(self, name, call, args, kwargs, group=None, ends=None):
        lists = (v if isinstance(v, (list, tuple)) else [v] for v in (*args, *kwargs.values()))
        tensors = [t for values in lists for t in values if isinstance(t, torch.Tensor)]
        if self.muted or any(t.device.type != self.device.type for t in tensors):
            return call(*args, **kwargs)
        ends = ends or (name,)
        ends += (group.group_name if group is not None else "",)  # each has an order of its own
        start, called = self.event(), time.perf_counter()
        result = call(*args, **kwargs)
        # An idle stream passes the event long before the operation is launched, which is the last
        # thing the call does. Copies are several launches, the first of them immediate.
        launched_last = not name.startswith("copied")
        late = 0.0
        if self.cuda and launched_last and start.query():
            late = (time.perf_counter() - called) * 1e3
        self._note(ends, start, late)
        return result

    def _timed_batch(self, call, args, kwargs):
        ops = args[0]
        if self.muted or any(op.tensor.device.type != self.device.type for op in ops):
            return call(*args, **kwargs)
        start = self.event()
        works = call(*args, **kwargs)

        def wait():  # of the works as one
            for work in works:
                work.wait()
            self._note(("batch", ""), start)

        return [types.SimpleNamespace(wait=wait)]

    def _timed_wait(self, call, args, kwargs):
        stream = args[0]
        if self.muted or stream.cuda_stream != self.compute:
            return call(*args, **kwargs)
        start, end = self._take_event(), self._take_event()
        start.record(stream)
        result = call(*args, **kwargs)
        end.record(stream)
        self.waits.append((start, end))
        return result

    def _note(self, ends, start, late=0.0):
        on_compute = not self.cuda or torch.cuda.current_stream().cuda_stream == self.compute
        key = (*ends, self.counts[ends])
        self.counts[ends] += 1
        self.ops.append((key, start, self.event(), on_compute, late))

    def take(self):
        """Return what was recorded since the last call, for `read` after the step has ended."""
        taken = self.ops, self.waits
        self.ops, self.waits, self.counts = [], [], Counter()
        return taken

    def read(self, taken, origin) -> tuple[float, float, dict]:
        """(busy ms, exposed ms, {operation: (start, end)}) of what `take` returned, with
        start and end in ms since `origin`, an earlier event."""
        ops, waits = taken
        for key, _, end, *_ in ops:
            if key[0] == self.rank:  # a send, for which the compute stream does not wait
                end.synchronize()

        def interval(start, end, late=0.0):
            at = origin.elapsed_time(start) + late
            # AMD's drivers have returned small negative times
            return at, at + max(0.0, start.elapsed_time(end) - late)

        timed = [(key, on_compute, interval(s, e, late)) for key, s, e, on_compute, late in ops]
        spans = [span for _, _, span in timed]
        stalls = [interval(s, e) for s, e in waits]
        stalls += [span for _, on_compute, span in timed if on_compute]
        busy = union(spans)
        # the compute stream also waits for arithmetic on other streams: count only the overlap
        exposed = busy + union(stalls) - union(spans + stalls)
        self.spare += [event for op in ops for event in op[1:3]] if self.cuda else []
        self.spare += [event for pair in waits for event in pair]
        return busy, exposed, {key: span for key, _, span in timed}
