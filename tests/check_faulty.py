"""The experiments of llm_demo.check with a fault of the machine in the second process of a pair:
$FAULT is send or all_reduce, which then get values of one call wrong, die, or hang."""

import os
import signal
import time

import torch
import torch.distributed as dist

from llm_demo.check import experiments
from llm_demo.check.processes import serve

FAULT = os.environ["FAULT"]
calls = []


def faulty(name, real):
    def operation(tensor, *args, **more):
        if dist.get_rank() == 1 and tensor.dtype == torch.int32:
            calls.append(name)
            if FAULT == "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            if FAULT == "hang":
                time.sleep(600)
        wrong = FAULT == name and calls.count(name) == 4
        if wrong and name == "send":
            tensor = tensor + 1
        real(tensor, *args, **more)
        if wrong and name == "all_reduce":
            tensor[-1] += 1

    return operation


if __name__ == "__main__":
    dist.send, dist.all_reduce = faulty("send", dist.send), faulty("all_reduce", dist.all_reduce)
    serve(experiments.TASKS)
