"""Start this node's processes: python -m llm_demo.launch SCRIPT [its flags]

NPROC_PER_NODE   processes on this node (default: one per GPU, or 2 without a GPU)
NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for several nodes: run the same command on each, with
                 NODE_RANK 0 on the one at MASTER_ADDR
JOIN_SECONDS     how long nodes wait for one another at the start (default: 50)
DIST_TIMEOUT_MINUTES   how long a rank waits for the others in one operation (default: 30)
STOP_MINUTES     how long ranks may take to save after a signal (default: 10)
LOGLEVEL=INFO    show the log of torchrun

docs/running.md has more on them, on signals and on exit codes. No rank outlives this process, even
if SIGKILL ends it. A launcher such as fsdp/launch_fsdp.sh puts `--settings NAME=value ... --`
before SCRIPT: then these and the environment set flags, too.
"""

import gc
import logging
import os
import shlex
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llm_demo.core.errors import UserError
from llm_demo.launch.settings import check_flags, launcher_flags, with_rows_of_two, without_effect
from llm_demo.machine.process import (
    command,
    number,
    quit_on,
    refuse_other_clone,
    stop_signals,
    timeout_minutes,
    usable_cores,
)
from llm_demo.run.inputs import look

LOOPBACK = "127.0.0.1"
MOST_NODES = 100_000


@dataclass(frozen=True)
class Node:
    processes: int
    nodes: int
    rank: int  # this node's number
    addr: str  # node 0's
    port: int
    wait: int  # seconds to wait for the other nodes
    listener: socket.socket | None  # node 0's, at addr and port


def this_node() -> Node:
    """Read the environment. Raises UserError for impossible settings, before any slow work."""
    number("STOP_MINUTES", 10)
    number("NPROC_PER_NODE", 2, at_least=1)
    timeout_minutes()
    wait = number("JOIN_SECONDS", 50, at_least=1, at_most=86_400)
    count = number("NNODES", 1, at_least=1, at_most=MOST_NODES)
    rank, addr, port = 0, LOOPBACK, number("MASTER_PORT", 0, at_most=65535)
    if count > 1:
        if not (os.environ.get("MASTER_ADDR") and os.environ.get("NODE_RANK")):
            raise UserError(
                f"NNODES={count} needs MASTER_ADDR (node 0's) and NODE_RANK, on every node"
            )
        rank, addr = number("NODE_RANK", 0), os.environ["MASTER_ADDR"]
        port = number("MASTER_PORT", 29500, at_least=1)
        if rank >= count:
            raise UserError(f"NODE_RANK={rank}: must be below NNODES={count}")
    listener = None
    if rank == 0:
        listener = listen(LOOPBACK if count == 1 else "", port)
        port = listener.getsockname()[1]
    return Node(
        processes=processes_here(),
        nodes=count,
        rank=rank,
        addr=addr,
        port=port,
        wait=wait,
        listener=listener,
    )


def listen(addr: str, port: int) -> socket.socket:
    """A socket that listens there. addr "": on all interfaces; port 0: any free one. Raises
    UserError if the port is busy."""
    both = not addr and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server((addr, port), family=family, dualstack_ipv6=both)
    except OSError:
        raise UserError(f"port {port} is busy on this machine: give another MASTER_PORT") from None


def processes_here() -> int:
    """The number of ranks of this node. Hides GPUs that training doesn't use, and says so. Raises
    UserError if NPROC_PER_NODE is too large."""
    # imports torch, which takes seconds: after all other refusals
    from llm_demo.machine import device

    kept, others, hide = device.cards()
    if hide:
        os.environ.update([hide])
        print(others, file=sys.stderr, flush=True)
    gpus = len(kept)
    processes = number("NPROC_PER_NODE", gpus or 2, at_least=1)
    if gpus and processes > gpus:
        raise UserError(f"NPROC_PER_NODE={processes}, but PyTorch sees {gpus} GPU(s) here")
    return processes


def set_defaults(processes: int) -> None:
    """Set the environment of the ranks, except what the user has set."""
    import torch

    # Each process would start one thread per core, and the threads would wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // processes)))
    # Less fragmentation on NVIDIA. ROCm ignores it with a warning, and hangs were reported on 7.2.
    if torch.version.cuda and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


class Command(NamedTuple):
    words: list[str]  # a script and its flags
    by_launcher: bool = False  # settings were among this program's arguments
    first_run: bool = False  # the bundled run: see settings.launcher_flags


def command_of(words: list[str]) -> Command:
    """What this program's arguments ask for. Warns of variables without effect."""
    if words[0] != "--settings" or "--" not in words:
        return Command(words)
    end = words.index("--")
    settings = dict(word.split("=", 1) for word in words[1:end])
    script, *given = words[end + 1 :]
    flags, first_run = launcher_flags(Path(script), settings, dict(os.environ), given)
    if not {"-h", "--help"} & {*flags}:
        for line in without_effect(Path(script), dict(os.environ)):
            print(f"warning: {line}", file=sys.stderr)
    return Command([script, *flags], by_launcher=True, first_run=first_run)


def launch(asked: Command) -> int:
    """Run a script with its flags in all ranks of this node. Returns the exit code. Raises
    UserError before that for what can't work."""
    words = asked.words
    if not Path(words[0]).is_file():
        raise UserError(f"no script {words[0]}")
    refuse_other_clone(words[0])
    flags = check_flags(words)
    if flags:
        look(flags, first_node=os.environ.get("NODE_RANK", "0") == "0")
    node = this_node()
    gc.freeze()  # it has imported torch, which need not be taken apart at the end
    set_defaults(node.processes)
    from llm_demo.launch import ranks  # imports torch

    total = node.nodes * node.processes  # each node has as many
    line = ""
    if flags:
        flags.check_processes(total)
        if asked.first_run:
            words, line = with_rows_of_two(words, flags, total)
    if asked.by_launcher:
        show(words)
    if line:
        print(line, flush=True)
    return ranks.start_ranks(node, words)


def show(words: list[str]) -> None:
    """Print what a launcher's settings have become."""
    command = [sys.executable, "-m", "llm_demo.launch", *words]
    print(f"+ {shlex.join(command)}", flush=True)


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    quit_on(*stop_signals())  # until ranks exist, which may have something to save
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup; torchrun would handle it
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)  # in this process only, not in its children
    return launch(command_of(sys.argv[1:]))


if __name__ == "__main__":
    command(main)
