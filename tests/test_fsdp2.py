"""FSDP2 with fewer bytes and copies against FSDP2 as it is: the same numbers."""

import json

import pytest
import torch
from conftest import ROOT, torchrun
from torch.distributed.fsdp import FSDPModule

from bench.checkpoints import tensors
from fsdp import fsdp2

AS_IT_IS = """
import fsdp.train_fsdp as script
script.spare_bytes = lambda *unused: None
script.run(script.main)
"""
STEPS = 4


@pytest.mark.parametrize(
    "processes, dtype, accum", [(1, "bf16", 1), (2, "fp16", 1), (2, "bf16", 2), (3, "bf16", 1)]
)
def test_the_same_numbers_as_fsdp2_as_it_is(processes, dtype, accum, tmp_path):
    """To the bit with up to two ranks; three add up in another order."""
    if 0 < torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    (tmp_path / "as_it_is.py").write_text(AS_IT_IS)
    scripts = {"ours": ROOT / "fsdp/train_fsdp.py", "theirs": tmp_path / "as_it_is.py"}
    losses, norms, kinds, ends = {}, {}, {}, {}
    for name, script in scripts.items():
        torchrun(
            processes, script, "--model_name_or_path", ROOT / "models/qwen3-tiny",
            "--seq_len", 64, "--sample_tokens", 0, "--warmup_steps", 2,
            "--attn_impl", "math",  # the same numbers each time on a GPU, too
            "--max_steps", STEPS, "--dtype", dtype, "--grad_accum_steps", accum,
            "--output_dir", tmp_path / name, "--profile_steps", "3:3",
        )  # fmt: skip
        logged = [json.loads(line) for line in open(tmp_path / name / "metrics.jsonl")]
        losses[name] = [r[key] for r in logged for key in ("train/loss", "eval/loss") if key in r]
        norms[name] = [r["train/grad_norm"] for r in logged if "train/loss" in r]
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        kinds[name] = set(summary["profile"]["ranks"][0]["kinds"])
        ends[name] = tensors(tmp_path / name / f"checkpoints/step_{STEPS:08d}")
    assert len(losses["ours"]) == STEPS + 2 and None not in norms["ours"]
    if processes <= 2:
        assert losses["ours"] == losses["theirs"]
        assert norms["ours"] == norms["theirs"]
        assert all(torch.equal(t, ends["theirs"][name]) for name, t in ends["ours"].items())
    else:
        assert norms["ours"][0] == pytest.approx(norms["theirs"][0], rel=1e-6)
        assert losses["ours"] == pytest.approx(losses["theirs"], rel=1e-4)
    assert "alltoall" not in kinds["theirs"]
    if hasattr(FSDPModule, "set_custom_reduce_scatter"):
        # accumulated gradients are in fp32: bf16 would round them
        assert ("alltoall" in kinds["ours"]) == (accum == 1 and processes > 1)


def test_the_copy_casts_on_this_pytorch(monkeypatch):
    """Else it is slower in silence."""
    for name in ("_get_param_all_gather_inputs", "_get_all_gather_input_metadatas"):
        monkeypatch.setattr(fsdp2.collectives, name, getattr(fsdp2.collectives, name))  # put back
    fsdp2.cast_in_copy()
    assert fsdp2.collectives._get_param_all_gather_inputs.casts_later


@pytest.mark.parametrize("here, world, sends", [(2, 2, True), (2, 4, True), (4, 8, False)])
def test_an_all_to_all_stays_on_the_node_or_has_few_partners(here, world, sends, monkeypatch):
    class Unit(torch.nn.Module):
        def set_custom_reduce_scatter(self, how):
            self.how = how

    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr(fsdp2.dist, "get_world_size", lambda: world)
    monkeypatch.setattr(fsdp2, "FSDPModule", Unit)
    monkeypatch.setattr(fsdp2, "cast_in_copy", lambda: None)
    fsdp2.spare_bytes(unit := Unit(), torch.bfloat16, accumulates=False, compiles=False)
    assert hasattr(unit, "how") == sends
