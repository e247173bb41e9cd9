"""What a rank holds under FSDP2 or in one process, and what is decided by that."""

import bisect
import itertools

from fsdp.activations_on_host import host_bytes
from fsdp.flags import sums_each
from fsdp.host_adamw import SLICE, SLOTS
from fsdp.lowrank import TOGETHER
from llm_demo import estimate as memory
from llm_demo.core.errors import UserError
from llm_demo.estimate import BLOCK, LOSS, NONE, Held, largest_unit, tokens_here, with_master
from llm_demo.machine.dist import from_rank0
from llm_demo.model.costs import (
    MOMENT_BYTES,
    block_costs,
    experts_of,
    head_cost,
    heads_of,
    on_a_rank,
    parameters_of,
    state_bytes,
    unit_sizes,
)

LONG = 8192  # tokens of a document from which on attention takes a good part of the forward


def held(args, config, compute, train, ranks: int, sharded: bool, spread: int = 1) -> list[Held]:
    """What each rank of a replica holds. spread: --expert_parallel."""
    n, size, on_host = config.num_hidden_layers, compute.dtype.itemsize, args.optimizer_on_host
    costs, total = block_costs(config, 0), parameters_of(config)
    embedding, tied = head_cost(config).parameters, config.tie_word_embeddings
    blocks = [on_a_rank(block, args.tensor_parallel, spread) for block in costs]
    ends = total - sum(block.parameters for block in costs)  # embedding and head, or both in one
    values = 0
    if args.base_bits == 4:  # one matrix at a time has its values
        widest = max(config.intermediate_size, heads_of(config).queries * heads_of(config).width)
        stored = zip(blocks, compute.lora.in_4_bits, strict=True)
        blocks = [b - numbers + taken / size for b, (numbers, taken) in stored]
        values = config.hidden_size * widest * size
        total = ends + sum(blocks)
    unit = largest_unit(unit_sizes(config, n, per_unit_of(args)), blocks)
    whole, shard = ends + sum(blocks), total / ranks  # whole: when everything is gathered
    stay = args.grad_accum_steps > 1 or on_host  # sums of gradients, between micro-batches
    lora, trained, tokens = compute.lora, total, tokens_here(args, train)
    # Bytes of weights at the loss (early) and when the embedding's gradient is there (late); of
    # gradients then (sums, grads) and when the first block's are there (of_blocks).
    if sharded:
        stored = shard * (size if lora or on_host else 4)
        early = ends + 2 * unit if args.reshard_after_forward else whole
        freed = on_host and args.reshard_after_forward and not tied  # the embedding's
        early += embedding * (ranks > 1 and size < 4 and not freed)  # a buffer for both ends
        early, late = stored + early * size, stored + (embedding + unit) * size
        sums = (shard if sums_each(args) else whole) * 4 * stay
        # the embedding's gradient, as sent and received, beside memory of the head's: see loss.py
        sent = size + 4 + 4 / ranks
        if on_host:
            sent = size * (3 - args.use_activation_checkpointing)
        grads, of_blocks = shard * 4 + embedding * sent, shard * 4 + unit * 4
    else:
        early = late = total * (size if lora or on_host else with_master(compute))
        sums = total * 4 * stay
        if on_host:  # a unit's, until they are added; a tied head's, until the embedding's is there
            grads = sums + (max(unit, embedding) + 2 * tied * embedding) * size
        elif stay:  # a micro-batch's gradients exist until they are added
            grads = sums + total * (size if size < 4 else 0)
        else:  # a unit's gradients are concatenated, or copied
            grads = total * (size if with_master(compute) == 4 else 4) + max(unit, ends) * size
        of_blocks = grads
    if lora:  # what is frozen has no fp32 copy and no gradients
        trained, mine = lora.parameters, lora.parameters - lora.routed * (1 - 1 / spread)
        early += 4 * trained / ranks + size * mine if sharded else trained * with_master(compute)
        early += values
        late, sums, grads, of_blocks = early, mine * 4 * stay, mine * 4, mine * 4
    moments = trained / ranks * MOMENT_BYTES[args.optim_state]  # or slices on their way
    optimizer = SLOTS * SLICE * state_bytes(args) if on_host else moments
    if args.psgd_rank:  # its errors, and two sets of matrices that are multiplied together
        optimizer += 4 * shard + 8 * min(shard, max(TOGETHER, embedding / ranks))
    host = offloaded(args, config, compute, shard, tokens)
    copies = state_bytes(args) * trained / ranks
    copies *= bool(args.save and args.save_every)
    times = [(early, sums, LOSS), (late, grads, NONE), (late, of_blocks, BLOCK)]
    sent = exchanged_bytes(config, compute, tokens, spread)
    return [Held(optimizer, times, [tokens] * n, True, sent, host, copies)] * ranks


def offloaded(args, config, compute, shard: float, tokens: int) -> float:
    """Bytes of host memory for what is offloaded, with the process. shard: a rank's parameters."""
    host = state_bytes(args) * shard * args.optimizer_on_host
    host += memory.PROCESS * memory.GB * (args.optimizer_on_host or args.activations_on_host)
    if args.activations_on_host:
        inputs = tokens, config.hidden_size
        host += host_bytes(config.num_hidden_layers, inputs, compute.dtype)
    return host


def exchanged_bytes(config, compute, tokens: int, spread: int) -> int:
    """Bytes of a block's experts that are spread, an estimate: all ranks' tokens, their sums, and
    the gradients of both."""
    if spread == 1:
        return 0
    times = 4 if compute.compile else 4 + 2 * config.num_experts_per_tok
    return times * spread * tokens * config.hidden_size * compute.dtype.itemsize


def per_unit_of(args) -> int:
    """Blocks of a unit, 0 if their size decides: only a unit's input goes to the host."""
    return 1 if args.activations_on_host else args.blocks_per_unit


def refuse_replicas(args, config, compute, train, ranks: int, replicas: int) -> None:
    """Raise UserError if a copy of the model needs more memory than its GPUs have."""
    capacity, job = memory.capacity_of(args), (args, config, compute, train)
    needed = memory.need(held(*job, ranks, True), *job)
    if capacity and needed > 1.1 * capacity:  # an estimate
        raise UserError(
            f"--replicas {args.replicas}: a copy on {ranks} GPU(s) needs about "
            f"{needed:.0f} of {capacity:.0f} GiB on each: ask for fewer replicas than {replicas}"
        )


def choose_spread(args, config, compute, train, world, log) -> int:
    """Over how many ranks each block's experts are spread: as asked, or the fewest of a node's that
    fit. Logs the reason. Every rank calls."""
    n_experts, asked = experts_of(config), args.expert_parallel
    if not n_experts or world.size == 1 and not asked:
        return 1

    def fewest() -> tuple[int, str]:
        if not (capacity := memory.capacity_of(args)):
            return 1, "the memory of this device is not known"
        job, node = (args, config, compute, train), min(world.local_size, world.size)
        ranks = [n for n in range(1, node + 1) if world.size % n == node % n == n_experts % n == 0]
        needed = {n: memory.need(held(*job, world.size, True, n), *job) for n in ranks}
        fitting = [n for n in ranks if needed[n] < memory.USABLE * capacity]
        n = (fitting or sorted(ranks, key=needed.get))[0]
        why = "they fit" if n == 1 else "the fewest that fit"
        why = why if fitting else "takes least memory"
        why += f": about {needed[n]:.0f} of {capacity:.0f} GiB"
        if fitting and n > 1 and not args.reshard_after_forward:
            why += "; all on each rank with --reshard_after_forward may be faster"
        return n, why

    if asked:
        n, why = asked, "as requested"
    elif args.replicas != "1":
        n, why = 1, "because of --replicas"
    else:
        n, why = from_rank0(world, fewest)
    where = "all on each rank" if n == 1 else f"spread over {n} ranks"
    log.say(f"experts: {where} ({why})")
    log.resolved(expert_parallel=n)
    return n


def choose_attention_kept(job, ranks: int, sharded: bool, spread: int):
    """The plan of a run.Job with the number of blocks that keep their attention. Logs the reason.
    Every rank calls."""
    plan, how = job.plan, (ranks, sharded, spread)
    kept, why = from_rank0(job.world, lambda: attention_kept(*job.planned(), *how))
    where = "computed again in the backward"
    if kept:
        where = f"kept for the backward of {kept} of {plan.source.config.num_hidden_layers} blocks"
    job.log.say(f"attention: {where} ({why})")
    job.log.resolved(attention_kept=kept)
    return plan._replace(compute=plan.compute._replace(attention_kept=kept))


def attention_kept(
    args, config, compute, train, ranks: int, sharded: bool, spread: int
) -> tuple[int, str]:
    """(how many of the last blocks, if recomputed, keep what attention returned, the reason)."""
    if train.longest < LONG:
        return 0, "documents are short"
    if memory.keys_kept(compute, train):
        return 0, f"{compute.attn_impl} is no fused kernel here"
    if not (capacity := memory.capacity_of(args)):
        return 0, "the memory of this device is not known"
    alike = held(args, config, compute, train, ranks, sharded, spread)

    def need(blocks: int) -> float:
        return memory.need(alike, args, config, compute._replace(attention_kept=blocks), train)

    sizes = unit_sizes(config, config.num_hidden_layers, per_unit_of(args))
    counts = [0, *itertools.accumulate(reversed(sizes))]  # of the last unit, the last two, ...
    first = bisect.bisect_left(counts, memory.USABLE * capacity, key=need)  # that does not fit
    most = counts[max(0, first - 1)]
    tried = most or counts[1]
    return most, f"about {need(tried):.0f} of {capacity:.0f} GiB with {tried}"
