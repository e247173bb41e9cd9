"""Kernels of flash-linear-attention (fla) for the gated delta rule, see delta.py. They need Triton.

    fla      its kernel of this rule
    fla_kda  its kernel for a decay of each channel, given one decay for all: for GPUs where the
             backward of the first is wrong (Hopper with Triton 3.4 to 3.7.0)

One of another version may ignore where documents begin, or have a wrong backward: neither is
assumed, see machine/probes.py."""

import inspect
from functools import partial

import torch
from torch import Tensor


def _run_kernel(kda: bool, q, k, v, g, beta, cu_seqlens, boundaries) -> Tensor:
    """As _by_kernel. Nothing but the kernel's autograd function: what else PyTorch computes within
    an operator has no gradient."""
    if kda:
        from fla.ops.kda import chunk_kda as rule
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule
    rule = partial(rule, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)
    if boundaries is not None and "cu_seqlens_cpu" in inspect.signature(rule).parameters:
        rule = partial(rule, cu_seqlens_cpu=boundaries)  # else it waits for the device
    return rule(q, k, v, g, beta)[0]


def of_channels(g: Tensor, q: Tensor) -> Tensor:
    """The decay of each head for each of its channels: [1, T, HV] -> [1, T, HV, D]."""
    return g[..., None].expand(*g.shape, q.shape[-1])


@torch.library.custom_op("llm_demo::delta_rule", mutates_args=())
def _by_kernel(
    kda: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    boundaries: Tensor | None,
) -> Tensor:
    """q and k [1, T, H, D], v [1, T, HV, E], g and beta [1, T, HV] -> as v. An operator, since the
    compiler can't see into these kernels. It keeps its inputs alone, and its backward computes the
    forward again."""
    if kda:
        g = of_channels(g, q)
    return _run_kernel(kda, q, k, v, g, beta, cu_seqlens, boundaries)


@_by_kernel.register_fake
def _(kda, q, k, v, *rest):
    return v.new_empty(v.shape)


@torch.library.custom_op("llm_demo::delta_rule_backward", mutates_args=())
def _kernel_backward(
    kda: bool,
    up: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    boundaries: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if kda:
        g = of_channels(g, q)
    leaves = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
    with torch.enable_grad():
        out = _run_kernel(kda, *leaves, cu_seqlens, boundaries)
    dq, dk, dv, dg, dbeta = torch.autograd.grad(out, leaves, up)
    if kda:
        dg = dg.sum(-1)
    return dq, dk, dv, dg, dbeta


@_kernel_backward.register_fake
def _(kda, up, *rest):
    return tuple(t.new_empty(t.shape) for t in rest[:5])


def _keep_kernel_inputs(ctx, inputs, output):
    ctx.kda, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_kernel(ctx, up):
    return None, *_kernel_backward(ctx.kda, up.contiguous(), *ctx.saved_tensors), None, None


_by_kernel.register_autograd(_differentiate_kernel, setup_context=_keep_kernel_inputs)


def by_kernel(kda: bool, q, k, v, g, beta, documents) -> Tensor:
    """As delta.chunked. documents: attention.Documents."""
    flat = [x.flatten(0, 1)[None].contiguous() for x in (q, k, v, g, beta)]
    boundaries = documents.boundaries and documents.boundaries.tensor
    return _by_kernel(kda, *flat, documents.cu_seqlens, boundaries).view(*q.shape[:2], *v.shape[2:])


KERNELS = {"fla": partial(by_kernel, False), "fla_kda": partial(by_kernel, True)}
