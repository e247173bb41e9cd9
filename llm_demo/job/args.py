"""Flags of the training scripts: each declared once, with its help, bounds and choices.

Flags that all scripts share are here, those of one script in the flags.py beside it. Nothing heavy
is imported, so that a launcher can check all flags before torch is imported.
"""

import argparse
import dataclasses
import difflib
import functools
import importlib.util
import math
import os
import re
import shlex
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Literal

from llm_demo.core.errors import UserError, counted
from llm_demo.job.files import ROOT

MAX_INT = 2**31 - 1  # upper bound of whole numbers without at_most
MAX_STEPS = 99_999_999  # the names of checkpoints have eight digits
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")


def check_partition(value: str) -> None:
    """Raise UserError for a --partition of the wrong form, before the model is known."""
    named = ("balanced", "uniform", "parameters")
    if value not in named and not re.fullmatch(r"\d+(,\d+)*", value):
        raise UserError(
            f"--partition {value}: must be balanced, uniform, parameters or counts such as 18,10"
        )


def check_stages(stages: int, processes: int) -> None:
    """Raise UserError if so many processes can't form pipelines of --stages."""
    if processes % stages:
        raise UserError(
            f"{counted(processes, 'process', 'processes')} can't form pipelines of {stages} "
            "--stages: set NPROC_PER_NODE to a multiple, or other --stages"
        )


def flag(
    default, help: str, *, positive=False, at_least=0, at_most=None, env=None, saves_memory="",
    path=False, gone=None,
):  # fmt: skip
    """A dataclass field that is a flag.

    Args:
        positive, at_least, at_most: bounds of a number.
        env: the environment variable that sets it, "" for none; default: its name in capitals.
        path: it names files or folders, separated by commas, in which ~ is the home folder.
        saves_memory: the value to suggest after running out of GPU memory, then a remark, if any.
        gone: {a choice that earlier versions had: what to use instead}.
    """
    metadata = {
        "help": help, "positive": positive, "at_least": at_least, "at_most": at_most, "env": env,
        "saves_memory": saves_memory, "path": path, "gone": gone or {},
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass
class ModelArgs:
    """Model"""

    model_name_or_path: str = flag(
        str(ROOT / "models/qwen3-tiny"),
        "Hugging Face model: a local folder or a hub id. A folder without weights starts from "
        "random ones.",
        env="MODEL",
        path=True,
    )
    tokenizer_name_or_path: str | None = flag(
        None, "Tokenizer: a folder or a hub id. Default: the model's own.", path=True
    )
    chat_template: str | None = flag(
        None, "File with a Jinja chat template. Default: the tokenizer's own.", path=True
    )
    attn_impl: Literal[
        "auto", "sdpa", "varlen_cudnn", "varlen", "flash_attn", "bucketed", "bucketed_math", "math"
    ] = flag("auto", "Attention backend. auto: the fastest that runs here; the log says why.")
    use_activation_checkpointing: bool = flag(
        False,
        "Recompute each decoder block in the backward pass: less memory, about a third more "
        "compute.",
        saves_memory="true",
    )
    compile: bool | None = flag(
        None, "Compile decoder blocks and loss. Default: where it works and is faster."
    )
    activation_memory_budget: float = flag(
        1.0,
        "Fraction of activation memory, 0 to 1, that compiled blocks may use; they recompute the "
        "rest.",
        at_most=1,
    )
    blocks_per_unit: int = flag(
        0, "Blocks compiled and sharded as one. 0: 64M parameters, at most 4."
    )


@dataclasses.dataclass
class DataArgs:
    """Data"""

    train_json: str = flag(
        str(ROOT / "data/sft_en.jsonl"),
        "Files separated by commas, a glob, a folder or a hub dataset; my.jsonl*2: twice.",
        path=True,
    )
    dataset_config: str | None = flag(None, "Configuration of a hub dataset, such as main.")
    dataset_split: str | None = flag(None, "Split of a hub dataset to train on. Default: train.")
    eval_json: str = flag(
        "auto",
        "Held-out data; a hub dataset with its split, such as openai/gsm8k:test. auto: "
        "X.heldout.jsonl beside X.jsonl, if any. none: no evaluation.",
        path=True,
    )
    data_format: Literal[
        "auto", "tokens", "messages", "conversations", "prompt", "alpaca", "input", "text"
    ] = flag("auto", "Format of a row. auto: detected from the first one.")
    eval_fraction: float | None = flag(
        None, "Share of the training documents to hold out, such as 0.05.", at_most=1
    )
    input_key: str | None = flag(None, "Name of the prompt column. Needs --target_key.")
    target_key: str | None = flag(None, "Name of the answer column. Needs --input_key.")
    seq_len: int = flag(
        0,
        "Length of a row in tokens. 0: 99 % of the documents fit, rounded up to a multiple of "
        "128, at most 4096 and the model's limit.",
    )
    pack_sequences: bool = flag(True, "Pack whole documents into rows. Off: one per row, padded.")
    overlong: Literal["truncate", "split", "drop"] = flag(
        "truncate", "For documents longer than a row."
    )
    train_on_prompt: bool = flag(False, "Train on every token, not only on the assistant's.")
    learn_turns: Literal["all", "last"] = flag("all", "Assistant turns to train on.")
    learn_reasoning: bool = flag(True, "Train on reasoning too, not only on answers.")


@dataclasses.dataclass
class TrainArgs:
    """Training"""

    micro_batch_size: int = flag(1, "Rows per data-parallel rank in one pass.", at_least=1)
    grad_accum_steps: int = flag(1, "Micro-batches per optimizer step.", at_least=1)
    max_steps: int = flag(
        0, "Optimizer steps. 0: as many as --num_epochs takes.", at_most=MAX_STEPS
    )
    num_epochs: float | None = flag(
        None,
        "Passes if --max_steps is 0. Default: about 100 steps, at most 10 or 100.",
        at_most=1e9,
    )
    lr: float | None = flag(
        None,
        "Peak learning rate. Default: 2e-5; adapters: 2e-4; random: 1e-3.",
        positive=True,
    )
    weight_decay: float = flag(0.01, "Weight decay of AdamW. Not applied to norms and biases.")
    warmup_steps: int | None = flag(
        None, "Optimizer steps of linear warm-up. Default: 10, at most 10 % of the run."
    )
    lr_scheduler: Literal["cosine", "linear", "constant"] = flag(
        "cosine", "Decay after the warm-up. cosine and linear end at a tenth of --lr."
    )
    max_grad_norm: float = flag(1.0, "Clip the global gradient norm to this. 0: no clipping.")
    max_skipped_steps: int = flag(
        20,
        "Stop with an error after this many consecutive steps whose loss or gradient norm is NaN "
        "or infinite. 0: no limit.",
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = flag(
        "auto",
        "Compute dtype; weights and optimizer states are always fp32. auto: fp32 on a CPU, bf16 "
        "on a GPU that has it, else fp16. Short forms: --bf16, --fp16.",
    )
    shuffle: bool = flag(True, "Shuffle the rows in every epoch. Off: they come in file order.")
    length_warmup: int = flag(0, "Number of first steps whose rows come shortest first. 0: none.")
    seed: int = flag(1234, "Seed of row order and random weights.", at_most=2**63 - 1)


@dataclasses.dataclass
class RunArgs:
    """Run"""

    output_dir: str | None = flag(
        None, "Folder of the run. Default: runs/<script>-<model>-<time>.", path=True
    )
    overwrite: bool = flag(False, "Replace the earlier run in --output_dir. Off: an error.")
    save: bool = flag(True, "Save a checkpoint at the end and when a signal stops the run.")
    save_every: int = flag(0, "Also save a checkpoint every so many optimizer steps. 0: never.")
    save_async: bool = flag(True, "Write the checkpoints of --save_every in the background.")
    keep_last: int = flag(2, "Checkpoints to keep; older ones are deleted. 0: all.")
    keep_best: bool = flag(False, "Also keep the checkpoint with the lowest held-out loss.")
    resume: str | None = flag(
        None,
        "auto: resume from the newest complete checkpoint in --output_dir, or start if there is "
        "none. A folder: resume from that checkpoint or run.",
        path=True,
    )
    resume_anyway: bool = flag(False, "Resume despite other data, rows of a step or configuration.")
    export: Literal["none", "bf16", "fp16", "fp32"] = flag(
        "none", "Export a Hugging Face model in this dtype to hf/ in the run's folder at the end."
    )
    log_every: int = flag(1, "Optimizer steps between log lines.", at_least=1)
    eval_every: int = flag(0, "Steps between evaluations. 0: only before and after training.")
    early_stopping: int = flag(0, "End after so many evaluations without a better one. 0: never.")
    eval_batch_size: int = flag(0, "Rows per rank in evaluation. 0: --micro_batch_size.")
    sample_tokens: int | None = flag(
        None, "Tokens per sample answer at the end. 0: no samples. Default: 32, long rows: 0."
    )
    report_to: Literal["none", "tensorboard", "wandb"] = flag("none", "Also log to this tracker.")
    comm_timer: bool = flag(True, "Measure communication time in every step. Off: it is n/a.")
    profile_steps: str = flag(
        "",
        "Steps to profile, such as 5:7 (from 1): traces and profile.txt. Default: none.",
    )
    peak_tflops: float | None = flag(
        None,
        "Peak TFLOP/s of one GPU in this dtype, for MFU. Default: from a table.",
        positive=True,
    )
    device_memory_gb: float = flag(
        0.0,
        "Limit of PyTorch's memory on each GPU, in GB (2**30). 0: none.",
    )
    estimate: bool = flag(False, "Print an estimate of peak memory per rank and exit.")
    card: str = flag("", "GPU that --estimate is for: h100, mi100, ... Default: this machine's.")
    dry_run: bool = flag(False, "Run one forward pass, print the plan and exit.")


@dataclasses.dataclass
class ExpertArgs:
    """Mixture of experts"""

    freeze_router: bool = flag(False, "Do not train the routers.")

    @staticmethod
    def check(args) -> None:
        if args.freeze_router and args.optimizer_on_host:
            raise UserError("--freeze_router does not work with --optimizer_on_host")
        if args.freeze_router and args.router_aux_loss:
            raise UserError("--router_aux_loss trains the routers: drop --freeze_router")


SHARED = (ModelArgs, DataArgs, TrainArgs, RunArgs)


@dataclasses.dataclass
class Args(RunArgs, TrainArgs, DataArgs, ModelArgs):
    """The flags of every training script; `parse_args` adds a script's own."""

    # What flags of some scripts are in the others, for code that all scripts share. No fields: a
    # script with such a flag declares it.
    activations_on_host = freeze_router = optimizer_on_host = reshard_after_forward = False
    lora_rank = psgd_rank = router_aux_loss = router_bias_update = 0
    sequence_parallel = 1
    deepspeed_config = expert_parallel = None

    def check_processes(self, processes: int) -> None:
        """Raise UserError if these flags don't work with so many processes. For a script's own
        flags to override: its launcher calls it before any rank starts, the script once it has."""


def check(args) -> None:
    """Raises UserError for shared flags that contradict each other."""
    check_rows(args.seq_len, args.learn_turns, args.train_on_prompt, args.learn_reasoning)
    parse_steps(args.profile_steps)
    if args.card and not args.estimate:
        raise UserError(f"--card {args.card[:80]} is what to estimate for: add --estimate")
    if args.max_steps == 0 and args.num_epochs == 0:
        raise UserError("--max_steps 0 needs --num_epochs above 0")
    if args.activation_memory_budget < 1 and args.compile is False:
        raise UserError("--activation_memory_budget needs compiled blocks: add --compile")
    if args.resume == "auto" and not args.output_dir:
        raise UserError("--resume auto needs --output_dir, the run to resume")
    if args.export != "none" and not args.save:
        raise UserError("--export converts the last checkpoint, so it needs --save true")
    if args.early_stopping:
        if not args.eval_every:
            raise UserError("--early_stopping needs --eval_every, the steps between evaluations")
        if not args.save_every:
            args.save_every = args.eval_every  # the best checkpoint must exist
        if args.eval_every % args.save_every:
            raise UserError(
                f"--early_stopping: --eval_every {args.eval_every} must be a multiple of "
                f"--save_every {args.save_every}, so that the best checkpoint exists"
            )
        args.keep_best = True
    for name in ("save_every", "keep_best"):
        if getattr(args, name) and not args.save:
            raise UserError(f"--{name} needs checkpoints: drop it, or --no_save")
    if args.resume and args.overwrite:
        raise UserError("--resume keeps the run's folder and --overwrite empties it: use one")
    if args.eval_fraction is not None and args.eval_json not in ("auto", "none"):
        raise UserError("--eval_fraction splits --train_json and --eval_json names a file: use one")
    if bool(args.input_key) != bool(args.target_key):
        raise UserError("--input_key and --target_key name a pair of columns: set both")


def check_all(args) -> None:
    """The same of a script's own flags too."""
    check(args)
    for group in reversed(type(args).__mro__):
        if "check" in vars(group):
            group.check(args)


def accepted(args, name: str, value) -> bool:
    """Whether the flags are still accepted with another value of one."""
    try:
        check_all(dataclasses.replace(args, **{name: value}))
    except UserError:
        return False
    return True


def check_rows(
    seq_len: int, learn_turns: str, train_on_prompt: bool, learn_reasoning: bool = True
) -> None:
    if 0 < seq_len < 8:
        raise UserError(f"--seq_len {seq_len} is too small: the minimum is 8")
    if learn_turns == "last" and train_on_prompt:
        raise UserError("--learn_turns last and --train_on_prompt contradict each other: use one")
    if train_on_prompt and not learn_reasoning:
        raise UserError("--no_learn_reasoning and --train_on_prompt contradict each other: use one")


def parse_steps(text: str) -> tuple[int, int] | None:
    """ "a:b" -> (a, b), steps from 1, both included; "" -> None. Raises UserError."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--profile_steps {text}: must be two steps such as 5:7, counted from 1")
    return int(match[1]), int(match[2])


def less_memory(args) -> str:
    """What to change after running out of GPU memory, best first, with the current values. Nothing
    that the flags' checks refuse; what depends on more than flags is said."""
    ways = []
    if args.micro_batch_size > 1:
        ways.append(("micro_batch_size", "halve it, double grad_accum_steps"))
    for field in dataclasses.fields(args):
        advice = field.metadata["saves_memory"]
        if not advice or getattr(args, field.name) != field.default:
            continue
        if accepted(args, field.name, value_of(field, advice.split(",")[0])):
            ways.append((field.name, advice))
    if args.activation_memory_budget == 1 and accepted(args, "activation_memory_budget", 0.6):
        ways.append(("activation_memory_budget", "0.6, if blocks are compiled and have no experts"))
    ways.append(("seq_len", "shorter rows"))
    if args.dtype == "fp32":
        ways.append(("dtype", "bf16"))
    if "lora_rank" in vars(args) and not args.lora_rank and accepted(args, "lora_rank", 16):
        ways.append(("lora_rank", "16, to train adapters only"))
    lines = [f"--{name} (now {shown(getattr(args, name))}): {advice}" for name, advice in ways]
    return "; ".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


# ---------------------------------------------------------------------------- parsing


def kind_of(field: dataclasses.Field) -> type:
    """bool, int, float or str."""
    if choices_of(field):
        return str
    union = isinstance(field.type, types.UnionType)  # X | None
    return typing.get_args(field.type)[0] if union else field.type


def choices_of(field: dataclasses.Field) -> tuple[str, ...]:
    literal = typing.get_origin(field.type) is Literal
    return typing.get_args(field.type) if literal else ()


def choices(group: type, name: str) -> tuple[str, ...]:
    """The values that a flag of this dataclass can take."""
    return choices_of(next(f for f in dataclasses.fields(group) if f.name == name))


def env_of(field: dataclasses.Field) -> str:
    """The environment variable that sets a flag through a launcher; "" if there is none."""
    env = field.metadata["env"]
    return field.name.upper() if env is None else env


def value_of(field: dataclasses.Field, text: str):
    """What `text` means as the value of a flag. Raises UserError if it is not allowed."""
    kind, given = kind_of(field), f"--{field.name} {text[:80]}"
    if kind is bool:
        if text.lower() not in TRUE + FALSE:
            raise UserError(f"{given}: must be true or false")
        return text.lower() in TRUE
    try:
        value = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UserError(f"{given}: must be {what}") from None
    if field.metadata["path"]:
        value = ",".join(map(os.path.expanduser, text.split(",")))
    if value in field.metadata["gone"]:
        raise UserError(f"{given} has been removed: use {field.metadata['gone'][value]}")
    if choices_of(field):
        check_choice(field.name, value, choices_of(field))
    if kind in (int, float):
        check_bounds(field, value, given)
    return value


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"--{name} {value[:80]}: choose from {', '.join(allowed)}")


def check_bounds(field: dataclasses.Field, value: float, given: str) -> None:
    bounds = field.metadata
    most = bounds["at_most"] or (MAX_INT if isinstance(value, int) else math.inf)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{given}: must be a finite number")
    if bounds["positive"] and not value > 0:
        raise UserError(f"{given}: must be positive")
    if value < 0 and not bounds["at_least"]:
        raise UserError(f"{given}: must not be negative")
    if value < bounds["at_least"]:
        raise UserError(f"{given}: must be at least {bounds['at_least']}")
    if value > most:
        raise UserError(f"{given}: must be at most {most:,}")


# names of flags in other trainers
ELSEWHERE = {
    "batch_size": "micro_batch_size",
    "train_batch_size": "micro_batch_size",
    "data": "train_json",
    "dataset": "train_json",
    "train_file": "train_json",
    "eval_file": "eval_json",
    "eval_steps": "eval_every",
    "logging_steps": "log_every",
    "save_steps": "save_every",
    "resume_from_checkpoint": "resume",
    "learning_rate": "lr",
    "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "grad_accum_steps",
    "gradient_checkpointing": "use_activation_checkpointing",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
}


class PlainParser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its usage first, which is long
        raise UserError(f"{message} (see --help)")


def parse_args(description: str, *more: type, argv: list[str] | None = None):
    """Parse the shared flags and those of the dataclasses in `more` into one flat dataclass.

    A boolean flag is --x, --x true, --no_x or --x false; dashes may replace underscores.

    Args:
        description: printed as it is above the help.
        more: dataclasses of flags; `check(args)` of one that has it raises UserError for values
            that contradict each other.

    Raises UserError for an unknown flag (with the nearest known one), a value that is not allowed
    and a combination that contradicts itself.
    """
    groups = [*SHARED, *more]
    parser = PlainParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    for field in (field for group in groups for field in dataclasses.fields(group)):
        boolean = {"nargs": "?", "const": True} if kind_of(field) is bool else {}
        read = functools.partial(value_of, field)
        parser.add_argument(*spellings(field.name), type=read, default=field.default, **boolean)
        if boolean:
            off = spellings(f"no_{field.name}")
            parser.add_argument(*off, action="store_false", dest=field.name, default=field.default)
    for dtype in ("bf16", "fp16"):
        parser.add_argument(f"--{dtype}", action="store_const", const=dtype, dest="dtype")
    given, unknown = parser.parse_known_args(argv)
    values = vars(given)
    if values.pop("help"):
        print(help_page(description, groups, values))
        sys.exit(0)
    if unknown:
        name = unknown[0].split("=")[0].lstrip("-").replace("-", "_")
        if scripts := scripts_with(name):
            raise UserError(f"{unknown[0]}: only for {' and '.join(scripts)}")
        known = [option[2:] for action in parser._actions for option in action.option_strings]
        near = nearest(name, known) if unknown[0].startswith("--") else None
        hint = f"did you mean --{near}?" if near else "see --help"
        raise UserError(f"unknown argument {unknown[0]}; {hint}")
    bases = (*reversed(more), Args)  # the last base's fields come first
    args = dataclasses.make_dataclass("AllArgs", [], bases=bases)(**values)
    check_all(args)
    return args


def nearest(name: str, known: list[str]) -> str | None:
    """The flag that is probably meant: the same in other trainers, the first that begins with these
    words, one spelt much like it, or one that is its first words."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    longer = [flag for flag in known if flag.startswith(f"{name}_")]
    close = difflib.get_close_matches(name, [*known, *ELSEWHERE], 1)
    shorter = [flag for flag in known if name.startswith(f"{flag}_")]
    near = next(iter([*longer, *close, *shorter]), None)
    return ELSEWHERE.get(near, near)


def groups_of(folder: Path) -> tuple[type, ...]:
    """GROUPS in the flags.py of a script's folder: the dataclasses of its own flags. The script
    itself is not imported, because that takes seconds."""
    spec = importlib.util.spec_from_file_location(f"{folder.name}_flags", folder / "flags.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GROUPS


def own_fields() -> dict[str, list[dataclasses.Field]]:
    """The flags of each script's own, by its folder, as in "fsdp/"."""
    folders = [file.parent for file in sorted(ROOT.glob("*/flags.py"))]
    return {
        f"{folder.name}/": [f for group in groups_of(folder) for f in dataclasses.fields(group)]
        for folder in folders
    }


def scripts_with(name: str) -> list[str]:
    """The folders of the scripts with a flag of their own of this name."""
    return [folder for folder, fields in own_fields().items() if name in {f.name for f in fields}]


def spellings(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def command_line() -> str:
    return shlex.join([sys.executable, *sys.argv])


# ---------------------------------------------------------------------------- help

COLUMN = 22  # where the texts begin
NO_BREAK = "\xa0"  # a space at which textwrap does not break a line


def help_page(description: str, groups: list[type], values: dict) -> str:
    """The page that --help prints. values: of all flags; where one is not the default, it is shown
    beside it."""
    width = 100
    lines = [description.strip()]
    for group in groups:
        lines += ["", f"{group.__doc__}:"]
        for field in dataclasses.fields(group):
            names = f"  --{'[no_]' * (kind_of(field) is bool)}{field.name}"
            indent = " " * COLUMN
            text = f"{field.metadata['help']} {remarks(field, values[field.name])}"
            text = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
            text = [line.replace(NO_BREAK, " ") for line in text]
            if len(names) < COLUMN:
                text[0] = names + text[0][len(names) :]
            elif len(text) == 1 and len(line := f"{names}  {text[0].lstrip()}") <= width:
                text = [line]
            else:
                lines.append(names)
            lines += text
    lines += ["", *textwrap.wrap(HOW, width)]
    return "\n".join(lines)


HOW = (
    "--save means --save true and --no_save means --save false; all booleans work like this. The "
    "launchers also read environment variables with a flag's name in capitals (MODEL for "
    "--model_name_or_path); see docs/flags.md."
)


def remarks(field: dataclasses.Field, value) -> str:
    """The choices, the default, and the value if it is another one."""
    parts = [" | ".join(choices_of(field))]
    if field.default not in (None, ""):
        parts.append(f"default:{NO_BREAK}{shown(field.default)}")
    if value != field.default:
        parts.append(f"here:{NO_BREAK}{shown(value)}")
    return f"[{'; '.join(filter(None, parts))}]" if any(parts) else ""


def shown(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removeprefix(f"{ROOT}/")


# ---------------------------------------------------------------------------- types for argparse


def whole(at_least: int = 0):
    """A type for argparse: a whole number of at least this."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = -1
        if not at_least <= value <= MAX_INT:
            message = f"{text[:80]}: must be a whole number, {at_least} or more"
            raise argparse.ArgumentTypeError(message)
        return value

    return parse


def size(text: str) -> str:
    """A type for argparse: a number of bytes with its unit."""
    if not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)? ?[KMGT]B", text, re.I | re.ASCII):
        raise argparse.ArgumentTypeError(f"{text[:80]}: must be a size such as 500MB or 5GB")
    return text


def path_of(text: str) -> Path:
    """A type for argparse: a path, in which ~ is the home folder."""
    return Path(os.path.expanduser(text))


def regex(text: str) -> str:
    """A type for argparse: a regular expression."""
    try:
        re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"{text}: not a regular expression ({e})") from None
    return text
