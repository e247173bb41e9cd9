"""Imports go downwards, over few layers, and docs/design.md shows them as they are."""

import runpy

import pytest
from conftest import ROOT

SCRIPT = runpy.run_path(str(ROOT / "docs/make_layers.py"))


def test_imports_go_downwards_over_seven_layers_at_most():
    assert len(SCRIPT["layers"](SCRIPT["imports"]())) <= 7


def test_a_circle_is_an_error():
    with pytest.raises(ValueError, match="each other: a -> b -> a"):
        SCRIPT["layers"]({"a": {"b"}, "b": {"a"}})


def test_the_page_shows_them():
    text = (ROOT / "docs/design.md").read_text()
    assert SCRIPT["page"]() == text, "python docs/make_layers.py"
    assert "fsdp.train_fsdp" in SCRIPT["picture"]()


def test_few_modules_at_the_top():
    assert len([*(ROOT / "llm_demo").glob("*.py")]) <= 17
