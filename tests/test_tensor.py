"""Tensor parallelism: exact in fp64, and what it refuses. test_parity.py has it in training."""

import pytest
from conftest import ROOT, slow, torchrun


@pytest.mark.parametrize("processes, shares", [(2, 2), slow(4, 2), slow(4, 4)])
def test_shares_equal_whole_matrices_in_fp64(processes, shares):
    """Of query heads with and without groups, biases, latent attention; packed rows, recomputed."""
    torchrun(processes, ROOT / "tests/tensor_worker.py", shares, "qwen3", "llama", "deepseek")
