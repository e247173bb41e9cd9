"""One command for all of this project: llm-demo NAME [its arguments]

  fsdp, pp, zero, fsdp_pp   train with this script, by its launcher (fsdp/launch_fsdp.sh)
  fit        find the flags that fit on your cards, or measure which are fastest
  check      check whether this machine can train
  chat       talk to a model
  evaluate   compare models on held-out data
  export     write a checkpoint as a Hugging Face folder
  report     write a page that compares runs

`llm-demo NAME --help` prints the arguments. `llm-demo fit` is `python -m llm_demo.fit`."""

import importlib
import os
import runpy
import signal
import sys

from llm_demo.core.errors import UserError
from llm_demo.machine.files import ROOT
from llm_demo.machine.process import SCRIPTS, command, quit_on

COMMANDS = ("fit", "check", "chat", "evaluate", "export", "report")


def run_named() -> None:
    name = sys.argv.pop(1) if sys.argv[1:] else "--help"
    if name in SCRIPTS:
        importlib.import_module(name)  # an error if only llm_demo is installed, without scripts
        launcher = ROOT / name / f"launch_{name}.sh"
        os.environ.setdefault("PYTHON", sys.executable)
        os.execvp("bash", ["bash", str(launcher), *sys.argv[1:]])
    elif name in COMMANDS:
        quit_on(signal.SIGINT)  # as python -m does, during the slow imports
        runpy.run_module(f"llm_demo.{name}", run_name="__main__", alter_sys=True)
    elif name in ("-h", "--help"):
        print(__doc__)
    else:
        known = ", ".join(SCRIPTS + COMMANDS)
        raise UserError(f"llm-demo has no command {name!r}; there are {known}")


def main() -> None:
    command(run_named)


def alone() -> None:
    """The command llm-demo-fsdp: fsdp/launch_script.py of the clone that is installed."""
    from fsdp.launch_script import main  # an error if only llm_demo is installed, without scripts

    main()


if __name__ == "__main__":
    main()
