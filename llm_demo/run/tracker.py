"""Send a run's numbers to TensorBoard or Weights & Biases, besides its files."""

from pathlib import Path

from llm_demo.args import Args
from llm_demo.errors import UserError


def open_tracker(args: Args):
    """A function that takes a record, or None. The package is imported only if asked for."""
    if args.report_to == "none":
        return None
    opened = {}
    try:
        if args.report_to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter as make
        else:
            from wandb import init as make
    except ImportError as e:
        raise UserError(f"--report_to {args.report_to}: run pip install {args.report_to}") from e

    def track(folder: Path, record: dict) -> None:
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
        if args.report_to == "tensorboard":
            writer = opened["writer"] = opened.get("writer") or make(folder / "tb")
            for key, value in numbers.items():
                writer.add_scalar(key, value, record["step"])
            writer.flush()
        else:
            how = {"project": "llm_demo", "name": folder.name, "dir": folder}
            opened["writer"] = opened.get("writer") or make(**how)
            # a checkpoint is reported steps later, when it is written; wandb drops earlier steps
            opened["step"] = max(opened.get("step", 0), record["step"])
            opened["writer"].log(numbers, step=opened["step"])

    return track
