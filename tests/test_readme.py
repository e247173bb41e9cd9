"""README and docs/ name the settings, flags, files and metrics that there are, and no others."""

import ast
import dataclasses
import json
import re

import pytest
from conftest import ROOT

from bench.presets import BALANCED, NO_RESHARD, ONE_OF
from bench.run import make_parser
from bench.table import PADDING, pixels
from llm_demo import chat, evaluate, export, fit
from llm_demo.__main__ import COMMANDS
from llm_demo.check import __main__ as check
from llm_demo.core import attention
from llm_demo.data import records
from llm_demo.flags import args
from llm_demo.flags.parsing import flag_text, groups_of
from llm_demo.run.records import TIMES

README = (ROOT / "README.md").read_text()
DOCS = {page.stem: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
for name in ("layers", "modules"):  # generated: modules, not paths
    made = re.compile(f"<!-- {name} -->.*<!-- end {name} -->", re.S)
    DOCS["design"] = made.sub("", DOCS["design"])
# docs/flags.md is generated, and compared with the flags in a test of its own
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
TEXT = "\n".join([README, CONTRIBUTING, *(text for name, text in DOCS.items() if name != "flags")])
PAGES = [
    page
    for pattern in ("*.md", "docs/*.md", "bench/*.md", "data/*.md", "models/*.md")
    for page in sorted(ROOT.glob(pattern))
]

SCRIPTS = ("fsdp", "pp", "zero", "fsdp_pp")
LAUNCHERS = {kind: f"{kind}/launch_{kind}.sh" for kind in SCRIPTS}
OF_RUNS = [
    (ROOT / f"llm_demo/run/{name}.py").read_text()
    for name in ("folder", "log", "records", "job", "saver")
]
TEXTS = {".py", ".sh", ".yaml"}
NOT_OURS = {"NCCL", "GLOO", "HSA", "OMP", "PYTORCH", "TORCHINDUCTOR", "PR"}  # first words of names
FOREIGN_FLAGS = {
    "--shm-size", "--ipc", "--env",  # docker's, SkyPilot's
    "--nodes", "--partition", "--time", "--signal", "--requeue", "--wait",  # Slurm's
    "--enable-mixed-moe-lora-format", "--host", "--port", "--served-model-name",  # vLLM's
    "--no-deps", "--target",  # pip's
    "--outfile", "--outtype", "--num_gpus",  # llama.cpp's, DeepSpeed's
}  # fmt: skip


def section(text, heading):
    """The text below a heading of the second level."""
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def table(text, heading):
    """The cells of each row of the first table below a heading."""
    rows = section(text, heading).split("\n|---")[1].split("\n\n")[0].splitlines()[1:]
    return [cells(row) for row in rows]


def cells(row):
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def block(kind):
    """Setting -> default of a launcher's block of settings."""
    text = (ROOT / LAUNCHERS[kind]).read_text()
    return dict(re.findall(r"^(\w+)=\$\{\1-(.*?)\}", text, re.M))


def fields(kind):
    """Flag -> default of a script."""
    groups = (*args.SHARED, *groups_of(ROOT / kind))
    return {field.name: field.default for group in groups for field in dataclasses.fields(group)}


def default(kind, setting):
    """What applies if nothing is set, as the README writes it."""
    flag = {"MODEL": "model_name_or_path"}.get(setting, setting.lower())
    value = block(kind)[setting].removeprefix("$ROOT/") or fields(kind)[flag]
    return "–" if value is None else f"`{flag_text(value)}`"


def flags():
    """Every flag of either script, as it is typed."""
    names = {name for kind in SCRIPTS for name in fields(kind)} | {"bf16", "fp16", "help"}
    return {f"--{name}" for name in names} | {f"--no_{name}" for name in names}


def test_the_settings_are_those_of_the_launchers_with_their_defaults():
    blocks = {kind: block(kind) for kind in LAUNCHERS}
    documented = {}
    for names, defaults, _ in table(README, "Settings"):
        only = re.search(r"\(([\w, ]+)\)$", names)
        documented[names.split("`")[1]] = only and only[1], defaults
    assert len(documented) >= 10
    expected = {}
    for name in documented:
        values = {kind: default(kind, name) for kind in LAUNCHERS if name in blocks[kind]}
        first = next(iter(values.values()))
        others = {kind: value for kind, value in values.items() if value != first}
        text = f"{first} ({', '.join(others)}: {[*others.values()][0]})" if others else first
        expected[name] = None if len(values) == len(LAUNCHERS) else ", ".join(values), text
    assert documented == expected


def test_every_flag_named_exists_and_every_commands_flag_is_named():
    named = set(re.findall(r"--\w[\w-]*", TEXT)) - {"--no_"} - FOREIGN_FLAGS
    assert len(named) > 30
    of_bench = {BALANCED, NO_RESHARD, ONE_OF, *re.findall(r"--\w+", make_parser().format_help())}
    parsers = (m.make_parser() for m in (export, evaluate, check, fit, chat))
    commands = {f for p in parsers for f in re.findall(r"--\w+", p.format_help())} - {"--help"}
    commands.add("--check")  # of setup.sh
    known = flags() | of_bench | commands
    assert named <= known, named - known
    assert commands <= named, commands - named


def test_every_command_named_exists():
    named = {*re.findall(r"\bllm-demo (\w+)", TEXT)} - {"NAME"}
    assert len(named) > 5
    assert named <= {*SCRIPTS, *COMMANDS}


def test_tables_of_throughput_say_what_is_counted():
    pages = [text for text in (README, *DOCS.values()) if re.search(r"^\|.*toks/s", text, re.M)]
    assert len(pages) > 8
    for text in pages:
        assert " ".join(text.split()).count("`toks/s` counts slots, padding included") == 1, text[
            :40
        ]


def test_every_variable_named_is_read_somewhere():
    named = set(re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z_]+\b|\b[A-Z]{2,}(?==)", TEXT))
    named = {name for name in named if name.split("_")[0] not in NOT_OURS}
    folders = ("llm_demo", "fsdp", "pp", "zero", "fsdp_pp", "tests", "cluster")
    files = [p for top in folders for p in (ROOT / top).rglob("*.*") if p.suffix in TEXTS]
    files += [ROOT / "launch_common.sh", ROOT / "setup.sh"]
    read = set(re.findall(r"\w+", "".join(file.read_text() for file in files)))
    assert len(named) > 30
    assert named <= read, named - read


def test_every_path_named_exists():
    """Of those that begin with one of our folders."""
    text = re.sub(r"\]\(\S+?\)", "]", TEXT)  # links have a test of their own
    words = {w.removeprefix("…/").rstrip("./") for w in re.findall(r"[\w.…/-]+", text)}
    folders = (*SCRIPTS, "llm_demo", "data", "models", "tests", "bench", ".ci", "cluster")
    paths = {w for w in words if w.startswith(tuple(f"{folder}/" for folder in folders))}
    assert len(paths) > 40
    users = re.compile(r"data/\w+$|.*/cmd.sh$")
    missing = {p for p in paths if not (ROOT / p).exists() and not users.match(p)}
    assert not missing


def test_every_test_named_exists():
    named = re.findall(r"`(tests/test_\w+\.py) -k (?:(\w+)|\"([\w ]+)\")", TEXT)
    assert len(named) > 5
    words = {
        (file, word) for file, one, several in named for word in (one or several).split(" or ")
    }
    missing = {(f, w) for f, w in words if w.lower() not in (ROOT / f).read_text().lower()}
    assert not missing


def test_every_folder_is_described():
    tops = (*SCRIPTS, "llm_demo", "bench")
    packages = {p.parent for top in tops for p in (ROOT / top).rglob("*.py")}
    expected = {f"{p.relative_to(ROOT)}/" for p in packages} | {
        "data/", "models/", "runs/", "docs/", "cluster/",
    }  # fmt: skip
    described = set(re.findall(r"`([\w./]+/)`", section(DOCS["design"], "Folders")))
    assert described == expected | {"tests/", ".ci/"}


def test_the_keys_of_metrics_jsonl_are_those_written():
    rows = table(DOCS["metrics"], "The numbers of a step")
    named = {key for row in rows for key in re.findall("`(.*?)`", row[1])}
    written = set()
    for node in (node for text in OF_RUNS for node in ast.walk(ast.parse(text))):
        keys = {getattr(key, "value", None) for key in getattr(node, "keys", ())}
        if "step" in keys and any("/" in str(key) for key in keys):
            written |= keys  # the object of a step, of an evaluation, of a checkpoint
    written = (written - {None}) | {*TIMES}  # a dict of these is unpacked
    # of a mixture of experts, each set by itself
    sources = [*OF_RUNS, (ROOT / "fsdp/train_fsdp.py").read_text()]
    written |= {key for text in sources for key in re.findall(r'"(moe/\w+)"', text)}
    assert len(written) > 12
    assert named == written
    columns = re.search(r"COLUMNS = \((.*?)\)\n", "".join(OF_RUNS))[1]
    assert f"`{' | '.join(ast.literal_eval(columns))}`" in DOCS["metrics"]


def test_the_shapes_of_data_and_the_backends_are_those_there_are():
    formats = set(records.FORMATS)
    assert {row[0].strip("`") for row in table(DOCS["data"], "Keys of an example")} == formats
    examples = (ROOT / "data/README.md").read_text().split("```")[1].splitlines()[1:]
    shown = [json.loads(line) for line in examples]
    found = [records.detect_format(example, args.DataArgs()) for example in shown]
    assert {one.format for one in found} == formats
    assert all(records.to_record(*pair) for pair in zip(shown, found, strict=True))
    backends = [row[0].strip("`") for row in table(DOCS["check"], "Backends")]
    assert backends == list(attention.IMPLS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for link in re.findall(r"\]\((\S+?)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target == ROOT / "docs/flags.md" and not target.exists():
            continue
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_table_is_cut_off():
    """With as many lines in a cell as it has words. A forge hides what is wider than the page."""
    for page, text in (DOCS | {"/README": README}).items():
        text = re.sub(r"```.*?```", "", text, flags=re.S)
        for found in re.findall(r"(?:^\|.*\n)+", text, re.M):
            head, _, *lines = (cells(line) for line in found.splitlines())
            bold = [[pixels(word, bold=True) for word in title.split()] for title in head]
            widths = [max(words, default=0) for words in bold]
            for line in lines:
                of_line = [max(map(pixels, cell.split()), default=0) for cell in line]
                widths = [*map(max, widths, of_line)]
            assert sum(widths) + PADDING * len(head) <= 796, (page, head)
            assert len(head) <= 8, (page, head)


def test_the_index_links_to_every_page_and_pages_are_short():
    linked = set(re.findall(r"\]\((\w+)\.md", DOCS["README"]))
    assert linked >= DOCS.keys() - {"README", "seeds"}
    assert len(README.splitlines()) <= 150
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        prose = [line for line in page.read_text().splitlines() if not line.startswith("|")]
        assert not [line for line in prose if len(line) > 120], page
    assert not [name for name, text in DOCS.items() if text.count("\n") > 250]
