"""Where the pipeline is cut, and the workarounds that make DeepSpeed's engine exact."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, ZERO, logged, slow, smaller_model, train_cases

from llm_demo.core.decoder import skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.timer import CommTimer
from llm_demo.model.costs import sizes_of, unit_sizes
from llm_demo.model.source import load_config
from llm_demo.run.cut import costs, describe_split, split
from pp import deepspeed_base, ds_engine, ds_patches
from pp.ds_engine import layer_specs
from zero import ds_engine as zero_engine

QWEN = load_config(ROOT / "models/qwen3-0.6b", 1024)
SIZES = sizes_of(QWEN)


def test_balanced_split_counts_both_ends():
    """Qwen3-0.6B's head takes as long as 7.2 blocks with 8 rows; recomputation makes blocks dearer,
    not the head; with a single row the embedding's gradient counts for as much as 4 blocks."""
    assert split(SIZES, 2, "balanced", costs(SIZES, 8, 1024, False)) == [17, 11]
    assert split(SIZES, 2, "balanced", costs(SIZES, 8, 1024, True)) == [17, 11]
    assert split(SIZES, 2, "balanced", costs(SIZES, 1, 1024, True)) == [15, 13]
    assert split(SIZES, 2, "balanced", costs(SIZES, 1, 16384, False)) == [15, 13]
    assert split(SIZES, 2, "uniform", costs(SIZES, 8, 1024, False)) == [14, 14]
    assert split(SIZES, 3, "uniform", costs(SIZES, 8, 1024, False)) == [10, 9, 9]
    assert split(SIZES, 2, "parameters", costs(SIZES, 8, 1024, False)) == [14, 14]
    assert split(SIZES, 2, "20,8", costs(SIZES, 8, 1024, False)) == [20, 8]


@pytest.mark.parametrize(
    "model, micro, checkpointing, pieces, work, within",
    [  # ms of a micro-batch on each stage of 1F1B or DualPipeV; within: more for unsteady steps
        ("qwen3-0.6b", 8, False, [18, 10], (38.3, 35.3), 0.03),
        ("qwen3-0.6b", 8, False, [9, 9, 9, 1], (35.5, 36.6), 0.03),
        ("qwen3-0.6b", 8, True, [17, 11], (45.4, 43.1), 0.03),
        ("qwen3-0.6b", 8, True, [9, 8, 8, 3], (48.9, 40.8), 0.08),
        ("qwen3-8b", 2, False, [20, 16], (98.0, 90.3), 0.03),
        ("qwen3-8b", 2, False, [10, 10, 10, 6], (94.3, 94.5), 0.03),
    ],
)
def test_costs_are_those_measured(model, micro, checkpointing, pieces, work, within):
    """On two H200 (h200-x2/teff.jsonl, speed.jsonl): step_ms without exposed communication."""
    config = load_config(ROOT / "models" / model, 1024)
    first, blocks, last = costs(sizes_of(config), micro, 1024, checkpointing)
    begun = list(itertools.accumulate(pieces, initial=0))
    each = [sum(blocks[a:b]) for a, b in itertools.pairwise(begun)]
    each[0] += first
    each[-1] += last
    stages = each if len(each) == 2 else [each[0] + each[3], each[1] + each[2]]
    assert stages[0] / stages[1] == pytest.approx(work[0] / work[1], rel=within)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_balanced_split_is_the_best_there_is(stages, checkpointing):
    embedding, blocks, head = costs(SIZES, 8, 1024, checkpointing)
    block = blocks[0]

    def dearest(counts):
        each = [c * block for c in counts]
        each[0] += embedding
        each[-1] += head
        return max(each)

    every = (c for c in itertools.product(range(1, 29), repeat=stages) if sum(c) == 28)
    chosen = split(SIZES, stages, "balanced", costs(SIZES, 8, 1024, checkpointing))
    assert dearest(chosen) == min(dearest(c) for c in every)


def test_splits_that_do_not_fit():
    for stages, partition, message in (
        (7, "balanced", "--stages: the model has 6 blocks, too few for 7 pieces"),
        (2, "3,4", "sum of 6, the model's"),
        (2, "6,0", "each at least 1"),
        (2, "2,2,2", "give 2 counts"),
    ):
        with pytest.raises(UserError, match=message):
            sizes = sizes_of(load_config(TINY, 1024))
            split(sizes, stages, partition, costs(sizes, 4, 1024, False))


def test_bounds_and_their_description():
    lm = skeleton(QWEN, "math")
    for counts, unit, bounds in (
        ([18, 10], 1, [0, 19, 31]),  # embedding + 18 blocks | 10 blocks + norm + head
        ([18, 10], 0, [0, 6, 11]),  # in units of 4, 4, 4, 3, 3 | 4, 3, 3
        ([28], 1, [0, 31]),
        ([10, 9, 9], 3, [0, 5, 8, 13]),
    ):
        sizes = [unit_sizes(QWEN, count, unit) for count in counts]
        layers, made = layer_specs(lm.config, None, sizes, [None] * len(counts), False, None)
        assert made == bounds and len(layers) == bounds[-1]
    said = describe_split([14, 14], [0, 1], costs(SIZES, 8, 1024, False))
    assert "stage 0: 14 blocks 41% of the work" in said
    assert "stage 1: 14 blocks + head 59% of the work; the largest share is 1.19 x the mean" in said


def test_an_old_deepspeed_is_refused():
    for version in ("0.17.1", "0.19.2"):
        with pytest.raises(UserError, match=f"DeepSpeed {version}.*gradients wrongly"):
            deepspeed_base.check_version(version)
    deepspeed_base.check_version("0.19.3")
    deepspeed_base.check_version("0.20.0")


def test_a_patch_point_that_is_gone_is_an_error():
    with pytest.raises(UserError, match="has no _exec_magic any more.*deepspeed==0.19.8"):
        ds_patches.need({}, "_exec_magic")


def test_deepspeeds_gathers_and_reductions_are_timed(alone, monkeypatch):
    """It keeps what torch.distributed has when it begins; the timer wraps that later."""
    comm, device = ds_patches.deepspeed.comm.comm, torch.device("cpu")
    monkeypatch.setattr(comm, "cdb", None)  # this process has begun nothing, also afterwards
    ds_patches.join_group(device)
    timer = CommTimer(device, 0, 2)
    timer.install()
    comm.all_gather_into_tensor(torch.zeros(4), torch.ones(4))
    comm.reduce_scatter_tensor(torch.zeros(4), torch.ones(4))
    timer.remove()
    timed = [op[0][0] for op in timer.take()[0]]
    assert timed == ["all_gather_into_tensor", "reduce_scatter_tensor"]


FLAGS = SimpleNamespace(micro_batch_size=3, grad_accum_steps=5, max_grad_norm=0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_engine_config(dtype):
    switches = ds_engine.pipeline_switches(str(ROOT / "pp/ds_pp_2gpus.json"))
    config = ds_engine.pipeline_config(switches, FLAGS, dtype)
    assert config["zero_optimization"]["stage"] == 1
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["gradient_accumulation_steps"] == 5
    assert config["gradient_clipping"] == 0.7
    assert config["communication_data_type"] == "fp32"
    sums = None if dtype == torch.float32 else {"grad_accum_dtype": "fp32"}
    assert config.get("data_types") == sums
    assert ("bf16" in config, "fp16" in config) == (dtype == torch.bfloat16, dtype == torch.float16)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_zeros_engine_config(stage, compiled):
    """Stage 3 would overlap by default, and its linear layer can't be compiled."""
    switches = zero_engine.zero_switches(str(ROOT / f"zero/ds_zero{stage}.json"))
    compute = SimpleNamespace(dtype=torch.bfloat16, compile=compiled)
    config = zero_engine.zero_config(switches, FLAGS, compute)
    zero = deepspeed_base.DeepSpeedZeroConfig(**config["zero_optimization"])
    assert zero.stage == stage and zero.overlap_comm is False
    assert zero.memory_efficient_linear != (stage == 3 and compiled)
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert config["train_micro_batch_size_per_gpu"] == 3 and "bf16" in config
    assert "overlap_comm" not in switches["zero_optimization"]  # left as they are


def test_switches_are_as_deepspeed_reads_them(tmp_path):
    given = {"stage": 2.0, "reduce_bucket_size": "1000", "overlap_comm": "no"}
    given["offload_optimizer"] = {"device": "cpu", "pin_memory": "yes"}
    (tmp_path / "x.json").write_text(json.dumps({"zero_optimization": given}))
    read = zero_engine.zero_switches(str(tmp_path / "x.json"))["zero_optimization"]
    offload = {"device": "cpu", "pin_memory": True}
    assert read == {
        "stage": 2, "reduce_bucket_size": 1000, "overlap_comm": False, "offload_optimizer": offload
    }  # fmt: skip


def test_fp16_on_a_gpu_where_deepspeed_has_none(monkeypatch):
    gpu = SimpleNamespace(device_name=lambda: "cuda", is_fp16_supported=lambda: False)
    monkeypatch.setattr(deepspeed_base, "get_accelerator", lambda: gpu)
    with pytest.raises(UserError, match="--dtype fp16"):
        ds_engine.pipeline_config({}, FLAGS, torch.float16)


WAYS = {
    "fsdp": {"fsdp": [], "host": ["--optimizer_on_host"]},
    "pp": {"pp": []},
    "zero": ZERO,
    "fsdp_pp": {"fpp": [], "twice": ["--schedule", "interleaved", "--grad_accum_steps", "2"]},
}


BOTH = ("fp32", "bf16")


@pytest.mark.parametrize("kind, dtypes", [
    ("fsdp", BOTH), ("pp", BOTH), ("zero", ("bf16",)), slow("zero", ("fp32",)), ("fsdp_pp", BOTH),
])  # fmt: skip
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(kind, dtypes, tmp_path):
    """Rank 1's gradient is poisoned in step 2: no hang, said and logged, parameters untouched. In
    a pipeline it is the last stage, and with "twice" it is rank 0, the first."""
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("wants 2 GPUs")
    model, ways = smaller_model(tmp_path / "model"), WAYS[kind]
    flags = [
        "--model_name_or_path", str(model), "--seq_len", "64", "--micro_batch_size", "2",
        "--max_steps", "3", "--eval_json", "none", "--sample_tokens", "0", "--warmup_steps", "0",
        "--no_save",
    ]  # fmt: skip
    cases = {
        f"{way}-{dtype}": [*flags, "--dtype", dtype, *ways[way]]
        for way, dtype in itertools.product(ways, dtypes)
    }
    more = {name: {"poison": {"rank": int("twice" not in name), "step": 1}} for name in cases}
    done = train_cases(tmp_path, kind, 2, cases, watched=True, more=more)
    said = "step 2: the gradient norm is not finite, so all ranks skip it"
    assert done.stdout.count(said) == len(cases)
    for name in cases:
        lines = logged(tmp_path / name)
        assert [line["train/skipped"] for line in lines] == [False, True, False], name
        assert lines[1]["train/grad_norm"] is None
        for rank in range(2):
            before, after, last = torch.load(tmp_path / f"{name}.out.{rank}.pt")["after_step"]
            assert all(torch.equal(before[p], after[p]) for p in before), name
            assert any(not torch.equal(after[p], last[p]) for p in before), name


@pytest.mark.parametrize(
    "kind, ways",
    [("pp", ("pp",)), slow("zero", ("zero2", "zero3"))],
)
def test_a_checkpoint_before_the_first_good_step(kind, ways, tmp_path):
    """Step 1 is skipped, and saved; going on from it takes the same step 2."""
    model, cases = smaller_model(tmp_path / "model"), {}
    for way in ways:
        cases[way] = [
            "--model_name_or_path", str(model), "--seq_len", "64", "--micro_batch_size", "2",
            "--max_steps", "2", "--save_every", "1", "--eval_json", "none", "--sample_tokens", "0",
            "--warmup_steps", "0", "--dtype", "fp32", *WAYS[kind][way],
        ]  # fmt: skip
        first = str(tmp_path / way / "checkpoints/step_00000001")
        cases[f"{way}-again"] = [*cases[way], "--resume", first]
    more = dict.fromkeys(ways, {"poison": {"rank": 1, "step": 0}})
    done = train_cases(tmp_path, kind, 2, cases, watched=True, more=more)
    assert done.stdout.count("step 1: the gradient norm is not finite") == len(ways)
    for way in ways:
        run, again = (
            [record["train/grad_norm"] for record in logged(tmp_path / name) if record["step"] == 2]
            for name in (way, f"{way}-again")
        )
        assert run == again and len(run) == 1
        facts = (tmp_path / way / "checkpoints/step_00000002/trainer.json").read_text()
        assert json.loads(facts)["adam_steps"] == 1


def test_tied_copies_that_differ_are_noticed(tmp_path):
    flags = ["--model_name_or_path", str(TINY), "--seq_len", "64", "--max_steps", "1"]
    cases = {"run": [*flags, "--eval_json", "none"]}
    with pytest.raises(AssertionError, match="copies of the tied weight differ"):
        train_cases(tmp_path, "pp", 2, cases, watched=True, more={"run": {"untie": True}})
