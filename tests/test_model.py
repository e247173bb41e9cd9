"""Making and loading decoders: every name read, every value right, the same in every process."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from bench import checkpoints
from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import Blocks, materialise, skeleton
from llm_demo.core.errors import UserError
from llm_demo.core.rows import position_ids
from llm_demo.model.costs import flops_of_slot, param_count, sizes_of
from llm_demo.model.model_folder import describe_model, open_model, try_describe
from llm_demo.model.source import find_model, load_config, load_tokenizer
from llm_demo.model.weights_files import open_weights

CPU = torch.device("cpu")
SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
CONFIGS = {
    "qwen3-tied": Qwen3Config(tie_word_embeddings=True, head_dim=8, **SIZES),
    "qwen3": Qwen3Config(tie_word_embeddings=False, head_dim=16, **SIZES),
    "qwen2": Qwen2Config(tie_word_embeddings=True, **SIZES),  # has biases
    "llama": LlamaConfig(tie_word_embeddings=False,
                         rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
                                          "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                          "original_max_position_embeddings": 32},
                         **SIZES),  # fmt: skip
    "mistral": MistralConfig(sliding_window=None, **SIZES),
}  # fmt: skip


def build(config, weights, seed=0):
    lm = skeleton(config, "bucketed", weights)
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb"]
    names += [f"model.layers.{i}" for i in range(config.num_hidden_layers)]
    for name in reversed(names + ([] if config.tie_word_embeddings else ["lm_head"])):
        materialise(lm, name, weights, seed, CPU)
    if config.tie_word_embeddings:
        lm.lm_head.weight = lm.model.embed_tokens.weight
    return lm


@pytest.mark.parametrize("shards", ["1MB", "20KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loaded_model_equals_hugging_faces(name, shards, tmp_path):
    """Logits of the model loaded part by part equal from_pretrained's: rotary buffers included."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path, max_shard_size=shards)
    true = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    lm = build(load_config(tmp_path, 64), open_weights(tmp_path))
    ids = torch.randint(0, 97, (2, 64))
    cu = torch.tensor([0, 64, 128], dtype=torch.int32)
    documents = make_documents(cu, (2, 64), "bucketed", CPU)
    how = {"position_ids": position_ids(cu, (2, 64)), "documents": documents}
    hidden = lm.model(input_ids=ids, use_cache=False, **how).last_hidden_state
    torch.testing.assert_close(lm.lm_head(hidden), true(ids).logits)
    assert param_count(lm) == sum(p.numel() for p in true.parameters())
    assert not any(t.is_meta for t in [*lm.parameters(), *lm.buffers()])


@pytest.mark.parametrize("name", CONFIGS)
def test_random_weights_are_the_same_whoever_makes_them(name):
    whole = dict(build(CONFIGS[name], None, seed=5).named_parameters())
    part = materialise(skeleton(CONFIGS[name], "math"), "model.layers.1", None, 5, CPU)
    for key, param in part.named_parameters():
        assert torch.equal(param, whole[f"model.layers.1.{key}"])
        assert torch.equal(param, param.bfloat16().float())
    other = materialise(skeleton(CONFIGS[name], "math"), "model.layers.1", None, 6, CPU)
    assert not torch.equal(other.mlp.up_proj.weight, part.mlp.up_proj.weight)
    assert whole["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    ups = [whole[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 2)]
    assert not torch.equal(*ups)
    assert (whole["model.norm.weight"] == 1).all()


def test_published_flops():
    """Qwen3-0.6B at S = 1024: 28 blocks of 119.5 MFLOP and a head of 933 MFLOP a token."""
    config = load_config(ROOT / "models/qwen3-0.6b", 1024)
    sizes = sizes_of(config)
    blocks, head = [b.flops(1024) for b in sizes.blocks], 6 * sizes.embedding
    (block,) = set(blocks)
    assert flops_of_slot(sizes, 1024) == 28 * block + head
    assert block == pytest.approx(119.5e6, rel=1e-3)
    assert head == pytest.approx(933e6, rel=1e-3)


def test_checkpointing_keeps_one_tensor_a_block_and_the_numbers():
    lm = build(CONFIGS["qwen3"], None)
    cu = torch.tensor([0, 40, 64], dtype=torch.int32)
    documents, positions = make_documents(cu, (1, 64), "bucketed", CPU), position_ids(cu, (1, 64))
    hidden = torch.randn(1, 64, 32, requires_grad=True)
    rotary = lm.model.rotary_emb(hidden, positions)
    found = []
    for checkpointing in (False, True):
        kept = []
        unit = Blocks(list(lm.model.layers), checkpointing)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: (k.append(t), t)[1], id):
            unit(hidden, rotary, positions, documents)
        out = unit(hidden, rotary, positions, documents)
        grads = torch.autograd.grad(out.square().sum(), [hidden, *lm.model.layers.parameters()])
        found.append((len(kept), out, grads))
    (many, out, grads), (few, out2, grads2) = found
    assert few <= 2 * len(lm.model.layers) < many
    assert torch.equal(out, out2) and all(map(torch.equal, grads, grads2))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {**ROPE, "rope_type": "yarn", "original_max_position_embeddings": 32}
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
NORM = "model.norm.weight"


def rope(**more):
    return {"config.json": {"rope_parameters": {**ROPE, **more}}}


def scaling(kind):
    return {"config.json": {"rope_parameters": None, "rope_scaling": {"type": kind, "factor": 2.0}}}


# What a folder's files hold instead: text, None for no file, a dict that changes a JSON file, or a
# function that changes the tensors.
WRONG = [
    # the download was interrupted
    ({"config.json": POINTER}, "config.json is a Git LFS pointer"),
    ({"model.safetensors": POINTER}, "model.safetensors is a Git LFS pointer"),
    ({INDEX: json.dumps({"weight_map": {NORM: SHARD}})}, f"{SHARD}: No such file"),
    ({"model.safetensors": b"half".ljust(999)}, "model.safetensors: .*header"),
    # an index of another kind
    ({INDEX: "[" * 10**5}, f"{INDEX}: maximum recursion"),
    ({INDEX: '{"weight_map": {"a": 5}}'}, f"{INDEX}: 'int' object"),
    ({INDEX: '{"weight_map": {"a": "model.safetensors"}}'}, "does not contain tensor a"),
    ({"model.safetensors": None, "pytorch_model.bin": ""}, "save_pretrained"),
    # tensors
    ({"config.json": {"num_hidden_layers": 4, "layer_types": None}}, "weight model.layers.3"),
    ({"config.json": {"num_hidden_layers": 2, "layer_types": None}},
     "model.layers.2.input_layernorm.weight is not a weight of this"),
    ({"config.json": {"intermediate_size": 50}},
     r"down_proj.weight has shape \[32, 48\], .* \[32, 50\]"),
    ({"model.safetensors": lambda t: {NORM: t[NORM].int()}}, f"{NORM} is of type I32"),
    ({"model.safetensors": lambda t: {"a.b": t[NORM] + 1}}, "a.b is not a weight of this model"),
    # configuration
    ({"config.json": None}, "no model at"),
    ({"config.json": "{"}, "config.json"),
    ({"config.json": {"model_type": "gpt2"}}, "gpt2 has no test of its own"),
    ({"config.json": {"model_type": "llama", "hidden_act": "foo"}}, "config.json: KeyError 'foo'"),
    ({"config.json": {"head_dim": None}}, "field 'head_dim'"),
    *(({"config.json": {key: 0}}, message)
      for key, message in (("num_key_value_heads", "config.json: .*by zero"),
                           ("num_hidden_layers", "num_hidden_layers 0 is not from 1 to"))),
    ({"config.json": "[" * 10**5}, "config.json: maximum recursion"),
    ({"config.json": {"num_hidden_layers": 10**12}}, "num_hidden_layers 1000000000000 is not"),
    ({"config.json": {"pad_token_id": 10**9}}, "Padding_idx must be within num_embeddings"),
    ({"config.json": {"dtype": 5}}, "config.json: 'int' object has no attribute"),
    (rope(rope_theta=0), "do not give positive frequencies"),
    (rope(rope_theta="x"), "config.json: .*'str' and 'Tensor'"),
    (rope(rope_type="zzz"), "the rotary type zzz is not one of default, "),
    (scaling("mrope"), "the rotary type mrope is not one of default, "),
    (rope(**YARN, factor=-1), "do not give positive frequencies"),
    (rope(**YARN), "config.json: KeyError .*factor"),
    (rope(**YARN, factor=2.0, attention_factor="x"), "config.json: "),
    # tokenizer
    ({"tokenizer.json": None, "tokenizer_config.json": None, "chat_template.jinja": None},
     "--tokenizer_name_or_path"),
    ({"tokenizer.json": "{}"}, "tokenizer.json: Model missing"),
    ({"tokenizer_config.json": {"tokenizer_class": 5}}, "x: 'int' obj"),
    ({"tokenizer_config.json": {"eos_token": {}}}, "x: Special token"),
    ({"tokenizer.json": None, "tokenizer.model": "x"}, "x: "),
    ({"chat_template.jinja": None,
      "tokenizer_config.json": {"chat_template": [{"name": "a", "template": "a"}]}},
     "--chat_template .*: .*multiple chat templates with no default specified"),
    ({"chat_template.jinja": "{% for m in messages %}"}, "chat template .*: line 1: Unexp"),
    # generation
    ({"generation_config.json": "{"}, "generation_config.json: Expecting"),
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with weights and a tokenizer."""
    folder = tmp_path_factory.mktemp("good")
    config = Qwen3Config(tie_word_embeddings=True, head_dim=8, **{**SIZES, "vocab_size": 4096})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    return folder


def changed(good, folder, files):
    """A copy of the folder with other files, see WRONG."""
    shutil.copytree(good, folder)
    for name, content in files.items():
        file = folder / name
        if callable(content):
            tensors = load_file(file)
            save_file(tensors | content(tensors), file, metadata={"format": "pt"})
        elif isinstance(content, dict):
            file.write_text(json.dumps(json.loads(file.read_text()) | content))
        elif content is None:
            file.unlink()
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def opened(folder):
    """What a run does with a folder before it reads data."""
    config, weights = open_model(find_model(str(folder)), 64)
    tokenizer = load_tokenizer(str(folder))
    return config, weights, tokenizer, try_describe(folder, tokenizer, config)


@pytest.mark.parametrize("files, message", WRONG)
def test_a_wrong_folder_is_one_line(files, message, good, tmp_path, record_property):
    record_property("bad inputs", 1)
    with refused(message):
        opened(changed(good, tmp_path / "x", files))


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("other", [False, True], ids=["equal", "other"])
def test_a_tied_head_in_the_files(other, good, tmp_path):
    """Of other values it is kept, as transformers does; an equal one stays tied."""

    def head(tensors):
        values = tensors[EMBEDDING].clone()
        values[-1, -1] += other
        return {HEAD: values}

    folder, said = changed(good, tmp_path / "x", {"model.safetensors": head}), []
    config, weights = open_model(folder, 64, said.append)
    assert config.tie_word_embeddings == (not other)
    assert len(said) == other
    true = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (true.lm_head.weight is true.model.embed_tokens.weight) == (not other)
    lm = build(config, weights)
    assert torch.equal(lm.lm_head.weight, true.lm_head.weight)
    assert param_count(lm) == sum(p.numel() for p in true.parameters())
    describe_model(folder, load_tokenizer(str(folder)), tmp_path / "model", config)
    saved = json.loads((tmp_path / "model/config.json").read_text())
    assert saved["tie_word_embeddings"] == (not other)


def test_tensors_that_are_not_used_are_named(good, tmp_path):
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = changed(good, tmp_path / "x", {"model.safetensors": lambda t: {rotary: t[NORM] + 1}})
    assert open_model(folder, 64)[1].ignored == [rotary]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(bad, good, tmp_path):
    def spoilt(tensors):
        values = tensors["model.layers.1.mlp.up_proj.weight"].clone()
        values[3, 4] = bad
        return {"model.layers.1.mlp.up_proj.weight": values}

    folder = changed(good, tmp_path / "x", {"model.safetensors": spoilt})
    config, weights = open_model(folder, 64)
    build(config, open_weights(good))
    with pytest.raises(UserError, match="model.layers.1.mlp.up_proj.weight is not finite"):
        build(config, weights)
    large = {NORM: torch.full((32,), 6e4, dtype=torch.float16)}  # only their sum is infinite
    folder = changed(good, tmp_path / "y", {"model.safetensors": lambda t: large})
    build(*open_model(folder, 64))


@pytest.mark.slow
def test_reading_a_model_takes_no_more_of_the_host_than_its_weights():
    """2.4 GB of fp32 weights on two processes without a GPU, whose parameters are in the host's
    memory too: 1.0 of the file."""
    args = SimpleNamespace(
        model=None, import_model="models/qwen3-0.6b", import_dtype="fp32", dtype="fp32",
        seq_len=128, steps=3, flags="",
    )  # fmt: skip
    result = checkpoints.measure_import("fsdp", args)
    assert result["bytes"] > 2e9
    assert result["peak"] - result["without"] < 1.3 * result["bytes"]
