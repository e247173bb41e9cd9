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

from llm_demo.core.decoder import FUSED, fused, kept_in_fp32
from llm_demo.options.four_bits import FourBits
from llm_demo.options.fp8 import RecipeLinear


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


class LoraLinear(RecipeLinear):
    """A linear layer x W^T with its adapter: + alpha / rank x A^T B^T."""

    def __init__(self, base: nn.Linear, lora: Lora):
        super().__init__(base, getattr(base, "recipe", None))
        self.scale, self.dropout = lora.alpha / lora.rank, lora.dropout
        self.lora_A = Factor(base.in_features, lora.rank, zero=False)
        self.lora_B = Factor(lora.rank, base.out_features, zero=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.dropout and torch.is_grad_enabled():  # not in an evaluation
            x = F.dropout(x, self.dropout)
        return out + self.lora_B(self.lora_A(x) * self.scale)


def matrices_of(shapes: dict[str, tuple]) -> dict[str, tuple]:
    """{name: shape} of a model's parameters that can have adapters: the linear layers of its
    blocks. In a mixture of experts: those outside its MLPs, and the experts. PEFT takes gate_proj
    and the like for the experts, and can't adapt a dense block or a shared expert beside them."""
    found = {n: s for n, s in shapes.items() if ".layers." in n and (len(s) == 2 or fused(n))}
    if any(map(fused, shapes)):
        found = {n: s for n, s in found.items() if ".mlp." not in n or fused(n)}
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
        if ".layers." in name and type(layer) is nn.Linear and layer.out_features > 1:
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
