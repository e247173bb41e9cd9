"""Gemma 4's text: two widths of heads, experts beside the network, a soft cap of logits. Compared
with transformers' own forward, one document at a time. test_windows.py has documents beyond the
window on each backend, test_whole.py folders with images."""

import copy
import functools
import itertools
import json
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import test_four_bits_experts as four_bits
import test_lora as lora
import test_parity as parity
import torch
import torch.nn.functional as F
from conftest import ZERO, run, slow, train_cases
from test_attention import CPU, H100, assert_equals_each_alone
from test_families import IDS, LAYERS, cases
from test_labels import call, call_and_answer, chat, one
from test_loss import case, set_chunk_rows  # noqa: F401
from test_parity import SIZES, assert_equal, shake, train, write_models
from test_windows import errors
from test_windows import expected as of_windows  # noqa: F401
from tiny_tokenizer import golden, make_tokenizer, packs_of
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
)

from llm_demo.core import attention, loss
from llm_demo.core.errors import UserError
from llm_demo.core.loss import cross_entropy_sum, score
from llm_demo.core.rows import label_positions
from llm_demo.data import reasons
from llm_demo.data.turns import Record
from llm_demo.evaluate import mean_loss
from llm_demo.machine import probes
from llm_demo.model import proof
from llm_demo.model.check_config import problems_of
from llm_demo.model.costs import (
    active_of,
    flops_of_slot,
    kinds_of_heads,
    on_meta,
    parameters_of,
    refuse_shares,
    sizes_of,
)
from llm_demo.model.families import family_of
from llm_demo.model.low_bits import fp8_config
from llm_demo.model.model_folder import describe_for_version_4
from llm_demo.model.source import load_config
from llm_demo.model.weights_files import in_files
from llm_demo.options import wide_heads
from llm_demo.run.choices import choose_backends, fused_kernels
from llm_demo.run.export_run import export

CAP = 1.5  # so far below the largest logits that they are bent
LATER = 3e-5  # of gradients after the first step, see test_parity.py
ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
TEXT = dict(
    layer_types=LAYERS,
    sliding_window=20,
    rope_parameters=ROPES,
    global_head_dim=32,
    attention_k_eq_v=True,
    final_logit_softcapping=CAP,
    rms_norm_eps=1e-2,  # as of OLMo 2 in test_families.py
    tie_word_embeddings=True,
    **IDS,
    **SIZES,
)
PLAIN = dict(hidden_size_per_layer_input=0, **TEXT)
MIXED = dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=32)
MODELS = {
    "12b": Gemma4UnifiedTextConfig(num_global_key_value_heads=1, **TEXT),
    "31b": Gemma4TextConfig(num_global_key_value_heads=2, **PLAIN),
    "26b": Gemma4TextConfig(num_global_key_value_heads=2, **MIXED, **PLAIN),
}
DENSE = ["12b", "31b"]


def change(name, values):
    """Norms that are not one. Those of queries and keys are small, as nothing else scales scores:
    with larger ones rounding grows from step to step."""
    shake(name, values, ends=("norm.weight", "router.scale", "per_expert_scale"))
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        values *= 0.3


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma4")
    return folder, write_models(folder, MODELS, change)


RESHARD = ["--reshard_after_forward"]
SHARES = ["--tensor_parallel", "2"]
SCRIPTS = [
    ("fsdp", 1, list(MODELS), 8, []),
    slow("fsdp", 2, list(MODELS), 4, RESHARD),
    ("fsdp", 2, ["31b", "26b"], 8, SHARES),
    slow("fsdp", 2, ["26b"], 4, ["--expert_parallel", "2"]),
    slow("fsdp", 2, list(MODELS), 8, ["--sequence_parallel", "2"]),
    slow("fsdp_pp", 2, list(MODELS), 8, ["--blocks_per_unit", "1"]),
    slow("fsdp_pp", 4, ["31b", "26b"], 8, SHARES),
    slow("pp", 2, DENSE, 8, []),
    slow("zero", 2, DENSE, 4, ZERO["zero3"]),
]


@pytest.mark.parametrize("script, n, names, rows, flags", SCRIPTS)
def test_equals_plain_loop(script, n, names, rows, flags, work, tmp_path):
    folder, expected = work
    found = train(tmp_path, script, n, cases(folder, names, rows, flags))
    for name, (losses, ranks) in found.items():
        for rank in ranks:  # a buffer is no parameter
            for buffer in [key for key in rank["params"] if key.endswith("layer_scalar")]:
                del rank["params"][buffer]
        assert_equal(losses, ranks, expected[name.removesuffix("-out")], later=LATER)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_stays_close(dtype, work, tmp_path):
    folder, expected = work
    found = train(tmp_path, "fsdp", 1, cases(folder, ["31b", "26b"], 8, ["--dtype", dtype]))
    rough, loose = parity.BOUNDS[dtype]
    for name, (losses, ranks) in found.items():
        wanted = expected[name.removesuffix("-out")]
        assert losses == pytest.approx(wanted["loss"], rel=rough)
        norms = [step["norm"] for step in ranks[0]["steps"]]
        assert norms == pytest.approx(wanted["norm"], rel=loose)


# ---------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """(folder of models whose rows are whole blocks of 4 bits, (model, whether its values are
    those of 4 bits) -> PEFT's results)."""
    folder = tmp_path_factory.mktemp("adapted")
    models, tokenizer = parity.smaller_vocabulary(MODELS, folder / "tokenizer")
    parity.write_rows(folder / "data.jsonl")
    packs = packs_of(str(folder / "data.jsonl"), tokenizer, seq_len=parity.SEQ_LEN)
    for name, config in models.items():
        config.intermediate_size = 128
        if name == "26b":
            config.moe_intermediate_size = 64
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for key, p in model.named_parameters():
                change(key, p)
        for place in (folder, folder / "values"):
            model.save_pretrained(place / name)
            tokenizer.save_pretrained(place / name)
            four_bits.rounded(model)

    @functools.cache
    def expected(name, in_4_bits):
        model = lora.with_peft(folder / "values" if in_4_bits else folder, name, "all-linear")
        found = parity.plain_loop(model, packs)
        found["grads"] = [lora.by_our_names(model, step) for step in found["grads"]]
        return found | {"params": lora.by_our_names(model, found["params"])}

    return folder, expected


FOUR_BITS = ["--base_bits", "4"]
ADAPTED = [  # (script, processes, {case: (model, micro, accumulation, further flags)})
    ("fsdp", 1, {"12b": (4, 2, FOUR_BITS), "26b": (8, 1, ["--use_activation_checkpointing"])}),
    slow("fsdp", 2, {"31b": (2, 2, FOUR_BITS), "26b": (4, 1, [*FOUR_BITS, *RESHARD])}),
    slow("fsdp_pp", 2, {"31b": (2, 4, []), "26b": (4, 2, FOUR_BITS)}),
    slow("fsdp", 2, {"26b": (4, 2, SHARES), "12b": (4, 2, ["--sequence_parallel", "2"])}),
]


@pytest.mark.parametrize("script, n, wanted", ADAPTED)
def test_adapters_equal_peft(script, n, wanted, adapted, tmp_path):
    """On everything but routers: the experts and the network beside them."""
    folder, expected = adapted
    argv = {}
    for name, (micro, accum, more) in wanted.items():
        how = ["--lora_rank", str(lora.RANK), "--lora_alpha", str(lora.ALPHA), *more]
        argv[name] = parity.argv(folder, name, micro, accum, *how)
    for name, (losses, ranks) in train(tmp_path, script, n, argv).items():
        found = expected(name, "--base_bits" in wanted[name][-1])
        assert_equal(losses, ranks, found, later=5 * parity.TOLERANCE)


HELD_OUT = [("fsdp", 1, "26b"), slow("fsdp_pp", 2, "12b"), slow("pp", 2, "12b")]


@pytest.mark.parametrize("script, n, name", HELD_OUT)
def test_exports_have_the_trainers_loss(script, n, name, work, tmp_path):
    """As transformers computes it, and `evaluate`: with merged adapters, in pp of all weights."""
    folder, data = work[0], work[0] / "data.jsonl"
    flags = lora.run_flags(folder, name, tmp_path / "run")
    if script == "pp":
        at = flags.index("--lora_rank")
        del flags[at : at + 2]
    train_cases(tmp_path, script, n, {"run": flags})
    last = tmp_path / "run/checkpoints/step_00000004"
    export(last, tmp_path / "hf", "fp32", merge=script != "pp")
    losses = json.loads((tmp_path / "run/summary.json").read_text())["eval_loss"]
    assert losses["4"] < losses["0"] - 0.05
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert lora.loss_of(model, folder) == pytest.approx(losses["4"], rel=2e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    packs = packs_of(str(data), tokenizer, seq_len=parity.SEQ_LEN, pack=False)
    found, *_ = mean_loss(16, model, packs, len(packs))
    assert found == pytest.approx(losses["4"], rel=2e-5)


# ---------------------------------------------------------------- the cap


def capped_sum(hidden, weight, labels):
    """PyTorch's own cross-entropy of capped logits."""
    logits = (hidden @ weight.T).flatten(0, 1)
    return F.cross_entropy(CAP * (logits / CAP).tanh(), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_loss_of_capped_logits(dtype, bound, chunk, set_chunk_rows):  # noqa: F811
    """Its value, and the gradients of hidden states and of the head."""
    set_chunk_rows(chunk)
    hidden, weight, labels = case(17, dtype)
    mine = cross_entropy_sum(hidden, weight, *label_positions(labels), cap=CAP)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    plain = capped_sum(*wide, labels)
    assert mine.item() == pytest.approx(plain.item(), rel=bound)
    expected = torch.autograd.grad(plain, wide)
    for a, e in zip(torch.autograd.grad(mine, (hidden, weight)), expected, strict=True):
        assert (a.double() - e).norm() < bound * e.norm()
    index, targets = label_positions(labels)
    found, wrong = score(hidden, weight, index, targets, torch.zeros_like(index), cap=CAP).tolist()
    assert found == pytest.approx(plain.item(), rel=bound) and wrong == 1


KERNEL = """
import types
import torch
import torch.nn.functional as F
from llm_demo.core.loss_kernel import loss_of_logits
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(warp_size=32)
torch.manual_seed(0)
logits, targets = torch.randn(3, 8200) * 5, torch.tensor([1, 8199, 50])
wide = logits.double().requires_grad_()
expected = F.cross_entropy(3 * (wide / 3).tanh(), targets, reduction="sum")
expected.backward()
found = loss_of_logits(logits, targets, 2.0, cap=3.0)
torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)
torch.testing.assert_close(logits.double() / 2, wide.grad, rtol=1e-5, atol=1e-6)
"""


def test_the_kernel_caps_logits():
    """Triton's interpreter runs it, on more columns than are read at once."""
    pytest.importorskip("triton")
    done = run([sys.executable, "-c", KERNEL], fresh=True, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- labels

# Of the form of Gemma 4's: a tool's result goes on with the model's turn, a call ends with the
# token that a result begins with, and reasoning is a channel, which stands before calls alone.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ 'response:' + m.content + ';' }}"
    "{% else %}{% if loop.first or loop.previtem.role != 'tool' %}"
    "{{ '<S>' + {'assistant': 'model'}.get(m.role, m.role) + '\n' }}{% endif %}"
    "{% if m.reasoning_content and m.tool_calls %}"
    "{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ 'call:' + c.function.name }}{% endfor %}"
    "{{ m.content + ('<P>' if m.tool_calls else '<E>\n') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<S>model\n' }}"
    "{% if enable_thinking %}{{ '<|channel>thought\n' }}{% endif %}{% endif %}"
)
# the 26B's and 31B's later ones ask for answers without reasoning by an empty block
CLOSES = TEMPLATE.replace("{% if enable", "{% if not enable").replace(
    "thought\n' }}", "thought\n<channel|>' }}"
)
ASKED = "<S>user\nhi<E>\n<S>model\n"
THINKS = {"enable_thinking": True}
THOUGHT = "<|channel>thought\n"
REASONED = call(reasoning_content="r")
ANSWERED = Record([*REASONED.messages, *call_and_answer().messages[2:], *chat("b", "c").messages])
BEHIND = "response:7;⟦so<E>⟧\n<S>user\nb<E>\n<S>model\n⟦c<E>⟧\n"
LABELS = {
    "two turns": (chat("hi", "yo", "b", "c"),
                  ASKED + "⟦yo<E>⟧\n<S>user\nb<E>\n<S>model\n⟦c<E>⟧\n"),
    "a call": (call(), ASKED + "⟦call:f<P>⟧"),
    "a call, its result and an answer": (call_and_answer(),
                                         ASKED + "⟦call:f<P>⟧response:7;⟦so<E>⟧\n"),
    "reasoning before a call": (REASONED, f"{ASKED}⟦{THOUGHT}r\n<channel|>call:f<P>⟧"),
    "the same, and more turns": (ANSWERED, f"{ASKED}⟦{THOUGHT}r\n<channel|>call:f<P>⟧{BEHIND}"),
    "asked to reason": (REASONED._replace(chat_template_kwargs=THINKS),
                        f"{ASKED}{THOUGHT}⟦r\n<channel|>call:f<P>⟧"),
    "reasoning that is dropped": (chat("hi", "yo", reasoning_content="r"), reasons.NO_REASONING),
}  # fmt: skip


@pytest.mark.parametrize("template", [TEMPLATE, CLOSES])
@pytest.mark.parametrize("name", LABELS)
def test_labels(name, template):
    record, expected = LABELS[name]
    if expected != reasons.NO_REASONING:
        expected = golden(expected)
    if template == CLOSES and record.chat_template_kwargs:
        expected = golden(f"{ASKED}⟦{THOUGHT}r\n<channel|>call:f<P>⟧")
    assert one(record, make_tokenizer(template)) == expected


# ---------------------------------------------------------------- backends


@pytest.fixture
def wide_heads_on_a_cpu():
    """The kernel for wide heads, in plain PyTorch."""

    def weights_of(q, k, cu, scale, window):
        for start, end in itertools.pairwise(cu.tolist()):
            at, n = slice(start, end), end - start
            scores = torch.einsum("qhd,khd->hqk", q[at], k[at]) * scale
            mask = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - (window or max(n, 1)))
            yield at, scores.masked_fill(~mask, -torch.inf).softmax(-1)

    def forward_of(q, k, v, cu, longest, scale, window):
        assert 0 < longest == cu.diff().max() and q.shape == k.shape and cu[-1] == len(q)
        assert (len(cu) - 1) * longest <= 2 * len(q)  # the tokens that its backward stores
        parts = weights_of(q, k, cu, scale, window)
        out = torch.cat([torch.einsum("hqk,khd->qhd", p, v[at]) for at, p in parts])
        sums = len(cu) - 1, q.shape[1], -(-longest // 32) * 32
        return out, q.new_full(sums, len(q), dtype=torch.float32)

    def backward_of(grad, q, k, v, out, sums, cu, longest, scale, window):
        assert out.shape == grad.shape and (sums == len(q)).all()
        found = []
        for at, p in weights_of(q, k, cu, scale, window):
            of_p = torch.einsum("qhd,khd->hqk", grad[at], v[at])
            of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale
            of_q = torch.einsum("hqk,khd->qhd", of_scores, k[at])
            of_k = torch.einsum("hqk,qhd->khd", of_scores, q[at])
            found.append((of_q, of_k, torch.einsum("hqk,qhd->khd", p, grad[at])))
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    kernels = {"forward_of": forward_of, "backward_of": backward_of}
    with mock.patch.multiple(wide_heads, **kernels):
        yield


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("values", [8, 16, 24])
def test_the_operator_for_wide_heads(values, window, wide_heads_on_a_cpu):
    how = {} if window is None else {"window": window}
    bounds = dict(long=None, dtype=torch.float32, rtol=1e-5, atol=1e-6)
    assert_equals_each_alone("efficient", values, **bounds, **how)
    (operator,) = fused_kernels("varlen+efficient")[1:]
    tensors = [torch.randn(9, n, 16, requires_grad=True) for n in (4, 2, 2)]
    cu = torch.tensor([0, 4, *[9] * 6], dtype=torch.int32)
    torch.library.opcheck(operator, (*tensors, cu, cu, 0.5, window))


@pytest.mark.parametrize("impl", ["bucketed+math", "math+bucketed_math", "bucketed+efficient"])
@pytest.mark.parametrize("name", ["gemma4", "gemma4_experts"])
def test_each_width_of_heads_has_its_backend(name, impl, request, wide_heads_on_a_cpu, monkeypatch):
    """All numbers, and which backend saw which width."""
    seen, backends = set(), dict(attention.BACKENDS)

    def noting(backend, which):
        def attend(q, *args, **kwargs):
            seen.add((which, q.shape[-1]))
            return backend(q, *args, **kwargs)

        return attend

    for which, backend in backends.items():
        monkeypatch.setitem(attention.BACKENDS, which, noting(backend, which))
    with mock.patch.object(attention, "WIDEST", 16):
        of_loss, gradient = errors(name, impl, request.getfixturevalue("of_windows"))
    assert of_loss < 1e-5 and gradient < 1e-4
    narrow, wide = impl.split("+")
    assert seen == {(narrow, 16), (wide, 32)}


PICKED = [  # (device, dtype, asked, single, chosen, line of wide heads)
    (H100, torch.bfloat16, "auto", False, "varlen+efficient", "heads of 512: efficient"),
    (
        H100,
        torch.bfloat16,
        "auto",
        True,
        "varlen+efficient",
        "attention in heads of 512: efficient",
    ),
    (H100, torch.bfloat16, "varlen", False, "varlen+efficient", "heads of 512: efficient"),
    (H100, torch.float32, "auto", False, "bucketed+efficient", "heads of 512: efficient"),
    (H100, torch.bfloat16, "math", False, "math", "heads of 512: math (as requested)"),
    (CPU, torch.float32, "auto", False, "bucketed", "not efficient: has no CPU kernel"),
]


@pytest.mark.parametrize("device, dtype, asked, single, chosen, words", PICKED)
def test_backends_are_chosen_by_width(device, dtype, asked, single, chosen, words):
    tried = []

    def probe(*arguments, **more):
        tried.append(arguments[2:])

    packs = [SimpleNamespace(seq_len=4096, single=single, longest=2000)]
    args = SimpleNamespace(attn_impl=asked, sequence_parallel=2)
    impl, lines = choose_backends(
        args, device, dtype, config=SHAPES["12b"], packs=packs, probe=probe
    )
    assert impl == chosen and words in lines[1], lines
    if device is H100 and chosen.endswith("+efficient"):
        assert tried[-1] == ("efficient", 8, 1, 512, 512)
        assert (chosen.partition("+")[0], 8, 4, 256, 256, 1024) in tried


def test_no_backend_for_wide_heads_is_one_line():
    args = SimpleNamespace(attn_impl="efficient", sequence_parallel=1)
    with pytest.raises(UserError, match="--attn_impl efficient can't run on .*: has no CPU kernel"):
        choose_backends(args, CPU, torch.float32, config=SHAPES["12b"], packs=[])


# ---------------------------------------------------------------- published shapes

PUBLISHED = dict(
    head_dim=256,
    global_head_dim=512,
    attention_k_eq_v=True,
    final_logit_softcapping=30.0,
    sliding_window=1024,
    vocab_size=262_144,
)
SHAPES = {
    "12b": Gemma4UnifiedTextConfig(
        hidden_size=3840,
        intermediate_size=15_360,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=1,
        **PUBLISHED,
    ),
    "31b": Gemma4TextConfig(
        hidden_size=5376,
        intermediate_size=21_504,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        hidden_size_per_layer_input=0,
        **PUBLISHED,
    ),
    "26b": Gemma4TextConfig(
        hidden_size=2816,
        intermediate_size=2112,
        num_hidden_layers=30,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        **PUBLISHED,
    ),
}
# parameters and those that a token uses, and 6 times what attention mixes for a token of a
# document of 4,096: 5 of 6 blocks see 1,024
COUNTED = {
    "12b": (11.9e9, 11.9e9, 6 * 16 * (40 * 512 * 1024 + 8 * 1024 * 4096)),
    "31b": (30.7e9, 30.7e9, 6 * 32 * (50 * 512 * 1024 + 10 * 1024 * 4096)),
    "26b": (25.2e9, 3.82e9, 6 * 16 * (25 * 512 * 1024 + 5 * 1024 * 4096)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_published_shapes_are_proven_and_counted(name):
    config = SHAPES[name]
    assert not [*problems_of(config)]
    total, active, mixed = COUNTED[name]
    assert parameters_of(config) == pytest.approx(total, rel=3e-3)
    assert active_of(config) == pytest.approx(active, rel=3e-3)
    assert flops_of_slot(sizes_of(config), 4096) == 6 * active_of(config) + mixed
    if name != "26b":  # whose experts take ten seconds
        assert proof.compare(proof.small_copy(config)).adapters is None


REFUSED = [
    (
        "12b",
        {"num_kv_shared_layers": 4},
        "num_kv_shared_layers 4 is not supported: of Gemma 4, E2B",
    ),
    ("31b", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256 is not"),
    ("31b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention all is not"),
    ("26b", {"top_k_experts": 200}, "num_experts_per_tok 200 does not choose from 128 experts"),
    ("31b", {"final_logit_softcapping": -1.0}, "final_logit_softcapping -1.0 is not a positive"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED)
def test_what_is_refused(name, changes, message):
    config = copy.deepcopy(SHAPES[name])
    vars(config).update(changes)
    assert message in next(problems_of(config))


@pytest.mark.parametrize("n, message", [(4, "does not divide 1, the model's num_key_value_heads")])
def test_shares_of_both_kinds_of_heads(n, message):
    with pytest.raises(UserError, match=message):
        refuse_shares(SHAPES["12b"], n)
    refuse_shares(SHAPES["31b"], n)


def test_servers_find_the_wide_heads(tmp_path):
    """In the keys of the published configuration, which transformers reads too."""
    config = copy.deepcopy(SHAPES["31b"])
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path)
    describe_for_version_4(tmp_path, family_of(config))
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["global_head_dim"], written["num_global_key_value_heads"]) == (512, 4)
    assert "rope_theta" not in written
    again = load_config(tmp_path, 4096)
    assert kinds_of_heads(again) == kinds_of_heads(SHAPES["31b"])


def test_fused_experts_stay_in_16_bits_beside_fp8():
    """And a server is told so. Their files have no matrix of each expert."""
    shapes = {name: tuple(p.shape) for name, p in on_meta(SHAPES["26b"]).named_parameters()}
    left = fp8_config(in_files(shapes))["modules_to_not_convert"]
    kinds = {"experts", "router.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert {name.partition("layers.3.")[2] for name in left} == {"", *kinds}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    """The kernel for wide heads, alone and compiled, and the loss of capped logits."""
    for dtype in ("fp32", "bf16", "fp16"):
        assert probes.attention(dtype, "efficient", "8", "1", "512", "512", "1000") is None
        assert probes.compiled(dtype, "efficient") is None
    logits = torch.randn(37, 262_144, device="cuda") * 30
    targets = torch.randint(262_144, (37,), device="cuda")
    wide = logits.double().requires_grad_()
    plain = F.cross_entropy(30 * (wide / 30).tanh(), targets, reduction="sum")
    (gradient,) = torch.autograd.grad(plain, wide)
    found = loss._kernel("cuda")(logits, targets, cap=30.0)
    torch.testing.assert_close(found.double(), plain, rtol=2e-6, atol=0)
    torch.testing.assert_close(logits.double(), gradient, rtol=1e-4, atol=1e-6)
