"""Models with sliding windows: loss and all gradients on each backend that a CPU has, against
transformers' own forward, one document at a time. test_attention.py tries the backends alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_families import IDS, LAYERS, ROPES
from test_parity import SIZES, relative, shake
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import Blocks, DecoderLoss, skeleton
from llm_demo.core.rows import position_ids
from llm_demo.model.costs import windows_of

CPU, WINDOW = torch.device("cpu"), 16
LENGTHS = [WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW]
SMALL = SIZES | IDS | {"vocab_size": 97, "tie_word_embeddings": False, "rms_norm_eps": 1e-2}
SMALL |= {"sliding_window": WINDOW}
SOME = SMALL | {"use_sliding_window": True, "max_window_layers": 2}  # layers, the last or the first
EACH = SMALL | {"layer_types": LAYERS, "rope_parameters": ROPES}
CAPPED = EACH | {"final_logit_softcapping": 1.5, "global_head_dim": 32, "attention_k_eq_v": True}
CAPPED |= {"num_global_key_value_heads": 1}
MODELS = {
    "mistral": MistralConfig(**SMALL),
    "phi3": Phi3Config(**{name: value for name, value in SMALL.items() if name != "head_dim"}),
    "qwen3": Qwen3Config(**SOME),
    "gemma3": Gemma3TextConfig(**EACH),
    "olmo3": Olmo3Config(**EACH),
    "gemma4": Gemma4UnifiedTextConfig(**CAPPED),
    "gemma4_experts": Gemma4TextConfig(
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=48,
        hidden_size_per_layer_input=0,
        **CAPPED,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, **SOME
    ),
}
IMPLS = "sdpa", "bucketed", "bucketed_math", "math"


@pytest.fixture(scope="module")
def expected():
    """name -> (transformers' model, the documents' ids, loss, {name: gradient})."""
    found = {}

    def of(name):
        if name in found:
            return found[name]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation="eager")
        with torch.no_grad():
            for parameter, values in model.named_parameters():
                shake(parameter, values, ends=("bias", "norm.weight"))
        documents, total = [torch.randint(97, (n,)) for n in LENGTHS], 0.0
        for ids in documents:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits, ids[1:], reduction="sum")
            loss.backward()
            total += loss.item()
        grads = {n: p.grad for n, p in model.named_parameters()}
        found[name] = model, documents, total, grads
        return found[name]

    return of


def errors(name, impl, expected, window=WINDOW):
    """Of the loss and each gradient of a packed row, or for sdpa of padded ones."""
    model, documents, loss, grads = expected(name)
    config = copy.deepcopy(MODELS[name])
    config.sliding_window = window
    lm = skeleton(config, impl)
    lm.load_state_dict(model.state_dict(), assign=True)
    blocks = Blocks(list(lm.model.layers), checkpointing=name == "qwen3")
    rows = [[ids] for ids in documents] if impl == "sdpa" else [documents]
    S = max(sum(map(len, row)) for row in rows)
    ids, targets = torch.zeros(len(rows), S, dtype=torch.int64), torch.full((len(rows), S), -100)
    ends = [0]
    for b, row in enumerate(rows):
        at = 0
        for document in row:
            end = at + len(document)
            ids[b, at:end], targets[b, at : end - 1] = document, document[1:]
            ends.append(b * S + end)
            at = end
        if at < S:
            ends.append((b + 1) * S)
    cu = torch.tensor(ends, dtype=torch.int32)
    index = (targets.flatten() >= 0).nonzero().flatten()
    layout = position_ids(cu, ids.shape), make_documents(cu, tuple(ids.shape), impl, CPU)
    ours = DecoderLoss(lm, [blocks])(ids, *layout, index, targets.flatten()[index])
    ours.backward()
    found = {n: relative(p.grad, grads[n]) for n, p in lm.named_parameters()}
    return abs(ours.item() / loss - 1), max(found.values())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers_for_each_document(name, impl, expected):
    assert set(windows_of(MODELS[name])) - {None} == {WINDOW}
    loss, gradient = errors(name, impl, expected)
    assert loss < 1e-5 and gradient < 1e-4


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_a_window_of_one_token_more_or_less_is_seen(impl, window, expected):
    loss, gradient = errors("mistral", impl, expected, window)
    assert loss > 1e-5 and gradient > 1e-3
