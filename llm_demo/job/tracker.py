"""Send a run's numbers to TensorBoard or Weights & Biases, in addition to its files."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from llm_demo.core.errors import UserError


def open_tracker(name: str) -> tuple[Callable, Callable]:
    """(track(folder, record), close()), which do nothing without a tracker. name: of --report_to,
    whose package is imported only then."""
    if name == "none":
        return lambda folder, record: None, lambda: None
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
        else:
            import wandb
    except ImportError as e:
        raise UserError(f"--report_to {name}: run pip install {name}") from e

    opened = {}  # "writer" or "run", from the first record on

    def to_tensorboard(folder: Path, record: dict) -> None:
        if not opened:
            opened["writer"] = SummaryWriter(folder / "tb")
            config = json.loads((folder / "config.json").read_text())
            rows = "\n".join(f"| {key} | {value} |" for key, value in config.items())
            opened["writer"].add_text("config", f"| setting | value |\n|---|---|\n{rows}")
        for key, value in numbers(record).items():
            opened["writer"].add_scalar(key, value, record["step"])
        opened["writer"].flush()

    def to_wandb(folder: Path, record: dict) -> None:
        if not opened:
            project = os.environ.get("WANDB_PROJECT", "llm_demo")
            config = json.loads((folder / "config.json").read_text())
            opened["run"] = wandb.init(project=project, name=folder.name, dir=folder, config=config)
        # a checkpoint is reported steps later, when it is written; wandb drops earlier steps
        opened["step"] = max(opened.get("step", 0), record["step"])
        opened["run"].log(numbers(record), step=opened["step"])

    def close() -> None:
        if "writer" in opened:
            opened["writer"].close()
        if "run" in opened:
            opened["run"].finish()
        opened.clear()

    return to_tensorboard if name == "tensorboard" else to_wandb, close


def numbers(record: dict) -> dict:
    """The numbers of a record: of a list, such as one of each rank, the largest."""
    found = {k: max(v) if isinstance(v, list) and v else v for k, v in record.items()}
    return {k: v for k, v in found.items() if isinstance(v, (int, float)) and k != "step"}
