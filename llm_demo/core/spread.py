"""What is spread over ranks within a block: experts, and the slots of rows.

Experts: each rank of a group holds a part of every block's experts. The tokens of all ranks of the
group come to each of them, which computes what its experts add, and these sums go back to where the
tokens came from. With 8 experts of a token on 8 ranks that moves as many bytes as sending each row
to its expert, and fewer on fewer ranks, and no rank waits for the number of rows that others send.

Rows: each rank of a group holds a slice of every row. All of a decoder but its attention works on
single tokens. There the slices of a group become whole rows of a share of the heads, and back, so
that an attention backend sees every document whole. Source: "DeepSpeed Ulysses" (Jacobs et al.
2023)."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llm_demo.core.attention import IMPLS, LongRope, attend
from llm_demo.core.experts import PRODUCTS, blocks_with_experts, sorted_experts
from llm_demo.core.rows import Part

GROUPS = {}  # by name: what the compiler sees


def known(group: ProcessGroup) -> str:
    """The name by which the functions below know a group."""
    GROUPS[group.group_name] = group
    return group.group_name


@torch.library.custom_op("llm_demo::gather_rows", mutates_args=())
def gather_rows(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """x [T, ...] of each rank -> [size T, ...], by rank."""
    out = x.new_empty(size * len(x), *x.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x.contiguous(), group=GROUPS[group])
    return out


@gather_rows.register_fake
def _(x, group, size):
    return x.new_empty(size * len(x), *x.shape[1:])


@torch.library.custom_op("llm_demo::exchange_rows", mutates_args=())
def exchange_rows(x: torch.Tensor, group: str) -> torch.Tensor:
    """x [size T, ...] -> the same shape: part i comes from rank i, which had it for this rank. Done
    twice it is undone, so it is its own backward.

    All ranks of a group run the same compiled graph, so their exchanges match in order."""
    x = x.contiguous()
    out = torch.empty_like(x)  # contiguous: gloo fills any other wrongly
    dist.all_to_all_single(out, x, group=GROUPS[group])
    return out


@exchange_rows.register_fake
def _(x, group):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_group(ctx, inputs, output):
    ctx.group = inputs[1]


def _exchange_back(ctx, grad):
    return exchange_rows(grad, ctx.group), None


exchange_rows.register_autograd(_exchange_back, setup_context=_keep_group)


def keep_part(model: PreTrainedModel, grid: DeviceMesh) -> None:
    """Leave this rank's part of each block's experts to a model on the meta device. grid: parts of
    the experts x shards of such a part, over all ranks."""
    group = grid.get_group(0)
    config = model.config
    config._experts_implementation = config._experts_implementation.replace("sorted", "spread")
    for experts in (block.mlp.experts for block in blocks_with_experts(model)):
        n = experts.num_experts // group.size()
        experts.grid, experts.first = grid, group.rank() * n
        experts.spread_over = known(group), group.size()
        for name, p in experts.named_parameters(recurse=False):
            part = nn.Parameter(p[experts.first :][:n].clone(), requires_grad=p.requires_grad)
            setattr(experts, name, part)


def spread_experts(product, self, hidden, index, weights):
    """As `sorted_experts`, by this rank's experts for the tokens of the group's ranks, each of
    which has as many tokens."""
    n, over = len(self.gate_up_proj), self.spread_over
    hidden, weights = _FromAll.apply(hidden, *over), _FromAll.apply(weights, *over)
    index = gather_rows(index, *over) - self.first
    index = index.where((index >= 0) & (index < n), n)  # another rank's
    return _SumForAll.apply(sorted_experts(product, self, hidden, index, weights), *over)


def _sum_for_all(x, group, size):
    """x [size T, ...] of each rank -> [T, ...], this rank's part of the sum, added in fp32."""
    parts = exchange_rows(x, group).unflatten(0, (size, -1))
    return parts.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


class _FromAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, size):
        ctx.over = group, size
        return gather_rows(x, group, size)

    @staticmethod
    def backward(ctx, grad):
        return _sum_for_all(grad, *ctx.over), None, None


class _SumForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, size):
        ctx.over = group, size
        return _sum_for_all(x, group, size)

    @staticmethod
    def backward(ctx, grad):
        return gather_rows(grad, *ctx.over), None, None


for _name, _product in PRODUCTS.items():
    ALL_EXPERTS_FUNCTIONS.register(f"spread_{_name}", functools.partial(spread_experts, _product))


def spread_rows(model: PreTrainedModel, group: ProcessGroup) -> None:
    """Let a model take slices of rows, number i of them on the group's rank i, with the documents
    of whole rows."""
    config = model.config
    config._attn_implementation = config._attn_implementation.replace("packed", "spread")
    for block in model.model.layers:
        block.self_attn.spread_over = known(group), group.size()
    if isinstance(model.model.rotary_emb, LongRope):
        model.model.rotary_emb.part = Part(group.rank(), group.size())


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
