"""Mixtures of experts: every script's numbers against Hugging Face's own experts, one document at a
time in one process."""

import functools
import json

import pytest
import test_parity as parity
import torch
from conftest import ROOT, torchrun
from test_parity import assert_equal, plain_loop, train
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from fsdp_pp.torch_schedules import splits_backwards
from llm_demo.data.packs import load_packs
from llm_demo.run.checkpoint_files import read_tensors, shapes_of

STEPS = 5
SIZES = dict(
    vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=4, max_position_embeddings=256, initializer_range=0.05,
    moe_intermediate_size=32, num_experts_per_tok=2,
)  # fmt: skip
MODELS = {
    "qwen": Qwen3MoeConfig(
        num_experts=8, num_key_value_heads=2, head_dim=16, norm_topk_prob=True,
        mlp_only_layers=[1], tie_word_embeddings=True, **SIZES,
    ),
    "deepseek": DeepseekV3Config(
        n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1,
        num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, tie_word_embeddings=False, **SIZES,
    ),
}  # fmt: skip
MODELS["skewed"] = MODELS["deepseek"]
MODELS["shared"] = Qwen2MoeConfig(
    num_experts=8, num_key_value_heads=2, shared_expert_intermediate_size=48,
    tie_word_embeddings=False, **SIZES,
)  # fmt: skip
RESHARD = ["--reshard_after_forward"]
SPREAD_2 = ["--expert_parallel", "2"]
ENGINES = {  # (script, processes, further flags, (micro, accumulation) for each model)
    "plain": ("fsdp", 1, ["--no_fsdp"], [(8, 1), (2, 4)]),
    "fsdp": ("fsdp", 2, [], [(2, 2), (4, 1)]),
    "spread": ("fsdp", 2, ["--expert_parallel", "2"], [(1, 4), (4, 1), (2, 2), (2, 2)]),
    "spread_by_2": ("fsdp", 4, ["--expert_parallel", "2"], [(2, 1), (1, 2)]),
    "spread_by_4": ("fsdp", 4, [*RESHARD, "--expert_parallel", "4"], [(1, 2), (2, 1), (1, 2)]),
    "replicas": ("fsdp", 4, [*RESHARD, "--replicas", "2"], [(1, 2), (2, 1)]),
    "host_one": ("fsdp", 1, ["--no_fsdp", "--optimizer_on_host"], [(2, 4), (8, 1), (2, 4), (8, 1)]),
    "host": ("fsdp", 2, ["--optimizer_on_host"], [(2, 2), (1, 4)]),
    "host_spread": ("fsdp", 2, [*RESHARD, "--optimizer_on_host", *SPREAD_2], [(2, 2), (4, 1)]),
    "reshard": ("fsdp", 2, RESHARD, [(4, 1), (2, 2), (4, 1), (2, 2)]),
    "fpp": ("fsdp_pp", 2, [], [(2, 4), (4, 2)]),
    "twice": ("fsdp_pp", 4, ["--schedule", "interleaved"], [(1, 4)] * 4),
    "gathered_again": ("fsdp_pp", 4, RESHARD, [(1, 4), (2, 2)]),
    "zbv": ("fsdp_pp", 2, ["--schedule", "zbv"], [(2, 4), (1, 8)]),
}
# whose parts the others have
SLOW = (
    "spread_by_4",
    "replicas",
    "host_one",
    "host",
    "host_spread",
    "reshard",
    "twice",
    "gathered_again",
)
SLOW += ("zbv",)


def why_not(engine):
    """Why an engine can't be tested here, if so."""
    _, processes, flags, _ = ENGINES[engine]
    if parity.GPUS and processes > parity.GPUS:
        return f"{processes} processes, {parity.GPUS} GPUs"
    return "zbv" in flags and not splits_backwards() and "this PyTorch can't split backwards"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    tokenizer = AutoTokenizer.from_pretrained(parity.TINY)
    parity.write_rows(folder / "data.jsonl")
    packs = load_packs(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN)
    results = {}
    for name, config in MODELS.items():
        torch.manual_seed(name == "skewed")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if name == "skewed":  # all tokens choose the same two experts
            for block in model.model.layers[1:]:
                block.mlp.gate.e_score_correction_bias[:2] = 10.0
        for key, p in model.named_parameters():
            if key.endswith("bias"):  # zeros would be all noise: keys' have next to no gradient
                torch.nn.init.normal_(p, std=0.05)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        model.config._experts_implementation = "eager"
        results[name] = plain_loop(model.to(parity.DEVICE), packs, STEPS)
    return folder, results


@pytest.fixture(scope="module")
def trained(work):
    """(script, processes, quick) -> what `train` found for all engines that want these, in one
    launch."""

    @functools.cache
    def once(*wanted, quick):
        cases = {}
        for engine, (*how, flags, splits) in ENGINES.items():
            recomputed = "false" if engine == "zbv" else "true"  # which it refuses
            checkpointing = {"qwen": recomputed, "deepseek": "false"}
            if wanted != tuple(how) or quick != (engine not in SLOW) or why_not(engine):
                continue
            for model, split in zip(MODELS, splits, strict=False):
                more = [*flags, "--use_activation_checkpointing", checkpointing.get(model, "true")]
                more += ["--max_steps", str(STEPS)]
                name = f"{engine}-{model}"
                cases[name] = parity.argv(work[0], model, work[0] / name, *split, *more)
        return train(work[0], *wanted, cases)

    return once


@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ENGINES],
)
def test_equals_plain_loop(engine, work, trained):
    kind, processes, *_, splits = ENGINES[engine]
    if reason := why_not(engine):
        pytest.skip(reason)
    found = trained(kind, processes, quick=engine not in SLOW)
    for model, _ in zip(MODELS, splits, strict=False):
        losses, ranks = found[f"{engine}-{model}"]
        for rank in ranks:  # DeepSeek's bias is no parameter, and no flag lets it change
            biases = [n for n in rank["params"] if n.endswith("e_score_correction_bias")]
            values = [v for n in biases for v in rank["params"].pop(n).unique().tolist()]
            assert set(values) == {"deepseek": {0}, "skewed": {0, 10}}.get(model, set())
        assert_equal(losses, ranks, work[1][model])


def run_all(kind, processes, runs, folder):
    """Run a script with each of these flags in one set of processes."""
    cases = [{"argv": [str(flag) for flag in flags], "quiet": True} for flags in runs]
    (folder / "cases.json").write_text(json.dumps(cases))
    torchrun(processes, ROOT / "tests/parity_worker.py", kind, folder / "cases.json")


def metrics(folder, *names):
    lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    return [[line[n] for n in names] for line in lines if "train/loss" in line]


def tensors_of(checkpoint):
    shapes = shapes_of(checkpoint)
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    read_tensors(checkpoint, tensors)
    return tensors


@pytest.mark.parametrize(
    "spread, again, respread, splits",  # --expert_parallel of both runs
    [
        pytest.param("1", ("fsdp", 2), "1", ["2", "2"], marks=pytest.mark.slow),
        ("2", ("fsdp", 2), "2", ["2", "2"]),
        ("2", ("fsdp", 1), "1", ["8", "1"]),
        pytest.param("1", ("fsdp", 4), "2", ["1", "2"], marks=pytest.mark.slow),
        pytest.param("2", ("fsdp", 4), "4", ["2", "1"], marks=pytest.mark.slow),
        pytest.param("1", ("fsdp_pp", 2), None, ["2", "4"], marks=pytest.mark.slow),
    ],
)
def test_resumes_with_deepseeks_bias_and_frozen_routers(
    spread, again, respread, splits, work, tmp_path
):
    flags = [
        "--model_name_or_path", work[0] / "deepseek", "--train_json", work[0] / "data.jsonl",
        "--eval_json", "none", "--seq_len", str(parity.SEQ_LEN), "--max_steps", "4", "--lr", "2e-3",
        "--warmup_steps", "1", "--sample_tokens", "0", "--save_every", "2", "--keep_last", "0",
        "--freeze_router",
    ]  # fmt: skip
    updates = again[0] == "fsdp"  # fsdp_pp refuses it
    flags += ["--router_bias_update", "0.01"] * updates
    bits = again == ("fsdp", 2)
    over = ["--expert_parallel"]
    flags += ["--dtype", "bf16" if bits else "fp32"]
    batch = "--micro_batch_size", "2", "--grad_accum_steps", "2"
    whole = [*flags, *batch, "--output_dir", tmp_path / "whole", *over, spread]
    middle = tmp_path / "whole/checkpoints/step_00000002"
    batch = "--micro_batch_size", splits[0], "--grad_accum_steps", splits[1]
    resumed = tmp_path / "resumed"
    rest = [*flags, *batch, "--output_dir", resumed, "--resume", middle]
    rest += [*over, respread] if updates else []
    first = "fsdp", 2
    for how, runs in [(first, [whole, rest])] if bits else [(first, [whole]), (again, [rest])]:
        run_all(*how, runs, tmp_path)
    names = "train/loss", "train/grad_norm", "moe/load", "moe/idle"
    expected, found = metrics(tmp_path / "whole", *names)[2:], metrics(resumed, *names)
    assert len(found) == 2
    whole, end = (f / "checkpoints/step_00000004" for f in (tmp_path / "whole", resumed))
    whole, end, middle = map(tensors_of, (whole, end, middle))
    assert whole.keys() == end.keys()
    biases = [name for name in whole if name.endswith("e_score_correction_bias")]
    routers = [name for name in whole if name.endswith(".gate.weight")]
    assert len(biases) == len(routers) == 3
    given = AutoModelForCausalLM.from_pretrained(work[0] / "deepseek").state_dict()
    for name in routers:
        assert torch.equal(end[name], given[name])
        assert f"{name}.exp_avg" not in end
    for name in biases:
        assert bool(middle[name].any()) == updates
        assert torch.equal(middle[name], end[name]) != updates
    if bits:
        assert found == expected
        assert all(torch.equal(whole[name], end[name]) for name in whole)
    else:
        for mine, true in zip(found, expected, strict=True):
            assert mine[:2] == pytest.approx(true[:2], rel=1e-5)
            assert mine[2:] == true[2:] or not updates  # which counts padding
        assert all(torch.equal(whole[name], end[name]) for name in biases)


@pytest.mark.parametrize(
    "model, n", [pytest.param("qwen", "1", marks=pytest.mark.slow), ("deepseek", "2")]
)
def test_the_optimizer_on_the_host_has_the_same_numbers(model, n, work, tmp_path):
    """In bf16 with fp32 routers, experts on every rank or spread; and from one to the other."""
    flags = [
        "--model_name_or_path", work[0] / model, "--train_json", work[0] / "data.jsonl",
        "--eval_json", "none", "--seq_len", str(parity.SEQ_LEN), "--max_steps", "3", "--lr", "2e-3",
        "--warmup_steps", "1", "--sample_tokens", "0", "--save_every", "2", "--keep_last", "0",
        "--dtype", "bf16", "--micro_batch_size", "4", "--expert_parallel", n,
    ]  # fmt: skip
    flags += ["--router_bias_update", "0.01"] * (model == "deepseek")
    more = {"device": [], "host": ["--optimizer_on_host"]}
    for name, other in (("device", "host"), ("host", "device")):
        middle = tmp_path / name / "checkpoints/step_00000002"
        more[f"{other}-from-{name}"] = [*more[other], "--resume", middle]
    runs = [[*flags, *own, "--output_dir", tmp_path / name] for name, own in more.items()]
    run_all("fsdp", 2, runs, tmp_path)
    names = "train/loss", "train/grad_norm", "moe/load"
    expected = metrics(tmp_path / "device", *names)
    whole = tensors_of(tmp_path / "device/checkpoints/step_00000003")
    routed = [name for name in whole if ".experts." in name or ".gate." in name]
    assert [name for name in routed if not whole[name].any()] == []
    for name in (n for n in more if n != "device"):
        assert metrics(tmp_path / name, *names) == expected[2 if "-from-" in name else 0 :]
        found = tensors_of(tmp_path / name / "checkpoints/step_00000003")
        assert found.keys() == whole.keys()
        # AdamW's vectors end elsewhere in slices, and their ends may round differently
        assert max(parity.relative(t, whole[key]) for key, t in found.items()) < 1e-7


def test_routers_of_one_process_stay_in_fp32(work, tmp_path):
    """In bf16 it has FSDP2's numbers to the bit; and frozen routers stay as they are."""
    flags = [
        "--model_name_or_path", work[0] / "qwen", "--train_json", work[0] / "data.jsonl",
        "--eval_json", "none", "--seq_len", "32", "--max_steps", "2", "--lr", "2e-3",
        "--warmup_steps", "1", "--sample_tokens", "0", "--dtype", "bf16",
    ]  # fmt: skip
    more = {"one": ["--no_fsdp"], "fsdp": ["--fsdp"], "frozen": ["--no_fsdp", "--freeze_router"]}
    runs = [[*flags, *own, "--output_dir", tmp_path / name] for name, own in more.items()]
    run_all("fsdp", 1, runs, tmp_path)
    one, fsdp, frozen = (tensors_of(tmp_path / n / "checkpoints/step_00000002") for n in more)
    given = AutoModelForCausalLM.from_pretrained(work[0] / "qwen").state_dict()
    routers = [name for name in one if name.endswith(".gate.weight")]
    assert len(routers) == 3
    for name in routers:
        assert torch.equal(frozen[name], given[name]) and not torch.equal(one[name], given[name])
        assert torch.equal(one[name], fsdp[name]) or parity.DEVICE != "cpu"
    if parity.DEVICE == "cpu":
        names = "train/loss", "train/grad_norm", "moe/load"
        assert metrics(tmp_path / "one", *names) == metrics(tmp_path / "fsdp", *names)


def test_the_auxiliary_loss_is_of_the_global_batch(work, tmp_path):
    """Equal however the batch is split; it lowers the largest load."""
    flags = [
        "--model_name_or_path", work[0] / "qwen", "--train_json", work[0] / "data.jsonl",
        "--eval_json", "none", "--seq_len", str(parity.SEQ_LEN), "--max_steps", "4", "--lr", "2e-3",
        "--warmup_steps", "1", "--sample_tokens", "0", "--no_save", "--dtype", "fp32",
    ]  # fmt: skip
    one = [*flags, "--micro_batch_size", "8"]
    split = [*flags, "--micro_batch_size", "2", "--grad_accum_steps", "2"]
    added = ["--router_aux_loss", "0.5"]
    runs = {
        "one": [*one, *added], "without": one,
        "split": [*split, *added, "--use_activation_checkpointing"],
        "slices": [*split, "--micro_batch_size", "4", *added, "--sequence_parallel", "2"],
    }  # fmt: skip
    runs = {name: [*more, "--output_dir", tmp_path / name] for name, more in runs.items()}
    run_all("fsdp", 1, [runs["one"], runs["without"]], tmp_path)
    run_all("fsdp", 2, [runs["split"], runs["slices"]], tmp_path)
    found = {}
    for name in runs:
        names = ["train/loss", "train/grad_norm"] + ["moe/aux_loss"] * (name != "without")
        found[name] = metrics(tmp_path / name, *names), metrics(tmp_path / name, "moe/load")
    for name in ("split", "slices"):
        for one, other in zip(found["one"][0], found[name][0], strict=True):
            assert other == pytest.approx(one, rel=1e-5)
    assert found["one"][0][0][0] == pytest.approx(found["without"][0][0][0], rel=1e-6)
    assert found["one"][0][0][1] != pytest.approx(found["without"][0][0][1], rel=1e-3)
    assert max(found["one"][1][-1][0]) < max(found["without"][1][-1][0])
