"""Test in a fresh process whether something works here, and remember on disk what does.

A separate process, because a GPU kernel can fail late and elsewhere: all checks may pass and the
launch still break every later call."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from llm_demo.job.device import KERNEL_VARIABLES, planned, this_device
from llm_demo.job.files import cache_folder
from llm_demo.job.process import PARENT


def probe_once(module: str, *args, versions: tuple = ()) -> str | None:
    """The last line of `python -m module args` if it failed; None if it succeeded.

    A success is remembered by module, arguments, device, PyTorch, `versions` and the variables
    that choose kernels, in $LLM_DEMO_CACHE or ~/.cache/llm_demo. A failure is not: its cause, such
    as a missing compiler, may be gone next time. For a card that is only planned for: None."""
    if planned():
        return None
    device = this_device()
    chosen = sorted(item for item in os.environ.items() if item[0].startswith(KERNEL_VARIABLES))
    key = json.dumps([module, args, device.name, device.arch, torch.__version__, versions, chosen])
    file = Path(cache_folder()) / "worked" / hashlib.sha256(key.encode()).hexdigest()[:24]
    if file.exists():
        return None
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env[PARENT] = str(os.getpid())
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    command = [sys.executable, "-m", module, *map(str, args)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return "no result within 180 s"
    if done.returncode:
        return ((done.stderr or done.stdout).strip().splitlines() or ["failed silently"])[-1]
    with contextlib.suppress(OSError):  # a read-only cache: test again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return None
