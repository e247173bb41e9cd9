"""Adapters: LoRA on the matrices of a decoder's blocks, over a frozen base.

Source: "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al. 2021). What is adapted keeps
its own weight under its own name, so that files, sharding and estimates need not know of it. The
factors of a linear layer have the names that PEFT gives them in its files. Those of a block's
experts are two tensors beside the fused matrix, with a factor for each expert, so that they are
sharded and spread as it is; experts.py multiplies by them."""

import math
import types
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from llm_demo.core.costs import experts_of
from llm_demo.core.decoder import skeleton
from llm_demo.core.errors import UserError, differences
from llm_demo.core.experts import blocks_with_experts
from llm_demo.core.names import FUSED, fused
from llm_demo.core.weights import Weights

ALL = "all-linear"  # PEFT's name for it
RANDOM = "random"


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

    def facts(self) -> dict:
        """What a checkpoint keeps."""
        return {
            "rank": self.rank, "alpha": self.alpha, "dropout": self.dropout,
            "targets": list(self.targets), "base": self.base,
        }  # fmt: skip


class Factor(nn.Linear):
    """One of the two matrices of an adapter."""

    def __init__(self, inputs: int, outputs: int, zero: bool):
        super().__init__(inputs, outputs, bias=False, device="meta")
        self.zero = zero

    def start(self, seed: str) -> dict[str, torch.Tensor]:
        """Its values before step 1: zero, or as PEFT draws them. On the CPU, so that every device
        has the same, and rounded to bf16, so that runs in every dtype start alike."""
        if self.zero:
            return {"weight": torch.zeros(self.weight.shape)}
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        bound = 1 / math.sqrt(self.in_features)  # kaiming_uniform_ with a = sqrt(5)
        values = torch.rand(self.weight.shape, generator=generator) * (2 * bound) - bound
        return {"weight": values.bfloat16().float()}


class LoraLinear(nn.Linear):
    """A linear layer x W^T with its adapter: + alpha / rank x A^T B^T."""

    def __init__(self, base: nn.Linear, lora: Lora):
        has_bias = base.bias is not None
        super().__init__(base.in_features, base.out_features, has_bias, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = lora.alpha / lora.rank, lora.dropout
        self.lora_A = Factor(base.in_features, lora.rank, zero=False)
        self.lora_B = Factor(lora.rank, base.out_features, zero=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, self.weight, self.bias)
        if self.dropout and torch.is_grad_enabled():  # not in an evaluation
            x = F.dropout(x, self.dropout)
        return out + self.lora_B(self.lora_A(x) * self.scale)


def identity_of(name: str, folder: Path, weights: Weights | None, seed: int, device: str) -> dict:
    """What adapters belong to. name: of the model, as given. Random weights are known by their seed
    and by the device that draws them."""
    local = Path(name).expanduser() == folder
    base = {"path": str(folder.absolute()) if local else name}
    if weights:
        return base | {"weights": weights.digest()}
    return base | {"weights": RANDOM, "seed": seed, "drawn on": device}


def same_base(a: dict, b: dict) -> bool:
    """Whether two identities are of the same weights, wherever they lie."""
    return a | {"path": ""} == b | {"path": ""}


def refuse_other_adapters(path: Path, before: dict | None, now: dict | None) -> None:
    """Raise UserError unless a run and its checkpoint train the same adapters, or none. before: of
    the checkpoint, now: of the run; both are what `Lora.facts` returns."""
    if before and not now:
        raise UserError(
            f"{path} holds adapters: resume with fsdp/train_fsdp.py and --lora_rank "
            f"{before['rank']}, or export it with --merge and train that"
        )
    if now and not before:
        raise UserError(
            f"{path} holds a whole model, no adapters: drop --lora_rank, or export it and "
            "train adapters of that"
        )
    if not now:
        return
    if not same_base(before["base"], now["base"]):
        changes = "; ".join(differences(before["base"], now["base"]))
        raise UserError(f"{path} holds adapters of another base: {changes}")
    same = ("rank", "alpha", "targets")
    if changes := differences({k: before[k] for k in same}, {k: now[k] for k in same}):
        hint = ""
        if before["targets"] != now["targets"]:
            hint = f"; to resume them: --lora_targets {','.join(before['targets'])}"
        raise UserError(f"{path} holds other adapters: {'; '.join(changes)}{hint}")


def matrices_of(shapes: dict[str, tuple]) -> dict[str, tuple]:
    """{name: shape} of a model's parameters that can have adapters: the linear layers of its
    blocks. In a mixture of experts: those of attention, and the experts. There PEFT takes gate_proj
    and the like for the experts, and can't adapt a dense block or a shared expert beside them."""
    found = {n: s for n, s in shapes.items() if ".layers." in n and len(s) > 1}
    if any(map(fused, shapes)):
        found = {n: s for n, s in found.items() if ".self_attn." in n or fused(n)}
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
    found = {}
    for name, (*experts, outputs, inputs) in matrices_of(shapes).items():
        if target_of(name) in lora["targets"]:
            a, b = factor_names(name)
            found[a] = *experts, lora["rank"], inputs
            found[b] = *experts, outputs, lora["rank"]
    return found


@torch.no_grad()
def merge_into(
    name: str, weight: torch.Tensor, factors: dict[str, torch.Tensor], lora: dict
) -> None:
    """Add to a frozen weight, fp32, in place, the product of its factors, if it has any."""
    a, b = map(factors.get, factor_names(name))
    if a is not None:
        add = weight.baddbmm_ if weight.ndim == 3 else weight.addmm_
        add(b, a, alpha=lora["alpha"] / lora["rank"])


def in_peft(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Factors as PEFT's files have them. All experts of a block share one A and one B there: rows
    of A are by expert, then rank; columns of B by rank, then expert. Their keys do not name the
    matrix: PEFT wraps the module of the experts once for each, and down_proj's wrap is outside."""
    found = {}
    for name, t in factors.items():
        matrix, _, kind = name.rpartition("_lora_")
        if not fused(matrix):
            found[f"base_model.model.{name}"] = t
            continue
        experts, _, target = matrix.rpartition(".")
        if target == "gate_up_proj" and f"{experts}.down_proj_lora_A" in factors:
            experts += ".base_layer"
        t = t if kind == "A" else t.permute(1, 2, 0)
        two_sides = t.flatten(0, 1) if kind == "A" else t.flatten(1)
        found[f"base_model.model.{experts}.lora_{kind}.weight"] = two_sides.contiguous()
    return found


def peft_targets(factors: dict[str, torch.Tensor]) -> dict[str, list[str] | None]:
    """What PEFT's LoraConfig calls the matrices of these factors: modules, and parameters."""
    experts = [n.rpartition("_lora_")[0] for n in factors]
    experts = [target_of(n) for n in experts if fused(n)]
    layers = [n.split(".")[-3] for n in factors if n.endswith(".lora_A.weight")]
    parameters = [f"mlp.experts.{kind}" for kind in FUSED if kind in experts]
    return {
        "target_modules": list(dict.fromkeys(layers)),
        "target_parameters": parameters or None,
    }


def choose_lora(args, config, base: dict) -> Lora:
    """What the flags mean for a model, found in a copy of it without memory. config: from
    transformers. Raises UserError for names that it lacks, a rank larger than a matrix, and dropout
    with experts."""
    lm = skeleton(config, "sdpa")
    shapes = matrices_of({name: tuple(p.shape) for name, p in lm.named_parameters()})
    names = dict.fromkeys(map(target_of, shapes))
    of_experts = {target_of(name) for name in shapes if fused(name)}
    asked = list(names)
    if args.lora_targets != ALL:
        asked = [part.strip() for part in args.lora_targets.split(",")]
    if not any(asked):
        raise UserError(
            f"--lora_targets names no layer: choose from {', '.join(names)}, or leave it out for "
            "all of them"
        )
    for name in asked:
        if name not in names:
            choices = ", ".join(names)
            if of_experts:
                choices = f"{', '.join(n for n in names if n not in of_experts)} (attention), "
                choices += f"{', '.join(FUSED)} (experts)"
            raise UserError(
                f"--lora_targets {args.lora_targets[:80]}: {name[:40]!r} can't be adapted in this "
                f"model; choose from {choices}"
            )
    targets = tuple(name for name in names if name in asked)
    if args.lora_dropout and of_experts & set(targets):
        others = ",".join(name for name in targets if name not in of_experts)
        less = f", or adapt attention alone: --lora_targets {others}" if others else ""
        raise UserError(
            "--lora_dropout does not work with adapters on experts, for which PEFT has no dropout: "
            f"drop it{less}"
        )
    for name, (*_, outputs, inputs) in shapes.items():
        if target_of(name) in targets and args.lora_rank > min(outputs, inputs):
            raise UserError(
                f"--lora_rank {args.lora_rank} is larger than a side of "
                f"{name.removesuffix('.weight')} ({outputs} x {inputs})"
            )
    lora = Lora(args.lora_rank, args.lora_alpha, args.lora_dropout, targets, 0, base)
    sizes = {name: math.prod(shape) for name, shape in factors_of(lora.facts(), shapes).items()}
    total, routed = sum(sizes.values()), sum(n for name, n in sizes.items() if "_lora_" in name)
    chosen = routed // experts_of(config) * config.num_experts_per_tok if routed else 0
    return lora._replace(parameters=total, routed=routed, active=total - routed + chosen)


def apply_lora(lm: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
    """Freeze a decoder on the meta device, in `dtype` but for fp32 routers, and give its matrices
    adapters, in fp32."""
    routers = {p for block in blocks_with_experts(lm) for p in block.mlp.gate.parameters()}
    for p in lm.parameters():
        p.requires_grad_(False)
        p.data = p.data if p in routers else p.data.to(dtype)
    for name in matrices_of({name: p.shape for name, p in lm.named_parameters()}):
        if target_of(name) not in lora.targets:
            continue
        if fused(name):
            adapt_experts(lm.get_submodule(name.rpartition(".")[0]), target_of(name), lora)
        else:
            block, _, kind = name.removesuffix(".weight").rpartition(".")
            layer = lm.get_submodule(f"{block}.{kind}")
            setattr(lm.get_submodule(block), kind, LoraLinear(layer, lora))


def adapt_experts(experts: nn.Module, kind: str, lora: Lora) -> None:
    """Give one of the fused matrices of a block's experts its factors: A [experts, rank, inputs]
    and B [experts, outputs, rank]."""
    n, outputs, inputs = getattr(experts, kind).shape
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
