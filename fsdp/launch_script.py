"""Run fsdp/train_fsdp.py in this process without torchrun, for a debugger.

python fsdp/launch_script.py [flags of train_fsdp.py]     (also installed as llm-demo-fsdp)

It uses the settings of launch_fsdp.sh and ignores those of the environment."""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llm_demo.core.errors import UserError  # noqa: E402
from llm_demo.launch import settings  # noqa: E402


def launcher_command(given: list[str]) -> list[str]:
    """The training script and its flags: those of the launcher's settings, then those given."""
    script, defaults = settings.read_launcher(ROOT / "fsdp/launch_fsdp.sh")
    flags, first_run = settings.launcher_flags(script, defaults, {}, given)
    command = [str(script), *flags]
    if not first_run:
        return command
    try:
        return settings.with_rows_of_two(command, settings.check_flags(command), 1)[0]
    except UserError:  # the script says what is wrong
        return command


def main() -> None:
    sys.argv = launcher_command(sys.argv[1:])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
