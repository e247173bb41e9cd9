"""PyTorch's own runner of schedules (torch.distributed.pipelining) over the same pieces.

It reduces FSDP2's gradients after the last backward, not during it. zbv and dualpipev split each
backward: the gradients of the weights fill the time in which a stage would wait. Below PyTorch 2.14
a private method is needed for micro-batches that are not one tensor to be cut."""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules

from fsdp.fsdp2 import autograd_accumulates
from fsdp_pp.flags import SPLIT
from llm_demo.errors import UserError

SCHEDULES = {
    "torch_1f1b": "Schedule1F1B",
    "torch_interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def find(name: str) -> type:
    """The schedule's class. Raises UserError if this PyTorch lacks it, or can't run it."""
    if not hasattr(schedules, SCHEDULES[name]):
        raise UserError(f"--schedule {name}: PyTorch {torch.__version__} has no {SCHEDULES[name]}")
    if name in SPLIT and not splits_backwards():
        raise UserError(
            f"--schedule {name}: PyTorch {torch.__version__} can't split the backward of a Python "
            "function (2.13 can): upgrade it, or use --schedule v"
        )
    return getattr(schedules, SCHEDULES[name])


def splits_backwards() -> bool:
    """Whether the second half of a split backward finds the node of a Python function: PyTorch 2.12
    has freed it by then."""
    x = torch.ones(1, requires_grad=True)
    edge = GradientEdge(_Same.apply(x).grad_fn, 0)
    try:
        torch.autograd.grad([edge], [x], grad_outputs=[torch.ones(1)])
    except RuntimeError:
        return False
    return True


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def sum_in_fp32(stage: PipelineStage) -> None:
    """Add the gradients of each second half of a backward to FSDP2's fp32 sums at once. FSDP2 adds
    them in the first half of a later backward, and until then those of several micro-batches are
    summed in the dtype of the compute. Uses private attributes, and fails if they are missing."""
    units = [unit for unit in stage.submod.modules() if isinstance(unit, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    params = [p for group in groups if group for p in group.fsdp_params]
    adds = [p.accumulate_unsharded_grad_if_needed for p in params]
    adds += [p.to_accumulated_grad_if_needed for p in params]  # begins a sum
    second_half = stage.backward_weight_one_chunk

    @functools.wraps(second_half)
    def then_add(*args, **kwargs):
        second_half(*args, **kwargs)
        for add in adds:
            add()

    stage.backward_weight_one_chunk = then_add


class TorchSchedule:
    """A schedule with the pieces of this stage.

    Args:
        name: of SCHEDULES.
        pieces: {number: the module}, those of this stage.
        count: pieces of the whole model.
        hidden: a micro-batch's hidden states, on the meta device.
        ids: its token ids, on the meta device."""

    def __init__(
        self,
        name: str,
        pieces: dict[str, nn.Module],
        count: int,
        micro_batches: int,
        device: torch.device,
        group,
        hidden: torch.Tensor,
        ids: torch.Tensor,
    ):
        loss = torch.empty((), device="meta", requires_grad=True)
        self.stages, self.count = [], count
        for number, module in pieces.items():
            at = int(number)
            # given, so that no extra forward finds them out
            shapes = {
                "input_args": (hidden if at else ids,),
                "output_args": (hidden if at < count - 1 else loss,),
            }
            self.stages.append(PipelineStage(module, at, count, device, group=group, **shapes))
            if name in SPLIT and not autograd_accumulates():  # in fp32
                sum_in_fp32(self.stages[-1])
        kind = find(name)
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        self.schedule = kind(
            self.stages if several else self.stages[0],
            micro_batches,
            loss_fn=lambda loss, take: take(loss),
            scale_grads=False,
        )

    def run(self, inputs: list[tuple], take: Callable) -> None:
        """Forwards and backwards of a step. inputs: (ids, the other arguments of the forward) of
        each micro-batch. take(output): what follows the last piece."""
        numbers, losses = [stage.stage_index for stage in self.stages], []
        first, last = 0 in numbers, self.count - 1 in numbers
        args = [(ids,) if first else () for ids, _ in inputs]
        kwargs = [others for _, others in inputs]
        targets = [take] * len(inputs) if last else None
        self.schedule._has_backward = True
        for stage in self.stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        step = self.schedule._step_microbatches
        known = inspect.signature(step).parameters
        options = {"return_outputs": False} if "return_outputs" in known else {}
        step(args, kwargs, targets, losses if last else None, **options)
