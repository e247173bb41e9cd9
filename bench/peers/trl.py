"""TRL's SFTTrainer with PEFT's LoRA on rows of random tokens, beside our adapters: as TRL ships it,
with its chunked loss, and with FSDP2 on several GPUs. Run as python -m bench.peers.trl, the row in
the environment."""

import importlib.util
import json
import os
import re
import statistics
import sys
import time

import torch

PACKAGES = "trl peft"
ROW = "BENCH_TRL_ROW"  # the row to measure, as JSON
FIGURES = re.compile(r"trl figures: (\{.*\})")
WARMUP = 2  # steps left out, as in our summaries


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
        "peak_mem_gb": figures["peak_mem_gb"],
    }
    config = {"global_batch": batch, "seq_len": row["seq_len"]}
    return {"summary": summary, "config": config, "env": figures["env"]}


def flag(row: dict, name: str, default: float) -> float:
    """The number that follows a flag of ours in the row."""
    found = re.search(rf"--{name} ([\d.]+)", row["flags"])
    return float(found[1]) if found else default


# ---------------------------------------------------------------- inside the processes


def random_model(config, device: torch.device):
    """The model in bf16 with weights that repeat a million random numbers: quick to make."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rotary = type(model.model.rotary_emb)(config)  # its buffers have values
    model = model.to_empty(device=device)
    model.model.rotary_emb = rotary.to(device)
    model.tie_weights()
    numbers = (torch.randn(1 << 20, device=device) * 0.02).bfloat16()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2:  # a norm
                p.fill_(1)
                continue
            for part in p.view(-1).split(len(numbers)):
                part.copy_(numbers[: len(part)])
    return model


def tokenizer():
    """One that is not used: rows are token ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    from importlib.metadata import version

    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from llm_demo.device import World
    from llm_demo.run.environment import environment

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
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = random_model(config, device if size == 1 else torch.device("cpu"))
    n = row["micro"] * row["ga"] * size * row["steps"]
    rows = torch.randint(3, config.vocab_size, (n, row["seq_len"])).tolist()
    data = Dataset.from_dict({"input_ids": rows})
    times = []

    def wait():
        if on_gpu:
            torch.cuda.synchronize()

    class Timer(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            wait()
            self.started = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            wait()
            times.append((time.perf_counter() - self.started) * 1e3)

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
        bf16=row["dtype"] == "bf16", use_cpu=not on_gpu, gradient_checkpointing=row["ckpt"],
        max_length=row["seq_len"], packing=False, report_to=[], logging_steps=1000,
        save_strategy="no", dataset_kwargs={"skip_prepare_dataset": True},
        use_liger_kernel=bool(importlib.util.find_spec("liger_kernel")) and on_gpu, **sharded,
    )  # fmt: skip
    rank_of_adapters = int(flag(row, "lora_rank", 16))
    adapters = LoraConfig(
        r=rank_of_adapters, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = SFTTrainer(
        model=model, args=settings, train_dataset=data, processing_class=tokenizer(),
        peft_config=adapters, callbacks=[Timer()],
    )  # fmt: skip
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    peaks = [peak]
    if size > 1:
        peaks = [None] * size
        torch.distributed.all_gather_object(peaks, peak)
    if rank == 0:
        env = environment(World(rank, size, local, device))
        env["versions"] |= {name: version(name) for name in ("trl", "peft")}
        figures = {"step_ms": times, "peak_mem_gb": peaks, "env": env}
        print("trl figures:", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
