"""DeepSpeed for the pipeline and for ZeRO: its version, the switches of --deepspeed_config, its
configuration. ds_patches.py has what is changed in it, ds_state.py its state."""

import contextlib
import io
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from packaging.version import Version

from llm_demo.core.errors import UserError
from llm_demo.machine.files import DECODER
from llm_demo.machine.process import regular

OLDEST, TESTED = "0.19.3", "0.19.8"
# In --deepspeed_config: the flags that set these numbers.
OWNED = {
    "train_batch_size": "--micro_batch_size and --grad_accum_steps",
    "train_micro_batch_size_per_gpu": "--micro_batch_size",
    "gradient_accumulation_steps": "--grad_accum_steps",
    "gradient_clipping": "--max_grad_norm",
    "optimizer": "--lr and --weight_decay",
    "scheduler": "--lr_scheduler and --warmup_steps",
    "bf16": "--dtype",
    "fp16": "--dtype",
    "data_types": "--dtype",
    "communication_data_type": "--dtype",
}

# The kinds of the switches; all others are numbers.
BOOLEANS = {
    "allgather_partitions", "contiguous_gradients", "debug", "enabled", "memory_breakdown",
    "overlap_comm", "pin_memory", "prescale_gradients", "prof_all", "reduce_scatter", "verbose",
    "zero_allow_untested_optimizer",
}  # fmt: skip
OBJECTS = {"comms_logger", "offload_optimizer", "offload_param", "zero_optimization"}
ELSE = {"device", "prof_ops", "stage"}
COMMS_LOGGER = {"debug", "enabled", "prof_all", "prof_ops", "verbose"}


def check_version(installed: str | None = None) -> None:
    """Raise UserError for a DeepSpeed whose pipeline trains on wrong gradients."""
    try:
        installed = installed or version("deepspeed")
    except PackageNotFoundError:
        raise UserError(f"DeepSpeed is missing: pip install deepspeed=={TESTED}") from None
    if Version(installed) < Version(OLDEST):
        raise UserError(
            f"DeepSpeed {installed}: its pipeline scales gradients wrongly when it accumulates "
            f"them (fixed in {OLDEST}); pip install 'deepspeed>={OLDEST}'"
        )


check_version()  # before the import below: an old version may not even import
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns about auto-detection

from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402


def quiet():
    """A context in which DeepSpeed prints nothing: it prints its topology and its memory use."""
    return contextlib.redirect_stdout(io.StringIO())


def read_switches(path: str, known: set[str], known_zero: set[str]) -> dict:
    """The user's engine switches, of which the sets name the allowed. Raises UserError for settings
    that flags own, and for those that train wrongly or of the wrong kind."""
    try:
        switches = DECODER.decode(regular(Path(path)).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"--deepspeed_config {path}: {e}") from None
    zero = switches.get("zero_optimization", {}) if isinstance(switches, dict) else None
    if not isinstance(zero, dict):
        raise UserError(f"{path}: must be an object, and zero_optimization in it another")
    for key in OWNED.keys() & switches.keys():
        raise UserError(f"{path}: {key} is set by {OWNED[key]}; remove it from the file")
    # Only switches known to be harmless: aliases such as "bfloat16" or "torch_autocast" would train
    # in another dtype than the run reports.
    exact = "is not among the switches that keep the numbers exact:"
    check_names(f"{path}: ", switches, known, exact)
    check_names(f"{path}: zero_optimization.", zero, known_zero, exact)
    check_kinds(path, switches)
    if not switches.get("steps_per_print", 1) >= 1:
        raise UserError(f"{path}: steps_per_print must be at least 1")
    logger = switches.get("comms_logger", {})
    check_names(f"{path}: comms_logger.", logger, COMMS_LOGGER)
    check_kinds(path, logger)
    names = logger.get("prof_ops", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: prof_ops must be a list of names, not {json.dumps(names)}")
    try:
        DeepSpeedZeroConfig(**zero)
    except ValueError as e:  # pydantic's, of many lines
        error = e.errors()[0]
        key = ".".join(map(str, ("zero_optimization", *error["loc"])))
        raise UserError(f"{path}: {key}: {error['msg']}") from None
    check_kinds(path, zero)
    if zero.get("overlap_comm"):
        raise UserError(
            f"{path}: overlap_comm is refused: DeepSpeed reuses buffers that are still being sent, "
            "which gives wrong or NaN gradients"
        )
    return switches


def check_names(where: str, values: dict, allowed: set[str], how: str = "is not one of") -> None:
    """Raise UserError for a switch that is not allowed."""
    for key in values.keys() - allowed:
        raise UserError(f"{where}{key} {how} {', '.join(sorted(allowed))}")


def check_kinds(path: str, values: dict) -> None:
    """Raise UserError for switches of a wrong kind. With these, DeepSpeed would fail, or would read
    a text as a number or boolean, which the rest of the script would read differently."""
    for key, value in values.items():
        given = json.dumps(value)
        if key in BOOLEANS and type(value) is not bool:
            raise UserError(f"{path}: {key} must be true or false, not {given}")
        if key in OBJECTS and type(value) is not dict:
            raise UserError(f"{path}: {key} must be an object, not {given}")
        if key not in BOOLEANS | OBJECTS | ELSE and type(value) not in (int, float):
            raise UserError(f"{path}: {key} must be a number, not {given}")


def engine_config(switches: dict, args, dtype: torch.dtype) -> dict:
    """The engine's configuration: the switches plus what the flags own."""
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"  # see ds_patches.join_group
    if dtype == torch.float16 and not (on_cpu or accelerator.is_fp16_supported()):
        raise UserError("--dtype fp16: DeepSpeed has no fp16 on this device; take bf16 or fp32")
    config = {
        "steps_per_print": 10**9,
        **switches,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.grad_accum_steps,
        "gradient_clipping": args.max_grad_norm,
        # Gradients are accumulated and reduced in fp32. By default DeepSpeed reduces in the compute
        # dtype even in a group of one, which rounds to bf16 in every step.
        "communication_data_type": "fp32",
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
    elif dtype == torch.float16:
        config["fp16"] = {"enabled": True, "initial_scale_power": 16}
    if dtype != torch.float32:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
