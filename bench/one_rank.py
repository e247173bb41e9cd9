"""fsdp/train_fsdp.py as one rank of many, alone on one GPU, for its memory and its compute.

python bench/one_rank.py RANKS FLAGS... bench.run starts it for rows with --one_of RANKS.

PyTorch's fake process group stands in for the other ranks. A collective returns at once, with this
rank's own data in place of theirs. So losses mean nothing, and a step takes as long as it would if
all communication were hidden and cost nothing. Units are gathered as by NCCL, not by copy engines.
"""

import copy
import os
import sys

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp import train_fsdp
from llm_demo.machine.dist import run


def pretend(ranks: int) -> None:
    """Make this process the first of `ranks` ranks on one node, to torch.distributed."""
    size = str(ranks)
    os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, RANK="0", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # no other rank is asked
    real_start, real_group = dist.init_process_group, dist.new_group

    def start(*unused, **also_unused):
        real_start("fake", store=FakeStore(), rank=0, world_size=ranks)

    def new_group(*args, **kwargs):
        return real_group(*args, **{**kwargs, "backend": "fake"})

    def gather_objects(out, value, group=None):
        out[:] = [copy.deepcopy(value) for _ in out]

    def gather(output, input, group=None, async_op=False):
        for part in output.view(-1, input.numel()):
            if part.data_ptr() != input.data_ptr():
                part.copy_(input.flatten())

    def exchange(output, input, *sizes, group=None, async_op=False):
        output.copy_(input)

    def reduce(output, input, op=None, group=None, async_op=False):
        output.copy_(input.flatten()[: output.numel()].view(output.shape))

    dist.init_process_group, dist.new_group = start, new_group
    dist.all_gather_object = gather_objects
    dist.broadcast_object_list = lambda *unused, **also_unused: None
    dist.all_to_all_single = exchange
    for kind, function in (("all_gather", gather), ("reduce_scatter", reduce)):
        for name in (f"{kind}_single", f"{kind}_tensor", f"{kind}_into_tensor"):
            if hasattr(dist, name):
                setattr(dist, name, function)


if __name__ == "__main__":
    pretend(int(sys.argv.pop(1)))
    run(train_fsdp.main, train_fsdp.parse, train_fsdp.less_memory)
