"""Loads or initialises weights block by block, so that no process holds more than it keeps."""

import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from llm_demo.core.errors import UserError


def materialise(
    model: PreTrainedModel, name: str, weights, seed: int, device: torch.device
) -> nn.Module:
    """Give the submodule `name` of a skeleton its weights on `device`, and return it."""
    allocate(model.get_submodule(name), device)
    return fill(model, name, weights, seed)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate meta parameters (if sharded, only this rank's shard) and move buffers."""
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


@torch.no_grad()
def fill(
    model: PreTrainedModel,
    name: str,
    weights,
    seed: int,
    store: Callable | None = None,
) -> nn.Module:
    """Set the values of the submodule's parameters (if sharded, this rank's part) and of its
    persistent buffers, and their Hugging Face name, `hf_name`.

    weights: their source, with `read` and `folder` as weights_files.Weights. Without it, values are
    random by the model's own rule; those of adapters, which are in no files, by their `start`. Each
    module is seeded by its name, so any process makes the same block. Values are rounded to bf16,
    as published weights are, so that runs in every dtype start alike.

    store(parameter, values): sets the values in place of a copy, to keep a master as well."""
    module = model.get_submodule(name)
    for path, owner in module.named_modules(prefix=name):
        random, start = {}, getattr(owner, "start", None)  # only adapters have one
        if weights is None:
            random = _random(model, owner, f"{seed}:{path}")
        if start:
            random |= start(f"{seed}:{path}")
        for key, p in owner.named_parameters(recurse=False):
            p.hf_name, p.grid = f"{path}.{key}", getattr(owner, "grid", None)
            local, part = p, (slice(None),)
            if isinstance(p, DTensor):
                local, chunk = p.to_local(), p.__create_chunk_list__()[0]  # as for a checkpoint
                begins = list(chunk.offsets)
                begins[0] += getattr(owner, "first", 0)  # of these experts
                spans = zip(begins, chunk.sizes, strict=True)
                part = tuple(slice(at, at + size) for at, size in spans)
            values = random[key][part] if key in random else weights.read(p.hf_name, part)
            if not store:  # move to the device first: copy_ would widen it in host memory
                values = values.to(local.device)
            if key not in random:
                refuse_non_finite(values, weights.folder, p.hf_name)
            if store:
                store(p, values)
            else:
                local.copy_(values)
        for key, buffer in owner.named_buffers(recurse=False):
            if key not in owner._non_persistent_buffers_set:
                buffer.hf_name = f"{path}.{key}"
                if weights:
                    buffer.copy_(weights.read(buffer.hf_name))
                    refuse_non_finite(buffer, weights.folder, buffer.hf_name)
    return module


def refuse_non_finite(values: torch.Tensor, folder: Path, name: str) -> None:
    """Raise UserError if a weight has NaN or infinity, which its sum then has too: summing takes a
    hundredth of the time of looking at each."""
    if not values.sum().isfinite() and not values.isfinite().all():
        raise UserError(f"{folder}: {name} is not finite (NaN or infinity): give another copy")


def _random(model: PreTrainedModel, module: nn.Module, seed: str) -> dict[str, torch.Tensor]:
    """Random unsharded values for a module's own parameters, not its submodules'."""
    params = dict(module.named_parameters(recurse=False))
    if not params:
        return {}
    device = next(iter(params.values())).device
    parts = module.grid.size(0) if hasattr(module, "grid") else 1  # of the experts
    for key, p in params.items():
        shape = parts * len(p), *p.shape[1:]
        module._parameters[key] = nn.Parameter(torch.empty(shape, device=device))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(seed.encode()))
        model._init_weights(module)
    values = {key: module._parameters[key].bfloat16().float() for key in params}
    module._parameters.update(params)
    return values
