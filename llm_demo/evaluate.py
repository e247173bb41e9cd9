"""Compare models on held-out data: python -m llm_demo.evaluate --models BASE TUNED --data FILE
Prints loss and perplexity over the learnt tokens of each file, answers to its first rows side by
side, and with --answer_regex how many answers end in the right number. Models are hub ids or
folders; one CPU or GPU. Answers are greedy, by transformers' continuous batching or batch by
batch."""

import argparse
import functools
import gc
import json
import math
import re
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import find_executable_batch_size
from transformers import AutoModelForCausalLM, GenerationConfig

from llm_demo.args import DataArgs, PlainParser, choices, regex, whole
from llm_demo.data.batch import IGNORE_INDEX, learnt
from llm_demo.data.packs import load_packs
from llm_demo.data.records import find_files
from llm_demo.data.steps import Packs
from llm_demo.device import DTYPES, pick_dtype, this_device
from llm_demo.dist import run
from llm_demo.errors import UserError
from llm_demo.model.batched import batched, choose_batched
from llm_demo.model.generate import prompts_of, stop_tokens
from llm_demo.model.loss import cross_entropy_sum
from llm_demo.model.rotary import length_dependent_rope
from llm_demo.model.source import find_model, load_config, load_tokenizer
from llm_demo.model.weights import open_weights
from llm_demo.progress import progress

TOKENS = 1 << 16  # of a batch, including padding


def main() -> None:
    args = make_parser().parse_args()
    if args.answer_regex and args.train_on_prompt:
        raise UserError("--answer_regex looks into answers, --train_on_prompt knows none: drop one")
    device = this_device()
    dtype, _ = pick_dtype(args.dtype, device)
    if args.seq_len is None:  # so that all models get the same documents
        configs = [load_config(find_model(name), 1) for name in args.models]
        args.seq_len = min(config.max_position_embeddings for config in configs)
    results = []
    for name in args.models:
        results.append(evaluate(name, args, torch.device(device.type), dtype))
        gc.collect()
        if args.out:  # after each model, since the next may fail
            args.out.mkdir(parents=True, exist_ok=True)
            settings = {"data": args.data, "seq_len": args.seq_len, "device": str(device)}
            out = json.dumps({**settings, "models": results}, indent=1)
            (args.out / "evaluation.json").write_text(out + "\n")
            (args.out / "evaluation.md").write_text(markdown(results))
    print(markdown(results))


def make_parser() -> argparse.ArgumentParser:
    parser = PlainParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", required=True, help="folders or hub ids, the base first")
    add("--data", required=True, help="files, folders, globs or hub splits, as in training")
    add("--seq_len", type=whole(1), help="longer documents are truncated; default: the most "
        "positions that all models know")  # fmt: skip
    add("--data_format", default="auto", help="as in training, and so the next four")
    add("--input_key")
    add("--target_key")
    add("--train_on_prompt", action="store_true")
    add("--learn_turns", choices=choices(DataArgs, "learn_turns"), default="all")
    add("--batch_size", type=whole(1), help="documents at a time, fewer where they are long; "
        "default: as many as fit in a GPU's memory, up to 256; on a CPU 32")  # fmt: skip
    add("--rows", type=whole(), default=0,
        help="only the first so many documents of a file; 0: all")  # fmt: skip
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of the models")
    add("--show", type=whole(), default=3, help="rows whose greedy answers are shown")
    add("--max_new_tokens", type=whole(1), default=256, help="of an answer")
    add("--generate", choices=("auto", "batch", "reference"), default="auto", help="how answers "
        "are made: batch is continuous batching over a paged cache, reference one padded batch "
        "after another; auto: batch where it pays")  # fmt: skip
    add("--answer_regex", type=regex, help="the last match of its first group is an answer's "
        r"result, such as '#### (-?[\d,.]+)' for GSM8K")  # fmt: skip
    add("--out", type=Path, help="a folder for evaluation.json and evaluation.md")
    return parser


def evaluate(name: str, args, device: torch.device, dtype: torch.dtype) -> dict:
    """One model's figures for each file: loss, perplexity, tokens, exact matches and answers."""
    folder = find_model(name)
    config = load_config(folder, args.seq_len)  # refuses unsupported models
    if open_weights(folder) is None:
        raise UserError(f"{folder} has no weights: export a run, or name a trained model")
    tokenizer = load_tokenizer(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    model = model.to(device).eval()
    model.generation_config = GenerationConfig()  # the model's own may have a repetition_penalty
    keys = ("seq_len", "data_format", "input_key", "target_key", "train_on_prompt", "learn_turns")
    options = {key: getattr(args, key) for key in keys}
    batch, why = choose_batched(args.generate, device, config)
    if length_dependent_rope(config):  # a document's numbers would depend on the rest of the batch
        args = argparse.Namespace(**{**vars(args), "batch_size": 1})
    files = []
    log = functools.partial(print, file=sys.stderr)
    for path in find_files(args.data, say=log):
        packs = load_packs(path, tokenizer, pack=False, log=log, **options)
        if not len(packs):
            raise UserError(f"{path}: nothing to learn in any row")
        count = min(args.rows or len(packs), len(packs))
        started = time.perf_counter()
        loss, tokens = in_batches(args, device, mean_loss, model, packs, count)
        say(f"{name}: loss of {count:,} documents of {path}", started)
        found = {"file": path, "rows": count, "loss": loss, "perplexity": math.exp(min(loss, 700))}
        found |= {"tokens": tokens}
        asked = prompts_of(packs, count if args.answer_regex else min(args.show, count), 10**9)
        prompts, expected = [p for p, _ in asked], [e for _, e in asked]
        started = time.perf_counter()
        answers, how = answer(model, tokenizer, prompts, args, device, batch, why)
        say(f"{name}: {len(prompts):,} answers {how}", started)
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
        answers, expected = list(map(decode, answers)), list(map(decode, expected))
        if args.answer_regex:
            ends = [[result(text, args) for text in texts] for texts in (answers, expected)]
            known = [(a, e) for a, e in zip(*ends, strict=True) if e is not None]
            found["exact"] = sum(a == e for a, e in known) / len(known) if known else None
            found["exact_of"] = len(known)
        shown = zip(map(decode, prompts), answers, expected, strict=True)
        columns = ("prompt", "answer", "expected")
        found["answers"] = [dict(zip(columns, row, strict=True)) for row in [*shown][: args.show]]
        files.append(found)
    return {"model": name, "files": files}


def say(what: str, started: float) -> None:
    print(f"{what} in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)


def in_batches(args, device, function, *rest):
    """Call function(batch_size, *rest) with --batch_size, or the largest that fits in memory."""
    if args.batch_size or device.type == "cpu":
        return function(args.batch_size or 32, *rest)
    return find_executable_batch_size(function, starting_batch_size=256)(*rest)


def batches(lengths: list[int], most: int, what: str):
    """Yield batches of indices of documents with these lengths, longest first: at most `most`
    documents and TOKENS tokens, including padding."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    with progress(what=what, total=len(order), unit="documents") as bar:
        while order:
            count = max(1, min(most, TOKENS // max(1, lengths[order[0]])))
            rows, order = order[:count], order[count:]
            yield rows
            bar.update(len(rows))


@torch.no_grad()
def mean_loss(batch: int, model, packs: Packs, count: int) -> tuple[float, int]:
    """(mean of -log p over the learnt tokens, their number) of the first `count` documents. Longest
    first, padded at the end, which causal attention does not see."""
    total, tokens = 0.0, 0
    for rows in batches(packs.token_counts[:count].tolist(), batch, "loss"):
        longest = int(packs.token_counts[rows].max())
        # copies: a row has the model's full length, which may be 100 times the document's
        found = [[t[:longest].copy() for t in packs.row(i)[:2]] for i in rows]
        ids = torch.stack([torch.from_numpy(ids) for ids, _ in found]).to(model.device)
        labels = torch.stack([torch.from_numpy(labels) for _, labels in found])
        index, targets = (t.to(model.device) for t in learnt(labels))
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        total += cross_entropy_sum(hidden, model.lm_head.weight, index, targets).item()
        tokens += int((labels != IGNORE_INDEX).sum())
    return total / max(1, tokens), tokens


def answer(model, tokenizer, prompts, args, device, batch: bool, why: str):
    """(the greedy continuation of each prompt up to its stop token, how it was made). Prompt and
    continuation stay within the model's positions."""
    stop = stop_tokens(tokenizer)
    pad = stop[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    room = [model.config.max_position_embeddings - len(p) for p in prompts]
    most = min(args.max_new_tokens, max(room, default=0))
    how = dict(do_sample=False, max_new_tokens=most, eos_token_id=stop, pad_token_id=pad)
    answers = None
    if batch and prompts:
        answers, said = batched(model, prompts, how, args.batch_size)
        why = said if answers is None else f"{why}, {said}"
    if answers is None and args.generate == "batch" and prompts:
        raise UserError(f"--generate batch: {why}; --generate reference works everywhere")
    if answers is None:
        answers = in_batches(args, device, greedy, model, prompts, how)
        why = f"batch by batch ({why})"
    else:
        why = f"by continuous batching ({why})"
    for i, found in enumerate(answers):
        ends = [n for n, t in enumerate(found) if t in stop]
        answers[i] = found[: min([*ends, room[i]])]
    return answers, why


@torch.no_grad()
def greedy(batch: int, model, prompts: list[list[int]], how: dict) -> list[list[int]]:
    """The greedy continuation of each prompt, in batches of `batch`, padded on the left."""
    answers = [None] * len(prompts)
    for rows in batches(list(map(len, prompts)), batch, "answers"):
        longest = len(prompts[rows[0]])
        ids = torch.full((len(rows), longest), how["pad_token_id"])
        mask = torch.zeros_like(ids)
        for k, i in enumerate(rows):
            ids[k, longest - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[k, longest - len(prompts[i]) :] = 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        # the longest prompt's answer exceeds the model's positions; the excess is cut off later
        room = model.config.max_position_embeddings - len(prompts[rows[-1]])
        most = min(how["max_new_tokens"], room)
        found = model.generate(
            input_ids=ids, attention_mask=mask, **{**how, "max_new_tokens": most}
        )
        for k, i in enumerate(rows):
            answers[i] = found[k, longest:].tolist()
    return answers


def result(text: str, args) -> str | None:
    """The last match of --answer_regex, without thousands separators and final period."""
    found = re.findall(args.answer_regex, text)
    last = found[-1] if found else None
    last = last[0] if isinstance(last, tuple) else last
    return last.replace(",", "").rstrip(".") if last is not None else None


def markdown(results: list[dict]) -> str:
    """A table with one row per file and model, and the first answers side by side."""
    exact = any("exact" in f for r in results for f in r["files"])
    lines = [f"| file | model | loss | perplexity | tokens |{' exact |' * exact}"]
    lines.append("|---|---|---|---|---|" + "---|" * exact)
    files = range(len(results[0]["files"]))
    for n in files:
        for r in results:
            f = r["files"][n]
            line = f"| {Path(f['file']).name} | {r['model']} | {f['loss']:.4f} |"
            line += f" {f['perplexity']:.2f} | {f['tokens']:,} |"
            if exact:
                share = "n/a" if f["exact"] is None else f"{f['exact']:.1%} of {f['exact_of']}"
                line += f" {share} |"
            lines.append(line)
    for n in files:
        for k, shown in enumerate(results[0]["files"][n]["answers"]):
            lines += ["", f"**{Path(results[0]['files'][n]['file']).name}, row {k + 1}**", ""]
            lines.append(f"> prompt: {one_line(shown['prompt'])}")
            lines += ["", f"- expected: {one_line(shown['expected'])}"]
            for r in results:
                lines.append(f"- {r['model']}: {one_line(r['files'][n]['answers'][k]['answer'])}")
    return "\n".join(lines) + "\n"


def one_line(text: str, most: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]} …"


if __name__ == "__main__":
    run(main)
