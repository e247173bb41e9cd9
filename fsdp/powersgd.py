"""PowerSGD: sum gradients over replicas as products of two thin matrices. Approximate.

Source: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (Vogels,
Karimireddy and Jaggi 2019), with warm start and error feedback. It runs once per step, after
accumulation, on fp32 gradients, and compresses every matrix, embedding and head included. If the
model is sharded, a rank's rows of a matrix are a matrix of their own."""

import zlib
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp.sharding import on_grid, shards_of
from llm_demo.core.mesh import REPLICA, local_part
from llm_demo.core.optim import ERROR, FACTOR
from llm_demo.run.plan import Horizon

TOGETHER = 1 << 27  # elements of the matrices of one shape that are multiplied at a time
SUMMED_AT_ONCE = 1 << 26  # elements summed over replicas at a time


class Group:
    """Matrices of one shape. error [k, n, m]: what earlier steps left out. factor [k, m, r]: the
    last step's right factor. start [k, m, r]: random columns of length 1, the first factor, and
    what replaces columns that are lost."""

    def __init__(
        self,
        members: list[int],
        shape: tuple,
        rank: int,
        names: list[str],
        device: torch.device,
        dtype: torch.dtype,
    ):
        """members: numbers of parameters. names: of all parameters."""
        (n, m), self.members = shape, members
        self.error = torch.zeros(len(members), n, m, device=device, dtype=dtype)
        factors = torch.stack([_random_factor(m, rank, names[i]) for i in members])
        factors = factors.to(device=device, dtype=dtype)
        self.start = nn.functional.normalize(factors, dim=1)
        self.factor = self.start.clone()

    def directions(self) -> torch.Tensor:
        """The directions of the last step's right factor. A gradient of a lower rank than the
        factor leaves some of its columns without a direction, a zero gradient leaves all of them.
        These columns start anew, since a product with a zero column is zero in every later step."""
        columns = orthogonal(self.factor)
        lost = columns.norm(dim=1, keepdim=True) < 0.5
        return torch.where(lost, self.start, columns)


class LowRank:
    """Sums gradients over replicas; what is left out stays here.

    Args:
        params: with an `hf_name`; sharded or not.
        rank: r. A matrix [n, m] is compressed where r (n + m) < n m.
        start: steps that are not compressed.
        grid: of all ranks, with a dimension of replicas.
        done: steps before this run.
        dtype: of the gradients."""

    def __init__(
        self,
        params: list[nn.Parameter],
        rank: int,
        start: int,
        grid: DeviceMesh,
        done: int,
        dtype: torch.dtype = torch.float32,
    ):
        self.params, self.start, self.grid, self.steps = params, start, grid, done
        self.group = grid[REPLICA].get_group()
        shapes, self.whole = defaultdict(list), []
        for i, p in enumerate(params):
            most = -(-p.shape[0] // shards_of(p))  # rows of a shard; the last ones may have fewer
            m = p.shape[1:].numel() if p.ndim > 1 else 0
            fits = rank * (most + m) < most * m
            (shapes[len(local_part(p)), m] if fits else self.whole).append(i)
        names, self.groups = [p.hf_name for p in params], []
        device = local_part(params[0]).device
        for (n, m), members in shapes.items():
            size = max(1, TOGETHER // max(1, n * m))
            parts = [members[i : i + size] for i in range(0, len(members), size)]
            self.groups += [Group(part, (n, m), rank, names, device, dtype) for part in parts]
        # whether errors are sums over replicas, as in a checkpoint: zeros are
        self.summed = True

    @torch.no_grad()
    def reduce(self, grads: list[torch.Tensor]) -> None:
        """Replace this replica's gradients, one per parameter, by the sum over replicas, the same
        bits on each. If any is not finite, results are not either, and errors stay as they are."""
        self.steps += 1
        if self.steps <= self.start:
            self._sum(grads)
            return
        if self.summed:
            for g in self.groups:
                g.error /= self.group.size()
            self.summed = False
        # on any rank, also in what is not compressed: then all ranks skip the step
        bad = torch.stack([~grad.isfinite().all() for grad in grads]).sum()
        dist.all_reduce(bad)
        mine = [[grads[i] for i in g.members] for g in self.groups]
        for g, members in zip(self.groups, mine, strict=True):
            errors = [e.view_as(grad) for e, grad in zip(g.error, members, strict=True)]
            torch._foreach_add_(members, errors)
        lefts = [_stack(x) @ g.directions() for g, x in zip(self.groups, mine, strict=True)]
        self._sum([*lefts, *(grads[i] for i in self.whole)])
        finite = _all_finite(lefts) & (bad == 0)
        lefts = [orthogonal(left) for left in lefts]
        parts = [_stack(x).mT @ left for x, left in zip(mine, lefts, strict=True)]
        rights = [part.clone() for part in parts]
        self._sum(rights)
        finite = _all_finite(rights) & finite
        poison = torch.where(finite, 1.0, torch.nan).to(grads[0].dtype)
        results = zip(self.groups, mine, lefts, parts, rights, strict=True)
        for g, members, left, part, right in results:
            left_out = torch.baddbmm(_stack(members), left, part.mT, alpha=-1)
            torch.where(finite, left_out, g.error, out=g.error)
            del left_out
            torch.where(finite, right, g.factor, out=g.factor)
            sums = (left * poison) @ right.mT
            views = [t.view_as(m) for t, m in zip(sums, members, strict=True)]
            torch._foreach_copy_(members, views)

    def _sum(self, tensors: list[torch.Tensor]) -> None:
        """Replace these tensors by their sums over the replicas, a bucket at a time."""
        bucket, size = [], 0
        for i, t in enumerate(tensors):
            bucket, size = [*bucket, t], size + t.numel()
            if size >= SUMMED_AT_ONCE or i == len(tensors) - 1:
                flat = torch.cat([t.reshape(-1) for t in bucket])
                dist.all_reduce(flat, group=self.group)
                parts = flat.split([t.numel() for t in bucket])
                parts = [part.view(t.shape) for t, part in zip(bucket, parts, strict=True)]
                torch._foreach_copy_(bucket, parts)
                del flat, parts  # before the next bucket's
                bucket, size = [], 0

    def describe(self) -> str:
        """What is sent, for the log."""
        if not self.groups:
            return "warning: PowerSGD compresses nothing: its rank is too large for every matrix"
        thin = sum(sum(g.error.shape[1:]) * g.factor.shape[2] * len(g.members) for g in self.groups)
        whole = sum(local_part(self.params[i]).numel() for i in self.whole)
        total = sum(local_part(p).numel() for p in self.params)
        share = f"{(thin + whole) / total:.1%} of the gradients' bytes are sent"
        return f"PowerSGD from step {self.start + 1} on: {share}"

    @torch.no_grad()
    def sum_errors(self) -> None:
        """Replace errors by their sum over replicas, for a checkpoint: once it is written, each
        replica goes on with an equal share, as a resumed run does. Collective."""
        if not self.summed:
            for g in self.groups:
                dist.all_reduce(g.error, group=self.group)
            self.summed = True

    def state(self) -> dict[str, torch.Tensor]:
        """{name.ERROR: errors, name.FACTOR: ...}, in place and sharded like the parameters."""
        state = {}
        for g in self.groups:
            for i, error, factor in zip(g.members, g.error, g.factor, strict=True):
                p = self.params[i]
                error, name = error.view(local_part(p).shape), p.hf_name
                if isinstance(p, DTensor):
                    error = on_grid(error, p, self.grid)
                    # each shard has a factor of its own
                    factor = DTensor.from_local(factor, self.grid, [Replicate(), Shard(0)])
                state |= {f"{name}.{ERROR}": error, f"{name}.{FACTOR}": factor}
        return state


def choose_low_rank(
    rank: int,
    params: list[nn.Parameter],
    grid: DeviceMesh,
    horizon: Horizon,
    done: int,
    say: Callable,
) -> LowRank | None:
    """What sums gradients over replicas with --psgd_rank; None with one copy of the model. The
    arguments are those of LowRank."""
    if REPLICA not in grid.mesh_dim_names:
        say("warning: --psgd_rank has no effect with one copy of the model")
        return None
    start = horizon.warmup_steps
    low_rank = LowRank(params, rank, start, grid, done)
    say(low_rank.describe())
    if start >= horizon.max_steps:
        say(f"warning: the run ends at step {horizon.max_steps}, before PowerSGD starts")
    return low_rank


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns with the span of x [k, n, r], by Cholesky decompositions in fp64: a QR
    decomposition of hundreds of matrices takes a GPU longer. Columns in directions in which x is
    almost zero become short instead, and a zero matrix stays zero."""
    x64 = x.double()
    gram = x64.mT @ x64
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += 1e-13 * diagonal.sum(-1, keepdim=True) + 1e-60
    lower, failed = torch.linalg.cholesky_ex(gram)
    columns = torch.linalg.solve_triangular(lower.mT, x64, upper=True, left=False)
    # nothing of a matrix that can't be decomposed: it is all left out, for the next step
    return torch.where(failed.view(-1, 1, 1) == 0, columns, 0).to(x.dtype)


def _stack(matrices: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([t.flatten(1) for t in matrices])


def _all_finite(tensors: list[torch.Tensor]):
    return torch.stack([t.isfinite().all() for t in tensors]).all() if tensors else True


def _random_factor(m: int, rank: int, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(m, rank, generator=generator)
