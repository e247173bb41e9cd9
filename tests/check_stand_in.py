"""Stands in for the workers of llm_demo.check on a faked machine: $SCENARIO says what they answer.

"faults" maps a pair as "0-1", "all", or a command as "gemm cuda:3" to hang, die, raise, wrong or a
bandwidth; "faults without p2p" does so for the processes that have NCCL_P2P_DISABLE=1."""

import json
import os
import signal
import sys
import time

scenario = json.loads(os.environ["SCENARIO"])
off = os.environ.get("NCCL_P2P_DISABLE") == "1"
faults = scenario.get("faults without p2p" if off else "faults", {})
device = ""


def meeting(file, backend):
    return "all" if "gloo" in backend else file.rsplit("/")[-1].split("-", 1)[1]


def group(rank, size, file, backend, limit):
    wrong = {"send": 0, "all_reduce": 0}
    fault = faults.get(meeting(file, backend))
    if fault == "wrong":
        wrong["all_reduce"] = 60
    speed = fault if isinstance(fault, int) else 20 if off else scenario.get("speed", 390)
    latency = {"latency_us": 9.0} if size == 2 else {}
    send = [speed, speed] if size == 2 else []
    return {"wrong": wrong, "elements": 1000, "all_reduce": speed, "send": send} | latency


def answer(do, command):
    global device
    if do == "start":
        device = command["device"]
    key = f"{do} {device or (command.get('args') or [''])[0]}".strip()
    if do == "group":
        key = meeting(command["file"], command["backend"])
    fault = faults.get(key)
    if fault == "hang":
        time.sleep(600)
    if fault == "die":
        print("a library's last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if isinstance(fault, str) and fault.startswith("raise "):
        return {"problem": fault.removeprefix("raise ")}
    if do == "group":
        return group(**command)
    if do == "gemm":
        bf16 = fault or 790
        rates = {"rates": {"bf16": bf16, "fp16": bf16, "fp32": 52}, "subnormals": True}
        return rates | {"products": {"bf16": {"head": [50, 40, 30]}}, **scenario.get("gemm", {})}
    return scenario.get("answers", {}).get(do, {})


for line in sys.stdin:
    command = json.loads(line)
    do = command.pop("do").removeprefix("run_").removesuffix("_facts")
    print(json.dumps(answer(do, command)), flush=True)
