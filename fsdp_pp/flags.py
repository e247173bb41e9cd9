"""Flags of train_fsdp_pp.py beyond those in llm_demo/args.py. Imports nothing heavy."""

import dataclasses
from typing import Literal

from llm_demo.args import ExpertArgs, check_partition, check_stages, flag
from llm_demo.errors import UserError

SPLIT = ("zbv", "dualpipev")  # a backward in two parts
BY_TORCH = ("torch_1f1b", "torch_interleaved", *SPLIT)
OUT_AND_BACK = ("v", *SPLIT)  # both ends of the model on the first stage
TWICE = ("interleaved", "torch_interleaved", *OUT_AND_BACK)  # two pieces per stage


@dataclasses.dataclass
class FsdpPipeArgs:
    """FSDP inside a pipeline"""

    stages: int = flag(
        2, "Pipeline stages. With more processes, each stage is sharded.", at_least=1
    )
    partition: str = flag(
        "balanced",
        "Split of the blocks: balanced (by estimated time, with both ends), uniform, parameters, "
        "or the blocks of each piece, such as 18,10.",
    )
    schedule: Literal[
        "1f1b", "gpipe", "interleaved", "v", "torch_1f1b", "torch_interleaved", "zbv", "dualpipev"
    ] = flag(
        "1f1b",
        "Order of the work. gpipe: all forwards first, most memory. interleaved: two pieces per "
        "stage, shorter waits, more transfers. v: the same, out and back, so that no gradient of "
        "tied embeddings is sent; more memory. The others run by PyTorch's pipeline package; "
        "zbv and dualpipev do not compile blocks.",
    )
    run_ahead: int = flag(
        0,
        "Micro-batches by which a stage runs further ahead of the next: can hide transfers over "
        "slow links, takes memory. Not for PyTorch's runner.",
        at_least=0,
    )
    copy_engines: bool | None = flag(
        None,
        "Send hidden states by the GPUs' copy engines, not by NCCL's kernels. Default: on if "
        "NVLink connects all GPUs and all processes are on one node. Not for PyTorch's runner.",
        saves_memory="false, if copy engines were chosen",
    )
    reshard_after_forward: bool = flag(
        False,
        "Gather each block's weights in every forward and backward pass instead of once per step: "
        "less memory, more communication.",
        saves_memory="true, if stages have several processes",
    )

    def check_processes(self, processes: int) -> None:
        check_stages(self.stages, processes)

    @staticmethod
    def check(args) -> None:
        check_partition(args.partition)
        accum = args.grad_accum_steps
        if args.schedule.endswith("interleaved") and accum % args.stages:
            raise UserError(
                f"--schedule {args.schedule} needs --grad_accum_steps that is a multiple of "
                f"--stages {args.stages}, not {accum}"
            )
        if args.schedule == "torch_1f1b" and accum < args.stages:
            raise UserError(
                f"--schedule {args.schedule} needs --grad_accum_steps of at least --stages "
                f"{args.stages}, not {accum}"
            )
        if args.run_ahead and args.schedule in BY_TORCH:
            raise UserError(f"--run_ahead does not work with --schedule {args.schedule}")
        if args.copy_engines and args.schedule in BY_TORCH:
            raise UserError(f"--copy_engines does not work with --schedule {args.schedule}")
        if args.schedule in (*TWICE, *BY_TORCH) and args.stages < 2:
            raise UserError(f"--schedule {args.schedule} needs --stages of at least 2")
        if args.schedule in SPLIT:
            split = f"--schedule {args.schedule} splits each backward in two"
            if args.reshard_after_forward:
                raise UserError(f"{split}: --reshard_after_forward would give wrong gradients")
            if args.compile:
                raise UserError(f"{split}, which compiled blocks can't do: drop --compile")
            if accum < 2 * args.stages:
                raise UserError(
                    f"--schedule {args.schedule} needs --grad_accum_steps of at least "
                    f"{2 * args.stages} (2 x --stages), not {accum}"
                )


GROUPS = (FsdpPipeArgs, ExpertArgs)
