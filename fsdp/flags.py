"""Flags of train_fsdp.py beyond those in llm_demo/flags/args.py. Imports nothing heavy."""

import dataclasses

from llm_demo.core.errors import UserError
from llm_demo.flags.args import MAX_COUNT, ExpertArgs, SpreadArgs
from llm_demo.flags.parsing import flag
from llm_demo.model.adapter_folder import adopt

NEED_LORA = ("lora_targets", "lora_alpha", "lora_dropout", "base_bits")
OVER_RANKS = ("replicas", "expert_parallel", "sequence_parallel", "tensor_parallel")
NEED_FSDP = ("reshard_after_forward", *OVER_RANKS)
NOT_TOGETHER = (  # two flags and, if known, why
    ("expert_parallel", "replicas", ""),
    ("psgd_rank", "sequence_parallel", ""),
    ("tensor_parallel", "sequence_parallel", "both cut rows into slices"),
    ("tensor_parallel", "replicas", "its ranks share one copy of the model"),
    ("tensor_parallel", "lora_dropout", "ranks would drop different inputs"),
    ("psgd_rank", "optimizer_on_host", "its errors stay on the device"),
    ("lora_rank", "psgd_rank", "adapters' gradients are small already"),
    ("lora_rank", "optimizer_on_host", "only adapters have optimizer states, which are small"),
    ("lora_rank", "router_aux_loss", "routers are frozen too"),
    ("lora_rank", "router_bias_update", "routers are frozen too"),
    ("base_bits", "tensor_parallel", ""),
    ("base_bits", "fp8", ""),
)
OFF = dict.fromkeys(OVER_RANKS, 1) | {"replicas": "1", "base_bits": 16, "fp8": "none"}  # or false


@dataclasses.dataclass
class FsdpArgs:
    """FSDP"""

    fsdp: bool | None = flag(
        None, "Shard with FSDP2. Default: if there are several processes, or a flag needs it."
    )
    reshard_after_forward: bool = flag(
        False,
        "Gather weights, sum gradients in every micro-batch.",
        saves_memory="true, on several processes",
    )
    replicas: str = flag(
        "1",
        "Number of model copies; all: one per process, as in DDP.",
        form=(r"all|[1-9]\d{0,8}", "a positive integer or all"),
    )
    psgd_rank: int = flag(
        0,
        "Rank of compressed sums over --replicas after warm-up (PowerSGD). 0: exact.",
        at_most=MAX_COUNT,
    )
    optimizer_on_host: bool = flag(
        False, "Keep fp32 weights and AdamW's moments in host memory.", saves_memory="true"
    )
    activations_on_host: bool = flag(
        False, "Keep blocks' inputs in host memory until their backward.", saves_memory="true"
    )
    sequence_parallel: int = flag(
        1,
        "Ranks over which each row is spread.",
        at_least=1,
        saves_memory="2, for long rows on several processes",
    )
    lora_rank: int | None = flag(
        None,
        "Rank of adapters (LoRA) over a frozen model. Default: --adapter's, or 0: none.",
        at_most=MAX_COUNT,
    )
    adapter: str | None = flag(
        None, "Folder of a PEFT adapter to train on, with its rank, alpha and targets.", path=True
    )
    lora_targets: str | None = flag(
        None,
        "Layers of blocks to adapt, such as q_proj,v_proj. Of experts: gate_up_proj,down_proj. "
        "Default: all-linear, all of these.",
    )
    lora_alpha: float | None = flag(
        None, "Adapters' products are scaled by this / rank. Default: 32.", positive=True
    )
    lora_dropout: float = flag(0.0, "Dropout of adapters' inputs.", at_most=0.99)
    base_bits: int = flag(
        16, "Bits of weights under adapters. 4: bitsandbytes' NF4.", form=("4|16", "4 or 16")
    )
    router_bias_update: float = flag(
        0.0, "How far DeepSeek's bias of experts follows load. 0: it stays."
    )
    router_aux_loss: float = flag(0.0, "Weight of a loss that evens out experts' load.")
    copy_engines: bool | None = flag(
        None,
        "In 16 bits, gather blocks and exchange gradients by copy engines, not by NCCL's kernels. "
        "Default: for large blocks over NVLink.",
    )

    def __post_init__(self):
        if self.adapter:
            adopt(self)
        if self.lora_rank and self.lora_targets is None:
            self.lora_targets = "all-linear"
        if self.lora_rank and self.lora_alpha is None:
            self.lora_alpha = 32.0

    def check_processes(self, processes: int) -> None:
        if self.fsdp is False and processes > 1:
            raise UserError(f"--no_fsdp needs one process, not {processes}: set NPROC_PER_NODE=1")
        for name in OVER_RANKS:
            parts = getattr(self, name) or 1
            if parts != "all" and processes % int(parts):
                raise UserError(f"--{name} {parts} does not divide {processes}, the processes")

    @staticmethod
    def check(args) -> None:
        if args.copy_engines and (args.fsdp is False or args.dtype == "fp32"):
            raise UserError("--copy_engines requires FSDP with --dtype bf16 or fp16")
        on = {name for name, value in vars(args).items() if value and value != OFF.get(name)}
        for name in NEED_FSDP:
            if name in on and args.fsdp is False:
                raise UserError(f"--{name} needs FSDP: drop --no_fsdp")
        for one, other, why in NOT_TOGETHER:
            if {one, other} <= on:
                reason = f": {why}" if why else ""
                one = "adapter" if one == "lora_rank" and args.adapter else one
                raise UserError(f"--{one} does not work with --{other}{reason}")
        if args.seq_len % (n := args.sequence_parallel):
            raise UserError(f"--sequence_parallel {n} does not divide --seq_len {args.seq_len}")
        if args.psgd_rank and args.replicas == "1":
            raise UserError("--psgd_rank compresses sums over replicas: add --replicas")
        if args.activations_on_host and not args.use_activation_checkpointing:
            raise UserError("--activations_on_host needs --use_activation_checkpointing")
        if args.activations_on_host and args.blocks_per_unit > 1:
            raise UserError("--activations_on_host works on single blocks: drop --blocks_per_unit")
        for name in NEED_LORA:
            if not args.lora_rank and getattr(args, name) != getattr(FsdpArgs, name):
                raise UserError(f"--{name} needs --lora_rank, or --adapter")
        if args.psgd_rank and args.dtype == "fp16":
            raise UserError(
                "--psgd_rank does not work in fp16: its errors would depend on the loss scale"
            )


def sums_each(args) -> bool:
    """Whether gradients are summed over ranks after each micro-batch, not once per step: a rank
    then holds only its part of them. With replicas that would be too much traffic."""
    return args.optimizer_on_host or args.reshard_after_forward and args.replicas == "1"


GROUPS = (FsdpArgs, SpreadArgs, ExpertArgs)
