"""Models of strangers, loaded by transformers: it would load more than their folder's weights."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from llm_demo.core.errors import UserError
from llm_demo.job.text import words_of


def refuse_adapter(name: str, folder: Path) -> None:
    """Raise UserError if a model's folder also holds an adapter. transformers would add it to the
    model, and peft before 0.20 runs a module that the adapter's configuration names. Training
    would ignore it."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{name} holds both a model and an adapter (adapter_config.json), so what to load is "
            "not clear: merge them into one model, or move the adapter's files away"
        )


def read_config(folder: Path):
    """transformers' configuration of a folder. Raises ValueError if it makes transformers load
    what lies elsewhere, and whatever the libraries raise that check it."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for name in ("_attn_implementation", "_experts_implementation"):
        if "/" in str(value := getattr(config, name, None)):
            raise ValueError(f"{name} {value} is a kernel of the hub, which is code: remove it")
    if getattr(config, "transformers_weights", None):
        raise ValueError("transformers_weights: weights must be model.safetensors: remove it")
    return config


def load_model(name: str, folder: Path, config, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own model of a folder, on the CPU, in evaluation mode, which generates greedily
    and without penalties. name: what the user calls it; config: from load_config. Raises UserError
    for what is refused above."""
    refuse_adapter(name, folder)
    # sdpa: for flash attention that is not installed, transformers asks the hub for a kernel
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation="sdpa", use_safetensors=True,
            trust_remote_code=False,
        ).eval()  # fmt: skip
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as e:  # of the files that only transformers reads
        raise UserError(f"{folder}: transformers can't load this model: {words_of(e)}") from e
    model.generation_config = GenerationConfig()  # in place of the folder's
    return model
