"""Run this node's ranks by torchrun: where they meet, how they stop, which exit code counts.

Where ranks meet is registered with torchrun, whose own ways listen on every interface.

One method of torchrun's is replaced: PContext.close, which stops ranks.
- Why: torchrun waits 30 s (--shutdown-timeout since PyTorch 2.13) after a failure, when ranks hang
  in a collective, as after a signal, when they save. It also signals what a rank has started.
- Without it: 27 s more after a failure, and checkpoints that take over 30 s are lost on a signal.
- Until: torchrun has a time for each.
- If torchrun no longer calls it: its own times hold, and its record of failures tells the code."""

import os
import signal
import sys
import time

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
from llm_demo.launch.nodes import listen
from llm_demo.machine.process import PARENT, number, stop_signals
from llm_demo.machine.text import STOPPED

GRACE = 3  # seconds from SIGTERM to SIGKILL for the remaining ranks after one has failed

# Exit codes of a rank after which a run is not restarted: bad input, stopped by a signal.
FINAL = {2, STOPPED, *(128 + n for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))}

BACKEND = "llm_demo"  # the name of where ranks meet

close = PContext.close


class NotRestarted(Exception):
    """The ranks failed in a way that a restart can't fix."""


class Ranks(StaticTCPRendezvous):
    """The ranks of a node, and where they meet those of other nodes."""

    def __init__(self, node):
        """node: a Node of llm_demo.launch.__main__."""
        super().__init__(node.addr, node.port, node.rank, node.nodes, "llm_demo", timeout=300)
        self.listener, self.restarts, self.attempt = node.listener, node.restarts, -1
        self.failed = {}  # rank -> exit code, of those that failed before the others were stopped
        self.processes = {}  # rank -> its process, once this attempt's ranks are being stopped

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store where the ranks of the next attempt meet: on loopback for one node.
        Raises NotRestarted."""
        self.attempt += 1
        if self.attempt:
            self.announce()
            # not the old store, which holds what killed ranks wrote
            self.listener = listen(self.master_addr, 0)
            self.master_port = self.listener.getsockname()[1]
            self.failed, self.processes = {}, {}
        server = {"master_listen_fd": self.listener.detach()} if self.rank == 0 else {}
        store = TCPStore(
            self.master_addr, self.master_port, is_master=self.rank == 0, wait_for_workers=False,
            **server,
        )  # fmt: skip
        place = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore("agent", store), self.rank, self.world_size, place)

    def announce(self) -> None:
        """Say why torchrun starts all ranks again. Raises NotRestarted."""
        codes = {*self.failed.values()}
        # A rank whose peer was killed while it saved ends with an error, as after bad input.
        killed = any(code < 0 and 128 - code not in FINAL for code in codes)
        if FINAL & codes and not killed:
            raise NotRestarted
        if self.failed:
            report(self.failed)
        print(f"restart {self.attempt} of {self.restarts}", file=sys.stderr, flush=True)

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


def start(node, command: list[str]) -> int:
    """Run a script and its flags in all ranks of this node. Returns the exit code. Raises UserError
    if the ranks can't start."""
    ranks = Ranks(node)
    rendezvous_handler_registry.register(BACKEND, lambda _: ranks)
    PContext.close = lambda *args, **options: ranks.close(*args, **options)
    os.environ[PARENT] = str(os.getpid())  # each rank asks the kernel to end it with this process
    options = {
        "nnodes": node.nodes, "nproc_per_node": node.processes, "max_restarts": node.restarts,
        "rdzv_backend": BACKEND,
    }  # fmt: skip
    args = run.parse_args([f"--{name}={value}" for name, value in options.items()] + command)
    try:
        # Not its main(), which prints a 40-line traceback below the failing rank's own line.
        run.run(args)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        return report(ranks.failed or {rank: failure.exitcode})
    except NotRestarted:
        return report(ranks.failed)
    except SignalException as e:
        if {process.poll() for process in ranks.processes.values()} == {STOPPED}:
            return STOPPED
        print(f"error: stopped by {signal.Signals(e.sigval).name}", file=sys.stderr)
        return 128 + e.sigval
    except RuntimeError as e:  # the nodes did not find each other
        raise UserError(f"torchrun on node {node.rank}: {str(e).splitlines()[0]}") from e
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
