"""Many greedy answers at once, by transformers' continuous batching over a paged cache."""

import importlib.util
import sys

import torch
from transformers import GenerationConfig

from llm_demo.model.costs import head_size
from llm_demo.model.rotary import length_dependent_rope

try:
    from transformers import ContinuousBatchingConfig
except ImportError:
    ContinuousBatchingConfig = None

ROWS = {"cuda": 256, "cpu": 32}  # in flight at once, if the memory holds them
QUERIES = 2048  # tokens of a forward: prompts are read in pieces of this size


def choose_batched(asked: str, device: torch.device, config) -> tuple[bool, str]:
    """(whether to try it, the reason). asked: auto, batch or reference."""
    if asked == "reference":
        return False, "as asked"
    if ContinuousBatchingConfig is None:
        return False, "this transformers has no continuous batching"
    if kind := length_dependent_rope(config):
        return False, f"{kind} frequencies depend on the longest document of a batch"
    if device.type == "cpu" and not importlib.util.find_spec("psutil"):
        return False, "on a CPU it needs psutil"
    if asked == "batch":
        return True, "as asked"
    if device.type == "cuda" and not paged_kernel():
        # on an H200, 1,319 prompts and 256 new tokens each: 84 s batch by batch, 173 s paged
        return False, "paged attention is slow without the flash-attn package"
    return True, "the faster way"


def batched(
    model, prompts: list[list[int]], how: dict, rows: int | None = None
) -> tuple[list[list[int]] | None, str]:
    """(the continuation of each prompt, the attention) or (None, what went wrong). how: arguments
    of GenerationConfig; rows: at most so many prompts at a time."""
    before, kernel = model.config._attn_implementation, paged_attention(model)
    rows = rows or ROWS[model.device.type]
    config = ContinuousBatchingConfig(**size(model, prompts, how["max_new_tokens"], rows, kernel))
    try:
        model.set_attn_implementation(f"paged|{kernel}")
        found = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(**how),
            continuous_batching_config=config,
            progress_bar=sys.stderr.isatty(),
        )
    except Exception as e:  # young code: whatever it raises, there is another way
        return None, f"continuous batching failed: {(str(e).strip() or repr(e)).splitlines()[0]}"
    finally:
        model.set_attn_implementation(before)
    problem = next((r.error for r in found.values() if r.error), None)
    if problem or len(found) < len(prompts):
        return None, f"continuous batching failed: {problem or 'answers are missing'}"
    return [r.generated_tokens for r in found.values()], kernel  # in the order of the prompts


def paged_attention(model) -> str:
    """The attention to ask for: by itself transformers may look for a kernel on the hub."""
    fits = model.device.type == "cuda" and model.dtype.itemsize == 2
    return (fits and paged_kernel()) or "sdpa"


def paged_kernel() -> str | None:
    """The fused paged attention that is installed."""
    for module, kernel in (("flash_attn_interface", 3), ("flash_attn", 2)):
        if importlib.util.find_spec(module):
            return f"flash_attention_{kernel}"
    return None


def free_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def size(model, prompts: list[list[int]], new: int, rows: int, kernel: str) -> dict:
    """How large a cache to ask for. Left alone it takes nearly all memory, and sdpa looks at every
    token in the cache for each one that it computes."""
    block = 32 if kernel == "sdpa" else 256  # what paged flash attention wants
    blocks = -(-(max(map(len, prompts)) + new) // block) + 1  # of the longest row
    heads, layers = model.config.num_key_value_heads, model.config.num_hidden_layers
    bytes_a_row = blocks * block * 2 * layers * heads * head_size(model.config)
    rows = min(
        rows,
        len(prompts),
        int(free_memory(model.device) * 0.4 / (bytes_a_row * model.dtype.itemsize)),
    )
    return {
        "block_size": block,
        "num_blocks": max(1, rows) * blocks,
        "max_batch_tokens": min(QUERIES, max(256, sum(map(len, prompts)))),
        "max_requests_per_batch": max(1, rows),
        "allow_block_sharing": False,
    }
