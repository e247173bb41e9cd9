"""Builds this stage's part of the model of train_fsdp_pp.py."""

from typing import NamedTuple

import torch

from fsdp.fsdp2 import reduce_traffic
from fsdp.sharding import Shards
from fsdp_pp.pieces import Pieces
from llm_demo.core.decoder import skeleton
from llm_demo.core.masters import Masters
from llm_demo.core.mesh import SHARD
from llm_demo.job.choices import compiles_adamw
from llm_demo.job.costs import param_count
from llm_demo.job.weights_files import loading


class Built(NamedTuple):
    pieces: Pieces
    optimized: Shards | Masters
    n_params: int  # of the whole model
    compiled: bool  # whether AdamW is


def build(job, layout, counts: list[int]) -> Built:
    """Build the pieces of this rank's stage, and nothing else. counts: blocks of each piece of the
    model. job: a run.Job that is open. layout: see train_fsdp_pp.Layout."""
    args, world, log, grid = job.args, job.world, job.log, layout.grid
    config, weights, compute = job.plan.source.config, job.plan.source.weights, job.plan.compute
    low, accumulates = compute.dtype != torch.float32, args.grad_accum_steps > 1
    sharded = layout.n_shards > 1
    flat = low and not sharded

    lm = skeleton(config, compute.attn_impl, weights, compute.product)
    n_params = param_count(lm)
    compiled = compiles_adamw(compute.compile, n_params, world.size, log.say, flat)

    with loading(weights, world.size):
        pieces = Pieces(lm, args, compute, counts, layout.where, layout.stage)
        if args.freeze_router:
            for routers in pieces.routers:
                routers.requires_grad_(False)
        if sharded:
            pieces.shard(compute.dtype, args.reshard_after_forward, grid[SHARD])
        if sharded and low:
            how = {"accumulates": accumulates, "compiles": compute.compile}
            group = grid[SHARD].get_group()
            for line in reduce_traffic(pieces, world, group, compute.dtype, **how):
                log.say(f"fsdp: {line}")
        pieces.load(weights, args.seed, world.device)
        if flat:
            units = [unit for piece in pieces.values() for unit in piece.units]
            units += [piece.tail for piece in pieces.values() if piece.tail]
            in_fp32 = set().union(*(piece.in_fp32() for piece in pieces.values()))
            optimized = Masters(pieces, units, compute.dtype, accumulates, compiled, in_fp32)
        else:
            optimized = Shards(pieces)
    return Built(pieces, optimized, n_params, compiled)
