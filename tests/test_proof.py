"""Families without a test of their own: proven at the start of a run, then trained as the plain
loop of test_parity.py does; and what a proof must find."""

import copy
import json
from functools import partial

import pytest
import transformers
from conftest import ZERO, refused, slow, train_cases
from test_families import IDS, cases
from test_parity import SIZES, TOLERANCE, argv, assert_equal, shake, train, write_models
from test_plan import alone  # noqa: F401
from transformers.models.seed_oss import modeling_seed_oss

from fsdp.pieces import use_pieces
from llm_demo.core.decoder import Blocks, skeleton
from llm_demo.model import proof
from llm_demo.model.check_config import problems_of
from llm_demo.model.costs import parameters_of
from llm_demo.model.families import family_of, is_mixture
from llm_demo.model.model_folder import describe_for_version_4
from llm_demo.model.weights_files import open_weights
from llm_demo.run.export_run import export

HEADS = {name: value for name, value in SIZES.items() if name != "head_dim"}
YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=8.0,
    original_max_position_embeddings=16,
    llama_4_scaling_beta=0.1,
    max_position_embeddings=256,
)
LATENT = dict(
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
)
SCALED = dict(
    embedding_multiplier=3.0,
    logits_scaling=1.7,
    residual_multiplier=0.6,
    attention_multiplier=0.11,
)
WINDOWED = dict(
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
    sliding_window=20,
    **SIZES,
)
CONFIGS = {
    "Ministral3Config": dict(rope_parameters=YARN, **SIZES),
    "SeedOssConfig": dict(attention_dropout=0.1, residual_dropout=0.1, **SIZES),
    "Ernie4_5Config": SIZES,
    "ArceeConfig": SIZES,
    "HunYuanDenseV1Config": SIZES,
    # the slope of its activation jumps at -1e-6 and 0: with this epsilon no input is between
    "ApertusConfig": dict(rms_norm_eps=1e-4, **HEADS),
    "HeliumConfig": SIZES,
    "YoutuConfig": dict(LATENT, **HEADS | {"num_key_value_heads": 4}),
    "GraniteMoeHybridConfig": dict(
        shared_intermediate_size=96,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=["attention"] * 4,
        position_embedding_type="rope",
        **SCALED,
        **HEADS,
    ),
    "Glm4MoeConfig": dict(
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        **SIZES,
    ),
    "OlmoeConfig": dict(num_experts=8, num_experts_per_tok=2, **HEADS),
    "MellumConfig": WINDOWED,
    "LagunaConfig": dict(shared_expert_intermediate_size=32, **WINDOWED),
    "Kolibri1Config": dict(shared_expert_intermediate_size=32, **WINDOWED),
    "MiniMaxM2Config": dict(num_local_experts=8, num_experts_per_tok=2, **SIZES),
    "MixtralConfig": dict(num_local_experts=8, num_experts_per_tok=2, **SIZES),
}
MODELS = {
    name: getattr(transformers, name)(tie_word_embeddings=False, **IDS | sizes)
    for name, sizes in CONFIGS.items()
    if hasattr(transformers, name)  # earlier versions know fewer
}
DENSE = [name for name, config in MODELS.items() if not is_mixture(config)]


QUICK = ["GraniteMoeHybridConfig", "LagunaConfig", "MiniMaxM2Config"]
SCRIPTS = [
    ("fsdp", 1, QUICK, 8, []),
    slow("fsdp", 2, list(MODELS), 4, ["--reshard_after_forward"]),
    slow("fsdp_pp", 2, list(MODELS), 8, ["--blocks_per_unit", "1"]),
    slow("pp", 2, DENSE, 8, []),
    slow("zero", 2, DENSE, 4, ZERO["zero3"]),
]


@pytest.mark.parametrize("name", MODELS)
def test_is_proven(name):
    found = proof.compare(proof.small_copy(MODELS[name]))
    assert f"{MODELS[name].model_type} has no test of its own" in found.line
    assert found.adapters is None


@pytest.mark.parametrize("script, n, names, rows, flags", SCRIPTS)
def test_equals_plain_loop(script, n, names, rows, flags, tmp_path):
    models = {name: MODELS[name] for name in names}
    expected = write_models(tmp_path, models, partial(shake, ends=("bias", "norm.weight")))
    found = train(tmp_path, script, n, cases(tmp_path, names, rows, flags))
    for name, (losses, ranks) in found.items():
        name = name.removesuffix("-out")
        for rank in ranks:  # buffers are no parameters
            for buffer in rank["params"].keys() - expected[name]["params"].keys():
                assert buffer.endswith(("act_fn.beta", "act_fn.eps", "e_score_correction_bias"))
                del rank["params"][buffer]
        # two numbers of each of its blocks sum over all tokens
        later = 5e-5 if name == "ApertusConfig" else TOLERANCE
        assert_equal(losses, ranks, expected[name], later)


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", [("pp", []), ("zero", ZERO["zero3"])])
def test_checkpoints_hold_the_buffers_of_files(script, flags, tmp_path):
    """Those of Apertus' activation: an export has them, and a run is resumed."""
    models = {"ApertusConfig": MODELS["ApertusConfig"]}
    write_models(tmp_path, models, partial(shake, ends=("bias", "norm.weight")))
    case = argv(tmp_path, "ApertusConfig", 4, 1, "--save_every", "3", *flags)
    case.remove("--no_save")
    train_cases(tmp_path, script, 2, {"run": case})
    steps = tmp_path / "run/checkpoints"
    train_cases(tmp_path, script, 2, {"again": [*case, "--resume", str(steps / "step_00000003")]})
    export(steps / "step_00000005", tmp_path / "hf", "fp32")
    before, after = open_weights(tmp_path / "ApertusConfig"), open_weights(tmp_path / "hf")
    assert after.shapes == before.shapes
    for name in before.shapes:
        if "act_fn.beta" in name:
            assert after.read(name).equal(before.read(name))


QWEN36 = dict(
    vocab_size=248_320,
    head_dim=256,
    linear_num_key_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    tie_word_embeddings=False,
)
PUBLISHED = {  # sizes of Qwen3.6 and Qwen3.8, 27B, and of Qwen3.6 35B-A3B, as far as they are told
    "Qwen3_5TextConfig": (
        dict(
            hidden_size=5120,
            intermediate_size=17_408,
            num_hidden_layers=64,
            num_attention_heads=24,
            num_key_value_heads=4,
            linear_num_value_heads=48,
        ),
        26.9e9,
    ),
    "Qwen3_5MoeTextConfig": (
        dict(
            hidden_size=2048,
            num_hidden_layers=40,
            num_attention_heads=16,
            num_key_value_heads=2,
            linear_num_value_heads=32,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        34.7e9,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_later_models_of_a_family_are_proven_too(name):
    sizes, parameters = PUBLISHED[name]
    kinds = QWEN36["layer_types"] * (sizes["num_hidden_layers"] // 4)
    config = getattr(transformers, name)(**QWEN36 | sizes | {"layer_types": kinds})
    assert parameters_of(config) == pytest.approx(parameters, rel=2e-3)
    assert proof.compare(proof.small_copy(config)).adapters is None


def roll(method):
    """A token also sees what the one before it saw, whatever document that is of."""
    return lambda self, x, *a, **k: method(self, x, *a, **k) + x.roll(1, -2)


def stop_gradient(method):
    return lambda self, x: method(self, x.detach() if x.shape[-2] > 100 else x)


def cap(method):
    def forward(self, *args, **kwargs):
        out = method(self, *args, **kwargs)
        out.logits = out.logits.tanh()
        return out

    return forward


@pytest.mark.parametrize(
    "kind, wrong, message",
    [
        ("MLP", roll, "the loss by .*, first in what model.layers.0.mlp returns"),
        ("MLP", stop_gradient, "the gradient of model.layers.1.post_attention_layernorm.weight by"),
        ("ForCausalLM", cap, "the loss by .*, in what follows the last block"),
    ],
)
def test_what_is_not_computed_alike_is_refused_and_named(kind, wrong, message, monkeypatch):
    changed = getattr(modeling_seed_oss, f"SeedOss{kind}")
    monkeypatch.setattr(changed, "forward", wrong(changed.forward))
    with refused(f"seed_oss is not trained as transformers .* computes it: .* {message}"):
        proof.compare(proof.small_copy(MODELS["SeedOssConfig"]))


def test_a_copy_has_each_kind_that_the_configuration_lists(monkeypatch):
    """Though the blocks themselves are alike."""
    monkeypatch.setattr(proof, "block_kind", lambda block: [])
    kinds = ["full_attention"] * 3 + ["sliding_attention"] + ["full_attention"] * 4
    config = transformers.CwmConfig(**SIZES | {"num_hidden_layers": 8, "layer_types": kinds})
    assert proof.small_copy(config).layer_types == kinds[:4]


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("Glm4MoeConfig", {"n_group": 3}, "n_group 3 does not divide 8 experts"),
        ("Glm4MoeConfig", {"n_group": 0}, "n_group 0 does not divide 8 experts"),
        ("Ministral3Config", {"sliding_window": 0}, "sliding_window 0 is not a positive number"),
        ("MixtralConfig", {"sliding_window": -1}, "sliding_window -1 is not a positive number"),
    ],
)
def test_keys_that_a_copy_replaces_are_looked_at(name, changes, message):
    config = copy.deepcopy(MODELS[name])
    vars(config).update(changes)
    assert message in next(problems_of(config))


def test_not_many_kinds_of_blocks():
    config = transformers.DiffLlamaConfig(num_hidden_layers=100)  # each has a constant of its own
    with refused("no small copy of its configuration can be built to compare: it has 100 kinds"):
        proof.prove(config)


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_configuration_is_read_as_it_was(name, tmp_path):
    config = copy.deepcopy(MODELS[name])
    config.dtype = "float32"
    config.save_pretrained(tmp_path)
    before = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    describe_for_version_4(tmp_path, family_of(config))
    after = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    (after["rope_parameters"] or {}).pop("type", None)  # an older name of rope_type
    assert after.items() >= before.items()


def test_adapters_over_recomputed_blocks_whose_mlp_has_another_name():
    lm = skeleton(MODELS["GraniteMoeHybridConfig"], "bucketed")
    unit = Blocks(list(lm.model.layers), checkpointing=True)
    use_pieces(unit.requires_grad_(False))


def test_a_proof_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_DEMO_CACHE", str(tmp_path))
    first = proof.prove(MODELS["ArceeConfig"])
    assert "arcee has no test of its own; a small copy of 2 blocks equals" in first.line
    (file,) = (tmp_path / "proofs").iterdir()
    file.write_text(json.dumps({"line": "as kept", "adapters": None}))
    assert proof.prove(MODELS["ArceeConfig"]).line == "as kept"
    for damaged in ("{", "[]", '{"text": 1}'):
        file.write_text(damaged)
        assert proof.prove(MODELS["ArceeConfig"]) == first
    assert proof.prove(MODELS["HeliumConfig"]).line != "as kept"
