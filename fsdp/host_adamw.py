"""AdamW with states on the host: fp32 masters and moments in host memory, weights on the device.

Gradients are reduced after every micro-batch and summed on the device (`UnitSum`). Once the norm of
all gradients is known, masters and moments pass through the device in slices: one slice is copied
in and another one back while a third is updated. Units follow one another in the order of the
forward, and the next forward starts meanwhile: each unit waits for its own weights only.

AdamW on the host's cores would take longer than these copies (bench/LOG.md). The results are those
of AdamW on the device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp.activations_on_host import claim_host, pin_all
from fsdp.sharding import adam_views, params_of, shard_sizes
from llm_demo.core.decoder import Decays, DecoderLoss
from llm_demo.core.errors import UserError
from llm_demo.core.experts import Routers
from llm_demo.core.mesh import World, local_part
from llm_demo.core.optim import (
    BETAS,
    EPS,
    MOMENTS,
    adam_steps,
    add,
    add_into,
    check_moments,
    compile_once,
    decayed_or_not,
    fused_adamw,
    sum_into,
)
from llm_demo.flags.args import Args
from llm_demo.model.costs import state_bytes

SLICE = 1 << 21  # elements that are copied and updated at a time
SLOTS = 3  # slices on the device at a time: one comes, one is updated, one goes


class UnitSum:
    """The parameters of a unit and the sum of a step's gradients: flat, in fp32, on the device.
    Under FSDP2 a unit is what is gathered and reduced together, and this rank's part of it.

    Parameters are in the compute dtype, except routers, and FSDP2 would round their reduced
    gradients to it.

    module: its forward is the first to use them. sizes: elements of the sum that each parameter
    takes, at least its own. compiles: torch.compile works here."""

    def __init__(
        self, module: nn.Module, params: list[nn.Parameter], sizes: list[int], compiles: bool
    ):
        self.module, self.params, self.compiles = module, params, compiles
        self.locals = [local_part(p) for p in params]
        self.starts, self.length = [sum(sizes[:i]) for i in range(len(sizes))], sum(sizes)
        self.sum = self.grads = None  # until `allocate`
        self.fresh = True  # the next micro-batch is the first of a step

    def allocate(self) -> None:
        """Allocate the sum, without values."""
        self.sum = torch.empty(self.length, device=self.locals[0].device)
        self.grads = self.views(self.sum)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' views of a flat tensor laid out as the sum."""
        places = zip(self.starts, self.locals, strict=True)
        return [flat[at : at + t.numel()].view(t.shape) for at, t in places]

    def add(self, parts: list[torch.Tensor]) -> None:
        """Add a micro-batch's gradients. parts: from each rank, flat, as long as the sum."""
        function = sum_into if self.fresh else add_into
        (compile_once(function) if self.compiles else function)(self.sum, parts)
        self.fresh = False

    def take_grads(self) -> None:
        """Add a micro-batch's gradients, those that the parameters have, and free them."""
        if self.fresh:
            self.sum.zero_()
        self.fresh = False
        pairs = zip(self.grads, self.params, strict=True)
        pairs = [(total, p) for total, p in pairs if p.grad is not None]
        if pairs:
            function = compile_once(add) if self.compiles else add
            function([total for total, _ in pairs], [p.grad for _, p in pairs])
        for p in self.params:
            p.grad = None


def plain_units(model: DecoderLoss, compiles: bool) -> list[UnitSum]:
    """The units of a model that is not sharded, in the order of the forward. A tied head is part of
    the embedding's."""
    units, taken = [], set()
    for module in (model.embed_tokens, *model.units, model.tail):
        params = [p for p in module.parameters() if p not in taken]
        taken.update(params)
        units.append(UnitSum(module, params, [p.numel() for p in params], compiles))
        _add_when_formed(units[-1])
    return units


def _add_when_formed(unit: UnitSum) -> None:
    """Add a micro-batch's gradients to a unit's sum during the backward, once all of them exist. If
    some never do, `take_grads` adds the others at the end of the backward."""
    trained = [p for p in unit.params if p.requires_grad]

    def formed(_):
        if all(p.grad is not None for p in trained):
            unit.take_grads()

    for p in trained:
        p.register_post_accumulate_grad_hook(formed)


def sharded_units(model: FSDPModule, compiles: bool) -> list[UnitSum]:
    """The units of an FSDP2 model, in the order of the forward. FSDP2 hands each its gradients."""
    units = []
    for module in sorted(model.modules(), key=lambda m: not isinstance(m, Routers | Decays)):
        if not isinstance(module, FSDPModule):
            continue
        params = params_of(module)
        if params is None:
            raise UserError(
                "--optimizer_on_host does not work with this PyTorch: FSDP2 has changed"
            )
        if params:
            units.append(_sharded_unit(module, params, compiles))
    return units


def _sharded_unit(module: FSDPModule, params: list[nn.Parameter], compiles: bool) -> UnitSum:
    # as FSDP2's gradients are laid out
    unit = UnitSum(module, params, shard_sizes(params), compiles)

    def add(reduced):
        unit.add([reduced])
        if reduced.is_cuda:  # FSDP2 frees it, for use on the stream that it was allocated on
            reduced.record_stream(torch.cuda.current_stream())

    module.set_all_reduce_hook(add)
    for p in params:  # summed by now: FSDP2 would keep a copy until the next step
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return unit


class PartOfSlice(NamedTuple):
    """What a slice holds of one parameter: n elements."""

    span: slice  # of the slice
    grads: torch.Tensor  # flat fp32 [n], on the device
    weights: torch.Tensor  # flat [n] in the compute dtype, on the device
    group: dict  # of the optimizer


class Slice(NamedTuple):
    unit: int
    span: slice  # of the unit
    parts: list[PartOfSlice]


class HostAdamW(torch.optim.AdamW):
    """AdamW over host copies of a model's parameters. The model is allocated; `keep` then sets each
    parameter's values.

    step() reads one number, whether to skip, and waits for nothing else. `wait` waits for a unit.
    grad_scale and found_inf are as in PyTorch's fused AdamW, 0-dim tensors on the device.
    moments: their dtype, see optim.check_moments."""

    def __init__(
        self,
        units: list[UnitSum],
        lr: float,
        weight_decay: float,
        moments: torch.dtype = torch.float32,
    ):
        check_moments(moments)
        self.units, self.masters, both = units, {}, {}
        # by unit: master, exp_avg and exp_avg_sq, each laid out as the sum of gradients
        sizes = [unit.length for unit in units]
        kinds = torch.float32, moments, moments
        total = [sum(sizes) * kind.itemsize for kind in kinds]
        memory = torch.zeros(sum(total), dtype=torch.uint8)
        kept = zip(memory.split(total), kinds, strict=True)
        self.states = [*zip(*(of.view(kind).split(sizes) for of, kind in kept), strict=True)]
        if units[0].locals[0].is_cuda:
            pin_all(memory, self, "--optimizer_on_host")
        for unit, states in zip(units, self.states, strict=True):
            for p, *views in zip(unit.params, *map(unit.views, states), strict=True):
                master = self.masters[p] = nn.Parameter(views[0])
                both[master] = dict(zip(MOMENTS, views[1:], strict=True))
        super().__init__(
            decayed_or_not(self.masters.values(), weight_decay), lr, BETAS, EPS, fused=True
        )
        for master, views in both.items():
            self.state[master].update(step=torch.zeros(()), **views)
        self.model_params, self.params = list(self.masters), list(self.masters.values())
        self.slices, self.stored = [], None
        self.ready = [None for _ in units]  # by unit: the event after its weights were updated
        for i, unit in enumerate(units):
            unit.module.register_forward_pre_hook(lambda *_, i=i: self.wait(i), prepend=True)

    @torch.no_grad()
    def keep(self, p: nn.Parameter, values: torch.Tensor) -> None:
        """Set this rank's part of a parameter: its master, and its weights on the device."""
        self.masters[p].copy_(values)
        local_part(p).copy_(values)

    def grads(self) -> list[torch.Tensor]:
        """This rank's part of the gradients of `model_params`: fp32, on the device."""
        return [grad for unit in self.units for grad in unit.grads]

    def take_grads(self, last: bool) -> None:
        """Add the gradients of a micro-batch, unless FSDP2 has handed them over."""
        for unit in self.units:
            unit.take_grads()

    def wait(self, i: int) -> None:
        """Wait until unit i's weights are those after the last step."""
        if self.ready[i]:
            self.ready[i].synchronize()

    def views(self, optimizer: torch.optim.AdamW) -> Iterator[tuple]:
        """(parameter, its fp32 master, *its MOMENTS) of each parameter, as `adam_views`."""
        if self.stored:
            self.stored.synchronize()
        return adam_views(list(self.masters.items()), optimizer)

    def store(self, masters: dict[nn.Parameter, torch.Tensor]) -> None:
        """Set the masters and update the weights from them."""
        for p, values in masters.items():
            self.keep(p, local_part(values))

    @torch.no_grad()
    def step(self) -> None:
        for unit in self.units:
            unit.fresh = True
        if self.found_inf:
            return
        for state in self.state.values():
            state["step"] += 1
        self.up.wait_stream(self.down)  # of the last step
        self.update.wait_stream(self.device.current_stream())
        with self.device.stream(self.update):  # allocated there, so not reused while it is read
            taken = torch.full((), adam_steps(self) - 1.0, device=self.slots[0][0].device)
        free = [None] * SLOTS
        for i, cut in enumerate(self.slices):
            slot, host = self.slots[i % SLOTS], [t[cut.span] for t in self.states[cut.unit]]
            with self.device.stream(self.up):
                if free[i % SLOTS]:
                    self.up.wait_event(free[i % SLOTS])
                for near, far in zip(slot, host, strict=True):
                    near[: len(far)].copy_(far, non_blocking=True)
            self.update.wait_stream(self.up)
            with self.device.stream(self.update):
                self._adamw(slot, cut.parts, taken)
                self.ready[cut.unit] = self._event()
            self.down.wait_stream(self.update)
            with self.device.stream(self.down):
                for near, far in zip(slot, host, strict=True):
                    far.copy_(near[: len(far)], non_blocking=True)
                free[i % SLOTS] = self.stored = self._event()

    def allocate(self) -> None:
        """Allocate the sums of gradients and the slots that states pass through. Call it once the
        model is loaded, because loading takes memory too."""
        for unit in self.units:
            unit.allocate()
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        self.slices = [
            cut for i, unit in enumerate(self.units) for cut in self._slices(i, unit, group_of)
        ]
        device = self.units[0].sum.device
        length = min(SLICE, max(unit.length for unit in self.units))
        kinds = [t.dtype for t in self.states[0]]
        self.slots = [
            [torch.empty(length, dtype=kind, device=device) for kind in kinds] for _ in range(SLOTS)
        ]
        self.device = torch.get_device_module(device)
        self.up, self.update, self.down = (self.device.Stream() for _ in range(3))

    def _slices(self, i: int, unit: UnitSum, group_of: dict) -> Iterator[Slice]:
        for first in range(0, unit.length, SLICE):
            last, parts = min(first + SLICE, unit.length), []
            for at, p, local in zip(unit.starts, unit.params, unit.locals, strict=True):
                begin, end = max(first, at), min(last, at + local.numel())
                if begin < end:
                    weights = local.view(-1)[begin - at : end - at]
                    span, group = slice(begin - first, end - first), group_of[self.masters[p]]
                    parts.append(PartOfSlice(span, unit.sum[begin:end], weights, group))
            if parts:
                yield Slice(i, slice(first, last), parts)

    def _adamw(self, slot: list, parts: list[PartOfSlice], taken: torch.Tensor) -> None:
        """Update a slice in its slot, and the weights from it. slot: flat masters and moments.
        taken: steps before this one."""
        for group in self.param_groups:
            chosen = [part for part in parts if part.group is group]
            if not chosen:
                continue
            masters, each = [], []
            for part in chosen:
                master, exp_avg, exp_avg_sq = (states[part.span] for states in slot)
                masters.append(master)
                each.append((master, part.grads, exp_avg, exp_avg_sq, taken.clone()))
            fused_adamw(group, each, self.grad_scale)
            torch._foreach_copy_([part.weights for part in chosen], masters)

    def _event(self):
        return self.device.current_stream().record_event()


def host_need(args: Args, model: nn.Module, world: World) -> int:
    """Bytes of masters and moments of this node's ranks."""
    here = sum(local_part(p).numel() for p in model.parameters())
    return state_bytes(args) * world.local_size * here


def prepare_host(args: Args, model: nn.Module, world: World) -> str:
    """claim_host for masters and moments of a model, which may still be on the meta device."""
    what = "host memory for masters and moments"
    advice = "use more nodes or a smaller model"
    return claim_host("optimizer", host_need(args, model, world), what, advice, world)
