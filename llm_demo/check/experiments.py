"""The experiments. A process of its own runs each, because it may hang or crash."""

import contextlib
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from llm_demo.check.processes import serve
from llm_demo.core.errors import UserError
from llm_demo.machine import device as hardware
from llm_demo.machine.device import DTYPES, this_device
from llm_demo.machine.dist import stay_on_loopback
from llm_demo.machine.files import ROOT, cache_folder
from llm_demo.machine.text import first_line, words_of

HEADS = [16, 8, 128, 128]  # of Qwen3-0.6B, as costs.Heads


def torch_facts() -> dict:
    """Versions and devices as PyTorch sees them."""
    facts = {"torch": torch.__version__, "devices": [], "links": []}
    facts |= {"why": "", "left_out": "", "refused": ""}
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as e:
            facts["why"] = first_line(e)
        return facts
    kept, facts["left_out"], facts["only"] = hardware.cards()
    try:
        hardware.refuse_gpus(kept)
    except UserError as e:
        facts["refused"] = str(e)
    dtype, _ = hardware.pick_dtype("auto", this_device(kept[0]))
    facts["dtype"] = hardware.dtype_name(dtype)
    for i in kept:
        gpu = this_device(i)
        peak = {name: hardware.peak_tflops(gpu, dtype) for name, dtype in DTYPES.items()}
        facts["devices"].append({"name": str(gpu), "peak": peak})
    facts["links"] = hardware.links()
    with contextlib.suppress(Exception):  # a build without NCCL
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def choices() -> dict:
    """ "lines": (name, text) of what a run would choose for dtype, attention and torch.compile, and
    why. Attention is tried on the GPU."""
    from llm_demo.run.choices import choose_attention, choose_compile

    device = this_device()
    dtype, reason = hardware.pick_dtype("auto", device)
    lines = [("dtype", f"{dtype} by default: {reason}")]
    for kind, single in (("one document per row", True), ("packed rows", False)):
        impl, against = choose_attention("auto", device, dtype, HEADS, single)
        lines.append(("attention", "; not ".join([f"{impl} for {kind}", *against])))
    compiled, why = choose_compile(None, device, impl, probe=lambda *given: None)
    lines.append(("compile", f"{'on' if compiled else 'off'} by default: {why}"))
    return {"lines": lines}


def rates(device: str, seconds: float = 0.7, size: int = 8192) -> dict:
    """ "rates": TFLOP/s of square products on a device, by dtype, `seconds` for each."""
    found = {}
    if device != "cpu":
        torch.cuda.set_device(device)
    for name, dtype in DTYPES.items():
        # random, because zeros draw less power and run faster
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.mm(a, b)
        found[name] = 2 * size**3 / 1e12 / seconds_of(partial(torch.mm, a, b, out=out), seconds)
    return {"rates": found}


def seconds_of(run: Callable, least: float) -> float:
    """Seconds that run() takes, on the current device too; measured for `least` seconds."""
    timer = timer_of(run)
    return timer.timeit(1 + int(least / timer.timeit(1).mean)).mean


def timer_of(run: Callable):
    """A timer of run(), which waits for the device."""
    # importing it looks for GPUs: not in a process that forks
    from torch.utils.benchmark import Timer

    return Timer("run()", globals={"run": run})


def kernels(device: str, dtype: str, length: int = 1024, columns: int = 151_936) -> dict:
    """ "fault": what is wrong with a compiled block and our loss kernel, "" if nothing is;
    "times": {which: (ms plain, ms faster)}; "launch_us": microseconds of a kernel's launch."""
    from llm_demo.machine import probes

    x = torch.zeros(1, device=device)
    answer = {"fault": "", "times": {}, "launch_us": 1e6 * seconds_of(lambda: x.add_(1), 0.1)}
    try:
        answer["fault"] = probes.compiled(dtype, "sdpa", device) or ""
        for name, runs in (
            ("a compiled block", block_runs(device, DTYPES[dtype], length)),
            ("the loss kernel", loss_runs(device, DTYPES[dtype], 4 * length, columns)),
        ):
            answer["times"][name] = [1e3 * seconds_of(run, 0.1) for run in runs]
    except Exception as e:
        answer["fault"] = words_of(e)
    return answer


def block_runs(device: str, dtype: torch.dtype, length: int) -> list[Callable]:
    """A block of Qwen3-0.6B, forward and backward for 4 rows of this length: eager, compiled."""
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    folder = ROOT / "models/qwen3-0.6b"
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    layer = Qwen3DecoderLayer(config, 0).to(device, dtype)
    x = torch.randn(4, length, config.hidden_size, device=device, dtype=dtype)
    rotary = [torch.full_like(x[:1, :, : config.head_dim], value) for value in (0.8, 0.6)]

    def run(forward):
        forward(x, position_embeddings=rotary).sum().backward()

    return [partial(run, layer), partial(run, torch.compile(layer, dynamic=False))]


def loss_runs(device: str, dtype: torch.dtype, tokens: int, columns: int) -> list[Callable]:
    """The loss of logits [tokens, columns] with its gradient: in plain PyTorch, by our kernel."""
    from llm_demo.core import loss

    logits = torch.randn(tokens, columns, device=device, dtype=dtype)
    targets = torch.arange(tokens, device=device)
    ours = loss._kernel(torch.device(device).type) or loss._loss_of_logits
    return [partial(function, logits, targets) for function in (loss._loss_of_logits, ours)]


def pair(devices: list[str]) -> dict:
    """What `exchange` finds between two devices. Does not touch them before it forks."""
    results = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        place = (devices, f"file://{folder}/meeting", results)
        try:
            mp.start_processes(exchange, place, nprocs=2, start_method="fork")
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as e:
            return {"problem": str(e).strip().splitlines()[-1]}
        return results.get()


def exchange(rank: int, devices: list[str], meeting: str, results) -> None:
    """Meet the other process; verify and time sends and all-reduces. Drivers report peer-to-peer as
    working where it hangs or returns wrong values, so every received value is compared.

    Puts to results, by rank 0, "wrong": operation -> wrong elements; "elements": how many were
    compared; "all_reduce": GB/s (1e9 bytes) over one GPU's link."""
    device = devices[rank]
    backend, options = "gloo", {}
    if device != "cpu":
        torch.cuda.set_device(device)
        backend, options = "cpu:gloo,cuda:nccl", {"device_id": torch.device(device)}
    stay_on_loopback()
    dist.init_process_group(
        backend,
        init_method=meeting,
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=2),
        **options,
    )
    counts = torch.tensor(verify(device, rank))
    data = torch.zeros((1 if device == "cpu" else 64) << 20, device=device)
    seconds = timer_of(partial(dist.all_reduce, data)).timeit(6).mean
    dist.all_reduce(counts)  # by gloo; both are done then
    if rank == 0:
        sent, reduced, elements = counts.tolist()
        wrong = {"send": sent, "all_reduce": reduced}
        rate = data.nbytes / 1e9 / seconds
        results.put({"wrong": wrong, "elements": elements, "all_reduce": rate})
    dist.destroy_process_group()


def verify(device: str, rank: int) -> list[int]:
    """[wrong elements of sends, of all-reduces, elements compared]"""
    sent = reduced = elements = 0
    # NCCL has different protocols for small, medium and large messages
    for turn, n in enumerate((2**8, 2**8, 2**18, 2**18, 2**22, 2**22)):
        both = [numbers(device, n, source, turn) for source in range(2)]
        for source in range(2):
            if rank == source:
                dist.send(both[source], dst=1 - source)
            else:
                got = torch.full_like(both[source], -1)
                dist.recv(got, src=source)
                sent += int((got != both[source]).sum())
        total = both[rank].clone()
        dist.all_reduce(total)
        reduced += int((total != both[0] + both[1]).sum())
        elements += 2 * n
    return [sent, reduced, elements]


def numbers(device: str, n: int, rank: int, turn: int) -> torch.Tensor:
    """int32 [n] that depend on place, rank and turn, so that stale values are detected."""
    places = torch.arange(n, dtype=torch.int32, device=device)
    return places.mul_(3).add_(1000 * turn + 7 * rank + 1)


TASKS = {f.__name__: f for f in (torch_facts, choices, rates, kernels, pair)}

if __name__ == "__main__":
    serve(TASKS)
