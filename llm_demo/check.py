"""Find out whether this machine can train: python -m llm_demo.check [--json] [--output_dir DIR]

One line for each thing checked: ok, warning or error, and what to do about it. Exit code 1 if there
is an error, that is if training can't work. docs/check.md explains every line."""

from __future__ import annotations  # so that a Python that is too old gets as far as saying so

import argparse
import json
import os
import sys
import tempfile
import time

from llm_demo import check_gpus, check_machine, check_pairs
from llm_demo.check_machine import ERROR, OK, WARNING
from llm_demo.check_process import ROOT, Worker, ask, end_all, receive

# Seconds that a command may take before its process is killed; "pairs": all pairs, each way.
LIMITS = {"torch": 90, "start": 60, "choices": 60, "gemm": 20, "pair": 20, "all": 30, "pairs": 40}
LIMITS |= {"probe": 90, "deepspeed": 60, "disk": 20}
HEADS = [16, 8, 128]  # query heads, key-value heads, head size: Qwen3-0.6B's


def check(output_dir: str, tell) -> dict:
    """Run every check in order, calling tell(lines) as soon as the next lines are known.

    Returns what was measured, for --json."""
    facts = {}
    tell(check_machine.python())
    base, files = Worker("torch"), Worker()
    base.send(do="torch")
    files.send(do="disk", folder=output_dir)
    files.send(do="locks")
    smi = check_gpus.nvidia()
    torch = facts["torch"] = receive([[base]], LIMITS["torch"])[0][0]
    tell(check_machine.torch_build(torch, smi))
    devices = torch.get("devices", [])
    works = "torch" in torch
    if works:
        base.send(do="choices")
        tell(check_machine.packages())
    if devices:
        later = gpus(devices, smi, torch, base, facts, tell)
    elif works:
        later = cpu(base, facts, tell)
    places = [device.get("bus", "") for device in devices]
    tell(check_machine.tools())
    tell(check_machine.shared_memory(len(devices)))
    tell(check_machine.locked_memory())
    tell(check_machine.cores(len(devices)))
    tell(check_machine.numa(places))
    facts["disk"], facts["locks"] = (receive([[files]], LIMITS["disk"])[0][0] for _ in range(2))
    tell(check_machine.disk(facts["disk"], output_dir))
    tell(check_machine.stale_locks(facts["locks"]))
    if works:
        facts["deepspeed"] = receive([[base]], LIMITS["deepspeed"])[0][0]
        base = base if base.problem is None else Worker("torch")
        tell(backends(later, base, facts))
        tell(deepspeed(facts["deepspeed"]))
    if devices and devices[0]["vendor"] == "amd":
        tell(amd(devices, later, facts))
    return facts


# ---------------------------------------------------------------- the devices


def gpus(devices, smi, torch, base, facts, tell) -> dict:
    """Each GPU alone, each pair, all together. Returns the probes started meanwhile."""
    amd = devices[0]["vendor"] == "amd"
    rows = check_gpus.match(devices, smi["gpus"])
    for device, row in zip(devices, rows, strict=True):
        device.setdefault("bus", row.get("bus", ""))
        device.pop("uuid", None)  # reports are made public
    places = [device["bus"] for device in devices]
    used = [row.get("used_gb", 0) for row in rows]
    if amd:
        used = [check_gpus.amd_gpu(place)["used"] for place in places]

    # For the question whether RCCL's flight recorder has durations.
    timed = {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100"} if amd else {}
    fleet = {i: Worker("torch", **timed) for i in range(len(devices))}
    off = os.environ.get(check_pairs.P2P_OFF, "0") != "0"
    control = {}
    if len(devices) > 1 and not off:
        control = {i: Worker("torch", **{check_pairs.P2P_OFF: "1"}) for i in fleet}
    check_pairs.start_all([fleet, control], "cuda", LIMITS["start"])
    later = start_probes(base, facts, amd)
    base.send(do="deepspeed", env={})  # a slow import that needs no GPU

    look = (lambda: check_gpus.amd_under_load(places)) if amd else check_gpus.under_load
    answers, loads = check_pairs.products(fleet, 2.0, LIMITS["gemm"], look, blas=amd)
    load = check_gpus.merge_loads(loads)
    faults = check_gpus.memory_faults(places)
    facts["gpus"] = [
        {**device, **answers[i], "load": load.get(places[i], {}), "faults": faults[places[i]]}
        for i, device in enumerate(devices)
    ]
    tell(check_gpus.gpu_lines(facts["gpus"], used))
    links = check_gpus.nvlinks()
    indices = [row.get("index", i) for i, row in enumerate(rows)]
    tell(check_gpus.nvlink_lines(links, indices))
    if len(devices) < 2:
        return later

    kinds = check_gpus.topology()
    kinds = {(i, j): kinds.get((indices[i], indices[j]), "") for j in fleet for i in range(j)}
    expected = check_gpus.expected_gb(facts["gpus"], kinds, links, indices)
    with tempfile.TemporaryDirectory(prefix="llm_demo_check_") as folder:
        room = check_pairs.Room("cuda", "nccl", folder, LIMITS)
        found = check_pairs.try_pairs(fleet, room)
        check_pairs.again_alone(found, expected, fleet, room)
        without = check_pairs.try_pairs(control, room) if control else {}
        # If a pair fails, all together would fail too, and take longer.
        together, all_without = (
            check_pairs.try_all(these, room)
            if results and not any(map(check_pairs.trouble, results.values()))
            else None
            for these, results in ((fleet, found), (control, without))
        )
        if amd and together and not together.get("problem"):
            everyone = [tuple(fleet)]
            facts["profile"] = check_pairs.talk(fleet, everyone, room, "all", do="profile")[0]
    facts["pairs"] = [
        {"pair": pair, "link": kinds[pair], "expected": expected[pair]}
        | {"result": found.get(pair), "without_p2p": without.get(pair)}
        for pair in kinds
    ]
    facts["all"] = {"result": together, "without_p2p": all_without}
    lines = check_pairs.pair_lines(found, without, expected, torch["peers"], off)
    tell(lines)
    tell(check_gpus.isolation(places, amd, all(level != ERROR for level, *_ in lines)))
    tell(check_pairs.all_line(len(devices), together, all_without))
    return later


def cpu(base, facts, tell) -> dict:
    """Two processes on the CPU, as the launchers would start. Returns no probes."""
    fleet = {i: Worker("torch") for i in range(2)}
    check_pairs.start_all([fleet], "cpu", LIMITS["start"])
    later = start_probes(base, facts, False)
    answers, _ = check_pairs.products({0: fleet[0]}, 0.6, LIMITS["gemm"])
    facts["cpu"] = answers[0]
    rates = answers[0].get("rates")
    if rates:
        text = ", ".join(f"{name} {rate * 1e3:.0f}" for name, rate in rates.items())
        tell([(OK, "cpu", f"{text} GFLOP/s in one process", "")])
    else:
        fix = "reinstall torch: rm -r .venv, then bash setup.sh"
        tell([(ERROR, "cpu", f"matrix product failed: {answers[0]['problem']}", fix)])
    with tempfile.TemporaryDirectory(prefix="llm_demo_check_") as folder:
        room = check_pairs.Room("cpu", "gloo", folder, LIMITS)
        found = check_pairs.try_pairs(fleet, room)
    base.send(do="deepspeed", env={"DS_ACCELERATOR": "cpu"})
    facts["pairs"] = [{"pair": pair, "result": result} for pair, result in found.items()]
    tell(check_pairs.gloo_line(found[0, 1]))
    return later


# ---------------------------------------------------------------- what the code needs


def start_probes(base, facts, amd) -> dict:
    """Start the probes that run while the GPUs are checked: name -> worker."""
    choices = facts["choices"] = receive([[base]], LIMITS["choices"])[0][0]
    probes = {}
    for impl in choices.get("probes", ()):
        args = [impl, choices["dtype"], *HEADS]
        probes[impl] = Worker("torch")
        probes[impl].send(do="module", name="llm_demo.attention", args=args)
    if facts["torch"]["devices"]:
        probes["compile"] = Worker("torch")
        probes["compile"].send(do="module", name="llm_demo.compiling", args=[])
    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION") if amd else ():
        probes[backend] = Worker("torch")
        probes[backend].send(do="sdpa", backend=backend, dtype=choices.get("dtype", "bf16"))
    return probes


def backends(probes: dict, base: Worker, facts: dict) -> list:
    """dtype, attention and torch.compile: what a run would choose, and why."""
    answers = receive([[worker] for worker in probes.values()], LIMITS["probe"])
    facts["probes"] = {name: answer for name, (answer,) in zip(probes, answers, strict=True)}
    for name, worker in probes.items():
        if facts["probes"][name].get("problem") and name.isupper():
            facts["probes"][name]["said"] = [x for x in worker.said().splitlines() if "Warn" in x]
        worker.kill()
    choices = facts["choices"]
    if choices.get("problem"):
        fix = f"pip install transformers=={check_machine.pinned('transformers')}"
        text = f"importing the attention backends failed: {choices['problem']}"
        return [(ERROR, "attention", text, fix)]
    problems = {name: answer.get("problem") for name, answer in facts["probes"].items()}
    compile_problem = problems.pop("compile", None)
    command = {"heads": HEADS, "problems": problems, "compile_problem": compile_problem}
    chosen = facts["chosen"] = ask(base, LIMITS["choices"], do="choose", **command)
    if chosen.get("problem"):
        return [(ERROR, "attention", f"choosing a backend failed: {chosen['problem']}", "")]

    lines = [(OK, "dtype", dtype_text(facts), "")]
    packed, single = chosen["packed"], chosen["single"]
    text = f"{packed['impl']} for packed rows, {single['impl']} for one document a row"
    if packed["impl"] == single["impl"]:
        text = packed["impl"]
    failed = [impl for impl in choices["probes"] if problems.get(impl)]
    right = [impl for impl in choices["probes"] if impl not in failed]
    text += f"; tested against math: {', '.join(right)}" * bool(right)
    against = {impl: why for impl, why in choices["against"].items() if why}
    text += "".join(f"; not {impl}: {why}" for impl, why in against.items())
    lines.append((OK, "attention", text, ""))
    for impl in failed:
        fix = "nothing to do, another backend is used; a newer driver or torch may help"
        lines.append((WARNING, "attention", f"{impl} fails: {problems[impl]}", fix))
    lines.append(compile_line(packed, single, probes, compile_problem))
    return lines


def dtype_text(facts) -> str:
    choices = facts["choices"]
    text = f"{choices['dtype']} by default: {choices['dtype_reason']}"
    rates = next((g["rates"] for g in facts.get("gpus", ()) if g.get("rates")), None)
    if rates:
        text += f"; GPU 0: {rates['bf16']:.0f} TFLOP/s in bf16, {rates['fp16']:.0f} in fp16"
    return text


def compile_line(packed, single, probes, problem) -> tuple:
    if problem:
        fix = "nothing to do, runs do without it; a newer torch may help"
        if any(word in problem for word in ("compiler", "gcc", "Python.h", "clang")):
            fix = "install a C compiler and Python's headers: apt install gcc python3-dev"
        return WARNING, "compile", f"torch.compile does not work here: {problem}", fix
    kinds = {"packed rows": packed, "one document a row": single}
    if len({(kind["compile"], kind["why"]) for kind in kinds.values()}) == 1:
        kinds = {"": packed}
    said = [
        f"{'on' if kind['compile'] else 'off'} by default{f' for {name}' * bool(name)}: "
        f"{kind['why']}"
        for name, kind in kinds.items()
    ]
    tried = "works here; " * ("compile" in probes)
    return OK, "compile", tried + "; ".join(said), ""


def deepspeed(answer: dict) -> tuple:
    pin = check_machine.pinned("deepspeed")
    fix = f"pip install deepspeed=={pin}"
    if answer.get("problem"):
        text = f"import failed: {answer['problem']}; FSDP works without it, the pipeline does not"
        return [(WARNING, "deepspeed", text, fix)]
    if not answer["launcher"]:
        text = f"{answer['version']} has a different launcher than {pin}: no pipeline runs"
        return [(WARNING, "deepspeed", text, fix)]
    other = f", tested with {pin}" * (pin not in ("", answer["version"]))
    return [(OK, "deepspeed", answer["version"] + other, "")]


def amd(devices, probes, facts) -> list:
    """Answers to open questions about AMD cards; see docs/check.md."""
    lines = []
    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
        answer = facts["probes"][backend]
        if answer.get("problem"):
            why = (answer.get("said") or [answer["problem"]])[-1]
            text = f"{backend} does not run on {devices[0]['arch']}: {why}"
            lines.append((OK, "sdpa", text, ""))
        elif answer["error"] > 4e-2:
            text = f"{backend} differs from math by {answer['error']:.1e}"
            lines.append((WARNING, "sdpa", text, "train with --attn_impl bucketed_math"))
        else:
            text = f"{backend} works: within {answer['error']:.1e} of math"
            lines.append((OK, "sdpa", text, ""))
    first = facts["gpus"][0]
    blas = first.get("blas", {})
    text = f"default {blas.get('default', 'unknown')}; "
    if first.get("hipblaslt"):
        rates = ", ".join(f"{k} {v:.0f}" for k, v in first["hipblaslt"].items())
        text += f"hipBLASLt: {rates} TFLOP/s (if faster: TORCH_BLAS_PREFER_HIPBLASLT=1)"
    else:
        text += blas.get("problem") or "this torch refuses hipBLASLt"
    lines.append((OK, "blas", text, ""))
    if found := facts.get("profile"):
        if found.get("problem"):
            text = f"profiling a collective failed: {found['problem']}"
            lines.append((WARNING, "profile", text, "train without --profile_steps"))
        else:
            names = ", ".join(found["kernels"]) or "none"
            text = (
                f"kernels of an all-reduce: {names}; arguments {'' if found['named'] else 'not '}"
            )
            text += f"recorded; flight recorder: {found.get('with_duration', 0)} of "
            text += f"{found.get('recorded', 0)} entries have a duration"
            lines.append((OK, "profile", text, ""))
    kinds = {pair["link"] for pair in facts.get("pairs", ())}
    return lines + check_gpus.amd_settings(devices, kinds)


# ---------------------------------------------------------------- the command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llm_demo.check", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for a report")
    parser.add_argument(
        "--output_dir",
        default=str(ROOT / "runs"),
        help="where runs would be saved (default: runs/)",
    )
    return parser


def show(line) -> str:
    level, name, text, fix = line
    return f"{level:<8} {name}: {text}" + (f" | fix: {fix}" if fix else "")


def main() -> int:
    args = make_parser().parse_args()
    if check_machine.python()[0][0] == ERROR:
        print(show(check_machine.python()[0]))
        return 1
    begun, lines, facts = time.monotonic(), [], {}

    def tell(more):
        lines.extend(more)
        if not args.json:
            for line in more:
                print(show(line), flush=True)

    try:
        facts = check(args.output_dir, tell)
    except KeyboardInterrupt:
        return 130
    except Exception as e:  # a bug in this command says nothing about the machine
        text = f"stopped early by a bug of its own: {type(e).__name__}: {e}"
        tell([(WARNING, "check", text, "please report this output")])
    finally:
        end_all()
    count = {level: sum(line[0] == level for line in lines) for level in (ERROR, WARNING)}
    seconds = time.monotonic() - begun
    if args.json:
        keys = ("level", "name", "text", "fix")
        lines = [dict(zip(keys, line, strict=True)) for line in lines]
        print(json.dumps({"seconds": round(seconds, 1), "lines": lines, "facts": facts}, indent=1))
    else:
        verdict = "training will not work" if count[ERROR] else "training should work"
        totals = ", ".join(f"{n} {level}{'s' * (n != 1)}" for level, n in count.items())
        print(f"{verdict}: {totals}, {seconds:.0f} s")
    return 1 if count[ERROR] else 0


if __name__ == "__main__":
    sys.exit(main())
