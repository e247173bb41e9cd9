import os
import signal
import sys

from llm_demo.machine.process import (
    PARENT,
    end_in_one_line,
    end_with_parent,
    number,
    quit_on,
    refuse_other_clone,
)

sys.excepthook = end_in_one_line
refuse_other_clone(sys.argv[0] if sys.argv else "")  # argv: not where Python is embedded
if parent := number(PARENT, 0):
    del os.environ[PARENT]
    end_with_parent(parent)
if sys.argv[:1] == ["-m"]:  # python -m llm_demo.NAME, which imports this first
    quit_on(signal.SIGINT)  # print one line, not a traceback, during the slow imports
