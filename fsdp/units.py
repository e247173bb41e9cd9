"""The parameters of a model in units, each with the sum of a step's gradients: flat, in fp32, on
the device. Under FSDP2 a unit is what is gathered and reduced together, and this rank's part of it.

Parameters are in the compute dtype, except routers, and FSDP2 would round their reduced gradients
to it."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from llm_demo.core.decoder import DecoderLoss
from llm_demo.core.errors import UserError
from llm_demo.core.experts import Routers
from llm_demo.core.mesh import local_part
from llm_demo.core.optim import add, add_into, compile_once, sum_into

# For the optimizer on the host (host_adamw.py):
SLICE = 1 << 21  # elements that are copied and updated at a time
SLOTS = 3  # slices on the device at a time: one comes, one is updated, one goes


class Unit:
    """Parameters and the sum of their gradients.

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


def plain_units(model: DecoderLoss, compiles: bool) -> list[Unit]:
    """The units of a model that is not sharded, in the order of the forward. A tied head is part of
    the embedding's."""
    units, taken = [], set()
    for module in (model.embed_tokens, *model.units, model.tail):
        params = [p for p in module.parameters() if p not in taken]
        taken.update(params)
        units.append(Unit(module, params, [p.numel() for p in params], compiles))
        _add_when_formed(units[-1])
    return units


def _add_when_formed(unit: Unit) -> None:
    """Let a unit add a micro-batch's gradients in the backward, once all have formed. `take_grads`
    at its end adds those of a unit that does not get all of them."""
    trained = [p for p in unit.params if p.requires_grad]

    def formed(_):
        if all(p.grad is not None for p in trained):
            unit.take_grads()

    for p in trained:
        p.register_post_accumulate_grad_hook(formed)


def sharded_units(model: FSDPModule, compiles: bool) -> list[Unit]:
    """The units of an FSDP2 model, in the order of the forward. FSDP2 hands each its gradients."""
    units = []
    for module in sorted(model.modules(), key=lambda m: not isinstance(m, Routers)):
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


def _sharded_unit(module: FSDPModule, params: list[nn.Parameter], compiles: bool) -> Unit:
    unit = Unit(module, params, shard_sizes(params), compiles)  # as FSDP2's gradients are laid out

    def add(reduced):
        unit.add([reduced])
        if reduced.is_cuda:  # FSDP2 frees it, for use on the stream that it was allocated on
            reduced.record_stream(torch.cuda.current_stream())

    module.set_all_reduce_hook(add)
    for p in params:  # summed by now: FSDP2 would keep a copy until the next step
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return unit


def shards_of(t: torch.Tensor) -> int:
    """Into how many parts a tensor is sharded, in each replica."""
    return t.device_mesh.size(t.device_mesh.ndim - 1) if isinstance(t, DTensor) else 1


def params_of(module: FSDPModule) -> list[nn.Parameter] | None:
    """The parameters that FSDP2 gathers together, without those of units within; None if FSDP2 has
    changed."""
    state = module._get_fsdp_state()
    group = getattr(state, "_fsdp_param_group", state)
    if group is None:  # it only holds other units
        return []
    return [p.sharded_param for p in group.fsdp_params] if hasattr(group, "fsdp_params") else None


def shard_sizes(params: list[nn.Parameter]) -> list[int]:
    """Elements of each parameter's part in FSDP2's transfers: that of the rank with most rows."""
    return [-(-p.shape[0] // shards_of(p)) * p.shape[1:].numel() for p in params]
