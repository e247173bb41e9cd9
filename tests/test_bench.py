"""The benchmark command: rows that succeed or fail, --resume, result files, tables, pictures."""

import functools
import json
import pathlib
import re
import sys

import pytest
import torch
from conftest import ROOT, command_line, python, run

from bench import held_out, plots, store, table
from bench import run as bench
from bench.held_out import WAYS as HELD_OUT
from llm_demo.core.errors import UserError
from llm_demo.flags.args import less_memory, parse_args
from llm_demo.flags.parsing import groups_of
from llm_demo.machine import device
from llm_demo.machine.dist import run as run_main


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """Results are read from and written to an empty folder."""
    monkeypatch.setattr(store, "RESULTS", tmp_path)


@pytest.fixture
def call(monkeypatch, capsys):
    """Call a command's main with arguments: (exit code, what it printed, its errors)."""

    def called(main, *arguments):
        command_line(monkeypatch, "command", *arguments)
        monkeypatch.setattr(sys, "executable", python())  # the launchers'
        code = main()
        return code, *capsys.readouterr()

    return called


def test_smoke_then_resume(call, empty, tmp_path):
    """Both launchers, full rows and packed documents; a row that is there is not run again."""
    code, said, _ = call(bench.main, "--preset", "smoke")
    assert code == 0, said
    assert [file.name for file in tmp_path.iterdir()] == ["smoke.jsonl"]
    results = store.read("smoke")
    assert len(results) == 2
    for result in results:
        assert result["status"] == "ok" and result["env"]["versions"]["torch"]
        assert result["summary"]["median_step_ms"] > 0
        assert str(tmp_path) not in result["command"] and str(ROOT) not in result["command"]
        slots = result["config"]["global_batch"] * result["config"]["seq_len"]
        fill = result["summary"]["tokens"] / (result["summary"]["steps"] * slots)
        # counted, not timed; rows of 128 hold one or two documents and some padding: 0.88
        assert fill == 1 if result["row"]["data"] == "full" else 0.85 < fill < 1
        assert {*table.HEAD} > {*table.line_of(result)} > {"step_ms", "toks/s", "peak_mem"}
        host, resident = (result["summary"][key] for key in ("peak_host_gb", "peak_mem_gb"))
        assert len(host) == 2 and host == pytest.approx(resident, abs=0.1)  # on a CPU
    said = call(bench.main, "--preset", "smoke", "--resume")[1]
    assert said.count("already measured") == 2
    with pytest.raises(UserError, match="--resume or --overwrite"):
        call(bench.main, "--preset", "smoke")


def test_a_row_that_fails_is_a_row_that_says_so(call, empty):
    flags = ["--engines", "fsdp", "--model", "models/qwen3-tiny", "--flags=--oops", "--out", "x"]
    code, said, _ = call(bench.main, *flags)
    assert code == 1 and "unknown argument --oops" in said
    (result,) = store.read("x")
    assert result["status"] == "failed" and result["error"].startswith("error: unknown")
    assert table.line_of(result) == {"step_ms": "failed"}


@pytest.mark.slow
@pytest.mark.parametrize("what", HELD_OUT)
def test_losses_of_the_same_steps(what, call, empty, tmp_path):
    """Every way starts alike but for the approximation, and each has its own losses."""
    rows = (ROOT / "data/sft_en.jsonl").read_text().splitlines(keepends=True)[:40]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    words = [what, str(ROOT / "models/qwen3-tiny"), str(tmp_path / "rows.jsonl")]
    words += ["--held_out", "8", "--steps", "2", "--every", "1"]
    assert call(held_out.main, *words)[0] == 0
    losses = [result["losses"] for result in store.read(f"held_out/{what}")]
    assert len(losses) == len(HELD_OUT[what]) and all(len(each) == 3 for each in losses)
    ends = [each["2"] for each in losses]
    # a CPU computes in fp32, where a step in two parts is the same here
    assert len({*ends}) == len(ends) - (what == "fp8") and max(ends) - min(ends) < 0.5


def test_scripts_take_the_flags_of_all_presets():
    own = {kind: groups_of(ROOT / kind) for kind in ("fsdp", "pp", "zero", "fsdp_pp")}
    for row in (row for rows in bench.PRESETS.values() for row in rows):
        row = {**bench.DEFAULTS, **row}
        if row["engine"] in own:
            command = bench.command_of({**row, "data": "x"}, pathlib.Path("out"))
            at = next(i for i, word in enumerate(command) if word.startswith("--"))
            parse_args("", *own[row["engine"]], argv=command[at:])


def test_a_dry_run_prints_the_commands_of_the_rows(call, empty, tmp_path):
    code, said, _ = call(bench.main, "--preset", "adapters", "--dry_run")
    lines = said.splitlines()
    assert code == 0 and len(lines) == len(bench.PRESETS["adapters"]) == len({*lines})
    assert not [*tmp_path.iterdir()]  # nothing is recorded
    for words, count in (
        (r": NCCL_P2P_DISABLE=1 NPROC_PER_NODE=2 .*launch_fsdp_pp.* --schedule interleaved$", 2),
        (r": NPROC_PER_NODE=2 .*launch_fsdp\.sh .*--train_json DATA .*--replicas all$", 2),
        (r"^unsloth-.*: NPROC_PER_NODE=1 .* -m bench\.peers\.unsloth$", 3),
        (r"qwen3-30b-a3b .*--seq_len 4096 .*--device_memory_gb 30$", 1),
    ):
        assert sum(bool(re.search(words, line)) for line in lines) == count, words


def result_of(**settings):
    return {"status": "ok", "row": {**bench.DEFAULTS, **settings}}


def test_a_row_replaces_the_one_with_the_same_settings(empty):
    for more in ({"micro": 1}, {"micro": 2}, {"micro": 2, "env": "A=1"}, {"model": "a/qwen3-0.6b"}):
        store.write("box/x", result_of(**more))
    assert len(store.read("box/x")) == 4
    # another number of steps is a better measurement of the same row
    store.write("box/x", {**result_of(micro=1, steps=99), "new": True})
    assert [r.get("new") for r in store.read("box/x")] == [True, None, None, None]
    # a file written before a setting existed
    old = result_of(micro=1)
    del old["row"]["env"]
    store.write("box/x", old)
    assert store.read("box/x")[0] == old and len(store.read("box/x")) == 4
    for script in ("fsdp", "pp", "fsdp"):
        store.write("save", {"columns": {"script": script}})
    assert [r["columns"]["script"] for r in store.read("save")] == ["fsdp", "pp"]


# cards bridged in pairs
BRIDGED = """\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-31
GPU1\tNV4\t X \tSYS\tSYS\t0-31
GPU2\tSYS\tSYS\t X \tNV4\t0-31
GPU3\tSYS\tSYS\tNV4\t X \t0-31
"""


@pytest.mark.parametrize(
    "tool, said, found",
    [
        ("nvidia-smi", "\t\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV18\nGPU1\tNV18\t X ", ["NV18"]),
        ("nvidia-smi", BRIDGED, ["NV4", "SYS"]),
        ("nvidia-smi", "\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\t", []),
        ("none", "", []),
    ],
)
def test_the_links_between_gpus(tool, said, found, tmp_path, monkeypatch):
    (tmp_path / "said").write_text(said)
    (tmp_path / tool).write_text(f"#!/bin/sh\nexec /bin/cat {tmp_path}/said\n")
    (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.links.__wrapped__() == found  # not what this process has found


def test_the_tables_are_those_of_the_results():
    marked = {page: page.read_text() for page in table.pages()}
    marked = {page: text for page, text in marked.items() if table.MARKED.search(text)}
    assert marked
    for page, text in marked.items():
        assert table.rendered(page) == text, "python -m bench.table"
        broken = re.sub(r"(<!-- table: .*?\n\| ---.*?\n\| )", r"\1 1", text, count=1, flags=re.S)
        assert broken != text and table.render(broken, page.parent != ROOT) == text
        tables = len(table.MARKED.findall(text))
        assert text.count("\nMeasured at ") == (page.name != "README.md" and tables)


def test_a_table_has_the_rows_and_the_columns_that_fit(empty, monkeypatch):
    summary = {"median_step_ms": 100.04, "median_slots_per_s": 1e4, "mfu": 0.5}
    for timing in ("comm_ms", "comm_exposed_ms"):
        summary[f"median_{timing}"] = [1.0, 2.0]
    for engine, flags, peaks in (
        ("fsdp", "--reshard_after_forward --fp8 rowwise_gw", [1.0, 1.0]),
        ("pp", "--schedule dualpipev --tokenizer_name_or_path x", [1.0, 2.0]),
        ("zero", "--deepspeed_config zero/ds_zero1.json", [3.0, 3.0]),
    ):
        row = result_of(engine=engine, micro=8, ga=2, ckpt=True, flags=flags)
        measured = summary | {"reserved_gb": peaks, "late_alloc_retries": int(engine == "zero")}
        store.write("x", row | {"summary": measured, "config": {"global_batch": 16}})
    head, _, *lines = table.table("x").splitlines()
    assert head == "| setting | step_ms | toks/s | peak_mem | host_mem | comm_ms |"
    assert lines == [
        "| pp 8 x 2, ckpt, dualpipev | 100.0 | 10,000 | 1.0 / 2.0 |  | 2.0 |",
        "| fsdp 8 x 2, ckpt, reshard, fp8 ≈ | 100.0 | 10,000 | 1.0 |  | 2.0 |",
        "| zero 8 x 2, ckpt, ds_zero1 | 100.0 | 10,000 | 3.0* | 0.0 | 2.0 |",
    ]
    legend = "reshard = `--reshard_after_forward`, ≈ = approximate."
    assert table.footer("x", notes=False) == f"\n{legend}\n"
    assert table.table("x#only=^pp").count("\n") == 3 and not table.footer("x#only=^pp", False)
    assert "| zero, ckpt, ds_zero1 | 10 | 3.0* |" in table.table("x#sizes")
    monkeypatch.setattr(table, "PAGE", 560)
    assert table.table("x").startswith("| setting | step_ms | toks/s | peak_mem |\n")


def test_out_of_memory_names_what_to_lower(ended, capsys):
    flags = ["--micro_batch_size", "4", "--dtype", "fp32"]
    parse = functools.partial(parse_args, "", argv=flags)
    said = less_memory(parse())
    assert said.startswith("1. --micro_batch_size (now 4)") and "--dtype (now fp32)" in said

    def main():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    run_main(main, parse, less_memory)
    error = capsys.readouterr().err
    assert ended == [1] and "out of GPU memory" in error and "--micro_batch_size (now 4)" in error
    assert error.count("\n") == 1
    assert bench.failure(1, error)["status"] == "out of memory"


def test_a_failed_row_keeps_what_was_said_before_a_stack():
    stack = "".join(f"frame #{i}: c10d::Something() + 0x6a90931 (0x7fe2a)\n" for i in range(99))
    found = bench.failure(137, f"step 3/8 | loss 12.1\n{stack}error: rank 0 died of SIGKILL\n")
    assert found["error"] == "error: rank 0 died of SIGKILL" and "step 3/8" in found["output"]
    assert bench.failure(1, "")["error"] == "no output"


def test_the_pictures_are_of_the_results():
    text = "".join(page.read_text() for page in table.pages())
    named = re.findall(r"\]\((?:\.\./)?bench/plots/(\S+)\.png\)", text)
    panels = {"h200-x2/ways": ["h200-x2/ways", "h200-x2/ways_no_p2p", "h200-x2/ways_sockets"]}
    drawn = plots.PLOTS.rglob("*.png")
    assert {*named} == {str(f.relative_to(plots.PLOTS).with_suffix("")) for f in drawn}
    for name in named:
        picture = (plots.PLOTS / f"{name}.png").read_bytes()
        assert plots.digest(*panels.get(name, [name])).encode() in picture, "python -m bench.plots"


def test_one_rank_of_many(tmp_path):
    """Its shards, its rows and its steps; the results of collectives are its own data."""
    row = {**bench.DEFAULTS, "micro": 2, "seq_len": 64, "model": "models/qwen3-tiny", "steps": 2}
    row |= {"flags": "--one_of 8 --reshard_after_forward", "data": str(ROOT / "data/sft_en.jsonl")}
    done = run(bench.command_of(row, tmp_path), **bench.environment_of(row))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FSDP2 on 8 processes: 3,148,608 parameters, 393,576 here" in done.stdout
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["data_parallel"] == 8 and config["global_batch"] == 16
    peaks = json.loads((tmp_path / "summary.json").read_text())["peak_mem_gb"]
    assert len(peaks) == 8 and len(set(peaks)) == 1
