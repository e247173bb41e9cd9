"""Kinds of cards to plan for, and what a card and its links sustain. Imports nothing heavy."""

from dataclasses import dataclass, field

TFLOPS, SUSTAINED = 550, 0.55  # of an H200 in bf16; share of a data sheet's that is reached
NVLINK, PCIE = 200, 20  # GB/s between cards
CPU_TFLOPS, CPU_LINK = 0.1, 1  # of a process on a CPU; only the order of settings depends on them
LINKED = ("h100", "h200", "a100")  # by NVLink


@dataclass(frozen=True)
class Device:
    type: str  # "cuda" (also for AMD: ROCm uses that name) or "cpu"
    vendor: str  # "nvidia", "amd" or "cpu"
    name: str
    arch: str  # "gfx908", "sm_90", or "" on a CPU
    memory_gb: float  # 0 on a CPU
    units: int = field(default=0, compare=False)  # compute units or multiprocessors

    def __str__(self):
        gpu = f" ({self.vendor} {self.arch}, {self.memory_gb:.0f} GiB)"
        return self.name + (gpu if self.type == "cuda" else "")


# Cards to plan for without having one (--card), as PyTorch reports them. Memory: measured on H100
# and H200, else from messages that people have published.
CARDS = {
    "h100": Device("cuda", "nvidia", "NVIDIA H100 80GB HBM3", "sm_90", 79.2, 132),
    "h200": Device("cuda", "nvidia", "NVIDIA H200", "sm_90", 139.8, 132),
    "a100": Device("cuda", "nvidia", "NVIDIA A100-SXM4-80GB", "sm_80", 79.2, 108),
    "rtx4090": Device("cuda", "nvidia", "NVIDIA GeForce RTX 4090", "sm_89", 23.6, 128),
    "rtx3090": Device("cuda", "nvidia", "NVIDIA GeForce RTX 3090", "sm_86", 23.6, 82),
    "mi100": Device("cuda", "amd", "AMD Instinct MI100", "gfx908", 32.0, 120),
    "mi210": Device("cuda", "amd", "AMD Instinct MI210", "gfx90a", 64.0, 104),
    "mi300x": Device("cuda", "amd", "AMD Instinct MI300X", "gfx942", 192.0, 304),
    "rx7900xtx": Device("cuda", "amd", "AMD Radeon RX 7900 XTX", "gfx1100", 24.0, 48),
}
