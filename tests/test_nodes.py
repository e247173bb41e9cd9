"""Several nodes find each other, or all of them end with one clear line."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, free_port

from llm_demo.core.errors import UserError
from llm_demo.launch import nodes


@pytest.fixture
def port():
    return free_port()


def hello(rank, count, **more):
    return {"node": rank, "nodes": count, "facts": {}, "processes": 1, **more}


def meet_all(port, *who, seconds=20.0, facts=(), processes=()):
    """What each node's meet() raised, or returned, with node 0 last to start. facts, processes: of
    each node."""
    outcomes = [None] * len(who)

    def meet(i, rank, count):
        told = {"facts": facts[i] if facts else {}, "processes": processes[i] if processes else 1}
        try:
            with nodes.listen("", port) if rank == 0 else contextlib.nullcontext() as listener:
                own = hello(rank, count, **told)
                outcomes[i] = nodes.meet("localhost", port, seconds, own, listener)
        except UserError as e:
            outcomes[i] = str(e)

    threads = [threading.Thread(target=meet, args=(i, *w)) for i, w in enumerate(who)]
    for thread in reversed(threads):
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcomes


def test_nodes_meet(port):
    for _ in range(2):  # twice: the same port again at once
        assert meet_all(port, (0, 3), (1, 3), (2, 3), processes=(1, 4, 2)) == [7] * 3


def talk(port, pieces, every):
    """Say so much in pieces to who listens there, until it hangs up. Returns how many it took."""
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection(("localhost", port))
            break
        time.sleep(0.02)
    sent = 0
    with connection, contextlib.suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)
            sent += 1
            time.sleep(every)
    return sent


def wrong(**said):
    return json.dumps(hello(1, 2) | said).encode() + b"\n"


STRANGERS = [
    *(b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b"\xff\xfe\n", b"", b"[" * 4000 + b"\n"),
    *(b'{"node": ' + b"1" * 4000 + b"}\n", wrong(node=57), wrong(node=-1), wrong(node=1.0)),
    *(wrong(node=True), wrong(processes="1"), wrong(processes=10**9), wrong(facts=[1])),
    wrong(processes=float("inf")),
]


def test_strangers_are_ignored(port, record_property):
    record_property("bad inputs", len(STRANGERS))
    for words in STRANGERS:
        threading.Thread(target=talk, args=(port, [words], 0.5)).start()
    (said,) = meet_all(port, (0, 2), seconds=3.0)
    assert said.startswith("1 of 2 nodes joined in 3 s, missing: 1")  # nobody was taken for node 1


@pytest.mark.parametrize("how", ["a byte a second", "a gigabyte"])
def test_a_slow_or_endless_client_stretches_nothing(how, port):
    """Nor does it keep other nodes from meeting, nor fill the memory."""
    slow = how == "a byte a second"
    pieces = [b"{"] * 8 if slow else [bytes(1 << 20)] * 1000
    took, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    client = threading.Thread(target=lambda: took.append(talk(port, pieces, slow)))
    client.start()
    begun = time.monotonic()
    (said,) = meet_all(port, (0, 2), seconds=4.0)
    assert time.monotonic() - begun < 6 and said.startswith("1 of 2 nodes joined in 4 s")
    client.join(10)
    assert took and took[0] <= (4 if slow else 20)  # it was hung up on
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    client = threading.Thread(target=talk, args=(port, pieces, slow))
    client.start()
    assert meet_all(port, (0, 2), (1, 2)) == [2] * 2
    client.join(40)


def test_a_missing_node_is_named_on_all_that_are_there(port):
    found = meet_all(port, (0, 3), (1, 3), seconds=1.0)
    assert found[0] == found[1] and found[0].startswith("2 of 3 nodes joined in 1 s, missing: 2;")
    assert f"MASTER_PORT={port}" in found[0]


def test_a_node_that_left_is_missing(port):
    gone = threading.Thread(target=join_and_leave, args=(port,))
    gone.start()
    (found,) = meet_all(port, (0, 3), seconds=2.0)
    gone.join()
    assert found.startswith("1 of 3 nodes joined") and "missing: 1, 2;" in found


def join_and_leave(port):
    for _ in range(50):
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)) as s:
            s.sendall(json.dumps(hello(1, 3)).encode() + b"\n")
            return time.sleep(0.5)
        time.sleep(0.05)


@pytest.mark.parametrize(
    "who, words",
    [
        ([(0, 2), (1, 3)], "NNODES=2 on node 0, but NNODES=3 on node 1"),
        ([(0, 3), (1, 3), (1, 3)], "two nodes have NODE_RANK=1"),
    ],
)
def test_nodes_that_disagree_are_told_at_once(port, who, words, record_property):
    record_property("bad inputs", 1)
    started = time.monotonic()
    found = meet_all(port, *who)
    assert time.monotonic() - started < 10
    assert len(set(found)) == 1 and words in found[0]


def test_other_versions_or_other_code_are_named_on_all_nodes(port, tmp_path, record_property):
    record_property("bad inputs", 3)
    (tmp_path / "train.py").write_text("a = 1")
    ours = nodes.facts_of(tmp_path / "train.py")
    assert ours.keys() == {"Python", "torch", "transformers", "deepspeed", "code"}
    assert ours == nodes.facts_of(tmp_path / "train.py") and ours["torch"].startswith("2.")
    assert meet_all(port, (0, 2), (1, 2), facts=[ours, dict(ours)]) == [2] * 2
    (tmp_path / "train.py").write_text("a = 2")
    for name, other in {
        **{"Python": "3.9", "torch": "2.0.1"}, "code": nodes.facts_of(tmp_path / "train.py")["code"]
    }.items():  # fmt: skip
        started = time.monotonic()
        found = meet_all(port, (0, 2), (1, 2), facts=[ours, ours | {name: other}])
        words = f"{name}={ours[name]} on node 0, but {name}={other} on node 1"
        assert len(set(found)) == 1 and found[0].startswith(words) and "\n" not in found[0]
        assert time.monotonic() - started < 10


def test_the_digest_is_of_all_scripts(tmp_path, monkeypatch):
    """fsdp_pp imports from fsdp."""
    monkeypatch.setattr(nodes, "ROOT", tmp_path)
    for name in ("llm_demo/run/log.py", "fsdp/flags.py", "fsdp/fsdp2.py", "fsdp_pp/flags.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1")
    digest = lambda: nodes.facts_of(tmp_path / "fsdp_pp/train.py")["code"]  # noqa: E731
    seen = {digest()}
    for name in ("llm_demo/run/log.py", "fsdp/fsdp2.py", "fsdp_pp/flags.py"):
        (tmp_path / name).write_text("a = 2")
        seen.add(digest())
    assert len(seen) == 4


def test_a_name_without_an_address_and_a_port_without_a_listener(port, capsys, record_property):
    record_property("bad inputs", 3)
    with pytest.raises(UserError, match="can't reach node 0 at MASTER_ADDR=none.invalid"):
        nodes.resolve("none.invalid", port, 0.5)
    with pytest.raises(UserError, match=r"can't reach .*MASTER_ADDR=localhost.*refused"):
        nodes.meet("localhost", port, 0.5, hello(1, 2))
    with socket.create_server(("", port)) as other:  # accepts, and is not ours
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        with pytest.raises(UserError, match="another program answers there"):
            nodes.meet("localhost", port, 0.5, hello(1, 2))
    assert capsys.readouterr().err == ""


def test_waiting_is_said_with_its_reason(port, monkeypatch, capsys):
    monkeypatch.setattr(nodes, "NOTICE", 0.2)
    with pytest.raises(UserError):
        nodes.meet("localhost", port, 0.5, hello(1, 2))
    said = capsys.readouterr().err
    place = f"MASTER_ADDR=localhost, MASTER_PORT={port}"
    assert said.startswith(f"waiting for node 0 at {place}, up to")
    assert "refused" in said and said.count("\n") == 1


@pytest.mark.parametrize("addr", ["none.invalid", "127.0.0.1"])
def test_a_master_that_cant_be_reached_is_one_line(addr, port, tmp_path, record_property):
    """An address is looked up before torch is imported; then the launcher waits for node 0."""
    record_property("bad inputs", 1)
    (tmp_path / "script.py").touch()
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    if addr == "none.invalid":
        (tmp_path / "torch.py").write_text("raise SystemExit('too late: torch is imported')")
        path = f"{tmp_path}:{path}"
    env = {**os.environ, "PYTHONPATH": path, "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": addr}
    env |= {"MASTER_PORT": str(port), "JOIN_SECONDS": "1", "NPROC_PER_NODE": "1"}
    command = [sys.executable, "-m", "llm_demo.launch", str(tmp_path / "script.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    expected = f"error: can't reach node 0 at MASTER_ADDR={addr}, MASTER_PORT={port} ("
    assert done.stderr.startswith(expected) and done.stderr.count("\n") == 1
