"""What a run leaves: its folder, the console line and metrics.jsonl of a step, the summary row."""

import contextlib
import json
import math
import statistics
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import torch

from llm_demo.args import parse_steps
from llm_demo.device import peak_memory_gb, peak_tflops, this_device
from llm_demo.dist import World, from_rank0
from llm_demo.errors import UserError
from llm_demo.files import disk_full, write_json
from llm_demo.run.comm import CommTimer, Gather
from llm_demo.run.folder import (
    choose_folder,
    describe_run,
    gone,
    last_checkpoint,
    lock_folder,
    take_folder,
)
from llm_demo.run.next_steps import next_steps
from llm_demo.run.profiling import StepProfiler
from llm_demo.run.tracker import open_tracker

WARMUP = 2  # logged steps left out of the summary's medians: allocator, kernels and caches warm up
COLUMNS = ("micro_bsz", "GA", "ckpt", "dtype", "step_ms", "comm_ms", "toks/s", "peak_mem(G)")


class Run:
    """A run's folder and its voice. Only rank 0 writes and prints; every rank calls."""

    def __init__(self, args: Namespace, world: World, script: str):
        self.args, self.world, self.script = args, world, script
        self.tracker = open_tracker(args)
        self.folder = choose_folder(args, world, script)
        self.lock = None
        from_rank0(world, self._lock)
        self.is_main = world.rank == 0
        self.log_file = None
        self.early, self.early_records = [], []  # said and recorded before the folder is there
        self.resolved = {}
        self.records, self.evals, self.pending = [], [], None
        self.doubts = {}  # of each logged step: see comm.py
        self.exact = []  # (step, share of the held-out rows answered exactly)
        self.comm = CommTimer(world.device, world.rank, world.size)
        self.gather = Gather(world)
        steps = parse_steps(args.profile_steps)
        self.profiler, self.profile = steps and StepProfiler(steps, world), None
        self.tokens = self.label_tokens = self.first_step = 0
        self.bad_steps, self.unread, self.looked = 0, [], None

    def _lock(self) -> None:
        self.lock = lock_folder(self.folder, self.args)

    def resume(self, facts: dict) -> None:
        """Count on from a checkpoint's facts."""
        self.first_step = facts["step"]
        self.tokens, self.label_tokens = facts["tokens"], facts["label_tokens"]
        self.evals = [tuple(pair) for pair in facts["evals"]]
        self.exact = [tuple(pair) for pair in facts.get("exact", [])]  # older ones lack it

    def facts(self, step: int) -> dict:
        """What a checkpoint of this step keeps, for `resume` and to find the best."""
        return {
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
            "evals": list(self.evals),
            "exact": list(self.exact),
            "eval_loss": dict(self.evals).get(step),
        }

    def _forget_steps_after(self, step: int) -> None:
        """Drop from metrics.jsonl what a run that was killed did after the step it goes on from."""
        file = self.folder / "metrics.jsonl"
        kept = []
        for line in file.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # half a line: killed while writing it
                continue
            if step and record["step"] <= step:
                kept.append(line + "\n")
                self.records += [record] if "train/loss" in record else []
        part = file.with_suffix(".part")
        part.write_text("".join(kept))
        part.replace(file)

    def say(self, text: str) -> None:
        """Print a line on rank 0, and keep it for train.log."""
        if not self.is_main:
            return
        if self.log_file is None:
            self.early.append(text)
        else:
            with self._writing():
                print(text, file=self.log_file, flush=True)
        print(text, flush=True)

    @contextlib.contextmanager
    def _writing(self):
        """Turn what goes wrong with the run's files into one line."""
        try:
            yield
        except OSError as e:
            if self.log_file and not self.folder.is_dir():
                raise UserError(gone(self.folder)) from e
            reason = disk_full(e, self.folder) or f"{e.strerror or e}: {e.filename or self.folder}"
            raise UserError(f"--output_dir {self.folder}: {reason}") from e

    def open_folder(self) -> None:
        """Make the folder with config.json, env.json and cmd.sh: what it takes to repeat the run.
        Every rank calls.

        Not before the first step has been taken by all ranks: whatever refuses or ends a run until
        then must neither empty an old run nor leave a folder behind that stops the next try."""

        def make():
            with self._writing():
                self.lock = take_folder(self.folder, self.args, self.lock)
                if (self.folder / "metrics.jsonl").exists():
                    self._forget_steps_after(self.first_step)
                resolved = {**self.resolved, "output_dir": str(self.folder)}
                describe_run(self.folder, {**vars(self.args), **resolved}, self.world, self.script)
                self.log_file = open(self.folder / "train.log", "a")
                print(*self.early, sep="\n", file=self.log_file, flush=True)
            for record in self.early_records:
                self._write(record)

        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        with self.comm.mute():
            self.gather.floats([0.0])  # all have come here
            from_rank0(self.world, make)

    def begin(self, max_steps: int, flops_per_token: float, dtype: torch.dtype) -> None:
        """Start the clock before step 1."""
        self.max_steps, self.flops = max_steps, flops_per_token
        device = this_device(self.world.device.index or 0)
        self.peak = self.args.peak_tflops or peak_tflops(device, dtype)
        self.started = time.perf_counter()
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if self.args.comm_timer:
            self.comm.install()
        self.profile_from(1)
        self.restart_clock()

    def profile_from(self, step: int) -> None:
        """Start or stop the profiler where `step` is the next; the clock starts anew after it."""
        if not self.profiler:
            return
        if step == self.profiler.first:
            self.flush()
            self.profiler.start()
            self.restart_clock()
        if step == self.profiler.last + 1:
            self.flush()
            with self.comm.mute():
                with self._writing():
                    self.profile = self.profiler.stop(self.folder)
            self.say(f"profile: {self.folder}/profile.txt")
            self.restart_clock()

    def restart_clock(self) -> None:
        """Leave what happened since the last logged step (an evaluation, say) out of step times."""
        self.comm.take()
        self.data_seconds = 0.0
        self.since = self.comm.event()
        self.interval = Namespace(steps=0, tokens=0, label_tokens=0, slots=0)

    def end_step(self, step, tokens, label_tokens, slots, loss, grad_norm, lr: float) -> None:
        """Record optimizer step `step` (from 1) if it is one to log. Every rank calls, each step.

        tokens, label_tokens, slots: of the step, over all ranks. loss: this rank's share of the
        step's loss, grad_norm: the same on every rank; 0-dim tensors on the device. They are
        written one logged step later, when they are there, for reading them now would make the
        host wait, and then the device for the host. Raises UserError, on every rank alike, after
        --max_skipped_steps steps in a row whose loss or norm is not finite."""
        logged = step % self.args.log_every == 0 or step == self.max_steps
        if self.profiler:
            logged |= step + 1 == self.profiler.first or step == self.profiler.last
        ended = self.comm.event() if logged else None
        first = step == self.first_step + 1
        if first:
            self.open_folder()
        self.tokens += tokens
        self.label_tokens += label_tokens
        i = self.interval
        i.steps, i.tokens = i.steps + 1, i.tokens + tokens
        i.label_tokens, i.slots = i.label_tokens + label_tokens, i.slots + slots
        if self.args.log_every > 1:
            self._watch(step, loss.detach() + grad_norm)
        if not logged:
            return
        if isinstance(grad_norm, torch.Tensor):
            grad_norm = grad_norm.float().to("cpu", non_blocking=True)
        numbers = loss.detach().to("cpu", non_blocking=True), grad_norm
        totals = (self.tokens, self.label_tokens)
        memory = peak_memory_gb(self.world.device)
        here = (step, i, totals, numbers, lr, memory, self.comm.take(), self.data_seconds)
        previous, self.pending = self.pending, (*here, self.since, ended)
        self.since, self.data_seconds = self.comm.event() if first else ended, 0.0
        self.interval = Namespace(steps=0, tokens=0, label_tokens=0, slots=0)
        if previous:
            self._log_step(*previous)
        if step == self.max_steps:
            self.flush()
        self.profile_from(step + 1)

    def flush(self) -> None:
        """Write the step that is still to be written."""
        if self.pending:
            previous, self.pending = self.pending, None
            self._log_step(*previous)

    def _log_step(self, step, i, totals, numbers, lr, memory, comm, data_s, since, ended) -> None:
        ended.synchronize()
        seconds = since.elapsed_time(ended) / 1e3 / i.steps
        busy, exposed, doubt, operations = self.comm.read(comm, since)
        loss, grad_norm = map(float, numbers)
        with self.comm.mute():
            times = (busy, exposed, doubt, data_s * 1e3)
            mine = [loss, memory, *(x / i.steps for x in times)]
            ranks, wait = self.gather.floats(mine), self.gather.waits(operations)
        share, memory, busy, exposed, doubt, data_ms = map(list, zip(*ranks, strict=True))
        self.doubts[step] = doubt
        loss = math.fsum(share)
        per_s = i.tokens / i.steps / seconds
        flops = self.flops * i.slots / i.steps / seconds / self.world.size
        record = {
            "step": step,
            "train/loss": loss,
            "train/grad_norm": grad_norm,
            "train/lr": lr,
            "train/skipped": not math.isfinite(grad_norm),
            "perf/step_ms": seconds * 1e3,
            "perf/comm_ms": [round(x, 3) for x in busy],
            "perf/comm_exposed_ms": [round(x, 3) for x in exposed],
            "perf/comm_wait_ms": [round(x / i.steps, 3) for x in wait],
            "perf/data_ms": round(max(data_ms), 3),
            "perf/toks_per_s": per_s,
            "perf/label_toks_per_s": i.label_tokens / i.steps / seconds,
            "perf/slots_per_s": i.slots / i.steps / seconds,
            "perf/mfu": flops / (self.peak * 1e12) if self.peak else None,
            "perf/peak_mem_gb": [round(x, 3) for x in memory],
            "data/tokens": totals[0],
            "data/label_tokens": totals[1],
            "data/fill": i.tokens / i.slots,
        }
        self.records.append(record)
        self._write(record)
        left = int((self.max_steps - step) * seconds)
        mfu = f"{record['perf/mfu']:.1%}" if self.peak else "n/a"
        line = (
            f"step {step}/{self.max_steps} | loss {loss:.4f} | gnorm {grad_norm:.2f} | lr {lr:.1e}"
            f" | {seconds * 1e3:.0f} ms (comm {max(busy):.0f}) | {_kilo(per_s)} tok/s"
            f" ({_kilo(record['perf/label_toks_per_s'])} learnt) | mfu {mfu}"
            f" | mem {max(memory):.1f} GB | eta {timedelta(seconds=left)}".replace(
                "eta 0:", "eta "
            ).replace("eta 0", "eta ")
        )
        if record["train/skipped"]:
            self.say(f"step {step}: the gradient norm is not finite, all ranks skip the step")
        self.say(line)
        if self.args.log_every == 1:
            self._count(step, not math.isfinite(loss) or record["train/skipped"])

    def _watch(self, step: int, value: torch.Tensor) -> None:
        """Where not every step is logged: look at all of them, some steps later and together.
        value: not finite if this rank's loss or the norm is not."""
        most = self.args.max_skipped_steps
        if not most:
            return
        self.unread.append(value)
        if len(self.unread) == max(1, min(most // 2, 10)) or step == self.max_steps:
            values = torch.stack(self.unread).to("cpu", non_blocking=True)
            previous, self.looked = self.looked, (step, values, self.comm.event())
            self.unread = []
            for looked in (previous, self.looked if step == self.max_steps else None):
                if looked:
                    self._look(*looked)

    def _look(self, last: int, values: torch.Tensor, there) -> None:
        there.synchronize()
        with self.comm.mute():
            ranks = self.gather.floats(values.tolist())
        for step, row in enumerate(zip(*ranks, strict=True), last + 1 - len(values)):
            self._count(step, not all(map(math.isfinite, row)))

    def _count(self, step: int, bad: bool) -> None:
        self.bad_steps = self.bad_steps + 1 if bad else 0
        if self.bad_steps >= self.args.max_skipped_steps > 0:
            raise UserError(
                f"loss or gradient norm not finite in {self.bad_steps} steps in a row, up to step "
                f"{step} (--max_skipped_steps): look at the data, try a lower --lr or --dtype fp32;"
                f" {last_checkpoint(self.folder)}"
            )

    def log_eval(self, step: int, loss: float, right: int, rows: int) -> None:
        """right: how many of the held-out rows are answered exactly."""
        self.evals.append((step, loss))
        self.exact.append((step, right / rows))
        self._write({"step": step, "eval/loss": loss, "eval/exact": right / rows})
        self.say(
            f"step {step}/{self.max_steps} | held-out loss {loss:.4f} | {right / rows:.1%} of "
            f"{rows:,} rows answered exactly"
        )
        self.restart_clock()

    def log_save(self, path: Path, size: int, seconds: float, stall: float) -> None:
        """A checkpoint is published: bytes of all ranks; seconds from its begin to its end, and
        seconds of them in which this rank did not train."""
        self._write(
            {
                "step": int(path.name[-8:]),
                "save/bytes": size,
                "save/seconds": round(seconds, 3),
                "save/stall_s": round(stall, 3),
            }
        )
        self.say(
            f"checkpoint: {path}, {size / 1e6:,.0f} MB in {seconds:.2f} s, training stood still "
            f"for {stall:.2f} s"
        )

    def finish(self) -> None:
        """Write summary.json, print the row of the README's table, close."""
        self.comm.remove()
        if not self.is_main:
            return
        # A resumed run may have had another number of processes: only its last one counts.
        ranks = len(self.records[-1]["perf/comm_ms"])
        alike = [r for r in self.records if len(r["perf/comm_ms"]) == ranks]
        steady = alike[WARMUP:] or alike
        losses = [r["train/loss"] for r in self.records]
        a = self.args

        def median(key):
            return statistics.median(r[key] for r in steady)

        def of_ranks(key):
            return [
                round(statistics.median(x), 3) for x in zip(*(r[key] for r in steady), strict=True)
            ]

        row = (
            a.micro_batch_size, a.grad_accum_steps, "T" if a.use_activation_checkpointing else "F",
            a.dtype.upper(), f"{median('perf/step_ms'):.0f}",
            f"{max(of_ranks('perf/comm_ms')):.0f}",
            f"{median('perf/slots_per_s'):.0f}",
            " / ".join(f"{m:.1f}" for m in self.records[-1]["perf/peak_mem_gb"]),
        )  # fmt: skip
        summary = {
            "steps": self.records[-1]["step"],
            "seconds": time.perf_counter() - self.started,
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "best_loss": min((x for x in losses if math.isfinite(x)), default=None),
            "eval_loss": _finite(dict(self.evals)),
            "eval_exact": dict(self.exact),
            "skipped_steps": sum(r["train/skipped"] for r in self.records),
            "median_step_ms": median("perf/step_ms"),
            "spread_step_ms": [pick(r["perf/step_ms"] for r in steady) for pick in (min, max)],
            "median_comm_ms": of_ranks("perf/comm_ms"),
            "median_comm_exposed_ms": of_ranks("perf/comm_exposed_ms"),
            "median_comm_wait_ms": of_ranks("perf/comm_wait_ms"),
            "median_data_ms": median("perf/data_ms"),
            "median_label_toks_per_s": median("perf/label_toks_per_s"),
            "mfu": median("perf/mfu") if self.peak else None,
            "peak_tflops": self.peak,
            "profile": self.profile and {**self.profile, "timer": self._timed_while_profiled()},
            "median_toks_per_s": median("perf/toks_per_s"),
            "median_slots_per_s": median("perf/slots_per_s"),
            "peak_mem_gb": self.records[-1]["perf/peak_mem_gb"],
            "row": dict(zip(COLUMNS, row, strict=True)),
        }
        with self._writing():
            write_json(self.folder / "summary.json", _finite(summary), indent=2)
        self.say(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        self.say(f"| {' | '.join(map(str, row))} |")
        self.say(
            "(comm_ms of the rank with most; toks/s counts every slot; peak memory of each rank)"
        )
        if len(self.exact) > 1:
            before, after = self.exact[0][1], self.exact[-1][1]
            self.say(f"held-out rows answered exactly: {before:.1%} before, {after:.1%} after")
        self.say(f"run: {self.folder}")
        if lines := next_steps(self.folder, a, summary["steps"]):
            self.say("\n".join(["what can be done next, as commands:", *lines]))
        self.log_file.close()
        self.lock.close()

    def _timed_while_profiled(self) -> dict:
        """What the events said of the steps that the profiler saw: the mean of each rank."""
        a, b = self.profiler.first, self.profiler.last
        same = [r for r in self.records if a <= r["step"] <= b]
        keys = ("perf/comm_ms", "perf/comm_exposed_ms", "perf/comm_wait_ms")
        ranks = {k: zip(*(r[k] for r in same), strict=True) for k in keys}
        ranks["doubt"] = zip(*(self.doubts[r["step"]] for r in same), strict=True)
        return {k: [statistics.fmean(x) for x in of_ranks] for k, of_ranks in ranks.items()}

    def _write(self, record: dict) -> None:
        if not self.is_main:
            return
        if self.log_file is None:
            self.early_records.append(record)
            return
        with self._writing():
            with open(self.folder / "metrics.jsonl", "a") as f:
                f.write(json.dumps(_finite(record)) + "\n")
            if self.tracker:
                self.tracker(self.folder, record)


def _finite(record: dict) -> dict:
    # json writes NaN and Infinity, which are no JSON
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }


def _kilo(n: float) -> str:
    return f"{n / 1e3:.1f}k" if n >= 1e3 else f"{n:.0f}"
