"""Every change to DeepSpeed's private parts, for the pipeline and for ZeRO.

Each says why, and what is lost without it: times are those of bench/LOG.md. All are needed up to
DeepSpeed 0.19.8, the tested version. `need` refuses, in one line, a version that lacks what a patch
replaces."""

import functools
import sys
import warnings
from importlib.metadata import version

import torch
import torch.distributed as dist

from llm_demo.core.decoder import Blocks
from llm_demo.core.errors import UserError
from llm_demo.core.optim import CompiledAdamW, LossScale, add, clipped_step, compile_once
from pp.deepspeed_base import TESTED, get_accelerator

# isort: split
import deepspeed  # now that its version is checked
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.utils import z3_leaf_parameter


def need(mapping, name):
    """What `name` stands for. Raises UserError if DeepSpeed has no such part any more."""
    if name not in mapping:
        raise UserError(
            f"DeepSpeed {version('deepspeed')} has no {name} any more, which this project patches "
            f"to keep the numbers right; install the tested deepspeed=={TESTED}"
        )
    return mapping[name]


# ---------------------------------------------------------------- both

# ZeRO accepts only optimizers whose exact class it lists. Lost otherwise: compiled AdamW, 14 of 416
# ms for 8B. The public switch `zero_allow_untested_optimizer` warns of it in every log.
need(vars(deepspeed.runtime.zero.utils), "ZERO_SUPPORTED_OPTIMIZERS").append(CompiledAdamW)


def join_group(device: torch.device) -> None:
    """Make DeepSpeed use the existing process group."""
    # PyTorch 2.13 renamed two collectives, which stage 3 calls thousands of times.
    old = ".*(all_gather_into_tensor|reduce_scatter_tensor)"
    warnings.filterwarnings("ignore", old, FutureWarning)
    if device.type == "cpu":
        # It compiles an all-reduce for inference: 30 s, a compiler, and 132 MiB in /dev/shm. The
        # module is looked up by name, because `import deepspeed.comm.torch` gives PyTorch itself.
        comm = need(sys.modules, "deepspeed.comm.torch")
        need(vars(comm), "build_shm_op")
        comm.build_shm_op = lambda: None
        # It wants a CPU with fp16 instructions. PyTorch computes without them, slowly.
        get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(verbose=False)
    # It keeps PyTorch's functions as they are now, but a run that times communication wraps them
    # later. Lost otherwise: comm_ms of ZeRO.
    backend = deepspeed.comm.comm.cdb
    need(vars(backend), "all_gather_function")
    need(vars(backend), "reduce_scatter_function")
    backend.all_gather_function = lambda *args, **how: dist.all_gather_into_tensor(*args, **how)
    backend.reduce_scatter_function = lambda *args, **how: dist.reduce_scatter_tensor(*args, **how)


def outlast_overflows(engine) -> None:
    """Don't let DeepSpeed end the run at the smallest loss scale: records.py counts bad steps."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler:
        scaler.raise_error_at_min_scale = False


def link_moments(optimizer) -> None:
    """Let DeepSpeed find each parameter's moments. Its fp32 and fp16 optimizer links them only
    once, after the first group's first step, when the other groups have none yet. Lost otherwise:
    checkpoints."""
    need(vars(type(optimizer)), "_lazy_init_hp_params_optimizer_state")
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


@torch.no_grad()
def bf16_step(optimizer, group=None) -> None:
    """The step of DeepSpeed's BF16_Optimizer: clip and step without waiting for the device, by a
    norm summed in fp64. group: over whose ranks the model is split.

    Lost otherwise: the fp64 sum and, up to 0.19.5 at least, a run whose norm is not finite in one
    step. DeepSpeed also reads the norm on the host, which is less than 1 % of a step."""
    pairs = zip(
        optimizer.fp32_groups_flat_partition,
        optimizer.fp32_groups_gradient_flat_partition,
        strict=True,
    )
    for master, grad in pairs:
        master.grad = grad
    grads, _ = optimizer.get_grads_for_norm()
    no_scale = LossScale(torch.bfloat16, grads[0].device)  # bf16 needs none: always 1
    optimizer._global_grad_norm = clipped_step(
        optimizer.optimizer, optimizer.clip_grad, no_scale, grads, group
    )
    optimizer._lazy_init_hp_params_optimizer_state()
    optimizer.update_lp_params()  # the engine clears the gradients


# ---------------------------------------------------------------- the pipeline


def patch_pipeline(engine, compiled: bool) -> None:
    """Make a pipeline engine exact. compiled: compile bf16's sums."""
    outlast_overflows(engine)
    # Instructions are looked up in a map of the class: overriding a method would have no effect.
    instructions = dict(need(vars(type(engine)), "_INSTRUCTION_MAP"))
    need(instructions, schedule.ReduceTiedGrads)
    instructions[schedule.ReduceTiedGrads] = _reduce_tied_grads
    engine._INSTRUCTION_MAP = instructions
    if not engine.using_bf16_optimizer:
        return
    if engine.dp_world_size == 1:
        # No other rank to reduce with, yet DeepSpeed copies all gradients to a buffer of up to 2 GB
        # and back. In fp32 and fp16 this instruction fills the gradients that the step uses.
        engine.pipeline_enable_backward_allreduce = False
    optimizer = engine.optimizer
    need(vars(type(optimizer)), "_update_hp_grad")
    optimizer._update_hp_grad = sums = _Fp32Sums(optimizer, engine.module, compiled)
    stages = engine.grid.get_pipe_parallel_group()

    def step():
        if sums.pending:
            raise RuntimeError("a unit's gradients were not all formed in a micro-batch")
        bf16_step(optimizer, stages)  # a tied weight counts in the norm on its first stage only

    optimizer.step = step


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


class _Fp32Sums:
    """Adds bf16 gradients to their fp32 sums, a whole unit at once when its last gradient is ready.

    DeepSpeed first copies each gradient to fp32: almost twice the memory traffic, for every
    parameter and micro-batch. Lost otherwise: 13 of 350 ms for 0.6B, 21 with DualPipeV."""

    def __init__(self, optimizer, module, compiled: bool):
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


# ---------------------------------------------------------------- ZeRO

_linear = need(vars(partition_parameters), "zero3_linear_wrap")


def _linear_of_rows(x: torch.Tensor, weight, bias=None) -> torch.Tensor:
    """Stage 3's linear layer, unless compiled. DeepSpeed adds the bias of a batch of rows after it
    has rounded the product to the compute dtype; of one row it rounds once, as PyTorch does."""
    if bias is None:
        return _linear(x, weight)
    return _linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


partition_parameters.zero3_linear_wrap = _linear_of_rows


def reduce_when_whole(embedding: torch.nn.Parameter) -> None:
    """Let stage 3 reduce a tied embedding's gradient once autograd has summed it. DeepSpeed reduces
    the gradients of a leaf module, here of the tail, right after the module's backward, when the
    embedding has none yet: it would be lost unless all gradients fit into one bucket."""
    need(vars(stage3), "z3_leaf_parameter")
    stage3.z3_leaf_parameter = lambda p: p is not embedding and z3_leaf_parameter(p)


def patch_zero(engine) -> None:
    """Make a ZeRO engine exact."""
    optimizer = engine.optimizer
    outlast_overflows(engine)
    if isinstance(optimizer, BF16_Optimizer):  # stage 1 in bf16
        optimizer.step = functools.partial(bf16_step, optimizer)
    if engine.zero_optimization_stage() == 2 and engine.zero_cpu_offload():
        _forget_skipped(optimizer)


def _forget_skipped(optimizer) -> None:
    """Drop the gradients of a skipped step. With the optimizer on the host, ZeRO-2 keeps them in
    bf16 and fp16 and adds the next step's: one overflow would skip all steps after it."""
    reset = optimizer.reset_cpu_buffers
    need(vars(optimizer), "averaged_gradients")

    def reset_all():  # at the end of each step, also of a skipped one
        reset()
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))

    optimizer.reset_cpu_buffers = reset_all
