"""DeepSpeed's pipeline engine, made exact: every workaround this project needs, with its reason.

Tested with DeepSpeed 0.19.8. Each workaround checks for what it patches and fails without it."""

import functools

import torch
import torch.distributed as dist

from llm_demo.core.decoder import Blocks
from llm_demo.core.errors import UserError
from llm_demo.core.sums import add, compile_once
from pp import deepspeed_base
from pp.deepspeed_base import bf16_step, need, outlast_overflows, quiet

# isort: split
import deepspeed  # now that its version is checked
from deepspeed.pipe import DualPipeVModule, PipelineModule
from deepspeed.runtime.pipe import schedule
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
        with quiet():  # it prints its topology
            super().__init__(layers, num_stages=stages, **kwargs)

    def _partition_layers(self, method=None):
        self.parts = self._bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(self.parts[stage], self.parts[stage + 1])

    @torch.no_grad()  # broadcast has no autograd kernel, and warns about it
    def _synchronize_tied_weights(self):
        super()._synchronize_tied_weights()


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
    """deepspeed.initialize with corrected instructions. compiled: compile bf16's sums too."""
    with quiet():  # it prints memory use throughout setup
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    outlast_overflows(engine)
    # Instructions are looked up in a map of the class: overriding a method would have no effect.
    instructions = dict(need(vars(type(engine)), "_INSTRUCTION_MAP"))
    need(instructions, schedule.ReduceTiedGrads)
    instructions[schedule.ReduceTiedGrads] = _reduce_tied_grads
    engine._INSTRUCTION_MAP = instructions
    if engine.using_bf16_optimizer and engine.dp_world_size == 1:
        # No other rank to reduce with, yet DeepSpeed would flatten and copy all gradients. The fp32
        # and fp16 optimizer needs this instruction: it fills the gradients that the step uses.
        engine.pipeline_enable_backward_allreduce = False
    if engine.using_bf16_optimizer:
        optimizer = engine.optimizer
        need(vars(type(optimizer)), "_update_hp_grad")
        optimizer._update_hp_grad = sums = _Fp32Sums(optimizer, module, compiled)
        stages = engine.grid.get_pipe_parallel_group()
        optimizer.step = functools.partial(_bf16_step, optimizer, sums, stages)
    return engine


class _Fp32Sums:
    """Adds bf16 gradients to their fp32 sums, a whole unit at once when its last gradient is ready.

    DeepSpeed first copies each gradient to fp32: almost twice the memory traffic, for every
    parameter and micro-batch."""

    def __init__(self, optimizer, module: Pipeline, compiled: bool):
        self.optimizer, self.pending = optimizer, {}
        self.together = {p: (p,) for p in module.parameters()}
        for unit in module.modules():
            if isinstance(unit, Blocks):
                self.together |= dict.fromkeys(unit.parameters(), tuple(unit.parameters()))
        self.add = compile_once(add) if compiled else add

    @torch.no_grad()
    def __call__(self, param, group: int, index: int, clear_lp_grads: bool) -> None:
        if param.grad is None:
            return
        total = self.optimizer.fp32_groups_gradients[group][index]
        param._hp_grad = total
        self.optimizer.fp32_groups_has_gradients[group][index] = True
        members = self.together[param]
        pending = self.pending.setdefault(members, {})
        pending[param] = total, param.grad.view(total.shape)
        param.grad = None
        if len(pending) == len(members):
            totals, grads = zip(*(pending[p] for p in members), strict=True)
            del self.pending[members]
            self.add(totals, grads)


def _bf16_step(optimizer, sums: _Fp32Sums, stages) -> None:
    if sums.pending:
        raise RuntimeError("a unit's gradients were not all formed in a micro-batch")
    bf16_step(optimizer, stages)  # a tied weight counts in the norm on its first stage only


def _reduce_tied_grads(engine) -> None:
    """Sum the tied weight's gradient over the stages that hold it.

    DeepSpeed reads weight.grad, which is None if gradients are accumulated in another dtype (fp16
    with fp32 gradients), and silently skips the sum: the copies diverge."""
    for weight, group in engine.module.get_tied_weights_and_groups():
        if engine.using_bf16_optimizer:
            grad = weight._hp_grad
        else:
            grad = engine.optimizer.get_param_gradient_attribute(weight)
        if grad is None:
            raise RuntimeError("a tied weight has no gradient to reduce")
        dist.all_reduce(grad, group=group)


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
