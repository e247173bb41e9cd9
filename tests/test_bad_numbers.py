"""Numbers that can't be meant, for every numeric flag and variable: refused by name, in one line.

The flags are found by introspection, so that a new one can't be forgotten."""

import argparse
import dataclasses
import typing

import pytest

import bench.run
from fsdp.flags import FsdpArgs
from llm_demo import chat, evaluate, export, fit
from llm_demo.core.errors import UserError
from llm_demo.flags import args, parsing
from llm_demo.launch import __main__ as launch
from llm_demo.machine import dist, process
from pp.flags import PipeArgs

SHARED = (args.ModelArgs, args.DataArgs, args.TrainArgs, args.RunArgs)
BAD = ["nan", "inf", "-inf", "-1", "many", ""]
TOO_LARGE = "1" + 30 * "0"


def numeric(*groups):
    """{flag: whether it takes whole numbers alone} of dataclasses."""
    found = {}
    for field in (field for group in groups for field in dataclasses.fields(group)):
        kinds = {field.type, *typing.get_args(field.type)}
        if kinds & {int, float}:
            found[field.name] = int in kinds
    return found


def one_line(error, *parts):
    text = str(error.value)
    assert "\n" not in text and len(text) < 300
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("group, more", [(FsdpArgs, SHARED), (PipeArgs, ())])
def test_flags_of_the_scripts(group, more, record_property):
    flags = numeric(group, *more)
    assert len(flags) > (15 if more else 1)
    tried = 0
    for name, is_whole in flags.items():
        for value in [*BAD, TOO_LARGE, "1.5"] if is_whole else [*BAD, TOO_LARGE]:
            with pytest.raises(UserError) as raised:
                args.parse_args("", group, argv=[f"--{name}={value}"])
            one_line(raised, f"--{name}")
            tried += 1
    record_property("bad inputs", tried)


def test_what_is_still_allowed():
    parsed = args.parse_args("", PipeArgs, argv="--max_grad_norm 0 --lr 1e-30 --seed 0".split())
    assert (parsed.max_grad_norm, parsed.lr, parsed.seed) == (0, 1e-30, 0)
    assert args.parse_args("", FsdpArgs, argv=["--seed", str(2**62)]).seed == 2**62


def takes_a_number(action):
    if action.type is parsing.size:
        return True
    try:
        return (action.type or str)("8") in (8, [8])
    except (UserError, ValueError, argparse.ArgumentTypeError):
        return False


@pytest.mark.parametrize("module", [chat, evaluate, export, fit, bench.run])
def test_flags_of_the_other_programs(module, record_property):
    parser, tried = module.make_parser(), 0
    for action in parser._actions:
        if not action.option_strings or not takes_a_number(action):
            continue
        for value in [*BAD, TOO_LARGE]:
            with pytest.raises(UserError) as raised:
                parser.parse_args([f"{action.option_strings[0]}={value}"])
            one_line(raised, action.option_strings[0])
            tried += 1
    assert tried >= {chat: 7, evaluate: 35, export: 7, fit: 63, bench.run: 42}[module]
    for value in ("(", "[", "*"):
        for name in ("--answer_regex", "--only"):
            if name in parser._option_string_actions:
                with pytest.raises(UserError) as raised:
                    parser.parse_args([f"{name}={value}"])
                one_line(raised, name, "not a regular expression")
                tried += 1
    record_property("bad inputs", tried)


WHOLE = {"NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_PORT", "STOP_MINUTES", "JOIN_SECONDS"}


@pytest.mark.parametrize("name", sorted(WHOLE) + ["DIST_TIMEOUT_MINUTES"])
def test_variables_of_the_launchers(name, monkeypatch, record_property):
    """Before anything slow: torch is not imported for the first of them."""
    others = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for other, value in others.items():
        monkeypatch.setenv(other, value)
    values = [value for value in [*BAD, TOO_LARGE, "³"] if value]  # an empty one is an unset one
    for value in values + ["1.5"] * (name in WHOLE):
        monkeypatch.setenv(name, value)
        with pytest.raises(UserError) as raised:
            launch.this_node()
        one_line(raised, f"{name}={value[:80]}")
    record_property("bad inputs", len(values))
    if name == "DIST_TIMEOUT_MINUTES":
        for ours in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
            monkeypatch.setenv(ours, "1" if ours == "WORLD_SIZE" else "0")  # gone afterwards
        with pytest.raises(UserError, match="DIST_TIMEOUT_MINUTES"):
            dist.start()  # also without the launcher
    else:
        assert name in launch.__doc__


def test_a_program_ends_with_one_line_for_bad_input(capsys, tmp_path):
    def ends(main):
        with pytest.raises(SystemExit) as end:
            process.command(main)
        return end.value.code

    def refuse():
        raise UserError("no such thing")

    assert ends(lambda: None) in (None, 0) and ends(lambda: 3) == 3
    assert ends(refuse) == 2 and capsys.readouterr().err == "error: no such thing\n"
    assert ends((tmp_path / ("x" * 999)).stat) == 2
    assert capsys.readouterr().err.endswith("File name too long\n")
