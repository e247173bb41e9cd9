"""Bad input to both launchers: one clear line, a non-zero exit within seconds, nothing lost."""

import errno
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, environment, processes_with, python, run
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from llm_demo import fit
from llm_demo.core.errors import UserError
from llm_demo.job.dist import run as run_main
from llm_demo.job.dist import start
from llm_demo.job.process import fault_of_environment
from llm_demo.job.source import EXPERTS

KINDS = ("fsdp", "pp", "zero", "fsdp_pp")
LAUNCHERS = {kind: ROOT / f"{kind}/launch_{kind}.sh" for kind in KINDS}
GOOD = '{"prompt": "Why?", "completion": "Because it is so."}\n'


BAD_DATA = {
    "pointer.jsonl": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "weight.jsonl": '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}',
    "system.jsonl": '{"system": "a", "messages": [{"role": "system", "content": "b"}]}',
    "call.jsonl": '{"conversations": [{"from": "function_call", "value": "call f"}]}',
    "history.jsonl": '{"prompt": "a", "completion": "b", "history": ["c"]}',
    "twice.jsonl": '{"prompt": "a", "completion": "b", "prompt": "c"}',
    "array.json": '[{"prompt": "a"},\n {"completion": }]',
    "numbers.json": "[1, 2]",
    "no.jsonl.gz": "no gzip",
    "no.jsonl.zst": "no zstd",
    "cells.csv": "prompt,completion\na,b,c\n",
    "twice.tsv": "prompt\tprompt\na\tb\n",
    "broken.jinja": "{% for m in messages %}{{ m.role ",
    "hello.jinja": "hello",
}
BAD_ZERO = {
    "no_stage.json": {},
    "stage0.json": {"stage": 0},
    "overlap.json": {"stage": 2, "overlap_comm": True},
    "overlap1.json": {"stage": 1, "overlap_comm": True},
    "quantized.json": {"stage": 3, "zero_quantized_gradients": True},
    "nvme.json": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
    "ratio.json": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "size.json": {"stage": 2, "reduce_bucket_size": "half"},
    "true.json": {"stage": True},
    "decimal.json": {"stage": 2.0},
    "pin.json": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": "yes"}},
    "overlap_no.json": {"stage": 2, "overlap_comm": "no"},
    "text.json": {"stage": 2, "reduce_bucket_size": "1000"},
    "params2.json": {"stage": 2, "offload_param": {"device": "cpu"}},
    "robin.json": {"stage": 1, "round_robin_gradients": True},
}
BAD_SWITCHES = {
    "print0.json": '{"steps_per_print": 0}',
    "print.json": '{"steps_per_print": "abc"}',
    "logger.json": '{"comms_logger": 5}',
    "logger_more.json": '{"comms_logger": {"enable": true}}',
    "logger_text.json": '{"comms_logger": {"enabled": "yes"}}',
    "ops.json": '{"comms_logger": {"prof_ops": "all_reduce"}}',
    "breakdown.json": '{"memory_breakdown": "yes"}',
    "key_twice.json": '{"steps_per_print": 1, "steps_per_print": 2}',
}
WINDOW = {
    "model_type": "mistral", "sliding_window": 8, "vocab_size": 4096, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
OFFLOAD = str(ROOT / "zero/ds_zero3_offload.json")
TINY = ["--tokenizer_name_or_path", str(ROOT / "models/qwen3-tiny")]
NO_DATA = ["--train_json", "absent.jsonl"]  # for what is refused before data is read
WITH_EXPERTS = ["--model_name_or_path", str(ROOT / "models/qwen3-moe-tiny"), *NO_DATA]
ONE_BLOCK = ["--model_name_or_path", "one block", *TINY, "--seq_len", "64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    (folder / "good.jsonl").write_text(GOOD * 40)
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text(GOOD * 2 + '{"prompt": "Why?"\n')
    (folder / "unknown.jsonl").write_text('{"frage": "Warum?", "antwort": "Darum."}\n')
    (folder / "nothing.jsonl").write_text('{"prompt": "Why?", "completion": ""}\n')
    (folder / "number.json").write_text('{"train_batch_size": 8}')
    (folder / "tokens.jsonl").write_text('{"input_ids": [1, 2, 999999]}')
    (folder / "alias.json").write_text('{"bfloat16": {"enabled": true}}')
    (folder / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    for name, switches in BAD_ZERO.items():
        (folder / name).write_text(json.dumps({"zero_optimization": switches}))
    for name, text in {**BAD_DATA, **BAD_SWITCHES}.items():
        (folder / name).write_text(text)
    (folder / "huge").mkdir()
    config = json.loads((ROOT / "models/qwen3-tiny/config.json").read_text())
    config |= {"hidden_size": 1 << 17, "intermediate_size": 1 << 20}
    (folder / "huge/config.json").write_text(json.dumps(config))
    (folder / "window").mkdir()
    (folder / "window/config.json").write_text(json.dumps(WINDOW))
    (folder / "trained").mkdir()
    (folder / "trained/config.json").write_text(json.dumps(WINDOW))
    save_file({"weight": torch.zeros(1)}, folder / "trained/model.safetensors")
    (folder / "one block").mkdir()
    config = WINDOW | {"model_type": "llama", "num_hidden_layers": 1, "sliding_window": None}
    (folder / "one block/config.json").write_text(json.dumps(config))
    odd = json.loads((ROOT / "models/qwen3-moe-tiny/config.json").read_text()) | {"num_experts": 3}
    (folder / "odd").mkdir()
    (folder / "odd/config.json").write_text(json.dumps(odd))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "one block"))
    model.lm_head.weight.data[-1, -1] = math.nan
    model.save_pretrained(folder / "not finite")
    shutil.copytree(folder / "one block", folder / "odd generation")
    (folder / "odd generation/generation_config.json").write_text('{"max_new_tokens": "many"}')
    (folder / "mrope").mkdir()
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    (folder / "mrope/config.json").write_text(json.dumps(config))
    (folder / "no model").mkdir()
    (folder / "earlier run/checkpoints").mkdir(parents=True)  # as another trainer may have
    (folder / "earlier run/metrics.jsonl").write_text("precious")
    (folder / "finished run/checkpoints").mkdir(parents=True)
    (folder / "finished run/config.json").write_text('{"lr": 1}')
    (folder / "finished run/cmd.sh").write_text("")
    (folder / "damaged/checkpoints/step_00000001").mkdir(parents=True)
    (folder / "damaged/checkpoints/step_00000001/manifest.json").write_text('{"files": {}}')
    os.mkfifo(folder / "pipe")  # who opens it waits without end
    (folder / "piped/checkpoints/step_00000001").mkdir(parents=True)
    os.mkfifo(folder / "piped/checkpoints/step_00000001/manifest.json")
    os.mkfifo(folder / "piped/config.json")
    (folder / "gpt2").mkdir()
    (folder / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    for family in EXPERTS:
        (folder / family).mkdir()
        config = {**WINDOW, "num_key_value_heads": 4, "sliding_window": None, "model_type": family}
        config["first_k_dense_replace"] = 1
        (folder / family / "config.json").write_text(json.dumps(config))
    return folder


def launch(kind, folder, *flags, **env):
    env = {"PYTHON": sys.executable, "MAX_STEPS": "2", "NPROC_PER_NODE": "2", **env}
    started = time.monotonic()
    done = run(["bash", LAUNCHERS[kind], *flags], cwd=folder, **env)
    return done, time.monotonic() - started


def assert_one_line(done, *parts):
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    for part in parts:
        assert part in errors[0]
    assert done.returncode not in (0, None)
    assert "step 1/" not in done.stdout


# Through the launchers: what each of them must turn into one line and an exit code.
LAUNCHED = [
    ("fsdp", ["--model_name_or_path", "./absent"], ["no model at ./absent"]),
    ("pp", ["--model_name_or_path", "no model"], ["no model at no model"]),
    ("fsdp", ["--train_json", "unknown.jsonl"], ["unknown.jsonl:1", "frage, antwort"]),
    ("pp", ["--train_json", "broken.jsonl"], ["broken.jsonl:3", "broken JSON"]),
    ("fsdp", ["--lr_rate", "1"], ["unknown argument --lr_rate", "--lr"]),
    ("pp", ["--output_dir", "earlier run"], ["earlier run is not empty", "--overwrite"]),
    ("fsdp", ["--no_fsdp"], ["--no_fsdp needs one process, not 2"]),
    ("pp", ["--partition", "3,4", *NO_DATA], ["--partition 3,4", "a sum of 6"]),
    ("pp", ["--stages", "3"], ["2 processes", "3 --stages"]),
    ("zero", ["--deepspeed_config", "stage0.json"], ["stage0.json: ZeRO stage 0 is refused"]),
    ("fsdp_pp", ["--train_json", "broken.jsonl"], ["broken.jsonl:3", "broken JSON"]),
    ("fsdp_pp", ["--stages", "3"], ["2 processes can't form pipelines of 3 --stages"]),
    (
        "fsdp_pp",
        ["--partition", "3,4", *NO_DATA],
        ["--partition 3,4: give 2 counts", "a sum of 6"],
    ),
    ("fsdp_pp", ["--schedule", "v", "--partition", "3,3"], ["give 4 counts", "a sum of 6"]),
    ("fsdp_pp", [*ONE_BLOCK, *NO_DATA], ["the model has 1 block, too few for 2 pieces"]),
    ("fsdp_pp", ["--schedule", "interleaved", *ONE_BLOCK], ["too few for 4 pieces"]),
    ("fsdp_pp", ["--optimizer_on_host"], ["--optimizer_on_host: only for fsdp/"]),
    ("fsdp", ["--resume", "no run", *NO_DATA], ["no run: no such folder"]),
    (
        "fsdp",
        ["--expert_parallel", "2", "--model_name_or_path", "odd", *TINY, *NO_DATA],
        ["--expert_parallel 2 does not divide 3, the experts"],
    ),
    (
        "fsdp",
        ["--sequence_parallel", "2", "--seq_len", "33"],
        ["--sequence_parallel 2 does not divide --seq_len 33"],
    ),
]


@pytest.mark.parametrize("kind, flags, parts", LAUNCHED, ids=lambda x: str(x[0]) + str(x[-1]))
def test_bad_input(kind, flags, parts, folder, record_property):
    record_property("bad inputs", 1)
    data = [] if "--train_json" in flags else ["--train_json", "good.jsonl"]
    out = [] if "--output_dir" in flags else ["--output_dir", "new"]
    done, seconds = launch(kind, folder, *data, *out, *flags)
    assert_one_line(done, *parts)
    assert done.returncode == 2
    assert seconds < 60  # start-up included, on a busy machine
    assert not (folder / "new").exists()
    assert (folder / "earlier run/metrics.jsonl").read_text() == "precious"
    assert (folder / "good.jsonl").read_text() == GOOD * 40


# The same scripts' main(), in this process: a launch takes 5 s.
BOTH = [
    (["--model_name_or_path", "gpt2"], "gpt2 is not one of qwen3"),
    (["--model_name_or_path", "nobody/nothing"], "no model at nobody/nothing"),
    (["--tokenizer_name_or_path", "gpt2"], "no tokenizer in gpt2"),
    (["--train_json", "absent.jsonl"], "no such data file: absent.jsonl"),
    (["--train_json", "*.txt"], "no data file matches"),
    (["--train_json", "empty.jsonl"], "empty.jsonl is empty"),
    (["--train_json", "nothing.jsonl"], "nothing"),
    (["--eval_json", "absent.jsonl"], "no such data file: absent.jsonl"),
    (["--data_format", "messages"], "good.jsonl:1.*messages"),
    (["--input_key", "prompt"], "--input_key and --target_key"),
    (["--seq_len", "4"], "--seq_len 4"),
    (
        ["--model_name_or_path", "trained", "--seq_len", "100000"],
        "--seq_len 100000.*positions up to 2048",
    ),
    (["--dtype", "fp8"], "--dtype.*fp8"),
    (["--max_steps", "many"], "--max_steps.*many"),
    (["--max_steps", "100000000"], "--max_steps 100000000: must be at most 99,999,999"),
    (["--micro_batch_size", "0"], "--micro_batch_size 0"),
    (["--lr", "-1"], "--lr -1"),
    (["--warmup_steps", "-1"], "--warmup_steps -1"),
    (["--max_steps", "0", "--num_epochs", "0"], "--num_epochs above 0"),
    (["--attn_impl", "flash"], "--attn_impl flash: choose from auto, sdpa, varlen"),
    (["--output_dir", "earlier run", "--overwrite"], "earlier run is not a run's folder"),
    (["--output_dir", "good.jsonl"], "good.jsonl is a file"),
    (["--output_dir", "good.jsonl/x"], "good.jsonl/x: can't write to"),
    (["--output_dir", "/proc/x"], "/proc/x: can't write to /proc"),
    (["--model_name_or_path", "finished run"], "finished run is the folder of a run, not a model"),
    (["--seed", "-1"], "--seed -1: must not be negative"),
]
CASES = [("fsdp", *case) for case in BOTH]
CASES += [(kind, *case) for kind in ("pp", "zero", "fsdp_pp") for case in BOTH[::7]]
CASES += [
    ("pp", ["--partition", "even"], "--partition even: must be balanced"),
    ("pp", ["--partition", "2,4", *NO_DATA], "--partition 2,4: give 1 counts"),
    ("pp", ["--partition", "7", *NO_DATA], "--partition 7: give 1 counts.*a sum of 6"),
    ("pp", ["--deepspeed_config", "number.json"], "train_batch_size is set by --micro_batch_size"),
    ("pp", ["--deepspeed_config", "zero2.json"], "ZeRO stage 2"),
    ("pp", ["--deepspeed_config", "alias.json"], "bfloat16 is not among the switches"),
    ("pp", ["--deepspeed_config", "absent.json"], "absent.json"),
    ("pp", ["--deepspeed_config", "robin.json"], "round_robin_gradients is not among the switches"),
    ("pp", ["--deepspeed_config", "overlap1.json"], "overlap_comm is refused"),
    ("pp", ["--stages", "0"], "--stages"),
    ("zero", ["--deepspeed_config", "no_stage.json"], "ZeRO stage 0 is refused: 1, 2 and 3"),
    ("zero", ["--deepspeed_config", "overlap.json"], "overlap_comm is refused"),
    ("zero", ["--deepspeed_config", "quantized.json"], "zero_quantized_gradients is not among"),
    ("zero", ["--deepspeed_config", "nvme.json"], 'offload_optimizer must be .*"device": "cpu"'),
    ("zero", ["--deepspeed_config", "ratio.json"], "offload_optimizer.ratio is not one of"),
    ("zero", ["--deepspeed_config", "size.json"], "zero_optimization.reduce_bucket_size: Input "),
    ("zero", ["--deepspeed_config", "true.json"], "ZeRO stage True is refused"),
    ("zero", ["--deepspeed_config", "decimal.json"], "ZeRO stage 2.0 is refused"),
    ("zero", ["--deepspeed_config", "pin.json"], 'pin_memory must be true or false, not "yes"'),
    ("zero", ["--deepspeed_config", "overlap_no.json"], "overlap_comm must be true or false, no"),
    ("zero", ["--deepspeed_config", "text.json"], 'bucket_size must be a number, not "1000"'),
    ("zero", ["--deepspeed_config", "params2.json"], "offload_param needs ZeRO stage 3, not 2"),
    ("zero", ["--deepspeed_config", "alias.json"], "bfloat16 is not among the switches"),
    ("zero", ["--deepspeed_config", "number.json"], "train_batch_size is set by"),
    ("zero", ["--deepspeed_config", "absent.json"], "absent.json"),
    (
        "zero",
        ["--model_name_or_path", "huge", *TINY],
        r"ZeRO needs \d+\.\d GiB while a checkpoint is saved or read on this node, and \d+\.\d GiB",
    ),
    (
        "zero",
        ["--model_name_or_path", "huge", *TINY, "--no_save", "--deepspeed_config", OFFLOAD],
        r"ZeRO needs \d+\.\d GiB for what is offloaded on this node, and",
    ),
    ("zero", ["--optimizer_on_host"], "--optimizer_on_host: only for fsdp/"),
    ("pp", ["--schedule", "dualpipev"], "--schedule dualpipev needs --stages of at least 2"),
    (
        "fsdp",
        ["--activation_memory_budget", "2"],
        "--activation_memory_budget 2: must be at most 1",
    ),
    ("fsdp", ["--activation_memory_budget", "0.5", "--no_compile"], "add --compile"),
    (
        "fsdp",
        ["--copy_engines", "--dtype", "fp32"],
        "--copy_engines requires FSDP with --dtype bf16",
    ),
    ("fsdp", ["--copy_engines", "--no_fsdp", "--dtype", "bf16"], "--copy_engines requires FSDP"),
    ("fsdp", ["--activations_on_host"], "needs --use_activation_checkpointing"),
    (
        "fsdp",
        ["--activations_on_host", "--use_activation_checkpointing", "--blocks_per_unit", "2"],
        "--activations_on_host works on single blocks: drop --blocks_per_unit",
    ),
    (
        "fsdp",
        ["--reshard_after_forward", "--no_fsdp"],
        "--reshard_after_forward needs FSDP: drop --no_fsdp",
    ),
    ("fsdp", ["--replicas", "0"], "--replicas 0: must be a positive integer or all"),
    ("fsdp", ["--replicas", "both"], "--replicas both: must be a positive integer or all"),
    ("fsdp", ["--replicas", "all", "--no_fsdp"], "--replicas needs FSDP"),
    ("fsdp", ["--psgd_rank", "4"], "--psgd_rank compresses sums over replicas: add --replicas"),
    (
        "fsdp",
        ["--psgd_rank", "4", "--replicas", "all", "--dtype", "fp16"],
        "--psgd_rank does not work in fp16",
    ),
    ("fsdp", ["--length_warmup", "-1"], "--length_warmup -1: must not be negative"),
    (
        "zero",
        ["--length_warmup", "2"],
        "--length_warmup 2 is longer than the run's 1 step of 1 row: give at most 1",
    ),
    ("fsdp", ["--replicas", "3"], "--replicas 3 does not divide 1, the processes"),
    ("pp", ["--lora_rank", "4"], "--lora_rank: only for fsdp/"),
    ("zero", ["--lora_rank", "4"], "--lora_rank: only for fsdp/"),
    ("fsdp_pp", ["--lora_rank", "4"], "--lora_rank: only for fsdp/"),
    ("pp", ["--sequence_parallel", "2"], "--sequence_parallel: only for fsdp/"),
    ("zero", ["--sequence_parallel", "2"], "--sequence_parallel: only for fsdp/"),
    ("fsdp_pp", ["--sequence_parallel", "2"], "--sequence_parallel: only for fsdp/"),
    ("fsdp", ["--sequence_parallel", "0"], "--sequence_parallel 0: must be at least 1"),
    ("fsdp", ["--sequence_parallel", "2"], "--sequence_parallel 2 does not divide 1, the proc"),
    (
        "fsdp",
        ["--sequence_parallel", "2", "--no_fsdp"],
        "--sequence_parallel needs FSDP: drop --no_fsdp",
    ),
    (
        "fsdp",
        ["--sequence_parallel", "2", "--replicas", "all", "--psgd_rank", "4"],
        "--psgd_rank does not work with --sequence_parallel",
    ),
    ("pp", ["--optimizer_on_host"], "--optimizer_on_host: only for fsdp/"),
    ("fsdp", ["--device_memory_gb", "-1"], "--device_memory_gb -1: must not be negative"),
    ("pp", ["--device_memory_gb", "30"], "--device_memory_gb limits GPU memory"),
    ("fsdp", ["--profile_steps", "3"], "--profile_steps 3: must be two steps"),
    ("fsdp", ["--peak_tflops", "0"], "--peak_tflops 0: must be positive"),
    ("fsdp", ["--peak_tflops", "inf"], "--peak_tflops inf: must be a finite number"),
    ("fsdp", ["--lr", "inf"], "--lr inf: must be a finite number"),
    ("fsdp", ["--weight_decay", "nan"], "--weight_decay nan: must be a finite number"),
    ("pp", ["--max_grad_norm", "nan"], "--max_grad_norm nan: must be a finite number"),
    ("fsdp", ["--max_steps", "0", "--num_epochs", "inf"], "--num_epochs inf: must be a finite"),
    ("fsdp", ["--seed", "1" + 40 * "0"], "--seed 1000.*: must be at most"),
    ("fsdp", ["--train_json", "tokens.jsonl"], "token 999999, but the model knows"),
]
CASES += [
    ("fsdp", ["--train_json", "pointer.jsonl"], "pointer.jsonl is a Git LFS pointer"),
    ("fsdp", ["--train_json", "weight.jsonl"], r"weight.jsonl:1: messages\[0\]: weight must be 0"),
    ("fsdp", ["--train_json", "system.jsonl"], "system.jsonl:1: 'system' differs from"),
    (
        "fsdp",
        ["--train_json", "call.jsonl"],
        "call.jsonl:1: .* a function_call turn must contain JSON",
    ),
    ("fsdp", ["--train_json", "history.jsonl"], "history.jsonl:1: 'history' must be a list"),
    (
        "fsdp",
        ["--train_json", "twice.jsonl"],
        "twice.jsonl:1: broken JSON: an object has the key 'prompt' twice: 'a' and 'c'",
    ),
    ("fsdp", ["--train_json", "array.json"], "array.json:2: broken JSON: .* at column 17"),
    ("fsdp", ["--train_json", "numbers.json"], "numbers.json, row 1: a row must be a JSON object"),
    ("fsdp", ["--train_json", "no.jsonl.gz"], "no.jsonl.gz: damaged or truncated .gz file"),
    ("fsdp", ["--train_json", "no.jsonl.zst"], "no.jsonl.zst: damaged or truncated .zst file"),
    ("fsdp", ["--train_json", "cells.csv"], "cells.csv, row 1: 3 cells, but the header has 2"),
    ("fsdp", ["--train_json", "twice.tsv"], "twice.tsv: two columns are named 'prompt'"),
    ("fsdp", ["--train_json", "no model"], "no model is a folder with no data file"),
    ("fsdp", ["--eval_json", "openai/gsm8k"], "openai/gsm8k: name the split"),
    ("fsdp", ["--dataset_config", "main"], "--dataset_config main applies only to hub datasets"),
    ("fsdp", ["--dataset_split", "test"], "--dataset_split test applies only to hub datasets"),
    ("fsdp", ["--learn_turns", "some"], "--learn_turns.*some"),
    ("fsdp", ["--learn_turns", "last", "--train_on_prompt"], "--learn_turns last.* contradict"),
    ("fsdp", ["--seq_len", "-64"], "--seq_len -64"),
    ("fsdp", ["--chat_template", "absent.jinja"], "--chat_template absent.jinja: No such file"),
    ("fsdp", ["--chat_template", "broken.jinja"], "--chat_template broken.jinja:1: "),
    ("pp", ["--chat_template", "hello.jinja"], "hello.jinja: not a chat template"),
    ("fsdp", ["--model_name_or_path", "window", *TINY, "--seq_len", "64"], "last 8 tokens only"),
    ("pp", ["--model_name_or_path", "window", *TINY, "--seq_len", "64"], "last 8 tokens only"),
]
CASES += [
    (kind, ["--deepspeed_config", file], message)
    for kind in ("pp", "zero")
    for file, message in (
        ("print0.json", "print0.json: steps_per_print must be at least 1"),
        ("print.json", 'print.json: steps_per_print must be a number, not "abc"'),
        ("logger.json", "logger.json: comms_logger must be an object, not 5"),
        ("logger_more.json", "comms_logger.enable is not one of debug, enabled, prof_all"),
        ("logger_text.json", 'enabled must be true or false, not "yes"'),
        ("ops.json", 'prof_ops must be a list of names, not "all_reduce"'),
        ("breakdown.json", 'memory_breakdown must be true or false, not "yes"'),
        (
            "key_twice.json",
            "key_twice.json: an object has the key 'steps_per_print' twice: 1 and 2",
        ),
    )
]
CASES += [
    (kind, ["--model_name_or_path", name, *TINY, "--seq_len", "64", *more], message)
    for kind in KINDS
    for name, more, message in (
        ("not finite", ["--dry_run"], "not finite: lm_head.weight is not finite"),
        ("odd generation", NO_DATA, "odd generation/generation_config.json: '<=' not supported"),
        ("mrope", NO_DATA, "mrope/config.json: the rotary type mrope is not one of default,"),
    )
]
CASES += [
    ("fsdp", ["--train_json", "pipe"], "no such data file: pipe"),
    ("fsdp", ["--train_json", "/dev/zero"], "no such data file: /dev/zero"),
    ("fsdp", ["--eval_json", "pipe"], "no such data file: pipe"),
    ("fsdp", ["--chat_template", "pipe"], "pipe is not a regular file"),
    ("fsdp", ["--chat_template", "no model"], "--chat_template no model: Is a directory"),
    ("pp", ["--deepspeed_config", "pipe"], "pipe is not a regular file"),
    ("zero", ["--deepspeed_config", "pipe"], "pipe is not a regular file"),
    ("zero", ["--deepspeed_config", "no model"], "no model: .*Is a directory"),
    ("fsdp", ["--resume", "piped", *NO_DATA], "piped/config.json is not a regular file"),
    ("fsdp", ["--resume", "piped/checkpoints/step_00000001", *NO_DATA], "is not a regular file"),
    ("fsdp", ["--model_name_or_path", "pipe"], "no model at pipe"),
    ("fsdp", ["--output_dir", "pipe"], "pipe is a file"),
]
LONG = "n" * 300  # longer than a file name can be
CASES += [
    ("fsdp", ["--output_dir", LONG], "n: File name too long"),
    ("pp", ["--model_name_or_path", f"./{LONG}"], "n/cmd.sh: File name too long"),
    ("zero", ["--resume", LONG, *NO_DATA], "n/manifest.json: File name too long"),
]
FSDP_PP = [
    (
        ["--stages", "2", "--schedule", "interleaved", "--grad_accum_steps", "3"],
        "interleaved needs --grad_accum_steps that is a multiple of --stages 2, not 3",
    ),
    (["--schedule", "interleaved"], "--schedule interleaved needs --stages of at least 2"),
    (["--schedule", "v"], "--schedule v needs --stages of at least 2"),
    (["--schedule", "2f2b"], "--schedule 2f2b: choose from 1f1b, gpipe"),
    (["--stages", "0"], "--stages"),
    (["--stages", "2"], "1 process can't form pipelines of 2 --stages"),
    (["--run_ahead", "-1"], "--run_ahead -1: must not be negative"),
    (["--partition", "even"], "--partition even: must be balanced"),
    (["--partition", "2,4", *NO_DATA], "--partition 2,4: give 1 counts"),
    (["--partition", "7", *NO_DATA], "--partition 7: give 1 counts.*a sum of 6"),
    (["--optimizer_on_host"], "--optimizer_on_host: only for fsdp/"),
    (["--replicas", "all"], "--replicas: only for fsdp/"),
    (["--no_fsdp"], "unknown argument --no_fsdp"),
    (["--deepspeed_config", "absent.json"], "--deepspeed_config: only for pp/ and zero/"),
]
CASES += [("fsdp_pp", *case) for case in FSDP_PP]
CASES += [
    (
        "fsdp",
        ["--psgd_rank", "4", "--replicas", "all", *WITH_EXPERTS],
        "--psgd_rank does not work with a mixture of experts",
    )
]
CASES += [
    (kind, ["--resume", name, *NO_DATA], f"{name}: {message}")
    for kind in KINDS
    for name, message in (
        ("no run", "no such folder"),
        ("earlier run", "it has no intact checkpoint"),
        ("damaged/checkpoints/step_00000001", "manifest.json does not list .metadata"),
    )
]
CASES += [
    (
        kind,
        ["--model_name_or_path", family, *TINY, "--seq_len", "64", "--train_json", "absent.jsonl"],
        f"{family}: only fsdp/train_fsdp.py and fsdp_pp/train_fsdp_pp.py train models with",
    )
    for kind in ("pp", "zero")
    for family in EXPERTS
]
QWEN = ["--model_name_or_path", "qwen3_moe", *TINY, "--seq_len", "64"]
DEEPSEEK = ["--model_name_or_path", "deepseek_v3", *TINY, "--seq_len", "64"]
CASES += [
    ("fsdp", ["--freeze_router"], "--freeze_router: this model has no experts"),
    ("fsdp_pp", ["--stages", "1", "--freeze_router"], "--freeze_router: this model has no experts"),
    ("fsdp", ["--router_aux_loss", "0.1"], "--router_aux_loss: this model has no experts"),
    ("fsdp", ["--router_aux_loss", "-0.1"], "--router_aux_loss -0.1"),
    ("fsdp", ["--router_bias_update", "nan"], "--router_bias_update nan"),
    ("fsdp", [*QWEN, "--router_bias_update", "0.1"], "qwen3_moe has no bias for its experts"),
    ("fsdp", [*DEEPSEEK, "--router_aux_loss", "0.1"], "deepseek_v3 balances its load by"),
    (
        "fsdp",
        [*QWEN, "--lora_rank", "4", "--lora_targets", "gate_proj"],
        "choose from q_proj, k_proj, v_proj, o_proj",
    ),
    ("fsdp", [*QWEN, "--optimizer_on_host", "--freeze_router"], "does not work with --optimizer_"),
    ("fsdp", [*QWEN, "--router_aux_loss", "1", "--freeze_router"], "drop --freeze_router"),
    ("fsdp", [*QWEN, "--no_save", "--save_every", "5"], "--save_every needs checkpoints"),
    ("fsdp", [*QWEN, "--no_save", "--keep_best"], "--keep_best needs checkpoints"),
    ("fsdp_pp", ["--stages", "1", *QWEN, "--router_aux_loss", "1"], "router_aux_loss: only for"),
]


@pytest.mark.parametrize("kind, flags, message", CASES)
def test_bad_input_of_one_process(
    kind, flags, message, folder, monkeypatch, capsys, record_property
):
    record_property("bad inputs", 1)
    if kind == "pp":
        import pp.pp_train as script
    elif kind == "zero":
        import zero.train_zero as script
    elif kind == "fsdp_pp":
        import fsdp_pp.train_fsdp_pp as script
    else:
        import fsdp.train_fsdp as script
    defaults = ["--train_json", "good.jsonl", "--output_dir", "new", "--max_steps", "1"]
    one = ["--stages", "1"] if kind in ("pp", "fsdp_pp") else []
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", [script.__file__, *defaults, *one, *flags])
    alone = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }
    for name, value in alone.items():  # set here, so that they are gone afterwards
        monkeypatch.setenv(name, str(value))
    try:
        with pytest.raises(UserError, match=message) as raised:
            script.main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert "\n" not in str(raised.value)
    assert not (folder / "new").exists()
    assert (folder / "earlier run/metrics.jsonl").read_text() == "precious"
    assert (folder / "good.jsonl").read_text() == GOOD * 40


OF_FIT = {"--cards": "2", "--memory": "32", "--tokens_a_step": "65536"}
FIT = [
    ("gpt2", {}, "gpt2 is not one of qwen3"),
    ("./absent", {}, "no model at ./absent"),
    ("nobody/nothing", {}, "no model at nobody/nothing"),
    ("mrope", {}, "mrope/config.json: the rotary type mrope is not one of default,"),
    ("window", {"--cards": "0"}, "--cards: 0: must be a whole number, 1 or more"),
    ("window", {"--cards": "two"}, "--cards: two: must be a whole number"),
    ("window", {"--memory": "0"}, "--memory: 0: must be a number above 0"),
    ("window", {"--memory": "32GB"}, "--memory: 32GB: must be a number above 0"),
    ("window", {"--host_memory": "nan"}, "--host_memory: nan: must be a number above 0"),
    ("window", {"--bandwidth": "inf"}, "--bandwidth: inf: must be a number above 0"),
    ("window", {"--tokens_a_step": "1e5"}, "--tokens_a_step: 1e5: must be a whole number"),
    ("trained", {"--seq_len": "4096"}, "--seq_len 4096: trained has positions up to 2048"),
    ("window", {"--seq_len": "4"}, "--seq_len: 4: must be a whole number, 8 or more"),
    ("window", {"--ckpt": "1"}, "unrecognized arguments: --ckpt 1"),
    ("window", {"--memory": None}, "set --card, or --memory"),
]


@pytest.mark.parametrize("model, flags, message", FIT)
def test_bad_input_of_fit(model, flags, message, folder, monkeypatch, record_property):
    record_property("bad inputs", 1)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pairs = [pair for pair in {**OF_FIT, **flags}.items() if pair[1]]
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        fit.main([model, *(word for pair in pairs for word in pair)])
    assert "\n" not in str(raised.value)


# ZeRO is launched as DeepSpeed's pipeline is, FSDP2 inside a pipeline as FSDP2
@pytest.mark.parametrize(
    "kind", ["fsdp", "pp", *(pytest.param(k, marks=pytest.mark.slow) for k in ("zero", "fsdp_pp"))]
)
def test_a_dying_rank_takes_all_along(kind, folder):
    mark = f"{folder} {kind}"
    env = environment(PYTHON=python(), MAX_STEPS="5000", NPROC_PER_NODE="2", A_TEST=mark)
    env |= {"SEQ_LEN": "64", "MICRO_BATCH_SIZE": "1"}
    command = [
        "bash",
        str(LAUNCHERS[kind]),
        "--train_json",
        "good.jsonl",
        "--output_dir",
        f"dies {kind}",
    ]
    launcher = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in launcher.stdout:
        if line.startswith("step 3/"):
            break
    children = [p for p in processes_with(A_TEST=mark) if p.pid != launcher.pid]
    ranks = {c.environ()["RANK"]: c for c in children if "RANK" in c.environ()}
    killed = time.monotonic()
    ranks["1"].send_signal(signal.SIGKILL)
    _, err = launcher.communicate(timeout=20)
    assert time.monotonic() - killed < 10
    assert launcher.returncode == 128 + signal.SIGKILL
    assert err.strip().splitlines()[-1].startswith("error: rank 1 died of SIGKILL")
    assert "Traceback" not in err
    assert not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children)
    lines = (folder / f"dies {kind}/metrics.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) >= 3


ENVIRONMENT = [
    ({"RANK": "x"}, "RANK=x: must be a whole number, 0 or more"),
    ({"RANK": "5"}, "RANK=5: must be at most 0"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be a whole number, 1 or more"),
    ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE=2 needs MASTER_ADDR: start it by its launcher"),
    ({"LOCAL_RANK": "-3"}, "LOCAL_RANK=-3: must be a whole number, 0 or more"),
    ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: must be at most 65535"),
    ({"MASTER_PORT": "x"}, "MASTER_PORT=x: must be a whole number, 0 or more"),
    ({"GLOO_SOCKET_IFNAME": "nope0"}, "GLOO_SOCKET_IFNAME in the environment: .*for: nope0"),
]


@pytest.mark.parametrize("environ, message", ENVIRONMENT)
def test_an_environment_without_a_group_is_one_line(environ, message, monkeypatch, record_property):
    record_property("bad inputs", 1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # what the call sets is gone afterwards
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=message) as raised:
        start()
    assert "\n" not in str(raised.value)


def test_a_port_in_use_is_one_line(monkeypatch, capsys, record_property):
    record_property("bad inputs", 1)
    ended = []
    monkeypatch.setattr("llm_demo.job.dist.os._exit", ended.append)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**place, "MASTER_PORT": busy.getsockname()[1]}.items():
            monkeypatch.setenv(name, str(value))
        run_main(start)
    said = capsys.readouterr().err
    assert ended == [1] and said.count("\n") == 1, said
    assert said.startswith("error: rank 0 can't meet the other ranks: The server socket has failed")


@pytest.mark.parametrize(
    "command, name",
    [
        (["fsdp/train_fsdp.py"], "TORCH_DISTRIBUTED_DEBUG"),
        (["pp/pp_train.py"], "TORCH_LOGS"),
        (["-m", "llm_demo.report", "run"], "MPLBACKEND"),
    ],
)
def test_an_environment_that_an_import_refuses_is_one_line(command, name, record_property):
    record_property("bad inputs", 1)
    done = run([sys.executable, *command], fresh=True, **{name: "junk"})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {name} in the environment: ")


def test_only_what_a_message_names_or_quotes_is_blamed(monkeypatch):
    monkeypatch.setattr(os, "environ", {"A_SIZE": "x", "N": "1", "_": "/bin/x", "NAME": "some"})
    os.environ["QUIET"] = "false"
    said = "invalid literal for int() with base 10: 'x'"
    assert fault_of_environment(ValueError(said)) == f"A_SIZE in the environment: {said}"
    assert fault_of_environment(RuntimeError("no interface: some")).startswith("NAME in")
    assert fault_of_environment(RuntimeError("A_SIZE must be\n  a number")).startswith("A_SIZE in")
    for other in (
        "index 1 is out of range: 1",
        "some_x: not A_SIZES",
        "NAME of some file",
        "ipv6: false, port: 1",
    ):
        assert fault_of_environment(ValueError(other)) is None
    assert fault_of_environment(ImportError("No module named 'x'")) is None


def test_a_full_disk_is_one_line(monkeypatch, capsys):
    """Wherever it is found; /dev/full is such a disk."""
    ended = []
    monkeypatch.setattr("llm_demo.job.dist.os._exit", ended.append)

    def main():
        with open("/dev/full", "w") as file:
            file.write("a step's numbers")

    run_main(main)
    assert ended == [1]
    expected = "error: rank 0: No space left on device: --output_dir or the cache\n"
    assert capsys.readouterr().err == expected


def test_a_path_without_permission_is_one_line(tmp_path, monkeypatch, capsys):
    ended, denied = [], tmp_path / "denied"
    monkeypatch.setattr("llm_demo.job.dist.os._exit", ended.append)
    denied.mkdir(mode=0)

    def main():
        user = os.geteuid()
        os.seteuid(user or 65534)  # root may read everything
        try:
            (denied / "x").stat()
        finally:
            os.seteuid(user)

    run_main(main)
    assert ended == [2]
    assert capsys.readouterr().err == f"error: {denied}/x: Permission denied\n"

    def bug():
        raise PermissionError(errno.EPERM, "Operation not permitted")  # of no path

    run_main(bug)
    assert ended == [2, 1]
    assert "Traceback" in capsys.readouterr().err

    def full():
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x")
        finally:
            main()

    run_main(full)
    assert ended == [2, 1, 1]
    assert capsys.readouterr().err == "error: rank 0: No space left on device: x\n"
