"""The share of held-out examples answered exactly: one forward tells what greedy decoding gives."""

import types

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config

from llm_demo.core import loss
from llm_demo.core.attention import make_documents
from llm_demo.core.decoder import Blocks, DecoderLoss, allocate, fill, skeleton
from llm_demo.core.loss import score
from llm_demo.core.rows import answers_of, label_positions, position_ids
from llm_demo.run.answers import generate

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunk", [1, 5, 4096])
def test_score_counts_answers_with_a_wrong_token(chunk, monkeypatch):
    """Three answers, of which the second has one wrong token; the loss is the plain one."""
    monkeypatch.setattr(loss, "CHUNK_ROWS", chunk)
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 8, 6), torch.randn(20, 6)
    labels = (hidden @ weight.T).argmax(-1)
    labels[0, 0] = labels[0, 3] = labels[1, 7] = -100
    labels[0, 5] = (labels[0, 5] + 1) % 20
    cu_seqlens = torch.tensor([0, 3, 8, 8 + 7, 16, 16, 16], dtype=torch.int32)
    index, targets = label_positions(labels)
    answers = answers_of(index, cu_seqlens)
    assert answers.tolist() == [0, 0, 1, 1, 1, 1] + [2] * 7
    total, wrong = score(hidden, weight, index, targets, answers).tolist()
    plain = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    assert total == pytest.approx(plain.item(), rel=1e-5) and wrong == 1


def test_nothing_to_learn_is_no_wrong_answer():
    index, targets = label_positions(torch.full((2, 4), -100))
    answers = answers_of(index, torch.tensor([0, 4, 8], dtype=torch.int32))
    found = score(torch.randn(2, 4, 6), torch.randn(20, 6), index, targets, answers)
    assert found.tolist() == [0, 0]


def test_agrees_with_greedy_decoding():
    """On random weights: each prompt's own greedy answer counts as exact, another one as wrong."""
    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    lm = skeleton(config, "math")
    model = DecoderLoss(lm, [Blocks(list(lm.model.layers), False)])
    allocate(model, CPU)
    fill(lm, "model", None, 0)
    lm.lm_head.weight = lm.model.embed_tokens.weight
    B, S, most = 4, 16, 6

    def forward(batch, *labels):
        documents = make_documents(batch.cu_seqlens, (B, S), "math", CPU)
        return model(batch.input_ids, batch.position_ids, documents, *labels)

    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
    with torch.no_grad():
        answers = generate(forward, prompts, (B, S), 3, most, stop=set())
        answers[2][4] = (answers[2][4] + 1) % 50  # no longer the greedy one
        ids, labels, ends = torch.zeros(B, S, dtype=torch.int64), [], [0]
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            n = len(prompt) + len(answer)
            ids[i, :n] = torch.tensor(prompt + answer)
            labels.append([-100] * (len(prompt) - 1) + answer + [-100] * (S - n + 1))
            ends += [i * S + n, (i + 1) * S]
        cu = torch.tensor(ends, dtype=torch.int32)
        batch = {"input_ids": ids, "position_ids": position_ids(cu, (B, S)), "cu_seqlens": cu}
        batch = types.SimpleNamespace(**batch)
        index, targets = label_positions(torch.tensor(labels))
        _, wrong = forward(batch, index, targets, answers_of(index, cu)).tolist()
    assert wrong == 1
