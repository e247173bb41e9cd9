"""Fine-tune a Hugging Face decoder with FSDP2 (parameters, gradients and optimizer states sharded).

bash fsdp/launch_fsdp.sh                                     all GPUs, or 2 processes on a CPU
bash fsdp/launch_fsdp.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
python fsdp/train_fsdp.py                                    one process: the plain model
"""

import functools

import llm_demo  # noqa: F401  first: it catches what imports refuse

# isort: split
from fsdp.flags import GROUPS, sums_each
from llm_demo.flags.args import less_memory, parse_args
from llm_demo.machine.process import early
from llm_demo.run.inputs import look

parse = functools.partial(parse_args, __doc__, *GROUPS)
if __name__ == "__main__":  # before the slow imports
    early(parse, look)

import torch

from fsdp.build import build
from fsdp.sharding import (
    Layout,
    from_owners,
    layout_of,
    not_optimized,
    parallelism_of,
    refuse_plan,
    set_sync,
    training_state,
)
from llm_demo.core.decoder import inputs_of
from llm_demo.core.loop import score_rows
from llm_demo.core.optim import (
    LossScale,
    adam_steps,
    clipped_step,
    fill_adam_state,
    make_adamw,
    set_lr,
)
from llm_demo.core.rows import label_positions, micro_batches, real_tokens, to_device
from llm_demo.machine.device import DTYPES
from llm_demo.machine.dist import run as run_script
from llm_demo.machine.dist import start
from llm_demo.model.check_config import check_experts
from llm_demo.model.families import is_mixture
from llm_demo.run.job import Job, run


def main() -> None:
    args, world = parse(), start()
    args.check_processes(world.size)
    job, layout = Job(args, world, "fsdp"), layout_of(args, world)
    parallelism = parallelism_of(layout, args, world, job.log.say)
    job.log.resolved(fsdp=layout.sharded, parallelism=parallelism)
    job.decide(layout.data_parallel, functools.partial(check_experts, args))
    refuse_plan(args, layout, job.plan)
    if is_mixture(job.plan.source.config):
        from fsdp.by_memory import choose_spread

        expert_parallel = choose_spread(*job.planned(), world, job.log)
        layout = layout._replace(expert_parallel=expert_parallel)
    if args.use_activation_checkpointing:
        from fsdp.by_memory import choose_attention_kept

        job.plan = choose_attention_kept(
            job, layout.n_shards, layout.sharded, layout.expert_parallel
        )
    if args.estimate:
        from llm_demo.memory import estimated_peaks, report

        ranks = estimated_peaks(
            job,
            "fsdp",
            ranks=layout.n_shards,
            sharded=layout.sharded,
            expert_parallel=layout.expert_parallel,
        )
        job.log.say(report(ranks * layout.replicas, args))
        return
    if layout.replicas > 1:
        from fsdp.by_memory import refuse_replicas

        refuse_replicas(*job.planned(), layout.n_shards, layout.replicas)
    if job.open():
        run(job, Fsdp(job, layout))


class Fsdp:
    """The model on this rank, and what loop.train asks of it."""

    def __init__(self, job: Job, layout: Layout):
        args, world, plan, saver = job.args, job.world, job.plan, job.saver
        self.args, self.job, self.layout, self.device = args, job, layout, world.device
        self.model, self.optimized, compiled = build(
            args, plan, layout, world, saver, job.log, timed=job.timer.comm.call
        )
        self.inputs = functools.partial(
            inputs_of,
            attn_impl=plan.compute.attn_impl,
            device=world.device,
            part=layout.part,
            whole_positions=layout.tensor_parallel > 1,
            embed=self.model.embed_on_host,
        )
        self.optimizer = self.optimized
        if not args.optimizer_on_host:
            self.optimizer = make_adamw(
                self.optimized.params,
                lr=plan.horizon.lr,
                weight_decay=args.weight_decay,
                compiled=compiled,
                moments=DTYPES[args.optim_state],
            )
            self.optimized.follow(self.optimizer)
        self.loss_scale = LossScale(plan.compute.dtype, world.device)
        self.low_rank = None
        if args.psgd_rank:
            from fsdp.powersgd import choose_low_rank

            self.low_rank = choose_low_rank(
                args.psgd_rank,
                self.optimized.model_params,
                grid=layout.grid,
                horizon=plan.horizon,
                done=saver.first_step,
                say=job.log.say,
            )
        self.aux_loss = None
        fill_adam_state(self.optimizer, saver.facts["adam_steps"] if saver.path else 0)
        if saver.path:
            tensors = self.state()
            saver.load(tensors)
            self.optimized.store({p: tensors[p.hf_name] for p in self.optimized.model_params})
            self.loss_scale.load(saver.facts["loss_scale"])

    def step(self, rows, n_labels: int, lr: float):
        args, model, optimized = self.args, self.model, self.optimized
        total = torch.zeros((), device=self.device)
        if args.router_aux_loss:
            self.count_choices(rows)
        for i, batch in enumerate(self.job.timer.data(self.batches_of(rows))):
            last = i == args.grad_accum_steps - 1
            self.see(batch)
            if self.layout.sharded:
                set_sync(model, args.reshard_after_forward, last, sums_each(args))
            loss = self.forward(batch, *label_positions(batch.labels)) / n_labels
            # FSDP2 sums over ranks in here, in the last micro-batch or, if sums_each, in every one
            (loss * self.loss_scale.scale).backward()
            optimized.take_grads(last)
            total += loss.detach()
        set_lr(self.optimizer, lr)
        grads = optimized.grads()
        if self.low_rank:
            self.low_rank.reduce(grads)
        group = self.layout.group if self.layout.sharded else None  # replicas have equal gradients
        norm = clipped_step(self.optimizer, args.max_grad_norm, self.loss_scale, grads, group)
        if args.router_bias_update:
            model.routers.update_bias(args.router_bias_update, norm)
        return total, norm

    def score(self, packs, micro: int) -> torch.Tensor:
        layout = self.layout
        return score_rows(self.forward, packs, layout.dp_rank, layout.data_parallel, micro)

    def next_tokens(self, batch, index) -> torch.Tensor:
        tokens = self.forward(batch, index)
        if self.model.tail.group is None:
            return tokens
        ours, _ = self.layout.part.of_positions(index, batch.input_ids.shape[1])
        return from_owners(tokens, ours, self.model.tail.group)

    def more(self) -> dict[str, torch.Tensor]:
        numbers = {}
        if self.aux_loss is not None:
            numbers["moe/aux_loss"] = self.aux_loss
        if self.model.routers:
            numbers["moe/load"] = self.model.routers.take_load()
        return numbers

    def state(self) -> dict[str, torch.Tensor]:
        # a frozen base is not in checkpoints
        fixed = () if self.job.plan.compute.lora else not_optimized(self.model)
        views, grid = self.optimized.views, self.layout.grid
        return training_state(views, self.optimizer, grid, self.low_rank, fixed)

    def facts(self) -> dict:
        if self.low_rank:  # a checkpoint is about to be written
            self.low_rank.sum_errors()
        return {"adam_steps": adam_steps(self.optimizer), "loss_scale": self.loss_scale.facts()}

    def forward(self, batch, index, targets=None, answers=None) -> torch.Tensor:
        """DecoderLoss.forward of this rank's slice of the rows. index: of whole rows."""
        return self.model(*self.inputs(batch, index, targets, answers))

    def batches_of(self, rows):
        train, micro, layout = self.job.plan.data.train, self.args.micro_batch_size, self.layout
        return micro_batches(train, rows, layout.dp_rank, layout.data_parallel, micro)

    def see(self, batch) -> None:
        """Let routers know which tokens are padding."""
        if self.model.routers:
            (real,) = to_device(self.device, real_tokens(batch, self.layout.part))
            self.model.routers.see(real)

    @torch.no_grad()
    def count_choices(self, rows) -> None:
        """A pass over the step's rows, whose choices the auxiliary loss depends on."""
        self.model.routers.begin_pass()
        for batch in self.batches_of(rows):
            self.see(batch)
            self.forward(batch, torch.zeros(1, dtype=torch.int64))
        scale = self.loss_scale.scale
        self.aux_loss = self.model.routers.set_push(self.args.router_aux_loss, scale)


if __name__ == "__main__":
    run_script(main, parse, less_memory)
