"""Unsloth's FastLanguageModel in TRL's SFTTrainer, as its notebooks use them, on one GPU, beside
our scripts: adapters if the row has --lora_rank. Run as python -m bench.peers.unsloth, the row in
the environment."""

import importlib.util
import os
import sys

import torch

from bench.peers import trl
from bench.peers.trl import flag, read  # noqa: F401  the figures have the same form

PACKAGES = "unsloth"


def installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("unsloth", "trl"))


def command_of(row: dict) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc_per_node=1", "-m", "bench.peers.unsloth"]


# ---------------------------------------------------------------- inside the process


def load(row: dict, config, device: torch.device):
    """(model, tokenizer, None). Unsloth reads a folder, so random weights are written first."""
    from unsloth import FastLanguageModel

    rank = int(flag(row, "lora_rank", 0))

    def read_it(folder: str):
        return FastLanguageModel.from_pretrained(
            folder, max_seq_length=row["seq_len"], dtype=torch.bfloat16,
            load_in_4bit=flag(row, "base_bits", 16) == 4, full_finetuning=not rank,
            use_gradient_checkpointing=checkpointing(row),
        )  # fmt: skip

    model, words = trl.read_random_model(config, device, read_it)
    if rank:
        names = ("q", "k", "v", "o", "gate", "up", "down")  # of experts too, if there are any
        model = FastLanguageModel.get_peft_model(
            model, r=rank, lora_alpha=32, lora_dropout=0, bias="none",
            target_modules=[f"{name}_proj" for name in names],
            use_gradient_checkpointing=checkpointing(row),
        )  # fmt: skip
    return model, words, None


def checkpointing(row: dict) -> str | bool:
    return "unsloth" if row["ckpt"] else False


if __name__ == "__main__":
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # or it asks the hub
    import unsloth  # noqa: F401  before transformers

    packages = ("unsloth", "unsloth_zoo", "trl")
    # full rows have nothing to pad, and only padded batches run Unsloth's compiled blocks
    trl.main(
        load, packages, padding_free=False, use_liger_kernel=False, gradient_checkpointing=False
    )
