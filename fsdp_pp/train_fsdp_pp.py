"""Fine-tune a Hugging Face decoder in a pipeline whose stages are sharded with FSDP2.

bash fsdp_pp/launch_fsdp_pp.sh                               all GPUs, or 2 processes on a CPU
bash fsdp_pp/launch_fsdp_pp.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
NPROC_PER_NODE=4 bash fsdp_pp/launch_fsdp_pp.sh              2 stages, each sharded over 2 ranks
"""

import functools
import os
from collections.abc import Callable, Iterator

import llm_demo  # noqa: F401  first: it catches what imports refuse

# isort: split
from fsdp_pp.flags import GROUPS
from llm_demo.flags.args import Args, less_memory, parse_args
from llm_demo.machine.process import early
from llm_demo.run.inputs import look

parse = functools.partial(parse_args, __doc__, *GROUPS)
if __name__ == "__main__":  # before the slow imports
    early(parse, look)

import torch
import torch.distributed as dist

from fsdp.sharding import (
    from_owners,
    not_optimized,
    refuse_slices,
    set_sync,
    training_state,
)
from fsdp_pp import orders
from fsdp_pp.build import (
    StageLayout,
    TiedEnds,
    build_pieces,
    refuse_bare_stages,
    stage_layout,
    tied_group,
)
from fsdp_pp.transfers import Links, receive_early
from llm_demo.core.decoder import inputs_of
from llm_demo.core.loop import heldout_batches
from llm_demo.core.masters import Masters
from llm_demo.core.mesh import SHARD, SPLIT, on_device
from llm_demo.core.optim import (
    LossScale,
    adam_steps,
    clipped_step,
    fill_adam_state,
    make_adamw,
    set_lr,
)
from llm_demo.core.rows import heldout_rows, label_positions, micro_batches
from llm_demo.machine.device import DTYPES
from llm_demo.machine.dist import run as run_script
from llm_demo.machine.dist import start
from llm_demo.model.check_config import check_experts
from llm_demo.model.costs import refuse_shares
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
    job, layout = Job(args, world, "fsdp_pp"), stage_layout(args, world)
    job.log.resolved(parallelism=name_of(args, layout))

    def refuse(config):
        check_experts(args, config)
        refuse_shares(config, args.tensor_parallel)

    counts = plan_and_cut(job, layout.data_parallel, layout.where, refuse)
    if job.plan.compute.lora:
        refuse_bare_stages(args, job.plan, layout.where, counts)
    refuse_slices(args, job.plan.data.train.seq_len, args.tensor_parallel)
    if args.copy_engines and args.stages == 1:
        job.log.say("warning: --copy_engines has no effect: one stage sends nothing")
    if args.reshard_after_forward and layout.n_shards == 1:
        job.log.say("warning: --reshard_after_forward has no effect: no stage is sharded")
    if args.estimate:
        from llm_demo.memory import estimated_peaks, report

        n_shards = layout.n_shards
        ranks = estimated_peaks(job, "fsdp_pp", ranks=n_shards, sharded=n_shards > 1, counts=counts)
        job.log.say(report(ranks, args))
    elif job.open():
        run(job, ShardedPipeline(job, layout, counts))


def name_of(args: Args, layout: StageLayout) -> str:
    """The kind of parallelism, for the log and config.json."""
    name = f"{args.schedule} pipeline of {args.stages} stages"
    if layout.n_shards > 1:
        name += f", each sharded over {layout.n_shards} processes"
    if args.tensor_parallel > 1:
        name += f", tensor parallel over {args.tensor_parallel}"
    if layout.experts:
        name += f", experts spread over {args.expert_parallel}"
    return name


class ShardedPipeline:
    """This rank's pieces of the model, and what loop.train asks of it. counts: blocks of each
    piece."""

    def __init__(self, job: Job, layout: StageLayout, counts: list[int]):
        args, world, plan, saver = job.args, job.world, job.plan, job.saver
        self.args, self.plan, self.layout, self.timer = args, plan, layout, job.timer
        self.device, self.last = world.device, len(layout.where) - 1
        self.inputs = functools.partial(
            inputs_of,
            attn_impl=plan.compute.attn_impl,
            device=world.device,
            part=layout.part,
            whole_positions=layout.part.count > 1,
        )
        self.links = self.connect(job)
        self.pieces, self.optimized, compiled = build_pieces(
            args, plan, layout, counts, world, saver, job.log
        )
        # Masters add each backward's gradients; Shards wait for FSDP2's sums
        self.has_masters = isinstance(self.optimized, Masters)
        self.optimizer = make_adamw(
            self.optimized.params,
            lr=plan.horizon.lr,
            weight_decay=args.weight_decay,
            compiled=compiled,
            moments=DTYPES[args.optim_state],
        )
        self.optimized.follow(self.optimizer)
        self.loss_scale = LossScale(plan.compute.dtype, world.device)
        group = None
        if plan.source.config.tie_word_embeddings and not plan.compute.lora:
            first, last = (layout.ranks[layout.where[i]].tolist() for i in (0, -1))
            group = tied_group(first, last, layout.shard)
        embedding, head = self.pieces.tied()
        self.copies = TiedEnds(embedding, head, self.optimized, group)
        # made by all ranks together, for saves in the background
        saver.meshes[layout.grid[SHARD]] = on_device(layout.grid, "cpu")[SHARD]
        fill_adam_state(self.optimizer, saver.facts["adam_steps"] if saver.path else 0)
        if saver.path:
            tensors = self.tensors_of(self.copies.loaded)
            saver.load(tensors)
            self.optimized.store({p: tensors[p.hf_name] for p in self.optimized.model_params})
            self.copies.copy(self.optimizer)
            self.loss_scale.load(saver.facts["loss_scale"])
        self.work = self.work_of(orders.order, args.grad_accum_steps)

    def connect(self, job: Job) -> Links:
        """Connect this stage with the others."""
        args, world, log, layout = job.args, job.world, job.log, self.layout
        links = Links(layout.where, layout.ranks, world.rank, world.device)
        engines = False
        if args.stages > 1:
            from fsdp.copy_engines import choose_copy_engines

            engines = choose_copy_engines(args.copy_engines, world, dist.group.WORLD, log.say)
        log.resolved(copy_engines=engines)
        if engines:
            largest = self.hidden_shape(args.micro_batch_size).numel()
            links.by_copy_engines(largest, self.plan.compute.dtype, job.timer.comm.call)
        else:
            links.by_nccl(receive_early(world, log.say))
        return links

    def step(self, rows, n_labels: int, lr: float):
        args, layout, optimized = self.args, self.layout, self.optimized
        train, micro = self.plan.data.train, args.micro_batch_size
        total = torch.zeros((), device=self.device)
        batches = micro_batches(train, rows, layout.dp_rank, layout.data_parallel, micro)
        batches = self.timer.data(batches)
        inputs = (self.inputs(batch, *label_positions(batch.labels)) for batch in batches)

        def take(loss):
            total.add_(loss.detach() / n_labels)
            return loss * (self.loss_scale.scale / n_labels)

        def backward(number, k, y, grad):
            last = k == args.grad_accum_steps - 1
            if layout.n_shards > 1:
                piece = self.pieces[str(number)]
                set_sync(piece, args.reshard_after_forward, last=last, every=False)
            if y.requires_grad:  # not of a first piece in which nothing is trained
                y.backward(grad)
            if self.has_masters:
                optimized.take_grads(last)

        self.run_pipeline(self.work, Lookahead(inputs), micro, take, backward)
        if not self.has_masters:
            optimized.take_grads(last=True)
        self.copies.sum_gradients()
        set_lr(self.optimizer, lr)
        grads = self.copies.counted_once(optimized.grads())
        group = dist.group.WORLD
        norm = clipped_step(self.optimizer, args.max_grad_norm, self.loss_scale, grads, group)
        return total, norm

    @torch.no_grad()
    def score(self, packs, micro: int) -> torch.Tensor:
        rank, ranks = self.layout.dp_rank, self.layout.data_parallel
        count = heldout_rows(packs, ranks, micro).size // ranks // micro
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        batches = heldout_batches(packs, rank, ranks, micro)
        inputs = Lookahead(self.inputs(*batch) for batch in batches)
        forwards = self.work_of(orders.forwards_only, count)
        self.run_pipeline(forwards, inputs, micro, take=total.add_)
        return total

    @torch.no_grad()
    def next_tokens(self, batch, index) -> torch.Tensor:
        ours, _ = self.layout.part.of_positions(index, batch.input_ids.shape[1])
        tokens = torch.zeros(int(ours.sum()), dtype=torch.int64, device=self.device)
        forwards, inputs = self.work_of(orders.forwards_only, 1), [self.inputs(batch, index)]
        self.run_pipeline(forwards, inputs, len(batch.input_ids), take=tokens.copy_)
        if self.layout.shares:
            tokens = from_owners(tokens, ours, self.layout.shares.get_group(SPLIT))
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

    def tensors_of(self, views: Callable) -> dict[str, torch.Tensor]:
        """See training_state. views: of TiedEnds."""
        # a frozen base is not in checkpoints
        fixed = () if self.plan.compute.lora else not_optimized(self.pieces)
        shards = self.layout.grid[SHARD]
        return training_state(views, self.optimizer, shards, low_rank=None, fixed=fixed)

    def work_of(self, order: Callable, micro_batches: int) -> list[tuple]:
        """This stage's work, with its receives. order: one of orders.py."""
        schedule, stages = self.args.schedule, self.args.stages
        works = [order(schedule, stages, stage, micro_batches) for stage in range(stages)]
        return orders.with_receives(works, self.layout.where, self.layout.stage)

    def hidden_shape(self, micro: int) -> torch.Size:
        """[rows, slots of this rank's slice, d] of the hidden states of a micro-batch."""
        slots = self.plan.data.train.seq_len // self.layout.part.count
        return torch.Size((micro, slots, self.plan.source.config.hidden_size))

    def run_pipeline(
        self,
        work: list[tuple],
        inputs,
        micro: int,
        take: Callable,
        backward: Callable | None = None,
    ) -> None:
        """Do this stage's work. inputs: {micro-batch: arguments of DecoderLoss.forward}. take: what
        follows the last piece; called with its output."""
        pieces, last = self.pieces, self.last
        last_here = [*pieces][-1]

        def forward(number, k, hidden):
            ids, *others = inputs[k]
            if str(number) == last_here:
                inputs[k] = None  # this stage needs it no more
            y = pieces[str(number)](ids if hidden is None else hidden, *others)
            return take(y) if number == last else y

        orders.run_stage(
            work,
            last,
            self.links,
            shape=self.hidden_shape(micro),
            dtype=self.plan.compute.dtype,
            forward=forward,
            backward=backward,
        )


class Lookahead(dict):
    """{number: item} of an iterator, each read when it is first asked for."""

    def __init__(self, items: Iterator):
        super().__init__()
        self.items = enumerate(items)

    def __missing__(self, k: int):
        while k not in self:
            self.update([next(self.items)])
        return self[k]


if __name__ == "__main__":
    run_script(main, parse, less_memory)
