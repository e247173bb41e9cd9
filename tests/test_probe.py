"""try_once: what worked is not tried again, what failed is."""

import sys

import pytest

from llm_demo.machine import probes

# Succeeds once there is a compiler; counts its runs.
MODULE = """
import pathlib, sys
here = pathlib.Path(sys.argv[1])
with (here / "runs").open("a") as file:
    file.write("x")
if not (here / "compiler").exists():
    sys.exit("there is no C compiler")
"""


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """A function that probes once: (the problem, runs so far)."""
    (tmp_path / "needs_compiler.py").write_text(MODULE)
    monkeypatch.setattr(probes, "MODULE", "needs_compiler")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("LLM_DEMO_CACHE", str(tmp_path / "cache"))

    def once():
        problem = probes.try_once(str(tmp_path))
        return problem, len((tmp_path / "runs").read_text())

    return once


def test_a_failure_is_tried_again_and_a_success_is_kept(tried, tmp_path):
    assert tried() == ("there is no C compiler", 1)
    (tmp_path / "compiler").touch()
    assert tried() == (None, 2)
    assert tried() == (None, 2)


@pytest.mark.parametrize("name", [
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "FLASH_ATTENTION_TRITON_AMD_ENABLE",
    "TORCH_CUDNN_SDPA_DETERMINISTIC", "HSA_OVERRIDE_GFX_VERSION",
])  # fmt: skip
def test_a_variable_that_chooses_kernels_asks_for_another_try(name, tried, tmp_path, monkeypatch):
    (tmp_path / "compiler").touch()
    assert tried() == (None, 1)
    monkeypatch.setenv(name, "1")
    assert tried() == (None, 2)
