"""RESTARTS: a run whose rank is killed goes on by itself, and nothing else is restarted."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from conftest import (
    ROOT,
    SCRIPTS,
    assert_same_tensors,
    logged,
    python,
    run,
    slow,
    smaller_model,
)
from test_launch import launch, script  # noqa: F401  script is a fixture
from test_resume import steps_of

# Runs a training script. In the first attempt one rank kills itself, soon after a step is logged.
KILLED = """
import os, pathlib, runpy, signal, sys, threading, time
metrics, rank, step, wait = pathlib.Path(sys.argv[1]), *sys.argv[2:5]
def kill():
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        time.sleep(0.01)
    time.sleep(float(wait))
    os.kill(os.getpid(), signal.SIGKILL)
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (rank, "0"):
    threading.Thread(target=kill, daemon=True).start()
sys.argv[:6] = [sys.argv[5]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STEPS = 6


@pytest.mark.parametrize("kind", ["fsdp", slow("pp"), slow("zero"), slow("fsdp_pp")])
def test_a_rank_killed_at_random_changes_no_bit(kind, script, tmp_path):  # noqa: F811
    seed = int(os.environ.get("KILL_SEED") or random.randrange(10**6))
    draw = random.Random(seed)
    # a step is logged during the next one, and takes 30 ms or more
    rank, step, wait = draw.randrange(2), draw.randint(1, STEPS - 3), draw.random() / 20
    print(f"KILL_SEED={seed}: rank {rank} dies {wait:.2f} s after step {step}")
    model = smaller_model(tmp_path / "model")

    def train(name, restarts):
        folder = tmp_path / name
        who = rank if restarts else "nobody"
        flags = f"--model_name_or_path {model} --seq_len 32 --max_steps {STEPS} --save_every 2 "
        flags += "--eval_json none --sample_tokens 0 --warmup_steps 2 --log_every 1 --keep_last 0 "
        flags += f"--train_json {ROOT}/data/sft_en.jsonl --micro_batch_size 1 --resume auto"
        command = [folder / "metrics.jsonl", who, step, wait, ROOT / SCRIPTS[kind], *flags.split()]
        done = launch(
            script(KILLED), *command, "--output_dir", folder, RESTARTS=restarts,
            TORCHELASTIC_RESTART_COUNT="0",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        steps = [record["step"] for record in logged(folder)]
        assert steps == [*range(1, STEPS + 1)]  # none twice
        return folder, done

    whole, done = train("whole", "")
    assert "restart" not in done.stderr
    killed, done = train("killed", "2")
    assert "died of SIGKILL" in done.stderr and "\nrestart 1 of 2\n" in done.stderr
    assert "restart 2" not in done.stderr
    assert steps_of(killed) == steps_of(whole)
    last = f"checkpoints/step_{STEPS:08d}"
    assert_same_tensors(whole / last, killed / last)


ENDS = """
import os, sys, time
if os.environ["RANK"] == "1":
    open(sys.argv[1], "a").write(os.environ["MASTER_PORT"] + "\\n")
    sys.exit(int(sys.argv[2]))
time.sleep(60)
"""


@pytest.mark.parametrize("code, attempts", [(7, 3), (2, 1), (75, 1), (143, 1)])
def test_only_failures_are_restarted(code, attempts, script, tmp_path):  # noqa: F811
    """Not bad input, nor a run that has saved and ended because of a signal."""
    done = launch(script(ENDS), tmp_path / "ports", code, RESTARTS="2")
    assert done.returncode == code
    ports = (tmp_path / "ports").read_text().split()
    assert len(ports) == len({*ports}) == attempts  # each meets in a store of its own
    said = [line for line in done.stderr.splitlines() if line.startswith("restart ")]
    assert said == [f"restart {i} of 2" for i in range(1, attempts)]


SAVES = """
import os, signal, sys, time
again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75 if again else 143))
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if not again and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def test_a_run_stopped_after_a_restart_saves_and_ends(script):  # noqa: F811
    command = [python(), "-m", "llm_demo.launch", str(script(SAVES))]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RESTARTS": "5", "NPROC_PER_NODE": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **pipes) as process:
        while process.stdout.readline() != "attempt 1\n":
            assert process.poll() is None
        assert process.stdout.readline() == "attempt 1\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 75 and errors.count("restart ") == 1


@pytest.mark.parametrize(
    "flags, env, words",
    [
        ("", {}, "RESTARTS needs --resume auto and --output_dir"),
        ("--resume runs/a", {}, "RESTARTS needs --resume auto and --output_dir"),
        ("--resume auto --output_dir x", {"RESTARTS": "often"}, "RESTARTS=often: must be a whole"),
        (
            "--resume auto --output_dir x",
            {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
            "RESTARTS=2: only on one node; on NNODES=2 the scheduler restarts",
        ),
    ],
)
def test_where_restarts_cant_work_is_one_line(flags, env, words, record_property):
    record_property("bad inputs", 1)
    command = [sys.executable, "-m", "llm_demo.launch", ROOT / "fsdp/train_fsdp.py"]
    done = run([*command, *flags.split()], **{"RESTARTS": "2", **env})
    assert done.returncode == 2 and done.stderr.startswith(f"error: {words}"), done.stderr
    assert done.stderr.count("\n") == 1
