"""Fine-tune a Hugging Face decoder with FSDP2 (parameters, gradients and optimizer states sharded).

bash fsdp/launch_fsdp.sh                                     all GPUs, or 2 processes on a CPU
bash fsdp/launch_fsdp.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
python fsdp/train_fsdp.py                                    one process: the plain model
"""

import functools

import torch
from torch.distributed.fsdp import fully_shard

from fsdp import estimate
from fsdp.flags import ExpertArgs, FsdpArgs
from fsdp.fsdp2 import reduce_traffic
from fsdp.host_adamw import HostAdamW, host_need, prepare_host
from fsdp.sharding import accumulate, precision, shard_units, sum_over_ranks
from fsdp.shards import Shards, not_optimized, training_state
from fsdp.units import plain_units, sharded_units
from llm_demo.args import less_memory, parse_args
from llm_demo.data.batch import Part, label_positions, real_tokens, to_device
from llm_demo.data.steps import micro_batches
from llm_demo.dist import from_rank0, once_per_node, run, start
from llm_demo.errors import UserError, counted
from llm_demo.loop import heldout_batches, prepare, train
from llm_demo.model.activations_on_host import keep_on_host
from llm_demo.model.attention import make_documents
from llm_demo.model.compiling import compile_forward
from llm_demo.model.costs import param_count
from llm_demo.model.decoder import Blocks, DecoderLoss, make_units, skeleton
from llm_demo.model.experts_spread import keep_part
from llm_demo.model.lora import apply_lora
from llm_demo.model.sequence_spread import from_owners, spread_rows
from llm_demo.model.source import check_experts, is_mixture
from llm_demo.model.weights import allocate, fill, loading
from llm_demo.optim import (
    LossScale,
    adam_steps,
    clipped_step,
    compiles_adamw,
    fill_adam_state,
    make_adamw,
    set_lr,
)
from llm_demo.parallel import copy_engines
from llm_demo.parallel.lowrank import LowRank
from llm_demo.parallel.masters import Masters
from llm_demo.parallel.mesh import REPLICA, SHARD, make_expert_mesh, make_mesh, make_row_group
from llm_demo.plan import make_plan
from llm_demo.run.log import Log

parse = functools.partial(parse_args, __doc__, FsdpArgs, ExpertArgs)


def main() -> None:
    args = parse()
    world = start()
    args.check_processes(world.size)
    replicas = world.size if args.replicas == "all" else int(args.replicas)
    part = Part(world.rank % args.sequence_parallel, args.sequence_parallel)
    n_shards, data_parallel = world.size // replicas, world.size // part.of
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
    way, more = "FSDP2" if sharded else "one process", ""
    if replicas > 1:
        way = f"FSDP2 with {replicas} replicas"
    if compresses:
        more += f", PowerSGD of rank {args.psgd_rank}"
    if part.of > 1:
        more += f", rows spread over {part.of} ranks"
        if world.local_size % part.of:
            log.say("warning: rows are spread over nodes, whose network every block then waits for")
    log.resolved(fsdp=sharded, parallelism=way + more)
    refuse = functools.partial(check_experts, args)
    plan = make_plan(args, world, log, data_parallel, refuse)
    (_, config, weights, _), data, compute, horizon = plan[:4]
    B, accum, lora = args.micro_batch_size, args.grad_accum_steps, compute.lora
    if data.train.seq_len % part.of:
        raise UserError(
            f"--sequence_parallel {part.of} does not divide {data.train.seq_len}, the tokens of a "
            "row: set --seq_len"
        )
    spread = choose_spread(args, config, compute, data.train, world, log)
    if args.use_activation_checkpointing:
        how = args, config, compute, data.train, n_shards, sharded, spread
        kept, why = from_rank0(world, lambda: estimate.choose_attention_kept(*how))
        what = f"kept for the backward of {kept} of {config.num_hidden_layers} blocks"
        log.say(f"attention: {what if kept else 'computed again in the backward'} ({why})")
        compute = compute._replace(attention_kept=kept)
        log.resolved(attention_kept=kept)
    if args.psgd_rank and compute.dtype == torch.float16:
        raise UserError("--psgd_rank does not work in fp16, which is the default on this GPU")
    if args.copy_engines and not (sharded and compute.dtype != torch.float32):
        raise UserError("--copy_engines requires FSDP with --dtype bf16 or fp16")
    if args.estimate:
        log.say(
            estimate.table(args, config, compute, data.train, n_shards, sharded, replicas, spread)
        )
        return
    if replicas > 1:
        estimate.refuse_replicas(args, config, compute, data.train, n_shards, replicas)
    ready = prepare(args, world, plan, log)
    if not ready:
        return
    clock, checkpoints = ready

    # model: sharded before it has weights, so that no process makes or reads more than its share
    lm = skeleton(config, compute.attn_impl, weights, compute.product)
    n_params = n_trained = param_count(lm)
    if lora:
        apply_lora(lm, lora, compute.dtype)
        torch.manual_seed(args.seed + world.rank)  # of dropout; other random numbers have their own
        n_trained = lora.parameters
    of_experts = None
    if spread > 1:
        of_experts = make_expert_mesh(world, spread)
        keep_part(lm, of_experts)
    of_row = None
    if part.of > 1:
        of_row = make_row_group(world, part.of)
        spread_rows(lm, of_row)
    flat = not (sharded or on_host) and compute.dtype != torch.float32
    compiled = compiles_adamw(compute.compile and not on_host, n_trained, n_shards, log.say, flat)
    with loading(weights, n_shards):
        how = estimate.per_unit_of(args), args.use_activation_checkpointing, compute.attention_kept
        blocks = make_units(lm, *how)
        if compute.compile:
            for unit in blocks:
                compile_forward(unit, args.activation_memory_budget)
        model = DecoderLoss(lm, blocks, compute.compile, slim=on_host)
        model.tail.group = of_row
        if args.freeze_router:
            model.routers.requires_grad_(False)
        if on_host:
            in_fp32 = set(model.routers.parameters()) if model.routers else set()
            for p in set(lm.parameters()) - in_fp32:  # on the meta device
                p.data = p.data.to(compute.dtype)
        tied = config.tie_word_embeddings
        if sharded:
            how = compute.dtype, args.reshard_after_forward
            shard(model, tied, *how, mesh, of_experts and of_experts[SHARD], slim=on_host)
        if on_host:
            log.say(once_per_node(world, lambda: prepare_host(model, world)))
        if args.activations_on_host:
            shape = B, data.train.seq_len // part.of, config.hidden_size
            how = shape, compute.dtype, world, log.say, on_host and host_need(model, world)
            model.on_host = keep_on_host(len(blocks), *how)
        allocate(model, world.device)
        if tied:  # allocated separately
            lm.lm_head.weight = lm.model.embed_tokens.weight
        units, optimized = [], None
        if on_host:
            units = (sharded_units if sharded else plain_units)(model, compute.compile)
            optimized = HostAdamW(units, horizon.lr, args.weight_decay)
        if sharded and compute.dtype != torch.float32:
            engines = choose_engines(args.copy_engines, world, group, blocks, log)
            unsharded_sums = accum > 1 and not on_host
            how = (compute.dtype, unsharded_sums, compute.compile, engines, clock.comm.call)
            summed = 1 if compresses else replicas
            for missing in reduce_traffic(model, world, group, *how, units, summed):
                log.say(f"fsdp: {missing}")
        store = optimized and optimized.keep
        fill(lm, "model", weights, args.seed, store)
        if not tied:
            fill(lm, "lm_head", weights, args.seed, store)
        if on_host:
            optimized.allocate()
        elif flat:
            in_fp32 = set(model.routers.parameters()) if model.routers else set()
            how = compute.dtype, accum > 1, compiled, in_fp32
            optimized = Masters(model, list(model.units), *how)
        else:
            optimized = Shards(model)
    here = sum(p.numel() for p in optimized.params)
    processes = counted(world.size, "process", "processes")
    way = f"{way} on {processes}{more}" if sharded else "one plain process"
    what = f"{n_params:,} parameters, {here:,} here"
    if lora:
        what = f"{n_params:,} frozen parameters, {n_trained:,} trained in adapters, "
        what += f"{here:,} of them here"
    log.say(f"{way}: {what}")
    optimizer = optimized
    if not on_host:
        optimizer = make_adamw(optimized.params, horizon.lr, args.weight_decay, compiled)
        optimized.follow(optimizer)
    loss_scale = LossScale(compute.dtype, world.device)
    low_rank = None
    if compresses:
        exact = args.warmup_steps if args.psgd_start is None else args.psgd_start
        how = args.psgd_rank, exact, grid, checkpoints.first_step
        low_rank = LowRank(optimized.model_params, *how)
        log.say(low_rank.describe())
        if exact >= horizon.max_steps:
            log.say(f"warning: the run ends at step {horizon.max_steps}, before PowerSGD starts")
    elif args.psgd_rank:
        log.say("warning: --psgd_rank has no effect with one copy of the model")
    if model.routers:
        clock.router_load = model.routers.take_load
    fixed = () if lora else not_optimized(model)  # a frozen base is not in checkpoints
    state = functools.partial(training_state, optimized.views, optimizer, grid, low_rank, fixed)
    if checkpoints.path:
        fill_adam_state(optimizer, checkpoints.facts["adam_steps"])
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
            here, index = part.of_positions(index, shape[1])
            targets, answers = (x if x is None else x[here] for x in (targets, answers))
        labels = to_device(world.device, index, targets, answers)
        return model(*to_device(world.device, *inputs), documents, *labels)

    def ask(batch, index):
        tokens = forward(batch, index)
        if of_row is None:
            return tokens
        here, _ = part.of_positions(index, batch.input_ids.shape[1])
        return from_owners(tokens, here, of_row)

    def batches_of(rows):
        here = world.rank // part.of, data_parallel
        return micro_batches(data.train, rows, *here, B, data.max_docs)

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
            if model.routers:
                model.routers.see(*to_device(world.device, real_tokens(batch, part)))
            if sharded:
                accumulate(model, args.reshard_after_forward, i == accum - 1, every=on_host)
            loss = forward(batch, *label_positions(batch.labels)) / n_labels
            (loss * loss_scale.scale).backward()
            optimized.take_grads(last=i == accum - 1)
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
    def evaluate(micro):
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        here = data.heldout, world.rank // part.of, data_parallel, micro, data.max_docs
        for batch, *labels in heldout_batches(*here):
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
        how = args, config, compute, train, world
        n, why = from_rank0(world, lambda: estimate.choose_spread(*how))
    how = "all on each rank" if n == 1 else f"spread over {n} ranks"
    log.say(f"experts: {how} ({why})")
    log.resolved(expert_parallel=n)
    return n


def shard(
    model: DecoderLoss, tied: bool, dtype: torch.dtype, reshard: bool, mesh, spread, slim: bool
) -> None:
    """Shard each unit with FSDP2 over a mesh. Embedding, last norm and head form one unit if tied,
    else two, so that transfers of the head's weight and gradient overlap with blocks' compute.
    spread: the mesh of the ranks with the same experts, or None.
    slim: if resharding, free the embedding after the forward too."""
    policy = precision(dtype)
    shard_units(model, dtype, mesh, reshard, spread)
    if reshard and slim and not tied:  # the backward does not need the embedding's weight
        how = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}
        fully_shard(model.embed_tokens, **how).set_unshard_in_backward(False)
    for end in (model,) if tied else (model.tail, model):
        fully_shard(end, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    sum_over_ranks(model)


def choose_engines(asked: bool | None, world, group, units: list[Blocks], log: Log) -> bool:
    """Whether blocks use copy engines. Logs the reason."""
    # experts that are spread are transferred apart
    apart = {p for u in units for m in u.modules() if hasattr(m, "grid") for p in m.parameters()}
    largest = max(sum(p.numel() for p in {*unit.parameters()} - apart) for unit in units)
    engines, why = copy_engines.choose_copy_engines(asked, world, group, largest)
    log.say(f"copy engines: {'yes' if engines else 'no'} ({why})")
    log.resolved(copy_engines=engines)
    return engines


if __name__ == "__main__":
    run(main, parse, less_memory)
