"""Flags of train_zero.py beyond those in llm_demo/flags/args.py. Imports nothing heavy."""

import dataclasses

from llm_demo.flags.parsing import flag
from llm_demo.machine.files import ROOT


@dataclasses.dataclass(frozen=True)
class ZeroArgs:
    """ZeRO"""

    deepspeed_config: str = flag(
        str(ROOT / "zero/ds_zero2.json"),
        "DeepSpeed configuration: it chooses the ZeRO stage and offload, flags set the numbers.",
        tags="input per_node",
        off="",
        saves_memory="zero/ds_zero3.json, or zero/ds_zero3_offload.json if the host has the memory",
        path=True,
    )


GROUPS = (ZeroArgs,)
