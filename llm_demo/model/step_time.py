"""A rough time of an optimizer step, to rank settings that nobody has measured. No promise.

    micro-batches x (LAUNCH + (tokens of one + OVERHEAD) x FLOPs of a token / FLOP/s)
    + exposed part of communication + exposed part of the host's update

FLOPs are those of the MFU, of attention half, since it is causal. Checkpointing adds 0.7 of the
blocks' forward without attention, and attention's unless that is kept; a memory budget b adds (1 -
b) / 10. FSDP moves bf16 weights once a step (resharded: twice a micro-batch) and fp32 gradients
once (resharded, or the optimizer on the host: in bf16, every micro-batch). Of a transfer, at least
a third is exposed, and what lasts longer than the compute beside it; nothing is computed while rows
that are spread exchange slices for heads, or tokens come to experts that are spread and their sums
go back. Such experts' weights are gathered as if they were not, since that overlaps. A pipeline
idles for stages - 1 micro-batches of a stage, half as long with two pieces a stage, and waits for
all it sends.

The constants fit the rows of docs/benchmarks.md, ways.md and speed.md (H200, three links;
tests/test_fit.py)."""

from llm_demo.model.attention import heads_of
from llm_demo.model.costs import (
    OVERHEAD,
    block_costs,
    flops_of_slot,
    head_cost,
    mixed_blocks,
    parameters_of,
)

LAUNCH, LEAST = 0.007, 0.03  # seconds of a micro-batch: besides its tokens; in all, for the host
PCIE = 37.5e9  # bytes per second between a card and the host, each way at once, by two cards


def micro_batch(
    args, config, seq_len: int, tflops: float, adapters: int | None = None, kept: float = 0
) -> float:
    """Seconds that one card would take for a micro-batch, or its slice of one, through the whole
    model. adapters: their parameters if the model is frozen; kept: the share of blocks whose
    attention is not computed again."""
    blocks, products = (sum(b.flops for b in block_costs(config, s)) for s in (seq_len / 2, 0))
    again = (1 - args.activation_memory_budget) / 10 * blocks
    if args.use_activation_checkpointing:
        again = 0.7 * products + (1 - kept) * (blocks - products)
    flops = flops_of_slot(config, seq_len / 2, adapters) + again / 3
    slots = args.micro_batch_size * seq_len / args.sequence_parallel
    return max(LEAST, LAUNCH + (slots + OVERHEAD) * flops / (tflops * 1e12))


def exchanges(args, config, seq_len: int, bandwidth: float) -> float:
    """Seconds that a card exchanges slices of rows for heads in a micro-batch: forward, backward,
    and once more if blocks are recomputed."""
    n = args.sequence_parallel
    queries, keys, width, values = heads_of(config)
    numbers = queries * (width + values) + max(keys, n) * (width + values)
    slots = args.micro_batch_size * seq_len / n * config.num_hidden_layers
    times = 3 if args.use_activation_checkpointing else 2
    return times * slots * 2 * numbers * (1 - 1 / n) / (bandwidth * 1e9)


def tokens_for_experts(args, config, seq_len: int, bandwidth: float) -> float:
    """Seconds that a card exchanges tokens and sums with the ranks that experts are spread over in
    a micro-batch: forward, backward, and once more if blocks are recomputed. It waits for these
    ranks about as long again (bench/LOG.md)."""
    others = (args.expert_parallel or 1) - 1
    slots = args.micro_batch_size * seq_len / args.sequence_parallel
    sent = 2 * 2 * config.hidden_size * slots * others * sum(mixed_blocks(config))  # there and back
    times = 3 if args.use_activation_checkpointing else 2
    return 2 * times * sent / (bandwidth * 1e9)


def exposed(seconds: float, beside: float) -> float:
    """Of a transfer that lasts so long, beside compute that lasts so long."""
    return max(seconds / 3, seconds - beside)


def of_fsdp(
    args,
    config,
    seq_len: int,
    cards: int,
    tflops: float,
    bandwidth: float,
    adapters: int | None = None,
    kept: float = 0,
) -> float:
    """bandwidth: GB/s (10**9 bytes) that a card receives from the others."""
    micro = micro_batch(args, config, seq_len, tflops, adapters, kept)
    accum = args.grad_accum_steps
    if args.activations_on_host:  # there and back
        slots = args.micro_batch_size * seq_len / args.sequence_parallel
        inputs = 4 * config.hidden_size * slots * config.num_hidden_layers
        micro += exposed(inputs / PCIE, micro)
    micro += exchanges(args, config, seq_len, bandwidth)
    reshard, on_host = args.reshard_after_forward, args.optimizer_on_host
    each = on_host or reshard and accum > 1  # micro-batch, in bf16
    weights, grads = 2 * (2 * accum if reshard else 1), 2 * accum if each else 4
    trained = parameters_of(config) if adapters is None else adapters
    sent = parameters_of(config) * weights + trained * grads
    sent *= (1 - 1 / cards) / (bandwidth * 1e9)
    step = accum * micro + exposed(sent, micro * (accum if reshard or on_host else 1))
    step += accum * tokens_for_experts(args, config, seq_len, bandwidth)  # over the same links
    if on_host:  # masters and moments to the card, and back at the same time, beside a forward
        step += exposed(parameters_of(config) * 12 / cards / PCIE, micro / 3)
    return step


def of_pipeline(args, config, seq_len: int, replicas: int, tflops: float, bandwidth: float):
    micro, accum = micro_batch(args, config, seq_len, tflops), args.grad_accum_steps
    stages, v = args.stages, args.schedule == "dualpipev"
    pieces = 2 if v or args.schedule == "interleaved" else 1  # of a stage
    tokens = accum * args.micro_batch_size * seq_len
    sent = 4 * config.hidden_size * tokens * pieces  # hidden states and their gradients in bf16
    if config.tie_word_embeddings and not v:
        sent += 4 * head_cost(config).parameters
    reshard = args.reshard_after_forward
    weights = 2 * (2 * accum if reshard else 1)
    shared = (weights + 4) * parameters_of(config) / stages * (1 - 1 / replicas)
    step = (accum + (stages - 1) / pieces) * micro / stages + sent / (bandwidth * 1e9)
    beside = micro / stages * (accum if reshard else 1)
    return step + exposed(shared / (bandwidth * 1e9), beside)
