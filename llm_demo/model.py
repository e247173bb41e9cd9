"""A Hugging Face decoder, made or loaded block by block: no process holds what it won't keep."""

import contextlib
import json
import math
import zlib
from pathlib import Path

import torch
from accelerate import init_empty_weights
from jinja2 import TemplateSyntaxError
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llm_demo.attention import document_lengths  # this module registers what skeleton asks for
from llm_demo.errors import UserError
from llm_demo.loss import cross_entropy_sum, next_tokens, score
from llm_demo.progress import watched

# Decoders made of embedding, blocks, norm and head, with nothing between them. Others scale the
# embedding or cap the logits outside their modules (Gemma, Granite, Cohere): trained through the
# code below they would learn something else, silently.
FAMILIES = ("qwen3", "qwen2", "llama", "mistral")


def find_model(name: str) -> Path:
    """The local folder of a model: the path itself, or a hub id downloaded to the hub's cache."""
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"no model at {name}: neither a folder with config.json nor a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        files = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        return Path(snapshot_download(name, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        reason = str(e).strip().splitlines()[0]
        raise UserError(
            f"no model at {name}: no such folder, and not from the hub: {reason}"
        ) from e


def load_config(folder: Path, max_len: int):
    """The model's configuration, checked against what this project can train exactly."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
        raise UserError(f"{folder}/config.json: {str(e).strip().splitlines()[0]}") from e
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{folder}: model_type {config.model_type} is not one of {', '.join(FAMILIES)}"
        )
    if getattr(config, "attention_dropout", 0):
        config.attention_dropout = 0.0  # fine-tuning wants none; pretrained configurations have 0
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(f"{folder}: num_attention_heads must be a multiple of num_key_value_heads")
    if rope_type(config) == "longrope":
        try:
            LongRope(config)
        except (KeyError, TypeError, ValueError, RuntimeError) as e:
            raise UserError(f"{folder}/config.json: longrope in rope_parameters: {e}") from e
    most = position_limit(config)
    if most and max_len > most:
        raise UserError(f"--seq_len {max_len}: {folder} knows positions up to {most} only")
    return config


def position_limit(config) -> int | None:
    return getattr(config, "max_position_embeddings", None)


def window_of(config) -> int | None:
    """The sliding window in tokens, if any of the model's layers uses one."""
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    return getattr(config, "sliding_window", None)


def without_window(config, longest: int) -> None:
    """Turn the sliding window off, which changes nothing if no document is longer than it. Raises
    UserError if one is."""
    window = window_of(config)
    if window is None:
        return
    if longest > window:
        raise UserError(
            f"this model attends to the last {window} tokens only, but the longest document has "
            f"{longest}: sliding windows are not supported, so set --seq_len {window}"
        )
    config.sliding_window = None
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"] * config.num_hidden_layers


def load_tokenizer(name: str, chat_template: str | None = None):
    """The tokenizer of a folder or hub id; chat_template: a file that replaces its own template."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = find_model(name)
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    # Without any of them transformers makes an empty tokenizer from config.json.
    if not any((folder / file).is_file() for file in files):
        raise UserError(f"no tokenizer in {folder}: name one by --tokenizer_name_or_path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as e:
        raise UserError(f"{folder}: {str(e).strip().splitlines()[0]}") from e
    if chat_template:
        tokenizer.chat_template = read_chat_template(Path(chat_template), tokenizer)
    return tokenizer


def read_chat_template(file: Path, tokenizer) -> str:
    """The source of a Jinja chat template. Raises UserError if it can't be read or compiled."""
    try:
        template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--chat_template {file}: {getattr(e, 'strerror', None) or e}") from None
    if "messages" not in template:
        raise UserError(f"--chat_template {file}: not a chat template: it never uses messages")
    try:
        question = [{"role": "user", "content": "?"}]
        tokenizer.apply_chat_template(question, chat_template=template, tokenize=False)
    except TemplateSyntaxError as e:
        raise UserError(f"--chat_template {file}:{e.lineno}: {e.message}") from None
    except Exception:  # it may refuse this conversation, yet accept those in the data
        pass
    return template


class Weights:
    """A folder's safetensors: names and shapes, and any tensor, or some rows of it, when wanted.

    Files are mapped for one read at a time: mapped pages count as this process's memory for as long
    as they stay so, and a rank should hold no more of a file than it keeps."""

    def __init__(self, folder: Path, files: dict[str, Path]):
        self.folder, self.files, self.shapes = folder, files, {}
        self.bytes = sum(file.stat().st_size for file in set(files.values()))
        self.bytes_read = 0
        for file in sorted(set(files.values())):
            with self._open(file) as opened:
                for name in (n for n, f in files.items() if f == file):
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows start to stop of a tensor, in the file's dtype, on the CPU. Raises UserError."""
        with self._open(self.files[name]) as opened:
            found = opened.get_slice(name)[start:stop]
        self.bytes_read += found.nbytes
        return found

    @contextlib.contextmanager
    def _open(self, file: Path):
        try:
            with safe_open(file, "pt") as opened:
                yield opened
        except (OSError, SafetensorError) as e:
            raise UserError(f"{file}: {e}") from e


def open_weights(folder: Path) -> Weights | None:
    """The folder's weights; None if it holds none. Raises UserError for other formats."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            files = {n: folder / f for n, f in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{index} is no index of safetensors: {e!r}") from e
        return Weights(folder, files)
    if single.is_file():
        try:
            with safe_open(single, "pt") as f:
                return Weights(folder, dict.fromkeys(f.keys(), single))
        except (OSError, SafetensorError) as e:
            raise UserError(f"{single}: {e}") from e
    if other := [*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.safetensors")]:
        raise UserError(
            f"{folder} holds {other[0].name}; weights must be model.safetensors (or shards with "
            "model.safetensors.index.json): save them again with save_pretrained"
        )
    return None


def loading(weights: Weights | None, shares: int):
    """A context manager that shows the progress of reading one of so many equal shares."""
    if weights is None:
        return contextlib.nullcontext()
    share = weights.bytes / shares
    return watched("loading weights", share, lambda: min(weights.bytes_read, share))


def skeleton(config, attn_impl: str, weights: Weights | None = None) -> PreTrainedModel:
    """The decoder with its fp32 parameters on the meta device; buffers (rotary frequencies) are
    real. `materialise` gives parts of it their weights.

    weights: where they will come from; UserError names a tensor that is missing there, has another
    shape, or that the model does not have."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=f"packed_{attn_impl}")
    if rope_type(config) == "longrope":
        model.model.rotary_emb = LongRope(config)
    model.float()
    if model.lm_head.bias is not None:
        raise UserError("a head with a bias is not supported")
    if config.tie_word_embeddings:  # meta parameters are made apart
        model.lm_head.weight = model.model.embed_tokens.weight
    if weights:
        wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        needed = {name for name, _ in model.named_parameters()}
        if missing := sorted(needed - weights.shapes.keys()):
            raise UserError(f"{weights.folder}: the weights lack {missing[0]}")
        for name, shape in sorted(weights.shapes.items()):
            # a tied head or the rotary frequencies may lie there too: old files have them
            if name not in wanted and not name.endswith("rotary_emb.inv_freq"):
                raise UserError(f"{weights.folder}: {name} is no weight of this model's")
            if shape != wanted.get(name, shape):
                raise UserError(
                    f"{weights.folder}: {name} is {list(shape)} there, {list(wanted[name])} by "
                    "config.json"
                )
    return model.train()


def materialise(
    model: PreTrainedModel, name: str, weights: Weights | None, seed: int, device: torch.device
) -> nn.Module:
    """Give the submodule `name` of a skeleton its weights, on `device`; returns it."""
    allocate(model.get_submodule(name), device)
    return fill(model, name, weights, seed)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory, a sharded one that of this rank's share; buffers move."""
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


@torch.no_grad()
def fill(model: PreTrainedModel, name: str, weights: Weights | None, seed: int) -> nn.Module:
    """Give the parameters of the submodule `name` their values, of a sharded one this rank's rows,
    and their Hugging Face name, `hf_name`.

    From `weights`, or at random: by the model's own rule, each module from a seed of its name, so
    that any process that makes a block makes the same one; rounded to bf16, as published weights
    are, so that runs in every dtype start alike."""
    module = model.get_submodule(name)
    for path, part in module.named_modules(prefix=name):
        random = _random(model, part, f"{seed}:{path}") if weights is None else {}
        for key, p in part.named_parameters(recurse=False):
            p.hf_name = f"{path}.{key}"
            local, start = p, 0
            if isinstance(p, DTensor):
                local = p.to_local()
                start = p.__create_chunk_list__()[0].offsets[0]  # as for a checkpoint of it
            rows = start, start + len(local)
            # to the device first: copy_ would widen it in the host's memory
            found = random[key][slice(*rows)] if random else weights.read(p.hf_name, *rows)
            local.copy_(found.to(local.device))
    return module


def _random(model: PreTrainedModel, part: nn.Module, seed: str) -> dict[str, torch.Tensor]:
    """A module's own parameters, not its submodules', whole, at random."""
    params = dict(part.named_parameters(recurse=False))
    if not params:
        return {}
    device = next(iter(params.values())).device
    for key, p in params.items():
        part._parameters[key] = nn.Parameter(torch.empty(p.shape, device=device))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(seed.encode()))
        model._init_weights(part)
    made = {key: part._parameters[key].bfloat16().float() for key in params}
    part._parameters.update(params)
    return made


def rope_type(config) -> str:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


def length_dependent_rope(config) -> str | None:
    """The type of the model's rotary embedding if transformers picks its frequencies by the longest
    document of a batch: with others beside it, a document may get other ones than alone."""
    kind = rope_type(config)
    return kind if kind in ("longrope", "dynamic") else None


class LongRope(nn.Module):
    """The rotary embedding of type longrope, with the frequencies of each document's own length.

    transformers has one choice for a whole batch. Its other type that depends on lengths, dynamic,
    needs none: up to the model's max_position_embeddings its frequencies stay the same."""

    def __init__(self, config):
        super().__init__()
        self.short_up_to = config.rope_parameters["original_max_position_embeddings"]
        frequencies = ROPE_INIT_FUNCTIONS["longrope"]
        for name, length in (("short", self.short_up_to), ("long", self.short_up_to + 1)):
            inv_freq, self.scaling = frequencies(config, torch.device("cpu"), seq_len=length)
            self.register_buffer(name, inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, hidden, position_ids, cu_seqlens):
        """(cos, sin) in hidden's dtype, each [B, S, head_dim]. cu_seqlens: int32 [D+1]."""
        lengths = document_lengths(cu_seqlens, tuple(position_ids.shape))
        is_long = (lengths > self.short_up_to)[..., None]
        angles = position_ids[..., None].float() * torch.where(is_long, self.long, self.short)
        angles = torch.cat((angles, angles), dim=-1)
        return tuple((f(angles) * self.scaling).to(hidden.dtype) for f in (torch.cos, torch.sin))


def rotary_tables(rotary: nn.Module, hidden, position_ids, documents) -> tuple:
    """(cos, sin) for packed documents."""
    more = (documents.cu_seqlens,) if isinstance(rotary, LongRope) else ()
    return rotary(hidden, position_ids, *more)


class Blocks(nn.Module):
    """Consecutive decoder blocks: what is compiled, sharded or sent to a stage as one unit.

    Several of 16M parameters each make a better unit than one: at small batches the host, launching
    kernels and running hooks, is slower than the GPU. checkpointing: recompute each block's
    activations in the backward."""

    def __init__(self, blocks: list[nn.Module], checkpointing: bool):
        super().__init__()
        self.blocks, self.checkpointing = nn.ModuleList(blocks), checkpointing

    def forward(self, hidden, position_embeddings, position_ids, documents):
        """hidden [B, S, d] -> the same; position_embeddings: rotary (cos, sin)."""
        layout = {
            "position_embeddings": position_embeddings,
            "position_ids": position_ids,
            "documents": documents,
            "use_cache": False,
        }
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                # no dropout, so no RNG state to keep
                hidden = checkpoint(
                    block, hidden, use_reentrant=False, preserve_rng_state=False, **layout
                )
            else:
                hidden = block(hidden, **layout)
        return hidden


def unit_sizes(config, n_blocks: int, blocks_per_unit: int) -> list[int]:
    """Blocks of each unit; 0 blocks_per_unit: as many as make about 64M parameters, 4 at most."""
    block, _ = flops_per_token(config, 0)
    size = blocks_per_unit or max(1, min(4, round(64e6 / (block / 6))))
    units = -(-n_blocks // size)
    return [n_blocks // units + (u < n_blocks % units) for u in range(units)]


class Tail(nn.Module):
    """Last norm, head and loss. One module, because the head's weight is whole only in the forward
    of the module that it is sharded with."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module, compiled: bool):
        super().__init__()
        self.norm, self.lm_head, self.compiled = norm, lm_head, compiled

    def forward(self, hidden, index, targets=None, answers=None):
        hidden, weight = self.norm(hidden), self.lm_head.weight
        if targets is None:
            return next_tokens(hidden, weight, index)
        if answers is not None:
            return score(hidden, weight, index, targets, answers, self.compiled)
        return cross_entropy_sum(hidden, weight, index, targets, self.compiled)


class DecoderLoss(nn.Module):
    """The whole decoder, its blocks in units, with the loss inside its forward."""

    def __init__(self, lm: PreTrainedModel, units: list[Blocks], compiled: bool = False):
        super().__init__()
        self.embed_tokens, self.units = lm.model.embed_tokens, nn.ModuleList(units)
        self.tail, self.rotary = Tail(lm.model.norm, lm.lm_head, compiled), lm.model.rotary_emb

    def forward(self, input_ids, position_ids, documents, index, targets=None, answers=None):
        """Loss sum over the flat positions `index` with `targets` [n], with `answers` [n] what
        loss.score returns, or without targets the likeliest next tokens there. input_ids,
        position_ids: int64 [B, S]."""
        hidden = self.embed_tokens(input_ids)
        rotary = rotary_tables(self.rotary, hidden, position_ids, documents)
        for unit in self.units:
            hidden = unit(hidden, rotary, position_ids, documents)
        return self.tail(hidden, index, targets, answers)


def flops_per_token(config, seq_len: int) -> tuple[float, float]:
    """Training FLOPs per token of (one block, the head): 6 per weight of a matrix product, and
    12·heads·head_dim·S of a block for attention, counted in full rather than its causal half, as
    in the PaLM paper's appendix B. Their sum over blocks and head is what MFU divides by."""
    d, inner = config.hidden_size, config.intermediate_size
    heads, head_dim = config.num_attention_heads, head_size(config)
    attention = d * head_dim * (2 * heads + 2 * config.num_key_value_heads)
    block = 6 * (attention + 3 * d * inner) + 12 * heads * head_dim * seq_len
    return block, 6 * d * config.vocab_size


def head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def param_count(model: nn.Module) -> int:
    return sum(math.prod(p.shape) for p in {id(p): p for p in model.parameters()}.values())
