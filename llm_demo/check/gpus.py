"""What nvidia-smi and /sys report about the GPUs.

A GPU is identified by its bus address, as in "0000:0a:00.0"."""

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


def under_load(places: list[str]) -> dict[str, dict]:
    """bus -> throttle reasons, clock, temperature, power and PCIe link.

    Call it while the GPUs are busy: idle GPUs lower their clock and their link."""
    fields = ("pcie.link.gen.current", "pcie.link.width.current")
    fields += ("clocks.sm", "temperature.gpu", "power.draw")
    rows = query("pci.bus_id", "clocks_event_reasons.active", *fields)
    rows = rows or query("pci.bus_id", "clocks_throttle_reasons.active", *fields)  # older drivers
    loads = {place: amd_load(place) for place in places}
    for place, reasons, *values in rows:
        bits = int(reasons, 16) if reasons.startswith("0x") else 0
        throttled = [word for bit, word in THROTTLED.items() if bits & bit]
        values = map(number, values)
        keys = ("gen", "width", "clock", "heat", "power")
        loads[bus(place)] = {"throttled": throttled, **dict(zip(keys, values, strict=True))}
    return loads


def amd_load(place: str) -> dict:
    """The same for an AMD GPU, from its driver's files; {} without them. The driver throttles by
    the junction, the hottest place of the chip."""
    folder = root() / "sys/bus/pci/devices" / place  # also /sys/class/drm/card*/device
    sensors = next(folder.glob("hwmon/hwmon*"), None)
    if sensors is None:
        return {}
    labels = {read(file): file.name.removesuffix("_label") for file in sensors.glob("*_label")}
    spot = labels.get("junction", "temp1")
    heat, limit = ((number(read(sensors / f"{spot}_{x}")) or 0) / 1e3 for x in ("input", "crit"))
    draws = (read(sensors / f"power1_{x}") for x in ("average", "input"))
    power, cap = number(next(filter(None, draws), "")) or 0, number(read(sensors / "power1_cap"))
    clocks = re.findall(r"(\d+)Mhz( \*)?", read(folder / "pp_dpm_sclk"))  # *: the current one
    throttled = [POWER_CAP] if cap and power > 0.97 * cap else []
    if limit and heat > limit - 2:
        throttled.append(f"junction at its limit of {limit:.0f} °C")
    load = {"throttled": throttled, "heat": heat, "power": power / 1e6}
    load["clock"] = next((int(clock) for clock, mark in clocks if mark), None)
    return load | {"clock_max": max((int(clock) for clock, _ in clocks), default=None)}


def amd_gb(place: str, name: str) -> float:
    """GiB of an AMD GPU's memory; name: vram_total or vis_vram_total."""
    return (number(read(f"sys/bus/pci/devices/{place}/mem_info_{name}")) or 0) / 2**30


def gpu_line(gpu: dict, gpus: list[dict], name: str) -> tuple:
    """The line of a GPU. gpus: each one's facts, rates and load."""
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
    most = f" of {load['clock_max']:.0f}" if load.get("clock_max") else ""
    text += f", {load['clock']:.0f}{most} MHz" if load.get("clock") else ""
    text += f", {load['heat']:.0f} °C" if load.get("heat") else ""
    text += f", {load['power']:.0f} W" if load.get("power") else ""
    link = pcie_gb(gpu["bus"], load)
    text += f", {link[1]}" if link else ""

    why, fixes = [], []
    best = max(g["rates"]["bf16"] for g in gpus if g["name"] == gpu["name"] and "rates" in g)
    slow = rates["bf16"] < 0.9 * best
    throttled = load.get("throttled", [])
    if slow and throttled or set(throttled) - {POWER_CAP}:
        why.append(f"throttled: {', '.join(throttled)}")
        fixes.append("check cooling (a card without a fan needs a strong one) and power supply")
    if slow:
        why.append(f"{100 * rates['bf16'] / best:.0f}% of the fastest GPU")
        fixes.append("end other programs on it; compare power limits and cooling")
    elif min(shares.values(), default=1) < 0.5:
        why.append("less than half of its peak")
        fixes.append("end other programs on it; update driver and torch")
    return WARNING if why else OK, name, "; ".join([text, *why]), "; ".join(fixes)


def product_lines(gpu: dict) -> list:
    """Rates of a GPU's products in the model's shapes, and what becomes of small fp16 values."""
    if gpu.get("problem"):
        return []
    libraries = {f"default ({gpu['blas']})" if "blas" in gpu else "": gpu["products"]}
    if "hipblaslt" in gpu:
        libraries["TORCH_BLAS_PREFER_HIPBLASLT=1"] = gpu["hipblaslt"]
    lines = []
    for library, products in libraries.items():
        text = "output/input/weight gradient, TFLOP/s" + f", {library}" * bool(library)
        for dtype, weights in products.items():
            for weight, rates in weights.items():
                text += f"; {dtype} 1,024 x {weight} {'/'.join(f'{rate:.0f}' for rate in rates)}"
        lines.append((OK, "products", text, ""))
    if not gpu["subnormals"]:
        text = "products take fp16 values below 6e-5 for zero, so small gradients are lost"
        lines.append((WARNING, "products", text, "--dtype bf16"))
    return lines


# ---------------------------------------------------------------- links


def nvlinks() -> dict[int, list[float]]:
    """nvidia-smi's GPU index -> GB/s in one direction of each active NVLink."""
    gpus = {}
    for line in processes.tool("nvidia-smi", "nvlink", "-s").splitlines():
        if head := re.match(r"GPU (\d+):", line):
            links = gpus.setdefault(int(head[1]), [])
        elif link := re.match(r"\s+Link \d+: ([\d.]+) GB/s", line):
            links.append(float(link[1]))
    return gpus


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

    kinds: pair -> kind, as in device.link_table; links: see `nvlinks`."""
    nvlink = statistics.median([speed for speeds in links.values() for speed in speeds] or [0])
    expected = {}
    for (i, j), kind in kinds.items():
        pcie = [pcie_gb(gpus[k]["bus"], gpus[k]["load"]) for k in (i, j)]
        gb, name = min(pcie) if all(pcie) else (None, "")
        name += f" ({kind})" * (kind not in ("", "PCIe"))
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
