"""Adapters: the trainer's numbers against PEFT's own LoRA in a plain loop, one document at a time
in one process; and the files of checkpoints and exports."""

import pytest
import test_parity as parity
import torch
from peft import LoraConfig, get_peft_model
from test_parity import assert_equal, plain_loop, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_demo.data.packs import load_packs
from llm_demo.model.lora import Factor

RANK, ALPHA = 4, 32
TARGETS = {"tied": "all-linear", "untied": "q_proj,down_proj", "llama": "all-linear"}
PACKED = {"tied": True, "untied": True, "llama": False}
ENGINES = {  # (processes, further flags, (micro, accumulation) for each model)
    "plain": (1, ["--no_fsdp"], [(8, 1), (1, 8), (2, 4)]),
    "two": (2, [], [(1, 4), (4, 1), (2, 2)]),
    "two_reshard": (2, ["--reshard_after_forward"], [(4, 1), (2, 2), (1, 4)]),
    "four": (4, ["--reshard_after_forward"], [(1, 2), (2, 1), (2, 1)]),
    "replicas": (4, ["--replicas", "2"], [(2, 1), (1, 2), (1, 2)]),
}


def ours(name: str) -> str:
    """The name of a PEFT model's parameter in the trainer."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def with_peft(folder, name, **more):
    """PEFT's own model, whose factors start as the trainer's do."""
    base = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    targets = TARGETS[name] if TARGETS[name] == "all-linear" else TARGETS[name].split(",")
    how = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, how)
    for key, p in model.named_parameters():
        if p.requires_grad:
            values = Factor(p.shape[1], p.shape[0], zero="lora_B" in key)
            path = ours(key).removesuffix(".weight")
            p.data.copy_(values.start(f"{parity.SEED}:{path}")["weight"])
    return model.to(parity.DEVICE)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    tokenizer = AutoTokenizer.from_pretrained(parity.TINY)
    parity.write_rows(folder / "data.jsonl")
    data, results = str(folder / "data.jsonl"), {}
    for name, config in parity.MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        packs = load_packs(data, tokenizer, seq_len=parity.SEQ_LEN, pack=PACKED[name])
        found = plain_loop(with_peft(folder, name), packs)
        found["grads"] = [{ours(k): v for k, v in step.items()} for step in found["grads"]]
        found["params"] = {ours(k): v for k, v in found["params"].items()}
        results[name] = found
    return folder, results


def flags(name):
    return [
        "--lora_rank", str(RANK), "--lora_alpha", str(ALPHA), "--lora_targets", TARGETS[name],
        "--pack_sequences", str(PACKED[name]),
    ]  # fmt: skip


@pytest.mark.parametrize("processes", (1, 2, 4))
def test_equals_peft(processes, work):
    folder, expected = work
    cases = {}
    for engine, (n, more, splits) in ENGINES.items():
        if n != processes:
            continue
        for name, (micro, accum) in zip(parity.MODELS, splits, strict=True):
            recomputed = (engine, name) in (
                ("plain", "tied"), ("two", "untied"), ("two_reshard", "tied"), ("four", "llama")
            )  # fmt: skip
            case = f"{engine}-{name}"
            also = [*more, *flags(name), "--use_activation_checkpointing", str(recomputed)]
            cases[case] = parity.argv(folder, name, folder / case, micro, accum, *also)
    for case, (losses, ranks) in train(folder, "fsdp", processes, cases).items():
        assert_equal(losses, ranks, expected[case.split("-")[1]])
