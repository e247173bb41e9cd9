"""Profile a few steps: the ground truth for communication, and a page to read.

Communication is identified by kernel names, not by streams: on AMD, stream numbers have been wrong.
On a CPU, gloo's operations replace kernels."""

import gzip
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.core.timer import AWAIT, MUTED, union, waiting
from llm_demo.machine.dist import on_all_ranks
from llm_demo.machine.files import write_text

# what an operation by NVIDIA's copy engines consists of, see fsdp/copy_engines.py
BY_ENGINES = re.compile(r"memcpy ptop|symmetric_memory::(?:barrier|put_signal)", re.I)
COMMUNICATES = re.compile(rf"nccl|rccl|^gloo:|{AWAIT}|{BY_ENGINES.pattern}", re.I)
# one RCCL kernel serves all collectives; the event's arguments name the collective
KIND = re.compile(
    r"(all_?reduce|all_?gather|reduce_?scatter|broadcast|send_?recv|send|recv|reduce|all_?to_?all"
    rf"|ptop|barrier|put_signal|{AWAIT})",
    re.I,
)
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
SIZES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1}
ON_PAGE = 25  # kernels, the largest


class StepProfiler:
    """Profiles steps a to b of a run; every rank calls."""

    def __init__(self, steps: tuple[int, int], world: World):
        self.first, self.last = steps
        self.world = world
        self.profile = None

    def start(self) -> None:
        torch.get_device_module(self.world.device).synchronize()
        with warnings.catch_warnings():  # before PyTorch 2.13; there is no second cycle
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self.profile = torch.profiler.profile()
            self.profile.start()

    def stop(self, folder: Path) -> dict:
        """Write trace_rank*.json.gz and profile.txt to `folder`; returns all ranks' figures."""
        torch.get_device_module(self.world.device).synchronize()
        self.profile.stop()
        folder.mkdir(parents=True, exist_ok=True)  # on other nodes too
        path = folder / f"trace_rank{self.world.rank}.json"
        self.profile.export_chrome_trace(str(path))
        text = path.read_bytes()
        trace = json.loads(text)
        Path(f"{path}.gz").write_bytes(gzip.compress(text, compresslevel=3))
        path.unlink()
        self.profile = None
        n = self.last - self.first + 1
        ranks = on_all_ranks(lambda: analyse(trace, n), self.world, caught=UserError)
        figures = combine(ranks)
        if self.world.rank == 0:
            title = f"steps {self.first} to {self.last}, figures of one step"
            write_text(folder / "profile.txt", page(title, figures))
        return figures


def analyse(trace: dict, steps: int) -> dict:
    """Figures of one rank's trace of `steps` steps, in ms of one step: total, compute, comm (busy),
    exposed (comm while no kernel ran); operations {key: (start, end)} of all steps, in
    microseconds; kernels {name: (ms, count)}, kinds {kind: (ms, count, bytes)} of one step."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    work, on_cpu = work_of(events)
    comm = [e for e in work if COMMUNICATES.search(e["name"])]
    kernels = [e for e in work if not COMMUNICATES.search(e["name"])]
    begin = min((e["ts"] for e in work), default=0)
    end = max((span_of(e)[1] for e in work), default=0)
    busy = union(map(span_of, comm))
    everything = union(map(span_of, work))
    # on a CPU an operation blocks everything else
    exposed = busy if on_cpu else everything - union(map(span_of, kernels))
    times = {
        "total": end - begin,
        "compute": everything - exposed,
        "comm": busy,
        "exposed": exposed,
    }
    operations, kinds = operations_of(comm, trace.get("distributedInfo", {}).get("rank"))
    return {
        **{name: us / (1e3 * steps) for name, us in times.items()},
        "operations": operations,
        "kernels": per_step(((e["name"], e["dur"], 1) for e in kernels), steps),
        "kinds": per_step(kinds, steps),
        "steps": steps,
    }


def work_of(events: list[dict]) -> tuple[list[dict], bool]:
    """(what the device did, in order, whether it is a CPU). A CPU's work are its operations, except
    for the trainer's own reading of numbers."""
    work = [e for e in events if e.get("cat") in DEVICE_WORK]
    on_cpu = not work
    if on_cpu:
        work = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
        muted = [span_of(e) for e in work if e["name"] == MUTED]
        work = [e for e in work if not any(begin <= e["ts"] <= end for begin, end in muted)]
        work = [e for e in work if not e["name"].startswith(("record_param_comms", "c10d::"))]
    return sorted(work, key=lambda e: e["ts"]), on_cpu


def span_of(event: dict) -> tuple[float, float]:
    """Its start and end in microseconds."""
    return event["ts"], event["ts"] + event["dur"]


def operations_of(comm: list[dict], rank: int | None) -> tuple[dict, list[tuple]]:
    """({(kind, group, count): (start, end)} of NCCL's operations, [(kind, microseconds, 1, bytes)]
    of all). A send and its receive have one group. What copy engines do may overtake each other, so
    it can't be matched with that of other ranks."""
    operations, kinds, counts = {}, [], Counter()
    for e in comm:
        args = e.get("args", {})
        match = KIND.search(str(args.get("Collective name", ""))) or KIND.search(e["name"])
        kind = match[0].lower() if match else "other"
        if kind != AWAIT:
            kind = kind.replace("_", "")
        group = str(args.get("Process Group Name", ""))
        if kind in ("send", "recv"):
            peer = args.get("Dst Rank", args.get("Src Rank"))
            group = f"{rank}>{peer}" if kind == "send" else f"{peer}>{rank}"
            kind = "sendrecv"
        size = SIZES.get(args.get("dtype"), 0)
        size *= max(args.get("In msg nelems", 0), args.get("Out msg nelems", 0))
        kinds.append((kind, e["dur"], 1, size + args.get("bytes", 0)))  # bytes: of a copy
        if not BY_ENGINES.search(e["name"]):
            operations[kind, group, counts[kind, group]] = span_of(e)
            counts[kind, group] += 1
    return operations, kinds


def per_step(rows: Iterable[tuple], steps: int) -> dict[str, tuple]:
    """{name: (ms, count, ...) of one step} from rows (name, microseconds, 1, ...)."""
    sums = {}
    for name, us, *more in rows:
        values = [us / 1e3, *more]
        before = sums.get(name, [0] * len(values))
        sums[name] = [a + b for a, b in zip(before, values, strict=True)]
    return {name: tuple(value / steps for value in values) for name, values in sums.items()}


def combine(ranks: list[dict]) -> dict:
    """All ranks' figures side by side, with each rank's waiting time (ms of one step)."""
    operations = [rank.pop("operations") for rank in ranks]
    for rank, us in zip(ranks, waiting(operations), strict=True):
        rank["wait"] = us / (1e3 * rank["steps"])
    return {"ranks": ranks}


def page(title: str, figures: dict) -> str:
    """A text page that shows where the time of a step goes."""
    lines = [title, "", "rank      total         compute    exposed comm | comm busy  waiting (ms)"]
    for number, rank in enumerate(figures["ranks"]):
        total = rank["total"]
        line = f"{number:4d} {total:10.2f}"
        for name in ("compute", "exposed"):
            line += f" {rank[name]:8.2f} ({rank[name] / total:4.0%})"
        lines.append(f"{line} | {rank['comm']:9.2f} {rank['wait']:8.2f}")
    lines += ["", "communication of rank 0: ms and number of operations a step, MB, GB/s"]
    for kind, (ms, n, size) in sorted(figures["ranks"][0]["kinds"].items()):
        rate = f"{size / ms / 1e6:8.1f}" if size else "     n/a"
        lines.append(f"  {kind:14s} {ms:8.2f} {n:6.1f} {size / 1e6:9.1f} {rate}")
    lines += ["", "(GB/s: bytes over the operations' time, waiting for the peer included)", ""]
    kernels = figures["ranks"][0]["kernels"]
    lines.append(f"rank 0's largest of {len(kernels)} kernels: ms and calls a step")
    by_time = sorted(kernels.items(), key=lambda kernel: kernel[1], reverse=True)
    for name, (ms, n) in by_time[:ON_PAGE]:
        lines.append(f"  {ms:8.3f} {n:7.1f}  {name[:110]}")
    return "\n".join(lines) + "\n"
