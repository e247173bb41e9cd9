"""Run fsdp/train_fsdp.py in this one process, without torchrun: for a debugger.

python fsdp/launch_script.py [flags of train_fsdp.py]     (also installed as llm-demo-fsdp)

It starts from the defaults of launch_fsdp.sh; where two processes accumulate 2 micro-batches there,
one accumulates 4 here, so that a step sees the same rows.
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

DEFAULTS = {
    "--model_name_or_path": str(ROOT / "models/qwen3-tiny"),
    "--train_json": str(ROOT / "data/first_run.jsonl"),
    "--micro_batch_size": "4",
    "--grad_accum_steps": "4",
}
FIRST_RUN = {  # only with the bundled model and data
    "--seq_len": "64",
    "--max_steps": "220",
    "--lr": "2e-3",
    "--log_every": "10",
}


def main() -> None:
    given = {flag.split("=")[0].replace("-", "_").replace("__", "--", 1) for flag in sys.argv[1:]}
    defaults = DEFAULTS.copy()
    if not given & {"--model_name_or_path", "--train_json"}:
        defaults |= FIRST_RUN
    if "--num_epochs" in given:  # a number of epochs replaces the default number of steps
        defaults.pop("--max_steps", None)
    script = ROOT / "fsdp/train_fsdp.py"
    sys.argv = [str(script), *(word for pair in defaults.items() for word in pair), *sys.argv[1:]]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # any free port: nobody else joins
    sys.path.insert(0, str(ROOT))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
