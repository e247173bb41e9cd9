"""torchtitan's Qwen3 on rows of random tokens: FSDP2 and compile as it ships them, beside ours.

torchtitan imports this module itself (--experimental.custom_import) and finds a model with its own
layers, loss and optimizer, and with data that takes no time to load."""

import dataclasses
import importlib.util
import json
import os
import re
import statistics
import sys

NAME = "qwen3_random_rows"
FLAVORS = {"qwen3-0.6b": "0.6B", "qwen3-8b": "8B"}
# step: 20  loss: 12.1  grad_norm: 0.5  memory: 20.41GiB(14.60%)  tps: 56,970  tflops: ...
LINE = re.compile(r"step:\s*(\d+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)")
# printed by us: that memory is what its allocator has reserved, ours what is allocated
ALLOCATED = re.compile(r"allocated at the peak: ([\d.]+)GiB")
ENVIRONMENT = re.compile(r"environment: (\{.*\})")
LOGGED = 10  # steps between two lines of its log


def measure(row: dict, timeout: float) -> dict:
    """Run torchtitan in the place of our launcher; JSON like that of our rows, with less in it."""
    from bench.run import environment_of, failure, run_command
    from llm_demo.launch import count_gpus

    if not importlib.util.find_spec("torchtitan"):
        return {"status": "failed", "error": "torchtitan is not installed", "command": ""}
    gpus, steps = row["gpus"] or count_gpus(), max(row["steps"], 4 * LOGGED)
    options = {
        "job.dump_folder": "/tmp/torchtitan",
        "model.name": NAME,
        "model.flavor": FLAVORS[row["model"].rsplit("/", 1)[-1]],
        "model.hf_assets_path": "/tmp",
        "metrics.log_freq": LOGGED,
        "training.local_batch_size": row["micro"],
        "training.global_batch_size": row["micro"] * row["ga"] * gpus,
        "training.seq_len": row["seq_len"],
        "training.steps": steps,
        "activation_checkpoint.mode": "full" if row["ckpt"] else "none",
        "experimental.custom_import": "bench.peers.torchtitan",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={gpus}", "--local-ranks-filter=0", "--tee=3"]
    command += ["-m", "torchtitan.train", "--compile.enable", "--metrics.disable_color_printing"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    code, text = run_command(command, environment_of(row), timeout)
    found = [(float(m), int(t.replace(",", ""))) for _, m, t in LINE.findall(text)]
    allocated = [float(m) for m in ALLOCATED.findall(text)]
    result = {"command": " ".join(command[1:])}
    env = ENVIRONMENT.search(text)
    if code or len(found) < 3 or not allocated or not env:
        return {**failure(code, text), **result}
    per_gpu = [tps for _, tps in found[-3:]]  # the first line holds the compilation
    slots = row["micro"] * row["ga"] * gpus * row["seq_len"]
    times = [slots / gpus / tps * 1e3 for tps in per_gpu]
    summary = {
        "median_step_ms": statistics.median(times),
        "spread_step_ms": [min(times), max(times)],
        "median_slots_per_s": statistics.median(per_gpu) * gpus,
        "peak_mem_gb": [max(allocated)],
        "reserved_mem_gb": [max(memory for memory, _ in found)],
    }
    config = {"global_batch": row["micro"] * row["ga"] * gpus, "seq_len": row["seq_len"]}
    env = json.loads(env[1])
    return {"status": "ok", **result, "summary": summary, "config": config, "env": env}


def _register() -> None:
    from importlib.metadata import version

    import torch
    from torch.utils.data import IterableDataset
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.qwen3 import get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec

    from llm_demo.dist import World
    from llm_demo.environment import environment

    class RandomRows(IterableDataset):
        def __init__(self, seq_len, rank):
            rows = torch.Generator().manual_seed(rank)
            self.rows = torch.randint(151_643, (64, seq_len + 1), generator=rows)

        def __iter__(self):
            while True:
                for row in self.rows:
                    yield {"input": row[:-1]}, row[1:]

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    def loader(dp_world_size, dp_rank, tokenizer, job_config, infinite=True):
        training = job_config.training
        return ParallelAwareDataloader(
            RandomRows(training.seq_len, dp_rank),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=training.local_batch_size,
        )

    class Metrics(MetricsProcessor):
        """Its own, and what our rows have beside it."""

        def __init__(self, job_config, parallel_dims, model_args):
            super().__init__(job_config, parallel_dims)
            rank, size, local = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
            env = environment(World(rank, size, local, torch.device("cuda", local)))
            env["versions"]["torchtitan"] = version("torchtitan")
            print("environment:", json.dumps(env), flush=True)

        def log(self, *args, **kwargs):  # resets the peak
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"allocated at the peak: {peak:.3f}GiB", flush=True)
            super().log(*args, **kwargs)

    spec = dataclasses.replace(
        get_train_spec(),
        build_dataloader_fn=loader,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=Metrics,
    )
    register_train_spec(NAME, spec)


if "torchtitan.train" in sys.modules or sys.argv[0].endswith("torchtitan/train.py"):
    _register()
