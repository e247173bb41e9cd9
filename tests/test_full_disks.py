"""Runs whose disk is full, or whose folder is deleted: one line, and nothing saved is lost."""

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import LAUNCHERS, python, smaller_model
from safetensors.torch import save_file
from test_checkpoint import make
from test_export import trained
from test_runs import train  # noqa: F401

from llm_demo.core.errors import UserError
from llm_demo.machine.files import disk_full
from llm_demo.run.export_run import export

pytestmark = pytest.mark.usefixtures("alone")


@contextlib.contextmanager
def limit(size=None):
    """As `ulimit -f`, and undone afterwards: pytest's own output may go to a file. None: undo only,
    for a limit that is set inside."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_over_the_limit_is_called_that(tmp_path):
    """By the writers that write much."""
    big = {"a": torch.zeros(1000, 1000)}
    checkpoints = make(tmp_path)
    for write in (
        lambda: checkpoints.save(1, big, checkpoints.log.facts(), wait=True),
        lambda: save_file(big, tmp_path / "x.safetensors"),
        lambda: np.save(tmp_path / "x.npy", np.zeros(10**6)),
        lambda: torch.save(big, tmp_path / "x.pt"),
    ):
        with limit(300_000), pytest.raises(Exception) as raised:  # noqa: PT011  of many kinds
            write()
        error = raised.value
        said = str(error) if isinstance(error, UserError) else disk_full(error, tmp_path)
        assert re.search(f"(File too large|or ulimit -f is too low): {tmp_path}", said)


def test_a_full_disk_under_a_run_is_one_line(train, monkeypatch):  # noqa: F811
    """metrics.jsonl grows beyond the limit; --output_dir is named."""
    nothing = lambda *_: None  # noqa: E731
    writer = SimpleNamespace(add_scalar=nothing, add_text=nothing, flush=nothing, close=nothing)

    def open_writer(_):  # as the run's folder is opened
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        return writer

    tensorboard = SimpleNamespace(SummaryWriter=open_writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    with limit(), pytest.raises(UserError, match="--output_dir out: File too large: out"):
        train("fsdp", "--max_steps 40 --save false --report_to tensorboard")


def test_an_export_to_a_full_disk(tmp_path):
    folder = trained(tmp_path / "run", "tied")[1]
    with limit(1_000_000), pytest.raises(UserError, match="cannot write .*out: File too large"):
        export(folder / "checkpoints/step_00000007", tmp_path / "out", "fp32")
    assert not (tmp_path / "out").exists()


def test_other_errors_are_not_called_a_full_disk():
    for error in (OSError(2, "No such file"), RuntimeError("shape"), ValueError("1 requested")):
        assert disk_full(error) is None
    try:
        raise OSError(28, "No space left on device", "/a/file")
    except OSError as e:
        outer = RuntimeError("a library's own words")
        outer.__cause__ = e
    assert disk_full(outer) == "No space left on device: /a/file"


# ---------------------------------------------------------------- a folder deleted under a run


def test_a_folder_deleted_under_a_launched_run(tmp_path):
    smaller_model(tmp_path / "tiny")
    flags = "--seq_len 32 --max_steps 50000 --log_every 1 --save_every 50 --eval_json none "
    flags += "--output_dir out --model_name_or_path tiny"
    process = subprocess.Popen(
        ["bash", LAUNCHERS["pp"], *flags.split()], cwd=tmp_path, text=True,
        env={**os.environ, "PYTHON": python(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("step 3/"):
            shutil.rmtree(tmp_path / "out")
            break
    _, err = process.communicate(timeout=60)
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert process.returncode == 2 and "Traceback" not in err, err
    assert errors[0].startswith("error: out is gone: it was deleted") and len(errors) == 1, err
    assert not (tmp_path / "out").exists()


def test_a_resume_of_an_ended_run_writes_its_model_files_again(train, tmp_path):  # noqa: F811
    out = train("fsdp", "--max_steps 1")
    checkpoint = out / "checkpoints/step_00000001"
    (out / "model/config.json").unlink()
    with pytest.raises(UserError, match="model/config.json is missing: resume the run in"):
        export(checkpoint, tmp_path / "hf")
    train("fsdp", "--max_steps 1 --resume auto")
    export(checkpoint, tmp_path / "hf")
