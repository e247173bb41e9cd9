"""What every script on DeepSpeed needs: its version, its process group, its switches, its scaler.

Tested with DeepSpeed 0.19.8. Each workaround checks for what it patches and fails without it."""

import contextlib
import functools
import io
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.version import Version

from llm_demo.core.errors import UserError
from llm_demo.core.optim import MOMENTS, CompiledAdamW, LossScale, adam_steps, clipped_step
from llm_demo.job.files import DECODER
from llm_demo.job.process import regular

OLDEST, TESTED = "0.19.3", "0.19.8"
KEYS = ("", *MOMENTS)  # what a checkpoint holds of a parameter; its master has no key
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

import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402
from deepspeed.utils import (  # noqa: E402
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)


def join(device: torch.device) -> None:
    """Make DeepSpeed use the existing process group."""
    if device.type == "cpu":
        # On a CPU, DeepSpeed compiles an all-reduce for inference here: it takes 30 s, needs ninja
        # and a compiler, and leaves 132 MiB in /dev/shm. `import deepspeed.comm.torch as x` would
        # give PyTorch itself, so the module is looked up by name.
        comm = need(sys.modules, "deepspeed.comm.torch")
        need(vars(comm), "build_shm_op")
        comm.build_shm_op = lambda: None
    deepspeed.init_distributed(verbose=False)
    # It keeps PyTorch's functions as they are now. A run that times communication wraps them later.
    backend, kept = deepspeed.comm.comm.cdb, ("all_gather_into_tensor", "reduce_scatter_tensor")
    for kept_as, name in zip(("all_gather_function", "reduce_scatter_function"), kept, strict=True):
        need(vars(backend), kept_as)
        setattr(backend, kept_as, functools.partial(_call, name))


def _call(name: str, *args, **kwargs):
    return getattr(dist, name)(*args, **kwargs)


def quiet():
    return contextlib.redirect_stdout(io.StringIO())


def need(mapping, name):
    if name not in mapping:
        raise UserError(
            f"DeepSpeed {version('deepspeed')} has no {name} any more, which this project patches "
            f"to keep the numbers right; install the tested deepspeed=={TESTED}"
        )
    return mapping[name]


# ZeRO accepts only optimizers whose exact class it lists.
need(vars(deepspeed.runtime.zero.utils), "ZERO_SUPPORTED_OPTIMIZERS").append(CompiledAdamW)


def read_switches(path: str, known: set[str], known_zero: set[str]) -> dict:
    """The user's engine switches, of which the sets name the allowed. Raises UserError for settings
    that flags own, and for those that train wrongly or of the wrong kind."""
    try:
        switches = DECODER.decode(regular(Path(path)).read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"--deepspeed_config {path}: {e}") from None
    zero = switches.get("zero_optimization", {}) if isinstance(switches, dict) else None
    if not isinstance(zero, dict):
        raise UserError(f"{path}: must be an object, and zero_optimization in it another")
    for key in OWNED.keys() & switches.keys():
        raise UserError(f"{path}: {key} is set by {OWNED[key]}; remove it from the file")
    # Only switches known to be harmless: aliases such as "bfloat16" or "torch_autocast" would train
    # in another dtype than the run reports.
    for where, keys, allowed in (("", switches, known), ("zero_optimization.", zero, known_zero)):
        for key in keys.keys() - allowed:
            raise UserError(
                f"{path}: {where}{key} is not among the switches that keep the numbers exact: "
                f"{', '.join(sorted(allowed))}"
            )
    check_kinds(path, switches)
    if not switches.get("steps_per_print", 1) >= 1:
        raise UserError(f"{path}: steps_per_print must be at least 1")
    logger = switches.get("comms_logger", {})
    for key in logger.keys() - COMMS_LOGGER:
        raise UserError(
            f"{path}: comms_logger.{key} is not one of {', '.join(sorted(COMMS_LOGGER))}"
        )
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


def engine_config(switches: dict, dtype: torch.dtype, micro: int, accum: int, clip: float) -> dict:
    """The engine's configuration: the switches plus what the flags own."""
    accelerator = get_accelerator()
    if dtype == torch.float16 and not accelerator.is_fp16_supported():
        if accelerator.device_name() != "cpu":
            raise UserError("--dtype fp16: DeepSpeed has no fp16 on this device; take bf16 or fp32")
        # DeepSpeed wants a CPU with fp16 instructions; PyTorch computes without them, slowly
        accelerator.is_fp16_supported = lambda: True
    config = {
        "steps_per_print": 10**9,
        **switches,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": clip,
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


def outlast_overflows(engine) -> None:
    """Don't let DeepSpeed end the run at the smallest loss scale: --max_skipped_steps does."""
    if scaler := getattr(engine.optimizer, "loss_scaler", None):
        scaler.raise_error_at_min_scale = False


@torch.no_grad()
def bf16_step(optimizer, group=None) -> None:
    """The step of DeepSpeed's BF16_Optimizer: clip and step without waiting for the device, by a
    norm summed in fp64. DeepSpeed sums in fp32, reads the norm on the host, then launches a kernel
    per parameter while the device is otherwise idle. group: over whose ranks the model is split."""
    pairs = zip(
        optimizer.fp32_groups_flat_partition,
        optimizer.fp32_groups_gradient_flat_partition,
        strict=True,
    )
    for master, grad in pairs:
        master.grad = grad
    grads, _ = optimizer.get_grads_for_norm()
    no_scale = LossScale(torch.bfloat16, grads[0].device)  # bf16 needs none: always 1
    optimizer._global_grad_norm = clipped_step(
        optimizer.optimizer, optimizer.clip_grad, no_scale, [(grads, group)]
    )
    optimizer._lazy_init_hp_params_optimizer_state()
    optimizer.update_lp_params()  # the engine clears the gradients


def name_of(param, key: str) -> str:
    """The Hugging Face name of a parameter's master, or of its moment `key`."""
    return f"{param.hf_name}.{key}".rstrip(".")


def get(param, key: str) -> torch.Tensor:
    """A parameter's master or its moment `key`, whole, on the device. Collective."""
    if not key:
        return safe_get_full_fp32_param(param)
    return safe_get_full_optimizer_state(param, key)


def put(param, value: torch.Tensor, key: str = "") -> None:
    """Set a parameter's master or its moment `key` to `value`, its whole new value."""
    value = value.float().reshape(-1)
    if not hasattr(param, "ds_id"):
        args = (key,) if key else ()
        (safe_set_full_optimizer_state if key else safe_set_full_fp32_param)(param, value, *args)
        return
    # With stage 3, DeepSpeed 0.19.8's safe_set_full_* reads the last rank's part from beyond the
    # end of a parameter whose size the ranks do not divide, and fails. So each sets its own part.
    size = param.ds_tensor.numel()
    part = torch.zeros(size, device=value.device)
    own = value[dist.get_rank() * size :][:size]
    part[: own.numel()] = own
    if key:
        safe_set_local_optimizer_state(param, part, key)
    else:
        safe_set_local_fp32_param(param, part)


@torch.no_grad()
def set_masters(engine, weights) -> None:
    """Set the fp32 masters to the file's values: DeepSpeed copies the bf16 or fp16 weights."""
    for param in engine.module.parameters():
        put(param, weights.read(param.hf_name).to(engine.device))


def facts_of(engine) -> dict:
    """What a checkpoint keeps besides tensors."""
    steps = adam_steps(engine.optimizer.optimizer)
    return {"adam_steps": steps, "loss_scale": scale_facts(engine)}


def scale_facts(engine) -> dict:
    """The loss scale, as a checkpoint keeps it."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return {"scale": 1.0, "good_steps": 0}
    # DeepSpeed's count does not restart when the scale grows, in the step after a full window
    good = scaler.cur_iter - scaler.last_overflow_iter - 1
    good = (good - 1) % scaler.scale_window + 1 if good else 0
    return {"scale": scaler.cur_scale, "good_steps": good, "hysteresis": scaler.cur_hysteresis}


def set_scale(engine, facts: dict) -> None:
    """Set the loss scale to what `scale_facts` returned."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if getattr(scaler, "dynamic", False):
        scaler.cur_scale = facts["scale"]
        # counts from the last overflow: place it just before the first step
        scaler.cur_iter, scaler.last_overflow_iter = int(facts["good_steps"]), -1
        scaler.cur_hysteresis = facts.get("hysteresis", scaler.cur_hysteresis)


def link_moments(optimizer) -> None:
    """Let DeepSpeed find each parameter's moments. Its fp32 and fp16 optimizer links them only
    once, after the first group's first step, when the other groups have none yet."""
    need(vars(type(optimizer)), "_lazy_init_hp_params_optimizer_state")
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()
