"""Let the nodes find each other before any of them starts its processes.

Node 0 listens at MASTER_PORT. The others connect to MASTER_ADDR and send their number, how many
processes they start, their versions and a digest of their code. Once all have joined, node 0 tells
them to continue. If some are missing or two disagree, all end with the same line.

Strangers may connect, too. So a message is a line of JSON of at most LINE bytes, which is there
PATIENCE seconds after the connection or ignored, and its numbers are at most MOST."""

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import re
import socket
import sys
import time
from importlib import metadata
from pathlib import Path

from llm_demo.core.errors import UserError
from llm_demo.machine.files import ROOT

STARTED = time.monotonic()
NOTICE = 3  # seconds before a node prints that it is waiting
LINE, PATIENCE, MOST = 4096, 2, 100_000


def time_left(seconds: float) -> float:
    """The rest of a wait that began when this process started; at least a second."""
    return max(1.0, STARTED + seconds - time.monotonic())


def listen(addr: str, port: int) -> socket.socket:
    """A socket that listens there. addr "": on all interfaces; port 0: any free one. Raises
    UserError if the port is busy."""
    both = not addr and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server((addr, port), family=family, dualstack_ipv6=both)
    except OSError:
        raise UserError(f"port {port} is busy on this machine: give another MASTER_PORT") from None


def facts_of(script: Path) -> dict[str, str]:
    """What must be the same on all nodes: versions, and a digest of the code."""
    facts = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for package in ("torch", "transformers", "deepspeed"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "missing"
    # The folders of all scripts: one script imports from another's.
    scripts = {script.resolve().parent, *(flags.parent for flags in ROOT.glob("*/flags.py"))}
    files = [*(ROOT / "llm_demo").rglob("*.py"), *(f for s in scripts for f in s.glob("*.py"))]
    code = sorted(file.name.encode() + file.read_bytes() for file in files)
    return facts | {"code": hashlib.sha256(b"\0".join(code)).hexdigest()[:12]}


def resolve(addr: str, port: int, seconds: float) -> None:
    """Wait until MASTER_ADDR has an address. Raises UserError after `seconds`."""
    look_up = functools.partial(asyncio.to_thread, socket.getaddrinfo, addr, port)
    asyncio.run(_repeat(look_up, addr, port, seconds))


def meet(
    addr: str, port: int, seconds: float, hello: dict, listener: socket.socket | None = None
) -> int:
    """Wait until all nodes have joined. Returns the number of processes of all nodes. Raises
    UserError on every node if they don't join within `seconds`, or disagree.

    hello: this node's number ("node"), NNODES ("nodes"), "processes" and "facts". listener: node
    0's, which stays open for what comes after the meeting."""
    gathered = _gather(hello, seconds, listener) if listener else _join(addr, port, seconds, hello)
    problem, total = asyncio.run(gathered)
    if problem:
        raise UserError(problem)
    return total


async def _join(addr: str, port: int, seconds: float, hello: dict) -> tuple[str, int]:
    """Node 0's answer to a node: what is wrong or "", the number of all processes."""

    async def greet():
        reader, connection = await asyncio.open_connection(addr, port, limit=LINE)
        try:
            connection.write(_line(hello))
            return reader, connection, (await _receive(reader, wait=int))["wait"]
        except BaseException:
            connection.close()
            raise

    reader, connection, wait = await _repeat(greet, addr, port, seconds)
    try:
        answer = await asyncio.wait_for(_receive(reader, problem=str, total=int), wait + 10)
        return answer["problem"], answer["total"]
    except (OSError, asyncio.TimeoutError):
        return f"node 0 at {addr}:{port} ended while nodes were missing: see its output", 0
    finally:
        connection.close()


async def _repeat(attempt, addr: str, port: int, seconds: float):
    """Repeat attempt() until it succeeds; return its result. Raises UserError after `seconds`."""
    where, reason = f"MASTER_ADDR={addr}, MASTER_PORT={port}", "no answer"

    def notice():
        line = f"waiting for node 0 at {where}, up to {seconds:.0f} s: {reason}"
        print(line, file=sys.stderr, flush=True)

    async def repeat():
        nonlocal reason
        while True:
            try:
                return await attempt()
            except (OSError, UnicodeError) as e:
                reason = getattr(e, "strerror", None) or str(e)
                if codes := re.findall(r"\[Errno (\d+)\]", str(e)):  # for each address tried
                    reason = os.strerror(int(codes[-1]))
            await asyncio.sleep(0.2)

    timer = asyncio.get_running_loop().call_later(NOTICE, notice)
    try:
        return await asyncio.wait_for(repeat(), seconds)
    except asyncio.TimeoutError:
        raise UserError(
            f"can't reach node 0 at {where} ({reason}): check the address, that node 0 is "
            "started, and that no firewall blocks the port; JOIN_SECONDS sets how long to wait"
        ) from None
    finally:
        timer.cancel()


async def _gather(hello: dict, seconds: float, listener: socket.socket) -> tuple[str, int]:
    """Node 0's side of the meeting: as _join, once all have joined or something is wrong."""
    nodes, joined = hello["nodes"], {None: hello}  # connection -> what that node told
    problem = asyncio.get_running_loop().create_future()

    async def admit(reader, connection):
        """Let a node join, and hold its place until its connection ends."""
        kinds = {"node": int, "nodes": int, "processes": int, "facts": dict}
        try:
            told = await asyncio.wait_for(_receive(reader, **kinds), PATIENCE)
        except (OSError, asyncio.TimeoutError):  # not a node: a port scan, say
            return connection.close()
        connection.write(_line({"wait": int(seconds)}))
        await asyncio.sleep(0.5)  # nodes that have just ended, to be started again, leave first
        host = connection.get_extra_info("peername")[0]
        wrong = _disagreement(hello, told, host, [other["node"] for other in joined.values()])
        joined[connection] = told
        if (wrong or len(joined) == nodes) and not problem.done():
            problem.set_result(wrong)
        with contextlib.suppress(OSError):
            await reader.read(1)  # a joined node sends nothing more: it has ended
        del joined[connection]

    server = await asyncio.start_server(admit, sock=listener.dup(), limit=LINE)
    try:
        text = await asyncio.wait_for(problem, seconds)
    except asyncio.TimeoutError:
        there = {told["node"] for told in joined.values()}
        missing = ", ".join(str(n) for n in range(nodes) if n not in there)
        text = (
            f"{len(there)} of {nodes} nodes joined in {seconds:.0f} s, missing: {missing}; start "
            f"them with the same MASTER_ADDR and MASTER_PORT={listener.getsockname()[1]}; "
            "JOIN_SECONDS sets how long to wait"
        )
    server.close()
    total = sum(told["processes"] for told in joined.values())
    for connection in filter(None, joined):
        connection.write(_line({"problem": text, "total": total}))
        connection.close()
    return text, total


def _disagreement(hello: dict, told: dict, host: str, joined: list[int]) -> str:
    """What is wrong about a node, or "". hello: node 0's; joined: the nodes before it."""
    node = told["node"]
    if node in joined:
        return f"two nodes have NODE_RANK={node}, the second is {host}"
    ours, theirs = ({"NNODES": h["nodes"], **h["facts"]} for h in (hello, told))
    for name, value in ours.items():
        if value != theirs.get(name):
            return (
                f"{name}={value} on node 0, but {name}={theirs.get(name)} on node {node}, {host}: "
                "give all nodes the same NNODES, versions and code"
            )
    return ""


def _line(message: dict) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def _receive(reader: asyncio.StreamReader, **kinds: type) -> dict:
    """A message from the other side, with a value of each of these types. Raises OSError for
    anything else, such as a number below 0 or above MOST."""
    try:
        message = json.loads(await reader.readline())
        values = [(message[name], kind) for name, kind in kinds.items()]
        whole = all(0 <= value <= MOST for value, kind in values if kind is int)
        known = message.get("node", 0) < message.get("nodes", 1)
        if whole and known and all(type(value) is kind for value, kind in values):
            return message
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise OSError("another program answers there")
