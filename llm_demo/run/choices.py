"""Chooses kernels that are fast and correct here: of attention, of experts, by torch.compile.

A kernel can fail late and elsewhere: all checks may pass and the launch still break every later
call. So each is tried in a process of its own, by `python -m llm_demo.run.choices`."""

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.attention import sdpa_kernel

from llm_demo.core.attention import BACKENDS, FASTEST_FIRST, IMPLS, LONG, make_documents
from llm_demo.core.errors import UserError
from llm_demo.flags.args import Args
from llm_demo.machine.device import (
    DTYPES,
    KERNEL_VARIABLES,
    Device,
    dtype_name,
    is_sm,
    planned,
    this_device,
)
from llm_demo.machine.files import cache_folder, hash_of
from llm_demo.machine.process import PARENT
from llm_demo.model.costs import experts_of, heads_of, share_of_heads

BOUNDS = {"fp32": 1e-3, "bf16": 4e-2, "fp16": 1e-2}  # of errors relative to plain fp32
MODULE = "llm_demo.run.choices"


class Compute(NamedTuple):
    dtype: torch.dtype  # compute dtype; masters are fp32
    attn_impl: str
    compile: bool
    product: str = "looped"  # of experts, see core/experts.py
    lora: tuple | None = None  # a core.lora.Lora: adapters, the model itself is frozen
    attention_kept: int = 0  # the last blocks whose attention is not recomputed
    fp8: str = ""  # a recipe of core.fp8
    rule: str = "chunked"  # of linear attention, see core/delta.py


def probe_once(module: str, *args, versions: tuple = (), seconds: int = 180) -> str | None:
    """The last line of `python -m module args` if it failed; None if it succeeded.

    A success is remembered by module, arguments, device, PyTorch, `versions` and the variables
    that choose kernels, in $LLM_DEMO_CACHE or ~/.cache/llm_demo. A failure is not: its cause, such
    as a missing compiler, may be gone next time. For a card that is only planned for: None."""
    if planned():
        return None
    device = this_device()
    chosen = sorted(item for item in os.environ.items() if item[0].startswith(KERNEL_VARIABLES))
    key = [module, args, device.name, device.arch, torch.__version__, versions, chosen]
    file = Path(cache_folder()) / "worked" / hash_of(key)[:24]
    if file.exists():
        return None
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env[PARENT] = str(os.getpid())
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    command = [sys.executable, "-m", module, *map(str, args)]
    if seconds > 180:
        print(f"trying {args[0]}: takes minutes the first time", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"no result within {seconds} s"
    if done.returncode:
        return ((done.stderr or done.stdout).strip().splitlines() or ["failed silently"])[-1]
    with contextlib.suppress(OSError):  # a read-only cache: test again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return None


# ---------------------------------------------------------------- attention


def why_not(impl: str, device: Device, dtype: torch.dtype, single: bool) -> str | None:
    """Why `impl` can't run on this device, without trying it; None if it may run.

    single: no row holds more than one document."""
    if impl == "sdpa":
        return None if single else "rows hold several documents"
    if impl in ("bucketed", "bucketed_math", "math"):
        return None
    if impl == "varlen" and importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"PyTorch {torch.__version__} has no varlen_attn (it came with 2.10)"
    if impl == "varlen_cudnn" and device.vendor == "amd":
        return "cuDNN is for NVIDIA GPUs"
    if impl == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "the flash-attn package is not installed"
    if device.type == "cpu":
        return "has no CPU kernel"
    if dtype == torch.float32:
        return "needs bf16 or fp16"
    if not has_fused_kernels(device):
        built = "PyTorch's ROCm build " if impl == "varlen" else "flash-attn "
        return f"{built * (device.vendor == 'amd')}has no kernel for {device.arch}"
    return None


def has_fused_kernels(device: Device) -> bool:
    amd = ("gfx90a", "gfx942", "gfx950", "gfx11", "gfx12")
    return is_sm(device, 80) or device.vendor == "amd" and device.arch.startswith(amd)


def choose_attention(
    asked: str, device: Device, dtype: torch.dtype, heads, single=False, probe=None, longest=0,
    among: tuple = IMPLS,
) -> tuple[str, list]:  # fmt: skip
    """(backend, reasons): the fastest backend that runs here, and a line for each rejected one.

    heads: as costs.Heads. single: as in why_not. probe(impl, dtype, heads) -> error or None is
    called for each candidate on a GPU. longest: tokens of the longest document. among: what auto
    chooses from. Raises UserError if a requested backend can't run."""
    if asked != "auto" and asked not in IMPLS:
        raise UserError(f"--attn_impl {asked}: choose from auto, {', '.join(IMPLS)}")
    probe = probe or probe_backend
    reasons = []
    impls = among if asked == "auto" else (asked,)
    if asked == "auto" and not (longest >= LONG and is_sm(device, 90)):
        impls = [impl for impl in among if impl != "varlen_cudnn"]  # no gain, or not measured
    for impl in impls:
        problem = why_not(impl, device, dtype, single)
        if (impl, asked) == ("sdpa", "auto") and not has_fused_kernels(device):
            # without fused kernels, buckets gain more by computing less padding
            problem = problem or "bucketed is as fast without fused kernels"
        if problem is None and device.type == "cuda" and not impl.endswith("math"):
            problem = probe(impl, dtype, heads)
        if problem is None:
            return impl, reasons
        reasons.append(f"{impl}: {problem}")
    raise UserError(f"--attn_impl {asked} can't run on {device}: {reasons[0].split(': ', 1)[1]}")


def probe_backend(impl: str, dtype: torch.dtype, heads) -> str | None:
    """Why `impl` fails or is wrong here, tested in its own process; None if it is correct."""
    versions = (version("flash_attn"),) if impl == "flash_attn" else ()
    given = "attention", dtype_name(dtype), impl, *heads
    return probe_once(MODULE, *given, versions=versions)


def compare_with_math(
    impl: str, dtype: torch.dtype, heads, device: str, fused: bool = False
) -> float:
    """Largest error of output and gradients against fp32 math, relative to the largest value.

    fused: without SDPA's math kernel, which it takes silently if it refuses the fused ones. Raises
    RuntimeError if it refuses them."""
    H, KV, D, E = heads
    B, S, lengths = 2, 256, [256, 256] if impl == "sdpa" else [250, 6, 100, 156]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist(), B * S], dtype=torch.int32)
    torch.manual_seed(0)
    shapes = (H, D), (KV, D), (KV, E)
    leaves = [torch.randn(B, n, S, width, device=device).to(dtype) for n, width in shapes]
    up = torch.randn(B, S, H, E, device=device).to(dtype)
    results = []
    for which, cast in ((impl, dtype), ("math", torch.float32)):
        qkv = [x.detach().to(cast).requires_grad_() for x in leaves]
        docs = make_documents(cu, (B, S), which, torch.device(device), long=120)
        if fused and which == impl:
            # with full rows, bucketed is sdpa without its own list of kernels
            with sdpa_kernel(FASTEST_FIRST[:-1], set_priority=impl == "sdpa"):
                out = BACKENDS["bucketed"](*qkv, docs, D**-0.5)
        else:
            out = BACKENDS[which](*qkv, docs, D**-0.5)
        results.append([out, *torch.autograd.grad(out, qkv, up.to(cast))])
    pairs = zip(*results, strict=True)
    return max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def attention_fault(dtype: str, impl: str, *heads: str) -> str | None:
    """What is wrong with a backend on this GPU. heads: as costs.Heads, as text."""
    device = this_device()
    fused = impl in ("sdpa", "bucketed") and has_fused_kernels(device)
    try:
        error = compare_with_math(impl, DTYPES[dtype], map(int, heads), "cuda", fused)
    except RuntimeError as e:
        if not fused or not re.search("No (available kernel|viable backend)", str(e)):
            raise
        allow, name = "", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
        if device.arch.startswith(("gfx11", "gfx12")) and os.environ.get(name) != "1":
            allow = f"; if those for {device.arch} are experimental, {name}=1 allows them"
        return f"PyTorch refuses its fused kernels here; bucketed_math runs the math kernel{allow}"
    return above("the result differs from math", error, dtype)


def above(what: str, error: float, dtype: str) -> str | None:
    """What to say of an error that is above the bound of a compute dtype, or NaN."""
    bound = BOUNDS[dtype]
    return None if error < bound else f"{what} by {error:.1e}, the limit is {bound:.0e}"


def fused_kernels(impl: str) -> list:
    """The operators that backend `impl` may run, as selective checkpointing names them."""
    if impl == "varlen":
        importlib.import_module("torch.nn.attention.varlen")  # which registers it
        names = ["torch_attn._varlen_attn"]
    elif impl == "varlen_cudnn":
        names = ["llm_demo.attend_documents"]
    elif impl == "flash_attn":
        importlib.import_module("flash_attn.flash_attn_interface")
        names = ["flash_attn._flash_attn_varlen_forward"]
    else:
        kinds = "cudnn_attention", "flash_attention", "efficient_attention"
        names = [f"aten._scaled_dot_product_{kind}" for kind in (*kinds, f"{kinds[1]}_for_cpu")]
    places = [(getattr(torch.ops, space), op) for space, op in (n.split(".") for n in names)]
    return [getattr(space, op).default for space, op in places if hasattr(space, op)]


# ---------------------------------------------------------------- experts


def choose_product(config, device: Device, dtype: torch.dtype, probe=None) -> tuple[str, str]:
    """(a name from experts.PRODUCTS, the reason). probe() -> error or None runs on a GPU."""
    importlib.import_module("transformers.integrations.moe")  # which registers both
    if device.type == "cpu":
        return "looped", "on a CPU"
    if dtype != torch.bfloat16:
        return "looped", "the grouped product needs bf16"
    if config.hidden_size % 8 or config.moe_intermediate_size % 8:
        return "looped", "the grouped product needs sizes that are multiples of 8"
    probe = probe or functools.partial(probe_once, MODULE, "experts", dtype_name(dtype))
    if problem := probe():
        return "looped", f"the grouped product does not work here: {problem}"
    if is_sm(device, 90) and not is_sm(device, 110):
        return "grouped", "one kernel for all experts"
    return "grouped", f"PyTorch's, which may be a loop over experts on {device.arch}"


def why_not_compiled(product: str) -> str | None:
    """Why blocks with this product can't be compiled, if so."""
    if product == "looped" and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        theirs = f"the looped product's backward in transformers {version('transformers')}"
        return f"{theirs} can't be compiled: upgrade it"
    return None


def experts_fault(dtype: str) -> str | None:
    """What differs between both products, with an expert that has no rows."""
    from llm_demo.core.experts import PRODUCTS

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight = torch.randn(96, 64, device=device), torch.randn(4, 128, 64, device=device)
    ends = torch.tensor([40, 40, 41, 96], dtype=torch.int32, device=device)
    results = []
    for product in PRODUCTS.values():
        leaves = [t.to(DTYPES[dtype]).requires_grad_() for t in (x, weight)]
        y = product(leaves[0], leaves[1].mT, ends)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for name, a, b in zip(("results", "gradients", "weights' gradients"), *results, strict=True):
        if not (a.float() - b.float()).norm() <= 1e-2 * b.float().norm():
            return f"{name} differ from single products"
    return None


# ---------------------------------------------------------------- torch.compile


def choose_compile(
    asked: bool | None, device: Device, attn_impl: str, probe=None, problem: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[bool, str]:  # fmt: skip
    """(whether to compile, the reason). asked: None decides here. problem: why this model's blocks
    can't be compiled, if so.

    probe() -> error or None runs on a GPU before any real compilation: without a C compiler, for
    example, Triton fails only in the first step, and no one has run our kernel on some cards."""
    probe = probe or functools.partial(probe_once, MODULE, "compile", dtype_name(dtype), attn_impl)
    if asked is False:
        return False, "as requested"
    if asked is None:
        if device.type == "cpu":
            return False, "compiling takes longer than it saves on a CPU"
        if not is_sm(device, 80):
            return False, f"not measured on {device.arch}; --compile tests and enables it"
        if attn_impl.startswith("bucketed") or attn_impl == "math":
            return False, f"attention {attn_impl} has shapes that change with the data"
    if problem := problem or (probe() if device.type == "cuda" else None):
        return False, f"torch.compile does not work here: {problem}"
    return True, "as requested" if asked else "fewer and larger kernels"


def compare_with_eager(impl: str, dtype: torch.dtype, device: torch.device) -> float:
    """Largest error of a compiled block and loss, with attention `impl`, and of their gradients
    against plain PyTorch in fp32: the norm of the difference, relative to that of the result."""
    # not above: who only chooses does not need them
    from transformers import AutoModelForCausalLM, Qwen3Config

    from llm_demo.core.decoder import Blocks, DecoderLoss, compile_forward
    from llm_demo.core.rows import position_ids

    B, S, columns = 2, 128, 8208  # the loss kernel reads two whole blocks of columns and a part
    config = Qwen3Config(
        vocab_size=columns, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    ids, targets = (torch.randint(columns, shape, device=device) for shape in ((B, S), (B * S,)))
    ends = [S, B * S, B * S] if impl == "sdpa" else [100, S, B * S]
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    plain, ours = (
        AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=f"packed_{name}")
        for name in ("math", impl)
    )
    ours.to(device, dtype)
    plain.to(device).load_state_dict(ours.state_dict())
    ours.model.rotary_emb = plain.model.rotary_emb  # in fp32
    results = []
    for lm, name in ((plain, "math"), (ours, impl)):
        unit = Blocks(list(lm.model.layers), checkpointing=False)
        if lm is ours:
            compile_forward(unit)
        model = DecoderLoss(lm, [unit], compiled=lm is ours)
        where = position_ids(cu.to(device), (B, S)), make_documents(cu, (B, S), name, device)
        loss = model(ids, *where, torch.arange(B * S, device=device), targets)
        results.append([loss, *torch.autograd.grad(loss, list(lm.parameters()))])
    pairs = zip(*results, strict=True)
    return max(((a - b.float()).norm() / a.norm()).item() for a, b in pairs)


def compiling_fault(dtype: str, impl: str) -> str | None:
    """What is wrong with compiled blocks and loss on this GPU."""
    error = compare_with_eager(impl, DTYPES[dtype], torch.device("cuda"))
    return above("compiled and plain results differ", error, dtype)


def compiles_adamw(
    works: bool, n_params: int, world_size: int, say: Callable, flat: bool = False
) -> bool:
    """Whether to compile AdamW. works: torch.compile works here; n_params: of the whole model;
    flat: a unit's parameters are one tensor. On two H200 it gained 3 % for 8B; for 0.6B with small
    tensors the gain was within noise (bench/LOG.md)."""
    chosen = works and (flat or n_params / world_size >= 1e9)
    if chosen:
        why = "for large tensors" if flat else "faster from 1e9 parameters a process on"
        say(f"adamw: compiled ({why})")
    return chosen


# ---------------------------------------------------------------- all of them


def decide_compute(
    args: Args, ask: Callable, device: Device, dtype: torch.dtype, config, packs: list,
    among: tuple = IMPLS,
) -> tuple[Compute, list[str]]:  # fmt: skip
    """(kernels of attention and experts, and whether to compile; lines). ask(choose): what choose()
    returns on rank 0. packs: the Rows of all data. among: as of choose_attention."""
    heads = share_of_heads(heads_of(config), args.sequence_parallel)
    single = all(p.single for p in packs)
    longest = max((p.longest for p in packs), default=0)
    attn_impl, rejected = ask(
        lambda: choose_attention(args.attn_impl, device, dtype, heads, single, None, longest, among)
    )
    why = "; ".join(f"not {reason}" for reason in rejected)
    if args.attn_impl != "auto":
        why = "as requested"
    lines = [f"attention: {attn_impl}" + (f" ({why})" if why else "")]
    product, problem = "looped", None
    if experts_of(config):
        if args.activation_memory_budget < 1:
            raise UserError(
                "--activation_memory_budget may choose other experts in the backward: use "
                "--use_activation_checkpointing"
            )
        product, why = ask(lambda: choose_product(config, device, dtype))
        lines.append(f"experts: {product} products ({why})")
        problem = why_not_compiled(product)
    compiled, why = ask(
        lambda: choose_compile(args.compile, device, attn_impl, None, problem, dtype)
    )
    lines.append(f"compile: {'yes' if compiled else 'no'} ({why})")
    if args.activation_memory_budget < 1 and not compiled:
        raise UserError("--activation_memory_budget works on compiled blocks: add --compile")
    return Compute(dtype, attn_impl, compiled, product), lines


PROBES = {"attention": attention_fault, "experts": experts_fault, "compile": compiling_fault}

if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(PROBES[sys.argv[1]](*sys.argv[2:]))
