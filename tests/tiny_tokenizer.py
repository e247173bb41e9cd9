"""A tokenizer a test can predict: one id a byte, one merge (two newlines), four special tokens.

Also rows of a data file with any tokenizer."""

import json
import os
import re
from unittest import mock

import torch
from conftest import args_with
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config

from llm_demo.core.mesh import World
from llm_demo.data.packs import load_rows
from llm_demo.flags.args import DataArgs
from llm_demo.model.model_folder import Source
from llm_demo.run.inputs import sources_of
from llm_demo.run.plan import Model, read_data

SPECIAL = {"<B>": 257, "<S>": 258, "<E>": 259, "<P>": 260}  # bos, start of turn, end of turn, pad
TWO_NEWLINES = 256

CHATML = (
    "{% for m in messages %}{{ '<S>' + m.role + '\n' + m.content + '<E>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<S>assistant\n' }}{% endif %}"
)


def make_tokenizer(template=CHATML, eos="<E>", bos=None, pad="<P>", post_processor=None):
    # Byte-level BPE writes byte b as a printable character; its alphabet in the order of the bytes:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in plain]
    vocab = {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(moved)}
    newline = next(text for text, b in vocab.items() if b == 10)
    vocab[newline * 2] = TWO_NEWLINES
    backend = Tokenizer(models.BPE(vocab, [(newline, newline)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    parts = [post_processor] if post_processor else []
    if bos:
        single = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, SPECIAL[bos])]
        )
        parts.append(single)
    if parts:
        backend.post_processor = processors.Sequence(parts)
    tokens = {"eos_token": eos, "bos_token": bos, "pad_token": pad}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{k: v for k, v in tokens.items() if v}
    )
    tokenizer.chat_template = template
    return tokenizer


def golden(marked: str) -> tuple[list[int], list[int]]:
    """Text whose learnt part is between ⟦ and ⟧ -> (ids, labels), without the code under test."""
    ids, learnt, on = [], [], False
    for piece in re.findall(r"<[BSEP]>|\n\n|⟦|⟧|.", marked, re.DOTALL):
        if piece in "⟦⟧":
            on = piece == "⟦"
            continue
        new = [TWO_NEWLINES] if piece == "\n\n" else list(piece.encode())
        new = [SPECIAL[piece]] if piece in SPECIAL else new
        ids += new
        learnt += [on] * len(new)
    return ids, [i if on else -100 for i, on in zip(ids[1:], learnt[1:], strict=True)] + [-100]


def packs_of(path, tokenizer, *, pack=True, limit=4096, cache_dir=None, log=print, **flags):
    """load_rows with these flags, and the others at their defaults."""
    flags = DataArgs(pack_sequences=pack, **flags)
    cache = {"LLM_DEMO_CACHE": cache_dir} if cache_dir else {}
    with mock.patch.dict(os.environ, cache):
        rows, lines = load_rows(path, tokenizer, flags, limit=limit)
    for line in lines:
        log(line)
    return rows


def data_of_a_run(said=None, **flags):
    """(training rows, held-out rows or None) of a run with these flags and this tokenizer."""
    args = args_with(**flags)
    source = Source(None, Qwen3Config(), None, make_tokenizer())
    model = Model(source, lora=None, seq_len=args.seq_len, date=None)
    data, lines = read_data(args, World(0, 1, 0, torch.device("cpu")), model, sources_of(args))
    if said is not None:
        said += lines
    return data


def write(path, *rows):
    """Rows, or lines as they are, in a file; -> its name."""
    lines = (row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    path.write_text("".join(lines))
    return str(path)


def turns_of(*contents):
    """Messages of a user and an assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def first(packs, row=0):
    """(ids, labels) of a row's first document."""
    ids, labels, lengths = packs.row(row)
    return ids[: lengths[0]].tolist(), labels[: lengths[0]].tolist()


def skipped(packs) -> dict[str, int]:
    """Skipped rows by reason."""
    return {reason: rows.rows for reason, rows in packs.documents.stats.skipped.items()}
