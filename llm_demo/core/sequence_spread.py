"""Rows spread over ranks: each rank of a group holds a slice of every row.

All of a decoder but its attention works on single tokens. There the slices of a group become whole
rows of a share of the heads, and back, so that an attention backend sees every document whole.
Source: "DeepSpeed Ulysses" (Jacobs et al. 2023)."""

import functools

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, PreTrainedModel

from llm_demo.core.attention import IMPLS, attend
from llm_demo.core.batch import Part
from llm_demo.core.exchange import exchange_rows, known
from llm_demo.core.rotary import LongRope


def spread_rows(model: PreTrainedModel, group: ProcessGroup) -> None:
    """Let a model take slices of rows, number i of them on the group's rank i, with the documents
    of whole rows."""
    config = model.config
    config._attn_implementation = config._attn_implementation.replace("packed", "spread")
    for block in model.model.layers:
        block.self_attn.spread_over = known(group), group.size()
    if isinstance(model.model.rotary_emb, LongRope):
        model.model.rotary_emb.part = Part(group.rank(), group.size())


def from_owners(tokens: torch.Tensor, here: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """int64 [n] on every rank of a group, of which each has those that are `here`, bool [n]."""
    merged = torch.zeros(len(here), dtype=tokens.dtype, device=tokens.device)
    merged[here.nonzero().squeeze(1).to(tokens.device)] = tokens
    dist.all_reduce(merged, group=group)
    return merged


def attend_spread(impl: str, module, q, k, v, attention_mask, *, documents=None, **kwargs):
    """As `attention.attend`, of this rank's slices: q [B, H, s, D], k [B, KV, s, D], v [B, KV, s,
    E] -> [B, s, H, E]. documents: of whole rows [B, S]."""
    group, n = module.spread_over
    D, E = q.shape[-1], v.shape[-1]
    if k.shape[1] < n:
        k, v = (x.repeat_interleave(n // x.shape[1], 1) for x in (k, v))
    # for rank i share i of the heads: [n, B, s, h, D]
    shares = [x.unflatten(1, (n, -1)).permute(1, 0, 3, 2, 4) for x in (q, k, v)]
    rows = exchange_rows(torch.cat([x.flatten(3) for x in shares], -1), group)
    rows = rows.transpose(0, 1).flatten(1, 2)  # from rank i slice i: [B, S, ...]; a view if B is 1
    q, k, v = rows.split([x.shape[3] * x.shape[4] for x in shares], -1)
    q, k = (x.unflatten(-1, (-1, D)).transpose(1, 2) for x in (q, k))
    v = v.unflatten(-1, (-1, E)).transpose(1, 2)
    out, _ = attend(impl, module, q, k, v, attention_mask, documents=documents, **kwargs)
    out = exchange_rows(out.unflatten(1, (n, -1)).transpose(0, 1), group)  # [n, B, s, h, E]
    return out.permute(1, 2, 0, 3, 4).flatten(2, 3), None


for _impl in IMPLS:
    AttentionInterface.register(f"spread_{_impl}", functools.partial(attend_spread, _impl))
