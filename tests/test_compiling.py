"""When blocks are compiled, and that the numbers stay."""

import functools
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT
from test_attention import A100, CPU, H100, MI100, MI210, MI300, RX7900, V100, pick, works

from llm_demo.core import decoder, loss, optim
from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import Blocks, materialise, skeleton
from llm_demo.core.rows import position_ids
from llm_demo.machine.device import DTYPES, Device, pick_dtype
from llm_demo.machine.probes import compile_errors
from llm_demo.model.source import load_config
from llm_demo.run.choices import choose_compile


@pytest.mark.parametrize(
    "asked, device, attention, problem, chosen, reason",
    [
        (None, H100, "varlen", None, True, "fewer and larger kernels"),
        (None, H100, "sdpa", "no C compiler", False, "does not work here: no C compiler"),
        (True, H100, "varlen", "no C compiler", False, "does not work here: no C compiler"),
        (None, H100, "bucketed", None, False, "shapes that change"),
        (True, H100, "bucketed", None, True, "as requested"),
        (None, MI100, "bucketed", None, False, "not measured on gfx908"),
        (None, V100, "bucketed", None, False, "not measured on sm_70"),
        (True, MI100, "bucketed", None, True, "as requested"),
        (True, MI100, "bucketed", "differs", False, "does not work here: differs"),
        (None, CPU, "bucketed", None, False, "on a CPU"),
        (True, CPU, "bucketed", None, True, "as requested"),
        (False, H100, "varlen", None, False, "as requested"),
    ],
)
def test_the_choice_and_its_reason(asked, device, attention, problem, chosen, reason):
    compiled, why = choose_compile(asked, device, attention, probe=lambda *of: problem)
    assert compiled == chosen and reason in why


@pytest.mark.parametrize("impl", ["sdpa", "bucketed", "math"])
def test_the_probe_compares_block_and_loss_with_plain_ones(impl, monkeypatch):
    """And finds a loss kernel that is wrong, or one of the block's kernels."""
    torch._dynamo.reset()
    optim.compile_once.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))

    def compare(dtype):
        return max(compile_errors(impl, dtype, torch.device("cpu")).values())

    assert compare(torch.float32) < 1e-5 and 1e-5 < compare(torch.bfloat16) < 4e-2

    def wrong(out, targets, scale):  # forgets to subtract one at the target
        plain = loss._loss_of_logits(out, targets, scale)
        out[range(len(out)), targets] += scale
        return plain

    with monkeypatch.context() as patch:
        patch.setattr(loss, "_kernel", lambda device_type: wrong)
        assert compare(torch.float32) > 0.1
    compile_forward = decoder.compile_forward

    def miscompiled(unit):
        compile_forward(unit)
        forward = unit.forward
        unit.forward = lambda *args: forward(*args) + 0.1 * args[0]

    monkeypatch.setattr(decoder, "compile_forward", miscompiled)
    assert compare(torch.float32) > 1e-3
    optim.compile_once.cache_clear()


@pytest.mark.parametrize("asked, dtype", [(None, "bf16"), (True, "fp16")])
def test_the_probe_tests_what_the_run_would_compile(asked, dtype):
    probe = Mock(return_value="wrong")
    found = choose_compile(asked, H100, "varlen", dtype=DTYPES[dtype], probe=probe)
    probe.assert_called_once_with("compile", dtype, "varlen")
    assert found == (False, "torch.compile does not work here: wrong")


CARDS = {
    "H100 80 GB": H100,
    "H200": Device("cuda", "nvidia", "NVIDIA H200", "sm_90", 141.0),
    "A100 80 GB": A100,
    "RTX 4090": Device("cuda", "nvidia", "NVIDIA GeForce RTX 4090", "sm_89", 24.0),
    "RTX 3090": Device("cuda", "nvidia", "NVIDIA GeForce RTX 3090", "sm_86", 24.0),
    "MI100": MI100,
    "MI210": MI210,
    "MI300X": MI300,
    "RX 7900 XTX": RX7900,
}


@pytest.mark.parametrize("card", CARDS)
def test_the_table_of_cards(card):
    device = CARDS[card]
    dtype, _ = pick_dtype("auto", device)
    ways = {}, {"longest": 4096}, {"single": True}
    several, long, one = (pick(device, dtype, **how)[0] for how in ways)
    packed = f"`{several}`" + f", long documents `{long}`" * (long != several)
    name = next(name for name, each in DTYPES.items() if each == dtype)
    compiled, _ = choose_compile(None, device, several, probe=works)
    assert choose_compile(None, device, one, probe=works)[0] == compiled
    row = f"| {card} | {name} | {packed} | `{one}` | {'yes' if compiled else 'no'} |"
    assert row in (ROOT / "docs/attention.md").read_text()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_give_the_same_numbers(checkpointing):
    """One graph for all units of a size; aot_eager: the same graphs, without minutes of C++."""
    config = load_config(ROOT / "models/qwen3-tiny", 64)
    lm = skeleton(config, "sdpa")
    blocks = [materialise(lm, f"model.layers.{i}", None, 1, torch.device("cpu")) for i in range(4)]
    cu = torch.tensor([0, 64, 128], dtype=torch.int32)
    documents = make_documents(cu, (2, 64), "sdpa", torch.device("cpu"))
    positions = position_ids(cu, (2, 64))
    torch.manual_seed(0)
    hidden = torch.randn(2, 64, config.hidden_size, requires_grad=True)
    rotary = lm.model.rotary_emb(hidden, positions)
    graphs, compile_plainly = [], torch.compile

    def count(graph, example):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, example)

    found = []
    torch._dynamo.reset()
    for compiled in (False, True):
        units = [Blocks(blocks[i : i + 2], checkpointing) for i in (0, 2)]
        if compiled:
            with pytest.MonkeyPatch.context() as patch:
                eagerly = functools.partial(compile_plainly, backend=count)
                patch.setattr(torch, "compile", eagerly)
                for unit in units:
                    decoder.compile_forward(unit)
        out = hidden
        for unit in units:
            out = unit(out, rotary, positions, documents)
        parameters = [p for block in blocks for p in block.parameters()]
        found.append([out, *torch.autograd.grad(out.square().sum(), [hidden, *parameters])])
    assert len(graphs) == 1
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["sdpa", "math"])
def test_graphs_of_blocks_can_be_cached(impl):
    """Else every run would trace and differentiate them again, which takes seconds a graph."""
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable

    config = load_config(ROOT / "models/qwen3-tiny", 32)
    lm = skeleton(config, impl)
    block = materialise(lm, "model.layers.0", None, 1, torch.device("cpu"))
    unit, cu = Blocks([block], checkpointing=False), torch.tensor([0, 32], dtype=torch.int32)
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        compiled = functools.partial(torch.compile, backend=keep)
        patch.setattr(torch, "compile", compiled)
        decoder.compile_forward(unit)
        hidden = torch.randn(1, 32, config.hidden_size)
        positions = position_ids(cu, (1, 32))
        documents = make_documents(cu, (1, 32), impl, torch.device("cpu"))
        unit(hidden, lm.model.rotary_emb(hidden, positions), positions, documents)
    (graph,) = graphs
    assert "_sdpa_kernel" in graph.code
    check_cacheable(graph)
