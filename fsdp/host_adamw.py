"""AdamW on the host: fp32 masters and moments in host memory, weights on the device.

Gradients are reduced after every micro-batch and summed on the device, sharded, in fp32. Once the
norm of all gradients is known, a thread goes through the units in the order of the forward: it
copies gradients to the host, runs AdamW there and copies new weights to the device. Meanwhile the
next forward starts. Each unit waits for its own weights only."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import psutil
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.adamw import adamw

from llm_demo.device import World, cores_near
from llm_demo.errors import UserError
from llm_demo.optim import (
    BETAS,
    EPS,
    MOMENTS,
    adam_steps,
    adam_views,
    decayed_or_not,
    fill_adam_state,
)
from llm_demo.process import usable_cores

SLICE = 1 << 25  # elements that are copied and updated at a time


class Part(NamedTuple):
    """A slice of one parameter: flat views of equal length n."""

    master: torch.Tensor  # fp32, on the host
    moments: list[torch.Tensor]  # fp32, on the host
    weights: torch.Tensor  # in the compute dtype, on the device
    group: dict  # of the optimizer
    start: int  # where its gradient begins in the slice


class Slice(NamedTuple):
    """At most SLICE elements of a unit."""

    grads: torch.Tensor  # flat fp32 view of the unit's sum, on the device
    parts: list[Part]


class Unit:
    """This rank's part of the parameters that FSDP2 gathers and reduces together."""

    def __init__(self, module: FSDPModule):
        group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
        if not hasattr(group, "fsdp_params"):
            raise UserError(
                "--optimizer_on_host does not work with this PyTorch: FSDP2 has changed"
            )
        self.params = [p.sharded_param for p in group.fsdp_params]
        self.locals = [p.detach().to_local() for p in self.params]
        self.masters = [nn.Parameter(torch.empty(t.shape, device="cpu")) for t in self.locals]
        # FSDP2's reduced gradients: flat, each padded to the largest rank's number of rows
        sizes = [-(-p.shape[0] // p.device_mesh.size()) * p[:1].numel() for p in self.params]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.sum = torch.zeros(sum(sizes), device=self.locals[0].device)
        places = zip(self.starts, self.locals, strict=True)
        self.grads = [self.sum[at : at + t.numel()].view(t.shape) for at, t in places]
        self.fresh = True  # the next micro-batch is the first of a step
        self.updated = Future()
        self.updated.set_result(None)
        module.set_all_reduce_hook(self.add)
        for p in self.params:  # summed by now: FSDP2 would keep a copy until the next step
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        module.register_forward_pre_hook(lambda *_: self.wait(), prepend=True)

    def add(self, reduced: torch.Tensor) -> None:
        """Add a micro-batch's gradients, summed over ranks, to the step's."""
        if self.fresh:
            self.sum.copy_(reduced)
        else:
            self.sum.add_(reduced)
        self.fresh = False

    def wait(self) -> None:
        """Wait until the weights are those after the last step."""
        if copied := self.updated.result():
            copied.synchronize()

    def slices(self, state: dict, group_of: dict) -> list[Slice]:
        """The unit in slices. state: the optimizer's; group_of: a master's parameter group."""
        slices, begin, end, parts = [], 0, 0, []
        for at, local, master in zip(self.starts, self.locals, self.masters, strict=True):
            for first in range(0, local.numel(), SLICE):
                span = slice(first, min(first + SLICE, local.numel()))
                if parts and at + span.stop - begin > SLICE:
                    slices.append(Slice(self.sum[begin:end], parts))
                    parts = []
                if not parts:
                    begin = at + span.start
                moments = [state[master][name].view(-1)[span] for name in MOMENTS]
                flat = master.detach().view(-1)[span], moments, local.view(-1)[span]
                parts.append(Part(*flat, group_of[master], at + span.start - begin))
                end = at + span.stop
        return [*slices, Slice(self.sum[begin:end], parts)] if parts else slices


class HostAdamW(torch.optim.AdamW):
    """AdamW over host copies of a sharded model's parameters. The model is allocated; `keep` then
    sets each parameter's values.

    step() only starts the update, `wait` waits for its end. grad_scale and found_inf are as in
    PyTorch's fused AdamW, 0-dim tensors on the device."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float):
        self.units = [Unit(m) for m in model.modules() if isinstance(m, FSDPModule)]
        self.masters = {
            p: master
            for unit in self.units
            for p, master in zip(unit.params, unit.masters, strict=True)
        }
        groups = decayed_or_not(self.masters.values(), weight_decay)
        super().__init__(groups, lr, BETAS, EPS, fused=True)
        self.slices = None

    @torch.no_grad()
    def keep(self, p: nn.Parameter, values: torch.Tensor) -> None:
        """Set this rank's part of a parameter: its master, and its weights on the device."""
        self.masters[p].copy_(values)
        p.to_local().copy_(values)

    def sums(self) -> list[torch.Tensor]:
        """This rank's part of each gradient of the step: fp32, on the device."""
        return [grad for unit in self.units for grad in unit.grads]

    def views(self, optimizer: torch.optim.AdamW) -> Iterator[tuple]:
        """(parameter, its fp32 master, *its MOMENTS) of each parameter, as `optim.adam_views`."""
        self.wait()
        return adam_views(list(self.masters.items()), optimizer)

    def wait(self) -> None:
        """Wait until masters, moments and weights are those after the last step."""
        for unit in self.units:
            unit.wait()

    def store(self, masters: dict[nn.Parameter, torch.Tensor]) -> None:
        """Set the masters and update the weights from them."""
        for p, values in masters.items():
            self.keep(p, values.to_local())

    @torch.no_grad()
    def step(self) -> None:
        if not self.slices:
            self._prepare()
        norm_known = self._event()
        for unit in self.units:
            unit.updated, unit.fresh = Future(), True
        self.thread.submit(self._update, norm_known, self.grad_scale, self.found_inf)

    def _prepare(self) -> None:
        """Cut units into slices and allocate what these pass through."""
        if not self.state:
            fill_adam_state(self, 0)
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        self.slices = [(u, cut) for u in self.units for cut in u.slices(self.state, group_of)]
        length = max(cut.grads.numel() for _, cut in self.slices)
        device, dtype = self.units[0].sum.device, self.units[0].locals[0].dtype
        pin = device.type == "cuda"
        self.grads = [torch.empty(length, pin_memory=pin) for _ in range(2)]
        self.weights = [torch.empty(length, dtype=dtype, pin_memory=pin) for _ in range(2)]
        self.device, self.index = torch.get_device_module(device), device.index
        self.down, self.up = self.device.Stream(), self.device.Stream()
        self.thread = ThreadPoolExecutor(1, "host_adamw")

    def _update(self, *args) -> None:
        """The thread's part of a step. Whoever waits for a unit gets its exceptions."""
        try:
            with torch.no_grad():
                self._update_slices(*args)
        except BaseException as e:
            for unit in self.units:
                if not unit.updated.done():
                    unit.updated.set_exception(e)

    def _update_slices(self, norm_known, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        if self.index is not None:
            self.device.set_device(self.index)  # a new thread starts on device 0
        with self.device.stream(self.down):
            self.down.wait_event(norm_known)
            divisor, skip = torch.stack([divisor, skip]).cpu()
        slices = [] if skip else self.slices
        left = {unit: sum(u is unit for u, _ in slices) for unit in self.units}
        taken = adam_steps(self)
        for p in () if skip else self.state:
            self.state[p]["step"] += 1
        arrived, sent = [self._fetch(cut, self.grads[0]) for _, cut in slices[:1]], []
        for i, (unit, cut) in enumerate(slices):
            arrived[i].synchronize()
            # the next slice is copied while this one is updated
            arrived += [self._fetch(p, self.grads[(i + 1) % 2]) for _, p in slices[i + 1 : i + 2]]
            self._adamw(cut, self.grads[i % 2], divisor, taken)
            if i > 1:
                sent[i - 2].synchronize()
            sent.append(self._send(cut, self.weights[i % 2]))
            left[unit] -= 1
            if not left[unit]:
                unit.updated.set_result(sent[i])
        for unit in self.units:  # skipped, or this rank has no part of it
            if not unit.updated.done():
                unit.updated.set_result(None)

    def _event(self):
        event = self.device.Event()
        event.record()
        return event

    def _fetch(self, cut: Slice, grads: torch.Tensor):
        with self.device.stream(self.down):
            grads[: cut.grads.numel()].copy_(cut.grads, non_blocking=True)
            return self._event()

    def _adamw(self, cut: Slice, grads: torch.Tensor, divisor: torch.Tensor, taken: int) -> None:
        for group in self.param_groups:
            parts = [part for part in cut.parts if part.group is group]
            if not parts:
                continue
            beta1, beta2 = group["betas"]
            adamw(
                [part.master for part in parts],
                [grads[part.start :][: part.master.numel()] for part in parts],
                *([part.moments[i] for part in parts] for i in range(2)),
                [],
                [torch.tensor(float(taken)) for _ in parts],
                fused=True, grad_scale=divisor, found_inf=None, amsgrad=False, maximize=False,
                beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
                eps=group["eps"],
            )  # fmt: skip

    def _send(self, cut: Slice, weights: torch.Tensor):
        with self.device.stream(self.up):
            for part in cut.parts:
                cast = weights[part.start :][: part.master.numel()].copy_(part.master)
                part.weights.copy_(cast, non_blocking=True)
            return self._event()


def prepare_host(model: nn.Module, world: World) -> str:
    """Check this node's memory and keep this process, its threads and its memory near its GPU, on
    the GPU's NUMA node. Returns what to log. The model is sharded; it may still be on the meta
    device. Raises UserError if masters and moments of this node's ranks do not fit."""
    need = 12 * world.local_size * sum(p.to_local().numel() for p in model.parameters())
    free = psutil.virtual_memory().available
    if need > free:
        raise UserError(
            f"--optimizer_on_host needs {need / 2**30:.1f} GB of host memory for masters and "
            f"moments, and {free / 2**30:.1f} GB are free: use more nodes or a smaller model"
        )
    near = set(cores_near(world.device)) & set(usable_cores())
    if near:
        os.sched_setaffinity(0, near)  # inherited by threads started from now on
    where = f", {len(near)} cores of the GPU's NUMA node" if near else ""
    return f"optimizer on the host: {need / 2**30:.1f} GB of {free / 2**30:.1f} GB free{where}"
