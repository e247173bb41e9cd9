"""Check whether this machine can train: python -m llm_demo.check [--json] [--output_dir DIR]

Prints one line for each thing checked: ok, warning or error, and what to do about it. The exit code
is 1 if there is an error, so that training can't work. docs/check.md explains every line."""

import itertools
import json
import os
import tempfile
import time

from llm_demo.check import files, gpus, machine, pairs, processes
from llm_demo.check.machine import ERROR, OK, WARNING
from llm_demo.check.processes import ROOT, Worker, ask, receive
from llm_demo.job.parsing import PlainParser
from llm_demo.job.process import command

# Seconds for a command; most start with an import. pairs.LIMITS has the limits of groups.
LIMIT = 90
HEADS = [16, 8, 128, 128]  # as costs.Heads: Qwen3-0.6B's


def check(output_dir: str, tell) -> dict:
    """Run every check in order; tell(lines) is called as soon as the next lines are known.

    Returns what was measured, for --json."""
    facts = {}
    tell(machine.python())
    base, disk = Worker(), Worker("llm_demo.check.files")
    base.send("torch_facts")
    disk.send("disk", folder=output_dir)
    smi = gpus.nvidia()
    torch = facts["torch"] = receive([[base]], LIMIT)[0][0]
    tell(machine.torch_build(torch, smi))
    if torch.get("only"):  # as the launcher does
        tell([(OK, "gpus", torch["left_out"], "")])
        os.environ.update([torch["only"]])
        base = Worker()
    devices = torch.get("devices", [])
    if torch_works := "torch" in torch:
        tell(machine.packages())
        probes = start_probes(base, facts)
        with tempfile.TemporaryDirectory(prefix="llm_demo_check_") as folder:
            if devices:
                check_gpus(devices, smi, folder, facts, tell)
            else:
                check_cpu(folder, facts, tell)
    tell(machine.tools())
    tell(machine.shared_memory(len(devices)))
    tell(machine.cores(len(devices)))
    facts["disk"] = receive([[disk]], LIMIT)[0][0]
    tell(files.disk_line(facts["disk"], output_dir))
    if torch_works:
        if devices:
            receive([[probes["block"]]], LIMIT)  # the answer to "start"
        answers = receive([[worker] for worker in probes.values()], LIMIT)
        facts["probes"] = {name: answer for name, (answer,) in zip(probes, answers, strict=True)}
        tell(attention(base, facts))
        tell(deepspeed(facts["probes"]["deepspeed"]))
        tell(speeds(probes.get("block"), base, facts))
    if devices and devices[0]["vendor"] == "amd":
        tell(amd(devices, facts))
    return facts


# ---------------------------------------------------------------- the devices


def check_gpus(devices, smi, folder, facts, tell) -> None:
    """Each GPU alone, each pair, all together."""
    amd = devices[0]["vendor"] == "amd"
    for i, device in enumerate(devices):
        uuid = device.pop("uuid").removeprefix("GPU-")  # keep it out of public reports
        row = smi["gpus"].get(uuid, {})
        device["bus"] = row.get("bus") or device.get("bus", "")
        device["index"] = row.get("index", i)
    places = [device["bus"] for device in devices]
    fleet, control = pairs.Fleet(len(devices), "cuda", folder), None
    if len(devices) > 1 and os.environ.get(pairs.P2P_OFF, "0") == "0":
        control = pairs.Fleet(len(devices), "cuda", folder, **{pairs.P2P_OFF: "1"})
        control.start()
    fleet.start()
    answers, loads = fleet.products(2.0, amd, lambda: gpus.under_load(places))
    for device, answer in zip(devices, answers, strict=True):
        device |= answer | {"load": loads.get(device["bus"], {})}
    tell([gpus.gpu_line(each, devices, f"gpu {i}") for i, each in enumerate(devices)])
    tell(gpus.product_lines(devices[0]))
    if len(devices) < 2:
        return

    names = {(a, b): kind for a, b, kind in facts["torch"]["links"]}
    keys = [device["bus"] if amd else str(device["index"]) for device in devices]
    kinds = {
        (i, j): names.get((keys[i], keys[j]), "")
        for i, j in itertools.combinations(range(len(devices)), 2)
    }
    expected = gpus.expected_gb(devices, kinds, gpus.nvlinks())
    results = fleet.try_pairs()
    fleet.measure_alone(results, expected)
    without = control.try_pairs() if control else {}

    def try_all(fleet, results) -> dict | None:
        # If a pair fails, all GPUs would fail too, and take longer.
        failed = any(map(pairs.failure, results.values()))
        return fleet.try_all() if results and not failed else None

    together, together_without = try_all(fleet, results), try_all(control, without)
    facts["pairs"] = [
        {"pair": pair, "link": kinds[pair], "expected": expected[pair]}
        | {"result": results.get(pair), "without_p2p": without.get(pair)}
        for pair in kinds
    ]
    facts["all"] = {"result": together, "without_p2p": together_without}
    lines = pairs.pair_lines(results, without, expected, facts["torch"]["peers"])
    tell(lines)
    tell(gpus.iommu(places, amd, all(level != ERROR for level, *_ in lines)))
    tell(pairs.all_line(len(devices), together, together_without))


def check_cpu(folder, facts, tell) -> None:
    """Two processes on the CPU, as the launchers start them."""
    fleet = pairs.Fleet(2, "cpu", folder)
    facts["pairs"] = [{"pair": (0, 1), "result": fleet.try_all()}]
    tell(pairs.gloo_line(facts["pairs"][0]["result"]))


# ---------------------------------------------------------------- what the code needs


def start_probes(base, facts) -> dict:
    """Start the probes that run while the devices are checked: name -> worker."""
    choices = facts["choices"] = ask(base, LIMIT, "choices")
    devices = facts["torch"]["devices"]
    probes = {"deepspeed": Worker(**({} if devices else {"DS_ACCELERATOR": "cpu"}))}
    probes["deepspeed"].send("deepspeed_facts")
    for impl in choices.get("probes", ()):
        probes[impl] = Worker()
        args = [impl, choices["dtype"], *HEADS]
        probes[impl].send("run_module", name="llm_demo.job.attention_choice", args=args)
    if devices:
        probes["compile"] = Worker()
        probes["compile"].send("run_module", name="llm_demo.job.compiling", args=[])
        probes["block"] = Worker()  # compiled while other things are checked, timed at the end
        probes["block"].send("start", device="cuda:0")
        probes["block"].send("compile_block", dtype=choices.get("dtype", "bf16"))
    return probes


def attention(base: Worker, facts: dict) -> list:
    """dtype, attention and torch.compile: what a run would choose, and why."""
    choices = facts["choices"]
    problems = {name: answer.get("problem") for name, answer in facts["probes"].items()}
    arguments = {"problems": problems, "compile_problem": problems.get("compile")}
    chosen = ask(base, LIMIT, "choose", heads=HEADS, **arguments)
    if problem := choices.get("problem") or chosen.get("problem"):
        fix = f"pip install transformers=={machine.pinned('transformers')}"
        return [(ERROR, "attention", f"choosing a backend failed: {problem}", fix)]

    text = f"{choices['dtype']} by default: {choices['dtype_reason']}"
    lines = [(OK, "dtype", text, "")]
    packed, single = chosen["packed"], chosen["single"]
    text = packed["impl"]
    if packed["impl"] != single["impl"]:
        text += f" for packed rows, {single['impl']} for one document per row"
    if correct := [impl for impl in choices["probes"] if not problems[impl]]:
        text += f"; tested against math: {', '.join(correct)}"
    text += "".join(f"; not {impl}: {why}" for impl, why in choices["against"].items() if why)
    lines.append((OK, "attention", text, ""))
    for impl in choices["probes"]:
        if problems[impl]:
            fix = "nothing to do, another backend is used; a newer driver or torch may help"
            lines.append((WARNING, "attention", f"{impl} fails: {problems[impl]}", fix))

    if problem := problems.get("compile"):
        fix = "training runs without it; it needs a C compiler: apt install gcc python3-dev"
        lines.append((WARNING, "compile", f"torch.compile does not work here: {problem}", fix))
    else:
        text = "works here; " * ("compile" in problems)
        text += f"{'on' if packed['compile'] else 'off'} by default: {packed['why']}"
        lines.append((OK, "compile", text, ""))
    return lines


def deepspeed(answer: dict) -> list:
    pin = machine.pinned("deepspeed")
    text = answer.get("version", f"import failed: {answer.get('problem')}")
    if not answer.get("launcher"):
        text += f"; pipeline runs need {pin}, FSDP works without it"
        return [(WARNING, "deepspeed", text, f"pip install deepspeed=={pin}")]
    return [(OK, "deepspeed", f"{text}, tested with {pin}", "")]


def speeds(block: Worker | None, base: Worker, facts: dict) -> list:
    """Times of fused kernels beside eager ones on the first GPU, and the host's speed. Measured
    last, when nothing else runs."""
    dtype = facts["choices"].get("dtype", "bf16")
    if block is None:
        return machine.host_line(ask(base, LIMIT, "host_speed"), 0)
    speed = facts["kernels"] = ask(block, LIMIT, "kernels", dtype=dtype)
    lines, cases = [], {"block": "a compiled block", "loss": "the loss kernel"}
    for name, what in cases.items() if "problem" not in speed else ():
        found, fix, level = speed[name], "--no_compile", WARNING
        text = f"{what} fails: {found}"
        if isinstance(found, list):
            eager, fused, error = found
            text = f"{what} takes {fused:.2f} ms, eager {eager:.2f} ms; they differ by {error:.1e}"
            if error < 0.03:  # bf16 rounds by up to 0.004
                level, fix = OK, ""
        lines.append((level, "kernels", text, fix))
    return [*lines, *machine.host_line(speed, len(facts["torch"]["devices"]))]


def amd(devices, facts) -> list:
    """What else is asked on AMD cards; see docs/check.md."""
    links = {pair["link"] for pair in facts.get("pairs", ())}
    lines = machine.kernel_lines([device["bus"] for device in devices], links == {"XGMI"})
    for i, device in enumerate(devices):
        visible, total = (
            gpus.amd_gb(device["bus"], name) for name in ("vis_vram_total", "vram_total")
        )
        if 0 < visible < total:
            text = f"GPU {i} exposes {visible:.1f} of {total:.0f} GB on the bus: no peer-to-peer"
            fix = "enable Above 4G Decoding and Resizable BAR in the BIOS"
            lines.append((WARNING, "large BAR", text, fix))
    text = f"ROCm {machine.rocm()}, RCCL {facts['torch'].get('nccl', 'unknown')}"
    return [*lines, (OK, "rocm", f"{text}, links: {', '.join(links) or 'none'}", "")]


# ---------------------------------------------------------------- the command


def make_parser() -> PlainParser:
    summary = __doc__.split("\n\n")[1]
    parser = PlainParser(prog="python -m llm_demo.check", description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for a report")
    where = "where runs would be saved (default: runs/)"
    parser.add_argument("--output_dir", default=str(ROOT / "runs"), help=where)
    return parser


def main() -> int:
    args = make_parser().parse_args()
    begun, lines, facts = time.monotonic(), [], {}

    def tell(more):
        lines.extend(more)
        for level, name, text, fix in () if args.json else more:
            print(f"{level:<8} {name}: {text}" + f" | fix: {fix}" * bool(fix), flush=True)

    try:
        facts = check(args.output_dir, tell)
    except Exception as e:  # a bug in this command is not the machine's fault
        text = f"stopped early by a bug of its own: {processes.first_line(e)}"
        tell([(WARNING, "check", text, "please report this output")])
    finally:
        processes.end_all()
    errors, warnings = (sum(line[0] == level for line in lines) for level in (ERROR, WARNING))
    seconds = time.monotonic() - begun
    if args.json:
        keys = ("level", "name", "text", "fix")
        lines = [dict(zip(keys, line, strict=True)) for line in lines]
        print(json.dumps({"seconds": round(seconds, 1), "lines": lines, "facts": facts}, indent=1))
    else:
        verdict = "training will not work" if errors else "training should work"
        print(f"{verdict}: errors {errors}, warnings {warnings}, {seconds:.0f} s")
    return 1 if errors else 0


if __name__ == "__main__":
    command(main)
