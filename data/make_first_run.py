"""Write data/first_run.jsonl and data/first_run.heldout.jsonl: short tasks with a rule behind them.

    python data/make_first_run.py

The words and numbers of the held-out questions occur in training, but never together: these two
numbers were never added, these three words never sorted, this name never had this age, in any
order. A memorised answer does not help, the rule does. The same seed gives the same files.
"""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).resolve().parent
SEED = 15
HELD_OUT = 8  # one combination in eight

OPPOSITES = (
    "hot cold, early late, big small, fast slow, open closed, full empty, high low, long short, "
    "old new, good bad, true false, first last"
)
PLURALS = (
    "bird birds, book books, tree trees, dog dogs, key keys, river rivers, city cities, box boxes, "
    "bus buses, child children, knife knives, egg eggs, page pages, wall walls, leg legs, foot feet"
)
WORDS = "book circle dog egg fish garden hotel iron jar key".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
UNITS = "m cm 00, km m 000, kg g 000, cm mm 0, euros cents 00, centuries years 00"
NAMES = "Adam Anna Ben Carl Carla Lena".split()

Question = tuple[object, str, str]  # what is held out as one, question, answer


def opposites() -> Iterator[Question]:
    words = dict(pair.split() for pair in OPPOSITES.split(", "))
    yield from pairs("What is the opposite of {} and {}?", words | {b: a for a, b in words.items()})


def plurals() -> Iterator[Question]:
    words = dict(pair.split() for pair in PLURALS.split(", "))
    yield from pairs("What is the plural of {} and {}?", words)


def days() -> Iterator[Question]:
    after = dict(zip(DAYS, DAYS[1:] + DAYS[:1], strict=True))
    yield from pairs("Which days come after {} and {}?", after)
    yield from pairs("Which days come before {} and {}?", {b: a for a, b in after.items()})


def months() -> Iterator[Question]:
    after = dict(zip(MONTHS, MONTHS[1:] + MONTHS[:1], strict=True))
    yield from pairs("Which months come after {} and {}?", after)


def pairs(ask: str, answers: dict[str, str]) -> Iterator[Question]:
    for a, b in itertools.permutations(answers, 2):
        if (answers[a], answers[b]) != (b, a):  # not the opposites of two opposites
            yield frozenset((ask, a, b)), ask.format(a, b), f"{answers[a]}, {answers[b]}"


def sums() -> Iterator[Question]:
    numbers = [n for n in range(10, 45) if n % 10 < 5]  # nothing to carry
    for a, b in itertools.product(numbers, repeat=2):
        yield frozenset((a, b)), f"What is {a} + {b}?", str(a + b)


def sorting() -> Iterator[Question]:
    for words in itertools.permutations(WORDS, 3):
        yield frozenset(words), f"Sort {', '.join(words)}.", ", ".join(sorted(words))


def units() -> Iterator[Question]:
    for large, small, zeros in (unit.split() for unit in UNITS.split(", ")):
        for n in range(10, 100):
            yield (small, n), f"How many {small} are {n} {large}?", f"{n}{zeros} {small}"


def reply_format() -> Iterator[Question]:
    for name, age in itertools.product(NAMES, range(10, 100)):
        answer = json.dumps({"name": name, "age": age})
        yield (name, age), f"Reply in JSON: {name} is {age} years old.", answer


# The share of each: digits take longer to learn than words.
TASKS = {
    opposites: 1, plurals: 1, days: 1, months: 1, sums: 2, sorting: 1, units: 1, reply_format: 1,
}  # fmt: skip
SHOWN = (opposites, days, reply_format)  # first in the held-out file: a run shows three answers


def main() -> None:
    rng = random.Random(SEED)
    train, heldout, shown = [], [], []
    for task, share in TASKS.items():
        questions = list(task())
        keys = list(dict.fromkeys(key for key, *_ in questions))
        kept = set(rng.sample(keys, len(keys) // HELD_OUT))
        new = [row for key, *row in questions if key in kept]
        known = [row for key, *row in questions if key not in kept]
        rng.shuffle(new)
        rng.shuffle(known)
        shown += [new.pop()] * (task in SHOWN)
        heldout += new[:24]
        train += itertools.islice(itertools.cycle(known), 600 * share)
    rng.shuffle(train)
    rng.shuffle(heldout)
    for name, rows in (("first_run", train), ("first_run.heldout", shown + heldout)):
        with (DATA / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for prompt, answer in rows:
                out.write(json.dumps({"prompt": prompt, "completion": f"Answer: {answer}"}) + "\n")


if __name__ == "__main__":
    main()
