"""Reads and writes the training state of a DeepSpeed engine, a pipeline's or ZeRO's, by Hugging
Face names."""

from collections.abc import Callable
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from llm_demo.core.optim import MOMENTS, adam_steps, fill_adam_state
from llm_demo.model.weights_files import Weights
from llm_demo.run.saver import Saver
from pp.ds_patches import link_moments

KEYS = ("", *MOMENTS)  # what a checkpoint holds of a parameter; its master has no key


def _name(param, key: str) -> str:
    """The Hugging Face name of a parameter's master, or of its moment `key`."""
    return f"{param.hf_name}.{key}".rstrip(".")


def _shape(param) -> torch.Size:
    return getattr(param, "ds_shape", param.shape)  # stage 3 leaves an empty tensor


def _in_place(param, key: str) -> torch.Tensor | None:
    """A parameter's master or its moment `key`, if this rank holds all of it; else None."""
    mapping = getattr(param, "_hp_mapping", None)
    if mapping is None or mapping.lp_fragment_address.numel != param.numel():
        return None
    return mapping.get_hp_fragment(key or None).view(param.shape)


def _put(param, value: torch.Tensor, key: str = "") -> None:
    """Set a parameter's master or its moment `key` to `value`, its whole new value."""
    value = value.float().reshape(-1)
    if not hasattr(param, "ds_id"):
        if key:
            safe_set_full_optimizer_state(param, value, key)
        else:
            safe_set_full_fp32_param(param, value)
        return
    # With stage 3, DeepSpeed 0.19.8's safe_set_full_* reads the last rank's part from beyond the
    # end of a parameter whose size the ranks do not divide, and fails. So each sets its own part.
    size = param.ds_tensor.numel()
    values = value[dist.get_rank() * size :][:size]
    part = torch.zeros(size, device=value.device)
    part[: values.numel()] = values
    if key:
        safe_set_local_optimizer_state(param, part, key)
    else:
        safe_set_local_fp32_param(param, part)


@torch.no_grad()
def fill_engine(engine, saver: Saver, weights: Weights | None, dtype: torch.dtype) -> None:
    """Fill what is trained: from the checkpoint to resume, or with the file's values, since
    DeepSpeed makes masters of the weights in the compute dtype."""
    if saver.path:
        load_state(engine, saver.load, saver.facts)
        return
    if weights and dtype != torch.float32:
        for param in engine.module.parameters():
            _put(param, weights.read(param.hf_name).to(engine.device))
    make_moments(engine)


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


def _shared(engine) -> tuple[dist.ProcessGroup | None, int, int]:
    """(the ranks with the same parameters, this one's number among them, how many)."""
    if engine.dp_world_size == 1:
        return None, 0, 1
    group = engine.data_parallel_group
    return group, dist.get_rank(group), engine.dp_world_size


@torch.no_grad()
def engine_state(engine, copies: bool) -> dict[str, torch.Tensor]:
    """{Hugging Face name: fp32 master, name.exp_avg: ..., name.exp_avg_sq: ...} of this rank.

    copies: on the CPU, since a GPU has no room for another full copy. Each parameter is gathered by
    the ranks that share it, one at a time, and kept by one of them. Otherwise: in place, if no
    other rank shares it. A weight tied over stages comes from the first stage that has it."""
    _, rank, ranks = _shared(engine)
    tied = getattr(engine.module, "get_tied_weights_and_groups", list)()
    later = {id(w) for w, group in tied if dist.get_rank(group) > 0}
    state = {}
    for i, param in enumerate(engine.module.parameters()):
        for key in KEYS:
            if not copies:
                whole = _in_place(param, key)
            elif key:
                whole = safe_get_full_optimizer_state(param, key)
            else:
                whole = safe_get_full_fp32_param(param)
            if i % ranks == rank and id(param) not in later:
                state[_name(param, key)] = whole.cpu() if copies else whole
    if rank == 0:
        state |= _constants(engine.module)
    return state


def _constants(module) -> dict[str, torch.Tensor]:
    """{Hugging Face name: fp32 values} of the buffers that files hold: the model's own, in every
    checkpoint."""
    found = {}
    for owner in module.modules():
        for key, buffer in owner.named_buffers(recurse=False):
            if hasattr(owner, "path") and key not in owner._non_persistent_buffers_set:
                found[f"{owner.path}.{key}"] = buffer.float()
    return found


@torch.no_grad()
def load_state(engine, load: Callable, facts: dict) -> None:
    """Fill masters, moments and weights. load: fills {name: tensor} from a checkpoint. Of the ranks
    that share parameters, each reads those that it keeps in `engine_state`."""
    make_moments(engine, facts["adam_steps"])
    group, rank, ranks = _shared(engine)
    params, state = list(engine.module.parameters()), {}
    for param in params[rank::ranks]:
        for key in KEYS:
            place = _in_place(param, key) if ranks == 1 else None
            state[_name(param, key)] = torch.empty(_shape(param)) if place is None else place
    if rank == 0:
        state |= _constants(engine.module)
    load(state)
    for i, param in enumerate(params):
        for key in KEYS:
            whole = state.pop(_name(param, key), None)
            if whole is None:
                whole = torch.empty(_shape(param), device=engine.device)
            whole = whole.to(engine.device)
            if ranks > 1:
                dist.broadcast(whole, group=group, group_src=i % ranks)
            _put(param, whole, key)
            if not key:
                with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
                    param.copy_(whole)
    scaler = _scaler(engine)
    if scaler:
        scale = facts["loss_scale"]
        scaler.cur_scale = scale["scale"]
        # counts from the last overflow: place it just before the first step
        scaler.cur_iter, scaler.last_overflow_iter = int(scale["good_steps"]), -1
        scaler.cur_hysteresis = scale.get("hysteresis", scaler.cur_hysteresis)


def engine_facts(engine) -> dict:
    """What a checkpoint keeps besides tensors. The loss scale is 1 if the dtype needs none."""
    scale, scaler = {"scale": 1.0, "good_steps": 0}, _scaler(engine)
    if scaler:
        # DeepSpeed's count does not restart when the scale grows, in the step after a full window
        good = scaler.cur_iter - scaler.last_overflow_iter - 1
        good = (good - 1) % scaler.scale_window + 1 if good else 0
        scale = {"scale": scaler.cur_scale, "good_steps": good, "hysteresis": scaler.cur_hysteresis}
    return {"adam_steps": adam_steps(engine.optimizer.optimizer), "loss_scale": scale}


def _scaler(engine):
    """DeepSpeed's loss scaler; None if the scale is fixed."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None
