"""python -m llm_demo.check on faked machines, whose processes hang, die and return wrong numbers,
and on this one."""

import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run

from llm_demo.check import __main__ as check
from llm_demo.check import experiments as check_worker
from llm_demo.check import files as check_files
from llm_demo.check import gpus as check_gpus
from llm_demo.check import machine as check_machine
from llm_demo.check import pairs as check_pairs
from llm_demo.check import processes as check_process

STAND_IN = [sys.executable, "-I", "-S", str(ROOT / "tests/check_stand_in.py")]
H200 = {"vendor": "nvidia", "name": "NVIDIA H200", "arch": "sm_90", "memory_gb": 140.0}
H200 |= {"peak": {"fp32": 66.9, "bf16": 989.4, "fp16": 989.4}}
MI100 = {"vendor": "amd", "name": "AMD Instinct MI100", "arch": "gfx908", "memory_gb": 32.0}
MI100 |= {"peak": {"fp32": 46.1, "bf16": 92.3, "fp16": 184.6}}


class Machine:
    """A machine made of files below a root, tools' outputs, and what the processes answer."""

    def __init__(self, root, monkeypatch):
        self.root, self.monkeypatch = root, monkeypatch
        self.tools = {}
        self.scenario = {"faults": {}, "faults without p2p": {}}
        kind = {"impl": "varlen", "reasons": [], "compile": True, "why": "fewer kernels"}
        self.scenario["answers"] = {
            "torch": {},
            "choices": {
                "dtype": "bf16", "dtype_reason": "needs no loss scaling",
                "against": {"sdpa": None, "varlen": None, "flash_attn": "not installed"},
                "probes": ["sdpa", "varlen"],
            },
            "choose": {"packed": kind, "single": kind | {"impl": "sdpa"}},
            "deepspeed": {"version": check_machine.pinned("deepspeed"), "launcher": True},
            "disk": {"place": "/runs", "free_gb": 900},
            "kernels": {
                "python_s": 0.12, "launch_us": 4.0, "block": [3.0, 2.0, 0], "loss": [8.0, 1.0, 0],
            },
        }  # fmt: skip
        self.file("dev/shm/.keep", "")
        self.file("sys/class/iommu/.keep", "")
        (root / "sys/class/iommu/.keep").unlink()
        monkeypatch.setenv("PROBE_ROOT", str(root))
        for name in (*check_machine.VISIBLE, check_pairs.P2P_OFF, "OMP_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(check_process, "COMMAND", STAND_IN)
        monkeypatch.setattr(check_process, "tool", self.tool)
        roomy = SimpleNamespace(free=60 << 30)
        monkeypatch.setattr(check_machine.shutil, "disk_usage", lambda path: roomy)
        monkeypatch.setattr(check_machine, "usable_cores", lambda: list(range(64)))

    def file(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def tool(self, *command):
        said = self.tools.get(" ".join(command), "")
        return said(*command) if callable(said) else said

    def torch(self, devices=(), **facts):
        n = len(devices)
        devices = [{**d, "uuid": f"u{i}", "bus": bus(i)} for i, d in enumerate(devices)]
        facts = {"torch": "2.13.0+cu130", "cuda": "13.0", "hip": None, "unavailable": None, **facts}
        facts.setdefault("links", [])
        facts |= {"devices": devices, "peers": [[True] * n] * n}
        self.scenario["answers"]["torch"] = facts

    def smi(self, n, driver="580.159.04", cuda="13.0", reasons=(), width=(), links=(), kind="NV18"):
        """nvidia-smi of n GPUs, and the links that PyTorch's process has found."""
        places = [f"0000{bus(i)}".upper() for i in range(n)]
        self.tools["nvidia-smi"] = f"| NVIDIA-SMI {driver}  CUDA Version: {cuda}  |"
        self.tools["nvidia-smi -L"] = "".join(f"GPU {i}: NVIDIA H200\n" for i in range(n))
        rows = [f"{i}, GPU-u{i}, {place}, 4, {driver}" for i, place in enumerate(places)]
        self.query("gpu", "index,uuid,pci.bus_id,memory.used,driver_version", rows)
        fields = "pci.bus_id,clocks_event_reasons.active,pcie.link.gen.current,"
        fields += "pcie.link.width.current,clocks.sm,temperature.gpu,power.draw"
        widths = dict(enumerate(width))
        rows = [
            f"{place}, {dict(reasons).get(i, '0x0000000000000000')}, 5, {widths.get(i, 16)},"
            " 1980, 45, 690.12"
            for i, place in enumerate(places)
        ]
        self.query("gpu", fields, rows)
        pairs = itertools.permutations(map(str, range(n)), 2)
        if torch_facts := self.scenario["answers"]["torch"]:
            torch_facts["links"] = [[*pair, kind] for pair in pairs]
        links = dict(links)
        self.tools["nvidia-smi nvlink -s"] = "".join(
            f"GPU {i}: NVIDIA H200 (UUID: GPU-u{i})\n"
            + "".join(
                f"\t Link {k}: {'26.562 GB/s' if k < links.get(i, 18) else '<inactive>'}\n"
                for k in range(18)
            )
            for i in range(n)
        )

    def query(self, of, fields, rows):
        command = f"nvidia-smi --query-{of}={fields} --format=csv,noheader,nounits"
        self.tools[command] = "\n".join(rows) + "\n"

    def check(self, **limits):
        """(lines, exit code, facts) of the check on this machine."""
        self.monkeypatch.setenv("SCENARIO", json.dumps(self.scenario))
        for kind, limit in limits.items():
            self.monkeypatch.setitem(check_pairs.LIMITS, kind, limit)
        self.monkeypatch.setattr(check_pairs.time, "sleep", lambda seconds: None)
        lines = []
        try:
            facts = check.check("/runs", lines.extend)
        finally:
            check_process.end_all()
        json.dumps(facts)
        return lines, int(any(line[0] == "error" for line in lines)), facts


def bus(i):
    return f"0000:{i + 1:02x}:00.0"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def eight(machine):
    machine.torch([H200] * 8)
    machine.smi(8)
    return machine


def bad(lines):
    return [line for line in lines if line[0] != "ok"]


def named(lines, name):
    (line,) = (line for line in lines if line[1] == name)
    return line


def test_eight_gpus_that_are_well(eight):
    lines, code, facts = eight.check()
    assert code == 0 and not bad(lines), bad(lines)
    assert len(facts["pairs"]) == 28
    pairs = named(lines, "pairs")[2]
    assert "28 of 28 pairs: all 56,000 values correct, 390 GB/s (82% of NVLink x18)" in pairs
    assert "with NCCL_P2P_DISABLE=1 also correct, 20 GB/s" in pairs
    assert "8 GPUs: all 8,000 values correct, 390 GB/s" in named(lines, "together")[2]
    assert "bf16 790 (80%), fp16 790 (80%), fp32 52 (78%) TFLOP/s" in named(lines, "gpu 7")[2]
    assert "PCIe 5 x16" in named(lines, "gpu 0")[2]
    assert "CUDA 13.0 build; driver 580.159.04, CUDA 13.0" in named(lines, "torch")[2]
    order = [name for _, name, _, _ in lines]
    assert order[:4] == ["python", "torch", "packages", "gpu 0"]
    assert order[11:] == [
        "products", "pairs", "iommu", "together", "/dev/shm", "cores", "disk", "dtype",
        "attention", "compile", "deepspeed", "kernels", "kernels", "host",
    ]  # fmt: skip
    assert "1980 MHz, 45 °C, 690 W" in named(lines, "gpu 1")[2]
    assert "a kernel launch 4.0 µs" in named(lines, "host")[2]
    assert "the loss kernel takes 1.00 ms, eager 8.00 ms" in lines[-2][2]
    assert "u0" not in json.dumps(facts)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_rounds_hold_each_pair_once_and_disjoint_ones(n):
    rounds = list(check_pairs.rounds(list(range(n))))
    assert len(rounds) == n - 1 + n % 2
    for pairs in rounds:
        assert len(set(itertools.chain(*pairs))) == 2 * len(pairs)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(n), 2))


def test_a_slow_gpu_says_why_its_clock_is_low(eight):
    eight.scenario["faults"]["gemm cuda:3"] = 500
    eight.smi(8, reasons={3: "0x0000000000000040", 5: "0x0000000000000004"})
    lines, code, _ = eight.check()
    assert code == 0
    (slow,) = bad(lines)
    assert slow[1] == "gpu 3"
    assert "hardware thermal slowdown; 63% of the fastest GPU" in slow[2] and "cooling" in slow[3]


def test_a_pair_that_hangs_costs_a_line_and_no_more(eight):
    eight.scenario["faults"]["2-5"] = "hang"
    begun = time.monotonic()
    lines, code, facts = eight.check(pair=1)
    assert time.monotonic() - begun < 15
    assert code == 1
    error, together = bad(lines)
    assert error[:2] == ("error", "pairs") and together[:2] == ("warning", "together")
    assert error[2].startswith("GPUs 2-5: hang (no answer within 1 s); correct with")
    for word in ("iommu=pt", "ACS", "export NCCL_P2P_DISABLE=1"):
        assert word in error[3]
    assert "27 of 28 pairs: all" in next(x for x in lines if x[1] == "pairs" and x[0] == "ok")[2]
    assert all(pair["result"] for pair in facts["pairs"])


def test_wrong_numbers_are_told_from_a_fault_of_both_ways(eight):
    eight.scenario["faults"] |= {"0-1": "wrong", "0-2": "wrong", "3-4": "wrong"}
    eight.scenario["faults without p2p"]["3-4"] = "wrong"
    lines, code, _ = eight.check()
    assert code == 1
    p2p, both, together = bad(lines)
    assert p2p[2].startswith("GPUs 0-1, 0-2: return wrong values (120 in all_reduce, of 2,000")
    assert "correct with NCCL_P2P_DISABLE=1, so peer-to-peer is broken" in p2p[2]
    assert both[0] == "error" and "with NCCL_P2P_DISABLE=1 they return wrong values" in both[2]
    assert "peer-to-peer is broken" not in both[2]


def test_half_a_link_is_named_with_its_pair(eight):
    eight.scenario["faults"] |= {f"{i}-7": 190 for i in range(7)}
    eight.smi(8, links={7: 9})
    lines, code, facts = eight.check()
    assert code == 0
    (slow,) = bad(lines)
    assert slow[2] == ("GPUs 0-7, 1-7, 2-7, 3-7, 4-7, 5-7, 6-7: 190 GB/s of the 478 of NVLink x18")
    assert all(p["result"].get("alone") for p in facts["pairs"] if 7 in p["pair"])


def test_pcie_pairs_without_peer_to_peer(machine):
    machine.torch([{**H200, "name": "NVIDIA GeForce RTX 4090", "arch": "sm_89"}] * 2)
    machine.smi(2, kind="PHB", width=[16, 8], links={0: 0, 1: 0})
    machine.scenario["answers"]["torch"]["peers"] = [[True, False], [False, True]]
    machine.scenario |= {"speed": 10}
    machine.scenario["faults without p2p"]["0-1"] = 10
    lines, code, _ = machine.check()
    assert code == 0
    (slow,) = bad(lines)
    assert slow[2].startswith("GPUs 0-1: 10 GB/s of the 32 of PCIe 5 x8 (PHB); the driver")
    assert "the driver offers no peer-to-peer here" in slow[2]
    machine.scenario["faults without p2p"]["0-1"] = 24
    (line,) = bad(machine.check()[0])
    assert "10.0 GB/s, but 24.0 with NCCL_P2P_DISABLE=1" in line[2]


def test_a_worker_that_dies_or_raises_is_an_error_with_its_last_words(machine):
    machine.torch([H200] * 2)
    machine.smi(2)
    machine.scenario["faults"] |= {"gemm cuda:1": "die", "module sdpa": "raise differs from math"}
    machine.scenario["faults"]["start cuda:0"] = "raise AcceleratorError: CUDA error: Xid 79"
    machine.scenario["answers"]["deepspeed"] = {"problem": "ImportError: no module"}
    lines, code, _ = machine.check()
    assert code == 1
    first, second, pair, together, *rest = bad(lines)
    assert "CUDA error: Xid 79" in first[2] and "dmesg" in first[3]
    assert "died of SIGSEGV: a library's last words" in second[2]
    assert "not tried: AcceleratorError: CUDA error: Xid 79" in pair[2]
    assert [line[:2] for line in rest] == [("warning", "attention"), ("warning", "deepspeed")]
    assert "sdpa fails: differs from math" in rest[0][2]


def test_peer_to_peer_that_is_off_already_is_not_tried(machine, monkeypatch):
    machine.torch([H200] * 2)
    machine.smi(2)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    machine.scenario["faults without p2p"] = {"0-1": 300, "all": 300}
    lines, code, _ = machine.check()
    assert code == 0 and "NCCL_P2P_DISABLE is set" in named(lines, "pairs")[2]


def test_small_shared_memory(eight, monkeypatch):
    small = SimpleNamespace(free=64 << 20)
    monkeypatch.setattr(check_machine.shutil, "disk_usage", lambda path: small)
    (line,) = check_machine.shared_memory(8)
    assert line[0] == "warning" and "--ipc=host" in line[3]
    assert check_machine.shared_memory(0)[0][0] == "ok"


BUILDS = {
    # name: (facts of torch, how to build the machine, level, words of the text, words of the fix)
    "driver too old": (
        {"unavailable": "The NVIDIA driver on your system is too old (found version 12040)."},
        lambda m: m.smi(2, driver="550.54", cuda="12.4"),
        "error", "the driver supports CUDA 12.4, this build needs 13.0", "update the NVIDIA driver",
    ),
    "CPU build beside a GPU": (
        {"torch": "2.13.0+cpu", "cuda": None},
        lambda m: m.smi(1),
        "error", "training would run on the CPU, but nvidia-smi lists one", "bash setup.sh",
    ),
    "CPU build, card without driver": (
        {"torch": "2.13.0+cpu", "cuda": None},
        lambda m: (m.file("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n"),
                   m.file("sys/bus/pci/devices/0000:01:00.0/class", "0x030000\n")),
        "warning", "an NVIDIA device at 0000:01:00.0", "install NVIDIA's driver",
    ),
    "CPU build beside an MI100": (
        {"torch": "2.13.0+cpu", "cuda": None},
        lambda m: kfd(m, 90008),
        "error", "the kernel driver lists an AMD gfx908", "bash setup.sh",
    ),
    "CPU build, AMD laptop": (
        {"torch": "2.13.0+cpu", "cuda": None},
        lambda m: kfd(m, 110003),
        "ok", "training runs on the CPU", "",
    ),
    "CUDA build beside an MI100": (
        {}, lambda m: kfd(m, 90008), "error", "is for another vendor's GPU", "bash setup.sh",
    ),
    "hidden by a variable": (
        {"unavailable": "No CUDA GPUs are available"},
        lambda m: (m.smi(1), m.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")),
        "warning", "sees no GPU with CUDA_VISIBLE_DEVICES=", "unset",
    ),
    "no fabric manager": (
        {"unavailable": "CUDA error: system not yet initialized (Error 802)"},
        lambda m: m.smi(8),
        "error", "system not yet initialized", "nvidia-fabricmanager",
    ),
    "container without --gpus": (
        {"unavailable": "Found no NVIDIA driver on your system."},
        lambda m: None,
        "warning", "but no GPU was found", "--gpus all",
    ),
}  # fmt: skip


def kfd(machine, version):
    path = "sys/class/kfd/kfd/topology/nodes/1/properties"
    machine.file(path, f"simd_count 480\ngfx_target_version {version}\n")


@pytest.mark.parametrize("name", BUILDS)
def test_the_build_of_torch_against_the_machine(machine, name):
    facts, build, level, words, fix = BUILDS[name]
    machine.torch(**facts)
    build(machine)
    (line,) = check_machine.torch_build(machine.scenario["answers"]["torch"], check_gpus.nvidia())
    assert line[0] == level, line
    assert words in line[2] and fix in line[3], line


def test_gpus_that_training_refuses(machine):
    machine.torch([MI100], cuda=None, hip="6.4", refused="torch has no code for gfx908")
    facts = machine.scenario["answers"]["torch"]
    (line,) = check_machine.torch_build(facts, {"driver": "", "cuda": None})
    assert line[0] == "error" and "ends at once: torch has no code for gfx908" in line[2]


def test_a_torch_that_cant_be_imported_ends_what_needs_it(machine):
    machine.scenario["answers"]["torch"] = {"problem": "ModuleNotFoundError: No module 'torch'"}
    lines, code, _ = machine.check()
    assert code == 1
    (error,) = bad(lines)
    assert "import torch failed: ModuleNotFoundError" in error[2] and "setup.sh" in error[3]
    assert named(lines, "disk")[0] == "ok"


def mi100s(machine, cmdline="quiet", **sensors):
    links = [[bus(i), bus(1 - i), "PCIe"] for i in range(2)]
    facts = {"torch": "2.9.1+rocm6.4", "cuda": None, "hip": "6.4.43482", "nccl": "2.22.3"}
    machine.torch([MI100] * 2, **facts, links=links)
    for i in range(2):
        folder = f"sys/bus/pci/devices/{bus(i)}"
        files = {
            "mem_info_vram_total": 32 << 30, "mem_info_vis_vram_total": 256 << 20,
            "current_link_speed": "16.0 GT/s PCIe", "current_link_width": 16,
            "pp_dpm_sclk": "0: 300Mhz\n1: 1200Mhz *\n2: 1502Mhz",
            "hwmon/hwmon3/temp1_label": "edge", "hwmon/hwmon3/temp1_input": 61000,
            "hwmon/hwmon3/temp2_label": "junction", "hwmon/hwmon3/temp2_input": 80000,
            "hwmon/hwmon3/temp2_crit": 100000, "hwmon/hwmon3/power1_average": 221000000,
            "hwmon/hwmon3/power1_cap": 290000000,
        } | (sensors if i else {})  # fmt: skip
        for name, value in files.items():
            machine.file(f"{folder}/{name}", f"{value}\n")
    machine.file("sys/class/iommu/ivhd0/devices", "")
    machine.file("proc/cmdline", cmdline)
    machine.file("proc/sys/kernel/osrelease", "6.8.0-90-generic\n")
    machine.file("opt/rocm/core/.info/version", "7.14.0\n")
    gemm = {"rates": {"bf16": 70, "fp16": 120, "fp32": 35}, "blas": "Cublas"}
    machine.scenario["gemm"] = gemm | {"hipblaslt": {"fp16": {"head": [90, 80, 70]}}}
    machine.scenario["speed"] = 21


def test_two_mi100_that_hang_without_iommu_pt(machine):
    mi100s(machine)
    machine.file("boot/config-6.8.0-90-generic", "CONFIG_PCI_P2PDMA=y\n# CONFIG_HSA_AMD_P2P is not")
    machine.file("proc/sys/kernel/numa_balancing", "1\n")
    machine.scenario["gemm"]["subnormals"] = False
    machine.scenario["faults"]["0-1"] = "hang"
    lines, code, _ = machine.check(pair=1)
    assert code == 1
    found = {}
    for _, name, text, fix in bad(lines):
        found.setdefault(name, []).append((text, fix))
    assert set(found) == {"products", "pairs", "iommu", "together", "kernel", "large BAR"}
    ((text, fix),) = found["pairs"]
    assert text.startswith("GPUs 0-1: hang (no answer within 1 s); correct with NCCL_P2P")
    assert "iommu=pt (AMD: or amd_iommu=off)" in fix
    ((text, fix),) = found["iommu"]
    assert "RCCL warns" in text and "iommu=pt" in fix
    assert "0.2 of 32 GB on the bus" in found["large BAR"][0][0]
    assert found["kernel"][0][0] == "CONFIG_HSA_AMD_P2P is off: no peer-to-peer over PCIe"
    assert "kernel.numa_balancing=0" in found["kernel"][1][1]
    assert "below 6e-5 for zero" in found["products"][0][0] and "bf16" in found["products"][0][1]


def test_two_mi100_that_are_well_answer_the_open_questions(machine, monkeypatch):
    monkeypatch.delenv("HSA_FORCE_FINE_GRAIN_PCIE", raising=False)  # not needed since ROCm 5.7
    mi100s(machine, "quiet iommu=pt", mem_info_vis_vram_total=32 << 30)
    options = b"CONFIG_HSA_AMD_P2P=y\nCONFIG_PCI_P2PDMA=y\n"
    machine.file("proc/config.gz", "")
    (machine.root / "proc/config.gz").write_bytes(gzip.compress(options))
    lines, code, _ = machine.check()
    assert code == 0 and [line[1] for line in bad(lines)] == ["large BAR"]
    text = "\n".join(": ".join(line[1:3]) for line in lines)
    for words in (
        "bf16 70 (76%), fp16 120 (65%), fp32 35 (76%) TFLOP/s", "1200 of 1502 MHz, 80 °C, 221 W",
        "PCIe 16.0 GT/s x16", "iommu: passthrough", "21 GB/s (67% of PCIe 16.0 GT/s x16)",
        "default (Cublas); bf16 1,024 x head 50/40/30", "PREFER_HIPBLASLT=1; fp16 1,024 x head 90/",
        "rocm: ROCm 7.14.0, RCCL 2.22.3, links: PCIe",
        "Linux 6.8.0-90-generic, amdgpu of the kernel, numa_balancing unknown, CONFIG_HSA_AMD_P2P "
        "and CONFIG_PCI_P2PDMA on",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize("sensors, words", [
    ({"hwmon/hwmon3/temp2_input": 99000}, "junction at its limit of 100 °C"),
    ({"hwmon/hwmon3/power1_average": 289000000}, None),  # normal while the rate is
])  # fmt: skip
def test_an_mi100_that_throttles_is_seen(sensors, words, machine):
    mi100s(machine, **sensors)
    lines, _, _ = machine.check()
    assert named(lines, "gpu 0")[0] == "ok"
    level, _, text, fix = named(lines, "gpu 1")
    assert (level == "warning") == bool(words) and (words or "") in text
    assert "cooling" in fix or not words


def test_an_integrated_gpu_beside_cards_is_left_out(machine, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ})
    mi100s(machine)
    shown = ["CUDA_VISIBLE_DEVICES", "0,1"]
    facts = {"left_out": "not used: AMD Radeon Graphics (gfx1036); 0,1", "only": shown}
    machine.scenario["answers"]["torch"] |= facts
    lines, _, _ = machine.check()
    assert "(gfx1036); 0,1" in named(lines, "gpus")[2]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"  # so the processes started later see two


def test_xgmi_is_not_judged_as_pcie(machine):
    mi100s(machine, "quiet iommu=pt")
    machine.scenario["answers"]["torch"]["links"] = [[bus(0), bus(1), "XGMI"]]
    lines, _, _ = machine.check()
    assert "21 GB/s of the 46 of XGMI" in named(lines, "pairs")[2]


@pytest.mark.parametrize("speed, level", [
    ({"python_s": 0.12, "launch_us": 4.5}, "ok"),
    ({"python_s": 0.27, "launch_us": 4.5}, "warning"),
    ({"python_s": 0.12, "launch_us": 7.5}, "warning"),
    ({"problem": "no answer within 90 s"}, "warning"),
])  # fmt: skip
def test_a_host_that_small_models_wait_for(speed, level):
    (line,) = check_machine.host_line(speed, 2)
    assert line[0] == level
    assert ("--micro_batch_size" in line[3]) == (level == "warning" and "problem" not in speed)
    if "launch_us" in speed:
        assert check_machine.host_line(speed, 0)[0][0] == "ok"  # no GPU waits


def test_kernels_that_differ_or_fail_are_warnings(machine):
    machine.torch([H200])
    machine.smi(1)
    machine.scenario["answers"]["kernels"] |= {"block": "RuntimeError: x", "loss": [1, 2, 0.5]}
    lines, _, _ = machine.check()
    block, loss = bad(lines)
    assert "a compiled block fails: RuntimeError: x" in block[2]
    assert "differ by 5.0e-01" in loss[2] and loss[3] == "--no_compile"


def test_settings_of_the_host(machine, monkeypatch):
    machine.file("sys/fs/cgroup/cpu.max", "400000 100000\n")
    (line,) = check_machine.cores(8)
    assert line[0] == "warning" and "may use 4.0: 0.5 for each of 8" in line[2]
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert "unset OMP_NUM_THREADS" in check_machine.cores(2)[0][3]


def test_disk(tmp_path):
    place = tmp_path / "not yet/there"
    answer = check_files.disk(str(place))
    assert answer["place"] == str(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    check_files.disk(str(place))
    assert sorted(tmp_path.rglob("*")) == before
    roomy = {"place": "/nfs", "free_gb": 900}
    for changes, level in (
        ({}, "ok"), ({"free_gb": 0.5}, "error"),
        ({"free_gb": 15}, "warning"), ({"problem": "OSError: Input/output error"}, "error"),
    ):  # fmt: skip
        assert check_files.disk_line(roomy | changes, "/nfs")[0][0] == level


def test_a_tool_that_hangs_is_called_once(monkeypatch):
    monkeypatch.setattr(check_process, "TOOL_LIMIT", 0.2)
    monkeypatch.setattr(check_process, "hung_tools", set())
    begun = time.monotonic()
    assert check_process.tool("sleep", "60") == "" == check_process.tool("sleep", "60")
    assert time.monotonic() - begun < 5
    assert check_machine.tools()[0][0] == "error" and "sleep" in check_machine.tools()[0][2]
    assert check_process.tool("no-such-tool") == "" == check_process.tool("false")


def test_what_a_worker_started_is_killed_with_it(tmp_path, monkeypatch):
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))\n"
        "time.sleep(600)"
    )
    monkeypatch.setattr(check_process, "COMMAND", [sys.executable, "-I", "-S", "-c", code])
    worker = check_process.Worker()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    answer = check_process.ask(worker, 0.2, do="anything")
    assert answer == {"problem": "no answer within 0 s", "hung": True}
    child = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.exists() or child.read_text().split()[2] == "Z"
    check_process.end_all()


def test_every_value_received_is_compared(tmp_path, monkeypatch):
    """By the real functions, over gloo and with operations that are wrong in one place."""
    import torch.distributed as dist

    monkeypatch.setattr(check_worker, "_device", torch.device("cpu"))
    place = {"rank": 0, "size": 1, "backend": "gloo", "limit": 20}
    answer = check_worker.group(file=str(tmp_path / "a"), **place)
    assert answer["wrong"] == {"send": 0, "all_reduce": 0}
    assert answer["elements"] == 2 * ((1 << 8) + (1 << 18)) and "all_reduce" in answer

    calls = []

    def all_reduce(tensor):  # with a peer whose last value is off by one, in the last call
        calls.append(len(tensor))
        tensor.add_(check_worker._numbers(len(tensor), 0, len(calls)))
        tensor[-1] += len(calls) == 4

    def recv(tensor, src):  # leaves what was there before, in the first call
        if calls:
            tensor.copy_(check_worker._numbers(len(tensor), src, len(calls) + 1))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "recv", recv)
    monkeypatch.setattr(dist, "send", lambda tensor, dst: None)
    wrong, elements = check_worker._verify(1, 2)
    assert wrong == {"send": 1 << 8, "all_reduce": 1}
    assert elements == 4 * ((1 << 8) + (1 << 18))


def test_what_is_measured_on_one_gpu(monkeypatch):
    """By the real functions, on a CPU and with small shapes; nothing is compiled."""
    monkeypatch.setattr(check_worker, "_device", torch.device("cpu"))
    monkeypatch.setattr(check_worker, "SQUARE", 32)
    monkeypatch.setattr(check_worker, "ROWS", 8)
    monkeypatch.setattr(check_worker, "WEIGHTS", {"small": (16, 24)})
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    answer = check_worker.gemm(0.01, False)
    assert answer["rates"].keys() == {"fp32", "bf16", "fp16"} and answer["subnormals"]
    assert [len(weights["small"]) for weights in answer["products"].values()] == [3, 3]
    assert all(min(weights["small"]) > 0 for weights in answer["products"].values())
    assert check_worker.compile_block("bf16") == {}
    answer = check_worker.kernels("bf16")
    assert answer["block"][2] == answer["loss"][2] == 0 and answer["python_s"] > 0
    monkeypatch.setattr(check_worker, "_block", None)
    assert "TypeError" in check_worker.kernels("bf16")["block"]

    def flush(a, b):
        return torch.mm(torch.where(b.abs() < 2**-14, 0, b), a)

    monkeypatch.setattr(torch.Tensor, "__matmul__", flush)
    assert not check_worker._keeps_subnormals()


@pytest.mark.skipif(torch.cuda.is_available(), reason="they fail for want of a GPU")
def test_probes_report_what_failed():
    assert check_worker.run_module("llm_demo.job.compiling", []) == {"problem": "no GPU"}
    assert set(check_worker.host_speed()) == {"python_s"}


def test_what_torch_sees_on_a_faked_mi100(monkeypatch):
    props = SimpleNamespace(
        name="AMD Instinct MI100", gcnArchName="gfx908:sramecc+:xnack-", total_memory=32 << 30,
        uuid="x", pci_domain_id=0, pci_bus_id=0x43, pci_device_id=0, multi_processor_count=120,
        is_integrated=0,
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    for name, value in {
        "is_available": True, "device_count": 2, "get_device_properties": props,
        "get_arch_list": ["gfx908"], "can_device_access_peer": False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    facts = check_worker.torch_facts()
    assert "refused" not in facts
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a"])
    assert "rocm6.4 and rocm7.0" in check_worker.torch_facts()["refused"]
    assert facts["peers"] == [[True, False], [False, True]]
    device = facts["devices"][1]
    assert (device["vendor"], device["arch"], device["bus"]) == ("amd", "gfx908", "0000:43:00.0")
    assert device["peak"] == {"fp32": 46.1, "bf16": 92.3, "fp16": 184.6}
    choices = check_worker.choices()
    assert choices["probes"] == ["sdpa", "bucketed"] and choices["dtype"] == "bf16"
    assert "no kernel for gfx908" in choices["against"]["varlen"]
    chosen = check_worker.choose([16, 8, 128], {"bucketed": "differs from math"}, None)
    assert chosen["packed"]["impl"] == "bucketed_math" and not chosen["packed"]["compile"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the numbers of lines are a CPU's")
def test_this_machine(tmp_path):
    command = [sys.executable, "-m", "llm_demo.check", "--json", "--output_dir", tmp_path / "runs"]
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    lines = {line["name"]: line for line in report["lines"]}
    assert not [line for line in report["lines"] if line["level"] == "error"]
    assert "all 2,099,200 values correct" in lines["pair"]["text"]
    assert lines["torch"]["text"].startswith(torch.__version__)
    assert lines["attention"]["text"].startswith("bucketed;")
    assert lines["deepspeed"]["level"] == "ok" and "off by default" in lines["compile"]["text"]
    assert report["facts"]["pairs"][0]["result"]["wrong"] == {"send": 0, "all_reduce": 0}
    assert report["seconds"] < 60 and not any(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_these_gpus(tmp_path):
    command = [sys.executable, "-m", "llm_demo.check", "--json", "--output_dir", tmp_path / "runs"]
    done = run(command)
    report = json.loads(done.stdout)
    seen = {line["name"]: line for line in report["lines"] if line["level"] != "error"}
    expected = {"torch", "dtype", "attention", "compile"}
    expected |= {f"gpu {i}" for i in range(torch.cuda.device_count())}
    expected |= {"pairs", "together"} if torch.cuda.device_count() > 1 else set()
    assert expected <= set(seen), done.stdout + done.stderr
    for pair in report["facts"].get("pairs", ()):
        assert set(pair["result"]["wrong"].values()) == {0}, pair


def test_a_bug_in_the_check_is_a_line(machine, monkeypatch, capsys):
    def broken():
        raise KeyError("x")

    monkeypatch.setattr(check_gpus, "nvidia", broken)
    monkeypatch.setattr(sys, "argv", ["check"])
    monkeypatch.setenv("SCENARIO", json.dumps(machine.scenario))
    assert check.main() == 0
    assert "a bug of its own: KeyError: 'x'" in capsys.readouterr().out


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
    done = run(["bash", repo / "setup.sh", "--check"], cwd=tmp_path, SETUP_DRY_RUN="1")
    assert done.stderr == f"+ {python} -m llm_demo.check\n" and done.returncode == 0
    done = run(["bash", repo / "setup.sh", "--check", "--json"], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "ran -m llm_demo.check --json\n"
    assert run(["bash", repo / "setup.sh"]).stdout.endswith("is ready\n")


def test_the_page_explains_every_line():
    page = (ROOT / "docs/check.md").read_text()
    sources = "".join(p.read_text() for p in (ROOT / "llm_demo/check").glob("*.py"))
    names = set(re.findall(r'(?:OK|WARNING|ERROR|level), "([^"{]+)"', sources))
    assert len(names) > 20
    assert {name for name in names if f"`{name}`" not in page} == set()
