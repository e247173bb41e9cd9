"""When blocks are compiled, and that the numbers stay."""

import contextlib
import functools
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT
from test_attention import CPU, H100, MI100, V100, pick, works
from torch._dynamo.backends.debugging import aot_eager

from llm_demo.core import decoder, optim
from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import Blocks, materialise, skeleton
from llm_demo.core.rows import position_ids
from llm_demo.machine.cards import CARDS
from llm_demo.machine.device import DTYPES, pick_dtype
from llm_demo.machine.probes import compile_errors
from llm_demo.model.source import load_config
from llm_demo.run.choices import choose_compile, fused_kernels


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


@contextlib.contextmanager
def compiler(backend):
    """Until the end torch.compile uses this backend. aot_eager has the graphs of the usual one, and
    no minutes of C++."""
    torch._dynamo.reset()
    optim.compile_once.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        yield
    optim.compile_once.cache_clear()


@pytest.mark.parametrize("impl", ["sdpa", "bucketed", "math"])
def test_the_probe_compares_block_and_loss_with_plain_ones(impl):
    """And finds what a compiler makes of either that is wrong."""

    def miscompiles(what):
        def backend(graph, example):
            right = aot_eager(graph, example)
            of_loss = "amax" in graph.code
            if of_loss != (what == "loss"):
                return right
            return lambda *args: [1.1 * t + 0.1 for t in right(*args)]

        return backend

    def compare(dtype):
        return max(compile_errors(impl, dtype, torch.device("cpu")).values())

    with compiler("aot_eager"):
        assert compare(torch.float32) < 1e-5 and 1e-5 < compare(torch.bfloat16) < 4e-2
    for what in ("loss", "block"):
        with compiler(miscompiles(what)):
            assert compare(torch.float32) > 1e-2, what


@pytest.mark.parametrize("asked, dtype", [(None, "bf16"), (True, "fp16")])
def test_the_probe_tests_what_the_run_would_compile(asked, dtype):
    probe = Mock(return_value="wrong")
    found = choose_compile(asked, H100, "varlen", dtype=DTYPES[dtype], probe=probe)
    probe.assert_called_once_with("compile", dtype, "varlen")
    assert found == (False, "torch.compile does not work here: wrong")


@pytest.mark.parametrize("card", CARDS)
def test_the_table_of_cards(card):
    """Of docs/check.md: a row names all cards that have the same."""
    device = CARDS[card]
    dtype, _ = pick_dtype("auto", device)
    ways = {}, {"longest": 4096}, {"single": True}
    several, long, one = (pick(device, dtype, **how)[0] for how in ways)
    packed = f"`{several}`" + f", long documents `{long}`" * (long != several)
    name = next(name for name, each in DTYPES.items() if each == dtype)
    compiled, _ = choose_compile(None, device, several, probe=works)
    assert choose_compile(None, device, one, probe=works)[0] == compiled
    expected = [name, packed, f"`{one}`", "yes" if compiled else "no"]
    page = (ROOT / "docs/check.md").read_text()
    table = page.split("## What runs on which card\n")[1].split("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("|")]
    assert [of for cards, *of in rows if f"`{card}`" in cards] == [expected]


@pytest.mark.parametrize(
    "checkpointing, impl, window",
    [(False, "sdpa", None), (True, "sdpa", None), (True, "sdpa", 20), (False, "bucketed", 64)],
)
def test_compiled_blocks_give_the_same_numbers(checkpointing, impl, window):
    """One graph for all units of a size; aot_eager: the same graphs, without minutes of C++."""
    config = load_config(ROOT / "models/qwen3-tiny", 64)
    config.sliding_window = window
    kind = "sliding_attention" if window else "full_attention"
    config.layer_types = [kind] * config.num_hidden_layers
    lm = skeleton(config, impl)
    blocks = [materialise(lm, f"model.layers.{i}", None, 1, torch.device("cpu")) for i in range(4)]
    cu = torch.tensor([0, 160, 320], dtype=torch.int32)  # of which 64 are a block
    documents = make_documents(cu, (2, 160), impl, torch.device("cpu"))
    positions = position_ids(cu, (2, 160))
    torch.manual_seed(0)
    hidden = torch.randn(2, 160, config.hidden_size, requires_grad=True)
    rotary = lm.model.rotary_emb(hidden, positions)
    graphs, found = [], []

    def count(graph, example):
        graphs.append(graph)
        return aot_eager(graph, example)

    for compiled in (False, True):
        kept = fused_kernels(impl) if window else []
        units = [Blocks(blocks[i : i + 2], checkpointing, kept) for i in (0, 2)]
        if compiled:
            with compiler(count):
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

    with compiler(keep):
        decoder.compile_forward(unit)
    hidden = torch.randn(1, 32, config.hidden_size)
    positions = position_ids(cu, (1, 32))
    documents = make_documents(cu, (1, 32), impl, torch.device("cpu"))
    unit(hidden, lm.model.rotary_emb(hidden, positions), positions, documents)
    (graph,) = graphs
    assert "_sdpa_kernel" in graph.code
    check_cacheable(graph)
