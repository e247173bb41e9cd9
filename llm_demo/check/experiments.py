"""The experiments. A process of its own runs each, because it may hang or crash."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from llm_demo.check.lines import OK, WARNING
from llm_demo.check.processes import probe_root, serve, tool
from llm_demo.core.errors import UserError
from llm_demo.machine import device as hardware
from llm_demo.machine import probes
from llm_demo.machine.device import DTYPES, this_device
from llm_demo.machine.dist import stay_on_loopback
from llm_demo.machine.text import words_of

HEADS = [16, 8, 128, 128]  # of Qwen3-0.6B, as attention.Heads


def torch_facts() -> dict:
    """Versions and devices as PyTorch sees them."""
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    facts |= {"devices": [], "why": "", "left_out": "", "refused": ""}
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as e:
            facts["why"] = str(e).strip().splitlines()[0]
        return facts
    kept, facts["left_out"], facts["only"] = hardware.cards()
    try:
        hardware.refuse_gpus(kept)
    except UserError as e:
        facts["refused"] = str(e)
    dtype, _ = hardware.pick_dtype("auto", this_device(kept[0]))
    facts["dtype"] = hardware.dtype_name(dtype)
    buses = []
    for i in kept:
        gpu, properties = this_device(i), torch.cuda.get_device_properties(i)
        peak = {name: hardware.peak_tflops(gpu, dtype) for name, dtype in DTYPES.items()}
        facts["devices"].append({"vendor": gpu.vendor, "name": str(gpu), "peak": peak})
        place = [getattr(properties, f"pci_{k}_id", 0) for k in ("domain", "bus", "device")]
        buses.append("{:04x}:{:02x}:{:02x}.0".format(*place))
    facts["links"] = links_between(buses)
    with contextlib.suppress(Exception):  # a build without NCCL
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def links_between(buses: list[str]) -> list[list[str]]:
    """The kind of link between each two GPUs with these bus addresses, "" if unknown."""
    table = hardware.link_table(probe_root())
    listed = tool("nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader") or ""
    numbers = {bus.lower()[-12:]: str(i) for i, bus in enumerate(listed.split())}
    names = [numbers.get(bus, bus) for bus in buses]  # AMD's GPUs are named by address
    return [[table.get((a, b), "") for b in names] for a in names]


def choices() -> dict:
    """ "lines": what a run would choose for dtype, attention and torch.compile, and why. Attention
    is tried on the GPU."""
    from llm_demo.run.choices import choose_attention, choose_compile

    device = this_device()
    dtype, reason = hardware.pick_dtype("auto", device)
    lines = [(OK, "dtype", f"{dtype} by default: {reason}", "")]

    def probe(name, dtype, impl, *heads, versions=()):
        problem = probes.try_once(name, dtype, impl, *heads, versions=versions)
        if problem:
            fix = "nothing to do, another backend is used; a newer driver or torch may help"
            lines.append((WARNING, "attention", f"{impl} fails: {problem}", fix))
        return problem

    for kind, single in (("one document per row", True), ("packed rows", False)):
        impl, against = choose_attention("auto", device, dtype, HEADS, single, probe=probe)
        text = f"{impl} for {kind}" + "".join(f"; not {why}" for why in against)
        lines.append((OK, "attention", text, ""))
    compiled, why = choose_compile(None, device, impl, probe=lambda *given: None)
    lines.append((OK, "compile", f"{'on' if compiled else 'off'} by default: {why}", ""))
    return {"lines": lines}


def rates(device: str, seconds: float = 0.7, size: int = 8192) -> dict:
    """ "rates": TFLOP/s of square products on a device, by dtype, `seconds` for each."""
    found = {}
    if device != "cpu":
        torch.cuda.set_device(device)
    for name, dtype in DTYPES.items():
        ones = torch.ones(256, 256, device=device, dtype=dtype)
        if not bool((ones @ ones == 256).all()):
            return {"problem": f"a product of ones in {dtype} is not 256 everywhere"}
        # random, because zeros draw less power and run faster
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.mm(a, b)
        spent = seconds_of(partial(torch.mm, a, b, out=out), seconds)
        found[name] = 2 * size**3 / spent / 1e12
    return {"rates": found}


def seconds_of(run: Callable, least: float) -> float:
    """Seconds that run() takes, on the current device too; measured for `least` seconds."""
    return mean(run, 1 + int(least / mean(run, 1)))


def mean(run: Callable, times: int) -> float:
    """Seconds of run(), which the timer follows by waiting for the device."""
    return Timer("run()", globals={"run": run}).timeit(times).mean


def kernels(device: str, dtype: str) -> dict:
    """ "fault": what is wrong with a compiled block and our loss kernel, None if nothing is;
    "launch_us": microseconds of a kernel's launch."""
    try:
        fault = probes.compiled(dtype, "sdpa", device)
    except Exception as e:
        fault = words_of(e)
    x = torch.zeros(1, device=device)
    return {"fault": fault, "launch_us": 1e6 * seconds_of(lambda: x.add_(1), 0.1)}


def group(device: str, members: list[int], rank: int, meeting: str, limit: float) -> dict:
    """Form a group of processes through the file `meeting`; verify and time sends and all-reduces.
    Drivers report peer-to-peer as working where it hangs or returns wrong values, so every received
    value is compared. members: the indices of the group's GPUs.

    Returns "wrong": operation -> wrong elements, "elements": how many were compared, and the rate
    in GB/s (1e9 bytes) over one GPU's link: "all_reduce"; for two processes also "latency_us" of
    one small send. limit: seconds for an operation, after which PyTorch ends the process."""
    size, backend, options = len(members), "gloo", {}
    if device != "cpu":
        torch.cuda.set_device(device)
        backend, options = "cpu:gloo,cuda:nccl", {"device_id": torch.device(device)}
    stay_on_loopback()
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=limit),
        **options,
    )
    wrong, elements = verify(device, rank, size)
    speeds = link_speed(device, rank, size)
    ranks = [None] * size  # objects use gloo, as in training; when they are there, all are done
    dist.all_gather_object(ranks, rank)
    wrong["all_gather_object"] = int(ranks != list(range(size)))
    dist.destroy_process_group()
    return {"wrong": wrong, "elements": elements, **speeds}


def numbers(device: str, n: int, rank: int, turn: int) -> torch.Tensor:
    """int32 [n] that depend on place, rank and turn, so that stale values are detected."""
    places = torch.arange(n, dtype=torch.int32, device=device)
    return places.mul_(3).add_(1000 * turn + 7 * rank + 1)


def verify(device: str, rank: int, size: int) -> tuple[dict[str, int], int]:
    """({operation: wrong elements}, elements compared)"""
    wrong, elements, turn = {"send": 0, "all_reduce": 0}, 0, 0
    # NCCL has different protocols for small, medium and large messages
    lengths = (1 << 8, 1 << 18) if device == "cpu" else (1 << 8, 1 << 18, 1 << 24)
    for n in (n for n in lengths for _ in range(2)):
        turn += 1
        for source in range(2) if size == 2 else ():
            if rank == source:
                dist.send(numbers(device, n, rank, turn), dst=1 - source)
            else:
                got = torch.full((n,), -1, dtype=torch.int32, device=device)
                dist.recv(got, src=source)
                wrong["send"] += int((got != numbers(device, n, source, turn)).sum())
                elements += n
        total = numbers(device, n, rank, turn)
        dist.all_reduce(total)
        expected = sum(numbers(device, n, r, turn).long() for r in range(size))
        wrong["all_reduce"] += int((total.long() != expected).sum())
        elements += n
    return wrong, elements


def link_speed(device: str, rank: int, size: int) -> dict[str, float]:
    """GB/s of an all-reduce over one GPU's link; of two processes also a send's latency in µs."""
    one = torch.zeros(1, device=device)
    data = torch.zeros((1 if device == "cpu" else 64) << 20, device=device)

    def there_and_back():
        for source in range(2):
            if rank == source:
                dist.send(one, 1 - rank)
            else:
                dist.recv(one, 1 - rank)

    gb = data.numel() * 4 / 1e9 * 2 * (size - 1) / size
    speeds = {"all_reduce": gb / mean(partial(dist.all_reduce, data), 6)}
    if size == 2:
        speeds["latency_us"] = mean(there_and_back, 50) / 2 * 1e6
    return speeds


TASKS = {f.__name__: f for f in (torch_facts, choices, rates, kernels, group)}

if __name__ == "__main__":
    serve(TASKS)
