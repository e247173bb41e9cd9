"""The families of models that are trained, and what sets each apart from Llama."""

import copy
from typing import NamedTuple


class Experts(NamedTuple):
    """Routed experts in place of one feed-forward network."""

    router_bias: bool = False  # which balances the load, in place of a loss
    softmax: bool = True  # the router is Qwen3-MoE's, so an auxiliary loss can act on it
    # keys that transformers does not read, and the values that it computes with
    unread: dict = {}


class Family(NamedTuple):
    """What sets a family apart from Llama."""

    experts: Experts | None = None
    delta_rule: bool = False  # linear attention in some blocks
    partly_rotated: bool = False  # heads may be
    multipliers: tuple[str, ...] = ()  # keys of its configuration
    norms_over_heads: bool = False
    own_longrope: bool = False  # transformers 4 reads only some keys of it
    wide_rope: bool = False  # proportional: only some of a head's frequencies are not zero
    tested: bool = True  # by a test of its own; else by the proof of proof.py at each start


EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")  # keys of their number
QWEN35_UNREAD = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
DEEPSEEK_UNREAD = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
SCALED = (
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
    "attention_multiplier",
)
# Families with a test of their own, by model_type. docs/models.md says what is tested of each.
# Others may do something outside of the modules that are run here, as Gemma 2 caps its logits:
# they would be trained wrongly, so a small copy is compared first.
FAMILIES = {
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
    "phi3": Family(partly_rotated=True, own_longrope=True),
    "gemma3_text": Family(),
    "gemma4_unified_text": Family(wide_rope=True),
    "gemma4_text": Family(experts=Experts(softmax=False), wide_rope=True),
    "qwen3_5_text": Family(delta_rule=True, partly_rotated=True),
    "qwen2_moe": Family(experts=Experts()),
    "qwen3_moe": Family(experts=Experts()),
    "deepseek_v3": Family(experts=Experts(router_bias=True, softmax=False, unread=DEEPSEEK_UNREAD)),
    "qwen3_5_moe_text": Family(
        experts=Experts(unread=QWEN35_UNREAD),
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
    "gemma4": ("gemma4_text",),
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
    "model.audio_tower.",
    "model.embed_audio.",
)


def takes_images(config: dict) -> bool:
    """Whether a config.json is of a model with images."""
    return config.get("model_type") in WITH_IMAGES


def text_part(config):
    """Of a model with images, the configuration of what reads text, which is trained; of any other
    model, its own. Raises ValueError if it is of another kind."""
    kinds = WITH_IMAGES.get(config.model_type)
    if kinds is None:
        return config
    text = config.text_config
    if text.model_type not in kinds:
        raise ValueError(f"text_config has model_type {text.model_type}, not {' or '.join(kinds)}")
    for name in ("tie_word_embeddings", "quantization_config"):
        value = getattr(config, name, None)
        if value:
            setattr(text, name, value)
    return text


def family_in(config: dict) -> str | None:
    """The family of a config.json; of its text, if it is of a model with images."""
    return (config.get("text_config") or config).get("model_type")


def family_name(config) -> str:
    """transformers' name of a configuration's family."""
    return config.model_type


def family_of(config) -> Family:
    """The family of a configuration. Of one without a test of its own: what its keys say."""
    family = FAMILIES.get(config.model_type)
    if family:
        return family
    experts = Experts(softmax=False) if experts_of(config) else None
    return Family(experts=experts, tested=False)


def experts_of(config) -> int:
    """Routed experts of each block that has any; 0 without."""
    if not getattr(config, "enable_moe_block", True):  # Gemma 4 has both kinds
        return 0
    counts = (getattr(config, name, None) for name in EXPERTS)
    return next(filter(None, counts), 0)


def chosen_of(config) -> int | None:
    """Experts of each token; None if the configuration does not say."""
    names = ("num_experts_per_tok", "top_k_experts")
    return next(filter(None, (getattr(config, name, None) for name in names)), None)


def is_mixture(config) -> bool:
    """Whether the model is a mixture of experts."""
    return family_of(config).experts is not None and getattr(config, "enable_moe_block", True)


def is_hybrid(config) -> bool:
    """Whether some of the model's blocks have a delta rule in place of attention."""
    return family_of(config).delta_rule


def without_dropout(config):
    """A copy of the configuration in which every dropout is 0, since pretrained models have
    none."""
    config = copy.deepcopy(config)
    for name, value in vars(config).items():
        if name.endswith(("dropout", "_pdrop")) and value:
            setattr(config, name, 0.0)
    return config
