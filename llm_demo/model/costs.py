"""Parameters and FLOPs of a decoder, per block, counted in its modules."""

import copy
import itertools
import math
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from llm_demo.core.decoder import delta_layers, experts_in, fused, of_router, soft_cap
from llm_demo.core.errors import UserError
from llm_demo.model.families import chosen_of, family_name, family_of, is_hybrid

MOST_NUMBERS = 1 << 40  # of a weight
MIXERS = ("self_attn", "linear_attn")  # of tokens, in a block
# latent attention: matrices whose outputs serve all heads
OF_ALL_HEADS = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
MASTER_BYTES = 4  # of a parameter's fp32 master
MOMENT_BYTES = {"fp32": 8, "bf16": 4}  # of both of AdamW's moments of it, by --optim_state
OVERHEAD = 200  # tokens that take as long as adding a micro-batch's gradients to their sums


class Cost(NamedTuple):
    """What memory and time depend on, of a decoder block. Parameters are those of matrices."""

    parameters: int
    active: int  # parameters that one token uses
    rule_flops: float  # training FLOPs per token of a delta rule
    mixing: float  # training FLOPs per token for each token that attention mixes in
    window: int | None  # the most tokens that it mixes in
    routed: int  # parameters of its routed experts
    cut: int  # parameters that --tensor_parallel cuts
    width: int  # of the feed-forward networks that a token goes through
    chosen: int  # experts of a token; 0: one dense network
    mixer: int  # numbers per token that attention or a delta rule reads in a forward
    rule: int  # width of all values of a delta rule; 0: attention
    hybrid: bool  # whether some of the model's blocks have a delta rule
    heads: "Heads"

    def flops(self, attended: float) -> float:
        """Training FLOPs per token, forward and backward, that attends to so many tokens, or to the
        window if that is less: 6 per active weight of a matrix product. Attention is counted in
        full rather than its causal half, as in the PaLM paper's appendix B."""
        if self.window is not None:
            attended = min(attended, self.window)
        return 6 * self.active + self.rule_flops + self.mixing * attended


class Heads(NamedTuple):
    """The shape of a model's attention."""

    queries: int  # heads
    keys: int  # heads of keys and values
    width: int  # of a query and a key
    values: int  # width of a value


class Sizes(NamedTuple):
    """What memory and time depend on, of a model."""

    hidden: int
    vocabulary: int
    tied: bool  # whether embedding and head are one matrix
    capped: bool  # whether logits have a soft cap
    blocks: list[Cost]

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, or of the head: as many, but of a matrix product."""
        return self.hidden * self.vocabulary

    @property
    def ends(self) -> int:
        return self.embedding * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.ends + sum(block.parameters for block in self.blocks)


def sizes_of(config) -> Sizes:
    return Sizes(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings,
        capped=soft_cap(config) is not None,
        blocks=block_costs(config),
    )


def state_bytes(args) -> int:
    """Bytes of a trained parameter's master and moments."""
    return MASTER_BYTES + MOMENT_BYTES[args.optim_state]


def on_meta(config):
    """transformers' model of a configuration, without memory. Its attention and experts are eager:
    the configuration may name flash attention that is not installed, or a kernel to download, or be
    of a model that got ours. Raises ValueError for a weight of no or absurdly many numbers."""
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", trust_remote_code=False
        )
    for name, p in model.named_parameters():
        if not 0 < p.numel() < MOST_NUMBERS:
            raise ValueError(f"{name} would be of shape {tuple(p.shape)}")
    return model


def block_costs(config) -> list[Cost]:
    """The cost of each decoder block, counted in transformers' own modules."""
    blocks = zip(on_meta(config).model.layers, windows_of(config), strict=True)
    return [
        _cost(config, block, heads_of(config, i), window)
        for i, (block, window) in enumerate(blocks)
    ]


def _cost(config, block: nn.Module, heads: Heads, window: int | None) -> Cost:
    parameters = routed = cut = width = chosen = rule = 0
    rule_flops = 0.0
    mixing = 6 * heads.queries * (heads.width + heads.values)
    mixer = 3 * (heads.queries + heads.keys) * heads.width
    if is_hybrid(config):  # attention has a gate
        mixer += 2 * heads.queries * heads.width
    elif latent(config):
        mixer += 2 * (config.kv_lora_rank + config.qk_rope_head_dim + (config.q_lora_rank or 0))
    if is_hybrid(config) and delta_layers(block):
        keys, n, narrow, wide = heads_of_rule(config)
        # a head's state is a matrix: a key reads and changes it, a query reads it
        rule, rule_flops = n * wide, 18 * n * narrow * wide
        mixing, mixer = 0, 4 * keys * narrow + 5 * rule
    experts = experts_in(block)
    within = experts is not None and not hasattr(block, "router")  # experts are the network
    for name, p in block.named_parameters(prefix="block"):
        if p.ndim < 2:
            continue
        parameters += p.numel()
        if fused(name):
            routed += p.numel()
        elif not (name.endswith(OF_ALL_HEADS) or of_router(name) or within and ".mlp." in name):
            cut += p.numel()
    active = parameters - routed
    if experts is not None:
        chosen = chosen_of(config)
        width = chosen * experts.down_proj.shape[-1]
        active += routed // experts.num_experts * chosen
    return Cost(
        parameters=parameters,
        active=active,
        rule_flops=rule_flops,
        mixing=mixing,
        window=window,
        routed=routed,
        cut=cut,
        width=width + dense_width(block, config.hidden_size),
        chosen=chosen,
        mixer=mixer,
        rule=rule,
        hybrid=is_hybrid(config),
        heads=heads,
    )


def dense_width(block: nn.Module, hidden: int) -> int:
    """Width of what every token goes through of a block's feed-forward networks: of their last
    layers, which return to the hidden size."""
    width = 0
    for name, module in block.named_modules():
        if name.endswith(MIXERS):
            continue
        last = [m for m in module.children() if getattr(m, "out_features", 0) == hidden][-1:]
        width += sum(layer.in_features for layer in last)
    return width


def windows_of(config) -> list[int | None]:
    """The tokens that one attends to in each block, itself included; None: all before it."""
    blocks, window = config.num_hidden_layers, None
    if hasattr(type(config), "sliding_window"):  # else the model does not read it
        window = config.sliding_window
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * blocks
    return [window if kind == "sliding_attention" else None for kind in kinds]


def heads_of_rule(config) -> tuple[int, int, int, int]:
    """(heads of keys, heads of values, their widths)."""
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    return (*heads, config.linear_key_head_dim, config.linear_value_head_dim)


def flops_of_slot(sizes: Sizes, attended: float, adapters: int | None = None) -> float:
    """Training FLOPs of one token slot through the whole model, the basis of MFU. attended: the
    mean length of a slot's document. adapters: their parameters if the model is frozen, whose
    weights then have no gradients: 4 per active weight."""
    flops = 6 * sizes.embedding + sum(block.flops(attended) for block in sizes.blocks)
    if adapters is None:
        return flops
    active = sizes.embedding + sum(block.active for block in sizes.blocks)
    return flops - 2 * active + 6 * adapters


def parameters_of(config) -> int:
    """Matrix parameters of the whole model; a tied embedding and head count once."""
    return sizes_of(config).parameters


def active_of(config) -> int:
    """Matrix parameters that one token uses, including embedding and head."""
    sizes = sizes_of(config)
    return sizes.ends + sum(block.active for block in sizes.blocks)


def latent(config) -> bool:
    """Whether keys and values come from a latent vector (multi-head latent attention)."""
    return hasattr(config, "kv_lora_rank")


def param_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def heads_of(config, block: int) -> Heads:
    """The shape of attention in a block."""
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[block]
    queries = config.num_attention_heads
    if latent(config):
        width, values = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    else:
        width = values = getattr(config, "head_dim", None) or config.hidden_size // queries
    keys = getattr(config, "num_key_value_heads", None) or queries
    return Heads(queries, keys, width, values)


def kinds_of_heads(config) -> list[Heads]:
    """The different shapes of attention of a model's blocks."""
    blocks = range(config.num_hidden_layers)
    return list(dict.fromkeys(heads_of(config, block) for block in blocks))


def unit_of(block: Cost) -> int:
    """Blocks like this one that make a unit."""
    return max(1, min(1 if block.hybrid else 4, round(64e6 / block.parameters)))


def unit_sizes(config, n_blocks: int, blocks_per_unit: int, first: int = 0) -> list[int]:
    """Blocks of each unit, of n_blocks from block `first` on. blocks_per_unit 0: units of about 64M
    parameters, at most 4 blocks, all of one size: dense ones and those with experts apart. In a
    model with a delta rule each block is a unit: compiled together, all but the first keep shifted
    copies of their convolution's input."""
    blocks, sizes = block_costs(config)[first : first + n_blocks], []
    for _, alike in itertools.groupby(blocks, lambda block: blocks_per_unit or block.parameters):
        same = list(alike)
        n = len(same)
        units = math.ceil(n / (blocks_per_unit or unit_of(same[0])))
        sizes += [n // units + (u < n % units) for u in range(units)]
    return sizes


def share_of_heads(heads: Heads, n: int) -> Heads:
    """The heads that each of n ranks has. If there are fewer key-value heads than ranks, each is on
    several ranks. Raises UserError if n does not divide them."""
    queries, keys = heads.queries, heads.keys
    if queries % n:
        raise UserError(f"--sequence_parallel {n} does not divide {queries}, the heads of queries")
    if keys % n and n % keys:
        raise UserError(
            f"--sequence_parallel {n} neither divides nor is a multiple of {keys}, the heads of "
            "keys and values"
        )
    return heads._replace(queries=queries // n, keys=max(1, keys // n))


def shares_of_heads(config, n: int) -> list[Heads]:
    """As share_of_heads, of each of a model's kinds."""
    return [share_of_heads(heads, n) for heads in kinds_of_heads(config)]


def refuse_shares(config, n: int) -> None:
    """Raise UserError if a model can't be cut into n shares."""
    if n > 1 and not family_of(config).tested:
        name = family_name(config)
        raise UserError(f"--tensor_parallel: no test shows that it is right for {name}: drop it")
    if n > 1 and family_of(config).norms_over_heads:
        raise UserError(f"--tensor_parallel: {family_name(config)} has norms over all heads")
    counts = [("num_key_value_heads", heads.keys) for heads in kinds_of_heads(config)]
    counts.append(("num_attention_heads", config.num_attention_heads))
    if not hasattr(config, "moe_intermediate_size"):  # else see options/tensor.py
        counts.append(("intermediate_size", config.intermediate_size))
    for name, count in counts:
        if count % n:
            raise UserError(f"--tensor_parallel {n} does not divide {count}, the model's {name}")
