"""Runs that stop and go on, in the same shape to the bit, and in others."""

import json

import pytest
import torch
from conftest import ROOT, ZERO, logged, smaller_model, train_cases

from bench.checkpoints import tensors

KEPT = ("train/loss", "train/grad_norm", "train/lr", "data/tokens", "data/label_tokens")
STEPS, AT = 3, 2  # the whole run, and where it is taken up again
FP32, FP16, BF16 = (["--dtype", x, "--micro_batch_size", "2"] for x in ("fp32", "fp16", "bf16"))
ONE = ["--dtype", "fp32", "--micro_batch_size", "1"]
THREE, FOUR, SIX = (["--grad_accum_steps", n] for n in "346")
AGAIN_IN_BLOCKS = "--use_activation_checkpointing"
HOST, ZERO3 = "--optimizer_on_host", ZERO["zero3"]
TENSOR = ["--tensor_parallel", "2"]
MOMENTS = ["--optim_state", "bf16"]
ADAPTERS = ["--lora_rank", "4"]
TWICE, OUT_AND_BACK = ["--schedule", "interleaved"], ["--schedule", "v"]
HELDOUT = ["--eval_json", "{folder}/data.jsonl"]  # it leaves FSDP's weights gathered
ORDER = ["--length_warmup", "3", "--no_shuffle"]  # taken up again before the last sorted step
ORDER += ["--train_json", "{folder}/ragged.jsonl"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """runs(script, processes, cases {name: flags}) trains in one set of processes. NAME-again goes
    on from NAME, and WAY-from-NAME does in another shape; runs.check() compares all that did."""
    folder = tmp_path_factory.mktemp("runs")
    lines = (ROOT / "data/sft_en.jsonl").read_text().splitlines()
    (folder / "data.jsonl").write_text("\n".join(lines[:40]))  # 28 rows: an epoch ends on the way
    texts = [{"text": "why " * (2 + 7 * i % 27)} for i in range(60)]
    (folder / "ragged.jsonl").write_text("\n".join(map(json.dumps, texts)))
    model = smaller_model(folder / "model")
    sources = {}  # {name: (the run that it goes on from, tolerance)}

    def train(kind, processes, cases):
        argvs = {}
        for name, flags in cases.items():
            argvs[name] = [
                "--model_name_or_path", model, "--train_json", folder / "data.jsonl",
                "--eval_json", "none", "--seq_len", "32", "--sample_tokens", "0",
                "--max_steps", STEPS, "--lr", "1e-3", "--warmup_steps", "2", "--seed", "3",
                "--save_every", AT, "--keep_last", "0", *(f.format(folder=folder) for f in flags),
            ]  # fmt: skip
            way, _, source = name.partition("-from-")
            if source or name.endswith("-again"):
                source, tolerance = (source, 1e-5) if source else (way.removesuffix("-again"), 0.0)
                sources[name] = source, tolerance
                argvs[name] += ["--resume", folder / source / f"checkpoints/step_{AT:08d}"]
        train_cases(folder, kind, processes, argvs)

    def check(rounding=0.0, parameters=46):
        assert sources
        while sources:
            name, (source, tolerance) = sources.popitem()
            assert_same(folder, source, name, tolerance, rounding, parameters)

    train.check, train.folder = check, folder
    return train


def again(cases):
    """These cases, and the same once more from their middle."""
    return cases | {f"{name}-again": flags for name, flags in cases.items()}


def steps_of(run):
    return {record["step"]: [record[k] for k in KEPT] for record in logged(run)}


def assert_same(folder, one, other, tolerance, rounding, parameters):
    """From step AT on both runs log the same numbers, and end with the same tensors. rounding: of
    moments, relative, if their dtype has changed. parameters: that are trained."""
    a, b = steps_of(folder / one), steps_of(folder / other)
    assert min(b) == AT + 1, f"{other} began at the beginning"
    for step in range(AT + 1, STEPS + 1):
        expected = pytest.approx(a[step], rel=tolerance) if tolerance else a[step]
        assert b[step] == expected, (other, step)
    last = f"checkpoints/step_{STEPS:08d}"
    a, b = tensors(folder / one / last), tensors(folder / other / last)
    assert a.keys() == b.keys() and len(a) == 3 * parameters
    for name, t in a.items():
        if tolerance:
            bound = max(100 * tolerance, rounding * ("exp_avg" in name))
            assert (t - b[name]).norm() <= bound * t.norm(), (other, name)
        else:
            assert torch.equal(t, b[name]), (other, name)
        assert t.any(), name


def test_goes_on_to_the_bit_and_on_other_shapes(runs):
    """12 rows a step of 28: step 2 ends in mid-epoch, step 3 in the next one."""
    three, six = ([*FP32, AGAIN_IN_BLOCKS, *accum] for accum in (THREE, SIX))
    runs("fsdp", 2, {
        "fsdp": [*three, *HELDOUT], "fsdp-again": three,
        **again({"fsdp16": [*FP16, *THREE], "ordered": [*three, *ORDER]}),
        "host": [*three, HOST], "host-from-fsdp": [*three, HOST], "fsdp-from-host": three,
        "shares": [*FP32, *SIX, *TENSOR], "shares-again": [*FP32, *SIX, *TENSOR],
        "shares-from-fsdp": [*FP32, *SIX, *TENSOR, HOST], "fsdp-from-shares": three,
    })  # fmt: skip
    # two replicas of two stages: ZeRO-1 shards masters and moments
    runs("pp", 4, {"pp": three, "pp-again": three})
    runs("zero", 2, again({"zero": [*three, *ZERO3]}) | {"zero-from-fsdp": [*three, *ZERO3]})
    runs("fsdp", 1, {
        "plain-from-fsdp": [*six, "--no_fsdp"], "fsdp-from-pp": six, "fsdp-from-zero": six,
    })  # fmt: skip
    runs.check()


@pytest.mark.slow
def test_goes_on_on_still_other_shapes(runs):
    three, six = ([*FP32, AGAIN_IN_BLOCKS, *accum] for accum in (THREE, SIX))
    runs("fsdp", 2, {"first": three, "order": [*three, *ORDER]})
    runs("pp", 4, {
        "pair": three, "v-from-first": [*ONE, *SIX, "--schedule", "dualpipev"],
        "pp-from-order": [*three, *ORDER], "4-stages-from-first": [*six, "--stages", "4"],
    })  # fmt: skip
    runs("zero", 2, {"zero-from-order": [*three, *ZERO3, *ORDER]})
    runs("fsdp", 4, {"replicas-from-first": [*ONE, *THREE, "--replicas", "2"]})  # of two shards
    runs("pp", 1, {"1-stage-from-pair": [*six, "--stages", "1"]})
    runs("fsdp_pp", 2, {"fpp-from-order": [*six, *ORDER]})
    runs.check()


def test_a_sharded_pipeline_goes_on_to_the_bit_and_on_other_shapes(runs):
    three, six = [*FP32, *THREE], [*FP32, *SIX]
    runs("fsdp_pp", 4, {
        "grid": [*three, *HELDOUT, "--eval_every", "2"], "grid-again": three,
        "portions": [*FP32, *SIX, *TENSOR],
        "portions-from-grid": [*FP32, *SIX, *TENSOR],
        **again({"grid16": [*BF16, *THREE]}), "long-from-grid": [*six, "--stages", "4"],
    })  # fmt: skip
    runs("fsdp_pp", 2, {
        **again({"one16": [*BF16, *SIX]}), "twice-from-grid": [*six, *TWICE],
        "v-from-grid": [*six, *OUT_AND_BACK],  # both ends of the model on a stage
    })  # fmt: skip
    runs("fsdp", 2, {"shards-from-grid": three, "shards-from-portions": three})
    runs.check()


def test_adapters_go_on_to_the_bit_and_from_and_to_stages(runs):
    """Also with dropout, from masters beside weights, and from a run that itself went on."""
    three, six = [*FP32, *THREE, *ADAPTERS], [*FP32, *SIX, *ADAPTERS]
    dropped = [*BF16, *SIX, *ADAPTERS, "--lora_dropout", "0.1", *TWICE]
    runs("fsdp", 2, {"base": three})
    runs("fsdp_pp", 2, {
        "v-from-base": [*six, *OUT_AND_BACK], "staged": six, **again({"dropped": dropped}),
    })  # fmt: skip
    runs("fsdp_pp", 4, {**again({"pair": three}), "4-stages-from-pair": [*six, "--stages", "4"]})
    runs("fsdp", 2, {"base-from-staged": three, "base-from-pair": three})
    runs.check(parameters=4 * 7 * 2)


@pytest.mark.slow
def test_moments_in_bf16_go_on_to_the_bit_and_from_and_to_fp32_on_every_script(runs):
    """The step after a resume has the same loss and norm, which depend on the masters only."""
    three, six = [*FP32, *THREE], [*FP32, *SIX]
    low, low_host = [*three, *MOMENTS], [*three, *MOMENTS, HOST]
    runs("fsdp", 2, {
        "wide": three, **again({"low": low, "lowhost": low_host}), "low-from-wide": low,
        "wide-from-low": three, "lowhost-from-wide": low_host, "widehost-from-low": [*three, HOST],
    })  # fmt: skip
    runs("pp", 2, {"piped": six, "piped-from-low": six})
    runs("zero", 2, {"zero2-from-low": [*three, *ZERO["zero2"]]})
    in_bf16 = [*BF16, *SIX]  # with masters beside the weights
    runs("fsdp_pp", 2, {
        **again({"lowpp": [*in_bf16, *MOMENTS]}), "wide16-from-lowpp": in_bf16,
        "widepp-from-low": six,
    })  # fmt: skip
    runs("fsdp", 2, {"low-from-piped": low})
    runs.check(rounding=2**-7)
    sizes = [logged(runs.folder / name, "save/bytes")[-1]["save/bytes"] for name in ("low", "wide")]
    assert sizes[0] < 0.75 * sizes[1]  # 8 bytes a parameter, not 12


@pytest.mark.slow
def test_a_sharded_pipeline_goes_on_in_fp16_and_other_schedules(runs):
    runs("fsdp_pp", 4, again({"fpp16": [*FP16, *THREE]}))
    two = {"fppv16": [*FP16, *SIX, *OUT_AND_BACK], "fpptwice": [*BF16, *SIX, *TWICE]}
    runs("fsdp_pp", 2, again(two))
    runs.check()


@pytest.mark.slow
def test_a_sharded_pipeline_goes_on_from_and_to_the_other_scripts(runs):
    three, six = [*FP32, *THREE], [*FP32, *SIX]
    runs("fsdp", 2, {"shards": three})
    runs("pp", 2, {"stages": six})
    runs("zero", 2, {"partitions": [*three, *ZERO3]})
    runs("fsdp_pp", 4, {
        "both": [*three, *OUT_AND_BACK], "both-from-stages": [*three, *OUT_AND_BACK],
        "both-from-partitions": three,
    })  # fmt: skip
    runs("fsdp_pp", 2, {"both-from-shards": [*six, *TWICE]})
    runs("pp", 2, {"stages-from-both": six, "stages-from-shards": six})
    runs("zero", 2, {
        "partitions-from-both": [*three, *ZERO3], "partitions-from-stages": [*three, *ZERO["zero2"]]
    })  # fmt: skip
    runs.check()


@pytest.mark.slow
def test_goes_on_to_the_bit_in_the_other_16_bits(runs):
    fp16, bf16 = [*FP16, *THREE], [*BF16, *THREE]
    runs("fsdp", 2, again({"fsdpb": bf16, "hostb": [*bf16, HOST], "host16": [*fp16, HOST]}))
    runs("pp", 4, again({"pp16": fp16, "ppb": bf16}))
    runs.check()


@pytest.mark.slow
def test_zero_goes_on_to_the_bit_and_from_and_to_other_scripts(runs):
    three, six, bf16 = [*FP32, *THREE], [*FP32, *SIX], [*BF16, *THREE]
    runs("fsdp", 2, {"base": three})
    cases = {"zero3-fp16": [*FP16, *THREE, *ZERO3]}
    for name, config in ZERO.items():
        cases |= {name: [*three, *config], f"{name}-bf16": [*bf16, *config]}
    from_fsdp = {f"{n}-from-base": [*three, *ZERO[n]] for n in ("zero1", "zero3", "zero2_offload")}
    runs("zero", 2, again(cases) | from_fsdp)
    runs("zero", 3, {  # processes, which do not divide the parameters' sizes
        "three-from-zero2": [*ONE, *FOUR, *ZERO3],
        "three_offload-from-zero3": [*ONE, *FOUR, *ZERO["zero2_offload"]],
    })  # fmt: skip
    runs("pp", 2, {"pp-from-zero3_offload": six})
    runs("fsdp", 1, {"fsdp-from-zero1": six})
    runs.check()


@pytest.mark.slow
def test_the_hosts_optimizer_goes_on_to_the_bit_and_from_and_to_other_scripts(runs):
    three, six = [*FP32, *THREE], [*FP32, *SIX]
    host, offload = [*three, HOST], [*three, *ZERO["zero3_offload"]]
    runs("fsdp", 2, again({"hosted": host}))
    runs("pp", 2, {"staged": six, "pp-from-hosted": six})
    runs("fsdp_pp", 2, {"cut": six, "fsdp_pp-from-hosted": six})
    runs("zero", 2, {"offloaded": offload, "zero-from-hosted": offload})
    runs("fsdp", 2, {f"host-from-{name}": host for name in ("staged", "cut", "offloaded")})
    runs.check()
