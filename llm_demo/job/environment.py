"""Record versions, hardware, link and revision of a run in env.json, and its command in cmd.sh."""

import os
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from llm_demo.core.mesh import World
from llm_demo.job.device import KERNEL_VARIABLES, links, this_device
from llm_demo.job.files import ROOT, write_json

# Not through the launcher script: its defaults would fill flags that this run left open. With exec,
# because a resumed run rewrites this file while bash is still reading it.
CMD = """\
#!/usr/bin/env bash
here=$(cd "$(dirname "$0")" && pwd)
if [[ ! $here -ef {folder} && " $*" != *" --output"[_-]"dir"* ]]; then
    echo {moved} "$here" >&2
    exit 2
fi
export LLM_DEMO_STARTED_IN=$PWD
cd {cwd} || exit
exec env {nodes} PYTHONPATH={root} {python} -m llm_demo.launch {launcher} {script} {argv} "$@"
"""


# Environment variables to record, by prefix. SECRET: in a name, it keeps the value out.
RECORDED = (
    "NCCL_", "RCCL_", "TORCH_", "PYTORCH_", "OMP_", "CUDA_VIS", "HIP_", "HSA_", "ROCR_",
    "GPU_MAX_HW_QUEUES", *KERNEL_VARIABLES,
)  # fmt: skip
SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CRED|AUTH")


def environment(world: World) -> dict:
    """Versions, hardware and revision of this run."""
    versions = {"python": platform.python_version()}
    core = ("torch", "transformers", "deepspeed", "datasets", "accelerate", "peft", "numpy")
    for package in (*core, "flash_attn"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    git = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # git is not installed
        revision = None
    return {
        "versions": versions,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "device": str(this_device(world.device.index or 0)),
        "link": next(iter(links()), None) if world.device.type == "cuda" else None,
        "world_size": world.size,
        "platform": platform.platform(),
        # set by hand where the files were copied without .git
        "revision": os.environ.get("LLM_DEMO_REVISION") or revision or None,
        "environment": {
            k: "left out" if SECRET.search(k) else v
            for k, v in sorted(os.environ.items())
            if k.startswith(RECORDED)
        },
    }


def describe_run(folder: Path, settings: dict, world: World) -> None:
    """Write config.json, env.json and cmd.sh."""
    write_json(folder / "config.json", settings, indent=2, default=str)
    write_json(folder / "env.json", environment(world), indent=2, default=str)
    argv = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    launcher = os.environ.get("LLM_DEMO_LAUNCHER", "torchrun")
    given = os.environ
    several = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if "NNODES" in given else ()
    nodes = [f"{name}={given[name]}" for name in several if name in given]
    path, python, script = folder.absolute(), sys.executable, os.path.abspath(sys.argv[0])
    words = {
        "folder": path, "moved": f"error: this run was moved from {path}: add --output_dir",
        "cwd": os.getcwd(), "root": ROOT, "python": python, "script": script,
    }  # fmt: skip
    words = {name: shlex.quote(str(word)) for name, word in words.items()}
    nodes = " ".join([*nodes, f"NPROC_PER_NODE={world.local_size}"])
    text = CMD.format(**words, nodes=nodes, launcher=launcher, argv=shlex.join(argv))
    (folder / "cmd.sh").write_text(text)
