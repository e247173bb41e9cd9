"""Which ranks have copies, shards and slices of rows."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from llm_demo.core.errors import UserError
from llm_demo.core.mesh import REPLICA, SHARD, World, make_mesh
from llm_demo.core.rows import Part
from llm_demo.job.args import Args


class Layout(NamedTuple):
    """The ranks of a run. sharded: with FSDP2."""

    sharded: bool
    replicas: int
    n_shards: int  # of a replica
    part: Part  # the slice of each row that this rank holds
    data_parallel: int  # ranks, or groups with slices of the same rows
    dp_rank: int
    grid: DeviceMesh  # all ranks
    mesh: DeviceMesh  # what FSDP2 shards and sums over: the grid, or a replica if PowerSGD does
    spread: int = 1  # ranks that each block's experts are spread over

    @property
    def group(self) -> ProcessGroup:
        """The ranks with shards of one copy."""
        return self.grid[SHARD].get_group()


def layout_of(args: Args, world: World) -> Layout:
    """What the flags mean for this number of ranks. Collective."""
    replicas = world.size if args.replicas == "all" else int(args.replicas)
    part = Part(world.rank % args.sequence_parallel, args.sequence_parallel)
    n_shards = world.size // replicas
    grid = make_mesh(world, **{REPLICA: replicas, SHARD: n_shards})
    mesh = grid[SHARD] if replicas > 1 and args.psgd_rank else grid
    sharded = args.fsdp
    if sharded is None:
        sharded = world.size > 1 or args.reshard_after_forward
    over = world.size // part.of, world.rank // part.of
    return Layout(sharded, replicas, n_shards, part, *over, grid, mesh)


def refuse_plan(args: Args, layout: Layout, plan) -> None:
    """Raise UserError for what contradicts the plan: its dtype, or its rows."""
    low, seq_len = plan.compute.dtype != torch.float32, plan.data.train.seq_len
    if seq_len % layout.part.of:
        raise UserError(
            f"--sequence_parallel {layout.part.of} does not divide {seq_len}, the tokens of a row: "
            "set --seq_len"
        )
    if args.psgd_rank and plan.compute.dtype == torch.float16:
        raise UserError("--psgd_rank does not work in fp16, which is the default on this GPU")
    if args.copy_engines and not (layout.sharded and low):
        raise UserError("--copy_engines requires FSDP with --dtype bf16 or fp16")


def describe(layout: Layout, args: Args, world: World, say: Callable) -> str:
    """The kind of parallelism in a few words. Warns of rows that are spread over nodes."""
    name = "FSDP2" if layout.sharded else "one process"
    if layout.replicas > 1:
        name = f"FSDP2 with {layout.replicas} replicas"
        if args.psgd_rank:
            name += f", PowerSGD of rank {args.psgd_rank}"
    n = layout.part.of
    if n > 1:
        name += f", rows spread over {n} ranks"
        if world.local_size % n:
            say("warning: rows are spread over nodes, whose network every block then waits for")
    return name


def from_owners(tokens: torch.Tensor, here: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """int64 [n] on every rank of a group, of which each has those that are `here`, bool [n]."""
    merged = torch.zeros(len(here), dtype=tokens.dtype, device=tokens.device)
    merged[here.nonzero().squeeze(1).to(tokens.device)] = tokens
    dist.all_reduce(merged, group=group)
    return merged
