"""Flags of train_fsdp.py beyond those in llm_demo/args.py. Imports nothing heavy."""

import dataclasses

from llm_demo.args import flag
from llm_demo.errors import UserError


@dataclasses.dataclass
class FsdpArgs:
    """FSDP"""

    fsdp: bool | None = flag(
        None,
        "Shard with FSDP2. Default: with several processes, or if a flag below needs it. A single "
        "process otherwise trains the plain model: faster, less memory.",
    )
    reshard_after_forward: bool = flag(
        False,
        "Free each block's weights after use and gather them again in every forward and backward "
        "pass, instead of once per step: less memory, more communication.",
        saves_memory=True,
    )
    optimizer_on_host: bool = flag(
        False,
        "fp32 weights, moments and AdamW itself on the host.",
        saves_memory=True,
    )
    copy_engines: bool | None = flag(
        None,
        "In bf16 and fp16, gather blocks with the GPUs' copy engines instead of NCCL kernels; "
        "without accumulation, exchange their gradients that way too. Default: if blocks are large "
        "and NVLink joins the GPUs of one node.",
    )

    @staticmethod
    def check(args) -> None:
        if args.optimizer_on_host and args.fsdp is False:
            raise UserError("--optimizer_on_host requires FSDP: remove --no_fsdp")
        if args.copy_engines and (args.fsdp is False or args.dtype == "fp32"):
            raise UserError("--copy_engines requires FSDP with --dtype bf16 or fp16")
