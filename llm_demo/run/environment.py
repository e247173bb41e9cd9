"""What a run ran on: versions, hardware, link, revision. Left in its env.json."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from llm_demo.device import links, this_device
from llm_demo.dist import World
from llm_demo.files import ROOT


def environment(world: World) -> dict:
    """Versions, hardware and revision of this run."""
    versions = {"python": platform.python_version()}
    core = ("torch", "transformers", "deepspeed", "datasets", "accelerate", "numpy")
    for package in (*core, "flash_attn"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    git = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # no git here
        revision = None
    return {
        "versions": versions,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "device": str(this_device(world.device.index or 0)),
        "link": next(iter(links()), None) if world.device.type == "cuda" else None,
        "world_size": world.size,
        "platform": platform.platform(),
        # by hand where the files were copied without their .git
        "revision": os.environ.get("LLM_DEMO_REVISION") or revision or None,
        "environment": {
            k: v
            for k, v in sorted(os.environ.items())
            if k.startswith(("NCCL_", "RCCL_", "TORCH_", "PYTORCH_", "OMP_", "CUDA_VIS", "HIP_"))
        },
    }
