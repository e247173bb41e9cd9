"""The bundled model and data have settings of their own; other data or models take one epoch."""

import os
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT, flags_of, no_ranks, printed_flags

SHELLS = ["fsdp/launch_fsdp.sh", "pp/launch_pp.sh"]
SETTINGS = ("TRAIN_JSON", "MODEL", "SEQ_LEN", "MAX_STEPS", "NUM_EPOCHS", "LR", "LOG_EVERY")
FIRST_RUN = {"seq_len", "max_steps", "lr", "log_every"}


@pytest.fixture
def from_shell(tmp_path):
    """from_shell(shell, *flags, **environ): the flags that a launcher gives to the script."""
    return lambda *args, **environ: started(*args, PYTHON=no_ranks(tmp_path), **environ)


def started(shell, *flags, **environ):
    env = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    done = subprocess.run(
        ["bash", str(ROOT / shell), *flags], env={**env, **environ},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return printed_flags(done.stdout)


def from_script(monkeypatch, *flags):
    """The same of the debugger's entry."""
    script = runpy.run_path(str(ROOT / "fsdp/launch_script.py"))
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["launch_script.py", *flags])
        patch.setattr(sys, "path", sys.path.copy())
        patch.setattr(os, "environ", os.environ.copy())
        patch.setattr(runpy, "run_path", lambda *_, **__: seen.extend(sys.argv[1:]))
        script["main"]()
    return flags_of(seen)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_bundled_run_has_its_settings(shell, from_shell, monkeypatch):
    found = from_shell(shell)
    assert found.keys() >= FIRST_RUN
    assert found["train_json"] == str(ROOT / "data/first_run.jsonl")
    ours = from_script(monkeypatch)
    assert {k: found[k] for k in FIRST_RUN} == {k: ours[k] for k in FIRST_RUN}


@pytest.mark.parametrize("flags", [
    ["--train_json", "my.jsonl"], ["--train_json=my.jsonl"], ["--train-json", "my.jsonl"],
    ["--model_name_or_path", "my"], ["--model_name_or_path=my"],
])  # fmt: skip
@pytest.mark.parametrize("shell", SHELLS)
def test_own_data_or_model_takes_one_epoch(shell, flags, from_shell, monkeypatch):
    assert not FIRST_RUN & from_shell(shell, *flags).keys()
    assert not FIRST_RUN & from_script(monkeypatch, *flags).keys()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("environ", [{"TRAIN_JSON": "my.jsonl"}, {"MODEL": "my/model"}])
def test_the_same_by_the_environment(shell, environ, from_shell):
    assert not FIRST_RUN & from_shell(shell, **environ).keys()
    found = from_shell(shell, MAX_STEPS="7", SEQ_LEN="512", **environ)
    assert (found["max_steps"], found["seq_len"]) == ("7", "512")


@pytest.mark.parametrize("shell", SHELLS)
def test_what_is_asked_for_beats_the_bundled_settings(shell, from_shell, monkeypatch):
    found = from_shell(shell, "--max_steps", "5", LR="1e-4", SEQ_LEN="")
    assert (found["max_steps"], found["lr"]) == ("5", "1e-4")
    assert "seq_len" not in found  # an empty setting leaves the choice to the script
    for flags, environ in ((["--num_epochs", "2"], {}), ([], {"NUM_EPOCHS": "2"})):
        found = from_shell(shell, *flags, **environ)
        assert "max_steps" not in found and found["num_epochs"] == "2" and "seq_len" in found
    for flags, environ in (
        (["--num_epochs", "2", "--max_steps", "9"], {}),
        ([], {"NUM_EPOCHS": "2", "MAX_STEPS": "9"}),
    ):
        found = from_shell(shell, *flags, **environ)
        assert (found["max_steps"], found["num_epochs"]) == ("9", "2")
    assert "max_steps" not in from_script(monkeypatch, "--num_epochs", "2")
