"""torchtitan's Qwen3 on rows of random tokens: FSDP2 and compile as it ships them, beside ours.

torchtitan imports this module itself and finds a model with its own layers, loss and optimizer, and
with data that takes no time to load. 0.2 does so by --experimental.custom_import, 0.3 by --module.
0.3 needs a newer torch than 2.11, and asks for it only in an import that fails."""

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
ROW = "BENCH_TORCHTITAN_ROW"  # for 0.3: what to measure, as JSON


def measure(row: dict, timeout: float) -> dict:
    """Run torchtitan in the place of our launcher; JSON like that of our rows, with less in it."""
    from bench.run import environment_of, failure, run_command
    from llm_demo.launch.__main__ import count_gpus

    if not importlib.util.find_spec("torchtitan"):
        return {"status": "failed", "error": "torchtitan is not installed", "command": ""}
    gpus, steps = row["gpus"] or count_gpus(), max(row["steps"], 4 * LOGGED)
    env = environment_of(row)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={gpus}", "--local-ranks-filter=0", "--tee=3"]
    command += ["-m", "torchtitan.train"]
    if importlib.util.find_spec("torchtitan.protocols.train_spec"):
        command += ["--compile.enable", "--metrics.disable_color_printing"]
        for name, value in options_of(row, steps, gpus).items():
            command += [f"--{name}", str(value)]
    else:
        command += ["--module", "bench.peers.torchtitan", "--config", NAME]
        env[ROW] = json.dumps({**row, "steps": steps, "gpus": gpus})
    code, text = run_command(command, env, timeout)
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


def options_of(row: dict, steps: int, gpus: int) -> dict:
    """0.2's flags."""
    return {
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


def random_rows(seq_len: int, rank: int, positions: bool):
    """An endless dataset of (inputs, labels). positions: with each token's place in its row."""
    import torch
    from torch.utils.data import IterableDataset

    class RandomRows(IterableDataset):
        def __init__(self):
            rows = torch.Generator().manual_seed(rank)
            self.rows = torch.randint(151_643, (64, seq_len + 1), generator=rows)
            self.more = {"positions": torch.arange(seq_len)} if positions else {}

        def __iter__(self):
            while True:
                for row in self.rows:
                    yield {"input": row[:-1], **self.more}, row[1:]

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    return RandomRows()


def print_environment() -> None:
    from importlib.metadata import version

    import torch

    from llm_demo.device import World
    from llm_demo.run import environment

    rank, size, local = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    env = environment(World(rank, size, local, torch.device("cuda", local)))
    env["versions"]["torchtitan"] = version("torchtitan")
    print("environment:", json.dumps(env), flush=True)


def print_peak() -> None:
    """Before torchtitan logs a line, which resets the peak."""
    import torch

    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"allocated at the peak: {peak:.3f}GiB", flush=True)


def qwen3_random_rows():
    """0.3's configuration, of the row in the environment."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.qwen3 import config_registry, model_registry

    kept = {"kw_only": True, "slots": True}

    class Rows(ParallelAwareDataloader):
        @dataclasses.dataclass(**kept)
        class Config(ParallelAwareDataloader.Config):
            pass

        def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **unused):
            rows = random_rows(seq_len, dp_rank, positions=True)
            super().__init__(rows, dp_rank, dp_world_size, batch_size=local_batch_size)

    class NoTokenizer(BaseTokenizer):
        @dataclasses.dataclass(**kept)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **unused):
            super().__init__()

        encode = decode = get_vocab_size = None

    class Metrics(MetricsProcessor):
        @dataclasses.dataclass(**kept)
        class Config(MetricsProcessor.Config):
            pass

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            print_environment()

        def log(self, *args, **kwargs):
            print_peak()
            super().log(*args, **kwargs)

    row = json.loads(os.environ[ROW])
    config = config_registry.qwen3_0_6b()
    config.model_spec = model_registry(FLAVORS[row["model"].rsplit("/", 1)[-1]])
    config.dump_folder = "/tmp/torchtitan"
    config.metrics = Metrics.Config(log_freq=LOGGED, disable_color_printing=True)
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Rows.Config()
    config.compile = CompileConfig(enable=True)
    config.activation_checkpoint = FullAC.Config() if row["ckpt"] else None
    config.training = TrainingConfig(
        local_batch_size=row["micro"],
        global_batch_size=row["micro"] * row["ga"] * row["gpus"],
        seq_len=row["seq_len"],
        steps=row["steps"],
    )
    return config


def _register() -> None:
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.qwen3 import get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec

    def loader(dp_world_size, dp_rank, tokenizer, job_config, infinite=True):
        training = job_config.training
        return ParallelAwareDataloader(
            random_rows(training.seq_len, dp_rank, positions=False),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=training.local_batch_size,
        )

    class Metrics(MetricsProcessor):
        """Its own, and what our rows have beside it."""

        def __init__(self, job_config, parallel_dims, model_args):
            super().__init__(job_config, parallel_dims)
            print_environment()

        def log(self, *args, **kwargs):
            print_peak()
            super().log(*args, **kwargs)

    spec = dataclasses.replace(
        get_train_spec(),
        build_dataloader_fn=loader,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=Metrics,
    )
    register_train_spec(NAME, spec)


if "torchtitan.train" in sys.modules or sys.argv[0].endswith("torchtitan/train.py"):
    if importlib.util.find_spec("torchtitan.protocols.train_spec"):
        _register()
