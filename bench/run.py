"""Measure the training scripts with many settings, one row after another.

A row is one run of a launcher, started as a user would start it, with one set of settings. Its
summary.json, env.json and config.json become one line of bench/results/NAME.jsonl. A row that fails
or runs out of memory is recorded as such. Ctrl-C keeps the completed rows; --resume continues."""

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

from bench import store
from bench.peers import torchtitan, trl, unsloth
from bench.presets import BALANCED, DEFAULTS, ONE_OF, PRESETS, name_of
from llm_demo.core.errors import UserError
from llm_demo.flags.parsing import FALSE, TRUE, PlainParser, regex, whole
from llm_demo.machine.files import PART, ROOT, cache_folder
from llm_demo.machine.process import command
from llm_demo.model.source import find_model

LAUNCHERS = {name: f"{name}/launch_{name}.sh" for name in ("fsdp", "pp", "zero", "fsdp_pp")}
PEERS = {"torchtitan": torchtitan, "trl": trl, "unsloth": unsloth}
ENGINES = [*LAUNCHERS, *PEERS]
MOST_TOKENS = 1 << 22  # of random data: writing 512 rows of 131,072 takes minutes


def main() -> int:
    args = make_parser().parse_args()
    rows = grid(args)
    if args.dry_run:
        for row in rows.values():
            print(f"{name_of(row)}: {in_words(row)}")
        return 0
    out = args.out or args.preset or "grid"
    file, stored = store.file_of(out), {store.key_of(r): r for r in store.read(out)}
    done = {key: stored[key]["status"] for key in rows if key in stored}
    if done and not (args.resume or args.overwrite):
        raise UserError(
            f"{file} already holds {len(done)} of these rows: use --resume or --overwrite"
        )
    failed = 0
    for i, (key, row) in enumerate(rows.items(), 1):
        if args.resume and done.get(key) == "ok":
            print(f"[{i}/{len(rows)}] {name_of(row)}: already measured", flush=True)
            continue
        print(f"[{i}/{len(rows)}] {name_of(row)} ...", end=" ", flush=True)
        started = time.time()
        result = measure(row, args.timeout)
        result |= {"row": row, "wall_s": round(time.time() - started, 1)}
        store.write(out, result)
        failed += result["status"] != "ok"
        print(describe(result), flush=True)
    print(f"results: {file}")
    return 1 if failed else 0


def make_parser() -> argparse.ArgumentParser:
    parser = PlainParser(
        prog="python -m bench.run",
        description=f"{__doc__.splitlines()[0]} Flags that take A,B measure all combinations.",
    )
    parser.add_argument("--preset", choices=PRESETS, help="a set of rows; flags override it")
    for name, kind, text in (
        ("engines", str, ", ".join(ENGINES)),
        ("micro", whole(1), "rows per micro-batch"),
        ("ga", whole(1), "micro-batches per optimizer step"),
        ("ckpt", str, "activation checkpointing: true, false"),
        ("dtype", str, "fp32, bf16, fp16"),
        ("seq_len", whole(1), "tokens per row"),
        ("model", str, "folder or hub id"),
        ("gpus", whole(), "number of processes; 0: one per GPU"),
        (
            "data",
            str,
            "full: rows of random tokens; packed, mixed: random documents; or a file",
        ),
    ):
        parser.add_argument(
            f"--{name}", type=lambda s, k=kind: [k(x) for x in s.split(",")],
            metavar="A,B", help=text,
        )  # fmt: skip
    parser.add_argument("--steps", type=whole(1), help="optimizer steps of a row (default: 32)")
    parser.add_argument("--flags", help='flags passed to the launcher: --flags="--a 1"')
    parser.add_argument("--env", help='environment variables for the launcher: "NAME=value ..."')
    parser.add_argument("--only", type=regex, help="only rows whose name matches this expression")
    parser.add_argument("--out", help="write bench/results/OUT.jsonl; default: OUT is the preset")
    parser.add_argument("--timeout", type=whole(1), default=1800, help="seconds allowed for a row")
    parser.add_argument("--resume", action="store_true", help="measure missing and failed rows")
    parser.add_argument("--dry_run", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--overwrite", action="store_true", help="measure every row again")
    return parser


def grid(args) -> dict[str, dict]:
    """Return the rows asked for by their keys: a preset's, changed by flags, or combinations."""
    given = {"engine": args.engines, "ckpt": args.ckpt and [boolean(text) for text in args.ckpt]}
    for name in ("micro", "ga", "dtype", "seq_len", "model", "gpus", "data"):
        given[name] = getattr(args, name)
    for name in ("steps", "flags", "env"):
        given[name] = None if (value := getattr(args, name)) is None else [value]
    given = {k: v for k, v in given.items() if v is not None}
    if not (args.preset or given):
        raise UserError("nothing to measure: set --preset, or --engines, --micro, ... (--help)")
    combinations = [dict(zip(given, x, strict=True)) for x in itertools.product(*given.values())]
    bases = PRESETS[args.preset] if args.preset else [{}]
    combined = [{**DEFAULTS, **b, **c} for b, c in itertools.product(bases, combinations)]
    if bad := {row["engine"] for row in combined} - {*ENGINES}:
        raise UserError(f"--engines {bad.pop()}: choose from {', '.join(ENGINES)}")
    rows = [row for row in combined if re.search(args.only or "", name_of(row))]
    if not rows:
        raise UserError(f"--only {args.only}: no row matches")
    return {store.key_of({"row": row}): row for row in rows}


def boolean(text: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise UserError(f"--ckpt {text[:80]}: must be true or false")
    return text.lower() in TRUE


def measure(row: dict, timeout: float) -> dict:
    """Run a row. Returns its status ("ok", "out of memory" or "failed"), command and figures."""
    peer = PEERS.get(row["engine"])
    if peer and not peer.installed():
        error = f"{row['engine']} is not installed: run pip install {peer.PACKAGES}"
        return {"status": "failed", "error": error, "command": ""}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = peer.command_of(row) if peer else command_of(row, out)
        code, text = run_command(command, environment_of(row), timeout)
        files = () if code or peer else ("summary", "env", "config")
        figures = {file: json.loads((out / f"{file}.json").read_text("utf-8")) for file in files}
        if peer and not code:
            figures = peer.read(row, text)
        if figures and (sent := re.search(r"PowerSGD from step .*: ([\d.]+)% of", text)):
            figures["sent"] = float(sent[1]) / 100  # of the gradients' bytes
    outcome = {"status": "ok", **figures} if figures else failure(code, text)
    result = json.dumps({"command": " ".join(command), **outcome})
    # paths of this machine mean nothing elsewhere
    paths = {f"{scratch}/": "OUT/", f"{Path(cache_folder())}/": "CACHE/", sys.executable: "python"}
    for path, name in {**paths, f"{ROOT}/": ""}.items():
        result = result.replace(path, name)
    return json.loads(result)


def in_words(row: dict) -> str:
    """The command of a row as typed, but for its random data, which is not made."""
    peer = PEERS.get(row["engine"])
    command = peer.command_of(row) if peer else command_of({**row, "data": "DATA"}, Path("OUT"))
    gpus = f"NPROC_PER_NODE={row['gpus']}" if row["gpus"] else ""
    return " ".join([*row["env"].split(), *gpus.split(), *map(str, command)])


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
    flags_of_row = row["flags"].split()
    if BALANCED in flags_of_row:
        command = [sys.executable, "-m", "llm_demo.launch", "bench/balanced.py"]
        flags_of_row.remove(BALANCED)
    if ONE_OF in flags_of_row:
        at = flags_of_row.index(ONE_OF)
        command = [sys.executable, str(ROOT / "bench/one_rank.py"), flags_of_row[at + 1]]
        del flags_of_row[at : at + 2]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    return command + flags_of_row


def environment_of(row: dict) -> dict:
    env = {**os.environ, "PYTHON": sys.executable}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env |= dict(pair.split("=", 1) for pair in row["env"].split())
    if row["gpus"]:
        env["NPROC_PER_NODE"] = str(row["gpus"])
    if row["engine"] in ("trl", "unsloth"):
        env[trl.ROW] = json.dumps(row)
    return env


def data_of(row: dict, model: str) -> str:
    """Return a file of random tokens: full rows, documents as long as GSM8K's, or mixed ones of
    4,096 to 65,536 tokens.

    Only the step is timed, so tokens may be random; a fixed seed makes them the same everywhere."""
    if row["data"] not in ("full", "packed", "mixed"):
        return row["data"]
    config = json.loads((find_model(model) / "config.json").read_text("utf-8"))
    vocab, S = config["vocab_size"], row["seq_len"]
    file = Path(cache_folder()) / f"bench-{row['data']}-{vocab}-{S}.jsonl"
    if file.exists():
        return str(file)
    rng = np.random.default_rng(0)
    lines, most = [], max(8, MOST_TOKENS // S)
    rows, documents = min(512, most), max(512, min(256, most) * S // 160)
    count = {"full": rows, "packed": documents, "mixed": max(64, rows * S // 24_000)}
    for _ in range(count[row["data"]]):
        if row["data"] == "full":
            document = {"input_ids": rng.integers(0, vocab, S).tolist()}
        else:  # 160 tokens on average, or 24,000; the last two thirds have labels
            mixed = row["data"] == "mixed"
            n = np.exp(rng.uniform(*np.log([4096, 65_536]))) if mixed else rng.lognormal(5.0, 0.35)
            n = int(np.clip(n, 16, S))
            ids = rng.integers(0, vocab, n).tolist()
            document = {"input_ids": ids, "labels": [-100] * (n // 3) + ids[n // 3 :]}
        lines.append(f"{json.dumps(document)}\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{PART}{os.getpid()}-{file.name}")  # others may write the same file
    part.write_text("".join(lines), encoding="utf-8")
    part.replace(file)
    return str(file)


def run_command(command: list[str], env: dict, timeout: float) -> tuple[int, str]:
    """Run a command. Returns its exit code and output. Ctrl-C and the timeout end its children."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
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
    """Describe a failed row: its status, its error message and the end of its output."""
    # without C++ stacks: NCCL can print one a second and fill all 4,000 characters
    lines = [line for line in text.strip().splitlines() if not line.startswith("frame #")]
    errors = [line for line in lines if line.startswith("error:")]
    oom = "out of GPU memory" in text or "OutOfMemoryError" in text
    return {
        "status": "out of memory" if oom else "failed",
        "exit_code": code,
        "error": errors[0] if errors else (lines or ["no output"])[-1],
        "output": "\n".join(lines)[-4000:],
    }


def describe(result: dict) -> str:
    if result["status"] != "ok":
        return f"{result['status']}: {result['error'][:160]}"
    s = result["summary"]
    peaks = " / ".join(f"{peak:.1f}" for peak in store.peaks_of(s))
    peaks += f" GiB ({s['alloc_retries']} retries)" if s.get("alloc_retries") else " GiB"
    return f"{s['median_step_ms']:.1f} ms, {s['median_slots_per_s']:,.0f} slots/s, {peaks}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the row would keep running
    try:
        command(main)
    except KeyboardInterrupt:
        print("\nstopped: completed rows are kept, --resume continues", file=sys.stderr)
        sys.exit(130)
