"""Mixtures of experts: every script's numbers against Hugging Face's own experts, one document at a
time in one process."""

import copy
import functools

import pytest
import test_parity as parity
import test_qwen35 as qwen35
import torch
import torch.nn.functional as F
from conftest import logged, slow, smaller_tokenizer, train_cases
from test_parity import assert_equal, plain_loop, train
from tiny_tokenizer import packs_of
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from bench.checkpoints import tensors

SIZES = dict(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
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
# whose first gradients have no element that is nearly zero: AdamW would move it by rounding
SEEDS = {"qwen": 2, "deepseek": 7, "skewed": 5, "shared": 2}
RESHARD = ["--reshard_after_forward"]
SPREAD_2, TENSOR_2 = ["--expert_parallel", "2"], ["--tensor_parallel", "2"]
ENGINES = {  # (script, processes, further flags, (micro, accumulation) for each model)
    "plain": ("fsdp", 1, ["--no_fsdp"], [(8, 1), (2, 4)]),
    "fsdp": ("fsdp", 2, [], [(2, 2), (4, 1)]),
    "spread": ("fsdp", 2, ["--expert_parallel", "2"], [(1, 4), (4, 1), (2, 2), (2, 2)]),
    "spread_by_2": ("fsdp", 4, ["--expert_parallel", "2"], [(2, 1), (1, 2)]),
    "spread_by_4": ("fsdp", 4, [*RESHARD, "--expert_parallel", "4"], [(1, 2), (2, 1), (1, 2)]),
    "replicas": ("fsdp", 4, [*RESHARD, "--replicas", "2"], [(1, 2), (2, 1)]),
    "tensor": ("fsdp", 2, [*SPREAD_2, *TENSOR_2], [(2, 4), (8, 1), (4, 2), (4, 2)]),
    "tensor_four": ("fsdp", 4, [*RESHARD, "--expert_parallel", "4", *TENSOR_2], [(2, 2), (4, 1)]),
    "host_one": ("fsdp", 1, ["--no_fsdp", "--optimizer_on_host"], [(2, 4), (8, 1), (2, 4), (8, 1)]),
    "host": ("fsdp", 2, ["--optimizer_on_host"], [(2, 2), (1, 4)]),
    "host_spread": ("fsdp", 2, [*RESHARD, "--optimizer_on_host", *SPREAD_2], [(2, 2), (4, 1)]),
    "reshard": ("fsdp", 2, RESHARD, [(4, 1), (2, 2), (4, 1), (2, 2)]),
    "fpp_spread": ("fsdp_pp", 4, [*SPREAD_2, *TENSOR_2], [(2, 4), (4, 2), (1, 8), (2, 4)]),
    "fpp": ("fsdp_pp", 2, [], [(2, 4), (4, 2)]),
    "twice": ("fsdp_pp", 4, ["--schedule", "interleaved"], [(1, 4)] * 4),
    "gathered_again": ("fsdp_pp", 4, RESHARD, [(1, 4), (2, 2)]),
    "v": ("fsdp_pp", 2, ["--schedule", "v"], [(2, 4), (1, 8)]),
}
# whose parts the others have
SLOW = (
    "spread_by_4", "tensor_four", "fpp_spread", "replicas", "host_one", "host", "host_spread",
    "reshard", "twice", "gathered_again", "v",
)  # fmt: skip


def why_not(engine):
    """Why an engine can't be tested here, if so."""
    _, processes, *_ = ENGINES[engine]
    if parity.GPUS and processes > parity.GPUS:
        return f"{processes} processes, {parity.GPUS} GPUs"
    return None


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    tokenizer = AutoTokenizer.from_pretrained(smaller_tokenizer(folder / "tokenizer"))
    parity.write_rows(folder / "data.jsonl")
    packs = packs_of(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN)
    results = {}
    for name in MODELS:
        model = made(name)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        results[name] = plain_loop(with_eager_experts(model), packs)
    return folder, results


def made(name):
    """A model with weights, the same each time."""
    torch.manual_seed(SEEDS.get(name, 0))
    config = copy.deepcopy((MODELS | qwen35.EXPERTS)[name])
    config.vocab_size = SIZES["vocab_size"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if name == "skewed":  # all tokens choose the same two experts
        for block in model.model.layers[1:]:
            block.mlp.gate.e_score_correction_bias[:2] = 10.0
    for key, p in model.named_parameters():
        if name in qwen35.EXPERTS:
            qwen35.change(key, p.data)
        elif key.endswith("bias"):  # zeros would be all noise: keys' have next to no gradient
            torch.nn.init.normal_(p, std=0.05)
    return model


def with_eager_experts(model):
    model.config._experts_implementation = "eager"
    return model.to(parity.DEVICE)


@pytest.fixture(scope="module")
def trained(work):
    """(script, processes, quick) -> what `train` found for all engines that want these, in one
    launch."""

    @functools.cache
    def once(*wanted, quick):
        cases = {}
        for engine, (*how, flags, splits) in ENGINES.items():
            checkpointing = {"qwen": "true", "deepseek": "false"}
            if wanted != tuple(how) or quick != (engine not in SLOW) or why_not(engine):
                continue
            for model, split in zip(MODELS, splits, strict=False):
                more = [*flags, "--use_activation_checkpointing", checkpointing.get(model, "true")]
                name = f"{engine}-{model}"
                cases[name] = parity.argv(work[0], model, *split, *more)
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
        biases = [  # DeepSeek's, which are no parameters, and no flag lets them change
            {*rank["params"].pop(name).tolist()}
            for rank in ranks
            for name in [*rank["params"]]
            if name.endswith("e_score_correction_bias")
        ]
        values = {"deepseek": {0}, "skewed": {0, 10}}.get(model)
        assert bool(biases) == bool(values) and all(bias == values for bias in biases)
        assert_equal(losses, ranks, work[1][model])


def with_auxiliary_loss(coefficient):
    """parity.add_gradients and those of the auxiliary loss of all tokens of a step, from its
    formula."""

    def add_gradients(model, documents):
        seen = []

        def see(gate, inputs, output):
            logits, _, index = output
            seen.append((logits.softmax(-1), index))

        gates = [block.mlp.gate for block in model.model.layers if hasattr(block.mlp, "experts")]
        hooks = [gate.register_forward_hook(see) for gate in gates]
        tokens = sum(len(ids) for ids, _ in documents)
        learnt = sum(int((labels != -100).sum()) for _, labels in documents)
        shares, total = 0, 0.0
        for ids, _ in documents:
            with torch.no_grad():
                model(input_ids=ids[None], use_cache=False)
            counts = [index.flatten().bincount(minlength=len(p[0])) for p, index in seen]
            shares = shares + torch.stack(counts) / tokens
            seen.clear()
        for ids, labels in documents:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            loss = F.cross_entropy(logits, labels, reduction="sum") / learnt
            means = torch.stack([p.sum(0) / tokens for p, _ in seen])
            auxiliary = shares.shape[1] * (shares * means).sum() / len(gates)
            (loss + coefficient * auxiliary).backward()
            total += loss.item()
            seen.clear()
        for hook in hooks:
            hook.remove()
        return total

    return add_gradients


FEW = 3  # steps


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_auxiliary_loss_equals_the_plain_loop(work):
    """Experts spread or not, the optimizer on the host, replicas, weights gathered again."""
    if parity.GPUS == 1:
        pytest.skip("2 processes, 1 GPU")
    folder, host = work[0], ["--optimizer_on_host"]
    again, once = (["--use_activation_checkpointing", text] for text in ("true", "false"))
    cases = {
        "spread": ("qwen", 4, 1, [*SPREAD_2, *once]),
        "reshard": ("qwen", 2, 2, [*RESHARD, *once]),
        "host": ("qwen", 2, 2, [*host, *again]),
        "replicas": ("qwen", 2, 2, ["--replicas", "2", *once]),
        "hybrid": ("experts", 2, 2, [*SPREAD_2, *again]),
        "rows": ("shared", 1, 4, [*SPREAD_2, *RESHARD, *again, "--no_pack_sequences"]),
        "host_spread": ("shared", 4, 1, [*host, *SPREAD_2]),
    }
    tokenizer, expected, argvs = AutoTokenizer.from_pretrained(folder / "tokenizer"), {}, {}
    for name, (model, micro, accum, flags) in cases.items():
        pack = "--no_pack_sequences" not in flags
        packs = packs_of(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN, pack=pack)
        plain = made(model)
        if not (folder / model).exists():
            plain.save_pretrained(folder / model)
            tokenizer.save_pretrained(folder / model)
        expected[f"aux-{name}"] = plain_loop(
            with_eager_experts(plain), packs, FEW, add_gradients=with_auxiliary_loss(0.5)
        )
        flags = ["--max_steps", str(FEW), *flags, "--router_aux_loss", "0.5"]
        argvs[f"aux-{name}"] = parity.argv(folder, model, micro, accum, *flags)
    for name, (losses, ranks) in train(folder, "fsdp", 2, argvs).items():
        assert_equal(losses, ranks, expected[name])


def flags_of(work, model, steps, *more):
    return [
        "--model_name_or_path", work[0] / model, "--train_json", work[0] / "data.jsonl",
        "--eval_json", "none", "--seq_len", parity.SEQ_LEN, "--max_steps", steps, "--lr", "2e-3",
        "--warmup_steps", "1", "--sample_tokens", "0", "--keep_last", "0", *more,
    ]  # fmt: skip


def metrics(folder, *names):
    return [[record[n] for n in names] for record in logged(folder)]


@pytest.mark.parametrize(
    "spread, again, respread, splits",  # --expert_parallel of both runs
    [
        ("2", ("fsdp", 2), "2", ["2", "2"]),
        ("2", ("fsdp", 1), "1", ["8", "1"]),
        slow("1", ("fsdp", 4), "2", ["1", "2"]),
        slow("1", ("fsdp_pp", 2), None, ["2", "4"]),
    ],
)
def test_resumes_with_bias_and_frozen_routers(spread, again, respread, splits, work, tmp_path):
    flags = flags_of(work, "deepseek", 4, "--save_every", "2", "--freeze_router")
    updates = again[0] == "fsdp"  # fsdp_pp refuses it
    flags += ["--router_bias_update", "0.01"] * updates
    bits = again == ("fsdp", 2)
    flags += ["--dtype", "bf16" if bits else "fp32"]
    batch = "--micro_batch_size", "2", "--grad_accum_steps", "2"
    whole = {"whole": [*flags, *batch, "--expert_parallel", spread]}
    middle, resumed = tmp_path / "whole/checkpoints/step_00000002", tmp_path / "resumed"
    batch = "--micro_batch_size", splits[0], "--grad_accum_steps", splits[1]
    rest = {"resumed": [*flags, *batch, "--resume", middle]}
    rest["resumed"] += ["--expert_parallel", respread] if updates else []
    first = "fsdp", 2
    for how, cases in [(first, whole | rest)] if bits else [(first, whole), (again, rest)]:
        train_cases(tmp_path, *how, cases)
    names = "train/loss", "train/grad_norm", "moe/load", "moe/idle"
    expected, found = metrics(tmp_path / "whole", *names)[2:], metrics(resumed, *names)
    assert len(found) == 2
    whole, end = (f / "checkpoints/step_00000004" for f in (tmp_path / "whole", resumed))
    whole, end, middle = map(tensors, (whole, end, middle))
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


@pytest.mark.parametrize("model, n", [slow("qwen", "1"), ("deepseek", "2")])
def test_the_optimizer_on_the_host_has_the_same_numbers(model, n, work, tmp_path):
    """In bf16 with fp32 routers, experts on every rank or spread; and from one to the other."""
    flags = flags_of(work, model, 3, "--save_every", "2", "--dtype", "bf16")
    flags += ["--micro_batch_size", "4", "--expert_parallel", n]
    flags += ["--router_bias_update", "0.01"] * (model == "deepseek")
    more = {"device": [], "host": ["--optimizer_on_host"]}
    for name, other in (("device", "host"), ("host", "device")):
        middle = tmp_path / name / "checkpoints/step_00000002"
        more[f"{other}-from-{name}"] = [*more[other], "--resume", middle]
    train_cases(tmp_path, "fsdp", 2, {name: [*flags, *own] for name, own in more.items()})
    names = "train/loss", "train/grad_norm", "moe/load"
    expected = metrics(tmp_path / "device", *names)
    whole = tensors(tmp_path / "device/checkpoints/step_00000003")
    routed = [name for name in whole if ".experts." in name or ".gate." in name]
    assert [name for name in routed if not whole[name].any()] == []
    for name in (n for n in more if n != "device"):
        assert metrics(tmp_path / name, *names) == expected[2 if "-from-" in name else 0 :]
        found = tensors(tmp_path / name / "checkpoints/step_00000003")
        assert found.keys() == whole.keys()
        # AdamW's vectors end elsewhere in slices, and their ends may round differently
        assert max(parity.relative(t, whole[key]) for key, t in found.items()) < 1e-7


def test_routers_of_one_process_stay_in_fp32(work, tmp_path):
    """In bf16 it has FSDP2's numbers to the bit; and frozen routers stay as they are."""
    flags = flags_of(work, "qwen", 2, "--seq_len", "32", "--dtype", "bf16")
    more = {"one": ["--no_fsdp"], "fsdp": ["--fsdp"], "frozen": ["--no_fsdp", "--freeze_router"]}
    train_cases(tmp_path, "fsdp", 1, {name: [*flags, *own] for name, own in more.items()})
    one, fsdp, frozen = (tensors(tmp_path / n / "checkpoints/step_00000002") for n in more)
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
    """Equal however the batch is split, and in fp16, where it is scaled; it lowers the largest
    load."""
    flags = flags_of(work, "qwen", 4, "--no_save", "--dtype", "fp32")
    one = [*flags, "--micro_batch_size", "8"]
    split = [*flags, "--micro_batch_size", "2", "--grad_accum_steps", "2"]
    added = ["--router_aux_loss", "0.5"]
    runs = {
        "one": [*one, *added], "without": one,
        "split": [*split, *added, "--use_activation_checkpointing"],
        "slices": [*split, "--micro_batch_size", "4", *added, "--sequence_parallel", "2"],
        "spread": [*split, *added, *SPREAD_2],
        "fp16": [*split, *added, "--dtype", "fp16"],
    }  # fmt: skip
    for processes, names in ((1, ("one", "without")), (2, ("split", "slices", "spread", "fp16"))):
        train_cases(tmp_path, "fsdp", processes, {name: runs[name] for name in names})
    found = {}
    for name in runs:
        names = ["train/loss", "train/grad_norm"] + ["moe/aux_loss"] * (name != "without")
        found[name] = metrics(tmp_path / name, *names), metrics(tmp_path / name, "moe/load")
    for name in ("split", "slices", "spread"):
        for one, other in zip(found["one"][0], found[name][0], strict=True):
            assert other == pytest.approx(one, rel=1e-5)
    for one, other in zip(found["one"][0], found["fp16"][0], strict=True):
        assert other == pytest.approx(one, rel=parity.BOUNDS["fp16"][1])
    assert found["one"][0][0][0] == pytest.approx(found["without"][0][0][0], rel=1e-6)
    assert found["one"][0][0][1] != pytest.approx(found["without"][0][0][1], rel=1e-3)
    assert max(found["one"][1][-1][0]) < max(found["without"][1][-1][0])
