"""What the lines say of the host, of each GPU and of groups of them.

A line is (level, name, text, fix); the fix is "" if there is nothing to do."""

import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llm_demo.check.processes import P2P_OFF, failure, probe_root

OK, WARNING, ERROR = "ok", "warning", "error"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
REBUILD = "leave any environment that has this torch, rm -r .venv, bash setup.sh"
REINSTALL = "bash setup.sh, and use its .venv/bin/python"
NO_ACCESS = (
    "look at dmesg for driver errors; AMD: sudo usermod -aG render,video $USER, log in again"
)
CAUSES = {  # words of CUDA's errors: fix
    "too old": f"update the NVIDIA driver; or, for a build that fits: {REBUILD}",
    "not yet initialized": "start the NVSwitch service: sudo systemctl start nvidia-fabricmanager",
}
# Two hosts that took 7 to 8 µs needed 92 to 153 ms for a step of 0.6B at micro-batch 8, instead of
# the 80 ms that the GPU needs.
LAUNCH_US = 7.0

FIX_P2P = f"boot with iommu=pt, switch ACS off in the BIOS; until then, export {P2P_OFF}=1"
FIX_BOTH = "look at dmesg, /dev/shm (docker: --ipc=host), /etc/hosts and, with --json, NCCL's log"


def packages() -> tuple:
    """Versions of Python and of what training imports, apart from torch."""
    text = f"Python {sys.version.split()[0]}"
    try:
        for package in ("transformers", "datasets", "accelerate", "numpy", "deepspeed"):
            text += f", {package} {version(package)}"
    except PackageNotFoundError as e:  # FSDP works without DeepSpeed
        return WARNING, "packages", f"{text}; {e.name} is not installed", REINSTALL
    return OK, "packages", text, ""


def torch_build(facts: dict, smi: str) -> tuple:
    """PyTorch, its build, and whether that fits the GPUs and the driver.

    facts: see experiments.torch_facts. smi: nvidia-smi's "driver, name" of each GPU."""
    if "torch" not in facts:
        return ERROR, "torch", f"import torch failed: {facts['problem']}", REINSTALL
    build = "CPU"
    if facts["cuda"]:
        build = f"CUDA {facts['cuda']}"
    elif facts["hip"]:
        build = f"ROCm {facts['hip']}"
    text = f"{facts['torch']}, {build} build"
    if smi:
        text += f"; driver {smi.split(',')[0]}"
    if facts["devices"]:
        text += f"; NCCL or RCCL {facts.get('nccl', 'is missing')}"
        if facts["refused"]:
            return ERROR, "torch", f"{text}; training ends at once: {facts['refused']}", ""
        return OK, "torch", text, ""
    amd = (probe_root() / "dev/kfd").exists()
    if not smi and not amd:
        text += "; no GPU was found, so training runs on the CPU"
        if build == "CPU":
            return OK, "torch", text, ""
        return WARNING, "torch", text, "is its driver there, or --gpus all?"
    text += f" sees no GPU, but {'nvidia-smi' if smi else '/dev/kfd'} does: {facts['why']}"
    hiding = [f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ]
    if hiding:
        return WARNING, "torch", text, f"unset {', '.join(hiding)}"
    fix = f"another build, if setup.sh knows one: {REBUILD}"
    if facts["cuda"] if smi else facts["hip"]:
        fixes = [fix for words, fix in CAUSES.items() if words in facts["why"]]
        fix = fixes[0] if fixes else NO_ACCESS
    # many processors have an AMD GPU that no build supports
    return ERROR if smi else WARNING, "torch", text, fix


def disk(folder: str) -> tuple:
    """Whether `folder` or its nearest existing parent can be written, and its free space."""
    place, fix = Path(folder).absolute(), "free space there or choose another --output_dir"
    while not os.path.isdir(place):
        place = place.parent
    free = shutil.disk_usage(place).free / 1e9
    text = f"{place}: {free:.0f} GB free"
    if not os.access(place, os.W_OK) or free < 1:
        return ERROR, "disk", f"{text}, or it can't be written", fix
    if free < 20:
        text += "; a checkpoint of a 0.6B model takes 7.2 GB"
        return WARNING, "disk", text, f"{fix}, or save less: --keep_last 1"
    return OK, "disk", text, ""


def host_line(launch_us: float) -> tuple:
    """Whether this host can keep GPUs busy with small models: it starts every kernel."""
    text = f"a kernel launch takes {launch_us:.1f} µs"
    if launch_us < LAUNCH_US:
        return OK, "host", text, ""
    text += ": GPUs will wait for this host in small models, such as 0.6B at micro-batch 8"
    fix = "end other programs, set the CPU governor 'performance', raise --micro_batch_size"
    return WARNING, "host", text, fix


def gpu_line(i: int, devices: list[dict]) -> tuple:
    """The line of GPU i. devices: facts of each GPU with its answer to `rates`."""
    gpu, name, text = devices[i], f"gpu {i}", devices[i]["name"]
    if "problem" in gpu:
        fix = "look for GPU errors: sudo dmesg | grep -iE 'xid|amdgpu'; is its memory full?"
        return ERROR, name, f"{text}: matrix product failed: {gpu['problem']}", fix
    slowest_share = 1.0
    for dtype, rate in gpu["rates"].items():
        text += f", {dtype} {rate:.0f} TFLOP/s"
        peak = gpu["peak"].get(dtype)
        if peak:
            text += f" ({rate / peak:.0%} of peak)"
            slowest_share = min(slowest_share, rate / peak)
    ask = {"nvidia": "nvidia-smi -q -d PERFORMANCE", "amd": "amd-smi metric"}[gpu["vendor"]]
    fix = f"end other programs on it; is it cooled well, or throttled ({ask})?"
    of_fastest = gpu["rates"]["bf16"] / max(g["rates"]["bf16"] for g in devices if "rates" in g)
    if of_fastest < 0.9:
        return WARNING, name, f"{text}: {of_fastest:.0%} of the fastest GPU", fix
    if slowest_share < 0.5:
        return WARNING, name, f"{text}: less than half of its peak", fix
    return OK, name, text, ""


def kernel_line(fault: str | None) -> tuple:
    """Whether torch.compile and our loss kernel work. fault: what is wrong with them."""
    if fault is None:
        return OK, "kernels", "a compiled block and the loss kernel are as good as plain ones", ""
    fix = "--no_compile; torch.compile needs a C compiler: apt install gcc python3-dev"
    return WARNING, "kernels", f"a compiled block or the loss kernel fails: {fault}", fix


def group_line(name: str, result: dict | None, other: dict | None = None, best=0.0) -> tuple:
    """The line of a group. result: None if it was not tried; other: its result with
    NCCL_P2P_DISABLE=1, if tried; best: GB/s of the fastest group of the same kind."""
    if result is None:
        return WARNING, name, "not tried, because others failed", "mend them, then check again"
    trouble, without = failure(result), failure(other)
    if trouble and other and not without:
        text = f"{trouble}; correct with {P2P_OFF}=1, so peer-to-peer is broken"
        return ERROR, name, text, FIX_P2P
    if trouble:
        if without:
            trouble += f"; with {P2P_OFF}=1: {without}"
        return ERROR, name, trouble, FIX_BOTH
    rate = result["all_reduce"]
    text = f"all {result['elements']:,} values correct, {rate:.1f} GB/s"
    if "latency_us" in result:
        text += f", {result['latency_us']:.0f} µs"
    if without:
        return WARNING, name, f"{text}; with {P2P_OFF}=1: {without}", f"leave {P2P_OFF} unset"
    if other:
        text += f"; {other['all_reduce']:.1f} GB/s with {P2P_OFF}=1"
        if other["all_reduce"] > 1.3 * rate:
            return WARNING, name, f"{text}: peer-to-peer is slower than host memory", FIX_P2P
    if rate < 0.6 * best:
        fix = "NVLink: nvidia-smi nvlink -s; PCIe: full-width slots, iommu=pt, ACS off"
        return WARNING, name, f"{text}; others with such a link have up to {best:.0f}", fix
    return OK, name, text, ""
