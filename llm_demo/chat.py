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
from collections.abc import Iterator
from pathlib import Path

from llm_demo.core.errors import UserError
from llm_demo.flags.args import TrainArgs
from llm_demo.flags.parsing import PlainParser, literals, path_of, whole
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
    add("--dtype", choices=literals(TrainArgs, "dtype"), default="auto", help="dtype of the model")
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

from llm_demo.data.codec import REFUSALS, stop_tokens
from llm_demo.export import ALONE
from llm_demo.machine.device import pick_dtype, this_device
from llm_demo.machine.dist import run
from llm_demo.machine.text import blame
from llm_demo.model.adapter_folder import open_adapter
from llm_demo.model.adapters import add_adapter, start_of
from llm_demo.model.model_folder import load_model, open_model
from llm_demo.model.source import find_model, load_tokenizer, position_limit, set_variables
from llm_demo.run.checkpoint_files import checked_facts, find_checkpoint
from llm_demo.run.export_run import export
from llm_demo.run.folder import published
from llm_demo.run.next_steps import export_of

# An empty block of reasoning. A prompt may have opened it.
EMPTY_BLOCKS = ("<think></think>", "</think>")
EMPTY_BLOCK = re.compile(r"^\s*(<think>)?\s*</think>\s*")


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    check(args)
    with tempfile.TemporaryDirectory() as work:
        model, tokenizer = model_and_tokenizer(args, Path(work))
    sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    talk = sys.stdin.isatty()
    begin = [{"role": "system", "content": args.system}] if args.system else []
    messages = begin
    if talk:
        print("ask; an empty line begins anew, /exit or Ctrl-D ends", file=sys.stderr)
    for line in questions(talk):
        if not line.strip() or not talk:
            messages = begin
        if not line.strip():
            continue
        messages = [*messages, {"role": "user", "content": line.strip()}]
        try:
            said = answer(model, tokenizer, messages, args.max_new_tokens)
            messages = [*messages, {"role": "assistant", "content": said}]
        except UserError as e:
            if not talk:
                raise
            print(f"error: {e}", file=sys.stderr)
            messages = begin


def questions(talk: bool) -> Iterator[str]:
    """The lines of standard input; on a terminal (talk) until /exit."""
    while True:
        if talk:
            print("> ", end="", file=sys.stderr, flush=True)
        with blame("the questions", UnicodeDecodeError):
            line = sys.stdin.readline()
        if not line or talk and line.strip() in ("/exit", "/quit"):
            return
        yield line


def model_and_tokenizer(args, work: Path):
    """(the model, its tokenizer). work: a folder for files that are not needed later. Raises
    UserError."""
    given = path_of(args.model)
    adapter = None
    if has_weights(given):
        folder = export_of_run(given, args.base, work / "model")
    elif (given / "adapter_config.json").is_file() and not (given / "config.json").is_file():
        adapter = open_adapter(str(given))
        base = args.base or adapter.base
        if not base:
            raise UserError(f"{given}/adapter_config.json names no base: name it with --base")
        folder = find_model(base)
    elif args.base:
        raise UserError(f"--base: {args.model} is no adapter")
    else:
        folder = find_model(args.model)
    config, weights = open_model(folder, 1, functools.partial(print, file=sys.stderr))
    if weights is None:
        raise UserError(f"{folder} has no weights: name a trained model or a run")
    own = adapter and (given / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(str(given if own else folder), args.chat_template)
    if not tokenizer.chat_template:
        raise UserError(f"{folder} has no chat template: set one with --chat_template FILE")
    if adapter:  # refuses what is not the model's before its weights are loaded
        _, read = start_of(adapter, ",".join(adapter.targets), config)
    set_variables(tokenizer, args.chat_template_kwargs)
    device = this_device()
    model = load_model(args.model, folder, config, pick_dtype(args.dtype, device)[0])
    if adapter:
        add_adapter(model, adapter, read)
    return model.to(torch.device(device.type)), tokenizer


def has_weights(run: Path) -> bool:
    """Whether this is the folder of a run with checkpoints, or with an export of a model."""
    return is_of_run(run) and ((run / "checkpoints").is_dir() or (run / "hf/config.json").is_file())


def export_of_run(run: Path, base: str | None, out: Path) -> Path:
    """A run's export of its newest checkpoint, whole; it is written to `out` if the run has none.
    base: as of `export`."""
    folder = run / "hf"
    steps = [int(path.name[-8:]) for path in published(run / "checkpoints")]
    newest = not steps or export_of(folder, max(steps)) == folder
    if newest and (folder / "config.json").is_file():  # else it has none, or adapters
        return folder
    dtype = "fp32" if this_device().type == "cpu" else "bf16"
    checkpoint = find_checkpoint(str(run), run, ALONE, lambda line: None)
    merge = bool(checked_facts(checkpoint).get("adapters"))
    said = export(checkpoint, out, dtype, merge=merge, base=base, text_only=True)
    _, *notes = said.splitlines()  # the first line names a folder that is not kept
    print(f"model: {checkpoint}, in {dtype}", *notes, sep="\n", file=sys.stderr)
    return out


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
    with blame("the chat template refuses the conversation", *REFUSALS):
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
    length, limit = prompt["input_ids"].shape[1], position_limit(model.config)
    if length >= limit:
        raise UserError(
            f"the conversation has {length:,} tokens, but the model's positions end at {limit:,}: "
            "ask a shorter question"
        )
    stop = stop_tokens(tokenizer)
    ids = model.generate(
        **prompt,
        do_sample=False,
        max_new_tokens=min(most, limit - length),
        eos_token_id=stop,
        pad_token_id=stop[0],
        streamer=Answer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    return tokenizer.decode(ids[0, length:], skip_special_tokens=True)


if __name__ == "__main__":
    run(main)
