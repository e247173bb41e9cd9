"""AdamW on the host: the same numbers as on the device to the bit, memory checks, NUMA nodes."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, args_with, assert_same_tensors, logged, smaller_model, train_cases

from fsdp import host_adamw
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.machine import device

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
