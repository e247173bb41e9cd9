"""Run fsdp/train_fsdp.py in this process without torchrun, for a debugger.

python fsdp/launch_script.py [flags of train_fsdp.py]     (also installed as llm-demo-fsdp)

It uses the settings of launch_fsdp.sh and ignores those of the environment. Two processes there
accumulate 2 micro-batches; one process here accumulates 4, so that a step sees the same rows."""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from llm_demo.launch.settings import flags_of, read_launcher

    script, settings = read_launcher(ROOT / "fsdp/launch_fsdp.sh")
    settings["GRAD_ACCUM_STEPS"] = str(2 * int(settings["GRAD_ACCUM_STEPS"] or 1))
    sys.argv = [str(script), *flags_of(script, settings, {}, sys.argv[1:])]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
