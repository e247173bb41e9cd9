"""What nvidia-smi, rocm-smi and /sys report about the GPUs.

A GPU is identified by its bus address, as in "0000:0a:00.0"."""

import collections
import os
import re
import statistics
from pathlib import Path

from llm_demo.check import processes
from llm_demo.check.machine import ERROR, OK, WARNING, number, read, root

PCIE = {1: 2.5, 2: 5, 3: 8, 4: 16, 5: 32, 6: 64}  # generation -> GT/s of a lane
XGMI = {"gfx908": 46.0, "gfx90a": 50.0, "gfx942": 64.0}  # GB/s between two GPUs, one direction

# Bits of clocks_event_reasons.active
POWER_CAP = "power cap"  # normal under full load
THROTTLED = {
    0x4: POWER_CAP,
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def query(*fields: str, of: str = "gpu") -> list[list[str]]:
    """One row of values per GPU from nvidia-smi --query-...; [] if it lacks a field."""
    table = processes.tool(
        "nvidia-smi", f"--query-{of}={','.join(fields)}", "--format=csv,noheader,nounits"
    )
    rows = [re.split(r"\s*,\s*", line.strip()) for line in table.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def bus(text: str) -> str:
    """Convert 00000000:0A:00.0 to Linux's form, 0000:0a:00.0."""
    return text.lower()[-12:]


def nvidia() -> dict:
    """The driver, its CUDA version, and uuid -> GPU (index, bus) from nvidia-smi."""
    version = re.search(r"CUDA (?:UMD )?Version:\s*(\d+)\.(\d+)", processes.tool("nvidia-smi"))
    rows = query("index", "uuid", "pci.bus_id", "memory.used", "driver_version")
    gpus = {
        uuid.removeprefix("GPU-"): {"index": int(index), "bus": bus(place)}
        for index, uuid, place, _, _ in rows
    }
    cuda = tuple(map(int, version.groups())) if version else None
    return {"driver": rows[0][-1] if rows else "", "cuda": cuda, "gpus": gpus}


def under_load() -> dict[str, dict]:
    """bus -> throttle reasons, clock, temperature and PCIe link, from nvidia-smi.

    Call it while the GPUs are busy: idle GPUs lower their clock and their link."""
    fields = ("pcie.link.gen.current", "pcie.link.width.current", "pcie.link.gen.max")
    fields += ("pcie.link.width.max", "clocks.sm", "temperature.gpu")
    rows = query("pci.bus_id", "clocks_event_reasons.active", *fields)
    rows = rows or query("pci.bus_id", "clocks_throttle_reasons.active", *fields)  # older drivers
    loads = {}
    for place, reasons, *values in rows:
        gen, width, _, width_max, clock, heat = map(number, values)
        bits = int(reasons, 16) if reasons.startswith("0x") else 0
        loads[bus(place)] = {
            "throttled": [word for bit, word in THROTTLED.items() if bits & bit],
            "gen": gen, "width": width, "width_max": width_max, "clock": clock, "heat": heat,
        }  # fmt: skip
    return loads


def memory_faults(places: list[str]) -> dict[str, list[str]]:
    """bus -> memory faults: ECC errors, rows waiting to be remapped."""
    faults = collections.defaultdict(list)
    for place, count in query("pci.bus_id", "ecc.errors.uncorrected.volatile.total"):
        if number(count):
            faults[bus(place)].append(f"{count} uncorrected ECC errors since the last reset")
    fields = ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")
    for place, pending, failure in query(*fields, of="remapped-rows"):
        if pending in ("Yes", "1"):
            faults[bus(place)].append("memory rows are waiting for a reset to be remapped")
        if failure in ("Yes", "1"):
            faults[bus(place)].append("remapping memory rows failed")
    for place in places:  # AMD
        for file in sorted((root() / f"sys/bus/pci/devices/{place}/ras").glob("*_err_count")):
            count = re.search(r"ue:\s*(\d+)", read(file))
            if count and int(count[1]):
                block = file.name.split("_")[0]
                faults[place].append(f"{count[1]} uncorrectable errors in {block}")
    return faults


def amd_gb(place: str, name: str) -> float:
    """GiB of an AMD GPU's memory; name: vram_total or vis_vram_total."""
    return (number(read(f"sys/bus/pci/devices/{place}/mem_info_{name}")) or 0) / 2**30


def gpu_line(gpu: dict, gpus: list[dict], name: str) -> tuple:
    """The line of a GPU. gpus: each one's facts, rates, load and memory faults."""
    text = f"{gpu['name']}, {gpu['arch']}, {gpu['memory_gb']:.0f} GB"
    if gpu.get("problem"):
        fix = "look for GPU errors: sudo dmesg | grep -iE 'xid|amdgpu'; is its memory full?"
        return ERROR, name, f"{text}: matrix product failed: {gpu['problem']}", fix
    rates, load = gpu["rates"], gpu["load"]
    shares = {dtype: rates[dtype] / peak for dtype, peak in gpu["peak"].items() if peak}
    each = [
        f"{dtype} {rate:.0f}" + (f" ({100 * shares[dtype]:.0f}%)" if dtype in shares else "")
        for dtype, rate in rates.items()
    ]
    text += f": {', '.join(each)} TFLOP/s ({'% of peak' if shares else 'peak unknown'})"
    text += f", {load['clock']:.0f} MHz" if load.get("clock") else ""
    text += f", {load['heat']:.0f} °C" if load.get("heat") else ""
    link = pcie_gb(gpu["bus"], load)
    text += f", {link[1]}" if link else ""

    why, fixes = [], []
    best = max(g["rates"]["bf16"] for g in gpus if g["name"] == gpu["name"] and "rates" in g)
    slow = rates["bf16"] < 0.9 * best
    throttled = load.get("throttled", [])
    if slow and throttled or set(throttled) - {POWER_CAP}:
        why.append(f"throttled: {', '.join(throttled)}")
        fixes.append("check cooling and power supply; nvidia-smi -q -d PERFORMANCE")
    if slow:
        why.append(f"{100 * rates['bf16'] / best:.0f}% of the fastest GPU")
        fixes.append("end other programs on it; compare power limits and cooling")
    elif min(shares.values(), default=1) < 0.5:
        why.append("less than half of its peak")
        fixes.append("end other programs on it; update driver and torch")
    if load.get("width") and load["width"] < (load["width_max"] or 0):
        why.append(f"PCIe x{load['width']:.0f} of x{load['width_max']:.0f} lanes")
        fixes.append("reseat the card or use a full-width slot")
    if gpu["faults"]:
        why += gpu["faults"]
        fixes.append("reset the GPU or reboot; if the errors return, replace it")
    return WARNING if why else OK, name, "; ".join([text, *why]), "; ".join(fixes)


# ---------------------------------------------------------------- links


def topology() -> dict[tuple[int, int], str]:
    """(i, j) -> the link between GPUs i and j as the vendor's tool names it: NV18, PIX, XGMI ..."""
    for command in (("nvidia-smi", "topo", "-m"), ("rocm-smi", "--showtopotype")):
        rows = [line.split() for line in processes.tool(*command).splitlines()]
        rows = [row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0])]
        rows = [row for row in rows if not row[0].startswith("GPU")]  # the table's header
        if rows:
            each = range(len(rows))
            return {(i, j): rows[i][j] for i in each for j in each if i != j}
    return {}


def nvlinks() -> dict[int, list[float]]:
    """nvidia-smi's GPU index -> GB/s in one direction of each active NVLink."""
    gpus = {}
    for line in processes.tool("nvidia-smi", "nvlink", "-s").splitlines():
        if head := re.match(r"GPU (\d+):", line):
            links = gpus.setdefault(int(head[1]), [])
        elif link := re.match(r"\s+Link \d+: ([\d.]+) GB/s", line):
            links.append(float(link[1]))
    return gpus


def nvlink_lines(links: dict, indices: list[int]) -> list:
    """A warning if some GPUs have fewer active NVLinks than others. indices: nvidia-smi's."""
    active = {i: len(links[index]) for i, index in enumerate(indices) if index in links}
    most = max(active.values(), default=0)
    few = [f"GPU {i} has {count}" for i, count in active.items() if count < most]
    if not few:
        return []
    fix = "reset the GPU; nvidia-smi nvlink -s and nvlink -e show the links"
    return [(WARNING, "nvlink", f"{', '.join(few)} of {most} links active", fix)]


def pcie_gb(place: str, load: dict) -> tuple[float, str] | None:
    """(GB/s in one direction, name) of a GPU's PCIe link; None if unknown."""
    links = []
    if load.get("gen") in PCIE and load.get("width"):
        gen, width = load["gen"], load["width"]
        links = [(PCIE[gen], width, f"PCIe {gen:.0f} x{width:.0f}")]
    # AMD cards contain a PCIe switch, with the slot's link above it. The slowest link is the limit.
    folder = Path(os.path.realpath(root() / "sys/bus/pci/devices" / place))
    while not load.get("gen") and re.match(r"[0-9a-f]{4}:", folder.name):
        speed = number(read(folder / "current_link_speed"))
        width = number(read(folder / "current_link_width"))
        if speed and width:
            links.append((speed, width, f"PCIe {speed:.1f} GT/s x{width:.0f}"))
        folder = folder.parent
    # Encoding leaves 8/10 of the bits in the first two generations, 128/130 since.
    rates = ((s / 8 * w * (0.985 if s > 5 else 0.8), name) for s, w, name in links)
    return min(rates, default=None)


def expected_gb(gpus: list[dict], kinds: dict, links: dict) -> dict:
    """pair -> (GB/s in one direction, name) of its link; None if unknown.

    kinds: pair -> name in `topology`; links: see `nvlinks`."""
    nvlink = statistics.median([speed for speeds in links.values() for speed in speeds] or [0])
    expected = {}
    for (i, j), kind in kinds.items():
        pcie = [pcie_gb(gpus[k]["bus"], gpus[k]["load"]) for k in (i, j)]
        gb, name = min(pcie) if all(pcie) else (None, "")
        name += f" ({kind})" * bool(kind)
        if kind.startswith("NV"):
            gb, name = int(kind[2:]) * nvlink, f"NVLink x{kind[2:]}"
        elif kind == "XGMI":
            gb, name = XGMI.get(gpus[i]["arch"]), kind
        expected[i, j] = (gb, name) if gb else None
    return expected


def iommu(places: list[str], amd: bool, all_right: bool) -> list:
    """A line on the IOMMU, which can break or slow peer-to-peer between GPUs."""
    folders = [f"sys/bus/pci/devices/{place}/iommu_group/type" for place in places]
    types = {read(folder) for folder in folders} - {""}
    options = r"\b(iommu=pt|iommu\.passthrough=1)\b"
    state = "translating"
    if not any((root() / "sys/class/iommu").glob("*")):
        state = "off"
    elif types == {"identity"} or not types and re.search(options, read("proc/cmdline")):
        state = "passthrough"
    if state == "translating" and (amd or not all_right):
        why = "RCCL warns of hangs and instability" if amd else "a likely cause of the errors above"
        fix = "add iommu=pt to the kernel command line (in /etc/default/grub, say) and reboot"
        return [(WARNING, "iommu", f"{state}, without iommu=pt: {why}", fix)]
    return [(OK, "iommu", state, "")]
