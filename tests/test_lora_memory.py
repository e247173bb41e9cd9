"""Adapters: how many parameters they have, their FLOPs, and what is compiled."""

from types import SimpleNamespace

import numpy as np
import torch
from conftest import ROOT
from test_lora import lora_of
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from transformers import Qwen3Config

from fsdp.pieces import use_pieces
from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import Blocks, allocate, skeleton
from llm_demo.model.costs import flops_of_slot, sizes_of
from llm_demo.model.families import experts_of
from llm_demo.model.source import load_config
from llm_demo.options.lora import apply_lora
from llm_demo.run.choices import Compute
from llm_demo.run.plan import Data, Plan


def test_blocks_share_compiled_code_also_if_long_rows_go_in_pieces(monkeypatch):
    """Compiling takes minutes on a GPU if each block is compiled anew."""
    monkeypatch.setattr("fsdp.pieces.PIECE", 16)
    monkeypatch.setattr("fsdp.pieces.LONG", 32)
    monkeypatch.setattr("llm_demo.options.lora.LARGE_RESULT", 0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    lm, (B, S, d) = skeleton(config, "sdpa"), (1, 64, 256)
    apply_lora(lm, lora_of(config), torch.float32)
    allocate(lm, torch.device("cpu"))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    hidden, positions = torch.randn(B, S, d, requires_grad=True), torch.arange(S)[None]
    graphs = []
    documents = make_documents(torch.tensor([0, S]), (B, S), "sdpa", torch.device("cpu"))
    rotary = lm.model.rotary_emb(hidden, positions)

    def keep(graph, example):
        graphs.append(graph)
        return graph

    for block in lm.model.layers:
        use_pieces(unit := Blocks([block], True))
        call = torch.compile(unit.forward, backend=keep, dynamic=False)
        hidden = call(hidden, rotary, positions, documents)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    (graph,) = graphs
    assert "llm_demo.adapted" in graph.print_readable(print_output=False)
    check_cacheable(graph)  # else every run would trace and differentiate it again


def test_flops_leave_out_the_gradients_of_frozen_weights():
    config = load_config(ROOT / "models/qwen3-8b", 1024)
    weights = 8_190_427_136 - 151_936 * 4096  # the embedding is no product
    attention = 36 * 12 * 32 * 128 * 1024
    sizes = sizes_of(config)
    assert flops_of_slot(sizes, 1024) == 6 * weights + attention
    assert flops_of_slot(sizes, 1024, 1000) == 4 * weights + attention + 6000
    packs = SimpleNamespace(seq_len=1024, attended=lambda rows: 1024.0)
    source, data = SimpleNamespace(config=config), Data(packs, None)
    lora = lora_of(config)  # of 43,646,976 parameters
    for of_run, slot in ((None, 6 * weights), (lora, 4 * weights + 6 * 43_646_976)):
        compute = Compute(torch.bfloat16, "varlen", compile=True, lora=of_run)
        plan = Plan(source, data, compute, None, None, {}, 0, config, sizes)
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
