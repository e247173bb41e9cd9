"""A run's history, its summary.json and the table row it prints."""

import itertools
import math
import statistics
from collections.abc import Iterable

from llm_demo.job.files import finite

WARMUP = 2  # logged steps left out of the medians: allocator, kernels and caches warm up
SETTLED = 3  # steps after which the allocator should have all that a step needs
COLUMNS = ("micro_bsz", "GA", "ckpt", "dtype", "step_ms", "comm_ms", "toks/s", "peak_mem(G)")
TIMES = ("perf/comm_ms", "perf/comm_exposed_ms", "perf/comm_wait_ms")  # None: not measured


class History:
    """What a run has done so far. A checkpoint keeps the totals and the evaluations."""

    def __init__(self):
        self.first_step = self.step = 0  # the last step before this process; the latest step
        self.tokens = self.label_tokens = 0
        self.records, self.evals = [], []  # logged steps; (step, held-out loss)
        self.exact = []  # (step, share of the held-out rows answered exactly)
        self.doubts = {}  # step -> doubt of each rank's communication time, see comm.py

    def resume(self, facts: dict) -> None:
        """Continue from a checkpoint's facts."""
        self.first_step = self.step = facts["step"]
        self.tokens, self.label_tokens = facts["tokens"], facts["label_tokens"]
        self.evals = [tuple(pair) for pair in facts["evals"]]
        self.exact = [tuple(pair) for pair in facts.get("exact", [])]  # older ones lack it

    def facts(self, step: int) -> dict:
        """What a checkpoint of this step keeps, to resume and to find the best one."""
        return {
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
            "evals": list(self.evals),
            "exact": list(self.exact),
            "eval_loss": dict(self.evals).get(step),
        }


def peaks_of(record: dict) -> list[float]:
    """Peak memory of each rank that a card must have: reserved on a GPU, resident on a CPU."""
    return record.get("perf/reserved_gb") or record["perf/peak_mem_gb"]


def summarise(
    history: History, settings: dict, seconds: float, peak_tflops, profile, host: list[float]
) -> dict:
    """The contents of summary.json. settings: resolved flags. profile: the profiler's figures or
    None. host: each rank's peak host memory."""
    records = history.records
    # Earlier processes may have been another script's, or more or fewer.
    ranks = len(records[-1]["perf/peak_mem_gb"])
    alike = [r for r in records if len(r["perf/peak_mem_gb"]) == ranks]
    own = [r for r in records if r["step"] > history.first_step] or alike
    steady = own[WARMUP:] or own
    losses = [r["train/loss"] for r in records]

    def median(key):
        return statistics.median(r[key] for r in steady)

    def of_ranks(key):
        lists = [r[key] for r in steady if r[key]]
        return [round(statistics.median(x), 3) for x in zip(*lists, strict=True)] or None

    comm = of_ranks("perf/comm_ms")
    row = (
        settings["micro_batch_size"], settings["grad_accum_steps"],
        "T" if settings["use_activation_checkpointing"] else "F", settings["dtype"].upper(),
        f"{median('perf/step_ms'):.0f}", f"{max(comm):.0f}" if comm else "n/a",
        f"{median('perf/slots_per_s'):.0f}",
        " / ".join(f"{m:.1f}" for m in peaks_of(records[-1])),
    )  # fmt: skip
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
        "median_step_ms": median("perf/step_ms"),
        "spread_step_ms": [pick(r["perf/step_ms"] for r in steady) for pick in (min, max)],
        "median_comm_ms": comm,
        "median_comm_exposed_ms": of_ranks("perf/comm_exposed_ms"),
        "median_comm_wait_ms": of_ranks("perf/comm_wait_ms"),
        "median_data_ms": median("perf/data_ms"),
        "median_label_toks_per_s": median("perf/label_toks_per_s"),
        "mfu": median("perf/mfu") if peak_tflops else None,
        "peak_tflops": peak_tflops,
        "profile": profile,
        "median_toks_per_s": median("perf/toks_per_s"),
        "median_slots_per_s": median("perf/slots_per_s"),
        "peak_mem_gb": records[-1]["perf/peak_mem_gb"],
        "reserved_gb": records[-1].get("perf/reserved_gb"),
        "alloc_retries": retries_of(own),
        "late_alloc_retries": retries_of(
            after
            for before, after in itertools.pairwise(own)
            if before["step"] >= history.first_step + SETTLED
        ),
        "peak_host_gb": host,
        "row": dict(zip(COLUMNS, row, strict=True)),
    }


def retries_of(records: Iterable[dict]) -> int | None:
    """The allocator's retries in these records, of the rank with most; None if not recorded."""
    ranks = zip(*filter(None, (r.get("perf/alloc_retries") for r in records)), strict=True)
    return max(map(sum, ranks), default=None)


def timed_while_profiled(history: History, first: int, last: int) -> dict | None:
    """The means of each rank's event timings over the profiled steps; None: not measured."""
    same = [r for r in history.records if first <= r["step"] <= last]
    if not all(r["perf/comm_ms"] for r in same):
        return None
    ranks = {k: zip(*(r[k] for r in same), strict=True) for k in TIMES}
    ranks["doubt"] = zip(*(history.doubts[r["step"]] for r in same), strict=True)
    return {k: [statistics.fmean(x) for x in of_ranks] for k, of_ranks in ranks.items()}
