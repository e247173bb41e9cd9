"""Turn a launcher's settings and the environment into flags, and check all flags.

A setting or environment variable with a flag's name in capitals sets that flag (MODEL sets
--model_name_or_path). A command-line flag beats the environment, which beats the settings at the
top of a launcher. An empty value leaves the choice to the script. Only launchers read the
environment this way, and only for the flags of the script they start: STAGES has a meaning for
pp/launch_pp.sh, but none for fsdp/launch_fsdp.sh or `python fsdp/train_fsdp.py`."""

import ast
import difflib
import math
import re
from pathlib import Path

from llm_demo.flags.args import SHARED, all_fields, parse_args
from llm_demo.flags.parsing import env_of, fields_of, flag_text, groups_of, own_fields
from llm_demo.machine.text import counted

# For the bundled model and data: these settings replace empty ones that the environment lacks.
BUNDLED = {"MODEL": "models/qwen3-tiny", "TRAIN_JSON": "data/first_run.jsonl"}
FIRST_RUN = {"SEQ_LEN": "64", "MAX_STEPS": "180", "LR": "2e-3", "LOG_EVERY": "10"}
BATCH = ("MICRO_BATCH_SIZE", "GRAD_ACCUM_STEPS")


def check_flags(command: list[str]):
    """Check a training script's flags and return them, or print its help. command: the script and
    its flags. Scripts without a flags.py beside them are not checked: None. Raises UserError."""
    script = Path(command[0])
    if not (script.parent / "flags.py").is_file():
        return None
    description = ast.get_docstring(ast.parse(script.read_text("utf-8"))) or ""
    return parse_args(description, *groups_of(script.parent), argv=command[1:])


def names_of_settings(script: Path) -> dict[str, str]:
    """{environment variable: flag} of a training script."""
    fields = fields_of((*SHARED, *groups_of(script.parent))).values()
    return {env_of(field): field.name for field in fields if env_of(field)}


def launcher_flags(
    script: Path, settings: dict, environ: dict, given: list[str]
) -> tuple[list[str], bool]:
    """(a training script's flags: those from the settings and the environment, followed by those of
    the command line, which win; whether `with_rows_of_two` applies: the bundled model and data, and
    no batch that the user has set)."""
    names = names_of_settings(script)
    words = [word.split("=")[0] for word in given if word.startswith("--")]
    named = {word[2:].replace("-", "_") for word in words}
    values = settings | {name: environ[name] for name in names if name in environ}

    root = script.parent.parent
    bundled = not named & {names[name] for name in BUNDLED}
    for name, path in BUNDLED.items():
        bundled = bundled and values.get(name) == f"{root}/{path}"
    if bundled:
        for name, value in FIRST_RUN.items():
            if not values.get(name) and name not in environ:
                values[name] = value
    # A number of epochs replaces the default number of steps.
    if "num_epochs" in named or values.get("NUM_EPOCHS") and "MAX_STEPS" not in environ:
        values["MAX_STEPS"] = ""

    own_batch = False
    for name in BATCH:
        if name in environ or names[name] in named or not values.get(name):
            own_batch = True
    flags = []
    for name, flag in names.items():
        if flag not in named and values.get(name):
            flags += [f"--{flag}", values[name]]
    return flags + given, bundled and not own_batch


def with_rows_of_two(command: list[str], flags, processes: int) -> tuple[list[str], str]:
    """(the command with a batch for this number of processes, a line or ""): a step has as many
    rows as with the launcher's settings on two processes, 16, or the nearest number above that the
    processes can share. flags: those of the command, as parsed."""
    pipeline = "stages" in vars(flags)
    same = flags.stages * flags.sequence_parallel * flags.tensor_parallel  # ranks of the same rows
    parallel = max(1, processes // same)
    micro, accum = flags.micro_batch_size, flags.grad_accum_steps
    rows = micro * accum
    if not pipeline:
        rows *= 2
    each = math.ceil(rows / parallel)
    if pipeline:  # it needs its micro-batches
        micro = math.ceil(each / accum)
    else:
        micro = max(n for n in range(1, micro + 1) if each % n == 0)
        accum = each // micro
    command = command.copy()
    command[command.index("--micro_batch_size") + 1] = str(micro)
    command[command.index("--grad_accum_steps") + 1] = str(accum)
    now = micro * accum * parallel
    if now == rows:
        return command, ""
    count = counted(processes, "process", "processes")
    return command, f"batch: {now} rows a step, not {rows}, which {count} can't share equally"


def without_effect(script: Path, environ: dict) -> list[str]:
    """A line about each environment variable that resembles a setting's name, or sets a flag that
    only other scripts have. Not about those that hold its default or false."""
    settings = names_of_settings(script)
    lines = []
    for name in environ.keys() - settings.keys():
        near = difflib.get_close_matches(name, settings, 1, cutoff=0.9)
        if "_" in name and near:
            lines.append(f"{name} is not a setting; did you mean {near[0]}?")
    for flag, field in all_fields().items():
        name = env_of(field)
        off = ("", "0", "false", flag_text(field.default))
        if name not in settings and environ.get(name, "") not in off:
            scripts = [folder for folder, fields in own_fields().items() if flag in fields]
            lines.append(f"{name} has no effect here: only for {' and '.join(scripts)}")
    return lines


def read_launcher(launcher: Path) -> tuple[Path, dict[str, str]]:
    """(training script, {setting: default}) of a launcher such as fsdp/launch_fsdp.sh."""
    root = launcher.parent.parent
    text = launcher.read_text("utf-8")
    settings = re.findall(r"^(\w+)=\$\{\1-(.*?)\}", text, re.M)
    script = re.search(r'^launch (\S+) "\$@"', text, re.M)[1]
    return root / script, {name: value.replace("$ROOT", str(root)) for name, value in settings}
