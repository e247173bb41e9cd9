"""The launchers, with small stand-ins for the training scripts: settings, failures, signals."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ALONE, ROOT, SCRIPTS, environment, flags_of, run, slow

from llm_demo.launch.ranks import exit_code_of

KINDS = ("fsdp", "pp")

SHOW = """
import json, os, sys
names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR OMP_NUM_THREADS CUDA_VISIBLE_DEVICES".split()
shown = {"argv": sys.argv[1:], "cwd": os.getcwd(), **{n: os.environ.get(n) for n in names}}
sys.stdout.write(json.dumps(shown) + "\\n")
"""

# Rank 1 ends as told once rank 0 is there. When it is killed, rank 0 is deaf to SIGTERM, as a rank
# with a handler of its own is in a collective.
FAIL = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
if sys.argv[2] == "kill":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / os.environ["RANK"]).write_text(str(os.getpid()))
while len(list(here.iterdir())) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    print("error: --seq_len 1: too small", file=sys.stderr)
    sys.exit(int(sys.argv[2]))
time.sleep(60)
"""


def launch(script, *args, **options):
    return run([sys.executable, "-m", "llm_demo.launch", script, *args], **options)


def shown(output):
    """What each rank's SHOW printed, by rank."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["RANK"] or "")


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "stand_in.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def repo(tmp_path):
    """A copy of the launchers, where SHOW stands for both training scripts."""
    repo = tmp_path / "a repo"
    shutil.copytree(ROOT / "llm_demo", repo / "llm_demo", ignore=lambda *_: ["__pycache__"])
    for folder in ("fsdp", "pp", "data", "models/qwen3-tiny"):
        (repo / folder).mkdir(parents=True)
    files = ["launch_common.sh", "fsdp/launch_fsdp.sh", "pp/launch_pp.sh", "fsdp/launch_script.py"]
    files += ["fsdp/flags.py", "pp/flags.py", "pp/ds_pp_2gpus.json"]
    files += ["data/first_run.jsonl", "models/qwen3-tiny/config.json"]
    for name in files:
        shutil.copy(ROOT / name, repo / name)
    for kind in KINDS:
        (repo / SCRIPTS[kind]).write_text(SHOW)
    return repo


def run_shell(repo, kind, *args, **options):
    command = ["bash", repo / f"{kind}/launch_{kind}.sh", *args]
    done = run(command, **{"cwd": repo, "PYTHON": sys.executable, **options})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_flag_beats_the_environment_which_beats_the_defaults(repo, tmp_path, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("my.jsonl", "held.jsonl"):
        (elsewhere / name).write_text('{"prompt": "a", "completion": "b"}')
    environ = {"LR": "1e-4", "SEQ_LEN": "512", "PACK_SEQUENCES": "false", "EVAL_JSON": "held.jsonl"}
    given = "--lr", "2e-5", "--train_json", "my.jsonl"
    output = run_shell(repo, kind, *given, cwd=elsewhere, **environ)
    ranks = shown(output)
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert {rank["cwd"] for rank in ranks} == {str(elsewhere)}  # my.jsonl is the user's
    assert flags_of(ranks[0]["argv"]) == {
        "model_name_or_path": str(repo / "models/qwen3-tiny"),
        "train_json": "my.jsonl",
        "eval_json": "held.jsonl",
        "seq_len": "512",
        "micro_batch_size": "4",
        "grad_accum_steps": "2" if kind == "fsdp" else "4",
        "lr": "2e-5",
        "pack_sequences": "false",
    }
    assert ranks[0]["argv"] == ranks[1]["argv"]
    command = next(line for line in output.splitlines() if line.startswith("+ "))
    assert f"{SCRIPTS[kind]}' --" in command and command.endswith("--train_json my.jsonl")


@pytest.mark.parametrize("program", ["no torch", "/bin/true", "absent"])
def test_a_program_that_is_no_python_with_torch_is_named(program, repo, tmp_path, record_property):
    record_property("bad inputs", 1)
    bare = tmp_path / "no torch"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    bare.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run(["bash", repo / "fsdp/launch_fsdp.sh"], cwd=tmp_path, PYTHON=program, PATH=path)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: PYTHON={program} is not a Python with torch: name one, install torch there, or "
        "unset PYTHON to use .venv\n"
    )


def test_a_python_that_does_not_start_says_why(repo, record_property):
    record_property("bad inputs", 1)
    broken = {"PYTHON": sys.executable, "PYTHONIOENCODING": "junk"}
    done = run(["bash", repo / "fsdp/launch_fsdp.sh"], fresh=True, **broken)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: PYTHON={sys.executable} does not start: Fatal Python ")
    assert "LookupError: unknown encoding: junk" in done.stderr


def test_the_debugger_entry_takes_the_launchers_defaults(repo):
    launcher = flags_of(shown(run_shell(repo, "fsdp"))[0]["argv"])
    stale = {**dict.fromkeys(ALONE, "stale"), "PYTHONPATH": str(repo)}
    command = [sys.executable, repo / "fsdp/launch_script.py", "--seed", "7"]
    done = run(command, cwd=repo, fresh=True, **stale)
    assert done.returncode == 0, done.stderr
    (line,) = shown(done.stdout)
    assert (line["RANK"], line["WORLD_SIZE"], line["LOCAL_RANK"]) == ("0", "1", "0")
    single = flags_of(line["argv"])
    assert single.pop("seed") == "7"
    # The same rows in a step: 1 process x 4 micro-batches instead of 2 x 2.
    assert (single.pop("grad_accum_steps"), launcher.pop("grad_accum_steps")) == ("4", "2")
    assert single == launcher


@pytest.mark.parametrize("gpus", ["1,0", ""])
def test_each_rank_is_told_its_place(script, gpus):
    # The order of CUDA_VISIBLE_DEVICES is the user's, and stale variables of another run are not.
    stale = {"RANK": "5", "MASTER_ADDR": "nowhere.invalid"}
    result = launch(script(SHOW), CUDA_VISIBLE_DEVICES=gpus, NPROC_PER_NODE="2", **stale)
    ranks = shown(result.stdout)
    for i, rank in enumerate(ranks):
        assert (rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"]) == (str(i), str(i), "2")
        assert (rank["MASTER_ADDR"], rank["CUDA_VISIBLE_DEVICES"]) == ("127.0.0.1", gpus)
        assert rank["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert len(ranks) == 2 and result.stderr == ""


# Runs a training script, and notes where its process and the launcher listen. If told to, rank 1
# ends in the first attempt.
LISTENS = """
import os, pathlib, psutil, runpy, sys, threading
file, *sys.argv = sys.argv[1:]
found, done = set(), threading.Event()
processes = [psutil.Process(), psutil.Process(int(os.environ["LLM_DEMO_PARENT"]))]
def watch():
    while not done.wait(0.02):
        for p in processes:
            sockets = p.net_connections("inet")
            found.update(s.laddr.ip for s in sockets if s.status == "LISTEN")
threading.Thread(target=watch, daemon=True).start()
runpy.run_path(sys.argv[0], run_name="__main__")
done.set()
shown = [os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"], *found]
pathlib.Path(file + os.environ["RANK"]).write_text(" ".join(shown))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs rights to read sockets elsewhere")
@pytest.mark.parametrize("kind", KINDS)
def test_one_node_listens_on_loopback_alone(kind, script, tmp_path):
    flags = f"--train_json {ROOT}/data/sft_en.jsonl --eval_json none --seq_len 32 --dry_run "
    flags += f"--grad_accum_steps 2 --output_dir {tmp_path}/run --resume auto"
    command = [tmp_path / "rank", ROOT / SCRIPTS[kind], *flags.split()]
    done = launch(script(LISTENS), *command, NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for rank in range(2):
        found = (tmp_path / f"rank{rank}").read_text().split()
        assert found == ["lo", "lo", "127.0.0.1"]


def test_a_process_alone_listens_on_loopback():
    code = (
        "import os, psutil; from llm_demo.machine.dist import start; start(); "
        "print(*[s.laddr.ip for s in psutil.Process().net_connections('inet')]); "
        "print(os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME'])"
    )
    done = run([sys.executable, "-c", code], NCCL_SOCKET_IFNAME="=lo")
    assert done.returncode == 0, done.stderr
    addresses, names = done.stdout.splitlines()
    assert set(addresses.split()) == {"127.0.0.1"} and names == "lo =lo"  # what is set is kept


def test_a_busy_port_is_one_line_at_once(script, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('too late: torch takes a second')")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        paths = f"{tmp_path}:{ROOT}"
        result = launch(script(SHOW), MASTER_PORT=str(port), PYTHONPATH=paths)
    assert result.returncode == 2
    expected = f"error: port {port} is busy on this machine: give another MASTER_PORT\n"
    assert (result.stdout, result.stderr) == ("", expected)


@pytest.mark.parametrize(
    "environ, words",
    [
        ({"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"},
         "NODE_RANK=2: must be below NNODES=2"),
        ({"LOGLEVEL": "JUNK"}, "LOGLEVEL in the environment: Unknown level: 'JUNK'"),
        ({"TORCH_LOGS": "junk"}, "TORCH_LOGS in the environment: Invalid log settings: junk, must"),
    ],
)  # fmt: skip
def test_settings_that_cant_work_are_named(script, environ, words, record_property):
    record_property("bad inputs", 1)
    result = launch(script(SHOW), fresh="LOGLEVEL" in environ, **environ)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {words}") and result.stderr.count("\n") == 1


def test_a_missing_script_is_named(tmp_path):
    result = launch(tmp_path / "none.py")
    assert (result.returncode, result.stderr) == (2, f"error: no script {tmp_path / 'none.py'}\n")


@pytest.mark.parametrize(
    "how, code, last_line",
    [
        ("kill", 137, "error: rank 1 died of SIGKILL: out of memory, or killed by hand"),
        ("2", 2, "error: --seq_len 1: too small"),  # the rank's own words, and no traceback below
    ],
)
def test_one_dead_rank_ends_all_within_ten_seconds(script, tmp_path, how, code, last_line):
    (tmp_path / "pids").mkdir()
    ranks = {"fresh": True, "NPROC_PER_NODE": "2"}
    result = launch(script(FAIL), tmp_path / "pids", how, **ranks)
    seconds = time.time() - max(path.stat().st_mtime for path in (tmp_path / "pids").iterdir())
    pids = [int(path.read_text()) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)
    assert seconds < 10
    assert result.returncode == code
    lines = [line for line in result.stderr.splitlines() if line != "error: --seq_len 1: too small"]
    assert lines == ([] if how == "2" else [last_line])
    assert result.stderr.splitlines()[-1] == last_line


def test_the_rank_that_was_killed_is_named_not_those_it_left_behind(capsys):
    assert exit_code_of({0: 1, 1: 1, 2: -signal.SIGSEGV}) == 139
    assert capsys.readouterr().err == "error: rank 2 died of SIGSEGV\n"
    assert exit_code_of({3: 1, 5: 2}) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["SIGTERM", slow("SIGINT")])
def test_a_signal_to_the_launcher_leaves_no_process(repo, name):
    (repo / SCRIPTS["fsdp"]).write_text(
        "import os, sys, time; sys.stdout.write(f'{os.getpid()}\\n'); time.sleep(60)"
    )
    process = subprocess.Popen(
        ["bash", repo / "fsdp/launch_fsdp.sh"], cwd=repo, text=True,
        env=environment(NPROC_PER_NODE="2", PYTHON=sys.executable, PYTHONPATH=str(repo)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    pids = []
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        pids += [int(line)] if line.strip().isdecimal() else []
    process.send_signal(signal.Signals[name])
    _, stderr = process.communicate(timeout=60)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert process.returncode == 128 + signal.Signals[name]
    assert stderr.splitlines()[-1] == f"error: stopped by {name}"


def test_llm_demo_starts_each_command_by_its_name(tmp_path):
    """From any folder, and without torch until it is known what runs."""
    text = (ROOT / "pyproject.toml").read_text()
    module, function = re.search(r'^llm-demo = "(.+):(.+)"$', text, re.M).groups()
    code = f"import sys; from {module} import {function}; 'torch' in sys.modules and 1 / 0; "
    names = (*SCRIPTS, "fit", "check", "chat", "evaluate", "export", "report")

    def start(*words):
        command = [sys.executable, "-c", f"{code}{function}()", *words]
        return run(command, cwd=tmp_path, fresh=True)

    about = start("--help")
    assert about.stdout == start().stdout and all(name in about.stdout for name in names)
    done = start("fits")
    assert done.returncode == 2 and done.stdout == ""
    known = done.stderr.removeprefix("error: llm-demo has no command 'fits'; there are ")
    assert {*known.strip().split(", ")} == {*names}
    for name in names:
        done = start(name, "--help")
        assert done.returncode == 0, name
        assert f"llm_demo.{name} " in done.stdout or f"{name}/launch_{name}.sh" in done.stdout
