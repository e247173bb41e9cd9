"""What the processes of a group do together: send and reduce numbers, compare and time them."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from llm_demo.job.dist import stay_on_loopback


def group(device: str, index: int, members: list[int], meeting: str, limit: float) -> dict:
    """Form a group of processes through a file beginning with `meeting`; verify and time sends and
    all-reduces. members: the processes, of which this one is `index`.

    Returns "wrong": operation -> wrong elements, "elements": how many were compared, and the rate
    in GB/s (1e9 bytes) over one GPU's link: "all_reduce"; for two processes also "latency_us" of
    one small send. limit: seconds for an operation, after which PyTorch ends the process."""
    rank, size = members.index(index), len(members)
    backend, options = "gloo", {}
    if device != "cpu":
        torch.cuda.set_device(device)
        backend, options = "cpu:gloo,cuda:nccl", {"device_id": torch.device(device)}
    stay_on_loopback()
    meeting = {"init_method": f"file://{meeting}{members}", "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timedelta(seconds=limit), **meeting, **options)
    wrong, elements = _verify(device, rank, size)
    rates = _rates(device, rank, size)
    ranks = [None] * size  # objects use gloo, as in training; when they are there, all are done
    dist.all_gather_object(ranks, rank)
    wrong["all_gather_object"] = int(ranks != list(range(size)))
    dist.destroy_process_group()
    return {"wrong": wrong, "elements": elements, **rates}


def _numbers(device, n, rank, turn):
    """int32 [n] that depend on place, rank and turn, so that stale values are detected."""
    numbers = torch.arange(n, dtype=torch.int32, device=device)
    return numbers.mul_(3).add_(1000 * turn + 7 * rank + 1)


def _verify(device, rank, size):
    """({operation: wrong elements}, elements compared)"""
    wrong, elements, turn = {"send": 0, "all_reduce": 0}, 0, 0
    # NCCL has different protocols for small, medium and large messages.
    sizes = (1 << 8, 1 << 18) if device == "cpu" else (1 << 8, 1 << 18, 1 << 24)
    for n in (n for n in sizes for _ in range(2)):
        turn += 1
        for source in range(2) if size == 2 else ():
            if rank == source:
                dist.send(_numbers(device, n, rank, turn), dst=1 - source)
            else:
                got = torch.full((n,), -1, dtype=torch.int32, device=device)
                dist.recv(got, src=source)
                wrong["send"] += int((got != _numbers(device, n, source, turn)).sum())
                elements += n
        total = _numbers(device, n, rank, turn)
        dist.all_reduce(total)
        expected = sum(_numbers(device, n, r, turn).long() for r in range(size))
        wrong["all_reduce"] += int((total.long() != expected).sum())
        elements += n
    return wrong, elements


def _rates(device, rank, size):
    one = torch.zeros(1, device=device)
    data = torch.zeros((1 if device == "cpu" else 64) << 20, device=device)

    def seconds(run, times):  # PyTorch's timer waits for the device
        return Timer("run()", globals={"run": run}).timeit(times).mean

    def there_and_back():
        for source in range(2):
            (dist.send if rank == source else dist.recv)(one, 1 - rank)

    gb = data.numel() * 4 / 1e9 * 2 * (size - 1) / size
    rates = {"all_reduce": gb / seconds(lambda: dist.all_reduce(data), 6)}
    if size == 2:
        rates["latency_us"] = seconds(there_and_back, 50) / 2 * 1e6
    return rates
