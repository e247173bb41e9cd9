"""llm_demo.fit: what it prints fits and is the fastest by its formula, which is near what was
measured; the tables made from it are up to date."""

import argparse
import contextlib
import functools
import itertools
import json
import re
import runpy
import shlex
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, run, slow
from test_memory import config_of, settings_of_row, sizes_at

from llm_demo import fit, step_time
from llm_demo.launch.settings import check_flags, read_launcher
from llm_demo.machine import device
from llm_demo.memory import Settings, peaks, settings_of
from llm_demo.model.source import find_model

SMALL, LARGE = "models/qwen3-0.6b", "models/qwen3-8b"
MIXTURE, TINY_MIXTURE = "models/qwen3-30b-a3b", "models/qwen3-moe-tiny"


def asked(model, cards, gb, tokens=65_536, more=""):
    words = f"{ROOT / model} --cards {cards} --memory {gb} --tokens_a_step {tokens} {more}"
    return fit.parse(shlex.split(words))


def search(ask):
    return searched(**vars(ask))


@functools.cache
def searched(**asked):
    ask = argparse.Namespace(**asked)
    sizes = sizes_at(ask.model, ask.seq_len)
    return list(fit.choices(config_of(ask.model, ask.seq_len), sizes, ask))


def chosen(*args):
    ask = asked(*args)
    return fit.best(search(ask), ask)[0]


def printed(capsys, model, words, fits=True):
    """What the command prints."""
    with contextlib.nullcontext() if fits else pytest.raises(SystemExit, match="1"):
        fit.main([str(ROOT / model), *words.split()])
    out, err = capsys.readouterr()
    assert not (err if fits else out)
    return out or err


@pytest.mark.parametrize("way", fit.WAYS)
def test_the_script_accepts_the_flags_and_estimates_the_same(way):
    ask = asked(MIXTURE if way == "expert_parallel" else SMALL, 4, 16,
                8192 if way == "tensor_parallel" else 65_536,
                "--seq_len 8192" if way == "sequence_parallel" else "")  # fmt: skip
    found = [choice for choice in search(ask) if choice.way == way]
    sizes = sizes_at(ask.model, ask.seq_len)
    assert len(found) > 10
    for choice in found[:: max(1, len(found) // 20)]:
        _, _, launcher, *words = shlex.split(fit.line(choice, ask))
        args = check_flags([str(read_launcher(ROOT / launcher)[0]), *words])
        engine = launcher.split("/")[0]
        assert engine == {"pp": "pp", "fsdp_pp": "fsdp_pp"}.get(way, "fsdp")
        train = SimpleNamespace(seq_len=ask.seq_len)
        compute = fit.COMPUTE._replace(attention_kept=choice.settings.attention_kept)
        ranks, counts = choice.settings.ranks, choice.settings.counts
        sharded = choice.settings.sharded
        settings = settings_of(engine, args, compute, train, ranks, sharded=sharded, counts=counts)
        assert max(peak.total for peak in peaks(sizes, settings)) == choice.memory


def test_adapters_fit_where_all_weights_do_not():
    """8B on a card of 24 GB, 32B on two of 48; only what trains adapters is considered."""
    for model, cards, gb in ((LARGE, 1, 24), ("models/qwen3-32b", 2, 48)):
        ask = asked(model, cards, gb, more="--lora_rank 16")
        found = search(ask)
        assert fit.best(found, ask)[1]
        ways = {choice.way for choice in found} - {"fsdp_pp"}
        assert ways == {fit.DEVICE, "use_activation_checkpointing"}
        assert all(choice.flags["lora_rank"] == 16 for choice in found)
        ask.lora_rank = 0
        on_device = [c for c in search(ask) if c.way != "optimizer_on_host"]
        assert not fit.best(on_device, ask)[1]


@pytest.mark.parametrize(
    "cards, tokens, seq_len", [(1, 1, 8), (2, 100_000, 1024), (8, 65_536, 512)]
)
def test_tokens_of_a_step_are_at_least_those_asked_for(cards, tokens, seq_len):
    found = search(asked(SMALL, cards, 24, tokens, f"--seq_len {seq_len}"))
    assert {choice.way for choice in found} >= {*fit.WAYS[:3]}
    for choice in found:
        micro, accum = (choice.flags[k] for k in ("micro_batch_size", "grad_accum_steps"))
        one = cards // choice.flags.get("stages", 1) * seq_len
        assert choice.tokens == micro * accum * one >= tokens
        assert min(micro * (accum - 1), (micro - 1) * accum) * one < tokens


def test_nothing_that_saves_memory_is_used_if_all_fits():
    assert chosen(SMALL, 2, 141).flags == {"micro_batch_size": 32, "grad_accum_steps": 1}
    assert chosen(LARGE, 2, 141).way == fit.DEVICE
    assert chosen(LARGE, 2, 32).way == "optimizer_on_host"
    assert chosen(SMALL, 2, 141, 65_536, "--bandwidth 1").way == "pp"


def test_adapters_are_searched_in_pipelines_too():
    """Of this project alone: DeepSpeed's has none. 14B on two small cards fits in stages only."""
    adapters = "--lora_rank 16 --bandwidth 10"
    for model, gb, more in ((LARGE, 24, adapters), ("models/qwen3-14b", 22, adapters)):
        ask = asked(model, 2, gb, more=more)
        found = search(ask)
        assert {choice.settings.engine for choice in found} == {"fsdp", "fsdp_pp"}
        assert fit.best(found, ask)[0].settings.engine == "fsdp_pp"
    words = shlex.split(fit.line(fit.best(found, ask)[0], ask))
    assert words[2].endswith("fsdp_pp/launch_fsdp_pp.sh") and "--lora_rank" in words


@pytest.mark.parametrize("model, host", [(SMALL, ""), (LARGE, "--host_memory 80")])
def test_more_memory_is_never_slower(model, host):
    asks = [asked(model, 2, gb, 100_000, host) for gb in (4, 8, 16, 24, 32, 48, 80, 141, 192)]
    found = search(asks[0])
    best = [fit.best(found, ask) for ask in asks]
    seconds = [choice.seconds for choice, fits in best if fits]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) > 2
    for ask, (choice, fits) in zip(asks, best, strict=True):
        assert not fits or choice.memory <= 0.95 * ask.memory
        assert not fits or not host or choice.host <= 80


def test_what_is_printed(capsys):
    out = printed(capsys, LARGE, "--cards 2 --memory 32 --tokens_a_step 100000 --limit")
    line, _, tokens, card, speed, parts, host, _, *ways = out.splitlines()
    assert line.startswith("NPROC_PER_NODE=2 bash ") and line.endswith(" --device_memory_gb 30.8")
    assert " --optimizer_on_host " in line and int(tokens.split()[-1].replace(",", "")) >= 100_000
    total, *each = map(float, re.findall(r"\d+\.\d", parts))
    assert sum(each) == pytest.approx(total, abs=0.2) and "weights" in parts
    assert host.startswith("host memory: 95.7 GiB")
    assert card == "card: any, as fast as an H200: bf16, varlen attention, compiled"
    assert "at 550 TFLOP/s a card and 200 GB/s between cards" in speed
    names = [way.split("  ")[1] for way in ways]
    assert names == [
        fit.DEVICE,
        "use_activation_checkpointing",
        "optimizer_on_host",
        "pp",
        "fsdp_pp",
    ]
    assert ["chosen" in way for way in ways] == [False, False, True, False, False]
    assert ["GiB too much" in way for way in ways] == [True, True, False, True, True]
    out = printed(capsys, SMALL, "--cards 1 --memory 24 --tokens_a_step 1024")
    assert "\nhost memory: 2.1 GiB for all processes\n" in out
    assert "\ntokens per step: 1 row x 1,024 = 1,024\n" in out


def test_long_rows():
    """Spread over cards, and only with what memory demands; short ones never are."""
    ask = functools.partial(asked, LARGE, 2, 141)
    for tokens, more in ((131_072, set()), (262_144, {"optimizer_on_host"})):
        choice, fits = fit.best(search(long := ask(tokens, f"--seq_len {tokens}")), long)
        assert fits and choice.way == "sequence_parallel" and choice.tokens == tokens
        assert choice.flags["sequence_parallel"] == 2 and more <= choice.flags.keys()
    assert not any("sequence_parallel" in c.flags for c in search(ask(65_536, "--seq_len 4096")))


def test_experts_are_spread_over_what_divides_them_and_the_cards():
    """With FSDP only, and no others than the script takes; where that is fastest of what fits."""
    for model, cards, over in (
        (MIXTURE, 6, [1, 2]), (MIXTURE, 3, [1]), (MIXTURE, 1, [1]), (TINY_MIXTURE, 32, [1, 2, 4, 8])
    ):  # fmt: skip
        found = search(asked(model, cards, 24))
        assert sorted({c.flags.get("expert_parallel", 1) for c in found}) == over
    for gb, spread in ((64, 2), (180, None)):
        ask = asked(MIXTURE, 8, gb)
        choice, fits = fit.best(found := search(ask), ask)
        assert fits and choice.flags.get("expert_parallel") == spread
        listed = re.search(r"\n  expert_parallel +(.*)", fit.report(found, ask))[1]
        assert "--expert_parallel" in listed and ("chosen" in listed) == bool(spread)


def test_nothing_fits(capsys):
    err = printed(capsys, LARGE, "--cards 2 --memory 12 --tokens_a_step 65536", fits=False)
    said = re.match(
        r"error: nothing fits; nearest: --micro_batch_size 1 .*: (\S+) GiB a card, where 11.4 may "
        r"be used, and 95.7 GiB of host memory; what may help: cards of (\d+) GiB",
        err,
    )
    needed, cards = map(float, said.groups())
    assert 12 < needed < 0.95 * cards < needed + 2
    assert "--base_bits 4" in err and "docs/zero.md" in err
    ask = asked(LARGE, 2, cards)
    assert fit.best(search(ask), ask)[1]
    words = "--cards 1 --memory 104 --tokens_a_step 8192 --host_memory 8"
    err = printed(capsys, LARGE, words, fits=False)
    assert "adapters (--lora_rank 16)" in err and "--optim_state bf16" in err
    out = printed(capsys, LARGE, f"{words} --optim_state bf16")
    assert " --optim_state bf16" in out.splitlines()[0]


def test_a_card_runs_what_it_can(capsys):
    """An MI100 has no fused attention and is not compiled, so it keeps the probabilities."""
    words = "--cards 1 --tokens_a_step 8192 --card"
    said = {card: printed(capsys, SMALL, f"{words} {card}") for card in ("mi100", "h100")}
    assert "card: AMD Instinct MI100: bf16, bucketed attention, not compiled\n" in said["mi100"]
    assert "at 50.8 TFLOP/s a card and 20 GB/s between cards, assumed\n" in said["mi100"]
    assert "card: NVIDIA H100 80GB HBM3: bf16, varlen attention, compiled\n" in said["h100"]
    assert "of 79.2 GiB a card" in said["h100"] and "budget" not in said["mi100"]
    asked(SMALL, 1, 24)
    assert not device.planned()


def test_an_estimate_for_a_card_that_is_not_here(tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"input_ids": [7] * 512}))
    command = ["bash", ROOT / "fsdp/launch_fsdp.sh", "--estimate", "--model_name_or_path", SMALL]
    command += ["--tokenizer_name_or_path", "models/qwen3-tiny", "--seq_len", 512]
    command += ["--train_json", tmp_path / "one.jsonl", "--output_dir", tmp_path / "run"]
    done = run([*command, "--card", "mi100"], PYTHON=sys.executable, NPROC_PER_NODE="1")
    assert done.returncode == 0, done.stderr
    assert "of each rank on AMD Instinct MI100 (amd gfx908, 32 GiB)" in done.stdout
    assert "attention: bucketed (not sdpa" in done.stdout
    assert "compile: no (not measured" in done.stdout
    assert "total" in done.stdout and not (tmp_path / "run").exists()


def test_only_the_configuration_of_a_hub_model_is_downloaded(tmp_path, monkeypatch):
    asked_for = []

    def download(name, allow_patterns, local_dir):
        asked_for.append((name, allow_patterns))
        (tmp_path / "config.json").write_text((ROOT / SMALL / "config.json").read_text())
        return local_dir

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_model("some/model", config_in=str(tmp_path)) == tmp_path
    assert asked_for == [("some/model", ["config.json", "adapter_config.json"])]


# ---------------------------------------------------------------- beside what was measured

LINKS = {"no_p2p": 23, "slow_link": 5}  # GB/s; the others: NVLink
FILES = (
    "h200-x2/teff", "h200-x2/speed", "h200-x2/seed", "h200-x2/no_p2p", "h200-x2/slow_link",
    "h200-x2/memory", "h200-x2/long", "h100-x2/fit",
)  # fmt: skip


CARDS = (
    "h100-x2/fit", "h100-x2/cards", "h100-x2/cards_100k", "h100-x2/tensor", "h200-x2/fit"
)  # fmt: skip


def rows_of(name):
    for line in (ROOT / f"bench/results/{name}.jsonl").read_text().splitlines():
        result = json.loads(line)
        if result["status"] == "ok" and result["row"]["engine"] in ("fsdp", "pp", "fsdp_pp"):
            yield result


def looks_like(config) -> dict:
    """The flags of a run that are none of the defaults, as those of a Choice."""
    plain = vars(Settings(engine="", ranks=0)) | {"expert_parallel": None}
    flags = {name: config[name] for name in fit.FLAGS if name in config}
    shown = ("micro_batch_size", "grad_accum_steps", "schedule")
    return {k: v for k, v in flags.items() if k in shown or v not in (plain.get(k), 0, 16)}


@pytest.mark.parametrize("tokens", [8192, 65_536, 100_000])
def test_the_choice_is_the_fastest_that_was_measured(tokens):
    """8B on two H100: within 5 %, and not a row whose allocator ran dry."""
    words = f"{ROOT / LARGE} --cards 2 --card h100 --tokens_a_step {tokens}"
    ask = fit.parse(shlex.split(words))
    choice, fits = fit.best(search(ask), ask)
    speeds, of_choice = [0], 0
    for result in itertools.chain(*(rows_of(name) for name in CARDS)):
        config, summary = result["config"], result["summary"]
        batch = config["global_batch"] * 1024
        other = result["row"]["model"] != LARGE or config.get("optim_state", "fp32") != "fp32"
        if other or summary["late_alloc_retries"] or not tokens <= batch < 1.05 * tokens:
            continue
        speeds.append(summary["median_slots_per_s"])
        engine = result["row"]["engine"]
        if engine == choice.settings.engine and looks_like(config) == choice.flags:
            of_choice = speeds[-1]
    assert fits and len(speeds) > 3 and of_choice >= 0.95 * max(speeds)


def formula(name):
    """[(tokens of a step, model, seconds by the formula, seconds measured)] of a file's rows."""
    found = []
    for result in rows_of(name):
        row, config = result["row"], result["config"]
        small = row["micro"] < (2 if "8b" in row["model"] else 4)  # waits for its host
        if small and row["seq_len"] < 8192 or row["data"] != "full" or row["dtype"] != "bf16":
            continue
        if not config["compile"] or row["env"] and name not in FILES:
            continue
        sizes = sizes_at(row["model"], row["seq_len"])
        bandwidth = LINKS.get(name.split("/")[1], 200) * 1e9
        seconds = step_time.step_seconds(sizes, settings_of_row(result), 550e12, bandwidth)
        measured = result["summary"]["median_step_ms"] / 1000
        found.append((config["global_batch"] * row["seq_len"], row["model"], seconds, measured))
    return found


@pytest.mark.parametrize("name", FILES)
def test_the_rough_time_is_near_what_was_measured(name):
    found = formula(name)
    assert len(found) > (5 if name != "h200-x2/long" else 2)
    for one in found:
        assert one[2] == pytest.approx(one[3], rel=0.2)
        for other in found:  # what differs by a tenth is in the right order
            if one[:2] == other[:2] and one[3] < 0.9 * other[3]:
                assert one[2] < other[2]


@pytest.mark.parametrize("micro, accum, more", [(4, 1, 381.8 - 348.0), (1, 8, 926.8 - 858.2)])
def test_what_it_costs_to_spread_experts_is_near_what_was_measured(micro, accum, more):
    """In ms of a step, from bench/LOG.md."""
    sizes = sizes_at("models/qwen3-30b-a3b-12l", 4096)
    one, two = (
        Settings(engine="fsdp", ranks=2, expert_parallel=n, micro_batch_size=micro,
                 grad_accum_steps=accum, seq_len=4096)
        for n in (1, 2)
    )  # fmt: skip
    seconds = [step_time.step_seconds(sizes, each, 550e12, 200e9) for each in (one, two)]
    assert 1000 * (seconds[1] - seconds[0]) == pytest.approx(more, rel=0.1)


@pytest.mark.parametrize("of_long_rows", [False, slow(True)])
def test_the_tables_are_up_to_date(of_long_rows):
    pages = runpy.run_path(str(ROOT / "docs/make_fits.py"))["pages"](of_long_rows)
    for page, text in pages.items():
        assert page.read_text() == text, "python docs/make_fits.py"
