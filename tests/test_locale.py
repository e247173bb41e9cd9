"""Locales other than UTF-8: names, and the files that the project reads and writes."""

import ast

import pytest
from conftest import LAUNCHERS, ROOT, no_ranks, run

HOSTILE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
FOLDERS = ("llm_demo", "fsdp", "fsdp_pp", "pp", "zero", "bench", "docs")
TEXT = {"open": 2, "read_text": 0, "write_text": 1, "TemporaryFile": 1}  # arguments before encoding


def test_a_launcher_reads_names_as_utf8_in_any_locale(tmp_path):
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
