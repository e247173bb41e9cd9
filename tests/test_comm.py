"""The light timer: against sleeps of a known length, and in a run against the profiler's trace."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, torchrun

from llm_demo.core.timer import CommTimer, _Clock, union, waiting

LATE = """
import sys, time, torch, torch.distributed as dist
from llm_demo.core.timer import CommTimer
dist.init_process_group("gloo")
rank = dist.get_rank()
original = dist.all_reduce
timer = CommTimer(torch.device("cpu"), rank, 2)
timer.install()
x = torch.ones(1000)
origin = timer.event()
time.sleep(0.2 * rank)  # rank 0 waits for rank 1
dist.all_reduce(x)
with timer.mute():
    dist.barrier(); dist.all_reduce(x)
time.sleep(0.1 * (1 - rank))  # and rank 1 for rank 0
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
busy, exposed, operations = timer.read(timer.take(), origin)
everyone = [None] * 2
timer.remove()
assert dist.all_reduce is original
dist.all_gather_object(everyone, operations)
from llm_demo.core.mesh import World
from llm_demo.core.timer import waiting
from llm_demo.run.records import Gather
gather = Gather(World(rank, 2, rank, torch.device("cpu")))
for step in range(4):  # one rank's operations change
    some = {"a": (1.0, 6.0 if rank else 3.0)}
    if rank and step in (1, 2):
        some["b"] = (7.0, 8.0)
    rows, waits = gather.step([float(step), float(rank)], some)
    assert (rows, waits) == ([[step, 0], [step, 1]], [0, 3])
found = ["FOUND", rank, busy, exposed, waiting(everyone)[rank]]
sys.stdout.write(" ".join(map(str, [*found, sorted(operations, key=str)])) + "\\n")
dist.destroy_process_group()
"""


def test_union_and_waiting():
    assert union([]) == 0
    assert union([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    ranks = [{"a": (0, 5), "b": (5, 6)}, {"a": (3, 5), "b": (6, 10)}, {"b": (1, 10)}]
    assert waiting(ranks) == [3, 3, 8]
    # two receives, posted early on streams of their own: they wait at the same time
    early, late = {"c": (0, 10), "d": (2, 13)}, {"c": (9, 10), "d": (12, 13)}
    assert waiting([early, late]) == [12, 0]
    # a wait for a signal of copy engines, which the other rank does not wait for as long
    only = ("copied wait_signal", "", 0)
    assert waiting([{only: (0, 12)}, {only: (9, 10)}]) == [12, 1]


def test_exposed_is_communication_that_the_compute_stream_waits_for():
    def at(ms):
        clock = _Clock()
        clock.at = ms / 1e3
        return clock

    timer = CommTimer(torch.device("cpu"), 0, 2)
    ops = [
        (("all_to_all_single", "", 0), at(1), at(10), False, 0.0),  # hidden up to 8
        (("send", 0), at(20), at(21), True, 0.0),  # on the compute stream itself
    ]
    waits = [
        (at(8), at(13)),
        (at(30), at(31)),
    ]  # both for a sum on the other stream, the first for the operation, too
    busy, exposed, operations = timer.read((ops, waits), at(0))
    assert busy == pytest.approx(10) and exposed == pytest.approx(3)
    assert [*operations.values()] == [pytest.approx((1, 10)), pytest.approx((20, 21))]


def test_operations_of_different_groups_are_kept_apart(monkeypatch):
    """However it is passed: waits are compared with those of ranks in the same group only."""
    gather = lambda output, input, group=None, async_op=False: None  # noqa: E731
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    timer, x, group = CommTimer(torch.device("cpu"), 0, 2), torch.ones(2), SimpleNamespace()
    group.group_name = "shards"
    timer.install()
    try:
        torch.distributed.all_gather_into_tensor(x, x, group=group)
        torch.distributed.all_gather_into_tensor(x, x, group)
        torch.distributed.all_gather_into_tensor(x, x, group, True)  # runs on: not timed
        timer.call("all_gather", lambda x: None, x, group=group)
        timer.call("all_gather", lambda x: None, x)
    finally:
        timer.remove()
    gathers, copies = ("all_gather_into_tensor", "shards"), "copied all_gather"
    expected = [(*gathers, 0), (*gathers, 1), (copies, "shards", 0), (copies, "", 0)]
    assert [op[0] for op in timer.take()[0]] == expected


class Stream:
    """A stream and its host in simulated milliseconds, with as much of torch.cuda as is timed."""

    cuda_stream, host, free = 1, 0.0, 0.0  # free: when the stream will be

    def launch(self, ms):
        self.free = max(self.host, self.free) + ms

    def event(self):
        stream = self

        class Event:
            def record(self):
                self.at = max(stream.host, stream.free)

            def query(self):
                return self.at <= stream.host

            def elapsed_time(self, later):
                return later.at - self.at

        return Event()


@pytest.mark.parametrize(
    "name, before, expected",
    [("all_reduce", 0, (5, 7)), ("all_reduce", 9, (9, 11)), ("copied all_gather", 0, (0, 7))],
    ids=["idle", "busy", "copies"],
)
def test_a_late_launch_is_no_communication(name, before, expected, monkeypatch):
    """The host takes 5 ms from the first event to the last launch. A stream that has work until
    then does not wait, and the copies of an operation may be launched before."""
    stream = Stream()
    monkeypatch.setattr("time.perf_counter", lambda: stream.host / 1e3)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: stream)
    timer = CommTimer(torch.device("cuda"), 0, 2)
    timer._new, timer.compute = stream.event, stream.cuda_stream
    origin = timer.event()

    def operation():
        if name.startswith("copied"):
            stream.launch(1)
        stream.host += 5
        stream.launch(2)

    if before:
        stream.launch(before)
    timer._timed(name, operation, (), {})
    busy, exposed, operations = timer.read(timer.take(), origin)
    assert busy == exposed == pytest.approx(expected[1] - expected[0])
    assert [*operations.values()] == [pytest.approx(expected)]


def test_who_waits_for_whom(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    out = torchrun(2, script).stdout
    lines = sorted(line.split(maxsplit=5)[1:] for line in out.splitlines() if "FOUND" in line)
    (_, busy0, exposed0, wait0, keys0), (_, busy1, _, wait1, keys1) = lines
    assert keys0 == keys1 and "(0, 1, '', 0)" in keys0 and "all_reduce" in keys0
    assert busy0 == exposed0  # on a CPU nothing else goes on meanwhile
    assert 180 < float(wait0) <= float(busy0) < 280
    assert 80 < float(wait1) <= float(busy1) < 180


@pytest.mark.parametrize("kind", [pytest.param("fsdp", marks=pytest.mark.slow), "pp"])
def test_agrees_with_the_profiler(kind, tmp_path):
    """GPUs: as far as events can know. A CPU: an operation of a few ms on two busy cores."""
    script = {"fsdp": "fsdp/train_fsdp.py", "pp": "pp/pp_train.py"}[kind]
    flags = {
        "--seq_len": 64, "--micro_batch_size": 2, "--grad_accum_steps": 2, "--max_steps": 4,
        "--eval_json": "none", "--sample_tokens": 0, "--profile_steps": "3:4",
        "--output_dir": tmp_path / "run",
    }  # fmt: skip
    torchrun(2, ROOT / script, *(x for pair in flags.items() for x in pair))
    profile = json.loads((tmp_path / "run/summary.json").read_text())["profile"]
    truth = profile["ranks"]
    steps = [json.loads(line) for line in open(tmp_path / "run/metrics.jsonl")][2:4]
    assert [step["step"] for step in steps] == [3, 4]
    for rank in range(2):
        light = sum(step["perf/comm_ms"][rank] for step in steps) / 2
        if torch.cuda.is_available():
            busy, exposed = (
                sum(step[f"perf/comm_{kind}"][rank] for step in steps) / 2
                for kind in ("ms", "exposed_ms")
            )
            assert_agrees(rank, profile, busy, exposed)
        else:
            assert 0.9 * truth[rank]["comm"] < light < 2 * truth[rank]["comm"] + 20
        with_gzip = tmp_path / f"run/trace_rank{rank}.json.gz"
        assert with_gzip.stat().st_size > 1000
    assert "rank 0's largest" in (tmp_path / "run/profile.txt").read_text()


def assert_agrees(rank, profile, busy, exposed):
    """The events' figures against the trace's, of one rank: apart by 5 %, by the gaps around each
    operation, and by the time in which the device had nothing to do, as its host was late."""
    truth = profile["ranks"][rank]
    idle = truth["total"] - truth["compute"] - truth["exposed"]
    apart = idle + 0.02 * sum(n for _, n, _ in truth["kinds"].values())
    said = f"rank {rank}: events {busy}, {exposed}; trace {truth['comm']}, {truth['exposed']}"
    assert truth["comm"] * 0.95 - apart <= busy <= truth["comm"] * 1.05 + apart, said
    assert exposed <= truth["exposed"] * 1.05 + apart, said
