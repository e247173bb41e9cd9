"""Chooses how the gated delta rule of linear attention is computed, see core/delta.py.

In PyTorch, or by a kernel of flash-linear-attention (fla), which needs Triton:

    fla      its kernel of this rule
    fla_kda  its kernel for a decay of each channel, given one decay for all: for GPUs where the
             backward of the first is wrong (Hopper with Triton 3.4 to 3.7.0)

`python -m llm_demo.run.choose_delta RULE DTYPE HEADS HEADS WIDTH WIDTH` tries a kernel on this GPU.
One of another version may ignore where documents begin, or have a wrong backward: neither is
assumed."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from llm_demo.core.attention import IMPLS, Documents, make_documents
from llm_demo.core.delta import RULES
from llm_demo.core.errors import UserError
from llm_demo.flags.args import Args
from llm_demo.machine.device import DTYPES, Device, dtype_name
from llm_demo.model.costs import heads_of_rule, is_hybrid
from llm_demo.run.choices import probe_once

MODULE = "llm_demo.run.choose_delta"
# that make the buckets which `chunked` needs, or need none
BUCKETED = ("sdpa", "bucketed", "bucketed_math")
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}  # of the norm


# ---------------------------------------------------------------- kernels


def _kernel(kda: bool, q, k, v, g, beta, cu_seqlens, boundaries) -> Tensor:
    """As _by_kernel. Nothing but the kernel's autograd function: what else PyTorch computes within
    an operator has no gradient."""
    if kda:
        from fla.ops.kda import chunk_kda as rule
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule
    how = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": cu_seqlens}
    if boundaries is not None and "cu_seqlens_cpu" in inspect.signature(rule).parameters:
        how["cu_seqlens_cpu"] = boundaries  # else it waits for the device
    return rule(q, k, v, g, beta, **how)[0]


@torch.library.custom_op("llm_demo::delta_rule", mutates_args=())
def _by_kernel(
    kda: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor,
    boundaries: Tensor | None,
) -> Tensor:  # fmt: skip
    """q and k [1, T, H, D], v [1, T, HV, E], g and beta [1, T, HV] -> as v. An operator, since the
    compiler can't see into these kernels. It keeps its inputs alone, and its backward computes the
    forward again."""
    g = g[..., None].expand(*g.shape, q.shape[-1]) if kda else g
    return _kernel(kda, q, k, v, g, beta, cu_seqlens, boundaries)


@_by_kernel.register_fake
def _(kda, q, k, v, *rest):
    return v.new_empty(v.shape)


@torch.library.custom_op("llm_demo::delta_rule_backward", mutates_args=())
def _backward(
    kda: bool, up: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    cu_seqlens: Tensor, boundaries: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    g = g[..., None].expand(*g.shape, q.shape[-1]) if kda else g
    leaves = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
    with torch.enable_grad():
        out = _kernel(kda, *leaves, cu_seqlens, boundaries)
    dq, dk, dv, dg, dbeta = torch.autograd.grad(out, leaves, up)
    return dq, dk, dv, dg.sum(-1) if kda else dg, dbeta


@_backward.register_fake
def _(kda, up, *rest):
    return tuple(t.new_empty(t.shape) for t in rest[:5])


def _keep(ctx, inputs, output):
    ctx.kda, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, up):
    return None, *_backward(ctx.kda, up.contiguous(), *ctx.saved_tensors), None, None


_by_kernel.register_autograd(_differentiate, setup_context=_keep)


def by_kernel(kda: bool, q, k, v, g, beta, documents: Documents) -> Tensor:
    """As core.delta.chunked."""
    flat = [x.flatten(0, 1)[None].contiguous() for x in (q, k, v, g, beta)]
    boundaries = documents.boundaries and documents.boundaries.tensor
    return _by_kernel(kda, *flat, documents.cu_seqlens, boundaries).view(*q.shape[:2], *v.shape[2:])


KERNELS = {"fla": partial(by_kernel, False), "fla_kda": partial(by_kernel, True)}
RULES.update(KERNELS)


# ---------------------------------------------------------------- the choice


def refuse_flags(args: Args, config) -> None:
    """Raise UserError for flags that don't work with a delta rule."""
    for flag, none in (("sequence_parallel", 1), ("tensor_parallel", 1), ("psgd_rank", 0)):
        if is_hybrid(config) and getattr(args, flag, none) != none:
            raise UserError(
                f"--{flag} does not work with the linear attention of {config.model_type}"
            )


def try_rule(rule: str, dtype: str, config) -> str | None:
    """Why a kernel can't be used on this GPU; None if it can."""
    given = rule, dtype, *heads_of_rule(config)
    # Triton tries variants of each kernel
    return probe_once(MODULE, *given, versions=versions(), seconds=900)


def decide_rule(
    args: Args, ask: Callable, device: Device, dtype: torch.dtype, config, probe=try_rule
) -> tuple[tuple[str, tuple], list[str]]:
    """((a key of RULES, the backends of attention that go with it), lines). ask: as of
    decide_compute. Raises UserError for backends of attention that don't work with it."""
    if not is_hybrid(config):
        return ("chunked", IMPLS), []
    name, lines, why = config.model_type, [], "on a CPU"
    if device.type == "cuda":
        why = "slow on a GPU; pip install fla-core for its kernels"
        for rule in KERNELS if importlib.util.find_spec("fla") else ():
            problem = ask(lambda rule=rule: probe(rule, dtype_name(dtype), config))
            if problem is None:
                return (rule, IMPLS), [*lines, f"linear attention: {rule}"]
            lines.append(f"linear attention: not {rule}: {problem}")
            why = "slow on a GPU"
    if args.attn_impl not in ("auto", *BUCKETED):
        raise UserError(
            f"--attn_impl {args.attn_impl}: without kernels of fla-core, the linear attention of "
            f"{name} needs one of {', '.join(BUCKETED)}"
        )
    return ("chunked", BUCKETED), [*lines, f"linear attention: chunked, in PyTorch ({why})"]


def versions() -> tuple[str, ...]:
    """Of what has kernels, or compiles them."""
    found = []
    for package in ("fla-core", "triton", "tilelang"):
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("")
    return tuple(found)


def results_of(rule: str, tensors: list, up: Tensor, cu: Tensor) -> list[Tensor]:
    """The output and the gradients of the rule's inputs. cu: int32 [D+1], on the CPU."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    documents = make_documents(cu, tuple(up.shape[:2]), "bucketed", up.device)
    out = RULES[rule](*leaves, documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, up.to(out.dtype))]


def rule_fault(rule: str, dtype: str, *heads: str, device: str = "cuda") -> str | None:
    """What is wrong with a kernel on this GPU. heads: as heads_of_rule, as text."""
    keys, values, width, wide = map(int, heads)
    B, S, first = 2, 192, 75
    cu = torch.tensor([0, first, S, B * S, B * S], dtype=torch.int32)
    make, dtype_of = torch.Generator(device).manual_seed(0), DTYPES[dtype]
    draw = lambda *shape: torch.randn(B, S, *shape, generator=make, device=device)  # noqa: E731
    tensors = [draw(keys, width), draw(keys, width), draw(values, wide), draw(values).sigmoid()]
    tensors = [t.to(dtype_of) for t in tensors]
    strength = torch.logspace(-2, 1.2, values, device=device)  # from long memories to none
    tensors.insert(3, -strength * draw(values).abs())  # the decay's logarithm is in fp32
    up = draw(values, wide).to(dtype_of)
    ours = results_of(rule, tensors, up, cu)
    for name, a, b in zip(
        ("results", *(f"gradients of {n}" for n in ("q", "k", "v", "decay", "beta"))),
        ours,
        results_of("chunked", [t.float() for t in tensors], up.float(), cu),
        strict=True,
    ):
        error = ((a.float() - b).norm() / b.norm()).item()
        if not error <= BOUNDS[dtype]:
            return f"{name} differ from PyTorch's by {error:.1e} of the norm"
    changed = [t.clone() for t in (*tensors, up)]
    for t in changed:
        t[0, :first] *= 0.5  # the first document; the others must not see it
    again = results_of(rule, changed[:-1], changed[-1], cu)
    for a, b in zip(ours, again, strict=True):
        if not torch.equal(a.flatten(0, 1)[first:], b.flatten(0, 1)[first:]):
            return "a document changes what another gives"
    return None


if __name__ == "__main__":
    sys.exit(rule_fault(*sys.argv[1:]))
