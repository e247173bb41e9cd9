"""The flags both scripts share: one dataclass per concern, parsed into one flat namespace."""

import argparse
import dataclasses
import difflib
import math
import re
import sys
from typing import Literal

from transformers import HfArgumentParser

from llm_demo.errors import UserError
from llm_demo.files import ROOT


def flag(default, help):
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass
class ModelArgs:
    model_name_or_path: str = flag(
        str(ROOT / "models/qwen3-tiny"),
        "Hugging Face folder or hub id; a folder without weights starts from random ones",
    )
    tokenizer_name_or_path: str | None = flag(None, "folder or hub id; default: the model's own")
    chat_template: str | None = flag(
        None, "file with a Jinja chat template to use in place of the tokenizer's; exported with "
        "the model"
    )  # fmt: skip
    attn_impl: str = flag(
        "auto",
        "auto | sdpa (one document a row) | varlen | flash_attn | bucketed | bucketed_math (no "
        "fused kernel) | math: "
        "attention over packed documents; auto takes the fastest that runs here and says why",
    )
    use_activation_checkpointing: bool = flag(
        False, "recompute each decoder block in the backward: less memory, about a third more work"
    )
    compile: bool | None = flag(
        None, "torch.compile blocks and loss; default: where it pays and works, which is printed"
    )
    activation_memory_budget: float = flag(
        1.0, "where blocks are compiled: the share of activations to keep, 0 to 1; the cheapest of "
        "the rest are computed again in the backward"
    )  # fmt: skip
    blocks_per_unit: int = flag(
        0, "decoder blocks compiled and sharded as one unit; 0: about 64M parameters, 4 at most"
    )


@dataclasses.dataclass
class DataArgs:
    train_json: str = flag(
        str(ROOT / "data/sft_en.jsonl"),
        "JSON Lines, JSON, Parquet, CSV or TSV; several files separated by commas, a glob, a "
        "folder, or the id of a dataset on the hub",
    )
    dataset_config: str | None = flag(None, "configuration of a hub dataset, such as main")
    dataset_split: str | None = flag(None, "split of a hub dataset to train on; default: train")
    eval_json: str = flag(
        "auto",
        "held-out file, or a split on the hub such as openai/gsm8k:test; auto: "
        "X.heldout.jsonl beside X.jsonl if it is there; none: no eval",
    )
    data_format: str = flag(
        "auto",
        "auto | messages | conversations | prompt | input | alpaca | tokens | text: see README.md",
    )
    input_key: str | None = flag(None, "name of the prompt column, with --target_key")
    target_key: str | None = flag(None, "name of the answer column, with --input_key")
    seq_len: int = flag(
        0, "token slots of a row; 0: enough for 99 %% of the documents, rounded up to a multiple "
        "of 128, at most 4096 and the model's limit"
    )  # fmt: skip
    pack_sequences: bool = flag(True, "several whole documents in a row; off: one, padded")
    overlong: Literal["truncate", "split", "drop"] = flag(
        "truncate", "what becomes of a document longer than seq_len"
    )
    train_on_prompt: bool = flag(False, "learn every token, not the assistant's alone")
    learn_turns: Literal["all", "last"] = flag(
        "all", "of a conversation: every turn of the assistant, or only the last one"
    )


@dataclasses.dataclass
class TrainArgs:
    micro_batch_size: int = flag(1, "rows a replica works on at a time")
    grad_accum_steps: int = flag(1, "micro-batches of a replica in one optimizer step")
    max_steps: int = flag(0, "optimizer steps; 0: as many as num_epochs takes")
    num_epochs: float = flag(1.0, "passes over the data, where max_steps is 0")
    lr: float | None = flag(
        None, "peak learning rate; default: 2e-5 for trained weights, 1e-3 for random ones"
    )
    weight_decay: float = flag(0.01, "AdamW, on matrices only: not on norms and biases")
    warmup_steps: int = flag(10, "optimizer steps of linear warm-up")
    lr_scheduler: Literal["cosine", "linear", "constant"] = flag("cosine", "after the warm-up")
    max_grad_norm: float = flag(1.0, "clip the global gradient norm to this; 0: no clipping")
    max_skipped_steps: int = flag(
        20, "steps in a row with a loss or gradient norm that is not finite (NaN or infinity), "
        "after which the run ends with an error; 0: no limit"
    )  # fmt: skip
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = flag(
        "auto", "of the compute; weights and optimizer states are fp32 always"
    )
    seed: int = flag(1234, "of the row order and of random weights")


@dataclasses.dataclass
class RunArgs:
    output_dir: str | None = flag(None, "the run's folder; default: runs/<script>-<model>-<time>")
    overwrite: bool = flag(False, "empty a non-empty output_dir first")
    save: bool = flag(
        True, "checkpoints at the end, and when SIGTERM, SIGHUP or Ctrl-C ends the run after a step"
    )
    save_every: int = flag(0, "optimizer steps between checkpoints besides those; 0: none")
    save_async: bool = flag(True, "write those in the background, from copies in the host's memory")
    keep_last: int = flag(2, "checkpoints to keep, older ones are removed; 0: all")
    keep_best: bool = flag(False, "keep the one with the lowest held-out loss, too")
    resume: str | None = flag(
        None, "auto: go on from the newest whole checkpoint of output_dir, if there is one; or a "
        "checkpoint's folder, or a run's"
    )  # fmt: skip
    resume_anyway: bool = flag(False, "go on even if data, seed or rows of a step are others")
    export: Literal["none", "bf16", "fp16", "fp32"] = flag(
        "none", "at the end, a Hugging Face folder in this dtype: hf/ in the run's folder"
    )
    log_every: int = flag(1, "optimizer steps between two logged ones")
    eval_every: int = flag(0, "optimizer steps between evaluations; 0: before and after only")
    eval_batch_size: int = flag(0, "rows a replica evaluates at a time; 0: --micro_batch_size")
    sample_tokens: int = flag(32, "length of the three answers generated at the end; 0: none")
    report_to: Literal["none", "tensorboard", "wandb"] = flag("none", "a tracker beside the JSONL")
    comm_timer: bool = flag(True, "time communication in every step; off: comm columns are 0")
    profile_steps: str = flag(
        "", '"a:b": profile these steps (from 1): a Chrome trace per rank and profile.txt'
    )
    peak_tflops: float | None = flag(
        None, "of one GPU in the run's dtype, for MFU; default: llm_demo/device.py's table"
    )
    estimate: bool = flag(
        False, "print the memory each rank is expected to need, by part, and exit; allocates none"
    )
    dry_run: bool = flag(
        False, "do everything up to step 1 and one forward pass, print the plan, exit; writes none"
    )  # fmt: skip


class OneLine:
    def error(self, message):  # argparse prints its 60-line usage first; the line is what helps
        raise UserError(f"{message} (see --help)")


class Parser(OneLine, HfArgumentParser):
    pass


class PlainParser(OneLine, argparse.ArgumentParser):
    pass


def whole(at_least: int = 0):
    """A type for argparse: a whole number of at least this."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = -1
        if not at_least <= value <= MOST:
            said = f"{text[:80]}: must be a whole number, {at_least} or more"
            raise argparse.ArgumentTypeError(said)
        return value

    return parse


def size(text: str) -> str:
    """A type for argparse: a number of bytes with its unit."""
    if not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)? ?[KMGT]B", text, re.I | re.ASCII):
        raise argparse.ArgumentTypeError(f"{text[:80]}: must be a size such as 500MB or 5GB")
    return text


def regex(text: str) -> str:
    """A type for argparse: a regular expression."""
    try:
        re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"{text}: not a regular expression ({e})") from None
    return text


def parse_args(description: str, *more: type, argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the shared flags and those of the dataclasses in `more` into one flat namespace.

    Raises UserError for an unknown flag (with the nearest known one), a wrong value or a
    combination that can't train."""
    groups = [ModelArgs, DataArgs, TrainArgs, RunArgs, *more]
    parser = Parser(groups, description=description, allow_abbrev=False)
    for field in (f for group in groups for f in dataclasses.fields(group)):
        if field.type == bool | None:
            parser._option_string_actions[f"--{field.name}"].nargs = "?"
            parser._option_string_actions[f"--{field.name}"].const = True
        if field.type in (bool, bool | None) and not field.default:
            # HfArgumentParser adds --no_x to the others itself
            parser.add_argument(f"--no_{field.name}", action="store_false", dest=field.name)
    for dtype in ("bf16", "fp16"):
        parser.add_argument(
            f"--{dtype}", action="store_const", const=dtype, dest="dtype", help=f"--dtype {dtype}"
        )
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        raise UserError(f"unknown argument {unknown[0]}; {hint}")
    check(args)
    return args


def less_memory(args: argparse.Namespace) -> str:
    """What to change after running out of GPU memory, with the present values, best first."""
    given = vars(args)
    now = given.get
    ways = [
        ("micro_batch_size", now("micro_batch_size", 1) > 1, "halve it, double grad_accum_steps"),
        ("use_activation_checkpointing", not now("use_activation_checkpointing"), "true"),
        ("activation_memory_budget", now("activation_memory_budget") == 1, "0.6, where compiled"),
        ("reshard_after_forward", now("reshard_after_forward") is False, "true"),
        ("seq_len", True, "shorter rows"),
        ("dtype", now("dtype") == "fp32", "bf16"),
    ]
    ways = [way for way in ways if way[1] and way[0] in given]  # a program may have none of them
    lines = [f"--{name} (now {now(name) or 'the default'}): {how}" for name, _, how in ways]
    return "; ".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


MOST = 2**31 - 1  # for whole numbers
# Every number must be finite, not negative and at most MOST. Further bounds:
POSITIVE = ("lr", "peak_tflops")
AT_LEAST_1 = ("micro_batch_size", "grad_accum_steps", "log_every", "stages")
AT_MOST = {"seed": 2**63 - 1, "num_epochs": 1e9}


def check_numbers(args: argparse.Namespace) -> None:
    """Raises UserError for the first numeric flag whose value can't be meant."""
    for name, value in vars(args).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        said = f"--{name} {str(value)[:80]}"
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{said}: must be a finite number")
        if name == "activation_memory_budget" and not 0 <= value <= 1:
            raise UserError(f"{said}: a share, from 0 to 1")
        if name in POSITIVE and not value > 0:
            raise UserError(f"{said}: must be positive")
        if name in AT_LEAST_1 and value < 1:
            raise UserError(f"{said}: must be at least 1")
        if value < 0:
            raise UserError(f"{said}: must not be negative")
        most = AT_MOST.get(name, MOST if isinstance(value, int) else math.inf)
        if value > most:
            raise UserError(f"{said}: must be at most {most:,}")


def check(args: argparse.Namespace) -> None:
    check_numbers(args)
    if args.max_steps == 0 and not args.num_epochs > 0:
        raise UserError("--max_steps 0 needs --num_epochs above 0")
    if args.resume == "auto" and not args.output_dir:
        raise UserError("--resume auto needs --output_dir: whose checkpoints?")
    if args.export != "none" and not args.save:
        raise UserError("--export makes its folder of the last checkpoint: it can't go without one")
    if args.resume and args.overwrite:
        raise UserError("--resume and --overwrite: one keeps a run's folder, the other empties it")
    if bool(args.input_key) != bool(args.target_key):
        raise UserError("--input_key and --target_key name a pair of columns: give both")


def command_line() -> str:
    import shlex

    return shlex.join([sys.executable, *sys.argv])
