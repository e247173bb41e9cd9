"""Let the nodes find each other before any of them starts its processes.

Node 0 listens at MASTER_PORT. Every node, including node 0, connects to MASTER_ADDR and sends its
number, how many processes it starts, its versions and a digest of its code. Once all have joined,
node 0 tells them to continue.
If some are missing or two disagree, all end with the same line. The port is then free again, for
torch.distributed."""

import hashlib
import json
import queue
import selectors
import socket
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

from llm_demo.core.errors import UserError
from llm_demo.job.files import ROOT

STARTED = time.monotonic()
PROCESSES = "NPROC_PER_NODE"  # a fact for launchers that need it to be alike on all nodes
NOTICE = 3  # seconds before a node prints that it is waiting


def time_left(seconds: float) -> float:
    """The rest of a wait that began when this process started; at least a second."""
    return max(1.0, STARTED + seconds - time.monotonic())


def resolve(addr: str, port: int, seconds: float) -> None:
    """Wait until MASTER_ADDR has an address. Raises UserError after `seconds`."""
    _wait_for(lambda: socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM), addr, port, seconds)


def facts_of(script: Path) -> dict[str, str]:
    """What must be the same on all nodes: versions, and a digest of the code."""
    found = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for package in ("torch", "transformers", "deepspeed"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    # The folders of all scripts: one script imports from another's.
    scripts = {flags.parent for flags in ROOT.glob("*/flags.py")} | {script.resolve().parent}
    files = sorted((ROOT / "llm_demo").rglob("*.py"))
    files += [file for folder in sorted(scripts) for file in sorted(folder.glob("*.py"))]
    code = hashlib.sha256()
    for file in files:
        code.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return found | {"code": code.hexdigest()[:12]}


def meet(
    rank: int,
    nodes: int,
    addr: str,
    port: int,
    seconds: float,
    facts: dict | None = None,
    processes: int = 1,
) -> int:
    """Wait until all nodes have joined. Returns the number of processes of all nodes. Raises
    UserError on every node if they don't join within `seconds`, or disagree. facts: what must be
    the same, from `facts_of`; processes: the number on this node."""
    facts = facts or {}

    def join():
        connection = socket.create_connection((addr, port), 5)
        try:
            _send(connection, node=rank, nodes=nodes, facts=facts, processes=processes)
            connection.settimeout(_receive(connection)["wait"] + 10)
        except (OSError, ValueError, KeyError):
            connection.close()
            raise OSError("another program answers there") from None
        return connection

    node0, total = Node0(nodes, port, seconds, facts) if rank == 0 else None, 0
    with _wait_for(join, addr, port, seconds) as connection:
        try:
            answer = _receive(connection)
            problem, total = answer["problem"], answer.get("processes", 0)  # older code: without
        except (OSError, ValueError, KeyError):
            problem = f"node 0 at {addr}:{port} ended while nodes were missing: see its output"
    if node0:
        node0.thread.join()  # then the port is free
    if problem:
        raise UserError(problem)
    return total


def _wait_for(attempt, addr: str, port: int, seconds: float):
    """Repeat attempt() until it succeeds, and return its result. It runs in a thread that can be
    abandoned: a name server may take longer than `seconds`, and signals must still work."""
    results, ended, reason = queue.Queue(), threading.Event(), ["no answer"]
    where = f"MASTER_ADDR={addr}, MASTER_PORT={port}"

    def repeat():
        while not ended.is_set():
            try:
                return results.put(attempt())
            except (OSError, UnicodeError) as e:
                reason[0] = getattr(e, "strerror", None) or str(e)
            ended.wait(0.2)

    threading.Thread(target=repeat, daemon=True).start()
    try:
        if seconds > NOTICE:
            try:
                return results.get(timeout=NOTICE)
            except queue.Empty:
                line = f"waiting for node 0 at {where}, up to {seconds:.0f} s: {reason[0]}"
                print(line, file=sys.stderr, flush=True)
                seconds -= NOTICE
        return results.get(timeout=seconds)
    except queue.Empty:
        raise UserError(
            f"can't reach node 0 at {where} ({reason[0]}): check the address, that node 0 is "
            "started, and that no firewall blocks the port; JOIN_SECONDS sets how long to wait"
        ) from None
    finally:
        ended.set()


class Node0:
    """Node 0's side of meet(): a thread that ends once all nodes have an answer."""

    def __init__(self, nodes: int, port: int, seconds: float, facts: dict):
        self.nodes, self.port, self.seconds, self.facts = nodes, port, seconds, facts
        self.joined, self.processes = {}, {}  # node -> its connection, its number of processes
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            self.listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        except OSError as e:
            raise UserError(f"node 0 can't listen at MASTER_PORT={port}: {e.strerror}") from None
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        problem = self.gather()
        for connection in self.joined.values():
            with connection:
                try:
                    _send(connection, problem=problem, processes=sum(self.processes.values()))
                    connection.settimeout(2)
                    connection.recv(1)  # clients close first, so that the port is free at once
                except OSError:
                    pass

    def gather(self) -> str | None:
        """Wait for all nodes. Returns None, or the problem."""
        until, problem = time.monotonic() + self.seconds, None
        with self.listener, selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            while len(self.joined) < self.nodes and not problem:
                left = until - time.monotonic()
                if left <= 0:
                    missing = ", ".join(str(n) for n in range(self.nodes) if n not in self.joined)
                    return (
                        f"{len(self.joined)} of {self.nodes} nodes joined in {self.seconds:.0f} s, "
                        f"missing: {missing}; start them with the same MASTER_ADDR and "
                        f"MASTER_PORT={self.port}; JOIN_SECONDS sets how long to wait"
                    )
                ready = [key for key, _ in selector.select(left)]
                for key in ready:
                    if key.data:  # a joined node sends nothing more: it has ended
                        selector.unregister(key.fileobj)
                        self.joined.pop(key.data[0]).close()
                if any(key.fileobj is self.listener for key in ready):
                    problem = self.admit(selector)
        return problem

    def admit(self, selector) -> str | None:
        """Let a node join. Returns None, or the problem."""
        connection, (host, *_) = self.listener.accept()
        connection.settimeout(2)
        try:
            message = _receive(connection)
            node, nodes = int(message["node"]), int(message["nodes"])
            facts, processes = dict(message["facts"]), int(message.get("processes", 0))
            _send(connection, wait=self.seconds)
        except (OSError, ValueError, KeyError, TypeError):  # not a node: a port scan, say
            connection.close()
            return None
        if node in self.joined:
            self.joined[f"{node}, {host}"] = connection
            return f"two nodes have NODE_RANK={node}, the second is {host}"
        self.joined[node], self.processes[node] = connection, processes
        selector.register(connection, selectors.EVENT_READ, (node,))
        if nodes != self.nodes:
            return f"NNODES={self.nodes} on node 0, but NNODES={nodes} on node {node}, {host}"
        for name, ours in self.facts.items():
            if facts.get(name) != ours:
                fix = "number of processes" if name == PROCESSES else "versions and the same code"
                return (
                    f"{name} {ours} on node 0, but {name} {facts.get(name)} on node {node}, "
                    f"{host}: give all nodes the same {fix}"
                )
        return None


def _send(connection: socket.socket, **message) -> None:
    connection.sendall(json.dumps({"from": "llm_demo", **message}).encode() + b"\n")


def _receive(connection: socket.socket) -> dict:
    """A message from the other side. Raises OSError, or ValueError if it is not one of ours."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)  # don't read beyond this message
        if not byte or len(line) > 4096:
            raise ValueError("not a message")
        line += byte
    message = json.loads(line)
    if not isinstance(message, dict) or message.get("from") != "llm_demo":
        raise ValueError("not a message")
    return message
