"""Fine-tune a Hugging Face decoder with FSDP2 (parameters, gradients and optimizer states sharded).

bash fsdp/launch_fsdp.sh                                     all GPUs, or 2 processes on a CPU
bash fsdp/launch_fsdp.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
python fsdp/train_fsdp.py                                    one process: the plain model
"""

import functools

import llm_demo  # noqa: F401  first: it catches what imports refuse

# isort: split
import torch

from fsdp import estimate
from fsdp.build import build
from fsdp.flags import GROUPS, sums_each
from fsdp.lowrank import choose_low_rank
from fsdp.sharding import accumulate
from fsdp.shards import not_optimized, training_state
from llm_demo.core.attention import make_documents
from llm_demo.core.batch import Part, label_positions, real_tokens, to_device
from llm_demo.core.errors import UserError, counted
from llm_demo.core.loop import heldout_batches, prepare, train
from llm_demo.core.mesh import REPLICA, SHARD, make_mesh
from llm_demo.core.optim import (
    LossScale,
    adam_steps,
    clipped_step,
    fill_adam_state,
    make_adamw,
    set_lr,
)
from llm_demo.core.rows import micro_batches
from llm_demo.core.sequence_spread import from_owners
from llm_demo.job.args import less_memory, parse_args
from llm_demo.job.dist import from_rank0, run, start
from llm_demo.job.log import Log
from llm_demo.job.plan import Compute, make_plan
from llm_demo.job.source import check_experts, is_mixture

parse = functools.partial(parse_args, __doc__, *GROUPS)


def main() -> None:
    args = parse()
    world = start()
    args.check_processes(world.size)
    replicas = world.size if args.replicas == "all" else int(args.replicas)
    part = Part(world.rank % args.sequence_parallel, args.sequence_parallel)
    n_shards = world.size // replicas
    data_parallel, dp_rank = world.size // part.of, world.rank // part.of
    mesh = grid = make_mesh(world, **{REPLICA: replicas, SHARD: n_shards})
    group = grid[SHARD].get_group()
    compresses = replicas > 1 and args.psgd_rank > 0
    if compresses:  # FSDP2 then does not sum over replicas
        mesh = grid[SHARD]
    sharded, on_host = args.fsdp, args.optimizer_on_host
    if sharded is None:
        sharded = world.size > 1 or args.reshard_after_forward

    # decisions and data
    log = Log(args, world, "fsdp")
    engine, extras = "FSDP2" if sharded else "one process", ""
    if replicas > 1:
        engine = f"FSDP2 with {replicas} replicas"
    if compresses:
        extras += f", PowerSGD of rank {args.psgd_rank}"
    if part.of > 1:
        extras += f", rows spread over {part.of} ranks"
        if world.local_size % part.of:
            log.say("warning: rows are spread over nodes, whose network every block then waits for")
    log.resolved(fsdp=sharded, parallelism=engine + extras)
    refuse = functools.partial(check_experts, args)
    plan = make_plan(args, world, log, data_parallel, refuse)
    (_, config, _, _), data, compute, horizon = plan[:4]
    B, accum, lora = args.micro_batch_size, args.grad_accum_steps, compute.lora
    if data.train.seq_len % part.of:
        raise UserError(
            f"--sequence_parallel {part.of} does not divide {data.train.seq_len}, the tokens of a "
            "row: set --seq_len"
        )
    spread = choose_spread(args, config, compute, data.train, world, log)
    if args.use_activation_checkpointing:
        compute = choose_attention_kept(
            args, config, compute, data.train, world, log, n_shards, sharded=sharded, spread=spread
        )
        plan = plan._replace(compute=compute)
    if args.psgd_rank and compute.dtype == torch.float16:
        raise UserError("--psgd_rank does not work in fp16, which is the default on this GPU")
    if args.copy_engines and not (sharded and compute.dtype != torch.float32):
        raise UserError("--copy_engines requires FSDP with --dtype bf16 or fp16")
    if args.estimate:
        table = estimate.table(
            args, config, compute, data.train, n_shards,
            sharded=sharded, replicas=replicas, spread=spread,
        )  # fmt: skip
        log.say(table)
        return
    if replicas > 1:
        estimate.refuse_replicas(args, config, compute, data.train, n_shards, replicas)
    ready = prepare(args, world, plan, log)
    if not ready:
        return
    clock, checkpoints = ready

    # model
    built = build(
        args, world, plan, log,
        sharded=sharded, grid=grid, mesh=mesh, spread=spread, part=part,
        per_unit=estimate.per_unit_of(args), timed=clock.comm.call,
    )  # fmt: skip
    model, optimized, row_group = built.model, built.optimized, built.row_group
    n_here = sum(p.numel() for p in optimized.params)
    sizes = f"{built.n_params:,} parameters, {n_here:,} here"
    if lora:
        sizes = f"{built.n_params:,} frozen parameters, {built.n_trained:,} trained in adapters, "
        sizes += f"{n_here:,} of them here"
    if sharded:
        engine += f" on {counted(world.size, 'process', 'processes')}{extras}"
    log.say(f"{engine if sharded else 'one plain process'}: {sizes}")

    # optimizer
    optimizer = optimized
    if not on_host:
        optimizer = make_adamw(optimized.params, horizon.lr, args.weight_decay, built.compiled)
        optimized.follow(optimizer)
    loss_scale = LossScale(compute.dtype, world.device)
    low_rank = choose_low_rank(
        args, optimized.model_params, grid,
        done=checkpoints.first_step, max_steps=horizon.max_steps, say=log.say,
    )  # fmt: skip
    if model.routers:
        clock.router_load = model.routers.take_load
    fixed = () if lora else not_optimized(model)  # a frozen base is not in checkpoints
    state = functools.partial(training_state, optimized.views, optimizer, grid, low_rank, fixed)
    fill_adam_state(optimizer, checkpoints.facts["adam_steps"] if checkpoints.path else 0)
    if checkpoints.path:
        tensors = state()
        checkpoints.load(tensors)
        optimized.store({p: tensors[p.hf_name] for p in optimized.model_params})
        del tensors
        loss_scale.load(checkpoints.facts["loss_scale"])

    def forward(batch, index, targets=None, answers=None):
        shape = tuple(batch.input_ids.shape)
        documents = make_documents(batch.cu_seqlens, shape, compute.attn_impl, world.device)
        inputs = map(part.of_rows, (batch.input_ids, batch.position_ids))
        if part.of > 1:
            ours, index = part.of_positions(index, shape[1])
            targets, answers = (x if x is None else x[ours] for x in (targets, answers))
        labels = to_device(world.device, index, targets, answers)
        return model(*to_device(world.device, *inputs), documents, *labels)

    def ask(batch, index):
        tokens = forward(batch, index)
        if row_group is None:
            return tokens
        ours, _ = part.of_positions(index, batch.input_ids.shape[1])
        return from_owners(tokens, ours, row_group)

    def batches_of(rows):
        return micro_batches(data.train, rows, dp_rank, data_parallel, B, data.max_docs)

    @torch.no_grad()
    def count_choices(rows):
        """A pass over the step's rows, whose choices the auxiliary loss depends on."""
        model.routers.begin_pass()
        for batch in batches_of(rows):
            model.routers.see(*to_device(world.device, real_tokens(batch, part)))
            forward(batch, torch.zeros(1, dtype=torch.int64))
        clock.more["moe/aux_loss"] = model.routers.set_push(args.router_aux_loss, loss_scale.scale)

    def step(rows, n_labels, lr):
        total = torch.zeros((), device=world.device)
        if args.router_aux_loss:
            count_choices(rows)
        for i, batch in enumerate(clock.data(batches_of(rows))):
            last = i == accum - 1
            if model.routers:
                model.routers.see(*to_device(world.device, real_tokens(batch, part)))
            if sharded:
                accumulate(model, args.reshard_after_forward, last, sums_each(args))
            loss = forward(batch, *label_positions(batch.labels)) / n_labels
            (loss * loss_scale.scale).backward()
            optimized.take_grads(last)
            total += loss.detach()
        set_lr(optimizer, lr)
        grads = optimized.grads()
        if low_rank:
            low_rank.reduce(grads)
        parts = [(grads, group if sharded else None)]
        norm = clipped_step(optimizer, args.max_grad_norm, loss_scale, parts)
        if args.router_bias_update:
            model.routers.update_bias(args.router_bias_update, norm)
        return total, norm

    @torch.no_grad()
    def evaluate(packs, micro):
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        batches = heldout_batches(packs, dp_rank, data_parallel, micro, data.max_docs)
        for batch, *labels in batches:
            total += forward(batch, *labels)
        return total

    def facts():
        if low_rank:  # a checkpoint is about to be written
            low_rank.sum_errors()
        return {"adam_steps": adam_steps(optimizer), "loss_scale": loss_scale.facts()}

    train(args, world, plan, log, clock, checkpoints, step, evaluate, ask, state, facts)


def choose_spread(args, config, compute, train, world, log: Log) -> int:
    """Over how many ranks each block's experts are spread. Logs the reason."""
    if not is_mixture(config) or world.size == 1 and not args.expert_parallel:
        return 1
    asked = args.expert_parallel
    n, why = asked, "as requested"
    if not asked and args.replicas != "1":
        n, why = 1, "because of --replicas"
    elif not asked:
        n, why = from_rank0(
            world, lambda: estimate.choose_spread(args, config, compute, train, world)
        )
    where = "all on each rank" if n == 1 else f"spread over {n} ranks"
    log.say(f"experts: {where} ({why})")
    log.resolved(expert_parallel=n)
    return n


def choose_attention_kept(
    args, config, compute, train, world, log: Log, ranks: int, *, sharded: bool, spread: int
) -> Compute:
    """`compute` with the number of blocks that keep their attention. Logs the reason."""

    def choose():
        return estimate.choose_attention_kept(
            args, config, compute, train, ranks, sharded=sharded, spread=spread
        )

    kept, why = from_rank0(world, choose)
    where = "computed again in the backward"
    if kept:
        where = f"kept for the backward of {kept} of {config.num_hidden_layers} blocks"
    log.say(f"attention: {where} ({why})")
    log.resolved(attention_kept=kept)
    return compute._replace(attention_kept=kept)


if __name__ == "__main__":
    run(main, parse, less_memory)
