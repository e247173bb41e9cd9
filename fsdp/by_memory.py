"""What is decided by the memory that a run needs, see llm_demo/memory.py."""

from llm_demo import memory
from llm_demo.core.errors import UserError
from llm_demo.machine.dist import from_rank0
from llm_demo.memory import LONG, USABLE, Settings, fullest, settings_of
from llm_demo.model.costs import experts_of, sizes_of


def settings_of_copy(
    args, compute, train, ranks: int, sharded: bool = True, spread: int = 1
) -> Settings:
    """Of one copy of the model. ranks: of this copy; spread: --expert_parallel."""
    return settings_of("fsdp", args, compute, train, ranks, sharded=sharded, expert_parallel=spread)


def refuse_replicas(args, config, compute, train, ranks: int, replicas: int) -> None:
    """Raise UserError if a copy of the model needs more memory than its GPUs have."""
    capacity = memory.capacity_of(args)
    needed = fullest(sizes_of(config), settings_of_copy(args, compute, train, ranks)).total
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
        capacity = memory.capacity_of(args)
        if not capacity:
            return 1, "the memory of this device is not known"
        node, needed = min(world.local_size, world.size), {}
        for n in range(1, node + 1):
            if world.size % n == node % n == n_experts % n == 0:
                settings = settings_of_copy(args, compute, train, world.size, spread=n)
                needed[n] = fullest(sizes_of(config), settings).total
        fitting = [n for n, gb in needed.items() if gb < USABLE * capacity]
        n = fitting[0] if fitting else min(needed, key=needed.get)
        why = "takes least memory"
        if fitting:
            why = "they fit" if n == 1 else "the fewest that fit"
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
    plan = job.plan
    kept, why = from_rank0(
        job.world, lambda: attention_kept(*job.planned(), ranks, sharded, spread)
    )
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
    settings = settings_of_copy(args, compute, train, ranks, sharded, spread)
    if settings.keys:
        return 0, f"{compute.attn_impl} is no fused kernel here"
    capacity = memory.capacity_of(args)
    if not capacity:
        return 0, "the memory of this device is not known"
    kept, needed = memory.attention_kept(sizes_of(config), settings, capacity)
    return kept, f"about {needed:.0f} of {capacity:.0f} GiB with {kept}"
