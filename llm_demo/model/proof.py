"""Proves at a run's start that a family without a test of its own is trained as transformers
computes it.

A small copy of the configuration gets random weights. Its loss and gradients here, on packed
documents, must equal those of transformers' own forward, which takes one document at a time. The
copy is narrow, and as many blocks deep as it takes to have one of each kind. Windows and lengths at
which rotary embeddings change are scaled down, and some documents are longer."""

import copy
import json
import math
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import (
    DecoderLoss,
    allocate,
    fill,
    make_units,
    skeleton,
    soft_cap,
)
from llm_demo.core.errors import UserError
from llm_demo.core.rows import position_ids
from llm_demo.machine.files import ROOT, cache_folder, digest, hash_of, write_text
from llm_demo.machine.process import read_json
from llm_demo.machine.text import counted, words_of
from llm_demo.model.costs import heads_of_rule, on_meta
from llm_demo.model.families import EXPERTS, family_name, is_hybrid, without_dropout
from llm_demo.model.weights_files import Names, as_in_files, open_weights
from llm_demo.options.lora import (
    Lora,
    apply_lora,
    factor_names,
    factors_of,
    matrices_of,
    merge_into,
    target_of,
)

CPU = torch.device("cpu")
WINDOW, THRESHOLD = 16, 32  # tokens: of windows, and where rotary embeddings change
CAP = 2.0  # of logits: they are small, and a cap far above them is seen by no one
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW, 7, THRESHOLD, THRESHOLD + 1)  # of documents
LOSS_BOUND, GRADIENT_BOUND = 1e-5, 1e-4  # relative errors
ROUNDING = 1e-2  # of the norm of all gradients: the errors of smaller ones are relative to this
SMALL_HEADS, SMALL_EXPERTS, SMALL_GROUPS = 4, 8, 4
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": THRESHOLD,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
}
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
MOST_PARAMETERS = 50_000_000  # of a copy; else a key that sets a size is not known here
MOST_KINDS = 64  # of blocks; more would take a minute or longer
CODE = ("llm_demo/core", "llm_demo/model", "llm_demo/options")


class Differs(Exception):
    """Raised if a small copy is not computed as transformers does. Says what differs."""


class Proof(NamedTuple):
    """What was proven of a family."""

    line: str  # for the log
    adapters: str | None  # why --lora_rank is not right, if so


def prove(config) -> Proof:
    """Compare a small copy of a configuration, or take the result from the cache, where it is kept
    by the copy's configuration and all versions. Raises UserError if it is not trained exactly."""
    name = family_name(config)
    try:
        small = small_copy(config)
    except Exception as e:  # of transformers' own code
        raise UserError(
            f"{name} has no test of its own, and no small copy of its configuration can be built "
            f"to compare: {words_of(e)}"
        ) from e
    packages = [version(package) for package in ("torch", "transformers")]
    code = [digest(file) for folder in CODE for file in sorted((ROOT / folder).glob("*.py"))]
    file = cache_folder() / "proofs" / hash_of([small.to_dict(), packages, code])[:24]
    try:
        return Proof(**read_json(file))
    except (OSError, ValueError, TypeError):  # not there, or damaged
        pass
    proof = compare(small)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(proof._asdict()))
    except OSError:  # a read-only cache: compare again next time
        pass
    return proof


# ---------------------------------------------------------------- the copy


def small_copy(config):
    """A narrow configuration of the same family, with the first blocks, up to the first of the last
    new kind. Raises what transformers raises, and ValueError if it is not small."""
    small = without_dropout(config)
    of_blocks = {}  # what some blocks have of their own
    if getattr(config, "is_heterogeneous", False):
        of_blocks = small.to_dict()["per_layer_config"]
        small.per_layer_config = None
    heads, keys = small.num_attention_heads, getattr(small, "num_key_value_heads", None)
    rotated = getattr(small, "qk_rope_head_dim", None)
    rotates_all = rotated is not None and rotated == getattr(small, "head_dim", None)
    set_sizes(small)
    if rotates_all:
        small.head_dim = SMALL["qk_rope_head_dim"]  # that of the rotary tables
    small.num_attention_heads = SMALL_HEADS
    if keys:
        small.num_key_value_heads = small_keys(keys, heads)
    of_blocks = {int(i): small_overrides(own, heads) for i, own in of_blocks.items()}
    if of_blocks:
        small.per_layer_config = of_blocks
    if soft_cap(config):
        small.final_logit_softcapping = CAP
    if getattr(config, "n_group", None) and config.n_group > 1:
        small.n_group, small.topk_group = SMALL_GROUPS, SMALL_GROUPS // 2
    if is_hybrid(config):
        of_keys, of_values, *_ = heads_of_rule(config)
        small.linear_num_key_heads = 2
        small.linear_num_value_heads = 2 * of_values // of_keys
    for name in TOKEN_IDS:
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    depth = config.num_hidden_layers
    # lists with an entry for each block, not all of which a block keeps
    listed = {n: v for n, v in vars(small).items() if isinstance(v, list) and len(v) == depth}
    kinds = []
    for block, *entries in zip(on_meta(small).model.layers, *listed.values(), strict=True):
        kinds.append([*block_kind(block), *entries])
    first = {kinds.index(kind) for kind in kinds}
    if len(first) > MOST_KINDS:
        raise ValueError(f"it has {len(first):,} kinds of blocks, more than {MOST_KINDS}")
    small.num_hidden_layers = min(max(2, max(first) + 1), depth)
    for name, value in listed.items():
        setattr(small, name, value[: small.num_hidden_layers])
    if of_blocks:
        left = {i: own for i, own in of_blocks.items() if i < small.num_hidden_layers}
        small.per_layer_config = left
    size = sum(p.numel() for p in on_meta(small).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"it would still have {size:,} parameters")
    return small


def small_keys(keys: int | None, heads: int) -> int:
    """Heads of keys in the copy of a model with so many, and so many of queries."""
    return {heads: SMALL_HEADS, 1: 1}.get(keys, SMALL_HEADS // 2)


def small_overrides(own: dict, heads: int) -> dict:
    """What a block of the copy has of its own. heads: of queries. Raises KeyError for a key that is
    not known here."""
    keys = small_keys(own.get("num_key_value_heads"), heads)
    known = {"head_dim": 2 * SMALL["head_dim"], "num_key_value_heads": keys}
    return {name: known[name] for name in own}


def set_sizes(small) -> None:
    """Set the keys of a configuration that say sizes."""
    for name in dir(small):
        value = getattr(small, name, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            continue
        if name.endswith("intermediate_size"):
            value = 48 if "moe" in name or "expert" in name else 96
        elif name in EXPERTS:
            value = min(value, SMALL_EXPERTS)
        else:
            value = SMALL.get(name, value)
        if value != getattr(small, name):
            setattr(small, name, value)
    rope = getattr(small, "rope_parameters", None) or {}
    for of_kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        for name in of_kind.keys() & SMALL.keys():
            of_kind[name] = SMALL[name]
        half = int(SMALL["head_dim"] * of_kind.get("partial_rotary_factor", 1.0)) // 2
        for name in of_kind.keys() & {"short_factor", "long_factor"}:
            of_kind[name] = of_kind[name][:half]
        if "mrope_section" in of_kind:  # of a place in time, height and width: equal for text
            of_kind["mrope_section"] = [half, 0, 0]


def block_kind(block: nn.Module) -> list:
    """What sets a block apart from others of its model: its modules, shapes and constants."""
    facts = [(name, tuple(p.shape)) for name, p in block.named_parameters()]
    for module in block.modules():
        facts.append(type(module))
        for name, value in vars(module).items():
            if isinstance(value, int | float | str) and "idx" not in name:
                facts.append((name, value))
    return facts


def their_model(small) -> PreTrainedModel:
    """transformers' model of a copy, in fp32 on the CPU, with weights that leave nothing at zero or
    one."""
    torch.manual_seed(0)
    with torch.device(CPU):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(small), attn_implementation="eager", dtype=torch.float32
        )
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for t in model.state_dict().values():
            if t.ndim > 1:
                t.normal_(std=0.5 / math.sqrt(t.shape[-1]))
            elif t.is_floating_point():
                t.add_(torch.randn_like(t), alpha=0.1)
    return model.train()


# ---------------------------------------------------------------- the comparison


class Results(NamedTuple):
    """Of a model on all documents."""

    loss: float  # the sum
    gradients: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]  # of its blocks' modules, [tokens, ...], as they end


def tokens_of_documents() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, SMALL["vocab_size"], (sum(LENGTHS),), generator=generator)


def run_theirs(model: PreTrainedModel) -> Results:
    """transformers' own forward, one document at a time."""
    noted = note_outputs(model)
    loss = 0.0
    for document in tokens_of_documents().split(LENGTHS):
        logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
        of_document = F.cross_entropy(logits.float(), document[1:], reduction="sum")
        of_document.backward()
        loss += of_document.item()
    return results_of(model, loss, noted)


def run_ours(lm: PreTrainedModel, recomputed: bool) -> Results:
    """All documents packed, by the modules that train. recomputed: their blocks' activations, in
    two pieces of a pipeline."""
    noted = {} if recomputed else note_outputs(lm)
    tokens, ends = tokens_of_documents(), torch.tensor(LENGTHS).cumsum(0)
    cu_seqlens = F.pad(ends, (1, 0)).int()
    has_next = torch.ones(len(tokens), dtype=torch.bool)
    has_next[ends - 1] = False
    index = has_next.nonzero().squeeze(1)
    shape = 1, len(tokens)
    positions = position_ids(cu_seqlens, shape)
    documents = make_documents(cu_seqlens, shape, "bucketed", CPU)

    def run(piece: DecoderLoss, hidden: torch.Tensor) -> torch.Tensor:
        return piece(hidden, positions, documents, index, tokens[index + 1])

    layers = lm.model.layers
    if recomputed:
        units = make_units(layers, [1, len(layers) - 1], checkpointing=True)
        hidden = run(DecoderLoss(lm, units[:1], last=False), tokens[None])
        loss = run(DecoderLoss(lm, units[1:], first=False), hidden)
    else:
        units = make_units(layers, [len(layers)], checkpointing=False)
        loss = run(DecoderLoss(lm, units), tokens[None])
    loss.backward()
    return results_of(lm, loss.item(), noted)


def note_outputs(model: PreTrainedModel) -> dict[str, list[torch.Tensor]]:
    """Lists, by name, to which the modules of a model's blocks add what they return."""
    noted = {}

    def note(module, args, out, name: str) -> None:
        first = out[0] if isinstance(out, tuple) else out
        if first.ndim <= 3:  # [1, n, d] or [n, d], not by head
            noted.setdefault(name, []).append(first.detach().flatten(0, -2))

    for name, module in model.model.layers.named_modules(prefix="model.layers"):
        if name != "model.layers" and ".experts." not in name:  # whose rows are in another order
            module.register_forward_hook(partial(note, name=name))
    return noted


def results_of(model: nn.Module, loss: float, noted: dict[str, list[torch.Tensor]]) -> Results:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    outputs = {}
    for name, parts in noted.items():
        if len({part.shape[1:] for part in parts}) == 1:  # else its rows are not tokens
            outputs[name] = torch.cat(parts)
    noted.clear()
    return Results(loss, gradients, outputs)


def error_of(found: torch.Tensor, expected: torch.Tensor, least: float = 1e-12) -> float:
    """The norm of the difference, relative to that of what is expected, which counts as `least` if
    it is smaller."""
    if found.shape != expected.shape:
        return math.inf
    error = (found - expected).norm() / expected.norm().clamp(min=least)
    return error.nan_to_num(math.inf).item()


def gradient_errors(found: dict, expected: dict) -> dict[str, float]:
    """{name: error} of gradients, in the model's order. It is 1 for one that only one side has."""
    total = math.sqrt(sum(g.norm().item() ** 2 for g in expected.values()))
    errors = {}
    for name in expected | found:
        errors[name] = 1.0
        if name in found and name in expected:
            errors[name] = error_of(found[name], expected[name], ROUNDING * total)
    return errors


def difference(found: Results, expected: Results) -> str | None:
    """What differs, and where first, if anything does."""
    loss = abs(found.loss - expected.loss) / abs(expected.loss)
    if not loss <= LOSS_BOUND:  # also NaN
        for name, out in found.outputs.items():
            theirs = expected.outputs.get(name)
            if theirs is not None and error_of(out, theirs) > LOSS_BOUND:
                return f"the loss by {loss:.1e}, first in what {name} returns"
        return f"the loss by {loss:.1e}, in what follows the last block"
    errors = gradient_errors(found.gradients, expected.gradients)
    for name, error in reversed(errors.items()):  # as a backward comes to them
        if error > GRADIENT_BOUND:
            return f"the gradient of {name} by {error:.1e}"
    return None


def compare(small) -> Proof:
    """As `prove`, of a copy."""
    name = family_name(small)
    theirs = f"{name} is not trained as transformers {version('transformers')} computes it"
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with torch.random.fork_rng([]), tempfile.TemporaryDirectory(prefix="llm_demo-") as folder:
            return compare_in(Path(folder), small)
    except Differs as e:
        raise UserError(f"{theirs}: a small copy differs in {e}") from e
    except Exception as e:  # transformers' modules, used as they were not made for
        raise UserError(f"{theirs}: a small copy can't be run: {words_of(e)}") from e
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def compare_in(folder: Path, small) -> Proof:
    """As `prove`, of a copy, with a folder for its files. Raises Differs, and what transformers
    raises."""
    model = their_model(small)
    model.save_pretrained(folder / "theirs")
    weights = open_weights(folder / "theirs")

    def ours(lora: Lora | None = None) -> PreTrainedModel:
        lm = skeleton(small, "bucketed", weights)
        if is_hybrid(small):
            from llm_demo.options.delta import use_rule

            use_rule(lm, "chunked")
        if lora:
            apply_lora(lm, lora, torch.float32)
        allocate(lm, CPU)
        fill(lm, "model", weights, 0)
        if small.tie_word_embeddings:
            lm.lm_head.weight = lm.model.embed_tokens.weight
        else:
            fill(lm, "lm_head", weights, 0)
        return lm

    found = run_ours(ours(), recomputed=False)  # first, since theirs may take a minute
    expected = run_theirs(model)
    problem = difference(found, expected)
    if problem:
        raise Differs(problem)
    problem = difference(run_ours(ours(), recomputed=True), expected)
    if problem:
        raise Differs(f"{problem}, if activations are recomputed in two pieces")
    compare_files(folder / "ours", model, small)
    try:
        adapters = difference_of_adapters(ours, model)
    except Exception as e:
        adapters = words_of(e)
    loss = abs(found.loss - expected.loss) / expected.loss
    gradient = max(gradient_errors(found.gradients, expected.gradients).values())
    blocks = counted(small.num_hidden_layers, "block")
    line = (
        f"proof: {family_name(small)} has no test of its own; a small copy of {blocks} equals "
        f"transformers {version('transformers')} on {len(LENGTHS)} packed documents: loss to "
        f"{loss:.0e}, gradients to {gradient:.0e}. Its FLOPs and memory estimate are approximate"
    )
    return Proof(line, adapters)


def compare_files(folder: Path, model: PreTrainedModel, small) -> None:
    """Raise Differs if transformers reads other values from files with our names."""
    values = dict(model.state_dict())
    if small.tie_word_embeddings:
        values.pop("lm_head.weight")
    names, tensors = Names(family_name(small)), {}
    for name, t in values.items():
        for part, piece in as_in_files(name, t).items():
            tensors[names.in_files(part)] = piece.contiguous()
    small.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, t in values.items():
        if not torch.equal(again[name], t):
            raise Differs(f"{name} of an export")


def difference_of_adapters(ours: Callable, model: PreTrainedModel) -> str | None:
    """What differs, if anything, between adapters and transformers' model with the same merged into
    its weights. The gradients of W + s B A by B and A are s dW A^T and s B^T dW."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    targets = tuple({target_of(name) for name in matrices_of(shapes)})
    lora = Lora(rank=2, alpha=4.0, dropout=0.0, targets=targets, parameters=0, base={})
    lm, scale = ours(lora), lora.alpha / lora.rank
    names = factors_of(lora.facts(), shapes)
    factors = {name: p for name, p in lm.named_parameters() if name in names}
    with torch.no_grad():
        for p in factors.values():
            p.normal_(std=0.1)
        for name, p in model.named_parameters():
            merge_into(name, p, factors, lora.facts())
    found, merged = run_ours(lm, recomputed=False), run_theirs(model)
    expected = {}
    for name in shapes:
        a, b = factor_names(name)
        if a in factors:
            of_weight = merged.gradients[name]
            expected[a] = scale * factors[b].mT @ of_weight
            expected[b] = scale * of_weight @ factors[a].mT
    return difference(found, merged._replace(gradients=expected))
