"""A model's folder, opened and checked before step 1."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from llm_demo.errors import UserError, words_of
from llm_demo.model.costs import head_widths, latent
from llm_demo.model.rotary import LongRope, rope_type
from llm_demo.model.source import load_config
from llm_demo.model.weights import Weights, open_weights


def open_model(
    folder: Path, max_len: int, say: Callable = print, with_weights: bool = True
) -> tuple[object, Weights | None]:
    """(the configuration of a model that can be trained exactly, its weights if the folder has
    any). If config.json ties the head to the embedding and the weights hold another head, it is not
    tied: transformers keeps both too. with_weights False: they are elsewhere. Raises UserError."""
    config = load_config(folder, max_len, trained=not with_weights)
    weights = open_weights(folder) if with_weights else None
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if weights and config.tie_word_embeddings and {head, embedding} <= weights.shapes.keys():
        if not weights.equal(head, embedding):
            config.tie_word_embeddings = False
            say(
                f"model: {folder}/config.json ties the head to the embedding, but the weights hold "
                "a head of other values: it is kept and trained as its own"
            )
    try:
        with torch.device("meta"):  # eager, because a configuration may name a kernel to download
            lm = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation="eager", trust_remote_code=False
            )
        rotary = LongRope if rope_type(config) == "longrope" else type(lm.model.rotary_emb)
        rotary, width = rotary(config), head_widths(config)[0]
        if latent(config):
            width = config.qk_rope_head_dim
        scaling = getattr(rotary, "scaling", getattr(rotary, "attention_scaling", 1.0))
        positive = [*rotary.buffers(), torch.full((width // 2,), scaling)]
    except Exception as e:  # of transformers' modules
        raise UserError(f"{folder}/config.json: {words_of(e)}") from e
    if weights:
        shapes = {name: tuple(t.shape) for name, t in lm.state_dict().items()}
        weights.check(shapes, {head} if config.tie_word_embeddings else set())
    for values in positive:
        if 2 * len(values) != width or not ((values > 0) & values.isfinite()).all():
            raise UserError(
                f"{folder}/config.json: rope_parameters {config.rope_parameters} do not give "
                f"{width / 2:g} positive frequencies and a positive scaling"
            )
    return config, weights
