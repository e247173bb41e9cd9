"""Rows spread over ranks (--sequence_parallel): the numbers of a plain loop, one document at a time
in one process, and of runs whose rows are not spread."""

import functools
import json
import re

import numpy as np
import pytest
import test_lora as lora
import test_moe as moe
import test_parity as parity
import torch
from conftest import ROOT, args_with, logged, slow, torchrun, train_cases
from test_attention import CPU
from test_parity import assert_equal, plain_loop, train
from test_rotary import LONGROPE
from tiny_tokenizer import packs_of
from transformers import AutoModelForCausalLM, Phi3Config, Qwen3Config

from bench.checkpoints import tensors
from llm_demo.core.attention import LongRope
from llm_demo.core.errors import UserError
from llm_demo.core.rows import Slice
from llm_demo.model.costs import Heads, share_of_heads
from llm_demo.run.choices import decide_compute

MODELS = {**parity.MODELS, "qwen": moe.MODELS["qwen"], "deepseek": moe.MODELS["deepseek"]}
# whose frequencies change after 24 tokens of a document, half of the layers with a window
MODELS["longrope"] = Qwen3Config(
    rope_parameters=LONGROPE, use_sliding_window=True, sliding_window=28, max_window_layers=2,
    **parity.SIZES,
)  # fmt: skip
MATH, BUCKETED, SDPA = (["--attn_impl", name] for name in ("math", "bucketed", "sdpa"))
RECOMPUTED, RESHARD = ["--use_activation_checkpointing"], ["--reshard_after_forward"]
CASES = {  # name: (processes, ranks of a row, model, micro, accumulation, further flags)
    "two": (2, 2, "tied", 4, 2, [*MATH, *RECOMPUTED]),
    "two_untied": (2, 2, "untied", 8, 1, [*BUCKETED, "--optimizer_on_host"]),
    "two_llama": (2, 2, "llama", 4, 2, SDPA),
    "two_longrope": (2, 2, "longrope", 8, 1, BUCKETED),
    "adapters": (2, 2, "lora", 4, 2, [*RECOMPUTED, *lora.flags("tied")]),
    "bf16": (2, 2, "tied", 4, 2, ["--dtype", "bf16"]),
    "pairs": (4, 2, "tied", 1, 4, [*BUCKETED, *RESHARD]),
    "pairs_untied": (4, 2, "untied", 2, 2, [*BUCKETED, *RECOMPUTED, "--replicas", "2"]),
    "pairs_llama": (4, 2, "llama", 2, 2, SDPA),
    "experts": (4, 2, "qwen", 2, 2, ["--expert_parallel", "2", *RECOMPUTED]),
    "latent": (4, 4, "deepseek", 4, 2, RESHARD),
    "four": (4, 4, "tied", 8, 1, BUCKETED),  # each of 2 heads of keys and values on two ranks
    "four_llama": (4, 4, "llama", 1, 8, [*SDPA, *RECOMPUTED]),
}

SLOW = ("pairs", "pairs_untied", "pairs_llama", "four_llama")


def write_rows(file):
    """Ragged conversations, most of which cross the borders of slices, and some over all slices."""
    parity.write_rows(file)
    rows = []
    for i in range(8):
        answer = " ".join(f"{w}{i}" for w in ("alpha", "beta", "gamma", "delta", "epsilon") * 3)
        turns = [{"role": "user", "content": "why"}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": turns}))
    file.write_text("\n".join([file.read_text(), *rows]))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence")
    models, tokenizer = parity.smaller_vocabulary(MODELS, folder / "tokenizer")
    write_rows(folder / "data.jsonl")
    data = str(folder / "data.jsonl")
    how = {"seq_len": parity.SEQ_LEN}
    packed, single = (packs_of(data, tokenizer, pack=pack, **how) for pack in (True, False))
    assert single.longest > 0.8 * parity.SEQ_LEN
    lengths = np.diff(packed.documents.starts)
    assert (lengths <= 24).any() and (lengths > 24).any()  # see LONGROPE
    for name, config in models.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    @functools.cache
    def expected(name):
        if name == "lora":
            found = plain_loop(lora.with_peft(folder, "tied"), packed)
            found["grads"] = [{lora.ours(k): v for k, v in step.items()} for step in found["grads"]]
            return found | {"params": {lora.ours(k): v for k, v in found["params"].items()}}
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        model.config._experts_implementation = "eager"
        return plain_loop(model.to(parity.DEVICE), single if name == "llama" else packed)

    return folder, expected


@pytest.mark.parametrize("processes, quick", [(2, True), slow(4, True), slow(4, False)])
def test_equals_plain_loop(processes, quick, work):
    folder, expected = work
    cases = {}
    for case, (n, ranks, model, micro, accum, more) in CASES.items():
        if n == processes and quick == (case not in SLOW):
            also = ["--sequence_parallel", str(ranks), *more]
            also += ["--pack_sequences", str(model != "llama")]
            model = "tied" if model == "lora" else model
            cases[case] = parity.argv(folder, model, micro, accum, *also)
    for case, (losses, ranks) in train(folder, "fsdp", processes, cases).items():
        true = expected(CASES[case][2])
        for rank in ranks:  # DeepSeek's bias is no parameter
            for name in [n for n in rank["params"] if n.endswith("e_score_correction_bias")]:
                assert not rank["params"].pop(name).any()
        if case == "bf16":
            loss, norm = parity.BOUNDS[case]
            assert losses == pytest.approx(true["loss"], rel=loss)
            for rank in ranks:
                norms = [step["norm"] for step in rank["steps"]]
                assert norms == pytest.approx(true["norm"], rel=norm)
            continue
        assert_equal(losses, ranks, true)


# ---------------------------------------------------------------- evaluation, answers, resume


def write_answers(file, long):
    """A short answer that is learnt at once, and some `long` ones."""
    rows = []
    for i in range(60):
        question = "why " * (1 + (i * 7) % 11)
        words = " ".join(f"{w}{i}" for w in ("alpha", "beta", "gamma") * 5)
        answer = "yes" if i % 6 or not long else words
        rows.append(json.dumps({"prompt": question, "completion": answer}))
    file.write_text("\n".join(rows))


def test_evaluation_answers_and_resume_are_those_of_whole_rows(work):
    folder = work[0]
    data, heldout, cases = folder / "short.jsonl", folder / "some_long.jsonl", {}
    write_answers(data, long=False)
    write_answers(heldout, long=True)

    def case(name, ranks, micro, *more):
        flags = parity.argv(folder, "tied", micro, 1, "--sample_tokens", "4")
        flags += ["--train_json", data, "--eval_json", heldout, "--sequence_parallel", ranks]
        flags += ["--max_steps", "8", "--lr", "1e-2", "--save", "--save_every", "4", *more]
        flags += ["--keep_last", "0", "--eval_every", "4", "--warmup_steps", "1"]
        cases[name] = [flag for flag in flags if flag != "--no_save"]

    at = folder / "spread/checkpoints/step_00000004"
    case("whole", 1, 2)
    case("spread", 2, 4)
    case("again", 2, 4, "--resume", at)
    case("whole_again", 1, 2, "--resume", at)
    case("dry", 2, 4, "--dry_run")
    train_cases(folder, "fsdp", 2, cases)

    def read(name):
        log = (folder / name / "train.log").read_text()
        answers = re.findall(r"^answer .*", log, re.M)
        assert len(answers) == 3
        steps = {r["step"]: r["train/loss"] for r in logged(folder / name)}
        evals = logged(folder / name, "eval/loss")
        held = {r["step"]: (r["eval/loss"], r["eval/exact"]) for r in evals}
        return steps, held, answers

    whole = read("whole")
    assert 0.3 < whole[1][8][1] < 1 and whole[1][0][1] == 0
    for name in ("spread", "again", "whole_again"):
        steps, held, answers = read(name)
        assert steps == pytest.approx({s: whole[0][s] for s in steps}, rel=1e-5), name
        for step, (loss, exact) in held.items():
            assert loss == pytest.approx(whole[1][step][0], rel=1e-5), name
            assert exact == whole[1][step][1], name
        assert answers == whole[2], name
    assert min(read("again")[0]) == 5
    last = "checkpoints/step_00000008"
    one, other, third = (tensors(folder / n / last) for n in ("spread", "again", "whole_again"))
    assert one.keys() == other.keys() == third.keys()
    assert all(torch.equal(t, other[name]) for name, t in one.items())
    for name, t in one.items():
        assert name.endswith("exp_avg_sq") or parity.relative(t, third[name]) < 1e-4, name


# ---------------------------------------------------------------- parts


def test_blocks_are_one_graph():
    torchrun(2, ROOT / "tests/sequence_worker.py")


def test_heads_of_a_rank():
    heads = Heads(12, 4, 16, 24)
    assert share_of_heads(heads, 1) == heads
    assert share_of_heads(heads, 2) == Heads(6, 2, 16, 24)
    assert share_of_heads(heads, 12) == Heads(1, 1, 16, 24)
    with pytest.raises(UserError, match="parallel 5 does not divide 12, the heads of queries"):
        share_of_heads(heads, 5)
    with pytest.raises(UserError, match="6 neither divides nor is a multiple of 4, the heads of"):
        share_of_heads(heads, 6)
    args = args_with(compile=False, sequence_parallel=3)
    with pytest.raises(UserError, match="does not divide 4"):
        decide_compute(args, CPU, torch.float32, MODELS["tied"], [])


def test_positions_of_a_slice():
    index = torch.tensor([0, 3, 4, 9, 15, 16, 23, 31])  # two rows of 16
    found = []
    for at in range(4):
        here, own = Slice(at, 4).of_positions(index, 16)
        rows = torch.arange(32).view(2, 16)
        assert torch.equal(Slice(at, 4).of_rows(rows).flatten()[own], index[here])
        found += index[here].tolist()
    assert sorted(found) == index.tolist()


def test_longrope_goes_by_the_length_of_the_whole_document():
    config = Phi3Config(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
            "long_factor": [3.0] * 8, "original_max_position_embeddings": 16,
        },
    )  # fmt: skip
    rope, cu = LongRope(config), torch.tensor([0, 10, 34, 64, 64], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (10, 22, 2, 30)]).view(2, 32)
    hidden = torch.zeros(1)
    whole = rope(hidden, positions, cu)
    for at in range(4):
        rope.part = Slice(at, 4)
        tables = rope(hidden, rope.part.of_rows(positions), cu)
        for mine, all_rows in zip(tables, whole, strict=True):
            assert torch.equal(mine, rope.part.of_rows(all_rows))
