"""A run's checkpoint as a Hugging Face folder, from the fp32 masters, on the CPU: it holds one file
to write and the masters of a few of its tensors. Adapters become a PEFT adapter or, merged, the
whole model."""

import copy
import functools
import json
import re
from pathlib import Path

import torch

from llm_demo.core.errors import UserError, printable
from llm_demo.flags.args import names_of
from llm_demo.machine.device import DTYPES
from llm_demo.machine.files import write_text
from llm_demo.machine.process import appearing
from llm_demo.machine.text import blame, differences
from llm_demo.model.export_files import described_model, merged, write_adapter, write_weights
from llm_demo.model.families import family_name
from llm_demo.model.low_bits import fp8_config
from llm_demo.model.model_folder import describe
from llm_demo.model.source import find_model, load_tokenizer
from llm_demo.model.untrained import RECORD, Untrained, read_record, untrained_in
from llm_demo.model.weights_files import Weights, base_digest, identity_of, in_files, open_weights
from llm_demo.options.lora import factors_of
from llm_demo.run.checkpoint_files import checked_facts, compare_shapes, read_tensors, weights_of
from llm_demo.run.folder import object_in
from llm_demo.run.inputs import refuse_used

IN_4_BITS = (
    "note: the adapters were trained over this base in 4 bits and are now added to its 16-bit "
    "weights, so the model answers a little differently: evaluate it"
)
OF_TEXT = (
    "load the base with a class for text (AutoModelForCausalLM of Qwen3.5): on a class with images "
    "these adapters have no effect; for servers --merge them"
)
TEMPLATE = ("learn_reasoning", "chat_template_kwargs")
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


def export(
    checkpoint: Path,
    out: Path,
    dtype: str = "bf16",
    max_shard_size: str | int = "5GB",
    merge: bool = False,
    base: str | None = None,
    text_only: bool = False,
) -> str:
    """Write weights, config, generation config, tokenizer and model card to `out`, which appears
    only when complete. A run of adapters is written without the base's weights and configurations,
    or with `merge` as the merged model. base: where that base is now. text_only: without what the
    base has beside the text. Returns a line for the log. Raises UserError if `out` is not empty."""
    refuse_used(out)
    model = checkpoint.parent.parent / "model"
    if not (model / "config.json").is_file():
        raise UserError(
            f"{model}/config.json is missing: resume the run in {model.parent}, which writes it "
            "again (its command with --resume auto)"
        )
    lora, record = checked_facts(checkpoint).get("adapters"), read_record(model)
    whole, fp8 = merge or not lora, dtype == "fp8"
    more = whole and not text_only and record["why"] is None  # than the text
    if not lora and (merge or base and not more):
        raise UserError(f"--{'merge' if merge else 'base'}: {checkpoint} holds no adapters")
    if not whole and (fp8 or text_only):
        flag = f"--dtype {dtype}" if fp8 else "--text_only"
        raise UserError(f"{flag}: {checkpoint} holds adapters: merge them, with --merge")
    bits = lora["base"].get("bits") if lora else None
    weights = None  # of the base
    if lora and (merge or base):
        lora, weights = find_base(checkpoint, lora, base)
    untrained = find_untrained(record, base) if more else Untrained()
    with appearing(out) as part:
        config, shapes, in_fp32 = described_model(model)
        held = factors_of(lora, shapes) if lora else shapes
        compare_shapes(checkpoint, weights_of(checkpoint), held, "by its configuration")
        read = functools.partial(read_tensors, checkpoint)
        tokenizer = load_tokenizer(str(model))
        kind = DTYPES.get(dtype, torch.bfloat16)  # of what is not in fp8
        if whole:
            written = copy.deepcopy(config)
            if fp8:
                inside = "model.language_model." if more and record["images"] else "model."
                quantization = fp8_config(in_files(shapes), untrained.places, inside)
                written.quantization_config = quantization
            notes = describe(model, part, tokenizer, written, kind, whole=more)
            if more:
                notes.append(f"the whole model: what was not trained is as in {record['path']}")
            elif record["why"] and not text_only:
                notes.append(f"note: the text alone: {record['why']}")
            if lora:
                read = merged(read, held, lora, weights)
            n_bytes = write_weights(
                folder=part,
                read=read,
                shapes=shapes,
                dtype=kind,
                max_shard_size=max_shard_size,
                in_fp32=in_fp32,
                fp8=fp8,
                untrained=untrained,
                family=family_name(config),
            )
            if bits == 4 and not (weights and weights.packed):
                notes.append(IN_4_BITS)
        else:
            notes = describe(model, part, tokenizer)
            n_bytes = write_adapter(folder=part, read=read, shapes=held, dtype=kind, lora=lora)
            if record["images"]:
                notes.append(OF_TEXT)
        write_text(part / "README.md", card(checkpoint, out.name, None if whole else lora))
    what = "weights" if whole else "adapters"
    line = f"exported {checkpoint} to {out}: {n_bytes / 1e6:,.0f} MB of {what} in {dtype}"
    return "\n".join([line, *notes])


def find_untrained(record: dict, base: str | None) -> Untrained:
    """What a run recorded of its base. base: the folder or hub id if it has moved. Raises UserError
    if it is gone, or not as it was."""
    try:
        with blame(RECORD):
            files = ["config.json", *(file for file, _ in record["tensors"].values())]
            given = {"revision": record["revision"], "files": files}
            folder = find_model(base) if base else find_model(record["path"], **given)
            return untrained_in(folder, record)
    except UserError as e:
        raise UserError(
            f"{e}; name a copy of the base as it was with --base, or write the text alone with "
            "--text_only (python -m llm_demo.export)"
        ) from None


def find_base(checkpoint: Path, lora: dict, base: str | None) -> tuple[dict, Weights]:
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
    if weights is None:
        raise UserError(f"{folder}, the adapters' base, has no weights")
    now = identity_of(name, folder, weights)
    if base_digest(now) != base_digest(lora["base"]):
        changes = "; ".join(differences(lora["base"], now))
        raise UserError(f"{checkpoint} holds adapters of another base than {folder}: {changes}")
    return {**lora, "base": now}, weights


# ---------------------------------------------------------------- the model card


def heldout_of(checkpoint: Path, facts: dict) -> str:
    """The held-out figures of a checkpoint, in words. A run that was stopped in its last evaluation
    has measured them after its last checkpoint: they are in summary.json."""
    loss, step = facts["eval_loss"], facts["step"]
    summary = checkpoint.parent.parent / "summary.json"
    if loss is None and summary.exists():
        loss = object_in(summary).get("eval_loss", {}).get(str(step))
    if loss is None:
        return "not measured"
    text = f"{loss:.4f}"
    for measured, share in facts["exact"]:
        if measured == step:
            text = f"{loss:.4f}, {share:.1%} of the examples answered exactly"
    return text


def plain(value) -> str:
    """A text for a model card in one line, without Markdown: no code, link, table or entity of
    HTML. It may be a stranger's."""
    text = " ".join(printable(str(value)).split())[:200]
    text = text.encode("utf-8", "replace").decode() or "–"
    return re.sub("[\\\\<`*|&~\\[\\]]", lambda found: f"&#{ord(found[0])};", text)


def shown_in(settings: dict) -> list[str]:
    """Which settings a card shows."""
    names = ["global_batch", *names_of("card")]
    if settings.get("lora_rank"):
        names += names_of("adapter_card")
    # of the chat template: its text begins with them as defaults
    return names + [key for key in TEMPLATE if settings.get(key) not in (None, True)]


def card(checkpoint: Path, name: str, lora: dict | None = None) -> str:
    """A model card with the run's own facts. lora: those of adapters, if it is one of them. Raises
    UserError if the run's configuration is not of this version."""
    file = checkpoint.parent.parent / "config.json"
    facts, settings = checked_facts(checkpoint), object_in(file)
    with blame(f"{file} is not the configuration of a run"):
        base = plain(Path(settings["model_name_or_path"]).name)
        data = [plain(Path(part.strip()).name) for part in settings["train_json"].split(",")]
        parallelism = settings["parallelism"]
    if settings.get("resumed_step"):  # only the last run's is recorded
        parallelism = f"last by {parallelism}"
    began = f"`{base}`"
    if settings.get("random_weights") is True:
        began = f"random weights (configuration of {began})"
    adapter = settings.get("adapter")
    if adapter:
        began += f" with the adapter `{plain(Path(adapter).name)}`"
    head, on_hub = "library_name: transformers", settings.get("base_model")
    if lora:
        head, path = "library_name: peft", lora["base"]["path"]
        on_hub = on_hub if path.startswith("/") else path
    if isinstance(on_hub, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", on_hub):
        head += f"\nbase_model: {on_hub}"
    rows = [f"| {key} | {plain(settings.get(key))} |" for key in shown_in(settings)]
    return CARD.format(
        head=head,
        title=f"{base} fine-tuned on {', '.join(data)}",
        name=json.dumps(name).replace("<", r"\u003c"),
        steps=facts["step"],
        tokens=facts["tokens"],
        learnt=facts["label_tokens"],
        parallelism=plain(parallelism),
        base=began,
        data=", ".join(f"`{name}`" for name in data),
        heldout=heldout_of(checkpoint, facts),
        table="\n".join(rows),
    )
