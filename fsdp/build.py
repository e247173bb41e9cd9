"""Builds the model of train_fsdp.py, sharded before it has weights, so that no process makes or
reads more than its share."""

import functools
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from fsdp.flags import sums_each
from fsdp.sharding import Layout, Optimized, Shards, precision, shard_units, sum_not_average
from llm_demo.core.decoder import (
    Blocks,
    DecoderLoss,
    allocate,
    blocks_with_experts,
    experts_in,
    fill,
    kept_in_fp32,
    make_units,
    spread_rows,
)
from llm_demo.core.mesh import World, make_part_mesh
from llm_demo.flags.args import Args
from llm_demo.machine.device import DTYPES
from llm_demo.machine.dist import once_per_node
from llm_demo.machine.text import counted
from llm_demo.model.costs import unit_sizes
from llm_demo.model.weights_files import loading
from llm_demo.run.choices import Compute, adapted, compiles_adamw, fused_kernels, sizes_in_words
from llm_demo.run.log import Log
from llm_demo.run.plan import Plan
from llm_demo.run.saver import Saver

# Parameters. On two H200, copy engines saved 5 % of a step for units of 193M (8B), and nothing
# above noise for units of 63M (0.6B) (bench/LOG.md).
LARGE = 100_000_000


def build(
    args: Args,
    plan: Plan,
    layout: Layout,
    world: World,
    saver: Saver,
    log: Log,
    timed: Callable,
) -> tuple[DecoderLoss, Optimized, bool]:
    """Build the model on every rank. Returns (model, what is optimized, whether AdamW is compiled).
    timed: of `reduce_traffic`. Raises UserError if the host has too little memory."""
    config, weights, compute = plan.source.config, plan.source.weights, plan.compute
    on_host, in_16_bits = args.optimizer_on_host, compute.dtype != torch.float32
    has_masters = in_16_bits and not (layout.sharded or on_host)
    lm, n_params, n_trained = adapted(args, plan.source, compute, world, saver, log)
    row_group = spread_blocks(lm, world, layout)
    tied = config.tie_word_embeddings
    embeds_on_host = args.activations_on_host and compute.lora and not (layout.sharded or tied)
    works = compute.compile and not on_host
    compiled = log.decided(compiles_adamw(works, n_trained, layout.n_shards, has_masters))
    with loading(weights, layout.n_shards):
        model = wrap(lm, args, compute, embeds=not embeds_on_host)
        model.tail.group = row_group
        if layout.sharded:
            shard(model, args, compute.dtype, layout.mesh, tied)
        if on_host:
            from fsdp import host_adamw

            log.say(once_per_node(world, lambda: host_adamw.prepare_host(args, model, world)))
        if args.activations_on_host:
            slots = plan.data.train.seq_len // layout.part.count
            shape = args.micro_batch_size, slots, config.hidden_size
            keep_activations(model, args, shape, compute.dtype, world, log)
        allocate(model, world.device)
        if embeds_on_host:  # no part of the model; a GPU draws other random values than a CPU
            allocate(lm.model.embed_tokens, world.device)
        if tied:  # allocated separately
            lm.lm_head.weight = lm.model.embed_tokens.weight
        units = []
        if on_host and layout.sharded:
            units = host_adamw.sharded_units(model, compute.compile)
        elif on_host:
            units = host_adamw.plain_units(model, compute.compile)
        if layout.sharded and in_16_bits:
            tune(model, units, args, compute, layout, world, timed, log)
        host = None
        if on_host:
            host = host_adamw.HostAdamW(
                units,
                lr=plan.horizon.lr,
                weight_decay=args.weight_decay,
                moments=DTYPES[args.optim_state],
            )
        for name in ("model",) if tied else ("model", "lm_head"):
            fill(lm, name, weights, args.seed, host and host.keep)
        if embeds_on_host:
            # a partial, since a module would become a part of the model
            model.embed_on_host = functools.partial(lm.model.embed_tokens.to("cpu"))
            log.say("embedding: in host memory, because of --activations_on_host")
            log.resolved(embedding_on_host=True)
        if host:
            host.allocate()
        optimized = host
        if has_masters:
            from llm_demo.core.masters import Masters

            optimized = Masters(
                model,
                units=list(model.units),
                dtype=compute.dtype,
                accumulates=args.grad_accum_steps > 1,
                compiled=compiled,
                in_fp32=kept_in_fp32(model),
            )
        elif not host:
            optimized = Shards(model)
    n_local = sum(p.numel() for p in optimized.params)
    log_sizes(log, layout, world, n_params, n_trained if compute.lora else None, n_local)
    return model, optimized, compiled


def spread_blocks(lm: PreTrainedModel, world: World, layout: Layout) -> ProcessGroup | None:
    """Keep only this rank's part of the experts and its share of the matrices, and make the model
    take slices of rows. Returns the group of ranks with slices of the same rows, None if there is
    none."""
    if layout.expert_parallel > 1:
        from llm_demo.core.experts import keep_part

        experts = [experts_in(block) for block in blocks_with_experts(lm)]
        keep_part(lm, experts, make_part_mesh(world, layout.expert_parallel))
    if layout.part.count == 1:
        return None
    parts = make_part_mesh(world, layout.part.count)
    row_group = parts.get_group(0)
    if layout.tensor_parallel > 1:
        from llm_demo.options.tensor import keep_share

        keep_share(lm, parts)
    else:
        spread_rows(lm, row_group)
    return row_group


def wrap(lm: PreTrainedModel, args: Args, compute: Compute, embeds: bool) -> DecoderLoss:
    """The decoder in units of blocks, compiled, with its loss; still on the meta device. embeds:
    with its embedding."""
    on_host = args.optimizer_on_host
    # only a unit's input goes to the host
    per_unit = 1 if args.activations_on_host else args.blocks_per_unit
    units = make_units(
        lm.model.layers,
        unit_sizes(lm.config, lm.config.num_hidden_layers, per_unit),
        checkpointing=args.use_activation_checkpointing,
        budget=args.activation_memory_budget if compute.compile else None,
        keeping=compute.attention_kept,
        kept=fused_kernels(compute.attn_impl) if compute.attention_kept else [],
    )
    model = DecoderLoss(lm, units, compute.compile, slim=on_host, first=embeds)
    if compute.lora and args.use_activation_checkpointing:
        from fsdp.pieces import go_in_pieces, use_pieces

        for unit in units:
            use_pieces(unit)
        go_in_pieces(model.tail.norm)
    if args.freeze_router:
        model.routers.requires_grad_(False)
    if on_host:
        for p in set(lm.parameters()) - kept_in_fp32(model):
            p.data = p.data.to(compute.dtype)
    return model


def shard(model: DecoderLoss, args: Args, dtype: torch.dtype, mesh: DeviceMesh, tied: bool) -> None:
    """Shard each unit with FSDP2 over a mesh. Embedding, last norm and head form one unit if tied,
    else two, so that transfers of the head's weight and gradient overlap with blocks' compute. With
    the optimizer on the host, if resharding, the embedding is freed after the forward too."""
    policy, reshard = precision(dtype), args.reshard_after_forward
    shard_units(model, mesh=mesh, mp_policy=policy, reshard=reshard)
    if reshard and args.optimizer_on_host and not tied:  # the backward does not need its weight
        embedding = model.embed_tokens
        fully_shard(embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        embedding.set_unshard_in_backward(False)
    for end in (model,) if tied else (model.tail, model):
        fully_shard(end, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    sum_not_average(model)


def keep_activations(
    model: DecoderLoss,
    args: Args,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    world: World,
    log: Log,
) -> None:
    """Keep the inputs of units, of this shape, in host memory between forward and backward."""
    from fsdp.activations_on_host import keep_on_host

    others = 0
    if args.optimizer_on_host:
        from fsdp.host_adamw import host_need

        others = host_need(args, model, world)
    model.on_host = keep_on_host(len(model.units), shape, dtype, world, log.say, others=others)


def tune(
    model: DecoderLoss,
    units: list,
    args: Args,
    compute: Compute,
    layout: Layout,
    world: World,
    timed: Callable,
    log: Log,
) -> None:
    """Make FSDP2's transfers fewer and faster. units: UnitSum of the optimizer on the host. Logs
    what this PyTorch lacks."""
    from fsdp.fsdp2 import reduce_traffic

    reduce_traffic(
        model,
        world,
        layout.group,
        compute.dtype,
        accumulates=args.grad_accum_steps > 1 and not sums_each(args),
        compiles=compute.compile,
        engines=choose_engines(args.copy_engines, world, layout.group, list(model.units), log),
        reshards=args.reshard_after_forward,
        timed=timed,
        units=units,
        replicas=layout.mesh.size() // layout.n_shards,
        say=log.say,
    )


def log_sizes(
    log: Log, layout: Layout, world: World, n_params: int, n_adapters: int | None, n_local: int
) -> None:
    """Log the kind of parallelism and the numbers of parameters, as of sizes_in_words."""
    sizes = sizes_in_words(n_params, n_adapters, n_local)
    name = "one plain process"
    if layout.sharded:
        processes = counted(world.size, "process", "processes")
        kind, comma, extras = log.settings["parallelism"].partition(",")
        name = f"{kind} on {processes}{comma}{extras}"
    log.say(f"{name}: {sizes}")


def choose_engines(
    asked: bool | None, world: World, group: ProcessGroup, units: list[Blocks], log: Log
) -> bool:
    """Whether blocks use copy engines. Logs the reason."""
    from fsdp.copy_engines import choose_copy_engines

    # parts of matrices are transferred by themselves
    cut = {getattr(m, key) for u in units for m in u.modules() for key in getattr(m, "cut", ())}
    largest = max(sum(p.numel() for p in {*unit.parameters()} - cut) for unit in units)
    small = f"no gain for units of {largest / 1e6:.0f}M parameters" if largest < LARGE else ""
    engines = choose_copy_engines(asked, world, group, log.say, small)
    log.resolved(copy_engines=engines)
    return engines
