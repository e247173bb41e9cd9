"""Runs main() of a training script for each case of a JSON file, in processes started by torchrun,
and keeps what engines don't tell: every gradient before clipping, every parameter at the end."""

import json
import os
import sys

import torch
import torch.distributed as dist

from llm_demo.dist import start

KIND, CASES = sys.argv[1:]
record = {"steps": []}


def watch_fsdp():
    import fsdp.train_fsdp as script

    def decoder_loss(lm, make=script.DecoderLoss):
        record["model"] = make(lm)
        return record["model"]

    def clipped_step(optimizer, clip, loss_scale, step=script.clipped_step):
        model = record["model"]
        found = ((n, p.grad) for n, p in named(model) if p.grad is not None)
        grads = {n: whole(grad) / loss_scale.scale.item() for n, grad in found}
        norm = step(optimizer, clip, loss_scale)
        record["steps"].append({"norm": norm.item(), "grads": grads})
        return norm

    def params():
        return {n: whole(p.detach()) for n, p in named(record["model"])}

    def named(model):
        return ((n.removeprefix("lm."), p) for n, p in model.named_parameters())

    def whole(t):
        return (t.full_tensor() if hasattr(t, "full_tensor") else t).clone().cpu()

    script.DecoderLoss, script.clipped_step = decoder_loss, clipped_step
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
            scale = getattr(self.optimizer, "loss_scale", 1.0)
            grads = {}
            for p in self.module.parameters():
                grads[p.hf_name] = safe_get_full_grad(p).float().clone().cpu() / scale
            step(self)
            record["steps"].append({"norm": float(self.get_global_grad_norm()), "grads": grads})

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


script, params = {"fsdp": watch_fsdp, "pp": watch_pp}[KIND]()
world = start()
script.start = lambda: world  # one process group for all cases
for case in json.load(open(CASES)):
    record["steps"].clear()
    sys.argv = [script.__file__, *case["argv"]]
    script.main()
    torch.save({"steps": record["steps"], "params": params()}, f"{case['out']}.{world.rank}.pt")
dist.barrier()
dist.destroy_process_group()
os._exit(0)
