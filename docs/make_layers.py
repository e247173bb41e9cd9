"""Write the picture of the layers in docs/design.md: python docs/make_layers.py

A module's layer is one above the highest module that it imports, anywhere in its text. Fails if
modules import each other in a circle."""

import ast
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(file.parent.name for file in ROOT.glob("*/flags.py"))  # folders of scripts
PACKAGES = ("llm_demo", *SCRIPTS)
PAGE = ROOT / "docs/design.md"
MARKED = re.compile(r"(<!-- layers -->\n).*?(<!-- end layers -->)", re.S)


def imports() -> dict[str, set[str]]:
    """Module -> the modules of this project that it imports. A package stands for __init__."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    names = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in files}
    names = {name.removesuffix(".__init__"): file for name, file in names.items()}
    found = {}
    for name, file in names.items():
        found[name] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in names:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= (inside & names.keys()) or {node.module}
    return found


def layers(of: dict[str, set[str]]) -> list[list[str]]:
    """The modules of each layer, the lowest first. Raises ValueError for a circle."""
    level = {}

    def climb(name: str, above: tuple) -> int:
        if name in above:
            raise ValueError(f"modules import each other: {' -> '.join((*above, name))}")
        if name not in level:
            level[name] = 1 + max((climb(other, (*above, name)) for other in of[name]), default=-1)
        return level[name]

    for name in of:
        climb(name, ())
    return [sorted(n for n in of if level[n] == i) for i in range(max(level.values()) + 1)]


def picture() -> str:
    """The layers as text, the highest first."""
    rows = []
    for i, names in reversed([*enumerate(layers(imports()))]):
        shown = [n.removeprefix("llm_demo.") for n in names if "." in n]  # not what is a package
        text = textwrap.wrap(", ".join(shown), 114, break_on_hyphens=False)
        rows.append(f"{i}   " + "\n    ".join(text))
    return "```\n" + "\n".join(rows) + "\n```\n"


def page() -> str:
    return MARKED.sub(lambda m: m[1] + picture() + m[2], PAGE.read_text())


if __name__ == "__main__":
    try:
        PAGE.write_text(page())
    except ValueError as e:
        sys.exit(f"error: {e}")
