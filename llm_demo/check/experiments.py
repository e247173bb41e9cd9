"""The experiments that need PyTorch. A worker runs them, because they may hang or crash."""

import contextlib
import pickle
import runpy
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from llm_demo.check.processes import first_line
from llm_demo.device import DTYPES, peak_tflops, pick_dtype, this_device
from llm_demo.dist import stay_on_loopback

_device = None  # this process's device, see `start`


def torch_facts() -> dict:
    """Versions and devices as PyTorch sees them."""
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    facts |= {"devices": [], "peers": [], "unavailable": None}
    if not torch.cuda.is_available():
        if torch.version.cuda or torch.version.hip:
            try:
                torch.cuda.init()
            except Exception as e:
                facts["unavailable"] = str(e).strip().splitlines()[0]
        return facts
    facts["archs"] = torch.cuda.get_arch_list()
    count = torch.cuda.device_count()
    for i in range(count):
        device, props = this_device(i), torch.cuda.get_device_properties(i)
        one = {k: getattr(device, k) for k in ("vendor", "name", "arch", "memory_gb")}
        one["peak"] = {name: peak_tflops(device, dtype) for name, dtype in DTYPES.items()}
        one["uuid"] = str(getattr(props, "uuid", ""))
        if hasattr(props, "pci_bus_id"):
            place = (props.pci_domain_id, props.pci_bus_id, props.pci_device_id)
            one["bus"] = "{:04x}:{:02x}:{:02x}.0".format(*place)
        facts["devices"].append(one)
    with contextlib.suppress(RuntimeError):
        peer_access = torch.cuda.can_device_access_peer
        facts["peers"] = [[i == j or peer_access(i, j) for j in range(count)] for i in range(count)]
    return facts


# ---------------------------------------------------------------- what a run would choose


def choices() -> dict:
    """The default dtype, and why each attention backend can't run (None if it may)."""
    from llm_demo.model import attention_choice as attention

    device = this_device()
    dtype, reason = pick_dtype("auto", device)
    against = {impl: attention.why_not(impl, device, dtype, True) for impl in attention.IMPLS}
    able = [impl for impl, why in against.items() if why is None and not impl.endswith("math")]
    return {
        "dtype": next(name for name, d in DTYPES.items() if d == dtype),
        "dtype_reason": reason,
        "against": against,
        "probes": able if device.type == "cuda" else [],
    }


def choose(heads: list[int], problems: dict, compile_problem: str | None) -> dict:
    """What a run would choose. problems: backend -> what its probe reported, None if it passed."""
    from llm_demo.model import attention_choice as attention
    from llm_demo.model import compiling

    device = this_device()
    dtype, _ = pick_dtype("auto", device)
    chosen = {}
    for kind, single in (("packed", False), ("single", True)):
        impl, _ = attention.choose_attention(
            "auto", device, dtype, heads, single, lambda impl, *_: problems.get(impl)
        )
        works, why = compiling.choose_compile(None, device, impl, lambda: compile_problem)
        chosen[kind] = {"impl": impl, "compile": works, "why": why}
    return chosen


def run_module(name: str, args: list) -> dict:
    """Run `python -m name args` in this process."""
    sys.argv = [name, *map(str, args)]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as e:
        if e.code:
            return {"problem": str(e.code)}
    return {}


def deepspeed_facts() -> dict:
    import deepspeed
    from deepspeed.launcher import launch

    has = hasattr(launch, "terminate_process_tree")
    return {"version": deepspeed.__version__, "launcher": has}


def sdpa(backend: str, dtype: str) -> dict:
    """Largest relative error of an SDPA backend against math in fp32, gradients included."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    leaves = [torch.randn(2, 8, 256, 128, device=device) for _ in range(4)]
    results = []
    for which, cast in ((backend, DTYPES[dtype]), ("MATH", torch.float32)):
        *qkv, up = (x.to(cast) for x in leaves)
        qkv = [x.requires_grad_() for x in qkv]
        with sdpa_kernel(getattr(SDPBackend, which)):
            out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        results.append([out, *torch.autograd.grad(out, qkv, up)])
    pairs = zip(*results, strict=True)
    return {"error": max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in pairs)}


# ---------------------------------------------------------------- one GPU


def start(device: str) -> dict:
    """Open a device, "cuda:0" or "cpu", so that later commands need not wait for that."""
    global _device
    _device = torch.device(device)
    if _device.type == "cuda":
        torch.cuda.set_device(_device)
    for dtype in DTYPES.values():
        a = torch.ones(256, 256, device=_device, dtype=dtype)
        if not bool((a @ a == 256).all()):
            return {"problem": f"a product of ones in {dtype} is not 256 everywhere"}
    return {}


def gemm(seconds: float, hipblaslt: bool) -> dict:
    """TFLOP/s of square matrix products on a GPU, by dtype, measured for `seconds` in total.

    hipblaslt: also measure with that library instead of the default one."""
    answer = {"rates": {dtype: _rate(dtype, seconds / len(DTYPES)) for dtype in DTYPES}}
    if hipblaslt:
        try:
            before = torch.backends.cuda.preferred_blas_library()
            after = torch.backends.cuda.preferred_blas_library("hipblaslt")
            answer["blas"] = {"default": str(before)}
            if str(after) != str(before):
                answer["hipblaslt"] = {dtype: _rate(dtype, 0.3) for dtype in DTYPES}
        except Exception as e:
            answer["blas"] = {"problem": first_line(e)}
    return answer


def _rate(dtype, seconds):
    n = 8192
    # Not zeros: they draw less power, so they run faster than training does.
    a, b = (torch.randn(n, n, device=_device).to(DTYPES[dtype]) for _ in range(2))
    out = torch.mm(a, b)
    _wait()
    begun, done, spent = time.perf_counter(), 0, 0.0
    while spent < seconds:
        for _ in range(4):
            torch.mm(a, b, out=out)
        _wait()
        done += 4
        spent = time.perf_counter() - begun
    return 2 * n**3 * done / spent / 1e12


def _wait():
    if _device.type == "cuda":
        torch.cuda.synchronize(_device)


# ---------------------------------------------------------------- several GPUs


def group(rank: int, size: int, file: str, backend: str, limit: float) -> dict:
    """Form a group of `size` processes through `file`; verify and time sends and all-reduces.

    Returns "wrong": operation -> wrong elements, "elements": how many were compared, and the rates
    in GB/s (1e9 bytes) over one GPU's link: "all_reduce" and, with two processes, "send" for each
    direction and "latency_us" of one small send."""
    with _process_group(rank, size, file, backend, limit):
        wrong, elements = _verify(rank, size)
        answer = {"wrong": wrong, "elements": elements, **_bandwidth(rank, size)}
        if "gloo" in backend and "nccl" in backend:  # as in training, objects use gloo
            ranks = [None] * size
            dist.all_gather_object(ranks, rank)
            wrong["all_gather_object"] = int(ranks != list(range(size)))
    return answer


@contextlib.contextmanager
def _process_group(rank, size, file, backend, limit):
    stay_on_loopback()
    dist.init_process_group(
        backend,
        init_method=f"file://{file}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=limit),
        device_id=_device if _device.type == "cuda" else None,
    )
    yield
    dist.all_reduce(torch.zeros(1, device=_device))  # wait until all are done
    _wait()
    dist.destroy_process_group()


def _numbers(n, rank, turn):
    """int32 [n] that depend on place, rank and turn, so that stale values are detected."""
    numbers = torch.arange(n, dtype=torch.int32, device=_device)
    return numbers.mul_(3).add_(1000 * turn + 7 * rank + 1)


def _verify(rank, size):
    """({operation: wrong elements}, elements compared)"""
    wrong, elements, turn = {"send": 0, "all_reduce": 0}, 0, 0
    # NCCL has different protocols for small, medium and large messages.
    sizes = (1 << 8, 1 << 18, 1 << 24) if _device.type == "cuda" else (1 << 8, 1 << 18)
    for n in (n for n in sizes for _ in range(2)):
        turn += 1
        for source in range(2) if size == 2 else ():
            if rank == source:
                dist.send(_numbers(n, rank, turn), dst=1 - source)
            else:
                got = torch.full((n,), -1, dtype=torch.int32, device=_device)
                dist.recv(got, src=source)
                wrong["send"] += int((got != _numbers(n, source, turn)).sum())
                elements += n
        total = _numbers(n, rank, turn)
        dist.all_reduce(total)
        expected = sum(_numbers(n, r, turn).long() for r in range(size))
        wrong["all_reduce"] += int((total.long() != expected).sum())
        elements += n
    return wrong, elements


def _bandwidth(rank, size):
    def seconds(operation, times):
        """Seconds of one operation: best of three batches, on the slowest process."""
        best = float("inf")
        for _ in range(3):
            dist.all_reduce(one)
            _wait()
            begun = time.perf_counter()
            for _ in range(times):
                operation()
            _wait()
            best = min(best, (time.perf_counter() - begun) / times)
        slowest = torch.tensor([best], device=_device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    def send(source):
        (dist.send if rank == source else dist.recv)(data, 1 - rank)

    def there_and_back():
        for source in range(2):
            (dist.send if rank == source else dist.recv)(one, 1 - rank)

    on_gpu = _device.type == "cuda"
    one = torch.zeros(1, device=_device)
    data = torch.zeros((16 if on_gpu else 1) << 20, device=_device)
    # A fast link needs more data to reach its full speed; a slow one would need seconds for it.
    if seconds(lambda: dist.all_reduce(data), 1) < 3e-3 and on_gpu:
        data = torch.zeros(128 << 20, device=_device)
        dist.all_reduce(data)
    gb = data.numel() * 4 / 1e9
    spent = seconds(lambda: dist.all_reduce(data), 3)
    rates = {"all_reduce": gb / spent * 2 * (size - 1) / size}
    if size == 2:
        rates["send"] = [gb / seconds(lambda s=source: send(s), 3) for source in range(2)]
        rates["latency_us"] = seconds(there_and_back, 20) / 2 * 1e6
    return rates


def profile(rank: int, size: int, file: str, backend: str, limit: float) -> dict:
    """How an all-reduce appears in a profile and in the flight recorder."""
    with _process_group(rank, size, file, backend, limit):
        data = torch.zeros(1 << 20, device=_device)
        dist.all_reduce(data)
        _wait()
        with torch.profiler.profile() as profiler:
            dist.all_reduce(data)
            _wait()
        on_device = [e.name for e in profiler.events() if "CPU" not in str(e.device_type)]
        answer = {"kernels": sorted({n for n in on_device if "ccl" in n.lower()})}
        with tempfile.NamedTemporaryFile(suffix=".json") as trace:
            profiler.export_chrome_trace(trace.name)
            answer["named"] = '"Collective name"' in Path(trace.name).read_text()
        with contextlib.suppress(AttributeError):
            entries = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())["entries"]
            answer["recorded"] = len(entries)
            answer["with_duration"] = sum(bool(e.get("duration_ms")) for e in entries)
    return answer
