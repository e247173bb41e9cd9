"""The benchmark command: rows that succeed or fail, --resume, result files, tables, pictures."""

import functools
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, command_line, python, run
from matplotlib.figure import Figure
from matplotlib.text import Text

from bench import checkpoints, held_out, plots, store, table
from bench import run as bench
from bench.held_out import WAYS as HELD_OUT
from bench.peers import torchtitan, trl
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
        assert len(table.line_of(result)) == len(table.HEAD)
        host, resident = (result["summary"][key] for key in ("peak_host_gb", "peak_mem_gb"))
        assert len(host) == 2 and host == pytest.approx(resident, abs=0.1)  # on a CPU
    said = call(bench.main, "--preset", "smoke", "--resume")[1]
    assert said.count("already measured") == 2
    with pytest.raises(UserError, match="--resume or --overwrite"):
        call(bench.main, "--preset", "smoke")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "pp"])
def test_what_checkpoints_cost(engine):
    """Three real runs; on a CPU, in fp32, they end alike."""
    args = SimpleNamespace(model="models/qwen3-tiny", dtype="fp32", steps=6, flags="")
    args.save_every, args.seq_len = 3, 128
    found = checkpoints.measure_save(engine, args)
    columns = found["columns"]
    assert columns["difference after resuming"] == columns["difference of a second run"] == "none"
    (background,), (waiting,) = found["saves"]["background"], found["saves"]["waiting"]
    assert background["save/stall_s"] < background["save/seconds"]
    assert waiting["save/stall_s"] == waiting["save/seconds"]
    assert background["save/bytes"] == pytest.approx(waiting["save/bytes"], rel=0.01)


def test_a_row_that_fails_is_a_row_that_says_so(call, empty):
    flags = ["--engines", "fsdp", "--model", "models/qwen3-tiny", "--flags=--oops", "--out", "x"]
    code, said, _ = call(bench.main, *flags)
    assert code == 1 and "unknown argument --oops" in said
    (result,) = store.read("x")
    assert result["status"] == "failed" and result["error"].startswith("error: unknown")
    assert "failed" in table.line_of(result)


def test_ctrl_c_ends_the_row_and_its_processes(tmp_path):
    flags = "--engines fsdp --model models/qwen3-tiny --seq_len 64 --steps 123457".split()
    bench_run = subprocess.Popen(
        [sys.executable, "-m", "bench.run", *flags, "--out", str(tmp_path / "x")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells' & ignores it
    )  # fmt: skip

    def running():
        return subprocess.run(["pgrep", "-f", "fsdp.py.*123457"], capture_output=True).stdout

    for _ in range(60):
        if len(running().split()) >= 3:  # the launcher and two ranks
            break
        time.sleep(0.5)
    time.sleep(2)
    bench_run.send_signal(signal.SIGINT)
    _, said = bench_run.communicate(timeout=40)
    assert bench_run.returncode == 130 and "completed rows are kept" in said, said
    for _ in range(20):  # a rank that was being started may take a moment to notice
        if not running():
            break
        time.sleep(0.5)
    assert not running()
    assert not list(tmp_path.iterdir())


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
    for preset in ("teff", "no_p2p", "slow_link"):
        work = {"pp": set(), "fsdp": set()}
        for row in bench.PRESETS[preset]:
            replicas = 2 if row["engine"] == "fsdp" else 1
            work[row["engine"]].add(row["micro"] * row["ga"] * replicas)
        assert work["pp"] == work["fsdp"]


def test_scripts_take_the_flags_of_all_presets():
    own = {kind: groups_of(ROOT / kind) for kind in ("fsdp", "pp", "zero", "fsdp_pp")}
    for row in (row for rows in bench.PRESETS.values() for row in rows):
        row = {**bench.DEFAULTS, **row}
        if row["engine"] in own:
            command = bench.command_of({**row, "data": "x"}, pathlib.Path("out"))
            at = next(i for i, word in enumerate(command) if word.startswith("--"))
            parse_args("", *own[row["engine"]], argv=command[at:])


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


def test_an_interrupted_write_leaves_the_old_file(empty):
    store.write("x", result_of(micro=1))
    before = store.read("x")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.file_of("x").stat().st_size + 9, limits[1]))
    try:
        with pytest.raises(OSError):
            store.write("x", result_of(micro=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.read("x") == before
    store.write("x", result_of(micro=2))
    assert len(store.read("x")) == 2


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
        assert broken != text and table.render(broken, page.parent.name == "docs") == text
        tables = len(table.MARKED.findall(text))
        assert text.count("\nMeasured at ") == (page.name != "README.md" and tables)


def test_tables_are_updated_in_the_page_that_has_them(call, tmp_path, monkeypatch):
    text = "\nabove\n<!-- table: h200-x2/teff -->\n{}<!-- end -->\nbelow\n"
    (tmp_path / "docs").mkdir()
    pages = tmp_path / "README.md", tmp_path / "docs/a.md", tmp_path / "docs/b.md"
    for page, body in zip(pages, ("no table", text.format("| old |\n"), text), strict=True):
        page.write_text(body)
    monkeypatch.setattr(table, "ROOT", tmp_path)
    code, _, errors = call(table.main, "--check")
    assert code == 1 and "docs/a.md is out of date" in errors and "README" not in errors
    assert call(table.main)[0] == 0
    assert pages[0].read_text() == "no table"
    measured = table.notes_of("h200-x2/teff")
    commits = r"\nMeasured at (\w{7} \(\d+\), )+\w{7} \(\d+\)\."
    assert re.fullmatch(f"{commits} `peak_mem` is what was allocated; .*\n", measured)
    expected = text.format(table.table("h200-x2/teff") + measured)
    assert [page.read_text() for page in pages[1:]] == [expected] * 2


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


def test_a_peers_row_has_its_memory_by_our_measure_and_its_versions():
    said = 'environment: {"versions": {"torchtitan": "0.2.2"}}\n' + "".join(
        f"[default0]:allocated at the peak: {step / 10}GiB, retries: {step}\n"
        f"step:  {step}  loss: 12.1  grad_norm: 0.5  memory: 20.4GiB(14%)  tps: 1,000  tflops: 1\n"
        for step in (1, 10, 20, 30)
    )
    row = {**bench.DEFAULTS, "engine": "torchtitan", "gpus": 2}
    assert "torch.distributed.run" in torchtitan.command_of(row)
    result = torchtitan.read(row, said)
    expected = {"peak_mem_gb": [3.0], "reserved_gb": [20.4], "alloc_retries": 30}
    expected |= {"late_alloc_retries": 20, "median_slots_per_s": 2000}
    assert expected.items() <= result["summary"].items()
    assert result["env"]["versions"] == {"torchtitan": "0.2.2"}


def test_a_row_spread_over_gpus_is_torchtitans_context_parallelism():
    row = {**bench.DEFAULTS, "gpus": 4, "ga": 3, "seq_len": 4096, "flags": "--sequence_parallel 2"}
    command = torchtitan.command_of(row)
    assert command[command.index("--parallelism.context_parallel_degree") + 1] == "2"
    assert command[command.index("--training.global_batch_size") + 1] == "6"
    said = 'environment: {"versions": {}}\nallocated at the peak: 2.0GiB, retries: 0\n'
    said += "".join(f"step: {n} memory: 20.4GiB(14%) tps: 1,000\n" for n in (1, 10, 20))
    found = torchtitan.read(row, said)  # 1,000 slots a second on each of 4 GPUs, 6 rows a step
    assert found["summary"]["median_slots_per_s"] == 4000
    assert found["summary"]["median_step_ms"] == pytest.approx(6 * 4096 / 4000 * 1e3)
    assert found["config"]["global_batch"] == 6
    alone = torchtitan.command_of({**row, "flags": ""})
    assert alone[alone.index("--training.global_batch_size") + 1] == "12"
    assert not any("context_parallel" in word for word in alone)


def test_trls_row_has_medians_without_the_first_steps():
    memory = {"peak_mem_gb": [3.0, 2.0], "reserved_gb": [3.5, 2.5], "alloc_retries": 2}
    memory["late_alloc_retries"] = 0
    figures = {"step_ms": [900, 90, 40, 50, 60], "env": {"cuda": None}, **memory}
    said = f"trl figures: {json.dumps(figures)}\n"
    row = {**bench.DEFAULTS, "engine": "trl", "gpus": 2, "micro": 4, "flags": "--lora_rank 8"}
    result = trl.read(row, said)
    assert result["summary"]["median_step_ms"] == 50
    assert memory.items() <= result["summary"].items()
    assert result["summary"]["median_slots_per_s"] == 2 * 4 * 1024 / 0.05
    assert trl.flag(row, "lora_rank", 16) == 8 and trl.flag(row, "device_memory_gb", 0) == 0


def test_the_pictures_are_of_the_results():
    text = "".join(page.read_text() for page in table.pages())
    named = re.findall(r"\]\((?:\.\./)?bench/plots/(\S+)\.png\)", text)
    panels = {"h200-x2/ways": ["h200-x2/ways", "h200-x2/ways_no_p2p", "h200-x2/ways_sockets"]}
    drawn = plots.PLOTS.rglob("*.png")
    assert {*named} == {str(f.relative_to(plots.PLOTS).with_suffix("")) for f in drawn}
    for name in named:
        picture = (plots.PLOTS / f"{name}.png").read_bytes()
        assert plots.digest(*panels.get(name, [name])).encode() in picture, "python -m bench.plots"


@pytest.mark.parametrize("name, said", [
    ("h200-x2/no_p2p,h200-x2/none", "h200-x2/none: no results to draw"),
    ("h200-x2/ways_sockets,h200-x2/long", "no engine with the same flags is in all of them"),
    ("h200-x2/zero,h200-x2/zero", "h200-x2/zero has bars that differ"),  # four models
    ("h200-x2/checkpoints/save", "has a table of its own and no picture"),
    ("h200-x2/timer/redesign", "has a table of its own and no picture"),  # equal settings
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused_in_one_line(name, said, call):
    before = sorted(plots.PLOTS.rglob("*.png"))
    with pytest.raises(UserError, match=said):
        call(plots.main, name)
    assert sorted(plots.PLOTS.rglob("*.png")) == before


@pytest.mark.parametrize("names, curves", [
    (("seed",), 0), (("zero",), 0), (("speed",), 0), (("teff",), 4), (("ways_no_p2p",), 8),
    (("ways",), 12), (("ways", "ways_no_p2p", "ways_sockets"), 0),
])  # fmt: skip
def test_pictures_do_not_mislead(names, curves, tmp_path, monkeypatch):
    """A line of growing x, or a bar a row; every row is there; no text is cut or covers another."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    names = [f"h200-x2/{name}" for name in names]
    if len(names) > 1:
        plots.draw_links(names, tmp_path / "a.png")
    else:
        plots.draw(*names, tmp_path / "a.png")
    lines = [line for axes in figures[0].axes for line in axes.lines]
    assert len(lines) == curves and all((np.diff(line.get_xdata()) > 0).all() for line in lines)
    names_at = [(t.xyann[1], axes.get_ylim()) for axes in figures[0].axes for t in axes.texts
                if getattr(t, "arrow_patch", None)]  # fmt: skip
    assert all(low < y <= high for y, (low, high) in names_at)
    bars = max(len(axes.containers[0]) if axes.containers else 0 for axes in figures[0].axes)
    assert bars == (len(store.read(names[0])) if len(names) == 1 else 8)
    figures[0].draw_without_rendering()
    texts = [t for t in figures[0].findobj(Text) if t.get_visible() and t.get_text()]
    assert not [t for t in texts if "ahead" in t.get_text() or "NCCL" in t.get_text()]
    boxes = [Text.get_window_extent(text) for text in texts]  # an annotation's own has its arrow
    width, height = figures[0].canvas.get_width_height()
    for text, box in zip(texts, boxes, strict=True):
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text
    smaller = [box.padded(-2) for box in boxes]
    touching = [(a, b) for (a, x), (b, y) in combinations(zip(texts, smaller, strict=True), 2)
                if x.overlaps(y)]  # fmt: skip
    assert not touching


def test_where_two_lines_cross():
    fsdp = [(10, 100), (20, 110), (40, 120)]
    assert plots.crossover(fsdp, [(10, 50), (40, 110)]) is None
    assert plots.crossover(fsdp, [(10, 80), (20, 130)]) == (15, 105)
    assert plots.crossover(fsdp, [(20, 120), (40, 140)]) == (20, 120)  # from its first point on
    assert plots.crossover(fsdp, [(10, 80), (20, 111)]) is None  # a tie
    assert plots.crossover(fsdp, [(50, 200), (60, 300)]) is None  # never at the same tokens
    assert plots.crossover(fsdp, [(10, 150), (20, 150), (40, 100)]) is None  # behind at the end
    assert plots.crossover(fsdp, [(10, 150), (20, 90), (40, 140)]) == (30, 115)


def test_checkpointing_is_on_or_off_in_any_spelling():
    def rows(text):
        args = bench.make_parser().parse_args(["--engines", "fsdp", "--ckpt", text])
        return [row["ckpt"] for row in bench.grid(args).values()]

    assert rows("True,no") == [True, False] and rows("1") == [True]
    with pytest.raises(UserError, match="--ckpt maybe: must be true or false"):
        rows("true,maybe")


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
