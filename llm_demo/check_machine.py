"""What the host offers, for llm_demo.check: Python, PyTorch's build, memory, cores, disk.

Each check returns lines (level, name, text, fix). The level is ok, warning or error; the fix is ""
if there is nothing to do. PROBE_ROOT replaces / for /proc, /sys and /dev, so that tests can fake
other machines."""

from __future__ import annotations  # so that a Python that is too old gets as far as saying so

import contextlib
import os
import re
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llm_demo import check_process
from llm_demo.check_process import ROOT

OK, WARNING, ERROR = "ok", "warning", "error"

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
REBUILD = "leave any environment that has this torch, rm -r .venv, bash setup.sh"


def root() -> Path:
    return Path(os.environ.get("PROBE_ROOT") or "/")


def read(path: str) -> str:
    """The text of a file below PROBE_ROOT; "" if it can't be read."""
    try:
        return (root() / path.lstrip("/")).read_text(errors="replace").strip()
    except OSError:
        return ""


def number(text: str) -> float | None:
    """The number at the start of a text; None for "[N/A]" and the like."""
    found = re.match(r"\s*-?\d+(\.\d+)?", text or "")
    return float(found[0]) if found else None


def python() -> list:
    mine = sys.version_info[:3]
    here = ".".join(map(str, mine))
    if mine < (3, 10):
        fix = "PYTHON=/path/to/python3.12 bash setup.sh"
        return [(ERROR, "python", f"{here} is too old: 3.10 to 3.13 work", fix)]
    if mine >= (3, 14):
        return [(WARNING, "python", f"{here} is newer than the versions tested, 3.10 to 3.13", "")]
    return [(OK, "python", here, "")]


def hidden_gpus() -> tuple[str, str] | None:
    """(vendor, evidence) of a GPU that PyTorch could use with the right build and driver.

    The vendor is "nvidia?" if there is an NVIDIA card but no NVIDIA driver. None without a GPU."""
    if "GPU 0" in check_process.tool("nvidia-smi", "-L"):
        return "nvidia", "nvidia-smi lists one"
    if any((root() / "proc/driver/nvidia/gpus").glob("*")):
        return "nvidia", "/proc/driver/nvidia/gpus lists one"
    supported = re.search(r"ROCM_ARCHS='([^']*)'", _setup())
    for node in sorted((root() / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        found = re.search(r"gfx_target_version (\d+)", node.read_text())
        version = int(found[1]) if found else 0
        arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        if version and (not supported or arch in supported[1].split()):
            return "amd", f"the kernel driver lists an AMD {arch}"
    for device in sorted((root() / "sys/bus/pci/devices").glob("*")):
        with contextlib.suppress(OSError):
            kind = (device / "class").read_text().strip()
            if (device / "vendor").read_text().strip() == "0x10de" and kind[:4] == "0x03":
                return "nvidia?", f"there is an NVIDIA device at {device.name}"
    return None


def _setup() -> str:
    with contextlib.suppress(OSError):
        return (ROOT / "setup.sh").read_text()
    return ""


def pinned(package: str) -> str:
    """The tested version of a package."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{package}==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M)
        return found[1] if found else ""
    return ""


def torch_build(facts: dict, smi: dict) -> list:
    """PyTorch, its build, and whether that fits the GPUs and the driver."""
    if "torch" not in facts:
        fix = "bash setup.sh, and use its .venv/bin/python"
        return [(ERROR, "torch", f"import torch failed: {facts['problem']}", fix)]
    cuda, hip = facts["cuda"], facts["hip"]
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    text = f"{facts['torch']}, {build} build"
    driver = smi["cuda"]
    if driver is None and facts.get("driver_cuda"):
        driver = facts["driver_cuda"] // 1000, facts["driver_cuda"] % 1000 // 10
    hidden = None if facts["devices"] else hidden_gpus()
    if facts["devices"]:
        if cuda:
            text += f"; driver {smi['driver']}".rstrip()
            text += f", CUDA {_dotted(driver)}" if driver else ""
        if cuda and driver and driver < _version(cuda):
            fix = f"if kernels fail to load, update the driver to one for CUDA {cuda}"
            text += ": the driver is older than this build"
            return [(WARNING, "torch", text, fix)]
        return _kernels(facts, text)
    if not cuda and not hip:
        if hidden is None:
            return [(OK, "torch", f"{text}; no GPU was found: training runs on the CPU", "")]
        vendor, evidence = hidden
        level = WARNING if vendor == "nvidia?" else ERROR
        fix = "install NVIDIA's driver; " * (level == WARNING) + REBUILD
        return [(level, "torch", f"{text}, so training would run on the CPU, but {evidence}", fix)]
    why = facts["unavailable"] or "torch.cuda.is_available() is False"
    visible = {k: os.environ[k] for k in VISIBLE if os.environ.get(k) is not None}
    if cuda and driver and driver < _version(cuda):
        why = f"the driver supports CUDA {_dotted(driver)}, this build needs {cuda}"
        fix = f"update the NVIDIA driver to one for CUDA {cuda}; or, for a build that fits: "
        return [(ERROR, "torch", f"{text} sees no GPU: {why}", fix + REBUILD)]
    if visible:
        said = ", ".join(f"{k}={v}" for k, v in visible.items())
        fix = f"unset {' '.join(visible)}"
        return [(WARNING, "torch", f"{text} sees no GPU with {said}: {why}", fix)]
    if hidden is None:
        fix = "if there is a GPU, install its driver; containers need --gpus all or /dev/kfd"
        return [(WARNING, "torch", f"{text}, but no GPU was found: training runs on the CPU", fix)]
    kfd = root() / "dev/kfd"
    if hip and kfd.exists() and not os.access(kfd, os.R_OK | os.W_OK):
        fix = "sudo usermod -aG render,video $USER, then log in again"
        return [(ERROR, "torch", f"{text} may not open /dev/kfd", fix)]
    if (hidden[0] == "amd") != bool(hip):
        return [(ERROR, "torch", f"{text} is for another vendor's GPU: {hidden[1]}", REBUILD)]
    fix = "look for driver errors in dmesg; update the driver or reboot"
    if "802" in why or "not yet initialized" in why:
        fix = "start the NVSwitch service: sudo systemctl start nvidia-fabricmanager"
    return [(ERROR, "torch", f"{text} sees no GPU, but {hidden[1]}: {why}", fix)]


def packages() -> list:
    """Versions of what training imports besides torch and DeepSpeed."""
    found, missing = [], []
    for package in ("transformers", "datasets", "accelerate", "numpy"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        text = f"missing: {', '.join(missing)}; found: {', '.join(found) or 'none'}"
        return [(ERROR, "packages", text, "bash setup.sh, and use its .venv/bin/python")]
    return [(OK, "packages", ", ".join(found), "")]


def _kernels(facts, text):
    """Whether this build has kernels for the GPUs."""
    archs = facts.get("archs") or []
    for device in facts["devices"]:
        if device["vendor"] == "amd":
            fits = not archs or device["arch"] in {arch.split(":")[0] for arch in archs}
        else:
            mine = _capability(device["arch"])
            fits = not archs or any(
                _capability(a) <= mine and (a.startswith("compute") or _capability(a)[0] == mine[0])
                for a in archs
            )
        if not fits:
            fix = "install a build that has them: an older torch for an older GPU, or a newer one"
            what = f"{text} has no kernels for {device['name']} ({device['arch']})"
            return [(ERROR, "torch", f"{what}, only for {' '.join(archs)}", fix)]
    return [(OK, "torch", text, "")]


def _capability(arch: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", arch.split("_")[-1])
    return int(digits[:-1] or 0), int(digits[-1:] or 0)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def _dotted(version: tuple) -> str:
    return ".".join(map(str, version))


def tools() -> list:
    """Errors for vendors' tools that hung, which means that the driver does."""
    fix = "look for driver errors: sudo dmesg | grep -iE 'xid|nvrm|amdgpu'; reboot"
    return [
        (ERROR, "driver", f"{name} did not answer within {check_process.TOOL_LIMIT} s", fix)
        for name in check_process.hung_tools()
        if name != "lspci"
    ]


def space(path: Path) -> tuple[int, int]:
    """(size, free) of the file system at a path, in bytes."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def shared_memory(gpus: int) -> list:
    shm = root() / "dev/shm"
    if not shm.is_dir():
        level = WARNING if gpus > 1 else OK
        return [(level, "/dev/shm", "missing", "docker run --ipc=host" * (gpus > 1))]
    size, free = space(shm)
    text = f"{size / 1e9:.2f} GB, {free / 1e9:.2f} free"
    if gpus > 1 and free < 0.95e9:
        fix = "docker run --shm-size=1g or --ipc=host; or delete files from it"
        return [(WARNING, "/dev/shm", f"{text}: NCCL may die with a bus error", fix)]
    return [(OK, "/dev/shm", text, "")]


def locked_memory() -> list:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"
    cards = sorted(p.name for p in (root() / "sys/class/infiniband").glob("*"))
    if cards and soft != resource.RLIM_INFINITY:
        fix = "ulimit -l unlimited (docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
        what = f"{text}, too little for InfiniBand ({', '.join(cards)}): ibv_reg_mr fails"
        return [(WARNING, "locked memory", what, fix)]
    return [(OK, "locked memory", text, "")]


def usable_cores() -> list[int]:
    with contextlib.suppress(AttributeError):  # macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores(gpus: int) -> list:
    """Cores per training process, the container's quota included."""
    have, processes = float(len(usable_cores())), gpus or 2
    text = f"{have:.0f}"
    quota = read("sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal() and int(quota[0]) / int(quota[1]) < have:
        have = int(quota[0]) / int(quota[1])
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


def numa(places: list[str]) -> list:
    """Whether this process may use cores on the NUMA nodes of all GPUs."""
    nodes = sorted((root() / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return [(OK, "numa", "one node" if nodes else "no information", "")]
    of = [read(f"sys/bus/pci/devices/{place}/numa_node") if place else "" for place in places]
    names = [f"GPU {i} on node {n}" for i, n in enumerate(of) if n and n != "-1"]
    text = f"{len(nodes)} nodes: {', '.join(names) or 'those of the GPUs are unknown'}"
    mine = set(usable_cores())
    for node in sorted({n for n in of if n and n != "-1"}):
        if not mine & _cpus(read(f"sys/devices/system/node/node{node}/cpulist")):
            fix = f"allow cores of node {node}: numactl --cpunodebind=all; containers: cpuset"
            what = f"{text}; this process may use no core of node {node}, near those GPUs"
            return [(WARNING, "numa", what, fix)]
    return [(OK, "numa", text, "")]


def _cpus(text: str) -> set[int]:
    parts = (part.split("-") for part in text.split(",") if part)
    return {cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)}


def disk(answer: dict, folder: str) -> list:
    """Free space and speed below --output_dir, from the worker's answer."""
    gb = 7.2  # a checkpoint of Qwen3-0.6B: weights and both AdamW moments in fp32
    if answer.get("problem"):
        fix = "free space there or choose another --output_dir"
        return [(ERROR, "disk", f"writing below {folder} failed: {answer['problem']}", fix)]
    free, speed, sync = (answer[k] for k in ("free_gb", "mb_per_s", "fsync_ms"))
    text = f"{answer['place']}: {free:.0f} GB free, writes {speed:.0f} MB/s, fsync {sync:.1f} ms"
    if free < 1:
        return [(ERROR, "disk", text, "free space or choose another --output_dir")]
    if free < 3 * gb:
        fix = "free space, choose another --output_dir, or save less: --keep_last 1"
        return [(WARNING, "disk", f"{text}; a checkpoint of a 0.6B model takes {gb} GB", fix)]
    if speed < 100 or sync > 500:
        what = f"{text}: a checkpoint of a 0.6B model takes {gb * 1e3 / max(speed, 1):.0f} s"
        return [(WARNING, "disk", what, "choose a faster --output_dir, or save less often")]
    return [(OK, "disk", text, "")]


def stale_locks(answer: dict) -> list:
    if answer.get("problem"):
        return [(WARNING, "jit locks", f"could not look: {answer['problem']}", "")]
    paths = [path for path, _ in answer["stale"]]
    if not paths:
        return [(OK, "jit locks", "none left behind", "")]
    oldest = max(age for _, age in answer["stale"])
    text = f"{len(paths)} left by killed builds, up to {oldest:.0f} h old"
    fix = f"rm {' '.join(paths)}, unless another machine is building there"
    return [(WARNING, "jit locks", f"{text}: a process that needs one waits forever", fix)]
