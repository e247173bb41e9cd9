"""Copies of a model, each sharded or whole: the numbers of FSDP; and compressed sums over them."""

import json
import re
import sys
from functools import partial

import pytest
import torch
from conftest import ROOT, logged, run, smaller_model, train_cases

from bench.checkpoints import tensors
from llm_demo.model.export_files import described_model, write_weights
from llm_demo.run.checkpoint_files import read_tensors

STEPS, AT = 3, 2
LAST = f"checkpoints/step_{STEPS:08d}"
FEW_GPUS = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs 2 GPUs")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs cases {name: flags} in one set of processes; -> the folder of all runs."""
    folder = tmp_path_factory.mktemp("replicas")
    model = smaller_model(folder / "model")

    def train(processes, cases):
        argv = [
            "--model_name_or_path", model, "--train_json", ROOT / "data/sft_en.jsonl",
            "--eval_json", "none", "--seq_len", 32, "--sample_tokens", 0, "--lr", "1e-3",
            "--max_steps", STEPS, "--warmup_steps", 1, "--weight_decay", 0.3, "--dtype", "fp32",
            "--save_every", AT, "--attn_impl", "math",
        ]  # fmt: skip
        cases = {n: [*argv, *(f.format(folder=folder) for f in more)] for n, more in cases.items()}
        train_cases(folder, "fsdp", processes, cases)
        return folder

    return train


def numbers(run):
    return [(r["train/loss"], r["train/grad_norm"]) for r in logged(run)]


def equal(one, other):
    a, b = tensors(one / LAST), tensors(other / LAST)
    same = a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())
    return same and numbers(one)[-len(numbers(other)) :] == numbers(other)[-len(numbers(one)) :]


SPLIT = ["--micro_batch_size", "2", "--grad_accum_steps", "2"]
COPIES = ["--replicas", "all"]


SEVERAL = ["--sequence_parallel", "2", "--optimizer_on_host", "--reshard_after_forward"]
SEVERAL += ["--use_activation_checkpointing", "--blocks_per_unit", "1"]


def resumed(name, *flags):
    return [*flags, "--resume", f"{{folder}}/{name}/checkpoints/step_{AT:08d}"]


@FEW_GPUS
def test_two_copies_have_the_bits_of_two_shards(train):
    """Sums over two ranks have one order. Resumed runs, with either way, have the same bits."""
    bf16, host = ["--micro_batch_size", "4", "--dtype", "bf16"], "--optimizer_on_host"
    folder = train(2, {
        "shards": SPLIT, "copies": [*SPLIT, *COPIES],
        "copies-from-shards": resumed("shards", *SPLIT, *COPIES),
        "shards16": bf16, "copies16": [*bf16, *COPIES], "host16": [*bf16, *COPIES, host],
    })  # fmt: skip
    for name in ("copies", "copies-from-shards"):
        assert equal(folder / "shards", folder / name), name
    for name in ("copies16", "host16"):
        assert equal(folder / "shards16", folder / name), name
    assert len(tensors(folder / "copies" / LAST)) == 3 * 46


@pytest.mark.slow
@pytest.mark.skipif(0 < torch.cuda.device_count() < 4, reason="needs 4 GPUs")
def test_two_copies_of_two_shards(train):
    one = ["--micro_batch_size", "1", "--grad_accum_steps", "2"]
    two = ["--replicas", "2"]
    low = [*one, *two, "--psgd_rank", "2", "--warmup_steps", "1"]
    several = [*two, "--micro_batch_size", "2", "--grad_accum_steps", "2", *SEVERAL]
    folder = train(4, {
        "four": one, "two": [*one, *two], "shards-from-two": resumed("two", *one),
        "low4": low, "low4-again": resumed("low4", *low), "several": several,
    })  # fmt: skip
    for name in ("two", "several"):
        for mine, true in zip(numbers(folder / name), numbers(folder / "four"), strict=True):
            assert mine == pytest.approx(true, rel=1e-5), name
    on = numbers(folder / "shards-from-two")
    assert on[0] == pytest.approx(numbers(folder / "four")[AT], rel=1e-5)
    assert equal(folder / "low4", folder / "low4-again")
    state = tensors(folder / "low4" / LAST)
    name = "model.layers.0.mlp.up_proj.weight"
    error = state[f"{name}.psgd_error"]
    assert error.shape == state[name].shape and error.any()
    assert state[f"{name}.psgd_factor"].shape == (2 * 64, 2)  # a factor for each of two shards


@FEW_GPUS
def test_compressed_runs_stop_and_go_on(train):
    """To the bit; and with another rank, or none, from the same weights."""
    low = [*SPLIT, *COPIES, "--psgd_rank", "4"]
    folder = train(2, {
        "exact": [*SPLIT, *COPIES], "low": low, "low-again": resumed("low", *low),
        "exact-from-low": resumed("low", *SPLIT, *COPIES),
        "low-from-exact": resumed("exact", *low),
        "other-from-low": resumed("low", *SPLIT, *COPIES, "--psgd_rank", "3"),
    })  # fmt: skip
    assert equal(folder / "low", folder / "low-again")
    exact, low = (numbers(folder / name) for name in ("exact", "low"))
    assert low[:1] == exact[:1] and low[1] != exact[1]  # one step of warm-up
    assert low[1][0] == exact[1][0] and low[2][0] == pytest.approx(exact[2][0], rel=0.05)
    starts = ("exact-from-low", low), ("other-from-low", low), ("low-from-exact", exact)
    for name, start in starts:
        assert numbers(folder / name)[0][0] == pytest.approx(start[AT][0], rel=1e-6), name

    log = (folder / "other-from-low/train.log").read_text()
    assert "resume: psgd_factor of " in log and "resume: psgd_error" not in log
    assert "resume: psgd_error of " in (folder / "exact-from-low/train.log").read_text()
    out = folder / "hf"
    out.mkdir()
    shapes = described_model(folder / "model")[1]
    read = partial(read_tensors, folder / "low" / LAST)
    assert write_weights(out, read, shapes, torch.float32, "1GB") > 0


def test_the_launcher_trains_copies(tmp_path):
    flags = ["--max_steps", "3", "--output_dir", str(tmp_path / "run"), "--warmup_steps", "1"]
    flags += ["--dtype", "bf16", "--seq_len", "64", "--eval_json", "none", "--sample_tokens", "0"]
    done = run(["bash", ROOT / "fsdp/launch_ddp.sh", *flags], NPROC_PER_NODE="2", PSGD_RANK="8",
               PYTHON=sys.executable)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FSDP2 with 2 replicas on 2 processes, PowerSGD of rank 8: 3," in done.stdout
    share = float(re.search(r"PowerSGD from step 2 on: ([\d.]+)% of the grad", done.stdout)[1])
    assert 3 < share < 10
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["replicas"] == "all" and config["data_parallel"] == 2
