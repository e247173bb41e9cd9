"""Compile our kernels for an AMD GPU on a machine that has none: amd_worker.py ARCH

Prints a line of JSON for each kernel: what its machine code needs. A process is for one ARCH:
Triton's cache of a function's kernels does not tell them apart."""

import json
import re
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from llm_demo.core import loss_kernel
from llm_demo.options import four_bits, four_bits_kernel

ARCH = sys.argv[1]
WARP = 64 if ARCH.startswith("gfx9") else 32  # threads: CDNA, RDNA


class Driver(DriverBase):
    """Of a GPU on which nothing is launched."""

    is_active = classmethod(lambda cls: True)
    get_current_target = lambda self: GPUTarget("hip", ARCH, WARP)  # noqa: E731
    get_current_device = lambda self: 0  # noqa: E731
    get_current_stream = lambda self, device: 0  # noqa: E731
    get_active_torch_device = lambda self: torch.device("cuda", 0)  # noqa: E731
    get_benchmarker = map_python_to_cpp_type = None  # for launches


def describe(name: str, kernel) -> None:
    code = kernel.asm["amdgcn"]

    def total(fact: str) -> int:
        return sum(map(int, re.findall(rf"\.{fact}:\s*(\d+)", code)))

    loads = re.findall(r"\b(?:global|buffer|flat)_load_(\w+)", code)
    threads, spills = total("max_flat_workgroup_size"), total("[sv]gpr_spill_count")
    print(json.dumps({"name": name, "threads": threads, "spills": spills, "loads": loads}))


def ours() -> None:
    """Every kernel that we wrote, called as in a run."""
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        first, *_ = (*args, *options.values())
        describe(f"{self.__name__} {first.dtype}", kernel)

    JITFunction.run = compile_only
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(warp_size=WARP)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.empty(4, 151_936, dtype=dtype)
        for cap in (None, 30.0):
            loss_kernel.loss_of_logits(logits, torch.zeros(4, dtype=torch.int64), cap=cap)
        rows = torch.zeros(64, four_bits.row_bytes(256), dtype=torch.uint8)
        scales = torch.zeros(four_bits.scales_of(64, 256) + four_bits.TABLES)
        four_bits_kernel.values(rows, scales, 256, dtype)


triton.runtime.driver.set_active(Driver())
ours()
