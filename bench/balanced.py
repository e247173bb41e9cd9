"""fsdp/train_fsdp.py with experts chosen in turn, whatever the routers say: the forced balance of
some published figures. For measurements only; bench.run starts it for rows with --balanced."""

import torch
import torch.nn.functional as F

from fsdp import train_fsdp
from llm_demo.core import experts
from llm_demo.machine.dist import run


def in_turn(router, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replaces experts._choose, for hidden [T, d]: token t takes experts t k to t k + k - 1, modulo
    their number, with the weights that the router gives these."""
    logits = F.linear(hidden, router.weight)
    places = torch.arange(len(hidden) * router.top_k, device=hidden.device)
    index = (places % router.num_experts).view(-1, router.top_k)
    weights = logits.softmax(-1).gather(1, index)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, index


if __name__ == "__main__":
    experts._choose = in_turn
    run(train_fsdp.main, train_fsdp.parse, train_fsdp.less_memory)
