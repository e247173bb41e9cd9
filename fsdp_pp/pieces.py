"""The pieces of the model that a stage holds: made, sharded, filled with weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp.sharding import precision, shard_units, sum_over_ranks
from llm_demo.core.decoder import Blocks, DecoderLoss, allocate, compile_forward, fill
from llm_demo.core.experts import blocks_with_experts
from llm_demo.job.costs import unit_sizes


class Pieces(nn.ModuleDict):
    """{number: DecoderLoss} of a stage, in the order of the forward.

    counts: blocks of each piece of the model. stages: the stage of each."""

    def __init__(self, lm, args, compute, counts: list[int], stages: list[int], stage: int):
        super().__init__()
        self.lm, self.names = (lm,), []  # a tuple hides the whole model from nn.Module
        if lm.config.tie_word_embeddings:  # two parameters, each in a unit of its own: see tied.py
            lm.lm_head.weight = nn.Parameter(lm.lm_head.weight.detach())
        last, at = len(counts) - 1, 0
        for piece, count in enumerate(counts):
            first = at
            if stages[piece] == stage:
                blocks = []
                for size in unit_sizes(lm.config, count, args.blocks_per_unit, first):
                    unit = list(lm.model.layers[at : at + size])
                    blocks.append(Blocks(unit, args.use_activation_checkpointing))
                    at += size
                if compute.compile:
                    for unit in blocks:
                        compile_forward(unit, args.activation_memory_budget)
                self[str(piece)] = DecoderLoss(
                    lm, blocks, compute.compile, first=piece == 0, last=piece == last
                )
                self.names += ["model.embed_tokens"] * (piece == 0)
                self.names += [f"model.layers.{i}" for i in range(first, first + count)]
                self.names += ["model.norm", "lm_head"] if piece == last else []
            at = first + count
        # of this stage, and of the whole model
        self.routers = [piece.routers for piece in self.values() if piece.routers]
        self.gates = [block.mlp.gate for block in blocks_with_experts(lm)]

    def shard(self, dtype: torch.dtype, reshard: bool, mesh) -> None:
        """Shard each unit with FSDP2 over a mesh; embedding and head are units of their own."""
        policy = precision(dtype)
        for piece in self.values():
            shard_units(piece, dtype, mesh, reshard=reshard)
            for end in filter(None, (piece.tail, piece)):
                fully_shard(end, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        sum_over_ranks(self)

    def load(self, weights, seed: int, device: torch.device) -> None:
        """Allocate and fill this rank's part. The tied head is a copy of the embedding."""
        lm = self.lm[0]
        embedding, head = lm.model.embed_tokens, lm.lm_head
        allocate(self, device)
        for name in self.names:
            if name != "lm_head" or not lm.config.tie_word_embeddings:
                fill(lm, name, weights, seed)
                continue
            weight, embedding.weight = embedding.weight, head.weight
            fill(lm, "model.embed_tokens", weights, seed)
            embedding.weight = weight

    def tied(self) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """The embedding's weight and the head's copy of it, if they are here and tied."""
        lm = self.lm[0]
        if not lm.config.tie_word_embeddings:
            return None, None
        embedding, head = "model.embed_tokens" in self.names, "lm_head" in self.names
        return (
            lm.model.embed_tokens.weight if embedding else None,
            lm.lm_head.weight if head else None,
        )

    def take_load(self, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
        """Routers.take_load for the whole model, on every rank. group: the ranks of this stage."""
        total = torch.zeros(
            len(self.gates), self.gates[0].num_experts, dtype=torch.int64, device=device
        )
        for routers in self.routers:
            load = routers.take_load(group)
            if group.rank() == 0:
                total[[self.gates.index(router) for router in routers.routers]] = load
        dist.all_reduce(total)
        return total
