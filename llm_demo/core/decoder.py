"""Builds a Hugging Face decoder, and loads or initialises it block by block, so that no process
holds more than it keeps."""

import contextlib
import copy
import itertools
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from llm_demo.core import attention
from llm_demo.core.attention import LongRope, make_documents, rope_type, rotary_tables
from llm_demo.core.errors import UserError
from llm_demo.core.loss import cross_entropy_sum, next_tokens, score
from llm_demo.core.mesh import exchange_rows, known
from llm_demo.core.rows import WHOLE_ROWS, Batch, Slice, to_device

# matrices of experts in memory, and those of files that they are made of
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
DECAYS = (".A_log", ".dt_bias")  # ends of names of parameters, see options/delta.py


class Decays(nn.Module):
    """The layers with a delta rule, as a unit of the weights that their decay depends on. These are
    fp32 in every compute dtype. The layers also stay in their blocks. Used like Routers."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)  # FSDP2 shards no plain list

    def forward(self) -> None:
        pass


def delta_layers(model: nn.Module) -> list[nn.Module]:
    """The layers with a delta rule (linear attention) among a model's modules, in their order."""
    return [m for m in model.modules() if hasattr(m, "A_log")]


def skeleton(config, attn_impl: str, weights=None, product: str = "looped") -> PreTrainedModel:
    """The decoder with fp32 parameters on the meta device and real buffers (rotary frequencies).
    `materialise` gives parts of it their weights.

    weights: their source, with `check` and `read` as weights_files.Weights. Raises UserError naming
    a tensor that is missing there, has another shape, or is not in the model. product: of experts,
    see experts.PRODUCTS."""
    own = copy.deepcopy(config)  # in which the model notes its kernels
    own._experts_implementation = "eager"  # ours are known once they are imported
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = AutoModelForCausalLM.from_config(own, attn_implementation=f"packed_{attn_impl}")
    if rope_type(config) == "longrope":
        model.model.rotary_emb = LongRope(config)
    # Granite scales outside of its modules, which alone are run here
    if hasattr(model.model, "embedding_multiplier"):
        first, last = model.model.embedding_multiplier, model.config.logits_scaling
        model.model.embed_tokens.register_forward_hook(lambda module, args, out: out * first)
        model.model.norm.register_forward_hook(lambda module, args, out: out / last)
        model.model.embedding_multiplier = model.config.logits_scaling = 1.0
    if hasattr(model.model.rotary_emb, "layer_types"):
        for i, block in enumerate(model.model.layers):
            block.kind = config.layer_types[i]
    for module in model.modules():  # Gemma 4's attention, as in transformers 5.17
        if hasattr(module, "store_full_length_kv"):
            module.store_full_length_kv = False  # no block takes another's keys and values
    for block in blocks_with_experts(model):
        if hasattr(block, "router"):  # which has these in its configuration alone
            router, own = block.router, block.router.config
            router.num_experts, router.top_k = own.num_experts, own.top_k_experts
    model.float()
    model.config._experts_implementation = f"sorted_{product}"
    if model.lm_head.bias is not None:
        raise UserError("a head with a bias is not supported")
    model.lm_head.logits_soft_cap = soft_cap(config)
    if config.tie_word_embeddings:  # meta parameters are created untied
        model.lm_head.weight = model.model.embed_tokens.weight
    if weights:
        wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        weights.check(wanted, {"lm_head.weight"} if config.tie_word_embeddings else set())
    return model.train()


def soft_cap(config) -> float | None:
    """The soft cap of a model's logits, if it has one. A model reads only keys that its class of
    configuration has."""
    if not hasattr(type(config), "final_logit_softcapping"):
        return None
    return config.final_logit_softcapping


CHOICE = torch.ops.aten.topk.default  # of a token's experts
OWN_AUTOGRAD = ("recipe", "cut")  # attributes of modules that run autograd functions of their own


class Blocks(nn.Module):
    """Consecutive decoder blocks, compiled, sharded or sent to a stage as one unit.

    Several blocks of 16M parameters make a better unit than one: at small batches the host,
    launching kernels and running hooks, is slower than the GPU. checkpointing: recompute each
    block's activations in the backward, except what the operators `kept` return."""

    def __init__(self, blocks: list[nn.Module], checkpointing: bool, kept: list | None = None):
        super().__init__()
        self.blocks, self.checkpointing = nn.ModuleList(blocks), checkpointing
        self.kept = kept or []
        for layer in self.modules():
            if hasattr(layer, "recomputed"):  # one with an adapter
                layer.recomputed = checkpointing
        self.dropout = any(getattr(m, "dropout", 0) for m in self.modules())  # only of adapters
        # PyTorch 2.11 keeps what these modules' autograd functions return in compiled blocks,
        # unless it has a list of the operators whose results it shall keep
        self.list_results_to_keep = any(
            getattr(module, name, None) for module in self.modules() for name in OWN_AUTOGRAD
        )

    def forward(self, hidden, position_embeddings, position_ids, documents):
        """hidden [B, S, d] -> the same shape. position_embeddings: of rotary_tables."""
        inputs = {
            "position_embeddings": position_embeddings,
            "position_ids": position_ids,
            "documents": documents,
            "use_cache": False,
        }
        for block in self.blocks:
            if isinstance(position_embeddings, dict):
                inputs["position_embeddings"] = position_embeddings[block.kind]
            if self.checkpointing and torch.is_grad_enabled():
                # the same experts again, even if two are equal
                kept = list(self.kept)
                if experts_in(block) is not None:
                    kept.append(CHOICE)
                hidden = recomputed(
                    block, hidden, self.list_results_to_keep, self.dropout, kept, **inputs
                )
            else:
                hidden = block(hidden, **inputs)
        return hidden


def recomputed(
    part: Callable, hidden, list_results_to_keep: bool, dropout: bool, kept=(), **inputs
):
    """Run a part whose activations the backward recomputes.

    list_results_to_keep, dropout, kept: as of Blocks."""
    if list_results_to_keep and torch.compiler.is_compiling():
        kept = [*kept, CHOICE]
    options = {"use_reentrant": False, "preserve_rng_state": dropout}
    if kept:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(part, hidden, **options, **inputs)


def make_units(
    layers: Sequence[nn.Module],
    sizes: list[int],
    checkpointing: bool,
    budget: float | None = None,
    keeping: int = 0,
    kept: list | None = None,
) -> list[Blocks]:
    """A decoder's blocks in units, each compiled and sharded as one. sizes: blocks of each unit.
    budget: --activation_memory_budget if they are compiled. keeping: so many of the last blocks, if
    recomputed, keep what the operators `kept` return."""
    units, i = [], 0
    for size in sizes:
        of_unit = kept if i >= sum(sizes) - keeping else []
        units.append(Blocks(list(layers[i : i + size]), checkpointing, of_unit))
        i += size
        if budget is not None:
            compile_forward(units[-1], budget)
    return units


class Tail(nn.Module):
    """Last norm, head and loss: one module, because the head's weight is gathered only in the
    forward of the module that it is sharded with."""

    def __init__(
        self, norm: nn.Module, lm_head: nn.Module, compiled: bool, slim: bool, in_place: bool
    ):
        """compiled, slim, in_place: as of cross_entropy_sum."""
        super().__init__()
        self.norm, self.lm_head = norm, lm_head
        self.compiled, self.slim, self.in_place = compiled, slim, in_place
        self.group = None  # of ranks with slices of the same rows

    def forward(self, hidden, index, targets=None, answers=None):
        hidden, weight = self.norm(hidden), self.lm_head.weight
        cap = getattr(self.lm_head, "logits_soft_cap", None)  # a plain model has no such attribute
        if targets is None:
            return next_tokens(hidden, weight, index)
        if answers is not None:
            return score(
                hidden,
                weight,
                index,
                targets,
                answers,
                compiled=self.compiled,
                group=self.group,
                cap=cap,
            )
        return cross_entropy_sum(
            hidden,
            weight,
            index,
            targets,
            compiled=self.compiled,
            slim=self.slim,
            in_place=self.in_place,
            cap=cap,
        )


class DecoderLoss(nn.Module):
    """The whole decoder, with its blocks in units and the loss inside its forward; or a piece of
    it, with the embedding if it is the first and the loss if it is the last. slim: less
    memory at the loss, where it is largest unless activations are recomputed."""

    def __init__(
        self,
        lm: PreTrainedModel,
        units: list[Blocks],
        compiled: bool = False,
        slim: bool = False,
        first: bool = True,
        last: bool = True,
    ):
        super().__init__()
        self.embed_tokens = lm.model.embed_tokens if first else None
        self.units = nn.ModuleList(units)
        self.tail = None
        if last:
            in_place = slim and not any(unit.checkpointing for unit in units)
            self.tail = Tail(lm.model.norm, lm.lm_head, compiled, slim=slim, in_place=in_place)
        self.rotary = lm.model.rotary_emb
        self.on_host = None  # or where inputs of units are kept, see activations_on_host.py
        self.embed_on_host = None  # or what embeds tokens in host memory, before the forward
        with_experts, with_rule = blocks_with_experts(self), delta_layers(self)
        self.routers = None
        if with_experts:
            from llm_demo.core.experts import Routers

            self.routers = Routers(with_experts, [router_in(block) for block in with_experts])
        self.decays = Decays(with_rule) if with_rule else None

    def forward(self, inputs, position_ids, documents, index, targets=None, answers=None):
        """The loss sum over flat positions `index` with `targets` [n]; with `answers` [n], the
        result of loss.score; without targets, the most likely next tokens. inputs: token ids, int64
        [B, S] as position_ids. A piece takes and returns hidden states [B, S, d] instead where it
        lacks the embedding or the loss."""
        for of_many in filter(None, (self.routers, self.decays)):
            of_many()
        hidden = self.embed_tokens(inputs) if self.embed_tokens else inputs
        rotary = rotary_tables(self.rotary, hidden, position_ids, documents)
        for i, unit in enumerate(self.units):
            with self.on_host.of_unit(i, hidden) if self.on_host else contextlib.nullcontext():
                hidden = unit(hidden, rotary, position_ids, documents)
        return self.tail(hidden, index, targets, answers) if self.tail else hidden


def inputs_of(
    batch: Batch,
    index: torch.Tensor,
    targets: torch.Tensor | None = None,
    answers: torch.Tensor | None = None,
    *,
    attn_impl: str,
    device: torch.device,
    part: Slice = WHOLE_ROWS,
    whole_positions: bool = False,
    embed: Callable | None = None,
) -> list:
    """The arguments of DecoderLoss.forward for a rank's slice of the rows, on its device. index,
    targets, answers: of whole rows. whole_positions: attention is given whole rows. embed: makes
    hidden states of token ids, on the host."""
    shape = tuple(batch.input_ids.shape)
    documents = make_documents(batch.cu_seqlens, shape, attn_impl, device)
    positions = batch.position_ids if whole_positions else part.of_rows(batch.position_ids)
    if part.count > 1:
        here, index = part.of_positions(index, shape[1])
        targets, answers = (x if x is None else x[here] for x in (targets, answers))
    inputs = part.of_rows(batch.input_ids)
    if embed:
        inputs = embed(inputs)
    inputs, positions = to_device(device, inputs, positions)
    return [inputs, positions, documents, *to_device(device, index, targets, answers)]


def spread_rows(model: PreTrainedModel, group: ProcessGroup) -> None:
    """Make a model take slices of rows: slice i on the group's rank i, with the documents of whole
    rows.

    All of a decoder except attention works on single tokens. For attention, the slices of a group
    become whole rows of a share of the heads, and slices again afterwards, so that a backend sees
    every document whole. Source: "DeepSpeed Ulysses" (Jacobs et al. 2023)."""
    config = model.config
    config._attn_implementation = config._attn_implementation.replace("packed", "spread")
    for block in model.model.layers:
        block.self_attn.spread_over = known(group), group.size()
    if isinstance(model.model.rotary_emb, LongRope):
        model.model.rotary_emb.part = Slice(group.rank(), group.size())


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
    out, _ = attention.attend(impl, module, q, k, v, attention_mask, documents=documents, **kwargs)
    out = exchange_rows(out.unflatten(1, (n, -1)).transpose(0, 1), group)  # [n, B, s, h, E]
    return out.permute(1, 2, 0, 3, 4).flatten(2, 3), None


for _impl in (*attention.IMPLS, *map("+".join, itertools.permutations(attention.IMPLS, 2))):
    AttentionInterface.register(f"packed_{_impl}", partial(attention.attend, _impl))
    AttentionInterface.register(f"spread_{_impl}", partial(attend_spread, _impl))

# What `sdpa_kernel` leaves in a graph. PyTorch does not cache graphs with functions that it does
# not know: every run would trace and differentiate its blocks again. The names of the kernels are
# in the graph, so a cached graph is never used for other kernels.
CACHEABLE = {
    f"torch.nn.attention.{name}": str(torch.__version__)
    for name in ("_backend_from_string", "_sdpa_kernel")
}


def compile_forward(module: nn.Module, memory_budget: float = 1.0) -> None:
    """Compile a module's forward but not its hooks: FSDP's hooks stay outside, in order.

    Modules of the same structure share compiled code, so 28 blocks cost one compilation.
    memory_budget: see --activation_memory_budget."""
    # one entry per unit size, with and without gradients, in train and eval mode
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    # the number of a rank's rows (experts.py) is read from the device inside the graph
    torch._dynamo.config.capture_scalar_outputs = True
    torch._functorch.config.activation_memory_budget = memory_budget
    torch._inductor.config.unsafe_marked_cacheable_functions |= CACHEABLE
    # dynamic=False: evaluation with another batch size must not make training shapes symbolic
    module.forward = torch.compile(module.forward, dynamic=False)


def materialise(
    model: PreTrainedModel, name: str, weights, seed: int, device: torch.device
) -> nn.Module:
    """Give the submodule `name` of a skeleton its weights on `device`, and return it."""
    allocate(model.get_submodule(name), device)
    return fill(model, name, weights, seed)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate meta parameters (if sharded, only this rank's shard) and move buffers."""
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


@torch.no_grad()
def fill(
    model: PreTrainedModel, name: str, weights, seed: int, store: Callable | None = None
) -> nn.Module:
    """Set the values of the submodule's parameters (if sharded, this rank's part) and of its
    persistent buffers, and their Hugging Face name, `hf_name`.

    weights: their source, with `read` and `folder` as weights_files.Weights. Without it, values are
    random by the model's own rule; those of adapters, which are in no files, by their `start`. Each
    module is seeded by its name, so any process makes the same block. Random values are rounded to
    bf16, as published weights are, so that runs in every dtype start alike.

    store(parameter, values): sets the values in place of a copy, to keep a master as well."""
    module = model.get_submodule(name)
    for path, owner in module.named_modules(prefix=name):
        random, start = {}, getattr(owner, "start", None)  # only adapters have one
        if weights is None:
            random = _random_weights(model, owner, f"{seed}:{path}")
        if start:
            random |= start(f"{seed}:{path}")
        for key in owner._parameters:
            recipe = getattr(owner, "recipe" if key == "weight" else f"{key}_recipe", None)
            if hasattr(recipe, "stored"):  # values in fewer bits, from elsewhere
                random[key] = recipe.stored()
        for key, p in owner.named_parameters(recurse=False):
            p.hf_name, p.cut = f"{path}.{key}", getattr(owner, "cut", {}).get(key)
            local, part = p, (slice(None),)
            if isinstance(p, DTensor):
                local, chunk = p.to_local(), p.__create_chunk_list__()[0]  # as for a checkpoint
                begins = list(chunk.offsets)
                if p.cut is not None:
                    p.grid = owner.grid
                    begins[p.cut] += p.grid.get_local_rank(0) * p.shape[p.cut]
                spans = zip(begins, chunk.sizes, strict=True)
                part = tuple(slice(at, at + size) for at, size in spans)
            values = random[key][part] if key in random else weights.read(p.hf_name, part)
            if not store:  # move to the device first: copy_ would widen it in host memory
                values = values.to(local.device)
            if key not in random:
                refuse_non_finite(values, weights.folder, p.hf_name)
            if store:
                store(p, values)
            else:
                local.copy_(values)
        for key, buffer in owner.named_buffers(recurse=False):
            if key not in owner._non_persistent_buffers_set:
                buffer.hf_name = f"{path}.{key}"
                owner.path = path  # DeepSpeed makes other buffers in 16 bits
                if weights:
                    buffer.copy_(weights.read(buffer.hf_name))
                    refuse_non_finite(buffer, weights.folder, buffer.hf_name)
    return module


def refuse_non_finite(values: torch.Tensor, folder: Path, name: str) -> None:
    """Raise UserError if a weight has NaN or infinity, which its sum then has too: summing takes a
    hundredth of the time of looking at each."""
    if not values.sum().isfinite() and not values.isfinite().all():
        raise UserError(f"{folder}: {name} is not finite (NaN or infinity): give another copy")


def _random_weights(
    model: PreTrainedModel, module: nn.Module, seed: str
) -> dict[str, torch.Tensor]:
    """Random unsharded values for a module's own parameters, not its submodules'."""
    params = dict(module.named_parameters(recurse=False))
    if not params:
        return {}
    device = next(iter(params.values())).device
    for key, p in params.items():
        shape = list(p.shape)
        if key in getattr(module, "cut", {}):
            shape[module.cut[key]] *= module.grid.size(0)
        module._parameters[key] = nn.Parameter(torch.empty(shape, device=device))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(seed.encode()))
        model._init_weights(module)
    values = {key: module._parameters[key].detach() for key in params}
    for whole in values.values():
        for piece in whole.view(-1).split(1 << 24):  # an embedding's copies may not fit
            piece.copy_(piece.bfloat16())
    module._parameters.update(params)
    return values


def blocks_with_experts(model: nn.Module) -> list[nn.Module]:
    """The decoder blocks with experts among a model's modules, in their order."""
    return [m for m in model.modules() if experts_in(m) is not None]


def experts_in(block: nn.Module) -> nn.Module | None:
    """The experts of a decoder block, if it has any: within its network, or, with a router, beside
    it."""
    if hasattr(block, "router"):
        return getattr(block, "experts", None)
    return getattr(getattr(block, "mlp", None), "experts", None)


def router_in(block: nn.Module) -> nn.Module:
    """The router of a decoder block with experts."""
    return block.router if hasattr(block, "router") else block.mlp.gate


def of_router(name: str) -> bool:
    """Whether a parameter is of a router with layers of its own, which are no layers to adapt or
    to store in fewer bits."""
    return ".router." in name


def kept_in_fp32(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of routers and decays, which stay in fp32 in every compute dtype."""
    kept = {p for n, p in model.named_parameters() if n.endswith(DECAYS)}
    return kept.union(*(router_in(block).parameters() for block in blocks_with_experts(model)))


def fused(name: str) -> bool:
    """Whether a parameter in memory holds a matrix of all experts of a block."""
    experts, _, kind = name.rpartition(".")
    return kind in FUSED and experts.endswith(".experts")
