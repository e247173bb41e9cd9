"""Run fsdp/train_fsdp.py in this process without torchrun, for a debugger.

python fsdp/launch_script.py [flags of train_fsdp.py]     (also installed as llm-demo-fsdp)

It uses the settings of launch_fsdp.sh and ignores those of the environment."""

import contextlib
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from llm_demo.core.errors import UserError
    from llm_demo.launch.settings import check_flags, flags_of, read_launcher, with_rows_of_two

    script, settings = read_launcher(ROOT / "fsdp/launch_fsdp.sh")
    flags, first_run = flags_of(script, settings, {}, sys.argv[1:])
    sys.argv = [str(script), *flags]
    with contextlib.suppress(UserError):  # the script says what is wrong
        if first_run:
            sys.argv, _ = with_rows_of_two(sys.argv, check_flags(sys.argv), 1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
