"""The memory expected, against the peaks measured on GPUs that are kept under bench/results."""

import copy
import functools
import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, ZERO, args_with, run
from test_attention import MI100, MI210, MI300, latent
from transformers import (
    LlamaConfig,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from bench.presets import name_of
from bench.run import PEERS
from fsdp import estimate as fsdp
from fsdp_pp import estimate as fsdp_pp
from llm_demo import estimate as memory
from llm_demo.core import attention
from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import Blocks, allocate, skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.experts import Routers, blocks_with_experts
from llm_demo.core.lora import Lora, apply_lora
from llm_demo.core.mesh import World
from llm_demo.core.rows import position_ids
from llm_demo.machine.device import DTYPES
from llm_demo.model.adapters import choose_lora
from llm_demo.model.costs import Cost, parameters_of, unit_sizes
from llm_demo.model.source import load_config
from llm_demo.run import choices
from llm_demo.run.choices import Compute
from pp import estimate as pipeline
from zero import estimate as zero

FILES = sorted(ROOT.glob("bench/results/h[12]00*/*.jsonl"))  # a CPU's rows have no device memory
MEASURED = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]
assert len(MEASURED) >= 8

# of rows measured before these existed; "replicas" then meant what is data_parallel now
BEFORE = {"optimizer_on_host": False, "psgd_rank": 0, "copy_engines": False}
DOCUMENTS = np.random.default_rng(0).lognormal(5.0, 0.35, 1638).astype(int)  # as bench.run's


def held_by(row, config_of_run):
    """(what each rank of a measured row holds, what `peak` is asked with)."""
    before = {**BEFORE, "data_parallel": config_of_run.get("replicas")}
    args = args_with(**{**before, **config_of_run})
    lengths = [args.seq_len] if row["data"] == "full" else DOCUMENTS
    config = load_config(ROOT / row["model"], args.seq_len)
    compute = Compute(DTYPES[args.dtype], args.attn_impl, args.compile, rule="fla")
    if config_of_run.get("lora_rank"):
        compute = compute._replace(lora=choose_lora(args, config, {}))
    train = SimpleNamespace(
        seq_len=args.seq_len, single=row["data"] == "full", doc_start=np.cumsum([0, *lengths]),
        longest=65_536 if row["data"] == "mixed" else max(lengths),
    )  # fmt: skip
    job = args, config, compute, train
    if row["engine"] == "fsdp":
        ranks = args.data_parallel * args.sequence_parallel * args.tensor_parallel
        replicas = ranks if getattr(args, "replicas", 1) == "all" else 1
        kept = config_of_run.get("attention_kept", 0)
        if row["seq_len"] > 65_536 and "attention_kept" not in config_of_run:  # it was chosen
            args = args_with(**vars(args) | {"device_memory_gb": 140})
            kept, _ = fsdp.attention_kept(*job, ranks, args.fsdp, 1)
        job = args, config, compute._replace(attention_kept=kept), train
        return fsdp.held(*job, ranks // replicas, args.fsdp) * replicas, job
    if row["engine"] == "zero":
        return zero.held(*job, args.data_parallel, switches_of(args.deepspeed_config)), job
    counts = [int(c) for c in args.partition.split(",")]
    if row["engine"] == "fsdp_pp":
        return fsdp_pp.held(*job, args.data_parallel, counts), job
    bucket = switches_of(args.deepspeed_config)["reduce_bucket_size"]
    return pipeline.held(*job, args.data_parallel, counts, bucket), job


def peaks(ranks, job):
    return [memory.peak(held, *job) for held in ranks]


def earlier_loss_bytes(args, config, compute, train):
    """Of rows measured before the logits became their gradient in place: those without the flag
    --device_memory_gb, which is as old."""
    rows = min(memory.CHUNK_ROWS, args.micro_batch_size * train.seq_len)
    size = torch.finfo(compute.dtype).bits // 8
    plain = 4 if size == 4 else 4 + size
    logits = rows * config.vocab_size * (2 * size if compute.compile else plain)
    return logits + config.vocab_size * config.hidden_size * 4


@pytest.mark.parametrize("result", MEASURED, ids=lambda result: name_of(result["row"]))
def test_within_a_tenth_of_what_was_measured(result, monkeypatch):
    if result["status"] != "ok" or result["row"]["engine"] in PEERS:
        pytest.skip("no run of ours")
    if "torch_1f1b" in result["row"]["flags"]:
        pytest.skip("the schedule has gone")
    summary, config = result["summary"], result["config"]
    measured, beside = summary.get("reserved_gb"), {memory.CONTEXT}
    if not measured:  # as rows were recorded before
        measured, beside = summary["peak_mem_gb"], {memory.CONTEXT, memory.UNUSED}
    if "device_memory_gb" not in config:
        monkeypatch.setattr(memory, "loss_bytes", earlier_loss_bytes)
    if not result["summary"].get("reserved_gb"):  # before resharding summed each micro-batch
        monkeypatch.setattr(fsdp, "sums_each", lambda args: args.optimizer_on_host)
    held, job = held_by(result["row"], config)
    ranks = peaks(held, job)
    assert len(ranks) == len(measured)
    for parts, peak in zip(ranks, measured, strict=True):
        counted = sum(size for name, size in parts.items() if name not in beside)
        assert counted == pytest.approx(peak, rel=0.1)


ON_HOST = [r for r in MEASURED if re.search("on_host|offload", r["row"]["flags"])]
ON_HOST = [r for r in ON_HOST if r["status"] == "ok"]


@pytest.mark.parametrize("result", ON_HOST, ids=lambda result: name_of(result["row"]))
def test_host_memory_within_a_tenth(result):
    measured = sum(result["summary"]["peak_host_gb"])
    ranks, _ = held_by(result["row"], result["config"])
    assert sum(held.host for held in ranks) / 2**30 == pytest.approx(measured, rel=0.1)


def switches_of(file):
    return json.loads((ROOT / file).read_text())["zero_optimization"]


EIGHT = load_config(ROOT / "models/qwen3-8b", 1024)
TOTAL, FULL = parameters_of(EIGHT), SimpleNamespace(seq_len=1024, single=True, longest=1024)
BF16 = Compute(torch.bfloat16, "sdpa", compile=True)


def test_pinned_memory_is_rounded_up():
    n, switches = TOTAL / 2**30, switches_of("zero/ds_zero3_offload.json")
    pinned = 2 * zero.host_bytes(TOTAL / 2, 2, switches, 2) / 2**30
    for offload in (switches["offload_optimizer"], switches["offload_param"]):
        offload["pin_memory"] = False
    plain = 2 * zero.host_bytes(TOTAL / 2, 2, switches, 2) / 2**30
    assert plain == pytest.approx(24 * n + 2 * memory.PROCESS, rel=1e-3)
    # a rank's weights 8, gradients 16; masters, and gradients again, four times 4 and the rest 0.5
    pinned_by_hand = 2 * (8 + 16 + 2 * 16.5) + (2 + 8) * n + 2 * memory.PROCESS
    assert pinned == pytest.approx(pinned_by_hand, rel=1e-3)


def flags(**more):
    """Flags of every script."""
    given = dict(
        micro_batch_size=1, grad_accum_steps=4, stages=2, schedule="1f1b", save=True, save_every=0,
        resume=None, device_memory_gb=0, blocks_per_unit=0,
        use_activation_checkpointing=True, activation_memory_budget=1.0,
        reshard_after_forward=True, optimizer_on_host=False, psgd_rank=0, copy_engines=False,
        replicas="1",
    )  # fmt: skip
    return args_with(**given | more)


def test_host_memory_is_named(monkeypatch):
    monkeypatch.setattr(memory, "peak", lambda *_: {"weights": 1.0})
    for host, copies, said in (
        (2, 0, "host memory: 4.0 GiB for what is offloaded, for all ranks"),
        (0, 3, "host memory: 6.0 GiB while a checkpoint is saved or read, for all ranks"),
        (2, 3, "4.0 GiB for what is offloaded and 6.0 GiB while a checkpoint is saved or read, fo"),
        (0, 0, None),
    ):
        held = memory.Held(0, [], [], host=host * 2**30, copies=copies * 2**30)
        text = memory.report([held] * 2, flags(), None, None, None)
        assert said in text if said else "host memory" not in text


@pytest.mark.parametrize("more, fsdps, zeros, replicas, both", [
    ({}, 0, 1, 1, 0),
    ({"save_every": 5}, 1, 1, 1, 1),
    ({"save": False, "save_every": 5}, 0, 0, 0, 0),
    ({"save": False, "resume": "auto"}, 0, 1, 1, 0),
    ({"resume": "auto"}, 0, 1, 1, 0),
])  # fmt: skip
def test_copies_of_checkpoints(more, fsdps, zeros, replicas, both):
    """12 bytes per parameter. fsdps: and of `fsdp_pp`; replicas: of two of a pipeline; both: of a
    pipeline's two stages."""
    job = flags(**more), EIGHT, BF16, FULL
    switches = switches_of("zero/ds_zero2.json")
    for times, ranks in (
        (fsdps, fsdp.held(*job, 2, True)),
        (fsdps, fsdp_pp.held(*job, 2, [26, 10])),
        (zeros, zero.held(*job, 4, switches)),
        (replicas, pipeline.held(*job, 2, [26, 10])),
        (both, pipeline.held(*job, 1, [26, 10])),
    ):
        assert sum(held.copies for held in ranks) == pytest.approx(12 * TOTAL * times, rel=1e-3)
    lora = Lora(16, 32.0, 0.0, ("q_proj",), 1000, {})
    ranks = fsdp.held(job[0], EIGHT, BF16._replace(lora=lora), FULL, 2, True)
    assert sum(held.copies for held in ranks) == 12_000 * fsdps


def test_moments_in_bf16_take_half():
    """Of FSDP's, sharded and in one process, and of stages; on the host with masters a third less;
    and so do checkpoints' copies."""
    n = TOTAL / 2
    for more, bytes_of, whole in (
        ({}, "optimizer", 8), ({"optimizer_on_host": True}, "host", 12), ({}, "copies", 12)
    ):  # fmt: skip
        held = {}
        for state in ("fp32", "bf16"):
            job = flags(optim_state=state, save_every=1, **more), EIGHT, BF16, FULL
            ranks = [fsdp.held(*job, 2, True)[0], fsdp.held(*job, 1, False)[0]._asdict()]
            held[state] = getattr(ranks[0], bytes_of), ranks[1][bytes_of] / 2
            if not more:
                stages = fsdp_pp.held(*job, 1, [26, 10])
                held[state] += (sum(getattr(stage, bytes_of) for stage in stages) / 2,)
        assert len(held["fp32"]) == 2 + (not more)
        for wide, low in zip(held["fp32"], held["bf16"], strict=True):
            assert wide - low == pytest.approx(4 * n, rel=1e-3)
            assert wide == pytest.approx(whole * n, rel=0.05)


# name: (a node's ranks of all, whether something is offloaded, how to count what all ranks hold);
# two nodes of two ranks, or of three, which are the replicas of one of two stages
def zero_held(name):
    return lambda *job: zero.held(*job, 4, switches_of(f"zero/ds_zero2{name}.json"))


NODES = {
    "zero": ((0, 1), False, zero_held("")),
    "offload": ((2, 3), True, zero_held("_offload")),
    "first stage": ((0, 1, 2), False, lambda *job: pipeline.held(*job, 3, [26, 10])),
    "last stage": ((3, 4, 5), False, lambda *job: pipeline.held(*job, 3, [26, 10])),
}


@pytest.mark.parametrize("more, copies", [({}, 1), ({"save": 0}, 0), ({"resume": "auto"}, 1)])
@pytest.mark.parametrize("name", NODES)
def test_the_memory_of_each_node_is_checked(name, more, copies, monkeypatch):
    """What is offloaded, and what checkpoints copy. The processes are there already. Not saving is
    a way out only of copies that do not fit."""
    node, offloaded, held_by_all = NODES[name]
    args, world = flags(**more), World(node[1], 2 * len(node), 1, torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(node)))
    ranks = held_by_all(args, EIGHT, BF16, FULL)
    here = [ranks[i] for i in node]
    parameters = sum(held.optimizer for held in here) / 8 or TOTAL / 2
    copied = 12 * parameters / 2**30 * copies
    kept = offloaded * sum(held.host / 2**30 - memory.PROCESS for held in here)
    assert sum(held.copies for held in here) / 2**30 == pytest.approx(copied)
    monkeypatch.setattr(memory, "once_per_node", lambda world, check: check())

    def said(free):
        lines = []
        monkeypatch.setattr(memory, "free_host_memory", lambda: free * 2**30)
        memory.check_host(ranks, args, world, lines.append, "use more nodes")
        return lines

    lines = said(kept + copied + 0.1)
    assert len(lines) == offloaded and all("offloaded" in line for line in lines)
    for free in {kept + copied - 0.1, kept - 0.1} - {-0.1}:
        with pytest.raises(UserError, match=f"and {free:.1f} GiB are free: .*use more") as error:
            said(free)
        text, spared = str(error.value), free >= kept and copies and not args.resume
        assert ("add --no_save, or use more nodes" in text) == bool(spared)
        assert ("GiB for what is offloaded" in text) == offloaded
        assert ("GiB while a checkpoint is saved or read" in text) == bool(copies)


def test_buckets_of_a_pipeline_in_other_dtypes_than_bf16():
    """In bytes, of a model smaller than a bucket: one at the loss, two while it reduces."""
    config = load_config(ROOT / "models/qwen3-tiny", 128)
    args = flags(micro_batch_size=2, seq_len=128, use_activation_checkpointing=False)
    train = SimpleNamespace(seq_len=128, single=True)
    for dtype, buckets in ((torch.bfloat16, 0), (torch.float16, 2), (torch.float32, 2)):
        job, totals = (args, config, Compute(dtype, "sdpa", compile=False), train), []
        for bucket in (0, 1e8):
            parts = peaks(pipeline.held(*job, 1, [3, 3], bucket), job)
            totals.append([sum(stage.values()) - stage[memory.UNUSED] for stage in parts])
        more = buckets * 4e8 / 2**30
        for without, with_bucket in zip(*totals, strict=True):
            assert 0.9 * more <= with_bucket - without <= more


def test_zero_shards_more_with_each_stage():
    """8B on two processes."""
    n, kept, host = TOTAL / 2**30, {}, {}
    for name, (_, file) in ZERO.items():
        job = flags(micro_batch_size=4, grad_accum_steps=1), EIGHT, BF16, FULL
        first, second = zero.held(*job, 2, switches_of(file))
        assert first == second
        kept[name], host[name] = memory.peak(first, *job), 2 * first.host / 2**30
    approx = functools.partial(pytest.approx, rel=1e-3)  # norms are not counted
    whole = {name: sum(parts.values()) for name, parts in kept.items()}
    assert whole["zero1"] > whole["zero2"] > whole["zero3"] > whole["zero3_offload"]
    assert whole["zero2"] > whole["zero2_offload"] > whole["zero3_offload"]
    for name, parts in kept.items():
        offload = "offload" in name
        assert parts["optimizer"] == approx(0 if offload else 4 * n)  # 8 bytes of each half
        if "zero3" not in name:  # all weights in bf16, half of the masters
            assert parts["weights"] == approx(2 * n if offload else 4 * n)
    assert [host[name] / n for name in ("zero1", "zero2", "zero3")] == [0, 0, 0]
    assert host["zero3_offload"] > host["zero2_offload"] > 18 * n


@pytest.mark.parametrize("kind", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_what_a_schedule_holds(kind, stages):
    """As DeepSpeed's own schedules have it, whatever pieces are larger."""
    from deepspeed.runtime.pipe import schedule

    v = kind == "dualpipev"
    for accum in [n for n in (1, 2, 3, 8, 16, 24) if not v or n >= 2 * stages]:
        for stage, larger in itertools.product(range(stages), (0, 1)):
            make = schedule.DualPipeVSchedule if v else schedule.TrainSchedule
            pieces = [stage, 2 * stages - 1 - stage][: 1 + v]
            now, most, blocks = dict.fromkeys(pieces, 0), {}, 0
            for instruction in (i for step in make(accum, stages, stage).steps() for i in step):
                if type(instruction) in (schedule.ForwardPass, schedule.BackwardPass):
                    piece = pieces[getattr(instruction, "phase", 0)]
                    now[piece] += 1 if type(instruction) is schedule.ForwardPass else -1
                    sizes = [3 + (i == larger) for i in range(len(pieces))]
                    held = sum(size * now[p] for size, p in zip(sizes, pieces, strict=True))
                    if held > blocks:
                        blocks, most = held, dict(now)
            assert pipeline.in_flight(kind, stages, stage, accum) == most


def test_replicas_of_a_pipeline_share_masters_and_moments():
    """By hand: ZeRO-1 gives each replica its share of what the optimizer needs, no more."""
    config = load_config(ROOT / "models/qwen3-tiny", 128)
    # a stage: three blocks of 393,216 matrix weights, and the tied embedding, 4096 x 192
    params = 3 * 393_216 + 786_432
    args = flags(micro_batch_size=2, seq_len=128, use_activation_checkpointing=False)
    train = SimpleNamespace(seq_len=128, single=True)
    job = args, config, Compute(torch.bfloat16, "sdpa", compile=False), train
    for replicas in (1, 2, 4):
        ranks = pipeline.held(*job, replicas, [3, 3])
        assert len(ranks) == 2 * replicas
        for parts in peaks(ranks, job):
            each = {k: parts[k] * 2**30 / params for k in ("weights", "optimizer", "gradients")}
            # bytes: bf16 weights here and fp32 ones shared, two fp32 moments shared, fp32 sums here
            share = {"weights": 2 + 4 / replicas, "optimizer": 8 / replicas, "gradients": 4}
            assert each == pytest.approx(share)


def test_copies_that_do_not_fit_are_refused_and_errors_of_psgd_counted():
    args = flags(grad_accum_steps=1, device_memory_gb=80.0, replicas="all")
    job = args, EIGHT, BF16, FULL
    fsdp.refuse_replicas(*job, 2, 2)  # two GPUs to a copy
    with pytest.raises(UserError, match=r"copy on 1 GPU\(s\) needs .* fewer replicas than 4"):
        fsdp.refuse_replicas(*job, 1, 4)
    plain = fsdp.held(*job, 2, True)[0].optimizer
    job = args_with(**vars(args) | {"psgd_rank": 32}), EIGHT, BF16, FULL
    errors = fsdp.held(*job, 2, True)[0].optimizer - plain
    halves = 8_190_735_360 / 2, 151_936 * 4096 / 2  # all, and the largest matrix
    assert errors == pytest.approx(4 * halves[0] + 8 * halves[1], rel=1e-3)


def test_the_flag_prints_and_makes_nothing(tmp_path, kind="pp/launch_pp.sh"):
    import sys

    flags = ["--estimate", "--output_dir", tmp_path / "run", "--seq_len", "64"]
    flags += ["--device_memory_gb", "1"]  # also without a GPU
    done = run(["bash", ROOT / kind, *flags], PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "estimated peak memory" in done.stdout and "total" in done.stdout
    assert "step " not in done.stdout and not (tmp_path / "run").exists()


# ---------------------------------------------------------------- blocks that differ


def mixed(**more):
    """Qwen3 with experts in all blocks but the first."""
    return Qwen3MoeConfig(
        **{**dict(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8,
            num_experts_per_tok=4, moe_intermediate_size=128, norm_topk_prob=True,
            mlp_only_layers=[0],
        ), **more}
    )  # fmt: skip


def deep(**more):
    """DeepSeek-V3, larger than in test_attention, so that what is no token's is little of it."""
    sizes = dict(
        vocab_size=512, hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
        kv_lora_rank=96, q_lora_rank=160, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=96,
        num_experts_per_tok=4,
    )  # fmt: skip
    return latent(**{**sizes, **more})


def really_kept(
    config, impl, dtype, block, documents_of=128, compiled=False, lora=None, rule="chunked", count=1
):
    """Bytes per token that a forward of a block, or of `count` from it on, keeps in memory."""
    cpu, rows, product = torch.device("cpu"), 4, "grouped" if compiled else "looped"
    torch.manual_seed(0)
    lm = skeleton(config, impl, product=product, rule=rule)
    Routers(blocks_with_experts(lm))
    if lora:
        apply_lora(lm, lora, dtype)
    allocate(lm, cpu)
    with torch.no_grad():
        for p in lm.parameters():
            p.normal_(0, 0.1)
    blocks = lm.model.layers[block : block + count].to(dtype)
    for b in blocks:
        if hasattr(b.mlp, "gate"):
            b.mlp.gate.float()
    cu = torch.arange(0, rows * 128 + 1, documents_of, dtype=torch.int32)
    hidden = torch.randn(rows, 128, config.hidden_size, dtype=dtype, requires_grad=True)
    positions = position_ids(cu, (rows, 128))
    rotary = lm.model.rotary_emb(hidden[:1], positions[:1])  # one row's tables: next to nothing
    documents = make_documents(cu, (rows, 128), impl, cpu)
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t, t.untyped_storage().nbytes()
        return t

    call = Blocks(blocks, False)
    if compiled:  # the compiler's choice of what to keep, without its code generation
        torch._dynamo.reset()  # shapes compiled before would change what is kept
        call = torch.compile(call, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = call(hidden, rotary, positions, documents)
    for p in blocks.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    assert out.shape == hidden.shape
    return sum(size for _, size in kept.values()) / (rows * 128)


def shared(**more):
    """Qwen2 with experts, and a shared one with a gate."""
    sizes = {**mixed().to_dict(), "shared_expert_intermediate_size": 384, **more}
    return Qwen2MoeConfig(**{k: v for k, v in sizes.items() if k not in ("model_type", "head_dim")})


KINDS = {
    "tiny": load_config(ROOT / "models/qwen3-tiny", 128),
    "qwen2_moe": shared(), "qwen3_moe": mixed(), "deepseek_v3": deep(),
    "no_q_lora": deep(q_lora_rank=None), "narrow_values": deep(v_head_dim=32),
    "llama": LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("block", [0, 1], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "kind, impl, dtype",
    [
        ("tiny", "sdpa", torch.float32),
        ("tiny", "bucketed", torch.float32),
        ("qwen2_moe", "sdpa", torch.bfloat16),
        ("qwen3_moe", "sdpa", torch.float32),
        ("qwen3_moe", "sdpa", torch.bfloat16),
        ("qwen3_moe", "bucketed", torch.float32),
        ("deepseek_v3", "sdpa", torch.float32),
        ("deepseek_v3", "sdpa", torch.bfloat16),
        ("deepseek_v3", "bucketed", torch.float32),
        ("no_q_lora", "sdpa", torch.float32),
        ("narrow_values", "varlen", torch.bfloat16),
    ],
)
def test_blocks_that_differ_keep_what_real_ones_keep(kind, impl, dtype, block, monkeypatch):
    def fused(q, k, v, cu, cu_k, n, n_k, scale):  # full rows
        q, k, v = (x.unflatten(0, (-1, n)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    monkeypatch.setattr(attention, "_torch_varlen", lambda: (fused, True, True))
    config, documents_of = KINDS[kind], 64 if impl == "bucketed" else 128
    real = really_kept(config, impl, dtype, block, documents_of)
    compute = Compute(dtype, impl, compile=False)
    train = SimpleNamespace(seq_len=128, single=documents_of == 128)
    found = memory.saved_bytes(args_with(), config, compute, train)
    assert len(found) == config.num_hidden_layers
    assert found[block] == pytest.approx(real, rel=0.02)


# an eighth of Qwen3.5 4B's sizes, a quarter of 0.8B's: hidden, of the MLP, heads of keys and values
def heads(keys, values):
    return dict(vocab_size=512, num_hidden_layers=4, linear_num_key_heads=keys,
                linear_num_value_heads=values)  # fmt: skip


LINEAR = [
    Qwen3_5TextConfig(hidden_size=320, intermediate_size=1152, **heads(2, 4)),
    Qwen3_5TextConfig(hidden_size=256, intermediate_size=896, **heads(4, 4)),
    Qwen3_5MoeTextConfig(
        hidden_size=320, moe_intermediate_size=64, shared_expert_intermediate_size=96,
        num_experts=8, num_experts_per_tok=3, **heads(2, 4),
    ),
]  # fmt: skip


@pytest.mark.parametrize("impl, documents_of", [("sdpa", 128), ("bucketed", 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_attention_takes_no_more_than_is_expected(dtype, impl, documents_of):
    """Of the rule in PyTorch. What is expected is at most 1.3 times as much."""
    for config in LINEAR:
        real = really_kept(config, impl, dtype, 0, documents_of)
        compute = Compute(dtype, impl, compile=False)
        train = SimpleNamespace(seq_len=128, single=documents_of == 128)
        assert real <= memory.saved_bytes(args_with(), config, compute, train)[0] <= 1.3 * real


def test_a_dense_model_may_say_that_it_has_no_experts():
    config, train = (
        copy.copy(EIGHT),
        SimpleNamespace(seq_len=1024, single=True, doc_start=[0, 1024]),
    )
    args = args_with(use_activation_checkpointing=True)
    without = memory.passing_bytes(args, config, BF16, train)
    config.moe_intermediate_size = None
    assert memory.passing_bytes(args, config, BF16, train) == without


def test_what_a_kernel_allocates_beside_experts_counts(monkeypatch):
    """In the three blocks with a delta rule, of 4 heads of 128, when experts' memory is free."""
    config, train = LINEAR[2], SimpleNamespace(seq_len=128, single=True, doc_start=[0, 128])
    args = args_with(use_activation_checkpointing=True)
    compute = Compute(torch.bfloat16, "sdpa", compile=True, rule="fla")
    found = memory.passing_bytes(args, config, compute, train)
    monkeypatch.setattr(memory, "_of_rules", lambda *given: [0] * 4)
    without = memory.passing_bytes(args, config, compute, train)
    more = [a - b for a, b in zip(found, without, strict=True)]
    assert min(more[:3]) > 4 * 128 * 7 * 4 and more[3] == 0


def test_compiled_linear_attention_with_a_kernel(monkeypatch):
    """The convolution's inputs are kept once, in units as they are compiled."""
    monkeypatch.setattr("llm_demo.run.choose_delta._kernel", lambda kda, q, k, v, *rest: v.clone())
    for config in LINEAR:
        n = unit_sizes(config, 3, 0)[0]
        real = (
            really_kept(config, "sdpa", torch.bfloat16, 0, compiled=True, rule="fla", count=n) / n
        )
        compute = Compute(torch.bfloat16, "sdpa", compile=True, rule="fla")
        found = memory.saved_bytes(args_with(), config, compute, SimpleNamespace(single=True))
        assert found[0] == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize(
    "kind, block",
    [
        ("llama", 0),
        ("deepseek_v3", 1),
        *(
            pytest.param(kind, block, marks=pytest.mark.slow)
            for kind, block in (
                ("qwen2_moe", 0), ("qwen2_moe", 1), ("qwen3_moe", 0), ("qwen3_moe", 1),
                ("deepseek_v3", 0),
            )
        ),
    ],
)  # fmt: skip
def test_compiled_blocks_keep_what_the_partitioner_keeps(kind, block):
    real = really_kept(KINDS[kind], "sdpa", torch.bfloat16, block, compiled=True)
    args = args_with()
    compute = Compute(torch.bfloat16, "sdpa", compile=True)
    found = memory.saved_bytes(args, KINDS[kind], compute, SimpleNamespace(single=True))
    assert found[block] == pytest.approx(real, rel=0.05)


def test_checkpointed_blocks_that_differ():
    """Each keeps its input and the chosen experts; what passes is the largest block's."""
    args = args_with(use_activation_checkpointing=True, micro_batch_size=2)
    compute = Compute(torch.bfloat16, "sdpa", compile=True)
    train, config = SimpleNamespace(seq_len=1024, single=True), mixed()
    assert memory.saved_bytes(args, config, compute, train) == [512, 560, 560]  # 4 chosen
    passing = memory.passing_bytes(args, config, compute, train)
    once = args_with()
    dense, sparse, _ = memory.saved_bytes(once, config, compute, train)
    sparse += 4 * 256 * 2 * 2
    assert passing == [dense + config.intermediate_size * 2, sparse, sparse] and sparse > dense
    for tokens, largest in (([2048, 0, 0], passing[0]), ([2048, 4096, 0], passing[1])):
        kept = tokens[0] * 512 + tokens[1] * 560
        found = memory.at_the_loss(args, config, compute, train, tokens, head=False)
        assert found == (kept + 2048 * largest, 0)


@pytest.mark.parametrize("size", [2**30, 1], ids=["weights", "activations"])
@pytest.mark.parametrize("of", [pipeline, fsdp_pp], ids=["pp", "fsdp_pp"])
def test_a_stage_has_its_own_blocks(of, size, monkeypatch):
    """By hand: one dense block on the first stage, two with experts on the second. size: of a dense
    block; with small ones the peak is at the loss."""
    config = mixed()
    costs = [Cost(n * size, n * size, 0) for n in (1, 8, 8)]
    monkeypatch.setattr(of, "block_costs", lambda config, seq_len: costs)
    args = flags(
        use_activation_checkpointing=False, micro_batch_size=2, grad_accum_steps=8,
        blocks_per_unit=1, reshard_after_forward=False,
    )  # fmt: skip
    compute = Compute(torch.bfloat16, "sdpa", compile=True)
    job = args, config, compute, FULL
    found = peaks(of.held(*job, 1, [1, 2]), job)
    if of is fsdp_pp:
        copies = args_with(**{**vars(args), "copy_engines": True})
        more = peaks(of.held(copies, *job[1:], 1, [1, 2]), job)
        if size == 1:  # 4 slots of 2 rows
            added = [b["activations"] - a["activations"] for a, b in zip(found, more, strict=True)]
            assert added == pytest.approx([4 * 2 * 1024 * 256 * 2 / 2**30] * 2)
        # they may be chosen
        copies = args_with(**vars(args) | {"copy_engines": None})
        assert peaks(of.held(copies, *job[1:], 1, [1, 2]), job) == more
    parameters = [(n * size + 512 * 256) / 2**30 for n in (1, 16)]  # with an end of the model
    weights = 6 if of is pipeline else 4
    assert [parts["optimizer"] for parts in found] == [8 * n for n in parameters]
    assert [parts["weights"] for parts in found] == [weights * n for n in parameters]
    if size == 1:
        dense, sparse, _ = memory.saved_bytes(*job)
        first, last = memory.passing_bytes(*job)[:2]
        held = [2, 1]  # micro-batches of 2,048 tokens
        sent = [0, 0] if of is pipeline else [2048 * 256 * 2 * count for count in held]
        kept = [held[0] * 2048 * dense, held[1] * 2048 * 2 * sparse]
        loss = memory.loss_bytes(*job)
        kept[0] += 2048 * first + sent[0]
        kept[1] += max(loss, 2048 * last) + sent[1]
        total = [parts["activations"] + parts["loss"] for parts in found]
        assert total == pytest.approx([x / 2**30 for x in kept])


def test_the_largest_unit():
    assert memory.largest_unit([2, 1, 1], [3, 4, 9, 5]) == 9
    assert memory.largest_unit([2, 2], [3, 4, 2, 1]) == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_attention_does_not_depend_on_varlen_attn(dtype, monkeypatch):
    """PyTorch 2.9 has none, and it takes no fp32, but its SDPA is fused on these cards."""
    monkeypatch.setattr(choices.importlib.util, "find_spec", lambda name: None)
    train = SimpleNamespace(seq_len=1024, doc_start=np.arange(0, 8193, 1024), single=True)
    for device, keys in ((MI210, 0), (MI300, 0), (MI100, 1024)):
        monkeypatch.setattr(memory, "this_device", lambda device=device: device)
        assert memory.keys_kept(Compute(dtype, "bucketed", False), train) == keys
