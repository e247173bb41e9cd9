"""The commands that a run proposes at its end."""

import os
from pathlib import Path

from llm_demo.flags.args import Args, DataArgs, names_of
from llm_demo.flags.parsing import flag_text
from llm_demo.machine.text import module, resume, shown


def export_of(out: Path, steps: int) -> Path:
    """`out`, or beside it out_step_N if `out` holds an export of another step than `steps`."""
    card = out / "README.md"
    if card.is_file() and f", {steps} optimizer steps, " not in card.read_text("utf-8"):
        return out.with_name(f"{out.name}_step_{steps}")
    return out


def next_steps(folder: Path, args: Args, steps: int, best: Path, system: str = "") -> list[str]:
    """Lines for the end of a run of `steps` optimizer steps, with only the commands that can work
    now, or after those above them. They work in the folder where the run was started. best: the
    checkpoint to export, which --early_stopping chooses. system: the system prompt of all rows."""
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
            asked = [f"--system={system}"] if system else []
            of_chat = shown(folder if of == steps else exported)
            lines.append(("chat", module("chat", of_chat, *asked)))
        lines.append(("evaluate", evaluate_command(exported, args)))
        if "NNODES" not in os.environ:  # else every node has its own command
            lines.append(("continue", resume(folder, "--max_steps", 2 * steps)))
    page = shown(folder / "report.html")
    lines.append(("report", module("report", shown(folder), "--out", page)))
    return [f"  {what + ':':<10}{line}" for what, line in lines]


def evaluate_command(exported: Path, args: Args) -> str:
    """The command to evaluate the exported model (and a base with weights) on held-out data, which
    is for the user to name where a run has none in a file."""
    base = args.model_name_or_path
    folder = Path(os.path.expanduser(base))
    trained = not folder.is_dir() or any(folder.glob("*.safetensors"))
    trained &= not args.tokenizer_name_or_path  # the base may have no tokenizer
    data = "FILE" if args.eval_json in ("auto", "none") else args.eval_json
    flags = ["--data", data]
    for name in names_of("evaluate"):
        value = getattr(args, name)
        if value != getattr(DataArgs, name):
            flags += [f"--{name}", flag_text(value)]
    models = [base, shown(exported)] if trained else [shown(exported)]
    return module("evaluate", "--models", *models, *flags)
