"""AdamW on the host: the same numbers as on the device to the bit, memory checks, NUMA nodes."""

import os
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, args_with, assert_same_tensors, logged, smaller_model, train_cases
from torch.utils.checkpoint import checkpoint

from fsdp import host_adamw
from fsdp.host_adamw import plain_units
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.machine import device, process

CPU = World(0, 4, 0, torch.device("cpu"))


def test_bit_equal_to_the_device_where_sums_are_the_same(tmp_path):
    """Without accumulation, both add the same numbers in the same order. Units of one block, so
    that a unit's forward starts while others are updated; slices smaller than a parameter; numbers
    of rows that two ranks can't share evenly."""
    model = smaller_model(tmp_path / "model", intermediate_size=97, vocab_size=513)
    flags = [
        "--model_name_or_path", model, "--seq_len", 32, "--micro_batch_size", 2, "--max_steps", 4,
        "--warmup_steps", 1, "--train_json", ROOT / "data/sft_en.jsonl", "--sample_tokens", 0,
        "--eval_json", "none", "--lr", "1e-3", "--blocks_per_unit", 1, "--weight_decay", 0.3,
    ]  # fmt: skip
    cases = {
        f"{where}-{dtype}-{states}": [*flags, "--dtype", dtype, "--optim_state", states, *more]
        for dtype, states in (("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16"))
        for where, more in (("device", []), ("host", ["--optimizer_on_host"]))
    }
    train_cases(tmp_path, "fsdp", 2, cases)
    for name in ("fp32-fp32", "bf16-fp32", "fp32-bf16"):
        runs = [tmp_path / f"{where}-{name}" for where in ("device", "host")]
        losses = [[record["train/loss"] for record in logged(run)] for run in runs]
        assert losses[0] == losses[1] and len(losses[0]) == 4, name
        assert_same_tensors(*(run / "checkpoints/step_00000004" for run in runs))


def test_an_untied_head_resharded_over_micro_batches_and_evaluations(tmp_path):
    """Embedding and head share a buffer there. On the device sums are formed in another order, so
    losses may differ by roundings of bf16."""
    model = smaller_model(tmp_path / "model", tie_word_embeddings=False)
    data, heldout = ROOT / "data/sft_en.jsonl", tmp_path / "heldout.jsonl"
    heldout.write_text("".join(data.read_text().splitlines(True)[:4]))
    flags = [
        "--model_name_or_path", model, "--seq_len", 32, "--micro_batch_size", 1, "--max_steps", 4,
        "--warmup_steps", 1, "--train_json", data, "--sample_tokens", 0, "--lr", "1e-3",
        "--eval_json", heldout, "--eval_every", 1, "--grad_accum_steps", 3, "--dtype", "bf16",
        "--reshard_after_forward", "--no_save",
    ]  # fmt: skip
    train_cases(tmp_path, "fsdp", 2, {"device": flags, "host": [*flags, "--optimizer_on_host"]})
    one, other = (logged(tmp_path / name, "step") for name in ("device", "host"))
    assert len(one) == len(other) == 9  # 4 steps, 5 evaluations
    for a, b in zip(one, other, strict=True):
        for key in {"train/loss", "train/grad_norm", "eval/loss"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=3e-3), (a["step"], key)


def test_a_unit_adds_its_gradients_once_they_have_formed():
    """In one process: of one unit at a time, but for one with a parameter that gets none. A tied
    head, recomputed activations, a frozen parameter; the same sums as of whole micro-batches."""
    nn = torch.nn
    torch.manual_seed(0)
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(4)]
    blocks[1].unused = nn.Parameter(torch.ones(2))
    blocks[2][0].bias.requires_grad_(False)
    tail = nn.Sequential(nn.LayerNorm(4), head)
    for module in (embedding, *blocks, tail):
        module.bfloat16()
    units = plain_units(SimpleNamespace(embed_tokens=embedding, units=blocks, tail=tail), False)
    trained = [p for unit in units for p in unit.params if p.requires_grad]
    held, sums = [], [torch.zeros(p.shape) for p in trained]

    def loss(ids):
        hidden = embedding(ids)
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return tail(hidden).float().square().sum()

    for unit in units:
        unit.allocate()
        for p in unit.params:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(
                    lambda _: held.append(
                        [any(p.grad is not None for p in u.params) for u in units]
                    )
                )
    for ids in torch.randint(7, (3, 5)):
        grads = torch.autograd.grad(loss(ids), trained, allow_unused=True)
        for total, grad in zip(sums, grads, strict=True):
            total.add_(0 if grad is None else grad)
        loss(ids).backward()
        assert units[2].params[-1].grad is not None  # waits for `unused`
        for unit in units:
            unit.take_grads()
    assert len(held) == 3 * (len(trained) - 1)
    assert all(sum(of) - of[2] <= 1 for of in held)
    sums_of = {p: grad for unit in units for p, grad in zip(unit.params, unit.grads, strict=True)}
    assert all(torch.equal(sums_of[p], total) for p, total in zip(trained, sums, strict=True))
    assert not sums_of[blocks[2][0].bias].any()


def sharded(elements):
    return SimpleNamespace(parameters=lambda: [torch.empty(elements, device="meta")])


def test_too_little_host_memory(monkeypatch):
    """Of a node with two of four ranks. Moments in bf16 take 4 bytes less a parameter."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    free = SimpleNamespace(available=2**29)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(UserError, match=r"needs 0\.8 GiB of host memory .* 0\.5 GiB are free"):
        host_adamw.prepare_host(args_with(), sharded(2**25), CPU)
    for state, gb in (("fp32", 0.4), ("bf16", 0.2)):
        said = host_adamw.prepare_host(args_with(optim_state=state), sharded(2**24), CPU)
        assert said == f"optimizer on the host: {gb} GiB of 0.5 GiB free"


GROUPS = {
    "v2": ("0::/job/step", "", "memory.max", "memory.current", ""),
    "v1": (
        "4:memory:/job/step", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_",
    ),
}  # fmt: skip


@pytest.mark.parametrize("line, top, limit, taken, total", GROUPS.values(), ids=GROUPS)
def test_control_groups_limit_host_memory(line, top, limit, taken, total, tmp_path, monkeypatch):
    """The smallest of what the machine and the groups leave; 7 bytes are page cache."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert device.free_host_memory(tmp_path) == 1000  # no /proc
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"5:devices:/\n3:cpu,cpuacct:/job\n{line}\n")
    assert device.free_host_memory(tmp_path) == 1000  # the groups can't be seen
    job = tmp_path / "sys/fs/cgroup" / top / "job"
    for folder, most in ((job / "step", "max"), (job, "500"), (job.parent, "800")):
        folder.mkdir(parents=True, exist_ok=True)
        stat = f"{total}inactive_anon 90\n{total}inactive_file 5\n{total}active_file 2\n"
        (folder / "memory.stat").write_text(f"file 8\n{stat}")
        (folder / limit).write_text(f"{most}\n")
        (folder / taken).write_text("100\n")
    assert device.free_host_memory(tmp_path) == 500 - 100 + 7
    (job.parent / limit).write_text("300\n")
    assert device.free_host_memory(tmp_path) == 300 - 100 + 7
    (job / "step" / limit).write_text("50\n")  # lowered while more was in use
    assert device.free_host_memory(tmp_path) == 0


def test_a_process_stays_on_its_gpus_node(monkeypatch, tmp_path):
    pci = tmp_path / "bus/pci/devices/0000:4f:00.0"
    pci.mkdir(parents=True)
    (pci / "local_cpulist").write_text("2-4,9\n")
    props = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x4F, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: props)
    gpu = torch.device("cuda", 0)
    assert device.cores_near(gpu, tmp_path) == [2, 3, 4, 9]
    assert device.cores_near(torch.device("cpu"), tmp_path) == []
    (pci / "local_cpulist").unlink()
    assert device.cores_near(gpu, tmp_path) == []
    usable = process.usable_cores()
    try:
        said = process.stay_near([10**6, usable[-1]])
        assert process.usable_cores() == usable[-1:]
    finally:
        os.sched_setaffinity(0, usable)
    assert said == ", 1 cores of the GPU's NUMA node"


def test_a_limit_on_device_memory(monkeypatch):
    with pytest.raises(UserError, match="there is no GPU"):
        device.limit_memory(torch.device("cpu"), 30)
    props, limits = SimpleNamespace(total_memory=40 * 2**30), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: props)
    name = "set_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, name, lambda fraction, d: limits.append(fraction))
    with pytest.raises(UserError, match="--device_memory_gb 41: the GPU has 40.0 GiB"):
        device.limit_memory(torch.device("cuda", 0), 41)
    device.limit_memory(torch.device("cuda", 0), 30)
    assert limits == [0.75]
