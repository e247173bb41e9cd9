"""The README names the settings, flags, files and metrics that there are, and no others."""

import ast
import contextlib
import dataclasses
import io
import re

from conftest import ROOT

from bench.run import make_parser
from fsdp.train_fsdp import FsdpArgs
from llm_demo import args, evaluate, export
from llm_demo.check import __main__ as check
from llm_demo.data import records
from llm_demo.model import attention
from llm_demo.run import summary
from pp.pp_train import PipeArgs

README = (ROOT / "README.md").read_text()
SHARED = (args.ModelArgs, args.DataArgs, args.TrainArgs, args.RunArgs)
SCRIPTS = {"fsdp": FsdpArgs, "pp": PipeArgs}
LAUNCHERS = {"fsdp": "fsdp/launch_fsdp.sh", "pp": "pp/launch_pp.sh"}
METRICS = (ROOT / "llm_demo/run/metrics.py").read_text()
FOLDER = (ROOT / "llm_demo/run/folder.py").read_text()
FILES_OF_A_RUN = {
    "config.json", "env.json", "cmd.sh", "train.log", "metrics.jsonl", "summary.json",
}  # fmt: skip
PROFILED = {"profile.txt"}
A_USERS_OWN = {"my.jsonl", "x.jsonl", "x.heldout.jsonl", "gsm8k/train.jsonl", "gsm8k/test.jsonl"}


def table(heading):
    """The cells of each row of the first table below a heading."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = section.split("\n|---")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def block(kind):
    """Setting -> default of a launcher's block of settings."""
    text = (ROOT / LAUNCHERS[kind]).read_text()
    return dict(re.findall(r"^(\w+)=\$\{\1-(.*?)\}", text, re.M))


def flag_of(setting):
    return {"MODEL": "model_name_or_path"}.get(setting, setting.lower())


def default(kind, setting):
    """What applies if nothing is set, as the README writes it."""
    fields = [f for group in (*SHARED, SCRIPTS[kind]) for f in dataclasses.fields(group)]
    script = {field.name: field.default for field in fields}[flag_of(setting)]
    value = block(kind)[setting].removeprefix("$ROOT/") or script
    if value is None:
        return "–"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text.removeprefix(f'{ROOT}/')}`"


def flags_of_help():
    said = io.StringIO()
    for more in SCRIPTS.values():
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            args.parse_args("", more, argv=["--help"])
    # transformers adds each flag once more, spelled with dashes
    return {flag for flag in re.findall(r"--\w[\w-]*", said.getvalue()) if "-" not in flag[2:]}


def test_every_setting_is_in_the_table_with_its_default_and_flag():
    blocks = {kind: block(kind) for kind in LAUNCHERS}
    assert all(len(settings) > 30 for settings in blocks.values())
    documented = {}
    for names, defaults, flags, _ in table("Settings"):
        for name, flag in zip(re.findall("`(.*?)`", names), flags.split(", "), strict=True):
            only = re.search(r"\((\w+)\)$", names)
            documented[name] = only and only[1], defaults, flag
    expected = {}
    for name in blocks["fsdp"] | blocks["pp"]:
        values = {kind: default(kind, name) for kind in LAUNCHERS if name in blocks[kind]}
        first, *others = dict.fromkeys(values.values())
        text = f"{first} (pp: {others[0]})" if others else first
        only = None if len(values) == 2 else next(iter(values))
        expected[name] = only, text, f"`--{flag_of(name)}`"
    assert documented == expected


def test_every_flag_is_named_and_every_flag_named_exists():
    flags = flags_of_help()
    named = set(re.findall(r"--\w[\w-]*", README)) - {"--no_"}
    assert len(named) > 30
    of_bench = set(re.findall(r"--\w+", make_parser().format_help()))
    parsers = (export.make_parser(), evaluate.make_parser(), check.make_parser())
    commands = {f for p in parsers for f in re.findall(r"--\w+", p.format_help())} - {"--help"}
    commands.add("--check")  # of setup.sh
    assert named <= flags | of_bench | commands, named - flags - of_bench - commands
    assert commands <= named, commands - named
    # --no_x is said of all booleans at once; the deepspeed launcher adds --local_rank
    untold = {f for f in flags if not f.startswith("--no_")} - {"--fsdp", "--local_rank"}
    assert untold <= named, untold - named


def test_every_variable_named_is_read_somewhere():
    named = set(re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z_]+\b|\b[A-Z]{2,}(?==)", README))
    # NCCL's and RCCL's own, and PyTorch's
    named -= {"NCCL_P2P_DISABLE", "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"}
    sources = [*LAUNCHERS.values(), "launch_common.sh", "setup.sh", "llm_demo/launch/__main__.py"]
    sources += ["llm_demo/data/packs.py"]
    read = set(re.findall(r"\w+", "".join((ROOT / source).read_text() for source in sources)))
    assert len(named) > 30
    assert named <= read, named - read


def test_every_path_named_exists_and_every_script_is_named():
    words = {w.removeprefix("…/").rstrip("./") for w in re.findall(r"[\w.…/-]+", README)}
    folders = ("fsdp/", "pp/", "llm_demo/", "data/", "models/", "tests/", "bench/", ".ci/")
    paths = {w for w in words if re.search(r"\.(py|sh|jsonl?|md|txt|toml|log)$", w)}
    paths |= {w for w in words if w.startswith(folders) and not re.match(r"data/\w+$", w)}
    assert len(paths) > 40
    missing = {
        p for p in paths - FILES_OF_A_RUN - PROFILED - A_USERS_OWN if not (ROOT / p).exists()
    }
    assert not missing
    rooms = ("fsdp", "pp", "llm_demo", "bench", "bench/peers")
    rooms = [p for room in rooms for p in (ROOT / room).glob("*.[psj]*")]
    ours = {str(p.relative_to(ROOT)) for p in rooms if p.name != "__init__.py"}
    assert ours <= paths, ours - paths


def test_the_files_of_a_run_are_named():
    assert set(re.findall(r'"(\w+\.(?:jsonl?|sh|log))"', METRICS + FOLDER)) == FILES_OF_A_RUN
    assert all(f"`{name}`" in README for name in FILES_OF_A_RUN)


def test_the_keys_of_metrics_jsonl_are_those_written():
    named = {key for row in table("How to read a run") for key in re.findall("`(.*?)`", row[1])}
    written = set()
    for node in ast.walk(ast.parse(METRICS)):
        keys = {getattr(key, "value", None) for key in getattr(node, "keys", ())}
        if "step" in keys:  # the object of a step, and that of an evaluation
            written |= keys
    assert len(written) > 12
    assert named == written
    assert f"`{' | '.join(summary.COLUMNS)}`" in README


def test_the_shapes_of_data_and_the_backends_are_those_there_are():
    assert {row[0].strip("`") for row in table("Your data")} == set(records.FORMATS)
    assert [row[0].strip("`") for row in table("Attention")] == list(attention.IMPLS)
