"""Check whether this machine can train: python -m llm_demo.check [--json] [--output_dir DIR]

Prints one line for each thing checked: ok, warning or error, and what to do about it. The exit code
is 1 if there is an error, so that training can't work. docs/check.md explains every line."""

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

from llm_demo.check import lines
from llm_demo.check.lines import ERROR, OK, WARNING
from llm_demo.check.processes import (
    EXPERIMENTS,
    LIMIT,
    P2P_OFF,
    Trial,
    answers_of_all,
    failure,
    tool,
    try_groups,
)
from llm_demo.flags.parsing import PlainParser, local
from llm_demo.machine.files import ROOT
from llm_demo.machine.process import command
from llm_demo.machine.text import words_of


def check(output_dir: str, tell: Callable, report=False, module=EXPERIMENTS, limit=LIMIT) -> dict:
    """Run every check in order; tell(*lines) is called as soon as the next lines are known.

    report: also ask for PyTorch's report on versions and drivers. module: of the experiments.
    limit: seconds for a group of processes. Returns what was measured, for --json."""
    smi = tool("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    if smi is None:
        tell((ERROR, "driver", "nvidia-smi does not answer", "look at dmesg (xid, nvrm), reboot"))
    tell(lines.packages())
    with tempfile.TemporaryDirectory(prefix="llm_demo_check_") as folder:
        # a cache of its own: runs remember which attention has worked, and here it is tried again
        start = partial(Trial, folder=folder, module=module, LLM_DEMO_CACHE=folder)
        facts = {"torch": answers_of_all([start("torch_facts", {})])[0]}
        tell(lines.torch_build(facts["torch"], smi or ""))
        if report:  # what PyTorch asks for in every bug report
            facts["report"] = tool(sys.executable, "-m", "torch.utils.collect_env", limit=60)
        if "torch" in facts["torch"]:
            experiments(facts, start, folder, tell, limit)
    tell(lines.disk(output_dir))
    return facts


def experiments(facts: dict, start: Callable, folder: str, tell: Callable, limit: float) -> None:
    """What PyTorch can do here. start(task, arguments) -> Trial; the rest as in `check`."""
    devices = facts["torch"]["devices"]
    if facts["torch"]["left_out"]:  # as the launcher does
        tell((OK, "gpus", facts["torch"]["left_out"], ""))
        name, value = facts["torch"]["only"]
        start = partial(start, **{name: value})
    if devices:
        check_gpus(facts, start, folder, tell, limit)
    else:
        result = try_groups([(0, 1)], "cpu", start, folder, limit)[0, 1]
        facts["pairs"] = [{"pair": (0, 1), "result": result}]
        tell(lines.group_line("pair", result))
    facts["choices"] = answers_of_all([start("choices", {})])[0]
    tell(*usable("attention", facts["choices"], tell).get("lines", ()))
    if devices:
        dtype = facts["torch"]["dtype"]
        trial = start("kernels", {"device": "cuda:0", "dtype": dtype})
        facts["kernels"] = answers_of_all([trial])[0]
        found = usable("kernels", facts["kernels"], tell)
        if found:
            tell(lines.kernel_line(found["fault"]), lines.host_line(found["launch_us"]))


def usable(name: str, answer: dict, tell: Callable) -> dict:
    """An experiment's answer; {} after a line about it if it failed."""
    if "problem" not in answer:
        return answer
    tell((ERROR, name, f"could not be tried: {answer['problem']}", lines.REINSTALL))
    return {}


def check_gpus(facts: dict, start: Callable, folder: str, tell: Callable, limit: float) -> None:
    """Each GPU alone, each pair, all together. Arguments as in `experiments`."""
    devices, links = facts["torch"]["devices"], facts["torch"]["links"]
    everyone = tuple(range(len(devices)))
    jobs = [start("rates", {"device": f"cuda:{i}"}) for i in everyone]
    for gpu, answer in zip(devices, answers_of_all(jobs), strict=True):
        gpu |= answer
    tell(*(lines.gpu_line(i, devices) for i in everyone))
    pairs = list(itertools.combinations(everyone, 2))
    well = [pair for pair in pairs if all("rates" in devices[i] for i in pair)]
    results = try_groups(well, "cuda:{}", start, folder, limit)
    control = {}
    if os.environ.get(P2P_OFF, "0") == "0":  # for 0-1, 2-3, ... and all that failed
        some = [(i, i + 1) for i in everyone[:-1:2]]
        again = [pair for pair in well if pair in some or failure(results[pair])]
        without = partial(start, **{P2P_OFF: "1"})
        control = try_groups(again, "cuda:{}", without, folder, limit)
    facts["pairs"] = []
    for pair in pairs:
        kind, result = links[pair[0]][pair[1]], results.get(pair)
        name = "pair {}-{}".format(*pair)
        if kind:
            name += f" ({kind})"
        alike = [each for each in well if links[each[0]][each[1]] == kind]
        best = max((results[each].get("all_reduce", 0) for each in alike), default=0)
        tell(lines.group_line(name, result, control.get(pair), best))
        found = {"pair": pair, "link": kind, "result": result, "without_p2p": control.get(pair)}
        facts["pairs"].append(found)
    if len(pairs) > 1:
        if well == pairs and not any(map(failure, results.values())):
            results |= try_groups([everyone], "cuda:{}", start, folder, limit)
        facts["all"] = results.get(everyone)
        tell(lines.group_line("together", facts["all"]))


def make_parser() -> PlainParser:
    summary = __doc__.split("\n\n")[1]
    parser = PlainParser(prog="python -m llm_demo.check", description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for a report")
    where = "where runs would be saved (default: runs/)"
    parser.add_argument("--output_dir", type=local, default=str(ROOT / "runs"), help=where)
    return parser


def main() -> int:
    args = make_parser().parse_args()
    begun, said, facts = time.monotonic(), [], {}

    def tell(*more):
        for level, name, text, fix in more:
            said.append({"level": level, "name": name, "text": text, "fix": fix})
            if not args.json:
                end = f" | fix: {fix}" if fix else ""
                print(f"{level:<8} {name}: {text}{end}", flush=True)

    try:
        facts = check(args.output_dir, tell, report=args.json)
    except Exception as e:  # a bug in this command is not the machine's fault
        text = f"stopped early by a bug of its own: {words_of(e)}"
        tell((WARNING, "check", text, "please report this output"))
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
