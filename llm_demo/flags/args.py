"""Flags of the training scripts: each declared once, with its help, bounds and choices.

Flags that all scripts share are here, those of one script in the flags.py beside it. Nothing heavy
is imported, so that a launcher can check all flags before torch is imported.
"""

import dataclasses
import re
import sys
from typing import Literal

from llm_demo.core.errors import UserError
from llm_demo.flags.parsing import (
    flag,
    parser_of,
    refuse_unknown,
    shown,
    template_variables,
    value_of,
)
from llm_demo.machine.cards import CARDS
from llm_demo.machine.files import ROOT
from llm_demo.machine.text import counted

MAX_STEPS = 99_999_999  # the names of checkpoints have eight digits
MAX_TOKENS = 2**24  # of a row
MAX_ROWS = 2**20  # of a rank in a step
MAX_COUNT = 2**16  # rows of a micro-batch, micro-batches of a step, rank of adapters


@dataclasses.dataclass
class ModelArgs:
    """Model"""

    model_name_or_path: str = flag(
        str(ROOT / "models/qwen3-tiny"),
        "Hugging Face model: a folder or a hub id. Random weights if the folder has none.",
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
        "Recompute each block in the backward pass: less memory, about a third more compute.",
        saves_memory="true",
    )
    compile: bool | None = flag(
        None, "Compile decoder blocks and loss. Default: where it works and is faster."
    )
    activation_memory_budget: float = flag(
        1.0, "Share of activations (0 to 1) that compiled blocks keep, not recompute.", at_most=1
    )
    blocks_per_unit: int = flag(0, "Blocks compiled and sharded as one. 0: up to 4, 1 in Qwen3.5.")


@dataclasses.dataclass
class DataArgs:
    """Data"""

    train_json: str = flag(
        str(ROOT / "data/sft_en.jsonl"),
        "Files separated by commas, a glob, a folder or a hub dataset (id:split or "
        "id:configuration:split); my.jsonl*2: twice.",
        path=True,
    )
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
    skip_bad_rows: bool = flag(  # None: of held-out data
        False, "Skip and count rows that can't be read. Off: an error."
    )
    seq_len: int = flag(
        0,
        "Length of a row in tokens. 0: 99 % of the documents fit, rounded up to a multiple of "
        "128, at most 4096 and the model's limit.",
        at_most=MAX_TOKENS,
    )
    pack_sequences: bool = flag(True, "Pack whole documents into rows. Off: one per row, padded.")
    overlong: Literal["truncate", "split", "drop"] = flag("truncate", "Documents over --seq_len.")
    train_on_prompt: bool = flag(False, "Train on every token, not only on the assistant's.")
    learn_turns: Literal["all", "last"] = flag("all", "Assistant turns to train on.")
    learn_reasoning: bool = flag(
        True, "Train on reasoning too. false: only on answers, asked for without reasoning."
    )
    chat_template_kwargs: str | None = flag(
        None, "Variables of the chat template, such as '{\"preserve_thinking\": true}'."
    )

    @staticmethod
    def check(args) -> None:
        """Raise UserError for flags that contradict each other; also those of evaluate.py."""
        if 0 < (args.seq_len or 0) < 8:
            raise UserError(f"--seq_len {args.seq_len} is too small: the minimum is 8")
        if bool(args.input_key) != bool(args.target_key):
            raise UserError("--input_key and --target_key name a pair of columns: set both")
        if args.input_key and args.input_key == args.target_key:
            raise UserError(
                f"--input_key and --target_key both name {args.input_key!r}: a question and its "
                "answer are two columns"
            )
        clash = "contradict each other: use one"
        if args.train_on_prompt and args.learn_turns == "last":
            raise UserError(f"--learn_turns last and --train_on_prompt {clash}")
        if args.train_on_prompt and not args.learn_reasoning:
            raise UserError(f"--no_learn_reasoning and --train_on_prompt {clash}")
        template_variables(args.chat_template_kwargs, "--chat_template_kwargs")


@dataclasses.dataclass
class TrainArgs:
    """Training"""

    micro_batch_size: int = flag(
        1, "Rows per data-parallel rank in one pass.", at_least=1, at_most=MAX_COUNT
    )
    grad_accum_steps: int = flag(
        1, "Micro-batches per optimizer step.", at_least=1, at_most=MAX_COUNT
    )
    max_steps: int = flag(0, "Optimizer steps. 0: as --num_epochs says.", at_most=MAX_STEPS)
    num_epochs: float | None = flag(
        None, "Passes if --max_steps is 0. Default: for about 100 steps.", at_most=1e9
    )
    lr: float | None = flag(
        None,
        "Peak learning rate. Default: 2e-5; adapters: 2e-4; random: 1e-3.",
        positive=True,
        at_most=1000,
    )
    weight_decay: float = flag(0.01, "Weight decay of AdamW. Not applied to norms and biases.")
    warmup_steps: int | None = flag(
        None, "Optimizer steps of linear warm-up. Default: 10, at most 10 % of the run."
    )
    lr_scheduler: Literal["cosine", "linear", "constant"] = flag(
        "cosine", "Decay after the warm-up. cosine and linear end at a tenth of --lr."
    )
    max_grad_norm: float = flag(1.0, "Clip the global gradient norm to this. 0: no clipping.")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = flag(
        "auto",
        "Compute dtype; trained weights are always fp32. auto: fp32 on a CPU, bf16 on a GPU that "
        "has it, else fp16. Short forms: --bf16, --fp16.",
    )
    fp8: Literal["none", "rowwise_gw", "rowwise", "blockwise"] = flag(
        "none",
        "Products of the large linear layers of blocks in fp8, which is approximate. --fp8 alone "
        "means rowwise_gw, with weights' gradients in bf16. blockwise: as DeepSeek-V3.",
        alone="rowwise_gw",
    )
    optim_state: Literal["fp32", "bf16"] = flag(
        "fp32", "Dtype of AdamW's moments. bf16 is approximate."
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
    keep_last: int = flag(2, "Checkpoints to keep; older ones are deleted. 0: all.")
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
    early_stopping: int = flag(
        0,
        "End after so many evaluations without a better one. The best checkpoint is kept and "
        "exported. 0: never.",
    )
    sample_tokens: int | None = flag(
        None, "Tokens per sample answer at the end. 0: no samples. Default: 32, long rows: 0."
    )
    report_to: Literal["none", "tensorboard", "wandb"] = flag("none", "Also log to this tracker.")
    comm_timer: bool = flag(True, "Measure communication time in every step. Off: it is n/a.")
    profile_steps: str = flag(
        "", "Steps to profile, such as 5:7 (from 1): traces and profile.txt. Default: none."
    )
    peak_tflops: float | None = flag(
        None, "Peak TFLOP/s of a GPU in this dtype, for MFU. Default: from a table.", positive=True
    )
    device_memory_gb: float = flag(0.0, "Limit of PyTorch's memory on each GPU, in GiB. 0: none.")
    estimate: bool = flag(False, "Print an estimate of peak memory per rank and exit.")
    card: str = flag("", "GPU that --estimate is for: h100, mi100, ... Default: this machine's.")
    dry_run: bool = flag(False, "Run one forward pass, print the plan and exit.")


SHARED = (ModelArgs, DataArgs, TrainArgs, RunArgs)


@dataclasses.dataclass
class Args(RunArgs, TrainArgs, DataArgs, ModelArgs):
    """The flags of every training script; `parse_args` adds a script's own."""

    # What flags of some scripts are in the others, for code that all scripts share. No fields: a
    # script with such a flag declares it.
    activations_on_host = freeze_router = optimizer_on_host = reshard_after_forward = False
    lora_rank = psgd_rank = router_aux_loss = router_bias_update = 0
    sequence_parallel = tensor_parallel = 1
    base_bits = 16
    adapter = deepspeed_config = expert_parallel = None

    def check_processes(self, processes: int) -> None:
        """Raise UserError if these flags don't work with so many processes. For a script's own
        flags to override: its launcher calls it before any rank starts, the script once it has."""

    @staticmethod
    def check(args) -> None:
        """Raise UserError for shared flags that contradict each other."""
        parse_steps(args.profile_steps)
        if args.card and not args.estimate:
            raise UserError(f"--card {args.card[:80]} is what to estimate for: add --estimate")
        if args.card and args.card not in CARDS:
            raise UserError(f"--card {args.card[:80]}: choose from {', '.join(CARDS)}")
        if (rows := args.micro_batch_size * args.grad_accum_steps) > MAX_ROWS:
            raise UserError(
                f"--micro_batch_size x --grad_accum_steps are {rows:,} rows a step: must be at "
                f"most {MAX_ROWS:,}"
            )
        if args.fp8 != "none" and args.dtype == "fp16":
            raise UserError(f"--fp8 {args.fp8} needs --dtype bf16, not fp16")
        if args.fp8 != "none" and args.router_aux_loss:
            raise UserError(
                "--router_aux_loss counts the experts chosen in a pass without fp8: drop --fp8"
            )
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
                raise UserError(
                    "--early_stopping needs --eval_every, the steps between evaluations"
                )
            args.save_every = args.save_every or args.eval_every  # the best checkpoint must exist
            if args.eval_every % args.save_every:
                raise UserError(
                    f"--early_stopping: --eval_every {args.eval_every} must be a multiple of "
                    f"--save_every {args.save_every}, so that the best checkpoint exists"
                )
        if args.save_every and not args.save:
            raise UserError("--save_every needs checkpoints: drop it, or --no_save")
        if args.resume and args.overwrite:
            raise UserError("--resume keeps the run's folder and --overwrite empties it: use one")
        if args.eval_fraction is not None and args.eval_json not in ("auto", "none"):
            raise UserError(
                "--eval_fraction splits --train_json and --eval_json names a file: use one"
            )


@dataclasses.dataclass
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
        at_least=1,
    )

    @staticmethod
    def check(args) -> None:
        if args.seq_len % (n := args.tensor_parallel):
            raise UserError(f"--tensor_parallel {n} does not divide --seq_len {args.seq_len}")


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


@dataclasses.dataclass
class StageArgs:
    """Pipeline"""

    stages: int = flag(
        2, "Pipeline stages. More processes are replicas (pp/) or shards (fsdp_pp/).", at_least=1
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
    """The shared flags and those of the dataclasses in `more`, parsed into one flat dataclass.
    description: printed as it is above the help. Raises UserError for an unknown flag, a value that
    is not allowed and what a dataclass's `check(args)` refuses."""
    groups = [*SHARED, *more]
    parser = parser_of(description, groups, {})
    given, unknown = parser.parse_known_args(argv)
    values = vars(given)
    if values.pop("help"):
        print(parser_of(description, groups, values).format_help(), end="")
        sys.exit(0)
    if unknown:
        refuse_unknown(unknown[0], parser)
    bases = (*reversed(more), Args)  # the last base's fields come first
    args = dataclasses.make_dataclass("AllArgs", [], bases=bases)(**values)
    check_all(args)
    return args


def refuse_with_deepspeed(args) -> None:
    """Raise UserError for what does not work with DeepSpeed: fp8, and moments in bf16. Its own
    `bf16_optimizer_states` needs `bf16_master_weights_and_grads`, and its steps take fp32 ones."""
    if args.fp8 != "none":
        raise UserError(
            f"--fp8 {args.fp8} does not work with DeepSpeed's engines: use fsdp/ or fsdp_pp/"
        )
    if args.optim_state != "fp32":
        raise UserError(
            f"--optim_state {args.optim_state} does not work with DeepSpeed, which has bf16 "
            "moments only beside bf16 masters: use fsdp/ or fsdp_pp/"
        )


def check_all(args) -> None:
    """Raise UserError for flags that contradict each other."""
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
    if args.lora_rank and args.base_bits != 4 and accepted(args, "base_bits", 4):
        ways.append(("base_bits", "4, unless the model has experts"))
    if not args.lora_rank and args.optim_state == "fp32" and accepted(args, "optim_state", "bf16"):
        ways.append(("optim_state", "bf16, which is approximate"))
    ways = [(name, getattr(args, name), advice) for name, advice in ways]
    lines = [f"--{n} (now {0 if v is None else shown(v)}): {advice}" for n, v, advice in ways]
    return "; ".join(f"{i}. {line}" for i, line in enumerate(lines, 1))
