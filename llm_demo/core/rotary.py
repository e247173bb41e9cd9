"""Rotary embeddings of packed documents."""

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llm_demo.core.batch import WHOLE, document_lengths


def rope_type(config) -> str:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


class LongRope(nn.Module):
    """Rotary embedding of type longrope, with frequencies by each document's own length.

    transformers picks one set for a whole batch. Its other length-dependent type, dynamic, needs no
    such class: its frequencies are constant up to the model's max_position_embeddings."""

    def __init__(self, config):
        super().__init__()
        self.part = WHOLE  # of each row, that this rank holds
        self.short_up_to = config.rope_parameters["original_max_position_embeddings"]
        frequencies = ROPE_INIT_FUNCTIONS["longrope"]
        for name, length in (("short", self.short_up_to), ("long", self.short_up_to + 1)):
            inv_freq, self.scaling = frequencies(config, torch.device("cpu"), seq_len=length)
            self.register_buffer(name, inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, hidden, position_ids, cu_seqlens):
        """(cos, sin) in hidden's dtype, each [B, S, head_dim]. cu_seqlens: int32 [D+1], of whole
        rows."""
        B, S = position_ids.shape
        lengths = self.part.of_rows(document_lengths(cu_seqlens, (B, S * self.part.of)))
        is_long = (lengths > self.short_up_to)[..., None]
        angles = position_ids[..., None].float() * torch.where(is_long, self.long, self.short)
        angles = torch.cat((angles, angles), dim=-1)
        return tuple((f(angles) * self.scaling).to(hidden.dtype) for f in (torch.cos, torch.sin))


def rotary_tables(rotary: nn.Module, hidden, position_ids, documents) -> tuple:
    """(cos, sin) for packed documents."""
    if isinstance(rotary, LongRope):
        return rotary(hidden, position_ids, documents.cu_seqlens)
    return rotary(hidden, position_ids)
