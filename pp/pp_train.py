"""Fine-tune a Hugging Face decoder in a DeepSpeed pipeline (1F1B, and replicas of it).

bash pp/launch_pp.sh                                         2 GPUs, or 2 processes on a CPU
bash pp/launch_pp.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
NPROC_PER_NODE=4 bash pp/launch_pp.sh                        2 stages x 2 replicas
"""

import functools
import itertools

import llm_demo  # noqa: F401  first: it catches what imports refuse

# isort: split
import torch
import torch.distributed as dist

from llm_demo.core.batch import answers_of, label_positions, to_device
from llm_demo.core.decoder import skeleton
from llm_demo.core.errors import counted
from llm_demo.core.loop import prepare, train
from llm_demo.core.optim import compiles_adamw, make_adamw, set_lr
from llm_demo.core.rows import boundaries, heldout_rows, micro_batches, share_of
from llm_demo.core.weights import materialise
from llm_demo.job.args import less_memory, parse_args
from llm_demo.job.costs import param_count, unit_sizes
from llm_demo.job.dist import run, start
from llm_demo.job.log import Log
from llm_demo.job.plan import make_plan
from llm_demo.job.source import refuse_experts
from llm_demo.job.weights_files import loading
from pp.cut import describe_split, given_counts, split
from pp.flags import GROUPS

parse = functools.partial(parse_args, __doc__, *GROUPS)


def main() -> None:
    args = parse()
    # after the flags: importing DeepSpeed takes seconds
    from pp import ds_engine, ds_state, estimate, stages
    from pp.deepspeed_base import facts_of, join, set_masters

    world = start()
    args.check_processes(world.size)
    switches = ds_engine.read_switches(args.deepspeed_config)
    where = list(range(args.stages))
    where += where[::-1] if args.schedule == "dualpipev" else []
    pieces = len(where)

    # decisions and data
    log = Log(args, world, "pp")
    replicas = world.size // args.stages

    def refuse(config):
        refuse_experts(config)
        given_counts(config, pieces, args.partition)

    plan = make_plan(args, world, log, replicas, refuse)
    (_, config, weights, _), data, compute, horizon = plan[:4]
    B, S, accum = args.micro_batch_size, data.train.seq_len, args.grad_accum_steps
    checkpointing = args.use_activation_checkpointing
    counts = split(config, pieces, args.partition, B, S, checkpointing)
    parallelism = f"pipeline of {counted(args.stages, 'stage')}"
    log.resolved(partition=",".join(map(str, counts)), parallelism=parallelism)
    log.say(f"pipeline: {describe_split(counts, where, config, B, S, checkpointing)}")
    if args.estimate:
        zero = switches.get("zero_optimization", {})
        log.say(estimate.table(args, config, compute, data.train, replicas, counts, zero))
        return
    ready = prepare(args, world, plan, log, copies=replicas > 1)
    if not ready:
        return
    estimate.check_host(args, config, replicas, counts, world)
    clock, checkpoints = ready

    # model: each stage makes only its own layers
    join(world.device)
    lm = skeleton(config, compute.attn_impl, weights)
    n_params = param_count(lm)
    layouts = [stages.Layout(lm.model.rotary_emb, compute.attn_impl, world.device) for _ in counts]
    budget = args.activation_memory_budget if compute.compile else None
    make = functools.partial(materialise, lm, weights=weights, seed=args.seed, device=world.device)
    sizes = [unit_sizes(config, count, args.blocks_per_unit) for count in counts]
    specs, bounds = stages.layer_specs(lm.config, make, sizes, layouts, checkpointing, budget)
    loss_fn = functools.partial(stages.loss_fn, compiled=compute.compile)
    score_fn = functools.partial(stages.score_fn, compiled=compute.compile)
    kind = ds_engine.PipelineV if args.schedule == "dualpipev" else ds_engine.Pipeline
    with loading(weights, args.stages):
        module = kind(specs, bounds, args.stages, loss_fn=loss_fn)

    # optimizer and engine
    compiled = compiles_adamw(compute.compile, n_params, world.size, log.say)
    optimizer = make_adamw(module.parameters(), horizon.lr, args.weight_decay, compiled)
    settings = ds_engine.engine_config(
        switches, compute.dtype, micro=B, accum=accum, clip=args.max_grad_norm
    )
    engine = ds_engine.make_engine(module, optimizer, settings, compute.compile)
    if weights and compute.dtype != torch.float32:
        set_masters(engine, weights)
    if checkpoints.path:
        ds_state.load_state(engine, checkpoints.load, checkpoints.facts)
    else:
        ds_state.make_moments(engine)
    replica = engine.grid.get_data_parallel_id()

    def feed(packs, rows, factor=None, micro=B):
        """(inputs, labels) of each micro-batch: the first stage uses inputs, the last labels.
        Without a factor, labels are for `score_fn`."""
        share = share_of(rows, replica, replicas, micro)
        for layout in layouts:
            layout.follow(boundaries(packs, group, data.max_docs) for group in share)
        batches = micro_batches(packs, rows, replica, replicas, micro, data.max_docs)

        def pairs():
            for batch in clock.data(batches):
                index, targets = label_positions(batch.labels)
                last = torch.tensor(factor) if factor else answers_of(index, batch.cu_seqlens)
                labels = to_device(world.device, index, targets, last)
                yield to_device(world.device, batch.input_ids)[0], labels

        return pairs()

    def step(rows, n_labels, lr):
        set_lr(engine.optimizer, lr)
        # The engine averages over micro-batches and replicas. The factor turns that into the step's
        # token mean.
        factor = accum * replicas / n_labels
        total = engine.train_batch(feed(data.train, rows, factor))
        done = clock.history.step + 1
        if done == 1 or args.check_tied_every and done % args.check_tied_every == 0:
            if ds_engine.tied_copies_differ(engine):
                raise RuntimeError(f"step {done}: the stages' copies of the tied weight differ")
        if done % args.log_every == 0:
            ds_engine.forget_timers(engine)
        share = total if world.rank == 0 else torch.zeros_like(total)  # every rank has the total
        return share, engine.get_global_grad_norm()

    def evaluate(packs, micro):
        rows = heldout_rows(packs, replicas, micro, at_least=pieces)
        count = rows.size // replicas // micro
        batches = feed(packs, rows, micro=micro)
        scores = ds_engine.forward_only(engine, batches, count, score_fn, reshape=micro != B)
        if not scores:
            return torch.zeros(2, dtype=torch.float64, device=world.device)
        return torch.stack(scores).sum(0, dtype=torch.float64)

    def ask(batch, index):
        for layout in layouts:
            layout.follow(itertools.repeat(batch.cu_seqlens))
        inputs = to_device(world.device, batch.input_ids)[0], to_device(world.device, index)
        # DualPipeV needs several micro-batches: repeat the same one
        out = ds_engine.forward_only(engine, itertools.repeat(inputs), pieces, stages.ask_fn)
        tokens = out[0] if out else torch.zeros_like(index, device=world.device)
        group = engine.grid.get_pipe_parallel_group()
        dist.broadcast(tokens, src=engine._loss_stage_global_rank(), group=group)
        return tokens

    state = functools.partial(ds_state.training_state, engine)
    facts = functools.partial(facts_of, engine)
    train(args, world, plan, log, clock, checkpoints, step, evaluate, ask, state, facts)


if __name__ == "__main__":
    run(main, parse, less_memory)
