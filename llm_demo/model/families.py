"""The families of models that are trained, and what a configuration must not ask for."""

from collections.abc import Iterator

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llm_demo.core.attention import LongRope, rope_of, rope_type
from llm_demo.core.errors import UserError
from llm_demo.model.costs import (
    ONLY_EXPERTS,
    PARTIAL,
    experts_of,
    gated_share,
    is_hybrid,
    mixed_blocks,
)
from llm_demo.model.low_bits import why_unread

# Decoders made of embedding, blocks, norm and head, with nothing between them but what `skeleton`
# of decoder.py does for Granite. Others cap the logits outside their modules (Gemma 2, Cohere):
# this code would silently train them wrongly. docs/models.md says what is tested of each.
EXPERTS = ("qwen2_moe", "qwen3_moe", "deepseek_v3", "qwen3_5_moe_text")
FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "smollm3", "olmo2", "olmo3", "granite", "glm",
            "glm4", "phi3", "gemma3_text", "qwen3_5_text", *EXPERTS)  # fmt: skip
# models with images -> their part that is trained
TEXT_OF = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads")  # fmt: skip
# where a family has them, and not all of their models
FURTHER_SIZES = ("max_position_embeddings", "head_dim", "moe_intermediate_size", "kv_lora_rank",
                 "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                 "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                 "linear_value_head_dim", "linear_conv_kernel_dim")  # fmt: skip
MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier",
               "attention_multiplier")  # fmt: skip
# keys of experts that transformers does not read, and the values that it computes with
UNREAD = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    "qwen3_5_moe_text": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
LARGEST = 1 << 24  # of the sizes
MOST_BLOCKS = 1 << 12
# rotary types that do not depend on max_position_embeddings: with random weights rows may be longer
ANY_LENGTH = ("default", "linear", "llama3")


def odd_sizes(sizes: dict) -> Iterator[str]:
    """What is wrong with these sizes of a configuration, by their keys."""
    for name, value in sizes.items():
        most = MOST_BLOCKS if name == "num_hidden_layers" else LARGEST
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            yield f"{name} {str(value)[:80]} is not a positive number of at most {most:,}"


def problems_of(config) -> Iterator[str]:
    """Why a configuration of a known family can't be trained exactly, if so. Only the first is
    sure: it may be the cause of the next."""
    names = (*SIZES, *FURTHER_SIZES)
    if is_mixture(config):
        names += ("n_routed_experts", "num_experts")
    if gated_share(config):
        names += ("shared_expert_intermediate_size",)
    yield from odd_sizes({name: getattr(config, name, None) for name in names})
    for name in SIZES:
        needless = name == "intermediate_size" and config.model_type in ONLY_EXPERTS
        if getattr(config, name, None) is None and not needless:
            yield f"{name} is missing"
    for name in ("rms_norm_eps", "initializer_range"):
        if not isinstance(value := getattr(config, name, 0), int | float) or not 0 <= value <= 1:
            yield f"{name} {value} is not a number from 0 to 1"
    if config.num_attention_heads % config.num_key_value_heads:
        yield "num_attention_heads must be a multiple of num_key_value_heads"
    act = getattr(config, "hidden_activation", None) or config.hidden_act  # Gemma, the others
    if str(act) not in ACT2FN:
        yield f"hidden_act {act} is unknown"
    for name in MULTIPLIERS:
        value = getattr(config, name, 1.0)
        if config.model_type == "granite" and not 0 < value < LARGEST:
            yield f"{name} {value} is not a positive number"
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            yield f"{name} is not supported"
    for name, value in (("use_bidirectional_attention", False), ("is_causal", True)):
        if bool(getattr(config, name, value)) != value:
            yield f"{name} {getattr(config, name)} is not supported: attention is causal"
    yield from problems_of_layers(config)
    if problem := why_unread(getattr(config, "quantization_config", None)):
        yield problem
    if is_mixture(config):
        yield from problems_of_experts(config)
    yield from problems_of_rope(config)


def problems_of_layers(config) -> Iterator[str]:
    """What is wrong with the kinds of attention in its blocks."""
    kinds = {"full_attention", "linear_attention" if is_hybrid(config) else "sliding_attention"}
    layers = getattr(config, "layer_types", None) or ()
    if unknown := {*layers} - kinds:
        yield f"layer_types: {unknown.pop()} is not supported"
    if "sliding_attention" in layers and getattr(config, "sliding_window", None) is None:
        yield "layer_types has sliding_attention, but sliding_window is not set"
    if not is_hybrid(config):
        return
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        yield f"linear_num_value_heads {values} is not a multiple of {keys} key heads"
    if config.hidden_act != "silu":
        yield f"hidden_act {config.hidden_act} is not supported in linear attention, only silu"
    if not getattr(config, "attn_output_gate", True):
        yield "attn_output_gate false is not supported, only true"
    if len(config.layer_types) != config.num_hidden_layers:
        yield f"layer_types has {len(config.layer_types)} of {config.num_hidden_layers} blocks"


def problems_of_experts(config) -> Iterator[str]:
    n, chosen = experts_of(config), config.num_experts_per_tok
    if n < 1 or chosen is None or not 1 <= chosen <= n:
        yield f"num_experts_per_tok {chosen} does not choose from {n} experts"
    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        if config.decoder_sparse_step < 1:
            yield f"decoder_sparse_step {config.decoder_sparse_step} is not positive"
        if not any(mixed_blocks(config)):
            yield "mlp_only_layers and decoder_sparse_step leave no block with experts"
    for name, value in UNREAD.get(config.model_type, {}).items():
        if getattr(config, name, None) not in (None, value):
            yield f"{name} {getattr(config, name)} is not supported, only {value}"
    if config.model_type != "deepseek_v3":
        return
    if config.num_key_value_heads != config.num_attention_heads:
        yield "num_key_value_heads differs from num_attention_heads in latent attention"
    if config.n_shared_experts < 1:
        yield f"n_shared_experts {config.n_shared_experts}: at least 1 is supported"
    if config.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim {config.qk_rope_head_dim} is odd, and can't be rotated"
    if config.v_head_dim is None:
        yield "v_head_dim is missing"
    dense, blocks = config.first_k_dense_replace, config.num_hidden_layers
    if dense is None or dense < 0:
        yield f"first_k_dense_replace {dense} is not a number of blocks"
    if not any(mixed_blocks(config)):
        yield f"first_k_dense_replace {dense} leaves none of {blocks} blocks with experts"
    groups, kept = config.n_group, config.topk_group
    if not groups or n % groups or n // groups < 2:
        yield f"n_group {groups} does not divide {n} experts into groups of at least 2"
    if not kept or kept > groups or kept * (n // groups) < chosen:
        yield f"topk_group {kept} of n_group {groups} has too few experts to choose {chosen} from"


def problems_of_rope(config) -> Iterator[str]:
    """What is wrong with rope_parameters, as far as transformers would not say so itself."""
    rope, known = getattr(config, "rope_parameters", None), ("default", *ROPE_INIT_FUNCTIONS)
    if not isinstance(rope, dict):
        yield f"rope_parameters {rope} is not an object"
    if "full_attention" in rope:  # and other parameters in layers with sliding windows
        known = ANY_LENGTH + ("yarn",)
        if (local := rope.get("sliding_attention", {}).get("rope_type")) != "default":
            yield f"the rotary type {local} of sliding_attention is not supported, only default"
    if (kind := rope_type(config)) not in known:
        yield f"the rotary type {kind} is not one of {', '.join(known)}"
    rope = rope_of(config)
    partial = rope.get("partial_rotary_factor", 1.0)
    if config.model_type in PARTIAL and not (isinstance(partial, int | float) and 0 < partial <= 1):
        yield f"partial_rotary_factor {partial} is not a number above 0 up to 1"
    section = rope.get("mrope_section", [1, 1, 1])  # transformers does not check it
    if not isinstance(section, list) or [type(n) for n in section] != [int] * 3 or min(section) < 0:
        yield f"mrope_section {section} in rope_parameters is not three numbers"
    for name in ("factor", "original_max_position_embeddings"):
        value = rope.get(name)
        if value is not None and not (isinstance(value, int | float) and 1 <= value < LARGEST):
            yield f"{name} {value} in rope_parameters is not a number from 1 to {LARGEST:,}"
    if kind == "longrope":
        try:
            LongRope(config)
        except (KeyError, TypeError, ValueError, RuntimeError) as e:
            yield f"longrope in rope_parameters: {e}"


def is_mixture(config) -> bool:
    """Whether the model is a mixture of experts."""
    return config.model_type in EXPERTS


def position_limit(config) -> int | None:
    """The longest row that a model's positions are made for, if it says so. With YaRN that is the
    length it was trained on, times the factor, which model cards tell people to add
    (https://huggingface.co/Qwen/Qwen3-8B#processing-long-texts)."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = rope_of(config)
    if limit and rope_type(config) == "yarn" and rope.get("factor"):
        return max(limit, int(rope.get("original_max_position_embeddings", 0) * rope["factor"]))
    return limit


def window_of(config) -> int | None:
    """The sliding window in tokens, if any of the model's layers uses one."""
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    return getattr(config, "sliding_window", None)


def without_window(config, longest: int) -> None:
    """Turn off the sliding window. Raises UserError if a document is longer: it would matter."""
    window = window_of(config)
    if window is None:
        return
    if longest > window:
        raise UserError(
            f"this model attends to the last {window} tokens only, but the longest document has "
            f"{longest}: sliding windows are not supported, so set --seq_len {window}"
        )
    config.sliding_window = None
    rope = config.rope_parameters  # of each type of layer, if the types are to stay
    if getattr(config, "layer_types", None) is not None and "full_attention" not in rope:
        config.layer_types = ["full_attention"] * config.num_hidden_layers


def length_dependent_rope(config) -> bool:
    """Whether a document's frequencies depend on the longest one of its batch."""
    return rope_type(config) in ("longrope", "dynamic")
