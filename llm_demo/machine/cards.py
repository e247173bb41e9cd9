"""Kinds of cards: their memory, their peaks, and what they and their links sustain. Imports nothing
heavy."""

from dataclasses import dataclass, field

TFLOPS, SUSTAINED = 550, 0.55  # of an H200 in bf16; share of a data sheet's that is reached
NVLINK, PCIE = 200, 20  # GB/s between cards
CPU_TFLOPS, CPU_LINK = 0.1, 1  # of a process on a CPU; only the order of settings depends on them
LINKED = ("h100", "h200", "b200", "a100")  # by NVLink


@dataclass(frozen=True)
class Device:
    name: str
    arch: str  # "gfx908", "sm_90", or "" on a CPU
    memory_gb: float  # 0 on a CPU
    units: int = field(default=0, compare=False)  # compute units or multiprocessors

    @property
    def type(self) -> str:
        """ "cuda" (also for AMD: ROCm uses that name) or "cpu"."""
        return "cuda" if self.arch else "cpu"

    @property
    def vendor(self) -> str:
        """ "nvidia", "amd" or "cpu"."""
        if not self.arch:
            return "cpu"
        return "amd" if self.arch.startswith("gfx") else "nvidia"

    def __str__(self):
        gpu = f" ({self.vendor} {self.arch}, {self.memory_gb:.0f} GiB)"
        return self.name + (gpu if self.type == "cuda" else "")


# Cards to plan for without having one (--card), as PyTorch reports them. Memory: measured on H100
# and H200, else from messages that people have published, or the data sheet's.
CARDS = {
    "h100": Device("NVIDIA H100 80GB HBM3", "sm_90", 79.2, 132),
    "h200": Device("NVIDIA H200", "sm_90", 139.8, 132),
    "b200": Device("NVIDIA B200", "sm_100", 178.4, 148),
    "gb10": Device("NVIDIA GB10", "sm_121", 119.7, 48),
    "a100": Device("NVIDIA A100-SXM4-80GB", "sm_80", 79.2, 108),
    "l40s": Device("NVIDIA L40S", "sm_89", 44.4, 142),
    "a6000": Device("NVIDIA RTX A6000", "sm_86", 47.4, 84),
    "a40": Device("NVIDIA A40", "sm_86", 44.4, 84),
    "v100": Device("Tesla V100-SXM2-32GB", "sm_70", 31.7, 80),
    "t4": Device("Tesla T4", "sm_75", 14.6, 40),
    "rtxpro6000": Device(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "sm_120",
        94.9,
        188,
    ),
    "rtx5090": Device("NVIDIA GeForce RTX 5090", "sm_120", 31.4, 170),
    "rtx5080": Device("NVIDIA GeForce RTX 5080", "sm_120", 15.5, 84),
    "rtx4090": Device("NVIDIA GeForce RTX 4090", "sm_89", 23.6, 128),
    "rtx3090": Device("NVIDIA GeForce RTX 3090", "sm_86", 23.6, 82),
    "mi100": Device("AMD Instinct MI100", "gfx908", 32.0, 120),
    "mi210": Device("AMD Instinct MI210", "gfx90a", 64.0, 104),
    "mi250x": Device("AMD Instinct MI250X", "gfx90a", 64.0, 110),  # one die
    "mi300a": Device("AMD Instinct MI300A", "gfx942", 128.0, 228),
    "mi300x": Device("AMD Instinct MI300X", "gfx942", 192.0, 304),
    "mi325x": Device("AMD Instinct MI325X", "gfx942", 256.0, 304),
    "mi350x": Device("AMD Instinct MI350X", "gfx950", 288.0, 256),
    "mi355x": Device("AMD Instinct MI355X", "gfx950", 288.0, 256),
    "r9700": Device("AMD Radeon AI PRO R9700", "gfx1201", 32.0, 32),
    "rx9070xt": Device("AMD Radeon RX 9070 XT", "gfx1201", 16.0, 32),
    "rx7900xtx": Device("AMD Radeon RX 7900 XTX", "gfx1100", 24.0, 48),
}

# Dense matrix peaks in TFLOP/s by a part of "name arch units": fp32, bf16, fp16, with sums in fp32.
# None: no such products. fp32 is PyTorch's default, without TF32. From the vendors' data sheets.
# MI100: AMD's CDNA white paper. Radeon: FLOPs per clock and compute unit (AMD's GPUOpen, "Matrix
# Cores of RDNA 4") x compute units x clock; found by its name, because ROCm counts its compute
# units in pairs. RTX: NVIDIA's white papers of each architecture. GB10: an eighth of its data
# sheet's sparse fp4.
PEAK_TFLOPS = {
    "gfx908": (46.1, 92.3, 184.6),  # MI100
    "gfx90a 104": (45.3, 181.0, 181.0),  # MI210; MI250, one of its two dies
    "gfx90a 110": (47.9, 191.5, 191.5),  # MI250X, one of its two dies
    "gfx942 228": (122.6, 980.6, 980.6),  # MI300A
    "gfx942 304": (163.4, 1307.4, 1307.4),  # MI300X, MI325X
    "MI350X": (144.2, 2306.9, 2306.9),
    "MI355X": (157.3, 2516.6, 2516.6),
    "RX 7900 XTX": (61.4, 122.9, 122.9),
    "RX 9070 XT": (48.7, 194.6, 194.6),
    "R9700": (47.8, 191.4, 191.4),
    "NVIDIA B200": (75.0, 2250.0, 2250.0),
    "NVIDIA GB10": (31.0, 125.0, 125.0),
    "H200": (66.9, 989.4, 989.4),
    "H100 PCIe": (51.2, 756.4, 756.4),
    "H100": (66.9, 989.4, 989.4),
    "A100": (19.5, 312.0, 312.0),
    "L40S": (91.6, 362.0, 362.0),
    "RTX A6000": (38.7, 154.8, 154.8),
    "NVIDIA A40 ": (37.4, 149.7, 149.7),
    "V100": (15.7, None, 125.0),
    "Tesla T4": (8.1, None, 65.0),
    "RTX PRO 6000 Blackwell": (126.0, 503.8, 503.8),
    "RTX 5090": (104.8, 209.5, 209.5),
    "RTX 5080": (56.3, 112.6, 112.6),
    "RTX 4090": (82.6, 165.2, 165.2),
    "RTX 3090": (35.6, 71.0, 71.0),
}
