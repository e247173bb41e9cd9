"""FSDP2 inside a pipeline: the order of each stage's work, and its launcher end to end."""

import itertools
import json
import re
import sys
from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    LAUNCHERS,
    ROOT,
    TINY,
    logged,
    run,
    slow,
    smaller_model,
    torchrun,
    train_cases,
)
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from fsdp import copy_engines
from fsdp_pp import transfers
from fsdp_pp.orders import (
    BACKWARD,
    FORWARD,
    forwards_only,
    order,
    stages_of,
    with_receives,
)
from llm_demo.core.mesh import World

LAUNCHER = LAUNCHERS["fsdp_pp"]
FIRST = ROOT / "data/first_run.jsonl"
OURS = ("1f1b", "gpipe", "interleaved", "v")
TWICE = ("interleaved", "v")
GRID = [
    (schedule, stages, micro_batches)
    for schedule, stages, micro_batches in itertools.product(OURS, range(1, 7), range(1, 25))
    if stages > 1 or schedule not in TWICE
    if schedule != "interleaved" or micro_batches % stages == 0
]


def simulate(works, where, forward=0.0, backward=0.0):
    """Do the work of all stages; -> (how long it takes, how long each stage is busy).

    A piece of work waits for what it receives, as run_stage does. What another stage sends comes in
    the order in which it was sent: it must be of the micro-batch that is worked on."""
    last, sent = len(where) - 1, {}  # (kind, piece): (micro-batch, time) of each that is under way
    at, now, busy = [0] * len(works), [0.0] * len(works), [0.0] * len(works)
    while any(i < len(work) for i, work in zip(at, works, strict=True)):
        before = list(at)
        for stage, work in enumerate(works):
            while at[stage] < len(work):
                kind, piece, k = work[at[stage]]
                assert where[piece] == stage
                start = now[stage]
                if piece > 0 if kind == FORWARD else piece < last:
                    if not sent.get((kind, piece)):
                        break  # it waits
                    sent_k, there = sent[kind, piece].popleft()
                    assert sent_k == k
                    start = max(start, there)
                takes = forward if kind == FORWARD else backward
                now[stage], busy[stage] = start + takes, busy[stage] + takes
                into = piece + 1 if kind == FORWARD else piece - 1
                sent.setdefault((kind, into), deque()).append((k, now[stage]))
                at[stage] += 1
        assert at != before, "a deadlock"
    ends = (FORWARD, last + 1), (BACKWARD, -1)  # where nobody receives
    assert not any(left for key, left in sent.items() if key not in ends)
    return max(now), busy


def run_with_waiting_hosts(works, where):
    """Do the work of all stages, whose hosts wait in the middle and at the end of each piece of
    work until all that they have launched is done; a transfer is done when both sides launched it.

    works: as of with_receives."""
    last, sends, receives = len(where) - 1, Counter(), Counter()
    ended = [False] * len(works)

    def host(stage):
        mine = []  # (launched by the other side, what, how many of it were launched here)

        def wait():
            while any(other[what] < n for other, what, n in mine):
                yield

        for kind, piece, _, now in works[stage]:
            for what in now:
                receives[what] += 1
                mine.append((sends, what, receives[what]))
            yield from wait()
            into = piece + 1 if kind == FORWARD else piece - 1
            if 0 <= into <= last and where[into] != stage:
                sends[kind, into] += 1
                mine.append((receives, (kind, into), sends[kind, into]))
            yield from wait()
        ended[stage] = True

    hosts = [host(stage) for stage in range(len(works))]
    while not all(ended):
        before = sends.total() + receives.total(), sum(ended)
        for h in hosts:
            next(h, None)
        assert (sends.total() + receives.total(), sum(ended)) != before, "a deadlock"
    assert sends == receives


def test_no_host_waits_for_ever():
    """Not even if it waits for the device at any time, and no transfer is buffered."""
    for schedule, stages, micro_batches in GRID:
        where = stages_of(schedule, stages)
        works = works_of(schedule, stages, micro_batches)
        ordered = [with_receives(works, where, stage) for stage in range(stages)]
        for work, with_more in zip(works, ordered, strict=True):
            launched, received = Counter(), Counter()
            for (kind, piece, k), (*what, now) in zip(work, with_more, strict=True):
                assert what == [kind, piece, k]
                launched.update(now)
                if (kind, piece) in launched:
                    received[kind, piece] += 1  # is under way before it is needed
                    assert received[kind, piece] <= launched[kind, piece]
            assert received == launched
        run_with_waiting_hosts(ordered, where)


def run_with_mailboxes(works, where, slots):
    """Do the work of all stages, whose hosts wait at the end of each piece of work until all that
    they have launched is done. A stage sends into a free slot of the receiver, of which each
    direction between two pieces has so many, and takes what it needs."""
    last, full, sent = len(where) - 1, Counter(), Counter()

    def host(stage):
        for kind, piece, _ in works[stage]:
            before = piece - 1 if kind == FORWARD else piece + 1
            if 0 <= before <= last and where[before] != stage:
                while not full[kind, piece]:
                    yield
                full[kind, piece] -= 1
            into = piece + 1 if kind == FORWARD else piece - 1
            if 0 <= into <= last and where[into] != stage:
                while full[kind, into] == slots:
                    yield
                full[kind, into] += 1
                sent[kind, into] += 1
            done[stage] += 1

    done, hosts = [0] * len(works), [host(stage) for stage in range(len(works))]
    while done != [len(work) for work in works]:
        before = list(done)
        for h in hosts:
            next(h, None)
        assert done != before, "a deadlock"
    assert not full.total()


def test_no_host_waits_for_ever_for_a_slot():
    for schedule, stages, micro_batches in GRID:
        where = stages_of(schedule, stages)
        works = works_of(schedule, stages, micro_batches)
        run_with_mailboxes(works, where, copy_engines.Mailbox.SLOTS)
        works = [forwards_only(schedule, stages, s, micro_batches) for s in range(stages)]
        run_with_mailboxes(works, where, copy_engines.Mailbox.SLOTS)


@pytest.mark.parametrize(
    "kinds, local_size, p2p_off, early",
    [
        (["NV18"], 2, "0", False),
        (["NV4", "SYS"], 2, "0", True),
        (["PIX"], 2, "0", True),
        ([], 2, "0", True),
        (["NV18"], 1, "0", True),  # another node
        (["NV18"], 2, "1", True),
    ],
)
def test_receives_begin_early_on_slow_links(kinds, local_size, p2p_off, early, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", p2p_off)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_size))
    machine = {
        "llm_demo.machine.device.links": lambda: kinds,
        "fsdp_pp.transfers.from_rank0": lambda world, make: make(),
    }
    for name, part in machine.items():
        monkeypatch.setattr(name, part)
    said = []
    chosen = transfers.receive_early(World(0, 2, 0, torch.device("cuda", 0)), said.append)
    assert chosen == early and ("begin early" in said[0]) == early


@pytest.mark.parametrize("early", [True, False])
def test_when_a_receive_begins(early, monkeypatch):
    """With the work before the one that it is launched for, or with this one."""
    times, after = iter("abcdef"), []
    stream = SimpleNamespace(record_event=lambda: next(times))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    links = transfers.Links([], torch.empty(0, 0), 0, torch.device("cuda"))
    links.by_nccl(early)
    links.received[FORWARD, 1] = SimpleNamespace(expect=lambda shape, dtype, t: after.append(t))
    for _ in range(3):
        links.expect(FORWARD, 1, (1,), torch.float32)
        links.begin()
    assert after == ([None, "a", "b"] if early else ["a", "b", "c"])


def most_held(work):
    """{piece: micro-batches whose activations it has} when a stage holds most of them."""
    now, most = Counter(), Counter()
    for kind, piece, _ in work:
        now[piece] += 1 if kind == FORWARD else -1
        most = now.copy() if now.total() > most.total() else most
    return dict(most)


def works_of(schedule, stages, micro_batches):
    return [order(schedule, stages, s, micro_batches) for s in range(stages)]


def test_every_order_is_complete_and_ends():
    for schedule, stages, micro_batches in GRID:
        where = stages_of(schedule, stages)
        works = works_of(schedule, stages, micro_batches)
        for stage, work in enumerate(works):
            mine = [piece for piece, at in enumerate(where) if at == stage]
            assert len(mine) == (2 if schedule in TWICE else 1)
            for kind, piece in itertools.product((FORWARD, BACKWARD), mine):
                done = [k for *what, k in work if what == [kind, piece]]
                assert done == list(range(micro_batches)), (schedule, stages, stage)
            assert len(work) == 2 * len(mine) * micro_batches
            done = set()
            for kind, piece, k in work:
                assert kind == FORWARD or (piece, k) in done
                done.add((piece, k))
        simulate(works, where)


@pytest.mark.parametrize("schedule", OURS)
def test_an_evaluation_ends_with_any_number_of_batches(schedule):
    """No host waits for ever."""
    for stages, count in itertools.product(range(1, 7), range(12)):
        where = stages_of(schedule, stages)
        works = [forwards_only(schedule, stages, s, count) for s in range(stages)]
        every = itertools.product([FORWARD], range(len(where)), range(count))
        assert sorted(sum(works, [])) == sorted(every)
        simulate(works, where)
        run_with_waiting_hosts([with_receives(works, where, s) for s in range(stages)], where)


def test_interleaved_is_pytorchs_order():
    kinds = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD}
    for _, stages, M in (case for case in GRID if case[0] == "interleaved"):
        theirs = SimpleNamespace(
            n_local_stages=2, pp_group_size=stages, microbatches_per_round=stages, _n_microbatches=M
        )
        for stage, work in enumerate(works_of("interleaved", stages, M)):
            actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(theirs, stage)
            expected = [
                (kinds[a.computation_type.name], a.stage_index, a.microbatch_index)
                for a in actions
                if a  # None: the stage waits
            ]
            assert work == expected, (stages, M, stage)


def test_what_is_held():
    """Micro-batches whose activations a stage has at once, counted from its order. In v embedding
    and head are on one stage, so tied ones need no transfer."""
    assert stages_of("v", 3) == [0, 1, 2, 2, 1, 0]
    for schedule, stages, M in GRID:
        where = stages_of(schedule, stages)
        for stage, work in enumerate(works_of(schedule, stages, M)):
            later = stages - 1 - stage
            expected = {
                "1f1b": min(later + 1, M),
                "gpipe": M,
                "interleaved": min(2 * later + stages + 1, 3 * stages + 1, 2 * M),
                "v": None,
            }[schedule]
            most = most_held(work)
            if schedule == "v":
                assert max(most.values()) <= min(2 * stages - 1, M)
            else:
                assert sum(most.values()) == expected, (schedule, stages, M, stage)
            assert {where[piece] for piece in most} == {stage}
    assert [most_held(work) for work in works_of("1f1b", 3, 8)] == [{0: 3}, {1: 2}, {2: 1}]
    # two of the first piece, two of the second, and then two more of the first before a backward
    assert most_held(order("interleaved", 2, 0, 8)) == {0: 3, 2: 2}
    assert [most_held(work) for work in works_of("v", 2, 8)] == [{0: 3, 3: 2}, {1: 3, 2: 3}]


def test_how_long_stages_wait():
    """1f1b and gpipe wait for (stages - 1) micro-batches, interleaved and v half as long."""
    for schedule, stages, M in itertools.product(OURS, (2, 3, 4), (8, 12, 16)):
        if schedule == "interleaved" and M % stages:
            continue
        share = 2 if schedule in TWICE else 1  # a piece is half of a stage
        cost = 1 / share, 2 / share
        ends, busy = simulate(works_of(schedule, stages, M), stages_of(schedule, stages), *cost)
        assert busy == [M * 3] * stages
        assert ends - M * 3 == 3 * (stages - 1) / share, (schedule, stages, M)


# ---------------------------------------------------------------- the launcher

STEPS = 2
SMALL = {
    "MAX_STEPS": str(STEPS), "DTYPE": "fp32", "SAMPLE_TOKENS": "6", "LOG_EVERY": "1",
    "PYTHON": sys.executable,
}  # fmt: skip
TWO = {"NPROC_PER_NODE": "2"}


def launch(launcher, out, *flags, **env):
    done = run(["bash", ROOT / launcher, "--output_dir", out, *flags], **{**SMALL, **env})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def numbers(folder, *keys):
    return [record[key] for key in keys for record in logged(folder, key)]


def answers(said):
    return re.findall(r"^(?:prompt|answer|expected) .*", said, re.M)


LOSSES = "train/loss", "train/grad_norm", "eval/loss"


def assert_like(one_process, said, out):
    """Losses, norms and sample answers are those of one process."""
    expected, alone = one_process
    assert numbers(out, *LOSSES) == pytest.approx(numbers(alone, *LOSSES), rel=1e-5)
    assert len(answers(said)) == 3 * 3 and answers(said) == answers(expected)


@pytest.fixture(scope="module")
def heldout(tmp_path_factory):
    """Flags: a few rows to evaluate on."""
    lines = FIRST.with_suffix(".heldout.jsonl").read_text().splitlines(True)
    file = tmp_path_factory.mktemp("heldout") / "heldout.jsonl"
    file.write_text("".join(lines[:20]))
    return "--eval_json", file


@pytest.fixture(scope="module")
def one_process(heldout, tmp_path_factory):
    """(what it says, its folder): the same 16 rows a step."""
    out = tmp_path_factory.mktemp("one") / "run"
    env = {"NPROC_PER_NODE": "1", "GRAD_ACCUM_STEPS": "4"}
    return launch("fsdp/launch_fsdp.sh", out, "--no_fsdp", *heldout, **env), out


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs 2 GPUs")
def test_the_launcher_trains_evaluates_and_answers(one_process, heldout, tmp_path):
    out = tmp_path / "run"
    said = launch(LAUNCHER, out, *heldout, **TWO)
    assert "pipeline: stage 0: 3 blocks" in said and "1f1b pipeline of 2 stages: 3," in said
    assert_like(one_process, said, out)
    assert len(numbers(out, *LOSSES)) == STEPS + STEPS + 2
    assert numbers(out, "eval/exact") == numbers(one_process[1], "eval/exact")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == STEPS and len(summary["median_comm_ms"]) == 2
    config = json.loads((out / "config.json").read_text())
    assert config["parallelism"] == "1f1b pipeline of 2 stages"
    assert (config["global_batch"], config["partition"]) == (16, "3,3")


WAYS = [(2, "interleaved"), (2, "v"), (4, "1f1b"), (4, "interleaved")]


@pytest.mark.slow
@pytest.mark.parametrize("processes, schedule", WAYS)
def test_other_schedules_evaluate_and_answer(processes, schedule, one_process, heldout, tmp_path):
    if 0 < torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    accum = {2: "4", 4: "2"}[processes]
    env = {"NPROC_PER_NODE": str(processes), "GRAD_ACCUM_STEPS": accum, "SCHEDULE": schedule}
    said = launch(LAUNCHER, tmp_path / "run", *heldout, **env)
    assert_like(one_process, said, tmp_path / "run")


SHARED = [
    (2, 2, "v"), slow(2, 2, "gpipe"), slow(2, 2, "interleaved"), slow(4, 2, "interleaved"),
    slow(4, 4, "1f1b"), slow(3, 3, "v"),
]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs")
@pytest.mark.parametrize("processes, stages, schedule", SHARED)
def test_mailboxes_carry_what_stages_send(
    processes, stages, schedule, one_process, heldout, tmp_path
):
    """On CPUs that stand in for GPUs."""
    flags = {
        "--model_name_or_path": TINY, "--train_json": FIRST, "--eval_json": heldout[1],
        "--stages": stages, "--schedule": schedule, "--grad_accum_steps": 4 * stages // processes,
        "--micro_batch_size": 4, "--seq_len": 64, "--lr": 2e-3, "--max_steps": STEPS,
        "--dtype": "fp32", "--log_every": 1, "--sample_tokens": 6,
        "--output_dir": tmp_path / "run",
    }  # fmt: skip
    flat = [str(x) for pair in flags.items() for x in pair]
    done = torchrun(processes, ROOT / "tests/mailbox_worker.py", tmp_path, "--copy_engines", *flat)
    assert_like(one_process, done.stdout, tmp_path / "run")


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "schedule, flag, chosen",
    [
        *((schedule, "--copy_engines", "yes") for schedule in ("1f1b", "interleaved", "v")),
        *((schedule, "--no_copy_engines", "no") for schedule in ("1f1b", "interleaved")),
    ],
)
def test_copy_engines_send_the_same(schedule, flag, chosen, one_process, heldout, tmp_path):
    if reason := copy_engines._lacks(World(0, 2, 0, torch.device("cuda", 0))):
        pytest.skip(reason)
    env = {**TWO, "SCHEDULE": schedule, "GRAD_ACCUM_STEPS": "4"}
    said = launch(LAUNCHER, tmp_path / "run", flag, *heldout, **env)
    assert f"copy engines: {chosen} (as requested)" in said
    assert_like(one_process, said, tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert all(ms > 0 for ms in summary["median_comm_ms"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants 4 processes on a CPU")
def test_four_processes(tmp_path):
    """An estimate has a column per rank, here of two stages that are sharded over two ranks. And
    resharding changes no number in 16 bits: with both ends of the model on a stage, there are
    gathers of different roots, which FSDP2 does not order, so they must not share memory."""
    model = smaller_model(tmp_path / "model", tie_word_embeddings=False)
    flags = [
        "--model_name_or_path", model, "--train_json", FIRST, "--seq_len", "64", "--no_save",
        "--sample_tokens", "0", "--dtype", "bf16", "--micro_batch_size", "1",
        "--grad_accum_steps", "4", "--max_steps", "2", "--log_every", "1",
    ]  # fmt: skip
    both_ends = [*flags, "--schedule", "v"]
    cases = {
        "estimated": [*flags, "--estimate"],
        "alone": [*flags, "--stages", "1", "--copy_engines", "--dry_run"],
        "whole": [*flags, "--stages", "4", "--reshard_after_forward", "--dry_run"],
        "kept": both_ends,
        "resharded": [*both_ends, "--reshard_after_forward"],
    }
    done = train_cases(tmp_path, "fsdp_pp", 4, cases)
    table = done.stdout[done.stdout.index("estimated peak memory") :].splitlines()
    total = [float(x) for x in re.findall(r"\d+\.\d+", next(x for x in table if "total" in x))]
    assert len(total) == 4 and total[0] == total[1] and total[2] == total[3]
    assert not (tmp_path / "estimated").exists()
    assert "warning: --copy_engines has no effect: one stage sends nothing" in done.stdout
    assert "--reshard_after_forward has no effect: no stage is sharded" in done.stdout
    kept, resharded = (numbers(tmp_path / name, *LOSSES) for name in ("kept", "resharded"))
    assert len(kept) == 6 and kept == resharded
