"""Files of a stranger: none of them runs code, each is refused in one line."""

import ast
import io
import json
import os
import pickle
import shutil
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import TINY, args_with
from tiny_tokenizer import packs_of
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, modeling_utils

from llm_demo import chat, evaluate, fit
from llm_demo.core.errors import UserError
from llm_demo.core.mesh import World
from llm_demo.flags.args import names_of
from llm_demo.model.model_folder import describe_model, find_source, load_model
from llm_demo.model.source import load_config, load_tokenizer
from llm_demo.model.weights_files import open_weights, weights_in
from llm_demo.run import checkpoint_files, saver
from llm_demo.run.export_run import card, export, find_base

WORLD = World(0, 1, 0, torch.device("cpu"))
pytestmark = pytest.mark.usefixtures("alone")
ADAPTERS = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["q_proj"], "base": {"path": "a"}}
FACTS = {"step": 7, "adam_steps": 7, "loss_scale": {"scale": 1.0, "good_steps": 7}, "tokens": 9,
         "label_tokens": 5, "evals": [[0, 2.5]], "exact": [], "eval_loss": 1.5}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A run's folder, made once."""
    folder = tmp_path_factory.mktemp("good") / "run"
    config = LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    weights = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    tensors = {n: p.detach().float() for n, p in weights.items()}
    part = folder / "checkpoints/.part"
    part.parent.mkdir(parents=True)
    checkpoint_files.write(part, tensors | saver.rng_state(WORLD), FACTS, WORLD)
    checkpoint_files.publish(part, folder / "checkpoints/step_00000007")
    config.save_pretrained(folder / "source")
    describe_model(folder / "source", AutoTokenizer.from_pretrained(TINY), folder / "model", config)
    settings = {"model_name_or_path": "a/base", "train_json": "x.jsonl", "parallelism": "FSDP2"}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def folder(good, tmp_path):
    shutil.copytree(good, tmp_path / "run")
    return tmp_path / "run/checkpoints/step_00000007"


class Command:
    """Pickled, it asks the reader to call something."""

    def __init__(self, function, *args):
        self.made_by = function, args

    def __reduce__(self):
        return self.made_by


def sign(folder):
    """Bring the manifest up to date, as who crafts a checkpoint would."""
    names = [f.name for f in folder.iterdir() if f.name != "manifest.json"]
    files = {n: [(folder / n).stat().st_size, checkpoint_files.digest(folder / n)] for n in names}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))


def export_of(folder):
    found = checkpoint_files.find_checkpoint(str(folder), folder, WORLD, print)
    export(found, folder.parent.parent / "out")


def resume_from(folder):
    flags = {"save": False, "resume": str(folder), "resume_anyway": True}
    settings = {**dict.fromkeys(names_of("resume")), "lr": 0, "max_steps": 9}
    log = SimpleNamespace(folder=folder.parent, say=print, settings=settings)
    checkpoints = saver.Saver(SimpleNamespace(**flags), WORLD, log, {})
    shapes = checkpoint_files.shapes_of(folder)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    checkpoints.load(tensors)
    return tensors


def read_of(folder):
    checkpoint_files.read_tensors(folder, {"lm_head.weight": torch.zeros(64, 8)})


def refused(folder, message, marker=None, uses=(export_of, resume_from)):
    for use in uses:
        with pytest.raises(UserError, match=message) as raised:
            use(folder)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 500
    assert not (folder.parent.parent / "out").exists()
    assert marker is None or not marker.exists()


def change_metadata(folder, change):
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    found = change(metadata)
    file.write_bytes(pickle.dumps(metadata if found is None else found))
    sign(folder)


def test_a_good_checkpoint_is_read(folder):
    sign(folder)
    tensors = resume_from(folder)
    assert all(t.any() for t in tensors.values()) and len(tensors) > 9
    export_of(folder)


class AsPython3112(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_a_checkpoint_of_python_3_11_2_is_read(folder):
    file = folder / ".metadata"
    metadata, written = pickle.loads(file.read_bytes()), io.BytesIO()
    AsPython3112(written).dump(metadata)
    assert b"getattr" in written.getvalue()
    file.write_bytes(written.getvalue())
    sign(folder)
    assert all(t.any() for t in resume_from(folder).values())
    export_of(folder)


COMMANDS = {
    "os.system": lambda marker: Command(os.system, f"touch {marker}"),
    "eval": lambda marker: Command(eval, f"open({str(marker)!r}, 'w')"),
    "getattr": lambda marker: Command(getattr, object, "__subclasses__"),
    "getattr of a class": lambda marker: Command(getattr, TensorProperties, "__init__"),
    "Path.touch": lambda marker: Command(Path.touch, marker),
    "torch.load": lambda marker: Command(torch.load, str(marker)),
}


PLACES = ["planner_data", "whole", "planner_data", "tensors", "storage_data", "planner_data"]
PLACED = [*zip(COMMANDS, PLACES, strict=True), ("os.system", "storage_data")]


@pytest.mark.parametrize("command, where", PLACED)
def test_no_command_of_the_metadata_is_run(command, where, folder, tmp_path):
    """torch.distributed.checkpoint runs it."""
    payload = COMMANDS[command](tmp_path / "marker")

    def change(metadata):
        if where == "whole":
            return payload
        if where == "tensors":
            metadata.state_dict_metadata["lm_head.weight"] = payload
        elif where == "planner_data":
            metadata.planner_data = payload
        else:
            metadata.storage_data[payload] = payload

    change_metadata(folder, change)
    refused(folder, "metadata is refused: it refers to ", tmp_path / "marker")
    refused(folder, "can't be read: ", tmp_path / "marker", [read_of])


def test_the_crafted_file_runs_under_pytorchs_own_reader(folder, tmp_path):
    """So that the test above holds something."""
    payload = COMMANDS["os.system"](tmp_path / "marker")
    change_metadata(folder, lambda metadata: setattr(metadata, "planner_data", payload))
    dcp.FileSystemReader(folder).read_metadata()
    assert (tmp_path / "marker").exists()


def rename(old, new):
    def change(metadata):
        for where in metadata.storage_data.values():
            where.relative_path = where.relative_path.replace(old, new)

    return change


def bytes_item(metadata):
    """DCP unpickles such items without restrictions, even in the place of a tensor."""
    metadata.state_dict_metadata["lm_head.weight"] = BytesStorageMetadata()


def set_sizes(what):
    def change(metadata):
        metadata.state_dict_metadata["lm_head.weight"].size = what

    return change


def no_storage(metadata):
    metadata.storage_data = None


ODD = {
    "bytes": (bytes_item, "BytesStorageMetadata, which no checkpoint"),
    "above": (rename("__0_0", "../../../__0_0"), "refused: it names '../../../__0_0.distcp'"),
    "absolute": (rename("__0_0.distcp", "/etc/passwd"), "refused: it names '/etc/passwd'"),
    "another": (rename("__0_0.distcp", "trainer.json"), "refused: it names 'trainer.json'"),
    "sizes": (set_sizes("abc"), "is damaged"),
    "none": (no_storage, "is damaged"),
    "list": (lambda metadata: [1], "is damaged"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_metadata_is_refused(case, folder):
    change, message = ODD[case]
    change_metadata(folder, change)
    refused(folder, message)


def test_a_class_of_ours_is_not_changed_by_a_pickle(folder):
    """BUILD with two states sets attributes, of a class too."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    (folder / ".metadata").write_bytes(name + b"(N}U\x03fqnI1\nstb.")
    sign(folder)
    refused(folder, "is damaged")
    assert not hasattr(MetadataIndex, "fqn")


@pytest.mark.parametrize("what", ["command", "dictionary", "garbage"])
def test_no_command_of_a_file_of_tensors_is_run(what, folder, tmp_path):
    payload = {"command": Command(os.system, f"touch {tmp_path}/marker"), "dictionary": {"a": 1}}
    buffer = io.BytesIO()
    if what == "garbage":
        buffer.write(b"x" * 500)
    else:
        torch.save(payload[what], buffer)
    (folder / "__0_0.distcp").write_bytes(buffer.getvalue())

    def point(metadata):
        for where in metadata.storage_data.values():
            where.offset, where.length = 0, len(buffer.getvalue())

    change_metadata(folder, point)
    refused(folder, "step_00000007 can't be read: ", tmp_path / "marker")


def entries(**more):
    def change(files):
        files.update(more)

    return change


MANIFEST = {
    "above": (entries(**{"../../config.json": [60, "0"]}), "'../../config.json' is not a check"),
    "absolute": (entries(**{"/dev/zero": [0, "0"]}), "'/dev/zero' is not a checkpoint file"),
    "a pipe": (entries(pipe=[0, "0"]), "pipe is missing, or is not a regular file"),
    "a size": (entries(**{"trainer.json": ["many", "0"]}), "bytes instead of many"),
    "a row": (entries(**{"trainer.json": 5}), "manifest.json: cannot unpack"),
    "unlisted": (lambda files: files.pop(".metadata"), "manifest.json does not list .metadata"),
}


@pytest.mark.parametrize("case", MANIFEST)
def test_odd_manifests_are_refused(case, folder):
    os.mkfifo(folder / "pipe")
    change, message = MANIFEST[case]
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest["files"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused(folder, message)


OF_FACTS = {
    "trainer.json: invalid step": {**FACTS, "step": "7"},
    "trainer.json: invalid evals": {**FACTS, "evals": 5},
    "trainer.json: invalid loss_scale": {**FACTS, "loss_scale": [1]},
    "trainer.json: invalid eval_loss": {**FACTS, "eval_loss": "low"},
    "trainer.json: invalid adapters": {**FACTS, "adapters": [1]},
    "trainer.json has no adam_steps": {"step": 1},
    "trainer.json: ": [1],
}


@pytest.mark.parametrize("message", OF_FACTS)
def test_odd_facts_are_refused(message, folder):
    (folder / "trainer.json").write_text(json.dumps(OF_FACTS[message]))
    sign(folder)
    refused(folder, message)


EVIL = (
    'x"\n---\nlicense: evil\n---\n\n```python\nimport os\n```\n~~~\n<script>alert(1)<!-- | a |\n'
    "| - | [b](mailto:c) ![d](e) \x1b[31m \ud800"
)


def test_nothing_that_a_card_quotes_becomes_code_or_a_page(folder):
    """Nor front matter. All but the folder's name may come from elsewhere."""
    root = folder.parent.parent
    keys = "model_name_or_path train_json parallelism base_model adapter lr lora_targets"
    settings = {**dict.fromkeys(keys.split(), EVIL), "lora_rank": 4}
    adapters = {**ADAPTERS, "base": {"path": EVIL}}
    (folder / "trainer.json").write_text(json.dumps(FACTS | {"adapters": adapters}))
    sign(folder)
    for lora in (None, adapters):
        (root / "config.json").write_text(json.dumps(settings))
        text = card(folder, 'x")\nimport os <b>', lora)
        assert "<" not in text and "\x1b" not in text and text.encode()
        head, *rest = text.split("---\n")
        library = "peft" if lora else "transformers"
        assert (head, rest[0]) == ("", f"library_name: {library}\ntags: [sft]\n") and len(rest) == 2
        fences = [line for line in rest[1].splitlines() if line.startswith(("```", "~~~"))]
        assert fences == ["```python", "```"]
        program = rest[1].split("```")[1].removeprefix("python\n")
        (called,) = [node.value for node in ast.parse(program).body if isinstance(node, ast.Assign)]
        assert called.args[1].value == 'x")\nimport os <b>'
        rows = rest[1].split("|---|---|\n")[1].splitlines()
        assert all(row.count("|") == 3 for row in rows) and "](" not in "".join(rows)
    for key, odd in (("train_json", [EVIL]), ("model_name_or_path", 5)):
        (root / "config.json").write_text(json.dumps(settings | {key: odd}))
        with pytest.raises(UserError, match="is not the configuration of a run"):
            card(folder, "x")


@pytest.fixture
def asked(monkeypatch):
    """The questions on the terminal, all of which are answered with yes."""
    questions = []
    monkeypatch.setattr("builtins.input", lambda text: questions.append(text) or "y")
    return questions


REMOTE = {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}}


def test_a_configuration_brings_no_code(folder, tmp_path, asked):
    """Unless told not to, transformers asks on the terminal whether to run it."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    config = {"model_type": "mine", **REMOTE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**REMOTE, "tokenizer_class": "X"}))
    for load in (lambda: load_config(tmp_path, 8), lambda: load_tokenizer(tmp_path)):
        with pytest.raises(UserError) as raised:
            load()
        assert "\n" not in str(raised.value)
    target = folder.parent.parent / "model/config.json"
    target.write_text(json.dumps(config))
    (target.parent / "evil.py").write_text((tmp_path / "evil.py").read_text())
    with pytest.raises(UserError, match="model/config.json: .*contains custom code"):
        export_of(folder)
    assert not (tmp_path / "marker").exists() and not asked


@pytest.fixture
def model(tmp_path):
    """The folder of a model with weights and tokenizer."""
    tokenizer, folder = AutoTokenizer.from_pretrained(TINY), tmp_path / "model"
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_on(model):
    find_source(args_with(model_name_or_path=str(model)), WORLD, 8)


def a_row(folder):
    """A data file in this folder."""
    (folder / "rows.jsonl").write_text('{"prompt": "Why?", "completion": "So."}\n')
    return str(folder / "rows.jsonl")


def evaluate_it(model):
    flags = ["--models", model, "--data", a_row(model.parent), "--seq_len=64", "--max_new_tokens=1"]
    args = evaluate.make_parser().parse_args(list(map(str, flags)))
    return evaluate.evaluate(str(model), args, WORLD.device, torch.float32)


def fit_it(model):
    fit.main([str(model), "--cards", "1", "--memory", "80", "--tokens_a_step", "8"])


def merge_into_it(model):
    find_base(model, {"base": {}}, str(model))


def chat_with_it(model):
    flags = chat.make_parser().parse_args([str(model)])
    chat.model_and_tokenizer(flags, model.parent / "work")


USES = (train_on, evaluate_it, fit_it, merge_into_it, chat_with_it)


def refused_by_all(uses, model, message):
    for use in uses:
        with pytest.raises(UserError, match=message) as raised:
            use(model)
        assert "\n" not in str(raised.value)


def test_a_good_model_is_used_and_no_module_beside_it(model, tmp_path, asked):
    """transformers can take generate() from a model's folder, if it may run its code."""
    (model / "custom_generate").mkdir()
    for name in ("custom_generate/generate.py", "modeling_llama.py", "tokenization.py"):
        (model / name).write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    assert evaluate_it(model)["files"][0]["tokens"] > 0
    assert not (tmp_path / "marker").exists() and not asked


def test_an_adapter_in_a_models_folder_is_refused(model, tmp_path, monkeypatch):
    """peft before 0.20 imports the module that it names."""
    (tmp_path / "payload.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    adapter = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "target_modules": ["q_proj"],
        "megatron_config": {"a": 1}, "megatron_core": "payload",
    }  # fmt: skip
    (model / "adapter_config.json").write_text(json.dumps(adapter))
    refused_by_all(USES, model, "holds both a model and an adapter")
    with pytest.raises(UserError, match="holds both a model and an adapter"):
        load_model("it", model, None, torch.float32)
    assert not (tmp_path / "marker").exists()


ELSEWHERE = {
    "_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel@v1:f",
    "_experts_implementation": "evil/kernel", "transformers_weights": "other.safetensors",
}  # fmt: skip


@pytest.mark.parametrize("key", ELSEWHERE)
def test_a_configuration_that_names_a_kernel_is_refused(key, model, folder, monkeypatch):
    def load(*_args, **_kwargs):
        raise AssertionError("a kernel is downloaded")

    names = ("load_and_register_attn_kernel", "get_kernel", "lazy_import_flash_attention")
    for name in (name for name in names if hasattr(modeling_utils, name)):
        monkeypatch.setattr(modeling_utils, name, load)
    for file in (model / "config.json", folder.parent.parent / "model/config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: ELSEWHERE[key]}))
    refused_by_all(
        (train_on, evaluate_it, fit_it, chat_with_it), model, f"config.json: _?{key}.*: remove it"
    )
    with pytest.raises(UserError, match="model/config.json: .*: remove it"):
        export_of(folder)


def test_an_attention_that_is_not_installed_is_not_asked_for(model, monkeypatch):
    """transformers looks on the hub for a kernel in place of flash-attn."""
    monkeypatch.delattr(modeling_utils, "lazy_import_flash_attention", raising=False)
    config = json.loads((model / "config.json").read_text())
    config["attn_implementation"] = "flash_attention_2"
    (model / "config.json").write_text(json.dumps(config))
    assert evaluate_it(model)["files"][0]["tokens"] > 0


TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_runs_in_a_sandbox(template, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = template.replace("MARKER", str(tmp_path / "marker"))
    with pytest.raises(UserError) as raised:
        packs_of(a_row(tmp_path), tokenizer, seq_len=64, cache_dir=str(tmp_path / "cache"))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "marker").exists()


def test_packs_of_a_shared_cache_are_not_unpickled(tmp_path, monkeypatch):
    rows, tokenizer = a_row(tmp_path), AutoTokenizer.from_pretrained(TINY)
    cache = tmp_path / "cache"
    load = lambda: packs_of(rows, tokenizer, seq_len=64, cache_dir=str(cache))  # noqa: E731
    load()
    payload = np.array([Command(os.system, f"touch {tmp_path}/marker")], object)
    for file in cache.glob("packs-*/*.npy"):
        np.save(file, payload, allow_pickle=True)
    try:
        load()  # built anew
    except (ValueError, UserError):
        pass  # or refused
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/model.safetensors", "a/../../b"])
def test_an_index_of_weights_stays_in_its_folder(name, model):
    (model / "model.safetensors").rename(model / "part.safetensors")
    index = {"weight_map": {"lm_head.weight": name, "model.norm.weight": "part.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"index.json: it names {name}, which is not in its folder"):
        open_weights(model)


@pytest.mark.parametrize("reader", [open_weights, lambda folder: weights_in([*folder.iterdir()])])
def test_weights_are_no_pickle_whatever_their_name(reader, tmp_path):
    """Of a model, and of a base in 4 bits in the cache."""
    payload = Command(os.system, f"touch {tmp_path}/marker")
    torch.save(payload, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="model.safetensors: .*header"):
        reader(tmp_path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "part"])
def test_weights_that_are_no_file_are_refused(name, tmp_path, record_property):
    """A pipe would be waited for without end. A link may be left of a cache of downloads."""
    record_property("bad inputs", 4)
    if name == "part":
        index = {"weight_map": {"lm_head.weight": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for make in (os.mkfifo, Path.mkdir, "/dev/zero", "gone"):
        file = tmp_path / name
        file.symlink_to(make) if isinstance(make, str) else make(file)
        with pytest.raises(UserError, match=name):
            open_weights(tmp_path)
        file.rmdir() if make is Path.mkdir else file.unlink()
