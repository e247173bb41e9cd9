"""DeepSpeed's pipeline engine: its switches, the layers of a decoder that its stages hold, forwards
for evaluation."""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from llm_demo.core.attention import make_documents, rotary_tables
from llm_demo.core.decoder import Blocks, compile_forward
from llm_demo.core.errors import UserError
from llm_demo.core.loss import cross_entropy_sum, next_tokens, score
from llm_demo.core.rows import position_ids
from llm_demo.flags.args import Args
from pp import deepspeed_base
from pp.deepspeed_base import quiet
from pp.ds_patches import need, patch_pipeline

# isort: split
import deepspeed  # now that its version is checked
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine

# Switches allowed in --deepspeed_config.
PIPELINE_SWITCHES = {
    "zero_allow_untested_optimizer": bool,
    "prescale_gradients": bool,
    "memory_breakdown": bool,
    "steps_per_print": int,
}
PIPELINE_ZERO = {
    "stage",
    "reduce_scatter",
    "reduce_bucket_size",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
}
# Not round_robin_gradients: with replicas, checkpoints in fp32 would hold wrong values.


class PipelineLayers(PipelineModule):
    """1F1B: one piece per stage. PipelineModule cut at the layer numbers `bounds`, one more than
    there are pieces. DeepSpeed chooses the order of work from the module's class: PipelineModule
    gives 1F1B, DualPipeVModule DualPipeV."""

    def __init__(self, layers, bounds: list[int], stages: int, **kwargs):
        object.__setattr__(self, "_bounds", bounds)  # nn.Module isn't initialised yet
        need(vars(PipelineModule), "_partition_layers")
        with quiet(), torch.no_grad():  # else broadcasting a tied weight warns of its gradient
            super().__init__(layers, num_stages=stages, **kwargs)

    def _partition_layers(self, method=None):
        self.parts = self._bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(self.parts[stage], self.parts[stage + 1])


class PipelineLayersV(DualPipeVModule, PipelineLayers):
    """DualPipeV: two pieces per stage, out and back; the first stage has both ends."""


def pipeline_switches(path: str) -> dict:
    """The user's engine switches. Raises UserError for those that train wrongly."""
    switches = deepspeed_base.allowed_switches(path, PIPELINE_SWITCHES, PIPELINE_ZERO)
    stage = switches.get("zero_optimization", {}).get("stage", 1)
    if stage != 1:
        # 0 clips by the first stage's norm and never scales fp16's loss; 2 and 3 can't pipeline.
        raise UserError(f"{path}: ZeRO stage {stage} trains wrongly in a pipeline; only 1 is exact")
    return switches


def pipeline_config(switches: dict, args: Args, dtype: torch.dtype) -> dict:
    """The engine's configuration: the switches plus what the flags own."""
    config = deepspeed_base.shared_config(switches, args, dtype)
    config.setdefault("zero_optimization", {})["stage"] = 1
    return config


def pipeline_engine(
    module: PipelineLayers, optimizer: torch.optim.Optimizer, config: dict, compiled: bool
) -> PipelineEngine:
    """deepspeed.initialize, with the patches. compiled: compile bf16's sums too."""
    with quiet():
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    patch_pipeline(engine, compiled)
    return engine


def forward_only(
    engine: PipelineEngine, batches: Iterator, count: int, fn: Callable, reshape: bool = False
) -> list[torch.Tensor] | None:
    """fn(outputs, labels) of `count` micro-batches without gradients; None except on the last
    stage. reshape: their size differs from training's.

    eval_batch's own reduction is a mean of means. It adds fn's results to a sum that it never
    resets, so shapes must match the last call's; we reset it. DualPipeV finds its buffers by the
    number of micro-batches in training, not in this call."""
    module, engine.total_loss = engine.module, None
    loss_fn, module.loss_fn = module.loss_fn, fn
    if reshape:  # stages exchange sizes only once
        engine.reset_activation_shape()
    micro_batches, engine.micro_batches = engine.micro_batches, count
    out = engine.eval_batch(batches, reduce_output=None, bcast_loss=False, num_micro_batches=count)
    module.loss_fn, engine.micro_batches = loss_fn, micro_batches
    if reshape:
        engine.reset_activation_shape()
    module.train()
    return out


def tied_copies_differ(engine: PipelineEngine) -> bool:
    """Whether the stages' copies of the tied weight differ anywhere. Collective."""
    differ = torch.zeros(1, device=engine.device)
    for weight, group in engine.module.get_tied_weights_and_groups():
        first = weight.detach().clone()
        dist.broadcast(first, src=min(dist.get_process_group_ranks(group)), group=group)
        differ += (first != weight).any()
    dist.all_reduce(differ)
    return bool(differ.item())


# ---------------------------------------------------------------- the decoder as DeepSpeed's layers


class BlockInputs:
    """What a stage's blocks need of a micro-batch besides hidden states, made once per stage.

    A stage knows the rows of each step, so only hidden states are sent: one message per micro-batch
    and direction. Not an nn.Module, so DeepSpeed's cast to bf16 or fp16 spares the rotary
    frequencies."""

    def __init__(self, rotary: nn.Module, attn_impl: str, device: torch.device):
        self.rotary, self.attn_impl, self.device = rotary.to(device), attn_impl, device

    def follow(self, boundaries: Iterator[torch.Tensor]) -> None:
        """Take cu_seqlens of the coming micro-batches from `boundaries`, in forward order."""
        self.boundaries = boundaries

    def advance(self, hidden: torch.Tensor) -> tuple:
        """(rotary tables, positions, documents) of the next micro-batch, for all blocks here."""
        cu_seqlens, shape = next(self.boundaries), tuple(hidden.shape[:2])
        documents = make_documents(cu_seqlens, shape, self.attn_impl, self.device)
        positions = position_ids(documents.cu_seqlens, shape)
        tables = rotary_tables(self.rotary, hidden, positions, documents)
        self.made = tables, positions, documents
        return self.made


class Layer(nn.Module):
    """The embedding, input_ids [B, S] -> hidden [B, S, d], or the last norm."""

    def __init__(self, make: Callable, name: str):
        super().__init__()
        self.layer = make(name)

    def forward(self, x):
        return self.layer(x)


class Head(Layer):
    """hidden -> (hidden, the head's weight): the loss forms logits in chunks, never all at once."""

    def forward(self, hidden):
        return hidden, self.layer.weight


class UnitLayer(nn.Module):
    """`size` decoder blocks from block `at` on. leads: it is the first unit of its stage. budget:
    activation memory budget if compiled, else None."""

    def __init__(
        self,
        make: Callable,
        at: int,
        size: int,
        inputs: BlockInputs,
        leads: bool,
        checkpointing: bool,
        budget: float | None,
    ):
        super().__init__()
        self.inputs, self.leads = inputs, leads
        self.blocks = Blocks([make(f"model.layers.{at + k}") for k in range(size)], checkpointing)
        if budget is not None:
            compile_forward(self.blocks, budget)

    def forward(self, hidden):
        inputs = self.inputs.advance(hidden) if self.leads else self.inputs.made
        return self.blocks(hidden, *inputs)


def layer_specs(
    config,
    make: Callable,
    sizes: list[list[int]],
    inputs: list[BlockInputs],
    checkpointing: bool,
    budget: float | None,
) -> tuple[list, list[int]]:
    """(layers, their bounds): embedding, units of blocks, norm and head, cut into pieces.

    make(name) materialises a submodule, only on its own stage. sizes: blocks of each unit of each
    piece. budget: activation memory budget, None if uncompiled. Tied embeddings are one
    TiedLayerSpec at both ends: both stages keep a copy, whose gradients ds_patches.py sums before
    the step."""
    layers, bounds, at = [], [0], 0
    for block_inputs, units in zip(inputs, sizes, strict=True):
        for k, size in enumerate(units):
            unit = LayerSpec(
                UnitLayer,
                make,
                at,
                size,
                inputs=block_inputs,
                leads=k == 0,
                checkpointing=checkpointing,
                budget=budget,
            )
            layers.append(unit)
            at += size
        bounds.append(1 + len(layers))
    bounds[-1] += 2
    embedding = "model.embed_tokens"
    layers.append(LayerSpec(Layer, make, "model.norm"))
    if not config.tie_word_embeddings:
        first, last = LayerSpec(Layer, make, embedding), LayerSpec(Head, make, "lm_head")
        return [first, *layers, last], bounds
    tied = functools.partial(
        TiedLayerSpec, "tied", Layer, make, embedding, tied_weight_attr="layer.weight"
    )
    return [tied(), *layers, tied(forward_fn=Head.forward)], bounds


def loss_fn(outputs, labels, compiled: bool = False, cap: float | None = None):
    """(hidden, weight), (index, targets, factor) -> the micro-batch's share of the step's loss."""
    (hidden, weight), (index, targets, factor) = outputs, labels
    loss = cross_entropy_sum(hidden, weight, index, targets, compiled=compiled, cap=cap)
    return loss * factor


def score_fn(outputs, labels, compiled: bool = False, cap: float | None = None):
    """(hidden, weight), (index, targets, answers) -> loss.score of the micro-batch, fp32 [2]."""
    (hidden, weight), (index, targets, answers) = outputs, labels
    return score(hidden, weight, index, targets, answers, compiled=compiled, cap=cap)


def ask_fn(outputs, labels):
    """The most likely next tokens at the same positions; replaces loss_fn for generation."""
    hidden, weight = outputs
    return next_tokens(hidden, weight, labels[0])
