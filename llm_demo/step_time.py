"""A rough time of an optimizer step, to rank settings that nobody has measured. No promise.

    micro-batches x (LAUNCH + (tokens of one + OVERHEAD) x FLOPs of a token / FLOP/s)
    + exposed part of communication + exposed part of the host's update

The constants fit the rows of docs/benchmarks.md, ways.md and speed.md (H200, three links) and
fits.md (H100; tests/test_fit.py). flops: per second, of a card. bandwidth: bytes per second that a
card receives."""

from llm_demo.machine.cards import LINKED, NVLINK, PCIE, SUSTAINED, TFLOPS
from llm_demo.machine.device import peak_tflops, this_device
from llm_demo.memory import Settings
from llm_demo.model.costs import OVERHEAD, Sizes, flops_of_slot, state_bytes

LAUNCH, LEAST = 0.007, 0.03  # seconds of a micro-batch: besides its tokens; in all, for the host
TO_HOST = 33e9  # bytes per second between a card and the host, each way at once, by two cards
EXCHANGE = 2e-4  # seconds of an exchange of slices for whole rows, besides its bytes


def speed_of(card: str | None, dtype) -> tuple[float, float]:
    """(TFLOP/s that a card sustains, GB/s between cards). card: the one planned for with --card;
    None stands for an H200."""
    tflops = SUSTAINED * peak_tflops(this_device(), dtype) if card else TFLOPS
    return tflops, NVLINK if card in (None, *LINKED) else PCIE


def micro_batch_seconds(sizes: Sizes, s: Settings, flops: float) -> float:
    """What one card would take for a micro-batch, or its slice of one, through the whole model.
    Attention counts half, since it is causal. Checkpointing repeats 0.7 of the blocks' forward
    without attention, and attention unless that is kept; a memory budget b (1 - b) / 10."""
    attended = s.seq_len / 2
    blocks = sum(block.flops(attended) for block in sizes.blocks)
    products = sum(block.flops(0) for block in sizes.blocks)
    again = (1 - s.activation_memory_budget) / 10 * blocks
    if s.use_activation_checkpointing:
        recomputed = 1 - s.attention_kept / len(sizes.blocks)
        again = 0.7 * products + recomputed * (blocks - products)
    of_token = flops_of_slot(sizes, attended, s.lora and s.lora.active) + again / 3
    return max(LEAST, LAUNCH + (s.tokens + OVERHEAD) * of_token / flops)


def exposed(seconds: float, beside: float) -> float:
    """Of a transfer that lasts so long, beside compute that lasts so long: at least a third."""
    return max(seconds / 3, seconds - beside)


def waits_seconds(sizes: Sizes, s: Settings, bandwidth: float) -> float:
    """Of a micro-batch, in which cards exchange tokens and compute nothing: slices for heads,
    tokens of experts that are spread, and sums of shares of matrices."""
    n, over, heads = len(sizes.blocks), s.sequence_parallel, sizes.heads
    mixed = sum(block.chosen > 0 for block in sizes.blocks)
    around = 4 * n - 2 * mixed  # exchanges around attention and dense MLPs, there and back
    numbers = n * (heads.queries + max(heads.keys, over)) * 2 * heads.width * (1 - 1 / over)
    numbers += mixed * 4 * sizes.hidden * (s.expert_parallel - 1)
    numbers += around * sizes.hidden * (s.tensor_parallel - 1)
    seconds = 2 * s.tokens * numbers / bandwidth  # of a forward
    if s.tensor_parallel > 1:
        seconds += around * EXCHANGE
    return seconds * (3 if s.use_activation_checkpointing else 2)


def step_seconds(sizes: Sizes, s: Settings, flops: float, bandwidth: float) -> float:
    accum, stages, total = s.grad_accum_steps, s.stages, sizes.parameters
    # A stage has its share of a micro-batch, but all of LAUNCH. It idles for stages - 1
    # micro-batches, half as long with two pieces, and waits for all it sends.
    pieces = 2 if s.schedule in ("dualpipev", "interleaved") else 1
    micro = (micro_batch_seconds(sizes, s, flops) - LAUNCH) / stages + LAUNCH
    if s.activations_on_host:  # there and back
        micro += exposed(4 * sizes.hidden * s.tokens * len(sizes.blocks) / TO_HOST, micro)
    step = (accum + (stages - 1) / pieces) * (micro + waits_seconds(sizes, s, bandwidth))
    if stages > 1:  # hidden states and their gradients, and those of a tied head
        sent = 4 * sizes.hidden * accum * s.tokens * pieces
        if sizes.tied and s.schedule != "dualpipev":
            sent += 4 * sizes.embedding
        step += sent / bandwidth
    # bytes of a weight in bf16, once a step or, resharded, twice a micro-batch; of a gradient in
    # fp32, or in bf16 after each micro-batch
    weights, gradients, beside = 2, 4, micro
    if s.reshard_after_forward:
        weights, beside = 4 * accum, accum * micro
    if s.optimizer_on_host or s.reshard_after_forward and accum > 1 and stages == 1:
        gradients, beside = 2 * accum, accum * micro
    here = total - sum(block.cut for block in sizes.blocks) * (1 - 1 / s.tensor_parallel)
    trained = s.lora.active if s.lora else here
    shared = (here * weights + trained * gradients) / stages * (1 - 1 / s.ranks)
    step += exposed(shared / bandwidth, beside)
    if s.optimizer_on_host:  # masters and moments to the card, and back, beside a forward
        step += exposed(total * state_bytes(s) / s.ranks / TO_HOST, micro / 3)
    return step
