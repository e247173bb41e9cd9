"""The numbers of a step, which a device copies to the host while the host goes on."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from bench.plots import shares
from bench.table import line_of
from llm_demo.core import timer as timing
from llm_demo.core.mesh import World
from llm_demo.core.timer import StepTimer, _Clock
from llm_demo.flags.args import parse_args
from llm_demo.run.records import TIMES, Gather, Records, beyond_terminal, summarise, without

WORLD = World(0, 1, 0, torch.device("cpu"))
SETTINGS = {
    "micro_batch_size": 1, "grad_accum_steps": 1, "dtype": "fp32",
    "use_activation_checkpointing": False,
}  # fmt: skip


def a_run(max_steps, *flags):
    """(timer, records, what is recorded, what is said) of a run that is only timed."""
    args = parse_args("", argv=["--no_comm_timer", "--log_every", "1", *flags])
    recorded, said = [], []
    log = SimpleNamespace(
        open=lambda step: [], record=recorded.append, say=lambda line, shown="": said.append(line)
    )
    records = Records(args, WORLD, log, 0, max_steps, torch.float32)
    timer = StepTimer(WORLD, args.comm_timer)
    timer.begin()
    return timer, records, recorded, said


def add(timer, records, step, loss=None, **more):
    loss = torch.tensor(2.5) if loss is None else loss
    timer.count(tokens=10, labels=5, slots=10, flops=0)
    numbers = {"loss": loss, "norm": torch.tensor(1.0), "bad_steps": torch.tensor(0.0)}
    read = timer.end(numbers, lambda: more, first=step == 1)
    records.add(step, 10, 5, 1e-3, read)


def test_numbers_of_the_last_step_are_read_after_their_copies():
    """They are read at once, not a step later: an event before the copies is not enough."""
    copies = []

    class Copy:
        there = False

        def __float__(self):
            assert self.there, "read before it was copied"
            return 2.5

    class OnDevice:
        def to(self, device, non_blocking):
            copies.append(Copy())
            return copies[-1]

    class Event(_Clock):
        def record(self):
            super().record()
            self.earlier = list(copies)

        def synchronize(self):
            for copy in self.earlier:
                copy.there = True

    timer, records, recorded, _ = a_run(1)
    timer.comm._new = Event
    timer.restart()
    add(timer, records, 1, loss=OnDevice(), **{"moe/aux_loss": OnDevice()})
    assert (recorded[0]["train/loss"], recorded[0]["moe/aux_loss"]) == (2.5, 2.5)


def test_communication_that_is_not_measured_is_not_zero():
    """Nor in the summary and in the tables of benchmarks."""
    timer, records, recorded, said = a_run(1)
    add(timer, records, 1)
    assert " ms (comm n/a) | " in said[0]
    assert [recorded[0][key] for key in TIMES] == [None] * 3
    summary = summarise(records.history, SETTINGS, 1.0, None, None, [0.0])
    assert summary["median_comm_ms"] is None and summary["row"]["comm_ms"] == "n/a"
    row = {"engine": "fsdp", "model": "m", "micro": 1, "ga": 1, "ckpt": False, "dtype": "fp32"}
    row |= {"data": "full", "flags": "", "env": "", "seq_len": 10}
    result = {"row": row, "status": "ok", "summary": summary, "config": {"global_batch": 1}}
    assert [*line_of(result).values()].count("n/a") == 3  # with MFU
    assert shares(summary) == {}


def test_times_are_of_a_step_and_of_the_slowest_rank(monkeypatch):
    """Two steps are logged together, of two ranks."""
    timer, records, recorded, _ = a_run(4, "--log_every", "2")
    records.args = dataclasses.replace(records.args, comm_timer=True)
    other = iter((3.0, 1.0))  # the other rank's ms for data; this rank's are 2

    spans = (0, 7, 20, 21), (0, 1, 20, 31)  # of two operations on each rank: it waits 6, 10

    def names(ranks, ours, group):
        ranks[:] = [(["a", "b"], None)] * 2

    def numbers(ranks, ours):
        for rank in ranks:
            rank.copy_(ours)
        if not ours[0]:  # the names have not changed
            for rank, data, times in zip(ranks, (2.0, next(other)), spans, strict=True):
                rank[-5:] = torch.tensor([data, *times])

    records.gather = Gather(World(0, 2, 0, torch.device("cpu")))
    records.world = records.gather.world
    monkeypatch.setattr(torch.distributed, "all_gather_object", names)
    monkeypatch.setattr(torch.distributed, "all_gather", numbers)
    for step in range(1, 5):
        timer.count(tokens=10, labels=5, slots=20, flops=0)
        if step % 2 == 0:
            numbers = {"loss": torch.tensor(2.5), "norm": torch.tensor(1.0)}
            read = timer.end(numbers | {"bad_steps": torch.tensor(0.0)}, dict)
            records.add(step, 20, 10, 1e-3, read)
    records.flush()
    assert [r["perf/data_ms"] for r in recorded] == [3.0, 2.0]
    for r in recorded:
        assert r["perf/comm_wait_ms"] == [3.0, 5.0]
        seconds = 2 * r["perf/step_ms"] / 1e3
        rates = [r[f"perf/{key}_per_s"] * seconds for key in ("toks", "label_toks", "slots")]
        assert rates == pytest.approx([20, 10, 40]) and r["data/fill"] == 0.5


def test_medians_are_of_the_steps_since_the_last_start():
    """Those before a resume may be another script's."""
    keys = ("step_ms", "slots_per_s", "toks_per_s", "label_toks_per_s", "data_ms")
    history = SimpleNamespace(tokens=7, label_tokens=7, evals=[], exact=[], records=[])
    for step in range(1, 9):
        of = {f"perf/{key}": float(step) for key in keys} | dict.fromkeys(TIMES)
        loss = float("nan") if step == 1 else 2.0 + abs(step - 6)
        of |= {"perf/peak_mem_gb": [0.0], "train/loss": loss, "train/skipped": False}
        history.records.append({"step": step, **of})
    for first, median in ((0, 5.5), (4, 7.5), (8, 5.5)):  # 8: nothing was left to train
        history.first_step = first
        summary = summarise(history, SETTINGS, 1.0, None, None, [0.0])
        assert (summary["steps"], summary["median_step_ms"]) == (8, median)
        assert (summary["best_loss"], summary["last_loss"]) == (2.0, 4.0)  # of steps with one


@pytest.fixture
def on_terminal(monkeypatch):
    """From the moment that it is called."""
    terminal = SimpleNamespace(isatty=lambda: True)
    return lambda: monkeypatch.setattr("sys.stdout", terminal)


def test_a_line_fits_the_terminal(on_terminal, monkeypatch):
    fields = ["step 1234/5000", "loss 1.2345", "load 1.3x", "gnorm 12.34", "lr 2.0e-05"]
    fields += ["1234 ms (comm 123)", "123.4k tok/s (12.3k labels)", "mfu 45.6%", "mem 76.5 GiB"]
    fields.append("eta 1:34:56")
    assert beyond_terminal(fields) == ()  # written to a file
    on_terminal()

    def shown(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        line = " | ".join(without(fields, beyond_terminal(fields)))
        assert len(line) <= columns
        return line

    always = ("step 1234/5000", "loss 1.2345", "1234 ms", "mem 76.5 GiB", "eta 1:34:56")
    lines = {columns: shown(columns) for columns in (200, 150, 110, 80)}
    assert all(part in line for line in lines.values() for part in always)
    assert lines[200] == " | ".join(fields)
    assert lines[150] == lines[200].replace(" (12.3k labels)", "")
    assert "lr 2.0e-05" in lines[110] and "gnorm" not in lines[110]


def test_a_step_is_logged_before_its_evaluation():
    timer, records, recorded, said = a_run(3)
    add(timer, records, 1)
    add(timer, records, 2)
    records.add_eval(2, 1.5, 1, 2)
    assert [line[:20] for line in said[-2:]] == [said[-2][:20], "step 2/3 | held-out "]
    assert said[-2].startswith("step 2/3 | loss ")
    assert [record["step"] for record in recorded] == [1, 2, 2] and "eval/loss" in recorded[-1]


def test_a_step_that_waited_for_the_allocator_says_so_once(monkeypatch):
    """With what to do about it. The line and the table have what the card must hold."""
    totals = iter([7, 7, 7, 10, 14, 16])  # retries so far: 7 in loading, then after each step
    monkeypatch.setattr(timing, "memory_peaks", lambda device: (70.0, 77.1, next(totals)))
    timer, records, recorded, said = a_run(5)
    for step in range(1, 6):
        add(timer, records, step)
    assert [r["perf/alloc_retries"] for r in recorded] == [[0], [0], [3], [4], [2]]
    assert [r["perf/reserved_gb"] for r in recorded] == [[77.1]] * 5
    warnings = [line for line in said if "warning" in line]
    assert len(warnings) == 1 and "ran out 3 times up to step 3" in warnings[0]
    assert "Use less memory: 1. " in warnings[0]
    assert all("mem 77.1 GiB" in line for line in said if line.startswith("step"))
    summary = summarise(records.history, SETTINGS, 1.0, None, None, [0.0])
    assert (summary["alloc_retries"], summary["late_alloc_retries"]) == (9, 6)  # late: 4 + 2
    assert summary["row"]["peak_mem(G)"] == "77.1" and summary["peak_mem_gb"] == [70.0]
