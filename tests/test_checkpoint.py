"""Checkpoints as files: which is found, past damage, after any kill."""

import contextlib
import math
import os
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ROOT, args_with, python

from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.flags.args import names_of
from llm_demo.machine.dist import lost_peer
from llm_demo.run import checkpoint_files, saver


class Voice:
    """What Saver needs of a run's log, and what the loop adds to a checkpoint's facts."""

    def __init__(self, folder, lr=0.1, **settings):
        self.folder, self.said = folder, []
        defaults = dict.fromkeys(names_of("resume")) | {"max_steps": 99}
        self.settings = {**defaults, "lr": lr, **settings}

    def say(self, text):
        self.said.append(text)

    def facts(self):
        more = {"tokens": 0, "label_tokens": 0, "evals": self.evals, "adam_steps": 0, "exact": []}
        scale = {"scale": 1.0, "good_steps": 0}
        return {"eval_loss": None, "loss_scale": scale, **more}

    evals = ()

    def record(self, facts):
        pass

    writing = staticmethod(contextlib.nullcontext)

    def gone(self):
        return not self.folder.is_dir()


pytestmark = pytest.mark.usefixtures("alone")
WORLD = World(0, 1, 0, torch.device("cpu"))
FLAGS = {
    "save": False,
    "resume": "auto",
    "resume_anyway": False,
    "keep_last": 0,
    "early_stopping": 0,
    "export": "none",
}


def make(folder, **flags):
    return checkpoints_of(Voice(folder), {"seed": 1}, **flags)


def checkpoints_of(voice, identity, **flags):
    identity = {"tokens and labels": "same", **identity}
    return saver.Saver(args_with(**FLAGS | flags), WORLD, voice, identity)


def state(step):
    return {"a.weight": torch.full((50, 7), float(step)), "a.weight.exp_avg": torch.arange(9.0)}


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, state(step), checkpoints.log.facts(), wait=False)
    checkpoints.finish()


def found(folder, **more):
    """(step that --resume auto goes on from, what it says)."""
    checkpoints = make(folder, **more)
    if checkpoints.path:
        t = {name: torch.zeros_like(x) for name, x in state(0).items()}
        checkpoints.load(t)
        assert all(torch.equal(t[n], x) for n, x in state(checkpoints.first_step).items())
    return checkpoints.first_step, " ".join(checkpoints.log.said)


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "truncated": (lambda f: os.truncate(f, 100), "__0_0.distcp has 100 bytes instead of"),
    "bit flipped": (flip, "__0_0.distcp has changed since it was written: its SHA-256 differs"),
    "removed": (os.remove, "__0_0.distcp is missing"),
    "no manifest": (
        lambda f: os.remove(f.parent / "manifest.json"),
        "manifest.json: .*No such",
    ),
    "half a manifest": (lambda f: os.truncate(f.parent / "manifest.json", 20), "manifest.json: "),
    "facts changed": (lambda f: flip(f.parent / "trainer.json"), "trainer.json has changed since"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_said(damage, tmp_path):
    save(make(tmp_path), 1, 2, 3)
    spoil, reason = DAMAGE[damage]
    for step in (2, 3):
        spoil(tmp_path / f"checkpoints/step_{step:08d}/__0_0.distcp")
    step, said = found(tmp_path)
    assert step == 1 and re.search("step_00000003 skipped: " + reason, said), said
    assert "step_00000002 skipped" in said
    checkpoints = make(tmp_path, save=True, keep_last=2)
    checkpoints.tidy()  # puts them aside: they are not to be counted as kept
    save(checkpoints, 2)
    assert [p.name[-1] for p in checkpoint_files.published(tmp_path / "checkpoints")] == ["2", "1"]
    named = (tmp_path / "checkpoints/damaged_step_00000003").rename(tmp_path / "step_00000003")
    message = "no intact checkpoint" if damage == "no manifest" else "step_00000003: "
    with pytest.raises(UserError, match=message):
        make(tmp_path, resume=str(named))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again(tmp_path):
    save(make(tmp_path), 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"checkpoints/step_{step:08d}/trainer.json")
    with pytest.raises(UserError, match=f"no checkpoint in {tmp_path}/checkpoints is intact: to "):
        make(tmp_path)
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    step, said = found(tmp_path)
    assert step == 0 and "starting from step 1" in said


def test_keeps_the_last_and_the_best(tmp_path):
    checkpoints = make(tmp_path, keep_last=2, early_stopping=1)
    for step, loss in enumerate((5.0, 3.0, 4.0, None, 4.5, math.nan), 1):
        checkpoints.log.evals += ((step, loss),) * (loss is not None)
        save(checkpoints, step)
    kept = [path.name[-1] for path in checkpoint_files.published(tmp_path / "checkpoints")]
    assert kept == ["6", "5", "2"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step_00000006\n"
    assert not list((tmp_path / "checkpoints").glob(".part-*"))


def test_without_room_for_copies_training_waits(tmp_path, monkeypatch):
    """On this node, whose ranks all make copies."""
    tensors = {**state(1), **saver.rng_state(WORLD)}.values()
    of_one = sum(-(-t.nbytes // 64) * 64 for t in tensors)
    monkeypatch.setattr(saver, "free_host_memory", lambda: 1.5 * of_one / 0.8)
    for ranks in (1, 2):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        folder = tmp_path / str(ranks)
        folder.mkdir()
        checkpoints = make(folder, save=True, save_every=2)
        checkpoints.prepare_folder(lambda: state(1), last=False)
        checkpoints.save(2, state(2), checkpoints.log.facts(), wait=False)
        waits = any("too little host memory for copies" in line for line in checkpoints.log.said)
        assert waits == (not checkpoints.thread) == (ranks == 2)
        checkpoints.finish()
        assert found(folder)[0] == 2


def test_memory_for_the_first_copies_is_there_before_they_are_made(tmp_path):
    """Also of tensors on the host, as --optimizer_on_host has them: training would wait for it."""
    checkpoints = make(tmp_path, save=True, save_every=2)
    checkpoints.prepare_folder(lambda: state(1), last=False)
    checkpoints.reserving.join()
    prepared = {name: checkpoints.staged[name].data_ptr() for name in state(2)}
    checkpoints.save(2, state(2), checkpoints.log.facts(), wait=False)
    checkpoints.finish()
    assert {name: checkpoints.staged[name].data_ptr() for name in state(2)} == prepared
    assert found(tmp_path)[0] == 2


def test_other_data_is_refused_with_the_difference_named(tmp_path):
    save(make(tmp_path), 1)
    voice, identity = Voice(tmp_path, lr=0.2), {"seed": 2, "b": 4}
    said = "different rows: seed was 1, is 2; b was None, is 4; to .*--resume_"
    with pytest.raises(UserError, match=said):
        checkpoints_of(voice, identity)
    assert checkpoints_of(voice, identity, resume_anyway=True).first_step == 1
    assert voice.said[-1] == "resume: settings changed: lr was 0.1, is 0.2"


def test_settings_of_another_script_are_no_change_at_their_defaults(tmp_path):
    of_fsdp = {"freeze_router": False, "lora_dropout": 0.0, "psgd_rank": 0, "router_aux_loss": 0.0}
    of_pp = Voice(tmp_path)
    for name in of_fsdp:
        del of_pp.settings[name]
    for step, changed, said in (
        (1, {}, ""),
        (2, {"psgd_rank": 8}, "settings changed: psgd_rank was 8, is 0"),
        (3, {"router_aux_loss": 0.01}, "settings changed: router_aux_loss was 0.01, is 0.0"),
    ):
        of_pp.said.clear()
        save(checkpoints_of(Voice(tmp_path, **of_fsdp | changed), {}, resume=None), step)
        checkpoints_of(of_pp, {})
        assert "".join(of_pp.said).removeprefix("resume: ") == said


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path):
    checkpoints = make(tmp_path)
    del checkpoints.identity["tokens and labels"]
    save(checkpoints, 1)
    with pytest.raises(UserError, match="tokens and labels was None, is .*add --resume_anyway"):
        make(tmp_path)


def test_a_file_that_rank_0_does_not_see_is_published_by_nobody(tmp_path, monkeypatch):
    """As another node's, whose --output_dir is a folder of its own."""
    exists = Path.exists
    unseen = lambda path: path.suffix != ".distcp" and exists(path)  # noqa: E731
    monkeypatch.setattr(Path, "exists", unseen)
    with pytest.raises(UserError, match="rank 0 can't see __0_0.distcp: all nodes must share"):
        save(make(tmp_path), 1)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_loses_none(
    in_background, tmp_path, monkeypatch
):
    """A lost peer is no full disk: its exit code is 1, and a restart goes on."""
    checkpoints = make(tmp_path)
    checkpoints.in_background = in_background
    save(checkpoints, 1)

    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(checkpoint_files.dcp, "save", fail)
    error = OSError(28, "No space left on device")
    with pytest.raises(UserError, match="step_00000002 can't be written: .*No space left"):
        save(checkpoints, 2)
    checkpoints = make(tmp_path, save=True)
    checkpoints.in_background = in_background
    error = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9")
    with pytest.raises(RuntimeError) as raised:
        save(checkpoints, 2)
    assert lost_peer(raised.value)
    assert found(tmp_path)[0] == 1


# ---------------------------------------------------------------- killed

KILLED = """
import os, signal, sys, torch
sys.path[:0] = [{tests!r}, {root!r}]
import torch.distributed as dist
import test_checkpoint as t

def trial(folder, at):
    "A run that saves step after step, killed at the `at`-th event of opening, making, renaming ..."
    count = 0
    def hook(event, args):
        nonlocal count
        if event in EVENTS and "checkpoints" in str(args[0]):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    checkpoints = t.make(folder, keep_last=2)
    checkpoints.in_background = at % 2 == 0
    first = checkpoints.first_step
    vars(checkpoints.args)["save"] = True
    checkpoints.tidy()
    sys.addaudithook(hook)
    t.save(checkpoints, *range(first + 1, first + 4))
    os._exit(0)

EVENTS = {{"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}}
from pathlib import Path
for line in sys.stdin:  # folder and number of the event, or of the microsecond, to be killed at
    folder, at, kind = line.split()
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # gloo of torch 2.8 prints
        if kind == "time":
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, int(at) / 1e6)
            at = 0
        trial(Path(folder), int(at))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def kill_and_resume(tmp_path, points):
    """Saves, killed at each of `points`, one after another in one folder; -> how many were."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(tests=str(ROOT / "tests"), root=str(ROOT)))
    worker = subprocess.Popen(
        [python(), script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    save(make(tmp_path), 1)
    killed, newest = 0, 1
    for kind, at in points:
        print(tmp_path, at, kind, file=worker.stdin, flush=True)
        code = int(worker.stdout.readline())
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        step, said = found(tmp_path)  # loads it and compares every number
        assert newest <= step <= newest + 3 and " skipped: " not in said, said
        assert step == newest + 3 if code == 0 else True
        newest = step
        if newest > 50:  # begin anew, so that files stay few
            shutil.rmtree(tmp_path / "checkpoints")
            save(make(tmp_path), 1)
            newest = 1
    worker.stdin.close()
    worker.wait(20)
    return killed


def test_killed_at_some_file_operations(tmp_path):
    rng = random.Random(1)
    points = [("event", rng.randrange(1, 70)) for _ in range(12)]
    assert kill_and_resume(tmp_path, points) >= 8


@pytest.mark.slow
def test_killed_at_every_file_operation_and_at_random_times(tmp_path):
    rng = random.Random(2)
    points = [("event", at) for at in range(1, 80)]
    points += [("time", rng.randrange(1, 60_000)) for _ in range(600)]
    killed = kill_and_resume(tmp_path, points)
    print(f"killed {killed} times in {len(points)} runs")
    assert killed >= 300


def test_another_configuration_of_the_model(tmp_path):
    """Its weights would fit, and the run would go on with other numbers."""

    def begin(voice, model, **more):
        args = args_with(**FLAGS | more)
        return saver.Saver(args, WORLD, voice, {"tokens and labels": "same"}, model=model)

    voice = Voice(tmp_path)
    model = {"rope_parameters": {"rope_theta": 1e6}, "rms_norm_eps": 1e-6}
    save(begin(voice, model), 1)
    other = {"rope_parameters": {"rope_theta": 1e4}, "rms_norm_eps": 1e-6}
    changed = "configuration has changed: rope_parameters rope_theta was 1000000.0, is 10000.0"
    with pytest.raises(UserError, match=f"{changed}; to continue anyway, add --resume_anyway"):
        begin(voice, other)
    assert begin(voice, other, resume_anyway=True).first_step == 1
    # another version of transformers may name more or fewer entries
    assert begin(voice, {"rms_norm_eps": 1e-6, "new": True}).first_step == 1
