"""Fine-tune a Hugging Face decoder in a DeepSpeed pipeline (1F1B, and replicas of it).

bash pp/launch_pp.sh                                         2 GPUs, or 2 processes on a CPU
bash pp/launch_pp.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
NPROC_PER_NODE=4 bash pp/launch_pp.sh                        2 stages x 2 replicas
"""

import functools
import itertools

import torch
import torch.distributed as dist

from llm_demo import estimate
from llm_demo.args import parse_args
from llm_demo.data.batch import answers_of, learnt, to_device
from llm_demo.data.steps import boundaries
from llm_demo.dist import run, start
from llm_demo.errors import UserError
from llm_demo.model.costs import param_count
from llm_demo.model.decoder import skeleton
from llm_demo.model.weights import loading
from llm_demo.optim import compiles_adamw, lr_at, make_adamw
from llm_demo.plan import (
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
from pp.flags import PipeArgs

parse = functools.partial(parse_args, __doc__, PipeArgs)


def main() -> None:
    args = parse()
    from pp import ds_engine, ds_state, stages  # after the flags: importing DeepSpeed takes seconds

    world = start()
    if args.stages < 1 or world.size % args.stages:
        raise UserError(f"{world.size} processes can't form pipelines of {args.stages} --stages")
    switches = ds_engine.read_switches(args.deepspeed_config)

    pieces = args.stages * (2 if args.schedule == "dualpipev" else 1)
    if args.schedule == "dualpipev" and (args.stages < 2 or args.grad_accum_steps < pieces):
        raise UserError(
            "--schedule dualpipev wants 2 --stages or more, and --grad_accum_steps of at least "
            f"2 x stages: {max(4, pieces)}"
        )

    # decisions and data
    plan = make_plan(args, world, "pp", replicas=world.size // args.stages)
    B, S = args.micro_batch_size, args.seq_len
    ac = args.use_activation_checkpointing
    counts = stages.split(plan.config, pieces, args.partition, S, ac)
    plan.run.resolved["partition"] = ",".join(map(str, counts))
    plan.run.say(f"pipeline: {stages.describe_split(counts, plan.config, S, ac)}")
    if args.estimate:
        held = ds_engine.pieces_held(args.schedule, args.stages, counts, args.grad_accum_steps)
        plan.run.say(estimate.describe(estimate.of_pipeline(plan, args, held)))
        return

    checkpoints = Checkpoints(plan, args, world, copies=plan.replicas > 1)
    if checkpoints.first_step >= plan.max_steps:
        checkpoints.nothing_left()
        return

    # model: each stage makes its own layers only
    ds_engine.join(world.device)
    lm = skeleton(plan.config, plan.attn_impl, plan.weights)
    n_params = param_count(lm)
    specs, bounds, layouts = stages.layer_specs(lm, plan, args, counts, world.device)
    loss_fn = functools.partial(stages.loss_fn, compiled=plan.compile)
    score_fn = functools.partial(stages.score_fn, compiled=plan.compile)
    kind = ds_engine.PipelineV if args.schedule == "dualpipev" else ds_engine.Pipeline
    with loading(plan.weights, args.stages):
        module = kind(specs, bounds, args.stages, loss_fn=loss_fn)

    # optimizer and engine
    compiled = compiles_adamw(plan.compile, n_params, world.size, plan.run.say)
    optimizer = make_adamw(module.parameters(), plan.lr, args.weight_decay, compiled)
    config = ds_engine.engine_config(
        switches, plan.dtype, B, args.grad_accum_steps, args.max_grad_norm
    )
    engine = ds_engine.make_engine(module, optimizer, config, plan.compile)
    if plan.weights and plan.dtype != torch.float32:
        ds_state.set_masters(engine, module, plan.weights)
    if checkpoints.path:
        ds_state.load_state(engine, checkpoints.load, checkpoints.facts)
    else:
        ds_state.make_moments(engine)
    replica = engine.grid.get_data_parallel_id()

    def feed(packs, rows, factor=None, micro=B):
        """(inputs, labels) of each micro-batch; the first stage takes one, the last the other.
        Without a factor: labels for `score_fn`."""
        mine = rows.reshape(-1, plan.replicas, micro)[:, replica]
        for layout in layouts:
            layout.follow(boundaries(packs, group, plan.max_docs) for group in mine)

        def pairs():
            for batch in micro_batches(plan, packs, rows, replica, micro):
                index, targets = learnt(batch.labels)
                last = torch.tensor(factor) if factor else answers_of(index, batch.cu_seqlens)
                labels = to_device(world.device, index, targets, last)
                yield to_device(world.device, batch.input_ids)[0], labels

        return pairs()

    def evaluate() -> tuple[float, int, int]:
        micro = args.eval_batch_size or B
        rows = heldout_rows(plan, micro, at_least=pieces)
        count = rows.size // plan.replicas // micro
        batches = feed(plan.heldout, rows, micro=micro)
        scores = ds_engine.forward_only(engine, batches, count, score_fn, reshape=micro != B)
        total = torch.stack(scores).sum(0) if scores else torch.zeros(2, device=world.device)
        dist.all_reduce(total)
        return heldout_score(plan, total)

    def ask(batch, index):
        for layout in layouts:
            layout.follow(itertools.repeat(batch.cu_seqlens))
        inputs = to_device(world.device, batch.input_ids)[0], to_device(world.device, index)
        # a V wants several micro-batches: the same one
        out = ds_engine.forward_only(engine, itertools.repeat(inputs), pieces, stages.ask_fn)
        tokens = out[0] if out else torch.zeros_like(index, device=world.device)
        group = engine.grid.get_pipe_parallel_group()
        dist.broadcast(tokens, src=engine._loss_stage_global_rank(), group=group)
        return tokens

    if args.dry_run:
        try_forward(plan, args, ask)
        plan.run.say("dry run: everything is ready for step 1")
        return
    plan.run.begin(plan.max_steps, plan.flops_per_token, plan.dtype)
    checkpoints.begin()
    if plan.heldout and not checkpoints.path:
        plan.run.log_eval(0, *evaluate())

    state = functools.partial(ds_state.training_state, engine)
    facts = functools.partial(ds_state.facts_of, engine)
    for step in range(checkpoints.first_step, plan.max_steps):
        # rows and label count of the whole step, over all ranks: known without communication
        rows = rows_of(plan, args, step)
        n_tokens, n_labels = token_counts(plan.train, rows)

        # forward, backward, clip and step. The engine averages over micro-batches and replicas:
        # the factor makes that the token mean of the step
        lr = lr_at(step, plan.lr, args.warmup_steps, plan.max_steps, args.lr_scheduler)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        factor = args.grad_accum_steps * plan.replicas / n_labels
        total = engine.train_batch(feed(plan.train, rows, factor))
        norm = engine.get_global_grad_norm()
        if step == 0 or args.check_tied_every and (step + 1) % args.check_tied_every == 0:
            if ds_engine.tied_copies_differ(engine):
                raise RuntimeError(f"step {step + 1}: the stages' copies of the tied weight differ")

        # log: the numbers are read a step later, so the host never waits for the device
        if (step + 1) % args.log_every == 0:
            ds_engine.forget_timers(engine)
        share = total if world.rank == 0 else torch.zeros_like(total)  # every rank has the whole
        plan.run.end_step(step + 1, n_tokens, n_labels, rows.size * S, share, norm, lr)
        if plan.heldout and (
            step + 1 == plan.max_steps or args.eval_every and (step + 1) % args.eval_every == 0
        ):
            plan.run.log_eval(step + 1, *evaluate())
        checkpoints.after_step(step + 1, state, facts)

    checkpoints.finish()
    checkpoints.export()
    show_answers(plan, args, ask)
    plan.run.finish()


if __name__ == "__main__":
    run(main, parse)
