"""Which ranks hold what, FSDP2's settings for exact numbers, a rank's part of each parameter."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from llm_demo.core.decoder import DecoderLoss, kept_in_fp32
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import REPLICA, SHARD, World, local_part, make_mesh, on_device
from llm_demo.core.optim import MOMENTS
from llm_demo.core.rows import Slice
from llm_demo.flags.args import Args
from llm_demo.model.costs import refuse_shares


class Optimized(Protocol):
    """What is optimized and checkpointed: a Shards, core's Masters or a HostAdamW, which is its own
    optimizer. The others `follow` one."""

    model_params: list[nn.Parameter]
    params: list[nn.Parameter]  # what the optimizer updates, in that order

    def take_grads(self, last: bool) -> None:
        """Called after each micro-batch."""

    def grads(self) -> list[torch.Tensor]:
        """This rank's part of the step's gradients."""

    def views(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple]:
        """(parameter, its fp32 master, *MOMENTS of it) of each parameter, for a checkpoint."""

    def store(self, masters: dict[nn.Parameter, torch.Tensor]) -> None:
        """Called with the masters of a checkpoint that was loaded."""


class Layout(NamedTuple):
    """The ranks of a run. sharded: with FSDP2."""

    sharded: bool
    replicas: int
    n_shards: int  # of a replica
    part: Slice  # the slice of each row that this rank holds
    data_parallel: int  # ranks, or groups with slices of the same rows
    dp_rank: int
    grid: DeviceMesh  # all ranks
    mesh: DeviceMesh  # what FSDP2 sums over: the grid; one replica if PowerSGD sums over replicas
    expert_parallel: int = 1  # ranks that each block's experts are spread over
    tensor_parallel: int = 1  # ranks with shares of each matrix, which hold slices of the same rows

    @property
    def group(self) -> ProcessGroup:
        """The ranks with shards of one copy."""
        return self.grid[SHARD].get_group()


def layout_of(args: Args, world: World) -> Layout:
    """What the flags mean for this number of ranks. Collective."""
    replicas = world.size if args.replicas == "all" else int(args.replicas)
    n = args.sequence_parallel * args.tensor_parallel  # one of them is 1
    part = Slice(world.rank % n, n)
    n_shards = world.size // replicas
    grid = make_mesh(world, **{REPLICA: replicas, SHARD: n_shards})
    mesh = grid[SHARD] if replicas > 1 and args.psgd_rank else grid
    sharded = args.fsdp
    if sharded is None:
        sharded = world.size > 1 or args.reshard_after_forward
    return Layout(
        sharded=sharded,
        replicas=replicas,
        n_shards=n_shards,
        part=part,
        data_parallel=world.size // n,
        dp_rank=world.rank // n,
        grid=grid,
        mesh=mesh,
        tensor_parallel=args.tensor_parallel,
    )


def refuse_plan(args: Args, layout: Layout, plan) -> None:
    """Raise UserError for what contradicts the plan: its dtype, or its rows."""
    refuse_slices(args, plan.data.train.seq_len, layout.part.count)
    refuse_shares(plan.source.config, args.tensor_parallel)
    if args.psgd_rank and plan.compute.dtype == torch.float16:
        raise UserError("--psgd_rank does not work in fp16, which is the default on this GPU")
    if args.copy_engines and not (layout.sharded and plan.compute.dtype != torch.float32):
        raise UserError("--copy_engines requires FSDP with --dtype bf16 or fp16")


def refuse_slices(args: Args, seq_len: int, n: int) -> None:
    """Raise UserError if a row can't be cut into n equal slices."""
    if seq_len % n:
        flag = "tensor_parallel" if args.tensor_parallel > 1 else "sequence_parallel"
        raise UserError(
            f"--{flag} {n} does not divide {seq_len}, the tokens of a row: set --seq_len"
        )


def parallelism_of(layout: Layout, args: Args, world: World, say: Callable) -> str:
    """The kind of parallelism in a few words. Warns of rows that are spread over nodes."""
    name = "FSDP2" if layout.sharded else "one process"
    if layout.replicas > 1:
        name = f"FSDP2 with {layout.replicas} replicas"
        if args.psgd_rank:
            name += f", PowerSGD of rank {args.psgd_rank}"
    n = layout.part.count
    if n > 1:
        how = "tensor parallel" if layout.tensor_parallel > 1 else "rows spread"
        name += f", {how} over {n} ranks"
        if world.local_size % n:
            say(f"warning: {how} over several nodes, whose network every block then waits for")
    if layout.tensor_parallel > 1:
        say("tensor parallel: for wide layers and less memory; slower if FSDP2 fits, see docs/")
    return name


def from_owners(tokens: torch.Tensor, here: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All tokens, int64 [n], on every rank of a group. Each rank has those that are `here`, bool
    [n]."""
    merged = torch.zeros(len(here), dtype=tokens.dtype, device=tokens.device)
    merged[here.nonzero().squeeze(1).to(tokens.device)] = tokens
    dist.all_reduce(merged, group=group)
    return merged


# ---------------------------------------------------------------- FSDP2


def precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Compute in `dtype`. fp32 shards are the masters; gradients are summed over ranks and
    micro-batches in fp32."""
    if dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        # they are in `dtype`, or rotary tables of OLMo, in fp32 as in transformers
        cast_forward_inputs=False,
    )


class WithParts(nn.Module):
    """The modules of a sharded unit of blocks that hold parts of matrices: a unit of their own for
    FSDP2. The modules also stay in their blocks. group: the ranks with shards of these parts."""

    def __init__(self, unit: nn.Module, modules: list[nn.Module], group: ProcessGroup):
        super().__init__()
        self.unit, self.parts, self.group = unit, nn.ModuleList(modules), group

    def forward(self, *inputs):
        return self.unit(*inputs)


def shard_units(model: DecoderLoss, mesh: DeviceMesh, mp_policy, reshard: bool) -> None:
    """Shard each unit of blocks with FSDP2 over a mesh, and before them routers and decays, if
    there are any: fp32 in every dtype, gathered before the first block. Parts of matrices, see
    mesh.keep_parts, are sharded over the ranks with the same. mp_policy: of `precision`."""
    for of_many in filter(None, (model.routers, model.decays)):
        others = set(of_many.parameters()) - kept_in_fp32(model)
        fully_shard(of_many, mesh=mesh, reshard_after_forward=False, ignored_params=others)
    kept = kept_in_fp32(model)
    for i, unit in enumerate(model.units):
        of_grid = {}
        for module in unit.modules():
            if hasattr(module, "cut"):
                of_grid.setdefault(module.grid, []).append(module)
        cut = {grid: {getattr(m, key) for m in of_grid[grid] for key in m.cut} for grid in of_grid}
        fully_shard(
            unit,
            mesh=mesh,
            ignored_params=kept.union(*cut.values()),
            mp_policy=mp_policy,
            reshard_after_forward=reshard,
        )
        for grid, modules in of_grid.items():
            shards = grid[SHARD]
            model.units[i] = WithParts(model.units[i], modules, shards.get_group())
            others = set(unit.parameters()) - cut[grid]  # new ones, where they are sharded
            fully_shard(
                model.units[i],
                mesh=shards,
                ignored_params=others,
                mp_policy=mp_policy,
                reshard_after_forward=reshard,
            )


class SumBesideActivations:
    """FSDP2's own reduce-scatter of a unit, but sums over ranks take memory of the stream that
    computes.

    FSDP2 allocates them on another stream, and the allocator keeps a pool for each. In the backward
    that pool grows by all gradients while activations leave theirs, and the device must hold both:
    15 GiB more for 8B on two GPUs (bench/LOG.md). FSDP2's stream has just waited for that one, so
    nothing uses that memory any more, and the sum lasts until the optimizer's step; UnitSum, which
    adds it at once, holds it back by record_stream. The sum of a later micro-batch is freed once it
    is added, while FSDP2's stream may still read it, so it comes from that stream's pool."""

    def __init__(self, unit: FSDPModule):
        self.unit = unit
        self.sent = None  # (elements, stream) of the input, until its sum is allocated

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2 calls this twice for each reduction: for what it sends, then, on its own stream,
        for the sum. Raises RuntimeError if the second is not a rank's part of the first."""
        n = math.prod(size)
        if self.sent is None:
            self.sent = n, torch.get_device_module(device).current_stream()
            return self.allocate_input(n, dtype, device)
        (sent, stream), self.sent = self.sent, None
        params = params_of(self.unit)
        if params and sent != n * shards_of(params[0]):
            raise RuntimeError(f"FSDP2 sums {sent} elements into {n}, over other ranks than known")
        return self.allocate_sum(n, dtype, device, stream, params)

    def allocate_input(self, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the n elements that are sent."""
        return torch.empty(n, dtype=dtype, device=device)

    def allocate_sum(self, n: int, dtype: torch.dtype, device: torch.device, stream, params):
        """Memory for a sum of n elements. stream: which computes. params: of `params_of`."""
        if params is None or any(p.grad is not None for p in params):  # it is added and freed
            return torch.empty(n, dtype=dtype, device=device)
        with torch.get_device_module(device).stream(stream):
            return torch.empty(n, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        # PyTorch 2.13 renamed it
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def sum_not_average(model: nn.Module) -> None:
    """Have FSDP2 sum gradients over ranks, because the loss is already divided by the step's token
    count. By default it averages or sums, depending on backend and version."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):  # each unit: the settings do not reach nested units
            unit.set_gradient_divide_factor(1.0)
            if hasattr(unit, "set_force_sum_reduction_for_comms"):
                # gloo lacks the operation used otherwise
                unit.set_force_sum_reduction_for_comms(True)
            if hasattr(unit, "set_custom_reduce_scatter"):
                unit.set_custom_reduce_scatter(SumBesideActivations(unit))


def set_sync(model: FSDPModule, reshard_after_forward: bool, last: bool, every: bool) -> None:
    """Tell FSDP2 what the next backward does. It sums its gradients over ranks if it is the step's
    `last`, or if `every` backward does so; else it adds them to this rank's. Weights stay gathered
    until the next micro-batch if memory allows."""
    settings = last or every, last or reshard_after_forward, last
    if getattr(model, "fsdp_settings", None) == settings:
        return  # each call below would go through all modules
    model.fsdp_settings = settings
    model.set_requires_gradient_sync(last or every)
    # else FSDP2 expects the next backward to go through the units of all forwards since the last,
    # and gathers the head again during the embedding's backward
    model.set_is_last_backward(last or every)
    model.set_reshard_after_backward(last or reshard_after_forward)
    for of_many in filter(None, (getattr(model, name, None) for name in ("routers", "decays"))):
        # a pipeline's next backward needs them: without outputs, nothing gathers them again
        of_many.set_reshard_after_backward(last, recurse=False)


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


# ---------------------------------------------------------------- this rank's part


class Shards:
    """The parameters themselves, fp32, as plain ones that share their memory.

    With DTensors an optimizer spends more host time on dispatch than the GPU spends on the step."""

    def __init__(self, model: nn.Module):
        self.model_params = [p for p in model.parameters() if p.requires_grad]
        self.params = [nn.Parameter(local_part(p)) for p in self.model_params]

    @torch.no_grad()  # else each to_local() is an autograd function: 2 ms per step
    def take_grads(self, last: bool) -> None:
        """Move the gradients of the step, which FSDP2 or autograd has summed, after its last
        micro-batch."""
        if last:
            for whole, p in zip(self.model_params, self.params, strict=True):
                p.grad, whole.grad = local_part(whole.grad), None

    def grads(self) -> list[torch.Tensor]:
        """This rank's part of the gradients of `model_params`, fp32."""
        return [p.grad for p in self.params]

    def grad_of(self, p: nn.Parameter) -> torch.Tensor:
        """This rank's part of a parameter's gradient, in place."""
        pairs = zip(self.model_params, self.params, strict=True)
        return next(shard.grad for whole, shard in pairs if whole is p)

    def follow(self, optimizer: torch.optim.AdamW) -> None:
        """Nothing to do: the optimizer of `params` updates the model."""

    def views(self, optimizer: torch.optim.AdamW) -> Iterator[tuple]:
        """(parameter, its fp32 master, *MOMENTS of it) of each parameter, in place."""
        return adam_views(list(zip(self.model_params, self.params, strict=True)), optimizer)

    def store(self, masters: dict[nn.Parameter, torch.Tensor]) -> None:
        """Nothing to do: `views` are in place."""


def not_optimized(model: nn.Module) -> list[torch.Tensor]:
    """What else belongs to the weights: frozen parameters, and buffers that files hold."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return frozen + [b for b in model.buffers() if hasattr(b, "hf_name")]


def training_state(views, optimizer, mesh, low_rank, fixed=()) -> dict[str, torch.Tensor]:
    """{Hugging Face name: fp32 master, name.exp_avg: ..., name.exp_avg_sq: ...}, in place and
    sharded like the parameters, and what LowRank keeps. views: as `adam_views`. mesh: of all
    ranks, on the device of these tensors. fixed: as of not_optimized."""
    state = {}
    for p, *tensors in [*views(optimizer), *((p, local_part(p)) for p in fixed)]:
        for key, t in zip(("", *(f".{k}" for k in MOMENTS)), tensors, strict=False):
            if isinstance(p, DTensor):
                t = on_grid(t, p, mesh)
            state[p.hf_name + key] = t
    return state | (low_rank.state() if low_rank else {})


def on_grid(local: torch.Tensor, like: DTensor, grid: DeviceMesh) -> DTensor:
    """A tensor sharded like another, described on the grid of all ranks: so every rank names the
    same mesh, even if `like` is on that of its replica. local: this rank's part. like.cut: the
    dimension that like.grid cuts into parts, if any."""
    grid = on_device(grid, local.device.type)
    shape, placements = like.shape, [Replicate()] * (grid.ndim - len(like.placements))
    placements += like.placements
    cut = getattr(like, "cut", None)
    if cut is not None:
        grid, placements = on_device(like.grid, local.device.type), [Shard(cut), Shard(0)]
        shape = torch.Size(n * (grid.size(0) if i == cut else 1) for i, n in enumerate(like.shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, grid, placements, shape=shape, stride=stride)


def adam_views(pairs: list[tuple], optimizer: torch.optim.AdamW) -> Iterator[tuple]:
    """Yield (parameter, its fp32 master, *its MOMENTS) for each of `pairs`, (parameter, master)."""
    for p, master in pairs:
        yield p, master.detach(), *(optimizer.state[master][name] for name in MOMENTS)
