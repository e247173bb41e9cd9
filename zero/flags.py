"""Flags of train_zero.py beyond those in llm_demo/args.py. Imports nothing heavy."""

import dataclasses
from typing import ClassVar

from llm_demo.args import flag
from llm_demo.files import ROOT


@dataclasses.dataclass
class ZeroArgs:
    """ZeRO"""

    deepspeed_config: str = flag(
        str(ROOT / "zero/ds_zero2.json"),
        "DeepSpeed configuration: it chooses the ZeRO stage and offload, flags set the numbers.",
    )

    REFUSED: ClassVar = {
        "optimizer_on_host": "use --deepspeed_config zero/ds_zero2_offload.json, or FSDP",
        "lora_rank": "only fsdp/train_fsdp.py trains adapters",
        "sequence_parallel": "only fsdp/train_fsdp.py spreads rows",
        "activations_on_host": "only fsdp/train_fsdp.py moves activations to the host",
    }
