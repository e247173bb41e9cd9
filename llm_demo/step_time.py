"""A rough time of an optimizer step, to rank settings that nobody has measured. No promise.

    micro-batches x (LAUNCH + (tokens of one + OVERHEAD) x FLOPs of a token / FLOP/s)
    + exposed part of communication + exposed part of the host's update

FLOPs are those of the MFU, of attention half, since it is causal. Checkpointing adds 0.7 of the
blocks' forward without attention, and attention's unless that is kept; a memory budget b adds (1 -
b) / 10. FSDP moves bf16 weights once a step (resharded: twice a micro-batch) and fp32 gradients
once (resharded, or the optimizer on the host: in bf16, every micro-batch). Of a transfer, at least
a third is exposed, and what lasts longer than the compute beside it; nothing is computed while rows
that are spread exchange slices for heads, or tokens come to experts that are spread or to shares of
matrices and their sums go back. A stage of a pipeline has its share of a micro-batch but all of
LAUNCH. A pipeline idles for stages - 1 micro-batches, half as long with two pieces a stage, and
waits for all it sends.

The constants fit the rows of docs/benchmarks.md, ways.md and speed.md (H200, three links) and
fits.md (H100; tests/test_fit.py). FLOP/s are of a card, bandwidths of what it receives, in bytes
per second."""

from llm_demo.estimate import tokens_here
from llm_demo.machine.cards import LINKED, NVLINK, PCIE, SUSTAINED, TFLOPS
from llm_demo.machine.device import peak_tflops, this_device
from llm_demo.model.costs import (
    OVERHEAD,
    block_costs,
    flops_of_slot,
    head_cost,
    heads_of,
    mixed_blocks,
    parameters_of,
    state_bytes,
)

LAUNCH, LEAST = 0.007, 0.03  # seconds of a micro-batch: besides its tokens; in all, for the host
TO_HOST = 33e9  # bytes per second between a card and the host, each way at once, by two cards


def speed_of(card: str | None, dtype) -> tuple[float, float]:
    """(TFLOP/s that a card sustains, GB/s between cards). card: the one planned for with --card;
    None stands for an H200."""
    tflops = SUSTAINED * peak_tflops(this_device(), dtype) if card else TFLOPS
    return tflops, NVLINK if card in (None, *LINKED) else PCIE


def micro_batch(args, config, compute, flops: float) -> float:
    """Seconds that one card would take for a micro-batch, or its slice of one, through the whole
    model."""
    attended, recomputed = args.seq_len / 2, 1 - compute.attention_kept / config.num_hidden_layers
    blocks, products = (sum(b.flops for b in block_costs(config, s)) for s in (attended, 0))
    again = (1 - args.activation_memory_budget) / 10 * blocks
    if args.use_activation_checkpointing:
        again = 0.7 * products + recomputed * (blocks - products)
    of_token = flops_of_slot(config, attended, compute.lora and compute.lora.active) + again / 3
    return max(LEAST, LAUNCH + (tokens_here(args, args) + OVERHEAD) * of_token / flops)


def exposed(seconds: float, beside: float) -> float:
    """Of a transfer that lasts so long, beside compute that lasts so long."""
    return max(seconds / 3, seconds - beside)


# seconds that an exchange of slices for whole rows costs besides its bytes, 8B on two H100: kernels
# are short and the host can't run ahead
EXCHANGE = 2e-4


def of_fsdp(args, config, compute, cards: int, flops: float, bandwidth: float) -> float:
    """Seconds of a step."""
    micro, accum = micro_batch(args, config, compute, flops), args.grad_accum_steps
    n, tokens, total = config.num_hidden_layers, tokens_here(args, args), parameters_of(config)
    if args.activations_on_host:  # there and back
        micro += exposed(4 * config.hidden_size * tokens * n / TO_HOST, micro)
    # Numbers of a token that cards exchange for rows and experts: forward, backward, and once more
    # if blocks are recomputed. They wait for experts' ranks about as long again (bench/LOG.md).
    over, (queries, keys, width, values) = args.sequence_parallel, heads_of(config)
    waits = n * (queries + max(keys, over)) * (width + values) * (1 - 1 / over)
    waits += sum(mixed_blocks(config)) * 4 * config.hidden_size * ((args.expert_parallel or 1) - 1)
    around = 4 * n - 2 * sum(mixed_blocks(config))  # attention and dense MLPs, there and back
    waits += around * config.hidden_size * (args.tensor_parallel - 1)
    passes = 3 if args.use_activation_checkpointing else 2
    waits *= 2 * tokens * passes / bandwidth
    waits += around * EXCHANGE * passes * (args.tensor_parallel > 1)

    reshard, on_host = args.reshard_after_forward, args.optimizer_on_host
    each = on_host or reshard and accum > 1  # micro-batch, in bf16
    weights, grads = 2 * (2 * accum if reshard else 1), 2 * accum if each else 4
    trained = compute.lora.active if compute.lora else total
    shares = args.tensor_parallel
    moved = sum(block.cut for block in block_costs(config, 0)) * (1 - 1 / shares)
    sent = ((total - moved) * weights + max(0, trained - moved) * grads) * (1 - 1 / cards)
    step = exposed(sent / bandwidth, micro * (accum if reshard or on_host else 1))
    if on_host:  # masters and moments to the card, and back at the same time, beside a forward
        step += exposed(total * state_bytes(args) / cards / TO_HOST, micro / 3)
    return step + accum * (micro + waits)


def of_pipeline(args, config, compute, replicas: int, flops: float, bandwidth: float) -> float:
    """Seconds of a step."""
    stages, v = args.stages, args.schedule == "dualpipev"
    pieces = 2 if v or args.schedule == "interleaved" else 1  # of a stage
    accum = args.grad_accum_steps
    micro = (micro_batch(args, config, compute, flops) - LAUNCH) / stages + LAUNCH
    # hidden states and their gradients in bf16
    sent = 4 * config.hidden_size * accum * args.micro_batch_size * args.seq_len * pieces
    if config.tie_word_embeddings and not v:
        sent += 4 * head_cost(config).parameters
    reshard = args.reshard_after_forward
    weights = 2 * (2 * accum if reshard else 1)
    shared = (weights + 4) * parameters_of(config) / stages * (1 - 1 / replicas)
    step = (accum + (stages - 1) / pieces) * micro + sent / bandwidth
    beside = micro * (accum if reshard else 1)
    return step + exposed(shared / bandwidth, beside)
