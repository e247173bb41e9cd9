"""Write the picture of the layers and the list of modules in docs/design.md:

python docs/make_layers.py            also fails if modules import each other in a circle
python docs/make_layers.py --sizes    print how large the project is, and change nothing

A module's layer is one above the highest module that it imports, anywhere in its text."""

import ast
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(file.parent.name for file in ROOT.glob("*/flags.py"))  # folders of scripts
PACKAGES = ("llm_demo", *SCRIPTS)
PAGE = ROOT / "docs/design.md"
# in the order of reading; then the other modules of each room by name
CORE = (
    "loop rows decoder attention experts loss loss_kernel optim masters mesh timer errors"
).split()
ROOMS = (
    "core",
    "options",
    *SCRIPTS,
    "machine",
    "flags",
    "data",
    "model",
    "run",
    "launch",
    "check",
    "",  # commands
)


def imports() -> dict[str, set[str]]:
    """Module -> the modules of this project that it imports. A package stands for __init__."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    names = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in files}
    names = {name.removesuffix(".__init__"): file for name, file in names.items()}
    found = {}
    for name, file in names.items():
        found[name] = set()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
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


def modules() -> str:
    """All modules by room, each with the first sentence of its docstring."""
    rows = []
    for room in ROOMS:
        folder = ROOT / (room if room in SCRIPTS else f"llm_demo/{room}")
        files = {file.stem: file for file in sorted(folder.glob("*.py"))}
        about = ast.get_docstring(ast.parse(files.pop("__init__").read_text("utf-8")))
        about = about or "Commands for people."
        rows += ["", f"**{folder.relative_to(ROOT)}/**: {about}", "", "```"]
        for name in dict.fromkeys([*(CORE if room == "core" else ()), *files]):
            about = ast.get_docstring(ast.parse(files[name].read_text("utf-8"))) or ""
            sentence = " ".join(about.split("\n\n")[0].split()).split(". ")[0].rstrip(".")
            rows += textwrap.wrap(f"{name + '.py':26}{sentence}", 114, subsequent_indent=" " * 26)
        rows.append("```")
    return "\n".join(rows[1:]) + "\n"


def page() -> str:
    text = PAGE.read_text("utf-8")
    for name, write in (("layers", picture), ("modules", modules)):
        marked = re.compile(f"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.S)
        text = marked.sub(lambda m, write=write: m[1] + write() + m[2], text)
    return text


def reached(of: dict[str, set[str]], module: str) -> set[str]:
    """The modules that importing one may import, itself and lazy imports included."""
    names, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name not in names:
            names.add(name)
            todo += of[name]
    return names


def functions(file: Path) -> list[tuple[str, int]]:
    """(name, lines) of each function of a file."""
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    nodes = [
        node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, kinds)
    ]
    return [(node.name, node.end_lineno - node.lineno + 1) for node in nodes]


def lines(*files: Path) -> int:
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


# what a step of a dense model takes from a row to an updated weight, in the order of reading
PATH = (
    "core/rows core/attention core/decoder core/loss core/loss_kernel core/optim core/masters "
    "core/mesh core/loop fsdp/build fsdp/sharding fsdp/fsdp2 fsdp/train_fsdp"
)


def sizes() -> str:
    """How large the project is: a table."""
    python = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    shell = [*ROOT.glob("*.sh"), *(f for name in SCRIPTS for f in (ROOT / name).glob("*.sh"))]
    each = [(n, name) for file in python for name, n in functions(file)]
    mains = {file.stem: dict(functions(file)).get("main") for name in SCRIPTS
             for file in (ROOT / name).glob("*train*.py")}  # fmt: skip
    longest = max(python, key=lines)
    path = [ROOT / f"{'' if name[:4] == 'fsdp' else 'llm_demo/'}{name}.py" for name in PATH.split()]
    modules = [name for name in reached(imports(), "fsdp.train_fsdp") if "." in name]
    long = [name for n, name in each if n > 50]
    rows = {
        "lines of scripts, llm_demo, launchers, setup.sh": f"{lines(*python, *shell):,}",
        "lines of llm_demo/core": f"{lines(*(ROOT / 'llm_demo/core').glob('*.py')):,}",
        "modules that importing fsdp.train_fsdp reaches": len(modules),
        "lines from a row to an updated weight": f"{lines(*path):,} in {len(path)} modules",
        "main of the scripts": ", ".join(f"{name} {n}" for name, n in mains.items()),
        "longest module": f"{longest.relative_to(ROOT)}, {lines(longest)}",
        "functions over 50 lines": f"{len(long)} of {len(each):,}: {', '.join(long)}",
        "lines of tests": f"{lines(*(ROOT / 'tests').glob('*.py')):,}",
    }
    return "\n".join(f"| {what} | {size} |" for what, size in rows.items())


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--sizes"]:
            print(sizes())
        else:
            PAGE.write_text(page(), encoding="utf-8")
    except ValueError as e:
        sys.exit(f"error: {e}")
