"""Start this node's processes: python -m llm_demo.launch torchrun|deepspeed SCRIPT [its flags]

NPROC_PER_NODE   processes on this node (default: one per GPU, or 2 without a GPU; at most one per
                 GPU, or 32 per CPU core)
NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for several nodes: run the same command on each, with
                 NODE_RANK 0 on the one at MASTER_ADDR (port: 29500, or any free one for 1 node)
JOIN_SECONDS     how long nodes wait for one another at the start (default: 50)
DIST_TIMEOUT_MINUTES   how long a rank waits for the others in one operation (default: 30)
STOP_MINUTES     how long ranks may take to save after SIGTERM, SIGHUP or Ctrl-C (default: 10);
                 a second signal, at least 2 s later, ends them at once
RESTARTS         how often a run on one node is restarted after a failure, such as a killed rank
                 (default: 0). Needs --resume auto. Neither bad input nor a stopped run is restarted
LOGLEVEL=INFO    show the log of the underlying launcher (silent by default)

The exit code is that of the process that failed first, 128 + n if signal n killed it, or 75 if a
signal stopped the run and it has saved. No rank outlives this process, even if SIGKILL ends it.
"""

import base64
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

from llm_demo.core.errors import UserError
from llm_demo.job.process import (
    PARENT,
    end_with_parent,
    minutes,
    number,
    outlive_terminal,
    quit_on,
    stop_signals,
    usable_cores,
)
from llm_demo.job.text import STOPPED, counted
from llm_demo.launch import nodes
from llm_demo.launch.settings import check_flags

LOOPBACK = "127.0.0.1"
PER_CORE = 32  # processes for each CPU core: more than anyone tries, few enough to start

GRACE = 3  # seconds from SIGTERM to SIGKILL for the remaining processes after one has failed

# Exit codes of a rank after which a run is not restarted: bad input, stopped by a signal.
FINAL = {2, STOPPED, *(128 + n for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))}


@dataclass(frozen=True)
class Node:
    gpus: int
    processes: int
    nodes: int
    rank: int  # this node's number
    master_addr: str
    master_port: int
    wait: int  # seconds to wait for the other nodes
    restarts: int
    listener: socket.socket | None = None  # of one node's store

    def meet_others(self, script: str, flags, alike: bool = False) -> None:
        """Wait for the other nodes, just before the ranks start. flags: the script's, or None.
        alike: refuse other numbers of processes on other nodes."""
        if self.nodes > 1:
            seconds, facts = nodes.time_left(self.wait), nodes.facts_of(Path(script))
            if alike:
                facts[nodes.PROCESSES] = self.processes
            total = nodes.meet(
                self.rank, self.nodes, self.master_addr, self.master_port, seconds, facts,
                self.processes,
            )  # fmt: skip
            if flags:
                flags.check_processes(total)


def listen(addr: str, port: int) -> socket.socket:
    """A socket that listens there. port 0: any free one. Raises UserError if it is busy."""
    try:
        return socket.create_server((addr, port))
    except OSError:
        raise UserError(f"port {port} is busy on this machine: give another MASTER_PORT") from None


def this_node() -> Node:
    """Read the environment. Raises UserError for impossible settings, before any slow work."""
    number("STOP_MINUTES", 10)
    number("NPROC_PER_NODE", 2, at_least=1)
    minutes("DIST_TIMEOUT_MINUTES", 30)
    restarts = number("RESTARTS", 0, at_most=1000)
    wait = number("JOIN_SECONDS", 50, at_least=1, at_most=86_400)
    count = number("NNODES", 1, at_least=1)
    if count == 1:
        rank, addr, port = 0, LOOPBACK, number("MASTER_PORT", 0)
    elif not (os.environ.get("MASTER_ADDR") and os.environ.get("NODE_RANK")):
        raise UserError(f"NNODES={count} needs MASTER_ADDR (node 0's) and NODE_RANK, on every node")
    else:
        rank, addr = number("NODE_RANK", 0), os.environ["MASTER_ADDR"]
        port = number("MASTER_PORT", 29500, at_least=1)
    if restarts and count > 1:
        raise UserError(
            f"RESTARTS={restarts}: only on one node; on NNODES={count} the scheduler restarts all "
            "of them, see docs/clusters.md"
        )
    if rank >= count:
        raise UserError(f"NODE_RANK={rank}: must be below NNODES={count}")
    if port > 65535:
        raise UserError(f"port {port} does not exist: MASTER_PORT goes up to 65535")
    listener = None
    if count == 1:
        listener = listen(LOOPBACK, port)
        port = listener.getsockname()[1]
    elif rank == 0:
        listen("", port).close()
    if count > 1:
        nodes.resolve(addr, port, nodes.time_left(wait))
    from llm_demo.job import device  # imports torch, which takes seconds: after all other refusals

    kept, others, hide = device.cards()
    if hide:
        os.environ.update([hide])
        print(others, file=sys.stderr, flush=True)
    gpus = len(kept)
    processes = number("NPROC_PER_NODE", gpus or 2, at_least=1)
    if gpus and processes > gpus:
        raise UserError(f"NPROC_PER_NODE={processes}, but PyTorch sees {gpus} GPU(s) here")
    cores = len(usable_cores())
    if not gpus and processes > PER_CORE * cores:
        raise UserError(
            f"NPROC_PER_NODE={processes}: without a GPU at most {PER_CORE * cores}, that is "
            f"{PER_CORE} for each of the {counted(cores, 'core')} that this process may use"
        )
    return Node(gpus, processes, count, rank, addr, port, wait, restarts, listener)


def set_defaults(node: Node) -> None:
    """Set the environment of the training processes, except what the user has set."""
    import torch

    # Each process would start one thread per core, and the threads would wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // node.processes)))
    # Less fragmentation on NVIDIA. ROCm ignores it with a warning, and hangs were reported on 7.2.
    if torch.version.cuda and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@contextlib.contextmanager
def signals_ignored():
    """Ignore signals: one sent to a group may arrive twice (coreutils' timeout sends two), and the
    second would kill ranks that are saving."""
    handlers = {n: signal.signal(n, signal.SIG_IGN) for n in stop_signals()}
    try:
        yield
    finally:
        for n, handler in handlers.items():
            signal.signal(n, handler)


class NotRestarted(Exception):
    """The ranks failed in a way that a restart can't fix."""


class Ranks:
    """The training processes of this node.

    `start` takes the place of subprocess.Popen in the one module of torch or DeepSpeed that starts
    ranks, because neither has options for what it adds."""

    def __init__(
        self, visible: str | None = None, restarts: int = 0, listener: socket.socket | None = None
    ):
        """visible: CUDA_VISIBLE_DEVICES of the ranks; None: as the launcher sets it.
        restarts: how often torchrun starts them again. listener: of the store where they meet, if
        this process has it."""
        self.visible = visible
        self.restarts, self.restarted = restarts, 0
        self.store, self.address = None, {}
        if listener:
            self.open_store(listener)
        self.nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self.started = {}
        self.failed = {}  # rank -> exit code, of those that failed before the others were stopped
        self.stopping = False

    def open_store(self, listener: socket.socket) -> None:
        """Open the store where the ranks meet. One that torch opens, here or in rank 0, listens on
        every interface."""
        from torch.distributed import TCPStore

        port = listener.getsockname()[1]
        self.store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        self.address = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}

    def start(self, *args, env: dict, **options) -> subprocess.Popen:
        """Start a rank that ends with this process, and that the terminal's signals don't reach:
        they go to the launcher only, which asks the ranks to stop."""
        if self.stopping:
            self.restart()
        if self.nohup:  # torchrun has just installed its SIGHUP handler
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        parent = os.getpid()
        env = {**env, PARENT: str(parent), **self.address}
        if self.visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = self.visible
        if sys.platform == "linux":  # at once; elsewhere when the rank imports llm_demo
            options["preexec_fn"] = lambda: end_with_parent(parent)
        options["start_new_session"] = True
        process = self.started[int(env["RANK"])] = subprocess.Popen(*args, env=env, **options)
        return process

    def restart(self):
        """Say why torchrun is about to start all ranks again. Raises NotRestarted."""
        codes = {*self.failed.values()}
        # A rank whose peer was killed while it saved ends with an error, as after bad input.
        killed = any(code < 0 and 128 - code not in FINAL for code in codes)
        if FINAL & codes and not killed:
            raise NotRestarted
        report(self.failed)
        self.restarted += 1
        print(f"restart {self.restarted} of {self.restarts}", file=sys.stderr, flush=True)
        self.open_store(listen(LOOPBACK, 0))  # the old one holds what the killed ranks wrote
        self.started, self.failed, self.stopping = {}, {}, False

    def stop(self):
        """Send SIGTERM to all processes started here, and SIGKILL to those left after GRACE.

        If no rank has failed, a signal is the cause, and the ranks may save first."""
        import psutil

        first, self.stopping = not self.stopping, True
        if first:
            self.failed = {rank: p.returncode for rank, p in self.started.items() if p.poll()}
        try:
            if first and not self.failed:
                for process in self.started.values():
                    process.terminate()
                begun = time.monotonic()
                with signals_ignored():
                    while self.alive() and time.monotonic() < begun + 2:
                        time.sleep(0.05)
                while self.alive() and time.monotonic() < begun + 60 * number("STOP_MINUTES", 10):
                    time.sleep(0.05)
        finally:  # a second signal raises an exception above
            children = psutil.Process().children(recursive=True)
            for child in children:
                with contextlib.suppress(
                    psutil.NoSuchProcess
                ):  # a rank's child may just have ended
                    child.terminate()
            for child in psutil.wait_procs(children, timeout=GRACE)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    def alive(self) -> bool:
        return any(process.poll() is None for process in self.started.values())

    def code(self, signum: int) -> int:
        """The exit code after a signal."""
        if {process.poll() for process in self.started.values()} == {STOPPED}:
            return STOPPED
        print(f"error: stopped by {signal.Signals(signum).name}", file=sys.stderr)
        return 128 + signum


def replace(owner: ModuleType | type, **values) -> None:
    """Replace names in a library's module or class. Raises UserError if it lacks one of them,
    because the replacement would then have no effect."""
    for name, value in values.items():
        if not hasattr(owner, name):
            raise UserError(
                f"{owner.__name__} of the installed version has no {name}: install the version "
                "named in constraints.txt"
            )
        setattr(owner, name, value)


def torchrun(node: Node, command: list[str], flags) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    ranks = Ranks(restarts=node.restarts, listener=node.listener)
    if store := ranks.store:  # torchrun keeps it, and its own notes in it, over restarts
        replace(static_tcp_rendezvous, TCPStore=lambda *_args, **_options: store)
    if hasattr(subprocess_handler, "Popen"):
        replace(subprocess_handler, Popen=ranks.start)
    else:  # PyTorch 2.8
        replace(subprocess_handler, subprocess=SimpleNamespace(Popen=ranks.start))
    close = PContext.close

    def stop_and_close(context, *args, **kwargs):
        ranks.stop()  # torch waits 30 s before SIGKILL, and counts ranks it stopped as failed
        close(context, *args, **kwargs)

    replace(PContext, close=stop_and_close)
    options = {
        "nnodes": node.nodes,
        "node_rank": node.rank,
        "nproc_per_node": node.processes,
        "master_addr": node.master_addr,
        "master_port": node.master_port,
        "max_restarts": node.restarts,
    }
    args = run.parse_args([f"--{name}={value}" for name, value in options.items()] + command)
    node.meet_others(command[0], flags)
    try:
        # Not its main(), which prints a 40-line traceback below the failing rank's own line.
        run.run(args)
    except (ChildFailedError, NotRestarted):
        return report(ranks.failed)
    except SignalException as e:
        return ranks.code(e.sigval)
    except RuntimeError as e:  # the nodes did not find each other
        raise UserError(f"torchrun on node {node.rank}: {str(e).splitlines()[0]}") from e
    return 0


def deepspeed(node: Node, command: list[str], flags) -> int:
    if not node.gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Only the half of DeepSpeed's launcher that starts a node's processes. The front half drops
    # CUDA_VISIBLE_DEVICES, obeys a /job/hostfile, and dies of SIGTERM alone, leaving the processes
    # behind.
    try:
        from deepspeed.launcher import launch
    except ImportError as e:
        raise UserError(f"the pipeline needs deepspeed ({e}): pip install deepspeed==0.19.8") from e

    from llm_demo.job import device

    # DeepSpeed numbers devices even if CUDA_VISIBLE_DEVICES, empty or -1, hides them all.
    visible = None if node.gpus else os.environ.get("CUDA_VISIBLE_DEVICES")
    ranks = Ranks(visible, listener=node.listener)
    os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")  # older PyTorch reads it
    replace(
        launch,
        subprocess=SimpleNamespace(Popen=ranks.start),
        # DeepSpeed's own stops one process after another, and waits 30 s for each.
        terminate_process_tree=lambda _pid: ranks.stop(),
    )
    devices = list(range(node.processes))
    if node.gpus:
        devices = device.only(devices)[1].split(",")
    os.environ["LOCAL_WORLD_SIZE"] = str(len(devices))  # torchrun sets it, DeepSpeed does not
    world = {f"node{i}": devices for i in range(node.nodes)}  # the names are only labels
    sys.argv = [
        "deepspeed",
        f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}",
        f"--node_rank={node.rank}",
        f"--master_addr={node.master_addr}",
        f"--master_port={node.master_port}",
        "--no_local_rank",  # LOCAL_RANK is in the environment
        "--log_level=critical",
        *command,
    ]
    if stop_signals()[2:]:  # DeepSpeed doesn't handle SIGHUP
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    node.meet_others(command[0], flags, alike=True)
    received, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())  # DeepSpeed's handlers don't say which signal arrived
    try:
        launch.main()
    except SystemExit as end:
        if ranks.failed:
            return report(ranks.failed)
        received.settimeout(1)
        try:
            return ranks.code(received.recv(1)[0])
        except TimeoutError:  # no signal: the launcher itself refused something
            return end.code if isinstance(end.code, int) else 1
    return 0


def report(codes: dict[int, int]) -> int:
    """The node's exit code from its failed ranks' codes; prints a line if no rank has."""
    # A rank killed by a signal printed nothing; its peers fail a moment later because of it.
    rank, code = min(codes.items(), key=lambda item: (item[1] > 0, item[0]))
    if code < 0:
        name = signal.Signals(-code).name
        hint = ": out of memory, or killed by hand" if name == "SIGKILL" else ""
        print(f"error: rank {rank} died of {name}{hint}", file=sys.stderr)
        return 128 - code
    if code not in (1, 2, 130, STOPPED):  # the script has printed its own error
        print(f"error: rank {rank} ended with exit code {code}", file=sys.stderr)
    return code


def main() -> int:
    launchers = {"torchrun": torchrun, "deepspeed": deepspeed}
    if len(sys.argv) < 3 or sys.argv[1] not in launchers:
        print(__doc__, file=sys.stderr)
        return 2
    command = sys.argv[2:]
    outlive_terminal()
    quit_on(*stop_signals())  # until ranks exist, which may have something to save
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)  # in this process only, not in its children
    try:
        if not Path(command[0]).is_file():
            raise UserError(f"no script {command[0]}")
        flags = check_flags(command)
        if number("RESTARTS", 0) and flags and flags.resume != "auto":
            raise UserError(
                "RESTARTS needs --resume auto and --output_dir (RESUME=auto OUTPUT_DIR=...): a "
                "restarted run resumes from its newest checkpoint"
            )
        node = this_node()
        gc.freeze()  # it has imported torch, which need not be taken apart at the end
        if flags and node.nodes == 1:
            flags.check_processes(node.processes)
        set_defaults(node)
        os.environ["LLM_DEMO_LAUNCHER"] = sys.argv[1]  # for the run's cmd.sh
        # DeepSpeed's launcher can't restart ranks; its scripts start under torchrun as well.
        return launchers["torchrun" if node.restarts else sys.argv[1]](node, command, flags)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
