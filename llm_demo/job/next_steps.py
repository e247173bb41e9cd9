"""Suggest commands to paste after a run has ended."""

import os
import shlex
import sys
from pathlib import Path

from llm_demo.data.sources import hub_parts
from llm_demo.job.args import Args
from llm_demo.job.files import ROOT

DATA_FLAGS = ("data_format", "input_key", "target_key")


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
