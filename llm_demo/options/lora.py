"""Adapters: LoRA on the matrices of a decoder's blocks, over a frozen base.

Source: "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al. 2021). What is adapted keeps
its own weight under its own name, so that files, sharding and estimates need not know of it. The
factors of a linear layer have the names that PEFT gives them in its files. Those of a block's
experts are two tensors beside the fused matrix, with a factor for each expert, so that they are
sharded and spread as it is; experts.py multiplies by them."""

import functools
import math
import types
import zlib
from collections.abc import Callable, Container
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from llm_demo.core.decoder import FUSED, fused, kept_in_fp32, of_router
from llm_demo.options.four_bits import FourBits, values_of
from llm_demo.options.fp8 import RecipeLinear

LARGE_RESULT = 1 << 23  # numbers of a layer's input or result, from which on their memory matters


class Lora(NamedTuple):
    """What --lora_rank and its other flags mean for a model. base: what the adapters belong to."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]  # names of what is adapted within a block
    parameters: int  # of all adapters
    base: dict
    routed: int = 0  # of these parameters, the experts'
    active: int = 0  # of these parameters, those that a token uses
    start: dict | None = None  # the adapters whose values these have before step 1, if any
    read: Callable | None = None  # a factor's name -> its values in them, whole
    # numbers that the base has so and their bytes, of linear layers and of experts
    in_4_bits: tuple[tuple[int, int], tuple[int, int]] | None = None

    def facts(self) -> dict:
        """What a checkpoint keeps."""
        facts = {
            "rank": self.rank, "alpha": self.alpha, "dropout": self.dropout,
            "targets": list(self.targets), "base": self.base,
        }  # fmt: skip
        return facts | ({"start": self.start} if self.start else {})


class Factor(nn.Linear):
    """One of the two matrices of an adapter."""

    def __init__(self, inputs: int, outputs: int, zero: bool):
        super().__init__(inputs, outputs, bias=False, device="meta")
        self.zero = zero

    def start(self, seed: str) -> dict[str, torch.Tensor]:
        """Its values before step 1: zero, or as PEFT draws them. On the CPU, so that every device
        has the same, and rounded to bf16, so that runs in every dtype start alike."""
        shape = self.out_features, self.in_features  # whole, though only a part may be here
        if self.zero:
            return {"weight": torch.zeros(shape)}
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        bound = 1 / math.sqrt(self.in_features)  # kaiming_uniform_ with a = sqrt(5)
        values = torch.rand(shape, generator=generator) * (2 * bound) - bound
        return {"weight": values.bfloat16().float()}


# Where blocks are recomputed, a compiler would compute a layer's product and its adapter's apart,
# and keep both for what reads the sum. So the sum is an operator. Elsewhere the compiler keeps the
# sum, and a partitioner with a budget would take an operator that it does not know for cheap. Not
# by torch.library.custom_op, which takes the host three times as long.
LIBRARY = torch.library.Library("llm_demo", "FRAGMENT")
LIBRARY.define(
    "adapted(Tensor x, Tensor weight, Tensor? scales, Tensor A, Tensor B, float scale) "
    "-> (Tensor, Tensor)"
)
LIBRARY.define(
    "adapted_back(Tensor grad, Tensor grad_a, Tensor weight, Tensor? scales, Tensor A) -> Tensor"
)


def _whole(weight, scales, inputs: int, dtype: torch.dtype):
    """A weight [N, K], unpacked if it is in 4 bits: scales, inputs: as of `values_of`."""
    return weight if scales is None else values_of(weight, scales, inputs, dtype)


@torch.library.impl(LIBRARY, "adapted", "CompositeExplicitAutograd")
def _adapted(x, weight, scales, A, B, scale):
    """(x [T, K] by a frozen weight and its adapter, in the memory of one result [T, N], what B is
    multiplied by)."""
    a = (x @ A.T) * scale
    return (x @ _whole(weight, scales, x.shape[1], x.dtype).T).addmm_(a, B.T), a


@torch.library.impl(LIBRARY, "adapted_back", "CompositeExplicitAutograd")
def _adapted_back(grad, grad_a, weight, scales, A):
    """The gradient of x, in the memory of one result."""
    return (grad @ _whole(weight, scales, A.shape[1], grad.dtype)).addmm_(grad_a, A)


@torch.library.register_fake("llm_demo::adapted")
def _(x, weight, scales, A, B, scale):
    return x.new_empty(x.shape[0], B.shape[0]), x.new_empty(x.shape[0], A.shape[0])


@torch.library.register_fake("llm_demo::adapted_back")
def _(grad, grad_a, weight, scales, A):
    return grad.new_empty(grad.shape[0], A.shape[1])


def _keep_for_adapted(ctx, inputs, output):
    x, weight, scales, A, B, ctx.scale = inputs
    ctx.save_for_backward(x, weight, scales, A, B, output[1])


def _back_of_adapted(ctx, grad, _):
    x, weight, scales, A, B, a = ctx.saved_tensors
    grad_a = (grad @ B) * ctx.scale
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.llm_demo.adapted_back(grad, grad_a, weight, scales, A)
    return grad_x, None, None, grad_a.T @ x, grad.T @ a, None


torch.library.register_autograd(
    "llm_demo::adapted", _back_of_adapted, setup_context=_keep_for_adapted
)


class LoraLinear(RecipeLinear):
    """A linear layer x W^T with its adapter: + alpha / rank x A^T B^T."""

    def __init__(self, base: nn.Linear, lora: Lora):
        super().__init__(base, getattr(base, "recipe", None))
        self.scale, self.dropout = lora.alpha / lora.rank, lora.dropout
        self.lora_A = Factor(base.in_features, lora.rank, zero=False)
        self.lora_B = Factor(lora.rank, base.out_features, zero=True)
        self.recomputed = False  # as Blocks sets it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if torch.is_grad_enabled() else 0  # not in an evaluation
        widest = max(x.shape[-1], self.lora_B.weight.shape[0])
        large = x[..., 0].numel() * widest >= LARGE_RESULT
        if self.recomputed and large and not dropout and not isinstance(self.recipe, str):  # fp8
            return self._in_one(x)
        out = super().forward(x)
        if dropout:
            x = F.dropout(x, dropout)
        return out + self.lora_B(self.lora_A(x) * self.scale)

    def _in_one(self, x: torch.Tensor) -> torch.Tensor:
        """The same in the memory of one result."""
        out, _ = torch.ops.llm_demo.adapted(
            x.flatten(0, -2),
            self.weight,
            getattr(self.recipe, "scales", None),
            self.lora_A.weight,
            self.lora_B.weight,
            self.scale,
        )
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


def matrices_of(shapes: dict[str, tuple]) -> dict[str, tuple]:
    """{name: shape} of a model's parameters that can have adapters: the linear layers of its
    blocks, but for routers, and experts. If MLPs hold experts, nothing else in MLPs: PEFT takes
    gate_proj and the like for the experts, and can't adapt a dense block or a shared expert beside
    them."""
    found = {}
    within = any(fused(name) and ".mlp." in name for name in shapes)
    for name, shape in shapes.items():
        if ".layers." not in name or of_router(name):
            continue
        if fused(name) or len(shape) == 2 and not (within and ".mlp." in name):
            found[name] = shape
    return found


def target_of(name: str) -> str:
    """What --lora_targets calls a matrix."""
    return name.removesuffix(".weight").rpartition(".")[2]


def factor_names(name: str) -> tuple[str, str]:
    """The names of a matrix's factors A and B."""
    if fused(name):
        return f"{name}_lora_A", f"{name}_lora_B"
    layer = name.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def factors_of(lora: dict, shapes: dict[str, tuple]) -> dict[str, tuple]:
    """{name: shape} of the factors over a model. lora: as of `Lora.facts`; shapes: of the model."""
    factors = {}
    for name, (*experts, outputs, inputs) in matrices_of(shapes).items():
        if target_of(name) in lora["targets"]:
            a, b = factor_names(name)
            factors[a] = *experts, lora["rank"], inputs
            factors[b] = *experts, outputs, lora["rank"]
    return factors


@torch.no_grad()
def merge_into(
    name: str, weight: torch.Tensor, factors: dict[str, torch.Tensor], lora: dict
) -> None:
    """Add to a frozen weight, fp32, in place, the product of its factors, if it has any."""
    a, b = map(factors.get, factor_names(name))
    if a is not None:
        add = weight.baddbmm_ if weight.ndim == 3 else weight.addmm_
        add(b, a, alpha=lora["alpha"] / lora["rank"])


def quantisable(model: nn.Module, prefix: str = "") -> dict[str, nn.Parameter]:
    """{name: parameter} of what 4 bits are for in a decoder or a block of it: linear layers, but
    for gates of one output, and experts."""
    found = {}
    for name, layer in model.named_modules(prefix=prefix):
        if ".layers." not in name or of_router(name):
            continue
        if type(layer) is nn.Linear and layer.out_features > 1:
            found[f"{name}.weight"] = layer.weight
    return found | {n: p for n, p in model.named_parameters(prefix=prefix) if fused(n)}


def use_four_bits(
    lm: nn.Module, dtype: torch.dtype, read: Callable, names: Container[str]
) -> tuple[list[str], list[str]]:
    """Give the blocks of a decoder on the meta device, to be computed in `dtype`, the linear layers
    and experts whose weights have these names in 4 bits. read(name): as of FourBits. Returns the
    name within a block of each of these, and of each other that 4 bits are for."""
    from llm_demo.options.four_bits_experts import FourBitsOfExperts

    done, left = [], []
    for name in quantisable(lm):
        path, _, kind = name.removesuffix(".weight").rpartition(".")
        (done if name in names else left).append(kind)
        if name not in names:
            continue
        owner, whole = lm.get_submodule(path), functools.partial(read, name)
        if fused(name):
            recipe = FourBitsOfExperts(owner, kind, dtype, read=whole, matrices=len(FUSED[kind]))
            owner.add_module(f"{kind}_recipe", recipe)
        else:
            layer = getattr(owner, kind)
            setattr(owner, kind, RecipeLinear(layer, FourBits(layer, "weight", dtype, whole)))
    return done, left


def apply_lora(lm: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
    """Freeze a decoder on the meta device, in `dtype` but for fp32 parts, and give its matrices
    adapters, in fp32."""
    kept = kept_in_fp32(lm)
    for p in lm.parameters():
        p.requires_grad_(False)
        p.data = p.data if p in kept else p.data.to(dtype)
    for name in matrices_of({name: p.shape for name, p in lm.named_parameters()}):
        if target_of(name) not in lora.targets:
            continue
        if fused(name):
            adapt_experts(lm.get_submodule(name.rpartition(".")[0]), target_of(name), lora)
        else:
            block, _, kind = name.removesuffix(".weight").rpartition(".")
            layer = lm.get_submodule(f"{block}.{kind}")
            setattr(lm.get_submodule(block), kind, LoraLinear(layer, lora))
    if lora.read:
        for path, owner in lm.named_modules():
            if hasattr(owner, "start"):
                trained = [n for n, p in owner.named_parameters(recurse=False) if p.requires_grad]
                # the values of the adapters that are trained on
                owner.start = lambda _, at=path, names=trained: {
                    name: lora.read(f"{at}.{name}") for name in names
                }


def adapt_experts(experts: nn.Module, kind: str, lora: Lora) -> None:
    """Give one of the fused matrices of a block's experts its factors: A [experts, rank, inputs]
    and B [experts, outputs, rank]."""
    n, outputs, inputs = getattr(experts, kind).shape
    inputs = getattr(getattr(experts, f"{kind}_recipe", None), "inputs", inputs)  # of 4 bits
    for name, *shape in (("A", lora.rank, inputs), ("B", outputs, lora.rank)):
        factor = nn.Parameter(torch.empty(n, *shape, device="meta"))
        experts.register_parameter(f"{kind}_lora_{name}", factor)
    experts.lora_scale = lora.alpha / lora.rank
    experts.start = types.MethodType(_start_of_experts, experts)


def _start_of_experts(experts: nn.Module, seed: str) -> dict[str, torch.Tensor]:
    """The values before step 1 of the factors of all experts, though only a part is here."""
    found = {}
    for name, p in experts.named_parameters(recurse=False):
        if "_lora_" in name:
            rows, columns = p.shape[1:]
            factor = Factor(columns, experts.num_experts * rows, zero=name.endswith("B"))
            values = factor.start(f"{seed}.{name}")["weight"]
            found[name] = values.view(-1, rows, columns)
    return found
