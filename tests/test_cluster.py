"""The templates in cluster/: what they run, with stand-ins for Slurm's and SkyPilot's commands."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest
import yaml
from conftest import ROOT, environment, python

BATCH = ROOT / "cluster/slurm.sbatch"
TASK = ROOT / "cluster/skypilot.yaml"

SRUN = """#!/usr/bin/env bash
# One task a node, at the same time; ends with the highest exit code, as srun does.
[[ $1 == --wait=60 ]] || exit 99
shift
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" & tasks+=($!)
done
echo "${tasks[*]}" > "$SEEN/tasks"
highest=0
for task in "${tasks[@]}"; do
    wait "$task" && code=0 || code=$?
    ((code > highest)) && highest=$code
done
exit $highest
"""
SCONTROL = """#!/usr/bin/env bash
case $* in
"show hostnames n[1-2]") printf '127.0.0.1\\nn2\\n' ;;
"show job 31") echo "JobId=31 JobName=llm_demo\n   JobState=$STATE Reason=None Requeue=1" ;;
*) echo "$*" >> "$SEEN/calls" ;;
esac
"""
# Says what a launcher would take from the environment, and ends as told on the second node.
LAUNCHER = """
names="NNODES NODE_RANK MASTER_ADDR MASTER_PORT NPROC_PER_NODE RESUME OUTPUT_DIR SAVE_EVERY MODEL"
names+=" STOP_MINUTES JOIN_SECONDS SRUN_CPUS_PER_TASK"
for name in $names; do [[ -v $name ]] && echo "$name=${!name}"; done > seen-$NODE_RANK
echo "$*" >> seen-$NODE_RANK
((NODE_RANK == 0)) || exit "${CODE:-0}"
"""


@pytest.fixture
def slurm(tmp_path):
    """slurm(*arguments, **environment): runs the batch script in a job of two nodes; started, not
    ended."""
    stand_ins = {"srun": SRUN, "scontrol": SCONTROL}
    for name, text in stand_ins.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "slurmd").mkdir()
    spooled = shutil.copy(BATCH, tmp_path / "slurmd/slurm_script")  # as Slurm does

    def start(*arguments, **more):
        job = {
            "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "31", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SEEN": str(tmp_path), "PYTHON": python(), "STATE": "RUNNING",
            "SLURM_CPUS_PER_TASK": "32",
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", spooled, *map(str, arguments)], env=environment(**{**job, **more}), text=True,
            cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return start


def calls(folder):
    """What the job asked scontrol to do."""
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    "code, state, requeued",
    [(0, "RUNNING", 0), (75, "RUNNING", 1), (75, "COMPLETING", 0), (2, "RUNNING", 0),
     (137, "RUNNING", 0)],
)  # fmt: skip
def test_a_job_is_requeued_if_its_run_has_saved(code, state, requeued, slurm, tmp_path):
    """Not after bad input, a killed rank, or scancel."""
    (tmp_path / "launcher.sh").write_text(LAUNCHER)
    job = slurm("launcher.sh", "--lr", "1e-4", "--seed", "a b", CODE=str(code), STATE=state)
    said, _ = job.communicate(timeout=30)
    assert job.returncode == code, said
    assert calls(tmp_path) == ["requeue 31"] * requeued
    for node in range(2):
        assert (tmp_path / f"seen-{node}").read_text().splitlines() == [
            "NNODES=2", f"NODE_RANK={node}", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=20031",
            "RESUME=auto", "OUTPUT_DIR=runs/slurm-31", "SAVE_EVERY=200", "STOP_MINUTES=8",
            "JOIN_SECONDS=600", "SRUN_CPUS_PER_TASK=32", "--lr 1e-4 --seed a b",
        ]  # fmt: skip


# Ends as a launcher does that has saved because of SIGTERM.
SAVES = """
trap 'exit 75' TERM
touch seen-$NODE_RANK
for ((i = 0; i < 600; i++)); do sleep 0.05; done
"""


def test_the_batch_shell_outlives_its_own_sigterm(slurm, tmp_path):
    (tmp_path / "launcher.sh").write_text(SAVES)
    job = slurm("launcher.sh")
    until = time.monotonic() + 20
    while len([*tmp_path.glob("seen-*")]) < 2:
        assert job.poll() is None and time.monotonic() < until, job.stdout.read()
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)  # first: bash acts on it once srun has ended
    for task in (tmp_path / "tasks").read_text().split():
        os.kill(int(task), signal.SIGTERM)
    said, _ = job.communicate(timeout=30)
    assert job.returncode == 75 and calls(tmp_path) == ["requeue 31"], said


def test_what_slurm_reads():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", BATCH.read_text(), re.M))
    assert options["ntasks-per-node"] == "1" and "requeue" in options
    name, seconds = options["signal"].split("@")
    assert name == "TERM"  # of the steps, without B:, which is the shell alone
    stop = int(re.search(r"STOP_MINUTES:-(\d+)", BATCH.read_text())[1])
    assert 60 * stop < int(seconds)


def test_the_keys_and_types_of_skypilots_task():
    task = yaml.safe_load(TASK.read_text())
    assert {*task} == {
        "name", "num_nodes", "workdir", "resources", "volumes", "envs", "setup", "run",
    }  # fmt: skip
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert all(isinstance(value, str) for value in task["envs"].values())
    assert task["num_nodes"] >= 1 and task["envs"]["OUTPUT_DIR"].startswith(tuple(task["volumes"]))


@pytest.mark.parametrize("gpus", [0, 8])
def test_what_skypilots_task_runs(gpus, tmp_path):
    (tmp_path / "fsdp").mkdir()
    (tmp_path / "fsdp/launch_fsdp.sh").write_text(LAUNCHER)
    task = yaml.safe_load(TASK.read_text())
    for node in range(2):
        node_env = {
            "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(node),
            "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6", "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
        }  # fmt: skip
        env = {**task["envs"], **node_env, "CODE": "75", "PATH": os.environ["PATH"]}
        done = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=env)
        assert done.returncode == 75 * node  # which job_recovery reads
        assert (tmp_path / f"seen-{node}").read_text().split() == [
            "NNODES=2", f"NODE_RANK={node}", "MASTER_ADDR=10.0.0.5",
            *[f"NPROC_PER_NODE={gpus}"] * bool(gpus), "RESUME=auto", "OUTPUT_DIR=/shared/run",
            "SAVE_EVERY=200", "MODEL=Qwen/Qwen3-0.6B", "JOIN_SECONDS=600",
        ]  # fmt: skip
