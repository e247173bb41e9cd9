"""Locales other than UTF-8: names, and the files that the project reads and writes."""

import ast
import os
import subprocess
import sys

import pytest
from conftest import LAUNCHERS, ROOT, no_ranks, run

HOSTILE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PARSE = """
import sys
from llm_demo.core.errors import UserError
from llm_demo.flags.args import parse_args
try:
    print(ascii(parse_args("", argv=sys.argv[1:]).output_dir))
except UserError as e:
    print(e)
"""
FOLDERS = ("llm_demo", "fsdp", "fsdp_pp", "pp", "zero", "bench", "docs")
TEXT = {"open": 2, "read_text": 0, "write_text": 1, "TemporaryFile": 1}  # arguments before encoding


def test_a_name_in_a_locale_of_ascii(tmp_path):
    """A launcher makes Python read it as UTF-8; without one, the run says how to."""
    how = {"capture_output": True, "text": True, "cwd": ROOT}
    command = [sys.executable, "-c", PARSE, "--output_dir", "röü"]
    done = subprocess.run(command, env={**os.environ, **HOSTILE}, **how)
    assert done.stdout == (
        r"'r\udcc3\udcb6\udcc3\udcbc': Python reads names in this locale as ascii, not UTF-8: set "
        "PYTHONUTF8=1\n"
    ), done.stderr
    done = subprocess.run(command, env={**os.environ, **HOSTILE, "PYTHONUTF8": "1"}, **how)
    assert done.stdout == "'r\\xf6\\xfc'\n", done.stderr
    done = run(
        ["bash", LAUNCHERS["fsdp"], "--output_dir", "röü"],
        cwd=tmp_path, PYTHON=no_ranks(tmp_path), **HOSTILE,
    )  # fmt: skip
    assert "--output_dir 'röü'" in done.stdout, done.stderr


def opened_without(file):
    """The lines of a module that open a text without saying in which encoding."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        of_module = isinstance(node.func, ast.Attribute)
        name = node.func.attr if of_module else getattr(node.func, "id", "")
        if name not in TEXT or of_module == (name == "open"):
            continue  # log.open, os.open and the like open no text
        binary = any(isinstance(a, ast.Constant) and "b" in str(a.value) for a in node.args[1:2])
        said = any(keyword.arg == "encoding" for keyword in node.keywords)
        own = not of_module and name.endswith("_text")  # of files.py and process.py
        if not (binary or said or own or len(node.args) > TEXT[name]):
            yield f"{file.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_text_is_opened_as_utf8(folder):
    found = [
        line for file in sorted((ROOT / folder).rglob("*.py")) for line in opened_without(file)
    ]
    assert found == []
