import atexit
import contextlib
import functools
import gc
import glob
import hashlib
import importlib
import json
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from import_once import ALWAYS

from llm_demo.flags.args import type_of

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models/qwen3-tiny"
SCRIPTS = {
    "fsdp": "fsdp/train_fsdp.py", "pp": "pp/pp_train.py",
    "zero": "zero/train_zero.py", "fsdp_pp": "fsdp_pp/train_fsdp_pp.py",
}  # fmt: skip
LAUNCHERS = {kind: ROOT / f"{kind}/launch_{kind}.sh" for kind in SCRIPTS}
# the environment of a run's only process
ALONE = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
ZERO = {  # flags of each configuration of ZeRO
    f"zero{name}": ["--deepspeed_config", str(ROOT / f"zero/ds_zero{name}.json")]
    for name in ("1", "2", "3", "2_offload", "3_offload")
}


# SHARE_GPU=N: tests see N GPUs, all of them the first. For tests that start ranks by torchrun; what
# they time means nothing.
SHARED = int(os.environ.get("SHARE_GPU", "0"))
if SHARED:
    import torch

    torch.cuda.init()
    torch.cuda.device_count = lambda: SHARED


def environment(**more):
    """This process's environment, the project's modules in reach, one thread for a process."""
    one_gpu = str(ROOT / "tests/one_gpu") if SHARED else None
    path = filter(None, [one_gpu, str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **more}


@functools.cache
def python(**env) -> str:
    """What stands for the interpreter where a test doesn't say `fresh`: see import_once.py.

    env: what packages read while they are imported, where it differs from this process's.
    FRESH=1 in the environment: the interpreter itself, everywhere."""
    # A process that has looked for GPUs can't be forked, and macOS has no pidfd.
    if os.environ.get("FRESH") == "1" or not hasattr(os, "pidfd_open") or has_gpu():
        return sys.executable
    import fcntl

    shared = Path(os.environ["STAND_INS"])
    folder = shared / hashlib.sha256(repr(sorted(env.items())).encode()).hexdigest()[:8]
    with open(shared / "lock", "w") as lock:  # another worker may ask for the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            serve(folder / "python", shared / "owner", env)
    return str(folder / "python")


def serve(stand_in: Path, owner: Path, env: dict) -> None:
    """Make a stand-in and start what it asks, which ends with the process that made `owner`."""
    interpreter, script = map(shlex.quote, (sys.executable, str(ROOT / "tests/import_once.py")))
    stand_in.write_text(f'#!/bin/sh\nexec {interpreter} -IS {script} ask "$0" "$@"\n')
    stand_in.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{stand_in}.socket")
    listener.listen(64)  # who asks before the imports are done waits
    with listener, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(owner))
        sockets = [listener.fileno(), connection.fileno()]
        subprocess.Popen(
            [sys.executable, ROOT / "tests/import_once.py", "serve", *map(str, sockets)],
            env=environment(**ALWAYS, **env), pass_fds=sockets, start_new_session=True,
        )  # fmt: skip


def pytest_configure(config):
    """Make a folder for stand-ins, which xdist's workers share. Their servers end at its end."""
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.mkdtemp()  # not pytest's: the path of a socket must be short
    os.environ["STAND_INS"] = folder
    owner = socket.socket(socket.AF_UNIX)
    owner.bind(f"{folder}/owner")
    owner.listen(64)
    owner.setblocking(False)

    def end():
        with contextlib.suppress(BlockingIOError):
            while True:
                server, _ = owner.accept()
                server.shutdown(socket.SHUT_WR)
                server.settimeout(30)
                server.recv(1)  # until it has ended
        shutil.rmtree(folder)

    atexit.register(end)


def free_port() -> int:
    """A port for nodes that meet in a moment: below those that outgoing connections get, on Linux
    from 32768, which could take it before."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), 20):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("20 ports are busy")


def has_gpu() -> bool:
    devices = "/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg"
    if sys.platform == "linux" and not any(map(glob.glob, devices)):
        return False
    import torch  # not above: xdist's first process needs it for nothing else

    return torch.cuda.is_available()


def processes_with(**env):
    """Processes that have these in their environment. A launcher that `python()` started is no
    parent of its ranks."""
    found = []
    for p in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
            if env.items() <= p.environ().items():
                found.append(p)
    return found


def no_ranks(folder: Path) -> str:
    """A stand-in for the interpreter: a launcher prints its command, and starts no process."""
    stand_in = folder / "no_ranks"
    code = (
        "import sys; sys.argv[:3] = ['launch']; from llm_demo.launch import __main__; "
        "__main__.launch = lambda asked: __main__.show(asked.words); sys.exit(__main__.main())"
    )
    interpreter = shlex.quote(sys.executable)
    ask = f'[ "$1" = -c ] && exec {interpreter} "$@"'
    stand_in.write_text(f'#!/bin/sh\n{ask}\nexec {interpreter} -c "{code}" "$@"\n')
    stand_in.chmod(0o755)
    return str(stand_in)


def slow(*values):
    """A case for -m slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def script_of(kind):
    """The module of a training script."""
    return importlib.import_module(SCRIPTS[kind].removesuffix(".py").replace("/", "."))


def flags_of(words):
    """{name: the last value} of flags such as --name value and --name=value."""
    found = {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
        else:
            value = word
        found[name] = value
    return found


def printed_flags(output):
    """The same of the command that a launcher prints before it runs it."""
    (line,) = (line for line in output.splitlines() if line.startswith("+ "))
    return flags_of(shlex.split(line)[5:])


def command_line(monkeypatch, *words):
    """Until the test ends, this process was started with these words."""
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])


def run_alone(monkeypatch, script, *flags):
    """A training script's main() in this process, the only one of its run."""
    import torch.distributed as dist

    command_line(monkeypatch, script.__file__, *flags)
    for name, value in ALONE.items():  # set here, so that they are gone afterwards
        monkeypatch.setenv(name, str(value))
    try:
        script.main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def logged(run, key="train/loss"):
    """The records of a run's metrics.jsonl that have this key."""
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if key in record]


@contextlib.contextmanager
def refused(message, error=None):
    """What is done inside ends in an error, of one line, that matches `message`."""
    from llm_demo.core.errors import UserError

    with pytest.raises(error or UserError, match=message) as raised:
        yield raised
    assert "\n" not in str(raised.value)


def args_with(**given):
    """The flags of a script, these given."""
    args = type_of()()
    vars(args).update(given)
    return args


def run(command, cwd=ROOT, timeout=240, fresh=False, **env):
    """Run a command to its end; returns the CompletedProcess, output as text.

    sys.executable in it, or as PYTHON, starts with everything imported. fresh: as a user's does."""
    env = environment(**env)
    interpreter = sys.executable if fresh else python()
    command = [interpreter if c == sys.executable else str(c) for c in command]
    if env.get("PYTHON") == sys.executable:
        env["PYTHON"] = interpreter
    how = {"cwd": cwd, "env": env, "capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run(command, **how)


def torchrun(processes: int, script, *args, **options):
    """Run a script in so many real processes; fails the test unless it ends well."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = run([sys.executable, *launch, script, *args], FORKS_ONLY="1", **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "FutureWarning: `torch.distributed" not in done.stderr, done.stderr[-3000:]
    return done


def train_cases(folder, kind, processes, cases, watched=False, more=None):
    """Run a script with the flags of each case {name: flags} in one set of processes; case NAME
    writes to folder/NAME, and if watched the records of rank R to folder/NAME.out.R.pt.

    more: {name: what else parity_worker.py is to do}."""
    listed = []
    for name, flags in cases.items():
        argv = [*map(str, flags), "--output_dir", str(folder / name)]
        case = {"argv": argv, "out": str(folder / f"{name}.out"), "quiet": not watched}
        listed.append(case | (more or {}).get(name, {}))
    file = folder / f"{kind}{processes}.json"
    file.write_text(json.dumps(listed))
    return torchrun(processes, ROOT / "tests/parity_worker.py", kind, file, timeout=1200)


def assert_same_tensors(one, other):
    """Two checkpoints are the same to the bit; -> the tensors."""
    from bench.checkpoints import tensors

    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    assert all(t.equal(b[name]) for name, t in a.items())
    return a


def smaller_tokenizer(folder):
    """A folder with the bundled model's files, for the 512 most frequent of its 4,096 tokens: the
    head takes most of a tiny model's time, in 16 bits on a CPU nearly all of it."""
    size = 512
    shutil.copytree(TINY, folder)
    config = json.loads((TINY / "config.json").read_text()) | {"vocab_size": size}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    *_, think, end = added = tokenizer["added_tokens"]
    think["id"], end["id"] = size - 2, size - 1
    bpe = tokenizer["model"]
    kept = {token: i for token, i in bpe["vocab"].items() if i < size - 2}
    merges = [pair for pair in bpe["merges"] if "".join(pair) in kept]
    tokenizer |= {"added_tokens": added, "model": {**bpe, "vocab": kept, "merges": merges}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def smaller_model(folder, **changes):
    """The same with a configuration of fewer and smaller blocks, or with other changes."""
    config = json.loads((smaller_tokenizer(folder) / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def pytest_xdist_auto_num_workers(config):
    """-n auto: two files at a time, since most tests wait for processes. GPUs are not shared."""
    return 0 if has_gpu() else 2


# Files that take minutes go first, so that no worker has one left when the other is done.
LONG = (
    "test_parity", "test_moe", "test_end_to_end", "test_resume", "test_gemma4", "test_lora",
    "test_four_bits_experts", "test_qwen35", "test_four_bits", "test_lora_experts", "test_sequence",
    "test_ends", "test_fsdp_pp", "test_first_run", "test_measure", "test_nodes", "test_families",
    "test_check", "test_replicas", "test_fit", "test_launch", "test_bench", "test_proof",
    "test_compiling", "test_activations_on_host", "test_runs", "test_adapter", "test_engine",
    "test_setup", "test_host_adamw", "test_errors", "test_memory", "test_fsdp2", "test_next_steps",
    "test_several_nodes", "test_lora_memory", "test_fp8_export", "test_tensor",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.path.stem
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter):
    """Say how many of the bad inputs tried got one clear line (tests record how many they try)."""
    tried = {
        outcome: sum(
            count
            for report in terminalreporter.stats.get(outcome, ())
            for name, count in getattr(report, "user_properties", ())
            if name == "bad inputs"
        )
        for outcome in ("passed", "failed")
    }
    if any(tried.values()):
        clear = f"{tried['passed']} clear / {sum(tried.values())} tried"
        terminalreporter.write_line(f"bad input: {clear}")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Packs and probes of the tests go to a folder of their own, PyTorch takes one thread, and
    garbage is collected less often."""
    import torch

    torch.set_num_threads(1)  # small models: more threads wait for one another
    gc.freeze()  # no collection goes through what is imported
    gc.set_threshold(50_000, 20, 10)
    os.environ["LLM_DEMO_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def ended(monkeypatch):
    """The exit codes with which programs of this process would have ended."""
    codes = []
    monkeypatch.setattr("llm_demo.machine.dist.os._exit", codes.append)
    return codes


@pytest.fixture(scope="module")
def alone():
    """This process is a world of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
