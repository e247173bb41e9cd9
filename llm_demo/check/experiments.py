"""The experiments that need PyTorch. A worker runs them, because they may hang or crash."""

import contextlib
import functools
import runpy
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from llm_demo.check.processes import ROOT, first_line
from llm_demo.core.errors import UserError
from llm_demo.job.device import (
    DTYPES,
    cards,
    link_table,
    peak_tflops,
    pick_dtype,
    refuse_gpus,
    this_device,
)
from llm_demo.job.dist import stay_on_loopback

_device = None  # this process's device, see `start`
_block = None  # see `compile_block`

SQUARE, ROWS = 8192, 4096  # size of a square product; token slots of the model's
WEIGHTS = {
    "3,072": (1024, 3072),
    "151,936": (1024, 151_936),
}  # two of Qwen3-0.6B's: inputs, outputs
ADDITIONS = 3_000_000


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
    kept, facts["left_out"], facts["only"] = cards()
    try:
        refuse_gpus(kept)
    except UserError as e:
        facts["refused"] = str(e)
    facts["links"] = [[*pair, kind] for pair, kind in link_table().items()]
    with contextlib.suppress(Exception):  # a build without NCCL
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for i in kept:
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
        facts["peers"] = [[i == j or peer_access(i, j) for j in kept] for i in kept]
    return facts


# ---------------------------------------------------------------- what a run would choose


def choices() -> dict:
    """The default dtype, and why each attention backend can't run (None if it may)."""
    from llm_demo.job import attention_choice as attention

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
    from llm_demo.job import attention_choice as attention
    from llm_demo.job import compiling

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


def gemm(seconds: float, amd: bool) -> dict:
    """TFLOP/s on a GPU: "rates" of square products by dtype, measured for `seconds` in total, and
    "products" of the model's shapes, see `_products`; whether small fp16 values survive a product.

    amd: also measure the model's shapes with hipBLASLt instead of the default library."""
    answer = {"rates": {}}
    for name, dtype in DTYPES.items():
        a, b = (torch.randn(SQUARE, SQUARE, device=_device).to(dtype) for _ in range(2))
        answer["rates"][name] = _rate(a, b, seconds / len(DTYPES))
    del a, b
    answer["products"], answer["subnormals"] = _products(), _keeps_subnormals()
    if amd:
        try:
            before = torch.backends.cuda.preferred_blas_library()
            after = torch.backends.cuda.preferred_blas_library("hipblaslt")
            answer["blas"] = str(before)
            if str(after) != str(before):
                answer["hipblaslt"] = _products()
        except Exception as e:
            answer["blas"] = first_line(e)
    torch.cuda.empty_cache()  # for the process that times kernels
    return answer


def _rate(a, b, seconds):
    out = torch.mm(a, b)
    _wait()
    begun, done, spent = time.perf_counter(), 0, 0.0
    while spent < seconds:
        for _ in range(4):
            torch.mm(a, b, out=out)
        _wait()
        done += 4
        spent = time.perf_counter() - begun
    return 2 * a.numel() * b.shape[1] * done / spent / 1e12


def _products():
    """dtype -> weight -> TFLOP/s of its three products: the output, and the gradients of the input
    and of the weight. The inputs are random, because zeros draw less power and run faster."""
    found = {}
    for name in ("bf16", "fp16"):
        found[name] = {}
        for weight, (k, n) in WEIGHTS.items():
            shapes = ((ROWS, k), (n, k), (ROWS, n))
            x, w, g = (torch.randn(*s, device=_device, dtype=DTYPES[name]) for s in shapes)
            found[name][weight] = [_rate(*ab, 0.03) for ab in ((x, w.T), (g, w), (g.T, x))]
    return found


def _keeps_subnormals():
    """Whether a product reads fp16 values below 2**-14 as they are: some matrix units take zero."""
    small = torch.full((256, 256), 2.0**-20, device=_device, dtype=torch.float16)
    one = torch.ones_like(small)
    return bool((small @ one == 2.0**-12).all() and (one @ small == 2.0**-12).all())


def compile_block(dtype: str) -> dict:
    """Compile a block of Qwen3-0.6B, for `kernels`."""
    global _block
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    torch.manual_seed(0)
    folder = ROOT / "models/qwen3-0.6b"
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    layer = Qwen3DecoderLayer(config, 0).to(_device, DTYPES[dtype])
    x, up = (torch.randn(4, ROWS // 4, 1024, device=_device, dtype=DTYPES[dtype]) for _ in range(2))
    x.requires_grad_()
    rotary = [torch.full_like(x[:1, :, :128], value) for value in (0.8, 0.6)]

    def run(forward):
        out = forward(x, position_embeddings=rotary)
        return torch.autograd.grad(out, [x, *layer.parameters()], up)[0]

    _block = [functools.partial(run, f) for f in (layer, torch.compile(layer, dynamic=False))]
    _block[1]()
    return {}


def kernels(dtype: str) -> dict:
    """What eager kernels and fused ones take for a block's forward and backward, and for the loss:
    [ms eager, ms fused, relative difference], or the problem. Also the speed of the host."""
    from llm_demo.core import loss

    logits = torch.randn(ROWS, 151_936, device=_device, dtype=DTYPES[dtype])
    targets = torch.arange(ROWS, device=_device)

    def gradient(f):
        copy = logits.clone()
        f(copy, targets)
        return copy

    losses = loss._loss_of_logits, loss._kernel(_device.type) or loss._loss_of_logits
    gradients = [functools.partial(gradient, f) for f in losses]
    in_place = [functools.partial(f, logits, targets) for f in losses]
    answer = host_speed()
    for name, results, runs in (("block", _block, _block), ("loss", gradients, in_place)):
        try:
            plain, fused = (f() for f in results)
            norms = [x.norm(dtype=torch.float32) for x in (fused - plain, plain)]
            error = (norms[0] / norms[1]).item()
            del plain, fused
            answer[name] = [*map(_ms, runs), error]
        except Exception as e:
            answer[name] = first_line(e)
    return answer


def _ms(run):
    """Milliseconds of run(): the best of five."""
    spent = []
    for _ in range(6):
        _wait()
        begun = time.perf_counter()
        run()
        _wait()
        spent.append(time.perf_counter() - begun)
    return 1e3 * min(spent[1:])


def host_speed() -> dict:
    """Seconds of 3 million additions in Python; microseconds to launch a kernel, with a GPU."""

    def add():
        total = 0
        for i in range(ADDITIONS):
            total += i

    def launch():
        for _ in range(1000):
            x.add_(1)

    begun = time.perf_counter()
    add()
    answer = {"python_s": time.perf_counter() - begun}
    if _device is not None and _device.type == "cuda":
        x = torch.zeros(1, device=_device)
        answer["launch_us"] = _ms(launch)  # of 1,000
    return answer


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
