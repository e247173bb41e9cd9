"""Flags of pp_train.py beyond those in llm_demo/flags/args.py. Imports nothing heavy."""

import dataclasses
from typing import Literal

from llm_demo.core.errors import UserError
from llm_demo.flags.args import StageArgs
from llm_demo.flags.parsing import flag
from llm_demo.machine.files import ROOT


@dataclasses.dataclass(frozen=True)
class PipeArgs(StageArgs):
    """Pipeline"""

    schedule: Literal["1f1b", "dualpipev"] = flag(
        "1f1b",
        "dualpipev: two pieces per stage, both ends of the model on the first. Needs at least 2 "
        "--stages, and --grad_accum_steps of at least 2 x stages.",
    )
    deepspeed_config: str = flag(
        str(ROOT / "pp/ds_pp_2gpus.json"),
        "DeepSpeed configuration. It holds switches only; flags set the numbers.",
        tags="input per_node",
        off="",
        path=True,
    )
    local_rank: int = flag(
        0,
        "Passed by DeepSpeed's launcher, ignored: LOCAL_RANK counts.",
        tags="per_node quiet",
        env="",
    )

    @staticmethod
    def check(args) -> None:
        least = max(4, 2 * args.stages)
        if args.schedule == "dualpipev" and (args.stages < 2 or args.grad_accum_steps < least):
            raise UserError(
                "--schedule dualpipev needs --stages of at least 2 and --grad_accum_steps of at "
                f"least 2 x stages: {least}"
            )


GROUPS = (PipeArgs,)
