"""The experiments of llm_demo.check, in a process that may hang or crash.

Reads JSON commands from standard input, one a line, and answers each with one JSON line. With the
argument "torch" it imports torch at once, while the check is busy with something else."""

import contextlib
import ctypes
import glob
import json
import os
import pickle
import signal
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

MIB = 1 << 20


# ---------------------------------------------------------------- torch and what it sees


def torch_facts() -> dict:
    """Versions and devices as PyTorch sees them."""
    import torch

    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    facts |= {"devices": [], "peers": [], "unavailable": None}
    driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    if driver and torch.version.cuda:
        with contextlib.suppress(RuntimeError):
            facts["driver_cuda"] = driver()  # 13000 for CUDA 13.0; 0 without a driver
    if not torch.cuda.is_available():
        if torch.version.cuda or torch.version.hip:
            try:
                torch.cuda.init()
            except Exception as e:
                facts["unavailable"] = str(e).strip().splitlines()[0]
        return facts
    from llm_demo.device import DTYPES, peak_tflops, this_device

    facts["archs"] = torch.cuda.get_arch_list()
    with contextlib.suppress(Exception):
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    count = torch.cuda.device_count()
    for i in range(count):
        device, props = this_device(i), torch.cuda.get_device_properties(i)
        one = {k: getattr(device, k) for k in ("vendor", "name", "arch", "memory_gb")}
        one["peak"] = {name: peak_tflops(device, dtype) for name, dtype in DTYPES.items()}
        one["uuid"] = str(getattr(props, "uuid", ""))
        if hasattr(props, "pci_bus_id"):
            place = (getattr(props, "pci_domain_id", 0), props.pci_bus_id, props.pci_device_id)
            one["bus"] = "{:04x}:{:02x}:{:02x}.0".format(*place)
        facts["devices"].append(one)
    with contextlib.suppress(RuntimeError):
        facts["peers"] = [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)]
            for i in range(count)
        ]
    return facts


def choices() -> dict:
    """The dtype, and for each attention backend why it can't run, judged by facts alone."""
    import transformers

    from llm_demo import attention, device

    here = device.this_device()
    dtype, reason = device.pick_dtype("auto", here)
    against = {impl: attention.why_not(impl, here, dtype, True) for impl in attention.IMPLS}
    name = next(name for name, d in device.DTYPES.items() if d == dtype)
    return {
        "dtype": name,
        "dtype_reason": reason,
        "transformers": transformers.__version__,
        "against": against,
        "probes": [
            impl
            for impl, problem in against.items()
            if problem is None and here.type == "cuda" and not impl.endswith("math")
        ],
    }


def choose(heads: list[int], problems: dict, compile_problem: str | None) -> dict:
    """What a run would choose. problems: backend -> what its probe said, None if it passed."""
    from llm_demo import attention, compiling, device

    here = device.this_device()
    dtype, _ = device.pick_dtype("auto", here)

    def probe(impl, *_):
        return problems.get(impl)

    chosen = {}
    for kind, single in (("packed", False), ("single", True)):
        impl, reasons = attention.choose("auto", here, dtype, heads, single, probe)
        works, reason = compiling.choose_compile(None, here, impl, lambda: compile_problem)
        chosen[kind] = {"impl": impl, "reasons": reasons, "compile": works, "why": reason}
    return chosen


def run_module(name: str, args: list[str]) -> dict:
    """Run `python -m name args` in this process; "problem" is its last word if it fails."""
    import runpy

    sys.argv = [name, *map(str, args)]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as e:
        if e.code:
            return {"problem": str(e.code)}
    return {}


def deepspeed_facts(env: dict) -> dict:
    os.environ.update(env)
    import deepspeed
    from deepspeed.launcher import launch

    return {
        "version": deepspeed.__version__,
        "launcher": hasattr(launch, "terminate_process_tree"),
    }


def sdpa(backend: str, dtype: str) -> dict:
    """Largest relative error of an SDPA backend against math in fp32, gradients included."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from llm_demo.device import DTYPES

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

_device = None


def start(device: str) -> dict:
    """Open the device and load its libraries, so that later commands are not slowed by that.

    device: "cuda:0" or "cpu"."""
    import torch

    global _device
    _device = torch.device(device)
    if _device.type == "cuda":
        torch.cuda.set_device(_device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a = torch.ones(256, 256, device=_device, dtype=dtype)
        if not bool((a @ a == 256).all()):
            return {"problem": f"a product of ones in {dtype} is not 256 everywhere"}
    return {}


def gemm(seconds: float, blas: bool = False) -> dict:
    """TFLOP/s of square products by dtype, for `seconds` in total, half of that in bf16.

    blas: on AMD, measure again with hipBLASLt instead of the default library."""
    import torch

    shares = [("bf16", torch.bfloat16, 0.5), ("fp16", torch.float16, 0.25)]
    shares += [("fp32", torch.float32, 0.25)]
    n = 8192
    if _device.type == "cpu":
        n, shares = 512, shares[::2]  # fp16 takes seconds on most CPUs
    elif torch.cuda.mem_get_info(_device)[0] < 4 << 30:
        n = 4096
    rates = {name: _rate(n, dtype, share * seconds) for name, dtype, share in shares}
    answer = {"rates": rates, "n": n}
    if blas:
        try:
            before = torch.backends.cuda.preferred_blas_library()
            after = torch.backends.cuda.preferred_blas_library("hipblaslt")
            answer["blas"] = {"default": str(before), "hipblaslt": str(after) != str(before)}
            if str(after) != str(before):
                answer["hipblaslt"] = {k: _rate(n, d, 0.3) for k, d, _ in shares}
        except Exception as e:
            answer["blas"] = {"problem": _words(e)}
    return answer


def _rate(n, dtype, seconds):
    import torch

    wait = torch.cuda.synchronize if _device.type == "cuda" else lambda: None
    # Not zeros: they draw less power, so they run faster than training does.
    a, b = (torch.randn(n, n, device=_device).to(dtype) for _ in range(2))
    out = torch.mm(a, b)
    wait()
    begun, done, spent = time.perf_counter(), 0, 0.0
    while spent < seconds:
        for _ in range(4):
            torch.mm(a, b, out=out)
        wait()
        done += 4
        spent = time.perf_counter() - begun
    return 2 * n**3 * done / spent / 1e12


# ---------------------------------------------------------------- several


def group(rank: int, size: int, file: str, backend: str, limit: float) -> dict:
    """Form a group of `size` processes through `file`; verify and time sends and all-reduces.

    Returns "wrong": operation -> wrong elements, "elements": how many were compared, and the rates
    in GB/s (1e9 bytes) over one GPU's link: "all_reduce" and, with two processes, "send" for each
    direction and "latency_us" of one small send."""
    import torch.distributed as dist

    with _process_group(rank, size, file, backend, limit):
        wrong, elements = _verify(rank, size)
        answer = {"wrong": wrong, "elements": elements, **_bandwidth(rank, size)}
        if "gloo" in backend and "nccl" in backend:  # as in training, objects use gloo
            names = [None] * size
            dist.all_gather_object(names, rank)
            if names != list(range(size)):
                answer["wrong"]["all_gather_object"] = 1
    return answer


@contextlib.contextmanager
def _process_group(rank, size, file, backend, limit):
    import torch
    import torch.distributed as dist

    options = {"device_id": _device} if _device.type == "cuda" else {}
    dist.init_process_group(
        backend,
        init_method=f"file://{file}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=limit),
        **options,
    )
    yield
    dist.all_reduce(torch.zeros(1, device=_device))  # nobody leaves early
    _wait()
    dist.destroy_process_group()


def _wait():
    import torch

    if _device.type == "cuda":
        torch.cuda.synchronize(_device)


def _numbers(n, rank, turn):
    """int32 [n] that depend on place, rank and turn, so that stale values are noticed."""
    import torch

    numbers = torch.arange(n, dtype=torch.int32, device=_device)
    return numbers.mul_(3).add_(1000 * turn + 7 * rank + 1)


def _sizes():
    # NCCL has different protocols for small, medium and large messages.
    return (1 << 8, 1 << 18, 1 << 24) if _device.type == "cuda" else (1 << 8, 1 << 18)


def _verify(rank, size):
    import torch
    import torch.distributed as dist

    wrong, elements, turn = {"send": 0, "all_reduce": 0}, 0, 0
    for n in _sizes():
        for _ in range(2):
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
    import torch
    import torch.distributed as dist

    def seconds(operation, times):
        """Time of one operation: best of three batches, on the slowest process."""
        best = []
        for _ in range(3):
            dist.all_reduce(one)
            _wait()
            begun = time.perf_counter()
            for _ in range(times):
                operation()
            _wait()
            best.append((time.perf_counter() - begun) / times)
        slowest = torch.tensor([min(best)], device=_device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    one = torch.zeros(1, device=_device)
    data = torch.zeros((64 if _device.type == "cuda" else 4) * MIB // 4, device=_device)
    # A fast link needs more data to reach its speed; a slow one would take seconds for as much.
    if seconds(lambda: dist.all_reduce(data), 1) < 3e-3 and _device.type == "cuda":
        data = torch.zeros(512 * MIB // 4, device=_device)
        dist.all_reduce(data)
    size_gb = data.numel() * 4 / 1e9
    spent = seconds(lambda: dist.all_reduce(data), 3)
    found = {"all_reduce": size_gb / spent * 2 * (size - 1) / size, "send": []}
    if size == 2:
        for source in range(2):
            call = dist.send if rank == source else dist.recv
            found["send"].append(size_gb / seconds(lambda c=call: c(data, 1 - rank), 3))

        def there_and_back():
            calls = (dist.send, dist.recv)
            for call in calls if rank == 0 else reversed(calls):
                call(one, 1 - rank)

        found["latency_us"] = seconds(there_and_back, 20) / 2 * 1e6
    return found


def profile(rank: int, size: int, file: str, backend: str, limit: float) -> dict:
    """How an all-reduce appears in a profile and in the flight recorder."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity

    answer = {}
    with _process_group(rank, size, file, backend, limit):
        data = torch.zeros(MIB, device=_device)
        dist.all_reduce(data)
        _wait()
        kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profiler:
            dist.all_reduce(data)
            _wait()
        on_device = [e.name for e in profiler.events() if "CPU" not in str(e.device_type)]
        answer["kernels"] = sorted({n for n in on_device if "ccl" in n.lower()})
        with tempfile.NamedTemporaryFile(suffix=".json") as trace:
            profiler.export_chrome_trace(trace.name)
            answer["named"] = '"Collective name"' in Path(trace.name).read_text()
        with contextlib.suppress(AttributeError):
            entries = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())["entries"]
            answer["recorded"] = len(entries)
            answer["with_duration"] = sum(bool(e.get("duration_ms")) for e in entries)
    return answer


# ---------------------------------------------------------------- files


def disk(folder: str) -> dict:
    """Free space, write speed and fsync time in `folder` or its nearest existing parent."""
    place = Path(folder).absolute()
    while not place.is_dir():
        place = place.parent
    space = os.statvfs(place)
    answer = {"place": str(place), "free_gb": space.f_bavail * space.f_frsize / 1e9}
    chunk = os.urandom(MIB) * 8  # not zeros: some file systems compress
    largest = min(256, int(answer["free_gb"] * 500)) * MIB
    with tempfile.TemporaryFile(dir=place) as file:
        syncs = []
        for _ in range(5):
            file.write(b"x" * 4096)
            file.flush()
            begun = time.perf_counter()
            os.fsync(file.fileno())
            syncs.append(time.perf_counter() - begun)
        begun, written = time.perf_counter(), 0
        while written < largest and time.perf_counter() - begun < 2:
            file.write(chunk)
            written += len(chunk)
        file.flush()
        os.fsync(file.fileno())
        answer["mb_per_s"] = written / 1e6 / (time.perf_counter() - begun)
    answer["fsync_ms"] = statistics.median(syncs) * 1e3
    return answer


def locks() -> dict:
    """Lock files of builds that no process of this machine holds open: [path, age in hours]."""
    home = Path.home()
    roots = [
        Path(os.environ.get("TORCH_EXTENSIONS_DIR") or home / ".cache/torch_extensions"),
        Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton/cache"),
    ]
    found = [p for root in roots for depth in ("*", "*/*") for p in root.glob(f"{depth}/lock")]
    held = set()
    if found:
        for link in glob.glob("/proc/[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(link))
    stale = []
    for path in found:
        with contextlib.suppress(OSError):
            age = time.time() - path.stat().st_mtime
            if age > 60 and str(path.resolve()) not in held:
                stale.append([str(path), age / 3600])
    return {"stale": stale}


# ---------------------------------------------------------------- the process

COMMANDS = {
    "torch": torch_facts,
    "choices": choices,
    "choose": choose,
    "module": run_module,
    "deepspeed": deepspeed_facts,
    "sdpa": sdpa,
    "start": start,
    "gemm": gemm,
    "group": group,
    "profile": profile,
    "disk": disk,
    "locks": locks,
}


def _words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def main() -> None:
    with contextlib.suppress(Exception):  # Linux: die with the check, even if hung
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with contextlib.suppress(Exception):  # NCCL's lines must not be lost in a buffer when killed
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)
    # Libraries print to standard output, too: only answers may go there.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if "torch" in sys.argv[1:]:
        with contextlib.suppress(Exception):  # reported by the first command
            import torch  # noqa: F401
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = COMMANDS[command.pop("do")](**command)
        except Exception as e:
            answer = {"problem": _words(e)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # a broken process group would keep a plain exit waiting


if __name__ == "__main__":
    main()
