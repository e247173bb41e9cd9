"""Progress of long work: a bar on a terminal, nothing elsewhere."""

import os
import pty
import re
import subprocess
import sys

from conftest import ROOT

BAR = """
import time
from llm_demo.machine import text
text.DELAY = 0.05
for _ in text.progress(range(20), "counting", unit="rows"):
    time.sleep(0.02)
"""


def test_a_terminal_shows_a_bar():
    """A pseudo-terminal, which reports no size: as 80 columns."""
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    said = []
    for rank in ("0", "1"):
        ours, theirs = pty.openpty()
        subprocess.run(
            [sys.executable, "-c", BAR], cwd=ROOT, env={**env, "RANK": rank}, stdout=theirs,
            stderr=theirs, timeout=60, check=True,
        )  # fmt: skip
        os.write(theirs, b"the end")
        said.append(os.read(ours, 1 << 16).decode())
        os.close(ours), os.close(theirs)
    bars = [text for text in said[0].removesuffix("the end").split("\r") if text.strip()]
    assert len(bars) >= 2 and re.match(r"counting: 100%\|█+\| 20/20 \[", bars[-1])
    assert all(len(bar) <= 80 for bar in bars)
    assert said[1] == "the end"


def test_a_file_shows_nothing():
    done = subprocess.run([sys.executable, "-c", BAR], cwd=ROOT, capture_output=True, timeout=60)
    assert done.stdout == done.stderr == b""
