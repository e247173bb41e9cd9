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
from collections.abc import Callable, Iterable
from pathlib import Path

from llm_demo.machine.files import ROOT
from llm_demo.machine.process import LIBC, PARENT
from llm_demo.machine.text import words_of

MODULE = "llm_demo.check.experiments"
LIMIT, GRACE, TOTAL = 20, 3, 40  # seconds without progress; so after a failure; for all attempts
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

    def __init__(self, tasks: list, folder: str, module: str = MODULE, **env: str):
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
        return [json.loads(line) for line in self.file.read_text("utf-8").split("\n")[:-1]]

    def last_words(self) -> list[str]:
        """The last lines of its output."""
        lines = self.file.with_name("log").read_text("utf-8", "replace").splitlines()
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


def try_groups(groups: list, device: str, start: Callable, folder: str, limit=LIMIT) -> dict:
    """group -> result: what experiments.group returned, or a problem. A process for each index
    joins the groups that hold it, in their order. A group that fails ends the processes; new ones
    try the others, but none of more than two.

    groups: tuples of indices. device: "cuda:{}" or "cpu". start(*tasks) -> Job."""
    results, left, begun = {}, list(groups), time.monotonic()
    while left and time.monotonic() < begun + TOTAL:
        members, meeting = sorted(set().union(*left)), f"{folder}/{time.monotonic_ns()}"
        mine, jobs = {i: [g for g in left if i in g] for i in members}, {}
        for i in members:
            # PyTorch's own limit is longer than ours, because it aborts the process
            place = {"device": device.format(i), "index": i, "meeting": meeting, "limit": 4 * limit}
            jobs[i] = start(*(("group", place | {"members": g}) for g in mine[i]))
        answers = zip(members, finish(jobs.values(), limit, GRACE), strict=True)
        given = {i: dict(zip(mine[i], each, strict=False)) for i, each in answers}
        for g in left:
            each = [given[i].get(g, {"waits": True}) for i in g]
            broke = any("problem" in answer and "hung" not in answer for answer in each)
            if not broke and any("waits" in answer for answer in each):
                continue  # for a member that is still at an earlier group: this one may be well
            results[g] = _combine(each)
            if results[g].get("problem"):
                results[g]["log"] = [line for i in g for line in jobs[i].last_words()]
        failed = any(map(failure, results.values()))
        left = [g for g in left if g not in results and not (failed and len(g) > 2)]
    return results


def _combine(answers: list[dict]) -> dict:
    """One result from the answers of a group's processes."""
    failed = [answer for answer in answers if answer.get("problem")]
    if failed:  # a process that hung may only have waited for one that failed
        return dict(min(failed, key=lambda answer: answer.get("hung", False)))
    wrong = {name: sum(a["wrong"][name] for a in answers) for name in answers[0]["wrong"]}
    slowest = min(answers, key=lambda answer: answer["all_reduce"])
    return {**slowest, "wrong": wrong, "elements": sum(a["elements"] for a in answers)}


def failure(result: dict | None) -> str | None:
    """The problem with a group's result; None if every value was correct."""
    if result is None:
        return None
    if result.get("problem"):
        return f"{'hang' if result.get('hung') else 'fail'} ({result['problem']})"
    wrong = [f"{count:,} in {name}" for name, count in result["wrong"].items() if count]
    if wrong:
        return f"return wrong values ({', '.join(wrong)}, of {result['elements']:,} compared)"
    return None


def serve(functions: dict) -> None:
    """What a job's process runs: `functions` by the names of its tasks."""
    if LIBC is not None:  # don't lose NCCL's last lines in a buffer
        LIBC.setvbuf(ctypes.c_void_p.in_dll(LIBC, "stdout"), None, 1, 0)
    file, tasks = sys.argv[1:]
    with open(file, "a", encoding="utf-8") as answers:
        for name, arguments in json.loads(tasks):
            try:
                answer = functions[name](**arguments)
            except Exception as e:
                answer = {"problem": words_of(e)}
            print(json.dumps(answer), file=answers, flush=True)
            if "problem" in answer:
                os._exit(1)
    os._exit(0)  # a broken process group would block a plain exit
