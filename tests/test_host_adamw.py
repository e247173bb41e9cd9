"""AdamW on the host: the same numbers as on the device to the bit, memory checks, NUMA nodes."""

import json
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, smaller_model, torchrun

from bench.checkpoints import tensors
from fsdp import host_adamw
from llm_demo import device
from llm_demo.device import World
from llm_demo.errors import UserError

CPU = World(0, 2, 0, torch.device("cpu"))


def test_bit_equal_to_the_device_where_sums_are_the_same(tmp_path):
    """Without accumulation, both add the same numbers in the same order. Units of one block, so
    that a unit's forward starts while others are updated; slices smaller than a parameter."""
    model = smaller_model(tmp_path / "model")
    flags = [
        "--model_name_or_path", model, "--seq_len", 32, "--micro_batch_size", 2, "--max_steps", 4,
        "--warmup_steps", 1, "--train_json", ROOT / "data/sft_en.jsonl", "--sample_tokens", 0,
        "--eval_json", "none", "--lr", "1e-3", "--blocks_per_unit", 1, "--weight_decay", 0.3,
    ]  # fmt: skip
    cases = [
        {"argv": [*map(str, flags), "--output_dir", str(tmp_path / name), *more], "quiet": True}
        for dtype in ("fp32", "bf16")
        for name, more in (
            (f"device-{dtype}", ["--dtype", dtype]),
            (f"host-{dtype}", ["--dtype", dtype, "--optimizer_on_host"]),
        )
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    torchrun(2, ROOT / "tests/parity_worker.py", "fsdp", tmp_path / "cases.json")
    for dtype in ("fp32", "bf16"):
        a, b = (tmp_path / f"{where}-{dtype}" for where in ("device", "host"))
        losses = [
            [json.loads(line).get("train/loss") for line in open(run / "metrics.jsonl")]
            for run in (a, b)
        ]
        assert losses[0] == losses[1], dtype
        last = "checkpoints/step_00000004"
        one, other = tensors(a / last), tensors(b / last)
        assert all(torch.equal(t, other[name]) for name, t in one.items()), dtype


def unit(sizes, ranks=1):
    """A Unit as of parameters of these shapes, without a process group."""
    made = object.__new__(host_adamw.Unit)
    made.locals = [torch.zeros(shape) for shape in sizes]
    made.masters = [torch.nn.Parameter(torch.zeros(shape)) for shape in sizes]
    counts = [t.numel() for t in made.locals]
    made.starts = [sum(counts[:i]) for i in range(len(counts))]
    made.sum = torch.arange(float(sum(counts)))
    return made


def test_slices_cover_each_element_once(monkeypatch):
    monkeypatch.setattr(host_adamw, "SLICE", 10)
    made = unit([(3, 4), (2,), (5, 5), (0, 3)])
    group = {"weight_decay": 0.0}
    state = {p: {n: torch.zeros_like(p) for n in host_adamw.MOMENTS} for p in made.masters}
    slices = made.slices(state, dict.fromkeys(made.masters, group))
    assert max(cut.grads.numel() for cut in slices) <= 10
    for cut in slices:
        for part in cut.parts:
            part.master.add_(cut.grads[part.start :][: part.master.numel()])
            part.weights.add_(1)
            for moment in part.moments:
                moment += 1
    assert torch.equal(torch.cat([m.detach().flatten() for m in made.masters]), made.sum)
    assert all((t == 1).all() for t in made.locals)
    assert all((t == 1).all() for views in state.values() for t in views.values())


def sharded(elements):
    shard = SimpleNamespace(numel=lambda: elements)
    return SimpleNamespace(parameters=lambda: [SimpleNamespace(to_local=lambda: shard)])


def test_too_little_host_memory(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    free = SimpleNamespace(available=20 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(UserError, match=r"needs 24\.0 GB of host memory .* 20\.0 GB are free"):
        host_adamw.prepare_host(sharded(2**30), CPU)
    said = host_adamw.prepare_host(sharded(2**29), CPU)
    assert said == "optimizer on the host: 12.0 GB of 20.0 GB free"


def test_a_process_stays_on_its_gpus_node(monkeypatch, tmp_path):
    pci = tmp_path / "bus/pci/devices/0000:4f:00.0"
    node = tmp_path / "devices/system/node/node1"
    pci.mkdir(parents=True)
    node.mkdir(parents=True)
    (pci / "numa_node").write_text("1\n")
    (node / "cpulist").write_text("2-4,9\n")
    props = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x4F, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: props)
    gpu = torch.device("cuda", 0)
    assert device.cores_near(gpu, tmp_path) == [2, 3, 4, 9]
    assert device.cores_near(torch.device("cpu"), tmp_path) == []
    (pci / "numa_node").write_text("-1\n")  # one node only
    assert device.cores_near(gpu, tmp_path) == []
    monkeypatch.setattr(host_adamw, "cores_near", lambda d: [2, 3, 4, 9])
    monkeypatch.setattr(host_adamw, "usable_cores", lambda: [0, 1, 2, 3])
    bound = []
    monkeypatch.setattr(host_adamw.os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    said = host_adamw.prepare_host(sharded(1), CPU)
    assert bound == [{2, 3}] and said.endswith("2 cores of the GPU's NUMA node")


def test_a_limit_on_device_memory(monkeypatch):
    with pytest.raises(UserError, match="there is no GPU"):
        device.limit_memory(torch.device("cpu"), 30)
    props, limits = SimpleNamespace(total_memory=40 * 2**30), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: props)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda f, d: limits.append(f)
    )
    with pytest.raises(UserError, match="--device_memory_gb 41: the GPU has 40.0 GB"):
        device.limit_memory(torch.device("cuda", 0), 41)
    device.limit_memory(torch.device("cuda", 0), 30)
    assert limits == [0.75]
