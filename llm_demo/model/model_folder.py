"""A model's folder: opened and checked before step 1, and what an export writes besides weights."""

import copy
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from llm_demo.core.attention import LongRope, rope_type
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.data.codec import stop_tokens
from llm_demo.flags.args import Args
from llm_demo.machine.dist import from_rank0, once_per_node
from llm_demo.machine.files import write_json
from llm_demo.machine.process import read_json
from llm_demo.machine.text import blame, counted, short
from llm_demo.model.costs import active_of, on_meta, parameters_of
from llm_demo.model.families import Family, family_name, family_of
from llm_demo.model.source import (
    find_model,
    load_config,
    load_tokenizer,
    position_limit,
    refuse_adapter,
    same_ids,
    set_variables,
)
from llm_demo.model.weights_files import Weights, open_weights


class Source(NamedTuple):
    """The model's files and tokenizer."""

    folder: Path
    config: object  # from transformers
    weights: Weights | None  # None: random weights
    tokenizer: object
    proof: tuple | None = None  # a proof.Proof, of a family without a test of its own


def find_source(args: Args, world: World, seq_len: int) -> tuple[Source, list[str]]:
    """(the model's folder, downloaded if necessary, its configuration, weights and tokenizer;
    lines for the log)."""
    lines = []
    folder = once_per_node(world, lambda: find_proven(args.model_name_or_path, seq_len))
    config, weights = open_model(folder, seq_len, lines.append)
    if not weights:
        origin = f"no weights in {folder}: random ones, seed {args.seed}"
    elif weights.scales:
        origin = f"weights of {folder}, in fp8 times their scales"
    else:
        origin = f"weights of {folder}"
    total, active = parameters_of(config), active_of(config)
    size = f"{short(total)} parameters, {short(active)} active, " if active < total else ""
    blocks = counted(config.num_hidden_layers, "block")
    lines.append(f"model: {family_name(config)}, {blocks}, {size}{origin}")
    if weights and weights.ignored:
        lines.append(
            f"weights: {len(weights.ignored)} not used: {', '.join(weights.ignored[:3])} (a vision "
            "tower, layers of multi-token prediction, rotary frequencies)"
        )
    limit = position_limit(config)
    if limit and seq_len > limit:
        config = copy.deepcopy(config)
        config.max_position_embeddings = seq_len
        lines.append(f"positions: up to {seq_len} instead of {limit}, since the weights are random")
    tokenizer = load_tokenizer(args.tokenizer_name_or_path or str(folder), args.chat_template)
    lines += set_variables(tokenizer, args.chat_template_kwargs, args.learn_reasoning)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, more than the model's {config.vocab_size}"
        )
    if args.save:
        for line in from_rank0(world, lambda: try_describe(folder, tokenizer, config)):
            lines.append(f"export: {line}")
    return Source(folder, config, weights, tokenizer, proof_of(config)), lines


def find_proven(name: str, max_len: int) -> Path:
    """The folder of a model. What proves its family is in the cache afterwards."""
    folder = find_model(name)
    open_model(folder, max_len, say=lambda line: None)
    return folder


def proof_of(config):
    """The proof.Proof of a family without a test of its own; None of others. Raises UserError if it
    fails."""
    if family_of(config).tested:
        return None
    from llm_demo.model.proof import prove

    return prove(config)


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
        if not torch.equal(weights.read(head).float(), weights.read(embedding).float()):
            config.tie_word_embeddings = False
            say(
                f"model: {folder}/config.json ties the head to the embedding, but the weights hold "
                "a head of other values: it is kept and trained as its own"
            )
    proof = proof_of(config)
    if proof:
        say(proof.line)
    with blame(folder / "config.json"):
        lm = on_meta(config)
    if weights:
        shapes = {name: tuple(t.shape) for name, t in lm.state_dict().items()}
        weights.check(shapes, {head} if config.tie_word_embeddings else set())
    if family_of(config).tested:
        refuse_bad_frequencies(folder, config, lm)
    return config, weights


def refuse_bad_frequencies(folder: Path, config, lm: PreTrainedModel) -> None:
    """Raise UserError if rope_parameters give negative or infinite numbers. lm: without memory."""
    with blame(folder / "config.json"):
        rotary = LongRope if rope_type(config) == "longrope" else type(lm.model.rotary_emb)
        rotary = rotary(config)
        scalings = [value for name, value in vars(rotary).items() if name.endswith("scaling")]
        values = torch.cat([*rotary.buffers(), torch.tensor(scalings)])
    if not ((values >= 0) & values.isfinite()).all():
        raise UserError(
            f"{folder}/config.json: rope_parameters {config.rope_parameters} do not give positive "
            "frequencies and a positive scaling"
        )


def describe_model(
    model: Path,
    tokenizer,
    folder: Path,
    config,
    *,
    name: str = "",
    weights: Weights | None = None,
    earlier: Path | None = None,
) -> None:
    """Save what an export needs besides the trained weights with the run, in its model/ folder: the
    model's may disappear. config: of what is trained, with more positions if rows are longer,
    untied if its head is. name, weights: of the model, as given. earlier: the model/ folder of the
    run that is resumed, whose record of the base is kept: that may have changed since."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    if (model / "generation_config.json").is_file():
        shutil.copyfile(model / "generation_config.json", folder / "generation_config.json")
    template = getattr(tokenizer, "undated_template", None)
    if template:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    from llm_demo.model.untrained import RECORD, SMALL_FILES, copy_small, read_record, record_of

    if earlier and (earlier / RECORD).is_file():
        record, small = read_record(earlier), earlier / SMALL_FILES
    else:
        record, small = record_of(name, model, weights), model
    write_json(folder / RECORD, record)
    if record["why"] is None:
        copy_small(small, folder / SMALL_FILES)


def describe(
    model: Path, out: Path, tokenizer, config=None, dtype=torch.bfloat16, whole: bool = False
) -> list[str]:
    """Write all that an export holds besides weights and model card: tokenizer, chat template and,
    for a model, configurations. Returns lines for the log. model: the model/ folder of a run.
    config: the model's; None for adapters. whole: with what the base has beside the text. Raises
    UserError."""
    if config:
        config.dtype = dtype
        for name in ("num_mtp_layers", "mtp_num_hidden_layers"):
            if getattr(config, name, 0) and not whole:
                setattr(config, name, 0)
        if not config.architectures:  # servers such as vLLM need it
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        config.save_pretrained(out)
        describe_for_version_4(out, family_of(config))
        if whole:
            from llm_demo.model.untrained import SMALL_FILES, copy_small, whole_config

            with blame(model / SMALL_FILES):
                text = read_json(out / "config.json")
                copy_small(model / SMALL_FILES, out)
                base = read_json(out / "config.json")
                write_json(out / "config.json", whole_config(base, text), indent=2)
        write_json(out / "generation_config.json", generation_config(model, tokenizer), indent=2)
    tokenizer.save_pretrained(out)
    name_tokenizer_for_version_4(out)
    if config and not same_ids(
        tokenizer.backend_tokenizer, AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    ):
        return [
            "warning: transformers' AutoTokenizer ignores rules of tokenizer.json for "
            f"{family_name(config)} models, so it splits text otherwise than in training: load the "
            "export's tokenizer with PreTrainedTokenizerFast.from_pretrained"
        ]
    return []


def try_describe(model: Path, tokenizer, config) -> list[str]:
    """Try, before step 1, what a run and its export will do with this model's files, because they
    come from elsewhere. Returns lines for the log. Raises UserError."""
    with tempfile.TemporaryDirectory(prefix="llm_demo-") as folder, blame(model):
        describe_model(model, tokenizer, Path(folder, "model"), config)
        return describe(model, Path(folder, "hf"), tokenizer, copy.deepcopy(config))


GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def describe_for_version_4(folder: Path, family: Family) -> None:
    """Add the keys that transformers 4, and servers that use it, read in config.json. Without them
    it silently takes defaults. Version 5 reads the same model from both."""
    config = read_json(folder / "config.json")
    config.pop("auto_map", None)  # names code that is not in this folder
    config["torch_dtype"] = config["dtype"]
    if "per_layer_config" in config:  # servers read Gemma 4's keys for it
        config |= {name: config[key] for key, name in GLOBAL.items()}
        for of_block in config["per_layer_config"].values():
            config |= {GLOBAL[key]: value for key, value in of_block.items() if key in GLOBAL}
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention")
    if local and (family.wide_rope or not family.tested):  # only later than version 4
        rope = {}
    elif local:
        config["rope_local_base_freq"] = local["rope_theta"]
        rope = rope["full_attention"]
    elif "partial_rotary_factor" in rope and (family.partly_rotated or not family.tested):
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if "rope_type" in rope:
        set_rope_scaling(config, rope, family)
    write_json(folder / "config.json", config, indent=2)


def set_rope_scaling(config: dict, rope: dict, family: Family) -> None:
    """Add the keys of version 4 for rope_parameters."""
    kind, config["rope_theta"] = rope["rope_type"], rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"} | {"type": kind}
    if kind == "longrope":
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        if family.own_longrope and not {"factor", "attention_factor"} & rope.keys():
            scaling = {key: scaling[key] for key in ("type", "short_factor", "long_factor")}
    config["rope_scaling"] = None if kind == "default" else scaling


def name_tokenizer_for_version_4(folder: Path) -> None:
    """Name a tokenizer's class and special tokens as in transformers 4. Version 5 reads both."""
    config = read_json(folder / "tokenizer_config.json")
    config.pop("auto_map", None)
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokens = config.pop("extra_special_tokens", None)
    if tokens:
        config["additional_special_tokens"] = tokens
    write_json(folder / "tokenizer_config.json", config, indent=2)


def generation_config(folder: Path, tokenizer) -> dict:
    """The model's generation_config.json, with the stop tokens of its training data added. A base
    model knows only the end of a text, not of an assistant's turn. Raises UserError."""
    config, file = {}, folder / "generation_config.json"
    with blame(file):
        if file.is_file():
            config = read_json(file)
        ends = config.get("eos_token_id")
    if not isinstance(ends, list):
        ends = [] if ends is None else [ends]
    ends = list(dict.fromkeys([*ends, *stop_tokens(tokenizer)]))
    return config | {"eos_token_id": ends or None}


def load_model(name: str, folder: Path, config, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own model of a folder, on the CPU, in evaluation mode, which generates greedily
    and without penalties. name: what the user calls it; config: from load_config, which no longer
    says that weights are in fp8 or 4 bits, so these are read here. The text of a model with images
    is read here too: transformers renames some of its weights and leaves others random. Raises
    UserError for what `refuse_adapter` and transformers refuse."""
    refuse_adapter(name, folder)
    weights, source, values = open_weights(folder), folder, None
    if weights and (weights.scales or weights.packed or weights.renamed):
        source, values = None, {}
        for name in weights.shapes:
            value = weights.read(name)
            # what chooses experts, a vector, stays in fp32
            values[name] = value.to(dtype) if value.ndim > 1 else value
    if not sys.stderr.isatty():  # a bar would fill a file with control codes
        transformers_logging.disable_progress_bar()
    # sdpa: for flash attention that is not installed, transformers asks the hub for a kernel
    with blame(folder):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            state_dict=values,
        )
    model.eval()
    model.generation_config = GenerationConfig()  # in place of the folder's
    return model
