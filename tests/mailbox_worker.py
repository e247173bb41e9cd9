"""fsdp_pp/train_fsdp_pp.py on CPUs that stand in for the GPUs of one node: each process can write
into the others' memory, and a copy or a wait for a signal ends before the host goes on.

mailbox_worker.py FOLDER FLAGS..."""

import contextlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from fsdp import copy_engines
from fsdp_pp import train_fsdp_pp, transfers
from llm_demo.machine.dist import run

FOLDER = Path(sys.argv.pop(1))


def mapped(name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    """(n,) in a file that all processes map."""
    return torch.from_file(str(FOLDER / name), shared=True, size=n, dtype=dtype)


class Handle:
    """Of symmetric memory: a pad per rank, in which each channel has a place per source."""

    def __init__(self):
        self.rank, size = dist.get_rank(), dist.get_world_size()
        self.pads = [
            mapped(f"pad{r}", 128 * size, torch.int32).view(128, size) for r in range(size)
        ]

    def put_signal(self, to: int, channel: int, limit: int) -> None:
        self._turn(self.pads[to], (channel, self.rank), 0)

    def wait_signal(self, source: int, channel: int, limit: int) -> None:
        self._turn(self.pads[self.rank], (channel, source), 1)

    def _turn(self, pad: torch.Tensor, place: tuple, old: int) -> None:
        end = time.monotonic() + 60
        while pad[place].item() != old:
            assert time.monotonic() < end, ("no signal", self.rank, place)
            time.sleep(0)
        pad[place] = 1 - old


def shared_empty(n: int, dtype: torch.dtype, device: torch.device, group) -> torch.Tensor:
    memory = mapped(f"memory{dist.get_rank()}", n, dtype)
    segment = SimpleNamespace(
        handle=Handle(), of=lambda rank, n, dtype: mapped(f"memory{rank}", n, dtype)
    )
    copy_engines.by_address[memory.data_ptr()] = segment
    dist.barrier()
    return memory


copy_engines.shared_empty = shared_empty
copy_engines.cannot = lambda world, group: None
stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: None)
torch.cuda.Stream = torch.cuda.current_stream = lambda *device: stream
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.Tensor.record_stream = lambda t, stream: None
transfers.small_group = lambda *unused: (_ for _ in ()).throw(AssertionError("not by gloo"))

if __name__ == "__main__":
    run(train_fsdp_pp.main, train_fsdp_pp.parse)
