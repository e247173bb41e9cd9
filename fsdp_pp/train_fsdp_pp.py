"""Fine-tune a Hugging Face decoder in a pipeline whose stages are sharded with FSDP2.

bash fsdp_pp/launch_fsdp_pp.sh                               all GPUs, or 2 processes on a CPU
bash fsdp_pp/launch_fsdp_pp.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
NPROC_PER_NODE=4 bash fsdp_pp/launch_fsdp_pp.sh              2 stages, each sharded over 2 ranks
"""

import functools
import os

import llm_demo  # noqa: F401  first: it catches what imports refuse

# isort: split
import torch
import torch.distributed as dist

from fsdp.copy_engines import choose_copy_engines
from fsdp.sharding import accumulate
from fsdp.shards import not_optimized, training_state
from fsdp_pp import estimate, orders, runner
from fsdp_pp.build import build
from fsdp_pp.flags import GROUPS
from fsdp_pp.tied import TiedEnds, tied_group
from fsdp_pp.transfers import Links, receive_early
from llm_demo.core.attention import make_documents
from llm_demo.core.batch import label_positions, to_device
from llm_demo.core.loop import heldout_batches, prepare, train
from llm_demo.core.masters import Masters
from llm_demo.core.mesh import SHARD, STAGE, make_mesh, on_device
from llm_demo.core.optim import (
    LossScale,
    adam_steps,
    clipped_step,
    fill_adam_state,
    make_adamw,
    set_lr,
)
from llm_demo.core.rows import heldout_rows, micro_batches
from llm_demo.job.args import less_memory, parse_args
from llm_demo.job.dist import run, start
from llm_demo.job.log import Log
from llm_demo.job.plan import make_plan
from llm_demo.job.source import check_experts
from pp.cut import describe_split, given_counts, split

parse = functools.partial(parse_args, __doc__, *GROUPS)


def main() -> None:
    args = parse()
    # One queue for each stream: a receive that waits must not hold up another stream's work.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Each transfer has a group of its own, as the warning advises.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    world = start()
    args.check_processes(world.size)
    n_shards = world.size // args.stages
    sharded = n_shards > 1
    stage, shard = divmod(world.rank, n_shards)
    where = orders.stages_of(args.schedule, args.stages)
    last = len(where) - 1

    # decisions and data
    log = Log(args, world, "fsdp_pp")
    checkpointing = args.use_activation_checkpointing

    def refuse(config):
        check_experts(args, config)
        given_counts(config, len(where), args.partition)

    plan = make_plan(args, world, log, n_shards, refuse)
    (_, config, _, _), data, compute, horizon = plan[:4]
    B, accum, S = args.micro_batch_size, args.grad_accum_steps, data.train.seq_len
    counts = split(config, last + 1, args.partition, B, S, checkpointing)
    parallelism = f"{args.schedule} pipeline of {args.stages} stages"
    parallelism += f", each sharded over {n_shards} processes" if sharded else ""
    log.resolved(partition=",".join(map(str, counts)), parallelism=parallelism)
    log.say(f"pipeline: {describe_split(counts, where, config, B, S, checkpointing)}")
    if args.copy_engines and args.stages == 1:
        log.say("warning: --copy_engines has no effect: one stage sends nothing")
    if args.reshard_after_forward and not sharded:
        log.say("warning: --reshard_after_forward has no effect: no stage is sharded")
    if args.estimate:
        log.say(estimate.table(args, config, compute, data.train, n_shards, counts))
        return
    ready = prepare(args, world, plan, log)
    if not ready:
        return
    clock, checkpoints = ready

    # model: each stage makes only its own pieces
    grid = make_mesh(world, **{STAGE: args.stages, SHARD: n_shards})
    ranks = torch.arange(world.size).view(args.stages, n_shards)
    links = Links(where, ranks, world.rank, world.device)
    engines = args.stages > 1 and choose_copy_engines(
        args.copy_engines, world, dist.group.WORLD, log.say
    )
    log.resolved(copy_engines=engines)
    if engines:
        largest = max(B, args.eval_batch_size) * S * config.hidden_size
        links.by_copy_engines(largest, compute.dtype, clock.comm.call)
    else:
        links.by_nccl(receive_early(world, log.say))
    built = build(args, world, plan, log, grid=grid, counts=counts, where=where, stage=stage)
    pieces, optimized = built.pieces, built.optimized
    flat = isinstance(optimized, Masters)  # which takes the gradients of each backward
    n_here = sum(p.numel() for p in optimized.params)
    log.say(f"{parallelism}: {built.n_params:,} parameters, {n_here:,} here")

    # optimizer
    optimizer = make_adamw(optimized.params, horizon.lr, args.weight_decay, built.compiled)
    optimized.follow(optimizer)
    loss_scale = LossScale(compute.dtype, world.device)
    group = None
    if config.tie_word_embeddings:
        group = tied_group(ranks[where[0]].tolist(), ranks[where[last]].tolist(), shard)
    copies = TiedEnds(pieces.tied(), optimized, group)
    # made by all ranks together, for saves in the background
    checkpoints.meshes[grid[SHARD]] = on_device(grid, "cpu")[SHARD]
    fixed = not_optimized(pieces)
    state = functools.partial(training_state, copies.saved, optimizer, grid[SHARD], None, fixed)
    fill_adam_state(optimizer, checkpoints.facts["adam_steps"] if checkpoints.path else 0)
    if checkpoints.path:
        tensors = training_state(copies.loaded, optimizer, grid[SHARD], None, fixed)
        checkpoints.load(tensors)
        optimized.store({p: tensors[p.hf_name] for p in optimized.model_params})
        copies.copy(optimizer)
        del tensors
        loss_scale.load(checkpoints.facts["loss_scale"])
    if pieces.gates:
        stage_group = grid[SHARD].get_group()
        clock.router_load = functools.partial(pieces.take_load, stage_group, world.device)

    def order_here(order, *rest):
        works = [order(args.schedule, args.stages, s, *rest) for s in range(args.stages)]
        return orders.with_receives(works, where, stage)

    work = order_here(orders.order, accum, args.run_ahead)

    def inputs_of(batch, *labels):
        """(token ids, the other arguments of DecoderLoss.forward), of which labels are the last."""
        shape = tuple(batch.input_ids.shape)
        documents = make_documents(batch.cu_seqlens, shape, compute.attn_impl, world.device)
        moved = to_device(world.device, batch.input_ids, batch.position_ids, *labels)
        names = "position_ids", "index", "targets", "answers"
        return moved[0], {"documents": documents, **dict(zip(names, moved[1:], strict=False))}

    def run_pipeline(work, inputs, micro, take, backward=None):
        """Do this stage's work. take(output): what follows the last piece."""

        def forward(piece, k, x):
            ids, others = inputs[k]
            if str(piece) == [*pieces][-1]:
                inputs[k] = None  # this stage needs it no more
            y = pieces[str(piece)](ids if x is None else x, **others)
            return take(y) if piece == last else y

        hidden = (micro, S, config.hidden_size), compute.dtype
        runner.run(work, last, links, hidden, forward, backward)

    def step(rows, n_labels, lr):
        total = torch.zeros((), device=world.device)
        batches = micro_batches(data.train, rows, shard, n_shards, B, data.max_docs)
        batches = clock.data(batches)
        inputs = Lookahead(inputs_of(batch, *label_positions(batch.labels)) for batch in batches)

        def take(loss):
            total.add_(loss.detach() / n_labels)
            return loss * (loss_scale.scale / n_labels)

        def backward(piece, k, y, grad):
            if sharded:
                accumulate(
                    pieces[str(piece)], args.reshard_after_forward, last=k == accum - 1, every=False
                )
            y.backward(grad)
            if flat:
                optimized.take_grads(last=k == accum - 1)

        run_pipeline(work, inputs, B, take, backward)
        if not flat:
            optimized.take_grads(last=True)
        copies.sum_gradients()
        set_lr(optimizer, lr)
        parts = [(copies.counted_once(optimized.grads()), dist.group.WORLD)]
        return total, clipped_step(optimizer, args.max_grad_norm, loss_scale, parts)

    @torch.no_grad()
    def evaluate(packs, micro):
        count = heldout_rows(packs, n_shards, micro).size // n_shards // micro
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        batches = heldout_batches(packs, shard, n_shards, micro, data.max_docs)
        inputs = Lookahead(inputs_of(batch, *labels) for batch, *labels in batches)
        run_pipeline(order_here(orders.forwards_only, count), inputs, micro, total.add_)
        return total

    @torch.no_grad()
    def ask(batch, index):
        tokens = torch.zeros_like(index, device=world.device)
        forwards = order_here(orders.forwards_only, 1)
        run_pipeline(forwards, [inputs_of(batch, index)], len(batch.input_ids), tokens.copy_)
        # every pipeline has the same answer
        dist.broadcast(tokens, src=ranks[where[last], 0].item())
        return tokens

    def facts():
        return {"adam_steps": adam_steps(optimizer), "loss_scale": loss_scale.facts()}

    train(args, world, plan, log, clock, checkpoints, step, evaluate, ask, state, facts)


class Lookahead(dict):
    """{number: item} of an iterator, each read when it is first asked for."""

    def __init__(self, items):
        super().__init__()
        self.items = enumerate(items)

    def __missing__(self, k: int):
        while k not in self:
            self.update([next(self.items)])
        return self[k]


if __name__ == "__main__":
    run(main, parse, less_memory)
