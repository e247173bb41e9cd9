"""Finds and checks a model's folder, configuration and tokenizer.

They may be a stranger's: what transformers would load besides them and the weights is refused."""

import json
import os
import string
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llm_demo.core.attention import LongRope, rope_type
from llm_demo.core.errors import UserError
from llm_demo.data.sources import LFS
from llm_demo.job.costs import experts_of, mixed_blocks, shared_width
from llm_demo.job.fp8_files import why_unread
from llm_demo.job.process import regular
from llm_demo.job.text import words_of
from llm_demo.job.weights_files import open_weights, refuse_deepspeed

# Decoders made of embedding, blocks, norm and head, with nothing between them. Others scale the
# embedding or cap the logits outside their modules (Gemma, Granite, Cohere): this code would
# silently train them wrongly.
EXPERTS = ("qwen2_moe", "qwen3_moe", "deepseek_v3")
FAMILIES = ("qwen3", "qwen2", "llama", "mistral", *EXPERTS)
COMPARE = "compare it with the published file"
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # of a model's folder


def find_model(name: str, config_in: str | None = None) -> Path:
    """The local folder of a model: the path itself, or a hub id downloaded to the hub's cache.

    config_in: a folder for config.json, if that is all one needs. In the cache it would look like a
    model without weights."""
    folder = Path(name).expanduser()
    if (folder / "cmd.sh").is_file() and (folder / "checkpoints").is_dir():
        raise UserError(
            f"{name} is the folder of a run, not a model: export it first with "
            f"python -m llm_demo.export {name} OUT"
        )
    if (folder / "config.json").is_file():
        refuse_adapter(name, folder)
        refuse_pointers(folder)
        return folder
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{name} holds an adapter, not a model: export its run with python -m llm_demo.export "
            f"--merge, or train on from it: --model_name_or_path BASE --adapter {name}"
        )
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        refuse_deepspeed(folder)
        raise UserError(f"no model at {name}: it is neither a folder with config.json nor a hub id")
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    options = {"allow_patterns": FILES}
    if config_in:
        options = {"allow_patterns": ["config.json", "adapter_config.json"], "local_dir": config_in}
    try:
        if config_in and isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
            folder = Path(cached).parent
        else:
            folder = Path(snapshot_download(name, **options))
    except Exception as e:  # of the hub's client, or of what it connects by
        reason = (str(e).strip().splitlines() or [repr(e)])[0]
        hub = "the hub at HF_ENDPOINT" if os.environ.get("HF_ENDPOINT") else "the hub"
        raise UserError(
            f"no model at {name}: there is no such folder, and {hub} says: {reason}"
        ) from e
    refuse_adapter(name, folder)
    return folder


def refuse_adapter(name: str, folder: Path) -> None:
    """Raise UserError if a model's folder also holds an adapter. transformers would add it to the
    model, and peft before 0.20 runs a module that the adapter's configuration names. Training
    would ignore it."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{name} holds both a model and an adapter (adapter_config.json), so what to load is "
            "not clear: merge them into one model, or move the adapter's files away"
        )


def read_config(folder: Path):
    """transformers' configuration of a folder. Raises ValueError if it makes transformers load
    what lies elsewhere, and whatever the libraries raise that check it."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for name in ("_attn_implementation", "_experts_implementation"):
        if "/" in str(value := getattr(config, name, None)):
            raise ValueError(f"{name} {value} is a kernel of the hub, which is code: remove it")
    if getattr(config, "transformers_weights", None):
        raise ValueError("transformers_weights: weights must be model.safetensors: remove it")
    return config


def refuse_pointers(folder: Path) -> None:
    """Raise UserError if a file is a Git LFS pointer, which an incomplete download leaves."""
    for file in sorted(f for pattern in FILES for f in folder.glob(pattern)):
        if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(LFS):
            raise UserError(
                f"{file} is a Git LFS pointer, not the file: run git lfs pull in {folder}"
            )


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads")  # fmt: skip
# where a family has them, and not all of their models
FURTHER_SIZES = ("max_position_embeddings", "head_dim", "moe_intermediate_size", "kv_lora_rank",
                 "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # fmt: skip
# rotary types that do not depend on max_position_embeddings: with random weights rows may be longer
ANY_LENGTH = ("default", "linear", "llama3")
LARGEST = 1 << 24  # of the sizes
MOST_BLOCKS = 1 << 12


def load_config(folder: Path, max_len: int, weights_elsewhere: bool = False):
    """The model's configuration, of weights as they are read: not quantised. weights_elsewhere:
    this folder has none. Raises UserError if this project can't train it exactly."""
    try:
        raw, blocks = (folder / "config.json").read_text(encoding="utf-8"), "num_hidden_layers"
        for problem in odd_sizes({blocks: json.loads(raw).get(blocks)}):
            raise ValueError(problem)  # transformers makes a list of them
        config = read_config(folder)
    except Exception as e:  # several libraries check it, each with exceptions of its own
        raise UserError(f"{folder}/config.json: {words_of(e)}; {COMPARE}") from e
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{folder}: model_type {config.model_type} is not one of {', '.join(FAMILIES)}"
        )
    if getattr(config, "attention_dropout", 0):
        config.attention_dropout = 0.0  # fine-tuning uses none; pretrained configurations have 0
    for problem in problems_of(config):
        raise UserError(f"{folder}/config.json: {problem}")
    vars(config).pop("quantization_config", None)
    limit = position_limit(config)
    if limit and max_len > limit:
        if weights_elsewhere or open_weights(folder) or rope_type(config) not in ANY_LENGTH:
            raise UserError(f"--seq_len {max_len}: {folder} has positions up to {limit}")
    return config


def odd_sizes(config: dict) -> Iterator[str]:
    """What is wrong with the sizes that a configuration has."""
    for name in (*SIZES, *FURTHER_SIZES):
        value, most = config.get(name), MOST_BLOCKS if name == "num_hidden_layers" else LARGEST
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            yield f"{name} {str(value)[:80]} is not a positive number of at most {most:,}"


def problems_of(config) -> Iterator[str]:
    """Why a configuration of a known family can't be trained exactly, if so. Only the first is
    sure: it may be the cause of the next."""
    yield from odd_sizes({name: getattr(config, name, None) for name in (*SIZES, *FURTHER_SIZES)})
    for name in SIZES:
        if getattr(config, name, None) is None:
            yield f"{name} is missing"
    for name in ("rms_norm_eps", "initializer_range"):
        if not isinstance(value := getattr(config, name, 0), int | float) or not 0 <= value <= 1:
            yield f"{name} {value} is not a number from 0 to 1"
    if config.num_attention_heads % config.num_key_value_heads:
        yield "num_attention_heads must be a multiple of num_key_value_heads"
    if str(config.hidden_act) not in ACT2FN:
        yield f"hidden_act {config.hidden_act} is unknown"
    if problem := why_unread(getattr(config, "quantization_config", None)):
        yield problem
    if is_mixture(config):
        yield from problems_of_experts(config)
    yield from problems_of_rope(config)


def problems_of_experts(config) -> Iterator[str]:
    n, chosen = experts_of(config), config.num_experts_per_tok
    if n < 1 or chosen is None or not 1 <= chosen <= n:
        yield f"num_experts_per_tok {chosen} does not choose from {n} experts"
    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        if config.decoder_sparse_step < 1:
            yield f"decoder_sparse_step {config.decoder_sparse_step} is not positive"
        if not any(mixed_blocks(config)):
            yield "mlp_only_layers and decoder_sparse_step leave no block with experts"
        width = shared_width(config)
        if width < 1 and config.model_type == "qwen2_moe":
            yield f"shared_expert_intermediate_size {width}: at least 1 is supported"
        return
    # transformers reads none of these, and computes as if they were so
    known = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    for name, value in known.items():
        if getattr(config, name, value) != value:
            yield f"{name} {getattr(config, name)} is not supported, only {value}"
    if config.num_key_value_heads != config.num_attention_heads:
        yield "num_key_value_heads differs from num_attention_heads in latent attention"
    if config.n_shared_experts < 1:
        yield f"n_shared_experts {config.n_shared_experts}: at least 1 is supported"
    if config.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim {config.qk_rope_head_dim} is odd, and can't be rotated"
    if config.v_head_dim is None:
        yield "v_head_dim is missing"
    dense, blocks = config.first_k_dense_replace, config.num_hidden_layers
    if dense is None or dense < 0:
        yield f"first_k_dense_replace {dense} is not a number of blocks"
    if not any(mixed_blocks(config)):
        yield f"first_k_dense_replace {dense} leaves none of {blocks} blocks with experts"
    groups, kept = config.n_group, config.topk_group
    if not groups or n % groups or n // groups < 2:
        yield f"n_group {groups} does not divide {n} experts into groups of at least 2"
    if not kept or kept > groups or kept * (n // groups) < chosen:
        yield f"topk_group {kept} of n_group {groups} has too few experts to choose {chosen} from"


def problems_of_rope(config) -> Iterator[str]:
    """What is wrong with rope_parameters, as far as transformers would not say so itself."""
    rope, known = getattr(config, "rope_parameters", None), ("default", *ROPE_INIT_FUNCTIONS)
    if not isinstance(rope, dict):
        yield f"rope_parameters {rope} is not an object"
    if (kind := rope.get("rope_type", "default")) not in known:
        yield f"the rotary type {kind} is not one of {', '.join(known)}"
    for name in ("factor", "original_max_position_embeddings"):
        value = rope.get(name)
        if value is not None and not (isinstance(value, int | float) and 1 <= value < LARGEST):
            yield f"{name} {value} in rope_parameters is not a number from 1 to {LARGEST:,}"
    if kind == "longrope":
        try:
            LongRope(config)
        except (KeyError, TypeError, ValueError, RuntimeError) as e:
            yield f"longrope in rope_parameters: {e}"


def is_mixture(config) -> bool:
    """Whether the model is a mixture of experts."""
    return config.model_type in EXPERTS


def position_limit(config) -> int | None:
    """The longest row that a model's positions are made for, if it says so. With YaRN that is the
    length it was trained on, times the factor, which model cards tell people to add
    (https://huggingface.co/Qwen/Qwen3-8B#processing-long-texts)."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if limit and rope_type(config) == "yarn" and rope.get("factor"):
        return max(limit, int(rope.get("original_max_position_embeddings", 0) * rope["factor"]))
    return limit


def window_of(config) -> int | None:
    """The sliding window in tokens, if any of the model's layers uses one."""
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    return getattr(config, "sliding_window", None)


def without_window(config, longest: int) -> None:
    """Turn off the sliding window, which changes nothing if no document is longer. Raises UserError
    if one is."""
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


# Text that tokenizers with other rules split or normalise differently.
PROBE = (
    "It's we'LL; don't 7 42 100 1234 2024 1234567 3.14 1e-5 snake_case camelCase HTTPServer x==1 "
    "(foo).bar  two   three\t tab\n\nline \n  indented\r\n#!? ...\n\n\n na\u00efve nai\u0308ve "
    "\ufb01\uff21 Привет 你好，世界 こんにちは 한국어 مرحبا नमस्ते 👍🏽 — <b>end</b>  "
)


def load_tokenizer(name: str, chat_template: str | None = None):
    """The tokenizer of a folder or hub id, with the ids of its tokenizer.json. chat_template: a
    file that replaces its own template. Raises UserError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        refuse_pointers(folder)
    else:
        folder = find_model(name)
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    # Without any of them transformers creates an empty tokenizer from config.json.
    if not any((folder / file).is_file() for file in files):
        raise UserError(f"no tokenizer in {folder}: name one with --tokenizer_name_or_path")
    whole = folder / "tokenizer.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # transformers makes the rules of other classes itself, and ignores those of the file
        if type(tokenizer) is not PreTrainedTokenizerFast and whole.is_file():
            if not same_ids(file := Tokenizer.from_file(str(whole)), tokenizer):
                tokens = tokenizer.special_tokens_map.items()  # some are the class's defaults
                tokens = {name: text for name, text in tokens if file.token_to_id(text) is not None}
                tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, **tokens)
    except Exception as e:  # several libraries read it, each with exceptions of its own
        raise UserError(f"{folder}{problem_of_tokenizer(folder, e)}") from e
    if not isinstance(limit := tokenizer.model_max_length, (int, float)):
        raise UserError(f"{folder}/tokenizer_config.json: model_max_length {limit!r} is no number")
    if chat_template:
        tokenizer.chat_template = read_chat_template(Path(chat_template), tokenizer)
    elif tokenizer.chat_template:
        try:
            if not isinstance(template := tokenizer.get_chat_template(), str):
                raise TypeError(f"it is {template!r}")
            try_template(tokenizer, template)
        except (TemplateSyntaxError, TypeError, ValueError) as e:
            raise UserError(
                f"{folder}: its chat template can't be used: {words_of(e)}; set another with "
                "--chat_template"
            ) from e
    return tokenizer


def problem_of_tokenizer(folder: Path, error: Exception) -> str:
    """Why a tokenizer can't be read, to follow the name of its folder."""
    if (folder / "tokenizer.json").is_file():
        try:
            Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as of_file:  # says more
            error = of_file
    elif (folder / "tokenizer.model").is_file():
        return (
            f" has no tokenizer.json, and its tokenizer.model can't be read ({words_of(error)}): "
            "pip install sentencepiece protobuf, then write it with python -c 'from transformers "
            "import AutoTokenizer as A; "
            f'A.from_pretrained("{folder}").save_pretrained("{folder}")\''
        )
    return (
        f": the tokenizer can't be read: {words_of(error)}; compare its files with the published "
        "ones"
    )


def same_ids(file: Tokenizer, tokenizer) -> bool:
    """Whether a tokenizer from transformers gives the ids of its tokenizer.json, also next to the
    first added tokens. Some classes are not made from that file."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = [token.content for _, token in sorted(file.get_added_tokens_decoder().items())[:8]]
    text = PROBE.join(["", *added, ""])
    return isinstance(backend, Tokenizer) and (
        backend.encode(text, add_special_tokens=False).ids
        == file.encode(text, add_special_tokens=False).ids
    )


def fix_date(tokenizer, day: str) -> bool:
    """If the chat template prints today's date (strftime_now), let it print this one, YYYY-MM-DD:
    its text then begins with a function of that name, so that what depends on the template depends
    on the date. Returns whether it does. `describe_model` saves the template as it was."""
    plain = tokenizer.chat_template or ""
    templates = plain if isinstance(plain, dict) else {"": plain}
    if not any("strftime_now" in template for template in templates.values()):
        return False
    printed, text = date.fromisoformat(day), "format.replace('%%', '\\0')"
    for code in [flag + letter for letter in string.ascii_letters for flag in ("%", "%-")]:
        if any(code in template for template in templates.values()):
            text += f".replace('{code}', {printed.strftime(code)!r})"
    macro = "{% macro strftime_now(format) %}{{ " + text + ".replace('\\0', '%') }}{% endmacro %}\n"
    dated = {name: macro + template for name, template in templates.items()}
    tokenizer.undated_template = plain
    tokenizer.chat_template = dated if isinstance(plain, dict) else dated[""]
    return True


def read_chat_template(file: Path, tokenizer) -> str:
    """The source of a Jinja chat template. Raises UserError if it can't be read or compiled."""
    try:
        template = regular(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--chat_template {file}: {getattr(e, 'strerror', None) or e}") from None
    if "messages" not in template:
        raise UserError(f"--chat_template {file}: not a chat template: it never uses messages")
    try:
        try_template(tokenizer, template)
    except TemplateSyntaxError as e:
        raise UserError(f"--chat_template {file}:{e.lineno}: {e.message}") from None
    return template


def try_template(tokenizer, template: str) -> None:
    """Raise TemplateSyntaxError for a template that does not compile."""
    question = [{"role": "user", "content": "?"}]
    try:
        tokenizer.apply_chat_template(question, chat_template=template, tokenize=False)
    except TemplateSyntaxError:
        raise
    except Exception:  # it may reject this conversation but accept the data's
        pass


def length_dependent_rope(config) -> bool:
    """Whether a document's frequencies depend on the longest one of its batch."""
    return rope_type(config) in ("longrope", "dynamic")
