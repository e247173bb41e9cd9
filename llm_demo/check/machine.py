"""The host: Python, PyTorch's build, memory, cores, speed; the kernel's settings for AMD GPUs.

Each check returns lines (level, name, text, fix); the fix is "" if there is nothing to do.
PROBE_ROOT replaces /, so that tests can fake the files of other machines."""

import contextlib
import gzip
import os
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llm_demo.check import processes
from llm_demo.check.processes import ROOT
from llm_demo.job.process import usable_cores

OK, WARNING, ERROR = "ok", "warning", "error"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
REBUILD = "leave any environment that has this torch, rm -r .venv, bash setup.sh"
REINSTALL = "bash setup.sh, and use its .venv/bin/python"
P2P_OPTIONS = ("CONFIG_HSA_AMD_P2P", "CONFIG_PCI_P2PDMA")

# Two hosts with 7 to 8 µs and 0.24 to 0.30 s took 92 to 153 ms for a step of 0.6B at micro-batch 8,
# instead of the 80 ms that the GPU needs.
LAUNCH_US, PYTHON_S = 7.0, 0.2


def root() -> Path:
    return Path(os.environ.get("PROBE_ROOT") or "/")


def read(path: Path | str) -> str:
    """The text of a file below PROBE_ROOT; "" if it can't be read."""
    try:
        return (root() / path).read_text(errors="replace").strip()
    except OSError:
        return ""


def number(text: str) -> float | None:
    """The number at the start of a text; None for "[N/A]" and similar."""
    match = re.match(r"\s*-?\d+(\.\d+)?", text)
    return float(match[0]) if match else None


def python() -> list:
    mine = sys.version.split()[0]
    if sys.version_info >= (3, 14):
        return [(WARNING, "python", f"{mine} is newer than the versions tested, 3.10 to 3.13", "")]
    return [(OK, "python", mine, "")]


def packages() -> list:
    """Versions of what training imports, apart from torch and DeepSpeed."""
    versions = []
    for package in ("transformers", "datasets", "accelerate", "numpy"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            return [(ERROR, "packages", f"{package} is not installed", REINSTALL)]
    return [(OK, "packages", ", ".join(versions), "")]


def pinned(package: str) -> str:
    """The tested version of a package."""
    match = re.search(rf"^{package}==([\w.]+)", read(ROOT / "constraints.txt"), re.M)
    return match[1] if match else ""


# ---------------------------------------------------------------- PyTorch's build


def hidden_gpu() -> tuple[str, str] | None:
    """(vendor, evidence) of a GPU that PyTorch could use with the right build and driver.

    The vendor is "nvidia?" if there is an NVIDIA card but no NVIDIA driver. None without a GPU."""
    if "GPU 0" in processes.tool("nvidia-smi", "-L"):
        return "nvidia", "nvidia-smi lists one"
    supported = re.findall(r"gfx\w+", read(ROOT / "llm_demo/job/rocm_builds.txt"))
    for node in (root() / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        match = re.search(r"gfx_target_version (\d+)", read(node))
        code = int(match[1]) if match else 0
        arch = f"gfx{code // 10000}{code // 100 % 100:x}{code % 100:x}"
        if arch in supported:
            return "amd", f"the kernel driver lists an AMD {arch}"
    for device in (root() / "sys/bus/pci/devices").glob("*"):
        if read(device / "vendor") == "0x10de" and read(device / "class").startswith("0x03"):
            return "nvidia?", f"there is an NVIDIA device at {device.name}"
    return None


def torch_build(facts: dict, smi: dict) -> list:
    """PyTorch, its build, and whether that fits the GPUs and the driver."""
    if "torch" not in facts:
        return [(ERROR, "torch", f"import torch failed: {facts['problem']}", REINSTALL)]
    cuda, hip, driver = facts["cuda"], facts["hip"], smi["cuda"]
    text = f"{facts['torch']}, {f'CUDA {cuda}' if cuda else f'ROCm {hip}' if hip else 'CPU'} build"
    old = cuda and driver and driver < tuple(map(int, cuda.split(".")))
    supports = "{}.{}".format(*driver) if driver else ""
    if facts["devices"]:
        if cuda and driver:
            text += f"; driver {smi['driver']}, CUDA {supports}"
        if old:
            fix = f"if kernels fail to load, update the driver to one for CUDA {cuda}"
            return [(WARNING, "torch", f"{text}: the driver is older than this build", fix)]
        if refused := facts.get("refused"):
            return [(ERROR, "torch", f"{text}, and training ends at once: {refused}", "")]
        return [(OK, "torch", text, "")]
    gpu = hidden_gpu()
    if not cuda and not hip:
        if gpu is None:
            return [(OK, "torch", f"{text}; no GPU was found: training runs on the CPU", "")]
        text += f", so training would run on the CPU, but {gpu[1]}"
        if gpu[0] == "nvidia?":
            return [(WARNING, "torch", text, f"install NVIDIA's driver; {REBUILD}")]
        return [(ERROR, "torch", text, REBUILD)]
    why = facts["unavailable"] or "torch.cuda.is_available() is False"
    if old:
        text += f" sees no GPU: the driver supports CUDA {supports}, this build needs {cuda}"
        fix = f"update the NVIDIA driver to one for CUDA {cuda}; or, for a build that fits: "
        return [(ERROR, "torch", text, fix + REBUILD)]
    hiding = [f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ]
    if hiding:
        text += f" sees no GPU with {', '.join(hiding)}: {why}"
        return [(WARNING, "torch", text, "unset these variables")]
    if gpu is None:
        fix = "if there is a GPU, install its driver; containers need --gpus all or /dev/kfd"
        return [(WARNING, "torch", f"{text}, but no GPU was found: training runs on the CPU", fix)]
    if hip and not os.access(root() / "dev/kfd", os.R_OK | os.W_OK):
        fix = "sudo usermod -aG render,video $USER, then log in again"
        return [(ERROR, "torch", f"{text} can't open /dev/kfd", fix)]
    if (gpu[0] == "amd") != bool(hip):
        return [(ERROR, "torch", f"{text} is for another vendor's GPU: {gpu[1]}", REBUILD)]
    fix = "look for driver errors in dmesg; update the driver or reboot"
    if "not yet initialized" in why:
        fix = "start the NVSwitch service: sudo systemctl start nvidia-fabricmanager"
    return [(ERROR, "torch", f"{text} sees no GPU, but {gpu[1]}: {why}", fix)]


# ---------------------------------------------------------------- memory, cores


def tools() -> list:
    """Errors for vendors' tools that hung."""
    fix = "look for driver errors: sudo dmesg | grep -iE 'xid|nvrm|amdgpu'; reboot"
    text = f"did not answer within {processes.TOOL_LIMIT} s, so the driver hangs"
    return [(ERROR, "driver", f"{name} {text}", fix) for name in sorted(processes.hung_tools)]


def shared_memory(gpus: int) -> list:
    shm = root() / "dev/shm"
    free = shutil.disk_usage(shm).free if shm.is_dir() else 0
    text = f"{free / 1e9:.2f} GB free"
    if gpus > 1 and free < 0.95e9:
        fix = "docker run --shm-size=1g or --ipc=host; or delete files from it"
        return [(WARNING, "/dev/shm", f"{text}: NCCL may die with a bus error", fix)]
    return [(OK, "/dev/shm", text, "")]


def cores(gpus: int) -> list:
    """Cores per training process, within the container's quota."""
    have, processes = float(len(usable_cores())), gpus or 2
    text = f"{have:.0f}"
    quota, _, period = read("sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and int(quota) / int(period) < have:
        have = int(quota) / int(period)
        text += f", of which this container may use {have:.1f}"
    each = have / processes
    text += f": {each:.1f} for each of {processes} processes"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > max(1, each):
        text += f", but OMP_NUM_THREADS={threads} makes them compete for cores"
        return [(WARNING, "cores", text, "unset OMP_NUM_THREADS: the launchers choose it")]
    if each < (2 if gpus else 0.99):
        fix = "give the machine or container more cores, or start fewer processes"
        return [(WARNING, "cores", f"{text}: the CPU will slow training down", fix)]
    return [(OK, "cores", text, "")]


def host_line(speed: dict, gpus: int) -> list:
    """Whether this host can keep GPUs busy with small models: it starts every kernel."""
    if problem := speed.get("problem"):
        return [(WARNING, "host", f"its speed could not be measured: {problem}", "")]
    text = f"3 million additions in Python take {speed['python_s']:.2f} s"
    if launch := speed.get("launch_us", 0):
        text += f", a kernel launch {launch:.1f} µs"
    if gpus and (launch > LAUNCH_US or speed["python_s"] > PYTHON_S):
        text += ": GPUs will wait for this host in small models, such as 0.6B at micro-batch 8"
        fix = "end other programs, set the CPU governor 'performance', raise --micro_batch_size"
        return [(WARNING, "host", text, fix)]
    return [(OK, "host", text, "")]


# ---------------------------------------------------------------- AMD


def rocm() -> str:
    """The version of the installed ROCm; from 7.14 on it is below core."""
    folder = root() / "opt/rocm"
    places = [folder, folder / "core", *sorted(folder.glob("core-*"))]
    found = filter(None, (read(place / ".info/version") for place in places))
    return next(found, "not in /opt/rocm")


def kernel_lines(places: list[str], all_xgmi: bool) -> list:
    """Versions, and the settings of the kernel that matter to AMD GPUs at these bus addresses."""
    release, config = read("proc/sys/kernel/osrelease"), ""
    with contextlib.suppress(OSError):
        config = gzip.decompress((root() / "proc/config.gz").read_bytes()).decode()
    config = config or read(f"boot/config-{release}")
    off = [name for name in P2P_OPTIONS if config and f"{name}=y" not in config]
    balancing = read("proc/sys/kernel/numa_balancing")
    text = f"Linux {release}, amdgpu {read('sys/module/amdgpu/version') or 'of the kernel'}, "
    text += f"numa_balancing {balancing or 'unknown'}, {' and '.join(P2P_OPTIONS)} "
    text += "partly off" if off else "on" if config else "unknown"
    lines = [(OK, "kernel", text, "")]
    if off and len(places) > 1 and not all_xgmi:
        text = f"{' and '.join(off)} is off: no peer-to-peer over PCIe"
        lines.append((WARNING, "kernel", text, "boot a kernel with it, or use amdgpu-dkms"))
    if balancing == "1":
        text = "numa_balancing moves memory that GPUs use, which slows them down"
        fix = "sudo sysctl kernel.numa_balancing=0"
        lines.append((WARNING, "kernel", text, fix))
    return lines
