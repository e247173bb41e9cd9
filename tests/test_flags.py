"""Flags: by command line, environment and launcher; refused early; on the help's and docs' page."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, no_ranks, printed_flags

from llm_demo import chat, evaluate, export, fit, report
from llm_demo.check import __main__ as check
from llm_demo.core import attention
from llm_demo.core.errors import UserError
from llm_demo.data import records
from llm_demo.flags import args, parsing, rules
from llm_demo.flags.parsing import env_of, groups_of
from llm_demo.launch.settings import FIRST_RUN, without_effect
from llm_demo.run.inputs import look

GROUPS = {kind: groups_of(ROOT / kind) for kind in ("fsdp", "pp", "zero", "fsdp_pp")}
LAUNCHERS = {kind: f"{kind}/launch_{kind}.sh" for kind in GROUPS}
# "ddp" starts the same script as "fsdp"
ALL = {"ddp": "fsdp/launch_ddp.sh", **{kind: LAUNCHERS[kind] for kind in sorted(LAUNCHERS)}}


def fields(kind):
    return [f for group in (*args.SHARED, *GROUPS[kind]) for f in dataclasses.fields(group)]


def parse(kind, words=""):
    return args.parse_args("", *GROUPS[kind], argv=words.split())


def start(launcher, *flags, python=sys.executable, **environ):
    """Run a launcher to its end; nothing of this process's environment sets a flag."""
    names = {env_of(field) for kind in GROUPS for field in fields(kind)}
    env = {k: v for k, v in os.environ.items() if k not in names}
    return subprocess.run(
        ["bash", str(launcher), *flags], env={**env, "PYTHON": python, **environ},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


# ---------------------------------------------------------------- docs/flags.md


def test_the_page_of_flags_is_up_to_date():
    page = runpy.run_path(str(ROOT / "docs/make_flags.py"))["page"]()
    assert (ROOT / "docs/flags.md").read_text() == page, "python docs/make_flags.py"


def test_every_launchers_setting_is_a_flags():
    for launcher in ROOT.glob("*/launch_*.sh"):
        settings = set(re.findall(r"^(\w+)=\$\{\1-", launcher.read_text(), re.M))
        known = {env_of(field) for field in fields(launcher.parent.name)}
        assert 10 < len(settings) < 20 and settings <= known


# ---------------------------------------------------------------- environment and launchers


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_variable_sets_the_flag_of_its_name(kind, tmp_path):
    names = {env_of(field): field.name for field in fields(kind)}
    names.pop("", None)  # of flags that no variable sets
    environ = {name: f"of {name}" for name in (*names, "STAGES", "DEEPSPEED_CONFIG")}
    environ["LOCAL_RANK"] = "3"  # as set by launchers, for the ranks
    done = start(ROOT / LAUNCHERS[kind], python=no_ranks(tmp_path), **environ)
    given = printed_flags(done.stdout)
    assert given == {flag: f"of {name}" for name, flag in names.items()}
    assert given["model_name_or_path"] == "of MODEL" and "local_rank" not in given


@pytest.mark.parametrize("kind", ["fsdp", "pp"])
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
    given = printed_flags(start(launcher, python=python).stdout)
    assert (given["lr"], given["seed"]) == ("1e-4", "7") and "where" not in given
    assert given.keys() >= {name.lower() for name in FIRST_RUN}
    given = printed_flags(start(launcher, python=python, SEED="8", DTYPE="").stdout)
    assert given["seed"] == "8" and "dtype" not in given


# ---------------------------------------------------------------- refused as they are parsed

REFUSED = [
    ("fsdp", "--lr nan", "--lr nan: must be a finite number"),
    ("fsdp", "extra", "unknown argument extra; see --help"),
    ("fsdp", "--overlong wrap", "--overlong wrap: choose from truncate, split, drop"),
    ("fsdp", "--attn_impl x", "--attn_impl x: choose from auto, sdpa, varlen_cudnn, varlen, "
     "flash_attn, efficient, bucketed, bucketed_math, math"),
    ("fsdp", "--fp8 x", "--fp8 x: choose from none, rowwise_gw, rowwise, blockwise"),
    ("fsdp_pp", "--schedule zbv", "--schedule zbv: choose from 1f1b, gpipe, interleaved, v"),
    ("fsdp", "--save maybe", "--save maybe: must be true or false"),
    ("fsdp", "--replicas 0", "--replicas 0: must be a positive integer or all"),
    ("pp", "--partition even", "--partition even: must be balanced, uniform, parameters or counts "
     "such as 18,10"),
    ("pp", "--micro_batch_size 0", "--micro_batch_size 0: must be at least 1"),
    ("pp", "--activation_memory_budget 2", "--activation_memory_budget 2: must be at most 1"),
    ("zero", "--peak_tflops 0", "--peak_tflops 0: must be positive"),
    ("fsdp", "--seq_len 7", "--seq_len 7 is too small: the minimum is 8"),
    ("fsdp", "--input_key a --target_key a", "--input_key and --target_key both name 'a': a "
     "question and its answer are two columns"),
    ("fsdp", "--max_steps 0 --num_epochs 0", "--max_steps 0 needs --num_epochs above 0"),
    ("fsdp", "--profile_steps 3", "--profile_steps 3: must be two steps such as 5:7"),
    ("fsdp", "--profile_steps 5:3", "--profile_steps 5:3: must be in order, counted from 1"),
    ("fsdp", "--profile_steps 0:2", "--profile_steps 0:2: must be in order, counted from 1"),
    ("fsdp_pp", "--fp8 rowwise --fp16", "--fp8 does not work with --dtype fp16: it takes bf16"),
    ("zero", "--save_every 5 --no_save", "--save_every does not work with --no_save"),
    ("fsdp", "--psgd_rank 4", "--psgd_rank needs --replicas: it compresses sums over them"),
    ("fsdp", "--early_stopping 1 --eval_every 4 --save_every 3", "--early_stopping: --eval_every 4 "
     "must be a multiple of --save_every 3, so that the best checkpoint exists"),
    ("fsdp", "--copy_engines --dtype fp32", "--copy_engines requires --dtype bf16 or fp16"),
    ("fsdp", "--sequence_parallel 2 --seq_len 33",
     "--sequence_parallel 2 does not divide --seq_len 33"),
    ("fsdp_pp", "--tensor_parallel 2 --seq_len 33",
     "--tensor_parallel 2 does not divide --seq_len 33"),
    ("pp", "--schedule dualpipev --stages 4", "--schedule dualpipev needs --stages of at least 2 "
     "and --grad_accum_steps of at least 2 x stages: 8"),
    ("fsdp_pp", "--schedule interleaved --grad_accum_steps 3",
     "--schedule interleaved needs --grad_accum_steps that is a multiple of --stages 2, not 3"),
    ("fsdp_pp", "--schedule v --stages 1", "--schedule v needs --stages of at least 2"),
    ("pp", "--optim_state bf16", "--optim_state: only for fsdp/ and fsdp_pp/"),
    ("zero", "--fp8", "--fp8: only for fsdp/ and fsdp_pp/"),
    ("zero", "--lora-rank=16", "--lora_rank=16: only for fsdp/ and fsdp_pp/"),
    ("pp", "--lora_rank 16", "--lora_rank: only for fsdp/ and fsdp_pp/"),
    ("pp", "--adapter x", "--adapter: only for fsdp/ and fsdp_pp/"),
    ("fsdp_pp", "--base_bits 4", "--base_bits needs --lora_rank: that or --adapter makes adapters"),
    ("fsdp_pp", "--lora_rank 4 --base_bits 4 --fp8", "--base_bits does not work with --fp8"),
    ("pp", "--freeze_router", "--freeze_router: only for fsdp/ and fsdp_pp/"),
    ("fsdp", "--stages=2", "--stages=2: only for fsdp_pp/ and pp/"),
    ("fsdp_pp", "--deepspeed_config x.json", "--deepspeed_config: only for pp/ and zero/"),
]  # fmt: skip


@pytest.mark.parametrize("kind, flags, message", REFUSED)
def test_what_is_refused_as_it_is_parsed(kind, flags, message, record_property):
    record_property("bad inputs", 1)
    with pytest.raises(UserError) as raised:
        parse(kind, flags)
    assert str(raised.value) == message


@pytest.mark.parametrize("processes, kind, flags, words", [
    (3, "pp", "--stages 4", "3 processes can't form pipelines of 4 --stages: set NPROC_PER_NODE"),
    (3, "fsdp_pp", "--stages 2", "3 processes can't form pipelines of 2 --stages: set NPROC"),
    (2, "fsdp_pp", "--tensor_parallel 2", "--tensor_parallel 2 does not divide 1, the ranks of a"),
    (3, "fsdp", "--replicas 2", "--replicas 2 does not divide 3, the processes"),
    (3, "fsdp", "--expert_parallel 2", "--expert_parallel 2 does not divide 3, the processes"),
    (1, "fsdp", "--sequence_parallel 2", "--sequence_parallel 2 does not divide 1, the processes"),
    (1, "fsdp", "--tensor_parallel 2", "--tensor_parallel 2 does not divide 1, the processes"),
    (2, "fsdp", "--no_fsdp", "--no_fsdp needs one process, not 2: set NPROC_PER_NODE=1"),
])  # fmt: skip
def test_flags_that_dont_fit_the_processes(processes, kind, flags, words, record_property):
    record_property("bad inputs", 1)
    with pytest.raises(UserError) as raised:
        parse(kind, flags).check_processes(processes)
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize(
    "given, meant",
    [("model", "model_name_or_path"), ("batch_size", "micro_batch_size"), ("output", "output_dir"),
     ("data", "train_json"), ("lr_rate", "lr"), ("warmup_step", "warmup_steps"), ("hepl", "help"),
     ("save_steps", "save_every"), ("no_suffle", "no_shuffle"), ("clip", None),
     ("per_device_train_batch_size", "micro_batch_size"), ("num_train_epochs", "num_epochs"),
     ("gradient_accumulation_steps", "grad_accum_steps"), ("max_seq_length", "seq_len"),
     ("gradient_checkpointing", "use_activation_checkpointing"), ("dataset", "train_json"),
     ("resume_from_checkpoint", "resume"), ("logging_steps", "log_every"), ("seq", "seq_len")],
)  # fmt: skip
def test_the_flag_that_is_meant_is_suggested(given, meant, record_property):
    record_property("bad inputs", 1)
    hint = f"did you mean --{meant}\\?" if meant else "see --help"
    with pytest.raises(UserError, match=f"^unknown argument --{given}; {hint}$"):
        args.parse_args("", argv=[f"--{given}", "1"])


# ---------------------------------------------------------------- rules


def words_for(condition, kind):
    """Flags that fulfil a condition of a rule: one that is set, or NAME=VALUE."""
    name, _, value = condition.partition("=")
    field = next(f for f in fields(kind) if f.name == name)
    if not value:
        others = {field.default, field.metadata["off"]}
        tries = ("true", "2", "0.5", "4", "a", "h100", *parsing.choices_of(field))
        value = next(text for text in tries if allowed(field, text) not in (None, *others))
    return f"--{name}={value}"


def allowed(field, text):
    """The value of a flag, None if the text is refused."""
    with contextlib.suppress(ValueError):
        return parsing.meaning(field, text)


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: f"{rule.flag}-{rule.other}")
def test_every_rule_is_kept(rule, record_property):
    record_property("bad inputs", 1)
    tried = 0
    for kind in GROUPS:
        names = {field.name for field in fields(kind)}
        if not {part.partition("=")[0] for part in (rule.flag, rule.other)} <= names:
            continue
        one, both = [words_for(rule.flag, kind)], [words_for(rule.other, kind)]
        both = one + both
        refused, allowed = (both, one) if rule.relation == rules.NOT_WITH else (one, both)
        flags_of = [flags_without_checks(kind, words) for words in (refused, allowed)]
        assert [rules.is_broken(rule, flags) for flags in flags_of] == [True, False]
        said = rules.message_of(rule)
        assert rule.relation in said and said.endswith(rule.why)
        with pytest.raises(UserError):
            parse(kind, " ".join(refused))
        tried += 1
    assert tried


def flags_without_checks(kind, words):
    given = parsing.parser_of("", [*args.SHARED, *GROUPS[kind]], {}).parse_args(words)
    del given.help
    return args.type_of(GROUPS[kind])(**vars(given))


def test_flags_are_frozen_and_those_of_other_scripts_are_off():
    flags = parse("zero")
    with pytest.raises(dataclasses.FrozenInstanceError):
        flags.lr = 1.0
    assert (flags.stages, flags.lora_rank, flags.reshard_after_forward) == (1, 0, False)
    assert parse("fsdp").deepspeed_config == "" and "stages" not in vars(flags)
    assert parse("fsdp", "--early_stopping 1 --eval_every 4").save_every == 4


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_help_is_short_and_shows_the_launchers_values(kind, tmp_path):
    for heavy in ("torch", "transformers", "numpy", "deepspeed"):
        (tmp_path / f"{heavy}.py").write_text("raise SystemExit('too late')")
    done = start(ROOT / LAUNCHERS[kind], "--help", "--seed", "7", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) < 130 and max(map(len, lines)) <= 100
    for name in ("Model", "Data", "Training", "Run", GROUPS[kind][0].__doc__):
        assert lines.count(f"{name}:") == 1
    assert f"bash {LAUNCHERS[kind]}  " in done.stdout  # an example, on a line of its own
    text = " ".join(done.stdout.split())
    for field in fields(kind):
        no = "[no_]" if field.type in (bool, bool | None) else ""
        assert f" --{no}{field.name} {field.metadata['help']}" in text
    accumulated = {"fsdp": 2, "pp": 4, "zero": 2, "fsdp_pp": 4}[kind]
    for remark in (
        "[default: 1; here: 4]", f"[default: 1; here: {accumulated}]", "[here: 0.002]",
        "[default: data/sft_en.jsonl; here: data/first_run.jsonl]", "[default: 1234; here: 7]",
        "[default: 0.01]", "[cosine | linear | constant; default: cosine]",
    ):  # fmt: skip
        assert remark in text, remark


# ---------------------------------------------------------------- early answers

COMMANDS = [f"-m llm_demo.{name}" for name in "chat check evaluate export fit report".split()]
SCRIPTS = ["fsdp/train_fsdp.py", "fsdp_pp/train_fsdp_pp.py", "pp/pp_train.py", "zero/train_zero.py"]
SCRIPTS.append("fsdp/launch_script.py")
SOON = [(*start, "--help", "") for start in zip([*COMMANDS, *SCRIPTS, *ALL.values()], strict=True)]
SOON += [
    ("-m llm_demo.evaluate", f"--models {TINY} --data no.jsonl", "no such data file: no.jsonl"),
    ("-m llm_demo.report", "", "the following arguments are required: RUN"),
    ("zero/train_zero.py", "--train_json no.jsonl", "no such data file: no.jsonl"),
    (LAUNCHERS["pp"], "--output_dir full", "--output_dir full is not empty: choose another, or"),
    (LAUNCHERS["fsdp"], "--estimate --card h101", "--card h101: must be one of h100, h200, "),
]


@pytest.mark.parametrize("program, words, message", SOON)
def test_help_and_what_is_missing_take_no_seconds(program, words, message, work):
    """Of processor time, with all processes that are started: importing PyTorch takes 3 s."""
    python = "bash" if program.endswith(".sh") else sys.executable
    argv = program.split() if program.startswith("-m") else [str(ROOT / program)]
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "PYTHON")}
    paths = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [python, *argv, *words.split()], env=env | paths, cwd=work,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if message:
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ") and message in line and done.returncode == 2
    else:
        assert (done.returncode, done.stderr) == (0, "") and done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The working folder, with a folder that holds a file and bad examples."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file.jsonl").touch()
    rows = [{"prompt": "a", "completion": text} for text in ("b", None)]
    (tmp_path / "full/bad.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


MISSING = [  # what a script looks for before it imports anything slow
    ("--train_json no.jsonl", "no such data file: no.jsonl"),
    ("--eval_json no.jsonl", "no such data file: no.jsonl"),
    ("--eval_json full/bad.jsonl", "full/bad.jsonl:2: completion must be text, not null"),
    ("--model_name_or_path ./no", "no model at ./no"),
    ("--tokenizer_name_or_path ./no", "no model at ./no"),
    ("--chat_template no.jinja", "--chat_template no.jinja: No such file or directory"),
    ("--resume no", "no: no such folder"),
    ("--adapter no", "--adapter no: no folder"),
    ("--deepspeed_config no.json", "--deepspeed_config no.json: No such file or directory"),
    ("--output_dir full", "--output_dir full is not empty: choose another, or add --overwrite"),
]


@pytest.mark.parametrize("flags, message", MISSING)
def test_what_a_script_looks_for(flags, message, work, record_property):
    record_property("bad inputs", 1)
    kind = "zero" if "deepspeed" in flags else "fsdp"
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        look(parse(kind, flags))


@pytest.mark.parametrize("command, words, message", [
    (chat, "./no", "no model at ./no"),
    (chat, f"{TINY} --chat_template no.jinja", "--chat_template no.jinja: No such file"),
    (evaluate, f"--models {TINY}", "the following arguments are required: --data"),
    (evaluate, f"--models {TINY} ./no --data full/file.jsonl", "no model at ./no"),
    (evaluate, f"--models {TINY} --data no.jsonl --out full/file.jsonl", "--out full/file.jsonl is "
     "a file"),
    (export, "full", "the following arguments are required: out"),
    (export, "full full", "full is not empty: choose another folder"),
    (fit, f"{TINY} --cards 2", "the following arguments are required: --tokens_a_step"),
    (fit, f"{TINY} --cards 1000000 --tokens_a_step 8", "argument --cards: 1000000: must be"),
])  # fmt: skip
def test_what_a_command_looks_for(command, words, message, work, record_property):
    record_property("bad inputs", 1)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        command.check(command.make_parser().parse_args(words.split()))


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
    parsed = getattr(parse("fsdp", words), name)
    assert parsed == value and type(parsed) is type(value)


def test_a_home_folder_is_meant_by_its_sign(monkeypatch):
    """The shell leaves --output_dir=~/x as it is, and what a variable holds."""
    monkeypatch.setenv("HOME", "/home/me")
    paths = {f.name for kind in GROUPS for f in fields(kind) if f.metadata["path"]}
    assert paths == {*args.names_of("input"), "output_dir", "resume"}
    paths -= {"adapter"}  # which is read as it is parsed
    words = " ".join(f"--{name}=~/x" for name in paths)
    parsed = parse("zero", f"{words} --train_json=~/a,b~,~/c")
    assert {getattr(parsed, name) for name in paths - {"train_json"}} == {"/home/me/x"}
    assert parsed.train_json == "/home/me/a,b~,/home/me/c"
    tools = [export.make_parser().parse_args(["~/run", "~/out"])]
    tools += [evaluate.make_parser().parse_args("--models m --data d --out ~/out".split())]
    assert [str(tool.out) for tool in tools] == ["/home/me/out"] * 2
    assert str(tools[0].source) == "/home/me/run"


@pytest.mark.parametrize("address", ["gs://b/x", "file:///b/x"])
def test_an_address_is_not_a_path(address, record_property):
    """Else it names a folder "gs:", here."""
    record_property("bad inputs", 1)
    commands = [functools.partial(parse, "fsdp", f"--train_json a.jsonl,{address}")]
    for kind in GROUPS:
        names = {f.name for f in fields(kind) if f.metadata["path"]}
        commands += [functools.partial(parse, kind, f"--{name} {address}") for name in names]
    for parser, words in (
        (export.make_parser(), ["run", address]),
        (evaluate.make_parser(), ["--models=m", "--data=d", f"--out={address}"]),
        (check.make_parser(), [f"--output_dir={address}"]),
    ):
        commands.append(functools.partial(parser.parse_args, words))
    commands.append(functools.partial(report.main, [address]))
    for command in commands:
        with pytest.raises(UserError, match=f"{address}: {address.split('/')[0]}// is not suppo"):
            command()


def test_choices_are_those_that_the_code_knows():
    assert parsing.literals(args.ModelArgs, "attn_impl") == ("auto", *attention.IMPLS)
    assert parsing.literals(args.DataArgs, "data_format") == ("auto", *records.FORMATS)


@pytest.mark.parametrize("kind, flags, names", [
    ("fsdp", "", "use_activation_checkpointing reshard_after_forward optimizer_on_host "
     "sequence_parallel activation_memory_budget lora_rank optim_state"),
    ("fsdp", "--lora_rank 8 --use_activation_checkpointing", "base_bits reshard_after_forward "
     "activations_on_host sequence_parallel activation_memory_budget optim_state"),
    ("fsdp", "--no_fsdp --seq_len 33", "use_activation_checkpointing optimizer_on_host "
     "activation_memory_budget lora_rank optim_state"),
    ("fsdp_pp", "--schedule v", "use_activation_checkpointing activation_memory_budget "
     "copy_engines reshard_after_forward lora_rank optim_state"),
    ("pp", "--micro_batch_size 2", "micro_batch_size use_activation_checkpointing "
     "activation_memory_budget"),
    ("zero", "", "use_activation_checkpointing activation_memory_budget deepspeed_config"),
])  # fmt: skip
def test_out_of_memory_advice_is_only_what_the_flags_allow(kind, flags, names):
    text = args.less_memory(parse(kind, flags))
    said = re.findall(r"\d\. --(\w+) ", text)
    assert sorted(said) == sorted([*names.split(), "seq_len"])
    if kind == "pp":
        assert text.startswith("1. --micro_batch_size (now 2): halve it, double grad_accum_steps; ")
    if kind == "fsdp" and not flags:
        assert "--reshard_after_forward (now false): true, on several processes" in text
        assert "--lora_rank (now 0): 16" in text


def test_a_misspelt_variable_and_flags_of_other_trainers(tmp_path):
    """A variable close to a setting's name, or of a flag that the script refuses, has no effect,
    which is said; common flags of other trainers are translated."""
    script = ROOT / "fsdp/train_fsdp.py"
    wrong = {"MAX_STEP": "3", "GRAD_ACUM_STEPS": "1", "LR": "1", "MAX_STEPS": "2", "HOME_DIR": "/"}
    assert {*without_effect(script, wrong)} == {
        "MAX_STEP is not a setting; did you mean MAX_STEPS?",
        "GRAD_ACUM_STEPS is not a setting; did you mean GRAD_ACCUM_STEPS?",
    }
    environ = {"LORA_RANK": "8", "REPLICAS": "2", "OPTIMIZER_ON_HOST": "0", "STAGES": "3"}
    elsewhere = "{} has no effect here: only for {}".format
    assert without_effect(script, environ) == [elsewhere("STAGES", "fsdp_pp/ and pp/")]
    assert {*without_effect(ROOT / "pp/pp_train.py", environ)} == {
        elsewhere("LORA_RANK", "fsdp/ and fsdp_pp/"),
        elsewhere("REPLICAS", "fsdp/"),
    }
    done = start(ROOT / LAUNCHERS["fsdp"], "--learning_rate", "1", MAX_STEP="3")
    assert "warning: MAX_STEP is not a setting; did you mean MAX_STEPS?" in done.stderr
    assert "unknown argument --learning_rate; did you mean --lr?" in done.stderr
