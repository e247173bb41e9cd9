"""Runs LowRank on made-up gradients in fp64, in processes started by torchrun, and saves what comes
out: lowrank_worker.py CASES SHARDS. SHARDS: into how many parts each replica is sharded."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp import powersgd as lowrank
from fsdp.powersgd import LowRank
from llm_demo.core.mesh import REPLICA, SHARD
from llm_demo.core.optim import FACTOR

SHAPES = {"a": (40, 30), "b": (40, 30), "wide": (24, 64), "bias": (30,), "small": (4, 5)}
R = 3
if __name__ == "__main__":
    # so that matrices of one shape are in several groups, and sums in several buckets
    lowrank.TOGETHER, lowrank.SUMMED_AT_ONCE = 1300, 50


def gradient(name: str, step: int) -> torch.Tensor:
    """The sum over replicas: it changes slowly, as gradients do."""
    shape = SHAPES[name]
    make = torch.Generator().manual_seed(sorted(SHAPES).index(name))
    still = torch.randn(shape, generator=make, dtype=torch.float64)
    make.manual_seed(100 * step + sorted(SHAPES).index(name))
    return still + 0.3 * torch.randn(shape, generator=make, dtype=torch.float64)


def shares(name: str, step: int, case: dict) -> list[torch.Tensor]:
    """This rank's share, in parts that differ in size."""
    world, rank = GRID[REPLICA].size(), GRID[REPLICA].get_local_rank()
    total = gradient(name, step)
    if name == "b" and step < case.get("zero", 0):
        total = torch.zeros_like(total)
    if name == "a" and case.get("thin"):
        u, s, v = torch.linalg.svd(total, full_matrices=False)
        total = u[:, :R] * s[:R] @ v[:R]
    weight = (rank + 1) / sum(range(1, world + 1))
    mine = total * weight
    if step == case.get("bad") and rank == world - 1 and name == case["where"]:
        mine.view(-1)[0] = torch.inf
    return mine.chunk(SHARDS)[GRID[SHARD].get_local_rank()].clone()


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if SHARDS > 1 else t


def run(case: dict) -> dict:
    params = []
    for name, shape in SHAPES.items():
        param = torch.zeros(shape, dtype=torch.float64)
        if SHARDS > 1:
            param = distribute_tensor(param, GRID[SHARD], [Shard(0)])
        params.append(torch.nn.Parameter(param))
        params[-1].hf_name = name
    first = case.get("first", 0)
    made = LowRank(params, R, case.get("start", 0), GRID, first, torch.float64)
    if "load" in case:
        state = made.state()
        for name, t in torch.load(case["load"])["state"].items():
            state[name].copy_(t)
        if "dead" in case:  # as checkpoints were once written after a zero gradient
            state[f"b.{FACTOR}"][:, case["dead"] :] = 0
    sums = []
    for step in range(first, case["steps"]):
        if step == case.get("without"):
            continue
        grads = [shares(name, step, case) for name in SHAPES]
        made.reduce(grads)
        sums.append([t.clone() for t in grads])
    made.sum_errors()
    state = {name: whole(t).clone() for name, t in made.state().items()}
    return {"sums": sums, "state": state, "says": made.describe()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    SHARDS = int(sys.argv[2])
    grid = dist.get_world_size() // SHARDS, SHARDS
    GRID = init_device_mesh("cpu", grid, mesh_dim_names=(REPLICA, SHARD))
    for case in json.load(open(sys.argv[1])):
        torch.save(run(case), f"{case['out']}.{dist.get_rank()}")
    dist.destroy_process_group()
