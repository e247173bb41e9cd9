"""Run vendors' tools and experiments in processes that may hang or crash without harm.

Nothing here imports torch, because that import may be what hangs."""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from llm_demo.machine.files import ROOT
from llm_demo.machine.process import LIBC, PARENT
from llm_demo.machine.text import words_of

EXPERIMENTS = "llm_demo.check.experiments"
LIMIT = 30  # seconds for a group of processes, imports included
AFTER_FAILURE = 5  # seconds for the others once one has failed, for which they may wait
P2P_OFF = "NCCL_P2P_DISABLE"


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
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        output, _ = process.communicate(timeout=limit)
    except OSError:
        return ""
    except subprocess.TimeoutExpired:
        end(process)
        return None
    return "" if process.returncode else output


class Trial:
    """A process that runs one experiment and writes its answer to a file, as JSON."""

    def __init__(
        self, task: str, arguments: dict, folder: str, module: str = EXPERIMENTS, **env: str
    ):
        """task: a function of `module`. env: further environment variables."""
        self.file = Path(tempfile.mkdtemp(dir=folder)) / "answer"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        fixed = {
            "PYTHONPATH": path,
            PARENT: str(os.getpid()),
            # NVLink multicast is not needed here, and could fail
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        }
        defaults = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN"}
        with open(self.file.with_name("log"), "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, self.file, task, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**defaults, **os.environ, **fixed, **env},
                start_new_session=True,
            )

    def last_words(self) -> list[str]:
        """The last lines of its output."""
        lines = self.file.with_name("log").read_text("utf-8", "replace").splitlines()
        return [line for line in lines if line.strip()][-40:]

    def answer(self) -> dict:
        """What the experiment returned; {"problem": text} if it raised, or if its process died."""
        if self.file.exists():
            return json.loads(self.file.read_text("utf-8"))
        code = self.process.returncode
        ending = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return {"problem": ": ".join([ending, *self.last_words()[-1:]])}


def answers_of_all(jobs: list[Trial], limit: float = 120) -> list[dict]:
    """The answers of jobs. Those that run longer than `limit` seconds, or than GRACE seconds after
    another one failed, are killed; their answer is a problem with "hung": True."""
    deadline = time.monotonic() + limit
    while any(job.process.poll() is None for job in jobs) and time.monotonic() < deadline:
        if any(job.process.returncode for job in jobs):
            deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
        time.sleep(0.05)
    hung = [job for job in jobs if job.process.poll() is None]
    for job in hung:
        end(job.process)
    late = {"problem": f"no answer within {limit:.0f} s", "hung": True}
    return [late if job in hung and not job.file.exists() else job.answer() for job in jobs]


def rounds_of(groups: list[tuple]) -> list[list[tuple]]:
    """Groups in rounds: those of one round have no member in common and can run at once."""
    rounds = []
    for group in groups:
        for others in rounds:
            if not set(group) & set(itertools.chain(*others)):
                others.append(group)
                break
        else:
            rounds.append([group])
    return rounds


def try_groups(groups: list, device: str, start: Callable, folder: str, limit=LIMIT) -> dict:
    """group -> result: what experiments.group returned, or a problem.

    groups: tuples of indices. device: "cuda:{}" or "cpu". start(task, arguments) -> Trial."""
    results = {}
    for at_once in rounds_of(groups):
        jobs = {}
        for group in at_once:
            meeting = f"{folder}/{time.monotonic_ns()}"
            for index in group:
                arguments = {
                    "device": device.format(index),
                    "members": group,
                    "rank": group.index(index),
                    "meeting": meeting,
                    "limit": 4 * limit,  # PyTorch's own, which would abort the process
                }
                jobs[group, index] = start("group", arguments)
        answers = dict(zip(jobs, answers_of_all([*jobs.values()], limit), strict=True))
        for group in at_once:
            result = one_result([answers[group, index] for index in group])
            if "problem" in result:
                result["log"] = [line for i in group for line in jobs[group, i].last_words()]
            results[group] = result
    return results


def one_result(answers: list[dict]) -> dict:
    """One result from the answers of a group's processes."""
    failed = [answer for answer in answers if "problem" in answer]
    if failed:  # a process that hung may only have waited for one that failed
        return dict(min(failed, key=lambda answer: answer.get("hung", False)))
    wrong = {name: sum(a["wrong"][name] for a in answers) for name in answers[0]["wrong"]}
    slowest = min(answers, key=lambda answer: answer["all_reduce"])
    return {**slowest, "wrong": wrong, "elements": sum(a["elements"] for a in answers)}


def failure(result: dict | None) -> str | None:
    """The problem with a group's result; None if every value was correct."""
    if result is None:
        return None
    if "problem" in result:
        return f"{'hang' if result.get('hung') else 'fail'} ({result['problem']})"
    wrong = [f"{count:,} in {name}" for name, count in result["wrong"].items() if count]
    if wrong:
        return f"return wrong values ({', '.join(wrong)}, of {result['elements']:,} compared)"
    return None


def serve(functions: dict) -> None:
    """What a job's process runs: one of `functions`, by the name of its task."""
    if LIBC is not None:  # don't lose NCCL's last lines in a buffer
        LIBC.setvbuf(ctypes.c_void_p.in_dll(LIBC, "stdout"), None, 1, 0)
    file, task, arguments = sys.argv[1:]
    try:
        answer = functions[task](**json.loads(arguments))
    except Exception as e:
        answer = {"problem": words_of(e)}
    part = Path(f"{file}.part")
    part.write_text(json.dumps(answer), encoding="utf-8")
    part.rename(file)
    os._exit("problem" in answer)  # a broken process group would block a plain exit
