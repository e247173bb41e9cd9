"""A run's folder: chosen, described, and read back: its settings, the records of its steps, their
medians.

args: the flags. PyTorch is imported only to describe a run, since the report does not need it."""

import contextlib
import json
import math
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

from llm_demo.core.errors import UserError
from llm_demo.flags.args import names_of
from llm_demo.machine.files import ROOT, write_json
from llm_demo.machine.process import read_json, read_text, versions_of
from llm_demo.machine.text import SECRET, blame, without_secrets

WARMUP = 2  # logged steps left out of the medians: allocator, kernels and caches warm up

# Not through the launcher script: its defaults would fill flags that this run left open. With exec,
# because a resumed run rewrites this file while bash is still reading it.
CMD = """\
#!/usr/bin/env bash
folder=$(cd "$(dirname "$0")" && pwd)
if [[ ! $folder -ef {folder} && " $*" != *" --output"[_-]"dir"* ]]; then
    echo {moved} "$folder" >&2
    exit 2
fi
export LLM_DEMO_STARTED_IN=$PWD
cd {cwd} || exit
exec env {nodes} PYTHONUTF8=1 PYTHONPATH={root} {python} -m llm_demo.launch {script} {argv} "$@"
"""

PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "datasets",
    "accelerate",
    "peft",
    "numpy",
    "flash_attn",
    "fla-core",
)

# Environment variables to record, by prefix.
RECORDED = (
    "NCCL_",
    "RCCL_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "CUDA_VIS",
    "HIP_",
    "HSA_",
    "ROCR_",
    "GPU_MAX_HW_QUEUES",
)


def choose_folder(args, script: str) -> Path:
    """The run's folder, not yet created or emptied. Raises UserError if it can't be used."""
    model = Path(args.model_name_or_path).name
    name = f"{script}-{model}-{datetime.now():%Y%m%d-%H%M%S-%f}"  # runs may begin together
    folder = Path(args.output_dir) if args.output_dir else ROOT / "runs" / name
    if args.overwrite and folder.resolve() in Path.cwd().parents:
        raise UserError(f"--overwrite: the working folder is inside --output_dir {folder}")
    refuse_unwritable(folder, "--output_dir")
    if not args.output_dir:
        return folder
    for run in filter(is_run, folder.resolve().parents):
        raise UserError(f"--output_dir {folder} is inside {run}, the folder of another run")
    if args.overwrite:
        _refuse_inputs_in(folder, args)
    if folder.exists() and any(folder.iterdir()):
        if not (args.overwrite or args.resume == "auto"):
            raise UserError(
                f"--output_dir {folder} is not empty: choose another, or add --overwrite, or "
                "--resume auto to continue"
            )
        resumed = args.resume and published(folder / "checkpoints")  # cmd.sh may be lost
        if not ((folder / "cmd.sh").is_file() or resumed):
            raise UserError(f"--output_dir {folder} is not a run's folder, so it is left unchanged")
        _refuse_links(folder)
    return folder


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run."""
    return all((folder / name).is_file() for name in ("cmd.sh", "config.json"))


# What a run writes in its folder and --overwrite deletes. Not cmd.sh, which is locked and written
# anew.
WRITTEN = (
    "config.json",
    "env.json",
    "metrics.jsonl",
    "train.log",
    "summary.json",
    "profile.txt",
    "trace_rank*.json.gz",
    "checkpoints",
    "model",
    "hf",
    "tb",
    "wandb",
)


def delete_run(folder: Path) -> None:
    """Delete what a run has written in its folder. Other files stay."""
    for path in (path for name in WRITTEN for path in folder.glob(name)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def refuse_unwritable(folder: Path, flag: str) -> None:
    """Raise UserError if what a flag names can't be a folder to write to. Creates nothing."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{flag} {folder} is a file: name a folder")
    place = folder.absolute()
    above = next(p for p in (place, *place.parents) if p.exists())
    try:  # access() allows root everything, even in /proc
        os.rmdir(tempfile.mkdtemp(prefix=".llm_demo-", dir=above))
    except OSError as e:
        raise UserError(f"{flag} {folder}: can't write to {above}: {e.strerror}") from e


def refuse_inside_checkpoints(out: Path) -> None:
    """Raise UserError if a tool would write into a run's checkpoints, which the run deletes."""
    for above in out.resolve().parents:
        if above.name == "checkpoints" and (is_run(above.parent) or published(above)):
            raise UserError(f"{out} is inside {above}, where a run keeps its checkpoints")


def _refuse_links(folder: Path) -> None:
    """Raise UserError for a link or a pipe in a run's folder, through which the run would write."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        in_wandb = "wandb" in name.parts[:-1]  # it has links of its own
        if not in_wandb and (path.is_symlink() or path.is_fifo()):
            raise UserError(
                f"--output_dir {folder}: {name} is a link or a pipe, and the run would write "
                "elsewhere: remove it"
            )


def _refuse_inputs_in(folder: Path, args) -> None:
    """Raise UserError if --overwrite might delete what this run reads."""
    folder = folder.resolve()
    for flag in names_of("input"):
        for name in filter(None, (getattr(args, flag) or "").split(",")):
            path = Path(os.path.expanduser(name.partition("*")[0].strip()))  # of a pattern, weight
            if path.exists() and folder in (path.resolve(), *path.resolve().parents):
                raise UserError(f"--overwrite would delete --{flag} {name}: choose another folder")


def last_checkpoint(folder: Path) -> str:
    """A clause that names the checkpoint to resume from."""
    newest = next(iter(published(folder / "checkpoints")), None)
    return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"


def published(folder: Path) -> list[Path]:
    """Checkpoints in a folder, newest first, intact or not."""
    return sorted(folder.glob("step_" + "[0-9]" * 8), reverse=True)


def revision() -> str | None:
    """The commit of this project's files, with -dirty if they differ from it."""
    given = os.environ.get("LLM_DEMO_REVISION")  # set where the files were copied without .git
    git = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(FileNotFoundError):  # git is not installed
        given = given or subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return given or None


def environment(world) -> dict:
    """Versions, hardware and revision of this run."""
    import torch

    from llm_demo.machine.device import KERNEL_VARIABLES, links, this_device

    found = {
        "versions": {"python": platform.python_version()} | versions_of(PACKAGES),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "device": str(this_device(world.device.index or 0)),
        "link": next(iter(links()), None) if world.device.type == "cuda" else None,
        "world_size": world.size,
        "platform": platform.platform(),
        "revision": revision(),
        "environment": {
            k: v
            for k, v in sorted(os.environ.items())
            if k.startswith((*RECORDED, *KERNEL_VARIABLES))
        },
    }
    return recorded(found)


def recorded(content: dict) -> dict:
    """What config.json or env.json holds, without secrets: values of variables whose names look
    like a secret's, logins in addresses."""
    kept = {}
    for key, value in content.items():
        if isinstance(value, str):
            value = without_secrets(value)
        elif key == "environment" and isinstance(value, dict):
            value = {k: "left out" if SECRET.search(k) else v for k, v in recorded(value).items()}
        kept[key] = value
    return kept


def describe_run(folder: Path, settings: dict, world) -> None:
    """Write config.json, env.json and cmd.sh. The last alone has the flags as they were given."""
    write_json(folder / "config.json", recorded(settings), indent=2, default=str)
    write_json(folder / "env.json", environment(world), indent=2, default=str)
    argv = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    several = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ[name] for name in several if {name, "NNODES"} <= os.environ.keys()}
    given["NPROC_PER_NODE"] = world.local_size
    path = folder.absolute()
    words = {
        "folder": path,
        "moved": f"error: this run was moved from {path}: add --output_dir",
        "cwd": os.getcwd(),
        "root": ROOT,
        "python": sys.executable,
        "script": os.path.abspath(sys.argv[0]),
    }
    words = {name: shlex.quote(str(word)) for name, word in words.items()}
    words["nodes"] = " ".join(f"{name}={value}" for name, value in given.items())
    # in place, since it is locked; paths as the system has them, whatever the locale
    (folder / "cmd.sh").write_bytes(os.fsencode(CMD.format(**words, argv=shlex.join(argv))))


def read_run(folder: Path) -> SimpleNamespace:
    """Attributes: config, env and summary (dicts, empty if the file is missing), steps and evals
    (records of metrics.jsonl, in order), broken (the number of its other lines), written (when its
    last line was), parts (see step_parts).

    Raises UserError if the folder holds no run or a file can't be read."""
    file = folder / "metrics.jsonl"
    if not any((folder / name).exists() for name in (file.name, "env.json")):
        raise UserError(f"{folder} is not a run's folder: it has no metrics.jsonl")
    run = SimpleNamespace(folder=folder, broken=0, written="–")
    for name in ("config", "env", "summary"):
        path = folder / f"{name}.json"
        setattr(run, name, recorded(object_in(path)) if path.exists() else {})  # it may be older
    lines = []
    if file.exists():
        lines, run.broken = read_records(file)
        run.written = f"{datetime.fromtimestamp(file.stat().st_mtime):%Y-%m-%d %H:%M:%S}"
    for name, key in (("steps", "train/loss"), ("evals", "eval/loss")):
        by_step = {record["step"]: record for _, record in lines if key in record}
        setattr(run, name, [by_step[step] for step in sorted(by_step)])
    run.parts = step_parts(run)
    return run


def object_in(file: Path) -> dict:
    """The JSON object in a file. Raises UserError if it can't be read."""
    with blame(file):
        return dict(read_json(file))


def settings_to_resume(resume: str | None, folder: Path) -> dict:
    """config.json of the run that --resume names, if it has a seq_len; else {}. resume: a run, one
    of its checkpoints, "auto" for the run in `folder`, or None."""
    if not resume:
        return {}
    named = folder if resume == "auto" else Path(resume)
    for file in (named / "config.json", named.parent.parent / "config.json"):
        settings = object_in(file) if file.exists() else {}
        if "seq_len" in settings:
            return settings
    return {}


def read_records(file: Path) -> tuple[list[tuple[str, dict]], int]:
    """([(line, its record)], number of lines without one) of a metrics.jsonl. Raises UserError for
    a pipe or a device, OSError if it can't be read."""
    lines = [line for line in read_text(file).split("\n") if line.strip()]
    kept = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a kill may cut a line short
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                kept.append((line, record))
    return kept, len(lines) - len(kept)


def float_of(value: float | None) -> float:
    """A float; NaN for None, which stands for what was not measured or not finite."""
    return math.nan if value is None else float(value)


def column(records: list[dict], key: str) -> list[float]:
    return [float_of(record.get(key)) for record in records]


def finite_of(values) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def middle(values) -> float:
    """Median of the finite values; NaN if there are none."""
    return statistics.median(finite_of(values) or [math.nan])


def median(steps: list[dict], key: str) -> float:
    """The median of the records of steps, without the first WARMUP of them; NaN if none has it."""
    return middle(column(steps[WARMUP:] or steps, key))


def of_ranks(steps: list[dict], key: str) -> list[float]:
    """The same for each rank; empty if not recorded. After a resume with a different number of
    ranks, only those steps count."""
    lists = [r[key] for r in steps[WARMUP:] or steps if isinstance(r.get(key), list)]
    ranks = [map(float_of, values) for values in lists if len(values) == len(lists[-1])]
    return [middle(values) for values in zip(*ranks, strict=True)]


def peaks_of(record: dict) -> list | None:
    """Peak memory of each rank so far in 2^30 bytes: reserved on a GPU, resident on a CPU."""
    return record.get("perf/reserved_gb") or record.get("perf/peak_mem_gb")


def step_parts(run) -> list[dict[str, float]]:
    """One dict per rank of where a step's time went, medians in ms: compute, transfer and waiting,
    which add up to `step`. Empty if communication was not timed. How much waiting was hidden behind
    compute is not recorded, so as much of it as fits is counted as exposed. That is exact if all
    communication is exposed, as in a pipeline or on a CPU; otherwise `waiting` is an upper bound
    and `transfer` a lower one."""
    keys = ("perf/comm_exposed_ms", "perf/comm_wait_ms")
    exposed, wait = (of_ranks(run.steps, key) for key in keys)
    step = median(run.steps, "perf/step_ms")
    if len(exposed) != len(wait) or math.isnan(sum([step, *exposed, *wait])):
        return []
    ranks = [(min(e, step), min(w, e, step)) for e, w in zip(exposed, wait, strict=True)]
    return [
        {"compute": step - e, "transfer": e - waiting, "waiting": waiting, "step": step}
        for e, waiting in ranks
    ]


def status(run) -> str:
    """Whether a run has finished, for the reader."""
    if not run.steps:
        return "no step logged yet"
    last, wanted = run.steps[-1]["step"], float_of(run.config.get("max_steps"))
    if float_of(run.summary.get("steps")) >= max(last, wanted):  # `last` if wanted is NaN
        return f"finished, {last:,} steps"
    total = f" of {wanted:,.0f}" if wanted > 0 else ""
    return f"running or interrupted at step {last:,}{total}"
