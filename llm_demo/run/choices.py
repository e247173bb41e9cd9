"""Chooses kernels that are fast and correct here: of attention, experts, fp8, by torch.compile.

A decision is (value, lines): what was decided and what the log says of it. On a GPU it is made by
probes, see machine/probes.py. They run on one process, whose decision the others then take."""

import functools
import importlib
import importlib.util
from importlib.metadata import version
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from llm_demo.core.attention import IMPLS, LONG, WIDEST, varlen_has_windows
from llm_demo.core.decoder import delta_layers, skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.flags.args import Args
from llm_demo.machine.device import Device, dtype_name, has_fused_kernels, is_sm
from llm_demo.machine.dist import from_rank0, once_per_node
from llm_demo.machine.text import layer_kinds
from llm_demo.model.costs import heads_of, heads_of_rule, param_count, shares_of_heads, windows_of
from llm_demo.model.families import experts_of, family_name, is_hybrid

# backends of attention that make the buckets which linear attention in PyTorch needs, or need none
BUCKETED = ("sdpa", "bucketed", "bucketed_math")
FLASH = ("varlen_cudnn", "varlen", "flash_attn")  # take heads of up to WIDEST numbers
DELTA_KERNELS = ("fla", "fla_kda")  # of options/delta_kernels.py, the preferred one first


class Compute(NamedTuple):
    dtype: torch.dtype  # compute dtype; masters are fp32
    attn_impl: str
    compile: bool
    product: str = "looped"  # of experts, see core/experts.py
    lora: tuple | None = None  # a options.lora.Lora: adapters, the model itself is frozen
    attention_kept: int = 0  # the last blocks whose attention is not recomputed
    fp8: str = ""  # a recipe of options.fp8
    rule: str = "chunked"  # of linear attention, see options/delta.py


def decoder_of(config, weights, compute: Compute) -> PreTrainedModel:
    """core.decoder.skeleton with the attention, experts and linear attention that were chosen."""
    if {"varlen_cudnn", "efficient"} & {*compute.attn_impl.split("+")}:
        from llm_demo.machine.probes import load_operators

        load_operators(compute.attn_impl)
    lm = skeleton(config, compute.attn_impl, weights, compute.product)
    if delta_layers(lm):
        from llm_demo.options.delta import use_rule

        use_rule(lm, compute.rule)
    return lm


def adapted(
    args: Args, source, compute: Compute, world: World, saver, log
) -> tuple[PreTrainedModel, int, int]:
    """(the decoder on the meta device with its adapters if any, its parameters without them, those
    that are trained). source, saver, log: as those of a run.Job."""
    lm = decoder_of(source.config, source.weights, compute)
    n_params = n_trained = param_count(lm)
    for line in give_fp8(lm, compute, args.tensor_parallel):
        log.say(line)
    if args.base_bits == 4:
        from llm_demo.model.four_bits_base import give_four_bits

        give_four_bits(lm, source, compute, args.seed, world, saver, say=log.say)
    if compute.lora:
        from llm_demo.options.lora import apply_lora

        apply_lora(lm, compute.lora, compute.dtype)
        # of dropout; other random numbers have seeds of their own
        torch.manual_seed(args.seed + world.rank)
        n_trained = compute.lora.parameters
    return lm, n_params, n_trained


def sizes_in_words(n_params: int, n_adapters: int | None, n_local: int) -> str:
    """The numbers of parameters, for the log. n_adapters: of adapters if those are trained;
    n_local: trained by this rank."""
    if n_adapters is None:
        return f"{n_params:,} parameters, {n_local:,} here"
    return (
        f"{n_params:,} frozen parameters, {n_adapters:,} trained in adapters, {n_local:,} of them "
        "here"
    )


def try_kernel(name: str, *arguments: str, packages: tuple = (), seconds: int = 180) -> str | None:
    """machine.probes.try_once, loaded when something is tried."""
    from llm_demo.machine import probes

    return probes.try_once(name, *arguments, packages=packages, seconds=seconds)


# ---------------------------------------------------------------- attention


def why_not(
    impl: str, device: Device, dtype: torch.dtype, single: bool, window: int | None = None
) -> str | None:
    """Why `impl` can't run on this device, without trying it; None if it may run.

    single: no row holds more than one document. window: a sliding one that rows are longer than."""
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
    if dtype == torch.float32 and impl in FLASH:
        return "needs bf16 or fp16"
    if not has_fused_kernels(device):
        return f"has no kernel for {device.arch}"
    if impl == "varlen" and window and not varlen_has_windows():
        return f"varlen_attn of PyTorch {torch.__version__} has no sliding windows"
    return None


def short_window(windows: list[int | None], seq_len: int) -> int | None:
    """A sliding window of blocks, if they have one that rows are longer than."""
    shorter = [w for w in windows if w is not None and w < seq_len]
    return min(shorter, default=None)


def choose_attention(
    asked: str,
    device: Device,
    dtype: torch.dtype,
    heads: tuple,
    single: bool = False,
    longest: int = 0,
    among: tuple[str, ...] = IMPLS,
    probe=try_kernel,
    window: int | None = None,
) -> tuple[str, list[str]]:
    """(backend, reasons): the fastest backend that runs here, and a line for each rejected one.

    heads: as costs.Heads. single: as in why_not. longest: tokens of the longest document. among:
    what auto chooses from. probe: as probes.try_once. window: as in why_not; a kernel is then also
    tried with one. Raises UserError if a requested backend can't run."""
    auto = asked == "auto"
    if not auto and asked not in IMPLS:
        raise UserError(f"--attn_impl {asked}: choose from auto, {', '.join(IMPLS)}")
    impls = among if auto else (asked,)
    if auto and not (longest >= LONG and is_sm(device, 90)):
        impls = [impl for impl in among if impl != "varlen_cudnn"]  # no gain, or not measured
    width = max(heads[2:])
    if auto and width <= WIDEST:
        impls = [impl for impl in impls if impl != "efficient"]  # others are faster
    elif auto:  # sdpa would run the same kernel and keep keys and values for each query's head
        impls = sorted(impls, key=lambda impl: impl != "efficient")
    numbers = [*heads, window] if window else heads
    reasons = []
    for impl in impls:
        problem = why_not(impl, device, dtype, single, window=window)
        if problem is None and impl in FLASH and width > WIDEST:
            problem = f"takes heads of up to {WIDEST}, not of {width}"
        if problem is None and impl == "sdpa" and auto and not has_fused_kernels(device):
            # without fused kernels, buckets gain more by computing less padding
            problem = "bucketed is as fast without fused kernels"
        if problem is None and impl == "sdpa" and auto and window:
            problem = "with a sliding window it computes more than others"
        if problem is None and device.type == "cuda" and not impl.endswith("math"):
            packages = ("flash_attn",) if impl == "flash_attn" else ()
            problem = probe("attention", dtype_name(dtype), impl, *numbers, packages=packages)
        if problem is None:
            return impl, reasons
        reasons.append(f"{impl}: {problem}")
    raise UserError(f"--attn_impl {asked} can't run on {device}: {reasons[0].split(': ', 1)[1]}")


def choose_backends(
    args: Args,
    device: Device,
    dtype: torch.dtype,
    config,
    packs: list,
    among: tuple[str, ...] = IMPLS,
    probe=try_kernel,
) -> tuple[str, list[str]]:
    """(the backends of attention, as attention.attend takes them, lines). Wide heads have their own
    if --attn_impl does not take them: the fastest that does. packs, among, probe: as of
    decide_compute and choose_attention. Raises UserError."""
    longest_row = max((p.seq_len for p in packs), default=0)
    chosen, lines = {}, []
    kinds = shares_of_heads(config, args.sequence_parallel)
    narrow = [heads for heads in kinds if heads.width <= WIDEST]
    for heads in kinds:
        wide = heads.width > WIDEST
        windows = [
            window
            for i, window in enumerate(windows_of(config))
            if heads_of(config, i).width == heads.width
        ]
        asked = args.attn_impl
        if asked in FLASH and wide and narrow:  # it is for the others
            asked = "auto"
        impl, rejected = choose_attention(
            asked,
            device,
            dtype,
            heads=heads,
            single=all(p.single for p in packs),
            longest=max((p.longest for p in packs), default=0),
            among=among,
            probe=probe,
            window=short_window(windows, longest_row),
        )
        # of two narrow kinds the backend that is later in the list, since it takes more
        chosen[wide] = max(chosen.get(wide, impl), impl, key=IMPLS.index)
        why = "; ".join(f"not {reason}" for reason in rejected)
        if asked != "auto":
            why = "as requested"
        of_heads = f" in heads of {heads.width}" if wide else ""
        lines.append(f"attention{of_heads}: {impl}" + (f" ({why})" if why else ""))
    return "+".join(dict.fromkeys(chosen[wide] for wide in sorted(chosen))), lines


def fused_kernels(impl: str) -> list:
    """The operators that backend `impl` may run, as selective checkpointing names them."""
    if "+" in impl:
        return [operator for one in impl.split("+") for operator in fused_kernels(one)]
    if impl == "varlen":
        importlib.import_module("torch.nn.attention.varlen")  # which registers it
        names = ["torch_attn._varlen_attn"]
    elif impl == "varlen_cudnn":
        names = ["llm_demo.attend_documents"]
    elif impl == "flash_attn":
        importlib.import_module("flash_attn.flash_attn_interface")
        names = ["flash_attn._flash_attn_varlen_forward"]
    elif impl == "efficient":
        names = ["llm_demo.attend_wide"]
    else:
        kinds = ("cudnn", "flash", "efficient")
        names = [f"aten._scaled_dot_product_{kind}_attention" for kind in kinds]
        names.append("aten._scaled_dot_product_flash_attention_for_cpu")
    operators = []
    for name in names:
        space, operator = name.split(".")
        space = getattr(torch.ops, space)
        if hasattr(space, operator):
            operators.append(getattr(space, operator).default)
    return operators


# ---------------------------------------------------------------- linear attention


def refuse_flags(args: Args, config, proof: tuple | None = None) -> None:
    """Raise UserError for flags that don't work with a delta rule, or that no proof covers.
    proof: as of Source."""
    name = family_name(config)
    if is_hybrid(config):
        why = f"does not work with the linear attention of {name}"
        for flag, none in (("sequence_parallel", 1), ("tensor_parallel", 1), ("psgd_rank", 0)):
            if getattr(args, flag) != none:
                raise UserError(f"--{flag} {why}")
    if proof is None:
        return
    for flag in ("sequence_parallel", "tensor_parallel", "expert_parallel"):
        if (getattr(args, flag) or 1) > 1:
            raise UserError(f"--{flag}: no test shows that it is right for {name}: drop it")
    if args.lora_rank and proof.adapters:
        raise UserError(
            f"--lora_rank: adapters are not right for {name}: a small copy differs in "
            f"{proof.adapters}"
        )


def try_rule(rule: str, dtype: str, config) -> str | None:
    """Why a kernel of linear attention can't be used on this GPU; None if it can."""
    packages = ("fla-core", "triton", "tilelang")  # they have kernels or compile them
    heads = heads_of_rule(config)
    # Triton tries variants of each kernel, which takes minutes
    return try_kernel("delta", rule, dtype, *heads, packages=packages, seconds=900)


def choose_rule(
    attn_impl: str, device: Device, dtype: torch.dtype, config, probe=try_rule
) -> tuple[tuple[str, tuple], list[str]]:
    """((a name for delta.rule_of, the backends of attention that go with it), lines). attn_impl: as
    asked for. probe: as try_rule. Raises UserError for backends that don't work with it."""
    if not is_hybrid(config):
        return ("chunked", IMPLS), []
    lines, why = [], "on a CPU"
    if device.type == "cuda":
        why = "slow on a GPU; pip install fla-core for its kernels"
        for rule in DELTA_KERNELS if importlib.util.find_spec("fla") else ():
            problem = probe(rule, dtype_name(dtype), config)
            if problem is None:
                return (rule, IMPLS), [*lines, f"linear attention: {rule}"]
            lines.append(f"linear attention: not {rule}: {problem}")
            why = "slow on a GPU"
    if attn_impl not in ("auto", *BUCKETED):
        raise UserError(
            f"--attn_impl {attn_impl}: without kernels of fla-core, the linear attention of "
            f"{family_name(config)} needs one of {', '.join(BUCKETED)}"
        )
    return ("chunked", BUCKETED), [*lines, f"linear attention: chunked, in PyTorch ({why})"]


# ---------------------------------------------------------------- experts


def choose_product(config, device: Device, dtype: torch.dtype, probe=try_kernel) -> tuple[str, str]:
    """(a name from experts.PRODUCTS, the reason). probe: as probes.try_once."""
    importlib.import_module("transformers.integrations.moe")  # which registers both
    if device.type == "cpu":
        return "looped", "on a CPU"
    if dtype != torch.bfloat16:
        return "looped", "the grouped product needs bf16"
    # of an expert; some families have no dense network, some no key of its own
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    if config.hidden_size % 8 or width % 8:
        return "looped", "the grouped product needs sizes that are multiples of 8"
    problem = probe("experts", dtype_name(dtype))
    if problem:
        return "looped", f"the grouped product does not work here: {problem}"
    return "grouped", "by PyTorch; one kernel on sm_90 and sm_100, elsewhere perhaps a loop"


def why_not_compiled(product: str) -> str | None:
    """Why blocks with this product can't be compiled, if so."""
    if product == "looped" and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        theirs = f"the looped product's backward in transformers {version('transformers')}"
        return f"{theirs} can't be compiled: upgrade it"
    return None


# ---------------------------------------------------------------- torch.compile


def choose_compile(
    asked: bool | None,
    device: Device,
    attn_impl: str,
    problem: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    probe=try_kernel,
) -> tuple[bool, str]:
    """(whether to compile, the reason). asked: None decides here. problem: why this model's blocks
    can't be compiled, if so. probe: as probes.try_once.

    A GPU is probed before any real compilation: without a C compiler, for example, Triton fails
    only in the first step, and no one has run our kernel on some cards."""
    if asked is False:
        return False, "as requested"
    if asked is None:
        if device.type == "cpu":
            return False, "compiling takes longer than it saves on a CPU"
        if not is_sm(device, 80):
            return False, f"not measured on {device.arch}; --compile tests and enables it"
        for impl in attn_impl.split("+"):
            if impl.startswith("bucketed") or impl == "math":
                return False, f"attention {impl} has shapes that change with the data"
    for impl in attn_impl.split("+"):
        if not problem and device.type == "cuda":
            problem = probe("compile", dtype_name(dtype), impl)
    if problem:
        return False, f"torch.compile does not work here: {problem}"
    return True, "as requested" if asked else "fewer and larger kernels"


def compiles_adamw(
    works: bool, n_params: int, world_size: int, flat: bool = False
) -> tuple[bool, list[str]]:
    """(whether to compile AdamW, lines). works: torch.compile works here; n_params: of the whole
    model; flat: a unit's parameters are one tensor. On two H200 it gained 3 % for 8B; for 0.6B with
    small tensors the gain was within noise (bench/LOG.md)."""
    if not works:
        return False, []
    if flat:
        return True, ["adamw: compiled (for large tensors)"]
    if n_params / world_size >= 1e9:
        return True, ["adamw: compiled (faster from 1e9 parameters a process on)"]
    return False, []


# ---------------------------------------------------------------- fp8


def choose_fp8(
    args: Args, device: Device, compute: Compute, seq_len: int, probe=try_kernel
) -> tuple[str, list[str]]:
    """(--fp8 or "", lines). seq_len: tokens of a row. probe: as probes.try_once. Raises UserError
    where it can't work."""
    if args.fp8 == "none":
        return "", []
    from llm_demo.options.fp8 import BLOCK

    flag, on_gpu = f"--fp8 {args.fp8}", device.type == "cuda"
    tokens = args.micro_batch_size * seq_len // args.sequence_parallel
    multiple = {"rowwise": 16, "blockwise": BLOCK}.get(args.fp8, 1)
    if on_gpu and not is_sm(device, 89):
        raise UserError(f"{flag} needs an NVIDIA GPU of sm_89 or later, not {device}")
    if compute.dtype == torch.float16 or on_gpu and compute.dtype != torch.bfloat16:
        raise UserError(f"{flag} needs --dtype bf16, not {dtype_name(compute.dtype)}")
    if on_gpu and not compute.compile:
        raise UserError(f"{flag} needs compiled blocks, without which it is slower than bf16")
    if tokens % multiple:
        raise UserError(
            f"{flag}: a micro-batch has {tokens} tokens, which must be a multiple of {multiple}: "
            "set --seq_len or --micro_batch_size"
        )
    if not on_gpu:
        return args.fp8, ["fp8: emulated on a CPU, which is slow"]
    problem = probe("fp8", args.fp8)
    if problem:
        raise UserError(f"{flag} does not work here: {problem}")
    return args.fp8, []


def give_fp8(lm: nn.Module, compute: Compute, shares: int) -> list[str]:
    """options.fp8.use_fp8 as decided; lines for the log. Raises UserError if it is for no layer."""
    if not compute.fp8:
        return []
    from llm_demo.options.fp8 import use_fp8

    done, left = layer_kinds(*use_fp8(lm, compute.fp8, shares))
    if not done:
        raise UserError(f"--fp8 {compute.fp8}: no layer of this model's blocks is large enough")
    if experts_of(lm.config):
        left.append("experts and routers")
    rest = ", ".join([*left, "embedding", "head"])
    return [f"fp8: {compute.fp8} products, approximate: {', '.join(done)}; not: {rest}"]


# ---------------------------------------------------------------- 4 bits


def decide_four_bits(args: Args, source, world: World) -> None:
    """Raise UserError on every rank if --base_bits 4 can't work on one of them, and for files in 4
    bits without it. source: a Source."""
    if args.base_bits != 4:
        if source.weights and source.weights.packed:
            raise UserError(
                f"{source.folder} holds weights in 4 bits: train adapters over them with "
                "--lora_rank 16 --base_bits 4 in fsdp/ or fsdp_pp/, or give a copy in bf16"
            )
        return
    from llm_demo.options.four_bits_library import need_library

    once_per_node(world, need_library)
    if world.device.type == "cuda":
        problem = from_rank0(world, functools.partial(try_kernel, "four_bits"))
        if problem:
            raise UserError(f"--base_bits 4 does not work here: {problem}")
        from llm_demo.options import four_bits_kernel  # noqa: F401  a GPU computes the values by it


# ---------------------------------------------------------------- all of them


def decide_compute(
    args: Args, device: Device, dtype: torch.dtype, config, packs: list
) -> tuple[Compute, list[str]]:
    """(kernels of attention and experts, fp8, and whether to compile; lines). packs: the Rows of
    all data, the training rows first. Raises UserError for flags that can't work."""
    (rule, among), lines = choose_rule(args.attn_impl, device, dtype, config)
    attn_impl, more = choose_backends(args, device, dtype, config=config, packs=packs, among=among)
    lines += more
    product, problem = "looped", None
    if experts_of(config):
        if args.activation_memory_budget < 1:
            raise UserError(
                "--activation_memory_budget may choose other experts in the backward: use "
                "--use_activation_checkpointing"
            )
        product, why = choose_product(config, device, dtype)
        lines.append(f"experts: {product} products ({why})")
        problem = why_not_compiled(product)
    compiled, why = choose_compile(args.compile, device, attn_impl, problem, dtype)
    lines.append(f"compile: {'yes' if compiled else 'no'} ({why})")
    if args.activation_memory_budget < 1 and not compiled:
        raise UserError("--activation_memory_budget works on compiled blocks: add --compile")
    compute = Compute(dtype, attn_impl, compiled, product, rule=rule)
    fp8, more = choose_fp8(args, device, compute, packs[0].seq_len if packs else 0)
    return compute._replace(fp8=fp8), [*lines, *more]
