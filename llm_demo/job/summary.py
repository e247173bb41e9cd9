"""A run's history, its summary.json, the table row it prints, and the commands that it suggests."""

import itertools
import math
import os
import shlex
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from llm_demo.data.sources import hub_parts
from llm_demo.job.args import Args
from llm_demo.job.files import ROOT, finite
from llm_demo.job.folder import WARMUP, median, of_ranks, peaks_of

SETTLED = 3  # steps after which the allocator should have all that a step needs
COLUMNS = ("micro_bsz", "GA", "ckpt", "dtype", "step_ms", "comm_ms", "toks/s", "peak_mem(G)")
TIMES = ("perf/comm_ms", "perf/comm_exposed_ms", "perf/comm_wait_ms")  # None: not measured
MEDIANS = ("step_ms", "data_ms", "toks_per_s", "label_toks_per_s", "slots_per_s")
DATA_FLAGS = ("data_format", "input_key", "target_key")


class History:
    """What a run has done so far. A checkpoint keeps the totals and the evaluations."""

    def __init__(self):
        self.first_step = self.step = 0  # the last step before this process; the latest step
        self.tokens = self.label_tokens = 0
        self.records, self.evals = [], []  # logged steps; (step, held-out loss)
        self.exact = []  # (step, share of the held-out rows answered exactly)
        self.doubts = {}  # step -> doubt of each rank's communication time, see comm.py

    def resume(self, facts: dict) -> None:
        """Continue from a checkpoint's facts."""
        self.first_step = self.step = facts["step"]
        self.tokens, self.label_tokens = facts["tokens"], facts["label_tokens"]
        self.evals = [tuple(pair) for pair in facts["evals"]]
        self.exact = [tuple(pair) for pair in facts["exact"]]

    def facts(self, step: int) -> dict:
        """What a checkpoint of this step keeps, to resume and to find the best one."""
        return {
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
            "evals": list(self.evals),
            "exact": list(self.exact),
            "eval_loss": dict(self.evals).get(step),
        }


def summarise(
    history: History, settings: dict, seconds: float, peak_tflops, profile, host: list[float]
) -> dict:
    """The contents of summary.json. settings: resolved flags. profile: the profiler's figures or
    None. host: each rank's peak host memory."""
    records = history.records
    # Earlier processes may have been another script's, or more or fewer.
    ranks = len(records[-1]["perf/peak_mem_gb"])
    alike = [r for r in records if len(r["perf/peak_mem_gb"]) == ranks]
    steps = [r for r in records if r["step"] > history.first_step] or alike
    losses = [r["train/loss"] for r in records]
    times = [r["perf/step_ms"] for r in steps[WARMUP:] or steps]
    medians = {key: median(steps, f"perf/{key}") for key in MEDIANS}
    comm, exposed, wait = ([round(ms, 3) for ms in of_ranks(steps, key)] or None for key in TIMES)
    row = (
        settings["micro_batch_size"], settings["grad_accum_steps"],
        "T" if settings["use_activation_checkpointing"] else "F", settings["dtype"].upper(),
        f"{medians['step_ms']:.0f}", f"{max(comm):.0f}" if comm else "n/a",
        f"{medians['slots_per_s']:.0f}", " / ".join(f"{m:.1f}" for m in peaks_of(records[-1])),
    )  # fmt: skip
    return {
        "steps": records[-1]["step"],
        "seconds": seconds,
        "tokens": history.tokens,
        "label_tokens": history.label_tokens,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "best_loss": min((x for x in losses if math.isfinite(x)), default=None),
        "eval_loss": finite(dict(history.evals)),
        "eval_exact": dict(history.exact),
        "skipped_steps": sum(r.get("train/skipped") is True for r in records),
        "spread_step_ms": [min(times), max(times)],
        "median_comm_ms": comm,
        "median_comm_exposed_ms": exposed,
        "median_comm_wait_ms": wait,
        **{f"median_{key}": value for key, value in medians.items()},
        "mfu": median(steps, "perf/mfu") if peak_tflops else None,
        "peak_tflops": peak_tflops,
        "profile": profile,
        "peak_mem_gb": records[-1]["perf/peak_mem_gb"],
        "reserved_gb": records[-1].get("perf/reserved_gb"),
        "alloc_retries": retries_of(steps),
        "late_alloc_retries": retries_of(
            after
            for before, after in itertools.pairwise(steps)
            if before["step"] >= history.first_step + SETTLED
        ),
        "peak_host_gb": host,
        "row": dict(zip(COLUMNS, row, strict=True)),
    }


def retries_of(records: Iterable[dict]) -> int | None:
    """The allocator's retries in these records, of the rank with most; None if not recorded."""
    ranks = zip(*filter(None, (r.get("perf/alloc_retries") for r in records)), strict=True)
    return max(map(sum, ranks), default=None)


def timed_while_profiled(history: History, first: int, last: int) -> dict | None:
    """The means of each rank's event timings over the profiled steps; None: not measured."""
    same = [r for r in history.records if first <= r["step"] <= last]
    if not all(r["perf/comm_ms"] for r in same):
        return None
    ranks = {k: zip(*(r[k] for r in same), strict=True) for k in TIMES}
    ranks["doubt"] = zip(*(history.doubts[r["step"]] for r in same), strict=True)
    return {k: [statistics.fmean(x) for x in of_ranks] for k, of_ranks in ranks.items()}


def next_steps(folder: Path, args: Args, steps: int, best: Path) -> list[str]:
    """Lines for the end of a run of `steps` optimizer steps, with only the commands that can work
    now, or after those above them. They work in the folder where the run was started. best: the
    checkpoint to export, which --early_stopping chooses."""
    lines, of = [], int(best.name.removeprefix("step_"))
    source = folder if of == steps else best
    if (folder / "checkpoints/latest").is_file():
        exported = export_of(folder / "hf", of)
        if not exported.exists():
            lines.append(("export", module("export", shown(source), shown(exported))))
        if getattr(args, "lora_rank", 0):  # hf/ holds adapters
            exported = export_of(folder / "merged", of)
            if not exported.exists():
                lines.append(("merge", module("export", shown(source), shown(exported), "--merge")))
        if (folder / "model/chat_template.jinja").is_file():  # a run's chat is of its newest
            lines.append(("chat", module("chat", shown(folder if of == steps else exported))))
        if args.eval_json not in ("auto", "none"):
            lines.append(("evaluate", evaluate(exported, args)))
        if "NNODES" not in os.environ:  # else every node has its own command
            lines.append(("continue", resume(folder, "--max_steps", 2 * steps)))
    page = shown(folder / "report.html")
    lines.append(("report", module("report", shown(folder), "--out", page)))
    return [f"  {what + ':':<10}{line}" for what, line in lines]


def export_of(out: Path, steps: int) -> Path:
    """`out`, or beside it out_step_N if `out` holds an export of another step than `steps`."""
    card = out / "README.md"
    other = card.is_file() and f", {steps} optimizer steps, " not in card.read_text()
    return out.with_name(f"{out.name}_step_{steps}") if other else out


def evaluate(exported: Path, args: Args) -> str:
    """The command to evaluate the exported model (and a base with weights) on held-out data."""
    base = args.model_name_or_path
    folder = Path(base).expanduser()
    trained = not folder.is_dir() or any(folder.glob("*.safetensors"))
    trained &= not args.tokenizer_name_or_path  # the base may have no tokenizer
    flags = ["--data", with_config(args.eval_json, args.dataset_config)]
    flags += ["--seq_len", args.seq_len]
    for name in DATA_FLAGS:
        if getattr(args, name) not in (None, "auto"):
            flags += [f"--{name}", getattr(args, name)]
    flags += ["--train_on_prompt"] * args.train_on_prompt
    flags += ["--learn_turns", args.learn_turns] * (args.learn_turns != "all")
    flags += ["--learn_reasoning", "false"] * (not args.learn_reasoning)
    return module("evaluate", "--models", *[base] * trained, shown(exported), *flags)


def with_config(named: str, config: str | None) -> str:
    """Hub splits with the configuration in their name: id:config:split."""
    if not config:
        return named
    parts = [part.strip() for part in named.split(",")]
    for i, part in enumerate(parts):
        if (hub := hub_parts(part)) and not hub[1]:
            parts[i] = ":".join([hub[0], config, *filter(None, hub[2:])])
    return ",".join(parts)


def resume(folder: Path, *flags) -> str:
    """The command that resumes from the run's newest checkpoint."""
    if "NNODES" in os.environ:
        return "the same command on every node, with --resume auto"
    flags = ["--output_dir", folder.absolute(), "--no_overwrite", "--resume", "auto", *flags]
    return shlex.join(["bash", shown(folder / "cmd.sh"), *map(str, flags)])


def module(name: str, *arguments) -> str:
    """python -m llm_demo.NAME with these arguments, from any folder."""
    in_root = users_folder() == ROOT  # python -m finds the package there
    path = [] if in_root else [f"PYTHONPATH={shlex.quote(str(ROOT))}"]
    words = [shown(Path(sys.executable)), "-m", f"llm_demo.{name}", *map(str, arguments)]
    return " ".join([*path, shlex.join(words)])


def shown(path: Path) -> str:
    """The path, relative to the user's working folder if it lies inside."""
    path, folder = path.absolute(), users_folder()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def users_folder() -> Path:
    """Where the user started the run: a run's cmd.sh goes to the folder of the run before."""
    return Path(os.environ.get("LLM_DEMO_STARTED_IN", Path.cwd()))
