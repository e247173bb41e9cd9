"""What the lines say of the host, of each GPU and of groups of them.

A line is (level, name, text, fix); the fix is "" if there is nothing to do."""

import contextlib
import gzip
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llm_demo.check.processes import P2P_OFF, failure, probe_root
from llm_demo.machine.files import ROOT

OK, WARNING, ERROR = "ok", "warning", "error"
AT_LIMIT = " (at its limit)"  # of a temperature
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
REBUILD = "leave any environment that has this torch, rm -r .venv, bash setup.sh"
REINSTALL = "bash setup.sh, and use its .venv/bin/python"
CAUSES = {  # words of CUDA's and HIP's errors: fix
    "too old": f"update the NVIDIA driver; or, for a build that fits: {REBUILD}",
    "not yet initialized": "start the NVSwitch service: sudo systemctl start nvidia-fabricmanager",
    "": "look for driver errors in dmesg; AMD: sudo usermod -aG render,video $USER, log in again",
}

# Two hosts with 7 to 8 µs and 0.24 to 0.30 s took 92 to 153 ms for a step of 0.6B at micro-batch 8,
# instead of the 80 ms that the GPU needs.
LAUNCH_US, PYTHON_S = 7.0, 0.2

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
    cuda, hip = facts["cuda"], facts["hip"]
    text = f"{facts['torch']}, {f'CUDA {cuda}' if cuda else f'ROCm {hip}' if hip else 'CPU'} build"
    text += f"; driver {smi.split(',')[0]}" * bool(smi)
    if facts["devices"]:
        text += f"; NCCL or RCCL {facts.get('nccl', 'is missing')}"
        if refused := facts["refused"]:
            return ERROR, "torch", f"{text}; training ends at once: {refused}", ""
        return OK, "torch", text, ""
    if not smi and not (probe_root() / "dev/kfd").exists():
        text += "; no GPU was found, so training runs on the CPU"
        level, fix = (WARNING, "is its driver there, or --gpus all?") if cuda or hip else (OK, "")
        return level, "torch", text, fix
    text += f" sees no GPU, but {'nvidia-smi' if smi else '/dev/kfd'} does: {facts['why']}"
    if hiding := [f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ]:
        return WARNING, "torch", text, f"unset {', '.join(hiding)}"
    fix = next(fix for words, fix in CAUSES.items() if words in facts["why"])
    if not (cuda if smi else hip):
        fix = f"another build, if setup.sh knows one: {REBUILD}"
    # many processors have an AMD GPU that no build supports
    return ERROR if smi or supported_amd() else WARNING, "torch", text, fix


def supported_amd() -> bool:
    """Whether the kernel lists an AMD GPU that one of PyTorch's ROCm builds has code for."""
    archs = (ROOT / "llm_demo/machine/rocm_builds.txt").read_text("utf-8").split()
    for file in (probe_root() / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        words = file.read_text("utf-8").split()
        code = int(dict(zip(words[::2], words[1::2], strict=False)).get("gfx_target_version", 0))
        if f"gfx{code // 10000}{code // 100 % 100:x}{code % 100:x}" in archs:
            return True
    return False


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


def host_line(speed: dict) -> tuple:
    """Whether this host can keep GPUs busy with small models: it starts every kernel."""
    launch, python = speed.get("launch_us"), speed["python_s"]
    text = f"3 million additions in Python take {python:.2f} s"
    text += f", a kernel launch {launch:.1f} µs" if launch else ""
    if not launch or launch < LAUNCH_US and python < PYTHON_S:
        return OK, "host", text, ""
    text += ": GPUs will wait for this host in small models, such as 0.6B at micro-batch 8"
    fix = "end other programs, set the CPU governor 'performance', raise --micro_batch_size"
    return WARNING, "host", text, fix


def kernel_line() -> tuple:
    """Versions and settings of the kernel that matter to AMD GPUs; "?" for what is unknown."""

    def read(path):
        with contextlib.suppress(OSError):
            data = (probe_root() / path).read_bytes()
            return (gzip.decompress(data) if path.endswith(".gz") else data).decode().strip()
        return ""

    release, command = read("proc/sys/kernel/osrelease"), read("proc/cmdline").split()
    config = (read("proc/config.gz") or read(f"boot/config-{release}")).split()
    balancing, passes = read("proc/sys/kernel/numa_balancing"), "iommu=pt" in command
    fixes = {"sudo sysctl kernel.numa_balancing=0": balancing == "1"}
    fixes["if GPUs hang, boot with iommu=pt"] = not passes
    text = f"Linux {release}, amdgpu {read('sys/module/amdgpu/version') or 'of the kernel'}"
    text += f", numa_balancing {balancing or '?'}, iommu=pt {passes}"
    for option in ("CONFIG_HSA_AMD_P2P", "CONFIG_PCI_P2PDMA"):
        on = f"{option}=y" in config
        text += f", {option} {on if config else '?'}"
        fixes[f"peer-to-peer over PCIe needs {option}, or amdgpu-dkms"] = bool(config) and not on
    fix = "; ".join(fix for fix, needed in fixes.items() if needed)
    return WARNING if fix else OK, "kernel", text, fix


def gpu_line(i: int, devices: list[dict]) -> tuple:
    """The line of GPU i. devices: facts of each GPU with its answer to `gemm`."""
    gpu, name, text = devices[i], f"gpu {i}", devices[i]["name"]
    if "problem" in gpu:
        fix = "look for GPU errors: sudo dmesg | grep -iE 'xid|amdgpu'; is its memory full?"
        return ERROR, name, f"{text}: matrix product failed: {gpu['problem']}", fix
    rates, best = gpu["rates"], max(g["rates"]["bf16"] for g in devices if "rates" in g)
    shares = {dtype: rates[dtype] / peak for dtype, peak in gpu["peak"].items() if peak}
    for dtype, rate in rates.items():
        text += f", {dtype} {rate:.0f} TFLOP/s"
        text += f" ({100 * shares[dtype]:.0f}% of peak)" * (dtype in shares)
    text += f"; {' = '.join(gpu['load'].splitlines())}" * bool(gpu["load"])
    ask = {"nvidia": "nvidia-smi -q -d PERFORMANCE", "amd": "amd-smi metric"}[gpu["vendor"]]
    fix = f"end other programs on it; is it throttled ({ask})?"
    if AT_LIMIT in gpu["load"]:
        fix = "cool it: a card without a fan needs a strong one beside it"
    if rates["bf16"] < 0.9 * best:
        text += f": {100 * rates['bf16'] / best:.0f}% of the fastest GPU"
        return WARNING, name, text, fix
    if min(shares.values(), default=1) < 0.5:
        return WARNING, name, f"{text}: less than half of its peak", fix
    return (WARNING, name, text, fix) if AT_LIMIT in gpu["load"] else (OK, name, text, "")


def product_lines(gpu: dict) -> list:
    """Rates of a GPU's products in the model's shapes, and what becomes of small fp16 values."""
    lost = not gpu.get("subnormals", True)
    level, fix = (WARNING, "--dtype bf16") if lost else (OK, "")
    more = "; fp16 values below 6e-5 become zero, so small gradients are lost" * lost
    return [(level, "products", text + more, fix) for text in gpu.get("products", ())]


def kernel_lines(speed: dict, peak: float | None) -> list:
    """Times of faster kernels beside plain ones. peak: TFLOP/s of the GPU, None if unknown."""
    lines = []
    for name, case in speed["cases"].items():
        if isinstance(case, str):
            fix = "--no_compile; torch.compile needs a C compiler: apt install gcc python3-dev"
            lines.append((WARNING, "kernels", f"{name} fails: {case}", fix))
            continue
        plain, faster, error = case
        text = f"{name}: {faster:.2f} ms, plain {plain:.2f} ms; they differ by {error:.1e}"
        if "compiled" in name and peak:
            text += f"; {100 * speed['tflops'] / peak:.0f}% of the GPU's peak"
        # bf16 rounds by up to 0.004; no run sums attention in 16 bits
        wrong = not error < 0.03 and "sums" not in name
        fix = "--attn_impl math" if "attention" in name else "--no_compile"
        lines.append((WARNING if wrong else OK, "kernels", text, fix * wrong))
    return lines


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
        return ERROR, name, trouble + f"; with {P2P_OFF}=1: {without}" * bool(without), FIX_BOTH
    rate = result["all_reduce"]
    text = f"all {result['elements']:,} values correct, {rate:.1f} GB/s"
    text += f", {result['latency_us']:.0f} µs" if "latency_us" in result else ""
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
