"""The backend varlen_cudnn with stand-ins for its kernels, which need a GPU: test_attention.py."""

import itertools

import pytest
import torch
from test_attention import LENGTHS, WINDOWED, B, S, assert_equals_each_alone, boundaries
from torch.distributed.utils import _to_kwargs
from torch.utils._python_dispatch import TorchDispatchMode

from llm_demo.core.attention import BACKENDS, make_documents
from llm_demo.options import long_documents
from llm_demo.run.choices import fused_kernels

pytest.importorskip("torch.nn.attention.varlen", reason="the backend needs PyTorch 2.10")


@pytest.fixture
def long_documents_on_a_cpu(monkeypatch):
    """The kernels of varlen_cudnn for CPUs, as strict about what they are given."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    calls = []

    def forward_of_one(q, k, v, scale):
        assert q.shape[2] == k.shape[2] and q.shape[2] % 64 == 0
        calls.append("one")
        return forward(q, k, v, 0.0, True, scale=scale)

    def backward_of_one(grad, q, k, v, out, sums, scale):
        assert sums.shape == q.shape[1:3]
        return backward(grad, q, k, v, out, sums[None].contiguous(), 0.0, True, scale=scale)

    def each(cu, longest):
        assert cu[0] == 0 and longest == max(2, cu.diff().max())
        return [slice(*ends) for ends in itertools.pairwise(cu.tolist()) if ends[0] < ends[1]]

    def alone(*tensors):
        return [x.transpose(0, 1)[None] for x in tensors]

    def band(at, window):
        n = at.stop - at.start
        mask = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - (window or n))
        return torch.zeros(n, n).masked_fill(~mask, -torch.inf)

    def forward_of_short(q, k, v, cu, longest, scale, window):
        calls.append(len(cu) - 1)
        found = [
            forward(*alone(q[at], k[at], v[at]), attn_mask=band(at, window), scale=scale)
            for at in each(cu, longest)
        ]
        return torch.cat([o[0].transpose(0, 1) for o, _ in found]), torch.cat(
            [sums[0] for _, sums in found], 1
        )

    def backward_of_short(grad, q, k, v, out, sums, cu, longest, scale, window):
        found = [
            backward(*alone(*(x[at] for x in (grad, q, k, v, out))),
                     sums[None, :, at].contiguous(), 0.0, False,
                     attn_mask=band(at, window), scale=scale)
            for at in each(cu, longest)
        ]  # fmt: skip
        return [torch.cat([x[0].transpose(0, 1) for x in of]) for of in zip(*found, strict=True)]

    for kernel in (forward_of_one, backward_of_one, forward_of_short, backward_of_short):
        monkeypatch.setattr(long_documents, kernel.__name__, kernel)
    return calls


@pytest.mark.parametrize(
    "long, calls",
    [
        (1, ["one"] * 9),
        (64, [1, "one", 2, "one", 1, "one", "one", "one"]),
        (999, [24]),
    ],
)
@pytest.mark.parametrize("values", [8, 16, 24])
def test_long_documents_one_by_one(values, long, calls, long_documents_on_a_cpu):
    assert_equals_each_alone("varlen_cudnn", values, long, torch.float32, 1e-5, 1e-6)
    assert long_documents_on_a_cpu == calls


@pytest.mark.parametrize(
    "window, calls",
    [  # of documents of 15, 16, 17, 80 tokens, 128, 64 and 64, 1 and 127: shorter ones stay alone
        (15, ["one", 23]),
        (16, ["one", "one", 22]),
        (17, ["one", "one", "one", 21]),
        (79, ["one", "one", "one", 2, "one", "one", 17]),
        (80, ["one", "one", "one", "one", 1, "one", "one", 17]),
    ],
)
def test_long_documents_with_a_window_are_no_longer_than_it(window, calls, long_documents_on_a_cpu):
    assert_equals_each_alone("varlen_cudnn", 16, 15, torch.float32, 1e-5, 3e-6, WINDOWED, window)
    assert long_documents_on_a_cpu == calls


@pytest.mark.parametrize("window, left", [(None, None), (16, 15)])
def test_flash_takes_the_keys_before_a_query(window, left):
    given = []

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            names = [argument.name for argument in op._schema.arguments]
            given.append(dict(zip(names, args, strict=False)) | kwargs)
            return [q] * len(op._schema.returns) if "flash" in op.name() else op(*args, **kwargs)

    q, cu = torch.zeros(64, 2, 16), torch.tensor([0, 64])
    with Kernels():
        long_documents.forward_of_short(q, q, q, cu, 64, 0.3, window)
        long_documents.backward_of_short(q, q, q, q, q, q, cu, 64, 0.3, window)
    forward, _, backward = given  # between them an empty state of dropout
    for call in (forward, backward):
        assert call["is_causal"] and call["max_k"] == 64 and call["scale"] == 0.3
        assert call.get("window_size_left") == left


def test_long_documents_are_one_operator(long_documents_on_a_cpu):
    """Known to the compiler with its shapes and gradients, whatever the lengths of documents."""
    q, k, v = (torch.randn(B * S, n, 16, requires_grad=True) for n in (4, 2, 2))
    cu = boundaries()
    for window in (None, 30):
        arguments = q, k, v, cu, cu, 64, 0.3, window
        torch.library.opcheck(long_documents.attend_documents, arguments)

    def attend(q, k, v, documents):
        return BACKENDS["varlen_cudnn"](q, k, v, documents, 0.3, 30)

    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend, backend=count, fullgraph=True, dynamic=False)
    qkv = [x.detach().view(B, S, -1, 16).transpose(1, 2) for x in (q, k, v)]
    for lengths in (LENGTHS, [[S]] * 4, [[1] * 4 + [S - 4]] * 4):
        cu = boundaries(lengths)
        documents = make_documents(cu, (B, S), "varlen_cudnn", torch.device("cpu"), 64)
        assert torch.equal(compiled(*qkv, documents), attend(*qkv, documents))
    assert len(graphs) == 1
    kept = fused_kernels("varlen_cudnn")  # instead of computed again
    assert kept == [torch.ops.llm_demo.attend_documents.default]


def test_long_documents_take_few_lengths():
    lengths = range(4096, 2**17 + 1)
    padded = [long_documents.padded_length(n) for n in lengths]
    assert len(set(padded)) == 5 * 16 + 1
    assert all(n <= p <= 1.0625 * n and p % 256 == 0 for n, p in zip(lengths, padded, strict=True))
    assert [long_documents.padded_length(n) for n in (1, 64, 65, 1025)] == [64, 64, 128, 1088]


def test_boundaries_stay_on_the_cpu_under_fsdp2():
    """It moves the tensors of all arguments to the device; each attention would wait for these."""
    documents = make_documents(boundaries(), (B, S), "varlen_cudnn", torch.device("cpu"))
    (moved,), _ = _to_kwargs((documents,), {}, torch.device("meta"), False)
    assert moved[0].cu_seqlens.is_meta
    assert moved[0].boundaries.tensor.equal(boundaries())
