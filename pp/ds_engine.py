"""DeepSpeed's pipeline engine, made exact: every workaround this project needs, with its reason.

Tested with DeepSpeed 0.19.8. Each workaround checks for what it patches and fails without it."""

import contextlib
import functools
import io
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.version import Version

from llm_demo.errors import UserError
from llm_demo.model.compiling import compiled_add
from llm_demo.model.decoder import Blocks
from llm_demo.optim import CompiledAdamW, LossScale, clipped_step

OLDEST = "0.19.3"

# Switches allowed in --deepspeed_config.
SWITCHES = {
    "zero_optimization", "zero_allow_untested_optimizer", "prescale_gradients", "comms_logger",
    "steps_per_print", "memory_breakdown",
}  # fmt: skip
ZERO = {
    "stage", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "overlap_comm", "contiguous_gradients", "round_robin_gradients",
}  # fmt: skip


def check_version(installed: str | None = None) -> None:
    """Raise UserError for a DeepSpeed whose pipeline trains on wrong gradients."""
    installed = installed or version("deepspeed")
    if Version(installed) < Version(OLDEST):
        raise UserError(
            f"DeepSpeed {installed}: its pipeline scales gradients wrongly when it accumulates "
            f"them (fixed in {OLDEST}); pip install 'deepspeed>={OLDEST}'"
        )


check_version()  # before the import below: an old version may not even import
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns about auto-detection

import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.pipe import DualPipeVModule, PipelineModule  # noqa: E402
from deepspeed.runtime.pipe import schedule  # noqa: E402
from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402


def join(device: torch.device) -> None:
    """Make DeepSpeed use the existing process group."""
    if device.type == "cpu":
        # On a CPU, DeepSpeed compiles an all-reduce for inference here: it takes 30 s, needs ninja
        # and a compiler, and leaves 132 MiB in /dev/shm. `import deepspeed.comm.torch as x` would
        # give PyTorch itself, so the module is looked up by name.
        comm = need(sys.modules, "deepspeed.comm.torch")
        need(vars(comm), "build_shm_op")
        comm.build_shm_op = lambda: None
    deepspeed.init_distributed(verbose=False)


def quiet():
    return contextlib.redirect_stdout(io.StringIO())


def need(mapping, name):
    if name not in mapping:
        raise UserError(
            f"DeepSpeed {version('deepspeed')} has no {name} any more, which pp/ds_engine.py "
            "patches to keep the numbers right; install the tested deepspeed==0.19.8"
        )
    return mapping[name]


# ZeRO accepts only optimizers whose exact class it lists.
need(vars(deepspeed.runtime.zero.utils), "ZERO_SUPPORTED_OPTIMIZERS").append(CompiledAdamW)


class _Cut(PipelineModule):
    """PipelineModule cut at the layer numbers `bounds`, one more than there are pieces."""

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


class Pipeline(_Cut):
    """1F1B: one piece per stage. DeepSpeed chooses the order of work from the module's class:
    PipelineModule gives 1F1B, DualPipeVModule DualPipeV."""


class PipelineV(DualPipeVModule, _Cut):
    """DualPipeV: two pieces per stage, out and back; the first stage has both ends."""


def read_switches(path: str) -> dict:
    """The user's engine switches. Raises UserError for settings that flags own."""
    try:
        switches = json.loads(Path(path).read_text())
    except (OSError, ValueError) as e:
        raise UserError(f"--deepspeed_config {path}: {e}") from None
    zero = switches.get("zero_optimization", {}) if isinstance(switches, dict) else None
    if not isinstance(zero, dict):
        raise UserError(f"{path}: must be an object, and zero_optimization in it another")
    owned = {
        "train_batch_size": "--micro_batch_size and --grad_accum_steps",
        "train_micro_batch_size_per_gpu": "--micro_batch_size",
        "gradient_accumulation_steps": "--grad_accum_steps",
        "gradient_clipping": "--max_grad_norm",
        "optimizer": "--lr and --weight_decay",
        "scheduler": "--lr_scheduler and --warmup_steps",
        "bf16": "--dtype",
        "fp16": "--dtype",
        "data_types": "--dtype",
        "communication_data_type": "--dtype",
    }
    for key in owned.keys() & switches.keys():
        raise UserError(f"{path}: {key} is set by {owned[key]}; remove it from the file")
    # Only switches known to be harmless: aliases such as "bfloat16" or "torch_autocast" would train
    # in another dtype than the run reports.
    for where, keys, known in (("", switches, SWITCHES), ("zero_optimization.", zero, ZERO)):
        for key in keys.keys() - known:
            raise UserError(
                f"{path}: {where}{key} is not among the switches that keep the numbers exact: "
                f"{', '.join(sorted(known))}"
            )
    stage = zero.get("stage", 1)
    if stage != 1:
        # 0 clips by the first stage's norm and never scales fp16's loss; 2 and 3 can't pipeline.
        raise UserError(f"{path}: ZeRO stage {stage} trains wrongly in a pipeline; only 1 is exact")
    return switches


def engine_config(switches: dict, dtype: torch.dtype, micro: int, accum: int, clip: float) -> dict:
    """The engine's configuration: the switches plus what the flags own."""
    if dtype == torch.float16 and not get_accelerator().is_fp16_supported():
        raise UserError("--dtype fp16: DeepSpeed has no fp16 on this device; take bf16 or fp32")
    config = {
        "steps_per_print": 10**9,
        **switches,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": clip,
        # Gradients are accumulated and reduced in fp32. By default DeepSpeed reduces in the compute
        # dtype even in a group of one, which rounds to bf16 in every step.
        "communication_data_type": "fp32",
    }
    config.setdefault("zero_optimization", {})["stage"] = 1
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
    elif dtype == torch.float16:
        config["fp16"] = {"enabled": True, "initial_scale_power": 16}
    if dtype != torch.float32:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def make_engine(
    module: Pipeline, optimizer: torch.optim.Optimizer, config: dict, compiled: bool
) -> PipelineEngine:
    """deepspeed.initialize with corrected instructions. compiled: compile bf16's sums too."""
    with quiet():  # it prints memory use throughout setup
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    if scaler := getattr(engine.optimizer, "loss_scaler", None):
        scaler.raise_error_at_min_scale = False  # --max_skipped_steps ends the run
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
        no_scale = LossScale(torch.bfloat16, engine.device)  # bf16 needs no loss scale: always 1
        stages = engine.grid.get_pipe_parallel_group()
        optimizer.step = functools.partial(_bf16_step, optimizer, sums, no_scale, stages)
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
        self.add = compiled_add() if compiled else torch._foreach_add_

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


@torch.no_grad()
def _bf16_step(optimizer, sums: _Fp32Sums, loss_scale: LossScale, stages) -> None:
    """Clip and step without waiting for the device. DeepSpeed reads the norm on the host, then
    launches a kernel per parameter while the device is otherwise idle."""
    if sums.pending:
        raise RuntimeError("a unit's gradients were not all formed in a micro-batch")
    pairs = zip(
        optimizer.fp32_groups_flat_partition,
        optimizer.fp32_groups_gradient_flat_partition,
        strict=True,
    )
    for master, grad in pairs:
        master.grad = grad
    norm_of, _ = optimizer.get_grads_for_norm()  # a tied weight counts on its first stage only
    optimizer._global_grad_norm = clipped_step(
        optimizer.optimizer, optimizer.clip_grad, loss_scale, [(norm_of, stages)]
    )
    optimizer._lazy_init_hp_params_optimizer_state()
    optimizer.update_lp_params()  # the engine clears the gradients


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
