"""DeepSpeed for the pipeline and for ZeRO: its version, the switches of --deepspeed_config, its
configuration. ds_patches.py has what is changed in it, ds_state.py its state."""

import contextlib
import io
import os
from pathlib import Path

import torch
from packaging.version import Version

from llm_demo.core.errors import UserError
from llm_demo.machine.files import DECODER
from llm_demo.machine.process import regular, versions_of
from llm_demo.machine.text import blame

OLDEST, TESTED = "0.19.3", "0.19.8"
COMMS_LOGGER = {"enabled", "verbose", "prof_all", "prof_ops", "debug"}  # its switches


def check_version(installed: str | None = None) -> None:
    """Raise UserError for a DeepSpeed whose pipeline trains on wrong gradients."""
    installed = installed or versions_of(["deepspeed"])["deepspeed"]
    if not installed:
        raise UserError(f"DeepSpeed is missing: pip install deepspeed=={TESTED}")
    if Version(installed) < Version(OLDEST):
        raise UserError(
            f"DeepSpeed {installed}: its pipeline scales gradients wrongly when it accumulates "
            f"them (fixed in {OLDEST}); pip install 'deepspeed>={OLDEST}'"
        )


check_version()  # before the import below: an old version may not even import
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns about auto-detection

from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.comm.config import CommsLoggerConfig  # noqa: E402
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402


def quiet():
    """A context in which DeepSpeed prints nothing: it prints its topology and its memory use."""
    return contextlib.redirect_stdout(io.StringIO())


def allowed_switches(path: str, plain: dict[str, type], zero: set[str]) -> dict:
    """The user's engine switches, as DeepSpeed reads them. plain: those allowed, and their types;
    zero: those allowed in zero_optimization. Other switches could train other numbers than the run
    reports, so they are refused, as are values of the wrong type: raises UserError."""
    with blame(f"--deepspeed_config {path}"):
        switches = DECODER.decode(regular(Path(path)).read_text("utf-8"))
    groups = {
        "zero_optimization": (zero, DeepSpeedZeroConfig),
        "comms_logger": (COMMS_LOGGER, CommsLoggerConfig),
    }
    check_names(path, switches, {*plain, *groups})
    for name, value in switches.items():
        where = f"{path}: {name}"
        if name in groups:
            allowed, config_type = groups[name]
            check_names(where, value, allowed)
            with blame(where):  # as DeepSpeed's own pydantic model reads them, "1000" as 1000
                config = config_type(**value)
            read = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
            switches[name] = {key: read[key] for key in value}
        elif type(value) is not plain[name]:
            raise UserError(f"{where} must be of type {plain[name].__name__}")
    if switches.get("zero_optimization", {}).get("overlap_comm"):
        raise UserError(
            f"{path}: overlap_comm is refused: DeepSpeed reuses buffers that are still being sent, "
            "which gives wrong or NaN gradients"
        )
    return switches


def check_names(where: str, values, allowed: set[str]) -> None:
    """Raise UserError for switches that are not allowed, or no object."""
    if not isinstance(values, dict):
        raise UserError(f"{where} must be an object")
    unknown = values.keys() - allowed
    if unknown:
        raise UserError(
            f"{where}: {', '.join(sorted(unknown))}: only these switches keep the numbers of the "
            f"flags: {', '.join(sorted(allowed))}"
        )


def shared_config(switches: dict, args, dtype: torch.dtype) -> dict:
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
