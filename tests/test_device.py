"""Decisions by vendor and architecture, on faked devices and files."""

from types import SimpleNamespace

import pytest
import torch

from llm_demo import device as devices
from llm_demo.device import peak_tflops, this_device


def fake(monkeypatch, *gpus, hip="6.4.43482", archs=()):
    """Let PyTorch see these GPUs, each (name, arch, compute units), and have code for `archs`."""
    props = [
        SimpleNamespace(
            name=name, gcnArchName=f"{arch}:sramecc+:xnack-", total_memory=32 << 30,
            multi_processor_count=units, is_integrated=int(name == "AMD Radeon Graphics"),
        )
        for name, arch, units in gpus
    ]  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", hip)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: len(props),
        "get_device_properties": lambda i=0: props[i],
        "get_device_capability": lambda i=0: tuple(map(int, gpus[i][1][3:])),
        "get_arch_list": lambda: list(archs),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "name, arch, units, peaks",
    [
        ("AMD Instinct MI100", "gfx908", 120, [46.1, 92.3, 184.6]),
        ("AMD Instinct MI210", "gfx90a", 104, [45.3, 181.0, 181.0]),
        ("AMD Instinct MI250X", "gfx90a", 110, [47.9, 191.5, 191.5]),
        ("AMD Instinct MI300X", "gfx942", 304, [163.4, 1307.4, 1307.4]),
        ("AMD Instinct MI300A", "gfx942", 228, [122.6, 980.6, 980.6]),
        ("AMD Instinct MI300X, a partition", "gfx942", 38, [None] * 3),
        ("AMD Instinct MI350X", "gfx950", 256, [144.2, 2306.9, 2306.9]),
        ("AMD Instinct MI355X", "gfx950", 256, [157.3, 2516.6, 2516.6]),
        ("AMD Radeon RX 7900 XTX", "gfx1100", 48, [61.4, 122.9, 122.9]),
        ("AMD Radeon RX 7900 XT", "gfx1100", 42, [None] * 3),
        ("AMD Radeon RX 9070 XT", "gfx1201", 32, [48.7, 194.6, 194.6]),
        ("AMD Radeon RX 9070", "gfx1201", 28, [None] * 3),
        ("AMD Radeon 8060S", "gfx1151", 20, [None] * 3),
    ],
)
def test_peaks_of_amd_cards(name, arch, units, peaks, monkeypatch):
    fake(monkeypatch, (name, arch, units))
    types = (torch.float32, torch.bfloat16, torch.float16)
    assert [peak_tflops(this_device(), dtype) for dtype in types] == peaks


def kernel(root, links, version=90008):
    """The kernel's view of a CPU (node 0) and two GPUs (1, 2); links: (from, to, type)."""
    for node, (gfx, at) in enumerate([(0, 0), (version, 0x4300), (version, 0x8308)]):
        file = root / f"sys/class/kfd/kfd/topology/nodes/{node}/properties"
        file.parent.mkdir(parents=True)
        file.write_text(f"simd_count 480\ngfx_target_version {gfx}\nlocation_id {at}\ndomain 0\n")
    for i, (a, b, kind) in enumerate(links):
        file = root / f"sys/class/kfd/kfd/topology/nodes/{a}/io_links/{i}/properties"
        file.parent.mkdir(parents=True)
        file.write_text(f"type {kind}\nnode_from {a}\nnode_to {b}\nweight 15\n")


@pytest.mark.parametrize("links, kind", [
    ([(1, 0, 2), (2, 0, 2)], "PCIe"),
    ([(1, 0, 2), (1, 2, 11), (2, 1, 11), (2, 0, 2)], "XGMI"),
    ([(1, 0, 11), (2, 0, 11)], "PCIe"),  # XGMI to the CPU alone
])  # fmt: skip
def test_links_of_amd_cards_come_from_the_kernel(links, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no vendor's tool
    kernel(tmp_path, links)
    a, b = "0000:43:00.0", "0000:83:01.0"
    assert devices.link_table(tmp_path) == {(a, b): kind, (b, a): kind}
