"""Run this node's ranks by torchrun: where they meet, how they stop, which exit code counts.

The rendezvous of the ranks is registered with torchrun, because torchrun's own ones listen on every
interface.

One method of torchrun's is replaced: PContext.close, which stops ranks.
- Why: torchrun waits 30 s (--shutdown-timeout since PyTorch 2.13) both after a failure, when ranks
  hang in a collective, and after a signal, when they save. It also signals a rank's children.
- Without it: 27 s more after a failure, and checkpoints that take over 30 s are lost on a signal.
- Until: torchrun has a time for each.
- If torchrun no longer calls it: its own times hold, and its record of failures tells the code."""

import os
import re
import signal
import sys
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore, run
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from llm_demo.core.errors import UserError
from llm_demo.machine.process import PARENT, number, stop_signals
from llm_demo.machine.text import STOPPED, first_line

GRACE = 3  # seconds from SIGTERM to SIGKILL for the remaining ranks after one has failed
BACKEND = "llm_demo"  # the name of where ranks meet
LATER = timedelta(minutes=5)  # for torchrun's own exchanges, once all nodes are there

close = PContext.close


class Ranks(StaticTCPRendezvous):
    """The ranks of a node, and where they meet those of other nodes."""

    def __init__(self, node):
        """node: a Node of llm_demo.launch.__main__."""
        super().__init__(node.addr, node.port, node.rank, node.nodes, "llm_demo", node.wait)
        self.listener = node.listener
        self.failed = {}  # rank -> exit code, of those that failed before the others were stopped
        self.processes = {}  # rank -> its process, once the ranks are being stopped

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store where the ranks meet: on loopback for one node. Raises UserError if the
        nodes don't find each other in time."""
        place = f"MASTER_ADDR={self.master_addr}, MASTER_PORT={self.master_port}"
        seconds = f"{self.timeout.total_seconds():.0f} s"
        if self.world_size > 1:
            line = f"waiting for {self.world_size} nodes at {place}, up to {seconds}"
            print(line, file=sys.stderr, flush=True)
        try:
            store = self.open_store()
            if self.world_size > 1:
                self.refuse_unequal_nodes(store, place)
        except RuntimeError as e:  # of the store
            more = "JOIN_SECONDS sets how long to wait"
            joined = re.search(r"(\d+)/\d+ clients joined", str(e))
            if joined:
                raise UserError(
                    f"{joined[1]} of {self.world_size} nodes joined in {seconds} at {place}: start "
                    f"the others with the same values and each with its own NODE_RANK; {more}"
                ) from e
            raise UserError(
                f"node {self.rank} lost or never reached node 0 at {place} in {seconds}: check the "
                f"address, node 0's output, and that no firewall blocks the port; {more}"
            ) from e
        store.set_timeout(LATER)
        info = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore("agent", store), self.rank, self.world_size, info)

    def open_store(self) -> TCPStore:
        """Node 0 returns once all nodes have connected, each other node once it has connected."""
        options = {}
        if self.rank == 0:
            options["master_listen_fd"] = self.listener.detach()
        return TCPStore(
            self.master_addr,
            self.master_port,
            world_size=self.world_size,
            is_master=self.rank == 0,
            timeout=self.timeout,
            **options,
        )

    def refuse_unequal_nodes(self, store: TCPStore, place: str) -> None:
        """Wait until all nodes are there. Raises UserError unless each has a number of its own and
        the same NNODES."""
        nodes = [f"NODE_RANK={i} and NNODES={self.world_size}" for i in range(self.world_size)]
        store.add(nodes[self.rank], 1)
        store.add("arrived", 1)
        deadline = time.monotonic() + self.timeout.total_seconds()
        while store.add("arrived", 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.1)
        for node in nodes:
            count = store.add(node, 0)
            if count != 1:
                time.sleep(1)  # the store is node 0's: let the others look, too
                raise UserError(f"{count} nodes at {place} have {node}, one must have them")

    def close(self, context: PContext, *_args, **_options) -> None:
        """In place of PContext.close: stop the ranks. If none has failed, a signal is the cause,
        and they may save first."""
        if not self.processes:
            handlers = context.subprocess_handlers.items()
            self.processes = {int(context.envs[i]["RANK"]): handler.proc for i, handler in handlers}
            self.failed = {rank: p.returncode for rank, p in self.processes.items() if p.poll()}
            if not self.failed:
                self.let_save()
        close(context, signal.SIGTERM, GRACE)

    def let_save(self) -> None:
        """Ask the ranks to stop and wait for them, up to STOP_MINUTES. A second signal raises
        SignalException."""
        begun = time.monotonic()

        def again(signum, _frame):
            if time.monotonic() > begun + 2:  # one to a group may arrive twice: `timeout` sends two
                raise SignalException("stopped", signal.Signals(signum))

        if self.alive():
            for n in stop_signals():
                signal.signal(n, again)
        for process in self.alive():
            process.terminate()
        while self.alive() and time.monotonic() < begun + 60 * number("STOP_MINUTES", 10):
            time.sleep(0.05)

    def alive(self) -> list:
        return [process for process in self.processes.values() if process.poll() is None]


def start_ranks(node, command: list[str]) -> int:
    """Run a script and its flags in all ranks of this node. Returns the exit code. Raises UserError
    if the ranks can't start."""
    ranks = Ranks(node)
    rendezvous_handler_registry.register(BACKEND, lambda _: ranks)
    PContext.close = lambda *args, **options: ranks.close(*args, **options)
    os.environ[PARENT] = str(os.getpid())  # each rank asks the kernel to end it with this process
    options = {
        "nnodes": node.nodes,
        "nproc_per_node": node.processes,
        "max_restarts": 0,
        "rdzv_backend": BACKEND,
    }
    args = run.parse_args([f"--{name}={value}" for name, value in options.items()] + command)
    try:
        # Not its main(), which prints a 40-line traceback below the failing rank's own line.
        run.run(args)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        return exit_code_of(ranks.failed or {rank: failure.exitcode})
    except SignalException as e:
        if {process.poll() for process in ranks.processes.values()} == {STOPPED}:
            return STOPPED
        print(f"error: stopped by {signal.Signals(e.sigval).name}", file=sys.stderr)
        return 128 + e.sigval
    except RuntimeError as e:  # another node has ended
        raise UserError(f"torchrun on node {node.rank}: {first_line(e)}") from e
    return 0


def exit_code_of(codes: dict[int, int]) -> int:
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
