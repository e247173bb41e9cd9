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
        text = textwrap.wrap(", ".join(shown), 88, break_on_hyphens=False)
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
            line = f"{name + '.py':26}{short(about)}"
            rows += textwrap.wrap(line, 92, subsequent_indent=" " * 26)
        rows.append("```")
    return "\n".join(rows[1:]) + "\n"


def short(docstring: str) -> str:
    """The first sentence; of a long one its first part, of two words or more."""
    sentence = " ".join(docstring.split("\n\n")[0].split()).split(". ")[0].rstrip(".")
    for mark, words in (("[:;] ", 2), (r" \(", 4), (", ", 4)):
        for match in re.finditer(mark, sentence):
            first = sentence[: match.start()]
            if len(sentence) > 60 and len(first.split()) >= words:
                sentence = first
                break
    return sentence


def page() -> str:
    text = PAGE.read_text("utf-8")
    for name, write in (("layers", picture), ("modules", modules)):
        marked = re.compile(f"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.S)
        text = marked.sub(lambda m, write=write: m[1] + write() + m[2], text)
    return text


def source() -> dict[Path, ast.Module]:
    """The syntax trees of the project's modules."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {file: ast.parse(file.read_text("utf-8")) for file in files}


def code_lines(file: Path, tree: ast.Module) -> int:
    """Lines that are not empty, comments or docstrings."""
    described = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            described.update(range(text.lineno, text.end_lineno + 1))
    lines = enumerate(file.read_text("utf-8").splitlines(), 1)
    return sum(
        1
        for number, line in lines
        if line.strip() and not line.strip().startswith("#") and number not in described
    )


def top_level_names(tree: ast.Module) -> set[str]:
    """Names of functions, classes and variables of a module."""
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def is_condition(node: ast.AST) -> bool:
    """Whether an expression is a comparison, `and`, `or`, `not` or a call of bool."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    return isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp))


def is_text_or_list(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, (ast.JoinedStr, ast.List))


def is_starred_name(argument: ast.AST) -> bool:
    """Whether an argument is *name or **name."""
    if isinstance(argument, ast.keyword):
        return argument.arg is None and isinstance(argument.value, ast.Name)
    return isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name)


def loaded_at_import(trees: dict[Path, ast.Module], module: str) -> set[str]:
    """The modules of this project that importing one loads, itself included."""
    paths = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in trees}
    paths = {name.removesuffix(".__init__"): file for name, file in paths.items()}
    loaded, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name in loaded or name not in paths:
            continue
        loaded.add(name)
        todo.append(name.rpartition(".")[0])  # its package
        for node in trees[paths[name]].body:
            if isinstance(node, ast.ImportFrom) and node.module:
                todo.append(node.module)
                todo += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
    return loaded


def counts() -> dict[str, float]:
    """What a reader pays for: concepts, not lines, which would be saved by density."""
    trees = source()
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    flags = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "flag"]
    refusals = [
        node
        for node in nodes
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id == "UserError"
    ]
    products = [node for node in nodes if isinstance(node, ast.BinOp)]
    products = [(node.left, node.right) for node in products if isinstance(node.op, ast.Mult)]
    conditional = [
        (left, right)
        for left, right in products
        if is_text_or_list(left)
        and is_condition(right)
        or is_text_or_list(right)
        and is_condition(left)
    ]
    starred = [call for call in calls if any(map(is_starred_name, [*call.args, *call.keywords]))]
    names = [name for tree in trees.values() for name in top_level_names(tree) if name != "main"]
    loaded = loaded_at_import(trees, "fsdp.train_fsdp")
    files = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in trees}
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    tests = [file.read_text("utf-8") for file in (ROOT / "tests").glob("*.py")]
    texts = [file.read_text("utf-8") for file in trees]
    code = sum(code_lines(file, tree) for file, tree in trees.items())
    return {
        "AST nodes": len(nodes),
        "AST nodes a code line": round(len(nodes) / code, 1),
        "top-level names in two or more modules": sum(names.count(name) > 1 for name in set(names)),
        "flags": len(flags),
        "modules that importing fsdp.train_fsdp loads": len(loaded),
        "their lines": sum(len(files[name].read_text("utf-8").splitlines()) for name in loaded),
        "# fmt: skip": sum(text.count("# fmt: skip") for text in texts),
        "walrus": sum(isinstance(node, ast.NamedExpr) for node in nodes),
        "text or list times a condition": len(conditional),
        "calls with *name or **name": len(starred),
        "raise UserError": len(refusals),
        "lines of tests": sum(len(text.splitlines()) for text in tests),
        "setattr in tests": sum(text.count("setattr(") for text in tests),
    }


def sizes() -> str:
    """How much there is to read: a table."""
    return "\n".join(f"| {what} | {count:,} |" for what, count in counts().items())


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--sizes"]:
            print(sizes())
        else:
            PAGE.write_text(page(), encoding="utf-8")
    except ValueError as e:
        sys.exit(f"error: {e}")
