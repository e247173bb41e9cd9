"""The families of models that are trained, and what sets each apart from Llama."""

from typing import Literal, NamedTuple


class Experts(NamedTuple):
    """Routed experts in place of one feed-forward network."""

    # by mlp_only_layers and decoder_sparse_step; by first_k_dense_replace
    blocks: Literal["all", "by a step", "after the first"]
    gated_share: bool = False  # a shared expert has a gate
    router_bias: bool = False  # which balances the load, in place of a loss
    # keys that transformers does not read, and the values that it computes with
    unread: dict = {}


class Family(NamedTuple):
    """What sets a family apart from Llama."""

    experts: Experts | None = None
    delta_rule: bool = False  # linear attention in some blocks
    partly_rotated: bool = False  # heads may be
    multipliers: tuple[str, ...] = ()  # keys of its configuration
    norms_over_heads: bool = False


QWEN35_UNREAD = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
DEEPSEEK_UNREAD = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
SCALED = (
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
    "attention_multiplier",
)
# Decoders made of embedding, blocks, norm and head, with nothing between them but what `skeleton`
# of decoder.py does for Granite. Others cap the logits outside their modules (Gemma 2, Cohere):
# this code would silently train them wrongly. docs/models.md says what is tested of each.
FAMILIES = {  # by model_type
    "qwen3": Family(),
    "qwen2": Family(),
    "llama": Family(),
    "mistral": Family(),
    "smollm3": Family(),
    "olmo2": Family(norms_over_heads=True),
    "olmo3": Family(norms_over_heads=True),
    "granite": Family(multipliers=SCALED),
    "glm": Family(partly_rotated=True),
    "glm4": Family(partly_rotated=True),
    "phi3": Family(partly_rotated=True),
    "gemma3_text": Family(),
    "qwen3_5_text": Family(delta_rule=True, partly_rotated=True),
    "qwen2_moe": Family(experts=Experts("by a step", gated_share=True)),
    "qwen3_moe": Family(experts=Experts("by a step")),
    "deepseek_v3": Family(
        experts=Experts("after the first", router_bias=True, unread=DEEPSEEK_UNREAD)
    ),
    "qwen3_5_moe_text": Family(
        experts=Experts("all", gated_share=True, unread=QWEN35_UNREAD),
        delta_rule=True,
        partly_rotated=True,
    ),
}
# Models with images, by model_type: what their text may be. That is trained, the rest is kept.
WITH_IMAGES = {
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "gemma3": ("gemma3_text",),
    "mistral3": ("mistral", "ministral3"),
    "gemma4_unified": ("gemma4_unified_text",),
}
# How names of their text begin in files, and in a model of the text alone. transformers has put
# "language_model" first, and later second.
TEXT_NAMES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# How names of their other parts begin; "model." was put before those of a vision tower later.
OTHER_PARTS = (
    "model.visual.",
    "mtp.",
    "model.vision_tower.",
    "vision_tower.",
    "model.multi_modal_projector.",
    "multi_modal_projector.",
    "model.embed_vision.",
    "model.vision_embedder.",
    "model.embed_audio.",
)


def family_of(config) -> Family:
    return FAMILIES[config.model_type]


def is_mixture(config) -> bool:
    """Whether the model is a mixture of experts."""
    return family_of(config).experts is not None
