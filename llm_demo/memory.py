"""The peak memory of each rank, by a closed formula: nothing is built or allocated for it.

`peaks` gives it for a model's sizes and a run's settings. --estimate prints it, `fit` searches with
it, and scripts choose by it. tests/test_memory.py holds it against the rows of bench/results: never
more than 8 % too low, nine of ten rows within 15 %.

A rank's peak is that of the moment that takes most: for example when the loss is computed and all
activations exist, or when the backward ends and all gradients exist."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from llm_demo.core.attention import PADDED_TO
from llm_demo.core.errors import UserError
from llm_demo.core.loss import CHUNK_ROWS, SLIM
from llm_demo.core.mesh import World
from llm_demo.machine.device import dtype_name, free_host_memory, has_fused_kernels, this_device
from llm_demo.machine.dist import once_per_node
from llm_demo.model.costs import (
    MASTER_BYTES,
    MOMENT_BYTES,
    Cost,
    Sizes,
    sizes_of,
    state_bytes,
    unit_of,
)

GB = 2**30
UNUSED, CONTEXT = "reserved, unused", "CUDA and NCCL"
SCATTERED = 0.04  # share of the allocated memory that lies free between allocations
CONTEXT_GB = 1.2  # measured on two H100
PROCESS = 2.1  # GiB of host memory: Python, PyTorch, CUDA; measured beside 0.6B to 14B on H200
USABLE = 0.95  # share of a card's memory; the rest is for what the formula leaves out
LONG_DOCUMENT = 8192  # tokens; from here on attention takes a good part of the forward
INPUTS_KEPT = 2  # inputs of blocks that --activations_on_host leaves on the device
MLP_PIECE, MLP_LONG = 1 << 13, 1 << 15  # tokens of which a frozen MLP computes a piece
STREAMED = 3 << 21  # elements that the host's optimizer has on the device at a time
LOW_RANK_BATCH = 1 << 27  # elements of the matrices that PowerSGD multiplies at a time


@dataclasses.dataclass(frozen=True)
class Settings:
    """What memory and time depend on besides the model. Fields that are flags have their names."""

    engine: str  # fsdp, pp, fsdp_pp or zero
    ranks: int  # that share the weights, of a stage or of the whole model
    sharded: bool = True  # whether FSDP2 shards them
    seq_len: int = 1024
    micro_batch_size: int = 1
    grad_accum_steps: int = 1
    use_activation_checkpointing: bool = False
    activation_memory_budget: float = 1.0
    activations_on_host: bool = False
    reshard_after_forward: bool = False
    optimizer_on_host: bool = False
    optim_state: str = "fp32"
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    replicas: str = "1"
    psgd_rank: int = 0
    blocks_per_unit: int = 0
    stages: int = 1
    schedule: str = "1f1b"
    counts: tuple[int, ...] = ()  # blocks of each piece of a pipeline; (): one piece
    zero: dict = dataclasses.field(default_factory=dict)  # DeepSpeed's zero_optimization
    copies: bool = False  # whether checkpoints need a copy in host memory
    dtype: str = "bf16"  # that is computed in
    compile: bool = True
    keys: float = 0  # keys per token whose probabilities are kept; 0: attention is a fused kernel
    rule: str = "fla"  # of linear attention; chunked: operations of PyTorch
    attention_kept: int = 0  # the last blocks whose attention is not computed again
    lora: tuple | None = None  # a options.lora.Lora
    fp8: str = "none"  # products, which changes time alone

    @property
    def size(self) -> int:
        """Bytes of a number in the compute dtype."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that a rank holds."""
        shares = self.sequence_parallel * self.tensor_parallel
        return self.micro_batch_size * self.seq_len // shares

    @property
    def copies_of_model(self) -> int:
        """The N of --replicas N; "all" has no number."""
        return int(self.replicas) if self.replicas != "all" else 1

    @property
    def with_master(self) -> int:
        """Bytes of a weight and its master in one process, see core/masters.py."""
        halves = self.dtype == "bf16" and self.compile  # of which one is the weight
        return 4 if halves or self.size == 4 else 4 + self.size


class Peak(NamedTuple):
    """What a rank needs, in GiB (2**30 bytes)."""

    parts: dict[str, float]  # of the device
    host: float  # for what is offloaded, with the process
    copies: float  # more of the host's, while a checkpoint is saved or read

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def settings_of(engine: str, args, compute, train, ranks: int, **layout) -> Settings:
    """Settings of a run. args: its flags; compute: a run.choices.Compute; train: the training Rows;
    layout: other fields of Settings."""
    flags = vars(args)
    given = {f.name: flags[f.name] for f in dataclasses.fields(Settings) if f.name in flags}
    given["expert_parallel"] = flags.get("expert_parallel") or 1
    of_run = {
        "engine": engine,
        "ranks": ranks,
        "seq_len": train.seq_len,
        "dtype": dtype_name(compute.dtype),
        "compile": compute.compile,
        "rule": compute.rule,
        "lora": compute.lora,
        "attention_kept": compute.attention_kept,
        "keys": keys_kept(compute, train),
    }
    return Settings(**given | of_run | layout)


def estimated_peaks(job, engine: str, ranks: int, **layout) -> list["Peak"]:
    """The Peak of each rank of a run.Job. engine, ranks, layout: as of settings_of."""
    args, config, compute, train = job.planned()
    return peaks(sizes_of(config), settings_of(engine, args, compute, train, ranks, **layout))


def keys_kept(compute, train) -> float:
    """Mean number of keys per token whose probabilities are kept: 0 by a fused kernel."""
    impls = compute.attn_impl.split("+")
    if "math" in impls:
        return train.seq_len
    if "bucketed" in impls:
        device = this_device()
        fused = device.vendor != "amd" or has_fused_kernels(device)
    else:
        fused = "bucketed_math" not in impls
    if fused:
        return 0
    lengths = train.documents.lengths
    padded = np.minimum(-(-lengths // PADDED_TO) * PADDED_TO, train.seq_len)
    return float((padded**2).sum() / lengths.sum())


class Moment(NamedTuple):
    """Bytes on the device."""

    weights: float
    optimizer: float
    gradients: float
    activations: float = 0
    loss: float = 0


def peaks(sizes: Sizes, s: Settings) -> list[Peak]:
    """The Peak of each rank. Equal ranks share one."""
    found = []
    for stage in range(s.stages):
        flight = in_flight(s, stage)
        part = part_of(sizes, s, flight)
        activations, loss = at_the_loss(sizes, s, flight)
        if s.engine in ("pp", "zero"):
            moments = deepspeed_moments(sizes, s, part, activations, loss)
        elif s.lora:
            moments = lora_moments(sizes, s, part, activations, loss)
        else:
            moments = fsdp_moments(sizes, s, part, activations, loss)
        most = max(moments, key=sum)
        parts = {name: size / GB for name, size in most._asdict().items()}
        parts[UNUSED] = SCATTERED * sum(most) / GB
        parts[CONTEXT] = CONTEXT_GB
        host = host_bytes(sizes, s) / GB
        if host:
            host += PROCESS
        copies = part.shard * state_bytes(s) / GB if s.copies else 0
        found += [Peak(parts, host, copies)] * s.ranks
    return found


def fullest(sizes: Sizes, settings: Settings) -> Peak:
    """The Peak of the rank that needs most."""
    return max(peaks(sizes, settings), key=lambda peak: peak.total)


# ---------------------------------------------------------------- what a rank computes


class Part(NamedTuple):
    """The part of a model that a rank computes, in parameters."""

    blocks: float  # when they are gathered
    embedding: int  # 0 without embedding and head
    ends: int  # of embedding and head
    shard: float  # that this rank has of all
    unit: float  # the largest that is gathered at once
    share: float  # of the model's blocks that are here

    @property
    def whole(self) -> float:
        return self.blocks + self.ends


def part_of(sizes: Sizes, s: Settings, flight: dict[int, int]) -> Part:
    """The part of a rank. flight: see in_flight. A stage's blocks count as so many average
    blocks."""
    share = 1
    if s.counts:
        share = sum(s.counts[piece] for piece in flight) / len(sizes.blocks)
    gathered = 0  # what a rank computes with
    for block in sizes.blocks:
        spread = block.cut * (1 - 1 / s.tensor_parallel)
        gathered += block.parameters - spread - block.routed * (1 - 1 / s.expert_parallel)
    stored = sum(block.parameters for block in sizes.blocks)
    if s.lora and s.lora.in_4_bits:
        of_layers, of_experts = (numbers - taken / s.size for numbers, taken in s.lora.in_4_bits)
        gathered -= of_layers + of_experts / s.expert_parallel
        stored -= of_layers + of_experts
    ends = (0 in flight) + (max(len(s.counts), 1) - 1 in flight)
    if sizes.tied and s.engine != "fsdp_pp":  # where a tied head is a copy
        ends = min(ends, 1)
    return Part(
        blocks=share * gathered,
        embedding=sizes.embedding if ends else 0,
        ends=ends * sizes.embedding,
        shard=(share * stored + ends * sizes.embedding) / s.ranks,
        unit=gathered / len(sizes.blocks) * max(s.blocks_per_unit, 1),
        share=share,
    )


def in_flight(s: Settings, stage: int) -> dict[int, int]:
    """{piece of the model that a stage has: micro-batches whose activations it holds when they take
    most}."""
    n, accum = s.stages, s.grad_accum_steps
    if s.schedule == "interleaved":  # n micro-batches through a piece, then through the other
        forwards = min(2 * accum, 2 * (n - 1 - stage) + n + 1, 3 * n + 1)
        rounds, rest = divmod(forwards, 2 * n)
        return {stage: rounds * n + min(rest, n), n + stage: rounds * n + max(0, rest - n)}
    back = 2 * n - 1 - stage
    if s.schedule == "dualpipev":
        return {stage: 2 * n - stage, back: stage + 1}
    if s.schedule == "v":
        later = min(accum, n + stage, math.ceil(accum / 2) + stage)
        return {stage: min(accum, 2 * n - 1), back: later}
    return {stage: accum if s.schedule == "gpipe" else min(accum, n - stage)}


# ---------------------------------------------------------------- activations and the loss


def saved_bytes(block: Cost, sizes: Sizes, s: Settings) -> float:
    """Bytes per token that a block keeps if nothing is computed again: what products, norms,
    attention and residual sums read."""
    numbers = (4 + block.chosen) * sizes.hidden + block.mixer + 3 * width_of(block, s)
    if s.compile:
        numbers *= s.activation_memory_budget
    else:  # also the inputs of multiplications, and of norms a copy in fp32
        numbers *= 2.4 if block.rule else 1.6
    numbers += 2 * (s.tensor_parallel - 1) * sizes.hidden  # whole rows before attention and MLP
    if s.sequence_parallel > 1:  # the output of attention, for whole rows
        numbers += block.heads.queries * block.heads.width
    total = numbers * s.size
    if s.keys and not block.rule:  # no fused kernel: in fp32, with probabilities
        total += 4 * block.heads.queries * (3 * block.heads.width + s.keys)
    if block.rule and s.rule == "chunked":  # in fp32, with the states between chunks
        total += 90 * block.rule
    return total


def width_of(block: Cost, s: Settings) -> float:
    """Width of a block's network, less if it is frozen and computed again in pieces."""
    if s.lora and s.use_activation_checkpointing and s.tokens > MLP_LONG:
        return block.width * MLP_PIECE / s.tokens
    return block.width


def passing_bytes(block: Cost, sizes: Sizes, s: Settings) -> float:
    """Bytes per token that exist only while a block's backward runs: what is computed again, and
    gradients beside it."""
    heads = block.heads
    total = 8 * heads.queries * s.keys  # gradients of probabilities
    if s.sequence_parallel > 1:  # slices for heads, sent and received
        total += 4 * heads.queries * heads.width * s.size
    # inputs of experts, in the order of experts and of tokens
    of_experts = 2 * block.chosen * sizes.hidden * s.size
    of_rule = 56 * block.rule if s.rule != "chunked" else 0
    if not s.use_activation_checkpointing:
        return total + of_experts + of_rule
    if s.lora and s.compile and not (block.chosen or block.rule or s.keys):
        # by the compiler's plan for Qwen3-8B on an H100: hidden states, with a frozen network in
        # pieces also its gradients in two parts; what attention reads; six of the network's width
        width = width_of(block, s)
        states = 5 if width == block.width else 7
        return total + (states * sizes.hidden + block.mixer + 6 * width) * s.size
    # of queries, keys and values, some in fp32; then the network's memory is free
    of_attention = s.size * (4 * heads.queries + 2 * heads.keys) + 4 * heads.queries
    of_mixer = of_rule if block.rule else heads.width * of_attention
    of_network = width_of(block, s) * s.size
    total += saved_bytes(block, sizes, s)
    return total + max(of_experts or of_network, of_mixer - 3 * of_network)


def loss_bytes(sizes: Sizes, s: Settings) -> float:
    """Bytes of a chunk's logits, which become their gradient, and of the head's gradient."""
    slim = s.lora or s.optimizer_on_host and s.tokens > CHUNK_ROWS
    rows = min(CHUNK_ROWS // SLIM if slim else CHUNK_ROWS, s.tokens)
    logits = rows * sizes.vocabulary * s.size
    copies = 0 if s.compile else (s.size < 4) + sizes.capped  # in fp32
    copy = copies * rows * sizes.vocabulary * 4
    if s.lora:
        return logits + copy
    head = sizes.embedding * s.size
    if s.tokens <= CHUNK_ROWS:
        return logits + max(copy, head)
    sums = sizes.embedding * 4  # of the head's gradient, in fp32
    if slim:
        return sums + logits + copy + head
    return sums + max(logits + copy, head)


def at_the_loss(sizes: Sizes, s: Settings, flight: dict[int, int]) -> tuple[float, float]:
    """Bytes of (activations, the loss) when they take most. flight: see in_flight."""
    n = len(sizes.blocks)
    counts = s.counts or (n,)
    held = sum(counts[piece] * times for piece, times in flight.items())  # blocks
    block_input = sizes.hidden * s.size
    each = block_input
    if not s.use_activation_checkpointing:
        each = sum(saved_bytes(block, sizes, s) for block in sizes.blocks) / n
    tokens = held * each
    if s.activations_on_host:
        tokens -= (n - INPUTS_KEPT - 1) * block_input
    if s.expert_parallel > 1:  # all ranks' tokens, their sums, and the gradients of both
        tokens += 4 * s.expert_parallel * block_input
    if s.engine == "fsdp_pp":  # outputs until their backward, and four slots for each neighbour
        tokens += (sum(flight.values()) + 8 * len(flight)) * block_input
    for block in sizes.blocks[n - s.attention_kept :]:  # output, logarithms of sums
        tokens += block.heads.queries * (block.heads.values * s.size + 4)
    activations = s.tokens * tokens
    backward = s.tokens * max(passing_bytes(block, sizes, s) for block in {*sizes.blocks})
    loss = 0
    if len(counts) - 1 in flight:
        loss = loss_bytes(sizes, s)
    if loss >= backward:
        return activations, loss
    return activations + backward, 0


# ---------------------------------------------------------------- weights and gradients


def fsdp_moments(
    sizes: Sizes, s: Settings, part: Part, activations: float, loss: float
) -> list[Moment]:
    """The moments of FSDP2, in a pipeline or not, and of one process."""
    size, embedding, shard = s.size, part.embedding, part.shard
    on_host = s.optimizer_on_host
    # whether each micro-batch's gradients are summed over ranks
    sums_each = on_host or s.reshard_after_forward and s.replicas == "1" and s.engine == "fsdp"
    # whether there are sums of gradients when the loss is computed
    between = s.grad_accum_steps > 1 or on_host or s.stages > 1
    sums = 4 * part.whole * between
    if s.sharded:
        stored = shard * (size if on_host else MASTER_BYTES)
        weights = at_end = stored + gathered(s, part, sizes.tied) * size
        # the embedding's gradient, as it is sent and received
        sent = embedding * 4 * (1 + 1 / s.ranks)
        gradients = sums + sent
        at_block = 4 * (shard + part.unit)
        if sums_each or not between:
            sums = 4 * shard * between
            at_end = stored + (embedding + part.unit) * size
            gradients = 4 * shard + sent + embedding * size
            if on_host:  # in the compute dtype
                gradients = 4 * shard + 3 * embedding * size
    else:
        weights = at_end = part.whole * (size if on_host else s.with_master)
        if on_host:  # a unit's exist until they are added
            gradients = sums + max(part.unit, embedding) * size
        elif between:  # a micro-batch's of a piece do
            pieces = max(1, len(s.counts) // s.stages)
            gradients = sums + part.whole / pieces * size
        else:  # a unit's are copied
            gradients = part.whole * (size if s.with_master == 4 else 4)
            gradients += max(part.unit, part.ends) * size
        at_block = gradients
    optimizer = shard * MOMENT_BYTES[s.optim_state]
    if on_host:
        optimizer = STREAMED * state_bytes(s)
    if s.psgd_rank:  # its errors, and two sets of matrices that are multiplied
        optimizer += 4 * shard + 8 * min(shard, max(LOW_RANK_BATCH, embedding / s.ranks))
    found = [
        Moment(weights, optimizer, sums, activations, loss),
        Moment(at_end, optimizer, gradients),
    ]
    if s.use_activation_checkpointing and s.engine == "fsdp":
        # the first block's backward, when all others have gradients
        again = s.tokens * passing_bytes(sizes.blocks[0], sizes, s)
        found.append(Moment(at_end, optimizer, at_block, again))
    return found


def gathered(s: Settings, part: Part, tied: bool) -> float:
    """Parameters that are gathered when the loss is computed."""
    total = part.whole
    if s.reshard_after_forward:
        total = part.ends + 2 * part.unit
    # with the host's optimizer the embedding is freed after the forward
    freed = s.optimizer_on_host and s.reshard_after_forward and not tied
    if s.engine == "fsdp" and s.ranks > 1 and s.size < 4 and not freed:
        total += part.embedding  # a buffer for embedding or head
    return total


def lora_moments(
    sizes: Sizes, s: Settings, part: Part, activations: float, loss: float
) -> list[Moment]:
    """The moments of a run with adapters, in a pipeline or not: the model has neither masters nor
    gradients. When the backward ends, all adapters have gradients, and the first block's
    activations are there."""
    trained = part.share * s.lora.parameters / s.ranks
    own = part.share * (s.lora.parameters - s.lora.routed * (1 - 1 / s.expert_parallel))
    weights = part.whole * s.size
    if s.sharded:
        weights = (part.shard + gathered(s, part, sizes.tied)) * s.size
    if embeds_on_host(sizes, s):
        weights -= part.embedding * s.size
    sums, grads = own * 4 * (s.grad_accum_steps > 1), trained * 4
    if s.sharded:
        weights += own * s.size + trained * MASTER_BYTES
    else:
        weights += own * s.with_master
        grads = own * (s.size if s.with_master == 4 else 4)
    if s.lora.in_4_bits:  # one matrix at a time has its values, or those of some experts
        from llm_demo.options.four_bits_experts import UNPACKED

        of_blocks = [max(sizes.hidden * b.width, min(UNPACKED, b.routed)) for b in sizes.blocks]
        weights += max(of_blocks) * s.size
    optimizer = trained * MOMENT_BYTES[s.optim_state]
    again = s.tokens * passing_bytes(sizes.blocks[0], sizes, s)
    return [
        Moment(weights, optimizer, sums, activations, loss),
        Moment(weights, optimizer, sums + grads, again),
    ]


def deepspeed_moments(
    sizes: Sizes, s: Settings, part: Part, activations: float, loss: float
) -> list[Moment]:
    """The moments of ZeRO, and of a pipeline with ZeRO's first stage."""
    whole, embedding, size, shard = part.whole, part.embedding, s.size, part.shard
    stage = s.zero.get("stage", 1)
    bucket = min(s.zero.get("reduce_bucket_size", 5e8), whole)
    weights = at_end = whole
    if stage == 3:
        stored = 0 if "offload_param" in s.zero else shard
        weights = stored + min(s.zero.get("stage3_max_live_parameters", 1e9), whole)
        at_end = stored + embedding + part.unit
    masters = optimizer = sums = 0
    if "offload_optimizer" not in s.zero:
        masters = shard * MASTER_BYTES
        optimizer = shard * MOMENT_BYTES[s.optim_state]
        sums = 4 * (whole if stage == 1 else shard)
    gradients = sums + part.unit * size
    if stage > 1:  # buffers: fitted to measured rows
        gradients = sums + bucket * (4 + 2 * size) + embedding * (10 + size)
        sums += bucket * (4 + size)
    elif s.dtype != "bf16":  # a bucket, and one more while it is reduced
        sums += 4 * bucket
        gradients = sums + 4 * bucket
        if size == 4:  # the step copies them; sums are kept beside a micro-batch's
            gradients += 4 * (whole + shard)
            sums += 4 * whole * (s.grad_accum_steps > 1)
    still = 0
    if s.engine == "zero" and not sizes.tied:  # its head is reduced before any block's backward
        still = activations
    return [
        Moment(weights * size + masters, optimizer, sums, activations, loss),
        Moment(at_end * size + masters, optimizer, gradients, still),
    ]


def embeds_on_host(sizes: Sizes, s: Settings) -> bool:
    """Whether a frozen embedding stays in host memory."""
    return bool(s.activations_on_host and s.lora) and not (s.sharded or sizes.tied)


def host_bytes(sizes: Sizes, s: Settings) -> float:
    """Bytes of host memory for what is offloaded. DeepSpeed has masters and moments in fp32, with
    stage 3 the gradients twice and with offload_param the weights twice, in one buffer and in
    pieces."""
    share, total = sizes.parameters / s.ranks, 0
    if s.optimizer_on_host:
        total += state_bytes(s) * share
    if s.activations_on_host:
        total += (len(sizes.blocks) - 1) * s.tokens * sizes.hidden * s.size
    if embeds_on_host(sizes, s):
        total += sizes.embedding * s.size
    offload = s.zero.get("offload_param")
    if offload:
        total += pinned(share * s.size, offload) + share * s.size
    offload = s.zero.get("offload_optimizer")
    if offload:
        buffer = pinned(share * 4, offload)
        total += 2 * buffer + share * 8
        # gradients, or the weights on their way to the device
        total += buffer if s.zero["stage"] == 3 else sizes.parameters * s.size
    return total


def pinned(size: float, offload: dict) -> float:
    """Bytes of a buffer: PyTorch rounds pinned memory up to a power of two."""
    return 2 ** math.ceil(math.log2(max(size, 1))) if offload.get("pin_memory") else size


# ---------------------------------------------------------------- what it is asked for


def capacity_of(args) -> float:
    """GiB of a card for all that `peaks` counts, 0 if unknown. --device_memory_gb does not limit
    CUDA and NCCL."""
    limit = args.device_memory_gb
    return limit + CONTEXT_GB if limit else this_device().memory_gb


def attention_kept(
    sizes: Sizes, settings: Settings, longest: int, capacity: float
) -> tuple[int, str]:
    """(how many of the last blocks, if recomputed, keep what attention returned, the reason).
    longest: tokens of a document."""
    if longest < LONG_DOCUMENT:
        return 0, "documents are short"
    if settings.keys:
        return 0, "attention is no fused kernel here"
    if not capacity:
        return 0, "the memory of this device is not known"
    n = len(sizes.blocks)
    unit = settings.blocks_per_unit or unit_of(sizes.blocks[-1])  # that keeps it whole
    if settings.activations_on_host:
        unit = 1
    for blocks in (n, *range((n - 1) // unit * unit, -1, -unit)):
        keeping = dataclasses.replace(settings, attention_kept=blocks)
        needed = fullest(sizes, keeping).total
        if needed < USABLE * capacity:
            break
    return blocks, f"about {needed:.0f} of {capacity:.0f} GiB with {blocks}"


def report(ranks: list[Peak], args) -> str:
    """What --estimate prints: a table of the parts, with a warning if they come near what a card
    has, and host memory."""
    device, capacity = this_device(), capacity_of(args)
    names = [*ranks[0].parts]
    if device.type == "cpu":
        names = [name for name in names if name not in (UNUSED, CONTEXT)]
    rows = {name: [peak.parts[name] for peak in ranks] for name in names}
    totals = [sum(column) for column in zip(*rows.values(), strict=True)]
    rows["total"] = totals
    text = f"estimated peak memory of each rank on {device}, in GiB (2**30 bytes):"
    for name, row in rows.items():
        text += f"\n  {name:16} " + " ".join(f"{gb:7.1f}" for gb in row)
    if device.type == "cpu":
        text += "\nthis is the run on this machine's CPU; --card estimates it on a GPU"
    if capacity and max(totals) > USABLE * capacity:
        text += f"\nwarning: this may not fit into {capacity:.1f} GiB"
    host, copies = sum(peak.host for peak in ranks), sum(peak.copies for peak in ranks)
    if host or copies:
        text += f"\nhost memory: {in_words(host, copies)}, for all ranks"
    return text


def in_words(offloaded: float, copies: float) -> str:
    """The GiB of host memory, in words, of each part that takes any."""
    words = []
    if offloaded:
        words.append(f"{offloaded:.1f} GiB for what is offloaded")
    if copies:
        words.append(f"{copies:.1f} GiB while a checkpoint is saved or read")
    return " and ".join(words)


def check_host(ranks: list[Peak], args, world: World, say: Callable, advice: str) -> None:
    """Check each node's host memory before anything is allocated, and say what is offloaded. Every
    rank calls. Raises UserError, with the advice, if a node has too little."""
    first = world.rank - world.local_rank
    node = ranks[first : first + world.local_size]
    # the processes have started already
    kept = sum(max(0, peak.host - PROCESS) for peak in node)
    copies = sum(peak.copies for peak in node)

    def check() -> str:
        free = free_host_memory() / GB
        needed = in_words(kept, copies)
        if kept + copies <= free:
            return f"host memory: {needed}, of {free:.1f} GiB free"
        way_out = advice
        if kept < free and not args.resume:
            way_out = f"add --no_save, or {advice}"
        raise UserError(
            f"host memory: this node needs {needed}, and {free:.1f} GiB are free: {way_out}"
        )

    said = once_per_node(world, check)
    if kept:
        say(said)
