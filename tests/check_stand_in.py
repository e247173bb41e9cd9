"""Stands in for the experiments of llm_demo.check on a faked machine: $SCENARIO says what they
answer, by the name of the task.

"faults" maps a group as "(0, 1)", or a task as "rates cuda:3", to hang, die,
raise, wrong or a number of GB/s or TFLOP/s; "faults without p2p" does so for NCCL_P2P_DISABLE=1."""

import functools
import json
import os
import signal
import sys
import time

from llm_demo.check.processes import serve

scenario = json.loads(os.environ["SCENARIO"])
without = os.environ.get("NCCL_P2P_DISABLE") == "1"
faults = scenario.get("faults without p2p" if without else "faults", {})


def fail(fault):
    if fault == "hang":
        time.sleep(600)
    if fault == "die":
        print("a library's last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "raise":
        raise RuntimeError("CUDA error: Xid 79")


def group(device, members, rank, meeting, limit):
    fault = faults.get(str(tuple(members)))
    fail(fault)
    wrong = {"send": 0, "all_reduce": 60 * (fault == "wrong")}
    rate = fault if isinstance(fault, int) else 20 if without else scenario.get("rate", 390)
    latency = {"latency_us": 9.0} if len(members) == 2 else {}
    return {"wrong": wrong, "elements": 1000, "all_reduce": rate} | latency


def rates(device):
    fault = faults.get(f"rates {device}")
    fail(fault)
    return scenario.get("rates") or {"rates": {"fp16": 790, "bf16": fault or 790, "fp32": 52}}


def answer(task, **_):
    fail(faults.get(task))
    # what a process sees of the GPUs shows whether some were hidden from it
    return scenario[task] | {"visible": os.environ.get("CUDA_VISIBLE_DEVICES")}


if __name__ == "__main__":
    others = ("torch_facts", "choices", "kernels")
    serve({"group": group, "rates": rates} | {t: functools.partial(answer, t) for t in others})
