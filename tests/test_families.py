"""Families like Llama, each against a plain loop with Hugging Face's own model, as test_parity.py.
docs/models.md lists them."""

import copy
import json
import math
import sys
from functools import partial

import pytest
import test_lora as lora
from conftest import ROOT, ZERO, run, slow, train_cases
from test_parity import SEQ_LEN, SIZES, argv, assert_equal, shake, train, write_models
from test_plan import alone  # noqa: F401
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    SmolLM3Config,
)

from llm_demo.core.errors import UserError
from llm_demo.model.check_config import problems_of
from llm_demo.model.costs import parameters_of, refuse_shares
from llm_demo.model.families import family_of
from llm_demo.model.model_folder import describe_for_version_4, open_model
from llm_demo.run.export_run import export

IDS = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
YARN = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 8.0,
        "original_max_position_embeddings": 32}  # fmt: skip
ROPES = {"full_attention": YARN,
         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"] * 2
# documents on both sides of the limit have different frequencies
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
        "short_factor": [1.0 + i / 4 for i in range(6)], "partial_rotary_factor": 0.75,
        "long_factor": [2.0 + i for i in range(6)]}  # fmt: skip
# without biases of keys that are not rotated: their gradients are zero but for rounding
PHI = {name: value for name, value in SIZES.items() if name != "head_dim"}
MODELS = {
    "smollm3": SmolLM3Config(no_rope_layers=[1, 0, 1, 0], mlp_bias=True,
                             **IDS, **SIZES),
    # its norms follow small outputs, which the usual epsilon makes so long that rounding grows
    "olmo2": Olmo2Config(rms_norm_eps=1e-2, **IDS, **SIZES),
    "granite": GraniteConfig(embedding_multiplier=3.0, logits_scaling=1.7, residual_multiplier=0.6,
                             attention_multiplier=0.11, tie_word_embeddings=True, **IDS, **SIZES),
    "glm": GlmConfig(attention_bias=False, **IDS, **SIZES),
    "glm4": Glm4Config(attention_bias=False, **IDS, **SIZES),
    "phi3": Phi3Config(resid_pdrop=0.3, **IDS, **PHI),
    "phi3_long": Phi3Config(rope_parameters=LONG, tie_word_embeddings=True,
                            original_max_position_embeddings=24, sliding_window=20, **IDS, **PHI),
    "olmo3": Olmo3Config(layer_types=LAYERS, sliding_window=20, rope_parameters=ROPES, **IDS,
                         **SIZES),
    "gemma3": Gemma3TextConfig(layer_types=LAYERS, sliding_window=20, query_pre_attn_scalar=40,
                               rope_parameters=ROPES, **IDS, **SIZES),
}  # fmt: skip
ALONE = ("glm", "phi3", "olmo3")  # trained by one process, the others by two


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return folder, write_models(folder, MODELS, partial(shake, ends=("bias", "norm.weight")))


def cases(folder, names, rows, flags=()):
    """{name-out: flags} for `rows` rows a process, half of them with recomputed blocks."""
    found = {}
    for i, name in enumerate(names):
        micro = 1 + i % 2
        more = ["--use_activation_checkpointing", ("true", "false")[i % 2], *flags]
        found[f"{name}-out"] = argv(folder, name, micro, rows // micro, *more)
    return found


SCRIPTS = {
    ("fsdp", 1): (ALONE, 8, []),
    ("fsdp", 2): ([name for name in MODELS if name not in ALONE], 4, ["--reshard_after_forward"]),
    ("pp", 2): (MODELS, 8, []),
    ("fsdp_pp", 2): (MODELS, 8, ["--blocks_per_unit", "1"]),
    ("zero", 2): (MODELS, 4, ZERO["zero3"]),
}


@pytest.mark.parametrize("script, n", [key if key[0] == "fsdp" else slow(*key) for key in SCRIPTS])
def test_equals_plain_loop(script, n, work, tmp_path):
    folder, expected = work
    names, rows, flags = SCRIPTS[script, n]
    found = train(tmp_path, script, n, cases(folder, names, rows, flags))
    for name, (losses, ranks) in found.items():
        name = name.removesuffix("-out")
        assert_equal(losses, ranks, expected[name])


def whole_and_adapters(folder, names, out):
    """Train each model as a whole and by adapters, in out/NAME-whole and out/NAME-lora."""
    runs = {}
    for name in names:
        same = lora.run_flags(folder, name, out)[:-2]
        runs[f"{name}-whole"] = [*same, "--lora_rank", 0, "--lr", 1e-3]
        runs[f"{name}-lora"] = same
    train_cases(out, "fsdp", 1, runs)
    return [*runs]


@pytest.mark.slow
def test_exports_have_the_trainers_loss(work, tmp_path):
    """Of adapters too, merged; and an estimate is printed."""
    folder = work[0]
    whole_and_adapters(folder, MODELS, tmp_path)
    for name in MODELS:
        for kind in ("whole", "lora"):
            run_folder, out = tmp_path / f"{name}-{kind}", tmp_path / f"{name}-{kind}-hf"
            export(run_folder / "checkpoints/step_00000004", out, "fp32", merge=kind == "lora")
            model = AutoModelForCausalLM.from_pretrained(out)
            losses = json.loads((run_folder / "summary.json").read_text())["eval_loss"]
            assert losses["4"] < losses["0"] - 0.05
            assert lora.loss_of(model, folder) == pytest.approx(losses["4"], rel=2e-5), name
        flags = [*lora.run_flags(folder, name, tmp_path / "no"), "--estimate", "--card", "h100"]
        done = run([sys.executable, ROOT / "fsdp/train_fsdp.py", *flags])
        assert done.returncode == 0 and "estimated peak memory" in done.stdout, done.stderr


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_files(name, work):
    """The number of matrix parameters, and what transformers 4 reads in place of the rest."""
    folder = work[0] / name
    config, _ = open_model(folder, SEQ_LEN)
    model = AutoModelForCausalLM.from_pretrained(folder)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert parameters_of(config) == matrices


def test_a_window_is_exported(work, tmp_path, alone):  # noqa: F811
    folder = work[0]
    flags = ["--model_name_or_path", folder / "olmo3", "--seq_len", "64", "--max_steps", "1"]
    data = ["--train_json", folder / "data.jsonl", "--eval_json", "none", "--output_dir", "run"]
    alone(*flags, *data, "--export", "fp32")
    for part in ("model", "hf"):
        written = json.loads((tmp_path / f"run/{part}/config.json").read_text())
        assert written["sliding_window"] == 20 and written["layer_types"] == LAYERS


WRONG = [
    ("smollm3", {"final_logit_softcapping": 30.0}, "smollm3 computes its loss without a cap"),
    ("gemma3", {"final_logit_softcapping": math.inf}, "softcapping inf is not a positive number"),
    ("gemma3", {"final_logit_softcapping": 0.0}, "softcapping 0.0 is not a positive number"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
    ("gemma3", {"use_bidirectional_attention": True}, "attention True is not supported: attention"),
    ("smollm3", {"is_causal": False}, "is_causal False is not supported: attention is causal"),
    ("gemma3", {"sliding_window": None}, "sliding_attention, but sliding_window is not set"),
    ("gemma3", {"sliding_window": 0}, "sliding_window 0 is not a positive number of tokens"),
    ("phi3_long", {"sliding_window": -1}, "sliding_window -1 is not a positive number of tokens"),
    ("phi3_long", {"layer_types": LAYERS}, "phi3 uses sliding_window in every layer"),
    ("smollm3", {"layer_types": LAYERS, "sliding_window": 8}, "but use_sliding_window is false"),
    ("smollm3", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention is not supported"),
    ("smollm3", {"layer_types": ["linear_attention"] * 4}, "linear_attention is not supported"),
    ("granite", {"logits_scaling": 0.0}, "logits_scaling 0.0 is not a positive number"),
    ("glm4", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0}},
     "partial_rotary_factor 0 is not"),
    ("olmo3", {"rope_parameters": ROPES | {"sliding_attention": YARN}}, "yarn of sliding_att"),
    ("olmo3", {"rope_parameters": ROPES | {"full_attention": LONG}}, "longrope is not one of"),
]  # fmt: skip


@pytest.mark.parametrize("name, changes, message", WRONG)
def test_what_is_refused(name, changes, message):
    config = copy.deepcopy(MODELS[name])
    vars(config).update(changes)
    assert message in next(problems_of(config))


@pytest.mark.parametrize("name", ["glm4", "phi3_long"])
def test_transformers_4_rotates_the_same_part(name, tmp_path):
    """It reads the part at the top level only, and of Phi's longrope it takes three keys only."""
    config = copy.deepcopy(MODELS[name])
    config.dtype, rope = "float32", config.rope_parameters
    rope["partial_rotary_factor"] = 0.75
    for more in ({}, {"attention_factor": 1.5}):  # which version 4 has no way to say
        rope |= more
        config.save_pretrained(tmp_path)
        describe_for_version_4(tmp_path, family_of(config))
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["partial_rotary_factor"] == 0.75
        if name == "phi3_long" and not more:
            assert written["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
        again = AutoConfig.from_pretrained(tmp_path).rope_parameters
        assert again.items() >= rope.items()


@pytest.mark.parametrize("name", ["olmo2", "olmo3"])
def test_norms_over_all_heads_are_not_cut(name):
    with pytest.raises(UserError, match="norms over all heads"):
        refuse_shares(MODELS[name], 2)
    refuse_shares(MODELS[name], 1)
