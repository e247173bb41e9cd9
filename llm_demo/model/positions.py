"""How long rows may be: a model's positions and its sliding window."""

import copy

from llm_demo.core.attention import rope_of, rope_type
from llm_demo.core.errors import UserError


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


def as_trained(config, longest: int):
    """A copy of the configuration without dropout, since pretrained models have none, and without
    a sliding window. longest: tokens of the longest document. Raises UserError if it is longer than
    the window, which would matter."""
    config, window = copy.deepcopy(config), window_of(config)
    for name in ("attention_dropout", "resid_pdrop"):
        if getattr(config, name, 0):
            setattr(config, name, 0.0)
    if window is None:
        return config
    if longest > window:
        raise UserError(
            f"this model attends to the last {window} tokens only, but the longest document has "
            f"{longest}: sliding windows are not supported, so set --seq_len {window}"
        )
    config.sliding_window = None
    # of each type of layer, if the types are to stay
    by_type = "full_attention" in config.rope_parameters
    if getattr(config, "layer_types", None) is not None and not by_type:
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    return config


def length_dependent_rope(config) -> bool:
    """Whether a document's frequencies depend on the longest one of its batch."""
    return rope_type(config) in ("longrope", "dynamic")
