"""Flags of the training scripts: each declared once, with its help, bounds and choices.

Flags that all scripts share are here, those of one script in the flags.py beside it. Nothing heavy
is imported, so that a launcher can check all flags before torch is imported.
"""

import dataclasses
import functools
import sys
from typing import Literal

from llm_demo.core.errors import UserError
from llm_demo.flags.parsing import (
    fields_of,
    flag,
    flag_text,
    own_fields,
    parser_of,
    refuse_unknown,
    template_variables,
    value_of,
)
from llm_demo.flags.rules import check_rules
from llm_demo.machine.cards import CARDS
from llm_demo.machine.files import ROOT
from llm_demo.machine.text import counted

MAX_STEPS = 99_999_999  # the names of checkpoints have eight digits
MAX_TOKENS = 2**24  # of a row
MAX_COUNT = 2**16  # rows of a micro-batch, micro-batches of a step, rank of adapters


@dataclasses.dataclass(frozen=True)
class ModelArgs:
    """Model"""

    model_name_or_path: str = flag(
        str(ROOT / "models/qwen3-tiny"),
        "Hugging Face model: a folder or a hub id. Random weights if the folder has none.",
        tags="input per_node held_out",
        env="MODEL",
        path=True,
    )
    tokenizer_name_or_path: str | None = flag(
        None,
        "Tokenizer: a folder or a hub id. Default: the model's own.",
        tags="input per_node held_out",
        path=True,
    )
    chat_template: str | None = flag(
        None,
        "File with a Jinja chat template. Default: the tokenizer's own.",
        tags="input per_node held_out",
        path=True,
    )
    attn_impl: Literal[
        "auto",
        "sdpa",
        "varlen_cudnn",
        "varlen",
        "flash_attn",
        "efficient",
        "bucketed",
        "bucketed_math",
        "math",
    ] = flag("auto", "Attention backend. auto: the fastest that runs here; the log says why.")
    use_activation_checkpointing: bool = flag(
        False,
        "Recompute each block in the backward pass: less memory, about a third more compute.",
        saves_memory="true",
    )
    compile: bool | None = flag(
        None, "Compile decoder blocks and loss. Default: where it works and is faster."
    )
    activation_memory_budget: float = flag(
        1.0,
        "Share of activations (0 to 1) that compiled blocks keep, not recompute.",
        at_most=1,
        saves_memory="0.6, if blocks are compiled and have no experts",
    )
    blocks_per_unit: int = flag(
        0, "Blocks compiled and sharded as one. 0: up to 4, 1 in Qwen3.5.", off=1
    )


@dataclasses.dataclass(frozen=True)
class DataArgs:
    """Data"""

    train_json: str = flag(
        str(ROOT / "data/sft_en.jsonl"),
        "Files separated by commas, a glob, a folder or a hub dataset (id:split or "
        "id:configuration:split); my.jsonl*2: twice.",
        tags="input per_node",
        also="data dataset train_file",
        path=True,
    )
    eval_json: str = flag(
        "auto",
        "Held-out data; a hub dataset with its split, such as openai/gsm8k:test. auto: "
        "X.heldout.jsonl beside X.jsonl, if any. none: no evaluation.",
        tags="input per_node held_out resume",
        off="none",
        also="eval_file",
        path=True,
    )
    data_format: Literal[
        "auto", "tokens", "messages", "conversations", "prompt", "alpaca", "input", "text"
    ] = flag(
        "auto",
        "Format of an example. auto: detected from the first one.",
        tags="rows evaluate",
    )
    eval_fraction: float | None = flag(
        None,
        "Share of the training documents to hold out, such as 0.05.",
        tags="held_out",
        at_most=1,
    )
    input_key: str | None = flag(
        None, "Name of the prompt column. Needs --target_key.", tags="rows evaluate"
    )
    target_key: str | None = flag(
        None, "Name of the answer column. Needs --input_key.", tags="rows evaluate"
    )
    skip_bad_rows: bool = flag(  # None: of held-out data
        False, "Skip and count examples that can't be read. Off: an error.", tags="rows"
    )
    seq_len: int = flag(
        0,
        "Length of a row in tokens. 0: 99 % of the documents fit, rounded up to a multiple of "
        "128, at most 4096 and the model's limit.",
        tags="rows evaluate held_out card",
        also="max_length",
        at_most=MAX_TOKENS,
    )
    pack_sequences: bool = flag(
        True, "Pack whole documents into rows. Off: one per row, padded.", tags="rows"
    )
    overlong: Literal["truncate", "split", "drop"] = flag(
        "truncate", "Documents over --seq_len.", tags="rows held_out"
    )
    train_on_prompt: bool = flag(
        False,
        "Train on every token, not only on the assistant's.",
        tags="rows evaluate held_out card",
    )
    learn_turns: Literal["all", "last"] = flag(
        "all", "Assistant turns to train on.", tags="rows evaluate held_out"
    )
    learn_reasoning: bool = flag(
        True,
        "Train on reasoning too. false: only on answers, asked for without reasoning.",
        tags="rows evaluate held_out",
    )
    chat_template_kwargs: str | None = flag(
        None,
        "Variables of the chat template, such as '{\"preserve_thinking\": true}'.",
        tags="evaluate held_out",
    )

    @staticmethod
    def check(args) -> None:
        if 0 < args.seq_len < 8:
            raise UserError(f"--seq_len {args.seq_len} is too small: the minimum is 8")
        if args.input_key and args.input_key == args.target_key:
            raise UserError(
                f"--input_key and --target_key both name {args.input_key!r}: a question and its "
                "answer are two columns"
            )
        template_variables(args.chat_template_kwargs, "--chat_template_kwargs")


@dataclasses.dataclass(frozen=True)
class TrainArgs:
    """Training"""

    micro_batch_size: int = flag(
        1,
        "Rows per data-parallel rank in one pass.",
        also="batch_size train_batch_size",
        at_least=1,
        at_most=MAX_COUNT,
    )
    grad_accum_steps: int = flag(
        1, "Micro-batches per optimizer step.", at_least=1, at_most=MAX_COUNT
    )
    max_steps: int = flag(
        0, "Optimizer steps. 0: as --num_epochs says.", tags="resume", at_most=MAX_STEPS
    )
    num_epochs: float | None = flag(
        None, "Passes if --max_steps is 0. Default: for about 100 steps.", at_most=1e9
    )
    lr: float | None = flag(
        None,
        "Peak learning rate. Default: 2e-5; adapters: 2e-4; random: 1e-3.",
        tags="resume card",
        also="learning_rate",
        positive=True,
        at_most=1000,
    )
    weight_decay: float = flag(
        0.01, "Weight decay of AdamW. Not applied to norms and biases.", tags="resume card"
    )
    warmup_steps: int | None = flag(
        None,
        "Optimizer steps of linear warm-up. Default: 10, at most 10 % of the run.",
        tags="resume card",
    )
    lr_scheduler: Literal["cosine", "linear", "constant"] = flag(
        "cosine",
        "Decay after the warm-up. cosine and linear end at a tenth of --lr.",
        tags="resume card",
    )
    max_grad_norm: float = flag(
        1.0, "Clip the global gradient norm to this. 0: no clipping.", tags="resume card"
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = flag(
        "auto",
        "Compute dtype; trained weights are always fp32. auto: fp32 on a CPU, bf16 on a GPU that "
        "has it, else fp16. Short forms: --bf16, --fp16.",
        tags="resume card",
    )
    shuffle: bool = flag(True, "Shuffle the rows in every epoch. Off: they come in file order.")
    length_warmup: int = flag(0, "Number of first steps whose rows come shortest first. 0: none.")
    seed: int = flag(
        1234, "Seed of row order and random weights.", tags="card quiet", at_most=2**63 - 1
    )


@dataclasses.dataclass(frozen=True)
class RunArgs:
    """Run"""

    output_dir: str | None = flag(
        None,
        "Folder of the run. Default: runs/<script>-<model>-<time>.",
        tags="per_node quiet",
        path=True,
    )
    overwrite: bool = flag(
        False, "Replace the earlier run in --output_dir. Off: an error.", tags="quiet"
    )
    save: bool = flag(True, "Save a checkpoint at the end and when a signal stops the run.")
    save_every: int = flag(
        0, "Also save a checkpoint every so many optimizer steps. 0: never.", also="save_steps"
    )
    keep_last: int = flag(2, "Checkpoints to keep; older ones are deleted. 0: all.", tags="quiet")
    resume: str | None = flag(
        None,
        "auto: resume from the newest complete checkpoint in --output_dir, or start if there is "
        "none. A folder: resume from that checkpoint or run.",
        tags="quiet",
        also="resume_from_checkpoint",
        path=True,
    )
    resume_anyway: bool = flag(
        False, "Resume despite other data, rows of a step or configuration.", tags="quiet"
    )
    export: Literal["none", "bf16", "fp16", "fp32"] = flag(
        "none",
        "Export a Hugging Face model in this dtype to hf/ in the run's folder at the end.",
        tags="quiet",
    )
    log_every: int = flag(1, "Optimizer steps between log lines.", also="logging_steps", at_least=1)
    eval_every: int = flag(
        0, "Steps between evaluations. 0: only before and after training.", also="eval_steps"
    )
    early_stopping: int = flag(
        0,
        "End after so many evaluations without a better one. The best checkpoint is kept and "
        "exported. 0: never.",
    )
    sample_tokens: int | None = flag(
        None,
        "Tokens per sample answer at the end. 0: no samples. Default: 32, long rows: 0.",
        tags="quiet",
    )
    report_to: Literal["none", "tensorboard", "wandb"] = flag(
        "none", "Also log to this tracker.", tags="quiet"
    )
    comm_timer: bool = flag(True, "Measure communication time in every step. Off: it is n/a.")
    profile_steps: str = flag(
        "",
        "Steps to profile, such as 5:7 (from 1): traces and profile.txt. Default: none.",
        form=(r"(\d{1,8}:\d{1,8})?", "two steps such as 5:7"),
    )
    peak_tflops: float | None = flag(
        None, "Peak TFLOP/s of a GPU in this dtype, for MFU. Default: from a table.", positive=True
    )
    device_memory_gb: float = flag(0.0, "Limit of PyTorch's memory on each GPU, in GiB. 0: none.")
    estimate: bool = flag(False, "Print an estimate of peak memory per rank and exit.")
    card: str = flag(
        "",
        "GPU that --estimate is for: h100, mi100, ... Default: this machine's.",
        form=("|".join(["", *CARDS]), f"one of {', '.join(CARDS)}"),
    )
    dry_run: bool = flag(False, "Run one forward pass, print the plan and exit.")


SHARED = (ModelArgs, DataArgs, TrainArgs, RunArgs)


@dataclasses.dataclass(frozen=True)
class Args(RunArgs, TrainArgs, DataArgs, ModelArgs):
    """The flags of every training script; `parse_args` adds a script's own."""

    @staticmethod
    def fill(values: dict) -> None:
        """Set what other flags decide, before the flags are frozen."""
        if values["early_stopping"] and not values["save_every"]:
            values["save_every"] = values["eval_every"]  # the best checkpoint must exist

    def check_processes(self, processes: int) -> None:
        """Raise UserError if these flags don't work with so many processes. For a script's own
        flags to override: its launcher calls it before any rank starts, the script once it has."""

    @staticmethod
    def check(args) -> None:
        parse_steps(args.profile_steps)
        if args.max_steps == 0 and args.num_epochs == 0:
            raise UserError("--max_steps 0 needs --num_epochs above 0")
        if args.early_stopping and args.eval_every % args.save_every:
            raise UserError(
                f"--early_stopping: --eval_every {args.eval_every} must be a multiple of "
                f"--save_every {args.save_every}, so that the best checkpoint exists"
            )


@dataclasses.dataclass(frozen=True)
class LowBitArgs:
    """Lower precision"""

    fp8: Literal["none", "rowwise_gw", "rowwise", "blockwise"] = flag(
        "none",
        "Products of the large linear layers of blocks in fp8, which is approximate. --fp8 alone "
        "means rowwise_gw, with weights' gradients in bf16. blockwise: as DeepSeek-V3.",
        tags="resume",
        alone="rowwise_gw",
    )
    optim_state: Literal["fp32", "bf16"] = flag(
        "fp32",
        "Dtype of AdamW's moments. bf16 is approximate.",
        tags="resume",
        saves_memory="bf16, which is approximate",
    )


@dataclasses.dataclass(frozen=True)
class SpreadArgs:
    """Blocks over ranks"""

    tensor_parallel: int = flag(
        1,
        "Ranks that share each block's heads and MLP: for tiny micro-batches, or wide layers.",
        at_least=1,
    )
    expert_parallel: int | None = flag(
        None,
        "Ranks over which experts are spread. Default: the fewest that fit; in fsdp_pp/ 1.",
        off=1,
        at_least=1,
    )

    @staticmethod
    def check(args) -> None:
        check_divides_rows(args, "tensor_parallel")


@dataclasses.dataclass(frozen=True)
class ExpertArgs:
    """Mixture of experts"""

    freeze_router: bool = flag(False, "Do not train the routers.", tags="resume")


@dataclasses.dataclass(frozen=True)
class StageArgs:
    """Pipeline"""

    stages: int = flag(
        2,
        "Pipeline stages. More processes are replicas (pp/) or shards (fsdp_pp/).",
        off=1,
        at_least=1,
    )
    partition: str = flag(
        "balanced",
        "How to split the blocks into stages: balanced (by estimated time, with both ends), "
        "uniform, parameters, or the blocks of each piece, such as 18,10.",
        form=(
            r"balanced|uniform|parameters|\d+(,\d+)*",
            "balanced, uniform, parameters or counts such as 18,10",
        ),
    )

    def check_processes(self, processes: int) -> None:
        if processes % self.stages:
            raise UserError(
                f"{counted(processes, 'process', 'processes')} can't form pipelines of "
                f"{self.stages} --stages: set NPROC_PER_NODE to a multiple, or other --stages"
            )


def parse_args(description: str, *more: type, argv: list[str] | None = None):
    """The shared flags and those of the dataclasses in `more`, parsed into one flat dataclass that
    is frozen. Flags of other scripts are attributes of it, at their values without effect.
    description: printed as it is above the help. Raises UserError for an unknown flag, a value that
    is not allowed, and flags that do not work together."""
    groups = [*SHARED, *more]
    parser = parser_of(description, groups, {})
    given, unknown = parser.parse_known_args(argv)
    values = vars(given)
    if values.pop("help"):
        print(parser_of(description, groups, values).format_help(), end="")
        sys.exit(0)
    if unknown:
        refuse_unknown(unknown[0], groups)
    args_type = type_of(more)
    for group in reversed(args_type.__mro__):
        if "fill" in vars(group):
            group.fill(values)
    args = args_type(**values)
    check_all(args)
    return args


def type_of(more: tuple[type, ...] = ()) -> type:
    """A dataclass of the shared flags and those in `more`."""
    mine = fields_of((Args, *more))
    absent = {name: f.metadata["off"] for name, f in all_fields().items() if name not in mine}
    bases = (*reversed(more), Args)  # the last base's fields come first
    return dataclasses.make_dataclass("AllArgs", [], bases=bases, namespace=absent, frozen=True)


@functools.cache
def all_fields() -> dict[str, dataclasses.Field]:
    """The flags of all scripts, by name."""
    found = fields_of(SHARED)
    for own in own_fields().values():
        found |= own
    return found


def names_of(tag: str) -> tuple[str, ...]:
    """The flags of all scripts with this tag, a word of parsing.TAGS."""
    return tuple(name for name, field in all_fields().items() if tag in field.metadata["tags"])


def check_divides_rows(args, name: str) -> None:
    """Raise UserError if a number of ranks does not divide the length of a row."""
    ranks = getattr(args, name)
    if args.seq_len % ranks:
        raise UserError(f"--{name} {ranks} does not divide --seq_len {args.seq_len}")


def check_all(args) -> None:
    """Raise UserError for flags that do not work together. args: a dataclass of flags."""
    check_rules(args)
    for group in reversed(type(args).__mro__):
        if "check" in vars(group):
            group.check(args)


def accepted(args, name: str, value) -> bool:
    """Whether the flags are still accepted if one of them has another value."""
    try:
        check_all(dataclasses.replace(args, **{name: value}))
    except UserError:
        return False
    return True


def parse_steps(text: str) -> tuple[int, int] | None:
    """ "a:b" -> (a, b), steps from 1, both included; "" -> None. Raises UserError."""
    if not text:
        return None
    first, last = map(int, text.split(":"))
    if not 1 <= first <= last:
        raise UserError(f"--profile_steps {text}: must be in order, counted from 1")
    return first, last


def less_memory(args) -> str:
    """What to change after running out of GPU memory: the flags that can save memory, with their
    current values. Flags that other flags do not allow are left out. A remark says what depends on
    more than flags."""
    ways = []
    if args.micro_batch_size > 1:
        ways.append(("micro_batch_size", "halve it, double grad_accum_steps"))
    if args.dtype == "fp32":
        ways.append(("dtype", "bf16"))
    for field in dataclasses.fields(args):
        advice = field.metadata["saves_memory"]
        if advice and getattr(args, field.name) == field.default:
            if accepted(args, field.name, value_of(field, advice.split(",")[0])):
                ways.append((field.name, advice))
    ways.append(("seq_len", "shorter rows"))
    lines = []
    for i, (name, advice) in enumerate(ways, 1):
        now = getattr(args, name)
        now = 0 if now is None else flag_text(now)
        lines.append(f"{i}. --{name} (now {now}): {advice}")
    return "; ".join(lines)
