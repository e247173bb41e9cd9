"""--adapter: adapters that PEFT has made, trained on as PEFT trains them on; what is refused."""

import json
import shutil
from types import SimpleNamespace

import pytest
import test_moe as moe
import test_parity as parity
import torch
from conftest import ROOT, assert_same_tensors, refused, smaller_model, train_cases
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_lora import RANK, at, by_our_names, last_loss, loss_of, ours, run_flags
from test_parity import assert_equal, plain_loop, train
from test_plan import alone  # noqa: F401
from tiny_tokenizer import packs_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fsdp.flags import GROUPS
from llm_demo.flags.args import parse_args
from llm_demo.model.adapter_folder import BASE, BITS, open_adapter
from llm_demo.model.adapters import ALL, add_adapter, choose_lora, matrices_in, origin, start_of
from llm_demo.model.weights_files import base_digest
from llm_demo.options.lora import factors_of

HOW = {  # of adapters
    "tied": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "lora_alpha": 5},
    "deepseek": {"target_modules": ["q_b_proj", "o_proj"], "lora_alpha": 9, "target_parameters": [
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """(a folder with models, each with an adapter of values as if trained, PEFT's results)."""
    folder = tmp_path_factory.mktemp("adapter")
    models = {"tied": parity.MODELS["tied"], "deepseek": moe.MODELS["deepseek"]}
    models, tokenizer = parity.smaller_vocabulary(models, folder / "tokenizer")
    parity.write_rows(folder / "data.jsonl")
    packs, results = packs_of(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN), {}
    for name, config in models.items():
        torch.manual_seed(0)
        config._experts_implementation = "eager"
        base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        base.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        base = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        base.config._experts_implementation = "eager"
        how = LoraConfig(r=RANK, task_type="CAUSAL_LM", **HOW[name])
        model = get_peft_model(base, how)
        for p in model.parameters():
            if p.requires_grad:
                p.data.normal_(std=0.1)
        model.save_pretrained(folder / f"{name}-adapter")
        found = plain_loop(model.to(parity.DEVICE), packs)
        found["grads"] = [by_our_names(model, step) for step in found["grads"]]
        results[name] = found | {"params": by_our_names(model, found["params"])}
    return folder, results


CASES = {  # (script, processes, model, micro, accumulation, further flags)
    "plain": ("fsdp", 1, "tied", 4, 2, ["--no_fsdp"]),
    "agrees": ("fsdp", 1, "tied", 8, 1, ["--lora_rank", "6", "--lora_targets", "down_proj,q_proj"]),
    "experts": ("fsdp", 1, "deepseek", 2, 4, ["--use_activation_checkpointing"]),
    "two": ("fsdp", 2, "tied", 2, 2, ["--reshard_after_forward"]),
    "two_shares": ("fsdp", 2, "tied", 4, 2, ["--tensor_parallel", "2"]),
    "two_spread": ("fsdp", 2, "deepseek", 1, 4, ["--expert_parallel", "2"]),
    "stages": ("fsdp_pp", 2, "tied", 4, 2, []),
}


@pytest.mark.parametrize("kind, processes", [("fsdp", 1), ("fsdp", 2), ("fsdp_pp", 2)])
def test_trains_on_as_peft_does(kind, processes, work):
    folder, expected = work
    cases = {
        case: parity.argv(folder, name, *split, "--adapter", folder / f"{name}-adapter", *more)
        for case, (script, n, name, *split, more) in CASES.items()
        if (script, n) == (kind, processes)
    }
    for case, (losses, ranks) in train(folder, kind, processes, cases).items():
        assert_equal(losses, ranks, expected[CASES[case][2]])


def test_an_export_is_trained_on_and_exported_again(work):
    """With experts, whose files have another layout: it ends as PEFT says, and begins so."""
    folder = work[0]
    flags = [*run_flags(folder, "deepseek", "", "--export", "fp32"), "--lora_rank", RANK]
    first = [*flags, "--adapter", folder / "deepseek-adapter"]
    train_cases(folder, "fsdp", 1, {
        "run": first,
        "again": [*first, "--resume", at(folder / "run", 2)],
        "on": [*flags, "--adapter", folder / "run/hf"],
    })  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(folder / "deepseek", dtype=torch.float32)
    found = loss_of(PeftModel.from_pretrained(base, folder / "run/hf"), folder)
    assert found == pytest.approx(last_loss(folder / "run"), rel=1e-5)
    began = json.loads((folder / "on/summary.json").read_text())["eval_loss"]["0"]
    assert began == pytest.approx(last_loss(folder / "run"), rel=1e-6)
    assert open_adapter(str(folder / "run/hf")).made_for
    assert " from `deepseek` with the adapter `hf` on " in (folder / "on/hf/README.md").read_text()
    assert "was trained over" not in (folder / "on/train.log").read_text()
    assert_same_tensors(at(folder / "run", 4), at(folder / "again", 4))
    said = f"resume: adapters continue from the checkpoint, not from {folder}/deepseek-adapter"
    assert said in (folder / "again/train.log").read_text()


def test_what_the_log_says_of_another_base(tmp_path, work):
    base = {"path": "here", "weights": "1"}
    args = SimpleNamespace(base_bits=16, model_name_or_path="here")
    shutil.copytree(work[0] / "tied-adapter", tmp_path / "adapter")
    values = load_file(tmp_path / "adapter/adapter_model.safetensors")
    for other, bits, said in (
        (base | {"path": "there"}, "16", None),
        (base | {"weights": "2"}, "16", "trained over other weights"),
        (base, "4", "base in 4 bits, here it is in 16"),
    ):
        noted = {BASE: base_digest(other), BITS: bits}
        save_file(values, tmp_path / "adapter/adapter_model.safetensors", metadata=noted)
        _, *warnings = origin(open_adapter(str(tmp_path / "adapter")), args, base)
        assert len(warnings) == (said is not None) and all(said in line for line in warnings)


def change(folder, config=None, tensors=None):
    """Change an adapter's files; a value of None is left out."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
    file = folder / "adapter_model.safetensors"
    values = load_file(file) | (tensors or {})
    save_file({name: t for name, t in values.items() if t is not None}, file)


LAYER = "base_model.model.model.layers.1.self_attn"
CONFIGS = {  # what is changed in adapter_config.json: what is said
    "use_dora true can't be applied exactly: merge": {"use_dora": True},
    'bias "all" can\'t be applied': {"bias": "all"},
    r'modules_to_save \["lm_head"\] can\'t be': {"modules_to_save": ["lm_head"]},
    r'rank_pattern {"q_proj": 4} can\'t be': {"rank_pattern": {"q_proj": 4}},
    r"layers_to_transform \[0\] can't be": {"layers_to_transform": [0]},
    "trainable_token_indices 0 can't be": {"trainable_token_indices": 0},
    "fan_in_fan_out true can't be": {"fan_in_fan_out": True},
    'init_lora_weights "pissa" can\'t be': {"init_lora_weights": "pissa"},
    'peft_type "LOHA" can\'t be': {"peft_type": "LOHA"},
    'task_type "SEQ_CLS" can\'t be': {"task_type": "SEQ_CLS"},
    r'a_new_key {"x": 1} can\'t be': {"a_new_key": {"x": 1}},
    "r True and lora_alpha .* are not": {"r": True},
    "r 1000": {"r": 10**30},
    "lora_alpha 0.0 are not": {"lora_alpha": 0},
    "adapter_config.json: int too large": {"lora_alpha": 10**400},
    "lora_alpha nan are not": {"lora_alpha": float("nan")},
    'use_rslora "no" can\'t be': {"use_rslora": "no"},
    r"layers.0.* has shape \[6, \d+\], but rank 5 and this": {"r": 5},
    "target_modules has v_proj, of which there is no factor": {
        "target_modules": ["q_proj", "v_proj", "down_proj"]
    },
}
TENSORS = {  # the same of adapter_model.safetensors
    "layers.1.self_attn.q_proj.lora_A.weight is missing": {f"{LAYER}.q_proj.lora_A.weight": None},
    "layers.0.self_attn.v_proj.lora_A.weight is missing": {
        f"{LAYER}.v_proj.lora_A.weight": torch.zeros(RANK, 64)},
    "model.lm_head.lora_A.weight is not a weight": {
        "base_model.model.lm_head.lora_A.weight": torch.zeros(RANK, 64)},
    "layers.9.self_attn.q_proj.lora_A.weight is not a weight": {
        "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(RANK, 64)},
    r"lora_A.weight has shape \[6, 32\], but rank 6 and this model imply \[6, 64\]": {
        f"{LAYER}.q_proj.lora_A.weight": torch.zeros(RANK, 32)},
    "lora_magnitude_vector.weight is not a weight": {
        f"{LAYER}.q_proj.lora_magnitude_vector.weight": torch.zeros(64)},
    "q_proj.lora_A.weight is not finite": {
        f"{LAYER}.q_proj.lora_A.weight": torch.full((RANK, 64), torch.inf)},
    "q_proj.lora_A.weight is of type I64": {
        f"{LAYER}.q_proj.lora_A.weight": torch.zeros(RANK, 64, dtype=torch.int64)},
}  # fmt: skip


@pytest.mark.parametrize("said", [*CONFIGS, *TENSORS])
def test_what_cannot_be_trained_on_exactly_is_refused(said, work, tmp_path, record_property):
    record_property("bad inputs", 1)
    shutil.copytree(work[0] / "tied-adapter", tmp_path / "adapter")
    change(tmp_path / "adapter", CONFIGS.get(said), TENSORS.get(said))
    with refused(said):
        read_all(tmp_path / "adapter", parity.MODELS["tied"])


def read_all(folder, config, targets=None):
    adapter = open_adapter(str(folder))
    _, read = start_of(adapter, targets or ",".join(adapter.targets), config)
    lora = choose_lora(
        SimpleNamespace(
            lora_rank=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=0.0,
            lora_targets=",".join(adapter.targets), base_bits=16,
        ),
        config, {},
    )  # fmt: skip
    shapes = factors_of(lora.facts(), matrices_in(config))
    return {name: read(name) for name in shapes}


@pytest.mark.parametrize("name", HOW)
def test_a_chat_adds_an_adapter_as_peft_does(name, work):
    folder, ids = work[0], torch.arange(40)[None]
    base, same = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for _ in "12"
    )
    before = base(ids).logits
    adapter = open_adapter(str(folder / f"{name}-adapter"))
    _, read = start_of(adapter, ",".join(adapter.targets), base.config)
    add_adapter(base, adapter, read)
    expected = PeftModel.from_pretrained(same, folder / f"{name}-adapter")(ids).logits
    torch.testing.assert_close(base(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert (before - expected).abs().max() > 0.01


@pytest.mark.parametrize("how", [
    {"target_modules": "all-linear"}, {"target_modules": r".*\.(q|o)_proj"},
    {"target_modules": ["self_attn.k_proj"], "init_lora_weights": "orthogonal"},
], ids=["all", "regular expression", "suffix"])  # fmt: skip
def test_what_peft_calls_targets(how, work, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(work[0] / "tied", dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=RANK, **how), autocast_adapter_dtype=False)
    model.save_pretrained(tmp_path)
    found = read_all(tmp_path, parity.MODELS["tied"])
    wanted = {ours(n): p for n, p in model.named_parameters() if ".lora_" in n}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(t, wanted[name].float()) for name, t in found.items())


def test_targets_that_contradict_the_adapter_are_refused(work):
    with refused("--lora_targets all-linear contradicts --adapter .*, which has q_proj,down_proj"):
        read_all(work[0] / "tied-adapter", parity.MODELS["tied"], ALL)


def test_flags_are_set_to_what_the_adapter_says(work):
    folder = str(work[0] / "tied-adapter")
    args = parse_args("", *GROUPS, argv=["--adapter", folder])
    assert (args.lora_rank, args.lora_targets) == (RANK, "down_proj,q_proj")
    assert args.lora_alpha == pytest.approx(5 * RANK**0.5)
    for given in ("lora_rank 0", "lora_rank 8", "lora_alpha 32", "lora_alpha 5"):
        with refused(f"--{given} contradicts --adapter"):
            parse_args("", *GROUPS, argv=["--adapter", folder, *f"--{given}".split()])


ZERO = "whose row of {} holds 0 only: it was never trained, and adapters do not train it"
BESIDE = "whose row of {} equals that of the token beside it: it was"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ENDS = {  # a model's rows of <|im_end|>: (tied, {matrix: values}, what is said)
    "trained": (True, {}, None),
    "zero": (True, {EMBEDDING: 0}, ZERO.format(EMBEDDING)),
    "tiny": (True, {EMBEDDING: torch.arange(64) * 1e-24}, ZERO.format(EMBEDDING)),
    "one number": (True, {EMBEDDING: 0.5}, ZERO.format(EMBEDDING).replace("holds 0", "holds 0.5")),
    "beside": (True, {EMBEDDING: "beside"}, BESIDE.format(EMBEDDING)),
    "own head": (False, {HEAD: 0}, ZERO.format(HEAD)),
    "own head, beside": (False, {HEAD: "beside"}, BESIDE.format(HEAD)),
    "context": (False, {EMBEDDING: 0}, ZERO.format(EMBEDDING)),
    "padding": (False, {EMBEDDING: 0, "pad": True}, None),
}


@pytest.mark.parametrize("case", ENDS)
def test_an_end_of_answers_that_was_never_trained_is_named(case, tmp_path, alone, capsys):  # noqa: F811
    tied, rows, said = ENDS[case]
    folder = smaller_model(tmp_path / "model", num_hidden_layers=1, tie_word_embeddings=tied)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, beside = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    config = AutoConfig.from_pretrained(folder)
    config.pad_token_id = end if rows.pop("pad", False) else 0
    model = AutoModelForCausalLM.from_config(config)
    for name, value in rows.items():
        matrix = model.get_parameter(name).data
        matrix[end] = matrix[beside] if value == "beside" else value
    model.save_pretrained(folder)
    flags = ["--model_name_or_path", folder, "--lora_rank", "4", "--estimate", "--seq_len", "64"]
    alone(*flags, "--train_json", ROOT / "data/first_run.jsonl", "--eval_json", "none")
    warned = [x for x in capsys.readouterr().out.splitlines() if "never trained" in x]
    assert len(warned) == (said is not None), warned
    if said:
        assert f"warning: answers end with <|im_end|>, {said}" in warned[0]
        assert "Train the whole model, or start from its chat version" in warned[0]
