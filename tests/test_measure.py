"""fit --measure: it runs the ways through their launchers, goes on after one that fails, resumes,
compares fairly, and keeps what the machine sustained."""

import json
import shlex
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, python, run, slow
from test_memory import config_of

from bench import store
from bench import ways as measured
from bench.table import ways
from llm_demo import fit, step_time
from llm_demo.core.errors import UserError
from llm_demo.memory import Settings
from llm_demo.model.costs import sizes_of

TINY = "models/qwen3-tiny"
WORDS = f"{ROOT / TINY} --measure {{n}} --cards 2 --seq_len 64 --tokens_a_step {{tokens}}"


def asked(out, n=2, tokens=256, more=""):
    words = WORDS.format(n=n, tokens=tokens)
    return fit.parse(shlex.split(f"{words} --out {out} {more}"))


def choice(engine="fsdp", seconds=1.0, tokens=256, **flags):
    """A fit.Choice."""
    sizes = {"micro_batch_size": 2, "grad_accum_steps": 1}
    settings = Settings(engine=engine, ranks=2, seq_len=64, **sizes)
    return fit.Choice(settings, sizes | flags, seconds, None, 0, tokens)


def row(low, median, high, **summary):
    """A result with these quartiles."""
    found = {
        "median_step_ms": median,
        "quartiles_step_ms": [low, high],
        "median_slots_per_s": 256_000 / median,
        "late_alloc_retries": 0,
        "reserved_gb": [1.0, 1.0],
        "row": {"comm_ms": "3"},
    }
    return {"status": "ok", "summary": found | summary}


def run_measure(ask, fitting):
    sizes = sizes_of(config_of(ask.model, ask.seq_len))
    measured.measure_ways(fitting, sizes, ask, lambda choice: fit.line(choice, ask))


def test_a_way_that_fails_is_a_row_and_the_search_goes_on(tmp_path, monkeypatch, capsys):
    """Then --resume keeps what ran. The speed of this machine is used by later searches."""
    monkeypatch.setenv("LLM_DEMO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", python())  # the launchers'
    ask = asked(tmp_path / "out", n=1)
    broken = choice(seconds=0.5, no_such_flag=1)
    ways = [broken, choice(), choice(seconds=1.5, reshard_after_forward=True)]
    run_measure(ask, ways)
    out = capsys.readouterr().out
    assert "[1/1] fsdp no_such_flag 1 ... failed: error: " in out and "\n[1/1] fsdp ... " in out
    commands = [line for line in out.splitlines() if "bash" in line]
    assert commands == [out.splitlines()[-1]] and commands[0].startswith("NPROC_PER_NODE=2 bash ")
    results = store.read(str(tmp_path / "out/rows"))
    assert [result["status"] for result in results] == ["failed", "ok"]
    assert results[1]["config"]["max_steps"] == measured.STEPS
    table = (tmp_path / "out/table.md").read_text().splitlines()
    assert len(table) == 4 and "| failed " in table[3] and "| 2 x 1 " in table[2]
    assert (tmp_path / "out/bars.png").stat().st_size > 10_000

    with pytest.raises(UserError, match="has 2 rows: --resume keeps"):
        run_measure(ask, ways)
    ask.resume, ask.measure = True, 2
    run_measure(ask, ways)
    assert "\n[1/2] fsdp: measured before\n[2/2] fsdp reshard_after_forward ..." in (
        out := capsys.readouterr().out
    )
    assert len(store.read(str(tmp_path / "out/rows"))) == 3

    file = step_time.speed_file(2)
    assert str(file) in out
    speed = json.loads(file.read_text())
    words = shlex.split(f"{ROOT / TINY} --cards 2 --memory 8 --tokens_a_step 256")
    later = fit.parse(words)
    assert (later.tflops, later.bandwidth) == (speed["tflops"], speed["bandwidth"])
    assert str(file) in later.speed_from
    assert fit.parse([*words, "--card", "h100"]).tflops > 500
    file.write_text("{")
    with pytest.raises(UserError, match="which can be deleted: "):
        fit.parse(words)
    file.unlink()
    assert fit.parse(words).speed_from == "assumed"


def test_rows_of_another_run_are_refused(tmp_path):
    ask, one = asked(tmp_path), choice()
    name = str(tmp_path / "rows")
    here = measured.row_of(one, ask)
    env = {"device": str(measured.this_device()), "revision": measured.revision(), "world_size": 2}
    for change, of_env, problem in (
        ({"model": "other"}, {}, "model"),
        ({"data": "other.jsonl"}, {}, "data"),
        ({}, {"device": "NVIDIA H100"}, "device"),
        ({}, {"revision": "0123456789ab"}, "revision"),
        ({}, {}, ""),
    ):
        store.write(name, {"status": "ok", "row": here | change, "env": env | of_env})
        if not problem:
            assert len(measured.earlier_rows(name, here, resume=True)) == 1
            break
        with pytest.raises(UserError, match=f"rows of another {problem}: --out names"):
            measured.earlier_rows(name, here, resume=True)
        store.file_of(name).unlink()


def test_each_kind_is_tried_once_with_equal_tokens():
    """First each way with what should be its fastest batch and saving of memory, then other
    savings; approximate ways once. On one card each micro-batch size is a kind."""
    ask = fit.argparse.Namespace(cards=2, tokens_a_step=256, all=False)
    large = choice(seconds=0.9, micro_batch_size=4)
    ckpt = choice(seconds=0.95, use_activation_checkpointing=True)
    reshard = choice(seconds=0.8, reshard_after_forward=True)
    rough = choice(seconds=1.1, psgd_rank=32)
    rough_ckpt = choice(seconds=1.2, use_activation_checkpointing=True, psgd_rank=32)
    unequal = choice(engine="pp", seconds=0.1, tokens=320)
    fitting = [choice(), ckpt, large, rough_ckpt, reshard, rough, unequal]
    assert measured.likeliest(fitting, ask) == [reshard, large, rough, ckpt]
    ask.all = True
    assert measured.likeliest(fitting, ask) == [reshard, large, rough, ckpt, rough_ckpt]
    ask.cards = 1
    ways = measured.likeliest(fitting, ask)
    assert ways == [reshard, large, rough, ckpt, choice(), rough_ckpt]


def test_what_overlaps_is_equal_and_the_simplest_is_recommended():
    pipeline, plain = choice("fsdp_pp", stages=2), choice(reshard_after_forward=True)
    rough = choice(psgd_rank=32)
    fast = (pipeline, row(99, 100, 102))
    assert measured.recommended([fast, (plain, row(101, 102, 104))]) == (
        plain,
        "recommended: fsdp reshard_after_forward, the simplest of equals; as fast: fsdp_pp "
        "stages 2",
    )
    for other in (row(103, 104, 106), row(100, 104, 109)):  # no overlap; too far apart
        best, why = measured.recommended([(plain, other), fast])
        assert best is pipeline and why.endswith(", the fastest")
    best, why = measured.recommended([(rough, row(50, 50, 50)), fast])
    assert best is pipeline and why.endswith(", the fastest of those that are exact")
    slow = row(50, 50, 50, late_alloc_retries=2)
    rows = [
        fast[1] | {"row": measured.DEFAULTS | {"engine": "fsdp_pp", "flags": "--stages 2"}},
        slow | {"row": measured.DEFAULTS | {"flags": "--psgd_rank 32 --tokenizer_name_or_path x"}},
    ]
    lines = [line.split("|")[1:-1] for line in ways(rows).splitlines()[2:4]]
    assert [line[0].strip() for line in lines] == [
        "fsdp, PowerSGD 32 ≈",
        "fsdp_pp, stages 2",
    ]
    assert [line[4].strip() for line in lines] == ["1.00", "2.00"]
    assert lines[0][3].strip() == "1.0*" and "PowerSGD = `--psgd_rank`" in ways(rows)


def test_a_way_that_should_take_twice_as_long_is_skipped(tmp_path, monkeypatch, capsys):
    ask = asked(tmp_path)
    ways = [choice(), choice(seconds=2.1, reshard_after_forward=True)]
    here = measured.row_of(ways[0], ask)
    env = {"device": str(measured.this_device()), "revision": measured.revision(), "world_size": 2}
    result = row(
        1, 1, 1, median_comm_ms=None, median_comm_exposed_ms=None, median_comm_wait_ms=None
    )
    config = {"global_batch": 4}
    store.write(str(tmp_path / "rows"), result | {"row": here, "env": env, "config": config})
    ask.resume = True
    with pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(time, "monotonic", interrupted)  # before anything is started
        run_measure(ask, ways)
    said = capsys.readouterr().out
    assert "\n[2/2] fsdp reshard_after_forward: skipped, it should take over twice" in said


def interrupted():
    raise KeyboardInterrupt


def test_drift_is_said():
    assert measured.drifted(row(1, 100, 1), row(1, 104, 1)) == []
    (said,) = measured.drifted(row(1, 100, 1), row(1, 120, 1))
    assert said.startswith("warning: the first way's step took +20% when it ran once more")


def test_the_measured_speed_is_the_formula_turned_around():
    """A row that took what the formula says gives the speed that it was given."""
    sizes = sizes_of(config_of("models/qwen3-8b", 1024))
    s = Settings(engine="fsdp", ranks=2, micro_batch_size=4, reshard_after_forward=True)
    step = step_time.step_seconds(sizes, s, 500e12, 200e9) * 1000
    comm = step_time.shared_bytes(sizes, s) / 200e9 * 1000
    hidden = step - step_time.micro_batch_seconds(sizes, s, 500e12) * 1000
    summary = {"median_step_ms": step, "median_comm_exposed_ms": [hidden, 0]}
    summary |= {"median_comm_ms": [comm, comm + 7], "median_comm_wait_ms": [0, 7]}
    assert measured.rates_of(s, sizes, summary) == pytest.approx((500, 200), rel=1e-6)


@pytest.mark.parametrize(
    "words, problem",
    [
        ("--measure --tokens_a_step 100 --cards 2 --seq_len 64", "less than a row of 64 tokens"),
        ("--cards 2 --memory 8 --tokens_a_step 256 --zero", "--zero needs --measure"),
        ("--memory 8 --tokens_a_step 256", "set --cards"),
        ("--cards 2 --tokens_a_step 256", "set --card, or --memory"),
        ("--measure --tokens_a_step 256 --train_json nowhere.jsonl", "nowhere.jsonl"),
        ("--measure --tokens_a_step 256 --train_json {empty}", "turn is empty"),
    ],
)
def test_bad_input_ends_before_the_first_run(words, problem, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_DEMO_CACHE", str(tmp_path / "cache"))
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"prompt": "a", "completion": ""}\n')
    with pytest.raises(UserError, match=problem):
        fit.parse(shlex.split(f"{ROOT / TINY} {words.format(empty=empty)}"))
    monkeypatch.setenv("NNODES", "2")
    with pytest.raises(UserError, match="one node"):
        asked(tmp_path)


@slow
def test_killed_half_way_and_resumed(tmp_path):
    """The whole command: it ends with as many rows, and the command that it prints runs."""
    words = WORDS.format(n=3, tokens=1024).split()
    command = [python(), "-m", "llm_demo.fit", *words, "--out", tmp_path / "out"]
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    rows = tmp_path / "out/rows.jsonl"
    while not rows.exists():
        assert child.poll() is None
        time.sleep(0.2)
    time.sleep(3)
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 130 and "finished rows are kept" in child.stderr.read()
    done = run([*command, "--resume"])
    assert done.returncode == 0, done.stderr
    assert "[1/3]" in done.stdout and ": measured before" in done.stdout
    ran = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [result["status"] for result in ran].count("ok") == 3
    rates = [line.split("|")[6] for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert rates == sorted(rates, key=lambda rate: -float(rate.replace(",", "")))
    command = f"{done.stdout.splitlines()[-1]} --max_steps 2 --output_dir {tmp_path}/run"
    again = run(["bash", "-c", command], PYTHON=sys.executable)
    assert again.returncode == 0, again.stderr
