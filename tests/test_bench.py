"""The benchmark command: rows that work, rows that fail, going on, and the tables in the README."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, run

from bench import run as bench
from bench import table
from llm_demo.args import less_memory, parse_args
from llm_demo.dist import run as run_main


def command(results, *flags):
    script = (
        "import sys, pathlib; from bench import run; "
        f"run.RESULTS = pathlib.Path({str(results)!r}); sys.exit(run.main())"
    )
    return [sys.executable, "-c", script, *flags]


def test_smoke_then_resume(tmp_path):
    """Both launchers, full rows and packed documents; a row that is there is not run again."""
    done = run(command(tmp_path, "--preset", "smoke"))
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted((tmp_path / "smoke").glob("*.json"))
    assert len(files) == 2
    for file in files:
        result = json.loads(file.read_text())
        assert result["status"] == "ok" and result["env"]["versions"]["torch"]
        assert result["summary"]["median_step_ms"] > 0
        assert str(tmp_path) not in result["command"] and str(ROOT) not in result["command"]
        fill = result["summary"]["median_toks_per_s"] / result["summary"]["median_slots_per_s"]
        assert fill == 1 if result["row"]["data"] == "full" else 0.9 < fill < 1
    again = run(command(tmp_path, "--preset", "smoke", "--resume"))
    assert again.stdout.count("done before") == 2
    refused = run([*command(tmp_path, "--preset", "smoke")])
    assert refused.returncode != 0 and "--resume or --overwrite" in refused.stderr
    cells = table.line_of(json.loads(files[0].read_text()))
    assert len(cells) == len(table.HEAD)


def test_a_row_that_fails_is_a_row_that_says_so(tmp_path):
    flags = ["--engines", "fsdp", "--model", "models/qwen3-tiny", "--flags=--oops"]
    done = run(command(tmp_path, *flags, "--out", "x"))
    assert done.returncode == 1 and "unknown argument --oops" in done.stdout
    (file,) = (tmp_path / "x").glob("*.json")
    result = json.loads(file.read_text())
    assert result["status"] == "failed" and result["error"].startswith("error: unknown")
    assert table.line_of(result)[6] == "failed"


def test_ctrl_c_ends_the_row_and_its_processes(tmp_path):
    flags = ["--engines", "fsdp", "--model", "models/qwen3-tiny", "--steps", "100000"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = command(tmp_path, *flags, "--seq_len", "64")
    bench_run = subprocess.Popen(
        script, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells' & ignores it
    )  # fmt: skip
    time.sleep(8)
    children = subprocess.run(["pgrep", "-f", "train_fsdp.py.*100000"], capture_output=True).stdout
    bench_run.send_signal(signal.SIGINT)
    bench_run.communicate(timeout=40)
    assert bench_run.returncode != 0 and children.split()
    time.sleep(1)
    assert not subprocess.run(["pgrep", "-f", "train_fsdp.py.*100000"], capture_output=True).stdout
    assert not list(tmp_path.glob("*/*.json"))


def test_grids_and_names():
    rows = {}
    for preset, listed in bench.PRESETS.items():
        names = [bench.name_of({**bench.DEFAULTS, **row}) for row in listed]
        assert len(set(names)) == len(names), preset
        rows[preset] = names
    assert len(rows["seed"]) == 18  # nine rows, two engines
    base = {**bench.DEFAULTS, "flags": "--schedule dualpipev", "env": "NCCL_P2P_DISABLE=1"}
    name = bench.name_of({**base, "engine": "pp", "ckpt": True})
    assert name == "pp-qwen3-0.6b-s1024-m1-ga1-bf16-ckpt-schedule-dualpipev-NCCL_P2P_DISABLE-1"
    # what the pipeline and FSDP are compared on: the same tokens a step on two GPUs
    for preset in ("teff", "no_p2p"):
        for pp, fsdp in zip(*[iter(bench.PRESETS[preset])] * 2, strict=True):
            steps = [row["micro"] * row["ga"] for row in (pp, fsdp)]
            assert steps[0] == 2 * steps[1]


def test_the_readmes_tables_are_those_of_the_results():
    text = (ROOT / "README.md").read_text()
    assert table.MARKED.search(text)
    assert table.render(text) == text, "python -m bench.table"
    broken = text.replace("| fsdp |", "| fsdp | 1", 1)
    assert broken != text and table.render(broken) == text


def test_out_of_memory_names_what_to_lower(monkeypatch, capsys):
    import torch

    flags = ["--micro_batch_size", "4", "--dtype", "fp32"]
    parse_args("", argv=flags)
    said = less_memory()
    assert said.startswith("1. --micro_batch_size (now 4)") and "--dtype (now fp32)" in said
    ended = []
    monkeypatch.setattr("llm_demo.dist.os._exit", ended.append)

    def main():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    run_main(main)
    error = capsys.readouterr().err
    assert ended == [1] and "out of GPU memory" in error and "--micro_batch_size (now 4)" in error
    assert error.count("\n") == 1
    assert bench.failure(1, error)["status"] == "out of memory"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("step: 10  loss: 12.1  grad_norm: 0.5  memory: 20.41GiB(14.60%)  tps: 56,970  tflops: 1",
         ("10", "20.41", "56,970")),
        ("step:  1  loss:  8.1  memory:  0.9GiB(1%)  tps: 970", ("1", "0.9", "970")),
    ],
)  # fmt: skip
def test_torchtitans_log_is_read(text, expected):
    from bench.peers.torchtitan import LINE

    assert LINE.findall(text) == [expected]
