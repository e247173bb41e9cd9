"""Where the time of a step goes, from recorded traces: H200s', and the same in RCCL's names."""

import copy
import gzip
import json

import pytest
from conftest import ROOT

from llm_demo.core.errors import UserError
from llm_demo.core.timer import MUTED
from llm_demo.flags.args import parse_steps
from llm_demo.machine.profiling import DEVICE_WORK, analyse, combine, page

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
    assert found["exposed"] == pytest.approx(7.33, abs=0.01)  # 7.55 with gaps of a launch
    assert found["idle"] == pytest.approx(12.67, abs=0.1) and found["host"] == 0


def test_what_goes_on_while_the_device_waits_for_the_host_holds_nothing_up():
    """A step on a busy host, which took 131 ms to launch what ran for 70."""
    trace = recorded("h200_fsdp_slow_host_rank0")
    found = analyse(trace, steps=1)
    assert found["total"] == pytest.approx(131.49, abs=0.1)
    assert found["compute"] == pytest.approx(70.37, abs=0.1)
    assert found["host"] == pytest.approx(56.48, abs=0.1)
    assert found["exposed"] == pytest.approx(0.51, abs=0.01)
    assert found["host"] < found["idle"] < found["host"] + 5  # and the gaps between kernels
    # a launch that the trace lacks changes little
    kernels = [e for e in trace["traceEvents"] if e["cat"] in DEVICE_WORK]
    launches = [e for e in trace["traceEvents"] if e["cat"] not in DEVICE_WORK]
    for left_out in (len(launches) // 2, len(launches) - 1):
        some = kernels + launches[:left_out] + launches[left_out + 1 :]
        found = analyse({**trace, "traceEvents": some}, steps=1)
        assert found["host"] == pytest.approx(56.48, abs=0.2)
    # without any: all of it that no kernel ran beside
    found = analyse({**trace, "traceEvents": kernels}, steps=1)
    assert found["exposed"] == pytest.approx(4.05, abs=0.01) and found["host"] == 0


@pytest.mark.parametrize("change", [lambda t: t, renamed], ids=["nccl", "rccl"])
def test_a_pipeline_sends_and_receives_on_the_compute_stream(change):
    found = analyse(change(recorded("h200_pipeline_rank0")), steps=1)
    assert found["kinds"]["sendrecv"][1] == 3
    assert found["exposed"] == pytest.approx(found["comm"])
    groups = {group for kind, group, _ in found["operations"] if kind == "sendrecv"}
    assert groups == {"0>1", "1>0"}


def kernel(name, start, end, **args):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, "args": args}


@pytest.mark.parametrize("calls", ["cuda_runtime", "cuda_driver"])
def test_a_launched_kernel_waits_for_communication_an_unlaunched_one_for_the_host(calls):
    def traced(launches):
        kernels = [  # in no order
            kernel("gemm", 50_000, 60_000, correlation=5),
            kernel("gemm", 30_000, 40_000, correlation=4),
            kernel("copy", 12_000, 13_000, correlation=3),  # of another stream
            kernel("ncclDevKernel_AllGather", -5_000, 30_000, correlation=2),
            kernel("cast", 2_000, 3_000),  # beside the first
            kernel("gemm", 0, 10_000, correlation=1),
        ]
        launched = [kernel("launch", at, at + 5, correlation=i) for i, at in launches.items()]
        return {"traceEvents": kernels + [{**call, "cat": calls} for call in launched]}

    launches = {1: -1_000, 2: -6_000, 3: 11_990, 4: 20_000, 5: 49_000}
    found = analyse(traced(launches), steps=1)
    # 4 to the first gemm's launch, which waited for 1; 2 to the copy's, 7 to the second gemm's,
    # which waited for 10; 9 to the third's
    assert found["host"] == pytest.approx(4 + 2 + 7 + 9, abs=0.06)
    assert found["exposed"] == pytest.approx(1 + 10, abs=0.06)
    found = analyse(traced({**launches, 4: 11_000}), steps=1)  # it waits from then on
    assert found["host"] == pytest.approx(4 + 1 + 9, abs=0.06)
    assert found["exposed"] == pytest.approx(1 + 1 + 17, abs=0.06)


def test_overlap_waiting_and_idle_of_two_ranks():
    send = {"Collective name": "send", "Dst Rank": 1}
    recv = {"Collective name": "recv", "Src Rank": 0}
    first = [kernel("gemm", 0, 40_000), kernel("ncclDevKernel_SendRecv", 30_000, 50_000, **send)]
    second = [kernel("ncclDevKernel_SendRecv", 0, 50_000, **recv), kernel("gemm", 60_000, 90_000)]
    traces = [
        {"distributedInfo": {"rank": rank}, "traceEvents": events}
        for rank, events in enumerate((first, second))
    ]
    figures = combine([analyse(trace, steps=2) for trace in traces])
    keys = ("total", "compute", "comm", "exposed", "idle", "wait")
    rows = [[rank[key] for key in keys] for rank in figures["ranks"]]
    assert rows[0] == pytest.approx([25, 20, 10, 5, 0, 0])
    assert rows[1] == pytest.approx([45, 15, 25, 25, 5, 15])  # the receiver came 15 ms early
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


def test_copies_are_under_way_from_barrier_to_barrier_and_matched_stream_by_stream():
    def copied(start, end, stream):
        args = {"stream": stream, "bytes": 8}
        copy = kernel("Memcpy PtoP (Device -> Device)", start + 2_000, end - 3_000, **args)
        first = kernel(BARRIER, start, start + 1_000, **args)
        last = kernel(BARRIER, end - 1, end, **args)
        return [last, {**copy, "cat": "gpu_memcpy"}, first]

    gemm = kernel("gemm", 0, 100_000, stream=7)
    # a gather and an exchange on a stream each, whose numbers and order differ on the other rank
    first = [gemm, *copied(0, 10_000, 22), *copied(10_000, 30_000, 22), *copied(9_000, 50_000, 26)]
    second = [gemm, *copied(0, 10_000, 23), *copied(60_000, 75_000, 23), *copied(9_000, 60_000, 20)]
    ranks = combine([analyse({"traceEvents": events}, steps=1) for events in (first, second)])
    assert [r["comm"] for r in ranks["ranks"]] == [50, 75]
    assert [r["wait"] for r in ranks["ranks"]] == [5, 10]
    assert ranks["ranks"][0]["kinds"]["ptop"] == (5 + 15 + 36, 3, 24)
    # a barrier that the trace lacks changes one operation, not all after it
    for lost, next_one in ((3, 15), (1, 13)):  # the first and the last of the first
        found = analyse({"traceEvents": [e for i, e in enumerate(second) if i != lost]}, steps=1)
        assert found["comm"] == pytest.approx(75, abs=2.5)
        start, end = found["operations"]["copies", "0", 1]
        assert end - start == 1e3 * next_one


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


def test_steps_to_profile():
    assert parse_steps("") is None and parse_steps("3:5") == (3, 5)
    for text in ("5:3", "0:2"):
        with pytest.raises(UserError, match=f"--profile_steps {text}"):
            parse_steps(text)
