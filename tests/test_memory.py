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
from test_fsdp_pp import most_held

from bench.presets import name_of
from bench.run import PEERS
from fsdp import activations_on_host, host_adamw, pieces, powersgd
from fsdp.by_memory import choose_spread, refuse_replicas
from fsdp_pp import orders
from llm_demo import memory, step_time
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.machine.device import DTYPES
from llm_demo.memory import CONTEXT, GB, PROCESS, UNUSED, Peak, Settings, peaks, settings_of
from llm_demo.model.adapters import choose_lora
from llm_demo.model.costs import sizes_of
from llm_demo.model.source import load_config
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


@functools.cache
def sizes_at(model, seq_len):
    return sizes_of(config_of(model, seq_len))


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
        # a number was data_parallel once
        several = str(args.data_parallel) if args.data_parallel > 1 else "all"
        copies = given.get("replicas") in ("all", several)
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


def embedding_on_device(result, sizes, settings) -> float:
    """GiB of an embedding that would be in host memory now."""
    if "embedding_on_host" in result["config"] or not memory.embeds_on_host(sizes, settings):
        return 0
    return sizes.embedding * settings.size / GB


def error(result) -> float:
    """By how much the fullest rank is expected to need more than it did."""
    row, summary, settings = result["row"], result["summary"], settings_of_row(result)
    sizes = sizes_at(row["model"], row["seq_len"])
    took, beside = summary.get("reserved_gb"), {CONTEXT}
    if not took:  # as rows were recorded before
        took, beside = summary["peak_mem_gb"], {CONTEXT, UNUSED}
    expected = []
    for peak in peaks(sizes, settings):
        expected.append(sum(gb for name, gb in peak.parts.items() if name not in beside))
        of_embedding = embedding_on_device(result, sizes, settings)
        if of_embedding:
            # then a layer's result and its adapter's were kept: of queries, attention, gradients
            expected[-1] += of_embedding + 3 * settings.tokens * sizes.hidden * settings.size / GB
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
        sizes = sizes_at(row["model"], row["seq_len"])
        settings = settings_of_row(result)
        if on_host:
            expected = sum(peak.host for peak in peaks(sizes, settings))
            expected -= embedding_on_device(result, sizes, settings)
            assert expected == pytest.approx(sum(result["summary"]["peak_host_gb"]), rel=0.1)
            offloaded += 1
        if recorded and not settings.lora:  # whose blocks took more then
            limit = result["config"]["device_memory_gb"]
            card = 139.8 if "H200" in result["env"]["device"] else 79.2
            capacity = limit + memory.CONTEXT_GB if limit else card
            settings = dataclasses.replace(settings, attention_kept=0)
            assert memory.attention_kept(sizes, settings, 1 << 17, capacity)[0] == recorded
            kept += 1
    assert offloaded > 20 and kept > 5


# ---------------------------------------------------------------- terms, by hand

FULL = SimpleNamespace(
    seq_len=1024, longest=1024, documents=SimpleNamespace(lengths=np.array([1024]))
)
BF16 = Compute(torch.bfloat16, "sdpa", compile=True)


def test_constants_are_those_of_the_modules_that_they_describe():
    assert memory.INPUTS_KEPT == activations_on_host.STAY
    assert (memory.MLP_PIECE, memory.MLP_LONG) == (pieces.PIECE, pieces.LONG)
    assert memory.STREAMED == host_adamw.SLOTS * host_adamw.SLICE
    assert memory.LOW_RANK_BATCH == powersgd.TOGETHER


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


def test_a_block_keeps_about_what_autograd_saves():
    """Numbers of 16 bits per token, as counted once by hooks on saved tensors of a block of 8B."""
    sizes = sizes_of(load_config(ROOT / "models/qwen3-8b", 1024))
    for compile, counted in ((True, 68_608), (False, 107_732)):
        settings = Settings(engine="fsdp", ranks=1, compile=compile)
        saved = memory.saved_bytes(sizes.blocks[0], sizes, settings) / 2
        assert 0.95 < saved / counted < 1.25


def test_a_block_with_adapters_takes_what_the_compiler_plans():
    """GiB of the backward of a recomputed block of 8B with adapters of rank 16, as counted once in
    the code that PyTorch 2.13 makes for an H100."""
    config = load_config(ROOT / "models/qwen3-8b", 1024)
    given = dict(lora_rank=16, lora_alpha=32.0, lora_targets="all-linear", base_bits=4)
    lora = choose_lora(args_with(**given), config, {})
    sizes, of_run = sizes_of(config), {**CKPT, "engine": "fsdp", "ranks": 1, "lora": lora}
    for tokens, mib in ((4096, 860), (102_400, 9775)):
        settings = Settings(**of_run, seq_len=tokens)
        takes = tokens * memory.passing_bytes(sizes.blocks[0], sizes, settings) / 2**20
        assert takes == pytest.approx(mib, rel=0.03)


def test_a_frozen_embedding_is_in_host_memory_with_activations():
    """Of one process, unless it is the head too."""
    config = load_config(ROOT / "models/qwen3-8b", 1024)
    lora = choose_lora(args_with(lora_rank=16, lora_alpha=32.0, lora_targets="q_proj"), config, {})
    one = Settings(engine="fsdp", ranks=1, sharded=False, lora=lora, **CKPT)
    host, sizes = dataclasses.replace(one, activations_on_host=True), sizes_of(config)
    # an adapter's weight is half of its master
    weights = (2 * sizes.parameters + 4 * lora.parameters) / GB
    assert peaks(sizes, one)[0].parts["weights"] == pytest.approx(weights)
    cases = {
        "untied": (sizes, {}),
        "tied": (sizes._replace(tied=True), {}),
        "sharded": (sizes, {"sharded": True}),
    }
    moved = {}
    for name, (of, other) in cases.items():
        device, kept = (peaks(of, dataclasses.replace(s, **other))[0] for s in (one, host))
        moved[name] = device.parts["weights"] - kept.parts["weights"]
    assert moved == {"untied": pytest.approx(151_936 * 4096 * 2 / GB), "tied": 0, "sharded": 0}


def test_a_stage_has_its_own_frozen_blocks_and_adapters():
    """Together the stages have what one process has; no tied head's gradient is sent."""
    config = load_config(ROOT / "models/qwen3-8b", 1024)
    sizes, given = sizes_of(config), dict(lora_rank=16, lora_alpha=32.0, lora_targets="all-linear")
    bits16, bits4 = (choose_lora(args_with(**given, base_bits=n), config, {}) for n in (16, 4))
    one = Settings(engine="fsdp", ranks=1, sharded=False, lora=bits16, grad_accum_steps=4)
    two = dataclasses.replace(one, engine="fsdp_pp", stages=2, counts=(20, 16))
    whole, stages = peaks(sizes, one)[0].parts, [peak.parts for peak in peaks(sizes, two)]
    for part in ("weights", "optimizer", "gradients"):
        assert sum(parts[part] for parts in stages) == pytest.approx(whole[part]), part
        assert stages[0][part] > stages[1][part] > 0.4 * whole[part], part
    tied, times = sizes._replace(tied=True), []
    for of in (sizes, tied):
        times.append(step_time.step_seconds(of, two, flops=1e14, bandwidth=1e10))
    assert times[0] == times[1]
    shared = dataclasses.replace(one, ranks=2, sharded=True)
    narrow = step_time.shared_bytes(sizes, dataclasses.replace(shared, lora=bits4))
    assert narrow < 0.45 * step_time.shared_bytes(sizes, shared)  # both ends stay in 16 bits


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "v"])
def test_what_a_schedule_holds(schedule):
    for stages, rounds in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 8)):
        for stage in range(stages):
            settings = Settings(engine="pp", ranks=1, stages=stages, schedule=schedule,
                                grad_accum_steps=2 * stages * rounds)  # fmt: skip
            expected = most_held(orders.order(schedule, stages, stage, 2 * stages * rounds))
            assert {k: v for k, v in memory.in_flight(settings, stage).items() if v} == expected


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


def test_copies_that_do_not_fit_are_refused():
    config = load_config(ROOT / "models/qwen3-8b", 1024)
    job = flags(replicas="all"), config, BF16, FULL
    refuse_replicas(*job, 2, 2)  # two GPUs to a copy
    with pytest.raises(UserError, match=r"copy on 1 GPU\(s\) needs .* fewer replicas than 4"):
        refuse_replicas(*job, 1, 4)


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
