"""Attention and rotary embeddings of packed documents: exact and causal on every machine.

A row of a batch holds several documents that must not see each other. `Documents` holds their
layout; Hugging Face models pass it to `attend` as a keyword argument, so no model is changed.

    sdpa           plain causal SDPA, if each row is a single document: padding comes last
    varlen_cudnn   documents of 4,096 tokens or more one by one by cuDNN's kernel, others as varlen
    varlen         torch's varlen_attn: one fused kernel over all documents
    flash_attn     as varlen, from the flash-attn package
    efficient      torch's memory-efficient kernel over all documents, for heads of any width
    bucketed       gather documents of similar length into padded buckets, plain causal SDPA,
                   scatter back: any SDPA backend, fused if there is a kernel
    bucketed_math  the same without fused kernels, for GPUs that have none
    math           SDPA with a block-diagonal mask: slow and simple, the others' reference

For a model with heads of two widths, "a+b" is a for heads up to WIDEST and b for wider ones.

With a sliding window of n tokens, a token attends to the last n, itself included. Kernels that know
no windows compute longer documents in blocks, each of which sees itself and the one before it.
"""

import functools
import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from llm_demo.core.errors import UserError
from llm_demo.core.rows import WHOLE_ROWS, document_of, to_device

LONG = 4096  # tokens; with shorter documents, padding and more calls cost more than cuDNN saves
WIDEST = 256  # numbers of a head that flash kernels take
PADDED_TO = 64  # documents are padded to a multiple of this; 128 was slower on an H200


class Buckets(NamedTuple):
    shapes: list[tuple[int, int]]  # (documents, padded length) of each bucket
    gather: torch.Tensor  # int64 [slots]: index of each slot's token in the B*S stream
    padding: torch.Tensor  # bool [slots]: slots without a token
    scatter: torch.Tensor  # int64 [B*S]: the bucket slot of each token of the stream


class OnHost:
    """A tensor that stays on the CPU: FSDP2 moves all that it finds in tuples to the device."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class Documents(NamedTuple):
    """Document layout of a micro-batch [B, S], in the form the chosen backend needs."""

    cu_seqlens: torch.Tensor  # int32 [D+1]: boundaries in the flat B*S stream, the last repeated
    max_len: int  # upper bound on document lengths
    buckets: Buckets | None = None  # also None if every document is a whole row
    mask: torch.Tensor | None = None  # bool [B, 1, S, S]
    boundaries: OnHost | None = None  # cu_seqlens on the CPU
    long: int = LONG  # tokens of a document that is computed alone

    def by_bucket(self, function, *tensors: torch.Tensor) -> torch.Tensor:
        """Apply function(*tensors) to each bucket instead of whole rows. The tensors and the result
        are [B, S, ...]."""
        if self.buckets is None:
            return function(*tensors)
        B, S = tensors[0].shape[:2]
        tensors = [_Rearrange.apply(x.flatten(0, 1), self.buckets, True) for x in tensors]
        out, at = [], 0
        for docs, padded in self.buckets.shapes:
            end = at + docs * padded
            out.append(function(*(x[at:end].unflatten(0, (docs, padded)) for x in tensors)))
            at = end
        out = torch.cat([x.flatten(0, 1) for x in out])
        return _Rearrange.apply(out, self.buckets, False).unflatten(0, (B, S))


def make_documents(
    cu_seqlens: torch.Tensor,
    shape: tuple[int, int],
    impl: str,
    device: torch.device,
    long: int | None = None,
) -> Documents:
    """Document layout of a micro-batch for backend `impl`.

    cu_seqlens: int32 [D+1] on any device. For buckets, varlen_cudnn and efficient a GPU tensor
    costs a synchronisation; pass the CPU's copy if there is one. long: as in attend_documents, or
    LONG by default."""
    B, S = shape
    impls = impl.split("+")
    buckets, mask, cudnn, on_host = None, None, "varlen_cudnn" in impls, not cu_seqlens.is_cuda
    needs_boundaries = on_host or cudnn or "efficient" in impls
    boundaries = OnHost(cu_seqlens.cpu()) if needs_boundaries else None
    max_len = _bound(int(cu_seqlens.diff().max()), S) if on_host and not cudnn else S
    if {"bucketed", "bucketed_math"} & {*impls}:
        lengths = [n for n in cu_seqlens.diff().tolist() if n]
        if any(n != S for n in lengths):
            buckets = _make_buckets(lengths, S, device)
    (cu_seqlens,) = to_device(device, cu_seqlens)
    if "math" in impls:
        doc = document_of(torch.arange(B * S, device=device), cu_seqlens).view(B, 1, S)
        causal = torch.ones(S, S, dtype=torch.bool, device=device).tril()
        mask = (doc[..., :, None] == doc[..., None, :]) & causal
    return Documents(cu_seqlens, max_len, buckets, mask, boundaries, long or LONG)


def _bound(longest: int, seq_len: int) -> int:
    """An upper bound on document lengths. Fused kernels start threads for documents of that length,
    most of them in vain if a long row has short documents. Code is compiled again for each value,
    so there are few values."""
    if seq_len <= 8192:
        return seq_len
    bounds = (n for n in (1024, 4096, 16_384, 65_536) if n >= longest)
    return min(next(bounds, seq_len), seq_len)


def _make_buckets(lengths: list[int], seq_len: int, device) -> Buckets:
    by_length, start = {}, 0
    for n in lengths:
        padded = min(-(-n // PADDED_TO) * PADDED_TO, seq_len)
        by_length.setdefault(padded, []).append((start, n))
        start += n
    shapes, gather, padding = [], [], []
    for padded, docs in sorted(by_length.items()):
        shapes.append((len(docs), padded))
        starts, ns = torch.tensor(docs).T
        slot = torch.arange(padded)
        pad = slot >= ns[:, None]
        gather.append((starts[:, None] + slot).masked_fill_(pad, 0).flatten())
        padding.append(pad.flatten())
    gather, padding = torch.cat(gather), torch.cat(padding)
    scatter = torch.empty(start, dtype=torch.int64)
    scatter[gather[~padding]] = (~padding).nonzero().squeeze(1)
    return Buckets(shapes, *to_device(device, gather, padding, scatter))


class _Rearrange(torch.autograd.Function):
    """Copy tokens between stream and buckets. Apart from padding they are inverse permutations, so
    each backward is the other's forward: a plain gather, where indexing would accumulate."""

    @staticmethod
    def forward(ctx, x, buckets, into_buckets):
        ctx.buckets, ctx.into_buckets = buckets, into_buckets
        return _Rearrange.move(x, buckets, into_buckets)

    @staticmethod
    def backward(ctx, grad):
        return _Rearrange.move(grad, ctx.buckets, not ctx.into_buckets), None, None

    @staticmethod
    def move(x, buckets, into_buckets):
        if not into_buckets:
            return x.index_select(0, buckets.scatter)
        # Padding must be zeros, not another document's tokens: 0 * NaN is NaN even when masked.
        rows = x.index_select(0, buckets.gather)
        padding = buckets.padding.view(-1, *[1] * (x.ndim - 1))
        if torch.compiler.is_compiling():  # in place, PyTorch 2.11's compiler drops the gradient
            return rows.masked_fill(padding, 0)
        return rows.masked_fill_(padding, 0)


FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,  # 0.90 ms per layer, flash 1.36 ms (H200, 16 rows of 1,024)
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def _causal(q, k, v, scaling: float, window: int | None = None):
    """SDPA of the last n tokens of rows, q [B, H, n, D], with all of them, k [B, KV, S, D], v [B,
    KV, S, E] -> [B, n, H, E]. n is S unless a window is shorter than the row."""
    groups, mask = q.shape[1] // k.shape[1], None
    if window is not None and window < k.shape[2]:
        mask = _band(queries=q.shape[2], keys=k.shape[2], window=window, device=q.device)
    plain = q.dtype != torch.float32 and mask is None and q.shape[-1] <= WIDEST
    if groups > 1 and q.is_cuda and not plain:
        # the only fused kernel for fp32, a mask or wide heads has no GQA: without this, math would
        # store all scores
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=groups > 1
    )
    return out.transpose(1, 2)


def _band(queries: int, keys: int, window: int, device) -> torch.Tensor:
    """Which of so many keys each of the last tokens, the queries, attends to: bool [queries,
    keys]."""
    before = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return mask.tril(before).triu(before - window + 1)


def _whole_rows(q, k, v, scaling: float, window: int | None):
    """Causal SDPA of rows, q [B, H, S, D], k [B, KV, S, D], v [B, KV, S, E] -> [B, S, H, E]. Rows
    longer than the window are cut into blocks of at least so many tokens, so that scores and masks
    grow with S, not with its square."""
    S = q.shape[2]
    if window is None or S <= window:
        return _causal(q, k, v, scaling=scaling)
    banded = functools.partial(_causal, scaling=scaling, window=window)
    block = -(-window // PADDED_TO) * PADDED_TO
    n, rest = divmod(S, block)
    parts = [banded(q[:, :, :block], k[:, :, :block], v[:, :, :block])]
    if n > 1:  # all others that are whole at once, each with the keys of the one before it
        blocks = (x[:, :, : n * block].unflatten(2, (n, block)) for x in (q, k, v))
        queries, *others = (x.transpose(1, 2) for x in blocks)  # [B, n, heads, block, width]
        keys, values = (torch.cat([x[:, :-1], x[:, 1:]], 3).flatten(0, 1) for x in others)
        found = banded(queries[:, 1:].flatten(0, 1), keys, values)
        parts.append(found.unflatten(0, (-1, n - 1)).flatten(1, 2))
    if n and rest:
        start = S - rest - block
        parts.append(banded(q[:, :, S - rest :], k[:, :, start:], v[:, :, start:]))
    return torch.cat(parts, 1)


def _sdpa(q, k, v, documents: Documents, scaling: float, window: int | None = None):
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return _whole_rows(q, k, v, scaling=scaling, window=window)


def _bucketed(q, k, v, documents: Documents, scaling: float, window: int | None = None):
    def causal(*rows):
        q, k, v = (x.transpose(1, 2) for x in rows)
        return _whole_rows(q, k, v, scaling=scaling, window=window)

    return documents.by_bucket(causal, *(x.transpose(1, 2) for x in (q, k, v)))


def _bucketed_math(q, k, v, documents, scaling, window=None):
    with sdpa_kernel(SDPBackend.MATH):
        return _bucketed(q, k, v, documents, scaling=scaling, window=window)


def _math(q, k, v, documents, scaling, window=None):
    gqa, mask, S = q.shape[1] != k.shape[1], documents.mask, q.shape[2]
    if window is not None:
        mask = mask & _band(queries=S, keys=S, window=window, device=q.device)
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2)


def of_stream(backend):
    """Wrap a backend that takes all tokens in a row, q [B*S, H, D], and needs queries, keys and
    values of one width. Narrower ones are padded with zeros, which change no score and are cut from
    the output."""

    @functools.wraps(backend)
    def padded(q, k, v, documents, scaling, window=None):
        (B, _, S, D), E = q.shape, v.shape[-1]
        lacks = {D: max(0, E - D), E: max(0, D - E)}  # padding by 0 would copy
        lengthened = []
        for x in (q, k, v):
            n = lacks[x.shape[-1]]
            lengthened.append(F.pad(x, (0, n)) if n else x)
        q, k, v = lengthened
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out = backend(q, k, v, documents, scaling=scaling, window=window).unflatten(0, (B, S))
        return out[..., :E] if E < D else out

    return padded


@of_stream
def _varlen(q, k, v, documents, scaling, window):
    call, groups, scales = _torch_varlen()
    _, H, D = q.shape
    if not groups and H != k.shape[1]:
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    if not scales and scaling != D**-0.5:
        q = q * (scaling * D**0.5)
    cu, n = documents.cu_seqlens, documents.max_len
    extra = {"scale": scaling} if scales else {}
    if groups == "flag":
        extra["enable_gqa"] = H != k.shape[1]
    if window is not None:
        extra["window_size"] = window - 1, 0
    return call(q, k, v, cu, cu, n, n, **extra)


@functools.cache
def _torch_varlen():
    """(causal varlen_attn, how it groups heads, whether it takes a scale) in this PyTorch.

    The signature changed with each release: is_causal became window_size, enable_gqa came later."""
    from torch.nn.attention.varlen import varlen_attn

    has = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in has else {"is_causal": True}
    groups = "flag" if "enable_gqa" in has else "window_size" in has
    return functools.partial(varlen_attn, **causal), groups, "scale" in has


def varlen_has_windows() -> bool:
    """Whether this PyTorch's varlen_attn takes one."""
    return "window_size" in _torch_varlen()[0].keywords


@of_stream
def _varlen_cudnn(q, k, v, documents, scaling, window):
    # an operator of options/long_documents.py, which whoever chooses this backend imports
    on_host, long = documents.boundaries.tensor, documents.long
    out, _ = torch.ops.llm_demo.attend_documents(
        q, k, v, documents.cu_seqlens, on_host, long, scaling, window
    )
    return out


@of_stream
def _flash_attn(q, k, v, documents, scaling, window):
    from flash_attn import flash_attn_varlen_func

    cu, n = documents.cu_seqlens, documents.max_len
    band = (-1 if window is None else window - 1), 0  # keys to the left and right of a query's own
    return flash_attn_varlen_func(
        q, k, v, cu, cu, n, n, softmax_scale=scaling, causal=True, window_size=band
    )


@of_stream
def _efficient(q, k, v, documents, scaling, window):
    # an operator of options/wide_heads.py, which whoever chooses this backend imports
    cu, on_host = documents.cu_seqlens, documents.boundaries.tensor
    out, _ = torch.ops.llm_demo.attend_wide(q, k, v, cu, on_host, scaling, window)
    return out


BACKENDS = {
    "sdpa": _sdpa,
    "varlen_cudnn": _varlen_cudnn,
    "varlen": _varlen,
    "flash_attn": _flash_attn,
    "efficient": _efficient,
    "bucketed": _bucketed,
    "bucketed_math": _bucketed_math,
    "math": _math,
}
IMPLS = tuple(BACKENDS)


def attend(impl: str, module, q, k, v, attention_mask, *, scaling, documents=None, **kwargs):
    """Attention with Hugging Face's signature: q [B, H, S, D], k [B, KV, S, D], v [B, KV, S, E]
    -> [B, S, H, E]. All backends are exact if E is not D.

    Raises UserError for model features not supported here, which would otherwise train wrongly."""
    if documents is None:
        raise ValueError("pass documents=make_documents(...) to the model")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(f"this model's attention uses {name}, which is not supported")
    if kwargs.get("dropout"):
        raise UserError("attention_dropout above 0 is not supported: set it to 0 in config.json")
    # Qwen2-MoE's attention has the window only as an attribute
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    if window is not None and documents.max_len <= window:
        window = None
    narrow, _, wide = impl.partition("+")
    backend = BACKENDS[wide if wide and q.shape[-1] > WIDEST else narrow]
    return backend(q, k, v, documents, scaling=scaling, window=window), None


# ---------------------------------------------------------------- rotary embeddings


def rope_of(config) -> dict:
    """The rotary parameters; of full attention, if layers with sliding windows have others."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def rope_type(config) -> str:
    return rope_of(config).get("rope_type", "default")


class LongRope(nn.Module):
    """Rotary embedding of type longrope, with frequencies by each document's own length.

    transformers picks one set for a whole batch. Its other length-dependent type, dynamic, needs no
    such class: its frequencies are constant up to the model's max_position_embeddings."""

    def __init__(self, config):
        # here, so that a probe of attention need not import transformers
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        super().__init__()
        self.part = WHOLE_ROWS  # of each row, that this rank holds
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
        slots = torch.arange(B * S * self.part.count, device=cu_seqlens.device)
        lengths = cu_seqlens.diff()[document_of(slots, cu_seqlens)]  # of each token's document
        lengths = self.part.of_rows(lengths.view(B, -1))
        is_long = (lengths > self.short_up_to)[..., None]
        angles = position_ids[..., None].float() * torch.where(is_long, self.long, self.short)
        angles = torch.cat((angles, angles), dim=-1)
        return tuple((f(angles) * self.scaling).to(hidden.dtype) for f in (torch.cos, torch.sin))


def rotary_tables(rotary: nn.Module, hidden, position_ids, documents) -> tuple | dict:
    """(cos, sin) for packed documents, or {type of layer: these}."""
    if kinds := getattr(rotary, "layer_types", None):
        return {kind: rotary(hidden, position_ids, kind) for kind in kinds}
    if isinstance(rotary, LongRope):
        return rotary(hidden, position_ids, documents.cu_seqlens)
    if hasattr(rotary, "mrope_section"):  # a place in time, height and width: equal for text
        position_ids = position_ids.expand(3, -1, -1)
    return rotary(hidden, position_ids)
