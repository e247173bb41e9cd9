"""Adapters: which ones the flags ask for, what they belong to, and their names in files."""

import math
from pathlib import Path

import torch

from llm_demo.core.decoder import skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.experts import FUSED, fused
from llm_demo.core.lora import Lora, matrices_of, target_of
from llm_demo.job.costs import experts_of
from llm_demo.job.text import differences
from llm_demo.job.weights_files import Weights

ALL = "all-linear"  # PEFT's name for it


def identity_of(name: str, folder: Path, weights: Weights | None, seed: int, device: str) -> dict:
    """What adapters belong to. name: of the model, as given. Random weights are known by their seed
    and by the device that draws them."""
    local = Path(name).expanduser() == folder
    base = {"path": str(folder.absolute()) if local else name}
    if weights:
        return base | {"weights": weights.digest()}
    return base | {"weights": "random", "seed": seed, "drawn on": device}


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


def in_peft(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Factors as PEFT's files have them. All experts of a block share one A and one B there: rows
    of A are by expert, then rank; columns of B by rank, then expert. Their keys do not name the
    matrix: PEFT wraps the module of the experts once for each, and down_proj's wrap is outside."""
    renamed = {}
    for name, t in factors.items():
        matrix, _, kind = name.rpartition("_lora_")
        if not fused(matrix):
            renamed[f"base_model.model.{name}"] = t
            continue
        experts, _, target = matrix.rpartition(".")
        if target == "gate_up_proj" and f"{experts}.down_proj_lora_A" in factors:
            experts += ".base_layer"
        t = t if kind == "A" else t.permute(1, 2, 0)
        two_sides = t.flatten(0, 1) if kind == "A" else t.flatten(1)
        renamed[f"base_model.model.{experts}.lora_{kind}.weight"] = two_sides.contiguous()
    return renamed


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
        other = f", or adapt attention alone: --lora_targets {others}" if others else ""
        raise UserError(
            "--lora_dropout does not work with adapters on experts, for which PEFT has no dropout: "
            f"drop it{other}"
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
