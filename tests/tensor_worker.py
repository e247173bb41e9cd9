"""Compares a decoder's blocks, cut into shares and sharded, with the whole ones, in fp64: outputs
and the gradient of every parameter. Arguments: the number of shares, then models."""

import copy
import sys
import types

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3Config

from fsdp.sharding import on_grid, shard_units, sum_not_average
from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import DecoderLoss, make_units
from llm_demo.core.mesh import SHARD, World, make_part_mesh
from llm_demo.core.rows import Slice
from llm_demo.options.tensor import keep_share

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, attn_implementation="packed_math",
)  # fmt: skip
LATENT = dict(
    first_k_dense_replace=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=12, n_routed_experts=4, n_group=1, topk_group=1,
)  # fmt: skip
CONFIGS = {
    "qwen3": Qwen3Config(head_dim=8, **SIZES),
    "llama": LlamaConfig(mlp_bias=True, attention_bias=True, **SIZES),
    "deepseek": DeepseekV3Config(**SIZES, **LATENT),
}
B, S = 4, 24
LENGTHS = [24, 7, 17, 10, 10, 4, 1, 23]


def norm(module, x):
    """transformers' RMSNorm, which computes in fp32."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * x * scale


def decoder(lm, checkpointing):
    units = make_units(lm.model.layers, [1, 1], checkpointing)
    return DecoderLoss(lm, units, last=False)


def whole_tensor(t):
    """The whole tensor, gathered one dimension of its grid after another, since PyTorch 2.11 does
    not gather two at once."""
    placements = [*t.placements]
    for dim in reversed(range(len(placements))):
        placements[dim] = Replicate()
        t = t.redistribute(placements=placements)
    return t.to_local()


def main(n: int, names: list[str]) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, rank, torch.device("cpu"))
    ranks, grid = DeviceMesh("cpu", range(size), mesh_dim_names=(SHARD,)), make_part_mesh(world, n)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).view(B, S)
    for name in names:
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(CONFIGS[name]).double()
        for module in lm.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = types.MethodType(norm, module)
        for p in lm.parameters():  # else biases are zero
            torch.nn.init.normal_(p, std=0.2)
        ids = torch.randint(64, (B, S))
        weights = torch.randn(B, S, SIZES["hidden_size"], dtype=torch.float64)
        whole = decoder(copy.deepcopy(lm), False)
        documents = make_documents(bounds, (B, S), "math", world.device)
        true = whole(ids, positions, documents, None)
        (true * weights).sum().backward()
        expected = {key: p.grad for key, p in whole.named_parameters() if p.grad is not None}

        keep_share(lm, grid)
        model = decoder(lm, True)
        owners = {p: key for key, p in model.named_parameters()}
        shard_units(model, ranks, MixedPrecisionPolicy(), reshard=True)
        fully_shard(model, mesh=ranks)
        sum_not_average(model)
        assert len(owners) == len(list(model.parameters()))
        # this group's rows, and this rank's slice of them
        groups, part = size // n, Slice(rank % n, n)
        rows = slice(rank // n * B // groups, (rank // n + 1) * B // groups)
        starts = bounds[(bounds >= rows.start * S) & (bounds <= rows.stop * S)] - rows.start * S
        shape = B // groups, S
        documents = make_documents(starts, shape, "math", world.device)
        hidden = model(part.of_rows(ids[rows]), positions[rows], documents, None)
        error = (hidden - part.of_rows(true[rows])).norm() / true.norm()
        assert error < 1e-12, (name, error)
        (hidden * part.of_rows(weights[rows])).sum().backward()
        for module in model.modules():
            for key, dim in getattr(module, "cut", {}).items():
                p = getattr(module, key)
                p.cut, p.grid = dim, module.grid
        compared = set()
        for key, p in model.named_parameters():
            key = key.replace(".unit.", ".")
            if ".parts." in key or p.grad is None:
                continue
            found = whole_tensor(on_grid(p.grad.to_local(), p, ranks))
            error = (found - expected[key]).norm() / expected[key].norm()
            assert found.shape == expected[key].shape and error < 1e-9, (name, key, error)
            compared.add(key)
        assert compared == expected.keys()
    dist.destroy_process_group()


main(int(sys.argv[1]), sys.argv[2:])
