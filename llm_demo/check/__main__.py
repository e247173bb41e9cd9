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

from llm_demo.check import lines
from llm_demo.check.lines import ERROR, OK, WARNING
from llm_demo.check.processes import LIMIT, MODULE, P2P_OFF, Job, failure, finish, tool, try_groups
from llm_demo.flags.parsing import PlainParser, local
from llm_demo.machine.files import ROOT
from llm_demo.machine.process import command
from llm_demo.machine.text import words_of


def check(output_dir: str, tell: Callable, report=False, module=MODULE, limit=LIMIT):
    """Run every check in order; tell(*lines) is called as soon as the next lines are known.

    report: also ask for PyTorch's report on versions and drivers. module: of the experiments.
    limit: see try_groups. Returns what was measured, for --json."""
    smi = tool("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    if smi is None:
        tell((ERROR, "driver", "nvidia-smi does not answer", "look at dmesg (xid, nvrm), reboot"))
    tell(lines.packages())
    with tempfile.TemporaryDirectory(prefix="llm_demo_check_") as folder:

        def start(*tasks, **env):
            return Job(tasks, folder, module, **env)

        facts = {"torch": finish([start(("torch_facts", {}))])[0][0]}
        tell(lines.torch_build(facts["torch"], smi or ""))
        if report:  # what PyTorch asks for in every bug report
            facts["report"] = tool(sys.executable, "-m", "torch.utils.collect_env", limit=60)
        if "torch" in facts["torch"]:
            experiments(facts, start, folder, tell, limit)
    tell(lines.disk(output_dir))
    return facts


def experiments(facts: dict, start: Callable, folder: str, tell: Callable, limit: float) -> None:
    """What PyTorch can do here. start(*tasks) -> Job; the rest as in `check`."""
    devices, dtype, go = facts["torch"]["devices"], facts["torch"].get("dtype"), f"{folder}/go"
    if facts["torch"]["left_out"]:  # as the launcher does
        tell((OK, "gpus", facts["torch"]["left_out"], ""))
        start = functools.partial(start, **dict([facts["torch"]["only"]]))
    # a cache of its own: runs remember which attention has worked, and here it is tried again
    choosing = start(("choices", {}), LLM_DEMO_CACHE=folder)
    if devices:  # compiles while others are checked, and measures when nothing else runs
        measuring = start(("kernels", {"device": "cuda:0", "dtype": dtype, "go": go}))
        check_gpus(facts, start, folder, tell, limit)
    else:
        measuring = start(("host_speed", {"device": "cpu"}))
        pair = try_groups([(0, 1)], "cpu", start, folder, limit)[0, 1]
        facts["pairs"] = [{"pair": (0, 1), "result": pair}]
        tell(lines.group_line("pair", pair))
    facts["choices"] = chosen = finish([choosing])[0][0]
    open(go, "w", encoding="utf-8").close()
    facts["kernels"] = speed = finish([measuring])[0][0]
    for name, answer in (("attention", chosen), ("kernels", speed)):
        if "problem" in answer:
            tell((ERROR, name, f"could not be tried: {answer['problem']}", lines.REINSTALL))
    tell(*chosen.get("lines", ()))
    if "cases" in speed:
        tell(*lines.kernel_lines(speed, devices[0]["peak"][dtype]))
    if "host" in speed:
        tell(lines.host_line(speed["host"]))
    if devices and devices[0]["vendor"] == "amd":
        tell(lines.kernel_line())


def check_gpus(facts: dict, start: Callable, folder: str, tell: Callable, limit: float) -> None:
    """Each GPU alone, each pair, all together. Arguments as in `experiments`."""
    devices = facts["torch"]["devices"]
    places = ({"device": f"cuda:{i}", **gpu} for i, gpu in enumerate(devices))
    jobs = [start(("gemm", {k: place[k] for k in ("device", "vendor", "bus")})) for place in places]
    for gpu, (answer,) in zip(devices, finish(jobs, 30), strict=True):
        gpu |= answer
    everyone = tuple(range(len(devices)))
    tell(*(lines.gpu_line(i, devices) for i in everyone), *lines.product_lines(devices[0]))
    each = list(itertools.combinations(everyone, 2))
    well = [g for g in each if all("rates" in devices[i] for i in g)]
    together = [everyone] * (len(each) > 1 and well == each)
    results = try_groups(well + together, "cuda:{}", start, folder, limit)
    control, rates, facts["pairs"] = {}, {}, []
    if os.environ.get(P2P_OFF, "0") == "0":  # for 0-1, 2-3, ... and all that failed
        some = [(i, i + 1) for i in range(0, len(devices) - 1, 2)]
        again = [g for g in well if g in some or failure(results.get(g))]
        without = functools.partial(start, **{P2P_OFF: "1"})
        control = try_groups(again, "cuda:{}", without, folder, limit)
    for i, j in each:
        kind, result = facts["torch"]["links"][i][j], results.get((i, j))
        rates.setdefault(kind, []).append((result or {}).get("all_reduce", 0))
        pair = {"pair": (i, j), "link": kind, "result": result}
        facts["pairs"].append(pair | {"without_p2p": control.get((i, j))})
    for pair in facts["pairs"]:
        name = "pair {}-{}".format(*pair["pair"]) + f" ({pair['link']})" * bool(pair["link"])
        best = max(rates[pair["link"]])
        tell(lines.group_line(name, pair["result"], pair["without_p2p"], best))
    if len(each) > 1:
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
                print(f"{level:<8} {name}: {text}" + f" | fix: {fix}" * bool(fix), flush=True)

    try:
        facts = check(args.output_dir, tell, report=args.json)
    except Exception as e:  # a bug in this command is not the machine's fault
        text = f"stopped early by a bug of its own: {words_of(e)}"
        tell((WARNING, "check", text, "please report this output"))
    errors, warnings = (sum(line["level"] == x for line in said) for x in (ERROR, WARNING))
    seconds = time.monotonic() - begun
    if args.json:
        print(json.dumps({"seconds": round(seconds, 1), "lines": said, "facts": facts}, indent=1))
    else:
        verdict = "training will not work" if errors else "training should work"
        print(f"{verdict}: errors {errors}, warnings {warnings}, {seconds:.0f} s")
    return 1 if errors else 0


if __name__ == "__main__":
    command(main)
