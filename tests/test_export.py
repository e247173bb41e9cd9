"""Checkpoints -> Hugging Face folders that give the trainer's numbers."""

import base64
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import ROOT, TINY, python, run
from safetensors.torch import load_file
from test_checkpoint import WORLD
from test_parity import MODELS
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_demo import export as command
from llm_demo.core.errors import UserError
from llm_demo.machine.device import DTYPES
from llm_demo.model.export_files import write_weights
from llm_demo.model.model_folder import describe_model
from llm_demo.model.source import load_config, position_limit
from llm_demo.run import checkpoint_files
from llm_demo.run.export_run import card, export, heldout_of

pytestmark = pytest.mark.usefixtures("alone")
FACTS = {"step": 7, "adam_steps": 7, "loss_scale": {"scale": 1.0, "good_steps": 7}, "tokens": 4096,
         "label_tokens": 1024, "evals": [], "exact": [], "eval_loss": 1.5}  # fmt: skip


def trained(folder, name):
    """(a model, the run's folder) whose checkpoint has the model's weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32)
    return model, run_of(folder, model, {n: p.detach() for n, p in model.named_parameters()})


def run_of(folder, model, state):
    """The folder of a run of a model, whose checkpoint has these values."""
    for key in ("exp_avg", "exp_avg_sq"):
        state |= {f"{n}.{key}": torch.ones_like(p) for n, p in model.named_parameters()}
    (folder / "checkpoints").mkdir(parents=True)
    part = folder / "checkpoints/.part"
    checkpoint_files.write(part, state, FACTS, WORLD)
    checkpoint_files.publish(part, folder / "checkpoints/step_00000007")
    source = folder / "source"
    model.config.save_pretrained(source)
    GenerationConfig(max_new_tokens=77).save_pretrained(source)
    describe_model(source, AutoTokenizer.from_pretrained(TINY), folder / "model", model.config)
    settings = {"model_name_or_path": "a/base", "train_json": "x.jsonl", "lr": 0.1}
    settings["parallelism"] = "a pipeline"
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


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
    export(step, out, "fp32", "5GB" if shards == 1 else int(size * 0.6))
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
    assert "\n# base fine-tuned on " in card and f'generation", "{out.name}")' in card
    modes = {oct(f.stat().st_mode & 0o777) for f in out.iterdir()}
    os.umask(umask := os.umask(0))
    assert modes == {oct(0o666 & ~umask)}  # safetensors writes 0600


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_files_are_of_their_dtype(dtype, tmp_path):
    """What is not finite there is not written."""

    def fill(tensors):
        for t in tensors.values():
            t.fill_(1e5)

    def write(shapes):
        return write_weights(tmp_path, fill, shapes, DTYPES[dtype], "5GB")

    if dtype == "fp16":
        with pytest.raises(UserError, match="a is not finite in torch.float16"):
            write({"a": (50, 7)})
        return
    assert write({"a": (50, 7)}) == 350 * DTYPES[dtype].itemsize
    written = load_file(tmp_path / "model.safetensors")["a"]
    assert torch.equal(written, torch.full((50, 7), 1e5, dtype=DTYPES[dtype]))


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {  # of rope_parameters, and what transformers 4 reads in its place
    "default": {},
    "yarn": YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7},
    "llama3": YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": YARN | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}


@pytest.mark.parametrize("kind", ROPES)
def test_transformers_4_finds_what_it_reads(kind, tmp_path):
    """Without these keys it silently takes defaults, or can't load the tokenizer. Version 5 has the
    same logits to the bit."""
    model, folder = trained(tmp_path / "run", "tied")
    remote, rope = {"auto_map": {"AutoConfig": "other.Config"}}, ROPES[kind] | {"rope_type": kind}
    file = folder / "model/config.json"
    given = json.loads(file.read_text()) | remote
    file.write_text(json.dumps(given | {"rope_parameters": rope | {"rope_theta": 5e4}}))
    file = folder / "model/tokenizer_config.json"
    tokens = {"extra_special_tokens": ["<think>"], "auto_map": {"AutoTokenizer": ["other.T", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | tokens))
    out = tmp_path / "out"
    export(folder / "checkpoints/step_00000007", out, "fp32")
    config = json.loads((out / "config.json").read_text())
    assert (config["rope_theta"], config["torch_dtype"]) == (5e4, "float32")
    assert config["rope_scaling"] == (rope | {"type": kind} if kind != "default" else None)
    assert config["rope_parameters"] == rope | {"rope_theta": 5e4}
    assert config.get("original_max_position_embeddings") == (16 if kind == "longrope" else None)
    assert config["tie_word_embeddings"] is True and config["head_dim"] == 16
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<think>"]
    assert "extra_special_tokens" not in written  # a dict there
    assert "auto_map" not in config and "auto_map" not in written
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert "<think>" in tokenizer.all_special_tokens
    true = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    true.load_state_dict(model.state_dict())
    again = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(again), logits(true.eval()))
    assert kind == "default" or not torch.equal(logits(again), logits(model.eval()))


def card_of(folder, **settings):
    """The card of a run, with other settings."""
    before = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(before | settings))
    return card(folder / "checkpoints/step_00000007", "mine")


def test_the_card_says_how_it_was_trained(tmp_path):
    """In the script's own words. A run of an earlier version, which has none, is refused."""
    _, folder = trained(tmp_path, "tied")
    card = card_of(folder)
    assert "Fine-tuned with llm_demo, a pipeline, 7 optimizer steps" in card
    assert "base_model" not in card
    assert "library_name: transformers\nbase_model: a/base\n" in card_of(
        folder, base_model="a/base"
    )
    (folder / "config.json").write_text('{"model_name_or_path": "a", "train_json": "x", "lr": 1}')
    with pytest.raises(UserError, match="is not the configuration of a run: .*'parallelism'"):
        card_of(folder)


BEGAN = [  # of a run: what the card says
    ({"resume": None, "random_weights": False}, "ring of 3, 7 optimizer steps, from `base` on"),
    ({"resume": "auto", "resumed_step": 0}, "llm_demo, ring of 3, 7 "),  # found nothing
    ({"resume": "auto", "resumed_step": 3}, "last by ring of 3, 7 "),
    ({"random_weights": True}, "steps, from random weights (configuration of `base`) on"),
    ({"train_json": "/data/a.jsonl, b.csv"}, " on `a.jsonl`, `b.csv`:"),
]


def test_the_card_says_how_it_began(tmp_path):
    """Earlier runs may have been another script's. The base may be a mere configuration."""
    _, folder = trained(tmp_path, "tied")
    for more, said in BEGAN:
        assert said in card_of(folder, parallelism="ring of 3", **more)


def test_a_public_repository_has_to_be_named(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["export", str(tmp_path), "out", "--public"])
    with pytest.raises(UserError, match="--public: set --push_to_hub too"):
        command.main()


def test_the_command_takes_a_run_and_says_what_is_wrong(tmp_path):
    model, folder = trained(tmp_path / "run", "tied")
    command = [sys.executable, "-m", "llm_demo.export"]
    done = run([*command, folder, tmp_path / "out"])
    assert done.returncode == 0, done.stderr
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    for (name, p), (_, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p.bfloat16(), q), name
    (tmp_path / "here").mkdir()
    done = run([*command, folder, "."], cwd=tmp_path / "here", PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr) == (2, "error: . is the working folder: choose another\n")


def test_a_configuration_of_another_model_is_refused(tmp_path):
    _, folder = trained(tmp_path / "run", "tied")
    MODELS["untied"].save_pretrained(folder / "model")
    with pytest.raises(UserError, match="lm_head.weight is missing there, .* by its config"):
        export(folder / "checkpoints/step_00000007", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as an upload of small files asks for."""

    repos, files, broken, asked = {}, {}, False, []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Hub.asked.append((self.path, self.headers["Authorization"]))
        here = f"http://127.0.0.1:{self.server.server_port}/me/mine"
        if self.path == "/api/repos/create":
            how = json.loads(body)  # older clients say private, newer ones visibility
            Hub.repos.setdefault("me/mine", how.get("private", how.get("visibility") == "private"))
            return self.answer({"url": here})
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [{"path": path, **how} for path in paths]})
        if "/commit/" in self.path and not Hub.broken:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    Hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer({"commitUrl": f"{here}/commit/1", "commitOid": "1"})
        return self.answer({}, 200 if "validate" in self.path else 500)

    def do_GET(self):
        private = Hub.repos["me/mine"]
        self.answer({"id": "me/mine", "sha": "1", "siblings": [], "private": private})

    def answer(self, what, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())

    def log_message(self, *_):
        pass


def test_upload_to_a_hub(tmp_path):
    """By the real client over HTTP: private, with the token of the environment, all files; a hub
    that fails leaves the folder."""
    _, folder = trained(tmp_path / "run", "tied")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_secret",
        "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    command = [python(**env), "-m", "llm_demo.export", folder]
    done = run([*command, tmp_path / "out", "--push_to_hub", "mine"], **env)
    assert done.returncode == 0, done.stderr
    assert "to me/mine" in done.stdout and Hub.repos["me/mine"] is True
    assert {token for _, token in Hub.asked} == {"Bearer hf_secret"}
    assert Hub.files == {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}
    Hub.broken = True
    Hub.repos.clear()
    done = run([*command, tmp_path / "2", "--push_to_hub", "mine", "--public"], **env)
    public = run([*command, tmp_path / "3", "--push_to_hub", "mine"], **env)
    server.shutdown()
    server.server_close()
    assert public.returncode == 2 and "it exists and is public" in public.stderr
    assert done.returncode == 2 and f"{tmp_path}/2 is complete" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) == 1
    assert Hub.repos["me/mine"] is False
    AutoModelForCausalLM.from_pretrained(tmp_path / "2")


def test_longer_rows_of_random_weights_are_described(tmp_path):
    """A model without weights may be measured at any length. Its export has these positions."""
    source, tokenizer = ROOT / "models/qwen3-tiny", AutoTokenizer.from_pretrained(TINY)
    config = load_config(source, 4096)
    config.max_position_embeddings = 4096
    describe_model(source, tokenizer, tmp_path / "longer", config)
    described = json.loads((tmp_path / "longer/config.json").read_text())
    assert described["max_position_embeddings"] == 4096


def test_positions_of_yarn(tmp_path):
    config = json.loads((ROOT / "models/qwen3-tiny/config.json").read_text())
    for kind, long in (("yarn", 8192), ("dynamic", None), ("llama3", None)):
        rope = {"rope_type": kind, "rope_theta": 1e6, "factor": 4.0}
        rope |= {"original_max_position_embeddings": 2048} if kind != "dynamic" else {}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
        (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
        limit = position_limit(load_config(tmp_path, 2048))
        assert limit == (long or 2048)
        if kind == "llama3":  # without weights
            load_config(tmp_path, limit + 1)
            continue
        with pytest.raises(UserError, match=f"has positions up to {limit}"):
            load_config(tmp_path, limit + 1)


def test_a_loss_measured_after_the_checkpoint_is_on_the_card(tmp_path):
    """A run stopped in its last evaluation repeats it, but writes no other checkpoint."""
    step, summary = tmp_path / "checkpoints/step_00000004", tmp_path / "summary.json"
    facts = {"step": 4, "eval_loss": None, "exact": []}
    assert heldout_of(step, facts) == "not measured"
    summary.write_text('{"eval_loss": {"0": 5.0, "4": 1.25}}')
    assert heldout_of(step, facts) == "1.2500"
    assert heldout_of(step, facts | {"step": 3}) == "not measured"
    measured = facts | {"eval_loss": 2.0, "exact": [[4, 0.5]]}
    assert heldout_of(step, measured) == "2.0000, 50.0% of the examples answered exactly"
