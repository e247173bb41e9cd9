"""DeepSpeed's ZeRO engine: its switches, its configuration, the sharded model."""

import torch
from transformers import PreTrainedModel

from llm_demo.core.decoder import Blocks, DecoderLoss, Tail, materialise
from llm_demo.core.errors import UserError
from llm_demo.flags.args import Args
from llm_demo.model.weights_files import Weights
from llm_demo.run.choices import Compute
from pp import deepspeed_base
from pp.deepspeed_base import check_names, quiet
from pp.ds_patches import patch_zero, reduce_when_whole

# isort: split
import deepspeed  # now that its version is checked
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import set_z3_leaf_modules

# Switches allowed in --deepspeed_config.
ZERO_SWITCHES = {"memory_breakdown": bool, "steps_per_print": int}
ZERO_OPTIONS = {
    "stage",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "contiguous_gradients",
    "overlap_comm",
    "offload_optimizer",
    "offload_param",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
}
OFFLOAD = {"device", "pin_memory"}


def zero_switches(path: str) -> dict:
    """The user's engine switches. Raises UserError for those that train wrongly."""
    switches = deepspeed_base.allowed_switches(path, ZERO_SWITCHES, ZERO_OPTIONS)
    zero = switches.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise UserError(
            f"{path}: ZeRO stage {stage} is refused: 1, 2 and 3 are exact; stage 0 has no "
            "gradient norm and trains on non-finite gradients"
        )
    for what, least in (("offload_optimizer", 2), ("offload_param", 3)):
        if what not in zero:
            continue
        offload = zero[what]
        if offload.get("device") != "cpu":
            raise UserError(f'{path}: {what} must be an object with "device": "cpu"')
        check_names(f"{path}: {what}", offload, OFFLOAD)
        if stage < least:
            raise UserError(f"{path}: {what} needs ZeRO stage {least}, not {stage}")
    return switches


def zero_name(switches: dict) -> str:
    """A few words for the log and config.json."""
    zero = switches["zero_optimization"]
    name = f"DeepSpeed ZeRO-{zero['stage']}"
    offloads = {"offload_optimizer": "optimizer", "offload_param": "parameters"}
    on_host = [what for key, what in offloads.items() if key in zero]
    if on_host:
        name += f", {' and '.join(on_host)} on the host"
    return name


def zero_config(switches: dict, args: Args, compute: Compute) -> dict:
    """The engine's configuration: the switches plus what the flags own."""
    config = deepspeed_base.shared_config(switches, args, compute.dtype)
    zero = {**config["zero_optimization"], "overlap_comm": False}  # stage 3 overlaps by default
    if zero["stage"] == 3 and compute.compile:
        zero["memory_efficient_linear"] = False  # a Python function, which breaks compiled graphs
    # offload with torch's fused AdamW: as fast as DeepSpeed's, and it needs no compiler
    config |= {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    config["timers"] = {"throughput": {"enabled": False}}  # it waits for the device in every step
    return config


def fill_skeleton(
    lm: PreTrainedModel,
    weights: Weights | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    config: dict,
) -> None:
    """Give a skeleton its weights in the compute dtype: all of them on every rank, or with stage 3
    this rank's shards, one block at a time, so that no rank holds the model."""
    tied = lm.config.tie_word_embeddings
    for p in lm.parameters():  # on the meta device
        p.data = p.data.to(dtype)
    lm.model.rotary_emb.to(device)
    blocks = [f"model.layers.{i}" for i in range(len(lm.model.layers))]
    names = ["model.embed_tokens", *blocks, "model.norm"]
    if not tied:
        names.append("lm_head")
    for name in names:
        module = materialise(lm, name, weights, seed, device)
        if config["zero_optimization"]["stage"] == 3:
            with quiet():
                deepspeed.zero.Init(module=module, config_dict_or_path=config, dtype=dtype)
    if tied:  # allocated anew
        lm.lm_head.weight = lm.model.embed_tokens.weight


def zero_engine(
    model: DecoderLoss, optimizer: torch.optim.Optimizer, config: dict
) -> DeepSpeedEngine:
    """deepspeed.initialize for a model whose forward is the loss."""
    if config["zero_optimization"]["stage"] == 3:
        # A unit's weights are gathered at once, before its forward. The tail needs it: it uses the
        # head's weight without calling the head.
        set_z3_leaf_modules(model, [Blocks, Tail])
        reduce_when_whole(model.embed_tokens.weight)
    with quiet():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    patch_zero(engine)
    return engine
