"""What a configuration must not ask for. Most of it would silently be trained wrongly."""

import math
from collections.abc import Iterator

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llm_demo.core.attention import LongRope, rope_of, rope_type
from llm_demo.core.decoder import soft_cap
from llm_demo.core.errors import UserError
from llm_demo.model.costs import block_costs, kinds_of_heads, latent, windows_of
from llm_demo.model.families import (
    Family,
    chosen_of,
    experts_of,
    family_name,
    family_of,
    is_mixture,
)

# rotary types that do not depend on max_position_embeddings: with random weights rows may be longer
ANY_LENGTH = ("default", "linear", "llama3", "proportional")


def problems_of(config) -> Iterator[str]:
    """Why a configuration can't be trained exactly, if so. Only the first is sure: it may be the
    cause of the next. Of a family without a test of its own the proof finds more."""
    family = family_of(config)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        yield "attn_logit_softcapping is not supported"
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None and soft_cap(config) is None:
        yield f"final_logit_softcapping: {family_name(config)} computes its loss without a cap"
    if cap is not None and not 0 < cap < math.inf:
        yield f"final_logit_softcapping {cap} is not a positive number"
    if any(heads.queries % heads.keys for heads in kinds_of_heads(config)):
        yield "num_attention_heads must be a multiple of num_key_value_heads"
    for name in family.multipliers:
        value = getattr(config, name)
        if value <= 0:
            yield f"{name} {value} is not a positive number"
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if getattr(config, name, None):
            yield (
                f"{name} {getattr(config, name)} is not supported: of Gemma 4, E2B and E4B have "
                "it, 12B, 26B-A4B and 31B do not"
            )
    for name, value in (("use_bidirectional_attention", False), ("is_causal", True)):
        found = getattr(config, name, value)
        if bool(found) != value and found != "vision":  # of images' tokens alone
            yield f"{name} {getattr(config, name)} is not supported: attention is causal"
    if any(w is not None and w < 1 for w in windows_of(config)):
        yield f"sliding_window {config.sliding_window} is not a positive number of tokens"
    if family.tested:
        yield from problems_of_layers(config, family)
        yield from problems_of_rope(config, family)
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        from llm_demo.model.low_bits import problems_of_quantization

        yield from problems_of_quantization(quantization)
    if is_mixture(config):
        yield from problems_of_experts(config, family)


def problems_of_layers(config, family: Family) -> Iterator[str]:
    """What is wrong with the kinds of attention in its blocks."""
    kinds = {"full_attention", "linear_attention" if family.delta_rule else "sliding_attention"}
    layers = getattr(config, "layer_types", None) or ()
    for kind in set(layers) - kinds:
        yield f"layer_types: {kind} is not supported"
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in layers:
        if not getattr(config, "use_sliding_window", True):
            yield "layer_types has sliding_attention, but use_sliding_window is false"
        if window is None:
            yield "layer_types has sliding_attention, but sliding_window is not set"
    kind = type(config)  # which says what the model reads
    in_every_layer = hasattr(kind, "sliding_window") and not hasattr(kind, "layer_types")
    if in_every_layer and window is not None and "full_attention" in layers:
        yield (
            f"layer_types has full_attention, but {family_name(config)} uses sliding_window in "
            "every layer: remove one of them"
        )
    if not family.delta_rule:
        return
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        yield f"linear_num_value_heads {values} is not a multiple of {keys} key heads"
    if config.hidden_act != "silu":
        yield f"hidden_act {config.hidden_act} is not supported in linear attention, only silu"
    if not getattr(config, "attn_output_gate", True):
        yield "attn_output_gate false is not supported, only true"


def problems_of_experts(config, family: Family) -> Iterator[str]:
    n, chosen = experts_of(config), chosen_of(config)
    if n < 1 or chosen is None or not 1 <= chosen <= n:
        yield f"num_experts_per_tok {chosen} does not choose from {n} experts"
    for name, value in family.experts.unread.items():
        if getattr(config, name, None) not in (None, value):
            yield f"{name} {getattr(config, name)} is not supported, only {value}"
    if latent(config) and config.num_key_value_heads != config.num_attention_heads:
        yield "num_key_value_heads differs from num_attention_heads in latent attention"
    if getattr(config, "n_group", None) is not None:
        yield from problems_of_groups(config, n)
    if not any(block.chosen for block in block_costs(config)):
        yield "no block has experts, as mlp.experts with a router mlp.gate"


def problems_of_groups(config, n: int) -> Iterator[str]:
    """n: experts of a block."""
    groups, kept, chosen = config.n_group, config.topk_group, config.num_experts_per_tok
    if not groups or n % groups or n // groups < 2:
        yield f"n_group {groups} does not divide {n} experts into groups of at least 2"
    elif kept > groups or kept * (n // groups) < chosen:
        yield f"topk_group {kept} of n_group {groups} has too few experts to choose {chosen} from"


def problems_of_rope(config, family: Family) -> Iterator[str]:
    """What is wrong with rope_parameters, as far as transformers would not say so itself."""
    rope = config.rope_parameters
    known = ("default", *ROPE_INIT_FUNCTIONS)
    if "full_attention" in rope:  # and other parameters in layers with sliding windows
        known = {*ANY_LENGTH, "yarn"} - ({"proportional"} if not family.wide_rope else set())
        local = rope.get("sliding_attention", {}).get("rope_type")
        if local != "default":
            yield f"the rotary type {local} of sliding_attention is not supported, only default"
    kind = rope_type(config)
    if kind not in known:
        yield f"the rotary type {kind} is not one of {', '.join(known)}"
    rope = rope_of(config)
    partial = rope.get("partial_rotary_factor", 1.0)
    if family.partly_rotated and not (isinstance(partial, int | float) and 0 < partial <= 1):
        yield f"partial_rotary_factor {partial} is not a number above 0 up to 1"
    if kind == "longrope":
        LongRope(config)  # raises what transformers says


def refuse_experts(config) -> None:
    """Raise UserError if the model has experts, which DeepSpeed's engines do not train exactly."""
    if is_mixture(config):
        raise UserError(
            f"{family_name(config)}: only fsdp/train_fsdp.py and fsdp_pp/train_fsdp_pp.py train "
            "models with experts"
        )


def check_experts(args, config) -> None:
    """Raise UserError for flags that this model has no use for, or that don't work with it."""
    n, groups = experts_of(config), args.expert_parallel or 1
    flags = ("freeze_router", "router_bias_update", "router_aux_loss", "expert_parallel")
    if not is_mixture(config):
        for flag in flags:
            if getattr(args, flag):
                raise UserError(f"--{flag}: this model has no experts")
        return
    name, experts = family_name(config), family_of(config).experts
    if args.router_aux_loss and experts.router_bias:
        raise UserError(f"--router_aux_loss: {name} balances its load by --router_bias_update")
    if args.router_aux_loss and not experts.softmax:
        raise UserError(f"--router_aux_loss: no test shows that it is right for {name}")
    if args.router_bias_update and not family_of(config).tested:
        raise UserError(f"--router_bias_update: no test shows that it is right for {name}")
    if args.router_bias_update and not experts.router_bias:
        raise UserError(f"--router_bias_update: {name} has no bias for its experts")
    if args.psgd_rank:
        raise UserError("--psgd_rank does not work with a mixture of experts")
    if n % groups:
        raise UserError(f"--expert_parallel {groups} does not divide {n}, the experts")
