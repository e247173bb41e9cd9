"""Exports with all that a base has beside the text that was trained."""

import copy
import json
import re
import shutil
from fnmatch import fnmatch

import pytest
import test_gemma4
import test_parity as parity
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file
from test_checkpoint import WORLD
from test_export import FACTS
from test_qwen35 import EXPERTS, IDS, MODELS
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)
from transformers.quantizers import AutoHfQuantizer

from llm_demo.core.errors import UserError
from llm_demo.model.adapters import factors_of
from llm_demo.model.model_folder import describe_model, load_model, open_model
from llm_demo.model.source import load_config
from llm_demo.model.weights_files import identity_of
from llm_demo.options.lora import Lora
from llm_demo.run import checkpoint_files
from llm_demo.run.export_run import export

pytestmark = pytest.mark.usefixtures("alone")
VISION = dict(hidden_size=32, intermediate_size=32)
QWEN_VISION = dict(depth=1, num_heads=2, out_hidden_size=64, **VISION)
OTHER_VISION = dict(num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
GEMMA4_VISION = dict(num_hidden_layers=1, num_attention_heads=2, position_embedding_size=64)
TEXT = dict(**parity.SIZES, **IDS)
MTP = {"mtp_num_hidden_layers": 1}
KINDS = {  # name: (class, configuration, whether the text comes first in names)
    "qwen3_5": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config(text_config=MODELS["untied"].to_dict() | MTP, vision_config=QWEN_VISION),
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig(text_config=EXPERTS["experts"].to_dict(), vision_config=QWEN_VISION),
    ),
    "gemma3": (
        Gemma3ForConditionalGeneration,
        Gemma3Config(
            text_config=dict(model_type="gemma3_text", **TEXT),
            vision_config=dict(model_type="siglip_vision_model", **VISION, **OTHER_VISION),
            mm_tokens_per_image=1,
        ),
    ),
    "mistral3": (
        Mistral3ForConditionalGeneration,
        Mistral3Config(
            text_config=dict(model_type="mistral", **TEXT),
            vision_config=dict(model_type="pixtral", head_dim=16, **VISION, **OTHER_VISION),
            tie_word_embeddings=False,
        ),
    ),
}
KINDS["gemma4"] = (
    Gemma4ForConditionalGeneration,
    Gemma4Config(
        text_config=test_gemma4.MODELS["26b"].to_dict() | {"pad_token_id": 0},
        vision_config=dict(**VISION, head_dim=16, num_key_value_heads=2, **GEMMA4_VISION),
    ),
)
KINDS["gemma4_unified"] = (
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedConfig(
        text_config=test_gemma4.MODELS["12b"].to_dict() | {"pad_token_id": 0},
        vision_config=dict(mm_embed_dim=32, mm_posemb_size=8, patch_size=2, output_proj_dims=32),
    ),
)
KINDS["ministral3"] = (
    Mistral3ForConditionalGeneration,
    Mistral3Config(
        text_config=dict(model_type="ministral3", **TEXT),
        vision_config=KINDS["mistral3"][1].vision_config.to_dict(),
        tie_word_embeddings=False,
    ),
)
OLD = {  # transformers' names of today: those of older files
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
WIDE = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128)
PROCESSOR = {"preprocessor_config.json": '{"size":  7}\n', "video_preprocessor_config.json": "{ }"}


def old_name(name):
    for new, old in OLD.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A function of (kind, whether names are old) -> a folder like a published one, in two shards
    that both hold text and other tensors."""

    def make(kind, old=False, wide=False):
        folder = tmp_path_factory.mktemp(kind) / "base"
        whole, config = KINDS[kind]
        if wide:  # as blocks of fp8
            config = copy.deepcopy(config)
            vars(config.text_config).update(WIDE)
            config.vision_config.out_hidden_size = 128
        torch.manual_seed(1)
        model = whole(config).bfloat16()
        model.save_pretrained(folder, save_original_format=False)
        tensors = load_file(folder / "model.safetensors")
        if kind.startswith("qwen"):
            tensors["mtp.fc.weight"] = torch.randn(8, 16).bfloat16()
            tensors["mtp.norm.weight"] = torch.randn(8)  # in fp32
        tensors = {old_name(n) if old else n: t for n, t in tensors.items()}
        (folder / "model.safetensors").unlink()
        places, names = {}, sorted(tensors)
        for i in (0, 1):
            file = f"model-0000{i + 1}-of-00002.safetensors"
            save_file({n: tensors[n] for n in names[i::2]}, folder / file, {"format": "pt"})
            places |= dict.fromkeys(names[i::2], file)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
        for file, text in PROCESSOR.items():
            (folder / file).write_text(text)
        AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
        return folder

    made = {}
    return lambda *how: made.setdefault(how, make(*how)) if how not in made else made[how]


def run_of(folder, base, name=None, rank=0, earlier=None):
    """The checkpoint of a run of this base, in `folder`. name: of the base, as given. rank: of
    adapters, in place of the model. earlier: the run that it resumes."""
    name, (config, weights) = name or str(base), open_model(base, 32)
    torch.manual_seed(2)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes, facts = {n: tuple(p.shape) for n, p in lm.named_parameters()}, dict(FACTS)
    if rank:
        lora = Lora(rank, 8.0, 0.0, ("q_proj", "down_proj"), 0, identity_of(name, base, weights))
        facts["adapters"] = lora.facts()
        shapes = factors_of(lora.facts(), shapes)
    state = {n: torch.randn(shape) / 8 for n, shape in shapes.items()}
    for n, t in list(state.items()):
        state |= {f"{n}.exp_avg": torch.ones_like(t), f"{n}.exp_avg_sq": torch.ones_like(t)}
    saved = lm.state_dict().keys()
    state |= {n: t / 2 for n, t in lm.named_buffers() if n in saved and not rank}
    (folder / "checkpoints").mkdir(parents=True)
    checkpoint_files.write(folder / "checkpoints/.part", state, facts, WORLD)
    step = folder / "checkpoints/step_00000007"
    checkpoint_files.publish(folder / "checkpoints/.part", step)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    given = {"name": name, "weights": weights, "earlier": earlier and earlier / "model"}
    describe_model(base, tokenizer, folder / "model", config, **given)
    settings = {"model_name_or_path": name, "train_json": "x", "parallelism": "one"}
    (folder / "config.json").write_text(json.dumps(settings))
    return step


def read_all(folder):
    """{name: tensor} of all files of a folder."""
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def logits(model):
    torch.manual_seed(3)
    with torch.no_grad():
        return model.eval()(torch.randint(0, 4000, (2, 17))).logits


LAYOUTS = [("qwen3_5", False), ("qwen3_5_moe", False), ("ministral3", True)]
LAYOUTS += [("gemma4", False), ("gemma4_unified", False)]
LAYOUTS += [(kind, old) for kind in ("gemma3", "mistral3") for old in (False, True)]


@pytest.mark.parametrize("kind, old", LAYOUTS)
def test_the_whole_model_comes_out(kind, old, base, tmp_path):
    """In the names and the form of the base: text as trained, all else to the bit."""
    folder, (whole, _) = base(kind, old), KINDS[kind]
    step = run_of(tmp_path / "run", folder)
    said = export(step, tmp_path / "hf", "fp32", 40_000)
    assert "the whole model: " in said
    export(step, tmp_path / "text", "fp32", text_only=True)
    before, after = read_all(folder), read_all(tmp_path / "hf")
    assert before.keys() == after.keys()
    text = [n for n in before if "language_model" in n or "lm_head" in n]
    assert len(text) < len(before) and len([*(tmp_path / "hf").glob("*.safetensors")]) > 1
    for name in before:
        assert before[name].shape == after[name].shape, name
        if name in text:
            assert not torch.equal(after[name], before[name].float()), name
        else:
            assert after[name].dtype == before[name].dtype
            assert torch.equal(after[name], before[name]), name
    for file, content in PROCESSOR.items():
        assert (tmp_path / "hf" / file).read_text() == content
        assert not (tmp_path / "text" / file).exists()
    model, info = whole.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "text"))
    assert torch.equal(logits(model), expected)
    config = load_config(tmp_path / "hf", 32)
    assert torch.equal(logits(load_model("it", tmp_path / "hf", config, torch.float32)), expected)
    written = json.loads((tmp_path / "hf/config.json").read_text())
    original = json.loads((folder / "config.json").read_text())
    assert written["vision_config"] == original["vision_config"]
    assert written["architectures"] == [whole.__name__] and written["torch_dtype"] == "float32"
    text = written["text_config"]
    assert text.get("mtp_num_hidden_layers") == original["text_config"].get("mtp_num_hidden_layers")
    assert "architectures" not in text


def change(folder, name):
    """Another value of a tensor of a folder. Returns its file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    tensors[name] = tensors[name] + 1
    save_file(tensors, file, {"format": "pt"})
    return file


def test_a_base_that_is_not_as_it_was(base, tmp_path):
    """Its file is named, and nothing is written. --base names a copy, --text_only needs none."""
    folder, mine = base("qwen3_5"), tmp_path / "mine"
    shutil.copytree(folder, mine)
    step, out = run_of(tmp_path / "run", mine), tmp_path / "out"
    file = change(mine, "mtp.norm.weight")
    advice = "name a copy of the base as it was with --base, or write the text alone with --text_o"
    with pytest.raises(UserError, match=f"^{file}: mtp.norm.weight is not as it .*{advice}"):
        export(step, out)
    file.unlink()
    with pytest.raises(UserError, match=f"^{file}: .*{advice}"):
        export(step, out)
    mine.rename(tmp_path / "gone")
    with pytest.raises(UserError, match=f"^no model at {mine}: .*{advice}"):
        export(step, out)
    with pytest.raises(UserError, match=f"^{base('gemma3')}/model-.*{advice}"):
        export(step, out, base=str(base("gemma3")))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["gone", "run"]
    export(step, out, base=str(folder))
    assert "mtp.norm.weight" in read_all(out)
    text = tmp_path / "text"
    assert "the whole model" not in export(step, text, text_only=True)
    assert json.loads((text / "config.json").read_text())["mtp_num_hidden_layers"] == 0
    with pytest.raises(UserError, match="--base: .* holds no adapters"):
        export(step, tmp_path / "third", base=str(folder), text_only=True)


def test_a_text_that_changed_does_not_matter(base, tmp_path):
    """Only what was not trained is compared: the text is the checkpoint's."""
    shutil.copytree(base("qwen3_5"), mine := tmp_path / "mine")
    step = run_of(tmp_path / "run", mine)
    change(mine, "model.language_model.norm.weight")
    export(step, tmp_path / "out")


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "gemma3"])
def test_the_text_in_fp8(kind, base, tmp_path):
    """All else stays as it is, as quantization_config says, by which transformers loads it."""
    whole, folder = KINDS[kind][0], base(kind, kind == "gemma3", True)
    step, out = run_of(tmp_path / "run", folder), tmp_path / "hf"
    export(step, out, "fp8")
    before, after = read_all(folder), read_all(out)
    other = [n for n in before if "language_model" not in n and n != "lm_head.weight"]
    assert other and all(torch.equal(after[n], before[n]) for n in other)
    with torch.device("meta"):
        config = whole.config_class.from_pretrained(out)
        quantization = AutoHfQuantizer.from_config(config.quantization_config)
        listed = {*config.quantization_config["modules_to_not_convert"]}
        del config.quantization_config
        model = whole(config)
    quantization._process_model_before_weight_loading(model)
    left = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear]
    assert len(left) > 8 and all({n, n.removeprefix("model.")} & listed for n in left)
    replaced = {n for n, m in model.named_modules() if type(m).__name__.startswith("FP8")}
    scaled = {re.sub(r"(\.experts)\..+", r"\1", n) for n in after if n.endswith("_scale_inv")}
    scaled = {n.removesuffix(".weight_scale_inv") for n in scaled}
    assert replaced == {n.replace("language_model.model", "model.language_model") for n in scaled}
    assert scaled
    loaded = whole.from_pretrained(out, dtype=torch.bfloat16)
    mine = load_model("it", out, load_config(out, 32), torch.bfloat16)
    assert torch.equal(logits(loaded), logits(mine))


@pytest.mark.parametrize("kind, old", [("qwen3_5", False), ("gemma3", True)])
def test_adapters_are_merged_into_the_whole_model(kind, old, base, tmp_path):
    """Alone, they say that they are of the text."""
    folder = base(kind, old)
    step = run_of(tmp_path / "run", folder, rank=2)
    assert "on a class with images" in export(step, tmp_path / "adapter")
    assert not (tmp_path / "adapter/preprocessor_config.json").exists()
    with pytest.raises(UserError, match="--text_only: .* holds adapters: merge them"):
        export(step, tmp_path / "out", text_only=True)
    export(step, tmp_path / "text", "fp32", merge=True, text_only=True)
    export(step, tmp_path / "hf", "fp32", merge=True)
    model = KINDS[kind][0].from_pretrained(tmp_path / "hf")
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert torch.equal(logits(model), logits(text))
    before, after = read_all(folder), read_all(tmp_path / "hf")
    changed = {n for n in before if not torch.equal(before[n].float(), after[n].float())}
    assert before.keys() == after.keys() and changed
    assert all(n.endswith(("q_proj.weight", "down_proj.weight")) for n in changed)
    assert all("language_model" in n for n in changed)


def test_a_resumed_run_keeps_what_was_recorded(base, tmp_path):
    """The base may be the text alone by then, of which the run would record nothing."""
    folder = base("qwen3_5")
    step = run_of(tmp_path / "run", folder)
    export(step, tmp_path / "text", text_only=True)
    run_of(tmp_path / "run2", tmp_path / "text", earlier=tmp_path / "run")
    again = run_of(tmp_path / "run3", tmp_path / "text", earlier=tmp_path / "run2")
    export(again, tmp_path / "out")
    assert read_all(tmp_path / "out").keys() == read_all(folder).keys()
    assert (tmp_path / "out/preprocessor_config.json").read_text() == '{"size":  7}\n'
    run_of(tmp_path / "run4", folder, earlier=tmp_path)  # which has no record
    assert "tensors" in json.loads((tmp_path / "run4/model/untrained.json").read_text())


def test_what_records_nothing_exports_the_text(base, tmp_path):
    """A run of an earlier version, and one that began with random weights."""
    step = run_of(tmp_path / "run", base("qwen3_5"))
    (tmp_path / "run/model/untrained.json").unlink()
    assert "note: the text alone: the run is of a version" in export(step, tmp_path / "out")
    mere = tmp_path / "mere"
    shutil.copytree(base("qwen3_5"), mere, ignore=shutil.ignore_patterns("*.safetensors*"))
    step = run_of(tmp_path / "random", mere)
    assert "note: the text alone: the run began with random" in export(step, tmp_path / "other")


def test_a_base_on_the_hub_is_downloaded_again(base, tmp_path, monkeypatch):
    """Of the revision that the run began with, and only the files that have what is needed."""
    folder, revision = base("qwen3_5"), "a" * 40
    shutil.copytree(folder, cached := tmp_path / "snapshots" / revision)
    step = run_of(tmp_path / "run", cached, name="me/base")
    cached.rename(tmp_path / "elsewhere")
    record = json.loads((tmp_path / "run/model/untrained.json").read_text())
    assert (record["path"], record["revision"]) == ("me/base", revision)
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision))
        files = [f for f in folder.iterdir() if any(fnmatch(f.name, p) for p in allow_patterns)]
        cached.mkdir()
        for file in files:
            shutil.copy(file, cached)
        return cached

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    export(step, tmp_path / "out")
    assert asked == [("me/base", revision)]
    assert len([*cached.iterdir()]) == 3 and len([*folder.iterdir()]) > 5
    assert read_all(tmp_path / "out").keys() == read_all(folder).keys()


def test_layers_of_multi_token_prediction_in_a_model_of_text(tmp_path):
    """They are kept too, and adapters say nothing of images."""
    folder = tmp_path / "base"
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(parity.MODELS["untied"]).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    more = {f"model.layers.9.{n}": torch.randn(4, 4) for n in ("eh_proj.weight", "mlp.weight")}
    save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    step = run_of(tmp_path / "run", folder)
    export(step, tmp_path / "out")
    export(step, tmp_path / "text", text_only=True)
    written, text = read_all(tmp_path / "out"), read_all(tmp_path / "text")
    assert written.keys() - text.keys() == more.keys()
    assert all(torch.equal(written[n], t) for n, t in (text | more).items())
    same = [(tmp_path / out / "config.json").read_text() for out in ("out", "text")]
    assert same[0] == same[1]
    step = run_of(tmp_path / "lora", folder, rank=2)
    assert "images" not in export(step, tmp_path / "adapter")
