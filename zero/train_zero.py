"""Fine-tune a Hugging Face decoder with DeepSpeed ZeRO (stages 1, 2 and 3, also offloaded).

bash zero/launch_zero.sh                                     all GPUs, or 2 processes on a CPU
bash zero/launch_zero.sh --model_name_or_path Qwen/Qwen3-0.6B --train_json my.jsonl
bash zero/launch_zero.sh --deepspeed_config zero/ds_zero3_offload.json
"""

import dataclasses
import functools

import llm_demo  # noqa: F401  first: it catches what imports refuse

# isort: split
from llm_demo.flags.args import less_memory, parse_args
from llm_demo.machine.process import early
from llm_demo.run.inputs import look
from zero.flags import GROUPS

parse = functools.partial(parse_args, __doc__, *GROUPS)
if __name__ == "__main__":  # before the slow imports
    early(parse, look)

import torch

from llm_demo import memory
from llm_demo.core.decoder import DecoderLoss, inputs_of, make_units
from llm_demo.core.loop import score_rows
from llm_demo.core.optim import make_adamw, set_lr
from llm_demo.core.rows import label_positions, micro_batches
from llm_demo.machine.dist import run as run_script
from llm_demo.machine.dist import start
from llm_demo.machine.text import counted
from llm_demo.model.check_config import refuse_experts
from llm_demo.model.costs import param_count, unit_sizes
from llm_demo.model.weights_files import loading
from llm_demo.run.choices import compiles_adamw, decoder_of
from llm_demo.run.job import Job, run
from pp import ds_patches, ds_state
from zero import ds_engine


def main() -> None:
    args, world = parse(), start()
    switches = ds_engine.zero_switches(args.deepspeed_config)
    if switches["zero_optimization"]["stage"] == 3:
        # its gathers and reductions end later than the calls
        args = dataclasses.replace(args, comm_timer=False)
    job = Job(args, world, "zero")
    job.log.resolved(parallelism=ds_engine.zero_name(switches), comm_timer=args.comm_timer)
    job.decide(world.size, refuse_experts)
    settings = ds_engine.zero_config(switches, args, job.plan.compute)
    ranks = memory.estimated_peaks(
        job,
        "zero",
        ranks=world.size,
        zero=settings["zero_optimization"],
        copies=bool(args.save or args.resume),
    )
    if args.estimate:
        job.log.say(memory.report(ranks, args))
    elif job.open(copies=True):
        advice = "use more nodes, a smaller model, or fsdp/, which needs less"
        memory.check_host(ranks, args, world, say=job.log.say, advice=advice)
        run(job, Zero(job, settings))


class Zero:
    """The model on this rank, and what loop.train asks of it. settings: DeepSpeed's."""

    def __init__(self, job: Job, settings: dict):
        args, world, plan = job.args, job.world, job.plan
        config, weights, compute = plan.source.config, plan.source.weights, plan.compute
        self.args, self.world, self.timer, self.plan = args, world, job.timer, plan
        self.inputs = functools.partial(inputs_of, attn_impl=compute.attn_impl, device=world.device)

        # stage 3 shards each block as soon as it has weights
        ds_patches.join_group(world.device)
        lm = decoder_of(config, weights, compute)
        n_params = param_count(lm)
        sizes = unit_sizes(config, config.num_hidden_layers, args.blocks_per_unit)
        units = make_units(
            lm.model.layers,
            sizes,
            checkpointing=args.use_activation_checkpointing,
            budget=args.activation_memory_budget if compute.compile else None,
        )
        with loading(weights, 1):
            ds_engine.fill_skeleton(
                lm,
                weights,
                args.seed,
                device=world.device,
                dtype=compute.dtype,
                config=settings,
            )
        self.model = DecoderLoss(lm, units, compute.compile)

        on_host = "offload_optimizer" in settings["zero_optimization"]
        works = compute.compile and not on_host
        compiled = job.log.decided(compiles_adamw(works, n_params, world.size))
        optimizer = make_adamw(
            self.model.parameters(),
            lr=plan.horizon.lr,
            weight_decay=args.weight_decay,
            compiled=compiled,
        )
        self.engine = ds_engine.zero_engine(self.model, optimizer, settings)
        processes = counted(world.size, "process", "processes")
        parallelism = job.log.settings["parallelism"]
        job.log.say(f"{parallelism} over {processes}: {n_params:,} parameters")
        ds_state.fill_engine(self.engine, job.saver, weights, compute.dtype)

    def step(self, rows, n_labels: int, lr: float):
        args, world, engine = self.args, self.world, self.engine
        set_lr(engine.optimizer, lr)
        total = torch.zeros((), device=world.device)
        batches = micro_batches(
            self.plan.data.train, rows, world.rank, world.size, args.micro_batch_size
        )
        for i, batch in enumerate(self.timer.data(batches)):
            # By hand: the engine would count micro-batches, also those before a resumed run.
            engine.set_gradient_accumulation_boundary(i == args.grad_accum_steps - 1)
            loss = self.forward(batch, *label_positions(batch.labels), call=engine) / n_labels
            # the engine averages over ranks, which the factor undoes
            engine.backward(loss * world.size, scale_wrt_gas=False)
            total += loss.detach()
        engine.step()
        return total, engine.get_global_grad_norm()

    def score(self, packs, micro: int) -> torch.Tensor:
        return score_rows(self.forward, packs, self.world.rank, self.world.size, micro)

    def next_tokens(self, batch, index) -> torch.Tensor:
        return self.forward(batch, index)

    def more(self) -> dict[str, torch.Tensor]:
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        return ds_state.engine_state(self.engine, copies=True)

    def facts(self) -> dict:
        return ds_state.engine_facts(self.engine)

    def forward(self, batch, index, targets=None, answers=None, call=None) -> torch.Tensor:
        """DecoderLoss.forward. call: the engine, for a forward that has a backward."""
        return (call or self.model)(*self.inputs(batch, index, targets, answers))


if __name__ == "__main__":
    run_script(main, parse, less_memory)
