"""Fine-tune a Hugging Face decoder in a pipeline whose stages are sharded with FSDP2.

bash fsdp_pp/launch_fsdp_pp.sh                               all GPUs, or 2 processes on a CPU
bash fsdp_pp/launch_fsdp_pp.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
NPROC_PER_NODE=4 bash fsdp_pp/launch_fsdp_pp.sh              2 stages, each sharded over 2 ranks
"""

import functools
import os
from typing import NamedTuple

import llm_demo  # noqa: F401  first: it catches what imports refuse

# isort: split
from fsdp_pp.flags import GROUPS
from llm_demo.flags.args import less_memory, parse_args
from llm_demo.machine.process import early
from llm_demo.run.inputs import look

parse = functools.partial(parse_args, __doc__, *GROUPS)
if __name__ == "__main__":  # before the slow imports
    early(parse, look)

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp.copy_engines import choose_copy_engines
from fsdp.sharding import from_owners, not_optimized, set_sync, training_state
from fsdp_pp import orders
from fsdp_pp.build import TiedEnds, build, tied_group
from fsdp_pp.transfers import Links, receive_early
from llm_demo.core.attention import make_documents
from llm_demo.core.errors import UserError
from llm_demo.core.loop import heldout_batches
from llm_demo.core.masters import Masters
from llm_demo.core.mesh import SHARD, SPLIT, STAGE, World, make_mesh, make_part_mesh, on_device
from llm_demo.core.optim import (
    LossScale,
    adam_steps,
    clipped_step,
    fill_adam_state,
    make_adamw,
    set_lr,
)
from llm_demo.core.rows import Slice, heldout_rows, label_positions, micro_batches, to_device
from llm_demo.flags.args import Args, parse_args
from llm_demo.machine.device import DTYPES
from llm_demo.machine.dist import run as run_script
from llm_demo.machine.dist import start
from llm_demo.memory import peaks, report, settings_of
from llm_demo.model.check_config import check_experts
from llm_demo.model.costs import refuse_shares, sizes_of
from llm_demo.run.cut import plan_and_cut
from llm_demo.run.job import Job, run


def main() -> None:
    args = parse()
    # One queue for each stream: a receive that waits must not hold up another stream's work.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Each transfer has a group of its own, as the warning advises.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    world = start()
    args.check_processes(world.size)
    job, layout = Job(args, world, "fsdp_pp"), layout_of(args, world)
    parallelism = f"{args.schedule} pipeline of {args.stages} stages"
    if layout.n_shards > 1:
        parallelism += f", each sharded over {layout.n_shards} processes"
    if (n := args.tensor_parallel) > 1:
        parallelism += f", tensor parallel over {n}"
    if (spread := args.expert_parallel or 1) > 1:
        parallelism += f", experts spread over {spread}"
    job.log.resolved(parallelism=parallelism)

    def refuse(config):
        check_experts(args, config)
        refuse_shares(config, n)

    counts = plan_and_cut(job, layout.data_parallel, layout.where, refuse)
    if (slots := job.plan.data.train.seq_len) % n:
        raise UserError(
            f"--tensor_parallel {n} does not divide {slots}, the tokens of a row: set --seq_len"
        )
    if args.copy_engines and args.stages == 1:
        job.log.say("warning: --copy_engines has no effect: one stage sends nothing")
    if args.reshard_after_forward and layout.n_shards == 1:
        job.log.say("warning: --reshard_after_forward has no effect: no stage is sharded")
    if args.estimate:
        _, config, compute, train = job.planned()
        settings = settings_of(
            "fsdp_pp",
            args,
            compute,
            train,
            ranks=layout.n_shards,
            sharded=layout.n_shards > 1,
            counts=counts,
        )
        job.log.say(report(peaks(sizes_of(config), settings), args))
    elif job.open():
        run(job, ShardedPipeline(job, layout, counts))


class StageLayout(NamedTuple):
    """The ranks of a run: stages, and the shards of each."""

    where: list[int]  # the stage of each piece of the model
    n_shards: int  # of a stage
    stage: int  # of this rank
    shard: int
    ranks: torch.Tensor  # [stages, n_shards]
    grid: DeviceMesh  # the same
    part: Slice  # the slice of each row that this rank holds
    data_parallel: int  # ranks of a stage, or groups of them with slices of the same rows
    shares: DeviceMesh | None  # of a stage: shares of each matrix x their shards
    experts: DeviceMesh | None  # of a stage: parts of each block's experts x their shards

    @property
    def dp_rank(self) -> int:
        return self.shard // self.part.count


def layout_of(args: Args, world: World) -> StageLayout:
    """What the flags mean for this number of ranks. Collective."""
    n_shards = world.size // args.stages
    where = orders.stages_of(args.schedule, args.stages)
    ranks = torch.arange(world.size).view(args.stages, n_shards)
    grid = make_mesh(world, **{STAGE: args.stages, SHARD: n_shards})
    stage, shard = divmod(world.rank, n_shards)
    shares, experts = (
        make_part_mesh(world, n, args.stages) if n and n > 1 else None
        for n in (args.tensor_parallel, args.expert_parallel)
    )
    part = Slice(shard % args.tensor_parallel, args.tensor_parallel)
    own = where, n_shards, stage, shard, ranks, grid
    return StageLayout(*own, part, n_shards // part.count, shares, experts)


class ShardedPipeline:
    """This rank's pieces of the model, and what loop.train asks of it. counts: blocks of each
    piece."""

    def __init__(self, job: Job, layout: StageLayout, counts: list[int]):
        args, world, plan, saver = job.args, job.world, job.plan, job.saver
        self.job, self.args, self.layout, self.device = job, args, layout, world.device
        self.last = len(layout.where) - 1
        shards = layout.grid[SHARD]
        self.links = self.connect()
        self.pieces, self.optimized, n_params, compiled = build(job, layout, counts)
        # Masters add each backward's gradients; Shards wait for FSDP2's sums
        self.flat = isinstance(self.optimized, Masters)
        n_local = sum(p.numel() for p in self.optimized.params)
        parallelism = job.log.settings["parallelism"]
        job.log.say(f"{parallelism}: {n_params:,} parameters, {n_local:,} here")
        params = self.optimized.params
        how = plan.horizon.lr, args.weight_decay, compiled, DTYPES[args.optim_state]
        self.optimizer = make_adamw(params, *how)
        self.optimized.follow(self.optimizer)
        self.loss_scale = LossScale(plan.compute.dtype, world.device)
        ends, group = [layout.ranks[layout.where[i]].tolist() for i in (0, -1)], None
        if plan.source.config.tie_word_embeddings:
            group = tied_group(*ends, layout.shard)
        self.copies = TiedEnds(self.pieces.tied(), self.optimized, group)
        # made by all ranks together, for saves in the background
        saver.meshes[shards] = on_device(layout.grid, "cpu")[SHARD]
        fill_adam_state(self.optimizer, saver.facts["adam_steps"] if saver.path else 0)
        if saver.path:
            tensors = self.tensors_of(self.copies.loaded)
            saver.load(tensors)
            self.optimized.store({p: tensors[p.hf_name] for p in self.optimized.model_params})
            self.copies.copy(self.optimizer)
            self.loss_scale.load(saver.facts["loss_scale"])
        self.work = self.order(orders.order, args.grad_accum_steps)

    def connect(self) -> Links:
        """Connect this stage with the others."""
        args, world, plan, log = self.args, self.job.world, self.job.plan, self.job.log
        links = Links(self.layout.where, self.layout.ranks, world.rank, world.device)
        engines = args.stages > 1 and choose_copy_engines(
            args.copy_engines, world, dist.group.WORLD, log.say
        )
        log.resolved(copy_engines=engines)
        if engines:
            slots = args.micro_batch_size * plan.data.train.seq_len // self.layout.part.count
            largest = slots * plan.source.config.hidden_size
            links.by_copy_engines(largest, plan.compute.dtype, self.job.timer.comm.call)
        else:
            links.by_nccl(receive_early(world, log.say))
        return links

    def step(self, rows, n_labels: int, lr: float):
        args, data, layout = self.args, self.job.plan.data, self.layout
        total = torch.zeros((), device=self.device)
        over, micro = (layout.dp_rank, layout.data_parallel), args.micro_batch_size
        batches = micro_batches(data.train, rows, *over, micro)
        batches = self.job.timer.data(batches)
        inputs = (self.inputs_of(batch, *label_positions(batch.labels)) for batch in batches)

        def take(loss):
            total.add_(loss.detach() / n_labels)
            return loss * (self.loss_scale.scale / n_labels)

        def backward(piece, k, y, grad):
            last = k == args.grad_accum_steps - 1
            if layout.n_shards > 1:
                one = self.pieces[str(piece)]
                set_sync(one, args.reshard_after_forward, last=last, every=False)
            y.backward(grad)
            if self.flat:
                self.optimized.take_grads(last)

        self.run_pipeline(self.work, Lookahead(inputs), micro, take, backward)
        if not self.flat:
            self.optimized.take_grads(last=True)
        self.copies.sum_gradients()
        set_lr(self.optimizer, lr)
        parts = self.copies.counted_once(self.optimized.grads()), dist.group.WORLD
        return total, clipped_step(self.optimizer, args.max_grad_norm, self.loss_scale, *parts)

    @torch.no_grad()
    def score(self, packs, micro: int) -> torch.Tensor:
        over = self.layout.dp_rank, self.layout.data_parallel
        count = heldout_rows(packs, over[1], micro).size // over[1] // micro
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        batches = heldout_batches(packs, *over, micro)
        inputs = Lookahead(self.inputs_of(batch, *labels) for batch, *labels in batches)
        self.run_pipeline(self.order(orders.forwards_only, count), inputs, micro, total.add_)
        return total

    @torch.no_grad()
    def next_tokens(self, batch, index) -> torch.Tensor:
        ours, _ = self.layout.part.of_positions(index, batch.input_ids.shape[1])
        tokens = torch.zeros(int(ours.sum()), dtype=torch.int64, device=self.device)
        forwards, inputs = self.order(orders.forwards_only, 1), [self.inputs_of(batch, index)]
        self.run_pipeline(forwards, inputs, len(batch.input_ids), tokens.copy_)
        if shares := self.layout.shares:
            tokens = from_owners(tokens, ours, shares.get_group(SPLIT))
        # every pipeline has the same answer
        source = self.layout.ranks[self.layout.where[self.last], 0].item()
        dist.broadcast(tokens, src=source)
        return tokens

    def more(self) -> dict[str, torch.Tensor]:
        if not self.pieces.gates:
            return {}
        group = self.layout.grid[SHARD].get_group()
        return {"moe/load": self.pieces.take_load(group, self.device)}

    def state(self) -> dict[str, torch.Tensor]:
        return self.tensors_of(self.copies.saved)

    def facts(self) -> dict:
        return {"adam_steps": adam_steps(self.optimizer), "loss_scale": self.loss_scale.facts()}

    def tensors_of(self, views) -> dict[str, torch.Tensor]:
        shards, fixed = self.layout.grid[SHARD], not_optimized(self.pieces)
        return training_state(views, self.optimizer, shards, None, fixed)

    def order(self, order, *rest) -> list[tuple]:
        """This stage's work, with its receives. order: one of orders.py."""
        args, layout = self.args, self.layout
        works = [order(args.schedule, args.stages, s, *rest) for s in range(args.stages)]
        return orders.with_receives(works, layout.where, layout.stage)

    def inputs_of(self, batch, *labels) -> tuple[torch.Tensor, dict]:
        """(this rank's slice of the token ids, the other arguments of DecoderLoss.forward), of
        which labels, those of whole rows, are the last."""
        shape, attn_impl = tuple(batch.input_ids.shape), self.job.plan.compute.attn_impl
        documents = make_documents(batch.cu_seqlens, shape, attn_impl, self.device)
        part = self.layout.part
        if part.count > 1:
            ours, index = part.of_positions(labels[0], shape[1])
            labels = index, *(t[ours] for t in labels[1:])
        ids = part.of_rows(batch.input_ids)
        moved = to_device(self.device, ids, batch.position_ids, *labels)
        names = "position_ids", "index", "targets", "answers"
        return moved[0], {"documents": documents, **dict(zip(names, moved[1:], strict=False))}

    def run_pipeline(self, work, inputs, micro: int, take, backward=None) -> None:
        """Do this stage's work. take(output): what follows the last piece."""
        plan, pieces, last = self.job.plan, self.pieces, self.last

        def forward(piece, k, x):
            ids, others = inputs[k]
            if str(piece) == [*pieces][-1]:
                inputs[k] = None  # this stage needs it no more
            y = pieces[str(piece)](ids if x is None else x, **others)
            return take(y) if piece == last else y

        slots = plan.data.train.seq_len // self.layout.part.count
        shape = micro, slots, plan.source.config.hidden_size
        hidden = shape, plan.compute.dtype
        orders.run_stage(work, last, self.links, hidden, forward, backward)


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
    run_script(main, parse, less_memory)
