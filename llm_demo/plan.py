"""Everything that is decided before the model exists: device, dtype, data, attention, batch, steps.

Both scripts make the same plan from the same flags; each decision is printed with its reason."""

import contextlib
import functools
import json
import math
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from llm_demo.args import command_line
from llm_demo.data.batch import Batch
from llm_demo.data.packs import LONGEST_DEFAULT, Packs, describe_example, heldout_beside, load_packs
from llm_demo.data.records import hub_parts
from llm_demo.data.steps import collate, step_rows
from llm_demo.device import DTYPES, pick_dtype, this_device
from llm_demo.dist import World, from_rank0, once_per_node
from llm_demo.errors import UserError
from llm_demo.model.attention import choose
from llm_demo.model.compiling import choose_compile
from llm_demo.model.costs import flops_per_token, head_size
from llm_demo.model.generate import generate, prompts_of, stop_tokens
from llm_demo.model.source import (
    find_model,
    load_config,
    load_tokenizer,
    position_limit,
    window_of,
    without_window,
)
from llm_demo.model.weights import Weights, open_weights
from llm_demo.progress import progress
from llm_demo.run.metrics import Run


class Plan(NamedTuple):
    run: Run
    dtype: torch.dtype
    attn_impl: str
    compile: bool
    config: object  # the model's, of transformers
    weights: Weights | None  # None: random ones
    tokenizer: object
    train: Packs
    heldout: Packs | None
    max_docs: int  # of any row of train or heldout: fixes the shape of cu_seqlens
    replicas: int  # data-parallel
    global_batch: int  # rows of an optimizer step
    max_steps: int
    n_total: int | None  # rows of the whole run, where num_epochs sets its length
    lr: float
    flops_per_token: float
    identity: dict  # what the rows of a step depend on, by name
    describe_model: Callable[[Path], None]  # write configuration and tokenizer to a folder


def make_plan(args: Namespace, world: World, script: str, replicas: int) -> Plan:
    """Decide what the flags leave open, and print it. Raises UserError on every rank alike."""
    run = Run(args, world, script)
    run.say(f"command: {command_line()}")

    device = this_device(world.device.index or 0)
    dtype, why = pick_dtype(args.dtype, device)
    args.dtype = next(name for name, d in DTYPES.items() if d == dtype)
    run.say(f"device: {world.size} x {device}")
    run.say(f"dtype: {args.dtype} ({why}); weights and optimizer states in fp32")

    earlier = resumed_settings(args, world, run.folder)
    resumed_seq_len(args, earlier, run.say)
    folder = once_per_node(world, functools.partial(find_model, args.model_name_or_path))
    config = load_config(folder, args.seq_len)
    weights = open_weights(folder)
    origin = (
        f"weights of {folder}"
        if weights
        else f"no weights in {folder}: random ones, seed {args.seed}"
    )
    run.say(f"model: {config.model_type}, {config.num_hidden_layers} blocks, {origin}")

    tokenizer = load_tokenizer(args.tokenizer_name_or_path or str(folder), args.chat_template)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, more than the model's {config.vocab_size}"
        )
    limit = min(filter(None, (position_limit(config), window_of(config), LONGEST_DEFAULT)))
    train, heldout = load_data(args, world, tokenizer, run.say, limit)
    fit_window(config, args, [packs for packs in (train, heldout) if packs], run.say)

    for packs in filter(None, (train, heldout)):
        if any(f["format"] == "tokens" for f in packs.stats["files"]):
            if (largest := int(packs.tokens.max())) >= config.vocab_size:
                raise UserError(
                    f"{packs.stats['files'][0]['path']}: token {largest}, but the model knows "
                    f"{config.vocab_size} only"
                )

    heads = (config.num_attention_heads, config.num_key_value_heads, head_size(config))
    single = train.single and (heldout is None or heldout.single)
    pick = functools.partial(choose, args.attn_impl, device, dtype, heads, single)
    attn_impl, rejected = from_rank0(world, pick)
    for reason in rejected:
        run.say(f"attention: not {reason}")
    run.say(f"attention: {attn_impl}" + (" (as asked)" if args.attn_impl != "auto" else ""))

    compiled, why = from_rank0(world, lambda: choose_compile(args.compile, device, attn_impl))
    run.say(f"compile: {'yes' if compiled else 'no'} ({why})")
    if args.activation_memory_budget < 1 and not compiled:
        raise UserError("--activation_memory_budget works on compiled blocks: add --compile")

    global_batch = args.micro_batch_size * args.grad_accum_steps * replicas
    run.say(
        f"batch: {args.micro_batch_size} rows x {args.grad_accum_steps} accumulated x {replicas} "
        f"replicas = {global_batch} rows = {global_batch * args.seq_len:,} token slots a step"
    )
    n_total = None if args.max_steps else max(1, round(len(train) * args.num_epochs))
    max_steps = args.max_steps or math.ceil(n_total / global_batch)
    if before := fixed_steps(args, earlier):
        if before != max_steps:
            max_steps, n_total = before, None
            run.say(f"max_steps: {before} (from the resumed run, which an earlier version began)")
    lr = args.lr or (2e-5 if weights else 1e-3)
    why = "" if args.lr else f" (the default for {'trained' if weights else 'random'} weights)"
    run.say(
        f"steps: {max_steps} = {max_steps * global_batch / len(train):.2f} epochs of {len(train)} "
        "rows; "
        f"lr {lr:g}{why}, {args.warmup_steps} steps of warm-up, then {args.lr_scheduler}"
    )
    if args.warmup_steps > max_steps:
        run.say(
            f"warning: --warmup_steps {args.warmup_steps} is longer than the run of {max_steps} "
            f"steps: the learning rate only rises, to {lr * max_steps / args.warmup_steps:.2g} in "
            "the last step; give a shorter warm-up"
        )
    block, head = flops_per_token(config, args.seq_len)
    plan = Plan(
        run, dtype, attn_impl, compiled, config, weights, tokenizer, train, heldout,
        max(2, train.max_docs, heldout.max_docs if heldout else 0),
        replicas, global_batch, max_steps, n_total, lr, config.num_hidden_layers * block + head,
        {**train.stats["identity"], "seed": args.seed, "rows of a step": global_batch},
        functools.partial(describe_model, folder, tokenizer),
    )  # fmt: skip
    first = int(rows_of(plan, args, 0)[0])
    run.say(f"example, learnt tokens in ⟦⟧:\n{describe_example(train, tokenizer, first)}")
    chosen = ("attn_impl", "compile", "global_batch", "max_steps", "lr", "replicas")
    run.resolved = {key: getattr(plan, key) for key in chosen}
    return plan


def describe_model(model: Path, tokenizer, folder: Path) -> None:
    """What an export needs besides weights, kept with the run: the model's folder may go."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)
    tokenizer.save_pretrained(folder)


def resumed_settings(args: Namespace, world: World, folder: Path) -> dict:
    """seq_len, and what else config.json has, of the run that --resume names; {} without one."""
    named = folder if args.resume == "auto" else Path(args.resume or "")

    def look() -> dict:
        for file in (named / "config.json", named.parent.parent / "config.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = json.loads(file.read_text())
                return {**found, "seq_len": int(found["seq_len"])}
        return {}

    return from_rank0(world, look) if args.resume else {}


def resumed_seq_len(args: Namespace, earlier: dict, say) -> None:
    """Without --seq_len, a resumed run keeps the value it had, so that its rows stay the same. The
    default was a fixed number in earlier versions."""
    if not args.seq_len and earlier:
        args.seq_len = earlier["seq_len"]
        say(f"seq_len: {args.seq_len} (from the resumed run)")


def fixed_steps(args: Namespace, earlier: dict) -> int:
    """max_steps of a run that --resume auto continues and that an earlier version began, whose
    launchers asked for 60 steps by default; 0 if the flags or this version decide."""
    old = earlier and "max_skipped_steps" not in earlier
    if not old or args.resume != "auto" or args.max_steps or args.num_epochs != 1:
        return 0
    steps = earlier.get("max_steps")
    return steps if type(steps) is int and steps > 0 else 0


def fit_window(config, args: Namespace, found: list[Packs], say) -> None:
    """Raise UserError if a document is longer than the model's sliding window."""
    window, longest = window_of(config), max(packs.longest for packs in found)
    without_window(config, longest)
    if window and args.seq_len > window and longest + args.sample_tokens > window:
        args.sample_tokens = window - longest  # prompt and answer must fit into the window
        say(f"answers: limited to {args.sample_tokens} tokens by the sliding window of {window}")


def load_data(
    args: Namespace, world: World, tokenizer, say, limit: int = LONGEST_DEFAULT
) -> tuple[Packs, Packs | None]:
    """(training rows, held-out rows or None), built once per node. If args.seq_len is 0, it is set
    from the lengths of the training documents, to `limit` at most."""
    heldout = heldout_beside(args.train_json) if args.eval_json == "auto" else args.eval_json
    args.eval_json = heldout or "none"
    both = f"{args.train_json},{args.eval_json}"
    for name, named in (("dataset_config", both), ("dataset_split", args.train_json)):
        if getattr(args, name) and not any(hub_parts(part.strip()) for part in named.split(",")):
            raise UserError(
                f"--{name} {getattr(args, name)} applies only to hub datasets, and "
                f"--train_json {args.train_json} is not one"
            )

    def load(path: str, split: str | None = None) -> Packs:
        # every flag that load_packs has a parameter for
        options = {k: v for k, v in vars(args).items() if k in load_packs.__kwdefaults__}
        options |= {"dataset_split": split, "seq_len_limit": limit, "log": say}
        packs = load_packs(path, tokenizer, pack=args.pack_sequences, **options)
        if not len(packs):
            raise UserError(
                f"{path}: nothing to learn in any row; skipped {packs.stats['skipped']}"
            )
        return packs

    split = args.dataset_split or "train"
    train = once_per_node(world, functools.partial(load, args.train_json, split))
    if not args.seq_len:
        args.seq_len = train.seq_len
        say(f"seq_len: {args.seq_len} ({train.stats['seq_len_why']})")
    if args.eval_json == "none":
        say("held-out: none given, so no held-out loss")
        return train, None
    heldout = once_per_node(world, functools.partial(load, args.eval_json))
    both = {f["path"] for f in train.stats["files"]} & {f["path"] for f in heldout.stats["files"]}
    for path in sorted(both):
        say(f"held-out: {path} is also in the training data, so its loss is not a held-out loss")
    return train, heldout


def rows_of(plan: Plan, args: Namespace, step: int) -> np.ndarray:
    """Row numbers of optimizer step `step` (from 0), all replicas'; -1 is an empty row."""
    return step_rows(len(plan.train), args.seed, step, plan.global_batch, plan.n_total)


def token_counts(packs: Packs, rows: np.ndarray) -> tuple[int, int]:
    """(tokens, label tokens) of these rows."""
    rows = rows[rows >= 0]
    return int(packs.token_counts[rows].sum()), int(packs.label_counts[rows].sum())


def micro_batches(
    plan: Plan, packs: Packs, rows: np.ndarray, replica: int, micro: int
) -> Iterator[Batch]:
    """This replica's share of `rows`, in micro-batches of `micro` rows, on the CPU."""
    groups = rows.reshape(-1, plan.replicas, micro)[:, replica]
    if packs is plan.heldout:  # a training step is too short to show
        groups = progress(groups, what="evaluating", unit="batches")
    for group in groups:
        started = time.perf_counter()
        batch = collate(packs, group, plan.max_docs)
        plan.run.data_seconds += time.perf_counter() - started
        yield batch


def heldout_rows(plan: Plan, micro: int, at_least: int = 1) -> np.ndarray:
    """All held-out rows, and empty ones so that every replica has as many micro-batches."""
    n = len(plan.heldout)
    count = max(at_least, -(-n // (plan.replicas * micro)))
    rows = np.full(count * plan.replicas * micro, -1)
    rows[:n] = np.arange(n)
    return rows


def try_forward(plan: Plan, args: Namespace, ask: Callable) -> None:
    """A dry run's one forward pass, not compiled: a model may be refused only there."""
    batch = collate(plan.train, rows_of(plan, args, 0)[: args.micro_batch_size], plan.max_docs)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        ask(batch, torch.zeros(args.micro_batch_size, dtype=torch.int64))


def heldout_score(plan: Plan, total: torch.Tensor) -> tuple[float, int, int]:
    """(held-out loss, rows answered exactly, rows) from loss.score's sum over all held-out rows."""
    loss, wrong = total.tolist()
    rows = len(plan.heldout.row_docs)
    return loss / int(plan.heldout.label_counts.sum()), rows - round(wrong), rows


def show_answers(plan: Plan, args: Namespace, ask: Callable) -> None:
    """Print the model's answers to three prompts beside those in the data. ask: see generate."""
    if not args.sample_tokens:
        return
    most = args.seq_len - min(args.sample_tokens, args.seq_len // 2)
    pairs = prompts_of(plan.heldout or plan.train, 3, most)
    shape = (args.micro_batch_size, args.seq_len)
    stop = set(stop_tokens(plan.tokenizer))
    prompts = [prompt for prompt, _ in pairs]
    answers = generate(ask, prompts, shape, plan.max_docs, args.sample_tokens, stop)
    for (prompt, expected), answer in zip(pairs, answers, strict=True):
        text = [
            plan.tokenizer.decode(ids, skip_special_tokens=True)
            for ids in (prompt, answer, expected)
        ]
        plan.run.say(
            "\nprompt   {}\nanswer   {}\nexpected {}".format(*(" ".join(t.split()) for t in text))
        )
