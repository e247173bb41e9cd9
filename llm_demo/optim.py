"""AdamW's groups, the learning rate of a step, the global gradient norm, fp16's loss scale."""

import functools
import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw

BETAS, EPS = (0.9, 0.95), 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter


def compiles_adamw(works: bool, n_params: int, world_size: int, say: Callable) -> bool:
    """Whether to compile AdamW. works: torch.compile does here; n_params: the whole model's. On two
    H200 it was worth 3 % for 8B, for 0.6B nothing that could be told from noise (bench/LOG.md)."""
    chosen = works and n_params / world_size >= 1e9
    if chosen:
        say("adamw: compiled (faster from 1e9 parameters a process on)")
    return chosen


def make_adamw(
    params: Iterable[nn.Parameter], lr: float, weight_decay: float, compiled: bool = False
) -> torch.optim.AdamW:
    """AdamW that decays matrices only: a norm's weight or a bias has nothing to gain from zero.
    compiled: faster for large models; the same on all ranks, for it rounds in another way, and the
    copies of a tied weight would drift apart."""
    params = [p for p in params if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind = CompiledAdamW if compiled else torch.optim.AdamW
    return kind([g for g in groups if g["params"]], lr, BETAS, EPS, fused=True)


class CompiledAdamW(torch.optim.AdamW):
    """AdamW, compiled where parameters are large: PyTorch's fused kernel reaches 60 % of an H200's
    memory speed. For small ones its few launches count for more."""

    LARGE = 1 << 23  # elements of this rank's part: a pass takes 55 us, its launch as much
    # Elements of a call. DeepSpeed hands over all matrices of a stage as one tensor, and before its
    # first run the compiler tries a kernel out on copies of what it writes, in pinned memory of the
    # host if on the device they would raise the peak: for an 8B model's stage 50 GB.
    PIECE = 1 << 27

    @torch.no_grad()
    def step(self):
        """grad_scale, found_inf: as PyTorch's fused AdamW has them, 0-dim fp32 tensors or not set
        (DeepSpeed's fp32 and fp16 optimizers scale and skip by themselves)."""
        for group in self.param_groups:
            lists = [[] for _ in range(6)]
            self._init_group(group, *lists)
            if not lists[0]:
                continue
            one = torch.ones_like(lists[5][0])
            divisor, skip = getattr(self, "grad_scale", one), getattr(self, "found_inf", 1 - one)
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            large, small = [], []
            for each in zip(*(lists[i] for i in (0, 1, 2, 3, 5)), strict=True):
                (large if each[0].numel() >= self.LARGE else small).append(each)
            if small:
                params, grads, exp_avgs, exp_avg_sqs, steps = map(list, zip(*small, strict=True))
                adamw(
                    params, grads, exp_avgs, exp_avg_sqs, [], steps,
                    fused=True, grad_scale=divisor, found_inf=skip, amsgrad=False, maximize=False,
                    beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=group["eps"],
                )  # fmt: skip
            if large:
                steps = [step for *_, step in large]  # all the same: each has a gradient each time
                torch._foreach_add_(steps, 1 - skip)
                # Scalars as tensors, made on the device: neither compiled anew nor waited for.
                taken = steps[0].double()
                size = (lr / (1 - beta1**taken)).float()
                root = (1 - beta2**taken).sqrt().float()
                numbers = divisor, skip, one * (lr * decay), size, root, beta1, beta2, group["eps"]
            for *tensors, _ in large:
                # flat, for shapes of a size to share their code
                pieces = (t.detach().view(-1).split(self.PIECE) for t in tensors)
                for piece in zip(*pieces, strict=True):
                    compiled_adamw()(*piece, *numbers)


@functools.cache
def compiled_adamw():
    """_adamw in one pass over the memory."""
    return torch.compile(_adamw, dynamic=False)


def _adamw(p, g, m, v, divisor, skip, less, size, root, beta1, beta2, eps):
    """As in "Decoupled Weight Decay Regularization" (Loshchilov and Hutter 2019), in place, or not
    at all. less: lr * decay; size: lr / (1 - beta1**step); root: sqrt(1 - beta2**step)."""
    g = g / divisor
    new_m = m.lerp(g, 1 - beta1)
    new_v = v.lerp(g * g, 1 - beta2)
    # not p * (1 - less): fp32 has no 1 - 2e-7, the decay of a usual lr, but only 1 - 1.8e-7
    new_p = p - less * p - size * new_m / (new_v.sqrt() / root + eps)
    for old, new in ((p, new_p), (m, new_m), (v, new_v)):
        old.copy_(torch.where(skip > 0, old, new))


def with_fp32_masters(model: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
    """Turn the model's fp32 parameters into `dtype` and return the fp32 masters to optimize.

    Each micro-batch's gradient is added to the master's in fp32, as sharded training does it; the
    optimizer made from the masters must be passed to `copy_masters` (fp32: the parameters)."""
    if dtype == torch.float32:
        return list(model.parameters())
    masters = []

    def accumulate(param, master):
        grad = param.grad.float()
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        param.grad = None

    for param in model.parameters():
        master = nn.Parameter(param.detach().clone())
        param.data = param.data.to(dtype)
        param.register_post_accumulate_grad_hook(functools.partial(accumulate, master=master))
        masters.append(master)
    return masters


def copy_masters(optimizer: torch.optim.Optimizer, model: nn.Module, masters: list):
    """After each step of the optimizer, bring the model's parameters up to their masters. Returns
    the function that does it."""

    def copy(*_):
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)

    if masters and masters[0].dtype != next(model.parameters()).dtype:
        optimizer.register_step_post_hook(copy)
    return copy


def fill_adam_state(optimizer: torch.optim.AdamW, steps: int) -> None:
    """Give each parameter the state that AdamW makes in its first step, zeros to be loaded into, as
    if it had taken so many steps."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            step = torch.tensor(float(steps), device=p.device)
            moments = {name: torch.zeros_like(p) for name in MOMENTS}
            optimizer.state[p] = {"step": step, **moments}


def adam_steps(optimizer: torch.optim.AdamW) -> int:
    """Steps that AdamW has taken; a skipped one is none."""
    return int(next(iter(optimizer.state.values()))["step"])


def lr_at(step: int, lr: float, warmup: int, total: int, schedule: str) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`.

    Rises to `lr` over `warmup` steps, then falls by a half cosine or a line to a tenth of it in the
    last step, or stays. A function of the step alone: nothing to save, nothing to step twice."""
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    done = (step - warmup + 1) / max(1, total - warmup)
    left = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
    return lr * (0.1 + 0.9 * left)


class LossScale:
    """fp16's dynamic loss scale, on the device: halved by an overflow, doubled by 1000 good steps.

    torch.amp.GradScaler looks for overflow rank by rank; here the global norm has the answer, the
    same on every rank, so all skip together. Scale 1 for ever in the other dtypes."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dynamic = dtype == torch.float16
        self.scale = torch.tensor(2.0**16 if self.dynamic else 1.0, device=device)
        self.good_steps = torch.zeros((), device=device)

    def facts(self) -> dict:
        """What a checkpoint keeps; waits for the device."""
        return {"scale": self.scale.item(), "good_steps": self.good_steps.item()}

    def load(self, facts: dict) -> None:
        if self.dynamic:
            self.scale.fill_(facts["scale"])
            self.good_steps.fill_(facts["good_steps"])

    def update(self, overflow: torch.Tensor) -> None:
        if self.dynamic:
            self.good_steps = torch.where(overflow, 0, self.good_steps + 1)
            grow = self.good_steps >= 1000
            self.scale *= torch.where(overflow, 0.5, torch.where(grow, 2.0, 1.0))
            self.good_steps = torch.where(grow, 0, self.good_steps)


def global_norm(grads: list[torch.Tensor], sharded_over=None) -> torch.Tensor:
    """2-norm of all gradients together: an fp32 scalar. sharded_over: the process group whose ranks
    each hold a part of them.

    Summed in fp64: in fp32 torch's norm of an embedding on a CPU is off by 3e-5."""
    square = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)).square().sum()
    if sharded_over is not None:
        dist.all_reduce(square, group=sharded_over)
    return square.sqrt().float()


@torch.no_grad()
def clipped_step(
    optimizer: torch.optim.AdamW,
    max_grad_norm: float,
    loss_scale: LossScale,
    sharded_over=None,
    norm_of: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Clip by the global norm and step, or skip where that norm is not finite; returns the norm.

    sharded_over: as in global_norm. norm_of: gradients to take it of, if not of all of them.

    The norm (fp32 scalar on the device, unscaled, before clipping) is over all parameters of all
    ranks, sharded or not, a tied one counted once; so every rank takes or skips the step alike.
    Nothing waits for the device: scale, clip factor and skip reach AdamW as tensors."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    norm = global_norm(norm_of or grads, sharded_over) / loss_scale.scale
    skip = ~norm.isfinite()
    divisor = loss_scale.scale.clone()
    if max_grad_norm > 0:
        divisor *= ((norm + 1e-6) / max_grad_norm).clamp(min=1.0)
    optimizer.grad_scale, optimizer.found_inf = divisor, skip.float()
    optimizer.step()
    loss_scale.update(skip)
    optimizer.zero_grad(set_to_none=True)
    return norm


class Shards:
    """This rank's shards of an FSDP2 model as plain parameters of the same memory.

    An optimizer of DTensors spends more time in their dispatch, on the host, than the GPU in the
    step itself."""

    def __init__(self, model: nn.Module):
        self.sharded = [p for p in model.parameters() if p.requires_grad]
        self.local = [nn.Parameter(p.detach().to_local()) for p in self.sharded]

    @torch.no_grad()  # else each to_local() is an autograd function: 2 ms a step
    def take_grads(self) -> None:
        """Hand the gradients that the backward left over to the plain parameters."""
        for whole, local in zip(self.sharded, self.local, strict=True):
            local.grad, whole.grad = whole.grad.to_local(), None
