"""Runs that stop and go on, in the same shape to the bit, and in others."""

import json

import pytest
import torch
from conftest import ROOT, ZERO, smaller_model, torchrun

from bench.checkpoints import tensors

KEPT = ("train/loss", "train/grad_norm", "train/lr", "data/tokens", "data/label_tokens")
STEPS, AT = 3, 2  # the whole run, and where it is taken up again


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trains cases {name: flags} of one script in one set of processes; -> the folder of all."""
    folder = tmp_path_factory.mktemp("runs")
    lines = (ROOT / "data/sft_en.jsonl").read_text().splitlines()
    (folder / "data.jsonl").write_text("\n".join(lines[:40]))  # 28 rows: an epoch ends on the way
    texts = [{"text": "why " * (2 + 7 * i % 27)} for i in range(60)]
    (folder / "ragged.jsonl").write_text("\n".join(map(json.dumps, texts)))
    model = smaller_model(folder / "model")

    def train(kind, processes, cases):
        listed = []
        for name, flags in cases.items():
            argv = [
                "--model_name_or_path", str(model),
                "--train_json", str(folder / "data.jsonl"),
                "--eval_json", "none", "--seq_len", "32", "--sample_tokens", "0",
                "--max_steps", str(STEPS), "--lr", "1e-3", "--warmup_steps", "2", "--seed", "3",
                "--save_every", str(AT), "--keep_last", "0", "--output_dir", str(folder / name),
                *(f.format(folder=folder) for f in flags),
            ]  # fmt: skip
            listed.append({"argv": argv, "out": str(folder / f"{name}.out"), "quiet": True})
        file = folder / f"{kind}{processes}-{len(list(folder.iterdir()))}.json"
        file.write_text(json.dumps(listed))
        return torchrun(processes, ROOT / "tests/parity_worker.py", kind, file)

    train.folder = folder
    return train


def steps_of(run):
    lines = [json.loads(line) for line in open(run / "metrics.jsonl")]
    return {line["step"]: [line[k] for k in KEPT] for line in lines if "train/loss" in line}


def assert_same(folder, one, other, tolerance=0.0):
    """From step AT on both runs log the same numbers, and end with the same tensors."""
    a, b = steps_of(folder / one), steps_of(folder / other)
    assert min(b) == AT + 1, "it began at the beginning"
    for step in range(AT + 1, STEPS + 1):
        assert b[step] == (pytest.approx(a[step], rel=tolerance) if tolerance else a[step]), step
    last = f"checkpoints/step_{STEPS:08d}"
    a, b = tensors(folder / one / last), tensors(folder / other / last)
    assert a.keys() == b.keys() and len(a) == 3 * 46
    for name, t in a.items():
        if tolerance:
            assert (t - b[name]).norm() <= 100 * tolerance * t.norm(), name
        else:
            assert torch.equal(t, b[name]), name
        assert t.any(), name


def resumed(name, *flags):
    return [*flags, "--resume", f"{{folder}}/{name}/checkpoints/step_{AT:08d}"]


ORDER = ["--length_warmup", "3", "--no_shuffle"]  # taken up again before the last sorted step
ORDER += ["--train_json", "{folder}/ragged.jsonl"]
FP16, BF16 = (["--dtype", name, "--micro_batch_size", "2"] for name in ("fp16", "bf16"))


def test_goes_on_to_the_bit_and_on_other_shapes(runs):
    """12 rows a step of 28: step 2 ends in mid-epoch, step 3 in the next one."""
    fp32 = ["--dtype", "fp32", "--use_activation_checkpointing", "--micro_batch_size", "2"]
    pp, fsdp = ["--grad_accum_steps", "6"], ["--grad_accum_steps", "3"]
    host = "--optimizer_on_host"
    heldout = ["--eval_json", "{folder}/data.jsonl"]  # it leaves FSDP's weights gathered
    runs("fsdp", 2, {
        "fsdp": [*fp32, *fsdp, *heldout],
        "fsdp-again": resumed("fsdp", *fp32, *fsdp, "--no_save_async"),
        "fsdp16": [*FP16, *fsdp], "fsdp16-again": resumed("fsdp16", *FP16, *fsdp),
        "host": [*fp32, *fsdp, host],
        "host-from-fsdp": resumed("fsdp", *fp32, *fsdp, host),
        "fsdp-from-host": resumed("host", *fp32, *fsdp),
        "ordered": [*fp32, *fsdp, *ORDER],
        "ordered-again": resumed("ordered", *fp32, *fsdp, *ORDER),
    })  # fmt: skip
    runs("pp", 4, {  # two replicas of two stages: ZeRO-1 shards masters and moments
        "pp": [*fp32, *fsdp], "pp-again": resumed("pp", *fp32, *fsdp, "--no_save_async"),
    })  # fmt: skip
    zero3 = ZERO["zero3"]
    runs("zero", 2, {
        "zero": [*fp32, *fsdp, *zero3], "zero-again": resumed("zero", *fp32, *fsdp, *zero3),
        "zero-from-fsdp": resumed("fsdp", *fp32, *fsdp, *zero3),
    })  # fmt: skip
    runs("fsdp", 1, {
        "plain-from-fsdp": resumed("fsdp", *fp32, *pp, "--no_fsdp"),
        "fsdp-from-pp": resumed("pp", *fp32, *pp),
        "fsdp-from-zero": resumed("zero", *fp32, *pp),
    })  # fmt: skip
    for name in ("fsdp", "fsdp16", "ordered", "pp", "zero"):
        assert_same(runs.folder, name, f"{name}-again")
    others = [f"{way}-from-fsdp" for way in ("plain", "host", "zero")]
    others += [f"fsdp-from-{way}" for way in ("host", "pp", "zero")]
    for name in others:
        assert_same(runs.folder, name.split("-from-")[1], name, tolerance=1e-5)


@pytest.mark.slow
def test_goes_on_on_still_other_shapes(runs):
    fp32 = ["--dtype", "fp32", "--use_activation_checkpointing", "--micro_batch_size", "2"]
    one = ["--dtype", "fp32", "--micro_batch_size", "1"]
    six, three = ["--grad_accum_steps", "6"], ["--grad_accum_steps", "3"]
    runs("fsdp", 2, {"first": [*fp32, *three], "order": [*fp32, *three, *ORDER]})
    runs("pp", 4, {
        "pair": [*fp32, *three],
        "v-from-first": resumed("first", *one, *six, "--schedule", "dualpipev"),
        "pp-from-order": resumed("order", *fp32, *three, *ORDER),
        "4-stages-from-first": resumed("first", *fp32, *six, "--stages", "4"),
    })  # fmt: skip
    runs("zero", 2, {"zero-from-order": resumed("order", *fp32, *three, *ZERO["zero3"], *ORDER)})
    two = ["--replicas", "2"]  # of two shards
    runs("fsdp", 4, {"replicas-from-first": resumed("first", *one, *three, *two)})
    runs("pp", 1, {"1-stage-from-pair": resumed("pair", *fp32, *six, "--stages", "1")})
    runs("fsdp_pp", 2, {"fpp-from-order": resumed("order", *fp32, *six, *ORDER)})
    for name in ("v-from-first", "replicas-from-first", "pp-from-order", "zero-from-order",
                 "1-stage-from-pair", "4-stages-from-first", "fpp-from-order"):  # fmt: skip
        assert_same(runs.folder, name.split("-from-")[1], name, tolerance=1e-5)


def test_a_sharded_pipeline_goes_on_to_the_bit_and_on_other_shapes(runs):
    fp32 = ["--dtype", "fp32", "--micro_batch_size", "2"]
    three, six = ["--grad_accum_steps", "3"], ["--grad_accum_steps", "6"]
    twice = ["--schedule", "interleaved"]
    out_and_back = ["--schedule", "v"]  # both ends of the model on a stage
    heldout = ["--eval_json", "{folder}/data.jsonl", "--eval_every", "2"]
    runs("fsdp_pp", 4, {
        "grid": [*fp32, *three, *heldout],
        "grid-again": resumed("grid", *fp32, *three, "--no_save_async"),
        "grid16": [*BF16, *three], "grid16-again": resumed("grid16", *BF16, *three),
        "long-from-grid": resumed("grid", *fp32, *six, "--stages", "4"),
    })  # fmt: skip
    runs("fsdp_pp", 2, {
        "one16": [*BF16, *six], "one16-again": resumed("one16", *BF16, *six),
        "twice-from-grid": resumed("grid", *fp32, *six, *twice),
        "v-from-grid": resumed("grid", *fp32, *six, *out_and_back),
    })  # fmt: skip
    runs("fsdp", 2, {"shards-from-grid": resumed("grid", *fp32, *three)})
    for name in ("grid", "grid16", "one16"):
        assert_same(runs.folder, name, f"{name}-again")
    for name in ("long", "twice", "v", "shards"):
        assert_same(runs.folder, "grid", f"{name}-from-grid", tolerance=1e-5)


@pytest.mark.slow
def test_a_sharded_pipeline_goes_on_in_fp16_and_other_schedules(runs):
    """To the bit."""
    three, six = ["--grad_accum_steps", "3"], ["--grad_accum_steps", "6"]
    four = {"fpp16": [*FP16, *three]}
    two = {
        "fppv16": [*FP16, *six, "--schedule", "v"],
        "fpptwice": [*BF16, *six, "--schedule", "interleaved"],
    }
    for processes, cases in ((4, four), (2, two)):
        again = {f"{name}-again": resumed(name, *flags) for name, flags in cases.items()}
        runs("fsdp_pp", processes, {**cases, **again})
    for name in (*four, *two):
        assert_same(runs.folder, name, f"{name}-again")


@pytest.mark.slow
def test_a_sharded_pipeline_goes_on_from_and_to_the_other_scripts(runs):
    fp32 = ["--dtype", "fp32", "--micro_batch_size", "2"]
    three, six, zero3 = ["--grad_accum_steps", "3"], ["--grad_accum_steps", "6"], ZERO["zero3"]
    runs("fsdp", 2, {"shards": [*fp32, *three]})
    runs("pp", 2, {"stages": [*fp32, *six]})
    runs("zero", 2, {"partitions": [*fp32, *three, *zero3]})
    runs("fsdp_pp", 4, {
        "both": [*fp32, *three, "--schedule", "v"],
        "both-from-stages": resumed("stages", *fp32, *three, "--schedule", "v"),
        "both-from-partitions": resumed("partitions", *fp32, *three),
    })  # fmt: skip
    twice = ["--schedule", "interleaved"]
    runs("fsdp_pp", 2, {"both-from-shards": resumed("shards", *fp32, *six, *twice)})
    runs("pp", 2, {
        "stages-from-both": resumed("both", *fp32, *six),
        "stages-from-shards": resumed("shards", *fp32, *six),
    })  # fmt: skip
    runs("zero", 2, {
        "partitions-from-both": resumed("both", *fp32, *three, *zero3),
        "partitions-from-stages": resumed("stages", *fp32, *three, *ZERO["zero2"]),
    })  # fmt: skip
    for name in ("both-from-stages", "both-from-partitions", "both-from-shards", "stages-from-both",
                 "stages-from-shards", "partitions-from-both",
                 "partitions-from-stages"):  # fmt: skip
        assert_same(runs.folder, name.split("-from-")[1], name, tolerance=1e-5)


@pytest.mark.slow
def test_goes_on_to_the_bit_in_the_other_16_bits(runs):
    three, host = ["--grad_accum_steps", "3"], "--optimizer_on_host"
    cases = {
        "fsdpb": [*BF16, *three], "hostb": [*BF16, *three, host], "host16": [*FP16, *three, host],
    }  # fmt: skip
    again = {f"{name}-again": resumed(name, *flags) for name, flags in cases.items()}
    runs("fsdp", 2, {**cases, **again})
    pp16, ppb = [*FP16, *three], [*BF16, *three]
    runs("pp", 4, {
        "pp16": pp16, "pp16-again": resumed("pp16", *pp16),
        "ppb": ppb, "ppb-again": resumed("ppb", *ppb),
    })  # fmt: skip
    for name in (*cases, "pp16", "ppb"):
        assert_same(runs.folder, name, f"{name}-again")


@pytest.mark.slow
def test_zero_goes_on_to_the_bit_and_from_and_to_other_scripts(runs):
    fp32, fp16, bf16 = (
        ["--dtype", name, "--micro_batch_size", "2", "--grad_accum_steps", "3"]
        for name in ("fp32", "fp16", "bf16")
    )
    whole = ["--dtype", "fp32", "--micro_batch_size", "2", "--grad_accum_steps", "6"]
    three = ["--dtype", "fp32", "--micro_batch_size", "1", "--grad_accum_steps", "4"]
    runs("fsdp", 2, {"base": fp32})
    cases = {"zero3-fp16": [*fp16, *ZERO["zero3"]]}
    for name, config in ZERO.items():
        cases |= {name: [*fp32, *config], f"{name}-bf16": [*bf16, *config]}
    again = {f"{name}-again": resumed(name, *flags) for name, flags in cases.items()}
    from_fsdp = {
        f"{name}-from-base": resumed("base", *fp32, *ZERO[name])
        for name in ("zero1", "zero3", "zero2_offload")
    }
    runs("zero", 2, {**cases, **again, **from_fsdp})
    on_three = {  # processes, which do not divide the parameters' sizes
        "three-from-zero2": resumed("zero2", *three, *ZERO["zero3"]),
        "three_offload-from-zero3": resumed("zero3", *three, *ZERO["zero2_offload"]),
    }
    runs("zero", 3, on_three)
    to_pp = {"pp-from-zero3_offload": resumed("zero3_offload", *whole)}
    runs("pp", 2, to_pp)
    to_fsdp = {"fsdp-from-zero1": resumed("zero1", *whole)}
    runs("fsdp", 1, to_fsdp)
    for name in cases:
        assert_same(runs.folder, name, f"{name}-again")
    for name in (*from_fsdp, *on_three, *to_pp, *to_fsdp):
        assert_same(runs.folder, name.split("-from-")[1], name, tolerance=1e-5)


@pytest.mark.slow
def test_the_hosts_optimizer_goes_on_to_the_bit_and_from_and_to_other_scripts(runs):
    fp32 = ["--dtype", "fp32", "--micro_batch_size", "2"]
    three, six = [*fp32, "--grad_accum_steps", "3"], [*fp32, "--grad_accum_steps", "6"]
    host, offload = [*three, "--optimizer_on_host"], [*three, *ZERO["zero3_offload"]]
    runs("fsdp", 2, {"hosted": host, "hosted-again": resumed("hosted", *host)})
    runs("pp", 2, {"piped": six, "pp-from-hosted": resumed("hosted", *six)})
    runs("fsdp_pp", 2, {"cut": six, "fsdp_pp-from-hosted": resumed("hosted", *six)})
    runs("zero", 2, {"offloaded": offload, "zero-from-hosted": resumed("hosted", *offload)})
    others = {f"host-from-{name}": resumed(name, *host) for name in ("piped", "cut", "offloaded")}
    runs("fsdp", 2, others)
    assert_same(runs.folder, "hosted", "hosted-again")
    for name in (*others, *(f"{way}-from-hosted" for way in ("pp", "fsdp_pp", "zero"))):
        assert_same(runs.folder, name.split("-from-")[1], name, tolerance=1e-5)
