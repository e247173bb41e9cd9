"""Runs main() of a training script for each case of a JSON file, in processes started by torchrun.
Wraps the script's `step` to record what the log lacks: every gradient, as AdamW receives it before
clipping, every parameter at the end, and the dtypes in which forwards see what decays depend on;
nothing of a "quiet" case."""

import functools
import gc
import json
import os
import sys

import torch
import torch.distributed as dist

from llm_demo.core import loss, optim
from llm_demo.core.decoder import delta_layers
from llm_demo.core.mesh import SPLIT
from llm_demo.machine.dist import start
from llm_demo.model import costs
from llm_demo.options import lora

KIND, CASES = sys.argv[1:]
lora.LARGE_RESULT = 0  # adapters are computed as for large inputs
record = {"steps": [], "after_step": [], "decays": set(), "case": {}}


def poison(grads):
    """Put a NaN into one rank's gradient, in the step that the case names."""
    where = record["case"].get("poison")
    if where and (where["rank"], where["step"]) == (dist.get_rank(), len(record["steps"])):
        # not the first: on the last stage that is the tied copy, which the first stage's stands for
        list(grads)[1].view(-1)[0] = torch.nan


def watch_fsdp(script):
    """Wrap the step of a script's class. Returns a function for the parameters."""
    step, optimizer = script.step, script.optimizer
    grads = {}

    def keep_grads(*_):
        if hasattr(optimizer, "grads"):  # HostAdamW
            sums = [t.clone() for t in optimizer.grads()]
            grads.update(zip(optimizer.masters.values(), sums, strict=True))
        for group in optimizer.param_groups:
            grads.update((p, p.grad.clone()) for p in group["params"] if p.grad is not None)

    def global_norm(grads, group, norm=optim.global_norm):
        poison(grads)
        return norm(grads, group)

    def whole(tensors, group):
        """{name: tensor} unsharded, on the CPU: in one exchange of one tensor, because one for each
        takes a quarter of a test's time."""
        local = {n: getattr(t, "_local_tensor", t).clone().cpu() for n, t in tensors.items()}
        if not group:
            return local
        shapes = [t.shape for t in local.values()]
        mine, parts = torch.cat([t.flatten() for t in local.values()]), [None] * group.size()
        dist.all_gather_object(parts, (mine, shapes), group=group)
        parts = [
            [t.view(shape) for t, shape in zip(flat.split(sizes), shapes, strict=True)]
            for flat, shapes in parts
            for sizes in [[shape.numel() for shape in shapes]]
        ]
        named = zip(local, zip(*parts, strict=True), strict=True)
        return {n: joined(of, *of_parts().get(n, ([range(len(of))], 0))) for n, of in named}

    def joined(shards, parts, dim):
        """A tensor out of its shards by rank. parts: the ranks of each part, which dim cuts."""
        if not shards[0].ndim:  # a buffer, whole on each rank
            return shards[0]
        return torch.cat([torch.cat([shards[r] for r in ranks]) for ranks in parts], dim)

    @functools.cache
    def state():
        """What training's state is spread over; its tensors' values change, not their places."""
        return script.state()

    @functools.cache
    def of_parts():
        """{name: (ranks, counted in a stage, of each part, the dimension that is cut)} of what is
        cut into parts, each of which is sharded."""
        spread = {n: t for n, t in state().items() if hasattr(t, "device_mesh")}
        spread = {n: t for n, t in spread.items() if t.device_mesh.mesh_dim_names[0] == SPLIT}
        ranks = {n: t.device_mesh.mesh - t.device_mesh.mesh.min() for n, t in spread.items()}
        return {n: (ranks[n].tolist(), t.placements[0].dim) for n, t in spread.items()}

    def group_of(tensors):
        """The ranks that each hold a shard of these; None: they are not sharded."""
        t = min(tensors.items(), key=lambda named: named[0].removesuffix(".exp_avg") in of_parts())[
            1
        ]
        return hasattr(t, "_local_tensor") and t.device_mesh.get_group(t.device_mesh.ndim - 1)

    @functools.cache
    def places():
        """({Hugging Face name: (key in `grads`, where in that tensor)}, group): each gradient lies
        in its master's gradient where its first moment lies in the master's."""
        moments = {optimizer.state[p]["exp_avg"].untyped_storage().data_ptr(): p for p in grads}
        masters = getattr(optimizer, "masters", {})  # of HostAdamW: a unit's moments are one tensor
        masters = {p.hf_name: master for p, master in masters.items()}
        found = {}
        tensors = {n: t for n, t in state().items() if n.endswith(".exp_avg")}
        for name, moment in tensors.items():
            name, local = name.removesuffix(".exp_avg"), getattr(moment, "_local_tensor", moment)
            found[name] = masters.get(name), None
            if name not in masters:
                where = local.shape, local.stride(), local.storage_offset()
                found[name] = moments[local.untyped_storage().data_ptr()], where
        return found, group_of(tensors)

    def named_grads():
        found, group = places()
        named = {n: grads[k].as_strided(*at) if at else grads[k] for n, (k, at) in found.items()}
        return whole(named, group)

    def watched(*args):
        loss, norm = step(*args)
        record["steps"].append({"norm": norm.item(), "grads": named_grads()})
        return loss, norm

    def params():
        ends = optim.MOMENTS + optim.PSGD
        tensors = {n: t for n, t in script.state().items() if not n.endswith(ends)}
        return whole(tensors, group_of(tensors))

    def see_decays(unit, inputs):
        for layer in delta_layers(unit):
            record["decays"] |= {layer.A_log.dtype, layer.dt_bias.dtype}

    for unit in script.model.units if KIND == "fsdp" else ():  # their hooks are not compiled
        unit.register_forward_pre_hook(see_decays)
    optimizer.register_step_pre_hook(keep_grads)
    optim.global_norm, script.step = global_norm, watched
    return params


def watch_pp(script):
    """Wrap the engine's own optimizer step. Returns a function for the parameters."""
    from deepspeed.runtime.pipe import schedule
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    engine = script.engine
    engine_step = engine._INSTRUCTION_MAP[schedule.OptimizerStep]

    def watched(self):
        scale = getattr(self.optimizer, "loss_scale", 1.0)
        grads = {}
        for p in self.module.parameters():
            grads[p.hf_name] = safe_get_full_grad(p).float().clone().cpu() / scale
        if self.using_bf16_optimizer:
            poison(p._hp_grad for p in self.module.parameters())
        else:
            poison(g for g in self.optimizer.averaged_gradients[0])
        engine_step(self)
        record["steps"].append({"norm": float(self.get_global_grad_norm()), "grads": grads})
        if record["case"].get("untie") and dist.get_rank() == 1:
            self.module.get_tied_weights_and_groups()[0][0].data[0, 0] += 1

    def params():
        found = {}
        for p in engine.module.parameters():
            master = safe_get_full_fp32_param(p)
            found[p.hf_name] = (p if master is None else master).detach().float().clone().cpu()
        return found

    engine._INSTRUCTION_MAP[schedule.OptimizerStep] = watched
    return params


def watch_zero(script):
    """Wrap the engine's own step and backward. Returns a function for the parameters."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    engine = script.engine
    engine_step, engine_backward = engine.step, engine.backward
    params = {p.hf_name: p for p in engine.module.parameters()}

    def backward(*args, **kwargs):
        def poisoned(grad):
            grad = grad.clone()
            poison([None, grad])
            return grad

        handle = params["model.norm.weight"].register_hook(poisoned)
        engine_backward(*args, **kwargs)
        handle.remove()

    def watched():
        scale = getattr(engine.optimizer, "loss_scale", 1.0)
        whole = {name: safe_get_full_grad(p).float() for name, p in params.items()}
        grads = {name: grad.clone().cpu() / scale for name, grad in whole.items()}
        engine_step()
        record["steps"].append({"norm": float(engine.get_global_grad_norm()), "grads": grads})

    def masters():
        return {name: safe_get_full_fp32_param(p).clone().cpu() for name, p in params.items()}

    engine.step, engine.backward = watched, backward
    return masters


def train(job, engine, run):
    """llm_demo.run.job.run with a `step` that is watched; a quiet case's is not."""
    case = record["case"]
    if case.get("quiet"):
        return run(job, engine)
    params = {"pp": watch_pp, "zero": watch_zero}.get(KIND, watch_fsdp)(engine)
    step = engine.step

    def watched(*args):
        loss, norm = step(*args)
        if "poison" in case:
            record["after_step"].append(params())
        return loss, norm

    engine.step = watched
    run(job, engine)
    kept = {key: record[key] for key in ("steps", "after_step", "decays")}
    model = getattr(engine, "model", None)
    kept["embeds_on_host"] = bool(getattr(model, "embed_on_host", None))
    torch.save({**kept, "params": params()}, f"{case['out']}.{world.rank}.pt")


def block_costs(config, count=costs.block_costs, known={}):  # noqa: B006
    """Once for a configuration: a run asks several times, and cases share a model."""
    key = type(config), config.to_json_string(use_diff=False)
    if key not in known:
        known[key] = count(config)
    return list(known[key])


def make_adamw(params, lr, weight_decay, compiled, moments=torch.float32, make=optim.make_adamw):
    """With activation checkpointing the AdamW of a GPU, compiled; on a CPU what would be."""
    compiled = compiled or "--use_activation_checkpointing true" in " ".join(sys.argv)
    return make(params, lr, weight_decay, compiled, moments)


costs.block_costs = block_costs
optim.CompiledAdamW.LARGE = 1 << 15  # so that tiny models have some
optim.CompiledAdamW.SLICE = 3 << 14  # and some of several slices
optim.WIDE = 5 << 11
if not torch.cuda.is_available():
    optim.compile_once = lambda function: function  # C++ takes 20 s to compile
if KIND == "fsdp":
    import fsdp.fsdp2
    import fsdp.host_adamw
    import fsdp.train_fsdp as script

    fsdp.host_adamw.SLICE = 3 << 10  # smaller than the largest parameters
    reduce_traffic = fsdp.fsdp2.reduce_traffic
elif KIND == "fsdp_pp":
    import fsdp_pp.train_fsdp_pp as script
elif KIND == "pp":
    import pp.pp_train as script
else:
    import zero.train_zero as script
script.run = functools.partial(train, run=script.run)
script.make_adamw = make_adamw
gc.freeze()  # what is imported: each case's collection would go through it
gc.freeze = lambda: None  # a case's model would stay
world = start()
script.start = lambda: world  # one process group for all cases
global_norm, linear = optim.global_norm, torch.nn.functional.linear
chunk_rows = loss.CHUNK_ROWS
for case in json.load(open(CASES)):
    record.update(steps=[], after_step=[], decays=set(), case=case)
    optim.global_norm = global_norm
    loss.CHUNK_ROWS = case.get("chunk_rows", chunk_rows)
    torch.nn.functional.linear = linear  # ZeRO-3 replaces it
    if KIND == "fsdp":  # "as_it_is": FSDP2's own steps, in cases before any without
        as_it_is = case.get("as_it_is")
        fsdp.fsdp2.reduce_traffic = (lambda *_, **__: None) if as_it_is else reduce_traffic
    sys.argv = [script.__file__, *case["argv"]]
    script.main()
dist.barrier()
dist.destroy_process_group()
os._exit(0)
