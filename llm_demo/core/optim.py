"""AdamW, the learning rate schedule, sums and global norm of gradients, fp16's loss scale."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw

BETAS, EPS = (0.9, 0.95), 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state of each parameter
# what a checkpoint adds to each matrix if gradients are compressed (fsdp/powersgd.py)
PSGD = ERROR, FACTOR = "psgd_error", "psgd_factor"
LOW = "low"  # and for a bf16 parameter that is half of its master: the other half
LARGEST_BETA2 = 0.99  # of bf16 moments: they round to nearest
WIDE = 1 << 24  # elements whose bf16 moments have fp32 copies at a time: 128 MiB


def make_adamw(
    params: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float,
    compiled: bool = False,
    moments: torch.dtype = torch.float32,
) -> torch.optim.AdamW:
    """AdamW that decays matrices only: pulling a norm's weight or a bias to zero has no benefit.
    compiled: faster for large models. Must be the same on all ranks, because it rounds differently
    and the copies of a tied weight would drift apart. moments: their dtype, see check_moments."""
    check_moments(moments)
    narrow = moments != torch.float32
    kind = CompiledAdamW if compiled or narrow else torch.optim.AdamW
    optimizer = kind(decayed_or_not(params, weight_decay), lr, BETAS, EPS, fused=True)
    if narrow:
        fill_adam_state(optimizer, 0, moments)
        if not compiled:
            optimizer.LARGE = math.inf
    return optimizer


def check_moments(dtype: torch.dtype) -> None:
    """Raise ValueError if AdamW's moments do not work in this dtype. In bf16, v * 0.999 rounds to
    v: the second moment of a parameter whose gradients vanish would never decay."""
    if dtype != torch.float32 and BETAS[1] > LARGEST_BETA2:
        raise ValueError(f"bf16 moments need beta2 <= {LARGEST_BETA2}, not {BETAS[1]}")


def decayed_or_not(params: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """AdamW's parameter groups: matrices decay, other parameters do not."""
    matrices, rest = [], []
    for p in params:
        if p.requires_grad:  # ZeRO-3 leaves an empty tensor and the shape beside it
            (matrices if len(getattr(p, "ds_shape", p.shape)) >= 2 else rest).append(p)
    kinds = (matrices, weight_decay), (rest, 0.0)
    return [{"params": params, "weight_decay": decay} for params, decay in kinds if params]


class CompiledAdamW(torch.optim.AdamW):
    """AdamW, compiled for large parameters: PyTorch's fused kernel reaches 60 % of an H200's memory
    speed. For small parameters its few launches matter more. Moments may be in bf16."""

    LARGE = 1 << 23  # elements of this rank's part: a pass takes 55 us, as long as its launch
    # Elements per call. DeepSpeed passes all matrices of a stage as one tensor. Before its first
    # run the compiler tries a kernel on copies of its outputs, in pinned host memory if they would
    # raise the device's peak: 50 GB for an 8B model's stage.
    SLICE = 1 << 27

    @torch.no_grad()
    def step(self):
        """grad_scale, found_inf: as in PyTorch's fused AdamW, 0-dim fp32 tensors or not set
        (DeepSpeed's fp32 and fp16 optimizers scale and skip by themselves)."""
        for group in self.param_groups:
            params, grads, exp_avgs, exp_avg_sqs, maxima, steps = ([] for _ in range(6))
            self._init_group(group, params, grads, exp_avgs, exp_avg_sqs, maxima, steps)
            if not params:
                continue
            one = torch.ones_like(steps[0])
            divisor, skip = getattr(self, "grad_scale", one), getattr(self, "found_inf", 1 - one)
            large, small = [], []
            for each in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
                compiles = each[0].numel() >= self.LARGE or LOW in self.state[each[0]]
                (large if compiles else small).append(each)
            if small:
                fused_adamw(group, small, divisor, skip)
            if large:
                (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
                counts = [count for *_, count in large]  # equal: each has a gradient every time
                torch._foreach_add_(counts, 1 - skip)
                # Scalars as tensors made on the device: no recompilation and no wait.
                taken = counts[0].double()
                size = (lr / (1 - beta1**taken)).float()
                root = (1 - beta2**taken).sqrt().float()
                less, eps = one * (lr * decay), group["eps"]
            for param, grad, exp_avg, exp_avg_sq, _ in large:
                remainder = self.state[param].get(LOW)
                slices = zip(
                    self._slices(param),
                    self._slices(grad),
                    self._slices(exp_avg),
                    self._slices(exp_avg_sq),
                    itertools.repeat(None) if remainder is None else self._slices(remainder),
                    strict=False,
                )
                for p, g, m, v, low in slices:
                    compile_once(_adamw)(
                        p, g, m, v, divisor, skip, less, size, root, beta1, beta2, eps, low
                    )

    def _slices(self, t: torch.Tensor) -> list[torch.Tensor]:
        """The tensor in slices, flat, so that shapes of equal size share their code."""
        flat = t.detach().view(-1)
        # splitting into one slice takes three times as long
        return [flat] if len(flat) <= self.SLICE else list(flat.split(self.SLICE))


def fused_adamw(group: dict, tensors: list[tuple], divisor, skip=None) -> None:
    """PyTorch's fused AdamW, in place. group: of an optimizer. tensors: (parameter, gradient,
    *MOMENTS, step) of each, all contiguous. divisor, skip: its grad_scale and found_inf.

    It takes moments in fp32 only: those in bf16 pass through copies, WIDE elements at a time."""
    beta1, beta2 = group["betas"]
    how = {
        "fused": True, "grad_scale": divisor, "found_inf": skip, "amsgrad": False,
        "maximize": False, "beta1": beta1, "beta2": beta2, "lr": group["lr"],
        "weight_decay": group["weight_decay"], "eps": group["eps"],
    }  # fmt: skip
    if tensors[0][2].dtype == torch.float32:
        params, grads, *moments, steps = map(list, zip(*tensors, strict=True))
        adamw(params, grads, *moments, [], steps, **how)
        return
    for batch in _batches(tensors):
        params, grads, *moments, steps = map(list, zip(*batch, strict=True))
        sizes = [*map(len, params)]
        flat = torch.empty(2, sum(sizes), dtype=torch.float32, device=params[0].device)
        copies = [list(of.split(sizes)) for of in flat]
        for to, of in zip(copies, moments, strict=True):
            torch._foreach_copy_(to, of)
        # a parameter may be in two batches, and AdamW counts
        adamw(params, grads, *copies, [], list(torch._foreach_add(steps, 0)), **how)
        for of, to in zip(copies, moments, strict=True):
            torch._foreach_copy_(to, of)
    torch._foreach_add_([step for *_, step in tensors], 1 if skip is None else 1 - skip)


def _batches(tensors: list[tuple]) -> Iterator[list[tuple]]:
    """The tensors flat, cut into lists of at most WIDE elements of each kind."""
    batch, room = [], WIDE
    for *each, step in tensors:
        flat = [t.detach().view(-1) for t in each]
        while n := min(room, len(flat[0])):
            batch.append((*(t[:n] for t in flat), step))
            flat, room = [t[n:] for t in flat], room - n
            if not room:
                yield batch
                batch, room = [], WIDE
    if batch:
        yield batch


def _adamw(p, g, m, v, divisor, skip, less, size, root, beta1, beta2, eps, low=None):
    """In-place AdamW, one pass over the memory once compiled; skipped if skip > 0. Moments in bf16
    are rounded to nearest as they are stored.

    Source: "Decoupled Weight Decay Regularization" (Loshchilov and Hutter 2019). less: lr * decay;
    size: lr / (1 - beta1**step); root: sqrt(1 - beta2**step). low: the other half of the master,
    for a bf16 p."""
    if low is not None:
        master = join(p, low)
        _adamw(master, g, m, v, divisor, skip, less, size, root, beta1, beta2, eps)
        for old, new in zip((p, low), halve(master), strict=True):
            old.copy_(new)
        return
    g = g.float() / divisor
    new_m = m.float().lerp(g, 1 - beta1)
    new_v = v.float().lerp(g * g, 1 - beta2)
    # not p * (1 - less): the decay of a usual lr is 2e-7, and fp32 rounds 1 - 2e-7 to 1 - 1.8e-7
    new_p = p - less * p - size * new_m / (new_v.sqrt() / root + eps)
    for old, new in ((p, new_p), (m, new_m), (v, new_v)):
        old.copy_(torch.where(skip > 0, old, new))


def can_halve(dtype: torch.dtype, fp32_grads: bool) -> bool:
    """Whether weights of this dtype can be half of their masters for a compiled AdamW. fp32_grads:
    their gradients are in fp32, which PyTorch 2.8 has no way to attach to bf16 weights."""
    return dtype == torch.bfloat16 and (not fp32_grads or hasattr(torch.Tensor, "grad_dtype"))


def halve(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split an fp32 tensor into bf16 weights and int16 remainders; `join` is the inverse.

    Weights are rounded to nearest, ties to even. The remainder, added to a weight's bits, gives its
    master's bits. It fits in 16 bits except for every second tie, where it is 32,768: such a master
    comes back one unit in fp32's last place nearer to zero."""
    bits = master.view(torch.int32)
    high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    low = (bits - (high << 16)).clamp(max=0x7FFF)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(weights: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Restore the fp32 tensor from the two results of `halve`."""
    high = weights.view(torch.int16).to(torch.int32) << 16
    return (high + low).view(torch.float32)


def fill_adam_state(
    optimizer: torch.optim.AdamW, steps: int, moments: torch.dtype = torch.float32
) -> None:
    """Give each parameter the state AdamW creates in its first step, with zeros to load into, as if
    after `steps` steps. Existing moments are kept. If AdamW created moments in step 1, they would
    lie between activations, which fragments memory. moments: their dtype."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            state["step"] = torch.tensor(float(steps), device=p.device)
            for name in MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(p, dtype=moments)


def adam_steps(optimizer: torch.optim.AdamW) -> int:
    """Steps that AdamW has taken, not counting skipped ones."""
    return int(next(iter(optimizer.state.values()))["step"])


def set_lr(optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_at(step: int, lr: float, warmup: int, total: int, lr_scheduler: str) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`.

    Rises to `lr` over `warmup` steps, then stays constant or falls, by a half cosine or linearly,
    to a tenth of it in the last step. Depends only on the step and the settings, so there is no
    state to save. lr_scheduler: as the flag."""
    done = (step - warmup + 1) / max(1, total - warmup)
    cosine = (1 + math.cos(math.pi * done)) / 2
    left = {"constant": 1, "cosine": cosine, "linear": 1 - done}.get(lr_scheduler)
    if left is None:
        raise ValueError(f"unknown lr_scheduler: {lr_scheduler}")
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * (0.1 + 0.9 * left)


class LossScale:
    """fp16's dynamic loss scale, on the device: halved by overflow, to 1 at least, and doubled
    after 1000 good steps.

    torch.amp.GradScaler detects overflow per rank. Here the global norm does, equally on every
    rank, so all skip together. The scale stays 1 in the other dtypes."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dynamic = dtype == torch.float16
        # torch.tensor would wait for the device
        self.scale = torch.full((), 2.0**16 if self.dynamic else 1.0, device=device)
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
            self.scale.clamp_(min=1.0)  # from 0 it would never come back
            self.good_steps = torch.where(grow, 0, self.good_steps)


def global_norm(grads: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """2-norm of all gradients together: an fp32 scalar. group: the ranks that each hold a part of
    them. Summed in fp64, because in fp32 torch's norm of an embedding on a CPU is off by 3e-5."""
    norms = []
    for kind in dict.fromkeys(g.dtype for g in grads):  # a GPU copies lists of two to fp64
        norms += torch._foreach_norm([g for g in grads if g.dtype == kind], 2, dtype=torch.float64)
    square = torch.stack(norms).square().sum()
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt().float()


@torch.no_grad()
def clipped_step(
    optimizer: torch.optim.AdamW,
    max_grad_norm: float,
    loss_scale: LossScale,
    norm_of: list[torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Clip by the global norm and step, or skip if that norm is not finite. Returns the norm.

    norm_of, group: for the norm only, as in global_norm, with each gradient once. By default all
    gradients, which are whole on this rank. The step applies the gradients that the optimizer
    holds.

    The norm (fp32 scalar on the device, unscaled, before clipping) covers all parameters of all
    ranks, sharded or not, counting a tied one once, so all ranks take or skip the step together.
    Nothing waits for the device: scale, clip factor and skip reach AdamW as tensors."""
    if norm_of is None:
        params = [p for each in optimizer.param_groups for p in each["params"]]
        norm_of = [p.grad for p in params if p.grad is not None]
    norm = global_norm(norm_of, group) / loss_scale.scale
    skip = ~norm.isfinite()
    divisor = loss_scale.scale.clone()
    if max_grad_norm > 0:
        divisor *= ((norm + 1e-6) / max_grad_norm).clamp(min=1.0)
    # Fused AdamW reads both: it divides gradients by grad_scale, and skips the step if found_inf
    # is 1.
    optimizer.grad_scale, optimizer.found_inf = divisor, skip.float()
    optimizer.step()
    loss_scale.update(skip)
    optimizer.zero_grad(set_to_none=True)
    return norm


# Sums of gradients, each in one pass over the memory once compiled. PyTorch's own kernels that add
# bf16 to fp32 run at half the memory bandwidth, once per tensor.


@functools.cache
def compile_once(function, dynamic: bool | None = False):
    """The function, compiled the first time. dynamic: as in torch.compile; a unit has few, fixed
    shapes, which leave nothing to generalise."""
    return torch.compile(function, dynamic=dynamic)


def add(sums: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """Add gradients to their sums in place, also bf16 gradients to fp32 sums."""
    torch._foreach_add_(sums, grads)


def sum_into(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Set `out` to the sum of `parts`, tensors of its shape, added in its dtype."""
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)


def add_into(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Add the sum of `parts`, tensors of its shape, to `out`; all additions are in its dtype."""
    total = parts[0].to(out.dtype)
    for part in parts[1:]:
        total = total + part
    out.add_(total)
