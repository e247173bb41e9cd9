"""The changes to FSDP2 that save traffic and time. Results are bit-identical on two ranks; on more,
sums run in another order.

| change | how | lost without it (bench/LOG.md; 8B unless said) |
|---|---|---|
| SumInFp32 | public hook | 9 of 465 ms; 0.6B through sockets 77 of 389, with the next row |
| cast_in_copy | private functions | 12 of 465 ms |
| add_together | private attributes, until PyTorch 2.14 | 7 of 602 ms for 0.6B with GA 8 |
| copy engines | public hooks | 22 of 424 ms |
| Scratch | public hooks, and private attributes by `params_of` | 1.2 GiB |

If this PyTorch lacks what a row needs, the log says so, and that part of FSDP2 stays as it is."""

import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from fsdp import copy_engines
from fsdp.host_adamw import UnitSum
from fsdp.sharding import SumBesideActivations, WithParts, params_of, shard_sizes, shards_of
from llm_demo.core.decoder import Blocks, Decays
from llm_demo.core.experts import Routers
from llm_demo.core.mesh import World, all_gather
from llm_demo.core.optim import add, compile_once, sum_into

try:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
except ImportError:
    collectives = None

ONE_POOL = "gathers and exchanges"  # of memory for copy engines


def reduce_traffic(
    model: FSDPModule,
    world: World,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    *,
    accumulates: bool,
    compiles: bool,
    engines: bool = False,
    reshards: bool = True,
    timed: Callable | None = None,
    units: list[UnitSum] = (),
    replicas: int = 1,
    say: Callable = print,
) -> None:
    """Modify every unit of a sharded model before its first step; say what this PyTorch does not
    support.

    Args:
        group: shards the model.
        dtype: compute dtype, bf16 or fp16.
        accumulates: a rank adds up several micro-batches' gradients before they are reduced.
        compiles: torch.compile works here.
        engines: blocks use copy engines.
        reshards: the backward gathers weights again.
        timed: with engines, CommTimer.call: it calls a function of copy_engines.
        units: those that sum gradients themselves.
        replicas: over which FSDP2 then sums the group's sums."""
    missing = {}
    # Without resharding, gathers and exchanges never overlap, so they share one buffer.
    pool = None if reshards else ONE_POOL
    sums = {unit.module: unit for unit in units}
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    modules = [m for m in modules if not isinstance(m, Routers | Decays)]  # in fp32
    # Not embedding and head: shared memory stays allocated, too much for two transfers a step
    by_engines = {m for m in modules if engines and isinstance(m, Blocks)}
    # Scratch holds one transfer at a time, which FSDP2 ensures under a single root only; blocks'
    # accumulated gradients go through FSDP2's own reduce-scatter.
    users = set(modules) - by_engines if isinstance(model, FSDPModule) else set()
    users = {m for m in users if not (accumulates and isinstance(m, Blocks | WithParts))}
    scratch = scratch_for(users, units, group, dtype, world.device, missing)
    takes_others = hasattr(FSDPModule, "set_custom_reduce_scatter")
    if not takes_others:
        missing["sending gradients in 16 bits"] = "FSDP2 takes no other transfers"
    reason = cast_in_copy()
    if reason:
        missing["casting weights while they are copied"] = reason
    for unit in modules:
        ranks = unit.group if isinstance(unit, WithParts) else group
        few = few_of_each_node(dist.get_process_group_ranks(ranks), world.local_size)
        reason = add_together(unit) if accumulates and compiles else None
        if reason:
            missing["adding a unit's gradients in one kernel"] = reason
        if few and takes_others and not accumulates:
            adds = sums.get(unit) if replicas == 1 and ranks.size() > 1 else None
            reduce_scatter = SumInFp32(
                unit,
                dtype,
                ranks,
                compiles,
                timed=timed if unit in by_engines else None,
                adds=adds,
                scratch=scratch,
                pool=pool,
            )
            unit.set_custom_reduce_scatter(reduce_scatter)
        if unit in by_engines:
            unit.set_custom_all_gather(GatherByEngines(group, timed, pool))
        elif scratch and takes_others and not isinstance(unit, Blocks | WithParts):
            unit.set_custom_all_gather(GatherIntoScratch(scratch))
    for what, why in missing.items():
        say(f"fsdp: not {what}: {why}")


def scratch_for(users, units: list[UnitSum], group, dtype, device, missing: dict):
    """A Scratch for the longest transfer of the modules `users` by NCCL, or None."""
    params = [params_of(m) for m in users]
    if None in params:
        missing["sharing memory between transfers"] = "FSDP2 has changed"
    elif group.size() > 1 and any(params):  # a single rank's gradients don't pass a reduce-scatter
        lengths = [sum(shard_sizes(p)) * shards_of(p[0]) for p in params if p]
        # a stand-in for a unit's sum has its length
        return Scratch(max([*lengths, *(unit.length for unit in units)]), dtype, device)
    return None


def few_of_each_node(ranks: list[int], local_size: int) -> bool:
    """Whether ranks are all of one node, or at most two of each. local_size: ranks of a node.

    Between nodes, an all-to-all sends from every GPU to every GPU, but a ring only one sum from
    node to node. With more than two GPUs per node the ring sends less."""
    of_node = Counter(rank // local_size for rank in ranks)
    return len(of_node) == 1 or max(of_node.values()) <= 2


class Scratch:
    """Device memory for one transfer at a time. The allocator keeps a pool per stream, so buffers
    of the gathers and of the reductions of embedding and head would each add to the peak."""

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device):
        self.memory, self.read = torch.empty(length, dtype=dtype, device=device), None
        self.device = torch.get_device_module(device)

    def take(self, length: int) -> torch.Tensor:
        """The first elements, for the current stream, once what `done` marked has ended."""
        if self.read:
            self.device.current_stream().wait_event(self.read)
        return self.memory[:length]

    def done(self) -> None:
        """Mark the end of a reduction on the current stream. Not needed after a gather: FSDP2
        itself makes the next gather and the next reduction wait for its copies."""
        self.read = self.device.current_stream().record_event()


class GatherIntoScratch:
    """FSDP2's all-gathers of embedding and head. FSDP2 copies their results before the next
    transfer into this memory. In a backward that is not the step's last it gathers the root ahead,
    which also comes first in the next forward."""

    def __init__(self, scratch: Scratch):
        self.scratch = scratch

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.scratch.take(math.prod(size))

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class GatherByEngines:
    """FSDP2's all-gathers with the GPUs' copy engines."""

    def __init__(self, group: dist.ProcessGroup, timed: Callable, pool: str | None):
        self.group, self.timed, self.pool = group, timed, pool

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return copy_engines.shared_empty(math.prod(size), dtype, device, self.group, self.pool)

    def __call__(self, output_tensor, input_tensor, group, async_op=False) -> None:
        # the input is part of the output
        self.timed("all_gather", copy_engines.all_gather, output_tensor, group=self.group)


def ignore_sum(reduced: torch.Tensor) -> None:
    """In place of a unit's own hook for the sum of its gradients, which UnitSum has already."""


class SumInFp32(SumBesideActivations):
    """A reduce-scatter that sends gradients in their own dtype and sums them in fp32.

    FSDP2 casts bf16 gradients to fp32 and lets the collective add those: the same sums for twice
    the bytes. Only for gradients of one micro-batch; accumulated gradients are already fp32.

    Args:
        unit: as FSDP2 knows it.
        timed: of reduce_traffic, if copy engines exchange the gradients.
        adds: adds gradients to its sum, and FSDP2 gets none.
        scratch: for what NCCL receives. pool: for what copy engines send."""

    def __init__(
        self,
        unit: FSDPModule,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        compiles: bool,
        timed: Callable | None = None,
        adds: UnitSum | None = None,
        scratch: Scratch | None = None,
        pool: str | None = None,
    ):
        super().__init__(unit)
        self.dtype, self.group, self.timed = dtype, group, timed
        self.adds, self.scratch, self.pool = adds, scratch, pool
        self.sum = compile_once(sum_into) if compiles else sum_into
        if adds:
            adds.module.set_all_reduce_hook(ignore_sum)

    def allocate_input(self, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.timed:
            return copy_engines.shared_empty(n, self.dtype, device, self.group, self.pool)
        return super().allocate_input(n, self.dtype, device)

    def allocate_sum(self, n: int, dtype: torch.dtype, device: torch.device, stream, params):
        if self.adds:  # a stand-in, which nobody reads; PyTorch 2.15 keeps it for a while
            return self.scratch.memory[:n]
        return super().allocate_sum(n, dtype, device, stream, params)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        wanted = self.dtype if self.adds else torch.float32
        asked = input_tensor.dtype, output_tensor.dtype, op, async_op
        if asked != (self.dtype, wanted, dist.ReduceOp.SUM, False):
            raise RuntimeError(f"FSDP2 asks for another reduction than configured: {asked}")
        # this rank's part from each rank
        if self.timed:
            exchange = copy_engines.all_to_all
            parts = self.timed("all_to_all", exchange, input_tensor, group=self.group)
        else:
            n = input_tensor.numel()
            received = self.scratch.take(n) if self.scratch else torch.empty_like(input_tensor)
            dist.all_to_all_single(received, input_tensor, group=group)
            parts = received.chunk(group.size())
        if self.adds:
            self.adds.add(parts)
        else:
            self.sum(output_tensor, parts)
        if self.scratch and not self.timed:
            self.scratch.done()


def cast_in_copy() -> str | None:
    """Skip FSDP2's separate cast of a unit's fp32 shards: the copy into the gather's input can
    cast. Replaces two private functions for all units at once; returns the reason if it can't.

    A unit stays unmodified if its parameters differ in dtype, are offloaded, are resharded to fewer
    ranks after the forward, or have their own gather (fsdp_pre_all_gather)."""
    inputs_of = getattr(collectives, "_get_param_all_gather_inputs", None)
    describe = getattr(collectives, "_get_all_gather_input_metadatas", None)
    if not (inputs_of and describe):
        return "FSDP2 has no such function"
    if getattr(inputs_of, "casts_later", False):
        return None
    one, source = torch.empty(1), inspect.getsource(collectives.FSDPParam)
    wants = [*inspect.signature(inputs_of).parameters, *inspect.signature(describe).parameters]
    used = ("param_dtype", "offload_to_cpu", "sharded_state", "_sharded_param_data")
    if (
        wants != ["fsdp_params", "param_all_gather_inputs"]
        or describe([[one]]) != ([[one.dtype]], [[1]], one.dtype)
        or not all(f"self.{name}" in source for name in used)
        or not hasattr(collectives, "ShardedState")
    ):
        return "FSDP2's functions have changed"
    cast_to, plain = None, weakref.WeakKeyDictionary()  # by a unit's first parameter: its dtype

    def uncast(params):
        nonlocal cast_to
        first = params[0]
        if first not in plain:  # once per unit: hundreds of parameters take a millisecond
            alike = all(
                p.param_dtype == first.param_dtype
                and not p.offload_to_cpu
                and not hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather")
                for p in params
            )
            plain[first] = first.param_dtype if alike else None
        sharded = first.sharded_state == collectives.ShardedState.SHARDED
        cast_to = plain[first] if sharded else None
        return [[p._sharded_param_data] for p in params] if cast_to else inputs_of(params)

    def described(inputs):
        if not cast_to:
            return describe(inputs)
        return [[cast_to] for _ in inputs], [[t.numel()] for (t,) in inputs], cast_to

    uncast.casts_later = True
    collectives._get_param_all_gather_inputs = uncast
    collectives._get_all_gather_input_metadatas = described
    return None


def autograd_accumulates() -> bool:
    """Whether FSDP2 leaves accumulation to autograd, which adds in the dtype of the reduction. It
    does from PyTorch 2.15 on. The sum of a unit's gradients is then the gradient itself."""
    kind = getattr(collectives, "FSDPParam", None)
    return isinstance(getattr(kind, "unsharded_accumulated_grad", None), property)


def add_together(unit: FSDPModule) -> str | None:
    """Add a unit's gradients to their fp32 sums in one kernel; FSDP2 adds them one by one at half
    the memory bandwidth. Uses private attributes; returns the reason if they differ."""
    group = getattr(unit._get_fsdp_state(), "_fsdp_param_group", None)
    post_backward = getattr(group, "post_backward", None)
    if autograd_accumulates():
        return "FSDP2 leaves it to autograd"
    if not post_backward:
        return "FSDP2 has no post_backward to hook"
    if not all(hasattr(p, "unsharded_accumulated_grad") for p in group.fsdp_params):
        return "FSDP2 keeps its sums elsewhere"

    def add_first(*unused):
        both = [p for p in group.fsdp_params if p.unsharded_accumulated_grad is not None]
        both = [p for p in both if p._unsharded_param.grad is not None]
        if both:
            sums = [p.unsharded_accumulated_grad for p in both]
            compile_once(add)(sums, [p._unsharded_param.grad for p in both])
        for p in both:
            p._unsharded_param.grad = None
        post_backward(*unused)

    group.post_backward = add_first
    return None
