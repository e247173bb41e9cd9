"""torchtitan's Qwen3 on rows of random tokens, with FSDP2 and torch.compile, beside our scripts.

torchtitan 0.2.2 imports this module through --experimental.custom_import and finds a model with its
own layers, loss and optimizer, and data that takes no time to load."""

import copy
import dataclasses
import json
import os
import re
import statistics
import sys
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.utils.data import IterableDataset

from bench.presets import BALANCED, NO_RESHARD

NAME = "qwen3_random_rows"
CUTS = {"30B-A3B-12L": 12, "30B-A3B-6L": 6}  # the first blocks of torchtitan's 30B-A3B
FLAVORS = {"qwen3-0.6b": "0.6B", "qwen3-8b": "8B"}
FLAVORS |= {f"qwen3-{cut.lower()}": cut for cut in CUTS}
# step: 20  loss: 12.1  grad_norm: 0.5  memory: 20.41GiB(14.60%)  tps: 56,970  tflops: ...
LINE = re.compile(r"step:\s*(\d+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)")
# torchtitan logs the reserved peak only
ALLOCATED = re.compile(r"allocated at the peak: ([\d.]+)GiB, retries: (\d+)")
ENVIRONMENT = re.compile(r"environment: (\{.*\})")
VERSION = "0.2.2"  # 0.3 registers models in another way
PACKAGES = f"torchtitan=={VERSION}"


def installed() -> bool:
    try:
        return version("torchtitan") == VERSION
    except PackageNotFoundError:
        return False


def gpus_of(row: dict) -> int:
    return row["gpus"] or torch.cuda.device_count()


def ranks_of_row(row: dict) -> int:
    """Over how many GPUs each row is spread: its context parallelism."""
    found = re.search(r"--sequence_parallel (\d+)", row["flags"])
    return int(found[1]) if found else 1


def rows_of_step(row: dict) -> int:
    return row["micro"] * row["ga"] * gpus_of(row) // ranks_of_row(row)


def logged_of(row: dict) -> int:
    """Steps between two lines of its log: a step of a long row takes seconds."""
    return 10 if row["seq_len"] < 65_536 else 1


def steps_of(row: dict) -> int:
    return max(row["steps"], 4 * logged_of(row))


def command_of(row: dict) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={gpus_of(row)}", "--local-ranks-filter=0", "--tee=3"]
    command += ["-m", "torchtitan.train"]
    options = {
        "job.dump_folder": "/tmp/torchtitan",
        "model.name": NAME,
        "model.flavor": FLAVORS[row["model"].rsplit("/", 1)[-1]],
        "model.hf_assets_path": "/tmp",
        "metrics.log_freq": logged_of(row),
        "training.local_batch_size": row["micro"],
        "training.global_batch_size": rows_of_step(row),
        "training.seq_len": row["seq_len"],
        "training.steps": steps_of(row),
        "activation_checkpoint.mode": "full" if row["ckpt"] else "none",
        "experimental.custom_import": "bench.peers.torchtitan",
    }
    if found := re.search(r"--expert_parallel (\d+)", row["flags"]):
        options["parallelism.expert_parallel_degree"] = found[1]
    if ranks_of_row(row) > 1:
        options["parallelism.context_parallel_degree"] = ranks_of_row(row)
    if NO_RESHARD in row["flags"]:  # as ours by default
        options["parallelism.fsdp_reshard_after_forward"] = "never"
    if found := re.search(r"--fp8 (\w+)", row["flags"]):  # by torchao
        options["model.converters"] = "quantize.linear.float8"
        options["quantize.linear.float8.recipe_name"] = found[1]
        options["quantize.linear.float8.filter_fqns"] = "output"  # the head stays as in ours
    command += ["--compile.enable", "--metrics.disable_color_printing"]
    command += ["--debug.moe_force_load_balance"] * (BALANCED in row["flags"])
    return command + [part for name, value in options.items() for part in (f"--{name}", str(value))]


def read(row: dict, text: str) -> dict | None:
    """The figures in torchtitan's output, in the form of our summary; None if it has too few."""
    logged = [(float(m), int(t.replace(",", ""))) for _, m, t in LINE.findall(text)]
    allocated = [(float(m), int(n)) for m, n in ALLOCATED.findall(text)]
    env = ENVIRONMENT.search(text)
    if len(logged) < 3 or not allocated or not env:
        return None
    per_gpu = [tps for _, tps in logged[-3:]]  # the first line includes compilation
    slots = rows_of_step(row) * row["seq_len"] / gpus_of(row)  # of a step, for each GPU
    times = [slots / tps * 1e3 for tps in per_gpu]
    summary = {
        "median_step_ms": statistics.median(times),
        "spread_step_ms": [min(times), max(times)],
        "median_slots_per_s": statistics.median(per_gpu) * gpus_of(row),
        "peak_mem_gb": [max(memory for memory, _ in allocated)],
        "reserved_gb": [max(memory for memory, _ in logged)],
        "alloc_retries": allocated[-1][1],
        "late_alloc_retries": allocated[-1][1] - allocated[:2][-1][1],  # line 2: step 10
    }
    config = {"global_batch": rows_of_step(row), "seq_len": row["seq_len"]}
    return {"summary": summary, "config": config, "env": json.loads(env[1])}


# ---------------------------------------------------------------- inside torchtitan


class RandomRows(IterableDataset):
    """Endless (inputs, labels)."""

    def __init__(self, seq_len: int, rank: int):
        generator = torch.Generator().manual_seed(rank)
        self.rows = torch.randint(151_643, (64, seq_len + 1), generator=generator)

    def __iter__(self):
        while True:
            for row in self.rows:
                yield {"input": row[:-1]}, row[1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def _register() -> None:
    """Register the model with torchtitan."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.qwen3 import get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec

    from llm_demo.core.mesh import World
    from llm_demo.run.folder import environment

    class Metrics(MetricsProcessor):
        """Also prints what our rows have and torchtitan's log lacks."""

        def __init__(self, job_config, parallel_dims, model_args):
            super().__init__(job_config, parallel_dims)
            rank, size, local = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
            env = environment(World(rank, size, local, torch.device("cuda", local)))
            env["versions"]["torchtitan"] = version("torchtitan")
            print("environment:", json.dumps(env), flush=True)

        def log(self, *args, **kwargs):
            stats = torch.cuda.memory_stats()
            peak = f"{stats['allocated_bytes.all.peak'] / 2**30:.3f}GiB"
            retries = stats["num_alloc_retries"]
            print(f"allocated at the peak: {peak}, retries: {retries}", flush=True)
            super().log(*args, **kwargs)  # resets the peak

    def loader(dp_world_size, dp_rank, tokenizer, job_config, infinite=True):
        training = job_config.training
        return ParallelAwareDataloader(
            RandomRows(training.seq_len, dp_rank),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=training.local_batch_size,
        )

    spec = get_train_spec()
    cuts = {name: copy.deepcopy(spec.model_args["30B-A3B"]) for name in CUTS}
    for name, blocks in CUTS.items():
        cuts[name].n_layers = blocks
    spec = dataclasses.replace(
        spec,
        model_args={**spec.model_args, **cuts},
        build_dataloader_fn=loader,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=Metrics,
    )
    register_train_spec(NAME, spec)


if "torchtitan.train" in sys.modules or sys.argv[0].endswith("torchtitan/train.py"):
    _register()
