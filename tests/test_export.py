"""Checkpoints -> Hugging Face folders that give the trainer's numbers."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, run
from test_checkpoint import WORLD
from test_parity import MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_demo import checkpoint, export
from llm_demo.errors import UserError
from llm_demo.plan import describe_model

TINY = ROOT / "models/qwen3-tiny"
FACTS = {"step": 7, "tokens": 4096, "label_tokens": 1024, "eval_loss": 1.5}


@pytest.fixture(scope="module", autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(folder, name):
    """(a model, the run's folder) whose checkpoint has the model's weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32)
    state = {n: p.detach() for n, p in model.named_parameters()}
    for key in ("exp_avg", "exp_avg_sq"):
        state |= {f"{n}.{key}": torch.ones_like(p) for n, p in model.named_parameters()}
    (folder / "checkpoints").mkdir(parents=True)
    part = folder / "checkpoints/.part"
    checkpoint.write(part, state, FACTS, WORLD)
    checkpoint.publish(part, folder / "checkpoints/step_00000007")
    source = folder / "source"
    model.config.save_pretrained(source)
    GenerationConfig(max_new_tokens=77).save_pretrained(source)
    describe_model(source, AutoTokenizer.from_pretrained(TINY), folder / "model")
    settings = {"model_name_or_path": "a/base", "train_json": "x.jsonl", "lr": 0.1, "stages": 2}
    (folder / "config.json").write_text(json.dumps(settings))
    return model, folder


def logits(model):
    torch.manual_seed(1)
    with torch.no_grad():
        return model(torch.randint(0, 4000, (2, 33))).logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", [1, 3])
def test_the_folder_gives_the_same_logits_to_the_bit(name, shards, tmp_path):
    model, folder = trained(tmp_path / "run", name)
    size = sum(p.numel() * 4 for p in model.parameters())
    out = tmp_path / "out"
    step = folder / "checkpoints/step_00000007"
    export.export(step, out, "fp32", "5GB" if shards == 1 else int(size * 0.6))
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1 if shards > 1 else [f.name for f in files] == ["model.safetensors"]
    again, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert again.dtype == torch.float32 and torch.equal(logits(again), logits(model))
    tied = again.lm_head.weight is again.model.embed_tokens.weight
    assert tied == MODELS[name].tie_word_embeddings
    written = sum(f.stat().st_size for f in files)
    assert size < written < size * 1.1 + 1e5  # a tied weight once
    assert again.generation_config.max_new_tokens == 77
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template and len(tokenizer) == 4096
    card = (out / "README.md").read_text()
    assert "7 optimizer steps" in card and "Held-out loss 1.5000" in card and "| lr | 0.1 |" in card


def test_the_command_takes_a_run_and_says_what_is_wrong(tmp_path):
    model, folder = trained(tmp_path / "run", "tied")
    command = [sys.executable, "-m", "llm_demo.export"]
    done = run([*command, folder, tmp_path / "out"])
    assert done.returncode == 0, done.stderr
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    for (name, p), (_, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p.bfloat16(), q), name
    done = run([*command, folder, tmp_path / "out"])
    assert done.returncode == 2 and "is not empty: choose another" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_configuration_of_another_model_is_refused(tmp_path):
    _, folder = trained(tmp_path / "run", "tied")
    MODELS["untied"].save_pretrained(folder / "model")
    with pytest.raises(UserError, match="lm_head.weight is missing, the configuration wants"):
        export.export(folder / "checkpoints/step_00000007", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_an_upload_that_fails_leaves_the_folder(tmp_path, monkeypatch):
    calls = []

    def create_repo(repo, private, exist_ok):
        calls.append((repo, private))
        return SimpleNamespace(repo_id=f"me/{repo}")

    def upload_folder(repo_id, folder_path):
        calls.append((repo_id, folder_path))
        if len(calls) > 2:
            raise OSError("no route to host")

    api = SimpleNamespace(create_repo=create_repo, upload_folder=upload_folder)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    export.push(tmp_path, "mine")
    assert calls == [("mine", True), ("me/mine", tmp_path)]
    with pytest.raises(UserError, match="no route to host; .* is whole"):
        export.push(tmp_path, "mine", private=False)
    assert calls[2] == ("mine", False)
