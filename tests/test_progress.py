"""Progress of long work: a bar on a terminal, lines in a file, nothing for short work."""

import os
import pty
import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from llm_demo.machine import text as module
from llm_demo.machine.text import progress, watched


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("DELAY", "EVERY"):
        monkeypatch.setattr(module, name, 0.05)
    monkeypatch.setenv("RANK", "0")


def work(seconds, steps=10):
    for _ in progress(range(steps), "counting", unit="rows"):
        time.sleep(seconds / steps)


def test_a_file_shows_lines_without_control_codes(capsys):
    work(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "counting: 10 of 10 rows, 100%, 00:00"
    assert 2 <= len(lines) <= 8 and all(re.match(r"counting: \d+ of 10 rows", x) for x in lines)


def test_short_work_shows_nothing(capsys):
    work(0)
    assert capsys.readouterr().err == ""


def test_other_ranks_show_nothing(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    work(0.1)
    assert capsys.readouterr().err == ""


def test_work_that_cannot_report_is_watched(capsys):
    done = []
    with pytest.raises(KeyError), watched("saving", 3e9, lambda: len(done) * 1e9):
        time.sleep(0.06)
        done += [1, 1]
        raise KeyError
    assert capsys.readouterr().err == "saving: 2.00G of 3.00GB, 67%, 00:00\n"


def test_work_that_ended_is_all_done(capsys):
    """A folder that is renamed at its end can't be measured then."""
    with watched("saving", 3e9, lambda: 0):
        time.sleep(0.06)
    assert capsys.readouterr().err.splitlines()[-1] == "saving: 3.00G of 3.00GB, 100%, 00:00"


BAR = """
import time
from llm_demo.machine import text
text.DELAY = 0.05
for _ in text.progress(range(20), "counting", unit="rows"):
    time.sleep(0.02)
"""


def test_a_terminal_shows_a_bar():
    """A pseudo-terminal, which reports no size: as 80 columns."""
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    how = {"stdout": theirs, "stderr": theirs, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", BAR], cwd=ROOT, env=env, **how)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours), os.close(theirs)
    assert done.returncode == 0, shown
    bars = [text for text in shown.split("\r") if text.strip()]
    assert len(bars) >= 2 and re.match(r"counting: 100%\|█+\| 20/20 \[", bars[-1])
    assert all(len(bar) <= 80 for bar in bars)
