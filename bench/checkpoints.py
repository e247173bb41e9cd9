"""Measure what checkpoints cost: python -m bench.checkpoints --out my-box/checkpoints

Two tables, each with a row for every script. save compares three runs: one saves in the background,
one waits for its checkpoints, one resumes from the first checkpoint. import is the peak of host
memory while a model is read, summed over all processes, less that of a start with the bundled tiny
model."""

import contextlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
from huggingface_hub import save_torch_state_dict

from bench import store
from bench.presets import DEFAULTS, SMALL
from bench.run import command_of, environment_of, run_command
from llm_demo.core.decoder import skeleton
from llm_demo.core.mesh import World
from llm_demo.flags.parsing import PlainParser, whole
from llm_demo.machine import process
from llm_demo.machine.device import DTYPES
from llm_demo.machine.files import ROOT
from llm_demo.model.source import load_config
from llm_demo.run.checkpoint_files import read_tensors, shapes_of
from llm_demo.run.folder import environment
from llm_demo.run.job import LOADED

LOGGED = ("train/loss", "train/grad_norm")


def main() -> None:
    text = __doc__.split("\n\n")[0]
    parser = PlainParser(prog="python -m bench.checkpoints", description=text)
    parser.add_argument("--engines", default="fsdp,pp")
    parser.add_argument("--model", default=SMALL, help="model to save and resume")
    parser.add_argument("--import_model", default=SMALL, help="model to read, with random weights")
    parser.add_argument("--import_dtype", default="bf16", choices=DTYPES, help="dtype of its file")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--steps", type=whole(1), default=40)
    parser.add_argument("--save_every", type=whole(1), default=20)
    parser.add_argument("--seq_len", type=whole(8), default=1024)
    parser.add_argument("--flags", default="", help='for the launcher: --flags="--attn_impl math"')
    parser.add_argument("--only", choices=["save", "import"])
    parser.add_argument("--out", default="checkpoints", help="folder in bench/results/")
    args = parser.parse_args()
    for engine in args.engines.split(","):
        for kind, measure in (("save", measure_save), ("import", measure_import)):
            if args.only in (None, kind):
                result = measure(engine, args)
                script = f"{engine} ({args.flags})" if args.flags else engine
                result["columns"] = {"script": script, **result["columns"]}
                print(result["columns"], flush=True)
                store.write(f"{args.out}/{kind}", result)


def command(engine: str, args, out: Path, *flags: str, model: str | None = None) -> list[str]:
    """Return the command line of a launcher for a row of the benchmark; `flags` come last."""
    row = {**DEFAULTS, "engine": engine, "micro": 8, "ga": 1 if engine == "fsdp" else 2}
    row |= {"model": model or args.model, "dtype": args.dtype, "seq_len": args.seq_len}
    row |= {"steps": args.steps, "flags": args.flags}
    return [*command_of(row, out), *flags]


def launch(command: list[str]) -> None:
    code, text = run_command(command, environment_of(DEFAULTS), 3600)
    if code:
        sys.exit(f"error: {' '.join(command)}\n{text[-3000:]}")


# ---------------------------------------------------------------- save and resume


def measure_save(engine: str, args) -> dict:
    """Compare three runs: two save in the background, one resumes."""
    with tempfile.TemporaryDirectory() as scratch:
        runs = [Path(scratch) / name for name in ("first", "second", "resumed")]
        save = ["--save", "true", "--save_every", str(args.save_every), "--keep_last", "0"]
        launch(command(engine, args, runs[0], *save))
        launch(command(engine, args, runs[1], *save))
        first = runs[0] / f"checkpoints/step_{args.save_every:08d}"
        launch(command(engine, args, runs[2], *save, "--resume", str(first)))
        verified = re.search(
            r"checked and read in ([\d.]+) s", (runs[2] / "train.log").read_text("utf-8")
        )
        repeated, resumed = (difference(runs[0], run, args.save_every) for run in runs[1:])
        background = records(runs[0])
        summary, env = (
            json.loads((runs[0] / f"{f}.json").read_text("utf-8")) for f in ("summary", "env")
        )
    *later, waited = [r for r in background if "save/bytes" in r]  # a run waits for its last save
    step, writing = summary["median_step_ms"], meanwhile(background, later)
    columns = {
        "bytes": f"{later[0]['save/bytes'] / 1e9:.2f} GB",
        "blocking save": seconds([waited["save/stall_s"]]),
        "background save": seconds(r["save/seconds"] for r in later),
        "training paused": seconds(r["save/stall_s"] for r in later),
        "step during a save": f"{writing:.0f} ms ({step:.0f} without)",
        "verify and read": f"{verified[1]} s",
        "difference after resuming": resumed,
        "difference of a second run": repeated,
    }
    return {"columns": columns, "saves": {"background": later, "waiting": [waited]}, "env": env}


def seconds(values) -> str:
    return ", ".join(f"{v:.2f}" for v in values) + " s"


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in open(run / "metrics.jsonl", encoding="utf-8")]


def meanwhile(run: list[dict], saves: list[dict]) -> float:
    """Return the median ms of the steps during which a checkpoint was being written."""
    during, left = [], 0.0
    begun = {r["step"]: r["save/seconds"] - r["save/stall_s"] for r in saves}
    for r in (r for r in run if "train/loss" in r):
        if left > 0:
            during.append(r["perf/step_ms"])
        left = max(left - r["perf/step_ms"] / 1e3, begun.get(r["step"], 0))
    return statistics.median(during)


def difference(one: Path, other: Path, after: int) -> str:
    """Return the largest relative difference between two runs in LOGGED after step `after`.

    "none" if there is no difference and all tensors of the last checkpoints are bit-equal."""
    a, b = ({r["step"]: r for r in records(run) if "train/loss" in r} for run in (one, other))
    differences = [abs(a[s][k] - b[s][k]) / abs(a[s][k]) for s in b if s > after for k in LOGGED]
    one, other = (tensors(run / f"checkpoints/step_{max(a):08d}") for run in (one, other))
    if not max(differences) and all(torch.equal(t, other[name]) for name, t in one.items()):
        return "none"
    return f"{max(differences):.1e}"


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read all weights and moments of a checkpoint, unsharded."""
    weights = {name: torch.empty(shape) for name, shape in shapes_of(path).items()}
    read_tensors(path, weights)
    return weights


# ---------------------------------------------------------------- reading a model


def measure_import(engine: str, args) -> dict:
    """Measure the peak of host memory, summed over processes, from the start to step 1."""
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        size = write_random(ROOT / args.import_model, model, DTYPES[args.import_dtype])
        tiny = str(ROOT / "models/qwen3-tiny")
        almost_empty = command(engine, args, Path(scratch) / "a", "--dry_run", model=tiny)
        watch(almost_empty)  # the first start also tests kernels, in processes of their own
        least, _ = watch(almost_empty)
        full = command(engine, args, Path(scratch) / "b", "--dry_run", model=str(model))
        most, took = watch(full)
    columns = {
        "model": Path(args.import_model).name,
        "file": f"{size / 1e9:.2f} GB ({args.import_dtype})",
        "peak host memory": f"{(most - least) / 1e9:.2f} GB",
        "share of the file": f"{(most - least) / size:.2f}",
        "start to step 1": f"{took:.0f} s",
    }
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    env = environment(World(0, 1, 0, device))
    return {"columns": columns, "bytes": size, "peak": most, "without": least, "env": env}


def write_random(config_of: Path, folder: Path, dtype: torch.dtype) -> int:
    """Write a Hugging Face folder with random weights, in shards. Returns the bytes of weights."""
    folder.mkdir(parents=True)
    for file in (*config_of.glob("*.json"), *(ROOT / "models/qwen3-tiny").glob("tok*")):
        if "safetensors" not in file.name:
            shutil.copy(file, folder / file.name)
    noise = torch.randn(1 << 20).mul_(0.02).to(dtype)
    weights = {}
    for name, p in skeleton(load_config(folder, 8), "math").named_parameters():
        repeats = -(-p.numel() // len(noise))
        weights[name] = noise.repeat(repeats)[: p.numel()].view(p.shape).clone()
    save_torch_state_dict(weights, folder, max_shard_size="4GB")
    return sum(t.nbytes for t in weights.values())


def watch(command: list[str]) -> tuple[int, float]:
    """Run a dry run. Returns the peak of its processes' resident bytes, summed, until the model is
    loaded, and the run's seconds. Its forward pass would gather weights in a CPU's memory."""
    started, seen, done = time.time(), [0], threading.Event()

    def sample():
        while not done.wait(0.02):
            seen.append(resident())

    sampler = threading.Thread(target=sample)
    sampler.start()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child, text = subprocess.Popen(command, env=environment_of(DEFAULTS), **pipes), ""
    try:
        for line in child.stdout:
            text += line
            if line.startswith(LOADED):
                done.set()
    finally:
        done.set()
        sampler.join()
    if child.wait():
        sys.exit(f"error: {' '.join(command)}\n{text[-3000:]}")
    return max(seen), time.time() - started


def resident() -> int:
    """Return the resident bytes of all processes below this one."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            total += child.memory_info().rss
    return total


if __name__ == "__main__":
    process.command(main)
