"""Our Triton kernels as machine code for AMD GPUs, which needs no GPU.

ARCH=gfx908 bash tests/run.sh -k amd: for this one, also if it is among those marked slow."""

import importlib.util
import json
import os
import re
import sys

import pytest
from conftest import ROOT, run

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")

QUICK = "gfx908", "gfx942", "gfx1100"  # MI100, MI300, RX 7900
SLOW = "gfx90a", "gfx950", "gfx1151", "gfx1201"  # MI200, MI350, Strix Halo, RX 9070
NOT_ON_AMD = {"fp8_kernels.py"}  # --fp8 is refused: most have no fp8, gfx942 another format
ASKED = os.environ.get("ARCH", "")
ARCHS = [*QUICK, *(pytest.param(arch, marks=pytest.mark.slow) for arch in SLOW)]
if ASKED.startswith("gfx"):
    ARCHS = [ASKED]


def kernels(arch, cache):
    """What amd_worker.py says of each kernel. cache: a folder, so that all are compiled."""
    command = [sys.executable, "tests/amd_worker.py", arch]
    caches = {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    done = run(command, fresh=True, timeout=900, **caches)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("arch", ARCHS)
def test_our_kernels(arch, tmp_path):
    """No spills, groups that a GPU takes, and logits read 16 bytes at a time by each thread; values
    in 4 bits are read 4 bytes at a time, and their levels one by one."""
    files = [path for path in ROOT.glob("[!.]*/**/*.py") if "tests" not in path.parts]
    sources = [path.read_text() for path in files if path.name not in NOT_ON_AMD]
    written = {  # that are launched; others are parts of them
        name
        for text in sources
        for name in re.findall(r"^@triton\.jit\ndef (\w+)", text, re.M)
        if f"{name}[" in text
    }
    found = kernels(arch, tmp_path)
    assert {kernel["name"].split()[0] for kernel in found} == written
    for kernel in found:
        assert kernel["spills"] == 0 and kernel["threads"] <= 1024, kernel
        if kernel["name"].startswith("_values"):
            continue
        narrow = [load for load in kernel["loads"] if not load.endswith(("x4", "b128"))]
        # what is read once for the whole row: the target's logit
        assert len(narrow) <= 1 and len(kernel["loads"]) > 2, kernel
