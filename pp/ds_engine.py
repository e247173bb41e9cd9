"""DeepSpeed's pipeline engine: its switches, the pieces of the model, forwards for evaluation."""

import torch
import torch.distributed as dist

from llm_demo.core.errors import UserError
from pp import deepspeed_base
from pp.deepspeed_base import quiet
from pp.ds_patches import need, patch_pipeline

# isort: split
import deepspeed  # now that its version is checked
from deepspeed.pipe import DualPipeVModule, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine

# Switches allowed in --deepspeed_config.
SWITCHES = {
    "zero_optimization", "zero_allow_untested_optimizer", "prescale_gradients", "comms_logger",
    "steps_per_print", "memory_breakdown",
}  # fmt: skip
ZERO = {
    "stage", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "overlap_comm", "contiguous_gradients",
}  # fmt: skip
# Not round_robin_gradients: with replicas, checkpoints in fp32 would hold wrong values.


class Pipeline(PipelineModule):
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


class PipelineV(DualPipeVModule, Pipeline):
    """DualPipeV: two pieces per stage, out and back; the first stage has both ends."""


def read_switches(path: str) -> dict:
    """The user's engine switches. Raises UserError for those that train wrongly."""
    switches = deepspeed_base.read_switches(path, SWITCHES, ZERO)
    stage = switches.get("zero_optimization", {}).get("stage", 1)
    if stage != 1:
        # 0 clips by the first stage's norm and never scales fp16's loss; 2 and 3 can't pipeline.
        raise UserError(f"{path}: ZeRO stage {stage} trains wrongly in a pipeline; only 1 is exact")
    return switches


def engine_config(switches: dict, dtype: torch.dtype, micro: int, accum: int, clip: float) -> dict:
    """The engine's configuration: the switches plus what the flags own."""
    config = deepspeed_base.engine_config(switches, dtype, micro, accum, clip)
    config.setdefault("zero_optimization", {})["stage"] = 1
    return config


def make_engine(
    module: Pipeline, optimizer: torch.optim.Optimizer, config: dict, compiled: bool
) -> PipelineEngine:
    """deepspeed.initialize, with the patches. compiled: compile bf16's sums too."""
    with quiet():
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    patch_pipeline(engine, compiled)
    return engine


def forward_only(
    engine, batches, count: int, fn, reshape: bool = False
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


def tied_copies_differ(engine) -> bool:
    """Whether the stages' copies of the tied weight differ anywhere. Collective."""
    differ = torch.zeros(1, device=engine.device)
    for weight, group in engine.module.get_tied_weights_and_groups():
        first = weight.detach().clone()
        dist.broadcast(first, src=min(dist.get_process_group_ranks(group)), group=group)
        differ += (first != weight).any()
    dist.all_reduce(differ)
    return bool(differ.item())


def forget_timers(engine) -> None:
    """Reset the batch timer, which gains two events per step and is cleared only by printing."""
    engine.timers("train_batch").reset()
