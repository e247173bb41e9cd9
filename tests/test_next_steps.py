"""What a run says at its end: commands that work when pasted, and none that cannot."""

import argparse
import re
import shlex
import sys

import pytest
from conftest import ROOT
from tiny_tokenizer import make_tokenizer, packs_of, write

from llm_demo import chat, evaluate, export
from llm_demo.machine.text import resume
from llm_demo.run.next_steps import next_steps


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run's folder, with a checkpoint, inside the folder where the user works."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NNODES", raising=False)
    (tmp_path / "my run/checkpoints").mkdir(parents=True)
    (tmp_path / "my run/checkpoints/latest").write_text("step_00000003\n")
    return tmp_path / "my run"


def said(folder, steps=3, best=None, system="", **settings):
    """name -> command. best: the step of the checkpoint to export, if not the last. system: the
    system prompt of all rows."""
    of_a_run = {
        "model_name_or_path": str(ROOT / "models/qwen3-tiny"), "tokenizer_name_or_path": None,
        "eval_json": "my data.heldout.jsonl", "seq_len": 128, "data_format": "auto",
        "input_key": None, "target_key": None, "train_on_prompt": False, "learn_turns": "all",
        "learn_reasoning": True, "chat_template_kwargs": None,
    }  # fmt: skip
    best = folder / f"checkpoints/step_{best or steps:08d}"
    args = argparse.Namespace(**of_a_run | settings)
    lines = next_steps(folder, args, steps, best, system)
    return dict(re.match(r"  ([\w ]+): +(.*)", line, re.S).groups() for line in lines)


def words(line):
    """The words of a command after python -m NAME, as a shell splits them."""
    found = shlex.split(line)
    assert found.pop(0) == f"PYTHONPATH={ROOT}"  # the folder is not the repository's
    assert found[:2] == [sys.executable, "-m"]
    return found[3:]


def test_the_flags_of_the_data_and_a_trained_base_are_kept(folder):
    flags = {
        "model_name_or_path": "Qwen/Qwen3-0.6B", "eval_json": "openai/gsm8k:main:test",
        "input_key": "the question", "target_key": "answer", "learn_turns": "last",
        "learn_reasoning": False, "chat_template_kwargs": '{"preserve_thinking": true}',
    }  # fmt: skip
    args = evaluate.make_parser().parse_args(words(said(folder, **flags)["evaluate"]))
    assert args.models == [flags.pop("model_name_or_path"), "my run/hf"]
    assert args.data == flags.pop("eval_json")
    assert {name: getattr(args, name) for name in flags} == flags


def test_the_best_checkpoint_is_exported_after_early_stopping(folder):
    (folder / "model").mkdir()
    (folder / "model/chat_template.jinja").write_text("")
    found = said(folder, steps=9, best=3)
    assert words(found["export"]) == ["my run/checkpoints/step_00000003", "my run/hf"]
    assert words(found["chat"]) == ["my run/hf"]
    merge = said(folder, steps=9, best=3, lora_rank=4)["merge"]
    assert words(merge)[:2] == ["my run/checkpoints/step_00000003", "my run/merged"]
    (folder / "hf").mkdir()
    (folder / "hf/README.md").write_text("FSDP2, 3 optimizer steps, from")
    assert "export" not in said(folder, steps=9, best=3)


def test_adapters_are_merged_to_be_evaluated(folder):
    found = said(folder, lora_rank=4)
    merge = export.make_parser().parse_args(words(found["merge"]))
    assert merge.merge and not export.make_parser().parse_args(words(found["export"])).merge
    args = evaluate.make_parser().parse_args(words(found["evaluate"]))
    assert args.models[-1] == str(merge.out) == "my run/merged"


def test_commands_are_quoted_and_parse(folder):
    found = said(folder)
    args = export.make_parser().parse_args(words(found["export"]))
    assert (str(args.source), str(args.out)) == ("my run", "my run/hf")
    args = evaluate.make_parser().parse_args(words(found["evaluate"]))
    assert (args.models, args.data) == (["my run/hf"], "my data.heldout.jsonl")
    assert args.seq_len == 128  # random weights: there is no base model to compare with
    assert shlex.split(found["continue"]) == [
        "bash", "my run/cmd.sh", "--output_dir", str(folder), "--no_overwrite", "--resume", "auto",
        "--max_steps", "6",
    ]  # fmt: skip


def test_only_commands_that_can_work(folder, monkeypatch):
    args = evaluate.make_parser().parse_args(words(said(folder, eval_json="none")["evaluate"]))
    assert (args.models, args.data) == (["my run/hf"], "FILE")  # which the user has to name
    (folder / "hf").mkdir()
    assert "export" not in said(folder) and "evaluate" in said(folder)
    monkeypatch.setenv("NNODES", "2")  # each node has a command of its own
    assert "continue" not in said(folder) and "same command on every node" in resume(folder)
    (folder / "checkpoints/latest").unlink()
    assert not {"export", "evaluate", "continue"} & said(folder).keys()


def test_chat_has_the_system_prompt_that_all_rows_have(folder, tmp_path):
    (folder / "model").mkdir()
    (folder / "model/chat_template.jinja").write_text("")
    assert words(said(folder)["chat"]) == ["my run"]
    for system in ("You are 'kind'.\nBe brief.", "-x"):
        args = chat.make_parser().parse_args(words(said(folder, system=system)["chat"]))
        assert (args.model, args.system) == ("my run", system)
    rows = [{"system": s, "instruction": "hi", "output": "yo"} for s in ("a", "a", "b", "")]
    for begin, end, systems in ((0, 2, ["a"]), (0, 4, ["a", "b"]), (3, 4, [""])):
        write(tmp_path / "x.jsonl", *rows[begin:end])
        packs = packs_of(str(tmp_path / "x.jsonl"), make_tokenizer())
        assert packs.documents.stats.systems == systems


def test_a_run_that_went_on_is_exported_again_beside_the_earlier_export(folder):
    for name in ("hf", "merged"):
        (folder / name).mkdir()
        card = "FSDP2, 3 optimizer steps, from"
        (folder / name / "README.md").write_text(card)
    assert "export" not in said(folder)
    found = said(folder, lora_rank=4)
    assert "export" not in found and "merge" not in found and "my run/merged" in found["evaluate"]
    found = said(folder, steps=6)
    assert words(found["export"])[:2] == ["my run", "my run/hf_step_6"]
    args = evaluate.make_parser().parse_args(words(found["evaluate"]))
    assert args.models == ["my run/hf_step_6"]
    found = said(folder, steps=6, lora_rank=4)
    assert words(found["merge"])[:3] == ["my run", "my run/merged_step_6", "--merge"]
