"""Several nodes on one machine: each has its own launcher, and where the system allows it a network
namespace with an address of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import (
    ROOT,
    assert_same_tensors,
    environment,
    free_port,
    python,
    slow,
    smaller_model,
)
from test_resume import steps_of

STEPS = 8
FLAGS = {
    "fsdp": "--reshard_after_forward", "ddp": "--psgd_rank {rank}", "pp": "--stages {nodes}",
    "zero": "", "fsdp_pp": "--stages {nodes}",
}  # fmt: skip
SCRIPTS = {"ddp": "fsdp"}


def command_of(name, folder, nodes, *more):
    flags_of = FLAGS[name].format(nodes=nodes, rank=4 if nodes > 2 else 0)
    flags = f"--model_name_or_path {folder / 'model'} --train_json {folder / 'data.jsonl'} "
    flags += f"--seq_len 32 --max_steps {STEPS} --warmup_steps 2 --save_every 2 --keep_last 0 "
    flags += "--micro_batch_size 1 --grad_accum_steps 2 --log_every 1 --sample_tokens 0 "
    flags += f"--eval_json none --resume auto {flags_of}"
    launcher = ROOT / SCRIPTS.get(name, name) / f"launch_{name}.sh"
    return ["bash", str(launcher), *flags.split(), *map(str, more)]


def start(command, prefix=(), **env):
    """One node: its launcher, in a session of its own."""
    return subprocess.Popen(
        [*prefix, *command], env=environment(**env), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@contextlib.contextmanager
def on_loopback(count):
    """(prefix of the command, environment) of each node: other addresses of the loopback."""
    yield [((), {"PYTHON": python(), "MASTER_ADDR": "127.0.0.2"})] * count


@contextlib.contextmanager
def in_namespaces(count):
    """(prefix of the command, environment) of each node: a namespace, linked by a bridge."""
    if not shutil.which("ip"):
        pytest.skip("no iproute2 here")
    names = [f"node{i}-{os.getpid()}" for i in range(count)]
    bridge = f"br{os.getpid()}"

    def ip(words, check=True):
        done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
        if check and done.returncode:
            pytest.skip(f"no network namespaces here: {done.stderr.strip()}")

    try:
        ip(f"link add {bridge} type bridge")
        ip(f"link set {bridge} up")
        for i, name in enumerate(names):
            ip(f"netns add {name}")
            ip(f"link add v{i}-{os.getpid()} type veth peer name net0 netns {name}")
            ip(f"link set v{i}-{os.getpid()} master {bridge} up")
            ip(f"-n {name} addr add 10.97.0.{i + 1}/24 dev net0")
            ip(f"-n {name} link set net0 up")
            ip(f"-n {name} link set lo up")
        env = {"PYTHON": sys.executable, "MASTER_ADDR": "10.97.0.1", "GLOO_SOCKET_IFNAME": "net0"}
        yield [(("ip", "netns", "exec", name), env) for name in names]
    finally:
        for name in names:
            ip(f"netns del {name}", check=False)
        ip(f"link del {bridge}", check=False)


def wait_for_step(step, folder, nodes):
    """Until that step is logged, and a checkpoint, written in the background, is there."""
    until = time.monotonic() + 120
    metrics = folder / "metrics.jsonl"

    def there():
        logged = metrics.exists() and f'"step": {step},' in metrics.read_text()
        return logged and [*folder.glob("checkpoints/step_*")]

    while not there():
        ended = [node.communicate()[0][-3000:] for node in nodes if node.poll() is not None]
        assert not ended and time.monotonic() < until, ended
        time.sleep(0.05)


SLOW = [
    *((name, 2, on_loopback) for name in ("pp", "zero", "ddp", "fsdp_pp")),
    *((name, count, in_namespaces) for name in ("fsdp", "pp") for count in (2, 3)),
    ("zero", 3, in_namespaces),
    *((name, 3, net) for name in ("ddp", "fsdp_pp") for net in (on_loopback, in_namespaces)),
]


@pytest.mark.parametrize(
    "name, count, network", [slow(*case) for case in (("fsdp", 2, on_loopback), *SLOW)]
)
def test_a_node_dies_and_the_same_commands_go_on(name, count, network, tmp_path):
    """To the bits of one node with as many processes."""
    smaller_model(tmp_path / "model")
    lines = (ROOT / "data/sft_en.jsonl").read_text().splitlines()[:60]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    one = start(
        command_of(name, tmp_path, count, "--output_dir", tmp_path / "one"),
        PYTHON=python(), NPROC_PER_NODE=str(count),
    )  # fmt: skip
    said, _ = one.communicate(timeout=120)
    assert one.returncode == 0, said

    run = tmp_path / "several"
    command = command_of(name, tmp_path, count, "--output_dir", run)
    shared = {"NNODES": str(count), "NPROC_PER_NODE": "1", "JOIN_SECONDS": "60"}
    with network(count) as places, contextlib.ExitStack() as stack:

        def start_all():
            shared["MASTER_PORT"] = str(free_port())
            nodes = [
                start(command, prefix, NODE_RANK=str(i), **env, **shared)
                for i, (prefix, env) in enumerate(places)
            ]
            for node in nodes:
                stack.callback(node.kill)
            return nodes

        *others, last = nodes = start_all()
        wait_for_step(4, run, nodes)
        last.send_signal(signal.SIGKILL)  # the launcher; its ranks end with it
        begun = time.monotonic()
        outputs = [node.communicate(timeout=60)[0] for node in others]
        assert time.monotonic() - begun < 60
        for node, said in zip(others, outputs, strict=True):
            errors = [line for line in said.splitlines() if line.startswith("error: ")]
            assert node.returncode == 1 and len(errors) == 1 and "lost the conn" in errors[0], said
            assert "Traceback" not in said
        assert max(steps_of(run)) < STEPS

        nodes = start_all()
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0] * count, outputs
        assert ", after step " in outputs[0] and "starting from step 1" not in outputs[0]
    assert steps_of(run) == steps_of(tmp_path / "one")
    last = f"checkpoints/step_{STEPS:08d}"
    assert_same_tensors(tmp_path / "one" / last, run / last)
