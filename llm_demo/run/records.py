"""What a run records of its steps: metrics.jsonl, the line of a step, its history and summary."""

import itertools
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.core.timer import Timings, peak_host_gb, waiting
from llm_demo.flags.args import Args, less_memory, parse_steps
from llm_demo.machine.device import peak_tflops, this_device
from llm_demo.machine.dist import on_all_ranks
from llm_demo.machine.files import finite
from llm_demo.machine.text import counted
from llm_demo.run.folder import WARMUP, last_checkpoint, median, of_ranks, peaks_of
from llm_demo.run.log import Log

SETTLED = 3  # steps after which the allocator should have all that a step needs
COLUMNS = ("micro_bsz", "GA", "ckpt", "dtype", "step_ms", "comm_ms", "toks/s", "peak_mem(G)")
TIMES = ("perf/comm_ms", "perf/comm_exposed_ms", "perf/comm_wait_ms")  # None: not measured
MAX_SKIPPED_STEPS = 20  # consecutive steps with a non-finite loss or norm; the run then ends
MEDIANS = ("step_ms", "data_ms", "toks_per_s", "label_toks_per_s", "slots_per_s")


class History:
    """What a run has done so far. A checkpoint keeps the totals and the evaluations."""

    def __init__(self):
        self.first_step = self.step = 0  # the last step before this process; the latest step
        self.tokens = self.label_tokens = 0
        self.records, self.evals = [], []  # logged steps; (step, held-out loss)
        self.exact = []  # (step, share of the held-out examples answered exactly)

    def resume(self, facts: dict) -> None:
        """Continue from a checkpoint's facts."""
        self.first_step = self.step = facts["step"]
        self.tokens, self.label_tokens = facts["tokens"], facts["label_tokens"]
        self.evals, self.exact = facts["evals"], facts["exact"]

    def facts(self, step: int) -> dict:
        """What a checkpoint of this step keeps, to resume and to find the best one."""
        return {
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
            "evals": list(self.evals),
            "exact": list(self.exact),
            "eval_loss": dict(self.evals).get(step),
        }


class Records:
    """Logs steps and evaluations. Every rank calls every method; what they exchange goes over the
    CPU. A step is logged one logged step later, when the device has surely come past it.

    first_step: the last step before this process. dtype: the compute dtype."""

    def __init__(
        self,
        args: Args,
        world: World,
        log: Log,
        first_step: int,
        max_steps: int,
        dtype: torch.dtype,
    ):
        self.args, self.world, self.log = args, world, log
        self.max_steps = max_steps
        device = this_device(world.device.index or 0)
        self.peak = args.peak_tflops or peak_tflops(device, dtype)
        self.history, self.gather = History(), Gather(world)
        self.pending = None  # a logged step that is not read yet
        self.bad_steps = torch.zeros((), device=world.device)  # in a row, up to now
        self.warned = False
        self.hidden = None  # what no line of a step shows; known once there is one
        steps = parse_steps(args.profile_steps)
        self.profiler, self.figures = None, None
        if steps and not first_step < steps[0] <= steps[1] <= max_steps:
            log.say(
                f"--profile_steps {args.profile_steps}: nothing is profiled, since this run has "
                f"steps {first_step + 1} to {max_steps}"
            )
        elif steps:
            from llm_demo.machine.profiling import StepProfiler

            self.profiler = StepProfiler(steps, world)

    def open(self) -> None:
        """Create the run's folder, and read what metrics.jsonl holds of the steps before."""
        self.history.records += self.log.open(self.history.first_step)

    def logs(self, step: int) -> bool:
        """Whether step `step` (from 1) is logged."""
        of_profile = self.profiler and step in (self.profiler.first - 1, self.profiler.last)
        return bool(of_profile) or step % self.args.log_every == 0 or step == self.max_steps

    def count_bad(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """The number of steps in a row, up to this one, whose loss on this rank or whose norm is
        not finite. All are 0-dim tensors on the device, so that nothing waits for it."""
        finite = (loss.detach() + norm).isfinite()
        self.bad_steps = torch.where(finite, 0, self.bad_steps + 1)
        return self.bad_steps

    def add(
        self,
        step: int,
        n_tokens: int,
        n_labels: int,
        lr: float,
        read: Callable[[], Timings] | None,
    ) -> None:
        """Add optimizer step `step` (from 1). Raises UserError, on every rank, after
        MAX_SKIPPED_STEPS consecutive steps with a non-finite loss or norm.

        n_tokens, n_labels: over all ranks. read: of StepTimer.end, None if the step is not
        logged."""
        history = self.history
        if step == history.first_step + 1:
            self.open()
        history.step = step
        history.tokens += n_tokens
        history.label_tokens += n_labels
        if read:
            self.flush()
            self.pending = step, history.tokens, history.label_tokens, lr, read
            if step == self.max_steps:
                self.flush()

    def flush(self) -> None:
        """Log the pending step."""
        if self.pending:
            previous, self.pending = self.pending, None
            self._log_step(*previous)

    def add_eval(self, step: int, loss: float, right: int, rows: int) -> None:
        """Log an evaluation. right: held-out examples answered exactly."""
        self.flush()
        self.history.evals.append((step, loss))
        self.history.exact.append((step, right / rows))
        self.log.record({"step": step, "eval/loss": loss, "eval/exact": right / rows})
        self.log.say(
            f"step {step}/{self.max_steps} | held-out loss {loss:.4f} | {right / rows:.1%} of "
            f"{counted(rows, 'example')} answered exactly"
        )

    def profile(self, step: int) -> bool:
        """Start the profiler if `step` is the first to profile, or stop it after the last. Returns
        whether it did, which takes time."""
        if not self.profiler or step not in (self.profiler.first, self.profiler.last + 1):
            return False
        self.flush()
        if step == self.profiler.first:
            self.profiler.start()
            return True
        with self.log.writing():
            self.figures = self.profiler.stop(self.log.folder)
        self.log.say(f"profile: {self.log.folder}/profile.txt")
        return True

    def ended(self) -> tuple[dict | None, list[float]]:
        """(the profiler's figures or None, each rank's peak host memory in 2**30 bytes)."""
        return self.figures, on_all_ranks(lambda: round(peak_host_gb(), 3), self.world)

    def _log_step(self, step: int, tokens: int, label_tokens: int, lr: float, read) -> None:
        t = read()
        numbers = {
            name: value if name == "moe/load" else float(value) for name, value in t.numbers.items()
        }
        loss, norm = numbers.pop("loss"), numbers.pop("norm")
        mine = [loss, numbers.pop("bad_steps"), *t.memory, t.busy, t.exposed, t.data]
        ranks, wait = self.gather.step(mine, t.operations)
        share, bad, memory, reserved, retries, busy, exposed, data = zip(*ranks, strict=True)
        steps, flops = t.counts["steps"], t.counts["flops"] / t.seconds / self.world.size
        comm = dict.fromkeys(TIMES)
        if self.args.comm_timer:
            waits = [ms / steps for ms in wait]
            for key, ranks in zip(TIMES, (busy, exposed, waits), strict=True):
                comm[key] = [round(ms, 3) for ms in ranks]
        record = {
            "step": step,
            "train/loss": math.fsum(share),
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/skipped": not math.isfinite(norm),
            "perf/step_ms": t.seconds * 1e3 / steps,
            **comm,
            "perf/data_ms": round(max(data), 3),
            "perf/toks_per_s": t.counts["tokens"] / t.seconds,
            "perf/label_toks_per_s": t.counts["labels"] / t.seconds,
            "perf/slots_per_s": t.counts["slots"] / t.seconds,
            "perf/mfu": flops / (self.peak * 1e12) if self.peak else None,
            "perf/peak_mem_gb": [round(x, 3) for x in memory],
            "perf/reserved_gb": [round(x, 3) for x in reserved] if any(reserved) else None,
            "perf/alloc_retries": list(map(int, retries)) if any(reserved) else None,
            "data/tokens": tokens,
            "data/label_tokens": label_tokens,
            "data/fill": t.counts["tokens"] / t.counts["slots"],
        }
        load = numbers.pop("moe/load", None)
        if load is not None:
            # for each block: the largest load over the mean, and the share of experts without load
            most, mean = load.max(1).values, load.double().mean(1)
            record["moe/load"] = [round(x, 3) for x in (most / mean).tolist()]
            record["moe/idle"] = [round(x, 4) for x in (load == 0).double().mean(1).tolist()]
        record |= numbers
        self.history.records.append(record)
        self.log.record(record)
        self._say(record)
        if max(bad) >= MAX_SKIPPED_STEPS:
            raise UserError(
                f"loss or gradient norm not finite in {max(bad):.0f} steps in a row, up to step "
                f"{step}: check the data, try a lower --lr or --dtype fp32;"
                f" {last_checkpoint(self.log.folder)}"
            )

    def _say(self, record: dict) -> None:
        """Print the line of a step, and what is wrong with it."""
        step, retries = record["step"], max(record["perf/alloc_retries"] or [0])
        if record["train/skipped"]:
            self.log.say(f"step {step}: the gradient norm is not finite, so all ranks skip it")
        if retries and not self.warned:
            self.warned = True
            self.log.say(
                f"warning: GPU memory ran out {counted(retries, 'time')} up to step {step}. Each "
                "time PyTorch freed its cache and waited for the GPU (0.2 s for 8B on H100). "
                f"Use less memory: {less_memory(self.args)}"
            )
        fields = self._fields(record)
        if self.hidden is None:
            self.hidden = beyond_terminal([f"step {self.max_steps}/{self.max_steps}", *fields[1:]])
        self.log.say(" | ".join(fields), shown=" | ".join(without(fields, self.hidden)))

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
            f"mem {max(r['perf/reserved_gb'] or r['perf/peak_mem_gb']):.1f} GiB",
            eta,
        ]


# Parts of the line of a step that a narrow terminal does not show, the first to go first.
DETAILS = (
    r" \(.* labels\)",
    r" \(comm .*\)",
    "load .*",
    "gnorm .*",
    "mfu .*",
    "lr .*",
    ".* tok/s.*",
    "mem .*",
)


def beyond_terminal(fields: list[str]) -> tuple[str, ...]:
    """Those of DETAILS for which the terminal has no room in a line of these fields."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    counts = range(len(DETAILS))
    fits = (n for n in counts if len(" | ".join(without(fields, DETAILS[:n]))) <= columns)
    return DETAILS[: next(fits, len(DETAILS))]


def without(fields: list[str], details: Iterable[str]) -> list[str]:
    """The fields without these details."""
    for detail in details:
        fields = [re.sub(f"{detail}$", "", field) for field in fields]
    return [field for field in fields if field]


def _kilo(n: float) -> str:
    return f"{n / 1e3:.1f}k" if n >= 1e3 else f"{n:.0f}"


class Gather:
    """Gathers each step's numbers on all ranks, over the CPU group, so nothing waits for the
    device. One exchange of plain numbers a step: pickled ones cost several ms."""

    def __init__(self, world: World):
        self.world = world
        self.names, self.all_names = None, [[]]  # of this rank's operations, and of all ranks'

    def step(self, mine: list[float], operations: dict) -> tuple[list[list[float]], list[float]]:
        """(every rank's `mine`, each rank's `waiting` in ms). operations: this rank's {operation:
        (start, end)}. Steps repeat operations, so names are exchanged only when they change."""
        if self.world.size == 1:
            return [mine], waiting([operations])
        names = list(operations)
        changed = names != self.names
        times = [] if changed else [ms for span in operations.values() for ms in span]
        longest = 2 * max(map(len, self.all_names))
        padding = [0.0] * (longest - len(times))
        send = torch.tensor([changed, *mine, *times, *padding], dtype=torch.float64)
        gathered = [torch.empty_like(send) for _ in range(self.world.size)]
        dist.all_gather(gathered, send)
        ranks = [rank.tolist() for rank in gathered]
        if any(rank[0] for rank in ranks):
            self.names, self.all_names = names, on_all_ranks(lambda: names, self.world)
            return self.step(mine, operations)
        at = 1 + len(mine)
        operations_of_ranks = []
        for names_of_rank, rank in zip(self.all_names, ranks, strict=True):
            spans = zip(rank[at::2], rank[at + 1 :: 2], strict=True)
            operations_of_ranks.append(dict(zip(names_of_rank, spans, strict=False)))
        return [rank[1:at] for rank in ranks], waiting(operations_of_ranks)


def summarise(
    history: History, settings: dict, seconds: float, peak_tflops, profile, host: list[float]
) -> dict:
    """The contents of summary.json. settings: resolved flags. profile: the profiler's figures or
    None. host: each rank's peak host memory."""
    records = history.records
    # Earlier processes may have been another script's, or more or fewer.
    n_ranks = len(records[-1]["perf/peak_mem_gb"])
    alike = [r for r in records if len(r["perf/peak_mem_gb"]) == n_ranks]
    steps = [r for r in records if r["step"] > history.first_step] or alike
    losses = [r["train/loss"] for r in records]
    times = [r["perf/step_ms"] for r in steps[WARMUP:] or steps]
    medians = {key: median(steps, f"perf/{key}") for key in MEDIANS}
    times_of_ranks = {key: [round(ms, 3) for ms in of_ranks(steps, key)] or None for key in TIMES}
    comm = times_of_ranks["perf/comm_ms"]
    row = (
        settings["micro_batch_size"],
        settings["grad_accum_steps"],
        "T" if settings["use_activation_checkpointing"] else "F",
        settings["dtype"],
        f"{medians['step_ms']:.0f}",
        f"{max(comm):.0f}" if comm else "n/a",
        f"{medians['slots_per_s']:.0f}",
        " / ".join(f"{m:.1f}" for m in peaks_of(records[-1])),
    )
    return {
        "steps": records[-1]["step"],
        "seconds": seconds,
        "tokens": history.tokens,
        "label_tokens": history.label_tokens,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "best_loss": min((x for x in losses if math.isfinite(x)), default=None),
        "eval_loss": finite(dict(history.evals)),
        "eval_exact": dict(history.exact),
        "skipped_steps": sum(r.get("train/skipped") is True for r in records),
        "spread_step_ms": [min(times), max(times)],
        "quartiles_step_ms": np.percentile(times, (25, 75)).tolist(),
        **{key.replace("perf/", "median_"): ranks for key, ranks in times_of_ranks.items()},
        **{f"median_{key}": value for key, value in medians.items()},
        "mfu": median(steps, "perf/mfu") if peak_tflops else None,
        "peak_tflops": peak_tflops,
        "profile": profile,
        "peak_mem_gb": records[-1]["perf/peak_mem_gb"],
        "reserved_gb": records[-1].get("perf/reserved_gb"),
        "alloc_retries": retries_of(steps),
        "late_alloc_retries": retries_of(
            after
            for before, after in itertools.pairwise(steps)
            if before["step"] >= history.first_step + SETTLED
        ),
        "peak_host_gb": host,
        "row": dict(zip(COLUMNS, row, strict=True)),
    }


def retries_of(records: Iterable[dict]) -> int | None:
    """The allocator's retries in these records, of the rank with most; None if not recorded."""
    ranks = zip(*filter(None, (r.get("perf/alloc_retries") for r in records)), strict=True)
    return max(map(sum, ranks), default=None)
