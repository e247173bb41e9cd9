"""The processes of llm_demo.check, which may hang or crash without harm to the check itself.

Nothing here imports torch, since that import may be what hangs."""

from __future__ import annotations  # so that a Python that is too old gets as far as saying so

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "llm_demo.check_worker"]  # the tests put stand-ins here
GRACE = 3  # seconds for the peers of a process that has failed: they may be waiting for it
TOOL_LIMIT = 15  # seconds

_hung_tools = set()


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def end(process: subprocess.Popen) -> None:
    """Kill a process and all that it started. One that the kernel can't kill is left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)


def tool(*command: str) -> str:
    """What a tool such as nvidia-smi prints; "" if it is missing, fails or hangs.

    A tool that hung is not called again."""
    if command[0] in _hung_tools:
        return ""
    env = {**os.environ, "LC_ALL": "C"}
    with tempfile.TemporaryFile() as out:  # not a pipe, whose reader might wait for grandchildren
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
        except OSError:
            return ""
        try:
            code = process.wait(timeout=TOOL_LIMIT)
        except subprocess.TimeoutExpired:
            end(process)
            _hung_tools.add(command[0])
            return ""
        out.seek(0)
        return "" if code else out.read().decode(errors="replace")


def hung_tools() -> list[str]:
    return sorted(_hung_tools)


def environment() -> dict:
    """The environment of the workers: the user's, without a launcher's variables."""
    gone = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in gone and "TORCHELASTIC" not in k}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("NCCL_DEBUG", "WARN")  # shown if something fails
    # NVLink multicast is not needed here, and one more thing that can fail.
    env |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    return env


class Worker:
    """A process that answers each command with one JSON line, and can be killed at any moment."""

    started = []

    def __init__(self, *args, **env):
        self.problem = None  # why it can't be used any more
        self.ready = False
        self.begun_with = args, env
        self.stderr = tempfile.TemporaryFile()
        self.rest = b""
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env={**environment(), **env},
            start_new_session=True,
        )
        os.set_blocking(self.process.stdout.fileno(), False)
        Worker.started.append(self)

    def again(self) -> Worker:
        """A new worker, started as this one was."""
        args, env = self.begun_with
        return Worker(*args, **env)

    def send(self, **command) -> None:
        with contextlib.suppress(OSError):  # it has died: receive() says so
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()

    def kill(self, problem: str = "was ended") -> None:
        self.problem = self.problem or problem
        end(self.process)

    def said(self) -> str:
        """Its standard error so far."""
        size = os.fstat(self.stderr.fileno()).st_size
        return os.pread(self.stderr.fileno(), 20_000, max(0, size - 20_000)).decode(
            errors="replace"
        )

    def read(self) -> dict | None:
        """The next answer, None if there is none yet. Sets `problem` if the process has died."""
        while b"\n" not in self.rest and self.problem is None:
            try:
                part = os.read(self.process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return None
            if not part:
                self.kill(self._death())
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            answer = json.loads(line)
            return answer if isinstance(answer, dict) else {"problem": f"answered {answer!r}"}
        except ValueError:
            if self.problem is None:
                self.kill(f"answered {line[:80]!r}")
            return {"problem": self.problem}

    def _death(self) -> str:
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        words = last_line(self.said())
        return f"{how}: {words}" if words else how


def receive(groups: list[list[Worker]], limit: float) -> list[list[dict]]:
    """The next answer of each worker, in the shape of `groups`.

    A worker that has died, or that is killed after `limit` seconds, answers {"problem": text}, with
    "hung": True if it was killed. If one of a group fails, the others get GRACE more seconds, since
    they may be waiting for it."""
    begun = time.monotonic()
    deadlines = [begun + limit] * len(groups)
    answers = {}
    waiting = {worker: g for g, group in enumerate(groups) for worker in group}
    with selectors.DefaultSelector() as selector:
        for worker in waiting:
            if worker.problem is None:
                selector.register(worker.process.stdout, selectors.EVENT_READ)
        while waiting:
            for worker, g in list(waiting.items()):
                answer = worker.read()
                if answer is None and time.monotonic() > deadlines[g]:
                    lost = deadlines[g] < begun + limit
                    what = "lost its peer" if lost else f"no answer within {limit:.0f} s"
                    hint = next((x for x in worker.said().splitlines() if "NCCL WARN" in x), "")
                    worker.kill(what + (hint and f" ({hint.split('NCCL WARN')[1].strip()})"))
                    answer = {"problem": worker.problem, "hung": not lost}
                if answer is not None:
                    answers[worker] = answer
                    del waiting[worker]
                    with contextlib.suppress(KeyError):
                        selector.unregister(worker.process.stdout)
                    if answer.get("problem"):
                        deadlines[g] = min(deadlines[g], time.monotonic() + GRACE)
            if waiting:
                left = min(deadlines[g] for g in waiting.values()) - time.monotonic()
                selector.select(max(0.01, left))
    return [[answers[worker] for worker in group] for group in groups]


def ask(worker: Worker, limit: float, **command) -> dict:
    """The answer to one command; see `receive`."""
    worker.send(**command)
    return receive([[worker]], limit)[0][0]


def end_all() -> None:
    for worker in Worker.started:  # all of them before waiting for the first
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
    for worker in Worker.started:
        end(worker.process)
        for stream in (worker.process.stdin, worker.process.stdout, worker.stderr):
            with contextlib.suppress(OSError):
                stream.close()
    Worker.started.clear()
