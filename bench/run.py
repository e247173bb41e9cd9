"""Measure rows of (engine, micro-batch, accumulation, checkpointing, dtype, ...) one after another.

Each row is a run of the real launcher, as a user would start it; what it left in summary.json and
env.json becomes one JSON under bench/results/. A row that fails, or runs out of memory, is a row
that says so. Ctrl-C keeps what is done; --resume goes on."""

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.peers import torchtitan
from bench.presets import DEFAULTS, PRESETS
from llm_demo.args import PlainParser, regex, whole
from llm_demo.errors import UserError
from llm_demo.files import ROOT

RESULTS = ROOT / "bench/results"
LAUNCHERS = {"fsdp": "fsdp/launch_fsdp.sh", "pp": "pp/launch_pp.sh"}


def main() -> int:
    args = make_parser().parse_args()
    rows = grid(args)
    folder = RESULTS / (args.out or args.preset or "grid")
    names = [name_of(row) for row in rows]
    done = {n for n in names if (folder / f"{n}.json").exists()}
    if done and not (args.resume or args.overwrite):
        raise UserError(f"{folder} holds {len(done)} of these rows: --resume or --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for i, (name, row) in enumerate(zip(names, rows, strict=True), 1):
        file = folder / f"{name}.json"
        if args.resume and name in done and json.loads(file.read_text())["status"] == "ok":
            print(f"[{i}/{len(rows)}] {name}: done before", flush=True)
            continue
        print(f"[{i}/{len(rows)}] {name} ...", end=" ", flush=True)
        started = time.time()
        result = measure(row, args.timeout)
        result |= {"row": row, "wall_s": round(time.time() - started, 1)}
        part = file.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(file)  # whole or not at all
        failed += result["status"] != "ok"
        print(describe(result), flush=True)
    print(f"results: {folder}")
    return 1 if failed else 0


def make_parser() -> argparse.ArgumentParser:
    parser = PlainParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", choices=PRESETS, help="a set of rows; below: rows of your own")
    for name, kind, text in (
        ("engines", str, "fsdp, pp, torchtitan"),
        ("micro", whole(1), "rows of a micro-batch"),
        ("ga", whole(1), "micro-batches a step"),
        ("ckpt", str, "true, false: activation checkpointing"),
        ("dtype", str, "fp32, bf16, fp16"),
        ("seq_len", whole(1), "token slots of a row"),
        ("model", str, "folder or hub id"),
        ("gpus", whole(), "processes; 0: all GPUs"),
        ("data", str, "full: rows of random tokens; packed: documents; or a data file"),
    ):
        parser.add_argument(
            f"--{name}", type=lambda s, k=kind: [k(x) for x in s.split(",")],
            help=f"{text}; several with commas", metavar="A,B",
        )  # fmt: skip
    parser.add_argument("--steps", type=whole(1), help="optimizer steps of a row (default 32)")
    parser.add_argument("--flags", default=None, help='further flags: --flags="--a 1"')
    parser.add_argument("--env", default=None, help='further environment, "NAME=value ..."')
    parser.add_argument("--only", type=regex, help="rows whose name this regular expression finds")
    parser.add_argument("--out", help="folder below bench/results/; default: the preset's name")
    parser.add_argument("--timeout", type=whole(1), default=1800, help="seconds a row may take")
    parser.add_argument("--resume", action="store_true", help="measure what is missing or failed")
    parser.add_argument("--overwrite", action="store_true", help="measure all again")
    return parser


def grid(args) -> list[dict]:
    """The rows asked for: a preset's, with the flags given here instead; or all combinations."""
    given = {"engine": args.engines, "ckpt": args.ckpt and [c == "true" for c in args.ckpt]}
    for name in ("micro", "ga", "dtype", "seq_len", "model", "gpus", "data"):
        given[name] = getattr(args, name)
    for name in ("steps", "flags", "env"):
        value = getattr(args, name)
        given[name] = None if value is None else [value]
    given = {k: v for k, v in given.items() if v is not None}
    if not (args.preset or given):
        raise UserError("nothing to measure: give a --preset, or --engines, --micro, ... (--help)")
    combinations = [dict(zip(given, x, strict=True)) for x in itertools.product(*given.values())]
    bases = PRESETS[args.preset] if args.preset else [{}]
    rows = {}
    for base, chosen in itertools.product(bases, combinations):
        row = {**DEFAULTS, **base, **chosen}
        rows[name_of(row)] = row
    if bad := {row["engine"] for row in rows.values()} - {*LAUNCHERS, "torchtitan"}:
        raise UserError(f"--engines {bad.pop()}: choose from {', '.join(LAUNCHERS)}, torchtitan")
    rows = [row for name, row in rows.items() if re.search(args.only or "", name)]
    if not rows:
        raise UserError(f"--only {args.only}: no such row")
    return rows


def name_of(row: dict) -> str:
    """A file name that holds every setting that differs from its usual value."""
    parts = [row["engine"], Path(row["model"]).name, f"s{row['seq_len']}", f"m{row['micro']}"]
    parts += [f"ga{row['ga']}", row["dtype"]] + ["ckpt"] * row["ckpt"]
    parts += [f"{row['gpus']}gpus"] * bool(row["gpus"])
    parts += [] if row["data"] == "full" else [Path(row["data"]).stem]
    extra = f"{row['flags']} {row['env']}".replace("--", "").replace("=", " ").replace(",", ".")
    return "-".join([*parts, *extra.split()]).replace("/", "_")


def measure(row: dict, timeout: float) -> dict:
    """Run a row. Returns its status ("ok", "out of memory" or "failed"), command and figures."""
    peer = row["engine"] == "torchtitan"
    if peer and not torchtitan.installed():
        return {"status": "failed", "error": "torchtitan is not installed", "command": ""}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = torchtitan.command_of(row) if peer else command_of(row, out)
        code, text = run_command(command, environment_of(row), timeout)
        files = () if code or peer else ("summary", "env", "config")
        found = {file: json.loads((out / f"{file}.json").read_text()) for file in files}
        if peer and not code:
            found = torchtitan.read(row, text)
    outcome = {"status": "ok", **found} if found else failure(code, text)
    result = json.dumps({"command": " ".join(command), **outcome})
    # paths of this machine mean nothing elsewhere
    paths = {f"{scratch}/": "OUT/", f"{cache()}/": "CACHE/", sys.executable: "python"}
    for path, name in {**paths, f"{ROOT}/": ""}.items():
        result = result.replace(path, name)
    return json.loads(result)


def command_of(row: dict, out: Path) -> list[str]:
    model = str(ROOT / row["model"]) if (ROOT / row["model"]).is_dir() else row["model"]
    flags = {
        "model_name_or_path": model,
        "train_json": data_of(row, model),
        "eval_json": "none",
        "sample_tokens": 0,
        "save": "false",
        "seq_len": row["seq_len"],
        "micro_batch_size": row["micro"],
        "grad_accum_steps": row["ga"],
        "use_activation_checkpointing": str(row["ckpt"]).lower(),
        "dtype": row["dtype"],
        "max_steps": row["steps"],
        "lr": 1e-4,
        "warmup_steps": 2,
        "output_dir": out,
    }
    if not (Path(model) / "tokenizer.json").is_file() and Path(model).is_dir():
        flags["tokenizer_name_or_path"] = ROOT / "models/qwen3-tiny"
    command = ["bash", str(ROOT / LAUNCHERS[row["engine"]])]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    return command + row["flags"].split()


def environment_of(row: dict) -> dict:
    env = {**os.environ, "PYTHON": sys.executable}
    env |= dict(pair.split("=", 1) for pair in row["env"].split())
    if row["gpus"]:
        env["NPROC_PER_NODE"] = str(row["gpus"])
    if row["engine"] == "torchtitan":
        env[torchtitan.ROW] = json.dumps(row)
    return env


def data_of(row: dict, model: str) -> str:
    """A file of random tokens: rows that are full, or documents as long as GSM8K's.

    Random, because only the step is timed; the same for everybody, because the seed is."""
    if row["data"] not in ("full", "packed"):
        return row["data"]
    vocab, S = json.loads((Path(model) / "config.json").read_text())["vocab_size"], row["seq_len"]
    root = cache()
    file = root / f"bench-{row['data']}-{vocab}-{S}.jsonl"
    if file.exists():
        return str(file)
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(512 if row["data"] == "full" else max(512, 256 * S // 160)):
        if row["data"] == "full":
            document = {"input_ids": rng.integers(0, vocab, S).tolist()}
        else:  # 160 tokens in the mean, the last two thirds of them learnt
            n = int(np.clip(rng.lognormal(5.0, 0.35), 16, S))
            ids = rng.integers(0, vocab, n).tolist()
            document = {"input_ids": ids, "labels": [-100] * (n // 3) + ids[n // 3 :]}
        lines.append(json.dumps(document))
    root.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text("\n".join(lines) + "\n")
    part.replace(file)
    return str(file)


def cache() -> Path:
    return Path(os.environ.get("LLM_DEMO_CACHE") or Path.home() / ".cache/llm_demo")


def run_command(command: list[str], env: dict, timeout: float) -> tuple[int, str]:
    """(exit code, output) of a command; Ctrl-C and the limit end it and its children."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = child.wait(timeout)
        except (KeyboardInterrupt, subprocess.TimeoutExpired) as e:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            if isinstance(e, KeyboardInterrupt):
                raise
            code = -1
            output.write(f"\nerror: took longer than {timeout:.0f} s\n")
        output.seek(0)
        return code, output.read()


def failure(code: int, text: str) -> dict:
    """What a row that failed leaves: its status, its own words, the end of its output."""
    # not C++'s stacks: once NCCL's, one a second, were all that was left of a row
    told = [line for line in text.strip().splitlines() if not line.startswith("frame #")]
    errors = [line for line in told if line.startswith("error:")]
    oom = "out of GPU memory" in text or "OutOfMemoryError" in text
    return {
        "status": "out of memory" if oom else "failed",
        "exit_code": code,
        "error": errors[0] if errors else (told or ["no output"])[-1],
        "output": "\n".join(told)[-4000:],
    }


def describe(result: dict) -> str:
    if result["status"] != "ok":
        return f"{result['status']}: {result['error'][:160]}"
    s = result["summary"]
    return f"{s['median_step_ms']:.1f} ms, {s['median_slots_per_s']:,.0f} slots/s, " + " / ".join(
        f"{m:.1f}" for m in s["peak_mem_gb"]
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the row would run on
    try:
        sys.exit(main())
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; what is done is kept, --resume goes on", file=sys.stderr)
        sys.exit(130)
