"""The experiments. A process of its own runs each, because it may hang or crash."""

import contextlib
import functools
import itertools
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

from llm_demo.check.lines import AT_LIMIT, OK, WARNING
from llm_demo.check.processes import ROOT, probe_root, serve, tool
from llm_demo.core.errors import UserError
from llm_demo.machine import device as hardware
from llm_demo.machine.device import DTYPES, this_device
from llm_demo.machine.dist import stay_on_loopback
from llm_demo.machine.text import words_of

HEADS = [16, 8, 128, 128]  # of Qwen3-0.6B, as attention.Heads
HIDDEN, WIDTHS, VOCABULARY = 1024, (3072, 151_936), 151_936  # the widths of two products
BLOCK_FLOPS = 6 * (2 * (16 + 8) * 128 + 3 * 3072) * HIDDEN  # for a token, without attention

FIELDS = "clocks.sm,temperature.gpu,power.draw,pcie.link.gen.current,pcie.link.width.current"


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
    for i in kept:
        gpu, props = this_device(i), torch.cuda.get_device_properties(i)
        peak = {name: hardware.peak_tflops(gpu, dtype) for name, dtype in DTYPES.items()}
        place = (getattr(props, f"pci_{k}_id", 0) for k in ("domain", "bus", "device"))
        one = {"vendor": gpu.vendor, "name": str(gpu), "peak": peak}
        facts["devices"].append(one | {"bus": "{:04x}:{:02x}:{:02x}.0".format(*place)})
    facts["links"] = _links([device["bus"] for device in facts["devices"]])
    with contextlib.suppress(Exception):  # a build without NCCL
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def _links(places: list[str]) -> list[list[str]]:
    """The kind of link between each two GPUs with these bus addresses, "" if unknown."""
    table = hardware.link_table(probe_root())
    listed = tool("nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader") or ""
    numbers = {bus.lower()[-12:]: str(i) for i, bus in enumerate(listed.split())}
    names = [numbers.get(place, place) for place in places]  # AMD's GPUs are named by address
    return [[table.get((a, b), "") for b in names] for a in names]


def choices() -> dict:
    """ "lines": what a run would choose for dtype, attention and torch.compile, and why. Attention
    is tried on the GPU."""
    from llm_demo.run.choices import choose_attention, choose_compile, probe_backend

    device, lines = this_device(), []
    dtype, reason = hardware.pick_dtype("auto", device)

    def probe(impl, *given):
        if problem := probe_backend(impl, *given):
            fix = "nothing to do, another backend is used; a newer driver or torch may help"
            lines.append((WARNING, "attention", f"{impl} fails: {problem}", fix))
        return problem

    for kind, single in (("one document per row", True), ("packed rows", False)):
        impl, against = choose_attention("auto", device, dtype, HEADS, single, probe)
        text = f"{impl} for {kind}" + "".join(f"; not {why}" for why in against)
        lines.append((OK, "attention", text, ""))
    compiled, why = choose_compile(None, device, impl, lambda: None)
    lines.append((OK, "compile", f"{'on' if compiled else 'off'} by default: {why}", ""))
    return {"lines": [(OK, "dtype", f"{dtype} by default: {reason}", ""), *lines]}


def gemm(device: str, vendor="", bus="", seconds=0.7, square=8192, rows=4096, widths=WIDTHS):
    """TFLOP/s on a device: "rates" of square products by dtype, `seconds` for each, and "products"
    in a model's shapes, on AMD also with hipBLASLt, in words; "subnormals": whether small
    fp16 values survive a product; "load": what the driver says meanwhile of the GPU at this bus
    address."""
    rates = {}
    if device != "cpu":
        torch.cuda.set_device(device)
    with ThreadPoolExecutor() as pool:
        for name, dtype in reversed(DTYPES.items()):
            ones = torch.ones(256, 256, device=device, dtype=dtype)
            if not bool((ones @ ones == 256).all()):
                return {"problem": f"a product of ones in {dtype} is not 256 everywhere"}
            ab = [torch.randn(square, square, device=device).to(dtype) for _ in range(2)]
            rates[name] = _rate(*ab, seconds)
        load = pool.submit(_load, vendor, bus)  # two seconds have made it warm
        while not load.done():
            _rate(*ab, 0.1)
    products, small = [_products(device, rows, widths)], ones.half() * 2.0**-20
    if vendor == "amd":
        prefer = torch.backends.cuda.preferred_blas_library
        products[0] += f"; {prefer()}"
        with contextlib.suppress(RuntimeError):
            asked = prefer("hipblaslt")
            products.append(f"{_products(device, rows, widths)}; asked for hipBLASLt, {asked}")
    # some matrix units take values below 2**-14 for zero
    survive = bool((small @ ones.half() == 2.0**-12).all())
    return {"rates": rates, "load": load.result(), "products": products, "subnormals": survive}


def _load(vendor: str, bus: str) -> str:
    """Clock, temperature and power of a GPU, as its driver says them now."""
    if vendor == "nvidia":
        query = f"--query-gpu={FIELDS}", "--format=csv"
        return tool("nvidia-smi", "-i", bus, *query, limit=5) or ""
    time.sleep(0.1)  # a product is running by then
    folder, files = probe_root() / "sys/bus/pci/devices" / bus, {}
    for file in (*folder.glob("hwmon/*/*_*"), folder / "pp_dpm_sclk"):
        with contextlib.suppress(OSError):  # a sensor that is off
            files[file.name] = file.read_text("utf-8").strip()
    number = lambda name: float(text) if (text := files.get(name, "")).isdecimal() else 0.0  # noqa: E731
    of = lambda limit, unit: f" of {limit:.0f} {unit}" if limit else f" {unit}"  # noqa: E731
    clocks = re.findall(r"(\d+)Mhz( \*)?", files.get("pp_dpm_sclk", ""))  # * marks the current one
    parts = [f"{mhz}{of(float(clocks[-1][0]), 'MHz')}" for mhz, now in clocks if now]
    spot = next((name for name, text in files.items() if text == "junction"), "temp1_label")
    heat, limit = (number(spot.replace("label", end)) / 1e3 for end in ("input", "crit"))
    parts += [f"{heat:.0f}{of(limit, '°C')}" + AT_LIMIT * (0 < limit - 2 < heat)] * bool(heat)
    power = number("power1_average") or number("power1_input")
    parts += [f"{power / 1e6:.0f}{of(number('power1_cap') / 1e6, 'W')}"] * bool(power)
    return ", ".join(parts)


def _seconds(run, least):
    """Seconds that run() takes, on the current device too; measured for `least` seconds."""
    return _mean(run, 1 + int(least / _mean(run, 1)))


def _mean(run, times):
    return Timer("run()", globals={"run": run}).timeit(times).mean  # waits for the device


def _rate(a, b, least):
    out = torch.mm(a, b)
    spent = _seconds(lambda: torch.mm(a, b, out=out), least)
    return 2 * a.numel() * b.shape[1] / spent / 1e12


def _products(device, rows, widths):
    """TFLOP/s of three products with two of the model's weights, in words. The inputs are random,
    because zeros draw less power and run faster."""
    text = "output/input/weight gradient, TFLOP/s"
    for name, n in itertools.product(("bf16", "fp16"), widths):
        shapes = ((rows, HIDDEN), (n, HIDDEN), (rows, n))
        x, w, g = (torch.randn(*s, device=device, dtype=DTYPES[name]) for s in shapes)
        rates = (f"{_rate(*ab, 0.03):.0f}" for ab in ((x, w.T), (g, w), (g.T, x)))
        text += f"; {name} {HIDDEN:,} x {n:,} {'/'.join(rates)}"
    return text


def kernels(device: str, dtype: str, go: str, rows: int = 4096) -> dict:
    """What plain kernels and faster ones take: "cases": name -> [ms plain, ms faster, relative
    difference of their results], or the problem; the compiled block's "tflops"; `host_speed`.

    Compiles first, and measures when the file `go` exists."""
    place = device, DTYPES[dtype], rows
    block = _block(*place)
    with contextlib.suppress(Exception):  # it will be reported below
        block[1]()
    while not os.path.exists(go):
        time.sleep(0.02)
    cases = {
        "a compiled block": lambda: block,
        "the loss kernel and a copy of logits": lambda: _losses(*place),
        "attention by SDPA's choice": lambda: _attention(*place, sums=False),
        "math attention with 16-bit sums": lambda: _attention(*place, sums=True),
    }
    answer = host_speed(device) | {"cases": {}}
    for name, make in cases.items():
        try:
            runs = make()
            plain, faster = (run().to(torch.float32, copy=True) for run in runs)
            error = (faster.sub_(plain).norm() / plain.norm()).item()
            del plain, faster
            answer["cases"][name] = [*(1e3 * _seconds(run, 0.1) for run in runs), error]
        except Exception as e:
            answer["cases"][name] = words_of(e)
    if isinstance(spent := answer["cases"]["a compiled block"], list):
        answer["tflops"] = BLOCK_FLOPS * rows / spent[1] / 1e9
    return answer


def _block(device, dtype, rows):
    """A block of Qwen3-0.6B, forward and backward for 4 x rows / 4 tokens: eager, compiled."""
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    torch.manual_seed(0)
    folder = ROOT / "models/qwen3-0.6b"
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    layer = Qwen3DecoderLayer(config, 0).to(device, dtype)
    x, up = (torch.randn(4, rows // 4, HIDDEN, device=device, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    rotary = [torch.full_like(x[:1, :, :128], value) for value in (0.8, 0.6)]

    def run(forward):
        out = forward(x, position_embeddings=rotary)
        return torch.autograd.grad(out, [x, *layer.parameters()], up)[0]

    return [functools.partial(run, f) for f in (layer, torch.compile(layer, dynamic=False))]


def _losses(device, dtype, rows):
    """Copies logits [rows, vocabulary]; their loss and its gradient: plain, by our kernel."""
    from llm_demo.core import loss

    logits = torch.randn(rows, VOCABULARY, device=device, dtype=dtype)
    copy, targets = torch.empty_like(logits), torch.arange(rows, device=device)

    def run(loss_of_logits):
        loss_of_logits(copy.copy_(logits), targets)
        return copy

    ours = loss._kernel(torch.device(device).type) or loss._loss_of_logits
    return [functools.partial(run, f) for f in (loss._loss_of_logits, ours)]


def _attention(device, dtype, rows, sums):
    """Attention of 4 documents of rows / 4 tokens, forward and backward: by the math kernel, and by
    the kernel that SDPA picks or, if `sums`, by the math kernel with sums in 16 bits."""
    shapes = [(4, n, rows // 4, 128) for n in (16, 8, 8, 16)]
    q, k, v, up = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    q.requires_grad_()

    def run(math, sums):
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(sums)
        with sdpa_kernel(SDPBackend.MATH) if math else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, q, up)[0]

    return [functools.partial(run, *way) for way in ((True, False), (sums, sums))]


def host_speed(device: str) -> dict:
    """Seconds of 3 million additions in Python; microseconds to launch a kernel, on a GPU."""
    speed = {"python_s": Timer("for i in range(3_000_000): total += i", "total = 0").timeit(1).mean}
    if device != "cpu":
        x = torch.zeros(1, device=device)
        speed["launch_us"] = 1e6 * _seconds(lambda: x.add_(1), 0.1)
    return {"host": speed}


def group(device: str, index: int, members: list[int], meeting: str, limit: float) -> dict:
    """Form a group of processes through a file beginning with `meeting`; verify and time sends and
    all-reduces. Drivers report peer-to-peer as working where it hangs or returns wrong values, so
    every received value is compared. members: the processes, of which this one is `index`.

    Returns "wrong": operation -> wrong elements, "elements": how many were compared, and the rate
    in GB/s (1e9 bytes) over one GPU's link: "all_reduce"; for two processes also "latency_us" of
    one small send. limit: seconds for an operation, after which PyTorch ends the process."""
    rank, size = members.index(index), len(members)
    backend, options = "gloo", {}
    if device != "cpu":
        torch.cuda.set_device(device)
        backend, options = "cpu:gloo,cuda:nccl", {"device_id": torch.device(device)}
    stay_on_loopback()
    meeting = {"init_method": f"file://{meeting}{members}", "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timedelta(seconds=limit), **meeting, **options)
    wrong, elements = _verify(device, rank, size)
    rates = _rates(device, rank, size)
    ranks = [None] * size  # objects use gloo, as in training; when they are there, all are done
    dist.all_gather_object(ranks, rank)
    wrong["all_gather_object"] = int(ranks != list(range(size)))
    dist.destroy_process_group()
    return {"wrong": wrong, "elements": elements, **rates}


def _numbers(device, n, rank, turn):
    """int32 [n] that depend on place, rank and turn, so that stale values are detected."""
    numbers = torch.arange(n, dtype=torch.int32, device=device)
    return numbers.mul_(3).add_(1000 * turn + 7 * rank + 1)


def _verify(device, rank, size):
    """({operation: wrong elements}, elements compared)"""
    wrong, elements, turn = {"send": 0, "all_reduce": 0}, 0, 0
    # NCCL has different protocols for small, medium and large messages.
    sizes = (1 << 8, 1 << 18) if device == "cpu" else (1 << 8, 1 << 18, 1 << 24)
    for n in (n for n in sizes for _ in range(2)):
        turn += 1
        for source in range(2) if size == 2 else ():
            if rank == source:
                dist.send(_numbers(device, n, rank, turn), dst=1 - source)
            else:
                got = torch.full((n,), -1, dtype=torch.int32, device=device)
                dist.recv(got, src=source)
                wrong["send"] += int((got != _numbers(device, n, source, turn)).sum())
                elements += n
        total = _numbers(device, n, rank, turn)
        dist.all_reduce(total)
        expected = sum(_numbers(device, n, r, turn).long() for r in range(size))
        wrong["all_reduce"] += int((total.long() != expected).sum())
        elements += n
    return wrong, elements


def _rates(device, rank, size):
    one = torch.zeros(1, device=device)
    data = torch.zeros((1 if device == "cpu" else 64) << 20, device=device)

    def there_and_back():
        for source in range(2):
            (dist.send if rank == source else dist.recv)(one, 1 - rank)

    gb = data.numel() * 4 / 1e9 * 2 * (size - 1) / size
    rates = {"all_reduce": gb / _mean(lambda: dist.all_reduce(data), 6)}
    if size == 2:
        rates["latency_us"] = _mean(there_and_back, 50) / 2 * 1e6
    return rates


if __name__ == "__main__":
    serve(globals())
