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
    "--train_json": str(ROOT / "data/sft_en.jsonl"),
    "--seq_len": "256",
    "--micro_batch_size": "4",
    "--grad_accum_steps": "4",
    "--max_steps": "60",
}


def main() -> None:
    given = {flag.split("=")[0] for flag in sys.argv[1:]}
    defaults = DEFAULTS.copy()
    if "--num_epochs" in given:  # who asks for epochs doesn't mean the default number of steps
        del defaults["--max_steps"]
    script = ROOT / "fsdp/train_fsdp.py"
    sys.argv = [str(script), *(word for pair in defaults.items() for word in pair), *sys.argv[1:]]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # any free port: nobody else joins
    sys.path.insert(0, str(ROOT))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
