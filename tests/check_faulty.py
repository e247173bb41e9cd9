"""The experiments of llm_demo.check for a group of three processes, with faults in groups whose
last process does something wrong: $FAULTS maps a group as "(0, 1)" to send, all_reduce or die."""

import json
import os
import signal

import torch
import torch.distributed as dist

from llm_demo.check import experiments
from llm_demo.check.processes import serve

faults, calls, real = json.loads(os.environ["FAULTS"]), [], {}


def off_by_one(name, tensor, *args, **more):
    """The real operation with its last value off by one, in the fourth call with whole numbers."""
    if tensor.dtype == torch.int32:
        calls.append(name)
    wrong = calls.count(name) == 4 and tensor.dtype == torch.int32
    tensor[-1] += wrong and name == "send"
    real[name](tensor, *args, **more)
    tensor[-1] += wrong and name == "all_reduce"


def group(members, rank, **more):
    fault = faults.get(str(tuple(members))) if rank == len(members) - 1 else None
    if fault == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault:
        real[fault] = getattr(dist, fault)
        setattr(dist, fault, lambda *args, **kw: off_by_one(fault, *args, **kw))
    answer = experiments.group(members=members, rank=rank, **more)
    if real:
        setattr(dist, *real.popitem())
    return answer


if __name__ == "__main__":
    serve({"group": group})
