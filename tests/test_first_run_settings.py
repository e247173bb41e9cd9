"""The bundled model and data have settings of their own; other data or models take one epoch."""

import os
import runpy
import subprocess

import pytest
from conftest import LAUNCHERS, ROOT, flags_of, no_ranks, printed_flags

from llm_demo.launch import settings

SETTINGS = ("TRAIN_JSON", "MODEL", "SEQ_LEN", "MAX_STEPS", "NUM_EPOCHS", "LR", "LOG_EVERY")
FIRST_RUN = {"seq_len", "max_steps", "lr", "log_every"}


def from_script(*flags):
    """The flags that the debugger's entry gives."""
    script = runpy.run_path(str(ROOT / "fsdp/launch_script.py"))
    return flags_of(script["launcher_command"](list(flags))[1:])


@pytest.mark.parametrize("kind", ["fsdp", "pp"])
def test_the_bundled_run_has_its_settings(kind, tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    done = subprocess.run(
        ["bash", LAUNCHERS[kind]], env={**env, "PYTHON": no_ranks(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = printed_flags(done.stdout)
    assert found.keys() >= FIRST_RUN
    assert found["train_json"] == str(ROOT / "data/first_run.jsonl")
    ours = from_script()
    assert {k: found[k] for k in FIRST_RUN} == {k: ours[k] for k in FIRST_RUN}


def flags_for(kind, *given, **environ):
    """The flags that a launcher gives to its script."""
    script, defaults = settings.read_launcher(LAUNCHERS[kind])
    return flags_of(settings.launcher_flags(script, defaults, environ, list(given))[0])


@pytest.mark.parametrize("kind", ["fsdp", "pp"])
@pytest.mark.parametrize("words", [
    "--train_json my.jsonl", "--train_json=my.jsonl", "--train-json my.jsonl",
    "--model_name_or_path my", "TRAIN_JSON=my.jsonl", "MODEL=my/model",
])  # fmt: skip
def test_own_data_or_model_takes_one_epoch(kind, words):
    if words.startswith("--"):
        assert not FIRST_RUN & flags_for(kind, *words.split()).keys()
        assert not FIRST_RUN & from_script(*words.split()).keys()
        return
    environ = dict([words.split("=")])
    assert not FIRST_RUN & flags_for(kind, **environ).keys()
    found = flags_for(kind, MAX_STEPS="7", SEQ_LEN="512", **environ)
    assert (found["max_steps"], found["seq_len"]) == ("7", "512")


@pytest.mark.parametrize("kind", ["fsdp", "pp"])
def test_what_is_asked_for_beats_the_bundled_settings(kind):
    found = flags_for(kind, "--max_steps", "5", LR="1e-4", SEQ_LEN="")
    assert (found["max_steps"], found["lr"]) == ("5", "1e-4")
    assert "seq_len" not in found  # an empty setting leaves the choice to the script
    for found in (flags_for(kind, "--num_epochs", "2"), flags_for(kind, NUM_EPOCHS="2")):
        assert "max_steps" not in found and found["num_epochs"] == "2" and "seq_len" in found
    found = flags_for(kind, NUM_EPOCHS="2", MAX_STEPS="9")
    assert (found["max_steps"], found["num_epochs"]) == ("9", "2")


def batch_of(kind, processes, *flags, **environ):
    """(micro-batch size, accumulation, what is said) of a launcher on so many processes."""
    script, defaults = settings.read_launcher(LAUNCHERS[kind])
    values = {name: environ.get(name, value) for name, value in defaults.items()}
    words, first_run = settings.launcher_flags(script, values, environ, list(flags))
    command, line = [str(script), *words], ""
    parsed = settings.check_flags(command)
    parsed.check_processes(processes)
    if first_run:
        command, line = settings.with_rows_of_two(command, parsed, processes)
        parsed = settings.check_flags(command)
    return parsed.micro_batch_size, parsed.grad_accum_steps, line


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_a_step_of_the_bundled_run_has_16_rows_on_any_number_of_processes(kind):
    expected = {1: (4, 4), 2: (4, 2), 4: (4, 1), 8: (2, 1), 16: (1, 1)}
    assert {n: batch_of(kind, n)[:2] for n in expected} == expected
    assert not any(batch_of(kind, n)[2] for n in expected)
    expected = {3: (3, 2, 18), 5: (4, 1, 20), 6: (3, 1, 18), 9: (2, 1, 18), 20: (1, 1, 20)}
    for n, (micro, accum, rows) in expected.items():
        line = f"batch: {rows} rows a step, not 16, which {n} processes can't share equally"
        assert batch_of(kind, n) == (micro, accum, line)


def test_the_debuggers_entry_has_the_batch_of_one_process():
    for flags, accum in (((), "4"), (("--train_json", "my.jsonl"), "2")):
        ours = from_script(*flags)
        assert (ours["micro_batch_size"], ours["grad_accum_steps"]) == ("4", accum)
