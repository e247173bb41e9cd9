"""Where the time of a step goes, from recorded traces: H200s', and the same in RCCL's names."""

import copy
import gzip
import json

import pytest
from conftest import ROOT

from llm_demo.core.timer import MUTED
from llm_demo.machine.profiling import analyse, combine, page

BARRIER = "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)"


def recorded(name):
    with gzip.open(ROOT / f"tests/traces/{name}.json.gz") as f:
        return json.load(f)


def renamed(trace):
    """As RCCL has it: one kernel for all collectives, told apart by its arguments alone."""
    trace = copy.deepcopy(trace)
    for event in trace["traceEvents"]:
        if "nccl" in event["name"]:
            event["name"] = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
    return trace


@pytest.mark.parametrize("change", [lambda t: t, renamed], ids=["nccl", "rccl"])
def test_a_step_of_fsdp(change):
    """Two steps of Qwen3-0.6B on 2 H200, 8 units: 8 all-gathers, 8 reduce-scatters, 1 norm."""
    found = analyse(change(recorded("h200_fsdp_rank0")), steps=2)
    kinds = {k: (n, size) for k, (_, n, size) in found["kinds"].items()}
    assert kinds.keys() == {"allgather", "reducescatter", "allreduce"}
    assert kinds["allgather"][0] == kinds["reducescatter"][0] == 8 and kinds["allreduce"][0] == 1
    params = 596_049_920
    assert kinds["allgather"][1] == pytest.approx(params * 2, rel=1e-3)  # gathered in bf16
    assert kinds["reducescatter"][1] == pytest.approx(params * 4, rel=1e-3)  # reduced in fp32
    assert found["total"] == pytest.approx(96.21, abs=0.1)
    assert found["compute"] == pytest.approx(76.21, abs=0.1)
    assert found["comm"] == pytest.approx(14.28, abs=0.05)
    assert found["exposed"] == pytest.approx(7.55, abs=0.01)


@pytest.mark.parametrize("change", [lambda t: t, renamed], ids=["nccl", "rccl"])
def test_a_pipeline_sends_and_receives_on_the_compute_stream(change):
    found = analyse(change(recorded("h200_pipeline_rank0")), steps=1)
    assert found["kinds"]["sendrecv"][1] == 3
    assert found["exposed"] == pytest.approx(found["comm"])
    groups = {group for kind, group, _ in found["operations"] if kind == "sendrecv"}
    assert groups == {"0>1", "1>0"}


def kernel(name, start, end, **args):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, "args": args}


def test_overlap_and_waiting_of_two_ranks():
    send = {"Collective name": "send", "Dst Rank": 1}
    recv = {"Collective name": "recv", "Src Rank": 0}
    first = [kernel("gemm", 0, 40_000), kernel("ncclDevKernel_SendRecv", 30_000, 50_000, **send)]
    second = [kernel("ncclDevKernel_SendRecv", 0, 50_000, **recv), kernel("gemm", 60_000, 90_000)]
    traces = [
        {"distributedInfo": {"rank": rank}, "traceEvents": events}
        for rank, events in enumerate((first, second))
    ]
    figures = combine([analyse(trace, steps=2) for trace in traces])
    keys = ("total", "compute", "comm", "exposed", "wait")
    rows = [[rank[key] for key in keys] for rank in figures["ranks"]]
    assert rows[0] == pytest.approx([25, 20, 10, 5, 0])
    assert rows[1] == pytest.approx([45, 15, 25, 25, 15])  # the receiver came 15 ms early
    text = page("two ranks", figures)
    assert "sendrecv" in text and "gemm" in text and len(text.splitlines()) < 40


def test_kernels_and_kinds_are_of_one_step():
    args = {"Collective name": "_allgather_base", "dtype": "Float", "Out msg nelems": 100}
    events = [kernel("gemm", at, at + 2_000) for at in (0, 2_000, 10_000, 12_000)]
    events += [kernel("ncclDevKernel_AllGather", at, at + 1_000, **args) for at in (0, 10_000)]
    found = analyse({"traceEvents": events}, steps=2)
    assert found["kernels"] == {"gemm": (4, 2)}
    assert found["kinds"] == {"allgather": (1, 1, 400)}


def test_copies_between_gpus_and_their_barriers_are_communication():
    copied = kernel("Memcpy PtoP (Device -> Device)", 15_000, 25_000, bytes=2_000_000)
    events = [
        kernel("gemm", 0, 20_000),
        kernel(BARRIER, 10_000, 15_000),
        {**copied, "cat": "gpu_memcpy"},
        kernel(BARRIER, 25_000, 26_000),
        {**kernel("Memcpy DtoD (Device -> Device)", 30_000, 31_000), "cat": "gpu_memcpy"},
    ]
    found = analyse({"traceEvents": events}, steps=1)
    assert (found["comm"], found["exposed"], found["compute"]) == (16, 6, 21)
    assert found["kinds"] == {"barrier": (6, 2, 0), "ptop": (10, 1, 2_000_000)}


def test_signals_of_copy_engines():
    """A stage copies for 6 ms and signals. The next one waits for 30, of which it computes 10 on
    another stream, clones what came, and says that the slot is free."""
    signal = "c10d::symmetric_memory::{}_signal_kernel(unsigned int**, int, int, int)"
    copied = kernel("Memcpy PtoP (Device -> Device)", 20_000, 26_000, stream=20, bytes=8)
    sender = [
        kernel("gemm", 0, 40_000, stream=7),
        {**copied, "cat": "gpu_memcpy"},
        kernel(signal.format("put"), 26_000, 27_000, stream=20),
    ]
    receiver = [
        kernel(signal.format("wait"), 0, 30_000, stream=7),
        kernel("gemm", 5_000, 15_000, stream=9),
        {**kernel("Memcpy DtoD (Device -> Device)", 30_000, 31_000), "cat": "gpu_memcpy"},
        kernel(signal.format("put"), 31_000, 32_000, stream=7),
        kernel("gemm", 32_000, 40_000, stream=7),
    ]
    found = [analyse({"traceEvents": events}, steps=1) for events in (sender, receiver)]
    assert [x["kinds"] for x in found] == [
        {"ptop": (6, 1, 8), "putsignal": (1, 1, 0)},
        {"wait_signal": (30, 1, 0), "putsignal": (1, 1, 0)},
    ]
    ranks = combine(found)["ranks"]
    assert [(r["comm"], r["exposed"], r["wait"]) for r in ranks] == [(7, 0, 0), (31, 21, 30)]


def test_gloo_takes_the_kernels_place_on_a_cpu():
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 10_000},
        {"ph": "X", "cat": "cpu_op", "name": "c10d::allreduce_", "ts": 10_000, "dur": 5_000},
        {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "ts": 10_000, "dur": 4000},
        # the trainer's own reading of numbers, which the events leave out as well
        {"ph": "X", "cat": "user_annotation", "name": MUTED, "ts": 15_000, "dur": 5000},
        {"ph": "X", "cat": "user_annotation", "name": "gloo:all_gather", "ts": 15_500, "dur": 3000},
    ]
    found = analyse({"traceEvents": events}, steps=1)
    assert (found["compute"], found["comm"], found["exposed"]) == (10, 4, 4)
    assert list(found["kinds"]) == ["allreduce"]
