"""Rows spread over ranks: the numbers of a plain loop, one document at a time in one process."""

import json

import pytest
import test_parity as parity
import torch
from conftest import ROOT, torchrun
from test_parity import assert_equal, plain_loop, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_demo.data.packs import load_packs

PACKED = {"tied": True, "untied": True, "llama": False}
MATH, BUCKETED, SDPA = (["--attn_impl", name] for name in ("math", "bucketed", "sdpa"))
ENGINES = {  # (processes, ranks of a row, (flags, micro, accumulation) for each model)
    "two": (2, 2, [(BUCKETED, 2, 4), (MATH, 8, 1), (SDPA, 1, 8)]),
    "pairs": (4, 2, [(MATH, 1, 4), (BUCKETED, 2, 2), (SDPA, 4, 1)]),
    "four": (4, 4, [(BUCKETED, 4, 2), (MATH, 1, 8), (SDPA, 2, 4)]),
}
RECOMPUTED = (("two", "tied"), ("pairs", "untied"), ("four", "llama"))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence")
    tokenizer = AutoTokenizer.from_pretrained(parity.TINY)
    parity.write_rows(folder / "data.jsonl")
    data, results = str(folder / "data.jsonl"), {}
    for name, config in parity.MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        packs = load_packs(data, tokenizer, seq_len=parity.SEQ_LEN, pack=PACKED[name])
        results[name] = plain_loop(model.to(parity.DEVICE), packs)
    return folder, results


@pytest.mark.parametrize("processes", (2, 4))
def test_equals_plain_loop(processes, work):
    folder, expected = work
    cases = {}
    for engine, (n, ranks, splits) in ENGINES.items():
        if n != processes:
            continue
        spread = ["--sequence_parallel", str(ranks)]
        for name, (more, micro, accum) in zip(parity.MODELS, splits, strict=True):
            case = f"{engine}-{name}"
            also = [*spread, *more, "--pack_sequences", str(PACKED[name])]
            also += ["--use_activation_checkpointing", str((engine, name) in RECOMPUTED)]
            cases[case] = parity.argv(folder, name, folder / case, micro, accum, *also)
    for case, (losses, ranks) in train(folder, "fsdp", processes, cases).items():
        assert_equal(losses, ranks, expected[case.split("-")[1]])
