"""A rough time of an optimizer step, to rank settings that nobody has measured. No promise.

    micro-batches x (LAUNCH + (tokens of one + OVERHEAD) x FLOPs of a token / FLOP/s)
    + exposed part of communication + exposed part of the host's update

The constants fit the rows under bench/results (H200 over three links, H100; tests/test_fit.py).
flops: per second, of a card. bandwidth: bytes per second that a card receives."""

from pathlib import Path

import torch

from llm_demo.machine.cards import CPU_LINK, CPU_TFLOPS, LINKED, NVLINK, PCIE, SUSTAINED, TFLOPS
from llm_demo.machine.device import links, other_than_nvlink, peak_tflops, this_device
from llm_demo.machine.files import cache_folder, hash_of, write_json
from llm_demo.machine.process import read_json
from llm_demo.machine.text import blame
from llm_demo.memory import Settings
from llm_demo.model.costs import OVERHEAD, Sizes, flops_of_slot, state_bytes

LAUNCH, LEAST = 0.007, 0.03  # seconds of a micro-batch: besides its tokens; at least
TO_HOST = 33e9  # bytes per second between a card and the host, each way at once, by two cards
FP8_SPEED = 1.3  # of a micro-batch's products, beside bf16
PSGD_SHARE = 0.1  # of the gradients' bytes that PowerSGD sends
PSGD_SECONDS = 4e-11  # to compress a parameter's gradient, once a step
EXCHANGE = 2e-4  # seconds of an exchange of slices for whole rows, besides its bytes


def speed_of(card: str | None, dtype) -> tuple[float, float]:
    """(TFLOP/s that a card sustains, GB/s between cards), assumed. card: a kind of cards.CARDS,
    "here" for this machine's; None stands for an H200."""
    if card is None:
        return TFLOPS, NVLINK
    device = this_device()
    if device.type == "cpu":
        return CPU_TFLOPS, CPU_LINK
    peak = peak_tflops(device, dtype)
    linked = card in LINKED
    if card == "here":
        linked = not other_than_nvlink()
    return SUSTAINED * peak if peak else TFLOPS, NVLINK if linked else PCIE


def speed_file(cards: int) -> Path:
    """Where the measured speed of this machine's cards and link is kept."""
    facts = [str(this_device()), cards, links()[:1], torch.__version__]
    return cache_folder() / f"speed-{hash_of(facts)[:16]}.json"


def keep_speed(cards: int, speed: dict) -> Path:
    """Keep {"tflops": of a card, "bandwidth": GB/s between cards, if measured} for later searches.
    Returns the file."""
    file = speed_file(cards)
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = {"device": str(this_device()), "cards": cards, "torch": torch.__version__}
    write_json(file, facts | speed)
    return file


def kept_speed(cards: int) -> dict:
    """What keep_speed kept for this machine, {} if nothing. Raises UserError if it can't be
    read."""
    file = speed_file(cards)
    if not file.is_file():
        return {}
    with blame(f"{file}, which can be deleted"):
        speed = read_json(file)
        return {name: float(speed[name]) for name in ("tflops", "bandwidth") if name in speed}


def micro_batch_flops(sizes: Sizes, s: Settings) -> float:
    """FLOPs of a micro-batch, or of a rank's slice of one, through the whole model, with those of
    OVERHEAD. Attention counts half, since it is causal. Checkpointing repeats 0.7 of the blocks'
    forward without attention, and attention unless that is kept; a memory budget b (1 - b) / 10."""
    attended = s.seq_len / 2
    blocks = sum(block.flops(attended) for block in sizes.blocks)
    products = sum(block.flops(0) for block in sizes.blocks)
    again = (1 - s.activation_memory_budget) / 10 * blocks
    if s.use_activation_checkpointing:
        recomputed = 1 - s.attention_kept / len(sizes.blocks)
        again = 0.7 * products + recomputed * (blocks - products)
    of_token = flops_of_slot(sizes, attended, s.lora and s.lora.active) + again / 3
    return (s.tokens + OVERHEAD) * of_token


def micro_batch_seconds(sizes: Sizes, s: Settings, flops: float) -> float:
    """What one card would take for a micro-batch through the whole model."""
    faster = FP8_SPEED if s.fp8 != "none" else 1
    return max(LEAST, LAUNCH + micro_batch_flops(sizes, s) / flops / faster)


def exposed(seconds: float, beside: float) -> float:
    """Seconds of a transfer that compute `beside` it does not hide: at least a third."""
    return max(seconds / 3, seconds - beside)


def waits_seconds(sizes: Sizes, s: Settings, bandwidth: float) -> float:
    """Seconds of a micro-batch in which cards exchange tokens and compute nothing: slices for
    heads, tokens of experts that are spread, and sums of shares of matrices."""
    n, over, heads = len(sizes.blocks), s.sequence_parallel, sizes.blocks[0].heads
    mixed = sum(block.chosen > 0 for block in sizes.blocks)
    around = 4 * n - 2 * mixed  # exchanges around attention and dense MLPs, there and back
    numbers = n * (heads.queries + max(heads.keys, over)) * 2 * heads.width * (1 - 1 / over)
    numbers += mixed * 4 * sizes.hidden * (s.expert_parallel - 1)
    numbers += around * sizes.hidden * (s.tensor_parallel - 1)
    seconds = 2 * s.tokens * numbers / bandwidth  # of a forward
    if s.tensor_parallel > 1:
        seconds += around * EXCHANGE
    return seconds * (3 if s.use_activation_checkpointing else 2)


def shared_bytes(sizes: Sizes, s: Settings) -> float:
    """Bytes that a card receives in a step for weights and gradients that it shares with others: of
    a weight in bf16, once a step or, resharded, twice a micro-batch; of a gradient in fp32, or in
    bf16 after each micro-batch. Copies of the model exchange gradients alone, there and back."""
    accum, weights, gradients = s.grad_accum_steps, 2, 4
    if s.reshard_after_forward or s.zero.get("stage") == 3:
        weights = 4 * accum
    if s.optimizer_on_host or s.reshard_after_forward and accum > 1 and s.stages == 1:
        gradients = 2 * accum
    here = sizes.parameters - sum(block.cut for block in sizes.blocks) * (1 - 1 / s.tensor_parallel)
    trained = here
    if s.lora:
        trained = s.lora.active
    if s.lora and s.lora.in_4_bits:
        here += sum(taken / 2 - numbers for numbers, taken in s.lora.in_4_bits)
    if s.copies_of_model > 1:
        sent = PSGD_SHARE if s.psgd_rank else 1
        return 2 * gradients * trained * sent * (1 - 1 / s.copies_of_model)
    return (here * weights + trained * gradients) / s.stages * (1 - 1 / s.ranks)


def step_seconds(sizes: Sizes, s: Settings, flops: float, bandwidth: float) -> float:
    accum, stages, total = s.grad_accum_steps, s.stages, sizes.parameters
    # A stage has its share of a micro-batch, but all of LAUNCH. It idles for stages - 1
    # micro-batches, half as long with two pieces, and waits for all it sends.
    pieces = 2 if s.schedule in ("dualpipev", "interleaved", "v") else 1
    micro = (micro_batch_seconds(sizes, s, flops) - LAUNCH) / stages + LAUNCH
    if s.activations_on_host:  # there and back
        micro += exposed(4 * sizes.hidden * s.tokens * len(sizes.blocks) / TO_HOST, micro)
    step = (accum + (stages - 1) / pieces) * (micro + waits_seconds(sizes, s, bandwidth))
    if stages > 1:  # hidden states and their gradients, and those of a tied head
        sent = 4 * sizes.hidden * accum * s.tokens * pieces
        if sizes.tied and s.schedule != "dualpipev" and not s.lora:
            sent += 4 * sizes.embedding
        step += sent / bandwidth
    each = s.reshard_after_forward or s.optimizer_on_host  # micro-batch communicates
    step += exposed(shared_bytes(sizes, s) / bandwidth, accum * micro if each else micro)
    if s.psgd_rank:
        step += PSGD_SECONDS * total
    if s.optimizer_on_host:  # masters and moments to the card, and back, beside a forward
        step += exposed(total * state_bytes(s) / s.ranks / TO_HOST, micro / 3)
    return step
