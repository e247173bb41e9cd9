"""What a run does to its folder, and what it never loses: in one process, both scripts alike."""

import contextlib
import fcntl
import gc
import json
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROOT,
    args_with,
    command_line,
    logged,
    run,
    script_of,
    slow,
    smaller_model,
)
from safetensors.torch import load_file, save_file
from test_checkpoint import make, save, state
from test_security import sign

from llm_demo.core.errors import Stopped, UserError
from llm_demo.core.mesh import World
from llm_demo.core.optim import LossScale
from llm_demo.machine import files
from llm_demo.run import checkpoint_files, records
from llm_demo.run import folder as run_folder
from llm_demo.run import log as run_lock
from llm_demo.run.export_run import export
from llm_demo.run.folder import environment

WORLD = World(0, 1, 0, torch.device("cpu"))
pytestmark = pytest.mark.usefixtures("alone")
KINDS = ["fsdp", "pp"]
ALL = [*KINDS, slow("zero"), slow("fsdp_pp")]


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """train(kind, flags): a script's main() with a small model and data, in this process; what was
    printed before is dropped."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":  # one without fp16 instructions
        monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    row = '{"prompt": "Why?", "completion": "Because it is so."}\n'
    (tmp_path / "data.jsonl").write_text(row * 40)
    smaller_model(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def call(kind, flags):
        capsys.readouterr()
        script = script_of(kind)
        more = {"fsdp": "--no_fsdp", "zero": ""}.get(kind, "--stages 1")
        argv = (
            f"--train_json data.jsonl --model_name_or_path tiny "
            f"--seq_len 32 --sample_tokens 0 --output_dir out {more} "
            f"--warmup_steps 0 --lr 1e-3 --no_comm_timer {flags}"
        ).split()
        command_line(monkeypatch, script.__file__, *argv)
        monkeypatch.setattr(script, "start", lambda: WORLD)
        gc.collect()  # files of earlier calls, whose numbers this one would get
        before = open_files()
        try:
            script.main()
        finally:
            for number, _ in open_files() - before:  # as if its process had ended
                with contextlib.suppress(OSError):
                    fcntl.flock(number, fcntl.LOCK_UN)
        return tmp_path / "out"

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


def open_files():
    """(number, path) of each."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add((int(link.name), os.readlink(link)))
    return found


def old_run(folder):
    """An earlier run's folder; -> its files."""
    folder.mkdir()
    for name in ("cmd.sh", "config.json", "metrics.jsonl"):
        (folder / name).write_text("precious")
    return contents(folder)


def contents(folder):
    return {p.relative_to(folder): p.is_file() and p.read_bytes() for p in folder.rglob("*")}


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_ends_or_stops_closes_its_tracker(stopped, train, tmp_path, monkeypatch):
    """The process may end without Python's exit handlers, which would close it."""
    begun, calls, numbers = {}, [], {}
    writer = SimpleNamespace(
        add_scalar=lambda key, value, step: numbers.setdefault(step, {}).update({key: value}),
        add_text=lambda *_: None,
        flush=lambda: stopped and os.kill(os.getpid(), signal.SIGTERM),
        close=lambda: calls.append("closed"),
    )
    tensorboard = SimpleNamespace(SummaryWriter=lambda _: calls.append("opened") or writer)
    wandb = SimpleNamespace(
        init=lambda **options: begun.update(options) or calls.append("began"),
        finish=lambda: calls.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with pytest.raises(Stopped) if stopped else contextlib.nullcontext():
        train("fsdp", "--max_steps 4 --report_to wandb")
    # Weights & Biases sees only writers that are opened after it began
    assert calls == ["began", "opened", "closed", "finished"] and begun["sync_tensorboard"]
    assert begun["project"] == "mine" and begun["config"]["max_steps"] == 4
    for record in logged(tmp_path / "out", "step"):
        keys = {key for key, value in record.items() if value is not None} - {"step"}
        assert keys <= numbers[record["step"]].keys()


# ---------------------------------------------------------------- refused runs


@pytest.mark.parametrize("kind", ALL)
def test_a_run_that_ends_before_its_first_step_costs_nothing(kind, train, tmp_path, monkeypatch):
    before = old_run(tmp_path / "out")
    weights = load_file(model_with(tmp_path / "lacking") / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "lacking/model.safetensors")
    with pytest.raises(UserError, match="weight model.norm.weight is missing"):
        train(kind, "--max_steps 2 --overwrite --model_name_or_path lacking")

    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(torch.nn.functional, "embedding", fail)
    for error in (UserError("in the first step"), torch.OutOfMemoryError("too large")):
        # a dry run finds what only a forward pass refuses
        for flags in ("--overwrite --dry_run", "--overwrite", "--output_dir new"):
            with pytest.raises(type(error), match=str(error)):
                train(kind, f"--max_steps 2 {flags}")
    assert contents(tmp_path / "out") == before and not (tmp_path / "new").exists()


def model_with(folder, spoil=None):
    """A folder with the small model and random weights, spoilt."""
    from transformers import AutoConfig, AutoModelForCausalLM

    smaller_model(folder)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    if spoil:
        spoil(dict(lm.named_parameters()))
    lm.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ALL)
def test_another_models_checkpoint_is_refused_before_data_is_read(kind, train, tmp_path):
    train("fsdp", "--max_steps 1").rename(tmp_path / "before")
    file = tmp_path / "tiny/config.json"
    config = json.loads(file.read_text())
    for change, message in (
        ({"num_hidden_layers": 5}, r"layers.4.input_layernorm.weight is missing there, \(64,\) in"),
        ({"num_hidden_layers": 3}, r"layers.3.input_layernorm.weight is \(64,\) there, missing in"),
        ({"tie_word_embeddings": False}, r"lm_head.weight is missing there, \(512, 64\) in"),
        ({"head_dim": 8}, r"layers.0.self_attn.k_norm.weight is \(16,\) there, \(8,\) in"),
    ):
        file.write_text(json.dumps(config | change))
        with pytest.raises(UserError, match="step_00000001 is of another model: the .*" + message):
            train(kind, "--resume before --train_json absent.jsonl")
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="no such data file: absent.jsonl"):
        train(kind, "--resume before --train_json absent.jsonl")


def test_overwrite_deletes_no_input(train, tmp_path):
    old_run(tmp_path / "out")
    shutil.copy(ROOT / "pp/ds_pp_2gpus.json", tmp_path / "out")
    before = contents(tmp_path / "out")
    for kind, flag, name in (
        ("fsdp", "train_json", "out/metrics.jsonl"),
        ("fsdp", "train_json", "out/*.jsonl"),
        ("fsdp", "train_json", "out/metrics.jsonl*2"),
        ("fsdp", "model_name_or_path", "out"),
        ("fsdp", "chat_template", "out/cmd.sh"),
        ("pp", "deepspeed_config", "out/ds_pp_2gpus.json"),
    ):
        with pytest.raises(UserError) as error:
            train(kind, f"--overwrite --{flag} {name}")
        assert f"--overwrite would delete --{flag} {name}: " in str(error.value)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("steps, profiled", [("2:2", True), ("1:2", False), ("2:3", False)])
def test_a_resumed_run_profiles_the_steps_it_has_or_none(steps, profiled, train, capsys):
    train("fsdp", "--max_steps 1")
    out = train("fsdp", f"--max_steps 2 --resume auto --profile_steps {steps}")
    refused = f"--profile_steps {steps}: nothing is profiled, since this run has steps 2 to 2"
    assert (refused in capsys.readouterr().out) is not profiled
    assert (out / "profile.txt").exists() is profiled


NO_RECORDS = ["3", "{}", "\xff", '{"step": 1, "train/l']


def test_lines_without_a_record_stop_no_resume(train, capsys, record_property):
    record_property("bad inputs", len(NO_RECORDS))
    flags = "--resume auto"
    file = train("fsdp", f"{flags} --max_steps 1") / "metrics.jsonl"
    (good,) = [line for line in file.read_text().splitlines() if "train/loss" in line]
    bad_step = json.loads(good) | {"train/loss": None, "train/skipped": True}
    before = [json.dumps(bad_step), good]
    file.write_text("\n".join([*before, *NO_RECORDS]), encoding="latin-1")
    out = train("fsdp", f"{flags} --max_steps 2")
    said = f"resume: {len(NO_RECORDS)} unreadable lines of metrics.jsonl removed"
    assert said in capsys.readouterr().out and said in (out / "train.log").read_text()
    lines = file.read_text().splitlines()
    assert lines[:2] == before and all(json.loads(line)["step"] == 2 for line in lines[2:])
    assert json.loads((out / "summary.json").read_text())["skipped_steps"] == 1


def test_a_checkpoint_beyond_the_last_step_is_said_and_costs_nothing(train, capsys):
    out = train("fsdp", "--max_steps 3")
    (out / "summary.json").unlink()
    before = contents(out)
    train("fsdp", "--max_steps 2 --resume auto --export bf16")
    said = capsys.readouterr().out
    beyond = "out/checkpoints/step_00000003 is of step 3, beyond the run's 2 steps;"
    assert f"nothing to train: {beyond}" in said and "last step" not in said
    assert contents(out) == before


def test_a_moved_runs_command_asks_where_to_go_on(train, tmp_path):
    out = train("fsdp", "--max_steps 1")
    command = lambda *flags: run(["bash", *flags], cwd=tmp_path, fresh=True)  # noqa: E731
    assert command("out/cmd.sh", "--help").returncode == 0
    out.rename(tmp_path / "moved")
    done = command("moved/cmd.sh", "--resume", "auto")
    line = f"error: this run was moved from {out}: add --output_dir {tmp_path}/moved\n"
    assert (done.returncode, done.stderr) == (2, line)
    assert command("moved/cmd.sh", "--output_dir", "moved", "--help").returncode == 0


def test_overwrite_from_within_the_runs_folder(train, tmp_path, monkeypatch):
    old_run(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    flags = f"--train_json {tmp_path}/data.jsonl --model_name_or_path {tmp_path}/tiny"
    train("fsdp", f"{flags} --output_dir . --overwrite --max_steps 1")
    assert {record["step"] for record in logged(".", "step")} == {1}
    assert os.path.samefile(".", tmp_path / "out")


def test_overwrite_deletes_a_run_and_no_more(train, tmp_path, monkeypatch):
    out = train("fsdp", "--max_steps 2 --export bf16 --profile_steps 2:2")
    (out / "mine").mkdir()
    (out / "mine/notes.txt").write_text("mine")
    run_folder.delete_run(out)
    assert {path.name for path in out.iterdir()} == {"cmd.sh", "mine"}  # cmd.sh is locked
    (out / "config.json").write_text("{}")
    train("fsdp", "--overwrite --max_steps 1")
    assert (out / "mine/notes.txt").read_text() == "mine"
    monkeypatch.chdir(tmp_path / "out/mine")
    with pytest.raises(UserError, match="the working folder is inside --output_dir "):
        run_folder.choose_folder(args_with(output_dir="..", overwrite=True), "fsdp")


def test_nothing_is_written_into_another_run(train, tmp_path):
    old_run(tmp_path / "out")
    for name in ("out/again", "out/checkpoints/again", "out/hf/a/b"):
        with pytest.raises(UserError, match=f"--output_dir {name} is inside .*/out, the folder of"):
            train("fsdp", f"--output_dir {name}")
    out, step = tmp_path / "out", tmp_path / "out/checkpoints/step_00000001"
    for inside in (out / "checkpoints/hf", step / "hf"):
        with pytest.raises(UserError, match="is inside .*out/checkpoints, where a run keeps"):
            export(step, inside)
        with pytest.raises(UserError, match="is inside .*out/checkpoints, where a run keeps"):
            run_folder.refuse_inside_checkpoints(inside)


@pytest.mark.parametrize("how", ["--resume auto", "--overwrite"])
def test_no_run_writes_through_the_links_of_a_folder(how, train, tmp_path):
    """Which may be a stranger's."""
    before, mine = old_run(tmp_path / "out"), tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "out/model").mkdir()
    for name in ("tb", "checkpoints", "model/config.json"):
        path = tmp_path / "out" / name
        path.symlink_to(mine)
        with pytest.raises(UserError, match=f"out: {name} is a link or a pipe, and"):
            train("fsdp", f"--max_steps 2 {how}")
        path.unlink()
    os.mkfifo(tmp_path / "out/train.log")  # who opens it waits without end
    with pytest.raises(UserError, match="out: train.log is a link or a pipe"):
        train("fsdp", f"--max_steps 2 {how}")
    assert not [*mine.iterdir()] and before.items() <= contents(tmp_path / "out").items()


def test_a_file_is_replaced_not_what_a_link_at_its_part_points_to(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".part-a.json").symlink_to(tmp_path / "mine")
    files.write_text(tmp_path / "a.json", "new")
    assert [(tmp_path / name).read_text() for name in ("mine", "a.json")] == ["mine", "new"]


def test_no_secret_of_the_environment_is_written_down(monkeypatch):
    names = "TOKEN API_KEY SECRET PASSWORD CREDENTIALS AUTH secret PWD Private SIGNATURE"
    secret = {f"TORCH_{name}": "hunter2" for name in names.split()}
    kernels = {"HSA_OVERRIDE_GFX_VERSION": "1", "CUBLAS_WORKSPACE_CONFIG": "1"}
    for name, value in {**secret, **kernels, "NCCL_DEBUG": "WARN", "OTHER": "hunter2"}.items():
        monkeypatch.setenv(name, value)
    for name, (value, _) in ADDRESSES.items():
        monkeypatch.setenv(f"TORCH_{name}", value)
    found = environment(WORLD)["environment"]
    assert found["NCCL_DEBUG"] == "WARN" and {*secret, *kernels} <= found.keys()
    assert {found[f"TORCH_{name}"] for name in ADDRESSES} == {
        kept for _, kept in ADDRESSES.values()
    }
    assert "hunter2" not in str(found)


ADDRESSES = {  # name: a value, what is written down of it
    "redis": ("redis://u:hunter2@h:6379/0", "redis://***@h:6379/0"),
    "no_user": ("a=1,redis://:hunter2@h,b=2", "a=1,redis://***@h,b=2"),
    "only_one": ("https://hunter2@h/x", "https://***@h/x"),
    "slash": ("https://u:hun/hunter2@h/x", "https://***@h/x"),
    "two": ("http://h:80/a;x://u:hunter2@h;y://u:p@hunter2@i", "http://h:80/a;x://***@h;y://***@i"),
    "query": ("s3://h/x?a=1&Api-Key=hunter2&b=2", "s3://h/x?a=1&Api-Key=***&b=2"),
    "none": ("https://h:80/a/b@rev?x=1&y=a@b, c@d", "https://h:80/a/b@rev?x=1&y=a@b, c@d"),
}


def test_no_secret_of_a_flag_is_written_down_or_shown(tmp_path):
    """But in cmd.sh, which has to start the run again. A run may be of an earlier version."""
    settings = {"deepspeed_config": "https://u:hunter2@h/x", "seq_len": 8, "lr": 0.5}
    run_folder.describe_run(tmp_path, settings, WORLD)
    kept = settings | {"deepspeed_config": "https://***@h/x"}
    assert json.loads((tmp_path / "config.json").read_text()) == kept
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "env.json").write_text('{"environment": {"HSA_PWD": "hunter2"}}')
    found = run_folder.read_run(tmp_path)
    assert (found.config, found.env) == (kept, {"environment": {"HSA_PWD": "left out"}})


def test_runs_of_the_same_second_have_names_of_their_own():
    args = args_with(model_name_or_path="m")
    chosen = [run_folder.choose_folder(args, "fsdp") for _ in range(3)]
    assert len(set(chosen)) == 3 and {folder.parent for folder in chosen} == {ROOT / "runs"}
    assert all(re.fullmatch(r"fsdp-m-\d{8}-\d{6}-\d{6}", folder.name) for folder in chosen)


# ---------------------------------------------------------------- locks


@pytest.mark.parametrize("flags", ["--resume auto", "--resume auto --dry_run", "--overwrite"])
def test_a_live_run_is_locked_before_its_checkpoints_are_read(flags, train, tmp_path):
    old_run(tmp_path / "out")
    (tmp_path / "out/checkpoints/step_00000001").mkdir(parents=True)  # it would be refused
    before = contents(tmp_path / "out")
    with open(tmp_path / "out/cmd.sh") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for kind in KINDS:
            with pytest.raises(UserError, match="out: another run is using it"):
                train(kind, f"--max_steps 2 {flags}")
    assert contents(tmp_path / "out") == before


def test_nothing_is_created_to_be_locked(tmp_path):
    args = SimpleNamespace(dry_run=True, estimate=False, overwrite=False, resume="auto")
    (tmp_path / "lost/checkpoints/step_00000001").mkdir(parents=True)  # and no cmd.sh
    assert run_lock.lock_folder(tmp_path / "lost", args) is None
    assert not (tmp_path / "lost/cmd.sh").exists()
    args.dry_run = False
    first = run_lock.lock_folder(tmp_path / "lost", args)
    for mode in ("a", "x"):
        with pytest.raises(UserError, match="another run is using it"):
            run_lock.lock(tmp_path / "lost", mode)
    first.close()


def test_a_folder_that_another_run_used_meanwhile_is_not_taken(tmp_path):
    args = SimpleNamespace(dry_run=False, estimate=False, overwrite=False, resume="auto")
    assert run_lock.lock_folder(tmp_path, args) is None
    (tmp_path / "checkpoints/step_00000009").mkdir(parents=True)
    with pytest.raises(UserError, match="another run is using it"):
        run_lock.take_folder(tmp_path, args, None)


def test_a_folder_replaced_under_a_run_is_seen(tmp_path):
    for away in ("out", "out/cmd.sh"):
        (tmp_path / "out").mkdir(exist_ok=True)
        lock = run_lock.lock(tmp_path / "out", "a")
        assert not run_lock.is_lost(lock)
        (tmp_path / away).rename(tmp_path / "away")
        assert run_lock.is_lost(lock)
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/cmd.sh").touch()
        assert run_lock.is_lost(lock)  # another run's
        lock.close()
        (tmp_path / "away").rename(tmp_path / f"gone {len(away)}")


# ---------------------------------------------------------------- not finite


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("log_every", [1, 7])
def test_bad_steps_in_a_row_end_the_run(log_every, kind, train, tmp_path):
    """Of a model whose weights are so large that no loss is finite. At the last step, too."""
    model_with(tmp_path / "huge", huge)
    flags = f"--model_name_or_path huge --save_every 100 --log_every {log_every}"
    for steps in (60, 20):
        n = 21 if log_every == 7 and steps == 60 else 20  # the first step that is logged
        message = f"not finite in {n} steps in a row, up to step {n}:.*no check"
        with pytest.raises(UserError, match=message):
            train(kind, f"{flags} --max_steps {steps} --overwrite")
        if log_every == 1:
            assert [record["step"] for record in logged(tmp_path / "out")] == list(range(1, 21))
        assert not list(tmp_path.glob("out/checkpoints/*"))


def test_only_bad_steps_in_a_row_count():
    """A step is bad by its loss or its norm."""
    args = args_with(log_every=9, comm_timer=False)
    watch = records.Records(args, WORLD, SimpleNamespace(), 0, 9, torch.float32)
    good, bad = torch.tensor(1.0), torch.tensor(torch.nan)
    steps = ((bad, good), (good, bad), (good, good), (bad, bad), (bad, -bad), (good, torch.inf))
    counts = [int(watch.count_bad(loss, norm)) for loss, norm in steps]
    assert counts == [1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize("name, value", [("a.weight", torch.nan), ("a.weight.exp_avg", torch.inf)])
def test_no_checkpoint_with_a_value_that_is_not_finite(name, value, tmp_path):
    checkpoints = make(tmp_path)
    save(checkpoints, 1)
    tensors = {**state(2), "empty": torch.zeros(0), "large": torch.full((2,), 3e38)}
    checkpoints.save(2, dict(tensors), checkpoints.log.facts(), wait=True)
    for nothing in ({}, {"empty": torch.zeros(0)}):  # as on a pipeline's second replica
        checkpoints._refuse_non_finite(2, nothing)
    tensors[name].view(-1)[3] = value
    message = f"step 3: {name} is not finite, so no checkpoint .*checkpoints/step_00000002$"
    with pytest.raises(UserError, match=message):
        checkpoints.save(3, tensors, checkpoints.log.facts(), wait=False)
    assert (tmp_path / "checkpoints/latest").read_text() == "step_00000002\n"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def huge(weights):
    weights["model.norm.weight"].data.fill_(3e38)


# ---------------------------------------------------------------- checkpoints and exports


def test_a_background_checkpoint_is_of_copies(tmp_path, monkeypatch):
    """Training changes its tensors while the writing is held up."""
    go_on, mkdir = threading.Event(), os.mkdir

    def slow(path, *mode):
        if ".part-" in str(path):
            go_on.wait(20)
        mkdir(path, *mode)

    checkpoints, tensors = make(tmp_path), state(1)
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(os, "mkdir", slow)
    for step in (1, 2):  # the second time into the same buffers
        checkpoints.save(step, tensors, checkpoints.log.facts(), wait=False)
        for t in tensors.values():
            t += 1
        go_on.set()
        checkpoints.finish()
        go_on.clear()
        saved = {name: torch.zeros_like(t) for name, t in tensors.items()}
        checkpoint_files.read_tensors(tmp_path / f"checkpoints/step_{step:08d}", saved)
        for name, t in state(1).items():
            assert torch.equal(saved[name], t + step - 1), (step, name)


def test_the_order_of_what_reaches_the_disk(tmp_path, monkeypatch):
    """A loss of power at any moment: a name never stands for what is not on the disk."""
    events, fsync = [], os.fsync

    def synced(fd):
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        fsync(fd)

    def rename(old, new, *, real=os.rename):
        events.append(("rename", Path(old).name, Path(new).name))
        real(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, rename)
    save(make(tmp_path), 1)
    part, step = ".part-step_00000001", "step_00000001"

    def at(*event):
        assert events.count(event) == 1, (event, events)
        return events.index(event)

    published = at("rename", part, step)
    contents = [("fsync", "__0_0.distcp"), ("fsync", ".metadata.tmp")]
    contents += [("rename", f".part-{n}", n) for n in ("trainer.json", "manifest.json")]
    manifest = at("fsync", ".part-manifest.json")
    assert all(at(*event) < manifest for event in contents[:3])  # it is the proof of the others
    assert manifest < at(*contents[3]) < at("fsync", part) < published
    assert at("fsync", ".part-trainer.json") < at(*contents[2])
    # and only when the name is on the disk does `latest` point at it
    latest = at("rename", ".part-latest", "latest")
    assert published < at("fsync", "checkpoints") < at("fsync", ".part-latest") < latest
    assert latest == len(events) - 1


# ---------------------------------------------------------------- fp16's loss scale


def overflows(n):
    """Steps that overflow, of n: the first, then now and then."""
    return [i in (0, 3, 4, 1200, 1201, 2500) for i in range(n)]


@pytest.mark.parametrize("at", [1, 5, 1004])
def test_the_loss_scale_goes_on_as_if_never_stopped(at):
    import deepspeed
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from pp import ds_state

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    whole, again = (LossScale(torch.float16, torch.device("cpu")) for _ in range(2))

    def deepspeeds():
        scaler = DynamicLossScaler(
            init_scale=2.0**16, scale_window=1000, min_scale=1.0,
            delayed_shift=2, consecutive_hysteresis=False, raise_error_at_min_scale=False,
        )  # fmt: skip
        kind = type("Optimizer", (), {"_lazy_init_hp_params_optimizer_state": lambda self: None})
        optimizer = kind()
        optimizer.loss_scaler = scaler
        state = {0: {"step": torch.tensor(5.0)}}
        optimizer.optimizer = SimpleNamespace(param_groups=[], state=state)
        module = torch.nn.Module()
        return SimpleNamespace(optimizer=optimizer, module=module, dp_world_size=1), scaler

    (one, scaler), (other, scaler_again) = deepspeeds(), deepspeeds()
    seen = []
    for step, overflow in enumerate(overflows(2600)):
        if step == at:
            again.load(json.loads(json.dumps(whole.facts())))
            facts = json.loads(json.dumps(ds_state.engine_facts(one)))
            ds_state.load_state(other, lambda tensors: None, facts)
        for scale in (whole, again)[: 1 + (step >= at)]:
            scale.update(torch.tensor(overflow))
        for each in (scaler, scaler_again)[: 1 + (step >= at)]:
            each.update_scale(overflow)
        if step >= at:
            assert whole.facts() == again.facts(), step
            assert scaler.cur_scale == scaler_again.cur_scale, step
            facts, facts_again = ds_state.engine_facts(one), ds_state.engine_facts(other)
            assert facts["loss_scale"] == facts_again["loss_scale"]
        seen.append((whole.scale.item(), scaler.cur_scale))
    assert len(set(seen)) > 4  # it moved


@pytest.mark.parametrize("kind", ALL)
def test_a_resumed_fp16_run_takes_the_checkpoints_loss_scale(kind, train, tmp_path):
    """After 998 good steps at a scale of 512. DeepSpeed doubles it a step later than we do."""
    flags = "--dtype fp16 --micro_batch_size 1 --save_every 1 --keep_last 0"
    out = train("fsdp", f"{flags} --max_steps 1")
    step = out / "checkpoints/step_00000001"
    facts = json.loads((step / "trainer.json").read_text())
    facts["loss_scale"] = {"scale": 512.0, "good_steps": 998.0}
    (step / "trainer.json").write_text(json.dumps(facts))
    sign(step)
    train(kind, f"{flags} --max_steps 4 --resume auto")
    scales = [
        json.loads((out / f"checkpoints/step_0000000{i}/trainer.json").read_text())["loss_scale"]
        for i in (2, 3, 4)
    ]
    third = (512, 1000) if kind in ("pp", "zero") else (1024, 0)
    assert [(s["scale"], s["good_steps"]) for s in scales] == [(512, 999), third, (1024, 1)]


def test_deepspeeds_smallest_scale_ends_no_run(train, tmp_path):
    """Its own exception would be a traceback: our own count of bad steps ends such a run."""
    model_with(tmp_path / "huge", huge)
    with pytest.raises(UserError, match="not finite in 20 steps in a row, up to step 20: "):
        flags = "--dtype fp16 --micro_batch_size 1 --max_steps 60"
        train("pp", f"--model_name_or_path huge {flags}")
