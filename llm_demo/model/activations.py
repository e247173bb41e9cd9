"""What blocks keep of a micro-batch for their backward, counted without memory for it."""

import copy
import functools
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llm_demo.core.attention import of_stream
from llm_demo.core.decoder import Blocks, skeleton
from llm_demo.core.delta import RULES
from llm_demo.core.experts import Routers, blocks_with_experts, sorted_experts
from llm_demo.core.lora import apply_lora
from llm_demo.model.costs import kinds_of, rotary_width

_counts = {}  # {what bytes per token depend on: (the configuration, what `count_blocks` returns)}
_noted = {}  # storages that products, attention and sums read or write in a forward, by id


class Counted(NamedTuple):
    """What stands for Documents."""

    moved: str
    rule: str  # of linear attention
    wide: int  # the size of fp32, in numbers of the dtype that is computed in
    cu_seqlens: torch.Tensor = torch.empty(2, dtype=torch.int32, device="meta")


SOME = 2**24  # tokens of a forward, so many that what has the size of weights is little beside them


def count_blocks(config, compute, moved: str) -> list[tuple[float, float]]:
    """For each block (bytes per token that autograd keeps, those of them that the compiler keeps,
    in fp32), without what attention's kernel keeps besides, counted on the meta device. moved: as
    which attention's tokens are moved and its values widened: sdpa, buckets or varlen.

    The compiler keeps what products, attention and sums read or write, as far as the backward needs
    it, and computes the rest again."""
    dtype, lora = torch.float32 if compute.compile else compute.dtype, compute.lora
    documents = Counted(moved, compute.rule, 4 // compute.dtype.itemsize)
    key = id(config), dtype, *documents[:3], lora and (lora.rank, tuple(lora.targets))
    if key not in _counts:
        kinds, few = kinds_of(config), copy.copy(config)
        few.num_hidden_layers = 1 + max(map(kinds.index, kinds))  # the first of each kind
        lm = skeleton(few, "counted", product="counted", rule="counted")
        if lora:
            apply_lora(lm, lora, dtype)
        if with_experts := blocks_with_experts(lm.model):
            Routers(with_experts)
        blocks = {kind: lm.model.layers[kinds.index(kind)] for kind in kinds}
        of = {kind: _count(block, config, dtype, documents) for kind, block in blocks.items()}
        _counts[key] = config, [of[kind] for kind in kinds]
    return _counts[key][1]


def _count(block, config, dtype, documents: Counted) -> tuple[float, float]:
    """Bytes per token that autograd and the compiler keep of a block."""
    block.to("meta", dtype)
    if hasattr(block.mlp, "gate"):
        block.mlp.gate.float()
    meta = functools.partial(torch.empty, 1, SOME, dtype=dtype, device="meta")
    hidden = meta(config.hidden_size, requires_grad=True)
    table = meta(rotary_width(config))
    kept = {}

    def keep(t):  # several tensors may be views of one storage
        kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    def note_module(module, inputs, out):  # residual sums are inputs of norms
        _note(*inputs[:1], *[out] * isinstance(module, nn.Linear))

    _noted.clear()
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with register_module_forward_hook(note_module), hooks:
        out = Blocks([block], False)(hidden, (table, table), None, documents)
    del out
    for p in block.parameters():
        kept.pop(p.untyped_storage()._cdata, None)
    noted = (storage.nbytes() for key, storage in kept.items() if key in _noted)
    return sum(storage.nbytes() for storage in kept.values()) / SOME, sum(noted) / SOME


def _note(*tensors: torch.Tensor) -> None:
    _noted.update((t.untyped_storage()._cdata, t.untyped_storage()) for t in tensors)


class _Kernel(torch.autograd.Function):
    """Returns `out`, saves what a kernel saves, and computes nothing."""

    @staticmethod
    def forward(ctx, out, *saved):
        ctx.save_for_backward(*saved)
        return out.view_as(out)


def _attend(q, k, v, by_token: bool):
    B, H, S, E = *q.shape[:3], v.shape[-1]
    if by_token or q.transpose(1, 2).is_contiguous():
        out = q.new_empty(B, S, H, E)
    else:  # in the order of q
        out = q.new_empty(B, H, S, E).transpose(1, 2)
    _note(q, k, v, out)
    return _Kernel.apply(out, q, k, v, out)


def _attend_tokens(*qkv):
    return _attend(*(x.transpose(0, 1)[None] for x in qkv), True)[0]


def _count_attention(module, q, k, v, *args, documents: Counted, **kwargs):
    moved = documents.moved
    if moved == "varlen":
        kernel = of_stream(lambda q, k, v, *_: _attend_tokens(q, k, v))
        return kernel(q, k, v, None, None), None
    if moved == "buckets":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return _attend(q, k, v, moved == "buckets"), None


def _count_product(rows, weight, ends):
    """Of experts. Compiled, a frozen one does not keep its input."""
    out = rows.new_empty(len(rows), weight.shape[-1])
    _note(out, *[rows] * weight.requires_grad)
    return _Kernel.apply(out, rows, weight)


def _count_rule(q, k, v, g, beta, documents: Counted):
    """What a rule keeps of each head of values, in chunks of 64 tokens, besides its inputs."""
    heads, width, values = v.shape[2], q.shape[-1], v.shape[-1]
    extra = {
        # by counting its operations: all in fp32, with the states between chunks
        "chunked": documents.wide * (10 * width + 6 * values + 5 * 64 + width * values // 32),
    }.get(documents.rule, 0)  # a kernel's backward computes the forward again
    kept = [x.contiguous() for x in (q, k, v)]
    kept.append(q.new_empty(*q.shape[:2], heads * extra))
    _note(*kept)
    return _Kernel.apply(torch.empty_like(kept[2]), *kept, g, beta)


RULES["counted"] = _count_rule
AttentionInterface.register("packed_counted", _count_attention)
ALL_EXPERTS_FUNCTIONS.register("sorted_counted", functools.partial(sorted_experts, _count_product))
