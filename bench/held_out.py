"""What an approximation costs in held-out loss: the same steps on the same documents, once for each
way, on one device, started as a user would start them.

    python -m bench.held_out four_bits MODEL ROWS.jsonl   # adapters over 16 bits and over 4
    python -m bench.held_out fp8 MODEL ROWS.jsonl         # bf16, and each recipe on all layers

bf16 runs a second time with the rows of a step in two parts, which differs in rounding alone.

The first --held_out documents are held out. Results go to bench/results/OUT.jsonl, a line for each
way; python -m bench.table OUT prints them."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import store
from fsdp import train_fsdp
from llm_demo.core.errors import UserError
from llm_demo.flags.parsing import PlainParser, whole
from llm_demo.machine.dist import run
from llm_demo.machine.files import ROOT
from llm_demo.machine.process import command
from llm_demo.options import fp8

ADAPTERS = "--lora_rank 16 --lr 2e-4"
RECIPES = ("rowwise_gw", "rowwise")  # blockwise needs sizes that small models lack
WAYS = {
    "four_bits": {"16 bits": ADAPTERS, "4 bits": f"{ADAPTERS} --base_bits 4"},
    "fp8": {
        "bf16": "",
        "bf16 in two parts": "--micro_batch_size 2 --grad_accum_steps 2",
        **{f"fp8 {recipe}": f"--fp8 {recipe}" for recipe in RECIPES},
    },
}
EVERY_SIZE = "BENCH_FP8_OF_EVERY_SIZE"  # in the environment of this file as a script


def main() -> int:
    parser = PlainParser(prog="python -m bench.held_out", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=WAYS)
    parser.add_argument("model", help="folder with weights and tokenizer")
    parser.add_argument("rows", help="a .jsonl file of documents")
    parser.add_argument("--held_out", type=whole(1), default=120, help="documents (default: 120)")
    parser.add_argument("--steps", type=whole(1), default=60, help="of each way (default: 60)")
    parser.add_argument("--every", type=whole(1), default=20, help="steps between evaluations")
    parser.add_argument("--flags", default="", help='of the launcher, for all: --flags="--a 1"')
    parser.add_argument(
        "--out", help="write bench/results/OUT.jsonl; default: OUT is held_out/WHAT"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(args.rows).read_text("utf-8").splitlines(keepends=True)
        for name, part in (("held", rows[: args.held_out]), ("train", rows[args.held_out :])):
            Path(scratch, f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
        for way, flags in WAYS[args.what].items():
            result = measure(way, flags, args, Path(scratch))
            store.write(args.out or f"held_out/{args.what}", result)
            print(result["columns"], flush=True)
    return 0


def measure(way: str, flags: str, args: argparse.Namespace, scratch: Path) -> dict:
    """The held-out losses of a run, by step."""
    out = scratch / way.replace(" ", "_")
    words = [sys.executable, "-m", "llm_demo.launch", str(ROOT / "bench/held_out.py")]
    words += ["--model_name_or_path", args.model, "--train_json", str(scratch / "train.jsonl")]
    words += ["--eval_json", str(scratch / "held.jsonl"), "--eval_every", str(args.every)]
    words += ["--max_steps", str(args.steps), "--seq_len", "512", "--micro_batch_size", "4"]
    words += ["--grad_accum_steps", "1", "--warmup_steps", "5", "--sample_tokens", "0"]
    words += [*"--save false --output_dir".split(), str(out), *flags.split(), *args.flags.split()]
    env = {**os.environ, "NPROC_PER_NODE": "1", "PYTHONPATH": str(ROOT)}
    env |= {EVERY_SIZE: "1"} if args.what == "fp8" else {}
    if subprocess.run(words, env=env).returncode:
        raise UserError(f"{way}: the run failed")
    return result_of(way, words, out)


def result_of(way: str, words: list[str], out: Path) -> dict:
    """A line of the results. out: the run's folder."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    losses = {r["step"]: r["eval/loss"] for r in lines if "eval/loss" in r}
    columns = {"script": way} | {f"step {step}": f"{loss:.4f}" for step, loss in losses.items()}
    env = json.loads((out / "env.json").read_text("utf-8"))
    said = [Path(word).name if os.path.isabs(word) else word for word in words]
    return {"columns": columns, "losses": losses, "command": " ".join(said), "env": env}


if __name__ == "__main__":
    if os.environ.get("RANK"):  # a process of a run
        if os.environ.get(EVERY_SIZE):
            fp8.LEAST = 0
        run(train_fsdp.main, train_fsdp.parse, train_fsdp.less_memory)
    else:
        command(main)
