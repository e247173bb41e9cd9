"""The bundled tasks, and what a first run of either launcher learns from them."""

import json
import os
import re
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT, logged, python, run

LAUNCHERS = {"fsdp": ROOT / "fsdp/launch_fsdp.sh", "pp": ROOT / "pp/launch_pp.sh"}
FILES = [ROOT / f"data/first_run{part}.jsonl" for part in ("", ".heldout")]
BEFORE = 6.08  # the held-out loss at which the first run ended on data/sft_en.jsonl


def paste(said, name, folder, more=""):
    """Run a command that a run has printed, and more flags, in that folder; -> its output."""
    (line,) = re.findall(rf"^  {name}: +(.*)$", said, re.M)
    line = line.replace(sys.executable, python()) + more
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    how = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(["bash", "-c", line], **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_script_writes_the_files(tmp_path, monkeypatch):
    script = runpy.run_path(str(ROOT / "data/make_first_run.py"))
    monkeypatch.setitem(script["main"].__globals__, "DATA", tmp_path)
    script["main"]()
    for file in FILES:
        assert (tmp_path / file.name).read_text() == file.read_text()
    said = (ROOT / "data/README.md").read_text()
    train, heldout = map(rows, FILES)
    assert f"| `first_run.jsonl` | {len(train):,} " in said
    assert f"| `first_run.heldout.jsonl` | {len(heldout):,} " in said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [*LAUNCHERS, "experts"])
def test_a_first_run_learns_the_rules(kind, tmp_path):
    """Nothing but the launcher: held-out rows it has never seen, answered by the rule. Also the
    command of docs/moe.md. Each takes 90 s of two cores, at most, of the processes that end
    between two os.times()."""
    command = ["bash", LAUNCHERS.get(kind, LAUNCHERS["fsdp"])]
    if kind == "experts":
        command += ["--model_name_or_path", ROOT / "models/qwen3-moe-tiny"]
    started = os.times()
    done = run(command, cwd=tmp_path, timeout=600, fresh=True, PYTHON=sys.executable,
               OUTPUT_DIR="run")  # fmt: skip
    spent = sum(b - a for a, b in zip(started[2:4], os.times()[2:4], strict=True))
    before, after = evaluations(done, tmp_path)
    print(f"{kind}: {before} -> {after}, {spent:.0f} s of processor time")
    assert spent < 180
    if kind == "experts":
        assert after["eval/loss"] <= before["eval/loss"] / 5 and " | load " in done.stdout
        return
    assert after["eval/loss"] <= BEFORE / 2
    assert before["eval/exact"] < 0.05 and after["eval/exact"] >= 0.6
    shown = re.findall(r"\nprompt .*\nanswer +(.*)\nexpected +(.*)\n", done.stdout)
    assert len(shown) == 3 and all(answer == expected for answer, expected in shown)


def test_a_first_run_begins_to_learn(tmp_path):
    """A short one, in a folder with a space in its name; the commands that it prints run there."""
    here = tmp_path / "a user"
    here.mkdir()
    heldout = here / FILES[1].name
    heldout.write_text("".join(FILES[1].read_text().splitlines(keepends=True)[:40]))
    done = run(["bash", LAUNCHERS["fsdp"]], cwd=here, PYTHON=sys.executable, OUTPUT_DIR="run",
               MAX_STEPS="30", SAMPLE_TOKENS="0", EVAL_JSON=str(heldout))  # fmt: skip
    _, after = evaluations(done, here)
    assert after["eval/loss"] <= BEFORE / 5
    assert re.search(r"^  chat: +.*llm_demo.chat run$", done.stdout, re.M)
    paste(done.stdout, "export", here)
    table = paste(done.stdout, "evaluate", here)
    row = r"first_run.heldout.jsonl \| \S+ \| (\S+) \| \S+ \| \S+ \| (\S+)% \|"
    ((loss, share),) = re.findall(row, table)
    assert float(loss) == pytest.approx(after["eval/loss"], rel=0.1)  # of bf16 weights
    assert float(share) / 100 == pytest.approx(after["eval/exact"], abs=0.05)
    assert "--max_steps 60" in done.stdout
    more = paste(done.stdout, "continue", here, " --max_steps 32")
    assert "after step 30, checked" in more and "step 32/32" in more


@pytest.mark.slow
def test_one_process_and_two_take_the_same_steps(tmp_path):
    """Of 16 rows: the losses that the README prints hold on one GPU, too."""
    found = []
    for count in ("1", "2"):
        done = run(["bash", LAUNCHERS["fsdp"]], cwd=tmp_path, PYTHON=sys.executable,
                   NPROC_PER_NODE=count, OUTPUT_DIR=count, MAX_STEPS="3", LOG_EVERY="1",
                   EVAL_JSON="none", SAMPLE_TOKENS="0", SAVE="false",
                   WARMUP_STEPS="10")  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f" x {count} data-parallel = 16 rows = 1,024 token slots a step" in done.stdout
        assert "warning: --warmup_steps 10 is not shorter than the run of 3 steps" in done.stdout
        found.append([record["train/loss"] for record in logged(tmp_path / count)])
    assert len(found[0]) == 3 and found[0] == pytest.approx(found[1], rel=1e-5)


def evaluations(done, folder):
    """What a run has logged of its held-out rows before and after."""
    assert done.returncode == 0, done.stderr
    logged = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    before, after = (r for r in logged if "eval/loss" in r)
    shares = before["eval/exact"], after["eval/exact"]
    line = "held-out examples answered exactly: {:.1%} before, {:.1%} after\n".format(*shares)
    assert line in done.stdout
    return before, after
