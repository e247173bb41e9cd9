"""Inputs of blocks in host memory, and attention that is kept, not computed again: the same bits,
less memory on the device, fewer kernels."""

import contextlib
import weakref
from types import SimpleNamespace

import psutil
import pytest
import test_parity as parity
import torch
from conftest import ROOT, slow, smaller_model
from test_parity import train
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from fsdp.activations_on_host import STAY, ActivationsOnHost, host_bytes, keep_on_host
from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import DecoderLoss, allocate, fill, make_units, skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.run.choices import fused_kernels

KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
CPU = torch.device("cpu")
SHAPE = B, S = 2, 32
CASES = {
    "plain": ["--no_fsdp", "--grad_accum_steps", "4"],
    "optimizer": ["--no_fsdp", "--optimizer_on_host", "--grad_accum_steps", "4"],
    "adapters": ["--no_fsdp", "--lora_rank", "4", "--lora_dropout", "0.1"],
    "untied": ["--no_fsdp", "--lora_rank", "4", "--grad_accum_steps", "2"],
    "sharded": ["--reshard_after_forward", "--grad_accum_steps", "2"],
    "both": ["--reshard_after_forward", "--optimizer_on_host"],
}  # fmt: skip


class Watched(ActivationsOnHost):
    """Notes what is sent to the host, and whether it is still on the device."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sent, self.storages, self.alive = [], [], []

    def _send(self, i, t):
        super()._send(i, t)
        self.sent.append(i)
        self.storages.append(weakref.ref(t.untyped_storage()))
        del t
        self.alive.append(sum(storage() is not None for storage in self.storages))


@pytest.fixture(scope="module")
def config():
    return AutoConfig.from_pretrained(ROOT / "models/qwen3-tiny")


def decoder(config, keep=0, backend=None):
    lm = skeleton(config, "sdpa")
    sizes = [1] * config.num_hidden_layers
    units = make_units(lm.model.layers, sizes, True, None, keep, fused_kernels("sdpa"))
    for unit in units if backend else ():
        unit.forward = torch.compile(unit.forward, dynamic=False, backend=backend, fullgraph=True)
    model = DecoderLoss(lm, units)
    allocate(model, CPU)
    lm.lm_head.weight = lm.model.embed_tokens.weight
    fill(lm, "model", None, 1, None)
    return model


def forward(model, first=0):
    ids = (first + torch.arange(B * S)).view(B, S) % 97
    documents = make_documents(torch.tensor([0, S, B * S], dtype=torch.int32), SHAPE, "sdpa", CPU)
    index = torch.arange(B * S)
    return model(ids, torch.arange(S).expand(B, S), documents, index, ids.flatten().roll(-1))


class Count(TorchDispatchMode):
    """Counts runs of the attention kernel, below what selective checkpointing answers itself."""

    ran = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.ran += operator.name() == KERNEL
        return operator(*args, **(kwargs or {}))


def two_micro_batches(model):
    """(losses, gradients)."""
    losses = []
    for _ in range(2):
        losses.append(forward(model))
        losses[-1].backward()
    return [loss.item() for loss in losses], [p.grad for p in model.parameters()]


def on_host(model, config, kind=Watched):
    n = len(model.units)
    model.on_host = kind(n, (*SHAPE, config.hidden_size), torch.float32, CPU)
    return model.on_host


@pytest.mark.parametrize("backend", (None, "aot_eager"))
def test_same_bits_from_the_host(config, backend):
    losses, grads = two_micro_batches(decoder(config))
    torch._dynamo.reset()
    model = decoder(config, keep=6, backend=backend)
    host, n = on_host(model, config), len(model.units)
    kept_losses, kept_grads = two_micro_batches(model)
    assert kept_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(kept_grads, grads, strict=True))
    assert host.sent == 2 * [*range(n - 1)]
    assert max(host.alive) == STAY


@pytest.mark.parametrize("keep", (0, 2, 6))
def test_attention_runs_once_for_each_block_if_kept(config, keep):
    model = decoder(config, keep)
    with Count() as count:
        two_micro_batches(model)
    expected = 2 * (2 * len(model.units) - keep)  # twice in a block that keeps nothing
    assert count.ran == expected
    torch._dynamo.reset()
    model = decoder(config, keep, "aot_eager")
    two_micro_batches(model)  # traced
    with profile() as profiler:
        two_micro_batches(model)
    ran = sum(event.count for event in profiler.key_averages() if event.key == KERNEL)
    assert ran == expected


def test_a_forward_without_a_backward_leaves_nothing(config):
    expected = decoder(config)
    forward(expected).backward()
    model = decoder(config)
    host = on_host(model, config)
    with torch.no_grad():
        forward(model)
    assert not host.sent
    forward(model, first=50)  # its loss is dropped
    forward(model).backward()
    grads = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in grads)


def test_only_inputs_of_units_leave_the_device(config):
    model = decoder(config)
    model.on_host = ActivationsOnHost(6, (B, S, 1), torch.float32, CPU)
    forward(model).backward()  # of another shape
    assert not model.on_host.kept


VIEWS = {
    "shape": lambda x: x.view(9, 4) ** 3,
    "stride": lambda x: x.transpose(0, 1) ** 3,
    "dtype": lambda x: x.sum().expand(9, 3, 4).gather(0, x.detach().view(torch.int64)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_an_input_is_not_the_input(view):
    """Though it begins at the same address. Autograd saves both."""

    def gradient(host):
        x = torch.arange(36).view(3, 3, 4) % 9
        # the bits of integers, for a view that is an index
        x = (x.view(torch.float64) if view == "dtype" else x.double()).requires_grad_()
        with host.of_unit(0, x) if host else contextlib.nullcontext():
            y = (x**2).sum() + VIEWS[view](x).sum()
        y.backward()
        return x.grad

    host = Watched(2, (3, 3, 4), torch.float64, CPU)
    assert torch.equal(gradient(host), gradient(None))
    assert host.sent == [0]


def test_too_little_host_memory(monkeypatch):
    """Of a node with two ranks, which both take memory."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    n, shape, world = 6, (2, 32, 8), World(0, 1, 0, CPU)
    others = 2**28  # what the optimizer will take
    need = 2 * host_bytes(n, shape, torch.float32) + others
    free = SimpleNamespace(available=need - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    said = "needs 0.0 GiB of host memory besides the optimizer's 0.2 GiB, and 0.3 GiB are free"
    with pytest.raises(UserError, match=said):
        keep_on_host(n, shape, torch.float32, world, print, others)
    free.available, said = need, []
    keep_on_host(n, shape, torch.float32, world, said.append, others)
    assert said == ["activations on the host: 0.0 GiB of 0.3 GiB free"]


@pytest.mark.parametrize("processes", [slow(1), 2])
def test_same_bits_as_on_the_device(processes, tmp_path):
    smaller_model(tmp_path / "model")
    smaller_model(tmp_path / "untied", tie_word_embeddings=False)
    parity.write_rows(tmp_path / "data.jsonl")
    cases = {}
    for name, flags in CASES.items():
        if ("--no_fsdp" in flags) == (processes == 1):
            for where in ("device", "host"):
                more = ["--use_activation_checkpointing", *flags, "--max_steps", "2"]
                more += ["--activations_on_host"] * (where == "host")
                case = f"{name}-{where}"
                model = "untied" if name == "untied" else "model"
                cases[case] = parity.argv(tmp_path, model, 2, 1, *more)
    results = train(tmp_path, "fsdp", processes, cases)
    for name in {case.partition("-")[0] for case in cases}:
        losses, ranks = results[f"{name}-host"]
        assert losses == results[f"{name}-device"][0] and len(losses) == 2
        for mine, other in zip(ranks, results[f"{name}-device"][1], strict=True):
            assert mine["embeds_on_host"] == (name == "untied") and not other["embeds_on_host"]
            assert [s["norm"] for s in mine["steps"]] == [s["norm"] for s in other["steps"]]
            for key, value in mine["params"].items():
                assert torch.equal(value, other["params"][key]), key
