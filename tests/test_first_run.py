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


def test_heldout_rows_need_the_rule():
    """No question is in both files; a sorted set, a sum and a pair of words are not, either."""
    train, heldout = map(rows, FILES)
    assert {r["prompt"] for r in train}.isdisjoint(r["prompt"] for r in heldout)
    assert len({r["prompt"] for r in heldout}) == len(heldout) >= 150

    def words(prompt):
        return frozenset(re.findall(r"\w+", prompt))

    unordered = ("Sort", "opposite", "plural", "Which")
    for start in unordered:
        trained = {words(r["prompt"]) for r in train if start in r["prompt"]}
        new = {words(r["prompt"]) for r in heldout if start in r["prompt"]}
        assert len(new) >= 10 and trained.isdisjoint(new)


def test_the_answers_are_true():
    for r in (r for file in FILES for r in rows(file)):
        answer = r["completion"].removeprefix("Answer: ")
        numbers = [int(n) for n in re.findall(r"\d+", r["prompt"])]
        if "+" in r["prompt"]:
            assert int(answer) == sum(numbers)
        elif r["prompt"].startswith("Sort"):
            asked = re.findall(r"\w+", r["prompt"])[1:]
            assert answer.split(", ") == sorted(asked)
        elif "JSON" in r["prompt"]:
            made = json.loads(answer)
            assert list(made) == ["name", "age"] and numbers == [made["age"]]
        elif r["prompt"].startswith("How many"):
            small, large = re.match(r"How many (\w+) are \d+ (\w+)\?", r["prompt"]).groups()
            factor = {"cm m": 100, "m km": 1000, "g kg": 1000, "mm cm": 10, "cents euros": 100,
                      "years centuries": 100}[f"{small} {large}"]  # fmt: skip
            assert answer == f"{numbers[0] * factor} {small}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_first_run_learns_the_rules(kind, tmp_path):
    """Nothing but the launcher: held-out rows it has never seen, answered by the rule."""
    started = os.times()
    done = run(["bash", LAUNCHERS[kind]], cwd=tmp_path, timeout=600, fresh=True,
               PYTHON=sys.executable, OUTPUT_DIR="run")  # fmt: skip
    ended = os.times()
    before, after = evaluations(done, tmp_path)
    print(f"{kind}: {before} -> {after}")
    assert after["eval/loss"] <= BEFORE / 2
    assert before["eval/exact"] < 0.05 and after["eval/exact"] >= 0.6
    shown = re.findall(r"\nprompt .*\nanswer +(.*)\nexpected +(.*)\n", done.stdout)
    assert len(shown) == 3 and all(answer == expected for answer, expected in shown)
    assert_short(started, ended, kind)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_mixture_of_experts_learns(tmp_path):
    """The command of docs/moe.md."""
    model, started = ROOT / "models/qwen3-moe-tiny", os.times()
    done = run(["bash", LAUNCHERS["fsdp"], "--model_name_or_path", model], cwd=tmp_path,
               timeout=600, fresh=True, PYTHON=sys.executable, OUTPUT_DIR="run")  # fmt: skip
    ended = os.times()
    before, after = evaluations(done, tmp_path)
    assert after["eval/loss"] <= before["eval/loss"] / 5
    assert " | load " in done.stdout
    assert_short(started, ended, "experts")


def assert_short(started, ended, name):
    """90 s of two cores, at most: a machine that is busy with other things shows its own seconds.
    Of the processes that ended between two os.times()."""
    spent = sum(b - a for a, b in zip(started[2:4], ended[2:4], strict=True))
    print(f"{name}: {spent:.0f} s of processor time")
    assert spent < 180


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
    line = "held-out rows answered exactly: {:.1%} before, {:.1%} after\n".format(*shares)
    assert line in done.stdout
    return before, after
