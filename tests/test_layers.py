"""Imports go downwards, over few layers, and docs/design.md shows them as they are. The core is
small, and knows nothing of what surrounds it."""

import runpy

import pytest
from conftest import ROOT

SCRIPT = runpy.run_path(str(ROOT / "docs/make_layers.py"))


# Rooms from the lowest to the highest; "": commands. Scripts are above them, and the entry that
# runs one script in its own process.
ORDER = ("core", "options", "machine", "flags", "data", "model", "run", "launch", "check", "")
ENTRY = "llm_demo.__main__"


def height(module):
    parts = module.split(".")
    if parts[0] != "llm_demo":
        return len(ORDER)
    return ORDER.index(parts[1] if len(parts) > 2 or parts[-1] in ORDER else "")


def test_imports_go_downwards_from_room_to_room():
    of = SCRIPT["imports"]()
    assert len(SCRIPT["layers"](of)) <= 10
    up = [(a, b) for a in of if a != ENTRY for b in of[a] if height(b) > height(a)]
    assert not up


def test_a_circle_is_an_error():
    with pytest.raises(ValueError, match="each other: a -> b -> a"):
        SCRIPT["layers"]({"a": {"b"}, "b": {"a"}})


def test_the_page_shows_them():
    text = (ROOT / "docs/design.md").read_text()
    assert SCRIPT["page"]() == text, "python docs/make_layers.py"
    assert "fsdp.train_fsdp" in SCRIPT["picture"]()


def test_the_core_is_small_and_imports_nothing_from_outside_it():
    files = [*(ROOT / "llm_demo/core").glob("*.py")]
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= 3100
    of = SCRIPT["imports"]()
    core = {name for name in of if name.startswith("llm_demo.core")}
    assert {other for name in core for other in of[name]} <= core
    assert {file.stem for file in files} == {*SCRIPT["CORE"], "__init__"}


def test_few_modules_at_the_top():
    assert len([*(ROOT / "llm_demo").glob("*.py")]) <= 9


def test_what_is_particular_to_a_family_stands_in_one_file():
    named = []
    for folder in ("llm_demo", "fsdp", "pp", "zero", "fsdp_pp", "bench"):
        for file in ROOT.glob(f"{folder}/**/*.py"):
            if "model_type" in file.read_text():
                named.append(file.name)
    assert named == ["families.py"]


# What a reader pays for, and the most that there may be of it: lower these when there is less.
# `python docs/make_layers.py --sizes` prints how much there is.
CEILINGS = {
    "AST nodes": 185_739,
    "AST nodes a code line": 10.5,
    "top-level names in two or more modules": 22,
    "flags": 85,
    "modules that importing fsdp.train_fsdp loads": 50,
    "their lines": 11_500,
    "# fmt: skip": 5,
    "walrus": 12,
    "text or list times a condition": 0,
    "calls with *name or **name": 95,
    "raise UserError": 265,
    "lines of tests": 24_900,
    "setattr in tests": 94,
}


def test_there_is_no_more_to_read_than_allowed():
    counts = SCRIPT["counts"]()
    over = {what: n for what, n in counts.items() if n > CEILINGS[what]}
    assert not over
