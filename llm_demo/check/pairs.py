"""Communication between GPUs: pair by pair, then all together.

Drivers report peer-to-peer as working on machines where it hangs or returns wrong values. So every
received value is compared, and a control runs without peer-to-peer. A result is what
experiments.group measured, or {"problem", "hung", "log"}."""

import os
import re
import statistics
import time

from llm_demo.check.machine import ERROR, OK, WARNING
from llm_demo.check.processes import Worker, receive

LIMITS = {"start": 60, "gemm": 30, "pair": 20, "all": 30, "pairs": 40}  # seconds
SLOW = 0.6  # share of a link's bandwidth
P2P_OFF = "NCCL_P2P_DISABLE"
FIX_P2P = (
    f"boot with iommu=pt (AMD: or amd_iommu=off) and disable ACS in the BIOS; until then, "
    f"export {P2P_OFF}=1"
)
FIX_BOTH = "NCCL_DEBUG=INFO python -m llm_demo.check --json shows NCCL's log; look at dmesg"
FIX_SHM = f"leave {P2P_OFF} unset; if you need it, enlarge /dev/shm (docker: --ipc=host)"


class Fleet:
    """One worker per GPU, or several on a CPU."""

    def __init__(self, count: int, device: str, folder: str, **env: str):
        """device: "cuda" or "cpu"; folder: for the files through which groups find each other."""
        self.workers = [Worker(**env) for _ in range(count)]
        self.env, self.device, self.folder = env, device, folder

    def start(self) -> None:
        """Open the devices of new workers. A worker that fails gets a `problem`."""
        new = [w for w in self.workers if not w.ready and w.problem is None]
        for worker in new:
            i = self.workers.index(worker)
            worker.send("start", device=f"cuda:{i}" if self.device == "cuda" else "cpu")
        for worker, (answer,) in zip(new, receive([[w] for w in new], LIMITS["start"])):  # noqa: B905
            worker.ready = not answer.get("problem")
            if not worker.ready:
                worker.kill(answer["problem"])

    def products(self, seconds: float, amd: bool, look) -> tuple[list[dict], dict]:
        """(each worker's answer to `gemm`, what look() returned while they were busy)"""
        for worker in self.workers:
            worker.send("gemm", seconds=seconds, amd=amd)
        time.sleep(seconds / 4)
        seen = look()
        answers = receive([[worker] for worker in self.workers], LIMITS["gemm"])
        return [answer for (answer,) in answers], seen

    def talk(self, groups: list, kind: str) -> list[dict]:
        """The result of each group of GPUs. All groups run at the same time.

        The workers of a group that failed are replaced."""
        self.start()
        backend = "gloo"
        if self.device == "cuda":  # all GPUs together, as in training
            backend = "nccl" if kind == "pair" else "cpu:gloo,cuda:nccl"
        results = {}
        for g in groups:
            if problems := [self.workers[i].problem for i in g if self.workers[i].problem]:
                results[g] = {"problem": f"not tried: {problems[0]}"}
        able = [g for g in groups if g not in results]
        for g in able:
            file = f"{self.folder}/{time.monotonic_ns()}-{'-'.join(map(str, g))}"
            for rank, i in enumerate(g):
                # Longer than our limit, because PyTorch's timeout aborts the process.
                place = {"file": file, "backend": backend, "limit": 4 * LIMITS[kind]}
                self.workers[i].send("group", rank=rank, size=len(g), **place)
        answers = receive([[self.workers[i] for i in g] for g in able], LIMITS[kind])
        for g, answer in zip(able, answers, strict=True):
            results[g] = combine(answer)
            if results[g].get("problem"):
                results[g]["log"] = [line for i in g for line in self.workers[i].errors()]
                for i in g:
                    self.workers[i].kill("replaced")
                    self.workers[i] = Worker(**self.env)
        return [results[g] for g in groups]

    def try_pairs(self) -> dict:
        """pair -> result. Stops early if time is up or a whole round has failed."""
        by_pair, begun = {}, time.monotonic()
        for pairs in rounds(list(range(len(self.workers)))):
            results = self.talk(pairs, "pair")
            by_pair |= zip(pairs, results, strict=True)
            if all(map(failure, results)) or time.monotonic() - begun > LIMITS["pairs"]:
                break
        return by_pair

    def measure_alone(self, results: dict, expected: dict) -> None:
        """Measure slow pairs again with the other GPUs idle, because pairs may share a bus.

        Updates `results`; takes at most ten seconds."""
        begun = time.monotonic()
        for pair, result in results.items():
            if is_slow(result, expected.get(pair)) and time.monotonic() - begun < 10:
                alone = self.talk([pair], "pair")[0]
                if failure(alone) or speed(alone) > speed(result):
                    results[pair] = alone
                results[pair]["alone"] = True

    def try_all(self) -> dict:
        return self.talk([tuple(range(len(self.workers)))], "all")[0]


def combine(answers: list[dict]) -> dict:
    """One result from the answers of a group's processes."""
    failed = [answer for answer in answers if answer.get("problem")]
    if failed:  # a process that hung may only have waited for one that failed
        return dict(min(failed, key=lambda answer: answer.get("hung", False)))
    result = dict(answers[0])
    if "wrong" in result:
        counts = [answer["wrong"] for answer in answers]
        result["wrong"] = {name: sum(count[name] for count in counts) for name in counts[0]}
        result["elements"] = sum(answer["elements"] for answer in answers)
    return result


def rounds(gpus: list):
    """All pairs, in round-robin rounds of disjoint pairs: n - 1 rounds if n is even."""
    ring = [*gpus, None] if len(gpus) % 2 else list(gpus)
    half = len(ring) // 2
    for _ in range(len(ring) - 1):
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [tuple(sorted(pair)) for pair in pairs if None not in pair]
        ring.insert(1, ring.pop())


# ---------------------------------------------------------------- what it means


def failure(result: dict | None) -> str | None:
    """The problem with a group's result; None if every value was correct."""
    if result is None:
        return None
    if result.get("problem"):
        return f"{'hang' if result.get('hung') else 'fail'} ({result['problem']})"
    wrong = [f"{count:,} in {name}" for name, count in result["wrong"].items() if count]
    if wrong:
        return f"return wrong values ({', '.join(wrong)}, of {result['elements']:,} compared)"
    return None


def diagnose(result: dict, control: dict | None) -> tuple[str, str, str] | None:
    """(level, text, fix) if a group or its control, with NCCL_P2P_DISABLE=1, failed; else None."""
    problem, control_problem = failure(result), failure(control)
    if problem and control_problem:
        return ERROR, f"{problem}; with {P2P_OFF}=1 they {control_problem}", FIX_BOTH
    if problem and control:
        return ERROR, f"{problem}; correct with {P2P_OFF}=1, so peer-to-peer is broken", FIX_P2P
    if problem:
        return ERROR, problem, FIX_BOTH
    if control_problem:
        return WARNING, f"correct, but with {P2P_OFF}=1 they {control_problem}", FIX_SHM
    return None


def speed(result: dict) -> float:
    """GB/s over a pair's link: its all-reduce or its slower send, whichever is faster."""
    return max(result["all_reduce"], min(result.get("send", [0])))


def is_slow(result: dict, expected: tuple | None) -> bool:
    return bool(expected and not failure(result) and speed(result) < SLOW * expected[0])


def diagnose_speed(result: dict, control: dict | None, expected: tuple | None, offered: bool):
    """(level, text, fix) of a correct but slow pair; None if it is not slow.

    In the text, RATE stands for the pair's GB/s."""
    if control and speed(control) > 1.3 * speed(result):
        text = f"{speed(result):.1f} GB/s, but {speed(control):.1f} with {P2P_OFF}=1"
        return WARNING, f"{text}: peer-to-peer is slower than host memory", FIX_P2P
    if not is_slow(result, expected):
        return None
    text = f"RATE GB/s of the {expected[0]:.0f} of {expected[1]}"
    text += ", while other pairs were active" * ("alone" not in result)
    if expected[1].startswith("NV"):
        fix = "look for links that are down or report errors: nvidia-smi nvlink -s; nvlink -e"
    elif offered:
        fix = "use full-width slots on one CPU socket; iommu=pt, ACS off"
    else:
        text += "; the driver offers no peer-to-peer here, so data goes through host memory"
        fix = "GeForce cards: nothing; others: iommu=pt, ACS off, Resizable BAR on"
    return WARNING, text, fix


def range_of(values) -> str:
    return " to ".join(dict.fromkeys(f"{x:.0f}" for x in (min(values), max(values))))


def pair_names(pairs: list) -> str:
    more = f" and {len(pairs) - 8} more pairs" if len(pairs) > 8 else ""
    return "GPUs " + ", ".join(f"{i}-{j}" for i, j in pairs[:8]) + more


def pair_lines(results: dict, control: dict, expected: dict, peers: list) -> list:
    """One line for all healthy pairs, and one for each kind of problem.

    results, control: pair -> result, without and with NCCL_P2P_DISABLE=1. expected: pair -> (GB/s,
    name) or None. peers[i][j]: whether the driver offers peer-to-peer."""
    groups, healthy, lines = {}, [], []
    for pair, result in sorted(results.items()):
        offered = not peers or peers[pair[0]][pair[1]]
        other = control.get(pair)
        diagnosis = diagnose(result, other)
        diagnosis = diagnosis or diagnose_speed(result, other, expected.get(pair), offered)
        if diagnosis:  # group by fix and by the text before the first number
            key = diagnosis[0], diagnosis[2], re.match(r"\D*", diagnosis[1])[0]
            groups.setdefault(key, []).append((pair, diagnosis))
        else:
            healthy.append(pair)
    if healthy:
        lines.append((OK, "pairs", _healthy(healthy, results, control, expected), ""))
    for group in groups.values():
        pairs = [pair for pair, _ in group]
        level, text, fix = group[0][1]
        if "RATE" in text:
            text = text.replace("RATE", range_of([speed(results[pair]) for pair in pairs]))
        lines.append((level, "pairs", f"{pair_names(pairs)}: {text}", fix))
    if missing := [pair for pair in expected if pair not in results]:
        text = f"{pair_names(missing)}: not tried, because other pairs failed or took too long"
        lines.append((WARNING, "pairs", text, "fix the other pairs, then check again"))
    return lines


def _healthy(pairs, results, control, expected):
    healthy = [results[pair] for pair in pairs]
    text = (
        f"{len(pairs)} of {len(expected)} pairs: " if len(pairs) > 2 else f"{pair_names(pairs)}: "
    )
    rates = [speed(result) for result in healthy]
    text += f"all {sum(r['elements'] for r in healthy):,} values correct, {range_of(rates)} GB/s"
    links = [expected.get(pair) for pair in pairs]
    if all(links):
        shares = range_of([100 * rate / gb for rate, (gb, _) in zip(rates, links, strict=True)])
        text += f" ({shares}% of {', '.join(dict.fromkeys(name for _, name in links))})"
    text += f", {statistics.median(r['latency_us'] for r in healthy):.0f} µs"
    if os.environ.get(P2P_OFF, "0") != "0":
        text += f"; {P2P_OFF} is set, so peer-to-peer was not tried"
    elif beside := [speed(control[pair]) for pair in pairs if pair in control]:
        text += f"; with {P2P_OFF}=1 also correct, {range_of(beside)} GB/s"
    return text


def all_line(count: int, result: dict | None, control: dict | None) -> list:
    if result is None:
        return [(WARNING, "together", "not tried, because pairs failed", "fix the pairs first")]
    if diagnosis := diagnose(result, control):
        level, text, fix = diagnosis
        return [(level, "together", f"{count} GPUs: {text}", fix)]
    text = f"{count} GPUs: all {result['elements']:,} values correct"
    return [(OK, "together", f"{text}, {result['all_reduce']:.0f} GB/s", "")]


def gloo_line(result: dict) -> list:
    """The line for two processes on a CPU."""
    if problem := failure(result):
        fix = "make the host name resolve (/etc/hosts), or export GLOO_SOCKET_IFNAME=lo"
        return [(ERROR, "pair", f"two processes with gloo {problem}", fix)]
    text = f"two processes with gloo: all {result['elements']:,} values correct"
    return [(OK, "pair", f"{text}, {speed(result):.1f} GB/s, {result['latency_us']:.0f} µs", "")]
