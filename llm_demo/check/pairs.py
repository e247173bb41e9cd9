"""Communication between GPUs: pair by pair, then all together.

Drivers report peer-to-peer as working where it hangs or returns wrong values. So every received
value is compared, and a control runs without it. A result: that of groups.group, or a problem."""

import time
from collections.abc import Callable

from llm_demo.check.machine import ERROR, OK, WARNING
from llm_demo.check.processes import finish

LIMIT, GRACE, TOTAL = 20, 3, 40  # seconds without progress; so after a failure; for all attempts
P2P_OFF = "NCCL_P2P_DISABLE"
FIX_P2P = f"boot with iommu=pt, switch ACS off in the BIOS; until then, export {P2P_OFF}=1"
FIX_BOTH = "look at dmesg, /dev/shm (docker: --ipc=host), /etc/hosts and, with --json, NCCL's log"


def try_groups(groups: list, device: str, start: Callable, folder: str, limit=LIMIT) -> dict:
    """group -> result. A process for each index joins the groups that hold it, in their order. A
    group that fails ends the processes; new ones try the others, but none of more than two.

    groups: tuples of indices. device: "cuda:{}" or "cpu". start(*tasks) -> Job."""
    results, left, begun = {}, list(groups), time.monotonic()
    while left and time.monotonic() < begun + TOTAL:
        members, meeting = sorted(set().union(*left)), f"{folder}/{time.monotonic_ns()}"
        mine, jobs = {i: [g for g in left if i in g] for i in members}, {}
        for i in members:
            # PyTorch's own limit is longer than ours, because it aborts the process
            place = {"device": device.format(i), "index": i, "meeting": meeting, "limit": 4 * limit}
            jobs[i] = start(*(("group", place | {"members": g}) for g in mine[i]))
        answers = zip(members, finish(jobs.values(), limit, GRACE), strict=True)
        given = {i: dict(zip(mine[i], each, strict=False)) for i, each in answers}
        for g in left:
            each = [given[i].get(g, {"waits": True}) for i in g]
            broke = any("problem" in answer and "hung" not in answer for answer in each)
            if not broke and any("waits" in answer for answer in each):
                continue  # for a member that is still at an earlier group: this one may be well
            results[g] = _combine(each)
            if results[g].get("problem"):
                results[g]["log"] = [line for i in g for line in jobs[i].last_words()]
        failed = any(map(failure, results.values()))
        left = [g for g in left if g not in results and not (failed and len(g) > 2)]
    return results


def _combine(answers: list[dict]) -> dict:
    """One result from the answers of a group's processes."""
    failed = [answer for answer in answers if answer.get("problem")]
    if failed:  # a process that hung may only have waited for one that failed
        return dict(min(failed, key=lambda answer: answer.get("hung", False)))
    wrong = {name: sum(a["wrong"][name] for a in answers) for name in answers[0]["wrong"]}
    slowest = min(answers, key=lambda answer: answer["all_reduce"])
    return {**slowest, "wrong": wrong, "elements": sum(a["elements"] for a in answers)}


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


def group_line(name: str, result: dict | None, other: dict | None = None, best=0.0) -> tuple:
    """The line of a group. result: None if it was not tried; other: its result with
    NCCL_P2P_DISABLE=1, if tried; best: GB/s of the fastest group of the same kind."""
    if result is None:
        return WARNING, name, "not tried, because others failed", "mend them, then check again"
    trouble, without = failure(result), failure(other)
    if trouble and other and not without:
        text = f"{trouble}; correct with {P2P_OFF}=1, so peer-to-peer is broken"
        return ERROR, name, text, FIX_P2P
    if trouble:
        return ERROR, name, trouble + f"; with {P2P_OFF}=1: {without}" * bool(without), FIX_BOTH
    rate = result["all_reduce"]
    text = f"all {result['elements']:,} values correct, {rate:.1f} GB/s"
    text += f", {result['latency_us']:.0f} µs" if "latency_us" in result else ""
    if without:
        return WARNING, name, f"{text}; with {P2P_OFF}=1: {without}", f"leave {P2P_OFF} unset"
    if other:
        text += f"; {other['all_reduce']:.1f} GB/s with {P2P_OFF}=1"
        if other["all_reduce"] > 1.3 * rate:
            return WARNING, name, f"{text}: peer-to-peer is slower than host memory", FIX_P2P
    if rate < 0.6 * best:
        fix = "NVLink: nvidia-smi nvlink -s; PCIe: full-width slots, iommu=pt, ACS off"
        return WARNING, name, f"{text}; others with such a link have up to {best:.0f}", fix
    return OK, name, text, ""
