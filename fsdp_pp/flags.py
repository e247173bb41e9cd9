"""Flags of train_fsdp_pp.py beyond those in llm_demo/flags/args.py. Imports nothing heavy."""

import dataclasses
from typing import Literal

from fsdp.flags import LoraArgs
from llm_demo.core.errors import UserError
from llm_demo.flags.args import ExpertArgs, LowBitArgs, SpreadArgs, StageArgs
from llm_demo.flags.parsing import flag


@dataclasses.dataclass(frozen=True)
class FsdpPipeArgs(StageArgs):
    """FSDP inside a pipeline"""

    schedule: Literal["1f1b", "gpipe", "interleaved", "v"] = flag(
        "1f1b",
        "Order of the work. gpipe: all forwards first, most memory. interleaved: two pieces per "
        "stage, shorter waits, more transfers. v: two pieces, first and last of the model on "
        "one stage; more memory.",
    )
    copy_engines: bool | None = flag(
        None,
        "Send hidden states by copy engines, not NCCL. Default: on one node whose GPUs NVLink "
        "connects.",
        saves_memory="false, if copy engines were chosen",
    )
    reshard_after_forward: bool = flag(
        False,
        "Gather weights in every pass, not once a step: less memory, more communication.",
        saves_memory="true, if stages have several processes",
    )

    def check_processes(self, processes: int) -> None:
        super().check_processes(processes)
        for name in ("tensor_parallel", "expert_parallel"):
            of_stage, n = processes // self.stages, getattr(self, name) or 1
            if of_stage % n:
                raise UserError(f"--{name} {n} does not divide {of_stage}, the ranks of a stage")

    @staticmethod
    def check(args) -> None:
        if args.schedule == "interleaved" and args.grad_accum_steps % args.stages:
            raise UserError(
                "--schedule interleaved needs --grad_accum_steps that is a multiple of "
                f"--stages {args.stages}, not {args.grad_accum_steps}"
            )
        if args.schedule in ("interleaved", "v") and args.stages < 2:
            raise UserError(f"--schedule {args.schedule} needs --stages of at least 2")


GROUPS = (FsdpPipeArgs, LoraArgs, LowBitArgs, SpreadArgs, ExpertArgs)
