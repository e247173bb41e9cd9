"""Start and end torch.distributed, and run code on some or all ranks."""

import contextlib
import gc
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from llm_demo.core.errors import Stopped, UserError
from llm_demo.core.mesh import World
from llm_demo.machine import process
from llm_demo.machine.device import drawn_on, refuse_gpus
from llm_demo.machine.files import ROOT, digest, disk_full, hash_of
from llm_demo.machine.text import STOPPED, counted, first_line


def timeout() -> timedelta:
    """How long a rank waits for the others in one operation. Raises UserError for a bad setting."""
    return timedelta(minutes=process.timeout_minutes())


def stay_on_loopback() -> None:
    """Let gloo and NCCL use the loopback interface alone, if the user has named none. For process
    groups on one node: gloo listens on the interface with the host's name, NCCL on the first."""
    names = {name for _, name in socket.if_nameindex()}
    for loopback in names & {"lo", "lo0"}:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)


def start() -> World:
    """Join the process group described by the launcher's environment (world size 1 without one).

    NCCL (RCCL on AMD) with GPUs, gloo without. LOCAL_RANK only picks the GPU. On one node, nothing
    listens on other interfaces than loopback. Raises UserError for an environment that describes no
    group, and for GPUs that PyTorch has no code for or that are of two kinds."""
    env = os.environ
    size = process.number("WORLD_SIZE", 1, at_least=1)
    rank, local_rank = process.number("RANK", 0, at_most=size - 1), process.number("LOCAL_RANK", 0)
    local_size = process.number("LOCAL_WORLD_SIZE", 1, at_least=1)
    process.number("MASTER_PORT", 0, at_most=65535)
    env.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local_rank))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if size > 1 and not env.get(name):
            raise UserError(f"WORLD_SIZE={size} needs {name}: start it by its launcher")
    if size == local_size:
        stay_on_loopback()
    store = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            gpus = counted(torch.cuda.device_count(), "GPU")
            raise UserError(
                f"rank {rank} needs GPU {local_rank}, but PyTorch sees only {gpus}: lower "
                "NPROC_PER_NODE or check CUDA_VISIBLE_DEVICES"
            )
        refuse_gpus(range(min(local_size, torch.cuda.device_count())))
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # gloo as well as NCCL: objects and barriers before step 1 need no GPU.
        backend, options = "cpu:gloo,cuda:nccl", {"device_id": device}
    else:
        device = torch.device("cpu")
        backend, options = "gloo", {}
    try:
        dist.init_process_group(backend, timeout=timeout(), **options, **store)
        if size > 1 and device.type == "cuda":
            # NCCL connects the ranks in the first sum. It must not find the card filled by PyTorch.
            dist.all_reduce(torch.zeros((), device=device, dtype=torch.float64))
    except Exception as e:
        reason = process.fault_of_environment(e)
        if reason:
            raise UserError(reason) from e
        raise
    world = World(rank, size, local_rank, device)
    if size > world.local_size:
        same_on_all_nodes(world, {"the GPU": drawn_on(), **versions()})
    return world


def versions() -> dict[str, str]:
    """What must be the same on all nodes: versions, and a digest of the code."""
    python = ".".join(map(str, sys.version_info[:2]))
    found = {"Python": python} | process.versions_of(["torch", "transformers", "deepspeed"])
    folders = [ROOT / "llm_demo", *(flags.parent for flags in ROOT.glob("*/flags.py"))]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    code = {str(file.relative_to(ROOT)): digest(file) for file in files}
    found["the code's digest"] = hash_of(code)[:12]
    return found


def on_all_ranks(act: Callable, world: World, group=None, caught: type = Exception) -> list:
    """The results of act() on all ranks. An error on one rank, of the kind `caught`, is raised on
    all, so that none waits for a dead one: a UserError as it is, others as OSError."""
    result = error = None
    try:
        result = act()
    except UserError as e:
        error = e
    except caught as e:
        error = OSError(disk_full(e) or str(e).strip() or repr(e))
    ranks = [(result, error)] * world.size
    if world.size > 1:  # else perhaps without a process group
        dist.all_gather_object(ranks, (result, error), group=group)
    for _, error in ranks:
        if error:
            raise error
    return [result for result, _ in ranks]


def from_rank0(world: World, make: Callable, long: bool = False):
    """Return rank 0's `make()` on every rank. A UserError on rank 0 is raised on every rank.

    long: make() may take longer than DIST_TIMEOUT_MINUTES; the other ranks wait for up to a day."""

    def act():
        with process.refuse_unusable_paths():
            return make() if world.rank == 0 else None

    group = _patient_group(world) if long else None
    return on_all_ranks(act, world, group, caught=UserError)[0]


def once_per_node(world: World, build: Callable):
    """Run `build` on the first process of each node, then on the others (which find its files). It
    may take longer than DIST_TIMEOUT_MINUTES. A UserError on one process is raised on all."""
    result = None

    def act():
        nonlocal result
        with process.refuse_unusable_paths():
            result = build()

    group = _patient_group(world)
    for turn in (world.local_rank == 0, world.local_rank != 0):
        on_all_ranks(act if turn else lambda: None, world, group, caught=UserError)
    return result


def _patient_group(world: World):
    """All ranks, for work that may take longer than DIST_TIMEOUT_MINUTES, up to a day."""
    if world.size == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(days=1))


def same_on_all_nodes(world: World, facts: dict) -> None:
    """Raise UserError on every rank if one of the facts differs between nodes."""
    if world.size == world.local_size:
        return
    first, *others = on_all_ranks(lambda: facts, world)
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value:
                raise UserError(
                    f"{name} is {value} on rank 0, but {other.get(name)} on rank {rank}: start "
                    "all nodes with the same GPUs, versions, code, flags, data and model"
                )


def timed_out(error: BaseException) -> bool:
    """Whether an operation failed because another rank did not join it in time."""
    return re.search(r"Timed out waiting \d+ms|[Ww]ait timeout after \d+ms", str(error)) is not None


def lost_peer(error: BaseException) -> bool:
    """Whether an operation failed because another rank has ended or did not join it in time."""
    ended = any(f"onnection {end} by peer" in str(error) for end in ("closed", "reset"))
    return ended or timed_out(error)


def run(
    main: Callable[[], None], parse: Callable | None = None, advice: Callable | None = None
) -> None:
    """Call main(). End with one line for bad input, with a traceback for a bug, never with a hang.

    parse() returns the flags again. advice(flags) says what to do when a GPU is out of memory."""
    code = 0
    gc.freeze()  # no collection goes through what is imported, and the process ends faster
    process.outlive_terminal()
    process.raise_on_ctrl_c()
    try:
        with process.refuse_unusable_paths():
            main()
        if dist.is_initialized():
            # Without the barrier, a fast rank's exit looks like a crash to a slow one. Without the
            # destroy, about one gloo run in twenty ends in abort().
            dist.barrier()
            dist.destroy_process_group()
    except Stopped as e:
        code = STOPPED
        if dist.get_rank() == 0:
            print(e, file=sys.stderr)
        dist.barrier()
    except (Exception, KeyboardInterrupt) as e:
        code, line, later = verdict(e, parse, advice)
        if later:
            process.let_others_speak()
        if line:
            print(f"error: {line}", file=sys.stderr)
        else:
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:  # threads of a broken process group would block a normal exit
        os._exit(code)


def verdict(
    error: BaseException, parse: Callable | None, advice: Callable | None
) -> tuple[int, str, bool]:
    """(exit code, the line that explains it or "" for a bug, whether another rank is likely to have
    a better one, so that this rank waits). parse, advice: as for run."""
    rank = os.environ.get("RANK", "0")
    if isinstance(error, UserError):
        return 2, str(error), rank != "0"  # rank 0 usually has the same error
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped by SIGINT", False
    full = isinstance(error, dist.DistBackendError) and "out of memory" in str(error)  # in NCCL
    if full or isinstance(error, torch.OutOfMemoryError):
        cause = str(error).splitlines()[-1] if full else str(error).split(". ")[0]
        hint = ""
        with contextlib.suppress(Exception):  # also without flags: they may have raised the error
            hint = f"; what helps, in this order: {advice(parse())}"
        return 1, f"rank {rank} is out of GPU memory ({cause}){hint}", False
    if timed_out(error):
        waited = f"rank {rank} waited {process.timeout_minutes():g} minutes for another rank"
        why = "which hangs or needs longer; DIST_TIMEOUT_MINUTES sets this limit"
        return 1, f"{waited}, {why}", False
    if lost_peer(error):  # which prints the reason, and the launcher ends this rank
        return 1, f"rank {rank} lost the connection to another rank: see that rank's error", True
    if isinstance(error, dist.DistNetworkError) and not dist.is_initialized():
        return 1, f"rank {rank} can't meet the other ranks: {first_line(error)}", False
    if "Too many open files" in str(error):
        return 1, f"rank {rank}: Too many open files: raise the limit of ulimit -n", False
    reason = disk_full(error)
    if reason:
        return 1, f"rank {rank}: {reason}", False
    reason = process.fault_of_environment(error)
    if reason:
        return 2, reason, rank != "0"
    return 1, "", False
