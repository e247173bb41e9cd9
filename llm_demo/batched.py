"""Many greedy answers at once, by transformers' continuous batching over a paged cache."""

import importlib.util
import sys

import torch
from transformers import GenerationConfig

from llm_demo.model import head_size

try:
    from transformers import ContinuousBatchingConfig
except ImportError:
    ContinuousBatchingConfig = None

ROWS = 256  # in flight at once, if the memory holds them
QUERIES = 2048  # tokens of a forward: prompts are read in pieces of this size


def choose_batched(asked: str, device: torch.device, config) -> tuple[bool, str]:
    """(whether to try it, the reason). asked: auto, batch or reference."""
    if asked == "reference":
        return False, "as asked"
    if ContinuousBatchingConfig is None:
        return False, "this transformers has no continuous batching"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind == "longrope" or "dynamic" in kind:
        return False, f"rotary {kind} depends on the longest document of a batch"
    if asked == "batch":
        return True, "as asked"
    if device.type == "cpu":
        return False, "a CPU gains nothing by more"
    return True, "a GPU"


def batched(model, prompts: list[list[int]], how: dict) -> tuple[list[list[int]] | None, str]:
    """(the continuation of each prompt, the attention) or (None, what went wrong). how: arguments
    of GenerationConfig."""
    before, kernel = model.config._attn_implementation, paged_attention(model)
    config = ContinuousBatchingConfig(**size(model, prompts, how["max_new_tokens"], kernel))
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
    if model.device.type == "cuda" and model.dtype.itemsize == 2:
        for module, kernel in (("flash_attn_interface", 3), ("flash_attn", 2)):
            if importlib.util.find_spec(module):
                return f"flash_attention_{kernel}"
    return "sdpa"


def size(model, prompts: list[list[int]], new: int, kernel: str) -> dict:
    """How large a cache to ask for. Left alone it takes nearly all memory, and sdpa looks at every
    token in the cache for each one that it computes."""
    block = 32 if kernel == "sdpa" else 256  # what paged flash attention wants
    blocks = -(-(max(map(len, prompts)) + new) // block) + 1  # of the longest row
    heads, layers = model.config.num_key_value_heads, model.config.num_hidden_layers
    bytes_a_row = blocks * block * 2 * layers * heads * head_size(model.config)
    rows = min(ROWS, len(prompts))
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        rows = max(1, min(rows, int(free * 0.4 / (bytes_a_row * model.dtype.itemsize))))
    return {
        "block_size": block,
        "num_blocks": rows * blocks,
        "max_batch_tokens": min(QUERIES, max(256, sum(map(len, prompts)))),
        "max_requests_per_batch": rows,
        "allow_block_sharing": False,
    }
