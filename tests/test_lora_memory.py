"""Adapters: what a run keeps in memory, and its FLOPs."""

from types import SimpleNamespace

import numpy as np
import pytest
import test_parity as parity
import torch
from conftest import ROOT, args_with
from test_estimate import KINDS, mixed, really_kept
from test_lora import lora_of

from fsdp import estimate
from fsdp.pieces import use_pieces
from llm_demo import estimate as memory
from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import Blocks, allocate, skeleton
from llm_demo.core.lora import Lora, apply_lora
from llm_demo.core.loss import SLIM
from llm_demo.estimate import loss_bytes
from llm_demo.model.costs import block_costs, experts_of, flops_of_slot
from llm_demo.model.source import load_config
from llm_demo.run.choices import Compute
from llm_demo.run.plan import Data, Plan


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,down_proj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_with_adapters_keep_what_real_ones_keep(dtype, targets):
    config = mixed(mlp_only_layers=[0, 1, 2])
    lora = Lora(64, 32.0, 0.0, lora_of(parity.MODELS["tied"], targets).targets, 0, {})
    real = really_kept(config, "sdpa", dtype, 1, lora=lora)
    compute = Compute(dtype, "sdpa", compile=False, lora=lora)
    train = SimpleNamespace(seq_len=128, single=True)
    found = memory.saved_bytes(args_with(), config, compute, train)
    assert found[1] == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("kind, targets", [
    ("qwen3_moe", "all-linear"), ("qwen2_moe", "down_proj"), ("deepseek_v3", "o_proj,gate_up_proj"),
])  # fmt: skip
def test_plain_blocks_keep_inputs_of_experts_adapters(kind, targets):
    lora, how = lora_of(KINDS[kind], targets, rank=64), torch.bfloat16
    real = really_kept(KINDS[kind], "sdpa", how, 1, lora=lora)
    compute = Compute(how, "sdpa", compile=False, lora=lora)
    train = SimpleNamespace(seq_len=128, single=True)
    found = memory.saved_bytes(args_with(), KINDS[kind], compute, train)
    assert found[1] == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    "block, targets",
    [
        *((0, targets) for targets in ("all-linear", "q_proj,down_proj")),
        *((1, targets) for targets in ("all-linear", "gate_up_proj")),
        *(
            pytest.param(1, targets, marks=pytest.mark.slow)
            for targets in ("q_proj,o_proj", "down_proj")
        ),
    ],
)
def test_compiled_blocks_with_adapters_keep_what_the_partitioner_keeps(block, targets):
    """Block 1 has experts."""
    config = mixed() if block else mixed(mlp_only_layers=[0, 1, 2])
    lora = lora_of(config, targets, rank=64)
    torch._dynamo.reset()  # it gives up compiling a function that has been compiled often
    real = really_kept(config, "sdpa", torch.bfloat16, block, compiled=True, lora=lora)
    args = args_with()
    compute = Compute(torch.bfloat16, "sdpa", compile=True, lora=lora)
    found = memory.saved_bytes(args, config, compute, SimpleNamespace(single=True))
    assert found[block] == pytest.approx(real, rel=0.05)


def test_blocks_share_compiled_code_also_if_long_rows_go_in_pieces(monkeypatch):
    """Compiling takes minutes on a GPU if each block is compiled anew."""
    monkeypatch.setattr("fsdp.pieces.PIECE", 16)
    lm, (B, S, d) = skeleton(config := mixed(mlp_only_layers=[0, 1, 2]), "sdpa"), (1, 64, 256)
    apply_lora(lm, lora_of(config), torch.float32)
    allocate(lm, torch.device("cpu"))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    hidden, positions = torch.randn(B, S, d, requires_grad=True), torch.arange(S)[None]
    documents = make_documents(torch.tensor([0, S]), (B, S), "sdpa", torch.device("cpu"))
    rotary = lm.model.rotary_emb(hidden, positions)
    for block in lm.model.layers:
        use_pieces(unit := Blocks([block], True))
        call = torch.compile(unit.forward, backend="eager", dynamic=False)
        hidden = call(hidden, rotary, positions, documents)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all-linear", "o_proj", "gate_up_proj"])
@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3"])
def test_compiled_blocks_of_other_mixtures_keep_them_too(kind, targets):
    lora, how = lora_of(KINDS[kind], targets, rank=64), torch.bfloat16
    compute = Compute(how, "sdpa", compile=True, lora=lora)
    found = memory.saved_bytes(args_with(), KINDS[kind], compute, SimpleNamespace(single=True))
    for block in (0, 1):  # a dense one, whose network is frozen
        torch._dynamo.reset()
        real = really_kept(KINDS[kind], "sdpa", how, block, compiled=True, lora=lora)
        assert found[block] == pytest.approx(real, rel=0.05)


def test_a_frozen_8b_takes_two_bytes_a_weight():
    config = load_config(ROOT / "models/qwen3-8b", 1024)
    lora = lora_of(config)
    d, inner, kv = 4096, 12288, 1024  # by hand: q, k, v, o; gate, up, down
    widths = [2 * d, d + kv, d + kv, 2 * d, d + inner, d + inner, d + inner]
    assert lora.parameters == 36 * 16 * sum(widths) == 43_646_976
    train = SimpleNamespace(seq_len=1024, single=True)
    args = args_with(
        micro_batch_size=4, grad_accum_steps=1, blocks_per_unit=0, psgd_rank=0,
        use_activation_checkpointing=True, activation_memory_budget=1.0,
        reshard_after_forward=False, optimizer_on_host=False,
    )  # fmt: skip
    compute = Compute(torch.bfloat16, "varlen", compile=True, lora=lora)
    job = args, config, compute, train
    (parts,) = (memory.peak(held, *job) for held in estimate.held(*job, 1, False))
    total, own = 8_190_427_136, lora.parameters  # without norms
    assert parts["weights"] == pytest.approx((2 * total + 4 * own) / 2**30, rel=1e-6)
    assert parts["optimizer"] == pytest.approx(8 * own / 2**30)
    assert parts["loss"] == 0  # a chunk's logits take less than a block's backward
    logits = loss_bytes(args, config, compute, train)
    assert logits == 4096 // SLIM * 151_936 * 2 < parts["activations"] * 2**30
    assert sum(parts.values()) < 22
    shards = memory.peak(estimate.held(*job, 2, True)[0], *job)
    gathered = 2 * total + 2 * own + 2 * 151_936 * 4096  # with a buffer for embedding or head
    assert shards["weights"] == pytest.approx((total + 2 * own + gathered) / 2**30, rel=1e-6)


def test_flops_leave_out_the_gradients_of_frozen_weights():
    config = load_config(ROOT / "models/qwen3-8b", 1024)
    weights = 8_190_427_136 - 151_936 * 4096  # the embedding is no product
    attention = 36 * 12 * 32 * 128 * 1024
    assert flops_of_slot(config, 1024) == 6 * weights + attention
    assert flops_of_slot(config, 1024, 1000) == 4 * weights + attention + 6000
    packs = SimpleNamespace(seq_len=1024, attended=lambda rows: 1024.0)
    source, data = SimpleNamespace(config=config), Data(packs, None, max_docs=1)
    lora = lora_of(config)  # of 43,646,976 parameters
    for of_run, slot in ((None, 6 * weights), (lora, 4 * weights + 6 * 43_646_976)):
        compute = Compute(torch.bfloat16, "varlen", compile=True, lora=of_run)
        plan = Plan(source, data, compute, None, None, {}, 0)
        assert plan.flops_of(np.arange(3)) == 3 * 1024 * (slot + attention)


def test_adapters_on_experts_are_counted():
    """By hand, for Qwen3-30B-A3B: 48 blocks of 128 experts, of which a token uses 8."""
    config = load_config(ROOT / "models/qwen3-30b-a3b-6l", 1024)
    lora, blocks = lora_of(config), config.num_hidden_layers
    attention = (2048 + 4096) * 2 + (2048 + 512) * 2
    expert = (2048 + 1536) + (768 + 2048)
    assert experts_of(config) == 128 and config.num_experts_per_tok == 8
    assert lora.parameters == blocks * 16 * (attention + 128 * expert)
    assert lora.routed == blocks * 16 * 128 * expert
    assert lora.active == blocks * 16 * (attention + 8 * expert)
    args = args_with(
        micro_batch_size=1, grad_accum_steps=2, blocks_per_unit=0, psgd_rank=0,
        use_activation_checkpointing=True, activation_memory_budget=1.0, sequence_parallel=1,
        reshard_after_forward=False, optimizer_on_host=False, activations_on_host=False,
    )  # fmt: skip
    train = SimpleNamespace(seq_len=1024, single=True)
    compute = Compute(torch.bfloat16, "varlen", True, lora=lora)
    job = args, config, compute, train
    one, two = (memory.peak(estimate.held(*job, 2, True, n)[0], *job) for n in (1, 2))
    assert one["optimizer"] == two["optimizer"] == pytest.approx(4 * lora.parameters / 2**30)
    frozen = sum(block.routed for block in block_costs(config, 0))
    gathered = 2 * (frozen + lora.routed) / 2  # in 16 bits, the half that is not here
    assert one["weights"] - two["weights"] == pytest.approx(gathered / 2**30)
    assert one["gradients"] - two["gradients"] == pytest.approx(4 * lora.routed / 2 / 2**30)
