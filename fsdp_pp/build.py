"""Builds the pieces of the model that a stage holds: made, sharded, filled with weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp.fsdp2 import reduce_traffic
from fsdp.sharding import Shards, precision, shard_units, sum_not_average
from llm_demo.core.decoder import DecoderLoss, allocate, fill, make_units
from llm_demo.core.experts import blocks_with_experts, keep_part, kept_in_fp32
from llm_demo.core.masters import Masters
from llm_demo.core.mesh import SHARD, SPLIT
from llm_demo.machine.dist import timeout
from llm_demo.model.costs import param_count, unit_sizes
from llm_demo.model.weights_files import loading
from llm_demo.options.tensor import keep_share
from llm_demo.run.choices import compiles_adamw, decoder_of, give_fp8


def build(job, layout, counts: list[int]) -> tuple:
    """Build the pieces of this rank's stage, and nothing else: (Pieces, the Shards or Masters to
    optimize, parameters of the whole model, whether AdamW is compiled).

    counts: blocks of each piece of the model. job: a run.Job that is open. layout: the script's."""
    args, world, log, grid = job.args, job.world, job.log, layout.grid
    config, weights, compute = job.plan.source.config, job.plan.source.weights, job.plan.compute
    low, accumulates = compute.dtype != torch.float32, args.grad_accum_steps > 1
    sharded = layout.n_shards > 1
    flat = low and not sharded

    lm = decoder_of(config, weights, compute)
    n_params = param_count(lm)
    for line in give_fp8(lm, compute, args.tensor_parallel):
        log.say(line)
    if layout.experts:
        keep_part(lm, layout.experts)
    if layout.shares:
        keep_share(lm, layout.shares)
    compiled = log.decided(compiles_adamw(compute.compile, n_params, world.size, flat))

    with loading(weights, world.size):
        pieces = Pieces(lm, args, compute, counts, layout.where, layout.stage)
        for piece in pieces.values():
            if piece.tail and layout.shares:
                piece.tail.group = layout.shares.get_group(SPLIT)
        if args.freeze_router:
            for routers in pieces.routers:
                routers.requires_grad_(False)
        if sharded:
            pieces.shard(compute.dtype, args.reshard_after_forward, grid[SHARD])
        if sharded and low:
            how = {"accumulates": accumulates, "compiles": compute.compile, "say": log.say}
            reduce_traffic(pieces, world, grid[SHARD].get_group(), compute.dtype, **how)
        pieces.load(weights, args.seed, world.device)
        if flat:
            units = [unit for piece in pieces.values() for unit in piece.units]
            units += [piece.tail for piece in pieces.values() if piece.tail]
            in_fp32 = kept_in_fp32(pieces)
            optimized = Masters(pieces, units, compute.dtype, accumulates, compiled, in_fp32)
        else:
            optimized = Shards(pieces)
    return pieces, optimized, n_params, compiled


class Pieces(nn.ModuleDict):
    """{number: DecoderLoss} of a stage, in the order of the forward.

    counts: blocks of each piece of the model. stages: the stage of each."""

    def __init__(self, lm, args, compute, counts: list[int], stages: list[int], stage: int):
        super().__init__()
        self.lm, self.names = (lm,), []  # a tuple hides the whole model from nn.Module
        if lm.config.tie_word_embeddings:  # two parameters, each in a unit of its own: see TiedEnds
            lm.lm_head.weight = nn.Parameter(lm.lm_head.weight.detach())
        budget = args.activation_memory_budget if compute.compile else None
        last, first = len(counts) - 1, 0  # first: block of a piece
        for piece, count in enumerate(counts):
            if stages[piece] == stage:
                sizes = unit_sizes(lm.config, count, args.blocks_per_unit, first)
                blocks = make_units(
                    lm.model.layers[first:], sizes, args.use_activation_checkpointing, budget
                )
                self[str(piece)] = DecoderLoss(
                    lm, blocks, compute.compile, first=piece == 0, last=piece == last
                )
                self.names += ["model.embed_tokens"] * (piece == 0)
                self.names += [f"model.layers.{i}" for i in range(first, first + count)]
                self.names += ["model.norm", "lm_head"] if piece == last else []
            first += count
        # of this stage, and of the whole model
        self.routers = [piece.routers for piece in self.values() if piece.routers]
        self.gates = [block.mlp.gate for block in blocks_with_experts(lm)]

    def shard(self, dtype: torch.dtype, reshard: bool, mesh) -> None:
        """Shard each unit with FSDP2 over a mesh; embedding and head are units of their own."""
        how = {"mesh": mesh, "mp_policy": precision(dtype)}
        for piece in self.values():
            shard_units(piece, **how, reshard=reshard)
            for end in filter(None, (piece.tail, piece)):
                fully_shard(end, **how, reshard_after_forward=False)
        sum_not_average(self)

    def load(self, weights, seed: int, device: torch.device) -> None:
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
        """The embedding's weight and the head's copy of it, if they are here and tied."""
        lm = self.lm[0]
        if not lm.config.tie_word_embeddings:
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
        pair: (the embedding's weight, the head's), None for what is not here or not tied.
        optimized: Shards or Masters with the parameters of this stage.
        group: the ranks with this shard of either copy; None if untied."""

    def __init__(self, pair: tuple, optimized, group: dist.ProcessGroup | None):
        (self.embedding, self.head), self.optimized, self.group = pair, optimized, group
        self.both = self.embedding is not None and self.head is not None

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
        """Without the head's, for the norm: the embedding's is the same."""
        if self.head is None:
            return grads
        copy = self.optimized.grad_of(self.head)
        return [g for g in grads if not (g.numel() and g.data_ptr() == copy.data_ptr())]

    def saved(self, optimizer):
        """What a checkpoint holds of this stage: `optimized.views` without the copy."""
        return (view for view in self.optimized.views(optimizer) if view[0] is not self.head)

    def loaded(self, optimizer):
        """What is to be filled from a checkpoint: the copy too if the embedding is elsewhere."""
        return self.saved(optimizer) if self.both else self.optimized.views(optimizer)

    @torch.no_grad()
    def copy(self, optimizer) -> None:
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
