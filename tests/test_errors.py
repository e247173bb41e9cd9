"""Bad input to both launchers: one clear line, a non-zero exit within seconds, nothing lost."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import (
    ALONE,
    LAUNCHERS,
    ROOT,
    TINY,
    environment,
    logged,
    processes_with,
    python,
    refused,
    run,
    run_alone,
    script_of,
    smaller_model,
)
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from llm_demo import fit
from llm_demo.machine.dist import run as run_main
from llm_demo.machine.dist import start
from llm_demo.model.families import FAMILIES

DOWN = "model.layers.0.mlp.down_proj.weight"
HEAD = "base_model.model.lm_head.lora_A.weight"
ADAPTER = {"peft_type": "LORA", "bias": "none", "r": 4, "lora_alpha": 8, "target_modules": ["x"]}
EXPERTS = [name for name, family in FAMILIES.items() if family.experts]
GOOD = '{"prompt": "Why?", "completion": "Because it is so."}\n'
# Data files: (text, what fsdp's script says of it)
BAD_DATA = {
    "empty.jsonl": ("", "empty.jsonl is empty"),
    "nothing.jsonl": ('{"prompt": "Why?", "completion": ""}\n', "nothing"),
    "tokens.jsonl": ('{"input_ids": [1, 2, 999999]}', "token 999999, but the model knows"),
    "numbers.json": ("[1, 2]", "numbers.json, row 1: an example must be a JSON object"),
}
# DeepSpeed's switches in files: (scripts, "zero_optimization" or all of the file, what is said)
BAD_ZERO = [
    ("pp", {"stage": 1, "round_robin_gradients": True},
     "zero_optimization: round_robin_gradients: only these switches keep"),
    ("pp", {"stage": 1, "overlap_comm": True}, "overlap_comm is refused"),
    ("pp", {"stage": 2}, "ZeRO stage 2"),
    ("zero", {}, "ZeRO stage 0 is refused: 1, 2 and 3"),
    ("zero", {"stage": 2, "overlap_comm": True}, "overlap_comm is refused"),
    ("zero", {"stage": 3, "zero_quantized_gradients": True},
     "zero_quantized_gradients: only these"),
    ("zero", {"stage": 3, "offload_optimizer": {"device": "nvme"}},
     'offload_optimizer must be .*"device": "cpu"'),
    ("zero", {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
     "offload_optimizer: ratio: only these"),
    ("zero", {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": "often"}},
     "ds8.json: zero_optimization: .*offload_optimizer.pin_memory Input should be a valid bool"),
    ("zero", {"stage": 2, "reduce_bucket_size": "half"},
     "zero_optimization: .*reduce_bucket_size Input should be a valid integer"),
    ("zero", {"stage": 2, "overlap_comm": "yes"}, "overlap_comm is refused"),
    ("zero", {"stage": 2, "offload_param": {"device": "cpu"}},
     "offload_param needs ZeRO stage 3, not 2"),
]  # fmt: skip
BAD_SWITCHES = [
    ('{"train_batch_size": 8}', "FILE: train_batch_size: only these switches keep the numbers of"),
    ('{"bfloat16": {"enabled": true}}', "FILE: bfloat16: only these switches keep"),
    ('{"steps_per_print": "abc"}', "FILE: steps_per_print must be of type int"),
    ('{"comms_logger": 5}', "FILE: comms_logger must be an object"),
    ('{"comms_logger": {"enable": true}}', "comms_logger: enable: only these switches"),
    ('{"comms_logger": {"prof_ops": "all_reduce"}}', "comms_logger: .*prof_ops Input should be "),
    ('{"memory_breakdown": "yes"}', "FILE: memory_breakdown must be of type bool"),
    ('{"steps_per_print": 1, "steps_per_print": 2}',
     "FILE: an object has the key 'steps_per_print' twice: 1 and 2"),
]  # fmt: skip
SWITCHES = [(kinds, json.dumps({"zero_optimization": z}), said) for kinds, z, said in BAD_ZERO]
SWITCHES += [("pp zero", text, said) for text, said in BAD_SWITCHES]
WINDOW = {
    "model_type": "mistral", "sliding_window": 8, "vocab_size": 4096, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip


def change(config, **changes):
    """The text of a configuration: of a file, or as it is."""
    config = config if isinstance(config, dict) else json.loads(config.read_text())
    return json.dumps(config | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    one_block = WINDOW | {"model_type": "llama", "num_hidden_layers": 1, "sliding_window": None}
    mrope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    experts = WINDOW | {"num_key_value_heads": 4}
    del experts["sliding_window"]
    files = {name: text for name, (text, _) in BAD_DATA.items()}
    files |= {f"ds{i}.json": text for i, (_, text, _) in enumerate(SWITCHES)}
    files |= {
        "good.jsonl": GOOD * 40,
        "broken.jsonl": GOOD * 2 + '{"prompt": "Why?"\n',
        "unknown.jsonl": '{"frage": "Warum?", "antwort": "Darum."}\n',
        "broken.jinja": "{% for m in messages %}{{ m.role ",
        "hello.jinja": "hello",
        "huge/config.json": change(
            TINY / "config.json", hidden_size=1 << 17, intermediate_size=1 << 20
        ),
        "no window/config.json": change(WINDOW, sliding_window=0),
        "trained/config.json": json.dumps(WINDOW),
        "one block/config.json": json.dumps(one_block),
        "odd/config.json": change(ROOT / "models/qwen3-moe-tiny/config.json", num_experts=3),
        "mrope/config.json": change(one_block, rope_scaling=mrope),
        "earlier run/metrics.jsonl": "precious",
        "finished run/config.json": '{"lr": 1}',
        "finished run/cmd.sh": "",
        "damaged/checkpoints/step_00000001/manifest.json": '{"files": {}}',
        "gpt2/config.json": '{"model_type": "gpt2"}',
        "adapter/adapter_config.json": json.dumps(ADAPTER),
        "deepspeed/latest": "global_step10",
        "deepspeed/global_step10/mp_rank_00_model_states.pt": "",
        "deepspeed/config.json": json.dumps(one_block),  # of transformers' Trainer
        "layers/layer_00-model_states.pt": "",
    }
    for family in EXPERTS:
        more = {"model_type": family, "first_k_dense_replace": 1}
        if family == "gemma4_text":
            more |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
            more |= {"moe_intermediate_size": 32, "hidden_size_per_layer_input": 0}
        files[f"{family}/config.json"] = change(experts, **more)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("no model", "earlier run/checkpoints", "finished run/checkpoints",
                 "piped/checkpoints/step_00000001"):  # fmt: skip
        (folder / name).mkdir(parents=True)
    for name in ("pipe", "piped/config.json", "piped/checkpoints/step_00000001/manifest.json"):
        os.mkfifo(folder / name)  # who opens it waits without end
    save_file({"weight": torch.zeros(1)}, folder / "trained/model.safetensors")
    save_file({HEAD: torch.zeros(4, 512)}, folder / "adapter/adapter_model.safetensors")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "one block"))
    model.lm_head.weight.data[-1, -1] = math.nan
    model.save_pretrained(folder / "not finite")
    in_fp8 = {DOWN: torch.zeros(192, 512).to(torch.float8_e4m3fn)}
    odd = {f"{DOWN}_scale_inv": torch.ones(2, 3)}
    for name, more in (("no scales", {}), ("odd scales", odd)):
        shutil.copytree(folder / "one block", folder / name)
        save_file(in_fp8 | more, folder / name / "model.safetensors")
    return folder


def nothing_is_lost(folder):
    assert not (folder / "new").exists()
    assert (folder / "earlier run/metrics.jsonl").read_text() == "precious"
    assert (folder / "good.jsonl").read_text() == GOOD * 40


MODEL = "--model_name_or_path"
TOKENIZER = f"--tokenizer_name_or_path {shlex.quote(str(TINY))}"
SHORT = f"{TOKENIZER} --seq_len 64"
NO_DATA = "--train_json absent.jsonl"  # for what is refused before data is read
ONE_BLOCK = f"{MODEL} 'one block' {SHORT}"
QWEN, DEEPSEEK = (f"{MODEL} {name} {SHORT}" for name in ("qwen3_moe", "deepseek_v3"))
WITH_EXPERTS = f"{MODEL} {shlex.quote(str(ROOT / 'models/qwen3-moe-tiny'))} {NO_DATA}"
OFFLOAD = f"--deepspeed_config {shlex.quote(str(ROOT / 'zero/ds_zero3_offload.json'))}"


def test_bad_input_of_two_processes(folder, record_property):
    """Through the launcher: one line and an exit code."""
    record_property("bad inputs", 1)
    flags = f"--train_json broken.jsonl --output_dir new {ONE_BLOCK}"
    env = {"PYTHON": sys.executable, "MAX_STEPS": "2", "NPROC_PER_NODE": "2"}
    started = time.monotonic()
    done = run(["bash", LAUNCHERS["fsdp"], *shlex.split(flags)], cwd=folder, **env)
    assert time.monotonic() - started < 60  # start-up included, on a busy machine
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert re.search("broken.jsonl:3.*broken JSON", error)
    assert "Traceback" not in done.stderr + done.stdout and "step 1/" not in done.stdout
    assert done.returncode == 2
    nothing_is_lost(folder)


# The same scripts' main(), in this process: a launch takes 5 s. (scripts, flags, what is said)
# test_flags.py and test_bad_numbers.py have what is refused as it is parsed.
OTHERS = "pp zero fsdp_pp"
ALL = f"fsdp {OTHERS}"
LONG = "n" * 300  # longer than a file name can be
STEP = "checkpoints/step_00000001"
DEEPSPEEDS = "deepspeed", "deepspeed/global_step10", "layers"  # of ZeRO, of a pipeline
BAD = [
    # a model, files, folders
    (ALL, f"{MODEL} gpt2", "gpt2 has no test of its own"),
    ("fsdp", f"{MODEL} nobody/nothing", "no model at nobody/nothing"),
    ("fsdp", f"{MODEL} trained --seq_len 100000", "--seq_len 100000.*positions up to 2048"),
    ("fsdp", f"{MODEL} 'finished run'", "finished run is the folder of a run, not a model"),
    ("fsdp", f"{MODEL} pipe", "no model at pipe"),
    ("pp", f"{MODEL} ./{LONG}", "n/cmd.sh: File name too long"),
    ("fsdp pp", f"{MODEL} 'no window' {SHORT}", "sliding_window 0 is not a positive number"),
    (ALL, f"{MODEL} 'not finite' {SHORT} --dry_run", "not finite: lm_head.weight is not finite"),
    ("fsdp", f"{MODEL} 'no scales' {SHORT} {NO_DATA}",
     f"no scales: {DOWN} is in fp8, but {DOWN}_scale_inv is missing"),
    ("pp", f"{MODEL} 'odd scales' {SHORT} {NO_DATA}",
     rf"{DOWN}_scale_inv has shape \[2, 3\], but {DOWN} of shape .* scales of shape \[2, 4\]"),
    ("zero", f"{MODEL} huge {TOKENIZER}",
     r"this node needs \d+\.\d GiB while a checkpoint is saved or read, and \d+\.\d GiB"),
    ("zero", f"{MODEL} huge {TOKENIZER} --no_save {OFFLOAD}",
     r"this node needs \d+\.\d GiB for what is offloaded, and"),
    ("fsdp", "--tokenizer_name_or_path gpt2", "no tokenizer in gpt2"),
    ("fsdp", "--chat_template broken.jinja", "--chat_template broken.jinja: line 1: "),
    ("pp", "--chat_template hello.jinja", "hello.jinja: not a chat template"),
    ("fsdp", "--chat_template pipe", "pipe is not a regular file"),
    ("fsdp", "--output_dir 'earlier run' --overwrite", "earlier run is not a run's folder"),
    (ALL, "--output_dir good.jsonl", "good.jsonl is a file"),
    ("fsdp", "--output_dir /proc/x", "/proc/x: can't write to /proc"),
    ("fsdp", "--output_dir bad\udcff", r"'bad\\udcff' is not UTF-8: give it another name"),
    ("fsdp", f"--output_dir {LONG}", "n: File name too long"),
    (ALL, f"--resume 'earlier run' {NO_DATA}", "earlier run: it has no intact checkpoint"),
    *((kind, f"{flag} '{name}' {NO_DATA}", f"{name} is a checkpoint in DeepSpeed's own format")
      for kind in ALL.split() for flag in (MODEL, "--resume") for name in DEEPSPEEDS),
    (ALL, f"--resume damaged/{STEP} {NO_DATA}", f"{STEP}: manifest.json does not list .metadata"),
    ("fsdp", f"--resume piped {NO_DATA}", "piped/config.json is not a regular file"),
    ("fsdp", f"--resume piped/{STEP} {NO_DATA}", "is not a regular file"),
    ("zero", f"--resume {LONG} {NO_DATA}", "n/config.json: File name too long"),
    # data
    *(("fsdp", f"--train_json {name}", said) for name, (_, said) in BAD_DATA.items()),
    ("fsdp", "--train_json *.txt", "no data file to train on in"),
    ("fsdp", "--train_json 'no model'", "no data file to train on in no model"),
    ("fsdp", "--train_json pipe", "no such data file: pipe"),
    ("fsdp", "--eval_json openai/gsm8k", "openai/gsm8k: name the split"),
    ("fsdp", "--data_format messages", "good.jsonl:1.*messages"),
    ("fsdp", "--train_json good.jsonl*0", "good.jsonl.0: a weight must be a number above 0"),
    # numbers and choices
    (ALL, "--max_steps 100000000", "--max_steps 100000000: must be at most 99,999,999"),
    ("pp", "--device_memory_gb 30", "--device_memory_gb limits GPU memory"),
    ("zero", "--length_warmup 2",
     "--length_warmup 2 is longer than the run's 1 step of 1 row: give at most 1"),
    # pipelines
    ("pp fsdp_pp", f"--partition 2,4 {NO_DATA}", "--partition 2,4: give 1 counts"),
    ("pp fsdp_pp", f"--partition 7 {NO_DATA}", "--partition 7: give 1 counts.*a sum of 6"),
    ("fsdp_pp", "--stages 2", "1 process can't form pipelines of 2 --stages"),
    # DeepSpeed's switches
    *((kinds, f"--deepspeed_config ds{i}.json", said.replace("FILE", f"ds{i}.json"))
      for i, (kinds, _, said) in enumerate(SWITCHES)),
    ("pp zero", "--deepspeed_config pipe", "pipe is not a regular file"),
    # FSDP
    ("fsdp", "--replicas 3", "--replicas 3 does not divide 1, the processes"),
    ("fsdp", f"--psgd_rank 4 --replicas all {WITH_EXPERTS}",
     "--psgd_rank does not work with a mixture of experts"),
    ("fsdp", "--adapter trained", "--adapter trained: a folder without adapter_config.json"),
    ("fsdp", "--adapter adapter --lora_rank 8", "--lora_rank 8 contradicts --adapter adapter"),
    ("fsdp", "--adapter adapter --optimizer_on_host", "--lora_rank does not work with --optimizer"),
    ("fsdp", f"--adapter adapter {NO_DATA}", "'lm_head' can't be adapted in this model"),
    ("fsdp", f"{MODEL} adapter", "adapter holds an adapter, not a model: .* --adapter adapter$"),
    ("fsdp", "--lora_rank 4 --lora_targets=",
     "can't be adapted in this model; choose from q_proj, k_p"),
    ("fsdp", "--lora_rank 4 --lora_targets q_proj,gate",
     "'gate' can't be adapted in this model; choose from q_proj, "),
    # experts
    *(("pp zero", f"{MODEL} {family} {SHORT} {NO_DATA}",
       f"{family}: only fsdp/train_fsdp.py and fsdp_pp/train_fsdp_pp.py train models with")
      for family in EXPERTS),
    ("fsdp fsdp_pp", "--freeze_router", "--freeze_router: this model has no experts"),
    ("fsdp", "--router_aux_loss 0.1", "--router_aux_loss: this model has no experts"),
    ("fsdp", f"{QWEN} --router_bias_update 0.1", "qwen3_moe has no bias for its experts"),
    ("fsdp", f"{DEEPSEEK} --router_aux_loss 0.1", "deepseek_v3 balances its load by"),
    ("fsdp", f"{QWEN} --lora_rank 4 --lora_targets gate_proj",
     "choose from q_proj, k_proj, v_proj, o_proj"),
]  # fmt: skip
CASES = [(kind, flags, message) for kinds, flags, message in BAD for kind in kinds.split()]


@pytest.mark.parametrize("kind, flags, message", CASES)
def test_bad_input_of_one_process(kind, flags, message, folder, monkeypatch, record_property):
    record_property("bad inputs", 1)
    script = script_of(kind)
    defaults = "--train_json good.jsonl --output_dir new --max_steps 1".split()
    defaults += ["--stages", "1"] * (kind in ("pp", "fsdp_pp"))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refused(message):
        run_alone(monkeypatch, script, *defaults, *shlex.split(flags))
    nothing_is_lost(folder)


@pytest.mark.parametrize("model, flag, message", [
    ("gpt2", "", "gpt2 has no test of its own"),
    ("mrope", "", "mrope/config.json: the rotary type mrope is not one of default,"),
    ("trained", "--seq_len=4096", "--seq_len 4096: trained has positions up to 2048"),
    ("window", "--ckpt=1", "unrecognized arguments: --ckpt=1"),
    ("window", "--memory=", "--memory: : must be a number"),
])  # fmt: skip
def test_bad_input_of_fit(model, flag, message, folder, monkeypatch, record_property):
    record_property("bad inputs", 1)
    monkeypatch.chdir(folder)
    flags = ["--cards=2", "--memory=32", "--tokens_a_step=65536", *flag.split()]
    with refused(re.escape(message)):
        fit.main([model, *flags])


def test_a_dying_rank_takes_all_along(folder, kind="fsdp"):
    mark = f"{folder} {kind}"
    env = environment(PYTHON=python(), MAX_STEPS="5000", NPROC_PER_NODE="2", A_TEST=mark)
    env |= {"SEQ_LEN": "32", "MICRO_BATCH_SIZE": "1", "EVAL_JSON": "none", "LOG_EVERY": "1"}
    env |= {"MODEL": smaller_model(folder / f"tiny {kind}")}
    launcher = subprocess.Popen(
        ["bash", LAUNCHERS[kind], "--train_json", "good.jsonl", "--output_dir", f"dies {kind}"],
        cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
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
    assert len(logged(folder / f"dies {kind}")) >= 3


ENVIRONMENT = [
    ({"RANK": "x"}, "RANK=x: must be a whole number"),
    ({"RANK": "5"}, "RANK=5: must be at most 0"),
    ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE=2 needs MASTER_ADDR: start it by its launcher"),
    ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: must be at most 65,?535"),
    ({"GLOO_SOCKET_IFNAME": "nope0"}, "GLOO_SOCKET_IFNAME in the environment: .*for: nope0"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would take the first GPU")
@pytest.mark.parametrize("environ, message", ENVIRONMENT)
def test_an_environment_without_a_group_is_one_line(environ, message, monkeypatch, record_property):
    record_property("bad inputs", 1)
    for name in ALONE:
        monkeypatch.setenv(name, "")  # what the call sets is gone afterwards
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with refused(message):
        start()


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would take the first GPU")
def test_a_port_in_use_is_one_line(ended, monkeypatch, capsys, record_property):
    record_property("bad inputs", 1)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        place = ALONE | {"WORLD_SIZE": 2, "MASTER_PORT": busy.getsockname()[1]}
        for name, value in place.items():
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
