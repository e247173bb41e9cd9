"""Several nodes find each other, or all of them end with one clear line."""

import re
import subprocess
import time
from importlib import metadata

import pytest
from conftest import ROOT, environment, free_port, python, slow, smaller_model

from llm_demo.machine import dist

# What a rank runs: it meets the others and compares its node with theirs.
MEETS = """
import os
from importlib import metadata
from llm_demo.machine import dist
dist.drawn_on = lambda: os.environ.get("KIND", "CPU")
if "OTHER" in os.environ:
    name, version = os.environ["OTHER"].split("=")
    real = metadata.version
    metadata.version = lambda package: version if package == name else real(package)
dist.run(lambda: print(f"met {dist.start().size}\\n", end=""), lambda: None, lambda: "")
"""


def nodes(tmp_path, *settings, seconds=60, each=1, commands=None):
    """(exit code, output) of each node, and the port: a launcher of MEETS, or of its command, with
    NODE_RANK, NNODES and more settings."""
    (tmp_path / "meets.py").write_text(MEETS)
    port, started = str(free_port()), []
    for i, (rank, count, *more) in enumerate(settings):
        place = {"NODE_RANK": str(rank), "NNODES": str(count), "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": port, "JOIN_SECONDS": str(seconds), "NPROC_PER_NODE": str(each)}
        words = commands[i] if commands else [str(tmp_path / "meets.py")]
        node = subprocess.Popen(
            [python(), "-m", "llm_demo.launch", *words], env=environment(**place | dict(more)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        started.append(node)
    outputs = [node.communicate(timeout=100)[0] for node in started]
    return [(node.returncode, text) for node, text in zip(started, outputs, strict=True)], port


def errors_of(text):
    assert "Traceback" not in text, text
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_nodes_meet(tmp_path):
    found, port = nodes(tmp_path, (0, 2), (1, 2), each=2)
    for code, text in found:
        assert code == 0 and text.count("met 4") == 2, text
        place = f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}"
        assert f"waiting for 2 nodes at {place}, up to 60 s\n" in text


def test_a_missing_node_is_counted_and_the_address_named(tmp_path, record_property):
    record_property("bad inputs", 3)
    ((code, text),), port = nodes(tmp_path, (0, 2), seconds=2)
    (error,) = errors_of(text)
    place = f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}"
    assert code == 2 and error.startswith(f"error: 1 of 2 nodes joined in 2 s at {place}: start")
    for address in ("127.0.0.1", "none.invalid"):
        ((code, text),), _ = nodes(tmp_path, (1, 2, ("MASTER_ADDR", address)), seconds=2)
        (error,) = errors_of(text)
        assert code == 2
        assert f"node 1 lost or never reached node 0 at MASTER_ADDR={address}" in error


@pytest.mark.parametrize(
    "who, words",
    [
        ([(0, 2), (1, 3)], "0 nodes at .* have NODE_RANK=1 and NNODES=2"),
        ([(0, 3), (1, 3), (1, 3)], "2 nodes at .* have NODE_RANK=1 and NNODES=3"),
    ],
)
def test_nodes_with_other_numbers_end(who, words, tmp_path, record_property):
    record_property("bad inputs", 1)
    begun = time.monotonic()
    found, _ = nodes(tmp_path, *who)
    assert time.monotonic() - begun < 60
    assert [code for code, _ in found] == [2] * len(who), found
    assert all(len(errors_of(text)) == 1 for _, text in found)
    assert any(re.search(words, text) for _, text in found)


@pytest.mark.parametrize(
    "other, name, here, there",
    [
        (("OTHER", "transformers=4.1"), "transformers", metadata.version("transformers"), "4.1"),
        (("KIND", "H200"), "the GPU", "CPU", "H200"),
    ],
)
def test_other_versions_and_gpus_end_all_nodes(other, name, here, there, tmp_path, record_property):
    record_property("bad inputs", 1)
    found, _ = nodes(tmp_path, (0, 2), (1, 2, other))
    for code, text in found:
        assert code == 2, text
        assert f"error: {name} is {here} on rank 0, but {there} on rank 1: start all" in text


def test_the_digest_is_of_all_code(tmp_path, monkeypatch):
    """fsdp_pp imports from fsdp."""
    monkeypatch.setattr(dist, "ROOT", tmp_path)
    for name in ("llm_demo/run/log.py", "fsdp/flags.py", "fsdp/fsdp2.py", "fsdp_pp/flags.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1")
    seen = {dist.versions()["the code's digest"]}
    for name in ("llm_demo/run/log.py", "fsdp/fsdp2.py", "fsdp_pp/flags.py"):
        (tmp_path / name).write_text("a = 2")
        seen.add(dist.versions()["the code's digest"])
    assert len(seen) == 4


ELSEWHERE = """
import os, runpy, sys
from pathlib import Path
exists = Path.exists
if os.environ["RANK"] == "1":  # files of another node
    Path.exists = lambda path: ".seen-" not in path.name and exists(path)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_nodes_without_a_shared_folder_are_told_before_step_1(tmp_path):
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    path = [str(tmp_path / "elsewhere.py"), str(ROOT / "pp/pp_train.py")]
    flags = ["--max_steps", "2", "--seq_len", "64", "--output_dir", str(tmp_path / "run")]
    flags += ["--model_name_or_path", str(smaller_model(tmp_path / "tiny"))]
    ((code, text), (other, _)), _ = nodes(tmp_path, (0, 2), (1, 2), commands=[[*path, *flags]] * 2)
    assert code == other == 2
    assert f"error: rank 1 can't see {tmp_path}: set an --output_dir that" in text
    assert "step 1/2" not in text and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "difference, words",
    [
        ("--lr 1e-4", "--lr is 0.001 on rank 0, but 0.0001 on rank 1: "),
        ("--train_json other.jsonl", "content of data file 1 is "),
        slow("--eval_json none", "held-out data is given on rank 0, but none on rank 1: "),
        slow("--eval_json other.jsonl", "held-out content of data file 1 is "),
    ],
)  # fmt: skip
def test_nodes_with_other_flags_or_other_data_all_end(difference, words, tmp_path, record_property):
    record_property("bad inputs", 1)
    row = '{"prompt": "Why?", "completion": "So."}\n'
    for name, times in (("data.jsonl", 9), ("held.jsonl", 3), ("other.jsonl", 4)):
        (tmp_path / name).write_text(row * times)
    data = f"--train_json {tmp_path}/data.jsonl --eval_json {tmp_path}/held.jsonl"
    flags = f"--seq_len 32 --max_steps 2 --lr 1e-3 --output_dir {tmp_path}/run {data}"
    command = [str(ROOT / "fsdp/train_fsdp.py"), *flags.split()]
    other = difference.replace("other", f"{tmp_path}/other").split()
    commands = [command, [*command, *other]]
    ((code, text), (other, _)), _ = nodes(tmp_path, (0, 2), (1, 2), commands=commands)
    assert code == other == 2, text
    assert f"error: {words}" in text and "step 1/2" not in text
    assert not (tmp_path / "run").exists()
