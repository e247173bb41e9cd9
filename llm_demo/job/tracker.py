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

    opened = []  # the writer or the run, from the first record on

    def to_tensorboard(folder: Path, record: dict) -> None:
        if not opened:
            opened.append(SummaryWriter(folder / "tb"))
            config = json.loads((folder / "config.json").read_text())
            rows = "\n".join(f"| {key} | {value} |" for key, value in config.items())
            opened[0].add_text("config", f"| setting | value |\n|---|---|\n{rows}")
        for key, value in numbers(record).items():
            opened[0].add_scalar(key, value, record["step"])
        opened[0].flush()

    def to_wandb(folder: Path, record: dict) -> None:
        if not opened:
            project = os.environ.get("WANDB_PROJECT", "llm_demo")
            config = json.loads((folder / "config.json").read_text())
            opened.append(wandb.init(project=project, name=folder.name, dir=folder, config=config))
            opened.append(0)  # the newest step
        # a checkpoint is reported steps later, when it is written; wandb drops earlier steps
        opened[1] = max(opened[1], record["step"])
        opened[0].log(numbers(record), step=opened[1])

    def close() -> None:
        if opened:
            opened[0].close() if name == "tensorboard" else opened[0].finish()
        opened.clear()

    return to_tensorboard if name == "tensorboard" else to_wandb, close


def numbers(record: dict) -> dict:
    """The numbers of a record: of a list, such as one of each rank, the largest."""
    largest = {k: max(v) if isinstance(v, list) and v else v for k, v in record.items()}
    return {k: v for k, v in largest.items() if isinstance(v, (int, float)) and k != "step"}
