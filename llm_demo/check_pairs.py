"""Communication between GPUs, for llm_demo.check: pair by pair, then all together.

Lines are as in check_machine. A fleet is a dict: GPU -> its worker. Drivers report peer-to-peer as
working on machines where it hangs or returns wrong values, so every value received is compared."""

from __future__ import annotations  # so that a Python that is too old gets as far as saying so

import os
import statistics
import time
from typing import NamedTuple

from llm_demo.check_machine import ERROR, OK, WARNING
from llm_demo.check_process import receive

SLOW = 0.6  # of a link's bandwidth
P2P_OFF = "NCCL_P2P_DISABLE"
FIX_P2P = (
    f"boot with iommu=pt (AMD: or amd_iommu=off) and disable ACS in the BIOS; until then, "
    f"export {P2P_OFF}=1"
)


MORE = "NCCL_DEBUG=INFO python -m llm_demo.check --json shows NCCL's log"


class Room(NamedTuple):
    """Where groups of workers meet."""

    device: str  # "cuda" or "cpu"
    backend: str  # of torch.distributed
    folder: str  # for the files through which they find each other
    limits: dict  # seconds


def start_all(fleets: list, device: str, limit: float) -> None:
    """Open the devices of all new workers and wait; a worker that fails gets a `problem`."""
    waiting = [
        (i, worker)
        for fleet in fleets
        for i, worker in fleet.items()
        if not worker.ready and worker.problem is None
    ]
    for i, worker in waiting:
        worker.send(do="start", device=f"cuda:{i}" if device == "cuda" else "cpu")
    answers = receive([[worker] for _, worker in waiting], limit)
    for (_, worker), (answer,) in zip(waiting, answers, strict=True):
        worker.ready = not answer.get("problem")
        if not worker.ready:
            worker.kill(answer["problem"])


def products(fleet: dict, seconds: float, limit: float, look=None, blas=False) -> tuple:
    """Multiply matrices on all GPUs at once: (GPU -> answer of `gemm`, readings of `look`).

    look: called twice while the GPUs are busy."""
    answers = {i: {"problem": worker.problem} for i, worker in fleet.items()}
    ready = {i: worker for i, worker in fleet.items() if worker.ready}
    for worker in ready.values():
        worker.send(do="gemm", seconds=seconds, blas=blas)
    readings = []
    for _ in range(2) if look else ():
        time.sleep(seconds / 5)
        readings.append(look())
    found = receive([[worker] for worker in ready.values()], limit)
    answers |= {i: answer for i, (answer,) in zip(ready, found, strict=True)}
    return answers, readings


# ---------------------------------------------------------------- groups at work


def talk(fleet: dict, groups: list, room: Room, kind: str, do="group") -> list[dict]:
    """The result of each group of GPUs; all groups run at the same time.

    A result is what check_worker.group measured, or {"problem", "hung"} as in
    check_process.receive with what the processes "said". The workers of a group that failed are
    replaced."""
    start_all([fleet], room.device, room.limits["start"])
    limit = room.limits[kind]
    able = [g for g in groups if all(fleet[i].problem is None for i in g)]
    for g in able:
        file = os.path.join(room.folder, f"{time.monotonic_ns()}-{'-'.join(map(str, g))}")
        for rank, i in enumerate(g):
            where = {"rank": rank, "size": len(g), "file": file, "backend": room.backend}
            # PyTorch's own timeout comes later than ours: it would abort the process
            fleet[i].send(do=do, limit=4 * limit, **where)
    answers = receive([[fleet[i] for i in g] for g in able], limit)
    results = {g: joined(answer) for g, answer in zip(able, answers, strict=True)}
    for g in able:
        if results[g].get("problem"):
            results[g]["said"] = {i: fleet[i].said().splitlines()[-40:] for i in g}
            for i in g:
                fleet[i].kill()
                fleet[i] = fleet[i].again()
    for g in groups:
        problem = next((fleet[i].problem for i in g if fleet[i].problem), None)
        results.setdefault(g, {"problem": f"not tried: {problem}"})
    return [results[g] for g in groups]


def joined(answers: list[dict]) -> dict:
    """One result from the answers of a group's processes."""
    problems = [a["problem"] for a in answers if a.get("problem")]
    if problems:
        own = [p for p in problems if not p.startswith("lost its peer")]
        return {"problem": (own or problems)[0], "hung": any(a.get("hung") for a in answers)}
    result = dict(answers[0])
    if "wrong" in result:
        names = dict.fromkeys(name for a in answers for name in a["wrong"])
        result["wrong"] = {name: sum(a["wrong"].get(name, 0) for a in answers) for name in names}
        result["elements"] = sum(a["elements"] for a in answers)
    return result


def rounds(gpus: list):
    """All pairs, in rounds of disjoint pairs (a round-robin): n - 1 rounds if n is even."""
    ring = [*gpus, None] if len(gpus) % 2 else list(gpus)
    half = len(ring) // 2
    for _ in range(len(ring) - 1):
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [tuple(sorted(pair)) for pair in pairs if None not in pair]
        ring.insert(1, ring.pop())


def try_pairs(fleet: dict, room: Room) -> dict:
    """pair -> result. Stops early when time is up or a whole round has failed."""
    found, begun = {}, time.monotonic()
    for pairs in rounds(list(fleet)):
        results = talk(fleet, pairs, room, "pair")
        if len(pairs) == 1:
            results[0]["alone"] = True
        found |= dict(zip(pairs, results, strict=True))
        if all(map(trouble, results)) or time.monotonic() - begun > room.limits["pairs"]:
            break
    return found


def again_alone(found: dict, expected: dict, fleet: dict, room: Room) -> None:
    """Measure slow pairs again with the other GPUs idle, since pairs of a round may share a bus.

    Updates `found`; takes ten seconds at most."""
    slow = [p for p in found if (share(found[p], expected.get(p)) or 1) < SLOW]
    begun = time.monotonic()
    for pair in slow:
        if not found[pair].get("alone") and time.monotonic() - begun < 10:
            result = talk(fleet, [pair], room, "pair")[0]
            if trouble(result) or speed(result) > speed(found[pair]):
                found[pair] = result
            found[pair]["alone"] = True


def try_all(fleet: dict, room: Room) -> dict:
    """The result of all GPUs together."""
    backend = "cpu:gloo,cuda:nccl" if room.backend == "nccl" else room.backend  # as in training
    return talk(fleet, [tuple(fleet)], room._replace(backend=backend), "all")[0]


# ---------------------------------------------------------------- what it means


def trouble(result: dict | None) -> str | None:
    """What is wrong with a group's result; None if every value was correct."""
    if result is None:
        return None
    if result.get("hung"):
        return f"hang ({result['problem']})"
    if result.get("problem"):
        return f"fail ({result['problem']})"
    wrong = {name: count for name, count in result["wrong"].items() if count}
    if wrong:
        counts = " and ".join(f"{count:,} in {name}" for name, count in wrong.items())
        return f"return wrong values ({counts}, of {result['elements']:,} compared)"
    return None


def speed(result: dict) -> float:
    """GB/s over a pair's link: its all-reduce or its slower send, whichever is faster."""
    return max(result["all_reduce"], min(result["send"], default=0.0))


def share(result: dict | None, expected) -> float | None:
    """The fraction of the link's bandwidth that a pair reached; None if unknown."""
    if result is None or trouble(result) or not expected:
        return None
    return speed(result) / expected[0]


def _span(values, form="{:.0f}") -> str:
    low, high = (form.format(x) for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _names(pairs) -> str:
    text = ", ".join(f"{i}-{j}" for i, j in pairs[:8])
    return f"GPUs {text}" + (f" and {len(pairs) - 8} more pairs" if len(pairs) > 8 else "")


def pair_lines(found: dict, control: dict, expected: dict, peers: list, off: bool) -> list:
    """One line for all healthy pairs, and one for each kind of trouble.

    found, control: pair -> result, without and with NCCL_P2P_DISABLE=1. off: the user has set that
    variable, so there is no control. expected: pair -> (GB/s, name) or None. peers[i][j]: whether
    the driver offers peer-to-peer."""
    groups, well = {}, []
    for pair in sorted(found):
        result, beside = found[pair], control.get(pair)
        bad = trouble(result)
        if bad:
            kind = (bad.split(" (")[0], beside is None, trouble(beside) is None)
        elif trouble(beside):
            kind = "control", trouble(beside).split(" (")[0]
        elif beside and speed(beside) > 1.3 * speed(result):
            kind = ("reverse",)
        elif (share(result, expected.get(pair)) or 1) < SLOW:
            kind = "slow", expected[pair][1], not peers or peers[pair[0]][pair[1]]
        else:
            well.append(pair)
            continue
        groups.setdefault(kind, []).append(pair)
    lines = [_well_line(well, found, control, expected, off)] if well else []
    for kind, pairs in groups.items():
        lines.append(_bad_line(kind, pairs, found, control, expected, off))
    missing = [pair for pair in expected if pair not in found]
    if missing:
        text = f"{_names(missing)}: not tried, because other pairs failed or took too long"
        lines.append((WARNING, "pairs", text, "fix the other pairs, then check again"))
    return lines


def _well_line(pairs, found, control, expected, off):
    results = [found[pair] for pair in pairs]
    text = f"{_names(pairs)}: " if len(pairs) < 3 else f"{len(pairs)} of {len(expected)} pairs: "
    text += f"all {sum(r['elements'] for r in results):,} values correct"
    text += f", {_span([speed(r) for r in results])} GB/s"
    shares = [share(found[pair], expected.get(pair)) for pair in pairs]
    links = dict.fromkeys(expected[pair][1] for pair in pairs if expected.get(pair))
    if all(shares):
        text += f" ({_span([100 * s for s in shares])}% of {', '.join(links)})"
    text += f", {statistics.median(r['latency_us'] for r in results):.0f} µs"
    if off:
        text += f"; {P2P_OFF} is set, so peer-to-peer was not tried"
    elif beside := [speed(control[p]) for p in pairs if control.get(p)]:
        text += f"; with {P2P_OFF}=1 also correct, {_span(beside)} GB/s"
    return OK, "pairs", text, ""


def _bad_line(kind, pairs, found, control, expected, off):
    first, names = pairs[0], _names(pairs)
    result, beside = found[first], control.get(first)
    if kind[0] == "control":
        text = f"{names}: correct, but with {P2P_OFF}=1 they {trouble(beside)}"
        fix = "leave that variable unset; if you need it, enlarge /dev/shm (docker: --ipc=host)"
        return WARNING, "pairs", text, fix
    if kind[0] == "reverse":
        text = f"{names}: {speed(result):.1f} GB/s, but {speed(beside):.1f} with {P2P_OFF}=1"
        return WARNING, "pairs", f"{text}: peer-to-peer is slower than host memory", FIX_P2P
    if kind[0] == "slow":
        gb, link = expected[first]
        reached = _span([speed(found[p]) for p in pairs])
        text = f"{names}: {reached} GB/s of the {gb:.0f} of {link}"
        text += ", with other pairs active" * (not all(found[p].get("alone") for p in pairs))
        if link.startswith("NV"):
            fix = "look for links that are down or report errors: nvidia-smi nvlink -s; nvlink -e"
        elif not kind[2]:
            text += "; the driver offers no peer-to-peer here, so data goes through host memory"
            fix = "GeForce cards: nothing; others: iommu=pt, ACS off, Resizable BAR on"
        else:
            fix = "use full-width slots on one CPU socket; iommu=pt, ACS off"
        return WARNING, "pairs", text, fix
    text = f"{names}: {trouble(result)}"
    if beside is None:
        more = f" with {P2P_OFF} set" * off
        return ERROR, "pairs", text + more, f"{MORE}; look at dmesg"
    if trouble(beside):
        fix = f"{MORE}; look at dmesg and at /dev/shm below"
        return ERROR, "pairs", f"{text}; with {P2P_OFF}=1 they {trouble(beside)}", fix
    return ERROR, "pairs", f"{text}; correct with {P2P_OFF}=1, so peer-to-peer is broken", FIX_P2P


def all_line(count: int, result: dict | None, control: dict | None) -> list:
    """The line for all GPUs together; control: the result with NCCL_P2P_DISABLE=1."""
    if result is None:
        return [(WARNING, "together", "not tried, because pairs failed", "fix the pairs first")]
    if bad := trouble(result):
        text, fix = f"{count} GPUs {bad}", MORE
        if control and not trouble(control):
            text, fix = f"{text}; correct with {P2P_OFF}=1, so peer-to-peer is broken", FIX_P2P
        return [(ERROR, "together", text, fix)]
    text = f"{count} GPUs: all {result['elements']:,} values correct"
    text += f", {result['all_reduce']:.0f} GB/s"
    if control and trouble(control):
        text += f"; with {P2P_OFF}=1 they {trouble(control)}"
        return [(WARNING, "together", text, "enlarge /dev/shm (docker: --ipc=host)")]
    return [(OK, "together", text, "")]


def gloo_line(result: dict) -> list:
    """The line for two processes on a CPU."""
    if bad := trouble(result):
        fix = "make the host name resolve (/etc/hosts), or export GLOO_SOCKET_IFNAME=lo"
        return [(ERROR, "pair", f"two processes with gloo {bad}", fix)]
    text = f"two processes with gloo: all {result['elements']:,} values correct"
    return [(OK, "pair", f"{text}, {speed(result):.1f} GB/s, {result['latency_us']:.0f} µs", "")]
