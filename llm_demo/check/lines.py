"""Lines on the host, on each GPU and on pairs of GPUs.

A line is (level, name, text, fix); the fix is "" if there is nothing to do."""

import os
import shutil
import sys
from pathlib import Path

from llm_demo.check.processes import P2P_OFF
from llm_demo.machine.process import versions_of

OK, WARNING, ERROR = "ok", "warning", "error"
REINSTALL = "bash setup.sh, and use its .venv/bin/python"
UNSEEN = (
    "unset CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES; look at dmesg; update the driver, or install "
    "another build: leave any environment that has this torch, rm -r .venv, bash setup.sh; AMD: "
    "sudo usermod -aG render,video $USER, log in again"
)
# Two hosts that took 7 to 8 µs needed 92 to 153 ms for a step of 0.6B at micro-batch 8, instead of
# the 80 ms that the GPU needs.
LAUNCH_US = 7.0

FIX_P2P = f"boot with iommu=pt, switch ACS off in the BIOS; until then, export {P2P_OFF}=1"
FIX_BOTH = "look at dmesg, /dev/shm (docker: --ipc=host), /etc/hosts and, with --json, NCCL's log"


def packages() -> tuple:
    """Versions of Python and of what training imports, apart from torch."""
    text = f"Python {sys.version.split()[0]}"
    found = versions_of(["transformers", "datasets", "accelerate", "numpy", "deepspeed"])
    for package, version in found.items():
        text += f", {package} {version or 'is not installed'}"
    if all(found.values()):
        return OK, "packages", text, ""
    return WARNING, "packages", text, REINSTALL  # FSDP works without DeepSpeed


def torch_build(facts: dict, driver: str, seen_by: str) -> tuple:
    """PyTorch, and whether it sees the GPUs. facts: see experiments.torch_facts. driver: NVIDIA's
    version. seen_by: what else sees a GPU, "" for nothing."""
    if "torch" not in facts:
        return ERROR, "torch", f"import torch failed: {facts['problem']}", REINSTALL
    text = facts["torch"]
    if driver:
        text += f"; driver {driver}"
    if facts["devices"]:
        text += f"; NCCL or RCCL {facts.get('nccl', 'is missing')}"
        if facts["refused"]:
            return ERROR, "torch", f"{text}; training ends at once: {facts['refused']}", ""
        return OK, "torch", text, ""
    if not seen_by:
        return OK, "torch", f"{text}; no GPU was found, so training runs on the CPU", ""
    text += f" sees no GPU, but {seen_by} does: {facts['why']}"
    # many processors have an AMD GPU that no build supports
    return ERROR if driver else WARNING, "torch", text, UNSEEN


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
    fix = "end other programs; is it cooled? nvidia-smi -q -d PERFORMANCE, amd-smi metric"
    of_fastest = gpu["rates"]["bf16"] / max(g["rates"]["bf16"] for g in devices if "rates" in g)
    if of_fastest < 0.9:
        return WARNING, name, f"{text}: {of_fastest:.0%} of the fastest GPU", fix
    if slowest_share < 0.5:
        return WARNING, name, f"{text}: less than half of its peak", fix
    return OK, name, text, ""


def choice_lines(found: dict) -> list[tuple]:
    """What a run would choose. found: as experiments.choices returns it."""
    if "problem" in found:
        return [(ERROR, "attention", f"could not be tried: {found['problem']}", REINSTALL)]
    return [(OK, name, text, "") for name, text in found["lines"]]


def kernel_lines(found: dict) -> list[tuple]:
    """Whether torch.compile and our loss kernel work, and times. found: as experiments.kernels
    returns it."""
    problem = found.get("problem") or found["fault"]
    lines = []
    if problem:
        fix = "--no_compile; torch.compile needs a C compiler: apt install gcc python3-dev"
        text = f"a compiled block or the loss kernel fails: {problem}"
        lines.append((WARNING, "kernels", text, fix))
    for which, (plain, faster) in found.get("times", {}).items():
        lines.append((OK, "kernels", f"{which}: {faster:.2f} ms, plain {plain:.2f} ms", ""))
    if "launch_us" in found:  # the host starts every kernel
        level, text, fix = OK, f"a kernel launch takes {found['launch_us']:.1f} µs", ""
        if found["launch_us"] >= LAUNCH_US:
            level = WARNING
            text += ": GPUs will wait for this host in small models, such as 0.6B at micro-batch 8"
            fix = "end other programs, set the CPU governor 'performance', raise --micro_batch_size"
        lines.append((level, "host", text, fix))
    return lines


def failure(result: dict | None) -> str | None:
    """The problem with a pair's result; None if every value was correct."""
    if result is None:
        return None
    if "problem" in result:
        return f"{'hang' if result.get('hung') else 'fail'} ({result['problem']})"
    wrong = [f"{count:,} in {name}" for name, count in result["wrong"].items() if count]
    if wrong:
        return f"return wrong values ({', '.join(wrong)}, of {result['elements']:,} compared)"
    return None


def pair_line(name: str, result: dict, other: dict | None = None) -> tuple:
    """The line of a pair. other: its result with NCCL_P2P_DISABLE=1, if tried."""
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
    if without:
        return WARNING, name, f"{text}; with {P2P_OFF}=1: {without}", f"leave {P2P_OFF} unset"
    if other:
        text += f"; {other['all_reduce']:.1f} GB/s with {P2P_OFF}=1"
        if other["all_reduce"] > 1.3 * rate:
            return WARNING, name, f"{text}: peer-to-peer is slower than host memory", FIX_P2P
    return OK, name, text, ""
