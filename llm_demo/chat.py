"""Talk to a model: python -m llm_demo.chat RUN_OR_FOLDER

Reads a question a line. On a terminal it is a conversation; an empty line begins a new one, and
Ctrl-D ends it. Elsewhere each line is a question of its own, and standard output holds the answers
alone. A run without an export is read from its newest checkpoint. Answers are greedy, by
transformers, on one CPU or GPU."""

import argparse
import functools
import re
import sys
import tempfile
from pathlib import Path

from llm_demo.core.errors import UserError
from llm_demo.flags.args import TrainArgs
from llm_demo.flags.parsing import PlainParser, choices, path_of, whole
from llm_demo.machine.process import early
from llm_demo.model.local_model import find_here, is_of_run
from llm_demo.run.inputs import refuse_absent


def make_parser() -> argparse.ArgumentParser:
    parser = PlainParser(prog="python -m llm_demo.chat", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("model", help="a run, an exported or other model, PEFT's adapter, or a hub id")
    add("--base", help="folder or hub id of the model that an adapter belongs to, if it has moved")
    add("--system", help="system prompt")
    add("--chat_template", help="file with a Jinja chat template; default: the model's own")
    add("--chat_template_kwargs", help="variables of the chat template, a JSON object")
    add("--max_new_tokens", type=whole(1), default=512, help="maximum length of an answer")
    add("--dtype", choices=choices(TrainArgs, "dtype"), default="auto", help="dtype of the model")
    return parser


def check(args) -> None:
    """Raise UserError for files that are missing."""
    given = path_of(args.model)
    if not (is_of_run(given) or (given / "adapter_config.json").is_file()):
        find_here(args.model)
    refuse_absent("--chat_template", args.chat_template)


if __name__ == "__main__":  # before the slow imports
    early(lambda: make_parser().parse_args(), check)

import torch
from transformers import TextStreamer

from llm_demo.data.labels import stop_tokens
from llm_demo.data.turns import REFUSALS
from llm_demo.export import ALONE
from llm_demo.machine.device import pick_dtype, this_device
from llm_demo.machine.dist import run
from llm_demo.machine.text import words_of
from llm_demo.model.adapter_folder import open_adapter
from llm_demo.model.adapters import add_adapter, start_of
from llm_demo.model.model_folder import load_model, open_model
from llm_demo.model.positions import position_limit
from llm_demo.model.source import find_model, load_tokenizer, set_variables
from llm_demo.run.checkpoint_files import checked_facts, find_checkpoint
from llm_demo.run.export_run import export, export_of
from llm_demo.run.folder import published

# An empty block of reasoning. A prompt may have opened it.
EMPTY_BLOCKS = ("<think></think>", "</think>")
EMPTY_BLOCK = re.compile(r"^\s*(<think>)?\s*</think>\s*")


def main() -> None:
    args = make_parser().parse_args()
    check(args)
    with tempfile.TemporaryDirectory() as work:
        model, tokenizer = load(args, Path(work))
    talk, number = sys.stdin.isatty(), 0
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # refused below, by line
    begin = [{"role": "system", "content": args.system}] if args.system else []
    messages = begin
    if talk:
        print("ask; an empty line begins anew, /exit or Ctrl-D ends", file=sys.stderr)
    while True:
        if talk:
            print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()) or talk and line.strip() in ("/exit", "/quit"):
            return
        if not line.strip() or not talk:
            messages = begin
        number += 1
        if not line.strip():
            continue
        messages = [*messages, {"role": "user", "content": line.strip()}]
        try:
            if any("\ud800" <= letter <= "\udfff" for letter in line):
                raise UserError(f"line {number} of the questions is not UTF-8: {ascii(line)[:80]}")
            said = answer(model, tokenizer, messages, args.max_new_tokens)
            messages = [*messages, {"role": "assistant", "content": said}]
        except UserError as e:
            if not talk:
                raise
            print(f"error: {e}", file=sys.stderr)
            messages = begin


def load(args, work: Path):
    """(the model, its tokenizer). work: a folder for files that are not needed later. Raises
    UserError."""
    given, adapter = path_of(args.model), None
    folder = given / "hf"
    has_weights = (given / "checkpoints").is_dir() or (folder / "config.json").is_file()
    if is_of_run(given) and has_weights:
        steps = [int(path.name[-8:]) for path in published(given / "checkpoints")]
        older = bool(steps) and export_of(folder, max(steps)) != folder
        if older or not (folder / "config.json").is_file():  # or none, or adapters
            folder, dtype = work / "model", "fp32" if this_device().type == "cpu" else "bf16"
            checkpoint = find_checkpoint(str(given), given, ALONE, lambda line: None)
            merge = bool(checked_facts(checkpoint).get("adapters"))
            said = export(checkpoint, folder, dtype, merge=merge, base=args.base)
            _, *notes = said.splitlines()  # the first line names a folder that is not kept
            print(f"model: {checkpoint}, in {dtype}", *notes, sep="\n", file=sys.stderr)
    elif (given / "adapter_config.json").is_file() and not (given / "config.json").is_file():
        adapter = open_adapter(str(given))
        if not (base := args.base or adapter.base):
            raise UserError(f"{given}/adapter_config.json names no base: name it with --base")
        folder = find_model(base)
    elif args.base:
        raise UserError(f"--base: {args.model} is no adapter")
    else:
        folder = find_model(args.model)
    config, weights = open_model(folder, 1, functools.partial(print, file=sys.stderr))
    if weights is None:
        raise UserError(f"{folder} has no weights: name a trained model or a run")
    brings = adapter and (given / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(str(given if brings else folder), args.chat_template)
    if not tokenizer.chat_template:
        raise UserError(f"{folder} has no chat template: set one with --chat_template FILE")
    # refuses what is not the model's before its weights are loaded
    start = adapter and start_of(adapter, ",".join(adapter.targets), config)
    set_variables(tokenizer, args.chat_template_kwargs)
    device = this_device()
    model = load_model(args.model, folder, config, pick_dtype(args.dtype, device)[0])
    if adapter:
        add_adapter(model, adapter, start["read"])
    return model.to(torch.device(device.type)), tokenizer


class Answer(TextStreamer):
    """Prints an answer as it is generated, without an empty block of reasoning before it."""

    held = ""  # what has come while it may still be such a block; None once that is known

    def on_finalized_text(self, text: str, stream_end: bool = False):
        if self.held is not None:
            self.held += text
            begun = "".join(self.held.split())
            if not stream_end and any(block.startswith(begun) for block in EMPTY_BLOCKS):
                return
            text, self.held = EMPTY_BLOCK.sub("", self.held), None
        super().on_finalized_text(text, stream_end)


@torch.no_grad()
def answer(model, tokenizer, messages: list[dict], most: int) -> str:
    """The answer to a conversation, of at most `most` tokens, printed as it is generated. Raises
    UserError if the conversation leaves no room for it, or the template refuses it."""
    try:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
    except REFUSALS as e:
        raise UserError(f"the chat template refuses the conversation: {words_of(e)}") from e
    length, limit = prompt["input_ids"].shape[1], position_limit(model.config)
    if length >= limit:
        raise UserError(
            f"the conversation has {length:,} tokens, but the model's positions end at {limit:,}: "
            "ask a shorter question"
        )
    stop = stop_tokens(tokenizer)
    ids = model.generate(
        **prompt, do_sample=False, max_new_tokens=min(most, limit - length),
        eos_token_id=stop, pad_token_id=stop[0],
        streamer=Answer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )  # fmt: skip
    return tokenizer.decode(ids[0, length:], skip_special_tokens=True)


if __name__ == "__main__":
    run(main)
