"""Exports with all that a base has beside the text that was trained."""

import json

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file
from test_checkpoint import WORLD
from test_export import FACTS
from test_parity import SIZES
from test_qwen35 import EXPERTS, IDS, MODELS
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from llm_demo.model.model_folder import Source, describe_source, load_model, open_model
from llm_demo.model.source import load_config
from llm_demo.run import checkpoint_files
from llm_demo.run.export_run import export

pytestmark = pytest.mark.usefixtures("alone")
VISION = dict(hidden_size=32, intermediate_size=32)
QWEN_VISION = dict(depth=1, num_heads=2, out_hidden_size=64, **VISION)
OTHER_VISION = dict(num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
TEXT = dict(**SIZES, **IDS)
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
OLD = {  # transformers' names of today: those of older files
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
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

    def make(kind, old=False):
        folder = tmp_path_factory.mktemp(kind) / "base"
        whole, config = KINDS[kind]
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


def run_of(folder, base):
    """(the checkpoint of a run of this base, its values). In the folder `folder`."""
    config, weights = open_model(base, 32)
    torch.manual_seed(2)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    values = {n: torch.randn(p.shape) / 8 for n, p in lm.named_parameters()}
    state = dict(values)
    for key in ("exp_avg", "exp_avg_sq"):
        state |= {f"{n}.{key}": torch.ones_like(t) for n, t in values.items()}
    (folder / "checkpoints").mkdir(parents=True)
    checkpoint_files.write(folder / "checkpoints/.part", state, FACTS, WORLD)
    step = folder / "checkpoints/step_00000007"
    checkpoint_files.publish(folder / "checkpoints/.part", step)
    source = Source(base, config, weights, AutoTokenizer.from_pretrained(TINY))
    describe_source(str(base), source, config, folder / "model")
    settings = {"model_name_or_path": str(base), "train_json": "x", "parallelism": "one"}
    (folder / "config.json").write_text(json.dumps(settings))
    return step, values


def read_all(folder):
    """{name: tensor} of all files of a folder."""
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def logits(model):
    torch.manual_seed(3)
    with torch.no_grad():
        return model.eval()(torch.randint(0, 4000, (2, 17))).logits


LAYOUTS = [("qwen3_5", False), ("qwen3_5_moe", False), *((k, old) for k in ("gemma3", "mistral3")
                                                         for old in (False, True))]  # fmt: skip


@pytest.mark.parametrize("kind, old", LAYOUTS)
def test_the_whole_model_comes_out(kind, old, base, tmp_path):
    """In the names and the form of the base: text as trained, all else to the bit."""
    folder, (whole, _) = base(kind, old), KINDS[kind]
    step, values = run_of(tmp_path / "run", folder)
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
