"""Estimates a rank's peak memory under ZeRO, and the host's with offload."""

import torch

from llm_demo.model.costs import block_costs, head_cost, parameters_of
from llm_demo.model.decoder import unit_sizes
from llm_demo.model.memory import GB, at_the_loss, describe, largest_unit


def table(args, config, compute, train, ranks: int, settings: dict) -> str:
    """What --estimate prints. settings: the engine's."""
    zero = settings["zero_optimization"]
    parts = of_zero(args, config, compute, train, ranks, zero)
    text = describe(parts, args.device_memory_gb)
    if host := of_host(config, compute, zero):
        text += f"\nhost memory: {host:.1f} GB for what the ranks of all nodes keep there"
    return text


def of_host(config, compute, zero: dict) -> float:
    """GB (2**30 bytes) that offload takes on all nodes: masters, moments and gradients in fp32,
    and with offload_param the weights in the compute dtype."""
    size = torch.finfo(compute.dtype).bits // 8
    each = 16 * ("offload_optimizer" in zero) + size * ("offload_param" in zero)
    if "offload_optimizer" in zero and zero["stage"] == 2:
        each += size  # the weights on their way to the device
    return each * parameters_of(config) / GB


def of_zero(args, config, compute, train, ranks: int, zero: dict) -> list[dict[str, float]]:
    """GB (2**30 bytes) by part, one entry per rank."""
    stage, on_host = zero["stage"], "offload_optimizer" in zero
    blocks = [block.parameters for block in block_costs(config, 0)]
    embedding, total = head_cost(config).parameters, parameters_of(config)
    size = torch.finfo(compute.dtype).bits // 8
    unit = largest_unit(unit_sizes(config, len(blocks), args.blocks_per_unit), blocks)
    tokens = args.micro_batch_size * train.seq_len
    each = [tokens] * len(blocks)
    activations, loss = at_the_loss(args, config, compute, train, each, head=True)
    bucket = min(zero.get("reduce_bucket_size", 5e8), total)
    share = total / ranks
    if stage == 3:
        live = min(zero.get("stage3_max_live_parameters", 1e9), total)
        early = share * ("offload_param" not in zero) + max(live, embedding + unit)
        late = share * ("offload_param" not in zero) + embedding + unit
    else:
        early = late = total
    if stage == 1:  # all ranks keep all gradients in fp32
        kept, grads = total * 4, total * 4 + unit * size
    else:  # a bucket on its way, in fp32 and the compute dtype, and the shards it is reduced to
        sums = 0 if on_host else share * 4
        kept = sums + bucket * size
        grads = sums + bucket * (4 + size) + embedding * (4 + size)
    step = {"gradients": share * 4 * (2 - on_host) if stage > 1 else total * 4}
    optimizer = 0 if on_host else share * 8
    masters = 0 if on_host else share * 4
    both = {"optimizer": optimizer, "activations": 0, "loss": 0}
    moments = (
        {
            "weights": early * size + masters,
            **both,
            "gradients": kept,
            "activations": activations,
            "loss": loss,
        },
        {"weights": late * size + masters, **both, "gradients": grads},
        {"weights": late * size + masters, **both, **step},
    )
    parts = max(moments, key=lambda parts: sum(parts.values()))
    order = ("weights", "optimizer", "gradients", "activations", "loss")
    return [{name: parts[name] / GB for name in order}] * ranks
