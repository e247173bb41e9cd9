"""How runs end: a launcher that is killed, a terminal that is closed, Ctrl-C before step 1."""

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import (
    LAUNCHERS,
    ROOT,
    SCRIPTS,
    assert_same_tensors,
    environment,
    logged,
    processes_with,
    python,
    run,
    slow,
    torchrun,
)

from llm_demo.core import errors
from llm_demo.core.errors import UserError
from llm_demo.machine import dist, process
from llm_demo.machine.text import without_given_secrets
from llm_demo.run.log import Log

TRAIN = "--seq_len 64 --micro_batch_size 1 --grad_accum_steps 2 --max_steps 5000 --log_every 1"

# A rank that doesn't end on SIGTERM.
DEAF = """
import os, pathlib, signal, sys, time, llm_demo
signal.signal(signal.SIGTERM, signal.SIG_IGN)
assert (signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, [])) == ("NOHUP" in os.environ)
(pathlib.Path(sys.argv[1]) / str(os.getpid())).touch()
time.sleep(100)
"""


@contextlib.contextmanager
def signals(hup=signal.SIG_DFL):
    """What is started inside has signals at their defaults: a shell's & ignores Ctrl-C.

    Not by Popen's preexec_fn: Python's code in a fork of this process may collect garbage, and
    process groups of earlier tests, whose threads are not in the fork, then hang or crash it."""
    chosen = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: hup}
    before = {number: signal.signal(number, handler) for number, handler in chosen.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def started(command, hup=signal.SIG_DFL, env=()):
    """Start in a new session."""
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    given = {"PYTHON": sys.executable, "PYTHONPATH": path, "NPROC_PER_NODE": "2"}
    with signals(hup):
        process = subprocess.Popen(
            list(map(str, command)), env={**os.environ, **given, **dict(env)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    begun.append(process)
    return process


begun = []


@pytest.fixture(autouse=True)
def none_left():
    """Kill what a failed test has left."""
    yield
    while begun:
        begun.pop().kill()


def wait_for(what, seconds=60, every=0.05):
    """Wait for what() to be true; -> it."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until
        time.sleep(every)
    return found


def running(pids):
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != "zombie"]


def test_no_rank_outlives_its_launcher(tmp_path):
    """SIGKILL, as by the kernel short of memory. Under nohup, where SIGHUP alone ends nothing."""
    script, pids = tmp_path / "rank.py", tmp_path / "pids"
    script.write_text(DEAF)
    pids.mkdir()
    command = [sys.executable, "-m", "llm_demo.launch", script, pids]
    launcher = started(command, hup=signal.SIG_IGN, env={"NOHUP": "1"})
    ranks = wait_for(lambda: len(os.listdir(pids)) == 2 and [int(p) for p in os.listdir(pids)])
    os.killpg(launcher.pid, signal.SIGHUP)
    time.sleep(1)
    assert launcher.poll() is None and len(running(ranks)) == 2
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not running(ranks), seconds=10)


@pytest.mark.parametrize("kind", ["fsdp", slow("pp"), slow("zero"), slow("fsdp_pp")])
def test_a_closed_terminal_saves(kind, tmp_path):
    """A real terminal: SIGHUP to the group, and whatever is printed from then on fails."""
    terminal, theirs = os.openpty()
    flags = f"{TRAIN} --eval_json none --output_dir"
    # who leads a session and opens a terminal has it
    script = f'exec bash "$0" "$@" <{os.ttyname(theirs)}'
    with signals():
        launcher = subprocess.Popen(
            ["bash", "-c", script, LAUNCHERS[kind], *flags.split(), tmp_path / "run"],
            env=environment(PYTHON=python(), NPROC_PER_NODE="2", A_TEST=str(tmp_path)),
            stdout=theirs, stderr=theirs, start_new_session=True, cwd=tmp_path,
        )  # fmt: skip
    os.close(theirs)
    said = b""
    try:
        while b"step 2/" not in said:
            said += os.read(terminal, 65536)
        ranks = [p.pid for p in processes_with(A_TEST=str(tmp_path)) if "RANK" in p.environ()]
        assert len(ranks) == 2
    finally:
        os.close(terminal)
    assert launcher.wait(90) == 75
    assert not running(ranks)
    assert (tmp_path / "run/checkpoints/latest").exists()
    log = (tmp_path / "run/train.log").read_text()
    assert "checkpoint: " in log.splitlines()[-1] and "step 2/" in log


# A script whose evaluations, all or all but the first of a process, are slow if told so.
SLOWLY = """
import itertools, os, pathlib, runpy, sys, time
from llm_demo.core import loop
calls, whole, loop.EVAL_BATCHES = itertools.count(), loop.parts_of, 1
def slow(*args):
    first = next(calls) == 0
    for part in whole(*args):
        yield part
        if os.environ.get("SLOW") == "all" or not first and "SLOW" in os.environ:
            print("evaluating slowly", flush=True)
            time.sleep(1)
loop.parts_of = slow
sys.path.insert(0, os.path.dirname(sys.argv[1]))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_stop_ends_an_evaluation_and_loses_nothing(kind, tmp_path):
    """Stopped in the evaluation after step 2, and again in the last one, after step 4."""
    script, rows = tmp_path / "slowly.py", (ROOT / "data/sft_en.jsonl").read_text().splitlines()
    script.write_text(SLOWLY)
    (tmp_path / "train.jsonl").write_text("\n".join(rows[:40]))
    (tmp_path / "held.jsonl").write_text("\n".join(rows[40:70]))
    flags = "--seq_len 64 --micro_batch_size 1 --grad_accum_steps 2 --max_steps 4 --log_every 1 "
    flags += "--eval_every 2 --keep_last 1 --early_stopping 9 --warmup_steps 0 --sample_tokens 0 "
    flags += f"--resume auto --train_json {tmp_path}/train.jsonl --eval_json {tmp_path}/held.jsonl"
    launch = [sys.executable, "-m", "llm_demo.launch", script]
    launch += [ROOT / SCRIPTS[kind], *flags.split(), "--output_dir"]

    def evals(folder):
        kept = ("train/loss", "train/grad_norm", "eval/loss", "eval/exact")
        return [(r["step"], k, r[k]) for k in kept for r in logged(tmp_path / folder, k)]

    whole = started([*launch, tmp_path / "whole"])
    said = whole.communicate(timeout=200)
    assert whole.returncode == 0, said
    # the last time while that evaluation is repeated
    for step, which in ((2, "1"), (4, "1"), (4, "all")):
        stopped = started([*launch, tmp_path / "run"], env={"SLOW": which})
        said = ""
        while "evaluating slowly" not in said:
            said += (line := stopped.stdout.readline())
            assert line, said + stopped.stderr.read()
        stopped.send_signal(signal.SIGTERM)
        said = stopped.communicate(timeout=60)
        assert stopped.returncode == 75, said
        latest = (tmp_path / "run/checkpoints/latest").read_text()
        assert latest == f"step_{step:08d}\n"
        assert max(n for n, key, _ in evals("run") if key == "eval/loss") == step - 2
    last = started([*launch, tmp_path / "run"])
    said = last.communicate(timeout=200)
    assert last.returncode == 0, said
    assert "step 4/4 | held-out loss" in said[0] and "| loss" not in said[0]
    assert sorted(evals("run")) == sorted(evals("whole"))
    ends = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "whole")]
    assert ends[0]["eval_loss"] == ends[1]["eval_loss"] and len(ends[0]["eval_loss"]) == 3
    assert_same_tensors(*(tmp_path / n / "checkpoints/step_00000004" for n in ("run", "whole")))
    again = started([*launch, tmp_path / "run"])
    assert "nothing left to train" in again.communicate(timeout=100)[0]


# Each moment of the start: bash, Python's own start, the imports of torch, of the ranks.
MOMENTS = [("fsdp", "bash"), ("fsdp", 0.5), ("pp", 1.5), ("fsdp", "ranks"), slow("pp", "ranks")]


@pytest.mark.parametrize("kind, moment", MOMENTS)
def test_ctrl_c_while_it_starts_is_one_line(kind, moment, tmp_path):
    called, env = tmp_path / "called", {}
    if moment == "bash":  # looks for torch, and has set its trap
        slowly = tmp_path / "python"
        slowly.write_text(f'#!/bin/sh\ntouch {called}; sleep 0.5; exec {sys.executable} "$@"\n')
        slowly.chmod(0o755)
        env = {"PYTHON": str(slowly)}
    command = ["bash", LAUNCHERS[kind], *TRAIN.split(), "--output_dir", tmp_path / "run"]
    launcher = started(command, env=env)
    ranks = []
    if moment == "bash":
        wait_for(called.exists)
    elif moment == "ranks":

        def importing():
            found = psutil.Process(launcher.pid).children()
            with contextlib.suppress(psutil.NoSuchProcess):  # one has just ended
                return [p.pid for p in found if SCRIPTS[kind] in " ".join(p.cmdline())]
            return []

        ranks = wait_for(lambda: len(importing()) == 2 and importing())
        time.sleep(0.5)
    else:
        time.sleep(moment)
    os.killpg(launcher.pid, signal.SIGINT)
    said, errors = launcher.communicate(timeout=20)
    assert (launcher.returncode, errors) == (130, "error: stopped by SIGINT\n")
    assert [line for line in said.splitlines() if not line.startswith("+ ")] == []
    wait_for(lambda: not running(ranks), seconds=5)  # the kernel ends them with their launcher
    assert not (tmp_path / "run").exists()


def test_ctrl_c_in_set_up_and_in_the_other_programs(tmp_path):
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    shutil.copy(ROOT / "setup.sh", tmp_path)  # .venv in the checkout may be ready already
    data = ROOT / "data/first_run.jsonl"
    evaluate = ["-m", "llm_demo.evaluate", "--models", ROOT / "models/qwen3-tiny", "--data", data]
    (tmp_path / "run/checkpoints/step_00000001").mkdir(parents=True)
    export = ["-m", "llm_demo.export", tmp_path / "run", tmp_path / "out"]
    programs = [
        started(["bash", tmp_path / "setup.sh"], env={"PYTHON": str(slow), "SETUP_DRY_RUN": "1"}),
        started([sys.executable, *evaluate]),
        started([sys.executable, *export]),
    ]
    wait_for(lambda: psutil.Process(programs[0].pid).children())
    for program in programs[1:]:
        maps = Path(f"/proc/{program.pid}/maps")
        wait_for(lambda maps=maps: "torch" in maps.read_text())
    for program in programs:
        os.killpg(program.pid, signal.SIGINT)
    for program in programs:
        said, errors = program.communicate(timeout=20)
        assert program.returncode == 130 and said + errors == errors
        assert errors.startswith("error: stopped by SIGINT") and errors.count("\n") == 1


PARENT = """
import os, subprocess, sys
env = {"LLM_DEMO_PARENT": str(os.getpid())} if sys.argv[2] == "signal" else {}
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env={**os.environ, **env})
os.read(0, 1)
"""
CHILD = """
import os, sys, time
from llm_demo.machine import process
if sys.argv[1] == "thread":
    process.LIBC = None
    process.end_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("how", ["signal", "thread"])
def test_a_child_ends_with_its_parent(how):
    """By Linux's signal, as a probe does, and by what other systems have instead."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, how], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_for(lambda: not running([child]), seconds=5)


@pytest.mark.parametrize(
    "encoding, errors, text, said",
    [
        ("latin-1", "strict", "\u27e6é\u27e7", b"?\xe9?\n"),
        ("utf-8", "surrogateescape", "half a pair: \udfff", b"half a pair: ?\n"),  # as in locale C
    ],
)
def test_characters_that_the_console_lacks(encoding, errors, text, said, tmp_path):
    with open(tmp_path / "out", "w", encoding=encoding, errors=errors) as out:
        with contextlib.redirect_stdout(out):
            process.outlive_terminal()
            print(text, flush=True)
    assert (tmp_path / "out").read_bytes() == said


def test_a_terminal_obeys_nothing_that_is_printed(tmp_path):
    """But progress bars, one above the other."""
    orders = "".join(map(chr, [*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2066]))
    with (
        open(tmp_path / "out", "w+", newline="") as out,
        contextlib.redirect_stderr(out),
        contextlib.redirect_stdout(out),
    ):
        library = logging.getLogger("a library")
        library.addHandler(logging.StreamHandler())  # before the stream is replaced
        process.outlive_terminal()
        print(f"a\tline\n\x1b]0;title\x07{orders}é")
        library.error("\x1b[31mred")
        sys.stdout.write("\r50%")
        sys.stdout.write("\x1b[A\x1b[A")
        sys.stdout.write("\x1b[A\x1b[B")
        out.seek(0)
        said = out.read()
    assert said.startswith("a\tline\n\\x1b]0;title\\x07\\x00\\x01") and "é\n\\x1b[31mred\n" in said
    assert said.endswith("\n\r50%\x1b[A\x1b[A\\x1b[A\\x1b[B")
    assert not errors.CONTROL.search(said[: said.index("50%") - 1])
    message = str(UserError(f"a line\n{orders}\u2028of one's own"))
    assert not errors.CONTROL.search(message) and "\n" not in message


def test_what_is_printed_holds_no_login(tmp_path, monkeypatch):
    """Of a flag or of the environment, by the launcher, the ranks and their log; data stays."""
    address, data = "https://me:hunter2@host/rows", "an answer: ftp://you:public@host"
    monkeypatch.setattr(sys, "argv", ["x", f"--train_json={address}"])
    monkeypatch.setenv("A_PLACE", "redis://:hunter3@host?token=hunter4&n=1")
    known = f"{address} and redis://:hunter3@host?token=hunter4&n=1"
    shown = "https://***@host/rows and redis://***@host?token=***&n=1"
    assert without_given_secrets(f"{known} {data}") == f"{shown} {data}"
    log = Log.__new__(Log)
    log.is_main, log.file, log.early = True, None, []
    log.say(f"{known} {data}")
    assert log.early == [f"{shown} {data}"]
    (tmp_path / "rank.py").write_text("")
    shutil.copy(ROOT / "fsdp/flags.py", tmp_path)
    flags = ["--settings", "--", tmp_path / "rank.py", "--input_key", address]
    flags += ["--target_key", "b", "--train_json", "nobody/nothing"]  # of the hub
    done = run([sys.executable, "-m", "llm_demo.launch", *flags], NPROC_PER_NODE="1")
    assert done.returncode == 0 and "hunter" not in done.stdout + done.stderr, done.stderr
    assert "--input_key https://***@host/rows" in done.stdout.replace("'", "")


@pytest.mark.parametrize(
    "what, where", [("llm_demo.fit", "a full disk"), ("llm_demo.launch", "no reader")]
)
def test_output_that_goes_nowhere_is_no_traceback(what, where):
    fit = f"{ROOT}/models/qwen3-tiny --cards 1 --memory 80 --tokens_a_step 100"
    start = f"--settings -- {ROOT}/fsdp/train_fsdp.py --help"
    flags = fit if what.endswith("fit") else start
    if where == "no reader":
        reading, out = os.pipe()
        os.close(reading)
    else:
        out = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-m", what, *flags.split()], cwd=ROOT, env=environment(), text=True,
        stdout=out, stderr=subprocess.PIPE, timeout=100,
    )  # fmt: skip
    os.close(out)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert ("warning: No space" in done.stderr) == (where == "a full disk")


WAIT = """
import os, sys, time, torch
from llm_demo.machine import dist

def slow():
    if os.environ["RANK"] == "0":
        time.sleep(3.5)
    return os.environ["RANK"]

def main():
    world = dist.start()
    if sys.argv[1] == "build":
        print(f"built by {dist.once_per_node(world, slow)}\\n", end="")
    else:
        slow()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    print(f"sum {total.item()}\\n", end="")

dist.run(main)
"""


def test_ranks_wait_for_a_build_that_takes_longer_than_one_operation_may(tmp_path):
    (tmp_path / "wait.py").write_text(WAIT)
    done = torchrun(2, tmp_path / "wait.py", "build", DIST_TIMEOUT_MINUTES="0.04")
    assert sorted(done.stdout.splitlines()) == ["built by 0", "built by 1", "sum 2.0", "sum 2.0"]


def test_a_rank_that_waits_too_long_is_one_line(tmp_path):
    (tmp_path / "wait.py").write_text(WAIT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *launch, tmp_path / "wait.py", "hang"]
    done = run(command, DIST_TIMEOUT_MINUTES="0.04")
    line = "error: rank 1 waited 0.04 minutes for another rank, which hangs or needs longer; DIST_"
    assert line in done.stderr and "RuntimeError" not in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        torch.distributed.DistBackendError("NCCL error in: x\nCuda failure 2 'out of memory'"),
    ],
    ids=["PyTorch", "NCCL"],
)
def test_a_full_gpu_is_one_line_with_advice(error):
    code, line, _ = dist.verdict(error, object, lambda flags: "1. --micro_batch_size")
    assert code == 1 and "is out of GPU memory (" in line and "out of memory" in line
    assert line.endswith("in this order: 1. --micro_batch_size") and "\n" not in line
    other = torch.distributed.DistBackendError("NCCL error in: x\nunhandled system error")
    assert dist.verdict(other, None, None) == (1, "", False)


def test_too_many_open_files_are_one_line():
    error = RuntimeError("[enforce fail at socket.cc:24] socket: Too many open files")
    line = "rank 0: Too many open files: raise the limit of ulimit -n"
    assert dist.verdict(error, None, None) == (1, line, False)
