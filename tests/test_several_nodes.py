"""Several nodes on one machine: each has its own launcher."""

import contextlib
import signal
import subprocess
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


def start(command, **env):
    """One node: its launcher, in a session of its own."""
    return subprocess.Popen(
        command, env=environment(PYTHON=python(), **env), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


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


CASES = [(name, 2) for name in FLAGS] + [(name, 3) for name in ("ddp", "fsdp_pp")]


@pytest.mark.parametrize("name, count", [slow(*case) for case in CASES])
def test_a_node_dies_and_the_same_commands_go_on(name, count, tmp_path):
    """To the bits of one node with as many processes."""
    smaller_model(tmp_path / "model")
    lines = (ROOT / "data/sft_en.jsonl").read_text().splitlines()[:60]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    one = start(
        command_of(name, tmp_path, count, "--output_dir", tmp_path / "one"),
        NPROC_PER_NODE=str(count),
    )  # fmt: skip
    said, _ = one.communicate(timeout=120)
    assert one.returncode == 0, said

    run = tmp_path / "several"
    command = command_of(name, tmp_path, count, "--output_dir", run)
    shared = {"NNODES": str(count), "NPROC_PER_NODE": "1", "JOIN_SECONDS": "60"}
    shared["MASTER_ADDR"] = "127.0.0.2"
    with contextlib.ExitStack() as stack:

        def start_all():
            shared["MASTER_PORT"] = str(free_port())
            nodes = [start(command, NODE_RANK=str(i), **shared) for i in range(count)]
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
