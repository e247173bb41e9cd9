"""Builds the model of train_fsdp.py, sharded before it has weights, so that no process makes or
reads more than its share."""

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from fsdp import copy_engines
from fsdp.activations_on_host import keep_on_host
from fsdp.flags import sums_each
from fsdp.fsdp2 import reduce_traffic
from fsdp.host_adamw import HostAdamW, UnitSum, host_need, plain_units, prepare_host, sharded_units
from fsdp.pieces import use_pieces
from fsdp.sharding import Layout, Shards, precision, shard_units, sum_not_average
from llm_demo.core.decoder import (
    Blocks,
    DecoderLoss,
    allocate,
    fill,
    make_units,
    skeleton,
    spread_rows,
)
from llm_demo.core.experts import keep_part, kept_in_fp32
from llm_demo.core.lora import apply_lora
from llm_demo.core.masters import Masters
from llm_demo.core.mesh import World, make_part_mesh
from llm_demo.core.tensor import keep_share
from llm_demo.machine.device import DTYPES
from llm_demo.machine.dist import once_per_node
from llm_demo.machine.text import counted
from llm_demo.model.costs import param_count, unit_sizes
from llm_demo.model.weights_files import loading
from llm_demo.run.choices import compiles_adamw, fused_kernels, give_fp8
from llm_demo.run.log import Log

# Parameters. On two H200, copy engines saved 5 % of a step for units of 193M (8B), and nothing
# above noise for units of 63M (0.6B) (bench/LOG.md).
LARGE = 100_000_000


def build(job, layout: Layout) -> tuple[DecoderLoss, Shards | Masters | HostAdamW, bool]:
    """Build the model on every rank: (it, what is optimized, whether AdamW is compiled). job: a
    run.Job that is open. Raises UserError if the host has too little memory."""
    args, plan, world, say = job.args, job.plan, job.world, job.log.say
    weights, compute, on_host = plan.source.weights, plan.compute, args.optimizer_on_host
    in_16_bits = compute.dtype != torch.float32
    has_masters = in_16_bits and not (layout.sharded or on_host)
    lm, n_params, n_trained = adapted(job)
    row_group = spread_blocks(lm, world, layout)
    works = compute.compile and not on_host
    compiled = job.log.decided(compiles_adamw(works, n_trained, layout.n_shards, has_masters))
    with loading(weights, layout.n_shards):
        model = wrap(lm, job)
        model.tail.group = row_group
        if layout.sharded:
            shard(model, job, layout.mesh)
        if on_host:
            say(once_per_node(world, lambda: prepare_host(args, model, world)))
        if args.activations_on_host:
            keep_activations(model, job, layout)
        allocate(model, world.device)
        if lm.config.tie_word_embeddings:  # allocated separately
            lm.lm_head.weight = lm.model.embed_tokens.weight
        units = []
        if on_host:
            units = (sharded_units if layout.sharded else plain_units)(model, compute.compile)
        if layout.sharded and in_16_bits:
            tune(model, units, job, layout)
        how = plan.horizon.lr, args.weight_decay, DTYPES[args.optim_state]
        host = HostAdamW(units, *how) if on_host else None
        for name in ("model",) if lm.config.tie_word_embeddings else ("model", "lm_head"):
            fill(lm, name, weights, args.seed, host and host.keep)
        if host:
            host.allocate()
        if has_masters:
            accumulates = args.grad_accum_steps > 1
            optimized = Masters(
                model, list(model.units), compute.dtype, accumulates, compiled, kept_in_fp32(model)
            )
        else:
            optimized = host or Shards(model)
    log_sizes(job, layout, n_params, n_trained, sum(p.numel() for p in optimized.params))
    return model, optimized, compiled


def adapted(job) -> tuple[PreTrainedModel, int, int]:
    """(the decoder on the meta device with its adapters if any, its parameters without them, those
    that are trained)."""
    plan, compute = job.plan, job.plan.compute
    how = compute.attn_impl, plan.source.weights, compute.product, compute.rule
    lm = skeleton(plan.source.config, *how)
    n_params = n_trained = param_count(lm)
    lines = give_fp8(lm, compute, job.args.tensor_parallel)
    if job.args.base_bits == 4:
        from llm_demo.model.four_bits_base import give_four_bits

        lines += give_four_bits(lm, job)
    for line in lines:
        job.log.say(line)
    if compute.lora:
        apply_lora(lm, compute.lora, compute.dtype)
        # of dropout; other random numbers have seeds of their own
        torch.manual_seed(job.args.seed + job.world.rank)
        n_trained = compute.lora.parameters
    return lm, n_params, n_trained


def spread_blocks(lm: PreTrainedModel, world: World, layout: Layout) -> ProcessGroup | None:
    """Leave this rank its part of the experts and its share of the matrices, and let it take slices
    of rows. Returns the group of ranks with slices of the same rows, None if there is none."""
    if layout.expert_parallel > 1:
        keep_part(lm, make_part_mesh(world, layout.expert_parallel))
    if layout.part.count == 1:
        return None
    parts = make_part_mesh(world, layout.part.count)
    row_group = parts.get_group(0)
    if layout.tensor_parallel > 1:
        keep_share(lm, parts)
    else:
        spread_rows(lm, row_group)
    return row_group


def wrap(lm: PreTrainedModel, job) -> DecoderLoss:
    """The decoder in units of blocks, compiled, with its loss; still on the meta device."""
    args, compute, on_host = job.args, job.plan.compute, job.args.optimizer_on_host
    # only a unit's input goes to the host
    per_unit = 1 if args.activations_on_host else args.blocks_per_unit
    blocks = make_units(
        lm.model.layers,
        unit_sizes(lm.config, lm.config.num_hidden_layers, per_unit),
        checkpointing=args.use_activation_checkpointing,
        budget=args.activation_memory_budget if compute.compile else None,
        keeping=compute.attention_kept,
        kept=fused_kernels(compute.attn_impl) if compute.attention_kept else [],
    )
    for unit in blocks:
        use_pieces(unit)
    model = DecoderLoss(lm, blocks, compute.compile, slim=on_host)
    if args.freeze_router:
        model.routers.requires_grad_(False)
    if on_host:
        for p in set(lm.parameters()) - kept_in_fp32(model):
            p.data = p.data.to(compute.dtype)
    return model


def shard(model: DecoderLoss, job, mesh: DeviceMesh) -> None:
    """Shard each unit with FSDP2 over a mesh. Embedding, last norm and head form one unit if tied,
    else two, so that transfers of the head's weight and gradient overlap with blocks' compute. With
    the optimizer on the host, if resharding, the embedding is freed after the forward too."""
    args, tied = job.args, job.plan.source.config.tie_word_embeddings
    how = {"mesh": mesh, "mp_policy": precision(job.plan.compute.dtype)}
    reshard = args.reshard_after_forward
    shard_units(model, **how, reshard=reshard)
    if reshard and args.optimizer_on_host and not tied:  # the backward does not need its weight
        fully_shard(model.embed_tokens, **how, reshard_after_forward=True)
        model.embed_tokens.set_unshard_in_backward(False)
    for end in (model,) if tied else (model.tail, model):
        fully_shard(end, **how, reshard_after_forward=False)
    sum_not_average(model)


def keep_activations(model: DecoderLoss, job, layout: Layout) -> None:
    """Keep the inputs of units in host memory between forward and backward."""
    args, world, plan = job.args, job.world, job.plan
    n = plan.data.train.seq_len // layout.part.count
    model.on_host = keep_on_host(
        len(model.units), (args.micro_batch_size, n, plan.source.config.hidden_size),
        plan.compute.dtype, world, job.log.say,
        others=host_need(args, model, world) if args.optimizer_on_host else 0,
    )  # fmt: skip


def tune(model: DecoderLoss, units: list[UnitSum], job, layout: Layout) -> None:
    """Make FSDP2's transfers fewer and faster. Logs what this PyTorch lacks."""
    args, compute = job.args, job.plan.compute
    engines = choose_engines(args.copy_engines, job.world, layout.group, list(model.units), job.log)
    reduce_traffic(
        model, job.world, layout.group, compute.dtype,
        accumulates=args.grad_accum_steps > 1 and not sums_each(args), compiles=compute.compile,
        engines=engines, reshards=args.reshard_after_forward, timed=job.timer.comm.call,
        units=units, replicas=layout.mesh.size() // layout.n_shards, say=job.log.say,
    )  # fmt: skip


def log_sizes(job, layout: Layout, n_params: int, n_trained: int, n_local: int) -> None:
    """Log the kind of parallelism and the numbers of parameters."""
    sizes = f"{n_params:,} parameters, {n_local:,} here"
    if job.plan.compute.lora:
        sizes = f"{n_params:,} frozen parameters, {n_trained:,} trained in adapters, {n_local:,} "
        sizes += "of them here"
    name = "one plain process"
    if layout.sharded:
        processes = counted(job.world.size, "process", "processes")
        kind, comma, extras = job.log.settings["parallelism"].partition(",")
        name = f"{kind} on {processes}{comma}{extras}"
    job.log.say(f"{name}: {sizes}")


def choose_engines(
    asked: bool | None, world: World, group: ProcessGroup, units: list[Blocks], log: Log
) -> bool:
    """Whether blocks use copy engines. Logs the reason."""
    # parts of matrices are transferred by themselves
    cut = {getattr(m, key) for u in units for m in u.modules() for key in getattr(m, "cut", ())}
    largest = max(sum(p.numel() for p in {*unit.parameters()} - cut) for unit in units)
    small = f"no gain for units of {largest / 1e6:.0f}M parameters" if largest < LARGE else ""
    engines = copy_engines.choose_copy_engines(asked, world, group, log.say, small)
    log.resolved(copy_engines=engines)
    return engines
