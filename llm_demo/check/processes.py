"""Run vendors' tools and experiments in processes that may hang or crash without harm.

Nothing here imports torch, because that import may be what hangs."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from llm_demo.job.files import ROOT
from llm_demo.job.process import LIBC, PARENT
from llm_demo.job.text import words_of

EXPERIMENTS = "llm_demo.check.experiments"


def probe_root() -> Path:
    """/, or the folder with another machine's files that PROBE_ROOT names, for tests."""
    return Path(os.environ.get("PROBE_ROOT") or "/")


def end(process: subprocess.Popen) -> None:
    """Kill a process and all its children. A process that the kernel can't kill is abandoned."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)


def tool(*command: str, limit: float = 15) -> str | None:
    """The output of a tool such as nvidia-smi: "" if it is missing or fails, None if it hangs."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        process = subprocess.Popen(command, **streams, text=True, start_new_session=True)
        output, _ = process.communicate(timeout=limit)
    except OSError:
        return ""
    except subprocess.TimeoutExpired:
        return end(process)
    return "" if process.returncode else output


class Job:
    """A process that runs tasks in order and writes each answer to a file, a line of JSON.

    tasks: (a function of `module`, its arguments by name). The process ends after a failed one."""

    def __init__(self, tasks: list, folder: str, module: str = EXPERIMENTS, **env: str):
        self.tasks = tasks
        self.file = Path(tempfile.mkdtemp(dir=folder)) / "answers"
        self.file.touch()
        # NVLink multicast is not needed here, and could fail
        fixed = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        fixed |= {"PYTHONPATH": path, PARENT: str(os.getpid())}
        env = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN", **os.environ, **fixed, **env}
        command = [sys.executable, "-m", module, self.file, json.dumps(tasks)]
        with open(self.file.with_name("log"), "wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(command, **streams, env=env, start_new_session=True)

    def answers(self) -> list[dict]:
        """The answers so far; {"problem": text} for a task that failed."""
        return [json.loads(line) for line in self.file.read_text().split("\n")[:-1]]

    def last_words(self) -> list[str]:
        """The last lines of its output."""
        lines = self.file.with_name("log").read_text(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-40:]


def finish(jobs: Iterable[Job], limit: float = 90, grace: float = 90) -> list[list[dict]]:
    """Wait for jobs; their answers, with {"problem": text} last after a crash. Those that still run
    are killed after `limit` seconds in which no task was done, which they answer by a problem with
    "hung": True; or, as they may wait for a job that failed, `grace` seconds after the last answer:
    then they may lack one."""
    known, last, failed = -1, time.monotonic(), False
    while running := [job for job in jobs if job.process.poll() is None]:
        sizes = {job: job.file.stat().st_size for job in jobs}
        if sum(sizes.values()) > known:
            known, last = sum(sizes.values()), time.monotonic()
        failed = any(job.process.returncode for job in jobs)
        patience = limit if all(sizes[job] for job in running) else max(limit, 60)  # imports
        if time.monotonic() > last + (min(grace, patience) if failed else patience):
            break
        time.sleep(0.05)
    answers = {job: job.answers() for job in jobs}  # first: others may fail when one is killed
    for job in running:
        end(job.process)
    for job, each in answers.items():
        code, late = job.process.returncode or 0, f"no answer within {limit:.0f} s"
        if len(each) == len(job.tasks) or each and "problem" in each[-1]:
            continue
        if job not in running:
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            each.append({"problem": ": ".join([how, *job.last_words()[-1:]])})
        elif not failed or grace >= limit:
            each.append({"problem": late, "hung": True})
    return list(answers.values())


def serve(functions: dict) -> None:
    """What a job's process runs: `functions` by the names of its tasks."""
    if LIBC is not None:  # don't lose NCCL's last lines in a buffer
        LIBC.setvbuf(ctypes.c_void_p.in_dll(LIBC, "stdout"), None, 1, 0)
    file, tasks = sys.argv[1:]
    with open(file, "a") as answers:
        for name, arguments in json.loads(tasks):
            try:
                answer = functions[name](**arguments)
            except Exception as e:
                answer = {"problem": words_of(e)}
            print(json.dumps(answer), file=answers, flush=True)
            if "problem" in answer:
                os._exit(1)
    os._exit(0)  # a broken process group would block a plain exit
