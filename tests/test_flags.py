"""Flags: by command line, environment and launcher; refused early; on the help's and docs' page."""

import argparse
import dataclasses
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, no_ranks

from fsdp.flags import ExpertArgs, FsdpArgs
from fsdp_pp.flags import FsdpPipeArgs
from llm_demo import evaluate, export
from llm_demo.core import attention
from llm_demo.core.errors import UserError
from llm_demo.data import records
from llm_demo.job import args
from llm_demo.job.folder import INPUTS
from llm_demo.launch.settings import FIRST_RUN
from pp.flags import PipeArgs
from zero.flags import ZeroArgs

SHARED = (args.ModelArgs, args.DataArgs, args.TrainArgs, args.RunArgs)
SCRIPTS = {"fsdp": FsdpArgs, "pp": PipeArgs, "zero": ZeroArgs, "fsdp_pp": FsdpPipeArgs}
LAUNCHERS = {kind: f"{kind}/launch_{kind}.sh" for kind in SCRIPTS}
# "ddp" starts the same script as "fsdp"
ALL = {"ddp": "fsdp/launch_ddp.sh", **{kind: LAUNCHERS[kind] for kind in sorted(LAUNCHERS)}}
# Variables that people's scripts set.
PUBLIC = """
    MODEL TRAIN_JSON EVAL_JSON INPUT_KEY TARGET_KEY SEQ_LEN MICRO_BATCH_SIZE GRAD_ACCUM_STEPS
    MAX_STEPS NUM_EPOCHS LR WEIGHT_DECAY WARMUP_STEPS LR_SCHEDULER MAX_GRAD_NORM DTYPE
    PACK_SEQUENCES TRAIN_ON_PROMPT USE_ACTIVATION_CHECKPOINTING ATTN_IMPL COMPILE SEED LOG_EVERY
    EVAL_EVERY EVAL_BATCH_SIZE OUTPUT_DIR REPORT_TO TOKENIZER_NAME_OR_PATH DATA_FORMAT OVERLONG
    SAMPLE_TOKENS OVERWRITE DRY_RUN SAVE_EVERY KEEP_LAST RESUME
""".split()
OWN = {
    "fsdp": ["RESHARD_AFTER_FORWARD"],
    "pp": ["STAGES", "SCHEDULE", "PARTITION", "DEEPSPEED_CONFIG", "CHECK_TIED_EVERY"],
    "zero": ["DEEPSPEED_CONFIG"],
    "fsdp_pp": ["STAGES", "SCHEDULE", "PARTITION", "RUN_AHEAD", "RESHARD_AFTER_FORWARD"],
}


def fields(kind):
    return [f for group in (*SHARED, SCRIPTS[kind]) for f in dataclasses.fields(group)]


def start(launcher, *flags, python=sys.executable, **environ):
    """Run a launcher to its end; nothing of this process's environment sets a flag."""
    names = {args.env_of(field) for kind in SCRIPTS for field in fields(kind)}
    env = {k: v for k, v in os.environ.items() if k not in names}
    return subprocess.run(
        ["bash", str(launcher), *flags], env={**env, "PYTHON": python, **environ},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def flags_in(output):
    """{name: value} of the command that a launcher prints, where the last one counts."""
    (line,) = (line for line in output.splitlines() if line.startswith("+ "))
    words = shlex.split(line)[6:]
    return {words[i].removeprefix("--"): words[i + 1] for i in range(0, len(words), 2)}


def block(kind):
    """Setting -> default of a launcher's block of settings."""
    text = (ROOT / ALL[kind]).read_text()
    return dict(re.findall(r"^(\w+)=\$\{\1-(.*?)\}", text, re.M))


# ---------------------------------------------------------------- docs/flags.md


def test_the_page_of_flags_is_up_to_date():
    page = runpy.run_path(str(ROOT / "docs/make_flags.py"))["page"]()
    assert (ROOT / "docs/flags.md").read_text() == page, "python docs/make_flags.py"


def test_every_setting_and_flag_is_on_the_page_with_its_default():
    def cells(line):
        return [cell.strip() for cell in line.strip("|").split("|")]

    table = []  # (heading without the script, cells): some scripts have a flag of the same name
    for section in (ROOT / "docs/flags.md").read_text().split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        rows = [cells(line) for line in lines if line.startswith("| `--")]
        table += [(heading.split(" (`")[0], row[0].split(",")[0], *row[1:4]) for row in rows]
    documented = set(table)
    assert len(documented) == len(table)

    def written(value):
        if value in (None, ""):
            return "–"
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return f"`{text.removeprefix(f'{ROOT}/')}`"

    expected = set()
    blocks = {kind: block(kind) for kind in ALL}
    for group in (*SHARED, *SCRIPTS.values(), ExpertArgs):
        for field in dataclasses.fields(group):
            name = "MODEL" if field.name == "model_name_or_path" else field.name.upper()
            default = written(field.default)
            values = {k: written(b.get(name, "").removeprefix("$ROOT/")) for k, b in blocks.items()}
            values = {k: v for k, v in values.items() if v not in ("–", default)}
            if len(set(values.values())) > 1 or 0 < len(values) < len(blocks):
                launcher = ", ".join(f"{value} ({k})" for k, value in values.items())
            else:
                launcher = next(iter(values.values()), "")
            variable = "–" if name == "LOCAL_RANK" else f"`{name}`"
            expected.add((group.__doc__, f"`--{field.name}`", default, launcher, variable))
    assert documented == expected
    known = {field.name.upper() for kind in SCRIPTS for field in fields(kind)} | {"MODEL"}
    assert all(10 < len(settings) < 20 and settings.keys() <= known for settings in blocks.values())


# ---------------------------------------------------------------- environment and launchers


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_variable_sets_the_flag_of_its_name(kind, tmp_path):
    names = {args.env_of(field): field.name for field in fields(kind)}
    names.pop("", None)  # of flags that no variable sets
    assert names.keys() >= {*PUBLIC, *OWN[kind]}
    environ = {name: f"of {name}" for name in (*names, *OWN["fsdp"], *OWN["pp"])}
    environ["LOCAL_RANK"] = "3"  # as set by launchers, for the ranks
    done = start(ROOT / LAUNCHERS[kind], python=no_ranks(tmp_path), **environ)
    found = flags_in(done.stdout)
    assert found == {flag: f"of {name}" for name, flag in names.items()}
    assert found["model_name_or_path"] == "of MODEL" and "local_rank" not in found


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_launcher_takes_any_setting(kind, tmp_path):
    for name in ("launch_common.sh", LAUNCHERS[kind]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("llm_demo", f"{kind}/flags.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    launcher = tmp_path / LAUNCHERS[kind]
    launcher.write_text(
        launcher.read_text().replace("\nLR=${LR-}\n", "\nLR=1e-4\nSEED=${SEED-7}\nWHERE='a b'\n")
    )
    python = no_ranks(tmp_path)
    found = flags_in(start(launcher, python=python).stdout)
    assert (found["lr"], found["seed"]) == ("1e-4", "7") and "where" not in found
    assert found.keys() >= {name.lower() for name in FIRST_RUN}
    found = flags_in(start(launcher, python=python, SEED="8", DTYPE="").stdout)
    assert found["seed"] == "8" and "dtype" not in found


# ---------------------------------------------------------------- refused before anything heavy

EARLY = [
    ("fsdp", "--lr nan", "--lr nan: must be a finite number"),
    ("fsdp", "--lr 1e400", "--lr 1e400: must be a finite number"),
    ("fsdp", "extra", "unknown argument extra; see --help"),
    ("fsdp", "--learning_rate 1", "unknown argument --learning_rate; did you mean --lr?"),
    ("fsdp", "--overlong wrap", "--overlong wrap: choose from truncate, split, drop"),
    ("fsdp", "--attn_impl x", "--attn_impl x: choose from auto, sdpa, varlen_cudnn, varlen, "
     "flash_attn, bucketed, bucketed_math, math"),
    ("fsdp", "--save maybe", "--save maybe: must be true or false"),
    ("fsdp", "--seq_len 7", "--seq_len 7 is too small: the minimum is 8"),
    ("fsdp", "--profile_steps 3",
     "--profile_steps 3: must be two steps such as 5:7, counted from 1"),
    ("fsdp", "--resume auto", "--resume auto needs --output_dir, the run to resume"),
    ("fsdp", "--copy_engines --no_fsdp", "--copy_engines requires FSDP with --dtype bf16 or fp16"),
    ("fsdp", "--replicas all --psgd_start 3", "--psgd_start needs --psgd_rank"),
    ("pp", "--optimizer_on_host",
     "--optimizer_on_host: only for fsdp/"),
    ("zero", "--optimizer_on_host",
     "--optimizer_on_host: only for fsdp/"),
    ("zero", "--lora-rank=16", "--lora-rank=16: only for fsdp/"),
    ("pp", "--micro_batch_size 0", "--micro_batch_size 0: must be at least 1"),
    ("pp", "--fsdp", "--fsdp: only for fsdp/"),
    ("zero", "--freeze_router", "--freeze_router: only for fsdp/ and fsdp_pp/"),
    ("zero", "--schedule 1f1b", "--schedule: only for fsdp_pp/ and pp/"),
    ("fsdp", "--stages=2", "--stages=2: only for fsdp_pp/ and pp/"),
    ("zero", "--lerning_rate 1", "unknown argument --lerning_rate; did you mean --lr?"),
    ("pp", "--schedule dualpipev --stages 4", "--schedule dualpipev needs --stages of at least 2 "
     "and --grad_accum_steps of at least 2 x stages: 8"),
    ("fsdp_pp", "--optimizer_on_host",
     "--optimizer_on_host: only for fsdp/"),
    *(("fsdp_pp", f"--schedule {old}", f"--schedule {old} has been removed: use {new}")
      for old, new in {
          "torch_1f1b": "1f1b", "torch_interleaved": "interleaved", "zbv": "v",
          "dualpipev": "v, or pp/launch_pp.sh, which has dualpipev",
      }.items()),
]  # fmt: skip


@pytest.mark.parametrize(
    "given, meant",
    [("model", "model_name_or_path"), ("batch_size", "micro_batch_size"), ("output", "output_dir"),
     ("data", "train_json"), ("lr_rate", "lr"), ("warmup_step", "warmup_steps"), ("hepl", "help"),
     ("save_steps", "save_every"), ("no_suffle", "no_shuffle"), ("clip", None)],
)  # fmt: skip
def test_the_flag_that_is_meant_is_suggested(given, meant, record_property):
    record_property("bad inputs", 1)
    hint = f"did you mean --{meant}\\?" if meant else "see --help"
    with pytest.raises(UserError, match=f"^unknown argument --{given}; {hint}$"):
        args.parse_args("", argv=[f"--{given}", "1"])


@pytest.mark.parametrize("kind, flags, message", EARLY)
def test_bad_flags_are_refused_before_torch_is_imported(kind, flags, message, tmp_path):
    for heavy in ("torch", "transformers", "numpy", "deepspeed"):
        (tmp_path / f"{heavy}.py").write_text("raise SystemExit('too late')")
    done = start(ROOT / LAUNCHERS[kind], *flags.split(), PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize(
    "kind, variable, message",
    [
        ("fsdp", {"SEED": "many"}, "--seed many: must be a whole number"),
        ("fsdp_pp", {"SCHEDULE": "zbv"}, "--schedule zbv has been removed: use v"),
    ],
)
def test_a_bad_variable_is_refused_as_the_flag_is(kind, variable, message):
    done = start(ROOT / LAUNCHERS[kind], **variable)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_help_is_short_and_shows_the_launchers_values(kind, tmp_path):
    for heavy in ("torch", "transformers", "numpy", "deepspeed"):
        (tmp_path / f"{heavy}.py").write_text("raise SystemExit('too late')")
    done = start(ROOT / LAUNCHERS[kind], "--help", "--seed", "7", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) < 120 and max(map(len, lines)) <= 100
    for name in ("Model", "Data", "Training", "Run", SCRIPTS[kind].__doc__):
        assert lines.count(f"{name}:") == 1
    assert f"bash {LAUNCHERS[kind]}  " in done.stdout  # an example, on a line of its own
    text = " ".join(done.stdout.split())
    for field in fields(kind):
        no = "[no_]" if field.type in (bool, bool | None) else ""
        entry = f" --{no}{field.name}"
        assert f"{entry} {field.metadata['help']}" in text
    accumulated = {"fsdp": 2, "pp": 4, "zero": 2, "fsdp_pp": 4}[kind]
    for remark in (
        "[default: 1; here: 4]", f"[default: 1; here: {accumulated}]", "[here: 0.002]",
        "[default: data/sft_en.jsonl; here: data/first_run.jsonl]", "[default: 1234; here: 7]",
        "[default: 0.01]", "[cosine | linear | constant; default: cosine]",
    ):  # fmt: skip
        assert remark in text, remark


# ---------------------------------------------------------------- parsing


@pytest.mark.parametrize("words, name, value", [
    ("", "save", True), ("--save", "save", True), ("--save false", "save", False),
    ("--save=False", "save", False), ("--no_save", "save", False), ("--no-save", "save", False),
    ("--no_save --save", "save", True), ("--no_overwrite", "overwrite", False),
    ("--overwrite yes", "overwrite", True), ("--overwrite 0", "overwrite", False),
    ("", "fsdp", None), ("--fsdp", "fsdp", True), ("--fsdp=f", "fsdp", False),
    ("--no_fsdp", "fsdp", False), ("--no_fsdp --fsdp", "fsdp", True), ("", "compile", None),
    ("--seq-len 64", "seq_len", 64), ("--seq_len=64", "seq_len", 64), ("--lr 1", "lr", 1.0),
    ("--use-activation-checkpointing", "use_activation_checkpointing", True),
    ("--bf16", "dtype", "bf16"), ("--bf16 --dtype fp16", "dtype", "fp16"),
    ("--train_json=", "train_json", ""), ("--lr 1 --lr 2", "lr", 2.0),
])  # fmt: skip
def test_spellings(words, name, value):
    parsed = getattr(args.parse_args("", FsdpArgs, argv=words.split()), name)
    assert parsed == value and type(parsed) is type(value)


def test_a_home_folder_is_meant_by_its_sign(monkeypatch):
    """The shell leaves --output_dir=~/x as it is, and what a variable holds."""
    monkeypatch.setenv("HOME", "/home/me")
    fields = [f for group in (*SHARED, *SCRIPTS.values()) for f in dataclasses.fields(group)]
    paths = {field.name for field in fields if field.metadata["path"]}
    assert paths == {*INPUTS, "output_dir", "resume"}
    flags = [f"--{name}=~/x" for name in paths]
    flags.append("--train_json=~/a,b~,~/c")
    found = args.parse_args("", *args.groups_of(ROOT / "zero"), argv=flags)
    assert {getattr(found, name) for name in paths - {"train_json"}} == {"/home/me/x"}
    assert found.train_json == "/home/me/a,b~,/home/me/c"
    tools = [export.make_parser().parse_args(["~/run", "~/out"])]
    tools += [evaluate.make_parser().parse_args("--models m --data d --out ~/out".split())]
    assert [str(tool.out) for tool in tools] == ["/home/me/out"] * 2
    assert str(tools[0].source) == "/home/me/run"


def test_a_shortened_flag_is_unknown():
    with pytest.raises(UserError, match="unknown argument --seq; see --help|did you mean"):
        args.parse_args("", argv=["--seq", "64"])


def test_parsed_flags_are_flat_and_in_the_order_of_the_help():
    parsed = args.parse_args("", PipeArgs, argv=[])
    assert list(vars(parsed)) == [field.name for field in fields("pp")]
    assert vars(parsed) == {field.name: field.default for field in fields("pp")}
    assert vars(argparse.Namespace(**vars(parsed))) == vars(parsed)


def test_choices_are_those_that_the_code_knows():
    assert args.choices(args.ModelArgs, "attn_impl") == ("auto", *attention.IMPLS)
    assert args.choices(args.DataArgs, "data_format") == records.DATA_FORMATS


def test_out_of_memory_advice_includes_the_scripts_own_flags():
    of_fsdp = args.less_memory(args.parse_args("", FsdpArgs, argv=[]))
    of_pp = args.less_memory(args.parse_args("", PipeArgs, argv=[]))
    of_both = args.less_memory(args.parse_args("", FsdpPipeArgs, argv=[]))
    assert "--reshard_after_forward (now false): true" in of_both
    assert "--reshard_after_forward (now false): true" in of_fsdp
    assert "reshard" not in of_pp and "--use_activation_checkpointing (now false)" in of_pp
    on = args.parse_args("", FsdpArgs, argv=["--reshard_after_forward"])
    assert "reshard" not in args.less_memory(on)


OUT_OF_MEMORY = [
    (FsdpArgs, "", {"use_activation_checkpointing", "reshard_after_forward", "optimizer_on_host",
     "sequence_parallel", "activation_memory_budget", "lora_rank"}),
    (FsdpArgs, "--lora_rank 8 --use_activation_checkpointing", {"reshard_after_forward",
     "activations_on_host", "sequence_parallel", "activation_memory_budget"}),
    (FsdpArgs, "--freeze_router --no_compile", {"use_activation_checkpointing",
     "reshard_after_forward", "sequence_parallel", "lora_rank"}),
    (FsdpArgs, "--no_fsdp --seq_len 33", {"use_activation_checkpointing", "optimizer_on_host",
     "activation_memory_budget", "lora_rank"}),
    (FsdpPipeArgs, "--schedule v", {"use_activation_checkpointing", "activation_memory_budget",
     "copy_engines", "reshard_after_forward"}),
    (FsdpPipeArgs, "--no_copy_engines", {"use_activation_checkpointing",
     "activation_memory_budget", "reshard_after_forward"}),
    (PipeArgs, "", {"use_activation_checkpointing", "activation_memory_budget"}),
    (ZeroArgs, "", {"use_activation_checkpointing", "activation_memory_budget",
     "deepspeed_config"}),
    (ZeroArgs, "--deepspeed_config zero/ds_zero3_offload.json", {"use_activation_checkpointing",
     "activation_memory_budget"}),
]  # fmt: skip


@pytest.mark.parametrize("group, flags, names", OUT_OF_MEMORY)
def test_out_of_memory_advice_is_only_what_the_flags_allow(group, flags, names):
    parsed = args.parse_args("", group, ExpertArgs, argv=flags.split())
    said = re.findall(r"\d\. --(\w+) ", args.less_memory(parsed))
    assert set(said) == names | {"seq_len"} and len(said) == len(names) + 1


def test_a_misspelt_variable_and_flags_of_other_trainers(tmp_path):
    """A variable close to a setting's name, or of a flag that the script refuses, has no effect,
    which is said; common flags of other trainers are translated."""
    from llm_demo.launch.settings import misspelt, of_others

    script = ROOT / "fsdp/train_fsdp.py"
    wrong = {"MAX_STEP": "3", "GRAD_ACUM_STEPS": "1", "LR": "1", "MAX_STEPS": "2", "HOME_DIR": "/"}
    assert misspelt(script, wrong) == {
        "MAX_STEP": "MAX_STEPS",
        "GRAD_ACUM_STEPS": "GRAD_ACCUM_STEPS",
    }
    environ = {"LORA_RANK": "8", "REPLICAS": "2", "OPTIMIZER_ON_HOST": "0", "RUN_AHEAD": "1"}
    assert of_others(script, environ) == {"RUN_AHEAD": ["fsdp_pp/"]}
    assert of_others(ROOT / "pp/pp_train.py", environ) == {
        "LORA_RANK": ["fsdp/"],
        "REPLICAS": ["fsdp/"],
        "RUN_AHEAD": ["fsdp_pp/"],
    }
    done = start(ROOT / LAUNCHERS["pp"], "--stage", "1", LORA_RANK="8")
    assert "warning: LORA_RANK has no effect here: only for fsdp/\n" in done.stderr
    done = start(ROOT / LAUNCHERS["fsdp"], "--learning_rate", "1", MAX_STEP="3")
    assert "warning: MAX_STEP is not a setting; did you mean MAX_STEPS?" in done.stderr
    assert "unknown argument --learning_rate; did you mean --lr?" in done.stderr
