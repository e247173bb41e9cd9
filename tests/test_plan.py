"""Packed rows on disk, and a run's plan: windows, order, what it takes from a resumed run."""

import json
import math
import re
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import TINY, logged, run_alone, script_of
from test_rows import load
from tiny_tokenizer import write
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from llm_demo.core.errors import UserError
from llm_demo.core.rows import step_rows
from llm_demo.model.costs import flops_of_slot, sizes_of, windows_of
from llm_demo.model.source import load_config
from llm_demo.options.lora import Lora
from llm_demo.run.folder import settings_to_resume
from llm_demo.run.job import best_of
from llm_demo.run.plan import Plan, decide_seq_len, usual_lr

# ------------------------------------------------------------------ the cache


def change(name, function):
    """A function that changes the bytes of this file in a folder."""
    return lambda folder: (folder / name).write_bytes(function((folder / name).read_bytes()))


RUIN = {
    "zeroed": change("tokens.int32", lambda data: bytes(len(data))),
    "one bit": change("learnt.bool", lambda data: data[:3] + bytes([data[3] ^ 1]) + data[4:]),
    "truncated": change("tokens.int32", lambda data: data[:-4]),
    "lost": lambda folder: (folder / "documents.npy").unlink(),
    "no sums": lambda folder: (folder / "crc32.json").unlink(),
    "no meta": lambda folder: (folder / "meta.json").unlink(),
    "half a meta": change("meta.json", lambda data: data[:50]),
    "another meta": change("meta.json", lambda _: b"[]"),
    "changed meta": change("meta.json", lambda d: d.replace(b'"pad_id": 260', b'"pad_id": 5')),
}


@pytest.mark.parametrize("how", RUIN)
def test_a_damaged_pack_is_built_again(tmp_path, how):
    rows = [{"text": f"text {i}"} for i in range(20)]
    path, said = write(tmp_path / "x.jsonl", *rows), []
    whole = load(path, seq_len=64)
    (folder,) = (tmp_path / "cache").iterdir()
    before = [whole.row(i)[0].copy() for i in range(len(whole))]
    RUIN[how](folder)
    again = load(path, said=said, seq_len=64)
    assert not again.documents.stats.cache_hit
    assert all((again.row(i)[0] == ids).all() for i, ids in enumerate(before))
    lines = [line for line in said if "is damaged" in line]
    assert len(lines) == 1 and str(folder) in lines[0] and "\n" not in lines[0]
    assert load(path, seq_len=64).documents.stats.cache_hit
    assert [f.name for f in (tmp_path / "cache").iterdir()] == [folder.name]


def test_who_has_mapped_a_pack_keeps_it(tmp_path):
    path = write(tmp_path / "x.jsonl", *[{"text": f"text {i}"} for i in range(20)])
    reader = load(path, seq_len=64)
    (folder,) = (tmp_path / "cache").iterdir()
    RUIN["half a meta"](folder)
    load(path, seq_len=64)
    assert reader.row(0)[0][:4].tolist() == list(b"text")


# ------------------------------------------------------------------ a whole plan, in this process


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Run a script's main() in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    flags = "--no_fsdp --no_compile --sample_tokens 0".split()
    return partial(run_alone, monkeypatch, script_of("fsdp"), *flags)


SIZES = dict(
    vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
)  # fmt: skip


def losses(folder):
    return [record["train/loss"] for record in logged(folder)]


def test_the_usual_learning_rate_and_most_passes():
    adapters = Lora(8, 16.0, 0.0, (), 0, {})
    assert usual_lr(True, adapters) == (2e-4, 10)
    assert usual_lr(True, None) == (2e-5, 10)
    assert usual_lr(False, None) == (1e-3, 100)


def test_a_window_matters_from_the_first_longer_document_on(tmp_path, alone):
    """And the default length of rows does not depend on it."""
    write(tmp_path / "x.jsonl", {"text": "word " * 31})  # the last of 33 tokens that predict one
    for name, window in (("shorter", 32), ("window", 64), ("none", None)):  # sees all of them
        MistralConfig(sliding_window=window, **SIZES).save_pretrained(tmp_path / name)
    flags = ["--train_json", "x.jsonl", "--max_steps", "2", "--no_save"]
    flags += ["--tokenizer_name_or_path", TINY]
    for name in ("none", "window", "shorter"):
        alone(*flags, "--model_name_or_path", name, "--output_dir", f"run {name}")
    none, same, other = (losses(tmp_path / f"run {n}") for n in ("none", "window", "shorter"))
    assert none == same != other
    assert "seq_len: 128 " in (tmp_path / "run shorter/train.log").read_text()


def test_a_run_trains_rows_in_the_order_of_its_flags(tmp_path, alone):
    write(tmp_path / "x.jsonl", *[{"text": "word " * (1 + 7 * i % 11)} for i in range(26)])
    MistralConfig(**SIZES).save_pretrained(tmp_path / "model")
    flags = ["--model_name_or_path", "model", "--tokenizer_name_or_path", TINY, "--seed", "3"]
    flags += ["--train_json", "x.jsonl", "--no_pack_sequences", "--seq_len", "32", "--overwrite"]

    def tokens(out, *more, rows=6):
        """The number of tokens of each step, which says which rows it had."""
        alone(*flags, "--grad_accum_steps", rows, "--output_dir", out, *more)
        return [round(record["data/fill"] * rows * 32) for record in logged(tmp_path / out)]

    lengths = [*tokens("rows", "--no_shuffle", "--num_epochs", "1", "--no_save", rows=1), 0]

    def expected(steps):
        return [sum(lengths[row] for row in rows) for rows in steps]

    five, early = ["--max_steps", "5", "--no_save"], ["--length_warmup", "4", "--num_epochs", "1"]
    in_file = np.arange(30).reshape(5, 6) % 26
    assert tokens("file", *five, "--no_shuffle") == expected(in_file)
    plain = [step_rows([0, 26], 3, step, 6) for step in range(5)]
    assert tokens("plain", *five) == expected(plain)
    by_length = sorted(np.concatenate(plain[:4]), key=lengths.__getitem__)
    steps = [*np.reshape(by_length, (4, 6)), [*plain[4][:2], -1, -1, -1, -1]]
    whole = tokens("whole", *early, "--save_every", "2", "--keep_last", "0")
    assert whole == expected(steps) and len({*whole}) == 5  # one epoch: 26 rows, then padding
    resume = ["--no_overwrite", "--resume", "whole/checkpoints/step_00000002"]
    assert tokens("again", *early, *resume) == whole[2:]
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")[2:]
    assert tokens("more", *early, *resume, "--num_epochs", "2")[:2] == whole[2:4]
    for more, message in (
        (["--length_warmup", "3", *resume], "different rows: length_warmup was 4, is 3; to cont"),
        (["--no_shuffle", *resume], "different rows: shuffle was True, is False; to cont"),
        (["--length_warmup", "5"], "5 is longer than the run's 4 steps of 6 rows: give at most 4"),
    ):
        with pytest.raises(UserError, match=message):
            tokens("refused", *early, *more)
    assert not (tmp_path / "refused").exists()


def test_which_windows_are_used(tmp_path):
    qwen = dict(sliding_window=16, max_window_layers=1, **SIZES)
    for config, windows in (
        (Qwen2Config(use_sliding_window=False, **qwen), [None, None]),
        (Qwen2Config(use_sliding_window=True, **qwen), [None, 16]),
        (MistralConfig(sliding_window=16, **SIZES), [16, 16]),
        (MistralConfig(sliding_window=None, **SIZES), [None, None]),
        (LlamaConfig(sliding_window=16, **SIZES), [None, None]),  # of which it knows nothing
    ):
        config.save_pretrained(tmp_path)
        config = load_config(tmp_path, 64)
        assert windows_of(config) == windows
        blocks = sizes_of(config).blocks
        for block, window in zip(blocks, windows, strict=True):
            assert block.flops(15) < block.flops(16)
            assert (block.flops(17) == block.flops(16)) == (window is not None)


def test_a_run_goes_on_with_its_seq_len(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints/step_00000001").mkdir(parents=True)
    (run / "config.json").write_text('{"seq_len": 1024}')
    for resume in ("auto", str(run), f"{run}/checkpoints/step_00000001"):
        earlier = settings_to_resume(resume, run)
        assert decide_seq_len(0, earlier) == (1024, ["seq_len: 1024 (from the resumed run)"])
    for seq_len, resume in (
        (64, "auto"),  # asked for: an error later if the rows are others
        (0, None),
        (0, f"{tmp_path}/nothing"),
    ):
        assert decide_seq_len(seq_len, settings_to_resume(resume, run)) == (seq_len, [])


# ------------------------------------------------------------------ small data, mixtures, an end


def small(folder, rows=60):
    """Flags of a run on a small table, with a model that has random weights."""
    lines = ["question,answer", *(f"What is {i} + {i}?,It is {2 * i}." for i in range(rows))]
    (folder / "x.csv").write_text("\n".join(lines) + "\n")
    MistralConfig(**SIZES).save_pretrained(folder / "model")
    return ["--model_name_or_path", "model", "--tokenizer_name_or_path", TINY,
            "--train_json", "x.csv", "--seq_len", "128", "--sample_tokens", "0"]  # fmt: skip


def test_small_data_gets_about_100_steps(tmp_path, alone, capsys):
    flags = [*small(tmp_path), "--grad_accum_steps", "8"]
    alone(*flags, "--output_dir", "run")
    settings = json.loads((tmp_path / "run/config.json").read_text())
    steps = settings["max_steps"]
    assert 90 <= steps <= 110 and settings["warmup_steps"] == min(10, steps // 10)
    said = capsys.readouterr().out
    assert f"passes over the data: {settings['num_epochs']:g}, for about 100 steps" in said
    found = losses(tmp_path / "run")
    assert found[-1] < 0.6 * found[0]
    alone(*flags, "--resume", "run", "--output_dir", "again", "--dry_run")
    said = capsys.readouterr().out
    assert "passes over the data" not in said and f"steps: {steps} = " in said


def test_passes_over_small_data_have_bounds(tmp_path, alone, capsys):
    from transformers import MistralForCausalLM

    flags = [*small(tmp_path), "--dry_run"]
    alone(*flags, "--micro_batch_size", "4", "--grad_accum_steps", "64")
    said = capsys.readouterr().out
    assert "passes over the data: 100, for about 100 steps (at most 100 passes;" in said
    MistralForCausalLM(MistralConfig(**SIZES)).save_pretrained(tmp_path / "model")
    alone(*flags, "--micro_batch_size", "4", "--grad_accum_steps", "8")
    said = capsys.readouterr().out
    assert "passes over the data: 10, for about 100 steps (at most 10 passes;" in said
    alone(*flags, "--num_epochs", "1", "--warmup_steps", "3")
    said = capsys.readouterr().out
    assert "num_epochs:" not in said and "3 steps of warm-up" in said


def test_sources_by_weight_and_an_exact_resume(tmp_path, alone, capsys):
    flags = [*small(tmp_path), "--no_pack_sequences", "--seq_len", "32", "--eval_fraction", "0.1"]
    (tmp_path / "y.csv").write_text("question,answer\nWho?,Eve\nWhere?,Here\n")
    flags += ["--train_json", "x.csv*0.5,y.csv*3", "--grad_accum_steps", "10", "--eval_every", "4"]
    alone(*flags, "--num_epochs", "2", "--output_dir", "run", "--save_every", "3",
          "--keep_last", "0")  # fmt: skip
    said = capsys.readouterr().out
    assert "held-out: 6 documents split off by --eval_fraction" in said
    weights = re.findall(r"data: ([xy]).csv, weight ([\d.]+): (\d+) documents", said)
    (x, y), n = zip(*((name, weight) for name, weight, _ in weights), strict=True), len(weights)
    assert (x, y, n) == (("x", "y"), ("0.5", "3"), 2)
    steps = len(losses(tmp_path / "run"))
    alone(*flags, "--num_epochs", "2", "--output_dir", "again",
          "--resume", "run/checkpoints/step_00000003")  # fmt: skip
    whole, rest = (losses(tmp_path / name) for name in ("run", "again"))
    assert rest == whole[3:] and steps == 7
    with pytest.raises(UserError, match="different rows: weights was .*0.5.* is None"):
        alone(*flags, "--train_json", "x.csv,y.csv", "--num_epochs", "2", "--output_dir", "refused",
              "--resume", "run/checkpoints/step_00000003")  # fmt: skip


def test_early_stopping_ends_and_keeps_the_best(tmp_path, alone, capsys):
    flags = [*small(tmp_path), "--eval_fraction", "0.2", "--max_steps", "50", "--export", "fp32"]
    flags += ["--eval_every", "2", "--early_stopping", "2", "--output_dir", "run", "--lr"]

    def evals():
        return {r["step"]: r["eval/loss"] for r in logged(tmp_path / "run", "eval/loss")}

    alone(*flags, "1e-30", "--weight_decay", "0")
    assert [*evals()] == [0, 2, 4]  # not better than before training
    said = capsys.readouterr().out
    assert "early stopping: 2 evaluations without a better one" in said
    assert "warning: training made the held-out loss no better than before it" in said
    assert "exported run/checkpoints/step_00000002" in said  # as good as that of step 4
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_00000004\n"
    assert (tmp_path / "run/summary.json").exists() and (tmp_path / "run/hf").is_dir()
    (tmp_path / "run/summary.json").unlink()  # as if killed before
    for more, is_written in (("--dry_run", False), ("--no_dry_run", True)):
        alone(*flags, "1e-30", "--weight_decay", "0", "--resume", "auto", more)
        assert "has stopped early (--early_stopping)" in capsys.readouterr().out
        assert (tmp_path / "run/summary.json").exists() == is_written
    alone(*flags, "1", "--overwrite", "--warmup_steps", "12")  # learns, then diverges
    said, found = capsys.readouterr().out, evals()
    best = min(found, key=found.get)
    assert best and max(found) == best + 4
    assert f"exported run/checkpoints/step_{best:08d}" in said and "  export:" not in said
    assert "no better than before" not in said


def test_the_best_of_the_saved_checkpoints_is_exported(tmp_path):
    for step in (4, 8, 12):
        (tmp_path / f"step_{step:08d}").mkdir()
    newest, args = tmp_path / "step_00000012", SimpleNamespace(early_stopping=3)
    none_better = [(0, 1.0), (4, 3.0), (8, 2.0), (10, 1.5), (12, math.nan)]
    best, lines = best_of(args, none_better, newest)
    assert best.name == "step_00000008" and "no better than before" in lines[0]
    better = [(0, 3.0), (2, 1.0), (4, 2.0), (8, 2.5), (12, 2.0)]
    assert best_of(args, better, newest) == (tmp_path / "step_00000004", [])
    assert best_of(args, [(0, 3.0)], newest) == (newest, [])
    assert best_of(SimpleNamespace(early_stopping=0), none_better, newest) == (newest, [])


def test_a_disk_that_cannot_hold_the_checkpoints(tmp_path, alone, capsys, monkeypatch):
    flags = [*small(tmp_path), "--max_steps", "6", "--output_dir", "run"]
    best = ["--early_stopping", "1", "--eval_every", "2", "--eval_fraction", "0.2"]
    alone(*flags, "--dry_run", "--save_every", "2", *best)
    said = capsys.readouterr().out
    assert re.search(r"checkpoints: about 0.00\d+ GB each, at most 3 at once", said)
    usage = shutil.disk_usage(tmp_path)._replace(free=8 << 20)  # for two
    monkeypatch.setattr("llm_demo.run.job.shutil.disk_usage", lambda path: usage)
    alone(*flags, "--dry_run", "--save_every", "3")
    alone(*flags, "--dry_run", "--save_every", "2", "--optim_state", "bf16")  # 8 bytes, not 12
    for more in (["--dry_run"], []):
        with pytest.raises(UserError, match="run: checkpoints take about .* 3 at once, .* free"):
            alone(*flags, "--save_every", "2", *more)
    assert not (tmp_path / "run").exists()
    alone(*flags, "--no_save", "--dry_run")


@pytest.mark.parametrize("active", [None, 1000])
def test_the_flops_of_a_step_know_adapters(active):
    """Frozen weights have no gradients."""
    config = load_config(TINY, 64)
    lora = active and SimpleNamespace(active=active)
    train = SimpleNamespace(seq_len=64, attended=lambda rows: 32)
    sizes, data = sizes_of(config), SimpleNamespace(train=train)
    plan = SimpleNamespace(compute=SimpleNamespace(lora=lora), data=data, sizes=sizes)
    per_slot = flops_of_slot(sizes, 32, active)
    assert Plan.flops_of(plan, np.zeros(4)) == 4 * 64 * per_slot
