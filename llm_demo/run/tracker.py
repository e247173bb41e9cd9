"""Send a run's numbers to TensorBoard or Weights & Biases, in addition to its files."""

from collections.abc import Callable
from pathlib import Path

from llm_demo.args import Args
from llm_demo.errors import UserError


def open_tracker(args: Args) -> tuple[Callable, Callable]:
    """(track(folder, record), close()), which do nothing without a tracker. Its package is imported
    only if asked for."""
    if args.report_to == "none":
        return lambda folder, record: None, lambda: None
    try:
        if args.report_to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
        else:
            import wandb
    except ImportError as e:
        raise UserError(f"--report_to {args.report_to}: run pip install {args.report_to}") from e

    opened = {}  # "writer" or "run", from the first record on

    def to_tensorboard(folder: Path, record: dict) -> None:
        if not opened:
            opened["writer"] = SummaryWriter(folder / "tb")
        for key, value in numbers(record).items():
            opened["writer"].add_scalar(key, value, record["step"])
        opened["writer"].flush()

    def to_wandb(folder: Path, record: dict) -> None:
        if not opened:
            opened["run"] = wandb.init(project="llm_demo", name=folder.name, dir=folder)
        # a checkpoint is reported steps later, when it is written; wandb drops earlier steps
        opened["step"] = max(opened.get("step", 0), record["step"])
        opened["run"].log(numbers(record), step=opened["step"])

    def close() -> None:
        if "writer" in opened:
            opened["writer"].close()
        if "run" in opened:
            opened["run"].finish()
        opened.clear()

    return to_tensorboard if args.report_to == "tensorboard" else to_wandb, close


def numbers(record: dict) -> dict:
    return {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
