import os
import signal
import sys

from llm_demo.job.process import PARENT, end_in_one_line, end_with_parent, quit_on

sys.excepthook = end_in_one_line
if parent := os.environ.pop(PARENT, None):
    end_with_parent(int(parent))
if sys.argv[:1] == ["-m"]:  # python -m llm_demo.NAME, which imports this first
    quit_on(signal.SIGINT)  # print one line, not a traceback, during the slow imports
