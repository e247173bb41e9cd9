"""Runs main() of a training script for each case of a JSON file, in processes started by torchrun,
and keeps what engines don't tell: every gradient before clipping, every parameter at the end;
nothing of a case that is "quiet". "as_it_is": with FSDP2's own steps, before any without."""

import json
import os
import sys

import torch
import torch.distributed as dist

from llm_demo import optim
from llm_demo.dist import start

KIND, CASES = sys.argv[1:]
record = {"steps": [], "after_step": [], "case": {}}


def poison(grads):
    """Put a NaN into one rank's gradient, in the step that the case names."""
    where = record["case"].get("poison")
    if where and (where["rank"], where["step"]) == (dist.get_rank(), len(record["steps"])):
        # not the first: on the last stage that is the tied copy, which the first stage's stands for
        list(grads)[1].view(-1)[0] = torch.nan


def watch_fsdp():
    import fsdp.train_fsdp as script

    def load(model, *args, into=script.load):
        record["model"] = model
        into(model, *args)

    class Shards(script.Shards):
        def take_grads(self):
            if record["case"].get("quiet"):
                return super().take_grads()
            record["grads"] = grads()
            poison(p.grad.to_local() for p in record["model"].parameters())
            super().take_grads()

    def spare_bytes(*args, ours=script.spare_bytes):
        return [] if record["case"].get("as_it_is") else ours(*args)

    def grads():
        found = named(record["model"]).items()
        return {n: whole(p.grad) for n, p in found if p.grad is not None}

    def clipped_step(optimizer, clip, loss_scale, *rest, step=script.clipped_step):
        if record["case"].get("quiet"):
            return step(optimizer, clip, loss_scale, *rest)
        kept = record.pop("grads", None) or grads()
        kept = {n: grad / loss_scale.scale.item() for n, grad in kept.items()}
        norm = step(optimizer, clip, loss_scale, *rest)
        record["steps"].append({"norm": norm.item(), "grads": kept})
        if "poison" in record["case"]:
            record["after_step"].append(params())
        return norm

    def params():
        return {n: whole(p.detach()) for n, p in named(record["model"]).items()}

    def named(model):
        return {p.hf_name: p for p in model.parameters()}

    def whole(t):
        return (t.full_tensor() if hasattr(t, "full_tensor") else t).clone().cpu()

    script.load, script.Shards, script.clipped_step = load, Shards, clipped_step
    script.spare_bytes = spare_bytes
    return script, params


def watch_pp():
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.pipe import schedule
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    # DeepSpeed goes by the CPU's fp16 instructions; PyTorch computes in fp16 without them too.
    get_accelerator().is_fp16_supported = lambda: True
    import pp.ds_engine as ds_engine
    import pp.pp_train as script

    def make_engine(*args, make=ds_engine.make_engine):
        engine = record["engine"] = make(*args)
        step = engine._INSTRUCTION_MAP[schedule.OptimizerStep]

        def watched(self):
            if record["case"].get("quiet"):
                return step(self)
            scale = getattr(self.optimizer, "loss_scale", 1.0)
            grads = {}
            for p in self.module.parameters():
                grads[p.hf_name] = safe_get_full_grad(p).float().clone().cpu() / scale
            if self.using_bf16_optimizer:
                poison(p._hp_grad for p in self.module.parameters())
            else:
                poison(g for g in self.optimizer.averaged_gradients[0])
            step(self)
            record["steps"].append({"norm": float(self.get_global_grad_norm()), "grads": grads})
            if "poison" in record["case"]:
                record["after_step"].append(params())
            if record["case"].get("untie") and dist.get_rank() == 1:
                self.module.get_tied_weights_and_groups()[0][0].data[0, 0] += 1

        engine._INSTRUCTION_MAP[schedule.OptimizerStep] = watched
        return engine

    def params():
        engine = record["engine"]
        found = {}
        for p in engine.module.parameters():
            master = safe_get_full_fp32_param(p)
            found[p.hf_name] = (p if master is None else master).detach().float().clone().cpu()
        return found

    ds_engine.make_engine = make_engine
    return script, params


def make_adamw(*args, make=optim.make_adamw):
    """With activation checkpointing the AdamW of a GPU, compiled; on a CPU what would be."""
    *args, compiled = args
    return make(*args, compiled or "--use_activation_checkpointing true" in " ".join(sys.argv))


optim.CompiledAdamW.LARGE = 1 << 15  # so that tiny models have some
optim.CompiledAdamW.PIECE = 3 << 14  # and some of several pieces
if not torch.cuda.is_available():
    optim.compiled_adamw = lambda: optim._adamw  # C++ takes 20 s to compile
script, params = {"fsdp": watch_fsdp, "pp": watch_pp}[KIND]()
script.make_adamw = make_adamw
world = start()
script.start = lambda: world  # one process group for all cases
for case in json.load(open(CASES)):
    record.update(steps=[], after_step=[], case=case)
    sys.argv = [script.__file__, *case["argv"]]
    script.main()
    if case.get("quiet"):
        continue
    kept = {key: record[key] for key in ("steps", "after_step")}
    torch.save({**kept, "params": params()}, f"{case['out']}.{world.rank}.pt")
dist.barrier()
dist.destroy_process_group()
os._exit(0)
