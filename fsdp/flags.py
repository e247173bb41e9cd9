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
    replicas: str = flag(
        "1",
        "Copies of the model: each is sharded over processes / replicas, and gradients are summed "
        "over copies. all: a copy per process, as in DDP. Processes of a copy have neighbouring "
        "ranks, so with a copy per node only gradients pass between nodes.",
    )
    psgd_rank: int = flag(
        0,
        "Approximate: sum gradients over --replicas as products of matrices of this rank "
        "(PowerSGD), for slow links. 32 is a good start. 0: exact sums.",
    )
    psgd_start: int | None = flag(
        None, "Steps before PowerSGD starts, summed exactly. Default: --warmup_steps."
    )
    optimizer_on_host: bool = flag(
        False,
        "Keep fp32 weights and AdamW's moments in host memory; they pass through the device once "
        "per step.",
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
        if args.copy_engines and (args.fsdp is False or args.dtype == "fp32"):
            raise UserError("--copy_engines requires FSDP with --dtype bf16 or fp16")
        if not (args.replicas == "all" or args.replicas.isdecimal() and int(args.replicas)):
            raise UserError(f"--replicas {args.replicas[:80]}: a number from 1 on, or all")
        if args.replicas != "1" and args.fsdp is False:
            raise UserError("--replicas needs FSDP: drop --no_fsdp")
        if args.psgd_rank and args.replicas == "1":
            raise UserError("--psgd_rank compresses sums over replicas: add --replicas")
        if args.psgd_rank and args.dtype == "fp16":
            raise UserError(
                "--psgd_rank does not work in fp16: its errors would depend on the loss scale"
            )
