"""Adapters that the flags ask for, over a model that is found: new ones, or those of a folder."""

import functools
import math
import re
from collections.abc import Callable, Container

import torch

from llm_demo.core.decoder import fused, refuse_non_finite, skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.data.codec import stop_tokens
from llm_demo.machine.device import drawn_on
from llm_demo.machine.dist import from_rank0, same_on_all_nodes
from llm_demo.machine.text import short
from llm_demo.model.adapter_folder import Adapter, open_adapter
from llm_demo.model.costs import parameters_of
from llm_demo.model.families import chosen_of, experts_of
from llm_demo.model.weights_files import Weights, base_digest, identity_of, text_name
from llm_demo.options.four_bits import BLOCK, row_bytes
from llm_demo.options.lora import (
    Lora,
    factor_names,
    factors_of,
    matrices_of,
    merge_into,
    quantisable,
    target_of,
)

ALL = "all-linear"  # of --lora_targets; PEFT's name for it
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def decide_lora(args, world: World, source, dtype: str) -> tuple[Lora, list[str]]:
    """(the adapters that the flags ask for, lines). source: a model_folder.Source."""
    identify = functools.partial(
        identity_of, args.model_name_or_path, source.folder, source.weights, args.seed, drawn_on()
    )
    base, lines, packed = from_rank0(world, identify), [], None
    if args.base_bits == 4:
        base["bits"], dtype, packed = 4, "4 bits", source.weights and source.weights.in_4_bits()
    lora = choose_lora(args, source.config, base, packed)
    if args.adapter:
        adapter = open_adapter(args.adapter)
        start, read = start_of(adapter, args.lora_targets, source.config)
        same_on_all_nodes(world, {"the content of --adapter": start["values"]})
        lines = origin(adapter, args, base)
        lora = lora._replace(start=start, read=read)
    share = lora.parameters / parameters_of(source.config)
    line = (
        f"adapters: rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)} of each "
        f"block: {short(lora.parameters)} parameters in fp32, {share:.2%} of the model's, which is "
        f"frozen in {dtype}"
    )
    return lora, [line, *lines, *untrained_ends(source)]


def untrained_ends(source) -> list[str]:
    """Warnings of tokens that end an answer, but whose row of the head or the embedding was never
    trained: adapters leave these as they are. source: a model_folder.Source."""
    lines, weights, config = [], source.weights, source.config
    for token in stop_tokens(source.tokenizer) if weights else ():
        for name in (HEAD, EMBEDDING):
            # of a padding token it has zeros, and only the head has to find it
            padding = token == getattr(config, "pad_token_id", None)
            padding &= not config.tie_word_embeddings
            if name not in weights.shapes or name == EMBEDDING and padding:
                continue
            first = max(0, token - 1)
            rows = weights.read(name, (slice(first, token + 2),))
            row = rows[token - first]
            if row.max() - row.min() <= 1e-16:  # some hold numbers such as 1e-23
                how = f"holds {row[0]:g} only"
            elif (rows == row).all(1).sum() > 1:
                how = "equals that of the token beside it"
            else:
                continue
            text = source.tokenizer.convert_ids_to_tokens(token)
            lines.append(
                f"warning: answers end with {text}, whose row of {name} {how}: it was never "
                "trained, and adapters do not train it, so the model may not end its answers. "
                "Train the whole model, or start from its chat version, or set a --chat_template "
                "that ends answers with a trained token"
            )
            break
    return lines


def matrices_in(config) -> dict[str, tuple]:
    """{name: shape} of what can have adapters in a model, found in a copy of it without memory."""
    lm = skeleton(config, "sdpa")
    return matrices_of({name: tuple(p.shape) for name, p in lm.named_parameters()})


def start_of(adapter: Adapter, targets: str, config) -> tuple[dict, Callable]:
    """(start, read) of a Lora with the values of a folder. targets: as --lora_targets. Raises
    UserError if the factors there are not those of this model's blocks."""
    shapes = matrices_in(config)
    names = list(dict.fromkeys(map(target_of, shapes)))
    here = [name for name in names if name in adapter.targets]
    for name in adapter.listed:  # it would be left out in silence
        if name in names and name not in here:
            raise UserError(
                f"{adapter.folder}: target_modules has {name}, of which there is no factor"
            )
    wanted = factors_of({"rank": adapter.rank, "targets": here}, shapes)
    # PEFT may have had the whole model, of which this is the text part
    outer = "base_model.model."
    stored = {outer + text_name(name.removeprefix(outer)): name for name in adapter.tensors}
    held = in_peft({name: torch.empty(shape, device="meta") for name, shape in wanted.items()})
    of_file = [stored.get(name, name) for name in held]
    weights = Weights(adapter.folder, dict.fromkeys(adapter.tensors, adapter.file))
    weights.check(
        {name: tuple(t.shape) for name, t in zip(of_file, held.values(), strict=True)},
        implied_by=f"rank {adapter.rank} and this model imply",
    )
    asked = names if targets == ALL else [name.strip() for name in targets.split(",")]
    if {*asked} != {*here}:
        raise UserError(
            f"--lora_targets {targets[:80]} contradicts --adapter {adapter.folder}, which has "
            f"{','.join(here)}: drop the flag"
        )
    places = dict(zip(wanted, of_file, strict=True))

    def read(name: str) -> torch.Tensor:
        values = weights.read(places[name]).float()
        refuse_non_finite(values, adapter.folder, places[name])
        return from_peft(values, wanted[name])

    start = {"path": str(adapter.folder.absolute()), "values": weights.digest()}
    return start, read


def origin(adapter: Adapter, args, base: dict) -> list[str]:
    """What the log says of adapters that are trained on. base: identity of the model."""
    made_for = f", made for {adapter.base}" if adapter.base else ""
    lines = [f"adapters: with the values of {adapter.folder}{made_for}"]
    if adapter.made_for not in ("", base_digest(base)):
        lines.append(
            f"warning: {adapter.folder} was trained over other weights than those of "
            f"{args.model_name_or_path}, to which its products need not fit"
        )
    if adapter.bits not in ("", str(args.base_bits)):
        lines.append(
            f"warning: {adapter.folder} was trained over a base in {adapter.bits} bits, here it is "
            f"in {args.base_bits}: its values differ"
        )
    return lines


def choose_lora(args, config, base: dict, packed: Container[str] | None = None) -> Lora:
    """What the flags mean for a model. config: from transformers. packed: names of the weights that
    its files have in 4 bits, if any. Raises UserError for names that it lacks, and for dropout with
    experts."""
    shapes = matrices_in(config)
    names = list(dict.fromkeys(map(target_of, shapes)))
    asked = names
    if args.lora_targets != ALL:
        asked = [part.strip() for part in args.lora_targets.split(",")]
    for name in asked:
        if name not in names:
            raise UserError(
                f"--lora_targets {args.lora_targets[:80]}: {name[:40]!r} can't be adapted in this "
                f"model; choose from {', '.join(names)}, or leave it out for all of them"
            )
    targets = tuple(name for name in names if name in asked)
    of_experts = {target_of(name) for name in shapes if fused(name)}
    if args.lora_dropout and of_experts & {*targets}:
        raise UserError(
            "--lora_dropout does not work with adapters on experts, for which PEFT has no dropout: "
            "drop it, or adapt attention alone by --lora_targets"
        )
    lora = Lora(args.lora_rank, args.lora_alpha, args.lora_dropout, targets, 0, base)
    sizes = {name: math.prod(shape) for name, shape in factors_of(lora.facts(), shapes).items()}
    total = sum(sizes.values())
    routed = sum(n for name, n in sizes.items() if "_lora_" in name)
    active = total
    if routed:
        active -= routed - routed // experts_of(config) * chosen_of(config)
    stored = None
    if args.base_bits == 4:
        stored = in_4_bits(quantisable(skeleton(config, "sdpa")), packed)
    return lora._replace(parameters=total, routed=routed, active=active, in_4_bits=stored)


def in_4_bits(weights: dict, packed: Container[str] | None) -> tuple[tuple, tuple]:
    """As of Lora. weights: as of `quantisable`. packed: as of choose_lora; by default all matrices
    of rows in whole blocks. Raises UserError for experts of other rows."""
    found = {True: (0, 0), False: (0, 0)}  # by whether they are experts
    for name, p in weights.items():
        inputs, of_experts = p.shape[-1], fused(name)
        if of_experts and not packed and inputs % BLOCK:
            raise UserError(
                f"--base_bits 4: rows of {target_of(name)} of the experts have {inputs} numbers, "
                f"no multiple of {BLOCK}: drop it"
            )
        if (name in packed) if packed else inputs % BLOCK == 0:
            numbers, taken = found[of_experts]
            taken += p.numel() // inputs * row_bytes(inputs)
            found[of_experts] = numbers + p.numel(), taken
    return found[False], found[True]


@torch.no_grad()
def add_adapter(model, adapter: Adapter, read: Callable) -> None:
    """Add a folder's adapters to transformers' own model. read: of `start_of`. Raises UserError if
    a factor is not finite."""
    lora = {"rank": adapter.rank, "alpha": adapter.alpha, "targets": adapter.targets}
    weights = dict(model.named_parameters())
    factors = factors_of(lora, {name: tuple(p.shape) for name, p in weights.items()})
    for name, p in weights.items():
        if found := {n: read(n) for n in factor_names(name) if n in factors}:
            whole = p.float()
            merge_into(name, whole, found, lora)
            p.copy_(whole)


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


def from_peft(values: torch.Tensor, shape: tuple) -> torch.Tensor:
    """A factor of this shape, from what `in_peft` makes of it."""
    if len(shape) < 3 or values.shape[1] == shape[2]:  # or A
        return values.view(shape)
    experts, outputs, rank = shape
    return values.view(outputs, rank, experts).permute(2, 0, 1)


def peft_targets(factors: dict[str, torch.Tensor]) -> tuple[list[str], list[str] | None]:
    """What PEFT's LoraConfig calls the matrices of these factors: (target_modules,
    target_parameters)."""
    modules = [n.split(".")[-3] for n in factors if n.endswith(".lora_A.weight")]
    parameters = []  # within a block
    for name in factors:
        if name.endswith("_lora_A"):
            parameters.append(re.sub(r".*\.layers\.\d+\.", "", name.removesuffix("_lora_A")))
    return list(dict.fromkeys(modules)), list(dict.fromkeys(parameters)) or None
