"""TRL's SFTTrainer on rows of random tokens, beside our scripts: as TRL ships it, with Liger's
kernels if they are installed, with PEFT's LoRA if the row has --lora_rank, else with fp32 weights,
and with FSDP2 on several GPUs. Run as python -m bench.peers.trl, the row in the environment."""

import importlib.util
import inspect
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from llm_demo.machine.files import ROOT
from llm_demo.model.families import family_name, is_hybrid
from llm_demo.run.choices import try_rule
from llm_demo.run.folder import WARMUP, environment
from llm_demo.run.records import SETTLED

PACKAGES = "trl peft"
ROW = "BENCH_TRL_ROW"  # the row to measure, as JSON
FIGURES = re.compile(r"trl figures: (\{.*\})")
MEMORY = ("peak_mem_gb", "reserved_gb", "alloc_retries", "late_alloc_retries")


def installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("trl", "peft"))


def gpus_of(row: dict) -> int:
    return row["gpus"] or torch.cuda.device_count() or 1


def command_of(row: dict) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, f"--nproc_per_node={gpus_of(row)}", "-m", "bench.peers.trl"]


def read(row: dict, text: str) -> dict | None:
    """The figures that `main` prints, in the form of our summary; None if they are missing."""
    found = FIGURES.search(text)
    if not found:
        return None
    figures = json.loads(found[1])
    times = figures["step_ms"][WARMUP:]
    batch = row["micro"] * row["ga"] * gpus_of(row)
    median = statistics.median(times)
    summary = {
        "median_step_ms": median,
        "spread_step_ms": [min(times), max(times)],
        "median_slots_per_s": batch * row["seq_len"] / median * 1e3,
        **{name: figures[name] for name in MEMORY},
    }
    config = {"global_batch": batch, "seq_len": row["seq_len"]}
    return {"summary": summary, "config": config, "env": figures["env"]}


def flag(row: dict, name: str, default: float) -> float:
    """The number that follows a flag of ours in the row."""
    found = re.search(rf"--{name} ([\d.]+)", row["flags"])
    return float(found[1]) if found else default


# ---------------------------------------------------------------- inside the processes


def random_model(config, device: torch.device, dtype: torch.dtype = torch.bfloat16):
    """The model with weights that repeat a million random numbers: quick to make."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rotary = type(model.model.rotary_emb)(config)  # its buffers have values
    model = model.to_empty(device=device)
    model.model.rotary_emb = rotary.to(device)
    for module in model.modules():
        if module is not model.model.rotary_emb and [*module.buffers(recurse=False)]:
            model._init_weights(module)  # such as Gemma 4's scales
    model.tie_weights()
    numbers = (torch.randn(1 << 20, device=device) * 0.02).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2:  # a norm
                p.fill_(1)
                continue
            for part in p.view(-1).split(len(numbers)):
                part.copy_(numbers[: len(part)])
    return model


def read_random_model(config, device: torch.device, read):
    """What read(folder) returns; the folder holds random weights in 16 bits and a tokenizer."""
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        random_model(config, device).save_pretrained(folder)
        for file in (ROOT / "models/qwen3-tiny").glob("*token*"):
            shutil.copy(file, folder)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return read(folder)


def in_four_bits(folder: str):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, dtype=torch.bfloat16, attn_implementation="sdpa"
    )


def tokenizer():
    """One that is not used: rows are token ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def give_rule(config, dtype: str) -> None:
    """Let transformers' linear attention use the kernel that our scripts would: its own choice of
    fla's kernels has no right backward on some cards."""
    family = family_name(config).removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rules = ("fla", "fla_kda") if importlib.util.find_spec("fla") else ()
    rule = next((r for r in rules if try_rule(r, dtype, config) is None), None)
    if rule == "fla_kda":
        from fla.ops.kda import chunk_kda

        def by_kda(query, key, value, g, beta, **kwargs):
            g = g[..., None].expand(*g.shape, key.shape[-1])
            how = {"use_qk_l2norm_in_kernel": kwargs["use_qk_l2norm_in_kernel"]}
            return chunk_kda(query, key, value, g, beta, **how)[0], None

        module.torch_chunk_gated_delta_rule = by_kda
    elif rule is None:
        plain = inspect.unwrap(module.torch_chunk_gated_delta_rule)
        module.torch_chunk_gated_delta_rule = plain
    print(f"linear attention: {rule or 'in PyTorch'}", flush=True)


def load(row: dict, config, device: torch.device):
    """(model, tokenizer, PEFT's configuration or None)."""
    from peft import LoraConfig

    alone, rank = int(os.environ["WORLD_SIZE"]) == 1, int(flag(row, "lora_rank", 0))
    config._attn_implementation = "sdpa"
    dtype = torch.bfloat16 if rank and row["dtype"] == "bf16" else torch.float32
    if flag(row, "base_bits", 16) == 4:
        model = read_random_model(config, device, in_four_bits)
    else:
        model = random_model(config, device if alone else torch.device("cpu"), dtype)
    adapters = LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return model, tokenizer(), adapters if rank else None


def main(load=load, packages: tuple = ("trl", "peft"), **settings_of_peer) -> None:
    """Train the row and print its figures. load: as above. packages: whose versions to record.
    settings_of_peer: for SFTConfig."""
    from importlib.metadata import version

    from datasets import Dataset
    from transformers import AutoConfig, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from llm_demo.core.mesh import World
    from llm_demo.core.timer import memory_peaks

    row = json.loads(os.environ[ROW])
    rank, size, local = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        if limit := flag(row, "device_memory_gb", 0):
            total = torch.cuda.get_device_properties(device).total_memory / 2**30
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    config = AutoConfig.from_pretrained(row["model"])
    config.use_cache = False
    torch.manual_seed(0)
    if is_hybrid(config):
        give_rule(config, row["dtype"])
    model, words, adapters = load(row, config, device)
    n = row["micro"] * row["ga"] * size * row["steps"]
    rows = torch.randint(3, config.vocab_size, (n, row["seq_len"])).tolist()
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    times, retries = [], []

    def wait():
        if on_gpu:
            torch.cuda.synchronize()

    class Timer(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            if on_gpu:
                torch.cuda.empty_cache()  # as our scripts do
                torch.cuda.reset_peak_memory_stats()

        def on_step_begin(self, *args, **kwargs):
            wait()
            self.started = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            wait()
            times.append((time.perf_counter() - self.started) * 1e3)
            retries.append(memory_peaks(device)[2])

    sharded = {}
    if size > 1:
        layer = type(model.model.layers[0]).__name__
        config_of_fsdp = {
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": [layer],
            "reshard_after_forward": "--reshard_after_forward" in row["flags"],
            "cpu_ram_efficient_loading": True,
        }
        sharded = {"fsdp": True, "fsdp_config": config_of_fsdp}
    settings = SFTConfig(
        output_dir="/tmp/trl", max_steps=row["steps"], learning_rate=1e-4, warmup_steps=2,
        per_device_train_batch_size=row["micro"], gradient_accumulation_steps=row["ga"],
        bf16=row["dtype"] == "bf16", use_cpu=not on_gpu, max_length=row["seq_len"], packing=False,
        report_to=[], logging_steps=1000, save_strategy="no", optim="adamw_torch_fused",
        dataset_kwargs={"skip_prepare_dataset": True},
        **{"gradient_checkpointing": row["ckpt"],
           "use_liger_kernel": bool(importlib.util.find_spec("liger_kernel")) and on_gpu,
           **sharded, **settings_of_peer},
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=settings, train_dataset=data, processing_class=words,
        peft_config=adapters, callbacks=[Timer()],
    )  # fmt: skip
    trainer.train()
    allocated, reserved, _ = memory_peaks(device)
    peaks = [(allocated, reserved)]
    if size > 1:
        peaks = [None] * size
        torch.distributed.all_gather_object(peaks, (allocated, reserved))
    if rank == 0:
        env = environment(World(rank, size, local, device))
        env["versions"] |= {name: version(name) for name in packages}
        late = retries[-1] - retries[:SETTLED][-1]
        memory = [*map(list, zip(*peaks, strict=True)), retries[-1], late]
        figures = {"step_ms": times, "env": env, **dict(zip(MEMORY, memory, strict=True))}
        print("trl figures:", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
