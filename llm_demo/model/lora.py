"""Adapters: LoRA on the linear layers of a decoder's blocks, over a frozen base.

Source: "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al. 2021). The adapted layer
keeps its own weight under its own name, so that files, sharding and estimates need not know of it;
the factors have the names that PEFT gives them in its files."""

import math
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from llm_demo.errors import UserError, differences
from llm_demo.model.decoder import skeleton
from llm_demo.model.experts import blocks_with_experts
from llm_demo.model.weights import Weights

ALL = "all-linear"  # PEFT's name for it
RANDOM = "random"


class Lora(NamedTuple):
    """What --lora_rank and its other flags mean for a model. base: what the adapters belong to."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]  # names of the adapted layers within a block
    parameters: int  # of all adapters
    base: dict

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
    the checkpoint, now: of the run, as of `Lora.facts`."""
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
        raise UserError(f"{path} holds other adapters: {'; '.join(changes)}")


def factors_of(lora: dict, shapes: dict[str, tuple]) -> dict[str, tuple]:
    """{name: shape} of the factors over a model. lora: as of `Lora.facts`; shapes: of the model."""
    found = {}
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and ".layers." in name and layer.split(".")[-1] in lora["targets"]:
            found[f"{layer}.lora_A.weight"] = lora["rank"], shape[1]
            found[f"{layer}.lora_B.weight"] = shape[0], lora["rank"]
    return found


@torch.no_grad()
def merge_into(
    name: str, weight: torch.Tensor, factors: dict[str, torch.Tensor], lora: dict
) -> None:
    """Add to a frozen weight, fp32, in place, the product of its factors, if it has any."""
    layer = name.removesuffix(".weight")
    if f"{layer}.lora_A.weight" in factors:
        a, b = (factors[f"{layer}.lora_{x}.weight"] for x in "AB")
        weight.addmm_(b, a, alpha=lora["alpha"] / lora["rank"])


def choose_lora(args, config, base: dict) -> Lora:
    """What the flags mean for a model, found in a copy of it without memory. config: from
    transformers. Raises UserError for layers that it lacks, and a rank larger than a matrix."""
    layers = linear_layers(skeleton(config, "sdpa"))
    names = dict.fromkeys(name.rpartition(".")[2] for name in layers)
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
            raise UserError(
                f"--lora_targets {args.lora_targets[:80]}: no linear layer of this model's blocks "
                f"is named {name[:40]!r}; they are {', '.join(names)}"
            )
    targets, parameters = tuple(name for name in names if name in asked), 0
    for name, layer in layers.items():
        if name.rpartition(".")[2] not in targets:
            continue
        if args.lora_rank > min(layer.in_features, layer.out_features):
            raise UserError(
                f"--lora_rank {args.lora_rank} is larger than a side of {name} "
                f"({layer.out_features} x {layer.in_features})"
            )
        parameters += args.lora_rank * (layer.in_features + layer.out_features)
    return Lora(args.lora_rank, args.lora_alpha, args.lora_dropout, targets, parameters, base)


def linear_layers(lm: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a decoder's blocks, by name; in a mixture of experts those of attention:
    to PEFT, gate_proj and the like are the experts there."""
    found = lm.model.layers.named_modules(prefix="model.layers")
    found = {name: layer for name, layer in found if isinstance(layer, nn.Linear)}
    if blocks_with_experts(lm):
        found = {name: layer for name, layer in found.items() if ".self_attn." in name}
    return found


def apply_lora(lm: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
    """Freeze a decoder on the meta device, in `dtype` but for fp32 routers, and give its layers
    adapters, in fp32."""
    routers = {p for block in blocks_with_experts(lm) for p in block.mlp.gate.parameters()}
    for p in lm.parameters():
        p.requires_grad_(False)
        p.data = p.data if p in routers else p.data.to(dtype)
    for name, layer in linear_layers(lm).items():
        block, _, kind = name.rpartition(".")
        if kind in lora.targets:
            setattr(lm.get_submodule(block), kind, LoraLinear(layer, lora))
