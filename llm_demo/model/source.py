"""Finds and checks a model's folder, configuration and tokenizer.

They may be a stranger's: what transformers would load besides them and the weights is refused."""

import copy
import json
import os
import string
from datetime import date
from pathlib import Path

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from llm_demo.core.attention import rope_of, rope_type
from llm_demo.core.errors import UserError
from llm_demo.data.codec import closes_reasoning, has_variable, template_of, writes_empty_blocks
from llm_demo.flags.parsing import template_variables
from llm_demo.machine.process import regular
from llm_demo.machine.text import blame, first_line
from llm_demo.model.check_config import ANY_LENGTH, problems_of
from llm_demo.model.families import family_name, text_part
from llm_demo.model.local_model import FILES, find_here, refuse_adapter, refuse_pointers
from llm_demo.model.weights_files import open_weights

MOST_BLOCKS = 1 << 12
# Without any of them transformers creates an empty tokenizer from config.json.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def find_model(
    name: str, config_in: str | None = None, revision: str | None = None, files=FILES
) -> Path:
    """The local folder of a model: the path itself, or a hub id downloaded to the hub's cache.

    config_in: a folder for config.json, if that is all one needs. In the cache it would look like a
    model without weights. revision, files: of a hub id, what to download."""
    if folder := find_here(name):
        return folder
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json") if config_in else None
        if isinstance(cached, str):
            folder = Path(cached).parent
        elif config_in:
            only = ["config.json", "adapter_config.json"]
            folder = Path(snapshot_download(name, allow_patterns=only, local_dir=config_in))
        else:
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as e:  # of the hub's client, or of what it connects by
        hub = "the hub at HF_ENDPOINT" if os.environ.get("HF_ENDPOINT") else "the hub"
        raise UserError(
            f"no model at {name}: there is no such folder, and {hub} says: {first_line(e)}"
        ) from e
    refuse_adapter(name, folder)
    return folder


def read_config(folder: Path):
    """transformers' configuration of a folder. Raises ValueError if it makes transformers load
    what lies elsewhere, and whatever the libraries raise that check it."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for name in ("_attn_implementation", "_experts_implementation"):
        value = str(getattr(config, name, None))
        if "/" in value:
            raise ValueError(f"{name} {value} is a kernel of the hub, which is code: remove it")
    if getattr(config, "transformers_weights", None):
        raise ValueError("transformers_weights: weights must be model.safetensors: remove it")
    return config


def load_config(folder: Path, max_len: int, weights_elsewhere: bool = False):
    """The model's configuration, of weights as they are read: not quantised. weights_elsewhere:
    this folder has none. Raises UserError if this project can't train it exactly."""
    with blame(folder / "config.json"):
        raw = json.loads((folder / "config.json").read_text("utf-8"))
        blocks = (raw.get("text_config") or raw).get("num_hidden_layers")
        # transformers makes a list of them
        if blocks is not None and blocks not in range(1, MOST_BLOCKS):
            raise ValueError(f"num_hidden_layers {blocks!r} is not from 1 to {MOST_BLOCKS}")
        config = text_part(read_config(folder))
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{family_name(config)} is no decoder that transformers knows")
        for problem in problems_of(config):
            raise ValueError(problem)
    vars(config).pop("quantization_config", None)
    limit = position_limit(config)
    if limit and max_len > limit:
        if weights_elsewhere or open_weights(folder) or rope_type(config) not in ANY_LENGTH:
            raise UserError(f"--seq_len {max_len}: {folder} has positions up to {limit}")
    return config


# Text that tokenizers with other rules split or normalise differently.
PROBE = (
    "It's we'LL; don't 7 42 100 1234 2024 1234567 3.14 1e-5 snake_case camelCase HTTPServer x==1 "
    "(foo).bar  two   three\t tab\n\nline \n  indented\r\n#!? ...\n\n\n na\u00efve nai\u0308ve "
    "\ufb01\uff21 Привет 你好，世界 こんにちは 한국어 مرحبا नमस्ते 👍🏽 — <b>end</b>  "
)


def load_tokenizer(name: str, chat_template: str | None = None):
    """The tokenizer of a folder or hub id, with the ids of its tokenizer.json. chat_template: a
    file that replaces its own template. Raises UserError."""
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        refuse_pointers(folder)
    else:
        folder = find_model(name)
    if not any((folder / file).is_file() for file in TOKENIZERS):
        raise UserError(
            f"no tokenizer in {folder}: copy its tokenizer.json there, or train with "
            "--tokenizer_name_or_path, which names another"
        )
    with blame(folder):
        tokenizer = read_tokenizer(folder)
    if chat_template:
        with blame(f"--chat_template {chat_template}"):
            tokenizer.chat_template = regular(Path(chat_template)).read_text("utf-8")
            if "messages" not in tokenizer.chat_template:
                raise ValueError("not a chat template: it never uses messages")
            try_template(tokenizer)
    elif tokenizer.chat_template:
        with blame(f"{folder}: chat template (--chat_template sets another)"):
            try_template(tokenizer)
    return tokenizer


def read_tokenizer(folder: Path):
    """As load_tokenizer, with the folder's own template. Raises what libraries raise."""
    file = folder / "tokenizer.json"
    own = None
    if file.is_file():
        with blame(file):
            own = Tokenizer.from_file(str(file))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not isinstance(tokenizer.model_max_length, int | float):
        raise ValueError(f"model_max_length {tokenizer.model_max_length!r} is no number")
    # transformers makes the rules of other classes itself, and ignores those of the file
    if own is None or type(tokenizer) is PreTrainedTokenizerFast or same_ids(own, tokenizer):
        return tokenizer
    tokens = tokenizer.special_tokens_map  # some are the class's defaults
    tokens = {name: text for name, text in tokens.items() if own.token_to_id(text) is not None}
    return PreTrainedTokenizerFast.from_pretrained(folder, **tokens)


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


def set_variables(tokenizer, text: str | None, learn_reasoning: bool = True) -> list[str]:
    """Set variables of the chat template, a JSON object as text. The template then begins with them
    as defaults, so whatever renders it has them: labels, samples, an export and its server.

    learn_reasoning False: also the variable that asks for an answer without reasoning, if the
    template has one. Returns lines for the log. Raises UserError for a variable that the template
    does not have."""
    flag = "--chat_template_kwargs"
    variables = template_variables(text, flag)
    for name in variables:
        if not has_variable(template_of(tokenizer), name):
            raise UserError(f"{flag}: the chat template has no variable {name!r}: remove it")
    lines = []
    if not learn_reasoning and tokenizer.chat_template:
        added = closes_reasoning(tokenizer, variables)
        if added is None and writes_empty_blocks(tokenizer):
            lines.append(
                "chat template: it writes an empty <think> block before answers without reasoning, "
                "but has no variable that puts the block into the prompt, so the model is asked "
                "otherwise than it is trained: set a template that has one with --chat_template"
            )
        variables |= added or {}
    defaults = ""
    for name, value in variables.items():
        lines.append(f"chat template: {name} is {as_jinja(value)}")
        setting = f"{{% set {name} = {as_jinja(value)} %}}"
        defaults += f"{{% if {name} is not defined %}}{setting}{{% endif %}}\n"
    if variables:
        begin_templates(tokenizer, defaults)
    return lines


def begin_templates(tokenizer, text: str) -> None:
    """Let each chat template of a tokenizer begin with this text."""
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        tokenizer.chat_template = {name: text + own for name, own in templates.items()}
    else:
        tokenizer.chat_template = text + templates


def as_jinja(value) -> str:
    """A JSON value as Jinja writes it, which has no null within lists and objects."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def with_date(tokenizer, day: str):
    """If the chat template prints today's date (strftime_now), a copy of the tokenizer whose
    template prints this one, YYYY-MM-DD: its text then begins with a function of that name, so that
    what depends on the template depends on the date. `describe_model` saves the template as it was.
    If it prints none: the tokenizer itself."""
    template = template_of(tokenizer)
    if "strftime_now" not in template:
        return tokenizer
    printed, text = date.fromisoformat(day), "format.replace('%%', '\\0')"
    for code in [flag + letter for letter in string.ascii_letters for flag in ("%", "%-")]:
        if code in template:
            text += f".replace('{code}', {printed.strftime(code)!r})"
    macro = "{% macro strftime_now(format) %}{{ " + text + ".replace('\\0', '%') }}{% endmacro %}\n"
    dated = copy.copy(tokenizer)
    dated.undated_template = tokenizer.chat_template
    begin_templates(dated, macro)
    return dated


def try_template(tokenizer) -> None:
    """Raise ValueError for a template that does not compile, and for several without a default."""
    tokenizer.get_chat_template()
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateSyntaxError as e:
        raise ValueError(f"line {e.lineno}: {e.message}") from e
    except Exception:  # it may reject this conversation but accept the data's
        pass


def position_limit(config) -> int | None:
    """The longest row that a model's positions are made for, if it says so. With YaRN that is the
    length it was trained on, times the factor, which model cards tell people to add
    (https://huggingface.co/Qwen/Qwen3-8B#processing-long-texts)."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = rope_of(config)
    if limit and rope_type(config) == "yarn" and rope.get("factor"):
        return max(limit, int(rope.get("original_max_position_embeddings", 0) * rope["factor"]))
    return limit


def length_dependent_rope(config) -> bool:
    """Whether a document's frequencies depend on the longest one of its batch."""
    return rope_type(config) in ("longrope", "dynamic")
