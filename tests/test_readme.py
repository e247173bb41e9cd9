"""The README names the settings, flags, files and metrics that there are, and no others."""

import ast
import contextlib
import io
import re

from conftest import ROOT

from bench.run import make_parser
from fsdp.train_fsdp import FsdpArgs
from llm_demo import args, evaluate, export
from llm_demo.check import __main__ as check
from llm_demo.data import records
from llm_demo.model import attention
from llm_demo.run import metrics
from pp.pp_train import PipeArgs

README = (ROOT / "README.md").read_text()
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


def flags_of_help():
    said = io.StringIO()
    for more in SCRIPTS.values():
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            args.parse_args("", more, argv=["--help"])
    # transformers adds each flag once more, spelled with dashes
    return {flag for flag in re.findall(r"--\w[\w-]*", said.getvalue()) if "-" not in flag[2:]}


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
    sources += ["llm_demo/data/packs.py", "llm_demo/launch/settings.py"]
    read = set(re.findall(r"\w+", "".join((ROOT / source).read_text() for source in sources)))
    read |= {flag[2:].upper() for flag in flags_of_help()}
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
    assert f"`{' | '.join(metrics.COLUMNS)}`" in README


def test_the_shapes_of_data_and_the_backends_are_those_there_are():
    assert {row[0].strip("`") for row in table("Your data")} == set(records.FORMATS)
    assert [row[0].strip("`") for row in table("Attention")] == list(attention.IMPLS)
