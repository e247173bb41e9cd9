"""Flags of train_fsdp.py beyond those in llm_demo/flags/args.py, and those of adapters. Imports
nothing heavy."""

import dataclasses

from llm_demo.core.errors import UserError
from llm_demo.flags.args import MAX_COUNT, ExpertArgs, LowBitArgs, SpreadArgs, check_divides_rows
from llm_demo.flags.parsing import flag

OVER_RANKS = ("replicas", "expert_parallel", "sequence_parallel", "tensor_parallel")


@dataclasses.dataclass(frozen=True)
class FsdpArgs:
    """FSDP"""

    fsdp: bool | None = flag(
        None, "Shard with FSDP2. Default: if there are several processes, or a flag needs it."
    )
    reshard_after_forward: bool = flag(
        False,
        "Gather weights and sum gradients in every micro-batch: less memory, more communication.",
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
        tags="resume",
        at_most=MAX_COUNT,
    )
    optimizer_on_host: bool = flag(
        False, "Keep fp32 weights and AdamW's moments in host memory.", saves_memory="true"
    )
    activations_on_host: bool = flag(
        False,
        "Keep blocks' inputs in host memory until the backward. With adapters in one process, an "
        "untied embedding too.",
        saves_memory="true",
    )
    sequence_parallel: int = flag(
        1,
        "Ranks over which each row is spread.",
        at_least=1,
        saves_memory="2, for long rows on several processes",
    )
    router_bias_update: float = flag(
        0.0, "Step by which DeepSeek's biases of experts follow load. 0: fixed.", tags="resume"
    )
    router_aux_loss: float = flag(
        0.0, "Weight of a loss that evens out experts' load.", tags="resume"
    )
    copy_engines: bool | None = flag(
        None,
        "In 16 bits, gather weights and send gradients by copy engines, not NCCL. Default: for "
        "large blocks over NVLink.",
    )

    def check_processes(self, processes: int) -> None:
        if self.fsdp is False and processes > 1:
            raise UserError(f"--no_fsdp needs one process, not {processes}: set NPROC_PER_NODE=1")
        for name in OVER_RANKS:
            parts = getattr(self, name) or 1
            if parts != "all" and processes % int(parts):
                raise UserError(f"--{name} {parts} does not divide {processes}, the processes")

    @staticmethod
    def check(args) -> None:
        if args.copy_engines and args.dtype == "fp32":
            raise UserError("--copy_engines requires --dtype bf16 or fp16")
        check_divides_rows(args, "sequence_parallel")


@dataclasses.dataclass(frozen=True)
class LoraArgs:
    """Adapters"""

    lora_rank: int | None = flag(
        None,
        "Rank of adapters (LoRA) over a frozen model. Default: --adapter's, or 0: none.",
        tags="adapter_card",
        off=0,
        at_most=MAX_COUNT,
        saves_memory="16, to train adapters only",
    )
    adapter: str | None = flag(
        None,
        "Folder of a PEFT adapter to train on, with its rank, alpha and targets.",
        tags="input per_node",
        path=True,
    )
    lora_targets: str | None = flag(
        None,
        "Layers of blocks to adapt, such as q_proj,v_proj. Of experts: gate_up_proj,down_proj. "
        "Default: all-linear, all of these.",
        tags="adapter_card",
    )
    lora_alpha: float | None = flag(
        None,
        "Adapters' products are scaled by this / rank. Default: 32.",
        tags="adapter_card",
        positive=True,
    )
    lora_dropout: float = flag(
        0.0, "Dropout of adapters' inputs.", tags="resume adapter_card", at_most=0.99
    )
    base_bits: int = flag(
        16,
        "Bits of weights under adapters. 4: bitsandbytes' NF4.",
        tags="adapter_card",
        form=("4|16", "4 or 16"),
        saves_memory="4, unless the model has experts",
    )

    @staticmethod
    def fill(values: dict) -> None:
        """Set what other flags decide, before the flags are frozen."""
        if values["adapter"]:
            from llm_demo.model.adapter_folder import adopted

            values |= adopted(values)
        if values["lora_rank"] and values["lora_targets"] is None:
            values["lora_targets"] = "all-linear"
        if values["lora_rank"] and values["lora_alpha"] is None:
            values["lora_alpha"] = 32.0


def sums_each(args) -> bool:
    """Whether gradients are summed over ranks after each micro-batch, not once per step: a rank
    then holds only its part of them. With replicas that would be too much traffic."""
    return args.optimizer_on_host or args.reshard_after_forward and args.replicas == "1"


GROUPS = (FsdpArgs, LoraArgs, LowBitArgs, SpreadArgs, ExpertArgs)
