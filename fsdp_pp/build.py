"""Builds the pieces of the model that a stage holds: made, sharded, filled with weights."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from fsdp.sharding import Shards, precision, shard_units, sum_not_average
from fsdp_pp.orders import stages_of
from llm_demo.core.decoder import (
    DecoderLoss,
    allocate,
    blocks_with_experts,
    experts_in,
    fill,
    kept_in_fp32,
    make_units,
    router_in,
)
from llm_demo.core.errors import UserError
from llm_demo.core.experts import keep_part
from llm_demo.core.masters import Masters
from llm_demo.core.mesh import SHARD, SPLIT, STAGE, World, make_mesh, make_part_mesh
from llm_demo.core.rows import Slice
from llm_demo.flags.args import Args
from llm_demo.machine.dist import timeout
from llm_demo.model.costs import unit_sizes
from llm_demo.model.weights_files import Weights, loading
from llm_demo.run.choices import Compute, adapted, compiles_adamw, sizes_in_words
from llm_demo.run.log import Log
from llm_demo.run.plan import Plan
from llm_demo.run.saver import Saver


class StageLayout(NamedTuple):
    """The ranks of a run: stages, and the shards of each."""

    where: list[int]  # the stage of each piece of the model
    n_shards: int  # of a stage
    stage: int  # of this rank
    shard: int
    ranks: torch.Tensor  # [stages, n_shards]
    grid: DeviceMesh  # the same
    part: Slice  # the slice of each row that this rank holds
    data_parallel: int  # ranks of a stage, or groups of them with slices of the same rows
    shares: DeviceMesh | None  # of a stage: shares of each matrix x their shards
    experts: DeviceMesh | None  # of a stage: parts of each block's experts x their shards

    @property
    def dp_rank(self) -> int:
        return self.shard // self.part.count


def stage_layout(args: Args, world: World) -> StageLayout:
    """What the flags mean for this number of ranks. Collective."""
    n_shards = world.size // args.stages
    stage, shard = divmod(world.rank, n_shards)
    grid = make_mesh(world, **{STAGE: args.stages, SHARD: n_shards})
    shares = experts = None
    if args.tensor_parallel > 1:
        shares = make_part_mesh(world, args.tensor_parallel, args.stages)
    if (args.expert_parallel or 1) > 1:
        experts = make_part_mesh(world, args.expert_parallel, args.stages)
    return StageLayout(
        where=stages_of(args.schedule, args.stages),
        n_shards=n_shards,
        stage=stage,
        shard=shard,
        ranks=torch.arange(world.size).view(args.stages, n_shards),
        grid=grid,
        part=Slice(shard % args.tensor_parallel, args.tensor_parallel),
        data_parallel=n_shards // args.tensor_parallel,
        shares=shares,
        experts=experts,
    )


def refuse_bare_stages(args: Args, plan: Plan, where: list[int], counts: list[int]) -> None:
    """Raise UserError if a stage has no matrix with an adapter, and so nothing to train. where: the
    stage of each piece. counts: blocks of each piece."""
    from llm_demo.model.adapters import matrices_in
    from llm_demo.options.lora import target_of

    adapted_blocks = set()
    for name in matrices_in(plan.source.config):
        if target_of(name) in plan.compute.lora.targets:
            adapted_blocks.add(int(name.split(".")[2]))  # of model.layers.N
    bare, first_block = {*where}, 0
    for stage, count in zip(where, counts, strict=True):
        if adapted_blocks & {*range(first_block, first_block + count)}:
            bare.discard(stage)
        first_block += count
    if bare:
        raise UserError(
            f"--lora_targets {args.lora_targets[:80]}: stage {min(bare)} has no such layer, so "
            "nothing to train: choose more layers, fewer --stages, or another --partition"
        )


def build_pieces(
    args: Args,
    plan: Plan,
    layout: StageLayout,
    counts: list[int],
    world: World,
    saver: Saver,
    log: Log,
) -> tuple["Pieces", Shards | Masters, bool]:
    """Build the pieces of this rank's stage, and nothing else. Returns (pieces, what is optimized,
    whether AdamW is compiled). counts: blocks of each piece of the model."""
    weights, compute = plan.source.weights, plan.compute
    sharded, in_16_bits = layout.n_shards > 1, compute.dtype != torch.float32
    has_masters = in_16_bits and not sharded
    lm, n_params, n_trained = adapted(args, plan.source, compute, world, saver, log)
    if layout.experts:
        experts = [experts_in(block) for block in blocks_with_experts(lm)]
        keep_part(lm, experts, layout.experts)
    if layout.shares:
        from llm_demo.options.tensor import keep_share

        keep_share(lm, layout.shares)
    compiled = log.decided(compiles_adamw(compute.compile, n_trained, world.size, has_masters))
    with loading(weights, world.size):
        pieces = Pieces(lm, args, compute, counts, layout)
        if sharded:
            pieces.shard(compute.dtype, args.reshard_after_forward, layout.grid[SHARD])
        if sharded and in_16_bits:
            from fsdp.fsdp2 import reduce_traffic

            reduce_traffic(
                pieces,
                world,
                layout.grid[SHARD].get_group(),
                compute.dtype,
                accumulates=args.grad_accum_steps > 1,
                compiles=compute.compile,
                say=log.say,
            )
        pieces.load(weights, args.seed, world.device)
        if has_masters:
            units = [unit for piece in pieces.values() for unit in piece.units]
            units += [piece.tail for piece in pieces.values() if piece.tail]
            optimized = Masters(
                pieces,
                units=units,
                dtype=compute.dtype,
                accumulates=args.grad_accum_steps > 1,
                compiled=compiled,
                in_fp32=kept_in_fp32(pieces),
            )
        else:
            optimized = Shards(pieces)
    n_local = sum(p.numel() for p in optimized.params)
    sizes = sizes_in_words(n_params, n_trained if compute.lora else None, n_local)
    log.say(f"{log.settings['parallelism']}: {sizes}")
    return pieces, optimized, compiled


class Pieces(nn.ModuleDict):
    """{number: DecoderLoss} of a stage, in the order of the forward.

    counts: blocks of each piece of the model."""

    def __init__(
        self,
        lm: PreTrainedModel,
        args: Args,
        compute: Compute,
        counts: list[int],
        layout: StageLayout,
    ):
        super().__init__()
        self.lm, self.names = (lm,), []  # a tuple hides the whole model from nn.Module
        if lm.config.tie_word_embeddings:  # two parameters, each in a unit of its own: see TiedEnds
            weight = lm.lm_head.weight
            lm.lm_head.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
        last, first_block = len(counts) - 1, 0
        for number, count in enumerate(counts):
            if layout.where[number] == layout.stage:
                units = make_units(
                    lm.model.layers[first_block:],
                    unit_sizes(lm.config, count, args.blocks_per_unit, first_block),
                    checkpointing=args.use_activation_checkpointing,
                    budget=args.activation_memory_budget if compute.compile else None,
                )
                if compute.lora:
                    from fsdp.pieces import use_pieces

                    for unit in units:
                        use_pieces(unit)
                self[str(number)] = DecoderLoss(
                    lm, units, compute.compile, first=number == 0, last=number == last
                )
                if number == 0:
                    self.names.append("model.embed_tokens")
                blocks = range(first_block, first_block + count)
                self.names += [f"model.layers.{i}" for i in blocks]
                if number == last:
                    self.names += ["model.norm", "lm_head"]
            first_block += count
        # of this stage, and of the whole model
        self.routers = [piece.routers for piece in self.values() if piece.routers]
        self.gates = [router_in(block) for block in blocks_with_experts(lm)]
        if args.freeze_router:
            for routers in self.routers:
                routers.requires_grad_(False)
        for piece in self.values():
            if piece.tail and layout.shares:
                piece.tail.group = layout.shares.get_group(SPLIT)

    def shard(self, dtype: torch.dtype, reshard: bool, mesh: DeviceMesh) -> None:
        """Shard each unit with FSDP2 over a mesh; embedding and head are units of their own."""
        policy = precision(dtype)
        for piece in self.values():
            shard_units(piece, mesh=mesh, mp_policy=policy, reshard=reshard)
            for end in (piece.tail, piece):
                if end:
                    fully_shard(end, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        sum_not_average(self)

    def load(self, weights: Weights | None, seed: int, device: torch.device) -> None:
        """Allocate and fill this rank's part. The tied head is a copy of the embedding."""
        lm = self.lm[0]
        embedding, head = lm.model.embed_tokens, lm.lm_head
        allocate(self, device)
        for name in self.names:
            if name != "lm_head" or not lm.config.tie_word_embeddings:
                fill(lm, name, weights, seed)
                continue
            weight, embedding.weight = embedding.weight, head.weight
            fill(lm, "model.embed_tokens", weights, seed)
            embedding.weight = weight

    def tied(self) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """The embedding's weight and the head's copy of it, if they are here, tied and trained."""
        lm = self.lm[0]
        if not (lm.config.tie_word_embeddings and lm.lm_head.weight.requires_grad):
            return None, None
        embedding, head = "model.embed_tokens" in self.names, "lm_head" in self.names
        return (
            lm.model.embed_tokens.weight if embedding else None,
            lm.lm_head.weight if head else None,
        )

    def take_load(self, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
        """Routers.take_load for the whole model, on every rank. group: the ranks of this stage."""
        total = torch.zeros(
            len(self.gates), self.gates[0].num_experts, dtype=torch.int64, device=device
        )
        for routers in self.routers:
            load = routers.take_load(group)
            if group.rank() == 0:
                total[[self.gates.index(router) for router in routers.routers]] = load
        dist.all_reduce(total)
        return total


class TiedEnds:
    """Tied embeddings in a pipeline: the head is a copy of the embedding, on the last stage or,
    where both ends of the model are on one stage, beside it. Both copies take the same steps.

    Args:
        embedding, head: their weights, None for what is not here or not tied.
        optimized: Shards or Masters with the parameters of this stage.
        group: the ranks with this shard of either copy; None if untied."""

    def __init__(
        self,
        embedding: nn.Parameter | None,
        head: nn.Parameter | None,
        optimized: Shards | Masters,
        group: dist.ProcessGroup | None,
    ):
        self.embedding, self.head, self.optimized, self.group = embedding, head, optimized, group
        self.both = embedding is not None and head is not None

    def sum_gradients(self) -> None:
        """Give each copy the sum of both gradients."""
        ends = [p for p in (self.embedding, self.head) if p is not None]
        grads = [self.optimized.grad_of(p) for p in ends]
        if self.both:
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])
        elif ends:
            dist.all_reduce(grads[0], group=self.group)

    def counted_once(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients for the norm, without the head's, which equals the embedding's."""
        if self.head is None:
            return grads
        copy = self.optimized.grad_of(self.head)
        return [g for g in grads if not (g.numel() and g.data_ptr() == copy.data_ptr())]

    def saved(self, optimizer: torch.optim.AdamW) -> Iterator[tuple]:
        """What a checkpoint holds of this stage: `optimized.views` without the copy."""
        return (view for view in self.optimized.views(optimizer) if view[0] is not self.head)

    def loaded(self, optimizer: torch.optim.AdamW) -> Iterator[tuple]:
        """What is to be filled from a checkpoint: the copy too if the embedding is elsewhere."""
        return self.saved(optimizer) if self.both else self.optimized.views(optimizer)

    @torch.no_grad()
    def copy(self, optimizer: torch.optim.AdamW) -> None:
        """After loading: the master and the moments of a copy beside its embedding."""
        if self.both:
            views = {view[0]: view[1:] for view in self.optimized.views(optimizer)}
            for ours, theirs in zip(views[self.head], views[self.embedding], strict=True):
                ours.copy_(theirs)


def tied_group(first: list[int], last: list[int], shard: int) -> dist.ProcessGroup:
    """The ranks that have the same shard of the embedding and of its copy. first, last: ranks of
    the stages with either, by shard. Every rank calls."""
    pairs = zip(first, last, strict=True)
    groups = [dist.new_group(sorted({*pair}), timeout=timeout()) for pair in pairs]
    return groups[shard]
