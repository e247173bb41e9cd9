"""Turn a launcher's settings and the environment into flags, then start the ranks.

python -m llm_demo.launch.start torchrun|deepspeed SCRIPT [SETTING=value ...] -- [flags]"""

import os
import shlex
import sys
from pathlib import Path

from llm_demo.job.process import outlive_terminal
from llm_demo.launch import __main__ as launch
from llm_demo.launch.settings import flags_of, misspelt, of_others


def main() -> int:
    outlive_terminal()
    end = sys.argv.index("--")
    kind, script, *settings = sys.argv[1:end]
    settings = dict(setting.split("=", 1) for setting in settings)
    flags = flags_of(Path(script), settings, dict(os.environ), sys.argv[end + 1 :])
    if not {"-h", "--help"} & set(flags):
        command = [sys.executable, "-m", "llm_demo.launch", kind, script, *flags]
        for name, near in misspelt(Path(script), dict(os.environ)).items():
            print(f"warning: {name} is not a setting; did you mean {near}?", file=sys.stderr)
        for name, scripts in of_others(Path(script), dict(os.environ)).items():
            where = f"only for {' and '.join(scripts)}"
            print(f"warning: {name} has no effect here: {where}", file=sys.stderr)
        print(f"+ {shlex.join(command)}", flush=True)
    sys.argv[1:] = [kind, script, *flags]
    return launch.main()


if __name__ == "__main__":
    sys.exit(main())
