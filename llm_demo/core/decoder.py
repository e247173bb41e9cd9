"""A Hugging Face decoder built block by block, so that no process holds more than it keeps."""

import contextlib
import copy
from functools import partial

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from llm_demo.core import attention
from llm_demo.core.errors import UserError
from llm_demo.core.experts import Routers, blocks_with_experts
from llm_demo.core.loss import cross_entropy_sum, next_tokens, score
from llm_demo.core.rotary import LongRope, rope_type, rotary_tables

for _impl in attention.IMPLS:
    AttentionInterface.register(f"packed_{_impl}", partial(attention.attend, _impl))


def skeleton(config, attn_impl: str, weights=None, product: str = "looped") -> PreTrainedModel:
    """The decoder with fp32 parameters on the meta device and real buffers (rotary frequencies).
    `materialise` gives parts of it their weights.

    weights: their source, with `check` and `read` as weights_files.Weights. Raises UserError naming
    a tensor that is missing there, has another shape, or is not in the model. product: of experts,
    see experts.PRODUCTS."""
    with init_empty_weights(include_buffers=False), no_init_weights():
        # a copy, in which the model notes its kernels
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=f"packed_{attn_impl}"
        )
    if rope_type(config) == "longrope":
        model.model.rotary_emb = LongRope(config)
    model.float()
    model.config._experts_implementation = f"sorted_{product}"
    if model.lm_head.bias is not None:
        raise UserError("a head with a bias is not supported")
    if config.tie_word_embeddings:  # meta parameters are created untied
        model.lm_head.weight = model.model.embed_tokens.weight
    if weights:
        wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        weights.check(wanted, {"lm_head.weight"} if config.tie_word_embeddings else set())
    return model.train()


CHOICE = torch.ops.aten.topk.default  # of a token's experts


class Blocks(nn.Module):
    """Consecutive decoder blocks, compiled, sharded or sent to a stage as one unit.

    Several blocks of 16M parameters make a better unit than one: at small batches the host,
    launching kernels and running hooks, is slower than the GPU. checkpointing: recompute each
    block's activations in the backward, except what the operators `kept` return."""

    def __init__(self, blocks: list[nn.Module], checkpointing: bool, kept: list | None = None):
        super().__init__()
        self.blocks, self.checkpointing = nn.ModuleList(blocks), checkpointing
        self.kept = kept or []
        self.dropout = any(getattr(m, "dropout", 0) for m in self.modules())  # only of adapters

    def forward(self, hidden, position_embeddings, position_ids, documents):
        """hidden [B, S, d] -> the same shape. position_embeddings: rotary (cos, sin)."""
        inputs = {
            "position_embeddings": position_embeddings,
            "position_ids": position_ids,
            "documents": documents,
            "use_cache": False,
        }
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                options = {"use_reentrant": False, "preserve_rng_state": self.dropout}
                kept = self.kept
                if hasattr(block.mlp, "experts"):  # the same experts again, even if two are equal
                    kept = [*kept, CHOICE]
                if kept:
                    options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
                hidden = checkpoint(block, hidden, **options, **inputs)
            else:
                hidden = block(hidden, **inputs)
        return hidden


def make_units(
    lm, sizes: list[int], checkpointing: bool, keeping: int = 0, kept: list | None = None
) -> list[Blocks]:
    """The decoder's blocks in units, each compiled and sharded as one. sizes: blocks of each unit.
    keeping: so many of the last blocks, if recomputed, keep what the operators `kept` return."""
    units, i = [], 0
    for size in sizes:
        of_unit = kept if i >= sum(sizes) - keeping else []
        units.append(Blocks(list(lm.model.layers[i : i + size]), checkpointing, of_unit))
        i += size
    return units


class Tail(nn.Module):
    """Last norm, head and loss: one module, because the head's weight is gathered only in the
    forward of the module that it is sharded with."""

    def __init__(
        self, norm: nn.Module, lm_head: nn.Module, compiled: bool, slim: bool, in_place: bool
    ):
        super().__init__()
        self.norm, self.lm_head, self.compiled = norm, lm_head, compiled
        self.slim, self.in_place = slim, in_place
        self.group = None  # of ranks with slices of the same rows

    def forward(self, hidden, index, targets=None, answers=None):
        hidden, weight = self.norm(hidden), self.lm_head.weight
        if targets is None:
            return next_tokens(hidden, weight, index)
        if answers is not None:
            return score(hidden, weight, index, targets, answers, self.compiled, self.group)
        return cross_entropy_sum(
            hidden,
            weight,
            index,
            targets,
            compiled=self.compiled,
            slim=self.slim,
            in_place=self.in_place,
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
        in_place = slim and not any(unit.checkpointing for unit in units)
        self.tail = None
        if last:
            self.tail = Tail(lm.model.norm, lm.lm_head, compiled, slim=slim, in_place=in_place)
        self.rotary = lm.model.rotary_emb
        self.on_host = None  # or where inputs of units are kept, see activations_on_host.py
        with_experts = blocks_with_experts(self)
        self.routers = Routers(with_experts) if with_experts else None

    def in_fp32(self) -> set[nn.Parameter]:
        """The parameters that stay in fp32 in every compute dtype."""
        return set(self.routers.parameters()) if self.routers else set()

    def forward(self, inputs, position_ids, documents, index, targets=None, answers=None):
        """The loss sum over flat positions `index` with `targets` [n]; with `answers` [n], the
        result of loss.score; without targets, the most likely next tokens. inputs: token ids, int64
        [B, S] as position_ids. A piece takes and returns hidden states [B, S, d] instead where it
        lacks the embedding or the loss."""
        if self.routers:
            self.routers()
        hidden = self.embed_tokens(inputs) if self.embed_tokens else inputs
        rotary = rotary_tables(self.rotary, hidden, position_ids, documents)
        for i, unit in enumerate(self.units):
            with self.on_host.of_unit(i, hidden) if self.on_host else contextlib.nullcontext():
                hidden = unit(hidden, rotary, position_ids, documents)
        return self.tail(hidden, index, targets, answers) if self.tail else hidden


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
