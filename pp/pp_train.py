"""Fine-tune a Hugging Face decoder in a DeepSpeed pipeline (1F1B, and replicas of it).

bash pp/launch_pp.sh                                         2 GPUs, or 2 processes on a CPU
bash pp/launch_pp.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
NPROC_PER_NODE=4 bash pp/launch_pp.sh                        2 stages x 2 replicas
"""

import functools
import itertools

import llm_demo  # noqa: F401  first: it catches what imports refuse

# isort: split
from llm_demo.flags.args import Args, less_memory, parse_args
from llm_demo.machine.process import early
from llm_demo.run.inputs import look
from pp.flags import GROUPS

parse = functools.partial(parse_args, __doc__, *GROUPS)
if __name__ == "__main__":  # before the slow imports
    early(parse, look)

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from llm_demo import memory
from llm_demo.core.decoder import materialise
from llm_demo.core.optim import make_adamw, set_lr
from llm_demo.core.rows import (
    Rows,
    answers_of,
    bounds_of,
    heldout_rows,
    label_positions,
    micro_batches,
    share_of,
    to_device,
)
from llm_demo.machine.dist import run as run_script
from llm_demo.machine.dist import start
from llm_demo.machine.text import counted
from llm_demo.model.check_config import refuse_experts
from llm_demo.model.costs import param_count, unit_sizes
from llm_demo.model.weights_files import Weights, loading
from llm_demo.run.choices import Compute, compiles_adamw, decoder_of
from llm_demo.run.cut import plan_and_cut
from llm_demo.run.job import Job, run
from pp import ds_engine, ds_patches, ds_state


def main() -> None:
    args, world = parse(), start()
    args.check_processes(world.size)
    switches = ds_engine.pipeline_switches(args.deepspeed_config)
    where = list(range(args.stages))  # the stage of each piece of the model
    if args.schedule == "dualpipev":
        where += where[::-1]
    replicas = world.size // args.stages
    job = Job(args, world, "pp")
    job.log.resolved(parallelism=f"pipeline of {counted(args.stages, 'stage')}")
    counts = plan_and_cut(job, replicas, where, refuse_experts)
    ranks = memory.estimated_peaks(
        job,
        "pp",
        ranks=replicas,
        counts=counts,
        zero=switches.get("zero_optimization", {}),
        copies=replicas > 1 and bool(args.save or args.resume),
    )
    if args.estimate:
        job.log.say(memory.report(ranks, args))
    elif job.open(copies=replicas > 1):
        if replicas > 1:  # one does without copies where they don't fit
            advice = "use fewer replicas, more nodes or a smaller model"
            memory.check_host(ranks, args, world, say=job.log.say, advice=advice)
        run(job, Pipeline(job, switches, counts))


class Pipeline:
    """This rank's stage, and what loop.train asks of it. switches: DeepSpeed's. counts: blocks of
    each piece of the model."""

    def __init__(self, job: Job, switches: dict, counts: list[int]):
        args, world, plan, saver = job.args, job.world, job.plan, job.saver
        compute, weights = plan.compute, plan.source.weights
        self.args, self.world, self.timer, self.plan = args, world, job.timer, plan
        self.device, self.pieces = world.device, len(counts)
        self.replicas, self.done = world.size // args.stages, saver.first_step

        # each stage makes only its own layers
        ds_patches.join_group(world.device)
        lm = decoder_of(plan.source.config, weights, compute)
        n_params = param_count(lm)
        self.inputs = [
            ds_engine.BlockInputs(lm.model.rotary_emb, compute.attn_impl, world.device)
            for _ in counts
        ]
        module = layers_of(lm, args, compute, weights, counts, self.inputs)
        self.score_fn = functools.partial(
            ds_engine.score_fn, compiled=compute.compile, cap=lm.lm_head.logits_soft_cap
        )

        compiled = job.log.decided(compiles_adamw(compute.compile, n_params, world.size))
        optimizer = make_adamw(
            module.parameters(),
            lr=plan.horizon.lr,
            weight_decay=args.weight_decay,
            compiled=compiled,
        )
        settings = ds_engine.pipeline_config(switches, args, compute.dtype)
        self.engine = ds_engine.pipeline_engine(
            module, optimizer, config=settings, compiled=compute.compile
        )
        ds_state.fill_engine(self.engine, saver, weights, compute.dtype)
        self.replica = self.engine.grid.get_data_parallel_id()

    def step(self, rows, n_labels: int, lr: float):
        args, engine = self.args, self.engine
        set_lr(engine.optimizer, lr)
        # The engine averages over micro-batches and replicas. The factor turns that into the step's
        # token mean.
        factor = args.grad_accum_steps * self.replicas / n_labels
        total = engine.train_batch(self.feed(self.plan.data.train, rows, factor))
        self.done += 1
        if self.done == 1 and ds_engine.tied_copies_differ(engine):
            raise RuntimeError("step 1: the stages' copies of the tied weight differ")
        if self.done % args.log_every == 0:
            # gains two events per step, and is cleared only by printing
            engine.timers("train_batch").reset()
        # every rank has the total
        share = total if self.world.rank == 0 else torch.zeros_like(total)
        return share, engine.get_global_grad_norm()

    def score(self, packs, micro: int) -> torch.Tensor:
        rows = heldout_rows(packs, self.replicas, micro, at_least=self.pieces)
        count = rows.size // self.replicas // micro
        reshape = micro != self.args.micro_batch_size
        batches = self.feed(packs, rows, micro=micro)
        scores = ds_engine.forward_only(self.engine, batches, count, self.score_fn, reshape=reshape)
        if not scores:
            return torch.zeros(2, dtype=torch.float64, device=self.device)
        return torch.stack(scores).sum(0, dtype=torch.float64)

    def next_tokens(self, batch, index) -> torch.Tensor:
        for inputs in self.inputs:
            inputs.follow(itertools.repeat(batch.cu_seqlens))
        inputs = to_device(self.device, batch.input_ids)[0], to_device(self.device, index)
        # DualPipeV needs several micro-batches: repeat the same one
        repeated = itertools.repeat(inputs)
        out = ds_engine.forward_only(self.engine, repeated, self.pieces, ds_engine.ask_fn)
        tokens = out[0] if out else torch.zeros_like(index, device=self.device)
        group = self.engine.grid.get_pipe_parallel_group()
        dist.broadcast(tokens, src=self.engine._loss_stage_global_rank(), group=group)
        return tokens

    def more(self) -> dict[str, torch.Tensor]:
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        return ds_state.engine_state(self.engine, copies=self.replicas > 1)

    def facts(self) -> dict:
        return ds_state.engine_facts(self.engine)

    def feed(self, packs, rows, factor=None, micro: int = 0):
        """(inputs, labels) of each micro-batch: the first stage uses inputs, the last labels.
        Without a factor, labels are for `score_fn`."""
        micro = micro or self.args.micro_batch_size
        for inputs in self.inputs:
            shares = share_of(rows, self.replica, self.replicas, micro)
            inputs.follow(boundaries(packs, group) for group in shares)

        def pairs():
            batches = micro_batches(packs, rows, self.replica, self.replicas, micro)
            for batch in self.timer.data(batches):
                index, targets = label_positions(batch.labels)
                if factor:
                    labels = to_device(self.device, index, targets, torch.tensor(factor))
                else:
                    answers = answers_of(index, batch.cu_seqlens)
                    labels = to_device(self.device, index, targets, answers)
                yield to_device(self.device, batch.input_ids)[0], labels

        return pairs()


def layers_of(
    lm: PreTrainedModel,
    args: Args,
    compute: Compute,
    weights: Weights | None,
    counts: list[int],
    inputs: list[ds_engine.BlockInputs],
) -> ds_engine.PipelineLayers:
    """The decoder as DeepSpeed's layers, of which this rank makes those of its stage."""
    firsts = itertools.accumulate(counts, initial=0)
    sizes = [
        unit_sizes(lm.config, count, args.blocks_per_unit, first)
        for count, first in zip(counts, firsts, strict=False)
    ]
    specs, bounds = ds_engine.layer_specs(
        lm.config,
        functools.partial(
            materialise, lm, weights=weights, seed=args.seed, device=inputs[0].device
        ),
        sizes,
        inputs,
        checkpointing=args.use_activation_checkpointing,
        budget=args.activation_memory_budget if compute.compile else None,
    )
    cap = lm.lm_head.logits_soft_cap
    loss_fn = functools.partial(ds_engine.loss_fn, compiled=compute.compile, cap=cap)
    kind = ds_engine.PipelineLayers
    if args.schedule == "dualpipev":
        kind = ds_engine.PipelineLayersV
    with loading(weights, args.stages):
        return kind(specs, bounds, args.stages, loss_fn=loss_fn)


def boundaries(packs: Rows, rows) -> torch.Tensor:
    """cu_seqlens of these rows, see Batch, without reading any tokens."""
    lengths = [packs.lengths(int(row)) for row in rows]
    return torch.from_numpy(bounds_of(lengths, packs.seq_len, packs.max_docs))


if __name__ == "__main__":
    run_script(main, parse, less_memory)
