"""What checkpoints cost: python -m bench.checkpoints --out my-box/checkpoints

For each script, by its launcher: steps with checkpoints in the background, the same with training
waiting for them, and the first run gone on from its first checkpoint; do they end alike? And the
host's memory while a model is read: the peak over all processes, beyond what the same start takes
with next to no weights."""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from bench.presets import DEFAULTS, SMALL
from bench.run import RESULTS, command_of, environment_of, run_command
from llm_demo.device import DTYPES, World
from llm_demo.files import ROOT
from llm_demo.model.decoder import skeleton
from llm_demo.model.source import load_config
from llm_demo.run.checkpoint_files import read, shapes_of
from llm_demo.run.environment import environment

LOGGED = ("train/loss", "train/grad_norm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--engines", default="fsdp,pp")
    parser.add_argument("--model", default=SMALL, help="to save and go on with")
    parser.add_argument("--import_model", default=SMALL, help="to read, with random weights")
    parser.add_argument("--import_dtype", default="bf16", choices=DTYPES, help="of its file")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save_every", type=int, default=20)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--flags", default="", help='further flags: --flags="--attn_impl math"')
    parser.add_argument("--only", choices=["save", "import"])
    parser.add_argument("--out", default="checkpoints", help="folder below bench/results/")
    args = parser.parse_args()
    for engine in args.engines.split(","):
        for kind, measure in (("save", measure_save), ("import", measure_import)):
            if args.only in (None, kind):
                result = measure(engine, args)
                print(result["columns"], flush=True)
                name = "-".join([engine, *args.flags.replace("--", "").split()])
                file = RESULTS / args.out / kind / f"{name}.json"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def command(engine: str, args, out: Path, *flags: str, model: str | None = None) -> list[str]:
    """The launcher's command line, as the benchmark's rows have it, with `flags` the last word."""
    row = {**DEFAULTS, "engine": engine, "micro": 8, "ga": 1 if engine == "fsdp" else 2}
    row |= {"model": model or args.model, "dtype": args.dtype, "seq_len": args.seq_len}
    row |= {"steps": args.steps, "flags": args.flags}
    return [*command_of(row, out), *flags]


def launch(command: list[str]) -> None:
    code, text = run_command(command, environment_of(DEFAULTS), 600)
    if code:
        sys.exit(f"error: {' '.join(command)}\n{text[-3000:]}")


# ---------------------------------------------------------------- saving, and going on


def measure_save(engine: str, args) -> dict:
    """Three runs: saving in the background, waiting, and gone on."""
    with tempfile.TemporaryDirectory() as scratch:
        runs = [Path(scratch) / name for name in ("background", "waiting", "resumed")]
        save = ["--save", "true", "--save_every", str(args.save_every), "--keep_last", "0"]
        launch(command(engine, args, runs[0], *save))
        launch(command(engine, args, runs[1], *save, "--save_async", "false"))
        first = runs[0] / f"checkpoints/step_{args.save_every:08d}"
        launch(command(engine, args, runs[2], *save, "--resume", str(first)))
        background, waiting, resumed = map(records, runs)
        found = re.search(r"checked and read in ([\d.]+) s", (runs[2] / "train.log").read_text())
        alike = {
            "two runs": difference(runs[0], runs[1], args.save_every),
            "one run, and gone on": difference(runs[0], runs[2], args.save_every),
        }
        summary, env = (json.loads((runs[0] / f"{f}.json").read_text()) for f in ("summary", "env"))
    later = [r for r in background if "save/bytes" in r][:-1]  # the last one waits
    wait = [r for r in waiting if "save/bytes" in r][:-1]
    step, writing = summary["median_step_ms"], meanwhile(background, later)
    columns = {
        "script": f"{engine} ({args.flags})" if args.flags else engine,
        "bytes": f"{later[0]['save/bytes'] / 1e9:.2f} GB",
        "save, waiting for it": seconds(r["save/stall_s"] for r in wait),
        "in the background": seconds(r["save/seconds"] for r in later),
        "of it training stood still": seconds(r["save/stall_s"] for r in later),
        "step meanwhile": f"{writing:.0f} ms ({step:.0f} without)",
        "checked and read": f"{found[1]} s",
        "gone on, apart": alike["one run, and gone on"],
        "a second run, apart": alike["two runs"],
    }
    return {"columns": columns, "saves": {"background": later, "waiting": wait}, "env": env}


def seconds(values) -> str:
    return ", ".join(f"{v:.2f}" for v in values) + " s"


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in open(run / "metrics.jsonl")]


def meanwhile(run: list[dict], saves: list[dict]) -> float:
    """The median ms of the steps in which a checkpoint was being written."""
    during, left = [], 0.0
    begun = {r["step"]: r["save/seconds"] - r["save/stall_s"] for r in saves}
    for r in (r for r in run if "train/loss" in r):
        if left > 0:
            during.append(r["perf/step_ms"])
        left = max(left - r["perf/step_ms"] / 1e3, begun.get(r["step"], 0))
    return statistics.median(during)


def difference(one: Path, other: Path, after: int) -> str:
    """How far two runs are apart in a number logged after step `after`; "nothing" if not at all and
    the last checkpoint's tensors are equal to the bit."""
    a, b = ({r["step"]: r for r in records(run) if "train/loss" in r} for run in (one, other))
    apart = [
        abs(a[s][k] - b[s][k]) / abs(a[s][k]) for s in b if s > after for k in LOGGED
    ]  # fmt: skip
    one, other = (tensors(run / f"checkpoints/step_{max(a):08d}") for run in (one, other))
    if not max(apart) and all(torch.equal(t, other[name]) for name, t in one.items()):
        return "nothing"
    return f"{max(apart):.1e}"


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint's weights and moments, whole."""
    found = {name: torch.empty(shape) for name, shape in shapes_of(path).items()}
    read(path, found)
    return found


# ---------------------------------------------------------------- reading a model


def measure_import(engine: str, args) -> dict:
    """Peak of the host's memory, summed over processes, from the start up to step 1."""
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        size = write_random(ROOT / args.import_model, model, DTYPES[args.import_dtype])
        given = ["--dry_run"]
        tiny = str(ROOT / "models/qwen3-tiny")
        least_of = command(engine, args, Path(scratch) / "a", *given, model=tiny)
        watch(least_of)  # the first start tries out kernels, in processes of its own
        least, _ = watch(least_of)
        most, took = watch(command(engine, args, Path(scratch) / "b", *given, model=str(model)))
    columns = {
        "script": engine,
        "model": Path(args.import_model).name,
        "file": f"{size / 1e9:.2f} GB ({args.import_dtype})",
        "host memory, peak": f"{(most - least) / 1e9:.2f} GB",
        "of the file": f"{(most - least) / size:.2f}",
        "start to step 1": f"{took:.0f} s",
    }
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    env = environment(World(0, 1, 0, device))
    return {"columns": columns, "bytes": size, "peak": most, "without": least, "env": env}


@torch.no_grad()
def write_random(config_of: Path, folder: Path, dtype: torch.dtype, shard=4e9) -> int:
    """A Hugging Face folder with weights of no meaning, sharded; returns their bytes."""
    folder.mkdir(parents=True)
    for file in (*config_of.glob("*.json"), *(ROOT / "models/qwen3-tiny").glob("tok*")):
        if "safetensors" not in file.name:
            shutil.copy(file, folder / file.name)
    noise = torch.randn(1 << 20).mul_(0.02).to(dtype)
    files, pending, total = {}, {}, 0

    def flush():
        name = f"model-{len(set(files.values())):05d}.safetensors"
        files.update(dict.fromkeys(pending, name))
        save_file(pending, folder / name)
        pending.clear()

    for name, p in skeleton(load_config(folder, 8), "math").named_parameters():
        repeats = -(-p.numel() // len(noise))
        pending[name] = noise.repeat(repeats)[: p.numel()].view(p.shape).clone()
        total += pending[name].nbytes
        if sum(t.nbytes for t in pending.values()) > shard:
            flush()
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def watch(command: list[str]) -> tuple[int, float]:
    """(peak bytes resident in all processes of a command, its seconds)."""
    started, most = time.time(), 0
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, env=environment_of(DEFAULTS), stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            while child.poll() is None:
                most = max(most, resident(child.pid))
                time.sleep(0.02)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)
        if child.returncode:
            output.seek(0)
            sys.exit(f"error: {' '.join(command)}\n{output.read()[-3000:]}")
    return most, time.time() - started


def resident(pid: int) -> int:
    """Bytes of a process and all below it."""
    total = 0
    with contextlib.suppress(psutil.Error):  # gone
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total


if __name__ == "__main__":
    sys.exit(main())
