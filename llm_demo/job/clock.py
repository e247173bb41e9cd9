"""Times the steps of a run and logs them."""

import math
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from llm_demo.core.comm import CommTimer, waiting
from llm_demo.core.errors import UserError, counted
from llm_demo.core.mesh import World
from llm_demo.job.args import Args, less_memory, parse_steps
from llm_demo.job.device import memory_peaks, peak_host_gb, peak_tflops, this_device
from llm_demo.job.folder import last_checkpoint
from llm_demo.job.log import Log
from llm_demo.job.profiling import StepProfiler
from llm_demo.job.summary import History, timed_while_profiled


class Clock:
    """Times steps and logs them. Every rank calls every method.

    dtype: the compute dtype."""

    def __init__(
        self,
        args: Args,
        world: World,
        log: Log,
        max_steps: int,
        dtype: torch.dtype,
    ):
        self.args, self.world, self.log = args, world, log
        self.max_steps = max_steps
        device = this_device(world.device.index or 0)
        self.peak = args.peak_tflops or peak_tflops(device, dtype)
        self.history = History()
        self.comm, self.gather = CommTimer(world.device, world.rank, world.size), Gather(world)
        steps = parse_steps(args.profile_steps)
        self.profiler, self.profile = steps and StepProfiler(steps, world), None
        self.pending = None  # a logged step whose numbers are still on the device
        # () -> how often each expert of each block was chosen since the last call, over all ranks
        self.router_load = None
        self.more = {}  # further numbers of a step: {name: 0-dim tensor}
        self.bad_steps, self.unchecked, self.copied = 0, [], None
        self.retries, self.warned = 0, False  # of the allocator, before the pending step
        self.started = time.perf_counter()
        self.restart()

    def begin(self) -> None:
        """Start the clock before step 1."""
        self.started = time.perf_counter()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # what loading has left
            torch.cuda.reset_peak_memory_stats()
        self.retries = memory_peaks(self.world.device)[2]
        if self.args.comm_timer:
            self.comm.install()
        first, last = self.history.first_step + 1, self.max_steps
        if self.profiler and not first <= self.profiler.first <= self.profiler.last <= last:
            self.log.say(
                f"--profile_steps {self.args.profile_steps}: nothing is profiled, since this run "
                f"has steps {first} to {last}"
            )
            self.profiler = None
        self._profile_from(first)
        self.restart()

    def restart(self, since=None) -> None:
        """Start a new interval at the event `since`, by default now: the time since the last logged
        step (e.g. an evaluation) belongs to no step."""
        self.comm.take()
        self.data_seconds, self.since = 0.0, since or self.comm.event()
        self.interval = Counter()  # of steps, tokens, labels, slots, FLOPs

    def data(self, batches: Iterable) -> Iterator:
        """Yield the same batches, and log the time to make them as perf/data_ms."""
        batches = iter(batches)
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self.data_seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def end_step(self, step, n_tokens, n_labels, slots, flops, loss, grad_norm, lr: float) -> None:
        """Record optimizer step `step` (from 1) if it is to be logged.

        n_tokens, n_labels, slots, flops: the step's, over all ranks. loss: this rank's share of the
        step's loss; grad_norm: the same on every rank; both are 0-dim tensors on the device. They
        are written one logged step later, because reading them now would make the host wait for the
        device. Raises UserError, on every rank, after --max_skipped_steps consecutive steps with a
        non-finite loss or norm."""
        logged = step % self.args.log_every == 0 or step == self.max_steps
        if self.profiler:
            logged |= step + 1 == self.profiler.first or step == self.profiler.last
        ended = self.comm.event() if logged else None
        history, interval = self.history, self.interval
        first = step == history.first_step + 1
        if first:
            with self.comm.mute():
                history.records += self.log.open(history.first_step)
        history.step = step
        history.tokens += n_tokens
        history.label_tokens += n_labels
        interval.update(steps=1, tokens=n_tokens, labels=n_labels, slots=slots, flops=flops)
        if self.args.log_every > 1:
            self._watch(step, loss.detach() + grad_norm)
        if not logged:
            return
        more = {name: t.to("cpu", non_blocking=True) for name, t in self.more.items()}
        if self.router_load:
            with self.comm.mute():
                more["moe/load"] = self.router_load().to("cpu", non_blocking=True)
        if isinstance(grad_norm, torch.Tensor):
            grad_norm = grad_norm.float().to("cpu", non_blocking=True)
        loss = loss.detach().to("cpu", non_blocking=True)
        numbers = loss, grad_norm, more, self.comm.event()  # after which they are there
        totals = (history.tokens, history.label_tokens)
        *memory, retries = memory_peaks(self.world.device)
        memory.append(retries - self.retries)
        self.retries = retries
        measured = (memory, self.comm.take(), self.data_seconds, self.since, ended)
        previous, self.pending = self.pending, (step, interval, totals, numbers, lr, *measured)
        self.restart(None if first else ended)
        if previous:
            self._log_step(*previous)
        if step == self.max_steps:
            self.flush()
        self._profile_from(step + 1)

    def flush(self) -> None:
        """Write the pending step."""
        if self.pending:
            previous, self.pending = self.pending, None
            self._log_step(*previous)

    def log_eval(self, step: int, loss: float, right: int, rows: int) -> None:
        """Log an evaluation. right: held-out rows answered exactly."""
        self.history.evals.append((step, loss))
        self.history.exact.append((step, right / rows))
        self.log.record({"step": step, "eval/loss": loss, "eval/exact": right / rows})
        self.log.say(
            f"step {step}/{self.max_steps} | held-out loss {loss:.4f} | {right / rows:.1%} of "
            f"{counted(rows, 'row')} answered exactly"
        )
        self.restart()

    def stop(self) -> tuple[float, dict | None, list[float]]:
        """(seconds since `begin`, the profiler's figures or None, each rank's peak host memory)."""
        self.comm.remove()
        host = [None] * self.world.size
        dist.all_gather_object(host, round(peak_host_gb(), 3))
        profile = self.profile
        if profile:
            timer = timed_while_profiled(self.history, self.profiler.first, self.profiler.last)
            profile = {**profile, "timer": timer}
        return time.perf_counter() - self.started, profile, host

    def _profile_from(self, step: int) -> None:
        """Start or stop the profiler before `step`, then restart the clock."""
        if not self.profiler:
            return
        if step == self.profiler.first:
            self.flush()
            self.profiler.start()
            self.restart()
        if step == self.profiler.last + 1:
            self.flush()
            with self.comm.mute(), self.log.writing():
                self.profile = self.profiler.stop(self.log.folder)
            self.log.say(f"profile: {self.log.folder}/profile.txt")
            self.restart()

    def _log_step(
        self, step, interval, totals, numbers, lr, memory, comm, data_s, since, ended
    ) -> None:
        loss, grad_norm, more, copied = numbers
        copied.synchronize()  # later than `ended`
        steps, tokens = interval["steps"], interval["tokens"]
        labels, slots = interval["labels"], interval["slots"]
        seconds = since.elapsed_time(ended) / 1e3
        busy, exposed, doubt, operations = self.comm.read(comm, since)
        loss, grad_norm = float(loss), float(grad_norm)
        with self.comm.mute():
            times = (busy, exposed, doubt, data_s * 1e3)
            mine = [loss, *memory, *(x / steps for x in times)]
            ranks, wait = self.gather.step(mine, operations)
        columns = map(list, zip(*ranks, strict=True))
        share, memory, reserved, retries, busy, exposed, doubt, data_ms = columns
        self.history.doubts[step] = doubt
        if self.args.comm_timer:
            comm = [[round(x, 3) for x in ms] for ms in (busy, exposed, [x / steps for x in wait])]
        else:
            comm = [None] * 3
        loss = math.fsum(share)
        flops = interval["flops"] / seconds / self.world.size
        record = {
            "step": step,
            "train/loss": loss,
            "train/grad_norm": grad_norm,
            "train/lr": lr,
            "train/skipped": not math.isfinite(grad_norm),
            "perf/step_ms": seconds * 1e3 / steps,
            "perf/comm_ms": comm[0],
            "perf/comm_exposed_ms": comm[1],
            "perf/comm_wait_ms": comm[2],
            "perf/data_ms": round(max(data_ms), 3),
            "perf/toks_per_s": tokens / seconds,
            "perf/label_toks_per_s": labels / seconds,
            "perf/slots_per_s": slots / seconds,
            "perf/mfu": flops / (self.peak * 1e12) if self.peak else None,
            "perf/peak_mem_gb": [round(x, 3) for x in memory],
            "perf/reserved_gb": [round(x, 3) for x in reserved] if any(reserved) else None,
            "perf/alloc_retries": list(map(int, retries)) if any(reserved) else None,
            "data/tokens": totals[0],
            "data/label_tokens": totals[1],
            "data/fill": tokens / slots,
        }
        if (load := more.pop("moe/load", None)) is not None:
            # for each block: the largest load over the mean, and the share of experts without load
            most, mean = load.max(1).values, load.double().mean(1)
            record["moe/load"] = [round(x, 3) for x in (most / mean).tolist()]
            record["moe/idle"] = [round(x, 4) for x in (load == 0).double().mean(1).tolist()]
        record |= {name: float(t) for name, t in more.items()}
        self.history.records.append(record)
        self.log.record(record)
        if record["train/skipped"]:
            self.log.say(f"step {step}: the gradient norm is not finite, so all ranks skip it")
        if any(retries) and not self.warned:
            self.warned = True
            self.log.say(
                f"warning: GPU memory ran out {counted(int(max(retries)), 'time')} up to step "
                f"{step}. Each time PyTorch freed its cache and waited for the GPU, which slows "
                f"the step. Use less memory: {less_memory(self.args)}"
            )
        fields = self._fields(record)
        self.log.say(" | ".join(fields), shown=fit_terminal(fields))
        if self.args.log_every == 1:
            self._count(step, not math.isfinite(loss) or record["train/skipped"])

    def _fields(self, r: dict) -> list[str]:
        """The parts of the line of a step."""
        left = timedelta(seconds=int((self.max_steps - r["step"]) * r["perf/step_ms"] / 1e3))
        eta = f"eta {left}".replace("eta 0:", "eta ").replace("eta 0", "eta ")
        comm = f"{max(r['perf/comm_ms']):.0f}" if r["perf/comm_ms"] else "n/a"
        labels = _kilo(r["perf/label_toks_per_s"])
        return [
            f"step {r['step']}/{self.max_steps}",
            f"loss {r['train/loss']:.4f}",
            *([f"load {max(r['moe/load']):.1f}x"] if "moe/load" in r else []),
            f"gnorm {r['train/grad_norm']:.2f}",
            f"lr {r['train/lr']:.1e}",
            f"{r['perf/step_ms']:.0f} ms (comm {comm})",
            f"{_kilo(r['perf/toks_per_s'])} tok/s ({labels} labels)",
            *([f"mfu {r['perf/mfu']:.1%}"] if self.peak else []),
            f"mem {max(r['perf/reserved_gb'] or r['perf/peak_mem_gb']):.1f} GB",
            eta,
        ]

    def _watch(self, step: int, value: torch.Tensor) -> None:
        """If not every step is logged, check all steps for non-finite values, in groups, some steps
        later. value: not finite if this rank's loss or the norm is not."""
        limit = self.args.max_skipped_steps
        if not limit:
            return
        self.unchecked.append(value)
        if len(self.unchecked) == max(1, min(limit // 2, 10)) or step == self.max_steps:
            values = torch.stack(self.unchecked).to("cpu", non_blocking=True)
            previous, self.copied = self.copied, (step, values, self.comm.event())
            self.unchecked = []
            for group in (previous, self.copied if step == self.max_steps else None):
                if group:
                    self._check(*group)

    def _check(self, last: int, values: torch.Tensor, copied) -> None:
        copied.synchronize()
        with self.comm.mute():
            ranks = self.gather.floats(values.tolist())
        for step, row in enumerate(zip(*ranks, strict=True), last + 1 - len(values)):
            self._count(step, not all(map(math.isfinite, row)))

    def _count(self, step: int, bad: bool) -> None:
        self.bad_steps = self.bad_steps + 1 if bad else 0
        if self.bad_steps >= self.args.max_skipped_steps > 0:
            raise UserError(
                f"loss or gradient norm not finite in {self.bad_steps} steps in a row, up to step "
                f"{step} (--max_skipped_steps): check the data, try a lower --lr or --dtype fp32;"
                f" {last_checkpoint(self.log.folder)}"
            )


def fit_terminal(fields: list[str]) -> str:
    """The fields in one line, without those that matter least if the terminal is narrower."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    fields = [*fields]
    details = r" \(.* labels\)", r" \(comm .*\)", "lr .*", "mem .*", "gnorm .*", "load .*", "mfu .*"
    for detail in details:
        if len(" | ".join(fields)) > columns:
            fields = [re.sub(f"^{detail}|{detail}$", "", field) for field in fields]
            fields = [field for field in fields if field]
    return " | ".join(fields)


def _kilo(n: float) -> str:
    return f"{n / 1e3:.1f}k" if n >= 1e3 else f"{n:.0f}"


class Gather:
    """Gathers numbers on all ranks, over the CPU group, so nothing waits for the device."""

    def __init__(self, world: World):
        self.world, self.keys, self.all_keys = world, None, [[]]  # names of operations

    def floats(self, mine: list[float]) -> list[list[float]]:
        """Every rank's list; all have the same length."""
        send = torch.tensor(mine, dtype=torch.float64)
        ranks = [torch.empty_like(send) for _ in range(self.world.size)]
        dist.all_gather(ranks, send)
        return [x.tolist() for x in ranks]

    def step(self, mine: list[float], operations: dict) -> tuple[list[list[float]], list[float]]:
        """(every rank's `mine`, each rank's `waiting` in ms). operations: this rank's {operation:
        (start, end)}. Usually one exchange; each makes the host wait for the others."""
        # Steps repeat the same operations, so their names are exchanged only when they change.
        names = list(operations)
        changed = names != self.keys
        times = [] if changed else [ms for span in operations.values() for ms in span]
        longest = 2 * max(map(len, self.all_keys))
        rows = self.floats([changed, *mine, *times, *[0.0] * (longest - len(times))])
        if any(row[0] for row in rows):
            self.keys, self.all_keys = names, [None] * self.world.size
            dist.all_gather_object(self.all_keys, self.keys)
            return self.step(mine, operations)
        at = 1 + len(mine)
        ranks = [
            dict(zip(keys, zip(row[at::2], row[at + 1 :: 2], strict=True), strict=False))
            for keys, row in zip(self.all_keys, rows, strict=True)
        ]
        return [row[1:at] for row in rows], waiting(ranks)
