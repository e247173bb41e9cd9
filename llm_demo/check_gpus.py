"""What the vendors' tools and /sys say about the GPUs, for llm_demo.check.

Lines are as in check_machine. A GPU is identified by its bus address, as in "0000:0a:00.0"."""

from __future__ import annotations  # so that a Python that is too old gets as far as saying so

import contextlib
import os
import re
import statistics
from pathlib import Path

from llm_demo import check_process
from llm_demo.check_machine import ERROR, OK, VISIBLE, WARNING, number, read, root

GB_PER_LANE = {"2.5": 0.25, "5": 0.5, "5.0": 0.5, "8": 0.985, "8.0": 0.985, "16": 1.969}
GB_PER_LANE |= {"16.0": 1.969, "32": 3.938, "32.0": 3.938, "64": 7.563, "64.0": 7.563}
GB_PER_LANE_OF_GEN = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# GB/s of one NVLink in one direction, if nvidia-smi does not say; of XGMI between two GPUs.
NVLINK = {"sm_70": 25.8, "sm_80": 25.0, "sm_86": 14.1, "sm_90": 26.6, "sm_100": 53.1}
XGMI = {"gfx908": 46.0, "gfx90a": 50.0, "gfx942": 64.0}

# Bits of clocks_event_reasons.active that mean trouble under load.
SLOWED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
POWER_CAP = 0x4  # normal under full load


# ---------------------------------------------------------------- GPUs as the system sees them


def query(*fields: str, of: str = "gpu") -> list[dict]:
    """One dict for each GPU from nvidia-smi --query-...; [] if it does not know a field."""
    said = check_process.tool(
        "nvidia-smi", f"--query-{of}={','.join(fields)}", "--format=csv,noheader,nounits"
    )
    rows = ([cell.strip() for cell in line.split(",")] for line in said.splitlines())
    return [dict(zip(fields, row)) for row in rows if len(row) == len(fields)]  # noqa: B905


def bus(text: str) -> str:
    """00000000:0A:00.0 as Linux writes it: 0000:0a:00.0"""
    return text.lower()[-12:]


def nvidia() -> dict:
    """The driver, its CUDA version, and the GPUs (index, uuid, bus, used_gb) from nvidia-smi."""
    found = re.search(r"CUDA (?:UMD )?Version:\s*(\d+)\.(\d+)", check_process.tool("nvidia-smi"))
    rows = query("index", "uuid", "pci.bus_id", "memory.used", "driver_version")
    gpus = [
        {
            "index": int(row["index"]),
            "uuid": row["uuid"].removeprefix("GPU-"),
            "bus": bus(row["pci.bus_id"]),
            "used_gb": (number(row["memory.used"]) or 0) / 1024,
        }
        for row in rows
        if row["index"].isdecimal()
    ]
    return {
        "driver": rows[0]["driver_version"] if rows else "",
        "cuda": tuple(map(int, found.groups())) if found else None,
        "gpus": gpus,
    }


def match(devices: list[dict], gpus: list[dict]) -> list[dict]:
    """nvidia-smi's entry for each PyTorch device, {} if there is none. The order may differ, since
    CUDA_VISIBLE_DEVICES hides and reorders devices."""
    found = []
    for i, device in enumerate(devices):
        rows = [g for g in gpus if device.get("uuid") and g["uuid"] == device["uuid"]]
        rows = rows or [g for g in gpus if device.get("bus") and g["bus"] == device["bus"]]
        if not rows and not os.environ.get("CUDA_VISIBLE_DEVICES"):
            rows = [g for g in gpus if g["index"] == i]
        found.append(rows[0] if rows else {})
    return found


def under_load() -> dict[str, dict]:
    """bus -> clock, throttle reasons, temperature and PCIe link, from nvidia-smi.

    Call it while the GPUs are busy: idle GPUs lower their clock and their link."""
    fields = ("pcie.link.gen.current", "pcie.link.width.current")
    fields += ("pcie.link.gen.max", "pcie.link.width.max", "clocks.sm", "temperature.gpu")
    rows = query("pci.bus_id", "clocks_event_reasons.active", *fields)
    rows = rows or query("pci.bus_id", "clocks_throttle_reasons.active", *fields)
    found = {}
    for row in rows:
        place, reasons, gen, width, gen_max, width_max, clock, heat = row.values()
        with contextlib.suppress(ValueError):
            reasons = int(reasons, 16)
        found[bus(place)] = {
            "reasons": reasons if isinstance(reasons, int) else 0,
            "gen": number(gen), "width": number(width), "gen_max": number(gen_max),
            "width_max": number(width_max), "clock": number(clock), "heat": number(heat),
        }  # fmt: skip
    return found


def merge_loads(loads: list[dict]) -> dict[str, dict]:
    """One reading from several: all throttle reasons, the highest figures."""
    merged = {}
    for load in loads:
        for place, now in load.items():
            before = merged.setdefault(place, dict(now))
            before["reasons"] |= now["reasons"]
            for key in ("gen", "width", "clock", "heat"):
                before[key] = max(before.get(key) or 0, now.get(key) or 0) or None
    return merged


def memory_faults(places: list[str]) -> dict[str, list[str]]:
    """bus -> memory faults: ECC errors, rows waiting to be remapped."""
    found = {place: [] for place in places}

    def note(place, text):
        if place in found:
            found[place].append(text)

    for row in query("pci.bus_id", "ecc.errors.uncorrected.volatile.total"):
        if count := number(row["ecc.errors.uncorrected.volatile.total"]):
            note(bus(row["pci.bus_id"]), f"{count:.0f} uncorrected ECC errors since the last reset")
    fields = ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")
    for row in query(*fields, of="remapped-rows"):
        place, pending, failure = row.values()
        if pending.lower() in ("yes", "1"):
            note(bus(place), "memory rows are waiting for a reset to be remapped")
        if failure.lower() in ("yes", "1"):
            note(bus(place), "remapping memory rows failed")
    for place in places:  # AMD
        for file in sorted((root() / f"sys/bus/pci/devices/{place}/ras").glob("*_err_count")):
            count = re.search(r"ue:\s*(\d+)", read(f"sys/bus/pci/devices/{place}/ras/{file.name}"))
            if count and int(count[1]):
                note(place, f"{count[1]} uncorrectable errors in {file.name.split('_')[0]}")
    return found


def amd_gpu(place: str) -> dict:
    """What the amdgpu driver says about the GPU at a bus address: GB and MHz."""
    folder = f"sys/bus/pci/devices/{place}"
    sizes = {
        key: (number(read(f"{folder}/mem_info_{name}")) or 0) / 2**30
        for key, name in (
            ("used", "vram_used"),
            ("all", "vram_total"),
            ("visible", "vis_vram_total"),
        )
    }
    clocks = re.findall(r"(\d+)Mhz( \*)?", read(f"{folder}/pp_dpm_sclk"), re.I)
    now = next((int(mhz) for mhz, star in clocks if star), None)
    return {**sizes, "clock": now, "clock_max": max((int(m) for m, _ in clocks), default=None)}


def amd_under_load(places: list[str]) -> dict[str, dict]:
    """As `under_load`, as far as the amdgpu driver says: bus -> clock."""
    return {place: {"reasons": 0, "clock": amd_gpu(place)["clock"]} for place in places}


# ---------------------------------------------------------------- each GPU


def gpu_lines(gpus: list[dict], used: list[float]) -> list:
    """One line for each GPU. gpus: facts, rates, load and memory faults of each; used: GB that
    other programs held before the check started."""
    best = {}
    for gpu in gpus:
        if gpu.get("rates"):
            best[gpu["name"]] = max(best.get(gpu["name"], 0), gpu["rates"]["bf16"])
    lines = []
    for i, gpu in enumerate(gpus):
        name = f"gpu {i}"
        text = f"{gpu['name']}, {gpu['arch']}, {gpu['memory_gb']:.0f} GB"
        if gpu.get("problem"):
            fix = "look for GPU errors: sudo dmesg | grep -iE 'xid|amdgpu'; is its memory full?"
            if "busy or unavailable" in gpu["problem"]:
                fix = "end the program that has it for itself, or sudo nvidia-smi -c DEFAULT"
            lines.append((ERROR, name, f"{text}: matrix product failed: {gpu['problem']}", fix))
            continue
        shares = {}
        said = []
        for dtype, rate in gpu["rates"].items():
            peak = gpu["peak"].get(dtype)
            shares[dtype] = rate / peak if peak else None
            of_peak = f" ({100 * rate / peak:.0f}%)" if peak else ""
            said.append(f"{dtype} {rate:.0f}{of_peak}")
        text += f": {', '.join(said)} TFLOP/s"
        text += " (% of peak)" if any(shares.values()) else " (its peak is not known here)"
        text += _load_text(gpu)
        level, fixes, why = OK, [], []
        reasons = [word for bit, word in SLOWED.items() if gpu["load"].get("reasons", 0) & bit]
        if reasons:
            why.append(f"throttled: {', '.join(reasons)}")
            fixes.append("check cooling and power supply; nvidia-smi -q -d PERFORMANCE")
        if gpu["rates"]["bf16"] < 0.9 * best[gpu["name"]]:
            why.append(f"{100 * gpu['rates']['bf16'] / best[gpu['name']]:.0f}% of the fastest GPU")
            if gpu["load"].get("reasons", 0) & POWER_CAP:
                why.append("at its power cap")
            fixes.append("end other programs on it; compare power limits and cooling")
        elif any(part and part < 0.5 for part in shares.values()):
            why.append("less than half of its peak")
            fixes.append("end other programs on it; update driver and torch")
        if gpu["load"].get("width") and gpu["load"]["width"] < (gpu["load"]["width_max"] or 0):
            why.append(f"PCIe x{gpu['load']['width']:.0f} of x{gpu['load']['width_max']:.0f} lanes")
            fixes.append("reseat the card or use a full-width slot")
        if used[i] > max(1, 0.05 * gpu["memory_gb"]):
            why.append(f"{used[i]:.1f} GB in use by other programs")
            fixes.append("find them with nvidia-smi or rocm-smi --showpids")
        if gpu["faults"]:
            why += gpu["faults"]
            fixes.append("reset the GPU or reboot; if the errors return, replace it")
        if why:
            level, text = WARNING, f"{text}; {'; '.join(why)}"
        lines.append((level, name, text, "; ".join(fixes)))
    return lines


def _load_text(gpu: dict) -> str:
    load = gpu["load"]
    said = f", {load['clock']:.0f} MHz" if load.get("clock") else ""
    said += f", {load['heat']:.0f} °C" if load.get("heat") else ""
    link = pcie_gb(gpu["bus"], load) if gpu["bus"] else None
    return said + (f", {link[1]}" if link else "")


def nvlink_lines(links: dict, indices: list[int]) -> list:
    """A warning if some GPUs have fewer active NVLinks than the others."""
    active = {
        i: sum(bool(speed) for speed in links[index])
        for i, index in enumerate(indices)
        if index in links
    }
    most = max(active.values(), default=0)
    few = [i for i, count in active.items() if count < most]
    if not few:
        return []
    said = ", ".join(f"GPU {i} has {active[i]}" for i in few)
    fix = "reset the GPU; nvidia-smi nvlink -s and nvlink -e show the links"
    return [(WARNING, "nvlink", f"{said} of {most} links active", fix)]


# ---------------------------------------------------------------- links


def expected_gb(gpus: list[dict], kinds: dict, links: dict, indices: list[int]) -> dict:
    """pair -> (GB/s in one direction, name) of its link; None if unknown.

    kinds: pair -> name in `topology`; links: see `nvlinks`; indices: nvidia-smi's index of each."""
    pcie = [pcie_gb(gpu["bus"], gpu["load"]) if gpu["bus"] else None for gpu in gpus]
    speeds = [speed for found in links.values() for speed in found if speed]
    nvlink = statistics.median(speeds) if speeds else None
    return {
        (i, j): link_gb(kind, gpus[i]["arch"], nvlink, [pcie[i], pcie[j]])
        for (i, j), kind in kinds.items()
    }


def topology() -> dict[tuple[int, int], str]:
    """(i, j) -> the link between GPUs i and j of the vendor's tool: NV18, PIX, SYS, XGMI ..."""
    for command in (("nvidia-smi", "topo", "-m"), ("rocm-smi", "--showtopotype")):
        rows = [line.split() for line in check_process.tool(*command).splitlines()]
        rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and len(row) > 1]
        rows = [row[1:] for row in rows if not row[1].startswith("GPU")]  # the table's head
        n = len(rows)
        if n > 1 and all(len(row) >= n for row in rows):
            return {(i, j): rows[i][j] for i in range(n) for j in range(n) if i != j}
    return {}


def nvlinks() -> dict[int, list[float | None]]:
    """nvidia-smi's GPU index -> GB/s in one direction of each NVLink, None for an inactive one."""
    found = {}
    for line in check_process.tool("nvidia-smi", "nvlink", "-s").splitlines():
        if head := re.match(r"GPU (\d+):", line):
            links = found.setdefault(int(head[1]), [])
        elif (link := re.match(r"\s+Link \d+: (.*)", line)) and found:
            links.append(number(link[1]))
    return {gpu: links for gpu, links in found.items() if links}


def pcie_gb(place: str, load: dict) -> tuple[float, str] | None:
    """(GB/s in one direction, name) of a GPU's PCIe link; None if unknown."""
    if load.get("gen") and load.get("width"):
        gen, width = int(load["gen"]), int(load["width"])
        gb = GB_PER_LANE_OF_GEN.get(gen, 0) * width
        return (gb, f"PCIe {gen} x{width}") if gb else None
    # AMD cards contain a PCIe switch: the slot's link is above it. The slowest link counts.
    folder, slowest = root() / "sys/bus/pci/devices" / place, None
    folder = Path(os.path.realpath(folder))
    while re.match(r"[0-9a-f]{4}:", folder.name):
        with contextlib.suppress(OSError):
            speed = (folder / "current_link_speed").read_text().split()[0]
            lanes = int((folder / "current_link_width").read_text())
            gb = GB_PER_LANE.get(speed, 0) * lanes
            if gb and (slowest is None or gb < slowest[0]):
                slowest = gb, f"PCIe {speed} GT/s x{lanes}"
        folder = folder.parent
    return slowest


def link_gb(kind: str, arch: str, nvlink: float | None, pcie: list) -> tuple[float, str] | None:
    """(GB/s in one direction, name) of the link between two GPUs; None if unknown.

    kind: from `topology`; nvlink: GB/s of one NVLink; pcie: `pcie_gb` of both GPUs."""
    if lanes := re.fullmatch(r"NV(\d+)", kind):
        speed = nvlink or NVLINK.get(arch)
        return (int(lanes[1]) * speed, f"NVLink x{lanes[1]}") if speed else None
    if kind == "XGMI":
        return (XGMI[arch], kind) if arch in XGMI else None
    if all(pcie):
        gb, name = min(pcie)
        return gb, f"{name} ({kind})" if kind else name
    return None


def iommu(places: list[str]) -> str:
    """What the IOMMU does for these GPUs: "off", "passthrough", "translating" or "unknown"."""
    line = read("proc/cmdline")
    if not any((root() / "sys/class/iommu").glob("*")):
        return "off" if (root() / "sys/class").is_dir() else "unknown"
    kinds = {read(f"sys/bus/pci/devices/{place}/iommu_group/type") for place in places} - {""}
    if kinds:
        return "passthrough" if kinds == {"identity"} else "translating"
    if re.search(r"\b(iommu=pt|iommu\.passthrough=1)\b", line):
        return "passthrough"
    return "off" if re.search(r"\b(amd_|intel_)?iommu=off\b", line) else "translating"


def acs_bridges() -> int:
    """How many PCIe bridges have Access Control Services on; 0 also if lspci can't say."""
    return len(re.findall(r"ACSCtl:.*SrcValid\+", check_process.tool("lspci", "-vvv")))


def isolation(places: list[str], amd: bool, all_right: bool) -> list:
    """IOMMU and ACS: both can break or slow peer-to-peer between GPUs."""
    state, bridges = iommu(places), acs_bridges()
    text = f"{state}, ACS on at {bridges} bridges" if bridges else state
    if state == "translating" and amd:
        fix = "add iommu=pt to the kernel command line (in /etc/default/grub, say) and reboot"
        text += ", without iommu=pt: RCCL warns of hangs and instability"
        return [(WARNING, "iommu", text, fix)]
    if not all_right and (state == "translating" or bridges):
        fix = "boot with iommu=pt and disable ACS in the BIOS, then check again"
        return [(WARNING, "iommu", f"{text}: a likely cause of the errors above", fix)]
    return [(OK, "iommu", text, "")]


# ---------------------------------------------------------------- AMD


def amd_settings(devices: list[dict], kinds: set[str]) -> list:
    """Settings named in reports of other users: see docs/check.md."""
    lines = []
    env = os.environ
    said = {k: env[k] for k in VISIBLE if env.get(k)}
    if len(said) > 1:
        text = ", ".join(f"{k}={v}" for k, v in said.items())
        fix = "set only CUDA_VISIBLE_DEVICES, which AMD honours too"
        lines.append((WARNING, "visible GPUs", f"{text}: each renumbers what is left", fix))
    over_pcie = len(devices) > 1 and "XGMI" not in kinds
    if over_pcie and env.get("HSA_FORCE_FINE_GRAIN_PCIE") != "1":
        text = "HSA_FORCE_FINE_GRAIN_PCIE is not 1; RCCL wants it for peer-to-peer over PCIe"
        lines.append((WARNING, "rccl", text, "export HSA_FORCE_FINE_GRAIN_PCIE=1"))
    for i, device in enumerate(devices):
        memory = amd_gpu(device.get("bus", ""))
        if 0 < memory["visible"] < memory["all"]:
            text = f"GPU {i} exposes {memory['visible']:.1f} of {memory['all']:.0f} GB on the bus"
            fix = "enable Above 4G Decoding and Resizable BAR in the BIOS"
            lines.append((WARNING, "large BAR", f"{text}: no peer-to-peer", fix))
    config = read(f"boot/config-{os.uname().release}")
    if over_pcie and config and "CONFIG_HSA_AMD_P2P=y" not in config:
        text = "this kernel lacks CONFIG_HSA_AMD_P2P: no peer-to-peer over PCIe"
        lines.append((WARNING, "kernel", text, "use a kernel built with it"))
    rocm = read("opt/rocm/.info/version") or "not in /opt/rocm"
    names = ("HSA_", "HIP_", "ROCR_", "NCCL_", "RCCL_", "TORCH_BLAS", "PYTORCH_TUNABLE")
    mine = " ".join(f"{k}={v}" for k, v in sorted(env.items()) if k.startswith(names))
    lines.append((OK, "rocm", f"ROCm {rocm}; {mine or 'no HSA, HIP or NCCL variable is set'}", ""))
    return lines
