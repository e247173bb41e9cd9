"""Check whether this machine can train: python -m llm_demo.check [--json] [--output_dir DIR]

Prints one line for each thing checked: ok, warning or error, and what to do about it. The exit code
is 1 if there is an error, so that training can't work. docs/check.md explains every line."""

import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llm_demo.check import lines, processes
from llm_demo.check.lines import ERROR, OK, WARNING, failure
from llm_demo.check.processes import P2P_OFF, tool
from llm_demo.flags.parsing import PlainParser, local
from llm_demo.machine.files import ROOT
from llm_demo.machine.process import command

LIMIT = 30  # seconds for a pair, imports included


def check(
    output_dir: str, tell: Callable, report: bool = False, module: str = processes.EXPERIMENTS
) -> dict:
    """Run every check in order; tell(*lines) is called as soon as the next lines are known.

    report: also ask for PyTorch's report on versions and drivers. module: of the experiments.
    Returns what was measured, for --json."""
    drivers = tool("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = drivers.partition("\n")[0]
    tell(lines.packages())
    with tempfile.TemporaryDirectory(prefix="llm_demo_check_") as folder:
        # a cache of its own: runs remember which attention has worked, and here it is tried again
        env = {"LLM_DEMO_CACHE": folder}
        facts = {"torch": processes.ask("torch_facts", module, env)}
        seen_by = "nvidia-smi" if driver else "/dev/kfd" if Path("/dev/kfd").exists() else ""
        tell(lines.torch_build(facts["torch"], driver, seen_by))
        if report:  # what PyTorch asks for in every bug report
            facts["report"] = tool(sys.executable, "-m", "torch.utils.collect_env", limit=60)
        if "torch" in facts["torch"]:
            experiments(facts, tell, module, env)
    tell(lines.disk(output_dir))
    return facts


def experiments(facts: dict, tell: Callable, module: str, env: dict) -> None:
    """What PyTorch can do here. env: of the experiments' processes."""
    devices = facts["torch"]["devices"]
    if facts["torch"]["left_out"]:  # as the launcher does
        tell((OK, "gpus", facts["torch"]["left_out"], ""))
        env = {**env, **dict([facts["torch"]["only"]])}
    ask = functools.partial(processes.ask, module=module, env=env)
    names = [f"cuda:{i}" for i in range(len(devices))]
    with ThreadPoolExecutor() as pool:  # all at once
        answers = pool.map(lambda name: ask("rates", device=name), names)
        for gpu, answer in zip(devices, answers, strict=True):
            gpu |= answer
    tell(*(lines.gpu_line(i, devices) for i in range(len(devices))))
    facts["pairs"] = []
    everyone = names or ["cpu", "cpu"]
    try_pair = functools.partial(ask, "pair", limit=LIMIT)
    for pair in itertools.combinations(range(len(everyone)), 2):
        both = [everyone[i] for i in pair]
        result, without = try_pair(devices=both), None
        # again without peer-to-peer, if it failed, and of the first two GPUs
        again = failure(result) or pair == (0, 1) and devices
        if again and os.environ.get(P2P_OFF, "0") == "0":
            without = try_pair(devices=both, env={**env, P2P_OFF: "1"})
        name = "pair {}-{}".format(*pair)
        links = facts["torch"]["links"]
        if len(links) == 1:
            name += f" ({links[0]})"
        tell(lines.pair_line(name, result, without))
        facts["pairs"].append({"pair": pair, "result": result, "without_p2p": without})
    facts["choices"] = ask("choices")
    tell(*lines.choice_lines(facts["choices"]))
    if devices:
        facts["kernels"] = ask("kernels", device="cuda:0", dtype=facts["torch"]["dtype"])
        tell(*lines.kernel_lines(facts["kernels"]))


def make_parser() -> PlainParser:
    summary = __doc__.split("\n\n")[1]
    parser = PlainParser(prog="python -m llm_demo.check", description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for a report")
    where = "where runs would be saved (default: runs/)"
    parser.add_argument("--output_dir", type=local, default=str(ROOT / "runs"), help=where)
    return parser


def main() -> int:
    args = make_parser().parse_args()
    begun, said = time.monotonic(), []

    def tell(*more):
        for level, name, text, fix in more:
            said.append({"level": level, "name": name, "text": text, "fix": fix})
            if not args.json:
                end = f" | fix: {fix}" if fix else ""
                print(f"{level:<8} {name}: {text}{end}", flush=True)

    facts = check(args.output_dir, tell, report=args.json)
    levels = [line["level"] for line in said]
    errors, warnings = levels.count(ERROR), levels.count(WARNING)
    seconds = time.monotonic() - begun
    if args.json:
        print(json.dumps({"seconds": round(seconds, 1), "lines": said, "facts": facts}, indent=1))
    else:
        verdict = "training will not work" if errors else "training should work"
        print(f"{verdict}: errors {errors}, warnings {warnings}, {seconds:.0f} s")
    return 1 if errors else 0


if __name__ == "__main__":
    command(main)
