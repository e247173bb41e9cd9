"""Builds the model of train_fsdp.py, sharded before it has weights, so that no process makes or
reads more than its share."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdp import copy_engines
from fsdp.activations_on_host import keep_on_host
from fsdp.flags import sums_each
from fsdp.fsdp2 import reduce_traffic
from fsdp.host_adamw import HostAdamW, host_need, prepare_host
from fsdp.sharding import precision, shard_units, sum_over_ranks
from fsdp.shards import Shards
from fsdp.units import plain_units, sharded_units
from llm_demo.core.batch import Part
from llm_demo.core.decoder import Blocks, DecoderLoss, compile_forward, make_units, skeleton
from llm_demo.core.experts_spread import keep_part
from llm_demo.core.lora import apply_lora
from llm_demo.core.masters import Masters
from llm_demo.core.mesh import SHARD, World, make_expert_mesh, make_row_group
from llm_demo.core.optim import compiles_adamw
from llm_demo.core.sequence_spread import spread_rows
from llm_demo.core.weights import allocate, fill
from llm_demo.job.costs import param_count, unit_sizes
from llm_demo.job.dist import once_per_node
from llm_demo.job.log import Log
from llm_demo.job.plan import Plan
from llm_demo.job.weights_files import loading

# Parameters. On two H200, copy engines saved 5 % of a step for units of 193M (8B), and nothing
# above noise for units of 63M (0.6B) (bench/LOG.md).
LARGE = 100_000_000


class Built(NamedTuple):
    model: DecoderLoss
    optimized: Shards | Masters | HostAdamW
    n_params: int  # of the whole model, without adapters
    n_trained: int  # the same, or those of adapters
    compiled: bool  # whether AdamW is
    row_group: ProcessGroup | None  # the ranks with slices of the same rows


def build(
    args,
    world: World,
    plan: Plan,
    log: Log,
    *,
    sharded: bool,
    grid: DeviceMesh,
    mesh: DeviceMesh,
    spread: int,
    part: Part,
    per_unit: int,
    timed: Callable,
) -> Built:
    """Build the model on every rank. Raises UserError if the host has too little memory.

    Args:
        sharded: with FSDP2.
        grid: all ranks.
        mesh: what FSDP2 shards and sums over: the grid, or one replica if PowerSGD sums the rest.
        spread: over how many ranks each block's experts are spread.
        part: the slice of each row that this rank holds.
        per_unit: blocks of a unit, 0 if their size decides.
        timed: CommTimer.call."""
    (_, config, weights, _), data, compute, horizon = plan[:4]
    n_shards, group = grid[SHARD].size(), grid[SHARD].get_group()
    on_host, accumulates = args.optimizer_on_host, args.grad_accum_steps > 1
    tied, low = config.tie_word_embeddings, compute.dtype != torch.float32

    lm = skeleton(config, compute.attn_impl, weights, compute.product)
    n_params = n_trained = param_count(lm)
    if compute.lora:
        apply_lora(lm, compute.lora, compute.dtype)
        torch.manual_seed(args.seed + world.rank)  # of dropout; other random numbers have their own
        n_trained = compute.lora.parameters
    expert_mesh = row_group = None
    if spread > 1:
        expert_mesh = make_expert_mesh(world, spread)
        keep_part(lm, expert_mesh)
    if part.of > 1:
        row_group = make_row_group(world, part.of)
        spread_rows(lm, row_group)
    flat = low and not (sharded or on_host)
    compiled = compiles_adamw(compute.compile and not on_host, n_trained, n_shards, log.say, flat)

    with loading(weights, n_shards):
        blocks = make_units(
            lm,
            unit_sizes(config, config.num_hidden_layers, per_unit),
            checkpointing=args.use_activation_checkpointing,
            attention_kept=compute.attention_kept,
        )
        if compute.compile:
            for unit in blocks:
                compile_forward(unit, args.activation_memory_budget)
        model = DecoderLoss(lm, blocks, compute.compile, slim=on_host)
        model.tail.group = row_group
        if args.freeze_router:
            model.routers.requires_grad_(False)
        if on_host:
            for p in set(lm.parameters()) - model.in_fp32():  # on the meta device
                p.data = p.data.to(compute.dtype)
        if sharded:
            same_experts = expert_mesh[SHARD] if expert_mesh else None
            shard(
                model, compute.dtype, mesh, same_experts,
                tied=tied, reshard=args.reshard_after_forward, slim=on_host,
            )  # fmt: skip
        if on_host:
            log.say(once_per_node(world, lambda: prepare_host(model, world)))
        if args.activations_on_host:
            model.on_host = keep_on_host(
                len(blocks),
                (args.micro_batch_size, data.train.seq_len // part.of, config.hidden_size),
                compute.dtype,
                world,
                log.say,
                others=host_need(model, world) if on_host else 0,
            )
        allocate(model, world.device)
        if tied:  # allocated separately
            lm.lm_head.weight = lm.model.embed_tokens.weight
        units, optimized = [], None
        if on_host:
            units = (sharded_units if sharded else plain_units)(model, compute.compile)
            optimized = HostAdamW(units, horizon.lr, args.weight_decay)
        if sharded and low:
            missing = reduce_traffic(
                model,
                world,
                group,
                dtype=compute.dtype,
                accumulates=accumulates and not sums_each(args),
                compiles=compute.compile,
                engines=choose_engines(args.copy_engines, world, group, blocks, log),
                reshards=args.reshard_after_forward,
                timed=timed,
                units=units,
                replicas=mesh.size() // n_shards,
            )
            for line in missing:
                log.say(f"fsdp: {line}")
        store = optimized and optimized.keep
        fill(lm, "model", weights, args.seed, store)
        if not tied:
            fill(lm, "lm_head", weights, args.seed, store)
        if on_host:
            optimized.allocate()
        elif flat:
            optimized = Masters(
                model,
                list(model.units),
                compute.dtype,
                accumulates=accumulates,
                compiled=compiled,
                in_fp32=model.in_fp32(),
            )
        else:
            optimized = Shards(model)
    return Built(model, optimized, n_params, n_trained, compiled, row_group)


def shard(
    model: DecoderLoss,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    spread: DeviceMesh | None,
    *,
    tied: bool,
    reshard: bool,
    slim: bool,
) -> None:
    """Shard each unit with FSDP2 over a mesh. Embedding, last norm and head form one unit if tied,
    else two, so that transfers of the head's weight and gradient overlap with blocks' compute.
    spread: the mesh of the ranks with the same experts, or None.
    slim: if resharding, free the embedding after the forward too."""
    policy = precision(dtype)
    shard_units(model, dtype, mesh, reshard=reshard, spread=spread)
    if reshard and slim and not tied:  # the backward does not need the embedding's weight
        fully_shard(model.embed_tokens, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        model.embed_tokens.set_unshard_in_backward(False)
    for end in (model,) if tied else (model.tail, model):
        fully_shard(end, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    sum_over_ranks(model)


def choose_engines(
    asked: bool | None, world: World, group: ProcessGroup, units: list[Blocks], log: Log
) -> bool:
    """Whether blocks use copy engines. Logs the reason."""
    # experts that are spread are transferred apart
    apart = {p for u in units for m in u.modules() if hasattr(m, "grid") for p in m.parameters()}
    largest = max(sum(p.numel() for p in {*unit.parameters()} - apart) for unit in units)
    small = f"no gain for units of {largest / 1e6:.0f}M parameters" if largest < LARGE else ""
    engines = copy_engines.choose_copy_engines(asked, world, group, log.say, small)
    log.resolved(copy_engines=engines)
    return engines
