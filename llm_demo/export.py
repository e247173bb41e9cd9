"""Export a checkpoint as a Hugging Face folder: python -m llm_demo.export RUN_OR_CHECKPOINT OUT

Works for all scripts, from the fp32 masters, on the CPU. It needs neither the training GPUs nor
memory for the whole model: it holds one file to write and the masters of a few of its tensors.
Adapters become a PEFT adapter, or with --merge the whole model."""

import argparse
import copy
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from llm_demo.core.errors import UserError, printable
from llm_demo.flags.args import TrainArgs, names_of
from llm_demo.flags.parsing import PlainParser, choices, path_of, size
from llm_demo.machine.process import early
from llm_demo.run.inputs import refuse_used

OF_WEIGHTS = (*choices(TrainArgs, "dtype")[1:], "fp8")


def make_parser() -> argparse.ArgumentParser:
    parser = PlainParser(prog="python -m llm_demo.export", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("source", type=path_of, help="a checkpoint, or a run folder for its newest complete one")
    add("out", type=path_of, help="folder to create")
    add(
        "--dtype",
        choices=OF_WEIGHTS,
        default="bf16",
        help="dtype of the weights; fp8: linear layers with a scale for 128 x 128 numbers, as "
        "DeepSeek-V3, the rest in bf16",
    )
    add("--merge", action="store_true", help="add adapters to their base: writes the whole model")
    add("--base", help="folder or hub id of that base, if it has moved")
    add("--max_shard_size", type=size, default="5GB", help="largest weights file")
    add("--push_to_hub", metavar="REPO", help="also upload to this private repository")
    add("--public", action="store_true", help="make the --push_to_hub repository public")
    return parser


def check(args) -> None:
    """Raise UserError for flags that contradict each other, and for folders that can't be used."""
    if args.public and not args.push_to_hub:
        raise UserError("--public: set --push_to_hub too, which names the repository")
    source = args.source
    if not source.is_dir():
        raise UserError(f"{source}: no such folder")
    if source.name == "checkpoints" and not (source / "checkpoints").exists():
        raise UserError(f"{source} holds a run's checkpoints: name the run, {source.parent}")
    refuse_used(args.out)


if __name__ == "__main__":  # before the slow imports
    early(lambda: make_parser().parse_args(), check)

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from llm_demo.core.decoder import materialise, skeleton
from llm_demo.core.experts import DECAYS
from llm_demo.core.mesh import World
from llm_demo.machine.device import DTYPES, drawn_on, this_device
from llm_demo.machine.dist import run
from llm_demo.machine.files import write_json, write_text
from llm_demo.machine.process import appearing, read_text
from llm_demo.machine.text import blame, differences, size_of, watched, words_of
from llm_demo.model.adapter_folder import BASE, BITS
from llm_demo.model.adapters import factor_names, factors_of, in_peft, merge_into, peft_targets
from llm_demo.model.families import family_of
from llm_demo.model.low_bits import E4M3, SCALES, as_stored, fp8_config, laid_out
from llm_demo.model.model_folder import describe, on_meta
from llm_demo.model.source import TOKENIZERS, find_model, load_tokenizer, read_config
from llm_demo.model.weights_files import (
    QUANTISED,
    Weights,
    as_in_files,
    base_digest,
    identity_of,
    in_files,
    open_weights,
    same_base,
)
from llm_demo.run.checkpoint_files import (
    checked_facts,
    compare_shapes,
    find_checkpoint,
    read_tensors,
    weights_of,
)

ALONE = World(0, 1, 0, torch.device("cpu"))  # this process
WEIGHTS = "model{suffix}.safetensors"
READ = 1 << 30  # bytes of fp32 masters read at once, or one tensor that has more
TEMPLATE = ("learn_reasoning", "chat_template_kwargs")
IN_4_BITS = (
    "note: the adapters were trained over this base in 4 bits and are now added to its 16-bit "
    "weights, so the model answers a little differently: evaluate it"
)
CARD = """---
{head}
tags: [sft]
---
# {title}
Fine-tuned with llm_demo, {parallelism}, {steps} optimizer steps, from {base} on {data}:
{tokens:,} tokens, {learnt:,} of them learnt. Held-out loss {heldout}.

```python
from transformers import pipeline

model = pipeline("text-generation", {name})  # this folder, or its name on the hub
print(model([{{"role": "user", "content": "Your question"}}], max_new_tokens=256))
```

| setting | value |
|---|---|
{table}
"""


def export_of(out: Path, steps: int) -> Path:
    """`out`, or beside it out_step_N if `out` holds an export of another step than `steps`."""
    card = out / "README.md"
    other = card.is_file() and f", {steps} optimizer steps, " not in card.read_text("utf-8")
    return out.with_name(f"{out.name}_step_{steps}") if other else out


def main() -> None:
    args = make_parser().parse_args()
    check(args)
    named = os.path.join(".", args.source)  # "auto" is a folder here
    checkpoint = find_checkpoint(named, Path(named), ALONE, print)
    print(export(checkpoint, args.out, args.dtype, args.max_shard_size, args.merge, args.base))
    if args.push_to_hub:
        push(args.out, args.push_to_hub, private=not args.public)


def export(
    checkpoint: Path,
    out: Path,
    dtype: str = "bf16",
    max_shard_size: str = "5GB",
    merge: bool = False,
    base: str | None = None,
) -> str:
    """Write weights, config, generation config, tokenizer and model card to `out`, which appears
    only when complete. A run of adapters is written without the base's weights and configurations,
    or with `merge` as the merged model. base: where that base is now. Returns a line for the log.
    Raises UserError if `out` is not empty."""
    refuse_used(out)
    source = checkpoint.parent.parent
    model = source / "model"
    for names in (["config.json"], TOKENIZERS):
        if not any((model / name).is_file() for name in names):
            raise UserError(
                f"{model}/{names[0]} is missing: resume the run in {source}, which writes it again "
                "(its command with --resume auto)"
            )
    lora, weights = checked_facts(checkpoint).get("adapters"), None
    if not lora and (merge or base):
        raise UserError(f"--{'merge' if merge else 'base'}: {checkpoint} holds no adapters")
    bits = lora and lora["base"].get("bits")
    if merge or base:
        lora, weights = find_base(checkpoint, lora, base)
    whole, fp8 = merge or not lora, dtype == "fp8"
    if fp8 and not whole:
        raise UserError(f"--dtype {dtype}: {checkpoint} holds adapters: merge them, with --merge")
    with appearing(out) as part:
        config, shapes, buffers = model_of(model)
        held = factors_of(lora, shapes) if lora else shapes
        compare_shapes(checkpoint, weights_of(checkpoint), held, "by its configuration")
        described = copy.deepcopy(config) if whole else None
        if fp8:
            described.quantization_config = fp8_config(in_files(shapes))
        rest = DTYPES.get(dtype, torch.bfloat16)
        notes = describe(model, part, load_tokenizer(str(model)), described, rest)
        if whole:
            read = merged(checkpoint, config, held, lora, weights) if lora else None
            n_bytes = write_weights(
                checkpoint, part, shapes, rest, max_shard_size, buffers, read, fp8
            )
            if bits == 4 and not (weights and weights.packed):
                notes.append(IN_4_BITS)
        else:
            n_bytes = write_adapter(checkpoint, part, held, rest, lora)
            if family_of(config).text_of:
                notes.append(
                    "load the base with AutoModelForCausalLM: on a class with images these "
                    "adapters have no effect; for servers --merge them"
                )
        write_text(part / "README.md", card(checkpoint, out.name, None if whole else lora))
    kind = "weights" if whole else "adapters"
    line = f"exported {checkpoint} to {out}: {n_bytes / 1e6:,.0f} MB of {kind} in {dtype}"
    return "\n".join([line, *notes])


def model_of(folder: Path) -> tuple:
    """(a run's saved configuration, {name: shape} of its model's weights, a tied one once, and
    those of them that stay in fp32). Raises UserError for any problem with it."""
    with blame(folder / "config.json"):  # which may come from elsewhere
        config = read_config(folder)
        family_of(config)  # raises KeyError
        model = on_meta(config)
    buffers = {name: t for name, t in model.named_buffers() if name in model.state_dict()}
    weights = dict(model.named_parameters()) | buffers
    in_fp32 = {*buffers, *(n for n in weights if n.endswith(DECAYS))}
    return config, {name: tuple(t.shape) for name, t in weights.items()}, in_fp32


def save_finite(tensors: dict[str, torch.Tensor], file: Path, checkpoint: Path, **more) -> None:
    """Write safetensors; more: further metadata. Raises UserError if a number is not finite."""
    for name, t in tensors.items():
        if not (t.float() if t.dtype == E4M3 else t).isfinite().all():
            raise UserError(
                f"{checkpoint}: {name} is not finite in {t.dtype}; nothing was exported"
            )
    save_file(tensors, file, metadata={"format": "pt", **more})


def write_adapter(checkpoint: Path, folder: Path, wanted: dict, dtype, lora: dict) -> int:
    """Write adapters as PEFT does; returns bytes. wanted: {name: shape} of their factors; lora:
    what Lora.facts() returned. Raises UserError without peft."""
    try:
        from peft import LoraConfig  # takes a second
    except ImportError:
        raise UserError(
            "adapters are written by peft, which is not installed: run setup.sh, or write the "
            "whole model with --merge"
        ) from None
    tensors = {name: torch.empty(shape) for name, shape in wanted.items()}
    read_tensors(checkpoint, tensors)
    targets = peft_targets(tensors)
    tensors = {name: t.to(dtype) for name, t in in_peft(tensors).items()}
    noted = {BASE: base_digest(lora["base"]), BITS: str(lora["base"].get("bits", 16))}
    save_finite(tensors, folder / "adapter_model.safetensors", checkpoint, **noted)
    alpha = int(lora["alpha"]) if lora["alpha"] == int(lora["alpha"]) else lora["alpha"]
    LoraConfig(
        r=lora["rank"], lora_alpha=alpha, lora_dropout=lora["dropout"], **targets,
        base_model_name_or_path=lora["base"]["path"], task_type="CAUSAL_LM", inference_mode=True,
    ).save_pretrained(folder)  # fmt: skip
    return sum(t.nbytes for t in tensors.values())


def find_base(checkpoint: Path, lora: dict, base: str | None) -> tuple[dict, Weights | None]:
    """(lora with the base's place now, the base's weights). lora: as Lora.facts() returned it;
    base: the folder or hub id if it has moved. Raises UserError if it is gone, or another one."""
    name = base or lora["base"]["path"]
    try:
        folder = find_model(name)
    except UserError as e:
        if base:
            raise
        raise UserError(f"{e}; if the adapters' base has moved, name it with --base") from None
    weights = open_weights(folder)
    before = {k: v for k, v in lora["base"].items() if k not in QUANTISED}
    now = identity_of(name, folder, weights, before.get("seed", 0), drawn_on())
    if not same_base(now, before):
        changes = "; ".join(differences(before, now))
        raise UserError(f"{checkpoint} holds adapters of another base than {folder}: {changes}")
    return {**lora, "base": now}, weights


def merged(checkpoint: Path, config, wanted: dict, lora: dict, weights: Weights | None) -> Callable:
    """A function that fills {name: tensor} with the sum of the base and its adapters.

    wanted: {name: shape} of the factors; weights: the base's, None for random ones."""
    lm, seed = None if weights else skeleton(config, "sdpa"), lora["base"].get("seed", 0)

    def read(tensors: dict[str, torch.Tensor]) -> None:
        names = [n for name in tensors for n in factor_names(name) if n in wanted]
        factors = {n: torch.empty(wanted[n]) for n in names}
        read_tensors(checkpoint, factors)
        for name, t in tensors.items():
            if weights:
                t.copy_(weights.read(name))
            else:
                owner, _, kind = name.rpartition(".")
                module = materialise(lm, owner, None, seed, torch.device(this_device().type))
                t.copy_(getattr(module, kind).detach())
                module.to("meta")
            merge_into(name, t, factors, lora)

    return read


def write_weights(
    checkpoint: Path,
    folder: Path,
    wanted: dict,
    dtype,
    max_shard_size,
    buffers=frozenset(),
    read: Callable | None = None,
    fp8: bool = False,
) -> int:
    """Write safetensors, sharded with an index if needed; returns bytes. wanted: {name: shape} of
    the configuration's model; fused experts are written as a tensor for each matrix of each.
    buffers: names that stay in fp32. read(tensors): fills {name: tensor}; default: from the
    checkpoint. fp8: see low_bits.py."""
    read = read or functools.partial(read_tensors, checkpoint)
    of_files = {
        name: torch.empty(shape, dtype=torch.float32 if name in buffers else dtype, device="meta")
        for name, shape in in_files(wanted).items()
    }
    if fp8:
        of_files = laid_out(of_files)
    plan = in_shards(of_files, max_shard_size)
    with watched("exporting", plan.metadata["total_size"], lambda: size_of(folder)):
        for file, names in plan.filename_to_tensors.items():
            kinds, tensors = {name: of_files[name].dtype for name in names}, {}
            # a fused tensor is read whole, even if another file has some of its experts
            weights = {name.removesuffix(SCALES) for name in kinds}
            needed = {n: s for n, s in wanted.items() if weights & in_files({n: s}).keys()}
            masters = {n: torch.empty(s, device="meta") for n, s in needed.items()}
            for group in in_shards(masters, READ).filename_to_tensors.values():
                tensors |= read_group({name: needed[name] for name in group}, kinds, read)
            save_finite(tensors, folder / file, checkpoint)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index, indent=2)
    return plan.metadata["total_size"]


def in_shards(tensors: dict[str, torch.Tensor], most):
    """The hub's plan to split tensors into groups of at most `most` bytes, or of one tensor."""
    return split_state_dict_into_shards_factory(
        tensors, get_storage_size=lambda t: t.nbytes, filename_pattern=WEIGHTS, max_shard_size=most
    )


def read_group(shapes: dict[str, tuple], kinds: dict, read: Callable) -> dict:
    """Read these parameters; returns {name: tensor} of what a file holds of them. kinds: {name:
    dtype} there."""
    masters = {name: torch.empty(shape) for name, shape in shapes.items()}
    read(masters)
    parts = [part for name, master in masters.items() for part in as_in_files(name, master).items()]
    # copies, since safetensors refuses shared memory
    return {n: t for part in parts for n, t in as_stored(*part, kinds).items()}


def heldout_of(checkpoint: Path, facts: dict) -> str:
    """The held-out figures of a checkpoint, in words. A run that was stopped in its last evaluation
    has measured them after its last checkpoint: they are in summary.json."""
    loss, share = facts["eval_loss"], dict(map(tuple, facts["exact"])).get(facts["step"])
    if loss is None:
        try:
            summary = json.loads(read_text(checkpoint.parent.parent / "summary.json"))
            loss = float(summary["eval_loss"][str(facts["step"])])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return "not measured"
    answered = "" if share is None else f", {share:.1%} of the rows answered exactly"
    return f"{loss:.4f}{answered}"


def one_line(value) -> str:
    """Text of a file for a model card. The file may be a stranger's."""
    text = " ".join(printable(str(value)).split())[:200]
    return text.encode("utf-8", "replace").decode() or "–"


def plain(value) -> str:
    """As `one_line`, without Markdown: no code, link, table or entity of HTML."""
    return re.sub("[\\\\<`*|&~\\[\\]]", lambda found: f"&#{ord(found[0])};", one_line(value))


def code(value) -> str:
    """As `one_line`, as code within a line."""
    text = one_line(value).replace("`", "'").replace("<", "&lt;")
    return f"`{text}`"


def card(checkpoint: Path, name: str, lora: dict | None = None) -> str:
    """A model card with the run's own facts. lora: those of adapters, if it is one of them. Raises
    UserError if the run's configuration is not of this version."""
    facts = checked_facts(checkpoint)
    file = checkpoint.parent.parent / "config.json"
    try:
        settings = json.loads(read_text(file))
        base, parallelism = Path(settings["model_name_or_path"]).name, settings["parallelism"]
        data = [Path(part.strip()).name for part in settings["train_json"].split(",")]
        shown = ("global_batch", *names_of("card"))
        if settings.get("lora_rank"):
            shown += names_of("adapter_card")
        # of the chat template: its text begins with them as defaults
        shown += tuple(key for key in TEMPLATE if settings.get(key) not in (None, True))
        quoted = {key: settings.get(key) for key in ("parallelism", "adapter", *shown)}
        if odd := [key for key, value in quoted.items() if isinstance(value, (dict, list))]:
            raise TypeError(f"{odd[0]} is neither a text nor a number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{file} is not the configuration of a run: {words_of(e)}") from e
    if settings.get("resumed_step"):  # only the last run's is recorded
        parallelism = f"last by {parallelism}"
    began = code(base)
    if settings.get("random_weights") is True:
        began = f"random weights (configuration of {began})"
    if adapter := quoted["adapter"]:
        began += f" with the adapter {code(Path(str(adapter)).name)}"
    head, on_hub = "library_name: transformers", settings.get("base_model")
    if lora:
        head, path = "library_name: peft", lora["base"]["path"]
        on_hub = on_hub if path.startswith("/") else path
    if isinstance(on_hub, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", on_hub):
        head += f"\nbase_model: {on_hub}"
    return CARD.format(
        head=head, title=f"{plain(base)} fine-tuned on {plain(', '.join(data))}",
        name=json.dumps(name).replace("<", r"\u003c"), steps=facts["step"], tokens=facts["tokens"],
        learnt=facts["label_tokens"], parallelism=plain(parallelism), base=began,
        data=", ".join(map(code, data)), heldout=heldout_of(checkpoint, facts),
        table="\n".join(f"| {key} | {plain(quoted[key])} |" for key in shown),
    )  # fmt: skip


def push(folder: Path, repo: str, private: bool = True) -> None:
    """Upload a folder to the hub with the token that huggingface_hub finds."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo).private:  # it existed before, and is not changed
            raise ValueError("it exists and is public: add --public or choose another name")
        api.upload_folder(repo_id=repo, folder_path=folder)
    except Exception as e:  # from several libraries below the hub's
        reason = (str(e).strip().splitlines() or [repr(e)])[0]
        raise UserError(f"--push_to_hub {repo}: {reason}; {folder} is complete") from e
    print(f"pushed {folder} to {repo}")


if __name__ == "__main__":
    run(main)
