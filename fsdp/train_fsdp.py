"""Fine-tune a Hugging Face decoder with FSDP2 (parameters, gradients and optimizer states sharded).

bash fsdp/launch_fsdp.sh                                     all GPUs, or 2 processes on a CPU
bash fsdp/launch_fsdp.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
python fsdp/train_fsdp.py                                    one process: the plain model
"""

import functools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp.flags import FsdpArgs
from fsdp.fsdp2 import spare_bytes
from llm_demo import estimate
from llm_demo.args import parse_args
from llm_demo.data.batch import answers_of, learnt, to_device
from llm_demo.dist import World, run, start
from llm_demo.errors import UserError
from llm_demo.model.attention import make_documents
from llm_demo.model.compiling import compile_forward
from llm_demo.model.costs import param_count
from llm_demo.model.decoder import Blocks, DecoderLoss, skeleton, unit_sizes
from llm_demo.model.weights import allocate, fill, loading
from llm_demo.optim import (
    MOMENTS,
    LossScale,
    Shards,
    adam_steps,
    adam_views,
    clipped_step,
    compiles_adamw,
    fill_adam_state,
    lr_at,
    make_adamw,
)
from llm_demo.parallel import copy_engines
from llm_demo.parallel.masters import Masters
from llm_demo.plan import (
    Plan,
    heldout_rows,
    heldout_score,
    make_plan,
    micro_batches,
    rows_of,
    show_answers,
    token_counts,
    try_forward,
)
from llm_demo.run.checkpoint import Checkpoints

parse = functools.partial(parse_args, __doc__, FsdpArgs)


def main() -> None:
    args = parse()
    world = start()
    if args.fsdp is False and world.size > 1:
        raise UserError(f"--no_fsdp is for one process, here are {world.size}: NPROC_PER_NODE=1")
    if args.fsdp is None:
        args.fsdp = world.size > 1 or args.reshard_after_forward

    # decisions and data
    plan = make_plan(args, world, "fsdp", replicas=world.size)
    B, S = args.micro_batch_size, args.seq_len
    if args.copy_engines and not (args.fsdp and plan.dtype != torch.float32):
        raise UserError("--copy_engines: they serve FSDP in bf16 or fp16")
    if args.estimate:
        plan.run.say(estimate.describe(estimate.of_fsdp(plan, args, world.size)))
        return

    checkpoints = Checkpoints(plan, args, world)
    if checkpoints.first_step >= plan.max_steps:
        checkpoints.nothing_left()
        return

    # model
    lm = skeleton(plan.config, plan.attn_impl, plan.weights)
    n_params = param_count(lm)
    with loading(plan.weights, world.size):
        model = build(lm, plan, args, world, shard if args.fsdp else None)
    flat = not args.fsdp and plan.dtype != torch.float32
    compiled = compiles_adamw(plan.compile, n_params, world.size, plan.run.say, flat)
    model_params = params = list(model.parameters())
    masters = sharded_over = None
    if args.fsdp:
        shards = Shards(model)
        params, sharded_over = shards.local, dist.group.WORLD
    elif flat:
        accumulates = args.grad_accum_steps > 1
        masters = Masters(model, list(model.units), plan.dtype, accumulates, compiled)
        params = masters.params
    how = f"FSDP2 over {world.size} processes" if args.fsdp else "one plain process"
    plan.run.say(f"{how}: {n_params:,} parameters, {sum(p.numel() for p in params):,} here")

    # optimizer
    optimizer = make_adamw(params, plan.lr, args.weight_decay, compiled)
    if masters:
        masters.follow(optimizer)
    loss_scale = LossScale(plan.dtype, world.device)
    if masters:
        views = masters.views
    else:  # of `model_params`: after an evaluation the model's parameters are the gathered weights
        views = functools.partial(adam_views, list(zip(model_params, params, strict=True)))
    state = functools.partial(training_state, views, optimizer)
    if checkpoints.path:
        fill_adam_state(optimizer, checkpoints.facts["adam_steps"])
        tensors = state()
        checkpoints.load(tensors)
        if masters:
            masters.store({p: tensors.pop(p.hf_name) for p in model_params})
        del tensors
        loss_scale.load(checkpoints.facts["loss_scale"])

    def forward(batch, index, targets=None, answers=None):
        shape = tuple(batch.input_ids.shape)
        documents = make_documents(batch.cu_seqlens, shape, plan.attn_impl, world.device)
        inputs = to_device(world.device, batch.input_ids, batch.position_ids)
        return model(*inputs, documents, *to_device(world.device, index, targets, answers))

    @torch.no_grad()
    def evaluate() -> tuple[float, int, int]:
        micro = args.eval_batch_size or B
        rows = heldout_rows(plan, micro)
        total = torch.zeros(2, device=world.device)
        for batch in micro_batches(plan, plan.heldout, rows, world.rank, micro):
            index, targets = learnt(batch.labels)
            total += forward(batch, index, targets, answers_of(index, batch.cu_seqlens))
        dist.all_reduce(total)
        return heldout_score(plan, total)

    def facts() -> dict:
        return {"adam_steps": adam_steps(optimizer), "loss_scale": loss_scale.facts()}

    if args.dry_run:
        try_forward(plan, args, forward)
        plan.run.say("dry run: everything is ready for step 1")
        return
    plan.run.begin(plan.max_steps, plan.flops_per_token, plan.dtype)
    checkpoints.begin()
    if plan.heldout and not checkpoints.path:
        plan.run.log_eval(0, *evaluate())

    for step in range(checkpoints.first_step, plan.max_steps):
        # rows and label count of the whole step, over all ranks: known without communication
        rows = rows_of(plan, args, step)
        n_tokens, n_labels = token_counts(plan.train, rows)
        total = torch.zeros((), device=world.device)
        for i, batch in enumerate(micro_batches(plan, plan.train, rows, world.rank, B)):
            if args.fsdp:
                accumulate(model, args, last=i == args.grad_accum_steps - 1)
            loss = forward(batch, *learnt(batch.labels)) / n_labels
            (loss * loss_scale.scale).backward()
            if masters:
                masters.take_grads()
            total += loss.detach()

        # clip and step, or skip on all ranks
        lr = lr_at(step, plan.lr, args.warmup_steps, plan.max_steps, args.lr_scheduler)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if args.fsdp:
            shards.take_grads()
        norm = clipped_step(optimizer, args.max_grad_norm, loss_scale, sharded_over)

        # log: the numbers are read a step later, so the host never waits for the device
        plan.run.end_step(step + 1, n_tokens, n_labels, rows.size * S, total, norm, lr)
        if plan.heldout and (
            step + 1 == plan.max_steps or args.eval_every and (step + 1) % args.eval_every == 0
        ):
            plan.run.log_eval(step + 1, *evaluate())
        checkpoints.after_step(step + 1, state, facts)

    checkpoints.finish()
    checkpoints.export()
    with torch.no_grad():
        show_answers(plan, args, forward)
    plan.run.finish()


def training_state(views, optimizer) -> dict[str, torch.Tensor]:
    """{Hugging Face name: fp32 master, name.exp_avg: ..., name.exp_avg_sq: ...}, in place; sharded
    as the parameters are. views: as `adam_views`."""
    found = {}
    for p, *tensors in views(optimizer):
        for key, t in zip(("", *(f".{k}" for k in MOMENTS)), tensors, strict=True):
            if isinstance(p, DTensor):
                how = {"shape": p.shape, "stride": p.stride()}
                t = DTensor.from_local(t, p.device_mesh, p.placements, **how)
            found[p.hf_name + key] = t
    return found


def build(lm, plan: Plan, args, world: World, wrap) -> DecoderLoss:
    """A skeleton as units with weights. `wrap(unit, plan, args)` shards them before they have any,
    so that no process ever makes or reads more than its share."""
    units, i = [], 0
    for size in unit_sizes(plan.config, plan.config.num_hidden_layers, args.blocks_per_unit):
        units.append(Blocks(list(lm.model.layers[i : i + size]), args.use_activation_checkpointing))
        i += size
        if plan.compile:
            compile_forward(units[-1], args.activation_memory_budget)
        if wrap:
            wrap(units[-1], plan, args)
    model = DecoderLoss(lm, units, plan.compile)
    if wrap:
        wrap_ends(model, plan)
        if plan.dtype != torch.float32:
            largest = max(sum(p.numel() for p in unit.parameters()) for unit in units)
            engines, why = copy_engines.choose(args.copy_engines, world, largest)
            plan.run.say(f"copy engines: {'yes' if engines else 'no'} ({why})")
            plan.run.resolved["copy_engines"] = engines
            accumulates = args.grad_accum_steps > 1
            spare_bytes(model, world, plan.dtype, accumulates, plan.compile, engines)
    allocate(model, world.device)
    fill(lm, "model", plan.weights, args.seed)
    if plan.config.tie_word_embeddings:  # allocated apart
        lm.lm_head.weight = lm.model.embed_tokens.weight
    else:
        fill(lm, "lm_head", plan.weights, args.seed)
    return model


def policy(plan: Plan) -> MixedPrecisionPolicy:
    if plan.dtype == torch.float32:
        return MixedPrecisionPolicy()
    # fp32 shards are the masters; gradients are summed over ranks and micro-batches in fp32
    return MixedPrecisionPolicy(param_dtype=plan.dtype, reduce_dtype=torch.float32)


def shard(unit: Blocks, plan: Plan, args) -> None:
    fully_shard(unit, mp_policy=policy(plan), reshard_after_forward=args.reshard_after_forward)


def wrap_ends(model: DecoderLoss, plan: Plan) -> None:
    """Embedding, last norm and head: one unit where they are tied, else two, so that the head's
    weight and gradient travel while blocks compute."""
    if not plan.config.tie_word_embeddings:
        fully_shard(model.tail, mp_policy=policy(plan), reshard_after_forward=False)
    fully_shard(model, mp_policy=policy(plan), reshard_after_forward=False)
    # The loss is divided by the step's token count already, so gradients are summed over ranks.
    # Left to itself FSDP2 averages, or sums, depending on backend and version.
    for unit in model.modules():
        if isinstance(unit, FSDPModule):  # each unit: neither setting reaches those inside it
            unit.set_gradient_divide_factor(1.0)
            if hasattr(unit, "set_force_sum_reduction_for_comms"):
                # without it gloo has no such operation
                unit.set_force_sum_reduction_for_comms(True)


def accumulate(model: DecoderLoss, args, last: bool) -> None:
    """Between micro-batches gradients stay unreduced, weights gathered unless memory is short."""
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last or args.reshard_after_forward)


if __name__ == "__main__":
    run(main, parse)
