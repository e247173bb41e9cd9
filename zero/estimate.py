"""What a rank holds under ZeRO."""

import math

from llm_demo.estimate import GB, KEPT, LOSS, NONE, PROCESS, Held, largest_unit
from llm_demo.model.costs import (
    MASTER_BYTES,
    MOMENT_BYTES,
    block_costs,
    head_cost,
    parameters_of,
    state_bytes,
    unit_sizes,
)


def held(args, config, compute, train, ranks: int, zero: dict) -> list[Held]:
    """What each rank holds. zero: the engine's settings."""
    stage, on_host = zero["stage"], "offload_optimizer" in zero
    blocks = [block.parameters for block in block_costs(config, 0)]
    embedding, total = head_cost(config).parameters, parameters_of(config)
    size, tied, share = compute.dtype.itemsize, config.tie_word_embeddings, total / ranks
    unit = largest_unit(unit_sizes(config, len(blocks), args.blocks_per_unit), blocks)
    bucket = min(zero.get("reduce_bucket_size", 5e8), total)
    early = late = total
    if stage == 3:
        shard = share * ("offload_param" not in zero)
        live = min(zero.get("stage3_max_live_parameters", 1e9), total)
        early, late = shard + max(live, embedding + unit), shard + embedding + unit
    if stage == 1:  # all ranks keep all gradients in fp32
        sums, grads = total * 4, total * 4 + unit * size
    else:  # sums: when the loss is formed; grads: when the embedding's or head's is reduced
        kept = 0 if on_host else share * 4
        sums = kept + bucket * size  # DeepSpeed's bucket, in the compute dtype
        # beside it, in fp32 too; the embedding's gradient in the compute dtype and in fp32
        grads = kept + bucket * (4 + size) + embedding * (4 + size)
        if stage == 3:  # the terms of buckets are fitted to measured rows
            sums += bucket * 4
            grads += bucket * size
            # Tied: the head's gradient, until autograd has added it to the embedding's. Untied: the
            # fp32 buffer into which DeepSpeed copies the gradients of the head and the last norm.
            grads += embedding * (size if tied else 4)
            # With offload: this rank's part of the sum, copied back so that it can be added to.
            grads += embedding * 4 / ranks * on_host
    masters = 0 if on_host else share * MASTER_BYTES
    moments = 0 if on_host else share * MOMENT_BYTES[args.optim_state]
    # an untied head is reduced before any block's backward, a tied one after all of them
    last = (late * size + masters, grads, NONE if tied else KEPT)
    first = (early * size + masters, sums, LOSS)
    host = host_bytes(share, size, zero, ranks)
    tokens = [args.micro_batch_size * train.seq_len] * len(blocks)
    # masters and moments, see ds_state.py
    copies = state_bytes(args) * share if args.save or args.resume else 0
    return [Held(moments, [first, last], tokens, host=host, copies=copies)] * ranks


def host_bytes(share: float, size: int, zero: dict, ranks: int) -> float:
    """Bytes of host memory that a rank takes with offload, 0 without. share: a rank's parameters,
    of `size` bytes. DeepSpeed keeps masters and moments in fp32, with stage 3 the gradients twice
    and with offload_param the weights twice: in one buffer, and in the pieces they were made in,
    which PyTorch keeps for reuse."""
    if "offload_optimizer" not in zero and "offload_param" not in zero:
        return 0
    total = PROCESS * GB
    if "offload_param" in zero:
        total += _pinned(share * size, zero["offload_param"]) + share * size
    if optimizer := zero.get("offload_optimizer"):
        masters = _pinned(share * 4, optimizer)  # stage 2 has one buffer; stage 3 cuts it
        if zero["stage"] == 3:
            cut = max(1, zero.get("sub_group_size", 1e9))  # 0: a group for each parameter
            masters = share // cut * _pinned(cut * 4, optimizer)
            masters += _pinned(share % cut * 4, optimizer)
            total += masters  # and so the gradients
        total += masters + _pinned(share * 4, optimizer) + share * 8
        if zero["stage"] == 2:  # the weights on their way to the device
            total += share * ranks * size
    return total


def _pinned(size: float, offload: dict) -> float:
    """Bytes of a buffer: PyTorch rounds pinned memory up to a power of two."""
    return 2 ** math.ceil(math.log2(max(size, 1))) if offload.get("pin_memory") else size
