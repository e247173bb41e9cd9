"""python -m llm_demo.check on faked machines, whose processes hang, die and return wrong numbers,
and on this one."""

import functools
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
from conftest import ROOT, python, run

from llm_demo.check import __main__ as check
from llm_demo.check import experiments, processes
from llm_demo.check import lines as lines_of

H200 = {"vendor": "nvidia", "name": "NVIDIA H200 (nvidia sm_90, 140 GiB)"}
H200 |= {"peak": {"fp32": 66.9, "bf16": 989.4, "fp16": 989.4}}
MI100 = {"vendor": "amd", "name": "AMD Instinct MI100 (amd gfx908, 32 GiB)"}
MI100 |= {"peak": {"fp32": 46.1, "bf16": 92.3, "fp16": 184.6}}


class Machine:
    """A machine made of files below a root, of tools, and of what the experiments answer."""

    def __init__(self, root, monkeypatch):
        self.root, self.bin, self.monkeypatch = root, root / "bin", monkeypatch
        self.bin.mkdir()
        self.scenario = {
            "faults": {}, "faults without p2p": {},
            "choices": {"lines": [("ok", "attention", "varlen", "")]},
            "kernels": {"launch_us": 4.0, "fault": None},
        }  # fmt: skip
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        reach = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        for name, value in {"PROBE_ROOT": root, "PATH": path, "PYTHONPATH": reach}.items():
            monkeypatch.setenv(name, str(value))
        for name in (*lines_of.VISIBLE, processes.P2P_OFF):
            monkeypatch.delenv(name, raising=False)

    def file(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(text if isinstance(text, bytes) else text.encode())

    def tool(self, name, script):
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def gpus(self, *devices, kind="NV18", **facts):
        n = len(devices)
        links = [[kind * (i != j) for i in range(n)] for j in range(n)]
        facts = {"torch": "2.13.0+cu130", "cuda": "13.0", "hip": None, "why": "", **facts}
        facts |= {"devices": [*devices], "links": links, "dtype": "bf16", "nccl": "2.29.7"}
        self.scenario["torch_facts"] = {"left_out": "", "refused": ""} | facts

    def check(self, limit=20):
        """(lines, facts) of the check on this machine."""
        self.monkeypatch.setenv("SCENARIO", json.dumps(self.scenario))
        lines = []
        tell = lambda *more: lines.extend(map(tuple, more))  # noqa: E731
        facts = check.check("/runs", tell, module="check_stand_in", limit=limit)
        json.dumps(facts)
        return lines, facts


@pytest.fixture
def faked(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def four(faked):
    faked.gpus(*[H200] * 4)
    faked.tool("nvidia-smi", "for i in 1 2 3 4; do echo 580.159.04, NVIDIA H200; done")
    return faked


def bad(lines):
    return [line for line in lines if line[0] != "ok"]


def named(lines, name):
    (line,) = (line for line in lines if line[1] == name)
    return line


def test_four_gpus_that_are_well(four):
    lines, facts = four.check()
    assert not bad(lines), bad(lines)
    assert len(facts["pairs"]) == 6
    assert named(lines, "pair 0-1 (NV18)")[2] == (
        "all 2,000 values correct, 390.0 GB/s, 9 µs; 20.0 GB/s with NCCL_P2P_DISABLE=1"
    )
    assert "all 4,000 values correct, 390.0 GB/s" in named(lines, "together")[2]
    assert "bf16 790 TFLOP/s (80% of peak), fp32 52 TFLOP/s (78%" in named(lines, "gpu 3")[2]
    assert "CUDA 13.0 build; driver 580.159.04; NCCL or RCCL 2.29.7" in named(lines, "torch")[2]
    order = [name for _, name, _, _ in lines if not name.startswith(("gpu", "pair"))]
    assert order == ["packages", "torch", "together", "attention", "kernels", "host", "disk"]
    assert "a kernel launch takes 4.0 µs" in named(lines, "host")[2]


def test_a_slow_gpu_and_a_slow_pair(four):
    four.scenario["faults"] |= {"rates cuda:3": 600, "(1, 3)": 190}
    gpu, pair = bad(four.check()[0])
    assert gpu[1] == "gpu 3" and gpu[2].endswith(": 76% of the fastest GPU")
    assert pair[1] == "pair 1-3 (NV18)" and "190.0 GB/s" in pair[2] and "nvlink" in pair[3]
    assert pair[2].endswith("others with such a link have up to 390")


def test_a_pair_that_hangs_costs_a_line_and_no_more(four):
    four.scenario["faults"]["(1, 2)"] = "hang"
    begun = time.monotonic()
    lines, facts = four.check(limit=1)
    assert time.monotonic() - begun < 30
    error, together = bad(lines)
    assert error[:2] == ("error", "pair 1-2 (NV18)") and together[:2] == ("warning", "together")
    assert error[2].startswith("hang (no answer within 1 s); correct with NCCL_P2P_DISABLE=1")
    for word in ("iommu=pt", "ACS", "export NCCL_P2P_DISABLE=1"):
        assert word in error[3]
    assert all(pair["result"]["elements"] for pair in facts["pairs"] if pair["pair"] != (1, 2))


def test_wrong_numbers_are_told_from_a_fault_of_both_ways(four):
    four.scenario["faults"] |= {"(0, 1)": "wrong", "(1, 2)": "wrong"}
    four.scenario["faults without p2p"] |= {"(1, 2)": "wrong", "(2, 3)": "wrong"}
    p2p, both, control, _ = bad(four.check()[0])
    assert p2p[:2] == ("error", "pair 0-1 (NV18)")
    assert p2p[2].startswith("return wrong values (120 in all_reduce, of 2,000 compared); correct")
    assert "correct with NCCL_P2P_DISABLE=1, so peer-to-peer is broken" in p2p[2]
    assert both[:2] == ("error", "pair 1-2 (NV18)") and "peer-to-peer is broken" not in both[2]
    assert "with NCCL_P2P_DISABLE=1: return wrong values" in both[2]
    assert control[:2] == ("warning", "pair 2-3 (NV18)") and "leave NCCL_P2P" in control[3]


def test_a_process_that_dies_or_raises_is_an_error_with_its_last_words(faked):
    faked.gpus(*[H200] * 3)
    faked.scenario["faults"] = {"rates cuda:0": "raise", "(1, 2)": "die", "choices": "die"}
    gpu, *untried, pair, together, attention = bad(faked.check()[0])
    assert gpu[:2] == ("error", "gpu 0") and "CUDA error: Xid 79" in gpu[2] and "dmesg" in gpu[3]
    assert [line[1][:8] for line in untried] == ["pair 0-1", "pair 0-2"]
    assert "fail (died of SIGSEGV: a library's last words)" in pair[2]
    assert together[2].startswith("not tried") and attention[:2] == ("error", "attention")


def test_peer_to_peer_that_is_off_already_or_slower_than_host_memory(faked, monkeypatch):
    faked.gpus(H200, H200, kind="PHB")
    faked.scenario["faults"]["(0, 1)"] = 10
    line = named(faked.check()[0], "pair 0-1 (PHB)")
    assert line[0] == "warning" and "slower than host memory" in line[2]
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    lines, facts = faked.check()
    assert not bad(lines) and facts["pairs"][0]["without_p2p"] is None


BUILDS = {
    # name: facts of torch, nvidia-smi, level, words of the text, words of the fix
    "driver too old": (
        {"why": "The NVIDIA driver on your system is too old (found version 12040)."},
        "550.54, NVIDIA H200\n", "error", "driver 550.54", "update the NVIDIA driver",
    ),
    "CPU build beside a GPU": (
        {"torch": "2.13.0+cpu", "cuda": None}, "580.1, NVIDIA H200\n",
        "error", "CPU build; driver 580.1 sees no GPU, but nvidia-smi does", "bash setup.sh",
    ),
    "CUDA build beside an MI100": ({}, "kfd", "warning", "but /dev/kfd does", "bash setup.sh"),
    "no access to an MI100": (
        {"hip": "6.4", "cuda": None}, "kfd", "warning", "but /dev/kfd does", "usermod -aG render",
    ),
    "hidden by a variable": (
        {"why": "No CUDA GPUs are available", "hide": "CUDA_VISIBLE_DEVICES"},
        "580.1, NVIDIA H200\n", "warning", "No CUDA GPUs", "unset CUDA_VISIBLE_DEVICES=",
    ),
    "no fabric manager": (
        {"why": "CUDA error: system not yet initialized (Error 802)"},
        "580.1, NVIDIA H200\n", "error", "not yet initialized", "nvidia-fabricmanager",
    ),
    "container without --gpus": ({}, "", "warning", "no GPU was found", "--gpus all"),
    "CPU": ({"cuda": None}, "", "ok", "training runs on the CPU", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILDS)
def test_the_build_of_torch_against_the_machine(faked, name):
    facts, smi, level, words, fix = BUILDS[name]
    if smi == "kfd":  # AMD's driver
        faked.file("dev/kfd", "")
        smi = ""
    if "hide" in facts:
        faked.monkeypatch.setenv(facts["hide"], "")
    faked.gpus(**facts)
    line = lines_of.torch_build(faked.scenario["torch_facts"], smi)
    assert line[0] == level and words in line[2] and fix in line[3], line


def test_gpus_that_training_refuses(faked):
    faked.gpus(MI100, cuda=None, hip="6.4", refused="torch has no code for gfx908")
    line = lines_of.torch_build(faked.scenario["torch_facts"], "")
    assert line[0] == "error" and "ends at once: torch has no code for gfx908" in line[2]


def test_a_torch_that_cant_be_imported_and_a_driver_that_hangs(faked, monkeypatch):
    faked.scenario["torch_facts"] = {"problem": "ModuleNotFoundError: No module named 'torch'"}
    monkeypatch.setattr(check, "tool", functools.partial(processes.tool, limit=0.2))
    faked.tool("nvidia-smi", "exec sleep 600")
    lines, _ = faked.check()
    driver, error = bad(lines)
    assert driver[1] == "driver" and "does not answer" in driver[2]
    assert "import torch failed: ModuleNotFoundError" in error[2] and "setup.sh" in error[3]
    assert named(lines, "disk")[0] == "ok"


def test_two_mi100_answer_the_open_questions(faked):
    left_out = "not used: AMD Radeon Graphics (gfx1036); CUDA_VISIBLE_DEVICES=0,1"
    shown = ["CUDA_VISIBLE_DEVICES", "0,1"]
    faked.gpus(MI100, MI100, kind="XGMI", cuda=None, hip="6.4", left_out=left_out, only=shown)
    faked.scenario["rates"] = {"rates": {"bf16": 70, "fp16": 120, "fp32": 35}}
    lines, facts = faked.check()
    assert named(lines, "gpus")[2] == left_out
    assert facts["choices"]["visible"] == "0,1"  # processes see the cards alone
    assert "bf16 70 TFLOP/s (76% of peak), fp16 120 TFLOP/s (65%" in named(lines, "gpu 1")[2]
    assert named(lines, "pair 0-1 (XGMI)")[0] == "ok"


def test_a_host_that_small_models_wait_for():
    assert lines_of.host_line(4.5)[0] == "ok"
    level, _, _, fix = lines_of.host_line(7.5)
    assert level == "warning" and "--micro_batch_size" in fix


def test_kernels_that_differ_or_fail_are_a_warning():
    level, _, text, fix = lines_of.kernel_line("RuntimeError: no C compiler")
    assert level == "warning" and "fails: RuntimeError: no C compiler" in text
    assert fix.startswith("--no_compile")


def test_disk(tmp_path, monkeypatch):
    place = tmp_path / "not yet/there"
    assert lines_of.disk(str(place))[2].startswith(f"{tmp_path}: ") and not any(tmp_path.iterdir())
    assert lines_of.disk("/proc/1")[0] == "error"  # nobody can write there
    for free, level in ((900, "ok"), (15, "warning"), (0.5, "error")):
        usage = SimpleNamespace(free=free * 1e9)
        monkeypatch.setattr(lines_of.shutil, "disk_usage", lambda path, usage=usage: usage)
        assert lines_of.disk(str(place))[0] == level


def test_tools_that_hang_fail_or_are_missing():
    begun = time.monotonic()
    assert processes.tool("sleep", "60", limit=0.2) is None and time.monotonic() - begun < 5
    assert processes.tool("no-such-tool") == "" == processes.tool("false")
    assert processes.tool("echo", "x") == "x\n"


def test_what_an_experiment_started_is_killed_with_it(tmp_path, monkeypatch):
    (tmp_path / "starts.py").write_text(
        "import pathlib, subprocess, sys, time\n"
        "process = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path(sys.argv[1]).with_name('pid').write_text(str(process.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = processes.Trial("a", {}, folder=tmp_path, module="starts")
    while not job.file.with_name("pid").exists():
        time.sleep(0.02)
    answers = processes.answers_of_all([job], 0.2)
    assert answers == [{"problem": "no answer within 0 s", "hung": True}]
    child = Path(f"/proc/{job.file.with_name('pid').read_text()}/stat")
    deadline = time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_every_value_received_is_compared(tmp_path, monkeypatch):
    """Real processes: wrong in one value of one call, or killed, and the others are well."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    faults = {"(0, 1)": "send", "(0, 2)": "die", "(0, 1, 2)": "all_reduce"}
    monkeypatch.setenv("FAULTS", json.dumps(faults))
    imported = python(TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    monkeypatch.setattr(sys, "executable", imported)

    start = functools.partial(processes.Trial, folder=tmp_path, module="check_faulty")
    groups = [(0, 1), (2, 3), (0, 2)]  # two rounds
    results = processes.try_groups(groups, "cpu", start, tmp_path)
    assert results[0, 1]["wrong"] == {"send": 1, "all_reduce": 0, "all_gather_object": 0}
    assert results[0, 1]["elements"] == 8 * ((1 << 8) + (1 << 18))
    assert "died of SIGSEGV" in processes.failure(results[0, 2]) and "log" in results[0, 2]
    assert processes.failure(results[2, 3]) is None and results[2, 3]["all_reduce"] > 0
    everyone = processes.try_groups([(0, 1, 2)], "cpu", start, tmp_path)[0, 1, 2]
    assert everyone["wrong"] == {"send": 0, "all_reduce": 1, "all_gather_object": 0}


def test_what_is_measured_on_one_gpu(faked):
    """On a CPU and with small shapes; nothing is compiled."""
    tasks = {
        "rates": {"device": "cpu", "seconds": 0.01, "size": 32},
        "kernels": {"device": "cpu", "dtype": "bf16"},
    }
    jobs = [processes.Trial(*task, faked.root, TORCH_COMPILE_DISABLE="1") for task in tasks.items()]
    rates, kernels = processes.answers_of_all(jobs)
    assert rates["rates"].keys() == {"fp32", "bf16", "fp16"} and min(rates["rates"].values()) > 0
    assert kernels["fault"] is None and kernels["launch_us"] > 0


def test_what_torch_sees_on_two_faked_mi100(faked, monkeypatch):
    """And a processor's GPU. The cards have an XGMI link; attention can't be tried here."""

    def props(i):
        arch, inside = ("gfx1036", 1) if i == 2 else ("gfx908:sramecc+:xnack-", 0)
        return SimpleNamespace(
            name="AMD Instinct MI100", gcnArchName=arch, total_memory=32 << 30,
            is_integrated=inside, pci_domain_id=0, pci_bus_id=0x43 + i, pci_device_id=0,
            multi_processor_count=120,
        )  # fmt: skip

    for i in range(2):
        node = f"sys/class/kfd/kfd/topology/nodes/{i + 1}"
        place = f"gfx_target_version 90008\nlocation_id {(0x43 + i) << 8}\ndomain 0\n"
        faked.file(f"{node}/properties", place)
        faked.file(f"{node}/io_links/0/properties", f"type 11\nnode_to {2 - i}\n")
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", props)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx908"])
    facts = experiments.torch_facts()
    assert "gfx1036" in facts["left_out"] and facts["only"][1] == "0,1" and not facts["refused"]
    assert facts["links"] == [["", "XGMI"], ["XGMI", ""]]
    device = facts["devices"][1]
    assert device["vendor"] == "amd" and "gfx908" in device["name"] and facts["dtype"] == "bf16"
    assert device["peak"] == {"fp32": 46.1, "bf16": 92.3, "fp16": 184.6}
    lines = experiments.choices()["lines"]
    assert lines[0][2].startswith("torch.bfloat16 by default")
    single, packed = (line[2] for line in lines if line[:2] == ("ok", "attention"))
    assert (
        "for one document per row" in single
        and packed.startswith("bucketed_math for packed rows")
        and "no kernel for gfx908" in packed
    )
    assert [line[:2] for line in bad(lines)] == [("warning", "attention")] * 2
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a"])
    assert "rocm6.4 and rocm7.0" in experiments.torch_facts()["refused"]


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
    assert lines["attention"]["text"].startswith("bucketed for packed rows;")
    assert "off by default" in lines["compile"]["text"]
    result = report["facts"]["pairs"][0]["result"]
    assert result["wrong"] == {"send": 0, "all_reduce": 0, "all_gather_object": 0}
    assert f"PyTorch version: {torch.__version__}" in report["facts"]["report"]
    assert report["seconds"] < 60 and not any(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_these_gpus(tmp_path):
    command = [sys.executable, "-m", "llm_demo.check", "--json", "--output_dir", tmp_path / "runs"]
    done = run(command)
    report = json.loads(done.stdout)
    seen = {
        line["name"].split(" (")[0]: line for line in report["lines"] if line["level"] != "error"
    }
    count = torch.cuda.device_count()
    expected = {"torch", "dtype", "attention", "compile", "kernels", "host"}
    expected |= {f"gpu {i}" for i in range(count)} | ({"together"} if count > 2 else set())
    expected |= {f"pair {i}-{j}" for j in range(count) for i in range(j)}
    assert expected <= set(seen), done.stdout + done.stderr
    for pair in report["facts"]["pairs"] if count > 1 else ():
        assert set(pair["result"]["wrong"].values()) == {0}, pair
    assert report["seconds"] < 120


def test_a_bug_in_the_check_is_a_line(monkeypatch, capsys):
    monkeypatch.setattr(lines_of, "packages", lambda: {}["x"])
    monkeypatch.setattr(sys, "argv", ["check"])
    assert check.main() == 0
    assert "a bug of its own: KeyError 'x'" in capsys.readouterr().out


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
    assert done.stderr.endswith(f"\n+ {python} -m llm_demo.check\n") and done.returncode == 0
    done = run(["bash", repo / "setup.sh", "--check", "--json"], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "ran -m llm_demo.check --json\n"
    assert run(["bash", repo / "setup.sh"]).stdout.endswith("is ready\n")


def test_the_page_explains_every_line():
    page = (ROOT / "docs/check.md").read_text()
    sources = "".join(p.read_text() for p in (ROOT / "llm_demo/check").glob("*.py"))
    names = set(
        re.findall(r'(?:OK|WARNING|ERROR|level)(?: if fix else OK)?, "(\w+)"(?!:)', sources)
    )
    names |= set(re.findall(r'group_line\("(\w+)"', sources))
    assert len(names) > 12
    assert {name for name in names if f"`{name}`" not in page} == set()
