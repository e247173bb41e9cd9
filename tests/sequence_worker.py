"""Of two ranks that hold halves of a row: the compiler traces their blocks in one graph, which has
as many exchanges as blocks that are not compiled."""

import os

import torch
import torch.distributed as dist
from transformers import Qwen3Config

from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import Blocks, DecoderLoss, skeleton, spread_rows
from llm_demo.core.rows import Slice, position_ids
from llm_demo.core.timer import CommTimer
from llm_demo.run.choices import fused_kernels

CPU, S = torch.device("cpu"), 64
CU = torch.tensor([0, 20, 45, 64, 64], dtype=torch.int32)  # the second over both halves
CONFIG = Qwen3Config(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=True,
)  # fmt: skip


def numbers(ids, labelled, impl, compiled=False, recomputed=False):
    """The loss of labels of one document, and all gradients of this rank."""
    lm = skeleton(CONFIG, impl)
    spread_rows(lm, dist.group.WORLD)
    lm = lm.to_empty(device=CPU)
    lm.model.rotary_emb = type(lm.model.rotary_emb)(CONFIG)
    torch.manual_seed(0)
    for p in lm.parameters():
        torch.nn.init.normal_(p, std=0.1)
    unit = Blocks(list(lm.model.layers), recomputed, fused_kernels(impl) if recomputed else [])
    if compiled:
        torch._dynamo.reset()
        unit.forward = torch.compile(
            unit.forward, backend="aot_eager", fullgraph=True, dynamic=False
        )
    model = DecoderLoss(lm, [unit])
    start, end = CU[labelled], CU[labelled + 1] - 1
    here, index = part.of_positions(torch.arange(start, end), S)
    targets = ids[0, start + 1 : end + 1][here]
    inputs = map(part.of_rows, (ids, position_ids(CU, (1, S))))
    loss = model(*inputs, make_documents(CU, (1, S), impl, CPU), index, targets)
    loss.backward()
    return [loss.detach(), *(p.grad for p in lm.parameters())]


dist.init_process_group("gloo")
part = Slice(dist.get_rank(), 2)
generator = torch.Generator().manual_seed(1)
ids = torch.randint(0, 128, (1, S), generator=generator)


def exchanges(*how, **more):
    """What `numbers` returns, and how many exchanges it took."""
    timer = CommTimer(CPU, part.index, 2)
    timer.install()
    found = numbers(*how, **more)
    timer.remove()
    return found, sum(key[0] == "all_to_all_single" for key, *_ in timer.take()[0])


for impl, recomputed in (("math", False), ("sdpa", True)):
    plain, exchanged = exchanges(ids, 1, impl)
    assert exchanged == 2 * 2 * 2  # of each block: forward and backward, to heads and back
    compiled, exchanged = exchanges(ids, 1, impl, compiled=True, recomputed=recomputed)
    assert exchanged == 2 * 2 * (3 if recomputed else 2)
    for a, b in zip(plain, compiled, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()
dist.barrier()
dist.destroy_process_group()
os._exit(0)
