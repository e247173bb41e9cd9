"""Both launchers as a user starts them: real processes, another folder, the bundled model."""

import importlib.util
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import LAUNCHERS, ROOT, TINY, free_port, python, run
from test_evaluate import transformers_loss
from tiny_tokenizer import packs_of
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from llm_demo.core.rows import step_rows

KINDS = ("fsdp", "pp")
FILES = {"config.json", "env.json", "cmd.sh", "train.log", "metrics.jsonl", "summary.json"}
STEP = re.compile(
    r"step 1/3 \| loss \d+\.\d{4} \| gnorm \d+\.\d\d \| lr \d\.\de-\d\d \| \d+ ms \(comm \d+\) "
    r"\| [\d.]+k? tok/s \([\d.]+k? labels\)( \| mfu [\d.]+%)? \| mem [\d.]+ GiB \| eta \d+:\d\d"
)
SMALL = {"SEQ_LEN": "128", "MICRO_BATCH_SIZE": "2", "MAX_STEPS": "3", "NPROC_PER_NODE": "2",
         "WARMUP_STEPS": "10"}  # fmt: skip
TWO_ACCUM = {"fsdp": "2", "pp": "4"}  # the same global batch of 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a user's folder")
    rows = (ROOT / "data/sft_en.jsonl").read_text().splitlines()
    (folder / "my data.jsonl").write_text("\n".join(rows[:60]))
    (folder / "my data.heldout.jsonl").write_text("\n".join(rows[60:69]))
    return folder


def launch(kind, folder, *flags, ok=True, **env):
    env = {**SMALL, "GRAD_ACCUM_STEPS": TWO_ACCUM[kind], "PYTHON": sys.executable, **env}
    done = run(["bash", LAUNCHERS[kind], *flags], cwd=folder, FORKS_ONLY="1", **env)
    if ok:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def metrics(run_folder):
    def no_constant(name):
        raise ValueError(f"{name} is no JSON")

    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=no_constant) for line in lines]


def losses(run_folder, key="train/loss"):
    return [r[key] for r in metrics(run_folder) if key in r]


@pytest.fixture(scope="module")
def first_runs(folder):
    """One run of each launcher: 3 steps by environment, from a folder of the user's."""
    found = {}
    for kind in KINDS:
        more = {"OUTPUT_DIR": f"first {kind}", "SAMPLE_TOKENS": "4"}  # each is a forward pass
        out = launch(kind, folder, "--train_json", "my data.jsonl", **more)
        found[kind] = out.stdout, folder / f"first {kind}"
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_says_and_leaves(kind, first_runs):
    said, left = first_runs[kind]
    decisions = "device: 2 x", "dtype:", "attention: ", "batch: 2 rows x", "random ones, seed"
    for decision in decisions:
        assert decision in said
    if not torch.cuda.is_available():
        assert re.search(
            r"\nattention: bucketed \(not sdpa: .*; not varlen: has no CPU kernel; ", said
        )
    if kind == "pp":
        assert "pipeline: stage 0: 3 blocks" in said
    assert "⟦" in said[: said.index("step 1/3")]
    assert STEP.search(said)
    assert said.count("held-out loss") == 2
    assert said.count("\nanswer ") == 3
    row = rf"\| 2 \| {TWO_ACCUM[kind]} \| F \| \w+ \| \d+ \| \d+ \| \d+ \| [\d.]+ / "
    assert re.search(row, said)
    assert {p.name for p in left.iterdir()} == FILES | {"checkpoints", "model"}
    assert (left / "train.log").read_text().count("step 2/3") == 1

    steps = [r for r in metrics(left) if "train/loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3]
    assert steps[0].keys() == {
        "step", "train/loss", "train/grad_norm", "train/lr", "train/skipped", "perf/step_ms",
        "perf/comm_ms", "perf/comm_exposed_ms", "perf/comm_wait_ms", "perf/data_ms",
        "perf/toks_per_s", "perf/label_toks_per_s", "perf/slots_per_s", "perf/mfu",
        "perf/peak_mem_gb", "perf/reserved_gb", "perf/alloc_retries", "data/tokens",
        "data/label_tokens", "data/fill",
    }  # fmt: skip
    for key in ("perf/peak_mem_gb", "perf/comm_ms", "perf/comm_exposed_ms", "perf/comm_wait_ms"):
        assert len(steps[0][key]) == 2
    for step in steps:
        busy, waiting = step["perf/comm_ms"], step["perf/comm_wait_ms"]
        assert all(0 <= w <= b < step["perf/step_ms"] for w, b in zip(waiting, busy, strict=True))
        assert max(busy) > 0
    if not torch.cuda.is_available():
        assert steps[0]["perf/mfu"] is None
    assert steps[2]["data/tokens"] > steps[2]["data/label_tokens"] > steps[0]["data/label_tokens"]
    assert losses(left)[-1] < losses(left)[0]
    before, after = losses(left, "eval/loss")
    assert after < before
    config = json.loads((left / "config.json").read_text())
    assert (config["resumed_step"], config["random_weights"]) == (0, True)
    assert config["parallelism"] == {"fsdp": "FSDP2", "pp": "pipeline of 2 stages"}[kind]
    assert config["global_batch"] == 8 and config["seq_len"] == 128 and config["lr"] == 1e-3
    env = json.loads((left / "env.json").read_text())
    assert env["versions"]["torch"] and env["world_size"] == 2
    # medians leave out two steps of warming up
    summary, last = json.loads((left / "summary.json").read_text()), steps[2]
    assert summary["spread_step_ms"] == [last["perf/step_ms"]] * 2
    for key, of in (
        ("median_step_ms", "perf/step_ms"), ("median_comm_ms", "perf/comm_ms"),
        ("median_comm_wait_ms", "perf/comm_wait_ms"), ("median_data_ms", "perf/data_ms"),
        ("median_toks_per_s", "perf/toks_per_s"), ("median_slots_per_s", "perf/slots_per_s"),
    ):  # fmt: skip
        assert summary[key] == last[of], key


def test_a_run_resumes_in_its_folder_with_fewer_processes(first_runs, folder):
    """Figures of each process are of the last shape alone: lists of two lengths have no median."""
    out = folder / "fewer"
    shutil.copytree(first_runs["fsdp"][1], out)
    flags = ("--train_json", "my data.jsonl", "--resume", "auto", "--max_steps", "5")
    more = {"NPROC_PER_NODE": "1", "GRAD_ACCUM_STEPS": "4", "SAMPLE_TOKENS": "0"}
    launch("fsdp", folder, *flags, OUTPUT_DIR="fewer", **more)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 5 and len(summary["median_comm_ms"]) == 1
    config = json.loads((out / "config.json").read_text())
    assert (config["resumed_step"], config["random_weights"]) == (3, True)
    assert [len(r["perf/comm_ms"]) for r in metrics(out) if "train/loss" in r] == [2, 2, 2, 1, 1]


def test_both_engines_train_alike(first_runs):
    one, two = first_runs["fsdp"][1], first_runs["pp"][1]
    bound = 1e-5 if not torch.cuda.is_available() else 2e-2  # bf16 on a GPU
    assert losses(one) == pytest.approx(losses(two), rel=bound)
    assert losses(one, "eval/loss") == pytest.approx(losses(two, "eval/loss"), rel=bound)


def test_cmd_sh_repeats_the_run(first_runs, folder, kind="fsdp"):
    _, left = first_runs[kind]
    command = ["bash", left / "cmd.sh", "--output_dir", folder / f"again {kind}"]
    done = run(command, cwd=ROOT, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert losses(folder / f"again {kind}") == pytest.approx(losses(left), rel=1e-6)


def test_mi100_path_checkpointing_and_flag_beats_environment(first_runs, folder, kind="fsdp"):
    """Math kernels only, as on an MI100, and with recomputed blocks: the same losses."""
    flags = ("--attn_impl", "bucketed_math", "--use_activation_checkpointing", "--max_steps", "2")
    more = ("--train_json", "my data.jsonl", "--output_dir", f"math {kind}", "--sample_tokens", "0")
    more += ("--peak_tflops", "0.25")
    said = launch(kind, folder, *flags, *more, ATTN_IMPL="math", OUTPUT_DIR="not this").stdout
    assert "attention: bucketed_math (as requested)" in said
    assert not (folder / "not this").exists()
    bound = 1e-5 if not torch.cuda.is_available() else 2e-2
    first = losses(first_runs[kind][1])
    # the schedule's length differs, so from the second update on the learning rate would too
    assert losses(folder / f"math {kind}")[:2] == pytest.approx(first[:2], rel=bound)

    # MFU by hand. A block has 98,304 weights in attention and 294,912 in its MLP, and attends to
    # a slot's document with 6 heads of 32; there are 6 blocks, and a head of 192 x 4,096.
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    packs = packs_of(str(folder / "my data.jsonl"), tokenizer, seq_len=128)
    seed = json.loads((folder / f"math {kind}/config.json").read_text())["seed"]
    steps = [r for r in metrics(folder / f"math {kind}") if "train/loss" in r]
    attended = set()  # the mean length of a slot's document, which each step has of its own
    seen = 0, 0  # tokens and labels so far
    for n, step in enumerate(steps):
        squares, rows = 0, step_rows(packs.passes, seed, n, 8)
        tokens, labels = packs.token_counts[rows].sum(), packs.label_counts[rows].sum()
        seconds, slots = step["perf/step_ms"] / 1e3, 8 * 128
        seen = seen[0] + tokens, seen[1] + labels
        assert (step["data/tokens"], step["data/label_tokens"]) == seen
        assert 0 < labels < tokens < slots and step["data/fill"] == tokens / slots
        rates = {"toks": tokens, "label_toks": labels, "slots": slots}
        for key, count in rates.items():
            assert step[f"perf/{key}_per_s"] == pytest.approx(count / seconds, rel=1e-6)
        for row in rows:
            *real, last = packs.lengths(row)
            if sum(real) < packs.token_counts[row]:  # no padding, which nothing attends to
                real.append(last)
            squares += sum(length * length for length in real)
        attended.add(squares / (8 * 128))
        block = 6 * (98_304 + 294_912) + 12 * 6 * 32 * squares / (8 * 128)
        flops = 8 * 128 * (6 * block + 6 * 192 * 4096)  # of a step: 8 rows of 128 slots
        mfu = flops / (step["perf/step_ms"] / 1e3) / (2 * 0.25e12)  # two ranks, 0.25 TFLOP/s each
        assert step["perf/mfu"] == pytest.approx(mfu, rel=1e-6)
    assert len(attended) == len(steps) == 2 and all(32 < mean < 128 for mean in attended)
    summary = json.loads((folder / f"math {kind}/summary.json").read_text())
    assert summary["peak_tflops"] == 0.25
    assert summary["mfu"] == pytest.approx(statistics.median(s["perf/mfu"] for s in steps))


def test_dry_run_plans_and_trains_nothing(first_runs, folder, kind="pp"):
    left = first_runs[kind][1]
    before = {p.name: p.read_text() for p in left.iterdir() if p.is_file()}
    flags = ("--train_json", "my data.jsonl", "--dry_run", "--overwrite", "--attn_impl", "math")
    said = launch(kind, folder, *flags, OUTPUT_DIR=left).stdout
    assert "dry run: everything is ready for step 1" in said and "step 1/3" not in said
    assert {p.name: p.read_text() for p in left.iterdir() if p.is_file()} == before


def test_trained_weights_epochs_and_evaluation(folder):
    """A sharded Llama checkpoint, one epoch with a partial last step, an evaluation in between."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "llama", max_shard_size="200KB")
    assert (folder / "llama/model.safetensors.index.json").exists()
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / "llama")
    for kind in KINDS:
        flags = ("--model_name_or_path", "llama", "--train_json", "my data.jsonl")
        flags += ("--num_epochs", "1")
        more = ("--eval_every", "2", "--sample_tokens", "0", "--output_dir", f"llama {kind}")
        more = (*more, "--log_every", "2", "--dtype", "fp32")
        said = launch(kind, folder, *flags, *more).stdout
        assert "weights of llama" in said and "lr 2e-05" in said
        assert " = 1 passes over " in said
        steps = [r["step"] for r in metrics(folder / f"llama {kind}") if "train/loss" in r]
        last = json.loads((folder / f"llama {kind}/config.json").read_text())["max_steps"]
        assert steps == sorted({*range(2, last + 1, 2), last})
    one, two = (folder / f"llama {kind}" for kind in KINDS)
    for key in ("train/loss", "eval/loss"):
        assert losses(one, key) == pytest.approx(losses(two, key), rel=1e-5)
    assert losses(one, "data/tokens")[-1] == losses(two, "data/tokens")[-1]
    evaluated = losses(one, "eval/loss")
    true, _ = transformers_loss(folder / "llama", folder / "my data.heldout.jsonl", 128)
    assert len(evaluated) >= 3 and evaluated[0] == pytest.approx(true, rel=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="both nodes would take the first GPU")
def test_two_nodes(first_runs, folder, kind="fsdp"):
    """Two launchers, as on two machines: global ranks decide, not local ones."""
    node = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port())}  # fmt: skip
    flags = ("--train_json", "my data.jsonl", "--sample_tokens", "0")

    def one(rank):
        return launch(kind, folder, *flags, OUTPUT_DIR=f"nodes {kind}", NODE_RANK=str(rank), **node)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, range(2))
    assert "step 3/3" in first.stdout and "step 3/3" not in second.stdout
    assert losses(folder / f"nodes {kind}") == pytest.approx(losses(first_runs[kind][1]), rel=1e-5)


def test_one_process_for_a_debugger(first_runs, folder, tmp_path, monkeypatch):
    """Also: the FSDP script does without DeepSpeed."""
    (tmp_path / "deepspeed.py").write_text("raise ImportError('no DeepSpeed here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    script = ROOT / "fsdp/launch_script.py"
    flags = ["--train_json", "my data.jsonl", "--seq_len", "128", "--micro_batch_size", "2"]
    flags += ["--grad_accum_steps", "4"]
    more = ["--max_steps", "3", "--output_dir", "one", "--sample_tokens", "0", "--no_fsdp"]
    more += ["--warmup_steps", SMALL["WARMUP_STEPS"]]
    done = run([sys.executable, script, *flags, *more], cwd=folder)
    assert done.returncode == 0, done.stderr
    bound = 1e-5 if not torch.cuda.is_available() else 2e-2
    assert losses(folder / "one") == pytest.approx(losses(first_runs["fsdp"][1]), rel=bound)


def test_other_data_flags_and_tensorboard(folder):
    flags = ("--no_pack_sequences", "--train_on_prompt", "--eval_json", "none")
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    if has_tensorboard:
        flags += ("--report_to", "tensorboard")
    more = ("--train_json", "my data.jsonl", "--sample_tokens", "0", "--max_steps", "1")
    said = launch("fsdp", folder, *flags, *more, OUTPUT_DIR="unpacked").stdout
    assert "60 documents" in said and "in 60 rows" in said
    assert len(losses(folder / "unpacked")) == 1
    assert (folder / "unpacked/tb").exists() == has_tensorboard


def test_the_readmes_recipe_killed_twice(folder, kind="pp"):
    """GSM8K's columns; kill -9 of all at random moments, the same command again and again, the
    export at its end, and its evaluation."""
    rows = [
        {"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"}
        for i in range(120)
    ]
    (folder / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = (
        "--train_json gsm8k.jsonl --input_key question --target_key answer --max_steps 8 "
        "--save_every 2 --output_dir gsm --resume auto --export fp32 --sample_tokens 0"
    ).split()
    env = {**os.environ, **SMALL, "GRAD_ACCUM_STEPS": "4", "PYTHON": python()}
    rng, log = random.Random(3), folder / "gsm.log"
    for after in (3, 5):
        with open(log, "w") as out:
            process = subprocess.Popen(
                ["bash", LAUNCHERS[kind], *flags], cwd=folder, env=env, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        while f"step {after}/8" not in log.read_text():
            assert process.poll() is None, log.read_text()[-2000:]
            time.sleep(0.05)
        time.sleep(rng.random())
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    said = launch(kind, folder, *flags).stdout
    assert re.search(r"resume: .*step_\d+, after step (4|6)", said) and "step 3/8" not in said
    assert [r["step"] for r in metrics(folder / "gsm") if "train/loss" in r] == [*range(1, 9)]
    shutil.rmtree(folder / "gsm/hf")  # as if killed after the last checkpoint
    (folder / "gsm/summary.json").unlink()
    assert "nothing left to train" in launch(kind, folder, *flags).stdout
    assert json.loads((folder / "gsm/summary.json").read_text())["steps"] == 8
    command = [sys.executable, "-m", "llm_demo.evaluate", "--models", "gsm/hf", *flags[2:6]]
    done = run(
        [*command, "--data", "gsm8k.jsonl", "--rows", "5", "--max_new_tokens", "4",
         "--answer_regex", "#### (.*)"], cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0 and "| gsm8k.jsonl | gsm/hf |" in done.stdout, done.stderr


def test_ctrl_c_ends_all_processes(folder, kind="pp"):
    env = {**SMALL, "GRAD_ACCUM_STEPS": "2", "PYTHON": python(), "MAX_STEPS": "5000"}
    command = ["env", *(f"{k}={v}" for k, v in env.items()), "bash", str(LAUNCHERS[kind])]
    flags = ["--train_json", "my data.jsonl", "--output_dir", f"stopped {kind}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, *flags], cwd=folder, **pipes)
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # as if it had been sent to a group, too
    _, err = process.communicate(timeout=10)
    assert process.returncode == 75  # it has saved
    assert "Traceback" not in err and "stopped after step" in err
    assert (folder / f"stopped {kind}/checkpoints/latest").exists()
    assert len(losses(folder / f"stopped {kind}")) >= 2
