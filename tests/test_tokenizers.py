"""The tokenizer of a folder: the ids of its tokenizer.json, the date that its template prints."""

import datetime
import json

import pytest
from conftest import TINY
from test_one_process import train  # noqa: F401, a fixture
from tiny_tokenizer import CHATML, make_tokenizer, packs_of
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoConfig, AutoTokenizer

from llm_demo.model.model_folder import describe, describe_model
from llm_demo.model.source import load_tokenizer, with_date

TEXT = "In 2024 there were 14161 cats;  it's\n\n <e>hello <e> 650841823 <b>"
CORPUS = [f"in {n} there were {n * n} cats, it's hello" for n in range(900, 2100)]


def byte_level():
    """Digits in groups of up to three, as Llama 3 splits them."""
    digits = Regex(r"\p{N}{1,3}| ?[^\s\p{N}]+|\s+")
    split = pre_tokenizers.Split(digits, "isolated")
    made = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"vocab_size": 700, "special_tokens": ["<b>", "<e>"]}
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **how)
    made.train_from_iterator(CORPUS, trainer)
    return made


def prefix_space():
    """A space is put before each piece between special tokens, as Llama 2's file does."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([prepend, replace])
    specials = ["<unk>", "<b>", "<e>", *(f"<0x{b:02X}>" for b in range(256))]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=specials))
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # bytes are none
    made = Tokenizer.from_str(json.dumps(content))
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    made.decoder = decoders.Sequence(list(steps))
    return made


CASES = [
    ("llama", "GPT2Tokenizer", byte_level),
    ("qwen3", "Qwen2Tokenizer", byte_level),
    ("qwen2", "PreTrainedTokenizerFast", byte_level),
    ("llama", "LlamaTokenizer", prefix_space),
]


@pytest.mark.parametrize("family, name, make", CASES)
def test_the_ids_are_those_of_the_file(family, name, make, tmp_path):
    """Also of the export, but for Qwen2 models, whose tokenizer transformers always makes anew."""
    own, folder = make(), tmp_path / "model"
    begin = [("<b>", own.token_to_id("<b>"))]
    own.post_processor = processors.TemplateProcessing("<b> $A", special_tokens=begin)
    config = AutoConfig.for_model(family)
    config.save_pretrained(folder)
    own.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": name, "bos_token": "<b>", "eos_token": "<e>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "chat_template.jinja").write_text(CHATML)
    expected = own.encode(TEXT).ids
    assert AutoTokenizer.from_pretrained(folder)(TEXT).input_ids != expected
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer(TEXT).input_ids == expected
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<b>", "<e>")
    assert len(tokenizer) == own.get_vocab_size()
    describe_model(folder, tokenizer, tmp_path / "run", config)
    again = load_tokenizer(str(tmp_path / "run"))
    notes = describe(tmp_path / "run", tmp_path / "out", again, config)
    assert again(TEXT).input_ids == expected
    assert load_tokenizer(str(tmp_path / "out"))(TEXT).input_ids == expected
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.chat_template == CHATML
    assert (exported(TEXT).input_ids == expected) == (family != "qwen2") == (not notes)


def test_a_class_that_agrees_with_the_file_is_kept():
    """The resumed runs of earlier versions depend on it."""
    loaded = load_tokenizer(str(TINY))
    assert type(loaded) is type(AutoTokenizer.from_pretrained(TINY))


# ------------------------------------------------------------------ the date

TURNS = [{"role": "user", "content": "hi"}]
DAY = datetime.date(2026, 7, 4)
FORMATS = ["%d %b %Y", "%Y-%m-%d", "%B %-d, %Y", "%A, 100%% %%d", "%j %H:%M", "no date"]


@pytest.mark.parametrize("text", FORMATS)
def test_a_template_prints_the_date_of_the_run(text, tmp_path):
    template = "\n {% if strftime_now is defined %}\n{{ strftime_now('" + text + "') + '!' }}\n"
    template += "{% endif %}" + CHATML
    tokenizer = make_tokenizer(template)
    before = tokenizer.apply_chat_template(TURNS, tokenize=False)
    today = datetime.date.today()
    dated = with_date(tokenizer, str(DAY))
    after = dated.apply_chat_template(TURNS, tokenize=False)
    assert f"{DAY.strftime(text)}!" in after
    if "%H" not in text and today == datetime.date.today():
        assert after.replace(DAY.strftime(text), today.strftime(text)) == before
    config = AutoConfig.for_model("llama")
    config.save_pretrained(tmp_path)
    describe_model(tmp_path, dated, tmp_path / "run", config)
    assert load_tokenizer(str(tmp_path / "run")).chat_template == template


def test_templates_without_a_date_are_left_alone():
    for tokenizer in (make_tokenizer(), make_tokenizer(None)):
        assert with_date(tokenizer, str(DAY)) is tokenizer
    dated = "{{ strftime_now('%Y') }}"
    tokenizer = make_tokenizer({"default": CHATML, "tool_use": dated})
    tokenizer = with_date(tokenizer, str(DAY))
    assert tokenizer.apply_chat_template(TURNS, tools=[{}], tokenize=False) == "2026"


def test_rows_of_another_day_are_other_rows(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Why?", "completion": "So."}) + "\n")
    found = []
    for day in ("2026-07-04", "2026-07-05", "2026-07-04"):
        tokenizer = make_tokenizer("{{ strftime_now('%d') }}" + CHATML)
        tokenizer = with_date(tokenizer, day)
        options = {"seq_len": 64, "cache_dir": str(tmp_path / "cache"), "log": lambda line: None}
        packs = packs_of(str(rows), tokenizer, **options)
        found.append((packs.documents.identity["chat template"], packs.documents.stats.cache_hit))
    assert found[0][0] == found[2][0] != found[1][0]
    assert [hit for _, hit in found] == [False, False, True]


def test_a_run_that_is_resumed_keeps_its_date(train, tmp_path, monkeypatch):  # noqa: F811
    class Later(datetime.date):
        @classmethod
        def today(cls):
            return cls(2031, 1, 2)

    file = tmp_path / "dated.jinja"
    file.write_text("{{ 'It is ' + strftime_now('%Y-%m-%d') }}" + CHATML.replace("E>", "|im_end|>"))
    flags = ["--chat_template", file, "--seq_len", 64]
    today = str(datetime.date.today())
    train("run", *flags, "--max_steps", 1)
    monkeypatch.setattr("llm_demo.run.plan.date", Later)
    train("run", *flags, "--max_steps", 2, "--resume", "auto")
    train("new", *flags, "--max_steps", 1)
    for run, day in (("run", today), ("new", "2031-01-02")):
        assert json.loads((tmp_path / run / "config.json").read_text())["date"] == day
        log = (tmp_path / run / "train.log").read_text()
        assert f"It is {day}" in log and f"date: {day}, " in log
