"""python -m llm_demo.check: its lines for what a machine may answer, real processes that hang, die
and send wrong values, and all of it on this machine."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, python, run
from test_device import MI100, RYZEN, XTX, fake

from llm_demo.check import experiments, lines, processes

PEAK = {"fp32": 66.9, "bf16": 989.4, "fp16": 989.4}
H200 = {"name": "NVIDIA H200 (nvidia sm_90, 140 GiB)", "peak": PEAK}
RATES = {"fp16": 790, "bf16": 790, "fp32": 52}


def gpus(*answers):
    """Four H200, with their answers to `rates` where they differ."""
    return [{**H200, **answer} for answer in (*answers, *[{"rates": RATES}] * 4)][:4]


@pytest.mark.parametrize("gpu, level, words, fix", [
    ({"rates": RATES}, "ok", "bf16 790 TFLOP/s (80% of peak), fp32 52 TFLOP/s (78%", ""),
    ({"rates": {**RATES, "bf16": 600}}, "warning", ": 76% of the fastest GPU", "cooled"),
    ({"rates": {**RATES, "fp32": 20}}, "warning", ": less than half of its peak", "cooled"),
    ({"problem": "CUDA error: Xid 79"}, "error", "failed: CUDA error: Xid 79", "dmesg"),
])  # fmt: skip
def test_lines_of_a_gpu(gpu, level, words, fix):
    line = lines.gpu_line(0, gpus(gpu))
    assert line[:2] == (level, "gpu 0") and words in line[2] and fix in line[3]


def well(rate):
    return {"wrong": {"send": 0, "all_reduce": 0}, "elements": 2000, "all_reduce": rate}


WRONG = {**well(390), "wrong": {"send": 0, "all_reduce": 120}}
HANGS = {"problem": "no answer within 30 s", "hung": True}


@pytest.mark.parametrize("result, control, level, words, fix", [
    (well(390), None, "ok", "all 2,000 values correct, 390.0 GB/s", ""),
    (well(390), well(20), "ok", "390.0 GB/s; 20.0 GB/s with NCCL_P2P_DISABLE=1", ""),
    (well(10), well(20), "warning", "peer-to-peer is slower than host memory", "iommu=pt"),
    (HANGS, well(20), "error", "hang (no answer within 30 s); correct with NCCL_P2P_DISABLE=1, so "
     "peer-to-peer is broken", "export NCCL_P2P_DISABLE=1"),
    (WRONG, well(20), "error", "return wrong values (120 in all_reduce, of 2,000 compared); "
     "correct", "iommu=pt"),
    (WRONG, WRONG, "error", "with NCCL_P2P_DISABLE=1: return wrong values", "/dev/shm"),
    (well(390), WRONG, "warning", "with NCCL_P2P_DISABLE=1: return wrong", "leave NCCL_P2P"),
])  # fmt: skip
def test_lines_of_a_pair(result, control, level, words, fix):
    line = lines.pair_line("pair 0-1", result, control)
    assert line[:2] == (level, "pair 0-1") and words in line[2] and fix in line[3]


@pytest.mark.parametrize("facts, driver, seen_by, level, words", [
    ({}, "550.54", "nvidia-smi", "error", "550.54 sees no GPU, but nvidia-smi does: too old"),
    ({}, "", "/dev/kfd", "warning", "sees no GPU, but /dev/kfd does"),
    ({}, "", "", "ok", "no GPU was found, so training runs on the CPU"),
    ({"devices": [H200]}, "580.1", "nvidia-smi", "ok", "driver 580.1; NCCL or RCCL 2.29"),
    ({"devices": [H200], "refused": "no code for sm_90"}, "", "", "error", "no code for sm_90"),
])  # fmt: skip
def test_the_build_of_torch_against_the_machine(facts, driver, seen_by, level, words):
    facts = {"torch": "2.13.0", "devices": [], "why": "too old", "refused": "", **facts}
    line = lines.torch_build(facts | {"nccl": "2.29"}, driver, seen_by)
    assert line[0] == level and words in line[2]


def test_a_torch_that_cant_be_imported():
    line = lines.torch_build({"problem": "No module named 'torch'"}, "", "")
    assert line[0] == "error" and "import torch failed" in line[2] and "setup.sh" in line[3]


def test_lines_of_kernels_and_of_the_host():
    times = {"a compiled block": [3.0, 2.0]}
    found = lines.kernel_lines({"fault": "", "times": times, "launch_us": 4.5})
    assert found[0] == ("ok", "kernels", "a compiled block: 2.00 ms, plain 3.00 ms", "")
    assert found[1][:3] == ("ok", "host", "a kernel launch takes 4.5 µs")
    fault, host = lines.kernel_lines({"fault": "no C compiler", "times": {}, "launch_us": 7.5})
    assert fault[0] == "warning" and "fails: no C compiler" in fault[2] and "gcc" in fault[3]
    assert host[0] == "warning" and "--micro_batch_size" in host[3]


def test_disk(tmp_path, monkeypatch):
    place = tmp_path / "not yet/there"
    assert lines.disk(str(place))[2].startswith(f"{tmp_path}: ") and not any(tmp_path.iterdir())
    assert lines.disk("/proc/1")[0] == "error"  # nobody can write there
    for free, level in ((900, "ok"), (15, "warning"), (0.5, "error")):
        usage = SimpleNamespace(free=free * 1e9)
        monkeypatch.setattr("shutil.disk_usage", lambda path, usage=usage: usage)
        assert lines.disk(str(place))[0] == level


@pytest.mark.parametrize("fault, wrong", [
    ("none", {"send": 0, "all_reduce": 0}), ("send", {"send": 2**18, "all_reduce": 0}),
    ("all_reduce", {"send": 0, "all_reduce": 1}), ("die", "SIGSEGV"), ("hang", "no answer within"),
])  # fmt: skip
def test_every_value_received_is_compared(fault, wrong, tmp_path, monkeypatch):
    """By two real processes: one value of one call is wrong, or a process dies or hangs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setattr(sys, "executable", python(TORCH_SYMM_MEM_DISABLE_MULTICAST="1"))
    found = processes.ask(
        "pair", "check_faulty", {"FAULT": fault, "LLM_DEMO_CACHE": str(tmp_path)},
        limit=8 if fault == "hang" else 60, devices=["cpu", "cpu"],
    )  # fmt: skip
    if isinstance(wrong, dict):
        assert found["wrong"] == wrong and found["all_reduce"] > 0
        assert found["elements"] == 2 * 4 * (2**8 + 2**18 + 2**22)
    else:
        assert wrong in found["problem"] and found.get("hung", False) == (fault == "hang")


def test_what_is_measured_on_one_gpu(tmp_path):
    """On a CPU and with small shapes; nothing is compiled."""
    env = {"TORCH_COMPILE_DISABLE": "1"}
    rates = processes.ask("rates", env=env, device="cpu", seconds=0.01, size=32)
    assert rates["rates"].keys() == {"fp32", "bf16", "fp16"} and min(rates["rates"].values()) > 0
    small = {"device": "cpu", "dtype": "bf16", "length": 4, "columns": 64}
    kernels = processes.ask("kernels", env=env, **small)
    assert not kernels["fault"] and kernels["launch_us"] > 0
    assert kernels["times"].keys() == {"a compiled block", "the loss kernel"}
    assert all(len(both) == 2 and min(both) > 0 for both in kernels["times"].values())


def test_what_torch_sees_on_two_faked_mi100(monkeypatch):
    """And a processor's GPU. Attention can't be tried here."""
    fake(monkeypatch, MI100, MI100, RYZEN, archs=["gfx908"])
    facts = experiments.torch_facts()
    assert "gfx1036" in facts["left_out"] and facts["only"][1] == "0,1" and not facts["refused"]
    device = facts["devices"][1]
    assert "gfx908" in device["name"] and facts["dtype"] == "bf16"
    assert device["peak"] == {"fp32": 46.1, "bf16": 92.3, "fp16": 184.6}
    dtype, single, packed, compiled = (text for _, text in experiments.choices()["lines"])
    assert dtype.startswith("torch.bfloat16 by default") and compiled.startswith("off by default")
    assert "for one document per row" in single and "no kernel for gfx908" in packed
    assert packed.startswith("bucketed_math for packed rows; not ")
    fake(monkeypatch, MI100, XTX, archs=["gfx908", "gfx1100"])
    assert "one kind" in experiments.torch_facts()["refused"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the numbers of lines are a CPU's")
def test_this_machine(tmp_path):
    command = [sys.executable, "-m", "llm_demo.check", "--json", "--output_dir", tmp_path / "runs"]
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    said = {line["name"]: line for line in report["lines"]}
    assert not [line for line in report["lines"] if line["level"] == "error"]
    assert said.keys() == {"packages", "torch", "pair 0-1", "dtype", "attention", "compile", "disk"}
    assert "values correct" in said["pair 0-1"]["text"]
    assert said["torch"]["text"].startswith(torch.__version__)
    assert said["attention"]["text"].startswith("bucketed for packed rows;")
    assert "off by default" in said["compile"]["text"]
    assert report["facts"]["pairs"][0]["result"]["wrong"] == {"send": 0, "all_reduce": 0}
    assert f"PyTorch version: {torch.__version__}" in report["facts"]["report"]
    assert report["seconds"] < 60 and not any(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_these_gpus(tmp_path):
    command = [sys.executable, "-m", "llm_demo.check", "--json", "--output_dir", tmp_path / "runs"]
    done = run(command)
    report = json.loads(done.stdout)
    seen = {line["name"].split(" (")[0] for line in report["lines"] if line["level"] != "error"}
    count = torch.cuda.device_count()
    expected = {"torch", "dtype", "attention", "compile", "kernels", "host"}
    expected |= {f"gpu {i}" for i in range(count)}
    expected |= {f"pair {i}-{j}" for j in range(count) for i in range(j)}
    assert expected <= seen, done.stdout + done.stderr
    for pair in report["facts"]["pairs"]:
        assert set(pair["result"]["wrong"].values()) == {0}, pair
    assert len(report["facts"]["kernels"]["times"]) == 2
    assert report["seconds"] < 120


def test_setup_sh_runs_it(tmp_path):
    """In the .venv that is ready; arguments are passed on, and its exit code is that of set-up."""
    repo = tmp_path / "repo"
    (repo / ".venv/bin").mkdir(parents=True)
    for name in ("setup.sh", "requirements.txt", "constraints.txt", "pyproject.toml"):
        (repo / name).write_bytes((ROOT / name).read_bytes())
    python = repo / ".venv/bin/python"
    python.write_text('#!/bin/sh\necho "ran $*"\nexit 1\n')
    python.chmod(0o755)
    (repo / ".venv/pyvenv.cfg").touch()
    (repo / ".venv/.made-by-setup-sh").touch()
    files = "setup.sh requirements.txt constraints.txt pyproject.toml .venv/pyvenv.cfg"
    stamp = subprocess.check_output(f"cat {files} | cksum", shell=True, cwd=repo, text=True)
    (repo / ".venv/.setup-stamp").write_text(f"{stamp.strip()}\n\n")
    done = run(["bash", repo / "setup.sh", "--check", "--json"], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "ran -m llm_demo.check --json\n"
    assert run(["bash", repo / "setup.sh"]).stdout.endswith("is ready\n")
