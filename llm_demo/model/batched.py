"""Greedy answers to many prompts, by transformers' continuous batching over a paged cache."""

import importlib.util
import inspect
import sys

import torch
from transformers import GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llm_demo.device import free_host_memory
from llm_demo.model.attention import heads_of
from llm_demo.model.costs import head_size
from llm_demo.model.rotary import length_dependent_rope

try:
    from transformers import ContinuousBatchingConfig
except ImportError:
    ContinuousBatchingConfig = None

ROWS = {"cuda": 256, "cpu": 32}  # in flight at once, if memory allows
QUERIES = 2048  # tokens per forward: prompts are processed in chunks of this size


def choose_batched(asked: str, device: torch.device, config) -> tuple[bool, str]:
    """(whether to try continuous batching, the reason). asked: auto, batch or reference."""
    if asked == "reference":
        return False, "as requested"
    if ContinuousBatchingConfig is None:
        return False, "this version of transformers has no continuous batching"
    if kind := length_dependent_rope(config):
        return False, f"{kind} frequencies depend on the longest document of a batch"
    if heads_of(config)[2:] != (head_size(config),) * 2:
        return False, "the paged cache has one width for keys and values"
    if asked == "batch":
        return True, "as requested"
    if device.type == "cuda" and not paged_kernel():
        # H200, 1,319 prompts, 256 new tokens each: 84 s in plain batches, 173 s paged
        return False, "paged attention is slow without the flash-attn package"
    return True, "faster than padded batches"


def batched(
    model, prompts: list[list[int]], how: dict, rows: int | None = None
) -> tuple[list[list[int]] | None, str]:
    """(the continuation of each prompt, the attention) or (None, the error). how: arguments of
    GenerationConfig; rows: most prompts at a time."""
    before, kernel = model.config._attn_implementation, paged_attention(model)
    rows = rows or ROWS[model.device.type]
    cache = cache_size(model, prompts, how["max_new_tokens"], rows, kernel)
    try:
        old = f"paged|{kernel}"  # its name in earlier versions of transformers
        known = old in ALL_ATTENTION_FUNCTIONS.valid_keys()
        model.set_attn_implementation(old if known else kernel)
        answers = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(**how),
            continuous_batching_config=ContinuousBatchingConfig(**cache),
            progress_bar=sys.stderr.isatty(),
        )
    except Exception as e:  # young code: after any error the caller falls back
        return None, f"continuous batching failed: {(str(e).strip() or repr(e)).splitlines()[0]}"
    finally:
        model.set_attn_implementation(before)
    problem = next((r.error for r in answers.values() if r.error), None)
    if problem or len(answers) < len(prompts):
        return None, f"continuous batching failed: {problem or 'answers are missing'}"
    return [r.generated_tokens for r in answers.values()], kernel  # in prompt order


def paged_attention(model) -> str:
    """The attention to request. By default transformers may look for a kernel on the hub."""
    fits = model.device.type == "cuda" and model.dtype.itemsize == 2
    return (fits and paged_kernel()) or "sdpa"


def paged_kernel() -> str | None:
    """The installed fused paged attention, or None."""
    for module, kernel in (("flash_attn_interface", 3), ("flash_attn", 2)):
        if importlib.util.find_spec(module):
            return f"flash_attention_{kernel}"
    return None


def free_memory(device: torch.device) -> int:
    """Free memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory()


def cache_size(model, prompts: list[list[int]], new: int, rows: int, kernel: str) -> dict:
    """The cache size to request. By default the cache takes nearly all memory, and sdpa reads every
    token in the cache for each token that it computes."""
    block = 32 if kernel == "sdpa" else 256  # the size paged flash attention expects
    blocks = -(-(max(map(len, prompts)) + new) // block) + 1  # of the longest row
    heads, layers = model.config.num_key_value_heads, model.config.num_hidden_layers
    bytes_a_row = blocks * block * 2 * layers * heads * head_size(model.config)
    rows = min(
        rows,
        len(prompts),
        int(free_memory(model.device) * 0.4 / (bytes_a_row * model.dtype.itemsize)),
    )
    new_name = "page_size" in inspect.signature(ContinuousBatchingConfig).parameters
    return {
        "page_size" if new_name else "block_size": block,
        "num_blocks": max(1, rows) * blocks,
        "max_batch_tokens": min(QUERIES, max(256, sum(map(len, prompts)))),
        "max_requests_per_batch": max(1, rows),
        "allow_block_sharing": False,
    }
