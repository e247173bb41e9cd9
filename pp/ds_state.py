"""Reads and writes a pipeline engine's training state, by Hugging Face names."""

import torch
import torch.distributed as dist

from llm_demo.core.optim import fill_adam_state
from pp.deepspeed_base import KEYS, get, link_moments, name_of, put, set_scale


def make_moments(engine) -> None:
    """Create every parameter's moments now. DeepSpeed's fp32 and fp16 optimizer creates them in the
    first step that is not skipped, but a checkpoint may be needed earlier."""
    if not engine.using_bf16_optimizer:
        fill_adam_state(engine.optimizer.optimizer, 0)


def _in_place(param, key: str) -> torch.Tensor | None:
    """A parameter's master or its moment `key`, if this rank holds all of it; else None."""
    mapping = param._hp_mapping
    if mapping is None or mapping.lp_fragment_address.numel != param.numel():
        return None
    return mapping.get_hp_fragment(key or None).view(param.shape)


@torch.no_grad()
def training_state(engine) -> dict[str, torch.Tensor]:
    """{Hugging Face name: fp32 master, name.exp_avg: ..., name.exp_avg_sq: ...} of this stage on
    its first replica; empty on other replicas, which hold parts and must call too. A tied weight
    comes from the first stage that has it."""
    link_moments(engine.optimizer)
    tied = engine.module.get_tied_weights_and_groups()
    later = {id(w) for w, group in tied if dist.get_rank(group) > 0}
    found = {}
    for param in engine.module.parameters():
        for key in KEYS:
            if engine.dp_world_size == 1:
                t = _in_place(param, key)
            else:  # on the CPU: the GPU has no room for another full copy
                t = get(param, key).cpu()
            if engine.grid.get_data_parallel_id() == 0 and id(param) not in later:
                found[name_of(param, key)] = t
    return found


@torch.no_grad()
def load_state(engine, load, facts: dict) -> None:
    """Fill masters, moments and weights. load: fills {name: tensor} from a checkpoint."""
    optimizer, whole = engine.optimizer, {}
    fill_adam_state(optimizer.optimizer, facts["adam_steps"])
    link_moments(optimizer)
    places = [(p, key) for p in engine.module.parameters() for key in KEYS]
    for param, key in places:
        place = _in_place(param, key) if engine.dp_world_size == 1 else torch.empty(param.shape)
        whole[name_of(param, key)] = place
    load(whole)
    for param, key in places:
        t = whole[name_of(param, key)].to(param.device)
        put(param, t, key)
        if not key:
            param.copy_(t)
    set_scale(engine, facts["loss_scale"])
