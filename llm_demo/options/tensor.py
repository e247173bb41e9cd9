"""Tensor parallelism: each rank of a group computes with its share of the heads of attention and of
the inner width of dense MLPs.

The ranks hold slices of the same rows. Before attention and before an MLP the slices are gathered
into whole rows; afterwards what each rank adds is summed into slices. Matrices that the hidden
state enters (q, k, v, gate, up) keep a share of their outputs, those that it leaves (o, down) a
share of their inputs. These are sharded over the ranks with the same share, everything else over
all ranks, each of which has a part of its gradient. So no parameter has a second copy, and every
gradient is a plain sum over the ranks that share it.

Sources: "Megatron-LM" (Shoeybi et al. 2019); slices between: "Reducing Activation Recomputation in
Large Transformer Models" (Korthikanti et al. 2022)."""

import types

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from llm_demo.core.errors import UserError
from llm_demo.core.mesh import keep_parts, known, spread_tokens

OUTPUTS, INPUTS = 0, 1  # the dimension of a weight [outputs, inputs]
CUT = {
    **dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), OUTPUTS
    ),
    **dict.fromkeys(("o_proj", "down_proj"), INPUTS),
}
WHOLE = {"q_a_proj", "kv_a_proj_with_mqa"}  # latent attention: their outputs serve all heads


def keep_share(model: PreTrainedModel, grid: DeviceMesh) -> None:
    """Leave this rank its share of each block's attention and dense MLP, of a model on the meta
    device, and let both take and return slices of rows. grid: shares x shards of such a share, over
    all ranks. Raises UserError for a layer that is not known here."""
    for name, module in model.model.named_modules():
        is_attention = name.endswith(".self_attn")
        if not is_attention and not (name.endswith(".mlp") and hasattr(module, "down_proj")):
            continue
        for kind, layer in module.named_children():
            if kind in CUT:
                _cut_layer(layer, CUT[kind], grid, f"{name}.{kind}")
            elif isinstance(layer, nn.Linear) and kind not in WHOLE:
                raise UserError(f"--tensor_parallel: a layer named {kind} is not supported")
        module.spread_over = known(grid.get_group(0)), grid.size(0)
        module.forward = types.MethodType(_of_slices, module)


def _cut_layer(layer: nn.Linear, dim: int, grid: DeviceMesh, name: str) -> None:
    """Leave this rank's share of a linear layer, and of its adapter if it has one."""
    n, width = grid.size(0), layer.weight.shape[dim]
    if width % n:
        raise UserError(f"--tensor_parallel {n} does not divide {width}, the width of {name}")
    keep_parts(layer, grid, {"weight": dim, "bias": 0} if dim == OUTPUTS else {"weight": dim})
    if dim == INPUTS and layer.bias is not None:
        layer.spread_over = known(grid.get_group(0)), n
        layer.forward = types.MethodType(_with_share_of_bias, layer)
    if hasattr(layer, "lora_A"):
        keep_parts(layer.lora_B if dim == OUTPUTS else layer.lora_A, grid, {"weight": dim})


def _with_share_of_bias(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The ranks' results are summed, so each adds 1 / n of the bias, which is whole."""
    n = layer.spread_over[1]
    return type(layer).forward(layer, x) + layer.bias * (1 / n - 1)


def _of_slices(module: nn.Module, hidden_states: torch.Tensor, **kwargs):
    """The module's own forward on whole rows. hidden_states [B, s, d], slice i of the rows on the
    group's rank i -> the same shape."""
    group, n = module.spread_over
    B = len(hidden_states)
    rows = spread_tokens(hidden_states, True, group, n)  # [n B, s, d]; by slice
    rows = rows.unflatten(0, (n, B)).transpose(0, 1).flatten(1, 2)
    out = type(module).forward(module, rows, **kwargs)
    added, *rest = out if isinstance(out, tuple) else (out,)
    slices = added.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)
    slices = spread_tokens(slices, False, group, n)
    return (slices, *rest) if isinstance(out, tuple) else slices
