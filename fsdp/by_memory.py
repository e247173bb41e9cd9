"""What is decided by the memory that a run needs, see llm_demo/memory.py."""

import math

from llm_demo import memory
from llm_demo.core.errors import UserError
from llm_demo.machine.dist import from_rank0
from llm_demo.memory import USABLE, Settings, fullest, settings_of
from llm_demo.model.costs import sizes_of
from llm_demo.model.families import experts_of


def settings_of_copy(
    args, compute, train, ranks: int, sharded: bool = True, spread: int = 1
) -> Settings:
    """Settings of one copy of the model. ranks: of this copy; spread: --expert_parallel."""
    return settings_of("fsdp", args, compute, train, ranks, sharded=sharded, expert_parallel=spread)


def choose_spread(args, config, compute, train, world, log) -> int:
    """The number of ranks over which each block's experts are spread: as asked, or the fewest of a
    node with which the run fits. Logs the reason. Every rank calls."""
    asked = args.expert_parallel
    if not experts_of(config) or world.size == 1 and not asked:
        return 1
    if asked:
        n, why = asked, "as requested"
    elif args.replicas != "1":
        n, why = 1, "because of --replicas"
    else:
        n, why = from_rank0(world, lambda: fewest(args, config, compute, train, world))
    where = "all on each rank" if n == 1 else f"spread over {n} ranks"
    log.say(f"experts: {where} ({why})")
    log.resolved(expert_parallel=n)
    return n


def fewest(args, config, compute, train, world) -> tuple[int, str]:
    """(the fewest ranks of a node over which experts have to be spread for the run to fit, why)."""
    capacity, sizes = memory.capacity_of(args), sizes_of(config)
    if not capacity:
        return 1, "the memory of this device is not known"
    shared = math.gcd(world.size, min(world.local_size, world.size), experts_of(config))
    needed = {}
    for n in range(1, shared + 1):
        if shared % n == 0:
            settings = settings_of_copy(args, compute, train, world.size, spread=n)
            needed[n] = fullest(sizes, settings).total
    fitting = [n for n, gb in needed.items() if gb < USABLE * capacity]
    n, why = min(needed, key=needed.get), "takes least memory"
    if fitting:
        n = fitting[0]
        why = "they fit" if n == 1 else "the fewest that fit"
    why += f": about {needed[n]:.0f} of {capacity:.0f} GiB"
    if fitting and n > 1 and not args.reshard_after_forward:
        why += "; all on each rank with --reshard_after_forward may be faster"
    return n, why


TOO_HIGH = 1.25  # the formula gives at most this many times the true peak


def refuse_replicas(args, config, compute, train, ranks: int, replicas: int) -> None:
    """Raise UserError if a copy of the model on so many ranks surely does not fit."""
    capacity = memory.capacity_of(args)
    settings = settings_of_copy(args, compute, train, ranks)
    needed = fullest(sizes_of(config), settings).total
    if capacity and needed > TOO_HIGH * capacity:
        raise UserError(
            f"--replicas {args.replicas}: a copy on {ranks} GPU(s) needs about {needed:.0f} of "
            f"{capacity:.0f} GiB on each: ask for fewer replicas than {replicas}"
        )


def choose_attention_kept(job, ranks: int, sharded: bool, spread: int):
    """The plan of a run.Job with the number of blocks that keep their attention. Logs the reason.
    Every rank calls."""
    plan, (args, config, compute, train) = job.plan, job.planned()

    def choose() -> tuple[int, str]:
        settings = settings_of_copy(args, compute, train, ranks, sharded, spread)
        return memory.attention_kept(
            sizes_of(config), settings, train.longest, memory.capacity_of(args)
        )

    kept, why = from_rank0(job.world, choose)
    where = "computed again in the backward"
    if kept:
        where = f"kept for the backward of {kept} of {config.num_hidden_layers} blocks"
    job.log.say(f"attention: {where} ({why})")
    job.log.resolved(attention_kept=kept)
    return plan._replace(compute=compute._replace(attention_kept=kept))
