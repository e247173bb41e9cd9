"""Run vendors' tools and experiments in processes that may hang or crash without harm.

Nothing here imports torch, because that import may be what hangs."""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

from llm_demo.job.process import LIBC, PARENT

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "llm_demo.check.processes"]  # tests replace it
TOOL_LIMIT = 15  # seconds
GRACE = 3  # seconds for the rest of a group after one member has failed

hung_tools = set()


def end(process: subprocess.Popen) -> None:
    """Kill a process and all its children. A process that the kernel can't kill is abandoned."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)


def tool(*command: str) -> str:
    """The output of a tool such as nvidia-smi; "" if it is missing, fails or hangs.

    A tool that hung is not called again."""
    if command[0] in hung_tools:
        return ""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    env = {**os.environ, "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            command, **streams, env=env, text=True, errors="replace", start_new_session=True
        )
    except OSError:
        return ""
    try:
        output, _ = process.communicate(timeout=TOOL_LIMIT)
    except subprocess.TimeoutExpired:
        end(process)
        hung_tools.add(command[0])
        return ""
    return "" if process.returncode else output


class Worker:
    """A process that answers each command with one line of JSON. It can be killed at any time.

    module: its functions are the commands. `problem`: why the process can't be used, or None."""

    started = []

    def __init__(self, module: str = "llm_demo.check.experiments", **env: str):
        self.module, self.env = module, env
        self.problem, self.ready = None, False
        self.stderr = tempfile.TemporaryFile()
        defaults = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN"}
        fixed = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            PARENT: str(os.getpid()),
            # NVLink multicast is not needed here, and could fail.
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        }
        self.process = subprocess.Popen(
            [*COMMAND, module],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env={**defaults, **os.environ, **fixed, **env},
            start_new_session=True,
        )
        Worker.started.append(self)

    def send(self, do: str, **arguments) -> None:
        with contextlib.suppress(OSError):  # it has died; `receive` will detect that
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def read(self) -> dict:
        """The next answer; {"problem": text} if the process has died."""
        line = self.process.stdout.readline()
        with contextlib.suppress(ValueError):
            return json.loads(line)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        code = self.process.returncode or 0
        end = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self.kill(": ".join([end, *self.errors()[-1:]]))
        return {"problem": self.problem}

    def kill(self, problem: str) -> None:
        self.problem = self.problem or problem
        end(self.process)

    def errors(self) -> list[str]:
        """The last lines of its standard error."""
        # Not seek(): the process writes at the same offset.
        start = max(0, os.fstat(self.stderr.fileno()).st_size - 20_000)
        text = os.pread(self.stderr.fileno(), 20_000, start).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-40:]


def receive(groups: list[list[Worker]], limit: float) -> list[list[dict]]:
    """The next answer of each worker, in the shape of `groups`.

    A worker that has died answers {"problem": text}. One that takes longer than `limit` seconds is
    killed and answers {"problem": text, "hung": True}. If one member of a group fails, the others
    get GRACE more seconds, because they may be waiting for it."""
    deadlines = [time.monotonic() + limit] * len(groups)
    waiting = {w.process.stdout: (w, g) for g, group in enumerate(groups) for w in group}
    answers = {}
    while waiting:
        left = min(deadlines[g] for _, g in waiting.values()) - time.monotonic()
        ready = wait(list(waiting), max(0, left))
        now = time.monotonic()
        late = [stream for stream, (_, g) in waiting.items() if deadlines[g] <= now]
        for stream in dict.fromkeys([*ready, *late]):
            worker, g = waiting.pop(stream)
            if stream in ready:
                answer = worker.read()
            else:
                worker.kill(f"no answer within {limit:.0f} s")
                answer = {"problem": worker.problem, "hung": True}
            answers[worker] = answer
            if answer.get("problem"):
                deadlines[g] = min(deadlines[g], now + GRACE)
    return [[answers[worker] for worker in group] for group in groups]


def ask(worker: Worker, limit: float, do: str, **arguments) -> dict:
    """The answer to one command; see `receive`."""
    worker.send(do, **arguments)
    return receive([[worker]], limit)[0][0]


def end_all() -> None:
    for worker in Worker.started:  # signal all of them before waiting for the first
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
    for worker in Worker.started:
        end(worker.process)
        for stream in (worker.process.stdin, worker.process.stdout, worker.stderr):
            stream.close()
    Worker.started.clear()


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def serve(module: str) -> None:
    """The worker's main loop: answer the commands on standard input."""
    if LIBC is not None:  # don't lose NCCL's last lines in a buffer
        LIBC.setvbuf(ctypes.c_void_p.in_dll(LIBC, "stdout"), None, 1, 0)
    # Libraries also print to standard output, where only answers may go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    functions = importlib.import_module(module)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = getattr(functions, arguments.pop("do"))(**arguments)
        except Exception as e:
            answer = {"problem": first_line(e)}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # a broken process group would block a plain exit


if __name__ == "__main__":
    serve(sys.argv[1])
