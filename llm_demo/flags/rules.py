"""Which flags need others, and which do not work together: one table for all scripts.

A rule of another form, which computes with values, is a `check` of the flag's group. What depends
on the model or the device is refused later, by model/check_config.py, run/choices.py and
fsdp/sharding.py."""

from typing import NamedTuple

from llm_demo.core.errors import UserError

NEEDS, NOT_WITH = "needs", "does not work with"


class Rule(NamedTuple):
    """flag and other: a flag that is set to more than its default, or NAME=VALUE."""

    flag: str
    relation: str  # NEEDS or NOT_WITH
    other: str
    why: str = ""


RULES = (
    # data
    Rule("input_key", NEEDS, "target_key", "they name a pair of columns"),
    Rule("target_key", NEEDS, "input_key", "they name a pair of columns"),
    Rule("train_on_prompt", NOT_WITH, "learn_turns=last", "it trains on every token"),
    Rule("train_on_prompt", NOT_WITH, "learn_reasoning=false", "it trains on every token"),
    Rule("eval_fraction", NOT_WITH, "eval_json", "it splits --train_json"),
    # training
    Rule("fp8", NOT_WITH, "dtype=fp16", "it takes bf16"),
    Rule("fp8", NOT_WITH, "router_aux_loss", "this counts the experts chosen without fp8"),
    Rule("activation_memory_budget", NOT_WITH, "compile=false", "it is of compiled blocks"),
    Rule("psgd_rank", NEEDS, "replicas", "it compresses sums over them"),
    Rule("psgd_rank", NOT_WITH, "dtype=fp16", "its errors would depend on the loss scale"),
    Rule("psgd_rank", NOT_WITH, "sequence_parallel"),
    Rule("psgd_rank", NOT_WITH, "optimizer_on_host", "its errors stay on the device"),
    # a run
    Rule("card", NEEDS, "estimate", "it is the GPU to estimate for"),
    Rule("resume=auto", NEEDS, "output_dir", "that is the run to resume"),
    Rule("resume", NOT_WITH, "overwrite", "it keeps the run's folder"),
    Rule("export", NOT_WITH, "save=false", "it converts the last checkpoint"),
    Rule("early_stopping", NEEDS, "eval_every", "it counts evaluations"),
    Rule("save_every", NOT_WITH, "save=false"),
    # ranks
    Rule("reshard_after_forward", NOT_WITH, "fsdp=false"),
    Rule("replicas", NOT_WITH, "fsdp=false"),
    Rule("expert_parallel", NOT_WITH, "fsdp=false"),
    Rule("sequence_parallel", NOT_WITH, "fsdp=false"),
    Rule("tensor_parallel", NOT_WITH, "fsdp=false"),
    Rule("copy_engines", NOT_WITH, "fsdp=false"),
    Rule("expert_parallel", NOT_WITH, "replicas"),
    Rule("tensor_parallel", NOT_WITH, "replicas", "its ranks share one copy of the model"),
    Rule("tensor_parallel", NOT_WITH, "sequence_parallel", "both cut rows into slices"),
    # host memory
    Rule("activations_on_host", NEEDS, "use_activation_checkpointing", "it moves blocks' inputs"),
    Rule("activations_on_host", NOT_WITH, "blocks_per_unit", "it moves single blocks' inputs"),
    # experts
    Rule("freeze_router", NOT_WITH, "optimizer_on_host"),
    Rule("freeze_router", NOT_WITH, "router_aux_loss", "this trains the routers"),
    # adapters; --adapter sets --lora_rank
    Rule("lora_targets", NEEDS, "lora_rank", "that or --adapter makes adapters"),
    Rule("lora_alpha", NEEDS, "lora_rank", "that or --adapter makes adapters"),
    Rule("lora_dropout", NEEDS, "lora_rank", "that or --adapter makes adapters"),
    Rule("base_bits", NEEDS, "lora_rank", "that or --adapter makes adapters"),
    Rule("lora_rank", NOT_WITH, "psgd_rank", "adapters' gradients are small already"),
    Rule("lora_rank", NOT_WITH, "optimizer_on_host", "adapters' optimizer states are small"),
    Rule("lora_rank", NOT_WITH, "router_aux_loss", "routers are frozen too"),
    Rule("lora_rank", NOT_WITH, "router_bias_update", "routers are frozen too"),
    Rule("lora_dropout", NOT_WITH, "tensor_parallel", "ranks would drop different inputs"),
    Rule("base_bits", NOT_WITH, "tensor_parallel"),
    Rule("base_bits", NOT_WITH, "fp8"),
)


def check_rules(args) -> None:
    """Raise UserError for the first rule that these flags break. args: a dataclass of flags."""
    for rule in RULES:
        if is_broken(rule, args):
            raise UserError(message_of(rule))


def is_broken(rule: Rule, args) -> bool:
    """Whether these flags break a rule. A rule about a flag that the script lacks is not broken."""
    other = holds(rule.other, args)
    return holds(rule.flag, args) and other == (rule.relation == NOT_WITH)


def holds(condition: str, args) -> bool:
    name, _, wanted = condition.partition("=")
    field = args.__dataclass_fields__.get(name)
    if field is None:
        return False
    value = getattr(args, name)
    if wanted:
        return str(value).lower() == wanted
    # not `in`, for which 0 is False
    without_effect = value is None or value is False or value == ""
    return not without_effect and value not in (field.default, field.metadata["off"])


def message_of(rule: Rule) -> str:
    reason = f": {rule.why}" if rule.why else ""
    return f"{spelt(rule.flag)} {rule.relation} {spelt(rule.other)}{reason}"


def spelt(condition: str) -> str:
    """A condition as a command line has it."""
    name, _, value = condition.partition("=")
    if value == "false":
        return f"--no_{name}"
    return f"--{name} {value}".strip()
