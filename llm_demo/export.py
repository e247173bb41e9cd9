"""Export a checkpoint as a Hugging Face folder: python -m llm_demo.export RUN_OR_CHECKPOINT OUT

Works for both scripts, from the fp32 masters, on the CPU, one shard at a time. It needs neither the
training GPUs nor memory for the whole model."""

import argparse
import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
)

from llm_demo.args import PlainParser, size
from llm_demo.device import DTYPES, World
from llm_demo.dist import run
from llm_demo.errors import UserError
from llm_demo.files import PART, disk_full
from llm_demo.model.generate import stop_tokens
from llm_demo.model.names import in_files, matrices
from llm_demo.model.source import load_tokenizer
from llm_demo.optim import MOMENTS, PSGD
from llm_demo.progress import size_of, watched
from llm_demo.run.checkpoint_files import checked_facts, find_checkpoint, read_tensors, shapes_of

WEIGHTS = "model{suffix}.safetensors"
CARD = """---
library_name: transformers
tags: [sft]
---
# {name}
Fine-tuned with llm_demo, {parallelism}, {steps} optimizer steps, from `{base}` on `{data}`:
{tokens:,} tokens, {learnt:,} of them learnt. Held-out loss {heldout}.

| | |
|---|---|
{table}
"""


def make_parser() -> argparse.ArgumentParser:
    parser = PlainParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("source", help="a checkpoint, or a run folder for its newest complete checkpoint")
    add("out", type=Path, help="folder to create")
    add("--dtype", choices=DTYPES, default="bf16", help="dtype of the weights")
    add("--max_shard_size", type=size, default="5GB", help="largest weights file")
    add("--push_to_hub", metavar="REPO", help="also upload to this private repository")
    add("--public", action="store_true", help="make the --push_to_hub repository public")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    alone = World(0, 1, 0, torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    checkpoint = find_checkpoint(args.source, Path(args.source), alone, print)
    print(export(checkpoint, args.out, args.dtype, args.max_shard_size))
    if args.push_to_hub:
        push(args.out, args.push_to_hub, private=not args.public)


def export(checkpoint: Path, out: Path, dtype: str = "bf16", max_shard_size="5GB") -> str:
    """Write weights, config, generation config, tokenizer and model card to `out`, which appears
    only when complete. Returns a line for the log. Raises UserError if `out` is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty: choose another folder")
    source = checkpoint.parent.parent
    if not (source / "model/config.json").is_file():
        raise UserError(f"{source}/model/config.json is missing: {source} is not a run folder")
    part = out.with_name(f"{PART}{out.name}")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        config, shapes, buffers = model_of(source / "model")
        how = DTYPES[dtype], max_shard_size, buffers
        n_bytes = write_weights(checkpoint, part, shapes, *how)
        config.dtype = DTYPES[dtype]
        if getattr(config, "num_mtp_layers", 0):  # neither trained nor written
            config.num_mtp_layers = 0
        if not config.architectures:  # servers such as vLLM need it
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        config.save_pretrained(part)
        tokenizer = load_tokenizer(str(source / "model"))
        tokenizer.save_pretrained(part)
        generation_config(source / "model", tokenizer).save_pretrained(part)
        (part / "README.md").write_text(card(checkpoint, out.name))
        if out.exists():
            out.rmdir()
        part.rename(out)
    except Exception as e:  # from several libraries
        reason = disk_full(e, part)
        if not reason and not isinstance(e, OSError):
            raise
        raise UserError(f"cannot write {out}: {reason or e}") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return f"exported {checkpoint} to {out}: {n_bytes / 1e6:,.0f} MB of weights in {dtype}"


def model_of(folder: Path) -> tuple:
    """(a run's saved configuration, {name: shape} of its model's weights, a tied one once, and
    those of them that are buffers). Raises UserError for any problem with it."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            # eager, because a configuration may name a kernel to download
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=False
            )
        buffers = {name: t for name, t in model.named_buffers() if name in model.state_dict()}
        weights = dict(model.named_parameters()) | buffers
        return config, {name: tuple(t.shape) for name, t in weights.items()}, set(buffers)
    except Exception as e:  # the file may come from elsewhere
        reason = (str(e).strip().splitlines() or [repr(e)])[0]
        raise UserError(f"{folder}/config.json: {reason}") from e


def generation_config(folder: Path, tokenizer) -> GenerationConfig:
    """The model's own, with the stop tokens of its training data added: a base model knows only the
    end of a text, not of an assistant's turn."""
    config = GenerationConfig()
    if (folder / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(folder)
    own = config.eos_token_id
    own = own if isinstance(own, list) else [own] * (own is not None)
    config.eos_token_id = list(dict.fromkeys([*own, *stop_tokens(tokenizer)])) or None
    return config


def write_weights(
    checkpoint: Path, folder: Path, wanted: dict, dtype, max_shard_size, buffers=frozenset()
) -> int:
    """Write safetensors, sharded with an index if needed; returns bytes. wanted: {name: shape} of
    the configuration's model; fused experts are written as a tensor for each matrix of each.
    buffers: names that stay in fp32. Raises UserError if the tensors differ from it or are not
    finite."""
    ends = tuple(f".{name}" for name in MOMENTS + PSGD)
    shapes = {n: shape for n, shape in shapes_of(checkpoint).items() if not n.endswith(ends)}
    for name in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(name) != wanted.get(name):
            raise UserError(
                f"{checkpoint} does not match the model's configuration: {name} is "
                f"{shapes.get(name, 'missing')}, expected {wanted.get(name, 'none')}"
            )
    fused = {m.name: (n, m) for n, shape in wanted.items() for m in matrices(n, shape)}
    plan = split_state_dict_into_shards_factory(
        {
            name: torch.empty(
                shape, dtype=torch.float32 if name in buffers else dtype, device="meta"
            )
            for name, shape in in_files(wanted, set()).items()
        },
        get_storage_size=lambda t: t.nbytes,
        filename_pattern=WEIGHTS,
        max_shard_size=max_shard_size,
    )
    with watched("exporting", plan.metadata["total_size"], lambda: size_of(folder)):
        for file, names in plan.filename_to_tensors.items():
            # a fused tensor is read whole, even if another shard has some of its experts
            whole = {fused[n][0] if n in fused else n: None for n in names}
            whole = {name: torch.empty(shapes[name]) for name in whole}
            read_tensors(checkpoint, whole)
            tensors = {}
            for name in names:
                if name in fused:
                    owner, matrix = fused[name]  # a copy, since safetensors refuses shared memory
                    part = whole[owner][matrix.expert, matrix.rows]
                    tensors[name] = part.to(dtype, copy=True)
                else:
                    tensors[name] = whole[name].to(torch.float32 if name in buffers else dtype)
            del whole
            for name, t in tensors.items():
                if not t.isfinite().all():
                    raise UserError(
                        f"{checkpoint}: {name} is not finite in {dtype}; nothing was exported"
                    )
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return plan.metadata["total_size"]


def card(checkpoint: Path, name: str) -> str:
    """A model card with the run's own facts."""
    facts = checked_facts(checkpoint, ("step", "tokens", "label_tokens", "eval_loss"))
    file = checkpoint.parent.parent / "config.json"
    try:
        settings = json.loads(file.read_text())
        base, data = (Path(settings[k]).name for k in ("model_name_or_path", "train_json"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{file} is not the configuration of a run: {e!r}") from e
    of_old_run = "a pipeline" if "stages" in settings else "FSDP2"
    shown = ("seq_len", "global_batch", "lr", "lr_scheduler", "warmup_steps", "weight_decay",
             "max_grad_norm", "dtype", "seed", "train_on_prompt")  # fmt: skip
    return CARD.format(
        name=name, steps=facts["step"], tokens=facts["tokens"], learnt=facts["label_tokens"],
        parallelism=settings.get("parallelism", of_old_run), base=base, data=data,
        heldout="not measured" if facts["eval_loss"] is None else f"{facts['eval_loss']:.4f}",
        table="\n".join(f"| {key} | {settings.get(key)} |" for key in shown),
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
