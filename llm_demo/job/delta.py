"""Chooses how the gated delta rule of linear attention is computed, see core/delta.py.

`python -m llm_demo.job.delta RULE DTYPE HEADS HEADS WIDTH WIDTH` tries a kernel on this GPU. One of
another version may ignore where documents begin, or have a wrong backward: neither is assumed."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

from llm_demo.core.attention import IMPLS, make_documents
from llm_demo.core.delta import RULES
from llm_demo.core.errors import UserError
from llm_demo.job.args import Args
from llm_demo.job.choices import probe_once
from llm_demo.job.costs import is_hybrid
from llm_demo.job.device import DTYPES, Device, dtype_name

MODULE = "llm_demo.job.delta"
# that make the buckets which `chunked` needs, or need none
BUCKETED = ("sdpa", "bucketed", "bucketed_math")
BOUNDS = {"fp32": 1e-2, "bf16": 2e-2, "fp16": 1e-2}  # of the norm; kernels use TF32 for fp32


def decide_rule(
    args: Args, ask: Callable, device: Device, dtype: torch.dtype, config, probe=probe_once
) -> tuple[tuple[str, tuple], list[str]]:
    """((a key of RULES, the backends of attention that go with it), lines). ask: as of
    decide_compute. Raises UserError for flags that don't work with a delta rule."""
    if not is_hybrid(config):
        return ("chunked", IMPLS), []
    name, lines, why = config.model_type, [], "on a CPU"
    for flag, none in (("sequence_parallel", 1), ("tensor_parallel", 1), ("psgd_rank", 0)):
        if getattr(args, flag, none) != none:
            raise UserError(f"--{flag} does not work with the linear attention of {name}")
    if device.type == "cuda":
        why = "slow on a GPU; pip install fla-core for its kernels"
        given = (dtype_name(dtype), *heads_of_rule(config))
        for rule in ("fla", "fla_kda") if importlib.util.find_spec("fla") else ():
            problem = ask(lambda rule=rule: probe(MODULE, rule, *given, versions=versions()))
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


def heads_of_rule(config) -> tuple[int, int, int, int]:
    """(heads of keys, heads of values, their widths)."""
    return (config.linear_num_key_heads, config.linear_num_value_heads,
            config.linear_key_head_dim, config.linear_value_head_dim)  # fmt: skip


def results_of(rule: str, tensors: list, up: torch.Tensor, cu: torch.Tensor) -> list[torch.Tensor]:
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
    tensors.insert(3, -0.1 * draw(values).abs())  # the decay's logarithm is in fp32
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
