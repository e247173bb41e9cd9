"""The light timer: against sleeps of a known length, and in a run against the profiler's trace."""

import json

import pytest
import torch
from conftest import ROOT, torchrun

from llm_demo.comm import CommTimer, _Clock, union, waiting

LATE = """
import sys, time, torch, torch.distributed as dist
from llm_demo.comm import CommTimer
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
from llm_demo.comm import waiting
found = ["FOUND", rank, busy, exposed, waiting(operations, everyone)]
sys.stdout.write(" ".join(map(str, [*found, sorted(operations, key=str)])) + "\\n")
dist.destroy_process_group()
"""


def test_union_and_waiting():
    assert union([]) == 0
    assert union([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    ranks = [{"a": 5.0, "b": 1.0}, {"a": 2.0, "b": 4.0}, {"b": 9.0}]
    assert [waiting(rank, ranks) for rank in ranks] == [3.0, 3.0, 8.0]


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
    busy, exposed, durations = timer.read((ops, waits), at(0))
    assert busy == pytest.approx(10) and exposed == pytest.approx(3)
    assert list(durations.values()) == [pytest.approx(9), pytest.approx(1)]


def test_who_waits_for_whom(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    out = torchrun(2, script).stdout
    lines = sorted(line.split(maxsplit=5)[1:] for line in out.splitlines() if "FOUND" in line)
    (_, busy0, exposed0, wait0, keys0), (_, busy1, _, wait1, keys1) = lines
    assert keys0 == keys1 and "(0, 1, 0)" in keys0 and "all_reduce" in keys0
    assert busy0 == exposed0  # on a CPU nothing else goes on meanwhile
    assert 180 < float(wait0) <= float(busy0) < 280
    assert 80 < float(wait1) <= float(busy1) < 180


@pytest.mark.parametrize("kind", ["fsdp", "pp"])
def test_agrees_with_the_profiler(kind, tmp_path):
    """5 % on GPUs; here a loose bound: an operation of a few ms on two busy cores."""
    script = {"fsdp": "fsdp/train_fsdp.py", "pp": "pp/pp_train.py"}[kind]
    flags = {
        "--seq_len": 64, "--micro_batch_size": 2, "--grad_accum_steps": 2, "--max_steps": 4,
        "--eval_json": "none", "--sample_tokens": 0, "--profile_steps": "3:4",
        "--output_dir": tmp_path / "run",
    }  # fmt: skip
    torchrun(2, ROOT / script, *(x for pair in flags.items() for x in pair))
    truth = json.loads((tmp_path / "run/summary.json").read_text())["profile"]["ranks"]
    steps = [json.loads(line) for line in open(tmp_path / "run/metrics.jsonl")][2:4]
    assert [step["step"] for step in steps] == [3, 4]
    for rank in range(2):
        light = sum(step["perf/comm_ms"][rank] for step in steps) / 2
        assert 0.9 * truth[rank]["comm"] < light < 2 * truth[rank]["comm"] + 20
        with_gzip = tmp_path / f"run/trace_rank{rank}.json.gz"
        assert with_gzip.stat().st_size > 1000
    assert "rank 0's largest" in (tmp_path / "run/profile.txt").read_text()
