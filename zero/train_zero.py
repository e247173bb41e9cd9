"""Fine-tune a Hugging Face decoder with DeepSpeed ZeRO (stages 1, 2 and 3, also offloaded).

bash zero/launch_zero.sh                                     all GPUs, or 2 processes on a CPU
bash zero/launch_zero.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
bash zero/launch_zero.sh --deepspeed_config zero/ds_zero3_offload.json
"""

import functools

import llm_demo  # noqa: F401  first: it catches what imports refuse

# isort: split
import torch

from llm_demo.core.attention import make_documents
from llm_demo.core.batch import label_positions, to_device
from llm_demo.core.decoder import DecoderLoss, compile_forward, make_units, skeleton
from llm_demo.core.errors import counted
from llm_demo.core.loop import heldout_batches, prepare, train
from llm_demo.core.optim import compiles_adamw, make_adamw, set_lr
from llm_demo.core.rows import micro_batches
from llm_demo.job.args import less_memory, parse_args
from llm_demo.job.costs import param_count, unit_sizes
from llm_demo.job.dist import run, start
from llm_demo.job.log import Log
from llm_demo.job.plan import make_plan
from llm_demo.job.source import refuse_experts
from llm_demo.job.weights_files import loading
from zero.flags import GROUPS

parse = functools.partial(parse_args, __doc__, *GROUPS)


def main() -> None:
    args = parse()
    # after the flags: importing DeepSpeed takes seconds
    from pp.deepspeed_base import facts_of, join, set_masters
    from zero import ds_engine, ds_state, estimate

    world = start()
    switches = ds_engine.read_switches(args.deepspeed_config)

    # decisions and data
    log = Log(args, world, "zero")
    parallelism = ds_engine.describe(switches)
    if switches["zero_optimization"]["stage"] == 3:
        args.comm_timer = False  # its gathers and reductions end later than the calls
    log.resolved(parallelism=parallelism, comm_timer=args.comm_timer)
    plan = make_plan(args, world, log, world.size, refuse_experts)
    (_, config, weights, _), data, compute, horizon = plan[:4]
    B, accum = args.micro_batch_size, args.grad_accum_steps
    settings = ds_engine.engine_config(
        switches,
        compute.dtype,
        micro=B,
        accum=accum,
        clip=args.max_grad_norm,
        compiled=compute.compile,
    )
    if args.estimate:
        log.say(estimate.table(args, config, compute, data.train, world.size, settings))
        return
    ready = prepare(args, world, plan, log, copies=True)
    if not ready:
        return
    clock, checkpoints = ready
    estimate.check_host(args, config, compute, settings, world, log.say)

    # model: stage 3 shards each block as soon as it has weights
    join(world.device)
    lm = skeleton(config, compute.attn_impl, weights)
    n_params = param_count(lm)
    sizes = unit_sizes(config, config.num_hidden_layers, args.blocks_per_unit)
    units = make_units(lm, sizes, args.use_activation_checkpointing)
    if compute.compile:
        for unit in units:
            compile_forward(unit, args.activation_memory_budget)
    with loading(weights, 1):
        ds_engine.build(lm, weights, args.seed, world.device, compute.dtype, settings)
    model = DecoderLoss(lm, units, compute.compile)

    # optimizer and engine
    on_host = "offload_optimizer" in settings["zero_optimization"]
    compiled = compiles_adamw(compute.compile and not on_host, n_params, world.size, log.say)
    optimizer = make_adamw(model.parameters(), horizon.lr, args.weight_decay, compiled)
    engine = ds_engine.make_engine(model, optimizer, settings)
    processes = counted(world.size, "process", "processes")
    log.say(f"{parallelism} over {processes}: {n_params:,} parameters")
    if checkpoints.path:
        ds_state.load_state(engine, checkpoints.load, checkpoints.facts)
    else:
        if weights and compute.dtype != torch.float32:
            set_masters(engine, weights)
        ds_state.make_moments(engine)

    def forward(batch, index, targets=None, answers=None, call=model):
        shape = tuple(batch.input_ids.shape)
        documents = make_documents(batch.cu_seqlens, shape, compute.attn_impl, world.device)
        inputs = to_device(world.device, batch.input_ids, batch.position_ids)
        return call(*inputs, documents, *to_device(world.device, index, targets, answers))

    def step(rows, n_labels, lr):
        set_lr(engine.optimizer, lr)
        total = torch.zeros((), device=world.device)
        batches = micro_batches(data.train, rows, world.rank, world.size, B, data.max_docs)
        for i, batch in enumerate(clock.data(batches)):
            # By hand: the engine would count micro-batches, also those before a resumed run.
            engine.set_gradient_accumulation_boundary(i == accum - 1)
            loss = forward(batch, *label_positions(batch.labels), call=engine) / n_labels
            # the engine averages over ranks, which the factor undoes
            engine.backward(loss * world.size, scale_wrt_gas=False)
            total += loss.detach()
        engine.step()
        return total, engine.get_global_grad_norm()

    @torch.no_grad()
    def evaluate(packs, micro):
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        batches = heldout_batches(packs, world.rank, world.size, micro, data.max_docs)
        for batch, *labels in batches:
            total += forward(batch, *labels)
        return total

    state = functools.partial(ds_state.training_state, engine)
    facts = functools.partial(facts_of, engine)
    train(args, world, plan, log, clock, checkpoints, step, evaluate, forward, state, facts)


if __name__ == "__main__":
    run(main, parse, less_memory)
