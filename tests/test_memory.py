"""The memory expected, against the peaks measured on GPUs that are kept under bench/results, and
what is decided and printed by it."""

import dataclasses
import functools
import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, args_with
from test_attention import MI100, MI210, MI300
from test_fsdp_pp import most_held
from transformers import DeepseekV3Config, LlamaConfig, Qwen2MoeConfig, Qwen3MoeConfig

from bench.presets import name_of
from bench.run import PEERS
from fsdp import activations_on_host, host_adamw, pieces, powersgd
from fsdp.by_memory import choose_spread, refuse_replicas
from fsdp_pp import orders
from llm_demo import memory
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.machine import device
from llm_demo.machine.device import DTYPES
from llm_demo.memory import CONTEXT, GB, PROCESS, UNUSED, Peak, Settings, peaks, settings_of
from llm_demo.model.adapters import choose_lora
from llm_demo.model.costs import sizes_of
from llm_demo.model.source import load_config
from llm_demo.run import choices
from llm_demo.run.choices import Compute

FILES = sorted(ROOT.glob("bench/results/h[12]00*/*.jsonl"))  # a CPU's rows have no device memory
DOCUMENTS = np.random.default_rng(0).lognormal(5.0, 0.35, 1638).astype(int)  # as bench.run's
# of rows measured before these existed; "replicas" then meant what is data_parallel now
BEFORE = {"optimizer_on_host": False, "psgd_rank": 0}


def measured():
    """The rows of ours."""
    lines = itertools.chain(*(file.read_text().splitlines() for file in FILES))
    for result in map(json.loads, lines):
        ours = result["status"] == "ok" and result["row"]["engine"] not in PEERS
        if ours and "torch_1f1b" not in result["row"]["flags"]:  # that schedule has gone
            yield result


@functools.cache
def config_of(model, seq_len):
    return load_config(ROOT / model, seq_len)


def switches_of(file):
    return json.loads((ROOT / file).read_text())["zero_optimization"]


def settings_of_row(result) -> Settings:
    row, given = result["row"], result["config"]
    args = args_with(**{**BEFORE, "data_parallel": given.get("replicas"), **given})
    config, full = config_of(row["model"], args.seq_len), row["data"] == "full"
    lengths = [args.seq_len] if full else DOCUMENTS
    train = SimpleNamespace(
        seq_len=args.seq_len, documents=SimpleNamespace(lengths=np.array(lengths))
    )
    compute = Compute(DTYPES[args.dtype], args.attn_impl, args.compile, rule="fla")
    chosen = config.num_hidden_layers if args.seq_len > 65_536 and row["data"] != "packed" else 0
    kept = given.get("attention_kept", chosen)
    compute = compute._replace(attention_kept=kept)
    if given.get("lora_rank"):
        compute = compute._replace(lora=choose_lora(args, config, {}))
    layout = {"replicas": "1", "ranks": args.data_parallel}
    if row["engine"] == "fsdp":
        ranks = args.data_parallel * args.sequence_parallel * args.tensor_parallel
        copies = getattr(args, "replicas", None) == "all"
        layout = {"ranks": 1 if copies else ranks, "sharded": bool(args.fsdp)}
        layout["replicas"] = "all" if copies else "1"
        if not result["summary"].get("reserved_gb"):  # resharding did not sum each micro-batch
            layout["replicas"] = "all"
    elif row["engine"] == "fsdp_pp":
        layout["sharded"] = args.data_parallel > 1
    else:
        layout["zero"] = switches_of(args.deepspeed_config)
    if row["engine"] in ("pp", "fsdp_pp"):
        layout["counts"] = tuple(map(int, args.partition.split(",")))
    return settings_of(row["engine"], args, compute, train, **layout)


def error(result) -> float:
    """By how much the fullest rank is expected to need more than it did."""
    row, summary, settings = result["row"], result["summary"], settings_of_row(result)
    sizes = sizes_of(config_of(row["model"], row["seq_len"]))
    took, beside = summary.get("reserved_gb"), {CONTEXT}
    if not took:  # as rows were recorded before
        took, beside = summary["peak_mem_gb"], {CONTEXT, UNUSED}
    expected = []
    for peak in peaks(sizes, settings):
        expected.append(sum(gb for name, gb in peak.parts.items() if name not in beside))
        if peak.parts["loss"] and "device_memory_gb" not in result["config"]:
            # logits and their gradient were two tensors then
            expected[-1] += min(4096, settings.tokens) * sizes.vocabulary * settings.size / GB
    return max(expected) / max(took) - 1


def test_every_measured_row_is_within_the_floors():
    errors = []
    for result in measured():
        row, wrong = result["row"], error(result)
        assert wrong >= -0.08, name_of(row)
        mixture = "moe" in config_of(row["model"], row["seq_len"]).model_type
        assert wrong <= (0.25 if mixture else 0.12), name_of(row)
        errors.append(abs(wrong))
    assert len(errors) >= 330 and np.mean(np.array(errors) <= 0.15) >= 0.9


def test_host_memory_and_attention_kept_are_as_measured():
    """Host memory within a tenth; as many blocks keep their attention as was recorded."""
    offloaded = kept = 0
    for result in measured():
        row, recorded = result["row"], result["config"].get("attention_kept")
        on_host = re.search("on_host|offload", row["flags"])
        if not (on_host or recorded):
            continue
        sizes = sizes_of(config_of(row["model"], row["seq_len"]))
        settings = settings_of_row(result)
        if on_host:
            expected = sum(peak.host for peak in peaks(sizes, settings))
            assert expected == pytest.approx(sum(result["summary"]["peak_host_gb"]), rel=0.1)
            offloaded += 1
        if recorded:
            limit = result["config"]["device_memory_gb"]
            card = 139.8 if "H200" in result["env"]["device"] else 79.2
            capacity = limit + memory.CONTEXT_GB if limit else card
            settings = dataclasses.replace(settings, attention_kept=0)
            assert memory.attention_kept(sizes, settings, 1 << 17, capacity)[0] == recorded
            kept += 1
    assert offloaded > 20 and kept > 8


# ---------------------------------------------------------------- terms, by hand

EIGHT = load_config(ROOT / "models/qwen3-8b", 1024)
SIZES = sizes_of(EIGHT)
TOTAL = 8_190_427_136  # without norms
END = 151_936 * 4096
FULL = SimpleNamespace(
    seq_len=1024, longest=1024, documents=SimpleNamespace(lengths=np.array([1024]))
)
BF16 = Compute(torch.bfloat16, "sdpa", compile=True)


def parts_of(engine="fsdp", sizes=SIZES, **given):
    """Bytes by part, of rank 0."""
    (peak, *_) = peaks(sizes, Settings(engine=engine, **{"ranks": 2, **given}))
    return {name: gb * GB for name, gb in peak.parts.items()}


def test_moments_in_bf16_take_half():
    for engine, more in (("fsdp", {}), ("fsdp_pp", {"stages": 2, "counts": (18, 18)})):
        wide, low = (parts_of(engine, optim_state=kind, **more) for kind in ("fp32", "bf16"))
        assert low["optimizer"] == pytest.approx(wide["optimizer"] / 2)
    hosts = []
    for kind in ("fp32", "bf16"):
        settings = Settings(engine="fsdp", ranks=2, optimizer_on_host=True, optim_state=kind)
        hosts.append((peaks(SIZES, settings)[0].host - PROCESS) * GB)
    assert hosts == pytest.approx([TOTAL / 2 * 12, TOTAL / 2 * 8])


def test_constants_are_those_of_the_modules_that_they_describe():
    assert memory.INPUTS_KEPT == activations_on_host.STAY and memory.MLP_PIECE == pieces.PIECE
    assert memory.STREAMED == host_adamw.SLOTS * host_adamw.SLICE
    assert memory.LOW_RANK_BATCH == powersgd.TOGETHER


def test_a_frozen_8b_takes_two_bytes_a_weight():
    args = args_with(lora_rank=16, lora_alpha=32.0, lora_dropout=0.0, lora_targets="all-linear",
                     base_bits=16)  # fmt: skip
    lora = choose_lora(args, EIGHT, {})
    d, inner, kv = 4096, 12288, 1024  # by hand: q, k, v, o; gate, up, down
    widths = [2 * d, d + kv, d + kv, 2 * d, d + inner, d + inner, d + inner]
    own = lora.parameters
    assert own == 36 * 16 * sum(widths) == 43_646_976
    given = {"lora": lora, "micro_batch_size": 4, "use_activation_checkpointing": True}
    parts = parts_of(ranks=1, sharded=False, **given)
    assert parts["weights"] == pytest.approx(2 * TOTAL + (2 + 4) * own)
    assert parts["optimizer"] == pytest.approx(8 * own)
    assert parts["loss"] == 0  # a chunk's logits take less than a block's backward
    assert sum(parts.values()) < 22 * GB
    shards = parts_of(**given)
    assert shards["weights"] == pytest.approx(TOTAL + 2 * own + 2 * (TOTAL + own + END))


def test_replicas_of_a_pipeline_share_masters_and_moments():
    """Three blocks of 393,216 matrix weights a stage, and the tied embedding."""
    sizes = sizes_of(load_config(ROOT / "models/qwen3-tiny", 128))
    params = 3 * 393_216 + 4096 * 192
    for replicas in (1, 2, 4):
        settings = Settings(engine="pp", ranks=replicas, stages=2, counts=(3, 3), seq_len=128,
                            micro_batch_size=64, copies=True)  # fmt: skip
        ranks = peaks(sizes, settings)
        assert len(ranks) == 2 * replicas
        for peak in ranks:
            each = [peak.parts[k] * GB / params for k in ("weights", "optimizer", "gradients")]
            # bf16 weights here and fp32 ones shared, two fp32 moments shared, fp32 sums here
            assert each == pytest.approx([2 + 4 / replicas, 8 / replicas, 4])
            assert peak.copies * GB == pytest.approx(12 * params / replicas)


def test_shares_of_rows_and_matrices_and_experts():
    given = {"ranks": 4, "micro_batch_size": 4, "seq_len": 8192}
    whole, half = (parts_of(sequence_parallel=n, **given) for n in (1, 2))
    assert half["weights"] == whole["weights"]
    assert 0.5 < half["activations"] / whole["activations"] < 0.7
    cut = sum(block.cut for block in SIZES.blocks)
    shares = parts_of(tensor_parallel=2, **given)
    assert whole["weights"] - shares["weights"] == pytest.approx(cut / 2 * 2)
    moe = sizes_of(load_config(ROOT / "models/qwen3-30b-a3b-6l", 4096))
    routed = sum(block.routed for block in moe.blocks)
    one, two = (parts_of(sizes=moe, expert_parallel=n, **given)["weights"] for n in (1, 2))
    assert one - two == pytest.approx(routed / 2 * 2)


CKPT = {"use_activation_checkpointing": True}
SAVING = {**CKPT, "reshard_after_forward": True, "optimizer_on_host": True}
STAGES = {"engine": "fsdp_pp", "stages": 4, "schedule": "interleaved", "counts": (5,) * 8}


@pytest.mark.parametrize("model, gib, given", [
    ("qwen3-30b-a3b", 41.6, dict(SAVING, ranks=8, expert_parallel=8, micro_batch_size=8)),
    ("qwen3.5-35b-a3b-4l", 38.1, dict(SAVING, ranks=4, expert_parallel=4, micro_batch_size=16)),
    ("qwen3-14b", 119.8, dict(CKPT, ranks=1, sharded=False, micro_batch_size=16,
                              grad_accum_steps=4, **STAGES)),
    ("qwen3.5-4b-like", 486.7, dict(engine="pp", ranks=1, stages=2, counts=(19, 13),
                                    activation_memory_budget=0.6, micro_batch_size=64)),
    ("qwen3-8b", 146.5, dict(CKPT, ranks=1, sharded=False, micro_batch_size=8, dtype="fp32",
                             compile=False)),
])  # fmt: skip
def test_settings_that_were_not_measured(model, gib, given):
    """As counted once, with each block's saved tensors: what experts exchange, what stages send and
    what the kernel of a delta rule allocates take much here."""
    settings = Settings(**{"engine": "fsdp", "seq_len": 4096, **given})
    sizes = sizes_of(load_config(ROOT / "models" / model, 4096))
    assert memory.fullest(sizes, settings).total == pytest.approx(gib, rel=0.06)


SMALL = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=4,
    num_key_value_heads=2, num_hidden_layers=2,
)  # fmt: skip
LATENT = DeepseekV3Config(  # a dense block and one with experts
    vocab_size=64, hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
    num_experts_per_tok=4, n_group=2, topk_group=1, kv_lora_rank=96, q_lora_rank=160,
    qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=96, first_k_dense_replace=1,
)  # fmt: skip
MIXED = dict(SMALL, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=128)


@pytest.mark.parametrize(
    "config, compiled, plain",
    [
        (LlamaConfig(head_dim=64, **SMALL), 3328, 4932),
        (EIGHT, 68_608, 107_732),
        (Qwen3MoeConfig(head_dim=64, **MIXED), 4736, 7970),
        (Qwen2MoeConfig(shared_expert_intermediate_size=384, **MIXED), 5760, 8959),
        (LATENT, 6688, 10_002),
        (load_config(ROOT / "models/qwen3.5-4b-like", 1024), 66_560, 156_966),
    ],
    ids=["llama", "qwen3", "qwen3_moe", "qwen2_moe", "deepseek", "qwen3_5"],
)  # fmt: skip
def test_blocks_keep_about_what_autograd_saves(config, compiled, plain):
    """Numbers of 16 bits per token, as counted once by hooks on saved tensors of a block."""
    sizes = sizes_of(config)
    block = max(sizes.blocks, key=lambda block: block.chosen)
    for counted, compile in ((compiled, True), (plain, False)):
        settings = Settings(engine="fsdp", ranks=1, compile=compile)
        assert 0.95 < memory.saved_bytes(block, sizes, settings) / 2 / counted < 1.25


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "v", "dualpipev"])
def test_what_a_schedule_holds(schedule):
    from deepspeed.runtime.pipe.schedule import (
        BackwardPass,
        DualPipeVSchedule,
        ForwardPass,
    )

    for stages, rounds in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 8)):
        for accum in {stages * rounds, stages * 2 * rounds}:
            for stage in range(stages):
                settings = Settings(engine="pp", ranks=1, stages=stages, schedule=schedule,
                                    grad_accum_steps=accum)  # fmt: skip
                found = memory.in_flight(settings, stage)
                if schedule != "dualpipev":
                    expected = most_held(orders.order(schedule, stages, stage, accum))
                    assert {k: v for k, v in found.items() if v} == expected
                    continue
                if accum < 2 * stages:
                    continue
                now = most = np.zeros(2, int)
                for step in DualPipeVSchedule(accum, stages, stage).steps():
                    for work in step:
                        if type(work) in (ForwardPass, BackwardPass):
                            now = now.copy()
                            now[work.phase] += 1 if type(work) is ForwardPass else -1
                            most = now if now.sum() > most.sum() else most
                assert [*found.values()] == most.tolist()


# ---------------------------------------------------------------- what is decided


def flags(**more):
    """Flags of every script."""
    given = dict(
        micro_batch_size=1, grad_accum_steps=1, save=True, resume=None,
        device_memory_gb=80.0, blocks_per_unit=0, use_activation_checkpointing=True,
        activation_memory_budget=1.0, reshard_after_forward=False, optimizer_on_host=False,
        psgd_rank=0, replicas="1", expert_parallel=None,
    )  # fmt: skip
    return args_with(**given | more)


def test_experts_are_spread_over_the_fewest_ranks_that_fit(monkeypatch):
    config = load_config(ROOT / "models/qwen3-30b-a3b", 1024)
    world, said = World(0, 8, 0, torch.device("cpu")), []
    monkeypatch.setattr("fsdp.by_memory.from_rank0", lambda world, function: function())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    log = SimpleNamespace(say=said.append, resolved=lambda **more: None)
    for gb, over, why in ((180, 1, "they fit"), (100, 2, "fewest"), (9, 8, "least")):
        args = flags(device_memory_gb=float(gb), reshard_after_forward=False)
        assert choose_spread(args, config, BF16, FULL, world, log) == over
        assert why in said.pop()


def test_copies_that_do_not_fit_are_refused(record_property):
    record_property("bad inputs", 1)
    config = load_config(ROOT / "models/qwen3-8b", 1024)
    job = flags(replicas="all"), config, BF16, FULL
    refuse_replicas(*job, 2, 2)  # two GPUs to a copy
    with pytest.raises(UserError, match=r"copy on 1 GPU\(s\) needs .* fewer replicas than 4"):
        refuse_replicas(*job, 1, 4)


def test_when_attention_is_kept():
    rows = 131_072
    settings = Settings(engine="fsdp", ranks=2, seq_len=rows, use_activation_checkpointing=True,
                        reshard_after_forward=True)  # fmt: skip

    def choose(capacity, longest=rows, **more):
        changed = dataclasses.replace(settings, **more)
        return memory.attention_kept(SIZES, changed, longest, capacity)

    assert choose(1000)[0] == 36
    needed = memory.fullest(SIZES, dataclasses.replace(settings, attention_kept=36)).total
    each = rows * memory.attention_bytes(SIZES, settings) / GB * (1 + memory.SCATTERED)
    limit = (needed + 0.1) / memory.USABLE
    assert choose(limit)[0] == 36
    assert choose(limit - 9.5 * each / memory.USABLE)[0] == 26
    assert choose(20)[0] == 0
    assert choose(1000, keys=8.0) == (0, "attention is no fused kernel here")
    assert choose(1000, longest=8191) == (0, "documents are short")
    assert choose(0) == (0, "the memory of this device is not known")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_attention_does_not_depend_on_varlen_attn(dtype, monkeypatch):
    """PyTorch 2.9 has none, and it takes no fp32, but its SDPA is fused on these cards."""
    monkeypatch.setattr(choices.importlib.util, "find_spec", lambda name: None)
    train = SimpleNamespace(seq_len=1024, documents=SimpleNamespace(lengths=np.full(8, 1024)))
    for card, keys in ((MI210, 0), (MI300, 0), (MI100, 1024)):
        monkeypatch.setitem(device._planned, "card", card)
        assert memory.keys_kept(Compute(dtype, "bucketed", False), train) == keys


# ---------------------------------------------------------------- what is printed and checked


@pytest.mark.parametrize("free, more, said", [
    (100, {}, None),
    (50, {}, "needs 20.0 GiB for what is offloaded and 40.0 GiB while a checkpoint is saved or "
     "read, and 50.0 GiB are free: add --no_save, or use more nodes"),
    (50, {"resume": "auto"}, "free: use more nodes"),
    (10, {}, "free: use more nodes"),
])  # fmt: skip
def test_the_memory_of_each_node_is_checked(free, more, said, monkeypatch):
    """Two nodes of two ranks. The processes are there already. Not saving is a way out only of
    copies that do not fit."""
    here, other = Peak({"weights": 1.0}, PROCESS + 10, 20), Peak({"weights": 1.0}, 0, 0)
    world, lines = World(2, 4, 0, torch.device("cpu")), []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(memory, "once_per_node", lambda world, check: check())
    monkeypatch.setattr(memory, "free_host_memory", lambda: free * GB)
    ranks = [other, other, here, here]
    if said:
        with pytest.raises(UserError, match=said):
            memory.check_host(ranks, flags(**more), world, lines.append, "use more nodes")
    else:
        memory.check_host(ranks, flags(**more), world, lines.append, "use more nodes")
        assert "20.0 GiB for what is offloaded and 40.0 GiB while" in lines[0]
    text = memory.report([here._replace(parts={**here.parts, UNUSED: 0, CONTEXT: 0})], flags())
    assert "12.1 GiB for what is offloaded and 20.0 GiB while a checkpoint" in text
