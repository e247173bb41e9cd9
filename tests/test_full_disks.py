"""Runs whose disk is full, or whose folder is deleted: one line, and nothing saved is lost."""

import contextlib
import json
import os
import resource
import shutil
import subprocess

import numpy as np
import pytest
import torch
from conftest import LAUNCHERS, TINY, python
from safetensors.torch import save_file
from test_checkpoint import make, save
from test_runs import ALL, train  # noqa: F401
from tiny_tokenizer import packs_of

from llm_demo import export
from llm_demo.core.errors import UserError
from llm_demo.job import log, records
from llm_demo.job.files import disk_full
from llm_demo.job.source import load_tokenizer

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


@pytest.fixture
def small(tmp_path):
    """A disk of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder])
    if done.returncode:
        pytest.skip("mounting a small disk takes root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder, tmp_path, disk):
    """Everything that writes much, in a folder with little room: (name, error, what is said)."""
    big, cache = {"a": torch.zeros(1000, 1000)}, folder / "cache"
    checkpoints, rows = make(folder), tmp_path / "rows.jsonl"
    text = "Because it is so. " * 5
    rows.write_text(json.dumps({"prompt": "Why?", "completion": text}) + "\n")
    tokenizer = load_tokenizer(TINY)
    writes = {
        "checkpoint": lambda: checkpoints.save(1, big, checkpoints.log.facts(), wait=True),
        "safetensors": lambda: save_file(big, folder / "x.safetensors"),
        "numpy": lambda: np.save(folder / "x.npy", np.zeros(10**6)),
        "torch": lambda: torch.save(big, folder / "x.pt"),
        "text": lambda: (folder / "x.txt").write_text("x" * 10**7),
        "packs": lambda: packs_of(str(rows), tokenizer, seq_len=64, cache_dir=str(cache)),
    }
    for name, write in writes.items():
        if name == "packs":
            limited = resource.getrlimit(resource.RLIMIT_FSIZE)
            if limited[0] == resource.RLIM_INFINITY:
                cache.mkdir()
                with open(folder / "filler", "wb", buffering=0) as f:
                    with contextlib.suppress(OSError):
                        while f.write(b"x" * 512):
                            pass
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limited[1]))
        with pytest.raises(Exception) as raised:  # noqa: PT011  of many kinds
            write()
        error = raised.value
        yield name, error, str(error) if isinstance(error, UserError) else disk_full(error, disk)
        for left in folder.glob("x*"):
            left.unlink()


def test_a_small_disk_is_called_full(small, tmp_path):
    for name, error, said in fill(small, tmp_path, small):
        assert said and f"No space left on device: {small}" in said, (name, error)
        assert said.count("No space") == 1 and "inline_container" not in said


def test_a_file_over_the_limit_is_called_that(tmp_path):
    (tmp_path / "here").mkdir()
    with limit(300_000):
        found = list(fill(tmp_path / "here", tmp_path, tmp_path))
    for name, error, said in found:
        assert said and "File too large (ulimit -f allows 0." in said, (name, error)
        assert "inline_container" not in said


@pytest.mark.parametrize("kind", ALL)
def test_a_full_disk_under_a_run_is_one_line(kind, train, tmp_path):  # noqa: F811
    """metrics.jsonl grows beyond the limit; --output_dir is named."""
    begin = log.Log.open

    def open_folder(self, step):
        records = begin(self, step)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        return records

    with limit(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(log.Log, "open", open_folder)
        with pytest.raises(UserError, match="--output_dir out: File too large .*: out"):
            train(kind, "--max_steps 40 --save false")


def test_an_export_to_a_full_disk(tmp_path):
    folder = tmp_path / "run"
    save(make(folder if folder.mkdir() else folder), 1)
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "model_of", lambda _: (None, {"a": (10**5,)}, set()))
        patch.setattr(export, "weights_of", lambda _: {"a": (10**5,)})
        patch.setattr(export, "load_tokenizer", lambda _: None)
        patch.setattr(export, "describe", lambda *_: [])
        patch.setattr(export, "read_tensors", lambda _, found: [t.zero_() for t in found.values()])
        with limit(100_000), pytest.raises(UserError, match="cannot write .*out: File too large"):
            export.export(folder / "checkpoints/step_00000001", tmp_path / "out")
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


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("flags", ["--save false", "--save_every 2 --log_every 9"])
def test_a_folder_deleted_under_a_run_is_one_line(flags, kind, train, tmp_path, monkeypatch):  # noqa: F811
    add = records.Records.add

    def deleted(self, step, *rest):
        if step == 2:
            shutil.rmtree(self.log.folder)
        add(self, step, *rest)

    monkeypatch.setattr(records.Records, "add", deleted)
    with pytest.raises(UserError, match="^out is gone: it was deleted or moved during"):
        train(kind, f"--max_steps 4 {flags}")
    assert not (tmp_path / "out").exists()


def test_a_folder_deleted_under_a_launched_run(tmp_path):
    flags = "--seq_len 32 --max_steps 5000 --log_every 1 --save_every 5 "
    flags += "--output_dir out"
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
