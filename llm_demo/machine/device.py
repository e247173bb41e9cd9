"""The device this machine computes with; all decisions by vendor and architecture are made here."""

import contextlib
import functools
import os
import re
import subprocess
import weakref
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import psutil
import torch

from llm_demo.core.errors import UserError
from llm_demo.machine.cards import CARDS, PEAK_TFLOPS, Device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Environment variables, by prefix, that decide which kernels run.
KERNEL_VARIABLES = (
    "TORCH_ROCM_",
    "TORCH_BLAS_",
    "TORCH_CUDNN_",
    "TORCHINDUCTOR_",
    "FLASH_ATTENTION_",
    "CUDNN_",
    "CUBLAS_",
    "CUBLASLT_",
    "ROCBLAS_",
    "HIPBLASLT_",
    "HSA_OVERRIDE_",
)

# Files of a control group, version 1 and 2: its memory limit, its usage, page cache within that.
GROUP_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", r"^total_(?:in)?active_file (\d+)"
GROUP_V2 = "memory.max", "memory.current", r"^(?:in)?active_file (\d+)"


_planned = {}  # "card": what plan_for named


def plan_for(card: str) -> None:
    """Let `this_device` be a card of CARDS from now on, for estimates; "": the real one again."""
    _planned.clear()
    if card:
        _planned["card"] = CARDS[card]


def planned() -> bool:
    """Whether `this_device` is a card that may not be here, so that nothing can be tried on it."""
    return bool(_planned)


def this_device(index: int = 0) -> Device:
    """The accelerator with this index, or the CPU."""
    if planned():
        return _planned["card"]
    if not torch.cuda.is_available():
        return Device(f"CPU, {os.cpu_count()} cores", "", 0.0)
    props = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        # get_device_capability() is (9, 0) on an MI100, the same as Hopper's; gcnArchName is right.
        arch = props.gcnArchName.split(":")[0]
    else:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(index))
    memory_gb = props.total_memory / 2**30
    return Device(props.name, arch, memory_gb, props.multi_processor_count)


def drawn_on() -> str:
    """What random numbers depend on, apart from the seed: the model of the GPU, or "CPU"."""
    device = this_device()
    return device.name if device.type == "cuda" else "CPU"


def is_sm(device: Device, least: int) -> bool:
    """Whether this is an NVIDIA GPU of at least this generation: 80 is Ampere, 90 Hopper."""
    return device.vendor == "nvidia" and int(device.arch.removeprefix("sm_")) >= least


def has_fused_kernels(device: Device) -> bool:
    """Whether libraries have fused kernels of attention for a GPU."""
    amd = ("gfx90a", "gfx942", "gfx950", "gfx11", "gfx12")
    return is_sm(device, 80) or device.vendor == "amd" and device.arch.startswith(amd)


def _has_code(device: Device) -> bool:
    """Whether this PyTorch has code for a GPU: its own, of an older minor version, or PTX."""
    archs = [arch.split(":")[0] for arch in torch.cuda.get_arch_list()]
    if device.vendor == "amd":  # "gfx11-generic" and "amdgcnspirv" stand for many
        generic = any(not re.fullmatch("gfx[0-9a-f]+", arch) for arch in archs)
        return not archs or generic or device.arch in archs
    mine = int(device.arch.removeprefix("sm_"))
    older = [(arch[:2], int(re.sub(r"\D", "", arch))) for arch in archs]
    older = [(kind, number) for kind, number in older if number <= mine]
    return not archs or any(k == "co" or number // 10 == mine // 10 for k, number in older)


def no_code(device: Device) -> str:
    """ "" if this PyTorch has code for a GPU, else what to do."""
    if _has_code(device):
        return ""
    if device.vendor == "nvidia":
        return "install a PyTorch build that has it: those for CUDA 12.6 have sm_50 to sm_90"
    names = []
    for line in Path(__file__).with_name("rocm_builds.txt").read_text("utf-8").splitlines():
        name, *archs = line.split()
        if name != "#" and device.arch in archs:
            names.append(name)
    if not names:
        return "none of PyTorch's ROCm builds has it"
    return (
        f"{' and '.join(names)} have it: leave any environment that has this torch, rm -r .venv, "
        f"TORCH_BUILD={names[-1]} bash setup.sh"
    )


def only(gpus: Iterable[int]) -> tuple[str, str]:
    """(name, value) of an environment variable that hides all but these of the visible GPUs."""
    amd = torch.version.hip is not None and os.environ.get("HIP_VISIBLE_DEVICES")
    name = "HIP_VISIBLE_DEVICES" if amd else "CUDA_VISIBLE_DEVICES"  # ROCm prefers the former
    each = os.environ.get(name)
    each = each.split(",") if each else range(torch.cuda.device_count())
    return name, ",".join(str(each[i]) for i in gpus)


def cards() -> tuple[list[int], str, tuple[str, str] | None]:
    """(the visible GPUs that training uses, a line on the others or "", how to hide them).

    On AMD, processors' integrated GPUs beside cards and GPUs without code are left out. NVIDIA's
    are not looked at: that would start the driver in the launcher."""
    visible = list(range(torch.cuda.device_count()))
    gpus = [] if torch.version.hip is None else [this_device(i) for i in visible]
    able = [i for i, gpu in enumerate(gpus) if not no_code(gpu)]
    cards_alone = [i for i in able if not torch.cuda.get_device_properties(i).is_integrated]
    kept = cards_alone or able or visible
    others = [f"{gpus[i].name} ({gpus[i].arch})" for i in visible if i not in kept]
    if not others:
        return visible, "", None
    name, value = only(kept)
    line = f"not used, integrated or without code in this PyTorch: {', '.join(others)}"
    return kept, f"{line}; {name}={value}", (name, value)


def refuse_gpus(gpus: Iterable[int]) -> None:
    """Raises UserError unless this PyTorch has code for these GPUs, and all are of one kind."""
    kinds = {}
    for i in gpus:
        device = this_device(i)
        fix = no_code(device)
        if fix:
            lack = f"torch {torch.__version__} has no code for {device.arch}"
            raise UserError(f"GPU {i}, {device}: {lack}: {fix}")
        kinds.setdefault((device.name, device.arch, device.units), []).append(i)
    if len(kinds) > 1:
        each = ", ".join(
            f"GPU {', '.join(map(str, alike))}: {this_device(alike[0])}" for alike in kinds.values()
        )
        name, _ = only(gpus)
        raise UserError(f"the GPUs of a run must be of one kind, not {each}: pick some by {name}")


def pick_dtype(asked: str, device: Device) -> tuple[torch.dtype, str]:
    """The compute dtype for --dtype `asked`, and the reason. Raises UserError for no bf16."""
    if asked != "auto":
        if asked == "bf16" and device.vendor == "nvidia" and not is_sm(device, 80):
            raise UserError(f"--dtype bf16: {device.name} ({device.arch}) has no bf16: use fp16")
        return DTYPES[asked], "as requested"
    if device.type == "cpu":
        return torch.float32, "exact, and a CPU gains little from lower precision"
    if device.vendor == "nvidia" and not is_sm(device, 80):
        return torch.float16, f"{device.arch} has no bf16"
    if device.arch == "gfx908":
        return torch.bfloat16, "needs no loss scaling; on gfx908 fp16 has twice its matrix rate"
    return torch.bfloat16, "needs no loss scaling"


def prepare_device(args, world) -> tuple[tuple[Device, torch.dtype], list[str]]:
    """((the device, planned for or real; the compute dtype), lines). Limits the GPU's memory.
    world: core.mesh.World, whose import takes too long for a launcher."""
    plan_for(args.card)
    device, lines = this_device(world.device.index or 0), []
    if args.device_memory_gb:
        if not args.estimate:  # which is also for other machines
            limit_memory(world.device, args.device_memory_gb)
        lines.append(f"memory: at most {args.device_memory_gb:g} GiB of each GPU")
    dtype, why = pick_dtype(args.dtype, device)
    lines += [
        f"device: {world.size} x {device}",
        f"dtype: {dtype_name(dtype)} ({why}); weights and optimizer states in fp32",
    ]
    return (device, dtype), lines


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, each in DTYPES.items() if each == dtype)


def peak_tflops(device: Device, dtype: torch.dtype) -> float | None:
    """Dense matrix peak in TFLOP/s of one device; None if unknown, never a guess."""
    column = list(DTYPES.values()).index(dtype)
    label = f"{device.name} {device.arch} {device.units}"
    return next((peaks[column] for key, peaks in PEAK_TFLOPS.items() if key in label), None)


def _amd_links(root: Path) -> list[str]:
    """As `links`, from what the kernel says of AMD's GPUs."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    gpus, kinds = set(), []
    for file in nodes.glob("*/properties"):
        with contextlib.suppress(OSError):  # unreadable if a container lacks this GPU
            facts = dict(line.split() for line in file.read_text("utf-8").splitlines())
            if facts.get("gfx_target_version", "0") != "0":  # 0 for a CPU
                gpus.add(file.parent.name)
    for node in gpus:
        for file in nodes.glob(f"{node}/io_links/*/properties"):
            facts = dict(line.split() for line in file.read_text("utf-8").splitlines())
            if facts["node_to"] in gpus:
                kinds.append(facts["type"])
    if len(gpus) < 2:
        return []
    return ["XGMI"] if "11" in kinds else ["PCIe"]


@functools.cache
def links(root: Path = Path("/")) -> list[str]:
    """The kinds of links between this node's GPUs, hidden ones included: "NV18", "PIX", "XGMI",
    "PCIe". The first two GPUs' link comes first. Empty if unknown. root: where /sys is."""
    kinds = _amd_links(root)
    if kinds:
        return kinds
    tool = ["nvidia-smi", "topo", "-m"]
    try:
        table = subprocess.run(tool, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    # "GPU0 X NV18 ..."; the table's header is indented
    rows = [line.split()[1:] for line in table.splitlines() if line.startswith("GPU")]
    for i, row in enumerate(rows):
        kinds += row[i + 1 : len(rows)]
    return list(dict.fromkeys(kinds))


def other_than_nvlink() -> str:
    """The kinds of links between this node's GPUs, "this link" if unknown; "" if all are NVLink."""
    kinds = links()
    if kinds and all(kind.startswith("NV") for kind in kinds):
        return ""
    return ", ".join(kinds) or "this link"


def limit_memory(device: torch.device, gb: float) -> None:
    """Let PyTorch take at most `gb` * 2**30 bytes of a GPU. Raises UserError if it has less."""
    if device.type != "cuda":
        raise UserError("--device_memory_gb limits GPU memory, and there is no GPU")
    have = torch.cuda.get_device_properties(device).total_memory / 2**30
    if gb > have:
        raise UserError(f"--device_memory_gb {gb:g}: the GPU has {have:.1f} GiB")
    torch.cuda.set_per_process_memory_fraction(gb / have, device)


def pin(memory: torch.Tensor, owner: object) -> bool:
    """Lock host memory in place until `owner` is freed, so that a GPU copies without the host.
    PyTorch would round what it pins up to a power of two. Returns whether it worked."""
    runtime, at = torch.cuda.cudart(), memory.data_ptr()
    if runtime.cudaHostRegister(at, memory.nbytes, 1) != runtime.cudaError.success:
        return False
    # unlock before the memory is freed, else copies to its next owner fail
    weakref.finalize(owner, runtime.cudaHostUnregister, at).atexit = False
    return True


def cores_near(device: torch.device, sysfs: Path = Path("/sys")) -> list[int]:
    """The CPU cores of a GPU's NUMA node, [] if unknown. sysfs: where the kernel describes it."""
    if device.type != "cuda":
        return []
    props = torch.cuda.get_device_properties(device)
    try:
        name = f"{props.pci_domain_id:04x}:{props.pci_bus_id:02x}:{props.pci_device_id:02x}.0"
        text = (sysfs / f"bus/pci/devices/{name}/local_cpulist").read_text("utf-8")
    except (AttributeError, OSError):  # an old PyTorch
        return []
    cores = []
    for span in text.strip().split(","):  # "0-3" or "5"
        first, _, last = span.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still take: what is free, at most what the memory
    limits of its control groups leave (containers, Slurm). Page cache is free: the kernel drops it
    first. root: where /proc and /sys are."""
    free = psutil.virtual_memory().available
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:  # macOS
        return free
    for line in lines:  # "0::/path" in version 2, "4:memory:/path" in version 1
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        limit, taken, cache = GROUP_V1 if controllers else GROUP_V2
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            folder = top / group.relative_to("/")
            try:
                allowed = int((folder / limit).read_text("utf-8"))
                used = int((folder / taken).read_text("utf-8"))
                cached = re.findall(cache, (folder / "memory.stat").read_text("utf-8"), re.M)
            except (OSError, ValueError):  # a container does not see the groups above; no limit
                continue
            free = min(free, max(0, allowed - used + sum(map(int, cached))))
    return free
