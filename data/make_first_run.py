"""Write data/first_run.jsonl and data/first_run.heldout.jsonl: short tasks with a rule behind them.

    python data/make_first_run.py

The words and numbers of the held-out questions occur in training, but no held-out question does:
these numbers were never added or compared, these words never sorted together, in any order, and
this word was never asked for in this wording. Memorised answers do not help; the rule does. The
same seed gives the same files.
"""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).resolve().parent
SEED = 15
TRAIN, HELDOUT = 4800, 200  # rows, the same number of each task
SHARE = 8  # one in so many combinations is held out

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

Question = tuple[frozenset, str, str]  # what is held out as one, question, answer


def opposites() -> Iterator[Question]:
    words = dict(pair.split() for pair in OPPOSITES.split(", "))
    yield from pairs("What is the opposite of {} and {}?", words | {b: a for a, b in words.items()})


def plurals() -> Iterator[Question]:
    words = dict(pair.split() for pair in PLURALS.split(", "))
    yield from pairs("What is the plural of {} and {}?", words)


def calendar() -> Iterator[Question]:
    for names, what in ((DAYS, "days"), (MONTHS, "months")):
        after = dict(zip(names, names[1:] + names[:1], strict=True))
        before = {b: a for a, b in after.items()}
        yield from pairs(f"Which {what} come after {{}} and {{}}?", after)
        yield from pairs(f"Which {what} come before {{}} and {{}}?", before)


def pairs(ask: str, answers: dict[str, str]) -> Iterator[Question]:
    for a, b in itertools.permutations(answers, 2):
        yield frozenset((ask, a, b)), ask.format(a, b), f"{answers[a]}, {answers[b]}"


def sums() -> Iterator[Question]:
    for a, b in itertools.product(range(1, 10), repeat=2):
        yield (a, b), f"What is {a} + {b}?", str(a + b)


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


TASKS = (opposites, plurals, calendar, sums, sorting, units, reply_format)


def main() -> None:
    rng = random.Random(SEED)
    train, heldout = [], []
    for task in TASKS:
        questions = list(task())
        keys = list(dict.fromkeys(key for key, *_ in questions))
        kept = set(rng.sample(keys, max(3, len(keys) // SHARE)))
        new = [row for key, *row in questions if key in kept]
        known = [row for key, *row in questions if key not in kept]
        heldout += rng.sample(new, min(len(new), HELDOUT // len(TASKS)))
        rng.shuffle(known)
        train += itertools.islice(itertools.cycle(known), TRAIN // len(TASKS))
    for name, rows in (("first_run", train), ("first_run.heldout", heldout)):
        rng.shuffle(rows)
        with (DATA / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for prompt, answer in rows:
                out.write(json.dumps({"prompt": prompt, "completion": f"Answer: {answer}"}) + "\n")


if __name__ == "__main__":
    main()
