"""Run vendors' tools and experiments in processes that may hang or crash without harm.

Nothing here imports torch, because that import may be what hangs."""

import contextlib
import json
import os
import signal
import subprocess
import sys

from llm_demo.machine.files import ROOT
from llm_demo.machine.process import PARENT
from llm_demo.machine.text import words_of

EXPERIMENTS = "llm_demo.check.experiments"
P2P_OFF = "NCCL_P2P_DISABLE"
FIXED = {
    # NVLink multicast is not needed here, and could fail
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # not to a buffer, which is lost with the process
    "NCCL_DEBUG_FILE": "/dev/stderr",
}


def finished(command: list[str], limit: float, **options) -> tuple[int | None, str]:
    """(exit code, output) of a command. After `limit` seconds it is killed with its children, and
    the code is None."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        **options,
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=3)
        return None, output
    return None, ""  # the kernel can't kill it


def tool(*command: str, limit: float = 15) -> str:
    """The output of a tool such as nvidia-smi; "" if it is missing, fails or hangs."""
    try:
        code, output = finished([*command], limit, stderr=subprocess.DEVNULL)
    except OSError:
        return ""
    return output if code == 0 else ""


def ask(
    task: str, module: str = EXPERIMENTS, env: dict | None = None, limit: float = 120, **arguments
) -> dict:
    """What an experiment returns, with the "log" of its process; {"problem": text} if it raised,
    died or hung. task: one of TASKS of `module`. env: further environment variables."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    defaults = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN"}
    fixed = {**FIXED, "PYTHONPATH": path, PARENT: str(os.getpid())}
    code, output = finished(
        [sys.executable, "-m", module, task, json.dumps(arguments)],
        limit,
        stderr=subprocess.STDOUT,
        env={**defaults, **os.environ, **fixed, **(env or {})},
    )
    lines = [line for line in output.splitlines() if line.strip()]
    if code == 0:
        return {**json.loads(lines[-1]), "log": lines[-41:-1]}
    if code is None:
        return {"problem": f"no answer within {limit:.0f} s", "hung": True, "log": lines[-40:]}
    ending = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return {"problem": ": ".join([ending, *lines[-1:]]), "log": lines[-40:]}


def serve(tasks: dict) -> None:
    """What such a process runs: a task. Prints what it returns, as JSON on the last line."""
    name, arguments = sys.argv[1:]
    try:
        result = tasks[name](**json.loads(arguments))
    except Exception as e:
        result = {"problem": words_of(e)}
    print(json.dumps(result), flush=True)
