"""A model's folder: opened and checked before step 1, and what an export writes besides weights."""

import copy
import functools
import itertools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from llm_demo.core.attention import LongRope, rope_type
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.data.labels import stop_tokens
from llm_demo.flags.args import Args
from llm_demo.machine.dist import from_rank0, once_per_node
from llm_demo.machine.files import write_json
from llm_demo.machine.text import counted, short, words_of
from llm_demo.model.costs import PARTIAL, active_of, parameters_of, rotary_width
from llm_demo.model.families import position_limit
from llm_demo.model.source import (
    COMPARE,
    find_model,
    load_config,
    load_tokenizer,
    refuse_adapter,
    same_ids,
    set_variables,
)
from llm_demo.model.weights_files import Weights, open_weights

# What transformers neither checks nor can generate with otherwise; a boolean is a number too.
NUMBERS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
           "length_penalty", "max_length", "min_length", "num_beams")  # fmt: skip


class Source(NamedTuple):
    """The model's files and tokenizer."""

    folder: Path
    config: object  # from transformers
    weights: Weights | None  # None: random weights
    tokenizer: object


def find_source(args: Args, world: World, seq_len: int, say: Callable) -> Source:
    """The model's folder (downloaded if necessary), configuration, weights and tokenizer."""
    folder = once_per_node(world, functools.partial(find_model, args.model_name_or_path))
    config, weights = open_model(folder, seq_len, say)
    origin = (
        f"weights of {folder}{', in fp8 times their scales' if weights.scales else ''}"
        if weights
        else f"no weights in {folder}: random ones, seed {args.seed}"
    )
    total, active = parameters_of(config), active_of(config)
    size = f"{short(total)} parameters, {short(active)} active, " if active < total else ""
    blocks = counted(config.num_hidden_layers, "block")
    say(f"model: {config.model_type}, {blocks}, {size}{origin}")
    if weights and (unused := [n + "*" * n.endswith(".") for n in weights.ignored]):
        more = f" and {len(unused) - 3:,} more" * (len(unused) > 3)
        say(
            f"weights: not used: {', '.join(unused[:3])}{more} (a vision tower, layers of "
            "multi-token prediction, rotary frequencies, what the index does not name)"
        )
    if seq_len > (limit := position_limit(config) or seq_len):
        config.max_position_embeddings = seq_len
        say(f"positions: up to {seq_len} instead of {limit}, since the weights are random")
    tokenizer = load_tokenizer(args.tokenizer_name_or_path or str(folder), args.chat_template)
    for line in set_variables(tokenizer, args.chat_template_kwargs, args.learn_reasoning):
        say(line)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, more than the model's {config.vocab_size}"
        )
    if args.save:
        for line in from_rank0(world, lambda: try_describe(folder, tokenizer, config)):
            say(f"export: {line}")
    return Source(folder, config, weights, tokenizer)


def open_model(
    folder: Path, max_len: int, say: Callable = print, with_weights: bool = True
) -> tuple[object, Weights | None]:
    """(the configuration of a model that can be trained exactly, its weights if the folder has
    any). If config.json ties the head to the embedding and the weights hold another head, it is not
    tied: transformers keeps both too. with_weights False: they are elsewhere. Raises UserError."""
    config = load_config(folder, max_len, weights_elsewhere=not with_weights)
    weights = open_weights(folder) if with_weights else None
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if weights and config.tie_word_embeddings and {head, embedding} <= weights.shapes.keys():
        if not weights.equal(head, embedding):
            config.tie_word_embeddings = False
            say(
                f"model: {folder}/config.json ties the head to the embedding, but the weights hold "
                "a head of other values: it is kept and trained as its own"
            )
    try:
        lm = on_meta(config)
        rotary = LongRope if rope_type(config) == "longrope" else type(lm.model.rotary_emb)
        rotary, width = rotary(config), rotary_width(config)
        scalings = [value for key, value in vars(rotary).items() if key.endswith("scaling")]
        positive = [*rotary.buffers(), *(torch.full((width // 2,), s) for s in scalings)]
    except Exception as e:  # of transformers' modules
        raise UserError(f"{folder}/config.json: {words_of(e)}; {COMPARE}") from e
    if weights:
        shapes = {name: tuple(t.shape) for name, t in lm.state_dict().items()}
        weights.check(shapes, {head} if config.tie_word_embeddings else set())
    for values in positive:
        if 2 * len(values) != width or not ((values > 0) & values.isfinite()).all():
            raise UserError(
                f"{folder}/config.json: rope_parameters {config.rope_parameters} do not give "
                f"{width / 2:g} positive frequencies and a positive scaling"
            )
    return config, weights


def on_meta(config):
    """transformers' model of a configuration, without memory. Its attention is eager: the
    configuration may name flash attention that is not installed, or a kernel to download."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", trust_remote_code=False
        )


def describe_model(model: Path, tokenizer, folder: Path, config=None) -> None:
    """Save what an export needs besides weights with the run: the model's folder may disappear.
    config: the model's, with more positions if rows are longer, and untied if its head is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)
    if config:
        copied = json.loads((folder / "config.json").read_text("utf-8"))
        same = config.model_type == copied["model_type"]  # else a part of it is trained
        changed, positions = dict(copied) if same else config.to_dict(), "max_position_embeddings"
        if longest := max(changed.get(positions, 0), getattr(config, positions, 0)):
            changed[positions] = longest
        changed.pop("quantization_config", None)  # of the files, not of what is trained
        changed["tie_word_embeddings"] = config.tie_word_embeddings
        if changed != copied:
            write_json(folder / "config.json", changed, indent=2)
    if template := getattr(tokenizer, "undated_template", None):
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def describe(model: Path, out: Path, tokenizer, config=None, dtype=torch.bfloat16) -> list[str]:
    """Write all that an export holds besides weights and model card: tokenizer, chat template and,
    for a whole model, configurations. Returns lines for the log. model: the model/ folder of a run.
    config: the model's; None for adapters. Raises UserError."""
    notes = []
    if config:
        config.dtype = dtype
        for name in ("num_mtp_layers", "mtp_num_hidden_layers"):  # neither trained nor written
            if getattr(config, name, 0):
                setattr(config, name, 0)
        if not config.architectures:  # servers such as vLLM need it
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        config.save_pretrained(out)
        describe_for_version_4(out)
        generation, notes = generation_config(model, tokenizer)
        generation.save_pretrained(out)
    tokenizer.save_pretrained(out)
    name_tokenizer_for_version_4(out)
    if config and not same_ids(
        tokenizer.backend_tokenizer, AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    ):
        notes.append(
            "warning: transformers' AutoTokenizer ignores rules of tokenizer.json for "
            f"{config.model_type} models, so it splits text otherwise than in training: load the "
            "export's tokenizer with PreTrainedTokenizerFast.from_pretrained"
        )
    return notes


def try_describe(model: Path, tokenizer, config) -> list[str]:
    """Do, before step 1, what a run and its export will do with the files of this model, which come
    from elsewhere. Returns lines for the log. Raises UserError."""
    with tempfile.TemporaryDirectory(prefix="llm_demo-") as folder:
        saved, out = Path(folder, "model"), Path(folder, "hf")
        try:
            describe_model(model, tokenizer, saved, config)
            return describe(saved, out, tokenizer, copy.deepcopy(config))
        except UserError as e:
            raise UserError(str(e).replace(str(saved), str(model))) from e
        except OSError:  # of the disk
            raise
        except Exception as e:  # from several libraries
            raise UserError(f"{model}: can't be written as an export: {words_of(e)}") from e


def describe_for_version_4(folder: Path) -> None:
    """Add the keys that transformers 4, and servers that use it, read in config.json. Without them
    it silently takes defaults. Version 5 reads the same model from both."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config.pop("auto_map", None)  # names code that is not in this folder
    config["torch_dtype"] = config["dtype"]
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    rope = config["rope_parameters"]
    if local := rope.get("sliding_attention"):
        config["rope_local_base_freq"], rope = local["rope_theta"], rope["full_attention"]
    elif config["model_type"] in PARTIAL and "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    kind, config["rope_theta"] = rope["rope_type"], rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"} | {"type": kind}
    if kind == "longrope":
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        if config["model_type"] == "phi3" and not {"factor", "attention_factor"} & rope.keys():
            scaling = {key: scaling[key] for key in ("type", "short_factor", "long_factor")}
    config["rope_scaling"] = None if kind == "default" else scaling
    write_json(folder / "config.json", config, indent=2)


def name_tokenizer_for_version_4(folder: Path) -> None:
    """Name a tokenizer's class and special tokens as in transformers 4. Version 5 reads both."""
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config.pop("auto_map", None)
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if tokens := config.pop("extra_special_tokens", None):
        config["additional_special_tokens"] = tokens
    write_json(folder / "tokenizer_config.json", config, indent=2)


def generation_config(folder: Path, tokenizer) -> tuple[GenerationConfig, list[str]]:
    """(the model's own, with the stop tokens of its training data added, lines for the log). A base
    model knows only the end of a text, not of an assistant's turn. Keys that transformers does not
    save, such as a temperature without do_sample, are dropped. Raises UserError."""
    config, file, notes = GenerationConfig(), folder / "generation_config.json", []
    try:
        if file.is_file():
            config = GenerationConfig.from_pretrained(folder)
        ids = [config.eos_token_id, config.bos_token_id, config.pad_token_id]
        ends, *others = [t if isinstance(t, list) else [t] * (t is not None) for t in ids]
        for token in itertools.chain(ends, *others):
            if type(token) is not int:
                raise ValueError(f"{token!r} is not a token id")
        for key in NUMBERS:
            if not isinstance(value := getattr(config, key, None), int | float | None):
                raise ValueError(f"{key} {value!r} is not a number")
        try:
            config.validate(strict=True)
        except ValueError as e:
            refused = re.findall(r"^- `(\w+)`", str(e), re.M)
            shown = ", ".join(f"{key} {getattr(config, key)}" for key in refused)
            config.update(**dict.fromkeys(refused))
            config.validate(strict=True)
            notes.append(f"generation_config.json: without {shown}, which transformers refuses")
        config.to_json_string()
    except Exception as e:  # from transformers, which checks few types
        raise UserError(f"{file}: {words_of(e)}; {COMPARE}") from e
    config.eos_token_id = list(dict.fromkeys([*ends, *stop_tokens(tokenizer)])) or None
    return config, notes


def load_model(name: str, folder: Path, config, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own model of a folder, on the CPU, in evaluation mode, which generates greedily
    and without penalties. name: what the user calls it; config: from load_config, which no longer
    says that weights are in fp8 or 4 bits, so these are read here. Raises UserError for what
    `refuse_adapter` and transformers refuse."""
    refuse_adapter(name, folder)
    weights, source, values = open_weights(folder), folder, None
    if weights and (weights.scales or weights.packed):
        names = weights.shapes.keys() - set(weights.ignored)
        # one by one; what chooses experts, a vector, stays in fp32
        values = {n: t.to(dtype) if (t := weights.read(n)).ndim > 1 else t for n in names}
        source = None
    if not sys.stderr.isatty():  # a bar would fill a file with control codes
        transformers_logging.disable_progress_bar()
    # sdpa: for flash attention that is not installed, transformers asks the hub for a kernel
    try:
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            source, config=config, dtype=dtype, attn_implementation="sdpa", use_safetensors=True,
            trust_remote_code=False, state_dict=values,
        ).eval()  # fmt: skip
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as e:  # of the files that only transformers reads
        raise UserError(f"{folder}: transformers can't load this model: {words_of(e)}") from e
    model.generation_config = GenerationConfig()  # in place of the folder's
    return model
