"""torch.compile for units of blocks and for the loss, and whether it works and pays off here."""

import functools
import sys
from collections.abc import Callable
from copy import deepcopy

import torch

from llm_demo.core.decoder import compile_forward
from llm_demo.job.device import DTYPES, Device, is_sm, pick_dtype, this_device
from llm_demo.job.probe import probe_once


def choose_compile(
    asked: bool | None, device: Device, attn_impl: str, probe=None, problem: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
):  # fmt: skip
    """(whether to compile, the reason). asked: None decides here. problem: why this model's blocks
    can't be compiled, if so.

    probe() -> error or None runs on a GPU before any real compilation: without a C compiler, for
    example, Triton fails only in the first step, and no one has run our kernel on some cards."""
    if probe is None:
        name = next(name for name, d in DTYPES.items() if d == dtype)
        probe = functools.partial(probe_once, "llm_demo.job.compiling", attn_impl, name)
    if asked is False:
        return False, "as requested"
    if asked is None:
        if device.type == "cpu":
            return False, "compiling takes longer than it saves on a CPU"
        if not is_sm(device, 80):
            return False, f"not measured on {device.arch}; --compile tests and enables it"
        if attn_impl.startswith("bucketed") or attn_impl == "math":
            return False, f"attention {attn_impl} has shapes that change with the data"
    if problem := problem or (probe() if device.type == "cuda" else None):
        return False, f"torch.compile does not work here: {problem}"
    return True, "as requested" if asked else "fewer and larger kernels"


def compare_with_eager(impl: str, dtype: torch.dtype, device: torch.device) -> float:
    """Largest error of a compiled block and loss, with attention `impl`, and of their gradients
    against plain PyTorch in fp32: the norm of the difference, relative to that of the result."""
    # not above: who only chooses does not need them
    from transformers import AutoModelForCausalLM, Qwen3Config

    from llm_demo.core.attention import make_documents
    from llm_demo.core.batch import position_ids
    from llm_demo.core.decoder import Blocks, DecoderLoss

    B, S, columns = 2, 128, 8208  # the loss kernel reads two whole blocks of columns and a part
    config = Qwen3Config(
        vocab_size=columns, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    ids, targets = (torch.randint(columns, shape, device=device) for shape in ((B, S), (B * S,)))
    ends = [S, B * S, B * S] if impl == "sdpa" else [100, S, B * S]
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    plain, ours = (
        AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=f"packed_{name}")
        for name in ("math", impl)
    )
    ours.to(device, dtype)
    plain.to(device).load_state_dict(ours.state_dict())
    ours.model.rotary_emb = plain.model.rotary_emb  # in fp32
    results = []
    for lm, name in ((plain, "math"), (ours, impl)):
        unit = Blocks(list(lm.model.layers), checkpointing=False)
        if lm is ours:
            compile_forward(unit)
        model = DecoderLoss(lm, [unit], compiled=lm is ours)
        where = position_ids(cu.to(device), (B, S)), make_documents(cu, (B, S), name, device)
        loss = model(ids, *where, torch.arange(B * S, device=device), targets)
        results.append([loss, *torch.autograd.grad(loss, list(lm.parameters()))])
    pairs = zip(*results, strict=True)
    return max(((a - b.float()).norm() / a.norm()).item() for a, b in pairs)


def _selftest(impl: str = "sdpa", dtype: str = "") -> None:
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    chosen, _ = pick_dtype(dtype or "auto", this_device())
    error = compare_with_eager(impl, chosen, torch.device("cuda"))
    bound = {torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}[chosen]
    if not error < bound:
        sys.exit(f"compiled and plain results differ by {error:.1e}, the limit is {bound:.0e}")


if __name__ == "__main__":
    _selftest(*sys.argv[1:])


def compiles_adamw(
    works: bool, n_params: int, world_size: int, say: Callable, flat: bool = False
) -> bool:
    """Whether to compile AdamW. works: torch.compile works here; n_params: of the whole model;
    flat: a unit's parameters are one tensor. On two H200 it gained 3 % for 8B; for 0.6B with small
    tensors the gain was within noise (bench/LOG.md)."""
    chosen = works and (flat or n_params / world_size >= 1e9)
    if chosen:
        why = "for large tensors" if flat else "faster from 1e9 parameters a process on"
        say(f"adamw: compiled ({why})")
    return chosen
