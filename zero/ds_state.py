"""Reads and writes a ZeRO engine's training state, by Hugging Face names."""

from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist

from llm_demo.core.optim import fill_adam_state
from pp.deepspeed_base import KEYS, get, link_moments, name_of, put, set_scale


def shape_of(param) -> torch.Size:
    return getattr(param, "ds_shape", param.shape)  # stage 3 leaves an empty tensor


def make_moments(engine, steps: int = 0) -> None:
    """Create all moments, as if after `steps` steps. DeepSpeed creates them in the first step that
    is not skipped, but a checkpoint may be needed earlier."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3 passes them one at a time
        groups = [{"params": optimizer.fp32_partitioned_groups_flat}]
        state = optimizer.optimizer.state
        fill_adam_state(SimpleNamespace(param_groups=groups, state=state), steps)
    else:
        fill_adam_state(optimizer.optimizer, steps)
        link_moments(optimizer)


@torch.no_grad()
def training_state(engine) -> dict[str, torch.Tensor]:
    """{Hugging Face name: fp32 master, name.exp_avg: ..., name.exp_avg_sq: ...}, on the CPU. Each
    parameter is gathered by all ranks, one at a time, and kept by one."""
    state = {}
    for i, param in enumerate(engine.module.parameters()):
        for key in KEYS:
            whole = get(param, key)
            if i % dist.get_world_size() == dist.get_rank():
                state[name_of(param, key)] = whole.cpu()
    return state


@torch.no_grad()
def load_state(engine, load, facts: dict) -> None:
    """Fill masters, moments and weights. load: fills {name: tensor} from a checkpoint; each rank
    reads what it keeps in `training_state`."""
    make_moments(engine, facts["adam_steps"])
    params, ranks = list(engine.module.parameters()), dist.get_world_size()
    kept = params[dist.get_rank() :: ranks]
    state = {name_of(p, key): torch.empty(shape_of(p)) for p in kept for key in KEYS}
    load(state)
    for i, param in enumerate(params):
        for key in KEYS:
            whole = state.pop(name_of(param, key), None)
            if whole is None:
                whole = torch.empty(shape_of(param), device=engine.device)
            whole = whole.to(engine.device)
            dist.broadcast(whole, src=i % ranks)
            put(param, whole, key)
            if not key:
                with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
                    param.copy_(whole)
    set_scale(engine, facts["loss_scale"])
