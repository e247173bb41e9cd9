"""Decisions by vendor and architecture, on faked devices and files."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run

from llm_demo.core.errors import UserError
from llm_demo.launch.__main__ import this_node
from llm_demo.machine import device as devices
from llm_demo.machine.device import peak_tflops, this_device


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
        "get_device_capability": lambda i=0: divmod(int(gpus[i][1].removeprefix("sm_")), 10),
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
    assert devices.links.__wrapped__(tmp_path) == [kind]


MI100 = ("AMD Instinct MI100", "gfx908", 120)
RYZEN = ("AMD Radeon Graphics", "gfx1036", 1)
XTX = ("AMD Radeon RX 7900 XTX", "gfx1100", 48)
STRIX = ("AMD Radeon Graphics", "gfx1103", 6)
WHEEL = ["gfx906", "gfx908", "gfx90a", "gfx1100", "gfx1102", "gfx1103"]


@pytest.mark.parametrize("gpus, given, expected", [
    ([MI100, MI100], {}, {}),
    ([MI100, RYZEN, MI100], {}, {"CUDA_VISIBLE_DEVICES": "0,2"}),
    ([STRIX, XTX], {}, {"CUDA_VISIBLE_DEVICES": "1"}),  # PyTorch has its code, rocBLAS has not
    ([RYZEN, MI100, MI100], {"CUDA_VISIBLE_DEVICES": "4,1,0"}, {"CUDA_VISIBLE_DEVICES": "1,0"}),
    ([MI100, RYZEN], {"HIP_VISIBLE_DEVICES": "GPU-ab,2"}, {"HIP_VISIBLE_DEVICES": "GPU-ab"}),
    ([MI100, RYZEN], {"ROCR_VISIBLE_DEVICES": "1,2"}, {"CUDA_VISIBLE_DEVICES": "0"}),
    ([STRIX], {}, {}),  # alone, it is what there is
])  # fmt: skip
def test_an_integrated_gpu_is_no_rank(gpus, given, expected, monkeypatch, capsys):
    fake(monkeypatch, *gpus, archs=WHEEL)
    environ = {**given}
    monkeypatch.setattr("os.environ", environ)
    node = this_node()
    node.listener.close()
    assert {k: v for k, v in environ.items() if "VISIBLE" in k} == given | expected
    left_out = [gpu for gpu in gpus if gpu in (RYZEN, STRIX)] if expected else []
    assert node.processes == len(gpus) - len(left_out)
    said = capsys.readouterr().err
    assert said.count("\n") == len(left_out) and all(f"({arch})" in said for _, arch, _ in left_out)


def test_nvidias_gpus_are_counted_but_not_opened(monkeypatch):
    fake(monkeypatch, ("NVIDIA H200", "sm_90", 132), ("NVIDIA H200", "sm_90", 132), hip=None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)  # calling it is an error
    node = this_node()
    node.listener.close()
    assert node.processes == 2


@pytest.mark.parametrize("gpus, hip, words", [
    ([MI100, XTX], "6.4", "one kind, not GPU 0: AMD Instinct MI100 (amd gfx908, 32 GiB), GPU 1: "),
    ([XTX, MI100, MI100], "6.4", ": pick some by CUDA_VISIBLE_DEVICES"),
    ([("Radeon 8060S", "gfx1151", 20)], "6.4", "gfx1151: rocm7.0 and rocm7.1 and rocm7.2 have it"),
    ([("Radeon VII", "gfx905", 60)], "6.4", "none of PyTorch's ROCm builds has it"),
    ([("NVIDIA RTX 4090", "sm_89", 128), ("NVIDIA H200", "sm_90", 132)], None, "of one kind"),
    ([("NVIDIA H100", "sm_90", 132), ("NVIDIA H200", "sm_90", 132)], None, "of one kind"),
    ([("NVIDIA V100", "sm_70", 80)], None, "no code for sm_70: install a PyTorch build"),
    ([("NVIDIA RTX 5090", "sm_120", 170)], None, "no code for sm_120: install a PyTorch build"),
])  # fmt: skip
def test_gpus_that_cant_be_used_are_refused(gpus, hip, words, monkeypatch, record_property):
    record_property("bad inputs", 1)
    fake(monkeypatch, *gpus, hip=hip, archs=WHEEL if hip else ["sm_80", "sm_90"])
    with pytest.raises(UserError) as error:
        devices.refuse_gpus(range(len(gpus)))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("arch, archs, expected", [
    ("sm_90", ["sm_80", "sm_90"], True), ("sm_86", ["sm_80"], True), ("sm_89", ["sm_90"], False),
    ("sm_120", ["sm_90"], False), ("sm_120", ["sm_90", "compute_90"], True), ("sm_90", [], True),
    ("gfx908", ["gfx908:xnack-"], True), ("gfx908", ["gfx90a"], False), ("gfx908", [], True),
    ("gfx1103", ["gfx908", "gfx11-generic"], True),
])  # fmt: skip
def test_code_for_a_gpu(arch, archs, expected, monkeypatch):
    fake(monkeypatch, ("a GPU", arch, 1), hip="6.4" if arch[0] == "g" else None, archs=archs)
    assert (devices.no_code(this_device()) == "") == expected


MIXED = f"""
import sys
import pytest
sys.path.insert(0, {str(ROOT / "tests")!r})
from test_device import MI100, WHEEL, XTX, fake
from llm_demo.machine import dist
fake(pytest.MonkeyPatch(), MI100, XTX, archs=WHEEL)
dist.run(dist.start)
"""


def test_two_kinds_of_gpu_end_every_rank_in_one_line(tmp_path, record_property):
    record_property("bad inputs", 1)
    (tmp_path / "mixed.py").write_text(MIXED)
    launch = [sys.executable, "-m", "llm_demo.launch", tmp_path / "mixed.py"]
    begun = time.monotonic()
    done = run(launch, NPROC_PER_NODE="2")
    assert done.returncode == 2 and time.monotonic() - begun < 30
    assert done.stderr.startswith("error: the GPUs of a run must be of one kind")
    assert done.stderr.count("\n") == 1
