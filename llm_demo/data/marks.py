"""Keys of a turn that say whether it is learnt, and other keys that may say so."""

import functools
import re

# Keys of a turn, by several trainers; 0 or false: not learnt.
MARKS = (
    "weight",
    "train",
    "training",
    "trainable",
    "loss",
    "loss_mask",
    "loss_scale",
    "step_loss_mask",
)
# Words in a key's name: it may say what is learnt; it says so by what it excludes.
MAY_MARK = re.compile(
    "mask(s|ed|ing)?|loss(es)?|train(s|ed|ing|able)?|learn(s|ed|t|ing|able)?|weight(s|ed)?"
    "|ignore[ds]?|skip(s|ped)?"
)
EXCLUDES = re.compile(
    "masked|ignore[ds]?|skip(s|ped)?|no|not|non|dont|never|without|exclude[ds]?|drop(s|ped)?"
)
AS_TEXT = {"true": 1, "yes": 1, "1": 1, "false": 0, "no": 0, "0": 0}  # values in tables


def may_exclude(key: str, value) -> bool:
    """Whether a key that is not known may say that something is not learnt."""
    excluding = _excluding(key)
    if not excluding or value in (None, "", [], {}):
        return False
    if isinstance(value, (list, dict)):
        return True  # of parts
    if isinstance(value, str):
        value = AS_TEXT.get(value.lower())
    return value in excluding


@functools.lru_cache(maxsize=1000)
def _excluding(key: str) -> tuple[int, ...]:
    """The values of a key that may exclude something, by the words of its name."""
    words = [word.lower() for word in re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", key)]
    if not any(map(MAY_MARK.fullmatch, words)):
        return ()
    if words[0] == "mask":  # to some 0 means not learnt, to others 1 does
        return (0, 1)
    return (len([word for word in words if EXCLUDES.fullmatch(word)]) % 2,)  # "not masked": 0


@functools.cache
def reads(template: str, key: str) -> bool:
    """Whether a chat template reads a key, as message.key or message['key']."""
    return re.search(rf"[.'\"]{re.escape(key)}\b", template) is not None
