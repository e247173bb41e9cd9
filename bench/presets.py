"""Sets of rows to measure. A row is a dict of settings; DEFAULTS holds those it does not name."""

from pathlib import Path

SMALL, LARGE, MOE = "models/qwen3-0.6b", "models/qwen3-8b", "models/qwen3-30b-a3b-12l"
BALANCED = "--balanced"  # no flag of the scripts: experts are chosen in turn, see bench/balanced.py
DEFAULTS = {
    "engine": "fsdp", "micro": 1, "ga": 1, "ckpt": False, "dtype": "bf16", "seq_len": 1024,
    "model": SMALL, "gpus": 0, "steps": 32, "data": "full", "flags": "", "env": "",
}  # fmt: skip
ONE_OF = "--one_of"  # no flag either: one rank of many, alone on a GPU, see bench/one_rank.py
DUALPIPEV, RESHARD, COPIES = "--schedule dualpipev", "--reshard_after_forward", "--replicas all"
NO_ENGINES = "--no_copy_engines"
NO_RESHARD = "--no_reshard"  # torchtitan's, see bench/peers/torchtitan.py
ON_HOST = f"{RESHARD} --optimizer_on_host --device_memory_gb"
# The first version of this project: half of the parameters a stage, plain attention.
SEED_LIKE = "--partition parameters --attn_impl math --no_compile"

_NO_P2P = "NCCL_P2P_DISABLE=1"
_SOCKETS = f"{_NO_P2P} NCCL_SHM_DISABLE=1"

# (micro, GA, ckpt, dtype, steps): fewer steps where a step takes seconds
_SEED = [(1, 1, False, "fp32", 32), (1, 1, True, "bf16", 32), (4, 8, True, "bf16", 16),
         (4, 8, True, "fp32", 8), (4, 8, False, "fp32", 8), (8, 1, True, "bf16", 32),
         (8, 4, True, "bf16", 16), (8, 8, True, "bf16", 16), (8, 8, True, "fp32", 6)]  # fmt: skip


def name_of(row: dict) -> str:
    """A short name: the main settings, and the others where they differ from their defaults."""
    parts = [row["engine"], Path(row["model"]).name, f"s{row['seq_len']}", f"m{row['micro']}"]
    parts += [f"ga{row['ga']}", row["dtype"]] + ["ckpt"] * row["ckpt"]
    parts += [f"{row['gpus']}gpus"] * bool(row["gpus"])
    parts += [] if row["data"] == "full" else [Path(row["data"]).stem]
    extra = f"{row['flags']} {row['env']}".replace("--", "").replace("=", " ")
    return "-".join([*parts, *extra.split()])


def _pairs(sweep, *schedules, **more):
    """pp and FSDP with equal rows per step on two GPUs: each FSDP replica takes half the GA."""
    rows = []
    for ga in sweep:
        rows.append({"engine": "pp", "micro": 8, "ga": ga, **more})
        for name in schedules:
            rows.append({**rows[-1], "flags": f"--schedule {name}"})
        micro = 8 if ga > 1 else 4
        rows.append({"engine": "fsdp", "micro": micro, "ga": max(1, ga // 2), **more})
    return rows


_8B = [
    {"engine": "fsdp", "micro": 4, "model": LARGE, "steps": 12, "flags": RESHARD},
    {"engine": "torchtitan", "micro": 4, "model": LARGE, "steps": 20},
    {"engine": "pp", "micro": 2, "ga": 8, "model": LARGE, "steps": 8},
    {"engine": "pp", "micro": 2, "ga": 8, "model": LARGE, "steps": 8, "flags": DUALPIPEV},
    {"engine": "fsdp", "micro": 4, "model": LARGE, "steps": 12},
    # as many tokens per step as the pipeline
    {"engine": "fsdp", "micro": 8, "model": LARGE, "steps": 12, "flags": RESHARD},
]
_8B_RESHARDED = {"micro": 4, "model": LARGE, "flags": RESHARD}
# (engine, flags, steps): fewer steps where the optimizer is on the host
_ZERO = [
    ("fsdp", "", 8),
    *(("zero", f"--deepspeed_config zero/ds_zero{stage}.json", 8) for stage in (1, 2, 3)),
    ("fsdp", "--optimizer_on_host", 5),
    ("zero", "--deepspeed_config zero/ds_zero3_offload.json", 5),
]


def _ways(env="", steps=12):
    """Every way to spread a run over two GPUs, at 16k, 33k and 65k tokens a step."""
    ways = [("fsdp", 1, flags) for flags in ("", COPIES, f"{COPIES} --psgd_rank 32")]
    ways += [("pp", 2, ""), ("pp", 2, DUALPIPEV)]
    ways += [("fsdp_pp", 2, f) for f in ("", "--schedule interleaved", "--schedule v")]
    if not env:  # NCCL's kernels, for comparison
        schedules = "", "--schedule interleaved ", "--schedule v "
        ways += [("fsdp_pp", 2, f"{schedule}{NO_ENGINES}") for schedule in schedules]
    return [
        {"engine": engine, "micro": 8, "ga": times * n, "flags": flags, "env": env, "steps": steps}
        for n in (1, 2, 4) for engine, times, flags in ways
        if n > 1 or flags != DUALPIPEV  # which needs 4 micro-batches
    ]  # fmt: skip


_MOE = [
    {"engine": engine, "model": MOE, "seq_len": 4096, "steps": 10, **row}
    for row, engines in (
        ({"micro": 4, "flags": RESHARD}, ("fsdp",)),
        ({"micro": 4}, ("fsdp", "torchtitan")),
        ({"micro": 4, "flags": "--expert_parallel 2"}, ("fsdp", "torchtitan")),
        ({"micro": 1, "ga": 8}, ("fsdp", "torchtitan")),
        ({"micro": 4, "data": "packed"}, ("fsdp",)),
        ({"micro": 4, "flags": BALANCED}, ("fsdp", "torchtitan")),
    )
    for engine in engines
]


_6_BLOCKS = {"model": "models/qwen3-30b-a3b-6l", "seq_len": 4096, "steps": 10, "gpus": 1}
_WHOLE_MIXTURE = {"model": "models/qwen3-30b-a3b", "micro": 1, "seq_len": 4096, "ckpt": True}


def _cards():
    """8B on two cards of 80 GB, beside torchtitan; then about 100k tokens a step in every way,
    and with FSDP in 30 GiB."""
    beside = [
        {"engine": engine, "micro": 4, "model": LARGE, "ckpt": ckpt, "steps": 12,
         "flags": RESHARD if engine == "fsdp" else ""}
        for ckpt in (False, True) for engine in ("fsdp", "torchtitan")
    ]  # fmt: skip
    beside += [{**beside[2], "flags": ""}, {**beside[3], "flags": NO_RESHARD}]
    small = [{**beside[0], "micro": micro} for micro in (1, 2)]
    ways = [
        {"engine": engine, "micro": micro, "ga": ga * times, "ckpt": ckpt, "model": LARGE,
         "steps": 4, "flags": flags}
        for micro, ga, ckpt in ((1, 50, False), (1, 50, True), (8, 6, True), (16, 3, True))
        for engine, times, flags in (
            ("fsdp", 1, RESHARD), ("fsdp_pp", 2, "--schedule interleaved"),
            ("fsdp", 1, f"{ON_HOST} 30"),
        )
    ]  # fmt: skip
    held = {"micro": 2, "ga": 16, "ckpt": True, "model": LARGE, "steps": 5}
    on_host = [{**held, "flags": flags} for flags in (RESHARD, f"{ON_HOST} 30")]
    return [*beside, *small, *ways, *on_host]


def _fit():
    """The fastest settings of each kind that llm_demo.fit names for 8B on two cards of 80 GB, with
    8k, 65k and 100k tokens a step; its choice is the first."""
    host, interleaved = "--optimizer_on_host", "--schedule interleaved"
    budget = "--activation_memory_budget 0.6"
    settings = [
        # engine, micro, GA, checkpointing, flags
        ("fsdp", 4, 1, False, RESHARD), ("fsdp", 4, 1, False, f"{budget} {RESHARD}"),
        ("fsdp", 4, 1, True, ""),
        ("fsdp_pp", 1, 8, False, interleaved),
        ("fsdp", 32, 1, True, RESHARD), ("fsdp", 32, 1, True, host),
        ("fsdp_pp", 8, 8, True, interleaved),
        ("fsdp_pp", 7, 14, True, interleaved), ("fsdp", 7, 7, True, RESHARD),
        ("fsdp", 49, 1, True, host),
    ]  # fmt: skip
    return [
        {"engine": engine, "micro": micro, "ga": ga, "ckpt": ckpt, "model": LARGE, "flags": flags,
         "steps": 12 if micro * ga < 16 else 4}
        for engine, micro, ga, ckpt, flags in settings
    ]  # fmt: skip


def _one_card():
    """8B adapters and 0.6B on one card, beside TRL with Liger's kernels and Unsloth."""
    adapters = {"micro": 4, "model": LARGE, "gpus": 1, "steps": 16, "flags": "--lora_rank 16"}
    whole = {"micro": 8, "gpus": 1, "steps": 16}
    return [
        *({**adapters, "ckpt": True, "engine": engine} for engine in ("fsdp", "trl", "unsloth")),
        {**adapters, "ckpt": True, "flags": "--lora_rank 16 --activations_on_host"},
        adapters,
        *({**whole, "engine": engine} for engine in ("fsdp", "trl")),
    ]


def _four_bits():
    """Adapters over a base in 4 bits, beside Unsloth and our own 16 bits; the longest row and 32B
    in 22 GiB a card."""
    bits = "--lora_rank 16 --base_bits 4"
    small, short = f"{bits} --device_memory_gb 22", {"micro": 4, "ckpt": True}
    one = {"model": LARGE, "gpus": 1, "steps": 12, "flags": bits}
    largest = {"model": "models/qwen3-32b", "micro": 1, "ckpt": True, "steps": 6, "flags": small}
    row = {**one, "micro": 1, "ckpt": True, "steps": 3}
    medium = {**row, "model": "models/qwen3-14b"}
    held = "--activations_on_host --device_memory_gb"
    return [
        *({**one, **short, "engine": engine} for engine in ("fsdp", "unsloth", "trl")),
        {**one, **short, "flags": "--lora_rank 16"},
        {**one, "micro": 4},
        {**row, "seq_len": 80 << 10, "flags": f"{bits} {held} 22"},
        # of the table of the longest rows
        {**medium, "seq_len": 48 << 10, "flags": f"{bits} {held} 23"},
        {**medium, "seq_len": 80 << 10, "flags": f"--lora_rank 16 {held} 46.8"},
        {**largest, "gpus": 1},
        {**largest, "gpus": 1, "engine": "unsloth"},
        {**largest, "seq_len": 4096, "flags": f"{small} {RESHARD}"},
    ]


def _adapters():
    """Adapters of rank 16. 14B and 8B on two cards, with and without a link between them, 16,384
    tokens a step: a pipeline, shards of the frozen weights, copies over 4 bits. 8B on one card
    beside Unsloth, which sends inputs of blocks to the host too. Qwen3-30B-A3B, then the longest
    rows, over 4 bits."""
    rank, bits = "--lora_rank 16", "--lora_rank 16 --base_bits 4"
    held, capped = "--activations_on_host", "--device_memory_gb"
    two = {"gpus": 2, "steps": 10}
    piped = {**two, "engine": "fsdp_pp", "micro": 4, "ga": 4}
    sharded = {**two, "micro": 8, "flags": f"{rank} {RESHARD}"}
    three = [
        {**piped, "flags": f"{rank} --schedule interleaved"},
        {**sharded, "flags": f"{rank} {RESHARD} --activation_memory_budget 0.6"},
        {**sharded, "ckpt": True},
        {**two, "micro": 4, "ga": 2, "flags": f"{bits} {COPIES}"},
    ]
    schedules = [{**piped, "flags": f"{rank}{schedule}"} for schedule in (" --schedule v", "")]
    spread = [
        {**row, "model": model, "env": env}
        for model, rows in (("models/qwen3-14b", [*three, *schedules]), (LARGE, three))
        for env in (_NO_P2P, "")
        for row in rows
    ]
    one = {"model": LARGE, "gpus": 1, "ckpt": True}
    beside = [
        {**one, "micro": 4, "steps": 16, "engine": engine, "flags": f"{flags}{more}"}
        for flags in (rank, bits)
        for engine, more in (("fsdp", f" {held}"), ("unsloth", ""), ("fsdp", ""))
    ]
    mixture = {**_WHOLE_MIXTURE, "gpus": 1, "steps": 8}
    experts = [
        {**mixture, "flags": f"{bits} {capped} 30"},
        {**mixture, "flags": f"{bits} --optim_state bf16 {held} {capped} 23"},
        {**mixture, "engine": "unsloth", "flags": bits},
    ]
    longest = [
        {**one, "steps": 3, "seq_len": tokens << 10, "flags": f"{bits} {held} {capped} 22"}
        for tokens in (100, 120)
    ]
    return [*spread, *beside, *experts, *longest]


def _fp8():
    """Products in fp8 beside our bf16, and beside torchtitan's bf16 and its fp8 by torchao."""
    whole = {**_8B_RESHARDED, "gpus": 2, "steps": 12}
    again = {**whole, "micro": 8, "ckpt": True}
    adapters = {"micro": 4, "model": LARGE, "gpus": 1, "steps": 12}
    small = {"micro": 8, "model": "models/qwen3-1.7b", "gpus": 1, "steps": 16}
    return [
        *({**whole, "flags": f"{RESHARD}{fp8}"} for fp8 in ("", " --fp8", " --fp8 rowwise")),
        *({**whole, "engine": "torchtitan", "flags": fp8} for fp8 in ("", "--fp8 rowwise")),
        *({**again, "flags": f"{RESHARD}{fp8}"} for fp8 in ("", " --fp8")),
        *({**adapters, "flags": f"--lora_rank 16{fp8}"} for fp8 in ("", " --fp8")),
        *({**small, "flags": fp8} for fp8 in ("", "--fp8")),
    ]


def _tensor():
    """Weights' matrices spread over two GPUs, and moments in bf16, beside FSDP2 with as many
    tokens a step: 8,192, then 512."""
    whole, short = {**_8B_RESHARDED, "gpus": 2, "steps": 12}, {"seq_len": 256, "steps": 24}
    spread = {**whole, "micro": 8, "flags": f"{RESHARD} --tensor_parallel 2"}
    return [
        whole, spread, {**whole, "flags": f"{RESHARD} --optim_state bf16"},
        {**whole, **short, "micro": 1}, {**spread, **short, "micro": 2},
    ]  # fmt: skip


def _qwen35():
    """Shapes like Qwen3.5's on one card, and 4 of the 40 blocks of 35B-A3B, beside TRL with the
    same kernel; then packed rows."""
    small = {"model": "models/qwen3.5-0.8b-like", "seq_len": 4096, "gpus": 1, "steps": 12}
    large = {**small, "model": "models/qwen3.5-4b-like", "ckpt": True}
    mixture = {**large, "model": "models/qwen3.5-35b-a3b-4l"}
    pairs = [{**small, "micro": 4}, {**small, "micro": 4, "ckpt": True}, {**large, "micro": 1},
            {**large, "micro": 4, "flags": "--lora_rank 16"}, {**mixture, "micro": 1},
            {**mixture, "micro": 4}]  # fmt: skip
    rows = [{**row, "engine": engine} for row in pairs for engine in ("fsdp", "trl")]
    return [*rows, {**small, "micro": 4, "data": "packed"}]


def _proven():
    """Two blocks like GLM-4.5-Air's, a family without a test of its own, beside TRL."""
    row = {"model": "models/glm4.5-air-2l", "seq_len": 4096, "gpus": 1, "steps": 12, "ckpt": True}
    return [
        {**row, "micro": micro, "engine": engine} for micro in (1, 4) for engine in ("fsdp", "trl")
    ]


def _gemma4():
    """A shape like Gemma 4 12B's with adapters, and 4 of the 60 blocks of 31B, beside TRL; then
    packed rows."""
    row = {"seq_len": 4096, "gpus": 1, "steps": 12, "ckpt": True, "micro": 1}
    whole = {**row, "model": "models/gemma4-31b-4l"}
    adapters = {**row, "model": "models/gemma4-12b-like", "flags": "--lora_rank 16"}
    pairs = [{**kind, "engine": engine} for kind in (adapters, whole) for engine in ("fsdp", "trl")]
    return [*pairs, *({**kind, "data": "packed"} for kind in (adapters, whole))]


def _on(gpus):
    """What more than two GPUs have to show: scaling, every way to spread a run over two kinds of
    link at 65k and 131k tokens a step, experts, long rows."""
    scaling = [
        {"engine": engine, "gpus": n, "steps": 16, **row}
        for n in (2, gpus) for engine in ("fsdp", "torchtitan")
        for row in ({"micro": 8}, {"micro": 16}, {**_8B_RESHARDED, "steps": 12})
        if n == gpus or engine == "fsdp"
    ]  # fmt: skip
    scaling.append({**_8B_RESHARDED, "gpus": gpus, "steps": 12, "flags": f"{RESHARD} {NO_ENGINES}"})
    grids = [("fsdp", 1, ""), ("fsdp", 1, "--replicas 2"), ("pp", 2, ""), ("pp", 4, "--stages 4")]
    grids += [("fsdp_pp", n, f"--stages {n}") for n in (2, 4) if n < gpus]
    spread = [
        {"engine": engine, "micro": 8, "ga": 8 * times * stages // gpus, "gpus": gpus, "steps": 10,
         "flags": flags, "env": env}
        for env in ("", _SOCKETS) for times in (1, 2) for engine, stages, flags in grids
    ]  # fmt: skip
    experts = [
        {**_WHOLE_MIXTURE, "gpus": gpus, "steps": 8,
         "flags": f"{RESHARD} --expert_parallel {n}{more}"}
        for n in (1, 2, 4, 8) if n <= gpus for more in ("", f" {BALANCED}")
    ]  # fmt: skip
    if gpus < 8:  # 12 bytes a parameter of the states go to the host
        for row in experts:
            row["flags"] += " --optimizer_on_host"
    long = [
        {"model": LARGE, "seq_len": seq_len, "ckpt": True, "gpus": gpus, "steps": 2,
         "flags": f"{RESHARD} --sequence_parallel {gpus} --activations_on_host"}
        for seq_len in (131_072, 262_144, 524_288, 1_048_576)
    ]  # fmt: skip
    rows = [*scaling, *spread, *experts, *long]
    return [*{name_of({**DEFAULTS, **row}): row for row in rows}.values()]  # some are of both kinds


_LONG = {"seq_len": 131_072, "ckpt": True, "gpus": 2, "flags": "--sequence_parallel 2"}
# fsdp/launch_ddp.sh without flags, on two CPU processes, evaluated before and after
_FIRST_RUN = {
    "engine": "fsdp", "micro": 4, "ga": 2, "dtype": "fp32", "seq_len": 64, "steps": 180, "gpus": 2,
    "model": "models/qwen3-tiny", "data": "data/first_run.jsonl",
    "flags": "--eval_json data/first_run.heldout.jsonl --lr 2e-3 --warmup_steps 10",
}  # fmt: skip
_GA_8 = {"micro": 8, "ga": 8, "steps": 12}
_PROFILED = [("fsdp", 1, 32, "20:22"), ("fsdp", 8, 12, "8:9"), ("pp", 8, 16, "10:11")]
PRESETS = {
    "smoke": [
        {**row, "model": "models/qwen3-tiny", "micro": 2, "ga": 2, "seq_len": 128, "steps": 5,
         "dtype": "fp32", "data": data}
        for row, data in (({"engine": "fsdp"}, "full"), ({"engine": "pp"}, "packed"))
    ],
    "seed": [
        {"engine": engine, "micro": m, "ga": ga, "ckpt": ckpt, "dtype": dtype, "steps": steps}
        for m, ga, ckpt, dtype, steps in _SEED for engine in ("pp", "fsdp")
    ],
    "teff": _pairs((1, 2)) + _pairs((4, 8, 12), "dualpipev", steps=16),
    "8b": _8B,
    # our engines beside their peer
    "speed": [
        {"engine": "fsdp", "micro": 8},
        {"engine": "torchtitan", "micro": 8},
        {"engine": "fsdp", "micro": 16},
        {"engine": "torchtitan", "micro": 16},
        {"engine": "fsdp", "micro": 8, "ckpt": True},
        {"engine": "torchtitan", "micro": 8, "ckpt": True},
        {"engine": "fsdp", "micro": 8, "ga": 8, "steps": 16},
        {"engine": "fsdp", "micro": 8, "flags": "--activation_memory_budget 0.6"},
        {"engine": "fsdp", "micro": 16, "data": "packed"},
        {"engine": "pp", "micro": 8, "ga": 8, "steps": 16},
        {"engine": "pp", "micro": 8, "ga": 8, "steps": 16, "flags": DUALPIPEV},
        {"engine": "pp", "micro": 8, "ga": 8, "ckpt": True, "steps": 12},
        {"engine": "pp", "micro": 8, "ga": 8, "ckpt": True, "steps": 12, "flags": DUALPIPEV},
        {"engine": "pp", "micro": 8, "ga": 8, "ckpt": True, "steps": 6, "flags": SEED_LIKE},
        *_8B,
    ],
    # one process: the plain model, FSDP2 on a world of one, and the peer
    "one_gpu": [
        {"engine": engine, "gpus": 1, **row, **more}
        for row in ({"micro": 8}, {"micro": 16}, {"micro": 8, "ckpt": True}, _GA_8)
        for engine, more in (("fsdp", {}), ("fsdp", {"flags": "--fsdp"}), ("torchtitan", {}))
    ],
    # the optimizer on the host beside the same settings on the device, and 8B beside its peer
    "memory": [
        *({"engine": "fsdp", "micro": 2, "ga": ga, "ckpt": True, "gpus": 2, "model": LARGE,
           "flags": flags, "steps": steps}
          for ga, steps in ((16, 6), (32, 4)) for flags in (RESHARD, f"{ON_HOST} 30")),
        {"engine": "fsdp", "micro": 4, "ga": 8, "ckpt": True, "gpus": 2, "steps": 4,
         "model": "models/qwen3-14b", "flags": f"{ON_HOST} 56"},
        *({**_GA_8, "engine": "fsdp", "gpus": 1, "ckpt": ckpt, "flags": flags}
          for ckpt in (False, True) for flags in ("", "--optimizer_on_host")),
        *_8B[:2],
        _8B[4],  # without resharding
        {**_8B[4], "flags": "--activation_memory_budget 0.85"},  # the same in at most 82 GiB
    ],
    # DeepSpeed's ZeRO beside FSDP, with and without the optimizer on the host
    "zero": [
        {"engine": engine, "micro": 4, "ga": 4, "ckpt": True, "gpus": 2, "model": model,
         "flags": flags, "steps": steps}
        for model in (SMALL, "models/qwen3-1.7b", "models/qwen3-4b", LARGE)
        for engine, flags, steps in _ZERO
    ],
    # GPUs connected through host memory, and through sockets, which are as slow as a network
    "no_p2p": _pairs((2,), env=_NO_P2P, steps=10)
    + _pairs((4, 8, 16), "dualpipev", env=_NO_P2P, steps=10),
    "slow_link": _pairs((2,), env=_SOCKETS, steps=8)
    + _pairs((4, 8, 16), "dualpipev", env=_SOCKETS, steps=8),
    # 12 of the 48 blocks of Qwen3-30B-A3B
    "moe": _MOE,
    # 6 of them in one process
    "moe_one_gpu": [
        *({**_6_BLOCKS, "engine": engine, **row}
          for row in ({"micro": 4}, {"micro": 4, "flags": BALANCED}, {"micro": 1, "ga": 8})
          for engine in ("fsdp", "torchtitan")),
        {**_6_BLOCKS, "engine": "fsdp", "micro": 4, "flags": "--lora_rank 16"},
    ],
    # one rank of runs on more GPUs: its memory, and its compute without communication
    "one_rank": [
        {"engine": "fsdp", "gpus": 1, "steps": 8, **row, "flags": f"{ONE_OF} {ranks} {flags}"}
        for ranks, flags, row in (
            (2, RESHARD, {"model": LARGE, "micro": 4, "steps": 12}),
            (2, "", {"model": LARGE, "micro": 4, "steps": 12}),
            *((8, f"{RESHARD} --expert_parallel {n}", _WHOLE_MIXTURE) for n in (1, 8)),
            (8, RESHARD, {"model": "models/qwen3-32b", "micro": 4, "ckpt": True}),
        )
    ],
    # adapters beside TRL with PEFT's, where a card has little memory
    "lora": [
        {"engine": engine, "micro": 4, "ckpt": True, "model": model, "gpus": gpus, "steps": 12,
         "flags": flags}
        for model, gpus, flags in (
            (LARGE, 1, "--lora_rank 16 --device_memory_gb 22"),
            ("models/qwen3-32b", 2, f"--lora_rank 16 {RESHARD} --device_memory_gb 46"),
        )
        for engine in ("fsdp", "trl")
    ],
    # what cards of 80 GB do
    "cards": _cards(),
    "fit": _fit(),
    "one_card": _one_card(),
    "four_bits": _four_bits(),
    "adapters": _adapters(),
    "fp8": _fp8(),
    "tensor": _tensor(),
    "qwen35": _qwen35(),
    "proven": _proven(),
    "gemma4": _gemma4(),
    # rows spread over two GPUs, beside torchtitan's context parallelism; then as long as they fit
    "long": [
        {**_LONG, "engine": "fsdp", "steps": 8},
        {**_LONG, "engine": "torchtitan", "steps": 4},
        *({**_LONG, "engine": "fsdp", "steps": 8, "data": data} for data in ("packed", "mixed")),
        *({**_LONG, "engine": "fsdp", "model": LARGE, "seq_len": seq_len, "steps": steps,
           "flags": f"{RESHARD} {_LONG['flags']}{more}"}
          for seq_len, steps, more in (
              (131_072, 3, ""), (262_144, 3, " --activations_on_host"),
              (524_288, 1, " --activations_on_host"))),
    ],
    # long documents in packed rows: by flash, and one by one by cuDNN
    "documents": [
        {"engine": "fsdp", "micro": micro, "ckpt": True, "gpus": 1, "seq_len": seq_len,
         "steps": steps, "data": "mixed", "flags": f"--attn_impl {impl}"}
        for seq_len, micro, steps in ((131_072, 1, 6), (32_768, 2, 12), (8192, 8, 12))
        for impl in ("varlen", "varlen_cudnn")
    ],
    # what compressed sums over replicas cost, with the bundled model and data on a CPU
    "psgd": [
        {**_FIRST_RUN, "flags": f"{COPIES} --psgd_rank {rank} {_FIRST_RUN['flags']}"}
        for rank in (0, 1, 4, 16, 32)
    ],
    # all ways in one run, for each link
    "ways": _ways(),
    "ways_no_p2p": _ways(_NO_P2P, 10),
    "ways_sockets": _ways(_SOCKETS, 8),
    "four": _on(4),
    "eight": _on(8),
    # the event timer beside the profiler, and steps without either
    "timer": [
        {"engine": engine, "micro": 8, "ga": ga, "steps": steps, "flags": flags}
        for engine, ga, steps, profiled in _PROFILED
        for flags in (f"--profile_steps {profiled}", "--no_comm_timer")
    ]
    # with copy engines; here the host stays ahead of the device even when profiled
    + [{**_8B[0], "flags": f"{_8B[0]['flags']} --profile_steps 8:9"}],
    # what a GPU without fused attention runs: math attention, whole rows or buckets
    "math": [
        {"engine": "fsdp", "micro": 8, "data": data, "flags": f"--attn_impl {impl}", "steps": 16}
        for data in ("packed", "full") for impl in ("math", "bucketed_math")
    ],
}  # fmt: skip
