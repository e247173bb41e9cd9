"""Estimates a rank's peak memory under ZeRO, and the host's with offload."""

import math
from collections.abc import Callable

from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.estimate import GB, PROCESS, at_the_loss, describe, largest_unit, peak
from llm_demo.job.costs import block_costs, head_cost, parameters_of, unit_sizes
from llm_demo.job.device import free_host_memory
from llm_demo.job.dist import once_per_node

SAVING = "while a checkpoint is saved or read"


def table(args, config, compute, train, ranks: int, settings: dict) -> str:
    """What --estimate prints. settings: the engine's."""
    zero = settings["zero_optimization"]
    parts = of_zero(args, config, compute, train, ranks, zero)
    text = describe(parts, args)
    host, copies = of_host(config, compute, zero, ranks), of_copies(args, config)
    if host:
        text += f"\nhost memory: {host:.1f} GiB for all ranks"
        text += f", and {copies:.1f} GiB more {SAVING}" * (copies > 0)
    elif copies:
        text += f"\nhost memory: {copies:.1f} GiB more for all ranks {SAVING}"
    return text


def check_host(args, config, compute, settings: dict, world: World, say: Callable) -> None:
    """Check each node's host memory before anything is allocated, and say what offload takes. Every
    rank calls. Raises UserError if a node has too little."""
    share = world.local_size / world.size
    host = of_host(config, compute, settings["zero_optimization"], world.size)
    kept = share * max(0, host - world.size * PROCESS)  # the processes have started already
    copies = share * of_copies(args, config)
    parts = [f"{kept:.1f} GiB for what is offloaded"] * bool(kept)
    parts += [f"{copies:.1f} GiB {SAVING}"] * bool(copies)
    need = " and ".join(parts)

    def check() -> str:
        free = free_host_memory() / GB
        if kept + copies > free:
            unsaved = "add --no_save, or " * (kept < free and not args.resume)
            raise UserError(
                f"host memory: ZeRO needs {need} on this node, and {free:.1f} GiB are free: "
                f"{unsaved}use more nodes, a smaller model, or fsdp/, which needs less"
            )
        return f"host memory: {need}, of {free:.1f} GiB free"

    said = once_per_node(world, check)
    if kept:
        say(said)


def of_copies(args, config) -> float:
    """GB (2**30 bytes) of host memory that all ranks take besides while a checkpoint is saved or
    read: masters and moments, see ds_state.py."""
    return 12 * parameters_of(config) / GB if args.save or args.resume else 0


def of_host(config, compute, zero: dict, ranks: int) -> float:
    """GB (2**30 bytes) of all ranks' host memory with offload, 0 without. DeepSpeed keeps masters
    and moments in fp32, with stage 3 the gradients twice and with offload_param the weights twice:
    in one buffer, and in the pieces they were made in, which PyTorch keeps for reuse."""
    if "offload_optimizer" not in zero and "offload_param" not in zero:
        return 0
    size, share = compute.dtype.itemsize, parameters_of(config) / ranks
    total = 0
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
    return ranks * (total / GB + PROCESS)


def _pinned(size: float, offload: dict) -> float:
    """Bytes of a buffer: PyTorch rounds pinned memory up to a power of two."""
    return 2 ** math.ceil(math.log2(max(size, 1))) if offload.get("pin_memory") else size


def of_zero(args, config, compute, train, ranks: int, zero: dict) -> list[dict[str, float]]:
    """GB (2**30 bytes) by part, one entry per rank."""
    stage, on_host = zero["stage"], "offload_optimizer" in zero
    blocks = [block.parameters for block in block_costs(config, 0)]
    embedding, total = head_cost(config).parameters, parameters_of(config)
    size = compute.dtype.itemsize
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
    else:  # kept: when the loss is formed; grads: when the embedding's or head's is reduced
        sums = 0 if on_host else share * 4
        kept = sums + bucket * size  # DeepSpeed's bucket, in the compute dtype
        # beside it, in fp32 too; the embedding's gradient in the compute dtype and in fp32
        grads = sums + bucket * (4 + size) + embedding * (4 + size)
        if stage == 3:  # the terms of buckets are fitted to measured rows
            kept += bucket * 4
            grads += bucket * size
            # Tied: the head's gradient, until autograd has added it to the embedding's. Untied: the
            # fp32 buffer into which DeepSpeed copies the gradients of the head and the last norm.
            grads += embedding * (size if config.tie_word_embeddings else 4)
            # With offload: this rank's part of the sum, copied back so that it can be added to.
            grads += embedding * 4 / ranks * on_host
    optimizer = 0 if on_host else share * 8
    masters = 0 if on_host else share * 4
    first = {"weights": early * size + masters, "optimizer": optimizer, "gradients": kept}
    last = {"weights": late * size + masters, "optimizer": optimizer, "gradients": grads}
    loss_formed = {**first, "activations": activations, "loss": loss}
    # an untied head is reduced before any block's backward, a tied one after all of them
    left = 0 if config.tie_word_embeddings else activations
    return [peak(loss_formed, {**last, "activations": left, "loss": 0})] * ranks
